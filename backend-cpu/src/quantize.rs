//! A planned conversion to a format with scales by blocks: `BlockFormat::quantize` over the rows of each head.

use std::sync::atomic::{AtomicU32, Ordering};

use fmha_core::block_scales::{BlockAxis, BlockFormat, Quantized};
use fmha_core::host_memory::filled;
use fmha_core::quantize::{TensorScale, ValidQuantize};
use fmha_core::{QuantizeArgs, Result, Shape, Strides};

use crate::tasks::Threads;

/// A call that converts a tensor.
pub(crate) struct Conversion<'a> {
    pub(crate) problem: &'a ValidQuantize,
    pub(crate) args: &'a QuantizeArgs<'a>,
}

/// The bytes of an output, of which each task writes those of its own heads.
struct Output {
    first: *mut u8,
    strides: Strides,
    shape: Shape,
}

// SAFETY: core saw that no two elements of an output share a byte, and a task writes one head's.
unsafe impl Sync for Output {}

impl Output {
    /// Writes a head's bytes, `[seq, dim]`.
    fn put(&self, (batch, head): (u32, u32), bytes: &[u8]) {
        for (row, of_row) in (0..).zip(bytes.chunks_exact((self.shape.dim as usize).max(1))) {
            for (d, &byte) in (0..).zip(of_row) {
                let at = self.strides.offset(batch, row, head, d);
                // SAFETY: core saw that the output covers its extents, whose every element this is one of.
                unsafe { self.first.offset(at as isize).write(byte) };
            }
        }
    }
}

impl Conversion<'_> {
    /// Computes it.
    ///
    /// # Errors
    /// Memory for scratch that the system refuses.
    pub(crate) fn run(&self, threads: &Threads) -> Result<()> {
        let Self { problem, args } = *self;
        let (shape, heads) = (problem.shape, problem.shape.head as usize);
        let tasks = shape.batch as usize * heads;
        let of = |task: usize| ((task / heads) as u32, (task % heads) as u32);
        let mut states: Vec<Vec<f32>> = Vec::with_capacity(threads.used(tasks));
        for _ in 0..threads.used(tasks) {
            states.push(filled(shape.seq as usize * shape.dim as usize, 0.0f32)?);
        }
        let scale = match problem.tensor_scale {
            TensorScale::One => 1.0,
            TensorScale::Given => {
                let given = args.tensor_scale.and_then(|slice| slice.as_host());
                given.map_or(1.0, |bytes| bytemuck::pod_read_unaligned(&bytes[..4]))
            }
            TensorScale::Written => {
                // Bits of magnitudes grow with them.
                let most = AtomicU32::new(0);
                threads.for_each(&mut states, tasks, |values, task| {
                    self.read(of(task), values);
                    let of_head = values.iter().filter(|x| !x.is_nan()).map(|x| x.abs().to_bits()).max();
                    most.fetch_max(of_head.unwrap_or(0), Ordering::Relaxed);
                });
                let scale = problem.format.tensor_scale(&[f32::from_bits(most.into_inner())]);
                if let Some(written) = &args.written_scale {
                    // SAFETY: core saw that it has an aligned f32, which nothing else of the call touches.
                    unsafe { written.as_mut_ptr().cast::<f32>().write(scale) };
                }
                scale
            }
        };
        let output = |first, strides, shape| Output { first, strides, shape };
        let elements = output(args.elements.as_mut_ptr(), problem.elements, problem.stored());
        let scales = output(args.scales.as_mut_ptr(), problem.scales, problem.of_scales());
        threads.for_each(&mut states, tasks, |values, task| {
            self.read(of(task), values);
            let stored = self.converted(values, scale);
            elements.put(of(task), &stored.0);
            scales.put(of(task), &stored.1);
        });
        Ok(())
    }

    /// Reads a head's numbers.
    fn read(&self, (batch, head): (u32, u32), to: &mut [f32]) {
        let Self { problem, args } = *self;
        let bytes = args.x.as_host().unwrap_or_default();
        let (size, dim) = (problem.dtype.size_bytes() as usize, problem.shape.dim as usize);
        for (at, to) in to.iter_mut().enumerate() {
            let at = problem.x.offset(batch, (at / dim) as u32, head, (at % dim) as u32) as usize;
            *to = problem.dtype.read(&bytes[size * at..][..size]) as f32;
        }
    }

    /// Elements and scales of a head.
    fn converted(&self, values: &[f32], scale: f32) -> (Vec<u8>, Vec<u8>) {
        let (format, dim) = (self.problem.format, self.problem.shape.dim as usize);
        let Ok(Quantized { elements, scales, .. }) = format.quantize(values, dim, self.problem.axis, scale)
        else {
            // A tensor's scale that is not positive and finite.
            let (elements, scales) = (self.problem.stored(), self.problem.of_scales());
            let count = |shape: Shape| shape.seq as usize * shape.dim as usize;
            return (vec![0; count(elements)], vec![0x7f; count(scales)]);
        };
        if format != BlockFormat::Nvfp4 || self.problem.pairs == BlockAxis::Dim {
            return (elements, scales);
        }
        let (width, rows) = (dim.div_ceil(2), values.len() / dim);
        let code = |row: usize, d: usize| {
            if row < rows { elements[row * width + d / 2] >> (4 * (d % 2)) & 0xf } else { 0 }
        };
        let pair = |row: usize, d: usize| code(2 * row, d) | code(2 * row + 1, d) << 4;
        let by_rows = (0..rows.div_ceil(2)).flat_map(|row| (0..dim).map(move |d| (row, d)));
        (by_rows.map(|(row, d)| pair(row, d)).collect(), scales)
    }
}
