//! Masks as data: which of them a call has is read at the plan, and their tensors with each run.

use fmha::{
    BlockList, BlockLists, DevSlice, ElemType, FwdProblem, Intervals, MaskArgs, MaskAxes, MaskBits,
    ProblemError, Shape, Strides, Totals,
};

use crate::Result;
use crate::host::{size, strides};
use crate::plan::{Memory, bytes};
use crate::structs::{FmhaCall, FmhaMasks, FmhaTensor};

/// A problem with the masks of a call. A tensor without elements may be null: what is there is said by its numbers.
pub(crate) fn read(
    given: &FmhaMasks,
    mut problem: FwdProblem,
    no_blocks: bool,
) -> Result<FwdProblem, ProblemError> {
    let masks = &mut problem.masks;
    let (endpoints, heads) =
        (size("endpoints", given.endpoints)?, size("intervals_heads", given.intervals_heads)?);
    if endpoints > 0 {
        let axes = axes(&given.intervals, heads);
        masks.intervals = Some(Intervals { axes, endpoints, strides: strides(&given.intervals) });
    } else {
        goes_with("intervals.data", &given.intervals, "endpoints, which is 0")?;
        none_of("intervals_heads", given.intervals_heads, "endpoints, which is 0")?;
    }
    let heads = size("mask_bits_heads", given.mask_bits_heads)?;
    if heads > 0 {
        masks.bits =
            Some(MaskBits { axes: axes(&given.mask_bits, heads), strides: strides(&given.mask_bits) });
    } else {
        goes_with("mask_bits.data", &given.mask_bits, "mask_bits_heads, which is 0")?;
    }
    masks.block_lists = lists(given, no_blocks)?;
    Ok(problem)
}

fn lists(given: &FmhaMasks, no_blocks: bool) -> Result<Option<BlockLists>, ProblemError> {
    let heads = size("lists_heads", given.lists_heads)?;
    let of_partial = [&given.kv_num_blocks, &given.kv_indices];
    let of_full = [&given.full_kv_num_blocks, &given.full_kv_indices];
    if heads == 0 {
        for (field, tensor) in ["kv_num_blocks.data", "kv_indices.data"].into_iter().zip(of_partial) {
            goes_with(field, tensor, "lists_heads, which is 0")?;
        }
        for (field, tensor) in ["full_kv_num_blocks.data", "full_kv_indices.data"].into_iter().zip(of_full) {
            goes_with(field, tensor, "lists_heads, which is 0")?;
        }
        for (field, number) in [
            ("block_q", given.block_q),
            ("block_k", given.block_k),
            ("max_blocks", given.max_blocks),
            ("full_max_blocks", given.full_max_blocks),
        ] {
            none_of(field, number, "lists_heads, which is 0")?;
        }
        return Ok(None);
    }
    let list = |names: [&'static str; 2], [counts, indices]: [&FmhaTensor; 2], room: (&'static str, i64)| {
        let max_blocks = size(room.0, room.1)?;
        if counts.data.is_null() && !(no_blocks && max_blocks > 0) {
            goes_with(names[1], indices, names[0])?;
            none_of(room.0, room.1, names[0])?;
            return Ok(None);
        }
        Ok::<_, ProblemError>(Some(BlockList {
            max_blocks,
            counts: strides(counts),
            indices: strides(indices),
        }))
    };
    // Counts have no axis behind that of the blocks.
    let dense = |list: BlockList| BlockList { counts: Strides { dim: 1, ..list.counts }, ..list };
    let partial = list(
        ["kv_num_blocks.data, which is null", "kv_indices.data"],
        of_partial,
        ("max_blocks", given.max_blocks),
    )?;
    let full = list(
        ["full_kv_num_blocks.data, which is null", "full_kv_indices.data"],
        of_full,
        ("full_max_blocks", given.full_max_blocks),
    )?;
    let of_each = |tensor: &FmhaTensor| tensor.batch_stride != 0;
    let axes = MaskAxes { per_batch: of_partial.into_iter().chain(of_full).any(of_each), heads };
    Ok(Some(BlockLists {
        axes,
        block_q: size("block_q", given.block_q)?,
        block_k: size("block_k", given.block_k)?,
        partial: partial.map(dense),
        full: full.map(dense),
    }))
}

/// A batch stride of 0 is one mask for all sequences.
fn axes(tensor: &FmhaTensor, heads: u32) -> MaskAxes {
    MaskAxes { per_batch: tensor.batch_stride != 0, heads }
}

fn goes_with(field: &'static str, tensor: &FmhaTensor, with: &str) -> Result<(), ProblemError> {
    if tensor.data.is_null() {
        return Ok(());
    }
    Err(ProblemError::new(field, format!("{field} is given, but goes with {with}")))
}

fn none_of(field: &'static str, value: i64, with: &str) -> Result<(), ProblemError> {
    if value == 0 {
        return Ok(());
    }
    Err(ProblemError::new(field, format!("{field} {value} goes with {with}")))
}

impl Memory {
    /// The masks of a run that agrees with its plan.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`](crate::FmhaPlan::run).
    pub(crate) unsafe fn masks<'a>(
        self,
        problem: &FwdProblem,
        call: &FmhaCall,
        totals: Totals,
    ) -> Result<MaskArgs<'a>> {
        let mut args = MaskArgs::default();
        // SAFETY: the caller keeps the contract of `masks`.
        let Some(given) = (unsafe { call.masks.as_ref() }) else { return Ok(args) };
        let numbers = |name, tensor: &FmhaTensor, shape: Shape, elem: ElemType| {
            let bytes = bytes(name, tensor, strides(tensor), shape, fmha::DType::F32)?;
            // SAFETY: the caller keeps the contract of `masks`.
            Ok::<DevSlice<'a>, ProblemError>(unsafe {
                self.read(tensor.data.cast_const().cast(), bytes, elem)
            })
        };
        let indices = |name, tensor: &FmhaTensor, shape: Shape| numbers(name, tensor, shape, ElemType::I32);
        let masks = &problem.masks;
        if let Some(intervals) = &masks.intervals {
            let shape = problem.shape_intervals(intervals, totals);
            args.intervals = Some(indices("intervals", &given.intervals, shape)?);
        }
        if let Some(bits) = &masks.bits {
            let shape = problem.shape_mask_bits(bits, totals);
            args.bits = Some(numbers("mask_bits", &given.mask_bits, shape, ElemType::U32)?);
        }
        if let Some(lists) = &masks.block_lists {
            let shape = |most| problem.shape_block_lists(lists, most);
            if let Some(list) = lists.partial {
                args.kv_num_blocks = Some(indices("kv_num_blocks", &given.kv_num_blocks, shape(1))?);
                args.kv_indices = Some(indices("kv_indices", &given.kv_indices, shape(list.max_blocks))?);
            }
            if let Some(list) = lists.full {
                args.full_kv_num_blocks =
                    Some(indices("full_kv_num_blocks", &given.full_kv_num_blocks, shape(1))?);
                args.full_kv_indices =
                    Some(indices("full_kv_indices", &given.full_kv_indices, shape(list.max_blocks))?);
            }
        }
        Ok(args)
    }
}
