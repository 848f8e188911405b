//! Masks as data (tensors): a plan reads which masks a call has, and each run passes their tensors.

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use fmha::expr::Number;
use fmha::{
    BlockList, BlockLists, BwdPlan, ElemType, FwdPlan, FwdProblem, Intervals, MaskArgs, MaskAxes, MaskBits,
    MaskObject, Masks, ProblemError, SeqArgs, Shape, Strides, Totals,
};

use crate::Result;
use crate::host::{flag, goes_with, size, strides};
use crate::plan::{Memory, absent, unwanted};
use crate::structs::{FmhaArgs, FmhaMasks, FmhaStrides};

/// A problem with the masks of a call.
pub(crate) fn read(given: &FmhaMasks, mut problem: FwdProblem) -> Result<FwdProblem, ProblemError> {
    let masks = &mut problem.masks;
    let (endpoints, heads) =
        (size("endpoints", given.endpoints)?, size("intervals_heads", given.intervals_heads)?);
    if endpoints > 0 {
        let axes = axes(&given.intervals, heads);
        masks.intervals = Some(Intervals { axes, endpoints, strides: strides(&given.intervals) });
    } else {
        goes_with("intervals_heads", given.intervals_heads, "endpoints, which is 0")?;
    }
    let heads = size("mask_bits_heads", given.mask_bits_heads)?;
    if heads > 0 {
        masks.bits =
            Some(MaskBits { axes: axes(&given.mask_bits, heads), strides: strides(&given.mask_bits) });
    }
    masks.block_lists = lists(given)?;
    Ok(problem)
}

fn lists(given: &FmhaMasks) -> Result<Option<BlockLists>, ProblemError> {
    let heads = size("lists_heads", given.lists_heads)?;
    let (has_partial, has_full) = (flag("partial", given.partial)?, flag("full", given.full)?);
    if heads == 0 {
        for (field, number) in [
            ("partial", given.partial.into()),
            ("full", given.full.into()),
            ("block_q", given.block_q),
            ("block_k", given.block_k),
            ("max_blocks", given.max_blocks),
            ("full_max_blocks", given.full_max_blocks),
        ] {
            goes_with(field, number, "lists_heads, which is 0")?;
        }
        return Ok(None);
    }
    let list = |(list, wanted): (_, bool), counts: &FmhaStrides, indices: &FmhaStrides, (field, room)| {
        if !wanted {
            goes_with(field, room, list)?;
            return Ok(None);
        }
        // Counts have no axis behind the axis of blocks.
        let counts = Strides { dim: 1, ..strides(counts) };
        let max_blocks = size(field, room)?;
        Ok::<_, ProblemError>(Some(BlockList { max_blocks, counts, indices: strides(indices) }))
    };
    let partial = list(
        ("partial, which is 0", has_partial),
        &given.kv_num_blocks,
        &given.kv_indices,
        ("max_blocks", given.max_blocks),
    )?;
    let full = list(
        ("full, which is 0", has_full),
        &given.full_kv_num_blocks,
        &given.full_kv_indices,
        ("full_max_blocks", given.full_max_blocks),
    )?;
    let of_each =
        [&given.kv_num_blocks, &given.kv_indices, &given.full_kv_num_blocks, &given.full_kv_indices];
    let axes = MaskAxes { per_batch: of_each.iter().any(|tensor| tensor.batch_stride != 0), heads };
    Ok(Some(BlockLists {
        axes,
        block_q: size("block_q", given.block_q)?,
        block_k: size("block_k", given.block_k)?,
        partial,
        full,
    }))
}

/// A batch stride of 0 means one mask for all sequences.
fn axes(given: &FmhaStrides, heads: u32) -> MaskAxes {
    MaskAxes { per_batch: given.batch_stride != 0, heads }
}

/// A mask object behind the C pointer.
pub struct FmhaMaskObject {
    /// Runs lock the object for reading while they queue their work; a build locks it for writing.
    object: RwLock<MaskObject>,
}

impl FmhaMaskObject {
    /// Makes a mask object.
    ///
    /// # Errors
    /// As [`MaskObject::new`].
    pub(crate) fn new(forward: Option<&FwdPlan>, backward: Option<&BwdPlan>, totals: Totals) -> Result<Self> {
        Ok(Self { object: RwLock::new(MaskObject::new(forward, backward, totals)?) })
    }

    /// # Safety
    /// As [`MaskObject::build_on_raw`].
    pub(crate) unsafe fn build(
        &self,
        seq: &SeqArgs<'_>,
        masks: &MaskArgs<'_>,
        numbers: &[Number],
        stream: u64,
    ) -> Result<()> {
        let mut object = self.object.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller keeps the contract of `build`.
        unsafe { object.build_on_raw(seq, masks, numbers, stream) }
    }

    /// Number of bytes of the device's memory that the object takes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.object.read().unwrap_or_else(PoisonError::into_inner).bytes()
    }
}

/// The mask object of a run, if the run has one, locked for reading while the run is queued.
///
/// # Safety
/// `built` is null or from `fmha_mask_object`, and lives.
#[inline]
pub(crate) unsafe fn built<'a>(
    problem: &FwdProblem,
    given: &FmhaArgs,
) -> Result<Option<RwLockReadGuard<'a, MaskObject>>, ProblemError> {
    if problem.masks.is_empty() && problem.code.mask.is_none() {
        unwanted("built", given.built, "masks")?;
    }
    // SAFETY: the caller keeps the contract of `built`.
    let object = unsafe { given.built.as_ref() };
    Ok(object.map(|built| built.object.read().unwrap_or_else(PoisonError::into_inner)))
}

impl Memory {
    /// The masks of a run: those of its mask object if the run has one, else those in its argument tensors.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`](crate::FmhaPlan::run).
    #[inline]
    pub(crate) unsafe fn masks_or_built<'a>(
        self,
        problem: &FwdProblem,
        given: &FmhaArgs,
        totals: Totals,
        built: Option<&'a MaskObject>,
    ) -> Result<MaskArgs<'a>, ProblemError> {
        match built {
            Some(object) => Ok(object.args()),
            // SAFETY: the caller keeps the contract of `masks_or_built`.
            None => unsafe { self.masks(problem, given, totals) },
        }
    }

    /// The masks of a run.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`](crate::FmhaPlan::run).
    pub(crate) unsafe fn masks<'a>(
        self,
        problem: &FwdProblem,
        given: &FmhaArgs,
        totals: Totals,
    ) -> Result<MaskArgs<'a>, ProblemError> {
        let masks = &problem.masks;
        if *masks == Masks::default() {
            absent!(given, "it", intervals, mask_bits, kv_num_blocks, kv_indices);
            absent!(given, "it", full_kv_num_blocks, full_kv_indices);
            return Ok(MaskArgs::default());
        }
        let numbers = |name, at: *const u8, of: Option<(Strides, Shape)>, elem: ElemType| {
            let bytes = of.map_or(0, |(strides, shape)| {
                strides.extent(shape).map_or(u64::MAX, |n| n.saturating_mul(4))
            });
            // SAFETY: the caller keeps the contract of `masks`.
            unsafe { self.read_if(name, of.is_some(), at, bytes, elem) }
        };
        let intervals = masks.intervals.as_ref();
        let intervals = intervals.map(|of| (of.strides, problem.shape_intervals(of, totals)));
        let bits = masks.bits.as_ref().map(|of| (of.strides, problem.shape_mask_bits(of, totals)));
        let lists = masks.block_lists.as_ref();
        let shape = |most| lists.map(|lists| problem.shape_block_lists(lists, most));
        let counts = |list: Option<BlockList>| list.and_then(|list| Some((list.counts, shape(1)?)));
        let indices =
            |list: Option<BlockList>| list.and_then(|list| Some((list.indices, shape(list.max_blocks)?)));
        let (partial, full) = (lists.and_then(|lists| lists.partial), lists.and_then(|lists| lists.full));
        let mut args = MaskArgs::default();
        args.intervals = numbers("intervals", given.intervals.cast(), intervals, ElemType::I32)?;
        args.bits = numbers("mask_bits", given.mask_bits.cast(), bits, ElemType::U32)?;
        for (to, name, at, of) in [
            (&mut args.kv_num_blocks, "kv_num_blocks", given.kv_num_blocks, counts(partial)),
            (&mut args.kv_indices, "kv_indices", given.kv_indices, indices(partial)),
            (&mut args.full_kv_num_blocks, "full_kv_num_blocks", given.full_kv_num_blocks, counts(full)),
            (&mut args.full_kv_indices, "full_kv_indices", given.full_kv_indices, indices(full)),
        ] {
            *to = numbers(name, at.cast(), of, ElemType::I32)?;
        }
        Ok(args)
    }
}
