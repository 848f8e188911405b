//! The file of a device's measured tiles.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{TileClass, TunedTile};
use crate::cache::{self, FileLock, Locked, Patience};
use crate::error::{Error, Result};
use crate::records::{TUNE, record};
use crate::source::{Header, KernelSource};

/// A kernel whose measured tiles are stored.
#[derive(Clone, Copy, Debug)]
pub struct TunedKernel<'a> {
    /// Name under which the kernel's tiles are stored, such as `sm90-bwd`.
    pub label: &'a str,
    /// The headers that the entries of its launches include.
    pub headers: &'a [&'a str],
}

/// The measured tiles of one device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TunedTiles {
    /// Folder of the file, if any.
    folder: Option<PathBuf>,
    device: String,
    /// Hash of each kernel's text: a tile measured with another text is not used.
    texts: BTreeMap<String, String>,
    tiles: BTreeMap<String, Kept>,
}

/// Contents of the file of measured tiles.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Contents {
    /// Device name, and other properties of it on which a tile depends.
    device: String,
    tiles: BTreeMap<String, Kept>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Kept {
    kernel: String,
    text: String,
    tile: TunedTile,
}

impl TunedTiles {
    /// Loads the tiles of `device` from the cache folder, for `kernels` with their present text in `headers`.
    /// The result is empty if the file is missing or incomplete.
    ///
    /// # Errors
    /// A value of `FMHA_CACHE_DIR` that is not UTF-8.
    pub fn load(device: &str, kernels: &[TunedKernel<'_>], headers: &[Header]) -> Result<Self> {
        Ok(Self::load_from(cache::folder()?, device, kernels, headers))
    }

    /// Loads the tiles like [`load`](Self::load), from a folder of the caller's choice, or from none.
    #[must_use]
    pub fn load_from(
        folder: Option<PathBuf>,
        device: &str,
        kernels: &[TunedKernel<'_>],
        headers: &[Header],
    ) -> Self {
        let text = |kernel: &TunedKernel<'_>| {
            let entry: String =
                kernel.headers.iter().map(|header| format!("#include <{header}>\n")).collect();
            let headers = headers.to_vec();
            cache::headers_hash(KernelSource::new(entry, move || headers.clone()).headers())
        };
        let texts: BTreeMap<_, _> =
            kernels.iter().map(|kernel| (kernel.label.to_owned(), text(kernel))).collect();
        let mut tiles =
            folder.as_deref().map_or_else(BTreeMap::new, |folder| read(&file(folder, device), device));
        tiles.retain(|_, kept| texts.get(&kept.kernel) == Some(&kept.text));
        Self { folder, device: device.to_owned(), texts, tiles }
    }

    /// The stored tile for a class of problems, for the kernel with this [label](TunedKernel::label).
    #[must_use]
    pub fn get(&self, label: &str, class: &TileClass) -> Option<&TunedTile> {
        self.tiles.get(&class.key(label)).map(|kept| &kept.tile)
    }

    /// Stores a tile for a class of problems, and keeps tiles that other processes have stored meanwhile. Returns
    /// the file's path. The loaded table does not change; the next [`load`](Self::load) finds the tile.
    ///
    /// # Errors
    /// [`Error::System`] with what the system said, or that there is no cache folder.
    pub fn keep(&self, label: &str, class: &TileClass, tile: TunedTile) -> Result<PathBuf> {
        let folder = self.folder.as_deref().ok_or_else(|| Error::System {
            what: "tiles".to_owned(),
            text: format!("{}: 0 folders to keep them in", cache::why_no_folder()),
        })?;
        let path = file(folder, &self.device);
        let failed = |error: std::io::Error| Error::System {
            what: path.display().to_string(),
            text: error.to_string(),
        };
        // The lock keeps other processes from writing between the reading and the writing.
        let _lock = lock(&path, Patience::USUAL).map_err(failed)?;
        let mut tiles = read(&path, &self.device);
        let text = self.texts.get(label).cloned().unwrap_or_default();
        tiles.insert(class.key(label), Kept { kernel: label.to_owned(), text, tile });
        let contents = Contents { device: self.device.clone(), tiles };
        let bytes = serde_json::to_vec_pretty(&contents).map_err(|error| failed(error.into()))?;
        cache::write_file(&path, &bytes).map_err(failed)?;
        record!(info, TUNE, "tile of {label} kept in {}", path.display());
        Ok(path)
    }
}

fn file(folder: &Path, device: &str) -> PathBuf {
    let name: String = device.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    folder.join("tiles").join(name + ".json")
}

fn read(path: &Path, device: &str) -> BTreeMap<String, Kept> {
    let contents = std::fs::read(path).ok().and_then(|bytes| serde_json::from_slice::<Contents>(&bytes).ok());
    contents.filter(|contents| contents.device == device).unwrap_or_default().tiles
}

/// Takes the lock for writing; the returned file unlocks when dropped. The lock file is never replaced: a lock on a
/// replaced file would lock nothing.
fn lock(path: &Path, patience: Patience) -> std::io::Result<FileLock> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let beside = path.with_extension("lock");
    match cache::lock(&beside, patience, cache::say)? {
        Locked::Alone(lock) => Ok(lock),
        Locked::Held => {
            let text = format!("another process has held it for {} s", patience.ends_after.as_secs());
            Err(std::io::Error::new(std::io::ErrorKind::TimedOut, format!("{}: {text}", beside.display())))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::time::Duration;

    use super::*;

    #[test]
    fn tiles_whose_file_another_process_holds_are_an_error_and_no_wait_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(folder.path(), "a device");
        let patience = Patience { says_after: Duration::ZERO, ends_after: Duration::from_millis(20) };
        let held = lock(&path, patience).unwrap();
        let text = lock(&path, patience).unwrap_err().to_string();
        assert!(text.contains("a-device.lock") && text.contains("0 s"), "{text}");
        drop(held);
        lock(&path, patience).unwrap();
    }
    use crate::{DType, Dims, FwdProblem};

    /// The class of calls with `batch` sequences.
    fn class(batch: u32) -> TileClass {
        let dims = Dims::batch(batch).seqlens(4096, 4096).heads(12, 4).head_dim(64);
        TileClass::of_fwd(&FwdProblem::batch(DType::F16, dims))
    }

    fn headers() -> Vec<Header> {
        let header = |name, text: &str| Header::rendered(name, text.to_owned());
        vec![
            header("one.h", "one\n#include <both.h>"),
            header("two.h", "two"),
            header("both.h", "both"),
            header("after_two.h", "after two"),
        ]
    }

    const KERNELS: [TunedKernel<'_>; 2] = [
        TunedKernel { label: "one", headers: &["one.h"] },
        TunedKernel { label: "two", headers: &["two.h", "after_two.h"] },
    ];

    fn tile(block_m: u32) -> TunedTile {
        let tile = vec![("block_m".to_owned(), block_m.to_string())];
        TunedTile { tile, seconds: 1e-5, default_seconds: 1.25e-5 }
    }

    fn load(folder: &Path, headers: &[Header]) -> TunedTiles {
        TunedTiles::load_from(Some(folder.to_owned()), "a device, 8 units", &KERNELS, headers)
    }

    #[test]
    fn what_is_kept_reads_back_for_this_device_and_this_text() {
        let folder = tempfile::tempdir().unwrap();
        for (label, block_m) in [("one", 64), ("two", 128)] {
            load(folder.path(), &headers()).keep(label, &class(2), tile(block_m)).unwrap();
        }
        let kept = |headers: &[Header]| {
            let tiles = load(folder.path(), headers);
            ["one", "two"].map(|label| tiles.get(label, &class(2)).cloned())
        };
        assert_eq!(kept(&headers()), [Some(tile(64)), Some(tile(128))]);
        for (header, expected, words) in [
            (2, [None, Some(tile(128))], "the text of kernel one alone is another"),
            (3, [Some(tile(64)), None], "that of kernel two's second launch"),
        ] {
            let mut changed = headers();
            changed[header].text += " and a comment";
            assert_eq!(kept(&changed), expected, "{words}");
        }
        let folder = Some(folder.path().to_owned());
        let other = TunedTiles::load_from(folder, "a device, 9 units", &KERNELS, &headers());
        assert_eq!(other.get("one", &class(2)), None);
    }

    #[test]
    fn tiles_are_of_the_cache_folder_where_the_caller_names_none() {
        let tiles = TunedTiles::load("a device", &KERNELS, &headers()).unwrap();
        assert_eq!((tiles.folder, tiles.device.as_str()), (cache::folder().unwrap(), "a device"));
        assert_eq!(tiles.texts.into_keys().collect::<Vec<_>>(), ["one", "two"]);
    }

    #[test]
    fn tiles_that_are_kept_at_the_same_time_are_all_kept() {
        const WRITERS: u32 = 8;
        let folder = tempfile::tempdir().unwrap();
        let start = Barrier::new(WRITERS as usize);
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let (start, folder) = (&start, folder.path());
                scope.spawn(move || {
                    let tiles = load(folder, &headers());
                    start.wait();
                    tiles.keep("one", &class(1 << writer), tile(writer)).unwrap();
                });
            }
        });
        let tiles = load(folder.path(), &headers());
        let kept = (0..WRITERS).filter(|&writer| tiles.get("one", &class(1 << writer)).is_some()).count();
        assert_eq!(kept, WRITERS as usize);
    }

    #[test]
    fn without_a_folder_there_is_none_to_keep_tiles_in() {
        let tiles = TunedTiles::load_from(None, "a device", &KERNELS, &headers());
        let error = tiles.keep("one", &class(2), tile(64)).unwrap_err().to_string();
        assert!(error.contains("FMHA_CACHE_DIR") && error.contains("0 folders"), "{error}");
    }
}
