//! Scales by blocks as kernel parameters: an argument of its own, present only in launches with such scales.

use crate::abi::{AbiStruct as _, View};
use crate::abi_struct;
use crate::args::{DevSlice, ScoreArgs};
use crate::block_scales::BlockFormat;
use crate::layout::{QLayout, Strides, VLayout};
use crate::problem::FwdProblem;
use crate::source::Header;

abi_struct! {
    /// Kernel argument with the scales of a call in MXFP8 or NVFP4, where each block of 32 or 16 elements has a
    /// scale.
    pub struct BlockScaleParams {
        /// Scales of Q's blocks; strides in bytes.
        pub q: View,
        /// Scales of K's blocks; strides in bytes.
        pub k: View,
        /// Scales of V's blocks; strides in bytes. A row of the view is a block of keys.
        pub v: View,
        /// Format of elements and scales: `kMxfp8E4m3`, `kMxfp8E5m2` or `kNvfp4`.
        pub format: i32,
        /// Whether the two elements of V in a byte belong to two keys, instead of being neighbours in a row.
        pub pairs_of_keys: i32,
    }
}

/// A format's number on the device.
pub(crate) fn code(format: BlockFormat) -> i32 {
    match format {
        BlockFormat::Mxfp8E4m3 => 1,
        BlockFormat::Mxfp8E5m2 => 2,
        BlockFormat::Nvfp4 => 3,
    }
}

/// The kernel argument for a call's scales; `None` without scales by blocks. `args` have passed the check of their
/// call.
#[must_use]
pub fn block_scale_params(problem: &FwdProblem, args: &ScoreArgs<'_>) -> Option<BlockScaleParams> {
    let scales = problem.block_scales?;
    let view = |slice: Option<DevSlice<'_>>, strides: Strides, packed| {
        View::new(slice.map_or(0, |slice| slice.as_ptr() as u64), strides, packed)
    };
    let [q, k, v] = args.block_scales();
    Some(BlockScaleParams {
        q: view(q, scales.q, problem.layout.q == QLayout::Packed),
        k: view(k, scales.k, false),
        v: view(v, scales.v, false),
        format: code(scales.format),
        pairs_of_keys: i32::from(scales.format.elems_per_byte() > 1 && problem.layout.v == VLayout::ColMajor),
    })
}

/// `fmha/block_scale_params.h`: the types that this file shares with the device.
#[must_use]
pub fn header() -> Header {
    let names = [
        ("kMxfp8E4m3", BlockFormat::Mxfp8E4m3),
        ("kMxfp8E5m2", BlockFormat::Mxfp8E5m2),
        ("kNvfp4", BlockFormat::Nvfp4),
    ];
    let codes =
        names.map(|(name, format)| format!("constexpr int32_t {name} = {};\n", code(format))).concat();
    let definitions = [codes, BlockScaleParams::c_definition()];
    Header::shared("fmha/block_scale_params.h", "fmha", &["fmha/params.h"], &definitions)
}
