//! A device that is open, and its queues: what plans are made on and run on.

use std::fmt;
use std::sync::Arc;

use crate::args::MemorySpace;
use crate::backend::{DeviceMemory, FmhaBackend, unsupported};
use crate::bwd::ValidBwd;
use crate::cache::{Precompile, only_plans};
use crate::call::{Planned, Problem};
use crate::combine::ValidCombine;
use crate::dtype::DType;
use crate::error::{Error, ProblemError, Result};
use crate::peers::Peers;
use crate::plan::{BwdPlan, CombinePlan, FwdPlan, Plan, PlanOptions};
use crate::problem::ValidFwd;
use crate::queues::Queues;
use crate::roofline::Roofline;
use crate::tune::Tune;

/// A device that can run attention: a backend that is open, with all the kernels that it has loaded. A copy is cheap
/// and is the same device.
///
/// ```text
/// device.plan_fwd(&problem, &options)?     chooses and compiles; may take seconds the first time
///       .run(&mut args, &stream)?          checks the operands, queues, returns
/// ```
///
/// A run borrows its arguments, and so its outputs, exclusively: nobody else holds them, nor can two threads run one
/// set of arguments.
///
/// ```compile_fail,E0308
/// # use fmha_core::{FwdArgs, FwdPlan, Stream};
/// fn run(plan: &FwdPlan, args: &FwdArgs<'_>, stream: &Stream) -> fmha_core::Result<()> {
///     plan.run(args, stream)
/// }
/// ```
///
/// ```compile_fail,E0502
/// # use fmha_core::{FwdArgs, FwdPlan, Stream};
/// fn run(plan: &FwdPlan, mut args: FwdArgs<'_>, stream: &Stream) -> Option<u8> {
///     let o = args.o.as_input();
///     plan.run(&mut args, stream).ok()?;
///     o.as_host()?.first().copied()
/// }
/// ```
///
/// ```
/// # use fmha_core::{FwdArgs, FwdPlan, Stream};
/// fn run(plan: &FwdPlan, mut args: FwdArgs<'_>, stream: &Stream) -> Option<u8> {
///     plan.run(&mut args, stream).ok()?;
///     args.o.as_input().as_host()?.first().copied()
/// }
/// ```
#[derive(Clone)]
pub struct Device(Arc<dyn FmhaBackend>);

impl Device {
    /// A backend as a device.
    #[must_use]
    pub fn new(backend: impl FmhaBackend + 'static) -> Self {
        Self(Arc::new(backend))
    }

    /// The name that selects its backend: `cpu`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.0.kind()
    }

    /// For people and logs: which device, how many cores, which instructions.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// What it could reach at best with products of `dtype`.
    #[must_use]
    pub fn roofline(&self, dtype: DType) -> Roofline {
        self.0.roofline(dtype)
    }

    /// Every kernel that it has, best first.
    #[must_use]
    pub fn kernels(&self) -> Vec<&'static str> {
        self.0.kernels()
    }

    /// Itself as a compiler of kernels, if it compiles any.
    #[must_use]
    pub fn precompiler(&self) -> Option<&dyn Precompile> {
        self.0.precompiler()
    }

    /// Itself as something whose tiles can be measured, if they can.
    #[must_use]
    pub fn tuner(&self) -> Option<&dyn Tune> {
        self.0.tuner()
    }

    /// Its memory.
    #[must_use]
    pub fn memory(&self) -> &dyn DeviceMemory {
        self.0.memory()
    }

    /// Its part in memory that processes of a host share, if it has one.
    #[must_use]
    pub fn peers(&self) -> Option<&dyn Peers> {
        self.0.peers()
    }

    /// Chooses a forward kernel.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with every refusal, or what the compiler or driver said.
    pub fn plan_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<FwdPlan> {
        self.seal(problem, options, self.0.plan_fwd(problem, options)?)
    }

    /// Chooses a backward kernel.
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    pub fn plan_bwd(&self, problem: &ValidBwd, options: &PlanOptions) -> Result<BwdPlan> {
        self.seal(problem, options, self.0.plan_bwd(problem, options)?)
    }

    /// Chooses a combine kernel.
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    pub fn plan_combine(&self, problem: &ValidCombine, options: &PlanOptions) -> Result<CombinePlan> {
        self.seal(problem, options, self.0.plan_combine(problem, options)?)
    }

    fn seal<P: Problem>(&self, problem: &P, options: &PlanOptions, planned: Planned<P>) -> Result<Plan<P>> {
        let parts = &planned.parts;
        options
            .check_promises(&parts.kernel, &parts.promises)
            .map_err(|refusal| unsupported(self.name(), vec![refusal]))?;
        Ok(Plan::new(self.clone(), problem.clone(), planned, options.check_lengths))
    }

    /// Whether work is queued and a run returns before it is done. Without streams a run computes before it returns.
    #[must_use]
    pub fn has_streams(&self) -> bool {
        self.0.queues().is_some()
    }

    /// Whether it has a clock of its own: an emulated device has none, and the CPU is timed by the host's.
    #[must_use]
    pub fn has_clock(&self) -> bool {
        self.0.queues().is_some_and(Queues::has_clock)
    }

    /// A new stream, which does not wait for the default one. On the CPU its work is done at return.
    ///
    /// # Errors
    /// What the driver said.
    pub fn stream(&self) -> Result<Stream> {
        let handle = self.queues()?.map(Queues::create_stream).transpose()?;
        Ok(Stream { device: self.clone(), handle: handle.unwrap_or(0), owned: handle.is_some() })
    }

    /// The stream that is always there.
    #[must_use]
    pub fn default_stream(&self) -> Stream {
        Stream { device: self.clone(), handle: 0, owned: false }
    }

    /// A moment to record on a stream.
    ///
    /// # Errors
    /// What the driver said, or that it has no events.
    pub fn event(&self) -> Result<Event> {
        let handle = self.queues()?.map(Queues::create_event).transpose()?;
        Ok(Event { device: self.clone(), handle })
    }

    /// Waits until the work of the default stream is done.
    ///
    /// # Errors
    /// What the driver said, of that work too.
    pub fn synchronize(&self) -> Result<()> {
        match self.queues()? {
            // SAFETY: the default stream is always there.
            Some(queues) => unsafe { queues.synchronize(0) },
            None => Ok(()),
        }
    }

    /// Whether both are one device, opened once.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Its queues; none where a run computes before it returns.
    ///
    /// # Errors
    /// That it only plans.
    pub(crate) fn queues(&self) -> Result<Option<&dyn Queues>> {
        match self.0.queues() {
            Some(queues) => Ok(Some(queues)),
            None if self.memory().space() == MemorySpace::Host => Ok(None),
            None => Err(only_plans()),
        }
    }

    fn has_it(&self, field: &'static str, owner: &Self) -> Result<(), ProblemError> {
        if self.is(owner) {
            return Ok(());
        }
        let text = format!("{field} is of the device {}, and not of {}", owner.name(), self.name());
        Err(ProblemError::new(field, text))
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.name())
    }
}

/// A queue of a device's work, ended when it is dropped; work that it still has is done nevertheless.
///
/// Safe code has no other way to a stream than its device's:
///
/// ```compile_fail,E0451
/// # fn forge(device: fmha_core::Device) -> fmha_core::Stream {
/// fmha_core::Stream { device, handle: 0xbad, owned: false }
/// # }
/// ```
#[derive(Debug)]
pub struct Stream {
    device: Device,
    /// The driver's own. 0: the default stream.
    handle: u64,
    owned: bool,
}

impl Stream {
    /// A stream of the caller's own (a `CUstream`, a `hipStream_t`; 0 is the default one), which stays the caller's.
    ///
    /// # Safety
    /// `handle` is a stream of the context that `device` computes in, and lives until this is dropped and its work done.
    #[must_use]
    pub unsafe fn from_raw(device: &Device, handle: u64) -> Self {
        Self { device: device.clone(), handle, owned: false }
    }

    /// The driver's own handle, for other libraries. 0: the default stream.
    #[must_use]
    pub fn as_raw(&self) -> u64 {
        self.handle
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits until all work queued on it is done.
    ///
    /// # Errors
    /// What the driver said, of that work too.
    pub fn synchronize(&self) -> Result<()> {
        match self.device.queues()? {
            // SAFETY: it lives as long as `self`.
            Some(queues) => unsafe { queues.synchronize(self.handle) },
            None => Ok(()),
        }
    }

    /// Lets work that is queued from here on begin when `event` is reached.
    ///
    /// # Errors
    /// `event`, if it is another device's; what the driver said.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.device.has_it("event", &event.device)?;
        match (self.device.queues()?, event.handle) {
            // SAFETY: both live as long as they are borrowed.
            (Some(queues), Some(event)) => unsafe { queues.wait_event(self.handle, event) },
            _ => Ok(()),
        }
    }

    /// Seconds, by the device's clock, of the work that `queue` puts on the stream; waits for it. An emulated device's
    /// seconds are the emulator's.
    ///
    /// # Errors
    /// What `queue` or the driver said; [`Error::NoDevice`] where there is no such clock.
    pub fn seconds(&self, queue: impl FnOnce() -> Result<()>) -> Result<f64> {
        let (start, stop) = (self.device.event()?, self.device.event()?);
        start.record(self)?;
        queue()?;
        stop.record(self)?;
        stop.seconds_since(&start)
    }

    /// Records what `queue` puts on the stream, which is not the default one, instead of running it.
    ///
    /// # Errors
    /// What `queue` or the driver said; [`Error::NoDevice`] where there are no streams.
    #[doc(alias = "graph")]
    #[doc(alias = "record")]
    pub fn capture(&self, mut queue: impl FnMut() -> Result<()>) -> Result<Recording> {
        let queues = self.device.queues()?.ok_or_else(|| no_streams(&self.device))?;
        // SAFETY: it lives as long as `self`.
        let graph = unsafe { queues.capture(self.handle, &mut queue)? };
        Ok(Recording { device: self.device.clone(), graph })
    }

    /// Its handle, for a plan of `device`.
    ///
    /// # Errors
    /// `stream`, if it is another device's.
    #[inline]
    pub(crate) fn of(&self, device: &Device) -> Result<u64, ProblemError> {
        device.has_it("stream", &self.device)?;
        Ok(self.handle)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned
            && let Ok(Some(queues)) = self.device.queues()
        {
            // A stream that cannot be ended went with its context.
            // SAFETY: `Device::stream` made it, and nobody has it any more.
            let _ = unsafe { queues.destroy_stream(self.handle) };
        }
    }
}

/// A moment on a stream.
#[derive(Debug)]
pub struct Event {
    device: Device,
    /// None where all work is done at return.
    handle: Option<u64>,
}

impl Event {
    /// Makes it the moment when the stream's work so far is done.
    ///
    /// # Errors
    /// `stream`, if it is another device's; what the driver said.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let stream = stream.of(&self.device)?;
        match self.queues()? {
            // SAFETY: both live as long as they are borrowed.
            Some((queues, event)) => unsafe { queues.record_event(event, stream) },
            None => Ok(()),
        }
    }

    /// Waits until it is reached; at once where it was never recorded.
    ///
    /// # Errors
    /// What the driver said, of the work before it too.
    pub fn synchronize(&self) -> Result<()> {
        match self.queues()? {
            // SAFETY: it lives as long as `self`.
            Some((queues, event)) => unsafe { queues.synchronize_event(event) },
            None => Ok(()),
        }
    }

    /// Seconds from `start` to here by the device's clock; waits for both.
    ///
    /// # Errors
    /// `start`, if it is another device's; what the driver said; [`Error::NoDevice`] where there is no clock.
    pub fn seconds_since(&self, start: &Event) -> Result<f64> {
        self.device.has_it("start", &start.device)?;
        match (self.queues()?, start.handle) {
            // SAFETY: both live as long as they are borrowed.
            (Some((queues, stop)), Some(start)) => unsafe {
                queues.synchronize_event(stop)?;
                queues.seconds_between(start, stop)
            },
            _ => Err(no_streams(&self.device)),
        }
    }

    fn queues(&self) -> Result<Option<(&dyn Queues, u64)>> {
        Ok(self.device.queues()?.zip(self.handle))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(Some((queues, event))) = self.queues() {
            // SAFETY: `Device::event` made it, and nobody has it any more.
            unsafe { queues.destroy_event(event) };
        }
    }
}

/// Work that was recorded once and can be queued again with one call: a graph.
#[derive(Debug)]
pub struct Recording {
    device: Device,
    graph: u64,
}

impl Recording {
    /// The device that it was recorded on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Queues the work on `stream`. Lengths are read anew, in the buffers that the recorded calls named.
    ///
    /// # Safety
    /// The memory that the recorded calls named is still there, and nothing else uses it until the work is done.
    ///
    /// # Errors
    /// `stream`, if it is another device's; what the driver said.
    pub unsafe fn replay(&self, stream: &Stream) -> Result<()> {
        let stream = stream.of(&self.device)?;
        match self.device.queues()? {
            // SAFETY: the caller's promise; the graph lives as long as `self`.
            Some(queues) => unsafe { queues.replay(self.graph, stream) },
            None => Err(no_streams(&self.device)),
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Ok(Some(queues)) = self.device.queues() {
            // SAFETY: `Stream::capture` made it, and nobody has it any more.
            unsafe { queues.destroy_graph(self.graph) };
        }
    }
}

fn no_streams(device: &Device) -> Error {
    Error::NoDevice(format!("{} has 0 streams: its work is done at return", device.name()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::*;
    use crate::plan::Workspace;
    use crate::toy::{Log, Toy, problem};
    use crate::{DType, DevBuffer, DevSlice, Dims, FwdArgs, FwdProblem, SeqArgs};

    fn open(toy: Toy) -> (Device, Log) {
        let log = toy.log.clone();
        (Device::new(toy), log)
    }

    /// Operands of a problem, in a device's memory.
    struct Operands {
        inputs: [DevBuffer; 3],
        o: DevBuffer,
        workspace: Option<DevBuffer>,
    }

    impl Operands {
        fn of(plan: &FwdPlan) -> Self {
            let (memory, problem) = (plan.device().memory(), plan.problem());
            let tensor = |elems: u64| memory.alloc(4 * elems).unwrap();
            let shapes = [problem.shape_q(), problem.shape_k(), problem.shape_v()];
            let workspace = (plan.workspace().bytes > 0).then(|| {
                // As the driver gives it: aligned to 256 bytes.
                memory.alloc(plan.workspace().bytes + 256).unwrap()
            });
            Self {
                inputs: shapes.map(|shape| tensor(shape.num_elems())),
                o: tensor(problem.shape_o().num_elems()),
                workspace,
            }
        }

        fn args(&mut self) -> FwdArgs<'_> {
            let [q, k, v] = &self.inputs;
            let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), self.o.slice_mut());
            args.workspace = self.workspace.as_mut().map(|buffer| {
                let skipped = buffer.as_ptr().align_offset(Workspace::ALIGN);
                let bytes = buffer.bytes() - skipped as u64;
                // SAFETY: inside the buffer.
                unsafe {
                    crate::DevSliceMut::from_raw(
                        crate::MemorySpace::Device,
                        buffer.as_ptr().add(skipped),
                        bytes,
                    )
                }
            });
            args
        }
    }

    #[test]
    fn a_call_is_checked_then_cleared_then_launched() {
        let workspace = Workspace { bytes: 64, zeroed_bytes: 16 };
        let (device, log) = open(Toy { workspace, ..Toy::on_a_device() });
        let plan = device.plan_fwd(&problem(), &PlanOptions::default()).unwrap();
        let mut operands = Operands::of(&plan);
        let stream = device.stream().unwrap();
        assert_eq!(log.take(), ["create stream"]);
        plan.run(&mut operands.args(), &stream).unwrap();
        assert_eq!(log.take(), ["zero 16 on 1", "launch on 1, 0 sequences"]);

        let mut args = operands.args();
        args.workspace = None;
        assert!(plan.run(&mut args, &stream).unwrap_err().to_string().starts_with("workspace"));
        let mut args = operands.args();
        args.q = DevSlice::host(&[0u8; 4]);
        assert!(plan.run(&mut args, &stream).unwrap_err().to_string().starts_with("q"));
        assert_eq!(log.take(), Vec::<String>::new(), "something was queued");
    }

    #[test]
    fn an_address_that_a_kernel_does_not_take_is_refused_before_anything_is_queued() {
        let workspace = Workspace::zeroed(16);
        let (device, log) = open(Toy { workspace, refused: Some(0x1000), ..Toy::on_a_device() });
        let plan = device.plan_fwd(&problem(), &PlanOptions::default()).unwrap();
        let mut operands = Operands::of(&plan);
        let mut args = operands.args();
        // SAFETY: nobody reads it.
        args.q = unsafe { DevSlice::from_raw(crate::MemorySpace::Device, 0x1000 as *const u8, 64) };
        let error = plan.run(&mut args, &device.default_stream()).unwrap_err();
        assert_eq!(error.to_string(), "q starts at 0x1000");
        assert_eq!(log.take(), Vec::<String>::new());
    }

    #[test]
    fn a_call_that_writes_nothing_launches_nothing() {
        let (device, log) = open(Toy::on_a_device());
        let mut empty = FwdProblem::clone(&problem());
        empty.dims.seqlen_q = 0;
        let plan = device.plan_fwd(&empty.validate().unwrap(), &PlanOptions::default()).unwrap();
        plan.run(&mut Operands::of(&plan).args(), &device.default_stream()).unwrap();
        assert_eq!(log.take(), Vec::<String>::new());
    }

    const TWO: Dims = Dims {
        batch: 2,
        seqlen_q: 3,
        seqlen_k: 3,
        num_heads_q: 1,
        num_heads_kv: 1,
        head_dim_qk: 8,
        head_dim_v: 8,
    };

    #[test]
    fn lengths_are_read_back_from_a_device_where_that_was_asked_for_and_on_the_host_always() {
        let problem = FwdProblem::batch(DType::F32, TWO).seqused_k(true);
        let problem = problem.validate().unwrap();
        let checks = PlanOptions { check_lengths: true, ..PlanOptions::default() };
        for (options, checked) in [(checks, true), (PlanOptions::default(), false)] {
            let (device, log) = open(Toy::on_a_device());
            let plan = device.plan_fwd(&problem, &options).unwrap();
            assert_eq!(plan.promises().graph_capturable, !checked);
            assert_eq!(plan.to_string().contains("read back and checked"), checked);
            let mut lengths = device.memory().alloc(8).unwrap();
            for (used, wrong) in [([3i32, 1], false), ([3, 9], true)] {
                device.memory().upload(bytemuck::cast_slice(&used), &mut lengths).unwrap();
                let mut operands = Operands::of(&plan);
                let mut args = operands.args();
                args.seq = SeqArgs { seqused_k: Some(lengths.slice()), ..SeqArgs::default() };
                let ran = plan.run(&mut args, &device.default_stream());
                let mut expected = if checked { vec!["synchronize 0", "read 8"] } else { Vec::new() };
                match (checked, wrong) {
                    (true, true) => assert!(ran.unwrap_err().to_string().contains("seqused_k[1] 9")),
                    _ => {
                        ran.unwrap();
                        expected.push("launch on 0, 0 sequences");
                    }
                }
                assert_eq!(log.take(), expected);
            }
        }

        let (device, log) = open(Toy::in_host_memory());
        let plan = device.plan_fwd(&problem, &PlanOptions::default()).unwrap();
        for (used, wrong) in [([3i32, 1], false), ([3, 9], true)] {
            let mut operands = Operands::of(&plan);
            let mut args = operands.args();
            args.seq = SeqArgs { seqused_k: Some(DevSlice::host(&used)), ..SeqArgs::default() };
            let ran = plan.run(&mut args, &device.default_stream());
            assert_eq!(ran.is_err(), wrong);
            assert_eq!(log.take().len(), usize::from(!wrong));
        }
    }

    #[test]
    fn a_stream_an_event_and_a_recording_of_another_device_are_refused_by_name() {
        let ((ours, log), (other, _)) = (open(Toy::on_a_device()), open(Toy::on_a_device()));
        assert!(ours.is(&ours.clone()) && !ours.is(&other));
        let plan = ours.plan_fwd(&problem(), &PlanOptions::default()).unwrap();
        let (stream, event) = (ours.stream().unwrap(), other.event().unwrap());
        let recording = other.stream().unwrap().capture(|| Ok(())).unwrap();
        log.take();
        for (error, name) in [
            (plan.run(&mut Operands::of(&plan).args(), &other.default_stream()), "stream is of the device"),
            (event.record(&stream), "stream is of the device"),
            (stream.wait(&event), "event is of the device"),
            (ours.event().unwrap().seconds_since(&event).map(drop), "start is of the device"),
            // SAFETY: nothing was recorded.
            (unsafe { recording.replay(&stream) }, "stream is of the device"),
        ] {
            let text = error.unwrap_err().to_string();
            assert!(text.starts_with(name) && text.contains("toy:7"), "{text}");
        }
        assert_eq!(log.take(), ["destroy event 101"]);
    }

    #[test]
    fn what_a_device_made_is_destroyed_once_and_what_is_the_callers_never() {
        let (device, log) = open(Toy::on_a_device());
        let stream = device.stream().unwrap();
        let event = device.event().unwrap();
        event.record(&stream).unwrap();
        stream.wait(&event).unwrap();
        stream.synchronize().unwrap();
        let recording = stream.capture(|| Ok(())).unwrap();
        // SAFETY: nothing was recorded.
        unsafe { recording.replay(&stream).unwrap() };
        // SAFETY: the toy's streams are numbers.
        let callers = unsafe { Stream::from_raw(&device, 5) };
        callers.synchronize().unwrap();
        assert_eq!((callers.as_raw(), device.default_stream().as_raw()), (5, 0));
        let asked =
            ["create stream", "record 101 on 1", "1 waits for 101", "synchronize 1", "replay 201 on 1"];
        assert_eq!(log.take(), [&asked[..], &["synchronize 5"]].concat());
        drop((callers, device.default_stream()));
        assert_eq!(log.take(), Vec::<String>::new());
        drop((recording, event, stream));
        assert_eq!(log.take(), ["destroy graph 201", "destroy event 101", "destroy stream 1"]);
    }

    #[test]
    fn without_streams_work_is_done_at_return_and_has_no_clock() {
        let device = Device::new(Toy::in_host_memory());
        assert!(!device.has_streams() && !device.has_clock());
        let (stream, event) = (device.stream().unwrap(), device.event().unwrap());
        event.record(&stream).unwrap();
        stream.wait(&event).unwrap();
        for done in [stream.synchronize(), event.synchronize(), device.synchronize()] {
            done.unwrap();
        }
        for error in [stream.seconds(|| Ok(())).map(drop), stream.capture(|| Ok(())).map(drop)] {
            assert!(matches!(error, Err(Error::NoDevice(text)) if text.contains("0 streams")));
        }
    }

    #[test]
    fn a_plan_that_breaks_a_wish_is_refused_though_its_backend_made_it() {
        let (device, _) = open(Toy { deterministic: false, ..Toy::on_a_device() });
        let options = PlanOptions { deterministic: true, ..PlanOptions::default() };
        let error = device.plan_fwd(&problem(), &options).unwrap_err().to_string();
        assert!(error.contains("toy: deterministic true is not kept"), "{error}");
    }
}
