//! Every instruction set of this processor against the definitions.

use fmha_core::DType;
use half::{bf16, f16};

use super::*;
use crate::tensor::fp8_table;

struct Transpose<'a> {
    from: &'a [f32],
    to: &'a mut [f32],
    left: bool,
}

/// Row strides of the test's matrices: different at source and destination, and no multiple of a vector.
const FROM_STEP: usize = 19;
const TO_STEP: usize = 23;

impl<S: Simd> Op<S> for Transpose<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        assert!(self.from.len() >= 16 * FROM_STEP && self.to.len() >= 16 * TO_STEP);
        let (from, to) = (self.from.as_ptr(), self.to.as_mut_ptr());
        // SAFETY: sixteen rows are there at both ends, which is the widest block.
        unsafe {
            if self.left {
                s.transpose_left(from, FROM_STEP, to, TO_STEP);
            } else {
                s.transpose(from, FROM_STEP, to, TO_STEP);
            }
        }
    }
}

fn transposes<S: Simd>(s: S) {
    let from: Vec<f32> = (0..16 * FROM_STEP).map(|i| i as f32).collect();
    for (left, columns) in [(false, S::LANES), (true, S::LANES / 2)] {
        let mut to = vec![-1.0; 16 * TO_STEP];
        s.run(Transpose { from: &from, to: &mut to, left });
        for (at, &found) in to.iter().enumerate() {
            let (c, r) = (at / TO_STEP, at % TO_STEP);
            let inside = c < S::LANES && r < S::LANES;
            // Elements of the block are checked, or only those of its right half, which may be computed alone.
            if !inside || c < columns {
                let wanted = if inside { from[r * FROM_STEP + c] } else { -1.0 };
                assert_eq!(found, wanted, "row {r}, column {c}, left: {left}");
            }
        }
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

/// Checks rounding to bf16 for numbers that do not truncate, that carry, are ties or overflow, and for NaN.
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
        for (bits, x) in [(weights[i].to_bits(), low[i].abs()), (weights[i].to_bits() >> 16, high[i].abs())] {
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
    sixteen: &'a mut [[f32; 4]; 4],
    single: &'a mut [f32; 4],
    largest: &'a mut f32,
}

impl<S: Simd> Op<S> for Sums<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        // SAFETY: four vectors of at most sixteen lanes.
        let v = [0, 1, 2, 3].map(|n| unsafe { s.load(self.of.as_ptr().add(n * S::LANES)) });
        *self.four = s.sum_of_four(v);
        let [a, b, c, d] = v;
        *self.sixteen = s.sum_of_sixteen([v, [b, c, d, a], [c, d, a, b], [d, a, b, c]]);
        *self.single = v.map(|v| s.sum(v));
        *self.largest = s.largest(v[0]);
    }
}

/// Sums of several vectors have bits equal to separate sums: a key's score must not depend on how many keys are
/// summed together.
fn sums_of_several_are_sums<S: Simd>(s: S) {
    let of: [f32; 64] = std::array::from_fn(|i| ((i * 37 % 64) as f32 - 20.3).powi(3) * 1.234_567);
    let (mut four, mut sixteen, mut single, mut largest) = ([0.0; 4], [[0.0; 4]; 4], [0.0; 4], 0.0);
    s.run(Sums {
        of: &of,
        four: &mut four,
        sixteen: &mut sixteen,
        single: &mut single,
        largest: &mut largest,
    });
    assert_eq!(four.map(f32::to_bits), single.map(f32::to_bits), "{four:?}, {single:?}");
    for (n, mut sums) in sixteen.into_iter().enumerate() {
        sums.rotate_right(n);
        assert_eq!(sums.map(f32::to_bits), single.map(f32::to_bits), "{n}: {sums:?}, {single:?}");
    }
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
    is_moderate: &'a mut bool,
}

impl<S: Simd> Op<S> for Interleaved<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        assert!(self.low.len() >= S::PANEL && self.high.len() >= S::PANEL && self.to.len() >= S::PANEL);
        // SAFETY: each of the three slices has PANEL elements at least.
        *self.is_moderate =
            unsafe { s.interleave_bf16(self.low.as_ptr(), self.high.as_ptr(), self.to.as_mut_ptr()) };
    }
}

fn interleaves<S: Simd>(s: S) {
    let (low, mut high): (Vec<u16>, Vec<u16>) = (0..32u16).map(|i| (7 * i + 1, 1000 + 11 * i)).unzip();
    let (mut to, mut is_moderate) = ([0.0; 32], false);
    s.run(Interleaved { low: &low, high: &high, to: &mut to, is_moderate: &mut is_moderate });
    for col in 0..S::PANEL {
        assert_eq!(to[col].to_bits(), u32::from(low[col]) | u32::from(high[col]) << 16, "column {col}");
    }
    assert!(is_moderate);
    let large = bf16::from_bits(LARGE_BF16);
    assert_eq!(large.to_f64(), 2f64.powi(100));
    let below = bf16::from_bits(LARGE_BF16 - 1);
    for (number, moderate) in [
        (bf16::INFINITY, false),
        (bf16::NAN, false),
        (-bf16::NAN, false),
        (bf16::NEG_INFINITY, false),
        (large, false),
        (-large, false),
        (below, true),
        (-below, true),
    ] {
        high[S::PANEL - 1] = number.to_bits();
        for (low, high) in [(&low, &high), (&high, &low)] {
            s.run(Interleaved { low, high, to: &mut to, is_moderate: &mut is_moderate });
            assert_eq!(is_moderate, moderate, "{number}");
        }
    }
}

struct Paired<'a> {
    rows: &'a [[u16; 32]; 2],
    pairs: &'a mut [[u32; 16]; 2],
    packed: &'a mut [u16; 32],
}

impl<S: Simd> Op<S> for Paired<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        // SAFETY: a unit of sixteen lanes each.
        unsafe {
            let [low, high] = self.rows;
            let pairs = s.pair_rows(s.load(low.as_ptr().cast()), s.load(high.as_ptr().cast()));
            s.store(self.pairs[0].as_mut_ptr().cast(), pairs[0]);
            s.store(self.pairs[1].as_mut_ptr().cast(), pairs[1]);
            let (first, second) = (s.load_bf16(low.as_ptr()), s.load_bf16(low.as_ptr().add(S::LANES)));
            s.store(self.packed.as_mut_ptr().cast(), s.pack_bf16(first, second));
        }
    }
}

fn pairs_rows<S: Simd>(s: S) {
    if !S::BF16_DOT {
        return;
    }
    let rows =
        [0, 100].map(|base| std::array::from_fn(|i| bf16::from_f32((base + i) as f32 - 40.5).to_bits()));
    let (mut pairs, mut packed) = ([[0; 16]; 2], [0; 32]);
    s.run(Paired { rows: &rows, pairs: &mut pairs, packed: &mut packed });
    for d in 0..32 {
        let wanted = u32::from(rows[0][d]) | u32::from(rows[1][d]) << 16;
        assert_eq!(pairs[d / 4 % 2][d / 8 * 4 + d % 4], wanted, "element {d}");
    }
    assert_eq!(packed, rows[0]);
}

struct Widened<'a> {
    to_wide: &'a BytePlanes,
    from: &'a [u8],
    to: &'a mut [u16],
    count: usize,
}

impl<S: Simd> Op<S> for Widened<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        assert!(self.count <= self.from.len().min(self.to.len()));
        // SAFETY: `count` elements exist at both ends.
        unsafe { s.widen_bytes(self.to_wide, self.from.as_ptr(), self.to.as_mut_ptr(), self.count) };
    }
}

/// Checks that any number of bytes is widened, and that nothing beyond them is written.
fn widens<S: Simd>(s: S) {
    let wide = |byte: u8| u16::from(byte).wrapping_mul(40_503) ^ 0x1234;
    let to_wide = BytePlanes::new(wide);
    let from: Vec<u8> = (0..600).map(|i| (i * 7 + i / 256) as u8).collect();
    let fp8 = |byte: u8| bf16::from_f32(fp8_table(DType::E4m3Fn)[usize::from(byte)] * 0.37).to_bits();
    let of_fp8 = BytePlanes::of_codes(DType::E4m3Fn, DType::Bf16, fp8);
    let to_f16 = |byte: u8| f16::from_f32(fp8_table(DType::E5m2)[usize::from(byte)]).to_bits();
    let of_e5m2 = BytePlanes::of_codes(DType::E5m2, DType::F16, to_f16);
    assert!(of_fp8.parts.is_some() && of_e5m2.parts.is_some());
    // The test for NaN in f16, which holds for NaN in bf16 too.
    let is_nan = |number: u16| number & 0x7fff > 0x7c00;
    for count in (0..=130).chain([255, 256, 257, 600]) {
        for (to_wide, wide) in [(&to_wide, &wide as &dyn Fn(u8) -> u16), (&of_fp8, &fp8), (&of_e5m2, &to_f16)]
        {
            let mut to = vec![0xabcd; 601];
            s.run(Widened { to_wide, from: &from, to: &mut to, count });
            for (at, &found) in to.iter().enumerate() {
                let wanted = if at < count { wide(from[at]) } else { 0xabcd };
                let same = found == wanted || is_nan(found) && is_nan(wanted) && to_wide.parts.is_some();
                assert!(same, "{at} of {count}: {found:#x}, not {wanted:#x}");
            }
        }
    }
}

struct Codes<'a> {
    to_wide: &'a BytePlanes,
    rows: &'a [[u8; 64]; 2],
    wide: &'a mut [u16; 64],
    split: &'a mut [[f32; 16]; 2],
    pairs: &'a mut [[u32; 32]; 2],
}

impl<S: Simd> Op<S> for Codes<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let [low, high] = self.rows;
        let tables = s.tables(self.to_wide);
        // SAFETY: sixty-four bytes each, and room for their numbers.
        unsafe {
            let (low, high) = (s.load_codes(low.as_ptr()), s.load_codes(high.as_ptr()));
            for (n, wide) in s.widen_codes(&tables, low).into_iter().enumerate() {
                s.store(self.wide.as_mut_ptr().add(2 * S::LANES * n).cast(), wide);
            }
            let halves = s.split_bf16(s.load(self.wide.as_ptr().cast()));
            for (split, half) in self.split.iter_mut().zip(halves) {
                s.store(split.as_mut_ptr(), half);
            }
            if !S::BF16_DOT {
                return;
            }
            for (pairs, half) in self.pairs.iter_mut().zip(s.pair_codes(low, high)) {
                for (n, wide) in s.widen_codes(&tables, half).into_iter().enumerate() {
                    s.store(pairs.as_mut_ptr().add(16 * n).cast(), wide);
                }
            }
        }
    }
}

/// Checks the conversion of codes in registers: codes of one row in order, and codes of two rows paired like
/// [`Simd::pair_rows`] pairs numbers.
fn widens_codes<S: Simd>(s: S) {
    if !S::WIDENS_CODES {
        return;
    }
    let odd = |byte: u8| (u16::from(byte & 0x7f) * 257) ^ (u16::from(byte & 0x80) << 8) ^ 0x8000;
    assert!(BytePlanes::new(odd).is_odd() && !BytePlanes::new(|byte| u16::from(byte) + 1).is_odd());
    if S::widens(&BytePlanes::new(odd)) {
        widens_codes_to(s, odd, &BytePlanes::new(odd));
    }
    for dtype in [DType::E4m3Fn, DType::E5m2] {
        for descale in [1.0, 0.125, 0.37, -3.7, 1e-30, 1e30] {
            let wide = |byte| bf16::from_f32(fp8_table(dtype)[usize::from(byte)] * descale).to_bits();
            let to_wide = BytePlanes::of_codes(dtype, DType::Bf16, wide);
            assert!(to_wide.parts.is_some(), "{dtype} times {descale}");
            assert!(S::widens(&to_wide), "{dtype} times {descale}");
            widens_codes_to(s, wide, &to_wide);
        }
    }
    // With such a descale products leave bf16's normal range and round differently; infinities have no scale.
    for (dtype, descale) in [(DType::E4m3Fn, 1e-38), (DType::E4m3Fn, 1e37), (DType::E5m2, f32::INFINITY)] {
        let wide = |byte| bf16::from_f32(fp8_table(dtype)[usize::from(byte)] * descale).to_bits();
        assert!(BytePlanes::of_codes(dtype, DType::Bf16, wide).parts.is_none(), "{dtype} times {descale}");
    }
}

/// A NaN may be any.
fn widens_codes_to<S: Simd>(s: S, wide: impl Fn(u8) -> u16, to_wide: &BytePlanes) {
    let quiet = |number: u16| if number & 0x7fff > 0x7f80 { 0x7fff } else { number };
    let wide = |byte| quiet(wide(byte));
    let count = 4 * S::LANES;
    for base in 0..=255u8 {
        let rows = [0, 101].map(|row| std::array::from_fn(|d| (usize::from(base) + row + 3 * d) as u8));
        let (mut found, mut split, mut pairs) = ([0; 64], [[0.0; 16]; 2], [[0; 32]; 2]);
        let (wide_to, split_to) = (&mut found, &mut split);
        s.run(Codes { to_wide, rows: &rows, wide: wide_to, split: split_to, pairs: &mut pairs });
        assert_eq!(found.map(quiet)[..count], rows[0].map(wide)[..count], "codes from {base}");
        for (d, &number) in found[..count / 2].iter().enumerate() {
            let bits = split[d % 2][d / 2].to_bits();
            assert_eq!(bits, u32::from(number) << 16, "element {d} from {base}, split");
        }
        if !S::BF16_DOT {
            continue;
        }
        for d in 0..64 {
            let wanted = u32::from(wide(rows[0][d])) | u32::from(wide(rows[1][d])) << 16;
            let pair = pairs[d / 32][d / 4 % 2 * 16 + d % 32 / 8 * 4 + d % 4];
            let found = u32::from(quiet(pair as u16)) | u32::from(quiet((pair >> 16) as u16)) << 16;
            assert_eq!(found, wanted, "element {d} from {base}");
        }
    }
}

/// Accumulators after products of three tiles with one loaded as A, then with one loaded as B, then of a step of
/// all four.
#[cfg(target_arch = "x86_64")]
fn products_of_tiles<S: Simd>(s: S) -> Vec<u32> {
    // Numbers of both signs and magnitudes from 2^-8 to 2^8, whose sum depends on the order of additions.
    let number = |i: u32| {
        let random = i.wrapping_mul(2_654_435_761) ^ (i >> 3).wrapping_mul(40_503);
        (random >> 16 & 0x807f) as u16 | ((119 + (random >> 8 & 15) as u16) << 7)
    };
    let rows: Vec<u16> = (0..64 * 64).map(number).collect();
    let tile = |n: usize| TileRows { first: rows[n * 512..].as_ptr().cast(), step: 64 };
    let apart = TileRows { first: rows[63 * 64..].as_ptr().cast(), step: -128 };
    let mut sums = vec![0f32; 32 * 32];
    s.enter_tiles();
    // SAFETY: tiles are entered; 16 rows of 64 bytes follow each, or lie before it, and 32 of 128.
    unsafe {
        s.tile_zero();
        s.tile_left(tile(0));
        (0..4).for_each(|quarter| s.tile_right(quarter, tile(1 + quarter)));
        s.tile_top(tile(5));
        (0..4).for_each(|quarter| s.tile_down(quarter, if quarter == 2 { apart } else { tile(quarter) }));
        s.tile_step(rows.as_ptr().cast(), 64, rows[1024..].as_ptr().cast(), 128);
        s.tile_store(sums.as_mut_ptr(), 128);
    }
    s.leave_tiles();
    sums.into_iter().map(f32::to_bits).collect()
}

#[cfg(target_arch = "x86_64")]
#[test]
fn tiles_in_software_have_the_bits_of_those_in_registers() {
    let Some(amx) = Amx::detect() else { return eprintln!("absent: amx, which this processor has not") };
    let (found, wanted) = (products_of_tiles(amx), products_of_tiles(SoftTiles::PLAIN));
    assert!(wanted.iter().any(|&bits| bits & 0xffff != 0) && found == wanted);
}

/// Runs a test for every instruction set of this processor, and prints which sets it lacks.
macro_rules! for_each_set {
    ($test:ident) => {
        $test(Portable);
        $test(SoftDots);
        $test(SoftTiles::PLAIN);
        #[cfg(target_arch = "x86_64")]
        {
            let absent = |name| eprintln!("absent: {name}, which this processor has not");
            Avx2::detect().map_or_else(|| absent("avx2"), $test);
            Avx512::detect().map_or_else(|| absent("avx512"), $test);
            Avx512Vbmi::detect().map_or_else(|| absent("avx512vbmi"), $test);
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
fn sums_of_several_vectors_are_the_sums_of_each() {
    for_each_set!(sums_of_several_are_sums);
}

#[test]
fn bf16_at_even_places_come_apart_from_those_at_odd_ones() {
    for_each_set!(parts_even_from_odd);
}

#[test]
fn rows_are_interleaved_column_by_column_and_what_is_large_or_not_finite_is_seen() {
    for_each_set!(interleaves);
}

#[test]
fn a_transposed_block_has_rows_where_columns_were_and_touches_nothing_else() {
    for_each_set!(transposes);
}

#[test]
fn rows_are_paired_in_fours_and_weights_are_packed_in_order() {
    for_each_set!(pairs_rows);
}

#[test]
fn a_table_is_odd_where_zero_is_zero_and_the_highest_bit_is_the_sign() {
    let is_odd = |wide: fn(u8) -> u16| BytePlanes::new(wide).is_odd();
    let sign = |byte: u8| u16::from(byte & 0x80) << 8;
    assert!(is_odd(|byte| u16::from(byte & 0x7f) | u16::from(byte & 0x80) << 8));
    assert!(!is_odd(u16::from), "0 is 0, but there is no sign");
    let shifted = BytePlanes::new(|byte| (u16::from(byte & 0x7f) + 1) | sign(byte));
    assert!(!shifted.is_odd(), "there is a sign, but 0 is 1");
}

#[test]
fn bytes_become_the_numbers_of_their_table() {
    for_each_set!(widens);
    for_each_set!(widens_codes);
}
