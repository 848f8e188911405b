// The list of a row: its `topk` greatest scores, ties to the lower position, NaN last, positions ascending, -1 after
// them. A group of threads takes a row, or, where there are few rows, several take parts of one in launches one after
// another.
//
// A radix selection of 32-bit numbers that grow with the scores finds the smallest chosen number, and how
// many keys with exactly that number are chosen: digits of 8, 12 and 12 bits from the top, a histogram
// each. Counts are whole numbers, so the order in which threads add does not matter. Then each warp (or
// wave) counts what it takes of a run of keys, and writes that behind what the warps before it take.
//
// The first digit is a sign and seven bits of the exponent: most scores of a row share it. Each of 32 lanes therefore
// has bins of its own, in a bank of its own.
#pragma once
#include <fmha/choose.h>

namespace fmha::choose {

// Steps: a launch does everything, or one step of several groups to a row, which add up in memory.
constexpr int32_t kWhole = 0, kTopDigit = 1, kMiddleDigit = 2, kLowDigit = 3, kCounts = 4, kLists = 5;

constexpr int32_t kTopBits = 8, kLowBits = 12, kTopBins = 1 << kTopBits, kLowBins = 1 << kLowBits;
// Number of words of a row's histograms in memory.
constexpr int32_t kRowBins = kTopBins + 2 * kLowBins;

// `Group`: a vendor's group of threads (`threads`, `thread()`, `index()`, `number()`, `barrier()`; `add()` in shared
// memory, `add_in_memory()`), of warps of `count` lanes, with `ballot`, `bits_in` and `from`, a lane's value.
template <class Group>
struct RowChooser {
  static constexpr int32_t warps = Group::threads / Group::count;
  static constexpr int32_t lanes = 32;
  static_assert(warps <= Group::count, "a lane for each warp's sum");
  static constexpr int32_t num_words = max(kTopBins * lanes, kLowBins);
  // Keys that a thread loads before it uses the first: the memory's latency is paid once for all of them.
  static constexpr int32_t ahead = 8;

  struct Shared {
    uint32_t bins[num_words];
    uint32_t sums[2 * warps];
    uint32_t digit, above;
  };

  const ChooseParams& p;
  Shared& shared;
  const float* scores;
  Range entries;   // candidates of the row
  int64_t row;     // of the launch, from 0
  int32_t part;    // of the row's `p.parts`

  FMHA_DEVICE uint32_t number_of(int32_t j, float score) const {
    const bool is_in = j - entries.begin < p.forced_first || entries.end - j <= p.forced_last;
    return is_in ? kForced : order_of(score);
  }

  // Calls `use(j, number, there)` for `ahead` keys of each thread at a time, `step` apart.
  template <class Use>
  FMHA_DEVICE void walk(int32_t first, int32_t end, int32_t step, int32_t place, Use use) const {
#pragma unroll 1
    for (int64_t base = first; base < end; base += int64_t(step) * ahead) {
      float score[ahead];
#pragma unroll
      for (int32_t u = 0; u < ahead; ++u) {
        const int64_t j = base + u * step + place;
        score[u] = j < end ? scores[j] : 0.f;
      }
#pragma unroll
      for (int32_t u = 0; u < ahead; ++u) {
        const int64_t j = base + u * step + place;
        const bool there = j < end;
        use(int32_t(there ? j : end - 1), number_of(int32_t(there ? j : end - 1), score[u]), there);
      }
    }
  }

  // Inclusive prefix sum over lanes: the sum of the numbers of all lanes up to this one.
  static FMHA_DEVICE uint32_t sum_to_lane(uint32_t sum) {
#pragma unroll
    for (int32_t step = 1; step < Group::count; step *= 2) {
      const uint32_t other = Group::from(sum, max(Group::index() - step, 0));
      if (Group::index() >= step) sum += other;
    }
    return sum;
  }

  // Exclusive prefix sum over threads: the sum of the numbers of all threads before this one.
  FMHA_DEVICE uint32_t sum_before(uint32_t own) const {
    const uint32_t sum = sum_to_lane(own);
    const int32_t warp = Group::thread() / Group::count;
    if (Group::index() == Group::count - 1) shared.sums[warp] = sum;
    Group::barrier();
    return sum - own + sum_of_lanes(Group::index() < warp ? shared.sums[Group::index()] : 0);
  }

  // The sum over a warp, in every lane.
  static FMHA_DEVICE uint32_t sum_of_lanes(uint32_t sum) {
#pragma unroll
    for (int32_t apart = 1; apart < Group::count; apart *= 2) sum += Group::from(sum, Group::index() ^ apart);
    return sum;
  }

  // The keys of this group: a multiple of the lanes, but for the last part.
  FMHA_DEVICE Range own() const {
    const int64_t share = int64_t(round_up(ceil_div(entries.end - entries.begin, p.parts), Group::count));
    const int64_t begin = entries.begin + part * share;
    return {int32_t(min<int64_t>(begin, entries.end)), int32_t(min<int64_t>(begin + share, entries.end))};
  }

  FMHA_DEVICE uint32_t* bins_of_row() const { return p.bins + row * kRowBins; }

  // Counts, in shared memory, the digits of those keys whose higher digits equal `prefix`.
  template <int32_t bits, bool is_top>
  FMHA_DEVICE void count(Range keys, uint32_t prefix, int32_t shift) const {
    constexpr int32_t num_bins = 1 << bits, words = is_top ? num_bins * lanes : num_bins;
    Group::barrier();
#pragma unroll 1
    for (int32_t at = Group::thread(); at < words; at += Group::threads) shared.bins[at] = 0;
    Group::barrier();
    walk(keys.begin, keys.end, Group::threads, Group::thread(), [&](int32_t, uint32_t number, bool there) {
      const uint32_t digit = number >> shift & (num_bins - 1);
      if constexpr (is_top) {
        if (there) Group::add(shared.bins[digit * lanes + Group::thread() % lanes], 1);
      } else {
        if (there && number >> (shift + bits) == prefix) Group::add(shared.bins[digit], 1);
      }
    });
    Group::barrier();
  }

  // Number of keys with a digit, as counted by `count`.
  template <bool is_top>
  FMHA_DEVICE uint32_t counted(int32_t bin) const {
    if constexpr (!is_top) return shared.bins[bin];
    uint32_t sum = 0;
#pragma unroll 4
    for (int32_t lane = 0; lane < lanes; ++lane) sum += shared.bins[bin * lanes + (lane + bin) % lanes];
    return sum;
  }

  // Adds this group's counts to the row's histogram in global memory.
  template <int32_t bits, bool is_top>
  FMHA_DEVICE void add_up(uint32_t* bins) const {
#pragma unroll 1
    for (int32_t bin = Group::thread(); bin < 1 << bits; bin += Group::threads) {
      const uint32_t found = counted<is_top>(bin);
      if (found > 0) Group::add_in_memory(bins[bin], found);
    }
  }

  // Appends to `prefix` the digit of the smallest chosen number: the `wanted` greatest keys are chosen,
  // and `count_of` counts digits. Afterwards `wanted` is the number still to be chosen with that digit.
  template <int32_t bits, class CountOf>
  FMHA_DEVICE void find(uint32_t& prefix, uint32_t& wanted, CountOf count_of) const {
    constexpr int32_t num_bins = 1 << bits, own_bins = (num_bins + Group::threads - 1) / Group::threads;
    // The thread's own bins, from the greatest down.
    uint32_t counts[own_bins], own = 0;
#pragma unroll
    for (int32_t i = 0; i < own_bins; ++i) {
      const int32_t bin = num_bins - 1 - (Group::thread() * own_bins + i);
      counts[i] = bin >= 0 ? count_of(bin) : 0;
      own += counts[i];
    }
    uint32_t before = sum_before(own);
#pragma unroll
    for (int32_t i = 0; i < own_bins; ++i) {
      if (before < wanted && wanted <= before + counts[i]) {
        shared.digit = uint32_t(num_bins - 1 - (Group::thread() * own_bins + i));
        shared.above = before;
      }
      before += counts[i];
    }
    Group::barrier();
    prefix = prefix << bits | shared.digit;
    wanted -= shared.above;
    Group::barrier();
  }

  // As `find`, of counts in memory.
  template <int32_t bits>
  FMHA_DEVICE void find_in_memory(uint32_t& prefix, uint32_t& wanted, const uint32_t* bins) const {
    find<bits>(prefix, wanted, [&](int32_t bin) { return bins[bin]; });
  }

  // The whole list of a row that has no more candidates than entries.
  FMHA_DEVICE bool has_all(int32_t* list) const {
    const int32_t count = entries.end - entries.begin;
    if (count > p.topk) return false;
    if (part == 0 && list) {
#pragma unroll 1
      for (int32_t at = Group::thread(); at < p.topk; at += Group::threads)
        list[at] = at < count ? entries.begin + at : -1;
    }
    return true;
  }

  // The warp's run of the group's keys: a multiple of the lanes, so that positions ascend with the lanes.
  FMHA_DEVICE Range run_of_warp() const {
    const Range keys = own();
    const int64_t share = int64_t(round_up(ceil_div(keys.end - keys.begin, warps), Group::count));
    const int64_t begin = keys.begin + Group::thread() / Group::count * share;
    return {int32_t(min<int64_t>(begin, keys.end)), int32_t(min<int64_t>(begin + share, keys.end))};
  }

  // Sum of one of the two numbers that each warp before this one has written to `sums`.
  FMHA_DEVICE uint32_t sum_of_warps(int32_t warp, int32_t which) const {
    return sum_of_lanes(Group::index() < warp ? shared.sums[2 * Group::index() + which] : 0);
  }

  // Number of keys in the warp's run that exceed the smallest chosen number, and that equal it.
  struct Counts {
    uint32_t greater, equal;
  };
  FMHA_DEVICE Counts count_run(uint32_t smallest) const {
    const Range run = run_of_warp();
    Counts counts = {0, 0};
    walk(run.begin, run.end, Group::count, Group::index(), [&](int32_t, uint32_t number, bool there) {
      counts.greater += uint32_t(Group::bits_in(Group::ballot(there && number > smallest)));
      counts.equal += uint32_t(Group::bits_in(Group::ballot(there && number == smallest)));
    });
    return counts;
  }

  // Writes the warp's part of the list, after the parts of earlier runs; of equal numbers `wanted` are chosen.
  FMHA_DEVICE void write_run(int32_t* list, uint32_t smallest, uint32_t wanted, Counts before) const {
    const Range run = run_of_warp();
    const int32_t lane = Group::index();
    const auto one = decltype(Group::ballot(true))(1);
    const auto lower = (one << lane) - 1;
    walk(run.begin, run.end, Group::count, lane, [&](int32_t j, uint32_t number, bool there) {
      const auto greaters = Group::ballot(there && number > smallest);
      const auto equals = Group::ballot(there && number == smallest);
      const uint32_t rank = before.equal + uint32_t(Group::bits_in(equals & lower));
      const uint32_t at = before.greater + uint32_t(Group::bits_in(greaters & lower)) + min(rank, wanted);
      if (there && (number > smallest || (number == smallest && rank < wanted))) list[at] = j;
      before.greater += uint32_t(Group::bits_in(greaters));
      before.equal += uint32_t(Group::bits_in(equals));
    });
  }

  // One group of threads makes a row's whole list.
  FMHA_DEVICE void whole(int32_t* list) const {
    if (has_all(list)) return;
    uint32_t smallest = 0, wanted = uint32_t(p.topk);
    count<kTopBits, true>(entries, 0, 32 - kTopBits);
    find<kTopBits>(smallest, wanted, [&](int32_t bin) { return counted<true>(bin); });
    count<kLowBits, false>(entries, smallest, kLowBits);
    find<kLowBits>(smallest, wanted, [&](int32_t bin) { return counted<false>(bin); });
    count<kLowBits, false>(entries, smallest, 0);
    find<kLowBits>(smallest, wanted, [&](int32_t bin) { return counted<false>(bin); });
    const int32_t warp = Group::thread() / Group::count;
    const Counts counts = count_run(smallest);
    if (Group::index() == 0) {
      shared.sums[2 * warp] = counts.greater;
      shared.sums[2 * warp + 1] = counts.equal;
    }
    Group::barrier();
    write_run(list, smallest, wanted, {sum_of_warps(warp, 0), sum_of_warps(warp, 1)});
  }

  // One step when several groups share a row. Each group derives the digits from the counts of earlier launches.
  template <int32_t step>
  FMHA_DEVICE void of_part(int32_t* list) const {
    if (has_all(step == kLists ? list : nullptr)) return;
    uint32_t* bins = bins_of_row();
    uint32_t smallest = 0, wanted = uint32_t(p.topk);
    if constexpr (step > kTopDigit) find_in_memory<kTopBits>(smallest, wanted, bins);
    if constexpr (step > kMiddleDigit) find_in_memory<kLowBits>(smallest, wanted, bins + kTopBins);
    if constexpr (step > kLowDigit) find_in_memory<kLowBits>(smallest, wanted, bins + kTopBins + kLowBins);
    if constexpr (step == kTopDigit) {
      count<kTopBits, true>(own(), 0, 32 - kTopBits);
      add_up<kTopBits, true>(bins);
    } else if constexpr (step == kMiddleDigit) {
      count<kLowBits, false>(own(), smallest, kLowBits);
      add_up<kLowBits, false>(bins + kTopBins);
    } else if constexpr (step == kLowDigit) {
      count<kLowBits, false>(own(), smallest, 0);
      add_up<kLowBits, false>(bins + kTopBins + kLowBins);
    } else {
      // Counts of a row's runs, in their order.
      const int32_t run = part * warps + Group::thread() / Group::count, lane = Group::index();
      uint32_t* runs = p.runs + row * p.parts * warps * 2;
      if constexpr (step == kCounts) {
        const Counts counts = count_run(smallest);
        if (lane == 0) {
          runs[2 * run] = counts.greater;
          runs[2 * run + 1] = counts.equal;
        }
      } else {
        Counts before = {0, 0};
#pragma unroll 1
        for (int32_t at = lane; at < run; at += Group::count) {
          before.greater += runs[2 * at];
          before.equal += runs[2 * at + 1];
        }
        write_run(list, smallest, wanted, {sum_of_lanes(before.greater), sum_of_lanes(before.equal)});
      }
    }
  }
};

// The launch of a vendor's groups: `p.parts` groups share each row.
template <class Group, int32_t step>
FMHA_DEVICE void choose_rows(const ChooseParams& p) {
  using Chooser = RowChooser<Group>;
  __shared__ typename Chooser::Shared shared;
  const int64_t row = Group::number() / p.parts;
  if (p.row_begin + row >= p.row_end) return;
  const Range entries = entries_of(p, int32_t(p.row_begin + row));
  const Chooser chooser{p, shared, p.scores + row * p.num_entries, entries, row, int32_t(Group::number() % p.parts)};
  int32_t* list = p.indices + (p.row_begin + row) * p.topk;
  if constexpr (step == kWhole) chooser.whole(list);
  else chooser.template of_part<step>(list);
}

}  // namespace fmha::choose
