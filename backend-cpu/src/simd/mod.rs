//! Vectors of f32 behind one small trait, so that every kernel is written once.
//!
//! A value of a [`Simd`] type proves that this processor has the instructions, since only `detect` makes one.
//! Kernels are [`Op`]s, and only [`Simd::run`] enters code compiled for those instructions; inside, everything is
//! `inline(always)`.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
mod codes;
mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod product;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::Amx;
pub(crate) use codes::{BytePlanes, Tables};
pub(crate) use math::{exp, tanh};
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use portable::Portable;
#[cfg(test)]
pub(crate) use portable::{SoftDots, SoftTiles};
pub(crate) use product::{Between, Nothing, TileProduct, TileRows};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512, Avx512Bf16, Avx512Vbmi, cpuid};

/// Methods that are one instruction of the set each.
macro_rules! arithmetic {
    ($($name:ident($($arg:ident),*) = $instruction:path;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: Self::V),*) -> Self::V {
            // SAFETY: the processor has it, as `self` proves.
            unsafe { $instruction($($arg),*) }
        }
    )*};
}
use arithmetic;

/// A kernel: what [`Simd::run`] compiles for one instruction set.
pub(crate) trait Op<S: Simd> {
    /// Runs the kernel. Implementations are `#[inline(always)]`.
    fn call(self, simd: S);
}

/// The number 2^100 in bf16. A sum of a million numbers below it, each times 2^8, still fits f32.
pub(crate) const LARGE_BF16: u16 = (100 + 127) << 7;

/// One instruction set.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// f32 in a vector.
    const LANES: usize;
    /// Rows of the micro-tile, which is two vectors wide: as many as fit the registers besides those two vectors
    /// and a broadcast.
    const TILE_ROWS: usize;
    /// Whether [`load_codes`](Self::load_codes), [`widen_codes`](Self::widen_codes) and
    /// [`split_bf16`](Self::split_bf16) exist.
    const WIDENS_CODES: bool = false;
    /// Whether [`dot_bf16`](Self::dot_bf16) and its companion methods exist; the methods above then exist too.
    const BF16_DOT: bool = false;
    /// Whether bf16 dot products are faster than f32 FMAs.
    const DOTS_OUTRUN_FMAS: bool = false;
    /// Whether [`tile_step`](Self::tile_step) and the other tile methods exist; a panel then has 32 columns.
    const TILES: bool = false;
    /// Width of a panel, the block in which operands are stored: so many queries, or columns of a head dimension.
    const PANEL: usize = 2 * Self::LANES;

    /// A vector.
    type V: Copy;

    /// The instruction set for kernels that use neither FP8 codes, nor bf16 pairs, nor tiles. A set that extends
    /// another by these would give the same code, so such kernels, like the whole backward, are compiled once for
    /// the four sets of AVX-512.
    type Plain: Simd;

    /// The plain instruction set, which this processor has too.
    fn plain(self) -> Self::Plain;

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
    /// `if a <= b { yes } else { no }`; `no` if one of `a` and `b` is NaN.
    fn select_le(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// Rounds to bf16, ties to even; NaN stays NaN.
    fn round_to_bf16(self, a: Self::V) -> Self::V;
    /// Rounds to f16, ties to even.
    fn round_to_f16(self, a: Self::V) -> Self::V;
    /// # Safety
    /// `LANES` bf16 are readable at `from`, aligned or not.
    unsafe fn load_bf16(self, from: *const u16) -> Self::V;
    /// Loads `2 * LANES` bf16 and converts those at even and those at odd places: two instructions. Converting each
    /// half in order takes four.
    ///
    /// # Safety
    /// They are readable at `from`, aligned or not.
    unsafe fn load_bf16_even_odd(self, from: *const u16) -> [Self::V; 2];
    /// # Safety
    /// `LANES` f16 are readable at `from`, aligned or not.
    unsafe fn load_f16(self, from: *const u16) -> Self::V;

    /// Stores numbers that [`round_to_bf16`](Self::round_to_bf16) has rounded.
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

    /// Interleaves two rows of PANEL bf16 to one row of pairs, `low` in the low halves; returns whether all numbers
    /// were below [`LARGE_BF16`] in magnitude.
    ///
    /// # Safety
    /// PANEL bf16 are readable at `low` and at `high`, PANEL f32 writable at `to`.
    #[inline(always)]
    unsafe fn interleave_bf16(self, low: *const u16, high: *const u16, to: *mut f32) -> bool {
        let mut is_moderate = true;
        for col in 0..Self::PANEL {
            // SAFETY: promised by the caller: PANEL bf16 are readable at `low` and at `high`, PANEL f32
            // writable at `to`.
            unsafe {
                let (low, high) = (low.add(col).read_unaligned(), high.add(col).read_unaligned());
                is_moderate &= low & 0x7fff < LARGE_BF16 && high & 0x7fff < LARGE_BF16;
                to.add(col).cast::<u32>().write(u32::from(low) | u32::from(high) << 16);
            }
        }
        is_moderate
    }

    /// Converts `count` bytes to numbers.
    ///
    /// # Safety
    /// They are readable at `from`, and as many u16 writable at `to`, aligned or not.
    #[inline(always)]
    unsafe fn widen_bytes(self, to_wide: &BytePlanes, from: *const u8, to: *mut u16, count: usize) {
        let vector = 4 * Self::LANES;
        let whole = if Self::WIDENS_CODES && Self::widens(to_wide) { count / vector * vector } else { 0 };
        let tables = self.tables(to_wide);
        // SAFETY: promised by the caller: they are readable at `from`, and as many u16 writable at `to`,
        // aligned or not.
        unsafe {
            for at in (0..whole).step_by(vector) {
                let [first, second] = self.widen_codes(&tables, self.load_codes(from.add(at)));
                self.store(to.add(at).cast(), first);
                self.store(to.add(at + vector / 2).cast(), second);
            }
            for at in whole..count {
                to.add(at).write_unaligned(to_wide.of(from.add(at).read()));
            }
        }
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

    /// The [`sum`](Self::sum)s of sixteen vectors.
    #[inline(always)]
    fn sum_of_sixteen(self, v: [[Self::V; 4]; 4]) -> [[f32; 4]; 4] {
        let [a, b, c, d] = v;
        [self.sum_of_four(a), self.sum_of_four(b), self.sum_of_four(c), self.sum_of_four(d)]
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

    /// Prefetches the line at an address into the L2 cache. Any address is allowed.
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
                // SAFETY: promised by the caller: the block is readable at `from` and writable at `to`.
                unsafe { *to.add(c * to_step + r) = *from.add(r * from_step + c) };
            }
        }
    }

    /// Transposes as [`transpose`](Self::transpose) does; the right half of the columns may be left out.
    ///
    /// # Safety
    /// As for [`transpose`](Self::transpose).
    #[inline(always)]
    unsafe fn transpose_left(self, from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
        // SAFETY: the caller keeps the contract of `transpose_left`.
        unsafe { self.transpose(from, from_step, to, to_step) };
    }

    /// Prepares the tile unit, before the first [`tile_step`](Self::tile_step) of a thread's task.
    fn enter_tiles(self) {}

    /// Releases the tile unit, after the last [`tile_step`](Self::tile_step) of a thread's task.
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

    /// Adds the product of A and B of one step of a [`TileProduct`].
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

    /// Loads a tile of A for [`tile_right`](Self::tile_right).
    ///
    /// # Safety
    /// As for [`tile_zero`](Self::tile_zero); 16 rows of 64 bytes are readable.
    unsafe fn tile_left(self, a: TileRows) {
        let _ = a;
    }

    /// Adds the product of the loaded tile of A and a tile of B, 16 rows of 16 pairs, to a quarter of the
    /// accumulators: upper left, upper right, lower left, lower right.
    ///
    /// # Safety
    /// As for [`tile_left`](Self::tile_left).
    unsafe fn tile_right(self, quarter: usize, b: TileRows) {
        let _ = (quarter, b);
    }

    /// Loads a tile of B, 16 rows of 16 pairs, for [`tile_down`](Self::tile_down).
    ///
    /// # Safety
    /// As for [`tile_left`](Self::tile_left).
    unsafe fn tile_top(self, b: TileRows) {
        let _ = b;
    }

    /// Adds the product of a tile of A and the loaded tile of B to a quarter of the accumulators, as in
    /// [`tile_right`](Self::tile_right).
    ///
    /// # Safety
    /// As for [`tile_left`](Self::tile_left).
    unsafe fn tile_down(self, quarter: usize, a: TileRows) {
        let _ = (quarter, a);
    }

    /// Stores the upper or the lower 16 rows of the accumulators, 128 bytes apart.
    ///
    /// # Safety
    /// As for [`tile_zero`](Self::tile_zero); 16 x 32 f32 are writable at `c`.
    unsafe fn tile_store_half(self, lower: bool, c: *mut f32) {
        let _ = (lower, c);
    }

    /// [`math::exp2_coarse`], or a shorter sequence of instructions within its error.
    #[inline(always)]
    fn exp2_coarse(self, x: Self::V) -> Self::V {
        math::exp2_coarse(self, x)
    }

    /// Adds products of pairs, lane by lane, where each lane has two bf16, the low half of its 32 bits first: `acc
    /// + a0*b0 + a1*b1`.
    fn dot_bf16(self, acc: Self::V, a: Self::V, b: Self::V) -> Self::V {
        let _ = (a, b);
        acc
    }

    /// Rounds both vectors to bf16 and packs them two to a lane: the lanes of `first`, then those of `second`.
    fn pack_bf16(self, first: Self::V, second: Self::V) -> Self::V {
        let _ = second;
        first
    }

    /// Rounds non-negative numbers to bf16: first into the low halves of lanes whose high halves are 0, then into
    /// the high halves. Ties may be rounded away from 0, and NaN may become anything. Exists together with tiles.
    fn low_and_high_bf16(self, v: Self::V) -> [Self::V; 2] {
        [v, v]
    }

    /// Interleaves two rows of `2 * LANES` bf16 to pairs for [`dot_bf16`](Self::dot_bf16), `low` in the low halves:
    /// the even groups of four elements, then the odd ones.
    fn pair_rows(self, low: Self::V, high: Self::V) -> [Self::V; 2] {
        [low, high]
    }

    /// Loads `4 * LANES` bytes for [`widen_codes`](Self::widen_codes), in the order that it requires.
    ///
    /// # Safety
    /// They are readable at `from`, aligned or not.
    unsafe fn load_codes(self, from: *const u8) -> Self::V {
        // SAFETY: promised by the caller: they are readable at `from`, aligned or not.
        unsafe { self.load(from.cast()) }
    }

    /// Whether [`widen_codes`](Self::widen_codes) is right for these tables.
    fn widens(planes: &BytePlanes) -> bool {
        planes.is_odd()
    }

    /// Tables of [`widen_codes`](Self::widen_codes).
    #[inline(always)]
    fn tables(self, planes: &BytePlanes) -> Tables<Self::V> {
        let mut tables = [self.splat(0.0); 9];
        if Self::WIDENS_CODES {
            tables[..4].copy_from_slice(&planes.lower(self));
        }
        tables
    }

    /// The 16-bit numbers of loaded bytes, in the bytes' order.
    fn widen_codes(self, tables: &Tables<Self::V>, codes: Self::V) -> [Self::V; 2] {
        let _ = tables;
        [codes, codes]
    }

    /// Splits `2 * LANES` bf16 into those at even places and those at odd places.
    fn split_bf16(self, both: Self::V) -> [Self::V; 2] {
        [both, both]
    }

    /// Interleaves two rows of loaded bytes. Converting a half of the result gives what
    /// [`pair_rows`](Self::pair_rows) makes of half of the rows' numbers, an operand of
    /// [`dot_bf16`](Self::dot_bf16).
    fn pair_codes(self, low: Self::V, high: Self::V) -> [Self::V; 2] {
        [low, high]
    }

    /// Pairs numbers as [`pair_bf16`](Self::pair_bf16) does, for numbers from 0 on. Halves may be rounded
    /// away from 0, and NaN may become anything.
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
