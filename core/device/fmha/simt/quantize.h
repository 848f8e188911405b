// Runs `fmha/quantize.h` on a vendor's lanes: it finds a tensor's largest magnitude, its scale, and converts its
// blocks.
#pragma once
#include <fmha/quantize.h>
#include <fmha/simt/lanes.h>

namespace fmha::simt {

template <QuantizeSpec spec>
FMHA_DEVICE void quantize_maxima(const QuantizeParams& p) {
  for_each_row(p.num_maxima, [&](int64_t at) { quantize::Quantize<spec>{p}.template maximum<Lanes>(at); });
}

template <QuantizeSpec spec>
FMHA_DEVICE void quantize_scale(const QuantizeParams& p) {
  for_each_row(1, [&](int64_t) { quantize::Quantize<spec>{p}.template write_scale<Lanes>(); });
}

template <QuantizeSpec spec>
FMHA_DEVICE void quantize_blocks(const QuantizeParams& p) {
  const quantize::Quantize<spec> of = {p};
  for_each_element(of.num_units(), [&](int64_t unit) { of.convert_unit(unit); });
}

}  // namespace fmha::simt
