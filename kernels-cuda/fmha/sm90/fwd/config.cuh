// The Hopper forward kernel's derived numbers, shared memory, barriers and roles.
#pragma once
#include <fmha/common/copy_tile.cuh>
#include <fmha/common/pipeline.cuh>
#include <fmha/common/work.cuh>
#include <fmha/num.h>
#include <fmha/mma/sm90.cuh>
#include <fmha/ptx/tma.cuh>
#include <fmha/range.h>
#include <fmha/common/dropout.cuh>
#include <fmha/sm90_host.h>

namespace fmha {

// Whether a block's P V is added to O before the next block's S is started, as products of 8-bit operands want it. It
// is a free function, since headers for every architecture call it.
FMHA_DEVICE consteval bool sums_output_first(const Sm90Tile& tile) { return tile.pv == ValueProduct::FlushedFirst; }

}  // namespace fmha

namespace fmha::sm90 {

namespace mma = fmha::mma::sm90;

using mma::SmemTile;
using mma::Storage;
using ptx::Barrier;
using ptx::TensorMap;

FMHA_DEVICE consteval int num_consumer_warps(const Sm90Tile& tile) { return 4 * num_consumers(tile); }

// Threads that load where TMA cannot: warps 0, 2 and 3, since warp 1 has the schedule role. Warp 2 is free, because
// copies write zeros themselves and no zero role is needed.
using CopyThreads = CopyWarps<0, 0b1101>;
// Whether a warp loads blocks of keys from pages by TMA, a box a lane (common/pages_of_block.cuh). Otherwise one thread
// loads whole blocks.
FMHA_DEVICE consteval bool loads_pages(const Sm90Tile& tile) { return tile.page_keys > 0; }
FMHA_DEVICE consteval int num_load_arrivals(const Sm90Tile& tile) { return tile.copy_bytes > 0 ? CopyThreads::count : 1; }
// Whether K and V have 8-bit elements and Q 16-bit ones, so that K and V are widened in shared memory (cache_role.cuh).
FMHA_DEVICE consteval bool widens_cache(const FwdSpec& spec, const Sm90Tile& tile) {
  return tile.stored != spec.dtype_qk;
}
// Whether two warps convert blocks from one place in shared memory to another.
FMHA_DEVICE consteval bool passes_twice(const FwdSpec& spec, const Sm90Tile& tile) {
  return prepares_v(spec, tile) || widens_cache(spec, tile);
}
constexpr int kValueWarps = 2;  // warps that do so, or convert V: the last two of the load role's warpgroup

FMHA_DEVICE consteval int num_work_readers(const FwdSpec& spec, const Sm90Tile& tile) {
  const int loaders = tile.copy_bytes > 0 ? CopyThreads::count / 32 : 1;
  // Number of warps that prepare V, or write zeros to some of its rows.
  const int others = tile.copy_bytes > 0 || takes_prepared_v(tile) ? 0 : passes_twice(spec, tile) ? kValueWarps : 1;
  return num_consumer_warps(tile) + loaders + others + (tile.bias_stages > 0);
}

// Registers a thread after setmaxnreg; role by role they sum to the file's 64 K.
struct Regs {
  int load, consume;
};
FMHA_DEVICE consteval Regs regs(const Sm90Tile& tile) {
  if (tile.copy_bytes > 0) return num_consumers(tile) == 1 ? Regs{80, 240} : Regs{72, 216};
  switch (num_consumers(tile)) {
    case 1: return {tile.shares > 0 ? 152 : 56, 240};  // a warp looks through the lengths of all sequences
    // With 24 registers the schedule role spills, with 40 the cache role.
    case 2: return tile.raw_stages > 0 ? Regs{56, 224} : Regs{40, 232};
    default: return {32, 160};
  }
}

// Four maps: Q `(dim, head in group, row, kv head, batch)`, K and V `(dim, row, head, batch)`, the bias `(key, query,
// head, batch)`, which has one head or one batch where it is the same for all. A V that is prepared in the workspace
// `(column, row, block, sequence and kv head)`, of the tiles that it has in shared memory.
struct Maps {
  TensorMap q, k, v, bias;
};

// Power of two by which P is scaled, in the exponent, which costs nothing. An 8-bit P is scaled to its type's range,
// less the factor by which a score may exceed a stale row maximum: both together stay below the largest number (448 =
// 2^8.8). A P of bf16 is scaled by less (range.h).
FMHA_DEVICE consteval int p_offset_log2(const FwdSpec& spec, const Sm90Tile& tile) {
  if (operand_v(spec, tile) == DType::Bf16) return offset_log2_of_bf16_p(spec.mask != MaskKind::Full, tile.lazy_rescale_log2);
  if (!is_fp8(operand_v(spec, tile))) return 0;
  return log2_of_power(p_scale(spec.dtype_v)) - tile.lazy_rescale_log2;
}

// Most, in log2, that a row's scores may pass the running maximum in blocks that take no maxima of their own, before
// it is raised. A P of bf16 has f32's range, and under a mask no offset; what of O then leaves f32 is computed again.
// A row's largest P is 1 where its maximum was raised, and else rounded: of an O in f32, which rounds nothing itself,
// that is most of the error (`rare/rising`, RMSE 1.1e-3 for 4e-4).
FMHA_DEVICE consteval int raise_beyond_log2(const FwdSpec& spec, const Sm90Tile& tile) {
  const bool has_room = operand_v(spec, tile) == DType::Bf16 && spec.mask != MaskKind::Full && spec.dtype_o == DType::Bf16;
  return has_room ? 40 : tile.lazy_rescale_log2;
}

// Number of columns of O that one product P V computes, where its sums are taken out of the tensor cores after each
// block.
FMHA_DEVICE consteval int output_columns(const FwdSpec& spec, const Sm90Tile& tile) {
  return tile.output_columns > 0 ? tile.output_columns : product_dim(spec.head_dim_v, spec.dtype_v);
}

// Elements of a row of K and V in shared memory: a cache of 8-bit elements has as many as one of 16-bit elements.
FMHA_DEVICE consteval int widest_row(const FwdSpec& spec) {
  return max(tile_dim(spec.head_dim_qk, spec.dtype_qk), tile_dim(spec.head_dim_v, spec.dtype_v));
}

// A block of K or V as it lies in a cache of 8-bit elements.
template <FwdSpec spec, Sm90Tile tile>
struct alignas(1024) RawBlock {
  unsigned char bytes_of[tile.block_n * widest_row(spec)];
};
template <Sm90Tile tile>
using BiasTile = SmemTile<uint16_t, mma::kRows, tile.block_n>;
using RaisedWarps = uint32_t[2];
// O in f32 of a CTA's rows, and the maxima and sums of a thread's two rows, which four threads share.
template <FwdSpec spec, Sm90Tile tile>
struct alignas(1024) FoldPlace {
  unsigned char bytes_of[4 * tile.block_m * (product_dim(spec.head_dim_v, spec.dtype_v) + 2)];
};

// Whether the products P V read V along its columns.
template <FwdSpec spec, Sm90Tile tile>
constexpr bool kVColumns = spec.v_layout == VLayout::ColMajor || turns_v(spec, tile);
// Shape of V as it lies in memory.
template <FwdSpec spec, Sm90Tile tile, bool columns = spec.v_layout == VLayout::ColMajor>
using RawTile = SmemTile<Storage<spec.dtype_v>, columns ? padded_dim(spec.head_dim_v) : tile.block_n,
                         columns ? tile.block_n : padded_dim(spec.head_dim_v)>;
template <FwdSpec spec, Sm90Tile tile, int rows>
using ScoreTile = SmemTile<Storage<spec.dtype_qk>, rows, tile_dim(spec.head_dim_qk, spec.dtype_qk), (tile.cluster > 1)>;
template <FwdSpec spec, Sm90Tile tile>
using QTile = ScoreTile<spec, tile, q_rows(tile)>;
template <FwdSpec spec, Sm90Tile tile>
using KTile = ScoreTile<spec, tile, tile.block_n>;
template <FwdSpec spec, Sm90Tile tile, bool columns = kVColumns<spec, tile>>
using VTile = SmemTile<Storage<operand_v(spec, tile)>, columns ? dim_v(spec, tile) : tile.block_n,
                       columns ? tile.block_n : dim_v(spec, tile), (tile.cluster > 1)>;

}  // namespace fmha::sm90

#include <fmha/sm90_memory.h>  // SmemParts, of the list in src/sm90.rs

namespace fmha::sm90 {

template <FwdSpec spec, Sm90Tile tile>
struct Smem : SmemParts<spec, tile> {
  static constexpr int q_rows = sm90::q_rows(tile), q_pieces = tile.block_m / q_rows, q_buffers = sm90::q_buffers(tile);
  static constexpr int raw_stages = max(tile.stages, tile.raw_stages);
  static constexpr bool clustered = tile.cluster > 1;
  static constexpr int dim_qk = tile_dim(spec.head_dim_qk, spec.dtype_qk), dim_v = sm90::dim_v(spec, tile);
  static constexpr bool prepared = prepares_v(spec, tile), turned = turns_v(spec, tile);
  static constexpr bool v_columns = kVColumns<spec, tile>;
  using QTile = sm90::QTile<spec, tile>;
  using KTile = sm90::KTile<spec, tile>;
  using VTile = sm90::VTile<spec, tile>;
};

}  // namespace fmha::sm90
