// Finishes dQ of a query block: brings the f32 sums of its key blocks from the accumulators' order to rows, scales them
// and rounds them once. A launch after the main kernel does so, or warps of the main kernel, block by block, as soon as
// all key blocks of a head have added their terms: the sums are then still in the L2.
#pragma once
#include <fmha/num.h>
#include <fmha/ptx/bulk.cuh>
#include <fmha/ptx/flag.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/sm90/bwd/epilogue.cuh>
#include <fmha/sm90/bwd/make_delta.cuh>

namespace fmha::sm90::bwd {

// A thread's unit of a block's sums: 16 rows of an accumulator and the four threads' eight columns of it hold whole
// pieces of 16 bytes of dQ. Of dQ these are eight dims of two queries eight apart; of its transpose 16 dims of two
// neighbouring queries. Threads beside each other have the pieces of a query that lie beside each other.
template <BwdSpec spec, Sm90BwdTile tile>
struct Unit {
  using S = Shape<spec, tile>;
  static constexpr int fours = S::transposes_dq ? 8 : 4;  // float4 of the sums
  static constexpr int stride = S::transposes_dq ? 4 : 1;  // from one to the next
  static constexpr int pieces = fours / 4;  // 16-byte pieces of either query
  static constexpr int count = S::dq_block / (4 * fours);
  static constexpr int next_query = S::transposes_dq ? 1 : 8;
  int32_t first, query, dim;  // of the float4 in the block; of the elements

  FMHA_DEVICE explicit Unit(int32_t i) {
    constexpr int groups = S::dq_columns / 8, share_fours = S::dq_share / 4;
    if constexpr (S::transposes_dq) {
      constexpr int row_blocks = S::dq_rows / 16;
      const int32_t row_block = i % row_blocks, pair = i / row_blocks % 4, group = i / (4 * row_blocks);
      first = row_block / 4 * share_fours + group * mma::kWarpgroup + row_block % 4 * 32 + pair;
      query = 8 * group + 2 * pair;
      dim = 16 * row_block;
    } else {
      const int32_t group = i % groups, row = i / groups % kSumRows, share = i / (groups * kSumRows);
      first = share * share_fours + group * mma::kWarpgroup + row * 4;
      query = row / 8 * 16 + row % 8 + (S::dq_by_columns ? 0 : share * mma::kRows);
      dim = first_dim(share, group);
    }
  }
  // Index of a unit where units with consecutive numbers are stored together: unit `pair` of the `nth` group of
  // `stride` units.
  FMHA_DEVICE static int32_t beside(int32_t nth, int32_t pair) {
    if constexpr (!S::transposes_dq) return nth;
    constexpr int row_blocks = S::dq_rows / 16;
    return nth / row_blocks * (row_blocks * stride) + pair * row_blocks + nth % row_blocks;
  }
  // First dim of a share's group of eight columns.
  FMHA_DEVICE static int32_t first_dim(int32_t share, int32_t group) {
    if constexpr (halves_blocks(tile)) {
      const int32_t behind_whole = 8 * group - S::Chunks::whole;
      return behind_whole < 0 ? S::Chunks::first_of_whole(share) + 8 * group
                              : S::Chunks::first_of_half(share) + behind_whole;
    } else {
      return 8 * group + (S::dq_by_columns ? share * S::dq_columns : 0);
    }
  }
  // Element `k` of piece `piece` of query `q` (0 or 1), from the sums that `load` has put in order.
  FMHA_DEVICE static float elem(const float4 (&sums)[fours], int q, int piece, int k) {
    const float4& four = S::transposes_dq ? sums[k] : sums[k / 2];
    const int i = S::transposes_dq ? 2 * piece + q : 2 * q + k % 2;
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
  }
  static constexpr int kSumRows = mma::kRows / 2;  // rows eight apart are one thread's
};

// Whether any key block has added to a query block. A block beyond its sequence has no sums, and the sums of a block
// that no key block sees were never written.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE bool has_sums(const BwdParams& p, const QueryBlock& block) {
  if (block.first >= block.span.seqlen_q) return false;
  if constexpr (!has_semaphores<spec, tile>()) return sees_keys<spec, tile>(p, block);
  return ptx::ld_acquire_gpu(dq_semaphore<tile>(p, stats_offset(p, block.span, block.i_head, block.first))) != 0;
}
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE const float* sums_of_block(const BwdParams& p, const QueryBlock& block) {
  return p.dq_sums + stats_offset(p, block.span, block.i_head, block.first) * Shape<spec, tile>::dq_dim;
}
// Corrects a sum of dQ before it is rounded. Additions of zeros by key blocks that a query does not see, which follow
// from its block's other queries, leave a sum as it is but for the sign of a zero and a subnormal that is stored, not
// added: ordered sums are rid of both, so that they have the same bits in every run.
template <BwdSpec spec>
FMHA_DEVICE float finished_sum(float sum) {
  return is_ordered<spec>() ? ptx::add_rn_ftz(sum, 0.f) : sum;
}
template <BwdSpec spec>
FMHA_DEVICE float dq_factor(const BwdParams& p) {
  return p.fwd.softmax_scale * dropout_factor_of_ds<spec>(p.fwd);
}

// Writes a unit's sums to dQ. Returns whether a value of this thread is NaN or infinite, where such values must be
// recomputed.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE bool store_unit(const BwdParams& p, const QueryBlock& block, const Unit<spec, tile>& unit,
                            const float4 (&sums)[Unit<spec, tile>::fours]) {
  using U = Unit<spec, tile>;
  constexpr int dim = spec.fwd.head_dim_qk;
  const SeqSpan& span = block.span;
  const float factor = dq_factor<spec>(p);
  bool non_finite = false;
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const int32_t query = block.first + unit.query + q * U::next_query;
    const int64_t row = row_offset(p.dq, span.storage_batch, int64_t(span.q_row) + query, block.i_head);
#pragma unroll
    for (int piece = 0; piece < U::pieces; ++piece) {
      const int32_t column = unit.dim + 8 * piece;
      if (query >= span.seqlen_q || column >= dim) continue;
      float values[8], zero = 0.f;
#pragma unroll
      for (int k = 0; k < 8; ++k) values[k] = finished_sum<spec>(U::elem(sums, q, piece, k)) * factor;
      if constexpr (repairs<spec>()) {
#pragma unroll
        for (int k = 0; k < 8; ++k) zero = fmaf(values[k], 0.f, zero);
        non_finite |= is_nan(zero);
      }
      store_eight<spec.dtype_grad, tile.vector_store>(p.dq.data, row + column, dim - column, values);
    }
  }
  return non_finite;
}

// Finishes dQ from the sums in memory, by `threads` threads.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE bool finish_from_memory(const BwdParams& p, const Sm90BwdSchedule& schedule, const QueryBlock& block,
                                    int32_t thread, int32_t threads) {
  using U = Unit<spec, tile>;
  bool non_finite = false;
  if (block.first >= block.span.seqlen_q) return non_finite;
  const float4* block_sums = reinterpret_cast<const float4*>(sums_of_block<spec, tile>(p, block));
  const bool none = !has_sums<spec, tile>(p, block);
  for (int32_t i = thread; i < U::count; i += threads) {
    const U unit(i);
    if (unit.dim >= spec.fwd.head_dim_qk) continue;  // of the padding: `DqOutput::is_of_head`
    float4 sums[U::fours];
#pragma unroll
    for (int f = 0; f < U::fours; ++f)
      sums[f] = none ? float4{0.f, 0.f, 0.f, 0.f} : block_sums[unit.first + f * U::stride];
    non_finite |= store_unit<spec, tile>(p, block, unit, sums);
  }
  return non_finite;
}

// Finishes dQ where each key block has stored sums of its own. They are added in the key blocks' order, with the
// rounding and the flush of subnormals of `red.add.f32`, which other calls use. CTA `i_cta` of a query block's has so
// many of its units. A thread adds up few numbers, of many parts at a time, or too few loads would be under way: with
// whole units to a thread an H200 took 3.1 us a part.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE bool finish_parts(const BwdParams& p, const Sm90BwdSchedule& schedule, const QueryBlock& block,
                              int32_t i_cta) {
  using U = Unit<spec, tile>;
  constexpr int fours = kPartFours * kRowThreads, units = fours / U::fours, at_once = 8;
  __shared__ float4 shared[units][U::fours];
  if (block.first >= block.span.seqlen_q) return false;
  const Additions<spec, tile> additions(p, schedule, block.span, block.i_head, block.first / tile.block_m);
  const float4* block_sums = reinterpret_cast<const float4*>(sums_of_block<spec, tile>(p, block));
  const int32_t first_unit = i_cta * units;
  float4* to[kPartFours];
  const float4* from[kPartFours];
  bool there[kPartFours];
#pragma unroll
  for (int n = 0; n < kPartFours; ++n) {
    // Neighbouring threads process neighbouring sums.
    const int32_t i = threadIdx.x + n * kRowThreads, within = i % (U::fours * U::stride);
    const int32_t i_unit = U::beside(i / (U::fours * U::stride), within % U::stride), f = within / U::stride;
    there[n] = first_unit + i_unit < U::count;
    const U unit(there[n] ? first_unit + i_unit : 0);
    there[n] &= unit.dim < spec.fwd.head_dim_qk && additions.count > 0;
    to[n] = &shared[i_unit][f];
    from[n] = block_sums + unit.first + f * U::stride;
  }
  float4 sums[kPartFours] = {};
  const auto load = [&](float4 (&part)[kPartFours], int32_t position) {
    const int64_t offset = part_of_sums<spec, tile>(p, additions.key_block_at(position)) / 4;
#pragma unroll
    for (int n = 0; n < kPartFours; ++n) {
      if (there[n]) part[n] = from[n][offset];
    }
  };
  if (additions.count > 0) load(sums, 0);
#pragma unroll 1
  for (int32_t first = 1; first < additions.count; first += at_once) {
    float4 parts[at_once][kPartFours];
#pragma unroll
    for (int i = 0; i < at_once; ++i) load(parts[i], min(first + i, additions.count - 1));
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (first + i >= additions.count) break;
#pragma unroll
      for (int n = 0; n < kPartFours; ++n) {
        sums[n].x = ptx::add_rn_ftz(sums[n].x, parts[i][n].x);
        sums[n].y = ptx::add_rn_ftz(sums[n].y, parts[i][n].y);
        sums[n].z = ptx::add_rn_ftz(sums[n].z, parts[i][n].z);
        sums[n].w = ptx::add_rn_ftz(sums[n].w, parts[i][n].w);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kPartFours; ++n) *to[n] = sums[n];
  __syncthreads();
  const int32_t i_unit = threadIdx.x;
  if (i_unit >= units || first_unit + i_unit >= U::count) return false;
  const U unit(first_unit + i_unit);
  return unit.dim < spec.fwd.head_dim_qk && store_unit<spec, tile>(p, block, unit, shared[i_unit]);
}

// A warp that takes query blocks from a scheduler's counter, and waits for all key blocks of each. Both counters go in
// the order of heads, and CTAs that run take from both: no warp waits for a key block of a CTA that does not run.
template <BwdSpec spec, Sm90BwdTile tile>
struct Finisher {
  using S = Shape<spec, tile>;
  const BwdParams& p;
  const Maps& maps;
  const Sm90BwdSchedule& schedule;
  Smem<spec, tile>& smem;
  const bool first_lane = threadIdx.x % 32 == 0;

  // Calls `finish` with one query block after another, each when all key blocks of its head are done. `finish` returns
  // whether this lane has written a NaN or an infinity. While key blocks are not done, `busy` is called, until it
  // returns that no other work is left.
  template <class Finish, class Busy>
  FMHA_DEVICE void for_each_block(Finish finish, Busy busy) const {
    const int32_t num_blocks = num_q_blocks_of_all(p, schedule);
    bool is_busy = true;
    while (true) {
      const int32_t index = ptx::uniform(first_lane ? atomicAdd(p.schedulers + kNextDqBlock, 1) : 0);
      if (index >= num_blocks) {
        // The counter has given out all blocks. Other warps may wait for what `busy` computes in this warp, so it runs
        // to its end.
        while (is_busy) is_busy = busy();
        return;
      }
      const int32_t* done = done_key_blocks<spec, tile>(p, schedule, index / schedule.num_q_blocks);
      while (is_busy && ptx::uniform(first_lane ? ptx::ld_acquire_gpu(done) : 0) < schedule.num_key_blocks)
        is_busy = busy();
      if (first_lane) {
        while (ptx::ld_acquire_gpu(done) < schedule.num_key_blocks) {
        }
      }
      __syncwarp();
      const bool non_finite = __any_sync(ptx::kAllLanes, finish(resolve_query_block<spec, tile>(p, schedule, index)));
      if constexpr (repairs<spec>())
        ptx::st_global_b32_if(non_finite_queries<tile>(p, schedule) + index, non_finite, first_lane);
      __syncwarp();
    }
  }

  // Runs this role beside the consumers. The warp has few registers, so sums pass through shared memory, and a lane
  // processes eight dims of two queries at a time.
  FMHA_DEVICE void run() const {
    uint32_t phase = 0;
    for_each_block([&](const QueryBlock& block) {
      const bool there = has_sums<spec, tile>(p, block);
      if (there && first_lane) {
        ptx::fence_proxy_async_global();
        constexpr uint32_t bytes = S::dq_block * sizeof(float);
        ptx::mbarrier_arrive_expect_tx(smem.sums_full, bytes);
        ptx::cp_async_bulk(ptx::shared_address(smem.sums), sums_of_block<spec, tile>(p, block), bytes, smem.sums_full);
      }
      if (there) {
        ptx::mbarrier_wait_parity(smem.sums_full, phase);
        phase ^= 1;
      }
      float zero = 0.f;
      store(block, there, zero);
      return is_nan(zero);
    }, [&] {
      if constexpr (makes_delta(tile)) return DeltaMaker<spec, tile>{p, maps, schedule, smem}.make_one(phase);
      return false;
    });
  }
  // Finishes the remaining query blocks when no key block is left. A warp of consumers does so too, so that the launch
  // does not end with one active warp per multiprocessor.
  FMHA_DEVICE void run_from_memory() const {
    for_each_block(
        [&](const QueryBlock& block) { return finish_from_memory<spec, tile>(p, schedule, block, threadIdx.x % 32, 32); },
        [] { return false; });
  }

  // A lane's part of 32 rows of a share's accumulators: of dQ^T eight dims of two neighbouring queries, whose sums
  // lie side by side; of dQ eight dims of two queries eight apart.
  static constexpr int next_query = S::transposes_dq ? 1 : 8;
  static constexpr int steps = S::transposes_dq ? tile.block_m / 8 : S::dq_columns / 16;
  static constexpr int warp_floats = S::dq_share / steps;
  FMHA_DEVICE void store(const QueryBlock& block, bool there, float& zero) const {
    const int32_t lane = threadIdx.x % 32;
    int32_t query, dim;
    uint32_t from = ptx::shared_address(smem.sums);
    if constexpr (S::transposes_dq) {
      const int32_t pair = lane % 4, piece = lane / 4 % 2, row_block = lane / 8;
      query = 2 * pair;
      dim = 16 * row_block + 8 * piece;
      from += (row_block * 32 + pair) * 16 + piece * 8;
    } else {
      const int32_t odd = lane % 2, row = lane / 2;
      query = row / 8 * 16 + row % 8;
      dim = 8 * odd;
      from += (odd * mma::kWarpgroup + row * 4) * 16;
    }
    query += block.first;
    // A share is 64 dims of all queries, or all dims of 64 queries; a step eight queries, or 16 dims, of half of a
    // share's rows.
    const int64_t row = row_offset(p.dq, block.span.storage_batch, int64_t(block.span.q_row) + query, block.i_head);
    int64_t at = row + dim;
    if constexpr (S::transposes_dq) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step, query += 8, at += 8 * p.dq.row, from += warp_floats * 4) {
#pragma unroll
        for (int share = 0; share < S::consumers; ++share)
          store_two(block, there, from + share * S::dq_share * 4, query, dim + share * mma::kRows,
                    at + share * mma::kRows, zero);
      }
    } else {
#pragma unroll 1
      for (int half = 0; half < 2 * S::consumers; ++half, query += 32, at += 32 * p.dq.row) {
        // Goes on to the second half of a share's rows, then to the next share.
        const uint32_t rows = from + half / 2 * S::dq_share * 4 + half % 2 * 16 * 4 * 16;
#pragma unroll
        for (int step = 0; step < steps; ++step)
          store_two(block, there, rows + step * warp_floats * 4, query, dim + step * 16, at + step * 16, zero);
      }
    }
  }
  FMHA_DEVICE void store_two(const QueryBlock& block, bool there, uint32_t from, int32_t query, int32_t dim, int64_t at,
                             float& zero) const {
    if (query >= block.span.seqlen_q || dim >= spec.fwd.head_dim_qk) return;
    const bool both = query + next_query < block.span.seqlen_q;
    const float factor = dq_factor<spec>(p);
    const int64_t next = at + next_query * p.dq.row;
    if constexpr (tile.vector_store && spec.dtype_grad != DType::F32) {
      uint32_t words[2][4] = {};
      if (there) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          float values[2][2];
          load(values, from, w);
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            words[q][w] = ptx::cvt_rn_x2<spec.dtype_grad>(values[q][0] * factor, values[q][1] * factor);
            if constexpr (repairs<spec>()) zero = fmaf(values[q][1], 0.f, fmaf(values[q][0], 0.f, zero));
          }
        }
      }
      uint16_t* data = static_cast<uint16_t*>(p.dq.data);
      *reinterpret_cast<uint4*>(data + at) = {words[0][0], words[0][1], words[0][2], words[0][3]};
      if (both) *reinterpret_cast<uint4*>(data + next) = {words[1][0], words[1][1], words[1][2], words[1][3]};
    } else {
#pragma unroll 1
      for (int w = 0; w < 4; ++w) {
        float values[2][2] = {};
        if (there) load(values, from, w);
#pragma unroll
        for (int q = 0; q < 2; ++q) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            if constexpr (repairs<spec>()) zero = fmaf(values[q][k], 0.f, zero);
            if ((q == 0 || both) && dim + 2 * w + k < spec.fwd.head_dim_qk)
              store_elem<spec.dtype_grad>(p.dq.data, (q == 0 ? at : next) + 2 * w + k, values[q][k] * factor);
          }
        }
      }
    }
  }
  // Loads dims 2 w and 2 w + 1 of each of the two queries.
  FMHA_DEVICE static void load(float (&values)[2][2], uint32_t from, int w) {
    if constexpr (S::transposes_dq) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float both[2];
        ptx::ld_shared_v2_f32(both, from + (2 * w + k) * 64);
        values[0][k] = both[0];
        values[1][k] = both[1];
      }
    } else {
      uint32_t four[4];
      ptx::ld_shared_v4_b32(four, from + w * 16);
#pragma unroll
      for (int k = 0; k < 4; ++k) values[k / 2][k % 2] = __uint_as_float(four[k]);
    }
  }
};

}  // namespace fmha::sm90::bwd
