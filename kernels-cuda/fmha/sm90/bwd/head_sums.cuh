// dK and dV of a kv head whose queries several tiles share (`head_parts`): f32 sums in memory, which a launch of its
// own rounds. They are always added in the order of the parts. Each part stores sums of its own, and the launch adds
// them up. In deterministic calls with packed sequences all parts add to one sum: the first part stores, and each warp
// waits until the warps of the parts before have added to its keys.
#pragma once
#include <fmha/ptx/flag.cuh>
#include <fmha/sm90/bwd/epilogue.cuh>
#include <fmha/sm90/bwd/order.cuh>

namespace fmha::sm90::bwd {

// Number of key blocks of all kv heads, where each head has as many as the longest sequence; and the place of a tile,
// or of a part with sums of its own, among them.
template <Sm90BwdTile tile>
FMHA_DEVICE int32_t num_summed_blocks(const Sm90BwdSchedule& schedule) {
  return schedule.num_tiles / num_parts<tile>(schedule);
}
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int64_t place_of_sums(const BwdParams& p, const Sm90BwdSchedule& schedule, const Work& work) {
  const int64_t head = int64_t(work.span.i_batch) * p.fwd.num_heads_kv + work.i_head_kv;
  const int64_t of_part = keeps_head_sums_apart<spec, tile>() ? work.i_part * int64_t(num_summed_blocks<tile>(schedule)) : 0;
  return of_part + head * schedule.num_key_blocks + work.keys.begin / tile.block_n;
}
// Address of the sums of dV and dK of the key block at `place`. They lie as the accumulators of each consumer do: dV,
// then dK, with four numbers of each thread of the warpgroup side by side.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE float* head_sums_of(const Sm90BwdSchedule& schedule, int64_t place) {
  return schedule.head_sums + place * tile.block_n * kHeadSumsRow<spec, tile>;
}
// Counter of the parts whose warps have added to this warp's keys, for ordered sums of packed sequences.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE int32_t* added_parts(const Sm90BwdSchedule& schedule, int64_t place) {
  return reinterpret_cast<int32_t*>(schedule.head_sums + num_head_sums<spec, tile>(schedule)) +
         place * num_consumer_warps(tile) + threadIdx.x / 32 - 4;
}
// Waits until the parts before this one have added to the warp's keys. `signals` is true in one lane of the warp.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void wait_for_parts_before(const Sm90BwdSchedule& schedule, const Work& work, int64_t place, bool signals) {
  if (signals) {
    while (ptx::ld_acquire_gpu(added_parts<spec, tile>(schedule, place)) < work.i_part) {
    }
  }
  __syncwarp();
}

// Adds or stores a consumer's accumulators, beginning at the first sum of its share, four numbers of a thread at a
// time.
template <int n>
FMHA_DEVICE void add_head_sums(float* share, const mma::Accumulator<n>& grad, float factor, bool stores) {
  float* to = share + threadIdx.x % mma::kWarpgroup * 4;
  const auto put = [&](auto put_four) {
#pragma unroll
    for (int e = 0; e < grad.num_elems; e += 4)
      put_four(to + e * mma::kWarpgroup, grad[e] * factor, grad[e + 1] * factor, grad[e + 2] * factor, grad[e + 3] * factor);
  };
  if (stores) {
    put([](float* at, float a, float b, float c, float d) { ptx::st_global_v4_f32(at, a, b, c, d); });
  } else {
    put([](float* at, float a, float b, float c, float d) { ptx::red_global_add_v4_f32(at, a, b, c, d); });
  }
}

// Adds a part's number with the rounding of an atomic addition in memory, without subnormals: both layouts of sequences
// then give a row the same bits.
template <BwdSpec spec>
FMHA_DEVICE float add_part(float sum, float part) {
  return is_ordered<spec>() ? ptx::add_rn_ftz(sum, part) : sum + part;
}

// Rounds the sums of a key block to dK and dV, by `kHeadSumsCtas` CTAs. A thread takes eight columns of two keys that
// are eight apart: four threads of a warpgroup have computed them. With one CTA to a key block, and sums in the order
// of rows, most multiprocessors were idle: 48 heads over 3, S 384, D 128 took 125 us in all, and 62 so.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void head_sums(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  using S = Shape<spec, tile>;
  constexpr int groups_of_dv = S::dv_columns / 8, groups = groups_of_dv + S::dk_columns / 8, quads = 8, warps = 4;
  constexpr int share = mma::kRows * (S::dv_columns + S::dk_columns), units = S::consumers * warps * groups * quads;
  const int32_t i_block = blockIdx.x / kHeadSumsCtas;
  const int32_t first = (blockIdx.x - i_block * kHeadSumsCtas) * kRowThreads + threadIdx.x;
  const int32_t head = i_block / schedule.num_key_blocks, key_block = i_block - head * schedule.num_key_blocks;
  wait_for_launch_before();
  const int32_t i_batch = head / p.fwd.num_heads_kv, i_head_kv = head - i_batch * p.fwd.num_heads_kv;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  const int64_t first_key = int64_t(key_block) * tile.block_n;
  const float* first_part = head_sums_of<spec, tile>(schedule, i_block);
  const int32_t num_apart = keeps_head_sums_apart<spec, tile>() ? num_parts<tile>(schedule) : 1;
  const int64_t to_next_part = int64_t(num_summed_blocks<tile>(schedule)) * tile.block_n * kHeadSumsRow<spec, tile>;
  for (int32_t i = first; i < units; i += kHeadSumsCtas * kRowThreads) {
    const int32_t quad = i % quads, group = i / quads % groups, warp = i / (quads * groups) % warps;
    const int32_t consumer = i / (quads * groups * warps);
    const bool of_v = S::has_dv(consumer) || group < groups_of_dv;
    const int32_t column = S::first_column(consumer) + 8 * (group < groups_of_dv ? group : group - groups_of_dv);
    const int32_t dim = of_v ? spec.fwd.head_dim_v : spec.fwd.head_dim_qk;
    const int64_t key = first_key + (splits_dims(tile) ? 0 : consumer * mma::kRows) + warp * 16 + quad;
    if (key >= span.seqlen_k || column >= dim) continue;
    const float* from = first_part + consumer * share + (group * mma::kWarpgroup + warp * 32 + quad * 4) * 4;
    // Sums begin at -0, so that a single part keeps the signs of its zeros: a tile with all query heads gives the same.
    float sums[2][8];
#pragma unroll
    for (int e = 0; e < 16; ++e) sums[e / 8][e % 8] = -0.f;
    // Loads of two parts are in flight at a time.
#pragma unroll 2
    for (int32_t part = 0; part < num_apart; ++part) {
      const float4* fours = reinterpret_cast<const float4*>(from + part * to_next_part);
#pragma unroll
      for (int lane = 0; lane < 4; ++lane) {
        const float4 four = fours[lane];
        sums[0][2 * lane] = add_part<spec>(sums[0][2 * lane], four.x);
        sums[0][2 * lane + 1] = add_part<spec>(sums[0][2 * lane + 1], four.y);
        sums[1][2 * lane] = add_part<spec>(sums[1][2 * lane], four.z);
        sums[1][2 * lane + 1] = add_part<spec>(sums[1][2 * lane + 1], four.w);
      }
    }
    const View& view = of_v ? p.dv : p.dk;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (key + 8 * r >= span.seqlen_k) continue;
      const int64_t at = row_offset(view, span.i_batch, span.k_row + key + 8 * r, i_head_kv) + column;
      store_eight<spec.dtype_grad, tile.vector_store>(view.data, at, dim - column, sums[r]);
    }
  }
}

}  // namespace fmha::sm90::bwd
