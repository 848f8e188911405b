//! A V of FP8 that is converted once for all tiles, in the workspace, to the layout for the products.

use fmha_core::abi::{DevPtr, Untyped};
use fmha_core::source::{Entry, KernelSource, Literal};
use fmha_core::spec::FwdSpec;
use fmha_core::{FwdProblem, abi_enum, abi_struct};

use super::entries::rendered;
use super::{Sm90Tile, ValueProduct, elem_bytes, padded_dim};
use crate::schedule::TileSchedule;

/// The launch's name in plans.
pub const PREPARE_NAME: &str = "prepare_values";

/// Threads of a CTA of the launch that prepares V; each warp has a unit of work.
pub const PREPARE_THREADS: u32 = 256;

/// Where a row-major V of FP8 is converted to f16, or transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PrepareV {
    /// V is prepared in shared memory, by each tile's CTA, block by block. A V that needs no preparation is loaded
    /// unchanged.
    InTile,
    /// V is prepared in the workspace, by a launch before the kernel.
    Before,
    /// V is prepared in the workspace by spare warps of the kernel's CTAs, while tiles are computed.
    Beside,
}

abi_enum!(PrepareV { InTile, Before, Beside });

abi_struct! {
    /// Kernel argument that describes a V prepared in the workspace.
    pub struct PreparedValues {
        /// Prepared blocks of V, `[sequence, kv head, block]`.
        pub blocks: DevPtr<Untyped>,
        /// Counters if V is prepared by spare warps: work items taken, then finished work items of each block.
        /// Zeroed before each launch.
        pub counts: DevPtr<i32>,
        /// Number of blocks of the longest sequence.
        pub num_blocks: i32,
        /// Number of sequences times kv heads.
        pub num_heads: i32,
        /// Number of kv heads whose blocks are prepared together.
        pub heads_per_group: i32,
        /// Number of units of work; a unit is some keys of a block of a kv head.
        pub num_units: i32,
    }
}

impl PreparedValues {
    /// Prepared V of a problem's longest sequence, without addresses.
    ///
    /// # Errors
    /// 2^30 work items or more, with the fields that cause them.
    pub fn new(
        problem: &FwdProblem,
        tile: &Sm90Tile,
        schedule: &TileSchedule,
        num_sms: u32,
    ) -> Result<Self, String> {
        let spec = FwdSpec::of(problem);
        let dims = problem.dims;
        let num_blocks = i64::from(dims.seqlen_k.div_ceil(tile.block_n.unsigned_abs()));
        let num_heads = i64::from(dims.batch) * i64::from(dims.num_heads_kv);
        let num_units = num_heads.saturating_mul(num_blocks * units_per_block(&spec, tile));
        if num_units >= 1 << 30 {
            return Err(format!(
                "tile block_n={}: {num_heads} kv heads of {} keys are {num_units} units of V, not below 2^30",
                tile.block_n, dims.seqlen_k
            ));
        }
        // Heads of a group. With spare warps: an L2 head group, whose tiles run together, or the heads of the first
        // tiles of all CTAs, which all wait for their first blocks. A launch takes all heads of a row, which are
        // adjacent.
        let heads_per_group = match tile.prepare_v {
            PrepareV::Beside => {
                let first_heads = tile
                    .grid(schedule, num_sms)
                    .div_ceil((tile.cluster * schedule.num_m_blocks.max(1)).unsigned_abs());
                let of_schedule = i64::from(first_heads).max(schedule.heads_per_l2_group.into());
                let num_of_schedule = i64::from(schedule.num_heads.max(1));
                ((of_schedule * num_heads + num_of_schedule - 1) / num_of_schedule).clamp(1, num_heads.max(1))
            }
            PrepareV::InTile | PrepareV::Before => i64::from(dims.num_heads_kv),
        };
        Ok(Self {
            blocks: DevPtr::NULL,
            counts: DevPtr::NULL,
            num_blocks: num_blocks as i32,
            num_heads: num_heads as i32,
            heads_per_group: heads_per_group as i32,
            num_units: num_units as i32,
        })
    }

    /// Number of CTAs of the launch that prepares V before the kernel.
    #[must_use]
    pub fn grid(&self) -> u32 {
        self.num_units.unsigned_abs().div_ceil(PREPARE_THREADS / 32).max(1)
    }

    /// Bytes of `counts`.
    #[must_use]
    pub fn counts_bytes(&self, tile: &Sm90Tile) -> u64 {
        let counts = 1 + u64::from(self.num_heads.unsigned_abs()) * u64::from(self.num_blocks.unsigned_abs());
        if tile.prepare_v == PrepareV::Beside { 4 * counts } else { 0 }
    }

    /// Bytes of `blocks`, which holds the prepared blocks of V. Room for one block at least, since a tensor map
    /// needs memory that is not empty.
    #[must_use]
    pub fn blocks_bytes(&self, spec: &FwdSpec, tile: &Sm90Tile) -> u64 {
        let blocks = u64::from(self.num_heads.unsigned_abs()) * u64::from(self.num_blocks.unsigned_abs());
        blocks.max(1) * block_bytes(spec, tile)
    }
}

/// Bytes of a prepared block of V.
pub(super) fn block_bytes(spec: &FwdSpec, tile: &Sm90Tile) -> u64 {
    let [rows, columns] = tile.prepared_block(spec);
    u64::from((rows * columns * elem_bytes(tile.prepared_type(spec))).unsigned_abs())
}

/// Number of units of work in a block: the device's function of this name has the same rule.
fn units_per_block(spec: &FwdSpec, tile: &Sm90Tile) -> i64 {
    let dim = padded_dim(spec.head_dim_v);
    let keys = if (tile.pv != ValueProduct::F16 || dim <= 64) && tile.block_n % 32 == 0 { 32 } else { 16 };
    let parts = if tile.pv == ValueProduct::F16 { 1 } else { (dim + 63) / 64 };
    i64::from(tile.block_n / keys * parts)
}

/// An entry's assertion that host and device agree on the number of units.
pub(super) fn assert_units(spec: &FwdSpec, tile: &Sm90Tile) -> String {
    format!(
        "static_assert(sm90::units_per_block(kSpec, kTile) == {}, \"units of V: host and device disagree\"); ",
        units_per_block(spec, tile)
    )
}

/// The launch that prepares V before the kernel. Its arguments are `FwdParams` and [`PreparedValues`].
#[must_use]
pub fn prepare_values(spec: &FwdSpec, tile: &Sm90Tile) -> KernelSource {
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: "fmha/sm90/fwd/prepare_values.cuh",
        constants: &constants,
        bounds: &format!("__launch_bounds__({PREPARE_THREADS})"),
        params: "const __grid_constant__ FwdParams p, const __grid_constant__ PreparedValues values",
        call: &format!(
            "static_assert(sm90::kPrepareThreads == {PREPARE_THREADS}, \"host and device disagree\"); \
             {}sm90::prepare_values<kSpec, kTile>(p, values);",
            assert_units(spec, tile)
        ),
    };
    let (spec, tile) = (*spec, *tile);
    crate::source(entry.render(), move || rendered(&spec, &tile))
}
