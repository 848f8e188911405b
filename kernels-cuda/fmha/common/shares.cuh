// Split-KV in equal shares: every CTA walks the same number of key blocks, whatever the lengths of the sequences.
//
// All tiles of a sequence see the same blocks, one row of them, sequence after sequence. The row is cut into equal
// stretches, and each is walked by as many CTAs as a sequence has tiles, a tile each, at the same time: rows of
// neighbouring heads, which lie side by side in memory, are read together.
//
//   row      |---- sequence 0 ----|-1-|-2-|-------- sequence 3 --------| ...
//   stretch  0           |1          |2          |3          |4
//   parts    0           |1       |2  |3  |4  |5 |6          |7        | ...
//
// A part is what a CTA walks of a tile: it ends where the stretch ends or the sequence does, and its number follows
// from both (`part_of_tile`). Nothing is looked up for that but where a sequence begins in the row, which the last CTA
// leaves for the merge (`kSharesHeader` words, then a word a sequence and one more).
#pragma once
#include <fmha/share_ends.h>
#include <fmha/common/work.cuh>
#include <fmha/ptx/collective.cuh>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/warp.cuh>

namespace fmha {

// Number of key blocks that each tile of a sequence has.
struct BlocksOfTile {
  int32_t first, count;
};

// Blocks that any of the sequence's queries sees, at least one; 0 if the sequence has no queries.
template <FwdSpec spec, auto tile>
FMHA_DEVICE BlocksOfTile blocks_of_tile(const FwdParams& p, int32_t i_batch) {
  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
  if (span.seqlen_q == 0) return {0, 0};
  const Range keys = k_range(resolve_band(p.mask, span.seqlen_q, span.seqlen_k), {0, span.seqlen_q}, span.seqlen_k);
  const int32_t first = keys.begin / tile.block_n;
  return {first, max(ceil_div(keys.end, tile.block_n) - first, 1)};
}

// Number of shares that a CTA processes one after another.
template <auto tile>
FMHA_DEVICE constexpr int shares_a_cta() {
  if constexpr (requires { tile.shares_a_cta; }) {
    return tile.shares_a_cta;
  } else {
    return 1;
  }
}

// A CTA's loop over its shares. All lanes of all its warps take the same steps.
template <FwdSpec spec, auto tile>
struct Share {
  const FwdParams& p;
  const TileSchedule& schedule;
  const int32_t tiles_of_sequence, lane = threadIdx.x % 32;
  Shares stretches = {0, 0};
  int32_t total = 0;                 // blocks of the row
  int32_t index = blockIdx.x;        // the present share: of a stretch and a tile
  int32_t stretch = 0, in_sequence = 0;
  int32_t at = 0, end = 0;           // of the row: where the CTA stands, and where its stretch ends
  int32_t i_batch = -1, begin = 0;   // the sequence that it stands in, and where that begins in the row
  BlocksOfTile blocks = {0, 0};

  // `leaves`: whether this warp, one of the last CTA, stores for the merge where each sequence's blocks begin.
  FMHA_DEVICE Share(const FwdParams& p, const TileSchedule& schedule, bool leaves)
      : p(p), schedule(schedule), tiles_of_sequence(max(schedule.num_heads / max(p.batch, 1) * schedule.num_m_blocks, 1)) {
    total = sum_of_sequences();
    stretches = Shares::of(total, tile.shares / tiles_of_sequence, tile.split_keys / tile.block_n);
    if (leaves && blockIdx.x + 1 == gridDim.x) leave_for_merge();
    begin_share();
  }

  FMHA_DEVICE void begin_share() {
    stretch = index / tiles_of_sequence;
    in_sequence = index - stretch * tiles_of_sequence;
    at = min(stretches.begin(stretch), total);
    end = min(stretches.begin(stretch + 1), total);
    if (stretch >= tile.shares / tiles_of_sequence) at = end;  // shares that make no whole stretch
    if (at < end) find();
  }

  // Number of key blocks of sequence `i`.
  FMHA_DEVICE int32_t blocks_of(int32_t i) const { return i < p.batch ? blocks_of_tile<spec, tile>(p, i).count : 0; }

  FMHA_DEVICE int32_t sum_of_sequences() const {
    int32_t sum = 0;
    // Starts loads of up to 1024 lengths before the first length is used.
    if (p.seqused_k && lane * 32 < p.batch) ptx::prefetch_l1(p.seqused_k + lane * 32);
#pragma unroll 1
    for (int32_t first = 0; first < p.batch; first += 32) sum += blocks_of(first + lane);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += ptx::shfl_xor(sum, step);
    return sum;
  }

  // Inclusive prefix sum over the lanes of a warp.
  FMHA_DEVICE int32_t scan(int32_t value) const {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t before = ptx::shfl_idx(value, max(lane - step, 0));
      if (lane >= step) value += before;
    }
    return value;
  }

  // Finds the sequence in which the share begins.
  FMHA_DEVICE void find() {
    int32_t before = 0;
#pragma unroll 1
    for (int32_t first = 0; first < p.batch; first += 32) {
      const int32_t own = blocks_of(first + lane), up_to = before + scan(own);
      const uint32_t beyond = ptx::vote_ballot(up_to > at);
      if (beyond != 0) {
        const int32_t there = __ffs(int(beyond)) - 1;
        enter(first + there, ptx::shfl_idx(up_to - own, there));
        return;
      }
      before = ptx::shfl_idx(up_to, 31);
    }
  }

  FMHA_DEVICE void enter(int32_t sequence, int32_t from) {
    i_batch = sequence;
    begin = from;
    blocks = blocks_of_tile<spec, tile>(p, sequence);
  }

  FMHA_DEVICE void leave_for_merge() const {
    int32_t* const table = static_cast<int32_t*>(p.workspace) + kSharesAt;
    if (lane == 0) {
      table[0] = stretches.each;
      table[1] = stretches.longer;
    }
    int32_t before = 0;
#pragma unroll 1
    for (int32_t first = 0; first <= p.batch; first += 32) {
      const int32_t own = blocks_of(first + lane), up_to = before + scan(own);
      if (first + lane <= p.batch) table[kSharesHeader + first + lane] = up_to - own;
      before = ptx::shfl_idx(up_to, 31);
    }
  }

  // Whether the CTA has finished its present share and all later ones.
  FMHA_DEVICE bool is_over() {
    if constexpr (shares_a_cta<tile>() > 1) {
      while (at >= end && index + int32_t(gridDim.x) < tile.shares) {
        index += gridDim.x;
        begin_share();
      }
    }
    return at >= end;
  }

  // The next part of the share; num_blocks is 0 if its tile has no rows.
  FMHA_DEVICE Work next() {
    while (at >= begin + blocks.count) enter(i_batch + 1, begin + blocks.count);
    const int32_t upper = min(begin + blocks.count, end);
    const int32_t head = in_sequence / schedule.num_m_blocks, i_m = in_sequence - head * schedule.num_m_blocks;
    const Range keys = {(blocks.first + at - begin) * tile.block_n, (blocks.first + upper - begin) * tile.block_n};
    Work work = resolve_rows<spec, tile>(p, {i_batch, head, i_m}, keys);
    work.part = part_of_tile(stretch, i_batch, tiles_of_sequence, in_sequence);
    at = upper;
    return work;
  }
};

}  // namespace fmha
