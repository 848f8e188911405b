//! Faulty structs of the C library.

use std::ffi::c_void;

use fmha_c::{FmhaArgs, FmhaCache, FmhaGradients, FmhaProblem};

use super::super::{c, cases};
use super::{Tried, Wrong};

/// A C problem, with the structs that it points to.
#[derive(Clone)]
struct CProblem {
    problem: FmhaProblem,
    cache: Option<FmhaCache>,
    gradients: Option<FmhaGradients>,
}

/// Problems with one wrong field each, in C's own form of some of the contract's fields.
fn wrong_problems(sound: &CProblem) -> Vec<Wrong<CProblem>> {
    static NAN: f32 = f32::NAN;
    static NEGATIVE: f32 = -1.0;
    let mut all: Vec<Wrong<CProblem>> = Vec::new();
    let mut wrong = |applies: bool, field, change: &dyn Fn(&mut CProblem)| {
        if applies {
            let mut other = sound.clone();
            change(&mut other);
            all.push((field, other));
        }
    };
    let problem = sound.problem;
    let has_two = |size: i64| size > 1;
    wrong(true, "struct_bytes", &|of| of.problem.struct_bytes = 8);
    for number in [-1, 1 << 32, i64::MIN, i64::MAX] {
        wrong(true, "batch", &|of| of.problem.batch = number);
        wrong(true, "seqlen_q", &|of| of.problem.seqlen_q = number);
        wrong(true, "seqlen_k", &|of| of.problem.seqlen_k = number);
        wrong(true, "num_heads_q", &|of| of.problem.num_heads_q = number);
        wrong(true, "num_heads_kv", &|of| of.problem.num_heads_kv = number);
        wrong(true, "head_dim_qk", &|of| of.problem.head_dim_qk = number);
        wrong(true, "head_dim_v", &|of| of.problem.head_dim_v = number);
        wrong(true, "page_size", &|of| of.problem.page_size = number);
    }
    wrong(true, "num_heads_q", &|of| of.problem.num_heads_q = 0);
    wrong(true, "num_heads_kv", &|of| of.problem.num_heads_kv = 0);
    wrong(true, "head_dim_qk", &|of| of.problem.head_dim_qk = 0);
    wrong(true, "head_dim_v", &|of| of.problem.head_dim_v = 1025);
    wrong(has_two(problem.head_dim_qk), "q", &|of| of.problem.q.dim_stride = 2);
    wrong(has_two(problem.num_heads_q), "q", &|of| of.problem.q.head_stride = -1);
    wrong(has_two(problem.head_dim_qk), "k", &|of| of.problem.k.dim_stride = i64::MAX);
    wrong(has_two(problem.num_heads_kv), "v", &|of| of.problem.v.head_stride = i64::MIN);
    wrong(has_two(problem.num_heads_q), "o", &|of| of.problem.o.head_stride = 0);
    for text in [c"b:1", c"x", c"", c"t:1,2,3,4", c"g:99999999999,0", c"\xff"] {
        wrong(true, "mask", &|of| of.problem.mask = text.as_ptr());
    }
    wrong(true, "softmax_scale", &|of| of.problem.softmax_scale = &raw const NAN);
    wrong(true, "softcap", &|of| of.problem.softcap = &raw const NEGATIVE);
    wrong(true, "softcap", &|of| of.problem.softcap = &raw const NAN);
    for number in [f32::NAN, 1.0, -0.5] {
        wrong(true, "p_drop", &|of| of.problem.p_drop = number);
    }
    for code in [-1, 7, i32::MIN, i32::MAX] {
        wrong(true, "dtype_qk", &|of| of.problem.dtype_qk = code);
        wrong(true, "dtype_v", &|of| of.problem.dtype_v = code);
        wrong(true, "dtype_o", &|of| of.problem.dtype_o = code);
        wrong(true, "dtype_bias", &|of| of.problem.dtype_bias = code);
        wrong(true, "v_layout", &|of| of.problem.v_layout = code);
        wrong(true, "bias_kind", &|of| of.problem.bias_kind = code);
        wrong(true, "packed_q", &|of| of.problem.packed_q = code);
        wrong(true, "packed_k", &|of| of.problem.packed_k = code);
        wrong(true, "seqused_q", &|of| of.problem.seqused_q = code);
        wrong(true, "seqused_k", &|of| of.problem.seqused_k = code);
        wrong(true, "sink", &|of| of.problem.sink = code);
        wrong(true, "descale_q", &|of| of.problem.descale_q = code);
        wrong(true, "descale_k", &|of| of.problem.descale_k = code);
        wrong(true, "descale_v", &|of| of.problem.descale_v = code);
        wrong(true, "scale_o", &|of| of.problem.scale_o = code);
        wrong(true, "write_lse", &|of| of.problem.write_lse = code);
        wrong(true, "write_keep_mask", &|of| of.problem.write_keep_mask = code);
        wrong(true, "row_max", &|of| of.problem.row_max = code);
        wrong(true, "head_max", &|of| of.problem.head_max = code);
        wrong(true, "key_sum", &|of| of.problem.key_sum = code);
        wrong(true, "reserved", &|of| of.problem.reserved = code);
    }
    wrong(problem.page_size > 0, "packed_k", &|of| of.problem.packed_k = 1);
    fn cache(of: &mut CProblem) -> &mut FmhaCache {
        of.cache.as_mut().unwrap()
    }
    if let Some(given) = sound.cache {
        wrong(true, "struct_bytes", &|of| cache(of).struct_bytes = 0);
        for number in [-1, 1 << 32, i64::MIN] {
            wrong(true, "seqlen_new", &|of| cache(of).seqlen_new = number);
            wrong(true, "max_pos", &|of| cache(of).max_pos = number);
        }
        for code in [-1, 9, i32::MAX] {
            wrong(true, "rotary_interleaved", &|of| cache(of).rotary_interleaved = code);
            wrong(true, "dtype_rotary", &|of| cache(of).dtype_rotary = code);
            wrong(true, "dtype_cache", &|of| cache(of).dtype_cache = code);
            wrong(true, "v_in_k", &|of| cache(of).v_in_k = code);
            wrong(true, "packed_new", &|of| cache(of).packed_new = code);
            wrong(true, "tree_mask", &|of| cache(of).tree_mask = code);
            wrong(true, "cache_rows", &|of| cache(of).cache_rows = code);
        }
        wrong(given.rotary_dim > 0, "rotary_dim", &|of| cache(of).rotary_dim = 3);
        wrong(true, "rotary_dim", &|of| cache(of).rotary_dim = -2);
        wrong(given.rotary_dim > 0, "max_pos", &|of| cache(of).max_pos = 0);
        let has_new = given.seqlen_new > 0 && has_two(problem.head_dim_qk);
        wrong(has_new, "k_new", &|of| cache(of).k_new.dim_stride = 2);
        wrong(given.packed_new != 0, "packed_new", &|of| cache(of).seqlen_new = 0);
    }
    fn gradients(of: &mut CProblem) -> &mut FmhaGradients {
        of.gradients.as_mut().unwrap()
    }
    if let Some(given) = sound.gradients {
        wrong(true, "struct_bytes", &|of| gradients(of).struct_bytes = 1);
        for code in [-1, 7, 2] {
            wrong(true, "dtype_grad", &|of| gradients(of).dtype_grad = code);
        }
        wrong(true, "dbias", &|of| gradients(of).dtype_dbias = 9);
        wrong(has_two(problem.head_dim_v), "dout", &|of| gradients(of).dout.dim_stride = 2);
        wrong(has_two(problem.head_dim_qk), "dq", &|of| gradients(of).dq.dim_stride = 2);
        wrong(has_two(problem.num_heads_kv), "dk", &|of| gradients(of).dk.head_stride = 0);
        wrong(has_two(problem.num_heads_kv), "dv", &|of| gradients(of).dv.head_stride = -1);
        wrong(problem.sink == 0, "dsink", &|of| gradients(of).write_dsink = 1);
        for code in [-1, 2] {
            wrong(true, "write_dbias", &|of| gradients(of).write_dbias = code);
            wrong(true, "write_dsink", &|of| gradients(of).write_dsink = code);
            wrong(true, "has_dlse", &|of| gradients(of).has_dlse = code);
            wrong(true, "reserved", &|of| gradients(of).reserved = code);
        }
        wrong(problem.bias_kind == 0, "dbias", &|of| {
            (gradients(of).write_dbias, gradients(of).dbias) = (1, given.dq);
        });
    }
    all
}

/// Wrong arguments for a run of a valid plan.
fn wrong_args(sound: &CProblem, args: &FmhaArgs) -> Vec<Wrong<FmhaArgs>> {
    let mut all: Vec<Wrong<FmhaArgs>> = Vec::new();
    let mut wrong = |applies: bool, field, change: &dyn Fn(&mut FmhaArgs)| {
        if applies {
            let mut other = *args;
            change(&mut other);
            all.push((field, other));
        }
    };
    let (null, somewhere): (_, *mut c_void) = (std::ptr::null_mut(), std::ptr::without_provenance_mut(256));
    let problem = sound.problem;
    let queries = if problem.packed_q == 0 { problem.batch * problem.seqlen_q } else { args.total_q };
    let keys = match (problem.page_size, problem.packed_k) {
        (0, 0) => problem.batch * problem.seqlen_k,
        (0, _) => args.total_k,
        _ => args.num_pages,
    };
    wrong(true, "struct_bytes", &|of| of.struct_bytes = 8);
    for number in [-1, 1 << 32, i64::MIN, i64::MAX] {
        wrong(true, "total_q", &|of| of.total_q = number);
        wrong(true, "total_k", &|of| of.total_k = number);
        wrong(true, "total_new", &|of| of.total_new = number);
        wrong(true, "num_pages", &|of| of.num_pages = number);
        wrong(true, "max_pages", &|of| of.max_pages = number);
    }
    for code in [-1, 7, i32::MIN, i32::MAX] {
        wrong(true, "dropout_seeded", &|of| of.dropout_seeded = code);
        wrong(true, "reserved", &|of| of.reserved = code);
    }
    wrong(problem.packed_q == 0, "total_q", &|of| of.total_q = 4);
    wrong(problem.packed_k == 0, "total_k", &|of| of.total_k = 4);
    wrong(problem.page_size == 0, "num_pages", &|of| of.num_pages = 4);
    wrong(problem.page_size == 0, "max_pages", &|of| of.max_pages = 4);
    wrong(queries > 0, "q", &|of| of.q = null);
    wrong(keys > 0, "k", &|of| of.k = null);
    let cache = sound.cache;
    let v_in_k = cache.is_some_and(|cache| cache.v_in_k != 0);
    wrong(keys > 0 && !v_in_k, "v", &|of| of.v = null);
    wrong(v_in_k, "v", &|of| of.v = of.k);
    wrong(queries > 0, "o", &|of| of.o = null);
    wrong(!args.lse.is_null() && queries > 0, "lse", &|of| of.lse = null.cast());
    wrong(problem.packed_q != 0, "cu_seqlens_q", &|of| of.cu_seqlens_q = null.cast());
    wrong(problem.packed_q == 0, "cu_seqlens_q", &|of| of.cu_seqlens_q = somewhere.cast());
    wrong(problem.packed_k != 0, "cu_seqlens_k", &|of| of.cu_seqlens_k = null.cast());
    wrong(problem.packed_k == 0, "cu_seqlens_k", &|of| of.cu_seqlens_k = somewhere.cast());
    wrong(problem.seqused_k != 0 && problem.batch > 0, "seqused_k", &|of| of.seqused_k = null.cast());
    wrong(problem.seqused_k == 0, "seqused_k", &|of| of.seqused_k = somewhere.cast());
    wrong(problem.sink != 0, "sink", &|of| of.sink = null.cast());
    wrong(problem.sink == 0, "sink", &|of| of.sink = somewhere.cast());
    let pages = problem.batch * args.max_pages > 0;
    wrong(pages, "block_table", &|of| of.block_table = null.cast());
    wrong(problem.page_size == 0, "block_table", &|of| of.block_table = somewhere.cast());
    wrong(problem.bias_kind == 2, "alibi_slopes", &|of| of.alibi_slopes = null.cast());
    wrong(problem.bias_kind < 2, "alibi_slopes", &|of| of.alibi_slopes = somewhere.cast());
    wrong(problem.bias_kind != 1, "bias", &|of| of.bias = somewhere);
    let turns = cache.is_some_and(|cache| cache.rotary_dim > 0 && cache.max_pos > 0);
    wrong(turns, "rotary_cos", &|of| of.rotary_cos = null);
    wrong(turns, "rotary_sin", &|of| of.rotary_sin = null);
    wrong(cache.is_none(), "rotary_cos", &|of| of.rotary_cos = somewhere);
    wrong(cache.is_none(), "k_new", &|of| of.k_new = somewhere);
    wrong(true, "workspace", &|of| of.workspace_bytes = 8);
    wrong(true, "workspace", &|of| of.workspace = somewhere);
    wrong(true, "captured", &|of| of.captured = somewhere.cast());
    wrong(true, "indices", &|of| of.indices = somewhere.cast());
    wrong(true, "mask_bits", &|of| of.mask_bits = somewhere.cast());
    wrong(problem.p_drop > 0.0, "dropout", &|of| of.dropout_seeded = 0);
    let is_backward = sound.gradients.is_some();
    wrong(is_backward && queries > 0, "dq", &|of| of.dq = null);
    wrong(is_backward && queries > 0, "dout", &|of| of.dout = null);
    wrong(!is_backward, "dq", &|of| of.dq = somewhere);
    wrong(!is_backward, "dlse", &|of| of.dlse = somewhere.cast());
    all
}

#[test]
fn a_drawn_c_call_with_a_wrong_field_is_refused_by_its_name() {
    let mut tried = Tried::default();
    for (name, body) in cases(40) {
        c::with_call(&body, |problem, args| {
            // SAFETY: the problem's own structs, which it points to.
            let (cache, gradients) = unsafe { (problem.cache.as_ref(), problem.gradients.as_ref()) };
            let sound = CProblem { problem: *problem, cache: cache.copied(), gradients: gradients.copied() };
            let pointed = |wrong: &CProblem| FmhaProblem {
                cache: wrong.cache.as_ref().map_or(std::ptr::null(), std::ptr::from_ref),
                gradients: wrong.gradients.as_ref().map_or(std::ptr::null(), std::ptr::from_ref),
                ..wrong.problem
            };
            for (field, wrong) in wrong_problems(&sound) {
                tried.note(&name, field, c::planned(&pointed(&wrong)).map(|_| ()));
            }
            let plan = c::planned(problem).unwrap();
            for (field, wrong) in wrong_args(&sound, args) {
                tried.note(&name, field, plan.run(&wrong));
            }
        });
    }
    tried.end("C", 3000);
}
