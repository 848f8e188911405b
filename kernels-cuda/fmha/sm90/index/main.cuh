// Scores of an indexer on wgmma: I[i, j] = sum_h relu(q[i, h] . k[j]) w[i, h].
//
//   A          64 keys of a warpgroup, all their elements in registers
//   B          the heads of one token, a tile in shared memory that every warpgroup reads
//   the sum    over heads: columns of a product. A thread has a quarter of two keys' heads, and four lanes add up.
//
// One warp loads: tiles of keys and tokens come by TMA, weights and scales by copies of four bytes. A piece of work is
// a tile of keys and up to 32 tokens of one sequence; CTAs take pieces in turn. A token's product runs on the tensor
// cores while the one before it is weighted and summed.
//
// Tokens of a piece stay in shared memory where the next piece has the same ones and they are few: in decode.
#pragma once
#include <fmha/choose.h>
#include <fmha/common/pipeline.cuh>
#include <fmha/mma/sm90/register_product.cuh>
#include <fmha/ptx/collective.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/grid.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/ptx/tma.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90_index.h>

namespace fmha::sm90_index {

namespace mma = fmha::mma::sm90;
using ptx::Barrier;

// Tensor maps: q as (element, head, token), k as (element, key, sequence or page).
struct Maps {
  ptx::TensorMap q, k;
};

constexpr int32_t kPieceRows = 32;  // tokens of a piece: one for each lane

constexpr int32_t warps_of(const Sm90IndexTile& tile) { return 4 * tile.warpgroups; }
constexpr int32_t num_threads(const Sm90IndexTile& tile) { return mma::kWarpgroup * (tile.warpgroups + 1); }
// Registers per thread, by role, within those of the launch.
constexpr int32_t consume_regs(const Sm90IndexTile& tile) { return tile.warpgroups == 2 ? 232 : 160; }
constexpr int32_t load_regs(const Sm90IndexTile& tile) { return tile.warpgroups == 2 ? 40 : 32; }
constexpr int32_t block_n(const Sm90IndexTile& tile) { return mma::kRows * tile.warpgroup_tiles * tile.warpgroups; }

template <IndexSpec spec, Sm90IndexTile tile>
struct Smem {
  using Elem = mma::Storage<spec.dtype_k>;
  mma::SmemTile<Elem, block_n(tile), spec.head_dim> k[tile.stages_k];
  mma::SmemTile<Elem, spec.num_heads, spec.head_dim> q[tile.stages_q];
  alignas(16) float weights[tile.stages_q][spec.num_heads];
  float scale[tile.stages_k][spec.k_scale ? block_n(tile) : 1];
  Barrier k_full[tile.stages_k], k_empty[tile.stages_k], q_full[tile.stages_q], q_empty[tile.stages_q];
};

// A tile of keys, with tokens of one sequence that may see some of them.
template <IndexSpec spec, Sm90IndexTile tile>
struct Piece {
  int32_t i_batch, first_key, first_row, num_rows, length;
  Range lane_keys;  // candidates of the token `first_row` + the lane
  uint32_t seen;    // tokens that see a key of the tile

  // Whether there is a work item at `index`. Called by all lanes of a warp together.
  FMHA_DEVICE bool resolve(const ChooseParams& p, int32_t index) {
    const int32_t blocks = ceil_div(p.seqlen_k, block_n(tile));
    const int32_t groups = ceil_div(min(p.seqlen_q, p.row_end - p.row_begin), kPieceRows);
    const int32_t first_batch = p.row_begin / p.seqlen_q, end_batch = ceil_div(p.row_end, p.seqlen_q);
    if (index >= int64_t(end_batch - first_batch) * groups * blocks) return false;
    const int32_t of_rows = index / blocks, group = of_rows % groups;
    i_batch = first_batch + of_rows / groups;
    first_key = index % blocks * block_n(tile);
    const int64_t begin = int64_t(i_batch) * p.seqlen_q, first = max<int64_t>(begin, p.row_begin) + group * kPieceRows;
    const int64_t end = min<int64_t>(begin + p.seqlen_q, p.row_end);
    first_row = int32_t(first);
    num_rows = int32_t(clamp<int64_t>(end - first, 0, kPieceRows));
    length = choose::length_of(p, i_batch);
    const int32_t lane = threadIdx.x % 32;
    lane_keys = {0, 0};
    if (lane < num_rows) lane_keys = choose::candidates_of(p, first_row + lane, length);
    const int32_t end_key = min(first_key + block_n(tile), p.seqlen_k);
    const bool sees = lane_keys.begin < end_key && lane_keys.end > first_key && lane_keys.begin < lane_keys.end;
    seen = ptx::vote_ballot(sees);
    return true;
  }
  FMHA_DEVICE bool has_tokens_of(const Piece& other) const {
    return first_row == other.first_row && seen == other.seen;
  }
  // Whether the item's tokens may stay in shared memory for the next item: half of the slots must be left for the next
  // item's tokens.
  FMHA_DEVICE bool stays() const { return __popc(seen) <= tile.stages_q / 2; }
};

// The load role, which one warp has.
template <IndexSpec spec, Sm90IndexTile tile>
struct Loader {
  using Shared = Smem<spec, tile>;
  using KTile = mma::SmemTile<typename Shared::Elem, block_n(tile), spec.head_dim>;
  using QTile = mma::SmemTile<typename Shared::Elem, spec.num_heads, spec.head_dim>;

  const ChooseParams& p;
  const Maps& maps;
  Shared& smem;
  Slot<tile.stages_k> k_slot;
  Slot<tile.stages_q> q_slot;

  FMHA_DEVICE void load_keys(const Piece<spec, tile>& piece) {
    const int32_t lane = threadIdx.x % 32;
    Barrier& full = smem.k_full[k_slot.index];
    KTile& to = smem.k[k_slot.index];
    ptx::mbarrier_wait_parity(smem.k_empty[k_slot.index], k_slot.phase ^ 1);
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, KTile::tile_bytes);
    __syncwarp();
    constexpr int32_t boxes = block_n(tile) / tile.box_keys;
#pragma unroll 1
    for (int32_t i = lane; i < boxes * KTile::num_chunks; i += 32) {
      const int32_t box = i / KTile::num_chunks, chunk = i % KTile::num_chunks;
      const int32_t j = piece.first_key + box * tile.box_keys;
      choose::KeyPlace place = {piece.i_batch, j};
      // Keys beyond the last use existing pages; their products are not stored.
      if constexpr (spec.paged) {
        const int32_t last = (max(piece.length, 1) - 1) / tile.box_keys * tile.box_keys;
        place = choose::place_of<true>(p, piece.i_batch, min(j, last));
      }
      ptx::cp_async_bulk_tensor_4d(to.address() + chunk * KTile::chunk_bytes + box * tile.box_keys * KTile::span_bytes,
                                   maps.k, full, chunk * KTile::span, int32_t(place.inner), int32_t(place.outer), 0,
                                   ptx::CacheHint::EvictFirst);
    }
    if constexpr (spec.k_scale) {
#pragma unroll
      for (int32_t i = 0; i < block_n(tile) / 32; ++i) {
        const int32_t at = i * 32 + lane;
        const choose::KeyPlace place =
            choose::place_of<spec.paged>(p, piece.i_batch, min(piece.first_key + at, max(piece.length, 1) - 1));
        ptx::cp_async<4>(ptx::shared_address(&smem.scale[k_slot.index][at]),
                         p.k_scale + place.outer * p.scale_outer + place.inner * p.scale_key, 4);
      }
      ptx::cp_async_mbarrier_arrive(full);
    }
    k_slot.advance();
  }

  FMHA_DEVICE void load_token(int32_t row) {
    const int32_t lane = threadIdx.x % 32;
    Barrier& full = smem.q_full[q_slot.index];
    QTile& to = smem.q[q_slot.index];
    ptx::mbarrier_wait_parity(smem.q_empty[q_slot.index], q_slot.phase ^ 1);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(full, QTile::tile_bytes);
#pragma unroll
      for (int32_t chunk = 0; chunk < QTile::num_chunks; ++chunk) {
        ptx::cp_async_bulk_tensor_4d(to.address() + chunk * QTile::chunk_bytes, maps.q, full, chunk * QTile::span, 0,
                                     row, 0, ptx::CacheHint::EvictLast);
      }
    }
    __syncwarp();
#pragma unroll
    for (int32_t h = lane; h < spec.num_heads; h += 32) {
      const float* from = p.weights + int64_t(row) * spec.num_heads + h;
      ptx::cp_async<4>(ptx::shared_address(&smem.weights[q_slot.index][h]), from, 4);
    }
    ptx::cp_async_mbarrier_arrive(full);
    q_slot.advance();
  }

  FMHA_DEVICE void run() {
    Piece<spec, tile> piece, before;
    before.first_row = -1;
    before.seen = 0;
#pragma unroll 1
    for (int32_t index = blockIdx.x; piece.resolve(p, index); index += gridDim.x) {
      if (piece.seen == 0) continue;
      load_keys(piece);
      const bool is_there = piece.stays() && piece.has_tokens_of(before);
      if (!is_there) {
#pragma unroll 1
        for (uint32_t rest = piece.seen; rest != 0; rest &= rest - 1)
          load_token(piece.first_row + __ffs(int32_t(rest)) - 1);
      }
      before = piece;
    }
  }
};

// A consumer warpgroup: it multiplies `warpgroup_tiles` times 64 keys.
template <IndexSpec spec, Sm90IndexTile tile>
struct Consumer {
  using Shared = Smem<spec, tile>;
  using Sums = mma::Accumulator<spec.num_heads>;
  static constexpr int32_t tiles = tile.warpgroup_tiles, columns = spec.num_heads / 4;
  static_assert(tiles % 2 == 0, "products take two accumulators in turn");

  const ChooseParams& p;
  Shared& smem;
  const int32_t index;  // among warpgroups
  Slot<tile.stages_k> k_slot;
  Slot<tile.stages_q> q_slot;
  Piece<spec, tile> piece;
  mma::RegisterTile<typename Shared::Elem, spec.head_dim> keys[tiles];
  float scale[tiles][2];
  Sums sums[2];
  float weights[columns];

  FMHA_DEVICE bool signals() const { return threadIdx.x % 32 == 0; }
  // First key of the warpgroup's tile `m`, counted in the CTA's keys.
  FMHA_DEVICE int32_t key_of(int32_t m) const { return (index * tiles + m) * mma::kRows; }

  FMHA_DEVICE void take_keys() {
    ptx::mbarrier_wait_parity(smem.k_full[k_slot.index], k_slot.phase);
#pragma unroll
    for (int32_t m = 0; m < tiles; ++m) {
      mma::load_a(keys[m], smem.k[k_slot.index], key_of(m));
#pragma unroll
      for (int32_t r = 0; r < 2; ++r)
        scale[m][r] = spec.k_scale ? smem.scale[k_slot.index][key_of(m) + mma::fragment_row() + 8 * r] : 1.f;
    }
    // All lanes must have read their scales before one of them hands the slot back.
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.k_empty[k_slot.index], signals());
    k_slot.advance();
  }

  FMHA_DEVICE void take_weights(const Slot<tile.stages_q>& slot) {
    const uint32_t from = ptx::shared_address(&smem.weights[slot.index][mma::fragment_column()]);
#pragma unroll
    for (int32_t g = 0; g < columns / 2; ++g) {
      float pair[2];
      ptx::ld_shared_v2_f32(pair, from + g * 32);
      weights[2 * g] = pair[0];
      weights[2 * g + 1] = pair[1];
    }
  }

  FMHA_DEVICE void start(Sums& to, int32_t m, const Slot<tile.stages_q>& slot) {
    mma::start_register_product_abt<spec.dtype_k, 1>(to, keys[m], smem.q[slot.index], 0, false);
  }

  // Weighted sums over this thread's heads, of its upper and its lower key. Even and odd columns have separate sums.
  template <bool scaled>
  FMHA_DEVICE void weigh(float (&sum)[2], const Sums& x, const float (&by)[2]) const {
    float part[2][2] = {};
#pragma unroll
    for (int32_t e = 0; e < Sums::num_elems; ++e) {
      const int32_t r = Sums::row(e);
      const float product = scaled ? x[e] * by[r] : x[e];
      part[r][e & 1] = fmaf(ptx::max_nan(product, 0.f), weights[e / 4 * 2 + (e & 1)], part[r][e & 1]);
    }
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) sum[r] = part[r][0] + part[r][1];
  }

  // Score of the key that this lane stores. Of the warp's sixteen keys even lanes have the upper eight and odd lanes
  // the lower eight.
  FMHA_DEVICE float score_of(const Sums& x, const float (&by)[2]) const {
    float sum[2];
    weigh<false>(sum, x, by);
    if constexpr (spec.k_scale) {
      // A scale that is not negative leaves the sign of a product as it is, and is a factor of the sum.
      const bool is_factor[2] = {by[0] >= 0.f && by[0] < infinity(), by[1] >= 0.f && by[1] < infinity()};
      sum[0] *= by[0];
      sum[1] *= by[1];
      if (ptx::vote_ballot(!is_factor[0] || !is_factor[1])) {
        float each[2];
        weigh<true>(each, x, by);
#pragma unroll
        for (int32_t r = 0; r < 2; ++r) sum[r] = is_factor[r] ? sum[r] : each[r];
      }
    }
    const bool is_odd = threadIdx.x & 1;
    const float score = (is_odd ? sum[1] : sum[0]) + ptx::shfl_xor(is_odd ? sum[0] : sum[1], 1);
    return score + ptx::shfl_xor(score, 2);
  }

  // Stores the scores of a tile of keys for the token at position `bit` of the piece.
  FMHA_DEVICE void store(float score, int32_t m, int32_t bit) const {
    const int32_t lane = threadIdx.x % 32;
    const int32_t j = piece.first_key + key_of(m) + mma::fragment_row() + 8 * (lane & 1);
    const int32_t begin = ptx::shfl_idx(piece.lane_keys.begin, bit), end = ptx::shfl_idx(piece.lane_keys.end, bit);
    const bool is_seen = j >= begin && j < end;
    const int64_t row = piece.first_row + bit - p.row_begin;
    ptx::st_global_f32_if(p.key_scores + row * p.seqlen_k + j, is_seen ? score : -infinity(),
                          j < p.seqlen_k && (is_seen || p.fills) && (lane & 2) == 0);
  }

  // Writes -inf for tokens that see no key of the tile.
  FMHA_DEVICE void fill() const {
    const int32_t thread = threadIdx.x % mma::kWarpgroup;
#pragma unroll 1
    for (int32_t row = 0; row < piece.num_rows; ++row) {
      if (piece.seen >> row & 1) continue;
      float* to = p.key_scores + int64_t(piece.first_row + row - p.row_begin) * p.seqlen_k;
#pragma unroll 1
      for (int32_t at = thread; at < tiles * mma::kRows; at += mma::kWarpgroup) {
        const int32_t j = piece.first_key + key_of(0) + at;
        ptx::st_global_f32_if(to + j, -infinity(), j < p.seqlen_k);
      }
    }
  }

  // Waits for the product of a tile of keys and stores its scores; one later product may stay in flight.
  template <int pending>
  FMHA_DEVICE void finish(int32_t m, int32_t bit) {
    ptx::wgmma_wait_group<pending>();
    ptx::written_here(sums[m % 2].elems);
    store(score_of(sums[m % 2], scale[m]), m, bit);
  }

  FMHA_DEVICE void wait_for_token() { ptx::mbarrier_wait_parity(smem.q_full[q_slot.index], q_slot.phase); }

  // Scores `count` tokens from `q_slot` on. The product of a token is under way while the sums of the token before it
  // are weighted; beside the last token's sums, products of other warpgroups are under way.
  template <int32_t count>
  FMHA_DEVICE void score_run(uint32_t& rest, bool keeps) {
    wait_for_token();
    start(sums[0], 0, q_slot);
#pragma unroll
    for (int32_t t = 0; t < count; ++t) {
      const int32_t bit = __ffs(int32_t(rest)) - 1;
      rest &= rest - 1;
      take_weights(q_slot);
#pragma unroll
      for (int32_t m = 0; m + 1 < tiles; ++m) {
        start(sums[(m + 1) % 2], m + 1, q_slot);
        finish<1>(m, bit);
      }
      const Slot<tile.stages_q> own = q_slot;
      q_slot.advance();
      if (t + 1 < count) {
        wait_for_token();
        start(sums[0], 0, q_slot);
        finish<1>(tiles - 1, bit);
      } else {
        finish<0>(tiles - 1, bit);
      }
      ptx::mbarrier_arrive_if(smem.q_empty[own.index], signals() && !keeps);
    }
  }

  // Scores the item's tokens; leaves `q_slot` after the last.
  FMHA_DEVICE void score_tokens(bool keeps) {
    uint32_t rest = piece.seen;
    if constexpr (tile.run_tokens > 1) {
#pragma unroll 1
      while (__popc(rest) >= tile.run_tokens) score_run<tile.run_tokens>(rest, keeps);
    }
#pragma unroll 1
    while (rest != 0) score_run<1>(rest, keeps);
  }

  FMHA_DEVICE void run() {
    // Slots of the tokens that have stayed in shared memory, from `kept` on.
    Piece<spec, tile> before;
    before.first_row = -1;
    before.seen = 0;
    Slot<tile.stages_q> kept;
    int32_t num_kept = 0;
#pragma unroll 1
    for (int32_t at = blockIdx.x; piece.resolve(p, at); at += gridDim.x) {
      if (p.fills && __popc(piece.seen) < piece.num_rows) fill();
      if (piece.seen == 0) continue;
      const bool stays = piece.stays();
      if (stays && piece.has_tokens_of(before)) {
        q_slot = kept;
      } else {
#pragma unroll 1
        for (; num_kept > 0; --num_kept, kept.advance()) ptx::mbarrier_arrive_if(smem.q_empty[kept.index], signals());
        if (stays) {
          kept = q_slot;
          num_kept = __popc(piece.seen);
        }
      }
      take_keys();
      score_tokens(stays);
      before = piece;
    }
  }
};

template <IndexSpec spec, Sm90IndexTile tile>
FMHA_DEVICE void index_scores(const ChooseParams& p, const Maps& maps) {
  using Shared = Smem<spec, tile>;
  static_assert(spec.dtype_q == spec.dtype_k, "sm90_index: q and k share a type");
  static_assert(spec.num_heads % 8 == 0 && spec.num_heads <= 128, "sm90_index: heads are columns of one product");
  constexpr int32_t launch_regs = 65536 / num_threads(tile) / 8 * 8;
  static_assert(load_regs(tile) + tile.warpgroups * consume_regs(tile) <= (tile.warpgroups + 1) * launch_regs,
                "sm90_index: registers of all threads");
  static_assert(block_n(tile) % tile.box_keys == 0 && tile.box_keys % 8 == 0, "sm90_index: a tile is whole boxes");
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& smem = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(maps.q);
    ptx::prefetch_tensormap(maps.k);
    for (int32_t i = 0; i < tile.stages_k; ++i) {
      ptx::mbarrier_init(smem.k_full[i], spec.k_scale ? 33 : 1);
      ptx::mbarrier_init(smem.k_empty[i], warps_of(tile));
    }
    for (int32_t i = 0; i < tile.stages_q; ++i) {
      ptx::mbarrier_init(smem.q_full[i], 33);
      ptx::mbarrier_init(smem.q_empty[i], warps_of(tile));
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  // Lets the next grid, which selects keys, start once CTAs of this one end. That grid itself waits for the scores.
  ptx::launch_dependents();
  if (ptx::uniform(threadIdx.x / mma::kWarpgroup) == tile.warpgroups) {
    ptx::setmaxnreg_dec<load_regs(tile)>();
    if (ptx::uniform(threadIdx.x / 32) == warps_of(tile)) Loader<spec, tile>{p, maps, smem}.run();
  } else {
    ptx::setmaxnreg_inc<consume_regs(tile)>();
    Consumer<spec, tile>{p, smem, ptx::uniform(threadIdx.x / mma::kWarpgroup)}.run();
  }
}

}  // namespace fmha::sm90_index
