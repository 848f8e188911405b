// The derived numbers, the roles and the shared memory of the latent-attention kernel.
#pragma once
#include <fmha/common/softmax.cuh>
#include <fmha/mma/sm90.cuh>
#include <fmha/ptx/mbarrier.cuh>
#include <fmha/range.h>
#include <fmha/sm90_mla_host.h>

namespace fmha::mla {

namespace mma = fmha::mma::sm90;

using mma::SmemTile;
using ptx::Barrier;

constexpr int kRows = 64;   // (query, head) pairs of a CTA
constexpr int kKeys = 64;   // of a block
constexpr int kHalf = 256;  // columns of V, and of O, to a consumer warpgroup
constexpr int kTail = 64;   // columns of Q and K that V lacks
constexpr int kDimQk = 2 * kHalf + kTail, kDimV = 2 * kHalf;

constexpr int kWarpgroup = mma::kWarpgroup;
constexpr int kNumThreads = 3 * kWarpgroup;  // one warpgroup loads, two consume

// Registers of a thread, by role: within the 65536 of a multiprocessor.
struct Regs {
  static constexpr int load = 72, consume = 216;
};
static_assert((Regs::load + 2 * Regs::consume) * kWarpgroup <= 65536, "registers of all threads");

// Named barriers. Probabilities of an even or odd block: the warpgroup that has computed them arrives, the other waits.
constexpr int kProbsOfEven = 1, kProbsOfOdd = 2, kConsumers = 3;
constexpr int kScoresRead = 4;  // of warpgroup 0, and the next of warpgroup 1
constexpr int kBothGroups = 2 * kWarpgroup;

// What headers read that know no architecture: the fields of this tile, and what others have and it has not.
struct SharedTile {
  int32_t block_m, block_n, lazy_rescale_log2;
  static constexpr int cluster = 1, bias_stages = 0, wait_anchor = 0;
  static constexpr bool pack_gqa = true, fast_softcap = false, cluster_heads = false;
};
FMHA_DEVICE constexpr bool sums_output_first(const SharedTile&) { return false; }
FMHA_DEVICE constexpr SharedTile shared(const Sm90MlaTile& tile) { return {kRows, kKeys, tile.lazy_rescale_log2}; }

// P of bf16 is scaled in the exponent (range.h).
FMHA_DEVICE constexpr int p_offset_log2(const FwdSpec& spec, const Sm90MlaTile& tile) {
  return spec.dtype_v == DType::Bf16 ? offset_log2_of_bf16_p(spec.mask != MaskKind::Full, tile.lazy_rescale_log2) : 0;
}

// 64 rows of Q, or a block of K, whose first 512 columns are V's. Each half of them is what one warpgroup multiplies P by.
struct LatentTile {
  using Half = SmemTile<uint16_t, kRows, kHalf>;
  using Tail = SmemTile<uint16_t, kRows, kTail>;
  Half half[2];
  Tail tail;
};
static_assert(kRows == kKeys, "queries and keys lie alike");

// Two blocks of K are in shared memory at a time: an even one in slot 0, whose scores warpgroup 0 computes, and an odd one in
// slot 1, of warpgroup 1. Once a block's scores are there its tail is read no more, and takes its probabilities.
//
// A slot is filled and released in two parts, one a warpgroup: the half of V that it multiplies P by, and the tail to the
// part of the warpgroup that reads the other's probabilities there.
struct Smem {
  LatentTile q;
  LatentTile k[2];
  float row_max[2][kRows];  // the running maxima after the last block of either slot
  float row_sum[2][kRows];  // each warpgroup's part
  uint32_t suspect[kRows];  // rows that warpgroup 1 has found not finite
  Barrier q_full;           // one arrival per thread of the load role
  Barrier k_full[2][2];     // by slot and half of V; one arrival per thread of the load role, and TMA's bytes
  Barrier k_empty[2][2];    // one arrival per warp of the half's warpgroup
};

// The half with which the tail of a slot is filled and released: that of the warpgroup which reads P there.
FMHA_DEVICE constexpr int half_with_tail(int slot) { return 1 - slot; }

}  // namespace fmha::mla
