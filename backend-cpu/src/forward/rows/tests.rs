//! Rows in tiles and beside them, in software: most processors have no tiles.

use fmha_core::dropout::philox4x32_10;
use fmha_core::seq::KvRows;
use fmha_core::{
    DType, DevSlice, DevSliceMut, Dims, FwdArgs, FwdProblem, KvLayout, QLayout, SeqArgs, SeqSpan, Shape,
    Strides, ValidFwd,
};
use half::bf16;

use super::super::{Blocks, Forward, Shared};
use super::{CHUNK_KEYS, Fold, MAX_STATES, Task};
use crate::isa::FORWARD_BLOCKS;
use crate::simd::{Portable, Simd, SoftDots, SoftTiles};
use crate::tasks::Threads;
use crate::tensor::fp8_table;

const SEQLEN_Q: u32 = 2;
const SEQLEN_K: u32 = 150;

/// Two queries of one sequence; the last key is hidden from the first.
fn problem(heads: (u32, u32), dims: (u32, u32), cache: Option<DType>) -> ValidFwd {
    let dims = Dims {
        batch: 1,
        seqlen_q: SEQLEN_Q,
        seqlen_k: SEQLEN_K,
        num_heads_q: heads.0,
        num_heads_kv: heads.1,
        head_dim_qk: dims.0,
        head_dim_v: dims.1,
    };
    let mut problem = FwdProblem::new(QLayout::Batch, KvLayout::Strided, DType::Bf16, dims);
    problem.mask = "b".parse().unwrap();
    problem.dtype_cache = cache;
    problem.validate().unwrap()
}

fn attend<S: Simd>(s: S, valid: &ValidFwd, q: &[bf16], k: DevSlice<'_>, v: DevSlice<'_>) -> Vec<bf16> {
    let mut o = vec![bf16::ZERO; valid.shape_o().num_elems() as usize];
    let spans = fmha_core::seq::spans(valid, &SeqArgs::default()).unwrap();
    let args = FwdArgs::new(DevSlice::host(q), k, v, DevSliceMut::host(&mut o));
    let blocks = Blocks { rows_only: true, ..FORWARD_BLOCKS };
    Forward { problem: valid, args: &args, spans: &spans, blocks }.run(s, &Threads::new(1).unwrap()).unwrap();
    o
}

#[test]
fn codes_have_the_bits_of_their_bf16_and_a_hidden_nan_stays_hidden_in_tiles_too() {
    let code = |i: u64, salt: u32| {
        let code = philox4x32_10([i as u32, salt, 0, 0], [1, 2])[0] as u8;
        // Up to 28, no NaN; subnormals and both zeros too.
        code & 0xdf
    };
    let values = fp8_table(DType::E4m3Fn);
    let wide = |codes: &[u8]| -> Vec<bf16> {
        codes.iter().map(|&code| bf16::from_f32(values[usize::from(code)])).collect()
    };
    for (heads, dims) in [
        ((8, 1), (96, 32)),
        ((16, 2), (64, 160)),
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
                let hides_last = (at as u64) < plain.o.offset(0, 1, 0, 0) as u64;
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

/// What `look` sees of a call whose sequences have these lengths, all taken in rows.
fn of_call<T>(
    (heads_kv, ratio): (u32, u32),
    dim: u32,
    strides: fn(Shape) -> Strides,
    lengths: &[(u32, u32)],
    look: impl FnOnce(&Shared<'_>) -> T,
) -> T {
    let dims = Dims {
        batch: 1,
        seqlen_q: 100,
        seqlen_k: 2000,
        num_heads_q: heads_kv * ratio,
        num_heads_kv: heads_kv,
        head_dim_qk: dim,
        head_dim_v: dim,
    };
    let mut problem = FwdProblem::batch(DType::F32, dims);
    (problem.k, problem.v) = (strides(problem.shape_k()), strides(problem.shape_v()));
    let span = fmha_core::seq::spans(&problem, &SeqArgs::default()).unwrap()[0];
    let spans: Vec<SeqSpan> =
        lengths.iter().map(|&(seqlen_q, seqlen_k)| SeqSpan { seqlen_q, seqlen_k, ..span }).collect();
    let nothing = DevSlice::host::<f32>(&[]);
    let args = FwdArgs::new(nothing, nothing, nothing, DevSliceMut::host::<f32>(&mut []));
    let blocks = Blocks { rows_only: true, ..FORWARD_BLOCKS };
    let call = Forward { problem: &problem, args: &args, spans: &spans, blocks };
    look(&call.shared(KvRows::UNPAGED, None, blocks))
}

#[test]
fn every_row_meets_every_chunk_in_one_task_and_split_chunks_have_slots_of_their_own() {
    for (heads, lengths) in [
        ((1, 1), &[(1, 1500)][..]),
        ((1, 3), &[(1, 1500), (30, 512), (2, 0)]),
        ((5, 2), &[(1, 1600), (3, 513)]),
        ((8, 1), &[(40, 100)]),
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
            // Rows of a sequence without keys are written all the same.
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
    // One head of three chunks, to be shared among many threads.
    let (mut tasks, mut folds) = (Vec::new(), Vec::new());
    of_call((1, 1), 8, Strides::bshd, &[(1, 1500)], |shared| {
        shared.row_tasks(40, &mut tasks, &mut folds).unwrap()
    });
    assert_eq!((tasks.len(), folds.len()), (3, 1));
}

#[test]
fn heads_are_taken_together_where_they_lie_so_as_evenly_as_it_goes() {
    let together = |dim: u32, strides: fn(Shape) -> Strides, rows: usize| {
        of_call((8, 1), dim, strides, &[(1, 100)], |shared| shared.heads_together(rows))
    };
    assert_eq!([1, 16, 20, 32].map(|rows| together(8, Strides::bshd, rows)), [8, 4, 3, 2]);
    // Of one key, 2 KiB and 16 KiB a head.
    assert_eq!([512, 4096].map(|dim| together(dim, Strides::bshd, 1)), [2, 1]);
    assert_eq!(together(8, Strides::bhsd, 1), 1, "a head's keys lie together");
}
