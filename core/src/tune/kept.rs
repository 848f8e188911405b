//! The file of a device's measured tiles.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::TunedTile;
use crate::cache;
use crate::dtype::DType;
use crate::env;
use crate::error::{Error, Result};
use crate::layout::{Shape, Strides};
use crate::operation::Operation;
use crate::problem::FwdProblem;
use crate::source::{Header, KernelSource};
use crate::spec::FwdSpec;

/// One device's tiles.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TunedTiles {
    device: String,
    /// The hash of each kernel's text: what was measured of another says nothing.
    texts: BTreeMap<String, String>,
    tiles: BTreeMap<String, Kept>,
}

/// What lies in the file.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Contents {
    /// Which device, and whatever else of it a tile depends on.
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
    /// What is kept for `device`, of `kernels` as their text is now: each with the header that its entry
    /// includes. Nothing, where there is no such file or it is not whole.
    ///
    /// # Errors
    /// A value of `FMHA_CACHE_DIR` that is not UTF-8.
    pub fn load(device: &str, kernels: &[(&str, &str)], headers: &[Header]) -> Result<Self> {
        let folder = cache::folder()?;
        Ok(Self::load_from(folder.as_deref(), device, kernels, headers))
    }

    fn load_from(folder: Option<&Path>, device: &str, kernels: &[(&str, &str)], headers: &[Header]) -> Self {
        let text = |include: &str| {
            let source = KernelSource::new(format!("#include <{include}>\n"), headers.to_vec());
            cache::headers_hash(&source.headers)
        };
        let texts = kernels.iter().map(|&(kernel, include)| (kernel.to_owned(), text(include))).collect();
        let mut tiles = Self { device: device.to_owned(), texts, tiles: BTreeMap::new() };
        if let Some(folder) = folder {
            tiles.tiles = read(&file(folder, device), device);
            let Self { texts, tiles, .. } = &mut tiles;
            tiles.retain(|_, kept| texts.get(&kept.kernel) == Some(&kept.text));
        }
        tiles
    }

    /// The tile of a kernel for a problem, if one was kept for its like.
    #[must_use]
    pub fn get(&self, kernel: &str, problem: &FwdProblem) -> Option<&TunedTile> {
        self.tiles.get(&key(kernel, problem)).map(|kept| &kept.tile)
    }

    /// Keeps a tile for a problem and its like, beside what others have kept meanwhile; returns where.
    ///
    /// # Errors
    /// What the system said, or that there is no cache folder.
    pub fn keep(&self, kernel: &str, problem: &FwdProblem, tile: TunedTile) -> Result<PathBuf> {
        let folder = cache::folder()?.ok_or_else(|| Error::System {
            what: "tiles".to_owned(),
            text: format!("{} is none: 0 folders to keep them in", env::CACHE_DIR.name),
        })?;
        self.keep_in(&folder, kernel, problem, tile)
    }

    fn keep_in(&self, folder: &Path, kernel: &str, problem: &FwdProblem, tile: TunedTile) -> Result<PathBuf> {
        let path = file(folder, &self.device);
        let failed = |error: std::io::Error| Error::System {
            what: path.display().to_string(),
            text: error.to_string(),
        };
        // Between the reading and the writing nobody else writes.
        let _lock = lock(&path).map_err(failed)?;
        let mut tiles = read(&path, &self.device);
        let text = self.texts.get(kernel).cloned().unwrap_or_default();
        tiles.insert(key(kernel, problem), Kept { kernel: kernel.to_owned(), text, tile });
        let contents = Contents { device: self.device.clone(), tiles };
        let bytes = serde_json::to_vec_pretty(&contents).map_err(|error| failed(error.into()))?;
        cache::write_file(&path, &bytes).map_err(failed)?;
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

/// Unlocks when dropped. The file beside stays, for a lock on a file that is replaced locks nothing.
fn lock(path: &Path) -> std::io::Result<File> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let beside = path.with_extension("lock");
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(beside)?;
    file.lock()?;
    Ok(file)
}

/// Problems are alike that compile alike, have the same GQA ratio and alike strides, and whose lengths,
/// heads and batch have the same powers of two.
fn key(kernel: &str, problem: &FwdProblem) -> String {
    let dims = problem.dims;
    let power = |n: u32| n.checked_ilog2().map_or("0".to_owned(), |log| format!("2^{log}"));
    let strides = [
        ("q", problem.q, problem.shape_q(), problem.dtype_qk),
        ("k", problem.k, problem.shape_k(), problem.dtype_qk),
        ("v", problem.v, problem.shape_v(), problem.dtype_v),
        ("o", problem.o, problem.shape_o(), problem.dtype_o),
    ];
    let strides: Vec<_> =
        strides.map(|(name, strides, shape, dtype)| name.to_owned() + &class(strides, shape, dtype)).to_vec();
    format!(
        "{} {kernel} {:?} q {} k {} heads {} of {} batch {} strides {}",
        Operation::Forward,
        FwdSpec::of(problem),
        power(dims.seqlen_q),
        power(dims.seqlen_k),
        power(dims.num_heads_q),
        problem.gqa_ratio(),
        power(dims.batch),
        strides.join(" ")
    )
}

/// What a kernel can make of a tensor's strides: the bytes, 16 at most, that divide each of them (which
/// decides how it can be copied), whether heads or rows lie next to each other, whether anything is
/// broadcast.
fn class(strides: Strides, shape: Shape, dtype: DType) -> String {
    let size = dtype.size_bytes().cast_signed();
    let axes = [
        (strides.batch, shape.batch),
        (strides.seq, shape.seq),
        (strides.head, shape.head),
        (strides.dim, shape.dim),
    ];
    // Along the axis of stride 1 a kernel reads on.
    let counts = axes.into_iter().filter(|&(stride, extent)| extent > 1 && stride != 1);
    let counts: Vec<i64> = counts.map(|(stride, _)| stride.saturating_mul(size)).collect();
    let divides = |bytes: &i64| counts.iter().all(|stride| stride % bytes == 0);
    let bytes = [16, 8, 4, 2].into_iter().find(divides).unwrap_or(1);
    let order = match (shape.head > 1 && shape.seq > 1, strides.head < strides.seq) {
        (true, true) => "-heads",
        (true, false) => "-rows",
        (false, _) => "",
    };
    let broadcast = if counts.contains(&0) { "-broadcast" } else { "" };
    format!("{bytes}{order}{broadcast}")
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::Dims;

    const DIMS: Dims = Dims {
        batch: 2,
        seqlen_q: 4096,
        seqlen_k: 4096,
        num_heads_q: 12,
        num_heads_kv: 4,
        head_dim_qk: 64,
        head_dim_v: 64,
    };

    fn problem(change: impl FnOnce(&mut FwdProblem)) -> FwdProblem {
        let mut problem = FwdProblem::batch(DType::F16, DIMS);
        change(&mut problem);
        problem
    }

    fn headers() -> Vec<Header> {
        let header = |name, text: &str| Header::rendered(name, text.to_owned());
        vec![header("one.h", "one\n#include <both.h>"), header("two.h", "two"), header("both.h", "both")]
    }

    const KERNELS: [(&str, &str); 2] = [("one", "one.h"), ("two", "two.h")];

    fn tile(block_m: u32) -> TunedTile {
        let tile = vec![("block_m".to_owned(), block_m.to_string())];
        TunedTile { tile, seconds: 1e-5, default_seconds: 1.25e-5 }
    }

    fn load(folder: &Path, headers: &[Header]) -> TunedTiles {
        TunedTiles::load_from(Some(folder), "a device, 8 units", &KERNELS, headers)
    }

    #[test]
    fn a_tile_serves_problems_of_its_class_alone() {
        let base = key("one", &problem(|_| ()));
        let same: [fn(&mut FwdProblem); 3] = [
            |p| p.softmax_scale = Some(0.3),
            // Longer, and as long a batch as before.
            |p| *p = FwdProblem::batch(DType::F16, Dims { seqlen_q: 5000, batch: 3, ..DIMS }),
            // Gaps between rows that 16 bytes divide.
            |p| p.k.seq += 8,
        ];
        for (at, change) in same.into_iter().enumerate() {
            assert_eq!(key("one", &problem(change)), base, "{at}");
        }
        let others: [fn(&mut FwdProblem); 8] = [
            |p| *p = FwdProblem::batch(DType::F16, Dims { seqlen_q: 2048, ..DIMS }),
            |p| p.write_lse = !p.write_lse,
            // Ratio 2, which has the same power of two as 3.
            |p| *p = FwdProblem::batch(DType::F16, Dims { num_heads_kv: 6, ..DIMS }),
            |p| p.k.seq += 1,
            |p| p.o.seq += 4,
            |p| p.q = Strides::bhsd(p.shape_q()),
            |p| p.v.head = 0,
            |p| p.v.batch = 0,
        ];
        for (at, change) in others.into_iter().enumerate() {
            assert_ne!(key("one", &problem(change)), base, "{at}");
        }
        assert_ne!(key("two", &problem(|_| ())), base);
    }

    #[test]
    fn what_is_kept_reads_back_for_this_device_and_this_text() {
        let folder = tempfile::tempdir().unwrap();
        let problem = problem(|_| ());
        for (kernel, block_m) in [("one", 64), ("two", 128)] {
            load(folder.path(), &headers()).keep_in(folder.path(), kernel, &problem, tile(block_m)).unwrap();
        }
        let kept = |headers: &[Header]| {
            let tiles = load(folder.path(), headers);
            ["one", "two"].map(|kernel| tiles.get(kernel, &problem).cloned())
        };
        assert_eq!(kept(&headers()), [Some(tile(64)), Some(tile(128))]);
        let mut changed = headers();
        changed[2].text += " and a comment";
        assert_eq!(kept(&changed), [None, Some(tile(128))], "the text of kernel one alone is another");
        let other = TunedTiles::load_from(Some(folder.path()), "a device, 9 units", &KERNELS, &headers());
        assert_eq!(other.get("one", &problem), None);
    }

    #[test]
    fn tiles_that_are_kept_at_the_same_time_are_all_kept() {
        const WRITERS: u32 = 8;
        let folder = tempfile::tempdir().unwrap();
        let problem = |batch: u32| FwdProblem::batch(DType::F16, Dims { batch: 1 << batch, ..DIMS });
        let start = Barrier::new(WRITERS as usize);
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let (start, folder) = (&start, folder.path());
                scope.spawn(move || {
                    let tiles = load(folder, &headers());
                    start.wait();
                    tiles.keep_in(folder, "one", &problem(writer), tile(writer)).unwrap();
                });
            }
        });
        let tiles = load(folder.path(), &headers());
        let kept = (0..WRITERS).filter(|&writer| tiles.get("one", &problem(writer)).is_some()).count();
        assert_eq!(kept, WRITERS as usize);
    }
}
