// Q, and the blocks of K and V, from memory: strided, packed or in pages.
#pragma once
#include <fmha/common/work.cuh>
#include <fmha/sm80/common/copy.cuh>
#include <fmha/sm80/fwd/config.cuh>

namespace fmha::sm80 {

// An element of K and V in memory.
template <DType stored>
struct StoredElem {
  using type = uint16_t;
};
template <DType stored>
  requires(is_fp8(stored))
struct StoredElem<stored> {
  using type = uint8_t;
};

template <FwdSpec spec, Sm80Tile tile>
struct Loader {
  using Shared = Smem<spec, tile>;
  static constexpr int bytes = tile.copy_bytes, threads = num_threads(tile);

  const FwdParams& p;
  const Work& work;
  Shared& smem;
  const SeqSpan span = {work.i_batch, work.storage_batch, work.q_row, work.seqlen_q, work.k_row, work.seqlen_k};

  FMHA_DEVICE void load_q() const {
    const uint16_t* data = static_cast<const uint16_t*>(p.q.data);
    const auto row_of = [&](int32_t row) -> const uint16_t* {
      const int32_t packed_row = work.first_row + row, i = query_of<tile>(p, packed_row);
      const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - i * p.gqa_ratio : work.i_head;
      return i < work.seqlen_q ? data + row_offset(p.q, work.storage_batch, work.q_row + i, i_head) : nullptr;
    };
    copy_tile<bytes, threads>(smem.q, data, row_of, [](int32_t, int32_t column) { return elems_there<spec.head_dim_qk>(column); });
  }

  // The key behind the last one that the i-th block of the tile has: beyond come zeros, and in the first block those that
  // no query of the sequence sees, whose V may be NaN.
  FMHA_DEVICE int32_t end_of_keys(int32_t i, int32_t first_key) const {
    return i == 0 ? min(work.seqlen_k, first_key + work.first_dirty) : work.seqlen_k;
  }

  // Key j's row, of this tile's head, as an offset of elements. A column-major V's is where its first element lies.
  FMHA_DEVICE int64_t offset_of(const View& view, int32_t j) const {
    return row_offset(view, kv_row(p, spec.kv_layout, span, max(j, 0)), work.i_head_kv);
  }

  FMHA_DEVICE float descale_of(const HeadScalars& descales) const { return scalar_of(descales, work.i_batch, work.i_head_kv, 1.f); }

  // Rows of a [keys, dim] tile; raw ones of an FP8 cache that is widened later.
  template <int dim, class Tile>
  FMHA_DEVICE void load_rows(const Tile& to, const View& view, const HeadScalars& descales, int32_t i) const {
    using Elem = typename StoredElem<tile.stored>::type;
    const int32_t first_key = block_at(work, i) * tile.block_n, end = end_of_keys(i, first_key);
    const Elem* data = static_cast<const Elem*>(view.data);
    // A block that lies in one page, as in memory without pages, has one row after another.
    constexpr bool in_a_row = spec.kv_layout != KvKind::Paged || tile.block_in_page;
    const Elem* first = in_a_row && first_key < end ? data + offset_of(view, first_key) : data;
    const auto row_of = [&](int32_t row) -> const Elem* {
      const int32_t j = first_key + row;
      if (j < 0 || j >= end) return nullptr;
      return in_a_row ? first + row * view.row : data + offset_of(view, j);
    };
    const auto there_of = [](int32_t, int32_t column) { return elems_there<dim>(column); };
    if constexpr (is_fp8(tile.stored)) {
      if constexpr (widens_blocks(tile)) {
        copy_raw_tile<bytes, dim, threads>(to, data, row_of);
      } else {
        const float descale = descale_of(descales);
        widen_odd_tile<tile.stored, spec.dtype_qk, tile.converts_fp8, threads>(to, descale, row_of, there_of);
      }
    } else if constexpr (!in_a_row) {
      copy_scattered_tile<bytes, threads>(to, data, row_of, there_of);
    } else {
      copy_tile<bytes, threads>(to, data, row_of, there_of);
    }
  }

  // Rows of a [dim, keys] tile.
  template <class Tile>
  FMHA_DEVICE void load_columns(const Tile& to, const View& view, int32_t i) const {
    const int32_t first_key = block_at(work, i) * tile.block_n, end = end_of_keys(i, first_key);
    const uint16_t* data = static_cast<const uint16_t*>(view.data);
    constexpr int words = Tile::span / kWord;
    static_assert(Tile::num_chunks * words * kWord == tile.block_n, "a tile's row is a block's keys");
    if constexpr (spec.kv_layout == KvKind::Paged && !tile.block_in_page) {
      // Eight keys, which may lie in two pages: one by one.
      constexpr int all_words = tile.block_n / kWord;
#pragma unroll 1
      for (int32_t at = threadIdx.x; at < Tile::rows * all_words; at += threads) {
        const int32_t d = at / all_words, column = at % all_words * kWord;
        uint32_t elems[kWord];
#pragma unroll
        for (int e = 0; e < kWord; ++e) {
          const int32_t j = first_key + column + e;
          const bool is_there = d < spec.head_dim_v && j >= 0 && j < end;
          elems[e] = is_there ? data[offset_of(view, j) + d * view.dim] : 0;
        }
        const uint32_t packed[4] = {elems[0] | elems[1] << 16, elems[2] | elems[3] << 16, elems[4] | elems[5] << 16,
                                    elems[6] | elems[7] << 16};
        ptx::st_shared_v4(to.address() + fmha::mma::word_offset<Tile>(d, column), packed);
      }
    } else {
      const uint16_t* first = first_key < end ? data + offset_of(view, first_key) : data;
      const auto row_of = [&](int32_t d) -> const uint16_t* {
        return d < spec.head_dim_v && first_key >= 0 ? first + d * view.dim : nullptr;
      };
      copy_tile<bytes, threads>(to, data, row_of,
                                [&](int32_t, int32_t column) { return clamp(end - first_key - column, 0, kWord); });
    }
  }

  FMHA_DEVICE void load_k(int32_t i) const {
    if constexpr (widens_blocks(tile)) {
      load_rows<spec.head_dim_qk>(smem.blocks.raw_k[i % tile.stages], p.k, p.descale_k, i);
    } else {
      load_rows<spec.head_dim_qk>(smem.blocks.k[i % tile.stages], p.k, p.descale_k, i);
    }
  }
  FMHA_DEVICE void load_v(int32_t i) const {
    if constexpr (widens_blocks(tile)) {
      load_rows<spec.head_dim_v>(smem.blocks.raw_v[i % tile.stages], p.v, p.descale_v, i);
    } else if constexpr (Shared::v_columns) {
      load_columns(smem.blocks.v[i % tile.stages], p.v, i);
    } else {
      load_rows<spec.head_dim_v>(smem.blocks.v[i % tile.stages], p.v, p.descale_v, i);
    }
  }

  // A raw block to the one that the products read.
  FMHA_DEVICE void widen_k(int32_t i, float descale) const {
    widen_tile<tile.stored, spec.dtype_qk, tile.converts_fp8, threads>(smem.blocks.wide_k, smem.blocks.raw_k[i % tile.stages], descale);
  }
  FMHA_DEVICE void widen_v(int32_t i, float descale) const {
    widen_tile<tile.stored, spec.dtype_v, tile.converts_fp8, threads>(smem.blocks.wide_v, smem.blocks.raw_v[i % tile.stages], descale);
  }
};

}  // namespace fmha::sm80
