//! Choices of this backend's recipes, on devices with NVIDIA's data sheet numbers. Nothing is compiled or run.

mod backward;
mod choice;
mod forward;
mod operands;
mod tile;

use fmha_core::{
    Bias, BiasBroadcast, DType, Dims, ElementwiseBias, FwdProblem, PlanOptions, Refusal, Strides,
};
use fmha_gpu::{Choice, GpuProblem, Kernel};
use fmha_kernels_cuda::nvidia::DeviceFacts;

use super::{Cuda, NVTX, nvtx};
use crate::search::libraries;

/// The choice of a kernel for a problem, or its refusal.
fn choose<K: Kernel<P, Cuda>, P: GpuProblem>(
    problem: &P,
    facts: &DeviceFacts,
    options: &PlanOptions,
) -> Result<Choice<K>, Refusal> {
    K::choose(problem, facts, options)
}

/// A problem of `seqlens` with `heads` query and kv heads, dimension `dim`, bf16.
pub(crate) fn of_lengths(seqlens: [u32; 2], heads: [u32; 2], dim: u32, mask: &str) -> FwdProblem {
    let dims = Dims::batch(1).seqlens(seqlens[0], seqlens[1]).heads(heads[0], heads[1]).head_dim(dim);
    FwdProblem::batch(DType::Bf16, dims).mask(mask.parse().unwrap())
}

/// Adds a bf16 bias for each head, with rows `row` elements apart.
fn biased(mut problem: FwdProblem, row: i64) -> FwdProblem {
    let rows = i64::from(problem.dims.seqlen_q);
    let strides = Strides { batch: 0, head: rows * row, seq: row, dim: 1 };
    let broadcast = BiasBroadcast::OneHead;
    problem.score.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::Bf16, broadcast, strides });
    problem
}

fn stated(arch: &str) -> DeviceFacts {
    DeviceFacts::stated(arch).unwrap()
}

fn tile(words: &str) -> PlanOptions {
    PlanOptions::default().tile(words.split(',').filter_map(|pair| pair.split_once('=')))
}

fn detail<K>(choice: &Choice<K>, name: &str) -> Option<String> {
    choice.details.iter().find(|(known, _)| *known == name).map(|(_, words)| words.clone())
}

/// The problem of `of_lengths` in FP8, with O in bf16.
fn in_fp8(seqlens: [u32; 2], heads: [u32; 2], dim: u32) -> FwdProblem {
    let dims = of_lengths(seqlens, heads, dim, "0").dims;
    FwdProblem::batch(DType::E4m3Fn, dims).dtype_o(DType::Bf16)
}

#[test]
fn nvtxs_functions_are_in_its_library_where_that_is_installed() {
    match libraries(&NVTX).into_iter().find(|path| path.is_file()) {
        Some(path) => assert!(nvtx().are_there(), "{}", path.display()),
        None => println!("absent: {}: no function was looked for", NVTX.join(", ")),
    }
}
