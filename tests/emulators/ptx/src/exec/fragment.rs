//! The product of one warp's part of a `wgmma`, straight on its accumulator rows. PTX ISA 9.7.15.5, figure of D.
//!
//! Lane `l` of register `4 j + 2 h + e` of D holds row `l / 4 + 8 h`, column `8 j + 2 (l % 4) + e`: the 32 lanes of one
//! register are eight rows of four columns, four vectors of two rows each. So B lies with its columns exchanged inside
//! each eight, even ones first, four of one register together, and each element of A is repeated four times.

use super::warp::Row;
use crate::fp::fma32;
use crate::op::Reg;

/// Place of column `n` of B: even columns of its eight first.
#[inline(always)]
pub(super) fn column(n: usize) -> usize {
    n / 8 * 8 + n % 8 / 2 + n % 2 * 4
}

/// Place of element (`r`, `k`) of A's sixteen rows: lane `l` of register `2 i + h` holds row `l / 4 + 8 h`
/// and, in each quarter of the register's depth, some neighbours of it; those of one number lie together,
/// lane after lane.
#[inline(always)]
pub(super) fn lane(r: usize, k: usize, depth: usize) -> usize {
    // Elements of one register, and of eight lanes' registers along k.
    let (each, along) = (depth / 8, depth / 2);
    ((k / along * 2 + r / 8) * each + k % each) * 32 + r % 8 * 4 + k % along / each
}

/// Rows of A for each k: eight rows, two a vector, each element four times.
pub(super) type Repeated = [[[f32; 8]; 4]; MAX_DEPTH];
/// The most elements along k that one instruction has.
const MAX_DEPTH: usize = 32;

/// `d += a * b` in order of k: `a` of sixteen rows as [`lane`] says, `b[k][n]` with its columns exchanged, `d` the
/// registers of D in `rows`. Without `accumulate`, `d` begins at zero. `space` is for use inside.
pub(super) fn multiply(
    rows: &mut [Row],
    d: &[Reg],
    a: &[f32],
    b: &[f32],
    accumulate: bool,
    space: &mut Repeated,
    simd: bool,
) {
    #[cfg(target_arch = "x86_64")]
    if simd {
        // SAFETY: `simd` is only true when AVX2 and FMA were found on this processor.
        unsafe { multiply_avx2(rows, d, a, b, accumulate, space) };
        return;
    }
    let _ = simd;
    multiply_body(rows, d, a, b, accumulate, space);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn multiply_avx2(rows: &mut [Row], d: &[Reg], a: &[f32], b: &[f32], accumulate: bool, space: &mut Repeated) {
    multiply_body(rows, d, a, b, accumulate, space);
}

#[inline(always)]
fn multiply_body(rows: &mut [Row], d: &[Reg], a: &[f32], b: &[f32], accumulate: bool, space: &mut Repeated) {
    let (fours, k) = (d.len() / 2, a.len() / 16);
    for half in 0..2 {
        match k {
            8 => repeat::<1>(a, half, space),
            16 => repeat::<2>(a, half, space),
            _ => repeat::<4>(a, half, space),
        }
        let a = &space[..k];
        for at in (0..fours).step_by(2) {
            columns::<2>(rows, d, a, b, (half, at), accumulate);
        }
    }
}

/// Repeats each element of rows `8 half..` four times. `EACH` elements lie in one register.
#[inline(always)]
fn repeat<const EACH: usize>(a: &[f32], half: usize, out: &mut Repeated) {
    for part in 0..2 {
        for e in 0..EACH {
            let lanes = &a[((part * 2 + half) * EACH + e) * 32..][..32];
            for c in 0..4 {
                let to = &mut out[(part * 4 + c) * EACH + e];
                for pair in 0..4 {
                    let (first, second) = (lanes[8 * pair + c], lanes[8 * pair + 4 + c]);
                    to[pair] = [first, first, first, first, second, second, second, second];
                }
            }
        }
    }
}

/// Rows `8 half..` and `4 J` columns, the fours of columns from number `at` on.
#[inline(always)]
fn columns<const J: usize>(
    rows: &mut [Row],
    d: &[Reg],
    a: &[[[f32; 8]; 4]],
    b: &[f32],
    (half, at): (usize, usize),
    accumulate: bool,
) {
    let n = d.len() * 2;
    let mut sum = [[[0f32; 8]; J]; 4];
    let mut regs = [0; J];
    for j in 0..J {
        regs[j] = d[(at + j) / 2 * 4 + 2 * half + (at + j) % 2].row();
    }
    if accumulate {
        for j in 0..J {
            let row = &rows[regs[j]];
            for pair in 0..4 {
                for i in 0..8 {
                    sum[pair][j][i] = f32::from_bits(row[8 * pair + i]);
                }
            }
        }
    }
    for (kk, a) in a.iter().enumerate() {
        let line = &b[kk * n + 4 * at..][..4 * J];
        for j in 0..J {
            for pair in 0..4 {
                for i in 0..8 {
                    sum[pair][j][i] = fma32(a[pair][i], line[4 * j + i % 4], sum[pair][j][i]);
                }
            }
        }
    }
    for j in 0..J {
        let row = &mut rows[regs[j]];
        for pair in 0..4 {
            for i in 0..8 {
                row[8 * pair + i] = sum[pair][j][i].to_bits();
            }
        }
    }
}
