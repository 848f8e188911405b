// The online softmax of a thread's two rows of a fragment.
//
// `tile` is any architecture's; of its fields lazy_rescale_log2 and wait_anchor are read, and
// `sums_output_first(tile)`.
#pragma once
#include <fmha/common/quads.cuh>
#include <fmha/online_softmax.h>
#include <fmha/range.h>

namespace fmha {

// A row that has seen no key yet has the maximum -inf and the sum 0.
struct RowStats {
  float row_max = -infinity();  // of S, before the scale
  float row_sum = 0.f;          // this thread's share of sum exp2((S - row_max) * scale_log2)
};

// Online softmax. P and its sums are scaled by 2^`p_offset_log2` (a kernel's config.cuh).
template <auto tile, int p_offset_log2>
struct Softmax {
  static constexpr float kPScale = power_of_two(p_offset_log2);
  RowStats rows[2];
  float correction[2];

  FMHA_DEVICE void reset() { rows[0] = rows[1] = RowStats{}; }

  // Raises `row_max` to the largest S of this thread's columns.
  template <int n>
  FMHA_DEVICE void raise(float (&row_max)[2], const mma::Accumulator<n>& s) const {
    using S = mma::Accumulator<n>;
    // No branch may stand here while products are in flight.
    if constexpr (sums_output_first(tile)) {
      if (__all_sync(ptx::kAllLanes, row_max[0] >= 0.f && row_max[1] >= 0.f)) return raise_nonnegative(row_max, s);
    }
    // Two chains of dependent fmaxf per row: a single chain of 32
    // takes 140 clocks, in which the warp has nothing else to issue.
    float other_max[2] = {s[1], s[3]};
#pragma unroll
    for (int e = 0; e < S::num_elems; ++e) {
      float& chain = e & 1 ? other_max[S::row(e)] : row_max[S::row(e)];
      chain = fmaxf(chain, s[e]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = fmaxf(row_max[r], other_max[r]);
  }
  // Raises the running maxima where none is negative. The bits of non-negative floats are ordered like integers, and
  // one instruction takes the largest of three integers.
  template <int n>
  FMHA_DEVICE void raise_nonnegative(float (&row_max)[2], const mma::Accumulator<n>& s) const {
    using S = mma::Accumulator<n>;
    int32_t largest[2] = {int32_t(bits_of(row_max[0])), int32_t(bits_of(row_max[1]))}, other[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < S::num_elems; e += 2) {
      int32_t& chain = e & 4 ? other[S::row(e)] : largest[S::row(e)];
      chain = max(max(chain, int32_t(bits_of(s[e]))), int32_t(bits_of(s[e + 1])));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = float_of(uint32_t(max(largest[r], other[r])));
  }
  // Number subtracted from scaled scores to get exponents. P, sums and O are relative to this number, and not to the
  // maximum that it is rounded from. It is rounded up, so that no P is beyond 1 by rounding, however large the
  // scores.
  FMHA_DEVICE static float shift_of(float row_max, float scale_log2) {
    return p_offset_log2 == 0 ? ptx::mul_rp(row_max, scale_log2) : ptx::fma_rp(row_max, scale_log2, -float(p_offset_log2));
  }
  // Whether a row's scores are so large that P must be computed relative to an exact score (range.h).
  FMHA_DEVICE static bool is_too_large(float row_max, float scale_log2) {
    return fabsf(row_max) < infinity() && fabsf(row_max * scale_log2) >= kLargestShift;
  }
  FMHA_DEVICE bool is_too_large(float scale_log2) const {
    return is_too_large(rows[0].row_max, scale_log2) || is_too_large(rows[1].row_max, scale_log2);
  }
  // Computes P = exp2(S - shift), and adds it to the row sums.
  template <int n>
  FMHA_DEVICE void exponentiate(mma::Accumulator<n>& s, float scale_log2, const float (&shift)[2], float (&sums)[2],
                                uint32_t never) {
    using S = mma::Accumulator<n>;
#pragma unroll
    for (int e = 0; e < S::num_elems; ++e) {
      const float x = fmaf(s[e], scale_log2, -shift[S::row(e)]);
      s[e] = ptx::ex2_approx_ftz(x);
      sums[S::row(e)] += s[e];
      // A store that never happens. Without it ptxas would move all exponentials behind the wait for the product P V,
      // since nothing ties them to a place. ptxas knows that no sum is negative for a comparison `< 0`, but not for one
      // of the bits.
      if (tile.wait_anchor > 0 && e + 1 == tile.wait_anchor)
        ptx::st_shared_b32_if(never, 0, bits_of(sums[0] + sums[1]) == 0x80000001u);
    }
  }

  // S becomes P, unnormalised; the running maximum is the exact one, but for `lazy_rescale_log2`. `never` is an
  // address for the store that never happens; `have_max` is called between the maximum and the exponentials.
  // `nonnegative`: no running maximum that matters is negative.
  template <bool nonnegative = false, int n, class HaveMax>
  FMHA_DEVICE void step(mma::Accumulator<n>& s, float scale_log2, uint32_t never, HaveMax&& have_max) {
    float new_max[2] = {rows[0].row_max, rows[1].row_max};
    if constexpr (nonnegative) {
      raise_nonnegative(new_max, s);
    } else {
      raise(new_max, s);
    }

    float shift[2], sums[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      RowStats& row = rows[r];
      new_max[r] = quad_reduce(new_max[r], [](float a, float b) { return fmaxf(a, b); });
      // A maximum that grew by little is kept, so that O needs no rescaling: P then reaches up to
      // 2^lazy_rescale_log2, which f32 sums and a 16-bit P hold as exactly as 1; that of 8 bits has the room
      // (p_offset_log2).
      if constexpr (tile.lazy_rescale_log2 > 0) {
        if (row.row_max != -infinity() && (new_max[r] - row.row_max) * scale_log2 <= float(tile.lazy_rescale_log2))
          new_max[r] = row.row_max;
      }
      shift[r] = shift_of(finite_or_zero(new_max[r]), scale_log2);
      correction[r] = ptx::ex2_approx_ftz(shift_of(row.row_max, scale_log2) - shift[r]);
      row.row_max = new_max[r];
      sums[r] = row.row_sum * correction[r];
    }
    have_max();
    exponentiate(s, scale_log2, shift, sums, never);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r].row_sum = sums[r];
  }

  // A step without the row-max reduction: it reuses the running maximum of the blocks before. The block's sums tell
  // afterwards whether that maximum was high enough, since no P of a row exceeds the row's sum.
  template <int n>
  FMHA_DEVICE void step_reusing_row_max(mma::Accumulator<n>& s, float scale_log2, float (&sums)[2], uint32_t never) {
    static_assert(p_offset_log2 <= 0, "a P that is scaled up has no room above a row's maximum");
    const float shift[2] = {shift_of(rows[0].row_max, scale_log2), shift_of(rows[1].row_max, scale_log2)};
    sums[0] = sums[1] = 0.f;
    exponentiate(s, scale_log2, shift, sums, never);
  }
  // Whether some P may exceed a power of two. NaN and infinity count as exceeding: they are the sums of a row whose
  // running maximum is still -inf.
  FMHA_DEVICE static bool exceed_power(const float (&sums)[2], int log2) { return exceed(sums, power_of_two(log2 + p_offset_log2)); }
  // Whether P may have overflowed f32, so that rescaling cannot repair it. The limit is below f32's largest number,
  // since the factor for a P beyond 2^126 would be 0.
  FMHA_DEVICE static bool overflows_f32(const float (&sums)[2]) { return exceed(sums, 1.2676506e30f); }  // 2^100
  FMHA_DEVICE static bool exceed(const float (&sums)[2], float limit) {
    return !(sums[0] <= limit) || !(sums[1] <= limit);
  }
  // Raises the running maximum to the block's true maximum after the exponentials; P and the sums are rescaled with
  // it.
  template <int n>
  FMHA_DEVICE void rescale_to_row_max(mma::Accumulator<n>& p, float scale_log2, float (&sums)[2]) {
    using S = mma::Accumulator<n>;
    float top[2] = {kPScale, kPScale};
#pragma unroll
    for (int e = 0; e < S::num_elems; ++e) top[S::row(e)] = fmaxf(top[S::row(e)], p[e]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      RowStats& row = rows[r];
      top[r] = quad_reduce(top[r], [](float a, float b) { return fmaxf(a, b); });
      const float new_max = row.row_max + (ptx::lg2_approx_ftz(top[r]) - float(p_offset_log2)) / scale_log2;
      correction[r] = ptx::ex2_approx_ftz(shift_of(row.row_max, scale_log2) - shift_of(new_max, scale_log2));
      row.row_max = new_max;
      row.row_sum *= correction[r];
      sums[r] *= correction[r];
    }
#pragma unroll
    for (int e = 0; e < S::num_elems; ++e) p[e] *= correction[S::row(e)];
  }
  FMHA_DEVICE void add(const float (&sums)[2]) {
    rows[0].row_sum += sums[0];
    rows[1].row_sum += sums[1];
  }

  // Whether any of the warp's upper (r = 0) or lower (r = 1) rows has raised its maximum since O was last rescaled.
  FMHA_DEVICE bool corrects(int r) const { return __any_sync(ptx::kAllLanes, correction[r] != 1.f); }
};

}  // namespace fmha
