//! Parameters of the launches that convert a tensor to a format with scales by blocks.

use crate::abi::{AbiLiteral as _, AbiStruct as _, DevPtr, View};
use crate::args::QuantizeArgs;
use crate::block_scales::{BlockAxis, BlockFormat};
use crate::dtype::DType;
use crate::quantize::QuantizeProblem;
use crate::scale_params;
use crate::source::Header;
use crate::{abi_spec, abi_struct};

abi_spec! {
    /// Compile-time facts of a conversion.
    pub struct QuantizeSpec {
        /// Type of the numbers.
        pub dtype: DType,
        /// Format: `kMxfp8E4m3`, `kMxfp8E5m2` or `kNvfp4`.
        pub format: i32,
        /// Whether blocks lie along rows of the tensor, and not down its columns.
        pub along_dim: bool,
        /// Whether two rows share a byte, and not two neighbours in a row.
        pub pairs_of_rows: bool,
    }
}

impl QuantizeSpec {
    /// The compile-time facts of a conversion.
    #[must_use]
    pub fn of(problem: &QuantizeProblem) -> Self {
        Self {
            dtype: problem.dtype,
            format: scale_params::code(problem.format),
            along_dim: problem.axis == BlockAxis::Dim,
            pairs_of_rows: problem.format == BlockFormat::Nvfp4 && problem.pairs == BlockAxis::Rows,
        }
    }
}

/// Most groups of lanes that look for the largest magnitude of a tensor, each of which leaves one number.
pub const MOST_MAXIMA: u64 = 2048;

abi_struct! {
    /// Parameters of the launches of a conversion.
    pub struct QuantizeParams {
        /// The tensor to convert; strides in elements.
        pub x: View,
        /// Stored elements; strides in bytes.
        pub elements: View,
        /// Scales of blocks; strides in bytes.
        pub scales: View,
        /// The tensor's scale, which is read or written; null for a scale of 1.
        pub tensor_scale: DevPtr<f32>,
        /// Largest magnitudes of groups of lanes.
        pub maxima: DevPtr<f32>,
        /// Number of sequences.
        pub batch: i32,
        /// Number of rows of a sequence.
        pub seqlen: i32,
        /// Number of heads.
        pub num_heads: i32,
        /// Number of elements of a row.
        pub dim: i32,
        /// Number of groups of lanes, each of which writes a largest magnitude.
        pub num_maxima: i32,
        /// Padding, which is 0.
        pub reserved: i32,
    }
}

/// The argument of a conversion's launches, whose maxima lie at an address. `args` have passed
/// [`check_quantize`](crate::args::check_quantize).
#[must_use]
pub fn quantize_params(
    problem: &QuantizeProblem,
    args: &QuantizeArgs<'_>,
    (maxima, num_maxima): (u64, u64),
) -> QuantizeParams {
    let view = |address: u64, strides| View::new(address, strides, false);
    let scale = match (&args.tensor_scale, &args.written_scale) {
        (Some(given), _) => given.as_ptr() as u64,
        (None, Some(written)) => written.as_mut_ptr() as u64,
        (None, None) => 0,
    };
    let shape = problem.shape;
    QuantizeParams {
        x: view(args.x.as_ptr() as u64, problem.x),
        elements: view(args.elements.as_mut_ptr() as u64, problem.elements),
        scales: view(args.scales.as_mut_ptr() as u64, problem.scales),
        tensor_scale: DevPtr::new(scale),
        maxima: DevPtr::new(maxima),
        batch: shape.batch.cast_signed(),
        seqlen: shape.seq.cast_signed(),
        num_heads: shape.head.cast_signed(),
        dim: shape.dim.cast_signed(),
        num_maxima: num_maxima as i32,
        reserved: 0,
    }
}

/// `fmha/quantize_params.h`: what this file shares with the device.
#[must_use]
pub fn header() -> Header {
    let definitions = [QuantizeSpec::c_definition(), QuantizeParams::c_definition()];
    let includes = ["fmha/spec.h", "fmha/block_scale_params.h"];
    Header::shared("fmha/quantize_params.h", "fmha", &includes, &definitions)
}
