//! A plan behind the C pointer: made from a problem, run with arguments.

use std::ffi::{CStr, CString, c_void};

use fmha::{
    BlockTable, BwdArgs, BwdPlan, CacheArgs, CacheSlice, CacheUse, ChoosePlan, CombineArgs, CombinePlan,
    DType, DevBuffer, DevSlice, DevSliceMut, Device, Dims, ElemType, Error, Extents, FwdArgs, FwdPlan,
    FwdProblem, ListLength, MaskSpec, MemorySpace, PartialResult, ProblemError, QLayout, QuantizePlan,
    ScoreArgs, SeqArgs, Shape, Strides, Totals, ValidFwd, Workspace,
};

use crate::Result;
use crate::code::{CapturedArgs, Captures};
use crate::host::{self, AnyPass, Choice, Given};
use crate::masks::{self, FmhaMaskObject};
use crate::structs::{
    FmhaArgs, FmhaChooseArgs, FmhaChooseProblem, FmhaCombineArgs, FmhaCombineProblem, FmhaProblem,
    FmhaQuantizeArgs, FmhaQuantizeProblem,
};
use crate::{choose, quantize};

/// Returns an error if arguments are given for `$what`, which the problem does not have.
macro_rules! absent {
    ($args:expr, $what:expr, $($field:ident),+) => {
        $($crate::plan::unwanted(stringify!($field), $args.$field, $what)?;)+
    };
}
pub(crate) use absent;

/// A chosen and loaded kernel with its scratch memory, on the device for which it was planned.
pub struct FmhaPlan {
    space: MemorySpace,
    planned: Box<Planned>,
    scratch: Scratch,
    text: CString,
}

/// Source of a run's scratch.
enum Scratch {
    /// Scratch memory that the plan owns; `None` where the kernel needs none.
    Own(Option<DevBuffer>),
    /// Each run passes scratch memory of this many bytes.
    Callers { bytes: u64 },
}

/// The plan, and the positions in a run's arguments of what its functions capture.
enum Planned {
    Forward(FwdPlan, Captures),
    Backward(BwdPlan, Captures),
    Combine(CombinePlan),
    Choose(ChoosePlan),
    Quantize(QuantizePlan),
}

impl FmhaPlan {
    /// Plans a problem, for callers in Rust. `mask` is used as its mask; the mask text in `problem` is not read.
    ///
    /// # Errors
    /// The first field that is wrong, by its name, with its value, or why no kernel takes the problem.
    ///
    /// # Safety
    /// The host pointers of `problem` are null or point to what `fmha.h` says.
    pub unsafe fn new(
        device: &Device,
        problem: &FmhaProblem,
        mask: MaskSpec,
        choice: &Choice,
    ) -> Result<Self, Error> {
        // SAFETY: the caller keeps the contract of `new`.
        let Given { problem, captures } = unsafe { Given::read(problem, mask)? };
        let (planned, scratch, text) = match problem {
            AnyPass::Forward(problem) => {
                let plan = device.plan_fwd(&problem.validate()?, &choice.plan)?;
                let (scratch, text) = (plan.workspace(), plan.to_string());
                (Planned::Forward(plan, captures), scratch, text)
            }
            AnyPass::Backward(problem) => {
                let plan = device.plan_bwd(&problem.validate()?, &choice.plan)?;
                let (scratch, text) = (plan.workspace(), plan.to_string());
                (Planned::Backward(plan, captures), scratch, text)
            }
        };
        Self::with(device, planned, (scratch, choice.caller_workspace), text)
    }

    /// Returns the errors that [`Self::new`] returns on every device, without opening a device: for callers who
    /// know shapes before they have memory.
    ///
    /// # Errors
    /// As [`Self::new`].
    ///
    /// # Safety
    /// As [`Self::new`].
    pub unsafe fn check(problem: &FmhaProblem, mask: MaskSpec) -> Result<(), Error> {
        // SAFETY: the caller keeps the contract of `check`.
        match unsafe { Given::read(problem, mask)? }.problem {
            AnyPass::Forward(problem) => problem.validate().map(|_| ())?,
            AnyPass::Backward(problem) => problem.validate().map(|_| ())?,
        }
        Ok(())
    }

    /// Plans a merge of partial results.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn combine(device: &Device, problem: &FmhaCombineProblem, choice: &Choice) -> Result<Self, Error> {
        let plan = device.plan_combine(&host::combine(problem)?.validate()?, &choice.plan)?;
        let (scratch, text) = (plan.workspace(), plan.to_string());
        Self::with(device, Planned::Combine(plan), (scratch, choice.caller_workspace), text)
    }

    /// Checks a merge of partial results, as [`Self::check`] does attention.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn check_combine(problem: &FmhaCombineProblem) -> Result<(), Error> {
        host::combine(problem)?.validate()?;
        Ok(())
    }

    /// Plans a choice of keys or blocks.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn choose(device: &Device, problem: &FmhaChooseProblem, choice: &Choice) -> Result<Self, Error> {
        let plan = device.plan_choose(&choose::problem(problem)?.validate()?, &choice.plan)?;
        let (scratch, text) = (plan.workspace(), plan.to_string());
        Self::with(device, Planned::Choose(plan), (scratch, choice.caller_workspace), text)
    }

    /// Checks a choice of keys or blocks, as [`Self::check`] does attention.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn check_choose(problem: &FmhaChooseProblem) -> Result<(), Error> {
        choose::problem(problem)?.validate()?;
        Ok(())
    }

    /// Plans a conversion to a format with scales by blocks.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn quantize(device: &Device, problem: &FmhaQuantizeProblem, choice: &Choice) -> Result<Self, Error> {
        let valid = quantize::problem(problem)?.validate().map_err(|error| quantize::in_c(error, problem))?;
        let plan = device.plan_quantize(&valid, &choice.plan)?;
        let (scratch, text) = (plan.workspace(), plan.to_string());
        Self::with(device, Planned::Quantize(plan), (scratch, choice.caller_workspace), text)
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

    /// Bytes of scratch memory that each run must pass.
    #[must_use]
    pub fn workspace_bytes(&self) -> u64 {
        match self.scratch {
            Scratch::Own(_) => 0,
            Scratch::Callers { bytes } => bytes,
        }
    }

    /// The scratch memory of a run. The backend checks whether it is large enough.
    ///
    /// # Safety
    /// As [`Self::run`].
    #[inline]
    unsafe fn workspace(
        &self,
        memory: Memory,
        (given, bytes): (*mut c_void, u64),
    ) -> Result<Option<DevSliceMut<'_>>> {
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
                // SAFETY: the buffer belongs to this plan, whose runs do not overlap.
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

    /// The plan's description, for people to read.
    #[must_use]
    pub fn text(&self) -> &CStr {
        &self.text
    }

    /// Queues a run on its stream.
    ///
    /// # Errors
    /// What the problem has and the arguments lack, by its name, or the other way round, or what the driver said.
    ///
    /// # Safety
    /// Every pointer of `args` that is not null is memory of the plan's device, as large as `fmha.h` says of the
    /// problem, and nobody else touches it until the work is done; its stream is null or one of the plan's device
    /// that lives until then; `captured` is null or host memory with as many as the problem has.
    pub unsafe fn run(&self, args: &FmhaArgs) -> Result<(), Error> {
        host::struct_bytes::<FmhaArgs>(args.struct_bytes)?;
        host::none("reserved", args.reserved)?;
        // SAFETY: the caller keeps the contract of `run`.
        unsafe {
            match &*self.planned {
                Planned::Forward(plan, captures) => self.forward(plan, captures, args),
                Planned::Backward(plan, captures) => self.backward(plan, captures, args),
                other => wrong_kind("fmha_run", other),
            }
        }
    }

    /// # Safety
    /// As [`Self::run`].
    #[inline]
    unsafe fn forward(&self, plan: &FwdPlan, captures: &Captures, given: &FmhaArgs) -> Result<()> {
        let (problem, memory) = (plan.problem(), Memory(self.space));
        absent!(given, "gradients", dout, dq, dk, dv, dbias, dlse, dsink);
        let totals = host::totals(problem, given)?;
        let extents = problem.extents(totals);
        // SAFETY: the caller keeps the contract of `forward`.
        let captured = unsafe { memory.captured(problem, captures, given)? };
        // SAFETY: the caller keeps the contract of `forward`.
        let (q, k, v, o) = unsafe { memory.tensors(problem, given, &extents)? };
        // SAFETY: the caller keeps the contract of `forward`.
        let built = unsafe { masks::built(problem, given)? };
        let second;
        // The arguments are set field by field: moving the whole struct once would take as long as building it.
        let mut args = FwdArgs::new(q, k, v, o);
        let lse_bytes = extents.lse_elems * 4;
        // SAFETY: the caller keeps the contract of `forward`.
        unsafe {
            memory.cache(problem, given, totals, &mut args.cache)?;
            args.lse = memory.write_if("lse", problem.write_lse, given.lse, lse_bytes, DType::F32)?;
            args.keep_mask = memory.write_if(
                "keep_mask",
                problem.dropout.write_keep_mask,
                given.keep_mask,
                problem.keep_mask_bytes(),
                ElemType::Bytes,
            )?;
            let outputs = problem.outputs;
            for (to, name, wanted, at, elems) in [
                (&mut args.row_max, "row_max", outputs.row_max, given.row_max, extents.lse_elems),
                (
                    &mut args.head_max,
                    "head_max",
                    outputs.head_max,
                    given.head_max,
                    problem.dims.num_heads_q.into(),
                ),
                (&mut args.key_sum, "key_sum", outputs.key_sum, given.key_sum, problem.key_sum_elems()),
            ] {
                *to = memory.write_if(name, wanted, at, elems * 4, DType::F32)?;
            }
            memory.cache_scales(problem, given, &extents, &mut args)?;
            args.scale_o = memory.read_if("scale_o", problem.scales.scale_o, given.scale_o, 4, DType::F32)?;
            args.seq = memory.seq(problem, given, totals)?;
            args.score = memory.score(problem, given)?;
            memory.block_scales(problem, given, &extents, &mut args.score)?;
            args.score.captured = captured.tensors();
            args.score.numbers = captured.numbers();
            second = memory.second(problem, given)?;
            args.second = second.as_ref();
            args.masks = memory.masks_or_built(problem, given, totals, built.as_deref())?;
            args.workspace = self.workspace(memory, (given.workspace, given.workspace_bytes))?;
        }
        // SAFETY: the caller keeps the contract of `forward`.
        unsafe { plan.run_on_raw(&mut args, given.stream as u64) }
    }

    /// # Safety
    /// As [`Self::run`].
    unsafe fn backward(&self, plan: &BwdPlan, captures: &Captures, given: &FmhaArgs) -> Result<()> {
        let (problem, memory) = (plan.problem(), Memory(self.space));
        let fwd = problem.fwd();
        absent!(given, "it", row_max, head_max, key_sum, second, k_scale, v_scale);
        let totals = host::totals(fwd, given)?;
        let extents = fwd.extents(totals);
        let lse_bytes = extents.lse_elems * 4;
        // SAFETY: the caller keeps the contract of `backward`.
        unsafe {
            let captured = memory.captured(fwd, captures, given)?;
            let built = masks::built(fwd, given)?;
            let (strides, types) = (&fwd.strides, fwd.dtypes);
            let input = |name, at, strides, shape, dtype| memory.input(name, at, (strides, shape), dtype);
            let grad =
                |name, at, strides, shape| memory.output(name, at, (strides, shape), problem.dtype_grad);
            let inputs = match memory.in_blocks(fwd, given, &extents)? {
                Some(inputs) => inputs,
                None => [
                    input("q", given.q, strides.q, extents.q, types.qk)?,
                    input("k", given.k, strides.k, extents.k, types.qk)?,
                    input("v", given.v, strides.v, extents.v, types.v)?,
                ],
            };
            let mut args = BwdArgs::new(
                inputs,
                [
                    input("o", given.o, strides.o, extents.o, types.o)?,
                    memory.needed("lse", given.lse, lse_bytes, DType::F32)?,
                    input("dout", given.dout, problem.dout, extents.o, types.o)?,
                ],
                [
                    grad("dq", given.dq, problem.dq, extents.q)?,
                    grad("dk", given.dk, problem.dk, extents.k)?,
                    grad("dv", given.dv, problem.dv, extents.v)?,
                ],
            );
            args.dlse = memory.read_if("dlse", problem.has_dlse, given.dlse, lse_bytes, DType::F32)?;
            args.dbias = match (problem.dbias, fwd.score.bias) {
                (Some(wanted), fmha::Bias::Elementwise(bias)) => {
                    let shape = fwd.shape_bias(bias.broadcast);
                    Some(memory.output("dbias", given.dbias, (wanted.strides, shape), wanted.dtype)?)
                }
                _ => {
                    absent!(given, "it", dbias);
                    None
                }
            };
            let sinks = u64::from(fwd.dims.num_heads_q) * 4;
            args.dsink = memory.write_if("dsink", problem.write_dsink, given.dsink, sinks, DType::F32)?;
            // Outputs of the forward pass may stay among the arguments, and are left alone.
            if !fwd.dropout.write_keep_mask {
                absent!(given, "it", keep_mask);
            }
            if !fwd.scales.scale_o {
                absent!(given, "it", scale_o);
            }
            memory.cache(fwd, given, totals, &mut CacheArgs::default())?;
            args.seq = memory.seq(fwd, given, totals)?;
            args.score = memory.score(fwd, given)?;
            memory.block_scales(fwd, given, &extents, &mut args.score)?;
            args.score.captured = captured.tensors();
            args.score.numbers = captured.numbers();
            args.masks = memory.masks_or_built(fwd, given, totals, built.as_deref())?;
            args.dcaptured = memory.dcaptured(&fwd.code, &problem.dcaptured, &captured);
            args.workspace = self.workspace(memory, (given.workspace, given.workspace_bytes))?;
            plan.run_on_raw(&mut args, given.stream as u64)
        }
    }

    /// An object for the masks of the calls of these plans.
    ///
    /// # Errors
    /// No plan, or plans that are of other kinds or do not go together; memory that is not there.
    pub fn mask_object(
        forward: Option<&Self>,
        backward: Option<&Self>,
        given: &FmhaArgs,
    ) -> Result<FmhaMaskObject, Error> {
        host::struct_bytes::<FmhaArgs>(given.struct_bytes)?;
        let forward = match forward.map(|plan| &*plan.planned) {
            None => None,
            Some(Planned::Forward(plan, _)) => Some(plan),
            Some(other) => return not_of("forward", other),
        };
        let backward = match backward.map(|plan| &*plan.planned) {
            None => None,
            Some(Planned::Backward(plan, _)) => Some(plan),
            Some(other) => return not_of("backward", other),
        };
        let problem = match (forward, backward) {
            (Some(plan), _) => Some(&**plan.problem()),
            (None, Some(plan)) => Some(&**plan.problem().fwd()),
            (None, None) => None,
        };
        let totals = problem.map_or(Ok(Totals::NONE), |problem| host::totals(problem, given))?;
        FmhaMaskObject::new(forward, backward, totals)
    }

    /// Whether its lists of tiles are the same in all runs with the same captured numbers, so that an object may hold
    /// them.
    #[must_use]
    pub fn has_lasting_lists(&self) -> bool {
        match &*self.planned {
            Planned::Forward(plan, _) => plan.has_lasting_lists(),
            Planned::Backward(plan, _) => plan.has_lasting_lists(),
            Planned::Combine(_) | Planned::Choose(_) | Planned::Quantize(_) => false,
        }
    }

    /// Builds an object from the lengths and masks of a run.
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Safety
    /// As [`Self::run`]; operands beside lengths and masks are not read.
    pub unsafe fn build_mask(&self, object: &FmhaMaskObject, given: &FmhaArgs) -> Result<(), Error> {
        let (problem, captures) = match &*self.planned {
            Planned::Forward(plan, captures) => (&**plan.problem(), captures),
            Planned::Backward(plan, captures) => (&**plan.problem().fwd(), captures),
            other => return wrong_kind("fmha_build_mask", other),
        };
        host::struct_bytes::<FmhaArgs>(given.struct_bytes)?;
        unwanted("built", given.built, "it: an object is built from tensors")?;
        let (memory, totals) = (Memory(self.space), host::totals(problem, given)?);
        // SAFETY: the caller keeps the contract of `build_mask`.
        unsafe {
            let (seq, masks) = (memory.seq(problem, given, totals)?, memory.masks(problem, given, totals)?);
            let captured = match given.captured.is_null() {
                true => CapturedArgs::default(),
                false => memory.captured(problem, captures, given)?,
            };
            object.build(&seq, &masks, captured.numbers(), given.stream as u64)
        }
    }

    /// Queues a merge of partial results.
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Safety
    /// As [`Self::run`].
    pub unsafe fn run_combine(&self, given: &FmhaCombineArgs) -> Result<(), Error> {
        let Planned::Combine(plan) = &*self.planned else {
            return wrong_kind("fmha_run_combine", &self.planned);
        };
        host::struct_bytes::<FmhaCombineArgs>(given.struct_bytes)?;
        let (problem, memory) = (plan.problem(), Memory(self.space));
        // SAFETY: the caller keeps the contract of `run_combine`.
        let parts = unsafe { host::parts(given, problem.num_parts)? };
        let lse_bytes = problem.lse_elems() * 4;
        // LSE of parts that are only added is not read.
        let part_lse_bytes = if problem.adds() { 0 } else { lse_bytes };
        let mut inputs = Vec::with_capacity(parts.len());
        let of_parts = (problem.part, problem.shape());
        for (i, part) in parts.iter().enumerate() {
            let of = |error: ProblemError| ProblemError::new("parts", format!("parts[{i}].{error}"));
            // SAFETY: the caller keeps the contract of `run_combine`.
            let (o, lse) = unsafe {
                (
                    memory.input("o", part.o, of_parts, problem.dtype_part).map_err(of)?,
                    memory.needed("lse", part.lse, part_lse_bytes, DType::F32).map_err(of)?,
                )
            };
            inputs.push(PartialResult { o, lse });
        }
        // SAFETY: the caller keeps the contract of `run_combine`.
        unsafe {
            let o = memory.output("o", given.o, (problem.o, problem.shape()), problem.dtype_o)?;
            let lse = memory.write_if("lse", problem.write_lse, given.lse, lse_bytes, DType::F32)?;
            plan.run_on_raw(&mut CombineArgs::new(&inputs, o).lse(lse), given.stream as u64)
        }
    }
}

impl FmhaPlan {
    /// Queues a choice of keys or blocks.
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Safety
    /// As [`Self::run`].
    pub unsafe fn run_choose(&self, given: &FmhaChooseArgs) -> Result<(), Error> {
        let Planned::Choose(plan) = &*self.planned else {
            return wrong_kind("fmha_run_choose", &self.planned);
        };
        host::struct_bytes::<FmhaChooseArgs>(given.struct_bytes)?;
        let memory = Memory(self.space);
        // SAFETY: the caller keeps the contract of `run_choose`.
        unsafe {
            let mut args = memory.choose(plan.problem(), given)?;
            args.workspace = self.workspace(memory, (given.workspace, given.workspace_bytes))?;
            plan.run_on_raw(&mut args, given.stream as u64)
        }
    }

    /// Queues a conversion to a format with scales by blocks.
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Safety
    /// As [`Self::run`].
    pub unsafe fn run_quantize(&self, given: &FmhaQuantizeArgs) -> Result<(), Error> {
        let Planned::Quantize(plan) = &*self.planned else {
            return wrong_kind("fmha_run_quantize", &self.planned);
        };
        host::struct_bytes::<FmhaQuantizeArgs>(given.struct_bytes)?;
        let memory = Memory(self.space);
        // SAFETY: the caller keeps the contract of `run_quantize`.
        unsafe {
            let mut args = memory.quantize(plan.problem(), given)?;
            args.workspace = self.workspace(memory, (given.workspace, given.workspace_bytes))?;
            plan.run_on_raw(&mut args, given.stream as u64)
        }
    }
}

/// The address used for a tensor without elements whose pointer is null: an aligned one, so that no kernel refuses
/// it for its alignment.
const NOWHERE: *const u8 = std::ptr::without_provenance(256);

/// The error for a `field` whose plan is of the wrong kind, for example a mask object made of a merge.
fn not_of(field: &'static str, planned: &Planned) -> Result<FmhaMaskObject> {
    let kind = match planned {
        Planned::Forward(..) => "forward",
        Planned::Backward(..) => "backward",
        Planned::Combine(_) => "combine",
        Planned::Choose(_) => "a choice",
        Planned::Quantize(_) => "a conversion",
    };
    Err(ProblemError::new(field, format!("{field} is a plan of {kind}")).into())
}

fn wrong_kind(function: &str, planned: &Planned) -> Result<()> {
    let (planned, instead) = match planned {
        Planned::Forward(..) | Planned::Backward(..) => ("attention", "fmha_run"),
        Planned::Combine(_) => ("combine", "fmha_run_combine"),
        Planned::Choose(_) => ("a choice", "fmha_run_choose"),
        Planned::Quantize(_) => ("a conversion", "fmha_run_quantize"),
    };
    let text = format!("plan: {function} was given a plan of {planned}, which {instead} runs");
    Err(ProblemError::new("plan", text).into())
}

/// Memory space of a struct's pointers.
#[derive(Clone, Copy)]
pub(crate) struct Memory(MemorySpace);

impl Memory {
    /// Kind of memory that a device's pointers have.
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
        args: &FmhaArgs,
        extents: &Extents,
    ) -> Result<(DevSlice<'a>, CacheSlice<'a>, CacheSlice<'a>, DevSliceMut<'a>), ProblemError> {
        let strides = &problem.strides;
        // SAFETY: the caller keeps the contract of `tensors`.
        unsafe {
            let o = self.output("o", args.o, (strides.o, extents.o), problem.dtypes.o)?;
            if let Some([q, k, v]) = self.in_blocks(problem, args, extents)? {
                return Ok((q, k.into(), v.into(), o));
            }
            let q = self.input("q", args.q, (strides.q, extents.q), problem.dtypes.qk)?;
            let cached = |name, at, of, dtype| {
                Ok::<CacheSlice<'a>, ProblemError>(match problem.cache.append {
                    Some(_) => self.output(name, at, of, dtype)?.into(),
                    None => self.input(name, at, of, dtype)?.into(),
                })
            };
            let (of_k, stored_k) = problem.k_in_memory(extents.k);
            let k = cached("k", args.k, (strides.k, of_k), stored_k)?;
            if problem.cache.v_in_k {
                absent!(args, "it: v_in_k 1", v);
                return Ok((q, k, CacheSlice::InK, o));
            }
            Ok((q, k, cached("v", args.v, (strides.v, extents.v), problem.stored_v())?, o))
        }
    }

    /// Q, K and V whose blocks have scales; `None` for a problem without them.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`].
    unsafe fn in_blocks<'a>(
        self,
        problem: &FwdProblem,
        args: &FmhaArgs,
        extents: &Extents,
    ) -> Result<Option<[DevSlice<'a>; 3]>, ProblemError> {
        let Some(scales) = &problem.block_scales else { return Ok(None) };
        let ([q, k, v], elem) = (scales.stored(extents, problem.layout.v), scales.format.elem());
        let strides = &problem.strides;
        // SAFETY: the caller keeps the contract of `in_blocks`.
        unsafe {
            Ok(Some([
                self.coded("q", args.q.cast(), (strides.q, q), elem)?,
                self.coded("k", args.k.cast(), (strides.k, k), elem)?,
                self.coded("v", args.v.cast(), (strides.v, v), elem)?,
            ]))
        }
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    unsafe fn cache<'a>(
        self,
        problem: &FwdProblem,
        given: &FmhaArgs,
        totals: Totals,
        args: &mut CacheArgs<'a>,
    ) -> Result<(), ProblemError> {
        let CacheUse { append: None, rotary: None, tree_mask: false, .. } = &problem.cache else {
            // SAFETY: the caller keeps the contract of `cache`.
            return unsafe { self.used_cache(problem, given, totals, args) };
        };
        absent!(given, "seqlen_new", k_new, v_new);
        absent!(given, "it", rotary_cos, rotary_sin, tree_mask);
        Ok(())
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    unsafe fn used_cache<'a>(
        self,
        problem: &FwdProblem,
        given: &FmhaArgs,
        totals: Totals,
        args: &mut CacheArgs<'a>,
    ) -> Result<(), ProblemError> {
        // SAFETY: the caller keeps the contract of `used_cache`.
        unsafe {
            if let Some(append) = &problem.cache.append {
                let (k, v) = problem.shapes_new(append, totals);
                args.k_new = Some(self.input("k_new", given.k_new, (append.k_new, k), problem.dtypes.qk)?);
                if problem.cache.v_in_k {
                    absent!(given, "it: v_in_k 1", v_new);
                } else {
                    args.v_new =
                        Some(self.input("v_new", given.v_new, (append.v_new, v), problem.dtypes.v)?);
                }
            } else {
                absent!(given, "seqlen_new", k_new, v_new);
            }
            let rotary = problem.cache.rotary;
            let (bytes, dtype) = rotary.map_or((0, DType::F32), |rotary| {
                (rotary.table_elems() * rotary.dtype.size_bytes(), rotary.dtype)
            });
            args.cos = self.read_if("rotary_cos", rotary.is_some(), given.rotary_cos, bytes, dtype)?;
            args.sin = self.read_if("rotary_sin", rotary.is_some(), given.rotary_sin, bytes, dtype)?;
            let dims = problem.dims;
            let rows = totals.total_q.map_or(u64::from(dims.batch) * u64::from(dims.seqlen_q), u64::from);
            let bytes = rows.saturating_mul(u64::from(problem.tree_mask_words()) * 4);
            args.tree_mask =
                self.read_if("tree_mask", problem.cache.tree_mask, given.tree_mask, bytes, ElemType::U32)?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    #[inline]
    pub(crate) unsafe fn seq<'a>(
        self,
        problem: &FwdProblem,
        given: &FmhaArgs,
        totals: Totals,
    ) -> Result<SeqArgs<'a>, ProblemError> {
        let used = u64::from(problem.dims.batch) * 4;
        // `totals` has already checked max_pages: it fits in 32 bits, and is 0 where there are no pages.
        let max_pages = given.max_pages as u32;
        let entries = u64::from(problem.dims.batch) * u64::from(max_pages);
        let layout = &problem.layout;
        let packs_new = problem.cache.append.as_ref().is_some_and(|append| append.layout == QLayout::Packed);
        let mut args = SeqArgs::default();
        args.totals = totals;
        // SAFETY: the caller keeps the contract of `seq`.
        let numbers = |name, wanted, at: *const i32, bytes| unsafe {
            self.read_if(name, wanted, at, bytes, ElemType::I32)
        };
        let has_table = layout.kv.is_paged() && !problem.lists_addresses();
        args.block_table = numbers("block_table", has_table, given.block_table, entries.saturating_mul(4))?
            .map(|pages| BlockTable { pages, max_pages });
        args.cu_seqlens_q =
            numbers("cu_seqlens_q", layout.q == QLayout::Packed, given.cu_seqlens_q, used + 4)?;
        args.cu_seqlens_k =
            numbers("cu_seqlens_k", layout.kv == fmha::KvLayout::Packed, given.cu_seqlens_k, used + 4)?;
        args.cu_seqlens_new = numbers("cu_seqlens_new", packs_new, given.cu_seqlens_new, used + 4)?;
        args.seqused_q = numbers("seqused_q", layout.seqused_q, given.seqused_q, used)?;
        args.seqused_k = numbers("seqused_k", layout.seqused_k, given.seqused_k, used)?;
        if let Some(lists) = &problem.lists {
            let elems = lists.strides.extent(lists.shape(problem, totals)).unwrap_or(u64::MAX);
            args.indices = numbers("indices", true, given.indices, elems.saturating_mul(4))?;
            let bytes = lists.length_elems(problem, totals).saturating_mul(4);
            let has_length = lists.length != ListLength::Whole;
            args.topk_length = numbers("topk_length", has_length, given.topk_length, bytes)?;
        } else {
            absent!(given, "lists", indices, topk_length);
        }
        Ok(args)
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    #[inline]
    pub(crate) unsafe fn score<'a>(
        self,
        problem: &FwdProblem,
        given: &FmhaArgs,
    ) -> Result<ScoreArgs<'a>, ProblemError> {
        let Dims { batch, num_heads_q, num_heads_kv, .. } = problem.dims;
        let heads = u64::from(num_heads_q) * 4;
        let mut args = ScoreArgs::default();
        args.dropout = host::seed(given)?;
        // SAFETY: the caller keeps the contract of `score`.
        unsafe {
            args.bias = match problem.score.bias {
                fmha::Bias::Elementwise(bias) => {
                    let shape = problem.shape_bias(bias.broadcast);
                    Some(self.input("bias", given.bias, (bias.strides, shape), bias.dtype)?)
                }
                _ => {
                    absent!(given, "it", bias);
                    None
                }
            };
            let (has_slopes, slopes) = match problem.score.bias {
                fmha::Bias::Alibi { per_batch: true } => (true, heads * u64::from(batch)),
                fmha::Bias::Alibi { per_batch: false } => (true, heads),
                _ => (false, 0),
            };
            args.alibi_slopes =
                self.read_if("alibi_slopes", has_slopes, given.alibi_slopes, slopes, DType::F32)?;
            args.sink = self.read_if("sink", problem.score.sink, given.sink, heads, DType::F32)?;
            let scales = &problem.scales;
            for (to, name, kind, at) in [
                (&mut args.descale_q, "descale_q", scales.descale_q, given.descale_q),
                (&mut args.descale_k, "descale_k", scales.descale_k, given.descale_k),
                (&mut args.descale_v, "descale_v", scales.descale_v, given.descale_v),
            ] {
                let bytes = kind.num_elems(batch, num_heads_kv) * 4;
                *to = self.read_if(name, kind != fmha::Descale::None, at, bytes, DType::F32)?;
            }
        }
        Ok(args)
    }

    /// Adds the scales of blocks to a run's operands.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`].
    unsafe fn block_scales(
        self,
        problem: &FwdProblem,
        given: &FmhaArgs,
        extents: &Extents,
        args: &mut ScoreArgs<'_>,
    ) -> Result<(), ProblemError> {
        let Some(scales) = &problem.block_scales else {
            absent!(given, "block_scales", block_scale_q, block_scale_k, block_scale_v);
            return Ok(());
        };
        let ([q, k, v], elem) = (scales.shapes(extents), scales.format.scale_elem());
        // SAFETY: the caller keeps the contract of `block_scales`.
        unsafe {
            args.block_scale_q =
                Some(self.coded("block_scale_q", given.block_scale_q, (scales.q, q), elem)?);
            args.block_scale_k =
                Some(self.coded("block_scale_k", given.block_scale_k, (scales.k, k), elem)?);
            args.block_scale_v =
                Some(self.coded("block_scale_v", given.block_scale_v, (scales.v, v), elem)?);
        }
        Ok(())
    }

    /// Adds the scales of a cache by rows to a run's operands.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`].
    unsafe fn cache_scales(
        self,
        problem: &FwdProblem,
        given: &FmhaArgs,
        extents: &Extents,
        args: &mut FwdArgs<'_>,
    ) -> Result<(), ProblemError> {
        let Some(scales) = &problem.cache.scales else {
            absent!(given, "cache.scale_block", k_scale, v_scale);
            return Ok(());
        };
        let appends = problem.cache.append.is_some();
        for (to, name, at, strides, of) in [
            (&mut args.k_scale, "k_scale", given.k_scale, scales.k, extents.k),
            (&mut args.v_scale, "v_scale", given.v_scale, scales.v, extents.v),
        ] {
            let of = (strides, scales.shape(of));
            // SAFETY: the caller keeps the contract of `cache_scales`.
            *to = Some(unsafe {
                match appends {
                    true => self.output(name, at, of, DType::F32)?.into(),
                    false => self.input(name, at, of, DType::F32)?.into(),
                }
            });
        }
        Ok(())
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    #[inline(always)]
    pub(crate) unsafe fn input<'a, T>(
        self,
        name: &'static str,
        at: *const T,
        (strides, shape): (Strides, Shape),
        dtype: DType,
    ) -> Result<DevSlice<'a>, ProblemError> {
        // SAFETY: the caller keeps the contract of `input`.
        unsafe { self.needed(name, at, ValidFwd::extent_bytes(strides, shape, dtype), dtype) }
    }

    /// Reads a tensor of bytes with this element type.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`].
    unsafe fn coded<'a>(
        self,
        name: &'static str,
        at: *const u8,
        (strides, shape): (Strides, Shape),
        elem: ElemType,
    ) -> Result<DevSlice<'a>, ProblemError> {
        let bytes = strides.extent(shape).unwrap_or(u64::MAX);
        // SAFETY: the caller keeps the contract of `coded`.
        unsafe { self.needed(name, at, bytes, elem) }
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    #[inline(always)]
    pub(crate) unsafe fn output<'a, T>(
        self,
        name: &'static str,
        at: *mut T,
        (strides, shape): (Strides, Shape),
        dtype: DType,
    ) -> Result<DevSliceMut<'a>, ProblemError> {
        let bytes = ValidFwd::extent_bytes(strides, shape, dtype);
        present(name, at, bytes)?;
        // SAFETY: the caller keeps the contract of `output`.
        Ok(unsafe { self.write(at.cast(), bytes, dtype) })
    }

    /// Reads an operand that the problem needs.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`].
    #[inline(always)]
    pub(crate) unsafe fn needed<'a, T>(
        self,
        name: &'static str,
        at: *const T,
        bytes: u64,
        elem: impl Into<ElemType>,
    ) -> Result<DevSlice<'a>, ProblemError> {
        present(name, at, bytes)?;
        // SAFETY: the caller keeps the contract of `needed`.
        Ok(unsafe { self.read(at.cast(), bytes, elem) })
    }

    /// Reads an operand if the problem has it, and refuses it otherwise.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`].
    #[inline(always)]
    pub(crate) unsafe fn read_if<'a, T>(
        self,
        name: &'static str,
        wanted: bool,
        at: *const T,
        bytes: u64,
        elem: impl Into<ElemType>,
    ) -> Result<Option<DevSlice<'a>>, ProblemError> {
        if wanted {
            // SAFETY: the caller keeps the contract of `read_if`.
            return Ok(Some(unsafe { self.needed(name, at, bytes, elem)? }));
        }
        unwanted(name, at, "it")?;
        Ok(None)
    }

    /// An output if the problem has it; refuses it otherwise.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`].
    #[inline(always)]
    pub(crate) unsafe fn write_if<'a, T>(
        self,
        name: &'static str,
        wanted: bool,
        at: *mut T,
        bytes: u64,
        elem: impl Into<ElemType>,
    ) -> Result<Option<DevSliceMut<'a>>, ProblemError> {
        if wanted {
            present(name, at, bytes)?;
            // SAFETY: the caller keeps the contract of `write_if`.
            return Ok(Some(unsafe { self.write(at.cast(), bytes, elem) }));
        }
        unwanted(name, at, "it")?;
        Ok(None)
    }

    /// # Safety
    /// As [`FmhaPlan::run`].
    #[inline(always)]
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
    #[inline(always)]
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

/// Refuses null for an operand that has elements.
#[inline(always)]
pub(crate) fn present<T>(name: &'static str, at: *const T, bytes: u64) -> Result<(), ProblemError> {
    if at.is_null() && bytes != 0 { Err(lacking(name, bytes)) } else { Ok(()) }
}

#[cold]
fn lacking(name: &'static str, bytes: u64) -> ProblemError {
    ProblemError::new(name, format!("{name} is null, but {bytes} bytes are needed"))
}

/// Refuses an argument that the problem is without.
#[inline(always)]
pub(crate) fn unwanted<T>(name: &'static str, at: *const T, without: &str) -> Result<(), ProblemError> {
    if at.is_null() { Ok(()) } else { Err(given(name, without)) }
}

#[cold]
fn given(name: &'static str, without: &str) -> ProblemError {
    ProblemError::new(name, format!("{name} is given, but the problem is without {without}"))
}
