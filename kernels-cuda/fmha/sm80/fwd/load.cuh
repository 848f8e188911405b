// Loads Q and blocks of K and V. K and V are strided, packed or paged, or their rows are gathered by a token's list.
#pragma once
#include <fmha/common/list_union.cuh>
#include <fmha/common/work.cuh>
#include <fmha/sm80/common/copy.cuh>
#include <fmha/sm80/fwd/config.cuh>

namespace fmha::sm80 {

template <FwdSpec spec, Sm80Tile tile, class Keys = EveryKey>
struct Loader {
  using Shared = Smem<spec, tile>;
  static constexpr int bytes = tile.copy_bytes, threads = num_consumers(tile);
  // Whether a multiprocessor has few warps in flight. Each then copies many bytes, and the instructions that a copy
  // needs count.
  static constexpr bool has_few_warps = tile.warps == 1 || tile.split_keys > 0;

  const FwdParams& p;
  const Work& work;
  Shared& smem;
  const Keys& keys_of_row;
  const SeqSpan span = {work.i_batch, work.storage_batch, work.q_row, work.seqlen_q, work.k_row, work.seqlen_k};

  FMHA_DEVICE void load_q() const {
    using Elem = mma::Storage<spec.dtype_qk>;
    const Elem* data = static_cast<const Elem*>(p.q.data);
    const auto row_of = [&](int32_t row) -> const Elem* {
      const int32_t packed_row = work.first_row + row, i = query_of<tile>(p, packed_row);
      const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - i * p.gqa_ratio : work.i_head;
      return i < work.seqlen_q ? data + query_offset(p, span, query_of_sequence(keys_of_row, i), i_head) : nullptr;
    };
    copy_tile<bytes, threads>(smem.q, data, row_of,
                              [](int32_t, int32_t column) { return elems_there<spec.head_dim_qk, Elem>(column); });
  }

  // The block of keys in step i of the tile's walk.
  FMHA_DEVICE int32_t block_of(int32_t i) const {
    if constexpr (unites_lists<Keys>()) return keys_of_row.block_of(i);
    else return block_at(work, i);
  }
  // Groups of keys that step i has: all of its block but for what no list of the tile names.
  FMHA_DEVICE uint32_t groups_of(int32_t i) const {
    if constexpr (unites_lists<Keys>()) return keys_of_row.groups_of(i);
    else return ~uint32_t(0);
  }

  // End of the keys that the i-th block of the tile has: zeros come behind it, and in the first block in place of
  // keys that no query of the sequence sees, whose V may be NaN.
  FMHA_DEVICE int32_t end_of_keys(int32_t i, int32_t first_key) const {
    return i == 0 ? min(work.seqlen_k, first_key + work.first_dirty) : work.seqlen_k;
  }

  // Offset in elements of key j's row in this tile's head. For a column-major V it is the offset of the key's first
  // element.
  FMHA_DEVICE int64_t offset_of(const View& view, int32_t j) const {
    return offset_of_key<elem_bytes>(keys_of_row, p, view, spec.kv_layout, span, max(j, 0), work.i_head_kv);
  }

  FMHA_DEVICE float descale_of(const HeadScalars& descales) const { return scalar_of(descales, work.i_batch, work.i_head_kv, 1.f); }

  static constexpr int32_t elem_bytes = size_bytes(widens_cache(spec, tile) ? tile.stored : spec.dtype_v);

  // Where the rows of a block's keys lie. If one row follows another, without pages or within one page, the first key's
  // place is enough; otherwise each lane has the places of every 32nd key. The block table or the list is read one
  // block ahead, so that copies do not wait for it.
  static constexpr bool listed = are_of_token<Keys>();
  static constexpr bool in_a_row = !listed && (spec.kv_layout != KvKind::Paged || tile.block_in_page);
  // Batch index of a listed key that is absent, and an offset that no row has.
  static constexpr int32_t kAbsent = -1;
  static constexpr int64_t kNoRow = -(int64_t(1) << 62);
  struct KeyRows {
    static constexpr int count = in_a_row ? 1 : ceil_div(tile.block_n, 32);
    KvRow rows[count];
  };
  FMHA_DEVICE KeyRows look_up(int32_t i) const {
    KeyRows found = {};
    if (i >= work.num_blocks) return found;
    const int32_t first_key = block_of(i) * tile.block_n, end = end_of_keys(i, first_key);
#pragma unroll
    for (int s = 0; s < KeyRows::count; ++s) {
      const int32_t within = in_a_row ? 0 : 32 * s + int32_t(threadIdx.x % 32), j = first_key + within;
      const bool there = within < tile.block_n && j >= 0 && j < end;
      if constexpr (listed) {
        found.rows[s] = there ? keys_of_row.list.place(spec.kv_layout, j) : KvRow{kAbsent, 0};
      } else {
        if (there) found.rows[s] = kv_row(p, spec.kv_layout, span, j);
      }
    }
    return found;
  }

  // Copies rows of a [keys, dim] tile. Elements have type `own` if they do not come from a cache; rows of an FP8 cache
  // are copied as stored and widened later.
  template <int dim, DType own, class Tile>
  FMHA_DEVICE void load_rows(const Tile& to, const View& view, const HeadScalars& descales, int32_t i, const KeyRows& keys) const {
    using Elem = mma::Storage<widens_cache(spec, tile) ? tile.stored : own>;
    const int32_t first_key = block_of(i) * tile.block_n, end = end_of_keys(i, first_key);
    [[maybe_unused]] const uint32_t groups = groups_of(i);
    const Elem* data = static_cast<const Elem*>(view.data);
    int64_t offsets[KeyRows::count];
#pragma unroll
    for (int s = 0; s < KeyRows::count; ++s) {
      if constexpr (listed) {
        offsets[s] = keys.rows[s].batch == kAbsent
                         ? kNoRow
                         : keys_of_row.list.template offset<elem_bytes>(view, keys.rows[s], work.i_head_kv);
      } else {
        offsets[s] = row_offset(view, keys.rows[s], work.i_head_kv);
      }
    }
    const auto row_of = [&](int32_t row) -> const Elem* {
      const int32_t j = first_key + row;
      if (j < 0 || j >= end) return nullptr;
      if constexpr (unites_lists<Keys>()) {
        if (!(groups >> row / kGroupKeys & 1)) return nullptr;
      }
      if constexpr (listed) {
        if (keys_of_row.list.key(j) < 0) return nullptr;
      }
      return data + (in_a_row ? offsets[0] + row * view.row : offset_of(view, j));
    };
    // Place of row `base` + `within`, where `within` is below `step`. `base` and `step` are compile-time constants, so
    // the lane that holds the place is known at compile time too. All lanes of a warp call it together.
    const auto scattered_row_of = [&](int32_t base, int32_t within, int32_t step) -> const Elem* {
      const int32_t row = base + within, j = first_key + row;
      int64_t offset = 0;
#pragma unroll
      for (int s = 0; s < KeyRows::count; ++s) {
        if (s < base / 32 || s > (base + step - 1) / 32) continue;
        const int64_t of_lane = ptx::shfl_idx(offsets[s], row % 32);
        if (row / 32 == s) offset = of_lane;
      }
      const bool named = !unites_lists<Keys>() || groups >> row / kGroupKeys & 1;
      return j >= 0 && j < end && named && !(listed && offset == kNoRow) ? data + offset : nullptr;
    };
    const auto there_of = [](int32_t, int32_t column) {
      // Whole steps of a product have no partial words at a row's end.
      return has_few_warps && tile_dim(dim, own, tile) == dim ? kWordOf<mma::Storage<own>>
                                                              : elems_there<dim, mma::Storage<own>>(column);
    };
    // Most of a long walk's blocks: whole, and their rows one after another.
    if constexpr (has_few_warps && in_a_row && bytes >= 4 && !unites_lists<Keys>()) {
      if (first_key >= 0 && first_key + tile.block_n <= end) {
        if constexpr (!widens_cache(spec, tile)) return copy_whole_tile<bytes, threads>(to, data + offsets[0], view.row, there_of);
        else if constexpr (threads % Tile::words == 0) return copy_whole_raw_tile<bytes, dim, threads>(to, data + offsets[0], view.row);
      }
    }
    if constexpr (widens_cache(spec, tile) && !widens_blocks(spec, tile)) {
      widen_odd_tile<tile.stored, spec.dtype_qk, tile.converts_fp8, threads>(to, descale_of(descales), row_of, there_of);
    } else if constexpr (widens_cache(spec, tile) && in_a_row && has_few_warps) {
      copy_raw_rows<bytes, dim, threads>(to, data, row_of);
    } else if constexpr (widens_cache(spec, tile) && in_a_row) {
      copy_raw_tile<bytes, dim, threads>(to, data, [&](int32_t base, int32_t within, int32_t) { return row_of(base + within); });
    } else if constexpr (widens_cache(spec, tile)) {
      copy_raw_tile<bytes, dim, threads>(to, data, scattered_row_of);
    } else if constexpr (!in_a_row) {
      copy_scattered_tile<bytes, threads>(to, data, scattered_row_of, there_of);
    } else if constexpr (has_few_warps && bytes >= 4) {
      // Few blocks are not whole. Their code is kept short, so that other code stays in the instruction cache.
      copy_rows<bytes, threads>(to, data, row_of, there_of);
    } else {
      copy_tile<bytes, threads>(to, data, row_of, there_of);
    }
  }

  // Copies rows of a [dim, keys] tile.
  template <class Tile>
  FMHA_DEVICE void load_columns(const Tile& to, const View& view, int32_t i) const {
    const int32_t first_key = block_of(i) * tile.block_n, end = end_of_keys(i, first_key);
    using Elem = typename Tile::Elem;
    constexpr int word_elems = kWordOf<Elem>;
    const Elem* data = static_cast<const Elem*>(view.data);
    static_assert(Tile::dim == tile.block_n, "a tile's row is a block's keys");
    if constexpr (spec.kv_layout == KvKind::Paged && !tile.block_in_page) {
      // A word has several keys, which may lie in several pages: they are copied one by one.
      constexpr int all_words = tile.block_n / word_elems;
#pragma unroll 1
      for (int32_t at = threadIdx.x; at < Tile::rows * all_words; at += threads) {
        const int32_t d = at / all_words, column = at % all_words * word_elems;
        uint32_t packed[4];
        gather_word<Elem>(packed, [&](int e) -> uint32_t {
          const int32_t j = first_key + column + e;
          return d < spec.head_dim_v && j >= 0 && j < end ? data[offset_of(view, j) + d * view.dim] : 0;
        });
        ptx::st_shared_v4(to.address() + fmha::mma::word_offset<Tile>(d, column), packed);
      }
    } else {
      const Elem* first = first_key < end ? data + offset_of(view, first_key) : data;
      const auto row_of = [&](int32_t d) -> const Elem* {
        return d < spec.head_dim_v && first_key >= 0 ? first + d * view.dim : nullptr;
      };
      copy_tile<bytes, threads>(to, data, row_of,
                                [&](int32_t, int32_t column) { return clamp(end - first_key - column, 0, word_elems); });
    }
  }

  FMHA_DEVICE void load_k(int32_t i, const KeyRows& keys) const {
    if constexpr (widens_blocks(spec, tile)) {
      load_rows<spec.head_dim_qk, spec.dtype_qk>(smem.raw_k[i % tile.stages], p.k, p.descale_k, i, keys);
    } else {
      load_rows<spec.head_dim_qk, spec.dtype_qk>(smem.k[i % tile.stages], p.k, p.descale_k, i, keys);
    }
  }
  // Copies rows of bytes of a block, as stored; they are converted later.
  FMHA_DEVICE void load_bytes(int32_t i, const KeyRows& keys) const {
    constexpr int row_bytes = row_bytes_of<Keys>();
    const int32_t first_key = block_of(i) * tile.block_n, end = end_of_keys(i, first_key);
    copy_rows_of_bytes<threads>(smem.rows[i % tile.stages], p.k.data, [&](int32_t row) -> BytesOfRow {
      const int32_t j = first_key + row;
      KvRow at = {};
#pragma unroll
      for (int s = 0; s < KeyRows::count; ++s) {
        if (row / 32 != s) continue;
        at = {ptx::shfl_idx(keys.rows[s].batch, row % 32), ptx::shfl_idx(keys.rows[s].row, row % 32)};
      }
      if (j < 0 || j >= end || at.batch == kAbsent) return {};
      return keys_of_row.list.template bytes_of<row_bytes>(at);
    });
  }
  FMHA_DEVICE void widen_bytes(int32_t i) const {
    widen_rows_of_bytes<tile.converts_fp8, threads>(smem.wide.k, smem.rows[i % tile.stages]);
  }

  FMHA_DEVICE void load_v(int32_t i, const KeyRows& keys) const {
    static_assert(!shares_blocks(spec, tile), "sm80: V lies in K's block");
    if constexpr (widens_blocks(spec, tile)) {
      load_rows<spec.head_dim_v, spec.dtype_v>(smem.raw_v[i % tile.stages], p.v, p.descale_v, i, keys);
    } else if constexpr (Shared::v_columns) {
      load_columns(smem.v[i % tile.stages], p.v, i);
    } else {
      load_rows<spec.head_dim_v, spec.dtype_v>(smem.v[i % tile.stages], p.v, p.descale_v, i, keys);
    }
  }

  template <DType wide, class Tile, class Raw>
  FMHA_DEVICE void widen(const Tile& to, const Raw& from, float descale) const {
    if (descale == 1.f) widen_tile<tile.stored, wide, tile.converts_fp8, threads, true>(to, from, 1.f);
    else widen_tile<tile.stored, wide, tile.converts_fp8, threads, false>(to, from, descale);
  }
  // Converts an unconverted block of K to the block that the products read.
  FMHA_DEVICE void widen_k(int32_t i, float descale) const {
    widen<spec.dtype_qk>(smem.wide.k, smem.raw_k[i % tile.stages], descale);
  }
  FMHA_DEVICE void widen_v(int32_t i, float descale) const {
    widen<spec.dtype_v>(smem.wide.v, smem.raw_v[i % tile.stages], descale);
  }
};

}  // namespace fmha::sm80
