// Reads where a sequence lies, and its lengths, into scalar registers.
#pragma once
#include <fmha/isa/lane.h>
#include <fmha/seq.h>

namespace fmha::cdna {

FMHA_DEVICE SeqSpan uniform(SeqSpan span) {
  return {v_readfirstlane_b32(span.i_batch), v_readfirstlane_b32(span.storage_batch),
          v_readfirstlane_b32(span.q_row),   v_readfirstlane_b32(span.seqlen_q),
          v_readfirstlane_b32(span.k_row),   v_readfirstlane_b32(span.seqlen_k)};
}

}  // namespace fmha::cdna
