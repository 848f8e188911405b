//! Vectors of f32 behind one small trait, so that every kernel is written once.
//!
//! A value of a [`Simd`] type is the proof that this processor has the instructions: it is made by
//! its `detect` alone. Kernels are [`Op`]s, and [`Simd::run`] is the one place where code that was
//! compiled for those instructions is entered; inside, everything is `inline(always)`.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::Amx;
pub(crate) use math::{exp, tanh};
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use portable::Portable;
#[cfg(test)]
pub(crate) use portable::SoftTiles;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512, Avx512Bf16};

/// A kernel: what [`Simd::run`] compiles for one instruction set.
pub(crate) trait Op<S: Simd> {
    /// Runs it. Implementations are `#[inline(always)]`.
    fn call(self, simd: S);
}

/// `C (=|+=) A B` over a block of 32 x 32 f32: A has 32 rows of bf16, reduced 32 at a time (a *step*); B has
/// a row of 32 pairs of bf16 for each pair of the reduction, 16 rows a step. Distances are in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileProduct {
    pub(crate) a: *const u8,
    /// From row to row of A.
    pub(crate) a_row: usize,
    pub(crate) b: *const u8,
    /// From row to row of B.
    pub(crate) b_row: usize,
    /// At least 1.
    pub(crate) steps: usize,
    pub(crate) c: *mut f32,
    /// From row to row of C.
    pub(crate) c_row: usize,
    pub(crate) add: bool,
}

/// What runs beside tiles, a little after each of their steps.
pub(crate) trait Between<S: Simd> {
    /// Implementations are `#[inline(always)]`.
    fn go_on(&mut self, s: S);
}

/// Nothing to do.
pub(crate) struct Nothing;

impl<S: Simd> Between<S> for Nothing {
    #[inline(always)]
    fn go_on(&mut self, _: S) {}
}

impl TileProduct {
    /// Computes it, going on with `between` after each step.
    ///
    /// # Safety
    /// A, B and C are there over their extents; this thread has entered tiles.
    #[inline(always)]
    pub(crate) unsafe fn run<S: Simd>(&self, s: S, between: &mut impl Between<S>) {
        let (mut a, mut b) = (self.a, self.b);
        // SAFETY: the caller's promise.
        unsafe {
            if self.add {
                s.tile_load(self.c, self.c_row);
            } else {
                s.tile_zero();
            }
            for _ in 0..self.steps {
                s.tile_step(a, self.a_row, b, self.b_row);
                (a, b) = (a.add(64), b.add(16 * self.b_row));
                between.go_on(s);
            }
            s.tile_store(self.c, self.c_row);
        }
    }
}

/// One instruction set.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// f32 in a vector.
    const LANES: usize;
    /// Rows of the micro-tile, which is two vectors wide: as many as leave registers for those two
    /// and a broadcast.
    const TILE_ROWS: usize;
    /// Whether [`dot_bf16`](Self::dot_bf16) exists.
    const BF16_DOT: bool = false;
    /// Whether [`tile_step`](Self::tile_step) and its like exist; then a panel has 32 columns.
    const TILES: bool = false;
    /// Columns of a panel: queries, or a head dimension's.
    const PANEL: usize = 2 * Self::LANES;

    /// A vector.
    type V: Copy;

    /// Runs `op`, compiled for these instructions.
    fn run<O: Op<Self>>(self, op: O);

    fn splat(self, x: f32) -> Self::V;
    /// # Safety
    /// `LANES` f32 are readable at `from`, aligned or not.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// # Safety
    /// `LANES` f32 are writable at `to`, aligned or not.
    unsafe fn store(self, to: *mut f32, v: Self::V);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    fn abs(self, a: Self::V) -> Self::V;
    /// Nearest integer, ties to even.
    fn round(self, a: Self::V) -> Self::V;
    /// `2^n` for integers n in `-127..=128`: 0 at −127, infinity at 128.
    fn power_of_two(self, n: Self::V) -> Self::V;
    /// `if a <= b { yes } else { no }`; `no` where either is NaN.
    fn select_le(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// What bf16 keeps of each, ties to even; NaN stays NaN.
    fn round_to_bf16(self, a: Self::V) -> Self::V;
    /// What f16 keeps of each, ties to even.
    fn round_to_f16(self, a: Self::V) -> Self::V;
    /// # Safety
    /// `LANES` bf16 are readable at `from`, aligned or not.
    unsafe fn load_bf16(self, from: *const u16) -> Self::V;
    /// Of `2 * LANES` bf16 those at even places, and those at odd ones: two instructions, where widening each half
    /// in order takes four.
    ///
    /// # Safety
    /// They are readable at `from`, aligned or not.
    unsafe fn load_bf16_even_odd(self, from: *const u16) -> [Self::V; 2];
    /// # Safety
    /// `LANES` f16 are readable at `from`, aligned or not.
    unsafe fn load_f16(self, from: *const u16) -> Self::V;

    /// Stores what [`round_to_bf16`](Self::round_to_bf16) leaves.
    ///
    /// # Safety
    /// `LANES` bf16 are writable at `to`, aligned or not.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, v: Self::V) {
        let mut lanes = [0.0f32; 16];
        // SAFETY: no vector has more than sixteen lanes; the caller's promise.
        unsafe {
            self.store(lanes.as_mut_ptr(), self.round_to_bf16(v));
            for (i, lane) in lanes[..Self::LANES].iter().enumerate() {
                to.add(i).write_unaligned((lane.to_bits() >> 16) as u16);
            }
        }
    }

    /// Two rows of PANEL bf16 to one of pairs, `low` in the low halves; whether all of it was finite.
    ///
    /// # Safety
    /// PANEL bf16 are readable at `low` and at `high`, PANEL f32 writable at `to`.
    #[inline(always)]
    unsafe fn interleave_bf16(self, low: *const u16, high: *const u16, to: *mut f32) -> bool {
        const EXPONENT: u32 = 0x7f80;
        let mut special = 0;
        for col in 0..Self::PANEL {
            // SAFETY: the caller's promise.
            unsafe {
                let low = u32::from(low.add(col).read_unaligned());
                let high = u32::from(high.add(col).read_unaligned());
                special |= u32::from(low & EXPONENT == EXPONENT);
                special |= u32::from(high & EXPONENT == EXPONENT);
                to.add(col).cast::<u32>().write(low | high << 16);
            }
        }
        special == 0
    }

    /// The sum of the lanes, in an order of this instruction set's own.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut lanes = [0.0f32; 16];
        // SAFETY: no vector has more than sixteen lanes.
        unsafe { self.store(lanes.as_mut_ptr(), v) };
        let mut live = Self::LANES;
        while live > 1 {
            live /= 2;
            for lane in 0..live {
                lanes[lane] += lanes[lane + live];
            }
        }
        lanes[0]
    }

    /// The [`sum`](Self::sum)s of four vectors.
    #[inline(always)]
    fn sum_of_four(self, v: [Self::V; 4]) -> [f32; 4] {
        let [a, b, c, d] = v;
        [self.sum(a), self.sum(b), self.sum(c), self.sum(d)]
    }

    /// The largest lane; none is NaN.
    #[inline(always)]
    fn largest(self, v: Self::V) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; 16];
        // SAFETY: no vector has more than sixteen lanes.
        unsafe { self.store(lanes.as_mut_ptr(), v) };
        let mut live = Self::LANES;
        while live > 1 {
            live /= 2;
            for lane in 0..live {
                lanes[lane] = if lanes[lane] > lanes[lane + live] { lanes[lane] } else { lanes[lane + live] };
            }
        }
        lanes[0]
    }

    /// Asks the second-level cache for the line at an address that will be read soon. Any address will do.
    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        let _ = at;
    }

    /// Transposes a block of LANES x LANES: `to[c * to_step + r] = from[r * from_step + c]`.
    ///
    /// # Safety
    /// The block is readable at `from` and writable at `to`.
    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
        for r in 0..Self::LANES {
            for c in 0..Self::LANES {
                // SAFETY: the caller's promise.
                unsafe { *to.add(c * to_step + r) = *from.add(r * from_step + c) };
            }
        }
    }

    /// Before the first [`tile_step`](Self::tile_step) of a thread's task.
    fn enter_tiles(self) {}

    /// After the last one.
    fn leave_tiles(self) {}

    /// Sets the accumulators, a block of 32 x 32, to 0.
    ///
    /// # Safety
    /// This thread has entered tiles; so for the three methods below.
    unsafe fn tile_zero(self) {}

    /// Loads the accumulators.
    ///
    /// # Safety
    /// 32 x 32 f32 are readable at `c`, rows `c_row` bytes apart.
    unsafe fn tile_load(self, c: *const f32, c_row: usize) {
        let _ = (c, c_row);
    }

    /// Adds the product of a step of [`TileProduct`]'s A and B.
    ///
    /// # Safety
    /// 32 rows of 64 bytes are readable at `a`, 16 of 128 at `b`, that many bytes apart.
    unsafe fn tile_step(self, a: *const u8, a_row: usize, b: *const u8, b_row: usize) {
        let _ = (a, a_row, b, b_row);
    }

    /// Stores the accumulators.
    ///
    /// # Safety
    /// As for [`tile_load`](Self::tile_load), writable.
    unsafe fn tile_store(self, c: *mut f32, c_row: usize) {
        let _ = (c, c_row);
    }

    /// [`math::exp2_coarse`], or what keeps its promises in fewer instructions.
    #[inline(always)]
    fn exp2_coarse(self, x: Self::V) -> Self::V {
        math::exp2_coarse(self, x)
    }

    /// Lane by lane two bf16, the low half of the lane's 32 bits first: `acc + a0*b0 + a1*b1`.
    fn dot_bf16(self, acc: Self::V, a: Self::V, b: Self::V) -> Self::V {
        let _ = (a, b);
        acc
    }

    /// As [`pair_bf16`](Self::pair_bf16) for numbers from 0 on, where halves may be rounded away from 0 and NaN may
    /// become anything.
    fn pair_weights(self, low: Self::V, high: Self::V) -> Self::V {
        self.pair_bf16(low, high)
    }

    /// Lane by lane (low, high) rounded to bf16 into one 32-bit pair for
    /// [`dot_bf16`](Self::dot_bf16).
    fn pair_bf16(self, low: Self::V, high: Self::V) -> Self::V {
        let _ = high;
        low
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    struct Transpose<'a> {
        from: &'a [f32],
        to: &'a mut [f32],
    }

    /// Of the test's matrices: unlike at the two ends, and no multiple of a vector.
    const FROM_STEP: usize = 19;
    const TO_STEP: usize = 23;

    impl<S: Simd> Op<S> for Transpose<'_> {
        #[inline(always)]
        fn call(self, s: S) {
            assert!(self.from.len() >= 16 * FROM_STEP && self.to.len() >= 16 * TO_STEP);
            // SAFETY: sixteen rows are there at both ends, which is the widest block.
            unsafe { s.transpose(self.from.as_ptr(), FROM_STEP, self.to.as_mut_ptr(), TO_STEP) };
        }
    }

    fn transposes<S: Simd>(s: S) {
        let from: Vec<f32> = (0..16 * FROM_STEP).map(|i| i as f32).collect();
        let mut to = vec![-1.0; 16 * TO_STEP];
        s.run(Transpose { from: &from, to: &mut to });
        for (at, &found) in to.iter().enumerate() {
            let (c, r) = (at / TO_STEP, at % TO_STEP);
            let inside = c < S::LANES && r < S::LANES;
            assert_eq!(found, if inside { from[r * FROM_STEP + c] } else { -1.0 }, "row {r}, column {c}");
        }
    }

    struct Rounded<'a> {
        low: &'a [f32; 32],
        high: &'a [f32; 32],
        single: &'a mut [u16; 32],
        pairs: &'a mut [f32; 32],
        weights: &'a mut [f32; 32],
    }

    impl<S: Simd> Op<S> for Rounded<'_> {
        #[inline(always)]
        fn call(self, s: S) {
            for at in (0..32).step_by(S::LANES) {
                // SAFETY: vectors of arrays of 32.
                unsafe {
                    let (low, high) = (s.load(self.low[at..].as_ptr()), s.load(self.high[at..].as_ptr()));
                    s.store_bf16(self.single[at..].as_mut_ptr(), low);
                    s.store(self.pairs[at..].as_mut_ptr(), s.pair_bf16(low, high));
                    let (low, high) = (s.abs(low), s.abs(high));
                    s.store(self.weights[at..].as_mut_ptr(), s.pair_weights(low, high));
                }
            }
        }
    }

    /// Numbers whose rounding differs from truncation, carries, is a tie, or overflows, and NaN.
    fn rounds_to_bf16<S: Simd>(s: S) {
        let low: [f32; 32] = std::array::from_fn(|i| match i {
            0 => f32::NAN,
            1 => f32::NEG_INFINITY,
            2 => f32::from_bits(0x7fff_ffff),
            3 => f32::MAX,
            4 => -0.0,
            5 => f32::from_bits(0x3f80_8000),
            6 => f32::from_bits(0x3f81_8000),
            7 => f32::from_bits(0xbfff_ffff),
            _ => (i as f32 - 17.3) * 1.234_567,
        });
        let high = low.map(|x| x * -3.7);
        let (mut single, mut pairs, mut weights) = ([0; 32], [0.0; 32], [0.0; 32]);
        let of =
            Rounded { low: &low, high: &high, single: &mut single, pairs: &mut pairs, weights: &mut weights };
        s.run(of);
        for i in 0..32 {
            let same = |bits: u32, x: f32| {
                let (found, wanted) = (bf16::from_bits(bits as u16), bf16::from_f32(x));
                found.to_bits() == wanted.to_bits() || found.is_nan() && wanted.is_nan()
            };
            assert!(same(single[i].into(), low[i]), "{} became {:#x}", low[i], single[i]);
            if !S::BF16_DOT {
                continue;
            }
            let pair = pairs[i].to_bits();
            assert!(same(pair, low[i]) && same(pair >> 16, high[i]), "{}, {}: {pair:#x}", low[i], high[i]);
            for (bits, x) in
                [(weights[i].to_bits(), low[i].abs()), (weights[i].to_bits() >> 16, high[i].abs())]
            {
                let found = bf16::from_bits(bits as u16).to_f32();
                if x.is_finite() && x < 1e38 {
                    assert!((found - x).abs() <= x / 256.0, "{x} became {found}");
                }
            }
        }
    }

    struct Sums<'a> {
        of: &'a [f32; 64],
        four: &'a mut [f32; 4],
        single: &'a mut [f32; 4],
        largest: &'a mut f32,
    }

    impl<S: Simd> Op<S> for Sums<'_> {
        #[inline(always)]
        fn call(self, s: S) {
            // SAFETY: four vectors of at most sixteen lanes.
            let v = [0, 1, 2, 3].map(|n| unsafe { s.load(self.of.as_ptr().add(n * S::LANES)) });
            *self.four = s.sum_of_four(v);
            *self.single = v.map(|v| s.sum(v));
            *self.largest = s.largest(v[0]);
        }
    }

    /// To the bit: a key's score must not depend on how many keys its sum was taken with.
    fn sums_of_four_are_sums<S: Simd>(s: S) {
        let of: [f32; 64] = std::array::from_fn(|i| ((i * 37 % 64) as f32 - 20.3).powi(3) * 1.234_567);
        let (mut four, mut single, mut largest) = ([0.0; 4], [0.0; 4], 0.0);
        s.run(Sums { of: &of, four: &mut four, single: &mut single, largest: &mut largest });
        assert_eq!(four.map(f32::to_bits), single.map(f32::to_bits), "{four:?}, {single:?}");
        assert_eq!(largest, of[..S::LANES].iter().copied().fold(f32::NEG_INFINITY, f32::max));
    }

    struct EvenOdd<'a> {
        from: &'a [u16; 32],
        even: &'a mut [f32; 16],
        odd: &'a mut [f32; 16],
    }

    impl<S: Simd> Op<S> for EvenOdd<'_> {
        #[inline(always)]
        fn call(self, s: S) {
            // SAFETY: two vectors of at most sixteen lanes, and room for both.
            unsafe {
                let [even, odd] = s.load_bf16_even_odd(self.from.as_ptr());
                s.store(self.even.as_mut_ptr(), even);
                s.store(self.odd.as_mut_ptr(), odd);
            }
        }
    }

    fn parts_even_from_odd<S: Simd>(s: S) {
        let from: [u16; 32] = std::array::from_fn(|i| bf16::from_f32(i as f32 * -1.5 + 7.0).to_bits());
        let (mut even, mut odd) = ([0.0; 16], [0.0; 16]);
        s.run(EvenOdd { from: &from, even: &mut even, odd: &mut odd });
        for lane in 0..S::LANES {
            let wanted = [2 * lane, 2 * lane + 1].map(|i| bf16::from_bits(from[i]).to_f32());
            assert_eq!([even[lane], odd[lane]], wanted, "lane {lane}");
        }
    }

    struct Interleaved<'a> {
        low: &'a [u16],
        high: &'a [u16],
        to: &'a mut [f32],
        finite: &'a mut bool,
    }

    impl<S: Simd> Op<S> for Interleaved<'_> {
        #[inline(always)]
        fn call(self, s: S) {
            assert!(self.low.len() >= S::PANEL && self.high.len() >= S::PANEL && self.to.len() >= S::PANEL);
            // SAFETY: a panel each.
            *self.finite =
                unsafe { s.interleave_bf16(self.low.as_ptr(), self.high.as_ptr(), self.to.as_mut_ptr()) };
        }
    }

    fn interleaves<S: Simd>(s: S) {
        let (low, mut high): (Vec<u16>, Vec<u16>) = (0..32u16).map(|i| (7 * i + 1, 1000 + 11 * i)).unzip();
        let (mut to, mut finite) = ([0.0; 32], false);
        s.run(Interleaved { low: &low, high: &high, to: &mut to, finite: &mut finite });
        for col in 0..S::PANEL {
            assert_eq!(to[col].to_bits(), u32::from(low[col]) | u32::from(high[col]) << 16, "column {col}");
        }
        assert!(finite);
        for special in [bf16::INFINITY, bf16::NAN, bf16::NEG_INFINITY] {
            high[S::PANEL - 1] = special.to_bits();
            s.run(Interleaved { low: &high, high: &low, to: &mut to, finite: &mut finite });
            assert!(!finite, "{special}");
        }
    }

    /// Runs a test for every instruction set of this processor, and says which ones it has not.
    macro_rules! for_each_set {
        ($test:ident) => {
            $test(Portable);
            $test(SoftTiles);
            #[cfg(target_arch = "x86_64")]
            {
                let absent = |name| eprintln!("absent: {name}, which this processor has not");
                Avx2::detect().map_or_else(|| absent("avx2"), $test);
                Avx512::detect().map_or_else(|| absent("avx512"), $test);
                Avx512Bf16::detect().map_or_else(|| absent("avx512bf16"), $test);
                Amx::detect().map_or_else(|| absent("amx"), $test);
            }
            #[cfg(target_arch = "aarch64")]
            Neon::detect().into_iter().for_each($test);
        };
    }

    #[test]
    fn a_number_becomes_the_nearest_bf16_alone_and_in_pairs() {
        for_each_set!(rounds_to_bf16);
    }

    #[test]
    fn sums_of_four_vectors_are_the_sums_of_each() {
        for_each_set!(sums_of_four_are_sums);
    }

    #[test]
    fn bf16_at_even_places_come_apart_from_those_at_odd_ones() {
        for_each_set!(parts_even_from_odd);
    }

    #[test]
    fn rows_are_interleaved_column_by_column_and_what_is_not_finite_is_seen() {
        for_each_set!(interleaves);
    }

    #[test]
    fn a_transposed_block_has_rows_where_columns_were_and_touches_nothing_else() {
        for_each_set!(transposes);
    }
}
