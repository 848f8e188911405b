// The generator of philox.h in parts, for a kernel that draws for many keys of many queries. Of its twenty products
// four depend on the keys and the head alone and one on the query; they are computed once for many pairs.
#pragma once
#include <fmha/philox.h>

namespace fmha {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;  // each round's multipliers
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;  // what each round adds to the key

// Rounds `first` to 9 of ten, of several counters at once: within one counter each round waits for the products of the
// one before.
template <int first, int n>
FMHA_DEVICE void philox_rounds(Array<uint32_t, 4> (&counters)[n], uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = first; round < 10; ++round) {
#pragma unroll
    for (int c = 0; c < n; ++c) {
      Array<uint32_t, 4>& counter = counters[c];
      const uint64_t a = uint64_t(kPhiloxM0) * counter[0], b = uint64_t(kPhiloxM1) * counter[2];
      counter = {{uint32_t(b >> 32) ^ counter[1] ^ (key0 + round * kPhiloxW0), uint32_t(b),
                  uint32_t(a >> 32) ^ counter[3] ^ (key1 + round * kPhiloxW1), uint32_t(a)}};
    }
  }
}

// Result of the generator's first three rounds, from four keys and a head alone. The counter of keys 4 * j_quad .. 4
// * j_quad + 3 and query i is (j_quad, i, batch_head, offset), positions in the whole that the call is a part of
// (head_of_whole, philox.h). Five of these rounds' six products depend on the keys or on the query alone.
FMHA_DEVICE Array<uint32_t, 4> dropout_quad(const FwdParams& p, int32_t batch_head, int32_t j_quad) {
  const uint32_t whole_quad = j_quad + p.dropout_first_quad;
  const uint64_t a1 = uint64_t(kPhiloxM0) * whole_quad, b1 = uint64_t(kPhiloxM1) * uint32_t(batch_head);
  const uint64_t b2 = uint64_t(kPhiloxM1) * (uint32_t(a1 >> 32) ^ p.dropout_offset ^ p.dropout_key_high);
  const uint64_t a3 = uint64_t(kPhiloxM0) * (uint32_t(b2 >> 32) ^ uint32_t(b1) ^ (p.dropout_key_low + kPhiloxW0));
  return {{uint32_t(a1), uint32_t(b2) ^ (p.dropout_key_low + 2 * kPhiloxW0),
           uint32_t(a3 >> 32) ^ (p.dropout_key_high + 2 * kPhiloxW1), uint32_t(a3)}};
}
// Result of the generator's first three rounds, from a query and a head alone, for any keys.
FMHA_DEVICE Array<uint32_t, 2> dropout_row(const FwdParams& p, int32_t batch_head, int32_t i) {
  const uint64_t b1 = uint64_t(kPhiloxM1) * uint32_t(batch_head);
  const uint32_t query = i + p.dropout_first_query;
  const uint64_t a2 = uint64_t(kPhiloxM0) * (uint32_t(b1 >> 32) ^ query ^ p.dropout_key_low);
  return {{uint32_t(a2 >> 32) ^ (p.dropout_key_high + kPhiloxW1), uint32_t(a2)}};
}
// Counter of a quad and a query before the fourth round.
FMHA_DEVICE Array<uint32_t, 4> dropout_counter(const Array<uint32_t, 4>& quad, const Array<uint32_t, 2>& row) {
  const uint64_t b3 = uint64_t(kPhiloxM1) * (row[0] ^ quad[0]);
  return {{uint32_t(b3 >> 32) ^ quad[1], uint32_t(b3), row[1] ^ quad[2], quad[3]}};
}
// Computes the random words of several groups of four keys for one query, from their counters after the third round.
template <int n>
FMHA_DEVICE void dropout_words(Array<uint32_t, 4> (&quads)[n], const FwdParams& p, const Array<uint32_t, 2>& row) {
#pragma unroll
  for (int c = 0; c < n; ++c) quads[c] = dropout_counter(quads[c], row);
  philox_rounds<3>(quads, p.dropout_key_low, p.dropout_key_high);
}

}  // namespace fmha
