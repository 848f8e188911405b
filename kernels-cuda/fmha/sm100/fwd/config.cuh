// The Blackwell forward kernel's derived numbers, shared memory, tensor memory, barriers and roles.
#pragma once
#include <fmha/common/copy_tile.cuh>
#include <fmha/common/pipeline.cuh>
#include <fmha/common/seen_keys.cuh>
#include <fmha/common/work.cuh>
#include <fmha/mma/sm100.cuh>
#include <fmha/range.h>
#include <fmha/ptx/tma.cuh>
#include <fmha/score.h>
#include <fmha/sm100_host.h>

namespace fmha::sm100 {

using mma::SmemTile;
using mma::sm100::kRows;
using ptx::Barrier;
using ptx::TensorMap;

// A CTA has one or two tiles of 128 queries. Each tile has a softmax warpgroup, with one row a thread. One more
// warpgroup rescales and stores O, and the last has four roles of one warp each.
FMHA_DEVICE consteval int num_q_tiles(const Sm100Tile& tile) { return tile.block_m / kRows; }
FMHA_DEVICE consteval int num_threads(const Sm100Tile& tile) { return kRows * (num_q_tiles(tile) + 2); }

// Whether two CTAs compute as a pair (pair.cuh).
FMHA_DEVICE consteval bool is_pair(const Sm100Tile& tile) { return tile.cluster == 2; }
// Whether TMA loads blocks of keys from pages, a box a page (common/pages_of_block.cuh).
FMHA_DEVICE consteval bool loads_pages(const Sm100Tile& tile) { return tile.page_keys > 0; }

// MXFP8: FP8 elements with a power of two for each 32 (scales.cuh). NVFP4: E2M1 elements, two to a byte in tiles, with
// an E4M3 scale for each 16.
FMHA_DEVICE consteval bool is_scaled(const Sm100Tile& tile) { return tile.scale_block > 0; }
FMHA_DEVICE consteval bool has_pairs(const Sm100Tile& tile) { return tile.scale_block == 16; }
// Whether pairs of V lie along its rows, while products read pairs of keys: transpose_pairs.cuh.
FMHA_DEVICE consteval bool transposes_v(const FwdSpec& spec, const Sm100Tile& tile) {
  return has_pairs(tile) && spec.v_layout == VLayout::RowMajor;
}

// Rows of a tile of work: a CTA's query tiles follow each other; a pair's are taken by its CTAs in turn, so that one
// product has 256 adjacent rows.
template <Sm100Tile tile>
FMHA_DEVICE int32_t first_row_of(const Work& work, int q_tile) {
  if constexpr (!is_pair(tile)) return work.first_row + q_tile * kRows;
  const int32_t rank = cluster_rank<tile>();
  return work.first_row - rank * tile.block_m + (q_tile * tile.cluster + rank) * kRows;
}

// The sequence of a tile.
FMHA_DEVICE SeqSpan span_of(const Work& work) {
  return {work.i_batch, work.storage_batch, work.q_row, work.seqlen_q, work.k_row, work.seqlen_k};
}

enum class Role { Softmax, Correct, Issue, Load, Schedule, Zero };
template <Sm100Tile tile>
FMHA_DEVICE constexpr Role role_of(int32_t warp) {
  const int32_t warpgroup = warp / 4;
  if (warpgroup < num_q_tiles(tile)) return Role::Softmax;
  if (warpgroup == num_q_tiles(tile)) return Role::Correct;
  return Role(int(Role::Issue) + warp % 4);
}

// Registers a thread after setmaxnreg; role by role they sum to those of the launch, 168 of each of 384 threads or
// 128 of 512.
struct Regs {
  int softmax, correct, others;
};
FMHA_DEVICE consteval Regs regs(const Sm100Tile& tile) {
  if (num_q_tiles(tile) == 1) return {232, 160, 112};
  return tile.copy_bytes > 0 || is_scaled(tile) ? Regs{176, 80, 80} : Regs{184, 88, 56};
}

// Threads that load by copies: the warps of the load and zero roles, which copy zeros where otherwise the zero role
// writes them. With TMA one thread issues the loads.
template <Sm100Tile tile>
using CopyThreads = CopyWarps<num_q_tiles(tile) + 1, 0b1010>;
template <Sm100Tile tile>
FMHA_DEVICE constexpr int num_load_arrivals() {
  if (tile.copy_bytes > 0) return CopyThreads<tile>::count;
  return is_scaled(tile) ? 2 : 1;  // one of TMA's bytes, one of their scales
}
// Whether the zero role also loads scales, while TMA loads the elements.
FMHA_DEVICE consteval bool has_scale_role(const Sm100Tile& tile) { return is_scaled(tile) && tile.copy_bytes == 0; }
// Number of warps that load a tile's blocks of keys.
FMHA_DEVICE consteval int num_load_warps(const Sm100Tile& tile) {
  return tile.copy_bytes > 0 || is_scaled(tile) ? 2 : 1;
}

// A head dimension as the tiles have it: TMA fills with zeros what the tensor lacks.
FMHA_DEVICE constexpr int padded_dim(int dim) { return dim <= 64 ? 64 : round_up(dim, 32); }

// Three maps: Q `(dim, head in group, row, kv head, batch)`, K and V `(dim, row, head, batch)`.
struct Maps {
  TensorMap q, k, v;
};

// Bytes of a row of Q and K where two elements share a byte, rounded up to whole steps of a product.
FMHA_DEVICE constexpr int bytes_of_pairs(int dim) { return round_up(dim, 64) / 2; }

// Number of tiles of scales. A tile of scales of 128 queries, or of a block's keys, has one word for 128 elements of a
// row, of E2M1 for 64. For V, each element of a row has one word for a block's keys, of E2M1 one for 64 keys. P of E2M1
// has one word for 64 keys.
template <FwdSpec spec, Sm100Tile tile>
struct ScaleTiles {
  static constexpr int p = has_pairs(tile) ? tile.block_n / 64 : 1, columns = ceil_div(padded_dim(spec.head_dim_v), 128);
  static constexpr int qk = has_pairs(tile) ? ceil_div(spec.head_dim_qk, 64) : ceil_div(padded_dim(spec.head_dim_qk), 128);
  static constexpr int v = p * columns;
};

// Tensor memory, of each CTA: 512 columns of 128 lanes. Two score slots; P takes the last columns of its S, which the
// softmax has read by then. O after them. With scales: those of Q; of a block of K and of V two buffers each, which
// blocks take alternately; and P's, which are 1.
template <FwdSpec spec, Sm100Tile tile>
struct TmemPlan {
  static constexpr int columns = 512;
  static constexpr int dim_v = padded_dim(spec.head_dim_v);
  static constexpr int p_columns = mma::sm100::columns_of(spec.dtype_v, tile.block_n) / (has_pairs(tile) ? 2 : 1);

  FMHA_DEVICE static constexpr int s(int slot) { return slot * tile.block_n; }
  FMHA_DEVICE static constexpr int p(int slot) { return s(slot) + tile.block_n - p_columns; }
  FMHA_DEVICE static constexpr int o(int q_tile) { return 2 * tile.block_n + q_tile * dim_v; }

  using Tiles = ScaleTiles<spec, tile>;
  static constexpr int tile_columns = is_scaled(tile) ? mma::sm100::kScaleColumns : 0;
  FMHA_DEVICE static constexpr int q_scales(int q_tile) {
    return o(num_q_tiles(tile)) + q_tile * Tiles::qk * tile_columns;
  }
  FMHA_DEVICE static constexpr int k_scales(int buffer) {
    return q_scales(num_q_tiles(tile)) + buffer * Tiles::qk * tile_columns;
  }
  FMHA_DEVICE static constexpr int v_scales(int buffer) { return k_scales(2) + buffer * Tiles::v * tile_columns; }
  // Column of P's scales, of a query tile, or with E2M1 of a score slot.
  FMHA_DEVICE static constexpr int p_scales(int of) { return v_scales(2) + of * Tiles::p * tile_columns; }

  static_assert(p_columns <= tile.block_n, "P fits its S");
  static_assert(s(1) >= s(0) + tile.block_n && o(0) >= s(1) + tile.block_n, "score slots and O lie apart");
  static_assert(p_scales(has_pairs(tile) ? 2 : num_q_tiles(tile)) <= columns, "tensor memory holds S, O and scales");
};

// A score slot, and the parity of its barriers. Two query tiles have a slot each; a single tile uses them alternately,
// so that one block's scores are computed under another's exponentials.
template <int q_tiles>
struct ScoreSlot {
  int32_t index = 0;
  uint32_t phase = 0;

  FMHA_DEVICE void advance() {
    if constexpr (q_tiles == 2) {
      phase ^= 1;
    } else {
      phase ^= index;
      index ^= 1;
    }
  }
};

// Scales in shared memory, of the query tiles and of each slot of the ring.
template <FwdSpec spec, Sm100Tile tile, bool has_any = is_scaled(tile)>
struct ScaleSlots {};
template <FwdSpec spec, Sm100Tile tile>
struct ScaleSlots<spec, tile, true> {
  using Tiles = ScaleTiles<spec, tile>;
  mma::sm100::ScaleTile q_scales[num_q_tiles(tile)][Tiles::qk];
  mma::sm100::ScaleTile kv_scales[tile.stages][max(Tiles::qk, Tiles::v)];
  // Scales of P in E2M1, by score slot. The product has read them before the slot's next scores are announced.
  mma::sm100::ScaleTile p_scales[has_pairs(tile) ? 2 : 1][Tiles::p];
};

template <FwdSpec spec, Sm100Tile tile>
struct Smem : ScaleSlots<spec, tile> {
  static constexpr int q_tiles = num_q_tiles(tile);
  // Number of elements of a row in a tile; with E2M1 the number of bytes, which hold two each.
  static constexpr int dim_qk = has_pairs(tile) ? bytes_of_pairs(spec.head_dim_qk) : padded_dim(spec.head_dim_qk);
  static constexpr int dim_v = padded_dim(spec.head_dim_v), bytes_of_keys = tile.block_n / (has_pairs(tile) ? 2 : 1);
  // Whether products read V as [dim, keys].
  static constexpr bool v_columns = spec.v_layout == VLayout::ColMajor || transposes_v(spec, tile);
  static constexpr bool clustered = is_pair(tile);
  // Each CTA of a pair holds half of K's rows and half of V's columns of a block.
  static constexpr int own_keys = tile.block_n / tile.cluster, own_dim_v = dim_v / tile.cluster;
  using QTile = SmemTile<mma::Storage<spec.dtype_qk>, kRows, dim_qk, clustered>;
  using KTile = SmemTile<mma::Storage<spec.dtype_qk>, own_keys, dim_qk, clustered>;
  using VTile = SmemTile<mma::Storage<spec.dtype_v>, v_columns ? own_dim_v : tile.block_n,
                         v_columns ? bytes_of_keys : own_dim_v, clustered>;
  // V of pairs along its rows, as memory has it.
  using VRows = SmemTile<uint8_t, tile.block_n, bytes_of_pairs(spec.head_dim_v)>;
  static constexpr int v_bytes = max(VTile::tile_bytes, transposes_v(spec, tile) ? VRows::tile_bytes : 0);
  // A slot of the ring holds a block of K or of V.
  struct alignas(1024) KvSlot {
    unsigned char bytes[max(KTile::tile_bytes, v_bytes)];

    FMHA_DEVICE const KTile& k() const { return *reinterpret_cast<const KTile*>(bytes); }
    FMHA_DEVICE const VTile& v() const { return *reinterpret_cast<const VTile*>(bytes); }
    FMHA_DEVICE const VRows& v_rows() const { return *reinterpret_cast<const VRows*>(bytes); }
  };

  QTile q[q_tiles];
  KvSlot kv[tile.stages];
  float stats[q_tiles][2][kRows];  // a row's correction; at a tile's end its sum and maximum
  // A pair uses the leader's q_full, kv_full, p_full and p_last, at which both CTAs arrive.
  Barrier q_full[q_tiles];         // the bytes of a query tile, or the arrivals of the threads that copied them; over
                                   // MXFP8 also the arrival of the warp that brings its scales
  Barrier q_empty[q_tiles];        // the tile's last scores are computed
  Barrier kv_full[tile.stages];    // as q_full, of a block, or the zero role's arrival
  Barrier kv_raw[tile.stages];     // the bytes of a block of V, which is to be transposed, or of which rows are to be
                                   // zeroed
  Barrier kv_empty[tile.stages];   // the products that read the block are computed
  Barrier s_full[2];               // scores are computed, and every product issued before them
  Barrier p_full[2];               // the first part of P is stored and O is at P's maximum: one arrival per softmax and
                                   // correction warp
  Barrier p_last[2];               // the rest of P is stored: one arrival per softmax warp
  Barrier o_full[q_tiles];         // O is summed; of a lone query tile after each block
  Barrier stats_full[q_tiles];     // one arrival per softmax warp
  Barrier stats_empty[q_tiles];    // one arrival per correction warp
  Barrier o_read;                  // of the last tile: one arrival per correction warp, of either CTA
  Barrier work_full[kWorkSlots];   // the schedule role's arrival
  Barrier work_empty[kWorkSlots];  // one arrival per warp that reads it: softmax, correction, issue, those that load
  Barrier zero_full;               // the load role has written `zero`
  Barrier zero_empty;              // and the zero role has read it
  Work work[kWorkSlots];
  struct {
    int32_t slot, first_row;       // of the ring; no slot: there is no more to do
  } zero;
  uint32_t tmem;                   // address of the 512 columns
  int32_t claimed;                 // index of the next tile, which a pair's first CTA has claimed for both
  Barrier claimed_full;            // it is written in the second: one arrival
  Barrier claimed_empty;           // and the second's schedule role has read it: one arrival
};

// Key blocks of a CTA that one query tile sees. On the diagonal the first of two tiles does not see the CTA's first
// blocks; in a window the second does not see its last ones. A row's bits are the same with and without these blocks,
// which add zeros. A pair's CTAs compute every block that either of them sees.
struct BlockRange {
  int32_t begin, end;
  FMHA_DEVICE bool has(int32_t i) const { return begin <= i && i < end; }
};
// The blocks of a list (shown_blocks.cuh) need not be ordered like a band's, so both query tiles compute all of them.
template <FwdSpec spec, Sm100Tile tile, class SeenKeys = EveryKey>
FMHA_DEVICE BlockRange blocks_of(const FwdParams& p, const Work& work, int q_tile) {
  BlockRange blocks = {0, work.num_blocks};
  if constexpr (!SeenKeys::has_tile_list && num_q_tiles(tile) == 2 && spec.mask != MaskKind::Full && !spec.sink_columns) {
    const int32_t first_row = first_row_of<tile>(work, q_tile) - cluster_rank<tile>() * kRows;
    const int32_t first = query_of<tile>(p, first_row), last = query_of<tile>(p, first_row + tile.cluster * kRows - 1);
    const int32_t end_block = max(last + work.hi + tile.block_n, 0) / tile.block_n;
    blocks.begin = clamp(work.last_block + 1 - end_block, 0, work.num_blocks - 1);
    if constexpr (spec.mask == MaskKind::Band) {
      const int32_t first_block = max(first + work.lo, 0) / tile.block_n;
      blocks.end = clamp(work.last_block + 1 - first_block, blocks.begin + 1, work.num_blocks);
    }
  }
  return blocks;
}

// Product of the descales of FP8 scores, by which the softmax scale is multiplied.
template <FwdSpec spec>
FMHA_DEVICE float descale_qk(const FwdParams& p, const Work& work) {
  if constexpr (!is_fp8(spec.dtype_qk)) return 1.f;
  return scalar_of(p.descale_q, work.i_batch, work.i_head_kv, 1.f) *
         scalar_of(p.descale_k, work.i_batch, work.i_head_kv, 1.f);
}

// Scale, in log2, of the softmax's input: S, or the modified score.
template <FwdSpec spec>
FMHA_DEVICE float softmax_scale_log2(const FwdParams& p, const Work& work) {
  if constexpr (modifies_score(spec)) return kLog2E;
  // A scale of 0 would make -inf * 0 of hidden scores, and so would a subnormal one, which the multiply-add takes for
  // 0. The smallest normal number takes every score to 0 too; the host refuses scales of bf16 for which it would not.
  return fmaxf(fabsf(p.softmax_scale * descale_qk<spec>(p, work)) * kLog2E, 1.17549435e-38f);
}

// Scale of P in E2M1: the largest element times the largest scale, 2688, in the precision of its f32 exponent.
constexpr float kLog2ScaleOfPairs = 11.392317771f, kScaleOfPairs = 2688.00073f;

// Power of two by which P is scaled, in its exponent: 8-bit P to the type's range, bf16 by less (range.h).
template <FwdSpec spec, Sm100Tile tile>
FMHA_DEVICE constexpr float scale_of_p() {
  if constexpr (has_pairs(tile)) return kScaleOfPairs;
  if constexpr (spec.dtype_v != DType::Bf16) return p_scale(spec.dtype_v);
  return power_of_two(offset_log2_of_bf16_p(spec.mask != MaskKind::Full, tile.lazy_rescale_log2));
}

// The exponent of a power of two.
FMHA_DEVICE constexpr float log2_of_power(float power) {
  float exponent = 0.f;
  for (; power > 1.f; power /= 2.f) exponent += 1.f;
  for (; power < 1.f; power *= 2.f) exponent -= 1.f;
  return exponent;
}

template <FwdSpec spec, Sm100Tile tile>
FMHA_DEVICE constexpr float log2_scale_of_p() {
  if constexpr (has_pairs(tile)) return kLog2ScaleOfPairs;
  return log2_of_power(scale_of_p<spec, tile>());
}

// Number of keys of a block whose P is handed over first.
template <FwdSpec spec, Sm100Tile tile>
FMHA_DEVICE constexpr int first_part() { return has_pairs(tile) ? 64 : tile.block_n * 3 / 4 / 32 * 32; }

}  // namespace fmha::sm100
