//! Running a program: on a device through its driver, or on the emulator.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use fmha_emu_ptx::{Device, LaunchConfig, Options};
use libloading::Library;

use crate::program::Program;

/// Device that runs programs.
pub trait Runner {
    /// Runs a program; gives all threads' `%o0`, then all threads' `%o1`, ...
    ///
    /// # Errors
    /// What the driver or the emulator said.
    fn run(&self, program: &Program) -> Result<Vec<u32>, String>;
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The emulator.
#[derive(Clone, Copy, Debug, Default)]
pub struct Emulated;

impl Runner for Emulated {
    fn run(&self, program: &Program) -> Result<Vec<u32>, String> {
        let emulate = || {
            let device = Device::new();
            let input = bytes(&program.input());
            let count = program.outputs as u64 * u64::from(program.total());
            let (from, to) = (device.alloc(input.len() as u64), device.alloc(4 * count));
            device.upload(from, &input)?;
            let args: Vec<u8> = [from, to].iter().flat_map(|address| address.to_le_bytes()).collect();
            let module = device.load(&program.ptx())?;
            let config = LaunchConfig {
                grid: [program.blocks, 1, 1],
                block: [program.threads, 1, 1],
                cluster: [1; 3],
                dynamic_shared: 0,
                dependent: false,
            };
            if let Some(kernel) = module.kernel("k") {
                device.launch(kernel, &config, &args, &Options::default())?;
            }
            let mut out = vec![0; 4 * count as usize];
            device.download(to, &mut out)?;
            Ok(words(&out))
        };
        emulate().map_err(|fault: fmha_emu_ptx::Fault| fault.to_string())
    }
}

type Status = c_int;
type Handle = *mut c_void;

/// A device behind NVIDIA's driver library, its primary context current in this thread.
pub struct Driver {
    library: Library,
    /// Name of the device in the driver.
    pub device: String,
    /// Version of the driver: 13000 is CUDA 13.0.
    pub version: c_int,
}

macro_rules! call {
    ($driver:expr, $name:literal, $($ty:ty => $arg:expr),* $(,)?) => {{
        let name = $name;
        // SAFETY: the types are those of cuda.h for the function of that name.
        let function = unsafe { $driver.get::<unsafe extern "C" fn($($ty),*) -> Status>(name.as_bytes()) };
        match function {
            // SAFETY: the arguments are places and handles that live across the call.
            Ok(function) => answer(&$driver, name, unsafe { function($($arg),*) }),
            Err(error) => Err(format!("{name}: {error}")),
        }
    }};
}

fn answer(library: &Library, name: &str, status: Status) -> Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: the type is that of cuda.h; the strings are static.
    let words = unsafe {
        let known = library
            .get::<unsafe extern "C" fn(Status, *mut *const c_char) -> Status>(b"cuGetErrorName")
            .is_ok_and(|name| name(status, &raw mut text) == 0);
        if known && !text.is_null() {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        } else {
            String::new()
        }
    };
    Err(format!("{name}: {status} {words}"))
}

impl Driver {
    /// Opens the driver at `path` and its first device.
    ///
    /// # Errors
    /// What the loader or the driver said.
    pub fn open(path: &str) -> Result<Self, String> {
        // SAFETY: the driver's initialisers only set up itself.
        let library = unsafe { Library::new(path) }.map_err(|error| format!("{path}: {error}"))?;
        let (mut version, mut device, mut context, mut name) = (0, 0, std::ptr::null_mut(), [0u8; 128]);
        call!(library, "cuInit", c_uint => 0)?;
        call!(library, "cuDriverGetVersion", *mut c_int => &raw mut version)?;
        call!(library, "cuDeviceGet", *mut c_int => &raw mut device, c_int => 0)?;
        call!(library, "cuDeviceGetName", *mut c_char => name.as_mut_ptr().cast(), c_int => 127, c_int => device)?;
        call!(library, "cuDevicePrimaryCtxRetain", *mut Handle => &raw mut context, c_int => device)?;
        call!(library, "cuCtxSetCurrent", Handle => context)?;
        let device = CStr::from_bytes_until_nul(&name).map_or("?".into(), CStr::to_string_lossy).into_owned();
        Ok(Self { library, device, version })
    }

    fn alloc(&self, bytes: usize) -> Result<u64, String> {
        let mut address = 0;
        call!(self.library, "cuMemAlloc_v2", *mut u64 => &raw mut address, usize => bytes.max(4))?;
        Ok(address)
    }

    /// Loads a module; a compiler's words stand in the error.
    fn load(&self, ptx: &str) -> Result<Handle, String> {
        // CU_JIT_ERROR_LOG_BUFFER and its size.
        const LOG: [c_uint; 2] = [5, 6];
        let text = CString::new(ptx).map_err(|error| error.to_string())?;
        let mut module: Handle = std::ptr::null_mut();
        let mut log = vec![0u8; 4096];
        let mut values: [Handle; 2] = [log.as_mut_ptr().cast(), log.len() as Handle];
        let mut keys = LOG;
        call!(
            self.library, "cuModuleLoadDataEx", *mut Handle => &raw mut module,
            *const c_void => text.as_ptr().cast(), c_uint => 2,
            *mut c_uint => keys.as_mut_ptr(), *mut Handle => values.as_mut_ptr(),
        )
        .map_err(|error| {
            let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
            format!("{error}: {}", log.replace('\n', " | "))
        })?;
        Ok(module)
    }
}

impl Runner for Driver {
    fn run(&self, program: &Program) -> Result<Vec<u32>, String> {
        let library = &self.library;
        let module = self.load(&program.ptx())?;
        let mut function: Handle = std::ptr::null_mut();
        call!(library, "cuModuleGetFunction", *mut Handle => &raw mut function, Handle => module, *const c_char => c"k".as_ptr())?;
        let input = bytes(&program.input());
        let mut out = vec![0u8; 4 * program.outputs * program.total() as usize];
        let (mut from, mut to) = (self.alloc(input.len())?, self.alloc(out.len())?);
        if !input.is_empty() {
            call!(library, "cuMemcpyHtoD_v2", u64 => from, *const c_void => input.as_ptr().cast(), usize => input.len())?;
        }
        let mut args: [Handle; 2] = [(&raw mut from).cast(), (&raw mut to).cast()];
        call!(
            library, "cuLaunchKernel", Handle => function, c_uint => program.blocks, c_uint => 1, c_uint => 1,
            c_uint => program.threads, c_uint => 1, c_uint => 1, c_uint => 0, Handle => std::ptr::null_mut(),
            *mut Handle => args.as_mut_ptr(), *mut Handle => std::ptr::null_mut(),
        )?;
        call!(library, "cuCtxSynchronize",)?;
        call!(library, "cuMemcpyDtoH_v2", *mut c_void => out.as_mut_ptr().cast(), u64 => to, usize => out.len())?;
        call!(library, "cuMemFree_v2", u64 => from)?;
        call!(library, "cuMemFree_v2", u64 => to)?;
        call!(library, "cuModuleUnload", Handle => module)?;
        Ok(words(&out))
    }
}
