// Keys of one token in two caches, as kernels of tiles take them: those of the first, then those of the second.
#pragma once
#include <fmha/common/token_keys.cuh>
#include <fmha/two_caches.h>

namespace fmha {

using TwoCacheKeys = KeysOfToken<TwoCaches>;

}  // namespace fmha
