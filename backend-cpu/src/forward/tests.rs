//! How a forward call is divided into tasks, its scratch, and equal bits on every path.

use fmha_core::dropout::philox4x32_10;
use fmha_core::{
    Bias, BiasBroadcast, DevSlice, DevSliceMut, Dims, DropoutSeed, ElementwiseBias, SeqArgs, Strides, Totals,
};

use super::*;
use crate::isa::FORWARD_BLOCKS;
use crate::memory::tests::{Fenced, in_exact_sizes};
use crate::simd::{Portable, SoftDots, SoftTiles};

/// A call's inputs, each before a fence.
struct Operands {
    q: Fenced,
    k: Fenced,
    v: Fenced,
    bias: Option<Fenced>,
}

impl Operands {
    /// Makes pseudo-random operands; V of key `nan` of each head is not finite.
    fn new(problem: &FwdProblem, nan: Option<u32>) -> Self {
        let noise = |count: u64, salt: u32| -> Vec<f64> {
            let word = |i: u64| philox4x32_10([i as u32, salt, 0, 0], [1, 2])[0];
            (0..count).map(|i| f64::from(word(i)) / f64::from(1u32 << 30) - 2.0).collect()
        };
        let fenced = |dtype: DType, numbers: &[f64]| {
            let mut bytes = vec![0; numbers.len() * dtype.size_bytes() as usize];
            for (number, to) in numbers.iter().zip(bytes.chunks_mut(dtype.size_bytes() as usize)) {
                dtype.write(*number, to);
            }
            Fenced::new(&bytes)
        };
        let mut v = noise(problem.shape_v().num_elems(), 3);
        for (head, d) in (0..problem.dims.num_heads_kv)
            .flat_map(|head| (0..problem.dims.head_dim_v).map(move |d| (head, d)))
        {
            if let Some(nan) = nan {
                v[problem.strides.v.offset(0, nan, head, d) as usize] = f64::NAN;
            }
        }
        let bias = match problem.score.bias {
            Bias::Elementwise(bias) => {
                Some(fenced(bias.dtype, &noise(problem.shape_bias(bias.broadcast).num_elems(), 4)))
            }
            _ => None,
        };
        Self {
            q: fenced(problem.dtypes.qk, &noise(problem.shape_q().num_elems(), 1)),
            k: fenced(problem.dtypes.qk, &noise(problem.shape_k().num_elems(), 2)),
            v: fenced(problem.dtypes.v, &v),
            bias,
        }
    }

    fn args<'a>(&'a self, o: &'a mut Fenced, lse: &'a mut [f32]) -> FwdArgs<'a> {
        let mut args = FwdArgs::new(self.q.slice(), self.k.slice(), self.v.slice(), o.slice_mut());
        args.lse = Some(DevSliceMut::host(lse));
        args.score.bias = self.bias.as_ref().map(Fenced::slice);
        args.score.dropout = Some(DropoutSeed { seed: 7, offset: 3 });
        args
    }
}

fn problem(dtype: DType, seqlens: (u32, u32), heads: u32, dims: (u32, u32), mask: &str) -> FwdProblem {
    let dims = Dims::batch(1).seqlens(seqlens.0, seqlens.1).heads(heads, 1).head_dims(dims.0, dims.1);
    let mut problem = FwdProblem::batch(dtype, dims);
    (problem.mask, problem.write_lse, problem.dtypes.o) = (mask.parse().unwrap(), true, DType::F32);
    problem
}

fn biased(mut problem: FwdProblem) -> FwdProblem {
    let broadcast = BiasBroadcast::OneHead;
    let strides = Strides::bhsd(problem.shape_bias(broadcast));
    problem.score.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides });
    problem
}

/// Runs attention; returns O, and the bits of LSE (all NaN count as equal).
fn attend<S: Simd>(s: S, problem: &FwdProblem, from: &Operands) -> (Vec<f64>, Vec<u32>) {
    let valid = problem.clone().validate().unwrap();
    let spans = fmha_core::seq::spans(&valid, &SeqArgs::default()).unwrap();
    let size = valid.dtypes.o.size_bytes() as usize;
    let mut o = Fenced::new(&vec![0x7f; valid.shape_o().num_elems() as usize * size]);
    let mut lse = vec![f32::NAN; valid.extents(Totals::NONE).lse_elems as usize];
    let args = from.args(&mut o, &mut lse);
    let call = Forward { problem: &valid, args: &args, spans: &spans, blocks: FORWARD_BLOCKS };
    call.run(s, &Threads::new(1).unwrap()).unwrap();
    let o = o.bytes().chunks(size).map(|bytes| valid.dtypes.o.read(bytes)).collect();
    (o, lse.into_iter().map(canonical).collect())
}

fn canonical(x: f32) -> u32 {
    if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
}

fn same(a: &(Vec<f64>, Vec<u32>), b: &(Vec<f64>, Vec<u32>)) -> bool {
    let bits = |x: &f64| canonical(*x as f32);
    a.0.iter().map(bits).eq(b.0.iter().map(bits)) && a.1 == b.1
}

#[test]
fn sixteen_lanes_and_dot_products_of_pairs_give_the_bits_of_four_lanes() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (seqlens, dims, mask, p_drop) in [
            ((70, 150), (40, 72), "0", 0.0),
            ((70, 150), (41, 24), "b", 0.0),
            ((70, 151), (7, 70), "b:20,3,2", 0.0),
            ((70, 40), (40, 40), "b", 0.0),
            ((12, 150), (64, 40), "b:30,5", 0.0),
            ((70, 150), (40, 40), "t", 0.3),
        ] {
            let mut problem = problem(dtype, seqlens, 2, dims, mask);
            problem.dropout.p_drop = p_drop;
            for problem in [problem.clone(), biased(problem)] {
                let from = Operands::new(&problem, None);
                let what = format!("{dtype} {seqlens:?} {dims:?} {mask}");
                let wanted = attend(Portable, &problem, &from);
                assert!(same(&attend(SoftTiles::PLAIN, &problem, &from), &wanted), "{what}: sixteen lanes");
                assert!(same(&attend(SoftDots, &problem, &from), &wanted), "{what}: pairs");
                let unseen = problem.mask.band(seqlens.0, seqlens.1).k_range(0..1, seqlens.1).is_empty();
                assert!(!unseen || wanted.0[..dims.1 as usize].iter().all(|&o| o == 0.0), "{what}");
            }
        }
    }
}

/// Few queries give equal results for all instruction sets up to rounding: they use the row path, where each set
/// has its own order of sums.
#[test]
fn few_queries_of_any_type_are_the_same_but_for_rounding() {
    for dtype in [DType::F32, DType::F16, DType::Bf16, DType::E5m2] {
        for (heads, dims) in
            [(2, (64, 96)), (8, (64, 96)), (8, (40, 64)), (8, (64, 24)), (3, (7, 70)), (1, (24, 40))]
        {
            let problem = problem(dtype, (3, 700), heads, dims, "b");
            let from = Operands::new(&problem, None);
            let wanted = attend(Portable, &problem, &from).0;
            for (name, found) in [
                ("tiles", attend(SoftTiles::PLAIN, &problem, &from).0),
                ("pairs", attend(SoftDots, &problem, &from).0),
            ] {
                let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 0.02 * (1.0 + a.abs());
                assert!(wanted.iter().zip(&found).all(near), "{dtype} {heads} heads {dims:?}, {name}");
            }
        }
    }
}

/// Products of bf16 pairs give the bits of f32 also if a hidden V is NaN. Panels have equally many queries, so the
/// edges are equal.
#[test]
fn beside_a_hidden_nan_pairs_give_the_bits_of_f32() {
    for (dims, mask, nan) in [((40, 72), "b", 139), ((41, 24), "b:20,3,2", 138), ((40, 40), "t", 60)] {
        let problem = problem(DType::Bf16, (70, 150), 2, dims, mask);
        let from = Operands::new(&problem, Some(nan));
        let (wide, pairs) = (attend(SoftTiles::PLAIN, &problem, &from), attend(SoftDots, &problem, &from));
        assert!(same(&wide, &pairs), "{dims:?} {mask}");
        let band = problem.mask.band(70, 150);
        for i in 0..70 {
            let at = problem.strides.o.offset(0, i, 1, 0) as usize;
            let row = &pairs.0[at..at + dims.1 as usize];
            let sees = band.visible(i, nan);
            assert!(row.iter().all(|o| o.is_nan() == sees), "{dims:?} {mask}, row {i}: {row:?}");
        }
    }
}

/// A fence stops the process: see [`Fenced`].
#[test]
fn no_byte_beyond_the_end_of_a_tensor_is_touched() {
    fn attends<S: Simd>(s: S) {
        for (dtype, dims) in [
            (DType::F32, (40, 72)),
            (DType::Bf16, (41, 24)),
            (DType::Bf16, (64, 41)),
            (DType::Bf16, (64, 32)),
            // Fewer than the narrowest vector has.
            (DType::Bf16, (41, 3)),
        ] {
            for (seqlens, mask) in [((70, 90), "b:20,3"), ((33, 150), "b:20,3"), ((9, 9), "0")] {
                for dtype_o in [DType::F32, DType::Bf16, DType::F16] {
                    let problem = problem(dtype, seqlens, 1, dims, mask).dtype_o(dtype_o);
                    let pairs = attend(s, &problem, &Operands::new(&problem, None));
                    assert!(pairs.0.iter().all(|o| o.is_finite()));
                    let problem = biased(problem);
                    let f32s = attend(s, &problem, &Operands::new(&problem, None));
                    assert!(f32s.0.iter().all(|o| o.is_finite()));
                }
            }
        }
    }
    attends(Portable);
    attends(SoftTiles::PLAIN);
    attends(SoftDots);
    #[cfg(target_arch = "x86_64")]
    crate::simd::Avx2::detect().into_iter().for_each(attends);
}

/// Buffers of a thread that no task fills completely.
fn floats(scratch: &mut Scratch) -> [&mut Floats; 12] {
    let Scratch { queries, staging, keys, values, gathered, columns, scores, extra, .. } = scratch;
    let Scratch { out, out_rows, alpha, row, .. } = scratch;
    [queries, staging, keys, values, gathered, columns, scores, extra, out, out_rows, alpha, row]
}

/// A task stays within its scratch: each buffer is made larger, and the part beyond its own end is checked
/// afterwards.
#[test]
fn a_task_stays_within_its_scratch_and_what_was_there_before_reaches_nothing() {
    fn attends<S: Simd>(s: S, problem: &FwdProblem) {
        let valid = problem.clone().validate().unwrap();
        let spans = fmha_core::seq::spans(&valid, &SeqArgs::default()).unwrap();
        let from = Operands::new(problem, None);
        let size = valid.dtypes.o.size_bytes() as usize;
        let found = [1234.5f32, f32::NAN].map(|before| {
            let mut o = Fenced::new(&vec![0; valid.shape_o().num_elems() as usize * size]);
            let mut lse = vec![f32::NAN; valid.extents(Totals::NONE).lse_elems as usize];
            let args = from.args(&mut o, &mut lse);
            let blocks = Blocks { block_m: 64, ..FORWARD_BLOCKS };
            let call = Forward { problem: &valid, args: &args, spans: &spans, blocks };
            let shared = call.shared(KvRows::UNPAGED, None, blocks, None);
            let mut scratch = in_exact_sizes(|| shared.scratch::<S>().unwrap());
            let ends = floats(&mut scratch).map(|floats| {
                let end = floats.numbers().len();
                let mut larger = Floats::scratch(2 * end + 40_000).unwrap();
                larger.fill(before);
                *floats = larger;
                end
            });
            for task in shared.tasks().unwrap() {
                if in_tiles::<S>(&valid) {
                    shared.attend_in_tiles(s, &mut scratch, task);
                } else {
                    shared.attend(s, &mut scratch, task);
                }
            }
            for (number, (floats, end)) in floats(&mut scratch).into_iter().zip(ends).enumerate() {
                let is_old = |x: &f32| x.to_bits() == before.to_bits();
                assert!(floats.numbers()[end..].iter().all(is_old), "buffer {number} beyond {end}");
            }
            if before.is_finite() && in_tiles::<S>(&valid) {
                let columns = scratch.columns.numbers();
                let used = columns.iter().rposition(|&x| x != before).unwrap();
                assert!(ends[5] <= used + 128, "V's columns take {used} of {}", ends[5]);
            }
            (o.bytes().to_vec(), lse.into_iter().map(canonical).collect::<Vec<_>>())
        });
        assert!(found[0] == found[1], "old numbers reach the result");
    }
    for mask in ["0", "b", "b:20,3"] {
        for dtype_o in [DType::F32, DType::Bf16] {
            let of = |dtype, dims| problem(dtype, (70, 150), 2, dims, mask).dtype_o(dtype_o);
            attends(SoftTiles::PLAIN, &of(DType::Bf16, (64, 96)));
            attends(SoftTiles::PLAIN, &biased(of(DType::Bf16, (64, 96))));
            attends(SoftDots, &of(DType::Bf16, (41, 72)));
            attends(SoftDots, &biased(of(DType::F32, (40, 72))));
            attends(Portable, &biased(of(DType::F32, (40, 24))));
            let mut dropping = of(DType::F16, (40, 24));
            dropping.dropout.p_drop = 0.3;
            attends(Portable, &dropping);
        }
    }
    // With more queries than keys, whole panels of the first or last rows see no keys, and their O was not written
    // before.
    for (mask, dtype_o) in
        ["b", "t:5,0"].into_iter().flat_map(|mask| [(mask, DType::F32), (mask, DType::Bf16)])
    {
        let of = |dtype, dims| problem(dtype, (110, 20), 1, dims, mask).dtype_o(dtype_o);
        attends(Portable, &of(DType::F32, (8, 24)));
        attends(SoftTiles::PLAIN, &of(DType::Bf16, (32, 32)));
    }
    // The band begins beyond the square of a micro-tile's rows and ends with the tile of keys.
    attends(Portable, &problem(DType::F32, (70, 150), 1, (8, 24), "b:90,3"));
}

/// Calls `look` on a call of these lengths.
fn of_call<T>(
    problem: &FwdProblem,
    lengths: &[(u32, u32)],
    blocks: Blocks,
    look: impl FnOnce(&Forward<'_>) -> T,
) -> T {
    let span = fmha_core::seq::spans(problem, &SeqArgs::default()).unwrap()[0];
    let spans: Vec<SeqSpan> =
        lengths.iter().map(|&(seqlen_q, seqlen_k)| SeqSpan { seqlen_q, seqlen_k, ..span }).collect();
    let nothing = DevSlice::host::<f32>(&[]);
    let mut args = FwdArgs::new(nothing, nothing, nothing, DevSliceMut::host::<f32>(&mut []));
    args.score.bias = matches!(problem.score.bias, Bias::Elementwise(_)).then_some(nothing);
    look(&Forward { problem, args: &args, spans: &spans, blocks })
}

#[test]
fn tiles_of_queries_are_halved_while_there_are_fewer_than_three_tasks_a_thread() {
    fn block_m(heads: u32, lengths: &[(u32, u32)], blocks: Blocks, threads: usize) -> usize {
        let problem = problem(DType::F32, (2000, 64), heads, (8, 8), "0");
        of_call(&problem, lengths, blocks, |call| call.blocks_for::<Portable>(threads).block_m)
    }
    let two = [(1024, 64), (1000, 64)];
    // Two sequences of two tiles, of three heads: twelve tasks.
    for (threads, wanted) in [(3, 512), (4, 512), (5, 256), (8, 256), (9, 128), (1000, 8)] {
        assert_eq!(block_m(3, &two, FORWARD_BLOCKS, threads), wanted, "{threads} threads");
    }
    assert_eq!(block_m(1, &[(600, 64)], FORWARD_BLOCKS, 1), 512, "one thread wants no more tasks");
    let set = Blocks { block_m: 96, may_shrink: false, ..FORWARD_BLOCKS };
    assert_eq!(block_m(1, &[(600, 64)], set, 64), 96, "the caller's own");
    let odd = Blocks { block_m: 24, ..FORWARD_BLOCKS };
    assert_eq!(block_m(1, &[(600, 64)], odd, 64), 24, "half of it is no whole panels");
}

#[test]
fn every_query_of_a_head_is_in_one_task_and_the_longest_task_comes_first() {
    let blocks = Blocks { block_m: 16, ..FORWARD_BLOCKS };
    let tasks = |mask: &str, heads: u32, lengths: &[(u32, u32)]| {
        let problem = problem(DType::F32, (100, 100), heads, (8, 8), mask);
        of_call(&problem, lengths, blocks, |call| {
            call.shared(KvRows::UNPAGED, None, blocks, None).tasks().unwrap()
        })
    };
    let sizes = |mask: &str, lengths: (u32, u32)| -> Vec<(u32, u32, u32)> {
        tasks(mask, 1, &[lengths]).iter().map(|task| (task.i, task.queries, task.keys)).collect()
    };
    assert_eq!(sizes("t", (25, 60)), [(0, 16, 16), (16, 9, 25)], "by keys times queries");
    assert_eq!(sizes("t", (64, 64)), [(48, 16, 64), (32, 16, 48), (16, 16, 32), (0, 16, 16)]);
    assert_eq!(sizes("t:9,0,4", (40, 60)), [(16, 16, 29), (0, 16, 16), (32, 8, 21)], "with sinks");

    // A sequence of at most eight queries uses the row path and has no tile.
    let mut found: Vec<(u32, u32, u32)> = tasks("b", 3, &[(40, 50), (8, 50), (9, 3)])
        .iter()
        .flat_map(|task| (task.i..task.i + task.queries).map(|i| (task.span, task.i_head, i)))
        .collect();
    found.sort_unstable();
    let rows = |span: u32, count: u32| (0..3).flat_map(move |head| (0..count).map(move |i| (span, head, i)));
    assert_eq!(found, rows(0, 40).chain(rows(2, 9)).collect::<Vec<_>>());
}

#[test]
fn few_queries_are_taken_in_rows_and_all_of_them_on_request_or_with_a_tree_mask() {
    let plain = problem(DType::F32, (100, 100), 1, (8, 8), "b");
    let tree = plain.clone().tree_mask(true);
    let invariant = Blocks { rows_only: true, ..FORWARD_BLOCKS };
    for (problem, blocks, wanted) in [
        (&plain, FORWARD_BLOCKS, [true, true, false, false]),
        (&tree, FORWARD_BLOCKS, [true; 4]),
        (&plain, invariant, [true; 4]),
    ] {
        let found = of_call(problem, &[(1, 50), (8, 50), (9, 50), (100, 50)], blocks, |call| {
            let shared = call.shared(KvRows::UNPAGED, None, blocks, None);
            call.spans.iter().map(|span| shared.in_rows(span)).collect::<Vec<_>>()
        });
        assert_eq!(found, wanted);
    }
}

#[test]
fn pairs_are_for_bf16_alone_without_dropout_and_tiles_for_whole_ones() {
    let bf16 = problem(DType::Bf16, (20, 20), 1, (64, 96), "0");
    let with = |change: fn(&mut FwdProblem)| {
        let mut problem = bf16.clone();
        change(&mut problem);
        [dots_pairs(&problem), fits_tiles(&problem)]
    };
    assert_eq!(with(|_| {}), [true, true]);
    assert_eq!(with(|problem| problem.dtypes.qk = DType::F16), [false, false]);
    assert_eq!(with(|problem| problem.dtypes.v = DType::F16), [false, false]);
    assert_eq!(with(|problem| problem.dropout.p_drop = 0.5), [false, false]);
    assert_eq!(with(|problem| problem.dims.head_dim_qk = 48), [true, false]);
    assert_eq!(with(|problem| problem.dims.head_dim_v = 80), [true, false]);
    assert_eq!(
        with(|problem| (problem.dtypes.qk, problem.dtypes.v) = (DType::F32, DType::F32)),
        [false, false]
    );
}

/// Sizes of scratch for tiles of 64 queries and 36 keys.
#[test]
fn a_threads_scratch_has_what_a_tile_of_queries_and_one_of_keys_take() {
    fn sizes<S: Simd>(problem: &FwdProblem) -> [usize; 14] {
        let blocks = Blocks { block_m: 64, block_n: 36, ..FORWARD_BLOCKS };
        of_call(problem, &[], blocks, |call| {
            let shared = call.shared(KvRows::UNPAGED, None, blocks, None);
            let mut scratch = in_exact_sizes(|| shared.scratch::<S>().unwrap());
            let [row_max, row_sum] = [&scratch.row_max, &scratch.row_sum].map(|of| of.numbers().len());
            let others = floats(&mut scratch).map(|of| of.numbers().len());
            std::array::from_fn(|n| others.get(n).copied().unwrap_or([row_max, row_sum][n % 2]))
        })
    }
    let of = |dtype, dims| problem(dtype, (70, 150), 2, dims, "0");
    // Sizes follow from these: rows of K are an odd number of lines apart, keys fill tiles of 32 or micro-tiles of
    // 12 or 6, and columns fill panels of 32 or 8.
    let tiled = of(DType::Bf16, (96, 64));
    let wanted = [6144, 3072, 64 * 112, 4096, 36 * 48, 64 * 48, 2 * 64 * 32, 0, 4096, 4096, 64, 64, 64, 64];
    assert_eq!(sizes::<SoftTiles>(&tiled), wanted);
    assert_eq!(sizes::<SoftTiles>(&biased(tiled))[7], 64 * 32);
    let wide = of(DType::F32, (40, 41));
    let wanted = [2560, 2048, 36 * 48, 36 * 64, 36 * 41 + 12, 0, 36 * 32, 0, 4096, 0, 32, 64, 64, 64];
    assert_eq!(sizes::<SoftTiles>(&wide), wanted);
    let wanted = [2560, 320, 36 * 48, 36 * 48, 36 * 41 + 12, 0, 36 * 8, 0, 64 * 48, 0, 16, 48, 64, 64];
    assert_eq!(sizes::<Portable>(&wide), wanted);
    assert_eq!(sizes::<Portable>(&biased(wide.clone()))[7], 36 * 8);
    assert_eq!(sizes::<Portable>(&wide.clone().p_drop(0.3))[7], 36 * 8);
}
