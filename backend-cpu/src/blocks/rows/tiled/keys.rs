//! Scores of a block of keys, in tiles.

use super::{
    COLUMNS, DEPTH, Lines, PIECE_LEN, ROWS, SUMS_ROW_BYTES, TILE_LEN, TILES, place_of_quarter,
    steps_of_tiles, whole_codes, widen_tile,
};
use crate::blocks::rows::{Ahead, BLOCK_KEYS, Block, SoftmaxRows};
use crate::simd::{Op, Simd, Tables, TileRows};
use crate::tensor::{Elem, of_type};

/// Index of element `d` of a head's row `r` in the packed queries, counted in bf16.
pub(crate) fn place_of_query((head, queries): (usize, usize), r: usize, d: usize, dim: usize) -> usize {
    let group = head * queries.div_ceil(ROWS) + r / ROWS;
    (group * dim / 2 + d / 2) * 2 * ROWS + r % ROWS * 2 + d % 2
}

/// Dot products of queries and keys, as [`Dots`](crate::blocks::Dots), on matrix tiles.
pub(crate) struct TileDots<'a, 'b> {
    /// Keys in bf16, or in FP8 codes that are converted to bf16. The head dimension is a multiple of 32.
    pub(crate) keys: Block<'a>,
    /// Packed queries, laid out by [`place_of_query`].
    pub(crate) queries: *const f32,
    /// Factors of the scores, one for each head.
    pub(crate) factors: &'a [f32],
    /// Scores, [`BLOCK_KEYS`] for each query.
    pub(crate) scores: *mut f32,
    /// Staging memory of [`staged_len`](super::staged_len) numbers, aligned to cache lines.
    pub(crate) staged: *mut f32,
    /// Rows to prefetch during the products, and how many quarters of a tile's bytes to prefetch with it.
    pub(crate) quarters: usize,
    pub(crate) ahead: &'b mut Ahead<'a>,
    /// Softmax of the block before, which runs together with these products, since the two use different units of
    /// the core.
    pub(crate) before: SoftmaxRows<'a>,
}

impl<S: Simd> Op<S> for TileDots<'_, '_> {
    #[inline(always)]
    fn call(mut self, s: S) {
        of_type!(self.keys.dtype, elem => self.of(s, elem));
    }
}

/// Columns of a tile of keys that are multiplied together.
#[derive(Clone, Copy)]
struct Piece {
    tile: usize,
    col: usize,
    rows: TileRows,
}

impl TileDots<'_, '_> {
    #[inline(always)]
    fn of<S: Simd, E: Elem>(&mut self, s: S, _: E) {
        let Block { keys, heads, queries, .. } = self.keys;
        let steps = if E::IS_BF16 { steps_of_tiles(keys) } else { [None; TILES] };
        let mut sums = Lines::<{ TILES * TILE_LEN }>::new();
        let tiles = keys.len().div_ceil(ROWS);
        let across = self.keys.dim.div_ceil(if E::IS_BF16 { DEPTH } else { COLUMNS });
        self.before.begin(s, heads * queries.div_ceil(ROWS) * tiles * across);
        let whole = !E::IS_BF16 && queries <= ROWS && self.keys.dim.is_multiple_of(COLUMNS);
        let rows = keys.as_chunks::<ROWS>().0.first_chunk::<TILES>().filter(|_| whole);
        for head in 0..heads {
            if let Some(rows) = rows {
                // SAFETY: the task has entered tiles; keys and queries of the call.
                unsafe { self.multiply_codes(s, rows, head, &mut sums) };
                continue;
            }
            // A copy in registers: through the reference, every prefetched line would be written to memory.
            let mut ahead = *self.ahead;
            for group in 0..queries.div_ceil(ROWS) {
                // SAFETY: the task has entered tiles; keys and queries of the call, whole tiles.
                unsafe {
                    s.tile_zero();
                    if let ([Some(a), Some(b), Some(c), Some(d)], true) = (steps, E::IS_BF16) {
                        self.multiply_in_place(s, [a, b, c, d], (head, group), &mut ahead);
                        s.tile_store(sums.as_mut_ptr(), SUMS_ROW_BYTES);
                        self.write(s, sums.as_ptr(), (head, group), 0..TILES);
                    } else {
                        self.multiply_pieces::<S, E>(s, &steps, (head, group), &mut sums, &mut ahead);
                    }
                }
            }
            *self.ahead = ahead;
        }
        self.before.finish(s);
    }

    /// Multiplies a block of bf16 that consists of whole tiles, in place.
    ///
    /// # Safety
    /// The task has entered tiles; the rows of each tile are equally far apart.
    #[inline(always)]
    unsafe fn multiply_in_place<S: Simd>(
        &mut self,
        s: S,
        steps: [isize; TILES],
        (head, group): (usize, usize),
        ahead: &mut Ahead<'_>,
    ) {
        for col in (0..self.keys.dim).step_by(DEPTH) {
            // SAFETY: the caller keeps the contract of `multiply_in_place`; queries of the call.
            unsafe { s.tile_top(self.queries_of((head, group), col)) };
            for (tile, &step) in steps.iter().enumerate() {
                if group == 0 {
                    ahead.ask_for(s, ROWS * DEPTH * 2 / 4 * self.quarters);
                }
                let first = self.keys.at(tile * ROWS, head).wrapping_add(col * 2);
                // SAFETY: the caller keeps the contract of `multiply_in_place`.
                unsafe { s.tile_down(tile, TileRows { first, step }) };
                self.before.go_on(s);
            }
        }
    }

    /// Multiplies a whole block of codes with one group of queries: like
    /// [`multiply_pieces`](Self::multiply_pieces), but without case distinctions in the loop.
    ///
    /// # Safety
    /// The task has entered tiles; the head dimension is whole vectors of codes.
    #[inline(always)]
    unsafe fn multiply_codes<S: Simd>(
        &mut self,
        s: S,
        rows: &[[*const u8; ROWS]; TILES],
        head: usize,
        sums: &mut Lines<{ TILES * TILE_LEN }>,
    ) {
        // Works in halves, so that scores of the first half are stored while the second half is converted. SAFETY:
        // promised by the caller; each half has half of the accumulators.
        unsafe {
            s.tile_zero();
            self.multiply_half_of_codes::<S, 0, 1>(s, rows, head);
            s.tile_store_half(false, sums.as_mut_ptr().add(place_of_quarter(0)));
            self.write(s, sums.as_ptr(), (head, 0), 0..2);
            self.multiply_half_of_codes::<S, 2, 3>(s, rows, head);
            s.tile_store_half(true, sums.as_mut_ptr().add(place_of_quarter(2)));
            self.write(s, sums.as_ptr(), (head, 0), 2..4);
        }
    }

    /// Multiplies two tiles of keys, one vector of codes after another. A piece is multiplied after the next one is
    /// converted.
    ///
    /// # Safety
    /// As for [`multiply_codes`](Self::multiply_codes).
    #[cfg_attr(not(unoptimised), inline(always))]
    unsafe fn multiply_half_of_codes<S: Simd, const UPPER: usize, const LOWER: usize>(
        &mut self,
        s: S,
        rows: &[[*const u8; ROWS]; TILES],
        head: usize,
    ) {
        let codes = s.tables(&self.keys.codes[head]);
        let offset = head as isize * self.keys.head_step;
        let queries = self.queries_of((head, 0), 0);
        let piece = |n: usize| self.staged.wrapping_add(n % TILES * PIECE_LEN);
        let vectors = self.keys.dim / COLUMNS;
        // SAFETY: the caller keeps the contract of `multiply_half_of_codes`; pieces of the scratch.
        unsafe {
            for n in 0..vectors {
                let offset = offset + (n * COLUMNS) as isize;
                widen_tile(s, &codes, (&rows[UPPER], offset), piece(2 * n), self.ahead);
                if n > 0 {
                    multiply_piece::<S, LOWER>(s, queries, n - 1, piece(2 * n - 1));
                }
                self.before.go_on(s);
                widen_tile(s, &codes, (&rows[LOWER], offset), piece(2 * n + 1), self.ahead);
                multiply_piece::<S, UPPER>(s, queries, n, piece(2 * n));
                self.before.go_on(s);
            }
            multiply_piece::<S, LOWER>(s, queries, vectors - 1, piece(2 * vectors - 1));
        }
    }

    /// Multiplies a block in pieces, which the first group of queries uses in place or copies to scratch. A piece
    /// is multiplied after the next one is copied; otherwise the product would wait for the copy.
    ///
    /// # Safety
    /// As for [`multiply_in_place`](Self::multiply_in_place), for the tiles that have steps.
    #[inline(always)]
    unsafe fn multiply_pieces<S: Simd, E: Elem>(
        &mut self,
        s: S,
        steps: &[Option<isize>; TILES],
        (head, group): (usize, usize),
        sums: &mut Lines<{ TILES * TILE_LEN }>,
        ahead: &mut Ahead<'_>,
    ) {
        let Block { keys, dim, queries, .. } = self.keys;
        let codes = if E::IS_BF16 { [s.splat(0.0); 9] } else { s.tables(&self.keys.codes[head]) };
        let pieces_kept = if queries > ROWS { usize::MAX } else { TILES };
        let mut staged = 0;
        let tiles = keys.len().div_ceil(ROWS);
        // Works in halves, so that scores of the first half are stored while the second half is copied.
        for half in [0..tiles.min(2), 2..tiles] {
            if half.is_empty() {
                continue;
            }
            let mut before = None;
            for col in (0..dim).step_by(COLUMNS) {
                for tile in half.clone() {
                    let rows = match steps[tile] {
                        Some(step) => TileRows {
                            first: self.keys.at(tile * ROWS, head).wrapping_add(col * E::BYTES),
                            step,
                        },
                        None => {
                            let to = self.staged.wrapping_add(staged % pieces_kept * PIECE_LEN);
                            staged += 1;
                            if group == 0 {
                                // SAFETY: the caller keeps the contract of `multiply_pieces`; `to` is one of
                                // the pieces of the scratch.
                                unsafe { self.stage::<S, E>(s, &codes, (head, tile, col), to, ahead) };
                            }
                            TileRows { first: to.cast(), step: (COLUMNS * 2) as isize }
                        }
                    };
                    // SAFETY: the caller keeps the contract of `multiply_pieces`.
                    unsafe { self.multiply(s, (head, group), before.replace(Piece { tile, col, rows })) };
                    self.before.go_on(s);
                }
            }
            // SAFETY: the caller keeps the contract of `multiply_pieces`; half of the accumulators.
            unsafe {
                self.multiply(s, (head, group), before);
                let lower = half.start > 0;
                s.tile_store_half(lower, sums.as_mut_ptr().add(place_of_quarter(half.start)));
            }
            self.write(s, sums.as_ptr(), (head, group), half);
        }
    }

    /// # Safety
    /// The task has entered tiles, and the piece is whole tiles.
    #[inline(always)]
    unsafe fn multiply<S: Simd>(&self, s: S, of: (usize, usize), piece: Option<Piece>) {
        let Some(Piece { tile, col, rows }) = piece else { return };
        for unit in (0..COLUMNS.min(self.keys.dim - col)).step_by(DEPTH) {
            // SAFETY: the caller keeps the contract of `multiply`; queries of the call.
            unsafe {
                s.tile_top(self.queries_of(of, col + unit));
                s.tile_down(tile, TileRows { first: rows.first.wrapping_add(unit * 2), ..rows });
            }
        }
    }

    /// A piece in bf16, to `to`.
    ///
    /// # Safety
    /// `col` is a column of the head's; a piece is writable at `to`.
    #[inline(always)]
    unsafe fn stage<S: Simd, E: Elem>(
        &self,
        s: S,
        codes: &Tables<S::V>,
        (head, tile, col): (usize, usize, usize),
        to: *mut f32,
        ahead: &mut Ahead<'_>,
    ) {
        let Block { keys, head_step, dim, .. } = self.keys;
        let offset = head as isize * head_step + (col * E::BYTES) as isize;
        if let (false, true, Some((rows, _))) =
            (E::IS_BF16, dim - col >= COLUMNS, keys[tile * ROWS..].split_first_chunk::<ROWS>())
        {
            // SAFETY: the caller keeps the contract of `stage`.
            unsafe { widen_tile(s, codes, (rows, offset), to, ahead) };
            return;
        }
        for (n, key) in keys[tile * ROWS..keys.len().min((tile + 1) * ROWS)].iter().enumerate() {
            let (from, to) = (key.wrapping_offset(offset), to.wrapping_add(n * COLUMNS / 2));
            // SAFETY: the caller's promise: a key's columns from `col` on.
            unsafe {
                if E::IS_BF16 {
                    if n % 4 == 0 {
                        ahead.ask_for(s, COLUMNS.min(dim - col) * 2 * self.quarters);
                    }
                    for at in (0..COLUMNS.min(dim - col)).step_by(2 * S::LANES) {
                        s.store(to.add(at / 2), s.load(from.add(at * 2).cast()));
                    }
                } else {
                    ahead.ask_for_line(s);
                    let mut copy = [0u8; COLUMNS];
                    let from = whole_codes(from, dim - col, &mut copy);
                    let [a, b] = s.widen_codes(codes, s.load_codes(from));
                    s.store(to, a);
                    s.store(to.add(S::LANES), b);
                }
            }
        }
    }

    /// A tile of a group's queries.
    #[inline(always)]
    fn queries_of(&self, (head, group): (usize, usize), col: usize) -> TileRows {
        let group = head * self.keys.queries.div_ceil(ROWS) + group;
        let first = self.queries.wrapping_add((group * self.keys.dim + col) / 2 * ROWS).cast();
        TileRows { first, step: (ROWS * size_of::<f32>()) as isize }
    }

    /// The scores of a group of queries.
    #[inline(always)]
    fn write<S: Simd>(
        &self,
        s: S,
        sums: *const f32,
        (head, group): (usize, usize),
        tiles: std::ops::Range<usize>,
    ) {
        let factor = s.splat(self.factors[head]);
        let row = head * self.keys.queries + group * ROWS;
        let rows = (self.keys.queries - group * ROWS).min(ROWS);
        for tile in tiles {
            // SAFETY: `sums` are the accumulators. Scores beyond the last key are written too: the block has room,
            // and they are hidden afterwards. Scores of queries beyond the head's have room as well: the next
            // head's scores overwrite them.
            unsafe {
                let from = sums.add(place_of_quarter(tile));
                let to = self.scores.add(row * BLOCK_KEYS + tile * ROWS);
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

/// Multiplies a piece of a tile of keys: the `n`-th vector of codes.
///
/// # Safety
/// The task has entered tiles; the piece and a tile of queries for each of its halves are readable.
#[inline(always)]
unsafe fn multiply_piece<S: Simd, const TILE: usize>(s: S, queries: TileRows, n: usize, piece: *const f32) {
    for half in 0..2 {
        let queries = queries.first.wrapping_add((2 * n + half) * TILE_LEN * size_of::<f32>());
        // SAFETY: the caller keeps the contract of `multiply_piece`.
        unsafe {
            s.tile_top(TileRows { first: queries, step: (ROWS * size_of::<f32>()) as isize });
            let first = piece.cast::<u8>().wrapping_add(half * DEPTH * 2);
            s.tile_down(TILE, TileRows { first, step: (COLUMNS * 2) as isize });
        }
    }
}
