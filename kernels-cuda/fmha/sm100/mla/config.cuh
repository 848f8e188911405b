// The derived numbers, the roles, shared memory and tensor memory of the kernel of wide heads on Blackwell.
#pragma once
#include <fmha/common/pipeline.cuh>
#include <fmha/mma/sm100.cuh>
#include <fmha/ptx/mbarrier.cuh>
#include <fmha/ptx/tma.cuh>
#include <fmha/range.h>
#include <fmha/score.h>
#include <fmha/sm100_mla_host.h>

namespace fmha::sm100::mla {

using mma::SmemTile;
using ptx::Barrier;

constexpr int kCtas = 2;                // of a pair
constexpr uint32_t kLeader = 0;         // rank of the one that issues the products of both
constexpr int kRows = 64;               // (query, head) pairs of a CTA
constexpr int kPairRows = kCtas * kRows;
constexpr int kHalf = 64;               // keys of a CTA's half of a block
constexpr int kKeys = kCtas * kHalf;    // of a block
constexpr int kSpan = 64;               // columns of a chunk, 128 bytes
constexpr int kGroup = 256;             // columns of O that one product has, of both CTAs' values
constexpr int kStages = 8;              // of the ring, two chunks each

// Roles, in warps. Softmax and correct have a thread for each lane of tensor memory.
constexpr int kWarps = 4;               // of softmax, of correct, of load
constexpr int kLaneThreads = 32 * kWarps;
constexpr int kCorrectWarp = 4, kLoadWarp = 8, kIssueWarp = 12;
constexpr int kNumThreads = 32 * (kIssueWarp + 1);

// Named barriers: the maxima of both halves of a row are there; rows to be computed again are known; over lists of
// keys, whether the last block has any.
constexpr int kMaximaTold = 1, kSuspectsTold = 2, kAbsentTold = 3;

// 64 rows or keys by 64 columns. Rows of Q, K and V are chunks, zeros behind their last element.
using Chunk = SmemTile<uint16_t, kRows, kSpan, true>;
// Two chunks side by side.
using Wide = SmemTile<uint16_t, kRows, 2 * kSpan, true>;
static_assert(kRows == kHalf && sizeof(Wide) == 2 * sizeof(Chunk), "queries and keys lie alike");

FMHA_DEVICE const Wide& wide(const Chunk& first) { return reinterpret_cast<const Wide&>(first); }

template <FwdSpec spec>
struct Plan {
  static constexpr int chunks_k = ceil_div(spec.head_dim_qk, kSpan);
  static constexpr int slots_k = ceil_div(chunks_k, 2);              // of a block of K
  static constexpr int groups_v = ceil_div(spec.head_dim_v, kGroup);
  static constexpr int slots_v = kCtas * groups_v;
};

// Tensor memory of each CTA: two score slots, and O. A CTA has 64 rows of a product, in 128 lanes: lane l has row
// l % 64, and of the columns the first half (l < 64) or the last.
template <FwdSpec spec>
struct TmemPlan {
  static constexpr int columns = 512;
  FMHA_DEVICE static constexpr int s(int slot) { return slot * (kKeys / 2); }
  FMHA_DEVICE static constexpr int o(int group) { return s(2) + group * (kGroup / 2); }
  static_assert(o(Plan<spec>::groups_v) <= columns, "tensor memory holds S and O");
};

// Place of a thread of softmax or correct in those lanes.
FMHA_DEVICE int32_t lane_of_cta() { return threadIdx.x % kLaneThreads; }
FMHA_DEVICE int32_t row_of_lane() { return lane_of_cta() % kRows; }
FMHA_DEVICE int32_t half_of_lane() { return ptx::uniform(lane_of_cta() / kRows); }

FMHA_DEVICE int32_t rank_in_pair() { return blockIdx.x % kCtas; }

// Over lists of keys: which keys of a block are there, a bit a key. A warp of the load role has a word, of the keys
// that its lanes find. Words of kWords blocks are kept, in turn.
constexpr int kWords = 4;
template <bool listed>
struct PresentKeys {};
template <>
struct PresentKeys<true> {
  alignas(16) uint32_t present[kWords][kWarps];
  Barrier told[kWords];  // one arrival per load warp
};

// The ring's slots come in the order of the products: for each step i the halves of K of block i, then those of V of
// block i - 1.
//
//   K, a slot:  the CTA's 64 keys of a block, 128 columns          slots_k, the last may have 64 columns
//   V, a slot:  64 keys, first those of the leader's half,         for each half of the keys groups_v
//               the CTA's 128 columns of a group of 256
template <FwdSpec spec, bool listed = false>
struct Smem {
  using P = Plan<spec>;
  struct Slot {
    Chunk chunks[2];
  };
  Chunk q[P::chunks_k];
  Chunk p[kKeys / kSpan];  // probabilities of a block
  Slot kv[kStages];
  float row_max[2][kCtas][kRows];  // by the parity of the block, of each half of the keys
  float stats[2][kLaneThreads];    // a row's correction; at the end sum and maximum
  uint32_t suspect[kLaneThreads];  // rows that a thread of the correct role has found non-finite
  // The leader's q_full, kv_full and p_full are used, at which both CTAs arrive.
  Barrier q_full;                  // one arrival per load warp
  Barrier kv_full[kStages];        // one arrival per load warp, and TMA's bytes
  Barrier kv_empty[kStages];       // the products that read the slot are computed
  Barrier s_full[2];               // scores are computed
  Barrier p_full;                  // P is stored and O is at P's maximum: one arrival per softmax and correct warp
  Barrier o_full;                  // O has a block's products, which have read P
  Barrier stats_full;              // one arrival per softmax warp
  Barrier stats_empty;             // one arrival per correct warp
  PresentKeys<listed> list;
  uint32_t tmem;                   // address of the 512 columns
};

// Factor of the exponents: scores are products, or modified ones.
template <FwdSpec spec>
FMHA_DEVICE float scale_log2_of(const FwdParams& p) {
  if constexpr (modifies_score(spec)) return kLog2E;
  // A scale of 0 would make -inf * 0 of hidden scores, and so would a subnormal one, which the multiply-add takes for
  // 0.
  return fmaxf(fabsf(p.softmax_scale) * kLog2E, 1.17549435e-38f);
}

// P of bf16 is scaled in the exponent (range.h).
FMHA_DEVICE consteval int p_offset_log2(const FwdSpec& spec, const Sm100MlaTile& tile) {
  return spec.dtype_v == DType::Bf16 ? offset_log2_of_bf16_p(spec.mask != MaskKind::Full, tile.lazy_rescale_log2) : 0;
}

// Tensor maps of K and V: (dim, row, head, batch or page); over lists of keys matrices, whose rows are those of all
// heads and sequences or pages.
struct Maps {
  ptx::TensorMap k, v;
};

}  // namespace fmha::sm100::mla
