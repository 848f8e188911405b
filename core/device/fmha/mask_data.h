// Masks as data: key intervals, bits and block lists, which join by AND. Each is there where its pointer is not null.
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

  // Whether the first entries of a row of indices have the block. A count beyond the row's room is cut.
  static FMHA_DEVICE bool lists(const MaskTensor& counts, const MaskTensor& indices, int32_t most, int32_t batch,
                                int32_t head, int32_t row, int32_t block) {
    if (!counts.data) return false;
    const int32_t count = clamp(word(counts, batch, head, row, 0), 0, most);
    for (int32_t at = 0; at < count; ++at)
      if (word(indices, batch, head, row, at) == block) return true;
    return false;
  }

  // Endpoints that decrease count as the largest before them. E is not cut at seqlen_k, since no key lies there.
  FMHA_DEVICE bool in_intervals(const SeqSpan& span, int32_t i_head, int32_t i, int32_t j) const {
    const int32_t head = i_head / m.intervals_ratio, row = span.q_row + i;
    int32_t before = 0;
    for (int32_t at = 0; at < m.endpoints; at += 2) {
      const int32_t begin = max(word(m.intervals, span.storage_batch, head, row, at), before);
      if (j < begin) return false;
      before = max(word(m.intervals, span.storage_batch, head, row, at + 1), begin);
      if (j < before) return true;
    }
    return false;
  }

  FMHA_DEVICE bool has_bit(const SeqSpan& span, int32_t i_head, int32_t i, int32_t j) const {
    const int32_t bits = word(m.bits, span.storage_batch, i_head / m.bits_ratio, span.q_row + i, j / 32);
    return uint32_t(bits) >> (j % 32) & 1u;
  }

  // Whether query i sees key j. A block of the full list asks no other mask.
  FMHA_DEVICE bool sees(const SeqSpan& span, int32_t i_head, int32_t i, int32_t j) const {
    if (m.block_q != 0) {
      const int32_t head = i_head / m.lists_ratio, row = i / m.block_q, block = j / m.block_k;
      if (lists(m.full_kv_num_blocks, m.full_kv_indices, m.full_max_blocks, span.i_batch, head, row, block)) return true;
      if (!lists(m.kv_num_blocks, m.kv_indices, m.max_blocks, span.i_batch, head, row, block)) return false;
    }
    if (m.intervals.data && !in_intervals(span, i_head, i, j)) return false;
    return !m.bits.data || has_bit(span, i_head, i, j);
  }
};

}  // namespace fmha
