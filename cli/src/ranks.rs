//! `fmha run --ranks N`: one problem over N processes, each with a part of the rows, compared with one rank and
//! with f64.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use fmha::{Bias, BwdArgs, DevBuffer, Device, FwdArgs, MaskArgs, MemorySpace, PlanOptions, Stream, Strides};
use fmha_conformance::tensor::{Operand, Operands};
use fmha_dist::{
    BwdPlan, FwdPlan, Group, Links, MAX_RANKS, Nccl, Options, Partition, Problem, Rendezvous, Scheme, connect,
};

use crate::failure::Failure;
use crate::job::Call;
use crate::options::at_least_1;
use crate::setup::Setup;
use crate::target;

/// Over which ranks, and how.
#[derive(Debug, Args)]
#[command(next_help_heading = "Ranks")]
pub(super) struct RankArgs {
    /// Over N ranks, each with its part of the rows: processes of the CPU, or a GPU each
    #[arg(long, value_name = "N", value_parser = at_least_1("ranks"), allow_negative_numbers = true)]
    pub(super) ranks: Option<u32>,

    /// gather, ring, ulysses, mixed (default: what the model of kernels and links finds fastest)
    #[arg(long, value_name = "NAME", requires = "ranks")]
    scheme: Option<Scheme>,

    /// contiguous, or zig-zag: a run from either end, which a causal mask gives equal work
    #[arg(long, value_name = "HOW", default_value = "zig-zag", value_parser = ["contiguous", "zig-zag"])]
    partition: String,

    /// Speeds of links and kernels: lines NAME = NUMBER of bytes_per_second, latency, queueing, fwd_flops,
    /// bwd_flops, burst, burst_seconds, processors, memory_bytes_per_second, memory, ranks_per_host,
    /// host_bytes_per_second, host_latency
    #[arg(long, value_name = "FILE", requires = "ranks")]
    links: Option<PathBuf>,

    /// This process is one of the ranks
    #[arg(long, hide = true, value_name = "RANK,FOLDER")]
    rank_of: Option<String>,
}

/// Each has a connection and two threads for each other one.
const MAX_PROCESSES: u32 = 64;

/// Time by which a rank may be late.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Time in which the other ranks must get the error of a rank that has failed.
const MOMENT: Duration = Duration::from_secs(3);

const FORWARD: &[Operand] = &[Operand::O, Operand::Lse];
const GRADIENTS: &[Operand] = &[Operand::Dq, Operand::Dk, Operand::Dv, Operand::Dsink];

impl RankArgs {
    /// Rank of this process, and the folder of its group.
    pub(super) fn rank(&self) -> Result<Option<(u32, PathBuf)>, Failure> {
        let Some(text) = &self.rank_of else { return Ok(None) };
        let wrong = || Failure::wrong(format!("rank-of `{text}` is no RANK,FOLDER"));
        let (rank, folder) = text.split_once(',').ok_or_else(wrong)?;
        Ok(Some((rank.parse().map_err(|_| wrong())?, folder.into())))
    }

    /// Words of a command that runs over `ranks` ranks with equal settings.
    pub(super) fn words(&self, ranks: u32) -> Vec<String> {
        let mut words = vec![format!("--ranks={ranks}"), format!("--partition={}", self.partition)];
        words.extend(self.scheme.map(|scheme| format!("--scheme={scheme}")));
        words.extend(self.links.as_ref().map(|path| format!("--links={}", path.display())));
        words
    }

    fn partition(&self, rows: u32, ranks: u32) -> Partition {
        match &*self.partition {
            "contiguous" => Partition::contiguous(rows, ranks),
            _ => Partition::zig_zag(rows, ranks),
        }
    }

    /// The whole problem, and the rows of each rank.
    pub(super) fn problem(&self, setup: &Setup, ranks: u32) -> Problem {
        let fwd = setup.fwd.clone().write_lse(true);
        let total = |offsets: &Option<Vec<i32>>, rows: u32| {
            offsets.as_ref().and_then(|offsets| offsets.last()).map_or(rows, |last| last.unsigned_abs())
        };
        let dims = fwd.dims;
        let rows_q = total(&setup.cu_seqlens_q, dims.seqlen_q);
        let rows_k = total(&setup.cu_seqlens_k, dims.seqlen_k);
        let unsigned = |offsets: &[i32]| offsets.iter().map(|&at| at.unsigned_abs()).collect::<Vec<_>>();
        let problem = Problem::new(fwd, self.partition(rows_q, ranks)).keys(self.partition(rows_k, ranks));
        match (&setup.cu_seqlens_q, &setup.cu_seqlens_k) {
            (Some(q), Some(k)) => problem.packed(unsigned(q), unsigned(k)),
            _ => problem,
        }
    }

    pub(super) fn options(&self, kernels: PlanOptions) -> Result<Options, Failure> {
        let links = match &self.links {
            None => Links::default(),
            Some(path) => {
                let text = target::read_text(path).map_err(|failure| failure.of("links"))?;
                text.parse()
                    .map_err(|error: String| Failure::wrong(format!("links {}: {error}", path.display())))?
            }
        };
        Ok(Options::default().scheme(self.scheme).kernels(kernels).links(links))
    }

    /// Scheme for this number of ranks, and the cost of each scheme, by the model of kernels and links.
    pub(super) fn explain(&self, setup: &Setup, ranks: u32, kernels: PlanOptions) -> Result<String, Failure> {
        if ranks > MAX_RANKS {
            return Err(Failure::wrong(format!("ranks {ranks} are more than the {MAX_RANKS} of a group")));
        }
        let problem = self.problem(setup, ranks);
        let choice = fmha_dist::choose(&problem, ranks, setup.bwd.is_some(), &self.options(kernels)?);
        Ok(choice?.to_string())
    }

    /// Refuses options that are not compatible with ranks, before anything is computed. These include a bias and
    /// gradients of LSE, which a program that splits its own tensors may use.
    pub(super) fn check(&self, setup: &Setup, kernels: PlanOptions) -> Result<(), Failure> {
        let Some(ranks) = self.ranks else { return Ok(()) };
        if ranks > MAX_PROCESSES {
            return Err(Failure::wrong(format!(
                "ranks {ranks} are more than the {MAX_PROCESSES} processes of this command"
            )));
        }
        cuts(setup, ranks)?;
        self.explain(setup, ranks, kernels).map(drop)
    }

    /// Computes and times one rank's part; writes its results and its report to the folder.
    pub(super) fn be_a_rank(
        &self,
        (rank, folder): (u32, &Path),
        setup: &Setup,
        (device, options): (&Device, PlanOptions),
        call: &Call,
    ) -> Result<(), Failure> {
        let said = self.part(rank, folder, setup, device, options, call);
        let (name, text) = match &said {
            Ok(text) => (format!("{rank}.txt"), text.clone()),
            Err(error) => (format!("{rank}.err"), error.to_string()),
        };
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|error| Failure::file(&path, &error))?;
        said.map(drop)
    }

    fn part(
        &self,
        rank: u32,
        folder: &Path,
        setup: &Setup,
        device: &Device,
        options: PlanOptions,
        call: &Call,
    ) -> Result<String, Failure> {
        let ranks = self.ranks.unwrap_or(1);
        let problem = self.problem(setup, ranks);
        let options = self.options(options)?;
        let control =
            connect(&Rendezvous::file(folder.join("rendezvous"), rank, ranks).with_env()?, TIMEOUT)?;
        let group: Arc<dyn Group> = match device.memory().space() {
            MemorySpace::Host => Arc::new(control),
            MemorySpace::Device => Arc::new(Nccl::new(control, None)?),
        };
        let operands = call.operands();
        let of = |operand| {
            place(&problem, operands, operand)
                .map_or_else(Vec::new, |place| place.split(operands, operand, rank))
        };
        let own = |operand| placed(device, &of(operand));
        let [q, k, v] = [own(Operand::Q)?, own(Operand::K)?, own(Operand::V)?];
        let [q, k, v] = [q.slice(), k.slice(), v.slice()];
        let whole = |operand| operands.get(operand).map(|tensor| placed(device, tensor.elems())).transpose();
        // A mask is of the whole's queries and keys, on every rank.
        let masks_in_memory = [whole(Operand::Intervals)?, whole(Operand::MaskBits)?];
        let (slopes, sink) = (whole(Operand::AlibiSlopes)?, whole(Operand::Sink)?);
        let descales = [whole(Operand::DescaleQ)?, whole(Operand::DescaleK)?, whole(Operand::DescaleV)?];
        let [descale_q, descale_k, descale_v] =
            descales.each_ref().map(|descale| descale.as_ref().map(DevBuffer::slice));
        let score = fmha::ScoreArgs::default()
            .alibi_slopes(slopes.as_ref().map(DevBuffer::slice))
            .sink(sink.as_ref().map(DevBuffer::slice))
            .descale_q(descale_q)
            .descale_k(descale_k)
            .descale_v(descale_v)
            .dropout(setup.dropout);
        let masks = masks_in_memory.each_ref().map(|mask| mask.as_ref().map(DevBuffer::slice));
        let [intervals, bits] = masks;
        let masks = MaskArgs::default().intervals(intervals).bits(bits);
        let stream = device.default_stream();
        let write = |operand: Operand, buffer: &DevBuffer, count: usize| {
            let mut bytes = vec![0u8; count];
            device.memory().download(buffer, &mut bytes)?;
            let path = folder.join(format!("{rank}.{operand:?}"));
            std::fs::write(&path, bytes).map_err(|error| Failure::file(&path, &error))
        };
        let (explained, seconds) = match call {
            Call::Forward(..) => {
                let mut plan = FwdPlan::new(&problem, group.clone(), device, &options)?;
                let bytes = [of(Operand::O).len(), lse_bytes(&problem, rank)];
                let mut o = placed(device, &vec![0; bytes[0]])?;
                let mut lse = placed(device, &vec![0; bytes[1]])?;
                let seconds = fastest(&*group, &stream, || {
                    let mut args = FwdArgs::new(q, k, v, o.slice_mut());
                    args.lse = Some(lse.slice_mut());
                    args.score = score;
                    args.masks = masks;
                    plan.run(&mut args, &stream)
                })?;
                write(Operand::O, &o, bytes[0])?;
                write(Operand::Lse, &lse, bytes[1])?;
                (plan.explain(), seconds)
            }
            Call::Backward(host, _) => {
                let wanted = (host.problem.dtype_grad, host.problem.write_dsink);
                let mut plan = BwdPlan::new(&problem, wanted, group.clone(), device, &options)?;
                let [o, lse, dout] = [own(Operand::O)?, own(Operand::Lse)?, own(Operand::Dout)?];
                let [o, lse, dout] = [o.slice(), lse.slice(), dout.slice()];
                let results = [Operand::Dq, Operand::Dk, Operand::Dv];
                let mut grads = [own(results[0])?, own(results[1])?, own(results[2])?];
                let sink_bytes = 4 * problem.whole.dims.num_heads_q as usize;
                let mut sinks = placed(device, &vec![0; sink_bytes])?;
                let seconds = fastest(&*group, &stream, || {
                    let [dq, dk, dv] = grads.each_mut().map(DevBuffer::slice_mut);
                    let dsink = wanted.1.then(|| sinks.slice_mut());
                    let args = BwdArgs::new([q, k, v], [o, lse, dout], [dq, dk, dv]).dsink(dsink);
                    plan.run(&mut args.score(score).masks(masks), &stream)
                })?;
                for (operand, grad) in results.into_iter().zip(&grads) {
                    write(operand, grad, of(operand).len())?;
                }
                write(Operand::Dsink, &sinks, sink_bytes)?;
                (plan.explain(), seconds)
            }
        };
        Ok(format!("{seconds}\n{explained}"))
    }

    /// Starts the ranks, waits for them, and copies their results to `operands`; returns the slowest rank's
    /// seconds, and rank 0's report on its plan.
    pub(super) fn over_processes(&self, setup: &Setup, call: &mut Call) -> Result<(f64, String), Failure> {
        let ranks = self.ranks.unwrap_or(1);
        let problem = self.problem(setup, ranks);
        takes(&problem, call)?;
        let folder = tempfile::tempdir().map_err(|error| Failure::file(&std::env::temp_dir(), &error))?;
        let program =
            std::env::current_exe().map_err(|error| Failure::wrong(format!("this command: {error}")))?;
        let mut children = Vec::new();
        for rank in 0..ranks {
            let mut child = Command::new(&program);
            child
                .args(std::env::args_os().skip(1))
                .arg(format!("--rank-of={rank},{}", folder.path().display()));
            // One GPU for each rank.
            for name in ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"] {
                let among = std::env::var(name).unwrap_or_default();
                let own = among.split(',').filter(|device| !device.is_empty()).nth(rank as usize);
                child.env(name, own.map_or_else(|| rank.to_string(), str::to_owned));
            }
            let path = folder.path().join(format!("{rank}.stderr"));
            let says = File::create(&path).map_err(|error| Failure::file(&path, &error))?;
            child.stdin(Stdio::null()).stdout(Stdio::null()).stderr(says);
            children.push(child.spawn().map_err(|error| Failure::wrong(format!("rank {rank}: {error}")))?);
        }
        let failed = ended(&mut children)?;
        let read = |rank: u32, end: &str| std::fs::read(folder.path().join(format!("{rank}.{end}")));
        let (mut slowest, mut explained) = (0f64, String::new());
        // The rank that failed first has the cause; other ranks may only have waited for it.
        for rank in failed.map(|(rank, _)| rank as u32).into_iter().chain(0..ranks) {
            if let Ok(error) = read(rank, "err") {
                return Err(Failure::wrong(String::from_utf8_lossy(&error)));
            }
            let died = |_| {
                let says = read(rank, "stderr").unwrap_or_default();
                let how = failed.map(|(_, status)| format!(", {status}")).unwrap_or_default();
                let says = String::from_utf8_lossy(&says);
                Failure::wrong(format!("rank {rank} has died{how}: {}", says.trim()))
            };
            let said = read(rank, "txt").map_err(died)?;
            let said = String::from_utf8_lossy(&said).into_owned();
            let (seconds, text) = said.split_once('\n').unwrap_or_default();
            slowest = slowest.max(seconds.parse().unwrap_or(f64::INFINITY));
            if rank == 0 {
                explained = text.to_owned();
            }
        }
        let results = if matches!(call, Call::Forward(..)) { FORWARD } else { GRADIENTS };
        for &operand in results {
            let operands = call.operands_mut();
            if operands.get(operand).is_none() {
                continue;
            }
            for rank in 0..ranks {
                let bytes = read(rank, &format!("{operand:?}"));
                let bytes =
                    bytes.map_err(|error| Failure::wrong(format!("rank {rank}, {operand:?}: {error}")))?;
                match place(&problem, operands, operand) {
                    Some(place) => {
                        let whole = operands.expect_mut(operand).elems_mut();
                        place.partition.join(whole, &bytes, place.batch, place.row_bytes, rank);
                    }
                    None => operands.expect_mut(operand).elems_mut().copy_from_slice(&bytes),
                }
            }
        }
        Ok((slowest, explained))
    }
}

/// Waits for all ranks; returns which one failed first, if any, and how. After a failure the others get only a
/// moment, since they may wait for the failed rank until their timeout.
fn ended(ranks: &mut [Child]) -> Result<Option<(usize, ExitStatus)>, Failure> {
    let mut failed: Option<(usize, ExitStatus, Instant)> = None;
    loop {
        let mut all = true;
        for (rank, child) in ranks.iter_mut().enumerate() {
            let system = |error: std::io::Error| Failure::wrong(format!("rank {rank}: {error}"));
            match child.try_wait().map_err(system)? {
                Some(status) if !status.success() => {
                    failed.get_or_insert((rank, status, Instant::now()));
                }
                Some(_) => {}
                None if failed.is_some_and(|(_, _, since)| since.elapsed() > MOMENT) => {
                    child.kill().and_then(|()| child.wait()).map_err(system)?;
                }
                None => all = false,
            }
        }
        if all {
            return Ok(failed.map(|(rank, status, _)| (rank, status)));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes in the memory of a rank's device.
fn placed(device: &Device, bytes: &[u8]) -> Result<DevBuffer, Failure> {
    let mut buffer = device.memory().alloc((bytes.len() as u64).max(1))?;
    device.memory().upload(bytes, &mut buffer)?;
    Ok(buffer)
}

/// The fastest of three runs that all ranks begin together.
fn fastest(
    group: &dyn Group,
    stream: &Stream,
    mut run: impl FnMut() -> fmha_dist::Result<()>,
) -> Result<f64, Failure> {
    let mut fastest = f64::INFINITY;
    for _ in 0..3 {
        group.share(&[])?;
        let start = Instant::now();
        run()?;
        stream.synchronize()?;
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    Ok(fastest)
}

/// Refuses problems with operands or gradients that this command does not split over ranks.
fn cuts(setup: &Setup, ranks: u32) -> Result<(), Failure> {
    let refuse = |what: &str| Err(Failure::wrong(format!("ranks {ranks}: {what}")));
    if matches!(setup.fwd.score.bias, Bias::Elementwise(_)) {
        return refuse(
            "bias e: each rank has its own rows of it, which this command does not cut (a:N is taken)",
        );
    }
    if setup.bwd.as_ref().is_some_and(|bwd| bwd.has_dlse) {
        return refuse("dlse: gradients of LSE are for one device here");
    }
    Ok(())
}

/// Refuses a call whose tensors are not contiguous.
fn takes(problem: &Problem, call: &Call) -> Result<(), Failure> {
    let refuse = |what: &str| Err(Failure::wrong(format!("ranks {}: {what}", problem.q.ranks())));
    for operand in [Operand::Q, Operand::K, Operand::V, Operand::O] {
        let tensor = call.operands().expect(operand);
        if tensor.strides != Strides::bshd(tensor.shape) {
            return refuse(
                "tensors are contiguous b*s*h*d, with no --iperm, --operm, --vlayout c or padding",
            );
        }
    }
    Ok(())
}

/// Place of an operand's rows in the whole.
struct Place<'a> {
    partition: &'a Partition,
    batch: u32,
    row_bytes: u64,
}

impl Place<'_> {
    fn split(&self, operands: &Operands, operand: Operand, rank: u32) -> Vec<u8> {
        self.partition.split(operands.expect(operand).elems(), self.batch, self.row_bytes, rank)
    }
}

/// Place of an operand's rows in the whole; `None` if every rank has the whole operand.
fn place<'a>(problem: &'a Problem, operands: &Operands, operand: Operand) -> Option<Place<'a>> {
    let tensor = operands.get(operand)?;
    let partition = match operand {
        Operand::K | Operand::V | Operand::Dk | Operand::Dv => &problem.k,
        _ => &problem.q,
    };
    let (batch, row_bytes) = match operand {
        Operand::Dsink => return None,
        Operand::Lse => (lse_rows(problem), 4),
        _ => {
            let elems = u64::from(tensor.shape.head) * u64::from(tensor.shape.dim);
            (tensor.shape.batch, elems * tensor.dtype.size_bytes())
        }
    };
    Some(Place { partition, batch, row_bytes })
}

/// Number of LSE rows per head: those of a sequence, or all packed ones.
fn lse_rows(problem: &Problem) -> u32 {
    let dims = problem.whole.dims;
    let batch = if problem.cu_seqlens_q.is_some() { 1 } else { dims.batch };
    batch * dims.num_heads_q
}

fn lse_bytes(problem: &Problem, rank: u32) -> usize {
    4 * lse_rows(problem) as usize * problem.q.rows_of(rank) as usize
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// A rank that fails before it meets the others is reported: more ranks start than there are GPUs, so the last
    /// one ends while the others wait for it.
    #[test]
    fn a_rank_that_fails_before_it_meets_the_others_is_the_one_that_is_named_and_soon() {
        let start = Instant::now();
        let ranks = |words: &[&str]| {
            let mut all: Vec<Child> =
                words.iter().map(|words| Command::new("sh").args(["-c", words]).spawn().unwrap()).collect();
            let failed = ended(&mut all).ok().unwrap().map(|(rank, status)| (rank, status.code()));
            (failed, all.iter_mut().all(|child| child.try_wait().unwrap().is_some()))
        };
        assert_eq!(ranks(&["exit 0", "exit 0"]), (None, true));
        assert_eq!(
            ranks(&["exec sleep 60", "sleep 0.2; exit 2", "exec sleep 60"]),
            (Some((1, Some(2))), true)
        );
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    }
}
