//! What a scheme becomes: steps over numbered buffers, and how they run.
//!
//! A scheme says once what moves and what is computed; threads, processes and GPUs run the same steps. Whether a step may
//! begin follows from the buffers it reads and writes.

use std::fmt::Write as _;

use fmha::{
    Arrivals, BwdArgs, BwdPlan, CombineArgs, CombinePlan, DevBuffer, DevSlice, DevSliceMut, Device, Event,
    FwdArgs, FwdPlan, Merge, PartialResult, ScoreArgs, Stream,
};

use crate::arrivals::{Coming, Meeting};
use crate::error::{Error, Result};
use crate::group::{Block, Exchange, Group};
use crate::problem::ScoreOffsets;

/// A buffer: one of the call's, or scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Buf {
    Q,
    K,
    V,
    O,
    Lse,
    Dout,
    Dq,
    Dk,
    Dv,
    Dsink,
    Scratch(usize),
}

/// How many buffers of a call there are.
const CALLS: usize = 10;

impl Buf {
    fn index(self) -> usize {
        match self {
            Buf::Q => 0,
            Buf::K => 1,
            Buf::V => 2,
            Buf::O => 3,
            Buf::Lse => 4,
            Buf::Dout => 5,
            Buf::Dq => 6,
            Buf::Dk => 7,
            Buf::Dv => 8,
            Buf::Dsink => 9,
            Buf::Scratch(number) => CALLS + number,
        }
    }
}

/// A place in a buffer, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At(pub(crate) Buf, pub(crate) u64);

/// Rows of a buffer.
pub(crate) type Part = (Buf, Block);

pub(crate) struct Backward {
    pub(crate) plan: BwdPlan,
    pub(crate) inputs: [At; 6],
    pub(crate) grads: [At; 3],
    pub(crate) dsink: Option<At>,
    pub(crate) score: ScoreOffsets,
}

pub(crate) enum Step {
    /// This rank's keys go, piece by piece, to where other ranks' kernels wait for them.
    Send,
    /// This rank's own keys go to their places among them.
    Fill { sinks: [Buf; 2] },
    /// What has come was read: the next run may send again.
    Release { sinks: Vec<Buf> },
    /// dK and dV that no later kernel changes go to where their owners add them, behind so many kernels.
    SendHome { step: usize, sources: [Buf; 2] },
    /// Those of this rank's keys are here.
    AwaitHome { sinks: [Buf; 2] },
    /// Rows move between ranks.
    Exchange { exchange: Exchange, sources: Vec<Buf>, sinks: Vec<Buf> },
    /// Each rank's stretch of a buffer goes to all: `own` lie in this rank's, of so many bytes, `others` in those of the others.
    AllGather { all: Buf, bytes: u64, own: Vec<Buf>, others: Vec<Buf> },
    /// Attention of some queries over some keys: Q, K and V; O; LSE.
    Forward { plan: FwdPlan, inputs: [At; 3], o: At, lse: At, score: ScoreOffsets },
    /// Gradients of some queries and keys: from Q, K, V, O, LSE and dO; dQ, dK and dV in f32.
    Backward(Box<Backward>),
    /// Partial results of the same queries become one.
    Combine { plan: CombinePlan, parts: Vec<[At; 2]>, o: At, lse: At },
    /// f32 gradients are added.
    Sum { plan: CombinePlan, terms: Vec<At>, to: At },
}

/// A buffer of scratch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scratch {
    pub(crate) bytes: u64,
    /// Of one that is a stretch of another one: which, and where it begins.
    pub(crate) within: Option<(usize, u64)>,
}

/// Steps in their order.
pub(crate) struct Program {
    pub(crate) steps: Vec<Step>,
    pub(crate) scratch: Vec<Scratch>,
    pub(crate) workspace: u64,
    /// Of keys that kernels wait for.
    pub(crate) coming: Option<Coming>,
    /// Whether forward launches take turns on two streams.
    pub(crate) takes_turns: bool,
    pub(crate) ranks: u32,
}

impl Program {
    /// Bytes that this rank sends to others.
    pub(crate) fn bytes_sent(&self, rank: u32) -> u64 {
        let of = |step: &Step| match step {
            Step::Exchange { exchange, .. } => exchange.bytes_sent(rank),
            Step::AllGather { bytes, .. } => bytes * u64::from(self.ranks - 1),
            Step::Send => self.coming.as_ref().map_or(0, Coming::bytes_sent),
            &Step::SendHome { step, .. } => self.sent_home(step),
            _ => 0,
        };
        self.steps.iter().map(of).sum()
    }

    /// Rows of the exchange that has most.
    pub(crate) fn most_rows(&self) -> u64 {
        let of = |step: &Step| if let Step::Exchange { exchange, .. } = step { exchange.rows() } else { 0 };
        self.steps.iter().map(of).max().unwrap_or(0)
    }

    fn sent_home(&self, step: usize) -> u64 {
        self.coming.as_ref().and_then(|coming| coming.home.as_ref()).map_or(0, |home| home.bytes_sent(step))
    }

    /// One line a step.
    pub(crate) fn explain(&self, rank: u32) -> String {
        let mut text = String::new();
        for (number, step) in self.steps.iter().enumerate() {
            let line = match step {
                Step::Send => {
                    let (pieces, bytes) = self
                        .coming
                        .as_ref()
                        .map_or((0, 0), |coming| (coming.sends.len(), coming.bytes_sent()));
                    format!("send {bytes} bytes in {pieces} pieces by copy engines, a flag behind each")
                }
                Step::Fill { .. } => "copy".to_owned(),
                Step::Release { .. } => "let the next run send".to_owned(),
                &Step::SendHome { step, .. } => {
                    format!("send {} bytes of dK and dV home by copy engines", self.sent_home(step))
                }
                Step::AwaitHome { .. } => "wait for the others' dK and dV".to_owned(),
                Step::Exchange { exchange, .. } => {
                    let mut peers: Vec<u32> = exchange
                        .sends
                        .iter()
                        .map(|parcel| parcel.peer)
                        .filter(|&peer| peer != rank)
                        .collect();
                    peers.dedup();
                    let bytes = exchange.bytes_sent(rank);
                    if peers.is_empty() {
                        "copy".to_owned()
                    } else {
                        format!("send {bytes} bytes to ranks {peers:?}")
                    }
                }
                Step::AllGather { bytes, .. } => {
                    format!("gather {bytes} bytes of each of {} ranks on all, at once", self.ranks)
                }
                Step::Forward { plan, .. } => {
                    let (dims, part) = (plan.problem().dims, plan.problem().part);
                    let (i, j) = (part.position_q, part.position_k);
                    format!(
                        "forward, queries {i}..{} x keys {j}..{}: {}",
                        i + dims.seqlen_q,
                        j + dims.seqlen_k,
                        plan.kernel()
                    )
                }
                Step::Backward(step) => {
                    let fwd = step.plan.problem().fwd();
                    let (dims, part) = (fwd.dims, fwd.part);
                    let (i, j) = (part.position_q, part.position_k);
                    format!(
                        "backward, queries {i}..{} x keys {j}..{}: {}",
                        i + dims.seqlen_q,
                        j + dims.seqlen_k,
                        step.plan.kernel()
                    )
                }
                Step::Combine { plan, parts, .. } => {
                    format!("combine {} parts: {}", parts.len(), plan.kernel())
                }
                Step::Sum { plan, terms, .. } => {
                    let held = usize::from(plan.problem().merge == Merge::AddTo);
                    format!("sum of {} f32 terms: {}", terms.len() + held, plan.kernel())
                }
            };
            let _ = writeln!(text, "{number:>4}  {line}");
        }
        text
    }
}

impl Step {
    /// The buffers it reads, and those it writes.
    fn touches(&self) -> (Vec<Buf>, Vec<Buf>) {
        let bufs = |places: &[At]| places.iter().map(|at| at.0).collect::<Vec<_>>();
        match self {
            // Other ranks write the buffers that come; those who read them wait for flags.
            Step::Send => (vec![Buf::K, Buf::V], vec![]),
            Step::Fill { sinks } => (vec![Buf::K, Buf::V], sinks.to_vec()),
            Step::Release { sinks } => (vec![], sinks.clone()),
            Step::SendHome { sources, .. } => (sources.to_vec(), vec![]),
            Step::AwaitHome { sinks } => (vec![], sinks.to_vec()),
            Step::Exchange { sources, sinks, .. } => (sources.clone(), sinks.clone()),
            Step::AllGather { own, others, .. } => (own.clone(), others.clone()),
            Step::Forward { inputs, o, lse, .. } => (bufs(inputs), vec![o.0, lse.0]),
            Step::Backward(step) => {
                let mut writes = bufs(&step.grads);
                writes.extend(step.dsink.map(|at| at.0));
                (bufs(&step.inputs), writes)
            }
            Step::Combine { parts, o, lse, .. } => {
                (parts.iter().flat_map(|part| bufs(part)).collect(), vec![o.0, lse.0])
            }
            Step::Sum { terms, to, .. } => (bufs(terms), vec![to.0]),
        }
    }
}

/// Streams of a device: the caller's; one on which rows move; and one that has every second launch of attention, so that where
/// two do not wait for each other, the last tiles of one leave no processor idle. A step waits for the last one of each other
/// stream that wrote what it touches, or read what it writes, and for no other; nothing waits on the host.
pub(crate) struct Streams {
    moving: Stream,
    second: Stream,
    /// The caller's stream has got so far before the run; none where each other stream's first step waits for one of its steps.
    begun: Option<Event>,
    /// Of each step that another stream waits for.
    done: Vec<Option<Event>>,
    turns: Vec<Turn>,
}

impl Streams {
    /// For a program on this device; none where work is done at return, where there is one rank, or where each step waits for the
    /// one before: all are then on the caller's stream, and there is no event for the host to queue.
    pub(crate) fn new(device: &Device, program: &Program, ranks: u32) -> Result<Option<Self>, fmha::Error> {
        if !device.has_streams() || ranks == 1 || is_one_behind_another(program) {
            return Ok(None);
        }
        let turns = turns(program);
        let event = |wanted: bool| wanted.then(|| device.event()).transpose();
        let is_awaited = |number| turns.iter().any(|turn| turn.after.contains(&number));
        let done = (0..program.steps.len()).map(|number| event(is_awaited(number)));
        let done = done.collect::<Result<_, fmha::Error>>()?;
        let (moving, second) = (device.stream()?, device.stream()?);
        let begun = event([MOVING, SECOND].into_iter().any(|other| begins_with_the_run(&turns, other)))?;
        Ok(Some(Self { moving, second, begun, done, turns }))
    }

    /// Behind the step, or the end of the run, for which a turn is.
    fn wait(&self, turn: &Turn, stream: &Stream) -> Result<(), fmha::Error> {
        turn.after
            .iter()
            .filter_map(|&before| self.done[before].as_ref())
            .try_for_each(|done| stream.wait(done))
    }
}

/// The last step of each stream that wrote a buffer, and that read it.
#[derive(Clone, Copy, Default)]
struct Last {
    wrote: [Option<usize>; STREAMS],
    read: [Option<usize>; STREAMS],
}

/// The caller's, the one on which rows move, the second one for attention.
const STREAMS: usize = 3;
const MOVING: usize = 1;
const SECOND: usize = 2;

/// Which stream a step has, and which steps of other streams it waits for.
struct Turn {
    stream: usize,
    after: Vec<usize>,
}

/// Rows of O and LSE are written once, so those that write them wait for none that do.
fn is_rewritten(buf: &&Buf) -> bool {
    !matches!(buf, Buf::O | Buf::Lse)
}

/// Whether each step waits for the one before, so that no two could run beside each other. Where keys come while kernels run,
/// other ranks' steps do.
fn is_one_behind_another(program: &Program) -> bool {
    let waits = |pair: &[Step]| {
        let ((read, wrote), (reads, writes)) = (pair[0].touches(), pair[1].touches());
        reads.iter().chain(writes.iter().filter(is_rewritten)).any(|buf| wrote.contains(buf))
            || writes.iter().any(|buf| read.contains(buf))
    };
    program.coming.is_none() && program.steps.windows(2).all(waits)
}

/// Whether a stream's first step waits for none of the caller's, and so for what that has before the run.
fn begins_with_the_run(turns: &[Turn], stream: usize) -> bool {
    let first = turns.iter().find(|turn| turn.stream == stream);
    first.is_some_and(|first| first.after.iter().all(|&before| turns[before].stream != 0))
}

/// A step waits for the last one of each other stream that wrote what it touches, or read what it writes, unless its own stream
/// has waited for that one or a later one before. The last turn is the end of the run, behind all streams.
fn turns(program: &Program) -> Vec<Turn> {
    let mut last = vec![Last::default(); CALLS + program.scratch.len()];
    let mut launches = 0u32;
    // Of each stream, up to which step of each other one it is behind.
    let mut behind = [[None; STREAMS]; STREAMS];
    let mut ends = [None; STREAMS];
    let mut waits = move |stream: usize, before: [Option<usize>; STREAMS]| -> Vec<usize> {
        let mut after = Vec::new();
        for other in (0..STREAMS).filter(|&other| other != stream) {
            if before[other] > behind[stream][other] {
                behind[stream][other] = before[other];
                after.extend(before[other]);
            }
        }
        after
    };
    let mut turns = Vec::new();
    for (number, step) in program.steps.iter().enumerate() {
        let stream = match step {
            Step::Exchange { .. } | Step::AllGather { .. } | Step::Send | Step::SendHome { .. } => MOVING,
            Step::Forward { .. } => {
                launches += 1;
                if program.takes_turns && launches.is_multiple_of(2) { SECOND } else { 0 }
            }
            _ => 0,
        };
        let (reads, writes) = step.touches();
        let before = std::array::from_fn(|other| {
            let rewritten = writes.iter().filter(is_rewritten);
            let wrote = reads.iter().chain(rewritten).map(|buf| last[buf.index()].wrote[other]);
            let read = writes.iter().map(|buf| last[buf.index()].read[other]);
            wrote.chain(read).flatten().max()
        });
        reads.iter().for_each(|buf| last[buf.index()].read[stream] = Some(number));
        writes.iter().for_each(|buf| last[buf.index()].wrote[stream] = Some(number));
        ends[stream] = Some(number);
        turns.push(Turn { stream, after: waits(stream, before) });
    }
    turns.push(Turn { stream: 0, after: waits(0, ends) });
    turns
}

/// Memory of a run.
pub(crate) enum Memory<'a> {
    Read(DevSlice<'a>),
    Write(DevSliceMut<'a>),
    Own(DevBuffer),
    /// Not of this call.
    Absent,
}

impl Memory<'_> {
    fn slice(&self) -> DevSlice<'_> {
        match self {
            Self::Read(slice) => *slice,
            Self::Write(slice) => slice.as_input(),
            Self::Own(buffer) => buffer.slice(),
            Self::Absent => DevSlice::host::<u8>(&[]),
        }
    }

    fn slice_mut(&mut self) -> DevSliceMut<'_> {
        match self {
            Self::Write(slice) => slice.skip(0),
            Self::Own(buffer) => buffer.slice_mut(),
            Self::Read(_) | Self::Absent => DevSliceMut::host::<u8>(&mut []),
        }
    }
}

/// The buffers of one run.
pub(crate) struct Buffers<'a> {
    all: Vec<Memory<'a>>,
}

impl<'a> Buffers<'a> {
    /// Those of the call, by [`Buf`], and scratch.
    pub(crate) fn new(call: impl IntoIterator<Item = (Buf, Memory<'a>)>, scratch: Vec<DevBuffer>) -> Self {
        let mut all: Vec<Memory<'a>> = (0..CALLS).map(|_| Memory::Absent).collect();
        for (buf, memory) in call {
            all[buf.index()] = memory;
        }
        all.extend(scratch.into_iter().map(Memory::Own));
        Self { all }
    }

    /// The scratch again, for the next run.
    pub(crate) fn into_scratch(self) -> Vec<DevBuffer> {
        let own = |memory| if let Memory::Own(buffer) = memory { Some(buffer) } else { None };
        self.all.into_iter().filter_map(own).collect()
    }

    fn read(&self, At(buf, offset): At) -> DevSlice<'_> {
        self.all[buf.index()].slice().skip(offset)
    }

    /// Takes buffers out, to write to them beside those that are read.
    fn take(&mut self, bufs: &[Buf]) -> Vec<Memory<'a>> {
        bufs.iter().map(|buf| std::mem::replace(&mut self.all[buf.index()], Memory::Absent)).collect()
    }

    fn put_back(&mut self, bufs: &[Buf], taken: Vec<Memory<'a>>) {
        for (buf, memory) in bufs.iter().zip(taken) {
            self.all[buf.index()] = memory;
        }
    }

    /// Lends the buffers `outputs` names, to be written, and all others, to be read.
    fn with<T>(&mut self, outputs: &[Buf], step: impl FnOnce(&Self, &mut [Memory<'a>]) -> T) -> T {
        let mut taken = self.take(outputs);
        let result = step(self, &mut taken);
        self.put_back(outputs, taken);
        result
    }
}

/// Where steps run.
pub(crate) struct Executor<'a> {
    pub(crate) group: &'a dyn Group,
    pub(crate) stream: &'a Stream,
    pub(crate) streams: Option<&'a Streams>,
    pub(crate) score: ScoreArgs<'a>,
    /// Where keys come that kernels wait for.
    pub(crate) meeting: Option<&'a Meeting>,
}

impl Executor<'_> {
    /// Takes every step.
    pub(crate) fn run(
        &self,
        program: &Program,
        buffers: &mut Buffers<'_>,
        workspaces: &mut [Option<DevBuffer>; 2],
    ) -> Result<()> {
        let rank = self.group.rank();
        let said = |error: fmha::Error| Error::of(rank, &error);
        if let Some((streams, begun)) = self.streams.and_then(|all| Some((all, all.begun.as_ref()?))) {
            begun.record(self.stream).map_err(said)?;
            // A stream without steps is left out: of a recorded run it would not come back to the caller's.
            for (other, stream) in [(MOVING, &streams.moving), (SECOND, &streams.second)] {
                if begins_with_the_run(&streams.turns, other) {
                    stream.wait(begun).map_err(said)?;
                }
            }
        }
        for (number, step) in program.steps.iter().enumerate() {
            let turn = self.streams.map(|streams| (streams, &streams.turns[number]));
            let stream = match turn {
                Some((streams, Turn { stream: MOVING, .. })) => &streams.moving,
                Some((streams, Turn { stream: SECOND, .. })) => &streams.second,
                _ => self.stream,
            };
            let is_second = turn.is_some_and(|(_, turn)| turn.stream == SECOND);
            let workspace = &mut workspaces[usize::from(is_second)];
            if let Some((streams, turn)) = turn {
                streams.wait(turn, stream).map_err(said)?;
            }
            let taken = match step {
                Step::Send
                | Step::Fill { .. }
                | Step::Release { .. }
                | Step::SendHome { .. }
                | Step::AwaitHome { .. } => {
                    let Some(meeting) = self.meeting else { continue };
                    let address = |buf: Buf| buffers.read(At(buf, 0)).as_ptr() as u64;
                    match step {
                        Step::Send => meeting.send(address, stream)?,
                        Step::Fill { .. } => meeting.fill(address, stream)?,
                        &Step::SendHome { step, .. } => meeting.send_home(step, address, stream)?,
                        Step::AwaitHome { .. } => meeting.await_home(stream)?,
                        _ => meeting.release(stream)?,
                    }
                    // An emulated device does at once what is queued, and nothing comes while a kernel runs: before one all
                    // have sent.
                    if matches!(step, Step::Send) && !stream.device().has_clock() {
                        self.group.share(&[])?;
                    }
                    Ok(())
                }
                Step::Exchange { exchange, sources, sinks } => {
                    buffers.with(sinks, |buffers, taken| {
                        let sources: Vec<_> = sources.iter().map(|&buf| buffers.read(At(buf, 0))).collect();
                        let mut sinks: Vec<_> = taken.iter_mut().map(Memory::slice_mut).collect();
                        self.group.exchange(exchange, &sources, &mut sinks, stream)
                    })?;
                    Ok(())
                }
                Step::AllGather { all, bytes, .. } => {
                    buffers.with(std::slice::from_ref(all), |_, taken| {
                        self.group.all_gather(*bytes, &mut taken[0].slice_mut(), stream)
                    })?;
                    Ok(())
                }
                Step::Forward { plan, inputs, o, lse, score } => {
                    buffers.with(&[o.0, lse.0], |buffers, taken| {
                        let [to_o, to_lse] = taken else { return Ok(()) };
                        let [mut to_o, mut to_lse] = [to_o.slice_mut(), to_lse.slice_mut()];
                        let [q, k, v] = inputs.map(|at| buffers.read(at));
                        let mut args = FwdArgs::new(q, k, v, to_o.skip(o.1));
                        args.lse = plan.problem().write_lse.then(|| to_lse.skip(lse.1));
                        args.score = self.score(*score, plan.problem());
                        args.seq.arrivals = self.arrivals(plan.problem());
                        args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
                        plan.run(&mut args, stream)
                    })
                }
                Step::Backward(step) => {
                    let mut outputs: Vec<Buf> = step.grads.iter().map(|at| at.0).collect();
                    outputs.extend(step.dsink.map(|at| at.0));
                    buffers.with(&outputs, |buffers, taken| {
                        let [q, k, v, o, lse, dout] = step.inputs.map(|at| buffers.read(at));
                        let mut slices: Vec<_> = taken.iter_mut().map(Memory::slice_mut).collect();
                        let places = step.grads.iter().copied().chain(step.dsink);
                        let mut slices = slices.iter_mut().zip(places).map(|(slice, at)| slice.skip(at.1));
                        let (Some(dq), Some(dk), Some(dv)) = (slices.next(), slices.next(), slices.next())
                        else {
                            return Ok(());
                        };
                        let mut args = BwdArgs::new([q, k, v], [o, lse, dout], [dq, dk, dv])
                            .dsink(slices.next())
                            .score(self.score(step.score, step.plan.problem().fwd()))
                            .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
                        args.seq.arrivals = self.arrivals(step.plan.problem().fwd());
                        step.plan.run(&mut args, stream)
                    })
                }
                Step::Combine { plan, parts, o, lse } => buffers.with(&[o.0, lse.0], |buffers, taken| {
                    let [to_o, to_lse] = taken else { return Ok(()) };
                    let [mut to_o, mut to_lse] = [to_o.slice_mut(), to_lse.slice_mut()];
                    let parts: Vec<_> = parts
                        .iter()
                        .map(|part| part.map(|at| buffers.read(at)))
                        .map(|[o, lse]| PartialResult { o, lse })
                        .collect();
                    let lse = plan.problem().write_lse.then(|| to_lse.skip(lse.1));
                    plan.run(&mut CombineArgs::new(&parts, to_o.skip(o.1)).lse(lse), stream)
                }),
                Step::Sum { plan, terms, to } => buffers.with(&[to.0], |buffers, taken| {
                    let mut slice = taken[0].slice_mut();
                    let terms: Vec<_> =
                        terms.iter().map(|&term| PartialResult::term(buffers.read(term))).collect();
                    plan.run(&mut CombineArgs::new(&terms, slice.skip(to.1)), stream)
                }),
            };
            taken.map_err(said)?;
            if let Some(done) = self.streams.and_then(|streams| streams.done[number].as_ref()) {
                done.record(stream).map_err(said)?;
            }
        }
        // The caller's stream has all of it behind it.
        if let Some((streams, end)) = self.streams.and_then(|all| Some((all, all.turns.last()?))) {
            streams.wait(end, self.stream).map_err(said)?;
        }
        Ok(())
    }

    /// When a step's keys come, if they do while it runs.
    fn arrivals(&self, part: &fmha::FwdProblem) -> Option<Arrivals<'_>> {
        self.meeting.filter(|_| part.arrivals > 0).map(Meeting::arrivals)
    }

    /// The operands of the score that a part has, from where its own begin.
    fn score(&self, at: ScoreOffsets, part: &fmha::FwdProblem) -> ScoreArgs<'_> {
        let all = self.score;
        fn skip(slice: Option<DevSlice<'_>>, bytes: u64) -> Option<DevSlice<'_>> {
            slice.map(|slice| slice.skip(bytes))
        }
        let [descale_q, descale_k, descale_v] = at.descales;
        let mut score = all;
        score.bias = skip(all.bias, at.bias);
        score.alibi_slopes = skip(all.alibi_slopes, at.alibi);
        score.sink = skip(all.sink, at.sink).filter(|_| part.score.sink);
        score.descale_q = skip(all.descale_q, descale_q);
        score.descale_k = skip(all.descale_k, descale_k);
        score.descale_v = skip(all.descale_v, descale_v);
        score
    }
}

#[cfg(test)]
mod tests {
    use fmha::{Backend, DType, Dims, FwdProblem, MaskSpec, PlanOptions};

    use super::*;
    use crate::partition::Partition;
    use crate::problem::{Gradients, Problem, Whole};
    use crate::scheme::Scheme;

    /// Whether each step comes behind all before it with which it shares a buffer that one of them writes, by the streams'
    /// order and by what it waits for.
    fn is_ordered(program: &Program) {
        let turns = turns(program);
        let mut behind: Vec<Vec<bool>> = Vec::new();
        for (number, turn) in turns.iter().enumerate() {
            let mut own = vec![false; number];
            let same = (0..number).rev().find(|&before| turns[before].stream == turn.stream);
            for before in turn.after.iter().copied().chain(same) {
                own[before] = true;
                for (at, is) in behind[before].iter().enumerate() {
                    own[at] |= is;
                }
            }
            behind.push(own);
        }
        assert!(behind.pop().unwrap().into_iter().all(|is| is), "the run's end is not behind all steps");
        for (number, step) in program.steps.iter().enumerate() {
            let (reads, writes) = step.touches();
            for (before, earlier) in program.steps[..number].iter().enumerate() {
                let (read, wrote) = earlier.touches();
                let once = |buf: &&Buf| !matches!(buf, Buf::O | Buf::Lse);
                let shared = reads.iter().any(|buf| wrote.contains(buf))
                    || writes.iter().any(|buf| read.contains(buf))
                    || writes.iter().filter(once).any(|buf| wrote.contains(buf));
                assert!(!shared || behind[number][before], "step {number} may run before {before}");
            }
        }
    }

    #[test]
    fn steps_that_share_a_buffer_are_in_order_on_streams_of_their_own() {
        let dims = Dims {
            batch: 1,
            seqlen_q: 64,
            seqlen_k: 64,
            num_heads_q: 16,
            num_heads_kv: 8,
            head_dim_qk: 16,
            head_dim_v: 16,
        };
        let whole = FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
        let problem = Problem::new(whole, Partition::zig_zag(64, 4));
        let (device, options) = (Device::open(Backend::Cpu).unwrap(), PlanOptions::default());
        for scheme in [Scheme::Gather, Scheme::Ring, Scheme::Mixed, Scheme::Ulysses] {
            for rank in 0..4 {
                let whole = Whole::new(&problem, rank, 4).unwrap().on_hosts(Some(2));
                // Of Ulysses heads come in groups, or at once.
                for head_groups in [1, 2] {
                    let whole = Whole { head_groups, ..whole.clone() };
                    let mut forward = scheme.forward(&whole, &device, &options).unwrap();
                    let in_groups = scheme == Scheme::Ulysses && head_groups > 1;
                    assert_eq!(forward.takes_turns, scheme == Scheme::Gather || in_groups);
                    is_ordered(&forward);
                    // What goes first are rows that the caller's stream has before the run.
                    assert!(begins_with_the_run(&turns(&forward), MOVING), "{scheme}");
                    forward.takes_turns = true;
                    let second = turns(&forward).iter().filter(|turn| turn.stream == SECOND).count();
                    assert!(
                        second > 0 || scheme == Scheme::Ulysses && !in_groups,
                        "{scheme}: {second} launches there"
                    );
                    is_ordered(&forward);
                }
                let wanted = Gradients { dtype: DType::Bf16, dsink: false };
                is_ordered(&scheme.backward(&whole, wanted, &device, &options).unwrap());
            }
        }
    }

    /// Of a step of decoding each part waits for the one before: no stream but the caller's, and so no event. Of a rank with two
    /// runs of keys their kernels wait for nobody.
    #[test]
    fn a_step_of_decoding_is_one_kernel_one_exchange_and_one_merge_on_one_stream() {
        let dims = Dims {
            batch: 2,
            seqlen_q: 3,
            seqlen_k: 64,
            num_heads_q: 8,
            num_heads_kv: 2,
            head_dim_qk: 16,
            head_dim_v: 24,
        };
        let whole = FwdProblem::batch(DType::Bf16, dims).write_lse(true);
        let keys = Partition::new(64, vec![vec![0..9], vec![], vec![9..20, 40..64], vec![20..40]]).unwrap();
        let problem = Problem::new(whole, Partition::replicated(3, 4)).keys(keys);
        let (device, options) = (Device::open(Backend::Cpu).unwrap(), PlanOptions::default());
        let part = 2 * 3 * 8 * 25 * 4;
        for rank in 0..4 {
            let whole = Whole::new(&problem, rank, 4).unwrap();
            let program = Scheme::Decode.forward(&whole, &device, &options).unwrap();
            is_ordered(&program);
            assert_eq!(program.most_rows(), 0, "{rank}");
            // O and LSE of all queries, each to a multiple of 256 bytes.
            let sent = 3 * (part as u64).next_multiple_of(256);
            assert_eq!(program.bytes_sent(rank), sent, "{rank}");
            let kinds: Vec<&str> = program
                .steps
                .iter()
                .map(|step| match step {
                    Step::Forward { .. } => "forward",
                    Step::AllGather { .. } => "all-gather",
                    Step::Combine { .. } => "combine",
                    _ => "another",
                })
                .collect();
            if rank == 2 {
                assert_eq!(kinds, ["forward", "forward", "combine", "all-gather", "combine"]);
            } else {
                assert_eq!(kinds, ["forward", "all-gather", "combine"], "{rank}");
            }
            assert_eq!(is_one_behind_another(&program), rank != 2);
            // Where there are streams, the exchange waits for a step of the caller's, and not for the run's beginning.
            assert!(!begins_with_the_run(&turns(&program), MOVING));
        }
    }

    /// What ranks send to each other and expect of each other, a message for each row, as the GPUs' group has it.
    #[test]
    fn ranks_send_the_messages_that_the_others_expect_and_not_one_for_each_token() {
        let device = Device::open(Backend::Cpu).unwrap();
        let options = PlanOptions::default();
        let dims = |batch, tokens| Dims {
            batch,
            seqlen_q: tokens,
            seqlen_k: tokens,
            num_heads_q: 8,
            num_heads_kv: 4,
            head_dim_qk: 16,
            head_dim_v: 16,
        };
        let offsets = vec![0, 70, 70, 101, 256];
        let packed = FwdProblem::group(DType::Bf16, dims(4, 155)).mask(MaskSpec::CAUSAL).write_lse(true);
        let problem = |dtype, batch, tokens: u32| {
            let whole = FwdProblem::batch(dtype, dims(batch, tokens)).dtype_o(DType::Bf16);
            let whole = whole.mask(MaskSpec::CAUSAL).write_lse(true);
            Problem::new(whole, Partition::zig_zag(tokens, 4))
        };
        let cases = [
            (problem(DType::Bf16, 1, 1024), 1),
            (problem(DType::Bf16, 2, 512), 1),
            (problem(DType::Bf16, 40, 32), 32),
            (problem(DType::E4m3Fn, 2, 256), 256),
            (Problem::new(packed, Partition::zig_zag(256, 4)).packed(offsets.clone(), offsets), 8),
        ];
        for (number, (problem, rows_each)) in cases.iter().enumerate() {
            for scheme in [Scheme::Gather, Scheme::Ring, Scheme::Mixed, Scheme::Ulysses] {
                for backward in [false, true] {
                    if backward && problem.whole.dtypes.qk.is_fp8() {
                        continue;
                    }
                    let programs: Vec<_> = (0..4)
                        .map(|rank| {
                            let whole = Whole::new(problem, rank, 4).unwrap().on_hosts(Some(2));
                            let wanted = Gradients { dtype: DType::Bf16, dsink: false };
                            match backward {
                                false => scheme.forward(&whole, &device, &options),
                                true => scheme.backward(&whole, wanted, &device, &options),
                            }
                            .unwrap()
                        })
                        .collect();
                    let what = format!("case {number}, {scheme}, backward: {backward}");
                    // By rank and peer, of all exchanges.
                    let messages = |rank: u32, peer: u32, sent: bool| -> Vec<u64> {
                        let steps = programs[rank as usize].steps.iter();
                        let exchanges = steps.filter_map(|step| match step {
                            Step::Exchange { exchange, .. } => Some(exchange),
                            _ => None,
                        });
                        let parcels = exchanges.flat_map(|all| if sent { &all.sends } else { &all.receives });
                        let to = parcels.filter(|parcel| parcel.peer == peer);
                        to.flat_map(|parcel| (0..parcel.block.rows).map(|_| parcel.block.row_bytes)).collect()
                    };
                    for (rank, peer) in (0..4).flat_map(|rank| (0..4).map(move |peer| (rank, peer))) {
                        let sent = messages(rank, peer, true);
                        assert_eq!(sent, messages(peer, rank, false), "{what}: {rank} to {peer}");
                    }
                    let most = programs.iter().map(Program::most_rows).max().unwrap();
                    assert!(most < 512 * rows_each, "{what}: {most} rows");
                }
            }
        }
    }
}
