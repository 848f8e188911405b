//! Scores of a block of keys.

use super::{
    Ahead, BLOCK_KEYS, Block, FOUR, KEYS_WINDOW, Order, UNIT_BYTES, met, steps_of, taken_together, unit,
};
use crate::simd::{Op, Simd, Tables};
use crate::tensor::{Elem, of_type};

/// `scores[query][key] = factor[head] * Q[query] . K[key]`, for a block.
pub(crate) struct Dots<'a> {
    pub(crate) keys: Block<'a>,
    /// Rows of whole units (for codes, of pairs of units), `stride` f32 apart, with zeros beyond the head
    /// dimension.
    pub(crate) queries: *const f32,
    /// Order of the queries' elements, for bf16 products of pairs or others.
    pub(crate) order: Order,
    pub(crate) stride: usize,
    /// Live queries of each head.
    pub(crate) live: &'a [usize],
    /// Factors of the scores, one for each head.
    pub(crate) factors: &'a [f32],
    /// [`BLOCK_KEYS`] for each of the queries.
    pub(crate) scores: *mut f32,
}

/// Queries of a head, contiguous, and the keys of a window.
#[derive(Clone, Copy)]
struct Group {
    /// Index of the group's first query among all rows.
    row: usize,
    head: usize,
    first: usize,
    last: usize,
}

impl<S: Simd> Op<S> for Dots<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        of_type!(self.keys.dtype, elem => self.of(s, elem));
    }
}

/// Products on elements converted to f32. Instruction sets that extend a plain one use the plain one's code, which
/// is compiled once.
struct AsF32<'a, 'b, E>(&'b Dots<'a>, E);

impl<S: Simd, E: Elem> Op<S> for AsF32<'_, '_, E> {
    #[inline(always)]
    fn call(self, s: S) {
        self.0.windows::<S, E, { met::AS_F32 }>(s, self.1);
    }
}

impl Dots<'_> {
    #[inline(always)]
    fn of<S: Simd, E: Elem>(&self, s: S, elem: E) {
        let (codes, pairs) = (!self.keys.codes.is_empty(), self.order == Order::Bf16);
        if S::BF16_DOT && E::BYTES == 1 && codes && pairs {
            self.windows::<S, E, { met::CODES_IN_PAIRS }>(s, elem);
        } else if S::WIDENS_CODES && E::BYTES == 1 && codes {
            self.windows::<S, E, { met::CODES_AS_F32 }>(s, elem);
        } else if S::BF16_DOT && E::IS_BF16 && pairs {
            self.windows::<S, E, { met::IN_PAIRS }>(s, elem);
        } else {
            s.plain().run(AsF32(self, elem));
        }
    }

    #[inline(always)]
    fn windows<S: Simd, E: Elem, const MET: u8>(&self, s: S, elem: E) {
        // Sums of four keys for four queries fit thirty-two registers, for two sixteen.
        let most = if S::TILE_ROWS > 6 { 4 } else { 2 };
        self.keys.windows(
            s,
            elem,
            (KEYS_WINDOW, steps_of(self.live, most).max(1)),
            #[inline(always)]
            |head, first, last, ahead| {
                let mut live = self.live;
                while let &[row, ..] = live {
                    let of = Group { row: head * self.keys.queries + row, head, first, last };
                    let taken = taken_together(live, most);
                    match taken {
                        4 => self.group::<S, E, 4, MET>(s, elem, of, ahead),
                        2 => self.group::<S, E, 2, MET>(s, elem, of, ahead),
                        _ => self.group::<S, E, 1, MET>(s, elem, of, ahead),
                    }
                    live = &live[taken..];
                }
            },
        );
    }

    #[inline(always)]
    fn group<S: Simd, E: Elem, const Q: usize, const MET: u8>(
        &self,
        s: S,
        elem: E,
        Group { row, head, first, last }: Group,
        ahead: &mut Ahead<'_>,
    ) {
        let unit = if met::are_codes(MET) { 2 * unit::<S>() } else { unit::<S>() };
        let of_query = |col: usize| if met::are_f32(MET) { col } else { col / 2 };
        let whole = self.keys.dim - self.keys.dim % unit;
        let queries = self.queries.wrapping_add(row * self.stride);
        let scores = self.scores.wrapping_add(row * BLOCK_KEYS);
        let factor = self.factors[head];
        let codes = if met::are_codes(MET) { s.tables(&self.keys.codes[head]) } else { [s.splat(0.0); 9] };
        for first in (first..last).step_by(FOUR) {
            let count = FOUR.min(last - first);
            ahead.ask_for(s, count * self.keys.dim * E::BYTES);
            let mut keys = [self.keys.at(first, head); FOUR];
            for (n, key) in keys.iter_mut().enumerate().take(count) {
                *key = self.keys.at(first + n, head);
            }
            let mut sums = [[s.splat(0.0); FOUR]; Q];
            // SAFETY: keys and queries of the call; their rows are as long as `dim`, the queries' whole units.
            unsafe {
                for col in (0..whole).step_by(unit) {
                    let queries = (queries.add(of_query(col)), self.stride);
                    add_unit::<S, E, Q, MET>(s, elem, &codes, &mut sums, keys, queries);
                    for key in &mut keys {
                        *key = key.add(unit * E::BYTES);
                    }
                }
                if whole < self.keys.dim {
                    let mut rest = [[0u8; UNIT_BYTES]; FOUR];
                    for (rest, key) in rest.iter_mut().zip(&mut keys) {
                        let bytes = (self.keys.dim - whole) * E::BYTES;
                        std::ptr::copy_nonoverlapping(*key, rest.as_mut_ptr(), bytes);
                        *key = rest.as_ptr();
                    }
                    let queries = (queries.add(of_query(whole)), self.stride);
                    add_unit::<S, E, Q, MET>(s, elem, &codes, &mut sums, keys, queries);
                }
                for (q, [a, b, c, d]) in sums_of::<S, Q>(s, &sums).into_iter().enumerate() {
                    // Scores beyond `count` are written too: a block of scores has room for them, and they are
                    // hidden afterwards.
                    let dots = [a * factor, b * factor, c * factor, d * factor];
                    scores.add(q * BLOCK_KEYS + first).cast::<[f32; FOUR]>().write_unaligned(dots);
                }
            }
        }
    }
}

/// Sums the lanes of each vector.
#[inline(always)]
fn sums_of<S: Simd, const Q: usize>(s: S, sums: &[[S::V; FOUR]; Q]) -> [[f32; FOUR]; Q] {
    let mut of = [[0.0; FOUR]; Q];
    if let (&[a, b, c, d], true) = (&sums[..], Q == 4) {
        of.copy_from_slice(&s.sum_of_sixteen([a, b, c, d]));
    } else {
        for (of, &sums) in of.iter_mut().zip(sums) {
            *of = s.sum_of_four(sums);
        }
    }
    of
}

/// Adds the products of one unit; for FP8 codes, of two units.
///
/// # Safety
/// The unit is readable at each of `keys`, and in each of Q queries, which lie `stride` apart.
#[inline(always)]
unsafe fn add_unit<S: Simd, E: Elem, const Q: usize, const MET: u8>(
    s: S,
    elem: E,
    codes: &Tables<S::V>,
    sums: &mut [[S::V; FOUR]; Q],
    keys: [*const u8; FOUR],
    (queries, stride): (*const f32, usize),
) {
    // SAFETY: promised by the caller: the unit is readable at each of `keys`, and in each of Q queries, which lie
    // `stride` apart.
    unsafe {
        for (n, key) in keys.into_iter().enumerate() {
            if MET == met::CODES_AS_F32 {
                for (u, both) in s.widen_codes(codes, s.load_codes(key)).into_iter().enumerate() {
                    let [a, b] = s.split_bf16(both);
                    for (q, sums) in sums.iter_mut().enumerate() {
                        let query = queries.add(q * stride + u * unit::<S>());
                        let sum = s.fma(a, s.load(query), sums[n]);
                        sums[n] = s.fma(b, s.load(query.add(S::LANES)), sum);
                    }
                }
            } else if MET == met::CODES_IN_PAIRS {
                let [a, b] = s.widen_codes(codes, s.load_codes(key));
                for (q, sums) in sums.iter_mut().enumerate() {
                    let query = queries.add(q * stride);
                    let sum = s.dot_bf16(sums[n], a, s.load(query));
                    sums[n] = s.dot_bf16(sum, b, s.load(query.add(S::LANES)));
                }
            } else if MET == met::IN_PAIRS {
                let k = s.load(key.cast());
                for (q, sums) in sums.iter_mut().enumerate() {
                    sums[n] = s.dot_bf16(sums[n], k, s.load(queries.add(q * stride)));
                }
            } else {
                let [a, b] = elem.unit(s, key);
                for (q, sums) in sums.iter_mut().enumerate() {
                    let query = queries.add(q * stride);
                    let sum = s.fma(a, s.load(query), sums[n]);
                    sums[n] = s.fma(b, s.load(query.add(S::LANES)), sum);
                }
            }
        }
    }
}
