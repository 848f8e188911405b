//! A plan behind the C pointer: made from one call's struct, run with others that agree with it.

use std::ffi::CString;

use fmha::{
    BlockTable, BwdArgs, BwdPlan, CacheArgs, CacheSlice, CombineArgs, CombinePlan, DType, Descale, DevBuffer,
    DevSlice, DevSliceMut, Device, Dims, ElemType, Extents, FwdArgs, FwdPlan, FwdProblem, ListLength,
    MemorySpace, PartialResult, ProblemError, ScoreArgs, SeqArgs, Shape, Strides, Totals, ValidFwd,
    Workspace,
};

use crate::Result;
use crate::agree;
use crate::host::{self, Choice, Pointed, strides};
use crate::structs::{FmhaCache, FmhaCall, FmhaCombine, FmhaGradients, FmhaPartial, FmhaTensor};

/// A chosen and loaded kernel with its scratch memory, of the backend that it was planned on.
pub struct FmhaPlan {
    space: MemorySpace,
    planned: Box<Planned>,
    scratch: Scratch,
    text: CString,
}

/// Source of a run's scratch.
enum Scratch {
    /// Scratch that the plan owns; `None`: the plan needs none.
    Own(Option<DevBuffer>),
    /// Scratch that each call brings, of so many bytes.
    Callers { bytes: u64 },
}

/// The plan, and the struct that later ones are held to.
enum Planned {
    Forward { plan: FwdPlan, call: FmhaCall, pointed: Pointed },
    Backward { plan: BwdPlan, call: FmhaCall, pointed: Pointed },
    Combine { plan: CombinePlan, call: FmhaCombine, first: FmhaPartial },
}

impl FmhaPlan {
    /// # Safety
    /// The host pointers of `call` are null or point to what `fmha.h` says.
    pub(crate) unsafe fn new(device: &Device, call: &FmhaCall, choice: &Choice) -> Result<Self> {
        // SAFETY: the caller keeps the contract of `new`.
        let pointed = unsafe { Pointed::read(call)? };
        let (planned, scratch, text) = match &pointed.gradients {
            None => {
                let plan = device.plan_fwd(&pointed.forward(call)?.validate()?, &choice.plan)?;
                let (scratch, text) = (plan.workspace(), plan.to_string());
                (Planned::Forward { plan, call: *call, pointed }, scratch, text)
            }
            Some(gradients) => {
                let problem = pointed.backward(call, gradients)?;
                let plan = device.plan_bwd(&problem.validate()?, &choice.plan)?;
                let (scratch, text) = (plan.workspace(), plan.to_string());
                (Planned::Backward { plan, call: *call, pointed }, scratch, text)
            }
        };
        Self::with(device, planned, (scratch, choice.caller_workspace), text)
    }

    /// Checks a call as [`Self::new`] does, for every device and without making a plan.
    ///
    /// # Safety
    /// As [`Self::new`].
    pub(crate) unsafe fn check(call: &FmhaCall) -> Result<()> {
        // SAFETY: the caller keeps the contract of `check`.
        let pointed = unsafe { Pointed::read(call)? };
        match &pointed.gradients {
            None => pointed.forward(call)?.validate().map(|_| ())?,
            Some(gradients) => pointed.backward(call, gradients)?.validate().map(|_| ())?,
        }
        Ok(())
    }

    /// Checks a call as [`Self::combine`] does, for every device and without making a plan.
    ///
    /// # Safety
    /// As [`Self::combine`].
    pub(crate) unsafe fn check_combine(call: &FmhaCombine) -> Result<()> {
        // SAFETY: the caller keeps the contract of `check_combine`.
        let first = host::first_part(call, unsafe { host::parts(call)? });
        host::combine(call, &first)?.validate()?;
        Ok(())
    }

    /// # Safety
    /// `parts` is null or as many as `num_parts` says.
    pub(crate) unsafe fn combine(device: &Device, call: &FmhaCombine, choice: &Choice) -> Result<Self> {
        // SAFETY: the caller keeps the contract of `combine`.
        let first = host::first_part(call, unsafe { host::parts(call)? });
        let plan = device.plan_combine(&host::combine(call, &first)?.validate()?, &choice.plan)?;
        let (scratch, text) = (plan.workspace(), plan.to_string());
        let planned = Planned::Combine { plan, call: *call, first };
        Self::with(device, planned, (scratch, choice.caller_workspace), text)
    }

    fn with(
        device: &Device,
        planned: Planned,
        (wanted, callers): (Workspace, bool),
        text: String,
    ) -> Result<Self> {
        let scratch = match callers {
            true => Scratch::Callers { bytes: wanted.bytes },
            false => Scratch::Own(device.memory().workspace(wanted)?),
        };
        let (text, space) = (CString::new(text).unwrap_or_default(), device.memory().space());
        Ok(Self { space, planned: Box::new(planned), scratch, text })
    }

    /// Bytes that each call has to bring.
    pub(crate) fn workspace_bytes(&self) -> u64 {
        match self.scratch {
            Scratch::Own(_) => 0,
            Scratch::Callers { bytes } => bytes,
        }
    }

    /// The scratch of a run of `call`: whether it is large enough is for the backend to say.
    ///
    /// # Safety
    /// As [`Self::run`].
    #[inline]
    unsafe fn workspace(&self, memory: Memory, call: &FmhaCall) -> Result<Option<DevSliceMut<'_>>> {
        let (given, bytes) = (call.workspace, call.workspace_bytes);
        let refused = |field, text| Err(ProblemError::new(field, text).into());
        match &self.scratch {
            _ if given.is_null() && bytes > 0 => refused(
                "workspace_bytes",
                format!("workspace_bytes {bytes} goes with workspace, which is null"),
            ),
            Scratch::Own(_) if !given.is_null() => refused(
                "workspace",
                "workspace is given, but the plan has its own: caller_workspace 0".into(),
            ),
            Scratch::Own(own) => Ok(own.as_ref().map(|own| {
                // SAFETY: the buffer is this plan's, whose runs are one at a time.
                unsafe { memory.write(own.as_ptr(), own.bytes(), ElemType::Scratch) }
            })),
            Scratch::Callers { bytes: wanted } if *wanted == 0 => Ok(None),
            Scratch::Callers { bytes: wanted } if bytes < *wanted => refused(
                "workspace_bytes",
                format!("workspace_bytes {bytes} is less than the plan's {wanted}"),
            ),
            Scratch::Callers { .. } => {
                // SAFETY: the caller keeps the contract of `workspace`.
                Ok(Some(unsafe { memory.write(given.cast(), bytes, ElemType::Scratch) }))
            }
        }
    }

    /// The plan for a reader.
    pub(crate) fn text(&self) -> &CString {
        &self.text
    }

    /// # Safety
    /// Every pointer of `call` that is not null is memory of the plan's backend, as large as `fmha.h` says,
    /// and nobody else touches it until the work is done; its stream is null or one of the plan's device that
    /// lives until then; host pointers are as for [`Self::new`].
    pub(crate) unsafe fn run(&self, call: &FmhaCall) -> Result<()> {
        let memory = Memory(self.space);
        match &*self.planned {
            Planned::Forward { plan, call: planned, pointed } => {
                // SAFETY: the caller keeps the contract of `run`.
                unsafe { agree::call(planned, pointed, call)? };
                // SAFETY: the caller keeps the contract of `run`.
                unsafe { self.run_forward(plan, call) }
            }
            Planned::Backward { plan, call: planned, pointed } => {
                // SAFETY: the caller keeps the contract of `run`.
                unsafe { agree::call(planned, pointed, call)? };
                // SAFETY: the caller keeps the contract of `run`; a call that agrees has gradients.
                let Some(gradients) = (unsafe { call.gradients.as_ref() }) else {
                    return Err(ProblemError::new("gradients", "gradients is null").into());
                };
                // SAFETY: the caller keeps the contract of `run`.
                let captured = unsafe { memory.captured(plan.problem().fwd(), call) };
                // SAFETY: the caller keeps the contract of `run`.
                let mut args = unsafe {
                    let workspace = self.workspace(memory, call)?;
                    memory.backward(plan, call, gradients, workspace)?
                };
                args.score.captured = captured.tensors();
                args.score.numbers = captured.numbers();
                // SAFETY: the caller keeps the contract of `run`.
                let lists = unsafe { call.lists.as_ref() };
                let totals = host::totals(call, None, lists)?;
                // SAFETY: the caller keeps the contract of `run`.
                args.masks = unsafe { memory.masks(plan.problem().fwd(), call, totals)? };
                // SAFETY: the caller keeps the contract of `run`.
                args.dcaptured = unsafe { memory.dcaptured(plan.problem(), call) };
                // SAFETY: the caller keeps the contract of `run`.
                unsafe { plan.run_on_raw(&mut args, call.stream as u64) }
            }
            Planned::Combine { .. } => wrong_kind("fmha_run", "combine", "fmha_run_combine"),
        }
    }

    /// # Safety
    /// As [`Self::run`].
    #[inline]
    unsafe fn run_forward(&self, plan: &FwdPlan, call: &FmhaCall) -> Result<()> {
        let (problem, memory) = (plan.problem(), Memory(self.space));
        // SAFETY: the caller keeps the contract of `run_forward`.
        let (cache, lists) = unsafe { (call.cache.as_ref(), call.lists.as_ref()) };
        let totals = host::totals(call, cache, lists)?;
        let extents = problem.extents(totals);
        // SAFETY: the caller keeps the contract of `run_forward`.
        let (q, k, v, o) = unsafe { memory.tensors(problem, call, &extents)? };
        // SAFETY: the caller keeps the contract of `run_forward`.
        let captured = unsafe { memory.captured(problem, call) };
        // Field by field: to move all of the arguments once takes as long as to make them.
        let mut args = FwdArgs::new(q, k, v, o);
        // SAFETY: the caller keeps the contract of `run_forward`.
        unsafe {
            if let Some(cache) = cache {
                args.cache = memory.cache(problem, cache, totals)?;
            }
            args.lse = memory.write_if(problem.write_lse, call.lse.cast(), extents.lse_elems * 4, DType::F32);
            args.keep_mask = memory.write_if(
                problem.dropout.write_keep_mask,
                call.keep_mask,
                problem.keep_mask_bytes(),
                ElemType::Bytes,
            );
            let outputs = problem.outputs;
            for (to, wanted, at, elems) in [
                (&mut args.row_max, outputs.row_max, call.row_max, extents.lse_elems),
                (&mut args.head_max, outputs.head_max, call.head_max, problem.dims.num_heads_q.into()),
                (&mut args.key_sum, outputs.key_sum, call.key_sum, problem.key_sum_elems()),
            ] {
                *to = memory.write_if(wanted, at.cast(), elems * 4, DType::F32);
            }
            args.scale_o = memory.optional(call.scale_o.cast(), 4, DType::F32);
            args.seq = memory.seq(problem, call, cache, totals)?;
            args.score = memory.score(problem, call)?;
            memory.block_scales(problem, call, &extents, &mut args.score)?;
            args.score.captured = captured.tensors();
            args.score.numbers = captured.numbers();
            args.masks = memory.masks(problem, call, totals)?;
            args.workspace = self.workspace(memory, call)?;
        }
        // SAFETY: the caller keeps the contract of `run_forward`.
        unsafe { plan.run_on_raw(&mut args, call.stream as u64) }
    }

    /// # Safety
    /// As [`Self::run`].
    pub(crate) unsafe fn run_combine(&self, call: &FmhaCombine) -> Result<()> {
        let Planned::Combine { plan, call: planned, first } = &*self.planned else {
            return wrong_kind("fmha_run_combine", "attention", "fmha_run");
        };
        // SAFETY: the caller keeps the contract of `run_combine`.
        let parts = unsafe { host::parts(call)? };
        agree::combine(planned, first, call, &host::first_part(call, parts))?;
        let memory = Memory(self.space);
        let problem = plan.problem();
        let lse_bytes = problem.lse_elems() * 4;
        // Parts that are added have no LSE that anybody reads.
        let part_lse_bytes = if problem.adds() { 0 } else { lse_bytes };
        let mut inputs = Vec::with_capacity(parts.len());
        for part in parts {
            // SAFETY: the caller keeps the contract of `run_combine`.
            let (o, lse) = unsafe {
                let o = memory.input("parts.o", &part.o, problem.shape(), problem.dtype_part)?;
                (o, memory.read(part.lse.cast(), part_lse_bytes, DType::F32))
            };
            inputs.push(PartialResult { o, lse });
        }
        // SAFETY: the caller keeps the contract of `run_combine`.
        let mut args = unsafe {
            CombineArgs::new(&inputs, memory.output("o", &call.o, problem.shape(), problem.dtype_o)?)
                .lse(memory.write_if(problem.write_lse, call.lse.cast(), lse_bytes, DType::F32))
        };
        // SAFETY: the caller keeps the contract of `run_combine`.
        unsafe { plan.run_on_raw(&mut args, call.stream as u64) }
    }
}

/// Address of a tensor without elements whose pointer is null: an aligned one, so that no kernel is refused
/// by it.
const NOWHERE: *const u8 = std::ptr::without_provenance(256);

fn wrong_kind(function: &str, planned: &str, instead: &str) -> Result<()> {
    let text = format!("plan: {function} was given a plan of {planned}, which {instead} runs");
    Err(ProblemError::new("plan", text).into())
}

/// Memory space of a struct's pointers.
#[derive(Clone, Copy)]
pub(crate) struct Memory(MemorySpace);

impl Memory {
    /// A device's.
    pub(crate) fn of(device: &Device) -> Self {
        Self(device.memory().space())
    }

    /// Q, K, V and O of a forward call.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`].
    #[inline]
    unsafe fn tensors<'a>(
        self,
        problem: &ValidFwd,
        call: &FmhaCall,
        extents: &Extents,
    ) -> Result<(DevSlice<'a>, CacheSlice<'a>, CacheSlice<'a>, DevSliceMut<'a>)> {
        if let Some(scales) = &problem.block_scales {
            let [q, k, v] = scales.stored(extents, problem.layout.v);
            let elem = scales.format.elem();
            // SAFETY: the caller keeps the contract of `tensors`.
            return unsafe {
                let o = self.output("o", &call.o, extents.o, problem.dtypes.o)?;
                let k = self.coded("k", &call.k, k, elem)?.into();
                let v = self.coded("v", &call.v, v, elem)?.into();
                Ok((self.coded("q", &call.q, q, elem)?, k, v, o))
            };
        }
        let (stored_k, stored_v) = (problem.stored_k(), problem.stored_v());
        // SAFETY: the caller keeps the contract of `tensors`.
        unsafe {
            let q = self.input("q", &call.q, extents.q, problem.dtypes.qk)?;
            let o = self.output("o", &call.o, extents.o, problem.dtypes.o)?;
            let k: CacheSlice<'a> = match problem.cache.append {
                Some(_) => self.output("k", &call.k, extents.k, stored_k)?.into(),
                None => self.input("k", &call.k, extents.k, stored_k)?.into(),
            };
            let v: CacheSlice<'a> = match problem.cache.append {
                _ if problem.cache.v_in_k => CacheSlice::InK,
                Some(_) => self.output("v", &call.v, extents.v, stored_v)?.into(),
                None => self.input("v", &call.v, extents.v, stored_v)?.into(),
            };
            Ok((q, k, v, o))
        }
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    unsafe fn backward<'a>(
        self,
        plan: &BwdPlan,
        call: &FmhaCall,
        gradients: &FmhaGradients,
        workspace: Option<DevSliceMut<'a>>,
    ) -> Result<BwdArgs<'a>> {
        let problem = plan.problem();
        let fwd = problem.fwd();
        // SAFETY: the caller keeps the contract of `run_forward`.
        let totals = host::totals(call, None, unsafe { call.lists.as_ref() })?;
        let extents = fwd.extents(totals);
        let lse_bytes = extents.lse_elems * 4;
        if call.lse.is_null() && lse_bytes > 0 {
            return Err(ProblemError::new("lse", "lse is null, but gradients are wanted of it").into());
        }
        // SAFETY: the caller keeps the contract of `backward`.
        unsafe {
            let grad = |name, tensor, shape| self.output(name, tensor, shape, problem.dtype_grad);
            let dbias = match (problem.dbias, fwd.score.bias) {
                (Some(wanted), fmha::Bias::Elementwise(bias)) => {
                    let shape = fwd.shape_bias(bias.broadcast);
                    Some(self.output("dbias", &gradients.dbias, shape, wanted.dtype)?)
                }
                _ => None,
            };
            Ok(BwdArgs::new(
                [
                    self.input("q", &call.q, extents.q, fwd.dtypes.qk)?,
                    self.input("k", &call.k, extents.k, fwd.dtypes.qk)?,
                    self.input("v", &call.v, extents.v, fwd.dtypes.v)?,
                ],
                [
                    self.input("o", &call.o, extents.o, fwd.dtypes.o)?,
                    self.read(call.lse.cast(), lse_bytes, DType::F32),
                    self.input("dout", &gradients.dout, extents.o, fwd.dtypes.o)?,
                ],
                [
                    grad("dq", &gradients.dq, extents.q)?,
                    grad("dk", &gradients.dk, extents.k)?,
                    grad("dv", &gradients.dv, extents.v)?,
                ],
            )
            .dlse(self.read_if(problem.has_dlse, gradients.dlse.cast(), lse_bytes, DType::F32))
            .dbias(dbias)
            .dsink(self.write_if(
                problem.write_dsink,
                gradients.dsink.cast(),
                u64::from(fwd.dims.num_heads_q) * 4,
                DType::F32,
            ))
            .seq(self.seq(fwd, call, None, totals)?)
            .score(self.score(fwd, call)?)
            .workspace(workspace))
        }
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    unsafe fn cache<'a>(
        self,
        problem: &FwdProblem,
        cache: &FmhaCache,
        totals: Totals,
    ) -> Result<CacheArgs<'a>> {
        let mut args = CacheArgs::default();
        // SAFETY: the caller keeps the contract of `cache`.
        unsafe {
            if let Some(append) = &problem.cache.append {
                let (k, v) = problem.shapes_new(append, totals);
                args.k_new = Some(self.input("k_new", &cache.k_new, k, problem.dtypes.qk)?);
                if !problem.cache.v_in_k {
                    args.v_new = Some(self.input("v_new", &cache.v_new, v, problem.dtypes.v)?);
                }
            }
            if let Some(rotary) = &problem.cache.rotary {
                let bytes = rotary.table_elems() * rotary.dtype.size_bytes();
                args.cos = self.read_if(true, cache.rotary_cos.cast(), bytes, rotary.dtype);
                args.sin = self.read_if(true, cache.rotary_sin.cast(), bytes, rotary.dtype);
            }
            let dims = problem.dims;
            let rows = totals.total_q.map_or(u64::from(dims.batch) * u64::from(dims.seqlen_q), u64::from);
            let bytes = rows.saturating_mul(u64::from(problem.tree_mask_words()) * 4);
            args.tree_mask =
                self.read_if(problem.cache.tree_mask, cache.tree_mask.cast(), bytes, ElemType::U32);
        }
        Ok(args)
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    #[inline]
    unsafe fn seq<'a>(
        self,
        problem: &FwdProblem,
        call: &FmhaCall,
        cache: Option<&FmhaCache>,
        totals: Totals,
    ) -> Result<SeqArgs<'a>, ProblemError> {
        let used = u64::from(problem.dims.batch) * 4;
        // `totals` has read it: in range, and 0 where there are no pages.
        let max_pages = call.max_pages as u32;
        let entries = u64::from(problem.dims.batch) * u64::from(max_pages);
        let mut args = SeqArgs::default();
        args.totals = totals;
        // SAFETY: the caller keeps the contract of `seq`.
        unsafe {
            args.block_table = self
                .read_if(
                    problem.layout.kv.is_paged() && !problem.lists_addresses(),
                    call.block_table.cast(),
                    entries.saturating_mul(4),
                    ElemType::I32,
                )
                .map(|pages| BlockTable { pages, max_pages });
            args.cu_seqlens_q = self.optional(call.cu_seqlens_q.cast(), used + 4, ElemType::I32);
            args.cu_seqlens_k = self.optional(call.cu_seqlens_k.cast(), used + 4, ElemType::I32);
            args.seqused_q =
                self.read_if(problem.layout.seqused_q, call.seqused_q.cast(), used, ElemType::I32);
            args.seqused_k =
                self.read_if(problem.layout.seqused_k, call.seqused_k.cast(), used, ElemType::I32);
            if let (Some(lists), Some(given)) = (&problem.lists, call.lists.as_ref()) {
                let elems = lists.strides.extent(lists.shape(problem, totals)).unwrap_or(u64::MAX);
                let bytes = elems.saturating_mul(4);
                if given.indices.is_null() && bytes > 0 {
                    let text = format!("indices is null, but {bytes} bytes are needed");
                    return Err(ProblemError::new("indices", text));
                }
                args.indices = Some(self.read(given.indices.cast(), bytes, ElemType::I32));
                args.topk_length = self.read_if(
                    lists.length != ListLength::Whole,
                    given.topk_length.cast(),
                    lists.length_elems(problem, totals).saturating_mul(4),
                    ElemType::I32,
                );
            }
            args.cu_seqlens_new =
                cache.and_then(|cache| self.optional(cache.cu_seqlens_new.cast(), used + 4, ElemType::I32));
        }
        Ok(args)
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    #[inline]
    pub(crate) unsafe fn score<'a>(self, problem: &FwdProblem, call: &FmhaCall) -> Result<ScoreArgs<'a>> {
        let Dims { batch, num_heads_q, num_heads_kv, .. } = problem.dims;
        let heads = u64::from(num_heads_q) * 4;
        let slopes = if call.alibi_per_batch == 0 { heads } else { heads * u64::from(batch) };
        // SAFETY: the caller keeps the contract of `score`.
        let descale = |kind: Descale, at: *const f32| unsafe {
            self.read_if(
                kind != Descale::None,
                at.cast(),
                kind.num_elems(batch, num_heads_kv) * 4,
                DType::F32,
            )
        };
        let mut args = ScoreArgs::default();
        args.dropout = host::seed(call)?;
        // SAFETY: the caller keeps the contract of `score`.
        unsafe {
            let bias = match problem.score.bias {
                fmha::Bias::Elementwise(bias) => {
                    Some(self.input("bias", &call.bias, problem.shape_bias(bias.broadcast), bias.dtype)?)
                }
                _ => None,
            };
            args.bias = bias;
            let has_slopes = matches!(problem.score.bias, fmha::Bias::Alibi { .. });
            args.alibi_slopes = self.read_if(has_slopes, call.alibi_slopes.cast(), slopes, DType::F32);
            args.sink = self.optional(call.sink.cast(), heads, DType::F32);
        }
        args.descale_q = descale(problem.scales.descale_q, call.descale_q);
        args.descale_k = descale(problem.scales.descale_k, call.descale_k);
        args.descale_v = descale(problem.scales.descale_v, call.descale_v);
        Ok(args)
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    #[inline]
    unsafe fn input<'a>(
        self,
        name: &'static str,
        tensor: &FmhaTensor,
        shape: Shape,
        dtype: DType,
    ) -> Result<DevSlice<'a>, ProblemError> {
        let bytes = bytes(name, tensor, strides(tensor), shape, dtype)?;
        // SAFETY: the caller keeps the contract of `input`.
        Ok(unsafe { self.read(tensor.data.cast_const().cast(), bytes, dtype) })
    }

    /// A tensor of bytes that this type names.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`].
    unsafe fn coded<'a>(
        self,
        name: &'static str,
        tensor: &FmhaTensor,
        shape: Shape,
        elem: ElemType,
    ) -> Result<DevSlice<'a>, ProblemError> {
        // Any type of one byte.
        let bytes = bytes(name, tensor, strides(tensor), shape, DType::E4m3Fn)?;
        // SAFETY: the caller keeps the contract of `coded`.
        Ok(unsafe { self.read(tensor.data.cast_const().cast(), bytes, elem) })
    }

    /// Adds the scales of blocks to a run's operands.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`].
    unsafe fn block_scales(
        self,
        problem: &FwdProblem,
        call: &FmhaCall,
        extents: &Extents,
        args: &mut ScoreArgs<'_>,
    ) -> Result<()> {
        // SAFETY: the caller keeps the contract of `block_scales`.
        let (Some(scales), Some(given)) = (&problem.block_scales, unsafe { call.block_scales.as_ref() })
        else {
            return Ok(());
        };
        let ([q, k, v], elem) = (scales.shapes(extents), scales.format.scale_elem());
        // SAFETY: the caller keeps the contract of `block_scales`.
        unsafe {
            args.block_scale_q = Some(self.coded("block_scale_q", &given.q, q, elem)?);
            args.block_scale_k = Some(self.coded("block_scale_k", &given.k, k, elem)?);
            args.block_scale_v = Some(self.coded("block_scale_v", &given.v, v, elem)?);
        }
        Ok(())
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    #[inline]
    unsafe fn output<'a>(
        self,
        name: &'static str,
        tensor: &FmhaTensor,
        shape: Shape,
        dtype: DType,
    ) -> Result<DevSliceMut<'a>, ProblemError> {
        let bytes = bytes(name, tensor, strides(tensor), shape, dtype)?;
        // SAFETY: the caller keeps the contract of `output`.
        Ok(unsafe { self.write(tensor.data.cast(), bytes, dtype) })
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    unsafe fn optional<'a>(
        self,
        pointer: *const u8,
        bytes: u64,
        elem: impl Into<ElemType>,
    ) -> Option<DevSlice<'a>> {
        // SAFETY: the caller keeps the contract of `optional`.
        (!pointer.is_null()).then(|| unsafe { self.read(pointer, bytes, elem) })
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    unsafe fn read_if<'a>(
        self,
        wanted: bool,
        pointer: *const u8,
        bytes: u64,
        elem: impl Into<ElemType>,
    ) -> Option<DevSlice<'a>> {
        // SAFETY: the caller keeps the contract of `read_if`. A null pointer comes with 0
        // bytes, since the plan refuses any other.
        wanted.then(|| unsafe { self.read(pointer, bytes, elem) })
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    pub(crate) unsafe fn write_if<'a>(
        self,
        wanted: bool,
        pointer: *mut u8,
        bytes: u64,
        elem: impl Into<ElemType>,
    ) -> Option<DevSliceMut<'a>> {
        // SAFETY: the caller keeps the contract of `write_if`. A null pointer comes with 0
        // bytes, since the plan refuses any other.
        wanted.then(|| unsafe { self.write(pointer, bytes, elem) })
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    pub(crate) unsafe fn read<'a>(
        self,
        pointer: *const u8,
        bytes: u64,
        elem: impl Into<ElemType>,
    ) -> DevSlice<'a> {
        let pointer = if pointer.is_null() { NOWHERE } else { pointer };
        // SAFETY: the caller keeps the contract of `read`.
        unsafe { DevSlice::from_raw(self.0, pointer, bytes, elem) }
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    pub(crate) unsafe fn write<'a>(
        self,
        pointer: *mut u8,
        bytes: u64,
        elem: impl Into<ElemType>,
    ) -> DevSliceMut<'a> {
        let pointer = if pointer.is_null() { NOWHERE.cast_mut() } else { pointer };
        // SAFETY: the caller keeps the contract of `write`.
        unsafe { DevSliceMut::from_raw(self.0, pointer, bytes, elem) }
    }
}

/// Bytes that a tensor spans, or a refusal of a missing tensor.
#[inline]
pub(crate) fn bytes(
    name: &'static str,
    tensor: &FmhaTensor,
    strides: Strides,
    shape: Shape,
    dtype: DType,
) -> Result<u64, ProblemError> {
    let bytes = ValidFwd::extent_bytes(strides, shape, dtype);
    if tensor.data.is_null() && bytes > 0 {
        let text = format!("{name}.data is null, but {bytes} bytes are needed");
        return Err(ProblemError::new(name, text));
    }
    Ok(bytes)
}
