//! The pointers of a call, and the check that they fit their problem.

mod addresses;
mod cache;
mod check;
mod elem;
mod made;
mod overlap;
mod second;

use std::marker::PhantomData;

use bytemuck::AnyBitPattern;

pub use addresses::check_addresses;
pub use cache::{CacheArgs, CacheSlice};
pub(crate) use check::{check_build, mask_tensors};
pub use check::{check_bwd, check_choose, check_combine, check_fwd, check_index_loss, check_quantize};
pub(crate) use elem::Told;
pub use elem::{Elem, ElemType};
pub use second::SecondArgs;

use crate::dropout::DropoutSeed;
use crate::expr::Number;
use crate::layout::Totals;
use crate::mask_object::MaskObject;
use crate::setters::with_setters;

/// The processor that can read an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemorySpace {
    /// Memory of the processor that runs this code.
    Host,
    /// Memory of a device.
    Device,
}

/// Memory that a call reads.
#[derive(Clone, Copy, Debug)]
pub struct DevSlice<'a> {
    space: MemorySpace,
    ptr: *const u8,
    bytes: u64,
    elem: ElemType,
    memory: PhantomData<&'a [u8]>,
}

/// Memory that a call writes, and that nothing else accesses until the call is done.
#[derive(Debug)]
pub struct DevSliceMut<'a> {
    space: MemorySpace,
    ptr: *mut u8,
    bytes: u64,
    elem: ElemType,
    /// The place where a call notes the type that it writes to a buffer.
    told: Option<&'a Told>,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a DevSlice is a `&[u8]` and a DevSliceMut a `&mut [u8]` that may lie on a device; neither
// has interior mutability.
unsafe impl Send for DevSlice<'_> {}
// SAFETY: a DevSlice is a `&[u8]` and a DevSliceMut a `&mut [u8]` that may lie on a device; neither has
// interior mutability.
unsafe impl Sync for DevSlice<'_> {}
// SAFETY: a DevSlice is a `&[u8]` and a DevSliceMut a `&mut [u8]` that may lie on a device; neither has
// interior mutability.
unsafe impl Send for DevSliceMut<'_> {}
// SAFETY: a DevSlice is a `&[u8]` and a DevSliceMut a `&mut [u8]` that may lie on a device; neither has
// interior mutability.
unsafe impl Sync for DevSliceMut<'_> {}

impl<'a> DevSlice<'a> {
    /// Host memory, whose elements have the type of `T`.
    #[must_use]
    pub fn host<T: Elem>(elems: &'a [T]) -> Self {
        let bytes: &[u8] = bytemuck::cast_slice(elems);
        Self {
            space: MemorySpace::Host,
            ptr: bytes.as_ptr(),
            bytes: bytes.len() as u64,
            elem: T::TYPE,
            memory: PhantomData,
        }
    }

    /// Memory in any space, with elements of this type. A slice of 0 bytes may have any address, also null.
    /// [`ElemType::Bytes`] is an unknown type: every call takes it for the type that its problem has.
    ///
    /// # Safety
    /// `ptr .. ptr + bytes` is readable memory of `space` that lives, and is not written by others,
    /// until all work queued with it is done.
    #[must_use]
    pub unsafe fn from_raw(
        space: MemorySpace,
        ptr: *const u8,
        bytes: u64,
        elem: impl Into<ElemType>,
    ) -> Self {
        Self { space, ptr, bytes, elem: elem.into(), memory: PhantomData }
    }

    /// Returns this memory, whose elements now have this type if their type was unknown; i32 and u32 may replace each
    /// other.
    #[must_use]
    pub fn typed(self, elem: impl Into<ElemType>) -> Self {
        Self { elem: self.elem.retyped(elem.into()), ..self }
    }

    /// The type of the slice's elements.
    #[must_use]
    pub fn elem(&self) -> ElemType {
        self.elem
    }

    /// Memory space of the address.
    #[must_use]
    pub fn space(&self) -> MemorySpace {
        self.space
    }

    /// The slice's first byte.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// The slice's size, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns this memory without its first `bytes`; empty where it has fewer.
    #[must_use]
    pub fn skip(self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        // `wrapping_add` and not `add`, since an empty slice may have a null address.
        Self { ptr: self.ptr.wrapping_add(bytes as usize), bytes: self.bytes - bytes, ..self }
    }

    /// The bytes, if they are in host memory.
    #[must_use]
    pub fn as_host(&self) -> Option<&'a [u8]> {
        if self.space != MemorySpace::Host {
            return None;
        }
        // An empty slice here may have a null address, but a Rust slice may not.
        let ptr = if self.bytes == 0 { std::ptr::dangling() } else { self.ptr };
        // SAFETY: `from_raw` or `host` promised readable host memory for 'a.
        Some(unsafe { std::slice::from_raw_parts(ptr, self.bytes as usize) })
    }
}

impl<'a> DevSliceMut<'a> {
    /// Host memory, whose elements have the type of `T`.
    #[must_use]
    pub fn host<T: Elem + AnyBitPattern>(elems: &'a mut [T]) -> Self {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(elems);
        Self {
            space: MemorySpace::Host,
            ptr: bytes.as_mut_ptr(),
            bytes: bytes.len() as u64,
            elem: T::TYPE,
            told: None,
            memory: PhantomData,
        }
    }

    /// Memory of any kind, as [`DevSlice::from_raw`] has it.
    ///
    /// # Safety
    /// `ptr .. ptr + bytes` is writable memory of `space` that lives, and is not touched by others,
    /// until all work queued with it is done.
    #[must_use]
    pub unsafe fn from_raw(space: MemorySpace, ptr: *mut u8, bytes: u64, elem: impl Into<ElemType>) -> Self {
        Self { space, ptr, bytes, elem: elem.into(), told: None, memory: PhantomData }
    }

    /// A buffer's memory. A call that writes it notes the type in `told`.
    ///
    /// # Safety
    /// As [`from_raw`](Self::from_raw).
    pub(crate) unsafe fn of_buffer(space: MemorySpace, ptr: *mut u8, bytes: u64, told: &'a Told) -> Self {
        Self { space, ptr, bytes, elem: told.written(), told: Some(told), memory: PhantomData }
    }

    /// Records that a call writes elements of this type.
    pub(crate) fn tell(&self, elem: impl Into<ElemType>) {
        if let Some(told) = self.told {
            told.write(elem.into());
        }
    }

    /// Returns this memory with elements of this type where their type was not known; i32 and u32 stand for
    /// each other.
    #[must_use]
    pub fn typed(self, elem: impl Into<ElemType>) -> Self {
        Self { elem: self.elem.retyped(elem.into()), ..self }
    }

    /// The type of the elements that are written to the slice.
    #[must_use]
    pub fn elem(&self) -> ElemType {
        self.elem
    }

    /// Memory space of the address.
    #[must_use]
    pub fn space(&self) -> MemorySpace {
        self.space
    }

    /// Pointer to the slice's first byte. Only the call that holds these arguments may write through it.
    #[must_use]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// The slice's size, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns this memory without its first `bytes`, for as long as it is borrowed; empty where it has
    /// fewer.
    #[must_use]
    pub fn skip(&mut self, bytes: u64) -> DevSliceMut<'_> {
        let bytes = bytes.min(self.bytes);
        DevSliceMut {
            space: self.space,
            ptr: self.ptr.wrapping_add(bytes as usize),
            bytes: self.bytes - bytes,
            elem: self.elem,
            // A write to a part of a buffer does not set the type of the whole buffer.
            told: self.told.filter(|_| bytes == 0),
            memory: PhantomData,
        }
    }

    /// The bytes, if they are in host memory.
    #[must_use]
    pub fn as_host_mut(&mut self) -> Option<&mut [u8]> {
        if self.space != MemorySpace::Host {
            return None;
        }
        let ptr = if self.bytes == 0 { std::ptr::dangling_mut() } else { self.ptr };
        // SAFETY: `from_raw` or `host` promised writable host memory that nobody else touches, and `self` is borrowed
        // exclusively; it is initialised, as slices are and as `DeviceMemory::alloc` says of a host's.
        Some(unsafe { std::slice::from_raw_parts_mut(ptr, self.bytes as usize) })
    }

    /// Returns this memory as an input of a later call.
    #[must_use]
    pub fn as_input(&self) -> DevSlice<'_> {
        let elem =
            if self.elem == ElemType::Bytes { self.told.map_or(self.elem, Told::read) } else { self.elem };
        DevSlice { space: self.space, ptr: self.ptr, bytes: self.bytes, elem, memory: PhantomData }
    }
}

/// Which pages hold the keys of each sequence, i32 `[batch, max_pages]`, read where the kernel runs. Key j of a
/// sequence is row `j % page_size` of page `pages[sequence][j / page_size]`; entries beyond a sequence's length may
/// hold anything, and several rows may name one page.
#[derive(Clone, Copy, Debug)]
pub struct BlockTable<'a> {
    /// The numbers of the pages.
    pub pages: DevSlice<'a>,
    /// Entries of a row: `max_pages * page_size` is at least the problem's `seqlen_k`.
    pub max_pages: u32,
}

with_setters! {
    /// Lengths and positions of the sequences, read by the kernel, and totals, which the host needs.
    #[derive(Clone, Copy, Debug, Default)]
    #[non_exhaustive]
    pub struct SeqArgs<'a> {
        set {
            /// Rows of packed tensors, pages of paged ones.
            pub totals: Totals,
            /// Packed Q: i32 `[batch + 1]`, first row of each sequence in the memory of Q and O.
            pub cu_seqlens_q: Option<DevSlice<'a>>,
            /// Packed K: i32 `[batch + 1]`, first row of each sequence in the memory of K and V.
            pub cu_seqlens_k: Option<DevSlice<'a>>,
            /// Paged K: the pages of each sequence.
            pub block_table: Option<BlockTable<'a>>,
            /// Packed new keys: i32 `[batch + 1]`, first row of each sequence of k_new and v_new.
            pub cu_seqlens_new: Option<DevSlice<'a>>,
            /// i32 `[batch]`: number of queries in use of each sequence, where the problem says so.
            pub seqused_q: Option<DevSlice<'a>>,
            /// i32 `[batch]`: number of keys in the cache before the call, where the problem says so.
            pub seqused_k: Option<DevSlice<'a>>,
            /// i32 `[batch, seqlen_q, num_heads_kv, topk]`, packed `[total_q, num_heads_kv, topk]`: the keys that each
            /// token lists, iff the problem has [`lists`](crate::FwdProblem::lists).
            pub indices: Option<DevSlice<'a>>,
            /// i32 `[batch]`, or one for each token: entries of the lists in use, iff the problem says so.
            pub topk_length: Option<DevSlice<'a>>,
            /// Flags that say which pieces of K and V have arrived, given iff the problem's
            /// [`arrivals`](crate::FwdProblem::arrivals) is not 0.
            pub arrivals: Option<Arrivals<'a>>,
        }
    }
}

/// K and V that arrive while the call runs, in `n` pieces of rows: a kernel reads rows of a piece once its flag is
/// not 0. The sender writes a piece first and its flag afterwards, with a memory barrier of system scope between.
/// The sender is queued before the call and uses no multiprocessor.
#[derive(Clone, Copy, Debug)]
pub struct Arrivals<'a> {
    /// u32 `[n]`: one past each piece's last row of every sequence. Ascending; the last is `seqlen_k`.
    pub ends: DevSlice<'a>,
    /// u32 `[n + 1]`: the flags, written while the call runs. The kernel owns the last flag. A value other
    /// than 0 there tells every waiting thread to go on with the data that has arrived. A thread that waits
    /// for piece `i` beyond the timeout writes `i + 1` there, and the results of the call are not valid.
    pub flags: DevSlice<'a>,
    /// Bit mask of the pieces that have arrived before the call.
    pub here: u64,
    /// Nanoseconds that a thread waits for a piece.
    pub timeout_ns: u64,
}

with_setters! {
    /// Operands of the score and of the FP8 scales; each is there iff the problem says so.
    #[derive(Clone, Copy, Debug, Default)]
    #[non_exhaustive]
    pub struct ScoreArgs<'a> {
        set {
            /// The elementwise bias.
            pub bias: Option<DevSlice<'a>>,
            /// f32 `[num_heads_q]` or `[batch, num_heads_q]`.
            pub alibi_slopes: Option<DevSlice<'a>>,
            /// f32 `[num_heads_q]`.
            pub sink: Option<DevSlice<'a>>,
            /// f32 `[1]` or `[batch, num_heads_kv]`.
            pub descale_q: Option<DevSlice<'a>>,
            /// f32 `[1]` or `[batch, num_heads_kv]`.
            pub descale_k: Option<DevSlice<'a>>,
            /// f32 `[1]` or `[batch, num_heads_kv]`.
            pub descale_v: Option<DevSlice<'a>>,
            /// Scales of Q's blocks, iff the problem has [`block_scales`](crate::FwdProblem::block_scales).
            pub block_scale_q: Option<DevSlice<'a>>,
            /// Block scales of K, in the form of those of Q.
            pub block_scale_k: Option<DevSlice<'a>>,
            /// Block scales of V, in the form of those of Q.
            pub block_scale_v: Option<DevSlice<'a>>,
            /// The tensors that score and mask capture, one for each of the problem's
            /// [`Code::captured`](crate::Code::captured).
            pub captured: &'a [DevSlice<'a>],
            /// The numbers that score and mask capture, one for each of [`Code::numbers`](crate::Code::numbers).
            pub numbers: &'a [Number],
            /// Position of the random generator of dropout, given iff the problem has dropout.
            pub dropout: Option<DropoutSeed>,
        }
    }
}

with_setters! {
    /// Tensors of a call's masks; each tensor is there iff the problem's [`Masks`](crate::Masks) say so.
    #[derive(Clone, Copy, Debug, Default)]
    #[non_exhaustive]
    pub struct MaskArgs<'a> {
        fixed {
            /// Mask object that the tensors [belong to](crate::MaskObject::args); the call reads its lists of tiles.
            pub built: Option<&'a MaskObject>,
        }
        set {
            /// i32 `[batch or 1, heads, endpoints, seqlen_q]`, packed `[heads, endpoints, total_q]`.
            pub intervals: Option<DevSlice<'a>>,
            /// u32 `[batch or 1, heads, seqlen_q, words]`, packed `[heads, total_q, words]`, with `words =
            /// ceil(seqlen_k / 32)`.
            pub bits: Option<DevSlice<'a>>,
            /// i32 `[batch or 1, heads, blocks_q]`: number of blocks in each row of the partial list.
            pub kv_num_blocks: Option<DevSlice<'a>>,
            /// i32 `[batch or 1, heads, blocks_q, max_blocks]`: their indices.
            pub kv_indices: Option<DevSlice<'a>>,
            /// i32 `[batch or 1, heads, blocks_q]`: number of blocks in each row of the full list.
            pub full_kv_num_blocks: Option<DevSlice<'a>>,
            /// i32 `[batch or 1, heads, blocks_q, max_blocks]`: their indices.
            pub full_kv_indices: Option<DevSlice<'a>>,
        }
    }
}

with_setters! {
    /// The pointers of a forward call, made by [`FwdArgs::new`] and setters. Later versions may add fields, so a struct
    /// literal does not compile:
    ///
    /// ```compile_fail,E0639
    /// use fmha_core::{CacheArgs, DevSlice, DevSliceMut, FwdArgs, ScoreArgs, SeqArgs};
    ///
    /// let (q, mut o) = ([0f32; 8], [0f32; 8]);
    /// let q = DevSlice::host(&q);
    /// let (seq, score, cache) = (SeqArgs::default(), ScoreArgs::default(), CacheArgs::default());
    /// let (lse, scale_o, keep_mask, workspace) = (None, None, None, None);
    /// let (k, v, o) = (q.into(), q.into(), DevSliceMut::host(&mut o));
    /// let args = FwdArgs { q, k, v, o, lse, seq, score, cache, scale_o, keep_mask, workspace };
    /// ```
    #[derive(Debug)]
    #[non_exhaustive]
    pub struct FwdArgs<'a> {
        fixed {
            /// Q.
            pub q: DevSlice<'a>,
            /// K.
            pub k: CacheSlice<'a>,
            /// V.
            pub v: CacheSlice<'a>,
            /// O.
            pub o: DevSliceMut<'a>,
        }
        set {
            /// LSE, iff the problem writes it.
            pub lse: Option<DevSliceMut<'a>>,
            /// Lengths.
            pub seq: SeqArgs<'a>,
            /// Operands of the score.
            pub score: ScoreArgs<'a>,
            /// Tensors of the masks.
            pub masks: MaskArgs<'a>,
            /// Operands of the cache's use.
            pub cache: CacheArgs<'a>,
            /// Scales of K by rows, f32, iff the problem has them; memory to append to where K is.
            pub k_scale: Option<CacheSlice<'a>>,
            /// Scales of V by rows, likewise.
            pub v_scale: Option<CacheSlice<'a>>,
            /// f32 `[1]`, iff the problem has it.
            pub scale_o: Option<DevSlice<'a>>,
            /// The dropout keep mask, iff the problem writes it.
            pub keep_mask: Option<DevSliceMut<'a>>,
            /// Each row's greatest score, f32 of LSE's shape, iff the problem writes it.
            pub row_max: Option<DevSliceMut<'a>>,
            /// Each head's greatest score, f32 `[num_heads_q]`, iff the problem writes it. Not written where the batch
            /// is 0.
            pub head_max: Option<DevSliceMut<'a>>,
            /// Each key's sum of probabilities, f32 `[batch, num_heads_q, seqlen_k]`, iff the problem writes it.
            pub key_sum: Option<DevSliceMut<'a>>,
            /// The second cache, iff the problem has one.
            pub second: Option<&'a SecondArgs<'a>>,
            /// Scratch of at least the plan's [`workspace`](crate::Plan::workspace), if that is not 0 bytes. Its
            /// contents mean nothing, before and after.
            pub workspace: Option<DevSliceMut<'a>>,
        }
    }
}

impl<'a> ScoreArgs<'a> {
    /// Scales of the blocks of Q, K and V.
    #[must_use]
    pub fn block_scales(&self) -> [Option<DevSlice<'a>>; 3] {
        [self.block_scale_q, self.block_scale_k, self.block_scale_v]
    }
}

impl<'a> FwdArgs<'a> {
    /// Makes arguments of the four tensors that every call has. Setters with the fields' names add the others.
    #[must_use]
    pub fn new(
        q: DevSlice<'a>,
        k: impl Into<CacheSlice<'a>>,
        v: impl Into<CacheSlice<'a>>,
        o: DevSliceMut<'a>,
    ) -> Self {
        Self {
            q,
            k: k.into(),
            v: v.into(),
            o,
            lse: None,
            seq: SeqArgs::default(),
            score: ScoreArgs::default(),
            masks: MaskArgs::default(),
            cache: CacheArgs::default(),
            k_scale: None,
            v_scale: None,
            scale_o: None,
            keep_mask: None,
            row_max: None,
            head_max: None,
            key_sum: None,
            second: None,
            workspace: None,
        }
    }
}

with_setters! {
    /// The pointers of a backward call.
    #[derive(Debug)]
    #[non_exhaustive]
    pub struct BwdArgs<'a> {
        fixed {
            /// Q.
            pub q: DevSlice<'a>,
            /// K.
            pub k: DevSlice<'a>,
            /// V.
            pub v: DevSlice<'a>,
            /// O, as the forward call wrote it.
            pub o: DevSlice<'a>,
            /// LSE, as the forward call wrote it.
            pub lse: DevSlice<'a>,
            /// Gradient of O.
            pub dout: DevSlice<'a>,
            /// Gradient of Q.
            pub dq: DevSliceMut<'a>,
            /// Gradient of K.
            pub dk: DevSliceMut<'a>,
            /// Gradient of V.
            pub dv: DevSliceMut<'a>,
        }
        set {
            /// Gradient of LSE, f32 and laid out like it, iff the problem has it.
            pub dlse: Option<DevSlice<'a>>,
            /// Gradient of the elementwise bias, iff the problem asks for it.
            pub dbias: Option<DevSliceMut<'a>>,
            /// Gradients of tensors that the score function captures, dense, one for each of the problem's
            /// [`dcaptured`](crate::BwdProblem::dcaptured).
            pub dcaptured: Vec<DevSliceMut<'a>>,
            /// Gradient of the sinks, f32 `[num_heads_q]`, iff the problem asks for it.
            pub dsink: Option<DevSliceMut<'a>>,
            /// Lengths.
            pub seq: SeqArgs<'a>,
            /// Operands of the score, as in the forward call.
            pub score: ScoreArgs<'a>,
            /// Tensors of the masks, as in the forward call.
            pub masks: MaskArgs<'a>,
            /// Scratch of at least the plan's [`workspace`](crate::Plan::workspace), if that is not 0 bytes. Its
            /// contents mean nothing, before and after.
            pub workspace: Option<DevSliceMut<'a>>,
        }
    }
}

/// O and LSE of one part of the keys.
#[derive(Clone, Copy, Debug)]
pub struct PartialResult<'a> {
    /// O of this part.
    pub o: DevSlice<'a>,
    /// LSE of this part, f32 `[batch, num_heads_q, seqlen_q]`; not read if the merge only adds the parts.
    pub lse: DevSlice<'a>,
}

impl<'a> PartialResult<'a> {
    /// A term of a [sum](crate::Merge::Sum), which has no LSE.
    #[must_use]
    pub fn term(o: DevSlice<'a>) -> Self {
        Self { o, lse: o.skip(o.bytes()) }
    }
}

with_setters! {
    /// The pointers of a combine call.
    #[derive(Debug)]
    #[non_exhaustive]
    pub struct CombineArgs<'a> {
        fixed {
            /// The parts, `num_parts` of them, all with the problem's strides.
            pub parts: &'a [PartialResult<'a>],
            /// The combined O.
            pub o: DevSliceMut<'a>,
        }
        set {
            /// The combined LSE, iff the problem writes it.
            pub lse: Option<DevSliceMut<'a>>,
        }
    }
}

with_setters! {
    /// The pointers of a conversion to a format with scales by blocks.
    #[derive(Debug)]
    #[non_exhaustive]
    pub struct QuantizeArgs<'a> {
        fixed {
            /// The tensor, [batch, seq, head, dim] in the problem's `dtype`.
            pub x: DevSlice<'a>,
            /// The stored elements, written: bytes of the shape `QuantizeProblem::stored`.
            pub elements: DevSliceMut<'a>,
            /// The scales of blocks, written: a byte each, of the shape `QuantizeProblem::of_scales`.
            pub scales: DevSliceMut<'a>,
        }
        set {
            /// Scale of the whole tensor, one f32, iff the problem says that the caller gives it.
            pub tensor_scale: Option<DevSlice<'a>>,
            /// The tensor's scale, one f32, iff the problem has it written.
            pub written_scale: Option<DevSliceMut<'a>>,
            /// Scratch of the plan's size.
            pub workspace: Option<DevSliceMut<'a>>,
        }
    }
}

with_setters! {
    /// The pointers of an indexer's loss. All tensors are contiguous.
    #[derive(Debug)]
    #[non_exhaustive]
    pub struct IndexLossArgs<'a> {
        fixed {
            /// The indexer's q, `[batch, seqlen_q, num_heads, head_dim]`.
            pub q: DevSlice<'a>,
            /// The indexer's k, `[batch, seqlen_k, head_dim]`.
            pub k: DevSlice<'a>,
            /// The indexer's weights of heads, f32 `[batch, seqlen_q, num_heads]`.
            pub weights: DevSlice<'a>,
            /// Positions, i32 `[batch, seqlen_q, topk]`. Absent: an entry below 0, or at or past `seqlen_k`.
            pub indices: DevSlice<'a>,
            /// Attention's probabilities of the listed keys, summed over heads, f32 `[batch, seqlen_q, topk]`.
            pub target: DevSlice<'a>,
        }
        set {
            /// Scales of keys, f32 `[batch, seqlen_k]`, iff the problem has them.
            pub k_scale: Option<DevSlice<'a>>,
            /// Factors of each query's gradients, f32 `[batch, seqlen_q]`, iff the problem has them.
            pub dloss: Option<DevSlice<'a>>,
            /// The loss of each query, f32 `[batch, seqlen_q]`, iff the problem writes it.
            pub loss: Option<DevSliceMut<'a>>,
            /// Gradient of q, f32 in its shape, iff the problem writes it.
            pub dq: Option<DevSliceMut<'a>>,
            /// Gradient of k, f32 in its shape, iff the problem writes it.
            pub dk: Option<DevSliceMut<'a>>,
            /// Gradient of the weights, f32 in their shape, iff the problem writes it.
            pub dweights: Option<DevSliceMut<'a>>,
            /// Scratch of the plan's size.
            pub workspace: Option<DevSliceMut<'a>>,
        }
    }
}

with_setters! {
    /// The pointers of a choice.
    #[derive(Debug, Default)]
    #[non_exhaustive]
    pub struct ChooseArgs<'a> {
        set {
            /// An indexer's q, `[batch, seqlen_q, num_heads, head_dim]`.
            pub q: Option<DevSlice<'a>>,
            /// An indexer's k, `[batch, seqlen_k, head_dim]` or `[num_pages, page_size, head_dim]`.
            pub k: Option<DevSlice<'a>>,
            /// An indexer's weights of heads, f32 `[batch, seqlen_q, num_heads]`.
            pub weights: Option<DevSlice<'a>>,
            /// Scales of keys, f32 `[batch, seqlen_k]` or `[num_pages, page_size]`.
            pub k_scale: Option<DevSlice<'a>>,
            /// Pages of each sequence, i32 `[batch, max_pages]`.
            pub block_table: Option<DevSlice<'a>>,
            /// Scores that the caller gives in place of an indexer's, f32 `[batch, seqlen_q, seqlen_k]`.
            pub given: Option<DevSlice<'a>>,
            /// Keys of each sequence, i32 `[batch]`.
            pub seqused_k: Option<DevSlice<'a>>,
            /// The first candidate of each query, i32 `[batch, seqlen_q]`.
            pub first: Option<DevSlice<'a>>,
            /// One past the last candidate of each query, i32 `[batch, seqlen_q]`.
            pub end: Option<DevSlice<'a>>,
            /// Output: a list of chosen keys or blocks for each query, i32 `[batch, seqlen_q, topk]`.
            pub indices: Option<DevSliceMut<'a>>,
            /// The scores, f32 `[batch, seqlen_q, seqlen_k]`, of blocks `[batch, seqlen_q, num_blocks]`.
            pub scores: Option<DevSliceMut<'a>>,
            /// Scratch of the plan's size.
            pub workspace: Option<DevSliceMut<'a>>,
        }
    }
}
