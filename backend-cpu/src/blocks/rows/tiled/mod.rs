//! Products of a block in matrix tiles of bf16: several queries of a kv head cost as much as one.
//!
//! Rows of K are left operands and rows of V right operands, both in place. Q, the other right operand, is
//! packed once per task. Rows and columns of a tile do not mix, so the content of unused ones does not
//! matter.
//!
//! The next block is prefetched at the same time, paced by time and not by bytes. For bf16 half of it is prefetched
//! beside K's products, a sixth beside the softmax, a third beside V's, K and V in rotation by half a kilobyte of
//! each tile. If K and V have different shapes, many threads prefetch K and then V (an eighth, half and three
//! eighths), and few threads K alone. For FP8, which is converted first, a line is prefetched with each vector of
//! codes, also in rotation; the softmax of a block runs together with the scores of the next block, so that no time
//! passes without prefetches (docs/kernels/cpu.md).

mod keys;
mod values;

use std::mem::MaybeUninit;

use super::{Ahead, BLOCK_KEYS};
use crate::simd::{Simd, Tables};
pub(crate) use keys::{TileDots, place_of_query};
pub(crate) use values::{TileValues, packed_len};

/// Queries across a tile.
pub(crate) const TILED_QUERIES: u32 = 16;

/// Rows of a tile, one for each key.
pub(super) const ROWS: usize = 16;

/// Tiles of a block of keys.
const TILES: usize = BLOCK_KEYS / ROWS;

/// Elements along a tile's row.
const DEPTH: usize = 32;

/// f32 of a tile.
const TILE_LEN: usize = ROWS * ROWS;

/// Columns that a vector of codes has.
const COLUMNS: usize = 2 * DEPTH;

/// Number of f32 of a piece: one vector of codes of each of a tile's rows. Codes are converted to scratch in pieces
/// of 2 KiB, so that one piece is written while the one before is loaded. With pieces 4 KiB apart, loads waited for
/// stores at equal page offsets: a block of FP8 took 1.5 times as long.
const PIECE_LEN: usize = ROWS * COLUMNS / 2;

/// Number of f32 of the scratch for pieces: a few columns for V; for K, whose head dimension is `dim`, all columns.
pub(crate) const fn staged_len(dim: usize) -> usize {
    dim.div_ceil(COLUMNS) * TILES * PIECE_LEN
}

/// Bytes between rows of the stored accumulators.
const SUMS_ROW_BYTES: usize = 2 * ROWS * size_of::<f32>();

/// Start of one of the four tiles.
const fn place_of_quarter(quarter: usize) -> usize {
    quarter / 2 * ROWS * 2 * ROWS + quarter % 2 * ROWS
}

/// Scratch whose rows are cache lines, written before it is read.
#[repr(C, align(64))]
struct Lines<const LEN: usize>(MaybeUninit<[f32; LEN]>);

impl<const LEN: usize> Lines<LEN> {
    fn new() -> Self {
        Self(MaybeUninit::uninit())
    }

    fn as_ptr(&self) -> *const f32 {
        self.0.as_ptr().cast()
    }

    fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }
}

/// Bytes from one row to the next for each tile of rows. `None` if the tile is not full or its rows are not equally
/// far apart.
#[inline(always)]
fn steps_of_tiles(rows: &[*const u8]) -> [Option<isize>; TILES] {
    let mut steps = [None; TILES];
    for (step, rows) in steps.iter_mut().zip(rows.chunks_exact(ROWS)) {
        let from_to = |two: &[*const u8]| (two[1] as isize).wrapping_sub(two[0] as isize);
        let first = from_to(rows);
        // Compares all rows without a branch, in vectors.
        let differs = rows.windows(2).fold(0, |differs, two| differs | (from_to(two) ^ first));
        *step = (differs == 0).then_some(first);
    }
    steps
}

/// A pointer to a whole vector of codes of which only `rest` exist: in place if all exist, otherwise to a copy.
///
/// # Safety
/// `rest` bytes are readable at `from`.
#[inline(always)]
unsafe fn whole_codes(from: *const u8, rest: usize, copy: &mut [u8; COLUMNS]) -> *const u8 {
    if rest >= COLUMNS {
        return from;
    }
    // SAFETY: promised by the caller: `rest` bytes are readable at `from`.
    unsafe { std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), rest) };
    copy.as_ptr()
}

/// Converts a vector of codes of each of a tile's rows to a piece, and prefetches a line for each row. Prefetches
/// in bursts would wait for fill buffers, and so would the loads among them.
///
/// # Safety
/// [`COLUMNS`] codes are readable at `offset` bytes from each of `rows`; a piece is writable at `to`.
#[inline(always)]
unsafe fn widen_tile<S: Simd>(
    s: S,
    codes: &Tables<S::V>,
    (rows, offset): (&[*const u8; ROWS], isize),
    to: *mut f32,
    ahead: &mut Ahead<'_>,
) {
    let lines = ahead.lines();
    for n in 0..ROWS {
        s.prefetch(lines[n]);
        // SAFETY: the caller keeps the contract of `widen_tile`.
        unsafe {
            let [a, b] = s.widen_codes(codes, s.load_codes(rows[n].wrapping_offset(offset)));
            s.store(to.add(n * COLUMNS / 2), a);
            s.store(to.add(n * COLUMNS / 2 + S::LANES), b);
        }
    }
}
