//! Reads and checks one rank's structs of a call over ranks, before any message to the other ranks.

use std::ffi::{CString, c_char};
use std::sync::{Arc, Mutex};

use fmha::{DType, Device, FwdProblem, QLayout, Totals};
use fmha_dist::{BwdPlan, FwdPlan, Group, Options, Partition, Problem};

use super::{
    FMHA_CONTIGUOUS, FMHA_REPLICATED, FMHA_RUNS, FMHA_ZIG_ZAG, FmhaDistPlan, FmhaRanks, FmhaRun, Ready,
    Sizes, Text, refused,
};
use crate::code::Captures;
use crate::host::{self, AnyPass, Choice, Given, pointed, size, struct_bytes, text};
use crate::structs::{FMHA_BIAS_NONE, FmhaGradients, FmhaOptions, FmhaProblem, FmhaStrides};

/// A partition that a constant such as FMHA_ZIG_ZAG names.
pub(super) fn built(field: &'static str, kind: i32, rows: u32, ranks: u32) -> crate::Result<Partition> {
    match kind {
        FMHA_CONTIGUOUS => Ok(Partition::contiguous(rows, ranks)),
        FMHA_ZIG_ZAG => Ok(Partition::zig_zag(rows, ranks)),
        FMHA_REPLICATED => Ok(Partition::replicated(rows, ranks)),
        _ => {
            let text =
                format!("{field} {kind} is not in 0..=2 (FMHA_CONTIGUOUS, FMHA_ZIG_ZAG, FMHA_REPLICATED)");
            Err(refused(field, text))
        }
    }
}

/// One rank's view of a call, complete before any message to the other ranks.
pub(super) struct Local {
    problem: Problem,
    gradients: Option<(DType, bool)>,
    device: Device,
    options: Options,
    own: FwdProblem,
    captures: Captures,
    totals: Totals,
    bytes: Sizes,
}

impl Local {
    /// # Safety
    /// As [`super::fmha_dist_plan`].
    pub(super) unsafe fn read(
        device: *const c_char,
        given: Option<&FmhaProblem>,
        ranks: Option<&FmhaRanks>,
        options: *const FmhaOptions,
        group: &dyn Group,
    ) -> crate::Result<Self> {
        let given = given.ok_or_else(|| refused("problem", "problem is null".to_owned()))?;
        let ranks = ranks.ok_or_else(|| refused("ranks", "ranks is null".to_owned()))?;
        struct_bytes::<FmhaRanks>(ranks.struct_bytes)?;
        struct_bytes::<FmhaProblem>(given.struct_bytes)?;
        // SAFETY: the caller keeps the contract of `read`.
        let (gradients, choice) = unsafe { (pointed(given.gradients)?, Choice::read(options)?) };
        if choice.caller_workspace {
            let text = "caller_workspace 1: a plan over ranks has scratch of its own";
            return Err(refused("caller_workspace", text.to_owned()));
        }
        // SAFETY: the caller promised C strings, and as many runs and offsets as the counts say.
        let (scheme, links, cu_q, cu_k) = unsafe {
            (
                text("scheme", ranks.scheme)?,
                text("links", ranks.links)?,
                offsets("cu_seqlens_q", ("packed_q", given.packed_q), ranks.cu_seqlens_q, given.batch)?,
                offsets("cu_seqlens_k", ("packed_k", given.packed_k), ranks.cu_seqlens_k, given.batch)?,
            )
        };
        // SAFETY: the caller keeps the contract of `read`.
        let Given { problem, captures } = unsafe { Given::read(&contiguous(given), host::mask(given)?)? };
        let (whole, dcaptured) = match problem {
            AnyPass::Forward(problem) => (problem, Vec::new()),
            AnyPass::Backward(problem) => (problem.fwd, problem.dcaptured),
        };
        let dims = whole.dims;
        let rows =
            |cu: &Option<Vec<u32>>, seqlen| cu.as_ref().and_then(|cu| cu.last().copied()).unwrap_or(seqlen);
        // SAFETY: the caller keeps the contract of `read`.
        let (q, k) = unsafe {
            (
                partition(
                    ("partition_q", ranks.partition_q),
                    (ranks.runs_q, ranks.num_runs_q),
                    rows(&cu_q, dims.seqlen_q),
                    group.size(),
                )?,
                partition(
                    ("partition_k", ranks.partition_k),
                    (ranks.runs_k, ranks.num_runs_k),
                    rows(&cu_k, dims.seqlen_k),
                    group.size(),
                )?,
            )
        };
        let at = group.rank();
        let own = |field, partition: &Partition, said: i64| -> crate::Result<u32> {
            let has = partition.rows_of(at);
            if said == i64::from(has) {
                return Ok(has);
            }
            Err(refused(
                field,
                format!("{field} {said} is not the {has} rows that the partition gives rank {at}"),
            ))
        };
        let own_rows = [own("own_rows_q", &q, ranks.own_rows_q)?, own("own_rows_k", &k, ranks.own_rows_k)?];
        let packed = cu_q.is_some();
        rows_are_contiguous(given, gradients, own_rows, packed)?;
        let dtype_grad = gradients.map(|of| host::dtype("dtype_grad", of.dtype_grad)).transpose()?;
        let bytes = sizes(&whole, dtype_grad, own_rows, packed);
        let mut own = whole.clone();
        own.dims.seqlen_q = own_rows[0];
        // A rank without queries that asks for no LSE and no bias is treated as if it asked for those that the
        // other ranks have.
        let no_rows = ranks.own_rows_q == 0;
        let (no_lse, no_bias) = (no_rows && !whole.write_lse, no_rows && given.bias_kind == FMHA_BIAS_NONE);
        let total_q = (whole.layout.q == QLayout::Packed).then(|| q.rows());
        let mut problem = Problem::new(whole, q).keys(k).dcaptured(dcaptured).as_others(no_lse, no_bias);
        if let (Some(q), Some(k)) = (cu_q, cu_k) {
            problem = problem.packed(q, k);
        }
        let mut options = Options::default().kernels(choice.plan);
        if let Some(scheme) = scheme {
            options =
                options.scheme(scheme.parse::<fmha_dist::Scheme>().map_err(|text| refused("scheme", text))?);
        }
        if let Some(links) = links {
            options = options.links(links.parse().map_err(|text: String| refused("links", text))?);
        }
        if let Some(gradients) = gradients {
            for (field, given) in [("has_dlse", gradients.has_dlse), ("write_dbias", gradients.write_dbias)] {
                if given != 0 {
                    return Err(refused(field, format!("{field} {given} is taken over 1 rank alone")));
                }
            }
        }
        let gradients = dtype_grad.zip(gradients.map(|of| of.write_dsink != 0));
        // SAFETY: the caller keeps the contract of `read`.
        let device = unsafe { host::device(device)? };
        let totals = Totals { total_q, ..Totals::NONE };
        Ok(Self { problem, gradients, device, options, own, captures, totals, bytes })
    }

    pub(super) fn plan(self, group: &Arc<dyn Group>) -> Text<FmhaDistPlan> {
        let Self { problem, gradients, device, options, own, captures, totals, bytes } = self;
        let (ready, text) = match gradients {
            None => FwdPlan::new(&problem, group.clone(), &device, &options).map(|plan| {
                let text = plan.explain();
                (Ready::Forward(plan), text)
            }),
            Some(wanted) => BwdPlan::new(&problem, wanted, group.clone(), &device, &options).map(|plan| {
                let text = plan.explain();
                (Ready::Backward(plan), text)
            }),
        }
        .map_err(|error| error.to_string())?;
        let text = CString::new(text).unwrap_or_default();
        Ok(FmhaDistPlan {
            ready: Mutex::new(ready),
            group: group.clone(),
            device,
            gradients,
            own,
            whole: problem.whole,
            dcaptured: problem.dcaptured,
            captures,
            totals,
            bytes,
            text,
        })
    }
}

/// The offsets of packed sequences.
///
/// # Safety
/// `pointer` is null or `batch + 1` numbers of host memory.
unsafe fn offsets(
    field: &'static str,
    (flag, packed): (&str, i32),
    pointer: *const i32,
    batch: i64,
) -> crate::Result<Option<Vec<u32>>> {
    if pointer.is_null() == (packed != 0) {
        let is = if pointer.is_null() { "null" } else { "given" };
        return Err(refused(field, format!("{field} is {is}, but {flag} is {packed}")));
    }
    if pointer.is_null() {
        return Ok(None);
    }
    let count = size("batch", batch)? as usize + 1;
    // SAFETY: the caller promised `count` offsets at this pointer.
    let given = unsafe { std::slice::from_raw_parts(pointer, count) };
    let unsigned = |&at: &i32| {
        u32::try_from(at).map_err(|_| refused(field, format!("{field}: an offset of {at} is below 0")))
    };
    given.iter().map(unsigned).collect::<crate::Result<_>>().map(Some)
}

/// # Safety
/// `runs` is null, or points to `count` structs in host memory.
unsafe fn partition(
    (field, kind): (&'static str, i32),
    (runs, count): (*const FmhaRun, i64),
    rows: u32,
    ranks: u32,
) -> crate::Result<Partition> {
    let count = size(field, count)? as usize;
    if kind != FMHA_RUNS {
        if count != 0 || !runs.is_null() {
            return Err(refused(
                field,
                format!("{field} {kind} goes with 0 runs: they go with 3 (FMHA_RUNS)"),
            ));
        }
        return built(field, kind, rows, ranks);
    }
    let mut by_rank = vec![Vec::new(); ranks as usize];
    let given = if count == 0 || runs.is_null() {
        &[]
    } else {
        // SAFETY: the caller promised `count` structs at this pointer.
        unsafe { std::slice::from_raw_parts(runs, count) }
    };
    if given.len() != count {
        return Err(refused(field, format!("{field}: runs is null, but {count} are said")));
    }
    for run in given {
        let (rank, begin, end) = (size("rank", run.rank)?, size("begin", run.begin)?, size("end", run.end)?);
        let Some(runs) = by_rank.get_mut(rank as usize) else {
            return Err(refused(field, format!("{field}: a run of rank {rank}, of {ranks} ranks")));
        };
        if end < begin {
            return Err(refused(field, format!("{field}: a run ends at {end}, before it begins at {begin}")));
        }
        runs.push(begin..end);
    }
    Partition::new(rows, by_rank).map_err(|error| refused(field, error.to_string()))
}

/// The problem of one device that has all rows, with contiguous strides: with the strides of a rank's tensors, rows
/// of the whole would overlap.
fn contiguous(given: &FmhaProblem) -> FmhaProblem {
    let (heads_q, heads_kv) = (given.num_heads_q, given.num_heads_kv);
    FmhaProblem {
        q: dense(given.seqlen_q, heads_q, given.head_dim_qk),
        k: dense(given.seqlen_k, heads_kv, given.head_dim_qk),
        v: dense(given.seqlen_k, heads_kv, given.head_dim_v),
        o: dense(given.seqlen_q, heads_q, given.head_dim_v),
        ..*given
    }
}

fn dense(rows: i64, heads: i64, dim: i64) -> FmhaStrides {
    let seqlen_stride = heads.wrapping_mul(dim);
    let batch_stride = seqlen_stride.wrapping_mul(rows);
    FmhaStrides { batch_stride, seqlen_stride, head_stride: dim, dim_stride: 1 }
}

/// Returns an error unless the rows of this rank's tensor lie one after another.
fn rows_are_contiguous(
    call: &FmhaProblem,
    gradients: Option<&FmhaGradients>,
    [own_q, own_k]: [u32; 2],
    packed: bool,
) -> crate::Result<()> {
    let (heads_q, heads_kv) = (call.num_heads_q, call.num_heads_kv);
    let (qk, v) = (call.head_dim_qk, call.head_dim_v);
    let mut tensors = vec![
        ("q", &call.q, own_q, heads_q, qk),
        ("k", &call.k, own_k, heads_kv, qk),
        ("v", &call.v, own_k, heads_kv, v),
        ("o", &call.o, own_q, heads_q, v),
    ];
    if let Some(gradients) = gradients {
        tensors.extend([
            ("dout", &gradients.dout, own_q, heads_q, v),
            ("dq", &gradients.dq, own_q, heads_q, qk),
            ("dk", &gradients.dk, own_k, heads_kv, qk),
            ("dv", &gradients.dv, own_k, heads_kv, v),
        ]);
    }
    for (name, tensor, rows, heads, dim) in tensors {
        let wanted = dense(rows.into(), heads, dim);
        // An axis of one element has no stride that matters.
        for (axis, given, wanted, elems) in [
            ("batch_stride", tensor.batch_stride, wanted.batch_stride, if packed { 1 } else { call.batch }),
            ("seqlen_stride", tensor.seqlen_stride, wanted.seqlen_stride, rows.into()),
            ("head_stride", tensor.head_stride, wanted.head_stride, heads),
            ("dim_stride", tensor.dim_stride, 1, dim),
        ] {
            if given != wanted && elems > 1 && rows > 0 {
                let text = format!("{name}.{axis} {given} is not {wanted}: a rank's rows are contiguous");
                return Err(refused(name, text));
            }
        }
    }
    Ok(())
}

/// Bytes of a rank's tensors.
fn sizes(whole: &FwdProblem, dtype_grad: Option<DType>, [own_q, own_k]: [u32; 2], packed: bool) -> Sizes {
    let (dims, dtypes) = (whole.dims, whole.dtypes);
    let sequences = if packed { 1 } else { u64::from(dims.batch) };
    let of = |rows: u32, heads: u32, dim: u32, bytes: u64| {
        let elems = [rows, heads, dim].into_iter().fold(sequences, |elems, n| elems.saturating_mul(n.into()));
        elems.saturating_mul(bytes)
    };
    let (qk, v, grad) =
        (dtypes.qk.size_bytes(), dtypes.v.size_bytes(), dtype_grad.map_or(0, DType::size_bytes));
    let (heads_q, heads_kv) = (dims.num_heads_q, dims.num_heads_kv);
    Sizes {
        qkv: [
            of(own_q, heads_q, dims.head_dim_qk, qk),
            of(own_k, heads_kv, dims.head_dim_qk, qk),
            of(own_k, heads_kv, dims.head_dim_v, v),
        ],
        o: of(own_q, heads_q, dims.head_dim_v, dtypes.o.size_bytes()),
        lse: of(own_q, heads_q, 1, 4),
        grads: [
            of(own_q, heads_q, dims.head_dim_qk, grad),
            of(own_k, heads_kv, dims.head_dim_qk, grad),
            of(own_k, heads_kv, dims.head_dim_v, grad),
        ],
    }
}
