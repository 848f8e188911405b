// Attention forward over two caches in one softmax, a row at a time: `fmha/row_lists.h` over the keys of both.
#pragma once
#include <fmha/row_lists.h>
#include <fmha/two_caches.h>

namespace fmha {

// Computes row `at` of all (sequence, head, query) triples.
template <FwdSpec spec, class Lanes>
FMHA_DEVICE void two_caches_row(const FwdParams& p, const TwoCachesParams& caches, int64_t at) {
  row_of_keys<spec, Lanes>(p, caches.lists, at, [&](const SeqSpan& span, int32_t i, int32_t i_head_kv) {
    return TwoCaches::of(p, caches, spec.q_layout, span, i, i_head_kv);
  });
}

}  // namespace fmha
