// The derived numbers and the shared memory of the forward kernel of mma.sync.
#pragma once
#include <fmha/common/dropout.cuh>
#include <fmha/common/work.cuh>
#include <fmha/mma/sm80.cuh>
#include <fmha/num.h>
#include <fmha/ptx/mbarrier.cuh>
#include <fmha/range.h>
#include <fmha/sm80/common/copy.cuh>
#include <fmha/sm80_host.h>

namespace fmha::sm80 {

namespace mma = fmha::mma::sm80;

using mma::SmemTile;

// Number of groups of 16 rows that a warp has. `value_parts` warps compute the same rows of S and P, and each a part of
// O's columns, where a whole row of O would take too many registers.
FMHA_DEVICE consteval int m_tiles(const Sm80Tile& tile) { return tile.block_m * tile.value_parts / (mma::kRows * tile.warps); }
FMHA_DEVICE consteval int warp_rows(const Sm80Tile& tile) { return mma::kRows * m_tiles(tile); }

// Fields that headers for every architecture read: this tile's own, and constants for fields that only other
// architectures have.
struct SharedTile {
  int32_t block_m, block_n, split_keys, shares, shares_a_cta, lazy_rescale_log2;
  bool fixed_parts, pack_gqa, fast_softcap, unites;
  static constexpr int cluster = 1, bias_stages = 0, wait_anchor = 0;
  static constexpr bool cluster_heads = false;
};
FMHA_DEVICE consteval bool sums_output_first(const SharedTile&) { return false; }
FMHA_DEVICE consteval SharedTile shared(const Sm80Tile& tile) {
  return {tile.block_m,           tile.block_n,     tile.split_keys, tile.shares,      tile.shares_a_cta,
          tile.lazy_rescale_log2, tile.fixed_parts, tile.pack_gqa,   tile.fast_softcap, tile.unites};
}

// Power of two by which P is scaled. For bf16 the exponent is shifted (range.h). An 8-bit P is scaled to its range,
// less the factor by which a score may exceed a stale row maximum.
FMHA_DEVICE consteval int p_offset_log2(const FwdSpec& spec, const Sm80Tile& tile) {
  if (spec.dtype_v == DType::Bf16) return offset_log2_of_bf16_p(spec.mask != MaskKind::Full, tile.lazy_rescale_log2);
  if (!is_fp8(spec.dtype_v)) return 0;
  return log2_of_power(p_scale(spec.dtype_v)) - tile.lazy_rescale_log2;
}

// Whether V is the first columns of K's rows, so that one load of a block serves as K and as V.
FMHA_DEVICE consteval bool shares_blocks(const FwdSpec&, const Sm80Tile& tile) { return tile.v_in_k; }

template <FwdSpec spec, Sm80Tile tile, int rows>
using ScoreTile = SmemTile<mma::Storage<spec.dtype_qk>, rows, tile_dim(spec.head_dim_qk, spec.dtype_qk, tile)>;
template <FwdSpec spec, Sm80Tile tile>
using QTile = ScoreTile<spec, tile, tile.block_m>;
template <FwdSpec spec, Sm80Tile tile>
using KTile = ScoreTile<spec, tile, tile.block_n>;
template <FwdSpec spec>
constexpr bool kVColumns = spec.v_layout == VLayout::ColMajor;
template <FwdSpec spec, Sm80Tile tile, int dim = tile_dim(spec.head_dim_v, spec.dtype_v, tile)>
using VTile = SmemTile<mma::Storage<spec.dtype_v>, kVColumns<spec> ? dim : tile.block_n,
                       kVColumns<spec> ? tile.block_n : dim>;
// A block of an FP8 cache as it lies in memory, before conversion.
template <FwdSpec spec, Sm80Tile tile, int dim>
using RawBlock = RawTile<tile.block_n, tile_dim(dim, spec.dtype_qk, tile)>;
// The block of K or V after conversion to Q's type.
template <FwdSpec spec, Sm80Tile tile>
union WideBlock {
  KTile<spec, tile> k;
  VTile<spec, tile> v;
};

}  // namespace fmha::sm80

#include <fmha/sm80_memory.h>  // SmemParts, of the list in src/sm80.rs

namespace fmha::sm80 {

template <FwdSpec spec, Sm80Tile tile>
struct Smem : SmemParts<spec, tile> {
  static constexpr int dim_qk = sm80::KTile<spec, tile>::dim, dim_v = tile_dim(spec.head_dim_v, spec.dtype_v, tile);
  static constexpr bool v_columns = kVColumns<spec>;
  // Whether a thread has four neighbouring columns of every sixteen of O (mma/sm80.cuh).
  static constexpr bool turned = is_fp8(spec.dtype_v) && !v_columns;
  using VTile = sm80::VTile<spec, tile>;
  static_assert(!shares_blocks(spec, tile) || (sm80::KTile<spec, tile>::span_bytes == VTile::span_bytes &&
                                               sm80::KTile<spec, tile>::dim >= VTile::dim),
                "V's chunks are K's first");
};

}  // namespace fmha::sm80
