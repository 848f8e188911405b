//! Attention over the GPUs of one host, a process each, beside one GPU: times, and whether the bits are equal.
//!
//! ```text
//!  for r in 0 1; do
//!    CUDA_VISIBLE_DEVICES=$r RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
//!      cargo run --release -p fmha-dist --features cuda --example gpus -- - forward 32768 b gather,ring 1 + backward 8192 b gather 1 &
//!  done; wait
//! ```
//!
//! Arguments: NCCL's path (or `-`), and jobs with `+` between them: what to do, tokens, masks, schemes, how often to run for equal
//! bits (0: plan alone, which compiles what is not in the cache yet). bf16, batch 1, 32 query heads, 8 of keys, head dim 128.
//! `emulated:N` in place of a path plans alone, as N ranks would: kernels for a machine that is to compile none.
//!
//! - forward, backward, deterministic (backward)
//! - modified: forward with ALiBi and dropout
//! - packed: forward of documents of unlike lengths
//! - decode: one query that all ranks have, against a cache of so many tokens, of which each has a part
//! - capture: forward, of one query where the scheme is decode, recorded once; what is timed, and run as often, are replays
//! - parts: of a scheme that gathers, where a run's time goes: run and replayed in turn, the parts on each rank's stream, the host
//! - slow, dead: forward, whose last rank comes late, or ends itself, before the last run; what the others hear, and when
//!
//! `gather:whole` brings all keys before the kernels, `gather:flags` while they run or not at all; `mixed` takes two GPUs for a
//! host. The first rank measures the links, and prints what the model of scale predicts from them and one device's speed. Tensors
//! are made on the devices and compared by their bits on the host, of each 1 GiB at most.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fmha::{
    Backend, Bias, BwdArgs, BwdProblem, DType, DevBuffer, DevSliceMut, Device, Dims, DropoutSeed, Event,
    FwdArgs, FwdProblem, MaskSpec, PlanOptions, ScoreArgs, Stream, bf16,
};
use fmha_dist::{
    Block, BwdPlan, Exchange, FwdPlan, Group, Links, Nccl, Options, Parcel, Partition, Problem, Rendezvous,
    Scheme, choose, connect,
};

type AnyError = Box<dyn std::error::Error>;

/// How many numbers are drawn before they repeat: drawing takes longer than all else. Odd, so that rows differ.
const DRAWN: usize = (1 << 23) + 1237;

/// Bits of a tensor that are compared, at most: of more, the host would take longer than the devices.
const MOST_COMPARED: u64 = 1 << 30;

/// Bytes of an exchange by which links are measured.
const MOST_SENT: u64 = 256 << 20;

/// A call that takes longer than this is not repeated for a better time.
const LONG: f64 = 1.0;

/// Calls that take less run one behind another, until they take as long together: what begins a call on the host is then beside
/// the one before, as it is in a model of many layers.
const TOGETHER: f64 = 20e-3;

/// How many runs are taken apart, one behind another.
const APART: usize = 32;

/// Numbers that every rank makes alike.
fn noise(seed: u64, count: usize) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..count.min(DRAWN)).map(next).collect()
}

fn upload(device: &Device, bytes: &[u8]) -> Result<DevBuffer, fmha::Error> {
    let mut buffer = device.memory().alloc(bytes.len() as u64)?;
    device.memory().upload(bytes, &mut buffer)?;
    Ok(buffer)
}

/// Rows of a tensor and their heads.
type RowsOf = (usize, usize);

/// What is wrong with the last rank.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    Slow,
    Dead,
}

/// A group that marks on the stream where its gathers begin and end.
struct Marked {
    group: Arc<dyn Group>,
    /// Those that have been reached, and those to come; the last first.
    marks: Mutex<[Vec<[Event; 2]>; 2]>,
}

impl Marked {
    /// The marks of gathers since the last time; from here on so many more are marked.
    fn marks(&self, device: &Device, count: usize) -> Result<Vec<[Event; 2]>, fmha::Error> {
        let new = (0..count).map(|_| Ok([device.event()?, device.event()?]));
        let new = [Vec::new(), new.collect::<Result<_, fmha::Error>>()?];
        let [reached, _] =
            std::mem::replace(&mut *self.marks.lock().unwrap_or_else(PoisonError::into_inner), new);
        Ok(reached)
    }
}

impl Group for Marked {
    fn rank(&self) -> u32 {
        self.group.rank()
    }

    fn size(&self) -> u32 {
        self.group.size()
    }

    fn space(&self) -> fmha::MemorySpace {
        self.group.space()
    }

    fn begins(&self, planned: &Arc<[(String, String)]>) -> fmha_dist::Result<()> {
        self.group.begins(planned)
    }

    fn calls(&self) -> u64 {
        self.group.calls()
    }

    fn share(&self, mine: &[u8]) -> fmha_dist::Result<Vec<Vec<u8>>> {
        self.group.share(mine)
    }

    fn exchange(
        &self,
        exchange: &Exchange,
        sources: &[fmha::DevSlice<'_>],
        sinks: &mut [DevSliceMut<'_>],
        stream: &Stream,
    ) -> fmha_dist::Result<()> {
        self.group.exchange(exchange, sources, sinks, stream)
    }

    fn all_gather(&self, bytes: u64, all: &mut DevSliceMut<'_>, stream: &Stream) -> fmha_dist::Result<()> {
        let said = |error: fmha::Error| fmha_dist::Error::new(self.rank(), "event", error.to_string());
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        let Some([begins, ends]) = marks[1].pop() else {
            return self.group.all_gather(bytes, all, stream);
        };
        begins.record(stream).map_err(said)?;
        self.group.all_gather(bytes, all, stream)?;
        ends.record(stream).map_err(said)?;
        marks[0].push([begins, ends]);
        Ok(())
    }

    fn most_rows(&self) -> u64 {
        self.group.most_rows()
    }

    fn timeout(&self) -> Duration {
        self.group.timeout()
    }

    fn failure(&self) -> Option<fmha_dist::Error> {
        self.group.failure()
    }

    fn fail(&self, error: fmha_dist::Error) -> fmha_dist::Error {
        self.group.fail(error)
    }
}

/// What is done with a plan's runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Eager,
    /// They are recorded and replayed.
    Replayed,
    /// They are taken apart.
    Parts,
}

/// What all runs have in common.
struct Bench {
    way: Way,
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
    start: Instant,
    /// From where and to where links are measured.
    links: [DevBuffer; 2],
    /// How often each plan runs, for the same bits each time.
    repeats: usize,
}

/// Q, K, V and dO of all ranks; O and LSE of one device. On each device.
struct Whole {
    inputs: [DevBuffer; 4],
    o: DevBuffer,
    lse: DevBuffer,
}

impl Bench {
    /// The fastest of some calls, in seconds, behind one that makes connections. Before each all ranks rest: a busy GPU's clock
    /// falls within a tenth of a second, and one device's calls are longer than its share of them. Ranks begin together: an
    /// exchange of nothing much on the stream is before the first call.
    fn fastest(&self, mut call: impl FnMut() -> Result<(), AnyError>) -> Result<f64, AnyError> {
        let mut timed = |count: usize| -> Result<f64, AnyError> {
            let (start, stop) = (self.device.event()?, self.device.event()?);
            self.stream.synchronize()?;
            self.meet(1 << 10)?;
            start.record(&self.stream)?;
            for _ in 0..count {
                call()?;
            }
            stop.record(&self.stream)?;
            self.slowest(stop.seconds_since(&start)? / count as f64)
        };
        let mut fastest = timed(1)?;
        if fastest < LONG {
            // Behind the first call's connections and modules, which take longer than many a call.
            fastest = timed(1)?;
        }
        let (calls, together) = match fastest {
            LONG.. => (usize::from(fastest < 5.0), 1),
            TOGETHER.. => (3, 1),
            _ => (4, (TOGETHER / fastest).clamp(1.0, 32.0) as usize),
        };
        for _ in 0..calls {
            std::thread::sleep(Duration::from_millis(200));
            fastest = fastest.min(timed(together)?);
        }
        Ok(fastest)
    }

    /// An exchange of so many bytes that all ranks have with their neighbours, behind which none begins before another.
    fn meet(&self, bytes: u64) -> Result<(), AnyError> {
        let (rank, size) = (self.group.rank(), self.group.size());
        if size == 1 {
            return Ok(());
        }
        let [from, to] = &self.links;
        let block = Block { offset: 0, rows: 1, row_bytes: bytes, stride: bytes };
        let parcel = |peer| Parcel { peer, buffer: 0, block };
        let exchange = Exchange {
            sends: vec![parcel((rank + 1) % size)],
            receives: vec![parcel((rank + size - 1) % size)],
        };
        // SAFETY: the buffer is written by exchanges alone, one behind another on the stream.
        let to = unsafe { DevSliceMut::from_raw(to.space(), to.as_ptr(), to.bytes()) };
        Ok(self.group.exchange(&exchange, &[from.slice()], &mut [to], &self.stream)?)
    }

    fn copy(&self, from: u64, to: u64, bytes: u64) -> Result<(), AnyError> {
        let peers = self.device.peers().ok_or("a device of NVIDIA's")?;
        // SAFETY: callers name places of live buffers of this device.
        Ok(unsafe { peers.copy(from, to, bytes, self.stream.as_raw()) }?)
    }

    /// A tensor that all ranks make alike.
    fn noise(&self, seed: u64, rows: u32, heads: u64) -> Result<DevBuffer, AnyError> {
        let bytes = u64::from(rows) * heads * 256;
        let buffer = self.device.memory().alloc(bytes.max(1))?;
        let drawn = upload(&self.device, bytemuck::cast_slice(&noise(seed, (bytes / 2) as usize)))?;
        let mut at = 0;
        while at < bytes {
            let count = drawn.bytes().min(bytes - at);
            self.copy(drawn.as_ptr() as u64, buffer.as_ptr() as u64 + at, count)?;
            at += count;
        }
        self.stream.synchronize()?;
        Ok(buffer)
    }

    fn say(&self, text: &str) {
        println!("[{:5.1} s] {text}", self.start.elapsed().as_secs_f64());
    }

    fn score(&self) -> ScoreArgs<'_> {
        let slopes = matches!(self.whole.score.bias, Bias::Alibi { .. }).then(|| self.slopes.slice());
        ScoreArgs::default().alibi_slopes(slopes).dropout(DropoutSeed { seed: 7, offset: 0 })
    }

    fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    fn download(&self, buffer: &DevBuffer, count: u64) -> Result<Vec<u8>, AnyError> {
        let mut host = vec![0u8; count as usize];
        self.device.memory().download(buffer, &mut host)?;
        Ok(host)
    }

    /// This rank's rows of a tensor `[planes, rows]` of all, on its device.
    fn own(
        &self,
        partition: &Partition,
        whole: &DevBuffer,
        planes: u64,
        row: u64,
    ) -> Result<DevBuffer, AnyError> {
        let runs = partition.runs(self.group.rank());
        let rows = u64::from(partition.rows_of(self.group.rank()));
        let own = self.device.memory().alloc((planes * rows * row).max(1))?;
        let mut at = own.as_ptr() as u64;
        for plane in 0..planes {
            for run in runs {
                let bytes = u64::from(run.end - run.start) * row;
                let first = (plane * u64::from(partition.rows()) + u64::from(run.start)) * row;
                self.copy(whole.as_ptr() as u64 + first, at, bytes)?;
                at += bytes;
            }
        }
        self.stream.synchronize()?;
        Ok(own)
    }

    /// What this rank computed against its rows of what one device did.
    fn compare(
        &self,
        what: &str,
        own: &DevBuffer,
        partition: &Partition,
        whole: &DevBuffer,
        heads: u64,
    ) -> Result<(), AnyError> {
        let wanted = self.own(partition, whole, 1, heads * 256)?;
        let count = wanted.bytes().min(MOST_COMPARED);
        let (own, wanted) = (self.download(own, count)?, self.download(&wanted, count)?);
        let (mut differ, mut off) = (0, 0f32);
        if own != wanted {
            let (own, wanted): (&[bf16], &[bf16]) =
                (bytemuck::cast_slice(&own), bytemuck::cast_slice(&wanted));
            for (a, b) in own.iter().zip(wanted).filter(|(a, b)| a.to_bits() != b.to_bits()) {
                differ += 1;
                off = off.max((a.to_f32() - b.to_f32()).abs());
            }
        }
        let (rank, count) = (self.group.rank(), count / 2);
        self.say(&format!("rank {rank} {what}: {differ} of {count} elements differ, by {off:e} at most"));
        Ok(())
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
            let (runs, ranks) = (self.repeats, all.len());
            self.say(&format!("{what}: of {runs} runs of {ranks} ranks {others} had other bits"));
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
        let (mut options, measured) = (options.clone(), options.links);
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
        rate(&mut options.links, 1e12 * measured.kept_up(one) / measured.kept_up(alone));
        Some(seconds(&options)?.seconds)
    }

    /// Bytes a second of an exchange that all ranks have with their neighbours, and seconds of one of nothing.
    fn links(&self) -> Result<Links, AnyError> {
        let mut links = Links::default();
        if self.group.size() == 1 {
            return Ok(links);
        }
        links.latency = self.fastest(|| self.meet(1 << 10))?.max(1e-6);
        let seconds = self.fastest(|| self.meet(MOST_SENT))?;
        links.bytes_per_second = MOST_SENT as f64 / (seconds - links.latency).max(1e-6);
        if self.is_first() {
            let (rate, latency) = (links.bytes_per_second * 1e-9, links.latency * 1e6);
            self.say(&format!("links: {rate:.0} GB/s each way, {latency:.0} us"));
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
            self.say(&format!(
                "{name}: {:.3} ms, {share:.3} of {ranks} devices; predicted {:.3} ms ({:+.1} %)",
                slowest * 1e3,
                predicted * 1e3,
                100.0 * (predicted / slowest - 1.0)
            ));
        }
        Ok(())
    }

    /// O and LSE of one device, and its seconds; of no time where backward is what is wanted.
    fn alone(&self, inputs: [DevBuffer; 4], is_timed: bool) -> Result<(Whole, f64), AnyError> {
        let (memory, rows) = (self.device.memory(), u64::from(self.queries.rows()));
        let plan = self.device.plan_fwd(&self.whole.clone().validate()?, &PlanOptions::default())?;
        let [q, k, v, _] = &inputs;
        let (mut o, mut lse) = (memory.alloc(rows * 32 * 256)?, memory.alloc(rows * 128)?);
        let mut workspace = memory.workspace(plan.workspace())?;
        let mut call = || -> Result<(), AnyError> {
            let workspace = workspace.as_mut().map(DevBuffer::slice_mut);
            let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut()).score(self.score());
            if let Some((rows, offsets)) = &self.offsets {
                let total = rows.last().copied().unwrap_or(0);
                args.seq.totals = fmha::Totals::packed(total, total);
                args.seq.cu_seqlens_q = Some(offsets.slice());
                args.seq.cu_seqlens_k = Some(offsets.slice());
            }
            Ok(plan.run(&mut args.lse(lse.slice_mut()).workspace(workspace), &self.stream)?)
        };
        let mut seconds = 0.0;
        if is_timed {
            seconds = self.fastest(call)?;
        } else {
            call()?;
        }
        self.stream.synchronize()?;
        if self.is_first() {
            let (name, kernel) = (self.device.name(), plan.kernel());
            self.say(&format!("{name}: one device {:.3} ms ({kernel})", seconds * 1e3));
        }
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
        let marked = Arc::new(Marked { group: self.group.clone(), marks: Mutex::default() });
        let mut plan = FwdPlan::new(problem, marked.clone(), &self.device, options)?;
        if self.is_first() {
            let text = plan.explain();
            text.lines()
                .filter(|line| line.starts_with("keys"))
                .for_each(|line| self.say(&format!("{name}: {line}")));
        }
        let rows = u64::from(self.queries.rows_of(self.group.rank()));
        let [q, k, v, _] = &whole.inputs;
        let q = self.own(&self.queries, q, 1, 32 * 256)?;
        let [k, v] = [self.own(&self.keys, k, 1, 8 * 256)?, self.own(&self.keys, v, 1, 8 * 256)?];
        let mut o = self.device.memory().alloc(rows * 32 * 256)?;
        let mut lse = self.device.memory().alloc(rows * 128)?;
        let mut run = |o: &mut DevBuffer| -> Result<(), AnyError> {
            let args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut()).score(self.score());
            Ok(plan.run(&mut args.lse(lse.slice_mut()), &self.stream)?)
        };
        if let Some(trouble) = self.trouble {
            return self.in_trouble(trouble, || run(&mut o));
        }
        let recording = if self.way == Way::Eager {
            None
        } else {
            // Connections are made by a run that is not recorded.
            run(&mut o)?;
            self.stream.synchronize()?;
            let recorded = |error: AnyError| fmha::Error::NoDevice(error.to_string());
            Some(self.stream.capture(|| run(&mut o).map_err(recorded))?)
        };
        // SAFETY: what the run names lives until the stream has done it, which is waited for below.
        let replay = |of: &fmha::Recording| Ok(unsafe { of.replay(&self.stream) }?);
        if let (Way::Parts, Some(recording)) = (self.way, &recording) {
            self.in_parts((name, alone), &marked, || run(&mut o), || replay(recording))?;
            self.stream.synchronize()?;
            return self.compare("O", &o, &self.queries, &whole.o, 32);
        }
        let mut call = |o: &mut DevBuffer| match &recording {
            None => run(o),
            Some(recording) => replay(recording),
        };
        let seconds = self.fastest(|| call(&mut o))?;
        self.stream.synchronize()?;
        self.report((name, scheme), (problem, options), (false, alone), seconds)?;
        self.compare("O", &o, &self.queries, &whole.o, 32)?;
        self.again(name, || {
            call(&mut o)?;
            self.stream.synchronize()?;
            self.download(&o, rows * 32 * 256)
        })
    }

    /// Where the time of a run that gathers once goes: run and replayed in turn, and of some runs one behind another, by events on
    /// each rank's stream, what is before the gather, the gather, what is behind it, and what is between two runs.
    fn in_parts(
        &self,
        (name, alone): (&str, f64),
        marked: &Marked,
        mut run: impl FnMut() -> Result<(), AnyError>,
        mut replay: impl FnMut() -> Result<(), AnyError>,
    ) -> Result<(), AnyError> {
        let ranks = self.group.size();
        for _ in 0..3 {
            let [eager, replayed] = [self.fastest(&mut run)?, self.fastest(&mut replay)?];
            if self.is_first() {
                let share = |seconds: f64| alone / (f64::from(ranks) * seconds);
                let [shares, us] = [[eager, replayed].map(share), [eager, replayed].map(|s| s * 1e6)];
                self.say(&format!(
                    "{name}: run {:.1} us ({:.3}), replayed {:.1} us ({:.3})",
                    us[0], shares[0], us[1], shares[1]
                ));
            }
        }
        let mut told = String::new();
        for _ in 0..2 {
            let events = (0..2 * APART).map(|_| self.device.event()).collect::<Result<Vec<_>, _>>()?;
            marked.marks(&self.device, APART)?;
            std::thread::sleep(Duration::from_millis(200));
            self.stream.synchronize()?;
            self.meet(1 << 10)?;
            let begun = Instant::now();
            for ends in events.chunks_exact(2) {
                ends[0].record(&self.stream)?;
                run()?;
                ends[1].record(&self.stream)?;
            }
            let host = begun.elapsed().as_secs_f64() / APART as f64;
            let marks = marked.marks(&self.device, 0)?;
            let mut parts: [Vec<f64>; 5] = Default::default();
            for (at, (ends, [from, to])) in events.chunks_exact(2).zip(&marks).enumerate() {
                parts[0].push(from.seconds_since(&ends[0])?);
                parts[1].push(to.seconds_since(from)?);
                parts[2].push(ends[1].seconds_since(to)?);
                parts[4].push(ends[1].seconds_since(&ends[0])?);
                if let Some(next) = events.get(2 * at + 2) {
                    parts[3].push(next.seconds_since(&ends[1])?);
                }
            }
            let names = ["before the gather", "gather", "behind it", "to the next", "run"];
            for (name, mut part) in names.into_iter().zip(parts) {
                let first = part.first().copied().unwrap_or(f64::NAN);
                part.sort_by(f64::total_cmp);
                let [least, middle, most] = [0, part.len() / 2, part.len().saturating_sub(1)]
                    .map(|at| part.get(at).copied().unwrap_or(f64::NAN) * 1e6);
                let first = first * 1e6;
                let _ = write!(told, "{name} {middle:.1} ({least:.1} to {most:.1}, first {first:.1}), ");
            }
            let _ = writeln!(told, "host {:.1} us a run", host * 1e6);
        }
        // What a run costs whom it waits for: from nothing queued until all is done, by the host's clock.
        let seconds = |call: &mut dyn FnMut() -> Result<(), AnyError>| -> Result<[f64; 2], AnyError> {
            let mut taken = Vec::new();
            for _ in 0..APART {
                self.group.share(&[])?;
                let begun = Instant::now();
                call()?;
                let queued = begun.elapsed().as_secs_f64() * 1e6;
                self.stream.synchronize()?;
                taken.push([queued, begun.elapsed().as_secs_f64() * 1e6]);
            }
            Ok([0, 1].map(|which| {
                taken.sort_by(|a, b| a[which].total_cmp(&b[which]));
                taken[APART / 2][which]
            }))
        };
        for (what, [queued, done]) in [("run", seconds(&mut run)?), ("replayed", seconds(&mut replay)?)] {
            let _ = writeln!(told, "{what} alone: queued after {queued:.1} us, done after {done:.1}");
        }
        for (rank, told) in self.group.share(told.as_bytes())?.iter().enumerate().filter(|_| self.is_first())
        {
            String::from_utf8_lossy(told).lines().for_each(|line| self.say(&format!("rank {rank}: {line}")));
        }
        Ok(())
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
    fn backward_alone(
        &self,
        whole: &Whole,
        kernels: &PlanOptions,
    ) -> Result<([DevBuffer; 3], f64), AnyError> {
        let plan = self.device.plan_bwd(&BwdProblem::new(self.whole.clone()).validate()?, kernels)?;
        let memory = self.device.memory();
        let [q, k, v, dout] = &whole.inputs;
        let all = [q, k, v, &whole.o, &whole.lse, dout];
        let mut grads = [memory.alloc(q.bytes())?, memory.alloc(k.bytes())?, memory.alloc(v.bytes())?];
        let mut workspace = memory.workspace(plan.workspace())?;
        let seconds = self.fastest(|| {
            let mut args = arguments(all, &mut grads);
            args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
            Ok(plan.run(&mut args, &self.stream)?)
        })?;
        if self.is_first() {
            self.say(&format!("backward: one device {:.3} ms ({})", seconds * 1e3, plan.kernel()));
        }
        Ok((grads, seconds))
    }

    fn backward(
        &self,
        name: &str,
        scheme: Scheme,
        problem: &Problem,
        options: &Options,
        whole: &Whole,
        (expected, alone): &([DevBuffer; 3], f64),
    ) -> Result<(), AnyError> {
        let mut plan =
            BwdPlan::new(problem, (DType::Bf16, false), self.group.clone(), &self.device, options)?;
        let [q, k, v, dout] = &whole.inputs;
        let (queries, keys) = (&self.queries, &self.keys);
        let all = [
            self.own(queries, q, 1, 32 * 256)?,
            self.own(keys, k, 1, 8 * 256)?,
            self.own(keys, v, 1, 8 * 256)?,
            self.own(queries, &whole.o, 1, 32 * 256)?,
            self.own(queries, &whole.lse, 32, 4)?,
            self.own(queries, dout, 1, 32 * 256)?,
        ];
        let all = all.each_ref();
        let tensors: [(&str, &Partition, RowsOf); 3] =
            [("dQ", queries, 32), ("dK", keys, 8), ("dV", keys, 8)]
                .map(|(name, part, heads)| (name, part, (part.rows_of(self.group.rank()) as usize, heads)));
        let alloc =
            |&(_, _, (rows, heads)): &(_, _, RowsOf)| self.device.memory().alloc((rows * heads * 256) as u64);
        let [dq, dk, dv] = tensors.each_ref().map(alloc);
        let mut grads = [dq?, dk?, dv?];
        let seconds = self.fastest(|| Ok(plan.run(&mut arguments(all, &mut grads), &self.stream)?))?;
        self.stream.synchronize()?;
        self.report((name, scheme), (problem, options), (true, *alone), seconds)?;
        for (&(name, part, (_, heads)), (grad, expected)) in tensors.iter().zip(grads.iter().zip(expected)) {
            self.compare(name, grad, part, expected, heads as u64)?;
        }
        self.again(name, || {
            plan.run(&mut arguments(all, &mut grads), &self.stream)?;
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
fn arguments<'a>(inputs: [&'a DevBuffer; 6], grads: &'a mut [DevBuffer; 3]) -> BwdArgs<'a> {
    let [q, k, v, o, lse, dout] = inputs.map(DevBuffer::slice);
    BwdArgs::new([q, k, v], [o, lse, dout], grads.each_mut().map(DevBuffer::slice_mut))
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
    let start = Instant::now();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (library, jobs) = args.split_first().ok_or("NCCL's path, - or emulated:ranks, and jobs")?;
    let emulated = library.strip_prefix("emulated:").map(str::parse::<u32>).transpose()?;
    let library = Some(library).filter(|path| *path != "-").map(PathBuf::from);
    let jobs: Vec<&[String]> = jobs.split(|word| word == "+").collect();
    if let Some(ranks) = emulated {
        return plan_emulated(ranks, &jobs, start);
    }
    let troubled = |job: &&[String]| matches!(job.first().map(String::as_str), Some("slow" | "dead"));
    let timeout = Duration::from_secs(if jobs.iter().any(troubled) { 3 } else { 60 });
    let control = connect(&Rendezvous::from_env()?, timeout)?;
    let device = Device::open(Backend::Cuda { ordinal: 0, emulate: None })?;
    let group: Arc<dyn Group> = Arc::new(Nccl::new(control, library.as_deref())?);
    let mut measured = None;
    for job in jobs {
        let job = Job::parse(job)?;
        job.run(&device, &group, (start, &mut measured))?;
        group.share(&[])?;
    }
    Ok(())
}

/// Plans jobs as so many ranks would, on an emulated sm_90a: compiles their kernels where there is no device.
fn plan_emulated(ranks: u32, jobs: &[&[String]], start: Instant) -> Result<(), AnyError> {
    let device = Device::open(Backend::Cuda { ordinal: 0, emulate: Some("sm_90a".into()) })?;
    let plan = |host: fmha_dist::Host| -> Result<(), String> {
        let group: Arc<dyn Group> = Arc::new(Planning(host));
        for job in jobs {
            let job = Job { repeats: 0, ..Job::parse(job).map_err(|error| error.to_string())? };
            job.run(&device, &group, (start, &mut None)).map_err(|error| error.to_string())?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let hosts = fmha_dist::threads(ranks, Duration::from_secs(3600));
        let ranks: Vec<_> = hosts.into_iter().map(|host| scope.spawn(|| plan(host))).collect();
        ranks.into_iter().try_for_each(|rank| Ok(rank.join().map_err(|_| "a rank has panicked")??))
    })
}

/// Ranks that plan for devices, and move nothing.
struct Planning(fmha_dist::Host);

impl Group for Planning {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn size(&self) -> u32 {
        self.0.size()
    }

    fn space(&self) -> fmha::MemorySpace {
        fmha::MemorySpace::Device
    }

    fn share(&self, mine: &[u8]) -> fmha_dist::Result<Vec<Vec<u8>>> {
        self.0.share(mine)
    }

    fn exchange(
        &self,
        exchange: &Exchange,
        _sources: &[fmha::DevSlice<'_>],
        _sinks: &mut [DevSliceMut<'_>],
        _stream: &Stream,
    ) -> fmha_dist::Result<()> {
        let text = format!("{} rows are planned, and not moved", exchange.rows());
        Err(fmha_dist::Error::new(self.rank(), "exchange", text))
    }

    fn timeout(&self) -> Duration {
        self.0.timeout()
    }

    fn fail(&self, error: fmha_dist::Error) -> fmha_dist::Error {
        self.0.fail(error)
    }
}

/// What is to be done.
struct Job {
    operation: String,
    tokens: u32,
    masks: Vec<MaskSpec>,
    schemes: Vec<String>,
    repeats: usize,
}

impl Job {
    fn parse(words: &[String]) -> Result<Self, AnyError> {
        let [operation, tokens, masks, schemes, repeats] = words else {
            return Err(format!("{words:?} is not what, tokens, masks, schemes, how often").into());
        };
        Ok(Self {
            operation: operation.clone(),
            tokens: tokens.parse()?,
            masks: masks.split('/').map(str::parse).collect::<Result<_, _>>()?,
            schemes: schemes.split(',').map(str::to_owned).collect(),
            repeats: repeats.parse()?,
        })
    }

    fn run(
        &self,
        device: &Device,
        group: &Arc<dyn Group>,
        (start, measured): (Instant, &mut Option<Links>),
    ) -> Result<(), AnyError> {
        let (tokens, ranks) = (self.tokens, group.size());
        let trouble = match &*self.operation {
            "slow" => Some(Trouble::Slow),
            "dead" => Some(Trouble::Dead),
            _ => None,
        };
        let decodes = self.operation == "decode" || self.schemes == ["decode"];
        let seqlen_q = if decodes { 1 } else { tokens };
        let (seqlen_k, num_heads_q, num_heads_kv) = (tokens, 32, 8);
        let mut dims = Dims {
            batch: 1,
            seqlen_q,
            seqlen_k,
            num_heads_q,
            num_heads_kv,
            head_dim_qk: 128,
            head_dim_v: 128,
        };
        let (queries, keys) = if decodes {
            (Partition::replicated(1, ranks), Partition::contiguous(tokens, ranks))
        } else {
            (Partition::zig_zag(tokens, ranks), Partition::zig_zag(tokens, ranks))
        };
        let mut offsets = None;
        if self.operation == "packed" {
            let rows = documents(tokens);
            dims.batch = rows.len() as u32 - 1;
            let longest = rows.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0);
            (dims.seqlen_q, dims.seqlen_k) = (longest, longest);
            let buffer = upload(device, bytemuck::cast_slice(&rows))?;
            offsets = Some((rows, buffer));
        }
        let mut whole = match &offsets {
            None => FwdProblem::batch(DType::Bf16, dims),
            Some(_) => FwdProblem::group(DType::Bf16, dims),
        };
        if self.operation == "modified" {
            whole = whole.p_drop(0.1).bias(Bias::Alibi { per_batch: false });
        }
        let slopes: Vec<f32> = (1..=32).map(|head| (-0.25 * head as f32).exp2()).collect();
        let most_sent = if self.repeats > 0 { MOST_SENT } else { 1 << 10 };
        let mut bench = Bench {
            way: match &*self.operation {
                "capture" => Way::Replayed,
                "parts" => Way::Parts,
                _ => Way::Eager,
            },
            trouble,
            stream: device.stream()?,
            slopes: upload(device, bytemuck::cast_slice(&slopes))?,
            links: [device.memory().alloc(most_sent)?, device.memory().alloc(most_sent)?],
            device: device.clone(),
            group: group.clone(),
            whole,
            queries,
            keys,
            offsets,
            start,
            repeats: self.repeats,
        };
        if measured.is_none() && self.repeats > 0 && trouble.is_none() {
            *measured = Some(bench.links()?);
        }
        for &mask in &self.masks {
            bench.whole = bench.whole.clone().mask(mask).write_lse(true);
            if bench.is_first() {
                bench.say(&format!("{}, {tokens} tokens, mask {mask}, {ranks} devices", self.operation));
            }
            self.each(&bench, measured.unwrap_or_default())?;
        }
        Ok(())
    }

    fn each(&self, bench: &Bench, measured: Links) -> Result<(), AnyError> {
        let backward = matches!(&*self.operation, "backward" | "deterministic");
        let kernels = PlanOptions::default().deterministic(self.operation == "deterministic");
        let alone = match self.repeats {
            0 => {
                bench.device.plan_fwd(&bench.whole.clone().validate()?, &PlanOptions::default())?;
                if backward {
                    bench.device.plan_bwd(&BwdProblem::new(bench.whole.clone()).validate()?, &kernels)?;
                }
                None
            }
            _ => {
                let rows = bench.queries.rows();
                let inputs = [
                    bench.noise(1, rows, 32)?,
                    bench.noise(2, self.tokens, 8)?,
                    bench.noise(3, self.tokens, 8)?,
                    bench.noise(4, if backward { rows } else { 0 }, 32)?,
                ];
                let (whole, alone) = bench.alone(inputs, !backward)?;
                let gradients = backward.then(|| bench.backward_alone(&whole, &kernels)).transpose()?;
                Some((whole, alone, gradients))
            }
        };
        for name in &self.schemes {
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
        Ok(())
    }
}
