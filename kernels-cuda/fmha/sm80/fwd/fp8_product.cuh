// Products of a warp's sixteen rows, or two sixteens, with blocks of an FP8 cache as they lie in shared memory:
// elements are widened in registers, on their way into fragments, once for all rows, and no wide copy of a block is
// written or read.
//
// Every product sums the same terms in the same order as a product of a widened block, so the result has equal bits.
// The columns of B are permuted so that a lane ends with 32 or 16 contiguous elements of a row of O (store_lane_rows).
// `unit`: the descales are 1.
#pragma once
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/sm80/fwd/config.cuh>

namespace fmha::sm80 {

// How many steps of a product are unrolled. Code for 32 keys and 128 dimensions takes some 16 KB, and the warps of a
// multiprocessor, each at another place of the code, share one instruction cache.
FMHA_DEVICE constexpr int unrolled_steps(int keys) { return keys > 32 ? 2 : 8; }

// Computes s = Q K^T with K as stored, in FP8: lane l reads elements 2 (l % 4) and the next of key 8 g + l / 4, and
// those eight further on.
template <FwdSpec spec, Sm80Tile tile, bool unit, class QTile, class Raw, int n, int sixteens>
FMHA_DEVICE void raw_product_abt(mma::Accumulator<n> (&s)[sixteens], const QTile& q, const Raw& k, float descale) {
  constexpr int steps = QTile::dim / mma::kDepth<uint16_t>;
  const int32_t key = threadIdx.x % 32 / 4, byte = threadIdx.x % 4 * 2;
  const mma::LaneAddress<QTile> q0(q, mma::rows_first());
#pragma unroll
  for (int m = 0; m < sixteens; ++m) s[m].clear();
#pragma unroll unrolled_steps(n)
  for (int step = 0; step < steps; ++step) {
    uint32_t a[sixteens][4];
#pragma unroll
    for (int m = 0; m < sixteens; ++m) ptx::ldmatrix_x4(a[m], q0.plus(m * mma::kRows, step * mma::kDepth<uint16_t>));
#pragma unroll
    for (int group = 0; group < n / 8; ++group) {
      const uint32_t at = k.word_address(8 * group + key, step) + byte;
      const uint32_t b[2] = {widen_pair<tile.stored, spec.dtype_qk, tile.converts_fp8, unit>(ptx::ld_shared_u16(at), descale),
                             widen_pair<tile.stored, spec.dtype_qk, tile.converts_fp8, unit>(ptx::ld_shared_u16(at + 8), descale)};
#pragma unroll
      for (int m = 0; m < sixteens; ++m) ptx::mma_m16n8k16<spec.dtype_qk>(&s[m].elems[4 * group], a[m], b);
    }
  }
}

// Number of elements of V's rows that a warp loads at a time; each lane has an eighth of them.
FMHA_DEVICE constexpr int raw_span(int columns) { return columns % 128 == 0 ? 128 : 64; }

// o += P V, V raw: lane l reads of every span, at its (l / 4)-th eighth, the four keys that fragments want of it.
// Column l / 4 of the g-th eight of a span is element g of that eighth.
template <FwdSpec spec, Sm80Tile tile, bool unit, class Raw, int n, int depth, int sixteens>
FMHA_DEVICE void raw_product_ab(mma::Accumulator<n> (&o)[sixteens], const mma::RegisterTile<uint16_t, depth> (&probs)[sixteens],
                                const Raw& v, float descale) {
  constexpr int span = raw_span(n), own = span / 8;  // bytes of a lane
  constexpr int steps = depth / mma::kDepth<uint16_t>;
  const int32_t key = threadIdx.x % 4 * 2, byte = threadIdx.x % 32 / 4 * own;
  // P of this step and the next ones, shifted by one each step: an array of registers cannot be indexed by a variable.
  uint32_t a_of[steps][sixteens][4];
#pragma unroll
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int m = 0; m < sixteens; ++m) {
#pragma unroll
      for (int k = 0; k < 4; ++k) a_of[step][m][k] = probs[m].elems[step][k];
    }
  }
#pragma unroll unrolled_steps(depth) / 2
  for (int step = 0; step < steps; ++step) {
    const auto& a = a_of[0];
#pragma unroll
    for (int chunk = 0; chunk < n / span; ++chunk) {
      uint32_t bytes[4][own / 4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int32_t row = step * mma::kDepth<uint16_t> + key + k % 2 + k / 2 * 8;
        const uint32_t at = v.word_address(row, chunk * (span / 16) + byte / 16);
        if constexpr (own == 16) ptx::ld_shared_v4_b32(bytes[k], at);
        else ptx::ld_shared_v2_b32(bytes[k], at + byte % 16);
      }
#pragma unroll
      for (int quad = 0; quad < own / 4; ++quad) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Selects the same two elements of two neighbouring keys.
          const uint32_t selector = half == 0 ? 0x5140 : 0x7362;
          const uint32_t low = ptx::prmt(bytes[0][quad], bytes[1][quad], selector);
          const uint32_t high = ptx::prmt(bytes[2][quad], bytes[3][quad], selector);
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const uint32_t b[2] = {
                widen_pair<tile.stored, spec.dtype_v, tile.converts_fp8, unit>(k == 0 ? low & 0xffffu : low >> 16, descale),
                widen_pair<tile.stored, spec.dtype_v, tile.converts_fp8, unit>(k == 0 ? high & 0xffffu : high >> 16, descale)};
#pragma unroll
            for (int m = 0; m < sixteens; ++m)
              ptx::mma_m16n8k16<spec.dtype_v>(&o[m].elems[4 * (own * chunk + 4 * quad + 2 * half + k)], a[m], b);
          }
        }
      }
    }
#pragma unroll
    for (int next = 0; next + 1 < steps; ++next) {
#pragma unroll
      for (int m = 0; m < sixteens; ++m) {
#pragma unroll
        for (int k = 0; k < 4; ++k) a_of[next][m][k] = a_of[next + 1][m][k];
      }
    }
  }
}

// The part of a row of O that a lane has: of every span the (l % 4)-th quarter.
template <FwdSpec spec, bool vectors, int n>
FMHA_DEVICE void store_lane_rows(void* data, int64_t at, const mma::Accumulator<n>& o, int r, float factor, bool stored) {
  constexpr int span = raw_span(n), eighth = span / 8;
#pragma unroll
  for (int chunk = 0; chunk < n / span; ++chunk) {
    const int64_t first = at + span * chunk + threadIdx.x % 4 * (2 * eighth);
    const auto elem = [&](int e) { return o[4 * (eighth * chunk + e % eighth) + 2 * r + e / eighth] * factor; };
#pragma unroll
    for (int e = 0; e < 2 * eighth; e += 8) {
      if constexpr (spec.dtype_o == DType::F32) {
#pragma unroll
        for (int k = 0; k < 8; k += 4)
          if (stored) ptx::st_global_v4_f32(static_cast<float*>(data) + first + e + k, elem(e + k), elem(e + k + 1), elem(e + k + 2), elem(e + k + 3));
      } else if constexpr (vectors && !is_fp8(spec.dtype_o)) {
        const uint32_t words[4] = {ptx::cvt_rn_x2<spec.dtype_o>(elem(e), elem(e + 1)), ptx::cvt_rn_x2<spec.dtype_o>(elem(e + 2), elem(e + 3)),
                                   ptx::cvt_rn_x2<spec.dtype_o>(elem(e + 4), elem(e + 5)), ptx::cvt_rn_x2<spec.dtype_o>(elem(e + 6), elem(e + 7))};
        ptx::st_global_v4_b32_if(static_cast<uint16_t*>(data) + first + e, words, stored);
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) store_o<spec.dtype_o>(data, first + e + k, elem(e + k), stored);
      }
    }
  }
}

}  // namespace fmha::sm80
