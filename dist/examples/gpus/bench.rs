//! State shared by all runs: the ranks, the problem, and the way to time a call.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fmha::{Bias, DevBuffer, DevSliceMut, Device, DropoutSeed, FwdProblem, ScoreArgs, Stream};
use fmha_dist::{Block, Exchange, Group, Links, Options, Parcel, Partition, Problem, Scheme, choose};

use crate::AnyError;

/// Bytes of an exchange by which links are measured.
pub(crate) const MOST_SENT: u64 = 256 << 20;

/// A call that takes longer than this is not repeated for a better time.
const LONG: f64 = 1.0;

/// Least seconds of a measurement. Shorter calls run one after another until they take this long together:
/// the host then queues a call while the one before runs, as in a model of many layers.
const TOGETHER: f64 = 20e-3;

/// Fault of the last rank.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trouble {
    Slow,
    Dead,
}

/// Treatment of a plan's runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Eager,
    /// Runs are recorded and replayed.
    Replayed,
    /// Runs are timed in parts.
    Parts,
}

/// State shared by all runs.
pub(crate) struct Bench {
    pub(crate) way: Way,
    pub(crate) trouble: Option<Trouble>,
    pub(crate) device: Device,
    pub(crate) group: Arc<dyn Group>,
    pub(crate) stream: Stream,
    pub(crate) whole: FwdProblem,
    pub(crate) queries: Partition,
    pub(crate) keys: Partition,
    /// The first row of each document, and the end.
    pub(crate) offsets: Option<(Vec<u32>, DevBuffer)>,
    pub(crate) slopes: DevBuffer,
    pub(crate) start: Instant,
    /// Source and destination buffers for the measurement of links.
    pub(crate) links: [DevBuffer; 2],
    /// Number of runs of each plan, which must all give equal bits.
    pub(crate) repeats: usize,
}

impl Bench {
    /// The fastest of some calls, in seconds, behind one that makes connections. Before each all ranks rest:
    /// a busy GPU's clock falls within a tenth of a second, and one device's calls are longer than its share
    /// of them. Ranks begin together: an exchange of nothing much on the stream is before the first call.
    pub(crate) fn fastest(&self, mut call: impl FnMut() -> Result<(), AnyError>) -> Result<f64, AnyError> {
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
            // The first call makes connections and loads modules, which take longer than many a call.
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

    /// Exchanges `bytes` bytes between all neighbouring ranks, after which no rank begins before another.
    pub(crate) fn meet(&self, bytes: u64) -> Result<(), AnyError> {
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
        let to = unsafe { DevSliceMut::from_raw(to.space(), to.as_ptr(), to.bytes(), fmha::ElemType::Bytes) };
        Ok(self.group.exchange(&exchange, &[from.slice()], &mut [to], &self.stream)?)
    }

    pub(crate) fn say(&self, text: &str) {
        println!("[{:5.1} s] {text}", self.start.elapsed().as_secs_f64());
    }

    pub(crate) fn score(&self) -> ScoreArgs<'_> {
        let slopes = matches!(self.whole.score.bias, Bias::Alibi { .. }).then(|| self.slopes.slice());
        ScoreArgs::default().alibi_slopes(slopes).dropout(DropoutSeed { seed: 7, offset: 0 })
    }

    pub(crate) fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    /// Runs again, and says how often the bits were others than the first time.
    pub(crate) fn again(
        &self,
        what: &str,
        mut run: impl FnMut() -> Result<Vec<u8>, AnyError>,
    ) -> Result<(), AnyError> {
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

    /// Prediction of the model, given the time of one device.
    pub(crate) fn predicted(
        &self,
        problem: &Problem,
        options: &Options,
        scheme: Scheme,
        (backward, alone): (bool, f64),
    ) -> Option<f64> {
        let (mut options, measured) = (options.clone(), options.links);
        // A trial rate gives the seconds of one device. They give the rate at which that device runs.
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
    pub(crate) fn links(&self) -> Result<Links, AnyError> {
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
    pub(crate) fn slowest(&self, seconds: f64) -> Result<f64, AnyError> {
        let all = self.group.share(&seconds.to_le_bytes())?;
        Ok(all
            .iter()
            .filter_map(|bytes| Some(f64::from_le_bytes(bytes[..].try_into().ok()?)))
            .fold(0.0, f64::max))
    }

    /// Prints the slowest rank's seconds, and its share of N times the speed of one device.
    pub(crate) fn report(
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
}
