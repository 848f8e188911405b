//! The C library.

use std::ffi::{CStr, CString, c_void};
use std::ptr;

use fmha_c::{
    FMHA_BF16, FMHA_E4M3FN, FMHA_E4M3FNUZ, FMHA_E5M2, FMHA_E5M2FNUZ, FMHA_F16, FMHA_F32, FMHA_V_COL_MAJOR,
    FmhaCache, FmhaCall, FmhaGradients, FmhaOptions, FmhaPlan, FmhaTensor, fmha_drop, fmha_last_error,
    fmha_plan, fmha_run,
};
use fmha_conformance::case::{Backward, Body, Forward};
use fmha_conformance::check::{Selection, check_bwd, check_fwd, intact_bwd, intact_fwd};
use fmha_conformance::tensor::{Operand, Operands, Tensor};
use fmha_conformance::tensors::{HostBwd, HostFwd};
use fmha_conformance::verdict::Verdict;
use fmha_core::{
    Bias, BiasBroadcast, CacheUse, DType, Descale, DropoutSeed, FwdProblem, KvLayout, PlanOptions,
    RotaryPairs, Totals, VLayout,
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

fn tensor(tensor: Option<&Tensor>) -> FmhaTensor {
    let Some(tensor) = tensor else { return none() };
    FmhaTensor {
        data: tensor.elems().as_ptr() as *mut c_void,
        batch_stride: tensor.strides.batch,
        seqlen_stride: tensor.strides.seq,
        head_stride: tensor.strides.head,
        dim_stride: tensor.strides.dim,
    }
}

fn none() -> FmhaTensor {
    FmhaTensor { data: ptr::null_mut(), batch_stride: 0, seqlen_stride: 0, head_stride: 0, dim_stride: 0 }
}

fn at<T>(operands: &Operands, operand: Operand) -> *mut T {
    operands.get(operand).map_or(ptr::null_mut(), |tensor| tensor.elems().as_ptr() as *mut T)
}

/// Data that a call points to beside its tensors.
struct Pointed {
    mask: CString,
    softmax_scale: Option<f32>,
    softcap: Option<f32>,
    cache: Option<FmhaCache>,
    gradients: Option<FmhaGradients>,
}

fn cache_of(problem: &FwdProblem, totals: Totals, operands: &Operands) -> Option<FmhaCache> {
    let cache = &problem.cache;
    if *cache == CacheUse::default() {
        return None;
    }
    Some(FmhaCache {
        struct_bytes: size_of::<FmhaCache>() as u64,
        seqlen_new: cache.append.as_ref().map_or(0, |append| append.seqlen_new.into()),
        total_new: totals.total_new.map_or(0, i64::from),
        max_pos: cache.rotary.map_or(0, |rotary| rotary.max_pos.into()),
        k_new: tensor(operands.get(Operand::KNew)),
        v_new: tensor(operands.get(Operand::VNew)),
        cu_seqlens_new: at(operands, Operand::CuSeqlensNew),
        rotary_cos: at(operands, Operand::Cos),
        rotary_sin: at(operands, Operand::Sin),
        tree_mask: at(operands, Operand::TreeMask),
        rotary_dim: cache.rotary.map_or(0, |rotary| rotary.dim.cast_signed()),
        rotary_interleaved: cache
            .rotary
            .map_or(0, |rotary| i32::from(rotary.pairs == RotaryPairs::Interleaved)),
        dtype_rotary: cache.rotary.map_or(0, |rotary| code(rotary.dtype)),
        dtype_cache: cache.dtype.map_or(0, code),
        v_in_k: i32::from(cache.v_in_k),
        reserved: 0,
    })
}

fn pointed(problem: &FwdProblem, totals: Totals, operands: &Operands) -> Pointed {
    Pointed {
        mask: CString::new(problem.mask.to_string()).unwrap(),
        softmax_scale: problem.score.softmax_scale,
        softcap: problem.score.softcap,
        cache: cache_of(problem, totals, operands),
        gradients: None,
    }
}

fn call(
    problem: &FwdProblem,
    (totals, dropout): (Totals, DropoutSeed),
    operands: &Operands,
    pointed: &Pointed,
) -> FmhaCall {
    let pointer = |value: &Option<f32>| value.as_ref().map_or(ptr::null(), ptr::from_ref);
    let dims = problem.dims;
    let total = |total: Option<u32>| total.map_or(0, i64::from);
    let mut bias = tensor(operands.get(Operand::Bias));
    let mut dtype_bias = 0;
    if let Bias::Elementwise(elementwise) = problem.score.bias {
        dtype_bias = code(elementwise.dtype);
        bias = shared(bias, elementwise.broadcast);
    }
    let table = operands.get(Operand::BlockTable).map_or(0, |table| table.elems().len() as i64 / 4);
    // SAFETY: numbers and pointers, of which all bits may be 0: what `fmha.h` asks its caller to begin with.
    let mut call: FmhaCall = unsafe { std::mem::zeroed() };
    call.struct_bytes = size_of::<FmhaCall>() as u64;
    (call.batch, call.seqlen_q, call.seqlen_k) =
        (dims.batch.into(), dims.seqlen_q.into(), dims.seqlen_k.into());
    (call.num_heads_q, call.num_heads_kv) = (dims.num_heads_q.into(), dims.num_heads_kv.into());
    (call.head_dim_qk, call.head_dim_v) = (dims.head_dim_qk.into(), dims.head_dim_v.into());
    (call.total_q, call.total_k, call.num_pages) =
        (total(totals.total_q), total(totals.total_k), total(totals.num_pages));
    if let KvLayout::Paged { page_size } = problem.layout.kv {
        (call.page_size, call.max_pages) = (page_size.into(), table / i64::from(dims.batch.max(1)));
    }
    call.q = tensor(operands.get(Operand::Q));
    call.k = tensor(operands.get(Operand::K));
    call.v = tensor(operands.get(Operand::V));
    if problem.cache.v_in_k {
        call.v = FmhaTensor { data: ptr::null_mut(), ..call.k };
    }
    call.o = tensor(operands.get(Operand::O));
    (call.bias, call.dtype_bias) = (bias, dtype_bias);
    call.lse = at(operands, Operand::Lse);
    call.keep_mask = at(operands, Operand::KeepMask);
    call.cu_seqlens_q = at(operands, Operand::CuSeqlensQ);
    call.cu_seqlens_k = at(operands, Operand::CuSeqlensK);
    call.seqused_q = at(operands, Operand::SequsedQ);
    call.seqused_k = at(operands, Operand::SequsedK);
    call.block_table = at(operands, Operand::BlockTable);
    call.alibi_slopes = at(operands, Operand::AlibiSlopes);
    call.sink = at(operands, Operand::Sink);
    call.descale_q = at(operands, Operand::DescaleQ);
    call.descale_k = at(operands, Operand::DescaleK);
    call.descale_v = at(operands, Operand::DescaleV);
    call.scale_o = at(operands, Operand::ScaleO);
    call.mask = pointed.mask.as_ptr();
    (call.softmax_scale, call.softcap) = (pointer(&pointed.softmax_scale), pointer(&pointed.softcap));
    call.gradients = pointed.gradients.as_ref().map_or(ptr::null(), ptr::from_ref);
    call.cache = pointed.cache.as_ref().map_or(ptr::null(), ptr::from_ref);
    (call.dropout_seed, call.dropout_offset, call.dropout_seeded) = (dropout.seed, dropout.offset, 1);
    call.p_drop = problem.dropout.p_drop;
    (call.dtype_qk, call.dtype_v, call.dtype_o) =
        (code(problem.dtypes.qk), code(problem.dtypes.v), code(problem.dtypes.o));
    call.v_layout = if problem.layout.v == VLayout::ColMajor { FMHA_V_COL_MAJOR } else { 0 };
    call.alibi_per_batch = i32::from(problem.score.bias == Bias::Alibi { per_batch: true });
    call.descale_per_tensor = i32::from(problem.scales.descale_k == Descale::PerTensor);
    call
}

/// A plan of the C library on the CPU.
pub(super) struct Plan(*mut FmhaPlan);

fn last_error() -> String {
    // SAFETY: it gives a C string of this thread.
    unsafe { CStr::from_ptr(fmha_last_error()) }.to_string_lossy().into_owned()
}

impl Plan {
    pub(super) fn run(&self, call: &FmhaCall) -> Result<(), String> {
        // SAFETY: every pointer is null or memory of the operands, which outlive this, as large as the problem says, or
        // the call is refused before one is read; nothing else touches them meanwhile.
        if unsafe { fmha_run(self.0, call) } == 0 { Ok(()) } else { Err(last_error()) }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: no other reference to it exists.
        unsafe { fmha_drop(self.0) };
    }
}

/// Plans the call on the CPU.
pub(super) fn planned(call: &FmhaCall) -> Result<Plan, String> {
    // SAFETY: numbers and pointers, of which all bits may be 0.
    let mut options: FmhaOptions = unsafe { std::mem::zeroed() };
    (options.struct_bytes, options.backend) = (size_of::<FmhaOptions>() as u64, c"cpu".as_ptr());
    let mut plan = ptr::null_mut();
    // SAFETY: host pointers are null or point to what they say.
    let code = unsafe { fmha_plan(call, &raw const options, &raw mut plan) };
    if code == 0 { Ok(Plan(plan)) } else { Err(last_error()) }
}

fn run(call: &FmhaCall) -> Result<(), String> {
    planned(call)?.run(call)
}

fn forward_of_c(case: &Forward) -> Result<Verdict, String> {
    let problem = case.problem.clone().validate().map_err(|error| error.to_string())?;
    let mut host = HostFwd::new(case.problem.clone(), &case.lengths, case.data).unwrap();
    host.score_sums = cpu().plan_fwd(&problem, &PlanOptions::default()).unwrap().promises().score_sums;
    let pointed = pointed(&host.problem, host.totals, &host.operands);
    run(&call(&host.problem, (host.totals, host.dropout), &host.operands, &pointed))?;
    let mut verdict = check_fwd(&host, &Selection::default(), &|_, _| ()).unwrap();
    verdict.faults.extend(intact_fwd(&host));
    Ok(verdict)
}

/// A bias, or its gradient, as C tells which axes it has.
fn shared(tensor: FmhaTensor, broadcast: BiasBroadcast) -> FmhaTensor {
    let (per_batch, per_head) = broadcast.axes();
    FmhaTensor {
        batch_stride: if per_batch { tensor.batch_stride } else { 0 },
        head_stride: if per_head { tensor.head_stride } else { 0 },
        ..tensor
    }
}

/// Whether a bias that C tells by its strides is one of fewer matrices than the problem's.
fn is_told_otherwise(case: &Backward) -> bool {
    match case.problem.fwd.score.bias {
        Bias::Elementwise(bias) => bias.broadcast.axes().1 && bias.strides.head == 0,
        _ => false,
    }
}

fn gradients(host: &HostBwd) -> FmhaGradients {
    let operands = &host.operands;
    let mut dbias = tensor(operands.get(Operand::Dbias));
    if let Bias::Elementwise(bias) = host.problem.fwd().score.bias {
        dbias = shared(dbias, bias.broadcast);
    }
    FmhaGradients {
        struct_bytes: size_of::<FmhaGradients>() as u64,
        dout: tensor(operands.get(Operand::Dout)),
        dq: tensor(operands.get(Operand::Dq)),
        dk: tensor(operands.get(Operand::Dk)),
        dv: tensor(operands.get(Operand::Dv)),
        dbias,
        dlse: at(operands, Operand::Dlse),
        dsink: at(operands, Operand::Dsink),
        dtype_grad: code(host.problem.dtype_grad),
        dtype_dbias: host.problem.dbias.map_or(0, |dbias| code(dbias.dtype)),
    }
}

/// The struct of a drawn call, which has not run.
pub(super) fn with_call(body: &Body, then: impl FnOnce(&FmhaCall)) {
    match body {
        Body::Forward(case) => {
            let host = HostFwd::new(case.problem.clone(), &case.lengths, case.data).unwrap();
            let pointed = pointed(&host.problem, host.totals, &host.operands);
            then(&call(&host.problem, (host.totals, host.dropout), &host.operands, &pointed));
        }
        Body::Backward(case) if case.problem.dbias.is_none() || !is_told_otherwise(case) => {
            let host = HostBwd::new(case.problem.clone(), &case.lengths, case.data).unwrap();
            let mut pointed = pointed(host.problem.fwd(), host.totals, &host.operands);
            pointed.gradients = Some(gradients(&host));
            then(&call(host.problem.fwd(), (host.totals, host.dropout), &host.operands, &pointed));
        }
        _ => {}
    }
}

fn backward_of_c(case: &Backward) -> Result<Verdict, String> {
    let problem = case.problem.clone().validate().map_err(|error| error.to_string())?;
    let mut host = HostBwd::new(case.problem.clone(), &case.lengths, case.data).unwrap();
    host.fill_forward().unwrap();
    host.score_sums = cpu().plan_bwd(&problem, &PlanOptions::default()).unwrap().promises().score_sums;
    let operands = &host.operands;
    let mut pointed = pointed(host.problem.fwd(), host.totals, operands);
    pointed.gradients = Some(gradients(&host));
    run(&call(host.problem.fwd(), (host.totals, host.dropout), operands, &pointed))?;
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
