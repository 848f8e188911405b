//! Drawn calls through the C library.

use std::ffi::{CStr, CString};
use std::ptr;

use fmha_c::{
    FMHA_BF16, FMHA_BIAS_ALIBI, FMHA_BIAS_ALIBI_PER_BATCH, FMHA_BIAS_ELEMENTWISE, FMHA_DESCALE_NONE,
    FMHA_DESCALE_PER_KV_HEAD, FMHA_DESCALE_PER_TENSOR, FMHA_E4M3FN, FMHA_E4M3FNUZ, FMHA_E5M2, FMHA_E5M2FNUZ,
    FMHA_F16, FMHA_F32, FMHA_V_COL_MAJOR, FmhaArgs, FmhaCache, FmhaGradients, FmhaPlan, FmhaProblem,
    FmhaStrides, fmha_drop, fmha_last_error, fmha_plan, fmha_run,
};
use fmha_conformance::case::{Backward, Body, Forward};
use fmha_conformance::check::{Selection, check_bwd, check_fwd, intact_bwd, intact_fwd};
use fmha_conformance::tensor::{Operand, Operands, Tensor};
use fmha_conformance::tensors::{HostBwd, HostFwd};
use fmha_conformance::verdict::Verdict;
use fmha_core::{
    Bias, BiasBroadcast, CacheUse, DType, Descale, DropoutSeed, FwdProblem, KvLayout, PlanOptions, QLayout,
    RotaryPairs, Strides, Totals, VLayout,
};

use super::{cases, cpu, held};

fn code(dtype: DType) -> i32 {
    match dtype {
        DType::F16 => FMHA_F16,
        DType::Bf16 => FMHA_BF16,
        DType::E4m3Fn => FMHA_E4M3FN,
        DType::E5m2 => FMHA_E5M2,
        DType::E4m3Fnuz => FMHA_E4M3FNUZ,
        DType::E5m2Fnuz => FMHA_E5M2FNUZ,
        _ => FMHA_F32,
    }
}

fn strides(tensor: Option<&Tensor>) -> FmhaStrides {
    let given = tensor.map_or(Strides { batch: 0, seq: 0, head: 0, dim: 0 }, |tensor| tensor.strides);
    FmhaStrides {
        batch_stride: given.batch,
        seqlen_stride: given.seq,
        head_stride: given.head,
        dim_stride: given.dim,
    }
}

fn at<T>(operands: &Operands, operand: Operand) -> *mut T {
    operands.get(operand).map_or(ptr::null_mut(), |tensor| tensor.elems().as_ptr() as *mut T)
}

/// Data that a problem of the C library points to.
struct Pointed {
    mask: CString,
    softmax_scale: Option<f32>,
    softcap: Option<f32>,
    cache: Option<FmhaCache>,
    gradients: Option<FmhaGradients>,
}

fn cache_of(problem: &FwdProblem, operands: &Operands) -> Option<FmhaCache> {
    let cache = &problem.cache;
    if *cache == CacheUse::default() {
        return None;
    }
    let append = cache.append.as_ref();
    Some(FmhaCache {
        struct_bytes: size_of::<FmhaCache>() as u64,
        seqlen_new: append.map_or(0, |append| append.seqlen_new.into()),
        max_pos: cache.rotary.map_or(0, |rotary| rotary.max_pos.into()),
        k_new: strides(operands.get(Operand::KNew)),
        v_new: strides(operands.get(Operand::VNew)),
        k_scale: strides(operands.get(Operand::KScale)),
        v_scale: strides(operands.get(Operand::VScale)),
        scale_block: cache.scales.as_ref().map_or(0, |scales| scales.block.into()),
        packed_new: append.is_some_and(|append| append.layout == QLayout::Packed).into(),
        tree_mask: cache.tree_mask.into(),
        rotary_dim: cache.rotary.map_or(0, |rotary| rotary.dim.cast_signed()),
        rotary_interleaved: cache
            .rotary
            .map_or(0, |rotary| i32::from(rotary.pairs == RotaryPairs::Interleaved)),
        dtype_rotary: cache.rotary.map_or(0, |rotary| code(rotary.dtype)),
        dtype_cache: cache.dtype.map_or(0, code),
        v_in_k: i32::from(cache.v_in_k),
        cache_rows: 0,
    })
}

fn pointed(problem: &FwdProblem, operands: &Operands) -> Pointed {
    Pointed {
        mask: CString::new(problem.mask.to_string()).unwrap(),
        softmax_scale: problem.score.softmax_scale,
        softcap: problem.score.softcap,
        cache: cache_of(problem, operands),
        gradients: None,
    }
}

fn descale(kind: Descale) -> i32 {
    match kind {
        Descale::None => FMHA_DESCALE_NONE,
        Descale::PerTensor => FMHA_DESCALE_PER_TENSOR,
        _ => FMHA_DESCALE_PER_KV_HEAD,
    }
}

fn problem_of(problem: &FwdProblem, operands: &Operands, pointed: &Pointed) -> FmhaProblem {
    let pointer = |value: &Option<f32>| value.as_ref().map_or(ptr::null(), ptr::from_ref);
    let dims = problem.dims;
    // SAFETY: numbers and pointers, of which all bits may be 0: `fmha.h` tells callers to begin with zeros.
    let mut given: FmhaProblem = unsafe { std::mem::zeroed() };
    given.struct_bytes = size_of::<FmhaProblem>() as u64;
    (given.batch, given.seqlen_q, given.seqlen_k) =
        (dims.batch.into(), dims.seqlen_q.into(), dims.seqlen_k.into());
    (given.num_heads_q, given.num_heads_kv) = (dims.num_heads_q.into(), dims.num_heads_kv.into());
    (given.head_dim_qk, given.head_dim_v) = (dims.head_dim_qk.into(), dims.head_dim_v.into());
    match problem.layout.kv {
        KvLayout::Paged { page_size } => given.page_size = page_size.into(),
        KvLayout::Packed => given.packed_k = 1,
        KvLayout::Strided => {}
    }
    given.packed_q = i32::from(problem.layout.q == QLayout::Packed);
    given.q = strides(operands.get(Operand::Q));
    given.k = strides(operands.get(Operand::K));
    given.v = if problem.cache.v_in_k { given.k } else { strides(operands.get(Operand::V)) };
    given.o = strides(operands.get(Operand::O));
    match problem.score.bias {
        Bias::None => {}
        Bias::Alibi { per_batch: false } => given.bias_kind = FMHA_BIAS_ALIBI,
        Bias::Alibi { per_batch: true } => given.bias_kind = FMHA_BIAS_ALIBI_PER_BATCH,
        Bias::Elementwise(elementwise) => {
            (given.bias_kind, given.dtype_bias) = (FMHA_BIAS_ELEMENTWISE, code(elementwise.dtype));
            given.bias = shared(strides(operands.get(Operand::Bias)), elementwise.broadcast);
        }
    }
    given.write_lse = problem.write_lse.into();
    given.write_keep_mask = problem.dropout.write_keep_mask.into();
    given.seqused_q = problem.layout.seqused_q.into();
    given.seqused_k = problem.layout.seqused_k.into();
    given.sink = problem.score.sink.into();
    given.descale_q = descale(problem.scales.descale_q);
    given.descale_k = descale(problem.scales.descale_k);
    given.descale_v = descale(problem.scales.descale_v);
    given.scale_o = problem.scales.scale_o.into();
    given.mask = pointed.mask.as_ptr();
    (given.softmax_scale, given.softcap) = (pointer(&pointed.softmax_scale), pointer(&pointed.softcap));
    given.gradients = pointed.gradients.as_ref().map_or(ptr::null(), ptr::from_ref);
    given.cache = pointed.cache.as_ref().map_or(ptr::null(), ptr::from_ref);
    given.p_drop = problem.dropout.p_drop;
    (given.dtype_qk, given.dtype_v, given.dtype_o) =
        (code(problem.dtypes.qk), code(problem.dtypes.v), code(problem.dtypes.o));
    given.v_layout = if problem.layout.v == VLayout::ColMajor { FMHA_V_COL_MAJOR } else { 0 };
    given
}

fn args_of(problem: &FwdProblem, (totals, dropout): (Totals, DropoutSeed), operands: &Operands) -> FmhaArgs {
    let total = |total: Option<u32>| total.map_or(0, i64::from);
    // SAFETY: numbers and pointers, of which all bits may be 0: `fmha.h` tells callers to begin with zeros.
    let mut args: FmhaArgs = unsafe { std::mem::zeroed() };
    args.struct_bytes = size_of::<FmhaArgs>() as u64;
    (args.total_q, args.total_k) = (total(totals.total_q), total(totals.total_k));
    (args.num_pages, args.total_new) = (total(totals.num_pages), total(totals.total_new));
    if problem.layout.kv.is_paged() {
        let table = operands.get(Operand::BlockTable).map_or(0, |table| table.elems().len() as i64 / 4);
        args.max_pages = table / i64::from(problem.dims.batch.max(1));
    }
    args.q = at::<u8>(operands, Operand::Q).cast();
    args.k = at(operands, Operand::K);
    args.v = if problem.cache.v_in_k { ptr::null_mut() } else { at(operands, Operand::V) };
    args.o = at(operands, Operand::O);
    args.bias = at::<u8>(operands, Operand::Bias).cast();
    args.lse = at(operands, Operand::Lse);
    args.keep_mask = at(operands, Operand::KeepMask);
    args.cu_seqlens_q = at(operands, Operand::CuSeqlensQ);
    args.cu_seqlens_k = at(operands, Operand::CuSeqlensK);
    args.seqused_q = at(operands, Operand::SequsedQ);
    args.seqused_k = at(operands, Operand::SequsedK);
    args.block_table = at(operands, Operand::BlockTable);
    args.alibi_slopes = at(operands, Operand::AlibiSlopes);
    args.sink = at(operands, Operand::Sink);
    args.descale_q = at(operands, Operand::DescaleQ);
    args.descale_k = at(operands, Operand::DescaleK);
    args.descale_v = at(operands, Operand::DescaleV);
    args.scale_o = at(operands, Operand::ScaleO);
    args.dout = at::<u8>(operands, Operand::Dout).cast();
    args.dq = at(operands, Operand::Dq);
    args.dk = at(operands, Operand::Dk);
    args.dv = at(operands, Operand::Dv);
    args.dbias = at(operands, Operand::Dbias);
    args.dlse = at(operands, Operand::Dlse);
    args.dsink = at(operands, Operand::Dsink);
    args.k_new = at::<u8>(operands, Operand::KNew).cast();
    args.v_new = at::<u8>(operands, Operand::VNew).cast();
    args.cu_seqlens_new = at(operands, Operand::CuSeqlensNew);
    args.rotary_cos = at::<u8>(operands, Operand::Cos).cast();
    args.rotary_sin = at::<u8>(operands, Operand::Sin).cast();
    args.tree_mask = at(operands, Operand::TreeMask);
    (args.dropout_seed, args.dropout_offset, args.dropout_seeded) = (dropout.seed, dropout.offset, 1);
    args
}

/// A plan of the C library on the CPU.
pub(super) struct Plan(*mut FmhaPlan);

fn last_error() -> String {
    // SAFETY: it gives a C string of this thread.
    unsafe { CStr::from_ptr(fmha_last_error()) }.to_string_lossy().into_owned()
}

impl Plan {
    pub(super) fn run(&self, args: &FmhaArgs) -> Result<(), String> {
        // SAFETY: every pointer is null or memory of the operands, which outlive this plan, as large as the problem
        // says; otherwise the run is refused before a read. Nothing else uses them meanwhile.
        if unsafe { fmha_run(self.0, args) } == 0 { Ok(()) } else { Err(last_error()) }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: no other reference to the plan exists.
        unsafe { fmha_drop(self.0) };
    }
}

/// Plans the problem on the CPU.
pub(super) fn planned(problem: &FmhaProblem) -> Result<Plan, String> {
    let mut plan = ptr::null_mut();
    // SAFETY: host pointers are null or point to as much memory as they say.
    let code = unsafe { fmha_plan(c"cpu".as_ptr(), problem, ptr::null(), &raw mut plan) };
    if code == 0 { Ok(Plan(plan)) } else { Err(last_error()) }
}

fn forward_of_c(case: &Forward) -> Result<Verdict, String> {
    let problem = case.problem.clone().validate().map_err(|error| error.to_string())?;
    let mut host = HostFwd::new(case.problem.clone(), &case.lengths, case.data).unwrap();
    host.score_sums = cpu().plan_fwd(&problem, &PlanOptions::default()).unwrap().promises().score_sums;
    let pointed = pointed(&host.problem, &host.operands);
    planned(&problem_of(&host.problem, &host.operands, &pointed))?.run(&args_of(
        &host.problem,
        (host.totals, host.dropout),
        &host.operands,
    ))?;
    let mut verdict = check_fwd(&host, &Selection::default(), &|_, _| ()).unwrap();
    verdict.faults.extend(intact_fwd(&host));
    Ok(verdict)
}

/// Strides of a bias, or of its gradient, as C has them: 0 along an axis that the bias does not have.
fn shared(strides: FmhaStrides, broadcast: BiasBroadcast) -> FmhaStrides {
    let (per_batch, per_head) = broadcast.axes();
    FmhaStrides {
        batch_stride: if per_batch { strides.batch_stride } else { 0 },
        head_stride: if per_head { strides.head_stride } else { 0 },
        ..strides
    }
}

/// Whether C sees a bias with fewer matrices than the problem has: in C, a head stride of 0 means that all heads
/// share one matrix, and this bias has that stride with an axis of heads.
fn is_told_otherwise(case: &Backward) -> bool {
    match case.problem.fwd.score.bias {
        Bias::Elementwise(bias) => bias.broadcast.axes().1 && bias.strides.head == 0,
        _ => false,
    }
}

fn gradients(host: &HostBwd) -> FmhaGradients {
    let (problem, operands) = (&host.problem, &host.operands);
    let mut dbias = strides(operands.get(Operand::Dbias));
    if let Bias::Elementwise(bias) = problem.fwd().score.bias {
        dbias = shared(dbias, bias.broadcast);
    }
    FmhaGradients {
        struct_bytes: size_of::<FmhaGradients>() as u64,
        dout: strides(operands.get(Operand::Dout)),
        dq: strides(operands.get(Operand::Dq)),
        dk: strides(operands.get(Operand::Dk)),
        dv: strides(operands.get(Operand::Dv)),
        dbias,
        dtype_grad: code(problem.dtype_grad),
        dtype_dbias: problem.dbias.map_or(0, |dbias| code(dbias.dtype)),
        write_dbias: problem.dbias.is_some().into(),
        write_dsink: problem.write_dsink.into(),
        has_dlse: problem.has_dlse.into(),
        reserved: 0,
    }
}

/// Makes the structs of a drawn call that has not run, and calls `then` with them.
pub(super) fn with_call(body: &Body, then: impl FnOnce(&FmhaProblem, &FmhaArgs)) {
    match body {
        Body::Forward(case) => {
            let host = HostFwd::new(case.problem.clone(), &case.lengths, case.data).unwrap();
            let pointed = pointed(&host.problem, &host.operands);
            let args = args_of(&host.problem, (host.totals, host.dropout), &host.operands);
            then(&problem_of(&host.problem, &host.operands, &pointed), &args);
        }
        Body::Backward(case) if case.problem.dbias.is_none() || !is_told_otherwise(case) => {
            let host = HostBwd::new(case.problem.clone(), &case.lengths, case.data).unwrap();
            let fwd = host.problem.fwd();
            let pointed = Pointed { gradients: Some(gradients(&host)), ..pointed(fwd, &host.operands) };
            let args = args_of(fwd, (host.totals, host.dropout), &host.operands);
            then(&problem_of(fwd, &host.operands, &pointed), &args);
        }
        _ => {}
    }
}

fn backward_of_c(case: &Backward) -> Result<Verdict, String> {
    let problem = case.problem.clone().validate().map_err(|error| error.to_string())?;
    let mut host = HostBwd::new(case.problem.clone(), &case.lengths, case.data).unwrap();
    host.fill_forward().unwrap();
    host.score_sums = cpu().plan_bwd(&problem, &PlanOptions::default()).unwrap().promises().score_sums;
    let (fwd, operands) = (host.problem.fwd(), &host.operands);
    let pointed = Pointed { gradients: Some(gradients(&host)), ..pointed(fwd, operands) };
    planned(&problem_of(fwd, operands, &pointed))?.run(&args_of(
        fwd,
        (host.totals, host.dropout),
        operands,
    ))?;
    let mut verdict = check_bwd(&host, &Selection::default(), &|_, _| ()).unwrap();
    verdict.faults.extend(intact_bwd(&host));
    Ok(verdict)
}

#[test]
fn drawn_calls_of_the_c_library_are_right_and_write_no_row_that_lengths_leave_out() {
    let results = cases(120).into_iter().filter_map(|(name, body)| {
        let result = match &body {
            Body::Forward(case) => forward_of_c(case),
            Body::Backward(case) if case.problem.dbias.is_some() && is_told_otherwise(case) => return None,
            Body::Backward(case) => backward_of_c(case),
            _ => return None,
        };
        Some((name, result))
    });
    held(&results.collect::<Vec<_>>(), 100, "C");
}
