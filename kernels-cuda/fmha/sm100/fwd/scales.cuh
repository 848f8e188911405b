// Scales of MXFP8 and NVFP4, from the caller's tensors to shared memory: bytes of any strides, gathered into the tiles
// that tcgen05.cp takes. A block of 128 rows has 512 bytes for each 128 elements of a row, so gathering costs a warp
// sixteen loads a lane, and no launch lays tensors of scales out before.
//
//   zero role, with scales    the scales of each block, in the order of the load role; V's zeros and transposition too
//   both copying warps         without TMA, each thread its share
//
// A scale that no element needs is not read, and is 1.
#pragma once
#include <fmha/block_scales.h>
#include <fmha/common/zero_rows.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm100/fwd/block_keys.cuh>
#include <fmha/sm100/fwd/pair.cuh>
#include <fmha/sm100/fwd/transpose_pairs.cuh>

namespace fmha::sm100 {

// Loads of tensors with scales.
struct BlockScales {
  const BlockScaleParams& of;

  FMHA_DEVICE ScaledElems elems() const { return {of}; }
};

// Words of a tile's line: those of rows l, l + 32, l + 64 and l + 96.
struct ScaleLine {
  uint32_t words[mma::sm100::kScaleColumns];

  FMHA_DEVICE void store(const mma::sm100::ScaleTile& tile, int32_t l) const { ptx::st_shared_v4(tile.line(l), words); }
};

template <FwdSpec spec, Sm100Tile tile, class SeenKeys>
struct ScaleReader {
  using Keys = BlockKeys<spec, tile, SeenKeys>;
  using Tiles = ScaleTiles<spec, tile>;
  // 1 of either type, and the bits of a scale: that of E4M3 has no sign.
  static constexpr uint32_t one = has_pairs(tile) ? 0x38 : 127, ones = one * 0x01010101;
  static constexpr uint32_t scale_bits = has_pairs(tile) ? 0x7f : 0xff;

  const FwdParams& p;
  const BlockScaleParams& scales;
  const SeenKeys& seen;

  FMHA_DEVICE static uint32_t byte(const View& of, int64_t at) {
    return static_cast<const uint8_t*>(of.data)[at] & scale_bits;
  }

  // Word `word` of the scales along the row that begins at `at`.
  FMHA_DEVICE static uint32_t along_row(const View& of, int64_t at, int32_t word) {
    constexpr int count = ceil_div(spec.head_dim_qk, tile.scale_block);
    uint32_t scales = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int32_t block = 4 * word + b;
      scales |= (block < count ? byte(of, at + block * of.dim) : one) << 8 * b;
    }
    return scales;
  }

  // Line l of tile `word` of a query tile.
  FMHA_DEVICE ScaleLine of_queries(const Work& work, int q, int32_t word, int32_t l) const {
    ScaleLine line;
#pragma unroll
    for (int g = 0; g < mma::sm100::kScaleColumns; ++g) {
      const int32_t packed_row = first_row_of<tile>(work, q) + 32 * g + l, i = query_of<tile>(p, packed_row);
      const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - i * p.gqa_ratio : work.i_head;
      // Packed rows have no batch stride.
      const int64_t row = (p.q.batch == 0 ? work.q_row : 0) + i;
      line.words[g] = i < work.seqlen_q && i_head < p.num_heads_q
                          ? along_row(scales.q, row_offset(scales.q, work.i_batch, row, i_head), word)
                          : ones;
    }
    return line;
  }
  // Line l of tile `word` of a block of keys.
  FMHA_DEVICE ScaleLine of_keys(const Keys& keys, int32_t word, int32_t l) const {
    const int32_t first = keys.block(seen) * tile.block_n;
    ScaleLine line;
#pragma unroll
    for (int g = 0; g < mma::sm100::kScaleColumns; ++g) {
      const int32_t j = first + 32 * g + l;
      const bool there = 32 * g < tile.block_n && j >= 0 && j < keys.seqlen_k;
      line.words[g] = there ? along_row(scales.k, row_offset(scales.k, keys.place(p, j), keys.i_head_kv), word) : ones;
    }
    return line;
  }
  // Line l of tile `part` of a block of V: 128 columns of V; a word has the scales of 128 keys, of pairs of 64.
  FMHA_DEVICE ScaleLine of_values(const Keys& keys, int32_t at_tile, int32_t l) const {
    // Keys of pairs have tiles of their own for each 64.
    const int32_t part = at_tile % Tiles::columns;
    const int32_t first = keys.block(seen) * tile.block_n + at_tile / Tiles::columns * 64;
    ScaleLine line = {{ones, ones, ones, ones}};
#pragma unroll
    for (int b = 0; b < (has_pairs(tile) ? 4 : tile.block_n / tile.scale_block); ++b) {
      const int32_t j = first + tile.scale_block * b;
      if (j < 0 || j >= keys.seqlen_k) continue;
      const KvRow place = keys.place(p, j);
      const int64_t at = row_offset(scales.v, place.batch, place.row / tile.scale_block, keys.i_head_kv);
#pragma unroll
      for (int g = 0; g < mma::sm100::kScaleColumns; ++g) {
        const int32_t d = 128 * part + 32 * g + l;
        if (d >= spec.head_dim_v) continue;
        line.words[g] = line.words[g] & ~(0xffu << 8 * b) | byte(scales.v, at + d * scales.v.dim) << 8 * b;
      }
    }
    return line;
  }
};

// The zero role where scales are to be brought beside TMA's bytes. What it reads is in registers before it waits for
// the block's slot.
template <FwdSpec spec, Sm100Tile tile, class SeenKeys, int blocks_ahead>
struct ScaleRole {
  using Shared = Smem<spec, tile>;
  using Tiles = ScaleTiles<spec, tile>;
  using Reader = ScaleReader<spec, tile, SeenKeys>;

  Shared& smem;
  const Reader reader;
  const int32_t lane = threadIdx.x % 32;
  Slot<tile.stages> ring;
  Slot<kWorkSlots> k_work, v_work;
  typename Reader::Keys k = {}, v = {};
  uint32_t q_phase = 1, raw_phases = 0;  // of kv_raw a bit a slot: only blocks that the role changes have a phase
  bool more = true;

  // Stores lines of tiles, which the tensor cores read.
  template <int tiles, class Slots>
  FMHA_DEVICE void put(const Slots& to, const ScaleLine (&lines)[tiles], Barrier& full) const {
#pragma unroll
    for (int i = 0; i < tiles; ++i) lines[i].store(to[i], lane);
    announce(full);
  }
  FMHA_DEVICE void announce(Barrier& full) const {
    ptx::fence_proxy_async();
    __syncwarp();
    ptx::mbarrier_arrive_if(full, lane == 0);
  }

  FMHA_DEVICE void begin_k() {
    ptx::mbarrier_wait_parity(smem.work_full[k_work.index], k_work.phase);
    const Work& work = smem.work[k_work.index];
    k.begin(work);
    k_work.advance();
    more = k.end > 0;
    if (!more) return;
#pragma unroll
    for (int q = 0; q < Shared::q_tiles; ++q) {
      ScaleLine lines[Tiles::qk];
#pragma unroll
      for (int word = 0; word < Tiles::qk; ++word) lines[word] = reader.of_queries(work, q, word, lane);
      ptx::mbarrier_wait_parity(smem.q_empty[q], q_phase);
      put(smem.q_scales[q], lines, smem.q_full[q]);
    }
    q_phase ^= 1;
  }
  FMHA_DEVICE void put_k() {
    if (k.next == k.end && more) begin_k();
    if (!more) return;
    ScaleLine lines[Tiles::qk];
#pragma unroll
    for (int word = 0; word < Tiles::qk; ++word) lines[word] = reader.of_keys(k, word, lane);
    ptx::mbarrier_wait_parity(smem.kv_empty[ring.index], ring.phase ^ 1);
    put(smem.kv_scales[ring.index], lines, smem.kv_full[ring.index]);
    ring.advance();
    ++k.next;
  }
  FMHA_DEVICE bool begin_v() {
    ptx::mbarrier_wait_parity(smem.work_full[v_work.index], v_work.phase);
    v.begin(smem.work[v_work.index]);
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.work_empty[v_work.index], lane == 0);
    v_work.advance();
    return v.end > 0;
  }
  FMHA_DEVICE void put_v() {
    ScaleLine lines[Tiles::v];
#pragma unroll
    for (int part = 0; part < Tiles::v; ++part) lines[part] = reader.of_values(v, part, lane);
    const int32_t slot = ring.index;
    ptx::mbarrier_wait_parity(smem.kv_empty[slot], ring.phase ^ 1);
    put(smem.kv_scales[slot], lines, smem.kv_full[slot]);
    const bool zeroes = !has_pairs(tile) && v.next == 0 && v.first_dirty < tile.block_n;
    if (transposes_v(spec, tile) || zeroes) {
      ptx::mbarrier_wait_parity(smem.kv_raw[slot], raw_phases >> slot & 1);
      raw_phases ^= 1u << slot;
      if constexpr (transposes_v(spec, tile)) {
        transpose_pairs<spec, tile, 32>(smem.kv[slot], lane, [] { __syncwarp(); });
      } else {
        zero_keys(smem.kv[slot].v(), v.first_dirty);
      }
      // TMA has announced its bytes at kv_raw.
      announce(smem.kv_full[slot]);
    }
    ring.advance();
    ++v.next;
  }
  template <class Tile>
  FMHA_DEVICE void zero_keys(const Tile& values, int32_t first) const {
    if constexpr (Shared::v_columns) {
      zero_columns(values, first, lane, 32);
    } else {
      zero_rows(values, first, lane, 32);
    }
  }

  FMHA_DEVICE void run() {
#pragma unroll 1
    for (int i = 0; i < blocks_ahead; ++i) put_k();
    while (begin_v()) {
#pragma unroll 1
      while (v.next < v.end) {
        put_v();
        put_k();
      }
    }
  }
};

}  // namespace fmha::sm100
