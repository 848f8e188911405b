// Data type of O, which a call chooses at run time.
#pragma once
#include <fmha/cdna/tile.h>
#include <fmha/isa/hip.h>
#include <fmha/num.h>

namespace fmha::cdna {

template <DType dtype>
struct DTypeConstant {
  static constexpr DType value = dtype;
};

// Calls `body` with the type of O as a constant.
template <CdnaSpec spec, class Body>
FMHA_DEVICE void with_dtype_o(const CdnaParams& p, Body body) {
  const DType dtype = DType(p.dtype_o);
  if constexpr (spec.output != OutputKind::Wide && kArch == Arch::Gfx942) {
    if (dtype == DType::E4m3Fnuz) return body(DTypeConstant<DType::E4m3Fnuz>{});
    if (dtype == DType::E5m2Fnuz) return body(DTypeConstant<DType::E5m2Fnuz>{});
  }
  if constexpr (spec.output != OutputKind::Wide && (kArch == Arch::Gfx950 || kArch == Arch::Gfx1201)) {
    if (dtype == DType::E4m3Fn) return body(DTypeConstant<DType::E4m3Fn>{});
    if (dtype == DType::E5m2) return body(DTypeConstant<DType::E5m2>{});
  }
  if constexpr (spec.output != OutputKind::Fp8) {
    if (dtype == DType::F16) return body(DTypeConstant<DType::F16>{});
    if (dtype == DType::Bf16) return body(DTypeConstant<DType::Bf16>{});
    if (dtype == DType::F32) return body(DTypeConstant<DType::F32>{});
  }
}

}  // namespace fmha::cdna
