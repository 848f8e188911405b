//! Product of weights and a block of values.

use super::{
    Ahead, BLOCK_KEYS, Block, FOUR, Order, UNIT_BYTES, VALUES_WINDOW, met, steps_of, taken_together, unit,
};
use crate::simd::{Op, Simd, Tables};
use crate::tensor::{Elem, of_type};

/// `out[query] = alpha[query] out[query] + sum_key P[query][key] V[key]`, for a block.
pub(crate) struct AddValues<'a> {
    pub(crate) values: Block<'a>,
    /// Weights of [`BLOCK_KEYS`] keys for each query. Those for bf16 products are packed in place.
    pub(crate) weights: *mut f32,
    /// Factors of the running sums, one for each query.
    pub(crate) alpha: *const f32,
    /// Queries of each head that see every key of the block.
    pub(crate) whole: &'a [usize],
    /// Queries that see some of the block's keys, with a bit for each key. V of keys that a query does not see must
    /// not affect it.
    pub(crate) partial: &'a [(usize, u64)],
    /// Rows of whole units, `stride` apart.
    pub(crate) out: *mut f32,
    /// Order of O's sums: in fours for products of pairs.
    pub(crate) order: Order,
    pub(crate) stride: usize,
}

/// Most queries that are processed together: with two units of codes, sixteen registers hold the sums of two
/// queries.
const fn most_queries<S: Simd>(met: u8) -> usize {
    if met::are_codes(met) && S::TILE_ROWS <= 6 { 2 } else { 4 }
}

/// Queries of a head, one after another, and the keys of a window.
#[derive(Clone, Copy)]
struct Group {
    /// Index of the group's first query among all rows.
    row: usize,
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

/// Elements converted to f32. Instruction sets that extend another one use the code of that other one, which is
/// compiled once.
struct AsF32<'a, 'b, E>(&'b AddValues<'a>, E);

impl<S: Simd, E: Elem> Op<S> for AsF32<'_, '_, E> {
    #[inline(always)]
    fn call(self, s: S) {
        self.0.windows::<S, E, { met::AS_F32 }>(s, self.1);
    }
}

impl AddValues<'_> {
    #[inline(always)]
    fn of<S: Simd, E: Elem>(&self, s: S, elem: E) {
        let codes = E::BYTES == 1 && !self.values.codes.is_empty();
        // Sums in fours exist only for this set, and codes are read there in pairs only; other combinations are not
        // compiled.
        let pairs = S::BF16_DOT && S::DOTS_OUTRUN_FMAS && self.order == Order::Fours;
        debug_assert!(pairs || !(S::DOTS_OUTRUN_FMAS && codes), "codes are bf16, whose sums are in fours");
        if pairs {
            for head in 0..self.values.heads {
                let partial = self.partial.iter().map(|(row, _)| row);
                for row in self.whole.iter().chain(partial) {
                    pack_weights(s, self.weights, head * self.values.queries + row);
                }
            }
        }
        if S::BF16_DOT && S::DOTS_OUTRUN_FMAS && E::BYTES == 1 && codes {
            self.windows::<S, E, { met::CODES_IN_PAIRS }>(s, elem);
        } else if S::WIDENS_CODES && E::BYTES == 1 && codes {
            self.windows::<S, E, { met::CODES_AS_F32 }>(s, elem);
        } else if S::BF16_DOT && S::DOTS_OUTRUN_FMAS && E::IS_BF16 && pairs {
            self.windows::<S, E, { met::IN_PAIRS }>(s, elem);
        } else {
            s.plain().run(AsF32(self, elem));
        }
    }

    // Builds without optimisation do not force inlining: with it, one function for all types took 2.7 MB of stack
    // with AMX, more than a thread's 2 MB, and a decode crashed.
    #[cfg_attr(not(unoptimised), inline(always))]
    fn windows<S: Simd, E: Elem, const MET: u8>(&self, s: S, elem: E) {
        self.values.windows(
            s,
            elem,
            (VALUES_WINDOW, steps_of(self.whole, most_queries::<S>(MET)) + self.partial.len()),
            #[inline(always)]
            |head, first, last, ahead| {
                let mut live = self.whole;
                let first_row = head * self.values.queries;
                while let &[row, ..] = live {
                    let of = Group { row: first_row + row, seen: u64::MAX, head, first, last };
                    let taken = taken_together(live, most_queries::<S>(MET));
                    match taken {
                        4 => self.group::<S, E, 4, MET>(s, elem, of, ahead),
                        2 => self.group::<S, E, 2, MET>(s, elem, of, ahead),
                        _ => self.group::<S, E, 1, MET>(s, elem, of, ahead),
                    }
                    live = &live[taken..];
                }
                for &(row, seen) in self.partial {
                    let of = Group { row: first_row + row, seen, head, first, last };
                    self.group::<S, E, 1, MET>(s, elem, of, ahead);
                }
            },
        );
    }

    #[inline(always)]
    fn group<S: Simd, E: Elem, const Q: usize, const MET: u8>(
        &self,
        s: S,
        elem: E,
        of: Group,
        ahead: &mut Ahead<'_>,
    ) {
        // Eight vectors of sums, or sixteen if there are thirty-two registers.
        let most = if S::TILE_ROWS > 6 { 8 / Q } else { 4 / Q };
        let (mut col, dim) = (0, self.values.dim);
        while most >= 4 && col + 4 * unit::<S>() <= dim {
            self.columns::<S, E, Q, 4, MET, false>(s, elem, of, col, ahead);
            col += 4 * unit::<S>();
        }
        while most >= 2 && col + 2 * unit::<S>() <= dim {
            self.columns::<S, E, Q, 2, MET, false>(s, elem, of, col, ahead);
            col += 2 * unit::<S>();
        }
        if met::are_codes(MET) {
            // A vector of codes is two units.
            if col < dim {
                self.columns::<S, E, Q, 2, MET, true>(s, elem, of, col, ahead);
            }
            return;
        }
        while col + unit::<S>() <= dim {
            self.columns::<S, E, Q, 1, MET, false>(s, elem, of, col, ahead);
            col += unit::<S>();
        }
        if col < dim {
            self.columns::<S, E, Q, 1, MET, true>(s, elem, of, col, ahead);
        }
    }

    /// `UNITS` units of columns from `col` on; `REST` is the width of an incomplete last unit.
    #[inline(always)]
    fn columns<S: Simd, E: Elem, const Q: usize, const UNITS: usize, const MET: u8, const REST: bool>(
        &self,
        s: S,
        elem: E,
        of: Group,
        col: usize,
        ahead: &mut Ahead<'_>,
    ) {
        let columns = if REST { self.values.dim - col } else { UNITS * unit::<S>() };
        let out = self.out.wrapping_add(of.row * self.stride + col);
        let codes =
            if met::are_codes(MET) { s.tables(&self.values.codes[of.head]) } else { [s.splat(0.0); 9] };
        let mut sums = [[[s.splat(0.0); 2]; UNITS]; Q];
        // SAFETY: rows and columns of the call.
        unsafe {
            for (q, sums) in sums.iter_mut().enumerate() {
                let alpha = s.splat(if of.first == 0 { *self.alpha.add(of.row + q) } else { 1.0 });
                for (u, sums) in sums.iter_mut().enumerate() {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = s.mul(s.load(out.add(q * self.stride + (2 * u + v) * S::LANES)), alpha);
                    }
                }
            }
            let weights = self.weights.wrapping_add(of.row * BLOCK_KEYS);
            let offset = of.head as isize * self.values.head_step + (col * E::BYTES) as isize;
            for (four, keys) in self.values.keys[of.first..of.last].chunks(FOUR).enumerate() {
                let first = of.first + four * FOUR;
                ahead.ask_for(s, keys.len() * columns * E::BYTES);
                if met::are_f32(MET) {
                    for (n, key) in keys.iter().enumerate() {
                        if of.seen >> (first + n) & 1 == 0 {
                            continue;
                        }
                        let mut from = key.wrapping_offset(offset);
                        let mut rest = [0u8; UNIT_BYTES];
                        if REST {
                            std::ptr::copy_nonoverlapping(from, rest.as_mut_ptr(), columns * E::BYTES);
                            from = rest.as_ptr();
                        }
                        let weights = weights.add(first + n);
                        add_row::<S, E, Q, UNITS, MET>(s, elem, &codes, &mut sums, from, weights);
                    }
                    continue;
                }
                // Two keys at once: bf16 are multiplied in pairs.
                for (n, keys) in keys.chunks(2).enumerate() {
                    let key = first + 2 * n;
                    let seen = of.seen >> key;
                    let mut rest = [[0u8; UNIT_BYTES]; 2];
                    let mut from = [ZEROS.as_ptr(); 2];
                    for (n, (from, key)) in from.iter_mut().zip(keys).enumerate() {
                        if seen >> n & 1 != 0 {
                            *from = key.wrapping_offset(offset);
                            if REST {
                                let rest = rest[n].as_mut_ptr();
                                std::ptr::copy_nonoverlapping(*from, rest, columns * E::BYTES);
                                *from = rest;
                            }
                        }
                    }
                    if seen & 3 != 0 {
                        add_pair::<S, Q, UNITS, MET>(s, &codes, &mut sums, from, weights.add(key / 2));
                    }
                }
            }
            for (q, sums) in sums.iter().enumerate() {
                for (u, sums) in sums.iter().enumerate() {
                    for (v, &sum) in sums.iter().enumerate() {
                        s.store(out.add(q * self.stride + (2 * u + v) * S::LANES), sum);
                    }
                }
            }
        }
    }
}

/// Packs a query's weights, rounded to bf16, into the first half of their own memory.
#[inline(always)]
fn pack_weights<S: Simd>(s: S, weights: *mut f32, row: usize) {
    let weights = weights.wrapping_add(row * BLOCK_KEYS);
    for at in (0..BLOCK_KEYS).step_by(unit::<S>()) {
        // SAFETY: a row's block of weights; what is overwritten has been read.
        unsafe {
            let packed = s.pack_bf16(s.load(weights.add(at)), s.load(weights.add(at + S::LANES)));
            s.store(weights.add(at / 2), packed);
        }
    }
}

/// Zeros that replace a key whose V must not be read, for units of bf16 or of codes.
static ZEROS: [u8; 4 * UNIT_BYTES / 2] = [0; 4 * UNIT_BYTES / 2];

/// Adds the products of two keys of bf16, or of codes: their rows are paired element by element, so one instruction
/// multiplies both.
///
/// # Safety
/// `UNITS` units are readable at both of `from`, weights of Q queries at `weights`.
#[inline(always)]
unsafe fn add_pair<S: Simd, const Q: usize, const UNITS: usize, const MET: u8>(
    s: S,
    codes: &Tables<S::V>,
    sums: &mut [[[S::V; 2]; UNITS]; Q],
    from: [*const u8; 2],
    weights: *const f32,
) {
    // SAFETY: promised by the caller: `UNITS` units are readable at both of `from`, weights of Q queries at
    // `weights`.
    unsafe {
        let mut p = [s.splat(0.0); Q];
        for (q, p) in p.iter_mut().enumerate() {
            *p = s.splat(*weights.add(q * BLOCK_KEYS));
        }
        let [a, b] = from;
        let mut units = [[p[0]; 2]; UNITS];
        if MET == met::CODES_IN_PAIRS {
            for u in (0..UNITS).step_by(2) {
                let at = 2 * u * S::LANES;
                let halves = s.pair_codes(s.load_codes(a.add(at)), s.load_codes(b.add(at)));
                for (unit, half) in units[u..].iter_mut().zip(halves) {
                    *unit = s.widen_codes(codes, half);
                }
            }
        } else {
            for (u, unit) in units.iter_mut().enumerate() {
                let at = 4 * u * S::LANES;
                *unit = s.pair_rows(s.load(a.add(at).cast()), s.load(b.add(at).cast()));
            }
        }
        for (u, v) in units.iter().enumerate() {
            for (sums, &p) in sums.iter_mut().zip(&p) {
                sums[u][0] = s.dot_bf16(sums[u][0], v[0], p);
                sums[u][1] = s.dot_bf16(sums[u][1], v[1], p);
            }
        }
    }
}

/// Adds the products of one key.
///
/// # Safety
/// `UNITS` units are readable at `from`, weights of Q queries at `weights`.
#[inline(always)]
unsafe fn add_row<S: Simd, E: Elem, const Q: usize, const UNITS: usize, const MET: u8>(
    s: S,
    elem: E,
    codes: &Tables<S::V>,
    sums: &mut [[[S::V; 2]; UNITS]; Q],
    from: *const u8,
    weights: *const f32,
) {
    // SAFETY: promised by the caller: `UNITS` units are readable at `from`, weights of Q queries at
    // `weights`.
    unsafe {
        let mut p = [s.splat(0.0); Q];
        for (q, p) in p.iter_mut().enumerate() {
            *p = s.splat(*weights.add(q * BLOCK_KEYS));
        }
        let mut codes_of_two = [p[0]; 2];
        for u in 0..UNITS {
            let from = from.add(u * unit::<S>() * E::BYTES);
            if MET == met::CODES_AS_F32 && u % 2 == 0 {
                codes_of_two = s.widen_codes(codes, s.load_codes(from));
            }
            let v = match MET {
                met::CODES_AS_F32 => s.split_bf16(codes_of_two[u % 2]),
                _ => elem.unit(s, from),
            };
            for (sums, &p) in sums.iter_mut().zip(&p) {
                sums[u][0] = s.fma(p, v[0], sums[u][0]);
                sums[u][1] = s.fma(p, v[1], sums[u][1]);
            }
        }
    }
}
