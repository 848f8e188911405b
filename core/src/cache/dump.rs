//! Writes kernels to the folder `FMHA_DUMP`, for people to read: one folder for each kernel, with its source, code and
//! log.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use super::{CompiledKernel, KernelJob, Origin};
use crate::env;
use crate::error::{Error, Result};

/// Writes source, log, resources and metadata of a kernel that compiled to `folder/kernel-key`.
pub(super) fn dump(folder: &Path, job: &KernelJob, kernel: &CompiledKernel, origin: &Origin) -> Result<()> {
    let folder = place(folder, job);
    let resources = kernel.resources;
    let mut about = String::new();
    for (name, value) in [
        ("kernel", kernel.kernel.clone()),
        ("arch", kernel.arch.clone()),
        ("compiler", kernel.compiler.clone()),
        ("flags", [&job.flags[..], &kernel.own_flags].concat().join(" ")),
        ("key", kernel.key.hex()),
        ("from", origin.to_string()),
        ("machine code", format!("{} bytes", kernel.machine.len())),
        ("assembly", format!("{} bytes", kernel.assembly.len())),
        ("resources", resources.to_string()),
    ] {
        // Writing to a String cannot fail.
        let _ = writeln!(about, "{name:<14} {value}");
    }
    let write = || -> std::io::Result<()> {
        sources(&folder, job)?;
        fs::write(folder.join("log.txt"), &kernel.log)?;
        fs::write(folder.join("about.txt"), &about)?;
        fs::write(folder.join("machine.bin"), &kernel.machine)?;
        if kernel.assembly.is_empty() {
            Ok(())
        } else {
            fs::write(folder.join("assembly.txt"), &kernel.assembly)
        }
    };
    write().map_err(|error| Error::System {
        what: format!("{} {}", env::DUMP.name, folder.display()),
        text: error.to_string(),
    })
}

/// Writes a source that did not compile, and the compiler's messages, for the user to read: in `FMHA_DUMP`, otherwise
/// in a new folder that only this user can read. Returns the kernel's folder.
#[must_use]
pub fn dump_source(job: &KernelJob, log: &str) -> PathBuf {
    let folder = match env::DUMP.get() {
        Ok(Some(folder)) => PathBuf::from(folder),
        _ => match tempfile::Builder::new().prefix("fmha-dump-").tempdir() {
            Ok(folder) => folder.keep(),
            Err(_) => return PathBuf::new(),
        },
    };
    let folder = place(&folder, job);
    // The error that follows carries the log itself; a dump that fails must not hide it.
    let _ = sources(&folder, job).and_then(|()| fs::write(folder.join("log.txt"), log));
    folder
}

fn place(folder: &Path, job: &KernelJob) -> PathBuf {
    folder.join(format!("{}-{}-{}", job.kernel, job.arch, &job.key().hex()[..12]))
}

fn sources(folder: &Path, job: &KernelJob) -> std::io::Result<()> {
    for header in job.source.headers() {
        let path = folder.join(&*header.name);
        fs::create_dir_all(path.parent().unwrap_or(folder))?;
        fs::write(path, &*header.text)?;
    }
    fs::create_dir_all(folder)?;
    fs::write(folder.join("entry.txt"), &job.source.entry)
}
