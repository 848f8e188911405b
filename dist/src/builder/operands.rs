//! Tensors in buffers, and what attention of a piece reads and writes.

use std::ops::Range;

use fmha::DType;

use crate::partition::Piece;
use crate::problem::{LseRows, Tensor};
use crate::program::{At, Buf, Part};

/// A tensor in a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) buf: Buf,
    pub(crate) tensor: Tensor,
}

impl Held {
    pub(crate) fn at(&self, row: u32) -> At {
        At(self.buf, self.tensor.at(row))
    }

    /// `count` rows from `row` on, of every sequence.
    pub(crate) fn rows(&self, row: u32, count: u32) -> Part {
        (self.buf, self.tensor.rows(row, count))
    }

    /// Every row of every sequence.
    pub(crate) fn all_rows(&self) -> Part {
        self.rows(0, self.tensor.rows)
    }

    /// `count` rows from `row` on, of some heads: a block for each sequence.
    pub(crate) fn rows_of_heads(&self, row: u32, count: u32, heads: &Range<u32>) -> Vec<Part> {
        self.tensor.rows_of_heads(row, count, heads).into_iter().map(|block| (self.buf, block)).collect()
    }

    /// Whole tensor as one row.
    pub(crate) fn block(&self) -> Part {
        (self.buf, self.tensor.block())
    }
}

/// An LSE in a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldLse {
    pub(crate) buf: Buf,
    pub(crate) rows: LseRows,
}

impl HeldLse {
    /// `count` rows from `row` on, of some heads: a block for each sequence.
    pub(crate) fn rows_of_heads(&self, row: u32, count: u32, heads: &Range<u32>) -> Vec<Part> {
        self.rows.blocks_of_heads(row, count, heads).into_iter().map(|block| (self.buf, block)).collect()
    }

    /// Parts with a piece's rows, the first of which is `row`, for each of `heads` heads.
    pub(super) fn parts(&self, q: &Piece, row: u32, heads: u32) -> Vec<Part> {
        self.rows.blocks(row, q.rows(), &(0..heads)).into_iter().map(|block| (self.buf, block)).collect()
    }
}

/// O in f32 and LSE of some queries over the keys so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Partial {
    pub(crate) o: Held,
    pub(crate) lse: HeldLse,
}

/// Operands of a piece's attention.
pub(crate) struct Operands {
    pub(crate) q: Held,
    pub(crate) k: Held,
    pub(crate) v: Held,
    /// Number of pieces in which K and V arrive while kernels run; 0 if they are present.
    pub(crate) arrivals: u32,
}

/// Outputs of a forward call of a piece.
#[derive(Clone, Copy)]
pub(super) struct Forward {
    pub(super) dtype: DType,
    /// Index of the first row of O.
    pub(super) row: u32,
    /// Whether the sinks enter.
    pub(super) sink: bool,
    /// Whether every query sees every key, so that no mask need be compiled in.
    pub(super) all_seen: bool,
}

impl Forward {
    /// A partial result: f32 in a buffer of its own, and no sinks.
    pub(super) fn partial(all_seen: bool) -> Self {
        Self { dtype: DType::F32, row: 0, sink: false, all_seen }
    }
}

/// Inputs of the backward other than Q, K and V.
pub(crate) struct Given {
    pub(crate) o: Held,
    pub(crate) dout: Held,
    pub(crate) lse: HeldLse,
}

/// Destinations of a piece's gradients: dQ, dK and dV, f32, each at a row; the gradient of the sinks.
pub(crate) struct Grads {
    pub(crate) parts: [(Held, u32); 3],
    pub(crate) dsink: Option<At>,
}
