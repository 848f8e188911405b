//! NVIDIA's seat: its driver, its compiler, and the recipes of `fmha-kernels-cuda`.

#[cfg(test)]
pub(crate) mod tests;

use fmha_core::{ValidBwd, ValidCombine, ValidFwd};
use fmha_gpu::{BwdKernel, CombineKernel, Family, FwdKernel, Vendor};
use fmha_kernels_cuda::nvidia::DeviceFacts;
use fmha_kernels_cuda::recipes;

use crate::Nvrtc;
use crate::driver::Device;

/// NVIDIA's seat.
pub(crate) struct Cuda;

impl Vendor for Cuda {
    const KIND: &'static str = "cuda";

    type Driver = Device;
    type Toolchain = Nvrtc;
    type Facts = DeviceFacts;
}

impl Family<ValidFwd> for Cuda {
    fn recipes() -> Vec<FwdKernel<Self>> {
        recipes::forward()
    }
}

impl Family<ValidBwd> for Cuda {
    fn recipes() -> Vec<BwdKernel<Self>> {
        recipes::backward()
    }
}

impl Family<ValidCombine> for Cuda {
    fn recipes() -> Vec<CombineKernel<Self>> {
        recipes::combine()
    }
}
