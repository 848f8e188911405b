// A row-major V of 8 bits brought to the form that the products take once for all tiles, in the workspace: widened to f16 or
// turned, as value_role.cuh does block by block for each tile, to the same bits. A launch before the main kernel does so, or
// two spare warps of each of its CTAs beside the tiles at work.
//
// A block of keys lies in one piece, [rows, columns] of its tile in shared memory, to which TMA adds the swizzle:
// [sequence, kv head, block][rows][columns]. Packed sequences have as many blocks each as the longest may. Keys that no
// query sees are zeros up to the end of the last block that is loaded, and of a block behind it nothing is written.
//
// Beside the tiles warps claim units of work from a counter, in the order in which the tiles want them, and wait for nobody:
// so every unit that was claimed is finished, and the load role, which waits for a block's units, waits for running warps
// alone, however few CTAs run at a time.
#pragma once
#include <fmha/common/work.cuh>
#include <fmha/mma/sm90/fp8_operand.cuh>
#include <fmha/ptx/flag.cuh>
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/grid.cuh>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90/fwd/turn_values.cuh>
#include <fmha/sm90/fwd/widen_values.cuh>

namespace fmha::sm90 {

constexpr int kPrepareThreads = 256;

// A warp's unit of work: so many keys of a block of a kv head, all dimensions.
FMHA_DEVICE constexpr int unit_keys(const Sm90Tile& tile) { return tile.block_n % 32 == 0 ? 32 : 16; }
FMHA_DEVICE constexpr int units_per_block(const Sm90Tile& tile) { return tile.block_n / unit_keys(tile); }

// Units in order: kv heads whose tiles run together; their blocks, from the last, as tiles walk them; of a block each of
// those heads; its keys.
struct Unit {
  int32_t head, block, part;  // sequence and kv head; block of the sequence; unit of the block
};
template <Sm90Tile tile>
FMHA_DEVICE Unit unit_at(const PreparedValues& values, int32_t index) {
  constexpr int32_t parts = units_per_block(tile);
  const int32_t group_units = values.heads_per_group * values.num_blocks * parts;
  const int32_t group = index / group_units, within = index - group * group_units;
  const int32_t first_head = group * values.heads_per_group;
  const int32_t heads = min(values.heads_per_group, values.num_heads - first_head);
  const int32_t from_last = within / (heads * parts), of_block = within - from_last * (heads * parts);
  return {first_head + of_block / parts, values.num_blocks - 1 - from_last, of_block % parts};
}

// `count` bytes of a row from `column` on, words of four; zeros beyond `dim`, and where the row is not `there`.
template <int count, int dim>
FMHA_DEVICE void load_bytes(uint32_t (&words)[count / 4], const uint8_t* row, int32_t column, bool there) {
  const bool whole = there && column + count <= dim;
  if constexpr (count == 8) {
    ptx::ld_global_v2_b32_if(words, row + column, whole);
  } else {
    words[0] = ptx::ld_global_b32_if(row + column, whole);
  }
  if constexpr (dim % count != 0) {
    if (there && !whole) {
      for (int k = 0; k < dim % count; ++k) {
        if (column + k < dim) words[k / 4] |= uint32_t(row[column + k]) << 8 * (k % 4);
      }
    }
  }
}

// Eight elements to f16: those of e5m2 are the upper halves of f16.
template <DType dtype>
FMHA_DEVICE void widen_pairs(uint32_t (&wide)[4], const uint32_t (&bytes)[2]) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    if constexpr (dtype == DType::E5m2) {
      wide[2 * w] = ptx::prmt(bytes[w], 0, 0x1404), wide[2 * w + 1] = ptx::prmt(bytes[w], 0, 0x3424);
    } else {
      wide[2 * w] = ptx::cvt_rn_f16x2_e4m3x2(bytes[w]), wide[2 * w + 1] = ptx::cvt_rn_f16x2_e4m3x2(bytes[w] >> 16);
    }
  }
}

// Keys of a block to f16, eight elements to a lane at a time, so that a warp stores whole lines. `from` is the first key's
// row in memory, `num_there` how many keys are seen, `to` the first key's in the workspace. `batch`: loads before their
// stores, for the registers of the threads.
template <FwdSpec spec, Sm90Tile tile, int batch>
FMHA_DEVICE void widen_unit(const uint8_t* from, int64_t row_stride, int32_t num_there, uint16_t* to) {
  constexpr int words = padded_dim(spec.head_dim_v) / 8, steps = unit_keys(tile) * words / 32;
  const int32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (int32_t first = 0; first < steps; first += batch) {
    uint32_t bytes[batch][2], wide[4];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int32_t at = (first + i) * 32 + lane, key = at / words;
      if (steps % batch == 0 || first + i < steps)
        load_bytes<8, spec.head_dim_v>(bytes[i], from + key * row_stride, at % words * 8, key < num_there);
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      widen_pairs<spec.dtype_v>(wide, bytes[i]);
      ptx::st_global_v4_b32_if(to + ((first + i) * 32 + lane) * 8, wide, steps % batch == 0 || first + i < steps);
    }
  }
}

// Keys of a block turned, as turn_values.cuh stores them: a lane has four dimensions of sixteen keys at a time, its neighbour
// the same dimensions of the next sixteen, so that two store 32 bytes. `to` is the block, `key0` the unit's first key in it.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void turn_unit(const uint8_t* from, int64_t row_stride, int32_t num_there, uint8_t* to, int32_t key0) {
  constexpr int rows = padded_dim(spec.head_dim_v);
  const int32_t lane = threadIdx.x % 32, half = lane % 2 * 16;
  from += half * row_stride;
#pragma unroll 1
  for (int32_t dim = lane / 2 * 4; dim < rows; dim += 64) {
    uint32_t bytes[16][1], turned[4][4];
#pragma unroll
    for (int key = 0; key < 16; ++key)
      load_bytes<4, spec.head_dim_v>(bytes[key], from + key * row_stride, dim, half + key < num_there);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      using mma::key_at;
      const uint32_t a = bytes[key_at(4 * w)][0], b = bytes[key_at(4 * w + 1)][0];
      const uint32_t c = bytes[key_at(4 * w + 2)][0], d = bytes[key_at(4 * w + 3)][0];
      const uint32_t low[2] = {ptx::prmt(a, b, 0x5140), ptx::prmt(c, d, 0x5140)};   // of dimensions 0 and 1
      const uint32_t high[2] = {ptx::prmt(a, b, 0x7362), ptx::prmt(c, d, 0x7362)};  // of dimensions 2 and 3
      turned[0][w] = ptx::prmt(low[0], low[1], 0x5410), turned[1][w] = ptx::prmt(low[0], low[1], 0x7632);
      turned[2][w] = ptx::prmt(high[0], high[1], 0x5410), turned[3][w] = ptx::prmt(high[0], high[1], 0x7632);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      ptx::st_global_v4_b32_if(to + column_of(dim + e) * tile.block_n + key0 + half, turned[e], true);
  }
}

// By a warp. Returns whether the block has a key that is seen, and was written.
template <FwdSpec spec, Sm90Tile tile, int batch>
FMHA_DEVICE bool prepare_unit(const FwdParams& p, const PreparedValues& values, const Unit& unit) {
  using Tile = typename Smem<spec, tile>::VTile;
  const int32_t i_batch = unit.head / p.num_heads_kv, i_head = unit.head - i_batch * p.num_heads_kv;
  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
  const MaskBand band = resolve_band(p.mask, span.seqlen_q, span.seqlen_k);
  const int32_t end = end_of_seen_keys(band, span.seqlen_q, span.seqlen_k);
  if (unit.block * tile.block_n >= end) return false;
  const int32_t key0 = unit.part * unit_keys(tile), first_key = unit.block * tile.block_n + key0;
  const uint8_t* from = static_cast<const uint8_t*>(p.v.data) + row_offset(p.v, kv_row(p, spec.kv_layout, span, first_key), i_head);
  uint8_t* to = static_cast<uint8_t*>(values.blocks) + (int64_t(unit.head) * values.num_blocks + unit.block) * Tile::tile_bytes;
  if constexpr (widens_v(spec, tile)) {
    widen_unit<spec, tile, batch>(from, p.v.row, end - first_key, reinterpret_cast<uint16_t*>(to) + key0 * Tile::dim);
  } else {
    turn_unit<spec, tile>(from, p.v.row, end - first_key, to, key0);
  }
  return true;
}

// The launch before: a warp to a unit.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void prepare_values(const FwdParams& p, const PreparedValues& values) {
  ptx::launch_dependents();
  ptx::wait_for_grids_before();
  const int32_t index = blockIdx.x * (kPrepareThreads / 32) + threadIdx.x / 32;
  if (index < values.num_units) prepare_unit<spec, tile, 8>(p, values, unit_at<tile>(values, index));
}

// Beside the tiles: `counts` has first the number of units claimed, then of each block how many are finished.
FMHA_DEVICE int32_t claim_unit(const PreparedValues& values) {
  int32_t index = 0;
  if (threadIdx.x % 32 == 0) index = atomicAdd(values.counts, 1);
  return ptx::uniform(index);
}
FMHA_DEVICE int32_t* finished_units(const PreparedValues& values, int32_t head, int32_t block) {
  return values.counts + 1 + int64_t(head) * values.num_blocks + block;
}

template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void prepare_beside(const FwdParams& p, const PreparedValues& values) {
  // Beside three consumers a thread has few registers.
  constexpr int batch = num_consumers(tile) > 2 ? 4 : 8;
  int32_t index = claim_unit(values);
  while (index < values.num_units) {
    const Unit unit = unit_at<tile>(values, index);
    index = claim_unit(values);  // while the unit is prepared
    if (!prepare_unit<spec, tile, batch>(p, values, unit)) continue;
    ptx::fence_proxy_async_global();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::red_release_gpu_add(finished_units(values, unit.head, unit.block), 1);
  }
}

// By the thread that is to load the block by TMA, which is another proxy. A tile without keys has block -1.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void wait_until_prepared(const PreparedValues& values, int32_t head, int32_t block) {
  if (block < 0) return;
  const int32_t* finished = finished_units(values, head, block);
  while (ptx::ld_acquire_gpu(finished) < units_per_block(tile)) {
  }
  ptx::fence_proxy_async_global();
}

}  // namespace fmha::sm90
