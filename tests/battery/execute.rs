//! Runs a call on a backend: copies tensors to its memory, plans, and copies results back.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fmha_core::{
    BwdArgs, BwdPlan, CacheSlice, CombineArgs, CombinePlan, DevBuffer, DevSlice, DevSliceMut, Device,
    DeviceMemory, DropoutSeed, Error, FwdArgs, FwdPlan, MemorySpace, PartialResult, Result, Stream, Totals,
    Workspace,
};

use crate::tensor::{Operand, Operands, Tensor};
use crate::tensors::{HostBwd, HostCombine, HostFwd, cache_of, masks_of, score_of, second_of, seq_of};
use crate::used::note;

/// Runs a forward plan; O, LSE and the keep mask of `host` then hold its results.
///
/// # Errors
/// An error of the backend.
pub fn run_fwd(backend: &Device, plan: &FwdPlan, host: &mut HostFwd) -> Result<()> {
    note(plan.kernel());
    let _turn = turn(backend);
    let mut resident = Resident::place(backend, &host.operands, plan.workspace())?;
    resident.run_fwd(plan, host)?;
    resident.read_back(&mut host.operands)
}

/// Runs a backward plan; the gradients of `host` then hold its results.
///
/// # Errors
/// An error of the backend.
pub fn run_bwd(backend: &Device, plan: &BwdPlan, host: &mut HostBwd) -> Result<()> {
    note(plan.kernel());
    let _turn = turn(backend);
    let mut resident = Resident::place(backend, &host.operands, plan.workspace())?;
    resident.run_bwd(plan, host)?;
    resident.read_back(&mut host.operands)
}

/// Runs a combine plan; O and LSE of `host` then hold its results.
///
/// # Errors
/// An error of the backend.
pub fn run_combine(backend: &Device, plan: &CombinePlan, host: &mut HostCombine) -> Result<()> {
    note(plan.kernel());
    let _turn = turn(backend);
    let (num_parts, adds) = (host.problem.num_parts, host.problem.adds());
    let mut resident = Resident::place(backend, &host.operands, plan.workspace())?;
    resident.call(&mut host.operands, &[Operand::O, Operand::Lse], |mut views| {
        let parts = (0..num_parts)
            .map(|part| {
                let o = views.input(Operand::PartO(part))?;
                if adds {
                    return Ok(PartialResult::term(o));
                }
                Ok(PartialResult { o, lse: views.input(Operand::PartLse(part))? })
            })
            .collect::<Result<Vec<_>>>()?;
        let mut args =
            CombineArgs::new(&parts, views.output(Operand::O)?).lse(views.outputs.remove(&Operand::Lse));
        plan.run(&mut args, &backend.default_stream())
    })?;
    backend.synchronize()?;
    resident.read_back(&mut host.operands)
}

/// Records a forward call with the operands of `first`, then replays it after the same memory has received those of
/// `then`; O, LSE and the keep mask of `then` hold the results.
///
/// # Errors
/// An error of the backend.
pub fn replay_fwd(backend: &Device, plan: &FwdPlan, first: &mut HostFwd, then: &mut HostFwd) -> Result<()> {
    note(plan.kernel());
    let _turn = turn(backend);
    let mut resident = Resident::place(backend, &first.operands, plan.workspace())?;
    let stream = backend.stream()?;
    let facts = (first.totals, first.second_totals, first.dropout);
    let recording = stream.capture(|| resident.forward(plan, &mut first.operands, facts, &stream))?;
    resident.upload(&then.operands)?;
    // SAFETY: `resident` owns the memory that the call was recorded with, and waits below.
    unsafe { recording.replay(&stream)? };
    stream.synchronize()?;
    resident.read_back(&mut then.operands)
}

/// Lock that gives a device one call at a time, from the first copy to the last, so that a reported fault belongs
/// to that call. Plans and checks of other cases run meanwhile.
fn turn(backend: &Device) -> Option<MutexGuard<'static, ()>> {
    static DEVICE: Mutex<()> = Mutex::new(());
    let device = backend.memory().space() == MemorySpace::Device;
    device.then(|| DEVICE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Operands that stay in the backend's memory between calls, like a caller's tensors, so that timing covers the
/// call and not the copies.
///
/// Host tensors are used in place; a device gets them with their margins, so that writes beside them are copied
/// back too, unless its memory checks bounds itself.
pub struct Resident<'a> {
    backend: &'a Device,
    /// Device buffers; empty where the backend computes in host memory.
    buffers: BTreeMap<Operand, DevBuffer>,
    workspace: Option<DevBuffer>,
    written: Vec<Operand>,
}

impl<'a> Resident<'a> {
    /// Copies the present operands to the device, and allocates scratch.
    ///
    /// # Errors
    /// What the backend's memory said.
    pub fn place(backend: &'a Device, operands: &Operands, workspace: Workspace) -> Result<Self> {
        let memory = backend.memory();
        let dirty = vec![1u8; workspace.zeroed_bytes as usize];
        let mut workspace = memory.workspace(workspace)?;
        if let Some(workspace) = &mut workspace {
            // The workspace holds garbage before a run that must clear it.
            memory.upload(&dirty, workspace)?;
        }
        let mut buffers = BTreeMap::new();
        if memory.space() == MemorySpace::Device {
            for (&operand, tensor) in &operands.0 {
                buffers.insert(operand, tensor.device_memory(memory)?);
            }
        }
        let mut resident = Self { backend, buffers, workspace, written: Vec::new() };
        resident.upload(operands)?;
        Ok(resident)
    }

    /// Replaces the operands on the device by others of equal sizes.
    fn upload(&mut self, operands: &Operands) -> Result<()> {
        for (operand, buffer) in &mut self.buffers {
            let Some(tensor) = operands.get(*operand) else { continue };
            let memory = self.backend.memory();
            let bytes = &tensor.raw().0[tensor.placed(memory)];
            match tensor.pieces() {
                None => memory.upload(bytes, buffer)?,
                Some(pieces) => pieces.into_iter().try_for_each(|piece| {
                    memory.upload(&bytes[piece.clone()], &mut piece_of(memory, buffer, &piece))
                })?,
            }
        }
        Ok(())
    }

    /// Queues a forward call over the operands of `host` and waits for it.
    ///
    /// # Errors
    /// An error of the backend.
    pub fn run_fwd(&mut self, plan: &FwdPlan, host: &mut HostFwd) -> Result<CallTime> {
        let facts = (host.totals, host.second_totals, host.dropout);
        host.takes_numerics_of(plan);
        let stream = self.backend.default_stream();
        timed(&stream, || self.forward(plan, &mut host.operands, facts, &stream))
    }

    /// Queues a forward call over the operands of `host`, and returns without waiting.
    ///
    /// # Errors
    /// An error of the backend.
    pub fn queue_fwd(&mut self, plan: &FwdPlan, host: &mut HostFwd, stream: &Stream) -> Result<()> {
        let facts = (host.totals, host.second_totals, host.dropout);
        host.takes_numerics_of(plan);
        self.forward(plan, &mut host.operands, facts, stream)
    }

    /// Queues the forward call that a backward one needs, which writes O and LSE, and waits for it.
    ///
    /// # Errors
    /// An error of the backend.
    pub fn run_fwd_of(&mut self, plan: &FwdPlan, host: &mut HostBwd) -> Result<()> {
        let stream = self.backend.default_stream();
        self.forward(plan, &mut host.operands, (host.totals, Totals::NONE, host.dropout), &stream)?;
        stream.synchronize()
    }

    fn forward(
        &mut self,
        plan: &FwdPlan,
        operands: &mut Operands,
        (totals, of_second, dropout): (Totals, Totals, DropoutSeed),
        stream: &Stream,
    ) -> Result<()> {
        let scratch = plan.workspace().bytes > 0;
        let appends = plan.problem().cache.append.is_some();
        let facts = (totals, plan.problem().dims.batch);
        let mut outputs = vec![Operand::O, Operand::Lse, Operand::KeepMask];
        outputs.extend([Operand::RowMax, Operand::HeadMax, Operand::KeySum]);
        if appends {
            outputs.extend([Operand::K, Operand::V, Operand::KScale, Operand::VScale]);
        }
        self.call(operands, &outputs, |mut views| {
            let (k, v) = if appends {
                (
                    views.outputs.remove(&Operand::K).map(Into::into),
                    views.outputs.remove(&Operand::V).map(Into::into),
                )
            } else {
                (views.get(Operand::K).map(Into::into), views.get(Operand::V).map(Into::into))
            };
            let [k_scale, v_scale] = [Operand::KScale, Operand::VScale].map(|operand| {
                let written = views.outputs.remove(&operand).map(CacheSlice::from);
                written.or_else(|| views.get(operand).map(CacheSlice::from))
            });
            let second = second_of((of_second, facts.1), |operand| views.get(operand));
            let mut args = FwdArgs::new(
                views.input(Operand::Q)?,
                k.unwrap_or(CacheSlice::InK),
                v.unwrap_or(CacheSlice::InK),
                views.output(Operand::O)?,
            )
            .lse(views.outputs.remove(&Operand::Lse))
            .seq(seq_of(facts, |operand| views.get(operand)))
            .score(score_of(dropout, |operand| views.get(operand)))
            .masks(masks_of(|operand| views.get(operand)))
            .cache(cache_of(|operand| views.get(operand)))
            .k_scale(k_scale)
            .v_scale(v_scale)
            .second(second.as_ref())
            .scale_o(views.get(Operand::ScaleO))
            .keep_mask(views.outputs.remove(&Operand::KeepMask))
            .row_max(views.outputs.remove(&Operand::RowMax))
            .head_max(views.outputs.remove(&Operand::HeadMax))
            .key_sum(views.outputs.remove(&Operand::KeySum))
            .workspace(views.workspace.filter(|_| scratch));
            plan.run(&mut args, stream)
        })
    }

    /// Queues a backward call over the operands of `host` and waits for it.
    ///
    /// # Errors
    /// An error of the backend.
    pub fn run_bwd(&mut self, plan: &BwdPlan, host: &mut HostBwd) -> Result<CallTime> {
        let stream = self.backend.default_stream();
        timed(&stream, || self.queue_bwd(plan, host, &stream))
    }

    /// Queues a backward call over the operands of `host`, and returns without waiting.
    ///
    /// # Errors
    /// An error of the backend.
    pub fn queue_bwd(&mut self, plan: &BwdPlan, host: &mut HostBwd, stream: &Stream) -> Result<()> {
        let (totals, dropout) = (host.totals, host.dropout);
        host.score_sums = plan.promises().score_sums;
        let scratch = plan.workspace().bytes > 0;
        let outputs = [Operand::Dq, Operand::Dk, Operand::Dv, Operand::Dbias, Operand::Dsink];
        self.call(&mut host.operands, &outputs, |mut views| {
            let mut args = BwdArgs::new(
                [views.input(Operand::Q)?, views.input(Operand::K)?, views.input(Operand::V)?],
                [views.input(Operand::O)?, views.input(Operand::Lse)?, views.input(Operand::Dout)?],
                [views.output(Operand::Dq)?, views.output(Operand::Dk)?, views.output(Operand::Dv)?],
            )
            .dlse(views.get(Operand::Dlse))
            .dbias(views.outputs.remove(&Operand::Dbias))
            .dsink(views.outputs.remove(&Operand::Dsink))
            .seq(seq_of((totals, plan.problem().fwd().dims.batch), |operand| views.get(operand)))
            .score(score_of(dropout, |operand| views.get(operand)))
            .masks(masks_of(|operand| views.get(operand)))
            .workspace(views.workspace.filter(|_| scratch));
            plan.run(&mut args, stream)
        })
    }

    fn call(
        &mut self,
        operands: &mut Operands,
        outputs: &[Operand],
        call: impl FnOnce(Views<'_>) -> Result<()>,
    ) -> Result<()> {
        let memory = self.backend.memory();
        let workspace = self.workspace.as_mut().map(DevBuffer::slice_mut);
        let mut views = Views { inputs: BTreeMap::new(), outputs: BTreeMap::new(), workspace };
        if memory.space() == MemorySpace::Host {
            for (&operand, tensor) in &mut operands.0 {
                if outputs.contains(&operand) {
                    views.outputs.insert(operand, tensor.slice_mut());
                } else {
                    views.inputs.insert(operand, tensor.slice());
                }
            }
        } else {
            for (operand, buffer) in &mut self.buffers {
                let Some(tensor) = operands.get(*operand) else { continue };
                if outputs.contains(operand) {
                    views.outputs.insert(*operand, part_mut(memory, buffer, tensor));
                } else {
                    views.inputs.insert(*operand, part(memory, buffer, tensor));
                }
            }
        }
        call(views)?;
        for operand in outputs {
            if !self.written.contains(operand) {
                self.written.push(*operand);
            }
        }
        Ok(())
    }

    /// Copies the results of calls to `operands`.
    ///
    /// # Errors
    /// What the backend's memory said.
    pub fn read_back(&mut self, operands: &mut Operands) -> Result<()> {
        let memory = self.backend.memory();
        for operand in self.written.drain(..) {
            if let (Some(buffer), Some(tensor)) = (self.buffers.get_mut(&operand), operands.get_mut(operand))
            {
                let placed = tensor.placed(memory);
                let pieces = tensor.pieces();
                let bytes = &mut tensor.raw_mut()[placed];
                match pieces {
                    None => memory.download(buffer, bytes)?,
                    Some(pieces) => pieces.into_iter().try_for_each(|piece| {
                        memory.download(&piece_of(memory, buffer, &piece), &mut bytes[piece.clone()])
                    })?,
                }
            }
        }
        Ok(())
    }
}

/// Duration of a call, and the clock that measured it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CallTime {
    /// Seconds from the start of the run's work to its end.
    pub seconds: f64,
    /// Whether the seconds come from a device's clock; otherwise from the host's, from the call to the end of its
    /// work.
    pub on_device: bool,
}

/// Queues work on a stream and waits for it.
fn timed(stream: &Stream, queue: impl FnOnce() -> Result<()>) -> Result<CallTime> {
    if stream.device().has_streams() {
        let seconds = stream.seconds(queue)?;
        return Ok(CallTime { seconds, on_device: stream.device().has_clock() });
    }
    let start = Instant::now();
    queue()?;
    stream.synchronize()?;
    Ok(CallTime { seconds: start.elapsed().as_secs_f64(), on_device: false })
}

/// Operands in the memory that the backend reads.
struct Views<'a> {
    inputs: BTreeMap<Operand, DevSlice<'a>>,
    outputs: BTreeMap<Operand, DevSliceMut<'a>>,
    workspace: Option<DevSliceMut<'a>>,
}

impl<'a> Views<'a> {
    fn get(&self, operand: Operand) -> Option<DevSlice<'a>> {
        self.inputs.get(&operand).copied()
    }

    fn input(&self, operand: Operand) -> Result<DevSlice<'a>> {
        self.get(operand).ok_or_else(|| missing(operand))
    }

    fn output(&mut self, operand: Operand) -> Result<DevSliceMut<'a>> {
        self.outputs.remove(&operand).ok_or_else(|| missing(operand))
    }
}

fn missing(operand: Operand) -> Error {
    fmha_core::ProblemError::new("operands", format!("operands: {operand:?} (1) is missing")).into()
}

/// Part of a buffer as a buffer of its own, still owned by `buffer`: of a tensor of gigabytes only some rows are
/// copied.
fn piece_of(memory: &dyn DeviceMemory, buffer: &mut DevBuffer, piece: &Range<usize>) -> DevBuffer {
    let bytes = piece.len() as u64;
    // SAFETY: the piece lies inside `buffer`, which outlives it and is borrowed alone; nothing is freed with it.
    unsafe {
        DevBuffer::from_raw(
            memory.space(),
            buffer.as_ptr().wrapping_add(piece.start),
            bytes,
            Box::new(|_| ()),
        )
    }
}

/// The elements of a tensor that lies in `buffer`.
fn part<'a>(memory: &dyn DeviceMemory, buffer: &'a DevBuffer, tensor: &Tensor) -> DevSlice<'a> {
    let first = tensor.raw().1 - tensor.placed(memory).start;
    let bytes = tensor.elems().len() as u64;
    // SAFETY: `buffer` holds all of the tensor's bytes and outlives 'a; the call is waited for
    // before it is dropped.
    unsafe { DevSlice::from_raw(memory.space(), buffer.as_ptr().wrapping_add(first), bytes, buffer.elem()) }
}

fn part_mut<'a>(memory: &dyn DeviceMemory, buffer: &'a mut DevBuffer, tensor: &Tensor) -> DevSliceMut<'a> {
    let first = tensor.raw().1 - tensor.placed(memory).start;
    let bytes = tensor.elems().len() as u64;
    // SAFETY: as in `part`, and the borrow is exclusive.
    unsafe {
        DevSliceMut::from_raw(memory.space(), buffer.as_ptr().wrapping_add(first), bytes, buffer.elem())
    }
}
