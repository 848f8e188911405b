// The list of a row (choose_row.h) by a cluster: each CTA has a part of the row's numbers in registers. One launch, and
// each score is read once.
//
// A bound first. A thread has the greatest of each quarter of its numbers: 4096 of a CTA. As many of them as the CTA's
// share of the list are at or above the CTA's bound, and so the smallest bound of all CTAs has a whole list at or above
// it: of scores in no order, some tenth more than the list. These few are put into shared memory, every CTA copies
// those of the others, and finds the smallest number that is in among them.
//
// A row of which too many numbers are at or above the bound (equal scores, NaN) takes counts of all digits instead,
// which CTAs read from each other's shared memory.
#pragma once
#include <fmha/choose_cluster_host.h>
#include <fmha/common/choose.cuh>
#include <fmha/ptx/cluster.cuh>
#include <fmha/ptx/grid.cuh>

namespace fmha::choose {

template <ClusterChoice choice>
struct ClusterChooser {
  using Row = RowChooser<ChooseCta>;
  using Cta = ChooseCta;
  static constexpr int32_t held = choice.held;
  static constexpr int32_t quarters = 4;
  static_assert(held % quarters == 0, "quarters of a thread's numbers");
  static_assert(int64_t(Row::num_words) * Cta::threads * held < int64_t(1) << 31, "products of lists and keys");
  static_assert(Row::num_words >= 2 * kLowBins, "bins of both lower digits stand side by side");

  // Bins of a range of numbers; after them candidate numbers, of the row and of this CTA.
  static constexpr int32_t kRangeBits = 11, kRangeBins = 1 << kRangeBits;
  static constexpr int32_t kMostOfRow = Row::num_words - kRangeBins, kMostOfCta = choice.ctas > 1 ? kMostOfRow / 2 : 1;
  // Most numbers beyond those wanted that may be at or above a bound.
  static constexpr uint32_t kSpare = 64;

  struct Shared {
    typename Row::Shared row;
    uint32_t of_cta[kMostOfCta];
    uint32_t top[kTopBins];
    uint32_t warp_least[Row::warps], warp_greatest[Row::warps], warp_count[Row::warps];
    uint32_t count, bound, greatest;
  };

  // A set of numbers: those from `least` to `greatest`, and their count.
  struct Extent {
    uint32_t least, greatest, count;
  };

  const Row& row;
  Shared& shared;
  Range run;               // keys of the warp
  uint32_t numbers[held];  // of keys `run.begin` + 32 u + the lane; 0 where there is none

  static FMHA_DEVICE void wait_for_all() {
    if constexpr (choice.ctas > 1) ptx::cluster_sync();
    else Cta::barrier();
  }
  // The sum of a word of all CTAs.
  static FMHA_DEVICE uint32_t sum_of(const uint32_t& word) {
    if constexpr (choice.ctas == 1) return word;
    uint32_t sum = 0;
#pragma unroll
    for (int32_t rank = 0; rank < choice.ctas; ++rank) sum += ptx::ld_shared_at(word, rank);
    return sum;
  }
  // The word of the CTA whose rank equals the lane, or `other` in lanes beyond.
  static FMHA_DEVICE uint32_t of_rank(const uint32_t& word, uint32_t other) {
    if constexpr (choice.ctas == 1) return Cta::index() == 0 ? word : other;
    return Cta::index() < choice.ctas ? ptx::ld_shared_at(word, Cta::index()) : other;
  }
  static FMHA_DEVICE int32_t warp() { return Cta::thread() / Cta::count; }

  // Whether there is a key `run.begin` + 32 u + the lane, of `left` keys from the lane on.
  static FMHA_DEVICE bool is_there(int32_t u, int32_t left) { return 32 * u < left; }
  // Keys of the warp from the lane on. The compiler keeps nothing that it derives from an earlier one, since registers
  // are few.
  FMHA_DEVICE int32_t left() const { return int32_t(ptx::made_here(uint32_t(run.end - run.begin - Cta::index()))); }

  // The keys of a warp of this CTA: a multiple of the lanes, but for the last ones. CTAs take runs in turn, so that
  // each has a sample of the row. A row has no more keys than a cluster holds, so that 32 bits hold every sum.
  FMHA_DEVICE Range run_of(int32_t warp) const {
    const int32_t keys = ceil_div(row.entries.end - row.entries.begin, choice.ctas * Row::warps);
    const int32_t share = round_up(keys, Cta::count), begin = (warp * choice.ctas + row.part) * share;
    return {min(row.entries.begin + begin, row.entries.end), min(row.entries.begin + begin + share, row.entries.end)};
  }

  FMHA_DEVICE void load() {
    run = run_of(warp());
    const float* scores = row.scores + run.begin + Cta::index();
    const int32_t there = left();
#pragma unroll
    for (int32_t u = 0; u < held; ++u) numbers[u] = is_there(u, there) ? bits_of(scores[32 * u]) : 0;
    const int32_t there_again = left();
#pragma unroll
    for (int32_t u = 0; u < held; ++u) {
      const uint32_t number = row.number_of(run.begin + 32 * u + Cta::index(), float_of(numbers[u]));
      numbers[u] = is_there(u, there_again) ? number : 0;
    }
  }

  // The union of all threads' extents, for every thread.
  FMHA_DEVICE Extent extent_of(const Extent& own) const {
    const Extent of_warp = {ptx::redux_min(own.least), ptx::redux_max(own.greatest), ptx::redux_add(own.count)};
    if (Cta::index() == 0) {
      shared.warp_least[warp()] = of_warp.least;
      shared.warp_greatest[warp()] = of_warp.greatest;
      shared.warp_count[warp()] = of_warp.count;
    }
    Cta::barrier();
    const int32_t lane = Cta::index();
    return {ptx::redux_min(shared.warp_least[lane]), ptx::redux_max(shared.warp_greatest[lane]),
            ptx::redux_add(shared.warp_count[lane])};
  }

  // The `wanted`-th greatest number, at least 1, of those in `extent` that `each` passes; `wanted`
  // becomes the rank among equal numbers. Not `exact`: a number at or below it, with few between.
  template <bool exact, class Each>
  FMHA_DEVICE uint32_t find_number(const Extent& extent, uint32_t& wanted, Each each) const {
    uint32_t low = extent.least, high = extent.greatest;
    uint32_t* bins = shared.row.bins;
#pragma unroll 1
    while (true) {
      const int32_t shift = max(0, 32 - kRangeBits - __clz(int32_t(high - low)));
#pragma unroll
      for (int32_t at = Cta::thread(); at < kRangeBins; at += Cta::threads) bins[at] = 0;
      Cta::barrier();
      each([&](uint32_t number) {
        if (number >= low && number <= high) Cta::add(bins[(number - low) >> shift], 1);
      });
      Cta::barrier();
      uint32_t digit = 0;
      row.template find<kRangeBits>(digit, wanted, [&](int32_t bin) { return bins[bin]; });
      low += digit << shift;
      if (shift == 0 || (!exact && bins[digit] <= kSpare)) return low;
      high = min(high, low + ((1u << shift) - 1));
      Cta::barrier();
    }
  }

  // A bound such that the CTA's share of keys is at or above it: all CTAs' shares
  // together fill the list. `most` becomes the greatest of the CTA's numbers.
  FMHA_DEVICE uint32_t find_bound(uint32_t& most) const {
    uint32_t greatest[quarters] = {};
#pragma unroll
    for (int32_t u = 0; u < held; ++u) greatest[u % quarters] = max(greatest[u % quarters], numbers[u]);
    Extent own = {~0u, 0, 0};
#pragma unroll
    for (int32_t i = 0; i < quarters; ++i) {
      own.least = min(own.least, greatest[i] > 0 ? greatest[i] : ~0u);
      own.greatest = max(own.greatest, greatest[i]);
      own.count += greatest[i] > 0;
    }
    const Extent extent = extent_of(own);
    most = extent.greatest;
    const Range of_lane = run_of(Cta::index());
    const uint32_t keys = ptx::redux_add(uint32_t(of_lane.end - of_lane.begin));
    uint32_t wanted = ceil_div(uint32_t(row.p.topk) * keys, uint32_t(row.entries.end - row.entries.begin));
    if (wanted == 0) return ~0u;
    if (wanted > extent.count) return 0;
    return find_number<false>(extent, wanted, [&](auto use) {
#pragma unroll
      for (int32_t i = 0; i < quarters; ++i) use(greatest[i]);
    });
  }

  // Writes the CTA's numbers at or above `bound` after the bins, and counts them, also those without room.
  FMHA_DEVICE void gather(uint32_t* to, uint32_t room, uint32_t bound) const {
    uint32_t own = 0;
#pragma unroll
    for (int32_t u = 0; u < held; ++u) own += numbers[u] >= bound;
    const uint32_t of_warp = ptx::redux_add(own);
    if (of_warp == 0) return;
    uint32_t at = Cta::index() == 0 ? atomicAdd(&shared.count, of_warp) : 0;
    at = Cta::from(at, 0) + Row::sum_to_lane(own) - own;
#pragma unroll
    for (int32_t u = 0; u < held; ++u) {
      const bool is_in = numbers[u] >= bound;
      if (is_in && at < room) to[at] = numbers[u];
      at += is_in;
    }
  }

  // Writes the list using a bound; false if too many numbers are at or above it.
  FMHA_DEVICE bool choose_by_bound(int32_t* list) const {
    if (row.p.topk > kMostOfRow) return false;
    uint32_t* of_row = shared.row.bins + kRangeBins;
    uint32_t* of_cta = choice.ctas > 1 ? shared.of_cta : of_row;
    constexpr uint32_t room = choice.ctas > 1 ? kMostOfCta : kMostOfRow;
    if (Cta::thread() == 0) shared.count = 0;
    uint32_t greatest, bound = find_bound(greatest);
    if constexpr (choice.ctas > 1) {
      if (Cta::thread() == 0) {
        shared.bound = bound;
        shared.greatest = greatest;
      }
      ptx::cluster_sync();
      bound = ptx::redux_min(of_rank(shared.bound, ~0u));
      greatest = ptx::redux_max(of_rank(shared.greatest, 0));
    }
    if (bound == 0) return false;
    gather(of_cta, room, bound);
    wait_for_all();
    const uint32_t found = of_rank(shared.count, 0), all = ptx::redux_add(found);
    if (ptx::redux_max(found) > room || all > kMostOfRow) return false;
    if constexpr (choice.ctas > 1) {
      constexpr int32_t threads = Cta::threads / choice.ctas;
      const int32_t rank = Cta::thread() / threads;
      const uint32_t at = ptx::redux_add(Cta::index() < rank ? found : 0), count = Cta::from(found, rank);
#pragma unroll 1
      for (uint32_t i = Cta::thread() % threads; i < count; i += threads)
        of_row[at + i] = ptx::ld_shared_at(of_cta[i], rank);
      Cta::barrier();
    }
    uint32_t wanted = uint32_t(row.p.topk);
    const uint32_t smallest = find_number<true>({bound, greatest, all}, wanted, [&](auto use) {
#pragma unroll 1
      for (uint32_t i = Cta::thread(); i < all; i += Cta::threads) use(of_row[i]);
    });
    write(list, smallest, wanted);
    return true;
  }

  FMHA_DEVICE void clear() const {
#pragma unroll 1
    for (int32_t at = Cta::thread(); at < Row::num_words; at += Cta::threads) shared.row.bins[at] = 0;
  }

  // Counts a lower digit of keys whose higher digits equal `prefix`, in separate bins.
  FMHA_DEVICE void count_low(uint32_t* bins, uint32_t prefix, int32_t shift) const {
    const int32_t there = left();
#pragma unroll
    for (int32_t u = 0; u < held; ++u) {
      if (!is_there(u, there) || numbers[u] >> (shift + kLowBits) != prefix) continue;
      Cta::add(bins[numbers[u] >> shift & (kLowBins - 1)], 1);
    }
  }

  // Writes the list of chosen keys by counts of the digits of all numbers.
  FMHA_DEVICE void choose_by_digits(int32_t* list) const {
    uint32_t smallest = 0, wanted = uint32_t(row.p.topk);
    uint32_t *middle = shared.row.bins, *low = shared.row.bins + kLowBins;
    Cta::barrier();
    clear();
    Cta::barrier();
    const int32_t there = left();
#pragma unroll
    for (int32_t u = 0; u < held; ++u) {
      if (is_there(u, there)) Cta::add(shared.row.bins[(numbers[u] >> (32 - kTopBits)) * Row::lanes + Cta::index()], 1);
    }
    Cta::barrier();
    if (Cta::thread() < kTopBins) shared.top[Cta::thread()] = row.template counted<true>(Cta::thread());
    wait_for_all();
    clear();
    row.template find<kTopBits>(smallest, wanted, [&](int32_t bin) { return sum_of(shared.top[bin]); });
    count_low(middle, smallest, kLowBits);
    wait_for_all();
    row.template find<kLowBits>(smallest, wanted, [&](int32_t bin) { return sum_of(middle[bin]); });
    count_low(low, smallest, 0);
    wait_for_all();
    row.template find<kLowBits>(smallest, wanted, [&](int32_t bin) { return sum_of(low[bin]); });
    write(list, smallest, wanted);
  }

  // Writes the list: keys greater than the smallest chosen number, and the first `wanted` of those equal to it.
  FMHA_DEVICE void write(int32_t* list, uint32_t smallest, uint32_t wanted) const {
    const int32_t lane = Cta::index();
    uint32_t greater = 0, equal = 0;
    const int32_t there = left();
#pragma unroll
    for (int32_t u = 0; u < held; ++u) {
      greater += uint32_t(__popc(Cta::ballot(numbers[u] > smallest)));
      equal += uint32_t(__popc(Cta::ballot(is_there(u, there) && numbers[u] == smallest)));
    }
    if (lane == 0) {
      shared.row.sums[2 * warp()] = greater;
      shared.row.sums[2 * warp() + 1] = equal;
    }
    wait_for_all();
    // Sums over the runs before this one: greater entries, and equal ones.
    uint32_t before[2] = {};
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
#pragma unroll
      for (int32_t rank = 0; rank < choice.ctas; ++rank) {
        const uint32_t& of_lane = shared.row.sums[2 * lane + i];
        const uint32_t sum = choice.ctas > 1 ? ptx::ld_shared_at(of_lane, rank) : of_lane;
        if (lane < warp() || (lane == warp() && rank < row.part)) before[i] += sum;
      }
      before[i] = ptx::redux_add(before[i]);
    }
    // A CTA stays until the others have read its counts.
    if constexpr (choice.ctas > 1) ptx::cluster_arrive();
    const uint32_t lower = (1u << lane) - 1, again = ptx::made_here(smallest);
    const int32_t there_again = left();
#pragma unroll
    for (int32_t u = 0; u < held; ++u) {
      const bool is_greater = numbers[u] > again, is_equal = is_there(u, there_again) && numbers[u] == again;
      const uint32_t greaters = Cta::ballot(is_greater), equals = Cta::ballot(is_equal);
      const uint32_t rank = before[1] + uint32_t(__popc(equals & lower));
      const uint32_t at = before[0] + uint32_t(__popc(greaters & lower)) + min(rank, wanted);
      if (is_greater || (is_equal && rank < wanted)) list[at] = run.begin + 32 * u + lane;
      before[0] += uint32_t(__popc(greaters));
      before[1] += uint32_t(__popc(equals));
    }
    if constexpr (choice.ctas > 1) ptx::cluster_wait();
  }
};

template <ClusterChoice choice>
FMHA_DEVICE void choose_rows_by_clusters(const ChooseParams& p) {
  using Chooser = ClusterChooser<choice>;
  __shared__ typename Chooser::Shared shared;
  ptx::wait_for_grids_before();
  const int64_t row = blockIdx.x / choice.ctas;
  if (p.row_begin + row >= p.row_end) return;
  const Range entries = entries_of(p, int32_t(p.row_begin + row));
  const int32_t rank = choice.ctas > 1 ? int32_t(ptx::cluster_ctarank()) : 0;
  const typename Chooser::Row of_row{p, shared.row, p.scores + row * p.num_entries, entries, row, rank};
  int32_t* list = p.indices + (p.row_begin + row) * p.topk;
  if (of_row.has_all(list)) return;
  Chooser chooser{of_row, shared};
  chooser.load();
  if (!chooser.choose_by_bound(list)) chooser.choose_by_digits(list);
}

}  // namespace fmha::choose
