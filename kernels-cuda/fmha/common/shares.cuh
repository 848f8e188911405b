// Split-KV in equal shares: the blocks of keys that a launch's tiles see lie in one row, sequence after sequence, tile after tile, and
// each CTA walks as long a piece of it as every other, whatever the lengths.
//
//   tiles    |---- sequence 0, head 0 ----|---- sequence 0, head 1 ----|-1-|-1-|---- sequence 2, head 0 ...
//   CTAs     0           |1          |2          |3          |4          |5          |6          |7
//   parts    0           |1     |2   |3          |4     |5   |6 |7  |8  |9          |10 ...
//
// A part is what a CTA walks of a tile: it ends where the CTA's share ends or the tile does, so part n of the launch is that of CTA
// c and tile t with c + t = n. Nothing is looked up for that but where a sequence begins in the row, which the last CTA, whose
// share is none of the longer ones, leaves for the merge (`kSharesHeader` words, then a word a sequence and one more).
#pragma once
#include <fmha/common/share_ends.cuh>
#include <fmha/common/work.cuh>
#include <fmha/ptx/collective.cuh>
#include <fmha/ptx/warp.cuh>

namespace fmha {

// The blocks of keys that each tile of a sequence counts for.
struct BlocksOfTile {
  int32_t first, count;
};

// Those that any of the sequence's queries sees, at least one; none where it has no queries.
template <FwdSpec spec, auto tile>
FMHA_DEVICE BlocksOfTile blocks_of_tile(const FwdParams& p, int32_t i_batch) {
  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
  if (span.seqlen_q == 0) return {0, 0};
  const Range keys = k_range(resolve_band(p.mask, span.seqlen_q, span.seqlen_k), {0, span.seqlen_q}, span.seqlen_k);
  const int32_t first = keys.begin / tile.block_n;
  return {first, max(ceil_div(keys.end, tile.block_n) - first, 1)};
}

// Shares that a CTA walks, one after another.
template <auto tile>
FMHA_DEVICE constexpr int shares_a_cta() {
  if constexpr (requires { tile.shares_a_cta; }) {
    return tile.shares_a_cta;
  } else {
    return 1;
  }
}

// A CTA's walk through its shares. All lanes of each of its warps do the same.
template <FwdSpec spec, auto tile>
struct Share {
  const FwdParams& p;
  const TileSchedule& schedule;
  const int32_t tiles_of_sequence, lane = threadIdx.x % 32;
  int32_t at = 0, end = 0, stop = 0;     // of the row: where the CTA stands, where its present share ends, and where its last one does
  int32_t index = blockIdx.x * shares_a_cta<tile>();  // its present share
  Shares shares = {0, 0};
  int32_t i_batch = -1, first_tile = 0;  // the sequence that it stands in, and tiles before that one
  int32_t begin = 0;                     // of the row: where the sequence begins
  BlocksOfTile blocks = {0, 0};

  // `leaves`: the warp is the one that leaves for the merge how shares were dealt, in the last CTA.
  FMHA_DEVICE Share(const FwdParams& p, const TileSchedule& schedule, bool leaves)
      : p(p), schedule(schedule), tiles_of_sequence(schedule.num_heads / max(p.batch, 1) * schedule.num_m_blocks) {
    const int32_t total = sum_of_sequences();
    shares = Shares::of(total, tile.shares, tile.split_keys / tile.block_n);
    at = min(shares.begin(index), total);
    end = min(shares.begin(index + 1), total);
    stop = min(shares.begin(min(index + shares_a_cta<tile>(), tile.shares)), total);
    if (leaves && blockIdx.x + 1 == gridDim.x) leave_for_merge();
    if (at < stop) find();
  }

  // Of sequence `i`, all tiles.
  FMHA_DEVICE int32_t blocks_of(int32_t i) const { return i < p.batch ? blocks_of_tile<spec, tile>(p, i).count * tiles_of_sequence : 0; }

  FMHA_DEVICE int32_t sum_of_sequences() const {
    int32_t sum = 0;
    // Lengths of several at a time are under way.
#pragma unroll 4
    for (int32_t first = 0; first < p.batch; first += 32) sum += blocks_of(first + lane);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += ptx::shfl_xor(sum, step);
    return sum;
  }

  // The sum of the lanes up to this one.
  FMHA_DEVICE int32_t scan(int32_t value) const {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t before = ptx::shfl_idx(value, max(lane - step, 0));
      if (lane >= step) value += before;
    }
    return value;
  }

  // The sequence that the share begins in.
  FMHA_DEVICE void find() {
    int32_t before = 0;
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
    first_tile = sequence * tiles_of_sequence;
    blocks = blocks_of_tile<spec, tile>(p, sequence);
  }

  FMHA_DEVICE void leave_for_merge() const {
    int32_t* const table = static_cast<int32_t*>(p.workspace) + kSharesAt;
    if (lane == 0) {
      table[0] = shares.each;
      table[1] = shares.longer;
    }
    int32_t before = 0;
    for (int32_t first = 0; first <= p.batch; first += 32) {
      const int32_t own = blocks_of(first + lane), up_to = before + scan(own);
      if (first + lane <= p.batch) table[kSharesHeader + first + lane] = up_to - own;
      before = ptx::shfl_idx(up_to, 31);
    }
  }

  FMHA_DEVICE bool is_over() const { return at >= stop; }

  // The next part of the share; num_blocks 0 where its tile has no rows.
  FMHA_DEVICE Work next() {
    if (shares_a_cta<tile>() > 1 && at >= end) end = min(shares.begin(++index + 1), stop);
    while (at >= begin + blocks.count * tiles_of_sequence) enter(i_batch + 1, begin + blocks.count * tiles_of_sequence);
    const int32_t of_tile = (at - begin) / blocks.count, tile_begin = begin + of_tile * blocks.count;
    const int32_t upper = min(tile_begin + blocks.count, end);
    const int32_t head = of_tile / schedule.num_m_blocks, i_m = of_tile - head * schedule.num_m_blocks;
    const Range keys = {(blocks.first + at - tile_begin) * tile.block_n, (blocks.first + upper - tile_begin) * tile.block_n};
    Work work = resolve_rows<spec, tile>(p, {i_batch, head, i_m}, keys);
    work.part = index + first_tile + of_tile;
    at = upper;
    return work;
  }
};

}  // namespace fmha
