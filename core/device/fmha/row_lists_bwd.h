// Attention backward over lists of keys, a row at a time: `fmha/row_bwd.h` with a list for
// each token and kv head instead of a range of keys. A row of dQ reads its token's list. A row
// of dK and dV searches the lists of all tokens in order for its key, and adds a token's pairs
// as often as its list has the key: so every sum has a fixed order, without an inverted list.
#pragma once
#include <fmha/row_bwd.h>
#include <fmha/token_list.h>

namespace fmha {

// The lists of a call, as the masks argument of a row kernel (in place of `NoMasks`).
struct ListsOfRows {
  const FwdParams& p;
  const ListParams& lists;

  FMHA_DEVICE bool sees(const SeqSpan&, int32_t, int32_t, int32_t) const { return true; }
  FMHA_DEVICE TokenList of(const SeqSpan& span, int32_t i, int32_t i_head_kv) const {
    return {p, lists, span, resolve_band(p.mask, span.seqlen_q, span.seqlen_k), i, i_head_kv};
  }
  // The LSE from which P is computed: with the sink, even if the forward wrote LSE without it.
  FMHA_DEVICE float lse_with_sink(const BwdParams& b, int32_t i_head, float lse) const {
    if (!lists.lse_without_sink) return lse;
    const float sink = scalar_of(b.fwd.sink, 0, i_head, -infinity()), top = max(lse, sink);
    if (abs_of(top) == infinity()) return top;
    return top + log2_of(exp2_of((lse - top) * kLog2E) + exp2_of((sink - top) * kLog2E)) * kLn2;
  }
};

// Computes dQ of query i.
template <BwdSpec spec, class Lanes>
FMHA_DEVICE void bwd_list_row(const BwdParams& p, const ListsOfRows& lists, const SeqSpan& span, int32_t i_head,
                              int32_t i) {
  const BwdHead<spec, Lanes> head{p, span, i_head};
  const TokenList list = lists.of(span, i, head.i_head_kv);
  RowSums<spec.fwd.head_dim_qk, Lanes> dq;
  const int32_t count = list.count();
  for (int32_t first = 0; first < count; first += Lanes::count) {
    const int32_t n = first + Lanes::index(), j = n < count ? list.key(n) : -1;
    const uint64_t seen_lanes = Lanes::ballot(j >= 0);
    if (seen_lanes == 0) continue;
    const float dscore = j >= 0 ? head.pair(i, j).dscore : 0.f;
    for (int32_t l = 0; l < Lanes::count; ++l) {
      if (!(seen_lanes >> l & 1)) continue;  // an absent K may hold NaN
      dq.template add<spec.fwd.dtype_qk>(p.fwd.k.data, head.k_row(p.fwd.k, list.key(first + l)),
                                         Lanes::from(dscore, l));
    }
  }
  dq.template store<spec.dtype_grad>(p.dq.data, head.q_row(p.dq, i), p.fwd.softmax_scale * head.descale_k);
}

// Number of times that a token's list names key j.
template <class Lanes>
FMHA_DEVICE float times_listed(const TokenList& list, int32_t j) {
  const int32_t count = list.count();
  float times = 0.f;
  for (int32_t n = Lanes::index(); n < count; n += Lanes::count) times += list.key(n) == j ? 1.f : 0.f;
  return lane_sum<Lanes>(times);
}

// Computes dK and dV of key j. Each lane has a token at a time, and all lanes search its list together.
template <BwdSpec spec, class Lanes>
FMHA_DEVICE void bwd_listed_key(const BwdParams& p, const ListsOfRows& lists, const SeqSpan& span, int32_t i_head_kv,
                                int32_t j) {
  RowSums<spec.fwd.head_dim_qk, Lanes> dk;
  RowSums<spec.fwd.head_dim_v, Lanes> dv;
  for (int32_t first = 0; first < span.seqlen_q; first += Lanes::count) {
    const int32_t end = min(first + Lanes::count, span.seqlen_q), i = first + Lanes::index();
    float times = 0.f;
    for (int32_t token = first; token < end; ++token) {
      const float of_token = times_listed<Lanes>(lists.of(span, token, i_head_kv), j);
      if (token == i) times = of_token;
    }
    const uint64_t seen_lanes = Lanes::ballot(times > 0.f);
    if (seen_lanes == 0) continue;
    for (int32_t g = 0; g < p.fwd.gqa_ratio; ++g) {
      const BwdHead<spec, Lanes> head{p, span, i_head_kv * p.fwd.gqa_ratio + g};
      BwdPair pair = {0.f, 0.f, 0.f, false};
      if (times > 0.f) pair = head.pair(i, j);
      for (int32_t l = 0; l < Lanes::count; ++l) {
        if (!(seen_lanes >> l & 1)) continue;
        const float of_v = Lanes::from(pair.prob * times, l), of_k = Lanes::from(pair.dscore * times, l);
        dv.template add<spec.fwd.dtype_o>(p.dout.data, head.q_row(p.dout, first + l), of_v);
        dk.template add<spec.fwd.dtype_qk>(p.fwd.q.data, head.q_row(p.fwd.q, first + l), of_k);
      }
    }
  }
  const BwdHead<spec, Lanes> head{p, span, i_head_kv * p.fwd.gqa_ratio};
  dk.template store<spec.dtype_grad>(p.dk.data, head.k_row(p.dk, j), p.fwd.softmax_scale * head.descale_q);
  dv.template store<spec.dtype_grad>(p.dv.data, head.k_row(p.dv, j), 1.f);
}

// The second launch: row `at` of dQ, then of dK and dV, then of dSink. Gradients of a bias and of captured tensors
// are not computed over lists.
template <BwdSpec spec, class Lanes>
FMHA_DEVICE void bwd_lists_row(const BwdParams& p, const ListParams& lists_of_call, int64_t at) {
  static_assert(!spec.write_dbias && !spec.write_dcaptured, "lists: dQ, dK, dV and dSink");
  const ListsOfRows lists{p.fwd, lists_of_call};
  if (at < num_query_rows(p)) {
    const int32_t i = int32_t(at % p.fwd.seqlen_q), i_head = int32_t(at / p.fwd.seqlen_q % p.fwd.num_heads_q);
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout,
                                     int32_t(at / p.fwd.seqlen_q / p.fwd.num_heads_q));
    if (i < span.seqlen_q) bwd_list_row<spec, Lanes>(p, lists, span, i_head, i);
    return;
  }
  at -= num_query_rows(p);
  if (at < num_key_rows(p)) {
    const int32_t j = int32_t(at % p.fwd.seqlen_k), i_head_kv = int32_t(at / p.fwd.seqlen_k % p.fwd.num_heads_kv);
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout,
                                     int32_t(at / p.fwd.seqlen_k / p.fwd.num_heads_kv));
    if (j < span.seqlen_k) bwd_listed_key<spec, Lanes>(p, lists, span, i_head_kv, j);
    return;
  }
  at -= num_key_rows(p);
  if constexpr (spec.write_dsink) {
    if (at < p.fwd.num_heads_q) bwd_sink<spec, Lanes>(p, int32_t(at));
  }
}

}  // namespace fmha
