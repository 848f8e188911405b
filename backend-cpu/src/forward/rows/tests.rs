//! The row path with matrix tiles and without; tiles are emulated in software, since most processors have none.

use fmha_core::dropout::philox4x32_10;
use fmha_core::seq::KvRows;
use fmha_core::{
    BlockTable, DType, DevSlice, DevSliceMut, Dims, FwdArgs, FwdProblem, KvLayout, QLayout, SeqArgs, SeqSpan,
    Shape, Strides, ValidFwd,
};
use half::bf16;

use super::super::{Blocks, Forward, Shared};
use super::{CHUNK_KEYS, Fold, MAX_STATES, Order, State, Task};
use crate::isa::FORWARD_BLOCKS;
use crate::memory::tests::in_exact_sizes;
#[cfg(target_arch = "x86_64")]
use crate::simd::Amx;
use crate::simd::{Portable, Simd, SoftDots, SoftTiles};
use crate::tasks::Threads;
use crate::tensor::fp8_table;

const SEQLEN_Q: u32 = 2;
const SEQLEN_K: u32 = 150;

/// A problem with two queries in one sequence, where the last key is hidden from the first. Q and K are scaled down
/// by a hundred, so that scores differ moderately.
fn problem(heads: (u32, u32), dims: (u32, u32), cache: Option<DType>) -> ValidFwd {
    let dims = Dims::batch(1).seqlens(SEQLEN_Q, SEQLEN_K).heads(heads.0, heads.1).head_dims(dims.0, dims.1);
    let mut problem = FwdProblem::new(QLayout::Batch, KvLayout::Strided, DType::Bf16, dims);
    (problem.mask, problem.score.softmax_scale) = ("b".parse().unwrap(), Some(500.0));
    problem.cache.dtype = cache;
    problem.validate().unwrap()
}

fn attend<S: Simd>(s: S, valid: &ValidFwd, q: &[bf16], k: DevSlice<'_>, v: DevSlice<'_>) -> Vec<bf16> {
    attend_pages(s, valid, q, k, v, &[])
}

/// Runs attention on a cache with these `pages`, or on a contiguous one if `pages` is empty.
fn attend_pages<S: Simd>(
    s: S,
    valid: &ValidFwd,
    q: &[bf16],
    k: DevSlice<'_>,
    v: DevSlice<'_>,
    pages: &[i32],
) -> Vec<bf16> {
    let mut o = vec![bf16::ZERO; valid.shape_o().num_elems() as usize];
    let mut args = FwdArgs::new(DevSlice::host(q), k, v, DevSliceMut::host(&mut o));
    if !pages.is_empty() {
        args.seq.totals.num_pages = Some(pages.len() as u32);
        args.seq.block_table =
            Some(BlockTable { pages: DevSlice::host(pages), max_pages: pages.len() as u32 });
    }
    let spans = fmha_core::seq::spans(valid, &args.seq).unwrap();
    let blocks = Blocks { rows_only: true, ..FORWARD_BLOCKS };
    Forward { problem: valid, args: &args, spans: &spans, blocks }.run(s, &Threads::new(1).unwrap()).unwrap();
    o
}

#[test]
fn codes_have_the_bits_of_their_bf16_and_a_hidden_nan_stays_hidden_in_tiles_too() {
    let code = |i: u64, salt: u32| {
        let code = philox4x32_10([i as u32, salt, 0, 0], [1, 2])[0] as u8;
        // Codes of numbers up to 28, without NaN; subnormals and both zeros are among them.
        code & 0xdf
    };
    let values = fp8_table(DType::E4m3Fn);
    let wide = |codes: &[u8]| -> Vec<bf16> {
        codes.iter().map(|&code| bf16::from_f32(values[usize::from(code)])).collect()
    };
    for (heads, dims) in [
        ((8, 1), (96, 32)),
        ((16, 2), (64, 160)),
        // Each kv head has two tiles of queries.
        ((32, 2), (64, 32)),
        ((8, 1), (64, 40)),
        ((8, 1), (40, 64)),
        ((4, 2), (96, 80)),
        ((2, 2), (40, 64)),
    ] {
        let (plain, coded) = (problem(heads, dims, None), problem(heads, dims, Some(DType::E4m3Fn)));
        let q: Vec<u8> = (0..plain.shape_q().num_elems()).map(|i| code(i, 1) & 0xaf).collect();
        let k: Vec<u8> = (0..plain.shape_k().num_elems()).map(|i| code(i, 2) & 0xaf).collect();
        let mut v: Vec<u8> = (0..plain.shape_v().num_elems()).map(|i| code(i, 3)).collect();
        let at_last_key = v.len() - (heads.1 * dims.1) as usize;
        for last in [None, Some(0x7f)] {
            if let Some(nan) = last {
                v[at_last_key..].fill(nan);
            }
            let (q, k_wide, v_wide) = (wide(&q), wide(&k), wide(&v));
            let tiles =
                attend(SoftTiles::PLAIN, &plain, &q, DevSlice::host(&k_wide), DevSlice::host(&v_wide));
            let codes = attend(SoftTiles::PLAIN, &coded, &q, DevSlice::host(&k), DevSlice::host(&v));
            let f32s = attend(Portable, &plain, &q, DevSlice::host(&k_wide), DevSlice::host(&v_wide));
            let dots = attend(SoftDots, &plain, &q, DevSlice::host(&k_wide), DevSlice::host(&v_wide));
            let code_dots = attend(SoftDots, &coded, &q, DevSlice::host(&k), DevSlice::host(&v));
            for (at, ((dots, codes), f32s)) in dots.iter().zip(&code_dots).zip(&f32s).enumerate() {
                let what = format!("{heads:?} {dims:?} {last:?} dots, element {at}: {dots}, {codes}, {f32s}");
                let alike = (dots.to_f32() - f32s.to_f32()).abs() <= 0.02 * (1.0 + f32s.to_f32().abs());
                assert!(dots.is_nan() && codes.is_nan() && f32s.is_nan() || dots == codes && alike, "{what}");
            }
            for (at, ((tiles, codes), f32s)) in tiles.iter().zip(&codes).zip(&f32s).enumerate() {
                let what = format!("{heads:?} {dims:?} {last:?} element {at}: {tiles}, {codes}, {f32s}");
                let hides_last = (at as u64) < plain.strides.o.offset(0, 1, 0, 0) as u64;
                if last.is_some() && !hides_last {
                    assert!(tiles.is_nan() && codes.is_nan(), "{what}");
                    continue;
                }
                assert_eq!(tiles.to_bits(), codes.to_bits(), "{what}");
                assert!(
                    (tiles.to_f32() - f32s.to_f32()).abs() <= 0.02 * (1.0 + f32s.to_f32().abs()),
                    "{what}"
                );
            }
        }
    }
}

/// Calls `look` on a call without tensors.
fn of_problem<T>(problem: &FwdProblem, spans: &[SeqSpan], look: impl FnOnce(&Shared<'_>) -> T) -> T {
    let nothing = DevSlice::host::<f32>(&[]);
    let args = FwdArgs::new(nothing, nothing, nothing, DevSliceMut::host::<f32>(&mut []));
    let blocks = Blocks { rows_only: true, ..FORWARD_BLOCKS };
    let call = Forward { problem, args: &args, spans, blocks };
    look(&call.shared(KvRows::UNPAGED, None, blocks, None))
}

/// Calls `look` on a call with these lengths in which all sequences use the row path.
fn of_call<T>(
    (heads_kv, ratio): (u32, u32),
    dim: u32,
    strides: fn(Shape) -> Strides,
    lengths: &[(u32, u32)],
    look: impl FnOnce(&Shared<'_>) -> T,
) -> T {
    let dims = Dims::batch(1).seqlens(100, 2000).heads(heads_kv * ratio, heads_kv).head_dim(dim);
    let mut problem = FwdProblem::batch(DType::F32, dims);
    (problem.strides.k, problem.strides.v) = (strides(problem.shape_k()), strides(problem.shape_v()));
    let span = fmha_core::seq::spans(&problem, &SeqArgs::default()).unwrap()[0];
    let spans: Vec<SeqSpan> =
        lengths.iter().map(|&(seqlen_q, seqlen_k)| SeqSpan { seqlen_q, seqlen_k, ..span }).collect();
    of_problem(&problem, &spans, look)
}

#[test]
fn every_row_meets_every_chunk_in_one_task_and_split_chunks_have_slots_of_their_own() {
    for (heads, lengths) in [
        ((1, 1), &[(1, 1500)][..]),
        ((1, 3), &[(1, 1500), (30, 512), (2, 0)]),
        ((5, 2), &[(1, 1600), (3, 513)]),
        ((8, 1), &[(40, 100)]),
        // Twenty rows of three heads at most.
        ((8, 2), &[(10, 100)]),
    ] {
        for threads in [1, 2, 5, 40] {
            let (mut tasks, mut folds) = (Vec::new(), Vec::new());
            let slots = of_call(heads, 8, Strides::bshd, lengths, |shared| {
                shared.row_tasks(threads, &mut tasks, &mut folds).unwrap()
            });
            let what = format!("{heads:?} {lengths:?} {threads} threads");
            let rows = |task: &Task| {
                let of_head = task.first_row..task.first_row + task.rows;
                (task.heads.0..task.heads.0 + task.heads.1)
                    .flat_map(move |head| of_head.clone().map(move |row| (head, row)))
            };
            let (mut met, mut taken) = (Vec::new(), vec![false; slots]);
            for task in &tasks {
                assert!(rows(task).count() == task.states() && task.states() <= MAX_STATES, "{what}");
                for chunk in task.chunks.0..task.chunks.1 {
                    met.extend(rows(task).map(|(head, row)| (task.span, head, row, chunk)));
                    for (at, _) in rows(task).enumerate() {
                        let Some(slot) = task.slot else { continue };
                        let slot = slot + (chunk - task.chunks.0) as usize * task.states() + at;
                        assert!(!std::mem::replace(&mut taken[slot], true), "{what}: slot {slot} twice");
                        let is_its = |fold: &&Fold| {
                            (fold.span, fold.heads, fold.first_row, fold.rows)
                                == (task.span, task.heads, task.first_row, task.rows)
                        };
                        let fold = folds.iter().find(is_its).unwrap();
                        let there = fold.slot.unwrap() + chunk as usize * fold.states() + at;
                        assert_eq!(there, slot, "{what}: where it is folded from");
                    }
                }
            }
            met.sort_unstable();
            let mut all = Vec::new();
            for (span, &(seqlen_q, seqlen_k)) in (0..).zip(lengths) {
                for (head, row) in
                    (0..heads.0).flat_map(|head| (0..seqlen_q * heads.1).map(move |row| (head, row)))
                {
                    all.extend((0..seqlen_k.div_ceil(CHUNK_KEYS)).map(|chunk| (span, head, row, chunk)));
                }
            }
            assert_eq!(met, all, "{what}");
            assert!(taken.iter().all(|&taken| taken), "{what}: a slot of none");
            // Rows of a sequence without keys are still written.
            let written = tasks.iter().filter(|task| task.slot.is_none()).chain(&folds);
            let mut written: Vec<_> =
                written.flat_map(|task| rows(task).map(|(head, row)| (task.span, head, row))).collect();
            written.sort_unstable();
            let mut all = Vec::new();
            for (span, &(seqlen_q, _)) in (0..).zip(lengths) {
                let rows = seqlen_q * heads.1;
                all.extend((0..heads.0).flat_map(|head| (0..rows).map(move |row| (span, head, row))));
            }
            assert_eq!(written, all, "{what}: written");
            assert!(threads > 1 || slots == 0, "{what}: one thread folds as it goes");
        }
    }
    // A head of three chunks, to be shared by many threads.
    let (mut tasks, mut folds) = (Vec::new(), Vec::new());
    of_call((1, 1), 8, Strides::bshd, &[(1, 1500)], |shared| {
        shared.row_tasks(40, &mut tasks, &mut folds).unwrap()
    });
    assert_eq!(folds.len(), 1);
    assert_eq!(tasks.iter().map(|task| task.chunks).collect::<Vec<_>>(), [(0, 1), (1, 2), (2, 3)]);
}

/// Tasks, folds, and the most heads and chunks of a task.
#[test]
fn chunks_are_shared_out_and_where_they_are_too_few_heads_too_until_each_thread_has_four_tasks() {
    let counts = |heads: (u32, u32), lengths: &[(u32, u32)]| {
        [1, 2, 3, 4, 8, 16, 40].map(|threads| {
            let (mut tasks, mut folds) = (Vec::new(), Vec::new());
            of_call(heads, 8, Strides::bshd, lengths, |shared| {
                shared.row_tasks(threads, &mut tasks, &mut folds).unwrap()
            });
            let heads = tasks.iter().map(|task| task.heads.1).max().unwrap();
            let chunks = tasks.iter().map(|task| task.chunks.1 - task.chunks.0).max().unwrap();
            (tasks.len(), folds.len(), heads, chunks)
        })
    };
    // Eight heads together, of four chunks.
    let wanted = [(1, 0, 8, 4), (8, 2, 4, 1), (12, 3, 3, 1), (16, 4, 2, 1)];
    let most = [(32, 8, 1, 1); 3];
    assert_eq!(counts((8, 2), &[(1, 2000)]), [wanted.as_slice(), &most].concat()[..]);
    // Expected: 45 rows in two tasks, each with three chunks and two heads; six rows with four heads.
    let wanted = [(5, 0, 4, 4), (10, 5, 4, 2), (14, 5, 4, 2), (16, 5, 4, 1), (32, 10, 2, 1)];
    let most = [(40, 12, 1, 1); 2];
    assert_eq!(counts((4, 3), &[(15, 1500), (2, 2000)]), [wanted.as_slice(), &most].concat()[..]);
    // Expected: 75 rows in three tasks of three chunks; five rows with one.
    let wanted = [(4, 0, 2, 3), (7, 3, 2, 2), (14, 6, 1, 2), (14, 6, 1, 2), (14, 6, 1, 2)];
    let most = [(20, 6, 1, 1); 2];
    assert_eq!(counts((2, 5), &[(15, 1500), (1, 30)]), [wanted.as_slice(), &most].concat()[..]);
}

#[test]
fn heads_are_taken_together_where_they_lie_so_as_evenly_as_it_goes() {
    let together = |dim: u32, strides: fn(Shape) -> Strides, rows: usize| {
        of_call((8, 1), dim, strides, &[(1, 100)], |shared| shared.heads_together(rows))
    };
    assert_eq!([1, 16, 20, 32].map(|rows| together(8, Strides::bshd, rows)), [8, 4, 3, 2]);
    // A key of one head has 2 KiB, or 16 KiB.
    assert_eq!([512, 4096].map(|dim| together(dim, Strides::bshd, 1)), [2, 1]);
    assert_eq!(together(8, Strides::bhsd, 1), 1, "a head's keys lie together");
}

#[test]
fn tiles_are_for_four_heads_of_bf16_whose_dimension_is_whole_and_dot_products_where_they_are_fast() {
    /// The orders of Q and of O's sums, and whether K's and V's products are in tiles.
    fn ways<S: Simd>(problem: &FwdProblem) -> (Order, Order, [bool; 3]) {
        of_problem(problem, &[], |shared| {
            let tiles = [shared.keys_in_tiles::<S>(), shared.values_in_tiles::<S>(), shared.in_tiles::<S>()];
            (shared.order_q::<S>(), shared.order_of_sums::<S>(), tiles)
        })
    }
    use Order::{Bf16, EvenOdd, Fours, Plain};
    let none = [false; 3];
    let f16 = |cache: Option<DType>| {
        let (mut problem, of) = (FwdProblem::clone(&problem((8, 1), (96, 32), cache)), DType::F16);
        (problem.dtypes.qk, problem.dtypes.v) = (of, of);
        problem
    };
    let of = |heads, dims, cache| FwdProblem::clone(&problem(heads, dims, cache));
    let e4m3 = Some(DType::E4m3Fn);
    for (problem, in_tiles, in_dots, in_f32) in [
        (of((8, 1), (96, 32), None), (Bf16, EvenOdd, [true; 3]), (Bf16, Fours), EvenOdd),
        (of((16, 2), (96, 32), e4m3), (Bf16, EvenOdd, [true; 3]), (Bf16, Fours), EvenOdd),
        (of((8, 1), (40, 32), None), (EvenOdd, EvenOdd, [false, true, true]), (Bf16, Fours), EvenOdd),
        (of((8, 1), (96, 40), None), (Bf16, EvenOdd, [true, false, true]), (Bf16, Fours), EvenOdd),
        (of((8, 1), (40, 40), None), (EvenOdd, EvenOdd, none), (Bf16, Fours), EvenOdd),
        (of((8, 2), (96, 32), None), (Bf16, EvenOdd, [true; 3]), (Bf16, Fours), EvenOdd),
        (of((6, 2), (96, 32), None), (EvenOdd, EvenOdd, none), (Bf16, Fours), EvenOdd),
        (f16(None), (Plain, Plain, none), (Plain, Plain), Plain),
        (f16(e4m3), (Plain, Plain, none), (Plain, Plain), Plain),
    ] {
        let what = format!("{} of {:?}, {:?}", problem.dtypes.qk, problem.cache.dtype, problem.dims);
        assert_eq!(ways::<SoftTiles>(&problem), in_tiles, "{what}, tiles");
        assert_eq!(ways::<SoftDots>(&problem), (in_dots.0, in_dots.1, none), "{what}, dot products");
        assert_eq!(ways::<Portable>(&problem), (in_f32, in_f32, none), "{what}, f32");
    }
}

/// Sizes of scratch for tasks of at most ten rows of two heads.
#[test]
fn a_threads_scratch_has_what_its_rows_and_a_block_of_its_heads_take() {
    fn sizes<S: Simd>(problem: &FwdProblem) -> [usize; 10] {
        of_problem(problem, &[], |shared| {
            let task = Task { span: 0, heads: (0, 2), first_row: 0, rows: 5, chunks: (0, 1), slot: None };
            assert_eq!(task.states(), 10);
            let queries = shared.queries_len::<S>(&task);
            let mut scratch = in_exact_sizes(|| shared.row_scratch::<S>(10, 2, queries).unwrap());
            let super::Scratch {
                queries: q, scores, alpha, out, total, keys, values, staged, packed, ..
            } = &mut scratch;
            let all = [q, scores, alpha, out, total, keys, values, staged, packed];
            let [q, scores, alpha, out, total, keys, values, staged, packed] =
                all.map(|of| of.numbers().len());
            [queries, q, scores, alpha, out, total, keys, values, staged, packed]
        })
    }
    // Buffers in order: rows of Q and O in whole vectors of codes, 64 and 16 numbers; blocks of 64 keys in bf16;
    // scratch for pieces of K, also whole vectors of codes; weights of four tiles of eight queries; scores for
    // codes twice, for a block and the next.
    let tiled = problem((16, 2), (96, 32), Some(DType::E4m3Fn));
    assert_eq!(sizes::<SoftTiles>(&tiled), [2048, 2048, 2 * 26 * 64, 16, 640, 640, 6144, 2048, 4096, 4096]);
    assert_eq!(sizes::<Portable>(&tiled), [960, 960, 640, 16, 320, 320, 6144, 2048, 0, 0]);
    let values_alone = problem((16, 2), (40, 32), None);
    assert_eq!(sizes::<SoftTiles>(&values_alone), [640, 640, 640, 16, 640, 640, 2560, 2048, 2048, 4096]);
    let beside = problem((4, 2), (40, 24), None);
    assert_eq!(sizes::<SoftTiles>(&beside), [640, 640, 640, 16, 640, 640, 2560, 1536, 0, 0]);
}

/// With scores of 0 a row's sum counts the keys that it has seen: a chunk has 512 keys, and the last chunk the
/// rest.
#[test]
fn a_chunk_has_512_keys_and_the_last_one_what_is_left() {
    let dims = Dims { seqlen_k: 1100, ..problem((2, 1), (8, 8), None).dims };
    let valid = FwdProblem::batch(DType::Bf16, dims).validate().unwrap();
    let [q, k, v] = [valid.shape_q(), valid.shape_k(), valid.shape_v()]
        .map(|shape| vec![bf16::ZERO; shape.num_elems() as usize]);
    let spans = fmha_core::seq::spans(&valid, &SeqArgs::default()).unwrap();
    let nothing = DevSliceMut::host::<bf16>(&mut []);
    let args = FwdArgs::new(DevSlice::host(&q), DevSlice::host(&k), DevSlice::host(&v), nothing);
    let blocks = Blocks { rows_only: true, ..FORWARD_BLOCKS };
    let call = Forward { problem: &valid, args: &args, spans: &spans, blocks };
    let shared = call.shared(KvRows::UNPAGED, None, blocks, None);
    let task = Task { span: 0, heads: (0, 1), first_row: 0, rows: 4, chunks: (0, 3), slot: None };
    let mut scratch = shared.row_scratch::<Portable>(4, 1, shared.queries_len::<Portable>(&task)).unwrap();
    let rows = shared.rows::<Portable>(task);
    shared.load_rows(Portable, &mut scratch, &rows);
    let (mut states, mut sums) = ([State::EMPTY; 4], Vec::new());
    shared.attend_chunks(Portable, &mut scratch, &rows, task.chunks, &mut states, |chunk, _, states| {
        assert!(states.iter().all(|state| state.seen));
        sums.push((chunk, states.iter().map(|state| state.chunk.row_sum).collect::<Vec<f32>>()));
    });
    assert_eq!(sums, [(0, 512.0), (1, 512.0), (2, 76.0)].map(|(chunk, count)| (chunk, vec![count; 4])));
}

/// FP8 codes give bits equal to bf16 from chunk to chunk. Every query's softmax runs during the scores of the next
/// block, also if blocks are skipped or partly visible.
#[test]
fn codes_have_the_bits_of_their_bf16_from_chunk_to_chunk() {
    let values = fp8_table(DType::E4m3Fn);
    for (mask, heads, dims) in [
        ("0", (8, 1), (128, 128)),
        ("b:300,0,3", (8, 2), (64, 128)),
        ("b", (16, 1), (256, 64)),
        // A head with more rows than a tile has.
        ("0", (20, 1), (64, 64)),
        ("b", (4, 1), (32, 96)),
    ] {
        let with_cache = |cache| {
            let dims = Dims { seqlen_k: 700, ..problem(heads, dims, None).dims };
            let mut problem = FwdProblem::new(QLayout::Batch, KvLayout::Strided, DType::Bf16, dims);
            (problem.mask, problem.cache.dtype) = (mask.parse().unwrap(), cache);
            problem.validate().unwrap()
        };
        let (plain, coded) = (with_cache(None), with_cache(Some(DType::E4m3Fn)));
        let codes = |count: u64, salt: u32| -> Vec<u8> {
            (0..count).map(|i| philox4x32_10([i as u32, salt, 0, 0], [5, 6])[0] as u8 & 0xaf).collect()
        };
        let wide = |codes: &[u8]| -> Vec<bf16> {
            codes.iter().map(|&code| bf16::from_f32(values[usize::from(code)])).collect()
        };
        let q = wide(&codes(plain.shape_q().num_elems(), 1));
        let (k, v) = (codes(plain.shape_k().num_elems(), 2), codes(plain.shape_v().num_elems(), 3));
        let (k_wide, v_wide) = (wide(&k), wide(&v));
        let tiles = attend(SoftTiles::PLAIN, &plain, &q, DevSlice::host(&k_wide), DevSlice::host(&v_wide));
        let found = attend(SoftTiles::PLAIN, &coded, &q, DevSlice::host(&k), DevSlice::host(&v));
        let f32s = attend(Portable, &plain, &q, DevSlice::host(&k_wide), DevSlice::host(&v_wide));
        for (at, ((tiles, found), f32s)) in tiles.iter().zip(&found).zip(&f32s).enumerate() {
            let what = format!("{mask} {heads:?} {dims:?} element {at}: {tiles}, {found}, {f32s}");
            assert_eq!(tiles.to_bits(), found.to_bits(), "{what}");
            assert!((tiles.to_f32() - f32s.to_f32()).abs() <= 0.02 * (1.0 + f32s.to_f32().abs()), "{what}");
        }
    }
}

/// NaN in V of one head does not reach another head: it is placed in the second head's first block, where two heads
/// share a task, because the last block of the first head leaves its scratch to that block.
#[test]
fn what_a_head_leaves_in_the_tiles_of_v_reaches_no_other_head() {
    let valid = problem((16, 2), (64, 64), None);
    let ones = |count: u64| vec![bf16::ONE; count as usize];
    let (q, k) = (ones(valid.shape_q().num_elems()), ones(valid.shape_k().num_elems()));
    let mut v = ones(valid.shape_v().num_elems());
    for key in 64..128 {
        v[valid.strides.v.offset(0, key, 1, 40) as usize] = bf16::NAN;
    }
    let o = attend(SoftTiles::PLAIN, &valid, &q, DevSlice::host(&k), DevSlice::host(&v));
    for (i, head, d) in
        (0..SEQLEN_Q).flat_map(|i| (0..16).flat_map(move |head| (0..64).map(move |d| (i, head, d))))
    {
        let found = o[valid.strides.o.offset(0, i, head, d) as usize];
        let sees = head >= 8 && d == 40;
        assert!(
            if sees { found.is_nan() } else { found == bf16::ONE },
            "query {i}, head {head}, column {d}: {found}"
        );
    }
}

/// Places in V where [`keeps_columns_apart`] puts special numbers: the key, and the column of a head.
const PLANTED: [(u32, u32); 6] = [(3, 0), (17, 33), (17, 62), (70, 7), (149, 94), (149, 95)];

/// Checks that in tiles, which multiply pairs of columns, no element of a pair reaches the other's sums. Rows of V
/// are a page apart, equally far apart, or neither.
fn keeps_columns_apart<S: Simd>(s: S) {
    // Codes of e5m2 with values up to 1, NaN and both infinities: they are the high bytes of f16.
    let code = |i: u64, salt: u32| philox4x32_10([i as u32, salt, 0, 0], [3, 4])[0] as u8 & 0xbc;
    let planted = [0x7e, 0x7c, 0xfc];
    let wide = |codes: &[u8]| -> Vec<bf16> {
        let values = fp8_table(DType::E5m2);
        codes.iter().map(|&code| bf16::from_f32(values[usize::from(code)])).collect()
    };
    for ratio in [4, 5, 8, 9, 13, 16] {
        for page_size in [0, 5, 16] {
            let mut plain = FwdProblem::clone(&problem((2 * ratio, 2), (32, 96), None));
            let pages: Vec<i32> = match page_size {
                0 => Vec::new(),
                _ => (0..SEQLEN_K.div_ceil(page_size) as i32).rev().collect(),
            };
            if page_size > 0 {
                let problem =
                    FwdProblem::new(QLayout::Batch, KvLayout::Paged { page_size }, DType::Bf16, plain.dims);
                (plain.layout.kv, plain.strides.k, plain.strides.v) =
                    (problem.layout.kv, problem.strides.k, problem.strides.v);
            }
            let coded = plain.clone().dtype_cache(DType::E5m2).validate().unwrap();
            let plain = plain.validate().unwrap();
            let rows = if page_size == 0 { SEQLEN_K } else { pages.len() as u32 * page_size };
            let q: Vec<u8> = (0..plain.shape_q().num_elems()).map(|i| code(i, 1) & 0xaf).collect();
            let k: Vec<u8> = (0..u64::from(rows * 2 * 32)).map(|i| code(i, 2) & 0xaf).collect();
            let v: Vec<u8> = (0..u64::from(rows * 2 * 96)).map(|i| code(i, 3)).collect();
            let mut spoilt = v.clone();
            for (n, (key, d)) in PLANTED.into_iter().enumerate() {
                let row = match page_size {
                    0 => key,
                    _ => pages[(key / page_size) as usize] as u32 * page_size + key % page_size,
                };
                // Row of the second head.
                spoilt[((row * 2 + 1) * 96 + d) as usize] = planted[n % 3];
            }
            let of = |k: DevSlice<'_>, v: DevSlice<'_>, problem: &ValidFwd| {
                attend_pages(s, problem, &wide(&q), k, v, &pages)
            };
            let (wide_k, wide_v, wide_spoilt) = (wide(&k), wide(&v), wide(&spoilt));
            let clean = of(DevSlice::host(&wide_k), DevSlice::host(&wide_v), &plain);
            let found = of(DevSlice::host(&wide_k), DevSlice::host(&wide_spoilt), &plain);
            let found_of_codes = of(DevSlice::host(&k), DevSlice::host(&spoilt), &coded);
            for i in 0..SEQLEN_Q {
                for (head, d) in (0..2 * ratio).flat_map(|head| (0..96).map(move |d| (head, d))) {
                    let at = plain.strides.o.offset(0, i, head, d) as usize;
                    let what =
                        format!("ratio {ratio}, pages of {page_size}, query {i}, head {head}, column {d}");
                    // The last key is hidden from the first query.
                    let is_spoilt = head >= ratio
                        && PLANTED.iter().any(|&(key, col)| col == d && (key < SEQLEN_K - 1 || i == 1));
                    let bits = [found[at], found_of_codes[at]];
                    if is_spoilt {
                        assert!(bits.iter().all(|o| !o.is_finite()), "{what}: {bits:?}");
                    } else {
                        assert!(bits.iter().all(|o| o.to_bits() == clean[at].to_bits()), "{what}: {bits:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_in_v_reaches_no_other_column() {
    keeps_columns_apart(SoftTiles::FUSED);
    #[cfg(target_arch = "x86_64")]
    Amx::detect().map_or_else(|| eprintln!("absent: amx, which this processor has not"), keeps_columns_apart);
}
