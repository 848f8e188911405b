//! Runs the battery's tensors over ranks, each with its own rows, and puts what they give together.
#![allow(dead_code, reason = "each test file uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fmha::{BwdArgs, DevSlice, DevSliceMut, Device, FwdArgs, MemorySpace, PlanOptions, ScoreArgs, Stream};
use fmha_conformance::tensor::{Operand, Operands};
use fmha_conformance::tensors::{HostBwd, HostFwd};
use fmha_cpu::{Config, CpuBackend};
use fmha_dist::{BwdPlan, Error, Exchange, FwdPlan, Group, Options, Partition, Problem, threads};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// A device of one thread: ranks are threads already.
pub(crate) fn device() -> Device {
    Device::new(CpuBackend::with(Config { threads: Some(1), isa: None }).unwrap())
}

const FOLDER: &str = "DIST_TEST_FOLDER";
const RANK: &str = "DIST_TEST_RANK";
const SIZE: &str = "DIST_TEST_SIZE";

/// A rank that is a process: a test of this file, by name, which reads its role from [`as_process`].
pub(crate) fn process(test: &str, folder: &Path, rank: u32, size: u32) -> Command {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test]).env(FOLDER, folder).stdout(Stdio::null());
    child.env(RANK, rank.to_string()).env(SIZE, size.to_string());
    child
}

/// Folder, rank and size of a [`process`]; `None` in a test that was not started as one.
pub(crate) fn as_process() -> Option<(PathBuf, u32, u32)> {
    let number = |name| std::env::var(name).unwrap().parse().unwrap();
    let folder = std::env::var(FOLDER).ok()?;
    Some((folder.into(), number(RANK), number(SIZE)))
}

/// Results of each rank's closure, by rank.
pub(crate) fn on_ranks<T: Send>(
    ranks: u32,
    timeout: Duration,
    run: impl Fn(Arc<dyn Group>) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let groups = threads(ranks, timeout);
        let handles: Vec<_> = groups
            .into_iter()
            .map(|group| {
                let run = &run;
                scope.spawn(move || run(Arc::new(group)))
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

fn scores<'a>(
    operands: &'a Operands,
    own_bias: Option<&'a [u8]>,
    dropout: fmha::DropoutSeed,
) -> ScoreArgs<'a> {
    ScoreArgs::default()
        .bias(own_bias.map(DevSlice::host))
        .alibi_slopes(operands.input(Operand::AlibiSlopes))
        .sink(operands.input(Operand::Sink))
        .descale_q(operands.input(Operand::DescaleQ))
        .descale_k(operands.input(Operand::DescaleK))
        .descale_v(operands.input(Operand::DescaleV))
        .dropout(dropout)
}

/// Batch and bytes of a row of a contiguous tensor.
fn rows_of(operands: &Operands, operand: Operand) -> (u32, u64) {
    let tensor = operands.expect(operand);
    let shape = tensor.shape;
    (shape.batch, u64::from(shape.head) * u64::from(shape.dim) * tensor.dtype.size_bytes())
}

fn side(problem: &Problem, operand: Operand) -> &Partition {
    match operand {
        Operand::K | Operand::V | Operand::Dk | Operand::Dv => &problem.k,
        _ => &problem.q,
    }
}

fn take(problem: &Problem, operands: &Operands, operand: Operand, rank: u32) -> Vec<u8> {
    let (batch, row_bytes) = lse_rows(problem, operand).unwrap_or_else(|| rows_of(operands, operand));
    side(problem, operand).split(operands.expect(operand).elems(), batch, row_bytes, rank)
}

/// An LSE has a row for each (sequence, head).
fn lse_rows(problem: &Problem, operand: Operand) -> Option<(u32, u64)> {
    let batch = if problem.cu_seqlens_q.is_some() { 1 } else { problem.whole.dims.batch };
    (operand == Operand::Lse).then_some((batch * problem.whole.dims.num_heads_q, 4))
}

fn empty(problem: &Problem, operands: &Operands, operand: Operand, rank: u32) -> Vec<u8> {
    vec![0xff; take(problem, operands, operand, rank).len()]
}

/// Each of these operands, put together from the ranks' own, into `operands`.
fn join(problem: &Problem, operands: &mut Operands, results: &[Vec<Vec<u8>>], which: &[Operand]) {
    for (rank, own) in (0..).zip(results) {
        for (bytes, &operand) in own.iter().zip(which) {
            if operand == Operand::Dsink {
                operands.expect_mut(operand).elems_mut().copy_from_slice(bytes);
                continue;
            }
            let (batch, row_bytes) = lse_rows(problem, operand).unwrap_or_else(|| rows_of(operands, operand));
            let whole = operands.expect_mut(operand).elems_mut();
            side(problem, operand).join(whole, bytes, batch, row_bytes, rank);
        }
    }
}

/// A dense bias `[b, h, queries, keys]` of a rank's queries: `split` by rows of keys.
fn own_bias(problem: &Problem, operands: &Operands, rank: u32) -> Option<Vec<u8>> {
    let tensor = operands.get(Operand::Bias)?;
    let shape = tensor.shape;
    let row_bytes = u64::from(shape.dim) * tensor.dtype.size_bytes();
    Some(problem.q.split(tensor.elems(), shape.batch * shape.head, row_bytes, rank))
}

/// The problem with strides of a bias whose rows are the rank's own.
fn with_own_bias(problem: &Problem, rank: u32) -> Problem {
    let mut own = problem.clone();
    if let fmha::Bias::Elementwise(mut bias) = own.whole.score.bias {
        let keys = i64::from(own.whole.dims.seqlen_k);
        let head = keys * i64::from(own.q.rows_of(rank));
        bias.strides.seq = keys;
        bias.strides.head = head;
        bias.strides.batch = head * i64::from(own.whole.shape_bias(bias.broadcast).head);
        own.whole.score.bias = fmha::Bias::Elementwise(bias);
    }
    own
}

/// O and LSE of `host` are what one rank's plan gives.
pub(crate) fn forward_rank(
    host: &HostFwd,
    problem: &Problem,
    group: Arc<dyn Group>,
    options: &Options,
    times: usize,
) -> Result<Vec<Vec<u8>>, Error> {
    let (rank, device) = (group.rank(), device());
    let problem = &with_own_bias(problem, rank);
    let mut plan = FwdPlan::new(problem, group, &device, options)?;
    let of = |operand| take(problem, &host.operands, operand, rank);
    let (q, k, v) = (of(Operand::Q), of(Operand::K), of(Operand::V));
    let bias = own_bias(problem, &host.operands, rank);
    let mut first: Option<Vec<Vec<u8>>> = None;
    for _ in 0..times {
        let mut o = empty(problem, &host.operands, Operand::O, rank);
        let mut lse = empty(problem, &host.operands, Operand::Lse, rank);
        let [q, k, v] = [&q, &k, &v].map(|bytes| DevSlice::host(&bytes[..]));
        let mut args = FwdArgs::new(q, k, v, DevSliceMut::host(&mut o));
        args.lse = Some(DevSliceMut::host(&mut lse));
        args.score = scores(&host.operands, bias.as_deref(), host.dropout);
        plan.run(&mut args, &device.default_stream())?;
        let results = vec![o, lse];
        if let Some(first) = &first {
            assert!(*first == results, "rank {rank} gives other bits again");
        }
        first = Some(results);
    }
    Ok(first.unwrap())
}

/// O and LSE of the whole, in `host`.
pub(crate) fn forward(
    host: &mut HostFwd,
    problem: &Problem,
    options: &Options,
    times: usize,
) -> Result<(), Error> {
    let shared = &*host;
    let results =
        on_ranks(problem.q.ranks(), TIMEOUT, |group| forward_rank(shared, problem, group, options, times));
    let results = results.into_iter().collect::<Result<Vec<_>, _>>()?;
    join(problem, &mut host.operands, &results, &[Operand::O, Operand::Lse]);
    Ok(())
}

const GRADIENTS: [Operand; 4] = [Operand::Dq, Operand::Dk, Operand::Dv, Operand::Dsink];

/// One rank's gradients.
pub(crate) fn backward_rank(
    host: &HostBwd,
    problem: &Problem,
    group: Arc<dyn Group>,
    options: &Options,
) -> Result<Vec<Vec<u8>>, Error> {
    let (rank, device) = (group.rank(), device());
    let problem = &with_own_bias(problem, rank);
    let wanted = (host.problem.dtype_grad, host.problem.write_dsink);
    let mut plan = BwdPlan::new(problem, wanted, group, &device, options)?;
    let of = |operand| take(problem, &host.operands, operand, rank);
    let inputs = [Operand::Q, Operand::K, Operand::V, Operand::O, Operand::Lse, Operand::Dout].map(of);
    let bias = own_bias(problem, &host.operands, rank);
    let mut first: Option<Vec<Vec<u8>>> = None;
    for _ in 0..2 {
        let mut grads = [Operand::Dq, Operand::Dk, Operand::Dv]
            .map(|operand| empty(problem, &host.operands, operand, rank));
        let mut sinks = vec![0xff; 4 * problem.whole.dims.num_heads_q as usize];
        let [q, k, v, o, lse, dout] = inputs.each_ref().map(|bytes| DevSlice::host(&bytes[..]));
        let [dq, dk, dv] = grads.each_mut().map(|bytes| DevSliceMut::host(&mut bytes[..]));
        let mut args = BwdArgs::new([q, k, v], [o, lse, dout], [dq, dk, dv])
            .dsink(wanted.1.then(|| DevSliceMut::host(&mut sinks)))
            .score(scores(&host.operands, bias.as_deref(), host.dropout));
        plan.run(&mut args, &device.default_stream())?;
        let mut results = grads.to_vec();
        results.extend(wanted.1.then_some(sinks));
        if let Some(first) = &first {
            assert!(*first == results, "rank {rank} gives other bits again");
        }
        first = Some(results);
    }
    Ok(first.unwrap())
}

/// Gradients of the whole, in `host`.
pub(crate) fn backward(host: &mut HostBwd, problem: &Problem, options: &Options) -> Result<(), Error> {
    let shared = &*host;
    let results =
        on_ranks(problem.q.ranks(), TIMEOUT, |group| backward_rank(shared, problem, group, options));
    let results = results.into_iter().collect::<Result<Vec<_>, _>>()?;
    join(problem, &mut host.operands, &results, &GRADIENTS);
    Ok(())
}

/// Runs the forward call of `host` on one device.
pub(crate) fn forward_alone(host: &mut HostFwd) {
    let device = device();
    let plan = device.plan_fwd(&host.problem, &PlanOptions::default().batch_invariant(true)).unwrap();
    fmha_conformance::execute::run_fwd(&device, &plan, host).unwrap();
}

/// Runs the backward call of `host` on one device.
pub(crate) fn backward_alone(host: &mut HostBwd) {
    let device = device();
    let plan = device.plan_bwd(&host.problem, &PlanOptions::default()).unwrap();
    fmha_conformance::execute::run_bwd(&device, &plan, host).unwrap();
}

pub(crate) fn bytes(operands: &Operands, operand: Operand) -> Vec<u8> {
    operands.expect(operand).elems().to_vec()
}

/// Ways in which a rank ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Panics,
    /// The rank ends without telling the other ranks.
    Leaves,
    /// The process of the rank aborts.
    Aborts,
}

/// A group whose rank ends before its call number `at`.
pub(crate) struct Ends {
    group: Arc<dyn Group>,
    calls: AtomicU32,
    at: u32,
    end: End,
}

impl Ends {
    pub(crate) fn at(at: u32, end: End, group: Arc<dyn Group>) -> Arc<dyn Group> {
        Arc::new(Self { group, calls: AtomicU32::new(0), at, end })
    }

    fn call(&self) -> Result<&dyn Group, Error> {
        if self.calls.fetch_add(1, Ordering::Relaxed) < self.at {
            return Ok(&*self.group);
        }
        match self.end {
            // Without the words of a panic on the test's output.
            End::Panics => std::panic::resume_unwind(Box::new(())),
            End::Leaves => Err(Error::new(self.rank(), "test", "is to leave")),
            End::Aborts => std::process::abort(),
        }
    }
}

impl Group for Ends {
    fn rank(&self) -> u32 {
        self.group.rank()
    }

    fn size(&self) -> u32 {
        self.group.size()
    }

    fn space(&self) -> MemorySpace {
        self.group.space()
    }

    fn begins(&self, planned: &Arc<[(String, String)]>) -> Result<(), Error> {
        self.call()?.begins(planned)
    }

    fn ends(&self) {
        self.group.ends();
    }

    fn calls(&self) -> u64 {
        self.group.calls()
    }

    fn share(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.call()?.share(mine)
    }

    fn exchange(
        &self,
        exchange: &Exchange,
        sources: &[DevSlice<'_>],
        sinks: &mut [DevSliceMut<'_>],
        stream: &Stream,
    ) -> Result<(), Error> {
        self.call()?.exchange(exchange, sources, sinks, stream)
    }

    fn failure(&self) -> Option<Error> {
        self.group.failure()
    }

    fn fail(&self, error: Error) -> Error {
        match self.end {
            End::Leaves if self.calls.load(Ordering::Relaxed) > self.at => error,
            _ => self.group.fail(error),
        }
    }
}

/// A group whose rank takes its time before each exchange.
pub(crate) struct Slow {
    group: Arc<dyn Group>,
    by: Duration,
}

impl Slow {
    pub(crate) fn by(by: Duration, group: Arc<dyn Group>) -> Arc<dyn Group> {
        Arc::new(Self { group, by })
    }
}

impl Group for Slow {
    fn rank(&self) -> u32 {
        self.group.rank()
    }

    fn size(&self) -> u32 {
        self.group.size()
    }

    fn space(&self) -> MemorySpace {
        self.group.space()
    }

    fn begins(&self, planned: &Arc<[(String, String)]>) -> Result<(), Error> {
        self.group.begins(planned)
    }

    fn ends(&self) {
        self.group.ends();
    }

    fn calls(&self) -> u64 {
        self.group.calls()
    }

    fn share(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.group.share(mine)
    }

    fn exchange(
        &self,
        exchange: &Exchange,
        sources: &[DevSlice<'_>],
        sinks: &mut [DevSliceMut<'_>],
        stream: &Stream,
    ) -> Result<(), Error> {
        std::thread::sleep(self.by);
        self.group.exchange(exchange, sources, sinks, stream)
    }

    fn failure(&self) -> Option<Error> {
        self.group.failure()
    }

    fn fail(&self, error: Error) -> Error {
        self.group.fail(error)
    }
}
