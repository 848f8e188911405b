//! Scale factors of block-scaled `tcgen05.mma`: where they lie in tensor memory, and operands multiplied by them.
//! PTX ISA 9.7.16.10.7.
//!
//! Factors of row m of an operand (column n of B) are bytes of one word: lane m % 32 of every warp's part, column
//! m / 32 from the address on. The ISA asks for a copy in each of the four parts; a product here fails where the copies
//! differ. In a pair of blocks each has the factors of its own rows of A, and those of all columns of B, as CUTLASS's
//! block-scaled collectives copy them.

use super::tmem::{PART, TensorMemory};
use super::{Exec, fault};
use crate::fault::FaultKind;
use crate::fp;
use crate::op::ScaledKind;

/// Bytes of an operand's row that one product contracts.
const ROW_BYTES: usize = 32;

/// Factors of one operand: their address, and the byte in each word (SFA_ID or SFB_ID of the instruction descriptor).
#[derive(Clone, Copy, Debug)]
pub(super) struct Factors {
    pub(super) address: u32,
    pub(super) first_byte: u32,
    pub(super) what: &'static str,
}

impl Factors {
    /// First column, and columns of `rows` rows.
    pub(super) fn columns(&self, rows: usize) -> [u32; 2] {
        [self.address & 0xffff, rows.div_ceil(PART) as u32]
    }

    /// The values, `[row][factor]`.
    pub(super) fn read(
        &self,
        tmem: &TensorMemory,
        rows: usize,
        per_row: usize,
        is_e8m0: bool,
    ) -> Exec<Vec<f32>> {
        if self.address >> 16 != 0 {
            let text = format!("{} at lane {}: they begin at lane 0", self.what, self.address >> 16);
            return Err(fault(FaultKind::TensorMemory, text));
        }
        let mut values = Vec::with_capacity(rows * per_row);
        for row in 0..rows {
            let (lane, column) = (row % PART, (self.address & 0xffff) as usize + row / PART);
            let word = tmem.get(lane, column)?;
            for copy in 1..4 {
                let other = tmem.get(lane + copy * PART, column)?;
                let bytes = |word: u32| word >> (8 * self.first_byte) & (u32::MAX >> (32 - 8 * per_row));
                if bytes(other) != bytes(word) {
                    let text = format!(
                        "{} of row {row} differ between the parts of the warps: lane {lane} column {column} has \
                         {word:#010x}, lane {} {other:#010x}",
                        self.what,
                        lane + copy * PART
                    );
                    return Err(fault(FaultKind::TensorMemory, text));
                }
            }
            for factor in 0..per_row as u32 {
                let byte = (word >> (8 * (self.first_byte + factor))) as u8;
                values.push(if is_e8m0 {
                    e8m0(byte)
                } else {
                    fp::fp8_table(false)[usize::from(byte & 0x7f)]
                });
            }
        }
        Ok(values)
    }
}

/// A power of two, 2^(byte - 127); 255 is NaN.
fn e8m0(byte: u8) -> f32 {
    match byte {
        0xff => f32::NAN,
        0 => f32::from_bits(1 << 22),
        byte => f32::from_bits(u32::from(byte) << 23),
    }
}

/// An E2M1 number: a sign, two bits of exponent, one of mantissa.
fn e2m1(code: u32) -> f32 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][(code & 7) as usize];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// Both numbers of each byte, the first in its lower half; `bytes` has a byte a value, `[row][byte]`.
pub(super) fn pairs_along_rows(bytes: &[f32]) -> Vec<f32> {
    bytes.iter().flat_map(|&byte| [e2m1(byte as u32), e2m1(byte as u32 >> 4)]).collect()
}

/// Both numbers of each byte where a row's bytes lie a line apart, `[byte][row]`: each line becomes two.
pub(super) fn pairs_down_columns(bytes: &[f32], rows: usize) -> Vec<f32> {
    let halves =
        |line: &[f32], shift: u32| line.iter().map(|&byte| e2m1(byte as u32 >> shift)).collect::<Vec<_>>();
    bytes.chunks_exact(rows).flat_map(|line| [halves(line, 0), halves(line, 4)].concat()).collect()
}

impl ScaledKind {
    /// Factors of a row that one product has.
    pub(super) fn per_row(self) -> usize {
        match self {
            Self::Mxf8f6f4 => 1,
            Self::Mxf4 => 2,
            Self::Mxf4nvf4 { per_row } => usize::from(per_row),
        }
    }

    /// Elements that one product contracts.
    pub(super) fn depth(self) -> usize {
        if self == Self::Mxf8f6f4 { ROW_BYTES } else { 2 * ROW_BYTES }
    }
}

/// Multiplies A, `[row][k]`, by its factors, `[row][factor]`.
pub(super) fn scale_rows(a: &mut [f32], k: usize, factors: &[f32], per_row: usize) {
    for (row, factors) in a.chunks_exact_mut(k).zip(factors.chunks_exact(per_row)) {
        for (block, factor) in row.chunks_exact_mut(k / per_row).zip(factors) {
            block.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// Multiplies B, `[k][column]`, by its factors, `[column][factor]`.
pub(super) fn scale_columns(b: &mut [f32], n: usize, factors: &[f32], per_row: usize) {
    let block = b.len() / n / per_row;
    for (k, line) in b.chunks_exact_mut(n).enumerate() {
        for (column, x) in line.iter_mut().enumerate() {
            *x *= factors[column * per_row + k / block];
        }
    }
}
