//! Clocks that each unit of a multiprocessor needs for 128 queries and 128 keys, from the instructions of a tile:
//! docs/kernels/sm100-fwd.md and sm100-bwd.md derive the numbers. Modelled, never measured.

use fmha_core::spec::FwdSpec;

use super::{FAST_EXP_ARCH, Sm100Tile};
use crate::sm90;

/// Number of (query, key) pairs of a block.
pub const PAIRS: f64 = 128.0 * 128.0;

/// Multiply-adds of 16 bits that the tensor cores of a multiprocessor do in a clock; twice as many of 8 bits, four
/// times as many of 4.
pub const PRODUCTS: f64 = 4096.0;
/// Number of f32 lanes of a multiprocessor.
const LANES: f64 = 128.0;
/// Bytes that shared memory moves in a clock.
pub(crate) const SHARED_BYTES: f64 = 128.0;
/// Bytes that a warp reads or writes in a clock where it transposes pairs of V: rows and columns of its lanes share
/// banks by fours.
const TRANSPOSED_BYTES: f64 = 32.0;
/// Bytes of a tile of scales.
const SCALE_TILE_BYTES: f64 = 512.0;
/// Bytes that threads move to and from tensor memory in a clock: 128 lanes of 32 bits. Assumed; nobody states it.
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

/// Units of the forward with a tile, without modifiers.
#[must_use]
pub fn forward(spec: &FwdSpec, tile: &Sm100Tile, arch: &str) -> Units {
    let [qk, v] = [spec.head_dim_qk, spec.head_dim_v].map(|dim| f64::from(sm90::padded_dim(dim)));
    // Two elements of four bits have a byte.
    let shared_by = if tile.has_pairs() { 2.0 } else { 1.0 };
    let sizes = [spec.dtype_qk, spec.dtype_v].map(|dtype| dtype.size_bytes() as f64 / shared_by);
    let [row_qk, row_v] = [f64::from(tile.row_of_qk(spec) * spec.dtype_qk.size_bytes() as i32), v * sizes[1]];
    let (cluster, q_tiles) = (f64::from(tile.cluster), f64::from(tile.num_q_tiles()));
    // A V of 16 bits beside an 8-bit Q has 16-bit products.
    let clocks = |dim: f64, size: f64| PAIRS * dim / (PRODUCTS * 2.0 / size);
    let blocks = 128.0 / f64::from(tile.block_n);
    let q_reads = 128.0 * row_qk * blocks;
    let of_keys = 128.0 * (row_qk + row_v) / cluster;
    // Copies to tensor memory read tiles of K's and V's scales once for all query tiles, those of P's pairs once each.
    let [of_qk, of_v, of_p] = tile.words_of_scales(spec).map(f64::from);
    let scales = match tile.scale_block {
        0 => 0.0,
        _ => {
            ((of_qk + of_v) / q_tiles + if tile.has_pairs() { of_p } else { 0.0 }) * SCALE_TILE_BYTES * blocks
        }
    };
    let transposed = if tile.transposes_v(spec) { 2.0 * 128.0 * row_v / q_tiles } else { 0.0 };
    // P of pairs has a largest number for each 16 keys, and a product by its reciprocal.
    let of_numbers = if tile.has_pairs() { 4.0 } else { 2.0 };
    Units {
        tensor: clocks(qk, sizes[0]) + clocks(v, sizes[1]),
        exp: PAIRS / exponentials(arch),
        floats: of_numbers * PAIRS / LANES,
        shared: (q_reads + of_keys + scales) / SHARED_BYTES + transposed / TRANSPOSED_BYTES,
        tensor_memory: PAIRS * (4.0 + sizes[1]) / TENSOR_MEMORY_BYTES,
        loads: of_keys / q_tiles / L2_BYTES,
    }
}

#[cfg(test)]
mod tests {
    use fmha_core::{DType, MaskKind, VLayout};

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
        // Scales by blocks; V of pairs by columns, then by rows.
        for (block, layout, dim, tensor, shared) in [
            (32, VLayout::RowMajor, 64, 256.0, 196.0),
            (32, VLayout::RowMajor, 128, 512.0, 432.0),
            (32, VLayout::RowMajor, 256, 1024.0, 875.0),
            (16, VLayout::ColMajor, 64, 128.0, 110.0),
            (16, VLayout::ColMajor, 128, 256.0, 276.0),
            (16, VLayout::ColMajor, 256, 512.0, 568.0),
            (16, VLayout::RowMajor, 64, 128.0, 238.0),
            (16, VLayout::RowMajor, 128, 256.0, 532.0),
            (16, VLayout::RowMajor, 256, 512.0, 1592.0),
        ] {
            let mut spec = FwdSpec::plain(DType::Bf16, dim, MaskKind::Full);
            (spec.dtype_qk, spec.dtype_v, spec.v_layout) = (DType::E4m3Fn, DType::E4m3Fn, layout);
            let tile = default_tile(&spec).with_scales(&spec, block);
            let units = forward(&spec, &tile, "sm_100a");
            assert_eq!([units.tensor, units.shared.round()], [tensor, shared], "{block} {layout:?} {dim}");
        }
        let spec = FwdSpec::plain(DType::Bf16, 256, MaskKind::Full);
        let alone = default_tile(&spec).alone(&spec);
        assert_eq!(forward(&spec, &alone, "sm_100a").shared, 2048.0);
    }
}
