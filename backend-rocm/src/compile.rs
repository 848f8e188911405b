//! From an entry's text to a code object: an installed clang, or hipRTC.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use fmha_core::cache::{self, CompilerOutput, ImageKind, KernelJob};
use fmha_core::env::HIP_CLANG;
use fmha_core::source::KernelSource;
use fmha_core::{Error, Result};

use crate::arch::Arch;
use crate::driver::{owned, search, sys::Handle, sys::Hiprtc};

/// What compiles.
pub(crate) enum Compiler {
    /// A clang that knows AMDGPU. It needs neither ROCm's headers nor its device library.
    Clang {
        path: PathBuf,
        /// The first line of its `--version`.
        version: String,
    },
    /// ROCm's compiler as a library.
    Hiprtc(Box<Hiprtc>),
}

/// Names tried when `FMHA_HIP_CLANG` says nothing; ROCm's own clang is under `llvm/bin`.
const CLANGS: [&str; 4] = ["clang-22", "clang", "/opt/rocm/llvm/bin/clang", "clang-21"];

/// Flags beside the architecture. `-fuse-cuid=none`: else equal text gives unequal bytes.
const CLANG_FLAGS: [&str; 10] = [
    "-x",
    "hip",
    "--offload-device-only",
    "-nogpuinc",
    "-nogpulib",
    "--no-gpu-bundle-output",
    "-fuse-cuid=none",
    "-O3",
    "-std=c++20",
    // Line tables cost no instruction, and a fault can name its source line.
    "-gline-tables-only",
];

impl Compiler {
    /// `FMHA_HIP_CLANG`, then a clang that runs and knows AMDGPU, then hipRTC.
    ///
    /// # Errors
    /// Every one that was tried.
    pub(crate) fn find() -> Result<Self> {
        if let Some(named) = HIP_CLANG.get() {
            return clang(Path::new(&named)).ok_or_else(|| {
                Error::NoDevice(format!(
                    "{} is {named}, which does not run or lists no target amdgcn",
                    HIP_CLANG.name
                ))
            });
        }
        if let Some(clang) = CLANGS.iter().map(Path::new).find_map(clang) {
            return Ok(clang);
        }
        search::hiprtc().map(|hiprtc| Compiler::Hiprtc(Box::new(hiprtc))).map_err(|error| {
            Error::NoDevice(format!(
                "no compiler for AMD kernels: no clang with target amdgcn among {}; {error}",
                CLANGS.join(", ")
            ))
        })
    }
}

impl cache::Compiler for Compiler {
    fn identity(&self) -> String {
        match self {
            Compiler::Clang { version, .. } => version.clone(),
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

    /// [`Error::Compile`] has the compiler's words and where the source was left.
    fn compile(&self, job: &KernelJob) -> Result<CompilerOutput> {
        let machine = match self {
            Compiler::Clang { path, .. } => with_clang(path, job)?,
            Compiler::Hiprtc(hiprtc) => with_hiprtc(hiprtc, job)?,
        };
        Ok(CompilerOutput { machine, ..CompilerOutput::default() })
    }
}

/// What is compiled for a source. The flags are clang's; hipRTC's follow from its identity.
pub(crate) fn job(kernel: &'static str, arch: Arch, source: KernelSource) -> KernelJob {
    KernelJob {
        kernel,
        arch: arch.name().to_owned(),
        flags: CLANG_FLAGS.map(str::to_owned).to_vec(),
        source,
        image: ImageKind::Machine,
    }
}

/// The clang at `path`, if it runs and knows AMDGPU.
fn clang(path: &Path) -> Option<Compiler> {
    let says = |argument| {
        let output = Command::new(path).arg(argument).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    says("--print-targets").filter(|targets| targets.contains("amdgcn"))?;
    let version = says("--version")?.lines().next()?.to_owned();
    Some(Compiler::Clang { path: path.to_owned(), version })
}

/// A folder with the source and its headers as files; left behind when the compiler says no.
fn dump(source: &KernelSource) -> Result<PathBuf> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("fmha-hip-{}-{number}", std::process::id()));
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        let parent = path.parent().unwrap_or(&folder);
        std::fs::create_dir_all(parent)
            .and_then(|()| std::fs::write(&path, text))
            .map_err(|error| Error::System { what: path.display().to_string(), text: error.to_string() })
    };
    write("entry.hip", &source.entry)?;
    for header in &source.headers {
        write(&header.name, &header.text)?;
    }
    Ok(folder)
}

fn with_clang(clang: &Path, job: &KernelJob) -> Result<Vec<u8>> {
    let folder = dump(&job.source)?;
    let object = folder.join("kernel.co");
    let output = Command::new(clang)
        .args(&job.flags)
        .arg(format!("--offload-arch={}", job.arch))
        .args(["-I.", "entry.hip", "-o", "kernel.co"])
        .current_dir(&folder)
        .output()
        .map_err(|error| Error::System { what: clang.display().to_string(), text: error.to_string() })?;
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Error::Compile { kernel: job.kernel.to_owned(), log, dumped: folder });
    }
    let code = std::fs::read(&object)
        .map_err(|error| Error::System { what: object.display().to_string(), text: error.to_string() })?;
    // A folder that stays is litter, not an error.
    let _ = std::fs::remove_dir_all(&folder);
    Ok(code)
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
    let texts = source.headers.iter().map(|h| text(&h.text)).collect::<Result<Vec<_>>>()?;
    let names = source.headers.iter().map(|h| text(&h.name)).collect::<Result<Vec<_>>>()?;
    let options = [format!("--offload-arch={}", job.arch), "-O3".to_owned(), "-std=c++20".to_owned()];
    let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>>>()?;
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
        // SAFETY: the buffer has the size that hipRTC asked for.
        check("hiprtcGetProgramLog", unsafe {
            (rtc.hiprtcGetProgramLog)(program.handle, log.as_mut_ptr().cast())
        })?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        return Err(Error::Compile { kernel: kernel.to_owned(), log, dumped: dump(source)? });
    }
    let mut bytes = 0;
    // SAFETY: the program was compiled.
    check("hiprtcGetCodeSize", unsafe { (rtc.hiprtcGetCodeSize)(program.handle, &raw mut bytes) })?;
    let mut code = vec![0u8; bytes];
    // SAFETY: the buffer has the size that hipRTC asked for.
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
