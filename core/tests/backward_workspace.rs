//! Layout of a backward call's workspace, and the number of rows that `fmha/row_bwd.h` computes one by one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use fmha_core::abi::View;
use fmha_core::bwd_workspace::{BwdRows, BwdWorkspace, DqSums};
use fmha_core::{
    Bias, BiasBroadcast, BiasGrad, BwdProblem, DType, Dims, ElementwiseBias, FwdProblem, KvLayout, QLayout,
    Strides, bind,
};

use support::bwd_args;

const DIMS: Dims = Dims::batch(3).seqlens(70, 9).heads(4, 2).head_dim(8);

#[test]
fn each_part_is_bound_behind_the_one_before() {
    let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, DIMS));
    let params = bind::bwd_params(&problem, &bwd_args());
    let workspace =
        |sums: Option<DqSums>| BwdWorkspace::new(&problem, 64, sums, 5).unwrap().bind(params, 1 << 20);
    // Each of 3 sequences with 4 heads has two blocks of 64 rows.
    let (rows, start) = (128 * 3 * 4, 1 << 20);
    let whole = workspace(Some(DqSums { dim: 8, parts: 1, has_semaphores: true }));
    assert_eq!((whole.schedulers.0, whole.lse_log2.0), (start, start + 256));
    let delta = start + 256 + rows * 4;
    let behind_stats = delta + 2 * rows * 4;
    assert_eq!((whole.delta.0, whole.score_origin.0), (delta, delta + rows * 4));
    assert_eq!(whole.dq_sums.0, behind_stats);
    let semaphores = behind_stats + rows * 8 * 4;
    assert_eq!((whole.dq_semaphores.0, whole.non_finite.0), (semaphores, semaphores + rows / 64 * 4));
    assert_eq!((whole.stats_batch, whole.stats_head), (128, 128 * 3));
    let bare = workspace(None);
    assert_eq!((bare.dq_sums.0, bare.dq_semaphores.0, bare.non_finite.0), (0, 0, behind_stats));
}

#[test]
fn a_gradient_of_a_bias_is_bound_with_the_axes_that_the_bias_has() {
    let strides = Strides { batch: 60, seq: 5, head: 15, dim: 1 };
    for (broadcast, axes, batch, head) in [
        (BiasBroadcast::OneOne, (0, 0), 0, 0),
        (BiasBroadcast::OneHead, (0, 1), 0, 15),
        (BiasBroadcast::BatchOne, (1, 0), 60, 0),
        (BiasBroadcast::BatchHead, (1, 1), 60, 15),
    ] {
        let mut problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, DIMS));
        problem.fwd.score.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides });
        problem.dbias = Some(BiasGrad { dtype: DType::F32, strides });
        let bound = bind::bwd_params(&problem, &bwd_args());
        assert_eq!((bound.dbias_per_batch, bound.dbias_per_head), axes, "{broadcast:?}");
        assert_eq!((bound.dbias.batch, bound.dbias.head), (batch, head), "{broadcast:?}");
        assert_eq!((bound.dbias.row, bound.dbias.dim), (5, 1), "{broadcast:?}");
        problem.dbias = None;
        let bound = bind::bwd_params(&problem, &bwd_args());
        assert_eq!((bound.dbias, bound.dbias_per_batch, bound.dbias_per_head), (View::NULL, 0, 0));
    }
}

#[test]
fn packed_operands_are_bound_without_an_axis_of_sequences() {
    let batches = |problem: &BwdProblem| {
        let bound = bind::bwd_params(problem, &bwd_args());
        let fwd = &bound.fwd;
        let of_queries = [fwd.q.batch, fwd.o.batch, bound.dout.batch, bound.dq.batch, fwd.lse_batch];
        (of_queries, [fwd.k.batch, fwd.v.batch, bound.dk.batch, bound.dv.batch])
    };
    let (of_q, of_k) = (70 * 4 * 8, 9 * 2 * 8);
    let batch = BwdProblem::new(FwdProblem::batch(DType::Bf16, DIMS));
    assert_eq!(batches(&batch), ([of_q, of_q, of_q, of_q, 4 * 70], [of_k; 4]));
    let mut mixed = batch;
    mixed.fwd.layout.q = QLayout::Packed;
    assert_eq!(batches(&mixed), ([0; 5], [of_k; 4]));
    mixed.fwd.layout.kv = KvLayout::Packed;
    assert_eq!(batches(&mixed), ([0; 5], [0; 4]));
}

#[test]
fn rows_are_counted_by_what_is_written() {
    let mut problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, DIMS));
    let rows = BwdRows::of(&problem);
    assert_eq!((rows.queries, rows.keys, rows.bias, rows.sinks), (840, 54, 0, 0));
    assert_eq!(rows.all(), 894);
    let shape = problem.fwd.shape_bias(BiasBroadcast::OneHead);
    let strides = Strides::bhsd(shape);
    problem.fwd.score.bias =
        Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast: BiasBroadcast::OneHead, strides });
    problem.dbias = Some(BiasGrad { dtype: DType::F32, strides });
    problem.write_dsink = true;
    let rows = BwdRows::of(&problem);
    assert_eq!((rows.bias, rows.sinks), (4 * 70, 4));
    assert_eq!(rows.all(), 840 + 54 + 280 + 4);
}
