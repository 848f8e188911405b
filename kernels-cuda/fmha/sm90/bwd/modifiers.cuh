// Score modifiers and dropout on a fragment of S^T: a key to a row, queries along it.
//
// A modifier changes the scores of which P are exponentials; a map (score.h) also changes the factor between dS and the
// gradient of the product. Its slope is kept from S to dS in 16 bits, since registers are scarce. Dropout changes P as
// dV sees it, and dP.
#pragma once
#include <fmha/common/score_pair.cuh>
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90/bwd/work.cuh>
#include <fmha/common/philox_parts.cuh>

namespace fmha::sm90::bwd {

// Which elements of a thread's fragment dropout keeps, a bit to each.
//
// One call of the generator decides four keys of a query, which four lanes hold. They hold two queries of an 8-column
// group in two rows each: four calls, one a lane, whose bits they exchange. A lane's calls have four keys in common,
// and so what the generator's first rounds leave of those.
//
// The bits lie in the order of the elements, so that ptxas can test them without shifts.
template <int n>
struct KeptBits {
  static constexpr int num_groups = n / 8, groups_a_word = 8, num_words = ceil_div(num_groups, groups_a_word);
  uint32_t words[num_words];

  FMHA_DEVICE static constexpr uint32_t bit_of(int e) { return 1u << e % 32; }
  FMHA_DEVICE bool has(int e) const { return words[e / 32] & bit_of(e); }

  // P with the elements that dropout drops set to 0.
  FMHA_DEVICE mma::Accumulator<n> kept_of(const mma::Accumulator<n>& probs) const {
    mma::Accumulator<n> kept;
#pragma unroll
    for (int e = 0; e < probs.num_elems; ++e) kept[e] = has(e) ? probs[e] : 0.f;
    return kept;
  }

  // Decides part `part` of `parts` of the elements, in ascending order; the bits are complete after the last part.
  // `first_key` is the first of the warpgroup's rows, `first_query` the first of the columns.
  template <int part, int parts>
  FMHA_DEVICE void decide(const FwdParams& p, int32_t batch_head, int32_t first_key, int32_t first_query) {
    constexpr int begin = num_groups * part / parts, end = num_groups * (part + 1) / parts;
    static_assert(begin % kCalls == 0 && end % kCalls == 0, "calls are made several at a time");
    // Index of this lane among the four lanes whose keys one call decides. It selects the lane's key, and the call
    // that the lane makes: bit 0 the query, bit 1 the row.
    const int32_t own = threadIdx.x / 4 % 4;
    const int32_t quad = (first_key + mma::fragment_row() + (own & 2 ? 8 : 0)) / 4;
    const int32_t query = first_query + mma::fragment_column() + (own & 1);
    call<begin, end>(p, dropout_quad(p, batch_head, quad), [&](int g) { return dropout_row(p, batch_head, query + 8 * g); });
    if constexpr (part + 1 == parts) exchange(own);
  }
  // Decides all columns at once, from what `begin_head` has kept of the warp's keys. Each lane computes its share of
  // what the columns have in common: with 128 columns 244 products a thread in place of 262.
  template <class Parts>
  FMHA_DEVICE void decide(const FwdParams& p, Parts& warp, int32_t batch_head, int32_t first_query) {
    const int32_t lane = threadIdx.x % 32, own = lane / 4 % 4;
    __syncwarp();
#pragma unroll
    for (int32_t i = 0; i < n; i += 32) warp.rows[i + lane] = dropout_row(p, batch_head, first_query + i + lane);
    __syncwarp();
    const auto& rows = warp.rows;
    const int32_t query = mma::fragment_column() + (own & 1);
    call<0, num_groups>(p, warp.quads[lane / 16 + (own & 2)], [&](int g) { return rows[query + 8 * g]; });
    exchange(own);
  }
  template <class Parts>
  FMHA_DEVICE static void begin_head(const FwdParams& p, Parts& warp, int32_t batch_head, int32_t first_key) {
    const int32_t lane = threadIdx.x % 32;
    if (lane < 4) warp.quads[lane] = dropout_quad(p, batch_head, (first_key + threadIdx.x % mma::kWarpgroup / 32 * 16) / 4 + lane);
    __syncwarp();
  }

 private:
  // Philox calls whose instructions are interleaved.
  static constexpr int kCalls = 2;

  template <int begin, int end, class RowOf>
  FMHA_DEVICE void call(const FwdParams& p, const Array<uint32_t, 4>& of_quad, RowOf row_of) {
#pragma unroll
    for (int g = begin; g < end; g += kCalls) {
      Array<uint32_t, 4> decided[kCalls];
#pragma unroll
      for (int c = 0; c < kCalls; ++c) decided[c] = dropout_counter(of_quad, row_of(g + c));
      philox_rounds<3>(decided, p.dropout_key_low, p.dropout_key_high);
      uint32_t called = 0;
#pragma unroll
      for (int c = 0; c < kCalls; ++c) {
#pragma unroll
        for (int key = 0; key < 4; ++key) {
          if (decided[c][key] < p.dropout_threshold) called |= bit_of(4 * (g + c) + key);
        }
      }
      uint32_t& word = words[g / groups_a_word];
      word = g % groups_a_word == 0 ? called : word | called;
    }
  }

  // Exchanges the bits of the calls that four lanes made: a lane's call has the bits of four keys, and each lane gets
  // its own key's. A matrix of four lanes by four bits is transposed, for all groups at once.
  FMHA_DEVICE void exchange(int32_t own) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
      const uint32_t low = bit == 1 ? 0x55555555u : 0x33333333u, stays = own & bit ? ~low : low;
      const uint32_t rotation = own & bit ? 32 - bit : bit;
#pragma unroll
      for (int w = 0; w < num_words; ++w) {
        const uint32_t other = ptx::rotate_left(ptx::shfl_xor(words[w], 4 * bit), rotation);
        words[w] = (words[w] & stays) | (other & ~stays);
      }
    }
  }
};

template <BwdSpec spec, Sm90BwdTile tile>
struct Modifiers {
  using Scores = mma::Accumulator<num_columns(tile)>;
  static constexpr FwdSpec kFwd = spec.fwd;

  static constexpr bool has_slopes = num_maps(kFwd) > 0;
  // Slopes of a block's scores, two packed in a register.
  struct Slopes {
    uint32_t pairs[has_slopes ? num_columns(tile) / 4 : 1];

    FMHA_DEVICE void multiply(float& low, float& high, int e) const {
      float slopes[2];
      ptx::unpack_x2<slope_dtype(kFwd)>(pairs[e / 2], slopes[0], slopes[1]);
      low *= slopes[0];
      high *= slopes[1];
    }
  };

  using Modified = BwdScore<spec, tile>;
  static constexpr bool has_biases = Modified::reads;
  // Elements of an elementwise bias, one in each register. They are loaded before the wait for the scores, since loads
  // from memory take long.
  struct Biases {
    uint32_t bits[has_biases ? num_columns(tile) / 2 : 1];

    FMHA_DEVICE float operator[](int e) const {
      if constexpr (kFwd.dtype_bias == DType::F32) {
        return __uint_as_float(bits[e]);
      } else {
        float low, high;
        ptx::unpack_x2<kFwd.dtype_bias>(bits[e], low, high);
        return low;
      }
    }
  };

  const Modified modified;
  const int32_t key, query;          // the thread's first
  const int32_t end_key, end_query;  // of the sequence
  const float* const origins;        // of the block's first query

  FMHA_DEVICE static Modifiers of(const BwdParams& p, const Work& work, int32_t i_head, int32_t first_key,
                                  int32_t first_query) {
    const int64_t stats = stats_offset(p, work.span, i_head, first_query);
    return {Modified::of(p.fwd, work.span, i_head, p.fwd.softmax_scale),
            first_key + mma::fragment_row(),
            first_query + mma::fragment_column(),
            work.span.seqlen_k,
            work.span.seqlen_q,
            Modified::modifies ? p.score_origin + stats : nullptr};
  }

  FMHA_DEVICE Pair pair(int e) const { return {query, key, Scores::column(e), 8 * Scores::row(e)}; }
  FMHA_DEVICE Biases biases() const {
    Biases biases = {};
    if constexpr (has_biases) {
      const bool whole = key + 8 < end_key && query + Scores::column(num_columns(tile) / 2 - 1) < end_query;
      if (whole) {
        fetch<true>(biases);
      } else {
        fetch<false>(biases);
      }
      __syncwarp();
    }
    return biases;
  }
  // Elements beyond the sequence's lengths do not exist and count as zeros. One pointer moves from column to column:
  // the addresses of all columns would take as many registers as the scores.
  template <bool whole>
  FMHA_DEVICE void fetch(Biases& biases) const {
    constexpr int elem_bytes = size_bytes(kFwd.dtype_bias);
    const int64_t row_bytes = modified.bias.row * elem_bytes;
    const char* at = static_cast<const char*>(modified.bias.data) + query * row_bytes + key * int64_t(elem_bytes);
#pragma unroll
    for (int e = 0; e < num_columns(tile) / 2; e += 4) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int k = e + 2 * row + column;
          const bool there = whole || (key + 8 * row < end_key && query + Scores::column(k) < end_query);
          const char* from = at + 8 * row * elem_bytes;
          if constexpr (kFwd.dtype_bias == DType::F32) {
            biases.bits[k] = __float_as_uint(ptx::ld_global_f32_if(from, there));
          } else {
            biases.bits[k] = ptx::ld_global_u16_if(from, there);
          }
        }
        at += (column == 0 ? 1 : 7) * row_bytes;
      }
    }
  }

  // Whether any of a fragment's queries is far, given their LSE in log2: each lane of a warp checks one query.
  FMHA_DEVICE static bool any_far(const float* lse_log2) {
    bool any = false;
#pragma unroll
    for (int first = 0; first < num_columns(tile); first += 32) {
      const int32_t at = first + threadIdx.x % 32;
      any |= is_marked_far(lse_log2[num_columns(tile) % 32 == 0 ? at : min(at, num_columns(tile) - 1)]);
    }
    return __any_sync(ptx::kAllLanes, any);
  }

  // Converts raw scores to the arguments of P's exponentials: two queries of two keys, elements `e` to `e + 3`.
  // `from_origins`: some of the queries have an origin, from which natural scores, rounded as the forward does, are
  // measured; a P is 1 at most.
  template <bool from_origins>
  FMHA_DEVICE void apply(Scores& s, int e, const float (&lse_log2)[2], const Biases& biases, Slopes& slopes) const {
    float slope[4];
#pragma unroll
    for (int column = 0; column < 2; ++column) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int k = 2 * row + column;
        const auto bias = [&] { return biases[e + k]; };
        Scored score;
        if constexpr (from_origins) {
          const float origin = origins[mma::fragment_column() + Scores::column(e) + column];
          score = modified.natural(pair(e + k), s[e + k], bias);
          score.score = min(fmaf(score.score - origin, kLog2E, -unmarked(lse_log2[column])), 0.f);
        } else {
          score = modified.log2(pair(e + k), s[e + k], -lse_log2[column], bias);
        }
        s[e + k] = score.score;
        slope[k] = kept_slope<kFwd>(score.slope);
      }
    }
    if constexpr (has_slopes) {
      slopes.pairs[e / 2] = ptx::cvt_rn_x2<slope_dtype(kFwd)>(slope[0], slope[1]);
      slopes.pairs[e / 2 + 1] = ptx::cvt_rn_x2<slope_dtype(kFwd)>(slope[2], slope[3]);
    }
  }
};

}  // namespace fmha::sm90::bwd
