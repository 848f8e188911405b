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

FMHA_DEVICE consteval bool sums_dq(const Sm80BwdTile& tile) { return tile.sums == BwdSums::Dq; }
FMHA_DEVICE consteval bool sums_dk(const Sm80BwdTile& tile) { return tile.sums == BwdSums::DkDv || tile.sums == BwdSums::Dk || adds_dq(tile); }
FMHA_DEVICE consteval bool sums_dv(const Sm80BwdTile& tile) { return tile.sums == BwdSums::DkDv || tile.sums == BwdSums::Dv || adds_dq(tile); }

// Tiles of a block of Q or K, and of V or dO, with `rows` rows.
template <BwdSpec spec, int rows>
using ScoreTile = SmemTile<uint16_t, rows, padded_dim(spec.fwd.head_dim_qk)>;
template <BwdSpec spec, int rows>
using ValueTile = SmemTile<uint16_t, rows, padded_dim(spec.fwd.head_dim_v)>;

}  // namespace fmha::sm80::bwd

#include <fmha/sm80_bwd_memory.h>  // SmemParts, of the list in src/sm80_bwd.rs

namespace fmha::sm80::bwd {

// Tiles of Q and dO, and of K and V: for the rows that the CTA owns, and for the blocks that it walks.
template <BwdSpec spec, Sm80BwdTile tile>
struct Smem : SmemParts<spec, tile> {
  static constexpr int dim_qk = padded_dim(spec.fwd.head_dim_qk), dim_v = padded_dim(spec.fwd.head_dim_v);
  using Score = ScoreTile<spec, tile.columns>;
  using Value = ValueTile<spec, tile.columns>;
};

}  // namespace fmha::sm80::bwd
