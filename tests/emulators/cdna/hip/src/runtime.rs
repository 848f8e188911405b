//! The state behind the API: devices, modules, streams, graphs, the last error.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_char;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use fmha_emu_cdna::{Arch, Checks, Device, LaunchError, Module, Options};

use crate::graph::{Graph, Node};
use crate::status::{Call, Status, report};

/// Everything a process has.
pub(crate) struct Runtime {
    /// Chosen by `FMHA_EMULATE` when the library is first used.
    pub(crate) devices: Vec<Arc<Device>>,
    state: Mutex<State>,
}

/// State that calls change.
#[derive(Default)]
pub(crate) struct State {
    next_handle: usize,
    pub(crate) modules: HashMap<usize, Arc<Loaded>>,
    /// Function handles: module and kernel name.
    pub(crate) functions: HashMap<usize, (Arc<Loaded>, String)>,
    pub(crate) streams: HashMap<usize, Stream>,
    /// Time at which each event was recorded, in seconds since the runtime began.
    pub(crate) events: HashMap<usize, Option<f64>>,
    pub(crate) graphs: HashMap<usize, Graph>,
    pub(crate) executables: HashMap<usize, Graph>,
    /// Host allocations and their layouts.
    pub(crate) host: HashMap<usize, std::alloc::Layout>,
    /// A fault that no call has reported yet.
    pub(crate) pending: Option<Status>,
    pub(crate) last_fault: String,
}

/// A module and the device that it is on.
pub(crate) struct Loaded {
    pub(crate) device: Arc<Device>,
    pub(crate) module: Module,
}

impl Drop for Loaded {
    fn drop(&mut self) {
        self.device.unload(&self.module);
    }
}

/// A stream: nothing waits in it, for everything executes at once; while it captures, work goes into the graph.
#[derive(Default)]
pub(crate) struct Stream {
    pub(crate) capture: Option<Graph>,
}

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    // One device of each kind, unless the environment says otherwise: this library is loaded for emulation
    // alone.
    let names =
        std::env::var("FMHA_EMULATE").unwrap_or_else(|_| "gfx90a,gfx942,gfx950,gfx1100,gfx1201".to_owned());
    let checks = match std::env::var("FMHA_EMULATE_CHECKS").as_deref() {
        Ok("none") => Checks::NONE,
        _ => Checks::ALL,
    };
    let options = Options {
        checks,
        sequential: std::env::var_os("FMHA_EMULATE_SEQUENTIAL").is_some(),
        order: std::env::var("FMHA_EMULATE_ORDER").ok().map(|seed| seed.trim().parse().unwrap_or(1)),
        garbage: std::env::var("FMHA_EMULATE_GARBAGE").ok().map(|seed| seed.trim().parse().unwrap_or(1)),
        ..Options::default()
    };
    let mut devices = Vec::new();
    for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        match Arch::from_name(name) {
            Some(arch) => devices.push(Arc::new(Device::with_index(arch, options, devices.len() as u8))),
            None => eprintln!("FMHA_EMULATE: {name} is none of gfx90a, gfx942, gfx950, gfx1100, gfx1201"),
        }
    }
    let mut state = State { next_handle: 0x1000, ..State::default() };
    state.streams.insert(0, Stream::default());
    Runtime { devices, state: Mutex::new(state) }
});

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    static LAST_ERROR: Cell<Status> = const { Cell::new(Status::SUCCESS) };
}

impl State {
    /// A handle that no object has: never null, and no pointer to anything.
    pub(crate) fn handle(&mut self) -> usize {
        self.next_handle += 16;
        self.next_handle
    }

    pub(crate) fn stream(&mut self, handle: usize) -> Call<&mut Stream> {
        // 1 and 2 are hipStreamLegacy and hipStreamPerThread.
        let handle = if handle <= 2 { 0 } else { handle };
        self.streams.get_mut(&handle).ok_or(Status::INVALID_HANDLE)
    }
}

/// The runtime's state.
pub(crate) fn state() -> MutexGuard<'static, State> {
    RUNTIME.state.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn devices() -> &'static [Arc<Device>] {
    &RUNTIME.devices
}

/// The calling thread's device.
pub(crate) fn current() -> Call<Arc<Device>> {
    let devices = devices();
    if devices.is_empty() {
        return Err(Status::NO_DEVICE);
    }
    devices.get(CURRENT.get()).cloned().ok_or(Status::INVALID_DEVICE)
}

pub(crate) fn current_index() -> usize {
    CURRENT.get()
}

pub(crate) fn set_current(index: usize) -> Call {
    if index >= devices().len() {
        return Err(Status::INVALID_DEVICE);
    }
    CURRENT.set(index);
    Ok(())
}

/// The device whose memory holds an address.
pub(crate) fn owner(address: u64) -> Option<Arc<Device>> {
    devices().iter().find(|device| device.memory.allocation_of(address).is_some()).cloned()
}

pub(crate) fn set_last_error(status: Status) {
    LAST_ERROR.set(status);
}

pub(crate) fn last_error(clear: bool) -> Status {
    let status = LAST_ERROR.get();
    if clear {
        LAST_ERROR.set(Status::SUCCESS);
    }
    status
}

/// Stores a result where the caller wants it; null is an invalid value.
///
/// # Safety
/// `to` is null or valid for a write.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Call {
    if to.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: promised by the caller: `to` is null or valid for a write.
    unsafe { to.write(value) };
    Ok(())
}

/// A wait: everything has run already, so only a fault can come of it.
pub(crate) fn wait() -> Call {
    match state().pending.take() {
        Some(status) => Err(status),
        None => Ok(()),
    }
}

/// Runs a node now, or adds it to the graph that the stream captures.
pub(crate) fn submit(stream: usize, node: Node) -> Call {
    {
        let mut state = state();
        if let Some(graph) = &mut state.stream(stream)?.capture {
            graph.nodes.push(node);
            return Ok(());
        }
    }
    execute(&node)
}

/// Runs a node. Kernel faults are kept for the next wait.
pub(crate) fn execute(node: &Node) -> Call {
    match node.run() {
        Ok(()) => Ok(()),
        Err(Failure::Status(status)) => Err(status),
        Err(Failure::Launch(LaunchError::Refused(text))) => {
            eprintln!("emulator: {text}");
            state().last_fault = text;
            Err(Status::INVALID_CONFIGURATION)
        }
        Err(Failure::Launch(LaunchError::Fault(fault))) => {
            let text = fault.to_string();
            eprintln!("emulator: {text}");
            let mut state = state();
            state.pending = Some(Status::of_fault(fault.kind));
            state.last_fault = text;
            Ok(())
        }
    }
}

/// Reason why a node did not run to its end.
pub(crate) enum Failure {
    Status(Status),
    Launch(LaunchError),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

/// Copies the description of the last fault, ended by a zero, into `text`; gives its length without the zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmhaEmulatorLastFault(text: *mut c_char, bytes: usize) -> usize {
    let state = state();
    let fault = state.last_fault.as_bytes();
    if !text.is_null() && bytes > 0 {
        let count = fault.len().min(bytes - 1);
        // SAFETY: the caller gives room for `bytes` bytes; `count` and the zero fit.
        unsafe {
            text.copy_from_nonoverlapping(fault.as_ptr().cast(), count);
            text.add(count).write(0);
        }
    }
    fault.len()
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGetLastError() -> Status {
    last_error(true)
}

#[unsafe(no_mangle)]
pub extern "C" fn hipPeekAtLastError() -> Status {
    last_error(false)
}

#[unsafe(no_mangle)]
pub extern "C" fn hipDeviceSynchronize() -> Status {
    report(current().and_then(|_| wait()))
}
