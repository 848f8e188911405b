//! One call, as every Python binding states it: thirty-odd tensors, most of them absent, and numbers. The lists of
//! tensors and numbers are written once, here: the operators' schemas and Python's side of `ctypes` are made from
//! it.

use std::ffi::c_char;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::tensor::Tensor;

/// Declares an enum of tensors with their names, which errors use and which are Python's argument names.
macro_rules! slots {
    ($($(#[$doc:meta])* $slot:ident = $name:literal,)+) => {
        /// The tensors of a call, by their place in [`Request::tensors`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Slot {
            $($(#[$doc])* $slot,)+
        }

        /// The names of the slots, in their order.
        pub const SLOT_NAMES: [&str; NUM_SLOTS] = [$($name),+];

        /// How many tensors a call can have.
        pub const NUM_SLOTS: usize = [$($name),+].len();
    };
}

slots! {
    /// Q `[batch, seqlen_q, num_heads_q, head_dim_qk]`, packed `[total_q, num_heads_q, head_dim_qk]`.
    Q = "q",
    /// K `[batch, seqlen_k, num_heads_kv, head_dim_qk]`, packed, or paged `[num_pages, page_size, ..]`.
    K = "k",
    /// V likewise, of `head_dim_v`; absent where V is the front of K's rows.
    V = "v",
    /// O, of Q's shape with `head_dim_v`: written; read by backward.
    O = "o",
    /// LSE, f32 `[batch, num_heads_q, seqlen_q]`, packed `[num_heads_q, total_q]`: written; read by backward.
    Lse = "lse",
    /// Bias `[batch, num_heads_q, seqlen_q, seqlen_k]`; axes of size 1 in front are broadcast.
    Bias = "bias",
    /// ALiBi slopes, f32 `[num_heads_q]` or `[batch, num_heads_q]`.
    AlibiSlopes = "alibi_slopes",
    /// Sinks, f32 `[num_heads_q]`.
    Sink = "sink",
    /// i32 `[batch + 1]`.
    CuSeqlensQ = "cu_seqlens_q",
    /// i32 `[batch + 1]`.
    CuSeqlensK = "cu_seqlens_k",
    /// i32 `[batch]`.
    SequsedQ = "seqused_q",
    /// i32 `[batch]`.
    SequsedK = "seqused_k",
    /// i32 `[batch, max_pages]`.
    BlockTable = "block_table",
    /// Factors of FP8 Q: f32 `[batch, num_heads_kv]`, or one number.
    DescaleQ = "descale_q",
    /// Factors of FP8 K: f32 `[batch, num_heads_kv]`, or one number.
    DescaleK = "descale_k",
    /// Factors of FP8 V: f32 `[batch, num_heads_kv]`, or one number.
    DescaleV = "descale_v",
    /// Factor of an FP8 O: f32, one number.
    ScaleO = "scale_o",
    /// u8 `[batch, num_heads_q, seqlen_q, seqlen_k]`: written.
    KeepMask = "keep_mask",
    /// New keys `[batch, seqlen_new, num_heads_kv, head_dim_qk]`, or packed.
    KNew = "k_new",
    /// New values, laid out as `k_new`.
    VNew = "v_new",
    /// i32 `[batch + 1]`.
    CuSeqlensNew = "cu_seqlens_new",
    /// `[max_pos, rotary_dim / 2]`.
    RotaryCos = "rotary_cos",
    /// `[max_pos, rotary_dim / 2]`.
    RotarySin = "rotary_sin",
    /// Words of the tree mask, u32 (or i32) `[batch, seqlen_q, words]`, packed `[total_q, words]`.
    TreeMask = "tree_mask",
    /// Scales of an FP8 cache's K by rows, f32 `[batch, ceil(seqlen_k / scale_block), num_heads_kv]`, packed
    /// `[total_k, ..]`, paged `[num_pages, page_size / scale_block, ..]`: written where rows are appended.
    KScale = "k_scale",
    /// Scales of V by rows, of the shape of `k_scale`.
    VScale = "v_scale",
    /// Gradient of O.
    Dout = "dout",
    /// Gradient of LSE.
    Dlse = "dlse",
    /// Gradient of Q: written.
    Dq = "dq",
    /// Gradient of K: written.
    Dk = "dk",
    /// Gradient of V: written.
    Dv = "dv",
    /// Gradient of the bias: written.
    Dbias = "dbias",
    /// Gradient of the sinks: written.
    Dsink = "dsink",
    /// Partial outputs `[parts, batch, seqlen_q, num_heads_q, head_dim_v]`, of combine.
    OParts = "o_parts",
    /// Their LSE, f32 `[parts, batch, num_heads_q, seqlen_q]`.
    LseParts = "lse_parts",
    /// Endpoints of key ranges, i32 `[batch or 1, heads, endpoints, seqlen_q]`, packed `[heads, endpoints, total_q]`.
    Intervals = "intervals",
    /// Bits of keys, u32 (or i32) `[batch or 1, heads, seqlen_q, words]`, packed `[heads, total_q, words]`.
    MaskBits = "mask_bits",
    /// Number of blocks in each row that other masks hide in part, i32 `[batch or 1, heads, blocks_q]`.
    KvNumBlocks = "kv_num_blocks",
    /// Indices of the blocks that other masks cut, i32 `[batch or 1, heads, blocks_q, max_blocks]`.
    KvIndices = "kv_indices",
    /// Counts of the blocks that are seen as a whole, likewise.
    FullKvNumBlocks = "full_kv_num_blocks",
    /// Indices of the blocks that are seen as a whole, laid out like `kv_indices`.
    FullKvIndices = "full_kv_indices",
    /// Each row's greatest score, f32 of LSE's shape: written.
    RowMax = "row_max",
    /// Each head's greatest score, f32 `[num_heads_q]`: written.
    HeadMax = "head_max",
    /// Each key's sum of probabilities, f32 `[batch, num_heads_q, seqlen_k]`: written.
    KeySum = "key_sum",
}

/// Declares a struct of 8-byte numbers, with each one's type in an operator's schema and its default.
macro_rules! numbers {
    ($($(#[$doc:meta])* $field:ident: $type:ty as $schema:literal = $default:expr,)+) => {
        /// The numbers of a call.
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub struct Numbers {
            $($(#[$doc])* pub $field: $type,)+
        }

        impl Default for Numbers {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        /// Fields of `Numbers` in order: the name of each, and the type that torch's operator schema has for it.
        pub const NUMBERS: &[(&str, &str)] = &[$((stringify!($field), $schema)),+];

        impl Numbers {
            /// Reads the first `count` numbers with `next`, which gets the schema's type and returns 8 bytes; the
            /// others get their defaults.
            pub fn read(count: usize, mut next: impl FnMut(&'static str) -> u64) -> Self {
                let mut numbers = Self::default();
                let mut left = count;
                $(
                    if left == 0 {
                        return numbers;
                    }
                    left -= 1;
                    numbers.$field = <$type>::from_ne_bytes(next($schema).to_ne_bytes());
                )+
                let _ = left;
                numbers
            }
        }
    };
}

numbers! {
    /// Packed Q: the longest sequence's queries.
    max_seqlen_q: i64 as "SymInt" = 0,
    /// Packed or paged K: the longest sequence's keys; paged, 0: as many as the block table holds.
    max_seqlen_k: i64 as "SymInt" = 0,
    /// NaN: `1 / sqrt(head_dim_qk)`.
    softmax_scale: f64 as "float?" = f64::NAN,
    /// Soft-cap of the scores; 0: none.
    softcap: f64 as "float" = 0.0,
    /// 0: all keys; 1: a window from the top-left diagonal; 2: from the bottom-right one; 3: generic coordinates.
    mask: i64 as "int" = 0,
    /// Keys to the left of the diagonal, or y; -1: unbounded.
    left: i64 as "SymInt" = -1,
    /// Keys of the window to the right, or the mask's second number; -1: unbounded.
    right: i64 as "SymInt" = -1,
    /// Leading keys that every query sees, whatever the window's `left` is.
    sink_columns: i64 as "SymInt" = 0,
    /// Probability that an element of P is dropped.
    p_drop: f64 as "float" = 0.0,
    /// Key of the dropout generator: a u64's bits.
    seed: i64 as "SymInt" = 0,
    /// Last word of the dropout generator's counter: a u64's bits.
    offset: i64 as "SymInt" = 0,
    /// Type of an O that is made for the caller, as its code; below 0: Q's, bf16 beside FP8.
    dtype_o: i64 as "int" = -1,
    /// Bits: [`ALLOW_FALLBACK`], ...
    options: i64 as "int" = 0,
    /// Packed new rows: the longest sequence's.
    max_seqlen_new: i64 as "SymInt" = 0,
    /// V's head dimension where V is the front of K's rows; else 0.
    head_dim_v: i64 as "SymInt" = 0,
    /// 1: elements 2i and 2i + 1 are rotated as a pair.
    rotary_interleaved: i64 as "int" = 0,
    /// Rows that share a scale, where `k_scale` is given; else 0.
    scale_block: i64 as "SymInt" = 0,
    /// Queries of a block, where lists of blocks are given; else 0.
    block_q: i64 as "SymInt" = 0,
    /// Keys of a block, where lists of blocks are given; else 0.
    block_k: i64 as "SymInt" = 0,
}

/// The numbers of a call over a cache with scales by rows: those of blocks come apart, with what else operators of
/// code take.
pub const NUM_SCALED: usize = NUMBERS.len() - 2;

/// The numbers of a call over a cache without scales by rows.
pub const NUM_CACHE: usize = NUM_SCALED - 1;

/// The numbers up to `options`, which every operator but combine takes; the others are a cache's.
pub const NUM_COMMON: usize = NUM_CACHE - 3;

/// Most sets of numbers that are kept; a program that makes more passes the numbers themselves.
const MOST_KEPT: usize = 4096;

/// The kept sets of numbers, by the index under which they were kept. A forked child sees its parent's: readers
/// take no lock.
static KEPT: [OnceLock<Numbers>; MOST_KEPT] = [const { OnceLock::new() }; MOST_KEPT];
static NUM_KEPT: AtomicUsize = AtomicUsize::new(0);

/// Keeps numbers for the process; `None` where there is no room.
pub fn keep(numbers: Numbers) -> Option<i64> {
    let at =
        NUM_KEPT.fetch_update(Relaxed, Relaxed, |count| (count < MOST_KEPT).then_some(count + 1)).ok()?;
    KEPT[at].set(numbers).ok()?;
    i64::try_from(at).ok()
}

/// The numbers that were kept.
///
/// # Errors
/// Where none were under this one.
pub fn kept(at: i64) -> Result<Numbers, String> {
    let found = usize::try_from(at).ok().and_then(|at| KEPT.get(at)?.get());
    found.copied().ok_or_else(|| format!("numbers {at} is none of those that were kept"))
}

/// Names of the bits of [`Numbers::options`], from the lowest.
pub const OPTIONS: [&str; 11] = [
    "allow_fallback",
    "exact",
    "deterministic",
    "batch_invariant",
    "check_lengths",
    "wants_dbias",
    "wants_dsink",
    "adds",
    "adds_to",
    "row_invariant",
    "keeps_lists",
];

/// A kernel that is correct but far from fast may serve.
pub const ALLOW_FALLBACK: i64 = 1;
/// The true running maximum is subtracted.
pub const EXACT: i64 = 2;
/// Whether every run gives equal bits.
pub const DETERMINISTIC: i64 = 4;
/// The bits of a sequence's results depend on its own lengths and contents alone.
pub const BATCH_INVARIANT: i64 = 8;
/// Each run reads the lengths back and checks them.
pub const CHECK_LENGTHS: i64 = 16;
/// Backward: the bias's gradient is wanted.
pub const WANTS_DBIAS: i64 = 32;
/// Backward: the sinks' gradient is wanted.
pub const WANTS_DSINK: i64 = 64;
/// Combine: parts are added without weights.
pub const ADDS: i64 = 128;
/// Combine: parts are added to what O holds.
pub const ADDS_TO: i64 = 256;
/// The bits of a query row depend on that row and the keys that it sees alone.
pub const ROW_INVARIANT: i64 = 512;
/// Lists of tiles that a mask as code makes serve later calls too: nobody captures this one.
pub const KEEPS_LISTS: i64 = 1024;

/// A tensor or a number that a score or mask function captures.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Captured {
    /// The capture's name in the texts: a C string.
    pub name: *const c_char,
    /// The tensor; [`Tensor::ABSENT`]: a number.
    pub tensor: Tensor,
    /// Gradient of the capture, written by the backward; [`Tensor::ABSENT`]: not wanted.
    pub gradient: Tensor,
    /// The number that the text declares a float.
    pub real: f64,
    /// The number that the text declares an int.
    pub integer: i64,
}

/// A call's score and mask functions.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Code {
    /// C string with the code of a score function; null: scores are not modified.
    pub score: *const c_char,
    /// Which pairs are seen: a C string; null: all.
    pub mask: *const c_char,
    /// Tensors and scalars that both functions capture.
    pub captured: *const Captured,
    /// Number of captured tensors and numbers.
    pub num_captured: i64,
}

/// Lists of the keys that each query attends to, in place of all keys.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Lists {
    /// i32 `[batch, seqlen_q, num_heads_kv, topk]`, packed `[total_q, num_heads_kv, topk]`.
    pub indices: Tensor,
    /// i32 `[batch]`, or `[batch, seqlen_q]`, packed `[total_q]`; [`Tensor::ABSENT`]: every entry is in use.
    pub topk_length: Tensor,
    /// Number of keys for which one list entry stands.
    pub block: i64,
    /// 1: entries are addresses in K's pages.
    pub addresses: i64,
    /// 1: LSE is that of the keys alone, beside a sink.
    pub lse_without_sink: i64,
}

/// Scales by blocks of Q, K and V, which are stored in a format with them then.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BlockScales {
    /// Q's scales, bytes.
    pub q: Tensor,
    /// K's scales, bytes.
    pub k: Tensor,
    /// V's scales, bytes.
    pub v: Tensor,
    /// `FMHA_MXFP8_E4M3`, ...
    pub format: i64,
    /// Type of the values: `FMHA_BF16` or `FMHA_F32`.
    pub values: i64,
}

/// One forward, backward or combine call.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Request {
    /// The tensors, by [`Slot`].
    pub tensors: [Tensor; NUM_SLOTS],
    /// The numbers.
    pub numbers: Numbers,
    /// A stream of the device, 0: its default one.
    pub stream: i64,
    /// A call's score and mask functions; null: none. They outlive the request.
    pub code: *const Code,
    /// Lists of keys; null: none. They outlive the request.
    pub lists: *const Lists,
    /// Scales by blocks; null: none. They outlive the request.
    pub block_scales: *const BlockScales,
    /// A call of the same queries over a second cache alone, whose keys join in the softmax; null: none. It outlives
    /// the request.
    pub second: *const Request,
}

impl Request {
    /// A request without tensors or options.
    #[must_use]
    pub fn new() -> Self {
        Self {
            tensors: [Tensor::ABSENT; NUM_SLOTS],
            numbers: Numbers::default(),
            stream: 0,
            code: ptr::null(),
            lists: ptr::null(),
            block_scales: ptr::null(),
            second: ptr::null(),
        }
    }

    /// The tensor of a slot, if it is given.
    #[must_use]
    pub fn get(&self, slot: Slot) -> Option<&Tensor> {
        self.tensors[slot as usize].given()
    }

    /// The tensor of a slot.
    ///
    /// # Errors
    /// Where it is not given.
    pub fn required(&self, slot: Slot) -> Result<&Tensor, String> {
        self.get(slot).ok_or_else(|| format!("{} is missing", name(slot)))
    }

    /// Puts a tensor into a slot.
    pub fn set(&mut self, slot: Slot, tensor: Tensor) {
        self.tensors[slot as usize] = tensor;
    }

    /// The call's functions and what they capture, if it has any.
    ///
    /// # Safety
    /// `code` is null or a live one, whose list is as long as it says.
    #[must_use]
    pub unsafe fn coded(&self) -> Option<(&Code, &[Captured])> {
        // SAFETY: promised by the caller: `code` is null or a live one, whose list is as long as it says.
        let code = unsafe { self.code.as_ref() }?;
        let count = usize::try_from(code.num_captured).unwrap_or(0);
        if code.captured.is_null() || count == 0 {
            return Some((code, &[]));
        }
        // SAFETY: promised by the caller: `code` is null or a live one, whose list is as long as it says.
        Some((code, unsafe { std::slice::from_raw_parts(code.captured, count) }))
    }

    /// The call's lists, if it has any.
    ///
    /// # Safety
    /// `lists` is null or live ones.
    #[must_use]
    pub unsafe fn listed(&self) -> Option<&Lists> {
        // SAFETY: the caller's promise.
        unsafe { self.lists.as_ref() }
    }

    /// The call's scales by blocks, if it has any.
    ///
    /// # Safety
    /// `block_scales` is null or live ones.
    #[must_use]
    pub unsafe fn scaled(&self) -> Option<&BlockScales> {
        // SAFETY: the caller's promise.
        unsafe { self.block_scales.as_ref() }
    }

    /// The call over a second cache alone, if there is one.
    ///
    /// # Safety
    /// `second` is null or a live request.
    #[must_use]
    pub unsafe fn second(&self) -> Option<&Self> {
        // SAFETY: the caller's promise.
        unsafe { self.second.as_ref() }
    }

    /// Whether entries of lists are addresses, so that K has pages and no table.
    ///
    /// # Safety
    /// As [`Self::listed`].
    #[must_use]
    pub unsafe fn is_addressed(&self) -> bool {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.listed() }.is_some_and(|lists| lists.addresses != 0)
    }

    /// Whether gradients are wanted.
    #[must_use]
    pub fn is_backward(&self) -> bool {
        self.get(Slot::Dout).is_some()
    }

    /// Whether a bit of the options is set.
    #[must_use]
    pub fn asks(&self, option: i64) -> bool {
        self.numbers.options & option != 0
    }
}

impl Default for Request {
    fn default() -> Self {
        Self::new()
    }
}

/// The name of a slot.
#[must_use]
pub fn name(slot: Slot) -> &'static str {
    SLOT_NAMES[slot as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_the_options_has_its_name() {
        let bits = [
            ALLOW_FALLBACK,
            EXACT,
            DETERMINISTIC,
            BATCH_INVARIANT,
            CHECK_LENGTHS,
            WANTS_DBIAS,
            WANTS_DSINK,
            ADDS,
            ADDS_TO,
            ROW_INVARIANT,
            KEEPS_LISTS,
        ];
        assert_eq!(bits.len(), OPTIONS.len());
        for (i, bit) in bits.into_iter().enumerate() {
            assert_eq!(bit, 1 << i, "{}", OPTIONS[i]);
        }
    }

    #[test]
    fn numbers_are_read_in_order_and_the_rest_is_as_nobody_says_it() {
        let mut word = 0;
        let numbers = Numbers::read(2, |_| {
            word += 5;
            word
        });
        assert_eq!((numbers.max_seqlen_q, numbers.max_seqlen_k), (5, 10));
        assert!(numbers.softmax_scale.is_nan());
        assert_eq!(numbers.left, -1);
        assert_eq!(NUMBERS[NUM_COMMON - 1].0, "options");
    }
}
