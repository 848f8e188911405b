//! The product of one warp's part of a `wgmma`, straight on its accumulator rows. PTX ISA 9.7.15.5, figure of D.
//!
//! Lane `l` of register `4 j + 2 h + e` holds row `l / 4 + 8 h`, column `8 j + 2 (l % 4) + e`. With the columns of B
//! exchanged inside each eight, even ones first, four lanes of two registers are eight neighbours: a vector.

use super::warp::Row;
use crate::fp::fma32;
use crate::op::Reg;

/// Where column `n` of B lies: even columns of its eight first.
#[inline(always)]
pub(super) fn column(n: usize) -> usize {
    n / 8 * 8 + n % 8 / 2 + n % 2 * 4
}

/// `d += a * b` in order of k: `a[16][k]`, `b[k][n]` with its columns exchanged, `d` the registers of D in `rows`.
/// Without `accumulate`, `d` begins at zero.
pub(super) fn multiply(rows: &mut [Row], d: &[Reg], a: &[f32], b: &[f32], accumulate: bool, simd: bool) {
    #[cfg(target_arch = "x86_64")]
    if simd {
        // SAFETY: `simd` is only true when AVX2 and FMA were found on this processor.
        unsafe { multiply_avx2(rows, d, a, b, accumulate) };
        return;
    }
    let _ = simd;
    multiply_body(rows, d, a, b, accumulate);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn multiply_avx2(rows: &mut [Row], d: &[Reg], a: &[f32], b: &[f32], accumulate: bool) {
    multiply_body(rows, d, a, b, accumulate);
}

#[inline(always)]
fn multiply_body(rows: &mut [Row], d: &[Reg], a: &[f32], b: &[f32], accumulate: bool) {
    let (n, k) = (d.len() * 2, a.len() / 16);
    for four in 0..4 {
        let a = &a[four * 4 * k..][..4 * k];
        let mut at = 0;
        while at + 16 <= n {
            columns::<2>(rows, d, a, b, (four, at), accumulate);
            at += 16;
        }
        if at < n {
            columns::<1>(rows, d, a, b, (four, at), accumulate);
        }
    }
}

/// Rows `4 four..` and `8 J` columns from `at`.
#[inline(always)]
fn columns<const J: usize>(
    rows: &mut [Row],
    d: &[Reg],
    a: &[f32],
    b: &[f32],
    (four, at): (usize, usize),
    accumulate: bool,
) {
    let (n, k) = (d.len() * 2, a.len() / 4);
    let (half, lane) = (four / 2, four % 2 * 16);
    let mut sum = [[[0f32; 8]; J]; 4];
    if accumulate {
        for j in 0..J {
            for e in 0..2 {
                let row = &rows[d[at / 2 + 4 * j + 2 * half + e].row()][lane..lane + 16];
                for r in 0..4 {
                    for i in 0..4 {
                        sum[r][j][4 * e + i] = f32::from_bits(row[4 * r + i]);
                    }
                }
            }
        }
    }
    let (a0, a1, a2, a3) = (&a[..k], &a[k..2 * k], &a[2 * k..3 * k], &a[3 * k..4 * k]);
    for (kk, line) in b.chunks_exact(n).enumerate().take(k) {
        let x = [a0[kk], a1[kk], a2[kk], a3[kk]];
        let line = &line[at..at + 8 * J];
        for r in 0..4 {
            for j in 0..J {
                for i in 0..8 {
                    sum[r][j][i] = fma32(x[r], line[8 * j + i], sum[r][j][i]);
                }
            }
        }
    }
    for j in 0..J {
        for e in 0..2 {
            let row = &mut rows[d[at / 2 + 4 * j + 2 * half + e].row()][lane..lane + 16];
            for r in 0..4 {
                for i in 0..4 {
                    row[4 * r + i] = sum[r][j][4 * e + i].to_bits();
                }
            }
        }
    }
}
