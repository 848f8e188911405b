//! Tiles measured on one device: `fmha tune` keeps them beside the compiled kernels, plans read them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::cache;
use crate::error::{Error, Result};
use crate::problem::{FwdProblem, ValidFwd};
use crate::source::Header;
use crate::spec::FwdSpec;

/// `name=value` pairs, as [`PlanOptions::tile`](crate::PlanOptions::tile) takes them.
pub type TileOptions = Vec<(String, String)>;

/// A tile that was faster than its kernel's own choice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedTile {
    /// All of its knobs.
    pub tile: TileOptions,
    /// Median seconds of a call with it.
    pub seconds: f64,
    /// And with the kernel's own choice, in the same run.
    pub default_seconds: f64,
}

/// One device's tiles.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TunedTiles {
    /// Which device, and whatever else of it a tile depends on.
    device: String,
    /// Hash of the kernels' text: what was measured of others says nothing.
    kernels: String,
    tiles: BTreeMap<String, TunedTile>,
}

impl TunedTiles {
    /// What is kept for `device` and kernels of these headers; nothing, where there is no such file or
    /// it is not whole.
    #[must_use]
    pub fn load(device: &str, headers: &[Header]) -> Self {
        let kernels = cache::headers_hash(headers);
        let empty = Self { device: device.to_owned(), kernels, tiles: BTreeMap::new() };
        let kept = Self::path(device).and_then(|path| std::fs::read(path).ok());
        match kept.and_then(|bytes| serde_json::from_slice::<Self>(&bytes).ok()) {
            Some(kept) if kept.device == empty.device && kept.kernels == empty.kernels => kept,
            _ => empty,
        }
    }

    /// The tile of a problem, if one was kept for its like.
    #[must_use]
    pub fn get(&self, problem: &FwdProblem) -> Option<&TunedTile> {
        self.tiles.get(&Self::key(problem))
    }

    /// Keeps a tile for a problem and its like.
    pub fn insert(&mut self, problem: &FwdProblem, tile: TunedTile) {
        self.tiles.insert(Self::key(problem), tile);
    }

    /// Writes the file, whole or not at all; returns where.
    ///
    /// # Errors
    /// What the system said, or that there is no cache folder.
    pub fn save(&self) -> Result<PathBuf> {
        let path = Self::path(&self.device).ok_or_else(|| Error::System {
            what: "tiles".to_owned(),
            text: format!("{} is none: 0 folders to keep them in", crate::env::CACHE_DIR.name),
        })?;
        let failed = |error: std::io::Error| Error::System {
            what: path.display().to_string(),
            text: error.to_string(),
        };
        let bytes = serde_json::to_vec_pretty(self).map_err(|error| failed(error.into()))?;
        cache::write_file(&path, &bytes).map_err(failed)?;
        Ok(path)
    }

    fn path(device: &str) -> Option<PathBuf> {
        let name: String = device.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        Some(cache::folder()?.join("tiles").join(name + ".json"))
    }

    /// Problems are alike that compile alike and whose lengths, heads and batch have the same powers
    /// of two.
    fn key(problem: &FwdProblem) -> String {
        let dims = problem.dims;
        let power = |n: u32| n.checked_ilog2().map_or("0".to_owned(), |log| format!("2^{log}"));
        format!(
            "{:?} q {} k {} heads {} of {} batch {}",
            FwdSpec::of(problem),
            power(dims.seqlen_q),
            power(dims.seqlen_k),
            power(dims.num_heads_q),
            power(problem.gqa_ratio()),
            power(dims.batch)
        )
    }
}

/// A backend whose tiles can be measured.
pub trait Tune: Sync {
    /// The kernel's own choice for a problem, all knobs spelt out.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where no kernel with a tile takes the problem.
    fn default_tile(&self, problem: &ValidFwd) -> Result<TileOptions>;

    /// Each knob's values, in the order to try them; not all go together.
    fn knobs(&self) -> Vec<(&'static str, Vec<String>)>;

    /// Keeps a tile for this device; returns where.
    ///
    /// # Errors
    /// What the system said; [`Error::NoDevice`] for an emulated device, whose times are no device's.
    fn keep(&self, problem: &ValidFwd, tile: TunedTile) -> Result<PathBuf>;
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{DType, Dims};

    fn problem(seqlen: u32) -> FwdProblem {
        let dims = Dims {
            batch: 2,
            seqlen_q: seqlen,
            seqlen_k: seqlen,
            num_heads_q: 8,
            num_heads_kv: 2,
            head_dim_qk: 64,
            head_dim_v: 64,
        };
        FwdProblem::batch(DType::F16, dims)
    }

    #[test]
    fn a_tile_serves_problems_of_the_same_powers_of_two_alone() {
        let mut tiles = TunedTiles::default();
        let tile = TunedTile { tile: Vec::new(), seconds: 1.0, default_seconds: 2.0 };
        tiles.insert(&problem(4096), tile.clone());
        assert_eq!(tiles.get(&problem(5000)), Some(&tile));
        assert_eq!(tiles.get(&problem(2048)), None);
        assert_eq!(tiles.get(&FwdProblem { write_lse: true, ..problem(4096) }), None);
    }

    #[test]
    fn what_is_kept_reads_back() {
        let mut tiles = TunedTiles { device: "d".to_owned(), ..TunedTiles::default() };
        let tile = vec![("block_m".to_owned(), "128".to_owned())];
        tiles.insert(&problem(64), TunedTile { tile, seconds: 1e-5, default_seconds: 1.25e-5 });
        let text = serde_json::to_vec_pretty(&tiles).unwrap();
        assert_eq!(serde_json::from_slice::<TunedTiles>(&text).unwrap(), tiles);
    }
}
