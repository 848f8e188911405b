// One sequence, resolved from numbers that the device reads: where its rows lie and how many are logical.
#pragma once
#include <fmha/params.h>
#include <fmha/spec.h>

namespace fmha {

struct SeqSpan {
  int32_t i_batch;        // the batch coordinate of masks, biases, descales and dropout
  int32_t storage_batch;  // the one to address Q and O with: 0 when packed
  int32_t q_row, seqlen_q;
  int32_t k_row, seqlen_k;  // where key j lies: kv_row
};

// A packed sequence's rows.
struct PackedRows {
  int32_t first, count;
};

// Invalid offsets (decreasing, or past the tensor's `total` rows) are clamped: the result is then meaningless, but no
// row outside the tensor is accessed.
FMHA_DEVICE PackedRows packed_rows(const int32_t* cu_seqlens, int32_t i_batch, int32_t total, int32_t longest) {
  const int32_t first = clamp(cu_seqlens[i_batch], 0, total);
  const int32_t end = clamp(cu_seqlens[i_batch + 1], first, total);
  return {first, min(end - first, longest)};
}

FMHA_DEVICE SeqSpan resolve_seq(const FwdParams& p, QLayout q_layout, KvKind kv_layout, int32_t i_batch) {
  SeqSpan span = {i_batch, i_batch, 0, p.seqlen_q, 0, p.seqlen_k};
  if (q_layout == QLayout::Packed) {
    span.storage_batch = 0;
    const PackedRows rows = packed_rows(p.cu_seqlens_q, i_batch, p.total_q, p.seqlen_q);
    span.q_row = rows.first;
    span.seqlen_q = rows.count;
  }
  if (kv_layout == KvKind::Packed) {
    const PackedRows rows = packed_rows(p.cu_seqlens_k, i_batch, p.total_k, p.seqlen_k);
    span.k_row = rows.first;
    span.seqlen_k = rows.count;
  }
  // seqused_q and seqused_k are clamped to the rows that exist.
  if (p.seqused_q) span.seqlen_q = clamp(p.seqused_q[i_batch], 0, span.seqlen_q);
  if (p.seqused_k) span.seqlen_k = clamp(p.seqused_k[i_batch], 0, span.seqlen_k);
  // A pool of 0 pages holds no keys, so lengths are 0.
  if (kv_layout == KvKind::Paged && p.num_pages == 0) span.seqlen_k = 0;
  return span;
}

// Place of a row of K or V: the batch index (a page if they are paged) and the row to address it with.
struct KvRow {
  int32_t batch, row;
};

// Key j of a sequence. An invalid entry of the block table is clamped to the nearest page: the result is then
// meaningless, but nothing outside the pool is read.
FMHA_DEVICE KvRow kv_row(const FwdParams& p, KvKind layout, const SeqSpan& span, int32_t j) {
  // The batch stride of a packed tensor is 0.
  if (layout != KvKind::Paged) return {span.i_batch, span.k_row + j};
  const int32_t page = p.block_table[span.i_batch * p.block_table_batch + j / p.page_size];
  return {clamp(page, 0, p.num_pages - 1), j % p.page_size};
}

// Element offset of a tensor's row, of one head.
FMHA_DEVICE int64_t row_offset(const View& x, int32_t storage_batch, int64_t row, int32_t head) {
  return storage_batch * x.batch + row * x.row + head * x.head;
}

FMHA_DEVICE int64_t row_offset(const View& x, KvRow at, int32_t head) { return row_offset(x, at.batch, at.row, head); }

// Element offset of query i. A call that rotates packed queries keeps each sequence at its own place in the workspace
// and gives Q a batch stride. Otherwise a packed tensor's batch stride is 0.
FMHA_DEVICE int64_t query_offset(const FwdParams& p, const SeqSpan& span, int32_t i, int32_t head) {
  return row_offset(p.q, span.i_batch, (p.q.batch == 0 ? int64_t(span.q_row) : 0) + i, head);
}

FMHA_DEVICE int64_t lse_offset(const FwdParams& p, const SeqSpan& span, int32_t i_head, int32_t i) {
  return span.storage_batch * p.lse_batch + i_head * p.lse_head + span.q_row + i;
}

// Offset j - i, for the call's query and key indices, of the diagonal from which ALiBi measures distances.
FMHA_DEVICE int32_t alibi_diagonal(const FwdParams& p, int32_t seqlen_q, int32_t seqlen_k) {
  return p.alibi_shift + (p.alibi_bottom_right ? seqlen_k - seqlen_q : 0);
}

FMHA_DEVICE float scalar_of(const HeadScalars& x, int32_t i_batch, int32_t i_head, float if_none) {
  return x.data ? x.data[int64_t(i_batch) * x.batch + int64_t(i_head) * x.head] : if_none;
}

}  // namespace fmha
