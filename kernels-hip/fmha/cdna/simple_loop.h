// The main loop without software pipelining: a quarter of the code, the same sums in the same order. It serves
// dropout, whose random numbers take longer than everything else (some 1600 issue slots a step), and calls whose rows
// cannot be read by dword loads: there each lane loads single elements, at any address and stride.
#pragma once
#include <fmha/cdna/main_loop.h>

namespace fmha::cdna {

// Rows of a matrix as in `Rows`, but with 64-bit strides and without a buffer descriptor.
struct Elements {
  const uint8_t* data;
  int64_t row_bytes, elem_bytes;  // from row to row, from element to element of a row
  int32_t num_rows, num_elems;

  // Reads an element; outside of the rows it is 0.
  template <int bytes>
  FMHA_DEVICE uint32_t at(int32_t row, int32_t elem) const {
    if (row >= num_rows || elem >= num_elems) return 0;
    const uint8_t* const from = data + row * row_bytes + elem * elem_bytes;
    if constexpr (bytes == 1) return *from;
    return *reinterpret_cast<const uint16_t*>(from);
  }
};

// Writes `to[place(row, elem)]`, in bytes, for all rows and elements of a tile.
template <int num_threads, int rows, int elems, int bytes, class Place>
FMHA_DEVICE void copy_elements(uint8_t* to, const Elements& from, Place place) {
#pragma nounroll
  for (int id = opaque_thread_idx(); id < rows * elems; id += num_threads) {
    const int row = id / elems, elem = id % elems;
    const uint32_t x = from.at<bytes>(row, elem);
    if constexpr (bytes == 1) to[place(row, elem)] = uint8_t(x);
    else *reinterpret_cast<uint16_t*>(&to[place(row, elem)]) = uint16_t(x);
  }
}

// Rows of Q in LDS, or of K, in K's layout.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void copy_rows(typename Config<spec, tile>::KMatrix& k, const Rows& rows) {
  using C = Config<spec, tile>;
  const Elements from = {rows.data, rows.stride_bytes, C::qk_bytes, rows.num_rows, rows.row_bytes / C::qk_bytes};
  copy_elements<C::num_threads, tile.block_n, spec.head_dim_qk, C::qk_bytes>(
      k.bytes, from, [](int row, int elem) __attribute__((always_inline)) {
        const int byte = elem * C::qk_bytes;
        return C::KMatrix::offset(row, byte / kFragBytes) + byte % kFragBytes;
      });
}

// Loads Q through the LDS space of K, as many rows at a time as a tile of K has.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void load_q_by_element(Wave<spec, tile>& wave, typename Config<spec, tile>::Lds& lds, Rows rows) {
  using C = Config<spec, tile>;
  auto& k = lds.stage[0].k;
  const auto lane = C::KMatrix::lane_addresses();
  const int i_wave = v_readfirstlane_b32(opaque_thread_idx() / kWaveSize);
#pragma nounroll
  for (int first_wave = 0; first_wave < C::num_waves; first_wave += C::n_tiles) {
    s_barrier();
    copy_rows<spec, tile>(k, rows);
    s_barrier();
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) {
      if (i_wave != first_wave + n) continue;
#pragma unroll
      for (int c = 0; c < C::qk_steps; ++c) wave.q[c] = k.frag(lane, n, c);
    }
    // The barrier's fence does not wait for LDS reads, and other waves overwrite these rows next.
    s_waitcnt_lgkmcnt<0>();
    rows.data += tile.block_n * rows.stride_bytes;
    rows.num_rows -= tile.block_n;
  }
}

// Loads tiles by dwords; the next tile's loads are in flight while the current one is processed.
template <CdnaSpec spec, CdnaTile tile>
class WideTiles {
  using C = Config<spec, tile>;

 public:
  FMHA_DEVICE WideTiles(const CdnaParams& p, const Job& job)
      : k_cursor_(k_cursor<spec, tile>(p, job)), v_cursor_(v_cursor<spec, tile>(p, job)) {
    k_.find_addresses(k_cursor_.rows);
    v_.find_addresses(v_cursor_.rows);
  }

  FMHA_DEVICE void issue_loads(int32_t i_tile, typename C::Stage& to) {
    k_cursor_.advance(i_tile - at_), v_cursor_.advance(i_tile - at_);
    at_ = i_tile;
    for_each<0, KLoad<spec, tile>::issue_parts>(
        [&](auto part) __attribute__((always_inline)) { k_.template issue<part.value>(k_cursor_.rows, to.k, 0); });
    for_each<0, VLoad<spec, tile>::issue_parts>(
        [&](auto part) __attribute__((always_inline)) { v_.template issue<part.value>(v_cursor_.rows, to.v, 0); });
  }

  FMHA_DEVICE void store_to_lds(const CdnaParams&, int32_t, typename C::Stage& to) {
#pragma unroll
    for (int i = 0; i < KLoad<spec, tile>::store_parts; ++i) k_.store(to.k, i);
#pragma unroll
    for (int i = 0; i < VLoad<spec, tile>::store_parts; ++i) v_.store(to.v, i);
  }

 private:
  Cursor<tile> k_cursor_, v_cursor_;
  int32_t at_ = 0;
  KLoad<spec, tile> k_;
  VLoad<spec, tile> v_;
};

// Loads tiles element by element, when they are needed.
template <CdnaSpec spec, CdnaTile tile>
class ElementTiles {
  using C = Config<spec, tile>;

 public:
  FMHA_DEVICE ElementTiles(const CdnaParams&, const Job& job) : job_(job) {}

  FMHA_DEVICE void issue_loads(int32_t, typename C::Stage&) const {}

  // Stores V to LDS, transposed, in KeyOrder.
  FMHA_DEVICE void store_to_lds(const CdnaParams& p, int32_t i_tile, typename C::Stage& to) const {
    const int64_t first = int64_t(job_.span.k_row) + i_tile * tile.block_n;
    const int32_t num_keys = job_.span.seqlen_k - i_tile * tile.block_n;
    copy_rows<spec, tile>(to.k, rows_of(p.fwd.k, first, job_.span, job_.i_head_kv, num_keys,
                                        p.head_dim_qk * C::qk_bytes, C::qk_bytes));
    const Rows rows = rows_of(p.fwd.v, first, job_.span, job_.i_head_kv, num_keys, 0, C::v_bytes);
    const Elements from = {rows.data, rows.stride_bytes, p.fwd.v.dim * C::v_bytes, num_keys, p.head_dim_v};
    copy_elements<C::num_threads, tile.block_n, spec.head_dim_v, C::v_bytes>(
        to.v.bytes, from, [](int key, int dim) __attribute__((always_inline)) {
          const int run = KeyOrder<C::v_bytes>::run_of(key / kRun * kRun);
          return C::VMatrix::place_of_run(dim, run) + key % kRun * C::v_bytes;
        });
  }

 private:
  const Job& job_;
};

// Every wave of a workgroup walks the same blocks: barriers are inside.
template <CdnaSpec spec, CdnaTile tile>
class SimpleLoop {
  using C = Config<spec, tile>;
  using TilesOfKeys = typename Choose<C::by_element, ElementTiles<spec, tile>, WideTiles<spec, tile>>::type;

 public:
  FMHA_DEVICE SimpleLoop(Wave<spec, tile>& wave, typename C::Lds& lds, const CdnaParams& p, const Job& job,
                         Range queries, const WalkOf<spec>& walk)
      : wave_(wave), stage_(lds.stage[0]), job_(job), queries_(queries), walk_(walk), tiles_(p, job) {}

  // Runs the loop as `MainLoop::run` does.
  FMHA_DEVICE bool run() {
    wave_.opaque_neg_inf = -infinity();
    opaque_in_vgpr(wave_.opaque_neg_inf);
    wave_.k_lane = C::KMatrix::lane_addresses();
    wave_.v_lane = C::VMatrix::lane_addresses();
    tiles_.issue_loads(walk_.tile_at(0), stage_);
    bool hidden = false;
#pragma nounroll
    for (int32_t n = 0; n < walk_.num_tiles; ++n) {
      const int32_t i_tile = walk_.tile_at(n), first_key = i_tile * tile.block_n;
      // Parameters are reloaded for each tile: kept in registers, those of modifiers, dropout and strides would spill
      // SGPRs.
      const CdnaParams& p = reload_params<CdnaParams>();
      s_barrier();  // all waves have read the previous tile
      tiles_.store_to_lds(p, i_tile, stage_);
      if (n + 1 < walk_.num_tiles) tiles_.issue_loads(walk_.tile_at(n + 1), stage_);
      s_barrier();
      hidden |= is_partly_masked<spec, tile>(job_, queries_, walk_, n) && zero_nonfinite<spec, tile>(stage_.v);
      process_tile(p, n, first_key);
    }
    return hidden;
  }

 private:
  FMHA_DEVICE void process_tile(const CdnaParams& p, int32_t n, int32_t first_key) {
    Scores<spec, tile> s = scores<spec, tile>(wave_, stage_.k);
    modify<spec, tile>(s, p, job_, wave_, first_key);
    if constexpr (spec.masks) {
      if (walk_.is_cut(n)) mask_by_data<spec, tile>(s, job_, wave_, first_key);
    } else if (!needs_no_mask<spec, tile>(job_, wave_, first_key)) {
      mask<spec, tile>(s, job_, wave_, first_key);
    }
    raise_row_max<spec, tile>(wave_, job_, max_of<spec, tile>(wave_, s));
    subtract_first<spec, tile>(s, wave_, job_);
    const PFrags<spec, tile> p_frags = probabilities<spec, tile>(s, wave_, p, job_, first_key);
    weighted_values<spec, tile>(wave_, p_frags, stage_.v);
  }

  Wave<spec, tile>& wave_;
  typename C::Stage& stage_;
  const Job& job_;
  Range queries_;
  const WalkOf<spec>& walk_;
  TilesOfKeys tiles_;
};

}  // namespace fmha::cdna
