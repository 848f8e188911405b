//! The kernels that are interpreted where there is no device: one row for each kernel, architecture,
//! operation and tile.
//!
//! A new kernel gets its rows here, which `cargo xtask test`, `--all` and the evidence use.

use crate::step::Step;

/// How an emulated device runs asynchronous work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Asynchronous work completes when it is issued: fast, but a missing wait is not noticed.
    Eager,
    /// Asynchronous work completes when it is issued, and vector clocks check the order of every access: a missing
    /// wait, fence or arrival is a failure.
    HappensBefore,
    /// Clusters run piece by piece in a random order that differs in each launch, so that tiles go to other CTAs.
    DrawnOrder,
    /// Asynchronous work is done as soon as it is issued, but unwritten memory, and the destination of a `cp.async`
    /// before its wait, hold finite garbage instead of NaN, which recomputed rows would hide.
    Garbage,
    /// Asynchronous work takes effect with random delays, different in each launch.
    Late,
}

/// One kernel on one architecture.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    /// Name of the kernel in plans, where every case must run on it; `None` lets the backend choose,
    /// fallbacks included.
    pub(crate) kernel: Option<&'static str>,
    /// Backend, `cuda` or `rocm`, and the architecture to emulate.
    pub(crate) backend: &'static str,
    pub(crate) arch: &'static str,
    /// Option `--tile`, for a row that tests a tile which no table chooses for such small cases.
    pub(crate) tile: Option<&'static str>,
    pub(crate) mode: Mode,
    /// Number of multiprocessors, few enough that each has several tiles; `None`: the emulator's default.
    pub(crate) multiprocessors: Option<u32>,
    /// Cases of `cargo xtask test`, and cases of `--all`.
    pub(crate) in_test: Cases,
    pub(crate) in_all: Cases,
}

/// A filter of the battery; of the kernels that its cases need one in `deal` runs, with all its cases, since most
/// time goes into compiling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cases {
    pub(crate) filter: &'static str,
    /// Number of kernels of which one is tested: 1 tests every kernel, 0 none.
    pub(crate) deal: u32,
}

const NONE: Cases = Cases { filter: "", deal: 0 };

/// Families that every forward kernel runs under `--all`.
const FORWARD: &str = "^(addresses|combine|definition|edges|fp8|guards|heads|laws|parts|rare|rows)/";
/// Cases of small outputs.
const SMALL: &str = "^small/|^code/small/";
/// Cases of masks and lengths in which the CTAs of a pair have different numbers of blocks.
const CLUSTER_CASES: &str = "^edges/(mask_sq_[a-z]*_sk/|nan|inf|group|gqa).*bf16";

/// Cases of caches that Blackwell's kernel takes: 16 bits, head dimensions up to 256, and no keep mask.
const BLACKWELL_CACHES: &str = "^decode/(groups/[^/]*/wide/|(paged|append|append_packed|rotary|tree|layouts|unlike|\
    last_keys|long|split|many_parts|no_keys|clamped|pages_.*|head_dim|shared_pages|fixed_parts)/(.*/)?b?f16(/|$))";

/// Cases with FP8 queries and keys and a row-major V, also in FP8.
const PREPARED_CASES: &str = "^fp8/blocks/(e4m3fn|e5m2)/(d[0-9x]*/[0b]/r|d256x256/(slanted|rising)|group|group_of_heads|window|\
    few_queries|softcap|dropout.*|sink|negative.*|o_.*|v_apart|nan_(nobody_sees.*|behind_(the|wide)_keys|in_.*))$";

/// Architecture that mutation and coverage emulate.
pub(crate) const HOPPER_ARCH: &str = "sm_90a";

const HOPPER: Row = Row {
    kernel: None,
    backend: "cuda",
    arch: HOPPER_ARCH,
    tile: None,
    mode: Mode::Eager,
    multiprocessors: None,
    in_test: NONE,
    in_all: NONE,
};

const BLACKWELL: Row = Row { kernel: Some("sm100"), arch: "sm_100a", ..HOPPER };

const HOPPER_WALKING: Row =
    Row { kernel: Some("sm90"), mode: Mode::HappensBefore, multiprocessors: Some(2), ..HOPPER };

/// Cases that `sm80` supports: 16 bits, without a keep mask, which dropout's own edges need.
const AMPERE_CASES: &str = "^(edges/[^d]|heads/|rare/).*/b?f16/";

/// Gradients of head dimensions beyond 128 that Blackwell's kernel supports.
const WIDE_GRADIENTS: &str = "^backward/(wide|over_blocks|in_turns|hidden)/(.*/)?bf16/d(160|192x128|200|256)";

/// Cases of MXFP8 scales that Blackwell's kernel supports.
const MXFP8: &str = "^scales/mxfp8_";
/// Cases of NVFP4 scales, with column-major V, that Blackwell's kernel supports.
const NVFP4: &str = "^scales/nvfp4/(bf16|f32)/(descale_[a-z]*/c/|keys/[0-9]*/c|columns/)";

/// Lists of keys, forward, in 16 bits.
const FORWARD_LISTS: &str = "^lists/(forward|topk|layout|tokens|heads|latent|wide|score|parts|blocks|appended|twice|repeated)/b?f16|\
    ^lists/(wide_fp8|fp8_cache)/";

/// Lists of keys of latent rows.
const LATENT_LISTS: &str = "^lists/(wide/b?f16|wide_fp8/|latent/b?f16/d5|parts/b?f16/latent)";

/// Kernels of mma.sync, where no faster kernel exists.
const AMPERE: Row = Row { kernel: Some("sm80"), arch: "sm_80", ..HOPPER };

pub(crate) const ROWS: &[Row] = &[
    // Cases that found planted faults run for all kernels. Of the other kernels one in `deal` runs, with all its cases.
    Row {
        kernel: Some("sm90"),
        in_test: Cases { filter: "^(heads/(batch|group|row_blocks)|rare)/.*bf16", deal: 2 },
        ..HOPPER
    },
    Row { in_test: Cases { filter: "^addresses/.*bf16", deal: 2 }, ..HOPPER },
    // Each expression of a score or mask as code is a kernel of its own; backend-cuda/tests/code.rs has a sample.
    Row { in_all: Cases { filter: "^code/", deal: 1 }, ..HOPPER },
    Row { in_all: Cases { filter: "^code/.*/b?f16/", deal: 1 }, ..AMPERE },
    // Calls that are parts of a larger one, with every mask and modifier that uses positions.
    Row { in_test: Cases { filter: "^(backward/)?parts/bf16/alibi_dropout/b/quad/", deal: 1 }, ..HOPPER },
    // Growing scores test kernels whose maxima may lag. In f32, where the fallback needs a minute, they run only under
    // `--all`.
    Row {
        in_test: Cases {
            filter: "^((combine|definition|fp8|guards|laws)/|edges/([^g]|g[^r]|gro[^w]|growth/.*/b?f16/))",
            deal: 216,
        },
        in_all: Cases { filter: FORWARD, deal: 1 },
        ..HOPPER
    },
    // Two CTAs of a cluster share loads and take tiles together. Blocks of 32 keys, because the cases are short;
    // then two consumers, like the table's tiles.
    Row {
        tile: Some("cluster=2,order=dynamic,block_m=64,block_n=32,wait_anchor=0"),
        in_test: Cases { filter: "^edges/(mask_sq_gt_sk|group|gqa).*bf16", deal: 1 },
        in_all: Cases { filter: CLUSTER_CASES, deal: 1 },
        ..HOPPER_WALKING
    },
    Row {
        tile: Some("cluster=2,cluster_heads=1,order=dynamic,pack_gqa=0,block_m=64,block_n=32,wait_anchor=0"),
        in_all: Cases { filter: CLUSTER_CASES, deal: 1 },
        ..HOPPER_WALKING
    },
    Row {
        tile: Some("cluster=2,order=dynamic"),
        in_all: Cases { filter: CLUSTER_CASES, deal: 1 },
        ..HOPPER_WALKING
    },
    // Vector clocks check every access: the reset of the tile counter for the next call, loads by cp.async, and zeros
    // in foreign rows of V before a proxy fence.
    Row {
        tile: Some("order=dynamic"),
        in_test: Cases { filter: "^laws/(twice|a_recorded).*/bf16/.*/b$", deal: 1 },
        in_all: Cases { filter: "^(laws/(twice|a_recorded)|heads/(batch|group|row_blocks)).*bf16", deal: 1 },
        ..HOPPER_WALKING
    },
    Row {
        tile: Some("copy_bytes=8"),
        in_test: Cases { filter: "^edges/off_tile/bf16/s(65x63|193x176|257x31)/b$", deal: 1 },
        in_all: Cases { filter: "^edges/(off_tile|long)/bf16/", deal: 1 },
        ..HOPPER_WALKING
    },
    Row {
        in_test: Cases {
            filter: "^(rare/nan_in_v/bf16/(gaps|group)|heads/row_blocks/bf16/q65/ratio1)",
            deal: 1,
        },
        in_all: Cases { filter: "^(rare|heads/row_blocks)/.*bf16", deal: 1 },
        ..HOPPER_WALKING
    },
    // FP8 over several blocks, with V transposed in shared memory, column-major, and in 16 bits.
    Row {
        in_test: Cases { filter: "^fp8/blocks/e4m3fn/(d64x64/b/r|d128x128/0/c|v_bf16|group)$", deal: 1 },
        in_all: Cases { filter: "^fp8/blocks/(e4m3fn|e5m2)/", deal: 1 },
        ..HOPPER_WALKING
    },
    // Row-major FP8 V is prepared once in the workspace, as for longer queries: by spare warps beside the tiles, also
    // in a cluster, and by a launch before.
    Row {
        tile: Some("prepare_v=beside"),
        in_test: Cases { filter: "^fp8/blocks/e4m3fn/(d256x256/0/r|d128x128/b/r|group_of_heads)$", deal: 1 },
        in_all: Cases { filter: PREPARED_CASES, deal: 1 },
        ..HOPPER_WALKING
    },
    Row {
        tile: Some("prepare_v=beside,cluster=2,order=dynamic,block_m=64,block_n=64,stages=2,wait_anchor=0"),
        in_all: Cases {
            filter: "^fp8/blocks/e4m3fn/(d(128x128|256x256)/b/r|group|window|nan_in_v)$",
            deal: 1,
        },
        ..HOPPER_WALKING
    },
    Row {
        tile: Some("prepare_v=before"),
        in_test: Cases { filter: "^fp8/blocks/e4m3fn/(nan_behind_wide_keys|group)$", deal: 1 },
        in_all: Cases { filter: PREPARED_CASES, deal: 1 },
        ..HOPPER_WALKING
    },
    // The keys of a short query are read in parts, which a second kernel merges.
    Row {
        tile: Some("block_n=64,split_keys=128,lookahead=off,wait_anchor=0"),
        in_test: Cases { filter: "^edges/short_query/bf16/s(1x600|3x1100)/(0|b:300,0)$", deal: 1 },
        in_all: Cases { filter: "^edges/short_query.*/b?f16", deal: 1 },
        ..HOPPER_WALKING
    },
    // Batch-invariant calls in parts, by sm90, and by sm80 for pages that TMA can not read.
    Row {
        kernel: None,
        in_test: Cases { filter: "^decode/fixed_parts/bf16/(q3/p(20|32)|packed)$", deal: 1 },
        in_all: Cases { filter: "^decode/fixed_parts/", deal: 1 },
        ..HOPPER_WALKING
    },
    // A tile folds the parts of its keys by itself.
    Row {
        tile: Some("fold_keys=256"),
        in_test: Cases { filter: "^edges/short_query(/bf16/s3x1100/b:300,0|_beside_nan/bf16)$", deal: 1 },
        in_all: Cases { filter: "^edges/short_query(/.*/(0|b|b:300,0)|_beside_nan/.*)$", deal: 1 },
        ..HOPPER_WALKING
    },
    // Results have equal bits whichever CTA claims a tile.
    Row {
        kernel: Some("sm90"),
        mode: Mode::DrawnOrder,
        multiprocessors: Some(3),
        in_test: Cases { filter: "^bits/few/.*/bf16/d64/", deal: 1 },
        in_all: Cases { filter: "^bits/few/", deal: 1 },
        ..HOPPER
    },
    // Small outputs of a fast kernel and of the slow one.
    Row {
        kernel: None,
        in_test: Cases {
            filter: "^small/(mask/bf16/d128|masks/f16/window|lengths/bf16/no_queries)",
            deal: 1,
        },
        in_all: Cases { filter: SMALL, deal: 1 },
        ..HOPPER
    },
    Row { kernel: None, in_all: Cases { filter: SMALL, deal: 1 }, ..AMPERE },
    Row { kernel: None, in_all: Cases { filter: SMALL, deal: 1 }, ..BLACKWELL },
    Row {
        in_test: Cases { filter: "^small/(lengths/f16/packed|mask/bf16/d64/b/2)$", deal: 1 },
        in_all: Cases { filter: SMALL, deal: 1 },
        ..amd("gfx942", NONE)
    },
    Row { in_all: Cases { filter: SMALL, deal: 1 }, ..amd("gfx1100", NONE) },
    // Each part of a kv head's queries adds to dK and dV; parts end in different orders.
    Row {
        kernel: Some("sm90"),
        mode: Mode::DrawnOrder,
        multiprocessors: Some(3),
        in_test: Cases { filter: "^bits/few_keys/bf16/d64/0/h6kv1/", deal: 1 },
        in_all: Cases { filter: "^bits/few_keys/", deal: 1 },
        ..HOPPER
    },
    // Gradients by the fast kernel where it supports a problem, otherwise by the fallback.
    Row {
        in_test: Cases {
            filter: "^backward/(head_dim/bf16|group|modifiers/bf16/d64/(dbias_one_one|sink))",
            deal: 2,
        },
        in_all: Cases { filter: "^backward/", deal: 1 },
        ..HOPPER
    },
    // Blocks of 80 queries, which the table chooses from 8192 on.
    Row {
        tile: Some("block_m=80,dq_path=store_warp"),
        in_test: Cases {
            filter: "^backward/(head_dim/bf16/d128|modifiers/bf16/d128/sink/batch/0)$",
            deal: 1,
        },
        in_all: Cases {
            filter: "^backward/(head_dim/[a-z0-9]*/d128|modifiers/[a-z0-9]*/d128/(alibi|bias_16|dbias_one_head|sink)/)",
            deal: 1,
        },
        ..HOPPER_WALKING
    },
    // The CTAs of a cluster send their dS to each other.
    Row {
        in_test: Cases { filter: "^backward/wide/bf16/d256x256/(b|used/0)$", deal: 1 },
        in_all: Cases { filter: "^backward/(wide|modifiers)/bf16/", deal: 1 },
        ..HOPPER_WALKING
    },
    // AMD's kernels on MFMA where they support a problem, otherwise the fallback; then the fallback alone.
    Row {
        in_test: Cases {
            filter: "^backward/(pairs_.*/b?f16/|modifiers/bf16/d64/|in_turns/short_group/bf16/d128)",
            deal: 12,
        },
        in_all: Cases { filter: "^(backward|decode)/", deal: 1 },
        ..amd("gfx942", NONE)
    },
    Row {
        in_test: NONE,
        // Laws of f16 pages are left out: one has a subnormal key, which this architecture's matrix unit reads as 0.
        in_all: Cases { filter: "^(backward/|decode/(.*bf16|[^p].*/f16|paged/f16))", deal: 1 },
        ..amd("gfx90a", NONE)
    },
    Row { in_test: NONE, in_all: Cases { filter: "^(backward|decode)/", deal: 1 }, ..amd("gfx950", NONE) },
    Row {
        kernel: Some("simt"),
        in_test: NONE,
        in_all: Cases { filter: "^(backward|lists)/", deal: 1 },
        ..amd("gfx942", NONE)
    },
    Row {
        kernel: Some("simt"),
        // FP8 over several blocks, without head dimensions 224 and 256, whose kernels differ only in a loop's length.
        in_test: Cases {
            filter: "^((definition|guards|lists)/|fp8/([^b]|blocks/[^/]*/([^d]|d[^2])))",
            deal: 288,
        },
        in_all: Cases {
            filter: "^(addresses|definition|edges|fp8|guards|heads/[a-z_]*/(bf16|f16)/[^d]|lists|rare)/",
            deal: 1,
        },
        ..HOPPER
    },
    // Blackwell: short and ragged tiles, hidden NaN, packed heads; keys in parts and in order, every access ordered by
    // vector clocks; tiles drawn in any order, and asynchronous work late, the same bits.
    Row {
        in_test: Cases {
            filter: "^(edges/(off_tile|nan|inf|group|gqa|short_query).*bf16|heads/(batch|group)/.*bf16|rare/[a-z_]*/bf16/(gaps|group)$)",
            deal: 2,
        },
        ..BLACKWELL
    },
    Row {
        kernel: None,
        in_test: Cases { filter: FORWARD, deal: 192 },
        in_all: Cases { filter: FORWARD, deal: 1 },
        ..BLACKWELL
    },
    // Few queries over caches: pages by boxes and by copies, groups that leave rows over, shares, appends, trees.
    Row {
        mode: Mode::HappensBefore,
        multiprocessors: Some(3),
        in_test: Cases {
            filter: "^decode/(paged/bf16/p(3|16|256)/s3x129/b/hnd|unlike/bf16/12of1/q16/b|groups/13of1/wide/q3/p64|\
                     rotary/packed_q/bf16/new3/b|tree/random/bf16/q5|layouts/bf16/batch_over_packed/b)$",
            deal: 1,
        },
        in_all: Cases { filter: BLACKWELL_CACHES, deal: 1 },
        ..BLACKWELL
    },
    Row {
        arch: "sm_103a",
        mode: Mode::HappensBefore,
        multiprocessors: Some(3),
        in_all: Cases { filter: BLACKWELL_CACHES, deal: 4 },
        ..BLACKWELL
    },
    // A launch before converts FP8 caches to 16 bits.
    Row {
        kernel: Some("sm100_widened"),
        in_test: Cases { filter: "^decode/fp8_cache/e4m3fn/bf16/descale_plain/q1/(strided|p16)$", deal: 1 },
        in_all: Cases { filter: "^decode/fp8_cache/(e4m3fn|e5m2)/", deal: 1 },
        ..BLACKWELL
    },
    // FP8 caches with scales by rows, read and appended to, in each kernel that reads 16-bit caches.
    Row {
        kernel: Some("sm80_widened"),
        in_test: Cases {
            filter: "^decode/(fp8_rows/e4m3fn/f16/appended/new3/p16|fp8_rows_.*/e5m2/bf16/block7/q1/strided)$",
            deal: 1,
        },
        in_all: Cases { filter: "^decode/fp8_rows/(e4m3fn|e5m2)/", deal: 1 },
        ..AMPERE
    },
    Row {
        in_test: Cases { filter: "^decode/fp8_rows_.*/e4m3fn/f16/block16/q20/p16$", deal: 1 },
        in_all: Cases { filter: "^decode/fp8_rows.*/(e4m3fn|e5m2)/", deal: 1 },
        ..HOPPER_WALKING
    },
    Row {
        in_test: NONE,
        in_all: Cases { filter: "^decode/fp8_rows.*/(e4m3fn|e5m2)/", deal: 1 },
        ..BLACKWELL
    },
    Row {
        in_test: Cases { filter: "^decode/fp8_rows_.*/e4m3fnuz/bf16/block7/q20/strided$", deal: 1 },
        in_all: Cases { filter: "^decode/fp8_rows.*/(block[17]/.*/strided|packed)$", deal: 1 },
        ..amd("gfx942", NONE)
    },
    Row {
        in_test: NONE,
        in_all: Cases { filter: "^decode/fp8_rows.*/(block[17]/.*/strided|packed)$", deal: 1 },
        ..amd("gfx1100", NONE)
    },
    // The two CTAs of a pair wait for each other.
    Row {
        tile: Some("cluster=2,order=dynamic,split_keys=0,copy_bytes=0"),
        mode: Mode::HappensBefore,
        multiprocessors: Some(4),
        in_test: Cases { filter: "^edges/(mask_sq_gt_sk|group|gqa).*bf16", deal: 2 },
        in_all: Cases { filter: CLUSTER_CASES, deal: 1 },
        ..BLACKWELL
    },
    // Blackwell Ultra's loads from tensor memory also find maxima, in blocks that no mask cuts.
    Row {
        arch: "sm_103a",
        in_test: Cases { filter: "^edges/(off_tile|long|nan|inf).*bf16", deal: 2 },
        in_all: Cases { filter: "^(edges|heads|rare)/.*bf16", deal: 1 },
        ..BLACKWELL
    },
    Row {
        tile: Some("order=dynamic"),
        mode: Mode::HappensBefore,
        multiprocessors: Some(2),
        in_test: Cases { filter: "^laws/(twice|a_recorded).*/bf16/.*/b$", deal: 1 },
        in_all: Cases {
            filter: "^(laws/(twice|a_recorded)|heads/(batch|group|row_blocks)|rare/).*bf16",
            deal: 1,
        },
        ..BLACKWELL
    },
    Row {
        mode: Mode::DrawnOrder,
        multiprocessors: Some(3),
        in_test: Cases { filter: "^bits/few/.*/bf16/d64/b/(mixed_rows|towering)$", deal: 1 },
        in_all: Cases { filter: "^bits/few/", deal: 1 },
        ..BLACKWELL
    },
    Row {
        mode: Mode::Late,
        multiprocessors: Some(2),
        in_test: Cases { filter: "^bits/few/.*/bf16/d64/b/(mixed_rows|towering)$", deal: 1 },
        in_all: Cases { filter: "^bits/few/", deal: 1 },
        ..BLACKWELL
    },
    // Blackwell's backward, two blocks each way, the mask's edges, rows behind a sequence, additions in one
    // order: every access ordered by vector clocks; and where it refuses, the kernels that serve.
    Row {
        mode: Mode::HappensBefore,
        multiprocessors: Some(4),
        in_test: Cases {
            filter: "^backward/(over_blocks/bf16/d64/b$|in_turns/more_queries/bf16/d64|field/dbias_of_used_rows/bf16$|\
                modifiers/bf16/d64/bias_softcap_dropout/group)",
            deal: 1,
        },
        ..BLACKWELL
    },
    // Additions in one order give the same bits in whatever order CTAs run.
    Row {
        mode: Mode::DrawnOrder,
        multiprocessors: Some(9),
        in_test: Cases { filter: "^backward/in_turns/f32_gradients/", deal: 1 },
        in_all: Cases { filter: "^backward/in_turns/.*/d(64|128)/", deal: 1 },
        ..BLACKWELL
    },
    Row {
        mode: Mode::DrawnOrder,
        multiprocessors: Some(3),
        in_all: Cases { filter: "^bits/few_keys/", deal: 1 },
        ..BLACKWELL
    },
    // Wide heads: dQ in two parts; at D 256 and 200 two CTAs to a block of keys, hidden NaN that one of them computes
    // again, additions in one order.
    Row {
        mode: Mode::HappensBefore,
        multiprocessors: Some(4),
        in_test: Cases {
            filter: "^backward/(wide/bf16/d192x128/b:70,3|hidden/bf16/d200/b|in_turns/bf16/d200/b:20,3,2)$",
            deal: 1,
        },
        in_all: Cases { filter: WIDE_GRADIENTS, deal: 1 },
        ..BLACKWELL
    },
    Row {
        arch: "sm_103a",
        mode: Mode::HappensBefore,
        multiprocessors: Some(4),
        in_test: Cases { filter: "^backward/wide/bf16/d256x256/b$", deal: 1 },
        in_all: Cases { filter: WIDE_GRADIENTS, deal: 1 },
        ..BLACKWELL
    },
    Row { kernel: None, in_all: Cases { filter: "^backward/", deal: 1 }, ..BLACKWELL },
    // Masks as data and functions: lists of tiles, several to a CTA, cut blocks, whole ones, tiles without keys.
    Row {
        mode: Mode::HappensBefore,
        multiprocessors: Some(2),
        in_test: Cases {
            filter: "^masks/(forward/bf16/(batch/(all|intervals)|code/all)|\
                backward/bf16/(batch/intervals|group/all|ordered/keys/intervals))$",
            deal: 1,
        },
        in_all: Cases { filter: "^(code|masks)/.*/b?f16/", deal: 1 },
        ..BLACKWELL
    },
    Row {
        arch: "sm_103a",
        mode: Mode::HappensBefore,
        in_all: Cases { filter: "^(code|masks)/.*/b?f16/", deal: 1 },
        ..BLACKWELL
    },
    Row {
        mode: Mode::Garbage,
        in_all: Cases { filter: "^masks/.*/b?f16/([^cp]|c[^o])", deal: 1 },
        ..BLACKWELL
    },
    // The kernels on mma.sync: cases that found planted faults, with every access ordered by vector clocks; of the
    // others one in several.
    Row {
        mode: Mode::HappensBefore,
        in_test: Cases {
            filter: "^(edges/(off_tile|long|nan|inf|group|gqa|short_query)|heads/(batch|group|row_blocks)|rare)/.*bf16",
            deal: 16,
        },
        in_all: Cases { filter: AMPERE_CASES, deal: 1 },
        ..AMPERE
    },
    Row {
        kernel: None,
        in_test: Cases { filter: "^(addresses|definition|edges|guards|heads|laws|rare)/.*b?f16", deal: 96 },
        in_all: Cases { filter: FORWARD, deal: 1 },
        ..AMPERE
    },
    Row {
        in_test: Cases { filter: "^decode/.*bf16", deal: 24 },
        in_all: Cases { filter: "^decode/", deal: 1 },
        kernel: None,
        ..AMPERE
    },
    // Parts of a cache, page look-ups one block ahead, and unconverted FP8: each copy must complete before it is read.
    Row {
        mode: Mode::HappensBefore,
        in_test: Cases { filter: "^decode/split/bf16/(wide/q1/p1|e4m3fn/q1/strided|e5m2/q9/p64)$", deal: 1 },
        in_all: Cases { filter: "^decode/split/", deal: 1 },
        ..AMPERE
    },
    Row {
        kernel: None,
        mode: Mode::HappensBefore,
        in_test: Cases { filter: "^backward/(head_dim|hidden|edges|modifiers)/.*bf16", deal: 24 },
        in_all: Cases { filter: "^backward/", deal: 1 },
        ..AMPERE
    },
    // Finite garbage instead of NaN: finds copies without a wait, and unwritten registers.
    Row {
        mode: Mode::Garbage,
        in_test: Cases { filter: "^backward/(hidden/bf16/d64/b|head_dim/bf16/d64)$", deal: 1 },
        in_all: Cases { filter: "^(backward|decode|edges|heads|rare)/.*bf16", deal: 1 },
        kernel: None,
        ..AMPERE
    },
    Row {
        kernel: None,
        mode: Mode::Garbage,
        in_test: Cases { filter: "^decode/(last_keys|tables_apart)/bf16/latent/q1/p(7|16/0)$", deal: 1 },
        in_all: Cases { filter: "^(backward|decode|edges|heads|rare)/.*bf16", deal: 1 },
        ..HOPPER
    },
    Row {
        mode: Mode::Garbage,
        in_test: Cases { filter: "^backward/hidden/bf16/d64/b$", deal: 1 },
        in_all: Cases { filter: "^(backward|decode|edges|heads|rare)/.*bf16", deal: 1 },
        ..amd("gfx942", NONE)
    },
    // dQ is summed in memory, which the cost model chooses only for longer rows than the battery's.
    Row {
        tile: Some("one_pass=1"),
        mode: Mode::HappensBefore,
        in_test: Cases { filter: "^backward/(head_dim/bf16/d(64|128)|edges/bf16/s65x130/.*)$", deal: 1 },
        in_all: Cases {
            filter: "^backward/(head_dim/b?f16/d(32|64|128)|edges/b?f16/.*|hidden/b?f16/d(64|128)/.*)$",
            deal: 1,
        },
        ..AMPERE
    },
    // Wide heads and latent attention: several blocks, which two warpgroups take in turn, by TMA and by
    // copies; keys in parts.
    Row {
        kernel: Some("sm90_mla"),
        in_test: Cases {
            filter: "^decode/(latent/bf16/s(1x130|2x330)|wide/bf16/d(576x512|64x384)|wide_fp8/e4m3fn/bf16/.*s1x(130|460))/",
            deal: 1,
        },
        in_all: Cases {
            filter: "^decode/(latent|wide|wide_fp8|v_in_k/.*d576x512|(last_keys|tables_apart)/b?f16/latent)/",
            deal: 1,
        },
        ..HOPPER_WALKING
    },
    Row {
        kernel: Some("sm90_mla"),
        tile: Some("split_keys=64"),
        in_all: Cases { filter: "^decode/(latent|wide)/.*b?f16", deal: 1 },
        ..HOPPER_WALKING
    },
    // CTAs of a cluster fold the parts of their keys together.
    Row {
        kernel: Some("sm90_mla"),
        mode: Mode::HappensBefore,
        tile: Some("split_keys=64,fold_parts=2"),
        in_test: Cases { filter: "^decode/latent/bf16/s1x130/h16/0/strided$", deal: 1 },
        in_all: Cases { filter: "^decode/(latent/|wide_fp8/.*d576x512)", deal: 1 },
        ..HOPPER_WALKING
    },
    // Equal shares: parts of several sequences, one after another, by TMA, by copies and over FP8 caches.
    Row {
        kernel: Some("sm90_mla"),
        tile: Some("split_keys=64,shares=6"),
        multiprocessors: Some(6),
        in_test: Cases { filter: "^decode/unlike/bf16/latent(/q2/h5/p7|_fp8/recorded)$", deal: 1 },
        in_all: Cases {
            filter: "^decode/(unlike/b?f16/latent|latent/b?f16/(s[1-4]x|packed)|wide_fp8/.*d576x512|\
                     wide/b?f16/d(512x512/s70|512x64|576x512|264x272|320x320))",
            deal: 1,
        },
        ..HOPPER_WALKING
    },
    // Wide heads and latent attention on Blackwell, by pairs of CTAs: several blocks by TMA, boxes of pages and copies;
    // keys in parts; FP8 caches brought to 16 bits by a launch before.
    Row {
        kernel: Some("sm100_mla"),
        mode: Mode::HappensBefore,
        in_test: Cases { filter: "^decode/latent/bf16/(s2x330/h40/b/p1|s3x257/h2/t:60,70/p48)$", deal: 1 },
        in_all: Cases {
            filter: "^decode/(latent|wide|v_in_k/.*d576x512|(last_keys|tables_apart)/b?f16/latent)/",
            deal: 1,
        },
        ..BLACKWELL
    },
    Row {
        kernel: Some("sm100_mla"),
        tile: Some("split_keys=128,lazy_rescale_log2=0"),
        mode: Mode::Late,
        arch: "sm_103a",
        in_all: Cases { filter: "^decode/(latent|wide)/.*b?f16", deal: 1 },
        ..BLACKWELL
    },
    Row {
        kernel: Some("sm100_mla_widened"),
        in_all: Cases { filter: "^decode/wide_fp8/", deal: 1 },
        ..BLACKWELL
    },
    // Keys in pages: boxes by the lanes of a warp, copies, parts, and V of the pages of the block before. FP8 caches
    // widened in shared memory.
    Row {
        kernel: Some("sm90"),
        in_test: Cases {
            filter: "^decode/(paged/bf16/p(16|7)/s3x129/b/hnd|pages_hold_the_same_keys/bf16/q5/b/p16|split/bf16/e5m2/q9/p64)$",
            deal: 1,
        },
        in_all: Cases {
            filter: "^decode/((paged|shared_pages|no_keys|split|pages_[a-z_]*)/b?f16|last_keys/b?f16/d|\
                fp8_(cache|layouts)/e(4m3fn|5m2)|an_fp8_cache_is_one_widened_before/(packed|gaps|d256))",
            deal: 1,
        },
        ..HOPPER_WALKING
    },
    // A cache is converted once into the workspace: an FP8 cache, and one in pages.
    Row {
        kernel: Some("sm90_widened"),
        in_test: Cases {
            filter: "^decode/(fp8_cache/e4m3fn/bf16/descale_head/q20/p7|fp8_layouts/.*(paged/apart|packed/v_in_k)|paged/bf16/p3/s17x90/b/hnd)$",
            deal: 1,
        },
        in_all: Cases { filter: "^decode/(fp8_(cache|layouts)/e(4m3fn|5m2)|paged/b?f16)/", deal: 1 },
        ..HOPPER_WALKING
    },
    // FP8 caches, bit-equal to 16-bit caches, for each kernel that supports one of them.
    Row {
        kernel: None,
        in_test: Cases {
            filter: "^decode/an_fp8_cache_is_one_widened_before/(e5m2/bf16/d40/lengths/q7|gaps/d64/e4m3fn/f16|d320/e4m3fn/f16)$",
            deal: 1,
        },
        in_all: Cases { filter: "^decode/an_fp8_cache_is_one_widened_before/", deal: 1 },
        ..HOPPER_WALKING
    },
    Row {
        kernel: None,
        in_test: Cases {
            filter: "^decode/an_fp8_cache_is_one_widened_before/e5m2/bf16/d96/lengths/q1$",
            deal: 1,
        },
        in_all: Cases { filter: "^decode/an_fp8_cache_is_one_widened_before/", deal: 1 },
        ..BLACKWELL
    },
    Row {
        kernel: None,
        in_test: Cases {
            filter: "^decode/an_fp8_cache_is_one_widened_before/e4m3fn/f16/d64/lengths/q2$",
            deal: 1,
        },
        in_all: Cases { filter: "^decode/an_fp8_cache_is_one_widened_before/", deal: 1 },
        ..AMPERE
    },
    // Two tiles of rows share the blocks that TMA loads.
    Row {
        kernel: Some("sm90_mla"),
        tile: Some("cluster=2"),
        in_test: Cases { filter: "^decode/latent/bf16/s70x150/h1/b/strided$", deal: 1 },
        in_all: Cases { filter: "^decode/(latent|wide)/.*b?f16.*(strided|packed|p64)$", deal: 1 },
        ..HOPPER_WALKING
    },
    // The architecture has less shared memory, and so other tiles.
    Row {
        arch: "sm_89",
        in_test: Cases { filter: "^(edges/off_tile|heads/(batch|group))/bf16", deal: 4 },
        in_all: Cases { filter: AMPERE_CASES, deal: 1 },
        ..AMPERE
    },
    // FP8 products with both layouts of V, also V of 16 bits.
    Row {
        arch: "sm_89",
        in_test: Cases {
            filter: "^fp8/blocks/e4m3fn/(d64x64/b/r|d128x128/0/c|few_queries|v_bf16)$",
            deal: 1,
        },
        in_all: Cases { filter: "^fp8/.*(e4m3fn|e5m2)(/|$)", deal: 1 },
        ..AMPERE
    },
    // K and V loaded by TMA, issued by an extra warp.
    Row {
        arch: "sm_120a",
        mode: Mode::HappensBefore,
        in_test: Cases { filter: "^(edges/off_tile|heads/(batch|group))/bf16", deal: 6 },
        in_all: Cases { filter: AMPERE_CASES, deal: 1 },
        ..AMPERE
    },
    // Kernels that compute what Hopper's own kernel refuses.
    Row {
        arch: HOPPER_ARCH,
        in_test: Cases { filter: "^(edges/off_tile|heads/(batch|group))/bf16", deal: 4 },
        in_all: Cases { filter: AMPERE_CASES, deal: 1 },
        ..AMPERE
    },
    // Short queries: paged, appended, turned, quantised; in parts of one tile, which the short caches of the
    // battery are not cut into by themselves.
    Row {
        kernel: Some("cdna_decode"),
        in_test: Cases {
            filter: "^decode/(append/bf16/new4/q4/(p5|strided)|fp8_cache/e4m3fnuz/bf16/descale_head|long/bf16/s3x1024|\
                tree/random/bf16|last_keys/bf16/(d64|latent)/q1/p16|many_parts/bf16/k9100/q1|tables_apart/bf16/d64/q1/p7)",
            deal: 1,
        },
        in_all: NONE,
        ..amd("gfx942", NONE)
    },
    Row {
        kernel: Some("cdna_decode"),
        tile: Some("split_keys=32"),
        in_test: Cases { filter: "^decode/paged/bf16/p(7|64)/s(3x129|17x90)/b", deal: 1 },
        in_all: Cases { filter: "^decode/(paged|layouts|long|tree)/.*bf16", deal: 1 },
        ..amd("gfx942", NONE)
    },
    // FP8 caches must give the bits of equal 16-bit caches: in the forward kernel, converted before, and in decode
    // kernels.
    Row {
        in_test: Cases {
            filter: "^decode/an_fp8_cache_is_one_widened_before/(e5m2/bf16/d96/lengths/q1|latent/e4m3fn/f16)$",
            deal: 1,
        },
        in_all: Cases { filter: "^decode/an_fp8_cache_is_one_widened_before/", deal: 1 },
        ..amd("gfx942", NONE)
    },
    Row {
        in_test: Cases {
            filter: "^decode/an_fp8_cache_is_one_widened_before/(e5m2/bf16/d96/lengths/q1|gaps/d208/e5m2/bf16)$",
            deal: 1,
        },
        in_all: Cases { filter: "^decode/an_fp8_cache_is_one_widened_before/", deal: 1 },
        ..amd("gfx1201", NONE)
    },
    // Four waves share rows: latent ones, whose K is read once, and separate K and V.
    Row {
        kernel: Some("cdna_decode"),
        in_test: Cases {
            filter: "^decode/(latent/bf16/(s1x130|s2x330|s3x257|packed)|head_dim/bf16/d(320|512))",
            deal: 1,
        },
        in_all: NONE,
        ..amd("gfx942", NONE)
    },
    Row {
        kernel: Some("cdna_decode"),
        tile: Some("split_keys=64"),
        in_test: NONE,
        in_all: Cases { filter: "^decode/(latent|v_in_k/.*d576x512)/.*b?f16", deal: 1 },
        ..amd("gfx950", NONE)
    },
    amd("gfx90a", Cases { filter: "^(heads|rare|addresses)/.*bf16", deal: 16 }),
    amd("gfx942", Cases { filter: "^(heads|rare|addresses)/.*bf16", deal: 6 }),
    amd("gfx950", Cases { filter: "^(heads|rare|addresses)/.*bf16", deal: 8 }),
    // RDNA, whose two architectures lay their matrices out in two ways: tiles cut short, packed heads; FP8 on
    // gfx1201. The fallback, in waves of 32, computes what they leave.
    Row {
        kernel: Some("rdna_fwd"),
        in_test: Cases { filter: "^(edges/(off_tile|nan|gqa)|heads/(batch|group))/.*bf16", deal: 4 },
        in_all: NONE,
        ..amd("gfx1100", NONE)
    },
    Row {
        kernel: Some("rdna_fwd"),
        in_test: Cases { filter: "^(edges/(off_tile|nan|gqa)/.*bf16|fp8/blocks/e4m3fn/d128x128)", deal: 4 },
        in_all: NONE,
        ..amd("gfx1201", NONE)
    },
    // Their decode: pages, appended and turned rows, FP8 caches, a tree mask, parts of one tile; rows that
    // four waves share.
    Row {
        kernel: Some("rdna_decode"),
        in_test: Cases {
            filter: "^decode/(append/bf16/new4/q4/p5|paged/bf16/p7/s17x90/b|fp8_cache/e4m3fn/bf16/descale_head/q1/p16|\
                tree/random/bf16/q33|latent/bf16/s2x330/h5/b/p1)",
            deal: 1,
        },
        in_all: NONE,
        ..amd("gfx1100", NONE)
    },
    Row {
        kernel: Some("rdna_decode"),
        tile: Some("split_keys=32"),
        in_test: Cases { filter: "^decode/(paged/bf16/p64/s3x129/b|head_dim/bf16/d512$)", deal: 1 },
        in_all: Cases { filter: "^decode/(paged|layouts|long|tree|latent)/.*bf16", deal: 1 },
        ..amd("gfx1201", NONE)
    },
    Row {
        in_test: NONE,
        in_all: Cases { filter: "^(addresses|backward|laws)/", deal: 1 },
        ..amd("gfx1100", NONE)
    },
    Row {
        in_test: NONE,
        in_all: Cases { filter: "^(addresses|backward|laws)/", deal: 1 },
        ..amd("gfx1201", NONE)
    },
    // Lists of keys: gathers, parts of long lists, latent rows; gradients without an order, and in order by the slow
    // kernel.
    Row {
        in_test: Cases {
            filter: "^lists/(forward/bf16/(scattered|absent|beyond)|parts/f16/some_empty/|latent/bf16/d576x512/h5|layout/f16/(packed_lengths|addresses_of_5))",
            deal: 1,
        },
        in_all: Cases {
            filter: "^lists/(forward|topk|layout|tokens|heads|latent|wide|wide_fp8|score|parts|blocks|appended|fp8|fp8_cache|twice|repeated)/",
            deal: 1,
        },
        ..AMPERE
    },
    // Two caches in one softmax: by gathers, and by wgmma for latent rows.
    Row {
        in_test: Cases { filter: "^lists/two/bf16/(band/b:15,0/list|parts/absent/sink)$", deal: 1 },
        in_all: Cases { filter: "^lists/two/b?f16/", deal: 1 },
        ..AMPERE
    },
    Row {
        kernel: Some("sm90_mla"),
        in_test: Cases { filter: "^lists/two/bf16/latent/d512/list$", deal: 1 },
        in_all: Cases { filter: "^lists/two/b?f16/latent/", deal: 1 },
        ..HOPPER_WALKING
    },
    // Rows of bytes: with lists of one cache and of two, and without a list; whole tiles and parts.
    Row {
        in_test: Cases {
            filter: "^lists/rows/b(656/(one/h4|appended/new2/every)|584/(two/h7|appended/unseen/nan))$",
            deal: 1,
        },
        in_all: Cases { filter: "^lists/rows/", deal: 1 },
        ..AMPERE
    },
    Row {
        tile: Some("split_keys=0"),
        in_test: NONE,
        in_all: Cases { filter: "^lists/rows/", deal: 1 },
        ..AMPERE
    },
    Row {
        kernel: Some("sm90_mla"),
        in_test: Cases { filter: "^lists/rows/b(656/one/h7|584/two/h7)$", deal: 1 },
        in_all: Cases { filter: "^lists/rows/", deal: 1 },
        ..HOPPER_WALKING
    },
    Row {
        kernel: Some("sm90_mla"),
        tile: Some("split_keys=0"),
        in_test: NONE,
        in_all: Cases { filter: "^lists/rows/", deal: 1 },
        ..HOPPER_WALKING
    },
    Row {
        in_test: Cases { filter: "^lists/rows/b(656/(one/h4|appended/new1/list)|584/one/h7)$", deal: 1 },
        in_all: Cases { filter: "^lists/rows/", deal: 1 },
        ..lists_on("cdna_decode", "gfx942")
    },
    Row {
        in_test: NONE,
        in_all: Cases { filter: "^lists/rows/", deal: 1 },
        ..lists_on("cdna_decode", "gfx950")
    },
    Row { in_test: NONE, in_all: Cases { filter: "^lists/rows/", deal: 1 }, kernel: Some("simt"), ..AMPERE },
    Row {
        in_test: NONE,
        in_all: Cases { filter: "^lists/rows/", deal: 1 },
        kernel: Some("simt"),
        ..amd("gfx1100", NONE)
    },
    // AMD's lists: gathers, absent entries, parts, addresses and pages, latent rows with V in K's, sinks in the merge.
    Row {
        in_test: Cases {
            filter: "^lists/(forward/bf16/(scattered|absent|beyond)|parts/bf16/some_empty/infinite_sink|\
                layout/bf16/(packed_lengths|pages_of_7)|wide/bf16/d576/(some_empty|addresses))",
            deal: 1,
        },
        ..lists_on("cdna_decode", "gfx942")
    },
    Row {
        in_test: Cases { filter: "^lists/wide/f16/d576/infinite_sink_apart/h128$", deal: 1 },
        ..lists_on("cdna_decode", "gfx90a")
    },
    Row {
        in_test: Cases { filter: "^lists/wide/bf16/d512/packed$", deal: 1 },
        ..lists_on("cdna_decode", "gfx950")
    },
    Row {
        in_test: Cases {
            filter: "^lists/(forward/bf16/(absent|beyond)|layout/bf16/addresses_of_5)",
            deal: 1,
        },
        ..lists_on("rdna_decode", "gfx1100")
    },
    Row {
        tile: Some("split_keys=32"),
        in_test: Cases { filter: "^lists/wide/f16/d512/packed$", deal: 1 },
        ..lists_on("rdna_decode", "gfx1201")
    },
    // Gradients over AMD's lists: repeated keys, latent rows.
    Row {
        in_test: Cases { filter: "^lists/(unordered/bf16/d576|backward/bf16/repeated$)", deal: 1 },
        ..gradients_of_lists_on("cdna_lists", "gfx942")
    },
    gradients_of_lists_on("cdna_lists", "gfx90a"),
    gradients_of_lists_on("cdna_lists", "gfx950"),
    Row {
        in_test: Cases { filter: "^lists/backward/bf16/repeated$", deal: 1 },
        ..gradients_of_lists_on("rdna_lists", "gfx1100")
    },
    Row {
        in_test: Cases { filter: "^lists/unordered/bf16/packed$", deal: 1 },
        ..gradients_of_lists_on("rdna_lists", "gfx1201")
    },
    // Two caches on AMD: a band and a list, parts with keys of both, latent rows.
    Row {
        in_test: Cases { filter: "^lists/two/bf16/(band/b:15,0/list|latent/d512/list)$", deal: 1 },
        ..two_caches_on("cdna_decode", "gfx942")
    },
    two_caches_on("cdna_decode", "gfx90a"),
    two_caches_on("cdna_decode", "gfx950"),
    two_caches_on("rdna_decode", "gfx1100"),
    Row {
        in_test: Cases { filter: "^lists/two/bf16/pages/list$", deal: 1 },
        ..two_caches_on("rdna_decode", "gfx1201")
    },
    // Latent rows gathered for wgmma: V in K's rows and apart, blocks of which keys are absent, parts.
    Row {
        kernel: Some("sm90_mla"),
        in_test: Cases { filter: "^lists/wide/bf16/(d576/(padded|blocks_of_16)|d512/packed)$", deal: 1 },
        in_all: Cases { filter: LATENT_LISTS, deal: 1 },
        ..HOPPER_WALKING
    },
    Row {
        kernel: Some("sm90_mla"),
        tile: Some("split_keys=64"),
        in_test: Cases { filter: "^lists/wide/f16/d576/infinite_sink_apart/h128$", deal: 1 },
        in_all: Cases { filter: LATENT_LISTS, deal: 1 },
        ..HOPPER_WALKING
    },
    Row {
        kernel: Some("sm90_mla"),
        mode: Mode::Garbage,
        in_all: Cases { filter: LATENT_LISTS, deal: 1 },
        ..HOPPER
    },
    // Latent lists by pairs of CTAs on Blackwell: rows gathered by TMA, copied, and widened from FP8; parts.
    Row {
        kernel: Some("sm100_mla"),
        mode: Mode::HappensBefore,
        in_test: Cases { filter: "^lists/wide/bf16/d576/padded$", deal: 1 },
        in_all: Cases { filter: LATENT_LISTS, deal: 1 },
        ..BLACKWELL
    },
    Row {
        kernel: Some("sm100_mla"),
        tile: Some("by_tma=0"),
        mode: Mode::HappensBefore,
        in_all: Cases { filter: LATENT_LISTS, deal: 1 },
        ..BLACKWELL
    },
    Row {
        kernel: Some("sm100_mla"),
        tile: Some("split_keys=128,lazy_rescale_log2=0"),
        mode: Mode::Late,
        arch: "sm_103a",
        in_test: Cases { filter: "^lists/wide_fp8/e5m2/f16/d512$", deal: 1 },
        in_all: Cases { filter: LATENT_LISTS, deal: 1 },
        ..BLACKWELL
    },
    Row {
        kernel: Some("sm90_lists"),
        in_test: Cases { filter: "^lists/unordered/bf16/latent/d576/h130", deal: 1 },
        in_all: Cases { filter: "^lists/unordered/.*/(d576|d512|latent)", deal: 1 },
        ..HOPPER
    },
    Row {
        kernel: Some("sm90_lists"),
        mode: Mode::HappensBefore,
        in_test: Cases { filter: "^lists/unordered/f16/latent/d512/", deal: 1 },
        in_all: Cases { filter: "^lists/unordered/.*/(d576|d512|latent)", deal: 1 },
        ..HOPPER
    },
    Row {
        kernel: Some("sm80_lists"),
        in_test: Cases { filter: "^lists/(unordered/bf16/d128x64|backward/bf16/(repeated|d576))", deal: 1 },
        in_all: Cases { filter: "^lists/(unordered|backward)/b?f16/", deal: 1 },
        ..AMPERE
    },
    Row {
        kernel: Some("simt"),
        in_test: Cases { filter: "^lists/backward/bf16/sink_apart$", deal: 1 },
        in_all: Cases { filter: "^lists/backward/", deal: 1 },
        ..AMPERE
    },
    // Masks as data: blocks of a warp's rows that are whole, cut and empty; row kernels of both vendors.
    Row {
        in_test: Cases { filter: "^masks/.*/b?f16/(batch|group)/(all|lists)$", deal: 2 },
        in_all: Cases { filter: "^masks/.*/b?f16/([^c]|c[^o])", deal: 1 },
        ..AMPERE
    },
    // Lists of tiles: several for each CTA, cut blocks, whole ones, and tiles without keys.
    Row {
        kernel: Some("sm90"),
        mode: Mode::HappensBefore,
        multiprocessors: Some(2),
        in_test: Cases { filter: "^masks/forward/b?f16/(batch/all|window/all|long/intervals)$", deal: 1 },
        in_all: Cases { filter: "^masks/.*/b?f16/([^cp]|c[^o])", deal: 1 },
        ..HOPPER
    },
    Row {
        kernel: Some("sm90"),
        in_test: Cases { filter: "^masks/backward/b?f16/(batch/intervals|group/(all|lists))$", deal: 1 },
        ..HOPPER
    },
    // Masks as code become lists of tiles, alone and beside masks as data.
    Row {
        kernel: Some("sm90"),
        mode: Mode::HappensBefore,
        in_test: Cases {
            filter: "^(code/.*/bf16/(batch/mask|bounds/mask_(causal|heads_blocks))|masks/.*/bf16/(code/|ordered/keys/intervals))",
            deal: 1,
        },
        in_all: Cases { filter: "^(code/.*/b?f16/|masks/.*/b?f16/(code|ordered)/)", deal: 1 },
        ..HOPPER
    },
    Row {
        kernel: Some("sm90"),
        mode: Mode::Garbage,
        in_all: Cases { filter: "^masks/.*/b?f16/([^cp]|c[^o])", deal: 1 },
        ..HOPPER
    },
    Row {
        kernel: Some("simt"),
        in_test: Cases { filter: "^masks/.*/b?f16/few_queries/all$", deal: 1 },
        in_all: Cases { filter: "^masks/.*/b?f16/([^c]|c[^o])", deal: 1 },
        ..AMPERE
    },
    Row {
        kernel: Some("simt"),
        in_test: Cases { filter: "^masks/.*/b?f16/few_queries/(all|lists)$", deal: 1 },
        in_all: Cases { filter: "^masks/.*/b?f16/([^c]|c[^o])", deal: 1 },
        ..amd("gfx942", NONE)
    },
    // Scales by blocks in each format, with both layouts of V, pages and gaps.
    Row {
        kernel: Some("simt"),
        in_test: Cases {
            filter: "^scales/[a-z0-9_]*/(bf16/(descale_head/c|paged/p32|apart)|drawn/0[0-3]|backward/bf16/apart)",
            deal: 1,
        },
        in_all: Cases { filter: "^scales/", deal: 1 },
        ..AMPERE
    },
    Row {
        kernel: Some("simt"),
        in_test: Cases { filter: "^scales/[a-z0-9_]*/(bf16/packed_queries|backward/f32/apart)$", deal: 1 },
        in_all: Cases { filter: "^scales/", deal: 1 },
        ..amd("gfx942", NONE)
    },
    // Jetson Thor compiles the same text, with maxima by loads and also with polynomials, which sm_103a never combines.
    Row {
        arch: "sm_110a",
        in_test: Cases { filter: "^edges/long/bf16/s600x1100/b$", deal: 1 },
        in_all: Cases { filter: "^(edges|heads|rare)/.*bf16", deal: 4 },
        ..BLACKWELL
    },
    // MXFP8 in Blackwell's matrix unit, every access ordered by vector clocks, and late asynchronous work.
    Row {
        mode: Mode::HappensBefore,
        in_test: Cases { filter: "^scales/mxfp8_e4m3/bf16/descale_head/c/", deal: 1 },
        in_all: Cases { filter: MXFP8, deal: 1 },
        ..BLACKWELL
    },
    Row {
        mode: Mode::HappensBefore,
        in_test: Cases { filter: "^scales/nvfp4/bf16/(descale_head/c/|columns/d64)", deal: 1 },
        in_all: Cases { filter: NVFP4, deal: 1 },
        ..BLACKWELL
    },
    // Gradients with scales by blocks: a launch first writes the values.
    Row {
        kernel: Some("sm100_widened"),
        mode: Mode::HappensBefore,
        in_test: Cases {
            filter: "^scales/mxfp8_e4m3/backward/bf16/(descale_head|head_dim/d31x47$)",
            deal: 1,
        },
        in_all: Cases { filter: "^scales/[a-z0-9_]*/backward/(bf16|nan|drawn)", deal: 1 },
        ..BLACKWELL
    },
    Row {
        mode: Mode::Late,
        arch: "sm_103a",
        in_test: Cases { filter: "^scales/mxfp8_e5m2/bf16/(paged/p32|keys/65/r)$", deal: 1 },
        in_all: Cases { filter: MXFP8, deal: 1 },
        ..BLACKWELL
    },
    // Masks as data on AMD's tile kernels: lists of tiles, loops over them, gradients. `--all` runs every case.
    Row {
        kernel: Some("cdna_fwd"),
        in_test: Cases { filter: "^masks/forward/bf16/(batch/all|group/partial)$", deal: 1 },
        in_all: Cases { filter: "^masks/forward/b?f16/([^p]|p[^a])", deal: 1 },
        ..amd("gfx942", NONE)
    },
    Row {
        kernel: Some("cdna_bwd"),
        in_test: Cases { filter: "^masks/backward/bf16/batch/all$", deal: 1 },
        in_all: Cases { filter: "^masks/backward/b?f16/", deal: 1 },
        ..amd("gfx942", NONE)
    },
    Row {
        kernel: Some("rdna_fwd"),
        in_test: Cases { filter: "^masks/forward/bf16/batch/all$", deal: 1 },
        in_all: Cases { filter: "^masks/forward/b?f16/([^p]|p[^a])", deal: 1 },
        ..amd("gfx1100", NONE)
    },
    Row {
        kernel: Some("rdna_bwd"),
        in_test: NONE,
        in_all: Cases { filter: "^masks/backward/b?f16/", deal: 1 },
        ..amd("gfx1100", NONE)
    },
    masks_on("cdna_fwd", "^masks/forward/b?f16/([^p]|p[^a])", "gfx90a"),
    masks_on("cdna_bwd", "^masks/backward/b?f16/", "gfx90a"),
    masks_on("cdna_fwd", "^masks/forward/b?f16/([^p]|p[^a])", "gfx950"),
    masks_on("cdna_bwd", "^masks/backward/b?f16/", "gfx950"),
    masks_on("rdna_fwd", "^masks/forward/b?f16/([^p]|p[^a])", "gfx1201"),
    masks_on("rdna_bwd", "^masks/backward/b?f16/", "gfx1201"),
];

/// One case of each kernel for `cargo xtask test --quick`, chosen to show most: with accesses ordered by vector
/// clocks where possible.
pub(crate) const QUICK: &[Row] = &[
    quick("sm90", OFF_TILE, HOPPER_WALKING),
    quick("sm90", "^backward/head_dim/bf16/d64$", HOPPER_WALKING),
    quick("sm90_mla", "^decode/latent/bf16/s1x130/h16/0/strided$", HOPPER_WALKING),
    quick("sm90_widened", "^decode/fp8_layouts/e4m3fn/bf16/packed_over_paged/apart$", HOPPER_WALKING),
    quick("simt", OFF_TILE, HOPPER),
    quick("combine", "^combine/f32_to_f32/n3/s17/d128$", HOPPER),
    quick("sm80", OFF_TILE, Row { mode: Mode::HappensBefore, ..AMPERE }),
    quick("sm80", "^backward/head_dim/bf16/d64$", Row { mode: Mode::HappensBefore, ..AMPERE }),
    quick("sm80_widened", "^decode/fp8_rows/e4m3fn/f16/appended/new3/p16$", AMPERE),
    quick("sm90_lists", "^lists/unordered/bf16/latent/d512/h6x2/some_empty$", HOPPER_WALKING),
    quick("sm80_lists", "^lists/unordered/bf16/packed$", Row { mode: Mode::HappensBefore, ..AMPERE }),
    quick("sm100", OFF_TILE, Row { mode: Mode::HappensBefore, ..BLACKWELL }),
    quick("sm100_mla_widened", "^decode/wide_fp8/e4m3fn/f16/d576x512/s1x70/p64$", BLACKWELL),
    quick(
        "sm100_mla",
        "^decode/latent/bf16/s1x130/h16/0/strided$",
        Row { mode: Mode::HappensBefore, ..BLACKWELL },
    ),
    quick("sm100_widened", "^decode/fp8_cache/e4m3fn/bf16/descale_plain/q1/strided$", BLACKWELL),
    quick("sm100", "^backward/head_dim/bf16/d64$", Row { mode: Mode::HappensBefore, ..BLACKWELL }),
    quick("cdna_fwd", OFF_TILE, amd("gfx942", NONE)),
    quick("cdna_bwd", "^backward/head_dim/bf16/d64$", amd("gfx942", NONE)),
    quick("cdna_lists", "^lists/unordered/bf16/packed$", amd("gfx942", NONE)),
    quick("rdna_lists", "^lists/unordered/bf16/packed$", amd("gfx1201", NONE)),
    quick("cdna_decode", "^decode/paged/bf16/p16/s3x129/b/nhd$", amd("gfx942", NONE)),
    quick("simt", "^backward/head_dim/bf16/d64$", amd("gfx942", NONE)),
    quick("rdna_fwd", OFF_TILE, amd("gfx1100", NONE)),
    quick("rdna_fwd", OFF_TILE, amd("gfx1201", NONE)),
    quick("rdna_bwd", "^backward/head_dim/bf16/d64$", amd("gfx1100", NONE)),
    quick("rdna_decode", "^decode/paged/bf16/p16/s3x129/b/nhd$", amd("gfx1100", NONE)),
];

/// Two tiles of queries, the second one row long, under a causal mask.
const OFF_TILE: &str = "^edges/off_tile/bf16/s65x63/b$";

const fn masks_on(kernel: &'static str, filter: &'static str, arch: &'static str) -> Row {
    Row { kernel: Some(kernel), in_all: Cases { filter, deal: 1 }, ..amd(arch, NONE) }
}

/// Row of a kernel that reads lists of keys on AMD, forward. `--all` runs every case.
const fn lists_on(kernel: &'static str, arch: &'static str) -> Row {
    Row { kernel: Some(kernel), in_all: Cases { filter: FORWARD_LISTS, deal: 1 }, ..amd(arch, NONE) }
}

/// Row of a kernel for gradients over lists of keys on AMD. `--all` runs every case.
const fn gradients_of_lists_on(kernel: &'static str, arch: &'static str) -> Row {
    let in_all = Cases { filter: "^lists/(unordered|backward)/b?f16/", deal: 1 };
    Row { kernel: Some(kernel), in_all, ..amd(arch, NONE) }
}

/// Row of two caches in one softmax on AMD. `--all` runs every case.
const fn two_caches_on(kernel: &'static str, arch: &'static str) -> Row {
    let in_all = Cases { filter: "^lists/two/b?f16/", deal: 1 };
    Row { kernel: Some(kernel), in_all, ..amd(arch, NONE) }
}

const fn quick(kernel: &'static str, case: &'static str, of: Row) -> Row {
    Row { kernel: Some(kernel), in_test: Cases { filter: case, deal: 1 }, ..of }
}

/// Row of an AMD architecture's tile kernel. `tests/emulated_amd.rs` runs the rest of its battery.
const fn amd(arch: &'static str, in_test: Cases) -> Row {
    Row {
        kernel: None,
        backend: "rocm",
        arch,
        tile: None,
        mode: Mode::Eager,
        multiprocessors: None,
        in_test,
        in_all: Cases { filter: FORWARD, deal: 1 },
    }
}

impl Row {
    /// Name of the run's counts: `cuda sm_90a sm90 order=dynamic hb`.
    pub(crate) fn name(&self) -> String {
        let mode = match self.mode {
            Mode::Eager => None,
            Mode::HappensBefore => Some("happens-before"),
            Mode::DrawnOrder => Some("drawn order"),
            Mode::Late => Some("late"),
            Mode::Garbage => Some("garbage"),
        };
        [Some(self.backend), Some(self.arch), self.kernel, self.tile, mode]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// Step that runs these cases: all of them, or those whose kernel belongs to this part.
    pub(crate) fn step(&self, cases: Cases, fmha: &str) -> Option<Step> {
        if cases.deal == 0 {
            return None;
        }
        let mut words: Vec<String> = [fmha, "conformance", "--backend", self.backend, "--emulate", self.arch]
            .map(str::to_owned)
            .into();
        let mut add = |name: &str, value: &str| words.extend([name.to_owned(), value.to_owned()]);
        add("--filter", cases.filter);
        if let Some(kernel) = self.kernel {
            add("--kernel", kernel);
        }
        if let Some(tile) = self.tile {
            add("--tile", tile);
        }
        if cases.deal > 1 {
            add("--deal", &format!("1/{}", cases.deal));
        }
        let mut environment = Vec::new();
        match self.mode {
            Mode::Eager => {}
            Mode::HappensBefore => environment.push(("FMHA_EMULATE_MODE".to_owned(), "hb".to_owned())),
            Mode::DrawnOrder => environment.push(("FMHA_EMULATE_ORDER".to_owned(), "1".to_owned())),
            Mode::Late => environment.push(("FMHA_EMULATE_MODE".to_owned(), "late:1".to_owned())),
            Mode::Garbage => environment.push(("FMHA_EMULATE_GARBAGE".to_owned(), "1".to_owned())),
        }
        if let Some(count) = self.multiprocessors {
            environment.push(("FMHA_EMULATE_SMS".to_owned(), count.to_string()));
        }
        Some(Step::battery(self.name(), words, environment))
    }

    /// Description of the cases of this row that `cargo xtask test` leaves out.
    pub(crate) fn left_out(&self) -> Option<String> {
        (self.in_test != self.in_all && self.in_all.deal > 0).then(|| {
            format!("absent: the rest of {}, {}: cargo xtask test --all", self.name(), self.in_all.filter)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_of_the_battery_is_in_some_row() {
        let text = include_str!("../../tests/battery/families/mod.rs");
        let families: Vec<&str> = text.lines().filter_map(|l| l.trim().strip_suffix("::cases(),")).collect();
        assert!(families.len() >= 10, "{families:?}");
        // Cases of two caches are named like cases of lists.
        let elsewhere = ["backward", "bits", "decode", "two_caches"];
        for family in families.iter().filter(|family| !elsewhere.contains(family)) {
            let own = [format!("^{family}/"), format!("|{family})/")];
            let has_rows = ROWS.iter().any(|row| own.iter().any(|own| row.in_all.filter.contains(own)));
            assert!(FORWARD.contains(family) || has_rows, "no row of --all takes {family}");
        }
    }

    #[test]
    fn a_quick_run_has_every_kernel_that_another_run_names() {
        let quick: Vec<&str> = QUICK.iter().filter_map(|row| row.kernel).collect();
        for kernel in ROWS.iter().filter_map(|row| row.kernel) {
            assert!(quick.contains(&kernel), "{kernel}");
        }
        assert!(QUICK.iter().all(|row| row.in_test.deal == 1 && row.in_test.filter.ends_with('$')));
    }

    #[test]
    fn no_two_rows_have_a_name_and_a_filter_in_common() {
        let run_twice = |a: Cases, b: Cases| a.deal > 0 && a == b;
        for (i, a) in ROWS.iter().enumerate() {
            for b in ROWS[i + 1..].iter().filter(|b| b.name() == a.name()) {
                assert!(!run_twice(a.in_test, b.in_test), "{} in the test: {}", a.name(), a.in_test.filter);
                assert!(!run_twice(a.in_all, b.in_all), "{} in --all: {}", a.name(), a.in_all.filter);
            }
        }
    }
}
