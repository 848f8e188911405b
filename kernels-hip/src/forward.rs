//! Common parts of the forward kernels `cdna_fwd` and `rdna_fwd`: supported problems, launch parameters, and the
//! recipe ([`recipe`]).

pub(crate) mod recipe;

use fmha_core::abi::{AbiLiteral as _, AbiStruct as _, FwdParams};
use fmha_core::masks::MaskDataParams;
use fmha_core::source::Header;
use fmha_core::{Bias, DType, FwdProblem, MaskKind, Refusal, VLayout, abi_enum, abi_spec, abi_struct};
use fmha_gpu::Operand;
use fmha_gpu::tile_list::TileList;

use crate::arch::Arch;
use crate::cdna::{CdnaTile, TileOrder};
use crate::device::refuse;
use crate::paths::{LoadPath, StorePath};

/// Which types of O a kernel can write; [`CdnaParams`] selects the call's type among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum OutputKind {
    /// O in f32, f16 or bf16.
    Wide,
    /// O in the FP8 types of the architecture.
    Fp8,
    /// Any of these types.
    Any,
}

abi_enum!(OutputKind { Wide, Fp8, Any });

abi_spec! {
    /// Compile-time spec of a forward kernel, on MFMA or WMMA: facts that change its main loop's instructions.
    /// Everything else of a problem is a run-time parameter.
    pub struct CdnaSpec {
        /// Type of Q and K.
        pub dtype_qk: DType,
        /// Type of V, and of P.
        pub dtype_v: DType,
        /// Type of O.
        pub output: OutputKind,
        /// Elements of a query's or key's row, padded to a multiple of 32.
        pub head_dim_qk: i32,
        /// Elements of a value's or output's row, padded to a multiple of 32.
        pub head_dim_v: i32,
        /// Which axis of V has stride 1.
        pub v_layout: VLayout,
        /// `Full`: no band. Any other value: the call's band, whose bounds are parameters.
        pub mask: MaskKind,
        /// Whether there may be sink columns.
        pub sink_columns: bool,
        /// Whether there may be a soft-cap, a bias or slopes.
        pub modifies: bool,
        /// Whether there may be dropout, or its mask to write.
        pub dropout: bool,
        /// Whether lists of tiles select the keys: with masks as data, and with a mask as code in addition.
        pub masks: bool,
    }
}

abi_struct! {
    /// Parameters of a forward kernel, on MFMA or WMMA.
    pub struct CdnaParams {
        /// Parameters that all forward kernels read.
        pub fwd: FwdParams,
        /// Elements of a query's or key's row.
        pub head_dim_qk: i32,
        /// Elements of a value's or output's row.
        pub head_dim_v: i32,
        /// Type of O, as a number of [`DType`].
        pub dtype_o: i32,
        /// Type of the elementwise bias, as a number of [`DType`].
        pub dtype_bias: i32,
        /// 1 if dropout sets probabilities to zero, otherwise 0.
        pub drops: i64,
    }
}

abi_struct! {
    /// Parameters of a forward kernel under masks as data (tensors).
    pub struct MaskedCdnaParams {
        /// Parameters of the kernel without masks.
        pub cdna: CdnaParams,
        /// The masks.
        pub masks: MaskDataParams,
        /// Lists of the tiles of keys that tiles of queries see.
        pub list: TileList,
    }
}

/// Whether scores are more than scaled products.
pub(crate) fn modifies_score(problem: &FwdProblem) -> bool {
    problem.score.softcap.is_some() || problem.score.bias != Bias::None || !problem.code.is_empty()
}

pub(crate) const MAX_HEAD_DIM: u32 = 256;

/// Checks that the architecture's matrix instructions support the problem's types, and that both kernels can read
/// its tensors' layouts.
///
/// # Errors
/// The field that `kernel` does not support, and its value.
pub(crate) fn takes(problem: &FwdProblem, arch: Arch, kernel: &'static str) -> Result<(), Refusal> {
    problem.refuse_mixed_layouts(kernel)?;
    problem.refuse_cache_updates(kernel)?;
    for (field, dtype) in [("dtype_qk", problem.dtypes.qk), ("dtype_v", problem.dtypes.v)] {
        if !arch.multiplies(dtype) {
            refuse!(kernel, "{field} {dtype} is no operand of {}'s matrix instructions", arch.name());
        }
    }
    if problem.dtypes.o.is_fp8() && !arch.multiplies(problem.dtypes.o) {
        refuse!(kernel, "dtype_o {} has no conversion on {}", problem.dtypes.o, arch.name());
    }
    let dims = problem.dims;
    for (field, dim) in [("head_dim_qk", dims.head_dim_qk), ("head_dim_v", dims.head_dim_v)] {
        if dim > MAX_HEAD_DIM {
            refuse!(kernel, "{field} {dim} is larger than {MAX_HEAD_DIM}");
        }
    }
    Ok(())
}

/// Parameters of a launch.
pub(crate) fn params(problem: &FwdProblem, fwd: &FwdParams) -> CdnaParams {
    let dtype_bias = match problem.score.bias {
        Bias::Elementwise(bias) => bias.dtype,
        Bias::None | Bias::Alibi { .. } => DType::F32,
    };
    CdnaParams {
        fwd: *fwd,
        head_dim_qk: problem.dims.head_dim_qk as i32,
        head_dim_v: problem.dims.head_dim_v as i32,
        dtype_o: problem.dtypes.o as i32,
        dtype_bias: dtype_bias as i32,
        drops: problem.drops().into(),
    }
}

/// Parameters of a kernel's entry.
pub(crate) fn entry_params(spec: &CdnaSpec) -> &'static str {
    if spec.masks { "MaskedCdnaParams p" } else { "CdnaParams p" }
}

/// The kernel's own argument among the entry's parameters.
pub(crate) fn entry_argument(spec: &CdnaSpec) -> &'static str {
    if spec.masks { "p.cdna" } else { "p" }
}

/// Required alignment of an operand's address for a forward tile kernel, in bytes, from the bytes of its
/// loads and the kind of its stores.
pub(crate) fn alignment(problem: &FwdProblem, operand: Operand, (load, store): (u64, StorePath)) -> u64 {
    // A quantised cache is read from the workspace, where it was converted, so its own address does not matter.
    let as_it_lies = problem.cache.dtype.is_none();
    match operand {
        Operand::Q => load,
        Operand::K | Operand::V if as_it_lies => load,
        Operand::O if store != StorePath::Element => 4 * problem.dtypes.o.size_bytes(),
        _ => 1,
    }
}

/// `fmha/cdna/tile.h`: the types that this file and `cdna_fwd`'s share with the device.
pub(crate) fn tile_header() -> Header {
    let definitions = [
        LoadPath::c_definition(),
        StorePath::c_definition(),
        OutputKind::c_definition(),
        TileOrder::c_definition(),
        CdnaSpec::c_definition(),
        CdnaTile::c_definition(),
        CdnaParams::c_definition(),
        MaskedCdnaParams::c_definition(),
    ];
    let includes = ["fmha/mask_data_params.h", "fmha/params.h", "fmha/spec.h", "fmha/tile_list.h"];
    Header::shared("fmha/cdna/tile.h", "fmha::cdna", &includes, &definitions)
}
