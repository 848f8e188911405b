//! A backend that computes nothing and records the calls from core.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::args::{FwdArgs, MemorySpace};
use crate::backend::{DevBuffer, DeviceMemory, FmhaBackend, unsupported};
use crate::call::{Call, Launch, Planned, Problem};
use crate::error::{ProblemError, Result};
use crate::plan::{Accuracy, PlanOptions, PlanParts, Promises, ScoreSums, Workspace};
use crate::queues::Queues;
use crate::{DType, Dims, FwdProblem, ValidBwd, ValidCombine, ValidFwd};

/// A problem with two queries and four keys, in f32.
pub(crate) fn problem() -> ValidFwd {
    let dims = Dims::batch(1).seqlens(2, 4).heads(1, 1).head_dim(8);
    FwdProblem::batch(DType::F32, dims).validate().expect("a sound problem")
}

/// The calls so far, in order.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn lines(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, line: impl Into<String>) {
        self.lines().push(line.into());
    }

    /// Returns the calls since the last `take`, and clears the log.
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.lines())
    }
}

pub(crate) struct Toy {
    pub(crate) space: MemorySpace,
    pub(crate) has_clock: bool,
    /// Seconds that the clock shows between any two events.
    pub(crate) seconds: f64,
    pub(crate) workspace: Workspace,
    pub(crate) deterministic: bool,
    /// The address of Q that the toy backend refuses.
    pub(crate) refused: Option<u64>,
    /// Whether a stream is being captured.
    pub(crate) captures: AtomicBool,
    pub(crate) log: Log,
}

impl Toy {
    /// Makes a backend with streams. Its device memory is host memory under another name.
    pub(crate) fn on_a_device() -> Self {
        Self {
            space: MemorySpace::Device,
            has_clock: true,
            seconds: 1.0,
            workspace: Workspace::NONE,
            deterministic: true,
            refused: None,
            captures: AtomicBool::new(false),
            log: Log::default(),
        }
    }

    pub(crate) fn in_host_memory() -> Self {
        Self { space: MemorySpace::Host, ..Self::on_a_device() }
    }

    fn planned<P: Problem>(&self) -> Planned<P>
    where
        Kernel: Launch<P>,
    {
        let parts = PlanParts {
            kernel: "toy".to_owned(),
            details: Vec::new(),
            steps: Vec::new(),
            refusals: Vec::new(),
            is_fallback: false,
            workspace: self.workspace,
            promises: Promises {
                deterministic: self.deterministic,
                batch_invariant: true,
                row_invariant: true,
                graph_capturable: true,
                accuracy: Accuracy::Exact,
                score_sums: ScoreSums::F32,
            },
        };
        Planned { parts, launch: Box::new(Kernel { log: self.log.clone(), refused: self.refused }) }
    }
}

// SAFETY: it touches no operand.
unsafe impl FmhaBackend for Toy {
    fn kind(&self) -> &'static str {
        "toy"
    }

    fn name(&self) -> &str {
        "toy:7"
    }

    fn kernels(&self) -> Vec<&'static str> {
        vec!["toy"]
    }

    fn queues(&self) -> Option<&dyn Queues> {
        (self.space == MemorySpace::Device).then_some(self)
    }

    fn memory(&self) -> &dyn DeviceMemory {
        self
    }

    fn plan_fwd(&self, problem: &ValidFwd, _: &PlanOptions) -> Result<Planned<ValidFwd>> {
        if problem.dims.head_dim_qk > 256 {
            let reason = format!("head_dim_qk {} is larger than 256", problem.dims.head_dim_qk);
            return Err(unsupported("toy", vec![crate::Refusal::new("toy", reason)]));
        }
        Ok(self.planned())
    }

    fn plan_bwd(&self, _: &ValidBwd, _: &PlanOptions) -> Result<Planned<ValidBwd>> {
        Ok(self.planned())
    }

    fn plan_combine(&self, _: &ValidCombine, _: &PlanOptions) -> Result<Planned<ValidCombine>> {
        Ok(self.planned())
    }
}

pub(crate) struct Kernel {
    log: Log,
    refused: Option<u64>,
}

impl Launch<ValidFwd> for Kernel {
    fn takes_addresses(&self, call: &Call<'_, ValidFwd>) -> Result<(), ProblemError> {
        let args: &FwdArgs<'_> = call.args;
        match self.refused {
            Some(address) if args.q.as_ptr() as u64 == address => {
                Err(ProblemError::new("q", format!("q starts at {address:#x}")))
            }
            _ => Ok(()),
        }
    }

    unsafe fn launch(&self, call: &Call<'_, ValidFwd>) -> Result<()> {
        self.log.add(format!("launch on {}, {} sequences", call.stream, call.spans.len()));
        Ok(())
    }
}

impl Launch<ValidBwd> for Kernel {
    unsafe fn launch(&self, _: &Call<'_, ValidBwd>) -> Result<()> {
        self.log.add("launch");
        Ok(())
    }
}

impl Launch<ValidCombine> for Kernel {
    unsafe fn launch(&self, _: &Call<'_, ValidCombine>) -> Result<()> {
        self.log.add("launch");
        Ok(())
    }
}

impl DeviceMemory for Toy {
    fn space(&self) -> MemorySpace {
        self.space
    }

    fn alloc(&self, bytes: u64) -> Result<DevBuffer> {
        // Elements of type `u128`, so that the memory is aligned to 16 bytes.
        let mut memory = vec![u128::MAX; (bytes as usize).div_ceil(16).max(1)];
        let address = memory.as_mut_ptr().cast();
        // SAFETY: the vector lives in the closure.
        Ok(unsafe { DevBuffer::from_raw(self.space, address, bytes, Box::new(move |_| drop(memory))) })
    }

    fn upload_bytes(&self, bytes: &[u8], to: &mut DevBuffer) -> Result<()> {
        // SAFETY: the tests' copies fit.
        unsafe { to.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn download_bytes(&self, from: &DevBuffer, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the tests' copies fit.
        unsafe { from.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Streams are numbered from 1, events from 101, graphs from 201.
impl Queues for Toy {
    fn create_stream(&self) -> Result<u64> {
        self.log.add("create stream");
        Ok(1)
    }

    unsafe fn destroy_stream(&self, stream: u64) -> Result<()> {
        self.log.add(format!("destroy stream {stream}"));
        Ok(())
    }

    unsafe fn synchronize(&self, stream: u64) -> Result<()> {
        self.log.add(format!("synchronize {stream}"));
        Ok(())
    }

    unsafe fn zero(&self, address: *mut u8, bytes: u64, stream: u64) -> Result<()> {
        self.log.add(format!("zero {bytes} on {stream}"));
        // SAFETY: the caller keeps the contract of `zero`; the address is host memory.
        unsafe { address.write_bytes(0, bytes as usize) };
        Ok(())
    }

    unsafe fn copy_bytes(&self, from: *const u8, to: *mut u8, bytes: u64, stream: u64) -> Result<()> {
        self.log.add(format!("copy {bytes} on {stream}"));
        // SAFETY: the caller keeps the contract of `copy_bytes`; both addresses are host memory.
        unsafe { to.copy_from_nonoverlapping(from, bytes as usize) };
        Ok(())
    }

    unsafe fn read(&self, from: *const u8, to: &mut [u8]) -> Result<()> {
        self.log.add(format!("read {}", to.len()));
        // SAFETY: the caller keeps the contract of `read`; the address is host memory.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from, to.len()) };
        Ok(())
    }

    fn create_event(&self) -> Result<u64> {
        Ok(101)
    }

    unsafe fn destroy_event(&self, event: u64) {
        self.log.add(format!("destroy event {event}"));
    }

    unsafe fn record_event(&self, event: u64, stream: u64) -> Result<()> {
        self.log.add(format!("record {event} on {stream}"));
        Ok(())
    }

    unsafe fn wait_event(&self, stream: u64, event: u64) -> Result<()> {
        self.log.add(format!("{stream} waits for {event}"));
        Ok(())
    }

    unsafe fn synchronize_event(&self, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn seconds_between(&self, _: u64, _: u64) -> Result<f64> {
        Ok(self.seconds)
    }

    fn has_clock(&self) -> bool {
        self.has_clock
    }

    unsafe fn is_capturing(&self, _: u64) -> Result<bool> {
        Ok(self.captures.load(Ordering::Relaxed))
    }

    unsafe fn capture(&self, _: u64, queue: &mut dyn FnMut() -> Result<()>) -> Result<u64> {
        self.captures.store(true, Ordering::Relaxed);
        let queued = queue();
        self.captures.store(false, Ordering::Relaxed);
        queued.map(|()| 201)
    }

    unsafe fn replay(&self, graph: u64, stream: u64) -> Result<()> {
        self.log.add(format!("replay {graph} on {stream}"));
        Ok(())
    }

    unsafe fn destroy_graph(&self, graph: u64) {
        self.log.add(format!("destroy graph {graph}"));
    }
}
