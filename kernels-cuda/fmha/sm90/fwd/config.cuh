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

// A block's P V of 8-bit operands is added to O before the next block's S is started. Beside the tile: headers that
// know no architecture ask for it.
FMHA_DEVICE consteval bool sums_output_first(const Sm90Tile& tile) { return tile.pv == ValueProduct::FlushedFirst; }

}  // namespace fmha

namespace fmha::sm90 {

namespace mma = fmha::mma::sm90;

using mma::SmemTile;
using mma::Storage;
using ptx::Barrier;
using ptx::TensorMap;

// One warpgroup loads, the others consume 64 rows each.
FMHA_DEVICE consteval int num_consumers(const Sm90Tile& tile) { return tile.block_m / mma::kRows; }
FMHA_DEVICE consteval int num_threads(const Sm90Tile& tile) { return mma::kWarpgroup * (1 + num_consumers(tile)); }
FMHA_DEVICE consteval int num_consumer_warps(const Sm90Tile& tile) { return 4 * num_consumers(tile); }

// Threads that load by copies: warps 0, 2 and 3, since warp 1 has the schedule role. Warp 2 has no zero role then,
// because a copy brings zeros itself. By TMA one thread loads.
using CopyThreads = CopyWarps<0, 0b1101>;
// Whether TMA brings blocks of keys from pages, by a warp (common/pages_of_block.cuh); else one thread brings them.
FMHA_DEVICE consteval bool loads_pages(const Sm90Tile& tile) { return tile.page_keys > 0; }
FMHA_DEVICE consteval int num_load_arrivals(const Sm90Tile& tile) { return tile.copy_bytes > 0 ? CopyThreads::count : 1; }
// Whether the next tile's first scores are started with this tile's last output; Q then has a second buffer, or lies
// in pieces of which one is spare.
FMHA_DEVICE consteval bool looks_ahead(const Sm90Tile& tile) { return tile.lookahead != Lookahead::Off; }
FMHA_DEVICE consteval bool splits_q(const Sm90Tile& tile) { return tile.lookahead == Lookahead::SparePiece; }
// A block's P V of 8-bit operands is added to O in f32 registers.
FMHA_DEVICE consteval bool flushes_output(const Sm90Tile& tile) {
  return tile.pv == ValueProduct::Flushed || tile.pv == ValueProduct::FlushedFirst;
}
// Whether a V of 8 bits is brought to f16 in shared memory (widen_values.cuh), and P V a product of f16.
FMHA_DEVICE consteval bool widens_v(const FwdSpec& spec, const Sm90Tile& tile) {
  return is_fp8(spec.dtype_v) && tile.pv == ValueProduct::F16;
}
FMHA_DEVICE consteval DType operand_v(const FwdSpec& spec, const Sm90Tile& tile) {
  return widens_v(spec, tile) ? DType::F16 : spec.dtype_v;
}
// Whether a row-major V is transposed in shared memory: wgmma reads tiles of 8-bit elements along their rows alone,
// and those of V have to be along the keys (turn_values.cuh).
FMHA_DEVICE consteval bool turns_v(const FwdSpec& spec, const Sm90Tile& tile) {
  return is_fp8(operand_v(spec, tile)) && spec.v_layout == VLayout::RowMajor;
}
// Whether V comes from the workspace in the form that the products take, once for all tiles (prepare_values.cuh).
FMHA_DEVICE consteval bool takes_prepared_v(const Sm90Tile& tile) { return tile.prepare_v != PrepareV::InTile; }
// Whether V, not prepared in the workspace, passes through shared memory twice: as it comes, and as the products take
// it (value_role.cuh).
FMHA_DEVICE consteval bool prepares_v(const FwdSpec& spec, const Sm90Tile& tile) {
  return !takes_prepared_v(tile) && (widens_v(spec, tile) || turns_v(spec, tile));
}
// Whether K and V lie in 8 bits beside 16 of Q, and are widened in shared memory (cache_role.cuh).
FMHA_DEVICE consteval bool widens_cache(const FwdSpec& spec, const Sm90Tile& tile) {
  return tile.stored != spec.dtype_qk;
}
// Whether two warps bring blocks from one place of shared memory to another.
FMHA_DEVICE consteval bool passes_twice(const FwdSpec& spec, const Sm90Tile& tile) {
  return prepares_v(spec, tile) || widens_cache(spec, tile);
}
constexpr int kValueWarps = 2;  // warps that do so, or convert V: the last two of the load role's warpgroup

FMHA_DEVICE consteval int num_work_readers(const FwdSpec& spec, const Sm90Tile& tile) {
  const int loaders = tile.copy_bytes > 0 ? CopyThreads::count / 32 : 1;
  // Warps that prepare V, or zero rows of it.
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
    // 24 spill the schedule role, 40 the cache role.
    case 2: return tile.raw_stages > 0 ? Regs{56, 224} : Regs{40, 232};
    default: return {32, 160};
  }
}

// A head dimension as tiles have it, for 8-bit elements and along columns; TMA fills with zeros what the tensor
// lacks.
FMHA_DEVICE constexpr int padded_dim(int dim) { return dim <= 64 ? 64 : round_up(dim, 32); }
// Columns of a row in shared memory. A 16-bit row is whole swizzles of 128 bytes beyond 128 columns, and where rows
// in memory begin within one of the L2's sectors of 32 bytes: pieces of 64 bytes of every second head would then span
// three sectors, often in two lines. D 136 causal at 11456 queries takes 880 us with 160 columns and 620 with 192; D
// 144, whose rows begin on sectors, takes 618 and 578 (H200).
FMHA_DEVICE constexpr int tile_dim(int dim, DType dtype) {
  const bool whole = dim > 128 || (dim > 64 && dim % 16 != 0);
  return size_bytes(dtype) == 2 && whole ? round_up(dim, 64) : padded_dim(dim);
}
// Columns that products compute: for 16-bit types whole steps of the head dimension, whatever padding rows have.
FMHA_DEVICE constexpr int product_dim(int dim, DType dtype) {
  return size_bytes(dtype) == 2 ? round_up(dim, mma::kDepth<uint16_t>) : padded_dim(dim);
}

// Four maps: Q `(dim, head in group, row, kv head, batch)`, K and V `(dim, row, head, batch)`, the bias `(key, query,
// head, batch)`, which has one head or one batch where it is the same for all. A V that is prepared in the workspace
// `(column, row, block, sequence and kv head)`, of the tiles that it has in shared memory.
struct Maps {
  TensorMap q, k, v, bias;
};

// P is scaled in the exponent, which costs nothing. That of 8 bits to their range: by as much as leaves room for the
// factor by which a row's maximum may be surpassed before it is raised. Both together stay below the type's largest
// number (448 = 2^8.8). That of bf16 to less (range.h).
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

// Columns of O that one product of P V computes, where its sums are taken out of the tensor cores.
FMHA_DEVICE consteval int output_columns(const FwdSpec& spec, const Sm90Tile& tile) {
  return tile.output_columns > 0 ? tile.output_columns : product_dim(spec.head_dim_v, spec.dtype_v);
}

// Data type of a prepared V.
template <class Tile, int stages, bool prepares>
struct RawValues {};
template <class Tile, int stages>
struct RawValues<Tile, stages, true> {
  Tile raw[stages];  // V as it lies in memory
};


// Blocks of K and V as they lie in a cache of 8 bits, in the order in which they are loaded.
template <int bytes, int slots>
struct RawBlocks {
  struct alignas(1024) Block {
    unsigned char bytes_of[bytes];
  };
  Block cache[slots];
};
template <int bytes>
struct RawBlocks<bytes, 0> {};
// Elements of a row of K and of V in shared memory, of caches of 8 bits as in 16.
FMHA_DEVICE consteval int widest_row(const FwdSpec& spec) {
  return max(tile_dim(spec.head_dim_qk, spec.dtype_qk), tile_dim(spec.head_dim_v, spec.dtype_v));
}

// The bias of blocks to come, a warpgroup's 64 rows at a time.
template <class Tile, int slots>
struct BiasValues {
  Tile bias[slots];
};
template <class Tile>
struct BiasValues<Tile, 0> {};
FMHA_DEVICE consteval int num_bias_slots(const Sm90Tile& tile) { return num_consumers(tile) * tile.bias_stages; }
template <Sm90Tile tile>
using BiasTile = SmemTile<uint16_t, mma::kRows, tile.block_n>;

// Shape of V as it lies in memory.
template <FwdSpec spec, Sm90Tile tile>
using RawTile = SmemTile<Storage<spec.dtype_v>, spec.v_layout == VLayout::ColMajor ? padded_dim(spec.head_dim_v) : tile.block_n,
                         spec.v_layout == VLayout::ColMajor ? tile.block_n : padded_dim(spec.head_dim_v)>;

// Part of the dropout generator's work that rows have in common, one per consumer warp.
template <int warps>
struct QuadsOfWarps {
  DropoutQuads quads[warps];
};
template <>
struct QuadsOfWarps<0> {};

template <FwdSpec spec, Sm90Tile tile>
struct Smem : RawValues<RawTile<spec, tile>, tile.stages, prepares_v(spec, tile)>,
              RawBlocks<tile.block_n * widest_row(spec), tile.raw_stages>,
              BiasValues<BiasTile<tile>, num_bias_slots(tile)>,
              QuadsOfWarps<spec.dropout ? num_consumer_warps(tile) : 0> {
  // Q in one piece, or in a warpgroup's 64 rows each; then one piece is spare.
  static constexpr int q_rows = splits_q(tile) ? mma::kRows : tile.block_m, q_pieces = tile.block_m / q_rows;
  static constexpr int q_buffers = splits_q(tile) ? q_pieces + 1 : looks_ahead(tile) ? 2 : 1;
  static constexpr bool clustered = tile.cluster > 1;
  static constexpr int dim_qk = tile_dim(spec.head_dim_qk, spec.dtype_qk);
  using QTile = SmemTile<Storage<spec.dtype_qk>, q_rows, dim_qk, clustered>;
  using KTile = SmemTile<Storage<spec.dtype_qk>, tile.block_n, dim_qk, clustered>;
  static constexpr bool prepared = prepares_v(spec, tile), turned = turns_v(spec, tile), v_columns = spec.v_layout == VLayout::ColMajor || turned;
  static constexpr int dim_v = v_columns ? padded_dim(spec.head_dim_v) : tile_dim(spec.head_dim_v, spec.dtype_v);
  using VTile = SmemTile<Storage<operand_v(spec, tile)>, v_columns ? dim_v : tile.block_n, v_columns ? tile.block_n : dim_v, clustered>;

  QTile q[q_buffers];
  KTile k[tile.stages];
  VTile v[tile.stages];
  Barrier q_full[q_buffers];     // the bytes of Q, or the arrivals of the threads that copied them
  Barrier q_empty[q_buffers];    // one arrival per warp that reads it
  Barrier k_full[tile.stages];   // the same of one K block
  Barrier k_empty[tile.stages];  // one arrival per consumer warp of the cluster
  Barrier v_full[tile.stages];   // the same of one V block; after v_raw the arrivals of the zero or value role
  static constexpr int raw_stages = max(tile.stages, tile.raw_stages);
  Barrier v_raw[raw_stages];    // the bytes of one V block that is to be prepared or zeroed in part, or of a raw block
  Barrier v_raw_empty[raw_stages];  // one arrival per warp that prepares V, or widens K and V
  Barrier v_empty[tile.stages];  // one arrival per consumer warp of the cluster
  Barrier bias_full[max(num_bias_slots(tile), 1)];   // the bytes of a warpgroup's bias for one block
  Barrier bias_empty[max(num_bias_slots(tile), 1)];  // one arrival per warp of that warpgroup
  Barrier work_full[kWorkSlots];   // the schedule role's arrival
  Barrier work_empty[kWorkSlots];  // one arrival per warp that reads it: consumers, load, zero or value, bias
  Barrier claimed_full;   // the first CTA's schedule role has written `claimed` of the second: one arrival
  Barrier claimed_empty;  // and the second's has read it: one arrival
  Work work[kWorkSlots];
  int32_t claimed;  // index of the next tile
  uint32_t unread;  // what is stored here matters to nobody
  uint32_t raised[num_consumers(tile)][2];  // a byte of each warp, 1 if it raised running maxima (consume.cuh)
};

}  // namespace fmha::sm90
