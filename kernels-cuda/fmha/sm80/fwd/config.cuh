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

// Every warp consumes; all of them load, but where one more issues TMA.
FMHA_DEVICE consteval int num_consumers(const Sm80Tile& tile) { return 32 * tile.warps; }
FMHA_DEVICE consteval int num_threads(const Sm80Tile& tile) { return num_consumers(tile) + (tile.tma ? 32 : 0); }
// 16 rows of a product, times which a warp has rows. `value_parts` warps have the same rows, S and P, and each its
// part of O's columns, where all of them would take more than a warp's registers.
FMHA_DEVICE consteval int m_tiles(const Sm80Tile& tile) { return tile.block_m * tile.value_parts / (mma::kRows * tile.warps); }
FMHA_DEVICE consteval int warp_rows(const Sm80Tile& tile) { return mma::kRows * m_tiles(tile); }

// A head dimension as the tiles have it: whole steps of a product, 32 bytes. The copies fill with zeros what the
// tensor lacks.
FMHA_DEVICE constexpr int padded_dim(int dim, DType dtype) { return round_up(dim, 32 / size_bytes(dtype)); }

// Head dim of K, V and Q in shared memory: whole spans of the swizzle, 128 bytes, where a warp's copies are to have
// them.
FMHA_DEVICE consteval int tile_dim(const Sm80Tile& tile, int dim, DType dtype) {
  return tile.whole_spans ? round_up(dim, 64) : padded_dim(dim, dtype);
}

// Fields that architecture-independent headers read: those of this tile, and those that other tiles have and this one
// has not.
struct SharedTile {
  int32_t block_m, block_n, split_keys, shares, shares_a_cta, lazy_rescale_log2;
  bool fixed_parts, pack_gqa, fast_softcap;
  static constexpr int cluster = 1, bias_stages = 0, wait_anchor = 0;
  static constexpr bool cluster_heads = false;
};
FMHA_DEVICE consteval bool sums_output_first(const SharedTile&) { return false; }
FMHA_DEVICE consteval SharedTile shared(const Sm80Tile& tile) {
  return {tile.block_m,           tile.block_n,     tile.split_keys, tile.shares,      tile.shares_a_cta,
          tile.lazy_rescale_log2, tile.fixed_parts, tile.pack_gqa,   tile.fast_softcap};
}

// P of bf16 is scaled in the exponent (range.h); that of 8 bits to their range, which leaves room for the factor by
// which a row's maximum may be surpassed before it is raised.
FMHA_DEVICE consteval int p_offset_log2(const FwdSpec& spec, const Sm80Tile& tile) {
  if (spec.dtype_v == DType::Bf16) return offset_log2_of_bf16_p(spec.mask != MaskKind::Full, tile.lazy_rescale_log2);
  if (!is_fp8(spec.dtype_v)) return 0;
  return log2_of_power(p_scale(spec.dtype_v)) - tile.lazy_rescale_log2;
}

// Part of the dropout generator's work that rows have in common, one per warp.
template <int warps>
struct QuadsOfWarps {
  DropoutQuads quads[warps];
};
template <>
struct QuadsOfWarps<0> {};

// Whether K and V are of an FP8 cache beside queries of 16 bits.
FMHA_DEVICE consteval bool widens_cache(const FwdSpec& spec, const Sm80Tile& tile) { return is_fp8(tile.stored) && !is_fp8(spec.dtype_qk); }

// Whether blocks of an FP8 cache are loaded as they lie in memory, and widened in shared memory, one at a time, for
// the products.
FMHA_DEVICE consteval bool widens_blocks(const FwdSpec& spec, const Sm80Tile& tile) { return widens_cache(spec, tile) && tile.copy_bytes >= 4; }

// Elements of O that a warp's registers hold beside fragments on their way.
constexpr int kMostRawOutput = 32 * 128;

// Whether the products read FP8 blocks as they lie (fp8_product.cuh): one warp has all rows, and a lane reads whole
// words.
FMHA_DEVICE consteval bool reads_raw_blocks(const FwdSpec& spec, const Sm80Tile& tile) {
  return widens_blocks(spec, tile) && tile.warps == 1 && spec.head_dim_qk % 16 == 0 && spec.head_dim_v % 64 == 0 &&
         tile.block_m * spec.head_dim_v <= kMostRawOutput;
}

// Whether V is the first columns of K's rows and its block those of K's block, which are loaded once.
FMHA_DEVICE consteval bool shares_blocks(const FwdSpec&, const Sm80Tile& tile) { return tile.v_in_k; }

enum class Form { Wide, Shared, Widened, Raw };
FMHA_DEVICE consteval Form form_of_blocks(const FwdSpec& spec, const Sm80Tile& tile) {
  if (shares_blocks(spec, tile)) return Form::Shared;
  return !widens_blocks(spec, tile) ? Form::Wide : reads_raw_blocks(spec, tile) ? Form::Raw : Form::Widened;
}

// The rings of K and V; of an FP8 cache as it lies in memory, and beside it the one block that is widened, if one is.
template <class KTile, class VTile, class RawK, class RawV, int stages, Form form>
struct Blocks {
  KTile k[stages];
  VTile v[stages];
};
template <class KTile, class VTile, class RawK, class RawV, int stages>
struct Blocks<KTile, VTile, RawK, RawV, stages, Form::Shared> {
  static_assert(KTile::rows == VTile::rows && KTile::span_bytes == VTile::span_bytes && KTile::dim >= VTile::dim,
                "V's chunks are K's first");
  KTile k[stages];
};
template <class KTile, class VTile, class RawK, class RawV, int stages>
struct Blocks<KTile, VTile, RawK, RawV, stages, Form::Raw> {
  RawK raw_k[stages];
  RawV raw_v[stages];
};
template <class KTile, class VTile, class RawK, class RawV, int stages>
struct Blocks<KTile, VTile, RawK, RawV, stages, Form::Widened> {
  union {
    KTile wide_k;
    VTile wide_v;
  };
  RawK raw_k[stages];
  RawV raw_v[stages];
};

// Barriers of the rings that TMA fills.
template <int stages>
struct Rings {
  ptx::Barrier k_full[stages], v_full[stages];    // TMA's bytes of a block
  ptx::Barrier k_empty[stages], v_empty[stages];  // one arrival per consumer warp
};
template <>
struct Rings<0> {};

template <FwdSpec spec, Sm80Tile tile>
struct Smem : QuadsOfWarps<spec.dropout ? tile.warps : 0>, Rings<tile.tma ? tile.stages : 0> {
  static constexpr int dim_qk = tile_dim(tile, spec.head_dim_qk, spec.dtype_qk), dim_v = tile_dim(tile, spec.head_dim_v, spec.dtype_v);
  static constexpr bool v_columns = spec.v_layout == VLayout::ColMajor;
  // Whether a thread has four neighbours of every sixteen of O's columns (mma/sm80.cuh).
  static constexpr bool turned = is_fp8(spec.dtype_v) && !v_columns;
  using Elem = mma::Storage<spec.dtype_qk>;
  using Value = mma::Storage<spec.dtype_v>;
  using QTile = SmemTile<Elem, tile.block_m, dim_qk>;
  using KTile = SmemTile<Elem, tile.block_n, dim_qk>;
  using VTile = SmemTile<Value, v_columns ? dim_v : tile.block_n, v_columns ? tile.block_n : dim_v>;

  QTile q;
  Blocks<KTile, VTile, RawTile<tile.block_n, dim_qk>, RawTile<tile.block_n, dim_v>, tile.stages,
         form_of_blocks(spec, tile)>
      blocks;
};

}  // namespace fmha::sm80
