//! Execution of a program's steps.

use fmha::expr::Number;
use fmha::{
    Arrivals, BwdArgs, CombineArgs, DevBuffer, DevSlice, FwdArgs, FwdProblem, MaskArgs, PartNumber,
    PartialResult, ScoreArgs, Stream,
};

use super::{At, Backward, Buf, Buffers, Memory, Program, Step, Streams};
use crate::arrivals::Meeting;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::problem::ScoreOffsets;

/// Environment in which steps run.
pub(crate) struct Executor<'a> {
    pub(crate) group: &'a dyn Group,
    pub(crate) stream: &'a Stream,
    pub(crate) streams: Option<&'a Streams>,
    pub(crate) score: ScoreArgs<'a>,
    pub(crate) masks: MaskArgs<'a>,
    /// Source of each number that the functions of a part capture.
    pub(crate) part_numbers: &'a [PartNumber],
    /// Meeting for keys that kernels wait for.
    pub(crate) meeting: Option<&'a Meeting>,
}

impl Executor<'_> {
    /// Takes every step. The second workspace is that of the second stream.
    pub(crate) fn run(
        &self,
        program: &Program,
        buffers: &mut Buffers<'_>,
        workspaces: &mut [Option<DevBuffer>; 2],
    ) -> Result<()> {
        let said = |error| self.said(&error);
        let Some(streams) = self.streams else {
            let [workspace, _] = workspaces;
            return program
                .steps
                .iter()
                .try_for_each(|step| self.step(step, buffers, workspace, self.stream));
        };
        streams.begin(self.stream).map_err(said)?;
        for (number, step) in program.steps.iter().enumerate() {
            let (stream, is_second) = streams.enter(number, self.stream).map_err(said)?;
            self.step(step, buffers, &mut workspaces[usize::from(is_second)], stream)?;
            streams.leave(number, stream).map_err(said)?;
        }
        streams.end(self.stream).map_err(said)
    }

    fn said(&self, error: &fmha::Error) -> Error {
        Error::of(self.group.rank(), error)
    }

    fn step(
        &self,
        step: &Step,
        buffers: &mut Buffers<'_>,
        workspace: &mut Option<DevBuffer>,
        stream: &Stream,
    ) -> Result<()> {
        let ran = match step {
            Step::Send
            | Step::Fill { .. }
            | Step::Release { .. }
            | Step::SendHome { .. }
            | Step::AwaitHome { .. } => return self.arrival(step, buffers, stream),
            Step::Exchange { exchange, sources, sinks } => {
                return buffers.with(sinks, |buffers, taken| {
                    let sources: Vec<_> = sources.iter().map(|&buf| buffers.read(At(buf, 0))).collect();
                    let mut sinks: Vec<_> = taken.iter_mut().map(Memory::slice_mut).collect();
                    self.group.exchange(exchange, &sources, &mut sinks, stream)
                });
            }
            Step::AllGather { all, bytes, .. } => {
                return buffers.with(&[*all], |_, taken| {
                    self.group.all_gather(*bytes, &mut taken[0].slice_mut(), stream)
                });
            }
            Step::Forward { plan, inputs, o, lse, score } => buffers.with(&[o.0, lse.0], |buffers, taken| {
                let [to_o, to_lse] = taken else { return Ok(()) };
                let [mut to_o, mut to_lse] = [to_o.slice_mut(), to_lse.slice_mut()];
                let [q, k, v] = inputs.map(|at| buffers.read(at));
                let numbers = self.numbers(*score, plan.problem());
                let mut args = FwdArgs::new(q, k, v, to_o.skip(o.1));
                args.lse = plan.problem().write_lse.then(|| to_lse.skip(lse.1));
                args.score = self.score(*score, plan.problem());
                args.score.numbers = &numbers;
                args.masks = self.masks(*score, plan.problem());
                args.seq.arrivals = self.arrivals(plan.problem());
                args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
                plan.run(&mut args, stream)
            }),
            Step::Backward(step) => self.backward(step, buffers, workspace, stream),
            Step::Combine { plan, parts, o, lse } => buffers.with(&[o.0, lse.0], |buffers, taken| {
                let [to_o, to_lse] = taken else { return Ok(()) };
                let [mut to_o, mut to_lse] = [to_o.slice_mut(), to_lse.slice_mut()];
                let part = |[o, lse]: [At; 2]| PartialResult { o: buffers.read(o), lse: buffers.read(lse) };
                let parts: Vec<_> = parts.iter().copied().map(part).collect();
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
        ran.map_err(|error| self.said(&error))
    }

    /// A step of keys that come while kernels run, and of dK and dV that go home.
    fn arrival(&self, step: &Step, buffers: &Buffers<'_>, stream: &Stream) -> Result<()> {
        let Some(meeting) = self.meeting else { return Ok(()) };
        let address = |buf: Buf| buffers.read(At(buf, 0)).as_ptr() as u64;
        match step {
            Step::Send => {
                meeting.send(address, stream)?;
                // An emulated device does at once what is queued, and nothing comes while a kernel runs:
                // before one all have sent.
                if !stream.device().has_clock() {
                    self.group.share(&[])?;
                }
                Ok(())
            }
            Step::Fill { .. } => meeting.fill(address, stream),
            &Step::SendHome { step, .. } => meeting.send_home(step, address, stream),
            Step::AwaitHome { .. } => meeting.await_home(stream),
            _ => meeting.release(stream),
        }
    }

    fn backward(
        &self,
        step: &Backward,
        buffers: &mut Buffers<'_>,
        workspace: &mut Option<DevBuffer>,
        stream: &Stream,
    ) -> Result<(), fmha::Error> {
        let places: Vec<At> =
            step.grads.into_iter().chain(step.dsink).chain(step.dcaptured.iter().copied()).collect();
        let outputs: Vec<Buf> = places.iter().map(|at| at.0).collect();
        buffers.with(&outputs, |buffers, taken| {
            let [q, k, v, o, lse, dout] = step.inputs.map(|at| buffers.read(at));
            let mut slices: Vec<_> = taken.iter_mut().map(Memory::slice_mut).collect();
            let mut slices = slices.iter_mut().zip(&places).map(|(slice, at)| slice.skip(at.1));
            let (Some(dq), Some(dk), Some(dv)) = (slices.next(), slices.next(), slices.next()) else {
                return Ok(());
            };
            let fwd = step.plan.problem().fwd();
            let numbers = self.numbers(step.score, fwd);
            let dsink = if step.dsink.is_some() { slices.next() } else { None };
            let mut score = self.score(step.score, fwd);
            score.numbers = &numbers;
            let mut args = BwdArgs::new([q, k, v], [o, lse, dout], [dq, dk, dv])
                .dsink(dsink)
                .dcaptured(slices.collect::<Vec<_>>())
                .score(score)
                .masks(self.masks(step.score, fwd))
                .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
            args.seq.arrivals = self.arrivals(fwd);
            step.plan.run(&mut args, stream)
        })
    }

    /// Words that announce a step's keys, if they come while it runs.
    fn arrivals(&self, part: &FwdProblem) -> Option<Arrivals<'_>> {
        self.meeting.filter(|_| part.arrivals > 0).map(Meeting::arrivals)
    }

    /// The operands of the score that a part has, from where its own begin.
    fn score(&self, at: ScoreOffsets, part: &FwdProblem) -> ScoreArgs<'_> {
        fn skip(slice: Option<DevSlice<'_>>, bytes: u64) -> Option<DevSlice<'_>> {
            slice.map(|slice| slice.skip(bytes))
        }
        let [descale_q, descale_k, descale_v] = at.descales;
        let mut score = self.score;
        score.bias = skip(score.bias, at.bias);
        score.alibi_slopes = skip(score.alibi_slopes, at.alibi);
        score.sink = skip(score.sink, at.sink).filter(|_| part.score.sink);
        score.descale_q = skip(score.descale_q, descale_q);
        score.descale_k = skip(score.descale_k, descale_k);
        score.descale_v = skip(score.descale_v, descale_v);
        if part.code.captured.is_empty() {
            score.captured = &[];
        }
        score
    }

    /// The numbers that a part's functions capture.
    fn numbers(&self, at: ScoreOffsets, part: &FwdProblem) -> Vec<Number> {
        if part.code.is_empty() {
            return Vec::new();
        }
        if part.part.is_whole() {
            return self.score.numbers.to_vec();
        }
        let of = |source: &PartNumber| match *source {
            PartNumber::OfWhole(at) => self.score.numbers.get(at).copied(),
            PartNumber::OfPart(variable) => Some(Number::Int(at.place(variable).into())),
        };
        self.part_numbers.iter().filter_map(of).collect()
    }

    /// The tensors of a part's masks as data, from where its own begin.
    fn masks(&self, at: ScoreOffsets, part: &FwdProblem) -> MaskArgs<'_> {
        let mut masks = MaskArgs::default();
        if part.masks.is_empty() {
            return masks;
        }
        let given = &self.masks;
        for (to, from, bytes) in [
            (&mut masks.intervals, given.intervals, at.masks[0]),
            (&mut masks.bits, given.bits, at.masks[1]),
            (&mut masks.kv_num_blocks, given.kv_num_blocks, at.masks[2]),
            (&mut masks.kv_indices, given.kv_indices, at.masks[3]),
            (&mut masks.full_kv_num_blocks, given.full_kv_num_blocks, at.masks[4]),
            (&mut masks.full_kv_indices, given.full_kv_indices, at.masks[5]),
        ] {
            *to = from.map(|slice| slice.skip(bytes));
        }
        masks
    }
}
