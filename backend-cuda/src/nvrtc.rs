//! NVRTC, found at run time: never linked, never a panic.
//!
//! The first library that is found (`search.rs`) and whose machine code the driver accepts is used. A
//! `libnvrtc-builtins` next to the library is opened first, by path, since NVRTC 13.0 itself searches only the
//! loader's path.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use fmha_core::ResourceUsage;
use fmha_core::cache::{Compiler, CompilerOutput, ImageKind, KernelJob, dump_source};
use fmha_core::env;
use fmha_core::error::{Error, Result};
use libloading::Library;

use crate::search;

type Program = *mut std::ffi::c_void;
type Status = c_int;

/// The opened compiler.
pub struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    log: Output,
    cubin: Output,
    ptx: Output,
    /// Version of NVRTC.
    pub version: Version,
    /// Architectures that this NVRTC compiles for, such as `90`; empty if the library cannot list them.
    archs: Vec<i32>,
    /// Path of the library.
    pub path: PathBuf,
    // Last field, dropped last: the functions above belong to this library.
    _library: Library,
    _builtins: Option<Library>,
}

/// Two functions of NVRTC that return an output: its number of bytes, and the bytes.
struct Output {
    size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    get: unsafe extern "C" fn(Program, *mut c_char) -> Status,
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NVRTC {}.{} ({})", self.version.0, self.version.1, self.path.display())
    }
}

/// Version number: major and minor.
pub type Version = (i32, i32);

/// The first compiler that is found in the usual places.
///
/// # Errors
/// [`Error::NoDevice`] with every place searched.
pub fn nvrtc() -> Result<&'static Nvrtc> {
    first(|_| Ok(()))
}

/// The first compiler that supports `arch` (`sm_90a`) and whose machine code a driver of this CUDA version accepts;
/// without a driver every version does. The library that `FMHA_NVRTC` names is used without these checks.
///
/// # Errors
/// [`Error::NoDevice`] with every place searched, and why each library there was rejected.
pub fn suiting(arch: &str, driver: Option<Version>) -> Result<&'static Nvrtc> {
    let named = env::NVRTC.get()?.is_some();
    first(|nvrtc| if named { Ok(()) } else { suits(nvrtc.version, &nvrtc.archs, arch, driver) })
}

/// Whether a driver accepts a compiler's machine code: of its own major version and of earlier ones, with any minor
/// version (CUDA Compatibility, "Minor Version Compatibility").
fn suits(
    version: Version,
    archs: &[i32],
    arch: &str,
    driver: Option<Version>,
) -> std::result::Result<(), String> {
    let (major, minor) = version;
    if let Some((takes, of)) = driver.filter(|&(takes, _)| takes < major) {
        return Err(format!(
            "NVRTC {major}.{minor} is too new for the driver, which is for CUDA {takes}.{of}"
        ));
    }
    let digits: String = arch.chars().filter(char::is_ascii_digit).collect();
    // A library too old to list its architectures tries to compile.
    if !archs.is_empty() && digits.parse().is_ok_and(|number| !archs.contains(&number)) {
        return Err(format!("NVRTC {major}.{minor} does not know {arch}"));
    }
    Ok(())
}

/// Result of opening a library.
type Opened = std::result::Result<&'static Nvrtc, String>;

/// The first compiler for which `serves` succeeds. A library is opened once, and stays open.
fn first(serves: impl Fn(&Nvrtc) -> std::result::Result<(), String>) -> Result<&'static Nvrtc> {
    static OPENED: Mutex<Vec<(PathBuf, Opened)>> = Mutex::new(Vec::new());
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let mut tried = Vec::new();
    for path in search::nvrtc()? {
        let known = opened.iter().find(|(known, _)| *known == path).map(|(_, opened)| opened.clone());
        let found = known.unwrap_or_else(|| {
            let found: Opened =
                open(&path).map(|nvrtc| &*Box::leak(Box::new(nvrtc))).map_err(|error| error.to_string());
            opened.push((path.clone(), found.clone()));
            found
        });
        match found.and_then(|nvrtc| serves(nvrtc).map(|()| nvrtc)) {
            Ok(nvrtc) => return Ok(nvrtc),
            Err(why) => tried.push(format!("{} ({why})", path.display())),
        }
    }
    Err(Error::NoDevice(format!("no NVRTC to compile kernels with; tried {}", tried.join(", "))))
}

fn open(path: &Path) -> std::result::Result<Nvrtc, libloading::Error> {
    let builtins = builtins_beside(path);
    // SAFETY: opening a compiler library runs its initialisers, which only set up itself.
    let library = unsafe { Library::new(path)? };
    /// Looks up a function of the library.
    ///
    /// # Safety
    /// `T` is the function's type in nvrtc.h.
    unsafe fn function<T: Copy>(library: &Library, name: &[u8]) -> std::result::Result<T, libloading::Error> {
        // SAFETY: the caller promises that `T` is the function's type in nvrtc.h.
        unsafe { library.get::<T>(name) }.map(|symbol| *symbol)
    }
    // SAFETY: the types are those of nvrtc.h, unchanged since CUDA 11.1.
    unsafe {
        let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status =
            function(&library, b"nvrtcVersion")?;
        let (mut major, mut minor) = (0, 0);
        version(&raw mut major, &raw mut minor);
        let archs = archs(
            function::<unsafe extern "C" fn(*mut c_int) -> Status>(&library, b"nvrtcGetNumSupportedArchs")
                .ok(),
            function::<unsafe extern "C" fn(*mut c_int) -> Status>(&library, b"nvrtcGetSupportedArchs").ok(),
        );
        Ok(Nvrtc {
            archs,
            create: function(&library, b"nvrtcCreateProgram")?,
            compile: function(&library, b"nvrtcCompileProgram")?,
            destroy: function(&library, b"nvrtcDestroyProgram")?,
            error_string: function(&library, b"nvrtcGetErrorString")?,
            log: Output {
                size: function(&library, b"nvrtcGetProgramLogSize")?,
                get: function(&library, b"nvrtcGetProgramLog")?,
            },
            cubin: Output {
                size: function(&library, b"nvrtcGetCUBINSize")?,
                get: function(&library, b"nvrtcGetCUBIN")?,
            },
            ptx: Output {
                size: function(&library, b"nvrtcGetPTXSize")?,
                get: function(&library, b"nvrtcGetPTX")?,
            },
            version: (major, minor),
            path: path.to_owned(),
            _library: library,
            _builtins: builtins,
        })
    }
}

/// The architectures that a library lists; NVRTC has these calls since 11.2.
///
/// # Safety
/// The two functions are those of nvrtc.h: the number of architectures, and the architectures in an array of that
/// length.
unsafe fn archs(
    count: Option<unsafe extern "C" fn(*mut c_int) -> Status>,
    get: Option<unsafe extern "C" fn(*mut c_int) -> Status>,
) -> Vec<i32> {
    let (Some(count), Some(get)) = (count, get) else { return Vec::new() };
    let mut num = 0;
    // SAFETY: a place for an int.
    if unsafe { count(&raw mut num) } != 0 {
        return Vec::new();
    }
    let mut archs = vec![0; usize::try_from(num).unwrap_or(0)];
    // SAFETY: the array has as many places as the library has architectures.
    if unsafe { get(archs.as_mut_ptr()) } == 0 { archs } else { Vec::new() }
}

fn builtins_beside(path: &Path) -> Option<Library> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty())?;
    let beside = std::fs::read_dir(folder).ok()?.flatten().find(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.starts_with("libnvrtc-builtins.so") && !name.contains("alt")
    })?;
    // SAFETY: the initialisers of NVRTC's own libraries may run in this process.
    unsafe { Library::new(beside.path()) }.ok()
}

/// Flag added to every compilation: ptxas reports the resources of the kernel.
const OWN_FLAGS: [&str; 1] = ["--ptxas-options=-v"];

impl Compiler for Nvrtc {
    /// Name of the compiler: its version in two numbers, and the size of its file, which differs between builds of
    /// one version.
    fn identity(&self) -> String {
        let (major, minor) = self.version;
        match std::fs::metadata(&self.path) {
            Ok(file) => format!("NVRTC {major}.{minor} ({} bytes)", file.len()),
            Err(_) => format!("NVRTC {major}.{minor}"),
        }
    }

    fn own_flags(&self) -> &[&str] {
        &OWN_FLAGS
    }

    fn compile(&self, job: &KernelJob) -> Result<CompilerOutput> {
        self.run(job).map_err(|log| Error::Compile {
            kernel: job.kernel.to_owned(),
            dumped: dump_source(job, &log),
            log,
        })
    }
}

/// Resources that ptxas reports for the one kernel in a log.
fn resources(log: &str) -> ResourceUsage {
    let before = |words: &str| {
        let number = log[..log.rfind(words)?].rsplit(|c: char| !c.is_ascii_digit()).next()?;
        number.parse().ok()
    };
    let (stores, loads) = (before(" bytes spill stores"), before(" bytes spill loads"));
    let registers = before(" registers");
    ResourceUsage {
        registers,
        spill_bytes: stores.max(loads),
        stack_bytes: before(" bytes stack frame"),
        // The log of ptxas has no entry for shared memory if the kernel uses none.
        shared_bytes: before(" bytes smem").or(registers.map(|_| 0)),
    }
}

impl Nvrtc {
    /// Compiles; a failure returns the log as `Err`. If ptxas reports spills, serialised wgmma or an ignored
    /// setmaxnreg, the kernel is correct but slower: the log then has these remarks, and a plan's explanation
    /// quotes them.
    fn run(&self, job: &KernelJob) -> std::result::Result<CompilerOutput, String> {
        let source = &job.source;
        let text = |text: &str| CString::new(text).map_err(|error| error.to_string());
        let headers = source.headers();
        let names = headers.iter().map(|h| text(&h.name)).collect::<std::result::Result<Vec<_>, _>>()?;
        let texts = headers.iter().map(|h| text(&h.text)).collect::<std::result::Result<Vec<_>, _>>()?;
        let name_pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let text_pointers: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
        let mut options = job.flags.iter().map(|o| text(o)).collect::<std::result::Result<Vec<_>, _>>()?;
        // A virtual architecture produces no machine code and skips ptxas, which takes half of the time.
        let arch = match job.image {
            ImageKind::Machine => job.arch.clone(),
            ImageKind::Assembly => job.arch.replacen("sm_", "compute_", 1),
        };
        options.push(text(&format!("--gpu-architecture={arch}"))?);
        for flag in OWN_FLAGS {
            options.push(text(flag)?);
        }
        let option_pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let entry = text(&source.entry)?;

        let mut program = Guard { nvrtc: self, program: std::ptr::null_mut() };
        // SAFETY: every pointer is to a C string that lives to the end of this function.
        let status = unsafe {
            (self.create)(
                &raw mut program.program,
                entry.as_ptr(),
                c"entry.cu".as_ptr(),
                names.len() as c_int,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        self.check(status)?;
        // SAFETY: the program is there, the options live.
        let status =
            unsafe { (self.compile)(program.program, options.len() as c_int, option_pointers.as_ptr()) };
        let log = self.read(&self.log, program.program)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        if let Err(error) = self.check(status) {
            return Err(format!("{error}\n{log}"));
        }
        let cubin = match job.image {
            ImageKind::Machine => self.read(&self.cubin, program.program)?,
            ImageKind::Assembly => Vec::new(),
        };
        let ptx = self.read(&self.ptx, program.program)?;
        Ok(CompilerOutput { machine: cubin, assembly: ptx, resources: resources(&log), log })
    }

    fn check(&self, status: Status) -> std::result::Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: NVRTC gives a static string for any status.
        let words = unsafe { CStr::from_ptr((self.error_string)(status)) };
        Err(words.to_string_lossy().into_owned())
    }

    fn read(&self, output: &Output, program: Program) -> std::result::Result<Vec<u8>, String> {
        let mut size = 0;
        // SAFETY: the program is there.
        self.check(unsafe { (output.size)(program, &raw mut size) })?;
        let mut bytes = vec![0u8; size];
        // SAFETY: `bytes` has the size that NVRTC gave.
        self.check(unsafe { (output.get)(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

/// Destroys the program on every way out.
struct Guard<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: made by `create`, destroyed once.
            unsafe { (self.nvrtc.destroy)(&raw mut self.program) };
        }
    }
}

#[cfg(test)]
mod tests {
    use fmha_core::source::KernelSource;

    use super::*;

    #[test]
    fn a_compiler_serves_drivers_of_its_major_version_or_later_and_the_architectures_that_it_knows() {
        let archs = [80, 90, 100];
        let serves = |driver, arch: &str| suits((13, 0), &archs, arch, driver);
        assert_eq!(serves(None, "sm_90a"), Ok(()));
        assert_eq!(serves(Some((13, 0)), "sm_100a"), Ok(()));
        assert_eq!(serves(Some((14, 2)), "sm_90a"), Ok(()));
        let too_new = serves(Some((12, 8)), "sm_90a").unwrap_err();
        assert!(too_new.contains("13.0") && too_new.contains("12.8"), "{too_new}");
        let unknown = serves(Some((13, 0)), "sm_103a").unwrap_err();
        assert!(unknown.contains("13.0") && unknown.contains("sm_103a"), "{unknown}");
        assert_eq!(suits((13, 5), &[], "sm_103a", Some((13, 0))), Ok(()));
    }

    #[test]
    fn the_installed_compiler_says_which_architectures_it_knows() {
        match nvrtc() {
            Ok(nvrtc) => {
                assert!(nvrtc.archs.contains(&90), "{:?}", nvrtc.archs);
                let error = suits(nvrtc.version, &nvrtc.archs, "sm_123", None).unwrap_err();
                assert!(error.contains("sm_123"), "{error}");
            }
            Err(reason) => println!("absent: {reason}"),
        }
    }

    #[test]
    fn resources_are_those_that_ptxas_names() {
        let log = "ptxas info    : Compiling entry function 'fmha_kernel' for 'sm_90a'\n\
                   ptxas info    : Function properties for fmha_kernel\n    \
                   16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n\
                   ptxas info    : Used 168 registers, used 9 barriers, 48 bytes smem\n";
        let expected = ResourceUsage {
            registers: Some(168),
            spill_bytes: Some(20),
            stack_bytes: Some(16),
            shared_bytes: Some(48),
        };
        assert_eq!(resources(log), expected);
        assert_eq!(resources("Used 48 registers").shared_bytes, Some(0));
        assert_eq!(resources(""), ResourceUsage::default());
    }

    /// A compilation job for an entry that needs no headers.
    fn job(entry: &str, image: ImageKind) -> KernelJob {
        let source = KernelSource::with(entry.to_owned(), Vec::new());
        KernelJob { kernel: "test", arch: "sm_90a".to_owned(), flags: Vec::new(), source, image }
    }

    #[test]
    fn a_kernel_is_compiled_to_what_the_device_runs_and_what_is_wrong_is_told() {
        let Ok(nvrtc) = nvrtc() else { return println!("absent: NVRTC") };
        assert!(std::ptr::eq(nvrtc, super::nvrtc().unwrap()), "it is opened once");
        let text = "extern \"C\" __global__ void test_kernel(int *p) { *p = 7; }";
        let machine = nvrtc.compile(&job(text, ImageKind::Machine)).unwrap();
        assert_eq!(machine.machine[..4], *b"\x7fELF");
        assert!(machine.resources.registers.is_some_and(|registers| registers > 0), "{}", machine.log);
        let assembly = nvrtc.compile(&job(text, ImageKind::Assembly)).unwrap();
        assert!(assembly.machine.is_empty() && assembly.resources == ResourceUsage::default());
        let ptx = String::from_utf8_lossy(&assembly.assembly);
        assert!(ptx.contains(".target sm_90a") && ptx.contains(".entry test_kernel"), "{ptx}");
        let wrong = nvrtc.run(&job("no_such_type x;", ImageKind::Assembly)).unwrap_err();
        assert!(wrong.contains("NVRTC_ERROR_COMPILATION") && wrong.contains("no_such_type"), "{wrong}");
    }

    #[test]
    fn a_compiler_says_which_build_it_is_and_what_it_adds() {
        let Ok(nvrtc) = nvrtc() else { return println!("absent: NVRTC") };
        let (major, minor) = nvrtc.version;
        let identity = nvrtc.identity();
        let rest = identity.strip_prefix(&format!("NVRTC {major}.{minor}")).unwrap();
        let bytes = std::fs::metadata(&nvrtc.path).map(|file| format!(" ({} bytes)", file.len()));
        assert_eq!(rest, bytes.unwrap_or_default());
        assert_eq!(nvrtc.own_flags(), ["--ptxas-options=-v"]);
        assert_eq!(nvrtc.check(0), Ok(()));
        assert_eq!(nvrtc.check(1), Err("NVRTC_ERROR_OUT_OF_MEMORY".to_owned()));
    }

    #[cfg(unix)]
    #[test]
    fn builtins_are_those_beside_the_library_by_their_name() {
        let Ok(nvrtc) = nvrtc() else { return println!("absent: NVRTC") };
        assert!(builtins_beside(Path::new("libnvrtc.so")).is_none(), "it has no folder");
        for (name, found) in [
            ("libnvrtc-builtins.so.1", nvrtc.path.exists()),
            ("libnvrtc-builtins.so.alt", false),
            ("libother.so", false),
        ] {
            let folder = tempfile::tempdir().unwrap();
            // Any library that the loader can open serves as a stand-in here.
            std::os::unix::fs::symlink(&nvrtc.path, folder.path().join(name)).unwrap();
            assert_eq!(builtins_beside(&folder.path().join("libnvrtc.so")).is_some(), found, "{name}");
        }
    }
}
