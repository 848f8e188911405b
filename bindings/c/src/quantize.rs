//! The conversion to a format with scales by blocks: from the C structs to the problem and its operands.

use fmha::block_scales::BlockAxis;
use fmha::{DType, ProblemError, QuantizeArgs, QuantizeProblem, Shape, Strides, TensorScale, ValidFwd};

use crate::host::{block_format, dtype, flag, none, not_in, size, strides, struct_bytes};
use crate::plan::{Memory, present};
use crate::structs::{
    FMHA_SCALE_GIVEN, FMHA_SCALE_ONE, FMHA_SCALE_WRITTEN, FmhaQuantizeArgs, FmhaQuantizeProblem,
};

/// The problem of a conversion.
pub(crate) fn problem(given: &FmhaQuantizeProblem) -> Result<QuantizeProblem, ProblemError> {
    struct_bytes::<FmhaQuantizeProblem>(given.struct_bytes)?;
    none("reserved", given.reserved)?;
    let shape = Shape {
        batch: size("batch", given.batch)?,
        seq: size("seqlen", given.seqlen)?,
        head: size("num_heads", given.num_heads)?,
        dim: size("dim", given.dim)?,
    };
    let of_rows = flag("blocks_of_rows", given.blocks_of_rows)?;
    let axis = if of_rows { BlockAxis::Rows } else { BlockAxis::Dim };
    let of_tensor = match given.scale_of_tensor {
        FMHA_SCALE_ONE => TensorScale::One,
        FMHA_SCALE_GIVEN => TensorScale::Given,
        FMHA_SCALE_WRITTEN => TensorScale::Written,
        other => return Err(not_in("scale_of_tensor", other, "FMHA_SCALE_ONE ... FMHA_SCALE_WRITTEN", 2)),
    };
    let format = block_format(given.format)?;
    let mut problem = QuantizeProblem::new(format, axis, dtype("dtype", given.dtype)?, shape);
    if flag("pairs_of_rows", given.pairs_of_rows)? {
        problem = problem.by_columns();
    }
    Ok(problem
        .tensor_scale(of_tensor)
        .strides(strides(&given.x))
        .strides_elements(strides(&given.elements))
        .strides_scales(strides(&given.scales)))
}

/// Core's error about a conversion, with the name and the number of the C field.
pub(crate) fn in_c(error: ProblemError, given: &FmhaQuantizeProblem) -> ProblemError {
    let (field, number) = match error.field {
        "seq" => ("seqlen", given.seqlen),
        "head" => ("num_heads", given.num_heads),
        "pairs" => ("pairs_of_rows", given.pairs_of_rows.into()),
        "tensor_scale" => ("scale_of_tensor", given.scale_of_tensor.into()),
        _ => return error,
    };
    // Core's sentence begins with its own name and value.
    let rest = error.text.splitn(3, ' ').nth(2).unwrap_or_default();
    ProblemError::new(field, format!("{field} {number} {rest}"))
}

impl Memory {
    /// The operands of a run of a conversion, without its scratch.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`](crate::FmhaPlan::run).
    pub(crate) unsafe fn quantize<'a>(
        self,
        problem: &QuantizeProblem,
        given: &FmhaQuantizeArgs,
    ) -> Result<QuantizeArgs<'a>, ProblemError> {
        let bytes = |strides: Strides, shape: Shape| strides.extent(shape).unwrap_or(u64::MAX);
        let x = ValidFwd::extent_bytes(problem.x, problem.shape, problem.dtype);
        let elements = bytes(problem.elements, problem.stored());
        let scales = bytes(problem.scales, problem.of_scales());
        present("x", given.x, x)?;
        present("elements", given.elements, elements)?;
        present("scales", given.scales, scales)?;
        let is = |wanted| problem.tensor_scale == wanted;
        // SAFETY: the caller keeps the contract of `quantize`.
        unsafe {
            let to_elements = self.write(given.elements, elements, problem.format.elem());
            let to_scales = self.write(given.scales, scales, problem.format.scale_elem());
            let tensor_scale =
                self.read_if("tensor_scale", is(TensorScale::Given), given.tensor_scale, 4, DType::F32)?;
            let written =
                self.write_if("written_scale", is(TensorScale::Written), given.written_scale, 4, DType::F32)?;
            Ok(QuantizeArgs::new(self.read(given.x.cast(), x, problem.dtype), to_elements, to_scales)
                .tensor_scale(tensor_scale)
                .written_scale(written))
        }
    }
}
