//! A client that knows nothing of the emulator: it opens the library by name and calls HIP's functions.
#![allow(clippy::unwrap_used, reason = "a test stops where something is missing")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use libloading::{Library, Symbol};

/// The library that cargo built for this test, beside the test's own binary.
fn library(name: &str) -> &'static Library {
    static HIP: OnceLock<Library> = OnceLock::new();
    HIP.get_or_init(|| {
        // SAFETY: the only thread that reads the variable is the library's first user, which follows.
        unsafe { std::env::set_var("FMHA_EMULATE", "gfx942,gfx90a") };
        let test = std::env::current_exe().unwrap();
        let places = [test.parent().unwrap().join(name), test.parent().unwrap().parent().unwrap().join(name)];
        let path = places.iter().find(|p| p.exists()).unwrap_or(&places[0]);
        // SAFETY: the library is ours; loading it runs no code.
        unsafe { Library::new(path) }.unwrap()
    })
}

fn hip<T>(name: &str) -> Symbol<'static, T> {
    // SAFETY: each use gives the type that HIP's headers give.
    unsafe { library("libfmha_emu_amdhip64.so").get(name.as_bytes()) }.unwrap()
}

macro_rules! call {
    ($name:literal($($value:expr => $ty:ty),*)) => {{
        let function: Symbol<'_, unsafe extern "C" fn($($ty),*) -> c_int> = hip($name);
        // SAFETY: the arguments are what HIP's headers ask for.
        unsafe { function($($value),*) }
    }};
}

/// Compiles a kernel of this crate's, or says that no compiler is there.
fn compile(kernel: &str, arch: &str) -> Option<Vec<u8>> {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../kernels").join(kernel);
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{kernel}.{arch}.co"));
    let compiler = std::env::var("FMHA_CLANG").unwrap_or_else(|_| "clang-22".to_owned());
    let run = Command::new(&compiler)
        .args(["-x", "hip", "--offload-device-only", "-nogpuinc", "-nogpulib", "--no-gpu-bundle-output"])
        .args(["-fuse-cuid=none", "-O3", "-std=c++17", &format!("--offload-arch={arch}")])
        .arg(&source)
        .arg("-o")
        .arg(&out)
        .status();
    match run {
        Ok(status) => {
            assert!(status.success(), "{} does not compile", source.display());
            Some(std::fs::read(out).unwrap())
        }
        Err(_) => {
            println!("absent: {compiler} (no kernel could be compiled, nothing was run)");
            None
        }
    }
}

struct Axpy {
    function: usize,
}

impl Axpy {
    fn load(arch: &str) -> Option<Self> {
        let code = compile("axpy.hip", arch)?;
        let (mut module, mut function) = (0usize, 0usize);
        let name = CString::new("axpy").unwrap();
        assert_eq!(call!("hipModuleLoadData"(&mut module => *mut usize, code.as_ptr() => *const u8)), 0);
        let found = call!("hipModuleGetFunction"(
            &mut function => *mut usize, module => usize, name.as_ptr() => *const c_char));
        assert_eq!(found, 0);
        Some(Self { function })
    }

    fn launch(&self, a: f32, x: usize, y: usize, n: c_int, shift: c_int, stream: usize) -> c_int {
        let (mut a, mut x, mut y, mut n, mut shift) = (a, x, y, n, shift);
        let mut params: [*mut c_void; 5] = [
            (&raw mut a).cast(),
            (&raw mut x).cast(),
            (&raw mut y).cast(),
            (&raw mut n).cast(),
            (&raw mut shift).cast(),
        ];
        let groups = (n as u32).div_ceil(64);
        call!("hipModuleLaunchKernel"(
            self.function => usize, groups => u32, 1 => u32, 1 => u32, 64 => u32, 1 => u32, 1 => u32, 0 => u32,
            stream => usize, params.as_mut_ptr() => *mut *mut c_void, std::ptr::null_mut() => *mut *mut c_void))
    }
}

fn upload(values: &[f32]) -> usize {
    let mut address = 0usize;
    assert_eq!(call!("hipMalloc"(&mut address => *mut usize, values.len() * 4 => usize)), 0);
    let copied = call!("hipMemcpy"(
        address => usize, values.as_ptr() => *const f32, values.len() * 4 => usize, 1 => c_int));
    assert_eq!(copied, 0);
    address
}

fn download(address: usize, n: usize) -> Vec<f32> {
    let mut out = vec![0f32; n];
    let copied =
        call!("hipMemcpy"(out.as_mut_ptr() => *mut f32, address => usize, n * 4 => usize, 2 => c_int));
    assert_eq!(copied, 0);
    out
}

/// One test, for the library is one device for the whole process.
#[test]
fn a_hip_client_runs_unchanged_on_the_double() {
    assert_eq!(call!("hipInit"(0 => u32)), 0);
    let mut count = 0;
    assert_eq!(call!("hipGetDeviceCount"(&mut count => *mut c_int)), 0);
    assert_eq!(count, 2);
    let mut properties = Box::new([0u8; 1472]);
    let got = call!("hipGetDevicePropertiesR0600"(properties.as_mut_ptr() => *mut u8, 0 => c_int));
    assert_eq!(got, 0);
    let arch = CStr::from_bytes_until_nul(&properties[1160..]).unwrap();
    assert_eq!(arch.to_str().unwrap(), "gfx942:sramecc+:xnack-");
    assert_eq!(call!("hipSetDevice"(2 => c_int)), 101);

    let Some(axpy) = Axpy::load("gfx942") else { return };
    let x: Vec<f32> = (0..200).map(|i| i as f32).collect();
    let (dx, dy) = (upload(&x), upload(&[1.0; 200]));
    assert_eq!(dx as u64 >> 47 & 1, 1, "a device address that no host pointer has");
    assert_eq!(axpy.launch(2.0, dx, dy, 200, 0, 0), 0);
    assert_eq!(call!("hipDeviceSynchronize"()), 0);
    let want: Vec<f32> = x.iter().map(|x| 1.0 + 2.0 * x).collect();
    assert_eq!(download(dy, 200), want);

    // A captured graph runs each time it is launched, and not before.
    let (mut stream, mut graph, mut executable) = (0usize, 0usize, 0usize);
    assert_eq!(call!("hipStreamCreate"(&mut stream => *mut usize)), 0);
    assert_eq!(call!("hipStreamBeginCapture"(stream => usize, 0 => c_int)), 0);
    assert_eq!(axpy.launch(1.0, dx, dy, 200, 0, stream), 0);
    assert_eq!(call!("hipStreamEndCapture"(stream => usize, &mut graph => *mut usize)), 0);
    assert_eq!(download(dy, 200), want);
    let null = std::ptr::null_mut::<c_void>();
    let made = call!("hipGraphInstantiate"(
        &mut executable => *mut usize, graph => usize, null => *mut c_void, null => *mut c_void, 0 => usize));
    assert_eq!(made, 0);
    for _ in 0..2 {
        assert_eq!(call!("hipGraphLaunch"(executable => usize, stream => usize)), 0);
    }
    let want: Vec<f32> = x.iter().map(|x| 1.0 + 4.0 * x).collect();
    assert_eq!(download(dy, 200), want);

    // A read behind the allocation is reported by the next wait, once, with its place.
    assert_eq!(axpy.launch(1.0, dx, dy, 200, 8, 0), 0);
    assert_eq!(call!("hipDeviceSynchronize"()), 700);
    assert_eq!(call!("hipDeviceSynchronize"()), 0);
    let mut text = [0u8; 1000];
    let last: Symbol<'_, unsafe extern "C" fn(*mut u8, usize) -> usize> = hip("fmhaEmulatorLastFault");
    // SAFETY: the room is as long as said.
    unsafe { last(text.as_mut_ptr(), text.len()) };
    let text = CStr::from_bytes_until_nul(&text).unwrap().to_str().unwrap();
    assert!(text.contains("OutOfBounds") && text.contains("axpy") && text.contains("lane 0"), "{text}");

    // Another architecture's code object is refused, as a driver does.
    let code = compile("axpy.hip", "gfx950").unwrap();
    let mut module = 0usize;
    assert_eq!(call!("hipModuleLoadData"(&mut module => *mut usize, code.as_ptr() => *const u8)), 209);
    let name: Symbol<'_, unsafe extern "C" fn(c_int) -> *const c_char> = hip("hipGetErrorName");
    // SAFETY: the names are constants.
    assert_eq!(unsafe { CStr::from_ptr(name(209)) }.to_str().unwrap(), "hipErrorNoBinaryForGpu");
}

#[test]
fn the_properties_lie_where_the_bindings_of_others_have_them() {
    use cubecl_hip_sys::hipDeviceProp_tR0600 as P;
    use std::mem::offset_of;
    assert_eq!(size_of::<P>(), 1472);
    let offsets = [
        (offset_of!(P, totalGlobalMem), 288),
        (offset_of!(P, sharedMemPerBlock), 296),
        (offset_of!(P, regsPerBlock), 304),
        (offset_of!(P, warpSize), 308),
        (offset_of!(P, maxThreadsPerBlock), 320),
        (offset_of!(P, maxThreadsDim), 324),
        (offset_of!(P, maxGridSize), 336),
        (offset_of!(P, clockRate), 348),
        (offset_of!(P, major), 360),
        (offset_of!(P, minor), 364),
        (offset_of!(P, multiProcessorCount), 388),
        (offset_of!(P, memoryBusWidth), 612),
        (offset_of!(P, l2CacheSize), 616),
        (offset_of!(P, maxThreadsPerMultiProcessor), 624),
        (offset_of!(P, sharedMemPerMultiprocessor), 640),
        (offset_of!(P, gcnArchName), 1160),
    ];
    for (theirs, ours) in offsets {
        assert_eq!(theirs, ours);
    }
    // The bytes that the double gives read as those fields.
    let mut bytes = Box::new([0u8; 1472]);
    assert_eq!(call!("hipGetDevicePropertiesR0600"(bytes.as_mut_ptr() => *mut u8, 1 => c_int)), 0);
    let word = |at: usize| i32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(word(offset_of!(P, warpSize)), 64);
    assert_eq!(word(offset_of!(P, multiProcessorCount)), 110);
    assert_eq!(word(offset_of!(P, sharedMemPerBlock)), 65536);
}
