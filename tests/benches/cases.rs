//! How long the CPU backend takes for cases of the battery, and for a few sizes of use.
//!
//! `cargo bench -p fmha-conformance -- forward` runs those whose names hold `forward`.

#![allow(missing_docs, reason = "criterion's macros make a function without any")]

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use fmha_conformance::case::{Body, all};
use fmha_conformance::execute::{run_bwd, run_fwd};
use fmha_conformance::tensors::{Data, HostBwd, HostFwd, Lengths};
use fmha_core::work::Work;
use fmha_core::{BwdProblem, DType, Device, Dims, FwdProblem, MaskSpec, PlanOptions};

fn square(seqlen: u32, dtype: DType, mask: MaskSpec) -> FwdProblem {
    let dims = Dims::batch(1).seqlens(seqlen, seqlen).heads(8, 8).head_dim(128);
    let mut problem = FwdProblem::batch(dtype, dims);
    (problem.mask, problem.write_lse) = (mask, true);
    problem
}

/// Times `iterations` runs of a planned call, without planning and filling.
fn forward(backend: &Device, host: &mut HostFwd, iterations: u64) -> Duration {
    let plan = backend.plan_fwd(&host.problem, &PlanOptions::default()).expect("a plan");
    let start = Instant::now();
    for _ in 0..iterations {
        run_fwd(backend, &plan, host).expect("a run");
    }
    start.elapsed()
}

fn sizes(criterion: &mut Criterion) {
    let backend = fmha::Backend::Cpu.open().expect("the CPU backend");
    for dtype in [DType::F32, DType::Bf16] {
        for (label, mask) in [("full", MaskSpec::NONE), ("causal", MaskSpec::CAUSAL)] {
            for seqlen in [512, 2048] {
                let problem = square(seqlen, dtype, mask);
                let data = Data::default();
                let mut host = HostFwd::new(problem.clone(), &Lengths::default(), data).expect("tensors");
                let work = Work::count(&host.problem, &host.spans).expect("a small problem");

                let mut group = criterion.benchmark_group(format!("forward/{dtype}/{label}"));
                group.sample_size(10).throughput(Throughput::Elements(work.fwd_flops));
                group.bench_function(BenchmarkId::from_parameter(seqlen), |bencher| {
                    bencher.iter_custom(|iterations| forward(&backend, &mut host, iterations));
                });
                group.finish();

                let mut host =
                    HostBwd::new(BwdProblem::new(problem), &Lengths::default(), data).expect("tensors");
                let plan = backend.plan_bwd(&host.problem, &PlanOptions::default()).expect("a plan");
                let mut group = criterion.benchmark_group(format!("backward/{dtype}/{label}"));
                group.sample_size(10).throughput(Throughput::Elements(work.bwd_flops));
                group.bench_function(BenchmarkId::from_parameter(seqlen), |bencher| {
                    bencher.iter_custom(|iterations| {
                        let start = Instant::now();
                        for _ in 0..iterations {
                            run_bwd(&backend, &plan, &mut host).expect("a run");
                        }
                        start.elapsed()
                    });
                });
                group.finish();
            }
        }
    }
}

/// Times the battery's longer cases: sizes that are no multiple of a tile, under different masks.
fn battery(criterion: &mut Criterion) {
    let backend = fmha::Backend::Cpu.open().expect("the CPU backend");
    for case in all().into_iter().filter(|case| case.name.starts_with("edges/long/")) {
        let Body::Forward(call) = case.body else { continue };
        let mut host = HostFwd::new(call.problem, &call.lengths, call.data).expect("tensors");
        criterion.bench_function(&case.name, |bencher| {
            bencher.iter_custom(|iterations| forward(&backend, &mut host, iterations));
        });
    }
}

criterion_group!(benches, sizes, battery);
criterion_main!(benches);
