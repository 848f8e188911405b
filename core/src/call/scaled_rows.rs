//! Rows of Q, K and V that have scales by blocks, read in host memory.

use crate::args::{DevSlice, ScoreArgs};
use crate::block_scales::BlockFormat;
use crate::error::ProblemError;
use crate::layout::{Strides, VLayout};
use crate::problem::{FwdProblem, SCALE_NAMES};

/// Elements and scales of one tensor.
#[derive(Clone, Copy, Debug)]
pub struct ScaledRows<'a> {
    format: BlockFormat,
    elements: &'a [u8],
    strides: Strides,
    /// Whether the two elements in a byte belong to two keys, instead of being neighbours in a row.
    pairs_of_keys: bool,
    scales: &'a [u8],
    scale_strides: Strides,
    /// Whether a block's elements are keys.
    blocks_of_keys: bool,
}

impl<'a> ScaledRows<'a> {
    /// Q, K and V of a call whose arguments core has checked; `None` without scales by blocks.
    ///
    /// # Errors
    /// An operand that is missing or not in host memory.
    pub fn of(
        problem: &FwdProblem,
        tensors: [DevSlice<'a>; 3],
        score: &ScoreArgs<'a>,
    ) -> Result<Option<[Self; 3]>, ProblemError> {
        let Some(scales) = &problem.block_scales else { return Ok(None) };
        let host = |name: &'static str, slice: Option<DevSlice<'a>>| {
            slice
                .and_then(|slice| slice.as_host())
                .ok_or_else(|| ProblemError::new(name, format!("{name} is missing or not in host memory")))
        };
        let [scale_q, scale_k, scale_v] = score.block_scales();
        let [name_q, name_k, name_v] = SCALE_NAMES;
        let [q, k, v] = tensors;
        let rows = |elements, strides, scales_of, scale_strides, is_v: bool| Self {
            format: scales.format,
            elements,
            strides,
            pairs_of_keys: is_v && problem.layout.v == VLayout::ColMajor,
            scales: scales_of,
            scale_strides,
            blocks_of_keys: is_v,
        };
        Ok(Some([
            rows(host("q", Some(q))?, problem.strides.q, host(name_q, scale_q)?, scales.q, false),
            rows(host("k", Some(k))?, problem.strides.k, host(name_k, scale_k)?, scales.k, false),
            rows(host("v", Some(v))?, problem.strides.v, host(name_v, scale_v)?, scales.v, true),
        ]))
    }

    /// A row's elements times the scales of their blocks: exact, but infinite beyond f32. The row is that of a tensor
    /// (batch or page, row, head), and has as many elements as `to`.
    ///
    /// # Panics
    /// Rows that do not lie in the tensor.
    pub fn read(&self, (batch, row, head): (u32, u32, u32), to: &mut [f32]) {
        let (each, block) = (self.format.elems_per_byte(), self.format.block_size());
        let (byte_row, half) = if self.pairs_of_keys { (row / each, row % each) } else { (row, 0) };
        let (scale_row, columns) = if self.blocks_of_keys { (row / block, 1) } else { (row, block) };
        for (d, to) in (0..).zip(to) {
            let (column, half) = if self.pairs_of_keys { (d, half) } else { (d / each, d % each) };
            let byte = self.elements[self.strides.offset(batch, byte_row, head, column) as usize];
            let scale = self.scales[self.scale_strides.offset(batch, scale_row, head, d / columns) as usize];
            *to = self.format.elements(byte)[half as usize] * self.format.scale(scale);
        }
    }
}
