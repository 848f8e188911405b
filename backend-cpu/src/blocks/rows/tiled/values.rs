//! Product of weights and a block of values, in matrix tiles.
//!
//! The matrix unit multiplies pairs, and V is used in place: a row of its tile is 32 columns of one key, so the
//! pairs are columns 2n and 2n + 1. A weight in the low half of its pair, with 0 in the high half, gives the even
//! columns; a weight in the high half gives the odd columns. Both forms of eight queries' weights fill one tile. So
//! V is not moved, and O's sums are in the order [`EvenOdd`](crate::blocks::Order::EvenOdd).
//!
//! A non-finite V times 0 is NaN, which would reach the other column of its pair: if a sum is not finite, even and
//! odd columns are multiplied again separately, each with the other column replaced by zeros. A product keeps both
//! elements of a pair in sums of their own until its end: the sums of the other columns have the same bits either
//! way.

use super::{
    COLUMNS, DEPTH, Lines, PIECE_LEN, ROWS, SUMS_ROW_BYTES, TILE_LEN, TILES, place_of_quarter,
    steps_of_tiles, whole_codes, widen_tile,
};
use crate::blocks::rows::{Ahead, BLOCK_KEYS, Block};
use crate::simd::{Op, Simd, Tables, TileRows};
use crate::tensor::{Elem, of_type};

/// Queries of a tile of weights.
const GROUP: usize = ROWS / 2;

/// Number of f32 for the weights of a block for a group of queries.
const WEIGHTS_LEN: usize = ROWS * BLOCK_KEYS;

/// Columns that are processed together when V is used in place: four tiles wide.
const SPAN: usize = 4 * DEPTH;

/// f32 of the packed weights of `rows` rows of a head.
pub(crate) const fn packed_len(rows: usize) -> usize {
    rows.div_ceil(GROUP) * WEIGHTS_LEN
}

/// Product of weights and values, as [`AddValues`](crate::blocks::AddValues), on matrix tiles, for queries
/// that see every key of the block.
pub(crate) struct TileValues<'a, 'b> {
    /// Values in bf16, or in FP8 codes that are converted to bf16. The head dimension is a multiple of 32.
    pub(crate) values: Block<'a>,
    /// Weights, [`BLOCK_KEYS`] for each query.
    pub(crate) weights: *const f32,
    /// Factors of the running sums, one for each query.
    pub(crate) alpha: *const f32,
    /// Queries of each head.
    pub(crate) whole: &'a [usize],
    /// Rows of the sums of O, `stride` numbers apart.
    pub(crate) out: *mut f32,
    pub(crate) stride: usize,
    /// Staging memory of [`staged_len`](super::staged_len) numbers and packed weights of [`packed_len`]
    /// numbers, both aligned to cache lines.
    pub(crate) staged: *mut f32,
    pub(crate) packed: *mut f32,
    /// Rows to prefetch meanwhile.
    pub(crate) ahead: &'b mut Ahead<'a>,
}

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
        let steps = if E::IS_BF16 { steps_of_tiles(keys) } else { [None; TILES] };
        let span = if steps.iter().all(Option::is_some) { SPAN } else { COLUMNS };
        let whole = !E::IS_BF16 && dim.is_multiple_of(COLUMNS);
        let rows = keys.as_chunks::<ROWS>().0.first_chunk::<TILES>().filter(|_| whole);
        for head in 0..heads {
            self.pack_weights(s, head);
            if let Some(rows) = rows {
                // SAFETY: the task has entered tiles; rows and columns of the call.
                unsafe { self.add_codes(s, rows, head) };
                continue;
            }
            for col in (0..dim).step_by(span) {
                match (dim - col).min(span) / DEPTH {
                    1 => self.span::<S, E, 1>(s, &steps, (head, col)),
                    2 => self.span::<S, E, 2>(s, &steps, (head, col)),
                    3 => self.span::<S, E, 3>(s, &steps, (head, col)),
                    _ => self.span::<S, E, 4>(s, &steps, (head, col)),
                }
            }
        }
    }

    /// Weights of a head's queries from `8 * group` on: eight rows for even columns, then eight for odd ones.
    #[inline(always)]
    fn weights_of_group(&self, group: usize) -> *mut f32 {
        self.packed.wrapping_add(group * WEIGHTS_LEN)
    }

    /// Copies the probabilities of one head's queries to the layout that matrix tiles read.
    #[inline(always)]
    fn pack_weights<S: Simd>(&self, s: S, head: usize) {
        for &row in self.whole {
            let from = self.weights.wrapping_add((head * self.values.queries + row) * BLOCK_KEYS);
            let even = self.weights_of_group(row / GROUP).wrapping_add(row % GROUP * BLOCK_KEYS);
            for at in (0..BLOCK_KEYS).step_by(S::LANES) {
                // SAFETY: a row of weights, and two of the scratch.
                unsafe {
                    let [low, high] = s.low_and_high_bf16(s.load(from.add(at)));
                    s.store(even.add(at), low);
                    s.store(even.add(GROUP * BLOCK_KEYS + at), high);
                }
            }
        }
    }

    /// Multiplies a whole block of codes, one vector after another. A tile is converted while the one before is
    /// multiplied.
    ///
    /// # Safety
    /// The task has entered tiles; the head dimension is whole vectors of codes.
    #[cfg_attr(not(unoptimised), inline(always))]
    unsafe fn add_codes<S: Simd>(&mut self, s: S, rows: &[[*const u8; ROWS]; TILES], head: usize) {
        const UNITS: usize = COLUMNS / DEPTH;
        let Block { head_step, dim, queries, codes, .. } = self.values;
        let codes = s.tables(&codes[head]);
        let mut sums = Lines::<{ 4 * TILE_LEN }>::new();
        for col in (0..dim).step_by(COLUMNS) {
            let offset = head as isize * head_step + col as isize;
            for group in 0..queries.div_ceil(GROUP) {
                let weights = self.weights_of_group(group);
                // SAFETY: the caller keeps the contract of `add_codes`; pieces of the scratch.
                unsafe {
                    s.tile_zero();
                    self.multiply_codes(s, &codes, (rows, offset), weights, group > 0);
                    s.tile_store_half(false, sums.as_mut_ptr());
                    let whole = rows_of_group(self.whole, group);
                    if !are_finite::<S, UNITS>(s, sums.as_ptr(), whole) {
                        let rows: [TileRows; TILES] =
                            std::array::from_fn(|tile| staged_tile(self.staged, tile));
                        multiply_apart(s, weights, &rows, UNITS, sums.as_mut_ptr());
                    }
                    self.add::<S, UNITS>(s, sums.as_ptr(), whole, (head, col));
                }
            }
        }
    }

    /// Multiplies a group's weights with a vector of codes of each key. The first group converts the codes, and the
    /// other groups reuse the result.
    ///
    /// # Safety
    /// As for [`add_codes`](Self::add_codes).
    #[inline(always)]
    unsafe fn multiply_codes<S: Simd>(
        &mut self,
        s: S,
        codes: &Tables<S::V>,
        (rows, offset): (&[[*const u8; ROWS]; TILES], isize),
        weights: *const f32,
        are_widened: bool,
    ) {
        // SAFETY: the caller keeps the contract of `multiply_codes`.
        unsafe {
            for (tile, rows) in rows.iter().enumerate() {
                if !are_widened {
                    let to = self.staged.wrapping_add(tile * PIECE_LEN);
                    widen_tile(s, codes, (rows, offset), to, self.ahead);
                }
                if tile > 0 {
                    multiply_tile(s, self.staged, weights, tile - 1);
                }
            }
            multiply_tile(s, self.staged, weights, TILES - 1);
        }
    }

    /// `UNITS` tiles' columns from `col` on.
    // Inlining is left to the optimiser, as in `AddValues`: all functions inlined into one need much stack.
    #[cfg_attr(not(unoptimised), inline(always))]
    fn span<S: Simd, E: Elem, const UNITS: usize>(
        &mut self,
        s: S,
        steps: &[Option<isize>; TILES],
        (head, col): (usize, usize),
    ) {
        let Block { keys, queries, codes, .. } = self.values;
        let codes = if E::IS_BF16 { [s.splat(0.0); 9] } else { s.tables(&codes[head]) };
        let mut ahead = *self.ahead;
        let tiles = keys.len().div_ceil(ROWS);
        let mut sums = Lines::<{ 4 * TILE_LEN }>::new();
        let mut rows = [TileRows { first: self.staged.cast(), step: 0 }; TILES];
        // SAFETY: the task has entered tiles; rows and columns of the call, whole tiles of the scratch.
        unsafe {
            rows[0] = self.rows::<S, E, UNITS>(s, &codes, steps[0], (head, 0, col), &mut ahead);
            for group in 0..queries.div_ceil(GROUP) {
                let weights = self.weights_of_group(group);
                s.tile_zero();
                for tile in 0..tiles {
                    // The next tile is copied while the present one is multiplied; otherwise each would wait for
                    // the other.
                    if group == 0 && tile + 1 < tiles {
                        let at = (head, tile + 1, col);
                        rows[tile + 1] = self.rows::<S, E, UNITS>(s, &codes, steps[tile + 1], at, &mut ahead);
                    }
                    s.tile_left(left_tile(weights, tile));
                    for unit in 0..UNITS {
                        if group == 0 && E::IS_BF16 {
                            ahead.ask_for(s, ROWS * DEPTH * E::BYTES * 3 / 4);
                        }
                        s.tile_right(unit, unit_of(rows[tile], unit));
                    }
                }
                s.tile_store_half(false, sums.as_mut_ptr());
                if UNITS > 2 {
                    s.tile_store_half(true, sums.as_mut_ptr().add(place_of_quarter(2)));
                }
                let whole = rows_of_group(self.whole, group);
                if !are_finite::<S, UNITS>(s, sums.as_ptr(), whole) {
                    multiply_apart(s, weights, &rows[..tiles], UNITS, sums.as_mut_ptr());
                }
                self.add::<S, UNITS>(s, sums.as_ptr(), whole, (head, col));
            }
        }
        *self.ahead = ahead;
    }

    /// A tile of rows: in place if they are `step` bytes apart, otherwise copied to scratch.
    ///
    /// # Safety
    /// `UNITS` tiles' columns from `col` on are the head's.
    #[inline(always)]
    unsafe fn rows<S: Simd, E: Elem, const UNITS: usize>(
        &self,
        s: S,
        codes: &Tables<S::V>,
        step: Option<isize>,
        (head, tile, col): (usize, usize, usize),
        ahead: &mut Ahead<'_>,
    ) -> TileRows {
        let Block { keys, head_step, .. } = self.values;
        let offset = head as isize * head_step + (col * E::BYTES) as isize;
        let keys = &keys[tile * ROWS..keys.len().min((tile + 1) * ROWS)];
        if let Some(step) = step {
            return TileRows { first: keys[0].wrapping_offset(offset), step };
        }
        let piece = self.staged.wrapping_add(tile * PIECE_LEN);
        let staged = staged_tile(self.staged, tile);
        if let (false, true, Ok(rows)) = (E::IS_BF16, UNITS * DEPTH >= COLUMNS, <&[_; ROWS]>::try_from(keys))
        {
            // SAFETY: promised by the caller: `UNITS` tiles' columns from `col` on are the head's.
            unsafe { widen_tile(s, codes, (rows, offset), piece, ahead) };
            return staged;
        }
        for (n, key) in keys.iter().enumerate() {
            let (from, to) = (key.wrapping_offset(offset), piece.wrapping_add(n * COLUMNS / 2));
            // SAFETY: the caller keeps the contract of `rows`; a row of the piece.
            unsafe {
                if E::IS_BF16 {
                    for at in (0..UNITS * DEPTH).step_by(2 * S::LANES) {
                        s.store(to.add(at / 2), s.load(from.add(at * 2).cast()));
                    }
                } else {
                    ahead.ask_for_line(s);
                    let mut copy = [0u8; COLUMNS];
                    let from = whole_codes(from, UNITS * DEPTH, &mut copy);
                    let [a, b] = s.widen_codes(codes, s.load_codes(from));
                    s.store(to, a);
                    s.store(to.add(S::LANES), b);
                }
            }
        }
        if keys.len() < ROWS {
            // Absent keys have weights of 0; the scratch may hold non-finite old numbers, so it is zeroed. SAFETY:
            // rows of the piece.
            unsafe { piece.add(keys.len() * COLUMNS / 2).write_bytes(0, (ROWS - keys.len()) * COLUMNS / 2) };
        }
        staged
    }

    /// Adds the sums to O of each query.
    ///
    /// # Safety
    /// As for [`are_finite`]; rows and columns of the call.
    #[inline(always)]
    unsafe fn add<S: Simd, const UNITS: usize>(
        &self,
        s: S,
        sums: *const f32,
        whole: &[usize],
        (head, col): (usize, usize),
    ) {
        for &row in whole {
            let at = head * self.values.queries + row;
            // SAFETY: the caller keeps the contract of `add`.
            unsafe {
                let alpha = s.splat(*self.alpha.add(at));
                let out = self.out.add(at * self.stride + col);
                for part in 0..2 * UNITS {
                    let out = out.add(part * ROWS);
                    for lane in (0..ROWS).step_by(S::LANES) {
                        let sum = s.load(sums.add(place_of_sums(row % GROUP, part) + lane));
                        s.store(out.add(lane), s.fma(s.load(out.add(lane)), alpha, sum));
                    }
                }
            }
        }
    }
}

/// Index of a query's sums for the even or odd columns of a unit: `part` counts even and odd of the first unit,
/// then of the next.
#[inline(always)]
const fn place_of_sums(query: usize, part: usize) -> usize {
    let (unit, odd) = (part / 2, part % 2);
    place_of_quarter(unit) + (odd * GROUP + query) * 2 * ROWS
}

/// A tile of keys of a group's weights.
#[inline(always)]
fn left_tile(weights: *const f32, tile: usize) -> TileRows {
    let step = BLOCK_KEYS * size_of::<f32>();
    TileRows { first: weights.wrapping_add(tile * ROWS).cast(), step: step as isize }
}

/// Part of a tile that holds unit `unit` of its rows.
#[inline(always)]
fn unit_of(rows: TileRows, unit: usize) -> TileRows {
    TileRows { first: rows.first.wrapping_add(unit * DEPTH * 2), ..rows }
}

/// A tile of staged rows.
#[inline(always)]
fn staged_tile(staged: *mut f32, tile: usize) -> TileRows {
    TileRows { first: staged.wrapping_add(tile * PIECE_LEN).cast(), step: (COLUMNS * 2) as isize }
}

/// Multiplies a tile of weights with a vector of codes of each of its keys.
///
/// # Safety
/// The task has entered tiles; the tile's piece is readable.
#[inline(always)]
unsafe fn multiply_tile<S: Simd>(s: S, staged: *mut f32, weights: *const f32, tile: usize) {
    // SAFETY: the caller keeps the contract of `multiply_tile`.
    unsafe {
        s.tile_left(left_tile(weights, tile));
        s.tile_right(0, unit_of(staged_tile(staged, tile), 0));
        s.tile_right(1, unit_of(staged_tile(staged, tile), 1));
    }
}

/// Rows that belong to a group.
#[inline(always)]
fn rows_of_group(rows: &[usize], group: usize) -> &[usize] {
    let before = |end: usize| rows.iter().take_while(|&&row| row < end).count();
    &rows[before(group * GROUP)..before((group + 1) * GROUP)]
}

/// Whether all sums of these rows are.
///
/// # Safety
/// `sums` are 32 rows of 32.
#[inline(always)]
unsafe fn are_finite<S: Simd, const UNITS: usize>(s: S, sums: *const f32, rows: &[usize]) -> bool {
    let zero = s.splat(0.0);
    // Products with 0 are summed in separate chains, since each addition waits for the one before in its chain.
    let mut zeros = [[zero; 2]; UNITS];
    for &row in rows {
        for (unit, zeros) in zeros.iter_mut().enumerate() {
            for (odd, zeros) in zeros.iter_mut().enumerate() {
                for lane in (0..ROWS).step_by(S::LANES) {
                    // SAFETY: promised by the caller: `sums` are 32 rows of 32.
                    let sum = unsafe { s.load(sums.add(place_of_sums(row % GROUP, 2 * unit + odd) + lane)) };
                    *zeros = s.fma(sum, zero, *zeros);
                }
            }
        }
    }
    let all = zeros.iter().flatten().fold(zero, |all, &zeros| s.add(all, zeros));
    s.sum(all) == 0.0
}

/// Recomputes the sums of a group: for even columns with odd ones replaced by zeros, and vice versa.
///
/// # Safety
/// `weights` are tiles of a group and `rows` as many of V, `units` tiles across; this thread has entered
/// tiles; 32 rows of 32 are writable at `sums`.
#[cold]
#[inline(never)]
unsafe fn multiply_apart<S: Simd>(
    s: S,
    weights: *const f32,
    rows: &[TileRows],
    units: usize,
    sums: *mut f32,
) {
    const APART_ROW: usize = SPAN / 2;
    for (odd, kept) in [0x0000_ffff, 0xffff_0000].into_iter().enumerate() {
        let mut apart = Lines::<{ ROWS * APART_ROW }>::new();
        let mut again = Lines::<{ 4 * TILE_LEN }>::new();
        // SAFETY: the caller keeps the contract of `multiply_apart`; whole tiles of both scratches.
        unsafe {
            s.tile_zero();
            for (tile, rows) in rows.iter().enumerate() {
                for row in 0..ROWS {
                    let from = rows.first.wrapping_offset(row as isize * rows.step).cast::<u32>();
                    let to = apart.as_mut_ptr().cast::<u32>().add(row * APART_ROW);
                    for pair in 0..units * DEPTH / 2 {
                        to.add(pair).write(from.add(pair).read_unaligned() & kept);
                    }
                }
                let step = (APART_ROW * size_of::<f32>()) as isize;
                let apart = TileRows { first: apart.as_ptr().cast(), step };
                s.tile_left(left_tile(weights, tile));
                for unit in 0..units {
                    s.tile_right(unit, unit_of(apart, unit));
                }
            }
            s.tile_store(again.as_mut_ptr(), SUMS_ROW_BYTES);
            for (query, unit) in (0..GROUP).flat_map(|query| (0..units).map(move |unit| (query, unit))) {
                let at = place_of_sums(query, 2 * unit + odd);
                sums.add(at).copy_from_nonoverlapping(again.as_ptr().add(at), ROWS);
            }
        }
    }
}
