//! Places of rows in a tensor.

use std::ops::Range;

use fmha::{DType, Strides};

use crate::group::Block;
use crate::partition::Piece;

/// Kind of tensor: its rows belong to queries or keys, and have the length that the products need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Q,
    K,
    V,
    O,
}

impl Kind {
    pub(crate) fn is_of_queries(self) -> bool {
        matches!(self, Kind::Q | Kind::O)
    }
}

/// A contiguous `[batch, rows, heads, dim]` .
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    pub(crate) batch: u32,
    pub(crate) rows: u32,
    pub(crate) heads: u32,
    pub(crate) dim: u32,
    pub(crate) dtype: DType,
}

impl Tensor {
    fn head_bytes(&self) -> u64 {
        u64::from(self.dim) * self.dtype.size_bytes()
    }

    pub(crate) fn row_bytes(&self) -> u64 {
        u64::from(self.heads) * self.head_bytes()
    }

    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.batch) * u64::from(self.rows) * self.row_bytes()
    }

    /// Offset of a row of the first sequence.
    pub(crate) fn at(&self, row: u32) -> u64 {
        u64::from(row) * self.row_bytes()
    }

    pub(crate) fn strides(&self) -> Strides {
        let (head, rows) = (i64::from(self.dim), i64::from(self.rows));
        let seq = head * i64::from(self.heads);
        Strides { batch: seq * rows, seq, head, dim: 1 }
    }

    /// Whole tensor.
    pub(crate) fn block(&self) -> Block {
        Block { offset: 0, rows: 1, row_bytes: self.bytes(), stride: self.bytes() }
    }

    /// `count` rows from `row` on, of every sequence.
    pub(crate) fn rows(&self, row: u32, count: u32) -> Block {
        Block {
            offset: self.at(row),
            rows: self.batch.into(),
            row_bytes: u64::from(count) * self.row_bytes(),
            stride: u64::from(self.rows) * self.row_bytes(),
        }
    }

    /// Rows of some heads: a list with one block for each sequence.
    pub(crate) fn rows_of_heads(&self, row: u32, count: u32, heads: &Range<u32>) -> Vec<Block> {
        let stride = self.row_bytes();
        let block = |sequence: u32| Block {
            offset: self.at(sequence * self.rows + row) + u64::from(heads.start) * self.head_bytes(),
            rows: count.into(),
            row_bytes: u64::from(heads.end - heads.start) * self.head_bytes(),
            stride,
        };
        (0..self.batch).map(block).collect()
    }
}

/// A contiguous f32 `[batch, heads, rows]`: an LSE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LseRows {
    pub(crate) batch: u32,
    pub(crate) heads: u32,
    pub(crate) rows: u32,
}

impl LseRows {
    /// LSE rows of one piece of queries.
    pub(crate) fn of_piece(q: &Piece, heads: u32) -> Self {
        Self { batch: q.num_sequences(), heads, rows: q.rows() }
    }

    pub(crate) fn bytes(&self) -> u64 {
        4 * u64::from(self.batch) * u64::from(self.heads) * u64::from(self.rows)
    }

    /// `count` rows from `row` on, of some heads of every sequence: a block for each sequence, or one of all heads.
    pub(crate) fn blocks(&self, row: u32, count: u32, heads: &Range<u32>) -> Vec<Block> {
        if *heads != (0..self.heads) {
            return self.blocks_of_heads(row, count, heads);
        }
        let rows = u64::from(self.batch) * u64::from(self.heads);
        vec![Block { rows, ..self.block(row, count, 0) }]
    }

    /// Rows of some heads, one block for each sequence even for all heads: the blocks of a rank whose LSE has
    /// more heads are divided so.
    pub(crate) fn blocks_of_heads(&self, row: u32, count: u32, heads: &Range<u32>) -> Vec<Block> {
        let first = |sequence| u64::from(sequence) * u64::from(self.heads) + u64::from(heads.start);
        let rows = u64::from(heads.end - heads.start);
        (0..self.batch).map(|sequence| Block { rows, ..self.block(row, count, first(sequence)) }).collect()
    }

    /// `count` rows from `row` on of one head, counted over all sequences.
    fn block(&self, row: u32, count: u32, head: u64) -> Block {
        let stride = 4 * u64::from(self.rows);
        let offset = head * stride + 4 * u64::from(row);
        Block { offset, rows: 1, row_bytes: 4 * u64::from(count), stride }
    }
}
