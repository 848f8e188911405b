//! Attention over the GPUs of one host, a process each, beside one GPU: times, and whether the bits are equal.
//!
//! ```text
//!  for r in 0 1; do
//!    CUDA_VISIBLE_DEVICES=$r RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
//!      cargo run --release -p fmha-dist --features cuda --example gpus -- forward 32768 b gather,ring [libnccl.so.2] &
//!  done; wait
//! ```
//!
//! Arguments: forward, backward, deterministic (backward) or decode; tokens, mask, schemes, the library's path. bf16, batch 1, 32 query heads, 8 of
//! keys, head dim 128; decode: one query that all ranks have, against a cache of so many tokens, of which each has a part.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fmha::{
    Backend, BwdArgs, BwdProblem, DType, DevBuffer, Device, Dims, FwdArgs, FwdProblem, MaskSpec, PlanOptions,
    Stream, bf16,
};
use fmha_dist::{BwdPlan, FwdPlan, Group, Nccl, Options, Partition, Problem, Rendezvous, Scheme, connect};

type AnyError = Box<dyn std::error::Error>;

/// Numbers that every rank makes alike.
fn noise(seed: u64, count: usize) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..count).map(next).collect()
}

fn upload(device: &Device, bytes: &[u8]) -> Result<DevBuffer, fmha::Error> {
    let mut buffer = device.memory().alloc(bytes.len() as u64)?;
    device.memory().upload(bytes, &mut buffer)?;
    Ok(buffer)
}

/// The fastest of some calls, in seconds.
fn fastest(stream: &Stream, mut call: impl FnMut() -> Result<(), AnyError>) -> Result<f64, AnyError> {
    let mut fastest = f64::INFINITY;
    for _ in 0..8 {
        let (start, stop) = (stream.device().event()?, stream.device().event()?);
        start.record(stream)?;
        call()?;
        stop.record(stream)?;
        fastest = fastest.min(stop.seconds_since(&start)?);
    }
    Ok(fastest)
}

/// Rows of a tensor and their heads.
type RowsOf = (usize, usize);

/// What all runs have in common.
struct Bench {
    device: Device,
    group: Arc<dyn Group>,
    stream: Stream,
    whole: FwdProblem,
    queries: Partition,
    keys: Partition,
}

/// Q, K, V and dO of all ranks; O and LSE of one device.
struct Whole {
    inputs: [Vec<bf16>; 4],
    o: Vec<u8>,
    lse: Vec<u8>,
}

fn bytes(elems: &[bf16]) -> &[u8] {
    bytemuck::cast_slice(elems)
}

impl Bench {
    fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    fn download(&self, buffer: &DevBuffer, count: u64) -> Result<Vec<u8>, AnyError> {
        let mut host = vec![0u8; count as usize];
        self.device.memory().download(buffer, &mut host)?;
        Ok(host)
    }

    /// This rank's rows of a tensor of all, on its device.
    fn own(&self, partition: &Partition, whole: &[u8], heads: u64) -> Result<DevBuffer, AnyError> {
        Ok(upload(&self.device, &partition.split(whole, 1, heads * 256, self.group.rank()))?)
    }

    /// This rank's rows of an LSE `[heads, rows]` of all.
    fn own_lse(&self, whole: &[u8]) -> Result<DevBuffer, AnyError> {
        Ok(upload(&self.device, &self.queries.split(whole, 32, 4, self.group.rank()))?)
    }

    /// What this rank computed against its rows of what one device did.
    fn compare(&self, what: &str, own: &[u8], partition: &Partition, whole: &[u8], heads: u64) {
        let wanted = partition.split(whole, 1, heads * 256, self.group.rank());
        let (own, wanted): (&[bf16], &[bf16]) = (bytemuck::cast_slice(own), bytemuck::cast_slice(&wanted));
        let off = own.iter().zip(wanted).map(|(a, b)| (a.to_f32() - b.to_f32()).abs()).fold(0f32, f32::max);
        let differ = own.iter().zip(wanted).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        println!(
            "rank {} {what}: {differ} of {} elements differ, by {off:e} at most",
            self.group.rank(),
            own.len()
        );
    }

    /// The slowest rank's seconds, and the share of so many times one device's speed.
    fn report(&self, scheme: Scheme, alone: f64, seconds: f64) -> Result<(), AnyError> {
        let all = self.group.share(&seconds.to_le_bytes())?;
        let slowest = all.iter().filter_map(|bytes| Some(f64::from_le_bytes(bytes[..].try_into().ok()?)));
        let (slowest, ranks) = (slowest.fold(0.0, f64::max), self.group.size());
        if self.is_first() {
            let share = alone / (f64::from(ranks) * slowest);
            println!("{scheme}: {:.3} ms, {share:.3} of {ranks} devices", slowest * 1e3);
        }
        Ok(())
    }

    /// O and LSE of one device, and its seconds.
    fn alone(&self, inputs: [Vec<bf16>; 4], kernels: &PlanOptions) -> Result<(Whole, f64), AnyError> {
        let (memory, rows) = (self.device.memory(), u64::from(self.queries.rows()));
        let plan = self.device.plan_fwd(&self.whole.clone().validate()?, kernels)?;
        let [q, k, v, _] = &inputs;
        let [q, k, v] = [
            upload(&self.device, bytes(q))?,
            upload(&self.device, bytes(k))?,
            upload(&self.device, bytes(v))?,
        ];
        let (mut o, mut lse) = (memory.alloc(rows * 32 * 256)?, memory.alloc(rows * 128)?);
        let mut workspace = memory.workspace(plan.workspace())?;
        let seconds = fastest(&self.stream, || {
            let workspace = workspace.as_mut().map(DevBuffer::slice_mut);
            let args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
            Ok(plan.run(&mut args.lse(lse.slice_mut()).workspace(workspace), &self.stream)?)
        })?;
        if self.is_first() {
            println!("{}: one device {:.3} ms ({})", self.device.name(), seconds * 1e3, plan.kernel());
        }
        let (o, lse) = (self.download(&o, rows * 32 * 256)?, self.download(&lse, rows * 128)?);
        Ok((Whole { inputs, o, lse }, seconds))
    }

    fn forward(
        &self,
        scheme: Scheme,
        problem: &Problem,
        options: &Options,
        whole: &Whole,
        alone: f64,
    ) -> Result<(), AnyError> {
        let mut plan = FwdPlan::new(problem, self.group.clone(), &self.device, options)?;
        let rows = u64::from(self.queries.rows_of(self.group.rank()));
        let [q, k, v, _] = &whole.inputs;
        let q = self.own(&self.queries, bytes(q), 32)?;
        let [k, v] = [self.own(&self.keys, bytes(k), 8)?, self.own(&self.keys, bytes(v), 8)?];
        let mut o = self.device.memory().alloc(rows * 32 * 256)?;
        let mut lse = self.device.memory().alloc(rows * 128)?;
        let seconds = fastest(&self.stream, || {
            let args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
            Ok(plan.run(&mut args.lse(lse.slice_mut()), &self.stream)?)
        })?;
        self.stream.synchronize()?;
        self.compare("O", &self.download(&o, rows * 32 * 256)?, &self.queries, &whole.o, 32);
        self.report(scheme, alone, seconds)?;
        if self.is_first() {
            print!("{}", plan.explain());
        }
        Ok(())
    }

    /// dQ, dK and dV of one device, and its seconds.
    fn backward_alone(&self, whole: &Whole, kernels: &PlanOptions) -> Result<([Vec<u8>; 3], f64), AnyError> {
        let plan = self.device.plan_bwd(&BwdProblem::new(self.whole.clone()).validate()?, kernels)?;
        let [q, k, v, dout] = &whole.inputs;
        let all = [bytes(q), bytes(k), bytes(v), &whole.o, &whole.lse, bytes(dout)];
        let all = all.into_iter().map(|bytes| upload(&self.device, bytes)).collect::<Result<Vec<_>, _>>()?;
        let mut grads =
            [q, k, v].into_iter().map(|x| upload(&self.device, bytes(x))).collect::<Result<Vec<_>, _>>()?;
        let mut workspace = self.device.memory().workspace(plan.workspace())?;
        let seconds = fastest(&self.stream, || {
            let mut args = arguments(&all, &mut grads)?;
            args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
            Ok(plan.run(&mut args, &self.stream)?)
        })?;
        if self.is_first() {
            println!("backward: one device {:.3} ms ({})", seconds * 1e3, plan.kernel());
        }
        let mut host = [q, k, v].map(|x| bytes(x).to_vec());
        for (host, buffer) in host.iter_mut().zip(&grads) {
            self.device.memory().download(buffer, host)?;
        }
        Ok((host, seconds))
    }

    fn backward(
        &self,
        scheme: Scheme,
        problem: &Problem,
        options: &Options,
        whole: &Whole,
        (expected, alone): &([Vec<u8>; 3], f64),
    ) -> Result<(), AnyError> {
        let mut plan =
            BwdPlan::new(problem, (DType::Bf16, false), self.group.clone(), &self.device, options)?;
        let [q, k, v, dout] = &whole.inputs;
        let (queries, keys) = (&self.queries, &self.keys);
        let all = [
            self.own(queries, bytes(q), 32)?,
            self.own(keys, bytes(k), 8)?,
            self.own(keys, bytes(v), 8)?,
            self.own(queries, &whole.o, 32)?,
            self.own_lse(&whole.lse)?,
            self.own(queries, bytes(dout), 32)?,
        ];
        let tensors: [(&str, &Partition, RowsOf); 3] =
            [("dQ", queries, 32), ("dK", keys, 8), ("dV", keys, 8)]
                .map(|(name, part, heads)| (name, part, (part.rows_of(self.group.rank()) as usize, heads)));
        let alloc =
            |&(_, _, (rows, heads)): &(_, _, RowsOf)| self.device.memory().alloc((rows * heads * 256) as u64);
        let mut grads = tensors.iter().map(alloc).collect::<Result<Vec<_>, _>>()?;
        let seconds =
            fastest(&self.stream, || Ok(plan.run(&mut arguments(&all, &mut grads)?, &self.stream)?))?;
        self.stream.synchronize()?;
        for ((name, part, (rows, heads)), (grad, expected)) in
            tensors.into_iter().zip(grads.iter().zip(expected))
        {
            let own = self.download(grad, (rows * heads * 256) as u64)?;
            self.compare(name, &own, part, expected, heads as u64);
        }
        self.report(scheme, *alone, seconds)?;
        if self.is_first() {
            print!("{}", plan.explain());
        }
        Ok(())
    }
}

/// Q, K, V, O, LSE and dO; dQ, dK and dV.
fn arguments<'a>(inputs: &'a [DevBuffer], grads: &'a mut [DevBuffer]) -> Result<BwdArgs<'a>, AnyError> {
    let ([q, k, v, o, lse, dout], [dq, dk, dv]) = (inputs, grads) else {
        return Err("6 inputs and 3 gradients".into());
    };
    let [q, k, v, o, lse, dout] = [q, k, v, o, lse, dout].map(DevBuffer::slice);
    let [dq, dk, dv] = [dq, dk, dv].map(DevBuffer::slice_mut);
    Ok(BwdArgs::new([q, k, v], [o, lse, dout], [dq, dk, dv]))
}

fn main() -> Result<(), AnyError> {
    let args: Vec<String> = std::env::args().collect();
    let arg = |at: usize, default: &str| args.get(at).map_or(default, String::as_str).to_owned();
    let operation = arg(1, "forward");
    let tokens: u32 = arg(2, "32768").parse()?;
    let mask: MaskSpec = arg(3, "b").parse()?;
    let library = args.get(5).map(PathBuf::from);

    let control = connect(&Rendezvous::from_env()?, Duration::from_secs(60))?;
    let ranks = control.size();
    let device = Device::open(Backend::Cuda { ordinal: 0, emulate: None })?;
    let group: Arc<dyn Group> = Arc::new(Nccl::new(control, library.as_deref())?);

    let seqlen_q = if operation == "decode" { 1 } else { tokens };
    let (seqlen_k, num_heads_q, num_heads_kv) = (tokens, 32, 8);
    let dims =
        Dims { batch: 1, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk: 128, head_dim_v: 128 };
    let (queries, keys) = if operation == "decode" {
        (Partition::replicated(1, ranks), Partition::contiguous(tokens, ranks))
    } else {
        (Partition::zig_zag(tokens, ranks), Partition::zig_zag(tokens, ranks))
    };
    let bench = Bench {
        stream: device.stream()?,
        device,
        group,
        whole: FwdProblem::batch(DType::Bf16, dims).mask(mask).write_lse(true),
        queries,
        keys,
    };
    let inputs = [(1, seqlen_q, 32), (2, tokens, 8), (3, tokens, 8), (4, seqlen_q, 32)]
        .map(|(seed, rows, heads)| noise(seed, rows as usize * heads * 128));
    let kernels = PlanOptions::default().deterministic(operation == "deterministic");
    if bench.is_first() {
        println!("{operation}, {tokens} tokens, mask {mask}");
    }
    let (whole, alone) = bench.alone(inputs, &kernels)?;
    let gradients = match operation.as_str() {
        "backward" | "deterministic" => Some(bench.backward_alone(&whole, &kernels)?),
        _ => None,
    };
    for scheme in arg(4, if operation == "decode" { "decode" } else { "gather,ring" }).split(',') {
        let scheme: Scheme = scheme.parse()?;
        let problem = Problem::new(bench.whole.clone(), bench.queries.clone()).keys(bench.keys.clone());
        let options = Options::default().scheme(scheme).kernels(kernels.clone());
        match &gradients {
            Some(gradients) => bench.backward(scheme, &problem, &options, &whole, gradients)?,
            None => bench.forward(scheme, &problem, &options, &whole, alone)?,
        }
    }
    bench.group.share(&[])?;
    Ok(())
}
