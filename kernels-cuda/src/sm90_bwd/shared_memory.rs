//! Shared memory of a CTA: the parts that a tile needs, and its barriers.

use fmha_core::spec::BwdSpec;

use super::spec::padded_dim;
use super::tile::Sm90BwdTile;
use super::walk::BwdWalk;
use crate::round_up;

/// Number of tile indices in shared memory: the present tile's, and its successor's, which is loaded meanwhile.
pub(super) const TILE_INDEX_SLOTS: i32 = 2;

impl Sm90BwdTile {
    /// Dynamic shared memory of a CTA of the main kernel; the entry asserts that the device agrees.
    #[must_use]
    pub const fn smem_bytes(&self, spec: &BwdSpec) -> i32 {
        let dim = padded_dim(spec);
        let of_v = self.v_columns(spec);
        let keys = tile_bytes(self.block_n, dim) + tile_bytes(self.block_n, of_v) + self.other_bytes(dim);
        let queries =
            self.stages_q * tile_bytes(self.block_m, dim) + self.stages_dout * tile_bytes(self.block_m, of_v);
        let ds = self.ds_bytes();
        let dq_bytes = round_up(4 * self.block_m * self.dq_dim(spec), 1024);
        let dq = if self.adds_from_registers() { 1024 } else { dq_bytes / self.walk.cluster() };
        let sums = if self.finishes_dq() { dq_bytes } else { 0 };
        let stats = 4 * self.block_m * (self.stages_q + self.stages_dout);
        // Dropout's part of each warp: four quads, and the queries of a block (the device's `DropoutParts`).
        let parts = if spec.fwd.dropout && matches!(self.walk, BwdWalk::LateDp) {
            round_up(4 * self.num_consumers() * (4 * 16 + 8 * self.block_m), 1024)
        } else {
            0
        };
        // Tile indices and a flag follow the barriers.
        let words = 4 * (TILE_INDEX_SLOTS + 1);
        parts + round_up(keys + queries + ds + dq + sums + stats + 8 * self.num_barriers() + words, 1024)
    }

    /// Bytes of shared memory for dS, and for P where consumers need each other's P.
    pub(super) const fn ds_bytes(&self) -> i32 {
        let of_probs = if self.has_one_probs() {
            1
        } else if self.walk.splits_dims() {
            self.stages_ds
        } else {
            0
        };
        (self.stages_ds + of_probs) * tile_bytes(self.block_m, self.block_n)
    }

    /// Bytes of shared memory for data of the cluster's other CTA: columns of K, and dS.
    const fn other_bytes(&self, dim: i32) -> i32 {
        if self.walk.cluster() == 1 {
            return 0;
        }
        tile_bytes(self.block_n, round_up(dim / self.walk.cluster(), 64))
            + self.stages_ds * tile_bytes(self.block_m, self.block_n)
    }

    /// The main kernel's mbarriers, and how many there are of each: the device's `Smem`.
    #[must_use]
    pub const fn barriers(&self) -> [(&'static str, i32); 18] {
        let (of_q, of_dout, of_ds) = (self.stages_q, self.stages_dout, self.stages_ds);
        let of_dq = self.num_consumers();
        [
            ("k_full", 1),
            ("v_full", 1),
            ("kv_empty", 1),
            ("q_full", of_q),
            ("q_empty", of_q),
            ("dout_full", of_dout),
            ("dout_empty", of_dout),
            ("other_ds_full", of_ds),
            ("other_ds_empty", of_ds),
            ("probs_empty", 1),
            ("dq_full", of_dq),
            ("dq_empty", of_dq),
            ("sums_full", 1),
            ("dq_admitted", 1),
            ("dq_added", 1),
            ("dq_added_seen", 1),
            ("tile_index_full", TILE_INDEX_SLOTS),
            ("tile_index_empty", TILE_INDEX_SLOTS),
        ]
    }

    const fn num_barriers(&self) -> i32 {
        let barriers = self.barriers();
        let (mut i, mut sum) = (0, 0);
        while i < barriers.len() {
            sum += barriers[i].1;
            i += 1;
        }
        sum
    }

    /// Dynamic shared memory of a CTA of dBias' kernel with its own [tile](Self::of_dbias); the entry asserts that
    /// the device's size is equal.
    #[must_use]
    pub const fn dbias_smem_bytes(&self, spec: &BwdSpec) -> i32 {
        let dim = padded_dim(spec);
        let step = 2 * tile_bytes(self.block_n, dim) + 2 * tile_bytes(self.block_m, dim);
        round_up(self.stages_dbias * (step + 8 * self.block_m + 16), 1024)
    }
}

const fn tile_bytes(rows: i32, dim: i32) -> i32 {
    round_up(rows * dim * 2, 1024)
}
