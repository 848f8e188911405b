//! From a problem and its pointers to the kernels' argument structs.

use fmha_core::abi::{
    CombineParams, DevPtr, FwdParams, HeadScalars, MAX_PARTS, MaskParams, PartPointers, View,
};
use fmha_core::dropout::{keep_scale, keep_threshold};
use fmha_core::{
    Bias, BiasBroadcast, CombineArgs, CombineProblem, Descale, DevSlice, DevSliceMut, FwdArgs, FwdProblem,
    MaskAlign, SeqMode, Strides,
};

/// The arguments of a forward launch. `args` have passed `check_fwd`.
pub(crate) fn fwd(problem: &FwdProblem, args: &FwdArgs<'_>) -> FwdParams {
    let dims = problem.dims;
    let packed = matches!(problem.mode, SeqMode::Group { .. });
    let view = |slice: &DevSlice<'_>, strides| View::new(slice.as_ptr() as u64, strides, packed);
    let score = &args.score;
    let descale = |slice: &Option<DevSlice<'_>>, kind: Descale| match kind {
        Descale::None => HeadScalars::NULL,
        Descale::PerTensor => scalars(slice.as_ref(), 0, 0),
        Descale::PerKvHead => scalars(slice.as_ref(), dims.num_heads_kv, 1),
    };
    let (lse_batch, lse_head) = match problem.mode {
        SeqMode::Batch => (i64::from(dims.num_heads_q) * i64::from(dims.seqlen_q), i64::from(dims.seqlen_q)),
        SeqMode::Group { total_q, .. } => (0, i64::from(total_q)),
    };
    let (bias, alibi_slopes) = match problem.bias {
        Bias::None => (View::NULL, HeadScalars::NULL),
        Bias::Elementwise(bias) => {
            let (batch, head) = match bias.broadcast {
                BiasBroadcast::OneOne => (0, 0),
                BiasBroadcast::OneHead => (0, bias.strides.head),
                BiasBroadcast::BatchHead => (bias.strides.batch, bias.strides.head),
            };
            let strides = Strides { batch, head, ..bias.strides };
            (View::new(address(score.bias.as_ref()), strides, false), HeadScalars::NULL)
        }
        Bias::Alibi { per_batch } => {
            let batch = if per_batch { dims.num_heads_q } else { 0 };
            (View::NULL, scalars(score.alibi_slopes.as_ref(), batch, 1))
        }
    };
    FwdParams {
        q: view(&args.q, problem.q),
        k: view(&args.k, problem.k),
        v: view(&args.v, problem.v),
        o: View::new(args.o.as_mut_ptr() as u64, problem.o, packed),
        bias,
        lse: DevPtr::new(address_mut(args.lse.as_ref())),
        lse_batch,
        lse_head,
        keep_mask: DevPtr::new(address_mut(args.keep_mask.as_ref())),
        cu_seqlens_q: DevPtr::new(address(args.seq.cu_seqlens_q.as_ref())),
        cu_seqlens_k: DevPtr::new(address(args.seq.cu_seqlens_k.as_ref())),
        seqused_q: DevPtr::new(address(args.seq.seqused_q.as_ref())),
        seqused_k: DevPtr::new(address(args.seq.seqused_k.as_ref())),
        alibi_slopes,
        sink: if problem.sink { scalars(score.sink.as_ref(), 0, 1) } else { HeadScalars::NULL },
        descale_q: descale(&score.descale_q, problem.descale_q),
        descale_k: descale(&score.descale_k, problem.descale_k),
        descale_v: descale(&score.descale_v, problem.descale_v),
        scale_o: DevPtr::new(address(args.scale_o.as_ref())),
        workspace: DevPtr::new(address_mut(args.workspace.as_ref())),
        batch: dims.batch as i32,
        seqlen_q: dims.seqlen_q as i32,
        seqlen_k: dims.seqlen_k as i32,
        num_heads_q: dims.num_heads_q as i32,
        num_heads_kv: dims.num_heads_kv as i32,
        gqa_ratio: problem.gqa_ratio() as i32,
        mask: MaskParams::from(problem.mask),
        alibi_bottom_right: i32::from(problem.mask.alibi_align() == MaskAlign::BottomRight),
        softmax_scale: problem.resolved_softmax_scale(),
        softcap: problem.softcap.unwrap_or(0.0),
        dropout_threshold: u32::try_from(keep_threshold(problem.p_drop)).unwrap_or(u32::MAX),
        dropout_scale: keep_scale(problem.p_drop) as f32,
        dropout_key_low: score.dropout.seed as u32,
        dropout_key_high: (score.dropout.seed >> 32) as u32,
        dropout_offset: score.dropout.offset as u32,
    }
}

/// The arguments of a combine launch. `args` have passed `check_combine`, and there are at most
/// `MAX_PARTS` parts.
pub(crate) fn combine(problem: &CombineProblem, args: &CombineArgs<'_>) -> CombineParams {
    let mut parts = [PartPointers { o: DevPtr::NULL, lse: DevPtr::NULL }; MAX_PARTS];
    for (to, part) in parts.iter_mut().zip(args.parts) {
        *to = PartPointers {
            o: DevPtr::new(part.o.as_ptr() as u64),
            lse: DevPtr::new(part.lse.as_ptr() as u64),
        };
    }
    CombineParams {
        parts,
        part: View::new(0, problem.part, false),
        o: View::new(args.o.as_mut_ptr() as u64, problem.o, false),
        lse: DevPtr::new(address_mut(args.lse.as_ref())),
        num_parts: problem.num_parts as i32,
        batch: problem.batch as i32,
        seqlen_q: problem.seqlen_q as i32,
        num_heads_q: problem.num_heads_q as i32,
    }
}

fn scalars(slice: Option<&DevSlice<'_>>, batch: u32, head: i32) -> HeadScalars {
    HeadScalars { data: DevPtr::new(address(slice)), batch: batch as i32, head }
}

fn address(slice: Option<&DevSlice<'_>>) -> u64 {
    slice.map_or(0, |slice| slice.as_ptr() as u64)
}

fn address_mut(slice: Option<&DevSliceMut<'_>>) -> u64 {
    slice.map_or(0, |slice| slice.as_mut_ptr() as u64)
}
