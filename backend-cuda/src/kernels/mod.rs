//! NVIDIA's part of the generic backend: its driver, its compiler, and the recipes of `fmha-kernels-cuda`.

#[cfg(test)]
pub(crate) mod tests;

use fmha_core::sparse::{ValidChoose, ValidIndexLoss};
use fmha_core::{ValidBwd, ValidCombine, ValidFwd};
use fmha_gpu::{Ranges, Recipe, Vendor};
use fmha_kernels_cuda::nvidia::DeviceFacts;
use fmha_kernels_cuda::recipes;

use crate::Nvrtc;
use crate::driver::Device;
use crate::search::libraries;

/// NVIDIA as a vendor of the generic GPU backend.
pub(crate) struct Cuda;

impl Vendor for Cuda {
    const KIND: &'static str = "cuda";

    type Driver = Device;
    type Toolchain = Nvrtc;
    type Facts = DeviceFacts;

    fn ranges() -> Ranges {
        if cfg!(feature = "nvtx") { nvtx() } else { Ranges::default() }
    }

    fn forward() -> Vec<Recipe<ValidFwd, Self>> {
        recipes::forward()
    }

    fn backward() -> Vec<Recipe<ValidBwd, Self>> {
        recipes::backward()
    }

    fn combine() -> Vec<Recipe<ValidCombine, Self>> {
        recipes::combine()
    }

    fn choose() -> Vec<Recipe<ValidChoose, Self>> {
        recipes::choose()
    }

    fn index_loss() -> Vec<Recipe<ValidIndexLoss, Self>> {
        recipes::index_loss()
    }
}

/// NVTX's libraries: that of CUDA 12.9 and later, then that of earlier versions. Both pass ranges to the profiler
/// that started the process.
const NVTX: [&str; 2] = ["libnvtx3interop.so.1", "libnvToolsExt.so.1"];

fn nvtx() -> Ranges {
    let places = libraries(&NVTX);
    // SAFETY: NVTX's functions of these names take a text, or nothing, and return an int.
    unsafe { Ranges::open(places, c"nvtxRangePushA", c"nvtxRangePop") }
}
