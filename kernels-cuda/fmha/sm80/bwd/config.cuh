// The derived numbers and the shared memory of the backward kernels of mma.sync.
//
// A CTA owns rows, to which nothing else adds: queries, whose dQ it sums, or keys, whose dK and dV it sums. It walks
// the blocks of the other side. So no sum is kept in memory and every sum has one order; the price is that scores and
// dP are computed twice, seven products in place of five.
//
//   owner    rows      fragments          walks     sums
//   dQ       queries   S, dP              keys      dQ += dS K
//   dK, dV   keys      S^T, dP^T          queries   dV += P^T dO, dK += dS^T Q
//
// Or, where dQ needs no order: a CTA of keys adds each block's dS K to sums in memory besides (add_dq.cuh), five
// products.
//
// Either way the fragment of scores has the owner's rows, so that P and dS, packed, are the operand A of the sums.
#pragma once
#include <fmha/bwd.h>
#include <fmha/common/score_pair.cuh>
#include <fmha/mma/sm80.cuh>
#include <fmha/num.h>
#include <fmha/sm80_bwd_host.h>

namespace fmha::sm80::bwd {

namespace mma = fmha::mma::sm80;

using mma::SmemTile;

FMHA_DEVICE consteval int num_threads(const Sm80BwdTile& tile) { return 32 * tile.warps; }
FMHA_DEVICE constexpr int padded_dim(int dim) { return round_up(dim, mma::kDepth<uint16_t>); }
FMHA_DEVICE consteval bool sums_dq(const Sm80BwdTile& tile) { return tile.sums == BwdSums::Dq; }
FMHA_DEVICE consteval bool adds_dq(const Sm80BwdTile& tile) { return tile.sums == BwdSums::All; }
FMHA_DEVICE consteval bool owns_queries(const Sm80BwdTile& tile) {
  return sums_dq(tile) || tile.sums == BwdSums::DBias || tile.sums == BwdSums::Captured;
}
FMHA_DEVICE consteval bool sums_dk(const Sm80BwdTile& tile) { return tile.sums == BwdSums::DkDv || tile.sums == BwdSums::Dk || adds_dq(tile); }
FMHA_DEVICE consteval bool sums_dv(const Sm80BwdTile& tile) { return tile.sums == BwdSums::DkDv || tile.sums == BwdSums::Dv || adds_dq(tile); }
// Whether dS is made: of dV alone it is not.
FMHA_DEVICE consteval bool makes_ds(const Sm80BwdTile& tile) { return tile.sums != BwdSums::Dv; }

// Own rows of V or dO, of a CTA that makes dS.
template <class Tile, bool has>
struct OwnValues {
  Tile own_value;
};
template <class Tile>
struct OwnValues<Tile, false> {};
// dS of a block, of a CTA that adds to dQ.
template <class Tile, bool has>
struct ScoreGradients {
  Tile ds;  // keys, queries
};
template <class Tile>
struct ScoreGradients<Tile, false> {};
// LSE and delta of walked queries.
template <int columns, int stages>
struct StatsOfBlocks {
  QueryStats<columns> stats[stages];
};
template <int columns>
struct StatsOfBlocks<columns, 0> {};

// Q and dO, K and V: of the CTA's own rows, and of the blocks that it walks.
template <BwdSpec spec, Sm80BwdTile tile>
struct Smem : OwnValues<SmemTile<uint16_t, tile.rows, padded_dim(spec.fwd.head_dim_v)>, makes_ds(tile)>,
              ScoreGradients<SmemTile<uint16_t, tile.rows, tile.columns>, adds_dq(tile)>,
              StatsOfBlocks<tile.columns, owns_queries(tile) ? 0 : tile.stages> {
  static constexpr int dim_qk = padded_dim(spec.fwd.head_dim_qk), dim_v = padded_dim(spec.fwd.head_dim_v);
  using Score = SmemTile<uint16_t, tile.columns, dim_qk>;
  using Value = SmemTile<uint16_t, tile.columns, dim_v>;

  SmemTile<uint16_t, tile.rows, dim_qk> own_score;
  Score score[tile.stages];
  Value value[tile.stages];
};

}  // namespace fmha::sm80::bwd
