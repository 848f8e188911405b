// NaN and infinity in V, where the mask hides their keys from some queries of a tile.
//
// A masked key has P = 0, but the matrix unit still multiplies it with V, and 0 x NaN is NaN. So for tiles that the
// mask hides in part, and only for those, each wave scans V in LDS once. If a NaN or an infinity is found, which is
// rare, it is replaced by 0 in LDS, and after O is written it is added to those queries that do see its key.
#pragma once
#include <fmha/cdna/output.h>
#include <fmha/cdna/tile_step.h>
#include <fmha/isa/sync.h>

namespace fmha::cdna {

// Sets the top bit of each element of a word that is NaN or infinite.
template <DType dtype>
FMHA_DEVICE uint32_t nonfinite_elems(uint32_t word) {
  constexpr uint32_t ones = size_bytes(dtype) == 2 ? 0x00010001 : 0x01010101;
  constexpr uint32_t tops = ones << (8 * size_bytes(dtype) - 1);
  if constexpr (dtype == DType::E4m3Fnuz || dtype == DType::E5m2Fnuz) {
    // FNUZ types have one NaN, the code of -0, and no infinity.
    return ~((word & ~tops) + ~tops) & word & tops;
  } else {
    constexpr uint32_t least = dtype == DType::F16    ? 0x7c00
                               : dtype == DType::Bf16 ? 0x7f80
                               : dtype == DType::E5m2 ? 0x7c
                                                      : 0x7f;
    constexpr uint32_t to_top = (tops / ones) - least;
    return ((word & ~tops) + to_top * ones) & tops;
  }
}

template <DType dtype>
FMHA_DEVICE uint32_t without_nonfinite(uint32_t word) {
  constexpr uint32_t bits = 8 * size_bytes(dtype);
  return word & ~((nonfinite_elems<dtype>(word) >> (bits - 1)) * ((1u << bits) - 1));
}

// Whether a mask may hide a part of the n-th tile that the loop visits.
template <CdnaSpec spec, CdnaTile tile, class Walk>
FMHA_DEVICE bool is_partly_masked(const Job& job, Range queries, const Walk& walk, int32_t n) {
  if constexpr (code::kIsGiven) return true;
  if constexpr (spec.masks) return walk.is_cut(n);
  const int32_t first_key = walk.tile_at(n) * tile.block_n;
  if constexpr (spec.mask == MaskKind::Full) return false;
  return block_class(job.band, queries, {first_key, first_key + tile.block_n}) != BlockClass::Inside;
}

// Called by all waves once V of a partly masked tile is in LDS. Replaces NaN and infinity by 0; returns true if there
// were any.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE bool zero_nonfinite(typename Config<spec, tile>::VMatrix& v) {
  using C = Config<spec, tile>;
  constexpr int num_frags = sizeof(v.bytes) / kFragBytes;
  Frag* const frags = reinterpret_cast<Frag*>(v.bytes);
  uint32_t found = 0;
#pragma unroll 4
  for (int at = lane_idx(); at < num_frags; at += kWaveSize) {
    const Frag frag = frags[at];
#pragma unroll
    for (int w = 0; w < 4; ++w) found |= nonfinite_elems<spec.dtype_v>(frag[w]);
  }
  // Every wave has scanned the same bytes, so the branch is uniform in the workgroup.
  if (v_cmp_ballot(found != 0) == 0) return false;
  s_barrier();
#pragma nounroll
  for (int at = thread_idx(); at < num_frags; at += C::num_threads) {
    Frag frag = frags[at];
#pragma unroll
    for (int w = 0; w < 4; ++w) frag[w] = without_nonfinite<spec.dtype_v>(frag[w]);
    frags[at] = frag;
  }
  s_barrier();
  return true;
}

// Adds the zeroed values of V to the queries that see their keys, after O is written, one element after another; only
// inputs with NaN or infinity get here.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void add_back_nonfinite(const Wave<spec, tile>& wave, const CdnaParams& params, const Job& job,
                                    int32_t first_key) {
  const FwdParams& p = params.fwd;
  if (wave.query >= job.span.seqlen_q) return;
  const float scale = scalar_of(p.descale_v, job.span.i_batch, job.i_head_kv, 1.f) *
                      (p.scale_o ? *p.scale_o : 1.f);
  const int64_t o = row_offset(p.o, job.span.storage_batch, int64_t(job.span.q_row) + wave.query, job.i_head);
  const int32_t end = min(first_key + tile.block_n, job.span.seqlen_k);
#pragma nounroll
  for (int32_t key = first_key; key < end; ++key) {
    if (!visible(job.band, wave.query, key)) continue;
    const auto product = [&] {
      return scaled_product<spec.dtype_qk, spec.dtype_qk>(p, KvKind::Packed, job.span, job.i_head, job.i_head_kv,
                                                          params.head_dim_qk, wave.query, key);
    };
    if constexpr (spec.masks) {
      const DataMasks masks = {reload_params<MaskedCdnaParams>().masks};
      if (!masks_show(masks, p, job.span, job.i_head, {wave.query, key}, product)) continue;
    } else if (!functions_show(p, job.span, job.i_head, {wave.query, key}, product)) {
      continue;
    }
    const int64_t v = row_offset(p.v, kv_row(p, KvKind::Packed, job.span, key), job.i_head_kv);
    // This lane has written these elements of O itself, so it needs no synchronisation to read them.
#pragma nounroll
    for (int32_t dim = lane_half() * kRun; dim < params.head_dim_v; dim += dim % kRun == kRun - 1 ? kRun + 1 : 1) {
      float value = load_elem<spec.dtype_v>(p.v.data, v + dim * p.v.dim);
      // The test precedes the scaling: for a difference of products the
      // compiler would use an FMA, which yields the rounding error.
      if (value - value == 0.f) continue;
      value *= scale;
      if constexpr (spec.dropout) {
        const int32_t batch_head = head_of_whole(p, job.span.i_batch, job.i_head);
        if (params.drops && !dropout_keeps(p, batch_head, wave.query, key)) value *= 0.f;
      }
      with_dtype_o<spec>(params, [&](auto dtype) __attribute__((always_inline)) {
        store_elem<dtype.value>(p.o.data, o + dim, load_elem<dtype.value>(p.o.data, o + dim) + value);
      });
    }
  }
}

}  // namespace fmha::cdna
