// One sequence, resolved from what the device reads: where its rows start and how many are logical.
#pragma once
#include <fmha/params.h>
#include <fmha/spec.h>

namespace fmha {

struct SeqSpan {
  int32_t i_batch;        // the batch coordinate of masks, biases, descales and dropout
  int32_t storage_batch;  // the one to address Q, K, V, O with: 0 when packed
  int32_t q_row, seqlen_q;
  int32_t k_row, seqlen_k;
};

FMHA_DEVICE SeqSpan resolve_seq(const FwdParams& p, SeqKind kind, int32_t i_batch) {
  SeqSpan span = {i_batch, i_batch, 0, p.seqlen_q, 0, p.seqlen_k};
  if (kind == SeqKind::Group) {
    span.storage_batch = 0;
    span.q_row = p.cu_seqlens_q[i_batch];
    span.k_row = p.cu_seqlens_k[i_batch];
    span.seqlen_q = p.cu_seqlens_q[i_batch + 1] - span.q_row;
    span.seqlen_k = p.cu_seqlens_k[i_batch + 1] - span.k_row;
  }
  if (p.seqused_q) span.seqlen_q = p.seqused_q[i_batch];
  if (p.seqused_k) span.seqlen_k = p.seqused_k[i_batch];
  return span;
}

// Element offset of a tensor's row: the sequence's i-th, of one head.
FMHA_DEVICE int64_t row_offset(const View& x, int32_t storage_batch, int64_t row, int32_t head) {
  return storage_batch * x.batch + row * x.row + head * x.head;
}

FMHA_DEVICE int64_t lse_offset(const FwdParams& p, const SeqSpan& span, int32_t i_head, int32_t i) {
  return span.storage_batch * p.lse_batch + i_head * p.lse_head + span.q_row + i;
}

FMHA_DEVICE float scalar_of(const HeadScalars& x, int32_t i_batch, int32_t i_head, float if_none) {
  return x.data ? x.data[int64_t(i_batch) * x.batch + int64_t(i_head) * x.head] : if_none;
}

}  // namespace fmha
