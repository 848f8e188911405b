//! Mask objects: masks as data that are copied and turned into lists once, and used by many calls.

use crate::args::{DevSlice, ElemType, MaskArgs, SeqArgs, check_build, mask_tensors};
use crate::backend::DevBuffer;
use crate::call::Problem;
use crate::device::{Device, Stream};
use crate::error::{ProblemError, Result, ensure};
use crate::expr::{CaptureKind, Function, Number};
use crate::layout::Totals;
use crate::plan::{BwdPlan, FwdPlan, Plan};
use crate::problem::{Code, FwdProblem};

/// Whether a tile's rows are queries or keys. The list of a tile has blocks of the other kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileOf {
    /// Tiles of queries, as in the forward.
    Queries,
    /// Tiles of keys, as in the backward.
    Keys,
}

/// Lists of tiles that a kernel reads under masks: for each tile, the blocks that it sees. Two kernels of one
/// problem with equal `of` and `block` read the same lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileLists {
    /// Rows of a tile: queries or keys.
    pub of: TileOf,
    /// Number of queries and of keys in a block.
    pub block: [i32; 2],
    /// Whether each block also has its rank among the tiles that contain it, for ordered sums.
    pub is_ordered: bool,
    /// Bytes of the lists, from an address that is a multiple of [`ALIGN`](Self::ALIGN).
    pub bytes: u64,
}

impl TileLists {
    /// Alignment of their memory, bytes.
    pub const ALIGN: u64 = 256;

    fn are_as(&self, other: &Self) -> bool {
        (self.of, self.block, self.is_ordered) == (other.of, other.block, other.is_ordered)
    }

    fn words(&self) -> String {
        let [queries, keys] = self.block;
        let of = if self.of == TileOf::Queries { "queries" } else { "keys" };
        let order = if self.is_ordered { ", in one order" } else { "" };
        format!("tiles of {of}, of {queries} queries x {keys} keys{order}")
    }
}

/// Arguments of [`Launch::build_list`](crate::Launch::build_list), which makes lists.
#[derive(Debug)]
pub struct ListsCall<'a, P: Problem> {
    /// The problem that was planned.
    pub problem: &'a P,
    /// Lengths and positions of the sequences.
    pub seq: &'a SeqArgs<'a>,
    /// Tensors of the masks.
    pub masks: &'a MaskArgs<'a>,
    /// Numbers that functions capture.
    pub numbers: &'a [Number],
    /// Lists of tiles that are to be made, one of those that the plan has.
    pub list: TileLists,
    /// Address in device memory to which the lists are written.
    pub address: u64,
    /// The driver's handle of the stream.
    pub stream: u64,
}

/// Masks as data, built once and used by many calls, forward and backward: copies of their tensors, and the lists of
/// tiles that kernels walk.
///
/// [`build`](Self::build) copies and lists; [`args`](Self::args) are the masks of a call. A call reads what was
/// last built: until the next `build` a change of the tensors changes nothing, and a call makes no lists of its
/// own. Calls only read the object, so several may share it at a time; before a build the caller waits for calls on
/// other streams. The sequences of a call must have the lengths that the object was built with: on a device this is
/// not checked.
///
/// ```no_run
/// # use fmha_core::{BwdPlan, DevSlice, FwdArgs, FwdPlan, MaskArgs, MaskObject, SeqArgs, Stream};
/// # fn run(forward: &FwdPlan, backward: &BwdPlan, endpoints: DevSlice<'_>, layers: &mut [FwdArgs<'_>],
/// #     stream: &Stream) -> fmha_core::Result<()> {
/// let mut object = MaskObject::new(Some(forward), Some(backward), Default::default())?;
/// object.build(&SeqArgs::default(), &MaskArgs::default().intervals(endpoints), stream)?;
/// # let _ = layers;
/// let masks = object.args();
/// // `args.masks(masks)` in the calls of every layer.
/// # let _ = masks;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MaskObject {
    device: Device,
    like: FwdProblem,
    totals: Totals,
    tensors: [Option<Copied>; 6],
    lists: Vec<(TileLists, u64)>,
    forward: Option<FwdPlan>,
    backward: Option<BwdPlan>,
    /// Numbers that functions captured at the last build.
    numbers: Vec<Number>,
    memory: DevBuffer,
    is_built: bool,
    /// Whether a build has run before, so that the memory has lists, even of an earlier build.
    has_lists: bool,
}

/// Copy of a mask tensor in the object's memory.
#[derive(Clone, Copy, Debug)]
struct Copied {
    elem: ElemType,
    place: u64,
    bytes: u64,
}

/// Whether two numbers have the same bits, so that a NaN equals itself.
fn is_same(a: Number, b: Number) -> bool {
    match (a, b) {
        (Number::Float(a), Number::Float(b)) => a.to_bits() == b.to_bits(),
        (a, b) => a == b,
    }
}

impl MaskObject {
    /// An object for the calls of these plans, with memory of the device. If both plans read the same lists, the
    /// object has them once, otherwise once for each plan. `totals`: rows of packed tensors, as in the calls.
    ///
    /// # Errors
    /// No plan; a problem with neither masks as data nor a mask as code; plans whose masks, lengths, heads or device
    /// differ, with what differs; a mask as code that captures a tensor, of which there is no copy; memory that is not
    /// there.
    pub fn new(forward: Option<&FwdPlan>, backward: Option<&BwdPlan>, totals: Totals) -> Result<Self> {
        let (device, like) = match (forward, backward) {
            (Some(plan), _) => (plan.device(), FwdProblem::clone(plan.problem())),
            (None, Some(plan)) => (plan.device(), FwdProblem::clone(plan.problem().fwd())),
            (None, None) => return Err(refused("plan: a mask object has 0 of them, and serves 1 at least")),
        };
        if like.masks.is_empty() && like.code.mask.is_none() {
            return Err(refused(
                "mask: the problem has 0 masks as data and 0 masks as code, of which an object is built",
            ));
        }
        let mut captures = like.code.mask.iter().flat_map(Function::captures);
        if let Some(capture) = captures.find(|capture| matches!(capture.kind, CaptureKind::Tensor { .. })) {
            let name = &capture.name;
            return Err(refused(&format!(
                "mask: its function captures {name}, of which a mask object has no copy"
            )));
        }
        let mut place = 0;
        let mut take = |bytes: u64| {
            let here = place;
            place = (here + bytes).next_multiple_of(TileLists::ALIGN);
            here
        };
        like.checked_extents(totals)?;
        let tensors = mask_tensors(&like, totals)
            .map(|(_, elem, bytes)| bytes.map(|bytes| Copied { elem, place: take(bytes), bytes }));
        let mut lists: Vec<(TileLists, u64)> = Vec::new();
        let of_plans =
            [forward.map(FwdPlan::tile_lists), backward.map(BwdPlan::tile_lists)].into_iter().flatten();
        for list in of_plans.flatten() {
            if !lists.iter().any(|(other, _)| other.are_as(&list)) {
                lists.push((list, take(list.bytes)));
            }
        }
        let memory = device.memory().alloc(place.max(1))?;
        let object = Self {
            device: device.clone(),
            like,
            totals,
            tensors,
            lists,
            forward: forward.cloned(),
            backward: backward.cloned(),
            numbers: Vec::new(),
            memory,
            is_built: false,
            has_lists: false,
        };
        if let Some(plan) = backward {
            object.is_for(plan.problem().fwd(), plan.device())?;
        }
        Ok(object)
    }

    /// Queues the copies of the tensors and the making of the lists, and returns; without streams the work is done
    /// at return. A build that is not the first may be captured: each replay builds again, and until then calls
    /// read what was built before. Wrong arguments queue nothing.
    ///
    /// # Errors
    /// [`Error::Problem`](crate::Error::Problem) for a stream of another device, and for lengths and tensors that do
    /// not fit, and for a first build that is captured; what the driver said.
    pub fn build(&mut self, seq: &SeqArgs<'_>, masks: &MaskArgs<'_>, stream: &Stream) -> Result<()> {
        self.build_with(seq, masks, &[], stream)
    }

    /// Builds as [`build`](Self::build) does, for calls whose functions capture these numbers
    /// ([`ScoreArgs::numbers`](crate::ScoreArgs::numbers)).
    ///
    /// # Errors
    /// As [`build`](Self::build), and for numbers that the functions do not capture.
    pub fn build_with(
        &mut self,
        seq: &SeqArgs<'_>,
        masks: &MaskArgs<'_>,
        numbers: &[Number],
        stream: &Stream,
    ) -> Result<()> {
        let handle = stream.of(&self.device)?;
        // SAFETY: `Stream::of` gave a live handle of this device's.
        unsafe { self.build_on_raw(seq, masks, numbers, handle) }
    }

    /// Builds as [`build`](Self::build) does, for calls whose functions capture these numbers
    /// ([`ScoreArgs::numbers`](crate::ScoreArgs::numbers)), on a stream given by its driver's handle (0: the default
    /// one).
    ///
    /// # Safety
    /// As [`Stream::from_raw`].
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub unsafe fn build_on_raw(
        &mut self,
        seq: &SeqArgs<'_>,
        masks: &MaskArgs<'_>,
        numbers: &[Number],
        stream: u64,
    ) -> Result<()> {
        self.like.code.check_numbers(numbers)?;
        if masks.built.is_some() {
            return Err(refused("mask: a mask object is not built from another one's tensors"));
        }
        same_rows(self.totals, seq.totals)?;
        check_build(&self.like, seq, masks, self.device.memory().space())?;
        let queues = self.device.queues()?;
        if let (false, Some(queues)) = (self.has_lists, queues)
            // SAFETY: the caller keeps the contract of `build_on_raw`.
            && unsafe { queues.is_capturing(stream)? }
        {
            return Err(refused(
                "mask: the object was built 0 times before a build that is captured; before the first replay calls \
                 would walk lists that nobody has made",
            ));
        }
        // A build that fails half way leaves new tensors with old lists, so the object counts as not built.
        self.is_built = false;
        self.numbers = numbers.to_vec();
        for (copied, slice) in self.tensors.iter().zip(masks.tensors()) {
            let (Some(copied), Some(slice)) = (copied, slice) else { continue };
            let (from, to) = (slice.as_ptr(), self.memory.as_ptr().wrapping_add(copied.place as usize));
            match queues {
                _ if copied.bytes == 0 => {}
                // SAFETY: the check saw that the slice covers the bytes; the object's memory has room for them, and is
                // its own.
                Some(queues) => unsafe { queues.copy_bytes(from, to, copied.bytes, stream)? },
                // SAFETY: the check saw that the slice covers the bytes; without queues both are the host's memory.
                None => unsafe { to.copy_from_nonoverlapping(from, copied.bytes as usize) },
            }
        }
        let own = MaskArgs { built: None, ..self.slices() };
        let mut made: Vec<TileLists> = Vec::new();
        if let Some(plan) = &self.forward {
            // SAFETY: the caller keeps the contract of `build_on_raw`.
            unsafe { self.build_of(plan, seq, &own, stream, &mut made)? };
        }
        if let Some(plan) = &self.backward {
            // SAFETY: the caller keeps the contract of `build_on_raw`.
            unsafe { self.build_of(plan, seq, &own, stream, &mut made)? };
        }
        self.is_built = true;
        self.has_lists = true;
        Ok(())
    }

    /// Makes those lists of a plan that this build has not made yet.
    ///
    /// # Safety
    /// A live stream of the device; lengths and masks have passed the check.
    unsafe fn build_of<P: Problem>(
        &self,
        plan: &Plan<P>,
        seq: &SeqArgs<'_>,
        masks: &MaskArgs<'_>,
        stream: u64,
        made: &mut Vec<TileLists>,
    ) -> Result<()> {
        for list in plan.tile_lists() {
            if made.iter().any(|other| other.are_as(&list)) {
                continue;
            }
            made.push(list);
            let Some(address) = self.list_at(list.of, list.block, list.is_ordered) else { continue };
            // SAFETY: the caller keeps the contract of `build_of`; the object has room for the list.
            unsafe { plan.build_list(seq, masks, &self.numbers, list, (address, stream))? };
        }
        Ok(())
    }

    /// Masks of a call that uses the object.
    #[must_use]
    pub fn args(&self) -> MaskArgs<'_> {
        MaskArgs { built: Some(self), ..self.slices() }
    }

    fn slices(&self) -> MaskArgs<'_> {
        let [intervals, bits, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices] =
            self.tensors.map(|copied| copied.map(|copied| self.slice_of(copied)));
        MaskArgs {
            intervals,
            bits,
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            built: None,
        }
    }

    fn slice_of(&self, copied: Copied) -> DevSlice<'_> {
        let at = self.memory.as_ptr().wrapping_add(copied.place as usize).cast_const();
        // SAFETY: the object's memory has these bytes, and the slice borrows the object.
        unsafe { DevSlice::from_raw(self.memory.space(), at, copied.bytes, copied.elem) }
    }

    /// Bytes of device memory that the object uses.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Address of the lists for tiles of this shape; `None` if the object has none.
    #[doc(hidden)]
    #[must_use]
    pub fn list_at(&self, of: TileOf, block: [i32; 2], is_ordered: bool) -> Option<u64> {
        let wanted = TileLists { of, block, is_ordered, bytes: 0 };
        let (_, place) = self.lists.iter().find(|(list, _)| list.are_as(&wanted))?;
        Some(self.memory.as_ptr() as u64 + place)
    }

    /// All of the object's memory.
    pub(crate) fn memory(&self) -> DevSlice<'_> {
        self.memory.slice()
    }

    /// Checks that calls of a plan may use this object.
    ///
    /// # Errors
    /// A difference of plan and object; lists that the plan's kernel reads and the object lacks; an object that was
    /// not built.
    pub(crate) fn serves(
        &self,
        problem: &FwdProblem,
        totals: Totals,
        device: &Device,
        kernel: &str,
        lists: &[TileLists],
        numbers: &[Number],
    ) -> Result<(), ProblemError> {
        self.is_for(problem, device)?;
        self.has_numbers(numbers)?;
        same_rows(self.totals, totals)?;
        for wanted in lists {
            if self.list_at(wanted.of, wanted.block, wanted.is_ordered).is_none() {
                let has: Vec<String> = self.lists.iter().map(|(list, _)| list.words()).collect();
                let has = if has.is_empty() { "no tiles".to_owned() } else { has.join(", ") };
                let text = format!("mask: built for {has}; {kernel} walks {}", wanted.words());
                return Err(ProblemError::new("mask", text));
            }
        }
        ensure!(self.is_built, "mask", "mask: the object was built 0 times before the call");
        Ok(())
    }

    /// Refuses numbers of the mask's function other than those of the last build.
    fn has_numbers(&self, given: &[Number]) -> Result<(), ProblemError> {
        let Some(mask) = &self.like.code.mask else { return Ok(()) };
        for (((name, _), own), given) in self.like.code.numbers().iter().zip(&self.numbers).zip(given) {
            let is_read = mask.captures().iter().any(|capture| capture.name == *name);
            ensure!(
                !is_read || is_same(*own, *given),
                "mask",
                "mask: built for {name} {own:?}, but the call has {given:?}"
            );
        }
        Ok(())
    }

    fn is_for(&self, problem: &FwdProblem, device: &Device) -> Result<(), ProblemError> {
        let like = &self.like;
        ensure!(
            self.device.is(device),
            "mask",
            "mask: built on {}, but the call is on {}",
            self.device.name(),
            device.name()
        );
        for (name, built, given) in [
            ("batch", like.dims.batch, problem.dims.batch),
            ("seqlen_q", like.dims.seqlen_q, problem.dims.seqlen_q),
            ("seqlen_k", like.dims.seqlen_k, problem.dims.seqlen_k),
            ("num_heads_q", like.dims.num_heads_q, problem.dims.num_heads_q),
            ("num_heads_kv", like.dims.num_heads_kv, problem.dims.num_heads_kv),
        ] {
            ensure!(built == given, "mask", "mask: built for {name} {built}, but the call has {given}");
        }
        let same = |what: &str, is_same: bool, built: String, given: String| {
            ensure!(is_same, "mask", "mask: built for {what} {built}, but the call has {given}");
            Ok::<(), ProblemError>(())
        };
        let (own, other) = (like.layout, problem.layout);
        same("layout", own == other, format!("{own:?}"), format!("{other:?}"))?;
        let (own, other) = (like.mask, problem.mask);
        same("band", own == other, format!("{own:?}"), format!("{other:?}"))?;
        let (own, other) = (like.masks, problem.masks);
        same("masks", own == other, format!("{own:?}"), format!("{other:?}"))?;
        let words = |code: &Code| code.mask.as_ref().map_or("none".to_owned(), ToString::to_string);
        let is_same = like.code.mask == problem.code.mask;
        same("function", is_same, words(&like.code), words(&problem.code))
    }
}

fn refused(text: &str) -> crate::error::Error {
    ProblemError::new("mask", text.to_owned()).into()
}

/// Refuses packed tensors with other row counts than the object's. Masks do not depend on the number of cache
/// pages.
fn same_rows(own: Totals, given: Totals) -> Result<(), ProblemError> {
    for (name, own, given) in
        [("total_q", own.total_q, given.total_q), ("total_k", own.total_k, given.total_k)]
    {
        ensure!(own == given, "mask", "mask: built for {name} {own:?}, but the call has {given:?}");
    }
    Ok(())
}
