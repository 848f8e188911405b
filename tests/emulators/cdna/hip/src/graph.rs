//! Work that can run now or be captured, and graphs of it.

use fmha_emu_cdna::{Launch, Recording};
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::observe;
use crate::runtime::{Failure, Loaded, execute, put, state};
use crate::status::{Call, Status, report};

/// A captured sequence; the nodes run one after the other.
#[derive(Clone, Default)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
}

/// One piece of work.
#[derive(Clone)]
pub(crate) enum Node {
    Kernel {
        on: Arc<Loaded>,
        name: String,
        grid: [u32; 3],
        block: [u32; 3],
        dynamic_lds: u32,
        args: Vec<u8>,
    },
    Copy {
        to: usize,
        from: usize,
        bytes: usize,
    },
    /// `count` times the low `width` bytes of `value`.
    Fill {
        to: u64,
        value: u32,
        width: usize,
        count: usize,
    },
}

impl Node {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match self {
            Self::Kernel { on, name, grid, block, dynamic_lds, args } => {
                let launch = Launch { grid: *grid, block: *block, dynamic_lds: *dynamic_lds, args };
                let recording = || Recording::new(&on.device, &on.module, name, &launch);
                record(recording);
                // Taken before the launch writes, and only where a caller wants counters.
                let again = observe::is_asked().then(recording);
                on.device.launch(&on.module, name, &launch).map_err(Failure::Launch)?;
                if let Some(again) = again {
                    observe::note(&again, &launch, crate::device::units(on.device.arch));
                }
                Ok(())
            }
            // SAFETY: the code that made the node promised that the host side of the copy is valid until it
            // has run.
            Self::Copy { to, from, bytes } => Ok(unsafe { crate::memory::copy(*to, *from, *bytes) }?),
            Self::Fill { to, value, width, count } => Ok(crate::memory::fill(*to, *value, *width, *count)?),
        }
    }
}

/// Writes the launch to a file of its own in the folder `FMHA_EMULATE_RECORD`, where that is set.
fn record(launch: impl FnOnce() -> Recording) {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let Some(folder) = std::env::var_os(Recording::FOLDER_VARIABLE) else { return };
    let launch = launch();
    let name = format!("{:04}-{}.launch", NUMBER.fetch_add(1, Relaxed), launch.kernel);
    if let Err(error) = std::fs::write(std::path::Path::new(&folder).join(&name), launch.to_bytes()) {
        eprintln!("emulated driver: {name} is not recorded: {error}");
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamBeginCapture(stream: usize, _mode: c_int) -> Status {
    let mut state = state();
    report(state.stream(stream).and_then(|s| {
        // The default stream cannot be captured, nor a stream twice.
        if stream == 0 || s.capture.is_some() {
            return Err(Status::CAPTURE_UNSUPPORTED);
        }
        s.capture = Some(Graph::default());
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamEndCapture(stream: usize, graph: *mut usize) -> Status {
    let mut state = state();
    let captured = state.stream(stream).and_then(|s| s.capture.take().ok_or(Status::ILLEGAL_STATE));
    report(captured.and_then(|captured| {
        let handle = state.handle();
        state.graphs.insert(handle, captured);
        // SAFETY: the caller gives a place for the handle or null.
        unsafe { put(graph, handle) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamIsCapturing(stream: usize, status: *mut c_int) -> Status {
    let mut state = state();
    let capturing = state.stream(stream).map(|s| s.capture.is_some());
    // SAFETY: the caller gives a place for the status or null.
    report(capturing.and_then(|on| unsafe { put(status, c_int::from(on)) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphCreate(graph: *mut usize, _flags: c_uint) -> Status {
    let mut state = state();
    let handle = state.handle();
    state.graphs.insert(handle, Graph::default());
    // SAFETY: the caller gives a place for the handle or null.
    report(unsafe { put(graph, handle) })
}

unsafe fn instantiate(executable: *mut usize, graph: usize) -> Call {
    let mut state = state();
    let graph = state.graphs.get(&graph).cloned().ok_or(Status::INVALID_HANDLE)?;
    let handle = state.handle();
    state.executables.insert(handle, graph);
    // SAFETY: the caller gives a place for the handle or null.
    unsafe { put(executable, handle) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphInstantiate(
    executable: *mut usize,
    graph: usize,
    _error_node: *mut c_void,
    _log: *mut c_char,
    _log_bytes: usize,
) -> Status {
    // SAFETY: the caller gives a place for the handle or null.
    report(unsafe { instantiate(executable, graph) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphInstantiateWithFlags(
    executable: *mut usize,
    graph: usize,
    _flags: c_ulonglong,
) -> Status {
    // SAFETY: the caller gives a place for the handle or null.
    report(unsafe { instantiate(executable, graph) })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGraphLaunch(executable: usize, _stream: usize) -> Status {
    let graph = state().executables.get(&executable).cloned();
    report(graph.ok_or(Status::INVALID_HANDLE).and_then(|g| g.nodes.iter().try_for_each(execute)))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGraphDestroy(graph: usize) -> Status {
    report(state().graphs.remove(&graph).map(drop).ok_or(Status::INVALID_HANDLE))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGraphExecDestroy(executable: usize) -> Status {
    report(state().executables.remove(&executable).map(drop).ok_or(Status::INVALID_HANDLE))
}

/// Number of nodes; the nodes themselves are not handed out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphGetNodes(graph: usize, _nodes: *mut usize, count: *mut usize) -> Status {
    let nodes = state().graphs.get(&graph).map(|g| g.nodes.len());
    // SAFETY: the caller gives a place for the number or null.
    report(nodes.ok_or(Status::INVALID_HANDLE).and_then(|n| unsafe { put(count, n) }))
}
