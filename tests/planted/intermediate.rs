//! Output of a compiler for a kernel before optimisation: NVRTC's input to link-time optimisation, or clang's LLVM
//! bitcode.

use std::ffi::{CString, c_char, c_int, c_void};

use fmha_core::cache::{ImageKind, KernelJob, Precompile};
use libloading::Library;

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Get = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// Compiles to intermediate code; `None` where there is no such compiler or it refuses the text.
pub(crate) fn intermediate(compiler: &dyn Precompile, job: &KernelJob) -> Option<Vec<u8>> {
    if job.arch.starts_with("gfx") { bitcode(compiler, job) } else { link_time_input(job) }
}

/// Options that make clang leave a code object at LLVM's bitcode, without line tables.
const TO_BITCODE: [&str; 5] = ["-g0", "-emit-llvm", "-c", "-Xclang", "-disable-llvm-passes"];

fn bitcode(compiler: &dyn Precompile, job: &KernelJob) -> Option<Vec<u8>> {
    let mut job = job.clone();
    job.flags.extend(TO_BITCODE.map(str::to_owned));
    compiler.precompile(&job).ok()?.image(ImageKind::Machine).map(<[u8]>::to_vec)
}

fn link_time_input(job: &KernelJob) -> Option<Vec<u8>> {
    // The backend has opened NVRTC with the libraries that it needs, so this path is the same library.
    let path = &fmha_cuda::nvrtc::nvrtc().ok()?.path;
    let text = |text: &str| CString::new(text).ok();
    let headers = job.source.headers();
    let names = headers.iter().map(|h| text(&h.name)).collect::<Option<Vec<_>>>()?;
    let texts = headers.iter().map(|h| text(&h.text)).collect::<Option<Vec<_>>>()?;
    let mut options = job.flags.iter().map(|o| text(o)).collect::<Option<Vec<_>>>()?;
    options.push(text(&format!("--gpu-architecture={}", job.arch.replacen("sm_", "compute_", 1)))?);
    options.push(text("-dlto")?);
    let entry = text(&job.source.entry)?;
    let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
    let (names, texts, options) = (pointers(&names), pointers(&texts), pointers(&options));
    // SAFETY: the signatures are those of nvrtc.h; every pointer outlives its call; the buffer has the size that NVRTC
    // reports.
    unsafe {
        let nvrtc = Library::new(path).ok()?;
        let create = nvrtc.get::<Create>(b"nvrtcCreateProgram").ok()?;
        let compile = nvrtc.get::<Compile>(b"nvrtcCompileProgram").ok()?;
        let destroy = nvrtc.get::<Destroy>(b"nvrtcDestroyProgram").ok()?;
        let size_of = nvrtc.get::<Size>(b"nvrtcGetLTOIRSize").ok()?;
        let get = nvrtc.get::<Get>(b"nvrtcGetLTOIR").ok()?;
        let mut program: Program = std::ptr::null_mut();
        let count = c_int::try_from(names.len()).ok()?;
        let (entry, name) = (entry.as_ptr(), c"entry.cu".as_ptr());
        if create(&raw mut program, entry, name, count, texts.as_ptr(), names.as_ptr()) != 0 {
            return None;
        }
        let mut code = Vec::new();
        let mut size = 0;
        let num_options = c_int::try_from(options.len()).ok()?;
        if compile(program, num_options, options.as_ptr()) == 0 && size_of(program, &raw mut size) == 0 {
            code.resize(size, 0u8);
            if get(program, code.as_mut_ptr().cast()) != 0 {
                code.clear();
            }
        }
        destroy(&raw mut program);
        (!code.is_empty()).then_some(code)
    }
}
