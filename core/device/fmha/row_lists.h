// Attention forward over lists of keys, a row at a time: `fmha/row_fwd.h` with a
// list for each token and kv head instead of a range of keys. Each lane handles
// one entry; absent entries are skipped, and a key listed twice counts twice.
#pragma once
#include <fmha/row_fwd.h>
#include <fmha/token_list.h>

namespace fmha {

// One query of one sequence and head, over the keys of a list, or of two caches.
template <FwdSpec spec, class Lanes, class Keys = TokenList>
struct ListRow : FwdRow<spec, Lanes> {
  using Row = FwdRow<spec, Lanes>;
  const ListParams& lists;
  const Keys list;
  float lse_of_keys = 0.f;

  FMHA_DEVICE ListRow(const FwdParams& p, SeqSpan span, int32_t i_head, int32_t i, const ListParams& lists,
                      const Keys& keys)
      : Row{p, span, i_head, i}, lists(lists), list(keys) {}

  // Calls `visit` with a function that gives the elements of a row of bytes.
  template <class Visit>
  FMHA_DEVICE void for_row_of_bytes(int32_t at, Visit visit) const {
    const KvRow place = list.place(spec.kv_layout, at);
    if (lists.row_bytes == 656) {
      const BytesOfRow row = list.template bytes_of<656>(place);
      visit([row](int32_t d) { return element_of_row<656>(row, d); });
    } else {
      const BytesOfRow row = list.template bytes_of<584>(place);
      visit([row](int32_t d) { return element_of_row<584>(row, d); });
    }
  }

  // Product Q[i] . K of stored values, for the key at a place of the list.
  FMHA_DEVICE float product(int32_t at) const {
    const int64_t q = query_offset(this->p, this->span, this->i, this->i_head);
    if (lists.row_bytes != 0) {
      float dot = 0.f;
      for_row_of_bytes(at, [&](auto element) {
        for (int32_t d = 0; d < spec.head_dim_qk; ++d)
          dot += load_elem<spec.dtype_qk>(this->p.q.data, q + d) * element(d);
      });
      return dot;
    }
    const int64_t k =
        list.template offset<size_bytes(spec.dtype_qk)>(this->p.k, list.place(spec.kv_layout, at), this->i_head_kv);
    float dot = 0.f;
    for (int32_t d = 0; d < spec.head_dim_qk; ++d)
      dot += load_elem<spec.dtype_qk>(this->p.q.data, q + d) * load_elem<spec.dtype_qk>(this->p.k.data, k + d);
    return dot;
  }

  FMHA_DEVICE void add_value(int32_t at, float weight) {
    if (lists.row_bytes != 0) {
      return for_row_of_bytes(at, [&](auto element) {
#pragma unroll
        for (int32_t c = 0; c < Row::columns; ++c) {
          const int32_t d = c * Lanes::count + this->lane;
          if (d < spec.head_dim_v) this->o[c] += weight * element(d);
        }
      });
    }
    const int64_t v =
        list.template offset<size_bytes(spec.dtype_v)>(this->p.v, list.place(spec.kv_layout, at), this->i_head_kv);
#pragma unroll
    for (int32_t c = 0; c < Row::columns; ++c) {
      const int32_t d = c * Lanes::count + this->lane;
      if (d < spec.head_dim_v) this->o[c] += weight * load_elem<spec.dtype_v>(this->p.v.data, v + d * this->p.v.dim);
    }
  }

  FMHA_DEVICE void take_list(const Score<spec>& modifiers) {
    const int32_t num = list.count();
    for (int32_t first = 0; first < num; first += Lanes::count) {
      const int32_t at = first + this->lane;
      const int32_t j = at < num ? list.key(at) : -1;
      const bool seen = j >= 0;
      const uint64_t seen_lanes = Lanes::ballot(seen);
      if (seen_lanes == 0) continue;

      const float score = seen ? modifiers.natural({this->i, j}, product(at)) : -infinity();
      const float correction = this->raise_to(max(this->row_max, this->over_lanes(score, larger_of)));
      const float weight = seen ? Row::exp_of_difference(score, finite_or_zero(this->row_max)) : 0.f;
      this->row_sum += this->over_lanes(weight, sum_of);
      this->rescale(correction);
      const float p_j = seen ? this->kept(weight, j) * this->room : 0.f;

      for (int32_t l = 0; l < Lanes::count; ++l) {
        if (!(seen_lanes >> l & 1)) continue;  // an absent V may hold NaN
        add_value(first + l, Lanes::from(p_j, l));
      }
    }
  }

  // Computes all listed keys that the query sees, and its sink.
  FMHA_DEVICE void walk(const Score<spec>& modifiers) {
    take_list(modifiers);
    lse_of_keys = this->row_sum == 0.f ? -infinity() : this->row_max + log2_of(this->row_sum) * kLn2;
    if (has_infinite_sink()) {
      // An infinite sink takes all of the row's weight, so O is 0: exp(inf - inf) would be NaN.
      this->o = {};
      this->row_sum = 0.f;
    } else {
      this->take_sink();
    }
  }

  // Whether the sink is infinite, over scores that are numbers.
  FMHA_DEVICE bool has_infinite_sink() const {
    if constexpr (!spec.sink) return false;
    return scalar_of(this->p.sink, 0, this->i_head, 0.f) == infinity() && lse_of_keys < infinity();
  }

  FMHA_DEVICE void run() {
    const float scale = this->p.softmax_scale * this->descale(this->p.descale_q) * this->descale(this->p.descale_k);
    const Score<spec> modifiers = Score<spec>::of(this->p, this->span, this->i_head, scale);
    walk(modifiers);
    bool is_finite = true;
#pragma unroll
    for (int32_t c = 0; c < Row::columns; ++c) is_finite &= this->o[c] - this->o[c] == 0.f;
    if (Lanes::ballot(!is_finite) != 0) {
      this->row_max = -infinity();
      this->row_sum = 0.f;
      this->o = {};
      this->with_room = true;
      walk(modifiers);
    }
    this->store();
    if constexpr (spec.write_lse && spec.sink) {
      if (this->lane == 0 && (lists.lse_without_sink || has_infinite_sink()))
        this->p.lse[lse_offset(this->p, this->span, this->i_head, this->i)] =
            lists.lse_without_sink ? lse_of_keys : infinity();
    }
  }
};

// Row `at` of all (sequence, head, query) triples, counted by the longest sequence;
// shorter sequences skip the rest. `keys_of` gives the keys of a query and kv head.
template <FwdSpec spec, class Lanes, class KeysOf>
FMHA_DEVICE void row_of_keys(const FwdParams& p, const ListParams& lists, int64_t at, const KeysOf& keys_of) {
  const int32_t i = int32_t(at % p.seqlen_q);
  const int32_t i_head = int32_t(at / p.seqlen_q % p.num_heads_q);
  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, int32_t(at / p.seqlen_q / p.num_heads_q));
  if (i >= span.seqlen_q) return;
  const auto keys = keys_of(span, i, i_head / p.gqa_ratio);
  ListRow<spec, Lanes, decltype(keys_of(span, 0, 0))> row(p, span, i_head, i, lists, keys);
  row.run();
}

template <FwdSpec spec, class Lanes>
FMHA_DEVICE void list_row(const FwdParams& p, const ListParams& lists, int64_t at) {
  row_of_keys<spec, Lanes>(p, lists, at, [&](const SeqSpan& span, int32_t i, int32_t i_head_kv) {
    return TokenList{p, lists, span, resolve_band(p.mask, span.seqlen_q, span.seqlen_k), i, i_head_kv};
  });
}

}  // namespace fmha
