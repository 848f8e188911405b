//! Masks as data: converts their tensors to a problem's masks, after a check of the axes of each.

use candle_core::{DType, Result, Tensor, bail};
use fmha::{BlockList, FwdProblem, Intervals, MaskAxes, MaskBits, QLayout, Strides};

use crate::memory::extent;
use crate::{BlockLists, Masks};

/// The tensors that are there, by the names of their arguments.
pub(crate) fn tensors(masks: &Masks) -> Vec<(&'static str, &Tensor)> {
    let mut all: Vec<(&'static str, &Tensor)> = vec![];
    all.extend(masks.intervals.as_ref().map(|tensor| ("intervals", tensor)));
    all.extend(masks.bits.as_ref().map(|tensor| ("mask_bits", tensor)));
    if let Some(lists) = &masks.block_lists {
        for (names, list) in [
            (["kv_num_blocks", "kv_indices"], &lists.partial),
            (["full_kv_num_blocks", "full_kv_indices"], &lists.full),
        ] {
            all.extend(list.iter().flat_map(|list| names.into_iter().zip(list)));
        }
    }
    all
}

/// Makes every tensor contiguous, of 32 bits, and out of the graph of gradients.
pub(crate) fn contiguous(masks: &mut Masks) -> Result<()> {
    let own = |tensor: &mut Tensor, field: &str| {
        if !matches!(tensor.dtype(), DType::U32 | DType::I32) {
            bail!("{field} is {}, where i32 or u32 is wanted", tensor.dtype().as_str());
        }
        *tensor = tensor.detach().contiguous()?;
        Ok(())
    };
    if let Some(tensor) = &mut masks.intervals {
        own(tensor, "intervals")?;
    }
    if let Some(tensor) = &mut masks.bits {
        own(tensor, "mask_bits")?;
    }
    if let Some(lists) = &mut masks.block_lists {
        for (names, list) in [
            (["kv_num_blocks", "kv_indices"], &mut lists.partial),
            (["full_kv_num_blocks", "full_kv_indices"], &mut lists.full),
        ] {
            for (field, tensor) in names.into_iter().zip(list.iter_mut().flatten()) {
                own(tensor, field)?;
            }
        }
    }
    Ok(())
}

/// A problem with these masks; `rows` are packed queries.
pub(crate) fn of(masks: &Masks, mut problem: FwdProblem, rows: usize) -> Result<FwdProblem> {
    let packed = problem.layout.q == QLayout::Packed;
    let queries = if packed { rows } else { problem.dims.seqlen_q as usize };
    let batch = problem.dims.batch as usize;
    if let Some(tensor) = &masks.intervals {
        let [sequences, heads, endpoints, last] = matrix("intervals", tensor, packed)?;
        fits("intervals", "queries", last, queries)?;
        let axes = axes("intervals", sequences, batch, heads)?;
        let endpoints = extent("intervals", "endpoints", endpoints)?;
        let (row, head) = (last as i64, last as i64 * i64::from(endpoints));
        let strides = Strides { batch: head * heads as i64, head, dim: row, seq: 1 };
        problem.masks.intervals = Some(Intervals { axes, endpoints, strides });
    }
    if let Some(tensor) = &masks.bits {
        let [sequences, heads, first, words] = matrix("mask_bits", tensor, packed)?;
        fits("mask_bits", "queries", first, queries)?;
        fits("mask_bits", "words a query", words, problem.dims.seqlen_k.div_ceil(32) as usize)?;
        let axes = axes("mask_bits", sequences, batch, heads)?;
        let (row, head) = (words as i64, words as i64 * first as i64);
        let strides = Strides { batch: head * heads as i64, head, seq: row, dim: 1 };
        problem.masks.bits = Some(MaskBits { axes, strides });
    }
    match &masks.block_lists {
        None => Ok(problem),
        Some(lists) => listed(lists, problem),
    }
}

fn listed(lists: &BlockLists, mut problem: FwdProblem) -> Result<FwdProblem> {
    let block_q = extent("block_lists", "block_q", lists.block_q)?;
    let block_k = extent("block_lists", "block_k", lists.block_k)?;
    let wanted = problem.dims.seqlen_q.div_ceil(block_q.max(1)) as usize;
    let mut shared: Option<[usize; 2]> = None;
    let mut list = |[of_counts, of_indices]: [&'static str; 2], given: &Option<[Tensor; 2]>| {
        let Some([counts, indices]) = given else { return Ok(None) };
        let [sequences, heads, blocks, room] = matrix(of_indices, indices, false)?;
        if counts.dims() != [sequences, heads, blocks] {
            bail!("{of_counts} has dims {:?}, but {of_indices} {:?}", counts.dims(), indices.dims());
        }
        fits(of_counts, "rows of blocks", blocks, wanted)?;
        if shared.is_some_and(|shared| shared != [sequences, heads]) {
            bail!("{of_counts} has dims {:?}, but the other list has {shared:?}", counts.dims());
        }
        shared = Some([sequences, heads]);
        let (row, head) = (room as i64, room as i64 * blocks as i64);
        let rows = blocks as i64;
        Ok(Some(BlockList {
            max_blocks: extent(of_indices, "blocks", room)?,
            counts: Strides { batch: rows * heads as i64, head: rows, seq: 1, dim: 1 },
            indices: Strides { batch: head * heads as i64, head, seq: row, dim: 1 },
        }))
    };
    let partial = list(["kv_num_blocks", "kv_indices"], &lists.partial)?;
    let full = list(["full_kv_num_blocks", "full_kv_indices"], &lists.full)?;
    let [sequences, heads] = shared.unwrap_or([1, 1]);
    let axes = axes("block_lists", sequences, problem.dims.batch as usize, heads)?;
    problem.masks.block_lists = Some(fmha::BlockLists { axes, block_q, block_k, partial, full });
    Ok(problem)
}

/// Dimensions of a mask of rows; a mask of packed rows gets a batch axis of 1 in front.
fn matrix(field: &str, tensor: &Tensor, packed: bool) -> Result<[usize; 4]> {
    match (tensor.dims(), packed) {
        (&[heads, first, last], true) => Ok([1, heads, first, last]),
        (&[sequences, heads, first, last], false) => Ok([sequences, heads, first, last]),
        (dims, _) => {
            bail!("{field} has {} axes {dims:?}, where {} are wanted", dims.len(), 4 - usize::from(packed))
        }
    }
}

fn fits(field: &str, what: &str, found: usize, wanted: usize) -> Result<()> {
    if found != wanted {
        bail!("{field} has {found} {what}, where {wanted} are wanted");
    }
    Ok(())
}

fn axes(field: &str, sequences: usize, batch: usize, heads: usize) -> Result<MaskAxes> {
    if sequences != 1 && sequences != batch {
        bail!("{field} has batch {sequences}, where 1 or {batch} is wanted");
    }
    Ok(MaskAxes { per_batch: sequences == batch, heads: extent(field, "heads", heads)? })
}
