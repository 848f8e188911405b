// Loads from global memory straight to LDS (gfx950): no registers hold the data in flight, and no instruction stores
// it. K has the same LDS layout as with loads through registers; V keeps its memory layout and is transposed when it is
// read.
#pragma once
#include <fmha/cdna/load.h>

namespace fmha::cdna {

#if defined(__gfx950__)
// Tiles of one matrix in flight. A thread loads chunk `part * num_threads + thread_idx()` of the LDS matrix in LDS
// order; the swizzle is applied to the global address instead.
template <class Matrix, int num_rows, int num_threads>
class DirectLoad {
  static constexpr int chunks_per_row = Matrix::chunks;
  static constexpr int rows_per_part = num_threads / chunks_per_row;
  // A part covers the swizzle's whole period of rows, or half: then odd parts load other chunks of their rows.
  static constexpr int num_places = rows_per_part % Matrix::swizzle_period == 0 ? 1 : 2;
  using Reader = VectorReader<4, true>;

 public:
  static constexpr int issue_parts = num_rows * chunks_per_row / num_threads, store_parts = 0;

  template <int part>
  FMHA_DEVICE void issue(const Rows& rows, Matrix& to, uint32_t wave_bytes) const {
    const uint32_t at = lds_address(&to) + wave_bytes + part * num_threads * kFragBytes;
    constexpr int place = part % num_places;
    Reader(rows).read_to_lds(from_[place], (part - place) * rows_per_part, at);
  }
  FMHA_DEVICE void store(Matrix&, int) const {}

  FMHA_DEVICE void find_addresses(const Rows& rows) {
    const int thread = opaque_thread_idx();
#pragma unroll
    for (int i = 0; i < num_places; ++i) {
      const int row = thread / chunks_per_row + i * rows_per_part;
      from_[i] = Reader::place(rows, row, Matrix::chunk_at(row, thread % chunks_per_row) * kFragBytes);
    }
  }
  FMHA_DEVICE void move(const Rows& rows, int32_t tiles) {
#pragma unroll
    for (int i = 0; i < num_places; ++i) from_[i] += Reader::below(rows, tiles * num_rows);
  }
  FMHA_DEVICE void rematerialise_addresses() {
#pragma unroll
    for (int i = 0; i < num_places; ++i) opaque_in_vgpr(from_[i]);
  }

 private:
  int32_t from_[num_places];
};
#endif

}  // namespace fmha::cdna
