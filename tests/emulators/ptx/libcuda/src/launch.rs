//! Kernel launches.

use std::ffi::{c_uint, c_void};

use fmha_emu_ptx::LaunchConfig;

use crate::error::{INVALID_HANDLE, INVALID_VALUE, Result};
use crate::graph::{Node, submit};
use crate::state::{Handle, state};

/// `CUlaunchAttribute`: a number, padding to 8 bytes, 64 bytes of value.
#[repr(C)]
pub(crate) struct Attribute {
    id: c_uint,
    pad: c_uint,
    value: [c_uint; 16],
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Handle,
    attributes: *const Attribute,
    num_attributes: c_uint,
}

impl Config {
    /// Threads a block, dynamic shared memory, blocks a cluster.
    ///
    /// # Safety
    /// `attributes` holds `num_attributes` attributes.
    pub(crate) unsafe fn shape(&self, function: Handle) -> (u32, usize, u32) {
        // SAFETY: the caller promised `num_attributes` attributes at `attributes`.
        let cluster = unsafe { self.cluster(function) };
        (self.block.iter().product(), self.shared_bytes as usize, cluster.iter().product())
    }

    /// # Safety
    /// `attributes` holds `num_attributes` attributes.
    unsafe fn attributes(&self) -> &[Attribute] {
        if self.num_attributes == 0 {
            return &[];
        }
        // SAFETY: the caller promised `num_attributes` attributes at `attributes`.
        unsafe { std::slice::from_raw_parts(self.attributes, self.num_attributes as usize) }
    }

    /// The cluster that the attributes or the kernel ask for.
    ///
    /// # Safety
    /// `attributes` holds `num_attributes` attributes.
    unsafe fn cluster(&self, function: Handle) -> [u32; 3] {
        // SAFETY: the caller promised `num_attributes` attributes at `attributes`.
        let asked = unsafe { self.attributes() }.iter().rfind(|attribute| attribute.id == CLUSTER_DIMENSION);
        asked.map_or_else(
            || cluster_of(function),
            |asked| [asked.value[0], asked.value[1], asked.value[2]].map(|n| n.max(1)),
        )
    }

    /// Whether the grid may start before those before it have ended.
    ///
    /// # Safety
    /// `attributes` holds `num_attributes` attributes.
    unsafe fn is_dependent(&self) -> bool {
        // SAFETY: the caller promised `num_attributes` attributes at `attributes`.
        let asked = unsafe { self.attributes() }
            .iter()
            .rfind(|attribute| attribute.id == PROGRAMMATIC_STREAM_SERIALIZATION);
        asked.is_some_and(|asked| asked.value[0] != 0)
    }
}

const CLUSTER_DIMENSION: c_uint = 4;
const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;
const PARAM_BUFFER: usize = 1;
const PARAM_BUFFER_SIZE: usize = 2;

fn refuse(text: &str) -> Result {
    eprintln!("emulated driver: launch refused: {text}");
    INVALID_VALUE
}

/// The argument buffer from `kernelParams` (a pointer per parameter) or `extra` (one buffer).
unsafe fn arguments(
    params: &[(u32, u32)],
    each: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Option<Vec<u8>> {
    let total = params.iter().map(|(at, n)| at + n).max().unwrap_or(0) as usize;
    let mut out = vec![0u8; total];
    if !each.is_null() {
        for (i, &(at, bytes)) in params.iter().enumerate() {
            // SAFETY: the caller gives one pointer per parameter of the kernel, each to at least its bytes.
            unsafe {
                let from = each.add(i).read().cast::<u8>();
                std::ptr::copy_nonoverlapping(from, out.as_mut_ptr().add(at as usize), bytes as usize);
            }
        }
        return Some(out);
    }
    if extra.is_null() {
        return params.is_empty().then_some(out);
    }
    let (mut buffer, mut size) = (std::ptr::null::<u8>(), 0usize);
    let mut at = 0;
    loop {
        // SAFETY: `extra` is a list of pairs that a null key ends.
        let (key, value) = unsafe { (extra.add(at).read() as usize, extra.add(at + 1)) };
        match key {
            // SAFETY: a key is followed by its value.
            PARAM_BUFFER => buffer = unsafe { value.read() }.cast(),
            // SAFETY: the size is passed by address.
            PARAM_BUFFER_SIZE => size = unsafe { value.read().cast::<usize>().read() },
            _ => break,
        }
        at += 2;
    }
    if buffer.is_null() || size < total {
        return None;
    }
    // SAFETY: the caller says that `size` bytes lie at `buffer`, and `total` is not more.
    unsafe { std::ptr::copy_nonoverlapping(buffer, out.as_mut_ptr(), total) };
    Some(out)
}

unsafe fn launch(
    function: Handle,
    config: LaunchConfig,
    stream: Handle,
    each: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result {
    let node = {
        let s = state();
        let Some(f) = s.functions.get(&function) else { return INVALID_HANDLE };
        let name = f.kernel.name();
        if config.dynamic_shared as i32 > f.max_dynamic_shared {
            let most = f.max_dynamic_shared;
            return refuse(&format!(
                "`{name}`: {} bytes of dynamic shared memory, {most} allowed",
                config.dynamic_shared
            ));
        }
        let cluster: u32 = config.cluster.iter().product();
        if cluster > 8 && !f.non_portable_cluster {
            return refuse(&format!("`{name}`: a cluster of {cluster} without the non-portable attribute"));
        }
        if cluster > 1 && s.arch.major < 9 {
            return refuse(&format!("`{name}`: a cluster on sm_{}", s.arch_name));
        }
        if config.dependent && s.arch.major < 9 {
            return refuse(&format!("`{name}`: programmatic dependent launch on sm_{}", s.arch_name));
        }
        if config.grid[1] > 65535 || config.grid[2] > 65535 {
            return refuse(&format!("`{name}`: grid {:?} beyond 65535 in y or z", config.grid));
        }
        // SAFETY: the caller passes the kernel's arguments in one of the driver's two forms.
        let Some(args) = (unsafe { arguments(&f.kernel.params(), each, extra) }) else {
            return refuse(&format!("`{name}`: no arguments, or fewer bytes than its parameters"));
        };
        Node::Launch { kernel: f.kernel.clone(), config, args }
    };
    submit(stream, node)
}

fn cluster_of(function: Handle) -> [u32; 3] {
    state().functions.get(&function).and_then(|f| f.kernel.required_cluster()).unwrap_or([1; 3])
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub(crate) unsafe extern "C" fn cuLaunchKernel(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: Handle,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result {
    let config = LaunchConfig {
        grid: [grid_x, grid_y, grid_z],
        block: [block_x, block_y, block_z],
        cluster: cluster_of(function),
        dynamic_shared: shared_bytes,
        dependent: false,
    };
    // SAFETY: handed on unchanged.
    unsafe { launch(function, config, stream, params, extra) }
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub(crate) unsafe extern "C" fn cuLaunchCooperativeKernel(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: Handle,
    params: *mut *mut c_void,
) -> Result {
    let ([x, y, z], none) = ([block_x, block_y, block_z], std::ptr::null_mut());
    // SAFETY: handed on unchanged.
    unsafe { cuLaunchKernel(function, grid_x, grid_y, grid_z, x, y, z, shared_bytes, stream, params, none) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchKernelEx(
    config: *const Config,
    function: Handle,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result {
    if config.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null, and the caller promised a CUlaunchConfig.
    let c = unsafe { &*config };
    // SAFETY: the config says how many attributes it has.
    let cluster = unsafe { c.cluster(function) };
    // SAFETY: the config says how many attributes it has.
    let dependent = unsafe { c.is_dependent() };
    let config =
        LaunchConfig { grid: c.grid, block: c.block, cluster, dynamic_shared: c.shared_bytes, dependent };
    // SAFETY: handed on unchanged.
    unsafe { launch(function, config, c.stream, params, extra) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuLaunchHostFunc(
    stream: Handle,
    function: Option<extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> Result {
    match function {
        Some(function) => submit(stream, Node::Call { function, data: data as usize }),
        None => INVALID_VALUE,
    }
}
