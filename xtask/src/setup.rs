//! Programs and libraries that the tests need besides Rust. Each is installed if possible, and otherwise reported.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Compiler of AMD's kernels, by the name of Debian's and Ubuntu's package.
pub(crate) const CLANG: &str = "clang-22";
const CLANG_PACKAGES: [&str; 3] = ["clang-22", "lld-22", "llvm-22"];

/// The compiler of the NVIDIA kernels: a PyPI package that holds the vendor's library. Its licence
/// lets a user fetch it, not us ship it.
const NVRTC_PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.88";
const NVRTC_LIBRARY: &str = "nvidia/cu13/lib/libnvrtc.so.13";

/// Another NVRTC, with which a sample of the kernels is compiled: a folder to unpack it to, its package and its
/// library.
pub(crate) struct OtherNvrtc {
    pub(crate) folder: &'static str,
    package: &'static str,
    library: &'static str,
}

/// Newest NVRTC in the registry.
pub(crate) const NEWEST_NVRTC: OtherNvrtc =
    OtherNvrtc { folder: "nvrtc-newest", package: "nvidia-cuda-nvrtc>=13.2,<14", library: NVRTC_LIBRARY };

/// Oldest NVRTC that compiles for sm_100a.
pub(crate) const OLDEST_NVRTC: OtherNvrtc = OtherNvrtc {
    folder: "nvrtc-12.8",
    package: "nvidia-cuda-nvrtc-cu12==12.8.*",
    library: "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
};

impl OtherNvrtc {
    /// Fetches and unpacks the compiler, once, and returns its library.
    ///
    /// # Errors
    /// The reason why it is not available.
    pub(crate) fn library(&self) -> Result<PathBuf, String> {
        unpacked(&target().join(self.folder), self.package, self.library)
    }
}

/// Sets everything up, and returns environment variables with which the tests find it.
pub(crate) fn run() -> Vec<(String, String)> {
    let mut environment = Vec::new();
    if let Err(reason) = clang() {
        println!("absent: {CLANG} ({reason}); AMD kernels are not compiled");
    }
    match nvrtc() {
        Ok(library) => environment.push(("FMHA_NVRTC".to_owned(), library.display().to_string())),
        Err(reason) => println!("absent: NVRTC ({reason}); NVIDIA kernels are not compiled"),
    }
    // The emulators of this tree are up to date, since every run builds them first.
    environment.push(("FMHA_EMULATOR_DIR".to_owned(), emulators().display().to_string()));
    environment
}

pub(crate) fn clang_is_there() -> bool {
    runs(Command::new(CLANG).arg("--version"))
}

fn clang() -> Result<(), String> {
    if clang_is_there() {
        return Ok(());
    }
    apt(&CLANG_PACKAGES)
}

/// Installs packages of Debian or Ubuntu.
///
/// # Errors
/// A system without apt-get, or an error of apt-get.
pub(crate) fn apt(packages: &[&str]) -> Result<(), String> {
    if !runs(Command::new("apt-get").arg("--version")) {
        return Err("not installed, and there is no apt-get".to_owned());
    }
    println!("setting up {}", packages.join(", "));
    let install = |first: &str| {
        let mut command = Command::new("apt-get");
        command.args([first, "-y", "-q"]).env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    // A new machine has no package lists yet. If the update fails, old lists may still serve.
    loudly(&mut install("update")).ok();
    loudly(install("install").arg("--no-install-recommends").args(packages))
}

/// Library of NVRTC in `target/nvrtc`.
fn nvrtc() -> Result<PathBuf, String> {
    unpacked(&target().join("nvrtc"), NVRTC_PACKAGE, NVRTC_LIBRARY)
}

/// Fetches a PyPI package and unpacks it into `folder`, once; returns the path of its `library`.
fn unpacked(folder: &Path, package: &str, library: &str) -> Result<PathBuf, String> {
    let name = library;
    let library = folder.join(name);
    if library.exists() {
        return Ok(library);
    }
    let python = ["python3", "python"]
        .into_iter()
        .find(|python| runs(Command::new(python).args(["-m", "pip", "--version"])))
        .ok_or("there is no Python with pip")?;
    println!("setting up {package}");
    let wheels = folder.join("wheels");
    loudly(
        Command::new(python)
            .args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"])
            .arg(&wheels)
            .arg(package),
    )?;
    let wheel = std::fs::read_dir(&wheels)
        .map_err(|error| error.to_string())?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|ending| ending == "whl"))
        .ok_or("pip left no wheel")?;
    loudly(Command::new(python).args(["-m", "zipfile", "-e"]).arg(wheel).arg(folder))?;
    if library.exists() { Ok(library) } else { Err(format!("{package} has no {name}")) }
}

/// Folder of Cargo's builds and of downloads.
pub(crate) fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target")
}

/// Folder in which the emulators are built. They are a workspace of their own.
pub(crate) fn emulators() -> PathBuf {
    emulators_target().join("release")
}

fn emulators_target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/emulators/target")
}

/// Command `cargo WORDS` in the emulators' workspace.
pub(crate) fn cargo_of_emulators(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.args(words).arg("--target-dir").arg(emulators_target());
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/emulators"));
    command
}

/// Builds the libraries that `--emulate` opens, and the programs that run the interpreters.
pub(crate) fn build_emulators() -> Result<(), String> {
    let packages = ["fmha-emu-hip", "fmha-emu-hiprtc", "fmha-emu-libcuda", "fmha-emu-cdna", "fmha-emu-ptx"];
    loudly(cargo_of_emulators(&["build", "--release"]).args(packages.map(|package| format!("-p={package}"))))
}

/// Builds the command in release mode, and the emulators.
pub(crate) fn build_with_emulators() -> Result<(), String> {
    loudly(Command::new(env!("CARGO")).args(["build", "--release"]))?;
    build_emulators()
}

/// Folder of the results of long runs, outside the repository.
pub(crate) fn nightly() -> PathBuf {
    target().join("nightly")
}

/// Writes a page to [`nightly`] with the table that `tool` prints.
pub(crate) fn page(name: &str, tool: &str) -> Result<PathBuf, String> {
    let folder = nightly();
    let path = folder.join(name);
    let text = format!("<!-- written by {tool} -->\n<!-- end of what {tool} wrote -->\n");
    std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(&path, text))
        .map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(path)
}

/// Whether a program exists and works.
pub(crate) fn runs(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Runs a command to its end; an exit status other than success is an error.
pub(crate) fn loudly(command: &mut Command) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{:?} ended with {status}", command.get_program())),
        Err(error) => Err(format!("{:?}: {error}", command.get_program())),
    }
}
