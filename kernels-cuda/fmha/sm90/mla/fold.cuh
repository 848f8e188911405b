// Parts of the keys folded within a cluster, before anything is written: neighbouring CTAs have the same rows, and each
// a part. So as many times fewer bytes of O go to memory and back, and the launch behind merges so many fewer parts.
//
// Running maxima and sums go to all CTAs of the cluster; each then brings its O to the maxima of all, and stores it to
// the shared memory of the CTA that owns the columns, over blocks of K that are read. The owner adds what has come, in
// the order of the parts.
#pragma once
#include <fmha/ptx/cluster.cuh>
#include <fmha/sm90/mla/consume.cuh>

namespace fmha::mla {

// The load role's part in the two cluster barriers below. Its CTA must stay until the others have stored their data
// there.
FMHA_DEVICE void meet_as_loader() {
  ptx::cluster_sync();
  ptx::cluster_sync();
}

template <FwdSpec spec, Sm90MlaTile tile, int group>
struct Fold {
  static constexpr int parts = tile.fold_parts;
  using P = Plan<spec, tile>;
  using RowSoftmax = typename Consumer<spec, tile, group>::RowSoftmax;
  static_assert(P::v_in_k && spec.head_dim_v == 2 * P::columns_half && spec.dtype_o == DType::F32 && P::columns_half == 256,
                "sm90_mla: parts of a V in K are folded");
  // A quad is four numbers of a thread: two columns of its two rows. A warpgroup has 32 quads; the columns of one owner
  // lie within one warpgroup's.
  static constexpr int quads = 64 / parts, owners = parts / 2, columns = 8 * quads;
  using Owned = mma::Accumulator<columns / 2>;  // what a warpgroup adds up for its CTA

  Consumer<spec, tile, group>& consumer;
  const uint32_t rank = ptx::cluster_ctarank();
  const uint32_t received = ptx::shared_address(&consumer.smem.k);

  // Address, in the owner's shared memory, of a quad of this thread from part `part`.
  FMHA_DEVICE uint32_t place(uint32_t part, int quad) const {
    return received + ((part * quads + quad) * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
  }
  FMHA_DEVICE int32_t row(int r) const { return consumer.tile_row + 8 * r; }

  // Tells all CTAs the running maxima and sums of the rows; afterwards no CTA reads blocks of K any more.
  FMHA_DEVICE void meet() {
    Smem<spec, tile>& smem = consumer.smem;
    if constexpr (group == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = smem.row_sum[0][row(r)] + smem.row_sum[1][row(r)];
        for (uint32_t to = threadIdx.x % 4; to < parts; to += 4) {
          ptx::st_shared_cluster_b32(told(smem.folded.row_max[rank][row(r)], to), bits_of(consumer.softmax.rows[r].row_max));
          ptx::st_shared_cluster_b32(told(smem.folded.row_sum[rank][row(r)], to), bits_of(sum));
        }
      }
    }
    ptx::cluster_sync();
  }
  template <class Word>
  FMHA_DEVICE static uint32_t told(const Word& word, uint32_t to) {
    return ptx::shared_address_at(ptx::shared_address(&word), to);
  }

  // Raises the running maximum to that of all parts, and returns the parts' total sum and the factor of this part.
  struct Joined {
    float sum, correction;
  };
  FMHA_DEVICE Joined join(int r) {
    const auto& folded = consumer.smem.folded;
    RowStats& own = consumer.softmax.rows[r];
    float top = -infinity();
#pragma unroll
    for (int n = 0; n < parts; ++n) top = fmaxf(top, folded.row_max[n][row(r)]);
    const float shift = RowSoftmax::shift_of(finite_or_zero(top), consumer.scale_log2);
    const auto correction = [&](float row_max) {
      return ptx::ex2_approx_ftz(RowSoftmax::shift_of(row_max, consumer.scale_log2) - shift);
    };
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < parts; ++n) sum += folded.row_sum[n][row(r)] * correction(folded.row_max[n][row(r)]);
    const Joined joined = {sum, correction(own.row_max)};
    own.row_max = top;
    return joined;
  }

  // Sends O to the CTAs that own its columns, times a factor for each row, and tells them which rows must be
  // recomputed. After it no CTA accesses another one's memory.
  FMHA_DEVICE void send(const float (&factor)[2], const bool (&again)[2]) {
    const auto& o = consumer.o;
#pragma unroll
    for (int n = 0; n < owners; ++n) {
      const uint32_t owner = group * owners + n;
      const uint32_t to = ptx::shared_address_at(place(rank, 0), owner);
#pragma unroll
      for (int quad = 0; quad < quads; ++quad) {
        const int e = 4 * (n * quads + quad);
        ptx::st_shared_cluster_v4_f32(to + quad * kWarpgroup * 16, o[e] * factor[0], o[e + 1] * factor[0], o[e + 2] * factor[1],
                                      o[e + 3] * factor[1]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      for (uint32_t to = threadIdx.x % 4; to < parts; to += 4)
        ptx::st_shared_cluster_b32(told(consumer.smem.folded.again[group][rank][row(r)], to), again[r]);
    }
    ptx::cluster_sync();
  }
  FMHA_DEVICE bool is_again(int r) const {
    uint32_t again = 0;
#pragma unroll
    for (int n = 0; n < parts; ++n) again |= consumer.smem.folded.again[0][n][row(r)] | consumer.smem.folded.again[1][n][row(r)];
    return again != 0;
  }

  // Adds up the parts of the columns that the CTA owns, this warpgroup's half of them.
  FMHA_DEVICE void add(Owned& sum) const {
    sum.clear();
#pragma unroll
    for (int part = 0; part < parts; ++part) {
#pragma unroll
      for (int quad = 0; quad < quads / 2; ++quad) {
        float four[4];
        ptx::ld_shared_v4_f32(four, place(part, group * (quads / 2) + quad));
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[4 * quad + k] += four[k];
      }
    }
  }
  FMHA_DEVICE int32_t first_column() const { return (2 * int32_t(rank) + group) * (columns / 2); }
};

}  // namespace fmha::mla
