//! Language of the schemes. A scheme tells the [`Builder`] the moves and the computations; the builder
//! records the steps and the scratch that they need.
//!
//! - [operands](self::operands): tensors in buffers, and what attention reads and writes.
//! - `exchange`: [`Moves`] between ranks; rows of many are packed to one message.
//! - `attention`: forward and backward of a piece of queries and one of keys.
//! - `merge`: partial results become one, gradients are added.

mod attention;
mod exchange;
mod merge;
mod operands;

pub(crate) use exchange::{Moves, messages};
pub(crate) use merge::MAX_PARTS;
pub(crate) use operands::{Given, Grads, Held, HeldLse, Operands, Partial};

use fmha::{DType, Device, PlanOptions};

use crate::arrivals::{Coming, Home};
use crate::error::Error;
use crate::partition::Piece;
use crate::problem::{Kind, LseRows, Tensor, Whole};
use crate::program::{At, Buf, Program, Scratch, Step};

/// Puts a program together for one rank.
pub(crate) struct Builder<'a> {
    pub(crate) whole: &'a Whole,
    device: &'a Device,
    options: &'a PlanOptions,
    program: Program,
    /// Scratch that later steps may use again, and its bytes.
    free: Vec<(Buf, u64)>,
    /// The type of each scratch buffer's elements, as it is used now.
    dtypes: Vec<DType>,
    /// Sums in f32 of the gradients of captured tensors, once a step has written to them.
    captured: Vec<Buf>,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(whole: &'a Whole, device: &'a Device, options: &'a PlanOptions) -> Self {
        let program = Program {
            steps: Vec::new(),
            scratch: Vec::new(),
            workspace: 0,
            coming: None,
            takes_turns: false,
            ranks: whole.ranks,
        };
        Self { whole, device, options, program, free: Vec::new(), dtypes: Vec::new(), captured: Vec::new() }
    }

    pub(crate) fn finish(self) -> Program {
        self.program
    }

    pub(crate) fn rank(&self) -> u32 {
        self.whole.rank
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.whole.ranks
    }

    fn wrong(&self, error: &fmha::Error) -> Error {
        Error::of(self.rank(), error)
    }

    pub(crate) fn push(&mut self, step: Step) {
        self.program.steps.push(step);
    }

    /// Makes all later forward launches alternate between two streams.
    pub(crate) fn take_turns(&mut self) {
        self.program.takes_turns = true;
    }

    /// Keys come from here on, for kernels that wait for them.
    pub(crate) fn come(&mut self, coming: Coming) {
        self.push(Step::Send);
        self.push(Step::Fill { sinks: coming.buffers });
        self.program.coming = Some(coming);
    }

    /// No later step reads what has come, home or to be read.
    pub(crate) fn read_all_that_came(&mut self) {
        if let Some(coming) = &self.program.coming {
            let sinks = coming.all_buffers();
            self.push(Step::Release { sinks });
        }
    }

    /// Lets dK and dV go home while later kernels run.
    pub(crate) fn go_home(&mut self, home: Home) {
        if let Some(coming) = &mut self.program.coming {
            coming.home = Some(home);
        }
    }

    /// Scratch for elements of this type: what steps before have released, or more.
    pub(crate) fn scratch(&mut self, dtype: DType, bytes: u64) -> Buf {
        let Some(at) = self.free.iter().position(|&(_, free)| free == bytes) else {
            return self.keep(dtype, bytes);
        };
        let (buf, _) = self.free.swap_remove(at);
        if let Buf::Scratch(number) = buf {
            self.dtypes[number] = dtype;
        }
        buf
    }

    /// Scratch that no other step has before or behind: other ranks write it.
    pub(crate) fn keep(&mut self, dtype: DType, bytes: u64) -> Buf {
        self.new_scratch(dtype, bytes, None)
    }

    fn new_scratch(&mut self, dtype: DType, bytes: u64, within: Option<(usize, u64)>) -> Buf {
        self.program.scratch.push(Scratch { bytes, within });
        self.dtypes.push(dtype);
        Buf::Scratch(self.program.scratch.len() - 1)
    }

    /// Releases buffers that no later step reads: later steps may write to them.
    pub(crate) fn release(&mut self, held: impl IntoIterator<Item = Held>) {
        self.free.extend(held.into_iter().map(|held| (held.buf, held.tensor.bytes())));
    }

    fn free_scratch(&mut self, buf: Buf, bytes: u64) {
        self.free.push((buf, bytes));
    }

    pub(crate) fn hold(&mut self, tensor: Tensor) -> Held {
        Held { buf: self.scratch(tensor.dtype, tensor.bytes()), tensor }
    }

    pub(crate) fn hold_lse(&mut self, rows: LseRows) -> HeldLse {
        HeldLse { buf: self.scratch(DType::F32, rows.bytes()), rows }
    }

    /// Holds room for the gradient of the sinks of `heads` heads.
    pub(crate) fn hold_dsink(&mut self, heads: u32) -> At {
        At(self.scratch(DType::F32, 4 * u64::from(heads)), 0)
    }

    /// Tensor of this rank: Q, K, V or O.
    pub(crate) fn own(&self, kind: Kind) -> Held {
        let buf = match kind {
            Kind::Q => Buf::Q,
            Kind::K => Buf::K,
            Kind::V => Buf::V,
            Kind::O => Buf::O,
        };
        self.own_as(buf, kind, self.whole.dtype(kind))
    }

    /// Gradient tensor of this rank: dO, dQ, dK or dV.
    pub(crate) fn own_as(&self, buf: Buf, kind: Kind, dtype: DType) -> Held {
        Held { buf, tensor: self.whole.tensor_of(kind, self.rank(), dtype) }
    }

    /// LSE of this rank.
    pub(crate) fn own_lse(&self) -> HeldLse {
        HeldLse { buf: Buf::Lse, rows: self.whole.own_lse() }
    }

    /// Q, K and V that this rank has itself.
    pub(crate) fn own_operands(&self) -> Operands {
        Operands { q: self.own(Kind::Q), k: self.own(Kind::K), v: self.own(Kind::V), arrivals: 0 }
    }

    /// O, dO and LSE of this rank's queries.
    pub(crate) fn own_given(&self) -> Given {
        let dout = self.own_as(Buf::Dout, Kind::O, self.whole.dtype(Kind::O));
        Given { o: self.own(Kind::O), dout, lse: self.own_lse() }
    }

    pub(crate) fn queries(&self) -> Vec<Piece> {
        self.whole.q.pieces(self.rank())
    }

    pub(crate) fn keys_of(&self, rank: u32) -> Vec<Piece> {
        self.whole.k.pieces(rank)
    }

    /// The type of a buffer's elements, if a copy by numbers keeps its values to the bit: none of 8 bits.
    fn dtype_of(&self, buf: Buf) -> Option<DType> {
        let dtypes = self.whole.fwd.dtypes;
        let dtype = match buf {
            Buf::Q | Buf::K => dtypes.qk,
            Buf::V => dtypes.v,
            Buf::O | Buf::Dout => dtypes.o,
            Buf::Lse | Buf::Dsink => DType::F32,
            Buf::Dq | Buf::Dk | Buf::Dv | Buf::Dcaptured(_) => return None,
            Buf::Scratch(number) => self.dtypes[number],
        };
        (!dtype.is_fp8()).then_some(dtype)
    }
}
