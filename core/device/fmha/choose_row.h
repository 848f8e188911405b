// The list of a row: its `topk` greatest scores, ties to the lower position, NaN last, positions ascending, -1 after
// them. A group of threads takes a row.
//
// A radix selection of 32-bit numbers that grow with the scores finds the smallest number that is in, and how many keys
// of just that number are: digits of 8, 12 and 12 bits from the top, a histogram each. Counts are whole numbers, so
// the order in which threads add does not matter. Then each warp (or wave) counts what it takes of a run of keys, and
// writes that behind what the warps before it take.
//
// The first digit is a sign and seven bits of the exponent: most scores of a row share it. Each of 32 lanes therefore
// has bins of its own, in a bank of its own.
#pragma once
#include <fmha/choose.h>

namespace fmha::choose {

// `Group`: a vendor's group of threads (`threads`, `thread()`, `index()`, `row()`, `barrier()`, `add()`), of warps of
// `count` lanes, with `ballot`, `bits_in` and `from`, a lane's value.
template <class Group>
struct RowChooser {
  static constexpr int32_t warps = Group::threads / Group::count;
  static constexpr int32_t lanes = 32, top_bits = 8, low_bits = 12;
  static constexpr int32_t num_words = max((1 << top_bits) * lanes, 1 << low_bits);
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
  Range entries;

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

  // The sum of what threads before this one have, and nothing of its own.
  FMHA_DEVICE uint32_t sum_before(uint32_t own) const {
    uint32_t sum = own;
#pragma unroll
    for (int32_t step = 1; step < Group::count; step *= 2) {
      const uint32_t other = Group::from(sum, max(Group::index() - step, 0));
      if (Group::index() >= step) sum += other;
    }
    const int32_t warp = Group::thread() / Group::count;
    if (Group::index() == Group::count - 1) shared.sums[warp] = sum;
    Group::barrier();
    uint32_t before = sum - own;
#pragma unroll 1
    for (int32_t w = 0; w < warp; ++w) before += shared.sums[w];
    return before;
  }

  // The digit of the smallest number that is in, of `wanted` keys whose digits above are `prefix`. Afterwards `wanted`
  // are those still to be found among keys of that digit, of which there are as many as it gives.
  template <int32_t bits, bool is_top>
  FMHA_DEVICE uint32_t find_digit(uint32_t& prefix, uint32_t& wanted, int32_t shift) const {
    constexpr int32_t num_bins = 1 << bits, own_bins = (num_bins + Group::threads - 1) / Group::threads;
    constexpr int32_t words = is_top ? num_bins * lanes : num_bins;
    Group::barrier();
#pragma unroll 1
    for (int32_t at = Group::thread(); at < words; at += Group::threads) shared.bins[at] = 0;
    Group::barrier();
    walk(entries.begin, entries.end, Group::threads, Group::thread(), [&](int32_t, uint32_t number, bool there) {
      const uint32_t digit = number >> shift & (num_bins - 1);
      if constexpr (is_top) {
        if (there) Group::add(shared.bins[digit * lanes + Group::thread() % lanes]);
      } else {
        if (there && number >> (shift + bits) == prefix) Group::add(shared.bins[digit]);
      }
    });
    Group::barrier();
    // The thread's own bins, from the greatest down.
    uint32_t counts[own_bins], own = 0;
#pragma unroll
    for (int32_t i = 0; i < own_bins; ++i) {
      const int32_t bin = num_bins - 1 - (Group::thread() * own_bins + i);
      counts[i] = 0;
      if constexpr (is_top) {
        if (bin >= 0) {
#pragma unroll 4
          for (int32_t lane = 0; lane < lanes; ++lane) counts[i] += shared.bins[bin * lanes + (lane + bin) % lanes];
        }
      } else {
        if (bin >= 0) counts[i] = shared.bins[bin];
      }
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
    const uint32_t digit = shared.digit;
    prefix = prefix << bits | digit;
    wanted -= shared.above;
    return digit;
  }

  // Writes the list.
  FMHA_DEVICE void run(int32_t* list) const {
    const int32_t count = entries.end - entries.begin, thread = Group::thread();
    if (count <= p.topk) {
#pragma unroll 1
      for (int32_t at = thread; at < p.topk; at += Group::threads) list[at] = at < count ? entries.begin + at : -1;
      return;
    }
    uint32_t smallest = 0, wanted = uint32_t(p.topk);
    find_digit<top_bits, true>(smallest, wanted, 32 - top_bits);
    find_digit<low_bits, false>(smallest, wanted, low_bits);
    find_digit<low_bits, false>(smallest, wanted, 0);

    // Each warp's run of keys; a multiple of the lanes, so that positions ascend with the lanes.
    const int32_t warp = thread / Group::count, lane = Group::index();
    const int64_t share = int64_t(round_up(ceil_div(count, warps), Group::count));
    const int32_t first = int32_t(min<int64_t>(entries.begin + warp * share, entries.end));
    const int32_t end = int32_t(min<int64_t>(first + share, entries.end));
    uint32_t greater = 0, equal = 0;
    walk(first, end, Group::count, lane, [&](int32_t, uint32_t number, bool there) {
      greater += uint32_t(Group::bits_in(Group::ballot(there && number > smallest)));
      equal += uint32_t(Group::bits_in(Group::ballot(there && number == smallest)));
    });
    Group::barrier();
    if (lane == 0) {
      shared.sums[2 * warp] = greater;
      shared.sums[2 * warp + 1] = equal;
    }
    Group::barrier();
    uint32_t greater_before = 0, equal_before = 0;
#pragma unroll 1
    for (int32_t w = 0; w < warp; ++w) {
      greater_before += shared.sums[2 * w];
      equal_before += shared.sums[2 * w + 1];
    }
    const auto one = decltype(Group::ballot(true))(1);
    const auto lower = (one << lane) - 1;
    walk(first, end, Group::count, lane, [&](int32_t j, uint32_t number, bool there) {
      const auto greaters = Group::ballot(there && number > smallest);
      const auto equals = Group::ballot(there && number == smallest);
      const uint32_t rank = equal_before + uint32_t(Group::bits_in(equals & lower));
      const uint32_t at = greater_before + uint32_t(Group::bits_in(greaters & lower)) + min(rank, wanted);
      if (there && (number > smallest || (number == smallest && rank < wanted))) list[at] = j;
      greater_before += uint32_t(Group::bits_in(greaters));
      equal_before += uint32_t(Group::bits_in(equals));
    });
  }
};

// The launch of a vendor's groups: a row each.
template <class Group>
FMHA_DEVICE void choose_rows(const ChooseParams& p) {
  using Chooser = RowChooser<Group>;
  __shared__ typename Chooser::Shared shared;
  const int64_t row = int64_t(p.row_begin) + Group::row();
  if (row >= p.row_end) return;
  const float* scores = p.scores + (row - p.row_begin) * p.num_entries;
  const Chooser chooser{p, shared, scores, entries_of(p, int32_t(row))};
  chooser.run(p.indices + row * p.topk);
}

}  // namespace fmha::choose
