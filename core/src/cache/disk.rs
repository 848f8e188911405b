//! The disk cache: a folder of bundles of one packed kernel each. Any number of processes can use it at once: a
//! complete file appears by a rename, and an incomplete file is ignored.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::bundle::{Bundle, UNFINISHED, write_whole};
use super::lock::{FileLock, Locked, Patience, lock};
use super::{CompiledKernel, KernelName};
use crate::env;
use crate::error::Result;

/// Limit of the bytes of all kernels: some 40,000, since one with its assembly takes 50 kB. Beyond the limit, the
/// kernels that were unused for the longest time are removed.
const LIMIT_BYTES: u64 = 2 << 30;

/// Time during which a used kernel is not removed to make room; a new kernel is then not stored. Without this rule,
/// a program that uses more kernels than fit, in the same order each time, would find none of them.
const IN_USE_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// An unfinished file this old has no writer any more: writing one takes less than a second.
const ORPHANED_AFTER: Duration = Duration::from_secs(600);

/// Folder of the disk cache: `FMHA_CACHE_DIR`, otherwise `fmha` in the user's cache folder after the XDG Base
/// Directory Specification (0.8). `None` if the variable is `none`, or if the home folder does not exist: a home is
/// never created, so that a process of root leaves nothing where a variable is wrong.
pub(super) fn folder() -> Result<Option<PathBuf>> {
    Ok(match env::CACHE_DIR.get()? {
        Some(none) if none == "none" => None,
        Some(folder) => Some(folder.into()),
        None => {
            let absolute = |variable| {
                std::env::var_os(variable).map(PathBuf::from).filter(|folder: &PathBuf| folder.is_absolute())
            };
            let home = absolute("HOME").filter(|home| home.is_dir());
            let beneath_home = |folder: &Path| home.as_ref().is_some_and(|home| folder.starts_with(home));
            let cache = match absolute("XDG_CACHE_HOME") {
                Some(cache) => Some(cache).filter(|cache| cache.is_dir() || beneath_home(cache)),
                None => home.map(|home| home.join(".cache")),
            };
            cache.map(|cache| cache.join("fmha"))
        }
    })
}

/// Reason why there is no [`folder`].
pub(super) fn why_no_folder() -> String {
    let name = env::CACHE_DIR.name;
    match (env::CACHE_DIR.get(), folder()) {
        (Ok(None), Ok(None)) => {
            format!("{name} is not set, and of XDG_CACHE_HOME and HOME 0 are folders that are there")
        }
        _ => format!("{name} is none"),
    }
}

#[derive(Clone, Debug)]
pub(super) struct Disk {
    folder: PathBuf,
    limit_bytes: u64,
    patience: Patience,
}

impl Disk {
    pub(super) fn new(folder: &Path) -> Self {
        Self { folder: folder.join("kernels"), limit_bytes: LIMIT_BYTES, patience: Patience::USUAL }
    }

    #[cfg(test)]
    pub(super) fn with_limit(folder: &Path, limit_bytes: u64) -> Self {
        Self { limit_bytes, ..Self::new(folder) }
    }

    #[cfg(test)]
    pub(super) fn with_patience(folder: &Path, patience: Patience) -> Self {
        Self { patience, ..Self::new(folder) }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn path(&self, name: &KernelName) -> PathBuf {
        self.folder.join(name.hex() + ".fmha")
    }

    /// The kernel, if a complete file contains it. A damaged file counts as absent: it will be replaced.
    pub(super) fn load(&self, name: &KernelName) -> Option<CompiledKernel> {
        let path = self.path(name);
        let bundle = Bundle::open(&path).ok()?;
        let kernel = bundle.get(name.key).ok()??;
        if KernelName::of(&kernel) != *name {
            return None;
        }
        // A kernel in a folder that cannot be written is still used; only the file's time of use stays old.
        if bundle.is_packed() {
            if let Ok(file) = OpenOptions::new().append(true).open(&path) {
                let _ = file.set_modified(SystemTime::now());
            }
        } else {
            let _ = bundle.to_bytes_quickly().map(|bytes| write_whole(&path, &bytes));
        }
        Some(Arc::unwrap_or_clone(kernel))
    }

    pub(super) fn store(&self, kernel: &Arc<CompiledKernel>) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let bytes = Bundle::new("", [Arc::clone(kernel)])
            .to_bytes_quickly()
            .map_err(|error| io::Error::other(error.to_string()))?;
        let path = self.path(&KernelName::of(kernel));
        self.make_room(&path, bytes.len() as u64)?;
        write_whole(&path, &bytes)
    }

    /// Takes the lock for compiling this kernel, once no other process compiles it. `None` on a file system without
    /// locks, or if another process holds the lock for longer than any kernel compiles; two processes may then
    /// compile the same kernel. `say` is given a line for the user.
    pub(super) fn lock(&self, name: &KernelName, mut say: impl FnMut(&str)) -> Option<FileLock> {
        fs::create_dir_all(&self.folder).ok()?;
        let path = self.lock_path(name);
        match lock(&path, self.patience, &mut say).ok()? {
            Locked::Alone(lock) => Some(lock),
            Locked::Held => {
                say(&format!("fmha: {} is still held; this process compiles without it", path.display()));
                None
            }
        }
    }

    /// Path of the kernel's lock: one of 256 files, however many kernels there are.
    pub(super) fn lock_path(&self, name: &KernelName) -> PathBuf {
        self.folder.join(format!("{}.lock", &name.hex()[..2]))
    }

    /// Removes the unfinished files of killed writers. Then removes the kernels that were unused for longest, until
    /// the file at `new`, of `bytes`, fits the limit together with the rest. Other files of the folder are not
    /// touched.
    ///
    /// # Errors
    /// The other kernels were used recently and leave no room; what the system said.
    fn make_room(&self, new: &Path, bytes: u64) -> io::Result<()> {
        let now = SystemTime::now();
        let mut kernels = Vec::new();
        for entry in fs::read_dir(&self.folder)?.flatten() {
            // A file that another process has just removed does not count.
            let Ok(metadata) = entry.metadata() else { continue };
            let modified = metadata.modified()?;
            // A wrong clock may place a use in the future; such a distance counts as time unused too.
            let unused_for = now.duration_since(modified).unwrap_or_else(|error| error.duration());
            let path = entry.path();
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                if unused_for > ORPHANED_AFTER {
                    let _ = fs::remove_file(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "fmha") && path != new {
                kernels.push((unused_for, metadata.len(), path));
            }
        }
        let mut total = bytes + kernels.iter().map(|(_, bytes, _)| bytes).sum::<u64>();
        kernels.sort_unstable();
        while total > self.limit_bytes {
            let Some((_, size, path)) = kernels.pop_if(|(unused_for, ..)| *unused_for > IN_USE_FOR) else {
                return Err(io::Error::other(format!(
                    "it would take {total} bytes of {}, and the others were used within {} hours",
                    self.limit_bytes,
                    IN_USE_FOR.as_secs() / 3600
                )));
            };
            // A file that cannot be removed was probably removed by another process that makes room, which takes
            // the same files first.
            match fs::remove_file(path) {
                Ok(()) => total -= size,
                Err(error) if error.kind() == io::ErrorKind::NotFound => total -= size,
                Err(_) => (),
            }
        }
        Ok(())
    }
}
