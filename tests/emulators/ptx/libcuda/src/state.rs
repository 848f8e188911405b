//! The devices of the process, and everything that has a handle.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_char, c_int};
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use fmha_emu_ptx::{Asynchrony, Device, Fault, Kernel, LaunchConfig, Module, Options, Recording};

use crate::context::current_device;
use crate::graph::Node;
use crate::observe::Observer;

/// Handles are small numbers, never addresses: a wrong one is found, not followed.
pub(crate) type Handle = usize;

/// Properties of a device of this architecture.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Architecture {
    pub(crate) major: i32,
    pub(crate) minor: i32,
    pub(crate) num_sms: i32,
    /// Most shared memory that a block may opt in to.
    pub(crate) shared_optin: i32,
    pub(crate) l2_bytes: i32,
    pub(crate) name: &'static str,
}

const ARCHITECTURES: &[(&str, Architecture)] = &[
    (
        "80",
        Architecture {
            major: 8,
            minor: 0,
            num_sms: 108,
            shared_optin: 166_912,
            l2_bytes: 41_943_040,
            name: "A100",
        },
    ),
    (
        "86",
        Architecture {
            major: 8,
            minor: 6,
            num_sms: 82,
            shared_optin: 101_376,
            l2_bytes: 6_291_456,
            name: "RTX 3090",
        },
    ),
    (
        "89",
        Architecture {
            major: 8,
            minor: 9,
            num_sms: 128,
            shared_optin: 101_376,
            l2_bytes: 75_497_472,
            name: "RTX 4090",
        },
    ),
    (
        "90",
        Architecture {
            major: 9,
            minor: 0,
            num_sms: 132,
            shared_optin: 232_448,
            l2_bytes: 52_428_800,
            name: "H200",
        },
    ),
    (
        "100",
        Architecture {
            major: 10,
            minor: 0,
            num_sms: 148,
            shared_optin: 232_448,
            l2_bytes: 132_644_864,
            name: "B200",
        },
    ),
    (
        "103",
        Architecture {
            major: 10,
            minor: 3,
            num_sms: 148,
            shared_optin: 232_448,
            l2_bytes: 132_644_864,
            name: "B300",
        },
    ),
    (
        "110",
        Architecture {
            major: 11,
            minor: 0,
            num_sms: 20,
            shared_optin: 232_448,
            l2_bytes: 33_554_432,
            name: "Thor",
        },
    ),
    (
        "120",
        Architecture {
            major: 12,
            minor: 0,
            num_sms: 188,
            shared_optin: 101_376,
            l2_bytes: 100_663_296,
            name: "RTX",
        },
    ),
];

/// A function handle's kernel and its attributes.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) kernel: Kernel,
    pub(crate) max_dynamic_shared: i32,
    pub(crate) non_portable_cluster: bool,
}

/// A stream: whether it is capturing, and what it has captured.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub(crate) capture: Option<Vec<Node>>,
    pub(crate) priority: i32,
    /// Does not wait for the default stream, nor that for it.
    pub(crate) non_blocking: bool,
}

/// State of a device.
pub(crate) struct State {
    pub(crate) device: Device,
    pub(crate) arch: Architecture,
    /// `a` and `f` targets run only on their own architecture.
    pub(crate) arch_name: String,
    pub(crate) options: Options,
    pub(crate) modules: BTreeMap<Handle, Module>,
    pub(crate) observer: Observer,
    pub(crate) functions: BTreeMap<Handle, Function>,
    pub(crate) function_names: HashMap<(Handle, String), Handle>,
    pub(crate) streams: BTreeMap<Handle, Stream>,
    pub(crate) events: BTreeMap<Handle, Option<Instant>>,
    pub(crate) graphs: BTreeMap<Handle, Vec<Node>>,
    pub(crate) execs: BTreeMap<Handle, Vec<Node>>,
    pub(crate) pools: BTreeMap<Handle, ()>,
    pub(crate) host: BTreeMap<usize, Box<[u128]>>,
    pub(crate) limits: HashMap<u32, usize>,
    pub(crate) sticky: Option<u32>,
    /// Copies from pageable memory that are staged, and on their way: where to, and the bytes.
    pub(crate) staged: Vec<(u64, Vec<u8>)>,
    next: Handle,
}

/// Default device, where none was chosen, or one that is not in the table.
const DEFAULT: &str = "sm_90a";

/// The architecture that [`fmha_emu_choose`] was given.
static CHOSEN: OnceLock<String> = OnceLock::new();

/// Chosen architecture: `sm_90a`, or a device each, `sm_90a,sm_90a`; all devices are equal.
fn asked() -> String {
    CHOSEN.get().cloned().or_else(|| std::env::var("FMHA_EMULATE").ok()).unwrap_or_default()
}

fn architecture(names: &str) -> Option<Architecture> {
    let (name, others) = names.split_once(',').unwrap_or((names, names));
    if others.split(',').any(|other| other != name) {
        return None;
    }
    let digits: String = name.chars().filter(char::is_ascii_digit).collect();
    ARCHITECTURES.iter().find(|(n, _)| *n == digits).map(|(_, arch)| *arch)
}

/// Chooses the devices' architecture (`sm_90a`, or of two alike `sm_90a,sm_90a`), before the driver's first call;
/// `FMHA_EMULATE` then says nothing. 0 where it is chosen; 1 where there is no such device, or another one already.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fmha_emu_choose(name: *const c_char) -> c_int {
    // SAFETY: promised by the caller: `name` is a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    if architecture(&name).is_none() {
        return 1;
    }
    c_int::from(CHOSEN.get_or_init(|| name.clone()) != &name)
}

/// States of the devices, which are equal.
static STATES: LazyLock<Vec<Mutex<State>>> = LazyLock::new(|| {
    let count = asked().split(',').count().min(MOST_DEVICES) as u32;
    (0..count).map(|ordinal| Mutex::new(State::new(ordinal))).collect()
});

/// Most devices of a process.
const MOST_DEVICES: usize = 8;

/// Number of devices.
pub(crate) fn device_count() -> usize {
    STATES.len()
}

/// The state of the device whose context the calling thread has (the first one's without any), locked for one call.
pub(crate) fn state() -> MutexGuard<'static, State> {
    state_of(current_device())
}

/// The state of device `ordinal`, of those that there are, locked for one call.
pub(crate) fn state_of(ordinal: usize) -> MutexGuard<'static, State> {
    STATES[ordinal].lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn new(ordinal: u32) -> Self {
        let mut arch = architecture(&asked()).or_else(|| architecture(DEFAULT)).unwrap_or(ARCHITECTURES[0].1);
        // Fewer multiprocessors make a persistent kernel walk several tiles of a small problem.
        let fewer = std::env::var("FMHA_EMULATE_SMS").ok().and_then(|text| text.parse().ok());
        arch.num_sms = fewer.map_or(arch.num_sms, |n: i32| n.clamp(1, arch.num_sms));
        let mut options = Options::default();
        options.num_sms = arch.num_sms as u32;
        options.check_barriers_at_exit = std::env::var_os("FMHA_EMULATE_LOOSE_ENDS").is_none();
        options.strict_tensor_memory = options.check_barriers_at_exit;
        options.cluster_order =
            std::env::var("FMHA_EMULATE_ORDER").ok().map(|seed| seed.trim().parse().unwrap_or(1));
        options.garbage =
            std::env::var("FMHA_EMULATE_GARBAGE").ok().map(|seed| seed.trim().parse().unwrap_or(1));
        let mode = std::env::var("FMHA_EMULATE_MODE").unwrap_or_default();
        if mode == "hb" {
            options.happens_before = true;
        } else if let Some(seed) = mode.strip_prefix("late") {
            options.asynchrony = Asynchrony::Late { seed: seed.trim_start_matches(':').parse().unwrap_or(1) };
        }
        Self {
            device: Device::numbered(ordinal),
            arch,
            arch_name: format!("{}{}", arch.major, arch.minor),
            options,
            modules: BTreeMap::new(),
            observer: Observer::default(),
            functions: BTreeMap::new(),
            function_names: HashMap::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            graphs: BTreeMap::new(),
            execs: BTreeMap::new(),
            pools: BTreeMap::new(),
            host: BTreeMap::new(),
            limits: HashMap::new(),
            sticky: None,
            staged: Vec::new(),
            next: 0x1000 + ((ordinal as Handle) << 32),
        }
    }

    /// A handle that no object has had.
    pub(crate) fn handle(&mut self) -> Handle {
        self.next += 0x10;
        self.next
    }

    /// Prints a fault of a kernel and keeps it for the context's later calls.
    pub(crate) fn report(&mut self, what: &str, fault: &Fault) {
        let text = format!("emulated {what}: {fault}\n");
        // A report that cannot be written is lost.
        let _ = std::io::stderr().write_all(text.as_bytes());
        if let Some(path) = std::env::var_os("FMHA_EMULATE_REPORT") {
            let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
            let _ = file.and_then(|mut f| f.write_all(text.as_bytes()));
        }
    }

    /// Writes the launch to a file of its own in the folder `FMHA_EMULATE_RECORD`, where that is set.
    pub(crate) fn record(&self, kernel: &Kernel, config: &LaunchConfig, args: &[u8]) {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let Some(folder) = std::env::var_os("FMHA_EMULATE_RECORD") else { return };
        let name = format!("{:04}-{}.launch", NUMBER.fetch_add(1, Relaxed), kernel.name());
        let bytes = Recording::new(&self.device, kernel, config, args).to_bytes();
        if let Err(error) = std::fs::write(std::path::Path::new(&folder).join(&name), bytes) {
            eprintln!("emulated driver: {name} is not recorded: {error}");
        }
    }

    /// Whether what is put on `stream` comes after the default stream's work.
    pub(crate) fn follows_default(&self, stream: Handle) -> bool {
        !self.streams.get(&stream).is_some_and(|stream| stream.non_blocking)
    }

    /// Completes the copies that are on their way.
    pub(crate) fn land_copies(&mut self) {
        for (to, bytes) in std::mem::take(&mut self.staged) {
            // The range was looked up when the copy was staged; memory freed since takes no copy.
            let _ = self.device.upload(to, &bytes);
        }
    }

    /// The stream's capture list, when it is capturing.
    pub(crate) fn capturing(&mut self, stream: Handle) -> Option<&mut Vec<Node>> {
        self.streams.get_mut(&stream).and_then(|s| s.capture.as_mut())
    }
}
