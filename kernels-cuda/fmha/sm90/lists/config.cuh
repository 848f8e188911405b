// Numbers, shared memory and barriers of the backward over lists of keys by wgmma.
#pragma once
#include <fmha/common/list_sums.cuh>
#include <fmha/common/score_pair.cuh>
#include <fmha/mma/sm90.cuh>
#include <fmha/ptx/mbarrier.cuh>

namespace fmha::sm90::lists {

namespace mma = fmha::mma::sm90;

using ptx::Barrier;

constexpr int kHeads = 128;  // of a token: the rows of a cluster of two CTAs
constexpr int kKeys = 64;    // of a block
constexpr int kCtas = 2;     // of a cluster; each has half of the columns of every row
constexpr int kThreads = 2 * mma::kWarpgroup;

// Columns of a CTA: half of the first 512, and half of the further 64 that Q and K have.
constexpr int kColumns = 256, kTail = 32;
// Number of keys of a block whose P and dS one CTA computes, from scores of which each CTA has summed a part.
constexpr int kOwnKeys = kKeys / kCtas;

template <int rows, int dim>
using Tile = mma::SmemTile<uint16_t, rows, dim, true>;

// P and dS of half of a block's keys, in shared memory.
struct Probs {
  Tile<kHeads, kOwnKeys> probs, ds;
};

// The columns of Q and K beyond 512.
template <bool has_tail>
struct Tails {};
template <>
struct Tails<true> {
  Tile<kHeads, kTail> q_tail;
  Tile<kKeys, kTail> k_tail;
};

// The tile field that the score modifiers read.
struct PlainScores {
  bool fast_softcap = false;
};

// Four numbers of each thread.
using Fours = float[kThreads][4];

// V is read before P and dS are written, which take its memory. Until then, half of that memory receives the peer's
// part of dP.
union ValuesOrProbs {
  Tile<kKeys, kColumns> v;
  Probs probs[kCtas];
  FMHA_DEVICE ValuesOrProbs() {}
};

template <BwdSpec spec>
struct Smem : Tails<(spec.fwd.head_dim_qk > 2 * kColumns)> {
  static constexpr bool has_tail = spec.fwd.head_dim_qk > 2 * kColumns;
  Tile<kHeads, kColumns> q, dout;
  Tile<kKeys, kColumns> k;
  ValuesOrProbs values;
  Fours scores[kOwnKeys / 8];  // the peer's part of S
  QueryStats<kHeads> stats;
  int32_t keys[2][kKeys];      // of even and odd blocks; -1: absent
  int64_t rows_k[kKeys], rows_v[kKeys];  // where the next block's rows begin
  int32_t count;  // of the list's entries
  SeqSpan span;   // of the token's sequence, and what its mask shows
  MaskBand band;
  Barrier v_read;       // the peer has read V and what it received: one arrival per warp of the peer
  Barrier parts_there;  // the peer's parts of S and dP: their bytes, and one arrival
  Barrier probs_there;  // the peer's half of P and dS: its bytes, and one arrival
  Barrier probs_sent;   // this CTA's half has reached the peer: one arrival
};

}  // namespace fmha::sm90::lists
