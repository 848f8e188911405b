//! Division of a backward call into tasks, and the memory that it uses and touches.

use fmha_core::{
    BiasBroadcast, BiasGrad, BwdProblem, DType, DevSlice, DevSliceMut, Dims, ElementwiseBias, FwdProblem,
    ScoreArgs, SeqArgs, Shape, Strides,
};

use super::*;
use crate::isa::BACKWARD_BLOCKS;
use crate::memory::tests::{Fenced, in_exact_sizes};
use crate::simd::{Portable, SoftTiles};

const HEADS_KV: u32 = 3;
const RATIO: u32 = 2;

/// Tasks of sequences of these lengths, with dBias if `dbias`.
fn tasks(lengths: &[(u32, u32)], threads: usize, dbias: bool) -> Vec<Task> {
    of_call(lengths, dbias, |_| {}, |shared| shared.tasks(threads).unwrap())
}

/// Calls `look` on a call with these lengths, whose problem `change` has modified.
fn of_call<T>(
    lengths: &[(u32, u32)],
    dbias: bool,
    change: fn(&mut FwdProblem),
    look: impl FnOnce(&Shared<'_>) -> T,
) -> T {
    let dims =
        Dims::batch(lengths.len() as u32).seqlens(60, 70).heads(RATIO * HEADS_KV, HEADS_KV).head_dim(8);
    let mut fwd = FwdProblem::batch(DType::F32, dims);
    let broadcast = BiasBroadcast::BatchHead;
    let strides = Strides::bhsd(fwd.shape_bias(broadcast));
    if dbias {
        fwd.score.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides });
    }
    change(&mut fwd);
    let mut problem = BwdProblem::new(fwd);
    problem.dbias = dbias.then_some(BiasGrad { dtype: DType::F32, strides });
    let problem = problem.validate().unwrap();
    let mut spans = fmha_core::seq::spans(problem.fwd(), &SeqArgs::default()).unwrap();
    for (span, &(seqlen_q, seqlen_k)) in spans.iter_mut().zip(lengths) {
        (span.seqlen_q, span.seqlen_k) = (seqlen_q, seqlen_k);
    }
    let from = DevSlice::host::<f32>(&[]);
    let to = || DevSliceMut::host::<f32>(&mut []);
    let args = BwdArgs::new([from, from, from], [from, from, from], [to(), to(), to()])
        .dbias(dbias.then(to))
        .score(ScoreArgs::default().bias(dbias.then_some(from)));
    let blocks = Blocks { block_m: 8, block_n: 12, ..BACKWARD_BLOCKS };
    let call = Backward { problem: &problem, args: &args, spans: &spans, blocks };
    look(&call.shared().unwrap())
}

#[test]
fn where_there_are_as_many_kv_heads_as_threads_each_is_a_task_the_longest_first() {
    let heads = |span: usize| (0..HEADS_KV).map(move |i_head_kv| Task::KvHead { span, i_head_kv });
    // Costs by queries times keys: 50, 100.
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

/// Tensors end at a fence that stops the process on access (see [`Fenced`]). Queries, keys and columns do not fill
/// their panels.
#[test]
fn no_byte_beyond_the_end_of_a_tensor_is_touched() {
    fn differentiates<S: Simd>(s: S) {
        let dims = Dims::batch(1).seqlens(43, 50).heads(1, 1).head_dims(10, 7);
        let mut fwd = FwdProblem::batch(DType::F32, dims);
        let strides = Strides::bhsd(fwd.shape_bias(BiasBroadcast::OneHead));
        let bias = ElementwiseBias { dtype: DType::F32, broadcast: BiasBroadcast::OneHead, strides };
        (fwd.score.bias, fwd.write_lse) = (Bias::Elementwise(bias), true);
        let mut problem = BwdProblem::new(fwd);
        problem.dbias = Some(BiasGrad { dtype: DType::F32, strides });
        let problem = problem.validate().unwrap();
        let fwd = problem.fwd();
        let fenced = |count: u64, number: f32| {
            let numbers = (0..count).flat_map(|at| (number * (1.0 + (at % 7) as f32)).to_le_bytes());
            Fenced::new(&numbers.collect::<Vec<u8>>())
        };
        let [q, k, v, o] = [fwd.shape_q(), fwd.shape_k(), fwd.shape_v(), fwd.shape_o()].map(Shape::num_elems);
        let [bias, lse] = [43 * 50, 43];
        let from = [q, k, v, o, o, bias].map(|count| fenced(count, 0.1));
        let [in_q, in_k, in_v, in_o, dout, in_bias] = from.each_ref().map(Fenced::slice);
        let sums = fenced(lse, 3.0);
        let mut to = [q, k, v, bias].map(|count| fenced(count, f32::NAN));
        let [dq, dk, dv, dbias] = to.each_mut().map(Fenced::slice_mut);
        let args = BwdArgs::new([in_q, in_k, in_v], [in_o, sums.slice(), dout], [dq, dk, dv])
            .dbias(dbias)
            .score(ScoreArgs::default().bias(in_bias));
        let spans = fmha_core::seq::spans(fwd, &SeqArgs::default()).unwrap();
        let call = Backward { problem: &problem, args: &args, spans: &spans, blocks: BACKWARD_BLOCKS };
        call.run(s, &Threads::new(1).unwrap()).unwrap();
        for (number, to) in to.iter().enumerate() {
            let mut numbers = to.bytes().chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
            assert!(numbers.all(f32::is_finite), "gradient {number}");
        }
    }
    differentiates(Portable);
    differentiates(SoftTiles::PLAIN);
    #[cfg(target_arch = "x86_64")]
    crate::simd::Avx2::detect().into_iter().for_each(differentiates);
}

/// A thread's scratch has room for one tile of queries and one of keys: eight queries and twelve keys with rows of
/// eight numbers, rounded up to panels by wider vectors.
#[test]
fn a_threads_scratch_has_what_a_tile_of_queries_and_one_of_keys_take() {
    fn sizes<S: Simd>(shared: &Shared<'_>) -> ([usize; 5], [usize; 12]) {
        let task = [Task::Queries { span: 0, i_head: 0, i: 0 }];
        let Scratch { tile, dk, dv, dq, dbias, row } = in_exact_sizes(|| shared.scratch::<S>(&task).unwrap());
        let of = |floats: &Floats| floats.numbers().len();
        let tensors = [dk, dv, dq, dbias, row].each_ref().map(of);
        let Tile { keys, key_rows, value_rows, queries, douts, queries_transposed, douts_transposed, .. } =
            &tile;
        let Tile { weights, gradients, extra, slope, lse, .. } = &tile;
        let loaded = [keys, key_rows, value_rows, queries, douts, queries_transposed, douts_transposed];
        let (loaded, more) = (loaded.map(of), [weights, gradients, extra, slope, lse].map(of));
        (tensors, std::array::from_fn(|n| if n < 7 { loaded[n] } else { more[n - 7] }))
    }
    let narrow = |change, dbias| of_call(&[(60, 70)], dbias, change, sizes::<Portable>);
    let loaded = [96, 192, 192, 64, 64, 64, 64];
    let with = |more: [usize; 5]| std::array::from_fn(|n| if n < 7 { loaded[n] } else { more[n - 7] });
    assert_eq!(narrow(|_| {}, false), ([96, 96, 64, 0, 16], with([96, 96, 0, 0, 16])));
    assert_eq!(narrow(|_| {}, true), ([96, 96, 64, 96, 16], with([96, 96, 96, 0, 16])));
    let dropping = |fwd: &mut FwdProblem| fwd.dropout.p_drop = 0.3;
    assert_eq!(narrow(dropping, false).1, with([96, 96, 96, 0, 16]));
    let capped = |fwd: &mut FwdProblem| fwd.score.softcap = Some(2.0);
    assert_eq!(narrow(capped, false).1, with([96, 96, 0, 96, 16]));
    let wide = of_call(&[(60, 70)], false, capped, sizes::<SoftTiles>);
    assert_eq!(wide, ([384, 384, 256, 0, 32], [384, 192, 192, 256, 256, 64, 64, 96, 96, 0, 384, 16]));
}
