//! Every field of the contract's problems can be set from C. The test reads calls that differ in one setting each;
//! every field in the problems' `Debug` text must have more than one value among these calls.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;

use crate::host::{self, AnyPass, Choice, Given};
use crate::tests::{new, with};
use crate::{
    FMHA_ADD_TO, FMHA_ALL_KEYS, FMHA_BF16, FMHA_BIAS_ALIBI, FMHA_BIAS_ALIBI_PER_BATCH, FMHA_BIAS_ELEMENTWISE,
    FMHA_DESCALE_PER_KV_HEAD, FMHA_DESCALE_PER_TENSOR, FMHA_E4M3FN, FMHA_E5M2, FMHA_EXACT, FMHA_F16,
    FMHA_F32, FMHA_LENGTH_PER_SEQUENCE, FMHA_LENGTH_PER_TOKEN, FMHA_MXFP8_E4M3, FMHA_NVFP4, FMHA_V_COL_MAJOR,
    FmhaBlockScales, FmhaCache, FmhaCaptured, FmhaChooseProblem, FmhaCode, FmhaCombineProblem, FmhaGradients,
    FmhaLists, FmhaMasks, FmhaOptions, FmhaPart, FmhaProblem, FmhaQuantizeProblem, FmhaSecond, FmhaStrides,
};

/// The fields of a value by their path, read from its `Debug` text, and the value of each.
fn fields(debug: &str) -> Vec<(String, String)> {
    let (mut path, mut found) = (Vec::<String>::new(), Vec::new());
    for line in debug.lines().map(str::trim) {
        // A function prints as its text between backquotes. Colons in that text do not end a field's name.
        let pair = if line.starts_with('`') { None } else { line.split_once(": ") };
        let (name, value) = pair.unwrap_or(("", line));
        if matches!(value, "}" | "}," | ")" | ")," | "]" | "],") {
            path.pop();
        } else if value.ends_with(['{', '(', '[']) {
            // If an enum field, such as a mask's shape, has another variant, the field has another value.
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

    /// Fields that had only one value. Of a struct, its own fields are checked instead.
    fn constant(&self) -> Vec<&str> {
        let consists = |value: &String| value.ends_with(['{', '(', '[']);
        let one = self.0.iter().filter(|(_, held)| held.len() < 2 && !held.iter().any(consists));
        one.map(|(path, _)| &**path).collect()
    }
}

fn strides(stride: i64) -> FmhaStrides {
    FmhaStrides {
        batch_stride: stride * 8,
        seqlen_stride: stride * 4,
        head_stride: stride * 2,
        dim_stride: stride,
    }
}

fn plain() -> FmhaProblem {
    let of = strides(1);
    with!(
        new!(FmhaProblem),
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

/// Problems that differ from the plain one in one or two settings each.
fn problems() -> Vec<FmhaProblem> {
    let base = plain();
    let biased = with!(base, bias = strides(1), bias_kind = FMHA_BIAS_ELEMENTWISE, dtype_bias = FMHA_F32);
    let (one, each) = (FMHA_DESCALE_PER_TENSOR, FMHA_DESCALE_PER_KV_HEAD);
    vec![
        base,
        with!(base, batch = 7, seqlen_q = 7, seqlen_k = 7, num_heads_q = 7, num_heads_kv = 7),
        with!(base, head_dim_qk = 7, head_dim_v = 7),
        with!(base, q = strides(2), k = strides(2), v = strides(2), o = strides(2)),
        with!(base, v_layout = FMHA_V_COL_MAJOR, packed_q = 1, packed_k = 1, seqused_q = 1, seqused_k = 1),
        with!(base, page_size = 16, seqused_k = 1),
        with!(base, page_size = 32, seqused_k = 1),
        with!(base, mask = c"t:1,2,3".as_ptr()),
        with!(base, mask = c"b:4,5".as_ptr()),
        with!(base, mask = c"g:6,7".as_ptr()),
        with!(base, mask = c"g:8,9".as_ptr()),
        with!(base, softmax_scale = &raw const HALF, softcap = &raw const HALF, p_drop = 0.5),
        with!(base, softmax_scale = &raw const QUARTER, softcap = &raw const QUARTER),
        biased,
        with!(biased, bias = with!(strides(3), batch_stride = 0), dtype_bias = FMHA_F16),
        with!(base, bias_kind = FMHA_BIAS_ALIBI, sink = 1),
        with!(base, bias_kind = FMHA_BIAS_ALIBI_PER_BATCH),
        with!(base, write_lse = 1, write_keep_mask = 1),
        with!(base, row_max = 1, head_max = 1, key_sum = 1),
        with!(base, dtype_qk = FMHA_E4M3FN, dtype_v = FMHA_BF16, dtype_o = FMHA_F32, scale_o = 1),
        with!(base, descale_q = each, descale_k = each, descale_v = each),
        with!(base, descale_q = one, descale_k = one, descale_v = one),
    ]
}

static HALF: f32 = 0.5;
static QUARTER: f32 = 0.25;

fn caches() -> Vec<FmhaCache> {
    let base = new!(FmhaCache);
    let new = with!(base, seqlen_new = 1, k_new = strides(1), v_new = strides(1));
    let turning = with!(new, max_pos = 9, rotary_dim = 4, dtype_rotary = FMHA_F16);
    vec![
        base,
        new,
        with!(new, seqlen_new = 2, k_new = strides(2), v_new = strides(2), packed_new = 1),
        turning,
        with!(turning, max_pos = 8, rotary_dim = 2, dtype_rotary = FMHA_F32, rotary_interleaved = 1),
        with!(base, tree_mask = 1, dtype_cache = FMHA_E4M3FN, v_in_k = 1),
        with!(base, dtype_cache = FMHA_E5M2),
        with!(base, cache_rows = 656),
        with!(base, cache_rows = 584),
        with!(base, dtype_cache = FMHA_E5M2, scale_block = 1, k_scale = strides(1), v_scale = strides(1)),
        with!(base, dtype_cache = FMHA_E5M2, scale_block = 16, k_scale = strides(2), v_scale = strides(2)),
    ]
}

fn lists() -> Vec<FmhaLists> {
    let base = with!(new!(FmhaLists), topk = 3);
    let other = with!(base, topk = 4, batch_stride = 24, seqlen_stride = 12, head_stride = 4);
    vec![
        base,
        with!(other, length = FMHA_LENGTH_PER_SEQUENCE, block = 16),
        with!(base, length = FMHA_LENGTH_PER_TOKEN, block = 32),
        with!(base, lse_without_sink = 1),
    ]
}

/// Second caches, whose lists and masks the caller owns.
fn seconds(lists: &[FmhaLists], masks: &[FmhaMasks]) -> Vec<FmhaSecond> {
    let base = with!(new!(FmhaSecond), seqlen_k = 3, k = strides(1), v = strides(1));
    let other = with!(base, seqlen_k = 4, k = strides(2), v = strides(2), seqused_k = 1);
    let packed = with!(other, packed_k = 1, lse_without_sink = 1);
    let paged = with!(base, page_size = 2);
    let of_four = with!(base, page_size = 4);
    let listed = lists.iter().map(|lists| with!(base, lists = lists));
    let seen = masks.iter().map(|masks| with!(base, masks = masks));
    [base, other, packed, paged, of_four].into_iter().chain(listed).chain(seen).collect()
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

/// The captures are a tensor of one axis, a tensor of two axes, and a number.
fn captured() -> [FmhaCaptured; 3] {
    // SAFETY: numbers and pointers, of which all bits may be 0.
    let none: FmhaCaptured = unsafe { std::mem::zeroed() };
    let slopes = with!(
        none,
        name = c"slopes".as_ptr(),
        shape = [4, 0, 0, 0, 0],
        strides = [1, 0, 0, 0, 0],
        num_dims = 1
    );
    let two = with!(slopes, name = c"ids".as_ptr(), shape = [2, 3, 0, 0, 0], strides = [3, 1, 0, 0, 0]);
    [slopes, with!(two, num_dims = 2), with!(none, name = c"cap".as_ptr())]
}

fn codes(captured: &[FmhaCaptured]) -> Vec<FmhaCode> {
    let base = with!(new!(FmhaCode), captured = captured.as_ptr(), num_captured = captured.len() as i64);
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

fn masks() -> Vec<FmhaMasks> {
    let base = new!(FmhaMasks);
    let of = |stride, n| {
        let at = strides(stride);
        let lists = with!(base, kv_num_blocks = at, kv_indices = at, max_blocks = n, partial = 1);
        let full = with!(lists, full_kv_num_blocks = at, full_kv_indices = at, full_max_blocks = n, full = 1);
        let all = with!(full, intervals = at, mask_bits = at, endpoints = n, intervals_heads = n);
        with!(all, mask_bits_heads = n, lists_heads = n, block_q = n, block_k = n)
    };
    let shared = of(0, 2);
    let one_list = with!(of(1, 1), kv_num_blocks = strides(0), full_kv_indices = strides(0));
    vec![base, shared, of(3, 4), with!(one_list, kv_indices = strides(2), full_kv_num_blocks = strides(2))]
}

fn block_scales() -> [FmhaBlockScales; 2] {
    let of = |stride, format| {
        let at = strides(stride);
        with!(new!(FmhaBlockScales), q = at, k = at, v = at, format = format)
    };
    [of(1, FMHA_MXFP8_E4M3), of(2, FMHA_NVFP4)]
}

fn gradients_of_captured() -> [(&'static CStr, [FmhaCaptured; 1]); 2] {
    let [slopes, ..] = captured();
    let slopes = with!(slopes, write_grad = 1, dtype_grad = FMHA_F32);
    let other = with!(slopes, name = c"by".as_ptr(), dtype_grad = FMHA_BF16);
    [(c"slopes: f32[_]; s + slopes[k]", [slopes]), (c"by: f32[_]; s + by[k]", [other])]
}

fn gradients() -> Vec<FmhaGradients> {
    let of = strides(1);
    let base = with!(new!(FmhaGradients), dtype_grad = FMHA_F16, dout = of, dq = of, dk = of, dv = of);
    let other = strides(2);
    vec![
        base,
        with!(base, dout = other, dq = other, dk = other, dv = other, dtype_grad = FMHA_F32),
        with!(base, has_dlse = 1, write_dsink = 1, write_dbias = 1, dbias = of, dtype_dbias = FMHA_F16),
        with!(base, write_dbias = 1, dbias = other, dtype_dbias = FMHA_F32),
    ]
}

#[test]
fn every_field_of_a_forward_and_of_a_backward_problem_can_be_set_from_c() {
    let mut seen = Seen::default();
    let mut add = |given: &FmhaProblem| {
        // SAFETY: host pointers are null, a static's or this function's.
        match unsafe { Given::read(given, host::mask(given).unwrap()) }.unwrap().problem {
            AnyPass::Forward(problem) => seen.add("forward", &problem),
            AnyPass::Backward(problem) => seen.add("backward", &problem),
        }
    };
    problems().iter().for_each(&mut add);
    let captured = captured();
    codes(&captured).iter().for_each(|code| add(&with!(plain(), code = code)));
    masks().iter().for_each(|masks| add(&with!(plain(), masks = masks)));
    block_scales().iter().for_each(|scales| add(&with!(plain(), block_scales = scales)));
    caches().iter().for_each(|cache| add(&with!(plain(), cache = cache)));
    lists().iter().for_each(|lists| add(&with!(plain(), lists = lists)));
    // Beside two caches, the call itself says whether its LSE includes the sink.
    let of_second: Vec<_> = lists().iter().map(|lists| with!(*lists, lse_without_sink = 0)).collect();
    let intervals: Vec<_> = masks()
        .into_iter()
        .map(|masks| with!(masks, mask_bits_heads = 0, lists_heads = 0, partial = 0, full = 0))
        .map(|masks| with!(masks, block_q = 0, block_k = 0, max_blocks = 0, full_max_blocks = 0))
        .collect();
    seconds(&of_second, &intervals).iter().for_each(|second| add(&with!(plain(), second = second)));
    parts().iter().for_each(|part| add(&with!(plain(), part = part)));
    let biased = with!(
        plain(),
        write_lse = 1,
        bias = strides(1),
        bias_kind = FMHA_BIAS_ELEMENTWISE,
        dtype_bias = FMHA_F32,
        sink = 1
    );
    for gradients in gradients() {
        let problem = with!(biased, gradients = &raw const gradients);
        add(&problem);
        for (score, captured) in gradients_of_captured() {
            let code = with!(codes(&captured)[1], score = score.as_ptr());
            add(&with!(problem, code = &raw const code));
        }
    }
    // The backward problem's forward part is read like any forward problem.
    seen.0.retain(|path, _| !path.starts_with("backward.fwd"));
    // Keys that arrive while a call runs belong to fmha-dist, whose own C calls describe them.
    seen.0.retain(|path, _| !path.ends_with(".arrivals"));
    // The contract asks that entries of a list lie side by side in memory, so this stride is constant.
    seen.0.retain(|path, _| !path.ends_with("lists..strides.dim"));
    // The call has this flag, not the lists of its second cache.
    seen.0.retain(|path, _| !path.ends_with("second..lists..lse_without_sink"));
    // Counts have no axis after that of the blocks, so this stride is constant.
    seen.0.retain(|path, _| !path.ends_with(".counts.dim"));
    let constant = seen.constant();
    assert!(constant.is_empty(), "not set from C, or not tried here: {constant:#?}");
    assert!(seen.0.len() > 60, "{:#?}", seen.0.keys());
}

#[test]
fn every_field_of_a_combine_problem_and_of_the_options_can_be_set_from_c() {
    let mut seen = Seen::default();
    let base = with!(
        new!(FmhaCombineProblem),
        num_parts = 1,
        batch = 1,
        seqlen_q = 1,
        num_heads_q = 1,
        head_dim_v = 1,
        part = strides(1),
        o = strides(1)
    );
    let changed = with!(
        base,
        num_parts = 2,
        batch = 2,
        seqlen_q = 2,
        num_heads_q = 2,
        head_dim_v = 2,
        part = strides(2),
        o = strides(2),
        write_lse = 1,
        dtype_part = FMHA_F32,
        dtype_o = FMHA_F32,
        merge = FMHA_ADD_TO
    );
    seen.add("combine", &host::combine(&base).unwrap());
    seen.add("combine", &host::combine(&changed).unwrap());

    let base = new!(FmhaOptions);
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

#[test]
fn every_field_of_a_choice_can_be_set_from_c() {
    let base = with!(
        new!(FmhaChooseProblem),
        batch = 1,
        seqlen_q = 1,
        seqlen_k = 1,
        topk = 1,
        num_heads = 1,
        head_dim = 1
    );
    let given = with!(base, num_heads = 0, head_dim = 0);
    let other = with!(
        base,
        batch = 2,
        seqlen_q = 2,
        seqlen_k = 2,
        topk = 2,
        num_heads = 2,
        head_dim = 2,
        k_outer_stride = 9,
        k_key_stride = 7,
        k_scale = 1,
        scale_outer_stride = 9,
        scale_key_stride = 7,
        dtype_q = FMHA_F32,
        dtype_k = FMHA_F32
    );
    let paged = with!(base, page_size = 2, num_pages = 2, max_pages = 2, seqused_k = 1, write_scores = 1);
    let blocks = with!(base, block = 1, first_blocks = 1, last_blocks = 1);
    let sums = with!(given, compressed = 2, stride = 1, selected = 2, num_blocks = 3);
    let mut seen = Seen::default();
    for problem in [
        given,
        other,
        paged,
        with!(paged, page_size = 4, num_pages = 4, max_pages = 4),
        blocks,
        with!(blocks, block = 2, first_blocks = 2, last_blocks = 2),
        with!(sums, candidates = FMHA_ALL_KEYS),
        with!(sums, compressed = 4, stride = 2, selected = 4, num_blocks = 5),
    ] {
        seen.add("choose", &crate::choose::problem(&problem).unwrap());
    }
    let constant = seen.constant();
    assert!(constant.is_empty(), "not set from C, or not tried here: {constant:#?}");
    assert!(seen.0.len() > 20, "{:#?}", seen.0.keys());
}

/// Four equal strides.
fn of(n: i64) -> FmhaStrides {
    FmhaStrides { batch_stride: n, seqlen_stride: n, head_stride: n, dim_stride: n }
}

/// The least conversion.
fn conversion() -> FmhaQuantizeProblem {
    with!(
        new!(FmhaQuantizeProblem),
        batch = 1,
        seqlen = 1,
        num_heads = 1,
        dim = 1,
        x = of(1),
        elements = of(1),
        scales = of(1),
        dtype = FMHA_F32,
        format = FMHA_NVFP4
    )
}

#[test]
fn every_field_of_a_conversion_can_be_set_from_c() {
    let base = conversion();
    let other = with!(
        base,
        batch = 2,
        seqlen = 2,
        num_heads = 2,
        dim = 2,
        x = of(2),
        elements = of(2),
        scales = of(2),
        dtype = FMHA_BF16,
        format = FMHA_MXFP8_E4M3,
        blocks_of_rows = 1,
        pairs_of_rows = 1,
        scale_of_tensor = crate::FMHA_SCALE_GIVEN
    );
    let mut seen = Seen::default();
    for problem in [base, other] {
        seen.add("quantize", &crate::quantize::problem(&problem).unwrap());
    }
    let constant = seen.constant();
    assert!(constant.is_empty(), "not set from C, or not tried here: {constant:#?}");
    assert!(seen.0.len() > 15, "{:#?}", seen.0.keys());
}

#[test]
fn an_error_about_a_conversion_names_the_field_of_c() {
    let base = conversion();
    let too_many = i64::from(u32::MAX);
    for (given, starts) in [
        (with!(base, batch = too_many), "batch 4294967295 is larger"),
        (with!(base, seqlen = too_many), "seqlen 4294967295 is larger"),
        (with!(base, num_heads = too_many), "num_heads 4294967295 is larger"),
        (with!(base, dim = too_many), "dim 4294967295 is not in"),
        (with!(base, pairs_of_rows = 1), "pairs_of_rows 1 beside axis Dim"),
        (
            with!(base, format = FMHA_MXFP8_E4M3, scale_of_tensor = crate::FMHA_SCALE_WRITTEN),
            "scale_of_tensor 2 beside format mxfp8_e4m3",
        ),
    ] {
        let error = crate::quantize::problem(&given).unwrap().validate().unwrap_err();
        let error = crate::quantize::in_c(error, &given);
        assert!(error.text.starts_with(starts), "{error}");
        assert!(starts.starts_with(error.field), "{error:?}");
    }
}
