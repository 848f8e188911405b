//! AMD's seat: its driver, its compiler, and the recipes of `fmha-kernels-hip`.

use fmha_core::{ValidBwd, ValidCombine, ValidFwd};
use fmha_gpu::{BwdKernel, CombineKernel, Family, FwdKernel, Vendor};
use fmha_kernels_hip::{DeviceFacts, recipes};

use crate::Installed;
use crate::driver::Driver;

/// AMD's seat.
pub(crate) struct Rocm;

impl Vendor for Rocm {
    const KIND: &'static str = "rocm";

    type Driver = Driver;
    type Toolchain = Installed;
    type Facts = DeviceFacts;
}

impl Family<ValidFwd> for Rocm {
    fn recipes() -> Vec<FwdKernel<Self>> {
        recipes::forward()
    }
}

impl Family<ValidBwd> for Rocm {
    fn recipes() -> Vec<BwdKernel<Self>> {
        recipes::backward()
    }
}

impl Family<ValidCombine> for Rocm {
    fn recipes() -> Vec<CombineKernel<Self>> {
        recipes::combine()
    }
}
