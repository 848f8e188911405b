//! Search for a kernel's machine code: in a bundle, on disk, then by compiling it. One key names a kernel in all
//! three: the compiler's input ([`SourceKey`]) and the compiler. A bundle stores which compiler made it, so it also
//! serves a machine without a compiler.

mod bundle;
mod disk;
mod dump;
mod lock;
mod modules;
mod table;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use hmac_sha256::Hash;
use serde::{Deserialize, Serialize};

pub use bundle::Bundle;
pub use dump::dump_source;
pub use modules::{Loader, Module, Modules, Target, only_plans};
pub use table::{TableEntry, backward_table, forward_table};
pub(crate) use table::{of_other_sizes, of_other_sizes_bwd};

use crate::env;
use crate::error::{Error, Result};
use crate::operation::AnyProblem;
use crate::plan::{PlanOptions, ResourceUsage};
use crate::records::{COMPILE, record};
use crate::source::{Header, KernelSource};
use disk::Disk;
pub(crate) use lock::{FileLock, Locked, Patience, lock, say};

/// Hash of a kernel's source: its text, the headers that it reaches, the architecture and the flags (SHA-256,
/// FIPS 180-4).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SourceKey([u8; 32]);

impl SourceKey {
    /// The key's 64 hexadecimal digits.
    #[must_use]
    pub fn hex(&self) -> String {
        hex(&self.0)
    }
}

impl fmt::Debug for SourceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hex())
    }
}

/// The user's folder for files that can be made again; `None` where `FMHA_CACHE_DIR` is `none`, or there is no
/// home.
///
/// # Errors
/// A value of `FMHA_CACHE_DIR` that is not UTF-8.
pub(crate) fn folder() -> Result<Option<PathBuf>> {
    disk::folder()
}

/// Reason why there is no [`folder`].
pub(crate) fn why_no_folder() -> String {
    disk::why_no_folder()
}

/// Writes a file of the cache: all of it or, after an error, nothing.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    bundle::write_whole(path, bytes)
}

/// Hash of the text of headers.
pub(crate) fn headers_hash(headers: &[Header]) -> String {
    hex(&hash(headers.iter().flat_map(|h| [h.name.as_bytes(), h.text.as_bytes()])))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Hashes texts such that two different lists of texts never give the hash the same bytes.
fn hash<'a>(texts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut hasher = Hash::new();
    for text in texts {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text);
    }
    hasher.finalize()
}

/// Kind of compiler output that a device runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ImageKind {
    /// Machine code of the device.
    Machine,
    /// The compiler's assembly text, which an emulated device may run.
    Assembly,
}

impl fmt::Display for ImageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Machine => "machine code",
            Self::Assembly => "assembly",
        })
    }
}

/// A kernel to be compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelJob {
    /// The kernel's name in plans.
    pub kernel: &'static str,
    /// The architecture, as its compiler spells it.
    pub arch: String,
    /// Options that change the code, apart from the architecture.
    pub flags: Vec<String>,
    /// Source to compile.
    pub source: KernelSource,
    /// Kind of output that the device runs.
    pub image: ImageKind,
}

impl KernelJob {
    /// Name of this kernel, independent of the compiler.
    #[must_use]
    pub fn key(&self) -> SourceKey {
        let count = self.flags.len().to_string();
        let flags = self.flags.iter().map(String::as_bytes);
        let headers = self.source.headers();
        let headers = headers.iter().flat_map(|h| [h.name.as_bytes(), h.text.as_bytes()]);
        let texts = [self.arch.as_bytes(), self.source.entry.as_bytes(), count.as_bytes()];
        SourceKey(hash(texts.into_iter().chain(flags).chain(headers)))
    }
}

/// Output of a compiler for a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompilerOutput {
    /// Machine code.
    pub machine: Vec<u8>,
    /// Assembly text; empty where the compiler has none to give.
    pub assembly: Vec<u8>,
    /// Text that the compiler printed.
    pub log: String,
    /// Resources that the kernel needs.
    pub resources: ResourceUsage,
}

/// Compiler for one vendor's devices.
pub trait Compiler {
    /// Name and version of the compiler: everything that changes its output for a given source, except
    /// [`own_flags`](Self::own_flags).
    fn identity(&self) -> String;

    /// Flags that the compiler adds to those of each job.
    fn own_flags(&self) -> &[&str] {
        &[]
    }

    /// Compiles.
    ///
    /// # Errors
    /// [`Error::Compile`] with the text that the compiler printed.
    fn compile(&self, job: &KernelJob) -> Result<CompilerOutput>;
}

impl<C: Compiler + ?Sized> Compiler for &C {
    fn identity(&self) -> String {
        C::identity(self)
    }

    fn own_flags(&self) -> &[&str] {
        C::own_flags(self)
    }

    fn compile(&self, job: &KernelJob) -> Result<CompilerOutput> {
        C::compile(self, job)
    }
}

/// A compiled kernel with everything that a cache stores about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompiledKernel {
    /// Hash of the source.
    pub key: SourceKey,
    /// The kernel's name in plans.
    pub kernel: String,
    /// The architecture.
    pub arch: String,
    /// [`Compiler::identity`] of the compiler that made the kernel.
    pub compiler: String,
    /// [`Compiler::own_flags`] of the compiler that made the kernel; flags of the job are part of `key`.
    pub own_flags: Vec<String>,
    /// Text of the translation unit, for people to read; the headers are only part of `key`.
    pub entry: String,
    /// Machine code.
    pub machine: Vec<u8>,
    /// Assembly text; empty where it was not kept.
    pub assembly: Vec<u8>,
    /// Text that the compiler printed.
    pub log: String,
    /// Resources that the kernel needs.
    pub resources: ResourceUsage,
}

impl CompiledKernel {
    /// Lines of the log in which the compiler warns, or says that the kernel loses speed.
    #[must_use]
    pub fn remarks(&self) -> String {
        let of_note = |line: &&str| line.contains("warning") || line.contains("Performance Loss");
        self.log.lines().filter(of_note).map(str::trim).collect::<Vec<_>>().join("\n")
    }

    /// Output for a device; `None` if it was not kept.
    #[must_use]
    pub fn image(&self, kind: ImageKind) -> Option<&[u8]> {
        let image = match kind {
            ImageKind::Machine => &self.machine,
            ImageKind::Assembly => &self.assembly,
        };
        (!image.is_empty()).then_some(image)
    }
}

/// Source of a compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// A bundle, by its name.
    Bundle(String),
    /// The disk cache.
    Disk(PathBuf),
    /// The kernel was compiled in this call; `not_kept` says why it is not in the disk cache.
    Compiler {
        /// Identity of the compiler.
        compiler: String,
        /// Error text of the system, or the fact that there is no cache.
        not_kept: Option<String>,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bundle(name) => write!(f, "bundle {name}"),
            Self::Disk(folder) => write!(f, "disk cache {}", folder.display()),
            Self::Compiler { compiler, not_kept: None } => write!(f, "compiled by {compiler}"),
            Self::Compiler { compiler, not_kept: Some(why) } => {
                write!(f, "compiled by {compiler}, not kept: {why}")
            }
        }
    }
}

/// A backend that can compile for its architecture without running anything; bundles are filled by it.
pub trait Precompile: Sync {
    /// Jobs for a problem's plan: one for each kernel, in the order of the plan's steps.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with every refusal.
    fn jobs(&self, problem: AnyProblem<'_>, options: &PlanOptions) -> Result<Vec<KernelJob>>;

    /// Finds or compiles the kernel of a job.
    ///
    /// # Errors
    /// An error of the compiler, or a machine without one.
    fn precompile(&self, job: &KernelJob) -> Result<Arc<CompiledKernel>>;
}

/// Bundles that every cache of this process looks into.
static EMBEDDED: Mutex<Vec<Arc<Bundle>>> = Mutex::new(Vec::new());

/// Adds a bundle, such as one that the program embeds, for all backends: later searches for kernels look into it.
pub fn embed(bundle: Bundle) {
    EMBEDDED.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(bundle));
}

/// The places where compiled kernels are searched, in order: bundles, the disk cache, the compiler.
#[derive(Clone, Debug)]
pub struct Cache {
    bundles: Vec<Arc<Bundle>>,
    /// Whether bundles of [`embed`] come before the cache's own.
    embedded: bool,
    disk: Option<Disk>,
    dump: Option<PathBuf>,
}

impl Cache {
    /// The cache of bundles of [`embed`] and `FMHA_BUNDLE`, the disk cache in `FMHA_CACHE_DIR`, and `FMHA_DUMP`.
    ///
    /// # Errors
    /// A bundle of `FMHA_BUNDLE` that is not whole; a variable that is not UTF-8.
    pub fn from_env() -> Result<Self> {
        let mut bundles = Vec::new();
        for path in env::BUNDLE.get()?.iter().flat_map(std::env::split_paths) {
            bundles.push(Arc::new(Bundle::open(&path)?));
        }
        let dump = env::DUMP.get()?.map(PathBuf::from);
        Ok(Self { dump, embedded: true, ..Self::new(bundles, folder()?.as_deref()) })
    }

    /// Makes a cache of these bundles, and of the disk cache in `folder`.
    #[must_use]
    pub fn new(bundles: Vec<Arc<Bundle>>, folder: Option<&Path>) -> Self {
        Self { bundles, embedded: false, disk: folder.map(Disk::new), dump: None }
    }

    /// Returns the kernel of a job. `compiler` is called only if no bundle has the kernel.
    ///
    /// # Errors
    /// An error of the compiler, or no compiler and no bundle with the kernel.
    pub fn get<C: Compiler>(
        &self,
        job: &KernelJob,
        compiler: impl FnOnce() -> Result<C>,
    ) -> Result<(Arc<CompiledKernel>, Origin)> {
        let key = job.key();
        let start = Instant::now();
        let found = self.find(job, key, compiler)?;
        let (kernel, arch, origin) = (job.kernel, &job.arch, &found.1);
        match origin {
            Origin::Compiler { .. } => {
                let seconds = start.elapsed().as_secs_f64();
                record!(info, COMPILE, "kernel {kernel} for {arch}: {origin}, {seconds:.2} s");
            }
            Origin::Bundle(_) | Origin::Disk(_) => {
                record!(debug, COMPILE, "kernel {kernel} for {arch}: found, {origin}");
            }
        }
        if let Some(folder) = &self.dump {
            dump::dump(folder, job, &found.0, &found.1)?;
        }
        Ok(found)
    }

    fn find<C: Compiler>(
        &self,
        job: &KernelJob,
        key: SourceKey,
        compiler: impl FnOnce() -> Result<C>,
    ) -> Result<(Arc<CompiledKernel>, Origin)> {
        for bundle in self.bundles() {
            if let Some(kernel) = bundle.get(key)?.filter(|kernel| kernel.image(job.image).is_some()) {
                return Ok((kernel, Origin::Bundle(bundle.name().to_owned())));
            }
        }
        let compiler = compiler().map_err(|error| self.without_compiler(job, error))?;
        let name = KernelName::new(key, &compiler);
        let identity = name.compiler.clone();
        let Some(disk) = &self.disk else {
            let not_kept = Some(why_no_folder());
            let kernel = Arc::new(compile(job, name, &compiler)?);
            return Ok((kernel, Origin::Compiler { compiler: identity, not_kept }));
        };
        let on_disk = || disk.load(&name).filter(|kernel| kernel.image(job.image).is_some());
        if let Some(kernel) = on_disk() {
            return Ok((Arc::new(kernel), Origin::Disk(disk.folder().to_owned())));
        }
        // One process compiles; the others wait for it, and find the kernel.
        let _locked = disk.lock(&name, lock::say);
        if let Some(kernel) = on_disk() {
            return Ok((Arc::new(kernel), Origin::Disk(disk.folder().to_owned())));
        }
        let kernel = Arc::new(compile(job, name, &compiler)?);
        let not_kept = disk.store(&kernel).err().map(|error| format!("{}: {error}", disk.folder().display()));
        Ok((kernel, Origin::Compiler { compiler: identity, not_kept }))
    }

    /// Whether there is a bundle to look into.
    #[must_use]
    pub fn has_bundles(&self) -> bool {
        !self.bundles().is_empty()
    }

    /// Every bundle, in the order to look into them.
    fn bundles(&self) -> Vec<Arc<Bundle>> {
        let mut bundles = Vec::new();
        if self.embedded {
            bundles.extend(EMBEDDED.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned());
        }
        bundles.extend(self.bundles.iter().cloned());
        bundles
    }

    fn without_compiler(&self, job: &KernelJob, error: Error) -> Error {
        let bundles = self.bundles();
        match error {
            Error::NoDevice(text) if !bundles.is_empty() => {
                let names: Vec<_> = bundles.iter().map(|bundle| bundle.name()).collect();
                Error::NoDevice(format!(
                    "{text}; and this kernel {} for {} is not in {} ({} kernels)",
                    job.kernel,
                    job.arch,
                    names.join(", "),
                    bundles.iter().map(|bundle| bundle.len()).sum::<usize>()
                ))
            }
            other => other,
        }
    }
}

/// Everything that decides a kernel's machine code.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KernelName {
    key: SourceKey,
    compiler: String,
    own_flags: Vec<String>,
}

impl KernelName {
    fn new(key: SourceKey, compiler: &impl Compiler) -> Self {
        let own_flags = compiler.own_flags().iter().map(|&flag| flag.to_owned()).collect();
        Self { key, compiler: compiler.identity(), own_flags }
    }

    fn of(kernel: &CompiledKernel) -> Self {
        let CompiledKernel { key, compiler, own_flags, .. } = kernel;
        Self { key: *key, compiler: compiler.clone(), own_flags: own_flags.clone() }
    }

    fn hex(&self) -> String {
        let flags = self.own_flags.iter().map(String::as_bytes);
        hex(&hash([&self.key.0, self.compiler.as_bytes()].into_iter().chain(flags)))
    }
}

fn compile(job: &KernelJob, name: KernelName, compiler: &impl Compiler) -> Result<CompiledKernel> {
    let CompilerOutput { machine, assembly, log, resources } = compiler.compile(job)?;
    let KernelName { key, compiler, own_flags } = name;
    Ok(CompiledKernel {
        key,
        kernel: job.kernel.to_owned(),
        arch: job.arch.clone(),
        compiler,
        own_flags,
        entry: job.source.entry.clone(),
        machine,
        assembly,
        log,
        resources,
    })
}

#[cfg(test)]
mod tests;
