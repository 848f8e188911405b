//! Wide heads on Blackwell by pairs of CTAs: rows of Q and K of up to 576 elements and of V of up to 512; among them
//! latent attention (MLA, absorbed), whose values are the first 512 elements of its keys; over all keys, or those of
//! lists.

pub mod gathered;
pub mod recipe;
pub mod units;

use fmha_core::abi::{AbiLiteral as _, AbiStruct as _};
use fmha_core::fields::{Fields as _, Takes};
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::FwdSpec;
use fmha_core::{DType, Dims, FwdProblem, KvLayout, Refusal, Workspace, abi_spec};

use crate::operands::stores_vectors;
use crate::schedule::{self, TileSchedule};
use crate::sm90_mla::{self, MlaSchedule, stored};
use crate::{lists, split};
use gathered::{GatheredRows, MatrixRows};

/// The kernel's name in plans and refusals.
pub const NAME: &str = "sm100_mla";

/// Header that the kernel's entry includes.
pub const HEADER: &str = "fmha/sm100/mla/fwd.cuh";

/// CTAs of a pair.
pub const CTAS: u32 = 2;
/// Rows of a pair: (query, head) pairs.
pub const ROWS: u32 = 128;
/// Keys of a block.
pub const KEYS: u32 = 128;
/// Most keys of a box of TMA: a CTA's half of a block.
const BOX_KEYS: u32 = KEYS / CTAS;

/// Threads of a CTA.
pub const NUM_THREADS: u32 = 416;

/// Columns of tensor memory that scores take, and a group of 256 columns of O.
const SCORE_COLUMNS: i32 = 128;
const GROUP_COLUMNS: i32 = 128;

/// Bytes of a chunk of 64 rows or keys by 64 columns.
const CHUNK_BYTES: i32 = 8192;
/// Slots of the ring, two chunks each.
const STAGES: i32 = 8;

abi_spec! {
    /// Tile of the kernel: how it computes.
    pub struct Sm100MlaTile {
        /// TMA brings K and V, `box_keys` keys at once, which lie in one page, or gathers the rows of lists; else
        /// threads copy all rows.
        pub by_tma: bool = Takes::all().tuned(),
        /// Keys of a box of TMA: what a page and 64 keys have in common, 8 at least; 64 without pages; 1 over lists, of
        /// which TMA gathers four; 0: TMA brings none.
        pub box_keys: i32 = Takes::nothing(),
        /// O is rescaled only when a maximum grew by more than this, in log2; 0: when it grew.
        pub lazy_rescale_log2: i32 = Takes::within(0, 11).tuned_over(&[0, 8]),
        /// O, whose rows are whole 16 bytes and begin on such, is stored 16 bytes at a time; else element by element.
        pub vector_store: bool,
        /// Split-KV: keys of a part, a multiple of 128; a second kernel merges the parts. 0: a tile sees all keys.
        pub split_keys: i32 = Takes::multiples(128, 0, 1 << 24).tuned_over(&[0, 256, 512, 1024, 2048]),
        /// Whether keys come from a token's list: a tile then has heads of one token.
        pub listed: bool = Takes::nothing(),
        /// Whether keys come from two caches: those of the first for a token, then those of the second.
        pub two_caches: bool = Takes::nothing(),
        /// Bytes of a key's row, 584 or 656, where the cache has rows of bytes; 0: rows are of `stored`.
        pub row_bytes: i32 = Takes::nothing(),
        /// K and V as they lie in memory: of Q's type, or over lists in FP8, which is widened on its way to shared
        /// memory.
        pub stored: DType = Takes::nothing(),
    }
}

impl Sm100MlaTile {
    /// How the tile divides the keys into parts.
    #[must_use]
    pub const fn cut(&self) -> split::Cut {
        // Every token's list is divided into parts in the same way.
        split::Cut { keys: self.split_keys, block_n: KEYS as i32, fixed: self.listed, shares: None }
    }

    /// Sets one field from its name and value.
    ///
    /// # Errors
    /// A text that names the field, the value and what the field takes.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        self.set_field(name, value).map_err(|text| format!("tile {text}"))
    }

    /// Whether TMA brings a problem's keys as the tile says.
    ///
    /// # Errors
    /// A text that names the field and what does not go with it.
    pub fn check(&self, problem: &FwdProblem) -> Result<(), String> {
        if !self.by_tma || self.box_keys > 0 {
            return Ok(());
        }
        if self.stored.is_fp8() {
            return Err(format!(
                "tile by_tma=1: a cache of {} is widened on its way, which TMA does not",
                self.stored
            ));
        }
        if self.two_caches {
            return Err(
                "tile by_tma=1: rows of two caches are none of one matrix, which TMA gathers from".to_owned()
            );
        }
        match (problem.layout.kv, gathered::of_problem(problem)) {
            (_, Err(why)) if self.listed => Err(format!("tile by_tma=1: {why}")),
            (KvLayout::Paged { page_size }, _) => Err(format!(
                "tile by_tma=1: pages of {page_size} rows are no whole boxes of 8, as TMA brings them"
            )),
            _ => Ok(()),
        }
    }

    /// Dynamic shared memory of a CTA: Q, P, the ring, numbers and barriers. The entry asserts that it suffices.
    #[must_use]
    pub const fn smem_bytes(&self, spec: &FwdSpec) -> i32 {
        let chunks_of_q = (spec.head_dim_qk + 63) / 64;
        (chunks_of_q + 2 + 2 * STAGES) * CHUNK_BYTES + 4096
    }

    /// Columns of tensor memory that a spec uses.
    #[must_use]
    pub const fn tmem_columns(&self, spec: &FwdSpec) -> i32 {
        SCORE_COLUMNS + (spec.head_dim_v + 255) / 256 * GROUP_COLUMNS
    }

    /// Workspace: the parts of a split.
    #[must_use]
    pub fn workspace(&self, problem: &FwdProblem) -> Workspace {
        Workspace { bytes: self.cut().workspace_bytes(problem, problem.dims.seqlen_q), zeroed_bytes: 0 }
    }

    /// The tiles of a problem's maximal lengths, one to a pair.
    ///
    /// # Errors
    /// More tiles than a grid has.
    pub fn schedule(&self, problem: &FwdProblem) -> Result<MlaSchedule, String> {
        let num_parts = self.cut().num_parts(problem);
        if self.listed {
            let of_lists = lists::schedule(problem, ROWS, num_parts)?;
            let TileSchedule { num_tiles, num_m_blocks, .. } = of_lists;
            if u64::from(num_tiles.unsigned_abs()) > MAX_TILES {
                return Err(format!("{num_tiles} tiles of heads of a token are more than {MAX_TILES}"));
            }
            let most_keys = problem.most_walked_keys().cast_signed();
            return Ok(MlaSchedule { num_m_blocks, num_parts: num_parts as i32, num_tiles, most_keys });
        }
        let (units, num_m_blocks) = units(problem);
        let num_tiles = units.saturating_mul(u64::from(num_parts));
        if num_tiles > MAX_TILES {
            let Dims { batch, seqlen_q, num_heads_q, .. } = problem.dims;
            return Err(format!(
                "batch {batch}, seqlen_q {seqlen_q} and num_heads_q {num_heads_q} make {num_tiles} tiles, more than \
                 {MAX_TILES}"
            ));
        }
        Ok(MlaSchedule {
            num_m_blocks: num_m_blocks as i32,
            num_parts: num_parts as i32,
            num_tiles: num_tiles as i32,
            most_keys: 0,
        })
    }
}

/// Most tiles of a grid, which has two CTAs a tile.
const MAX_TILES: u64 = (1 << 30) - 1;

/// Tiles before keys are split, and those of one kv head of a sequence.
fn units(problem: &FwdProblem) -> (u64, u64) {
    let Dims { batch, seqlen_q, num_heads_kv, .. } = problem.dims;
    let rows = u64::from(seqlen_q) * u64::from(problem.gqa_ratio());
    let num_m_blocks = rows.div_ceil(ROWS.into()).max(1);
    (u64::from(batch).saturating_mul(num_heads_kv.into()).saturating_mul(num_m_blocks), num_m_blocks)
}

/// Keys of a box of TMA: rows of one page that are whole lines of the swizzle; 0 where pages have none. Over lists 1,
/// or 0 where rows of K or V make no matrix.
fn box_keys(problem: &FwdProblem) -> i32 {
    if problem.walks_lists() {
        let of_one = !stored(problem).is_fp8() && !problem.walks_caches();
        return (of_one && gathered::of_problem(problem).is_ok()).into();
    }
    let rows = problem.layout.kv.page_size().unwrap_or(BOX_KEYS);
    [BOX_KEYS, 32, 16, 8].into_iter().find(|keys| rows.is_multiple_of(*keys)).unwrap_or(0).cast_signed()
}

/// Whether the kernel computes this problem, and if not, why.
///
/// # Errors
/// The first fact that it does not take.
pub fn accepts(problem: &FwdProblem) -> Result<(), Refusal> {
    let refuse = |reason: String| Err(Refusal::new(NAME, reason));
    let Dims { head_dim_qk, head_dim_v, .. } = problem.dims;
    if let Some(cache) = problem.cache.dtype {
        if !problem.walks_lists() {
            return refuse(format!("dtype_cache {cache} beside {}: 16 bits are read", problem.dtypes.qk));
        }
        if !matches!(cache, DType::E4m3Fn | DType::E5m2) {
            return refuse(format!("dtype_cache {cache} is not one of the 2 OCP types"));
        }
        if head_dim_qk % 16 != 0 || head_dim_v % 16 != 0 {
            return refuse(format!(
                "dtype_cache {cache} with head_dim_qk {head_dim_qk} and head_dim_v {head_dim_v}: both are not whole \
                 copies of 16"
            ));
        }
    }
    sm90_mla::takes_wide_rows(problem, NAME)?;
    let narrow = stored(problem).is_fp8();
    sm90_mla::takes_strides(problem, NAME, |name| if name != "q" && narrow { 16 } else { 8 })
}

/// The tile for a problem that the kernel [`accepts`], on a device of `num_sms` multiprocessors.
#[must_use]
pub fn choose_tile(problem: &FwdProblem, num_sms: u32) -> Sm100MlaTile {
    let (box_keys, listed) = (box_keys(problem), problem.walks_lists());
    // The heads of a token are the rows of a tile, so that parts are dealt by tokens.
    let of_rows =
        |problem: &FwdProblem| sm90_mla::split_keys(problem, units(problem).0, KEYS, num_sms / CTAS);
    Sm100MlaTile {
        by_tma: box_keys > 0,
        box_keys,
        // P up to 2^8 is as exact in 16 bits as P up to 1, and f32 sums have room.
        lazy_rescale_log2: 8,
        vector_store: stores_vectors(problem),
        split_keys: if listed { of_rows(&lists::of_tokens(problem)) } else { of_rows(problem) },
        listed,
        two_caches: problem.walks_caches(),
        row_bytes: lists::row_bytes(problem),
        stored: stored(problem),
    }
}

/// The kernel for a spec and a tile: arguments `FwdParams`, the tensor maps of K and V, [`MlaSchedule`], and over lists
/// of keys [`ListParams`](fmha_core::lists::ListParams) and [`GatheredRows`], over two caches
/// [`TwoCachesParams`](fmha_core::second::TwoCachesParams).
#[must_use]
pub fn fwd(spec: &FwdSpec, tile: &Sm100MlaTile) -> KernelSource {
    // The length of a part is an argument: the text says only that there are parts.
    let tile = Sm100MlaTile { split_keys: tile.split_keys.min(KEYS as i32), ..*tile };
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", &tile)];
    let gathered = ", const __grid_constant__ GatheredRows gathered";
    let (last_params, call) = if tile.two_caches {
        (lists::TWO_PARAM.to_owned(), "fwd_lists<kSpec, kTile>(p, maps, schedule, caches, {})")
    } else if tile.listed {
        (format!("{}{gathered}", lists::PARAM), "fwd_lists<kSpec, kTile>(p, maps, schedule, lists, gathered)")
    } else {
        (String::new(), "fwd<kSpec, kTile>(p, maps, schedule)")
    };
    let entry = Entry {
        include: HEADER,
        constants: &constants,
        bounds: "__cluster_dims__(sm100::mla::kCtas, 1, 1) __launch_bounds__(sm100::mla::kNumThreads, 1)",
        params: &format!(
            "const __grid_constant__ FwdParams p, const __grid_constant__ sm100::mla::Maps maps, \
             const __grid_constant__ MlaSchedule schedule{last_params}"
        ),
        call: &format!(
            "static_assert(sm100::mla::kNumThreads == {NUM_THREADS} && \
             sizeof(sm100::mla::Smem<kSpec, kTile.listed>) <= {}, \
             \"host and device disagree\"); sm100::mla::{call};",
            tile.smem_bytes(spec)
        ),
    };
    crate::source(entry.render(), || {
        [
            schedule::header(),
            fmha_core::lists::header(),
            fmha_core::masks::header(),
            fmha_core::second::header(),
            host_header(),
        ]
    })
}

/// `fmha/sm100_mla_host.h`: what this file shares with the device.
fn host_header() -> Header {
    let definitions = [
        Sm100MlaTile::c_definition(),
        MlaSchedule::c_definition(),
        MatrixRows::c_definition(),
        GatheredRows::c_definition(),
    ];
    Header::shared("fmha/sm100_mla_host.h", "fmha", &["fmha/params.h", "fmha/spec.h"], &definitions)
}

#[cfg(test)]
mod tests {
    use fmha_core::{Append, Bias, CacheRows, KeyLists, VLayout};

    use super::*;
    use crate::sm90_mla::{DIM_QK, DIM_V};

    fn latent(batch: u32, heads: u32, seqlen_k: u32) -> FwdProblem {
        let dims = Dims::batch(batch).seqlens(1, seqlen_k).heads(heads, 1).head_dims(DIM_QK, DIM_V);
        let mut problem = FwdProblem::batch(DType::Bf16, dims);
        (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
        problem
    }

    #[test]
    fn what_is_not_taken_is_refused_with_its_number() {
        type Change = fn(&mut FwdProblem);
        let taken: [Change; 7] = [
            |_| (),
            |p| p.cache.append = Some(Append::batch(p, 1)),
            |p| p.cache.v_in_k = false,
            |p| p.dims.head_dim_v = 256,
            |p| p.score.softcap = Some(30.0),
            |p| p.score.sink = true,
            |p| (p.dims.head_dim_qk, p.dims.head_dim_v) = (16, 257),
        ];
        for change in taken {
            let mut problem = latent(2, 16, 100);
            change(&mut problem);
            assert!(accepts(&problem).is_ok(), "{:?}", accepts(&problem));
        }
        let refused: [(&str, Change); 8] = [
            ("head_dim_v 256: neither", |p| (p.dims.head_dim_qk, p.dims.head_dim_v) = (256, 256)),
            ("head_dim_v 520", |p| p.dims.head_dim_v = 520),
            ("v_layout col-major", |p| p.layout.v = VLayout::ColMajor),
            ("dtype_cache e4m3fn", |p| p.cache.dtype = Some(DType::E4m3Fn)),
            ("tree_mask of 1", |p| p.cache.tree_mask = true),
            ("sink_columns 4", |p| p.mask.sink_columns = 4),
            ("k.seq stride 580", |p| p.strides.k.seq = 580),
            ("dtype_o e4m3fn", |p| p.dtypes.o = DType::E4m3Fn),
        ];
        for (words, change) in refused {
            let mut problem = latent(2, 16, 100);
            change(&mut problem);
            let refusal = accepts(&problem).unwrap_err().to_string();
            assert!(refusal.contains(words) && refusal.contains(NAME), "{words}: {refusal}");
        }
        assert_eq!(latent(1, 1, 1).score.bias, Bias::None);
    }

    #[test]
    fn parts_fill_one_wave_of_pairs_and_memory_suffices() {
        for (batch, heads, seqlen_k, parts) in [
            (1, 128, 32768, 64),
            (16, 16, 8192, 4),
            (74, 128, 8192, 1),
            (37, 128, 8192, 2),
            (74, 16, 4096, 1),
        ] {
            let problem = latent(batch, heads, seqlen_k);
            let tile = choose_tile(&problem, 148);
            let schedule = tile.schedule(&problem).unwrap();
            assert_eq!(schedule.num_parts, parts, "{batch} sequences of {seqlen_k} keys: {tile:?}");
            assert!(schedule.num_tiles <= 74);
            let spec = FwdSpec::of(&problem);
            assert!(tile.smem_bytes(&spec) <= 227 << 10 && tile.tmem_columns(&spec) <= 512);
        }
        let mut prefill = latent(1, 128, 8192);
        prefill.dims.seqlen_q = 4096;
        let schedule = choose_tile(&prefill, 148).schedule(&prefill).unwrap();
        assert_eq!((schedule.num_m_blocks, schedule.num_parts), (4096, 1));
    }

    #[test]
    fn lists_have_tiles_of_a_token_and_are_gathered_where_rows_make_a_matrix() {
        let listed = |tokens, heads, topk| {
            let mut problem = latent(1, heads, 65536);
            problem.dims.seqlen_q = tokens;
            let lists = KeyLists::new(&problem, topk);
            problem.lists(lists)
        };
        for (tokens, heads, m_blocks, parts) in
            [(4096, 128, 4096, 1), (1, 128, 1, 16), (74, 16, 74, 1), (10, 200, 20, 3)]
        {
            let problem = listed(tokens, heads, 2048);
            let tile = choose_tile(&problem, 148);
            assert!(accepts(&problem).is_ok() && tile.by_tma && tile.listed && tile.box_keys == 1);
            let schedule = tile.schedule(&problem).unwrap();
            assert_eq!((schedule.num_m_blocks, schedule.num_parts), (m_blocks, parts), "{tokens} of {heads}");
        }
        let mut odd = listed(2, 16, 100);
        odd.layout.kv = KvLayout::Paged { page_size: 64 };
        odd.strides.k.batch += 8;
        let tile = choose_tile(&odd, 148);
        assert!(accepts(&odd).is_ok() && !tile.by_tma);
        let asked = Sm100MlaTile { by_tma: true, ..tile };
        assert!(asked.check(&odd).unwrap_err().contains("every 8 elements"));
        let mut narrow = listed(2, 16, 100);
        narrow.cache.dtype = Some(DType::E4m3Fn);
        let tile = choose_tile(&narrow, 148);
        assert!(accepts(&narrow).is_ok() && !tile.by_tma && tile.stored == DType::E4m3Fn);
        // Rows of bytes, over lists and without, and a second cache are copied.
        for rows in [CacheRows::Bytes656, CacheRows::Bytes584] {
            let mut every = latent(2, 16, 100);
            every.layout.kv = KvLayout::Paged { page_size: 64 };
            if rows == CacheRows::Bytes584 {
                every.dims.head_dim_qk = DIM_V;
            }
            let every = every.v_in_k(true).cache_rows(rows);
            let lists = KeyLists::new(&every, 64);
            for (problem, two_caches) in [(every.clone().lists(lists), false), (every.clone(), true)] {
                let tile = choose_tile(&problem, 148);
                assert!(accepts(&problem).is_ok(), "{:?}", accepts(&problem));
                assert_eq!(
                    (tile.listed, tile.two_caches, tile.by_tma),
                    (true, two_caches, false),
                    "{tile:?}"
                );
                assert_eq!(tile.row_bytes.unsigned_abs(), rows.row_bytes());
                assert!(Sm100MlaTile { by_tma: true, ..tile }.check(&problem).is_err());
                let mut odd = problem;
                odd.strides.k.batch += 8;
                assert!(accepts(&odd).unwrap_err().to_string().contains("k.batch stride"));
            }
        }
        narrow.strides.k.seq += 8;
        assert!(accepts(&narrow).unwrap_err().to_string().contains("k.seq stride 584"));
    }

    #[test]
    fn boxes_of_tma_lie_in_one_page() {
        for (page_size, keys) in [(1, 0), (12, 0), (24, 8), (16, 16), (96, 32), (64, 64), (192, 64)] {
            let mut problem = latent(1, 128, 100);
            problem.layout.kv = KvLayout::Paged { page_size };
            let tile = choose_tile(&problem, 148);
            assert_eq!((tile.by_tma, tile.box_keys), (keys > 0, keys), "pages of {page_size}");
            assert_eq!(tile.check(&problem), Ok(()));
            let asked = Sm100MlaTile { by_tma: true, ..tile };
            assert_eq!(asked.check(&problem).is_ok(), keys > 0, "pages of {page_size}");
        }
    }
}
