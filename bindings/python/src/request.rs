//! One call as every Python binding describes it: some thirty tensors, most of them absent, and numbers. The lists of
//! tensors and numbers are written only here: the operators' schemas and Python's `ctypes` side are made from them.

use std::ffi::c_char;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::tensor::Tensor;

/// Declares an enum of tensors and their names, which are Python's argument names and appear in errors.
macro_rules! slots {
    ($($(#[$doc:meta])* $slot:ident = $name:literal,)+) => {
        /// Tensors of a call, by their index in [`Request::tensors`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Slot {
            $($(#[$doc])* $slot,)+
        }

        /// Names of the slots, in order.
        pub const SLOT_NAMES: [&str; NUM_SLOTS] = [$($name),+];

        /// Number of tensors that a call can have.
        pub const NUM_SLOTS: usize = [$($name),+].len();
    };
}

slots! {
    /// Q `[batch, seqlen_q, num_heads_q, head_dim_qk]`, packed `[total_q, num_heads_q, head_dim_qk]`.
    Q = "q",
    /// K `[batch, seqlen_k, num_heads_kv, head_dim_qk]`, packed, or paged `[num_pages, page_size, ..]`.
    K = "k",
    /// V `[batch, seqlen_k, num_heads_kv, head_dim_v]`, packed, or paged; absent where V is the front of K's rows.
    V = "v",
    /// O, of Q's shape with `head_dim_v`: an output of forward, an input of backward.
    O = "o",
    /// LSE, f32 `[batch, num_heads_q, seqlen_q]`, packed `[num_heads_q, total_q]`: an output of forward, an input of
    /// backward.
    Lse = "lse",
    /// Bias `[batch, num_heads_q, seqlen_q, seqlen_k]`; axes of size 1 in front are broadcast.
    Bias = "bias",
    /// ALiBi slopes, f32 `[num_heads_q]` or `[batch, num_heads_q]`.
    AlibiSlopes = "alibi_slopes",
    /// Sinks, f32 `[num_heads_q]`.
    Sink = "sink",
    /// Offsets of packed Q's sequences, i32 `[batch + 1]`.
    CuSeqlensQ = "cu_seqlens_q",
    /// Offsets of packed K's sequences, i32 `[batch + 1]`.
    CuSeqlensK = "cu_seqlens_k",
    /// Queries in use of each sequence, i32 `[batch]`.
    SequsedQ = "seqused_q",
    /// Keys in use of each sequence, i32 `[batch]`.
    SequsedK = "seqused_k",
    /// Pages of each sequence, i32 `[batch, max_pages]`.
    BlockTable = "block_table",
    /// Factors of FP8 Q: f32 `[batch, num_heads_kv]`, or one number.
    DescaleQ = "descale_q",
    /// Factors of FP8 K: f32 `[batch, num_heads_kv]`, or one number.
    DescaleK = "descale_k",
    /// Factors of FP8 V: f32 `[batch, num_heads_kv]`, or one number.
    DescaleV = "descale_v",
    /// Factor of an FP8 O: f32, one number.
    ScaleO = "scale_o",
    /// Elements of P that dropout keeps, u8 `[batch, num_heads_q, seqlen_q, seqlen_k]`: written.
    KeepMask = "keep_mask",
    /// New keys `[batch, seqlen_new, num_heads_kv, head_dim_qk]`, or packed.
    KNew = "k_new",
    /// New values, laid out as `k_new`.
    VNew = "v_new",
    /// Offsets of packed new rows' sequences, i32 `[batch + 1]`.
    CuSeqlensNew = "cu_seqlens_new",
    /// Cosines of rotary embedding, `[max_pos, rotary_dim / 2]`.
    RotaryCos = "rotary_cos",
    /// Sines of rotary embedding, `[max_pos, rotary_dim / 2]`.
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
    /// Partial outputs that combine merges, `[parts, batch, seqlen_q, num_heads_q, head_dim_v]`.
    OParts = "o_parts",
    /// LSE of the partial outputs, f32 `[parts, batch, num_heads_q, seqlen_q]`.
    LseParts = "lse_parts",
    /// Endpoints of key ranges, i32 `[batch or 1, heads, endpoints, seqlen_q]`, packed `[heads, endpoints, total_q]`.
    Intervals = "intervals",
    /// Bits of keys, u32 (or i32) `[batch or 1, heads, seqlen_q, words]`, packed `[heads, total_q, words]`.
    MaskBits = "mask_bits",
    /// Number of blocks in each row that other masks hide in part, i32 `[batch or 1, heads, blocks_q]`.
    KvNumBlocks = "kv_num_blocks",
    /// Indices of the blocks that other masks hide in part, i32 `[batch or 1, heads, blocks_q, max_blocks]`.
    KvIndices = "kv_indices",
    /// Number of blocks in each row that are seen as a whole, i32 `[batch or 1, heads, blocks_q]`.
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

/// Declares a struct of 8-byte numbers, with each number's default and its type in an operator's schema.
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
    /// Queries of the longest sequence, for packed Q.
    max_seqlen_q: i64 as "SymInt" = 0,
    /// Keys of the longest sequence, for packed or paged K. For paged K, 0 means as many as the block table holds.
    max_seqlen_k: i64 as "SymInt" = 0,
    /// Factor of the scores. NaN means `1 / sqrt(head_dim_qk)`.
    softmax_scale: f64 as "float?" = f64::NAN,
    /// Soft-cap of the scores; 0 means none.
    softcap: f64 as "float" = 0.0,
    /// Kind of mask: 0 none; 1 a window from the top-left diagonal; 2 one from the bottom-right diagonal; 3 generic
    /// coordinates.
    mask: i64 as "int" = 0,
    /// Keys to the left of the diagonal, or y of a generic mask; -1 means unbounded.
    left: i64 as "SymInt" = -1,
    /// Keys to the right of the diagonal, or x of a generic mask; -1 means unbounded.
    right: i64 as "SymInt" = -1,
    /// Leading keys that every query sees, whatever the window's `left` is.
    sink_columns: i64 as "SymInt" = 0,
    /// Probability that an element of P is dropped.
    p_drop: f64 as "float" = 0.0,
    /// Key of the dropout generator: a u64's bits.
    seed: i64 as "SymInt" = 0,
    /// Last word of the dropout generator's counter: a u64's bits.
    offset: i64 as "SymInt" = 0,
    /// Code of the type of an O that is made for the caller. Below 0 it is Q's type, or bf16 for FP8.
    dtype_o: i64 as "int" = -1,
    /// Options of the call as bits: [`ALLOW_FALLBACK`] and the constants after it.
    options: i64 as "int" = 0,
    /// New rows of the longest sequence, for packed new rows.
    max_seqlen_new: i64 as "SymInt" = 0,
    /// V's head dimension where V is the front of K's rows, otherwise 0.
    head_dim_v: i64 as "SymInt" = 0,
    /// 1 means that rotary embedding rotates elements 2i and 2i + 1 as a pair.
    rotary_interleaved: i64 as "int" = 0,
    /// Rows that share a scale where `k_scale` is given, otherwise 0.
    scale_block: i64 as "SymInt" = 0,
    /// Queries of a block where lists of blocks are given, otherwise 0.
    block_q: i64 as "SymInt" = 0,
    /// Keys of a block where lists of blocks are given, otherwise 0.
    block_k: i64 as "SymInt" = 0,
}

/// Count of numbers of a call over a cache with scales by rows. Block sizes are left out: operators take them with
/// code.
pub const NUM_SCALED: usize = NUMBERS.len() - 2;

/// Count of numbers of a call over a cache without scales by rows.
pub const NUM_CACHE: usize = NUM_SCALED - 1;

/// Count of numbers up to `options`, which every operator but combine takes. The rest belong to a cache.
pub const NUM_COMMON: usize = NUM_CACHE - 3;

/// Most sets of numbers that are kept; a program that makes more passes the numbers themselves.
const MOST_KEPT: usize = 4096;

/// Kept sets of numbers, by index. Readers take no lock, so a forked child can read its parent's.
static KEPT: [OnceLock<Numbers>; MOST_KEPT] = [const { OnceLock::new() }; MOST_KEPT];
static NUM_KEPT: AtomicUsize = AtomicUsize::new(0);

/// Keeps numbers for the process; `None` where there is no room.
pub fn keep(numbers: Numbers) -> Option<i64> {
    let at =
        NUM_KEPT.fetch_update(Relaxed, Relaxed, |count| (count < MOST_KEPT).then_some(count + 1)).ok()?;
    KEPT[at].set(numbers).ok()?;
    i64::try_from(at).ok()
}

/// The numbers kept under an index.
///
/// # Errors
/// An index under which nothing is kept.
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

/// Allows a kernel that is correct but far from fast.
pub const ALLOW_FALLBACK: i64 = 1;
/// Subtracts the true running maximum.
pub const EXACT: i64 = 2;
/// Whether every run gives equal bits.
pub const DETERMINISTIC: i64 = 4;
/// The bits of a sequence's results depend on its own lengths and contents alone.
pub const BATCH_INVARIANT: i64 = 8;
/// Each run reads the lengths back and checks them.
pub const CHECK_LENGTHS: i64 = 16;
/// Makes backward return the bias's gradient.
pub const WANTS_DBIAS: i64 = 32;
/// Makes backward return the sinks' gradient.
pub const WANTS_DSINK: i64 = 64;
/// Makes combine add parts without weights.
pub const ADDS: i64 = 128;
/// Makes combine add parts to the content of O.
pub const ADDS_TO: i64 = 256;
/// Makes the bits of a query row depend only on that row and the keys that it sees.
pub const ROW_INVARIANT: i64 = 512;
/// Keeps the lists of tiles of a mask as code for later calls. The call must not be captured in a graph.
pub const KEEPS_LISTS: i64 = 1024;

/// A tensor or a number that a score or mask function captures.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Captured {
    /// The capture's name in the texts: a C string.
    pub name: *const c_char,
    /// The captured tensor, or [`Tensor::ABSENT`] for a captured number.
    pub tensor: Tensor,
    /// Gradient of the capture, written by backward; [`Tensor::ABSENT`] if it is not wanted.
    pub gradient: Tensor,
    /// Value of a capture that the text declares a float.
    pub real: f64,
    /// Value of a capture that the text declares an int.
    pub integer: i64,
}

/// A call's score and mask functions.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Code {
    /// C string with the code of a score function; null: scores are not modified.
    pub score: *const c_char,
    /// C string with the code of a mask function; null: all pairs are seen.
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
    /// Indices of keys, i32 `[batch, seqlen_q, num_heads_kv, topk]`, packed `[total_q, num_heads_kv, topk]`.
    pub indices: Tensor,
    /// Entries in use of each list, i32 `[batch]`, or `[batch, seqlen_q]`, packed `[total_q]`. [`Tensor::ABSENT`]: all
    /// of them.
    pub topk_length: Tensor,
    /// Number of keys for which one list entry stands.
    pub block: i64,
    /// 1 means that entries are addresses in K's pages.
    pub addresses: i64,
    /// 1 means that LSE excludes the sink.
    pub lse_without_sink: i64,
}

/// Scales by blocks of Q, K and V. If they are given, Q, K and V are stored in a block-scaled format.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BlockScales {
    /// Scales of Q, one byte each.
    pub q: Tensor,
    /// Scales of K, one byte each.
    pub k: Tensor,
    /// Scales of V, one byte each.
    pub v: Tensor,
    /// Code of the format, such as `FMHA_MXFP8_E4M3`.
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
    /// Stream of the device; 0 is its default stream.
    pub stream: i64,
    /// A call's score and mask functions; null: none. They outlive the request.
    pub code: *const Code,
    /// Lists of keys; null: none. They outlive the request.
    pub lists: *const Lists,
    /// Scales by blocks; null: none. They outlive the request.
    pub block_scales: *const BlockScales,
    /// A call of the same queries over a second cache, whose keys join in the softmax; null: none. It outlives the
    /// request.
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
    /// A slot without a tensor.
    pub fn required(&self, slot: Slot) -> Result<&Tensor, String> {
        self.get(slot).ok_or_else(|| format!("{} is missing", name(slot)))
    }

    /// Puts a tensor into a slot.
    pub fn set(&mut self, slot: Slot, tensor: Tensor) {
        self.tensors[slot as usize] = tensor;
    }

    /// The call's functions and their captures, if it has any.
    ///
    /// # Safety
    /// `code` is null or valid, with `captured` as long as it says.
    #[must_use]
    pub unsafe fn coded(&self) -> Option<(&Code, &[Captured])> {
        // SAFETY: the caller promises that `code` is null or valid, with `captured` as long as it says.
        let code = unsafe { self.code.as_ref() }?;
        let count = usize::try_from(code.num_captured).unwrap_or(0);
        if code.captured.is_null() || count == 0 {
            return Some((code, &[]));
        }
        // SAFETY: the caller promises that `code` is null or valid, with `captured` as long as it says.
        Some((code, unsafe { std::slice::from_raw_parts(code.captured, count) }))
    }

    /// The call's lists of keys, if it has any.
    ///
    /// # Safety
    /// `lists` is null or valid.
    #[must_use]
    pub unsafe fn listed(&self) -> Option<&Lists> {
        // SAFETY: the caller promises that the pointer is null or valid.
        unsafe { self.lists.as_ref() }
    }

    /// The call's scales by blocks, if it has any.
    ///
    /// # Safety
    /// `block_scales` is null or valid.
    #[must_use]
    pub unsafe fn scaled(&self) -> Option<&BlockScales> {
        // SAFETY: the caller promises that the pointer is null or valid.
        unsafe { self.block_scales.as_ref() }
    }

    /// The call over a second cache, if there is one.
    ///
    /// # Safety
    /// `second` is null or a live request.
    #[must_use]
    pub unsafe fn second(&self) -> Option<&Self> {
        // SAFETY: the caller promises that the pointer is null or valid.
        unsafe { self.second.as_ref() }
    }

    /// Whether lists hold addresses, so that K has pages but no block table.
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
