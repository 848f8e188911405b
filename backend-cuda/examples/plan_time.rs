//! Time to make a plan whose kernels are loaded already. For comparison, the time to name its kernels by
//! their text: headers are rendered and hashed, as in a search in a bundle, on disk or before a compilation.
//!
//! `cargo run --release -p fmha-cuda --example plan_time [sm_90a]`: on a device, or on an emulated one, whose
//! library lies in `FMHA_EMULATOR_DIR`.

use std::time::Instant;

use fmha_core::{AnyProblem, BwdProblem, DType, Dims, FwdProblem, MaskSpec, PlanOptions, Result};

const TIMES: usize = 1001;

fn main() -> Result<()> {
    let arch = std::env::args().nth(1);
    let device = fmha_cuda::open(0, arch.as_deref())?;
    println!("{}", device.name());
    let dims = |seqlen| Dims::batch(2).seqlens(seqlen, seqlen).heads(16, 16).head_dim(128);
    let options = PlanOptions::default();
    for seqlen in [128, 4096] {
        let fwd = FwdProblem::batch(DType::Bf16, dims(seqlen)).mask(MaskSpec::CAUSAL);
        let bwd = BwdProblem::new(fwd.clone()).validate()?;
        let fwd = fwd.validate()?;
        report("forward", seqlen, || device.plan_fwd(&fwd, &options).map(drop))?;
        report("backward", seqlen, || device.plan_bwd(&bwd, &options).map(drop))?;
        if let Some(compiler) = device.precompiler() {
            let named = || {
                let jobs = compiler.jobs(AnyProblem::Forward(&fwd), &options)?;
                for job in &jobs {
                    std::hint::black_box(job.key());
                }
                Ok(())
            };
            report("forward by its text", seqlen, named)?;
        }
    }
    Ok(())
}

fn report(what: &str, seqlen: u32, work: impl Fn() -> Result<()>) -> Result<()> {
    work()?;
    let mut seconds = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        let start = Instant::now();
        work()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_unstable_by(f64::total_cmp);
    let (middle, least) = (seconds[TIMES / 2] * 1e6, seconds[0] * 1e6);
    println!("{what:<20} S {seqlen:<5} {middle:8.1} us in the middle, {least:8.1} at the least, of {TIMES}");
    Ok(())
}
