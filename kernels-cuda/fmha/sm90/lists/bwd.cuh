// Backward over lists of keys by wgmma: rows of 512 or 576 elements of Q and K, and of 512 of V.
//
// A cluster of two CTAs has up to 128 query heads of one token and kv head, and walks the token's list in blocks of 64
// keys, whose rows are gathered. Each CTA has half of the columns of Q, dO, K and V, so that rows are gathered once and
// a key's dK and dV are added to memory once for all heads. Each of its two warpgroups has 64 heads. For a block:
//
//   S, dP     parts of both, over the CTA's columns; the parts of 32 keys go to the peer's shared memory
//   P, dS     of 32 keys, from both parts; a copy goes to the peer
//   dQ += dS K                     64 heads and the CTA's columns, in registers
//   dK += dS^T Q, dV += P^T dO     64 keys and the CTA's columns, 64 at a time, added to sums in memory, in no order
//
//   a CTA's warpgroups, block i    S   dP  | P, dS | dQ  | dK, dV              | S   dP
//   copies under way               V(i)    |       |     | K(i + 1)            | V(i + 1)
//
// Warpgroup 0 adds dK and warpgroup 1 dV; products of 64 columns run beneath the additions of the 64 before.
#pragma once
#include <fmha/common/quads.cuh>
#include <fmha/ptx/bulk.cuh>
#include <fmha/ptx/cluster.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90/lists/config.cuh>
#include <fmha/token_list.h>

namespace fmha::sm90::lists {

// Columns of dK or dV that are computed at a time.
constexpr int kAtOnce = 64;
using Product = mma::Accumulator<kAtOnce>;

// Computes d += A B^T over the columns of one tile: A's rows from `row` on. It issues instructions, and neither opens
// nor commits a group.
template <DType dtype, class D, class TileA, class TileB>
FMHA_DEVICE void issue_abt(D& d, const TileA& a, int32_t row, const TileB& b, bool adds) {
  constexpr int depth = 16, steps_per_chunk = TileA::span / depth;
  const mma::Descriptor a0 = mma::descriptor<TileA::span_bytes>(a.offset() + row * TileA::span_bytes, 16);
  const mma::Descriptor b0 = mma::descriptor<TileB::span_bytes>(b.offset(), 16);
#pragma unroll
  for (int step = 0; step < TileA::dim / depth; ++step) {
    const int chunk = step / steps_per_chunk, within = step % steps_per_chunk * 32;
    ptx::wgmma_mma_async_ss<dtype, 1, 0, 0>(d.elems, a0.plus_bytes(chunk * TileA::chunk_bytes + within).bits(),
                                            b0.plus_bytes(chunk * TileB::chunk_bytes + within).bits(), adds || step != 0);
  }
}

template <BwdSpec spec>
struct Token {
  using Shared = Smem<spec>;
  static constexpr FwdSpec kFwd = spec.fwd;
  static constexpr DType dtype = kFwd.dtype_qk;
  static constexpr bool has_tail = Shared::has_tail;

  const BwdParams& p;
  Shared& smem;
  const ListParams& lists;
  const int32_t i, i_head_kv;
  const int32_t first_head, num_heads;  // of the cluster's rows, among the group's
  const int32_t rank = ptx::cluster_ctarank();
  const int32_t warpgroup = ptx::uniform(threadIdx.x / mma::kWarpgroup);
  const int32_t row = warpgroup * mma::kRows + mma::fragment_row();  // the thread's first head of two, 8 apart
  mma::Accumulator<kColumns> dq;
  mma::Accumulator<has_tail ? kTail : 8> dq_tail;

  // The token's list. Its sequence's bounds stay in shared memory, since dQ leaves no registers for them.
  FMHA_DEVICE TokenList list() const { return {p.fwd, lists, smem.span, smem.band, i, i_head_kv}; }

  // Copies columns of a tile, from `first` on. `row_of` gives the element at which a row of the tensor begins; -1
  // stands for zeros.
  template <class To, class RowOf>
  FMHA_DEVICE static void copy(const To& to, const void* data, int32_t first, RowOf row_of) {
    constexpr int words = To::dim / 8, rows_at_once = kThreads / words;
    const uint16_t* elems = static_cast<const uint16_t*>(data);
    const int32_t first_row = threadIdx.x / words, column = threadIdx.x % words * 8;
#pragma unroll 4
    for (int32_t row = first_row; row < To::rows; row += rows_at_once) {
      const int64_t at = row_of(row);
      ptx::cp_async<16>(to.address() + fmha::mma::word_offset<To>(row, column), at < 0 ? elems : elems + at + first + column,
                        at < 0 ? 0 : 16);
    }
  }
  FMHA_DEVICE void load_heads() const {
    const auto row_of = [&](const View& view) {
      return [&](int32_t row) -> int64_t {
        const int32_t i_head = i_head_kv * p.fwd.gqa_ratio + first_head + row;
        return row < num_heads ? row_offset(view, smem.span.storage_batch, list().token(), i_head) : -1;
      };
    };
    copy(smem.q, p.fwd.q.data, rank * kColumns, row_of(p.fwd.q));
    if constexpr (has_tail) copy(smem.q_tail, p.fwd.q.data, kCtas * kColumns + rank * kTail, row_of(p.fwd.q));
    copy(smem.dout, p.dout.data, rank * kColumns, row_of(p.dout));
    for (int32_t row = threadIdx.x; row < kHeads; row += kThreads) {
      const bool there = row < num_heads;
      const int32_t i_head = i_head_kv * p.fwd.gqa_ratio + first_head + (there ? row : 0);
      const int64_t at = stats_offset(p, smem.span, i_head, i);
      smem.stats.lse_log2[row] = there ? p.lse_log2[at] : infinity();
      smem.stats.delta[row] = there ? p.delta[at] : 0.f;
      smem.stats.origin[row] = there ? p.score_origin[at] : 0.f;
    }
  }
  FMHA_DEVICE void load_k() const {
    const auto row_of = [&](int32_t n) { return smem.rows_k[n]; };
    copy(smem.k, p.fwd.k.data, rank * kColumns, row_of);
    if constexpr (has_tail) copy(smem.k_tail, p.fwd.k.data, kCtas * kColumns + rank * kTail, row_of);
    ptx::cp_async_commit_group();
  }
  FMHA_DEVICE void load_v() const {
    copy(smem.values.v, p.fwd.v.data, rank * kColumns, [&](int32_t n) { return smem.rows_v[n]; });
    ptx::cp_async_commit_group();
  }

  // Writes the keys of the block from `first` on to `keys`, -1 for an absent one. All threads must have finished with
  // the old contents.
  FMHA_DEVICE void note_keys(int32_t first, int32_t (&keys)[kKeys]) const {
    const int32_t at = first + int32_t(threadIdx.x);
    if (threadIdx.x < kKeys) keys[threadIdx.x] = at < smem.count ? list().key(at) : -1;
  }
  // Finds the next block, from `first` on, that has any key, and stores where its rows lie; `keys` has the keys of the
  // block at `first`. Returns where that block begins, or at least the list's end if there is none. All threads call
  // it; if a block is found, a barrier has made its rows visible.
  FMHA_DEVICE int32_t find_block(int32_t first, int32_t (&keys)[kKeys]) const {
    const int32_t count = smem.count;
#pragma unroll 1
    for (; first < count; first += kKeys, note_keys(first, keys)) {
      bool some = false;
      if (threadIdx.x < kKeys) {
        const int32_t key = keys[threadIdx.x];
        some = key >= 0;
        KvRow at = {0, 0};
        if (some) at = list().row_of(kFwd.kv_layout, key);
        smem.rows_k[threadIdx.x] = some ? row_offset(p.fwd.k, at, i_head_kv) : -1;
        smem.rows_v[threadIdx.x] = some ? row_offset(p.fwd.v, at, i_head_kv) : -1;
      }
      if (__syncthreads_or(some)) break;
    }
    return first;
  }

  // Computes this CTA's part of a block's S and dP: the sum over the CTA's columns.
  FMHA_DEVICE void score(mma::Accumulator<kKeys>& s, mma::Accumulator<kKeys>& dp) const {
    ptx::cp_async_wait_group<1>();
    ptx::fence_proxy_async();
    __syncthreads();
    ptx::wgmma_fence();
    issue_abt<dtype>(s, smem.q, warpgroup * mma::kRows, smem.k, false);
    if constexpr (has_tail) issue_abt<dtype>(s, smem.q_tail, warpgroup * mma::kRows, smem.k_tail, true);
    ptx::wgmma_commit_group();
    ptx::cp_async_wait_group<0>();
    ptx::fence_proxy_async();
    __syncthreads();
    ptx::wgmma_fence();
    issue_abt<dtype>(dp, smem.dout, warpgroup * mma::kRows, smem.values.v, false);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::written_here(s.elems);
    ptx::written_here(dp.elems);
  }

  // Sends the other CTA's keys of a fragment to that CTA, and keeps this CTA's in `own`.
  using Own = mma::Accumulator<kOwnKeys>;
  FMHA_DEVICE void exchange(Own& own, const mma::Accumulator<kKeys>& x, uint32_t to) const {
    const uint32_t peer = ptx::shared_address_at(to + threadIdx.x * 16, 1 - rank);
    const uint32_t barrier = ptx::address_at(smem.parts_there, 1 - rank);
#pragma unroll
    for (int k = 0; k < kOwnKeys / 8; ++k) {
      float given[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float low = x[4 * k + e], high = x[4 * k + e + Own::num_elems];
        own[4 * k + e] = rank == 0 ? low : high;
        given[e] = rank == 0 ? high : low;
      }
      ptx::st_async_v4_f32(peer + k * sizeof(Fours), given[0], given[1], given[2], given[3], barrier);
    }
  }
  FMHA_DEVICE static void add_received(Own& own, uint32_t from) {
#pragma unroll
    for (int k = 0; k < kOwnKeys / 8; ++k) {
      float four[4];
      ptx::ld_shared_v4_f32(four, from + threadIdx.x * 16 + k * sizeof(Fours));
#pragma unroll
      for (int e = 0; e < 4; ++e) own[4 * k + e] += four[e];
    }
  }

  // Replaces S and dP of this CTA's keys by P and dS.
  FMHA_DEVICE void probabilities(Own& s, Own& dp, const int32_t (&keys)[kKeys]) const {
    using Modifiers = BwdScore<spec, PlainScores{}>;
    const Modifiers modifiers = Modifiers::of(p.fwd, smem.span, i_head_kv * p.fwd.gqa_ratio, p.fwd.softmax_scale);
    const Pair at = {i, 0};
    float lse_log2[2], delta[2], origin[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse_log2[r] = smem.stats.lse_log2[row + 8 * r];
      delta[r] = smem.stats.delta[row + 8 * r];
      origin[r] = smem.stats.origin[row + 8 * r];
    }
    const int32_t first_key = rank * kOwnKeys + fmha::mma::fragment_column();
#pragma unroll
    for (int e = 0; e < Own::num_elems; ++e) {
      const int r = Own::row(e);
      float slope, prob;
      if (origin[r] == 0.f) {
        const Scored x = modifiers.log2(at, s[e], -lse_log2[r], [] { return 0.f; }, true);
        slope = x.slope;
        prob = ptx::ex2_approx_ftz(x.score);
      } else {
        const Scored x = modifiers.natural(at, s[e], [] { return 0.f; });
        slope = x.slope;
        prob = probability(x.score - origin[r], lse_log2[r]);
      }
      const bool seen = keys[first_key + Own::column(e)] >= 0 && row + 8 * r < num_heads;
      s[e] = seen ? prob : 0.f;
      dp[e] = seen ? prob * (dp[e] - delta[r]) * slope : 0.f;
    }
  }
  // Stores a fragment of this CTA's keys to a tile, as 16-bit elements.
  FMHA_DEVICE void put(const Tile<kHeads, kOwnKeys>& to, const Own& x) const {
    using To = Tile<kHeads, kOwnKeys>;
    mma::RegisterTile<uint16_t, kOwnKeys> words;
    words.template from<dtype>(x, 0);
    const int32_t lane = threadIdx.x % 32, at_row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < kOwnKeys / 16; ++step)
      ptx::stmatrix_x4(to.address() + fmha::mma::word_offset<To>(at_row, step * 16 + lane / 16 * 8), words.elems[step]);
  }

  // Computes P and dS of block number `turn`, and stores them to the shared memory of both CTAs.
  FMHA_DEVICE void make_probs(uint32_t turn, const int32_t (&keys)[kKeys]) const {
    if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(smem.parts_there, kCtas * sizeof(smem.scores));
    mma::Accumulator<kKeys> s, dp;
    score(s, dp);
    // Tells the peer that this CTA has read V, whose memory takes the peer's part of dP, and the data that the peer
    // sent for the block before.
    ptx::mbarrier_arrive_at_if(smem.v_read, 1 - rank, threadIdx.x % 32 == 0);
    ptx::mbarrier_wait_parity(smem.v_read, turn % 2);
    Own own_s, own_dp;
    exchange(own_s, s, ptx::shared_address(smem.scores));
    exchange(own_dp, dp, ptx::shared_address(&smem.values.probs[1 - rank]));
    ptx::mbarrier_wait_parity(smem.parts_there, turn % 2);
    Probs& own = smem.values.probs[rank];
    add_received(own_s, ptx::shared_address(smem.scores));
    add_received(own_dp, ptx::shared_address(&own));
    probabilities(own_s, own_dp, keys);
    // Waits until all threads have read what the peer sent.
    __syncthreads();
    put(own.probs, own_s);
    put(own.ds, own_dp);
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(smem.probs_there, sizeof(Probs));
      const uint32_t from = ptx::shared_address(&own);
      ptx::cp_async_bulk_at(from, 1 - rank, from, sizeof(Probs), smem.probs_there);
    }
    __syncwarp();
    ptx::mbarrier_wait_parity(smem.probs_there, turn % 2);
    ptx::mbarrier_arrive_at_if(smem.probs_sent, 1 - rank, threadIdx.x == 0);
  }

  // Adds dS K of a block to dQ in registers.
  FMHA_DEVICE void add_dq() {
    using K = Tile<kKeys, kColumns>;
    using Ds = Tile<kHeads, kOwnKeys>;
    const mma::Descriptor k0 = mma::descriptor<K::span_bytes>(smem.k.offset(), K::chunk_bytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      const Ds& ds = smem.values.probs[step / 2].ds;
      const mma::Descriptor a =
          mma::descriptor<Ds::span_bytes>(ds.offset() + warpgroup * mma::kRows * Ds::span_bytes + step % 2 * 32, 16);
      ptx::wgmma_mma_async_ss<dtype, 1, 0, 1>(dq.elems, a.bits(), k0.plus_bytes(step * 16 * K::span_bytes).bits(), true);
      if constexpr (has_tail) {
        using KTail = Tile<kKeys, kTail>;
        const mma::Descriptor tail = mma::descriptor<KTail::span_bytes>(smem.k_tail.offset(), KTail::chunk_bytes);
        ptx::wgmma_mma_async_ss<dtype, 1, 0, 1>(dq_tail.elems, a.bits(), tail.plus_bytes(step * 16 * KTail::span_bytes).bits(),
                                                true);
      }
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::written_here(dq.elems);
    if constexpr (has_tail) ptx::written_here(dq_tail.elems);
  }

  // d = A^T B over all heads: A is P or dS, of both halves of the keys; B are columns of Q or dO, whose rows are
  // `span_bytes` apart. Starts, does not wait.
  template <int span_bytes, class D>
  FMHA_DEVICE static void start_of_keys(D& d, const mma::Descriptor& a, uint32_t b) {
    using A = Tile<kHeads, kOwnKeys>;
    const mma::Descriptor b0 = mma::descriptor<span_bytes>(b, 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeads / 16; ++step)
      ptx::wgmma_mma_async_ss<dtype, 1, 1, 1>(d.elems, a.plus_bytes(step * 16 * A::span_bytes).bits(),
                                              b0.plus_bytes(step * 16 * span_bytes).bits(), step != 0);
    ptx::wgmma_commit_group();
  }
  // Adds a fragment of 64 keys to sums in memory. `to` has the addresses of the sums' rows for the thread's two keys,
  // null for an absent key. Pairs of lanes exchange one of two 8-column groups, so that the four lanes of a key add to
  // 64 bytes of its row at a time.
  template <int n>
  FMHA_DEVICE static void add(const mma::Accumulator<n>& x, float* const (&to)[2]) {
#pragma unroll
    for (int e = 0; e < x.num_elems; e += 8) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int low = e + 2 * r, high = low + 4;
        float four[4] = {x[low], x[low + 1], x[high], x[high + 1]};
        exchange_halves(four);
        ptx::red_global_add_v4_f32_if(to[r] + x.column(e), four[0], four[1], four[2], four[3], to[r] != nullptr);
      }
    }
  }

  // Adds dK (warpgroup 0) or dV (warpgroup 1) of a block to their sums; then, if there is one, V of the next block is
  // loaded.
  FMHA_DEVICE void add_to_keys(uint32_t turn, const int32_t (&keys)[kKeys], bool has_next) const {
    using A = Tile<kHeads, kOwnKeys>;
    using B = Tile<kHeads, kColumns>;
    const bool of_k = warpgroup == 0;
    const Probs& first = smem.values.probs[0];
    const mma::Descriptor a = mma::descriptor<A::span_bytes>(of_k ? first.ds.offset() : first.probs.offset(), sizeof(Probs));
    const uint32_t b = of_k ? smem.q.offset() : smem.dout.offset();
    const ListSums<kFwd.head_dim_qk, kFwd.head_dim_v> sums{p};
    const int32_t column = threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4;
    float* to[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t j = keys[mma::fragment_row() + 8 * r];
      const int64_t at = sums.row(smem.span.i_batch, i_head_kv, j);
      to[r] = j < 0 ? nullptr : (of_k ? sums.dk(at) : sums.dv(at)) + rank * kColumns + column;
    }
    Product x[2];
    if constexpr (has_tail) {
      mma::Accumulator<kTail> tail;
      if (of_k) {
        start_of_keys<Tile<kHeads, kTail>::span_bytes>(tail, a, smem.q_tail.offset());
        ptx::wgmma_wait_group<0>();
        ptx::written_here(tail.elems);
        const int32_t further = kCtas * kColumns + rank * kTail - rank * kColumns;
        float* const of_tail[2] = {to[0] ? to[0] + further : nullptr, to[1] ? to[1] + further : nullptr};
        add(tail, of_tail);
      }
    }
    start_of_keys<B::span_bytes>(x[0], a, b);
    constexpr int parts = kColumns / kAtOnce;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      Product& now = x[part % 2];
      if (part + 1 < parts) {
        start_of_keys<B::span_bytes>(x[(part + 1) % 2], a, b + (part + 1) * B::chunk_bytes);
        ptx::wgmma_wait_group<1>();
      } else {
        ptx::wgmma_wait_group<0>();
      }
      ptx::written_here(now.elems);
      if (part + 1 == parts) {
        // Waits until all warps have read P and dS: this CTA's warps, and the copies of its half to the peer.
        ptx::mbarrier_wait_parity(smem.probs_sent, turn % 2);
        __syncthreads();
        if (has_next) load_v();
      }
      add(now, to);
#pragma unroll
      for (int r = 0; r < 2; ++r) to[r] = to[r] ? to[r] + kAtOnce : nullptr;
    }
  }

  FMHA_DEVICE void run() {
    dq.clear();
    dq_tail.clear();
    load_heads();
    note_keys(0, smem.keys[0]);
    int32_t first = find_block(0, smem.keys[0]);
    if (first < smem.count) {
      load_k();
      load_v();
    }
    uint32_t turn = 0;
#pragma unroll 1
    while (first < smem.count) {
      // Loads of the next block's keys run beneath the products.
      note_keys(first + kKeys, smem.keys[(turn + 1) % 2]);
      make_probs(turn, smem.keys[turn % 2]);
      add_dq();
      // Finding a block takes a barrier, behind which K has been read.
      first = find_block(first + kKeys, smem.keys[(turn + 1) % 2]);
      const bool has_next = first < smem.count;
      if (has_next) load_k();
      add_to_keys(turn, smem.keys[turn % 2], has_next);
      ++turn;
    }
    ptx::cp_async_wait_group<0>();
    store_dq();
    // Waits for the cluster's other CTA, so that none reads or writes a CTA's memory after its end.
    ptx::cluster_sync();
  }

  template <int n>
  FMHA_DEVICE void store(const mma::Accumulator<n>& x, int32_t first_column) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= num_heads) continue;
      const int32_t i_head = i_head_kv * p.fwd.gqa_ratio + first_head + row + 8 * r;
      const int64_t to = row_offset(p.dq, smem.span.storage_batch, list().token(), i_head) + first_column +
                         fmha::mma::fragment_column();
#pragma unroll
      for (int e = 0; e < x.num_elems; ++e) {
        if (x.row(e) == r)
          store_elem<spec.dtype_grad>(const_cast<void*>(static_cast<const void*>(p.dq.data)), to + x.column(e),
                                      x[e] * p.fwd.softmax_scale);
      }
    }
  }
  FMHA_DEVICE void store_dq() const {
    store(dq, rank * kColumns);
    if constexpr (has_tail) store(dq_tail, kCtas * kColumns + rank * kTail);
  }
};

// The backward over lists. The grid's clusters are parts of a token's heads, for every token, kv head and sequence.
template <BwdSpec spec>
FMHA_DEVICE void bwd(const BwdParams& p, const ListParams& lists) {
  static_assert(!spec.fwd.softcap, "sm90_lists: slopes of soft-capped scores have no registers beside dQ");
  static_assert(!spec.fwd.dropout && spec.fwd.bias == BiasKind::None, "sm90_lists: a place in a list is not a position");
  static_assert(spec.fwd.head_dim_v == kCtas * kColumns && spec.fwd.head_dim_qk == spec.fwd.head_dim_v + Smem<spec>::has_tail * kCtas * kTail,
                "sm90_lists: rows are of 512 elements, Q's and K's of 512 or 576");
  const int32_t cluster = blockIdx.x / kCtas;
  const int32_t parts = ceil_div(p.fwd.gqa_ratio, kHeads), part = cluster % parts;
  const int32_t i = cluster / parts % p.fwd.seqlen_q, head = cluster / parts / p.fwd.seqlen_q;
  const int32_t i_batch = head / p.fwd.num_heads_kv, i_head_kv = head % p.fwd.num_heads_kv;
  if (i_batch >= p.fwd.batch) return;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  if (i >= span.seqlen_q) return;
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<spec>& smem = *reinterpret_cast<Smem<spec>*>(raw);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.v_read, kThreads / 32);
    ptx::mbarrier_init(smem.parts_there, 1);
    ptx::mbarrier_init(smem.probs_there, 1);
    ptx::mbarrier_init(smem.probs_sent, 1);
    ptx::fence_mbarrier_init();
  }
  const MaskBand band = resolve_band(p.fwd.mask, span.seqlen_q, span.seqlen_k);
  const int32_t first_head = part * kHeads;
  if (threadIdx.x == 0) {
    smem.span = span;
    smem.band = band;
    smem.count = TokenList{p.fwd, lists, span, band, i, i_head_kv}.count();
  }
  ptx::cluster_sync();
  Token<spec> token{p, smem, lists, i, i_head_kv, first_head, min(kHeads, p.fwd.gqa_ratio - first_head)};
  token.run();
}

}  // namespace fmha::sm90::lists
