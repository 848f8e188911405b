// The forward kernel under a tree mask. Its band has no upper end: only blocks that contain some of the sequence's last
// keys are masked by the tree, with one bit for each of these keys in a thread's row.
#pragma once
#include <fmha/common/tree_keys.cuh>
#include <fmha/sm100/fwd/fwd.cuh>

namespace fmha::sm100 {

// Keys that a tree mask shows, where each thread has one row of a tile.
struct TreeRows : TreeKeys {
  static constexpr bool has_tile_list = false;
  static constexpr bool of_last_keys = true;  // all keys before the sequence's last ones are seen

  // 32 bits of a query's row from bit `at` on, which may be below 0: the keys before the tree's are 1.
  FMHA_DEVICE uint32_t bits(const int32_t* row, int32_t at) const {
    const auto word = [&](int32_t w) -> uint32_t {
      return w < 0 ? ~0u : w < mask.row_words ? uint32_t(row[w]) : 0u;
    };
    const int32_t first = at >> 5;
    return uint32_t((uint64_t(word(first + 1)) << 32 | word(first)) >> (at & 31));
  }

  // Writes -inf where the tree hides a key of a block from the thread's query `i`. Rows beyond the sequence are treated
  // as the last row.
  template <int n>
  FMHA_DEVICE void hide(float (&s)[n], const SeqSpan& span, int32_t, int32_t i, int32_t block_key) const {
    const int64_t row = int64_t(span.storage_batch) * mask.rows + span.q_row + min(i, span.seqlen_q - 1);
    const int32_t* words = static_cast<const int32_t*>(mask.words) + row * mask.row_words;
    const int32_t first = block_key + span.seqlen_q - span.seqlen_k;
#pragma unroll
    for (int c = 0; c < n; c += 32) {
      const uint32_t shown = bits(words, first + c);
#pragma unroll
      for (int e = 0; e < 32; ++e) {
        if (!(shown >> e & 1)) s[c + e] = -infinity();
      }
    }
  }
};

template <FwdSpec spec, Sm100Tile tile>
FMHA_DEVICE void fwd_tree(const FwdParams& p, const Maps& maps, const TileSchedule& schedule, const TreeMask& tree) {
  // The tree may hide a NaN of V. A kernel whose spec has no mask does not test for hidden NaNs.
  static_assert(spec.mask != MaskKind::Full, "sm100: a tree hides keys");
  static_assert(!is_pair(tile), "sm100: a tree is of few rows");
  const TreeRows seen{{tree}};
  fwd<spec, tile>(p, maps, schedule, seen);
}

}  // namespace fmha::sm100
