//! AMX: products of tiles of bf16, in the tile registers of Xeons since the fourth generation.
//!
//! Rust has no stable intrinsics for them, so this is inline assembly, by Intel's "64 and IA-32
//! Architectures Software Developer's Manual", volume 1, chapter 18 (programming with AMX), and volume 2
//! (LDTILECFG, TILELOADD, TDPBF16PS, TILESTORED). Vectors are AVX-512's.

use std::arch::asm;
use std::arch::x86_64::*;

use super::x86::{
    Avx512, Avx512Bf16, EIGHTS, avx512_methods, bf16_methods, byte_methods, cpuid, look_up_by_halves,
    turn_fours,
};
use super::{BytePlanes, LARGE_BF16, Op, Simd, Tables, TileRows};

/// [`Avx512Bf16`] with tiles of bf16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx(());

/// Operand of LDTILECFG: every tile has 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

impl Amx {
    /// Returns a value if this processor has AMX, and the system allows this process to use it.
    pub(crate) fn detect() -> Option<Self> {
        let vectors = Avx512Bf16::detect().is_some() && is_x86_feature_detected!("avx512dq");
        (vectors && has_tiles() && permitted()).then_some(Self(()))
    }
}

/// CPUID leaf 7: EDX bits 22 (AMX-BF16) and 24 (AMX-TILE); XCR0 bits 17 and 18 (the system saves the
/// tiles and their configuration).
fn has_tiles() -> bool {
    const WANTED: u32 = 1 << 22 | 1 << 24;
    const SAVED: u64 = 1 << 17 | 1 << 18;
    cpuid(0, 0).eax >= 7 && cpuid(7, 0).edx & WANTED == WANTED && {
        #[target_feature(enable = "xsave")]
        fn saved() -> u64 {
            // SAFETY: register 0 is there where XSAVE is.
            unsafe { _xgetbv(0) }
        }
        // SAFETY: processors with AVX-512 that the system uses have XSAVE.
        is_x86_feature_detected!("xsave") && unsafe { saved() } & SAVED == SAVED
    }
}

/// Requests matrix tiles from Linux, once for all threads of the process.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: the call changes nothing but the permission; `syscall` writes rax, rcx and r11.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Configures the shapes of this thread's tiles.
///
/// # Safety
/// An [`Amx`] exists.
pub(super) unsafe fn enter() {
    // SAFETY: the configuration is valid for palette 1, and this thread may use tiles: see `detect`.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, out("tmm0") _, out("tmm1") _, out("tmm2") _,
            out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags, readonly));
    }
}

/// Releases the tiles, so that thread switches need not save them.
///
/// # Safety
/// As [`enter`].
pub(super) unsafe fn leave() {
    // SAFETY: the caller keeps the contract of `leave`.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
}

/// Sets the accumulators to 0: tiles 0 and 1 are the upper rows, 2 and 3 the lower ones. They stay in
/// their registers from call to call, since the compiler itself never uses tiles.
///
/// # Safety
/// This thread is between [`enter`] and [`leave`]; so for every function below.
#[inline(always)]
pub(super) unsafe fn zero() {
    // SAFETY: the caller keeps the contract of `zero`.
    unsafe {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            options(nostack, preserves_flags, nomem),
        );
    }
}

/// # Safety
/// What [`Simd::tile_load`](super::Simd::tile_load) says is readable.
#[inline(always)]
pub(super) unsafe fn load(c: *const f32, c_row: usize) {
    // SAFETY: promised by the caller: what [`Simd::tile_load`](super::Simd::tile_load) says is readable.
    unsafe {
        asm!(
            "tileloadd tmm0, [{c} + {c_row}*1]",
            "tileloadd tmm1, [{c} + {c_row}*1 + 64]",
            "tileloadd tmm2, [{lower} + {c_row}*1]",
            "tileloadd tmm3, [{lower} + {c_row}*1 + 64]",
            c = in(reg) c, lower = in(reg) c.cast::<u8>().wrapping_add(16 * c_row), c_row = in(reg) c_row,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            options(nostack, preserves_flags, readonly),
        );
    }
}

/// Multiplies two tiles of A with two of B.
///
/// # Safety
/// What [`Simd::tile_step`](super::Simd::tile_step) says is readable.
#[inline(always)]
pub(super) unsafe fn step(a: *const u8, a_row: usize, b: *const u8, b_row: usize) {
    // SAFETY: promised by the caller: what [`Simd::tile_step`](super::Simd::tile_step) says is readable.
    unsafe {
        asm!(
            "tileloadd tmm4, [{a} + {a_row}*1]",
            "tileloadd tmm6, [{b} + {b_row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {b_row}*1 + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{lower} + {a_row}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            a = in(reg) a, lower = in(reg) a.wrapping_add(16 * a_row), a_row = in(reg) a_row,
            b = in(reg) b, b_row = in(reg) b_row,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags, readonly),
        );
    }
}

/// # Safety
/// What [`Simd::tile_store`](super::Simd::tile_store) says is writable.
#[inline(always)]
pub(super) unsafe fn store(c: *mut f32, c_row: usize) {
    // SAFETY: promised by the caller: what [`Simd::tile_store`](super::Simd::tile_store) says is writable.
    unsafe {
        asm!(
            "tilestored [{c} + {c_row}*1], tmm0",
            "tilestored [{c} + {c_row}*1 + 64], tmm1",
            "tilestored [{lower} + {c_row}*1], tmm2",
            "tilestored [{lower} + {c_row}*1 + 64], tmm3",
            c = in(reg) c, lower = in(reg) c.cast::<u8>().wrapping_add(16 * c_row), c_row = in(reg) c_row,
            options(nostack, preserves_flags),
        );
    }
}

/// Loads a tile into tile register 4, where it stays.
///
/// # Safety
/// 16 rows of 64 bytes are readable.
#[inline(always)]
pub(super) unsafe fn load_fourth(rows: TileRows) {
    // SAFETY: promised by the caller: 16 rows of 64 bytes are readable.
    unsafe {
        asm!(
            "tileloadd tmm4, [{rows} + {step}*1]",
            rows = in(reg) rows.first, step = in(reg) rows.step, out("tmm4") _,
            options(nostack, preserves_flags, readonly),
        );
    }
}

/// Loads a tile into one of three registers in rotation, and adds a product to the accumulators: of tile 4
/// and the loaded tile, or of the two in the other order. The load has the hint of no reuse: in pages of 16
/// tokens of a head it gives 6.9 GB/s instead of 5.9 (docs/kernels/cpu.md).
macro_rules! add_product {
    ($rows:expr, $sums:tt, $a:tt, $b:tt, $loaded:tt) => {
        asm!(
            concat!("tileloaddt1 ", $loaded, ", [{rows} + {step}*1]"),
            concat!("tdpbf16ps ", $sums, ", ", $a, ", ", $b),
            rows = in(reg) $rows.first, step = in(reg) $rows.step, out($sums) _, out($loaded) _,
            options(nostack, preserves_flags, readonly),
        )
    };
}

/// # Safety
/// What [`Simd::tile_right`](super::Simd::tile_right) says is readable.
#[inline(always)]
pub(super) unsafe fn right(quarter: usize, b: TileRows) {
    // SAFETY: promised by the caller: what [`Simd::tile_right`](super::Simd::tile_right) says is readable.
    unsafe {
        match quarter {
            0 => add_product!(b, "tmm0", "tmm4", "tmm5", "tmm5"),
            1 => add_product!(b, "tmm1", "tmm4", "tmm6", "tmm6"),
            2 => add_product!(b, "tmm2", "tmm4", "tmm7", "tmm7"),
            _ => add_product!(b, "tmm3", "tmm4", "tmm5", "tmm5"),
        }
    }
}

/// # Safety
/// What [`Simd::tile_down`](super::Simd::tile_down) says is readable.
#[inline(always)]
pub(super) unsafe fn down(quarter: usize, a: TileRows) {
    // SAFETY: promised by the caller: what [`Simd::tile_down`](super::Simd::tile_down) says is readable.
    unsafe {
        match quarter {
            0 => add_product!(a, "tmm0", "tmm5", "tmm4", "tmm5"),
            1 => add_product!(a, "tmm1", "tmm6", "tmm4", "tmm6"),
            2 => add_product!(a, "tmm2", "tmm7", "tmm4", "tmm7"),
            _ => add_product!(a, "tmm3", "tmm5", "tmm4", "tmm5"),
        }
    }
}

/// # Safety
/// What [`Simd::tile_store_half`](super::Simd::tile_store_half) says is writable.
#[inline(always)]
pub(super) unsafe fn store_half(lower: bool, c: *mut f32) {
    macro_rules! store {
        ($left:literal, $right:literal) => {
            asm!(
                concat!("tilestored [{c} + {c_row}*1], ", $left),
                concat!("tilestored [{c} + {c_row}*1 + 64], ", $right),
                c = in(reg) c, c_row = in(reg) 128_usize,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: promised by the caller: what [`Simd::tile_store_half`](super::Simd::tile_store_half) says is
    // writable.
    unsafe { if lower { store!("tmm2", "tmm3") } else { store!("tmm0", "tmm1") } }
}

impl Simd for Amx {
    const TILES: bool = true;
    avx512_methods!(Amx, "avx2,fma,f16c,avx512f,avx512vl,avx512bw,avx512dq,avx512vbmi,avx512bf16");
    byte_methods!(look_up_by_halves);
    bf16_methods!();

    #[inline(always)]
    fn enter_tiles(self) {
        // SAFETY: `self` is an Amx.
        unsafe { enter() };
    }

    #[inline(always)]
    fn leave_tiles(self) {
        // SAFETY: `self` is an Amx.
        unsafe { leave() };
    }

    #[inline(always)]
    unsafe fn tile_zero(self) {
        // SAFETY: the caller keeps the contract of `tile_zero`.
        unsafe { zero() };
    }

    #[inline(always)]
    unsafe fn tile_load(self, c: *const f32, c_row: usize) {
        // SAFETY: the caller keeps the contract of `tile_load`.
        unsafe { load(c, c_row) };
    }

    #[inline(always)]
    unsafe fn tile_step(self, a: *const u8, a_row: usize, b: *const u8, b_row: usize) {
        // SAFETY: the caller keeps the contract of `tile_step`.
        unsafe { step(a, a_row, b, b_row) };
    }

    #[inline(always)]
    unsafe fn tile_store(self, c: *mut f32, c_row: usize) {
        // SAFETY: the caller keeps the contract of `tile_store`.
        unsafe { store(c, c_row) };
    }

    #[inline(always)]
    unsafe fn tile_left(self, a: TileRows) {
        // SAFETY: the caller keeps the contract of `tile_left`.
        unsafe { load_fourth(a) };
    }

    #[inline(always)]
    unsafe fn tile_right(self, quarter: usize, b: TileRows) {
        // SAFETY: the caller keeps the contract of `tile_right`.
        unsafe { right(quarter, b) };
    }

    #[inline(always)]
    unsafe fn tile_top(self, b: TileRows) {
        // SAFETY: the caller keeps the contract of `tile_top`.
        unsafe { load_fourth(b) };
    }

    #[inline(always)]
    unsafe fn tile_down(self, quarter: usize, a: TileRows) {
        // SAFETY: the caller keeps the contract of `tile_down`.
        unsafe { down(quarter, a) };
    }

    #[inline(always)]
    unsafe fn tile_store_half(self, lower: bool, c: *mut f32) {
        // SAFETY: the caller keeps the contract of `tile_store_half`.
        unsafe { store_half(lower, c) };
    }

    #[inline(always)]
    fn low_and_high_bf16(self, v: Self::V) -> [Self::V; 2] {
        // SAFETY: AVX-512 F, as `self` proves.
        unsafe {
            let rounded = _mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(0x8000));
            let high = _mm512_and_si512(rounded, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
            [_mm512_castsi512_ps(_mm512_srli_epi32::<16>(rounded)), _mm512_castsi512_ps(high)]
        }
    }

    /// Transposes half of the vectors: rows `r` and `r + 4` of the block share one.
    #[inline(always)]
    unsafe fn transpose_left(self, from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
        // SAFETY: the caller promised the block; AVX-512 DQ, as `self` proves.
        unsafe {
            let mut fours = [[self.splat(0.0); 4]; 2];
            for (half, four) in fours.iter_mut().enumerate() {
                let mut r = [self.splat(0.0); 4];
                for (i, r) in r.iter_mut().enumerate() {
                    let low = from.add((8 * half + i) * from_step);
                    let both = _mm512_castps256_ps512(_mm256_loadu_ps(low));
                    *r = _mm512_insertf32x8::<1>(both, _mm256_loadu_ps(low.add(4 * from_step)));
                }
                *four = turn_fours(r);
            }
            let [first, second] = fours;
            for (c, (first, second)) in first.into_iter().zip(second).enumerate() {
                self.store(to.add(c * to_step), _mm512_shuffle_f32x4::<0x88>(first, second));
                self.store(to.add((c + 4) * to_step), _mm512_shuffle_f32x4::<0xdd>(first, second));
            }
        }
    }

    /// `2^x` by a polynomial of degree five on [0, 1) that is 1 at 0, with an error up to 1.5e-7. VREDUCEPS gives
    /// the fraction of x and VSCALEFPS multiplies by the power of its floor, so no other step, nor a bound on x, is
    /// needed.
    #[inline(always)]
    fn exp2_coarse(self, x: Self::V) -> Self::V {
        const NO_FRACTION_BITS_KEPT_TOWARDS_MINUS_INFINITY: i32 = 0x09;
        // SAFETY: AVX-512 DQ, as `self` proves.
        let r = unsafe { _mm512_reduce_ps::<NO_FRACTION_BITS_KEPT_TOWARDS_MINUS_INFINITY>(x) };
        let q = self.splat(1.867_13e-3);
        let q = self.fma(q, r, self.splat(9.017_031e-3));
        let q = self.fma(q, r, self.splat(5.579_991_3e-2));
        let q = self.fma(q, r, self.splat(2.401_644_4e-1));
        let q = self.fma(q, r, self.splat(6.931_513e-1));
        let q = self.fma(q, r, self.splat(1.0));
        // SAFETY: AVX-512 F.
        unsafe { _mm512_scalef_ps(q, x) }
    }

    /// Four instructions of one micro-operation each, where [`pair_bf16`](Self::pair_bf16)'s two instructions take
    /// six.
    #[inline(always)]
    fn pair_weights(self, low: Self::V, high: Self::V) -> Self::V {
        const HIGH_HALF_OF_A_OR_C: i32 = 0xea;
        // SAFETY: AVX-512 F, as `self` proves.
        unsafe {
            let half = _mm512_set1_epi32(0x8000);
            let low = _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(low), half));
            let high = _mm512_add_epi32(_mm512_castps_si512(high), half);
            let mask = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<HIGH_HALF_OF_A_OR_C>(high, mask, low))
        }
    }
}
