//! Number formats and functions of the hardware, written for whole arrays of lanes.

pub(crate) mod bf16;
pub(crate) mod f16;
pub(crate) mod fp8;
pub(crate) mod func;
