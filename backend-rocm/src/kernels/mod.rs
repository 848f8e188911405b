//! The kernels: each file has what it accepts, its tile, its entry, its grid.

pub(crate) mod cdna;
pub(crate) mod combine;
pub(crate) mod simt;

use std::sync::Arc;

use fmha_core::Refusal;

use crate::driver::Function;

/// A compiled kernel, loaded where there is a device.
pub(crate) struct Compiled {
    pub(crate) code: Arc<[u8]>,
    pub(crate) origin: fmha_core::cache::Origin,
    pub(crate) function: Option<Function>,
}

macro_rules! refuse {
    ($kernel:expr, $($reason:tt)+) => {
        return Err(fmha_core::Refusal::new($kernel, format!($($reason)+)))
    };
}
pub(crate) use refuse;

/// `name=value` of `PlanOptions::tile` as a number.
pub(crate) fn number(kernel: &str, name: &str, value: &str) -> Result<i32, Refusal> {
    value.parse().map_err(|_| Refusal::new(kernel, format!("tile {name}={value} is not a number")))
}
