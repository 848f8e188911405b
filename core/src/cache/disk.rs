//! The disk cache: a folder of bundles of one kernel each. Safe with any number of processes at once:
//! a file appears whole by being renamed, and one that is not whole is not taken.

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

/// Bytes that the folder may have: some thousand kernels. Beyond it, those unused for longest go.
const LIMIT_BYTES: u64 = 1 << 30;

/// An unfinished file this old has no writer any more: writing one takes less than a second.
const ORPHANED_AFTER: Duration = Duration::from_secs(600);

/// `FMHA_CACHE_DIR`, else `fmha` in the user's cache folder as the XDG Base Directory Specification
/// (0.8) has it; none if the variable says `none`, or where there is no home: a home is never made, and a cache folder
/// only beneath one, so that a process of root leaves nothing where a variable is wrong.
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

/// Why there is no [`folder`].
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

    /// The kernel, if a whole file has it. Any other file is as good as none: it will be replaced.
    pub(super) fn load(&self, name: &KernelName) -> Option<CompiledKernel> {
        let path = self.path(name);
        let kernel = Bundle::open(&path).ok()?.get(name.key).ok()??;
        if KernelName::of(&kernel) != *name {
            return None;
        }
        // A folder that cannot be written still serves; its files only look unused.
        if let Ok(file) = OpenOptions::new().append(true).open(&path) {
            let _ = file.set_modified(SystemTime::now());
        }
        Some(Arc::unwrap_or_clone(kernel))
    }

    pub(super) fn store(&self, kernel: &Arc<CompiledKernel>) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let bytes = Bundle::new("", [Arc::clone(kernel)])
            .to_plain_bytes()
            .map_err(|error| io::Error::other(error.to_string()))?;
        write_whole(&self.path(&KernelName::of(kernel)), &bytes)?;
        self.trim()
    }

    /// Waits until no other process compiles what this one is about to; `None` on a file system without locks, and where
    /// another process holds the lock for longer than any kernel compiles: two may then compile the same. `say` is
    /// given a line for the user.
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

    /// One of 256 files, however many kernels there are.
    pub(super) fn lock_path(&self, name: &KernelName) -> PathBuf {
        self.folder.join(format!("{}.lock", &name.hex()[..2]))
    }

    /// Removes what writers that were killed have left, and what was unused for longest until the rest is
    /// within the limit.
    fn trim(&self) -> io::Result<()> {
        let now = SystemTime::now();
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder)?.flatten() {
            // What another process has just removed is not there to be counted.
            let Ok(metadata) = entry.metadata() else { continue };
            let modified = metadata.modified()?;
            let unfinished = entry.file_name().to_string_lossy().starts_with(UNFINISHED);
            let age = now.duration_since(modified).unwrap_or_default();
            if unfinished && age > ORPHANED_AFTER && fs::remove_file(entry.path()).is_ok() {
                continue;
            }
            files.push((modified, metadata.len(), entry.path()));
        }
        let mut bytes: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        files.sort_unstable();
        for (_, size, path) in files {
            if bytes <= self.limit_bytes {
                break;
            }
            if path.extension().is_some_and(|extension| extension == "fmha") && fs::remove_file(path).is_ok()
            {
                bytes -= size;
            }
        }
        Ok(())
    }
}
