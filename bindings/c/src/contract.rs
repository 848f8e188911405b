//! Every field of the contract's problems can be set from C: calls that differ in one thing each are read,
//! and each field that the problems' own debug text names has more than one value among them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::ptr::null;

use crate::host::{self, Choice, Pointed};
use crate::{
    FMHA_ADD_TO, FMHA_BF16, FMHA_E4M3FN, FMHA_E5M2, FMHA_EXACT, FMHA_F16, FMHA_F32, FMHA_MXFP8_E4M3,
    FMHA_NVFP4, FMHA_V_COL_MAJOR, FmhaBlockScales, FmhaCache, FmhaCall, FmhaCaptured, FmhaCode, FmhaCombine,
    FmhaGradients, FmhaLists, FmhaMasks, FmhaOptions, FmhaPart, FmhaPartial, FmhaTensor,
};

/// The fields of a value by their path, from the text that `Debug` gives of it, and what each holds.
fn fields(debug: &str) -> Vec<(String, String)> {
    let (mut path, mut found) = (Vec::<String>::new(), Vec::new());
    for line in debug.lines().map(str::trim) {
        // A function prints as its text between backquotes, whose colons separate captures and not fields.
        let pair = if line.starts_with('`') { None } else { line.split_once(": ") };
        let (name, value) = pair.unwrap_or(("", line));
        if matches!(value, "}" | "}," | ")" | ")," | "]" | "],") {
            path.pop();
        } else if value.ends_with(['{', '(', '[']) {
            // Another variant of an enum, such as a mask's shape, is another value of its field.
            found.push((path.join(".") + "." + name, value.to_owned()));
            path.push(name.to_owned());
        } else {
            found.push((path.join(".") + "." + name, value.to_owned()));
        }
    }
    found
}

/// Values that each field had over all calls.
#[derive(Default)]
struct Seen(BTreeMap<String, BTreeSet<String>>);

impl Seen {
    fn add(&mut self, what: &str, value: &dyn std::fmt::Debug) {
        for (path, held) in fields(&format!("{value:#?}")) {
            self.0.entry(format!("{what}{path}")).or_default().insert(held);
        }
    }

    /// Fields that held one value alone. Of a struct those are asked for that it consists of.
    fn constant(&self) -> Vec<&str> {
        let consists = |value: &String| value.ends_with(['{', '(', '[']);
        let one = self.0.iter().filter(|(_, held)| held.len() < 2 && !held.iter().any(consists));
        one.map(|(path, _)| &**path).collect()
    }
}

// SAFETY: numbers and pointers, of which all bits may be 0: what `fmha.h` asks its caller to begin with.
const NO_CALL: FmhaCall = unsafe { std::mem::zeroed() };
// SAFETY: numbers and pointers, of which all bits may be 0: what `fmha.h` asks its caller to begin with.
const NO_CACHE: FmhaCache = unsafe { std::mem::zeroed() };
// SAFETY: numbers and pointers, of which all bits may be 0: what `fmha.h` asks its caller to begin with.
const NO_GRADIENTS: FmhaGradients = unsafe { std::mem::zeroed() };
// SAFETY: numbers and pointers, of which all bits may be 0: what `fmha.h` asks its caller to begin with.
const NO_COMBINE: FmhaCombine = unsafe { std::mem::zeroed() };
// SAFETY: numbers and pointers, of which all bits may be 0: what `fmha.h` asks its caller to begin with.
const NO_OPTIONS: FmhaOptions = unsafe { std::mem::zeroed() };

/// Given, and never followed: a problem says whether a tensor is there, not what it holds.
fn there<T>() -> *mut T {
    std::ptr::without_provenance_mut(256)
}

fn tensor(stride: i64) -> FmhaTensor {
    FmhaTensor {
        data: there(),
        batch_stride: stride * 8,
        seqlen_stride: stride * 4,
        head_stride: stride * 2,
        dim_stride: stride,
    }
}

/// A struct with some fields changed.
macro_rules! with {
    ($base:expr, $($($field:ident).+ = $value:expr),+) => {{
        let mut changed = $base;
        $(changed.$($field).+ = $value;)+
        changed
    }};
}

fn plain() -> FmhaCall {
    let of = tensor(1);
    with!(
        NO_CALL,
        struct_bytes = size_of::<FmhaCall>() as u64,
        batch = 1,
        seqlen_q = 2,
        seqlen_k = 3,
        num_heads_q = 4,
        num_heads_kv = 2,
        head_dim_qk = 8,
        head_dim_v = 16,
        q = of,
        k = of,
        v = of,
        o = of,
        dtype_qk = FMHA_F16,
        dtype_v = FMHA_F16,
        dtype_o = FMHA_F16
    )
}

/// Calls that differ from the plain one in a thing or two each.
fn calls() -> Vec<FmhaCall> {
    let base = plain();
    let bias = tensor(1);
    vec![
        base,
        with!(base, batch = 7, seqlen_q = 7, seqlen_k = 7, num_heads_q = 7, num_heads_kv = 7),
        with!(base, head_dim_qk = 7, head_dim_v = 7),
        with!(base, q = tensor(2), k = tensor(2), v = tensor(2), o = tensor(2), v_layout = FMHA_V_COL_MAJOR),
        with!(base, cu_seqlens_q = there(), cu_seqlens_k = there(), seqused_q = there(), seqused_k = there()),
        with!(base, page_size = 16, num_pages = 4, max_pages = 2, block_table = there(), seqused_k = there()),
        with!(base, page_size = 32, num_pages = 4, max_pages = 2, block_table = there(), seqused_k = there()),
        with!(base, mask = c"t:1,2,3".as_ptr()),
        with!(base, mask = c"b:4,5".as_ptr()),
        with!(base, mask = c"g:6,7".as_ptr()),
        with!(base, mask = c"g:8,9".as_ptr()),
        with!(base, softmax_scale = &raw const HALF, softcap = &raw const HALF, p_drop = 0.5),
        with!(base, softmax_scale = &raw const QUARTER, softcap = &raw const QUARTER),
        with!(base, bias = bias, dtype_bias = FMHA_F32),
        with!(base, bias = with!(tensor(3), batch_stride = 0), dtype_bias = FMHA_F16),
        with!(base, alibi_slopes = there(), sink = there()),
        with!(base, alibi_slopes = there(), alibi_per_batch = 1),
        with!(base, lse = there(), keep_mask = there()),
        with!(base, row_max = there(), head_max = there(), key_sum = there()),
        with!(
            base,
            dtype_qk = FMHA_E4M3FN,
            dtype_v = FMHA_BF16,
            dtype_o = FMHA_F32,
            descale_q = there(),
            descale_k = there(),
            descale_v = there(),
            scale_o = there()
        ),
        with!(base, descale_q = there(), descale_k = there(), descale_v = there(), descale_per_tensor = 1),
    ]
}

static HALF: f32 = 0.5;
static QUARTER: f32 = 0.25;

fn caches() -> Vec<FmhaCache> {
    let base = with!(NO_CACHE, struct_bytes = size_of::<FmhaCache>() as u64);
    let new = with!(base, seqlen_new = 1, k_new = tensor(1), v_new = tensor(1));
    let turning = with!(
        new,
        max_pos = 9,
        rotary_cos = there(),
        rotary_sin = there(),
        rotary_dim = 4,
        dtype_rotary = FMHA_F16
    );
    vec![
        base,
        new,
        with!(new, seqlen_new = 2, k_new = tensor(2), v_new = tensor(2), cu_seqlens_new = there()),
        turning,
        with!(turning, max_pos = 8, rotary_dim = 2, dtype_rotary = FMHA_F32, rotary_interleaved = 1),
        with!(base, tree_mask = there(), dtype_cache = FMHA_E4M3FN, v_in_k = 1),
        with!(base, dtype_cache = FMHA_E5M2),
    ]
}

// SAFETY: numbers and pointers, of which all bits may be 0.
const NO_LISTS: FmhaLists = unsafe { std::mem::zeroed() };

fn lists() -> Vec<FmhaLists> {
    let base = with!(NO_LISTS, struct_bytes = size_of::<FmhaLists>() as u64, topk = 3, indices = there());
    let other = with!(base, topk = 4, batch_stride = 24, seqlen_stride = 12, head_stride = 4);
    vec![
        base,
        with!(other, topk_length = there(), block = 16),
        with!(base, topk_length = there(), length_per_token = 1, block = 32),
        with!(base, lse_without_sink = 1),
    ]
}

fn parts() -> [FmhaPart; 2] {
    let struct_bytes = size_of::<FmhaPart>() as u64;
    let of = |n| FmhaPart {
        struct_bytes,
        position_q: n,
        position_k: n,
        seqlen_q: n,
        seqlen_k: n,
        batch: n,
        head: n,
        num_heads_q: n,
    };
    [of(1), of(2)]
}

// SAFETY: numbers and pointers, of which all bits may be 0.
const NO_CAPTURE: FmhaCaptured = unsafe { std::mem::zeroed() };
// SAFETY: numbers and pointers, of which all bits may be 0.
const NO_CODE: FmhaCode = unsafe { std::mem::zeroed() };

/// A tensor of one axis, one of none, and a number.
fn captured() -> [FmhaCaptured; 3] {
    let slopes = with!(
        NO_CAPTURE,
        name = c"slopes".as_ptr(),
        data = there(),
        shape = [4, 0, 0, 0, 0],
        strides = [1, 0, 0, 0, 0],
        num_dims = 1
    );
    let two = with!(slopes, name = c"ids".as_ptr(), shape = [2, 3, 0, 0, 0], strides = [3, 1, 0, 0, 0]);
    [slopes, with!(two, num_dims = 2), with!(NO_CAPTURE, name = c"cap".as_ptr(), real = 2.0)]
}

fn codes(captured: &[FmhaCaptured]) -> Vec<FmhaCode> {
    let base = with!(
        NO_CODE,
        struct_bytes = size_of::<FmhaCode>() as u64,
        captured = captured.as_ptr(),
        num_captured = captured.len() as i64
    );
    vec![
        with!(
            base,
            score = c"slopes: f32[_]; cap: float; s + cap * slopes[h]".as_ptr(),
            mask = c"ids: i32[_, _]; ids[b, q] == ids[b, k]".as_ptr()
        ),
        with!(base, score = c"slopes: f32[_]; s + slopes[k]".as_ptr(), num_captured = 1),
        with!(base, mask = c"slopes: bool[_]; slopes[k] and q < k".as_ptr(), num_captured = 1),
    ]
}

// SAFETY: numbers and pointers, of which all bits may be 0.
const NO_MASKS: FmhaMasks = unsafe { std::mem::zeroed() };

fn masks() -> Vec<FmhaMasks> {
    let base = with!(NO_MASKS, struct_bytes = size_of::<FmhaMasks>() as u64);
    let of = |stride, n| {
        let at = tensor(stride);
        let lists = with!(base, kv_num_blocks = at, kv_indices = at, max_blocks = n);
        let full = with!(lists, full_kv_num_blocks = at, full_kv_indices = at, full_max_blocks = n);
        let all = with!(full, intervals = at, mask_bits = at, endpoints = n, intervals_heads = n);
        with!(all, mask_bits_heads = n, lists_heads = n, block_q = n, block_k = n)
    };
    let shared = of(0, 2);
    let one_list = with!(of(1, 1), kv_num_blocks = tensor(0), full_kv_indices = tensor(0));
    vec![base, shared, of(3, 4), with!(one_list, kv_indices = tensor(2), full_kv_num_blocks = tensor(2))]
}

// SAFETY: numbers and pointers, of which all bits may be 0.
const NO_SCALES: FmhaBlockScales = unsafe { std::mem::zeroed() };

fn block_scales() -> [FmhaBlockScales; 2] {
    let base = with!(NO_SCALES, struct_bytes = size_of::<FmhaBlockScales>() as u64);
    let of = |stride, format| {
        with!(base, q = tensor(stride), k = tensor(stride), v = tensor(stride), format = format)
    };
    [of(1, FMHA_MXFP8_E4M3), of(2, FMHA_NVFP4)]
}

fn gradients_of_captured() -> [(&'static CStr, [FmhaCaptured; 1]); 2] {
    let [slopes, ..] = captured();
    let slopes = with!(slopes, grad = there(), dtype_grad = FMHA_F32);
    let other = with!(slopes, name = c"by".as_ptr(), dtype_grad = FMHA_BF16);
    [(c"slopes: f32[_]; s + slopes[k]", [slopes]), (c"by: f32[_]; s + by[k]", [other])]
}

fn gradients() -> Vec<FmhaGradients> {
    let of = tensor(1);
    let base = with!(
        NO_GRADIENTS,
        struct_bytes = size_of::<FmhaGradients>() as u64,
        dtype_grad = FMHA_F16,
        dout = of,
        dq = of,
        dk = of,
        dv = of
    );
    let other = tensor(2);
    vec![
        base,
        with!(base, dout = other, dq = other, dk = other, dv = other, dtype_grad = FMHA_F32),
        with!(base, dlse = there(), dsink = there(), dbias = of, dtype_dbias = FMHA_F16),
        with!(base, dbias = other, dtype_dbias = FMHA_F32),
    ]
}

#[test]
fn every_field_of_a_forward_and_of_a_backward_problem_can_be_set_from_c() {
    let mut seen = Seen::default();
    let mut forward = |call: &FmhaCall| {
        // SAFETY: host pointers are null or a static's; the others are not followed.
        let pointed = unsafe { Pointed::read(call).unwrap() };
        seen.add("forward", &pointed.forward(call).unwrap());
    };
    calls().iter().for_each(&mut forward);
    let captured = captured();
    codes(&captured).iter().for_each(|code| forward(&with!(plain(), code = code)));
    masks().iter().for_each(|masks| forward(&with!(plain(), masks = masks)));
    block_scales().iter().for_each(|scales| forward(&with!(plain(), block_scales = scales)));
    caches().iter().for_each(|cache| forward(&with!(plain(), cache = cache)));
    lists().iter().for_each(|lists| forward(&with!(plain(), lists = lists)));
    parts().iter().for_each(|part| forward(&with!(plain(), part = part)));
    let with_bias = with!(plain(), lse = there(), bias = tensor(1), dtype_bias = FMHA_F32, sink = there());
    for gradients in gradients() {
        let call = with!(with_bias, gradients = &raw const gradients);
        // SAFETY: host pointers are null or a static's; the others are not followed.
        let problem = unsafe { Pointed::read(&call).unwrap() }.backward(&call, &gradients).unwrap();
        seen.add("backward", &problem);
        for (score, captured) in gradients_of_captured() {
            let code = with!(codes(&captured)[1], score = score.as_ptr());
            let call = with!(call, code = &raw const code);
            // SAFETY: host pointers are null or a static's; the others are not followed.
            let problem = unsafe { Pointed::read(&call).unwrap() }.backward(&call, &gradients).unwrap();
            seen.add("backward", &problem);
        }
    }
    // The backward problem's forward part is read like any forward problem.
    seen.0.retain(|path, _| !path.starts_with("backward.fwd"));
    // Keys that come while a call runs are fmha-dist's, whose C calls say whose they are.
    seen.0.retain(|path, _| !path.ends_with(".arrivals"));
    // Entries of a list lie side by side, as the contract has it.
    seen.0.retain(|path, _| path != "forward.lists..strides.dim");
    // Counts have no axis behind that of the blocks.
    seen.0.retain(|path, _| !path.ends_with(".counts.dim"));
    let constant = seen.constant();
    assert!(constant.is_empty(), "not set from C, or not tried here: {constant:#?}");
    assert!(seen.0.len() > 60, "{:#?}", seen.0.keys());
}

#[test]
fn every_field_of_a_combine_problem_and_of_the_options_can_be_set_from_c() {
    let mut seen = Seen::default();
    let part = FmhaPartial { o: tensor(1), lse: null() };
    let base = with!(
        NO_COMBINE,
        struct_bytes = size_of::<FmhaCombine>() as u64,
        num_parts = 1,
        batch = 1,
        seqlen_q = 1,
        num_heads_q = 1,
        head_dim_v = 1,
        o = tensor(1)
    );
    let other = FmhaPartial { o: tensor(2), lse: null() };
    let changed = with!(
        base,
        num_parts = 2,
        batch = 2,
        seqlen_q = 2,
        num_heads_q = 2,
        head_dim_v = 2,
        o = tensor(2),
        lse = there(),
        dtype_part = FMHA_F32,
        dtype_o = FMHA_F32,
        merge = FMHA_ADD_TO
    );
    seen.add("combine", &host::combine(&base, &part).unwrap());
    seen.add("combine", &host::combine(&changed, &other).unwrap());

    let base = with!(NO_OPTIONS, struct_bytes = size_of::<FmhaOptions>() as u64);
    let changed = with!(
        base,
        kernel = c"simt".as_ptr(),
        tile = c"block_m=1".as_ptr(),
        allow_fallback = 1,
        accuracy = FMHA_EXACT,
        deterministic = 1,
        batch_invariant = 1,
        row_invariant = 1,
        check_lengths = 1
    );
    for options in [base, changed, with!(changed, kernel = c"none".as_ptr())] {
        // SAFETY: its strings are null or C strings.
        seen.add("options", &unsafe { Choice::read(&raw const options).unwrap() }.plan);
    }
    // The tile's fields are left out: only one tile is tried.
    seen.0.retain(|path, _| !path.starts_with("options.tile."));
    let constant = seen.constant();
    assert!(constant.is_empty(), "not set from C, or not tried here: {constant:#?}");
    assert!(seen.0.len() > 20, "{:#?}", seen.0.keys());
}
