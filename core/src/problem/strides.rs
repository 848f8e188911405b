//! Requirements on a tensor's strides.

use crate::dtype::DType;
use crate::error::{ProblemError, ensure};
use crate::layout::{Shape, Strides, VLayout};

/// Largest extent of a tensor in bytes: half of what a pointer difference can express.
pub(crate) const MAX_EXTENT_BYTES: u64 = 1 << 62;

/// Checks an input's strides: not negative, and inside the address range.
pub(crate) fn check_input(
    name: &'static str,
    strides: Strides,
    shape: Shape,
    dtype: DType,
) -> Result<(), ProblemError> {
    if let Some((axis, stride)) = strides.negative_axis(shape) {
        return Err(ProblemError::new(name, format!("{name}.{axis} stride {stride} is negative")));
    }
    let most = MAX_EXTENT_BYTES / dtype.size_bytes();
    let fits = strides.extent(shape).is_some_and(|elems| elems <= most);
    ensure!(fits, name, "{name} strides {strides:?} reach beyond 2^62 bytes over {shape:?}");
    // The number of elements is checked separately, since strides of 0 do not limit it.
    ensure!(shape.num_elems() <= most, name, "{name} {shape:?} has more than {most} elements");
    Ok(())
}

/// Checks an output's strides: 1 within a row, and no two elements at one address.
pub(crate) fn check_output(
    name: &'static str,
    strides: Strides,
    shape: Shape,
    dtype: DType,
) -> Result<(), ProblemError> {
    check_input(name, strides, shape, dtype)?;
    check_unit_stride(name, "dim", strides.dim, shape.dim)?;
    ensure!(
        strides.is_injective(shape),
        name,
        "{name} strides {strides:?} give two elements of {shape:?} one address"
    );
    Ok(())
}

/// Checks V's strides: 1 along the axis that its layout names.
pub(crate) fn check_v(
    name: &'static str,
    strides: Strides,
    layout: VLayout,
    shape: Shape,
    dtype: DType,
) -> Result<(), ProblemError> {
    check_input(name, strides, shape, dtype)?;
    match layout {
        VLayout::RowMajor => check_unit_stride(name, "dim", strides.dim, shape.dim),
        VLayout::ColMajor => check_unit_stride(name, "seq", strides.seq, shape.seq),
    }
}

pub(crate) fn check_unit_stride(
    name: &'static str,
    axis: &str,
    stride: i64,
    extent: u32,
) -> Result<(), ProblemError> {
    ensure!(stride == 1 || extent <= 1, name, "{name}.{axis} stride {stride} is not 1");
    Ok(())
}
