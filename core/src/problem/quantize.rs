//! The conversion of one tensor to a format with scales by blocks, as a problem that a device plans. The result has the
//! bits that [`BlockFormat::quantize`] gives on the host.

use super::{MAX_HEAD_DIM, MAX_SEQLEN, check_input, check_output, check_unit_stride};
use crate::block_scales::{BlockAxis, BlockFormat};
use crate::dtype::DType;
use crate::error::{ProblemError, ensure};
use crate::layout::{Shape, Strides};
use crate::problem::BYTE;
use crate::setters::setters;

/// Source of the scale of a whole tensor, an f32 by which its numbers are divided before their blocks are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorScale {
    /// The scale is 1 and is not in memory.
    One,
    /// The caller gives the scale. If it is not positive and finite, every block's scale is NaN.
    Given,
    /// The call computes and writes the scale: the largest magnitude / 2688, or 1 as in [`BlockFormat::tensor_scale`].
    Written,
}

/// A conversion without its pointers: a tensor `[batch, seq, head, dim]` to elements and scales.
///
/// The scales are `[batch, seq, head, ceil(dim / block)]` for Q and K, whose blocks lie along `dim`, and
/// `[batch, ceil(seq / block), head, dim]` for V, whose blocks lie along `seq`. Pages are sequences; packed rows are
/// one sequence.
///
/// ```
/// use fmha_core::block_scales::{BlockAxis, BlockFormat};
/// use fmha_core::{DType, QuantizeProblem, Shape};
///
/// let k = Shape { batch: 2, seq: 100, head: 4, dim: 128 };
/// let problem = QuantizeProblem::new(BlockFormat::Nvfp4, BlockAxis::Dim, DType::Bf16, k);
/// assert_eq!(problem.stored().dim, 64);
/// assert_eq!(problem.of_scales().dim, 8);
/// problem.validate()?;
/// # Ok::<(), fmha_core::ProblemError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct QuantizeProblem {
    /// Format of the elements and scales.
    pub format: BlockFormat,
    /// Axis of the blocks: `Dim` for Q and K, `Rows` for V.
    pub axis: BlockAxis,
    /// Axis of the two numbers that share a byte, in NVFP4: `Rows`, which is a column-major V, goes with blocks of
    /// rows.
    pub pairs: BlockAxis,
    /// Type of the numbers: f32, f16 or bf16.
    pub dtype: DType,
    /// Extents of the tensor.
    pub shape: Shape,
    /// The scale of the whole tensor: `Written` for NVFP4, `One` otherwise, until it is set.
    pub tensor_scale: TensorScale,
    /// Strides of the tensor, in elements.
    pub x: Strides,
    /// Strides of the stored elements, in bytes.
    pub elements: Strides,
    /// Strides of the scales, in bytes.
    pub scales: Strides,
}

impl QuantizeProblem {
    /// A conversion whose tensors are contiguous.
    #[must_use]
    pub fn new(format: BlockFormat, axis: BlockAxis, dtype: DType, shape: Shape) -> Self {
        let tensor_scale = if format == BlockFormat::Nvfp4 { TensorScale::Written } else { TensorScale::One };
        let unset = Strides { batch: 0, seq: 0, head: 0, dim: 1 };
        let mut problem = Self {
            format,
            axis,
            pairs: BlockAxis::Dim,
            dtype,
            shape,
            tensor_scale,
            x: Strides::bshd(shape),
            elements: unset,
            scales: unset,
        };
        problem.elements = Strides::bshd(problem.stored());
        problem.scales = Strides::bshd(problem.of_scales());
        problem
    }

    setters! {
        /// Source of the scale of the whole tensor.
        tensor_scale: TensorScale => tensor_scale;
        /// Strides of the tensor, in elements.
        strides: Strides => x;
        /// Strides of the stored elements, in bytes.
        strides_elements: Strides => elements;
        /// Strides of the scales, in bytes.
        strides_scales: Strides => scales;
    }

    /// Lays out rows contiguously, in bytes and in memory, as in a column-major V.
    #[must_use]
    pub fn by_columns(mut self) -> Self {
        self.pairs = BlockAxis::Rows;
        self.elements = Strides::bhds(self.stored());
        self
    }

    /// Extents of the stored elements, in bytes.
    #[must_use]
    pub fn stored(&self) -> Shape {
        let each = self.format.elems_per_byte();
        match self.pairs {
            BlockAxis::Dim => Shape { dim: self.shape.dim.div_ceil(each), ..self.shape },
            BlockAxis::Rows => Shape { seq: self.shape.seq.div_ceil(each), ..self.shape },
        }
    }

    /// Extents of the scales.
    #[must_use]
    pub fn of_scales(&self) -> Shape {
        let block = self.format.block_size();
        match self.axis {
            BlockAxis::Dim => Shape { dim: self.shape.dim.div_ceil(block), ..self.shape },
            BlockAxis::Rows => Shape { seq: self.shape.seq.div_ceil(block), ..self.shape },
        }
    }

    /// Checks everything that can be checked without the device.
    ///
    /// # Errors
    /// The first contradiction found, with the field's name and its number.
    pub fn validate(self) -> Result<ValidQuantize, ProblemError> {
        let Self { format, shape, dtype, .. } = self;
        for (field, value) in [("batch", shape.batch), ("seq", shape.seq), ("head", shape.head)] {
            ensure!(value <= MAX_SEQLEN, field, "{field} {value} is larger than {MAX_SEQLEN}");
        }
        ensure!(
            (1..=MAX_HEAD_DIM).contains(&shape.dim),
            "dim",
            "dim {} is not in 1..={MAX_HEAD_DIM}",
            shape.dim
        );
        ensure!(
            matches!(dtype, DType::F32 | DType::F16 | DType::Bf16),
            "dtype",
            "dtype {dtype} is not f32, f16 or bf16, from which a tensor is brought to {format}"
        );
        ensure!(
            self.pairs == BlockAxis::Dim || self.axis == BlockAxis::Rows,
            "pairs",
            "pairs {:?} beside axis {:?}: Q and K have pairs along their rows",
            self.pairs,
            self.axis
        );
        ensure!(
            format == BlockFormat::Nvfp4 || self.tensor_scale == TensorScale::One,
            "tensor_scale",
            "tensor_scale {:?} beside format {format}, whose tensors have a scale of 1",
            self.tensor_scale
        );
        check_input("x", self.x, shape, dtype)?;
        let (stored, of_scales) = (self.stored(), self.of_scales());
        match self.pairs {
            BlockAxis::Dim => check_output("elements", self.elements, stored, BYTE)?,
            BlockAxis::Rows => {
                check_input("elements", self.elements, stored, BYTE)?;
                check_unit_stride("elements", "seq", self.elements.seq, stored.seq)?;
                injective("elements", self.elements, stored)?;
            }
        }
        check_input("scales", self.scales, of_scales, BYTE)?;
        injective("scales", self.scales, of_scales)?;
        Ok(ValidQuantize(self))
    }
}

/// Checks that the strides of an output give each byte an address of its own.
///
/// # Errors
/// Strides that give two bytes one address.
fn injective(name: &'static str, strides: Strides, shape: Shape) -> Result<(), ProblemError> {
    ensure!(
        strides.is_injective(shape),
        name,
        "{name} strides {strides:?} give two elements of {shape:?} one address"
    );
    Ok(())
}

/// A conversion without contradictions, made by [`QuantizeProblem::validate`].
#[derive(Clone, Debug, PartialEq)]
pub struct ValidQuantize(QuantizeProblem);

impl std::ops::Deref for ValidQuantize {
    type Target = QuantizeProblem;

    fn deref(&self) -> &QuantizeProblem {
        &self.0
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { batch: 2, seq: 21, head: 3, dim: 40 };

    fn of(format: BlockFormat, axis: BlockAxis) -> QuantizeProblem {
        QuantizeProblem::new(format, axis, DType::Bf16, SHAPE)
    }

    #[test]
    fn a_conversion_has_the_extents_of_the_contract() {
        let extents = |problem: QuantizeProblem| {
            let (stored, scales) = (problem.stored(), problem.of_scales());
            problem.validate().unwrap();
            [(stored.seq, stored.dim), (scales.seq, scales.dim)]
        };
        assert_eq!(extents(of(BlockFormat::Mxfp8E4m3, BlockAxis::Dim)), [(21, 40), (21, 2)]);
        assert_eq!(extents(of(BlockFormat::Mxfp8E5m2, BlockAxis::Rows)), [(21, 40), (1, 40)]);
        assert_eq!(extents(of(BlockFormat::Nvfp4, BlockAxis::Dim)), [(21, 20), (21, 3)]);
        assert_eq!(extents(of(BlockFormat::Nvfp4, BlockAxis::Rows)), [(21, 20), (2, 40)]);
        let columns = of(BlockFormat::Nvfp4, BlockAxis::Rows).by_columns();
        assert_eq!(extents(columns), [(11, 40), (2, 40)]);
    }

    #[test]
    fn a_conversion_names_the_field_that_contradicts() {
        let sound = of(BlockFormat::Nvfp4, BlockAxis::Dim);
        let with = |change: fn(&mut QuantizeProblem)| {
            let mut problem = sound.clone();
            change(&mut problem);
            problem.validate().unwrap_err()
        };
        for (error, field, said) in [
            (with(|it| it.shape.dim = 0), "dim", "dim 0 is not in 1..="),
            (with(|it| it.shape.seq = u32::MAX), "seq", "seq 4294967295 is larger"),
            (with(|it| it.dtype = DType::E4m3Fn), "dtype", "dtype e4m3fn"),
            (with(|it| it.pairs = BlockAxis::Rows), "pairs", "pairs Rows beside axis Dim"),
            (
                with(|it| it.format = BlockFormat::Mxfp8E4m3),
                "tensor_scale",
                "Written beside format mxfp8_e4m3",
            ),
            (with(|it| it.x.seq = -1), "x", "x.seq stride -1"),
            (with(|it| it.elements.dim = 2), "elements", "elements.dim stride 2 is not 1"),
            (with(|it| it.elements.seq = 0), "elements", "one address"),
            (with(|it| it.scales.head = 1), "scales", "one address"),
        ] {
            assert_eq!(error.field, field, "{error}");
            assert!(error.text.contains(said), "{error}");
        }
    }
}
