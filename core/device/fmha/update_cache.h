// Update of the KV cache by a call, before a forward kernel reads it: new keys and values are written to the cache,
// new keys and queries are rotated to their positions (CONTRACT.md, "KV caches"). The forward kernel then has a cache
// with more keys, and queries that lie in the workspace.
//
// A group of lanes processes one row at a time, of new keys, new values or queries, and divides its elements.
//
// `Lanes` is a type that each vendor defines, with `count` and `index()`; `thread()`, the index of a thread of the
// launch, and `threads()`, their number; and `product`, `sum` and `difference`, each rounded to f32 by itself.
#pragma once
#include <fmha/cache_rows.h>
#include <fmha/cache_update.h>
#include <fmha/num.h>
#include <fmha/seq.h>

namespace fmha::cache {

// An unsigned integer of `bytes` bytes.
template <int32_t bytes>
struct Unsigned;
template <>
struct Unsigned<1> {
  using Type = uint8_t;
};
template <>
struct Unsigned<2> {
  using Type = uint16_t;
};
template <int32_t bytes>
using ElemOfBytes = typename Unsigned<bytes>::Type;

template <CacheSpec spec, class Lanes>
struct Update {
  using Key = ElemOfBytes<size_bytes(spec.dtype_qk)>;  // an element of Q's and K's rows as it lies in memory
  const FwdParams& p;
  const CacheUpdate& update;
  const int32_t lane = Lanes::index();

  // One sequence of the cache as it is before the call, and the rows that are added to it. Wrong lengths are clamped:
  // no row outside the tensors is accessed.
  struct Sequence {
    SeqSpan span;
    PackedRows added;
    int32_t new_batch;
  };
  FMHA_DEVICE Sequence sequence(int32_t i_batch) const {
    Sequence sequence = {resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch), {0, update.seqlen_new}, i_batch};
    int32_t room = p.seqlen_k;
    if (spec.kv_layout == KvKind::Packed) room = packed_rows(p.cu_seqlens_k, i_batch, p.total_k, p.seqlen_k).count;
    if (spec.kv_layout == KvKind::Paged && p.num_pages == 0) room = 0;
    if (spec.packs_new) {
      sequence.added = packed_rows(update.cu_seqlens_new, i_batch, update.total_new, update.seqlen_new);
      sequence.new_batch = 0;
    }
    sequence.added.count = min(sequence.added.count, room - sequence.span.seqlen_k);
    return sequence;
  }

  // Copies row `from` to row `to`; both have `dim` elements, `step` elements apart in `to`.
  template <int32_t dim, class T>
  FMHA_DEVICE void copy(const T* from, T* to, int64_t step) const {
    for (int32_t d = lane; d < dim; d += Lanes::count) to[d * step] = from[d];
  }

  // Copies a row of K or Q, turned to `position`: two products and a sum, each rounded to f32, and the sum to the
  // input's type, as the contract has it. FP8 is turned as it is stored, before any descale, and saturates.
  FMHA_DEVICE void turn(const Key* from, Key* to, int32_t position) const {
    constexpr int32_t pairs = spec.rotary_dim / 2;
    const int64_t angles = int64_t(clamp(position, 0, update.max_pos - 1)) * pairs;
    for (int32_t i = lane; i < pairs; i += Lanes::count) {
      const int32_t a = spec.interleaved ? 2 * i : i, b = spec.interleaved ? 2 * i + 1 : i + pairs;
      const float x = load_elem<spec.dtype_qk>(from, a), y = load_elem<spec.dtype_qk>(from, b);
      const float cos = load_elem<spec.dtype_table>(update.cos, angles + i);
      const float sin = load_elem<spec.dtype_table>(update.sin, angles + i);
      store_elem<spec.dtype_qk>(to, a, Lanes::difference(Lanes::product(x, cos), Lanes::product(y, sin)));
      store_elem<spec.dtype_qk>(to, b, Lanes::sum(Lanes::product(y, cos), Lanes::product(x, sin)));
    }
    for (int32_t d = spec.rotary_dim + lane; d < spec.head_dim_qk; d += Lanes::count) to[d] = from[d];
  }

  template <class T>
  FMHA_DEVICE static const T* read(const View& view, int64_t at) {
    return static_cast<const T*>(view.data) + at;
  }
  template <class T>
  FMHA_DEVICE static T* written(const View& view, int64_t at) {
    return const_cast<T*>(read<T>(view, at));
  }

  // Writes new row `n` of K (`of_keys`) or V to the cache.
  template <bool of_keys>
  FMHA_DEVICE void append(int32_t i_batch, int32_t n, int32_t i_head) const {
    const Sequence at = sequence(i_batch);
    if (n >= at.added.count) return;
    const View& source = of_keys ? update.k_new : update.v_new;
    const View& cache = of_keys ? p.k : p.v;
    const int32_t j = at.span.seqlen_k + n;
    using T = ElemOfBytes<size_bytes(of_keys ? spec.dtype_qk : spec.dtype_v)>;
    const T* from = read<T>(source, row_offset(source, at.new_batch, at.added.first + n, i_head));
    if constexpr (of_keys && spec.row_bytes > 0) {
      const KvRow place = kv_row(p, spec.kv_layout, at.span, j);
      return quantise(from, bytes_of_row<spec.row_bytes>(cache, p.page_size, place));
    }
    if constexpr (spec.scaled) {
      // Rows have scales of their own if a block of scales is one row.
      const View& scales = of_keys ? update.k_scale : update.v_scale;
      const KvRow place = kv_row(p, spec.kv_layout, at.span, j);
      return quantise_by_row<of_keys ? spec.head_dim_qk : spec.head_dim_v, of_keys ? spec.dtype_qk : spec.dtype_v>(
          from, written<uint8_t>(cache, row_offset(cache, place, i_head)),
          written<float>(scales, row_offset(scales, place, i_head)));
    }
    T* to = written<T>(cache, row_offset(cache, kv_row(p, spec.kv_layout, at.span, j), i_head));
    if constexpr (!of_keys) {
      copy<spec.head_dim_v>(from, to, spec.v_layout == VLayout::ColMajor ? cache.dim : 1);
    } else if constexpr (spec.rotary_dim > 0) {
      turn(from, to, j);
    } else {
      copy<spec.head_dim_qk>(from, to, 1);
    }
  }

  // Writes a new row of K to a cache of rows of bytes. A group's scale is the least power of two by which its greatest
  // value fits E4M3, whose largest number, 448, is 1.75 times 2^8. A lane has sixteen values at a time, and looks for
  // the greatest of their whole group.
  FMHA_DEVICE void quantise(const Key* from, const BytesOfRow& at) const {
    using Format = RowFormat<(spec.row_bytes > 0 ? spec.row_bytes : 656)>;
    constexpr int32_t run = 16;
    uint8_t *row = const_cast<uint8_t*>(at.row), *scales = const_cast<uint8_t*>(at.scales);
    for (int32_t first = lane * run; first < Format::values; first += Lanes::count * run) {
      const int32_t i_group = first / Format::group, group = i_group * Format::group;
      uint32_t greatest = 0;  // bits of bf16 without their sign
      for (int32_t d = 0; d < Format::group; ++d) {
        const uint32_t bits = uint32_t(from[group + d]) & 0x7fff;
        greatest = bits > 0x7f80 || bits < greatest ? greatest : bits;
      }
      const int32_t exponent = clamp(int32_t(greatest >> 7) - 127 - 8 + ((greatest & 0x7f) > 0x60), -126, 119);
      const float inverse = float_of(uint32_t(127 - exponent) << 23);
      for (int32_t d = first; d < first + run; ++d)
        store_elem<DType::E4m3Fn>(row, d, load_elem<DType::Bf16>(from, d) * inverse);
      if (first != group) continue;
      if constexpr (Format::in_page_tail) {
        scales[i_group] = uint8_t(exponent + 127);
      } else {
        // The two lower bytes of a power of two in f32 are 0.
        const uint32_t upper = uint32_t(exponent + 127) << 7;
        for (int32_t byte = 0; byte < 4; ++byte)
          scales[4 * i_group + byte] = uint8_t(byte < 2 ? 0 : upper >> 8 * (byte - 2));
      }
    }
    for (int32_t d = lane; d < spec.head_dim_qk - Format::values; d += Lanes::count) {
      uint8_t* to = row + Format::rotary + 2 * d;
      const uint32_t bits = from[Format::values + d];
      to[0] = uint8_t(bits);
      to[1] = uint8_t(bits >> 8);
    }
  }

  // Writes a new row to a cache with a scale for each row: its greatest magnitude over the type's largest number, or 1.
  // A lane looks for the greatest of the whole row. Bits of magnitudes have the order of their numbers, NaN above all.
  template <int32_t dim, DType own, class T>
  FMHA_DEVICE void quantise_by_row(const T* from, uint8_t* to, float* scale_of_row) const {
    static_assert(own == DType::F16 || own == DType::Bf16, "rows of 16 bits are quantised");
    constexpr uint32_t infinity = own == DType::F16 ? 0x7c00 : 0x7f80;
    uint32_t greatest = 0;
    for (int32_t d = 0; d < dim; ++d) {
      const uint32_t bits = uint32_t(from[d]) & 0x7fff;
      greatest = bits > infinity || bits < greatest ? greatest : bits;
    }
    const uint16_t code = uint16_t(greatest);
    const float most = greatest == infinity ? float_of(0x7f7fffff) : load_elem<own>(&code, 0);
    float scale = most / decode(format_of(spec.stored), format_of(spec.stored).largest);
    if (!(scale > 0.f)) scale = 1.f;
    for (int32_t d = lane; d < dim; d += Lanes::count) store_elem<spec.stored>(to, d, load_elem<own>(from, d) / scale);
    if (lane == 0) *scale_of_row = scale;
  }

  FMHA_DEVICE void turn_query(int32_t i_batch, int32_t i, int32_t i_head) const {
    const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
    Key* to = written<Key>(update.q, row_offset(update.q, i_batch, i, i_head));
    if (i >= span.seqlen_q) {
      // Rows beyond a shorter sequence are written too, since kernels that load whole tiles of queries read them.
      for (int32_t d = lane; d < spec.head_dim_qk; d += Lanes::count) to[d] = 0;
      return;
    }
    const Key* from = read<Key>(p.q, query_offset(p, span, i, i_head));
    turn(from, to, span.seqlen_k + (spec.positions_advance ? i : 0));
  }

  FMHA_DEVICE void run() const {
    for (int64_t at = Lanes::thread(); at < p.batch; at += Lanes::threads()) {
      const int32_t b = int32_t(at);
      const Sequence of = sequence(b);
      update.seqused[b] = of.span.seqlen_k + (spec.appends ? max(of.added.count, 0) : 0);
    }
    const int64_t news = spec.appends ? int64_t(p.batch) * update.seqlen_new * p.num_heads_kv : 0;
    const int64_t values = spec.v_in_k ? 0 : news;
    const int64_t queries = spec.rotary_dim > 0 ? int64_t(p.batch) * p.seqlen_q * p.num_heads_q : 0;
    const int64_t groups = Lanes::threads() / Lanes::count;
    for (int64_t at = Lanes::thread() / Lanes::count; at < news + values + queries; at += groups) {
      const bool is_new = at < news + values, is_key = at < news;
      const int64_t row = is_key ? at : is_new ? at - news : at - news - values;
      const int32_t heads = is_new ? p.num_heads_kv : p.num_heads_q, rows = is_new ? update.seqlen_new : p.seqlen_q;
      const int32_t i_head = int32_t(row % heads), i = int32_t(row / heads % rows), i_batch = int32_t(row / heads / rows);
      if (is_key) append<true>(i_batch, i, i_head);
      else if (is_new) append<false>(i_batch, i, i_head);
      else if constexpr (spec.rotary_dim > 0) turn_query(i_batch, i, i_head);
    }
  }
};

}  // namespace fmha::cache
