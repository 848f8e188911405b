// `fmha/choose.h` on a vendor's lanes: scores of an indexer, and of blocks.
#pragma once
#include <fmha/choose.h>
#include <fmha/simt/lanes.h>

namespace fmha::simt {

template <IndexSpec spec>
FMHA_DEVICE void index_scores(const ChooseParams& p) {
  const int64_t num = int64_t(p.row_end - p.row_begin) * ceil_div(p.seqlen_k, Lanes::count);
  for_each_row(num, [&](int64_t at) { choose::index_keys<spec, Lanes>(p, at); });
}

FMHA_DEVICE void block_scores(const ChooseParams& p) {
  const int64_t num = int64_t(p.row_end - p.row_begin) * p.num_entries;
  for_each_element(num, [&](int64_t at) { choose::score_block(p, at); });
}

}  // namespace fmha::simt
