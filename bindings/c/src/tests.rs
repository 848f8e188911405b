//! Tests of the C ABI from Rust, on the CPU backend; `tests/every_field.c` calls it from C.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

use fmha::{Backend, Device, MaskSpec};
use proptest::prelude::*;

use crate::host::{self, Choice};
use crate::{
    FMHA_BF16, FMHA_BIAS_ALIBI, FMHA_BIAS_ALIBI_PER_BATCH, FMHA_BIAS_ELEMENTWISE, FMHA_BY_LSE, FMHA_E4M3FN,
    FMHA_F16, FMHA_F32, FMHA_MXFP8_E4M3, FmhaArgs, FmhaBlockScales, FmhaCache, FmhaCaptured,
    FmhaCapturedArgs, FmhaCode, FmhaCombineArgs, FmhaCombineProblem, FmhaGradients, FmhaLists, FmhaMasks,
    FmhaOptions, FmhaPartial, FmhaPlan, FmhaProblem, FmhaStrides, fmha_build_mask, fmha_drop,
    fmha_drop_mask_object, fmha_last_error, fmha_mask_object, fmha_plan, fmha_run, guard,
};

/// A struct with everything 0 but its size, as `fmha.h` tells callers to start.
macro_rules! new {
    ($kind:ident) => {{
        // SAFETY: numbers and pointers, of which all bits may be 0.
        let mut made: $kind = unsafe { std::mem::zeroed() };
        made.struct_bytes = size_of::<$kind>() as u64;
        made
    }};
}
pub(crate) use new;

/// A struct with some fields changed.
macro_rules! with {
    ($base:expr, $($($field:ident).+ = $value:expr),+ $(,)?) => {{
        let mut changed = $base;
        $(changed.$($field).+ = $value;)+
        changed
    }};
}
pub(crate) use with;

const ROWS: usize = 5;
const HEADS: usize = 2;
const DIM: usize = 8;
const SCALE: f32 = 0.25;
const NO_STRIDES: FmhaStrides =
    FmhaStrides { batch_stride: 0, seqlen_stride: 0, head_stride: 0, dim_stride: 0 };

/// A problem, and the arguments of a run of it.
#[derive(Clone, Copy)]
struct Call {
    p: FmhaProblem,
    a: FmhaArgs,
}

fn cpu() -> Device {
    Backend::Cpu.open().unwrap()
}

const DENSE: FmhaStrides = FmhaStrides {
    batch_stride: (ROWS * HEADS * DIM) as i64,
    seqlen_stride: (HEADS * DIM) as i64,
    head_stride: DIM as i64,
    dim_stride: 1,
};

fn call(q: &[u16], k: &[u16], v: &[u16], o: &mut [u16], batch: i64, cu_seqlens: &[i32]) -> Call {
    let packed = !cu_seqlens.is_empty();
    let cu = if packed { cu_seqlens.as_ptr() } else { null() };
    let total = cu_seqlens.last().copied().unwrap_or_default().into();
    let p = with!(
        new!(FmhaProblem),
        batch = batch,
        seqlen_q = ROWS as i64,
        seqlen_k = ROWS as i64,
        num_heads_q = HEADS as i64,
        num_heads_kv = HEADS as i64,
        head_dim_qk = DIM as i64,
        head_dim_v = DIM as i64,
        q = DENSE,
        k = DENSE,
        v = DENSE,
        o = DENSE,
        mask = c"b".as_ptr(),
        softmax_scale = &raw const SCALE_AT,
        packed_q = packed.into(),
        packed_k = packed.into(),
        dtype_qk = FMHA_F16,
        dtype_v = FMHA_F16,
        dtype_o = FMHA_F16,
    );
    let a = with!(
        new!(FmhaArgs),
        q = q.as_ptr().cast(),
        k = k.as_ptr().cast_mut().cast(),
        v = v.as_ptr().cast_mut().cast(),
        o = o.as_mut_ptr().cast(),
        cu_seqlens_q = cu,
        cu_seqlens_k = cu,
        total_q = total,
        total_k = total,
    );
    Call { p, a }
}

static SCALE_AT: f32 = SCALE;

/// Test numbers of f16 in 1..2; the numbers of a tensor differ from each other.
fn numbers(seed: u16, rows: usize) -> Vec<u16> {
    (0..rows * HEADS * DIM)
        .map(|i| 0x3C00 | (i as u16).wrapping_mul(613).wrapping_add(seed) & 0x3FF)
        .collect()
}

fn last_error() -> String {
    // SAFETY: it gives a C string of this thread.
    unsafe { CStr::from_ptr(fmha_last_error()) }.to_string_lossy().into_owned()
}

fn plan(call: &Call) -> Result<FmhaPlan, fmha::Error> {
    // SAFETY: every host pointer of a test's problem is memory of the test.
    unsafe { FmhaPlan::new(&cpu(), &call.p, host::mask(&call.p)?, &Choice::default()) }
}

fn refused(call: &Call) -> String {
    plan(call).map(|_| ()).unwrap_err().to_string()
}

fn run(plan: &FmhaPlan, call: &Call) -> Result<(), String> {
    // SAFETY: every pointer of the call is memory of the test, as large as the problem says, or is refused.
    unsafe { plan.run(&call.a) }.map_err(|error| error.to_string())
}

fn run_on_cpu(call: &Call) {
    run(&plan(call).unwrap(), call).unwrap();
}

#[test]
fn a_packed_call_is_the_batch_call_of_equal_lengths() {
    let (q, k, v) = (numbers(1, 2 * ROWS), numbers(77, 2 * ROWS), numbers(300, 2 * ROWS));
    let (mut batched, mut packed) = (vec![0; q.len()], vec![0; q.len()]);
    run_on_cpu(&call(&q, &k, &v, &mut batched, 2, &[]));
    run_on_cpu(&call(&q, &k, &v, &mut packed, 2, &[0, ROWS as i32, 2 * ROWS as i32]));
    assert_eq!(batched, packed);
    // Under the causal mask the first query of each sequence sees one key, its own.
    for row in [0, ROWS] {
        let row = row * HEADS * DIM..(row + 1) * HEADS * DIM;
        assert_eq!(batched[row.clone()], v[row]);
    }
    assert_ne!(batched, v);
}

fn captured(name: &CStr) -> FmhaCaptured {
    // SAFETY: numbers and pointers, of which all bits may be 0.
    let none: FmhaCaptured = unsafe { std::mem::zeroed() };
    with!(none, name = name.as_ptr())
}

/// Slopes of some heads, as a tensor that a score function captures.
fn captured_slopes(extent: i64) -> FmhaCaptured {
    let mut slopes = captured(c"slopes");
    (slopes.shape[0], slopes.strides[0], slopes.num_dims) = (extent, 1, 1);
    slopes
}

// SAFETY: numbers and pointers, of which all bits may be 0.
const NO_CAPTURED_ARGS: FmhaCapturedArgs = unsafe { std::mem::zeroed() };

fn code(score: Option<&CStr>, mask: Option<&CStr>, captured: &[FmhaCaptured]) -> FmhaCode {
    FmhaCode {
        struct_bytes: size_of::<FmhaCode>() as u64,
        score: score.map_or(null(), CStr::as_ptr),
        mask: mask.map_or(null(), CStr::as_ptr),
        captured: captured.as_ptr(),
        num_captured: captured.len() as i64,
    }
}

#[test]
fn a_mask_and_a_score_as_code_are_the_masks_and_slopes_they_spell() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let (mut built_in, mut coded) = (vec![0; q.len()], vec![0; q.len()]);
    let slopes = [0.5f32, -0.25];
    run_on_cpu(&with!(
        call(&q, &k, &v, &mut built_in, 1, &[]),
        p.mask = c"t:2,0".as_ptr(),
        p.bias_kind = FMHA_BIAS_ALIBI,
        a.alibi_slopes = slopes.as_ptr()
    ));
    let all = [captured(c"left"), captured(c"by"), captured_slopes(2)];
    let score = c"slopes: f32[_]; by: float; s - by * slopes[h] * abs(q - k)";
    let said = code(Some(score), Some(c"left: int; k <= q and q - k <= left"), &all);
    let as_code = with!(call(&q, &k, &v, &mut coded, 1, &[]), p.mask = null(), p.code = &raw const said);
    let plan = plan(&as_code).unwrap();
    // The numbers are passed with each run.
    let mut given = [NO_CAPTURED_ARGS; 3];
    (given[0].integer, given[1].real, given[2].data) = (2, 1.0, slopes.as_ptr().cast());
    run(&plan, &with!(as_code, a.captured = given.as_ptr())).unwrap();
    assert_eq!(coded, built_in);
    assert_eq!(run(&plan, &as_code), Err("captured is null, but the problem has 3".to_owned()));
    let given_with = |at: usize, change: &dyn Fn(&mut FmhaCapturedArgs)| {
        let mut bad = given;
        change(&mut bad[at]);
        bad
    };
    let written = coded.as_mut_ptr().cast();
    for (bad, error) in [
        (given_with(2, &|x| x.data = null()), "captured slopes.data is null, but the function reads f32[_]"),
        (
            given_with(1, &|x| x.data = given[2].data),
            "captured by.data is given, but the function reads float",
        ),
        (given_with(2, &|x| x.grad = written), "captured slopes.grad is given, but write_grad is 0"),
        (given_with(0, &|x| x.reserved = 3), "reserved 3 is not 0"),
    ] {
        let text = run(&plan, &with!(as_code, a.captured = bad.as_ptr())).unwrap_err();
        assert!(text.contains(error), "{text}, not {error}");
    }
}

#[test]
fn what_is_wrong_with_code_is_named() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let mut o = vec![0; q.len()];
    let given = |change: fn(&mut FmhaCaptured)| {
        let mut given = captured_slopes(4);
        change(&mut given);
        given
    };
    let reads = c"slopes: f32[_]; s + slopes[h]";
    let number = c"slopes: float; s * slopes";
    type Case<'a> = (Option<&'a CStr>, Option<&'a CStr>, Vec<FmhaCaptured>, &'a str);
    let cases: Vec<Case<'_>> = vec![
        (Some(c"s + slope[h]"), None, vec![], "score: column 5, `slope`: the name is neither"),
        (Some(c"s + if"), None, vec![], "score: column 5, `if`"),
        (None, Some(c"k << q"), vec![], "mask"),
        (Some(c"k < q"), None, vec![], "score `k < q` is a bool: it is a mask"),
        (Some(reads), None, vec![], "captured slopes is missing: the function reads f32[_]"),
        (Some(reads), None, vec![given(|x| x.name = null())], "captured[0].name is null"),
        (Some(reads), None, vec![given(|_| ()); 2], "captured slopes is given twice"),
        (Some(c"s * 2"), None, vec![given(|_| ())], "captured slopes is given, but no function reads it"),
        (Some(reads), None, vec![given(|x| x.num_dims = 6)], "captured slopes.num_dims 6 is not in 0..=5"),
        (Some(reads), None, vec![given(|x| x.num_dims = 2)], "captured slopes has 2 axes"),
        (Some(reads), None, vec![given(|x| x.shape[0] = 0)], "captured slopes: extent 0 of axis 0"),
        (Some(reads), None, vec![given(|x| x.shape[0] = -1)], "captured -1 is not in 0..2^32"),
        (Some(reads), None, vec![given(|x| x.strides[0] = -1)], "captured slopes: stride -1 of axis 0"),
        (
            Some(reads),
            None,
            vec![given(|x| x.dtype_grad = 6)],
            "captured slopes.dtype_grad 6 goes with write_grad",
        ),
        (
            Some(reads),
            None,
            vec![given(|x| x.write_grad = 1)],
            "captured slopes.write_grad is 1, but gradients is",
        ),
        (
            Some(number),
            None,
            vec![given(|x| x.write_grad = 1)],
            "captured slopes.write_grad is 1, but a number",
        ),
        (
            Some(number),
            None,
            vec![given(|_| ())],
            "captured slopes.num_dims is 1, but the function reads a number",
        ),
        (Some(reads), None, vec![given(|x| x.write_grad = 2)], "write_grad 2 is neither 0 nor 1"),
        (Some(reads), None, vec![given(|x| x.reserved = 1)], "reserved 1 is not 0"),
    ];
    let call = call(&q, &k, &v, &mut o, 1, &[]);
    for (score, mask, captured, error) in cases {
        let said = code(score, mask, &captured);
        let refused = refused(&with!(call, p.code = &raw const said));
        assert!(refused.contains(error), "{refused}, not {error}");
    }
    let mut said = code(Some(reads), None, &[]);
    (said.num_captured, said.captured) = (1, null());
    let text = refused(&with!(call, p.code = &raw const said));
    assert!(text.contains("captured is null, but num_captured is 1"), "{text}");
    said.struct_bytes = 8;
    let text = refused(&with!(call, p.code = &raw const said));
    assert!(text.contains("struct_bytes 8 is not sizeof(FmhaCode)"), "{text}");
    let given = [NO_CAPTURED_ARGS];
    let text = run(&plan(&call).unwrap(), &with!(call, a.captured = given.as_ptr())).unwrap_err();
    assert!(text.contains("captured is given, but the problem is without it"), "{text}");
}

/// Strides of a mask of `[head, seq, dim]`.
fn mask_strides([head_stride, seqlen_stride, dim_stride]: [i64; 3]) -> FmhaStrides {
    FmhaStrides { batch_stride: 0, seqlen_stride, head_stride, dim_stride }
}

#[test]
fn each_mask_as_data_that_spells_causal_is_causal() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let (mut built_in, mut masked) = (vec![0; q.len()], vec![0; q.len()]);
    run_on_cpu(&call(&q, &k, &v, &mut built_in, 1, &[]));
    let rows = ROWS as i64;
    let ends: Vec<i32> = [vec![0; ROWS], (1..=ROWS as i32).collect()].concat();
    let words: Vec<u32> = (0..ROWS).map(|row| (2 << row) - 1).collect();
    // Blocks have one query and one key: each listed block is visible as a whole.
    let (counts, blocks): (Vec<i32>, Vec<i32>) =
        ((1..=ROWS as i32).collect(), (0..ROWS).flat_map(|_| 0..ROWS as i32).collect());
    let intervals = with!(
        new!(FmhaMasks),
        intervals = mask_strides([2 * rows, 1, rows]),
        endpoints = 2,
        intervals_heads = 1
    );
    let bits = with!(new!(FmhaMasks), mask_bits = mask_strides([rows, 1, 1]), mask_bits_heads = 1);
    let lists = with!(
        new!(FmhaMasks),
        full_kv_num_blocks = mask_strides([rows, 1, 1]),
        full_kv_indices = mask_strides([rows * rows, rows, 1]),
        lists_heads = 1,
        block_q = 1,
        block_k = 1,
        full_max_blocks = rows,
        full = 1,
    );
    let none = new!(FmhaArgs);
    for (masks, args) in [
        (intervals, with!(none, intervals = ends.as_ptr())),
        (bits, with!(none, mask_bits = words.as_ptr())),
        (lists, with!(none, full_kv_num_blocks = counts.as_ptr(), full_kv_indices = blocks.as_ptr())),
    ] {
        let call = call(&q, &k, &v, &mut masked, 1, &[]);
        let a = FmhaArgs { q: call.a.q, k: call.a.k, v: call.a.v, o: call.a.o, ..args };
        run_on_cpu(&Call { p: with!(call.p, mask = null(), masks = &raw const masks), a });
        assert_eq!(masked, built_in);
        masked.fill(0);
    }
}

#[test]
fn a_mask_object_is_read_in_place_of_the_tensors_it_was_built_from() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let (mut causal, mut masked) = (vec![0; q.len()], vec![0; q.len()]);
    run_on_cpu(&call(&q, &k, &v, &mut causal, 1, &[]));
    let rows = ROWS as i64;
    let mut ends: Vec<i32> = [vec![0; ROWS], (1..=ROWS as i32).collect()].concat();
    let masks = with!(
        new!(FmhaMasks),
        intervals =
            FmhaStrides { batch_stride: 0, seqlen_stride: 1, head_stride: 2 * rows, dim_stride: rows },
        endpoints = 2,
        intervals_heads = 1
    );
    let Call { p, a } = call(&q, &k, &v, &mut masked, 1, &[]);
    let p = with!(p, mask = null(), masks = &raw const masks);
    let plan = plan(&Call { p, a }).unwrap();
    let tensors = with!(a, intervals = ends.as_ptr());
    let run = |args: &FmhaArgs| {
        // SAFETY: the plan is alive, and the pointers are memory of this test.
        match unsafe { fmha_run(&raw const plan, args) } {
            0 => Ok(()),
            _ => Err(last_error()),
        }
    };
    let mut object = null_mut();
    // SAFETY: the plan is alive, and the pointers are memory of this test.
    let built = unsafe {
        assert_eq!(fmha_mask_object(&raw const plan, null(), &raw const a, &raw mut object), 0);
        let built = with!(a, built = object);
        let early = run(&built).unwrap_err();
        assert!(early.contains("built 0 times before the call"), "{early}");
        assert_eq!(fmha_build_mask(object, &raw const plan, &raw const a), 1);
        assert!(last_error().contains("intervals is null"), "{}", last_error());
        assert_eq!(fmha_build_mask(object, &raw const plan, &raw const built), 1);
        assert!(last_error().contains("built is given"), "{}", last_error());
        assert_eq!(fmha_build_mask(object, &raw const plan, &raw const tensors), 0);
        built
    };
    ends.fill(0);
    run(&built).unwrap();
    assert_eq!(masked, causal, "the endpoints of its build");
    run(&tensors).unwrap();
    assert!(masked.iter().all(|&number| number == 0), "of the endpoints as they are no query sees a key");
    // SAFETY: absent plans and plans of another pass are refused; the object is dropped once.
    unsafe {
        assert_eq!(fmha_mask_object(null(), null(), &raw const a, &raw mut object), 1);
        assert!(last_error().contains("plan: a mask object has 0 of them"), "{}", last_error());
        assert_eq!(fmha_mask_object(null(), &raw const plan, &raw const a, &raw mut object), 1);
        assert!(last_error().contains("backward is a plan of forward"), "{}", last_error());
        fmha_drop_mask_object(object);
        fmha_drop_mask_object(null_mut());
    }
}

#[test]
fn small_outputs_are_of_the_scores_that_a_query_sees() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let mut o = vec![0; q.len()];
    let mut lse = [0f32; HEADS * ROWS];
    let (mut row_max, mut head_max, mut key_sum) =
        ([9f32; HEADS * ROWS], [9f32; HEADS], [9f32; HEADS * ROWS]);
    let call = with!(
        call(&q, &k, &v, &mut o, 1, &[]),
        p.write_lse = 1,
        p.row_max = 1,
        p.head_max = 1,
        p.key_sum = 1,
        a.lse = lse.as_mut_ptr(),
        a.row_max = row_max.as_mut_ptr(),
        a.head_max = head_max.as_mut_ptr(),
        a.key_sum = key_sum.as_mut_ptr(),
    );
    run_on_cpu(&call);
    for (head, &greatest) in head_max.iter().enumerate() {
        let rows = head * ROWS..(head + 1) * ROWS;
        // Under the causal mask the first query sees one key, so its LSE is the score of that key.
        assert!((row_max[rows.start] - lse[rows.start]).abs() < 1e-5);
        assert_eq!(row_max[rows.clone()].iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b)), greatest);
        assert!((key_sum[rows].iter().sum::<f32>() - ROWS as f32).abs() < 1e-4);
    }
    let refused = refused(&with!(call, p.gradients = &raw const GRADIENTS));
    assert!(refused.contains("row_max 1 is given beside gradients"), "{refused}");
}

/// Gradients in f16, with contiguous strides.
static GRADIENTS: FmhaGradients = FmhaGradients {
    struct_bytes: size_of::<FmhaGradients>() as u64,
    dout: DENSE,
    dq: DENSE,
    dk: DENSE,
    dv: DENSE,
    dbias: NO_STRIDES,
    dtype_grad: FMHA_F16,
    dtype_dbias: 0,
    write_dbias: 0,
    write_dsink: 0,
    has_dlse: 0,
    reserved: 0,
};

#[test]
fn what_is_wrong_with_masks_as_data_is_named() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let mut o = vec![0; q.len()];
    let words = [0i32; 64];
    let base = new!(FmhaMasks);
    let intervals = with!(base, intervals = mask_strides([10, 1, 5]), endpoints = 2, intervals_heads = 1);
    let bits = with!(base, mask_bits = mask_strides([5, 1, 1]), mask_bits_heads = 1);
    let lists = with!(
        base,
        kv_num_blocks = mask_strides([5, 1, 1]),
        kv_indices = mask_strides([5, 1, 1]),
        lists_heads = 1,
        block_q = 2,
        block_k = 2,
        max_blocks = 1,
        partial = 1,
    );
    let call = call(&q, &k, &v, &mut o, 1, &[]);
    for (masks, error) in [
        (with!(base, struct_bytes = 8), "struct_bytes 8 is not sizeof(FmhaMasks)"),
        (with!(intervals, endpoints = 3), "intervals has 3 endpoints a row"),
        (with!(intervals, endpoints = -1), "endpoints -1 is not in 0..2^32"),
        (with!(intervals, endpoints = 0), "intervals_heads 1 goes with endpoints"),
        (with!(intervals, intervals_heads = 3), "intervals has 3 heads"),
        (with!(intervals, intervals.seqlen_stride = -1), "intervals.seq stride -1 is negative"),
        (with!(bits, mask_bits_heads = 3), "mask_bits has 3 heads"),
        (with!(lists, lists_heads = 3), "block_lists has 3 heads"),
        (with!(lists, lists_heads = 0), "partial 1 goes with lists_heads"),
        (with!(lists, partial = 2), "partial 2 is neither 0 nor 1"),
        (with!(lists, full = -1), "full -1 is neither 0 nor 1"),
        (with!(lists, block_q = 0), "block_lists.block_q 0 is not in 1..="),
        (with!(lists, block_k = -1), "block_k -1 is not in 0..2^32"),
        (with!(base, block_q = 4), "block_q 4 goes with lists_heads"),
        (with!(lists, full_max_blocks = 4), "full_max_blocks 4 goes with full, which is 0"),
        (with!(lists, partial = 0), "max_blocks 1 goes with partial, which is 0"),
        (with!(lists, partial = 0, max_blocks = 0), "block_lists has 0 lists"),
    ] {
        let refused = refused(&with!(call, p.masks = &raw const masks));
        assert!(refused.contains(error), "{refused}, not {error}");
    }
    // The tensors are passed with each run.
    let at = words.as_ptr();
    for (masks, args, error) in [
        (intervals, call.a, "intervals is null, but"),
        (
            intervals,
            with!(call.a, intervals = at, kv_indices = at),
            "kv_indices is given, but the problem is without",
        ),
        (lists, with!(call.a, kv_num_blocks = at), "kv_indices is null, but"),
        (bits, with!(call.a, intervals = at), "intervals is given, but the problem is without it"),
    ] {
        let call = Call { p: with!(call.p, masks = &raw const masks), a: args };
        let refused = run(&plan(&call).unwrap(), &call).unwrap_err();
        assert!(refused.contains(error), "{refused}, not {error}");
    }
}

/// Strides of elements of one byte, with these strides between rows and heads.
fn byte_strides([seqlen_stride, head_stride]: [i64; 2]) -> FmhaStrides {
    FmhaStrides { batch_stride: 0, seqlen_stride, head_stride, dim_stride: 1 }
}

#[test]
fn scales_by_blocks_are_the_call_on_the_values() {
    const ROW: i64 = (HEADS * DIM) as i64;
    // E4M3 numbers in 1..2, with a scale of 1 or 1/2 for each row of Q and K and each column of V.
    let elements = |seed: usize| (0..ROWS * HEADS * DIM).map(|i| 0x38 | ((i * 5 + seed) % 8) as u8).collect();
    let (q, k, v): (Vec<u8>, Vec<u8>, Vec<u8>) = (elements(1), elements(2), elements(3));
    let of_rows: Vec<u8> = (0..ROWS * HEADS).map(|i| 126 + (i % 2) as u8).collect();
    let of_columns: Vec<u8> = (0..HEADS * DIM).map(|i| 126 + (i % 3 / 2) as u8).collect();
    let value =
        |element: u8, scale: u8| 0x3F80 + (u16::from(element & 7) << 4) - 0x80 * u16::from(127 - scale);
    let by_rows = |x: &[u8]| x.iter().enumerate().map(|(i, &x)| value(x, of_rows[i / DIM])).collect();
    let (wide_q, wide_k): (Vec<u16>, Vec<u16>) = (by_rows(&q), by_rows(&k));
    let wide_v: Vec<u16> =
        v.iter().enumerate().map(|(i, &x)| value(x, of_columns[i % (HEADS * DIM)])).collect();

    let (mut plain, mut scaled) = (vec![0; q.len()], vec![0; q.len()]);
    let narrow =
        |call: Call| with!(call, p.dtype_qk = FMHA_BF16, p.dtype_v = FMHA_BF16, p.dtype_o = FMHA_BF16);
    run_on_cpu(&narrow(call(&wide_q, &wide_k, &wide_v, &mut plain, 1, &[])));
    let scales = with!(
        new!(FmhaBlockScales),
        q = byte_strides([HEADS as i64, 1]),
        k = byte_strides([HEADS as i64, 1]),
        v = byte_strides([ROW, DIM as i64]),
        format = FMHA_MXFP8_E4M3,
    );
    let stored = byte_strides([ROW, DIM as i64]);
    let base = with!(
        narrow(call(&wide_q, &wide_k, &wide_v, &mut scaled, 1, &[])),
        p.q = stored,
        p.k = stored,
        p.v = stored,
        p.block_scales = &raw const scales,
        a.q = q.as_ptr().cast(),
        a.k = k.as_ptr().cast_mut().cast(),
        a.v = v.as_ptr().cast_mut().cast(),
        a.block_scale_q = of_rows.as_ptr(),
        a.block_scale_k = of_rows.as_ptr(),
        a.block_scale_v = of_columns.as_ptr(),
    );
    run_on_cpu(&base);
    assert_eq!(scaled, plain);

    // All rows of V are equal, so dS comes from the gradient of LSE alone.
    let gradients = with!(GRADIENTS, dtype_grad = FMHA_BF16, has_dlse = 1);
    let (lse, dout) = ([1f32; ROWS * HEADS], vec![0x3F80u16; q.len()]);
    let of = |base: &Call| {
        let mut made = [(); 3].map(|()| vec![0u16; q.len()]);
        let [dq, dk, dv] = made.each_mut().map(|x| x.as_mut_ptr().cast::<c_void>());
        run_on_cpu(&with!(
            *base,
            p.gradients = &raw const gradients,
            a.o = plain.as_ptr().cast_mut().cast(),
            a.lse = lse.as_ptr().cast_mut(),
            a.dout = dout.as_ptr().cast(),
            a.dlse = lse.as_ptr(),
            a.dq = dq,
            a.dk = dk,
            a.dv = dv,
        ));
        made
    };
    let wide = narrow(call(&wide_q, &wide_k, &wide_v, &mut [], 1, &[]));
    let found = of(&base);
    assert_eq!(found, of(&wide));
    assert!(found.iter().all(|gradient| gradient.iter().any(|&bits| bits != 0)));

    for (wrong, error) in [
        (with!(scales, struct_bytes = 8), "struct_bytes 8 is not sizeof(FmhaBlockScales)"),
        (with!(scales, format = 9), "format 9 is none of"),
        (with!(scales, reserved = 1), "reserved 1"),
        (with!(scales, k.seqlen_stride = -1), "block_scale_k.seq stride -1 is negative"),
    ] {
        let refused = refused(&with!(base, p.block_scales = &raw const wrong));
        assert!(refused.contains(error), "{refused}, not {error}");
    }
    let refused = run(&plan(&base).unwrap(), &with!(base, a.block_scale_q = null())).unwrap_err();
    assert!(refused.contains("block_scale_q is null"), "{refused}");
    let without = with!(base, p.block_scales = null());
    let refused = run(&plan(&without).unwrap(), &without).unwrap_err();
    assert!(refused.contains("block_scale_q is given, but the problem is without block_scales"), "{refused}");
}

#[test]
fn paged_keys_in_any_order_are_the_batch_call() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let (mut strided, mut paged) = (vec![0; q.len()], vec![0; q.len()]);
    run_on_cpu(&call(&q, &k, &v, &mut strided, 1, &[]));
    // Pages have two rows, and the last page comes first; keys beyond the fifth are never read.
    let page = 2 * HEADS * DIM;
    let pages = |x: &[u16]| {
        let mut rows = x.to_vec();
        rows.resize(3 * page, 0x7e01);
        [&rows[2 * page..], &rows[..page], &rows[page..2 * page]].concat()
    };
    let (k, v, table) = (pages(&k), pages(&v), [1, 2, 0]);
    let call = with!(
        call(&q, &k, &v, &mut paged, 1, &[]),
        p.k.batch_stride = page as i64,
        p.v.batch_stride = page as i64,
        p.page_size = 2,
        a.num_pages = 3,
        a.max_pages = 3,
        a.block_table = table.as_ptr(),
    );
    let plan = match plan(&call) {
        Ok(plan) => plan,
        Err(refused @ fmha::Error::Unsupported { .. }) => {
            println!("absent: {refused}");
            return;
        }
        Err(other) => panic!("{other}"),
    };
    run(&plan, &call).unwrap();
    assert_eq!(strided, paged);
    let error = run(&plan, &with!(call, a.max_pages = 2)).unwrap_err();
    assert!(error.contains("max_pages 2"), "{error}");
    let error = run(&plan, &with!(call, a.block_table = null())).unwrap_err();
    assert!(error.contains("block_table is null, but 12 bytes"), "{error}");
}

#[test]
fn appended_rows_are_written_and_seen_as_if_they_had_been_there() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let (mut whole, mut appended) = (vec![0; q.len()], vec![0; q.len()]);
    run_on_cpu(&call(&q, &k, &v, &mut whole, 1, &[]));
    // The last two rows are new; the rows that the cache has in their place are never read.
    let old = (ROWS - 2) * HEADS * DIM;
    let (mut k_cache, mut v_cache) = (k.clone(), v.clone());
    k_cache[old..].fill(0x7e01);
    v_cache[old..].fill(0x7e01);
    let used = [ROWS as i32 - 2];
    let cache = with!(new!(FmhaCache), seqlen_new = 2, k_new = DENSE, v_new = DENSE);
    run_on_cpu(&with!(
        call(&q, &k, &v, &mut appended, 1, &[]),
        p.seqused_k = 1,
        p.cache = &raw const cache,
        a.k = k_cache.as_mut_ptr().cast(),
        a.v = v_cache.as_mut_ptr().cast(),
        a.k_new = k[old..].as_ptr().cast(),
        a.v_new = v[old..].as_ptr().cast(),
        a.seqused_k = used.as_ptr(),
    ));
    assert_eq!((appended, k_cache, v_cache), (whole, k, v));
}

#[test]
fn a_tree_that_is_a_chain_is_the_causal_mask_and_a_turn_by_nothing_changes_nothing() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let (mut causal, mut tree) = (vec![0; q.len()], vec![0; q.len()]);
    run_on_cpu(&call(&q, &k, &v, &mut causal, 1, &[]));
    let chain: Vec<u32> = (0..ROWS as u32).map(|i| (2 << i) - 1).collect();
    let (ones, zeros, used) = ([1f32; 2 * ROWS * DIM / 2], [0f32; 2 * ROWS * DIM / 2], [ROWS as i32]);
    let cache = with!(
        new!(FmhaCache),
        tree_mask = 1,
        max_pos = 2 * ROWS as i64,
        rotary_dim = DIM as i32,
        dtype_rotary = FMHA_F32
    );
    run_on_cpu(&with!(
        call(&q, &k, &v, &mut tree, 1, &[]),
        p.seqused_k = 1,
        p.cache = &raw const cache,
        a.seqused_k = used.as_ptr(),
        a.tree_mask = chain.as_ptr(),
        a.rotary_cos = ones.as_ptr().cast(),
        a.rotary_sin = zeros.as_ptr().cast(),
    ));
    assert_eq!(causal, tree);
}

/// Cache rows of 656 bytes whose values are 1; lists name two of them, and O is 1.
#[test]
fn rows_of_bytes_are_read_where_they_lie() {
    const BYTES: usize = 656;
    let mut row = vec![0u8; BYTES];
    row[..512].fill(0x38);
    (0..4).for_each(|i| row[512 + 4 * i..516 + 4 * i].copy_from_slice(&1f32.to_le_bytes()));
    let (pages, table, used) = (row.repeat(4), [0i32], [3i32]);
    let (q, mut o) = (vec![0x3F80u16; 576], vec![0u16; 512]);
    let cache = with!(new!(FmhaCache), v_in_k = 1, cache_rows = BYTES as i32);
    let (lists, indices) = (with!(new!(FmhaLists), topk = 2), [2i32, 0]);
    let one = |row: usize| {
        let row = row as i64;
        FmhaStrides { batch_stride: row, seqlen_stride: row, head_stride: row, dim_stride: 1 }
    };
    let p = with!(
        new!(FmhaProblem),
        batch = 1,
        seqlen_q = 1,
        seqlen_k = 4,
        num_heads_q = 1,
        num_heads_kv = 1,
        head_dim_qk = 576,
        head_dim_v = 512,
        page_size = 4,
        seqused_k = 1,
        q = one(576),
        k = with!(one(BYTES), batch_stride = 4 * BYTES as i64),
        v = with!(one(BYTES), batch_stride = 4 * BYTES as i64),
        o = one(512),
        cache = &raw const cache,
        lists = &raw const lists,
        dtype_qk = FMHA_BF16,
        dtype_v = FMHA_BF16,
        dtype_o = FMHA_BF16,
    );
    let a = with!(
        new!(FmhaArgs),
        q = q.as_ptr().cast(),
        k = pages.as_ptr().cast_mut().cast(),
        o = o.as_mut_ptr().cast(),
        indices = indices.as_ptr(),
        block_table = table.as_ptr(),
        seqused_k = used.as_ptr(),
        num_pages = 1,
        max_pages = 1,
    );
    run_on_cpu(&Call { p, a });
    assert!(o.iter().all(|&element| element == 0x3F80), "{o:x?}");
    let call = Call { p, a: with!(a, k = std::ptr::null_mut()) };
    let text = run(&plan(&call).unwrap(), &call).unwrap_err();
    assert!(text.contains("k is null, but 2624 bytes are needed"), "{text}");

    // After the third row a row of ones is appended. It is stored as 448 times 2^-8 for each 1, with scales that round
    // nothing.
    let (mut appended, ones) = (pages, vec![0x3F80u16; 576]);
    let cache = with!(cache, seqlen_new = 1, k_new = one(576));
    let p = with!(p, lists = std::ptr::null(), cache = &raw const cache);
    let a =
        with!(a, indices = std::ptr::null(), k = appended.as_mut_ptr().cast(), k_new = ones.as_ptr().cast());
    run_on_cpu(&Call { p, a });
    let (values, rest) = appended[3 * BYTES..].split_at(512);
    assert!(values.iter().all(|&value| value == 0x78), "{values:x?}");
    assert!(rest[..16].chunks(4).all(|scale| scale == (1f32 / 256.0).to_le_bytes()), "{rest:x?}");
    assert!(rest[16..].chunks(2).all(|element| element == 0x3F80u16.to_le_bytes()), "{rest:x?}");
    assert!(o.iter().all(|&element| element == 0x3F80), "{o:x?}");
    let turning = with!(cache, max_pos = 8, rotary_dim = 64, dtype_rotary = FMHA_F32);
    let text = refused(&Call { p: with!(p, cache = &raw const turning), a });
    assert!(text.contains("cache_rows of 656 bytes"), "{text}");
    let wrong = with!(cache, k_new = with!(one(576), dim_stride = 2));
    let text = refused(&Call { p: with!(p, cache = &raw const wrong), a });
    assert!(text.contains("k_new"), "{text}");
}

/// Strides of scales of dense rows, a scale for each `block` rows and head.
fn scale_strides(block: usize) -> FmhaStrides {
    let heads = HEADS as i64;
    let batch_stride = ROWS.div_ceil(block) as i64 * heads;
    FmhaStrides { batch_stride, seqlen_stride: heads, head_stride: 1, dim_stride: 1 }
}

#[test]
fn a_cache_with_scales_by_rows_is_the_call_on_its_values() {
    let q = numbers(1, ROWS);
    // Numbers of E4M3 in 1..2, whose scales are 1 or 1/2: the products are exact in f16.
    let elements = |seed: usize| -> Vec<u8> {
        (0..ROWS * HEADS * DIM).map(|i| 0x38 | ((i * 5 + seed) % 8) as u8).collect()
    };
    let (k, v) = (elements(1), elements(4));
    for block in [1, 2, 8] {
        let halves = |seed: usize| -> Vec<u16> {
            (0..ROWS.div_ceil(block) * HEADS).map(|i| ((i + seed) % 2) as u16).collect()
        };
        let wide = |x: &[u8], halves: &[u16]| -> Vec<u16> {
            let at = |i: usize| (i / (HEADS * DIM) / block) * HEADS + i / DIM % HEADS;
            let value = |i: usize, x: u8| 0x3C00 + (u16::from(x & 7) << 7) - 0x400 * halves[at(i)];
            x.iter().enumerate().map(|(i, &x)| value(i, x)).collect()
        };
        let (of_k, of_v) = (halves(0), halves(1));
        let scales = |halves: &[u16]| halves.iter().map(|&half| if half == 1 { 0.5 } else { 1.0 }).collect();
        let (mut k_scale, mut v_scale): (Vec<f32>, Vec<f32>) = (scales(&of_k), scales(&of_v));
        let (mut plain, mut scaled) = (vec![0; q.len()], vec![0; q.len()]);
        run_on_cpu(&call(&q, &wide(&k, &of_k), &wide(&v, &of_v), &mut plain, 1, &[]));
        let cache = with!(
            new!(FmhaCache),
            dtype_cache = FMHA_E4M3FN,
            scale_block = block as i64,
            k_scale = scale_strides(block),
            v_scale = scale_strides(block),
        );
        let base = with!(
            call(&q, &q, &q, &mut scaled, 1, &[]),
            p.cache = &raw const cache,
            a.k = k.as_ptr().cast_mut().cast(),
            a.v = v.as_ptr().cast_mut().cast(),
            a.k_scale = k_scale.as_mut_ptr(),
            a.v_scale = v_scale.as_mut_ptr(),
        );
        run_on_cpu(&base);
        assert_eq!(scaled, plain, "blocks of {block}");

        let text = run(&plan(&base).unwrap(), &with!(base, a.v_scale = null_mut())).unwrap_err();
        assert!(text.contains("v_scale is null, but"), "{text}");
        for (wanted, wrong) in [
            ("scale_block -1 is not in 0..2^32", with!(cache, scale_block = -1)),
            ("cache_scales of blocks of", with!(cache, dtype_cache = 0)),
            ("k_scale.head stride -1", with!(cache, k_scale.head_stride = -1)),
            ("v_in_k", with!(cache, v_in_k = 1)),
        ] {
            let text = refused(&with!(base, p.cache = &raw const wrong));
            assert!(text.contains(wanted), "{text}, not {wanted}");
        }
        let unscaled = with!(cache, scale_block = 0);
        let without = with!(base, p.cache = &raw const unscaled);
        let text = run(&plan(&without).unwrap(), &without).unwrap_err();
        let wanted = "k_scale is given, but the problem is without cache.scale_block";
        assert!(text.contains(wanted), "{text}");
    }
}

#[test]
fn appended_rows_of_a_cache_have_scales_of_their_own() {
    let (q, ones, twos) = (numbers(1, ROWS), vec![0x3C00u16; HEADS * DIM], vec![0x4000u16; HEADS * DIM]);
    let (mut k, mut v) = (vec![0x38u8; q.len()], vec![0x38u8; q.len()]);
    let (mut k_scale, mut v_scale) = ([1f32; ROWS * HEADS], [1f32; ROWS * HEADS]);
    let (used, mut o) = ([ROWS as i32 - 1], vec![0; q.len()]);
    let cache = with!(
        new!(FmhaCache),
        dtype_cache = FMHA_E4M3FN,
        scale_block = 1,
        k_scale = scale_strides(1),
        v_scale = scale_strides(1),
        seqlen_new = 1,
        k_new = DENSE,
        v_new = DENSE,
    );
    let base = with!(
        call(&q, &q, &q, &mut o, 1, &[]),
        p.seqused_k = 1,
        p.cache = &raw const cache,
        a.k = k.as_mut_ptr().cast(),
        a.v = v.as_mut_ptr().cast(),
        a.k_scale = k_scale.as_mut_ptr(),
        a.v_scale = v_scale.as_mut_ptr(),
        a.k_new = ones.as_ptr().cast(),
        a.v_new = twos.as_ptr().cast(),
        a.seqused_k = used.as_ptr(),
    );
    run_on_cpu(&base);
    // The greatest number of a row is stored as the type's largest, 448.
    let old = (ROWS - 1) * HEADS;
    let (k_new, v_new) = (&k[old * DIM..], &v[old * DIM..]);
    assert!(k_new.iter().chain(v_new).all(|&element| element == 0x7E), "{k_new:x?} {v_new:x?}");
    let of_new = [&k_scale[old..], &v_scale[old..]];
    assert_eq!(of_new, [[1.0 / 448.0; HEADS], [2.0 / 448.0; HEADS]]);
    assert!(k_scale[..old].iter().all(|&scale| scale == 1.0));
    // Scores are equal, so the last row is the mean of four ones and a two.
    let last = &o[(ROWS - 1) * HEADS * DIM..];
    assert!(last.iter().all(|&element| element == 0x3CCD), "{last:x?}");
    let blocks = with!(cache, scale_block = 2, k_scale = scale_strides(2), v_scale = scale_strides(2));
    let text = refused(&with!(base, p.cache = &raw const blocks));
    assert!(text.contains("append of seqlen_new 1 beside cache_scales of blocks of 2"), "{text}");
}

#[test]
fn a_wrong_cache_is_refused_by_field_and_number() {
    let (x, used) = (numbers(1, ROWS), [1i32]);
    let mut o = vec![0; x.len()];
    let base = with!(call(&x, &x, &x, &mut o, 1, &[]), p.seqused_k = 1, a.seqused_k = used.as_ptr());
    let table = [0f32; 64];
    let none = new!(FmhaCache);
    let turning = with!(none, max_pos = 8, rotary_dim = DIM as i32, dtype_rotary = FMHA_F32);
    let appending = with!(none, seqlen_new = 2, k_new = DENSE, v_new = DENSE);
    for (wanted, number, cache) in [
        ("struct_bytes", "8", with!(none, struct_bytes = 8)),
        ("seqlen_new", "-1", with!(none, seqlen_new = -1)),
        ("packed_new", "0", with!(none, packed_new = 1)),
        ("packed_new", "3", with!(appending, packed_new = 3)),
        ("k_new", "9", with!(appending, k_new.dim_stride = 9)),
        ("max_pos", "8", with!(none, max_pos = 8)),
        ("max_pos", "-8", with!(none, max_pos = -8)),
        ("rotary_dim", "3", with!(turning, rotary_dim = 3)),
        ("rotary_dim", "-4", with!(turning, rotary_dim = -4)),
        ("rotary_interleaved", "2", with!(turning, rotary_interleaved = 2)),
        ("dtype_rotary", "17", with!(turning, dtype_rotary = 17)),
        ("dtype_cache", "f32", with!(none, dtype_cache = FMHA_F32)),
        ("v_in_k", "4", with!(none, v_in_k = 4)),
        ("tree_mask", "2", with!(none, tree_mask = 2)),
        ("cache_rows", "6 is none of 0, 584 and 656 bytes", with!(none, cache_rows = 6)),
    ] {
        let text = refused(&with!(base, p.cache = &raw const cache));
        assert!(text.contains(wanted) && text.contains(number), "{wanted} {number}: {text}");
    }
    // A tree mask can replace the causal mask and no other.
    let tree = with!(none, tree_mask = 1);
    let text = refused(&with!(base, p.cache = &raw const tree, p.mask = c"0".as_ptr()));
    assert!(text.contains("tree_mask"), "{text}");
    // Arguments that the problem does not need are refused, and so are missing ones that it needs.
    let at = table.as_ptr();
    let turned = with!(base.a, rotary_cos = at.cast(), rotary_sin = at.cast());
    let new = with!(base.a, k_new = at.cast(), v_new = at.cast());
    for (cache, args, error) in [
        (turning, with!(turned, rotary_sin = null()), "rotary_sin is null, but 128 bytes are needed"),
        (none, turned, "rotary_cos is given, but the problem is without it"),
        (none, with!(new, v_new = null()), "k_new is given, but the problem is without seqlen_new"),
        (appending, with!(new, v_new = null()), "v_new is null, but"),
        (appending, with!(new, total_new = 3), "total_new 3 goes with packed_new"),
        (appending, with!(new, cu_seqlens_new = used.as_ptr()), "cu_seqlens_new is given, but"),
        (none, with!(base.a, tree_mask = at.cast()), "tree_mask is given, but the problem is without it"),
        (tree, base.a, "tree_mask is null, but"),
    ] {
        let call = Call { p: with!(base.p, cache = &raw const cache), a: args };
        let text = run(&plan(&call).unwrap(), &call).unwrap_err();
        assert!(text.contains(error), "{text}, not {error}");
    }
}

#[test]
fn a_plan_of_packed_sequences_runs_with_other_totals() {
    let x = numbers(1, 2 * ROWS);
    let (mut many, mut few) = (vec![0; x.len()], vec![0; x.len()]);
    let plan = plan(&call(&x, &x, &x, &mut many, 2, &[0, 5, 10])).unwrap();
    let later = call(&x, &x, &x, &mut few, 2, &[0, 3, 7]);
    run(&plan, &later).unwrap();
    let row = HEADS * DIM;
    // Under the causal mask each sequence's first query sees only its own key; rows beyond the total stay as they were.
    assert_eq!((&few[..row], &few[3 * row..4 * row]), (&x[..row], &x[3 * row..4 * row]));
    assert!(few[7 * row..].iter().all(|&bits| bits == 0));
    let error = run(&plan, &with!(later, a.total_q = -1)).unwrap_err();
    assert!(error.contains("total_q -1"), "{error}");
}

#[test]
fn a_plan_runs_with_other_addresses_and_another_dropout_seed() {
    let (q, v) = (numbers(1, ROWS), numbers(300, ROWS));
    let (mut first, mut second) = (vec![0; q.len()], vec![0; q.len()]);
    let planned = with!(call(&q, &q, &v, &mut first, 1, &[]), p.p_drop = 0.5, a.dropout_seeded = 1);
    let plan = plan(&planned).unwrap();
    let (q2, v2) = (q.clone(), v.clone());
    let moved = with!(call(&q2, &q2, &v2, &mut second, 1, &[]), a.dropout_seeded = 1);
    run(&plan, &planned).unwrap();
    run(&plan, &moved).unwrap();
    assert_eq!(first, second);
    run(&plan, &with!(moved, a.dropout_seed = 9)).unwrap();
    assert_ne!(first, second);
    for (seeded, said) in [(0, "dropout has no seed, but p_drop is 0.5"), (2, "dropout_seeded 2 is neither")]
    {
        let error = run(&plan, &with!(moved, a.dropout_seeded = seeded)).unwrap_err();
        assert!(error.contains(said), "{error}");
    }
}

/// Backward on an emulated NVIDIA device, whose kernels need scratch, unlike the CPU's.
#[test]
#[cfg_attr(miri, ignore = "opens a library")]
fn a_run_with_the_callers_scratch_is_the_run_with_the_plans_own() {
    let opened = Backend::Auto.emulated("sm_90a").and_then(Backend::open);
    let backend = match opened {
        Ok(backend) => backend,
        Err(reason) => return println!("absent: {reason}"),
    };
    let bytes = ROWS * HEADS * DIM * 2;
    let memory = backend.memory();
    let device = |elems: &[u16]| {
        let mut buffer = memory.alloc(bytes as u64).unwrap();
        memory.upload(bytemuck::cast_slice::<u16, u8>(elems), &mut buffer).unwrap();
        buffer
    };
    let inputs = [1, 77, 300, 500, 700].map(|seed| device(&numbers(seed, ROWS)));
    let lse = device(&[0; ROWS * HEADS * DIM]);
    let base = with!(
        call(&[], &[], &[], &mut [], 1, &[]),
        p.gradients = &raw const GRADIENTS,
        a.q = inputs[0].as_ptr().cast(),
        a.k = inputs[1].as_ptr().cast(),
        a.v = inputs[2].as_ptr().cast(),
        a.o = inputs[3].as_ptr().cast(),
        a.lse = lse.as_ptr().cast(),
        a.dout = inputs[4].as_ptr().cast(),
    );
    let written = |caller_workspace: bool| {
        let plan = fmha::PlanOptions::default().kernel("simt");
        let choice = Choice { plan, caller_workspace };
        let outputs = [(); 3].map(|()| device(&[0x7e01; ROWS * HEADS * DIM]));
        let [dq, dk, dv] = outputs.each_ref().map(|output| output.as_ptr().cast::<c_void>());
        let call = with!(base, a.dq = dq, a.dk = dk, a.dv = dv);
        // SAFETY: every pointer is the emulated device's memory, as large as the problem says.
        let plan = match unsafe { FmhaPlan::new(&backend, &call.p, MaskSpec::CAUSAL, &choice) } {
            Ok(plan) => plan,
            Err(fmha::Error::NoDevice(reason)) => {
                println!("absent: {reason}");
                return None;
            }
            Err(other) => panic!("{other}"),
        };
        let wanted = plan.workspace_bytes();
        assert_eq!(wanted > 0, caller_workspace);
        let scratch = memory.alloc(wanted.max(1)).unwrap();
        // The memory is that of the emulated device, as large as the problem says; smaller memory is refused.
        let with = |workspace: *mut u8, bytes| {
            run(&plan, &with!(call, a.workspace = workspace.cast(), a.workspace_bytes = bytes))
        };
        if caller_workspace {
            let short = format!("workspace_bytes {} is less than the plan's {wanted}", wanted - 1);
            assert_eq!(with(scratch.as_ptr(), wanted - 1), Err(short));
            assert!(with(null_mut(), 0).unwrap_err().contains("workspace_bytes 0 is less"));
            with(scratch.as_ptr(), wanted).unwrap();
        } else {
            assert!(with(scratch.as_ptr(), 1).unwrap_err().starts_with("workspace is given"));
            with(null_mut(), 0).unwrap();
        }
        backend.default_stream().synchronize().unwrap();
        Some(outputs.map(|output| {
            let mut bits = vec![0u16; ROWS * HEADS * DIM];
            memory.download(&output, bytemuck::cast_slice_mut::<u16, u8>(&mut bits)).unwrap();
            bits
        }))
    };
    let (Some(own), Some(callers)) = (written(false), written(true)) else { return };
    assert_eq!(own, callers);
    assert!(own.iter().all(|gradient| gradient.iter().all(|&bits| bits != 0x7e01)), "all is written");
}

/// One wrong number anywhere in the bytes of a struct.
#[derive(Clone, Debug)]
struct Fault {
    word: usize,
    value: u64,
}

/// The 8-byte words of a struct that are numbers, without those at `pointers`: a random pointer would break the
/// caller's promise that pointers are valid.
fn words<T>(pointers: std::ops::RangeInclusive<usize>) -> Vec<usize> {
    (0..size_of::<T>() / 8).filter(|word| !pointers.contains(&(word * 8))).collect()
}

fn faults(numbers: Vec<usize>) -> impl Strategy<Value = Vec<Fault>> {
    let value = prop_oneof![
        any::<u64>(),
        0u64..20,
        Just(u64::MAX),
        Just(1 << 31),
        Just(1 << 32),
        Just(i64::MAX as u64),
        any::<u32>().prop_map(|low| u64::from(low) << 32),
    ];
    let fault = (prop::sample::select(numbers), value).prop_map(|(word, value)| Fault { word, value });
    prop::collection::vec(fault, 1..4)
}

fn faults_of_problems() -> impl Strategy<Value = Vec<Fault>> {
    let (first, last) = (std::mem::offset_of!(FmhaProblem, mask), std::mem::offset_of!(FmhaProblem, second));
    faults(words::<FmhaProblem>(first..=last))
}

fn faults_of_args() -> impl Strategy<Value = Vec<Fault>> {
    let (first, last) = (std::mem::offset_of!(FmhaArgs, stream), std::mem::offset_of!(FmhaArgs, captured));
    let workspace = std::mem::offset_of!(FmhaArgs, workspace) / 8;
    let mut numbers = words::<FmhaArgs>(first..=last);
    numbers.retain(|&word| word != workspace);
    faults(numbers)
}

/// # Panics
/// Where a word lies outside the struct.
fn spoiled<T: Copy>(good: T, list: &[Fault]) -> T {
    let mut bad = good;
    for fault in list {
        assert!((fault.word + 1) * 8 <= size_of::<T>());
        // SAFETY: the word lies inside, and is of numbers, for which any bits will do.
        unsafe { (&raw mut bad).cast::<u64>().add(fault.word).write(fault.value) };
    }
    bad
}

fn cases() -> u32 {
    // The number of cases is fixed under Miri, not a time limit: there a case takes a thousand times as long.
    if cfg!(miri) { 20 } else { fuzz_cases(2000) }
}

/// Number of fuzz cases: `per_second` for each second that the environment variable of fuzzing time states.
fn fuzz_cases(per_second: u32) -> u32 {
    let seconds = std::env::var(fmha_core::env::FUZZ_SECONDS.name);
    let seconds = seconds.map_or(1, |seconds| seconds.parse::<u32>().unwrap());
    per_second * seconds.max(1)
}

/// Whether a text names a value: a number, or that a pointer is null or not null.
fn names_a_value(text: &str) -> bool {
    text.contains(|c: char| c.is_ascii_digit()) || text.contains("null") || text.contains("given")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    /// Runs get arguments with random numbers: each run is refused or is the planned one, and writes O alone.
    #[test]
    fn arguments_of_any_numbers_are_refused_or_change_nothing(list in faults_of_args()) {
        let q = numbers(1, ROWS);
        let mut memory = vec![0x7e01u16; 3 * q.len()];
        let good = call(&q, &q, &q, &mut memory[q.len()..2 * q.len()], 1, &[]);
        let bad = Call { a: spoiled(good.a, &list), ..good };
        // Without dropout the seed does not matter.
        let seeds = (bad.a.dropout_seed, bad.a.dropout_offset, bad.a.dropout_seeded);
        let mut same = good.a;
        (same.dropout_seed, same.dropout_offset, same.dropout_seeded) = seeds;
        let same = matches!(seeds.2, 0 | 1) && format!("{same:?}") == format!("{:?}", bad.a);
        let result = run(&plan(&good).unwrap(), &bad);
        prop_assert_eq!(result.is_ok(), same, "{:?}", result);
        if let Err(text) = result {
            prop_assert!(names_a_value(&text), "{}", text);
            prop_assert!(memory.iter().all(|&bits| bits == 0x7e01), "written");
        }
        prop_assert!(memory[..q.len()].iter().chain(&memory[2 * q.len()..]).all(|&bits| bits == 0x7e01));
    }

    /// Plans get problems with random numbers: each is made or refused with an error; no call panics, and none
    /// allocates memory by these numbers.
    #[test]
    fn a_plan_of_any_numbers_is_made_or_refused(list in faults_of_problems()) {
        let bad = spoiled(call(&[], &[], &[], &mut [], 1, &[]).p, &list);
        let mut made = null_mut();
        let options = new!(FmhaOptions);
        // SAFETY: host pointers are this test's; a plan reads no tensor.
        let status =
            unsafe { fmha_plan(c"cpu".as_ptr(), &raw const bad, &raw const options, &raw mut made) };
        prop_assert_eq!(status == 0, !made.is_null());
        if status != 0 {
            let text = last_error();
            prop_assert!(!text.contains("internal error"), "{}", text);
            prop_assert!(names_a_value(&text), "{}", text);
        }
        // SAFETY: null or from `fmha_plan`.
        unsafe { fmha_drop(made) };
    }
}

/// Frameworks give null as the address of a tensor without elements.
#[test]
fn a_packed_call_without_queries_takes_null_for_what_has_no_elements_and_for_nothing_else() {
    let (q, k, v) = (numbers(1, 2 * ROWS), numbers(77, 2 * ROWS), numbers(300, 2 * ROWS));
    let (mut o, mut lse) = (vec![0u16; q.len()], vec![0f32; HEADS * 2 * ROWS]);
    let cu = [0, ROWS as i32, 2 * ROWS as i32];
    let none = [0i32; 3];
    let planned = with!(call(&q, &k, &v, &mut o, 2, &cu), p.write_lse = 1, a.lse = lse.as_mut_ptr());
    let plan = plan(&planned).unwrap();
    let empty = with!(
        planned,
        a.total_q = 0,
        a.cu_seqlens_q = none.as_ptr(),
        a.q = null(),
        a.o = null_mut(),
        a.lse = null_mut()
    );
    run(&plan, &empty).unwrap();
    run(&plan, &planned).unwrap();
    let text = run(&plan, &with!(planned, a.lse = null_mut())).unwrap_err();
    assert!(text.contains("lse is null, but 80 bytes are needed"), "{text}");
    let text = run(&plan, &with!(planned, a.q = null())).unwrap_err();
    assert!(text.contains("q is null, but"), "{text}");
    assert!(o.iter().all(|&x| x != 0) && lse.iter().all(|&x| x != 0.0));
}

/// Strides of a bias, or of its gradient, that all sequences and heads share.
const SHARED: FmhaStrides =
    FmhaStrides { batch_stride: 0, seqlen_stride: ROWS as i64, head_stride: 0, dim_stride: 1 };

#[test]
fn gradients_and_bias_of_no_queries_may_be_null_and_the_gradients_of_keys_are_zero() {
    let (k, v) = (numbers(77, ROWS), numbers(300, ROWS));
    let (mut dk, mut dv) = (vec![0x7e01u16; k.len()], vec![0x7e01u16; k.len()]);
    let gradients = with!(GRADIENTS, dbias = SHARED, write_dbias = 1, dtype_dbias = FMHA_F32);
    let forward = with!(
        call(&[], &k, &v, &mut [], 1, &[]),
        p.seqlen_q = 0,
        p.bias = SHARED,
        p.bias_kind = FMHA_BIAS_ELEMENTWISE,
        p.dtype_bias = FMHA_F32,
        a.q = null(),
        a.o = null_mut(),
    );
    let backward = with!(
        forward,
        p.gradients = &raw const gradients,
        a.dk = dk.as_mut_ptr().cast(),
        a.dv = dv.as_mut_ptr().cast()
    );
    run_on_cpu(&forward);
    run_on_cpu(&backward);
    assert!(dk.iter().chain(&dv).all(|&bits| bits == 0));
    // Null tensors are refused once there are queries.
    let some = with!(backward, p.seqlen_q = ROWS as i64);
    let text = run(&plan(&some).unwrap(), &some).unwrap_err();
    assert!(text.contains("q is null, but"), "{text}");
    let text = refused(&with!(some, p.bias_kind = 0));
    assert!(text.contains("dtype_bias 6 goes with bias_kind 1"), "{text}");
}

/// With a batch of 0 nothing is launched, sums over the sequences are 0, and tensors without elements may be null.
#[test]
fn a_batch_of_0_gives_empty_outputs_and_sums_of_0() {
    let sink = [1f32; HEADS];
    let (bias, mut dbias) = ([1f32; ROWS * ROWS], [7f32; ROWS * ROWS]);
    let mut dsink = [7f32; HEADS];
    let gradients =
        with!(GRADIENTS, dbias = SHARED, write_dbias = 1, dtype_dbias = FMHA_F32, write_dsink = 1);
    let plain = with!(
        call(&[], &[], &[], &mut [], 0, &[]),
        p.sink = 1,
        a.q = null(),
        a.k = null_mut(),
        a.v = null_mut(),
        a.o = null_mut(),
        a.sink = sink.as_ptr()
    );
    let forward = with!(
        plain,
        p.bias = SHARED,
        p.bias_kind = FMHA_BIAS_ELEMENTWISE,
        p.dtype_bias = FMHA_F32,
        a.bias = bias.as_ptr().cast()
    );
    run_on_cpu(&forward);
    run_on_cpu(&with!(
        forward,
        p.gradients = &raw const gradients,
        a.dbias = dbias.as_mut_ptr().cast(),
        a.dsink = dsink.as_mut_ptr()
    ));
    assert!(dbias.iter().chain(&dsink).all(|&sum| sum == 0.0), "{dbias:?} {dsink:?}");
    let slopes = with!(plain, p.bias_kind = FMHA_BIAS_ALIBI_PER_BATCH);
    run_on_cpu(&slopes);
    run_on_cpu(&with!(slopes, p.page_size = 16, a.max_pages = 4));
}

/// A plan of no sequences runs whether each tensor of no elements is null or not.
#[test]
fn what_has_no_elements_is_null_or_not_in_any_run_of_a_plan() {
    let (x, f32s, i32s) = (numbers(1, ROWS), [0f32; 64], [0i32; 8]);
    let base = with!(
        call(&[], &[], &[], &mut [], 0, &[]),
        p.write_lse = 1,
        p.seqused_q = 1,
        p.seqused_k = 1,
        p.bias_kind = FMHA_BIAS_ALIBI_PER_BATCH,
        p.p_drop = 0.5,
        a.dropout_seeded = 1,
    );
    let cache = with!(
        new!(FmhaCache),
        seqlen_new = 1,
        k_new = DENSE,
        v_new = DENSE,
        tree_mask = 1,
        rotary_dim = 4,
        max_pos = 8,
        dtype_rotary = FMHA_F32
    );
    let gradients = with!(GRADIENTS, has_dlse = 1);
    // Arguments that have a batch axis; the memory of others is never written.
    let made = |kind: &str, given: u32| {
        let at = |bit: u32| given >> bit & 1 == 1;
        let tensor = |bit: u32| if at(bit) { x.as_ptr().cast_mut().cast() } else { null_mut() };
        let floats = |bit: u32| if at(bit) { f32s.as_ptr() } else { null() };
        let ints = |bit: u32| if at(bit) { i32s.as_ptr() } else { null() };
        let all = with!(
            base,
            a.q = tensor(8),
            a.k = tensor(9),
            a.v = tensor(10),
            a.o = tensor(11),
            a.lse = floats(12).cast_mut(),
            a.seqused_q = ints(14),
            a.seqused_k = ints(15),
            a.alibi_slopes = floats(16),
        );
        let cached = with!(
            all,
            p.cache = &raw const cache,
            a.k_new = tensor(0),
            a.v_new = tensor(1),
            a.tree_mask = ints(2).cast(),
            a.rotary_cos = f32s.as_ptr().cast(),
            a.rotary_sin = f32s.as_ptr().cast(),
        );
        match kind {
            "plain" => with!(all, p.write_keep_mask = 1, a.keep_mask = tensor(13).cast()),
            "cache" => cached,
            "pages" => with!(cached, p.page_size = 4, a.max_pages = 2, a.block_table = ints(17)),
            _ => with!(
                all,
                p.gradients = &raw const gradients,
                a.dout = tensor(3),
                a.dq = tensor(4),
                a.dk = tensor(5),
                a.dv = tensor(6),
                a.dlse = floats(7)
            ),
        }
    };
    for kind in ["plain", "cache", "pages", "gradients"] {
        let plan = plan(&made(kind, 0)).unwrap_or_else(|error| panic!("{kind}: {error}"));
        for given in (0..18).map(|bit| 1 << bit).chain([0, u32::MAX]) {
            run(&plan, &made(kind, given)).unwrap_or_else(|error| panic!("{kind}, {given:b}: {error}"));
        }
    }
}

#[test]
fn a_gradient_of_its_own_for_each_head_of_a_bias_that_all_share_is_refused() {
    let forward = with!(
        call(&[], &[], &[], &mut [], 1, &[]),
        p.bias = SHARED,
        p.bias_kind = FMHA_BIAS_ELEMENTWISE,
        p.dtype_bias = FMHA_F32
    );
    let with = |stride| {
        let dbias = with!(SHARED, head_stride = stride);
        let gradients = with!(GRADIENTS, dbias = dbias, write_dbias = 1, dtype_dbias = FMHA_F32);
        plan(&with!(forward, p.gradients = &raw const gradients)).map(|_| ()).map_err(|e| e.to_string())
    };
    let row = ROWS as i64;
    assert_eq!(with(0), Ok(()));
    let said = with(row * row).unwrap_err();
    assert!(said.contains(&format!("dbias has head_stride {}, but bias has 0", row * row)), "{said}");
}

#[test]
fn gradients_take_lse_when_there_are_rows() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let (mut o, mut lse) = (vec![0u16; q.len()], vec![0f32; HEADS * ROWS]);
    let mut grads = vec![vec![0u16; q.len()]; 3];
    let (cu, none) = ([0, ROWS as i32], [0i32; 2]);
    let forward = with!(call(&q, &k, &v, &mut o, 1, &cu), p.write_lse = 1, a.lse = lse.as_mut_ptr());
    run_on_cpu(&forward);
    let backward = with!(
        forward,
        p.gradients = &raw const GRADIENTS,
        a.dout = q.as_ptr().cast(),
        a.dq = grads[0].as_mut_ptr().cast(),
        a.dk = grads[1].as_mut_ptr().cast(),
        a.dv = grads[2].as_mut_ptr().cast(),
    );
    let refused = run(&plan(&forward).unwrap(), &backward).unwrap_err();
    assert!(refused.contains("dout is given, but the problem is without gradients"), "{refused}");
    let empty = with!(backward, a.total_q = 0, a.cu_seqlens_q = none.as_ptr(), a.lse = null_mut());
    // Backward reads LSE whether or not the problem asks forward to write it.
    for write_lse in [0, 1] {
        let plan = plan(&with!(backward, p.write_lse = write_lse)).unwrap();
        run(&plan, &empty).unwrap();
        run(&plan, &backward).unwrap();
        let text = run(&plan, &with!(backward, a.lse = null_mut())).unwrap_err();
        assert!(text.contains("lse is null, but 40 bytes are needed"), "{text}");
    }
    assert!(grads[2].iter().any(|&bits| bits != 0));
}

#[test]
fn parts_of_no_rows_may_be_null() {
    let problem = with!(
        new!(FmhaCombineProblem),
        num_parts = 3,
        seqlen_q = 1,
        num_heads_q = HEADS as i64,
        head_dim_v = DIM as i64,
        part = DENSE,
        o = DENSE,
        dtype_part = FMHA_F16,
        dtype_o = FMHA_F16,
        merge = FMHA_BY_LSE,
    );
    let parts = [FmhaPartial { o: null(), lse: null() }; 3];
    let args = with!(new!(FmhaCombineArgs), parts = parts.as_ptr());
    let plan = |problem: &FmhaCombineProblem| FmhaPlan::combine(&cpu(), problem, &Choice::default()).unwrap();
    // SAFETY: of 0 elements nothing is read or written, and null is refused.
    let run = |plan: &FmhaPlan, args: &FmhaCombineArgs| unsafe {
        plan.run_combine(args).map_err(|error| error.to_string())
    };
    run(&plan(&with!(problem, batch = 1, seqlen_q = 0)), &args).unwrap();
    let mut lse = 0f32;
    run(&plan(&with!(problem, write_lse = 1)), &with!(args, lse = &raw mut lse)).unwrap();
    let some = plan(&with!(problem, batch = 1));
    let text = run(&some, &args).unwrap_err();
    assert!(text.contains("parts[0].o is null, but 32 bytes are needed"), "{text}");
    let text = run(&some, &with!(args, parts = null())).unwrap_err();
    assert!(text.contains("parts is null, but num_parts is 3"), "{text}");
    let text = host::combine(&with!(problem, struct_bytes = 8)).unwrap_err().to_string();
    assert!(text.contains("struct_bytes 8 is not sizeof(FmhaCombineProblem)"), "{text}");
}

#[test]
fn null_is_refused_by_name_and_null_plans_drop() {
    let mut plan = null_mut();
    // SAFETY: all these functions allow null pointers.
    unsafe {
        assert_ne!(fmha_plan(null(), null(), null(), &raw mut plan), 0);
        assert!(last_error().starts_with("problem is null"));
        assert_ne!(fmha_run(null(), null()), 0);
        assert!(last_error().starts_with("plan is null"));
        fmha_drop(null_mut());
    }
}

#[test]
fn a_panic_becomes_an_error() {
    assert_ne!(guard(|| panic!("on purpose")), 0);
    assert!(last_error().contains("panic"));
}

#[test]
#[cfg_attr(miri, ignore = "reads the sources")]
fn the_committed_header_is_the_generated_one() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/");
    let config = cbindgen::Config::from_file(format!("{root}cbindgen.toml")).expect("cbindgen.toml");
    let mut builder = cbindgen::Builder::new().with_config(config);
    for file in ["structs", "plan", "lib"] {
        builder = builder.with_src(format!("{root}src/{file}.rs"));
    }
    let mut generated = Vec::new();
    builder.generate().expect("a header").write(&mut generated);
    let generated = String::from_utf8(generated).expect("UTF-8");
    let path = format!("{root}fmha.h");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, &generated).expect("writable");
    }
    assert_eq!(std::fs::read_to_string(&path).expect("fmha.h"), generated, "run with BLESS=1");
}
