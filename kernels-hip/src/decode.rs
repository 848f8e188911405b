//! Code that the decode kernels share: work items of some rows and a part of the keys, the second launch that
//! merges the parts, and the recipe ([`recipe`]).

mod cut;
pub(crate) mod recipe;

pub(crate) use cut::{Cut, MOST_SHARES, Room};

use std::borrow::Cow;

use fmha_core::abi::{DevPtr, FwdParams};
use fmha_core::source::{Entry, KernelSource};
use fmha_core::{
    CacheRows, DType, FwdArgs, FwdProblem, KvLayout, PlanOptions, QLayout, Refusal, Shape, Strides,
    cache_update,
};
use fmha_gpu::lists;

use crate::arch::Arch;
use crate::cdna_decode::CdnaDecodeParams;
use crate::device::{Device, refuse};
use crate::forward::params;
use crate::{CDNA, cdna, rdna};

const MERGE_HEADER: &str = "fmha/cdna/decode/merge.h";
/// Waves of a workgroup of the merging launch.
const MERGE_WAVES: u32 = 4;
/// Most queries of a call that decode computes with unsplit keys: longer ones use the forward kernel.
const SHORT_QUERY: u32 = 64;
/// Fewest keys of a call that a decode kernel computes: with fewer keys the forward kernel needs only one launch.
const LONG_CACHE: u32 = 512;
/// Words of the record of stretches before the sequences' words (`cdna/decode/pieces.h`).
const SHARES_HEADER: u64 = 2;

/// Most elements of a row that a single wave handles.
const WAVE_HEAD_DIM: u32 = 256;
/// Head dimensions of the longest rows that waves share. On CDNA registers limit a wave to 144 columns of Q and 128
/// of O.
const MAX_HEAD_DIM_QK: u32 = 576;
const MAX_HEAD_DIM_V: u32 = 512;
const DWORD: i64 = 4;

/// Refuses problems that the kernel supports with no tile.
///
/// # Errors
/// The field that `kernel` does not support, and its value.
pub(crate) fn takes(kernel: &'static str, problem: &FwdProblem) -> Result<(), Refusal> {
    let (qk, v) = (problem.dtypes.qk, problem.dtypes.v);
    if !matches!(qk, DType::F16 | DType::Bf16) || v != qk {
        refuse!(kernel, "dtype_qk {qk} with dtype_v {v} is not one 16-bit type");
    }
    let dims = problem.dims;
    let rows =
        [("head_dim_qk", dims.head_dim_qk, MAX_HEAD_DIM_QK), ("head_dim_v", dims.head_dim_v, MAX_HEAD_DIM_V)];
    for (field, dim, most) in rows {
        if dim > most {
            refuse!(kernel, "{field} {dim} is larger than {most}");
        }
    }
    if problem.drops() {
        refuse!(kernel, "p_drop {} is not taken", problem.dropout.p_drop);
    }
    if problem.dropout.write_keep_mask {
        refuse!(kernel, "write_keep_mask: keys that the mask hides are not walked");
    }
    lists::takes_places(problem, kernel).map_err(|reason| Refusal::new(kernel, reason))?;
    if !problem.walks_caches() {
        problem.masks.refuse(kernel)?;
    }
    cache_update::takes(problem, kernel)
}

/// The problem whose rows and keys are cut into work items. With lists, each token counts as a sequence of one
/// query whose keys are the entries of its list.
pub(crate) fn walked(problem: &FwdProblem) -> Cow<'_, FwdProblem> {
    if problem.walks_lists() { Cow::Owned(lists::of_tokens(problem)) } else { Cow::Borrowed(problem) }
}

/// Where a kernel's keys come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keys {
    /// Ranges of a sequence's keys.
    Sequence,
    /// Runs of a sequence's keys, whose rows have scales of their own.
    Scaled,
    /// Lists of one cache's keys.
    Lists,
    /// Keys of two caches; or rows of bytes without a list, with an empty second cache.
    TwoCaches,
}

impl Keys {
    pub(crate) fn of(problem: &FwdProblem) -> Self {
        if problem.walks_caches() {
            Self::TwoCaches
        } else if problem.lists.is_some() {
            Self::Lists
        } else if problem.cache.scales.is_some() {
            Self::Scaled
        } else {
            Self::Sequence
        }
    }

    /// Name of the device text's class that finds these keys.
    pub(crate) const fn places(self) -> &'static str {
        match self {
            Self::Sequence => "fmha::cdna::decode::SequencePlaces",
            Self::Scaled => "fmha::cdna::decode::ScaledPlaces",
            Self::Lists => "fmha::cdna::decode::ListPlaces",
            Self::TwoCaches => "fmha::cdna::decode::TwoPlaces",
        }
    }

    /// Text of an entry's parameters.
    pub(crate) const fn entry_params(self) -> &'static str {
        match self {
            Self::Sequence => "CdnaDecodeParams p",
            Self::Scaled => "ScaledDecodeParams p",
            Self::Lists => "ListDecodeParams p",
            Self::TwoCaches => "TwoDecodeParams p",
        }
    }

    /// Argument of the kernel in its entry.
    pub(crate) const fn entry_argument(self) -> &'static str {
        match self {
            Self::Sequence => "p",
            Self::Scaled | Self::Lists | Self::TwoCaches => "p.decode",
        }
    }

    /// Whether a list, or two caches, say which keys there are.
    pub(crate) const fn are_listed(self) -> bool {
        matches!(self, Self::Lists | Self::TwoCaches)
    }

    /// The keys as the merging launch knows them: it reads none, so no scales.
    const fn of_merge(self) -> Self {
        if self.are_listed() { self } else { Self::Sequence }
    }
}

/// Whether a row is too long for one wave, so that waves share it.
pub(crate) fn shares_rows(problem: &FwdProblem) -> bool {
    problem.dims.head_dim_qk.max(problem.dims.head_dim_v) > WAVE_HEAD_DIM
}

/// Whether all rows of Q, K and V begin at dwords if the first one does; cache elements have this many bytes.
pub(crate) fn strides_are_dwords(problem: &FwdProblem, cache_bytes: u64) -> bool {
    let cache_bytes = cache_bytes.cast_signed();
    let whole = |strides: Strides, shape: Shape, bytes: i64| {
        let live = |extent: u32, stride: i64| if extent > 1 { stride } else { 0 };
        // Rows of bytes lie side by side, whatever their strides in elements are.
        let seq = if bytes == 1 && problem.cache.rows.is_some() { 0 } else { strides.seq };
        [live(shape.batch, strides.batch), seq, live(shape.head, strides.head)]
            .iter()
            .all(|stride| stride.wrapping_mul(bytes) % DWORD == 0)
    };
    whole(problem.strides.q, problem.shape_q(), 2)
        && whole(problem.strides.k, problem.shape_k(), cache_bytes)
        && whole(problem.strides.v, problem.shape_v(), cache_bytes)
        && problem.second.is_none_or(|second| {
            let alone = second.alone(problem);
            whole(second.k, alone.shape_k(), cache_bytes) && whole(second.v, alone.shape_v(), cache_bytes)
        })
}

/// Refuses rows of bytes, for a problem whose rows begin on no dwords.
///
/// # Errors
/// The strides, as a refusal of `kernel`.
pub(crate) fn refuse_rows_of_bytes(kernel: &'static str, problem: &FwdProblem) -> Result<(), Refusal> {
    let Some(bytes) = problem.cache.rows.map(CacheRows::row_bytes) else { return Ok(()) };
    let (q, k, v) = (problem.strides.q, problem.strides.k.batch, problem.strides.v.batch);
    let second = problem.second.map_or(0, |second| second.k.batch);
    refuse!(
        kernel,
        "cache_rows of {bytes} bytes beside strides q.batch {}, q.seq {} and q.head {} of two bytes, k.batch {k}, \
         v.batch {v} and the second cache's k.batch {second} of one: rows begin on no dwords",
        q.batch,
        q.seq,
        q.head
    );
}

/// Pieces of work: `block_rows` rows of a group, and a part of a sequence's keys or a share of all
/// sequences'.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Parts {
    pub(crate) cut: Cut,
    /// Elements of a part's row of O.
    pub(crate) row_elems: i32,
    /// Number of rows (queries times heads) of the call.
    pub(crate) rows: u64,
    /// Number of rows of all parts together.
    part_rows: u64,
    pub(crate) row_blocks: u32,
    /// Number of parts of the longest sequence, or of stretches of all sequences' keys.
    num_parts: u32,
    /// Number of pieces of work, each with some rows and a part of the keys.
    pub(crate) pieces: u32,
    /// Number of words that record how the keys were dealt to workgroups in shares.
    dealt_words: u64,
    /// Whether the plan promises row invariance: the bits of a row depend on its own keys alone.
    pub(crate) row_invariant: bool,
    /// How keys are found.
    pub(crate) keys: Keys,
}

/// Most keys of a sequence in a row-invariant plan: P's scale is one constant for all lengths.
const MOST_INVARIANT_KEYS: u32 = (1 << 24) - 1;

/// Most bytes of parts in a row-invariant plan: all rows' parts lie in the workspace at once, so they grow with the
/// square of the length.
const MOST_INVARIANT_BYTES: u64 = 16 << 30;

impl Parts {
    /// The work items of this cut.
    ///
    /// # Errors
    /// Numbers that exceed a grid, as a refusal of `kernel`.
    pub(crate) fn of(
        kernel: &'static str,
        problem: &FwdProblem,
        arch: Arch,
        block_rows: u32,
        (cut, row_elems): (Cut, i32),
        options: &PlanOptions,
    ) -> Result<Self, Refusal> {
        let dims = problem.dims;
        let row_invariant = options.row_invariant;
        if row_invariant && dims.seqlen_k > MOST_INVARIANT_KEYS {
            refuse!(
                kernel,
                "row_invariant true: seqlen_k {} is larger than {MOST_INVARIANT_KEYS}",
                dims.seqlen_k
            );
        }
        let rows_of_sequence = u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
        let rows = u64::from(dims.batch) * rows_of_sequence;
        let row_blocks = row_blocks(problem, block_rows);
        let Cut { keys: split_keys, shares, .. } = cut;
        let of_sequence = row_blocks.saturating_mul(dims.num_heads_kv.into());
        let batch = u64::from(dims.batch);
        // A part ends with a stretch or with a sequence.
        let (num_parts, parts, dealt_words) = if shares > 0 {
            (shares, u64::from(shares) + batch, SHARES_HEADER + batch + 1)
        } else {
            let num_parts = dims.seqlen_k.div_ceil(split_keys).max(1);
            (num_parts, batch.saturating_mul(num_parts.into()), 0)
        };
        let cuts = if shares > 0 { 1 } else { batch };
        let pieces = of_sequence.saturating_mul(cuts).saturating_mul(num_parts.into());
        // The merging launch has one workgroup for each row.
        let most = u64::from(u32::MAX / merge_threads(arch));
        if pieces > most || rows > most {
            refuse!(
                kernel,
                "lengths, heads and batch make {pieces} waves of {split_keys} keys and {rows} rows, more than {most}"
            );
        }
        let parts = Self {
            cut,
            row_elems,
            rows,
            part_rows: rows_of_sequence.saturating_mul(parts),
            row_blocks: row_blocks as u32,
            num_parts,
            pieces: pieces as u32,
            dealt_words,
            row_invariant,
            keys: Keys::of(problem),
        };
        let bytes = parts.workspace_bytes();
        if bytes >= 1 << 62 {
            refuse!(kernel, "the workspace would be 2^62 bytes or more");
        }
        if row_invariant && bytes > MOST_INVARIANT_BYTES {
            refuse!(
                kernel,
                "row_invariant true: batch {}, num_heads_q {}, seqlen_q {} and seqlen_k {} make parts of {bytes} \
                 bytes, more than {MOST_INVARIANT_BYTES}",
                dims.batch,
                dims.num_heads_q,
                dims.seqlen_q,
                dims.seqlen_k
            );
        }
        Ok(parts)
    }

    /// Bytes of the parts, followed by the record of stretches.
    pub(crate) fn workspace_bytes(&self) -> u64 {
        self.dealt_at().saturating_add(4 * self.dealt_words)
    }

    /// Address of the record of how shares were dealt.
    fn dealt_at(&self) -> u64 {
        self.part_rows.saturating_mul(4 * (u64::from(self.row_elems.unsigned_abs()) + 2))
    }

    /// Source of the launch that merges the parts of each row.
    pub(crate) fn merge_source(&self, arch: Arch) -> KernelSource {
        let (threads, keys) = (merge_threads(arch), self.keys.of_merge());
        let entry = Entry {
            include: MERGE_HEADER,
            constants: &[],
            bounds: &crate::group_of(threads),
            params: keys.entry_params(),
            call: &format!(
                "cdna::decode::merge<{}, {}>({});",
                self.row_elems,
                keys.places(),
                keys.entry_argument()
            ),
        };
        crate::source(&entry, CDNA)
    }

    /// Arguments of both launches; the parts lie at `workspace`.
    pub(crate) fn params(
        &self,
        problem: &FwdProblem,
        args: &FwdArgs<'_>,
        fwd: &FwdParams,
        (waves_of_group, num_xcds): (u32, u32),
    ) -> CdnaDecodeParams {
        let rows = match problem.layout.q {
            QLayout::Packed => 0,
            QLayout::Batch => problem.dims.seqlen_q,
        };
        let workspace = fwd.workspace.0;
        CdnaDecodeParams {
            call: params(problem, fwd),
            o: DevPtr::new(workspace),
            stats: DevPtr::new(workspace + self.part_rows * 4 * u64::from(self.row_elems.unsigned_abs())),
            tree_mask: DevPtr::new(args.cache.tree_mask.as_ref().map_or(0, |mask| mask.as_ptr() as u64)),
            tree_mask_batch: rows.into(),
            tree_mask_words: problem.tree_mask_words() as i32,
            shares: DevPtr::new(if self.dealt_words > 0 { workspace + self.dealt_at() } else { 0 }),
            part_keys: self.cut.keys as i32,
            num_parts: self.num_parts as i32,
            round: self.cut.round as i32,
            row_blocks: self.row_blocks as i32,
            num_waves: self.pieces as i32,
            waves_of_group: waves_of_group as i32,
            num_xcds: num_xcds as i32,
            scale_keys: if self.row_invariant { MOST_INVARIANT_KEYS as i32 } else { 0 },
            reserved: 0,
        }
    }

    /// Fields of the work items that a plan prints.
    pub(crate) fn details(&self, problem: &FwdProblem) -> [(&'static str, String); 2] {
        let Self { cut, row_blocks, num_parts, .. } = self;
        let ratio = problem.gqa_ratio();
        let parts = match cut.shares {
            0 if self.keys.are_listed() => {
                format!("{num_parts} of the longest list, merged by a second launch")
            }
            0 => format!("{num_parts} of the longest sequence, merged by a second launch"),
            _ => format!(
                "keys of all sequences in {num_parts} equal stretches of {} at least, merged by a second launch",
                cut.keys
            ),
        };
        let rows = if self.keys.are_listed() {
            format!("{row_blocks} blocks a token and KV head: {ratio} heads")
        } else {
            format!("{row_blocks} blocks a KV head: {} queries of {ratio} heads", problem.dims.seqlen_q)
        };
        [("rows", rows), ("parts", parts)]
    }
}

/// Field of a plan that tells where the keys come from.
pub(crate) fn cache_details(problem: &FwdProblem) -> Vec<(&'static str, String)> {
    let mut details = Vec::new();
    if problem.stored_k() != problem.dtypes.qk {
        details.push(("cache", format!("{} widened to {} on load", problem.stored_k(), problem.dtypes.qk)));
    }
    if let Some(scales) = problem.cache.scales {
        let words = format!("a scale for each {} rows of a KV head, read with them", scales.block);
        details.push(("scales", words));
    }
    if let Some(rows) = problem.cache.rows {
        let words =
            format!("rows of {} bytes, widened to {} in registers", rows.row_bytes(), problem.dtypes.qk);
        details.push(("cache", words));
    }
    if cache_update::is_wanted(problem) {
        details.push(("before", format!("{} writes new keys and values", crate::rows::UPDATE)));
    }
    if problem.walks_caches() {
        let keys = problem.most_walked_keys();
        details.push((
            "caches",
            format!("{keys} keys of two caches a token at most, entries read two tiles ahead"),
        ));
    } else if let Some(lists) = problem.lists {
        details.push(("lists", format!("{} entries a token, read two tiles ahead", lists.topk)));
    }
    if let (KvLayout::Paged { page_size }, false) = (problem.layout.kv, problem.lists_addresses()) {
        details.push(("pages", format!("{page_size} keys each, looked up a tile ahead")));
    }
    details
}

/// Number of blocks of this many rows in the longest query of a group.
pub(crate) fn row_blocks(problem: &FwdProblem, block_rows: u32) -> u64 {
    (u64::from(problem.dims.seqlen_q) * u64::from(problem.gqa_ratio())).div_ceil(block_rows.into())
}

/// Threads of a workgroup of the merging launch.
pub(crate) const fn merge_threads(arch: Arch) -> u32 {
    MERGE_WAVES * arch.wave_threads()
}

/// Refuses calls that the architecture's forward kernel supports and computes as fast, or whose bits would
/// otherwise depend on the number of queries per call.
///
/// # Errors
/// Why the call is left to the forward kernel.
pub(crate) fn leaves_to_forward(
    kernel: &'static str,
    problem: &FwdProblem,
    device: Device,
    options: &PlanOptions,
) -> Result<(), Refusal> {
    let whole = PlanOptions::default();
    let (forward, is_taken) = match device.arch.is_rdna() {
        true => (rdna::NAME, rdna::accept(problem, device, &whole).is_ok()),
        false => (cdna::NAME, cdna::accept(problem, device, &whole).is_ok()),
    };
    // A row-invariant plan uses one kernel for all calls, and the forward kernel reads no pages.
    let is_left = is_taken && !problem.walks_lists();
    if options.kernel.as_deref() == Some(kernel) || !is_left || options.row_invariant {
        return Ok(());
    }
    let dims = problem.dims;
    if options.batch_invariant {
        refuse!(
            kernel,
            "batch_invariant: {forward} takes a query of {} tokens alone or among many",
            dims.seqlen_q
        );
    }
    if dims.seqlen_q > SHORT_QUERY {
        refuse!(kernel, "seqlen_q {} is more than {SHORT_QUERY}, and {forward} takes it", dims.seqlen_q);
    }
    if dims.seqlen_k < LONG_CACHE {
        refuse!(kernel, "seqlen_k {} is less than {LONG_CACHE}, and {forward} takes it", dims.seqlen_k);
    }
    Ok(())
}
