//! Checks and times the forward kernel on a device, and prints a report: `check_device [--emulate ARCH]`.
//!
//! Each case is compared with the f64 reference on rows of the first and the last head; then plain calls
//! are timed with the device's events. An emulated device is checked, not timed.

use fmha_core::reference::{Inputs, Precision, forward_head};
use fmha_core::{
    DType, DevBuffer, DevSlice, DevSliceMut, Dims, Error, FmhaBackend, FwdArgs, FwdProblem, PlanOptions,
    SeqSpan, Stream, ValidFwd,
};
use fmha_rocm::{Arch, RocmBackend};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let emulate = match &args[..] {
        [] => None,
        [flag, arch] if flag == "--emulate" => Some(arch.as_str()),
        _ => return Err("usage: check_device [--emulate ARCH]".into()),
    };
    let backend = RocmBackend::open(0, emulate)?;
    println!("# fmha on {}\n", backend.name());
    println!("| call | result | worst error / allowance |\n|---|---|---|");
    let mut failed = 0;
    for (name, problem) in cases(backend.arch()) {
        match check(&backend, &problem.validate()?) {
            Ok(worst) => {
                failed += u32::from(worst > 1.0 || worst.is_nan());
                println!("| {name} | {} | {worst:.3} |", if worst <= 1.0 { "agrees" } else { "DIFFERS" });
            }
            Err(error) => {
                failed += 1;
                println!("| {name} | {error} | |");
            }
        }
    }
    println!("\n{failed} failed.\n");
    if emulate.is_some() {
        println!("Emulated: nothing was timed.");
    } else {
        println!("| call | ms | TFLOP/s |\n|---|---|---|");
        for (name, problem) in timed(backend.arch()) {
            let (milliseconds, tflops) = time(&backend, &problem.validate()?)?;
            println!("| {name} | {milliseconds:.3} | {tflops:.0} |");
        }
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} calls failed").into()) }
}

fn types(arch: Arch) -> Vec<DType> {
    DType::ALL.into_iter().filter(|&dtype| arch.multiplies(dtype)).collect()
}

fn cases(arch: Arch) -> Vec<(String, FwdProblem)> {
    let mut all = Vec::new();
    for dtype in types(arch) {
        for (head_dim, mask, seqlen_q, seqlen_k) in [
            (128, "0", 200, 333),
            (128, "b", 333, 333),
            (64, "t:50,0", 150, 200),
            (72, "b", 100, 64),
            (256, "0", 64, 130),
        ] {
            let dims = Dims {
                batch: 2,
                seqlen_q,
                seqlen_k,
                num_heads_q: 4,
                num_heads_kv: 2,
                head_dim_qk: head_dim,
                head_dim_v: head_dim,
            };
            let mut problem = FwdProblem::batch(dtype, dims);
            problem.mask = mask.parse().unwrap_or(problem.mask);
            all.push((format!("{dtype} d{head_dim} mask {mask} {seqlen_q}x{seqlen_k}"), problem));
        }
    }
    all
}

fn timed(arch: Arch) -> Vec<(String, FwdProblem)> {
    let mut all = Vec::new();
    for dtype in types(arch) {
        for mask in ["0", "b"] {
            let dims = Dims {
                batch: 4,
                seqlen_q: 8192,
                seqlen_k: 8192,
                num_heads_q: 64,
                num_heads_kv: 8,
                head_dim_qk: 128,
                head_dim_v: 128,
            };
            let mut problem = FwdProblem::batch(dtype, dims);
            problem.mask = mask.parse().unwrap_or(problem.mask);
            all.push((format!("{dtype} B4 H64/8 S8192 D128 mask {mask}"), problem));
        }
    }
    all
}

/// Numbers in -1..1 from a linear congruential generator.
fn numbers(dtype: DType, elems: u64, mut state: u32) -> Vec<u8> {
    let size = dtype.size_bytes() as usize;
    let mut bytes = vec![0; elems as usize * size];
    for elem in bytes.chunks_exact_mut(size) {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        dtype.write(f64::from(state >> 8) / f64::from(1 << 23) - 1.0, elem);
    }
    bytes
}

fn upload(backend: &RocmBackend, bytes: &[u8]) -> Result<DevBuffer, Error> {
    let mut buffer = backend.memory().alloc(bytes.len() as u64)?;
    backend.memory().upload(bytes, &mut buffer)?;
    Ok(buffer)
}

/// Worst error over the contract's allowance: twice the unfused algorithm's, and 1e-4.
fn check(backend: &RocmBackend, problem: &ValidFwd) -> Result<f64, Error> {
    let q = numbers(problem.dtype_qk, problem.shape_q().num_elems(), 1);
    let k = numbers(problem.dtype_qk, problem.shape_k().num_elems(), 2);
    let v = numbers(problem.dtype_v, problem.shape_v().num_elems(), 3);
    let (dev_q, dev_k, dev_v) = (upload(backend, &q)?, upload(backend, &k)?, upload(backend, &v)?);
    let mut bytes = vec![0; (problem.shape_o().num_elems() * problem.dtype_o.size_bytes()) as usize];
    let mut o = backend.memory().alloc(bytes.len() as u64)?;
    let plan = backend.plan_fwd(problem, &PlanOptions::default())?;
    let args = FwdArgs::new(dev_q.slice(), dev_k.slice(), dev_v.slice(), o.slice_mut());
    backend.run_fwd(&plan, &args, Stream::DEFAULT)?;
    backend.memory().synchronize(Stream::DEFAULT)?;
    backend.memory().download(&o, &mut bytes)?;

    let host = FwdArgs::new(
        DevSlice::host(&q),
        DevSlice::host(&k),
        DevSlice::host(&v),
        DevSliceMut::host::<u8>(&mut []),
    );
    let dims = problem.dims;
    let (mut error, mut same_error) = (0.0f64, 0.0f64);
    for i_head in [0, dims.num_heads_q - 1] {
        let i_batch = if i_head == 0 { 0 } else { dims.batch - 1 };
        let span = SeqSpan {
            i_batch,
            storage_batch: i_batch,
            q_row: 0,
            seqlen_q: dims.seqlen_q,
            k_row: 0,
            seqlen_k: dims.seqlen_k,
        };
        let exact = forward_head(problem, &Inputs::from(&host), span, i_head, Precision::Exact)?;
        let same = forward_head(problem, &Inputs::from(&host), span, i_head, Precision::AsInput)?;
        for (at, (exact, same)) in exact.o.iter().zip(&same.o).enumerate() {
            let (i, d) = (at as u32 / dims.head_dim_v, at as u32 % dims.head_dim_v);
            let offset =
                problem.o.offset(i_batch, i, i_head, d) as usize * problem.dtype_o.size_bytes() as usize;
            let ours = problem.dtype_o.read(&bytes[offset..]);
            if ours.is_nan() {
                return Ok(f64::NAN);
            }
            error = error.max((ours - exact).abs());
            same_error = same_error.max((same - exact).abs());
        }
    }
    Ok(error / (2.0 * same_error + 1e-4))
}

/// Milliseconds of one call, the best of five times ten, and the rate.
fn time(backend: &RocmBackend, problem: &ValidFwd) -> Result<(f64, f64), Error> {
    const CALLS: u32 = 10;
    let q = upload(backend, &numbers(problem.dtype_qk, problem.shape_q().num_elems(), 1))?;
    let k = upload(backend, &numbers(problem.dtype_qk, problem.shape_k().num_elems(), 2))?;
    let v = upload(backend, &numbers(problem.dtype_v, problem.shape_v().num_elems(), 3))?;
    let mut o = backend.memory().alloc(problem.shape_o().num_elems() * problem.dtype_o.size_bytes())?;
    let plan = backend.plan_fwd(problem, &PlanOptions::default())?;
    let (start, stop) = (backend.create_event()?, backend.create_event()?);
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        start.record(Stream::DEFAULT)?;
        for _ in 0..CALLS {
            let args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
            backend.run_fwd(&plan, &args, Stream::DEFAULT)?;
        }
        stop.record(Stream::DEFAULT)?;
        best = best.min(f64::from(stop.milliseconds_since(&start)?) / f64::from(CALLS));
    }
    let dims = problem.dims;
    let pairs = fmha_core::work::visible_pairs(problem.mask, dims.seqlen_q, dims.seqlen_k) as f64
        * f64::from(dims.batch)
        * f64::from(dims.num_heads_q);
    let flops = 2.0 * f64::from(dims.head_dim_qk + dims.head_dim_v) * pairs;
    Ok((best, flops / (best * 1e-3) / 1e12))
}
