// Copy of an FP8 cache to the workspace, widened to 16 bits, for a forward kernel of 16-bit caches: key j of sequence b
// goes to row `b * seqlen_k + j`, and the lengths and first rows that the kernel reads are written too. Rows of a block
// behind the last key become zeros, since a tile's V is searched for NaN and infinity.
//
// Codes are widened by bit operations on every architecture, since memory limits the launch anyway.
#pragma once
#include <fmha/isa/lane.h>
#include <fmha/num.h>
#include <fmha/seq.h>
#include <fmha/widened_cache.h>

namespace fmha::cache {

// Each workgroup converts kWidenKeys keys of a sequence, for all heads.
template <WidenSpec spec>
struct Widen {
  static constexpr int32_t elems = 8;  // of a thread at a time
  const FwdParams& p;
  const WidenedCache& to;

  // A code times its descale in f32, rounded once, bit-equal to a cache that was converted before.
  FMHA_DEVICE static uint16_t widened(uint32_t code, float descale) {
    const float x = decode(format_of(spec.stored), code) * descale;
    if constexpr (spec.dtype == DType::F16) return __builtin_bit_cast(uint16_t, f16(x));
    return __builtin_bit_cast(uint16_t, bf16(x));
  }

  FMHA_DEVICE void tensor(const View& from, const View& wide, const HeadScalars& descale, const View& scales,
                          const SeqSpan& span, int32_t first, int32_t count, int32_t dim) const {
    const int32_t runs = ceil_div(dim, elems), all = count * p.num_heads_kv * runs;
    for (int32_t at = thread_idx(); at < all; at += kWidenThreads) {
      const int32_t run = at % runs, row = at / runs, i_head = row % p.num_heads_kv, j = first + row / p.num_heads_kv;
      const int32_t elem = run * elems, end = min(elem + elems, dim);
      const bool is_there = j < span.seqlen_k;
      const int64_t source = is_there ? row_offset(from, kv_row(p, KvKind::Strided, span, j), i_head) : 0;
      const int64_t place = row_offset(wide, span.i_batch, int64_t(j), i_head) + span.i_batch * to.rows_of_batch * wide.row;
      float factor = scalar_of(descale, span.i_batch, i_head, 1.f);
      if (spec.scaled && is_there) {
        const KvRow key = kv_row(p, KvKind::Strided, span, j);
        const int64_t of_scale = row_offset(scales, {key.batch, key.row / to.scale_block}, i_head);
        factor = static_cast<const float*>(scales.data)[of_scale];
      }
      for (int32_t d = elem; d < end; ++d) {
        const uint32_t code = is_there ? static_cast<const uint8_t*>(from.data)[source + d * from.dim] : 0;
        const_cast<uint16_t*>(static_cast<const uint16_t*>(wide.data))[place + d * wide.dim] = is_there ? widened(code, factor) : 0;
      }
    }
  }

  FMHA_DEVICE void run() const {
    const int32_t i_batch = workgroup_idx() / to.num_blocks, first = workgroup_idx() % to.num_blocks * kWidenKeys;
    // Queries are not used, so their layout does not matter.
    const SeqSpan span = resolve_seq(p, QLayout::Batch, p.cu_seqlens_k ? KvKind::Packed : KvKind::Strided, i_batch);
    if (first == 0 && thread_idx() == 0) {
      to.seqused_k[i_batch] = span.seqlen_k;
      if (i_batch == 0) to.cu_seqlens_k[0] = 0;
      to.cu_seqlens_k[i_batch + 1] = (i_batch + 1) * p.seqlen_k;
    }
    const int32_t count = min(kWidenKeys, min(span.seqlen_k + (kMostOfBlock - 1), p.seqlen_k) - first);
    if (count <= 0) return;
    tensor(p.k, to.k, p.descale_k, to.k_scale, span, first, count, to.head_dim_qk);
    tensor(p.v, to.v, p.descale_v, to.v_scale, span, first, count, to.head_dim_v);
  }
};

}  // namespace fmha::cache
