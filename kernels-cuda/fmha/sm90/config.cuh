// The Hopper forward kernel's derived numbers, shared memory, barriers and roles.
#pragma once
#include <fmha/mma/sm90.cuh>
#include <fmha/params.h>
#include <fmha/ptx/tma.cuh>
#include <fmha/sm90_host.h>

namespace fmha::sm90 {

using mma::SmemTile;
using ptx::Barrier;
using ptx::TensorMap;

// One warpgroup loads, the others consume 64 rows each; or each does both (multistage.cuh).
FMHA_DEVICE constexpr int num_consumers(const Sm90Tile& tile) { return tile.block_m / mma::kRows; }
FMHA_DEVICE constexpr int num_threads(const Sm90Tile& tile) { return mma::kWarpgroup * (tile.warp_specialised + num_consumers(tile)); }
FMHA_DEVICE constexpr int first_consumer(const Sm90Tile& tile) { return tile.warp_specialised; }
FMHA_DEVICE constexpr int num_consumer_warps(const Sm90Tile& tile) { return 4 * num_consumers(tile); }

// Threads that load: one, which tells the copy engine; or three warps that copy, all of the first
// warpgroup but the schedule role's, the clean role's included: they copy zeros instead.
constexpr int kCopyThreads = 96;
FMHA_DEVICE constexpr int num_load_arrivals(const Sm90Tile& tile) { return tile.copy_bytes > 0 ? kCopyThreads : 1; }
FMHA_DEVICE constexpr int num_work_readers(const Sm90Tile& tile) {
  return num_consumer_warps(tile) + (tile.copy_bytes > 0 ? kCopyThreads / 32 : 2);
}

// This CTA's place in its cluster, whose CTAs have neighbouring query blocks of one head, or the same query
// block of neighbouring heads (`cluster_heads`).
FMHA_DEVICE int32_t cluster_rank(const Sm90Tile& tile) { return tile.cluster > 1 ? blockIdx.x % tile.cluster : 0; }

// Registers a thread after setmaxnreg; role by role they sum to the file's 64 K.
struct Regs {
  int load, consume;
};
FMHA_DEVICE constexpr Regs regs(const Sm90Tile& tile) {
  if (tile.copy_bytes > 0) return num_consumers(tile) == 1 ? Regs{80, 240} : Regs{72, 216};
  switch (num_consumers(tile)) {
    case 1: return {56, 240};
    case 2: return {40, 232};  // 24 spill the schedule role
    default: return {32, 160};
  }
}

// A head dimension as the tiles have it: the copy engine fills with zeros what the tensor lacks.
FMHA_DEVICE constexpr int padded_dim(int dim) { return dim <= 64 ? 64 : round_up(dim, 32); }

// Three maps: Q `(dim, head in group, row, kv head, batch)`, K and V `(dim, row, head, batch)`.
struct Maps {
  TensorMap q, k, v;
};

// Tiles that are known at a time: the one at work, its predecessor whose O is being stored, its
// successor. With two, a tile of one block could wait for itself.
constexpr int kWorkSlots = 3;

// What one CTA does next, resolved by the schedule role for all.
struct Work {
  int32_t num_blocks;   // key blocks, at least 1; 0: there is no more work
  int32_t i_batch, i_head, i_head_kv;
  int32_t first_row;    // of the tile; with packed heads a row is (query, head of the group)
  int32_t storage_batch, q_row, k_row, seqlen_q, seqlen_k;
  int32_t lo, hi, sink_columns;
  int32_t last_block;   // blocks go down from this one,
  int32_t num_band_blocks;    // this many,
  int32_t last_sink_block;    // then down from this one
  int32_t num_hidden;   // of the blocks, from the first, so many only the cluster's other CTA sees
  int32_t first_dirty;  // rows of the first V block from here on are to be zeroed; block_n: none
};

template <FwdSpec spec, Sm90Tile tile>
struct Smem {
  // Q in one piece, or in a warpgroup's 64 rows each; then one piece is spare.
  static constexpr int q_rows = tile.split_q ? mma::kRows : tile.block_m, q_pieces = tile.block_m / q_rows;
  static constexpr int q_buffers = tile.split_q ? q_pieces + 1 : tile.lookahead ? 2 : 1;
  static constexpr bool clustered = tile.cluster > 1;
  using QTile = SmemTile<q_rows, padded_dim(spec.head_dim_qk), clustered>;
  using KTile = SmemTile<tile.block_n, padded_dim(spec.head_dim_qk), clustered>;
  static constexpr bool v_columns = spec.v_layout == VLayout::ColMajor;
  static constexpr int dim_v = padded_dim(spec.head_dim_v);
  using VTile = SmemTile<v_columns ? dim_v : tile.block_n, v_columns ? tile.block_n : dim_v, clustered>;

  QTile q[q_buffers];
  KTile k[tile.stages];
  VTile v[tile.stages];
  Barrier q_full[q_buffers];     // the bytes of Q, or the arrivals of those who copied them
  Barrier q_empty[q_buffers];    // one arrival per warp that reads it
  Barrier k_full[tile.stages];   // likewise of one K block
  Barrier k_empty[tile.stages];  // one arrival per consumer warp of the cluster
  Barrier v_full[tile.stages];   // likewise of one V block, or the clean role's word for them
  Barrier v_raw[tile.stages];    // the bytes of one V block, to be cleaned
  Barrier v_empty[tile.stages];  // one arrival per consumer warp of the cluster
  Barrier work_full[kWorkSlots];   // the schedule role's arrival
  Barrier work_empty[kWorkSlots];  // one arrival per warp that reads it: consumers, load, clean
  Barrier drawn_full;   // the first CTA's schedule role has written `drawn` of the second
  Barrier drawn_empty;  // and the second's has read it
  Work work[kWorkSlots];
  int32_t drawn;
};

// A slot of a ring, and the parity of its barriers.
template <int num_slots>
struct Slot {
  int32_t index = 0;
  uint32_t phase = 0;

  FMHA_DEVICE void advance() {
    if constexpr (num_slots == 1) {
      phase ^= 1;
    } else {
      index = index + 1 == num_slots ? 0 : index + 1;
      phase ^= index == 0;
    }
  }
  FMHA_DEVICE void advance_by(int32_t count) {
    const int32_t sum = index + count, rounds = sum / num_slots;
    index = sum - rounds * num_slots;
    phase ^= rounds & 1;
  }
};

// Query and query head of a row.
template <Sm90Tile tile>
FMHA_DEVICE int32_t query_of(const FwdParams& p, int32_t row) {
  return tile.pack_gqa ? row / p.gqa_ratio : row;
}

}  // namespace fmha::sm90
