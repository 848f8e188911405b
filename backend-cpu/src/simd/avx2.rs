//! AVX2 with FMA and F16C.

use std::arch::x86_64::*;

use super::codes::CodeParts;
use super::{Avx2, BytePlanes, Op, Simd, Tables, arithmetic};

impl Simd for Avx2 {
    const LANES: usize = 8;
    const TILE_ROWS: usize = 6;
    const WIDENS_CODES: bool = true;
    type V = __m256;
    type Plain = Self;

    #[inline(always)]
    fn plain(self) -> Self {
        self
    }

    #[inline(always)]
    fn run<O: Op<Self>>(self, op: O) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<O: Op<Avx2>>(simd: Avx2, op: O) {
            op.call(simd);
        }
        // SAFETY: `self` exists because `detect` saw these features.
        unsafe { compiled(self, op) }
    }

    #[inline(always)]
    fn sum_of_four(self, v: [Self::V; 4]) -> [f32; 4] {
        let mut sums = [0.0; 4];
        // SAFETY: AVX, as `self` proves; four f32 are written.
        unsafe {
            // Adds halves of a pair of vectors, then within halves, in the order of `sum`.
            let [a, b, c, d] = v;
            let ab =
                _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
            let cd =
                _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(c, d), _mm256_permute2f128_ps::<0x31>(c, d));
            // A, A, C, C and B, B, D, D.
            let pairs = _mm256_add_ps(_mm256_shuffle_ps::<0x44>(ab, cd), _mm256_shuffle_ps::<0xee>(ab, cd));
            let four = _mm256_add_ps(pairs, _mm256_shuffle_ps::<0xb1>(pairs, pairs));
            let (ac, bd) = (_mm256_castps256_ps128(four), _mm256_extractf128_ps::<1>(four));
            let sum = _mm_movelh_ps(_mm_unpacklo_ps(ac, bd), _mm_unpackhi_ps(ac, bd));
            _mm_storeu_ps(sums.as_mut_ptr(), sum);
        }
        sums
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch faults nowhere.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        // SAFETY: AVX, as `self` proves.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::V {
        // SAFETY: the caller promised eight f32.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: Self::V) {
        // SAFETY: the caller promised eight f32.
        unsafe { _mm256_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
        // SAFETY: the caller promised eight rows of eight f32 at both ends.
        unsafe {
            // An array instead of `array::from_fn`, whose closure would be compiled without these instructions.
            let mut r = [_mm256_setzero_ps(); 8];
            for (i, r) in r.iter_mut().enumerate() {
                *r = _mm256_loadu_ps(from.add(i * from_step));
            }
            // Interleaves pairs of rows, then fours, within 128-bit halves; then exchanges the halves.
            let (a0, a1) = (_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpackhi_ps(r[0], r[1]));
            let (a2, a3) = (_mm256_unpacklo_ps(r[2], r[3]), _mm256_unpackhi_ps(r[2], r[3]));
            let (a4, a5) = (_mm256_unpacklo_ps(r[4], r[5]), _mm256_unpackhi_ps(r[4], r[5]));
            let (a6, a7) = (_mm256_unpacklo_ps(r[6], r[7]), _mm256_unpackhi_ps(r[6], r[7]));
            let low = [
                _mm256_shuffle_ps::<0x44>(a0, a2),
                _mm256_shuffle_ps::<0xee>(a0, a2),
                _mm256_shuffle_ps::<0x44>(a1, a3),
                _mm256_shuffle_ps::<0xee>(a1, a3),
            ];
            let high = [
                _mm256_shuffle_ps::<0x44>(a4, a6),
                _mm256_shuffle_ps::<0xee>(a4, a6),
                _mm256_shuffle_ps::<0x44>(a5, a7),
                _mm256_shuffle_ps::<0xee>(a5, a7),
            ];
            for c in 0..4 {
                _mm256_storeu_ps(to.add(c * to_step), _mm256_permute2f128_ps::<0x20>(low[c], high[c]));
                let second = _mm256_permute2f128_ps::<0x31>(low[c], high[c]);
                _mm256_storeu_ps(to.add((c + 4) * to_step), second);
            }
        }
    }

    arithmetic! {
        add(a, b) = _mm256_add_ps;
        sub(a, b) = _mm256_sub_ps;
        mul(a, b) = _mm256_mul_ps;
        div(a, b) = _mm256_div_ps;
        fma(a, b, c) = _mm256_fmadd_ps;
        max(a, b) = _mm256_max_ps;
        min(a, b) = _mm256_min_ps;
    }

    #[inline(always)]
    fn abs(self, a: Self::V) -> Self::V {
        // SAFETY: AVX2 and FMA, as `self` proves.
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) }
    }

    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        // SAFETY: AVX2 and FMA, as `self` proves.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn power_of_two(self, n: Self::V) -> Self::V {
        // SAFETY: AVX2 and FMA, as `self` proves.
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        }
    }

    #[inline(always)]
    fn select_le(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        // SAFETY: AVX2 and FMA, as `self` proves.
        unsafe { _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LE_OQ>(a, b)) }
    }

    #[inline(always)]
    fn round_to_bf16(self, a: Self::V) -> Self::V {
        // SAFETY: AVX2 and FMA, as `self` proves.
        unsafe {
            let bits = _mm256_castps_si256(a);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let carried = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let kept = _mm256_and_si256(carried, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
            // A NaN's bits could carry into the sign: leave NaN alone.
            let is_nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a);
            _mm256_blendv_ps(_mm256_castsi256_ps(kept), a, is_nan)
        }
    }

    #[inline(always)]
    fn round_to_f16(self, a: Self::V) -> Self::V {
        // SAFETY: AVX2 and FMA, as `self` proves.
        unsafe { _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a)) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::V {
        // SAFETY: the caller promised eight bf16.
        unsafe {
            let narrow = _mm_loadu_si128(from.cast());
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(narrow)))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_even_odd(self, from: *const u16) -> [Self::V; 2] {
        // SAFETY: the caller promised sixteen bf16.
        unsafe {
            let both = _mm256_loadu_si256(from.cast());
            let odd = _mm256_and_si256(both, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(both)), _mm256_castsi256_ps(odd)]
        }
    }

    #[inline(always)]
    unsafe fn load_codes(self, from: *const u8) -> Self::V {
        // SAFETY: AVX2, as `self` proves; the caller promised thirty-two bytes.
        unsafe {
            let codes = _mm256_loadu_si256(from.cast());
            _mm256_castsi256_ps(_mm256_permute4x64_epi64::<0b11_01_10_00>(codes))
        }
    }

    fn widens(planes: &BytePlanes) -> bool {
        planes.parts.is_some()
    }

    #[inline(always)]
    fn tables(self, planes: &BytePlanes) -> Tables<Self::V> {
        let mut tables = [self.splat(0.0); 9];
        // SAFETY: AVX2, as `self` proves.
        unsafe {
            for (table, of_parts) in tables.iter_mut().zip(tables_of_parts(planes)) {
                *table = _mm256_castsi256_ps(of_parts);
            }
        }
        tables
    }

    #[inline(always)]
    fn widen_codes(self, tables: &Tables<Self::V>, codes: Self::V) -> [Self::V; 2] {
        // SAFETY: AVX2, as `self` proves.
        unsafe {
            let mut of_parts = [_mm256_setzero_si256(); 9];
            for (of_parts, &table) in of_parts.iter_mut().zip(tables) {
                *of_parts = _mm256_castps_si256(table);
            }
            let [first, second] = widen_by_parts(&of_parts, _mm256_castps_si256(codes));
            [_mm256_castsi256_ps(first), _mm256_castsi256_ps(second)]
        }
    }

    #[inline(always)]
    fn split_bf16(self, both: Self::V) -> [Self::V; 2] {
        // SAFETY: AVX2, as `self` proves.
        unsafe {
            let both = _mm256_castps_si256(both);
            let odd = _mm256_and_si256(both, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(both)), _mm256_castsi256_ps(odd)]
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Self::V {
        // SAFETY: the caller promised eight f16.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
}

/// Tables of [`widen_by_parts`].
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn tables_of_parts(planes: &BytePlanes) -> Tables<__m256i> {
    // SAFETY: promised by the caller: the processor has AVX2.
    unsafe {
        let mut tables = [_mm256_setzero_si256(); 9];
        if let Some(parts) = planes.parts {
            let CodeParts { numbers, mantissa, exponent, places, special, to_subnormal, to_special, or } =
                parts;
            for (table, bytes) in tables.iter_mut().zip(&numbers) {
                *table = _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast()));
            }
            let bytes = [mantissa, exponent, special, to_subnormal, to_special, or];
            for (table, byte) in tables[2..8].iter_mut().zip(bytes) {
                *table = _mm256_set1_epi8(byte.cast_signed());
            }
            tables[8] = _mm256_set1_epi16(places.cast_signed());
        }
        tables
    }
}

/// Converts thirty-two codes, whose groups of eight are in the order 0, 2, 1, 3, as [`CodeParts::of`] defines it.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn widen_by_parts(tables: &Tables<__m256i>, codes: __m256i) -> [__m256i; 2] {
    let &[low, high, mantissa, exponents, special, to_subnormal, to_special, or, places] = tables;
    // SAFETY: promised by the caller: the processor has AVX2.
    unsafe {
        let zero = _mm256_setzero_si256();
        let exponent = _mm256_and_si256(codes, exponents);
        let is_subnormal = _mm256_cmpeq_epi8(exponent, zero);
        let is_special = _mm256_cmpeq_epi8(_mm256_and_si256(codes, special), special);
        let exponent = _mm256_andnot_si256(is_special, exponent);
        let to_place = _mm256_or_si256(
            _mm256_and_si256(is_subnormal, to_subnormal),
            _mm256_and_si256(is_special, to_special),
        );
        let at = _mm256_or_si256(_mm256_and_si256(codes, mantissa), to_place);
        let or = _mm256_and_si256(is_special, or);
        let low = _mm256_or_si256(_mm256_shuffle_epi8(low, at), or);
        let sign = _mm256_and_si256(codes, _mm256_set1_epi8(i8::MIN));
        let high = _mm256_xor_si256(_mm256_or_si256(_mm256_shuffle_epi8(high, at), or), sign);
        let first = _mm256_mullo_epi16(_mm256_unpacklo_epi8(exponent, zero), places);
        let second = _mm256_mullo_epi16(_mm256_unpackhi_epi8(exponent, zero), places);
        [
            _mm256_add_epi16(_mm256_unpacklo_epi8(low, high), first),
            _mm256_add_epi16(_mm256_unpackhi_epi8(low, high), second),
        ]
    }
}
