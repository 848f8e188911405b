//! Masks as data in the form of kernel parameters: an argument of its own, present only in launches with masks.

use super::{BlockList, FwdProblem, MaskAxes};
use crate::abi::{AbiStruct as _, DevPtr};
use crate::abi_struct;
use crate::args::{DevSlice, MaskArgs};
use crate::layout::{QLayout, Strides};
use crate::source::Header;

abi_struct! {
    /// A tensor of 4-byte numbers; strides in elements, 0 where an axis is shared.
    pub struct MaskTensor {
        /// Pointer to the first number; null if the mask is absent.
        pub data: DevPtr<i32>,
        /// Stride from one sequence to the next.
        pub batch: i64,
        /// Stride from one head to the next.
        pub head: i64,
        /// Stride from one query to the next, or from one block of queries to the next.
        pub row: i64,
        /// Stride from one endpoint, word or index to the next.
        pub dim: i64,
    }
}

abi_struct! {
    /// Kernel argument with the tensors of a call's masks.
    pub struct MaskDataParams {
        /// Endpoints of the intervals of keys that each query sees.
        pub intervals: MaskTensor,
        /// Words of the mask as bits.
        pub bits: MaskTensor,
        /// Number of blocks in each row of the partial list.
        pub kv_num_blocks: MaskTensor,
        /// Block indices of the partial list.
        pub kv_indices: MaskTensor,
        /// Number of blocks in each row of the full list.
        pub full_kv_num_blocks: MaskTensor,
        /// Block indices of the full list.
        pub full_kv_indices: MaskTensor,
        /// Number of endpoints of a query.
        pub endpoints: i32,
        /// Number of query heads that share the intervals of one head.
        pub intervals_ratio: i32,
        /// Number of query heads that share the bits of one head.
        pub bits_ratio: i32,
        /// Number of query heads that share the block lists of one head.
        pub lists_ratio: i32,
        /// Number of queries of a block of the lists; 0 without lists.
        pub block_q: i32,
        /// Number of keys of a block of the lists.
        pub block_k: i32,
        /// Most block indices that a row of the partial list has room for.
        pub max_blocks: i32,
        /// Most block indices that a row of the full list has room for.
        pub full_max_blocks: i32,
        /// Index of the call's first key in the intervals; not 0 in a part of a larger call.
        pub first_key: i32,
        /// Index in the lists of the block of keys that begins at the call's first key.
        pub first_block_k: i32,
    }
}

impl MaskTensor {
    const NULL: Self = Self { data: DevPtr::NULL, batch: 0, head: 0, row: 0, dim: 0 };

    fn of(slice: Option<&DevSlice<'_>>, strides: Strides, per_batch: bool) -> Self {
        Self {
            data: DevPtr::new(slice.map_or(0, |slice| slice.as_ptr() as u64)),
            batch: if per_batch { strides.batch } else { 0 },
            head: strides.head,
            row: strides.seq,
            dim: strides.dim,
        }
    }
}

/// The kernel argument for a call's masks. `args` have passed the check of their call.
#[must_use]
pub fn mask_data_params(problem: &FwdProblem, args: &MaskArgs<'_>) -> MaskDataParams {
    let heads = problem.dims.num_heads_q;
    let ratio = |axes: Option<MaskAxes>| axes.map_or(1, |axes| (heads / axes.heads.max(1)).max(1)) as i32;
    let by_batch = |axes: MaskAxes| axes.per_batch && problem.layout.q == QLayout::Batch;
    let masks = &problem.masks;
    let lists = masks.block_lists;
    let list = |list: Option<BlockList>, [counts, indices]: [&Option<DevSlice<'_>>; 2]| match (lists, list) {
        (Some(lists), Some(list)) => [
            MaskTensor::of(counts.as_ref(), list.counts, lists.axes.per_batch),
            MaskTensor::of(indices.as_ref(), list.indices, lists.axes.per_batch),
        ],
        _ => [MaskTensor::NULL; 2],
    };
    let partial = lists.and_then(|lists| lists.partial);
    let full = lists.and_then(|lists| lists.full);
    let room = |list: Option<BlockList>| list.map_or(0, |list| list.max_blocks) as i32;
    let [kv_num_blocks, kv_indices] = list(partial, [&args.kv_num_blocks, &args.kv_indices]);
    let [full_kv_num_blocks, full_kv_indices] = list(full, [&args.full_kv_num_blocks, &args.full_kv_indices]);
    MaskDataParams {
        intervals: masks.intervals.map_or(MaskTensor::NULL, |it| {
            MaskTensor::of(args.intervals.as_ref(), it.strides, by_batch(it.axes))
        }),
        bits: masks.bits.map_or(MaskTensor::NULL, |it| {
            let words = i64::from(problem.part.position_k / 32) * it.strides.dim;
            let bits = args.bits.map(|bits| bits.skip(4 * words.unsigned_abs()));
            MaskTensor::of(bits.as_ref(), it.strides, by_batch(it.axes))
        }),
        kv_num_blocks,
        kv_indices,
        full_kv_num_blocks,
        full_kv_indices,
        endpoints: masks.intervals.map_or(0, |it| it.endpoints) as i32,
        intervals_ratio: ratio(masks.intervals.map(|it| it.axes)),
        bits_ratio: ratio(masks.bits.map(|it| it.axes)),
        lists_ratio: ratio(lists.map(|it| it.axes)),
        block_q: lists.map_or(0, |it| it.block_q) as i32,
        block_k: lists.map_or(1, |it| it.block_k) as i32,
        max_blocks: room(partial),
        full_max_blocks: room(full),
        first_key: problem.part.position_k as i32,
        first_block_k: problem.first_block_k() as i32,
    }
}

/// `fmha/mask_data_params.h`: the types that this file shares with the device.
#[must_use]
pub fn header() -> Header {
    let definitions = [MaskTensor::c_definition(), MaskDataParams::c_definition()];
    Header::shared("fmha/mask_data_params.h", "fmha", &["fmha/spec.h"], &definitions)
}
