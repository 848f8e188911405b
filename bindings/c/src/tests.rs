//! Laws of the C ABI, on the CPU's backend; `tests/every_field.c` meets it as C does.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

use fmha::{Backend, Device};
use proptest::prelude::*;

use crate::host::Choice;
use crate::{
    FMHA_BF16, FMHA_BY_LSE, FMHA_F16, FMHA_F32, FMHA_MXFP8_E4M3, FMHA_MXFP8_E5M2, FMHA_V_ROW_MAJOR,
    FmhaBlockScales, FmhaCache, FmhaCall, FmhaCaptured, FmhaCode, FmhaCombine, FmhaGradients, FmhaMasks,
    FmhaPartial, FmhaPlan, FmhaTensor, fmha_drop, fmha_last_error, fmha_plan, fmha_run, guard,
};

const NONE: FmhaTensor =
    FmhaTensor { data: null_mut(), batch_stride: 0, seqlen_stride: 0, head_stride: 0, dim_stride: 0 };
const ROWS: usize = 5;
const HEADS: usize = 2;
const DIM: usize = 8;
const SCALE: f32 = 0.25;

fn cpu() -> Device {
    crate::open(Some(&Backend::Cpu)).unwrap()
}

fn tensor(data: &[u16]) -> FmhaTensor {
    let seq = HEADS * DIM;
    FmhaTensor {
        data: data.as_ptr() as *mut c_void,
        batch_stride: (ROWS * seq) as i64,
        seqlen_stride: seq as i64,
        head_stride: DIM as i64,
        dim_stride: 1,
    }
}

fn call(q: &[u16], k: &[u16], v: &[u16], o: &mut [u16], batch: i64, cu_seqlens: &[i32]) -> FmhaCall {
    let packed = !cu_seqlens.is_empty();
    let cu = if packed { cu_seqlens.as_ptr() } else { null() };
    let total = cu_seqlens.last().copied().unwrap_or_default().into();
    FmhaCall {
        struct_bytes: size_of::<FmhaCall>() as u64,
        batch,
        seqlen_q: ROWS as i64,
        seqlen_k: ROWS as i64,
        num_heads_q: HEADS as i64,
        num_heads_kv: HEADS as i64,
        head_dim_qk: DIM as i64,
        head_dim_v: DIM as i64,
        total_q: total,
        total_k: total,
        page_size: 0,
        num_pages: 0,
        max_pages: 0,
        q: tensor(q),
        k: tensor(k),
        v: tensor(v),
        o: FmhaTensor { data: o.as_mut_ptr().cast(), ..tensor(o) },
        bias: NONE,
        lse: null_mut(),
        keep_mask: null_mut(),
        row_max: null_mut(),
        head_max: null_mut(),
        key_sum: null_mut(),
        cu_seqlens_q: cu,
        cu_seqlens_k: cu,
        seqused_q: null(),
        seqused_k: null(),
        block_table: null(),
        alibi_slopes: null(),
        sink: null(),
        descale_q: null(),
        descale_k: null(),
        descale_v: null(),
        scale_o: null(),
        mask: c"b".as_ptr(),
        softmax_scale: &raw const SCALE_AT,
        softcap: null(),
        stream: null_mut(),
        gradients: null(),
        cache: null(),
        part: null(),
        code: null(),
        lists: null(),
        masks: null(),
        block_scales: null(),
        workspace: null_mut(),
        workspace_bytes: 0,
        dropout_seed: 0,
        dropout_offset: 0,
        p_drop: 0.0,
        dtype_qk: FMHA_F16,
        dtype_v: FMHA_F16,
        dtype_o: FMHA_F16,
        dtype_bias: 0,
        v_layout: FMHA_V_ROW_MAJOR,
        alibi_per_batch: 0,
        descale_per_tensor: 0,
        dropout_seeded: 0,
        reserved: 0,
    }
}

static SCALE_AT: f32 = SCALE;

/// f16 numbers in 1..2, all of one tensor different.
fn numbers(seed: u16, rows: usize) -> Vec<u16> {
    (0..rows * HEADS * DIM)
        .map(|i| 0x3C00 | (i as u16).wrapping_mul(613).wrapping_add(seed) & 0x3FF)
        .collect()
}

fn last_error() -> String {
    // SAFETY: it gives a C string of this thread.
    unsafe { CStr::from_ptr(fmha_last_error()) }.to_string_lossy().into_owned()
}

fn plan(call: &FmhaCall) -> Result<FmhaPlan, fmha::Error> {
    // SAFETY: every pointer of a test's call is memory of the test, as large as the call says.
    unsafe { FmhaPlan::new(&cpu(), call, &Choice::default()) }
}

fn run_on_cpu(call: &FmhaCall) {
    // SAFETY: every pointer of the call is memory of the test, as large as the call says.
    unsafe { plan(call).unwrap().run(call).unwrap() };
}

#[test]
fn a_packed_call_is_the_batch_call_of_equal_lengths() {
    let (q, k, v) = (numbers(1, 2 * ROWS), numbers(77, 2 * ROWS), numbers(300, 2 * ROWS));
    let (mut batched, mut packed) = (vec![0; q.len()], vec![0; q.len()]);
    run_on_cpu(&call(&q, &k, &v, &mut batched, 2, &[]));
    run_on_cpu(&call(&q, &k, &v, &mut packed, 2, &[0, ROWS as i32, 2 * ROWS as i32]));
    assert_eq!(batched, packed);
    // Causal: the first query of each sequence sees its own key alone.
    for row in [0, ROWS] {
        let row = row * HEADS * DIM..(row + 1) * HEADS * DIM;
        assert_eq!(batched[row.clone()], v[row]);
    }
    assert_ne!(batched, v);
}

fn captured(name: &CStr) -> FmhaCaptured {
    FmhaCaptured {
        name: name.as_ptr(),
        data: null(),
        shape: [0; 5],
        strides: [0; 5],
        grad: null_mut(),
        integer: 0,
        real: 0.0,
        num_dims: 0,
        dtype_grad: 0,
        reserved: 0,
    }
}

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
    let mut windowed = call(&q, &k, &v, &mut built_in, 1, &[]);
    windowed.mask = c"t:2,0".as_ptr();
    windowed.alibi_slopes = slopes.as_ptr();
    run_on_cpu(&windowed);
    let mut as_code = call(&q, &k, &v, &mut coded, 1, &[]);
    as_code.mask = null();
    let of = |left, by| {
        let mut all = [captured(c"left"), captured(c"by"), captured(c"slopes")];
        (all[0].integer, all[1].real) = (left, by);
        (all[2].data, all[2].shape[0], all[2].strides[0], all[2].num_dims) =
            (slopes.as_ptr().cast(), 2, 1, 1);
        all
    };
    let score = c"slopes: f32[_]; by: float; s - by * slopes[h] * abs(q - k)";
    let mask = c"left: int; k <= q and q - k <= left";
    let planned = of(7, -9.0);
    let said = code(Some(score), Some(mask), &planned);
    as_code.code = &raw const said;
    let plan = plan(&as_code).unwrap();
    // The numbers come with the run, and another spelling is the same function.
    let given = of(2, 1.0);
    let mask = c"left: int; (k<=q) and (q - k <= left)";
    let said = code(Some(score), Some(mask), &given);
    as_code.code = &raw const said;
    // SAFETY: every pointer of the call is memory of the test, as large as the call says.
    unsafe { plan.run(&as_code).unwrap() };
    assert_eq!(coded, built_in);
    // SAFETY: every pointer of the call is memory of the test, as large as the call says.
    let refused = |call: &FmhaCall| unsafe { plan.run(call).unwrap_err().to_string() };
    let mut bad = given;
    bad[2].shape[0] = 3;
    let said = code(Some(score), Some(mask), &bad);
    as_code.code = &raw const said;
    assert!(refused(&as_code).contains("captured slopes.shape[0] 3 is not the plan's 2"));
    let said = code(Some(score), Some(c"k <= q"), &given);
    as_code.code = &raw const said;
    assert!(
        refused(&as_code).contains("mask `k <= q` is not the plan's `left: int; "),
        "{}",
        refused(&as_code)
    );
    as_code.code = null();
    assert!(refused(&as_code).contains("code null is not the plan's given"));
}

#[test]
fn what_is_wrong_with_code_is_named() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let (mut o, slopes) = (vec![0; q.len()], [1.0f32; 4]);
    let given = |change: fn(&mut FmhaCaptured)| {
        let mut given = captured(c"slopes");
        (given.data, given.shape[0], given.strides[0], given.num_dims) = (slopes.as_ptr().cast(), 4, 1, 1);
        change(&mut given);
        given
    };
    let reads = c"slopes: f32[_]; s + slopes[h]";
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
        (Some(reads), None, vec![given(|x| x.data = null())], "captured slopes.data is null"),
        (Some(c"slopes: float; s * slopes"), None, vec![given(|_| ())], "captured slopes.data is given"),
        (Some(reads), None, vec![given(|x| x.num_dims = 6)], "captured slopes.num_dims 6 is not in 0..=5"),
        (Some(reads), None, vec![given(|x| x.num_dims = 2)], "captured slopes has 2 axes"),
        (Some(reads), None, vec![given(|x| x.shape[0] = 0)], "captured slopes: extent 0 of axis 0"),
        (Some(reads), None, vec![given(|x| x.shape[0] = -1)], "captured -1 is not in 0..2^32"),
        (Some(reads), None, vec![given(|x| x.strides[0] = -1)], "captured slopes: stride -1 of axis 0"),
        (Some(reads), None, vec![given(|x| x.dtype_grad = 6)], "captured slopes.dtype_grad 6 goes with grad"),
        (Some(reads), None, vec![given(|x| x.grad = x.data.cast_mut())], "captured slopes.grad is given"),
        (Some(reads), None, vec![given(|x| x.reserved = 1)], "reserved 1 is not 0"),
    ];
    for (score, mask, captured, error) in cases {
        let said = code(score, mask, &captured);
        let mut call = call(&q, &k, &v, &mut o, 1, &[]);
        call.code = &raw const said;
        let refused = plan(&call).map(|_| ()).unwrap_err().to_string();
        assert!(refused.contains(error), "{refused}, not {error}");
    }
    let mut said = code(Some(reads), None, &[]);
    said.num_captured = 1;
    let mut call = call(&q, &k, &v, &mut o, 1, &[]);
    said.captured = null();
    call.code = &raw const said;
    assert!(
        plan(&call).map(|_| ()).unwrap_err().to_string().contains("captured is null, but num_captured is 1")
    );
    said.struct_bytes = 8;
    call.code = &raw const said;
    assert!(
        plan(&call).map(|_| ()).unwrap_err().to_string().contains("struct_bytes 8 is not sizeof(FmhaCode)")
    );
}

// SAFETY: numbers and pointers, of which all bits may be 0.
const NO_MASKS: FmhaMasks = unsafe { std::mem::zeroed() };

/// Numbers of a mask, with strides as rows of `[head, seq, dim]` have them.
fn mask_tensor<T>(data: &[T], [head, seq, dim]: [i64; 3]) -> FmhaTensor {
    let data = data.as_ptr() as *mut c_void;
    FmhaTensor { data, batch_stride: 0, seqlen_stride: seq, head_stride: head, dim_stride: dim }
}

#[test]
fn each_mask_as_data_that_spells_causal_is_causal() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let (mut built_in, mut masked) = (vec![0; q.len()], vec![0; q.len()]);
    run_on_cpu(&call(&q, &k, &v, &mut built_in, 1, &[]));
    let base = FmhaMasks { struct_bytes: size_of::<FmhaMasks>() as u64, ..NO_MASKS };
    let rows = ROWS as i64;
    let ends: Vec<i32> = [vec![0; ROWS], (1..=ROWS as i32).collect()].concat();
    let intervals = FmhaMasks {
        intervals: mask_tensor(&ends, [2 * rows, 1, rows]),
        endpoints: 2,
        intervals_heads: 1,
        ..base
    };
    let words: Vec<u32> = (0..ROWS).map(|row| (2 << row) - 1).collect();
    let bits = FmhaMasks { mask_bits: mask_tensor(&words, [rows, 1, 1]), mask_bits_heads: 1, ..base };
    // Blocks of one query and one key: each is seen as a whole.
    let (counts, blocks): (Vec<i32>, Vec<i32>) =
        ((1..=ROWS as i32).collect(), (0..ROWS).flat_map(|_| 0..ROWS as i32).collect());
    let lists = FmhaMasks {
        full_kv_num_blocks: mask_tensor(&counts, [rows, 1, 1]),
        full_kv_indices: mask_tensor(&blocks, [rows * rows, rows, 1]),
        lists_heads: 1,
        block_q: 1,
        block_k: 1,
        full_max_blocks: rows,
        ..base
    };
    for masks in [intervals, bits, lists] {
        let mut masks_call = call(&q, &k, &v, &mut masked, 1, &[]);
        (masks_call.mask, masks_call.masks) = (null(), &raw const masks);
        run_on_cpu(&masks_call);
        assert_eq!(masked, built_in);
        masked.fill(0);
    }
}

#[test]
fn small_outputs_are_of_the_scores_that_a_query_sees() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let mut o = vec![0; q.len()];
    let mut lse = [0f32; HEADS * ROWS];
    let (mut row_max, mut head_max, mut key_sum) =
        ([9f32; HEADS * ROWS], [9f32; HEADS], [9f32; HEADS * ROWS]);
    let mut call = call(&q, &k, &v, &mut o, 1, &[]);
    call.lse = lse.as_mut_ptr();
    call.row_max = row_max.as_mut_ptr();
    call.head_max = head_max.as_mut_ptr();
    call.key_sum = key_sum.as_mut_ptr();
    run_on_cpu(&call);
    for (head, &greatest) in head_max.iter().enumerate() {
        let rows = head * ROWS..(head + 1) * ROWS;
        // Causal: the first query sees one key, whose score is its LSE.
        assert!((row_max[rows.start] - lse[rows.start]).abs() < 1e-5);
        assert_eq!(row_max[rows.clone()].iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b)), greatest);
        assert!((key_sum[rows].iter().sum::<f32>() - ROWS as f32).abs() < 1e-4);
    }
    let gradients = gradients_of(&q);
    call.gradients = &raw const gradients;
    let refused = plan(&call).map(|_| ()).unwrap_err().to_string();
    assert!(refused.contains("row_max is given beside gradients"), "{refused}");
}

fn gradients_of(x: &[u16]) -> FmhaGradients {
    let of = tensor(x);
    FmhaGradients {
        struct_bytes: size_of::<FmhaGradients>() as u64,
        dout: of,
        dq: of,
        dk: of,
        dv: of,
        dbias: NONE,
        dlse: null(),
        dsink: null_mut(),
        dtype_grad: FMHA_F16,
        dtype_dbias: 0,
    }
}

#[test]
fn what_is_wrong_with_masks_as_data_is_named() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let mut o = vec![0; q.len()];
    let words = [0i32; 64];
    let base = FmhaMasks { struct_bytes: size_of::<FmhaMasks>() as u64, ..NO_MASKS };
    let at = mask_tensor(&words, [10, 1, 5]);
    let intervals = FmhaMasks { intervals: at, endpoints: 2, intervals_heads: 1, ..base };
    let bits = FmhaMasks { mask_bits: mask_tensor(&words, [5, 1, 1]), mask_bits_heads: 1, ..base };
    let lists = FmhaMasks {
        kv_num_blocks: mask_tensor(&words, [5, 1, 1]),
        kv_indices: mask_tensor(&words, [5, 1, 1]),
        lists_heads: 1,
        block_q: 2,
        block_k: 2,
        max_blocks: 1,
        ..base
    };
    let backwards = FmhaTensor { seqlen_stride: -1, ..at };
    let cases = [
        (FmhaMasks { struct_bytes: 8, ..base }, "struct_bytes 8 is not sizeof(FmhaMasks)"),
        (FmhaMasks { endpoints: 3, ..intervals }, "intervals has 3 endpoints a row"),
        (FmhaMasks { endpoints: -1, ..intervals }, "endpoints -1 is not in 0..2^32"),
        (FmhaMasks { endpoints: 0, ..intervals }, "intervals.data is given, but goes with endpoints"),
        (FmhaMasks { intervals: NONE, endpoints: 0, ..intervals }, "intervals_heads 1 goes with endpoints"),
        (FmhaMasks { intervals_heads: 3, ..intervals }, "intervals has 3 heads"),
        (FmhaMasks { intervals: backwards, ..intervals }, "intervals.seq stride -1 is negative"),
        (FmhaMasks { mask_bits_heads: 0, ..bits }, "mask_bits.data is given, but goes with mask_bits_heads"),
        (FmhaMasks { mask_bits_heads: 3, ..bits }, "mask_bits has 3 heads"),
        (FmhaMasks { lists_heads: 3, ..lists }, "block_lists has 3 heads"),
        (FmhaMasks { lists_heads: 0, ..lists }, "kv_num_blocks.data is given, but goes with lists_heads"),
        (FmhaMasks { block_q: 0, ..lists }, "block_lists.block_q 0 is not in 1..="),
        (FmhaMasks { block_k: -1, ..lists }, "block_k -1 is not in 0..2^32"),
        (FmhaMasks { block_q: 4, ..base }, "block_q 4 goes with lists_heads"),
        (FmhaMasks { full_max_blocks: 4, ..lists }, "full_max_blocks 4 goes with full_kv_num_blocks.data"),
        (FmhaMasks { kv_num_blocks: NONE, ..lists }, "kv_indices.data is given, but goes with kv_num_blocks"),
        (
            FmhaMasks { kv_num_blocks: NONE, kv_indices: NONE, max_blocks: 0, ..lists },
            "block_lists has 0 lists",
        ),
    ];
    for (masks, error) in cases {
        let mut call = call(&q, &k, &v, &mut o, 1, &[]);
        call.masks = &raw const masks;
        let refused = plan(&call).map(|_| ()).unwrap_err().to_string();
        assert!(refused.contains(error), "{refused}, not {error}");
    }
    // Tensors come with each run.
    for (masks, error) in [
        (
            FmhaMasks { intervals: FmhaTensor { data: null_mut(), ..at }, ..intervals },
            "intervals.data is null",
        ),
        (
            FmhaMasks { kv_indices: FmhaTensor { data: null_mut(), ..lists.kv_indices }, ..lists },
            "kv_indices.data is null, but",
        ),
    ] {
        let mut call = call(&q, &k, &v, &mut o, 1, &[]);
        call.masks = &raw const masks;
        // SAFETY: as in `plan`.
        let refused = unsafe { plan(&call).unwrap().run(&call).unwrap_err().to_string() };
        assert!(refused.contains(error), "{refused}, not {error}");
    }
}

/// Bytes with these strides between heads and rows.
fn byte_tensor(bytes: &[u8], [seq, head]: [i64; 2]) -> FmhaTensor {
    let data = bytes.as_ptr() as *mut c_void;
    FmhaTensor { data, batch_stride: 0, seqlen_stride: seq, head_stride: head, dim_stride: 1 }
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
        |call: FmhaCall| FmhaCall { dtype_qk: FMHA_BF16, dtype_v: FMHA_BF16, dtype_o: FMHA_BF16, ..call };
    run_on_cpu(&narrow(call(&wide_q, &wide_k, &wide_v, &mut plain, 1, &[])));
    let rows = byte_tensor(&of_rows, [HEADS as i64, 1]);
    let scales = FmhaBlockScales {
        struct_bytes: size_of::<FmhaBlockScales>() as u64,
        q: rows,
        k: rows,
        v: byte_tensor(&of_columns, [ROW, DIM as i64]),
        format: FMHA_MXFP8_E4M3,
        reserved: 0,
    };
    let stored = |bytes: &[u8]| byte_tensor(bytes, [ROW, DIM as i64]);
    let base = narrow(call(&wide_q, &wide_k, &wide_v, &mut scaled, 1, &[]));
    let base = FmhaCall { q: stored(&q), k: stored(&k), v: stored(&v), ..base };
    run_on_cpu(&FmhaCall { block_scales: &raw const scales, ..base });
    assert_eq!(scaled, plain);

    for (wrong, error) in [
        (FmhaBlockScales { struct_bytes: 8, ..scales }, "struct_bytes 8 is not sizeof(FmhaBlockScales)"),
        (FmhaBlockScales { format: 9, ..scales }, "format 9 is none of"),
        (FmhaBlockScales { reserved: 1, ..scales }, "reserved 1"),
        (
            FmhaBlockScales { k: FmhaTensor { seqlen_stride: -1, ..rows }, ..scales },
            "block_scale_k.seq stride -1 is negative",
        ),
    ] {
        let refused = plan(&FmhaCall { block_scales: &raw const wrong, ..base });
        let refused = refused.map(|_| ()).unwrap_err().to_string();
        assert!(refused.contains(error), "{refused}, not {error}");
    }
    let planned = plan(&FmhaCall { block_scales: &raw const scales, ..base }).unwrap();
    for (other, error) in [
        (FmhaBlockScales { format: FMHA_MXFP8_E5M2, ..scales }, "format"),
        (FmhaBlockScales { v: FmhaTensor { head_stride: 2, ..scales.v }, ..scales }, "v"),
        (
            FmhaBlockScales { q: FmhaTensor { data: null_mut(), ..rows }, ..scales },
            "block_scale_q.data is null",
        ),
    ] {
        // SAFETY: as in `plan`.
        let refused = unsafe { planned.run(&FmhaCall { block_scales: &raw const other, ..base }) };
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains(error), "{refused}, not {error}");
    }
    // SAFETY: as in `plan`.
    let refused = unsafe { planned.run(&base).unwrap_err().to_string() };
    assert!(refused.contains("block_scales"), "{refused}");
}

#[test]
fn paged_keys_in_any_order_are_the_batch_call() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let (mut strided, mut paged) = (vec![0; q.len()], vec![0; q.len()]);
    run_on_cpu(&call(&q, &k, &v, &mut strided, 1, &[]));
    // Pages of two rows, the last one first; what lies beyond the fifth key is never read.
    let page = 2 * HEADS * DIM;
    let pages = |x: &[u16]| {
        let mut rows = x.to_vec();
        rows.resize(3 * page, 0x7e01);
        [&rows[2 * page..], &rows[..page], &rows[page..2 * page]].concat()
    };
    let (k, v, table) = (pages(&k), pages(&v), [1, 2, 0]);
    let stride = |tensor: FmhaTensor| FmhaTensor { batch_stride: page as i64, ..tensor };
    let base = call(&q, &q, &q, &mut paged, 1, &[]);
    let call = FmhaCall {
        k: stride(tensor(&k)),
        v: stride(tensor(&v)),
        page_size: 2,
        num_pages: 3,
        max_pages: 3,
        block_table: table.as_ptr(),
        ..base
    };
    let plan = match plan(&call) {
        Ok(plan) => plan,
        Err(refused @ fmha::Error::Unsupported { .. }) => {
            println!("absent: {refused}");
            return;
        }
        Err(other) => panic!("{other}"),
    };
    // SAFETY: every pointer of the call is memory of the test, as large as the call says.
    unsafe { plan.run(&call).unwrap() };
    assert_eq!(strided, paged);
    let few = FmhaCall { max_pages: 2, ..call };
    // SAFETY: every pointer of the call is memory of the test, as large as the call says; it is refused.
    let error = unsafe { plan.run(&few) }.unwrap_err().to_string();
    assert!(error.contains("max_pages 2"), "{error}");
}

/// A call without a cache.
const NO_CACHE: FmhaCache = FmhaCache {
    struct_bytes: size_of::<FmhaCache>() as u64,
    seqlen_new: 0,
    total_new: 0,
    max_pos: 0,
    k_new: NONE,
    v_new: NONE,
    cu_seqlens_new: null(),
    rotary_cos: null(),
    rotary_sin: null(),
    tree_mask: null(),
    rotary_dim: 0,
    rotary_interleaved: 0,
    dtype_rotary: 0,
    dtype_cache: 0,
    v_in_k: 0,
    reserved: 0,
};

#[test]
fn appended_rows_are_written_and_seen_as_if_they_had_been_there() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let (mut whole, mut appended) = (vec![0; q.len()], vec![0; q.len()]);
    run_on_cpu(&call(&q, &k, &v, &mut whole, 1, &[]));
    // The last two rows are new; what the cache has in their place is never read.
    let old = (ROWS - 2) * HEADS * DIM;
    let (mut k_cache, mut v_cache) = (k.clone(), v.clone());
    k_cache[old..].fill(0x7e01);
    v_cache[old..].fill(0x7e01);
    let used = [ROWS as i32 - 2];
    let cache = FmhaCache { seqlen_new: 2, k_new: tensor(&k[old..]), v_new: tensor(&v[old..]), ..NO_CACHE };
    let base = call(&q, &k, &v, &mut appended, 1, &[]);
    let call = FmhaCall {
        k: FmhaTensor { data: k_cache.as_mut_ptr().cast(), ..base.k },
        v: FmhaTensor { data: v_cache.as_mut_ptr().cast(), ..base.v },
        seqused_k: used.as_ptr(),
        cache: &raw const cache,
        ..base
    };
    run_on_cpu(&call);
    assert_eq!((appended, k_cache, v_cache), (whole, k, v));
}

#[test]
fn a_tree_that_is_a_chain_is_the_causal_mask_and_a_turn_by_nothing_changes_nothing() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let (mut causal, mut tree) = (vec![0; q.len()], vec![0; q.len()]);
    run_on_cpu(&call(&q, &k, &v, &mut causal, 1, &[]));
    let chain: Vec<u32> = (0..ROWS as u32).map(|i| (2 << i) - 1).collect();
    let (ones, zeros, used) = ([1f32; 2 * ROWS * DIM / 2], [0f32; 2 * ROWS * DIM / 2], [ROWS as i32]);
    let cache = FmhaCache {
        tree_mask: chain.as_ptr(),
        max_pos: 2 * ROWS as i64,
        rotary_dim: DIM as i32,
        rotary_cos: ones.as_ptr().cast(),
        rotary_sin: zeros.as_ptr().cast(),
        dtype_rotary: FMHA_F32,
        ..NO_CACHE
    };
    let base = call(&q, &k, &v, &mut tree, 1, &[]);
    run_on_cpu(&FmhaCall { seqused_k: used.as_ptr(), cache: &raw const cache, ..base });
    assert_eq!(causal, tree);
}

#[test]
fn a_wrong_cache_is_refused_by_field_and_number() {
    let (x, used) = (numbers(1, ROWS), [1i32]);
    let mut o = vec![0; x.len()];
    let base = FmhaCall { seqused_k: used.as_ptr(), ..call(&x, &x, &x, &mut o, 1, &[]) };
    let table = [0f32; 64];
    let turning = FmhaCache {
        max_pos: 8,
        rotary_dim: DIM as i32,
        rotary_cos: table.as_ptr().cast(),
        rotary_sin: table.as_ptr().cast(),
        dtype_rotary: FMHA_F32,
        ..NO_CACHE
    };
    let appending = FmhaCache { seqlen_new: 2, k_new: tensor(&x), v_new: tensor(&x), ..NO_CACHE };
    for (wanted, number, cache) in [
        ("struct_bytes", "8", FmhaCache { struct_bytes: 8, ..NO_CACHE }),
        ("seqlen_new", "-1", FmhaCache { seqlen_new: -1, ..NO_CACHE }),
        ("k_new.data", "0", FmhaCache { seqlen_new: 0, v_new: NONE, ..appending }),
        ("v_new.data", "0", FmhaCache { seqlen_new: 0, k_new: NONE, ..appending }),
        ("v_new.data", "1", FmhaCache { v_in_k: 1, ..appending }),
        ("k_new", "9", FmhaCache { k_new: FmhaTensor { dim_stride: 9, ..appending.k_new }, ..appending }),
        ("total_new", "3", FmhaCache { total_new: 3, ..appending }),
        ("max_pos", "8", FmhaCache { max_pos: 8, ..NO_CACHE }),
        ("max_pos", "-8", FmhaCache { max_pos: -8, ..NO_CACHE }),
        (
            "rotary_cos",
            "is given, but rotary_dim is 0",
            FmhaCache { rotary_cos: table.as_ptr().cast(), ..NO_CACHE },
        ),
        ("rotary_sin", "is null, but rotary_dim is 8", FmhaCache { rotary_sin: null(), ..turning }),
        ("rotary_dim", "3", FmhaCache { rotary_dim: 3, ..turning }),
        ("rotary_dim", "-4", FmhaCache { rotary_dim: -4, ..turning }),
        ("rotary_interleaved", "2", FmhaCache { rotary_interleaved: 2, ..turning }),
        ("dtype_rotary", "17", FmhaCache { dtype_rotary: 17, ..turning }),
        ("dtype_cache", "f32", FmhaCache { dtype_cache: FMHA_F32, ..NO_CACHE }),
        ("v_in_k", "4", FmhaCache { v_in_k: 4, ..NO_CACHE }),
        ("reserved", "6", FmhaCache { reserved: 6, ..NO_CACHE }),
    ] {
        let call = FmhaCall { cache: &raw const cache, ..base };
        let Err(error) = plan(&call) else { panic!("{wanted} {number} is planned") };
        let text = error.to_string();
        assert!(text.contains(wanted) && text.contains(number), "{wanted} {number}: {text}");
    }
    // A tree stands in for the causal mask alone.
    let cache = FmhaCache { tree_mask: table.as_ptr().cast(), ..NO_CACHE };
    let call = FmhaCall { cache: &raw const cache, mask: c"0".as_ptr(), ..base };
    let Err(error) = plan(&call) else { panic!("a tree beside no mask is planned") };
    assert!(error.to_string().contains("tree_mask"), "{error}");
}

#[test]
fn a_plan_of_packed_sequences_runs_with_other_totals() {
    let x = numbers(1, 2 * ROWS);
    let (mut many, mut few) = (vec![0; x.len()], vec![0; x.len()]);
    let planned = call(&x, &x, &x, &mut many, 2, &[0, 5, 10]);
    let plan = plan(&planned).unwrap();
    let later = call(&x, &x, &x, &mut few, 2, &[0, 3, 7]);
    // SAFETY: every pointer of the call is memory of the test, as large as the call says.
    unsafe { plan.run(&later).unwrap() };
    let row = HEADS * DIM;
    // Causal: each sequence's first query sees its own key alone; rows beyond the total stay as they were.
    assert_eq!((&few[..row], &few[3 * row..4 * row]), (&x[..row], &x[3 * row..4 * row]));
    assert!(few[7 * row..].iter().all(|&bits| bits == 0));
    // SAFETY: every pointer is memory of the test, as large as said; totals without packing are refused.
    let error = unsafe { plan.run(&FmhaCall { total_q: -1, ..later }) }.unwrap_err().to_string();
    assert!(error.contains("total_q -1"), "{error}");
}

#[test]
fn a_plan_runs_with_other_addresses_and_another_dropout_seed() {
    let (q, v) = (numbers(1, ROWS), numbers(300, ROWS));
    let (mut first, mut second) = (vec![0; q.len()], vec![0; q.len()]);
    let planned = FmhaCall { p_drop: 0.5, dropout_seeded: 1, ..call(&q, &q, &v, &mut first, 1, &[]) };
    let plan = plan(&planned).unwrap();
    let (q2, v2) = (q.clone(), v.clone());
    let moved = FmhaCall { p_drop: 0.5, dropout_seeded: 1, ..call(&q2, &q2, &v2, &mut second, 1, &[]) };
    // SAFETY: every pointer of the call is memory of the test, as large as the call says.
    unsafe {
        plan.run(&planned).unwrap();
        plan.run(&moved).unwrap();
    }
    assert_eq!(first, second);
    // SAFETY: every pointer of the call is memory of the test, as large as the call says.
    unsafe { plan.run(&FmhaCall { dropout_seed: 9, ..moved }).unwrap() };
    assert_ne!(first, second);
    for (seeded, said) in [(0, "dropout has no seed, but p_drop is 0.5"), (2, "dropout_seeded 2 is neither")]
    {
        let unseeded = FmhaCall { dropout_seeded: seeded, ..moved };
        // SAFETY: every pointer of the call is memory of the test, as large as the call says.
        let error = unsafe { plan.run(&unseeded) }.unwrap_err().to_string();
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
    let at = |buffer: &fmha::DevBuffer| FmhaTensor { data: buffer.as_ptr().cast(), ..tensor(&[]) };
    let gradients_of = |outputs: &[fmha::DevBuffer; 3]| FmhaGradients {
        struct_bytes: size_of::<FmhaGradients>() as u64,
        dout: at(&inputs[4]),
        dq: at(&outputs[0]),
        dk: at(&outputs[1]),
        dv: at(&outputs[2]),
        dbias: NONE,
        dlse: null(),
        dsink: null_mut(),
        dtype_grad: FMHA_F16,
        dtype_dbias: 0,
    };
    let base = FmhaCall {
        q: at(&inputs[0]),
        k: at(&inputs[1]),
        v: at(&inputs[2]),
        o: at(&inputs[3]),
        lse: lse.as_ptr().cast(),
        ..call(&[], &[], &[], &mut [], 1, &[])
    };
    let written = |caller_workspace: bool| {
        let plan = fmha::PlanOptions::default().kernel("simt");
        let choice = Choice { plan, caller_workspace, ..Choice::default() };
        let outputs = [(); 3].map(|()| device(&[0x7e01; ROWS * HEADS * DIM]));
        let gradients = gradients_of(&outputs);
        let call = FmhaCall { gradients: &raw const gradients, ..base };
        // SAFETY: every pointer is the emulated device's memory, as large as the call says.
        let plan = match unsafe { FmhaPlan::new(&backend, &call, &choice) } {
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
        let with = |workspace: *mut u8, workspace_bytes| {
            let call = FmhaCall { workspace: workspace.cast(), workspace_bytes, ..call };
            // SAFETY: every pointer is the emulated device's memory, as large as the call says; what is too
            // small is refused.
            unsafe { plan.run(&call) }.map_err(|error| error.to_string())
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

#[test]
fn a_plan_takes_minus_nought_for_nought() {
    let (q, v) = (numbers(1, ROWS), numbers(300, ROWS));
    let (mut first, mut second) = (vec![0; q.len()], vec![0; q.len()]);
    let planned = call(&q, &q, &v, &mut first, 1, &[]);
    let plan = plan(&planned).unwrap();
    let other = FmhaCall { p_drop: -0.0, ..call(&q, &q, &v, &mut second, 1, &[]) };
    // SAFETY: every pointer of the call is memory of the test, as large as the call says.
    unsafe {
        plan.run(&planned).unwrap();
        plan.run(&other).unwrap();
    }
    assert_eq!(first, second);
    let other = FmhaCall { p_drop: 0.25, ..other };
    // SAFETY: every pointer of the call is memory of the test, as large as the call says.
    let error = unsafe { plan.run(&other) }.unwrap_err().to_string();
    assert!(error.contains("p_drop"), "{error}");
}

/// One wrong number anywhere in the bytes of a struct.
#[derive(Clone, Debug)]
struct Fault {
    word: usize,
    value: u64,
}

/// Words of `FmhaCall` that are addresses: a random one is the caller's breach of its promise.
fn is_pointer(word: usize) -> bool {
    let pointers = [
        std::mem::offset_of!(FmhaCall, q),
        std::mem::offset_of!(FmhaCall, k),
        std::mem::offset_of!(FmhaCall, v),
        std::mem::offset_of!(FmhaCall, o),
        std::mem::offset_of!(FmhaCall, bias),
    ];
    let first = std::mem::offset_of!(FmhaCall, lse);
    let last = std::mem::offset_of!(FmhaCall, workspace);
    let at = word * 8;
    pointers.contains(&at) || (first..=last).contains(&at)
}

fn faults() -> impl Strategy<Value = Fault> {
    let words = size_of::<FmhaCall>() / 8;
    let value = prop_oneof![
        any::<u64>(),
        0u64..20,
        Just(u64::MAX),
        Just(1 << 31),
        Just(1 << 32),
        Just(i64::MAX as u64),
        any::<u32>().prop_map(|low| u64::from(low) << 32),
    ];
    let numbers: Vec<usize> = (0..words).filter(|&word| !is_pointer(word)).collect();
    (prop::sample::select(numbers), value).prop_map(|(word, value)| Fault { word, value })
}

/// # Panics
/// Where the word lies outside the struct.
fn with(call: &FmhaCall, fault: &Fault) -> FmhaCall {
    let mut bad = *call;
    assert!((fault.word + 1) * 8 <= size_of::<FmhaCall>());
    // SAFETY: the word lies inside, and is of numbers, for which any bits will do.
    unsafe { (&raw mut bad).cast::<u64>().add(fault.word).write(fault.value) };
    bad
}

fn cases() -> u32 {
    // Cases, not seconds: under an interpreter a case takes a thousand times as long.
    if cfg!(miri) { 20 } else { fuzz_cases(2000) }
}

/// Number of fuzz cases: a second runs some `per_second` of them.
fn fuzz_cases(per_second: u32) -> u32 {
    let seconds = std::env::var(fmha_core::env::FUZZ_SECONDS.name);
    let seconds = seconds.map_or(1, |seconds| seconds.parse::<u32>().unwrap());
    per_second * seconds.max(1)
}

/// A number, or that a pointer is null or is not.
fn names_a_value(text: &str) -> bool {
    text.contains(|c: char| c.is_ascii_digit()) || text.contains("null") || text.contains("given")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever numbers a struct has, a run is refused or is the planned one, and writes O alone.
    #[test]
    fn a_struct_of_any_numbers_is_the_planned_one_or_refused(list in prop::collection::vec(faults(), 1..4)) {
        let q = numbers(1, ROWS);
        let mut memory = vec![0x7e01u16; 3 * q.len()];
        let good = call(&q, &q, &q, &mut memory[q.len()..2 * q.len()], 1, &[]);
        let bad = list.iter().fold(good, |call, fault| with(&call, fault));
        let seed = [
            std::mem::offset_of!(FmhaCall, dropout_seed),
            std::mem::offset_of!(FmhaCall, dropout_offset),
            std::mem::offset_of!(FmhaCall, dropout_seeded),
        ];
        // A field of the call that repeats what the problem says changes nothing; a p_drop of -0 is 0.
        let asked = FmhaCall { p_drop: if bad.p_drop == 0.0 { 0.0 } else { bad.p_drop }, ..bad };
        let same = (0..size_of::<FmhaCall>() / 8).filter(|word| !seed.contains(&(word * 8))).all(|word| {
            let (asked, good) = (&raw const asked, &raw const good);
            // SAFETY: words inside the structs, of any bits.
            unsafe { *asked.cast::<u64>().add(word) == *good.cast::<u64>().add(word) }
        });
        let same = same && matches!(bad.dropout_seeded, 0 | 1) && bad.reserved == 0;
        let plan = plan(&good).unwrap();
        // SAFETY: every pointer is memory of the test, as large as said; what disagrees is refused.
        let result = unsafe { plan.run(&bad) };
        prop_assert_eq!(result.is_ok(), same, "{:?}", result);
        if let Err(error) = result {
            let text = error.to_string();
            prop_assert!(names_a_value(&text), "{}", text);
            prop_assert!(memory.iter().all(|&bits| bits == 0x7e01), "written");
        }
        prop_assert!(memory[..q.len()].iter().chain(&memory[2 * q.len()..]).all(|&bits| bits == 0x7e01));
    }

    /// A plan of any numbers is made or refused with a number; nothing panics, nothing is allocated by it.
    #[test]
    fn a_plan_of_any_numbers_is_made_or_refused(list in prop::collection::vec(faults(), 1..4)) {
        let q = numbers(1, ROWS);
        let mut o = vec![0; q.len()];
        let bad = list.iter().fold(call(&q, &q, &q, &mut o, 1, &[]), |call, fault| with(&call, fault));
        let mut made = null_mut();
        let options = crate::FmhaOptions {
            struct_bytes: size_of::<crate::FmhaOptions>() as u64,
            backend: c"cpu".as_ptr(),
            kernel: null(),
            tile: null(),
            allow_fallback: 0,
            accuracy: 0,
            deterministic: 0,
            batch_invariant: 0,
            check_lengths: 0,
            caller_workspace: 0,
            row_invariant: 0,
            reserved: 0,
        };
        // SAFETY: host pointers are this test's; a plan reads no tensor.
        let status = unsafe { fmha_plan(&raw const bad, &raw const options, &raw mut made) };
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
    let planned = FmhaCall { lse: lse.as_mut_ptr(), ..call(&q, &k, &v, &mut o, 2, &cu) };
    let plan = plan(&planned).unwrap();
    let nothing = FmhaTensor { data: null_mut(), ..planned.q };
    let empty = FmhaCall {
        total_q: 0,
        cu_seqlens_q: none.as_ptr(),
        q: nothing,
        o: nothing,
        lse: null_mut(),
        ..planned
    };
    // SAFETY: every pointer of the call is memory of the test; of 0 elements nothing is read or written.
    unsafe {
        plan.run(&empty).unwrap();
        plan.run(&planned).unwrap();
        let text = plan.run(&FmhaCall { lse: null_mut(), ..planned }).unwrap_err().to_string();
        assert!(text.contains("lse is null, but the plan has it"), "{text}");
        let text = plan.run(&FmhaCall { q: nothing, ..planned }).unwrap_err().to_string();
        assert!(text.contains("q.data is null, but"), "{text}");
    }
    assert!(o.iter().all(|&x| x != 0) && lse.iter().all(|&x| x != 0.0));
}

#[test]
fn gradients_and_bias_of_no_queries_may_be_null_and_the_gradients_of_keys_are_zero() {
    let (k, v) = (numbers(77, ROWS), numbers(300, ROWS));
    let (mut dk, mut dv) = (vec![0x7e01u16; k.len()], vec![0x7e01u16; k.len()]);
    let base = call(&[], &k, &v, &mut [], 1, &[]);
    let nothing = FmhaTensor { data: null_mut(), ..base.q };
    let written = |data: &mut Vec<u16>| FmhaTensor { data: data.as_mut_ptr().cast(), ..base.k };
    let bias =
        FmhaTensor { batch_stride: 0, seqlen_stride: ROWS as i64, head_stride: 0, dim_stride: 1, ..NONE };
    let gradients = FmhaGradients {
        struct_bytes: size_of::<FmhaGradients>() as u64,
        dout: nothing,
        dq: nothing,
        dk: written(&mut dk),
        dv: written(&mut dv),
        dbias: bias,
        dlse: null(),
        dsink: null_mut(),
        dtype_grad: FMHA_F16,
        dtype_dbias: FMHA_F32,
    };
    let forward = FmhaCall { seqlen_q: 0, q: nothing, o: nothing, bias, dtype_bias: FMHA_F32, ..base };
    let backward = FmhaCall { gradients: &raw const gradients, ..forward };
    run_on_cpu(&forward);
    run_on_cpu(&backward);
    assert!(dk.iter().chain(&dv).all(|&bits| bits == 0));
    // Null tensors are refused once there are queries.
    let text = plan(&FmhaCall { seqlen_q: ROWS as i64, ..backward }).map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("dtype_bias 6 goes with bias.data, which is null"), "{text}");
}

/// Without a sequence nothing is launched, sums over the sequences are 0, and null stands for what has no elements.
#[test]
fn a_batch_of_0_gives_empty_outputs_and_sums_of_0() {
    let base = call(&[], &[], &[], &mut [], 0, &[]);
    let nothing = FmhaTensor { data: null_mut(), ..base.q };
    let sink = [1f32; HEADS];
    let (bias, mut dbias) = ([1f32; ROWS * ROWS], [7f32; ROWS * ROWS]);
    let mut dsink = [7f32; HEADS];
    let of = |data: *mut f32| FmhaTensor {
        data: data.cast(),
        batch_stride: 0,
        seqlen_stride: ROWS as i64,
        head_stride: 0,
        dim_stride: 1,
    };
    let gradients = FmhaGradients {
        struct_bytes: size_of::<FmhaGradients>() as u64,
        dout: nothing,
        dq: nothing,
        dk: nothing,
        dv: nothing,
        dbias: of(dbias.as_mut_ptr()),
        dlse: null(),
        dsink: dsink.as_mut_ptr(),
        dtype_grad: FMHA_F16,
        dtype_dbias: FMHA_F32,
    };
    let forward = FmhaCall {
        q: nothing,
        k: nothing,
        v: nothing,
        o: nothing,
        bias: of(bias.as_ptr().cast_mut()),
        dtype_bias: FMHA_F32,
        sink: sink.as_ptr(),
        ..base
    };
    run_on_cpu(&forward);
    run_on_cpu(&FmhaCall { gradients: &raw const gradients, ..forward });
    assert!(dbias.iter().chain(&dsink).all(|&sum| sum == 0.0), "{dbias:?} {dsink:?}");
    let slopes = FmhaCall { bias: NONE, dtype_bias: 0, alibi_per_batch: 1, ..forward };
    run_on_cpu(&slopes);
    let pages = FmhaCall { page_size: 16, max_pages: 4, ..slopes };
    run_on_cpu(&pages);
}

/// One plan of no sequences runs whether each tensor of no elements is null or not, planned and run either way.
#[test]
fn what_has_no_elements_is_null_or_not_in_any_run_of_a_plan() {
    let (x, f32s, i32s) = (numbers(1, ROWS), [0f32; 64], [0i32; 8]);
    // Memory that no call writes, so read-only places serve.
    let (o, lse, keep) = (vec![0u16; x.len()], [0f32; 64], [0u8; 64]);
    let base = call(&[], &[], &[], &mut [], 0, &[]);
    let here = |data: *const u16| FmhaTensor { data: data.cast_mut().cast(), ..base.q };
    // The places of a call, its cache and its gradients that have a batch axis.
    let places = 18u32;
    let made = |given: u32, paged: bool, cache: &mut FmhaCache, gradients: &mut FmhaGradients| {
        let at = |bit: u32| given >> bit & 1 == 1;
        let tensor = |bit: u32| if at(bit) { here(x.as_ptr()) } else { here(null()) };
        let floats = |bit: u32| if at(bit) { f32s.as_ptr() } else { null() };
        let ints = |bit: u32| if at(bit) { i32s.as_ptr() } else { null() };
        *cache = FmhaCache {
            seqlen_new: 1,
            k_new: tensor(0),
            v_new: tensor(1),
            tree_mask: ints(2).cast(),
            rotary_dim: 4,
            max_pos: 8,
            rotary_cos: f32s.as_ptr().cast(),
            rotary_sin: f32s.as_ptr().cast(),
            dtype_rotary: FMHA_F32,
            ..NO_CACHE
        };
        *gradients =
            FmhaGradients { dout: tensor(3), dq: tensor(4), dk: tensor(5), dv: tensor(6), ..*gradients };
        gradients.dlse = floats(7);
        FmhaCall {
            q: tensor(8),
            k: tensor(9),
            v: tensor(10),
            o: FmhaTensor { data: if at(11) { o.as_ptr().cast_mut().cast() } else { null_mut() }, ..base.o },
            lse: if at(12) { lse.as_ptr().cast_mut() } else { null_mut() },
            keep_mask: if at(13) { keep.as_ptr().cast_mut() } else { null_mut() },
            seqused_q: ints(14),
            seqused_k: ints(15),
            alibi_slopes: floats(16),
            alibi_per_batch: 1,
            block_table: if paged { ints(17) } else { null() },
            page_size: if paged { 4 } else { 0 },
            num_pages: 0,
            max_pages: if paged { 2 } else { 0 },
            p_drop: 0.5,
            dropout_seeded: 1,
            descale_per_tensor: 0,
            mask: c"b".as_ptr(),
            ..base
        }
    };
    let gradients = FmhaGradients {
        struct_bytes: size_of::<FmhaGradients>() as u64,
        dout: NONE,
        dq: NONE,
        dk: NONE,
        dv: NONE,
        dbias: NONE,
        dlse: null(),
        dsink: null_mut(),
        dtype_grad: FMHA_F16,
        dtype_dbias: 0,
    };
    let masks = (0..places).map(|bit| 1 << bit).chain([0, u32::MAX]);
    for kind in ["plain", "cache", "pages", "gradients"] {
        for one in masks.clone() {
            for (planned, run) in [(one, 0), (0, one), (one, u32::MAX), (u32::MAX, one)] {
                let (mut caches, mut grads) = ([NO_CACHE; 2], [gradients; 2]);
                let first = made(planned, kind == "pages", &mut caches[0], &mut grads[0]);
                let next = made(run, kind == "pages", &mut caches[1], &mut grads[1]);
                let point = |call: FmhaCall, i: usize| FmhaCall {
                    cache: if matches!(kind, "cache" | "pages") { &raw const caches[i] } else { null() },
                    gradients: if kind == "gradients" { &raw const grads[i] } else { null() },
                    keep_mask: if kind == "plain" { call.keep_mask } else { null_mut() },
                    ..call
                };
                let (first, next) = (point(first, 0), point(next, 1));
                let said = format!("{kind}, planned with {planned:b}, run with {run:b}");
                let plan = plan(&first).unwrap_or_else(|error| panic!("{said}: {error}"));
                // SAFETY: of 0 elements nothing is read or written.
                unsafe { plan.run(&next) }.unwrap_or_else(|error| panic!("{said}: {error}"));
            }
        }
    }
}

#[test]
fn a_gradient_of_its_own_for_each_head_of_a_bias_that_all_share_is_refused() {
    let (q, numbers) = (numbers(1, ROWS), [0f32; HEADS * ROWS * ROWS]);
    let (mut o, mut lse, mut sums) = (vec![0u16; q.len()], vec![0f32; HEADS * ROWS], numbers);
    let mut grads = vec![vec![0u16; q.len()]; 3];
    let row = ROWS as i64;
    let of_all = FmhaTensor {
        data: numbers.as_ptr().cast_mut().cast(),
        batch_stride: 0,
        seqlen_stride: row,
        head_stride: 0,
        dim_stride: 1,
    };
    let forward = FmhaCall {
        lse: lse.as_mut_ptr(),
        bias: of_all,
        dtype_bias: FMHA_F32,
        ..call(&q, &q, &q, &mut o, 1, &[])
    };
    let written: Vec<FmhaTensor> =
        grads.iter_mut().map(|data| FmhaTensor { data: data.as_mut_ptr().cast(), ..forward.q }).collect();
    let mut with = |head_stride| FmhaGradients {
        struct_bytes: size_of::<FmhaGradients>() as u64,
        dout: forward.q,
        dq: written[0],
        dk: written[1],
        dv: written[2],
        dbias: FmhaTensor { data: sums.as_mut_ptr().cast(), head_stride, ..of_all },
        dlse: null(),
        dsink: null_mut(),
        dtype_grad: FMHA_F16,
        dtype_dbias: FMHA_F32,
    };
    let text = |gradients: &FmhaGradients| {
        plan(&FmhaCall { gradients: &raw const *gradients, ..forward }).map(|_| ()).map_err(|e| e.to_string())
    };
    assert_eq!(text(&with(0)), Ok(()));
    let said = text(&with(row * row)).unwrap_err();
    assert!(said.contains(&format!("dbias has head_stride {}, but bias has 0", row * row)), "{said}");
}

#[test]
fn gradients_planned_without_rows_take_lse_when_there_are_some() {
    let (q, k, v) = (numbers(1, ROWS), numbers(77, ROWS), numbers(300, ROWS));
    let (mut o, mut lse) = (vec![0u16; q.len()], vec![0f32; HEADS * ROWS]);
    let mut grads = vec![vec![0u16; q.len()]; 3];
    let (cu, none) = ([0, ROWS as i32], [0i32; 2]);
    let forward = FmhaCall { lse: lse.as_mut_ptr(), ..call(&q, &k, &v, &mut o, 1, &cu) };
    run_on_cpu(&forward);
    let tensors: Vec<FmhaTensor> =
        grads.iter_mut().map(|data| FmhaTensor { data: data.as_mut_ptr().cast(), ..forward.q }).collect();
    let gradients = FmhaGradients {
        struct_bytes: size_of::<FmhaGradients>() as u64,
        dout: forward.q,
        dq: tensors[0],
        dk: tensors[1],
        dv: tensors[2],
        dbias: NONE,
        dlse: null(),
        dsink: null_mut(),
        dtype_grad: FMHA_F16,
        dtype_dbias: 0,
    };
    let backward = FmhaCall { gradients: &raw const gradients, ..forward };
    let empty = FmhaCall { total_q: 0, cu_seqlens_q: none.as_ptr(), lse: null_mut(), ..backward };
    let plan = plan(&empty).unwrap();
    // SAFETY: every pointer of the call is memory of the test, as large as the call says.
    unsafe {
        plan.run(&empty).unwrap();
        plan.run(&backward).unwrap();
        let text = plan.run(&FmhaCall { lse: null_mut(), ..backward }).unwrap_err().to_string();
        assert!(text.contains("lse is null, but gradients are wanted of it"), "{text}");
    }
    assert!(grads[2].iter().any(|&bits| bits != 0));
}

#[test]
fn parts_of_no_rows_may_be_null() {
    let rows = FmhaTensor { data: null_mut(), ..call(&[], &[], &[], &mut [], 1, &[]).q };
    let parts = [FmhaPartial { o: rows, lse: null() }; 3];
    let combine = FmhaCombine {
        struct_bytes: size_of::<FmhaCombine>() as u64,
        num_parts: 3,
        batch: 1,
        seqlen_q: 0,
        num_heads_q: HEADS as i64,
        head_dim_v: DIM as i64,
        parts: parts.as_ptr(),
        o: rows,
        lse: null_mut(),
        stream: null_mut(),
        dtype_part: FMHA_F16,
        dtype_o: FMHA_F16,
        merge: FMHA_BY_LSE,
        reserved: 0,
    };
    // SAFETY: of 0 elements nothing is read or written.
    unsafe {
        let plan = FmhaPlan::combine(&cpu(), &combine, &Choice::default()).unwrap();
        plan.run_combine(&combine).unwrap();
        let of_none = FmhaCombine { batch: 0, seqlen_q: 1, ..combine };
        let plan = FmhaPlan::combine(&cpu(), &of_none, &Choice::default()).unwrap();
        let mut lse = 0f32;
        plan.run_combine(&FmhaCombine { lse: &raw mut lse, ..of_none }).unwrap();
        let text = FmhaPlan::combine(&cpu(), &FmhaCombine { seqlen_q: 1, ..combine }, &Choice::default());
        let text = text.map(|_| ()).unwrap_err().to_string();
        assert!(text.contains("parts[0].lse is null"), "{text}");
    }
}

#[test]
fn null_is_refused_by_name_and_null_plans_drop() {
    let mut plan = null_mut();
    // SAFETY: null is taken everywhere.
    unsafe {
        assert_ne!(fmha_plan(null(), null(), &raw mut plan), 0);
        assert!(last_error().starts_with("call is null"));
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
