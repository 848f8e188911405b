//! Formats of small elements with one scale for each block of them: MXFP8 and NVFP4.
//!
//! MXFP8 is that of the OCP Microscaling Formats specification (version 1.0): FP8 elements, a power of two for each
//! 32. NVFP4 has E2M1 elements and an E4M3 scale for each 16. The section "Scales by blocks" of the contract
//! defines how a call uses them; this file converts rows of numbers to these formats and back.
//!
//! ```
//! use fmha_core::BlockFormat;
//! use fmha_core::block_scales::BlockAxis;
//!
//! let values: Vec<f32> = (0..64).map(|i| i as f32 / 8.0).collect();
//! let scale = BlockFormat::Nvfp4.tensor_scale(&values);
//! let stored = BlockFormat::Nvfp4.quantize(&values, 64, BlockAxis::Dim, scale)?;
//! assert_eq!((stored.elements.len(), stored.scales.len()), (32, 4));
//! let back = BlockFormat::Nvfp4.dequantize(&stored.elements, &stored.scales, 64, BlockAxis::Dim, scale)?;
//! // Half of the widest step of E2M1, 2, times the scale of a block whose largest number is 7.875.
//! assert!(values.iter().zip(&back).all(|(x, y)| (x - y).abs() <= 1.4));
//! # Ok::<(), fmha_core::ProblemError>(())
//! ```

use std::fmt;
use std::str::FromStr;

use crate::args::ElemType;
use crate::dtype::DType;
use crate::error::{ProblemError, ensure};

/// Magnitudes of the eight E2M1 codes without a sign.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// A byte with two E2M1 numbers (OCP Microscaling Formats, 1.0), the first in its lower four bits. A number has a
/// sign, two exponent bits with bias 1 and one mantissa bit; the largest is 6, and there is neither NaN nor
/// infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct E2m1Pair(u8);

impl E2m1Pair {
    /// Largest number that an element can have.
    pub const MAX: f32 = 6.0;

    /// Makes a pair from its byte.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// The byte with both elements.
    #[must_use]
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// Both numbers, in order; the conversion is exact.
    #[must_use]
    pub fn to_f32(self) -> [f32; 2] {
        [self.0 & 0xf, self.0 >> 4].map(|code| {
            let magnitude = E2M1[usize::from(code & 7)];
            if code & 8 == 0 { magnitude } else { -magnitude }
        })
    }

    /// The nearest pair, ties to the even code, saturating at 6 with the sign kept. NaN, which the format lacks, gives
    /// 6.
    #[must_use]
    pub fn from_f64_saturating(values: [f64; 2]) -> Self {
        let [first, second] = values.map(|value| {
            let magnitude = value.abs();
            let below = |&code: &u8| {
                let middle = f64::from(E2M1[usize::from(code)] + E2M1[usize::from(code) - 1]) / 2.0;
                // A tie goes up to an even code, and down from an odd one.
                magnitude > middle || magnitude == middle && code % 2 == 0
            };
            let code = if value.is_nan() { 7 } else { (1..8).take_while(below).count() as u8 };
            code | if value.is_sign_negative() && !value.is_nan() { 8 } else { 0 }
        });
        Self(first | second << 4)
    }
}

/// A power of two, 2^(bits - 127); 255 is NaN (OCP Microscaling Formats, 1.0). It has no sign, no 0 and no infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct E8m0(u8);

impl E8m0 {
    /// Makes a scale from its byte.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// The byte.
    #[must_use]
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// The scale as f32. The conversion is exact, also for 2^-127, which is subnormal in f32.
    #[must_use]
    pub fn to_f32(self) -> f32 {
        match self.0 {
            0xff => f32::NAN,
            0 => f32::from_bits(1 << 22),
            bits => f32::from_bits(u32::from(bits) << 23),
        }
    }

    /// The smallest power of two that is not below `value`, saturating at 2^-127 and 2^127. NaN gives NaN.
    #[must_use]
    pub fn at_least(value: f64) -> Self {
        if value.is_nan() {
            return Self(0xff);
        }
        Self((0..=254).find(|&bits| f64::from(Self(bits).to_f32()) >= value).unwrap_or(254))
    }
}

/// A format with one scale for each block of elements, in which Q, K and V are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BlockFormat {
    /// E4M3 elements, with an [`E8m0`] scale for each 32.
    Mxfp8E4m3,
    /// E5M2 elements, with an [`E8m0`] scale for each 32.
    Mxfp8E5m2,
    /// E2M1 elements in [pairs](E2m1Pair), with an E4M3 scale without sign for each 16.
    Nvfp4,
}

/// The axis of a matrix along which blocks lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BlockAxis {
    /// Blocks lie along a row, as for Q and K.
    Dim,
    /// Blocks lie down a column, as for V, whose rows are keys.
    Rows,
}

/// A matrix in a block format.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quantized {
    /// Elements `[rows, dim]`, one byte each; for NVFP4 `[rows, ceil(dim / 2)]`, one byte for each pair.
    pub elements: Vec<u8>,
    /// Scales `[rows, ceil(dim / block)]`, or `[ceil(rows / block), dim]` if blocks lie down columns.
    pub scales: Vec<u8>,
}

impl BlockFormat {
    /// Every format.
    pub const ALL: [Self; 3] = [Self::Mxfp8E4m3, Self::Mxfp8E5m2, Self::Nvfp4];

    /// The name in the command, in Python and in errors.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mxfp8E4m3 => "mxfp8_e4m3",
            Self::Mxfp8E5m2 => "mxfp8_e5m2",
            Self::Nvfp4 => "nvfp4",
        }
    }

    /// Number of elements of a block.
    #[must_use]
    pub const fn block_size(self) -> u32 {
        match self {
            Self::Mxfp8E4m3 | Self::Mxfp8E5m2 => 32,
            Self::Nvfp4 => 16,
        }
    }

    /// Number of elements in a byte.
    #[must_use]
    pub const fn elems_per_byte(self) -> u32 {
        match self {
            Self::Mxfp8E4m3 | Self::Mxfp8E5m2 => 1,
            Self::Nvfp4 => 2,
        }
    }

    /// Type of the elements in memory.
    #[must_use]
    pub const fn elem(self) -> ElemType {
        match self {
            Self::Mxfp8E4m3 => ElemType::Number(DType::E4m3Fn),
            Self::Mxfp8E5m2 => ElemType::Number(DType::E5m2),
            Self::Nvfp4 => ElemType::E2m1Pair,
        }
    }

    /// Type of the scales in memory.
    #[must_use]
    pub const fn scale_elem(self) -> ElemType {
        match self {
            Self::Mxfp8E4m3 | Self::Mxfp8E5m2 => ElemType::E8m0,
            Self::Nvfp4 => ElemType::Number(DType::E4m3Fn),
        }
    }

    /// Largest element.
    #[must_use]
    pub const fn max_element(self) -> f64 {
        match self {
            Self::Mxfp8E4m3 => DType::E4m3Fn.max_finite(),
            Self::Mxfp8E5m2 => DType::E5m2.max_finite(),
            Self::Nvfp4 => 6.0,
        }
    }

    /// The elements in a byte; an FP8 byte has one element, which is returned twice.
    #[must_use]
    pub fn elements(self, byte: u8) -> [f32; 2] {
        match self {
            Self::Mxfp8E4m3 => [DType::E4m3Fn.read(&[byte]) as f32; 2],
            Self::Mxfp8E5m2 => [DType::E5m2.read(&[byte]) as f32; 2],
            Self::Nvfp4 => E2m1Pair::from_bits(byte).to_f32(),
        }
    }

    /// A scale's value. The sign bit of an E4M3 scale is not read.
    #[must_use]
    pub fn scale(self, byte: u8) -> f32 {
        match self {
            Self::Mxfp8E4m3 | Self::Mxfp8E5m2 => E8m0::from_bits(byte).to_f32(),
            Self::Nvfp4 => DType::E4m3Fn.read(&[byte & 0x7f]) as f32,
        }
    }

    /// Factor by which P is multiplied before it is rounded to V's element type: for MXFP8 a power of two below the
    /// largest element, for NVFP4 the largest element times the largest scale.
    #[must_use]
    pub fn p_factor(self) -> f64 {
        match self {
            Self::Mxfp8E4m3 => 256.0,
            Self::Mxfp8E5m2 => 32768.0,
            Self::Nvfp4 => self.max_element() * DType::E4m3Fn.max_finite(),
        }
    }

    /// Rounds the values `P = exp(S - max)` of one block of keys like the operand of the product with V.
    pub fn round_p(self, block: &mut [f64]) {
        let factor = self.p_factor();
        match self {
            Self::Mxfp8E4m3 => block.iter_mut().for_each(|p| *p = DType::E4m3Fn.round(*p * factor) / factor),
            Self::Mxfp8E5m2 => block.iter_mut().for_each(|p| *p = DType::E5m2.round(*p * factor) / factor),
            Self::Nvfp4 => {
                if block.iter().any(|p| p.is_nan()) {
                    block.fill(f64::NAN);
                    return;
                }
                let most = block.iter().fold(0.0f64, |most, &p| most.max(p * factor));
                let scale = DType::E4m3Fn.round(most / self.max_element());
                for p in block {
                    let code = E2m1Pair::from_f64_saturating([quotient(*p * factor, scale), 0.0]);
                    *p = f64::from(code.to_f32()[0]) * scale / factor;
                }
            }
        }
    }

    /// The scale of a whole tensor with these values: for NVFP4 their largest magnitude / 2688, so that block
    /// scales reach 448. It is 1 for MXFP8, for zeros, and if it would not fit f32.
    #[must_use]
    pub fn tensor_scale(self, values: &[f32]) -> f32 {
        let most = largest(values.iter().copied());
        let scale = (most / self.p_factor()) as f32;
        if self == Self::Nvfp4 && scale.is_normal() { scale } else { 1.0 }
    }

    /// Number of bytes of a `[rows, dim]` matrix's elements, and of its scales.
    #[must_use]
    pub fn sizes(self, rows: usize, dim: usize, axis: BlockAxis) -> (usize, usize) {
        let block = self.block_size() as usize;
        let scales = match axis {
            BlockAxis::Dim => rows * dim.div_ceil(block),
            BlockAxis::Rows => rows.div_ceil(block) * dim,
        };
        (rows * dim.div_ceil(self.elems_per_byte() as usize), scales)
    }

    /// Converts a matrix of rows of `dim` numbers: each is divided by its block's scale and `tensor_scale`, and rounded
    /// to the nearest element, ties to even, saturating.
    ///
    /// The scale is, for MXFP8, the smallest power of two with which no element of the block overflows; for NVFP4,
    /// the block's largest magnitude / 6 / `tensor_scale`, rounded to the nearest E4M3, saturating. A NaN stays NaN
    /// in MXFP8, and makes its block's scale NaN in NVFP4, which has no NaN element; an infinity counts as f32's
    /// largest number.
    ///
    /// # Errors
    /// `dim` of 0 or that does not divide the number of values, and a `tensor_scale` that is not positive and finite.
    pub fn quantize(
        self,
        values: &[f32],
        dim: usize,
        axis: BlockAxis,
        tensor_scale: f32,
    ) -> Result<Quantized, ProblemError> {
        let rows = self.rows(values.len(), dim, tensor_scale)?;
        let (bytes, scales) = self.sizes(rows, dim, axis);
        let mut stored = Quantized { elements: vec![0; bytes], scales: vec![0; scales] };
        let tensor_scale = f64::from(tensor_scale);
        for (at, scale) in stored.scales.iter_mut().enumerate() {
            let most = largest(self.places(at, rows, dim, axis).map(|(row, d)| values[row * dim + d]));
            let has_nan = self.places(at, rows, dim, axis).any(|(row, d)| values[row * dim + d].is_nan());
            let wanted = most / self.max_element() / tensor_scale;
            *scale = match self {
                Self::Mxfp8E4m3 | Self::Mxfp8E5m2 => E8m0::at_least(wanted).to_bits(),
                Self::Nvfp4 if has_nan => 0x7f,
                Self::Nvfp4 => crate::fp8::E4m3Fn::from_f64_saturating(wanted).to_bits(),
            };
        }
        let mut row_values = vec![0.0; dim.next_multiple_of(2)];
        for row in 0..rows {
            for d in 0..dim {
                let scale = f64::from(self.scale(stored.scales[self.scale_at(row, d, dim, axis)]));
                let value = finite(values[row * dim + d]);
                row_values[d] = if scale.is_nan() { 0.0 } else { quotient(value, scale * tensor_scale) };
            }
            let width = bytes / rows;
            let to = &mut stored.elements[row * width..][..width];
            match self {
                Self::Mxfp8E4m3 => {
                    to.iter_mut().zip(&row_values).for_each(|(to, &x)| DType::E4m3Fn.write(x, one(to)));
                }
                Self::Mxfp8E5m2 => {
                    to.iter_mut().zip(&row_values).for_each(|(to, &x)| DType::E5m2.write(x, one(to)));
                }
                Self::Nvfp4 => to.iter_mut().zip(row_values.as_chunks::<2>().0).for_each(|(to, &pair)| {
                    *to = E2m1Pair::from_f64_saturating(pair).to_bits();
                }),
            }
        }
        Ok(stored)
    }

    /// The numbers of a matrix of rows of `dim` elements: element times block scale, which is exact, times
    /// `tensor_scale`, rounded to f32.
    ///
    /// # Errors
    /// Elements and scales whose numbers of bytes do not belong to one matrix.
    pub fn dequantize(
        self,
        elements: &[u8],
        scales: &[u8],
        dim: usize,
        axis: BlockAxis,
        tensor_scale: f32,
    ) -> Result<Vec<f32>, ProblemError> {
        let width = dim.div_ceil(self.elems_per_byte() as usize);
        let rows = self.rows(elements.len(), width, tensor_scale)?;
        let (_, wanted) = self.sizes(rows, dim, axis);
        let given = scales.len();
        ensure!(
            given == wanted,
            "scales",
            "scales has {given} bytes, but {rows} rows of {dim} elements in {} have {wanted}",
            self.name()
        );
        let value = |row: usize, d: usize| {
            let pair = self.elements(elements[row * width + d / self.elems_per_byte() as usize]);
            let scale = self.scale(scales[self.scale_at(row, d, dim, axis)]);
            pair[d % 2] * scale * tensor_scale
        };
        Ok((0..rows).flat_map(|row| (0..dim).map(move |d| value(row, d))).collect())
    }

    /// Number of rows of a matrix with this number of elements.
    fn rows(self, elems: usize, width: usize, tensor_scale: f32) -> Result<usize, ProblemError> {
        ensure!(
            width > 0 && elems.is_multiple_of(width),
            "dim",
            "dim: {elems} elements are not rows of {width} in {}",
            self.name()
        );
        ensure!(
            tensor_scale > 0.0 && tensor_scale.is_finite(),
            "tensor_scale",
            "tensor_scale {tensor_scale} is not positive and finite"
        );
        Ok(elems / width)
    }

    /// Index of the scale of element (`row`, `d`).
    fn scale_at(self, row: usize, d: usize, dim: usize, axis: BlockAxis) -> usize {
        let block = self.block_size() as usize;
        match axis {
            BlockAxis::Dim => row * dim.div_ceil(block) + d / block,
            BlockAxis::Rows => row / block * dim + d,
        }
    }

    /// Row and column ranges of the elements to which the scale at this position applies.
    fn places(
        self,
        at: usize,
        rows: usize,
        dim: usize,
        axis: BlockAxis,
    ) -> impl Iterator<Item = (usize, usize)> {
        let block = self.block_size() as usize;
        let (row_range, dims) = match axis {
            BlockAxis::Dim => {
                let blocks = dim.div_ceil(block);
                let (row, first) = (at / blocks, at % blocks * block);
                (row..row + 1, first..dim.min(first + block))
            }
            BlockAxis::Rows => {
                let (first, d) = (at / dim * block, at % dim);
                (first..rows.min(first + block), d..d + 1)
            }
        };
        row_range.flat_map(move |row| dims.clone().map(move |d| (row, d)))
    }
}

fn one(byte: &mut u8) -> &mut [u8] {
    std::slice::from_mut(byte)
}

/// The number itself; for an infinity, f32's largest number with its sign.
fn finite(value: f32) -> f64 {
    f64::from(if value.is_infinite() { f32::MAX.copysign(value) } else { value })
}

/// The largest magnitude; NaNs are ignored.
fn largest(values: impl Iterator<Item = f32>) -> f64 {
    values.filter(|value| !value.is_nan()).fold(0.0, |most: f64, value| most.max(finite(value).abs()))
}

/// The quotient by a scale; 0 if the scale is 0, since every element of such a block is 0.
fn quotient(value: f64, scale: f64) -> f64 {
    if scale == 0.0 && !value.is_nan() { 0.0 } else { value / scale }
}

impl fmt::Display for BlockFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for BlockFormat {
    type Err = ProblemError;

    /// Reads the names of [`BlockFormat::name`].
    fn from_str(text: &str) -> Result<Self, ProblemError> {
        Self::ALL.into_iter().find(|format| format.name() == text).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            ProblemError::new(
                "block_scales",
                format!("block_scales `{text}` is no format with scales by blocks (known: {known})"),
            )
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::*;

    fn e2m1(value: f64) -> f32 {
        E2m1Pair::from_f64_saturating([value, 0.0]).to_f32()[0]
    }

    #[test]
    fn e2m1_rounds_to_nearest_even_and_saturates() {
        for byte in 0..=255 {
            let pair = E2m1Pair::from_bits(byte);
            assert_eq!(E2m1Pair::from_f64_saturating(pair.to_f32().map(f64::from)), pair, "{byte:#x}");
        }
        for (tie, even) in
            [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
        {
            assert_eq!(e2m1(tie), even, "{tie}");
            assert_eq!(e2m1(-tie), -even, "-{tie}");
            let codes = |value| E2M1.iter().position(|&x| x == e2m1(value)).unwrap();
            assert_eq!(codes(tie + 1e-9), codes(tie - 1e-9) + 1, "{tie}");
        }
        assert_eq!([e2m1(7.0), e2m1(f64::INFINITY), e2m1(-1e30)], [6.0, 6.0, -6.0]);
    }

    #[test]
    fn e8m0_is_the_power_of_two_that_is_not_below() {
        assert_eq!(E8m0::from_bits(0).to_f32(), 2f32.powi(-127));
        assert_eq!(E8m0::from_bits(127).to_f32(), 1.0);
        assert_eq!(E8m0::from_bits(254).to_f32(), 2f32.powi(127));
        assert!(E8m0::from_bits(255).to_f32().is_nan());
        for (value, wanted) in
            [(0.0, 0), (1.0, 127), (1.000_001, 128), (0.5, 126), (1e300, 254), (f64::NAN, 255)]
        {
            assert_eq!(E8m0::at_least(value).to_bits(), wanted, "{value}");
        }
    }

    /// Test numbers of several magnitudes and both signs.
    fn numbers(count: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 37 % 101) as f32 - 50.0) * 2f32.powi((i / 16 % 9) as i32 - 4)).collect()
    }

    #[test]
    fn numbers_come_back_within_half_a_step_of_their_block() {
        let (rows, dim) = (37, 50);
        let values = numbers(rows * dim);
        for format in BlockFormat::ALL {
            for axis in [BlockAxis::Dim, BlockAxis::Rows] {
                let tensor_scale = format.tensor_scale(&values);
                let stored = format.quantize(&values, dim, axis, tensor_scale).unwrap();
                assert_eq!((stored.elements.len(), stored.scales.len()), format.sizes(rows, dim, axis));
                let back =
                    format.dequantize(&stored.elements, &stored.scales, dim, axis, tensor_scale).unwrap();
                for at in 0..stored.scales.len() {
                    let of_block = || format.places(at, rows, dim, axis).map(|(row, d)| row * dim + d);
                    let most = largest(of_block().map(|i| values[i])) as f32;
                    // Relative error: half of E2M1's last step is 1/6 of the largest element; rounding the scale
                    // itself adds 1/16.
                    let share = if format == BlockFormat::Nvfp4 { 1.0 / 6.0 + 1.0 / 16.0 } else { 1.0 / 8.0 };
                    for i in of_block() {
                        let (x, y) = (values[i], back[i]);
                        assert!((x - y).abs() <= most * share, "{format} {axis:?}: {x} came back as {y}");
                    }
                }
                // Values that the format can represent come back unchanged.
                if format != BlockFormat::Nvfp4 {
                    let again = format.quantize(&back, dim, axis, 1.0).unwrap();
                    let twice = format.dequantize(&again.elements, &again.scales, dim, axis, 1.0).unwrap();
                    assert_eq!(twice, back, "{format} {axis:?}");
                }
            }
        }
    }

    #[test]
    fn no_element_saturates_where_the_scale_can_hold_it() {
        for (format, least) in [(BlockFormat::Mxfp8E4m3, 448.0f32), (BlockFormat::Mxfp8E5m2, 57344.0)] {
            // A value just above the largest element needs the next larger scale.
            let values = [least * 1.01, 1.0];
            let stored = format.quantize(&values, 2, BlockAxis::Dim, 1.0).unwrap();
            assert_eq!(stored.scales, [128]);
            assert_eq!(format.quantize(&[least, 1.0], 2, BlockAxis::Dim, 1.0).unwrap().scales, [127]);
            let infinite = format.quantize(&[f32::NEG_INFINITY], 1, BlockAxis::Dim, 1.0).unwrap();
            let back =
                format.dequantize(&infinite.elements, &infinite.scales, 1, BlockAxis::Dim, 1.0).unwrap();
            assert!(back[0] <= -2f32.powi(127), "{back:?}");
        }
    }

    #[test]
    fn nan_stays_and_zeros_are_zeros() {
        for format in BlockFormat::ALL {
            let mut values = vec![1.0f32; 48];
            values[33] = f32::NAN;
            let stored = format.quantize(&values, 48, BlockAxis::Dim, 1.0).unwrap();
            let back = format.dequantize(&stored.elements, &stored.scales, 48, BlockAxis::Dim, 1.0).unwrap();
            let nans: Vec<usize> = (0..48).filter(|&i| back[i].is_nan()).collect();
            let wanted: Vec<usize> = if format == BlockFormat::Nvfp4 { (32..48).collect() } else { vec![33] };
            assert_eq!(nans, wanted, "{format}");
            let zeros = format.quantize(&[0.0; 16], 16, BlockAxis::Dim, 1.0).unwrap();
            assert!(zeros.elements.iter().all(|&byte| byte == 0) && zeros.scales == [0], "{format}");
        }
    }

    #[test]
    fn p_of_a_block_is_rounded_with_its_factor() {
        let mut block = [1.0, 0.5, 1e-9, 0.0];
        BlockFormat::Mxfp8E4m3.round_p(&mut block);
        assert_eq!(block, [1.0, 0.5, 0.0, 0.0]);
        // The block's scale is 448, so its step at the top is 2 * 448 / 2688.
        let mut block = [1.0, 0.6, 0.01];
        BlockFormat::Nvfp4.round_p(&mut block);
        assert_eq!(block, [1.0, 2.0 / 3.0, 0.0]);
        // A block of small P gets a small scale.
        let mut block = [0.01, 0.005];
        BlockFormat::Nvfp4.round_p(&mut block);
        assert!((block[0] - 0.01).abs() < 0.01 / 16.0 && (block[1] - 0.005).abs() < 0.005 / 8.0, "{block:?}");
        let mut block = [f64::NAN, 0.5];
        BlockFormat::Nvfp4.round_p(&mut block);
        assert!(block.iter().all(|p| p.is_nan()));
    }

    #[test]
    fn what_is_no_matrix_is_refused() {
        let format = BlockFormat::Nvfp4;
        let field = |result: Result<Quantized, ProblemError>| result.unwrap_err().field;
        assert_eq!(field(format.quantize(&[0.0; 5], 2, BlockAxis::Dim, 1.0)), "dim");
        assert_eq!(field(format.quantize(&[0.0; 5], 0, BlockAxis::Dim, 1.0)), "dim");
        assert_eq!(field(format.quantize(&[0.0; 4], 2, BlockAxis::Dim, f32::NAN)), "tensor_scale");
        let error = format.dequantize(&[0; 4], &[0; 3], 4, BlockAxis::Dim, 1.0).unwrap_err();
        assert!(error.field == "scales" && error.text.contains("3 bytes"), "{error}");
        assert!("mxfp4".parse::<BlockFormat>().unwrap_err().text.contains("mxfp4"));
        for format in BlockFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
    }
}
