//! Check of a call's masks as data against the call's sizes, and their conversion to the C struct.

use fmha_c::{FmhaArgs, FmhaMasks, FmhaStrides};

use crate::call::{Wrong, ensure};
use crate::request::{Request, Slot, name};
use crate::shapes::{Placed, Sizes, of_type, shape};
use crate::tensor::{I32, Tensor, U32};

/// Struct of zeros: `fmha.h` wants everything set to 0 before fields are filled in.
// SAFETY: numbers and pointers, of which all bits may be 0.
const NO_MASKS: FmhaMasks = unsafe { std::mem::zeroed() };

/// Slots of a call's mask tensors.
pub(crate) const SLOTS: [Slot; 6] = [
    Slot::Intervals,
    Slot::MaskBits,
    Slot::KvNumBlocks,
    Slot::KvIndices,
    Slot::FullKvNumBlocks,
    Slot::FullKvIndices,
];

/// Masks of a request; `None` where it has none.
///
/// # Errors
/// A mask whose type, axes or extents do not match the call, or a block size without lists.
pub(crate) fn masks(
    args: &mut FmhaArgs,
    sizes: &Sizes,
    request: &Request,
) -> Result<Option<FmhaMasks>, Wrong> {
    let numbers = &request.numbers;
    if SLOTS.into_iter().all(|slot| request.get(slot).is_none()) {
        for (name, size) in [("block_q", numbers.block_q), ("block_k", numbers.block_k)] {
            ensure!(size == 0, "{name} {size} goes with lists of blocks, of which there are none");
        }
        return Ok(None);
    }
    let mut masks = FmhaMasks { struct_bytes: size_of::<FmhaMasks>() as u64, ..NO_MASKS };
    let rows = sizes.total_q.unwrap_or(sizes.seqlen_q);
    let packed = sizes.total_q.is_some();
    if let Some(tensor) = request.get(Slot::Intervals) {
        let axes =
            if packed { "heads, endpoints, total_q" } else { "batch or 1, heads, endpoints, seqlen_q" };
        let [heads, endpoints, queries] = of_rows(Slot::Intervals, tensor, (packed, sizes.batch), axes)?;
        ensure!(queries == rows, "intervals has {queries} queries on its last axis, but q has {rows}");
        ensure!(
            endpoints > 0,
            "intervals has 0 endpoints a row, which is not an even number from 2 on: {:?}",
            tensor.shape()
        );
        of_type("intervals", tensor, &[I32])?;
        let placed = placed(tensor, packed, [3, 1, 2]);
        (masks.intervals, args.intervals) = (placed.strides, placed.data.cast());
        (masks.intervals_heads, masks.endpoints) = (heads, endpoints);
    }
    if let Some(tensor) = request.get(Slot::MaskBits) {
        let axes = if packed { "heads, total_q, words" } else { "batch or 1, heads, seqlen_q, words" };
        let [heads, queries, words] = of_rows(Slot::MaskBits, tensor, (packed, sizes.batch), axes)?;
        let wanted = sizes.seqlen_k.saturating_add(31) / 32;
        ensure!(
            queries == rows,
            "mask_bits has {queries} queries on its axis before the last, but q has {rows}"
        );
        ensure!(
            words == wanted,
            "mask_bits has {words} words a query, not {wanted} for {} keys, 32 to a word",
            sizes.seqlen_k
        );
        of_type("mask_bits", tensor, &[U32, I32])?;
        let placed = placed(tensor, packed, [2, 1, 3]);
        (masks.mask_bits, args.mask_bits) = (placed.strides, placed.data.cast());
        masks.mask_bits_heads = heads;
        ensure!(heads > 0, "mask_bits has 0 heads, not 1, num_heads_kv or num_heads_q");
    }
    lists(&mut masks, args, sizes, request)?;
    Ok(Some(masks))
}

/// Fills in lists of blocks: the counts, and a list of indices for each count.
fn lists(masks: &mut FmhaMasks, args: &mut FmhaArgs, sizes: &Sizes, request: &Request) -> Result<(), Wrong> {
    let (block_q, block_k) = (request.numbers.block_q, request.numbers.block_k);
    let pairs = [(Slot::KvNumBlocks, Slot::KvIndices), (Slot::FullKvNumBlocks, Slot::FullKvIndices)];
    let mut whose: Option<(&str, i64, i64)> = None;
    for (at, (counts, indices)) in pairs.into_iter().enumerate() {
        let (of_counts, of_indices) = (name(counts), name(indices));
        let (counts, indices) = match (request.get(counts), request.get(indices)) {
            (None, None) => continue,
            (Some(counts), Some(indices)) => (counts, indices),
            (Some(_), None) => return Err(format!("{of_indices} is missing beside {of_counts}")),
            (None, Some(_)) => return Err(format!("{of_counts} is missing beside {of_indices}")),
        };
        for (name, size) in [("block_q", block_q), ("block_k", block_k)] {
            ensure!(size >= 1, "{name} {size} is below 1: blocks of {of_counts} have a size");
        }
        let [batch, heads, blocks] = shape(of_counts, counts, "batch or 1, heads, blocks")?;
        let [batch_of, heads_of, blocks_of, room] =
            shape(of_indices, indices, "batch or 1, heads, blocks, max_blocks")?;
        ensure!(
            [batch_of, heads_of, blocks_of] == [batch, heads, blocks],
            "{of_indices} has shape {:?}, but {of_counts} {:?}",
            indices.shape(),
            counts.shape()
        );
        ensure!(
            batch == 1 || batch == sizes.batch,
            "{of_counts} has batch {batch}, neither 1 nor q's {}",
            sizes.batch
        );
        ensure!(heads > 0, "{of_counts} has 0 heads, not 1 or num_heads_q");
        let wanted = (sizes.seqlen_q.max(0) as u64).div_ceil(block_q.cast_unsigned());
        ensure!(
            blocks.cast_unsigned() == wanted,
            "{of_counts} has {blocks} rows of blocks, but {} queries are {wanted} blocks of {block_q}",
            sizes.seqlen_q
        );
        if let Some((first, batch_of, heads_of)) = whose {
            ensure!(
                (batch_of, heads_of) == (batch, heads),
                "{of_counts} has batch {batch} and {heads} heads, but {first} {batch_of} and {heads_of}"
            );
        }
        whose = Some((of_counts, batch, heads));
        of_type(of_counts, counts, &[I32])?;
        of_type(of_indices, indices, &[I32])?;
        let (counts, indices) =
            (placed(counts, false, [2, 1, usize::MAX]), placed(indices, false, [2, 1, 3]));
        match at {
            0 => {
                (masks.kv_num_blocks, args.kv_num_blocks) = (counts.strides, counts.data.cast());
                (masks.kv_indices, args.kv_indices) = (indices.strides, indices.data.cast());
                (masks.partial, masks.max_blocks) = (1, room);
            }
            _ => {
                (masks.full_kv_num_blocks, args.full_kv_num_blocks) = (counts.strides, counts.data.cast());
                (masks.full_kv_indices, args.full_kv_indices) = (indices.strides, indices.data.cast());
                (masks.full, masks.full_max_blocks) = (1, room);
            }
        }
        (masks.lists_heads, masks.block_q, masks.block_k) = (heads, block_q, block_k);
    }
    ensure!(
        whose.is_some() || (block_q, block_k) == (0, 0),
        "block_q {block_q} and block_k {block_k} go with lists of blocks, of which there are none"
    );
    Ok(())
}

/// Extents of a mask with rows. Packed rows have no batch axis.
fn of_rows(slot: Slot, tensor: &Tensor, (packed, batch): (bool, i64), axes: &str) -> Result<[i64; 3], Wrong> {
    if packed {
        return shape(name(slot), tensor, axes);
    }
    let [of_batch, rest @ ..]: [i64; 4] = shape(name(slot), tensor, axes)?;
    ensure!(
        of_batch == 1 || of_batch == batch,
        "{} has batch {of_batch}, neither 1 nor q's {batch}",
        name(slot)
    );
    Ok(rest)
}

/// The C form of a mask; `axes` are those of queries, heads and what a query has, counted with a batch axis. An axis of
/// one index has stride 0; on the batch axis that means one mask for all sequences.
fn placed(tensor: &Tensor, packed: bool, axes: [usize; 3]) -> Placed {
    let step = |axis: usize| {
        let at = if packed { axis.checked_sub(1) } else { Some(axis) };
        let at = at.filter(|&at| at < tensor.shape().len());
        at.map_or(0, |at| if tensor.shape()[at] <= 1 { 0 } else { tensor.steps()[at] })
    };
    let [seqlen_stride, head_stride, dim_stride] = axes.map(step);
    let batch_stride = if packed { 0 } else { step(0) };
    let strides = FmhaStrides { batch_stride, seqlen_stride, head_stride, dim_stride };
    Placed { data: tensor.address(), strides }
}
