//! AMD's part of the generic backend: its driver, its compiler, and the recipes of `fmha-kernels-hip`.

use fmha_core::sparse::{ValidChoose, ValidIndexLoss};
use fmha_core::{ValidBwd, ValidCombine, ValidFwd};
use fmha_gpu::{Ranges, Recipe, Vendor};
use fmha_kernels_hip::{DeviceFacts, recipes};

use crate::Installed;
use crate::driver::{Driver, search};

/// AMD as a vendor of the generic GPU backend.
pub(crate) struct Rocm;

impl Vendor for Rocm {
    const KIND: &'static str = "rocm";

    type Driver = Driver;
    type Toolchain = Installed;
    type Facts = DeviceFacts;

    fn ranges() -> Ranges {
        if cfg!(feature = "roctx") { roctx() } else { Ranges::default() }
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

/// Functions of ROCTx, whose ranges rocprofv3 reads; in older ROCm rocprof's own library has them too.
fn roctx() -> Ranges {
    // SAFETY: ROCTx's functions of these names take a text, or nothing, and return an int.
    unsafe { Ranges::open(search::roctx(), c"roctxRangePushA", c"roctxRangePop") }
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
