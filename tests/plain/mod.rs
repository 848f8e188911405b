//! Plain blocked attention on the CPU, into which faults can be planted. The battery itself is tested with it.

mod backward;
mod fault;
mod forward;
mod score;

use fmha_core::{
    Accuracy, Call, CombineArgs, DType, DevBuffer, DevSlice, DevSliceMut, Device, DeviceMemory, FmhaBackend,
    Launch, MemorySpace, Merge, PlanOptions, PlanParts, Planned, Problem, Promises, Queues, Result,
    ScoreSums, Strides, ValidBwd, ValidCombine, ValidFwd, Workspace,
};

pub(crate) use fault::Fault;

/// Backend of the plain kernel.
pub(crate) struct Plain {
    fault: Option<Fault>,
    memory: Memory,
}

impl Plain {
    /// Opens the backend, correct or with one fault. In [`MemorySpace::Device`] it pretends that its memory is a
    /// device's.
    pub(crate) fn open(fault: Option<Fault>, space: MemorySpace) -> Device {
        Device::new(Self { fault, memory: Memory(space) })
    }

    fn plan<P: Problem>(&self) -> Planned<P>
    where
        Kernel: Launch<P>,
    {
        let parts = PlanParts {
            kernel: "plain".into(),
            details: vec![],
            steps: vec![],
            refusals: vec![],
            is_fallback: false,
            workspace: Workspace::NONE,
            promises: Promises {
                deterministic: true,
                batch_invariant: true,
                row_invariant: true,
                graph_capturable: false,
                accuracy: Accuracy::Exact,
                score_sums: ScoreSums::F32,
            },
        };
        Planned { parts, launch: Box::new(Kernel(self.fault)) }
    }
}

// SAFETY: it goes row by row over the sequences of the call, or panics outside a slice.
unsafe impl FmhaBackend for Plain {
    fn kind(&self) -> &'static str {
        "plain"
    }

    fn name(&self) -> &str {
        "plain"
    }

    fn kernels(&self) -> Vec<&'static str> {
        vec!["plain"]
    }

    fn memory(&self) -> &dyn DeviceMemory {
        &self.memory
    }

    fn queues(&self) -> Option<&dyn Queues> {
        (self.memory.0 == MemorySpace::Device).then_some(&self.memory)
    }

    fn plan_fwd(&self, _: &ValidFwd, _: &PlanOptions) -> Result<Planned<ValidFwd>> {
        Ok(self.plan())
    }

    fn plan_bwd(&self, _: &ValidBwd, _: &PlanOptions) -> Result<Planned<ValidBwd>> {
        Ok(self.plan())
    }

    fn plan_combine(&self, _: &ValidCombine, _: &PlanOptions) -> Result<Planned<ValidCombine>> {
        Ok(self.plan())
    }
}

/// Kernel of a plan, with its fault.
struct Kernel(Option<Fault>);

impl Launch<ValidFwd> for Kernel {
    unsafe fn launch(&self, call: &Call<'_, ValidFwd>) -> Result<()> {
        Ok(forward::run(call.problem, call.args, self.0)?)
    }
}

impl Launch<ValidBwd> for Kernel {
    unsafe fn launch(&self, call: &Call<'_, ValidBwd>) -> Result<()> {
        Ok(backward::run(call.problem, call.args, self.0)?)
    }
}

impl Launch<ValidCombine> for Kernel {
    unsafe fn launch(&self, call: &Call<'_, ValidCombine>) -> Result<()> {
        combine(call.problem, call.args, self.0);
        Ok(())
    }
}

/// Host memory that calls itself host or device memory.
struct Memory(MemorySpace);

impl DeviceMemory for Memory {
    fn space(&self) -> MemorySpace {
        self.0
    }

    fn alloc(&self, bytes: u64) -> Result<DevBuffer> {
        let lines = (bytes as usize).div_ceil(16).max(1);
        let memory: Box<[u128]> = vec![u128::MAX; lines].into_boxed_slice();
        let ptr = Box::into_raw(memory);
        let free = move |ptr: *mut u8| {
            let whole = std::ptr::slice_from_raw_parts_mut(ptr.cast::<u128>(), lines);
            // SAFETY: made by `into_raw` above, of this many lines.
            drop(unsafe { Box::from_raw(whole) });
        };
        // SAFETY: only this code owns the box until `free` takes it back.
        Ok(unsafe { DevBuffer::from_raw(self.0, ptr.cast(), bytes, Box::new(free)) })
    }

    fn upload_bytes(&self, bytes: &[u8], to: &mut DevBuffer) -> Result<()> {
        assert!(bytes.len() as u64 <= to.bytes());
        // SAFETY: `to` has as many bytes.
        unsafe { to.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn download_bytes(&self, from: &DevBuffer, bytes: &mut [u8]) -> Result<()> {
        assert!(bytes.len() as u64 <= from.bytes());
        // SAFETY: `from` has as many bytes.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(from.as_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Queues of a device whose calls are complete when they return.
impl Queues for Memory {
    fn create_stream(&self) -> Result<u64> {
        Ok(1)
    }

    unsafe fn destroy_stream(&self, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn synchronize(&self, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn zero(&self, address: *mut u8, bytes: u64, _: u64) -> Result<()> {
        // SAFETY: the caller keeps the contract of `zero`; it is the processor's memory.
        unsafe { address.write_bytes(0, bytes as usize) };
        Ok(())
    }

    unsafe fn copy_bytes(&self, from: *const u8, to: *mut u8, bytes: u64, _: u64) -> Result<()> {
        // SAFETY: the caller keeps the contract of `copy_bytes`; it is the processor's memory.
        unsafe { to.copy_from_nonoverlapping(from, bytes as usize) };
        Ok(())
    }

    unsafe fn read(&self, from: *const u8, to: &mut [u8]) -> Result<()> {
        // SAFETY: the caller keeps the contract of `read`; it is the processor's memory.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from, to.len()) };
        Ok(())
    }

    fn create_event(&self) -> Result<u64> {
        Ok(1)
    }

    unsafe fn destroy_event(&self, _: u64) {}

    unsafe fn record_event(&self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn wait_event(&self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn synchronize_event(&self, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn seconds_between(&self, _: u64, _: u64) -> Result<f64> {
        Ok(0.0)
    }

    fn has_clock(&self) -> bool {
        false
    }

    unsafe fn is_capturing(&self, _: u64) -> Result<bool> {
        Ok(false)
    }

    unsafe fn capture(&self, _: u64, queue: &mut dyn FnMut() -> Result<()>) -> Result<u64> {
        queue().map(|()| 1)
    }

    unsafe fn replay(&self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn destroy_graph(&self, _: u64) {}
}

/// Takes a slice as host memory, whatever memory space it claims.
fn host(slice: DevSlice<'_>) -> DevSlice<'_> {
    // SAFETY: every slice of this backend is memory of the processor.
    unsafe { DevSlice::from_raw(MemorySpace::Host, slice.as_ptr(), slice.bytes(), slice.elem()) }
}

/// A tensor to read.
#[derive(Clone, Copy)]
struct Input<'a> {
    bytes: &'a [u8],
    dtype: DType,
    strides: Strides,
    wraps: bool,
}

impl<'a> Input<'a> {
    fn new(slice: DevSlice<'a>, dtype: DType, strides: Strides, fault: Option<Fault>) -> Self {
        let bytes = host(slice).as_host().unwrap_or_default();
        Self { bytes, dtype, strides, wraps: fault == Some(Fault::OffsetsIn32Bits) }
    }

    fn at(&self, batch: u32, row: u32, head: u32, dim: u32) -> f32 {
        let offset = self.strides.offset(batch, row, head, dim);
        let offset = if self.wraps { offset & 0x7fff_ffff } else { offset };
        self.dtype.read(&self.bytes[offset as usize * self.dtype.size_bytes() as usize..]) as f32
    }
}

/// A row of f32 to read.
fn floats(slice: Option<&DevSlice<'_>>) -> Vec<f32> {
    let bytes = slice.and_then(|slice| host(*slice).as_host()).unwrap_or_default();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// A tensor to write.
struct Output {
    ptr: *mut u8,
    bytes: usize,
    dtype: DType,
    strides: Strides,
    truncates: bool,
}

impl Output {
    fn new(slice: &DevSliceMut<'_>, dtype: DType, strides: Strides, fault: Option<Fault>) -> Self {
        let truncates = fault == Some(Fault::TruncatedOutput);
        Self { ptr: slice.as_mut_ptr(), bytes: slice.bytes() as usize, dtype, strides, truncates }
    }

    fn floats(slice: &DevSliceMut<'_>) -> Self {
        Self::new(slice, DType::F32, Strides { batch: 0, seq: 0, head: 0, dim: 1 }, None)
    }

    fn put(&self, [batch, row, head, dim]: [u32; 4], value: f32) {
        self.put_at(self.strides.offset(batch, row, head, dim) as usize, value);
    }

    fn put_at(&self, index: usize, value: f32) {
        let size = self.dtype.size_bytes() as usize;
        assert!((index + 1) * size <= self.bytes);
        let mut elem = [0; 4];
        self.dtype.write(f64::from(value), &mut elem);
        if self.truncates && size == 2 && value.is_finite() {
            let rounded = self.dtype.read(&elem);
            if rounded.abs() > f64::from(value).abs() {
                let bits = u16::from_le_bytes([elem[0], elem[1]]) - 1;
                elem[..2].copy_from_slice(&bits.to_le_bytes());
            }
        }
        // SAFETY: the assertion keeps the address inside the slice, which only this call writes.
        unsafe { self.ptr.add(index * size).copy_from_nonoverlapping(elem.as_ptr(), size) };
    }
}

fn combine(problem: &ValidCombine, args: &CombineArgs<'_>, fault: Option<Fault>) {
    let shape = problem.shape();
    let parts: Vec<(Input<'_>, Vec<f32>)> = args
        .parts
        .iter()
        .map(|part| (Input::new(part.o, problem.dtype_part, problem.part, fault), floats(Some(&part.lse))))
        .collect();
    let held = Input::new(args.o.as_input(), problem.dtype_o, problem.o, None);
    let o = Output::new(&args.o, problem.dtype_o, problem.o, None);
    let lse = args.lse.as_ref().map(Output::floats);
    for index in 0..problem.lse_elems() as usize {
        let at = index as u32;
        let (i, head, batch) = (at % shape.seq, at / shape.seq % shape.head, at / shape.seq / shape.head);
        if problem.adds() {
            for d in 0..shape.dim {
                let before = (problem.merge == Merge::AddTo).then(|| held.at(batch, i, head, d));
                let terms =
                    before.into_iter().chain(parts.iter().map(|(part, _)| part.at(batch, i, head, d)));
                o.put([batch, i, head, d], terms.reduce(|sum, term| sum + term).unwrap_or(0.0));
            }
            continue;
        }
        let row_max = parts.iter().fold(f32::NEG_INFINITY, |max, (_, lse)| max.max(lse[index]));
        let shift = if row_max == f32::NEG_INFINITY { 0.0 } else { row_max };
        let sum: f32 = parts.iter().map(|(_, lse)| (lse[index] - shift).exp()).sum();
        for d in 0..shape.dim {
            let mut value = 0.0;
            for (part, part_lse) in &parts {
                if part_lse[index] == f32::NEG_INFINITY && fault != Some(Fault::CombineOfEmptyParts) {
                    continue;
                }
                let weight = match fault {
                    Some(Fault::CombineNotNormalised) => (part_lse[index] - shift).exp(),
                    // By the sum, not its logarithm: of equal parts at -1e30 that is, rounded, each part's own.
                    _ => (part_lse[index] - shift).exp() / sum,
                };
                value += weight * part.at(batch, i, head, d);
            }
            o.put([batch, i, head, d], value);
        }
        if let Some(lse) = &lse {
            lse.put_at(index, shift + sum.ln());
        }
    }
}
