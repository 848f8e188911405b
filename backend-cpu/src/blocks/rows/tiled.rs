//! The products of a block in tiles of bf16: what several queries of a kv head cost one.
//!
//! K's rows are left operands where they lie; Q and V are right ones, Q packed once a task, V paired a few columns at a
//! time in scratch that stays in the first-level cache. A tile's rows and columns do not meet: what lies in those that
//! are nobody's does not matter.
//!
//! The next block is asked for meanwhile, as time passes and not as bytes do: most beside the softmax, which loads nothing
//! itself, least beside K's products, whose loads wait for the same fill buffers. Beside FP8, which is widened first, a line at a
//! time: a quarter with K, three eighths with the softmax, as much with V (docs/kernels/cpu.md).

use std::mem::MaybeUninit;

use super::values::{ZEROS, pack_weights};
use super::{Ahead, BLOCK_KEYS, Block};
use crate::simd::{Op, Simd, Tables, TileRows};
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

/// Where element `d` of a head's row `r` is in the packed queries, counted in bf16.
pub(crate) fn place_of_query((head, queries): (usize, usize), r: usize, d: usize, dim: usize) -> usize {
    let group = head * queries.div_ceil(ROWS) + r / ROWS;
    (group * dim / 2 + d / 2) * 2 * ROWS + r % ROWS * 2 + d % 2
}

/// As [`Dots`](super::Dots), in tiles.
pub(crate) struct TileDots<'a, 'b> {
    /// Of bf16, or codes that are widened to it; the head dimension is a multiple of 32.
    pub(crate) keys: Block<'a>,
    /// As [`place_of_query`] says.
    pub(crate) queries: *const f32,
    /// One for each head.
    pub(crate) factors: &'a [f32],
    /// [`BLOCK_KEYS`] for each of the queries.
    pub(crate) scores: *mut f32,
    /// [`STAGED_LEN`], lines of the cache.
    pub(crate) staged: *mut f32,
    /// What is asked for meanwhile.
    pub(crate) ahead: &'b mut Ahead<'a>,
}

impl<S: Simd> Op<S> for TileDots<'_, '_> {
    #[inline(always)]
    fn call(mut self, s: S) {
        of_type!(self.keys.dtype, elem => self.of(s, elem));
    }
}

impl TileDots<'_, '_> {
    #[inline(always)]
    fn of<S: Simd, E: Elem>(&mut self, s: S, _: E) {
        let Block { keys, heads, dim, queries, .. } = self.keys;
        // In registers: behind its reference every line that is asked for would be written there.
        let mut ahead = *self.ahead;
        let groups = queries.div_ceil(ROWS);
        if !E::IS_BF16 && groups == 1 {
            return self.of_codes(s);
        }
        let mut steps = [None; BLOCK_KEYS / ROWS];
        for (tile, step) in steps.iter_mut().enumerate() {
            *step = if E::IS_BF16 { step_of(keys.get(ROWS * tile..).unwrap_or(&[])) } else { None };
        }
        let mut sums = Lines::<{ 2 * TILE_LEN }>::new();
        for head in 0..heads {
            let codes = if E::IS_BF16 { [s.splat(0.0); 9] } else { s.tables(&self.keys.codes[head]) };
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
                                    let quarters = if E::IS_BF16 { 1 } else { 2 };
                                    ahead.ask_for(s, count * DEPTH * E::BYTES * quarters / 4);
                                }
                                let staged = self.staged.add(half * ROWS * COLUMNS / 2);
                                *a = self.rows::<S, E>(
                                    s,
                                    &codes,
                                    steps[first / ROWS],
                                    (head, first, col),
                                    staged,
                                );
                            }
                            let b = self.queries.add(((head * groups + group) * dim + col) / 2 * ROWS);
                            s.tile_down(a, b);
                        }
                        s.tile_store_upper(sums.as_mut_ptr());
                    }
                    self.write(s, sums.as_ptr(), (head, group, first));
                }
            }
        }
        *self.ahead = ahead;
    }

    /// Of codes, for the queries of one tile. A piece, two tiles of keys by a vector of codes, is widened while the tiles
    /// multiply the one before, whose scores are written after the next: otherwise each waits for the other.
    #[inline(always)]
    fn of_codes<S: Simd>(&mut self, s: S) {
        const PIECE_LEN: usize = 2 * ROWS * COLUMNS / 2;
        let Block { keys, heads, dim, .. } = self.keys;
        let mut ahead = *self.ahead;
        let mut sums = Lines::<{ 2 * TILE_LEN }>::new();
        let (mut widened, mut unwritten) = (None, None);
        let mut piece = self.staged;
        for head in 0..heads {
            let codes = s.tables(&self.keys.codes[head]);
            for first in (0..keys.len()).step_by(2 * ROWS) {
                let rows = &keys[first..keys.len().min(first + 2 * ROWS)];
                for col in (0..dim).step_by(COLUMNS) {
                    let offset = head as isize * self.keys.head_step + col as isize;
                    for (some, rows) in rows.chunks(SOME_KEYS).enumerate() {
                        for (n, key) in rows.iter().enumerate() {
                            if n % 2 != 0 {
                                ahead.ask_for_line(s);
                            }
                            let mut copy = [0u8; COLUMNS];
                            // SAFETY: a key's columns from `col` on; a piece has so many rows.
                            unsafe {
                                let from = whole_codes(key.wrapping_offset(offset), dim - col, &mut copy);
                                let [a, b] = s.widen_codes(&codes, s.load_codes(from));
                                let to = piece.add((some * SOME_KEYS + n) * COLUMNS / 2);
                                s.store(to, a);
                                s.store(to.add(S::LANES), b);
                            }
                        }
                    }
                    self.write_if(s, sums.as_ptr(), unwritten.take());
                    // SAFETY: the task has entered tiles; whole tiles of the scratch.
                    unwritten = unsafe { self.multiply_piece(s, widened, &mut sums) };
                    widened = Some((head, first, col, piece.cast_const()));
                    piece =
                        if piece == self.staged { self.staged.wrapping_add(PIECE_LEN) } else { self.staged };
                }
            }
        }
        self.write_if(s, sums.as_ptr(), unwritten);
        // SAFETY: as above.
        let last = unsafe { self.multiply_piece(s, widened, &mut sums) };
        self.write_if(s, sums.as_ptr(), last);
        *self.ahead = ahead;
    }

    /// Of a piece of keys of a head; which sums are whole with that.
    ///
    /// # Safety
    /// The task has entered tiles, and the piece is whole tiles.
    #[inline(always)]
    unsafe fn multiply_piece<S: Simd>(
        &self,
        s: S,
        piece: Option<(usize, usize, usize, *const f32)>,
        sums: &mut Lines<{ 2 * TILE_LEN }>,
    ) -> Option<(usize, usize, usize)> {
        let (head, first, col, rows) = piece?;
        let dim = self.keys.dim;
        // SAFETY: the caller's promise; queries of the call.
        unsafe {
            if col == 0 {
                s.tile_zero();
            }
            for unit in (0..COLUMNS.min(dim - col)).step_by(DEPTH) {
                let left = [0, ROWS].map(|row| TileRows {
                    first: rows.add((row * COLUMNS + unit) / 2).cast(),
                    step: (2 * COLUMNS) as isize,
                });
                s.tile_down(left, self.queries.add((head * dim + col + unit) / 2 * ROWS));
            }
            if col + COLUMNS < dim {
                return None;
            }
            s.tile_store_upper(sums.as_mut_ptr());
        }
        Some((head, 0, first))
    }

    #[inline(always)]
    fn write_if<S: Simd>(&self, s: S, sums: *const f32, of: Option<(usize, usize, usize)>) {
        if let Some(of) = of {
            self.write(s, sums, of);
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
        codes: &Tables<S::V>,
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
                    let mut copy = [0u8; COLUMNS];
                    let [a, b] = s.widen_codes(codes, s.load_codes(whole_codes(from, rest, &mut copy)));
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
        let factor = s.splat(self.factors[head]);
        let row = head * self.keys.queries + group * ROWS;
        let rows = (self.keys.queries - group * ROWS).min(ROWS);
        for at in (first..self.keys.keys.len().min(first + 2 * ROWS)).step_by(ROWS) {
            // SAFETY: `sums` are 16 rows of both tiles. Scores beyond the last key too: a block of them has room, and they
            // are hidden next. Scores of queries beyond the head's, for which there is room as well: the next head's
            // are written later.
            unsafe {
                let (from, to) = (sums.add(at - first), self.scores.add(row * BLOCK_KEYS + at));
                if rows > ROWS / 2 {
                    s.transpose(from, 2 * ROWS, to, BLOCK_KEYS);
                } else {
                    s.transpose_left(from, 2 * ROWS, to, BLOCK_KEYS);
                }
                for row in (0..rows).map(|row| to.add(row * BLOCK_KEYS)) {
                    s.store(row, s.mul(s.load(row), factor));
                }
            }
        }
    }
}

/// Those that are rows of a group.
#[inline(always)]
fn rows_of_group(rows: &[usize], group: usize) -> &[usize] {
    let before = |end: usize| rows.iter().take_while(|&&row| row < end).count();
    &rows[before(group * ROWS)..before((group + 1) * ROWS)]
}

/// As [`AddValues`](super::AddValues), in tiles, for the queries that see every key of the block.
pub(crate) struct TileValues<'a, 'b> {
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
    /// What is asked for meanwhile.
    pub(crate) ahead: &'b mut Ahead<'a>,
}

/// f32 of V's columns of a block, paired: units, steps of 32 keys, halves of a unit. Two tiles of K are no more.
pub(crate) const STAGED_LEN: usize = COLUMNS / DEPTH * STEPS * 2 * TILE_LEN;

/// Keys of V that are paired at a time.
const SOME_KEYS: usize = 8;

/// Steps of 32 keys.
const STEPS: usize = BLOCK_KEYS / DEPTH;

impl<S: Simd> Op<S> for TileValues<'_, '_> {
    #[inline(always)]
    fn call(mut self, s: S) {
        of_type!(self.values.dtype, elem => self.of(s, elem));
    }
}

impl TileValues<'_, '_> {
    #[inline(always)]
    fn of<S: Simd, E: Elem>(&mut self, s: S, _: E) {
        let Block { keys, heads, dim, .. } = self.values;
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
                    self.pair::<S, E>(s, (head, col));
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
    unsafe fn pair<S: Simd, E: Elem>(&mut self, s: S, (head, col): (usize, usize)) {
        let Block { keys, dim, codes, head_step, .. } = self.values;
        let columns = (dim - col).min(COLUMNS);
        let codes = if E::IS_BF16 { [s.splat(0.0); 9] } else { s.tables(&codes[head]) };
        let offset = head as isize * head_step + (col * E::BYTES) as isize;
        let mut ahead = *self.ahead;
        for (some, keys) in keys.chunks(SOME_KEYS).enumerate() {
            let first = some * SOME_KEYS;
            let to = self.staged.wrapping_add(first / DEPTH * 2 * TILE_LEN + first % DEPTH / 2 * ROWS);
            if E::IS_BF16 {
                ahead.ask_for(s, keys.len() * columns * E::BYTES * 3 / 4);
            }
            // SAFETY: the columns of the keys, or zeros, as many; both tiles of a step.
            unsafe {
                // Apart from the rest, whose loop alone has 0.95 of the speed with bf16 from the second-level cache.
                if let (Ok(keys), COLUMNS) = (<&[*const u8; SOME_KEYS]>::try_from(keys), columns) {
                    for (n, two) in keys.chunks_exact(2).enumerate() {
                        if !E::IS_BF16 {
                            ahead.ask_for_line(s);
                            if n % 2 != 0 {
                                ahead.ask_for_line(s);
                            }
                        }
                        let two = [two[0].wrapping_offset(offset), two[1].wrapping_offset(offset)];
                        self.pair_two::<S, E>(s, &codes, two, COLUMNS, to.add(n * ROWS));
                    }
                } else {
                    for (n, two) in keys.chunks(2).enumerate() {
                        if !E::IS_BF16 {
                            ahead.ask_for_line(s);
                        }
                        let second = two.get(1).map_or(ZEROS.as_ptr(), |key| key.wrapping_offset(offset));
                        let two = [two[0].wrapping_offset(offset), second];
                        self.pair_two::<S, E>(s, &codes, two, columns, to.add(n * ROWS));
                    }
                }
            }
        }
        *self.ahead = ahead;
    }

    /// Those of two keys.
    ///
    /// # Safety
    /// So many columns are readable at both; both tiles of a step.
    #[inline(always)]
    unsafe fn pair_two<S: Simd, E: Elem>(
        &self,
        s: S,
        codes: &Tables<S::V>,
        [a, b]: [*const u8; 2],
        columns: usize,
        to: *mut f32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
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
                    store_unit(s, to.add(u * STEPS * 2 * TILE_LEN), s.widen_codes(codes, half));
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
        let mut sums = Lines::<{ 2 * TILE_LEN }>::new();
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
                        s.tile_across(p, [v, v.add(TILE_LEN)]);
                    }
                    s.tile_store_upper(sums.as_mut_ptr());
                }
                self.add(s, sums.as_ptr(), (head, group, col + unit * DEPTH));
            }
        }
    }

    /// A unit of columns to the sums of each query.
    #[inline(always)]
    fn add<S: Simd>(&self, s: S, sums: *const f32, (head, group, col): (usize, usize, usize)) {
        for &row in rows_of_group(self.whole, group) {
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
