//! Lists, under masks as data, of the blocks of keys that each tile of queries sees, or of the blocks of queries
//! that see each tile of keys. A small launch writes them to the workspace before the kernel that reads them.

pub use fmha_core::TileOf;
use fmha_core::abi::{AbiStruct as _, DevPtr, FwdParams};
use fmha_core::expr::{Function, Node, Variable};
use fmha_core::masks::{MaskDataParams, MaskTensor};
use fmha_core::source::Header;
use fmha_core::spec::{CodeKind, FwdSpec};
use fmha_core::{FwdProblem, KvLayout, MaskArgs, QLayout, Result, TileLists, Workspace, abi_struct};

use crate::driver::Driver;
use crate::launches::{Launch, Stage};
use crate::steps::Step;

/// The launch's name in plans.
pub const NAME: &str = "tile_list";

/// Threads of a group of the launch that lists, for each tile, the blocks that it sees.
pub const THREADS: u32 = 256;

/// A vendor's launch that lists, for each tile, the blocks that it sees under masks given as data.
pub trait ListsTiles {
    /// The launch, with one group for each of `lists` and the arguments `FwdParams`,
    /// [`MaskDataParams`](fmha_core::masks::MaskDataParams), [`TileList`]. It reads only the layouts of Q, K and V
    /// from the spec; `block` is the number of queries and keys of a tile.
    fn list_tiles(&self, spec: &FwdSpec, of: TileOf, block: [i32; 2], code: MaskCode, lists: u32) -> Launch;
}

/// How kernels that read lists of blocks evaluate a mask function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskCode {
    /// The call has no mask function.
    None,
    /// The launch that makes lists, and the kernel in partly masked blocks, evaluate the mask as code for each
    /// pair.
    Asked,
    /// A launch before all others writes the mask as code into the bits of the masks as data, and no other kernel
    /// evaluates it.
    InBits,
}

/// Memory for the bits of the pairs that a mask function shows; each word has 32 keys of one query.
#[derive(Clone, Copy, Debug, PartialEq)]
struct FunctionBits {
    place: u64,
    /// Number of words of a query.
    row: u32,
    /// Number of words of a sequence; 0 if all sequences share them.
    batch: u64,
    heads: u32,
}

abi_struct! {
    /// Kernel argument with the list of each tile: blocks of keys for a tile of queries, or blocks of queries for a
    /// tile of keys. There is one row for each sequence, head of the masks and tile.
    pub struct TileList {
        /// Number of blocks in each row that the mask hides in part, and number of those that it shows whole.
        pub counts: DevPtr<i32>,
        /// Blocks of a row: partly masked ones from its begin upwards, fully visible ones from its end downwards.
        /// NVIDIA's lists of blocks of queries have the words of `fmha/listed_block.h`.
        pub blocks: DevPtr<i32>,
        /// Tiles of the longest sequence.
        pub num_tiles: i32,
        /// Capacity of a row, in blocks.
        pub max_blocks: i32,
        /// Number of heads with their own lists in a sequence; 0 if all sequences share the lists.
        pub heads_of_batch: i32,
        /// Number of query heads that share one head's lists.
        pub heads_ratio: i32,
        /// The steps of each row with their queries ascending, two words each: the block, and its rank among the
        /// tiles that list it. After the rows of each head comes a row of counters. Null if additions have no fixed
        /// order.
        pub ranks: DevPtr<i32>,
    }
}

/// Lists of a problem's tiles, and their offsets in the workspace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TileListPlan {
    list: TileList,
    of: TileOf,
    block: [i32; 2],
    rows: u32,
    counts: u64,
    blocks: u64,
    ranks: Option<u64>,
    code: MaskCode,
    bits: Option<FunctionBits>,
    /// End of the part of the workspace that the lists fill.
    end: u64,
}

/// Most lists of a problem: a group of [`THREADS`] threads makes each, and AMD counts a grid's threads in 32 bits.
const MOST_LISTS: u64 = (u32::MAX / THREADS) as u64;

/// Most bytes of lists: they grow with the square of the length, and `sm80` supports the same masks without lists.
const MOST_BYTES: u64 = 4 << 30;

/// Most bytes of the bits of a mask function: 32768 queries times 32768 keys.
const MOST_BYTES_OF_BITS: u64 = 128 << 20;

/// Fewest query heads for which the bits are written once for all heads; with fewer heads kernels evaluate the
/// function itself.
const LEAST_HEADS_OF_BITS: u32 = 4;

impl TileListPlan {
    /// Plans lists for tiles and blocks of `block_m` queries and `block_n` keys, placed after `before` in the
    /// workspace; also returns the whole workspace.
    ///
    /// # Errors
    /// More rows than a grid can have groups, with the fields that cause them.
    pub fn new(
        problem: &FwdProblem,
        of: TileOf,
        block: [i32; 2],
        before: Workspace,
    ) -> Result<(Self, Workspace), String> {
        let dims = problem.dims;
        let heads = heads_of(problem);
        let queries = dims.seqlen_q.div_ceil(block[0].unsigned_abs());
        let keys = dims.seqlen_k.div_ceil(block[1].unsigned_abs());
        let (tiles, blocks) = if of == TileOf::Queries { (queries, keys) } else { (keys, queries) };
        let max_blocks = blocks.max(1);
        let batch = if shared_by_batch(problem) { dims.batch.min(1) } else { dims.batch };
        let rows = u64::from(batch) * u64::from(heads) * u64::from(tiles);
        if rows >= MOST_LISTS {
            return Err(format!(
                "seqlen_q {}, seqlen_k {}, {heads} heads of masks and batch {} make {rows} lists of tiles, not below {MOST_LISTS}",
                dims.seqlen_q, dims.seqlen_k, dims.batch
            ));
        }
        // The counts begin at a multiple of 128 bytes, the L2's line.
        let counts = before.bytes.next_multiple_of(128);
        let blocks = (counts + 8 * rows).next_multiple_of(128);
        let list = TileList {
            counts: DevPtr::NULL,
            blocks: DevPtr::NULL,
            num_tiles: tiles.max(1).cast_signed(),
            max_blocks: max_blocks.cast_signed(),
            heads_of_batch: if shared_by_batch(problem) { 0 } else { heads.cast_signed() },
            heads_ratio: (dims.num_heads_q / heads.max(1)).max(1).cast_signed(),
            ranks: DevPtr::NULL,
        };
        let bytes = blocks + 4 * rows * u64::from(max_blocks);
        if bytes > MOST_BYTES {
            return Err(format!(
                "lists of tiles would take {bytes} bytes of workspace, more than {MOST_BYTES}"
            ));
        }
        let ranks = None;
        Ok((
            Self {
                list,
                of,
                block,
                rows: rows as u32,
                counts,
                blocks,
                ranks,
                code: if problem.code.mask.is_some() { MaskCode::Asked } else { MaskCode::None },
                bits: None,
                end: bytes,
            },
            Workspace { bytes, ..before },
        ))
    }

    /// Adds steps and ranks of the listed blocks, placed at the end of `workspace`.
    ///
    /// # Errors
    /// More bytes than lists may take.
    pub fn ordered(self, workspace: Workspace) -> Result<(Self, Workspace), String> {
        let ranks = workspace.bytes.next_multiple_of(128);
        let rows = u64::from(self.rows) + u64::from(self.groups());
        let bytes = ranks + 8 * rows * u64::from(self.list.max_blocks.unsigned_abs());
        if bytes > MOST_BYTES {
            return Err(format!(
                "lists of tiles in one order would take {bytes} bytes of workspace, more than {MOST_BYTES}"
            ));
        }
        Ok((Self { ranks: Some(ranks), end: bytes, ..self }, Workspace { bytes, ..workspace }))
    }

    /// Adds bits of the mask as code, placed at the end of `workspace`, if all heads share the function and the
    /// call has no bits of its own. The bits grow with the product of the lengths; above 128 MiB none are added.
    #[must_use]
    pub fn in_bits(self, problem: &FwdProblem, workspace: Workspace) -> (Self, Workspace) {
        let dims = problem.dims;
        let is_shared = !reads_head(problem) && dims.num_heads_q >= LEAST_HEADS_OF_BITS;
        let is_free = problem.masks.bits.is_none() && problem.layout.q == QLayout::Batch;
        if self.code == MaskCode::None || !is_shared || !is_free {
            return (self, workspace);
        }
        let row = dims.seqlen_k.div_ceil(32).next_multiple_of(4);
        let of_sequence = u64::from(dims.seqlen_q) * u64::from(row);
        let (sequences, batch) =
            if shared_by_batch(problem) { (1, 0) } else { (u64::from(dims.batch), of_sequence) };
        let place = workspace.bytes.next_multiple_of(128);
        let bytes_of_bits = 4 * of_sequence.saturating_mul(sequences);
        if bytes_of_bits > MOST_BYTES_OF_BITS {
            return (self, workspace);
        }
        let bytes = place + bytes_of_bits;
        let bits = Some(FunctionBits { place, row, batch, heads: dims.num_heads_q });
        (Self { code: MaskCode::InBits, bits, end: bytes, ..self }, Workspace { bytes, ..workspace })
    }

    /// How the kernels evaluate the mask function.
    #[must_use]
    pub fn code(&self) -> MaskCode {
        self.code
    }

    /// Number of words in a row of the mask-as-code bits, and number of sequences with their own bits; `None`
    /// without such bits.
    #[must_use]
    pub fn words_of_bits(&self, problem: &FwdProblem) -> Option<(u32, u32)> {
        let of = |bits: FunctionBits| (bits.row, if bits.batch == 0 { 1 } else { problem.dims.batch });
        self.bits.map(of)
    }

    /// Masks of a call as parameters for its kernels: with the bits of a mask as code in the place of the call's
    /// bits.
    #[must_use]
    pub fn masks(&self, masks: MaskDataParams, list: &TileList) -> MaskDataParams {
        let Some(FunctionBits { place, row, batch, heads }) = self.bits else { return masks };
        let data = DevPtr::new(list.counts.0 + (place - self.counts));
        let bits = MaskTensor { data, batch: batch.cast_signed(), head: 0, row: row.into(), dim: 1 };
        MaskDataParams { bits, bits_ratio: heads.cast_signed(), ..masks }
    }

    /// Number of (sequence, head of the mask) pairs, each with lists for its own tiles.
    #[must_use]
    pub fn groups(&self) -> u32 {
        self.rows / self.list.num_tiles.unsigned_abs()
    }

    /// Whether the lists are for tiles of kind `of` with `block` queries and keys.
    #[must_use]
    pub fn is_of(&self, of: TileOf, block: [i32; 2]) -> bool {
        (self.of, self.block) == (of, block)
    }

    /// The kernel argument with the lists, where the workspace begins at `address`.
    fn at(&self, address: u64) -> TileList {
        let at = |place: u64| DevPtr::new(address + (place - self.counts));
        let ranks = self.ranks.map_or(DevPtr::NULL, at);
        TileList { counts: at(self.counts), blocks: at(self.blocks), ranks, ..self.list }
    }

    /// Parameters of a call's lists, and whether its mask object has made them; otherwise they lie in the
    /// workspace, and [the call makes them](Self::made).
    #[must_use]
    pub fn of_call(&self, masks: &MaskArgs<'_>, workspace: u64) -> (TileList, bool) {
        match masks.built.and_then(|object| object.list_at(self.of, self.block, self.ranks.is_some())) {
            Some(address) => (self.at(address), true),
            None => (self.at(workspace + self.counts), false),
        }
    }

    /// The properties of these lists by which a mask object identifies them.
    #[must_use]
    pub fn shape(&self) -> TileLists {
        TileLists {
            of: self.of,
            block: self.block,
            is_ordered: self.ranks.is_some(),
            bytes: self.end - self.counts,
        }
    }

    /// Queues the plan's steps that make lists at an address: bits, lists, ranks.
    ///
    /// # Safety
    /// The step is of [`launch`](Self::launch); the lists' memory exists, and lengths and masks have passed the
    /// check of their call. The stream is live, and the device entered.
    ///
    /// # Errors
    /// An error of the driver.
    pub(crate) unsafe fn make_at<D: Driver>(
        &self,
        steps: [Option<&Step<D>>; 3],
        (mut params, masks): (FwdParams, MaskDataParams),
        address: u64,
        stream: u64,
    ) -> Result<()> {
        let mut list = self.at(address);
        let mut masks = self.masks(masks, &list);
        let mut arguments = [(&raw mut params).cast(), (&raw mut masks).cast(), (&raw mut list).cast()];
        for step in steps.into_iter().flatten() {
            // SAFETY: the kernels take FwdParams, MaskDataParams and TileList; the caller keeps the rest.
            unsafe { step.launch(&mut arguments, stream)? };
        }
        Ok(())
    }

    /// Returns the parameters of a call's lists, and the masks for later kernels. If no mask object has made the
    /// lists, queues the plan's steps that make them.
    ///
    /// # Safety
    /// As [`Kernel::launch`](crate::Kernel::launch); `params` and `masks` belong to this call, and its workspace is
    /// as large as the plan says.
    ///
    /// # Errors
    /// An error of the driver.
    pub unsafe fn made<D: Driver>(
        &self,
        steps: &[Step<D>],
        params: &mut FwdParams,
        masks: MaskDataParams,
        args: &MaskArgs<'_>,
        stream: u64,
    ) -> Result<(TileList, MaskDataParams)> {
        let (mut list, is_built) = self.of_call(args, params.workspace.0);
        let mut masks = self.masks(masks, &list);
        let makes = |stage: Stage| !is_built && stage.makes_lists();
        for step in steps.iter().filter(|step| makes(step.stage)) {
            let mut arguments = [(&raw mut *params).cast(), (&raw mut masks).cast(), (&raw mut list).cast()];
            // SAFETY: both kernels take FwdParams, MaskDataParams and TileList; the caller keeps the rest.
            unsafe { step.launch(&mut arguments, stream)? };
        }
        Ok((list, masks))
    }

    /// The launch that writes the lists.
    pub fn launch(&self, spec: &FwdSpec, facts: &impl ListsTiles) -> Launch {
        facts.list_tiles(spec, self.of, self.block, self.code, self.rows)
    }

    /// Text for `explain`: how many lists of tiles the plan has.
    #[must_use]
    pub fn words(&self) -> String {
        let what = if self.of == TileOf::Queries { "keys" } else { "queries" };
        let code = match self.bits {
            Some(bits) => format!("; the mask as code in bits before, {} words a query", bits.row),
            None => String::new(),
        };
        format!(
            "{} of up to {} blocks of {what}, made on the device before each run, or by a mask object{code}",
            self.rows, self.list.max_blocks
        )
    }
}

/// Whether lists of tiles can be used for a problem: it has masks as data, or a mask as code that does not read the
/// head index, so that all heads share one list.
#[must_use]
pub fn serve(problem: &FwdProblem) -> bool {
    // A mask as code alone, with keys that arrive while the call runs, is evaluated pair by pair: making lists
    // would not wait for keys.
    let is_listed = problem.code.mask.is_some() && !reads_head(problem) && problem.arrivals == 0;
    !problem.masks.is_empty() || is_listed
}

/// Whether the mask function reads the head index.
#[must_use]
pub fn reads_head(problem: &FwdProblem) -> bool {
    problem.code.mask.as_ref().is_some_and(|mask| reads(mask, Variable::Head))
}

/// Whether all sequences of a batch see the same pairs: lengths are equal, and no mask has a batch axis.
fn shared_by_batch(problem: &FwdProblem) -> bool {
    let FwdProblem { layout, masks, .. } = problem;
    let is_even = layout.q == QLayout::Batch
        && layout.kv == KvLayout::Strided
        && !layout.seqused_q
        && !layout.seqused_k;
    let own = [
        masks.intervals.is_some_and(|it| it.axes.per_batch),
        masks.bits.is_some_and(|it| it.axes.per_batch),
        masks.block_lists.is_some_and(|it| it.axes.per_batch),
        problem.code.mask.as_ref().is_some_and(|mask| reads(mask, Variable::Batch)),
    ];
    is_even && !own.contains(&true)
}

/// Whether a function reads a property of the pair.
fn reads(function: &Function, variable: Variable) -> bool {
    function.graph().nodes().contains(&Node::Variable(variable))
}

/// The functions with which scores are computed in kernels with lists, which evaluate the mask separately.
#[must_use]
pub fn code_beside_lists(problem: &FwdProblem) -> CodeKind {
    if problem.code.score.is_some() { CodeKind::Score } else { CodeKind::None }
}

/// Number of heads with lists of their own: that of the mask with the most heads, or all query heads if a function
/// reads the head index.
fn heads_of(problem: &FwdProblem) -> u32 {
    if reads_head(problem) {
        return problem.dims.num_heads_q;
    }
    let masks = &problem.masks;
    let intervals = masks.intervals.map(|it| it.axes);
    let axes = [intervals, masks.bits.map(|it| it.axes), masks.block_lists.map(|it| it.axes)];
    axes.into_iter().flatten().map(|axes| axes.heads).max().unwrap_or(1)
}

/// `fmha/tile_list.h`: the types that this file shares with the device.
#[must_use]
pub fn header() -> Header {
    let definitions = [TileList::c_definition()];
    Header::shared("fmha/tile_list.h", "fmha", &["fmha/spec.h"], &definitions)
}
