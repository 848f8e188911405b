// The derived numbers, roles and shared memory of the kernel for wide heads.
#pragma once
#include <fmha/cache_rows.h>
#include <fmha/common/score_modifiers.cuh>
#include <fmha/common/softmax.cuh>
#include <fmha/mask.h>
#include <fmha/mma/sm90.cuh>
#include <fmha/ptx/mbarrier.cuh>
#include <fmha/ptx/tma.cuh>
#include <fmha/range.h>
#include <fmha/seq.h>
#include <fmha/sm90_mla_host.h>

namespace fmha::mla {

namespace mma = fmha::mma::sm90;

using ptx::Barrier;

constexpr int kRows = 64;   // (query, head) pairs of a CTA
constexpr int kKeys = 64;   // of a block
constexpr int kSpan = 64;   // columns of a chunk, 128 bytes

constexpr int kWarpgroup = mma::kWarpgroup;
constexpr int kNumThreads = 3 * kWarpgroup;  // one warpgroup loads, two consume

// Registers of a thread, by role, within those of the launch, which is all that `setmaxnreg` deals out. With 96 and
// twice 208, which the multiprocessor has, an H200 waits for ever. The load role has more where it widens.
constexpr int kLaunchRegs = 65536 / kNumThreads / 8 * 8;
struct Regs {
  int load, consume;
};
FMHA_DEVICE consteval Regs regs(const Sm90MlaTile& tile) { return is_fp8(tile.stored) ? Regs{88, 208} : Regs{72, 216}; }

// Whether threads copy every row from its own address. Barriers count such copies as they land, and the thread that
// waits at a barrier issues the fence before the tensor cores read.
FMHA_DEVICE consteval bool gathers(const Sm90MlaTile& tile) { return !tile.by_tma && !is_fp8(tile.stored); }
// Whether barriers count the copies of Q too, so that loads of keys are issued while those of Q are in flight.
FMHA_DEVICE consteval bool counts_q(const Sm90MlaTile& tile) { return !is_fp8(tile.stored); }

// Named barriers. Probabilities of an even or odd block: the warpgroup that has computed them arrives, the other waits.
constexpr int kProbsOfEven = 1, kProbsOfOdd = 2, kConsumers = 3;
constexpr int kScoresRead = 4;  // of warpgroup 0, and the next of warpgroup 1
// Named barriers for CTAs that walk tiles. The first is for the load role alone; at the second the load role arrives
// when it has written a tile's number, for which the consumers wait.
constexpr int kLoaders = 6, kTileTold = 7;
constexpr int kBothGroups = 2 * kWarpgroup;

// CTAs of a cluster: those that share loads, or those that fold their parts of the keys.
FMHA_DEVICE consteval int ctas_of_cluster(const Sm90MlaTile& tile) { return tile.cluster * tile.fold_parts; }

// Whether a CTA walks an equal share of all sequences' blocks (common/shares.cuh), tile after tile.
FMHA_DEVICE consteval bool in_shares(const Sm90MlaTile& tile) { return tile.shares > 0; }

// Whether a CTA walks tiles, those of its share or of lists. Over lists a walk has no registers over FP8 caches and two
// caches, beside a soft-cap, and where O is stored in f32 (as parts are, whose tiles are few) or element by element.
FMHA_DEVICE consteval bool walks_tiles(const FwdSpec& spec, const Sm90MlaTile& tile) {
  return in_shares(tile) || (tile.listed && !tile.two_caches && !is_fp8(tile.stored) && !spec.softcap &&
                             size_bytes(spec.dtype_o) == 2 && tile.vector_store);
}
// Whether barriers carry phases from one tile to the next, or the consumers release Q's memory.
FMHA_DEVICE consteval bool counts_turns(const Sm90MlaTile& tile) { return tile.listed || in_shares(tile); }

// Fields that architecture-independent headers read: those of this tile, and those that other tiles have and this one
// has not. With `bias_stages` a bias is not prefetched into registers, of which O leaves too few.
struct SharedTile {
  int32_t block_m, block_n, lazy_rescale_log2;
  static constexpr int cluster = 1, bias_stages = 1, wait_anchor = 0;
  static constexpr bool pack_gqa = true, fast_softcap = false, cluster_heads = false;
};
FMHA_DEVICE consteval bool sums_output_first(const SharedTile&) { return false; }
FMHA_DEVICE consteval SharedTile shared(const Sm90MlaTile& tile) { return {kRows, kKeys, tile.lazy_rescale_log2}; }

// P of bf16 is scaled in the exponent (range.h).
FMHA_DEVICE consteval int p_offset_log2(const FwdSpec& spec, const Sm90MlaTile& tile) {
  return spec.dtype_v == DType::Bf16 ? offset_log2_of_bf16_p(spec.mask != MaskKind::Full, tile.lazy_rescale_log2) : 0;
}

// 64 rows or keys by 64 columns. Rows of Q, K and V are chunks, zeros behind their last element; so are O's columns
// dealt out: each warpgroup has a half of V's chunks.
template <bool clustered>
using ChunkOf = mma::SmemTile<uint16_t, kRows, kSpan, clustered>;
static_assert(kRows == kKeys, "queries and keys lie alike");

// A block of keys comes in parts, each with barriers of its own.
//
// Latent attention, where V is the first columns of K (`v_in_k`): two blocks are in shared memory at a time: an even
// one in slot 0, whose scores warpgroup 0 computes, and an odd one in slot 1, of warpgroup 1. A part is what one
// warpgroup multiplies P by: a half of V's chunks. Once a block's scores are there its last chunk, the tail, is read
// no more, and takes its probabilities; it comes with the part of the warpgroup that reads the other's probabilities
// there.
//
// Where K's rows have no element besides V's, there is no tail, and probabilities have a chunk of their own.
//
// V apart from K: there is one slot of K and one of V: the next K arrives during the exponentials and the products of
// V, the next V during the scores. The parts are K and the two halves of V.
template <FwdSpec spec, Sm90MlaTile tile>
struct Plan {
  using Chunk = ChunkOf<(ctas_of_cluster(tile) > 1)>;
  static constexpr bool v_in_k = tile.v_in_k;
  static constexpr int chunks_k = ceil_div(spec.head_dim_qk, kSpan);
  static constexpr int chunks_half = ceil_div(spec.head_dim_v, 2 * kSpan), columns_half = chunks_half * kSpan;
  static constexpr int chunks = v_in_k ? chunks_k : chunks_k + 2 * chunks_half;  // of a block
  static constexpr int slots = v_in_k ? 2 : 1, parts = v_in_k ? 4 : 3;
  // Whether K has a chunk that is not V's, which then takes P. Otherwise P has a chunk of its own.
  static constexpr bool has_tail = v_in_k && spec.head_dim_qk > spec.head_dim_v;
  static_assert(!v_in_k || (spec.head_dim_v % (2 * kSpan) == 0 && spec.head_dim_qk == spec.head_dim_v + has_tail * kSpan),
                "sm90_mla: a V in K leaves one chunk of K for P, or none");

  FMHA_DEVICE static int32_t slot_of(int32_t block) { return v_in_k ? block % 2 : 0; }
  // Number of blocks that the slot has held before.
  FMHA_DEVICE static uint32_t turn_of(int32_t block) { return v_in_k ? block / 2 : block; }
  // Number of the part that has one half of a slot's V.
  FMHA_DEVICE static constexpr int part_of(int slot, int half) { return v_in_k ? 2 * slot + half : 1 + half; }
  // Whether the tail chunk of a slot is loaded with this half.
  FMHA_DEVICE static constexpr bool comes_with_tail(int slot, int half) { return has_tail && half == 1 - slot; }
};

// Shared memory of V and the probabilities, where they do not share K's.
template <class Chunk, int chunks_v, bool has_tail>
struct ValueChunks {
  Chunk v[chunks_v];
  Chunk probs;
};
template <class Chunk>
struct ValueChunks<Chunk, 0, false> {
  Chunk probs;
};
template <class Chunk>
struct ValueChunks<Chunk, 0, true> {};

// Counts of what a CTA has walked before: blocks with an even place in their tile, blocks with an odd place, and tiles.
// Barriers need only whether a count is odd, so one register holds all three.
struct Turns {
  static constexpr uint32_t kOdd = 1, kTile = 2;
  uint32_t bits = 0;  // of even places, of odd ones, of tiles

  FMHA_DEVICE uint32_t of_parity(int32_t block) const { return bits >> block % 2; }
  FMHA_DEVICE uint32_t of_all() const { return bits ^ bits >> kOdd; }
  FMHA_DEVICE uint32_t tile() const { return bits >> kTile & 1; }
  FMHA_DEVICE void add(int32_t num_blocks) {
    bits ^= (uint32_t(num_blocks + 1) >> 1 & 1) | (uint32_t(num_blocks) >> 1 & 1) << kOdd | 1u << kTile;
  }
};

struct Work {
  SeqSpan span;
  MaskBand band;
  int32_t i_head_kv, first_row, part;
  int32_t end_query;   // of the rows; those of queries from here on are not stored
  Range part_keys;     // the part's, or all; of a cluster that folds its parts, all of these
  int32_t end;         // keys from here on are seen by no row of the cluster
  int32_t last_block;  // blocks go down from this one,
  int32_t num_blocks;  // this many; 0 where no row sees a key
  bool has_rows;       // of the cluster; else there is nothing to do
  Turns turns;         // before the tile; none where a CTA has one tile

  // The query of a row, which is (query, head of the kv head's group).
  FMHA_DEVICE static int32_t query_of(const FwdParams& p, int32_t row) { return row / p.gqa_ratio; }
  FMHA_DEVICE int32_t head_of(const FwdParams& p, int32_t row, int32_t i) const {
    return i_head_kv * p.gqa_ratio + row - i * p.gqa_ratio;
  }
};

// Which keys of a block are there, where these are a token's list's: a bit a key, of even and of odd blocks. A warp of
// the load role has a word, of its rows in the order in which its lanes find them.
template <bool listed>
struct PresentKeys {};
template <>
struct PresentKeys<true> {
  alignas(16) uint32_t present[2][4];
  Barrier told[2];     // one arrival per warp of the load role
  Barrier q_empty;  // one arrival per warp of the consumers, whose scores have read Q
  // Number of the consumers' tile, -1 after the last; its number of blocks without those left out; number of blocks of
  // earlier tiles.
  int32_t tile, num_blocks;
  uint32_t turns;
};

// The rest of a CTA's share (common/shares.cuh): a number of blocks, beginning at one block of a sequence. Later parts
// begin with the first block of their sequences.
struct LeftOfShare {
  int32_t i_batch, skipped, num_blocks;
};
// A part of a share, and the rest of the share after it.
struct PartOfShare {
  Work work;  // without rows behind the last part
  LeftOfShare left;
};
// The parts that the load role has found last: one is loaded while another one's results are stored.
template <bool in_shares>
struct PartsOfShare {};
template <>
struct PartsOfShare<true> {
  PartOfShare parts[2];
  uint32_t turn;    // the place of the last one
  Barrier q_empty;  // as above
};

// Scales of rows of bytes, of a block in either slot, as they lie in memory.
template <int row_bytes>
struct ScalesOfRows {
  alignas(16) uint8_t of_row[2][kKeys][RowFormat<row_bytes>::scale_bytes];
};
template <>
struct ScalesOfRows<0> {};

// Numbers that the CTAs of a cluster send each other about their parts of the rows, with a place for each CTA.
template <int parts>
struct FoldedRows {
  float row_max[parts][kRows], row_sum[parts][kRows];
  uint32_t again[2][parts][kRows];  // of each warpgroup: whether the row is to be computed again
};
template <>
struct FoldedRows<1> {};

template <FwdSpec spec, Sm90MlaTile tile>
struct Smem : ValueChunks<typename Plan<spec, tile>::Chunk, tile.v_in_k ? 0 : 2 * Plan<spec, tile>::chunks_half,
                          Plan<spec, tile>::has_tail> {
  using P = Plan<spec, tile>;
  using Chunk = typename P::Chunk;
  Chunk q[P::chunks_k];
  Chunk k[P::slots][P::chunks_k];
  float row_max[2][kRows];  // the running maxima after the last block of either warpgroup
  float row_sum[2][kRows];  // each warpgroup's part
  uint32_t suspect[kRows];  // rows that warpgroup 1 has found non-finite
  Barrier q_full;           // one arrival per thread of the load role
  Barrier full[P::parts];   // one arrival per thread of the load role, and TMA's bytes
  Barrier empty[P::parts];  // one arrival per warp of the cluster that reads the part, V's half or K's block
  PresentKeys<tile.listed> list;
  PartsOfShare<in_shares(tile)> share;
  ScalesOfRows<tile.row_bytes> scales;
  FoldedRows<tile.fold_parts> folded;

  FMHA_DEVICE Barrier& q_empty() {
    if constexpr (tile.listed) return list.q_empty;
    else return share.q_empty;
  }
  FMHA_DEVICE const Chunk* half_of_v(int slot, int half) const {
    if constexpr (P::v_in_k) {
      return k[slot] + half * P::chunks_half;
    } else {
      return this->v + half * P::chunks_half;
    }
  }
  // Where the P of a slot's block lies in shared memory.
  FMHA_DEVICE const Chunk& probs_of(int slot) const {
    if constexpr (P::has_tail) {
      return k[slot][2 * P::chunks_half];
    } else {
      return this->probs;
    }
  }
};

// Place of this CTA in its cluster, whose CTAs have neighbouring tiles of rows and walk the same blocks.
template <Sm90MlaTile tile>
FMHA_DEVICE uint32_t rank_in() { return tile.cluster > 1 ? blockIdx.x % tile.cluster : 0; }

// Tensor maps of K and V: (dim, row, head, batch or page).
struct Maps {
  ptx::TensorMap k, v;
};

}  // namespace fmha::mla
