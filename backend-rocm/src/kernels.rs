//! AMD's seat: its driver, its compiler, and the recipes of `fmha-kernels-hip`.

use fmha_core::{ValidBwd, ValidCombine, ValidFwd};
use fmha_gpu::{BwdKernel, CombineKernel, Family, FwdKernel, Ranges, Vendor};
use fmha_kernels_hip::{DeviceFacts, recipes};

use crate::Installed;
use crate::driver::{Driver, search};

/// AMD's seat.
pub(crate) struct Rocm;

impl Vendor for Rocm {
    const KIND: &'static str = "rocm";

    type Driver = Driver;
    type Toolchain = Installed;
    type Facts = DeviceFacts;

    fn ranges() -> Ranges {
        if cfg!(feature = "roctx") { roctx() } else { Ranges::default() }
    }
}

/// ROCTx's functions, by which rocprofv3 is told; rocprof's own library of older ROCm has them too.
fn roctx() -> Ranges {
    // SAFETY: ROCTx's functions of these names take a text, or nothing, and return an int.
    unsafe { Ranges::open(search::roctx(), c"roctxRangePushA", c"roctxRangePop") }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roctxs_functions_are_in_its_library_where_that_is_installed() {
        match search::roctx().into_iter().find(|path| path.is_file()) {
            Some(path) => assert!(roctx().are_there(), "{}", path.display()),
            None => println!("absent: ROCTx: no function was looked for"),
        }
    }
}
