//! Vectors for any processor: arrays of four numbers that the compiler may vectorise.

use half::{bf16, f16};

use super::{Op, Simd};
#[cfg(test)]
use super::{Tables, TileRows};

/// No instruction beyond the target's baseline.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

macro_rules! lanes {
    ($i:ident => $value:expr) => {
        std::array::from_fn(
            #[inline(always)]
            |$i| $value,
        )
    };
}

/// `a * b + c`: without the instruction, `mul_add` is a library call.
#[inline(always)]
fn with_two_roundings<S>(_: S, a: f32, b: f32, c: f32) -> f32 {
    a * b + c
}

macro_rules! array_methods {
    ($n:literal, $multiply_add:path) => {
        const LANES: usize = $n;
        type V = [f32; $n];
        type Plain = Self;

        #[inline(always)]
        fn plain(self) -> Self {
            self
        }

        #[inline(always)]
        fn run<O: Op<Self>>(self, op: O) {
            // A separate function, as in other sets, so that a kernel that is run from several places is compiled
            // once.
            #[inline(never)]
            fn compiled<S: Simd, O: Op<S>>(simd: S, op: O) {
                op.call(simd);
            }
            compiled(self, op);
        }

        #[inline(always)]
        fn splat(self, x: f32) -> Self::V {
            [x; $n]
        }

        #[inline(always)]
        unsafe fn load(self, from: *const f32) -> Self::V {
            // SAFETY: the caller promised $n f32; an array of f32 has f32's alignment.
            unsafe { from.cast::<[f32; $n]>().read_unaligned() }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32, v: Self::V) {
            // SAFETY: the caller promised $n f32.
            unsafe { to.cast::<[f32; $n]>().write_unaligned(v) }
        }

        #[inline(always)]
        fn add(self, a: Self::V, b: Self::V) -> Self::V {
            lanes!(i => a[i] + b[i])
        }

        #[inline(always)]
        fn sub(self, a: Self::V, b: Self::V) -> Self::V {
            lanes!(i => a[i] - b[i])
        }

        #[inline(always)]
        fn mul(self, a: Self::V, b: Self::V) -> Self::V {
            lanes!(i => a[i] * b[i])
        }

        #[inline(always)]
        fn div(self, a: Self::V, b: Self::V) -> Self::V {
            lanes!(i => a[i] / b[i])
        }

        #[inline(always)]
        fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            lanes!(i => $multiply_add(self, a[i], b[i], c[i]))
        }

        #[inline(always)]
        fn max(self, a: Self::V, b: Self::V) -> Self::V {
            lanes!(i => if a[i] > b[i] { a[i] } else { b[i] })
        }

        #[inline(always)]
        fn min(self, a: Self::V, b: Self::V) -> Self::V {
            lanes!(i => if a[i] < b[i] { a[i] } else { b[i] })
        }

        #[inline(always)]
        fn abs(self, a: Self::V) -> Self::V {
            lanes!(i => a[i].abs())
        }

        #[inline(always)]
        fn round(self, a: Self::V) -> Self::V {
            // Adding and taking away 1.5 * 2^23 leaves the nearest integer for |a| < 2^22.
            const MAGIC: f32 = 12_582_912.0;
            lanes!(i => (a[i] + MAGIC) - MAGIC)
        }

        #[inline(always)]
        fn power_of_two(self, n: Self::V) -> Self::V {
            lanes!(i => f32::from_bits(((n[i] as i32 + 127) << 23).cast_unsigned()))
        }

        #[inline(always)]
        fn select_le(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
            lanes!(i => if a[i] <= b[i] { yes[i] } else { no[i] })
        }

        #[inline(always)]
        fn round_to_bf16(self, a: Self::V) -> Self::V {
            lanes!(i => bf16::from_f32(a[i]).to_f32())
        }

        #[inline(always)]
        fn round_to_f16(self, a: Self::V) -> Self::V {
            lanes!(i => f16::from_f32(a[i]).to_f32())
        }

        #[inline(always)]
        unsafe fn load_bf16(self, from: *const u16) -> Self::V {
            // SAFETY: the caller promised $n bf16.
            let bits = unsafe { from.cast::<[u16; $n]>().read_unaligned() };
            lanes!(i => f32::from_bits(u32::from(bits[i]) << 16))
        }

        #[inline(always)]
        unsafe fn load_bf16_even_odd(self, from: *const u16) -> [Self::V; 2] {
            // SAFETY: the caller promised twice $n bf16.
            let pairs = unsafe { from.cast::<[[u16; 2]; $n]>().read_unaligned() };
            let wide = |bits: u16| f32::from_bits(u32::from(bits) << 16);
            [lanes!(i => wide(pairs[i][0])), lanes!(i => wide(pairs[i][1]))]
        }

        #[inline(always)]
        unsafe fn load_f16(self, from: *const u16) -> Self::V {
            // SAFETY: the caller promised $n f16.
            let bits = unsafe { from.cast::<[u16; $n]>().read_unaligned() };
            lanes!(i => f16::from_bits(bits[i]).to_f32())
        }
    };
}

impl Simd for Portable {
    const TILE_ROWS: usize = 6;
    array_methods!(4, with_two_roundings);
}

/// Methods that [`Simd::BF16_DOT`] and [`Simd::WIDENS_CODES`] promise, with sixteen lanes.
#[cfg(test)]
macro_rules! bf16_methods {
    () => {
        fn dot_bf16(self, acc: Self::V, a: Self::V, b: Self::V) -> Self::V {
            let half = |pair: f32| [pair.to_bits() << 16, pair.to_bits() & 0xffff_0000].map(f32::from_bits);
            lanes!(i => acc[i] + half(a[i])[0] * half(b[i])[0] + half(a[i])[1] * half(b[i])[1])
        }

        fn pair_bf16(self, low: Self::V, high: Self::V) -> Self::V {
            let bits = |x: f32| u32::from(bf16::from_f32(x).to_bits());
            lanes!(i => f32::from_bits(bits(low[i]) | bits(high[i]) << 16))
        }

        fn pack_bf16(self, first: Self::V, second: Self::V) -> Self::V {
            let both: [f32; 32] = std::array::from_fn(|i| if i < 16 { first[i] } else { second[i - 16] });
            let bits = |x: f32| u32::from(bf16::from_f32(x).to_bits());
            lanes!(i => f32::from_bits(bits(both[2 * i]) | bits(both[2 * i + 1]) << 16))
        }

        fn pair_rows(self, low: Self::V, high: Self::V) -> [Self::V; 2] {
            let half = |of: &Self::V, d: usize| of[d / 2].to_bits() >> (d % 2 * 16) & 0xffff;
            let pair = |d: usize| f32::from_bits(half(&low, d) | half(&high, d) << 16);
            [lanes!(i => pair(i / 4 * 8 + i % 4)), lanes!(i => pair(i / 4 * 8 + 4 + i % 4))]
        }

        fn widen_codes(self, tables: &Tables<Self::V>, codes: Self::V) -> [Self::V; 2] {
            let byte = |of: &[f32], at: usize| of[at / 4].to_bits().to_le_bytes()[at % 4];
            let lower: &[f32] = tables.as_flattened();
            let wide = |d: usize| {
                let code = usize::from(byte(&codes, d));
                let number = [byte(lower, code % 128), byte(lower, 128 + code % 128)];
                u32::from(u16::from_le_bytes(number) ^ (code as u16 & 0x80) << 8)
            };
            let pair = |d: usize| f32::from_bits(wide(d) | wide(d + 1) << 16);
            [lanes!(i => pair(2 * i)), lanes!(i => pair(32 + 2 * i))]
        }

        fn split_bf16(self, both: Self::V) -> [Self::V; 2] {
            let bits = both.map(f32::to_bits);
            [lanes!(i => f32::from_bits(bits[i] << 16)), lanes!(i => f32::from_bits(bits[i] & 0xffff_0000))]
        }

        fn pair_codes(self, low: Self::V, high: Self::V) -> [Self::V; 2] {
            let byte = |of: &Self::V, at: usize| of[at / 4].to_bits().to_le_bytes()[at % 4];
            // Byte `at` of a half: even groups of four elements come before odd ones.
            let paired = |half: usize, at: usize| {
                let d = 32 * half + at / 2 % 16 / 4 * 8 + at / 32 * 4 + at / 2 % 4;
                byte(if at.is_multiple_of(2) { &low } else { &high }, d)
            };
            let four = |half, i| f32::from_le_bytes(std::array::from_fn(|n| paired(half, 4 * i + n)));
            [lanes!(i => four(0, i)), lanes!(i => four(1, i))]
        }
    };
}

/// Dot products of bf16 pairs in software, for tests of the code around them.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SoftDots;

#[cfg(test)]
impl Simd for SoftDots {
    const TILE_ROWS: usize = 12;
    const WIDENS_CODES: bool = true;
    const BF16_DOT: bool = true;
    const DOTS_OUTRUN_FMAS: bool = true;
    array_methods!(16, with_two_roundings);
    bf16_methods!();
}

/// Matrix tiles of bf16 in software, with sixteen lanes as in AVX-512, to test the code around tiles on processors
/// without them.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SoftTiles {
    fused: bool,
}

#[cfg(test)]
impl SoftTiles {
    /// Soft tiles whose multiply-adds round twice, like those of `Portable`.
    pub(crate) const PLAIN: Self = Self { fused: false };
    /// Soft tiles whose multiply-adds round once, as on every processor with matrix tiles.
    pub(crate) const FUSED: Self = Self { fused: true };

    /// Adds the product of a tile of A and a tile of B to a quarter of the accumulators, in the order of
    /// Intel's manual: the first and the second elements of the pairs have separate sums, which are added at
    /// the end.
    fn add_product(self, quarter: usize, a: &[[u32; 16]; 16], b: &[[u32; 16]; 16]) {
        let half = |pair: u32| [pair << 16, pair & 0xffff_0000].map(f32::from_bits);
        let (first_row, first_col) = (quarter / 2 * 16, quarter % 2 * 16);
        let mut sums = ACCUMULATORS.get();
        for (a, sums) in a.iter().zip(&mut sums[first_row..]) {
            for (col, sum) in sums[first_col..first_col + 16].iter_mut().enumerate() {
                let mut of_pair = [0.0f32; 2];
                for (&a, b) in a.iter().zip(b) {
                    let (a, b) = (half(a), half(b[col]));
                    of_pair = [a[0] * b[0] + of_pair[0], a[1] * b[1] + of_pair[1]];
                }
                *sum += of_pair[0] + of_pair[1];
            }
        }
        ACCUMULATORS.set(sums);
    }

    #[inline(always)]
    fn multiply_add(self, a: f32, b: f32, c: f32) -> f32 {
        if self.fused { a.mul_add(b, c) } else { with_two_roundings(self, a, b, c) }
    }
}

#[cfg(test)]
thread_local! {
    /// Accumulators of [`SoftTiles`].
    static ACCUMULATORS: std::cell::Cell<[[f32; 32]; 32]> = const { std::cell::Cell::new([[0.0; 32]; 32]) };
    /// The tile of A or B that stays loaded between products.
    static LOADED: std::cell::Cell<[[u32; 16]; 16]> = const { std::cell::Cell::new([[0; 16]; 16]) };
}

/// A tile, in a register.
///
/// # Safety
/// 16 rows of 64 bytes are readable.
#[cfg(test)]
unsafe fn tile_of(rows: TileRows) -> [[u32; 16]; 16] {
    std::array::from_fn(|row| {
        // SAFETY: promised by the caller: 16 rows of 64 bytes are readable.
        unsafe { rows.first.wrapping_offset(row as isize * rows.step).cast::<[u32; 16]>().read_unaligned() }
    })
}

#[cfg(test)]
impl Simd for SoftTiles {
    const TILE_ROWS: usize = 12;
    const WIDENS_CODES: bool = true;
    const BF16_DOT: bool = true;
    const TILES: bool = true;
    array_methods!(16, SoftTiles::multiply_add);

    bf16_methods!();

    unsafe fn tile_zero(self) {
        ACCUMULATORS.set([[0.0; 32]; 32]);
    }

    unsafe fn tile_load(self, c: *const f32, c_row: usize) {
        // SAFETY: the caller promised the extents.
        ACCUMULATORS
            .set(std::array::from_fn(|row| unsafe { c.byte_add(row * c_row).cast::<[f32; 32]>().read() }));
    }

    unsafe fn tile_step(self, a: *const u8, a_row: usize, b: *const u8, b_row: usize) {
        let [a_step, b_step] = [a_row, b_row].map(usize::cast_signed);
        for quarter in 0..4 {
            let a = TileRows { first: a.wrapping_add(quarter / 2 * 16 * a_row), step: a_step };
            let b = TileRows { first: b.wrapping_add(quarter % 2 * 64), step: b_step };
            // SAFETY: the caller keeps the contract of `tile_step`.
            unsafe { self.add_product(quarter, &tile_of(a), &tile_of(b)) };
        }
    }

    unsafe fn tile_store(self, c: *mut f32, c_row: usize) {
        for (row, sums) in ACCUMULATORS.get().iter().enumerate() {
            // SAFETY: the caller keeps the contract of `tile_store`.
            unsafe { c.byte_add(row * c_row).cast::<[f32; 32]>().write(*sums) };
        }
    }

    unsafe fn tile_left(self, a: TileRows) {
        // SAFETY: the caller keeps the contract of `tile_left`.
        LOADED.set(unsafe { tile_of(a) });
    }

    unsafe fn tile_right(self, quarter: usize, b: TileRows) {
        // SAFETY: the caller keeps the contract of `tile_right`.
        self.add_product(quarter, &LOADED.get(), &unsafe { tile_of(b) });
    }

    unsafe fn tile_top(self, b: TileRows) {
        // SAFETY: the caller keeps the contract of `tile_top`.
        LOADED.set(unsafe { tile_of(b) });
    }

    unsafe fn tile_down(self, quarter: usize, a: TileRows) {
        // SAFETY: the caller keeps the contract of `tile_down`.
        self.add_product(quarter, &unsafe { tile_of(a) }, &LOADED.get());
    }

    unsafe fn tile_store_half(self, lower: bool, c: *mut f32) {
        for (row, sums) in ACCUMULATORS.get()[if lower { 16 } else { 0 }..][..16].iter().enumerate() {
            // SAFETY: the caller keeps the contract of `tile_store_half`.
            unsafe { c.add(32 * row).cast::<[f32; 32]>().write(*sums) };
        }
    }

    fn low_and_high_bf16(self, v: Self::V) -> [Self::V; 2] {
        let bits = v.map(|lane| lane.to_bits().wrapping_add(0x8000));
        [lanes!(i => f32::from_bits(bits[i] >> 16)), lanes!(i => f32::from_bits(bits[i] & 0xffff_0000))]
    }
}
