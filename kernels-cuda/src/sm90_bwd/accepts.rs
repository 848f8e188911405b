//! Problems that the kernels take.

use fmha_core::{BwdProblem, Refusal, Shape, Strides, VLayout};

use super::NAME;
use crate::sm80_bwd;
use crate::tile_list;

/// Checks that the kernels compute this problem. Addresses, which are not part of a problem, must be multiples of
/// 16.
///
/// # Errors
/// The first fact that they do not support.
pub fn accepts(problem: &BwdProblem) -> Result<(), Refusal> {
    if problem.fwd.layout.v == VLayout::ColMajor {
        let reason = "backward: v_layout col-major: its products read V along its rows".to_owned();
        return Err(Refusal::new(NAME, reason));
    }
    takes(problem, NAME)?;
    let fwd = &problem.fwd;
    if tile_list::serve(fwd) || !fwd.code.is_empty() {
        takes_masks_and_code(problem, NAME)?;
    }
    Ok(())
}

/// Checks that the kernels support the problem's combination of masks as data, functions and other features.
/// Refusals carry `name`.
pub(crate) fn takes_masks_and_code(problem: &BwdProblem, name: &'static str) -> Result<(), Refusal> {
    let refuse = |words: String| {
        Err(Refusal::new(name, format!("backward: {words} beside masks as data or functions")))
    };
    let dims = problem.fwd.dims;
    let widest = dims.head_dim_qk.max(dims.head_dim_v);
    if widest > 128 {
        return refuse(format!("a head dimension of {widest}, more than 128,"));
    }
    if problem.dbias.is_some() {
        return refuse("dbias".to_owned());
    }
    if problem.fwd.arrivals > 0 {
        return refuse(format!("arrivals {}", problem.fwd.arrivals));
    }
    if let (Some(gradient), false) = (problem.dcaptured.first(), problem.fwd.masks.is_empty()) {
        return refuse(format!("the gradient of captured {}", gradient.name));
    }
    if !problem.fwd.masks.is_empty() && tile_list::reads_head(&problem.fwd) {
        return refuse("a mask as code that reads the head".to_owned());
    }
    Ok(())
}

/// Checks that a problem suits a kernel of 16-bit products whose operands TMA loads. Refusals carry `name`.
pub(crate) fn takes(problem: &BwdProblem, name: &'static str) -> Result<(), Refusal> {
    let refuse = |reason: String| Err(Refusal::new(name, reason));
    problem.fwd.refuse_dropout_between_quads(name)?;
    let fwd = &problem.fwd;
    let (qk, v) = (fwd.dtypes.qk, fwd.dtypes.v);
    if qk.is_fp8() || v.is_fp8() {
        return refuse(format!("backward: dtype_qk {qk} with dtype_v {v}: its products are of 16-bit types"));
    }
    sm80_bwd::takes_operands(problem).or_else(refuse)?;
    sm80_bwd::takes_lengths(problem).or_else(refuse)?;
    let read = [
        ("q", (fwd.strides.q, fwd.shape_q())),
        ("k", (fwd.strides.k, fwd.shape_k())),
        ("v", as_it_lies(fwd.layout.v, fwd.strides.v, fwd.shape_v())),
        ("dout", (problem.dout, fwd.shape_o())),
    ];
    for (name, (strides, shape)) in read {
        if let Some((axis, stride)) = odd_stride(strides, shape) {
            let turned = name == "v" && axis == "seq" && fwd.layout.v == VLayout::ColMajor;
            let axis = if turned { "dim" } else { axis };
            return refuse(format!(
                "backward: {name}.{axis} stride {stride} is not a multiple of 8 below 2^39, as TMA needs"
            ));
        }
    }
    Ok(())
}

/// Strides and extents of V in memory: rows and elements are exchanged if it is column-major.
pub(crate) fn as_it_lies(layout: VLayout, strides: Strides, shape: Shape) -> (Strides, Shape) {
    match layout {
        VLayout::RowMajor => (strides, shape),
        VLayout::ColMajor => (
            Strides { seq: strides.dim, dim: strides.seq, ..strides },
            Shape { seq: shape.dim, dim: shape.seq, ..shape },
        ),
    }
}

/// The first stride in use that is not a multiple of 16 bytes for a 16-bit type, or is too large for TMA.
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
