//! How a backward call is cut up.

use fmha_core::{
    BiasBroadcast, BiasGrad, BwdProblem, DType, DevSlice, DevSliceMut, Dims, ElementwiseBias, FwdProblem,
    ScoreArgs, SeqArgs, Strides,
};

use super::*;
use crate::isa::BACKWARD_BLOCKS;

const HEADS_KV: u32 = 3;
const RATIO: u32 = 2;

/// Tasks of sequences of these lengths, with dBias if `dbias`.
fn tasks(lengths: &[(u32, u32)], threads: usize, dbias: bool) -> Vec<Task> {
    let dims = Dims {
        batch: lengths.len() as u32,
        seqlen_q: 60,
        seqlen_k: 70,
        num_heads_q: RATIO * HEADS_KV,
        num_heads_kv: HEADS_KV,
        head_dim_qk: 8,
        head_dim_v: 8,
    };
    let mut fwd = FwdProblem::batch(DType::F32, dims);
    let broadcast = BiasBroadcast::BatchHead;
    let strides = Strides::bhsd(fwd.shape_bias(broadcast));
    if dbias {
        fwd.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides });
    }
    let mut problem = BwdProblem::new(fwd);
    problem.dbias = dbias.then_some(BiasGrad { dtype: DType::F32, strides });
    let problem = problem.validate().unwrap();
    let mut spans = fmha_core::seq::spans(problem.fwd(), &SeqArgs::default()).unwrap();
    for (span, &(seqlen_q, seqlen_k)) in spans.iter_mut().zip(lengths) {
        (span.seqlen_q, span.seqlen_k) = (seqlen_q, seqlen_k);
    }
    let from = DevSlice::host::<f32>(&[]);
    let to = || DevSliceMut::host::<f32>(&mut []);
    let args = BwdArgs {
        q: from,
        k: from,
        v: from,
        o: from,
        lse: from,
        dout: from,
        dlse: None,
        dq: to(),
        dk: to(),
        dv: to(),
        dbias: dbias.then(to),
        dsink: None,
        seq: SeqArgs::default(),
        score: ScoreArgs::default(),
        workspace: None,
    };
    let blocks = Blocks { block_m: 8, block_n: 12, ..BACKWARD_BLOCKS };
    let call = Backward { problem: &problem, args: &args, spans: &spans, blocks };
    call.shared().unwrap().tasks(threads).unwrap()
}

#[test]
fn where_there_are_as_many_kv_heads_as_threads_each_is_a_task_the_longest_first() {
    let heads = |span: usize| (0..HEADS_KV).map(move |i_head_kv| Task::KvHead { span, i_head_kv });
    // By queries times keys: 50, 100.
    for threads in [1, 6] {
        let wanted: Vec<_> = heads(1).chain(heads(0)).collect();
        assert_eq!(tasks(&[(1, 50), (10, 10)], threads, false), wanted, "{threads} threads");
    }
}

#[test]
fn where_there_are_fewer_every_tile_of_keys_and_every_tile_of_queries_is_one() {
    let lengths = [(1, 50), (17, 12), (16, 0)];
    let found = tasks(&lengths, 10, false);
    let (mut keys, mut queries) = (Vec::new(), Vec::new());
    for task in &found {
        match *task {
            Task::Keys { span, i_head_kv, j } => keys.push((span, j, i_head_kv)),
            Task::Queries { span, i_head, i } => queries.push((span, i, i_head)),
            other => panic!("{other:?}"),
        }
    }
    let tiles = |of: fn(&(u32, u32)) -> u32, side: usize, heads: u32| {
        let starts = |(span, length): (usize, u32)| {
            (0..length).step_by(side).flat_map(move |at| (0..heads).map(move |head| (span, at, head)))
        };
        lengths.iter().map(of).enumerate().flat_map(starts).collect::<Vec<_>>()
    };
    assert!(
        queries.windows(2).all(|two| two[0].0 != two[1].0 || two[0].1 >= two[1].1),
        "the last come first"
    );
    queries.sort_unstable();
    assert_eq!(keys, tiles(|lengths| lengths.1, 12, HEADS_KV));
    assert_eq!(queries, tiles(|lengths| lengths.0, 8, RATIO * HEADS_KV));
}

#[test]
fn every_row_of_dbias_is_in_one_task() {
    for threads in [1, 100] {
        let mut rows = Vec::new();
        for task in tasks(&[(60, 70), (20, 30)], threads, true) {
            if let Task::Bias { i_batch, i_head, i } = task {
                rows.extend((i..60.min(i + 8)).map(|i| (i_batch, i_head, i)));
            }
        }
        let all = (0..2)
            .flat_map(|b| (0..RATIO * HEADS_KV).flat_map(move |head| (0..60).map(move |i| (b, head, i))));
        assert_eq!(rows, all.collect::<Vec<_>>());
    }
}
