//! Work as data: a node runs at once, or is captured into a graph and replayed.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use std::time::{Duration, Instant};

use fmha_emu_ptx::{Asynchrony, Kernel, LaunchConfig};

use crate::error::{INVALID_HANDLE, INVALID_VALUE, LAUNCH_FAILED, Result, SUCCESS, put};
use crate::state::{Handle, state};

/// One piece of work on a stream. Host addresses are numbers: the caller promised they stay valid.
#[derive(Clone, Debug)]
pub(crate) enum Node {
    HostToDevice {
        to: u64,
        from: usize,
        bytes: usize,
    },
    DeviceToHost {
        to: usize,
        from: u64,
        bytes: usize,
    },
    DeviceToDevice {
        to: u64,
        from: u64,
        bytes: usize,
    },
    Fill {
        to: u64,
        pattern: u32,
        width: usize,
        count: usize,
    },
    Launch {
        kernel: Kernel,
        config: LaunchConfig,
        args: Vec<u8>,
    },
    /// A word of 32 bits gets a value, or is waited for until it has it.
    Write {
        at: u64,
        value: u32,
    },
    Await {
        at: u64,
        value: u32,
    },
    Call {
        function: extern "C" fn(*mut c_void),
        data: usize,
    },
}

impl Node {
    /// Carries the work out.
    pub(crate) fn run(&self) -> Result {
        if let Self::Call { function, data } = *self {
            function(data as *mut c_void);
            return SUCCESS;
        }
        if let Self::Await { at, value } = *self {
            return wait_for(at, value);
        }
        let mut state = state();
        if let Some(code) = state.sticky {
            return code;
        }
        let device = &state.device;
        let result = match self {
            Self::Write { at, value } => device.upload(*at, &value.to_le_bytes()),
            Self::HostToDevice { to, from, bytes } => {
                // SAFETY: the caller of the copy gave `bytes` readable bytes at `from`, valid until it is done.
                let data = unsafe { std::slice::from_raw_parts(*from as *const u8, *bytes) };
                device.upload(*to, data)
            }
            Self::DeviceToHost { to, from, bytes } => {
                // SAFETY: the caller of the copy gave `bytes` writable bytes at `to`, valid until it is done.
                let data = unsafe { std::slice::from_raw_parts_mut(*to as *mut u8, *bytes) };
                device.download_poisoned(*from, data)
            }
            Self::DeviceToDevice { to, from, bytes } => {
                let mut data = vec![0; *bytes];
                device.download_poisoned(*from, &mut data).and_then(|()| device.upload(*to, &data))
            }
            Self::Fill { to, pattern, width, count } => {
                let cell = &pattern.to_le_bytes()[..*width];
                device.upload(*to, &cell.repeat(*count))
            }
            Self::Launch { kernel, config, args } => {
                let options = state.options.clone();
                if let Some(seed) = &mut state.options.cluster_order {
                    *seed = seed.wrapping_add(1);
                }
                if let Asynchrony::Late { seed } = &mut state.options.asynchrony {
                    *seed = seed.wrapping_add(1);
                }
                state.record(kernel, config, args);
                // A panic must not cross the C interface; it is a fault of the emulator, and said so.
                let run = || state.device.launch(kernel, config, args, &options);
                let Ok(result) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) else {
                    eprintln!("emulated driver: the emulator itself failed in `{}`", kernel.name());
                    state.sticky = Some(LAUNCH_FAILED);
                    return LAUNCH_FAILED;
                };
                let report = match result {
                    Ok(report) => report,
                    Err(fault) => {
                        state.report(&format!("kernel `{}`", kernel.name()), &fault);
                        state.sticky = Some(LAUNCH_FAILED);
                        return LAUNCH_FAILED;
                    }
                };
                let units = state.options.num_sms.into();
                state.observer.note(kernel, config, &report, units);
                return SUCCESS;
            }
            Self::Call { .. } | Self::Await { .. } => Ok(()),
        };
        match result {
            Ok(()) => SUCCESS,
            Err(fault) => {
                state.report("copy", &fault);
                INVALID_VALUE
            }
        }
    }
}

/// Waits for another thread's write, with the device free for it; a device would wait for ever.
fn wait_for(at: u64, value: u32) -> Result {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(30) {
        let mut word = [0; 4];
        if let Err(fault) = state().device.download(at, &mut word) {
            state().report("wait", &fault);
            return INVALID_VALUE;
        }
        if u32::from_le_bytes(word) == value {
            return SUCCESS;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    eprintln!("emulated driver: word {at:#x} was not {value} within 30 s");
    LAUNCH_FAILED
}

/// Runs `node`, or captures it when `stream` is capturing.
pub(crate) fn submit(stream: Handle, node: Node) -> Result {
    {
        let mut state = state();
        if let Some(list) = state.capturing(stream) {
            list.push(node);
            return SUCCESS;
        }
        if state.follows_default(stream) {
            state.land_copies();
        }
    }
    node.run()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphCreate(out: *mut Handle, _flags: c_uint) -> Result {
    let mut s = state();
    let handle = s.handle();
    s.graphs.insert(handle, Vec::new());
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, handle) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphInstantiateWithFlags(
    out: *mut Handle,
    graph: Handle,
    _flags: c_ulonglong,
) -> Result {
    let mut s = state();
    let Some(nodes) = s.graphs.get(&graph).cloned() else { return INVALID_HANDLE };
    let handle = s.handle();
    s.execs.insert(handle, nodes);
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, handle) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphInstantiate_v2(
    out: *mut Handle,
    graph: Handle,
    _node: *mut Handle,
    _log: *mut c_char,
    _len: usize,
) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { cuGraphInstantiateWithFlags(out, graph, 0) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGraphUpload(exec: Handle, _stream: Handle) -> Result {
    if state().execs.contains_key(&exec) { SUCCESS } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGraphLaunch(exec: Handle, stream: Handle) -> Result {
    let nodes = {
        let mut state = state();
        if state.follows_default(stream) {
            state.land_copies();
        }
        let Some(nodes) = state.execs.get(&exec).cloned() else { return INVALID_HANDLE };
        nodes
    };
    nodes.iter().map(Node::run).find(|&code| code != SUCCESS).unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGraphDestroy(graph: Handle) -> Result {
    if state().graphs.remove(&graph).is_some() { SUCCESS } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGraphExecDestroy(exec: Handle) -> Result {
    if state().execs.remove(&exec).is_some() { SUCCESS } else { INVALID_HANDLE }
}

/// Replaces what an instantiated graph replays. The real driver refuses a changed topology; the count stands for it.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphExecUpdate_v2(
    exec: Handle,
    graph: Handle,
    info: *mut c_int,
) -> Result {
    let mut s = state();
    let Some(nodes) = s.graphs.get(&graph).cloned() else { return INVALID_HANDLE };
    let Some(old) = s.execs.get_mut(&exec) else { return INVALID_HANDLE };
    let fits = old.len() == nodes.len();
    if fits {
        *old = nodes;
    }
    if !info.is_null() {
        // SAFETY: not null; the first field of CUgraphExecUpdateResultInfo is its result code.
        unsafe { info.write(if fits { 0 } else { 1 }) };
    }
    if fits { SUCCESS } else { 910 }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphGetNodes(
    graph: Handle,
    nodes: *mut Handle,
    count: *mut usize,
) -> Result {
    let s = state();
    let Some(list) = s.graphs.get(&graph) else { return INVALID_HANDLE };
    if !nodes.is_null() {
        // SAFETY: the caller says in `count` how many handles fit at `nodes`.
        let room = unsafe { count.read() };
        for i in 0..room.min(list.len()) {
            // SAFETY: `i` is below that count.
            unsafe { nodes.add(i).write(graph + i + 1) };
        }
    }
    // SAFETY: an output parameter of the driver API.
    unsafe { put(count, list.len()) }
}
