//! Parameters of the launch that converts Q, K and V with scales by blocks to plain numbers.

use crate::abi::{AbiLiteral as _, AbiStruct as _, View};
use crate::block_scales::BlockFormat;
use crate::dtype::DType;
use crate::layout::VLayout;
use crate::problem::FwdProblem;
use crate::scale_params;
use crate::source::Header;
use crate::{abi_spec, abi_struct};

/// Number of columns of a row that one lane writes. Rows of values are padded to a multiple of it.
pub const VALUE_COLUMNS: u32 = 16;

abi_spec! {
    /// Compile-time facts of the launch that writes values.
    pub struct BlockValuesSpec {
        /// Type of the values.
        pub dtype: DType,
        /// `kMxfp8E4m3`, `kMxfp8E5m2` or `kNvfp4`.
        pub format: i32,
        /// Whether the two elements of V in a byte belong to two keys.
        pub pairs_of_keys: bool,
    }
}

impl BlockValuesSpec {
    /// The compile-time facts of a problem's values; `None` without scales by blocks.
    #[must_use]
    pub fn of(problem: &FwdProblem) -> Option<Self> {
        let format = problem.block_scales?.format;
        Some(Self {
            dtype: problem.dtypes.qk,
            format: scale_params::code(format),
            pairs_of_keys: format == BlockFormat::Nvfp4 && problem.layout.v == VLayout::ColMajor,
        })
    }
}

abi_struct! {
    /// Where values are written. Strides count values; a row has whole pieces of `VALUE_COLUMNS` columns, with zeros
    /// past its head dimension.
    pub struct BlockValuesParams {
        /// Where the values of Q are written.
        pub q: View,
        /// Where the values of K are written.
        pub k: View,
        /// Where the values of V are written, row-major.
        pub v: View,
        /// Number of elements of a row of Q and K.
        pub head_dim_qk: i32,
        /// Number of elements of a row of V.
        pub head_dim_v: i32,
    }
}

/// `fmha/block_values_params.h`: what this file shares with the device.
#[must_use]
pub fn header() -> Header {
    let columns = crate::abi::c_constant("kValueColumns", VALUE_COLUMNS);
    let definitions = [columns, BlockValuesSpec::c_definition(), BlockValuesParams::c_definition()];
    let includes = ["fmha/spec.h", "fmha/block_scale_params.h"];
    Header::shared("fmha/block_values_params.h", "fmha", &includes, &definitions)
}
