// Which keys a piece of a decode kernel's work has: a part of one sequence's, or an equal share of all sequences' keys.
//
// A part has a fixed number of keys, counted from its sequence's first: for sequences of one length, and for bits
// that depend on nothing else. For sequences whose lengths the device alone knows, each piece has an equal share. The
// tiles of keys that a sequence's queries see lie in one row, sequence after sequence; the row is cut into equal
// stretches, and a stretch is walked by a piece for each block of rows of each KV head.
//
//   row       |---- sequence 0 ----|-1-|-2-|-------- sequence 3 --------|
//   stretch   0           |1          |2          |3          |4
//   parts     0           |1       |2  |3  |4  |5 |6          |7        |
//
// Part n of stretch s and sequence b is s + b. What is looked up for that, where a sequence begins in the row, the last
// piece leaves for the merge: `each` and `longer` of the stretches, then a word a sequence and one more.
#pragma once
#include <fmha/cdna/decode/work.h>
#include <fmha/isa/lane.h>
#include <fmha/isa/sched.h>
#include <fmha/share_ends.h>

namespace fmha::cdna::decode {

constexpr int kShareKeys = 32;    // keys of a tile of the row
constexpr int kSharesHeader = 2;  // words before those of the sequences
constexpr int kLeastRounds = 4;   // least rounds of which whole ones are made: four waves keep enough bytes under way
constexpr int kMostParts = 128;   // of the longest sequence, about: a merging wave of 32 reads them in four loads

// Tiles of a sequence's keys that some query sees; those of sink columns come first.
struct SeenTiles {
  int32_t sinks, first, count;  // `sinks` from the first key on, and the others from `first` on; `count` of both

  static FMHA_DEVICE SeenTiles of(const CdnaDecodeParams& params, const SeqSpan& span) {
    if (span.seqlen_q == 0) return {0, 0, 0};
    const MaskBand band = band_of(params, span);
    const Range rows = {0, span.seqlen_q};
    const Range seen = k_range(band, rows, span.seqlen_k);
    const int32_t sinks = ceil_div(sink_range(band, rows, span.seqlen_k).end, kShareKeys), first = seen.begin / kShareKeys;
    // Sink columns that touch the other keys form one run with them.
    const bool meet = sinks >= first;
    const int32_t begin = meet ? 0 : first, before = meet ? 0 : sinks;
    // Rows without visible keys still get a tile, in which this is found out.
    return {before, begin, max(before + max(ceil_div(seen.end, kShareKeys) - begin, 0), 1)};
  }
};

// Tiles of all sequences, and of the longest.
struct SumAndMost {
  int32_t sum, most;
};

// The sum over all lanes up to this one.
FMHA_DEVICE int32_t sum_up_to(int32_t lane, int32_t x) {
#pragma unroll
  for (int step = 1; step < kWaveSize; step *= 2) {
    const int32_t before = ds_bpermute_b32(max(lane - step, 0), x);
    if (lane >= step) x += before;
  }
  return x;
}

// Work items with `rows` rows of a group each. All waves of an item, and their lanes, behave equally.
template <int rows>
class Piece {
  int32_t i_rows_, i_head_kv_;
  int32_t number_;    // of the part, or of the stretch
  int32_t at_, end_;  // of the row: where the piece stands, and where it ends
  int32_t i_batch_, begin_, seq_end_;  // the sequence that it stands in, and its place in the row

 public:
  // Work item `at` of the launch. If there are more rows than one item has,
  // neighbours have equal keys and share them in their compute unit's cache.
  // `leaves`: in the last item, this wave writes the record of shares for the merge.
  FMHA_DEVICE Piece(const CdnaDecodeParams& params, int32_t at, bool leaves) {
    const FwdParams& p = params.call.fwd;
    i_rows_ = at % params.row_blocks;
    const int32_t rest = at / params.row_blocks;
    if (!params.shares) {
      const int32_t batch_head = rest / params.num_parts;
      number_ = rest % params.num_parts;
      i_head_kv_ = batch_head % p.num_heads_kv;
      i_batch_ = batch_head / p.num_heads_kv;
      at_ = 0, end_ = 1, begin_ = 0, seq_end_ = 1;
      return;
    }
    number_ = rest / p.num_heads_kv;
    i_head_kv_ = rest % p.num_heads_kv;
    const SumAndMost tiles = tiles_of_all(params);
    const int32_t total = tiles.sum;
    const Shares stretches = Shares::of(total, stretches_of(params, tiles), 1);
    leaves = leaves && at == params.num_waves - 1;
    if (leaves && lane() == 0) {
      int32_t FMHA_GLOBAL* const table = (int32_t FMHA_GLOBAL*)params.shares;
      table[0] = stretches.each, table[1] = stretches.longer;
    }
    at_ = min(stretches.begin(number_), total);
    end_ = min(stretches.begin(number_ + 1), total);
    i_batch_ = begin_ = seq_end_ = 0;
    if (at_ < end_ || leaves) find(params, leaves);
  }

  // Scalar values stored in lanes of one register, because the loop leaves no more scalar registers.
  FMHA_DEVICE int parked() const {
    const int lane = opaque_thread_idx() % kWaveSize;
    int lanes = i_rows_;
    lanes = lane == 1 ? i_head_kv_ : lanes;
    lanes = lane == 2 ? number_ : lanes;
    lanes = lane == 3 ? at_ : lanes;
    lanes = lane == 4 ? end_ : lanes;
    lanes = lane == 5 ? i_batch_ : lanes;
    lanes = lane == 6 ? begin_ : lanes;
    lanes = lane == 7 ? seq_end_ : lanes;
    opaque_in_vgpr(lanes);
    return lanes;
  }

  FMHA_DEVICE explicit Piece(int parked)
      : i_rows_(v_readlane_b32(parked, 0)),
        i_head_kv_(v_readlane_b32(parked, 1)),
        number_(v_readlane_b32(parked, 2)),
        at_(v_readlane_b32(parked, 3)),
        end_(v_readlane_b32(parked, 4)),
        i_batch_(v_readlane_b32(parked, 5)),
        begin_(v_readlane_b32(parked, 6)),
        seq_end_(v_readlane_b32(parked, 7)) {}

  // Moves to the next keys of one sequence; false after the last.
  FMHA_DEVICE bool next(const CdnaDecodeParams& params, Job& job) {
    while (at_ < end_) {
      if (params.shares && at_ >= seq_end_) {
        enter(params, i_batch_ + 1, seq_end_);
        continue;
      }
      const int32_t from = at_ - begin_, to = min(seq_end_, end_) - begin_;
      at_ = begin_ + to;
      if (fill(params, job, from, to)) return true;
    }
    return false;
  }

 private:
  // Tiles of the lane's sequence; 0 beyond the last.
  static FMHA_DEVICE int32_t tiles_of(const CdnaDecodeParams& params, int32_t i_batch) {
    return i_batch < params.call.fwd.batch ? SeenTiles::of(params, seq_of(params.call.fwd, i_batch)).count : 0;
  }

  static FMHA_DEVICE SumAndMost tiles_of_all(const CdnaDecodeParams& params) {
    SumAndMost all = {0, 0};
#pragma nounroll
    for (int32_t first = 0; first < params.call.fwd.batch; first += kWaveSize) {
      const int32_t own = tiles_of(params, first + lane());
      all.sum += own;
      all.most = max(all.most, own);
    }
#pragma unroll
    for (int step = kWaveSize / 2; step > 0; step /= 2) {
      all.sum += ds_bpermute_b32(lane() ^ step, all.sum);
      all.most = max(all.most, ds_bpermute_b32(lane() ^ step, all.most));
    }
    return {v_readfirstlane_b32(all.sum), v_readfirstlane_b32(all.most)};
  }

  // Number of stretches: as many as there are keys for, up to the launch's. If there are fewer and compute units have
  // several pieces each, they are whole rounds of units: in a partial round some units have a piece more than others.
  static FMHA_DEVICE int32_t stretches_of(const CdnaDecodeParams& params, const SumAndMost& tiles) {
    const int32_t least = max(params.part_keys / kShareKeys, ceil_div(tiles.most, kMostParts));
    const int32_t stretches = max(tiles.sum / least, 1);
    if (stretches >= params.num_parts) return params.num_parts;
    const int32_t pieces = params.row_blocks * params.call.fwd.num_heads_kv, rounds = stretches * pieces / params.round;
    return rounds >= kLeastRounds ? max(rounds * params.round / pieces, 1) : stretches;
  }

  // Finds the sequence in which the item begins; with `leaves` it stores where each sequence begins, for the merge.
  FMHA_DEVICE void find(const CdnaDecodeParams& params, bool leaves) {
    int32_t FMHA_GLOBAL* const table = (int32_t FMHA_GLOBAL*)params.shares + kSharesHeader;
    const int32_t batch = params.call.fwd.batch;
    int32_t before = 0;
    bool found = false;
#pragma nounroll
    for (int32_t first = 0; first <= batch; first += kWaveSize) {
      const int32_t own = tiles_of(params, first + lane()), up_to = before + sum_up_to(lane(), own);
      if (leaves && first + lane() <= batch) table[first + lane()] = up_to - own;
      const uint64_t beyond = v_cmp_ballot(up_to > at_);
      if (!found && beyond != 0) {
        const int there = __builtin_ctzll(beyond);
        found = true;
        i_batch_ = first + there;
        begin_ = v_readlane_b32(up_to - own, there);
        seq_end_ = v_readlane_b32(up_to, there);
      }
      if (found && !leaves) return;
      before = v_readlane_b32(up_to, kWaveSize - 1);
    }
  }

  FMHA_DEVICE void enter(const CdnaDecodeParams& params, int32_t i_batch, int32_t begin) {
    i_batch_ = i_batch, begin_ = begin;
    seq_end_ = begin + SeenTiles::of(params, span_of(params.call.fwd, i_batch)).count;
  }

  // Sets tiles `from` to `to` of the item's present sequence;
  // false if it has no rows, or keys that no row sees.
  FMHA_DEVICE bool fill(const CdnaDecodeParams& params, Job& job, int32_t from, int32_t to) const {
    const FwdParams& p = params.call.fwd;
    job.i_head_kv = i_head_kv_;
    job.span = span_of(p, i_batch_);
    job.layout = layout_of(p);
    job.band = band_of(params, job.span);
    job.first_row = i_rows_ * rows;
    job.num_rows = job.span.seqlen_q * p.gqa_ratio;
    if (job.first_row >= job.num_rows) return false;
    const int32_t last_row = min(job.first_row + rows, job.num_rows) - 1;
    job.queries = {job.first_row / p.gqa_ratio, last_row / p.gqa_ratio + 1};
    if (!params.shares) {
      // The merge reads a part of each sequence even if it has no keys.
      const int64_t begin = int64_t(number_) * params.part_keys;
      if (number_ > 0 && begin >= job.span.seqlen_k) return false;
      job.part = number_ * p.batch + i_batch_;
      job.keys = {int32_t(begin), int32_t(min<int64_t>(begin + params.part_keys, job.span.seqlen_k))};
      job.sinks = job.keys;
      return true;
    }
    const SeenTiles tiles = SeenTiles::of(params, job.span);
    job.part = number_ + i_batch_;
    const int32_t behind = tiles.first - tiles.sinks;
    job.keys = {(max(from, tiles.sinks) + behind) * kShareKeys, (max(to, tiles.sinks) + behind) * kShareKeys};
    job.sinks = tiles.sinks > 0 ? Range{min(from, tiles.sinks) * kShareKeys, min(to, tiles.sinks) * kShareKeys} : job.keys;
    return true;
  }

  static FMHA_DEVICE int32_t lane() { return thread_idx() % kWaveSize; }
};

// Places of a row's parts, every `step`-th from part `first` on.
struct PartsOfRow {
  int32_t first, step, count;

  static FMHA_DEVICE PartsOfRow of(const CdnaDecodeParams& params, const SeqSpan& span) {
    if (!params.shares) {
      const int64_t keys = int64_t(span.seqlen_k) + params.part_keys - 1;
      return {span.i_batch, params.call.fwd.batch, max(int32_t(keys / params.part_keys), 1)};
    }
    const int32_t FMHA_GLOBAL* const table = (const int32_t FMHA_GLOBAL*)params.shares;
    const Shares stretches = {table[0], table[1]};
    const int32_t begin = table[kSharesHeader + span.i_batch], end = table[kSharesHeader + span.i_batch + 1];
    const int32_t owner = stretches.owner(begin);
    return {owner + span.i_batch, 1, stretches.owner(end - 1) - owner + 1};
  }
};

// Row of the parts' memory that part `part` has for query `i` of a head.
FMHA_DEVICE int64_t row_of_part(const FwdParams& p, int64_t part, int32_t i_head, int32_t i) {
  return (part * p.num_heads_q + i_head) * p.seqlen_q + i;
}

// Computes the keys of work item `at`, one sequence after another.
template <int rows, class Compute>
FMHA_DEVICE void walk_piece(const CdnaDecodeParams& params, int32_t at, bool leaves, Job& job, Compute compute) {
  int parked = Piece<rows>(params, at, leaves).parked();
#pragma nounroll
  while (true) {
    Piece<rows> piece(parked);
    if (!piece.next(reload_params<CdnaDecodeParams>(), job)) return;
    parked = piece.parked();
    compute();
  }
}

}  // namespace fmha::cdna::decode
