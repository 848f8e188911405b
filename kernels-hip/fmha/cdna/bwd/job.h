// Code that the backward kernels on MFMA and on WMMA share around their products: what a launch sums, what a
// workgroup owns and walks, and where it lies in memory and in LDS.
//
// A wave owns rows to whose gradients nothing else adds: queries, whose dQ it sums, or keys of a KV head, whose dK and
// dV it sums over all query heads of the group. Its workgroup walks the rows of the other side in blocks. So no sum is
// kept in memory, GQA takes no atomics and every sum has one order; the price is that scores and dP are computed twice,
// seven products in place of five.
//
//   owner    own rows (registers)   walks (LDS)    scores and dP        sums
//   dQ       Q, dO                  K, V           S^T, dP^T            dQ^T += K^T dS^T
//   dK, dV   K, V                   Q, dO          S, dP                dV^T += dO^T P, dK^T += Q^T dS
//   captured tensors (captured.h): as dQ, without its sum
//
// In both kinds of kernels an accumulator of scores has an own row in each lane and the walked rows along its
// registers, so that P and dS, packed, are the B operand of the sums: neither goes through LDS. The walked rows lie
// in LDS twice, as they are for scores and dP, and transposed for the sums.
//
// `U` is the matrix unit: OnMfma (main.h) or OnWmma (fmha/rdna/bwd/main.h), with the kernel's `spec`, `tile` and `C`,
// the numbers and matrices that follow from them.
#pragma once
#include <fmha/blocks.h>
#include <fmha/bwd.h>
#include <fmha/amd/mask_lanes.h>
#include <fmha/cdna/bwd/tile.h>
#include <fmha/cdna/span.h>
#include <fmha/isa/sched.h>

namespace fmha::cdna::bwd {

constexpr int kElemBytes = 2;
constexpr int kBlockRows = 32;  // walked rows whose pairs with own rows a wave has in registers at once
using PairValues = f32x16;      // of a lane

constexpr bool owns_queries(BwdSums sums) { return sums == BwdSums::Dq || sums == BwdSums::Captured; }
constexpr bool needs_dp(BwdSums sums) { return sums != BwdSums::Dv; }
// dQ or dK.
constexpr bool sums_scores(BwdSums sums) { return needs_dp(sums) && sums != BwdSums::Captured; }
constexpr bool sums_values(BwdSums sums) { return sums == BwdSums::DkDv || sums == BwdSums::Dv; }

struct Nothing {};
template <bool is_there, class T>
struct Maybe {
  using type = T;
};
// Empty types of their own: two members of one empty type would lie at two addresses, and take memory.
template <class T>
struct Absent {};
template <class T>
struct Maybe<false, T> {
  using type = Absent<T>;
};

// Walked rows in LDS, in the forms that products read: `rows` for scores and dP, `columns` for the sums of gradients.
template <class Rows, class Columns, bool by_row, bool by_column>
struct WalkedForms {
  static constexpr bool has_rows = by_row, has_columns = by_column;
  [[no_unique_address]] typename Maybe<by_row, Rows>::type rows;
  [[no_unique_address]] typename Maybe<by_column, Columns>::type columns;
};

// LSE in log2 and delta of the queries of a block that the loop visits.
template <int columns>
struct WalkedStats {
  alignas(16) float lse_log2[columns];
  alignas(16) float delta[columns];
};

// A stage of LDS: the operand of scores, Q or K, and the operand of dP, dO or V.
template <class Score, class Value, MatrixBwdTile tile>
struct WalkedLds {
  struct Stage {
    Score score;
    Value value;
    [[no_unique_address]] typename Maybe<!owns_queries(tile.sums), WalkedStats<tile.columns>>::type stats;
  };
  Stage stage[tile.stages];
};

// LSE in log2 and delta of a lane's own query.
struct OwnStats {
  float lse_log2_, delta_;
  FMHA_DEVICE float lse_log2(int) const { return lse_log2_; }
  FMHA_DEVICE float delta(int) const { return delta_; }
};

// Rows of a tensor, from the first row of a (sequence, head) on: they are read element by element at any address and
// stride.
struct TensorRows {
  const uint8_t* data;
  int64_t row_bytes, elem_bytes;  // from row to row, from element to element of a row
  int32_t num_rows, num_elems;    // beyond: 0

  FMHA_DEVICE TensorRows from(int32_t row) const {
    return {data + row * row_bytes, row_bytes, elem_bytes, num_rows - row, num_elems};
  }
};

// Work of one workgroup.
struct Job {
  SeqSpan span;
  MaskBand band;
  Blocks blocks;                  // of each head
  int32_t first_own;              // row
  int32_t i_head_kv, first_head;  // the first query head, and how many
  int32_t num_heads;
};

FMHA_DEVICE SeqSpan span_of(const FwdParams& p, int32_t i_batch) {
  return uniform(resolve_seq(p, p.cu_seqlens_q ? QLayout::Packed : QLayout::Batch,
                             p.cu_seqlens_k ? KvKind::Packed : KvKind::Strided, i_batch));
}

// Order of the workgroups: blocks of own rows, beginning with those that see most, and for each block all heads.
// Hardware assigns workgroups to XCDs round-robin: with a multiple of XCDs, a head's share an L2.
template <class U>
FMHA_DEVICE Job job_of(const FwdParams& p) {
  constexpr MatrixBwdTile tile = U::tile;
  constexpr bool queries_own = owns_queries(tile.sums);
  const int32_t heads_of_batch = queries_own ? p.num_heads_q : p.num_heads_kv, heads = p.batch * heads_of_batch;
  const int32_t at = workgroup_idx() / heads, head = workgroup_idx() % heads, i_head = head % heads_of_batch;
  Job job;
  job.span = span_of(p, head / heads_of_batch);
  job.band = resolve_band(p.mask, job.span.seqlen_q, job.span.seqlen_k);
  job.i_head_kv = queries_own ? i_head / p.gqa_ratio : i_head;
  job.first_head = queries_own ? i_head : i_head * p.gqa_ratio;
  job.num_heads = queries_own ? 1 : p.gqa_ratio;
  if constexpr (queries_own) {
    // A causal mask shows most keys to the last queries.
    const int32_t num = ceil_div(p.seqlen_q, tile.rows);
    job.first_own = (U::spec.mask == MaskKind::Full ? at : num - 1 - at) * tile.rows;
    const Range queries = {job.first_own, min(job.first_own + tile.rows, job.span.seqlen_q)};
    if (queries.empty()) return job;
    job.blocks = blocks_of(k_range(job.band, queries, job.span.seqlen_k),
                           sink_range(job.band, queries, job.span.seqlen_k), tile.columns);
  } else {
    job.first_own = at * tile.rows;
    const Range keys = {job.first_own, min(job.first_own + tile.rows, job.span.seqlen_k)};
    if (keys.empty()) return job;
    job.blocks = blocks_of(query_range(job.band, keys, job.span.seqlen_q), {0, 0}, tile.columns);
  }
  return job;
}

// Rows from `first` on of a tensor with query heads; the function below is for tensors with kv heads.
FMHA_DEVICE TensorRows query_rows(const View& x, const Job& job, int32_t i_head, int32_t first, int32_t num_elems) {
  const int64_t at = row_offset(x, job.span.storage_batch, int64_t(job.span.q_row) + first, i_head);
  return {static_cast<const uint8_t*>(x.data) + at * kElemBytes, x.row * kElemBytes, x.dim * kElemBytes,
          job.span.seqlen_q - first, num_elems};
}
FMHA_DEVICE TensorRows key_rows(const View& x, const Job& job, int32_t first, int32_t num_elems) {
  // The batch stride of a packed tensor is 0.
  const int64_t at = row_offset(x, job.span.i_batch, int64_t(job.span.k_row) + first, job.i_head_kv);
  return {static_cast<const uint8_t*>(x.data) + at * kElemBytes, x.row * kElemBytes, x.dim * kElemBytes,
          job.span.seqlen_k - first, num_elems};
}

}  // namespace fmha::cdna::bwd
