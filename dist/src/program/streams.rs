//! Stream of each step, and the steps of other streams that it waits for.
//!
//! ```text
//!  moving   K V of others ─┐
//!  caller                  ├─► attend, queries of run 3 ─┬─► end
//!  second                  └─► attend, queries of run 0 ─┘
//! ```
//!
//! A step waits for the last one of each other stream that wrote what it touches, or read what it writes, and
//! for no other; nothing waits on the host.

use fmha::{Device, Event, Stream};

use super::{Buf, CALLS, Program, Step};

/// The caller's stream.
const CALLER: usize = 0;
/// Index of the stream on which rows move.
pub(super) const MOVING: usize = 1;
/// The one that has every second launch of attention, so that where two do not wait for each other, the last
/// tiles of one leave no processor idle.
pub(super) const SECOND: usize = 2;
const STREAMS: usize = 3;

/// A device's streams for a program, and the events by which they wait for each other.
pub(crate) struct Streams {
    moving: Stream,
    second: Stream,
    /// The caller's stream has got so far before the run; none where each other stream's first step waits for
    /// one of its steps.
    begun: Option<Event>,
    /// Events of the steps that another stream waits for.
    done: Vec<Option<Event>>,
    turns: Vec<Turn>,
}

impl Streams {
    /// Makes the streams for a program on this device. `None` where work is done at return, where there is
    /// one rank, or where each step waits for the one before: all steps are then on the caller's stream, and
    /// the host queues no event.
    pub(crate) fn new(device: &Device, program: &Program) -> Result<Option<Self>, fmha::Error> {
        if !device.has_streams() || program.ranks == 1 || is_one_behind_another(program) {
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

    /// Orders all steps after the work that the caller's stream has before the run.
    pub(super) fn begin(&self, caller: &Stream) -> Result<(), fmha::Error> {
        let Some(begun) = &self.begun else { return Ok(()) };
        begun.record(caller)?;
        // A stream without steps is left out: of a recorded run it would not come back to the caller's.
        for (other, stream) in [(MOVING, &self.moving), (SECOND, &self.second)] {
            if begins_with_the_run(&self.turns, other) {
                stream.wait(begun)?;
            }
        }
        Ok(())
    }

    /// The stream of a step, behind all that it waits for; and whether it is the second one of attention.
    pub(super) fn enter<'a>(
        &'a self,
        number: usize,
        caller: &'a Stream,
    ) -> Result<(&'a Stream, bool), fmha::Error> {
        let turn = &self.turns[number];
        let stream = match turn.stream {
            MOVING => &self.moving,
            SECOND => &self.second,
            _ => caller,
        };
        self.wait(turn, stream)?;
        Ok((stream, turn.stream == SECOND))
    }

    /// Records that a step is queued on its stream.
    pub(super) fn leave(&self, number: usize, stream: &Stream) -> Result<(), fmha::Error> {
        self.done[number].as_ref().map_or(Ok(()), |done| done.record(stream))
    }

    /// Makes the caller's stream wait for the whole run.
    pub(super) fn end(&self, caller: &Stream) -> Result<(), fmha::Error> {
        self.turns.last().map_or(Ok(()), |end| self.wait(end, caller))
    }

    fn wait(&self, turn: &Turn, stream: &Stream) -> Result<(), fmha::Error> {
        let mut awaited = turn.after.iter().filter_map(|&before| self.done[before].as_ref());
        awaited.try_for_each(|done| stream.wait(done))
    }
}

/// The last step of each stream that wrote a buffer, and that read it.
#[derive(Clone, Copy, Default)]
struct Last {
    wrote: [Option<usize>; STREAMS],
    read: [Option<usize>; STREAMS],
}

/// Stream of a step, and the steps of other streams that it waits for.
pub(super) struct Turn {
    pub(super) stream: usize,
    pub(super) after: Vec<usize>,
}

/// Rows of O and LSE are written once, so those that write them wait for none that do.
pub(super) fn is_rewritten(buf: &&Buf) -> bool {
    !matches!(buf, Buf::O | Buf::Lse)
}

/// Whether each step waits for the one before, so that no two steps could overlap. If keys arrive while
/// kernels run, steps of other ranks overlap.
pub(super) fn is_one_behind_another(program: &Program) -> bool {
    let waits = |pair: &[Step]| {
        let ((read, wrote), (reads, writes)) = (pair[0].touches(), pair[1].touches());
        reads.iter().chain(writes.iter().filter(is_rewritten)).any(|buf| wrote.contains(buf))
            || writes.iter().any(|buf| read.contains(buf))
    };
    program.coming.is_none() && program.steps.windows(2).all(waits)
}

/// Whether a stream's first step waits for none of the caller's, and so for what that has before the run.
pub(super) fn begins_with_the_run(turns: &[Turn], stream: usize) -> bool {
    let first = turns.iter().find(|turn| turn.stream == stream);
    first.is_some_and(|first| first.after.iter().all(|&before| turns[before].stream != CALLER))
}

/// Stream and dependencies of each step. A step waits for the last step of each other stream that wrote what
/// it touches, or read what it writes, unless its own stream has already waited for that step or a later one.
/// The last entry is the end of the run, after all streams.
pub(super) fn turns(program: &Program) -> Vec<Turn> {
    let mut last = vec![Last::default(); CALLS + program.scratch.len()];
    let mut launches = 0u32;
    // Last step of each other stream that a stream has waited for.
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
                if program.takes_turns && launches.is_multiple_of(2) { SECOND } else { CALLER }
            }
            _ => CALLER,
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
    turns.push(Turn { stream: CALLER, after: waits(CALLER, ends) });
    turns
}
