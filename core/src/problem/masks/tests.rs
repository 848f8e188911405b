#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use super::*;
use crate::args::{DevSlice, DevSliceMut, FwdArgs, MaskArgs, MemorySpace, SeqArgs, check_fwd};
use crate::error::Result;
use crate::layout::KvLayout;
use crate::lengths::read_host;
use crate::mask::BlockClass;
use crate::plan::Workspace;
use crate::seq::spans;
use crate::{Dims, Part};

const DIMS: Dims = Dims::batch(2).seqlens(6, 70).heads(4, 2).head_dim(8);

fn problem() -> FwdProblem {
    FwdProblem::batch(DType::F32, DIMS)
}

/// The keys that a row sees according to `runs`, which must be ascending and without gaps.
fn seen(head: &HeadMasks<'_>, i: u32, keys: std::ops::Range<u32>) -> Vec<u32> {
    let (mut seen, mut at) = (vec![], keys.start);
    head.runs(i, keys.clone(), |run, shown| {
        assert!(run.start == at && run.end > at, "{run:?} after {at}");
        at = run.end;
        if shown != Shown::No {
            seen.extend(run);
        }
    });
    assert_eq!(at, keys.end);
    seen
}

#[test]
fn endpoints_that_decrease_or_lie_outside_are_clamped_as_the_contract_says() {
    let problem = problem();
    // The rows are: plain; decreasing; negative and beyond the keys; equal pairs; an odd number of endpoints after a 0,
    // as another library has them.
    let rows: [[i32; 4]; 6] =
        [[3, 9, 20, 22], [30, 40, 10, 35], [-5, 4, 60, 1000], [7, 7, 9, 9], [0, 5, 8, 70], [70, 80, 90, 99]];
    let expected = |i: usize, j: u32| {
        let (mut before, mut inside) = (0, false);
        for (m, &endpoint) in rows[i].iter().enumerate() {
            let e = endpoint.max(before).min(70);
            inside |= m % 2 == 1 && (before..e).contains(&j.cast_signed());
            before = e;
        }
        inside
    };
    let numbers: Vec<i32> = (0..4).flat_map(|m| rows.iter().map(move |row| row[m])).collect();
    let intervals = Intervals::batch(&problem, MaskAxes::SHARED, 4);
    let problem = problem.intervals(intervals);
    let args = MaskArgs::default().intervals(DevSlice::host(&numbers));
    let masks = HostMasks::of(&problem, &args, None).unwrap().unwrap();
    for span in spans(&problem, &SeqArgs::default()).unwrap() {
        let head = masks.head(&span, 3);
        for i in 0..6 {
            for keys in [0..70, 5..33, 21..61] {
                let wanted: Vec<u32> = keys.clone().filter(|&j| expected(i as usize, j)).collect();
                assert_eq!(seen(&head, i, keys.clone()), wanted, "row {i} of {keys:?}");
            }
        }
        assert_eq!(head.class(0..1, 3..9), BlockClass::Inside);
        assert_eq!(head.class(0..2, 3..9), BlockClass::Edge);
        assert_eq!(head.class(3..4, 0..70), BlockClass::Skipped);
        assert_eq!(head.hull(0..2, 70), 3..40);
        // The band shows a window of two keys before each row's own key, and key 0.
        let band = problem.clone().mask("t:2,0,1".parse().unwrap()).band(6, 70);
        let pairs = (0..6u32).map(|i| (0..=i).filter(move |&j| j == 0 || i - j <= 2));
        let shown = pairs.enumerate().map(|(i, keys)| keys.filter(|&j| expected(i, j)).count() as u64);
        assert_eq!(head.pairs(&band), shown.sum::<u64>());
    }
}

#[test]
fn masks_join_and_a_full_block_asks_no_other_mask() {
    let problem = problem();
    let axes = MaskAxes { per_batch: false, heads: 4 };
    let intervals = Intervals::batch(&problem, MaskAxes::SHARED, 2);
    let bits = MaskBits::dense(&problem, MaskAxes { per_batch: true, heads: 2 }, Totals::NONE);
    let lists = BlockLists::dense(&problem, axes, [4, 16], Some(3), Some(2));
    let endpoints: Vec<i32> = (0..12).map(|at| if at < 6 { 0 } else { 40 }).collect();
    // Each row has three words: even keys for the first kv head, no keys for the other.
    let words: Vec<u32> =
        (0..2 * 2 * 6 * 3).map(|at| if at / 18 % 2 == 0 { 0x5555_5555 } else { 0 }).collect();
    // Queries 0..4 list blocks 0 and 1 as partial and 3 as full; queries 4..6 list none.
    let counts: Vec<i32> = [2, 0].repeat(4);
    let indices: Vec<i32> = [1, 0, i32::MAX, -1, -1, -1].repeat(4);
    let full_counts: Vec<i32> = [1, 0].repeat(4);
    let full_indices: Vec<i32> = [3, 99, 0, 0].repeat(4);
    let problem = problem.intervals(intervals).mask_bits(bits).block_lists(lists);
    let args = MaskArgs::default()
        .intervals(DevSlice::host(&endpoints))
        .bits(DevSlice::host(&words))
        .kv_num_blocks(DevSlice::host(&counts))
        .kv_indices(DevSlice::host(&indices))
        .full_kv_num_blocks(DevSlice::host(&full_counts))
        .full_kv_indices(DevSlice::host(&full_indices));
    let masks = HostMasks::of(&problem, &args, None).unwrap().unwrap();
    let span = spans(&problem, &SeqArgs::default()).unwrap()[1];
    let wanted: Vec<u32> = (0..32).filter(|j| j % 2 == 0).chain(48..64).collect();
    assert_eq!(seen(&masks.head(&span, 1), 3, 0..70), wanted);
    assert_eq!(seen(&masks.head(&span, 2), 3, 0..70), (48..64).collect::<Vec<_>>());
    assert_eq!(seen(&masks.head(&span, 1), 4, 0..70), Vec::<u32>::new());
    assert_eq!(masks.head(&span, 1).shown(0, 50), Shown::Full);
    assert_eq!(masks.head(&span, 1).shown(0, 2), Shown::Asked);
    check_masks(&problem, &SeqArgs::default(), &args, read_host).unwrap();
}

#[test]
fn packed_rows_have_masks_by_row_and_lists_by_sequence() {
    let problem = FwdProblem::new(QLayout::Packed, KvLayout::Packed, DType::F32, DIMS);
    let lists = BlockLists::dense(&problem, MaskAxes { per_batch: true, heads: 1 }, [8, 8], Some(2), None);
    let problem = problem.intervals(Intervals::packed(5, 1, 2)).block_lists(lists);
    let (cu_q, cu_k) = ([0, 2, 5], [0, 70, 90]);
    let seq = SeqArgs::default()
        .totals(Totals::packed(5, 90))
        .cu_seqlens_q(DevSlice::host(&cu_q))
        .cu_seqlens_k(DevSlice::host(&cu_k));
    let endpoints = [0, 0, 10, 11, 12, 40, 40, 16, 17, 18];
    let (counts, indices) = ([1, 2], [0, 7, 1, 0]);
    let args = MaskArgs::default()
        .intervals(DevSlice::host(&endpoints))
        .kv_num_blocks(DevSlice::host(&counts))
        .kv_indices(DevSlice::host(&indices));
    let masks = HostMasks::of(&problem, &args, Some(5)).unwrap().unwrap();
    let spans = spans(&problem, &seq).unwrap();
    assert_eq!(seen(&masks.head(&spans[0], 0), 1, 0..70), (0..8).collect::<Vec<_>>());
    assert_eq!(seen(&masks.head(&spans[1], 0), 0, 0..20), (10..16).collect::<Vec<_>>());
    assert_eq!(seen(&masks.head(&spans[1], 0), 2, 0..20), (12..16).collect::<Vec<_>>());
}

#[test]
fn what_does_not_fit_is_refused_by_its_name_and_number() {
    let of = |edit: &dyn Fn(&mut FwdProblem)| {
        let mut wrong = problem();
        edit(&mut wrong);
        wrong.validate().unwrap_err().to_string()
    };
    let intervals =
        |endpoints, heads| Intervals::batch(&problem(), MaskAxes { per_batch: true, heads }, endpoints);
    let lists = |heads, sizes, most| {
        BlockLists::dense(&problem(), MaskAxes { per_batch: true, heads }, sizes, most, None)
    };
    let negative = |mut it: Intervals| {
        it.strides.dim = -6;
        it
    };
    for (edit, text) in [
        (&|p: &mut FwdProblem| p.masks.intervals = Some(intervals(3, 1)) as _, "intervals has 3 endpoints"),
        (&|p: &mut FwdProblem| p.masks.intervals = Some(intervals(0, 1)), "intervals has 0 endpoints"),
        (
            &|p: &mut FwdProblem| p.masks.intervals = Some(intervals(2, 3)),
            "intervals has 3 heads, not 1, num_heads_kv 2 or num_heads_q 4",
        ),
        (
            &|p: &mut FwdProblem| p.masks.intervals = Some(negative(intervals(2, 1))),
            "intervals.dim stride -6 is negative",
        ),
        (
            &|p: &mut FwdProblem| p.masks.block_lists = Some(lists(2, [8, 8], Some(4))),
            "block_lists has 2 heads, not 1 or num_heads_q 4",
        ),
        (
            &|p: &mut FwdProblem| p.masks.block_lists = Some(lists(1, [8, 0], Some(4))),
            "block_lists.block_k 0 is not in 1..=",
        ),
        (&|p: &mut FwdProblem| p.masks.block_lists = Some(lists(1, [8, 8], None)), "block_lists has 0 lists"),
        (
            &|p: &mut FwdProblem| {
                p.masks.bits = Some(MaskBits::dense(&problem(), MaskAxes::SHARED, Totals::NONE));
                p.part = Part { position_k: 40, ..Part::default() };
            },
            "mask_bits: position_k 40 of a part is not a multiple of 32",
        ),
        (
            &|p: &mut FwdProblem| {
                p.masks.block_lists = Some(lists(1, [8, 4], Some(4)));
                p.part = Part { position_q: 12, position_k: 4, ..Part::default() };
            },
            "block_lists: position_q 12 of a part is not a multiple of block_q 8",
        ),
        (
            &|p: &mut FwdProblem| {
                p.masks.block_lists = Some(lists(1, [4, 8], Some(4)));
                p.part = Part { position_q: 12, position_k: 4, ..Part::default() };
            },
            "block_lists: position_k 4 of a part is not a multiple of block_k 8",
        ),
    ] as [(&dyn Fn(&mut FwdProblem), &str); 10]
    {
        let error = of(edit);
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn tensors_are_there_iff_the_problem_has_them_and_are_as_large() {
    let plain = problem();
    let masked = plain.clone().intervals(Intervals::batch(&plain, MaskAxes::SHARED, 2)).validate().unwrap();
    let plain = plain.validate().unwrap();
    let numbers = [0i32; 2 * 6];
    let (q, k) = (vec![0f32; 2 * 6 * 4 * 8], vec![0f32; 2 * 70 * 2 * 8]);
    let check = |problem, masks: MaskArgs<'_>| {
        let mut o = vec![0f32; q.len()];
        let [k, v] = [DevSlice::host(&k); 2];
        let args = FwdArgs::new(DevSlice::host(&q), k, v, DevSliceMut::host(&mut o)).masks(masks);
        check_fwd(problem, &args, Workspace::NONE, MemorySpace::Host).map_err(|error| error.to_string())
    };
    let given = |numbers| MaskArgs::default().intervals(DevSlice::host(numbers));
    assert_eq!(check(&masked, given(&numbers)), Ok(()));
    let refused = |problem, masks, text: &str| {
        let error = check(problem, masks).unwrap_err();
        assert!(error.contains(text), "{error}");
    };
    refused(&masked, MaskArgs::default(), "intervals is missing: 48 bytes are wanted");
    refused(&plain, given(&numbers), "intervals is given, but the problem has none");
    refused(&masked, given(&numbers[..11]), "intervals has 44 bytes, but its extents and strides reach 48");
    let floats = [0f32; 12];
    refused(&masked, MaskArgs::default().intervals(DevSlice::host(&floats)), "intervals has elements of f32");
}

#[test]
fn the_checking_mode_reports_what_a_kernel_clamps() {
    let plain = problem();
    let lists = |axes| BlockLists::dense(&plain, axes, [4, 16], Some(3), Some(1));
    let shared = MaskAxes::SHARED;
    let of_lists = |counts: &[i32], indices: &[i32], full: i32| -> Result<()> {
        let problem = plain.clone().block_lists(lists(shared));
        let (full_counts, full_indices) = ([1, 0], [full, 0]);
        let args = MaskArgs::default()
            .kv_num_blocks(DevSlice::host(counts))
            .kv_indices(DevSlice::host(indices))
            .full_kv_num_blocks(DevSlice::host(&full_counts))
            .full_kv_indices(DevSlice::host(&full_indices));
        check_masks(&problem, &SeqArgs::default(), &args, read_host)
    };
    of_lists(&[2, 0], &[0, 4, 9, 9, 9, 9], 3).unwrap();
    for (counts, indices, full, text) in [
        ([4, 0], [0, 1, 2, 9, 9, 9], 3, "kv_num_blocks[0][0][0] 4 is not in 0..=3"),
        ([0, -1], [9; 6], 3, "kv_num_blocks[0][0][1] -1"),
        ([2, 0], [0, 5, 9, 9, 9, 9], 3, "kv_indices[0][0][0][1] 5 is not in 0..5"),
        ([2, 0], [1, 1, 9, 9, 9, 9], 3, "kv_indices[0][0][0][1] 1 is listed twice"),
        ([2, 0], [0, 3, 9, 9, 9, 9], 3, "full_kv_indices[0][0][0][0] 3 is listed twice"),
    ] {
        let error = of_lists(&counts, &indices, full).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    let of_intervals = |per_batch: bool, used: [i32; 2], wrong: i32| -> Result<()> {
        let axes = MaskAxes { per_batch, heads: 1 };
        let problem = plain.clone().seqused_k(true).intervals(Intervals::batch(&plain, axes, 2));
        let mut numbers = vec![3; 24];
        numbers[13] = wrong;
        numbers[1] = if per_batch { 3 } else { wrong };
        let args = MaskArgs::default().intervals(DevSlice::host(&numbers));
        check_masks(&problem, &SeqArgs::default().seqused_k(DevSlice::host(&used)), &args, read_host)
    };
    of_intervals(true, [70, 60], 60).unwrap();
    // A mask that all sequences share may reach beyond a shorter sequence.
    of_intervals(false, [20, 60], 70).unwrap();
    for (per_batch, wrong, text) in [
        (true, 61, "endpoint 0 of sequence 1, head 0, query 1 is 61, not in 0..=60"),
        (false, 71, "endpoint 0 of sequence 0, head 0, query 1 is 71, not in 0..=70"),
        (true, -1, "is -1, not in 0..=60"),
    ] {
        let error = of_intervals(per_batch, [70, 60], wrong).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}
