//! Times one problem of the CPU backend and prints, a line for each repetition, the wall-clock seconds and the
//! processor seconds of the calling thread (with one thread, the whole processor time).
//!
//! `cpu_bench fwd|bwd SEQLEN f32|f16|bf16 causal|full REPEAT [HEADS] [HEAD_DIM] [BLOCK_M] [BLOCK_N]`,
//! at batch 1, b·h·s·d in memory; `FMHA_NUM_THREADS` and `FMHA_CPU_ISA` apply. Reads a line from standard
//! input before each repetition, so that a script can alternate it with a peer. Ends with the bytes of the
//! tensors and the process' peak of resident memory (Linux only).

use std::io::{BufRead, Write};
use std::time::Instant;

use fmha_core::{
    BwdArgs, BwdProblem, DType, DevSlice, DevSliceMut, Device, Dims, FwdArgs, FwdProblem, MaskSpec,
    PlanOptions, Strides,
};
use fmha_cpu::CpuBackend;

/// Processor time of this thread, which does not include time of other programs.
fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable; the call touches nothing else.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Peak of the process's resident memory, in bytes.
fn peak_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|kb| kb.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let text = |i: usize, default: &str| args.get(i).map_or(default, String::as_str).to_owned();
    let seqlen: u32 = text(1, "1024").parse()?;
    let dtype: DType = text(2, "f32").parse()?;
    let repeat: usize = text(4, "5").parse()?;
    let (heads, dim): (u32, u32) = (text(5, "8").parse()?, text(6, "128").parse()?);
    let dims = Dims::batch(1).seqlens(seqlen, seqlen).heads(heads, heads).head_dim(dim);
    let mut problem = FwdProblem::batch(dtype, dims);
    problem.write_lse = true;
    if text(3, "full") == "causal" {
        problem.mask = MaskSpec::CAUSAL;
    }
    let strides = Strides::bhsd(problem.shape_q());
    (problem.strides.q, problem.strides.k, problem.strides.v, problem.strides.o) =
        (strides, strides, strides, strides);
    let mut options = PlanOptions::default();
    for (i, name) in [(7, "block_m"), (8, "block_n")] {
        if let Some(value) = args.get(i) {
            options.tile.push((name.into(), value.clone()));
        }
    }

    let bytes = problem.shape_q().num_elems() as usize * dtype.size_bytes() as usize;
    let mut state = 1u32;
    let mut random = || {
        let mut data = vec![0u8; bytes];
        for element in data.chunks_exact_mut(dtype.size_bytes() as usize) {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            dtype.write(f64::from(state >> 8) / f64::from(1 << 23) - 1.0, element);
        }
        data
    };
    let backward = text(0, "fwd") == "bwd";
    let (q, k, v) = (random(), random(), random());
    let dout = if backward { random() } else { vec![] };
    let mut o = vec![0u8; bytes];
    let mut lse = vec![0f32; problem.extents(fmha_core::Totals::NONE).lse_elems as usize];
    let grad = if backward { bytes } else { 0 };
    let (mut dq, mut dk, mut dv) = (vec![0u8; grad], vec![0u8; grad], vec![0u8; grad]);
    let tensors = 4 * bytes + 4 * lse.len() + 4 * grad;

    let backend = Device::new(CpuBackend::new()?);
    let fwd = problem.clone().validate()?;
    let fwd_plan = backend.plan_fwd(&fwd, &options)?;
    let run_fwd = |o: &mut [u8], lse: &mut [f32]| {
        let mut args =
            FwdArgs::new(DevSlice::host(&q), DevSlice::host(&k), DevSlice::host(&v), DevSliceMut::host(o));
        args.lse = Some(DevSliceMut::host(lse));
        fwd_plan.run(&mut args, &backend.default_stream())
    };
    eprintln!("{}", backend.name());
    run_fwd(&mut o, &mut lse)?;
    let bwd_plan = backend.plan_bwd(&BwdProblem::new(problem).validate()?, &options)?;
    let mut line = String::new();
    for _ in 0..repeat {
        line.clear();
        std::io::stdin().lock().read_line(&mut line)?;
        let (start, start_cpu) = (Instant::now(), thread_seconds());
        if backward {
            let mut args = BwdArgs::new(
                [DevSlice::host(&q), DevSlice::host(&k), DevSlice::host(&v)],
                [DevSlice::host(&o), DevSlice::host(&lse), DevSlice::host(&dout)],
                [DevSliceMut::host(&mut dq), DevSliceMut::host(&mut dk), DevSliceMut::host(&mut dv)],
            );
            bwd_plan.run(&mut args, &backend.default_stream())?;
        } else {
            run_fwd(&mut o, &mut lse)?;
        }
        println!("{:.9} {:.9}", start.elapsed().as_secs_f64(), thread_seconds() - start_cpu);
        std::io::stdout().flush()?;
    }
    println!("tensors {tensors} peak {}", peak_bytes());
    Ok(())
}
