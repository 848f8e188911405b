//! A call's pointers and numbers as the kernels of every vendor take them.

use crate::abi::{CombineParams, DevPtr, FwdParams, HeadScalars, MAX_PARTS, MaskParams, PartPointers, View};
use crate::args::{CombineArgs, DevSlice, DevSliceMut, FwdArgs};
use crate::combine::CombineProblem;
use crate::dropout::{keep_scale, keep_threshold};
use crate::layout::{KvLayout, QLayout, Strides};
use crate::mask::MaskAlign;
use crate::problem::FwdProblem;
use crate::score::{Bias, BiasBroadcast, Descale};

/// The arguments of a forward kernel. `args` have passed [`check_fwd`](crate::args::check_fwd).
#[must_use]
pub fn fwd_params(problem: &FwdProblem, args: &FwdArgs<'_>) -> FwdParams {
    let dims = problem.dims;
    let packed_q = problem.q_layout == QLayout::Packed;
    let packed_k = problem.kv_layout == KvLayout::Packed;
    let totals = args.seq.totals;
    let total_q = totals.total_q.unwrap_or(dims.seqlen_q);
    let lse_batch = if packed_q { 0 } else { i64::from(dims.num_heads_q) * i64::from(total_q) };
    let lse_head = i64::from(total_q);
    let block_table = args.seq.block_table;
    let score = &args.score;
    let (bias, slopes_batch) = match problem.bias {
        Bias::Elementwise(bias) => {
            let (batch, head) = match bias.broadcast {
                BiasBroadcast::OneOne => (0, 0),
                BiasBroadcast::OneHead => (0, bias.strides.head),
                BiasBroadcast::BatchHead => (bias.strides.batch, bias.strides.head),
            };
            let strides = Strides { batch, head, ..bias.strides };
            (View::new(score.bias.as_ref().map_or(0, address), strides, false), 0)
        }
        Bias::Alibi { per_batch: true } => (View::NULL, dims.num_heads_q),
        Bias::Alibi { per_batch: false } | Bias::None => (View::NULL, 0),
    };
    let descale = |kind: Descale, slice: Option<&DevSlice<'_>>| match kind {
        Descale::None => HeadScalars::NULL,
        Descale::PerTensor => scalars(slice, 0, 0),
        Descale::PerKvHead => scalars(slice, dims.num_heads_kv, 1),
    };
    FwdParams {
        q: View::new(address(&args.q), problem.q, packed_q),
        k: View::new(address(&args.k), problem.k, packed_k),
        v: View::new(address(&args.v), problem.v, packed_k),
        o: View::new(address_mut(&args.o), problem.o, packed_q),
        bias,
        lse: pointer_mut(args.lse.as_ref()),
        lse_batch,
        lse_head,
        keep_mask: pointer_mut(args.keep_mask.as_ref()),
        cu_seqlens_q: pointer(args.seq.cu_seqlens_q.as_ref()),
        cu_seqlens_k: pointer(args.seq.cu_seqlens_k.as_ref()),
        seqused_q: pointer(args.seq.seqused_q.as_ref()),
        seqused_k: pointer(args.seq.seqused_k.as_ref()),
        block_table: pointer(block_table.as_ref().map(|table| &table.pages)),
        block_table_batch: block_table.map_or(0, |table| i64::from(table.max_pages)),
        alibi_slopes: scalars(score.alibi_slopes.as_ref(), slopes_batch, 1),
        sink: scalars(score.sink.as_ref(), 0, 1),
        descale_q: descale(problem.descale_q, score.descale_q.as_ref()),
        descale_k: descale(problem.descale_k, score.descale_k.as_ref()),
        descale_v: descale(problem.descale_v, score.descale_v.as_ref()),
        scale_o: pointer(args.scale_o.as_ref()),
        workspace: pointer_mut(args.workspace.as_ref()),
        batch: dims.batch as i32,
        seqlen_q: dims.seqlen_q as i32,
        seqlen_k: dims.seqlen_k as i32,
        total_q: total_q as i32,
        total_k: totals.total_k.unwrap_or(dims.seqlen_k) as i32,
        num_pages: totals.num_pages.unwrap_or(0) as i32,
        page_size: problem.kv_layout.page_size().unwrap_or(1) as i32,
        num_heads_q: dims.num_heads_q as i32,
        num_heads_kv: dims.num_heads_kv as i32,
        gqa_ratio: problem.gqa_ratio() as i32,
        mask: MaskParams::from(problem.mask),
        alibi_bottom_right: i32::from(problem.mask.alibi_align() == MaskAlign::BottomRight),
        softmax_scale: problem.resolved_softmax_scale(),
        softcap: problem.softcap.unwrap_or(0.0),
        // 2^32 (keep all) is a kernel compiled without dropout.
        dropout_threshold: u32::try_from(keep_threshold(problem.p_drop)).unwrap_or(u32::MAX),
        dropout_scale: keep_scale(problem.p_drop) as f32,
        dropout_key_low: score.dropout.seed as u32,
        dropout_key_high: (score.dropout.seed >> 32) as u32,
        dropout_offset: score.dropout.offset as u32,
    }
}

/// The arguments of a combine kernel. `args` have passed
/// [`check_combine`](crate::args::check_combine), and there are at most [`MAX_PARTS`] parts.
#[must_use]
pub fn combine_params(problem: &CombineProblem, args: &CombineArgs<'_>) -> CombineParams {
    let mut parts = [PartPointers { o: DevPtr::NULL, lse: DevPtr::NULL }; MAX_PARTS];
    for (pointers, part) in parts.iter_mut().zip(args.parts) {
        *pointers = PartPointers { o: pointer(Some(&part.o)), lse: pointer(Some(&part.lse)) };
    }
    CombineParams {
        parts,
        part: View::new(0, problem.part, false),
        o: View::new(address_mut(&args.o), problem.o, false),
        lse: pointer_mut(args.lse.as_ref()),
        num_parts: problem.num_parts as i32,
        batch: problem.batch as i32,
        seqlen_q: problem.seqlen_q as i32,
        num_heads_q: problem.num_heads_q as i32,
    }
}

fn address(slice: &DevSlice<'_>) -> u64 {
    slice.as_ptr() as u64
}

fn address_mut(slice: &DevSliceMut<'_>) -> u64 {
    slice.as_mut_ptr() as u64
}

fn pointer<T>(slice: Option<&DevSlice<'_>>) -> DevPtr<T> {
    DevPtr::new(slice.map_or(0, address))
}

fn pointer_mut<T>(slice: Option<&DevSliceMut<'_>>) -> DevPtr<T> {
    DevPtr::new(slice.map_or(0, address_mut))
}

fn scalars(slice: Option<&DevSlice<'_>>, batch: u32, head: u32) -> HeadScalars {
    HeadScalars { data: pointer(slice), batch: batch as i32, head: head as i32 }
}
