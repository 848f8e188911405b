//! The kernels of a tile, each an [`Op`](crate::simd::Op): what a task calls one after another.

mod gather;
mod product;
mod rows;
mod softmax;
mod tiles;
mod write;

pub(crate) use gather::{Gather, GatherRows, GatherTransposed, TransposePanels, row_stride};
pub(crate) use product::{Columns, FmaLoop, RowDots, Rows, Scores};
pub(crate) use rows::{
    AddValues, Ahead, BLOCK_KEYS, Block, Dots, Order, Pieces, RowSums, SoftmaxRow, SoftmaxRows,
    TILED_QUERIES, TileDots, TileValues, exp_one, heads_of_block, packed_len, place_of_query, staged_len,
    unit,
};
pub(crate) use softmax::{AddTo, Gradient, Multiply, RowState, Scale, Softmax};
pub(crate) use tiles::{
    TILE, TileColumns, TileScores, TileSoftmax, TileStage, TransposeValues, UntransposeOut, WriteTransposed,
};
pub(crate) use write::{AllFinite, Factors, WriteRows};
