//! Launch parameters of the choice of keys: the compile-time spec of an indexer's kernel, and the argument of every
//! launch.

use crate::abi::{AbiLiteral as _, AbiStruct as _, DevPtr, Untyped};
use crate::args::{ChooseArgs, DevSlice, DevSliceMut};
use crate::dtype::DType;
use crate::source::Header;
use crate::sparse::{BlockScore, CandidateKind, ChooseProblem, IndexKeys, Indexer};
use crate::{abi_spec, abi_struct};

abi_spec! {
    /// Facts for which an indexer's kernel is compiled.
    pub struct IndexSpec {
        /// q.
        pub dtype_q: DType,
        /// k.
        pub dtype_k: DType,
        /// Heads of q.
        pub num_heads: i32,
        /// Elements of a row of q and k.
        pub head_dim: i32,
        /// Whether each key has a scale.
        pub k_scale: bool,
        /// Whether k lies in pages.
        pub paged: bool,
    }
}

impl IndexSpec {
    /// The compile-time facts of an indexer.
    #[must_use]
    pub fn of(indexer: &Indexer) -> Self {
        Self {
            dtype_q: indexer.dtype_q,
            dtype_k: indexer.dtype_k,
            num_heads: indexer.num_heads as i32,
            head_dim: indexer.head_dim as i32,
            k_scale: indexer.k_scale,
            paged: indexer.keys != IndexKeys::Batch,
        }
    }
}

/// Words of a row's histograms; the device calls this number `kRowBins`.
pub const ROW_BINS: u64 = (1 << 8) + 2 * (1 << 12);

abi_struct! {
    /// Parameters of the launches of a choice. Rows are tokens; a launch takes rows `row_begin .. row_end`.
    pub struct ChooseParams {
        /// An indexer's q.
        pub q: DevPtr<Untyped>,
        /// An indexer's k.
        pub k: DevPtr<Untyped>,
        /// Weights of heads, `[rows, num_heads]`.
        pub weights: DevPtr<f32>,
        /// Scales of keys.
        pub k_scale: DevPtr<f32>,
        /// Pages of sequences.
        pub block_table: DevPtr<i32>,
        /// Number of keys of each sequence; null if all have `seqlen_k`.
        pub seqused_k: DevPtr<i32>,
        /// First candidate of each row; null if `candidates` are not ranges.
        pub first: DevPtr<i32>,
        /// One past the last candidate of each row.
        pub end: DevPtr<i32>,
        /// Scores of keys, as inputs; the first row is `row_begin`.
        pub key_scores: DevPtr<f32>,
        /// Scores of the keys or blocks to choose from; the first row is `row_begin`.
        pub scores: DevPtr<f32>,
        /// Output: each row's list of chosen keys or blocks, `[rows, topk]`; the first row is row 0.
        pub indices: DevPtr<i32>,
        /// Histograms of rows that several thread groups share, `[rows of the launch, ROW_BINS]`.
        pub bins: DevPtr<u32>,
        /// Counts of keys in each run of such shared rows, `[rows of the launch, parts, warps, 2]`.
        pub runs: DevPtr<u32>,
        /// Stride of k from one sequence or page to the next, in elements.
        pub k_outer: i64,
        /// Stride of k from a key to the next.
        pub k_key: i64,
        /// Stride of the scales from a sequence or page to the next.
        pub scale_outer: i64,
        /// Stride of the scales from a key to the next.
        pub scale_key: i64,
        /// First row of the launch.
        pub row_begin: i32,
        /// One past the last row of the launch.
        pub row_end: i32,
        /// Queries of a sequence.
        pub seqlen_q: i32,
        /// Keys of a sequence.
        pub seqlen_k: i32,
        /// Keys or blocks of a row.
        pub num_entries: i32,
        /// Keys of a page.
        pub page_size: i32,
        /// Pages of k.
        pub num_pages: i32,
        /// Entries of a sequence in the block table.
        pub max_pages: i32,
        /// 0: all keys are candidates; 1: causal; 2: ranges.
        pub candidates: i32,
        /// Entries of each row's list.
        pub topk: i32,
        /// Keys of a block; 0 if blocks are not scored by their maxima.
        pub block: i32,
        /// Number of first candidates that are always chosen.
        pub forced_first: i32,
        /// Number of last candidates that are always chosen.
        pub forced_last: i32,
        /// Number of strides in a chosen block; 0 if blocks are not scored by sums.
        pub per_block: i32,
        /// Number of strides in a compressed block.
        pub per_compressed: i32,
        /// Whether scores of keys that are no candidates are written as -inf.
        pub fills: i32,
        /// Number of thread groups that make one row's list.
        pub parts: i32,
        /// 0.
        pub reserved: i32,
    }
}

/// The argument of a choice's launches over all rows. The two addresses are those of the scores of keys, and of the
/// scores of the keys or blocks to choose from. `args` have passed [`check_choose`](crate::args::check_choose).
#[must_use]
pub fn choose_params(
    problem: &ChooseProblem,
    args: &ChooseArgs<'_>,
    [key_scores, scores]: [u64; 2],
) -> ChooseParams {
    let input = |slice: &Option<DevSlice<'_>>| slice.map_or(0, |slice| slice.as_ptr() as u64);
    let indices = args.indices.as_ref().map_or(0, |slice: &DevSliceMut<'_>| slice.as_mut_ptr() as u64);
    let indexer = problem.indexer();
    let strides = |of: fn(&Indexer) -> [u64; 2]| indexer.map_or([0; 2], of).map(u64::cast_signed);
    let [k_outer, k_key] = strides(|it| [it.strides_k.outer, it.strides_k.key]);
    let [scale_outer, scale_key] = strides(|it| [it.strides_scale.outer, it.strides_scale.key]);
    let [page_size, num_pages, max_pages] = match indexer.map(|indexer| indexer.keys) {
        Some(IndexKeys::Paged { page_size, num_pages, max_pages }) => [page_size, num_pages, max_pages],
        _ => [0; 3],
    }
    .map(u32::cast_signed);
    let (mut block, mut per_block, mut per_compressed) = (0, 0, 0);
    match problem.blocks.map(|blocks| blocks.score) {
        Some(BlockScore::Maximum { block: size }) => block = size.min(i32::MAX.unsigned_abs()).cast_signed(),
        Some(BlockScore::Sum { overlap, .. }) => {
            per_block = (overlap.selected / overlap.stride).cast_signed();
            per_compressed = (overlap.compressed / overlap.stride).cast_signed();
        }
        None => {}
    }
    ChooseParams {
        q: DevPtr::new(input(&args.q)),
        k: DevPtr::new(input(&args.k)),
        weights: DevPtr::new(input(&args.weights)),
        k_scale: DevPtr::new(input(&args.k_scale)),
        block_table: DevPtr::new(input(&args.block_table)),
        seqused_k: DevPtr::new(input(&args.seqused_k)),
        first: DevPtr::new(input(&args.first)),
        end: DevPtr::new(input(&args.end)),
        key_scores: DevPtr::new(key_scores),
        scores: DevPtr::new(scores),
        indices: DevPtr::new(indices),
        bins: DevPtr::NULL,
        runs: DevPtr::NULL,
        k_outer,
        k_key,
        scale_outer,
        scale_key,
        row_begin: 0,
        row_end: problem.rows() as i32,
        seqlen_q: problem.seqlen_q as i32,
        seqlen_k: problem.seqlen_k as i32,
        num_entries: problem.num_entries() as i32,
        page_size,
        num_pages,
        max_pages,
        candidates: match problem.candidates {
            CandidateKind::All => 0,
            CandidateKind::Causal => 1,
            CandidateKind::Ranges => 2,
        },
        topk: problem.topk as i32,
        block,
        forced_first: problem.blocks.map_or(0, |blocks| blocks.first.cast_signed()),
        forced_last: problem.blocks.map_or(0, |blocks| blocks.last.cast_signed()),
        per_block,
        per_compressed,
        fills: problem.write_scores.into(),
        parts: 1,
        reserved: 0,
    }
}

/// `fmha/choose_params.h`: the types that this file shares with the device.
#[must_use]
pub fn header() -> Header {
    let definitions = [IndexSpec::c_definition(), ChooseParams::c_definition()];
    Header::shared("fmha/choose_params.h", "fmha", &["fmha/spec.h", "fmha/params.h"], &definitions)
}
