//! x86-64: AVX2 with FMA and F16C, AVX-512 F, VBMI, and BF16.

use std::arch::x86_64::*;

use super::{BytePlanes, LARGE_BF16, Op, Simd, Tables};

/// Result of CPUID for a leaf and a part of it.
pub(crate) fn cpuid(leaf: u32, part: u32) -> CpuidResult {
    // SAFETY: every x86-64 processor has the instruction. Rust calls it unsafe up to 1.93.
    #[allow(unused_unsafe)]
    unsafe {
        __cpuid_count(leaf, part)
    }
}

/// AVX2, FMA, F16C: eight lanes, sixteen registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

/// AVX-512 F on top of [`Avx2`]: sixteen lanes, thirty-two registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(pub(super) ());

/// [`Avx512`] with the permutations of bytes of AVX-512 VBMI.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512Vbmi(());

/// [`Avx512Vbmi`] with the bf16 dot products of AVX-512 BF16: every processor with BF16 also has VBMI, except
/// Cooper Lake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512Bf16(());

impl Avx2 {
    /// Whether this processor has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        all.then_some(Self(()))
    }
}

impl Avx512 {
    /// Whether this processor has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        let all = Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vl");
        all.then_some(Self(()))
    }
}

impl Avx512Vbmi {
    /// Whether this processor has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        let all = Avx512::detect().is_some()
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vbmi");
        all.then_some(Self(()))
    }
}

impl Avx512Bf16 {
    /// Whether this processor has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        let all = Avx512Vbmi::detect().is_some() && is_x86_feature_detected!("avx512bf16");
        all.then_some(Self(()))
    }
}

/// Transposes the four-by-four block in each quarter of four rows. Vector `c` of the result has columns
/// c, c + 4, c + 8 and c + 12.
///
/// # Safety
/// AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn turn_fours(r: [__m512; 4]) -> [__m512; 4] {
    let (a, b) = (_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1]));
    let (c, d) = (_mm512_unpacklo_ps(r[2], r[3]), _mm512_unpackhi_ps(r[2], r[3]));
    [
        _mm512_shuffle_ps::<0x44>(a, c),
        _mm512_shuffle_ps::<0xee>(a, c),
        _mm512_shuffle_ps::<0x44>(b, d),
        _mm512_shuffle_ps::<0xee>(b, d),
    ]
}

/// The methods that all instruction sets with AVX-512 share.
macro_rules! avx512_methods {
    ($name:ident, $features:literal) => {
        const LANES: usize = 16;
        const TILE_ROWS: usize = 12;
        type V = __m512;
        type Plain = Avx512;

        #[inline(always)]
        fn plain(self) -> Avx512 {
            Avx512(())
        }

        #[inline(always)]
        fn run<O: Op<Self>>(self, op: O) {
            #[target_feature(enable = $features)]
            fn compiled<O: Op<$name>>(simd: $name, op: O) {
                op.call(simd);
            }
            // SAFETY: `self` exists because `detect` saw these features.
            unsafe { compiled(self, op) }
        }

        #[inline(always)]
        fn sum(self, v: Self::V) -> f32 {
            // SAFETY: AVX-512 F, as `self` proves.
            unsafe { _mm512_reduce_add_ps(v) }
        }

        #[inline(always)]
        fn sum_of_four(self, v: [Self::V; 4]) -> [f32; 4] {
            let mut sums = [0.0; 4];
            // SAFETY: AVX-512 F, as `self` proves; four f32 are written.
            unsafe {
                // Adds halves of a pair of vectors, then quarters, then within quarters, in the order of `sum`.
                let [a, b, c, d] = v;
                let ab =
                    _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
                let cd =
                    _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
                let quarters =
                    _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
                let pairs = _mm512_add_ps(quarters, _mm512_shuffle_ps::<0x4e>(quarters, quarters));
                let four = _mm512_add_ps(pairs, _mm512_shuffle_ps::<0xb1>(pairs, pairs));
                let firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
                let four = _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, four));
                _mm_storeu_ps(sums.as_mut_ptr(), four);
            }
            sums
        }

        #[inline(always)]
        fn sum_of_sixteen(self, v: [[Self::V; 4]; 4]) -> [[f32; 4]; 4] {
            let mut sums = [[0.0; 4]; 4];
            // SAFETY: AVX-512 F, as `self` proves; sixteen f32 are written.
            unsafe {
                // Adds the vectors at one place of all four, as in `sum_of_four`; then pairs and single lanes of
                // all.
                let mut quarters = [_mm512_setzero_ps(); 4];
                for (n, quarters) in quarters.iter_mut().enumerate() {
                    let [a, b, c, d] = [v[0][n], v[1][n], v[2][n], v[3][n]];
                    let ab =
                        _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
                    let cd =
                        _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
                    *quarters = _mm512_add_ps(
                        _mm512_shuffle_f32x4::<0x88>(ab, cd),
                        _mm512_shuffle_f32x4::<0xdd>(ab, cd),
                    );
                }
                let [a, b, c, d] = quarters;
                let ab = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xee>(a, b));
                let cd = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(c, d), _mm512_shuffle_ps::<0xee>(c, d));
                let all = _mm512_add_ps(_mm512_shuffle_ps::<0x88>(ab, cd), _mm512_shuffle_ps::<0xdd>(ab, cd));
                _mm512_storeu_ps(sums.as_mut_ptr().cast(), all);
            }
            sums
        }

        #[inline(always)]
        fn largest(self, v: Self::V) -> f32 {
            // SAFETY: AVX-512 F, as `self` proves.
            unsafe { _mm512_reduce_max_ps(v) }
        }

        #[inline(always)]
        fn prefetch(self, at: *const u8) {
            // SAFETY: a prefetch faults nowhere.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        }

        #[inline(always)]
        fn splat(self, x: f32) -> Self::V {
            // SAFETY: AVX-512 F, as `self` proves.
            unsafe { _mm512_set1_ps(x) }
        }

        #[inline(always)]
        unsafe fn load(self, from: *const f32) -> Self::V {
            // SAFETY: the caller promised sixteen f32.
            unsafe { _mm512_loadu_ps(from) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32, v: Self::V) {
            // SAFETY: the caller promised sixteen f32.
            unsafe { _mm512_storeu_ps(to, v) }
        }

        #[inline(always)]
        unsafe fn transpose(self, from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
            // SAFETY: the caller promised sixteen rows of sixteen f32 at both ends.
            unsafe {
                // Fours of rows: `fours[q][c]` holds columns c, c + 4, c + 8, c + 12 of rows 4 q .. 4 q + 4.
                // `array::from_fn` is avoided: its closure is compiled without these instructions (measured: 300 ns
                // per block, ten times as long).
                let mut fours = [[_mm512_setzero_ps(); 4]; 4];
                for (q, four) in fours.iter_mut().enumerate() {
                    let mut r = [_mm512_setzero_ps(); 4];
                    for (i, r) in r.iter_mut().enumerate() {
                        *r = _mm512_loadu_ps(from.add((4 * q + i) * from_step));
                    }
                    *four = $crate::simd::x86::turn_fours(r);
                }
                for c in 0..4 {
                    let [q0, q1, q2, q3] = [fours[0][c], fours[1][c], fours[2][c], fours[3][c]];
                    // Quarters 0 and 2, then 1 and 3, of two fours each.
                    let (even, odd) =
                        (_mm512_shuffle_f32x4::<0x88>(q0, q1), _mm512_shuffle_f32x4::<0xdd>(q0, q1));
                    let (even2, odd2) =
                        (_mm512_shuffle_f32x4::<0x88>(q2, q3), _mm512_shuffle_f32x4::<0xdd>(q2, q3));
                    _mm512_storeu_ps(to.add(c * to_step), _mm512_shuffle_f32x4::<0x88>(even, even2));
                    _mm512_storeu_ps(to.add((c + 8) * to_step), _mm512_shuffle_f32x4::<0xdd>(even, even2));
                    _mm512_storeu_ps(to.add((c + 4) * to_step), _mm512_shuffle_f32x4::<0x88>(odd, odd2));
                    _mm512_storeu_ps(to.add((c + 12) * to_step), _mm512_shuffle_f32x4::<0xdd>(odd, odd2));
                }
            }
        }

        $crate::simd::arithmetic! {
            add(a, b) = _mm512_add_ps;
            sub(a, b) = _mm512_sub_ps;
            mul(a, b) = _mm512_mul_ps;
            div(a, b) = _mm512_div_ps;
            fma(a, b, c) = _mm512_fmadd_ps;
            max(a, b) = _mm512_max_ps;
            min(a, b) = _mm512_min_ps;
        }

        #[inline(always)]
        fn abs(self, a: Self::V) -> Self::V {
            // SAFETY: AVX-512 F, as `self` proves.
            unsafe { _mm512_abs_ps(a) }
        }

        #[inline(always)]
        fn round(self, a: Self::V) -> Self::V {
            // SAFETY: AVX-512 F, as `self` proves.
            unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
        }

        #[inline(always)]
        fn power_of_two(self, n: Self::V) -> Self::V {
            // SAFETY: AVX-512 F, as `self` proves.
            unsafe {
                let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
            }
        }

        #[inline(always)]
        fn select_le(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
            // SAFETY: AVX-512 F, as `self` proves.
            unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b), no, yes) }
        }

        #[inline(always)]
        fn round_to_bf16(self, a: Self::V) -> Self::V {
            // SAFETY: AVX-512 F, as `self` proves.
            unsafe {
                let bits = _mm512_castps_si512(a);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let carried = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
                let kept = _mm512_and_si512(carried, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
                // A NaN's bits could carry into the sign: leave NaN alone.
                let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a);
                _mm512_mask_blend_ps(is_nan, _mm512_castsi512_ps(kept), a)
            }
        }

        #[inline(always)]
        fn round_to_f16(self, a: Self::V) -> Self::V {
            // SAFETY: AVX-512 F, as `self` proves.
            unsafe { _mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a)) }
        }

        #[inline(always)]
        unsafe fn load_bf16(self, from: *const u16) -> Self::V {
            // SAFETY: the caller promised sixteen bf16.
            unsafe {
                let narrow = _mm256_loadu_si256(from.cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow)))
            }
        }

        #[inline(always)]
        unsafe fn load_bf16_even_odd(self, from: *const u16) -> [Self::V; 2] {
            // SAFETY: the caller promised thirty-two bf16.
            unsafe {
                let both = _mm512_loadu_si512(from.cast());
                let odd = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
                [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)), _mm512_castsi512_ps(odd)]
            }
        }

        #[inline(always)]
        unsafe fn load_f16(self, from: *const u16) -> Self::V {
            // SAFETY: the caller promised sixteen f16.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
        }
    };
}

/// Order of groups of eight bytes for which interleaving within 128 bits yields the original order.
pub(super) const EIGHTS: [u64; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Looks up the lower seven bits of each byte in two planes of two vectors each.
///
/// # Safety
/// AVX-512 VBMI.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn look_up([a, b, c, d]: [__m512; 4], codes: __m512) -> (__m512i, __m512i) {
    let (a, b) = (_mm512_castps_si512(a), _mm512_castps_si512(b));
    let (c, d) = (_mm512_castps_si512(c), _mm512_castps_si512(d));
    let codes = _mm512_castps_si512(codes);
    (_mm512_permutex2var_epi8(a, codes, b), _mm512_permutex2var_epi8(c, codes, d))
}

/// Looks up as [`look_up`] does, for Intel, where VPERMI2B is three micro-operations and VPERMB one. Converting 64
/// codes and multiplying them with a query takes 0.91 to 0.94 of the time.
///
/// # Safety
/// AVX-512 BW and VBMI.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) unsafe fn look_up_by_halves([a, b, c, d]: [__m512; 4], codes: __m512) -> (__m512i, __m512i) {
    let (a, b) = (_mm512_castps_si512(a), _mm512_castps_si512(b));
    let (c, d) = (_mm512_castps_si512(c), _mm512_castps_si512(d));
    let codes = _mm512_castps_si512(codes);
    let upper = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(0x40));
    let low = _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(codes, a), upper, codes, b);
    let high = _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(codes, c), upper, codes, d);
    (low, high)
}

/// Methods of [`Avx512Vbmi`], [`Avx512Bf16`] and [`Amx`](super::Amx) that look bytes up in tables.
macro_rules! byte_methods {
    ($look_up:path) => {
        const WIDENS_CODES: bool = true;

        #[inline(always)]
        fn split_bf16(self, both: Self::V) -> [Self::V; 2] {
            // SAFETY: AVX-512 F, as `self` proves.
            unsafe {
                let both = _mm512_castps_si512(both);
                let odd = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
                [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)), _mm512_castsi512_ps(odd)]
            }
        }

        #[inline(always)]
        unsafe fn load_codes(self, from: *const u8) -> Self::V {
            // SAFETY: AVX-512 F, as `self` proves; the caller promised sixty-four bytes.
            unsafe {
                let order = _mm512_loadu_si512(EIGHTS.as_ptr().cast());
                _mm512_castsi512_ps(_mm512_permutexvar_epi64(order, _mm512_loadu_si512(from.cast())))
            }
        }

        #[inline(always)]
        fn widen_codes(self, tables: &Tables<Self::V>, codes: Self::V) -> [Self::V; 2] {
            const A_XOR_B_AND_C: i32 = 0x78;
            // SAFETY: AVX-512 BW and VBMI, as `self` proves.
            unsafe {
                let &[a, b, c, d, ..] = tables;
                let (low, high) = $look_up([a, b, c, d], codes);
                let codes = _mm512_castps_si512(codes);
                // The index has seven bits: the eighth bit is the sign, which a negative descale may already flip
                // in the table.
                let sign = _mm512_set1_epi8(i8::MIN);
                let high = _mm512_ternarylogic_epi32::<A_XOR_B_AND_C>(high, codes, sign);
                let (first, second) = (_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high));
                [_mm512_castsi512_ps(first), _mm512_castsi512_ps(second)]
            }
        }

        #[inline(always)]
        unsafe fn widen_bytes(self, to_wide: &BytePlanes, from: *const u8, to: *mut u16, count: usize) {
            // SAFETY: AVX-512 VBMI, as `self` proves; the caller promised `count` of both, and masks leave
            // the rest alone.
            unsafe {
                let order = _mm512_loadu_si512(EIGHTS.as_ptr().cast());
                let planes = to_wide.planes.as_ptr().cast::<u8>();
                let mut tables = [_mm512_setzero_si512(); 8];
                for (n, table) in tables.iter_mut().enumerate() {
                    *table = _mm512_loadu_si512(planes.add(64 * n).cast());
                }
                let [a, b, c, d, e, f, g, h] = tables;
                let mut at = 0;
                while at < count {
                    let live = u64::MAX >> (64 - (count - at).min(64));
                    let codes = _mm512_maskz_loadu_epi8(live, from.add(at).cast());
                    let codes = _mm512_permutexvar_epi64(order, codes);
                    let upper = _mm512_movepi8_mask(codes);
                    let low = _mm512_mask_blend_epi8(
                        upper,
                        _mm512_permutex2var_epi8(a, codes, b),
                        _mm512_permutex2var_epi8(c, codes, d),
                    );
                    let high = _mm512_mask_blend_epi8(
                        upper,
                        _mm512_permutex2var_epi8(e, codes, f),
                        _mm512_permutex2var_epi8(g, codes, h),
                    );
                    let (first, second) = (_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high));
                    _mm512_mask_storeu_epi16(to.add(at).cast(), live as u32, first);
                    if live >> 32 != 0 {
                        _mm512_mask_storeu_epi16(to.add(at + 32).cast(), (live >> 32) as u32, second);
                    }
                    at += 64;
                }
            }
        }
    };
}

/// Methods that [`Avx512Bf16`] and [`Amx`](super::Amx) have in addition to those of AVX-512.
macro_rules! bf16_methods {
    () => {
        const BF16_DOT: bool = true;

        #[inline(always)]
        fn dot_bf16(self, acc: Self::V, a: Self::V, b: Self::V) -> Self::V {
            // SAFETY: AVX-512 BF16, as `self` proves; the operands are 512 bits of bf16 pairs.
            unsafe {
                let a = std::mem::transmute::<__m512, __m512bh>(a);
                let b = std::mem::transmute::<__m512, __m512bh>(b);
                _mm512_dpbf16_ps(acc, a, b)
            }
        }

        #[inline(always)]
        fn pair_bf16(self, low: Self::V, high: Self::V) -> Self::V {
            const ORDER: [u16; 32] = {
                let mut order = [0; 32];
                let mut lane = 0;
                while lane < 16 {
                    (order[2 * lane], order[2 * lane + 1]) = (lane as u16, lane as u16 + 16);
                    lane += 1;
                }
                order
            };
            // SAFETY: AVX-512 BF16 and BW, as `self` proves; `__m512bh` is 512 bits of bf16, those of `low` first.
            unsafe {
                let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
                _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both))
            }
        }

        #[inline(always)]
        unsafe fn interleave_bf16(self, low: *const u16, high: *const u16, to: *mut f32) -> bool {
            // Puts quarters of four pairs in order: unpacking leaves columns 0, 8, 16, 24, then 4, 12, 20, 28, each
            // with those that follow.
            const FIRST: [u64; 8] = [0, 1, 8, 9, 2, 3, 10, 11];
            const SECOND: [u64; 8] = [4, 5, 12, 13, 6, 7, 14, 15];
            // SAFETY: AVX-512 BW; the caller promised 32 bf16 twice, and room for 32 pairs.
            unsafe {
                let (a, b) = (_mm512_loadu_si512(low.cast()), _mm512_loadu_si512(high.cast()));
                let (even, odd) = (_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b));
                let first = _mm512_loadu_si512(FIRST.as_ptr().cast());
                let second = _mm512_loadu_si512(SECOND.as_ptr().cast());
                _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi64(even, first, odd));
                _mm512_storeu_si512(to.add(16).cast(), _mm512_permutex2var_epi64(even, second, odd));
                let (magnitude, large) = (_mm512_set1_epi16(0x7fff), _mm512_set1_epi16(LARGE_BF16 as i16));
                // Signed: no magnitude has the highest bit.
                let is_large = |x| _mm512_cmpge_epi16_mask(_mm512_and_si512(x, magnitude), large);
                is_large(a) | is_large(b) == 0
            }
        }

        #[inline(always)]
        fn pack_bf16(self, first: Self::V, second: Self::V) -> Self::V {
            // SAFETY: AVX-512 BF16, as `self` proves; `__m512bh` is 512 bits of bf16, those of the last operand first.
            unsafe { std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(second, first)) }
        }

        #[inline(always)]
        fn pair_rows(self, low: Self::V, high: Self::V) -> [Self::V; 2] {
            // SAFETY: AVX-512 BW, as `self` proves.
            unsafe {
                let (low, high) = (_mm512_castps_si512(low), _mm512_castps_si512(high));
                let (even, odd) = (_mm512_unpacklo_epi16(low, high), _mm512_unpackhi_epi16(low, high));
                [_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd)]
            }
        }

        #[inline(always)]
        fn pair_codes(self, low: Self::V, high: Self::V) -> [Self::V; 2] {
            // SAFETY: AVX-512 BW, as `self` proves.
            unsafe {
                let (low, high) = (_mm512_castps_si512(low), _mm512_castps_si512(high));
                let (first, second) = (_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high));
                [_mm512_castsi512_ps(first), _mm512_castsi512_ps(second)]
            }
        }
    };
}

impl Simd for Avx512 {
    avx512_methods!(Avx512, "avx2,fma,f16c,avx512f,avx512vl");
}

impl Simd for Avx512Vbmi {
    avx512_methods!(Avx512Vbmi, "avx2,fma,f16c,avx512f,avx512vl,avx512bw,avx512vbmi");
    byte_methods!(look_up_by_halves);
}

impl Simd for Avx512Bf16 {
    // Dot products are faster than FMAs on AMD. An Intel processor uses them only if its user names them.
    const DOTS_OUTRUN_FMAS: bool = true;
    avx512_methods!(Avx512Bf16, "avx2,fma,f16c,avx512f,avx512vl,avx512bw,avx512vbmi,avx512bf16");
    byte_methods!(look_up);
    bf16_methods!();
}

pub(super) use {avx512_methods, bf16_methods, byte_methods};
