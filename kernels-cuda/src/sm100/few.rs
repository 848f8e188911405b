//! Few queries over many keys: the possible ways to divide the keys among CTAs, and the cheapest by the [price].
//! The price is that of Hopper's kernels; its constants for Blackwell are modelled, not measured.

use fmha_core::FwdProblem;

use super::Sm100Tile;
use crate::schedule::TileOrder;
use crate::split::price::{self, CONSTANTS, Common, Keys, Rates, Walk};
use crate::split::{self, Shares};

/// Most rows of a kv head's group for which sequences of different lengths are divided into shares; the next constant
/// is the limit for queries.
const MOST_ROWS: u32 = 512;
const MOST_QUERIES: u32 = 32;

/// Largest number of parts of a sequence's keys.
const MOST_PARTS: u32 = 128;

/// Operations a microsecond of a multiprocessor's tensor cores: modelled, an HGX B200's 2.25 PFLOP/s of 148.
const PRODUCTS: f64 = 15.2e6;

/// Modelled memory rate in bytes per microsecond: a B200's 8 TB/s times the fraction that an H200 reaches of its 4.8
/// TB/s.
const MEMORY: f64 = 6.7e6;

/// Whether a problem has few queries, probably over a cache.
pub(super) fn are_few(problem: &FwdProblem) -> bool {
    let dims = problem.dims;
    let is_cache = dims.seqlen_k > dims.seqlen_q || problem.layout.seqused_k;
    is_cache
        && dims.seqlen_q <= MOST_QUERIES
        && dims.seqlen_q.saturating_mul(problem.gqa_ratio()) <= MOST_ROWS
}

/// The tile with the way to divide its keys that has the lowest price.
pub(super) fn deal(problem: &FwdProblem, tile: Sm100Tile, num_sms: u32) -> Sm100Tile {
    let priced = ways(problem, tile, num_sms)
        .into_iter()
        .filter_map(|way| Some((micros(problem, &way, num_sms)?, way)));
    price::cheapest(priced).unwrap_or(tile)
}

/// All ways to divide the keys of a tile of few queries: not at all, into parts of several lengths, and into equal
/// shares. Keys that would not fill two parts are never divided, which a batch-invariant plan relies on.
#[must_use]
pub fn ways(problem: &FwdProblem, tile: Sm100Tile, num_sms: u32) -> Vec<Sm100Tile> {
    let whole = Sm100Tile { split_keys: 0, shares: 0, ..tile };
    if tile.cluster > 1 || split::split_keys(problem, tile.block_n) == 0 {
        return vec![whole];
    }
    let (seqlen_k, block_n) = (problem.dims.seqlen_k, tile.block_n.unsigned_abs());
    // Parts are about equally long, so a static order serves and no counter must be cleared and read.
    let cut = Sm100Tile { order: TileOrder::Static, ..whole };
    let parts = price::keys_of_parts(seqlen_k, block_n, MOST_PARTS)
        .map(|keys| Sm100Tile { split_keys: keys.min(1 << 23).cast_signed(), ..cut });
    let shares = Sm100Tile { split_keys: tile.block_n, shares: num_sms.cast_signed(), ..cut };
    let is_batch = (2..=split::MOST_SCANNED).contains(&problem.dims.batch);
    let takes = |shares: Shares| shares.takes(problem, block_n);
    let shares = shares.cut(problem).shares.filter(|&dealt| is_batch && takes(dealt)).map(|_| shares);
    [whole].into_iter().chain(parts).chain(shares).collect()
}

/// Microseconds of a call by the price with modelled constants; `None` if there are more tiles than a schedule
/// counts.
fn micros(problem: &FwdProblem, tile: &Sm100Tile, num_sms: u32) -> Option<f64> {
    let whole = Sm100Tile { split_keys: 0, shares: 0, ..*tile };
    let tiles = whole.schedule(problem).ok()?.num_tiles.unsigned_abs();
    let walk = Walk {
        rates: Rates { products: PRODUCTS, ..CONSTANTS.sm90 },
        tiles: tiles / problem.dims.batch.max(1),
        rows: tile.block_m.unsigned_abs(),
        block_n: tile.block_n.unsigned_abs(),
        ctas: 1,
        keys: Keys::of(tile.split_keys, tile.shares),
    };
    let common = Common { memory: MEMORY, ..CONSTANTS.common };
    Some(price::micros_by(&common, problem, &walk, num_sms))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use fmha_core::{DType, Dims, KvLayout, QLayout};

    use super::*;
    use crate::sm100::choose_tile;

    fn decode(batch: u32, seqlen_q: u32, heads: (u32, u32), seqlen_k: u32, kv: KvLayout) -> FwdProblem {
        let dims = Dims::batch(batch).seqlens(seqlen_q, seqlen_k).heads(heads.0, heads.1).head_dim(128);
        let mut problem = FwdProblem::new(QLayout::Batch, kv, DType::Bf16, dims);
        problem.layout.seqused_k = true;
        problem
    }

    #[test]
    fn unlike_sequences_are_walked_in_shares_of_all_multiprocessors() {
        for (batch, seqlen_q, heads) in
            [(64, 1, (32, 8)), (16, 4, (64, 8)), (30, 1, (28, 4)), (8, 16, (32, 8))]
        {
            for kv in [KvLayout::Strided, KvLayout::Paged { page_size: 16 }] {
                let problem = decode(batch, seqlen_q, heads, 32768, kv);
                let tile = choose_tile(&problem, "sm_100a", 148);
                assert_eq!(tile.shares, 148, "{problem:?}: {tile:?}");
                assert!(
                    tile.pack_gqa && tile.cluster == 1 && tile.split_keys % tile.block_n == 0,
                    "{tile:?}"
                );
                tile.check(&fmha_core::spec::FwdSpec::of(&problem), problem.gqa_ratio()).unwrap();
            }
        }
    }

    #[test]
    fn a_group_that_leaves_rows_over_has_tiles_of_whole_groups() {
        for (heads, rows) in [((7, 1), 126), ((5, 1), 125), ((96, 1), 96), ((8, 1), 128), ((40, 8), 125)] {
            let problem = decode(2, 3, heads, 4096, KvLayout::Strided);
            let tile = choose_tile(&problem, "sm_103a", 148);
            assert!(tile.pack_gqa, "{heads:?}: {tile:?}");
            assert_eq!(tile.whole_groups, 128 % problem.gqa_ratio() != 0);
            assert_eq!((tile.block_m, tile.rows_of_tile(&problem)), (128, rows), "{heads:?}");
        }
    }

    /// A tile whose keys are not divided stores O 16 bytes at a time only if O allows it; rows of parts are always
    /// stored so.
    #[test]
    fn a_tile_that_drops_its_parts_stores_as_o_allows() {
        let mut problem = decode(1, 1, (8, 2), 2000, KvLayout::Strided);
        problem.strides.o.head = 129;
        let mut tile = choose_tile(&problem, "sm_100a", 148);
        assert!(tile.split_keys > 0 && tile.vector_store, "{tile:?}");
        tile.set("split_keys", "0").unwrap();
        tile.place(&problem);
        assert!(!tile.vector_store && tile.shares == 0, "{tile:?}");
        let mut invariant = choose_tile(&problem, "sm_100a", 148).batch_invariant(&problem);
        invariant.place(&problem);
        assert!(!invariant.vector_store && invariant.split_keys == 0, "{invariant:?}");
    }

    /// Pages are loaded by TMA in boxes of 8 rows or more, and otherwise by copies: a box is the common divisor of a
    /// page and a block.
    #[test]
    fn pages_come_by_boxes_of_8_rows_and_more_else_by_copies() {
        for (page_size, keys) in
            [(1, 0), (4, 0), (8, 8), (16, 16), (48, 16), (64, 64), (100, 0), (256, 128), (384, 128)]
        {
            let mut problem = decode(2, 1, (8, 1), 4096, KvLayout::Paged { page_size });
            let tile = choose_tile(&problem, "sm_100a", 148);
            assert_eq!((tile.page_keys, tile.copy_bytes > 0), (keys, keys == 0), "{page_size}: {tile:?}");
            let spec = fmha_core::spec::FwdSpec::of(&problem);
            assert_eq!(tile.k_box(&spec)[1], if keys > 0 { keys } else { 128 });
            problem.layout.v = fmha_core::VLayout::ColMajor;
            assert!(choose_tile(&problem, "sm_100a", 148).copy_bytes > 0, "{page_size}, columns");
        }
    }
}
