//! Problems that the kernel takes.

use fmha_core::{Bias, DType, FwdProblem, Refusal, Strides, VLayout};

use super::NAME;
use crate::operands::{
    has_odd_pages, keys_of_v_begin_anywhere, odd_stride, refuse_faint_alibi, refuse_long_sequences,
};
use crate::tile_list;

/// Refusals common to Hopper's and Blackwell's kernels, in the name of `kernel`.
///
/// # Errors
/// The first fact that the kernel does not support.
pub(crate) fn takes(problem: &FwdProblem, kernel: &'static str) -> Result<(), Refusal> {
    let refuse = |reason: String| Err(Refusal::new(kernel, reason));
    problem.refuse_dropout_between_quads(kernel)?;
    let (qk, v) = (problem.dtypes.qk, problem.dtypes.v);
    let wide = |dtype| matches!(dtype, DType::F16 | DType::Bf16);
    let fp8 = |dtype| matches!(dtype, DType::E4m3Fn | DType::E5m2);
    if !(wide(qk) && v == qk || fp8(qk) && (fp8(v) || wide(v))) {
        return refuse(format!(
            "dtype_qk {qk} with dtype_v {v} is not one 16-bit type, OCP FP8, or OCP FP8 with a 16-bit V"
        ));
    }
    let dims = problem.dims;
    for (field, dim) in [("head_dim_qk", dims.head_dim_qk), ("head_dim_v", dims.head_dim_v)] {
        if dim > 256 {
            return refuse(format!("{field} {dim} is larger than 256"));
        }
    }
    if problem.dropout.write_keep_mask {
        return refuse("write_keep_mask: it skips the blocks that the mask hides".to_owned());
    }
    refuse_long_sequences(problem, kernel)
}

/// Checks that the kernel computes this problem. A problem has no addresses; these must be multiples of 16.
///
/// # Errors
/// The first fact that the kernel does not support.
pub fn accepts(problem: &FwdProblem) -> Result<(), Refusal> {
    let refuse = |reason: String| Err(Refusal::new(NAME, reason));
    // Lists of tiles are only made for keys that are not in pages.
    if !problem.layout.kv.is_paged() || tile_list::serve(problem) {
        problem.refuse_mixed_layouts(NAME)?;
    }
    takes_cache(problem)?;
    takes(problem, NAME)?;
    tile_list::refuse(problem, NAME)?;
    refuse_faint_alibi(problem, NAME)?;
    if keys_of_v_begin_anywhere(problem) {
        return refuse(
            "v_layout col-major with packed keys: those of a sequence begin at any element, boxes of TMA at multiples of 16 bytes"
                .to_owned(),
        );
    }
    let is_paged = problem.layout.kv.is_paged();
    if is_paged && problem.layout.v == VLayout::ColMajor {
        return refuse("v_layout col-major with pages: it is read along its rows".to_owned());
    }
    if let Some(page_size) = problem.layout.kv.page_size().filter(|_| has_odd_pages(problem, LEAST_BLOCK))
        && problem.dtypes.qk.is_fp8()
    {
        return refuse(format!(
            "dtype_qk {} with page_size {page_size}: FP8 comes by TMA, whose boxes are whole lines of 8 rows",
            problem.dtypes.qk
        ));
    }
    let can_copy = problem.layout.v == VLayout::RowMajor && !problem.dtypes.qk.is_fp8();
    if let (Some((name, axis, stride, multiple)), false) = (odd_stride(problem), can_copy) {
        return refuse(format!(
            "{name}.{axis} stride {stride} is not a multiple of {multiple} below 2^40 bytes, as TMA needs, which \
             alone loads FP8 and a column-major V"
        ));
    }
    Ok(())
}

/// Refuses cache updates, and FP8 caches under 16-bit queries that TMA cannot load in whole words.
fn takes_cache(problem: &FwdProblem) -> Result<(), Refusal> {
    let Some(cache) = problem.cache.dtype else { return problem.refuse_cache_updates(NAME) };
    let refuse = |reason: String| Err(Refusal::new(NAME, reason));
    let mut read = problem.clone();
    read.cache.dtype = None;
    read.refuse_cache_updates(NAME)?;
    if !matches!(cache, DType::E4m3Fn | DType::E5m2) {
        return refuse(format!("dtype_cache {cache} is not one of the 2 OCP types"));
    }
    if problem.layout.v == VLayout::ColMajor {
        return refuse(format!("dtype_cache {cache} with v_layout col-major: it is widened along its rows"));
    }
    if tile_list::serve(problem) {
        return refuse(format!("dtype_cache {cache} beside masks, of which it has lists in 16 bits"));
    }
    for (field, dim) in [("head_dim_qk", problem.dims.head_dim_qk), ("head_dim_v", problem.dims.head_dim_v)] {
        if dim % 16 != 0 {
            return refuse(format!("dtype_cache {cache} with {field} {dim}: rows are not whole words of 16"));
        }
    }
    if let Some((name, axis, stride, multiple)) = odd_stride(problem) {
        return refuse(format!(
            "dtype_cache {cache} with {name}.{axis} stride {stride}, which is not a multiple of {multiple} below 2^40"
        ));
    }
    if has_odd_pages(problem, LEAST_BLOCK) {
        return refuse(format!(
            "dtype_cache {cache} in pages of {} keys: boxes of TMA are whole lines of 8 rows",
            problem.layout.kv.page_size().unwrap_or(0)
        ));
    }
    Ok(())
}

/// Keys of the smallest block; all other blocks are multiples.
const LEAST_BLOCK: i32 = 16;

/// Whether TMA can load the pages of a problem that the kernel [`accepts`]: pages with a multiple of 8 rows, at
/// strides that are multiples of 16 bytes. Other pages are copied by three warps row by row, with a table look-up
/// for each row, which was never measured.
#[must_use]
pub fn reads_pages_by_tma(problem: &FwdProblem) -> bool {
    problem.layout.kv.is_paged() && !has_odd_pages(problem, LEAST_BLOCK) && odd_stride(problem).is_none()
}

/// Whether, by default, the kernel reads a problem's keys where they lie.
pub(crate) fn reads_as_it_lies(problem: &FwdProblem) -> bool {
    accepts(problem).is_ok() && (!problem.layout.kv.is_paged() || reads_pages_by_tma(problem))
}

/// The first stride of an elementwise bias that TMA does not support, if there is one.
pub(crate) fn odd_bias_stride(problem: &FwdProblem) -> Option<(&'static str, i64)> {
    let Bias::Elementwise(bias) = problem.score.bias else {
        return None;
    };
    let shape = problem.shape_bias(bias.broadcast);
    let Strides { batch, seq, head, .. } = bias.strides;
    // The bias's tensor map has extent 1 for heads or sequences with stride 0, but it always has all rows.
    [("seq", seq, shape.seq, 1), ("head", head, shape.head, 0), ("batch", batch, shape.batch, 0)]
        .into_iter()
        .find(|&(_, stride, extent, least)| {
            extent > 1 && (stride < least || stride % 8 != 0 || stride >= 1 << 39)
        })
        .map(|(axis, stride, ..)| (axis, stride))
}
