// Preparation of a row-major V of 8 bits in the workspace, once for all tiles, in the form that the products take:
// widened to f16 or transposed, as value_role.cuh does block by block for each tile, to the same bits. A launch
// before the main kernel does so, or two spare warps of each of its CTAs beside the tiles at work.
//
// A block of keys lies in one piece, [rows, columns] of its tile in shared memory, to which TMA adds the swizzle:
// [sequence, kv head, block][rows][columns]. Packed sequences have as many blocks each as the longest may. Keys that no
// query sees are zeros up to the end of the last block that is loaded, and of a block behind it nothing is written.
//
// Warps beside the tiles take units of work from a counter, in the order in which the tiles need them, and wait for
// no other warp. So every unit that was taken is finished, and the load role, which waits for a block's units, waits
// only for running warps, however few CTAs run at a time.
#pragma once
#include <fmha/common/work.cuh>
#include <fmha/mma/fp8_operand.cuh>
#include <fmha/ptx/flag.cuh>
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/grid.cuh>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90/fwd/turn_values.cuh>
#include <fmha/sm90/fwd/widen_values.cuh>

namespace fmha::sm90 {

constexpr int kPrepareThreads = 256;

// Keys of a warp's unit of work, a part of a block of a kv head. A unit reads some 2 KB, since the first tiles wait for
// their first blocks. A widened unit has sixteen keys of all dimensions (32 keys if these are few), a transposed one 32
// keys of 64 dimensions.
FMHA_DEVICE consteval int unit_keys(const FwdSpec& spec, const Sm90Tile& tile) {
  const bool wide = !widens_v(spec, tile) || padded_dim(spec.head_dim_v) <= 64;
  return wide && tile.block_n % 32 == 0 ? 32 : 16;
}
FMHA_DEVICE consteval int unit_dims(const FwdSpec& spec, const Sm90Tile& tile) { return widens_v(spec, tile) ? padded_dim(spec.head_dim_v) : 64; }
FMHA_DEVICE consteval int units_of_keys(const FwdSpec& spec, const Sm90Tile& tile) {
  return ceil_div(padded_dim(spec.head_dim_v), unit_dims(spec, tile));
}
FMHA_DEVICE consteval int units_per_block(const FwdSpec& spec, const Sm90Tile& tile) {
  return tile.block_n / unit_keys(spec, tile) * units_of_keys(spec, tile);
}

// Units in order: kv heads whose tiles run together; their blocks, from the last, as tiles walk them; of a block each
// of those heads; its parts.
struct Unit {
  int32_t head, block, part;  // sequence and kv head; block of the sequence; unit of the block
};
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE Unit unit_at(const PreparedValues& values, int32_t index) {
  constexpr int32_t parts = units_per_block(spec, tile);
  const int32_t group_units = values.heads_per_group * values.num_blocks * parts;
  const int32_t group = index / group_units, within = index - group * group_units;
  const int32_t first_head = group * values.heads_per_group;
  const int32_t heads = min(values.heads_per_group, values.num_heads - first_head);
  const int32_t from_last = within / (heads * parts), of_block = within - from_last * (heads * parts);
  return {first_head + of_block / parts, values.num_blocks - 1 - from_last, of_block % parts};
}

// Loads `count` bytes of a row from `column` on, as words of four bytes. Bytes beyond `dim`, and rows that are not
// `there`, become zeros.
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

// Largest divisor of `number` that does not exceed `most`.
FMHA_DEVICE constexpr int largest_divisor(int number, int most) {
  while (number % most != 0) --most;
  return most;
}

// Converts keys of a block to f16, eight elements to a lane at a time, so that a warp stores whole lines. `from` is the
// first key's row in memory, `num_there` how many keys are seen, `to` the first key's in the workspace. `batch`: number
// of loads before the first store, as the threads' registers allow.
template <FwdSpec spec, Sm90Tile tile, int batch>
FMHA_DEVICE void widen_unit(const uint8_t* from, int64_t row_stride, int32_t num_there, uint16_t* to) {
  constexpr int words = padded_dim(spec.head_dim_v) / 8, steps = unit_keys(spec, tile) * words / 32;
  const int32_t lane = threadIdx.x % 32;  // the first of its words of eight elements, then 32 further on each time
  int32_t key = lane / words, word = lane % words;
  from += key * row_stride;
  to += lane * 8;
  constexpr int at_once = largest_divisor(steps, batch);
#pragma unroll 1
  for (int first = 0; first < steps; first += at_once) {
    uint32_t bytes[at_once][2], wide[4];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      load_bytes<8, spec.head_dim_v>(bytes[i], from, word * 8, key < num_there);
      const bool carries = word + 32 % words >= words;
      const int32_t keys = 32 / words + carries;
      key += keys, word += 32 % words - (carries ? words : 0);
      from += keys * row_stride;
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      widen_pairs<spec.dtype_v>(wide, bytes[i][0], bytes[i][1]);
      ptx::st_global_v4_b32_if(to + i * 32 * 8, wide, true);
    }
    to += at_once * 32 * 8;
  }
}

// Transposes 32 keys of a block by 64 dimensions, to the order of turn_values.cuh. A lane has four dimensions of
// sixteen keys, and its neighbour the same dimensions of the next sixteen keys, so that both together store 32 bytes.
// `to` is where the keys begin in the block's first row, `dim0` the first dimension.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void turn_unit(const uint8_t* from, int64_t row_stride, int32_t num_there, uint8_t* to, int32_t dim0) {
  constexpr int rows = padded_dim(spec.head_dim_v);
  const int32_t lane = threadIdx.x % 32, half = lane % 2 * 16, dim = dim0 + lane / 2 * 4;
  from += half * row_stride;
  uint32_t bytes[16][1], turned[4][4];
#pragma unroll
  for (int key = 0; key < 16; ++key) {
    load_bytes<4, spec.head_dim_v>(bytes[key], from, dim, half + key < num_there);
    from += row_stride;
  }
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
    ptx::st_global_v4_b32_if(to + column_of(dim + e) * tile.block_n + half, turned[e], rows % 64 == 0 || dim < rows);
}

// Prepares a block, by one warp. Returns whether the block has a key that is seen, and was written.
template <FwdSpec spec, Sm90Tile tile, int batch>
FMHA_DEVICE bool prepare_unit(const FwdParams& p, const PreparedValues& values, const Unit& unit) {
  using Tile = typename Smem<spec, tile>::VTile;
  const int32_t i_batch = unit.head / p.num_heads_kv, i_head = unit.head - i_batch * p.num_heads_kv;
  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
  const MaskBand band = resolve_band(p.mask, span.seqlen_q, span.seqlen_k);
  const int32_t end = end_of_seen_keys(band, span.seqlen_q, span.seqlen_k);
  if (unit.block * tile.block_n >= end) return false;
  constexpr int units = units_of_keys(spec, tile);
  const int32_t key0 = unit.part / units * unit_keys(spec, tile), first_key = unit.block * tile.block_n + key0;
  const uint8_t* from = static_cast<const uint8_t*>(p.v.data) + row_offset(p.v, kv_row(p, spec.kv_layout, span, first_key), i_head);
  uint8_t* to = static_cast<uint8_t*>(values.blocks) + (int64_t(unit.head) * values.num_blocks + unit.block) * Tile::tile_bytes;
  if constexpr (widens_v(spec, tile)) {
    widen_unit<spec, tile, batch>(from, p.v.row, end - first_key, reinterpret_cast<uint16_t*>(to) + key0 * Tile::dim);
  } else {
    turn_unit<spec, tile>(from, p.v.row, end - first_key, to + key0, unit.part % units * unit_dims(spec, tile));
  }
  return true;
}

// The launch before the main kernel that prepares V: a warp for each unit of work.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void prepare_values(const FwdParams& p, const PreparedValues& values) {
  ptx::launch_dependents();
  ptx::wait_for_grids_before();
  const int32_t index = blockIdx.x * (kPrepareThreads / 32) + threadIdx.x / 32;
  if (index < values.num_units) prepare_unit<spec, tile, 8>(p, values, unit_at<spec, tile>(values, index));
}

// Preparation beside the tiles: `counts` holds the number of units taken, then the number of finished units of each
// block.
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
  // A thread beside three consumer warpgroups has few registers, so it has fewer loads in flight.
  constexpr int batch = num_consumers(tile) > 2 ? 4 : 8;
  int32_t index = claim_unit(values);
  while (index < values.num_units) {
    const Unit unit = unit_at<spec, tile>(values, index);
    index = claim_unit(values);  // before the unit's loads, which take longer
    int32_t* finished = finished_units(values, unit.head, unit.block);
    if (!prepare_unit<spec, tile, batch>(p, values, unit)) continue;
    ptx::fence_proxy_async_global();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::red_release_gpu_add(finished, 1);
  }
}

// Waits for a block's units, in the thread that is to load the block by TMA, which is another proxy. A tile without
// keys has block -1.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void wait_until_prepared(const PreparedValues& values, int32_t head, int32_t block) {
  if (block < 0) return;
  const int32_t* finished = finished_units(values, head, block);
  while (ptx::ld_acquire_gpu(finished) < units_per_block(spec, tile)) {
  }
  ptx::fence_proxy_async_global();
}

}  // namespace fmha::sm90
