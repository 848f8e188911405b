// The running softmax of a consumer thread's two rows.
#pragma once
#include <fmha/mma/sm90.cuh>
#include <fmha/online_softmax.h>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90_host.h>

namespace fmha::sm90 {

// exp2 on the multiply-add pipe, for the share of a tile that the special-function unit has no time
// for. Rounds x down to n + r by adding 1.5 * 2^23 rounding down, then a cubic in r, relative error
// 9e-5 (below f16's 5e-4), and n into the exponent. (Algorithm: Cody and Waite, 1980.)
FMHA_DEVICE float exp2_polynomial(float x) {
  constexpr float magic = 12582912.f;
  x = max(x, -127.f);
  const float shifted = ptx::add_rm_ftz(x, magic);
  const float r = x - (shifted - magic);
  float y = fmaf(r, 0.077119090f, 0.227564394f);
  y = fmaf(r, y, 0.695146143f);
  y = fmaf(r, y, 1.f);
  return float_of((bits_of(shifted) << 23) + bits_of(y));
}

// Over the four lanes that share a row.
template <class Op>
FMHA_DEVICE float quad_reduce(float x, Op op) {
  x = op(x, ptx::shfl_xor(x, 1));
  return op(x, ptx::shfl_xor(x, 2));
}

// -inf, and not fmaxf's NaN handling alone, is what an unseen row has.
struct RowStats {
  float row_max = -infinity();  // of S, before the scale
  float row_sum = 0.f;          // this thread's share of sum exp2((S - row_max) * scale_log2)
};

template <Sm90Tile tile>
struct Softmax {
  RowStats rows[2];
  float correction[2];

  FMHA_DEVICE void reset() { rows[0] = rows[1] = RowStats{}; }

  // The largest of S and of the maxima so far, of this thread's columns.
  template <int n>
  FMHA_DEVICE void raise(float (&row_max)[2], const mma::Accumulator<n>& s) const {
    using S = mma::Accumulator<n>;
    // Two chains a row: one of 32 links, each waiting for the last, takes 140 clocks, in which the
    // warp has nothing else to issue.
    float other_max[2] = {s[1], s[3]};
#pragma unroll
    for (int e = 0; e < S::num_elems; ++e) {
      float& chain = e & 1 ? other_max[S::row(e)] : row_max[S::row(e)];
      chain = fmaxf(chain, s[e]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = fmaxf(row_max[r], other_max[r]);
  }
  // The same by integer maxima of three, half the instructions. Of floats' bits the order of integers is
  // that of the numbers down to 0, so 0 is the least that this finds.
  template <int n>
  FMHA_DEVICE void raise_by_bits(float (&row_max)[2], const mma::Accumulator<n>& s) const {
    using S = mma::Accumulator<n>;
    int32_t chain[2][2] = {};
#pragma unroll
    for (int e = 0; e < S::num_elems; e += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int32_t& link = chain[r][e / 4 & 1];
        link = ptx::max_bits(link, s[e + 2 * r], s[e + 2 * r + 1]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = fmaxf(row_max[r], float_of(uint32_t(max(chain[r][0], chain[r][1]))));
  }
  // Whether that serves this thread's rows, now and until the next tile: a 0 in place of a negative maximum
  // is then kept out by the lazy rescaling, as the maximum itself would be.
  FMHA_DEVICE bool bits_serve(float scale_log2) const {
    const float least = -float(tile.lazy_rescale_log2);
    return rows[0].row_max * scale_log2 >= least && rows[1].row_max * scale_log2 >= least;
  }

  // S becomes P, unnormalised. `never` is an address for the anchor, which is never written.
  template <bool by_bits, int n>
  FMHA_DEVICE void step(mma::Accumulator<n>& s, float scale_log2, uint32_t never) {
    using S = mma::Accumulator<n>;
    float new_max[2] = {rows[0].row_max, rows[1].row_max};
    if constexpr (by_bits) {
      raise_by_bits(new_max, s);
    } else {
      raise(new_max, s);
    }

    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      RowStats& row = rows[r];
      new_max[r] = quad_reduce(new_max[r], [](float a, float b) { return fmaxf(a, b); });
      // A maximum that grew little is kept: P may then exceed 1, up to 2^lazy_rescale_log2, which f32
      // sums and 16-bit P hold as well, and O needs no correction.
      if (row.row_max != -infinity() && (new_max[r] - row.row_max) * scale_log2 <= float(tile.lazy_rescale_log2))
        new_max[r] = row.row_max;
      const float base = finite_or_zero(new_max[r]);
      correction[r] = ptx::ex2_approx_ftz((row.row_max - base) * scale_log2);
      row.row_max = new_max[r];
      row.row_sum *= correction[r];
      shift[r] = base * scale_log2;
    }

#pragma unroll
    for (int e = 0; e < S::num_elems; ++e) {
      const float x = fmaf(s[e], scale_log2, -shift[S::row(e)]);
      const bool on_fma_pipe = tile.exp2_polynomial_every > 0 && e % tile.exp2_polynomial_every == 0;
      s[e] = on_fma_pipe ? exp2_polynomial(x) : ptx::ex2_approx_ftz(x);
      rows[S::row(e)].row_sum += s[e];
      // The wait for P V comes no earlier than this point: ptxas else moves all exponentials behind it.
      // No sum is negative; of its bits, unlike of `< 0`, ptxas does not know that.
      if (tile.wait_anchor > 0 && e + 1 == tile.wait_anchor)
        ptx::st_shared_b32_if(never, 0, bits_of(rows[0].row_sum + rows[1].row_sum) == 0x80000001u);
    }
  }

  // Whether any of the warp's upper (r = 0) or lower rows has another maximum since.
  FMHA_DEVICE bool corrects(int r) const { return __any_sync(ptx::kAllLanes, correction[r] != 1.f); }
};

}  // namespace fmha::sm90
