//! The ladder: one attention from the naive kernel to the library's, a step at a time, each checked and timed.
//!
//! `cargo run --release --example ladder [FOLDER]` on an NVIDIA GPU, or without one on an emulated Hopper, at
//! a small shape and without times. Prints a table a problem; FOLDER (default `target/ladder`) has it as
//! JSON, Markdown and a plot. `FMHA_EMULATE=sm_80` chooses what is emulated. The rungs are in `rungs/`;
//! `README.md` has an H200's figures.

mod problem;
mod report;
mod rungs;

use std::ffi::c_void;
use std::path::Path;

use fmha::{Backend, DevBuffer, Device, Dims, Error, FwdPlan, PlanOptions, Stream};
use fmha_core::env;
use fmha_cuda::own::{OwnKernel, OwnKernels, TensorBox, TensorMap};

use problem::Problem;
use report::{Row, Table};
use rungs::{RUNGS, Rung, Wants};

/// Bytes of K and V that fit the L2 cache together with the other tensors, on a device with a cache of 50 MB.
const L2_BYTES: u64 = 24 << 20;

/// Struct `ladder::Call` of `rungs/common.cuh`.
#[repr(C)]
struct Call {
    q: u64,
    k: u64,
    v: u64,
    o: u64,
    seqlen: i32,
    heads: i32,
    l2_heads: i32,
    scale_log2: f32,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "target/ladder".to_owned());
    let named = env::EMULATE.get()?.filter(|arch| arch.starts_with("sm_"));
    let real = if named.is_none() { Backend::CUDA.open().ok() } else { None };
    let (device, emulate) = match real {
        Some(device) => (device, None),
        None => {
            let arch = named.unwrap_or_else(|| "sm_90a".to_owned());
            (Backend::CUDA.emulated(&arch)?.open()?, Some(arch))
        }
    };
    let kernels = OwnKernels::open(0, emulate.as_deref())?;
    println!("{}", device.name());
    // The small shape still has several blocks and tiles on each rung.
    let (batch, heads, seqlen) = if emulate.is_some() { (1, 2, 256) } else { (4, 16, 4096) };
    let mut tables = Vec::new();
    for (dim, causal) in [(128, false), (128, true), (64, false), (64, true)] {
        // An emulated device runs each head dimension and each mask once, which takes seconds.
        if emulate.is_some() && causal != (dim == 64) {
            continue;
        }
        let dims = Dims::batch(batch).seqlens(seqlen, seqlen).heads(heads, heads).head_dim(dim);
        let table = climb(&device, &kernels, Problem::new(&device, dims, causal)?)?;
        println!("\n{}\n{}", table.title(), table.lines());
        tables.push(table);
    }
    report::write(Path::new(&folder), device.name(), &tables)?;
    println!("\nJSON, Markdown and plot: {folder}");
    match tables.iter().flat_map(|table| &table.rows).find(|row| row.failed()) {
        Some(row) => Err(format!("{}: {}", row.name, row.note).into()),
        None => Ok(()),
    }
}

/// Runs every rung on one problem, then the library's kernels.
fn climb(device: &Device, kernels: &OwnKernels, mut problem: Problem) -> Result<Table, Error> {
    let dim = problem.dims.head_dim_qk;
    // The compiler needs half a second for a kernel, so all are compiled in parallel.
    let compiled: Vec<Result<OwnKernel, Error>> = std::thread::scope(|scope| {
        let load = |rung: &Rung| {
            let source = rung.source(dim, problem.causal);
            kernels.load(rung.name, source, rung.threads, rung.smem_bytes(dim))
        };
        let taken = RUNGS.iter().filter(|rung| rung.refusal(kernels, dim).is_none());
        let threads: Vec<_> = taken.map(|rung| scope.spawn(move || load(rung))).collect();
        let lost = |_| Err(Error::NoDevice("a compiling thread ended".to_owned()));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(lost)).collect()
    });
    let mut compiled = compiled.into_iter();
    let top = device.plan_fwd(&problem.valid, &PlanOptions::default())?;
    let mut rows = Vec::new();
    for rung in &RUNGS {
        let mut row = Row::new(rung.name, &format!("rungs/{}", rung.file));
        if let Some(why) = rung.refusal(kernels, dim) {
            row.note = why;
        } else if let Some(kernel) = compiled.next().transpose()? {
            row.registers = kernel.resources.registers;
            row.spill_bytes = kernel.resources.spill_bytes;
            row.smem_bytes = Some(rung.smem_bytes(dim));
            let launch = Launch::new(kernels, rung, &kernel, &problem)?;
            problem.spoil(device)?;
            // SAFETY: the arguments are the rung's, of this problem's tensors, which outlive the stream's work.
            row.measure(device, &problem, |stream| unsafe { launch.queue(stream) })?;
        }
        rows.push(row);
        // The library's mma.sync kernel follows, unless it is the library's best kernel here.
        if rung.wants == Wants::Tma && top.kernel() != "sm80" {
            let plan = device.plan_fwd(&problem.valid, &PlanOptions::default().kernel("sm80"))?;
            rows.push(library(device, &mut problem, &plan)?);
        }
    }
    rows.push(library(device, &mut problem, &top)?);
    Ok(Table::new(&problem, rows))
}

/// Runs a kernel of the library.
fn library(device: &Device, problem: &mut Problem, plan: &FwdPlan) -> Result<Row, Error> {
    let mut row = Row::new(&format!("library's {}", plan.kernel()), "the library");
    let mut workspace = device.memory().workspace(plan.workspace())?;
    problem.spoil(device)?;
    row.measure_mut(device, problem, |problem, stream| {
        let mut args = problem.args();
        args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
        plan.run(&mut args, stream)
    })?;
    Ok(row)
}

/// Kernel of a rung, with its arguments.
struct Launch<'a> {
    kernels: &'a OwnKernels,
    kernel: &'a OwnKernel,
    ctas: u32,
    call: Call,
    maps: Option<[TensorMap; 3]>,
}

impl<'a> Launch<'a> {
    fn new(
        kernels: &'a OwnKernels,
        rung: &Rung,
        kernel: &'a OwnKernel,
        problem: &Problem,
    ) -> Result<Self, Error> {
        let Dims { batch, seqlen_q: seqlen, num_heads_q: heads, head_dim_qk: dim, .. } = problem.dims;
        let [q, k, v, o] =
            [&problem.q, &problem.k, &problem.v, &problem.o].map(|buffer| buffer.slice().as_ptr() as u64);
        let all_heads = u64::from(batch * heads);
        let fit = (L2_BYTES / (4 * u64::from(seqlen) * u64::from(dim))).clamp(1, all_heads);
        let l2_heads = (1..=fit).rev().find(|count| all_heads % count == 0).unwrap_or(1);
        let call = Call {
            q,
            k,
            v,
            o,
            seqlen: seqlen as i32,
            heads: heads as i32,
            l2_heads: l2_heads as i32,
            scale_log2: std::f32::consts::LOG2_E / (dim as f32).sqrt(),
        };
        let row_bytes = 2 * u64::from(heads * dim);
        let map = |name, address| {
            let dims = [dim, seqlen, heads, batch].map(u64::from);
            let strides_bytes = [row_bytes, 2 * u64::from(dim), row_bytes * u64::from(seqlen)];
            let tensor = TensorBox {
                dtype: fmha::DType::Bf16,
                address,
                dims,
                strides_bytes,
                box_dims: [64, 64, 1, 1],
            };
            kernels.tensor_map(name, tensor)
        };
        let maps = if rung.wants == Wants::Nothing {
            None
        } else {
            Some([map("q", q)?, map("k", k)?, map("v", v)?])
        };
        let ctas = batch * heads * (seqlen / rung.queries);
        Ok(Self { kernels, kernel, ctas, call, maps })
    }

    /// # Safety
    /// The problem's tensors live until the launch has run.
    unsafe fn queue(&self, stream: &Stream) -> Result<(), Error> {
        let mut arguments = vec![(&raw const self.call).cast_mut().cast::<c_void>()];
        arguments.extend(self.maps.as_ref().map(|maps| maps.as_ptr().cast_mut().cast::<c_void>()));
        // SAFETY: a rung's entry takes `Call` and the maps; the caller promises that the tensors live.
        unsafe { self.kernels.launch(self.kernel, self.ctas, &mut arguments, stream) }
    }
}
