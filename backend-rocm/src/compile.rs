//! Compilation of an entry's text to a code object, by an installed clang or by hipRTC.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::Command;

use fmha_core::cache::{self, CompilerOutput, KernelJob, dump_source};
use fmha_core::env::HIP_CLANG;
use fmha_core::source::KernelSource;
use fmha_core::{Error, Result};
use fmha_kernels_hip::Arch;
use tempfile::TempDir;

use crate::driver::{owned, search, sys::Handle, sys::Hiprtc};
use crate::resources::Resources;

/// Kinds of compiler.
pub(crate) enum Compiler {
    /// A clang that has the AMDGPU target. It needs neither ROCm's headers nor its device library.
    Clang { path: PathBuf, version: String },
    /// ROCm's compiler as a library.
    Hiprtc(Box<Hiprtc>),
}

/// Names tried if `FMHA_HIP_CLANG` is not set; ROCm's own clang is under `llvm/bin`.
const CLANGS: [&str; 4] = ["clang-22", "clang", "/opt/rocm/llvm/bin/clang", "clang-21"];

/// Flags in addition to the architecture. Without `-fuse-cuid=none` equal source text gives different code objects.
const CLANG_FLAGS: [&str; 8] = [
    "-x",
    "hip",
    "--offload-device-only",
    "-nogpuinc",
    "-nogpulib",
    "--no-gpu-bundle-output",
    "-fuse-cuid=none",
    // Line tables add no instruction, and let a fault name its source line.
    "-gline-tables-only",
];

/// Options of the code for both compilers.
pub(crate) const COMPILE_OPTIONS: [&str; 2] = ["-O3", "-std=c++20"];

/// Options of both compilers for one architecture. On gfx1100 LLVM uses 16-bit register halves ("true16"); no
/// kernel here gains by that and the emulator cannot decode it, so it is switched off.
pub(crate) const fn options_of(arch: Arch) -> &'static [&'static str] {
    match arch {
        Arch::Gfx1100 => &["-Xclang", "-target-feature", "-Xclang", "-real-true16"],
        _ => &[],
    }
}

impl Compiler {
    /// The compiler of `FMHA_HIP_CLANG`, or a clang that runs and has the AMDGPU target, or hipRTC, in this order.
    ///
    /// # Errors
    /// Every compiler that was tried.
    pub(crate) fn find() -> Result<Self> {
        if let Some(named) = HIP_CLANG.get()? {
            return clang(Path::new(&named)).ok_or_else(|| {
                Error::NoDevice(format!(
                    "{} is {named}, which does not run or lists no target amdgcn",
                    HIP_CLANG.name
                ))
            });
        }
        if let Some(found) = CLANGS.iter().map(Path::new).find_map(clang) {
            return Ok(found);
        }
        search::hiprtc().map(|hiprtc| Compiler::Hiprtc(Box::new(hiprtc))).map_err(|error| {
            Error::NoDevice(format!(
                "no compiler for AMD kernels: no clang with target amdgcn among {}; {error}",
                CLANGS.join(", ")
            ))
        })
    }

    fn run(&self, job: &KernelJob) -> Result<Vec<u8>> {
        match self {
            Compiler::Clang { path, .. } => with_clang(path, job),
            Compiler::Hiprtc(hiprtc) => with_hiprtc(hiprtc, job),
        }
    }
}

impl cache::Compiler for Compiler {
    /// The identity of a clang contains its path, because a script may stand in for it.
    fn identity(&self) -> String {
        match self {
            Compiler::Clang { path, version } => format!("{version} ({})", path.display()),
            Compiler::Hiprtc(hiprtc) => {
                let (mut major, mut minor) = (0, 0);
                // SAFETY: both are places for an int.
                let status =
                    hiprtc.hiprtcVersion.map(|version| unsafe { version(&raw mut major, &raw mut minor) });
                if status == Some(0) {
                    format!("hipRTC {major}.{minor}")
                } else {
                    "hipRTC without a version".to_owned()
                }
            }
        }
    }

    fn own_flags(&self) -> &[&str] {
        match self {
            Compiler::Clang { .. } => &CLANG_FLAGS,
            Compiler::Hiprtc(_) => &[],
        }
    }

    fn compile(&self, job: &KernelJob) -> Result<CompilerOutput> {
        let machine = self.run(job)?;
        let resources = Resources::of(&machine).map(Resources::usage).unwrap_or_default();
        Ok(CompilerOutput { machine, resources, ..CompilerOutput::default() })
    }
}

fn failed(job: &KernelJob, log: String) -> Error {
    Error::Compile { kernel: job.kernel.to_owned(), dumped: dump_source(job, &log), log }
}

/// The clang of that name, if it runs and has the AMDGPU target.
fn clang(path: &Path) -> Option<Compiler> {
    let says = |flag: &str| {
        let output = Command::new(path).arg(flag).output().ok().filter(|output| output.status.success())?;
        String::from_utf8(output.stdout).ok()
    };
    let knows_amdgpu = says("--print-targets")?.contains("amdgcn");
    let version = says("--version")?.lines().next()?.to_owned();
    knows_amdgpu.then(|| Compiler::Clang { path: path.to_owned(), version })
}

/// A new folder that only this user can read, removed when dropped, with the source and its headers as files.
fn lay_out(source: &KernelSource) -> Result<TempDir> {
    let failed = |what: &Path, error: std::io::Error| Error::System {
        what: what.display().to_string(),
        text: error.to_string(),
    };
    let folder = tempfile::Builder::new()
        .prefix("fmha-hip-")
        .tempdir()
        .map_err(|error| failed(&std::env::temp_dir(), error))?;
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        let parent = path.parent().unwrap_or(folder.path());
        std::fs::create_dir_all(parent)
            .and_then(|()| std::fs::write(&path, text))
            .map_err(|error| failed(&path, error))
    };
    write("entry.hip", &source.entry)?;
    for header in source.headers() {
        write(&header.name, &header.text)?;
    }
    Ok(folder)
}

fn with_clang(clang: &Path, job: &KernelJob) -> Result<Vec<u8>> {
    let folder = lay_out(&job.source)?;
    let output = Command::new(clang)
        .args(CLANG_FLAGS)
        .args(&job.flags)
        .arg(format!("--offload-arch={}", job.arch))
        .arg("-I.")
        .args(["entry.hip", "-o", "kernel.co"])
        .current_dir(folder.path())
        .output()
        .map_err(|error| Error::System { what: clang.display().to_string(), text: error.to_string() });
    let output = output?;
    if !output.status.success() {
        return Err(failed(job, String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    let object = folder.path().join("kernel.co");
    std::fs::read(&object)
        .map_err(|error| Error::System { what: object.display().to_string(), text: error.to_string() })
}

fn with_hiprtc(rtc: &Hiprtc, job: &KernelJob) -> Result<Vec<u8>> {
    let (kernel, source) = (job.kernel, &job.source);
    let text = |text: &str| {
        CString::new(text)
            .map_err(|_| Error::System { what: kernel.to_owned(), text: "its source has a NUL".to_owned() })
    };
    let check = |call: &'static str, status: i32| {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: hipRTC has a static C string for every code.
        let text = unsafe { owned((rtc.hiprtcGetErrorString)(status)) };
        Err(Error::Driver { call, code: status, text })
    };
    let entry = text(&source.entry)?;
    let headers = source.headers();
    let texts = headers.iter().map(|h| text(&h.text)).collect::<Result<Vec<_>>>()?;
    let names = headers.iter().map(|h| text(&h.name)).collect::<Result<Vec<_>>>()?;
    let arch = format!("--offload-arch={}", job.arch);
    let options =
        [&arch].into_iter().chain(&job.flags).map(|option| text(option)).collect::<Result<Vec<_>>>()?;
    let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
    let (texts, names, options) = (pointers(&texts), pointers(&names), pointers(&options));

    let mut program = Program { rtc, handle: std::ptr::null_mut() };
    // SAFETY: all strings end in NUL and outlive the call, which copies them; both arrays have
    // as many entries as the count says.
    let status = unsafe {
        (rtc.hiprtcCreateProgram)(
            &raw mut program.handle,
            entry.as_ptr(),
            c"entry.hip".as_ptr(),
            texts.len() as i32,
            texts.as_ptr(),
            names.as_ptr(),
        )
    };
    check("hiprtcCreateProgram", status)?;
    // SAFETY: the program was created; the options end in NUL.
    let compiled =
        unsafe { (rtc.hiprtcCompileProgram)(program.handle, options.len() as i32, options.as_ptr()) };
    if compiled != 0 {
        let mut bytes = 0;
        // SAFETY: the program was created.
        check("hiprtcGetProgramLogSize", unsafe {
            (rtc.hiprtcGetProgramLogSize)(program.handle, &raw mut bytes)
        })?;
        let mut log = vec![0u8; bytes];
        // SAFETY: the buffer has the size that hipRTC gave.
        check("hiprtcGetProgramLog", unsafe {
            (rtc.hiprtcGetProgramLog)(program.handle, log.as_mut_ptr().cast())
        })?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        return Err(failed(job, log));
    }
    let mut bytes = 0;
    // SAFETY: the program was compiled.
    check("hiprtcGetCodeSize", unsafe { (rtc.hiprtcGetCodeSize)(program.handle, &raw mut bytes) })?;
    let mut code = vec![0u8; bytes];
    // SAFETY: the buffer has the size that hipRTC gave.
    check("hiprtcGetCode", unsafe { (rtc.hiprtcGetCode)(program.handle, code.as_mut_ptr().cast()) })?;
    Ok(code)
}

struct Program<'a> {
    rtc: &'a Hiprtc,
    handle: Handle,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: created once, destroyed once.
            unsafe { (self.rtc.hiprtcDestroyProgram)(&raw mut self.handle) };
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
