// The union of the lists of several tokens, for a tile whose rows are theirs. It is a walk of blocks of keys in
// ascending order, each a step: a block of the tile that some token's list names a key of.
//
// A row's lane follows its own token's list beside the walk, and hides what the list does not name. Blocks of the tile
// begin at multiples of `block_n` keys whatever the lists name, and a step without a row's keys leaves its maximum, sum
// and O as they are. So the bits of a row depend on its own list alone.
//
// A list may name a block several times. Its keys then count as often: the walk has the tile's block in as many steps,
// one after another, and a row takes part in as many of them as its list names the keys.
#pragma once
#include <fmha/common/token_keys.cuh>
#include <fmha/common/work.cuh>

namespace fmha {

// Keys of a group: lists name all of its keys or none. A block of a tile has at most 32 groups.
constexpr int32_t kGroupKeys = 8;

// First key of an entry that names nothing.
constexpr int32_t kNoKey = 2147483647;

// One token's list in shared memory, the first keys of its blocks in ascending order, and a place in it.
struct SortedList {
  const int32_t* first_keys;
  int32_t count, block;  // entries, and keys that each stands for
  int32_t at, now;       // an entry, and its first key

  FMHA_DEVICE static SortedList of(const int32_t* first_keys, int32_t count, int32_t block) {
    return {first_keys, count, block, 0, count > 0 ? first_keys[0] : kNoKey};
  }
  FMHA_DEVICE int32_t key_at(int32_t entry) const { return entry < count ? first_keys[entry] : kNoKey; }

  // Leaves behind the entries whose keys all lie before this one.
  FMHA_DEVICE void advance(int32_t from) {
    while (now <= from - block) now = key_at(++at);
  }
  // The first key at or behind `from`, which the list has advanced to.
  FMHA_DEVICE int32_t next(int32_t from) const { return max(now, from); }

  // Groups of the `keys` from `first` on that the list names more than `pass` times; raises `most` to how often it
  // names one.
  FMHA_DEVICE uint32_t groups(int32_t first, int32_t keys, int32_t pass, uint32_t& most) const {
    uint32_t found = 0, times = 0;
    int32_t before = -1;
    for (int32_t e = at, key = now; key < first + keys; key = key_at(++e)) {
      times = key == before ? times + 1 : 1;
      most = max(most, times);
      before = key;
      if (times != uint32_t(pass) + 1) continue;
      const int32_t begin = max(key - first, 0) / kGroupKeys, end = min(key - first + block, keys) / kGroupKeys;
      found |= ~uint32_t(0) >> (32 - end) & ~uint32_t(0) << begin;
    }
    return found;
  }
};

// Keys of a tile's rows, tokens side by side with their heads. Shared memory has `words`: the sorted lists, then the
// block of each step, the groups of each step, and the number of steps.
template <auto tile>
struct KeysOfUnion {
  static constexpr bool all = false, has_classes = true, of_token = false, unites = true;
  static constexpr int32_t keys_of_step = tile.block_n;
  static_assert(tile.block_n / kGroupKeys <= 32, "a step's groups are bits of a word");

  const FwdParams& p;
  const ListParams& lists;
  SeqSpan span;
  MaskBand band;
  int32_t first_query, num_tokens, i_head_kv;
  int32_t* words;

  FMHA_DEVICE int32_t num_entries() const { return num_tokens * lists.topk; }
  FMHA_DEVICE int32_t most_steps() const { return (tile.list_words - 1 - num_entries()) / 2; }
  FMHA_DEVICE int32_t* blocks() const { return words + num_entries(); }
  FMHA_DEVICE int32_t* groups() const { return blocks() + most_steps(); }
  FMHA_DEVICE int32_t& num_steps() const { return words[tile.list_words - 1]; }

  FMHA_DEVICE int32_t block_of(int32_t step) const { return blocks()[step]; }
  FMHA_DEVICE uint32_t groups_of(int32_t step) const { return uint32_t(groups()[step]); }
  FMHA_DEVICE SortedList list_of(int32_t token) const {
    return SortedList::of(words + token * lists.topk, lists.topk, lists.block);
  }
  FMHA_DEVICE TokenList token(int32_t i) const { return {p, lists, span, band, i, i_head_kv}; }
  // The keys of one query as a tile of one token has them.
  FMHA_DEVICE KeysOfToken<TokenList> of_query(int32_t i) const { return {token(i)}; }

  template <FwdSpec spec>
  FMHA_DEVICE RowEnd finish(const FwdParams&, RowMax row_max, float row_sum, int32_t i_head) const {
    return finish_listed_row<spec>(p, lists, row_max, row_sum, i_head);
  }

  // First key of an entry; kNoKey where it is absent or the band hides all of its keys.
  FMHA_DEVICE int32_t first_key_of(int32_t i, int32_t entry) const {
    if (i >= span.seqlen_q) return kNoKey;
    const TokenList list = token(i);
    const int32_t at = entry * lists.block;
    if (at >= list.count()) return kNoKey;
    const int32_t block = list.entry(at);
    const int64_t first = int64_t(block) * lists.block;
    if (block < 0 || first >= span.seqlen_k) return kNoKey;
    const int32_t begin = int32_t(first), end = min(begin + lists.block, span.seqlen_k);
    return block_class(band, {i, i + 1}, {begin, end}) == BlockClass::Skipped ? kNoKey : begin;
  }

  // Reads the tokens' lists, sorts each, and makes the steps. Called by all threads of the CTA, so many.
  template <int threads>
  FMHA_DEVICE void unite() const {
    const int32_t topk = lists.topk, entries = num_entries();
    int32_t* const sorted = blocks();
    for (int32_t at = threadIdx.x; at < entries; at += threads)
      words[at] = first_key_of(first_query + at / topk, at % topk);
    __syncthreads();
    bool ascending = true;
    for (int32_t at = threadIdx.x; at < entries; at += threads)
      if (at % topk > 0) ascending &= words[at - 1] <= words[at];
    if (!__syncthreads_and(ascending)) {
      // An entry's place is the number of entries before it.
      for (int32_t at = threadIdx.x; at < entries; at += threads) {
        const int32_t list = at - at % topk, key = words[at];
        int32_t place = list;
        for (int32_t other = list; other < list + topk; ++other)
          place += words[other] < key || (words[other] == key && other < at) ? 1 : 0;
        sorted[place] = key;
      }
      __syncthreads();
      for (int32_t at = threadIdx.x; at < entries; at += threads) words[at] = sorted[at];
      __syncthreads();
    }
    if (threadIdx.x < 32) merge();
    __syncthreads();
  }

  // Makes the steps: a warp follows all lists, a lane every 32nd.
  FMHA_DEVICE void merge() const {
    constexpr int slots = ceil_div(tile.block_m, 32);
    const int32_t lane = threadIdx.x;
    SortedList list[slots];
#pragma unroll
    for (int s = 0; s < slots; ++s) {
      const int32_t token = lane + 32 * s;
      list[s] = token < num_tokens ? list_of(token) : SortedList::of(words, 0, lists.block);
    }
    int32_t steps = 0;
#pragma unroll 1
    for (int32_t from = 0;;) {
      int32_t next = kNoKey;
#pragma unroll
      for (int s = 0; s < slots; ++s) {
        list[s].advance(from);
        next = min(next, list[s].next(from));
      }
      next = int32_t(ptx::redux_min(uint32_t(next)));
      if (next == kNoKey) break;
      const int32_t block = next / keys_of_step;
      uint32_t passes = 1;
#pragma unroll 1
      for (int32_t pass = 0; pass < int32_t(passes); ++pass) {
        uint32_t found = 0, most = 1;
#pragma unroll
        for (int s = 0; s < slots; ++s) found |= list[s].groups(block * keys_of_step, keys_of_step, pass, most);
        if (ptx::vote_ballot(most > 1) != 0) passes = ptx::redux_max(most);
        found = ptx::redux_or(found);
        if (lane == 0) {
          blocks()[steps] = block;
          groups()[steps] = int32_t(found);
        }
        ++steps;
      }
      from = (block + 1) * keys_of_step;
    }
    if (lane == 0) {
      // Without a key: one block outside the sequence, zeros that are hidden.
      if (steps == 0) blocks()[0] = -1, groups()[0] = 0;
      num_steps() = max(steps, 1);
    }
  }
};

// Whether a tile walks the union of its tokens' lists.
template <class Keys>
FMHA_DEVICE constexpr bool unites_lists() {
  if constexpr (requires { Keys::unites; }) return Keys::unites;
  else return false;
}

// A lane's row of a warp beside the walk: the groups of the step's block that its token's list names.
struct RowInUnion {
  SortedList list = SortedList::of(nullptr, 0, 0);
  bool is_row = false;  // padding has no keys
  int32_t block = -1, pass = 0;
  uint32_t groups = 0;

  template <class Keys>
  FMHA_DEVICE static RowInUnion of(const Keys& keys, int32_t i, bool is_row) {
    RowInUnion row;
    row.is_row = is_row;
    if (is_row) row.list = keys.list_of(i - keys.first_query);
    return row;
  }

  // Enters the next step, and says how the block stands for the warp's rows. Called by the whole warp.
  template <int32_t keys>
  FMHA_DEVICE BlockClass enter(int32_t next) {
    pass = next == block ? pass + 1 : 0;
    block = next;
    uint32_t most = 0;
    list.advance(block * keys);
    groups = list.groups(block * keys, keys, pass, most);
    constexpr uint32_t every = ~uint32_t(0) >> (32 - keys / kGroupKeys);
    if (ptx::vote_ballot(groups != 0) == 0) return BlockClass::Skipped;
    return ptx::vote_ballot(is_row && groups != every) == 0 ? BlockClass::Inside : BlockClass::Edge;
  }
};

}  // namespace fmha
