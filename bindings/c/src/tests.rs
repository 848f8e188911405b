//! Laws of the C ABI. The path behind it runs on the CPU's backend here.

use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

use fmha_core::{FmhaBackend as _, Stream};
use fmha_cpu::CpuBackend;

use crate::{FmhaCall, FmhaPlan, FmhaTensor, fmha_drop, fmha_last_error, fmha_plan, fmha_run, guard};

const NONE: FmhaTensor = FmhaTensor { data: null_mut(), batch_stride: 0, seqlen_stride: 0, head_stride: 0 };
const ROWS: usize = 5;
const HEADS: usize = 2;
const DIM: usize = 8;

fn tensor(data: &[u16], packed: bool) -> FmhaTensor {
    let seq = HEADS * DIM;
    FmhaTensor {
        data: data.as_ptr() as *mut c_void,
        batch_stride: if packed { 0 } else { (ROWS * seq) as i64 },
        seqlen_stride: seq as i64,
        head_stride: DIM as i64,
    }
}

fn call(q: &[u16], k: &[u16], v: &[u16], o: &mut [u16], batch: i64, cu_seqlens: &[i32]) -> FmhaCall {
    let packed = !cu_seqlens.is_empty();
    let cu = if packed { cu_seqlens.as_ptr() } else { null() };
    FmhaCall {
        batch,
        seqlen_q: ROWS as i64,
        seqlen_k: ROWS as i64,
        num_heads_q: HEADS as i64,
        num_heads_kv: HEADS as i64,
        head_dim_qk: DIM as i64,
        head_dim_v: DIM as i64,
        page_size: 0,
        q: tensor(q, packed),
        k: tensor(k, packed),
        v: tensor(v, packed),
        o: FmhaTensor { data: o.as_mut_ptr().cast(), ..tensor(o, packed) },
        dout: NONE,
        dq: NONE,
        dk: NONE,
        dv: NONE,
        lse: null_mut(),
        cu_seqlens_q: cu,
        cu_seqlens_k: cu,
        page_table: null(),
        descale_q: null(),
        descale_k: null(),
        descale_v: null(),
        mask: c"b".as_ptr(),
        stream: null_mut(),
        softmax_scale: 0.25,
        dtype: 0,
        dtype_o: 0,
        backward: 0,
    }
}

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

fn run_on_cpu(call: &FmhaCall) {
    let backend = CpuBackend::new().expect("a CPU");
    // SAFETY: every pointer of the call is memory of this test, as large as the call says.
    unsafe { FmhaPlan::new(&backend, call).and_then(|plan| plan.run(&backend, call)).expect("a forward") };
    backend.memory().synchronize(Stream::DEFAULT).expect("done");
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

#[test]
fn a_wrong_field_is_named_with_its_number_before_anything_runs() {
    let q = numbers(1, ROWS);
    let mut o = vec![0; q.len()];
    let good = call(&q, &q, &q, &mut o, 1, &[]);
    let backend = CpuBackend::new().expect("a CPU");
    let cu = [0, ROWS as i32];
    for (bad, words) in [
        (FmhaCall { batch: -3, ..good }, "batch -3"),
        (FmhaCall { dtype: 9, ..good }, "dtype 9"),
        (FmhaCall { num_heads_q: 3, ..good }, "num_heads_q 3"),
        (FmhaCall { backward: 1, ..good }, "backward 1"),
        (FmhaCall { page_size: 16, ..good }, "page_size 16"),
        (FmhaCall { cu_seqlens_q: cu.as_ptr(), ..good }, "cu_seqlens_k"),
        (FmhaCall { mask: c"nonsense".as_ptr(), ..good }, "mask nonsense"),
        (FmhaCall { q: FmhaTensor { data: null_mut(), ..good.q }, ..good }, "q.data is null"),
    ] {
        // SAFETY: as in `run_on_cpu`; what is null or missing is refused.
        let result = unsafe { FmhaPlan::new(&backend, &bad).and_then(|plan| plan.run(&backend, &bad)) };
        let text = result.expect_err(words).to_string();
        assert!(text.contains(words), "{text} does not say {words}");
    }
    assert!(o.iter().all(|&bits| bits == 0));
}

#[test]
fn strides_other_than_the_plans_are_refused() {
    let q = numbers(1, ROWS);
    let mut o = vec![0; q.len()];
    let good = call(&q, &q, &q, &mut o, 1, &[]);
    let bad = FmhaCall { k: FmhaTensor { head_stride: 0, ..good.k }, ..good };
    let backend = CpuBackend::new().expect("a CPU");
    // SAFETY: as in `run_on_cpu`; the second call is refused.
    let result = unsafe { FmhaPlan::new(&backend, &good).expect("a plan").run(&backend, &bad) };
    assert!(result.expect_err("refused").to_string().starts_with("k strides"));
}

#[test]
fn null_is_refused_by_name_and_null_plans_drop() {
    let mut plan = null_mut();
    // SAFETY: null is taken everywhere.
    unsafe {
        assert_ne!(fmha_plan(null(), &raw mut plan), 0);
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
fn the_committed_header_is_the_generated_one() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/");
    let config = cbindgen::Config::from_file(format!("{root}cbindgen.toml")).expect("cbindgen.toml");
    let bindings = cbindgen::Builder::new()
        .with_config(config)
        .with_src(format!("{root}src/call.rs"))
        .with_src(format!("{root}src/lib.rs"))
        .generate()
        .expect("a header");
    let mut generated = Vec::new();
    bindings.write(&mut generated);
    let generated = String::from_utf8(generated).expect("UTF-8");
    let path = format!("{root}fmha.h");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, &generated).expect("writable");
    }
    assert_eq!(std::fs::read_to_string(&path).expect("fmha.h"), generated, "run with BLESS=1");
}
