// Copy of a cache to the workspace, FP8 widened to 16 bits, for a kernel of 16-bit caches without pages: key j of
// sequence b, whatever it lies in, goes to row `b * seqlen_k + j`. The lengths that the kernel reads are written too.
// It reads whole blocks: a block's rows behind the last key become zeros. Keys before a window's stay where they are.
#pragma once
#include <fmha/common/widen.cuh>
#include <fmha/mask.h>
#include <fmha/ptx/memory.cuh>
#include <fmha/seq.h>
#include <fmha/widened_cache.h>

namespace fmha::cache {

// Each CTA copies `keys` keys of a sequence for all heads; each thread converts sixteen elements at a time.
template <WidenSpec spec, int32_t keys, int32_t threads>
struct Widen {
  const FwdParams& p;
  const WidenedCache& to;

  // The descale of key j, which exists: its head's, or its row's.
  FMHA_DEVICE float factor_of(const HeadScalars& descale, const View& scales, const SeqSpan& span, int32_t j,
                              int32_t i_head) const {
    if constexpr (!spec.scaled) {
      return scalar_of(descale, span.i_batch, i_head, 1.f);
    } else {
      const KvRow at = kv_row(p, spec.kv_layout, span, j);
      return static_cast<const float*>(scales.data)[row_offset(scales, {at.batch, at.row / to.scale_block}, i_head)];
    }
  }

  // Each thread has the loads of two words in flight.
  template <int32_t dim>
  FMHA_DEVICE void widen(const View& from, const View& wide, const HeadScalars& descale, const View& scales,
                         const SeqSpan& span, int32_t first, int32_t count) const {
    static_assert(dim % 16 == 0, "widen_cache: rows are whole words of 16 elements");
    constexpr int32_t words = dim / 16, ahead = 2, size = size_bytes(spec.stored);
    const int32_t all = count * p.num_heads_kv * words;
    for (int32_t begin = threadIdx.x; begin < all; begin += ahead * threads) {
      uint32_t bytes[ahead][size][4];
      uint16_t* places[ahead];
      float factors[ahead];
#pragma unroll
      for (int32_t k = 0; k < ahead; ++k) {
        const int32_t at = begin + k * threads;
        if (at >= all) continue;
        const int32_t word = at % words, row = at / words, i_head = row % p.num_heads_kv, j = first + row / p.num_heads_kv;
        const bool there = j < span.seqlen_k;
        const int64_t narrow = there ? row_offset(from, kv_row(p, spec.kv_layout, span, j), i_head) + 16 * word : 0;
#pragma unroll
        for (int32_t part = 0; part < size; ++part)
          ptx::ld_global_v4_b32_if(bytes[k][part], static_cast<const uint8_t*>(from.data) + size * narrow + 16 * part, there);
        places[k] = const_cast<uint16_t*>(static_cast<const uint16_t*>(wide.data)) +
                    row_offset(wide, span.i_batch, int64_t(j), i_head) + 16 * word;
        // Zeros stay zeros where a row does not exist.
        factors[k] = there ? factor_of(descale, scales, span, j, i_head) : 1.f;
      }
#pragma unroll
      for (int32_t k = 0; k < ahead; ++k) {
        if (begin + k * threads >= all) continue;
#pragma unroll
        for (int32_t half = 0; half < 2; ++half) {
          if constexpr (is_fp8(spec.stored)) {
            const uint32_t eight[2] = {bytes[k][0][2 * half], bytes[k][0][2 * half + 1]};
            uint32_t packed[4];
            widen_word<spec.stored, spec.dtype, spec.converts_fp8>(eight, factors[k], packed);
            ptx::st_global_v4_b32_if(places[k] + 8 * half, packed, true);
          } else {
            ptx::st_global_v4_b32_if(places[k] + 8 * half, bytes[k][half], true);
          }
        }
      }
    }
  }

  // Copies rows of any length and alignment, one element a thread at a time.
  FMHA_DEVICE void widen_elements(const View& from, const View& wide, const HeadScalars& descale, const View& scales,
                                  const SeqSpan& span, int32_t first, int32_t count, int32_t dim) const {
    const int32_t all = count * p.num_heads_kv * dim;
    for (int32_t at = threadIdx.x; at < all; at += threads) {
      const int32_t d = at % dim, row = at / dim, i_head = row % p.num_heads_kv, j = first + row / p.num_heads_kv;
      float x = 0.f;
      if (j < span.seqlen_k) {
        const int64_t place = row_offset(from, kv_row(p, spec.kv_layout, span, j), i_head) + d;
        x = load_elem<spec.stored>(from.data, place) * factor_of(descale, scales, span, j, i_head);
      }
      store_elem<spec.dtype>(const_cast<void*>(static_cast<const void*>(wide.data)),
                             row_offset(wide, span.i_batch, int64_t(j), i_head) + d, x);
    }
  }

  // The first key that the kernel that reads the copy may load: the first key of the window, rounded down to that
  // kernel's block. A sequence of fewer queries than the longest's begins no earlier. Where CTAs cover all keys of the
  // longest sequence, nothing is left out: fixed parts before a window read a block too.
  FMHA_DEVICE int32_t first_read(int32_t seqlen_k) const {
    if (p.mask.sink_columns > 0 || to.num_blocks * keys >= p.seqlen_k) return 0;
    const MaskBand band = resolve_band(p.mask, p.seqlen_q, seqlen_k);
    return k_range(band, {0, p.seqlen_q}, seqlen_k).begin - (kMostOfBlock - 1);
  }

  FMHA_DEVICE void run() const {
    const int32_t i_batch = blockIdx.x / to.num_blocks, block = blockIdx.x % to.num_blocks;
    // The span's queries are not used: the layout of Q does not matter.
    const SeqSpan span = resolve_seq(p, QLayout::Batch, spec.kv_layout, i_batch);
    const int32_t first = (max(first_read(span.seqlen_k), 0) / keys + block) * keys;
    if (block == 0 && threadIdx.x == 0) {
      to.seqused_k[i_batch] = span.seqlen_k;
      if (i_batch == 0) to.cu_seqlens_k[0] = 0;
      to.cu_seqlens_k[i_batch + 1] = (i_batch + 1) * p.seqlen_k;
    }
    const int32_t count = min(keys, min(span.seqlen_k + (kMostOfBlock - 1), p.seqlen_k) - first);
    if (count <= 0) return;
    if constexpr (spec.by_element) {
      widen_elements(p.k, to.k, p.descale_k, to.k_scale, span, first, count, spec.head_dim_qk);
      if constexpr (!spec.v_in_k)
        widen_elements(p.v, to.v, p.descale_v, to.v_scale, span, first, count, spec.head_dim_v);
    } else {
      widen<spec.head_dim_qk>(p.k, to.k, p.descale_k, to.k_scale, span, first, count);
      if constexpr (!spec.v_in_k) widen<spec.head_dim_v>(p.v, to.v, p.descale_v, to.v_scale, span, first, count);
    }
  }
};

}  // namespace fmha::cache
