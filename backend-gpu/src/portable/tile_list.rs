//! Lists of the blocks of keys that tiles of queries see under masks as data, or of the blocks of queries that see
//! tiles of keys: one small launch makes them in the workspace before the kernel that walks them.

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

/// Threads of a group of that launch.
pub const THREADS: u32 = 256;

/// A vendor's launch that makes lists.
pub trait ListsTiles {
    /// The launch, a group for each of `lists`: arguments `FwdParams`,
    /// [`MaskDataParams`](fmha_core::masks::MaskDataParams), [`TileList`]. Of the spec it reads how Q, K and V lie;
    /// `block`: queries and keys of a tile.
    fn list_tiles(&self, spec: &FwdSpec, of: TileOf, block: [i32; 2], code: MaskCode, lists: u32) -> Launch;
}

/// A mask as code, as kernels that walk lists of tiles have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskCode {
    /// None is given.
    None,
    /// The launch that makes lists, and in cut blocks the kernel, ask it for each pair.
    Asked,
    /// A launch before all others writes what it shows into the bits of the masks as data, and nobody else asks it.
    InBits,
}

/// Words of what a mask as code shows, 32 keys of a query each.
#[derive(Clone, Copy, Debug, PartialEq)]
struct FunctionBits {
    place: u64,
    /// Words of a query.
    row: u32,
    /// Words of a sequence; 0 where all have the same.
    batch: u64,
    heads: u32,
}

abi_struct! {
    /// Blocks of each tile, a kernel argument: of keys for a tile of queries, of queries for a tile of keys. A row
    /// is of a sequence, a head of the masks and a tile.
    pub struct TileList {
        /// How many blocks of a row are cut, and how many are whole.
        pub counts: DevPtr<i32>,
        /// Blocks of a row: those that are cut from its begin up, whole ones from its end down.
        pub blocks: DevPtr<i32>,
        /// Tiles of the longest sequence.
        pub num_tiles: i32,
        /// Blocks that a row has room for.
        pub max_blocks: i32,
        /// Heads of a sequence's lists; 0 where all sequences have the same.
        pub heads_of_batch: i32,
        /// Query heads to one of them.
        pub heads_ratio: i32,
        /// Places of the blocks in an order of the tiles that have them, as `blocks`; behind the rows of each head a
        /// row of counters. Null where additions have no order.
        pub ranks: DevPtr<i32>,
    }
}

/// Lists of a problem's tiles, and where they lie in the workspace.
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
    /// End of all that lists take in the workspace.
    end: u64,
}

/// Lists, at most: a group of [`THREADS`] makes each, and a grid of AMD's has threads that 32 bits count.
const MOST_LISTS: u64 = (u32::MAX / THREADS) as u64;

/// Bytes of lists, at most: they grow with the square of the length, and `sm80` serves the same masks without any.
const MOST_BYTES: u64 = 4 << 30;

/// Bits of a mask as code, at most, in bytes: 32768 queries of as many keys.
const MOST_BYTES_OF_BITS: u64 = 128 << 20;

/// Query heads from which on bits are written once for all of them; fewer ask the function itself.
const LEAST_HEADS_OF_BITS: u32 = 4;

impl TileListPlan {
    /// Lists of tiles and blocks of `block_m` queries and `block_n` keys behind `before` of the workspace, and the
    /// whole workspace.
    ///
    /// # Errors
    /// More rows than a grid has groups for, with the fields that make them.
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
        // Whole lines of the L2.
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

    /// Lists whose blocks have places in an order too, behind the workspace that the lists end.
    ///
    /// # Errors
    /// More bytes than lists may take.
    pub fn ordered(self, workspace: Workspace) -> Result<(Self, Workspace), String> {
        let ranks = workspace.bytes.next_multiple_of(128);
        let rows = u64::from(self.rows) + u64::from(self.groups());
        let bytes = ranks + 4 * rows * u64::from(self.list.max_blocks.unsigned_abs());
        if bytes > MOST_BYTES {
            return Err(format!(
                "lists of tiles in one order would take {bytes} bytes of workspace, more than {MOST_BYTES}"
            ));
        }
        Ok((Self { ranks: Some(ranks), end: bytes, ..self }, Workspace { bytes, ..workspace }))
    }

    /// Lists beside bits of the mask as code behind the workspace that the lists end, where one is given that all heads
    /// share and no bits of the call's own take their place. They grow with the product of the lengths, and end at
    /// 128 MiB.
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

    /// How kernels have the mask as code.
    #[must_use]
    pub fn code(&self) -> MaskCode {
        self.code
    }

    /// Words of a row of the bits of a mask as code, of how many sequences of a batch; `None` where there are none.
    #[must_use]
    pub fn words_of_bits(&self, problem: &FwdProblem) -> Option<(u32, u32)> {
        let of = |bits: FunctionBits| (bits.row, if bits.batch == 0 { 1 } else { problem.dims.batch });
        self.bits.map(of)
    }

    /// Masks of a call as its kernels take them: with the bits of a mask as code beside the lists.
    #[must_use]
    pub fn masks(&self, masks: MaskDataParams, list: &TileList) -> MaskDataParams {
        let Some(FunctionBits { place, row, batch, heads }) = self.bits else { return masks };
        let data = DevPtr::new(list.counts.0 + (place - self.counts));
        let bits = MaskTensor { data, batch: batch.cast_signed(), head: 0, row: row.into(), dim: 1 };
        MaskDataParams { bits, bits_ratio: heads.cast_signed(), ..masks }
    }

    /// Groups of lists: one for each sequence and head of the masks.
    #[must_use]
    pub fn groups(&self) -> u32 {
        self.rows / self.list.num_tiles.unsigned_abs()
    }

    /// Whether it is of such tiles.
    #[must_use]
    pub fn is_of(&self, of: TileOf, block: [i32; 2]) -> bool {
        (self.of, self.block) == (of, block)
    }

    /// Lists whose memory begins at an address.
    fn at(&self, address: u64) -> TileList {
        let at = |place: u64| DevPtr::new(address + (place - self.counts));
        let ranks = self.ranks.map_or(DevPtr::NULL, at);
        TileList { counts: at(self.counts), blocks: at(self.blocks), ranks, ..self.list }
    }

    /// Lists of a call, and whether its mask object has made them; else they lie in the workspace, and
    /// [the call makes them](Self::made).
    #[must_use]
    pub fn of_call(&self, masks: &MaskArgs<'_>, workspace: u64) -> (TileList, bool) {
        match masks.built.and_then(|object| object.list_at(self.of, self.block, self.ranks.is_some())) {
            Some(address) => (self.at(address), true),
            None => (self.at(workspace + self.counts), false),
        }
    }

    /// Facts of them that a mask object knows.
    #[must_use]
    pub fn shape(&self) -> TileLists {
        TileLists {
            of: self.of,
            block: self.block,
            is_ordered: self.ranks.is_some(),
            bytes: self.end - self.counts,
        }
    }

    /// Queues what makes lists at an address, by the plan's steps for them in their order: bits, lists, ranks.
    ///
    /// # Safety
    /// The step is of [`launch`](Self::launch); the lists' memory is there, and lengths and masks have passed the check
    /// of their call. The stream is live, and the device entered.
    ///
    /// # Errors
    /// What the driver said.
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

    /// Lists of a call, made by the plan's steps where its mask object has not made them, and the masks that later
    /// kernels take.
    ///
    /// # Safety
    /// As [`Kernel::launch`](crate::Kernel::launch); `params` and `masks` are of the same call, and its workspace is
    /// as large as the plan says.
    ///
    /// # Errors
    /// What the driver said.
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

    /// The launch that makes them.
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

/// Whether lists of tiles serve a problem: one with masks as data, or with a mask as code that does not read the
/// head, so that one list serves all heads.
#[must_use]
pub fn serve(problem: &FwdProblem) -> bool {
    // A function alone over keys that arrive while the call runs is asked pair by pair: lists do not wait.
    let is_listed = problem.code.mask.is_some() && !reads_head(problem) && problem.arrivals == 0;
    !problem.masks.is_empty() || is_listed
}

/// Whether the mask as code reads the head.
#[must_use]
pub fn reads_head(problem: &FwdProblem) -> bool {
    problem.code.mask.as_ref().is_some_and(|mask| reads(mask, Variable::Head))
}

/// Whether all sequences of a batch see the same: they are of one length, and no mask is one's own.
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

/// The functions that scores are computed by where lists ask the mask.
#[must_use]
pub fn code_beside_lists(problem: &FwdProblem) -> CodeKind {
    if problem.code.score.is_some() { CodeKind::Score } else { CodeKind::None }
}

/// Heads that have lists of their own: those of the mask that has the most; each, where a function tells them apart.
fn heads_of(problem: &FwdProblem) -> u32 {
    if reads_head(problem) {
        return problem.dims.num_heads_q;
    }
    let masks = &problem.masks;
    let intervals = masks.intervals.map(|it| it.axes);
    let axes = [intervals, masks.bits.map(|it| it.axes), masks.block_lists.map(|it| it.axes)];
    axes.into_iter().flatten().map(|axes| axes.heads).max().unwrap_or(1)
}

/// `fmha/tile_list.h`: what this file shares with the device.
#[must_use]
pub fn header() -> Header {
    let definitions = [TileList::c_definition()];
    Header::shared("fmha/tile_list.h", "fmha", &["fmha/spec.h"], &definitions)
}
