//! What the forward kernels, `cdna_fwd` and `rdna_fwd`, have in common: what they take, what a launch reads, and the recipe
//! ([`recipe`]).

pub(crate) mod recipe;

use fmha_core::abi::FwdParams;
use fmha_core::{Bias, DType, FwdArgs, FwdProblem, ProblemError, Refusal, check_addresses};

use crate::arch::Arch;
use crate::device::refuse;
use crate::{CdnaParams, StorePath};

pub(crate) const MAX_HEAD_DIM: u32 = 256;

/// That the architecture's matrix instructions have the problem's types, and that its tensors are as both kernels read them.
///
/// # Errors
/// The field that `kernel` does not take, and its number.
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

/// What a launch reads.
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

/// That the operands of a tile kernel, forward, begin where its loads (so many bytes each) and its stores do.
///
/// # Errors
/// The operand, its address and the alignment that it lacks.
pub(crate) fn takes_addresses(
    kernel: &str,
    (load, store): (u64, StorePath),
    problem: &FwdProblem,
    args: &FwdArgs<'_>,
) -> Result<(), ProblemError> {
    let store = if store == StorePath::Element { 1 } else { 4 * problem.dtypes.o.size_bytes() };
    let operands = [
        ("q", args.q.as_ptr() as u64, load, true),
        ("k", args.k_slice().as_ptr() as u64, load, true),
        ("v", args.v_slice().as_ptr() as u64, load, true),
        ("o", args.o.as_mut_ptr() as u64, store, true),
    ];
    check_addresses(kernel, operands)
}
