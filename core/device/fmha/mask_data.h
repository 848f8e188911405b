// Masks as data: intervals, bits and block lists. A pair is visible only if all of them show it. A mask is absent if
// its pointer is null.
#pragma once
#include <fmha/mask.h>
#include <fmha/mask_data_params.h>
#include <fmha/seq.h>

namespace fmha {

struct DataMasks {
  const MaskDataParams& m;

  static FMHA_DEVICE int32_t word(const MaskTensor& x, int32_t batch, int32_t head, int32_t row, int32_t column) {
    return x.data[batch * x.batch + head * x.head + row * x.row + column * x.dim];
  }

  // An endpoint of the intervals, counted from the call's first key. One below 0 becomes 0, the row's first key.
  static FMHA_DEVICE int32_t endpoint(const MaskDataParams& m, int32_t batch, int32_t head, int32_t row, int32_t at) {
    return max(word(m.intervals, batch, head, row, at), 0) - m.first_key;
  }

  // Whether the first entries of a row of indices have the block. A count beyond the row's room is cut. Loops carry
  // numbers, since clang has a bool that leaves a loop by two ways begin undefined in lanes that are off.
  static FMHA_DEVICE bool lists(const MaskTensor& counts, const MaskTensor& indices, int32_t most, int32_t batch,
                                int32_t head, int32_t row, int32_t block) {
    if (!counts.data) return false;
    const int32_t count = clamp(word(counts, batch, head, row, 0), 0, most);
    int32_t found = 0;
    for (int32_t at = 0; at < count && found == 0; ++at) found = word(indices, batch, head, row, at) == block ? 1 : 0;
    return found != 0;
  }

  // Endpoints that decrease count as the largest before them. An end beyond seqlen_k needs no clamp, since no key lies
  // there. All endpoints are read, even when the result is known: clang would leave variables after the loop undefined
  // in lanes that leave it early (see `lists`).
  FMHA_DEVICE bool in_intervals(const SeqSpan& span, int32_t i_head, int32_t i, int32_t j) const {
    const int32_t head = i_head / m.intervals_ratio, row = span.q_row + i;
    int32_t before = 0, inside = 0;
    for (int32_t at = 0; at < m.endpoints; at += 2) {
      const int32_t begin = max(endpoint(m, span.storage_batch, head, row, at), before);
      before = max(endpoint(m, span.storage_batch, head, row, at + 1), begin);
      inside |= j >= begin && j < before ? 1 : 0;
    }
    return inside != 0;
  }

  FMHA_DEVICE bool has_bit(const SeqSpan& span, int32_t i_head, int32_t i, int32_t j) const {
    const int32_t bits = word(m.bits, span.storage_batch, i_head / m.bits_ratio, span.q_row + i, j / 32);
    return uint32_t(bits) >> (j % 32) & 1u;
  }

  // Result for a pair: hidden; visible if the mask as code shows it too; visible in any case.
  enum class Shown { No, Asked, Full };

  // Whether query i sees key j, a mask as code apart.
  FMHA_DEVICE bool sees(const SeqSpan& span, int32_t i_head, int32_t i, int32_t j) const {
    return shown(span, i_head, i, j) != Shown::No;
  }

  // Result for query i and key j. In a block of the full list no other mask is evaluated.
  FMHA_DEVICE Shown shown(const SeqSpan& span, int32_t i_head, int32_t i, int32_t j) const {
    int32_t full = 0, asked = 1;
    if (m.block_q != 0) {
      const int32_t head = i_head / m.lists_ratio, row = i / m.block_q, block = j / m.block_k + m.first_block_k;
      full = lists(m.full_kv_num_blocks, m.full_kv_indices, m.full_max_blocks, span.i_batch, head, row, block);
      asked = lists(m.kv_num_blocks, m.kv_indices, m.max_blocks, span.i_batch, head, row, block);
    }
    if (m.intervals.data) asked &= int32_t(in_intervals(span, i_head, i, j));
    if (m.bits.data) asked &= int32_t(has_bit(span, i_head, i, j));
    return full != 0 ? Shown::Full : asked != 0 ? Shown::Asked : Shown::No;
  }
};

}  // namespace fmha
