//! Test doubles of the drivers' libraries, which `--emulate` opens: how they are found and built.
//!
//! The emulators are a workspace of their own, `tests/emulators`. A program that was built in a checkout of the
//! repository builds the double before it opens it, and prints a message; elsewhere the double lies beside the
//! program or in the folder `FMHA_EMULATOR_DIR`.

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use crate::env;
use crate::error::{Error, Result};

/// A test double: the file of its library, and the package that builds it.
#[derive(Clone, Copy, Debug)]
pub struct Double {
    /// File name, `lib….so`; no loader takes it for a real driver.
    pub file: &'static str,
    /// Package in the workspace `tests/emulators`.
    pub package: &'static str,
}

/// Text that describes the launches of a double. The double owns the text's memory, so the text is copied and the
/// double frees its own.
///
/// # Safety
/// Both are functions of one open double: `launches` gives a string that ends in a zero byte and lives until
/// `forget` is called with it.
#[doc(hidden)]
#[must_use]
pub unsafe fn launches_of(
    launches: unsafe extern "C" fn() -> *mut c_char,
    forget: unsafe extern "C" fn(*mut c_char),
) -> String {
    // SAFETY: the function takes no arguments.
    let text = unsafe { launches() };
    // SAFETY: the caller keeps the contract of `launches_of`.
    let told = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: `launches` gave this pointer, and the pointer is not used again.
    unsafe { forget(text) };
    told
}

impl Double {
    /// Path of the double's file: in the folder `FMHA_EMULATOR_DIR`, if set; in the source tree that this
    /// program was built from, rebuilt if the file is missing or older than its sources; otherwise next to
    /// the program, or one or two folders up (tests lie in `deps`).
    ///
    /// # Errors
    /// [`Error::NoDevice`] if no file is found, with the places searched and the remedy; the exit status of a
    /// `cargo` that failed.
    pub fn find(self) -> Result<PathBuf> {
        if !cfg!(target_os = "linux") {
            let text =
                format!("emulated devices are there on Linux alone, and this is {}", std::env::consts::OS);
            return Err(Error::NoDevice(text));
        }
        if let Some(folder) = env::EMULATOR_DIR.get()? {
            let path = Path::new(&folder).join(self.file);
            return if path.exists() {
                Ok(path)
            } else {
                Err(self.absent(&[path], "FMHA_EMULATOR_DIR is set"))
            };
        }
        let program = std::env::current_exe().unwrap_or_default();
        let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/emulators");
        let tree = tree.canonicalize().ok().filter(|tree| tree.join("Cargo.toml").exists());
        let beside: Vec<PathBuf> =
            program.ancestors().skip(1).take(3).map(|folder| folder.join(self.file)).collect();
        let found = beside.iter().find(|path| path.exists()).cloned();
        match (tree, found) {
            // A test of the emulators finds the library that Cargo has built for it.
            (Some(tree), Some(found)) if program.starts_with(&tree) => Ok(found),
            (Some(tree), _) => self.built(&tree),
            (None, Some(found)) => Ok(found),
            (None, None) => Err(self.absent(
                &beside,
                "a checkout of the repository builds it by itself, or by `cargo build --release` in tests/emulators; \
                 FMHA_EMULATOR_DIR names the folder of one that was built elsewhere",
            )),
        }
    }

    fn absent(self, tried: &[PathBuf], advice: &str) -> Error {
        let tried: Vec<_> = tried.iter().map(|path| path.display().to_string()).collect();
        Error::NoDevice(format!(
            "no emulated device: {} is not there (tried {}); {advice}",
            self.file,
            tried.join(", ")
        ))
    }

    /// The double's file in the build folder of `tree`, rebuilt if it is not up to date.
    fn built(self, tree: &Path) -> Result<PathBuf> {
        let target = tree.join("target");
        let path = target.join("release").join(self.file);
        // File whose time is the start of the last build: an edit made meanwhile counts as newer.
        let stamp = target.join(format!("{}.built", self.package));
        let began = modified(&stamp).filter(|_| path.exists());
        if began.is_some_and(|began| newest(tree) <= began) {
            return Ok(path);
        }
        eprintln!("building the emulated device's library, once: cargo build --release -p {}", self.package);
        let now = SystemTime::now();
        let failed = |text: String| {
            Error::NoDevice(format!("no emulated device: {} in {}: {text}", self.package, tree.display()))
        };
        let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["build", "--release", "--quiet", "--package", self.package, "--target-dir"])
            .arg(&target)
            .current_dir(tree)
            .status()
            .map_err(|error| failed(format!("cargo does not start: {error}")))?;
        if !status.success() || !path.exists() {
            return Err(failed(format!("cargo build ended with {status}")));
        }
        // If the stamp cannot be written, the next call runs Cargo again.
        let _ = std::fs::File::create(&stamp).and_then(|file| file.set_modified(now));
        Ok(path)
    }
}

fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|file| file.modified()).ok()
}

/// Time of the last change of a source or manifest below `folder`, build output apart.
fn newest(folder: &Path) -> SystemTime {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| {
            let path = entry.path();
            if !path.is_dir() {
                modified(&path).unwrap_or(SystemTime::UNIX_EPOCH)
            } else if entry.file_name() == "target" {
                SystemTime::UNIX_EPOCH
            } else {
                newest(&path)
            }
        })
        .max()
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOUBLE: Double = Double { file: "libof_no_package.so", package: "of-no-package" };

    #[test]
    fn a_file_as_new_as_its_sources_is_taken_and_an_older_one_is_built_anew() {
        let tree = tempfile::tempdir().unwrap();
        let put = |name: &str| {
            let path = tree.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            path
        };
        put("src/lib.rs");
        let file = put("target/release/libof_no_package.so");
        put("target/of-no-package.built");
        assert_eq!(DOUBLE.built(tree.path()).unwrap(), file);
        let source = std::fs::File::open(put("src/later.rs")).unwrap();
        source.set_modified(SystemTime::now() + std::time::Duration::from_secs(5)).unwrap();
        // The folder has no package, so Cargo fails.
        let error = DOUBLE.built(tree.path()).unwrap_err().to_string();
        assert!(error.contains("of-no-package") && error.contains("cargo"), "{error}");
    }

    #[test]
    fn what_is_missing_is_told_with_its_places_and_what_to_do() {
        let error = DOUBLE.absent(&["/nowhere/libof_no_package.so".into()], "do so").to_string();
        assert!(error.contains("/nowhere/libof_no_package.so") && error.contains("do so"), "{error}");
    }
}
