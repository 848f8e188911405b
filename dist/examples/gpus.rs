//! Attention over the GPUs of one host, a process each, beside one GPU: times, and whether the bits are equal.
//!
//! ```text
//!  for r in 0 1; do
//!    CUDA_VISIBLE_DEVICES=$r RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
//!      cargo run --release -p fmha-dist --features cuda --example gpus -- forward 32768 b gather,ring [libnccl.so.2] &
//!  done; wait
//! ```
//!
//! Arguments: what to do, tokens, masks, schemes, the library's path (or `-`), how often to run for equal bits (0: plan alone, which
//! compiles what is not in the cache yet). bf16, batch 1, 32 query heads, 8 of keys, head dim 128.
//!
//! - forward, backward, deterministic (backward)
//! - modified: forward with ALiBi and dropout
//! - packed: forward of documents of unlike lengths
//! - decode: one query that all ranks have, against a cache of so many tokens, of which each has a part
//! - capture: forward, recorded once and replayed as often as it is to run
//! - slow, dead: forward, whose last rank comes late, or ends itself, before the last run; what the others hear, and when
//!
//! `gather:whole` brings all keys before the kernels, `gather:flags` while they run or not at all; `mixed` takes two GPUs for a
//! host. The first rank measures the links, and prints what the model of scale predicts from them and one device's speed.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fmha::{
    Backend, Bias, BwdArgs, BwdProblem, DType, DevBuffer, Device, Dims, DropoutSeed, FwdArgs, FwdProblem,
    MaskSpec, PlanOptions, ScoreArgs, Stream, bf16,
};
use fmha_dist::{
    Block, BwdPlan, Exchange, FwdPlan, Group, Links, Nccl, Options, Parcel, Partition, Problem, Rendezvous,
    Scheme, choose, connect,
};

type AnyError = Box<dyn std::error::Error>;

/// How many numbers are drawn before they repeat: drawing takes longer than all else. Odd, so that rows differ.
const DRAWN: usize = (1 << 23) + 1237;

/// Numbers that every rank makes alike.
fn noise(seed: u64, count: usize) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    let drawn: Vec<bf16> = (0..count.min(DRAWN)).map(next).collect();
    let mut all = Vec::with_capacity(count);
    while all.len() < count {
        all.extend_from_slice(&drawn[..drawn.len().min(count - all.len())]);
    }
    all
}

fn upload(device: &Device, bytes: &[u8]) -> Result<DevBuffer, fmha::Error> {
    let mut buffer = device.memory().alloc(bytes.len() as u64)?;
    device.memory().upload(bytes, &mut buffer)?;
    Ok(buffer)
}

/// Of tokens that take seconds, two calls.
fn calls(tokens: u32) -> usize {
    if tokens > 1 << 18 { 2 } else { 5 }
}

/// Queries whose results are compared with one device's: of more, the host would take longer than the devices.
const MOST_COMPARED: u32 = 65536;

/// Rows of a tensor and their heads.
type RowsOf = (usize, usize);

/// What is wrong with the last rank.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    Slow,
    Dead,
}

/// What all runs have in common.
struct Bench {
    /// Whether runs are recorded and replayed.
    captures: bool,
    trouble: Option<Trouble>,
    device: Device,
    group: Arc<dyn Group>,
    stream: Stream,
    whole: FwdProblem,
    queries: Partition,
    keys: Partition,
    /// The first row of each document, and the end.
    offsets: Option<(Vec<u32>, DevBuffer)>,
    slopes: DevBuffer,
    calls: usize,
    /// How often each plan runs, for the same bits each time.
    repeats: usize,
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
    /// The fastest of some calls, in seconds, behind one that makes connections. Before each all ranks rest: a busy GPU's clock
    /// falls within a tenth of a second, and one device's calls are longer than its share of them.
    fn fastest(&self, mut call: impl FnMut() -> Result<(), AnyError>) -> Result<f64, AnyError> {
        let mut fastest = f64::INFINITY;
        call()?;
        for _ in 0..self.calls {
            self.stream.synchronize()?;
            std::thread::sleep(Duration::from_millis(250));
            self.group.share(&[])?;
            let (start, stop) = (self.device.event()?, self.device.event()?);
            start.record(&self.stream)?;
            call()?;
            stop.record(&self.stream)?;
            fastest = fastest.min(stop.seconds_since(&start)?);
        }
        Ok(fastest)
    }

    fn score(&self) -> ScoreArgs<'_> {
        let slopes = matches!(self.whole.score.bias, Bias::Alibi { .. }).then(|| self.slopes.slice());
        ScoreArgs::default().alibi_slopes(slopes).dropout(DropoutSeed { seed: 7, offset: 0 })
    }

    fn compares(&self) -> bool {
        self.queries.rows() <= MOST_COMPARED
    }

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

    /// Runs again, and says how often the bits were others than the first time.
    fn again(&self, what: &str, mut run: impl FnMut() -> Result<Vec<u8>, AnyError>) -> Result<(), AnyError> {
        if self.repeats < 2 {
            return Ok(());
        }
        let first = run()?;
        let mut others = 0;
        for _ in 1..self.repeats {
            others += usize::from(run()? != first);
        }
        let all = self.group.share(&(others as u64).to_le_bytes())?;
        let others: u64 =
            all.iter().filter_map(|bytes| Some(u64::from_le_bytes(bytes[..].try_into().ok()?))).sum();
        if self.is_first() {
            println!("{what}: of {} runs of {} ranks {others} had other bits", self.repeats, all.len());
        }
        Ok(())
    }

    /// What the model predicts where one device takes so long.
    fn predicted(
        &self,
        problem: &Problem,
        options: &Options,
        scheme: Scheme,
        (backward, alone): (bool, f64),
    ) -> Option<f64> {
        let mut options = options.clone();
        // Of any rate, one device's seconds; from those the rate that it has.
        let rate = |links: &mut Links, flops: f64| (links.fwd_flops, links.bwd_flops) = (flops, flops);
        rate(&mut options.links, 1e12);
        let ranks = self.group.size();
        let seconds = |options: &Options| {
            let choice = choose(problem, ranks, backward, options).ok()?;
            choice.considered.into_iter().find(|(of, _)| *of == scheme)?.1.ok()
        };
        let at_1e12 = seconds(&options)?;
        let one = at_1e12.efficiency * at_1e12.seconds * f64::from(ranks);
        rate(&mut options.links, 1e12 * one / alone);
        Some(seconds(&options)?.seconds)
    }

    /// Bytes a second of an exchange that all ranks have with their neighbours, and seconds of one of nothing.
    fn links(&self) -> Result<Links, AnyError> {
        const BYTES: [u64; 2] = [32 << 20, 256 << 20];
        let (rank, size) = (self.group.rank(), self.group.size());
        let from = self.device.memory().alloc(BYTES[1])?;
        let mut to = self.device.memory().alloc(BYTES[1])?;
        let mut seconds = [0.0; 2];
        for (seconds, bytes) in seconds.iter_mut().zip(BYTES) {
            let block = Block { offset: 0, rows: 1, row_bytes: bytes, stride: bytes };
            let parcel = |peer| Parcel { peer, buffer: 0, block };
            let exchange = Exchange {
                sends: vec![parcel((rank + 1) % size)],
                receives: vec![parcel((rank + size - 1) % size)],
            };
            let once = || {
                Ok(self.group.exchange(&exchange, &[from.slice()], &mut [to.slice_mut()], &self.stream)?)
            };
            *seconds = self.slowest(self.fastest(once)?)?;
        }
        let mut links = Links::default();
        links.bytes_per_second = (BYTES[1] - BYTES[0]) as f64 / (seconds[1] - seconds[0]);
        links.latency = (seconds[0] - BYTES[0] as f64 / links.bytes_per_second).max(1e-6);
        if self.is_first() {
            let (rate, latency) = (links.bytes_per_second * 1e-9, links.latency * 1e6);
            println!("links: {rate:.0} GB/s each way, {latency:.0} us");
        }
        Ok(links)
    }

    /// The most of all ranks' seconds.
    fn slowest(&self, seconds: f64) -> Result<f64, AnyError> {
        let all = self.group.share(&seconds.to_le_bytes())?;
        Ok(all
            .iter()
            .filter_map(|bytes| Some(f64::from_le_bytes(bytes[..].try_into().ok()?)))
            .fold(0.0, f64::max))
    }

    /// The slowest rank's seconds, and the share of so many times one device's speed.
    fn report(
        &self,
        (name, scheme): (&str, Scheme),
        (problem, options): (&Problem, &Options),
        (backward, alone): (bool, f64),
        seconds: f64,
    ) -> Result<(), AnyError> {
        let (slowest, ranks) = (self.slowest(seconds)?, self.group.size());
        if self.is_first() {
            let share = alone / (f64::from(ranks) * slowest);
            let predicted = self.predicted(problem, options, scheme, (backward, alone)).unwrap_or(f64::NAN);
            println!(
                "{name}: {:.3} ms, {share:.3} of {ranks} devices; predicted {:.3} ms ({:+.1} %)",
                slowest * 1e3,
                predicted * 1e3,
                100.0 * (predicted / slowest - 1.0)
            );
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
        let seconds = self.fastest(|| {
            let workspace = workspace.as_mut().map(DevBuffer::slice_mut);
            let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut()).score(self.score());
            if let Some((rows, offsets)) = &self.offsets {
                let total = rows.last().copied().unwrap_or(0);
                args.seq.totals = fmha::Totals::packed(total, total);
                args.seq.cu_seqlens_q = Some(offsets.slice());
                args.seq.cu_seqlens_k = Some(offsets.slice());
            }
            Ok(plan.run(&mut args.lse(lse.slice_mut()).workspace(workspace), &self.stream)?)
        })?;
        if self.is_first() {
            println!("{}: one device {:.3} ms ({})", self.device.name(), seconds * 1e3, plan.kernel());
        }
        // What backward reads, or what is compared.
        let wanted = self.compares() || !inputs[3].is_empty();
        let (o, lse) = match wanted {
            true => (self.download(&o, rows * 32 * 256)?, self.download(&lse, rows * 128)?),
            false => (Vec::new(), Vec::new()),
        };
        Ok((Whole { inputs, o, lse }, seconds))
    }

    fn forward(
        &self,
        name: &str,
        scheme: Scheme,
        problem: &Problem,
        options: &Options,
        whole: &Whole,
        alone: f64,
    ) -> Result<(), AnyError> {
        let mut plan = FwdPlan::new(problem, self.group.clone(), &self.device, options)?;
        if self.is_first() {
            let text = plan.explain();
            text.lines().filter(|line| line.starts_with("keys")).for_each(|line| println!("{name}: {line}"));
        }
        let rows = u64::from(self.queries.rows_of(self.group.rank()));
        let [q, k, v, _] = &whole.inputs;
        let q = self.own(&self.queries, bytes(q), 32)?;
        let [k, v] = [self.own(&self.keys, bytes(k), 8)?, self.own(&self.keys, bytes(v), 8)?];
        let mut o = self.device.memory().alloc(rows * 32 * 256)?;
        let mut lse = self.device.memory().alloc(rows * 128)?;
        let mut run = |o: &mut DevBuffer| -> Result<(), AnyError> {
            let args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut()).score(self.score());
            Ok(plan.run(&mut args.lse(lse.slice_mut()), &self.stream)?)
        };
        if let Some(trouble) = self.trouble {
            return self.in_trouble(trouble, || run(&mut o));
        }
        let seconds = self.fastest(|| run(&mut o))?;
        self.stream.synchronize()?;
        if self.compares() {
            self.compare("O", &self.download(&o, rows * 32 * 256)?, &self.queries, &whole.o, 32);
        }
        self.report((name, scheme), (problem, options), (false, alone), seconds)?;
        let recording = match self.captures {
            false => None,
            true => Some(
                self.stream
                    .capture(|| run(&mut o).map_err(|error| fmha::Error::NoDevice(error.to_string())))?,
            ),
        };
        self.again(name, || {
            match &recording {
                None => run(&mut o)?,
                // SAFETY: what the run names lives until the stream has done it, which is waited for below.
                Some(recording) => unsafe { recording.replay(&self.stream)? },
            }
            self.stream.synchronize()?;
            self.download(&o, rows * 32 * 256)
        })
    }

    /// What the other ranks hear of one that is late, or gone, and when.
    fn in_trouble(
        &self,
        trouble: Trouble,
        mut run: impl FnMut() -> Result<(), AnyError>,
    ) -> Result<(), AnyError> {
        run()?;
        self.stream.synchronize()?;
        self.group.share(&[])?;
        let start = Instant::now();
        let is_last = self.group.rank() + 1 == self.group.size();
        match trouble {
            Trouble::Slow if is_last => std::thread::sleep(self.group.timeout() * 2),
            Trouble::Dead if is_last => std::process::abort(),
            _ => {}
        }
        let queued = run();
        self.stream.synchronize()?;
        // A moment for what the device has found.
        std::thread::sleep(Duration::from_millis(200));
        let heard = queued.and_then(|()| run()).err().map_or("nothing".to_owned(), |error| error.to_string());
        let (rank, seconds) = (self.group.rank(), start.elapsed().as_secs_f64());
        println!(
            "{trouble:?}: rank {rank} heard after {seconds:.1} s of a timeout of {:?}: {heard}",
            self.group.timeout()
        );
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
        let seconds = self.fastest(|| {
            let mut args = arguments(&all, &mut grads)?;
            args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
            Ok(plan.run(&mut args, &self.stream)?)
        })?;
        if self.is_first() {
            println!("backward: one device {:.3} ms ({})", seconds * 1e3, plan.kernel());
        }
        let mut host = match self.compares() {
            true => [q, k, v].map(|x| bytes(x).to_vec()),
            false => Default::default(),
        };
        for (host, buffer) in host.iter_mut().zip(&grads) {
            self.device.memory().download(buffer, host)?;
        }
        Ok((host, seconds))
    }

    fn backward(
        &self,
        name: &str,
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
        let seconds = self.fastest(|| Ok(plan.run(&mut arguments(&all, &mut grads)?, &self.stream)?))?;
        self.stream.synchronize()?;
        for ((name, part, (rows, heads)), (grad, expected)) in
            tensors.iter().copied().zip(grads.iter().zip(expected))
        {
            if self.compares() {
                let own = self.download(grad, (rows * heads * 256) as u64)?;
                self.compare(name, &own, part, expected, heads as u64);
            }
        }
        self.report((name, scheme), (problem, options), (true, *alone), seconds)?;
        self.again(name, || {
            plan.run(&mut arguments(&all, &mut grads)?, &self.stream)?;
            self.stream.synchronize()?;
            let mut bytes = Vec::new();
            for ((_, _, (rows, heads)), grad) in tensors.iter().zip(&grads) {
                bytes.extend(self.download(grad, (rows * heads * 256) as u64)?);
            }
            Ok(bytes)
        })
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

/// The first row of documents of unlike lengths, and the end.
fn documents(tokens: u32) -> Vec<u32> {
    let mut ends = vec![0];
    let mut state = 12345u32;
    while let Some(&last) = ends.last()
        && last < tokens
    {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ends.push(tokens.min(last + 1000 + (state >> 8) % (tokens / 6)));
    }
    ends
}

fn main() -> Result<(), AnyError> {
    let args: Vec<String> = std::env::args().collect();
    let arg = |at: usize, default: &str| args.get(at).map_or(default, String::as_str).to_owned();
    let operation = arg(1, "forward");
    let tokens: u32 = arg(2, "32768").parse()?;
    let library = args.get(5).filter(|path| *path != "-").map(PathBuf::from);
    let repeats: usize = arg(6, "1").parse()?;

    let trouble = match &*operation {
        "slow" => Some(Trouble::Slow),
        "dead" => Some(Trouble::Dead),
        _ => None,
    };
    let timeout = Duration::from_secs(if trouble.is_some() { 3 } else { 60 });
    let control = connect(&Rendezvous::from_env()?, timeout)?;
    let ranks = control.size();
    let device = Device::open(Backend::Cuda { ordinal: 0, emulate: None })?;
    let group: Arc<dyn Group> = Arc::new(Nccl::new(control, library.as_deref())?);

    let seqlen_q = if operation == "decode" { 1 } else { tokens };
    let (seqlen_k, num_heads_q, num_heads_kv) = (tokens, 32, 8);
    let mut dims =
        Dims { batch: 1, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk: 128, head_dim_v: 128 };
    let (queries, keys) = if operation == "decode" {
        (Partition::replicated(1, ranks), Partition::contiguous(tokens, ranks))
    } else {
        (Partition::zig_zag(tokens, ranks), Partition::zig_zag(tokens, ranks))
    };
    let mut offsets = None;
    if operation == "packed" {
        let rows = documents(tokens);
        dims.batch = rows.len() as u32 - 1;
        let longest = rows.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0);
        (dims.seqlen_q, dims.seqlen_k) = (longest, longest);
        let buffer = upload(&device, bytemuck::cast_slice(&rows))?;
        offsets = Some((rows, buffer));
    }
    let mut whole = match &offsets {
        None => FwdProblem::batch(DType::Bf16, dims),
        Some(_) => FwdProblem::group(DType::Bf16, dims),
    };
    if operation == "modified" {
        whole = whole.p_drop(0.1).bias(Bias::Alibi { per_batch: false });
    }
    let slopes: Vec<f32> = (1..=32).map(|head| (-0.25 * head as f32).exp2()).collect();
    let is_backward = matches!(operation.as_str(), "backward" | "deterministic");
    let rows_of_dout = if is_backward { seqlen_q } else { 0 };
    let inputs = [(1, seqlen_q, 32), (2, tokens, 8), (3, tokens, 8), (4, rows_of_dout, 32)]
        .map(|(seed, rows, heads)| noise(seed, rows as usize * heads * 128 * usize::from(repeats > 0)));
    let mut bench = Bench {
        captures: operation == "capture",
        trouble,
        stream: device.stream()?,
        slopes: upload(&device, bytemuck::cast_slice(&slopes))?,
        device,
        group,
        whole,
        queries,
        keys,
        offsets,
        calls: calls(tokens),
        repeats,
    };
    let kernels = PlanOptions::default().deterministic(operation == "deterministic");
    let measured = if repeats > 0 && trouble.is_none() { bench.links()? } else { Links::default() };
    for mask in arg(3, "b").split('/') {
        let mask: MaskSpec = mask.parse()?;
        bench.whole = bench.whole.clone().mask(mask).write_lse(true);
        if bench.is_first() {
            println!("{operation}, {tokens} tokens, mask {mask}");
        }
        let backward = is_backward;
        let alone = match repeats {
            0 => {
                bench.device.plan_fwd(&bench.whole.clone().validate()?, &kernels)?;
                if backward {
                    bench.device.plan_bwd(&BwdProblem::new(bench.whole.clone()).validate()?, &kernels)?;
                }
                None
            }
            _ => {
                let (whole, alone) = bench.alone(inputs.clone(), &kernels)?;
                let gradients = backward.then(|| bench.backward_alone(&whole, &kernels)).transpose()?;
                Some((whole, alone, gradients))
            }
        };
        for name in arg(4, if operation == "decode" { "decode" } else { "gather,ring" }).split(',') {
            let (of, way) = name.split_once(':').unwrap_or((name, ""));
            let flags = match way {
                "flags" => Some(true),
                "whole" => Some(false),
                _ => None,
            };
            let scheme: Scheme = of.parse()?;
            let problem = Problem::new(bench.whole.clone(), bench.queries.clone()).keys(bench.keys.clone());
            let problem = match &bench.offsets {
                None => problem,
                Some((rows, _)) => problem.packed(rows.clone(), rows.clone()),
            };
            let mut links = measured;
            links.ranks_per_host = (scheme == Scheme::Mixed).then_some(2);
            let options =
                Options::default().scheme(scheme).kernels(kernels.clone()).flags(flags).links(links);
            let group = bench.group.clone();
            match &alone {
                None if backward => {
                    BwdPlan::new(&problem, (DType::Bf16, false), group, &bench.device, &options)?;
                }
                None => {
                    FwdPlan::new(&problem, group, &bench.device, &options)?;
                }
                Some((whole, _, Some(gradients))) => {
                    bench.backward(name, scheme, &problem, &options, whole, gradients)?;
                }
                Some((whole, alone, None)) => {
                    bench.forward(name, scheme, &problem, &options, whole, *alone)?;
                }
            }
        }
        bench.group.share(&[])?;
    }
    Ok(())
}
