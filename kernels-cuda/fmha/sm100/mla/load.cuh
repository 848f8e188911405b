// The load role, four warps: Q once, and the ring's slots in the order of the products (config.cuh).
//
// TMA brings up to 64 keys by 64 columns at once, a box to a lane, whose keys lie in one page. Keys of which some are
// seen by no row are copied, with zeros in the place of those: memory there may hold NaN, of V too. Where pages are no
// whole boxes all rows are copied, each from where it lies.
//
// Over lists of keys TMA gathers four rows by 64 columns at once, and absent ones, whose index is outside the tensor,
// are zeros. Where rows are none of one matrix (odd distances between pages, two caches) they are copied. Caches in
// FP8, and rows of bytes, are copied as they are to where they will lie in 16 bits, and widened there.
#pragma once
#include <fmha/common/rows_of_lanes.cuh>
#include <fmha/common/widen.cuh>
#include <fmha/ptx/cluster.cuh>
#include <fmha/ptx/collective.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm100/mla/work.cuh>

namespace fmha::sm100::mla {

// `rows`: what makes matrices of K and V, over lists of keys.
template <FwdSpec spec, Sm100MlaTile tile, class Keys>
struct Loader {
  using P = Plan<spec>;
  using Rows = RowsOfLane;
  using Row = Rows::Row;

  const FwdParams& p;
  const Maps& maps;
  const Work& work;
  Smem<spec, tile.listed>& smem;
  const ptx::CacheHint hint_of_v;
  const Keys keys;
  const GatheredRows& gathered;
  const int32_t lane = threadIdx.x % 32, warp = ptx::uniform(threadIdx.x / 32) - kLoadWarp, rank = rank_in_pair();
  Slot<kStages> ring;
  // Barrier of the copies under way, which stay so while the next slot's are issued.
  Barrier* pending = nullptr;
  // Codes of a cache in FP8 that are pending: chunks of a slot, 0 if there are none.
  static constexpr bool widens = is_fp8(tile.stored);
  // A factor for all of them, or one for the codes that a lane has of each of its rows.
  static constexpr int factors = tile.row_bytes > 0 ? Rows::count : 1;
  struct Narrow {
    const Chunk* chunks = nullptr;
    int32_t count = 0;
    float factor[factors] = {};
  };
  Narrow narrow;

  const int32_t found_row = Rows::found_by(warp, lane);
  // Address of key `j`; null: zeros.
  FMHA_DEVICE Row row_of(const View& view, int32_t j) const {
    if (j >= work.end) return nullptr;
    return static_cast<Row>(view.data) + row_offset(view, kv_row(p, spec.kv_layout, work.span, j), work.i_head_kv);
  }

  // `count` chunks of rows of `dim` elements, from column `column` on.
  template <int count>
  FMHA_DEVICE void copy_chunks(const Chunk* to, int32_t column, int32_t dim, const Rows& rows, const void* any) const {
    const uint32_t of_lane = to->address() + fmha::mma::word_offset<Chunk>(4 * warp + lane / 8, lane % 8 * 8);
    const int32_t first = column + lane % 8 * 8;
#pragma unroll
    for (int k = 0; k < Rows::count; ++k) {
#pragma unroll
      for (int chunk = 0; chunk < count; ++chunk) {
        const int32_t at = first + chunk * kSpan, there = rows.of_lane[k] ? clamp(dim - at, 0, 8) : 0;
        // Without elements nothing is read.
        ptx::cp_async<16>(of_lane + chunk * Chunk::tile_bytes + k * Rows::apart * Chunk::span_bytes,
                          there > 0 ? rows.of_lane[k] + at : any, 2 * there);
      }
    }
  }

  // Copies that this thread has seen complete are announced to the tensor cores of both CTAs.
  FMHA_DEVICE void announce() {
    if constexpr (widens) widen();
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive_release_at(*pending, kLeader);
    pending = nullptr;
  }
  FMHA_DEVICE void flush() {
    if (!pending) return;
    ptx::cp_async_wait_group<0>();
    announce();
  }
  FMHA_DEVICE void finish_copies(Barrier& full) {
    ptx::cp_async_commit_group();
    if (pending) {
      ptx::cp_async_wait_group<1>();
      announce();
    }
    pending = &full;
  }
  // Waits until the slot is free. The products that free it may wait for copies that are pending here.
  FMHA_DEVICE void wait_empty() {
    Barrier& empty = smem.kv_empty[ring.index];
    const bool free = __all_sync(ptx::kAllLanes, ptx::mbarrier_test_parity(empty, ring.phase ^ 1));
    if (free) return;
    flush();
    ptx::mbarrier_wait_parity(empty, ring.phase ^ 1);
  }

  // Boxes of `count` chunks of 64 keys, dealt out to the lanes of a warp.
  template <int count>
  FMHA_DEVICE void bring(const Chunk* to, const ptx::TensorMap& map, uint32_t barrier, int32_t first_key,
                         int32_t column, ptx::CacheHint hint) const {
    constexpr int box_keys = tile.by_tma ? tile.box_keys : kHalf, boxes = kHalf / box_keys;
    static_assert(box_keys % 8 == 0 && count * boxes <= 32, "a lane's box is whole lines of the swizzle");
    const int32_t chunk = lane / boxes, box = lane % boxes;
    if (chunk >= count) return;
    const KvRow key = kv_row(p, spec.kv_layout, work.span, first_key + box * box_keys);
    const int32_t batch = spec.kv_layout == KvKind::Packed ? 0 : key.batch;
    ptx::cp_async_bulk_tensor_4d_pair(to[chunk].address() + box * box_keys * Chunk::span_bytes, map, barrier,
                                      column + chunk * kSpan, key.row, work.i_head_kv, batch, hint);
  }

  // A slot: 64 keys from `first_key` on, `count` chunks of their columns from `column` on.
  template <int count>
  FMHA_DEVICE void load(const View& view, const ptx::TensorMap& map, int32_t dim, int32_t first_key, int32_t column,
                        ptx::CacheHint hint) {
    wait_empty();
    const Chunk* to = smem.kv[ring.index].chunks;
    Barrier& full = smem.kv_full[ring.index];
    if (!tile.by_tma || first_key + kHalf > work.end) {
      copy_chunks<count>(to, column, dim, Rows::told(row_of(view, first_key + found_row), lane), view.data);
      finish_copies(full);
    } else {
      // Earlier copies are needed first.
      flush();
      const uint32_t barrier = ptx::address_at(full, kLeader);
      if (warp > 0) {
        ptx::mbarrier_arrive_at_if(full, kLeader, lane == 0);
      } else {
        if (lane == 0) ptx::mbarrier_arrive_expect_tx_at(barrier, count * Chunk::tile_bytes);
        __syncwarp();
        bring<count>(to, map, barrier, first_key, column, hint);
        __syncwarp();
      }
    }
    ring.advance();
  }

  FMHA_DEVICE void load_q() {
    const Rows rows = Rows::told(query_row_of(p, work, found_row), lane);
#pragma unroll 1
    for (int32_t chunk = 0; chunk < P::chunks_k; ++chunk)
      copy_chunks<1>(smem.q + chunk, chunk * kSpan, spec.head_dim_qk, rows, p.q.data);
    finish_copies(smem.q_full);
  }
  FMHA_DEVICE void load_k(int32_t block) {
    const int32_t first_key = block * kKeys + rank * kHalf;
#pragma unroll 1
    for (int32_t slot = 0; slot < P::chunks_k / 2; ++slot)
      load<2>(p.k, maps.k, spec.head_dim_qk, first_key, slot * 2 * kSpan, ptx::CacheHint::EvictLast);
    if constexpr (P::chunks_k % 2 == 1)
      load<1>(p.k, maps.k, spec.head_dim_qk, first_key, (P::chunks_k - 1) * kSpan, ptx::CacheHint::EvictLast);
  }
  FMHA_DEVICE void load_v(int32_t block) {
#pragma unroll 1
    for (int32_t half = 0; half < kCtas; ++half) {
#pragma unroll 1
      for (int32_t group = 0; group < P::groups_v; ++group)
        load<2>(p.v, maps.v, spec.head_dim_v, block * kKeys + half * kHalf, group * kGroup + rank * (kGroup / kCtas),
                hint_of_v);
    }
  }

  // Entry of the list for a place; an absent one outside the part's places.
  FMHA_DEVICE int32_t listed_at(int32_t place) const {
    return place < work.part_keys.begin || place >= work.end ? -1 : entry_at(keys.list, place);
  }
  // The block table's entry of a key that is there, at a place.
  FMHA_DEVICE int32_t page_with(int32_t key, int32_t place) const {
    if constexpr (tile.two_caches) {
      if (keys.list.is_second(place)) {
        const TokenList& second = keys.list.second.list;
        const FwdParams& of = second.p;
        if (keys.list.second_layout != KvKind::Paged || key < 0 || second.lists.addresses) return 0;
        return of.block_table[work.span.i_batch * of.block_table_batch + key / of.page_size];
      }
    }
    if (spec.kv_layout != KvKind::Paged || key < 0 || keys.list.lists.addresses) return 0;
    return p.block_table[work.span.i_batch * p.block_table_batch + key / p.page_size];
  }
  // Codes of a slot lie in the last chunk that they will fill, in the rows that the warp copies: eight lanes have the
  // 128 codes of a row, of which each widens sixteen that it has copied itself.
  const int32_t first_row = 4 * warp + lane / 8, piece = lane % 8;
  FMHA_DEVICE uint32_t codes_at(const Chunk* chunks, int32_t count, int k) const {
    return chunks[count - 1].address() + (first_row + k * Rows::apart) * Chunk::span_bytes + 16 * piece;
  }
  template <int count>
  FMHA_DEVICE void copy_codes(const Chunk* to, int32_t column, int32_t dim, const Rows& rows, const void* any) const {
    if (piece >= 4 * count) return;
#pragma unroll
    for (int k = 0; k < Rows::count; ++k) {
      const bool there = rows.of_lane[k] != nullptr && column + 16 * piece < dim;
      const uint8_t* from = reinterpret_cast<const uint8_t*>(rows.of_lane[k]) + column + 16 * piece;
      ptx::cp_async<16>(codes_at(to, count, k), there ? from : any, there ? 16 : 0);
    }
  }
  // Factor of the lane's codes of its k-th row.
  FMHA_DEVICE float factor_of(int32_t k) const {
    float factor = narrow.factor[0];
#pragma unroll
    for (int n = 1; n < factors; ++n) factor = k == n ? narrow.factor[n] : factor;
    return factor;
  }
  // Widens the codes that are pending, a row after the other: more rows at once would spill.
  FMHA_DEVICE void widen() {
    const int32_t count = narrow.count;
    narrow.count = 0;
    const bool has_some = piece < 4 * count, second = piece >= 4;
    const uint32_t to = narrow.chunks[second].address();
    const int32_t rows = count > 0 ? Rows::count : 0;
#pragma unroll 1
    for (int32_t k = 0; k < rows; ++k) {
      uint32_t codes[4] = {};
      if (has_some) ptx::ld_shared_v4_b32(codes, codes_at(narrow.chunks, count, k));
      // Every lane has read what is overwritten.
      __syncwarp();
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        // Lanes of the second chunk have their last eight codes first, so that eight lanes write to all banks.
        const bool last = (n == 1) != second;
        const uint32_t eight[2] = {last ? codes[2] : codes[0], last ? codes[3] : codes[1]};
        uint32_t packed[4];
        widen_word<tile.stored, spec.dtype_qk, true>(eight, factor_of(k), packed);
        const int32_t column = piece % 4 * 16 + (last ? 8 : 0);
        if (has_some)
          ptx::st_shared_v4(to + fmha::mma::word_offset<Chunk>(first_row + k * Rows::apart, column), packed);
      }
    }
  }

  // Where the row of a key at a place lies, whose page the block table says; batch -1: it is absent. A row of the
  // second cache is its complement.
  FMHA_DEVICE KvRow listed_row(int32_t key, int32_t page, int32_t place) const {
    if (key < 0) return {-1, 0};
    if constexpr (tile.two_caches) {
      if (keys.list.is_second(place)) {
        const TokenList& second = keys.list.second.list;
        const FwdParams& of = second.p;
        if (keys.list.second_layout != KvKind::Paged) return {second.span.i_batch, ~(second.span.k_row + key)};
        const int32_t of_address = key / of.page_size;
        return {second.lists.addresses ? of_address : clamp(page, 0, of.num_pages - 1),
                ~(key - of_address * of.page_size)};
      }
    }
    if constexpr (spec.kv_layout == KvKind::Paged) {
      const int32_t of_address = key / p.page_size;
      return {keys.list.lists.addresses ? of_address : clamp(page, 0, p.num_pages - 1),
              key - of_address * p.page_size};
    } else {
      return kv_row(p, spec.kv_layout, work.span, key);
    }
  }

  // Rows that a lane brings of half a block: by TMA four rows of one chunk, whose indices these are, else the rows that
  // it copies.
  struct Brought {
    int32_t indices[4];
    Rows rows;
    Rows scales;  // of rows of bytes
  };
  // Lanes 0-15 have found rows of the block's first half, the others of the second.
  FMHA_DEVICE Brought brought(const View& view, const MatrixRows& matrix, KvRow found, int32_t half) const {
    Brought to = {};
    if constexpr (tile.by_tma) {
      const int32_t index = found.batch * matrix.batch + found.row * matrix.row + work.i_head_kv * matrix.head;
      const int32_t own = found.batch < 0 ? -1 : index;
#pragma unroll
      for (int k = 0; k < 4; ++k) to.indices[k] = ptx::shfl_idx(own, 16 * half + lane % 4 * 4 + k);
    } else if constexpr (tile.row_bytes > 0) {
      const bool there = found.batch >= 0;
      const BytesOfRow at = keys.list.template bytes_of<tile.row_bytes>(there ? found : KvRow{0, 0});
      to.rows = Rows::told(there ? reinterpret_cast<Row>(at.row) : nullptr, lane, 16 * half);
      to.scales = Rows::told(reinterpret_cast<Row>(at.scales), lane, 16 * half);
    } else {
      constexpr int bytes = size_bytes(tile.stored);
      const int64_t at = keys.list.template offset<bytes>(view, found, work.i_head_kv) * bytes;
      const Row row = reinterpret_cast<Row>(static_cast<const uint8_t*>(view.data) + at);
      to.rows = Rows::told(found.batch < 0 ? nullptr : row, lane, 16 * half);
    }
    return to;
  }
  // A slot of rows of bytes, of which the first `codes` chunks are values, and the next one of `count` is of bf16. The
  // scales are asked for while the copies are under way.
  using Format = RowFormat<(tile.row_bytes > 0 ? tile.row_bytes : 656)>;
  template <int codes, int count>
  FMHA_DEVICE void load_bytes(const Brought& from, int32_t column) {
    static_assert(codes <= count && count <= codes + 1, "values, and then at most one chunk of bf16");
    wait_empty();
    const Chunk* to = smem.kv[ring.index].chunks;
    if constexpr (codes > 0) copy_codes<codes>(to, column, Format::values, from.rows, p.k.data);
    if constexpr (count > codes) {
#pragma unroll
      for (int k = 0; k < Rows::count; ++k) {
        const bool there = from.rows.of_lane[k] != nullptr;
        const uint8_t* row = reinterpret_cast<const uint8_t*>(from.rows.of_lane[k]) + Format::rotary + 16 * piece;
        const uint32_t place = fmha::mma::word_offset<Chunk>(first_row + k * Rows::apart, 8 * piece);
        ptx::cp_async<16>(to[codes].address() + place, there ? row : p.k.data, there ? 16 : 0);
      }
    }
    finish_copies(smem.kv_full[ring.index]);
    narrow.chunks = to;
    narrow.count = codes;
    if constexpr (codes > 0) {
      const int32_t group = (column + 16 * piece) / Format::group;
#pragma unroll
      for (int k = 0; k < factors; ++k)
        narrow.factor[k] = from.rows.of_lane[k] ? scale_of(from.scales.of_lane[k], group) : 1.f;
    }
    ring.advance();
  }
  FMHA_DEVICE static float scale_of(Row scales, int32_t group) {
    group = min(group, Format::values / Format::group - 1);
    if constexpr (Format::in_page_tail) return e8m0(reinterpret_cast<const uint8_t FMHA_GLOBAL*>(scales)[group]);
    else return reinterpret_cast<const float FMHA_GLOBAL*>(scales)[group];
  }
  // Columns of all slots of K's or V's rows of bytes: those of values alone, and one that ends with bf16.
  FMHA_DEVICE void load_bytes_at(const Brought& from, int32_t column) {
    constexpr int32_t whole = Format::values / (2 * kSpan) * (2 * kSpan);
    if constexpr (whole == Format::values) {
      load_bytes<2, 2>(from, column);
    } else if (column < whole) {
      load_bytes<2, 2>(from, column);
    } else {
      load_bytes<1, 2>(from, column);
    }
  }
  // A slot of those rows. Each warp brings its own sixteen.
  template <int count>
  FMHA_DEVICE void load_listed(const Brought& from, const View& view, const ptx::TensorMap& map, int32_t dim,
                               int32_t column, ptx::CacheHint hint) {
    wait_empty();
    const Chunk* to = smem.kv[ring.index].chunks;
    Barrier& full = smem.kv_full[ring.index];
    if constexpr (tile.by_tma) {
      const uint32_t barrier = ptx::address_at(full, kLeader);
      if (lane == 0) ptx::mbarrier_arrive_expect_tx_at(barrier, count * Chunk::tile_bytes / kWarps);
      __syncwarp();
      const int32_t chunk = lane / 4, first_row = lane % 4 * Rows::apart + 4 * warp;
      if (chunk < count)
        ptx::cp_async_bulk_tensor_gather4_pair(to[chunk].address() + first_row * Chunk::span_bytes, map, barrier,
                                               column + chunk * kSpan, from.indices, hint);
      __syncwarp();
    } else if constexpr (widens) {
      const HeadScalars& descale = &view == &p.v ? p.descale_v : p.descale_k;
      copy_codes<count>(to, column, dim, from.rows, view.data);
      finish_copies(full);
      narrow = {to, count, {scalar_of(descale, work.span.i_batch, work.i_head_kv, 1.f)}};
    } else {
      copy_chunks<count>(to, column, dim, from.rows, view.data);
      finish_copies(full);
    }
    ring.advance();
  }
  FMHA_DEVICE void load_listed_k(KvRow found) {
    const Brought from = brought(p.k, gathered.k, found, rank);
    if constexpr (tile.row_bytes > 0) {
#pragma unroll 1
      for (int32_t slot = 0; slot < P::chunks_k / 2; ++slot) load_bytes_at(from, slot * 2 * kSpan);
      if constexpr (P::chunks_k % 2 == 1) load_bytes<0, 1>(from, Format::values);
    } else {
#pragma unroll 1
      for (int32_t slot = 0; slot < P::chunks_k / 2; ++slot)
        load_listed<2>(from, p.k, maps.k, spec.head_dim_qk, slot * 2 * kSpan, ptx::CacheHint::EvictLast);
      if constexpr (P::chunks_k % 2 == 1)
        load_listed<1>(from, p.k, maps.k, spec.head_dim_qk, (P::chunks_k - 1) * kSpan, ptx::CacheHint::EvictLast);
    }
  }
  FMHA_DEVICE void load_listed_v(KvRow found) {
#pragma unroll 1
    for (int32_t half = 0; half < kCtas; ++half) {
      const Brought from = brought(p.v, gathered.v, found, half);
#pragma unroll 1
      for (int32_t group = 0; group < P::groups_v; ++group) {
        const int32_t column = group * kGroup + rank * (kGroup / kCtas);
        if constexpr (tile.row_bytes > 0) load_bytes_at(from, column);
        else load_listed<2>(from, p.v, maps.v, spec.head_dim_v, column, hint_of_v);
      }
    }
  }
  // Tells the softmax which keys of the i-th block are there, by the warp's word. Once the block's slots of K are free,
  // products have read P of the block whose word this one takes, and the softmax that word.
  FMHA_DEVICE void tell(int32_t i, uint32_t present) const {
    static_assert((kWords - 1) * (P::slots_k + P::slots_v) > kStages, "a word is read before it is written again");
    if (lane == 0) ptx::st_shared_b32(ptx::shared_address(&smem.list.present[i % kWords][warp]), present);
    ptx::mbarrier_arrive_if(smem.list.told[i % kWords], lane == 0);
  }
  // The keys of a token's list, a lane to a place of a block. What a block's rows need has been asked for a block
  // before, and the list's entries a block before that, so that loads wait for neither.
  FMHA_DEVICE void run_listed() {
    load_q();
    const int32_t num_blocks = ptx::uniform(work.num_blocks);
    int32_t place = work.last_block * kKeys + lane / 16 * kHalf + found_row;
    int32_t key = key_with(keys.list, listed_at(place), place), page = page_with(key, place);
    int32_t entry = listed_at(place - kKeys);
    KvRow before = {-1, 0};
#pragma unroll 1
    for (int32_t i = 0; i <= num_blocks; ++i) {
      KvRow found = {-1, 0};
      if (i < num_blocks) {
        found = listed_row(key, page, place);
        const uint32_t present = ptx::vote_ballot(key >= 0);
        place -= kKeys;
        key = key_with(keys.list, entry, place);
        page = page_with(key, place);
        entry = listed_at(place - kKeys);
        load_listed_k(found);
        tell(i, present);
      }
      // Q's copies come with the first block's rows.
      flush();
      if (i > 0) load_listed_v(before);
      before = found;
    }
    flush();
  }

  FMHA_DEVICE void run_all() {
    load_q();
#pragma unroll 1
    for (int32_t i = 0; i <= work.num_blocks; ++i) {
      if (i < work.num_blocks) load_k(work.last_block - i);
      if (i > 0) load_v(work.last_block - (i - 1));
    }
    flush();
  }

  FMHA_DEVICE void run() {
    if constexpr (tile.listed) {
      run_listed();
    } else {
      run_all();
    }
  }
};

}  // namespace fmha::sm100::mla
