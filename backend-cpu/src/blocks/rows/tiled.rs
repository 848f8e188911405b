//! The products of a block in tiles of bf16: what several queries of a kv head cost one.
//!
//! K's rows are left operands where they lie; Q and V are right ones, Q packed once a task, V paired a few columns at a
//! time in scratch that stays in the first-level cache. A tile's rows and columns do not meet: what lies in those that
//! are nobody's does not matter.

use super::values::{ZEROS, pack_weights};
use super::{Ahead, BLOCK_KEYS, Block};
use crate::simd::{Op, Simd, TileRows};
use crate::tensor::{Elem, of_type};

/// Queries across a tile.
pub(crate) const TILED_QUERIES: u32 = 16;

/// As many keys are a tile's rows.
const ROWS: usize = 16;

/// Elements along a tile's row.
const DEPTH: usize = 32;

/// f32 of a tile.
const TILE_LEN: usize = ROWS * ROWS;

/// Columns that a vector of codes has.
const COLUMNS: usize = 2 * DEPTH;

/// Scratch whose rows are cache lines.
#[repr(C, align(64))]
struct Lines<const LEN: usize>([f32; LEN]);

/// Where element `d` of a head's row `r` is in the packed queries, counted in bf16.
pub(crate) fn place_of_query((head, queries): (usize, usize), r: usize, d: usize, dim: usize) -> usize {
    let group = head * queries.div_ceil(ROWS) + r / ROWS;
    (group * dim / 2 + d / 2) * 2 * ROWS + r % ROWS * 2 + d % 2
}

/// As [`Dots`](super::Dots), in tiles.
pub(crate) struct TileDots<'a> {
    /// Of bf16, or codes that are widened to it; the head dimension is a multiple of 32.
    pub(crate) keys: Block<'a>,
    /// As [`place_of_query`] says.
    pub(crate) queries: *const f32,
    /// Which queries of each head.
    pub(crate) live: &'a [usize],
    /// One for each head.
    pub(crate) factors: &'a [f32],
    /// [`BLOCK_KEYS`] for each of the queries.
    pub(crate) scores: *mut f32,
    /// [`STAGED_LEN`], lines of the cache.
    pub(crate) staged: *mut f32,
}

impl<S: Simd> Op<S> for TileDots<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        of_type!(self.keys.dtype, elem => self.of(s, elem));
    }
}

impl TileDots<'_> {
    #[inline(always)]
    fn of<S: Simd, E: Elem>(&self, s: S, _: E) {
        let Block { keys, heads, dim, queries, .. } = self.keys;
        let groups = queries.div_ceil(ROWS);
        let mut ahead = self.keys.rows_ahead(1);
        let mut steps = [None; BLOCK_KEYS / ROWS];
        for (tile, step) in steps.iter_mut().enumerate() {
            *step = if E::IS_BF16 { step_of(keys.get(ROWS * tile..).unwrap_or(&[])) } else { None };
        }
        let mut sums = Lines([0.0; 2 * TILE_LEN]);
        for head in 0..heads {
            for first in (0..keys.len()).step_by(2 * ROWS) {
                for group in 0..groups {
                    // SAFETY: the task has entered tiles; keys and queries of the call, whole tiles.
                    unsafe {
                        s.tile_zero();
                        for col in (0..dim).step_by(DEPTH) {
                            let mut a = [TileRows { first: self.staged.cast(), step: 0 }; 2];
                            for (half, a) in a.iter_mut().enumerate() {
                                let first = first + half * ROWS;
                                if group == 0 {
                                    let count = keys.len().saturating_sub(first).min(ROWS);
                                    ahead.ask_for(s, count * DEPTH * E::BYTES);
                                }
                                let staged = self.staged.add(half * ROWS * COLUMNS / 2);
                                *a = self.rows::<S, E>(s, steps[first / ROWS], (head, first, col), staged);
                            }
                            let b = self.queries.add(((head * groups + group) * dim + col) / 2 * ROWS);
                            s.tile_two(a, [b, b]);
                        }
                        s.tile_store_upper(sums.0.as_mut_ptr());
                    }
                    self.write(s, sums.0.as_ptr(), (head, group, first));
                }
            }
        }
    }

    /// A tile of rows: where they lie, if that is `step` bytes apart, else staged.
    ///
    /// # Safety
    /// `col` is a column of the head's; 16 rows of 64 bf16 are writable at `staged`.
    #[inline(always)]
    unsafe fn rows<S: Simd, E: Elem>(
        &self,
        s: S,
        step: Option<isize>,
        (head, first, col): (usize, usize, usize),
        staged: *mut f32,
    ) -> TileRows {
        if let Some(step) = step {
            return TileRows { first: self.keys.at(first, head).wrapping_add(col * E::BYTES), step };
        }
        let (rest, columns) = (self.keys.dim - col, col % COLUMNS);
        for key in first..self.keys.keys.len().min(first + ROWS) {
            let from = self.keys.at(key, head).wrapping_add(col * E::BYTES);
            let to = staged.wrapping_add((key - first) * COLUMNS / 2);
            // SAFETY: a key's columns from `col` on; the caller's promise.
            unsafe {
                if E::IS_BF16 {
                    s.store(to.add(columns / 2), s.load(from.cast()));
                } else if columns == 0 {
                    let codes = s.tables(&self.keys.codes[head]);
                    let mut copy = [0u8; COLUMNS];
                    let [a, b] = s.widen_codes(&codes, s.load_codes(whole_codes(from, rest, &mut copy)));
                    s.store(to, a);
                    s.store(to.add(S::LANES), b);
                }
            }
        }
        let row_bytes = COLUMNS * 2;
        TileRows { first: staged.wrapping_add(columns / 2).cast(), step: row_bytes as isize }
    }

    /// The scores of two tiles of keys from `first` on.
    #[inline(always)]
    fn write<S: Simd>(&self, s: S, sums: *const f32, (head, group, first): (usize, usize, usize)) {
        let mut turned = Lines([0.0; TILE_LEN]);
        let factor = s.splat(self.factors[head]);
        for at in (first..self.keys.keys.len().min(first + 2 * ROWS)).step_by(ROWS) {
            // SAFETY: `sums` are 16 rows of both tiles. Scores beyond the last key too: a block of them has room,
            // and they are hidden next.
            unsafe {
                s.transpose(sums.add(at - first), 2 * ROWS, turned.0.as_mut_ptr(), ROWS);
                for &row in self.live.iter().filter(|&row| row / ROWS == group) {
                    let dots = s.mul(s.load(turned.0.as_ptr().add(row % ROWS * ROWS)), factor);
                    s.store(self.scores.add((head * self.keys.queries + row) * BLOCK_KEYS + at), dots);
                }
            }
        }
    }
}

/// As [`AddValues`](super::AddValues), in tiles, for the queries that see every key of the block.
pub(crate) struct TileValues<'a> {
    /// Of bf16, or codes that are widened to it; the head dimension is a multiple of 32.
    pub(crate) values: Block<'a>,
    /// [`BLOCK_KEYS`] for each query, and readable for 16 more. They are packed in place.
    pub(crate) weights: *mut f32,
    /// One for each query.
    pub(crate) alpha: *const f32,
    /// Queries of each head.
    pub(crate) whole: &'a [usize],
    /// Rows in [fours](super::Order::Fours), `stride` apart.
    pub(crate) out: *mut f32,
    pub(crate) stride: usize,
    /// [`STAGED_LEN`], lines of the cache.
    pub(crate) staged: *mut f32,
}

/// f32 of V's columns of a block, paired: units, steps of 32 keys, halves of a unit. Two tiles of K are no more.
pub(crate) const STAGED_LEN: usize = COLUMNS / DEPTH * STEPS * 2 * TILE_LEN;

/// Keys of V after which rows ahead are asked for.
const KEYS_ASKED: usize = 8;

/// Steps of 32 keys.
const STEPS: usize = BLOCK_KEYS / DEPTH;

impl<S: Simd> Op<S> for TileValues<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        of_type!(self.values.dtype, elem => self.of(s, elem));
    }
}

impl TileValues<'_> {
    #[inline(always)]
    fn of<S: Simd, E: Elem>(&self, s: S, _: E) {
        let Block { keys, heads, dim, .. } = self.values;
        let mut ahead = self.values.rows_ahead(1);
        if keys.len() < BLOCK_KEYS {
            // Keys that are not there have weights of 0; what was here before may be anything.
            // SAFETY: scratch of this task's.
            unsafe { self.staged.write_bytes(0, STAGED_LEN) };
        }
        for head in 0..heads {
            for row in self.whole {
                pack_weights(s, self.weights, head * self.values.queries + row);
            }
            for col in (0..dim).step_by(COLUMNS) {
                // SAFETY: the task has entered tiles; rows and columns of the call.
                unsafe {
                    self.pair::<S, E>(s, (head, col), &mut ahead);
                    self.multiply(s, (head, col));
                }
            }
        }
    }

    /// V's columns from `col` on, two keys' rows paired.
    ///
    /// # Safety
    /// `col` is a column of the head's.
    #[inline(always)]
    unsafe fn pair<S: Simd, E: Elem>(&self, s: S, (head, col): (usize, usize), ahead: &mut Ahead<'_>) {
        let Block { keys, dim, codes, .. } = self.values;
        let columns = (dim - col).min(COLUMNS);
        let codes = if E::IS_BF16 { [s.splat(0.0); 9] } else { s.tables(&codes[head]) };
        for key in (0..keys.len()).step_by(2) {
            if key.is_multiple_of(KEYS_ASKED) {
                ahead.ask_for(s, (keys.len() - key).min(KEYS_ASKED) * columns * E::BYTES);
            }
            let mut from = [ZEROS.as_ptr(); 2];
            for (n, from) in from.iter_mut().enumerate().take(keys.len() - key) {
                *from = self.values.at(key + n, head).wrapping_add(col * E::BYTES);
            }
            let to = self.staged.wrapping_add((key / DEPTH * 2 * TILE_LEN) + key % DEPTH / 2 * ROWS);
            // SAFETY: the columns of the keys, or zeros, as many; both tiles of a step.
            unsafe {
                let [a, b] = from;
                if E::IS_BF16 {
                    for u in 0..columns / DEPTH {
                        let at = u * DEPTH * E::BYTES;
                        let unit = s.pair_rows(s.load(a.add(at).cast()), s.load(b.add(at).cast()));
                        store_unit(s, to.add(u * STEPS * 2 * TILE_LEN), unit);
                    }
                } else {
                    let mut copies = [[0u8; COLUMNS]; 2];
                    let [first, second] = &mut copies;
                    let a = s.load_codes(whole_codes(a, columns, first));
                    let b = s.load_codes(whole_codes(b, columns, second));
                    for (u, half) in s.pair_codes(a, b).into_iter().enumerate() {
                        store_unit(s, to.add(u * STEPS * 2 * TILE_LEN), s.widen_codes(&codes, half));
                    }
                }
            }
        }
    }

    /// P V of paired columns from `col` on.
    ///
    /// # Safety
    /// As for [`pair`](Self::pair), which wrote them; this thread has entered tiles.
    #[inline(always)]
    unsafe fn multiply<S: Simd>(&self, s: S, (head, col): (usize, usize)) {
        let Block { keys, dim, queries, .. } = self.values;
        let mut sums = Lines([0.0; 2 * TILE_LEN]);
        for unit in 0..((dim - col) / DEPTH).min(COLUMNS / DEPTH) {
            for group in 0..queries.div_ceil(ROWS) {
                let weights = self.weights.wrapping_add((head * queries + group * ROWS) * BLOCK_KEYS);
                // SAFETY: whole tiles of weights and of pairs.
                unsafe {
                    s.tile_zero();
                    for step in 0..keys.len().div_ceil(DEPTH) {
                        let first = weights.add(step * DEPTH / 2).cast::<u8>().cast_const();
                        let p = TileRows { first, step: (BLOCK_KEYS * size_of::<f32>()) as isize };
                        let v = self.staged.cast_const().add((unit * STEPS + step) * 2 * TILE_LEN);
                        s.tile_two([p, p], [v, v.add(TILE_LEN)]);
                    }
                    s.tile_store_upper(sums.0.as_mut_ptr());
                }
                self.add(s, sums.0.as_ptr(), (head, group, col + unit * DEPTH));
            }
        }
    }

    /// A unit of columns to the sums of each query.
    #[inline(always)]
    fn add<S: Simd>(&self, s: S, sums: *const f32, (head, group, col): (usize, usize, usize)) {
        for &row in self.whole.iter().filter(|&row| row / ROWS == group) {
            let at = head * self.values.queries + row;
            // SAFETY: rows and columns of the call.
            unsafe {
                let alpha = s.splat(*self.alpha.add(at));
                for v in (0..DEPTH).step_by(S::LANES) {
                    let out = self.out.add(at * self.stride + col + v);
                    let sum = s.load(sums.add(row % ROWS * 2 * ROWS + v));
                    s.store(out, s.fma(s.load(out), alpha, sum));
                }
            }
        }
    }
}

/// Both halves of a unit of pairs, each to its tile.
///
/// # Safety
/// Both tiles' rows are writable.
#[inline(always)]
unsafe fn store_unit<S: Simd>(s: S, to: *mut f32, unit: [S::V; 2]) {
    // SAFETY: the caller's promise.
    unsafe {
        s.store(to, unit[0]);
        s.store(to.add(TILE_LEN), unit[1]);
    }
}

/// The bytes from row to row, if a tile's are as far apart.
#[inline(always)]
fn step_of(rows: &[*const u8]) -> Option<isize> {
    let rows = rows.get(..ROWS)?;
    let step = (rows[1] as isize).wrapping_sub(rows[0] as isize);
    let alike = rows.windows(2).all(|two| (two[1] as isize).wrapping_sub(two[0] as isize) == step);
    alike.then_some(step)
}

/// A vector of codes, of which `rest` are there: where they lie if all are, else a copy.
///
/// # Safety
/// `rest` bytes are readable at `from`.
#[inline(always)]
unsafe fn whole_codes(from: *const u8, rest: usize, copy: &mut [u8; COLUMNS]) -> *const u8 {
    if rest >= COLUMNS {
        return from;
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), rest) };
    copy.as_ptr()
}
