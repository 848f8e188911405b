//! Which calls share a compiled kernel. Nothing is compiled.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;

use fmha_core::cache::{Precompile, backward_table};
use fmha_core::{
    AnyProblem, Bias, BiasBroadcast, BwdProblem, DType, Dims, ElementwiseBias, FwdProblem, PlanOptions,
    Strides, VLayout, ValidBwd,
};

use support::DIMS;

mod support;

fn bf16(dims: Dims) -> FwdProblem {
    FwdProblem::batch(DType::Bf16, dims)
}

/// Source of the kernel for a problem.
fn kernel(problem: &FwdProblem) -> String {
    let backend = fmha_rocm::pretend("gfx942").unwrap();
    let jobs = backend
        .precompiler()
        .unwrap()
        .jobs(AnyProblem::Forward(&problem.clone().validate().unwrap()), &PlanOptions::default())
        .unwrap();
    jobs[0].source.entry.clone()
}

/// Lengths around each threshold at which some tile changes, and beyond.
const LENGTHS: [u32; 9] = [1, 64, 65, 128, 129, 256, 257, 1000, 10000];

/// Calls as (name, problem).
type Calls = Vec<(&'static str, FwdProblem)>;

/// Changes of run-time numbers, on which the main loop does not depend: as compile-time facts each would multiply
/// the kernels.
fn changes_of_numbers(base: &FwdProblem) -> Calls {
    let with = |change: &dyn Fn(&mut FwdProblem)| {
        let mut problem = base.clone();
        change(&mut problem);
        problem
    };
    let group = FwdProblem::group(DType::Bf16, DIMS).mask(base.mask);
    vec![
        ("lse", with(&|p| p.write_lse = true)),
        ("sink", with(&|p| p.score.sink = true)),
        ("scale below 0", with(&|p| p.score.softmax_scale = Some(-0.3))),
        ("scale 0", with(&|p| p.score.softmax_scale = Some(0.0))),
        ("f32 output", with(&|p| p.dtypes.o = DType::F32)),
        ("f16 output", with(&|p| p.dtypes.o = DType::F16)),
        ("used lengths", with(&|p| p.layout.seqused_k = true)),
        ("group mode", group),
        ("head dim 104", bf16(Dims { head_dim_qk: 104, ..DIMS }).mask(base.mask)),
        ("head dim 120 of V", bf16(Dims { head_dim_v: 120, ..DIMS }).mask(base.mask)),
    ]
}

#[test]
fn what_the_main_loop_does_not_meet_asks_for_no_other_kernel() {
    for mask in ["0", "b"] {
        let base = bf16(DIMS).mask(mask.parse().unwrap());
        for (name, problem) in changes_of_numbers(&base) {
            assert_eq!(kernel(&base), kernel(&problem), "{name}, mask {mask}");
        }
    }
    let band = |mask: &str| bf16(DIMS).mask(mask.parse().unwrap());
    for mask in ["b", "t:5,0", "b:-1,3", "g:3,9"] {
        assert_eq!(kernel(&band("t")), kernel(&band(mask)), "{mask}");
    }
}

/// All score modifiers share a kernel, under every mask: a soft-cap, any bias of any type, slopes. Dropout has another
/// kernel.
#[test]
fn all_modifiers_of_scores_share_a_kernel_and_dropout_has_another() {
    let bias = |dtype| {
        let strides = Strides { batch: 4 * 150_000, seq: 500, head: 150_000, dim: 1 };
        Bias::Elementwise(ElementwiseBias { dtype, broadcast: BiasBroadcast::BatchHead, strides })
    };
    let softcap = bf16(DIMS).softcap(20.0);
    let others = [
        bf16(DIMS).bias(bias(DType::F32)),
        bf16(DIMS).bias(bias(DType::Bf16)),
        bf16(DIMS).bias(Bias::Alibi { per_batch: false }),
        softcap.clone().mask("b:3,1,2".parse().unwrap()),
        softcap.clone().mask("0".parse().unwrap()).bias(bias(DType::F32)),
    ];
    for other in &others {
        assert_eq!(kernel(&softcap), kernel(other), "{other:?}");
    }
    let dropout = softcap.clone().p_drop(0.2);
    assert_ne!(kernel(&softcap), kernel(&dropout));
    assert_ne!(kernel(&softcap), kernel(&bf16(DIMS)));
    assert_eq!(kernel(&dropout), kernel(&bf16(DIMS).p_drop(0.7).write_keep_mask(true)));
}

/// Rows at odd addresses, which no wide load can read, share one kernel, whatever the problem's features.
#[test]
fn rows_of_odd_addresses_share_a_kernel() {
    let odd = |mut problem: FwdProblem| {
        problem.strides.q.seq += 1;
        problem.strides.q.batch += 300;
        problem
    };
    let plain = odd(bf16(DIMS));
    let mut col_major = bf16(DIMS);
    col_major.layout.v = VLayout::ColMajor;
    col_major.strides.v = Strides::bhds(col_major.shape_v());
    for other in [
        bf16(DIMS).p_drop(0.2).mask("b:3,1,2".parse().unwrap()),
        bf16(DIMS).softcap(3.0).dtype_o(DType::F32),
        bf16(Dims { head_dim_qk: 70, head_dim_v: 97, ..DIMS }),
        col_major,
    ] {
        assert_eq!(kernel(&plain), kernel(&odd(other.clone())), "{other:?}");
    }
    assert_ne!(kernel(&plain), kernel(&bf16(DIMS)));
}

/// Sources of the products of a backward call.
fn products(problem: BwdProblem) -> Vec<String> {
    let backend = fmha_rocm::pretend("gfx942").unwrap();
    let problem = problem.validate().unwrap();
    let jobs =
        backend.precompiler().unwrap().jobs(AnyProblem::Backward(&problem), &PlanOptions::default()).unwrap();
    let entries = jobs.into_iter().map(|job| job.source.entry);
    entries.filter(|entry| entry.contains("kTile")).collect()
}

/// Features that the products of the backward do not use need no other kernel. Only the products are tested, without
/// the row launches before and after them.
#[test]
fn what_the_backwards_products_do_not_meet_asks_for_no_other_kernels() {
    for mask in ["0", "b"] {
        let base = bf16(DIMS).mask(mask.parse().unwrap());
        let of = |problem: FwdProblem| products(BwdProblem::new(problem));
        for (name, problem) in changes_of_numbers(&base) {
            if problem.dtypes.o == DType::Bf16 {
                assert_eq!(of(base.clone()), of(problem), "{name}, mask {mask}");
            }
        }
        let with_gradients = BwdProblem::new(base.clone().sink(true)).write_dsink(true).has_dlse(true);
        assert_eq!(of(base.clone()), products(with_gradients), "dSink and dLSE");
    }
    let softcap = BwdProblem::new(bf16(DIMS).softcap(20.0));
    let alibi = BwdProblem::new(bf16(DIMS).bias(Bias::Alibi { per_batch: false }).mask("b".parse().unwrap()));
    assert_eq!(products(softcap.clone()), products(alibi));
    assert_ne!(products(softcap), products(BwdProblem::new(bf16(DIMS))));
}

/// Source of the kernels for a problem's gradients.
fn gradients(compiler: &dyn Precompile, problem: &ValidBwd) -> Vec<String> {
    let jobs = compiler.jobs(AnyProblem::Backward(problem), &PlanOptions::default()).unwrap();
    jobs.into_iter().map(|job| job.source.entry).collect()
}

/// A bundle's table has the backward's kernels for every length. Each launch's tile depends on its own rows: dQ's
/// on the number of queries, dK's and dV's on the number of keys.
#[test]
fn a_bundles_table_has_the_backwards_kernels_of_every_length() {
    let table = backward_table().unwrap();
    for arch in ["gfx90a", "gfx942", "gfx950"] {
        let device = fmha_rocm::pretend(arch).unwrap();
        let compiler = device.precompiler().unwrap();
        let bundled: BTreeSet<_> =
            table.iter().flat_map(|entry| gradients(compiler, &entry.problem)).collect();
        for entry in table.iter().filter(|entry| entry.name.ends_with("/batch/lse/q512k512/gqa4")) {
            for (seqlen_q, seqlen_k) in LENGTHS.iter().flat_map(|q| LENGTHS.map(|k| (*q, k))) {
                let of = &entry.problem.fwd;
                let dims = Dims { seqlen_q, seqlen_k, ..of.dims };
                let forward = FwdProblem::batch(of.dtypes.qk, dims).mask(of.mask).write_lse(true);
                let problem = BwdProblem::new(forward).validate().unwrap();
                for wanted in gradients(compiler, &problem) {
                    let name = &entry.name;
                    assert!(bundled.contains(&wanted), "{arch}: {name}, {seqlen_q} x {seqlen_k}: {wanted}");
                }
            }
        }
    }
}
