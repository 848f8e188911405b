//! Time that the host takes to issue a call, forward and backward: checks, arguments, tensor maps, the
//! driver. For comparison, the driver alone, which launches an empty kernel with equally many bytes of
//! parameters.
//!
//! `cargo run --release -p fmha-cuda --example issue_time`, on a machine with a device.

use std::time::Instant;

use std::ffi::c_void;

use fmha_core::source::{ENTRY, KernelSource};
use fmha_core::{
    BwdArgs, BwdProblem, DType, DevBuffer, Dims, FwdArgs, FwdProblem, MaskSpec, PlanOptions, Result, Shape,
    Stream,
};
use fmha_cuda::own::OwnKernels;

const CALLS: usize = 4000;
/// Calls before the host waits for the device: fewer than a stream can queue.
const BURST: usize = 200;
/// Calls before the host waits, as in an engine that waits for the tokens of each step.
const SHORT_BURST: usize = 8;
/// Bytes of the parameters of a forward launch.
const PARAMETERS: usize = 1024;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let backend = fmha_cuda::open(0, None)?;
    println!("{}", backend.name());
    let dims = |seqlen, heads, dim| Dims::batch(1).seqlens(seqlen, seqlen).heads(heads, heads).head_dim(dim);
    let decode = |seqlen_q| Dims { seqlen_q, num_heads_kv: 8, ..dims(4096, 32, 128) };
    let dynamic = vec![("order".to_owned(), "dynamic".to_owned())];
    for (name, dims, mask, tile) in [
        ("one wave", dims(64, 4, 64), MaskSpec::NONE, Vec::new()),
        ("claimed tiles", dims(512, 40, 128), MaskSpec::CAUSAL, dynamic),
        ("one token, parts and their merge", decode(1), MaskSpec::NONE, Vec::new()),
        ("eight tokens, parts and their merge", decode(8), MaskSpec::NONE, Vec::new()),
    ] {
        let problem = FwdProblem::batch(DType::Bf16, dims).mask(mask).validate()?;
        let plan = backend.plan_fwd(&problem, &PlanOptions::default().tile(tile))?;
        let memory = backend.memory();
        let tensor = |shape: Shape| memory.alloc(shape.num_elems() * 2);
        let (q, mut o) = (tensor(problem.shape_q())?, tensor(problem.shape_o())?);
        let (k, v) = (tensor(problem.shape_k())?, tensor(problem.shape_v())?);
        let mut workspace = memory.workspace(plan.workspace())?;
        let stream = backend.stream()?;
        let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
        args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
        let timed = Issued::of(&stream, || plan.run(&mut args, &stream))?;
        println!("{name} ({}): {timed}", plan.kernel());
    }
    // A backward without a mask has one more launch, which repairs far queries.
    for (name, mask) in [("backward", MaskSpec::NONE), ("backward, causal", MaskSpec::CAUSAL)] {
        let fwd = FwdProblem::batch(DType::Bf16, dims(64, 4, 64)).mask(mask);
        let problem = BwdProblem::new(fwd).validate()?;
        let plan = backend.plan_bwd(&problem, &PlanOptions::default())?;
        let memory = backend.memory();
        let fwd = &plan.problem().fwd;
        let tensor = |shape: Shape| memory.alloc(shape.num_elems() * 4);
        let [q, o, dout, lse] = [(); 4].map(|()| tensor(fwd.shape_q()));
        let [k, v] = [(); 2].map(|()| tensor(fwd.shape_k()));
        let (q, k, v, o, dout, lse) = (q?, k?, v?, o?, dout?, lse?);
        let (mut dq, mut dk, mut dv) =
            (tensor(fwd.shape_q())?, tensor(fwd.shape_k())?, tensor(fwd.shape_k())?);
        let mut workspace = memory.workspace(plan.workspace())?;
        let stream = backend.stream()?;
        let inputs = ([q.slice(), k.slice(), v.slice()], [o.slice(), lse.slice(), dout.slice()]);
        let mut args = BwdArgs::new(inputs.0, inputs.1, [dq.slice_mut(), dk.slice_mut(), dv.slice_mut()])
            .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
        let timed = Issued::of(&stream, || plan.run(&mut args, &stream))?;
        println!("{name} ({}): {timed}", plan.kernel());
    }
    let kernels = OwnKernels::open(0, None)?;
    let entry = format!(
        "struct Bytes {{ char at[{PARAMETERS}]; }};\nextern \"C\" __global__ void {ENTRY}(Bytes) {{}}\n"
    );
    let empty = kernels.load("empty", KernelSource::with(entry, Vec::new()), 32, 0)?;
    let stream = backend.stream()?;
    let mut bytes = [0u8; PARAMETERS];
    for launches in [1, 2] {
        let timed = Issued::of(&stream, || {
            (0..launches).try_for_each(|_| {
                // SAFETY: the kernel takes these bytes, and reads nothing.
                unsafe { kernels.launch(&empty, 1, &mut [(&raw mut bytes).cast::<c_void>()], &stream) }
            })
        })?;
        println!("the driver alone, {launches} of an empty kernel: {timed}");
    }
    Ok(())
}

/// Times of a call, over all calls.
struct Issued {
    /// Least, median and 90th percentile of the calls in us, each with the number of calls queued before the
    /// host waits.
    by_burst: [(usize, [f64; 3]); 2],
    on_device: f64,
}

impl Issued {
    /// Times of [`CALLS`] calls.
    fn of(stream: &Stream, mut call: impl FnMut() -> Result<()>) -> Result<Self> {
        let mut by_burst = [(BURST, [0.0; 3]), (SHORT_BURST, [0.0; 3])];
        for (burst, figures) in &mut by_burst {
            let mut us = Vec::with_capacity(CALLS);
            for i in 0..CALLS + *burst {
                let start = Instant::now();
                call()?;
                // The first burst is a warm-up and is not counted.
                if i >= *burst {
                    us.push(start.elapsed().as_secs_f64() * 1e6);
                }
                if i % *burst == 0 {
                    stream.synchronize()?;
                }
            }
            us.sort_unstable_by(f64::total_cmp);
            *figures = [us[0], us[CALLS / 2], us[CALLS * 9 / 10]];
        }
        stream.synchronize()?;
        let on_device = stream.seconds(|| (0..BURST).try_for_each(|_| call()))? * 1e6 / BURST as f64;
        Ok(Self { by_burst, on_device })
    }
}

impl std::fmt::Display for Issued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (burst, [least, middle, most]) in self.by_burst {
            write!(
                f,
                "{least:.2} us at the least, {middle:.2} in the middle, 9 of 10 in {most:.2} (bursts of {burst}); "
            )?;
        }
        write!(f, "{:.2} us by the device's clock", self.on_device)
    }
}
