//! A block of keys against a few queries, key after key: what a short query over a long cache takes.
//!
//! Nothing is copied: rows of K and V are converted in registers as they come from memory, for up to four
//! queries at once, a *unit* of two vectors at a time. Each query's arithmetic is its own, whatever others are
//! beside it, and however a block is cut into runs of rows.

use fmha_core::DType;

use crate::simd::{Op, Simd, exp};
use crate::tensor::{Elem, of_type};

/// Keys of a block.
pub(crate) const BLOCK_KEYS: usize = 64;

/// Bytes of the widest unit.
const UNIT_BYTES: usize = 2 * 16 * 4;

/// Elements of a unit.
pub(crate) const fn unit<S: Simd>() -> usize {
    2 * S::LANES
}

/// How a row lies for a unit's arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// f32, as they come.
    Plain,
    /// f32, in each unit the elements at even places before those at odd ones: as bf16 are widened.
    EvenOdd,
    /// bf16, as they come.
    Bf16,
}

impl Order {
    /// That of results, and of operands that are f32, beside elements of `dtype`.
    pub(crate) fn beside(dtype: DType) -> Self {
        fn of<E: Elem>(_: E) -> Order {
            if E::EVEN_ODD { Order::EvenOdd } else { Order::Plain }
        }
        of_type!(dtype, elem => of(elem))
    }

    /// Where element `d` of a row of f32 is.
    pub(crate) fn place<S: Simd>(self, d: usize) -> usize {
        match self {
            Order::EvenOdd => d - d % unit::<S>() + d % 2 * S::LANES + d % unit::<S>() / 2,
            Order::Plain | Order::Bf16 => d,
        }
    }
}

/// A block of K or V: some keys of some heads, where they lie.
#[derive(Clone, Copy)]
pub(crate) struct Block<'a> {
    /// Each key's row of the first head.
    pub(crate) keys: &'a [*const u8],
    /// Bytes from head to head.
    pub(crate) head_step: isize,
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    pub(crate) dtype: DType,
    /// Queries of each head: their rows follow those of the head before.
    pub(crate) queries: usize,
    /// Whether hardware would not see one stream in it: rows of several heads, or of pages, in the caller's memory.
    pub(crate) is_scattered: bool,
    /// The rows that are read after this block, and the bytes of each.
    pub(crate) next: (&'a [*const u8], usize),
}

/// What of a block is read in the order of its addresses before it is computed with.
const WINDOW_BYTES: usize = 8 << 10;

/// How far ahead of that the second-level cache is asked for it.
const AHEAD_BYTES: usize = 16 << 10;

/// Keys whose sums are taken together.
const FOUR: usize = 4;

/// How many heads of `row_bytes` a block takes: four keys of them are two windows at most.
pub(crate) fn heads_of_block(row_bytes: usize) -> usize {
    (2 * WINDOW_BYTES / (FOUR * row_bytes)).max(1)
}

impl<'a> Block<'a> {
    /// `work(head, first key, one past the last)` over windows of keys, each of which has been read once in the order
    /// of its addresses.
    ///
    /// Heads want rows that lie apart: sixteen tokens of eight heads are 4 KiB apart for one head, and four such
    /// streams in a page are none to a hardware prefetcher. Measured for 8 heads of 128 bf16 (EPYC, by processor
    /// time, GB/s): head by head 4 to 5; blocks of all heads, 64 keys head by head, with software prefetch 16; windows
    /// of 8 KiB 14; windows with software prefetch 16 KiB ahead 20; plain reads 20.
    #[inline(always)]
    fn windows<S: Simd, E: Elem>(&self, s: S, _: E, mut work: impl FnMut(usize, usize, usize)) {
        if !self.is_scattered {
            // Not `for_each`: what it calls is compiled without these instructions.
            for head in 0..self.heads {
                work(head, 0, self.keys.len());
            }
            return;
        }
        let row_bytes = self.dim * E::BYTES;
        let side_by_side = self.head_step == row_bytes as isize;
        let (pieces, piece_bytes) =
            if side_by_side { (1, self.heads * row_bytes) } else { (self.heads, row_bytes) };
        let keys = (WINDOW_BYTES / (self.heads * row_bytes)).max(FOUR) & !(FOUR - 1);
        let bytes = self.bytes_of_key(row_bytes);
        let skipped = self.keys.len().min(keys_ahead(bytes));
        let mut ahead = Ahead { rows: &self.keys[skipped..], bytes, next: self.next, done: 0 };
        let mut first = 0;
        while first < self.keys.len() {
            let last = self.keys.len().min(first + keys);
            for &key in &self.keys[first..last] {
                for piece in 0..pieces {
                    let piece = key.wrapping_offset(piece as isize * self.head_step);
                    for at in (0..piece_bytes).step_by(64) {
                        // SAFETY: a byte of a row of the block. Volatile: the read itself is wanted.
                        unsafe { piece.add(at).read_volatile() };
                    }
                }
            }
            for head in 0..self.heads {
                ahead.ask_for(s, (last - first) * row_bytes);
                work(head, first, last);
            }
            first = last;
        }
    }

    /// From a key's first byte to its last, of all heads.
    fn bytes_of_key(&self, row_bytes: usize) -> usize {
        row_bytes + (self.heads - 1) * self.head_step.max(0) as usize
    }

    /// Its first [`AHEAD_BYTES`], for the block before it to ask for.
    pub(crate) fn ahead(&self) -> (&'a [*const u8], usize) {
        let bytes = self.bytes_of_key(self.dim * self.dtype.size_bytes() as usize);
        let count = if self.is_scattered { self.keys.len().min(keys_ahead(bytes)) } else { 0 };
        (&self.keys[..count], bytes)
    }

    /// The row of a key of a head.
    #[inline(always)]
    fn at(&self, key: usize, head: usize) -> *const u8 {
        self.keys[key].wrapping_offset(head as isize * self.head_step)
    }
}

/// Keys of [`AHEAD_BYTES`].
fn keys_ahead(bytes_of_key: usize) -> usize {
    (AHEAD_BYTES / bytes_of_key).max(FOUR)
}

/// Rows that the second-level cache is asked for, one after another.
struct Ahead<'a> {
    rows: &'a [*const u8],
    bytes: usize,
    /// Those after them.
    next: (&'a [*const u8], usize),
    /// Of the first row.
    done: usize,
}

impl Ahead<'_> {
    #[inline(always)]
    fn ask_for<S: Simd>(&mut self, s: S, bytes: usize) {
        let mut left = bytes;
        while left > 0 {
            let Some((&row, rest)) = self.rows.split_first() else {
                if self.next.0.is_empty() {
                    return;
                }
                (self.rows, self.bytes) = std::mem::take(&mut self.next);
                continue;
            };
            let taken = left.min(self.bytes - self.done);
            let mut at = 0;
            while at < taken {
                s.prefetch(row.wrapping_add(self.done + at));
                at += 64;
            }
            (self.done, left) = (self.done + taken, left - taken);
            if self.done == self.bytes {
                (self.rows, self.done) = (rest, 0);
            }
        }
    }
}

/// `scores[query][key] = factor[head] * Q[query] . K[key]`, for a block.
pub(crate) struct Dots<'a> {
    pub(crate) keys: Block<'a>,
    /// Rows of whole units, `stride` f32 apart, zeros beyond the head dimension.
    pub(crate) queries: *const f32,
    pub(crate) order: Order,
    pub(crate) stride: usize,
    /// Which queries of each head.
    pub(crate) live: &'a [usize],
    /// One for each head.
    pub(crate) factors: &'a [f32],
    /// [`BLOCK_KEYS`] for each of the queries.
    pub(crate) scores: *mut f32,
}

impl<S: Simd> Op<S> for Dots<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        of_type!(self.keys.dtype, elem => self.of(s, elem));
    }
}

impl Dots<'_> {
    #[inline(always)]
    fn of<S: Simd, E: Elem>(&self, s: S, elem: E) {
        if S::BF16_DOT && E::IS_BF16 && self.order == Order::Bf16 {
            self.windows::<S, E, true>(s, elem);
        } else {
            self.windows::<S, E, false>(s, elem);
        }
    }

    #[inline(always)]
    fn windows<S: Simd, E: Elem, const BF16: bool>(&self, s: S, elem: E) {
        self.keys.windows(
            s,
            elem,
            #[inline(always)]
            |head, first, last| {
                let mut live = self.live;
                while !live.is_empty() {
                    // Sums of four keys for four queries fit thirty-two registers, for two sixteen.
                    let taken = match live.len() {
                        4.. if S::TILE_ROWS > 6 => {
                            self.group::<S, E, 4, BF16>(s, elem, live, head, (first, last))
                        }
                        2.. => self.group::<S, E, 2, BF16>(s, elem, live, head, (first, last)),
                        _ => self.group::<S, E, 1, BF16>(s, elem, live, head, (first, last)),
                    };
                    live = &live[taken..];
                }
            },
        );
    }

    #[inline(always)]
    fn group<S: Simd, E: Elem, const Q: usize, const BF16: bool>(
        &self,
        s: S,
        elem: E,
        live: &[usize],
        head: usize,
        (first, last): (usize, usize),
    ) -> usize {
        let whole = self.keys.dim - self.keys.dim % unit::<S>();
        let (mut queries, mut scores) = ([self.queries; Q], [self.scores; Q]);
        for ((query, score), &row) in queries.iter_mut().zip(&mut scores).zip(live) {
            let row = head * self.keys.queries + row;
            *query = self.queries.wrapping_add(row * self.stride);
            *score = self.scores.wrapping_add(row * BLOCK_KEYS);
        }
        let factor = self.factors[head];
        for first in (first..last).step_by(FOUR) {
            let count = FOUR.min(last - first);
            let mut keys = [self.keys.at(first, head); FOUR];
            for (n, key) in keys.iter_mut().enumerate().take(count) {
                *key = self.keys.at(first + n, head);
            }
            let mut sums = [[s.splat(0.0); FOUR]; Q];
            // SAFETY: keys and queries of the call; their rows are as long as `dim`, the queries' whole units.
            unsafe {
                for col in (0..whole).step_by(unit::<S>()) {
                    add_unit::<S, E, Q, BF16>(s, elem, &mut sums, keys, queries, col);
                    for key in &mut keys {
                        *key = key.add(unit::<S>() * E::BYTES);
                    }
                }
                if whole < self.keys.dim {
                    let mut rest = [[0u8; UNIT_BYTES]; FOUR];
                    for (rest, key) in rest.iter_mut().zip(&mut keys) {
                        let bytes = (self.keys.dim - whole) * E::BYTES;
                        std::ptr::copy_nonoverlapping(*key, rest.as_mut_ptr(), bytes);
                        *key = rest.as_ptr();
                    }
                    add_unit::<S, E, Q, BF16>(s, elem, &mut sums, keys, queries, whole);
                }
                for (sums, score) in sums.into_iter().zip(scores) {
                    let [a, b, c, d] = s.sum_of_four(sums);
                    // Those beyond `count` too: a block of scores has room for them, and they are hidden next.
                    let dots = [a * factor, b * factor, c * factor, d * factor];
                    score.add(first).cast::<[f32; FOUR]>().write_unaligned(dots);
                }
            }
        }
        Q
    }
}

/// Adds the products of one unit, from column `col` of the queries on.
///
/// # Safety
/// A unit is readable at each of `keys` and, from `col` on, of `queries`.
#[inline(always)]
unsafe fn add_unit<S: Simd, E: Elem, const Q: usize, const BF16: bool>(
    s: S,
    elem: E,
    sums: &mut [[S::V; FOUR]; Q],
    keys: [*const u8; FOUR],
    queries: [*const f32; Q],
    col: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for (n, key) in keys.into_iter().enumerate() {
            if BF16 {
                let k = s.load(key.cast());
                for (sums, query) in sums.iter_mut().zip(queries) {
                    sums[n] = s.dot_bf16(sums[n], k, s.load(query.add(col / 2)));
                }
            } else {
                let [a, b] = elem.unit(s, key);
                for (sums, query) in sums.iter_mut().zip(queries) {
                    let sum = s.fma(a, s.load(query.add(col)), sums[n]);
                    sums[n] = s.fma(b, s.load(query.add(col + S::LANES)), sum);
                }
            }
        }
    }
}

/// The running state of one query.
#[derive(Clone, Copy)]
pub(crate) struct RowSums {
    pub(crate) row_max: f32,
    pub(crate) row_sum: f32,
}

impl RowSums {
    /// Nothing seen.
    pub(crate) const EMPTY: Self = Self { row_max: f32::NEG_INFINITY, row_sum: 0.0 };

    /// The maximum to subtract: −inf − −inf would be NaN.
    #[inline(always)]
    pub(crate) fn base(self) -> f32 {
        if self.row_max == f32::NEG_INFINITY { 0.0 } else { self.row_max }
    }
}

/// `e^x` of one number, to the bits that a vector of it has.
#[inline(always)]
pub(crate) fn exp_one<S: Simd>(s: S, x: f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    // SAFETY: no vector has more than sixteen lanes.
    unsafe { s.store(lanes.as_mut_ptr(), exp(s, s.splat(x))) };
    lanes[0]
}

/// A query's block of scores to probabilities, in place, rounded to `round` when that is a 16-bit type, and
/// its running state. What was summed before is to be multiplied by `alpha`.
pub(crate) struct SoftmaxRow<'a> {
    /// [`BLOCK_KEYS`], −inf where a key is hidden or there is none.
    pub(crate) scores: *mut f32,
    pub(crate) state: &'a mut RowSums,
    pub(crate) alpha: &'a mut f32,
    pub(crate) round: DType,
}

impl<S: Simd> Op<S> for SoftmaxRow<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { scores, state, alpha, round } = self;
        let old = state.row_max;
        // SAFETY: a block of scores is whole vectors.
        unsafe {
            let mut most = s.splat(f32::NEG_INFINITY);
            for at in (0..BLOCK_KEYS).step_by(S::LANES) {
                // A NaN leaves the maximum alone and shows in P.
                most = s.max(s.load(scores.add(at)), most);
            }
            let most = s.largest(most);
            state.row_max = if most > old { most } else { old };
            let base = state.base();
            *alpha = if old == state.row_max { 1.0 } else { exp_one(s, old - base) };
            let mut sum = s.splat(0.0);
            for at in (0..BLOCK_KEYS).step_by(S::LANES) {
                let p = exp(s, s.sub(s.load(scores.add(at)), s.splat(base)));
                sum = s.add(sum, p);
                let kept = match round {
                    DType::Bf16 => s.round_to_bf16(p),
                    DType::F16 => s.round_to_f16(p),
                    _ => p,
                };
                s.store(scores.add(at), kept);
            }
            state.row_sum = state.row_sum * *alpha + s.sum(sum);
        }
    }
}

/// `out[query] = alpha[query] out[query] + sum_key P[query][key] V[key]`, for a block.
pub(crate) struct AddValues<'a> {
    pub(crate) values: Block<'a>,
    /// [`BLOCK_KEYS`] for each query.
    pub(crate) weights: *const f32,
    /// One for each query.
    pub(crate) alpha: *const f32,
    /// Queries of each head that see every key of the block.
    pub(crate) whole: &'a [usize],
    /// Queries that see some, and which: a bit for each key. What the others' V holds does not matter.
    pub(crate) partial: &'a [(usize, u64)],
    /// Rows of whole units in V's [`Order`], `stride` apart.
    pub(crate) out: *mut f32,
    pub(crate) stride: usize,
}

/// What a group of [`AddValues`] is about.
#[derive(Clone, Copy)]
struct Group<'a> {
    live: &'a [usize],
    /// A bit for each key.
    seen: u64,
    head: usize,
    first: usize,
    last: usize,
}

impl<S: Simd> Op<S> for AddValues<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        of_type!(self.values.dtype, elem => self.of(s, elem));
    }
}

impl AddValues<'_> {
    #[inline(always)]
    fn of<S: Simd, E: Elem>(&self, s: S, elem: E) {
        self.values.windows(
            s,
            elem,
            #[inline(always)]
            |head, first, last| {
                let mut live = self.whole;
                while !live.is_empty() {
                    let group = Group { live, seen: u64::MAX, head, first, last };
                    let taken = match live.len() {
                        4.. => self.group::<S, E, 4>(s, elem, group),
                        2.. => self.group::<S, E, 2>(s, elem, group),
                        _ => self.group::<S, E, 1>(s, elem, group),
                    };
                    live = &live[taken..];
                }
                for &(row, seen) in self.partial {
                    self.group::<S, E, 1>(s, elem, Group { live: &[row], seen, head, first, last });
                }
            },
        );
    }

    #[inline(always)]
    fn group<S: Simd, E: Elem, const Q: usize>(&self, s: S, elem: E, group: Group<'_>) -> usize {
        // Eight vectors of sums, or sixteen where there are thirty-two registers.
        let most = if S::TILE_ROWS > 6 { 8 / Q } else { 4 / Q };
        let (mut col, dim) = (0, self.values.dim);
        while most >= 4 && col + 4 * unit::<S>() <= dim {
            self.columns::<S, E, Q, 4, false>(s, elem, group, col);
            col += 4 * unit::<S>();
        }
        while most >= 2 && col + 2 * unit::<S>() <= dim {
            self.columns::<S, E, Q, 2, false>(s, elem, group, col);
            col += 2 * unit::<S>();
        }
        while col + unit::<S>() <= dim {
            self.columns::<S, E, Q, 1, false>(s, elem, group, col);
            col += unit::<S>();
        }
        if col < dim {
            self.columns::<S, E, Q, 1, true>(s, elem, group, col);
        }
        Q
    }

    /// `UNITS` units of columns from `col` on; `REST`: what is left of the last one.
    #[inline(always)]
    fn columns<S: Simd, E: Elem, const Q: usize, const UNITS: usize, const REST: bool>(
        &self,
        s: S,
        elem: E,
        Group { live, seen, head, first, last }: Group<'_>,
        col: usize,
    ) {
        let mut out = [self.out; Q];
        let mut weights = [self.weights; Q];
        let mut sums = [[[s.splat(0.0); 2]; UNITS]; Q];
        let mut rest = [0u8; UNIT_BYTES];
        // SAFETY: rows and columns of the call.
        unsafe {
            for (query, &row) in live[..Q].iter().enumerate() {
                let row = head * self.values.queries + row;
                out[query] = self.out.add(row * self.stride + col);
                weights[query] = self.weights.add(row * BLOCK_KEYS);
                let alpha = s.splat(if first == 0 { *self.alpha.add(row) } else { 1.0 });
                for (u, sums) in sums[query].iter_mut().enumerate() {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = s.mul(s.load(out[query].add((2 * u + v) * S::LANES)), alpha);
                    }
                }
            }
            for key in first..last {
                if seen >> key & 1 == 0 {
                    continue;
                }
                let mut from = self.values.at(key, head).add(col * E::BYTES);
                if REST {
                    let bytes = (self.values.dim - col) * E::BYTES;
                    std::ptr::copy_nonoverlapping(from, rest.as_mut_ptr(), bytes);
                    from = rest.as_ptr();
                }
                let mut p = [s.splat(0.0); Q];
                for (p, weights) in p.iter_mut().zip(weights) {
                    *p = s.splat(*weights.add(key));
                }
                for u in 0..UNITS {
                    let v = elem.unit(s, from.add(u * unit::<S>() * E::BYTES));
                    for (sums, &p) in sums.iter_mut().zip(&p) {
                        sums[u][0] = s.fma(p, v[0], sums[u][0]);
                        sums[u][1] = s.fma(p, v[1], sums[u][1]);
                    }
                }
            }
            for (out, sums) in out.into_iter().zip(&sums) {
                for (u, sums) in sums.iter().enumerate() {
                    for (v, &sum) in sums.iter().enumerate() {
                        s.store(out.add((2 * u + v) * S::LANES), sum);
                    }
                }
            }
        }
    }
}
