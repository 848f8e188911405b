//! A call's pointers and numbers as kernel parameters, for every vendor.

use crate::abi::{
    ArrivalParams, BwdParams, CombineParams, DevPtr, FwdParams, HeadScalars, MAX_PARTS, MaskParams,
    PartPointers, View,
};
use crate::args::{
    BwdArgs, CombineArgs, DevSlice, DevSliceMut, ElemType, FwdArgs, MemorySpace, ScoreArgs, SeqArgs,
};
use crate::bwd::BwdProblem;
use crate::code_source::CodeSource;
use crate::combine::CombineProblem;
use crate::dropout::{keep_scale, keep_threshold};
use crate::expr::Number;
use crate::layout::{KvLayout, QLayout, Strides};
use crate::mask::MaskAlign;
use crate::problem::FwdProblem;
use crate::score::{Bias, BiasBroadcast, Descale};

/// The arguments of a forward kernel. `args` have passed [`check_fwd`](crate::args::check_fwd).
#[must_use]
pub fn fwd_params(problem: &FwdProblem, args: &FwdArgs<'_>) -> FwdParams {
    let mut params = inputs(problem, [&args.q, &args.k_slice(), &args.v_slice()], &args.seq, &args.score);
    params.o = View::new(address_mut(&args.o), problem.strides.o, is_packed_q(problem));
    params.lse = pointer_mut(args.lse.as_ref());
    params.keep_mask = pointer_mut(args.keep_mask.as_ref());
    params.scale_o = pointer(args.scale_o.as_ref());
    params.workspace = pointer_mut(args.workspace.as_ref());
    params
}

/// Arguments of a launch that makes lists of tiles: lengths, mask and captured numbers, and no operand. A mask as code
/// captures no tensor.
#[must_use]
pub fn list_params(problem: &FwdProblem, seq: &SeqArgs<'_>, numbers: &[Number]) -> FwdParams {
    // SAFETY: no memory at all.
    let none = unsafe { DevSlice::from_raw(MemorySpace::Device, std::ptr::null(), 0, ElemType::Bytes) };
    inputs(problem, [&none; 3], seq, &ScoreArgs { numbers, ..ScoreArgs::default() })
}

/// Arguments of a forward kernel for Q, K and V and the places of their rows only.
pub(crate) fn input_params(
    problem: &FwdProblem,
    [q, k, v]: [DevSlice<'_>; 3],
    seq: &SeqArgs<'_>,
) -> FwdParams {
    inputs(problem, [&q, &k, &v], seq, &ScoreArgs::default())
}

/// The arguments of a backward kernel, except those in its workspace, whose layout the kernel defines. `args` have
/// passed [`check_bwd`](crate::args::check_bwd).
#[must_use]
pub fn bwd_params(problem: &BwdProblem, args: &BwdArgs<'_>) -> BwdParams {
    let fwd = &problem.fwd;
    let (packed_q, packed_k) = (is_packed_q(fwd), is_packed_k(fwd));
    let (dbias_strides, per_batch, per_head) = match (problem.dbias, fwd.score.bias) {
        (Some(dbias), Bias::Elementwise(bias)) => {
            let (batch, head) = broadcast_strides(bias.broadcast, dbias.strides);
            let strides = Strides { batch, head, ..dbias.strides };
            let (per_batch, per_head) = bias.broadcast.axes();
            (strides, per_batch, per_head)
        }
        _ => (Strides { batch: 0, seq: 0, head: 0, dim: 0 }, false, false),
    };
    let mut params = BwdParams {
        fwd: FwdParams {
            o: View::new(address(&args.o), fwd.strides.o, packed_q),
            lse: pointer(Some(&args.lse)),
            ..inputs(fwd, [&args.q, &args.k, &args.v], &args.seq, &args.score)
        },
        dout: View::new(address(&args.dout), problem.dout, packed_q),
        dq: View::new(address_mut(&args.dq), problem.dq, packed_q),
        dk: View::new(address_mut(&args.dk), problem.dk, packed_k),
        dv: View::new(address_mut(&args.dv), problem.dv, packed_k),
        dbias: View::new(args.dbias.as_ref().map_or(0, address_mut), dbias_strides, false),
        dlse: pointer(args.dlse.as_ref()),
        dsink: pointer_mut(args.dsink.as_ref()),
        lse_log2: DevPtr::NULL,
        score_origin: DevPtr::NULL,
        delta: DevPtr::NULL,
        dq_sums: DevPtr::NULL,
        dq_semaphores: DevPtr::NULL,
        schedulers: DevPtr::NULL,
        non_finite: DevPtr::NULL,
        stats_head: 0,
        stats_batch: 0,
        dbias_per_batch: per_batch.into(),
        dbias_per_head: per_head.into(),
        captured_sums: DevPtr::NULL,
        captured_elems: 0,
        captured_parts: 0,
    };
    let code = CodeSource { code: &fwd.code, gradients: &problem.dcaptured };
    code.add_gradients(&mut params.fwd.code, &args.dcaptured);
    params
}

fn is_packed_q(problem: &FwdProblem) -> bool {
    problem.layout.q == QLayout::Packed
}

fn is_packed_k(problem: &FwdProblem) -> bool {
    problem.layout.kv == KvLayout::Packed
}

/// Batch and head strides of a bias, 0 along the axes that it lacks.
fn broadcast_strides(broadcast: BiasBroadcast, strides: Strides) -> (i64, i64) {
    let (per_batch, per_head) = broadcast.axes();
    (if per_batch { strides.batch } else { 0 }, if per_head { strides.head } else { 0 })
}

/// Operands that forward and backward both read, Q, K and V first; O, LSE and forward's own operands are
/// null.
fn inputs(
    problem: &FwdProblem,
    [q, k, v]: [&DevSlice<'_>; 3],
    seq: &SeqArgs<'_>,
    score: &ScoreArgs<'_>,
) -> FwdParams {
    let dims = problem.dims;
    let packed_q = is_packed_q(problem);
    let packed_k = is_packed_k(problem);
    let totals = seq.totals;
    let total_q = totals.total_q.unwrap_or(dims.seqlen_q);
    let lse_batch = if packed_q { 0 } else { i64::from(dims.num_heads_q) * i64::from(total_q) };
    let lse_head = i64::from(total_q);
    let block_table = seq.block_table;
    let seed = score.dropout.unwrap_or_default();
    let part = problem.part;
    let heads_of_whole = part.num_heads_q.unwrap_or(dims.num_heads_q);
    let (alibi_align, alibi_shift) = part.diagonal_on_device(problem.mask.alibi_align());
    let (bias, slopes_batch) = match problem.score.bias {
        Bias::Elementwise(bias) => {
            let (batch, head) = broadcast_strides(bias.broadcast, bias.strides);
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
        q: View::new(address(q), problem.strides.q, packed_q),
        k: View::new(address(k), problem.strides.k, packed_k),
        v: View::new(address(v), problem.strides.v, packed_k),
        o: View::NULL,
        bias,
        lse: DevPtr::NULL,
        lse_batch,
        lse_head,
        keep_mask: DevPtr::NULL,
        cu_seqlens_q: pointer(seq.cu_seqlens_q.as_ref()),
        cu_seqlens_k: pointer(seq.cu_seqlens_k.as_ref()),
        seqused_q: pointer(seq.seqused_q.as_ref()),
        seqused_k: pointer(seq.seqused_k.as_ref()),
        block_table: pointer(block_table.as_ref().map(|table| &table.pages)),
        block_table_batch: block_table.map_or(0, |table| i64::from(table.max_pages)),
        alibi_slopes: scalars(score.alibi_slopes.as_ref(), slopes_batch, 1),
        sink: scalars(score.sink.as_ref(), 0, 1),
        descale_q: descale(problem.scales.descale_q, score.descale_q.as_ref()),
        descale_k: descale(problem.scales.descale_k, score.descale_k.as_ref()),
        descale_v: descale(problem.scales.descale_v, score.descale_v.as_ref()),
        scale_o: DevPtr::NULL,
        workspace: DevPtr::NULL,
        batch: dims.batch as i32,
        seqlen_q: dims.seqlen_q as i32,
        seqlen_k: dims.seqlen_k as i32,
        total_q: total_q as i32,
        total_k: totals.total_k.unwrap_or(dims.seqlen_k) as i32,
        num_pages: totals.num_pages.unwrap_or(0) as i32,
        page_size: problem.layout.kv.page_size().unwrap_or(1) as i32,
        num_heads_q: dims.num_heads_q as i32,
        num_heads_kv: dims.num_heads_kv as i32,
        gqa_ratio: problem.gqa_ratio() as i32,
        mask: MaskParams::from(problem.device_mask()),
        alibi_bottom_right: i32::from(alibi_align == MaskAlign::BottomRight),
        alibi_shift: alibi_shift as i32,
        softmax_scale: problem.resolved_softmax_scale(),
        softcap: problem.score.softcap.unwrap_or(0.0),
        // A threshold of 2^32 (keep all) does not fit, but such a call has a kernel compiled without dropout.
        dropout_threshold: u32::try_from(keep_threshold(problem.dropout.p_drop)).unwrap_or(u32::MAX),
        dropout_scale: keep_scale(problem.dropout.p_drop) as f32,
        dropout_key_low: seed.seed as u32,
        dropout_key_high: (seed.seed >> 32) as u32,
        dropout_offset: seed.offset as u32,
        dropout_first_query: part.position_q as i32,
        dropout_first_quad: (part.position_k / 4) as i32,
        dropout_key_of_quad: (part.position_k % 4) as i32,
        // Head counts are below 2^32, as checked in the problem; the kernels count modulo 2^32.
        dropout_first_head: part.batch.wrapping_mul(heads_of_whole).wrapping_add(part.head) as i32,
        dropout_num_heads: heads_of_whole as i32,
        code: CodeSource { code: &problem.code, gradients: &[] }.words(score),
    }
}

/// Parameters of a kernel that waits for keys that arrive while it runs; `args` have passed the check of their
/// call.
#[must_use]
pub fn arrival_params(problem: &FwdProblem, seq: &SeqArgs<'_>) -> ArrivalParams {
    let (here, timeout_ns) = seq.arrivals.map_or((0, 0), |keys| (keys.here, keys.timeout_ns));
    ArrivalParams {
        ends: pointer(seq.arrivals.as_ref().map(|keys| &keys.ends)),
        flags: pointer(seq.arrivals.as_ref().map(|keys| &keys.flags)),
        here,
        timeout_ns,
        count: problem.arrivals.into(),
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
