//! Masks as data from a file: `--mask FILE.npy`.

use std::path::Path;

use fmha::{FwdProblem, Intervals, MaskAxes, MaskBits, QLayout, Totals};
use fmha_conformance::tensors::MaskNumbers;

use crate::failure::Failure;
use crate::npy::{self, MaskElem};
use crate::target::read;

/// A mask's axes before those of one head: sequences, if Q has a batch axis, and heads.
struct Axes {
    of: MaskAxes,
    /// The last two axes.
    matrix: [u64; 2],
}

/// Reads the mask of a file into a problem: i32 are endpoints of intervals, u32 are words of bits, bools are pairs.
///
/// # Errors
/// A file that is none, and a shape that does not fit the problem, with the axis and both numbers.
pub(super) fn load(problem: &mut FwdProblem, totals: Totals, path: &Path) -> Result<MaskNumbers, Failure> {
    let named = |text: String| Failure::wrong(format!("mask {}: {text}", path.display()));
    let mask = npy::decode_mask(read(path)?).map_err(named)?;
    let dims = problem.dims;
    let packed = problem.layout.q == QLayout::Packed;
    let rows = if packed { totals.total_q.unwrap_or(0) } else { dims.seqlen_q };
    let (rows_name, rows) = (if packed { "total_q" } else { "seqlen_q" }, u64::from(rows));
    let axes = axes(&mask.shape, packed, dims.batch).map_err(named)?;
    let [first, last] = axes.matrix;
    let fits = |name: &str, found: u64, wanted: u64| match found == wanted {
        true => Ok(()),
        false => {
            Err(named(format!("{} of shape {:?} has {found} {name}, not {wanted}", mask.elem, mask.shape)))
        }
    };
    let words =
        |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word)).collect();
    let mut numbers = MaskNumbers::default();
    match mask.elem {
        MaskElem::I32 => {
            fits(&format!("queries ({rows_name})"), last, rows)?;
            let endpoints = u32::try_from(first).unwrap_or(u32::MAX);
            problem.masks.intervals = Some(match packed {
                true => Intervals::packed(rows as u32, axes.of.heads, endpoints),
                false => Intervals::batch(problem, axes.of, endpoints),
            });
            numbers.intervals = words(&mask.bytes);
        }
        MaskElem::U32 => {
            fits(&format!("queries ({rows_name})"), first, rows)?;
            fits("words (seqlen_k / 32, rounded up)", last, dims.seqlen_k.div_ceil(32).into())?;
            numbers.bits = words(&mask.bytes);
        }
        MaskElem::Bool => {
            fits(&format!("queries ({rows_name})"), first, rows)?;
            fits("keys (seqlen_k)", last, dims.seqlen_k.into())?;
            for pairs in mask.bytes.chunks(last.max(1) as usize) {
                numbers.bits.extend(pairs.chunks(32).map(|pairs| {
                    let bits = pairs.iter().enumerate().map(|(bit, &pair)| u32::from(pair != 0) << bit);
                    bits.fold(0, |word, bit| word | bit).cast_signed()
                }));
            }
        }
    }
    if mask.elem != MaskElem::I32 {
        problem.masks.bits = Some(MaskBits::dense(problem, axes.of, totals));
    }
    Ok(numbers)
}

fn axes(shape: &[u64], packed: bool, batch: u32) -> Result<Axes, String> {
    let most = if packed { 3 } else { 4 };
    if !(2..=most).contains(&shape.len()) {
        return Err(format!("rank {} (shape {shape:?}) is not in 2..={most}", shape.len()));
    }
    let (outer, matrix) = shape.split_at(shape.len() - 2);
    let axis = |from_the_last: usize| outer.iter().rev().nth(from_the_last).copied().unwrap_or(1);
    let (heads, sequences) = (axis(0), axis(1));
    if sequences != 1 && sequences != u64::from(batch) {
        return Err(format!("shape {shape:?} has {sequences} sequences, not 1 or batch {batch}"));
    }
    let of =
        MaskAxes { per_batch: sequences != 1 || batch == 1, heads: u32::try_from(heads).unwrap_or(u32::MAX) };
    Ok(Axes { of, matrix: [matrix[0], matrix[1]] })
}
