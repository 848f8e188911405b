// The consume role: a warpgroup's 64 rows.
//
//   step i   tensor cores                     this warpgroup
//            S = Q K(i)^T, O += P V(i-1)      O *= correction, waits for S
//            O += P V(i-1)                    mask, row maxima, P = exp2(S - row maximum)
//            -                                P to 16 or 8 bits; above D 128 O *= correction here, before the next turn
//
// The row-max reduction is skipped where no mask cuts a block (`step_reusing_row_max`): P is computed with the
// running maximum of the blocks before, and the block's row sums tell afterwards whether that was too low.
//
// Two or three warpgroups issue their products in turn (`ping_pong`), so that one's products run under another's
// exponentials. With `lookahead` the next tile's first S is started together with this tile's last P V, so that the
// tensor cores do not wait at a tile's end either.
//
// Products of 8-bit elements are summed in some 14 bits. Flushed products of P V go to accumulators of their own
// (`recent`), which are added to O in f32 with every block; where O leaves no registers for a second accumulator, a
// part of the columns at a time (`output_columns`). With ValueProduct::FlushedFirst that is over before the next
// block's S begins:
//
//   step i   O += P V(i-1), part by part, one summed while the one before is added; S = Q K(i); P
//
// The parts and S then share registers, so that blocks can be larger; a warpgroup's exponentials run under the
// products of the others alone.
#pragma once
#include <fmha/common/scheduler.cuh>
#include <fmha/mma/fp8_operand.cuh>
#include <fmha/mma/sm90/register_product.cuh>
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/cluster.cuh>
#include <fmha/common/dropout.cuh>
#include <fmha/common/seen_keys.cuh>
#include <fmha/sm90/fwd/epilogue.cuh>
#include <fmha/common/score_modifiers.cuh>
#include <fmha/sm90/fwd/recompute_scores.cuh>

namespace fmha::sm90 {

// The state of a consumer warpgroup. `Keys` says which keys queries see. With lists, a tile's blocks come from its
// list, partly masked blocks first.
template <FwdSpec spec, Sm90Tile tile, class Keys>
struct Consumer {
  using Shared = Smem<spec, tile>;
  template <int n>
  using Scores = mma::Accumulator<n>;  // of a block's first n keys
  template <int n>
  using ScoreSums = mma::Accumulator<n>;  // as the product leaves them
  static constexpr int dim_qk = product_dim(spec.head_dim_qk, spec.dtype_qk), dim_v = product_dim(spec.head_dim_v, spec.dtype_v);
  static constexpr DType type_v = operand_v(spec, tile);
  // Number of keys computed of a first block whose later keys the mask hides from the warpgroup: under a causal mask
  // the diagonal hides them from the upper warpgroup.
  static constexpr int half_n = round_up(tile.block_n / 2, mma::kDepth<Storage<type_v>>);
  static constexpr int consumers = num_consumers(tile);
  static constexpr bool passes_after_max = tile.ping_pong == PingPong::AfterMax;
  static constexpr bool takes_turns = tile.ping_pong != PingPong::Off && consumers > 1;
  // O is rescaled before the warpgroup's next ping-pong turn, with exact maxima; otherwise in that turn, under the
  // product of S. Beside sums of FP8, which have registers of their own, D 192 would spill 2 KB.
  static constexpr bool rescales_before_turn = dim_v > 128 && !flushes_output(tile);
  static constexpr bool has_hi = spec.mask != MaskKind::Full, has_lo = spec.mask == MaskKind::Band;
  // Tiles for which two options, `may_have_no_rows` and `marks_raised`, were timed and found faster (TFLOP/s, H200).
  static constexpr bool of_three = !Keys::has_tile_list && consumers == 3 && dim_v <= 64 && !is_fp8(spec.dtype_qk);
  // Whether a warpgroup may have no rows of the sequence, and then computes nothing. Two of three warpgroups may be so,
  // as in one tile of 22 at 4096 rows. Full 583 and 600, causal 520 and 536.
  static constexpr bool may_have_no_rows = of_three && tile.bias_stages == 0;
  // Whether a raised maximum ends the walk over blocks that skip the row-max reduction. Full, scores that grow from
  // block to block: 498 and 534. Causal 536 and 530 where they do not grow; D 128 causal 720 and 709, growing 635 and
  // 639.
  static constexpr bool marks_raised = of_three && takes_turns && !has_hi;

  // Whether rows whose scores lie far apart have a loop of their own, in which maxima are taken of three scores at a
  // time. Causal, x64 and normal: packed D 128 1.015 and 1.015. Not in clusters, x64 0.982; without a mask 1.043 and
  // 0.993; D 256 1.000 and 0.997; of three warpgroups D 80 1.019 and 1.014, D 64 1.006 and 1.001, and at 512 keys 0.98
  // (an H200).
  static constexpr bool takes_three = has_hi && consumers == 2 && dim_v <= 128 && tile.cluster == 1 && !is_fp8(spec.dtype_qk);

  using Modifiers = fmha::Modifiers<spec, tile>;
  static constexpr int blocks_of_part = FoldedOutput<spec, tile>::blocks_of_part;

  const FwdParams& p;
  Shared& smem;
  const Keys& keys;
  const int32_t index;      // of this warpgroup among the consumers
  float scale_log2;         // of what the softmax takes (modifiers.cuh), of the tile whose scores come next
  const bool signals = threadIdx.x % 32 == 0;  // arrives for its warp

  mma::Accumulator<dim_v> o;
  mma::RegisterTile<Storage<spec.dtype_qk>, tile.q_in_registers ? Shared::dim_qk : mma::kDepth<Storage<spec.dtype_qk>>> q;
  mma::RegisterTile<Storage<type_v>, tile.block_n> probs;
  static constexpr int part = output_columns(spec, tile), num_parts = dim_v / part;
  static constexpr int num_recent = sums_output_first(tile) && num_parts > 1 ? 2 : 1;
  mma::Accumulator<flushes_output(tile) ? part : 8> recent[num_recent];  // of a block's P V: parts in turn
  float descale = 1.f;                          // of FP8 scores, of the same tile as scale_log2
  Softmax<tile, p_offset_log2(spec, tile)> softmax;
  DroppedBits<spec.dropout ? tile.block_n : 8> dropped;  // of the block at work
  typename Modifiers::BiasWords bias;  // of the block at work, where it is not in shared memory
  // With lists: whether masks cut the current block, and the words of its mask bits.
  static constexpr bool fetches_bits = Keys::has_tile_list && FetchedBits<tile.block_n>::is_whole;
  FetchedBits<fetches_bits ? tile.block_n : 8> shown;
  bool is_cut = false;
  Slot<Shared::q_buffers> q_slot = {Shared::q_pieces > 1 ? index : 0};
  Slot<tile.stages> k_slot, v_slot;
  Slot<max(tile.bias_stages, 1)> bias_slot;
  Slot<kWorkSlots> work_slot;

  // Which keys this thread's rows see.
  struct Rows {
    int32_t row;           // the thread's first, of the sequence's (packed) rows
    Range inside;          // the keys that all of the warpgroup's rows see
  };
  Rows rows;

  FMHA_DEVICE Rows rows_of(const Work& work) const {
    const int32_t first_row = work.first_row + index * mma::kRows;
    Rows r;
    r.row = first_row + mma::fragment_row();
    const int32_t first = query_of<tile>(p, first_row), last = query_of<tile>(p, first_row + mma::kRows - 1);
    r.inside = mask_of<spec>(work, work.seqlen_k).whole(first, last);
    return r;
  }
  // Whether the mask hides a part of a block for this warpgroup.
  FMHA_DEVICE bool is_edge(int32_t block) const {
    return (block + 1) * tile.block_n > rows.inside.end || (has_lo && block * tile.block_n < rows.inside.begin);
  }

  FMHA_DEVICE const Work& work() const { return smem.work[work_slot.index]; }
  FMHA_DEVICE Modifiers modifiers() const { return {p, fabsf(descale)}; }
  // Loads the tile's descales, which vary by sequence and kv head.
  FMHA_DEVICE void take_scale(const Work& w) {
    if constexpr (is_fp8(spec.dtype_qk)) {
      descale = scalar_of(p.descale_q, w.i_batch, w.i_head_kv, 1.f) * scalar_of(p.descale_k, w.i_batch, w.i_head_kv, 1.f);
      scale_log2 = modifiers().scale_log2();
    }
  }
  FMHA_DEVICE void wait_work() { ptx::mbarrier_wait_parity(smem.work_full[work_slot.index], work_slot.phase); }
  FMHA_DEVICE void release_work() {
    ptx::mbarrier_arrive_if(smem.work_empty[work_slot.index], signals);
    work_slot.advance();
  }

  // Whether `value` is true in any of the warpgroup's warps, which must agree on the products that they start. Each
  // warpgroup votes at a named barrier of its own.
  FMHA_DEVICE bool any_warp(bool value) const {
    return !ptx::bar_red_and<mma::kWarpgroup>(kWorkWanted + 1 + index, !value);
  }

  // Waits until this warpgroup may issue its products (ping-pong): named barrier 1 + w is warpgroup w's.
  FMHA_DEVICE void wait_ping_pong() const {
    if constexpr (takes_turns) ptx::bar_sync<2 * mma::kWarpgroup>(1 + index);
  }
  FMHA_DEVICE void signal_ping_pong() const {
    if constexpr (takes_turns) {
      ptx::bar_arrive<2 * mma::kWarpgroup>(1 + (index + 1 == consumers ? 0 : index + 1));
    }
  }

  // Releases a slot: one arrival for the warp, in each CTA whose loads fill the slot.
  FMHA_DEVICE void release_slot(Barrier& empty) const {
    if constexpr (tile.cluster > 1) {
      const uint32_t rank = threadIdx.x % 32;
      ptx::mbarrier_arrive_at_if(empty, rank, rank < uint32_t(tile.cluster));
    } else {
      ptx::mbarrier_arrive_if(empty, signals);
    }
  }

  FMHA_DEVICE void take_q() {
    ptx::mbarrier_wait_parity(smem.q_full[q_slot.index], q_slot.phase);
    if constexpr (tile.q_in_registers) {
      mma::load_a(q, smem.q[q_slot.index], q_row());
      __syncwarp();
      release_q(true);
      next_q();
    }
  }
  // First row of the warpgroup in its piece of Q.
  FMHA_DEVICE int32_t q_row() const { return Shared::q_pieces > 1 ? 0 : index * mma::kRows; }
  template <class Sums>
  FMHA_DEVICE void start_scores(Sums& s) {
    constexpr int sign = spec.negative_scale ? -1 : 1;
    int32_t q_index = q_slot.index;
    // Hides the index from the compiler, which would compute Q's descriptors, sixteen at D 256, before the loop.
    // Uniform registers have no room for them: 25 moves a block would bring them back from ordinary registers between
    // the products.
    if constexpr (dim_qk > 128 && !is_fp8(spec.dtype_qk)) ptx::unknown_here(q_index);
    ptx::mbarrier_wait_parity(smem.k_full[k_slot.index], k_slot.phase);
    if constexpr (!sums_output_first(tile)) wait_ping_pong();
    if constexpr (tile.q_in_registers) {
      mma::start_register_product_abt<spec.dtype_qk, sign>(s, q, smem.k[k_slot.index], 0, false);
    } else {
      mma::start_product_abt<spec.dtype_qk, sign, dim_qk>(s, smem.q[q_index], q_row(), smem.k[k_slot.index]);
    }
  }
  FMHA_DEVICE void start_output() {
    ptx::mbarrier_wait_parity(smem.v_full[v_slot.index], v_slot.phase);
    if constexpr (flushes_output(tile)) {
#pragma unroll
      for (int i = 0; i < num_parts; ++i) {
        mma::start_register_product_abt<type_v, 1>(recent[i % num_recent], probs, smem.v[v_slot.index], i * part, false);
        const int added = i + 1 - num_recent;
        if (added < 0 || added + 1 == num_parts) continue;
        ptx::wgmma_wait_group<num_recent - 1>();
        add_recent(added);
      }
    } else if constexpr (Shared::v_columns) {
      mma::start_register_product_abt<type_v, 1>(o, probs, smem.v[v_slot.index], 0, true);
    } else {
      mma::start_product_ab<type_v>(o, probs, smem.v[v_slot.index]);
    }
  }
  FMHA_DEVICE void add_recent(int i) {
    auto& sums = recent[i % num_recent];
    ptx::written_here(sums.elems);
#pragma unroll
    for (int e = 0; e < sums.num_elems; ++e) o[i * (part / 2) + e] += sums[e];
  }
  // Waits for the product S. `last`: it is the tile's last one, so Q's slot is released.
  FMHA_DEVICE void finish_scores(bool last) {
    ptx::wgmma_wait_group<sums_output_first(tile) ? 0 : 1>();
    release_k();
    if constexpr (release_q_early) release_q(last);
  }
  // A block's S, and O += P V of the block before. `rescales`: O is rescaled here, under the product of S; otherwise
  // it has been rescaled since its last product. `passes_turn`: the turn is passed here; otherwise the softmax passes
  // it, once it has the maxima.
  template <class Sums>
  FMHA_DEVICE void overlap_products(Sums& scores, bool rescales, bool last, const Work& work, int32_t block, bool passes_turn = true) {
    if constexpr (sums_output_first(tile)) {
      wait_ping_pong();
      if (rescales) rescale();
      start_output();
      finish_output();
      start_scores(scores);
    } else {
      start_scores(scores);
      if (rescales) rescale();
      start_output();
    }
    if (passes_turn) signal_ping_pong();
    prepare_scores<Sums::columns>(work, block);
    finish_scores(last);
  }
  // Waits for the O of products that were started together with the scores.
  FMHA_DEVICE void finish_overlapped_output() {
    if constexpr (!sums_output_first(tile)) finish_output();
  }
  FMHA_DEVICE void finish_output() {
    ptx::wgmma_wait_group<0>();
    release_v();
    if constexpr (flushes_output(tile)) add_recent(num_parts - 1);
  }
  FMHA_DEVICE void release_v() {
    release_slot(smem.v_empty[v_slot.index]);
    v_slot.advance();
  }
  FMHA_DEVICE void release_k() {
    release_slot(smem.k_empty[k_slot.index]);
    k_slot.advance();
  }
  // Releases blocks that only the cluster's other CTA sees, without reading them.
  FMHA_DEVICE void skip_k(int32_t num_blocks) {
    for (int32_t i = 0; i < num_blocks; ++i) {
      ptx::mbarrier_wait_parity(smem.k_full[k_slot.index], k_slot.phase);
      release_k();
    }
  }
  FMHA_DEVICE void skip_v(int32_t num_blocks) {
    for (int32_t i = 0; i < num_blocks; ++i) {
      ptx::mbarrier_wait_parity(smem.v_full[v_slot.index], v_slot.phase);
      release_v();
    }
  }
  FMHA_DEVICE int32_t block_of(const Work& work, int32_t i) const {
    if constexpr (Keys::has_tile_list) return keys.block_at(work, i);
    else return block_at(work, i);
  }
  FMHA_DEVICE SeqSpan span_of(const Work& work) const {
    return {work.i_batch, work.storage_batch, work.q_row, work.seqlen_q, work.k_row, work.seqlen_k};
  }
  FMHA_DEVICE int32_t first_of(const Work& work) const { return can_hide_blocks<spec, tile>() ? work.num_hidden : 0; }
  // Pieces of Q: another warpgroup's next piece takes the place of this one's, which is therefore released with the
  // tile's last scores. An undivided Q is released at the tile's end: earlier gains nothing, and costs D 64 2 %.
  static constexpr bool release_q_early = Shared::q_pieces > 1 && !tile.q_in_registers;
  FMHA_DEVICE void release_q(bool last) const { ptx::mbarrier_arrive_if(smem.q_empty[q_slot.index], signals && last); }
  FMHA_DEVICE void next_q() {
    q_slot.advance_by(Shared::q_pieces);
    __syncwarp();
  }
  FMHA_DEVICE void finish_q() {
    if constexpr (tile.q_in_registers) return;
    if constexpr (!release_q_early) release_q(true);
    next_q();
  }

  // Writes -inf where the mask hides a key of a block from one of the thread's two rows.
  template <int n>
  FMHA_DEVICE void mask(Scores<n>& s, const Work& work, int32_t block) const {
    const int32_t first_key = block * tile.block_n + mma::fragment_column();
    // A tile without keys has block -1.
    const auto mask = mask_of<spec>(work, block < 0 ? -tile.block_n : work.seqlen_k);
    s.hide(mask.columns(query_of<tile>(p, rows.row), first_key),
           mask.columns(query_of<tile>(p, rows.row + 8), first_key));
    if constexpr (Keys::has_tile_list) {
      if (block >= 0) keys.hide(s, span_of(work), work.i_head, rows.row, block * tile.block_n, shown);
    }
  }

  // Converts raw scores to the softmax's input.
  template <int n>
  FMHA_DEVICE void modify(Scores<n>& s, const Work& work, int32_t block) {
    if constexpr (tile.bias_stages > 0) {
      const int32_t at = index * tile.bias_stages + bias_slot.index;
      ptx::mbarrier_wait_parity(smem.bias_full[at], bias_slot.phase);
      modifiers().add_tile(s, smem.bias[at]);
      ptx::mbarrier_arrive_if(smem.bias_empty[at], signals);
      bias_slot.advance();
    } else {
      modifiers().apply(s, bias, work, rows.row, block);
    }
  }

  FMHA_DEVICE uint32_t zero() const { return uint32_t(work().num_blocks) >> 31; }
  FMHA_DEVICE uint32_t never() const { return ptx::shared_address(&smem.work[0]); }

  // Work that does not need a block's scores, done while their product runs: loads of a bias, and the decision which
  // scores dropout sets to zero.
  template <int n>
  FMHA_DEVICE void prepare_scores(const Work& work, int32_t block) {
    if constexpr (Modifiers::prefetches) modifiers().fetch(bias, work, rows.row, block);
    if constexpr (spec.dropout) decide_dropped<n>(work, block);
    if constexpr (fetches_bits) {
      // A tile without keys has block -1, and a sequence without keys has no words of mask bits.
      if (is_cut && block >= 0) keys.fetch(shown, span_of(work), work.i_head, rows.row, block * tile.block_n);
    }
  }
  template <int n>
  FMHA_DEVICE void decide_dropped(const Work& work, int32_t block) {
    int32_t i[2], batch_head[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t row = rows.row + 8 * r;
      i[r] = query_of<tile>(p, row);
      const int32_t i_head = tile.pack_gqa ? work.i_head + row - i[r] * p.gqa_ratio : work.i_head;
      batch_head[r] = head_of_whole(p, work.i_batch, i_head);
    }
    dropped.template decide<n, !tile.pack_gqa>(p, smem.quads[(threadIdx.x / 32) % (4 * consumers)], i, batch_head, block * tile.block_n);
    // A store to a word that no thread reads, which the wait for S may not pass: without it ptxas moves the generator
    // behind that wait.
    bool some = false;
#pragma unroll
    for (int w = 0; w < ceil_div(n / 8, dropped.groups_a_word); ++w) some |= dropped.words[0][w] == 0x80000001u;
    ptx::st_shared_b32_if(ptx::shared_address(&smem.unread), 0, some);
  }

  // Changes the sign of S where the product of the descales is negative; a negative scale is handled in the same place.
  template <int n>
  FMHA_DEVICE void take_sign(Scores<n>& s) const {
    if constexpr (is_fp8(spec.dtype_qk)) {
      if (descale < 0.f) {
#pragma unroll
        for (int e = 0; e < s.num_elems; ++e) s[e] = -s[e];
      }
    }
  }

  template <int n>
  FMHA_DEVICE void take_probs(Scores<n>& s) {
    if constexpr (is_fp8(type_v)) {
      if constexpr (spec.dropout) dropped.drop(s);
      constexpr auto order = Shared::turned ? mma::KeyOrder::OfAccumulator : mma::KeyOrder::OfMemory;
      mma::pack_operand<type_v, order>(probs, s, zero());
    } else {
      probs.template from<type_v>(s, zero());
      if constexpr (spec.dropout) dropped.drop(probs, n);
    }
  }

  // Converts S of block `block` of a tile to P.
  template <bool nonnegative = false, int n>
  FMHA_DEVICE void exponentiate(Scores<n>& s, const Work& work, int32_t block, bool edge, bool passes_turn = false) {
    take_sign(s);
    modify(s, work, block);
    if (edge) mask(s, work, block);
    softmax.template step<nonnegative>(s, scale_log2, never(), [&] {
      if (passes_turn) signal_ping_pong();
    });
  }
  template <int n>
  FMHA_DEVICE void exponentiate_first(Scores<n>& s, const Work& work) {
    const int32_t block = block_of(work, first_of(work));
    exponentiate(s, work, block, Keys::has_tile_list ? work.num_band_blocks > 0 : block < 0 || is_edge(block));
    softmax.correction[0] = softmax.correction[1] = 1.f;  // of an O that is still 0
  }

  // Rescales O to the running maxima of the last softmax, if any of the warp's upper or lower eight rows needs it:
  // eight rows need it less often than sixteen.
  FMHA_DEVICE void rescale() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!softmax.corrects(r)) continue;
#pragma unroll
      for (int e = 0; e < o.num_elems; ++e) {
        if (o.row(e) == r) o[e] *= softmax.correction[r];
      }
    }
  }

  FMHA_DEVICE bool sees_half(const Work& work) const {
    if constexpr (!has_hi || spec.sink_columns || Keys::has_tile_list) return false;
    const int32_t last_query = query_of<tile>(p, work.first_row + index * mma::kRows + mma::kRows - 1);
    return ptx::uniform(last_query + work.hi < (work.last_block - first_of(work)) * tile.block_n + half_n);
  }

  // Computes the first block of a tile when no product of another tile is in flight.
  FMHA_DEVICE void first_block() {
    const Work& w = work();
    rows = rows_of(w);
    o.clear();
    softmax.reset();
    take_scale(w);
    take_q();
    skip_k(first_of(w));
    if (sees_half(w)) {
      first_scores<half_n>(w);
    } else {
      first_scores<tile.block_n>(w);
    }
  }
  template <int n>
  FMHA_DEVICE void first_scores(const Work& w) {
    ScoreSums<n> sums;
    if constexpr (sums_output_first(tile)) wait_ping_pong();
    start_scores(sums);
    signal_ping_pong();
    is_cut = w.num_band_blocks > 0;
    prepare_scores<n>(w, block_of(w, first_of(w)));
    ptx::wgmma_wait_group<0>();
    release_k();
    if constexpr (release_q_early) release_q(w.num_blocks == 1 + first_of(w));
    auto&& s = sums;
    exponentiate_first(s, w);
    take_probs(s);
    skip_v(first_of(w));
  }

  // One block, with the row-max reduction. `edge` and `last` are uniform over the warpgroup. `nonnegative`: as of the
  // softmax.
  template <bool nonnegative = false>
  FMHA_DEVICE void step(int32_t block, bool edge, bool last) {
    ScoreSums<tile.block_n> sums;
    is_cut = edge;
    overlap_products(sums, !rescales_before_turn, last, work(), block, !passes_after_max);
    auto&& s = sums;
    exponentiate<nonnegative>(s, work(), block, edge, passes_after_max);
    finish_overlapped_output();
    take_probs(s);
    if constexpr (rescales_before_turn) {
      rescale();
      softmax.correction[0] = softmax.correction[1] = 1.f;
    }
  }

  // One block without the row-max reduction. Returns whether running maxima of the warp were too low for it.
  FMHA_DEVICE bool step_reusing_row_max(int32_t block, bool last) {
    ScoreSums<tile.block_n> products;
    is_cut = false;
    overlap_products(products, false, last, work(), block);
    auto&& s = products;
    take_sign(s);
    modify(s, work(), block);
    float sums[2];
    softmax.step_reusing_row_max(s, scale_log2, sums, never());
    finish_output();
    bool raised = false;
    if (__any_sync(ptx::kAllLanes, softmax.exceed_power(sums, raise_beyond_log2(spec, tile)))) raised = raise_row_max(s, sums, block);
    softmax.add(sums);
    take_probs(s);
    return raised;
  }
  // Whether row r of the thread's two exists in the sequence: rows beyond a packed sequence belong to another one, and
  // must not influence a vote.
  FMHA_DEVICE bool is_row(int r) const { return query_of<tile>(p, rows.row + 8 * r) < work().seqlen_q; }

  // Raises running maxima that were too low for this block, after its exponentials. If a P has overflowed f32, or the
  // maximum is so large that adding the difference would not change it, the score cannot be recovered from P and is
  // recomputed. Returns false if no row of the sequence needed this.
  FMHA_DEVICE bool raise_row_max(Scores<tile.block_n>& s, float (&sums)[2], int32_t block) {
    const float real_sums[2] = {is_row(0) ? sums[0] : 0.f, is_row(1) ? sums[1] : 0.f};
    if (!__any_sync(ptx::kAllLanes, softmax.exceed_power(real_sums, raise_beyond_log2(spec, tile)))) return false;
    if (__any_sync(ptx::kAllLanes, softmax.overflows_f32(real_sums) || softmax.is_too_large(scale_log2))) {
      recompute_scores<spec, tile>(p, work(), rows.row, block, s);
      take_sign(s);
      modifiers().apply(s, bias, work(), rows.row, block);
      softmax.step(s, scale_log2, never(), [] {});
      sums[0] = sums[1] = 0.f;
    } else {
      softmax.rescale_to_row_max(s, scale_log2, sums);
    }
    rescale();
    if constexpr (marks_raised) {
      if (signals) mark(octave_of(block)) = 1;
    }
    return true;
  }

  // With `marks_raised`, blocks that skip the reduction are walked in pieces, which end with a tile's third, fifth,
  // ninth block and so on: the further a tile is, the less another block is likely to raise a maximum. Of the two
  // words of `raised`, one is of the blocks of this octave, from such a last block up to the next, and the other of
  // those of the last. It is read after the block that begins the next octave, whose turn the warps waited for
  // together: the marks of the octave before it were written by then, and until the warps have met for another turn,
  // new ones go to the other word. All four read the same. To read in every block cost D 64 5 %.
  FMHA_DEVICE uint8_t& mark(int32_t octave) const {
    return reinterpret_cast<uint8_t*>(&smem.raised[index][octave & 1])[threadIdx.x / 32 % 4];
  }
  FMHA_DEVICE int32_t octave_of(int32_t block) const { return 31 - __clz(work().last_block - block); }
  // Last block of the piece that contains `block`, which is not the tile's first.
  FMHA_DEVICE int32_t last_of_piece(int32_t block) const {
    return work().last_block - (1 << (32 - __clz(max(work().last_block - block - 1, 1))));
  }
  // Whether a warp of this warpgroup has raised running maxima in the octave before, called after the last block of a
  // piece.
  FMHA_DEVICE bool has_raised(int32_t last_of_piece) const {
    return __any_sync(ptx::kAllLanes, smem.raised[index][(octave_of(last_of_piece) & 1) ^ 1] != 0);
  }
  // Whether this warp has raised a maximum; all four warps vote.
  FMHA_DEVICE bool sees_mark() const { return signals && (mark(0) | mark(1)) != 0; }
  // Clears the flags before a tile's first vote, which all four warps reach before one raises a maximum.
  FMHA_DEVICE void forget_raised() const {
    if (signals) mark(0) = mark(1) = 0;
  }

  // Whether the scores of a row of the thread lie so far apart, in the blocks above `block`, that later ones would
  // raise its running maximum often. The four lanes that share a row see a quarter of its keys each; how far the
  // row's maximum is above a lane's own, which the lane's share of the row sum tells, is how far four times as many
  // keys may raise it. A share may be 0 since it is so small, or since the lane has seen no key; eight keys show one
  // to each.
  FMHA_DEVICE bool far_apart(int32_t block) const {
    constexpr float kSmallShare = power_of_two(p_offset_log2(spec, tile) - tile.exact_max_spread_log2);
    bool apart = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t end = has_hi ? query_of<tile>(p, rows.row + 8 * r) + work().hi + 1 : work().seqlen_k;
      const float share = softmax.rows[r].row_sum;
      const bool sees_keys = Keys::has_tile_list || share > 0.f || end - (block + 1) * tile.block_n >= 8;
      apart |= is_row(r) && sees_keys && share < kSmallShare;
    }
    return apart;
  }

  // Whether a running maximum of the sequence's rows is negative. If none is, none will become so, and maxima may be
  // taken of three scores at a time.
  FMHA_DEVICE bool has_negative_max() const {
    return (is_row(0) && softmax.rows[0].row_max < 0.f) || (is_row(1) && softmax.rows[1].row_max < 0.f);
  }
  // Whether any row of the warpgroup exists in the sequence.
  FMHA_DEVICE bool has_rows() const {
    return ptx::uniform(query_of<tile>(p, work().first_row + index * mma::kRows) < work().seqlen_q);
  }
  // Walks the tile's blocks but the first for a warpgroup without rows: it releases them unread and passes its
  // ping-pong turns on. The O that it holds is not stored.
  FMHA_DEVICE void pass_blocks() {
    const int32_t num_others = work().num_blocks - first_of(work()) - 1;
#pragma unroll 1
    for (int32_t i = 0; i < num_others; ++i) {
      wait_ping_pong();
      signal_ping_pong();
      skip_k(1);
      skip_v(1);
    }
    if constexpr (release_q_early) release_q(num_others > 0);
  }

  // Walks the tile's blocks but the first.
  FMHA_DEVICE void other_blocks() {
    if constexpr (may_have_no_rows) {
      if (!has_rows()) return pass_blocks();
    }
    if constexpr (Keys::has_tile_list) {
      walk_list();
    } else if constexpr (tile.skip_row_max) {
      walk_skipping_row_max();
    } else if constexpr (tile.fold_keys > 0) {
      walk_parts();
    } else {
      const int32_t num_blocks = work().num_blocks, last_block = work().last_block;
#pragma unroll 1
      for (int32_t i = first_of(work()) + 1; i < num_blocks; ++i) {
        const int32_t block = has_lo ? block_at(work(), i) : last_block - i;
        step(block, has_hi && is_edge(block), i + 1 == num_blocks);
      }
    }
  }

  // Blocks that the mask cuts, and the next, whose rows need not have seen a key before, take exact maxima. Whether
  // the others skip the row-max reduction depends on this tile alone: before them, then after `vote_after` blocks,
  // after three times as many as before, and so on, the warpgroup votes. It takes exact maxima from then on if scores
  // of its rows lie far apart, or if one of its warps has had to raise running maxima since the last vote: to do so
  // costs more than twenty row-max reductions. With `marks_raised` a raised maximum brings the vote about at the end
  // of a piece.
  FMHA_DEVICE void walk_skipping_row_max() {
    static_assert(!has_lo, "without a lower bound the blocks go down to 0");
    int32_t block = work().last_block - first_of(work()) - 1;
    int32_t exact_down_to = has_hi ? max(rows.inside.end - 1, 0) / tile.block_n : block + 1;
    bool raised = false;
    if constexpr (marks_raised) forget_raised();
    while (true) {
#pragma unroll 1
      for (; block >= exact_down_to; --block) step(block, has_hi && is_edge(block), block == 0);
      if (block < 0) return;
      // The vote of a warp is uniform in a way that ptxas can prove. Otherwise slot indices would not stay in uniform
      // registers.
      if constexpr (marks_raised) raised = sees_mark();
      if (any_warp(__any_sync(ptx::kAllLanes, raised || far_apart(block)))) {
        if constexpr (takes_three) {
          if (!any_warp(__any_sync(ptx::kAllLanes, has_negative_max()))) {
#pragma unroll 1
            for (; block >= 0; --block) step<true>(block, false, block == 0);
            return;
          }
        }
        exact_down_to = 0;
        continue;
      }
      rescale();
      raised = false;
      const int32_t trial = max(3 * (work().last_block - block), tile.vote_after);
      const int32_t end = block + 1 > 2 * trial ? block - trial : -1;
      if constexpr (marks_raised) {
#pragma unroll 1
        do {
          const int32_t piece_end = max(end, last_of_piece(block) - 1);
#pragma unroll 1
          for (; block > piece_end; --block) step_reusing_row_max(block, block == 0);
        } while (block > end && !has_raised(block + 1));
      } else {
#pragma unroll 1
        for (; block > end; --block) raised |= step_reusing_row_max(block, block == 0);
      }
      softmax.correction[0] = softmax.correction[1] = 1.f;
    }
  }

  // Walks the tile's blocks but the first, part after part of the keys. Within a part the blocks that no mask cuts take
  // their maxima of three scores at a time, to the same bits, where no running maximum is negative.
  FMHA_DEVICE void walk_parts() {
    const int32_t num_blocks = work().num_blocks, last_block = work().last_block;
    int32_t i = first_of(work()) + 1;
#pragma unroll 1
    while (i < num_blocks) {
      // The block before this one was its part's first.
      if ((last_block - i + 1) % blocks_of_part == 0) {
        begin_part(last_block - i, i + 1 == num_blocks);
        ++i;
      }
      const int32_t end = min(i + (last_block - i + 1) % blocks_of_part, num_blocks);
      if constexpr (takes_three && !has_lo) {
#pragma unroll 1
        for (; i < end && is_edge(last_block - i); ++i) step(last_block - i, true, i + 1 == num_blocks);
        if (i < end && !any_warp(__any_sync(ptx::kAllLanes, has_negative_max()))) {
#pragma unroll 1
          for (; i < end; ++i) step<true>(last_block - i, false, i + 1 == num_blocks);
        }
      }
#pragma unroll 1
      for (; i < end; ++i) step(last_block - i, has_hi && is_edge(last_block - i), i + 1 == num_blocks);
    }
  }

  // Issues the last P V of a part together with the first S of the next part, whose keys are lower.
  FMHA_DEVICE void begin_part(int32_t block, bool last) {
    ScoreSums<tile.block_n> sums;
    overlap_products(sums, true, last, work(), block);
    RowStats stats[2] = {softmax.rows[0], softmax.rows[1]};
    softmax.reset();
    auto&& s = sums;
    exponentiate(s, work(), block, has_hi && is_edge(block));
    softmax.correction[0] = softmax.correction[1] = 1.f;
    finish_overlapped_output();
    take_probs(s);
    PartEnd ends[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const TileRow of_thread = tile_row<tile>(p, work(), rows.row + 8 * r, EveryKey{});
      ends[r] = end_of_thread<spec, tile>(p, work(), of_thread, stats[r], scale_log2, modifiers().offset_log2(), o, r);
    }
    const bool first = FoldedOutput<spec, tile>::is_in_first_part(work(), block + 1);
    FoldedOutput<spec, tile>::template add<false>(p, ptx::uniform(first), ends, o);
    o.clear();
  }

  // Walks the blocks of a list but the first. Partly masked blocks and the first fully visible one take exact maxima;
  // the others may skip the row-max reduction (`walk_skipping_row_max`). A block's index is read from memory while the
  // block before is computed.
  FMHA_DEVICE void walk_list() {
    const int32_t num_blocks = work().num_blocks, num_cut = work().num_band_blocks;
    int32_t i = 1, next = block_of(work(), min(i, num_blocks - 1)), exact_to = num_blocks;
    if constexpr (tile.skip_row_max) exact_to = min(num_cut + 1, num_blocks);
    const auto take = [&] {
      const int32_t block = next;
      next = block_of(work(), min(i + 1, num_blocks - 1));
      return block;
    };
    bool raised = false;
    while (true) {
#pragma unroll 1
      for (; i < exact_to; ++i) step(take(), i < num_cut, i + 1 == num_blocks);
      if (i >= num_blocks) return;
      if constexpr (tile.skip_row_max) {
        if (any_warp(__any_sync(ptx::kAllLanes, raised || far_apart(0)))) {
          exact_to = num_blocks;
          continue;
        }
        rescale();
        raised = false;
        const int32_t trial = max(3 * i, tile.vote_after);
        const int32_t end = num_blocks - i > 2 * trial ? i + trial : num_blocks;
#pragma unroll 1
        for (; i < end; ++i) raised |= step_reusing_row_max(take(), i + 1 == num_blocks);
        softmax.correction[0] = softmax.correction[1] = 1.f;
        exact_to = i;
      }
    }
  }

  // Issues a tile's last P V together with the next tile's first S.
  FMHA_DEVICE void cross_to(const Work& next, RowStats (&stats)[2]) {
    take_scale(next);
    take_q();
    skip_k(first_of(next));
    if (sees_half(next)) {
      cross_products<half_n>(next, stats);
    } else {
      cross_products<tile.block_n>(next, stats);
    }
  }
  template <int n>
  FMHA_DEVICE void cross_products(const Work& next, RowStats (&stats)[2]) {
    ScoreSums<n> sums;
    constexpr bool prepares = Modifiers::prefetches || spec.dropout || fetches_bits;
    is_cut = next.num_band_blocks > 0;
    if constexpr (prepares) rows = rows_of(next);
    overlap_products(sums, true, next.num_blocks == 1 + first_of(next), next, block_of(next, first_of(next)));
    auto&& s = sums;
    stats[0] = softmax.rows[0];
    stats[1] = softmax.rows[1];
    softmax.reset();
    if constexpr (!prepares) rows = rows_of(next);
    exponentiate_first(s, next);
    finish_overlapped_output();
    take_probs(s);
    skip_v(first_of(next));
  }

  FMHA_DEVICE void run() {
    if (index == consumers - 1) signal_ping_pong();
    wait_work();
    if (work().num_blocks == 0) return;
    first_block();
    while (true) {
      other_blocks();
      finish_q();
      const Work& done = work();
      const int32_t done_row = rows.row;
      const float done_scale_log2 = scale_log2;
      Slot<kWorkSlots> next_slot = work_slot;
      next_slot.advance();
      const Work& next = smem.work[next_slot.index];
      ptx::mbarrier_wait_parity(smem.work_full[next_slot.index], next_slot.phase);
      const bool more = ptx::uniform(next.num_blocks) > 0;
      RowStats stats[2];
      if (looks_ahead(tile) && more) {
        cross_to(next, stats);
      } else {
        rescale();
        start_output();
        finish_output();
        stats[0] = softmax.rows[0];
        stats[1] = softmax.rows[1];
      }
      auto&& sums = o;
      if constexpr (Keys::has_tile_list) {
        epilogue<spec, tile>(p, done, done_row, stats, done_scale_log2, modifiers().offset_log2(), sums, keys.pairs);
      } else {
        epilogue<spec, tile>(p, done, done_row, stats, done_scale_log2, modifiers().offset_log2(), sums, keys);
      }
      release_work();
      if (!more) return;
      if constexpr (looks_ahead(tile)) {
        o.clear();
      } else {
        first_block();
      }
    }
  }
};

template <FwdSpec spec, Sm90Tile tile, class Keys>
FMHA_DEVICE Consumer<spec, tile, Keys> consumer_of(const FwdParams& p, Smem<spec, tile>& smem, const Keys& keys) {
  const int32_t index = ptx::uniform(threadIdx.x / mma::kWarpgroup) - 1;
  return Consumer<spec, tile, Keys>{p, smem, keys, index, Modifiers<spec, tile>{p, 1.f}.scale_log2()};
}

template <FwdSpec spec, Sm90Tile tile, class Keys>
FMHA_DEVICE void consume(const FwdParams& p, Smem<spec, tile>& smem, const Keys& keys) {
  ptx::setmaxnreg_inc<regs(tile).consume>();
  auto consumer = consumer_of<spec, tile>(p, smem, keys);
  consumer.run();
}

}  // namespace fmha::sm90
