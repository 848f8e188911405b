//! Programs of schemes: [steps](Step) over numbered [buffers](Buf), made once when all ranks plan, and their
//! execution.
//!
//! ```text
//!  Program     steps in their order, and the scratch that they need
//!      │       explain: a line a step
//!  Streams     which step is on which of three streams, and which others it waits for: from the buffers that it touches
//!  Executor    takes every step: of the group, of a plan of this rank's device, of keys that come while kernels run
//! ```
//!
//! Threads, processes and GPUs take the same steps.

mod executor;
mod explain;
mod memory;
mod streams;
#[cfg(test)]
mod tests;

pub(crate) use executor::Executor;
pub(crate) use memory::{Buffers, Memory};
pub(crate) use streams::Streams;

use fmha::{BwdPlan, CombinePlan, FwdPlan};

use crate::arrivals::Coming;
use crate::group::{Block, Exchange};
use crate::problem::ScoreOffsets;

/// A buffer of the program: one of the call's, or scratch.
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
    /// The gradient of a captured tensor.
    Dcaptured(usize),
    Scratch(usize),
}

/// Most gradients of captured tensors that a call has.
pub(crate) const MOST_CAPTURED: usize = 16;

/// Number of buffers of a call.
const CALLS: usize = 10 + MOST_CAPTURED;

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
            Buf::Dcaptured(number) => 10 + number,
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
    /// Gradients of captured tensors, in f32.
    pub(crate) dcaptured: Vec<At>,
    pub(crate) score: ScoreOffsets,
}

pub(crate) enum Step {
    /// Sends this rank's keys, piece by piece, to the buffers where other ranks' kernels wait for them.
    Send,
    /// Copies this rank's own keys to their places among the arriving ones.
    Fill { sinks: [Buf; 2] },
    /// Allows the next run to send again, because the arrived keys have been read.
    Release { sinks: Vec<Buf> },
    /// Sends dK and dV that no later kernel changes to their owners, which add them. `step` is the number of
    /// kernels before.
    SendHome { step: usize, sources: [Buf; 2] },
    /// Waits until the gradients of this rank's keys have arrived.
    AwaitHome { sinks: [Buf; 2] },
    /// Rows move between ranks.
    Exchange { exchange: Exchange, sources: Vec<Buf>, sinks: Vec<Buf> },
    /// Gathers each rank's stretch of a buffer on all ranks. `own` lie in this rank's stretch of `bytes`
    /// bytes, `others` in the others'.
    AllGather { all: Buf, bytes: u64, own: Vec<Buf>, others: Vec<Buf> },
    /// Attention of some queries over some keys: Q, K and V; O; LSE.
    Forward { plan: FwdPlan, inputs: [At; 3], o: At, lse: At, score: ScoreOffsets },
    /// Gradients of some queries and keys: from Q, K, V, O, LSE and dO; dQ, dK and dV in f32.
    Backward(Box<Backward>),
    /// Merges partial results of the same queries.
    Combine { plan: CombinePlan, parts: Vec<[At; 2]>, o: At, lse: At },
    /// Gradients in f32 of several sources are added.
    Sum { plan: CombinePlan, terms: Vec<At>, to: At },
}

/// A buffer of scratch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scratch {
    pub(crate) bytes: u64,
    /// Buffer that this one is a part of, and where the part begins; `None` for a buffer of its own.
    pub(crate) within: Option<(usize, u64)>,
}

/// Steps in their order.
pub(crate) struct Program {
    pub(crate) steps: Vec<Step>,
    pub(crate) scratch: Vec<Scratch>,
    pub(crate) workspace: u64,
    /// Keys that arrive while kernels wait for them.
    pub(crate) coming: Option<Coming>,
    /// Whether forward launches alternate between two streams.
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
}

impl Step {
    /// The buffers it reads, and those it writes.
    fn touches(&self) -> (Vec<Buf>, Vec<Buf>) {
        let bufs = |places: &[At]| places.iter().map(|at| at.0).collect::<Vec<_>>();
        match self {
            // Other ranks write the buffers that arrive; readers wait for flags.
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
                writes.extend(bufs(&step.dcaptured));
                (bufs(&step.inputs), writes)
            }
            Step::Combine { parts, o, lse, .. } => {
                (parts.iter().flat_map(|part| bufs(part)).collect(), vec![o.0, lse.0])
            }
            Step::Sum { terms, to, .. } => (bufs(terms), vec![to.0]),
        }
    }
}
