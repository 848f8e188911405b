//! What problems the kernels take.

use fmha_core::{BwdProblem, DType, Refusal, Shape, Strides, VLayout};

use super::NAME;

/// Whether the kernels compute this problem, and if not, why. Addresses, which a problem has not, must be multiples of
/// 16.
///
/// # Errors
/// The first fact that they do not take.
pub fn accepts(problem: &BwdProblem) -> Result<(), Refusal> {
    takes(problem, NAME)
}

/// The same of any kernel of 16-bit products whose operands come by TMA, in its name.
pub(crate) fn takes(problem: &BwdProblem, name: &'static str) -> Result<(), Refusal> {
    let refuse = |reason: String| Err(Refusal::new(name, reason));
    problem.fwd.refuse_dropout_between_quads(name)?;
    let fwd = &problem.fwd;
    let (qk, v) = (fwd.dtypes.qk, fwd.dtypes.v);
    if qk.is_fp8() || v.is_fp8() {
        return refuse(format!("backward: dtype_qk {qk} with dtype_v {v}: its products are of 16-bit types"));
    }
    if !matches!(qk, DType::F16 | DType::Bf16) || v != qk || fwd.dtypes.o != qk {
        return refuse(format!(
            "backward: dtype_qk {qk}, dtype_v {v}, dtype_o {} are not three times f16 or three times bf16",
            fwd.dtypes.o
        ));
    }
    let dims = fwd.dims;
    for (field, dim) in [("head_dim_qk", dims.head_dim_qk), ("head_dim_v", dims.head_dim_v)] {
        if dim > 256 {
            return refuse(format!("backward: {field} {dim} is larger than 256"));
        }
    }
    if fwd.layout.v == VLayout::ColMajor {
        return refuse("backward: v_layout col-major: its products read V along its rows".to_owned());
    }
    for (field, length) in [("seqlen_q", dims.seqlen_q), ("seqlen_k", dims.seqlen_k)] {
        if length >= 1 << 29 {
            return refuse(format!("backward: {field} {length} is not below 2^29"));
        }
    }
    let read = [
        ("q", fwd.strides.q, fwd.shape_q()),
        ("k", fwd.strides.k, fwd.shape_k()),
        ("v", fwd.strides.v, fwd.shape_v()),
        ("dout", problem.dout, fwd.shape_o()),
    ];
    for (name, strides, shape) in read {
        if let Some((axis, stride)) = odd_stride(strides, shape) {
            return refuse(format!(
                "backward: {name}.{axis} stride {stride} is not a multiple of 8 below 2^39, as TMA needs"
            ));
        }
    }
    Ok(())
}

/// The first stride in use that is no whole number of 16 bytes of a 16-bit type, or too large for TMA.
pub(crate) fn odd_stride(strides: Strides, shape: Shape) -> Option<(&'static str, i64)> {
    [
        ("batch", strides.batch, shape.batch),
        ("seq", strides.seq, shape.seq),
        ("head", strides.head, shape.head),
    ]
    .into_iter()
    .find(|&(_, stride, extent)| extent > 1 && (stride % 8 != 0 || stride >= 1 << 39))
    .map(|(axis, stride, _)| (axis, stride))
}
