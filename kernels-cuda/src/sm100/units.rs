//! Clocks that each unit of a multiprocessor needs for 128 queries and 128 keys, from the instructions of a tile:
//! docs/kernels/sm100-fwd.md and sm100-bwd.md derive the numbers. Modelled, never measured.

use fmha_core::spec::FwdSpec;

use super::{FAST_EXP_ARCH, Sm100Tile};
use crate::sm90;

/// Number of (query, key) pairs of a block.
pub const PAIRS: f64 = 128.0 * 128.0;

/// 16-bit multiply-adds that a multiprocessor's tensor cores do in a clock; they do twice as many 8-bit ones.
pub const PRODUCTS: f64 = 4096.0;
/// Number of f32 lanes of a multiprocessor.
const LANES: f64 = 128.0;
/// Bytes that shared memory moves in a clock.
pub(crate) const SHARED_BYTES: f64 = 128.0;
/// Assumed number of bytes that threads move to and from tensor memory in a clock: 128 lanes of 32 bits. No source
/// states it.
pub(crate) const TENSOR_MEMORY_BYTES: f64 = 512.0;
/// Assumed number of bytes that a multiprocessor moves to and from the L2 in a clock. No source states it.
pub(crate) const L2_BYTES: f64 = 64.0;

/// Exponentials of a multiprocessor's special-function units in a clock.
#[must_use]
pub fn exponentials(arch: &str) -> f64 {
    if arch == FAST_EXP_ARCH { 32.0 } else { 16.0 }
}

/// Clocks of each unit for a block of 128 queries and 128 keys.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Units {
    /// Clocks of matrix products.
    pub tensor: f64,
    /// Clocks of all exponentials of P, as if the special-function unit computed those that are polynomials too.
    pub exp: f64,
    /// Clocks of multiplications and additions in f32.
    pub floats: f64,
    /// Clocks of shared memory: it feeds the products, and loads and stores go through it.
    pub shared: f64,
    /// Clocks of threads' loads and stores of tensor memory.
    pub tensor_memory: f64,
    /// Clocks of the L2: bytes that TMA loads, and those added to dQ in memory.
    pub loads: f64,
}

impl Units {
    /// The units by name.
    #[must_use]
    pub const fn named(&self) -> [(&'static str, f64); 6] {
        [
            ("tensor cores", self.tensor),
            ("exponentials", self.exp),
            ("f32 lanes", self.floats),
            ("shared memory", self.shared),
            ("tensor memory", self.tensor_memory),
            ("TMA", self.loads),
        ]
    }

    /// Clocks of what a product waits for: the tensor cores, or the shared memory that feeds them.
    #[must_use]
    pub const fn matrix(&self) -> f64 {
        self.tensor.max(self.shared)
    }

    /// The units and the busiest one, for readers.
    #[must_use]
    pub fn words(&self) -> String {
        let named = self.named();
        // The first of two equal units is named: `max_by` returns the last, so the list is reversed.
        let busiest = named.into_iter().rev().max_by(|a, b| a.1.total_cmp(&b.1)).map_or("", |(name, _)| name);
        let clocks = named.map(|(name, clocks)| format!("{name} {clocks:.0}")).join(", ");
        format!("{clocks} for 128 queries x 128 keys; busiest: {busiest} (modelled)")
    }
}

/// Units of the forward with a tile, without modifiers and scales of blocks.
#[must_use]
pub fn forward(spec: &FwdSpec, tile: &Sm100Tile, arch: &str) -> Units {
    let dims = [spec.head_dim_qk, spec.head_dim_v].map(|dim| f64::from(sm90::padded_dim(dim)));
    let sizes = [spec.dtype_qk, spec.dtype_v].map(|dtype| dtype.size_bytes() as f64);
    let [row_qk, row_v] = [dims[0] * sizes[0], dims[1] * sizes[1]];
    let cluster = f64::from(tile.cluster);
    // A 16-bit V with an 8-bit Q has 16-bit products.
    let clocks = |dim: f64, size: f64| PAIRS * dim / (PRODUCTS * 2.0 / size);
    let q_reads = 128.0 * row_qk * 128.0 / f64::from(tile.block_n);
    let of_keys = 128.0 * (row_qk + row_v) / cluster;
    Units {
        tensor: clocks(dims[0], sizes[0]) + clocks(dims[1], sizes[1]),
        exp: PAIRS / exponentials(arch),
        floats: 2.0 * PAIRS / LANES,
        shared: (q_reads + of_keys) / SHARED_BYTES,
        tensor_memory: PAIRS * (4.0 + sizes[1]) / TENSOR_MEMORY_BYTES,
        loads: of_keys / f64::from(tile.num_q_tiles()) / L2_BYTES,
    }
}

#[cfg(test)]
mod tests {
    use fmha_core::{DType, MaskKind};

    use super::*;
    use crate::sm100::default_tile;

    /// Clocks of a block equal those in the table of docs/kernels/sm100-fwd.md.
    #[test]
    fn a_block_costs_the_clocks_of_the_page() {
        for (dtype, qk, v, tensor, shared) in [
            (DType::Bf16, 64, 64, 512.0, 384.0),
            (DType::Bf16, 128, 128, 1024.0, 768.0),
            (DType::Bf16, 192, 128, 1280.0, 1024.0),
            (DType::Bf16, 256, 256, 2048.0, 1024.0),
            (DType::E4m3Fn, 128, 128, 512.0, 384.0),
        ] {
            let spec = FwdSpec {
                head_dim_v: v,
                dtype_qk: dtype,
                dtype_v: dtype,
                ..FwdSpec::plain(DType::Bf16, qk, MaskKind::Full)
            };
            let tile = default_tile(&spec);
            let units = forward(&spec, &tile, "sm_100a");
            assert_eq!([units.tensor, units.shared, units.exp], [tensor, shared, 1024.0], "{dtype} {qk}/{v}");
            assert_eq!(forward(&spec, &tile, "sm_103a").exp, 512.0);
            let busiest = if tensor < 1024.0 { "exponentials" } else { "tensor cores" };
            assert!(units.words().ends_with(&format!("busiest: {busiest} (modelled)")), "{}", units.words());
        }
        let spec = FwdSpec::plain(DType::Bf16, 256, MaskKind::Full);
        let alone = default_tile(&spec).alone(&spec);
        assert_eq!(forward(&spec, &alone, "sm_100a").shared, 2048.0);
    }
}
