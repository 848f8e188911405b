// `fmha/index_loss.h` on a vendor's lanes.
#pragma once
#include <fmha/index_loss.h>
#include <fmha/simt/lanes.h>

namespace fmha::simt {

template <IndexLossSpec spec>
FMHA_DEVICE void index_loss_scores(const IndexLossParams& p) {
  const int64_t num = index_loss::num_rows(p) * ceil_div(p.topk, Lanes::count);
  for_each_row(num, [&](int64_t at) { index_loss::scores<spec, Lanes>(p, at); });
}

// Losses of rows; then, where other launches add to gradients of keys, zeros there.
template <IndexLossSpec spec, bool clears>
FMHA_DEVICE void index_loss(const IndexLossParams& p) {
  const int64_t rows = index_loss::num_rows(p), keys = clears && p.dk ? int64_t(p.batch) * p.seqlen_k : 0;
  for_each_row(rows + keys, [&](int64_t at) {
    if (at < rows) index_loss::loss_row<Lanes>(p, at);
    else index_loss::clear_key<spec, Lanes>(p, at - rows);
  });
}

template <IndexLossSpec spec>
FMHA_DEVICE void index_loss_queries(const IndexLossParams& p) {
  const int64_t num = index_loss::num_rows(p) * spec.num_heads;
  for_each_row(num, [&](int64_t at) { index_loss::query_head<spec, Lanes>(p, at); });
}

template <IndexLossSpec spec>
FMHA_DEVICE void index_loss_keys(const IndexLossParams& p) {
  for_each_row(index_loss::num_key_groups(p), [&](int64_t at) { index_loss::keys<spec, Lanes>(p, at); });
}

}  // namespace fmha::simt
