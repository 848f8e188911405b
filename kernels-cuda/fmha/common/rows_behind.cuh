// Rows of a tile beyond the end of a sequence.
#pragma once
#include <fmha/params.h>
#include <fmha/spec.h>

namespace fmha {

// Whether rows of a block beyond its sequence may hold another
// sequence's data or anything: TMA writes zeros only beyond the tensor.
template <BwdSpec spec>
FMHA_DEVICE bool has_rows_behind(const BwdParams& p) {
  constexpr bool is_strided = spec.fwd.q_layout == QLayout::Batch && spec.fwd.kv_layout == KvKind::Strided;
  return !is_strided || p.fwd.seqused_q || p.fwd.seqused_k;
}

}  // namespace fmha
