//! Structs of the C library.

use fmha_c::{FmhaCache, FmhaCall, FmhaGradients, FmhaTensor};

use super::super::{c, cases};
use super::{Tried, Wrong};

/// A C call, with the memory that it points to.
#[derive(Clone)]
struct CCall {
    call: FmhaCall,
    cache: Option<FmhaCache>,
    gradients: Option<FmhaGradients>,
}

/// C's own words for some of the contract's fields, and what is wrong with each.
fn wrong_c_calls(sound: &CCall) -> Vec<Wrong<CCall>> {
    static NAN: f32 = f32::NAN;
    static NEGATIVE: f32 = -1.0;
    let mut all: Vec<Wrong<CCall>> = Vec::new();
    let mut wrong = |applies: bool, field, change: &dyn Fn(&mut CCall)| {
        if applies {
            let mut other = sound.clone();
            change(&mut other);
            all.push((field, other));
        }
    };
    let call = sound.call;
    let has_two = |size: i64| size > 1;
    wrong(true, "struct_bytes", &|of| of.call.struct_bytes = 8);
    for number in [-1, 1 << 32, i64::MIN, i64::MAX] {
        wrong(true, "batch", &|of| of.call.batch = number);
        wrong(true, "seqlen_q", &|of| of.call.seqlen_q = number);
        wrong(true, "seqlen_k", &|of| of.call.seqlen_k = number);
        wrong(true, "num_heads_q", &|of| of.call.num_heads_q = number);
        wrong(true, "num_heads_kv", &|of| of.call.num_heads_kv = number);
        wrong(true, "head_dim_qk", &|of| of.call.head_dim_qk = number);
        wrong(true, "head_dim_v", &|of| of.call.head_dim_v = number);
        wrong(true, "total_q", &|of| of.call.total_q = number);
        wrong(true, "total_k", &|of| of.call.total_k = number);
        wrong(true, "num_pages", &|of| of.call.num_pages = number);
        wrong(true, "max_pages", &|of| of.call.max_pages = number);
        wrong(true, "page_size", &|of| of.call.page_size = number);
    }
    wrong(true, "num_heads_q", &|of| of.call.num_heads_q = 0);
    wrong(true, "num_heads_kv", &|of| of.call.num_heads_kv = 0);
    wrong(true, "head_dim_qk", &|of| of.call.head_dim_qk = 0);
    wrong(true, "head_dim_v", &|of| of.call.head_dim_v = 1025);
    wrong(call.cu_seqlens_q.is_null(), "total_q", &|of| of.call.total_q = 4);
    wrong(call.cu_seqlens_k.is_null(), "total_k", &|of| of.call.total_k = 4);
    wrong(call.page_size == 0, "num_pages", &|of| of.call.num_pages = 4);
    wrong(call.page_size == 0, "max_pages", &|of| of.call.max_pages = 4);
    wrong(call.page_size == 0 && call.cu_seqlens_k.is_null(), "page_size", &|of| of.call.page_size = 4);
    wrong(call.page_size > 0, "page_size", &|of| of.call.page_size = 0);
    wrong(has_two(call.head_dim_qk), "q", &|of| of.call.q.dim_stride = 2);
    wrong(has_two(call.num_heads_q), "q", &|of| of.call.q.head_stride = -1);
    wrong(has_two(call.head_dim_qk), "k", &|of| of.call.k.dim_stride = i64::MAX);
    wrong(has_two(call.num_heads_kv), "v", &|of| of.call.v.head_stride = i64::MIN);
    wrong(has_two(call.num_heads_q), "o", &|of| of.call.o.head_stride = 0);
    for text in [c"b:1", c"x", c"", c"t:1,2,3,4", c"g:99999999999,0", c"\xff"] {
        wrong(true, "mask", &|of| of.call.mask = text.as_ptr());
    }
    wrong(true, "softmax_scale", &|of| of.call.softmax_scale = &raw const NAN);
    wrong(true, "softcap", &|of| of.call.softcap = &raw const NEGATIVE);
    wrong(true, "softcap", &|of| of.call.softcap = &raw const NAN);
    for number in [f32::NAN, 1.0, -0.5] {
        wrong(true, "p_drop", &|of| of.call.p_drop = number);
    }
    for code in [-1, 7, i32::MIN, i32::MAX] {
        wrong(true, "dtype_qk", &|of| of.call.dtype_qk = code);
        wrong(true, "dtype_v", &|of| of.call.dtype_v = code);
        wrong(true, "dtype_o", &|of| of.call.dtype_o = code);
        wrong(true, "dtype_bias", &|of| of.call.dtype_bias = code);
        wrong(true, "v_layout", &|of| of.call.v_layout = code);
        wrong(true, "alibi_per_batch", &|of| of.call.alibi_per_batch = code);
        wrong(true, "descale_per_tensor", &|of| of.call.descale_per_tensor = code);
        wrong(true, "dropout_seeded", &|of| of.call.dropout_seeded = code);
        wrong(true, "reserved", &|of| of.call.reserved = code);
    }
    wrong(call.alibi_slopes.is_null() && call.batch > 0, "alibi_per_batch", &|of| {
        of.call.alibi_per_batch = 1;
    });
    fn cache(of: &mut CCall) -> &mut FmhaCache {
        of.cache.as_mut().unwrap()
    }
    if let Some(given) = sound.cache {
        wrong(true, "struct_bytes", &|of| cache(of).struct_bytes = 0);
        for number in [-1, 1 << 32, i64::MIN] {
            wrong(true, "seqlen_new", &|of| cache(of).seqlen_new = number);
            wrong(true, "total_new", &|of| cache(of).total_new = number);
            wrong(true, "max_pos", &|of| cache(of).max_pos = number);
        }
        wrong(given.cu_seqlens_new.is_null(), "total_new", &|of| cache(of).total_new = 3);
        for code in [-1, 9, i32::MAX] {
            wrong(true, "rotary_interleaved", &|of| cache(of).rotary_interleaved = code);
            wrong(true, "dtype_rotary", &|of| cache(of).dtype_rotary = code);
            wrong(true, "dtype_cache", &|of| cache(of).dtype_cache = code);
            wrong(true, "v_in_k", &|of| cache(of).v_in_k = code);
            wrong(true, "reserved", &|of| cache(of).reserved = code);
        }
        wrong(given.rotary_dim > 0, "rotary_dim", &|of| cache(of).rotary_dim = 3);
        wrong(true, "rotary_dim", &|of| cache(of).rotary_dim = -2);
        wrong(given.rotary_dim > 0, "rotary_cos", &|of| cache(of).rotary_cos = std::ptr::null());
        wrong(given.rotary_dim > 0, "rotary_sin", &|of| cache(of).rotary_sin = std::ptr::null());
        wrong(given.rotary_dim > 0, "max_pos", &|of| cache(of).max_pos = 0);
        let has_new = given.seqlen_new > 0 && has_two(call.head_dim_qk);
        wrong(has_new, "k_new", &|of| cache(of).k_new.dim_stride = 2);
        wrong(!given.k_new.data.is_null(), "k_new", &|of| cache(of).seqlen_new = 0);
    }
    fn gradients(of: &mut CCall) -> &mut FmhaGradients {
        of.gradients.as_mut().unwrap()
    }
    if let Some(given) = sound.gradients {
        wrong(true, "struct_bytes", &|of| gradients(of).struct_bytes = 1);
        for code in [-1, 7, 2] {
            wrong(true, "dtype_grad", &|of| gradients(of).dtype_grad = code);
        }
        let scores = call.batch > 0 && call.seqlen_q > 0 && call.seqlen_k > 0;
        wrong(scores, "dbias", &|of| gradients(of).dtype_dbias = 9);
        wrong(has_two(call.head_dim_v), "dout", &|of| gradients(of).dout.dim_stride = 2);
        wrong(has_two(call.head_dim_qk), "dq", &|of| gradients(of).dq.dim_stride = 2);
        wrong(has_two(call.num_heads_kv), "dk", &|of| gradients(of).dk.head_stride = 0);
        wrong(has_two(call.num_heads_kv), "dv", &|of| gradients(of).dv.head_stride = -1);
        wrong(call.sink.is_null(), "dsink", &|of| gradients(of).dsink = given.dq.data.cast());
        wrong(given.dbias.data.is_null() && call.bias.data.is_null() && scores, "dbias", &|of| {
            gradients(of).dbias = given.dq;
        });
    }
    all
}

/// Wrong at the run of a plan that was sound.
fn wrong_c_runs(sound: &CCall) -> Vec<Wrong<CCall>> {
    let mut all: Vec<Wrong<CCall>> = Vec::new();
    let mut wrong = |applies: bool, field, change: &dyn Fn(&mut CCall)| {
        if applies {
            let mut other = sound.clone();
            change(&mut other);
            all.push((field, other));
        }
    };
    let call = sound.call;
    let null = std::ptr::null_mut();
    let queries = if call.cu_seqlens_q.is_null() { call.batch * call.seqlen_q } else { call.total_q };
    let keys = match (call.page_size, call.cu_seqlens_k.is_null()) {
        (0, true) => call.batch * call.seqlen_k,
        (0, false) => call.total_k,
        _ => call.num_pages,
    };
    wrong(queries > 0, "q", &|of| of.call.q.data = null);
    wrong(keys > 0, "k", &|of| of.call.k.data = null);
    let v_in_k = sound.cache.is_some_and(|cache| cache.v_in_k != 0);
    wrong(keys > 0 && !v_in_k, "v", &|of| of.call.v.data = null);
    wrong(queries > 0, "o", &|of| of.call.o.data = null);
    wrong(!call.lse.is_null() && queries > 0, "lse", &|of| of.call.lse = std::ptr::null_mut());
    wrong(!call.cu_seqlens_q.is_null(), "cu_seqlens_q", &|of| of.call.cu_seqlens_q = std::ptr::null());
    wrong(!call.cu_seqlens_k.is_null(), "cu_seqlens_k", &|of| of.call.cu_seqlens_k = std::ptr::null());
    wrong(!call.seqused_k.is_null(), "seqused_k", &|of| of.call.seqused_k = std::ptr::null());
    wrong(!call.sink.is_null(), "sink", &|of| of.call.sink = std::ptr::null());
    wrong(!call.block_table.is_null(), "block_table", &|of| of.call.block_table = std::ptr::null());
    wrong(!call.alibi_slopes.is_null(), "alibi_slopes", &|of| of.call.alibi_slopes = std::ptr::null());
    wrong(true, "batch", &|of| of.call.batch += 1);
    wrong(true, "seqlen_q", &|of| of.call.seqlen_q += 1);
    wrong(true, "head_dim_v", &|of| of.call.head_dim_v += 1);
    wrong(true, "p_drop", &|of| of.call.p_drop = 0.123);
    wrong(true, "batch_stride", &|of| of.call.q.batch_stride += 8);
    wrong(true, "workspace", &|of| of.call.workspace_bytes = 8);
    wrong(call.p_drop > 0.0, "dropout", &|of| of.call.dropout_seeded = 0);
    wrong(sound.gradients.is_some(), "gradients", &|of| of.gradients = None);
    wrong(sound.cache.is_some(), "cache", &|of| of.cache = None);
    if let Some(FmhaGradients { dq: FmhaTensor { data, .. }, .. }) = sound.gradients {
        wrong(!data.is_null() && queries > 0, "dq", &|of| {
            of.gradients.as_mut().unwrap().dq.data = std::ptr::null_mut();
        });
        wrong(queries > 0, "dout", &|of| {
            of.gradients.as_mut().unwrap().dout.data = std::ptr::null_mut();
        });
    }
    all
}

#[test]
fn a_drawn_c_call_with_a_wrong_field_is_refused_by_its_name() {
    let mut tried = Tried::default();
    for (name, body) in cases(40) {
        c::with_call(&body, |call| {
            // SAFETY: the call's own structs, which it points to.
            let (cache, gradients) = unsafe { (call.cache.as_ref(), call.gradients.as_ref()) };
            let sound = CCall { call: *call, cache: cache.copied(), gradients: gradients.copied() };
            let pointed = |wrong: &CCall| {
                let mut call = wrong.call;
                call.cache = wrong.cache.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
                call.gradients = wrong.gradients.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
                call
            };
            for (field, wrong) in wrong_c_calls(&sound) {
                tried.note(&name, field, c::planned(&pointed(&wrong)).map(|_| ()));
            }
            let plan = c::planned(call).unwrap();
            for (field, wrong) in wrong_c_runs(&sound) {
                tried.note(&name, field, plan.run(&pointed(&wrong)));
            }
        });
    }
    tried.end("C", 3000);
}
