//! The C structs, as `fmha.h` has them. Nothing here is trusted: `host.rs` reads problems, `plan.rs` arguments.

use std::ffi::{c_char, c_void};

/// Element type IEEE binary16.
pub const FMHA_F16: i32 = 0;
/// Element type bfloat16.
pub const FMHA_BF16: i32 = 1;
/// Element type OCP FP8 E4M3.
pub const FMHA_E4M3FN: i32 = 2;
/// Element type OCP FP8 E5M2.
pub const FMHA_E5M2: i32 = 3;
/// Element type FP8 E4M3 FNUZ.
pub const FMHA_E4M3FNUZ: i32 = 4;
/// Element type FP8 E5M2 FNUZ.
pub const FMHA_E5M2FNUZ: i32 = 5;
/// Element type IEEE binary32.
pub const FMHA_F32: i32 = 6;

/// V as [.., seqlen_k, head_dim_v], dim_stride 1.
pub const FMHA_V_ROW_MAJOR: i32 = 0;
/// V as [.., head_dim_v, seqlen_k], seqlen_stride 1.
pub const FMHA_V_COL_MAJOR: i32 = 1;

/// The running maximum of a row may lag by a bounded factor: the default.
pub const FMHA_FAST: i32 = 0;
/// The true running maximum is subtracted; a kernel that cannot do so refuses.
pub const FMHA_EXACT: i32 = 1;

/// Partial results are weighted by their LSE: the default.
pub const FMHA_BY_LSE: i32 = 0;
/// Partial results are added without weights, in f32 and in their order, and the sum is rounded once: for partial
/// gradients.
pub const FMHA_SUM: i32 = 1;
/// As FMHA_SUM, with the values that O already holds as the first term.
pub const FMHA_ADD_TO: i32 = 2;

/// Keys up to a query's own position are candidates, with the last query at the position of the last key: the
/// default.
pub const FMHA_CAUSAL_KEYS: i32 = 0;
/// All keys are candidates.
pub const FMHA_ALL_KEYS: i32 = 1;
/// Keys from `first` to `end` of each query are candidates.
pub const FMHA_RANGES_OF_KEYS: i32 = 2;

/// Format MXFP8 with E4M3 elements: an E8M0 scale for each 32.
pub const FMHA_MXFP8_E4M3: i32 = 1;
/// Format MXFP8 with E5M2 elements: an E8M0 scale for each 32.
pub const FMHA_MXFP8_E5M2: i32 = 2;
/// Format NVFP4: E2M1 elements in pairs, an E4M3 scale for each 16.
pub const FMHA_NVFP4: i32 = 3;

/// The scale of a tensor is 1, which is not in memory: the default.
pub const FMHA_SCALE_ONE: i32 = 0;
/// The caller gives the scale of the whole tensor.
pub const FMHA_SCALE_GIVEN: i32 = 1;
/// The scale of a tensor is written: its largest magnitude / 2688.
pub const FMHA_SCALE_WRITTEN: i32 = 2;

/// A call without a bias.
pub const FMHA_BIAS_NONE: i32 = 0;
/// An elementwise bias [batch, num_heads_q, seqlen_q, seqlen_k].
pub const FMHA_BIAS_ELEMENTWISE: i32 = 1;
/// An ALiBi bias with slopes [num_heads_q].
pub const FMHA_BIAS_ALIBI: i32 = 2;
/// An ALiBi bias with slopes [batch, num_heads_q].
pub const FMHA_BIAS_ALIBI_PER_BATCH: i32 = 3;

/// An FP8 tensor without a factor, as if the factor were 1.
pub const FMHA_DESCALE_NONE: i32 = 0;
/// One factor for each sequence and kv head, f32 [batch, num_heads_kv].
pub const FMHA_DESCALE_PER_KV_HEAD: i32 = 1;
/// One factor for the whole tensor, f32 [1].
pub const FMHA_DESCALE_PER_TENSOR: i32 = 2;

/// Every list has topk entries.
pub const FMHA_LENGTH_WHOLE: i32 = 0;
/// A length for each sequence, i32 [batch].
pub const FMHA_LENGTH_PER_SEQUENCE: i32 = 1;
/// A length for each token, i32 [batch, seqlen_q], packed [total_q].
pub const FMHA_LENGTH_PER_TOKEN: i32 = 2;

/// Strides of a tensor, in elements. They may differ from any contiguous order; 0 is legal for an input's
/// batch and head.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaStrides {
    /// Stride from sequence to sequence; packed: not used.
    pub batch_stride: i64,
    /// Stride from row to row.
    pub seqlen_stride: i64,
    /// Stride from head to head.
    pub head_stride: i64,
    /// Stride from one element of a row to the next: 1, except for a column-major V.
    pub dim_stride: i64,
}

/// The gradients of a call, for backward. Set everything to 0 first, then what is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaGradients {
    /// Size of this struct in bytes: sizeof(FmhaGradients).
    pub struct_bytes: u64,
    /// Gradient of O, shape and type of O.
    pub dout: FmhaStrides,
    /// Gradient of Q, shape of Q.
    pub dq: FmhaStrides,
    /// Gradient of K, shape of K.
    pub dk: FmhaStrides,
    /// Gradient of V, in the shape of V; row-major, whatever the layout of V.
    pub dv: FmhaStrides,
    /// Gradient of the bias, in its shape. It is summed over the axes along which the bias has stride 0; its own
    /// stride is 0 there too.
    pub dbias: FmhaStrides,
    /// Type of dq, dk and dv: FMHA_F32, FMHA_F16 or FMHA_BF16.
    pub dtype_grad: i32,
    /// Type of dbias: FMHA_F32, FMHA_F16 or FMHA_BF16; 0 where there is none.
    pub dtype_dbias: i32,
    /// 1: dbias is written; else 0.
    pub write_dbias: i32,
    /// 1: dsink is written; else 0.
    pub write_dsink: i32,
    /// 1: LSE has a gradient, which is read; else 0.
    pub has_dlse: i32,
    /// Reserved: must be 0.
    pub reserved: i32,
}

/// Use of a KV cache beside reading it: append, rotary embedding, quantised types, tree mask. Set everything
/// to 0 first, then the fields that you use.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaCache {
    /// Size of this struct in bytes: sizeof(FmhaCache).
    pub struct_bytes: u64,
    /// Number of new rows of a sequence, which are written to K and V from row seqused_k[b] on before attention reads
    /// them; packed: of the longest sequence; 0: none.
    pub seqlen_new: i64,
    /// Number of rows of rotary_cos and rotary_sin; 0: no rotary embedding.
    pub max_pos: i64,
    /// New keys [batch, seqlen_new, num_heads_kv, head_dim_qk]; packed [total_new, num_heads_kv, head_dim_qk].
    pub k_new: FmhaStrides,
    /// New values [batch, seqlen_new, num_heads_kv, head_dim_v], or packed; none with v_in_k.
    pub v_new: FmhaStrides,
    /// Scales of K, f32 [batch, ceil(seqlen_k / scale_block), num_heads_kv]; packed [total_k, num_heads_kv]; paged
    /// [num_pages, page_size / scale_block, num_heads_kv]; seqlen_stride is from scale to scale. Not read where
    /// scale_block is 0.
    pub k_scale: FmhaStrides,
    /// Scales of V, as k_scale.
    pub v_scale: FmhaStrides,
    /// Number of rows that share a scale, with dtype_cache; 1: each token and head has a scale; 0: rows have no scales.
    pub scale_block: i64,
    /// 1: new rows are packed, and begin where FmhaArgs.cu_seqlens_new says; else 0.
    pub packed_new: i32,
    /// 1: a tree mask is used in place of the mask "b"; else 0.
    pub tree_mask: i32,
    /// Number of leading elements of each row of Q and k_new that are rotated: even, at most head_dim_qk; 0: none.
    pub rotary_dim: i32,
    /// 1: elements 2i and 2i + 1 are rotated as a pair; 0: elements i and i + rotary_dim / 2.
    pub rotary_interleaved: i32,
    /// Type of rotary_cos and rotary_sin: FMHA_F32, or dtype_qk; 0 where there are none.
    pub dtype_rotary: i32,
    /// FP8 type in which K and V are stored while Q has a 16-bit type: FMHA_E4M3FN, ...; 0: K and V have the types
    /// dtype_qk and dtype_v.
    pub dtype_cache: i32,
    /// 1: V is the first head_dim_v elements of K's rows, and has no address of its own; else 0.
    pub v_in_k: i32,
    /// 656 or 584: K's rows are bytes in pages, with v_in_k and dtype_qk bf16, strides in bytes: E4M3 values with their
    /// scales, and 64 elements in bf16, as FlashMLA has them; new rows come in bf16 and are quantised; 0: rows of
    /// elements.
    pub cache_rows: i32,
}

/// Position of a call in a larger whole of which it is a part: its first query, key, sequence and head. Mask, ALiBi and
/// dropout use positions of the whole, so a part has the same results as inside the whole. The bias and the keep mask
/// cover only the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaPart {
    /// Size of this struct in bytes: sizeof(FmhaPart).
    pub struct_bytes: u64,
    /// Position in the whole of the call's first query; one number for all sequences.
    pub position_q: i64,
    /// Position in the whole of the call's first key; one number for all sequences.
    pub position_k: i64,
    /// Number of queries of each whole sequence, for the diagonal of a bottom-right mask; with 0 (and seqlen_k 0) the
    /// whole ends where the part ends.
    pub seqlen_q: i64,
    /// Number of keys of each whole sequence, as seqlen_q is that of its queries.
    pub seqlen_k: i64,
    /// Index of the first sequence, for dropout.
    pub batch: i64,
    /// Index of the first query head, for dropout.
    pub head: i64,
    /// Number of query heads of the whole, for dropout; 0: as many as the call has.
    pub num_heads_q: i64,
}

/// Lists of keys in place of all keys, for models that are trained sparse: a query token sees the keys that its list
/// names, for each kv head, and no others. A key that a list names twice counts twice. Set everything to 0 first.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaLists {
    /// Size of this struct in bytes: sizeof(FmhaLists).
    pub struct_bytes: u64,
    /// Number of entries of each token's list of keys.
    pub topk: i64,
    /// Stride of the indices from one sequence to the next; packed: not used.
    pub batch_stride: i64,
    /// Stride from one token's list to the next.
    pub seqlen_stride: i64,
    /// Stride from one kv head's list to the next; 0: one list for all.
    pub head_stride: i64,
    /// FMHA_LENGTH_WHOLE, FMHA_LENGTH_PER_SEQUENCE or FMHA_LENGTH_PER_TOKEN.
    pub length: i32,
    /// 1: list entries are addresses page * page_size + offset in the pages of K and V, and there is no
    /// block_table; else 0.
    pub addresses: i32,
    /// Number of keys of an entry: entry e stands for keys e * block up to (e + 1) * block; 0 or 1: one key.
    pub block: i32,
    /// 1: LSE is over the keys alone and excludes the sink; else 0.
    pub lse_without_sink: i32,
}

/// Most axes of a tensor that a score or mask function captures.
pub const FMHA_MAX_RANK: usize = 5;

/// A tensor or a number that a score or a mask captures. The declaration of its name in the text says which of the two
/// it is, and the type of its elements: "slopes: f32[_]; cap: float; s + cap * slopes[h]". For a number, only the name
/// is set.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaCaptured {
    /// Name of the tensor or number in the texts, in host memory.
    pub name: *const c_char,
    /// Extents of a tensor: the first num_dims of them are used, each 1 or more.
    pub shape: [i64; FMHA_MAX_RANK],
    /// Stride of each axis in elements, 0 or more.
    pub strides: [i64; FMHA_MAX_RANK],
    /// Number of a tensor's axes, 0 to FMHA_MAX_RANK; 0 for a number.
    pub num_dims: i32,
    /// Type of the gradient: FMHA_F32, FMHA_F16 or FMHA_BF16; 0 where there is none.
    pub dtype_grad: i32,
    /// 1: in a backward call, the gradient of a captured float tensor is written; else 0.
    pub write_grad: i32,
    /// Reserved: must be 0.
    pub reserved: i32,
}

/// A score and a mask as code: text of a small language over s (the scaled score), b (sequence), h (query
/// head), q and k (the places of row and key in their sequence, from 0), seqlen_q and seqlen_k, and over what
/// is captured by name. Operators are Python's; functions: abs sign floor ceil round exp exp2 log log2 sin
/// cos tanh erf sigmoid relu sqrt rsqrt min max pow clamp select, and the casts float int bool.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaCode {
    /// Size of this struct in bytes: sizeof(FmhaCode).
    pub struct_bytes: u64,
    /// Host memory: an expression that replaces the scaled score, before soft-cap and bias: "s + 0.5 * (k - q)";
    /// null: the score is unchanged.
    pub score: *const c_char,
    /// Host memory: a condition for which (query, key) pairs are visible, besides what FmhaProblem.mask hides: "k
    /// <= q or k < 4"; null: all.
    pub mask: *const c_char,
    /// Host memory: num_captured tensors or numbers, each name once; null where there are none. A name that no text
    /// reads is refused.
    pub captured: *const FmhaCaptured,
    /// Number of captured tensors and numbers.
    pub num_captured: i64,
}

/// Masks as data: which keys a query sees besides those that FmhaProblem.mask and a mask as code hide. A
/// batch_stride of 0 is one mask for all sequences; packed intervals and bits have no batch axis. Set everything
/// to 0 first, then what is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaMasks {
    /// Size of this struct in bytes: sizeof(FmhaMasks).
    pub struct_bytes: u64,
    /// Endpoints F [batch or 1, heads, endpoints, seqlen_q], packed [heads, endpoints, total_q]:
    /// seqlen_stride is from query to query, dim_stride from endpoint to endpoint. With E(-1) = 0 and E(m) =
    /// min(max(F(m), E(m - 1)), seqlen_k) a query sees key j iff E(2p) <= j < E(2p + 1) for some p.
    pub intervals: FmhaStrides,
    /// Words [batch or 1, heads, seqlen_q, ceil(seqlen_k / 32)], packed [heads, total_q, ceil(seqlen_k /
    /// 32)]: bit j % 32 of word j / 32, from the least, is 1 where key j is seen.
    pub mask_bits: FmhaStrides,
    /// Counts [batch or 1, heads, ceil(seqlen_q / block_q)] of the list of partly visible blocks, in which the other
    /// masks decide; seqlen_stride is from one block to the next.
    pub kv_num_blocks: FmhaStrides,
    /// Indices [batch or 1, heads, ceil(seqlen_q / block_q), max_blocks] of blocks of keys; dim_stride is from index to
    /// index. Indices past the count are not read.
    pub kv_indices: FmhaStrides,
    /// Counts of the list of fully visible blocks: every key in them is visible, within lengths and FmhaProblem.mask.
    pub full_kv_num_blocks: FmhaStrides,
    /// Indices of the list of full blocks, [.., full_max_blocks].
    pub full_kv_indices: FmhaStrides,
    /// Number of endpoints of a query, which is even; 0: no intervals.
    pub endpoints: i64,
    /// Number of heads that have intervals of their own: 1, num_heads_kv or num_heads_q; 0 without intervals.
    pub intervals_heads: i64,
    /// Number of heads that have bits of their own: 1, num_heads_kv or num_heads_q; 0: no bits.
    pub mask_bits_heads: i64,
    /// Number of heads that have lists of blocks of their own: 1 or num_heads_q; 0: no lists.
    pub lists_heads: i64,
    /// Number of queries of a block of the lists; 0 without lists.
    pub block_q: i64,
    /// Number of keys of a block of the lists; 0 without lists.
    pub block_k: i64,
    /// Capacity of a row of kv_indices.
    pub max_blocks: i64,
    /// Capacity of a row of full_kv_indices.
    pub full_max_blocks: i64,
    /// 1: kv_num_blocks and kv_indices are given; else 0.
    pub partial: i32,
    /// 1: full_kv_num_blocks and full_kv_indices are given; else 0.
    pub full: i32,
}

/// Scales by blocks of Q, K and V, which are stored in this format then; dtype_qk and dtype_v are the type of their
/// values, FMHA_BF16 or FMHA_F32, and descales the scales of whole tensors. NVFP4 tensors count pairs along their axis
/// of stride 1. Set everything to 0 first, then what is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaBlockScales {
    /// Size of this struct in bytes: sizeof(FmhaBlockScales).
    pub struct_bytes: u64,
    /// Q's scales [batch, seqlen_q, num_heads_q, ceil(head_dim_qk / block)], packed as Q: each scale is one byte.
    pub q: FmhaStrides,
    /// K's scales [batch, seqlen_k, num_heads_kv, ceil(head_dim_qk / block)], paged as K.
    pub k: FmhaStrides,
    /// V's scales [batch, ceil(seqlen_k / block), num_heads_kv, head_dim_v], paged [num_pages, page_size / block, ..].
    pub v: FmhaStrides,
    /// FMHA_MXFP8_E4M3, FMHA_MXFP8_E5M2 or FMHA_NVFP4.
    pub format: i32,
    /// Reserved: must be 0.
    pub reserved: i32,
}

/// A second cache of keys and values in the softmax of a call: a row's probabilities sum to 1 over the keys that it
/// sees of both. Types, heads and head dimensions are the problem's; FmhaProblem.mask applies to the keys of the first
/// cache alone. A row sees all keys of the second cache, or those that its lists or its intervals show. Set everything
/// to 0 first, then what is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaSecond {
    /// Size of this struct in bytes: sizeof(FmhaSecond).
    pub struct_bytes: u64,
    /// Number of keys of a sequence; packed or paged: of the longest sequence.
    pub seqlen_k: i64,
    /// Number of rows of a page; 0: K and V of the second cache are not paged.
    pub page_size: i64,
    /// K of the second cache, shaped as FmhaProblem.k.
    pub k: FmhaStrides,
    /// V of the second cache, shaped as FmhaProblem.v; not read with v_in_k.
    pub v: FmhaStrides,
    /// Lists of keys of the second cache, with lse_without_sink 0; null: no lists.
    pub lists: *const FmhaLists,
    /// Masks of the second cache, of which only intervals may be set; null: none.
    pub masks: *const FmhaMasks,
    /// 1: K and V of the second cache are packed, and sequences begin where FmhaSecondArgs.cu_seqlens_k says; else
    /// 0.
    pub packed_k: i32,
    /// 1: FmhaSecondArgs.seqused_k says how many keys of the second cache are in use for each sequence; 0: all.
    pub seqused_k: i32,
    /// 1: LSE is over the keys alone and excludes the sink; else 0.
    pub lse_without_sink: i32,
    /// Reserved: must be 0.
    pub reserved: i32,
}

/// Describes a call for `fmha_plan`: sizes, types, strides and options. Set everything to 0 first, then what is wanted.
/// Every pointer points to host memory, which is not read any more after the plan is made.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaProblem {
    /// sizeof(FmhaProblem). A library that was built with another size of this struct refuses the problem.
    pub struct_bytes: u64,
    /// Number of sequences.
    pub batch: i64,
    /// Number of queries of a sequence; packed: of the longest sequence.
    pub seqlen_q: i64,
    /// Number of keys of a sequence; packed: of the longest sequence.
    pub seqlen_k: i64,
    /// Number of query heads, a multiple of num_heads_kv.
    pub num_heads_q: i64,
    /// Number of key and value heads.
    pub num_heads_kv: i64,
    /// Number of elements of a row of Q and K.
    pub head_dim_qk: i64,
    /// Number of elements of a row of V and O.
    pub head_dim_v: i64,
    /// Number of rows of a page; 0: K and V are not paged.
    pub page_size: i64,
    /// Q [batch, seqlen_q, num_heads_q, head_dim_qk]; packed [total_q, num_heads_q, head_dim_qk].
    pub q: FmhaStrides,
    /// K [batch, seqlen_k, num_heads_kv, head_dim_qk]; packed [total_k, num_heads_kv, head_dim_qk]; paged
    /// [num_pages, page_size, num_heads_kv, head_dim_qk], batch_stride from page to page.
    pub k: FmhaStrides,
    /// V [batch, seqlen_k, num_heads_kv, head_dim_v]; packed and paged as K.
    pub v: FmhaStrides,
    /// O [batch, seqlen_q, num_heads_q, head_dim_v], or packed.
    pub o: FmhaStrides,
    /// Bias [batch, num_heads_q, seqlen_q, seqlen_k], added to the scores: seqlen_stride is from query to
    /// query, dim_stride (1) from key to key. A batch_stride of 0 is one bias for all sequences,
    /// a head_stride of 0 one for all heads. Read with FMHA_BIAS_ELEMENTWISE.
    pub bias: FmhaStrides,
    /// Text of the mask: "0" (none), "t", "b" (causal, top-left or bottom-right), "b:left,right" (window; -1:
    /// unbounded), "g:y,x" (generic coordinates); null: none.
    pub mask: *const c_char,
    /// Factor of Q K^T; null: 1 / sqrt(head_dim_qk). 0 is 0.
    pub softmax_scale: *const f32,
    /// Cap of the scores, softcap * tanh(score / softcap); null: none.
    pub softcap: *const f32,
    /// Gradients of a backward call; null: the call is a forward call.
    pub gradients: *const FmhaGradients,
    /// How the call updates and reads its KV cache; null: it only reads K and V.
    pub cache: *const FmhaCache,
    /// Position of the call in a whole of which it is a part; null: the call is the whole.
    pub part: *const FmhaPart,
    /// Score and mask functions; null: there are none.
    pub code: *const FmhaCode,
    /// Lists of keys; null: every query sees the keys of its sequence that the mask leaves visible.
    pub lists: *const FmhaLists,
    /// Masks as data (intervals, bits, lists of blocks); null: there are none.
    pub masks: *const FmhaMasks,
    /// Scales by blocks of Q, K and V; null: they have none.
    pub block_scales: *const FmhaBlockScales,
    /// A second cache of keys and values; null: there is only one.
    pub second: *const FmhaSecond,
    /// Probability that an element of P is dropped.
    pub p_drop: f32,
    /// Type of Q and K: FMHA_F16, ...
    pub dtype_qk: i32,
    /// Type of V: that of Q and K; with FP8 Q and K also FMHA_F16 or FMHA_BF16.
    pub dtype_v: i32,
    /// Type of O.
    pub dtype_o: i32,
    /// Type of the bias: FMHA_F32 or the inputs' 16-bit type; 0 without a bias.
    pub dtype_bias: i32,
    /// Storage order of V: FMHA_V_ROW_MAJOR or FMHA_V_COL_MAJOR.
    pub v_layout: i32,
    /// Kind of the bias: FMHA_BIAS_NONE, FMHA_BIAS_ELEMENTWISE, FMHA_BIAS_ALIBI or FMHA_BIAS_ALIBI_PER_BATCH.
    pub bias_kind: i32,
    /// 1: Q and O are packed, and sequences begin where cu_seqlens_q says; else 0.
    pub packed_q: i32,
    /// 1: K and V are packed, and sequences begin where cu_seqlens_k says; else 0.
    pub packed_k: i32,
    /// 1: seqused_q says how many queries of each sequence are in use; 0: all.
    pub seqused_q: i32,
    /// 1: seqused_k says how many keys of each sequence are in use; 0: all.
    pub seqused_k: i32,
    /// 1: each query head has a sink; else 0.
    pub sink: i32,
    /// Factor of FP8 Q: FMHA_DESCALE_NONE, FMHA_DESCALE_PER_KV_HEAD or FMHA_DESCALE_PER_TENSOR.
    pub descale_q: i32,
    /// Factor of FP8 K, as descale_q.
    pub descale_k: i32,
    /// Factor of FP8 V, as descale_q.
    pub descale_v: i32,
    /// 1: FP8 O is multiplied by scale_o before it is rounded; else 0.
    pub scale_o: i32,
    /// 1: LSE is written; else 0. Backward reads LSE in both cases.
    pub write_lse: i32,
    /// 1: the keep mask of dropout is written; else 0.
    pub write_keep_mask: i32,
    /// Forward: 1: row_max is written; else 0.
    pub row_max: i32,
    /// Forward: 1: head_max is written; else 0.
    pub head_max: i32,
    /// Forward: 1: key_sum is written; else 0.
    pub key_sum: i32,
    /// Reserved: must be 0.
    pub reserved: i32,
}

/// Values of a tensor or number that a score or mask function captures, for one run.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaCapturedArgs {
    /// Address of a tensor's first element; null for a number.
    pub data: *const c_void,
    /// Written: the dense gradient, in the tensor's shape, 0 at elements that no score read; null without
    /// write_grad.
    pub grad: *mut c_void,
    /// Value of a number that the text declares as an int.
    pub integer: i64,
    /// Value of a number that the text declares as a float.
    pub real: f32,
    /// Reserved: must be 0.
    pub reserved: i32,
}

/// The second cache of a run. Set everything to 0 first, then what FmhaSecond has.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaSecondArgs {
    /// Size of this struct in bytes: sizeof(FmhaSecondArgs).
    pub struct_bytes: u64,
    /// Read: K of the second cache.
    pub k: *const c_void,
    /// Read: V of the second cache. Null with v_in_k.
    pub v: *const c_void,
    /// Read: i32 [batch + 1], first row of each sequence of packed K and V.
    pub cu_seqlens_k: *const i32,
    /// Read: i32 [batch], number of keys of the second cache in use for each sequence.
    pub seqused_k: *const i32,
    /// Read: paged: i32 [batch, max_pages], the pages of each sequence.
    pub block_table: *const i32,
    /// Read: lists of keys of the second cache, in the form of FmhaArgs.indices.
    pub indices: *const i32,
    /// Read: number of entries in use of each list.
    pub topk_length: *const i32,
    /// Read: endpoints of the intervals of keys of the second cache, i32.
    pub intervals: *const i32,
    /// Packed: number of rows of K and V of the second cache, all sequences together; else 0.
    pub total_k: i64,
    /// Paged: number of pages of K and V of the second cache, used or not; else 0.
    pub num_pages: i64,
    /// Paged: entries of a row of the second cache's block_table, times page_size at least seqlen_k; else 0.
    pub max_pages: i64,
}

/// Arguments of a run: addresses, rows of packed and pages of paged tensors, the dropout generator, the stream. Set
/// everything to 0 first, then what the problem has. Pointers that the problem does not need are null; a tensor of 0
/// elements may be null too. Addresses point to a tensor's first element, in the memory of the plan's device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaArgs {
    /// sizeof(FmhaArgs). A library that was built with another size of this struct refuses the run.
    pub struct_bytes: u64,
    /// CUDA: a CUstream of the device's primary context; HIP: a hipStream_t; null: the default stream.
    pub stream: *mut c_void,
    /// Read: Q.
    pub q: *const c_void,
    /// Read: K; new rows are also written to it.
    pub k: *mut c_void,
    /// Read: V; new rows are also written to it. Null with v_in_k.
    pub v: *mut c_void,
    /// Written: O; backward reads it.
    pub o: *mut c_void,
    /// Read: the bias.
    pub bias: *const c_void,
    /// Written: LSE, f32 [batch, num_heads_q, seqlen_q], packed [num_heads_q, total_q]. Backward reads it.
    pub lse: *mut f32,
    /// Written: the dropout keep mask, [batch, num_heads_q, seqlen_q, seqlen_k] bytes. Backward neither reads nor
    /// writes it.
    pub keep_mask: *mut u8,
    /// Written: each row's greatest score, f32, shape of LSE: after scale, function, soft-cap and bias, of the keys
    /// that are seen, without the sink; -inf for a row that sees none.
    pub row_max: *mut f32,
    /// Written unless batch is 0: the greatest of each head's row maxima, f32 [num_heads_q].
    pub head_max: *mut f32,
    /// Written: each key's sum over the queries of its probability before dropout, f32 [batch, num_heads_q,
    /// seqlen_k], 0 for a key beyond its sequence.
    pub key_sum: *mut f32,
    /// Read: i32 [batch + 1], first row of each sequence of packed Q and O.
    pub cu_seqlens_q: *const i32,
    /// Read: i32 [batch + 1], first row of each sequence of packed K and V.
    pub cu_seqlens_k: *const i32,
    /// Read: i32 [batch], number of queries in use of each sequence.
    pub seqused_q: *const i32,
    /// Read: i32 [batch], number of keys in use of each sequence.
    pub seqused_k: *const i32,
    /// Read: paged: i32 [batch, max_pages], the pages of each sequence.
    pub block_table: *const i32,
    /// Read: ALiBi slopes, f32 [num_heads_q], or [batch, num_heads_q] with FMHA_BIAS_ALIBI_PER_BATCH.
    pub alibi_slopes: *const f32,
    /// Read: sinks, f32 [num_heads_q], in the softmax's denominator.
    pub sink: *const f32,
    /// Read: FP8 Q's factor, f32 [batch, num_heads_kv], or [1] with FMHA_DESCALE_PER_TENSOR.
    pub descale_q: *const f32,
    /// Read: FP8 K's factor, as descale_q.
    pub descale_k: *const f32,
    /// Read: FP8 V's factor, as descale_q.
    pub descale_v: *const f32,
    /// Read: scales of the rows of a cache's K, f32; written too if rows are appended (seqlen_new).
    pub k_scale: *mut f32,
    /// Read: scales of the rows of a cache's V, f32; written too if rows are appended (seqlen_new).
    pub v_scale: *mut f32,
    /// Read: the factor by which FP8 O is multiplied, f32 [1]. Backward does not read it.
    pub scale_o: *const f32,
    /// Read: gradient of O.
    pub dout: *const c_void,
    /// Written: gradient of Q.
    pub dq: *mut c_void,
    /// Written: gradient of K.
    pub dk: *mut c_void,
    /// Written: gradient of V.
    pub dv: *mut c_void,
    /// Written: gradient of the bias.
    pub dbias: *mut c_void,
    /// Read: gradient of LSE, f32, shape of LSE.
    pub dlse: *const f32,
    /// Written: gradient of the sinks, f32 [num_heads_q].
    pub dsink: *mut f32,
    /// Read: new keys.
    pub k_new: *const c_void,
    /// Read: new values.
    pub v_new: *const c_void,
    /// Read: i32 [batch + 1], first row of each sequence of packed k_new and v_new.
    pub cu_seqlens_new: *const i32,
    /// Read: cosines of the rotary embedding, [max_pos, rotary_dim / 2].
    pub rotary_cos: *const c_void,
    /// Read: sines of the rotary embedding, as rotary_cos.
    pub rotary_sin: *const c_void,
    /// Read: tree mask, u32 [batch, seqlen_q, ceil(seqlen_q / 32)], packed [total_q, ceil(seqlen_q / 32)]: bit n % 32
    /// of word n / 32 shows a query the n-th of the last seqlen_q keys.
    pub tree_mask: *const u32,
    /// Read: i32 [batch, seqlen_q, num_heads_kv, topk], packed [total_q, num_heads_kv, topk]: positions of the keys in
    /// the sequence. An entry below 0, or at or past seqlen_k, names no key.
    pub indices: *const i32,
    /// Read: number of entries in use of each list; entries past them are never read.
    pub topk_length: *const i32,
    /// Read: endpoints of the intervals, i32.
    pub intervals: *const i32,
    /// Read: 32-bit words of the mask as bits.
    pub mask_bits: *const u32,
    /// Read: number of blocks in each row of the list of blocks that other masks hide in part.
    pub kv_num_blocks: *const i32,
    /// Read: indices of the blocks that kv_num_blocks counts.
    pub kv_indices: *const i32,
    /// Read: number of blocks in each row of the list of fully visible blocks.
    pub full_kv_num_blocks: *const i32,
    /// Read: indices of the blocks that full_kv_num_blocks counts.
    pub full_kv_indices: *const i32,
    /// A mask object that has been built: the run uses its masks and reads no mask tensors here, which may be null.
    /// Null: the run reads the mask tensors, and makes its own lists of tiles.
    pub built: *const crate::FmhaMaskObject,
    /// Read: Q's scales by blocks.
    pub block_scale_q: *const u8,
    /// Read: K's scales by blocks.
    pub block_scale_k: *const u8,
    /// Read: V's scales by blocks.
    pub block_scale_v: *const u8,
    /// Arguments of the second cache, in host memory; null if there is none.
    pub second: *const FmhaSecondArgs,
    /// Values of captures, in host memory: FmhaCode.num_captured structs in the order of FmhaCode.captured; null if
    /// there are none.
    pub captured: *const FmhaCapturedArgs,
    /// Packed: number of rows of Q and O, all sequences together; else 0.
    pub total_q: i64,
    /// Packed: number of rows of K and V, all sequences together; else 0.
    pub total_k: i64,
    /// Packed: number of new rows, all sequences together; else 0.
    pub total_new: i64,
    /// Paged: number of pages of K and V, used or not; else 0.
    pub num_pages: i64,
    /// Paged: number of entries of a row of block_table; times page_size it is at least seqlen_k; else 0.
    pub max_pages: i64,
    /// Scratch of the run, aligned to 256 bytes, if the plan was made with caller_workspace; else null. Its contents
    /// have no meaning before and after the run, and no other run may use it until the work is done.
    pub workspace: *mut c_void,
    /// Number of bytes at workspace: at least fmha_plan_workspace_bytes of the plan; 0 if workspace is null.
    pub workspace_bytes: u64,
    /// Key of the dropout generator, used if dropout_seeded is 1.
    pub dropout_seed: u64,
    /// Last 64-bit word of the counter of the dropout generator.
    pub dropout_offset: u64,
    /// 1: dropout_seed and dropout_offset give the position of the generator, which every run with p_drop above 0
    /// needs; else 0.
    pub dropout_seeded: i32,
    /// Reserved: must be 0.
    pub reserved: i32,
}

/// Describes a merge for `fmha_plan_combine`: partial results over the same rows are merged by their LSE, or added.
/// Packed rows are a batch of 1. Set everything to 0 first, then what is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaCombineProblem {
    /// Size of this struct in bytes: sizeof(FmhaCombineProblem).
    pub struct_bytes: u64,
    /// Number of parts, at least 1 with FMHA_BY_LSE. With 0 parts FMHA_SUM sets O to 0, and FMHA_ADD_TO keeps O.
    pub num_parts: i64,
    /// Number of sequences.
    pub batch: i64,
    /// Number of rows of each sequence.
    pub seqlen_q: i64,
    /// Number of heads.
    pub num_heads_q: i64,
    /// Number of elements of a row.
    pub head_dim_v: i64,
    /// O of every part [batch, seqlen_q, num_heads_q, head_dim_v].
    pub part: FmhaStrides,
    /// The combined O, in the shape of each part.
    pub o: FmhaStrides,
    /// Type of the parts: FMHA_F32, FMHA_F16 or FMHA_BF16.
    pub dtype_part: i32,
    /// Type of the combined O: FMHA_F32, FMHA_F16 or FMHA_BF16.
    pub dtype_o: i32,
    /// How partial results are merged: FMHA_BY_LSE, FMHA_SUM or FMHA_ADD_TO.
    pub merge: i32,
    /// 1: the combined LSE is written; else 0. It must be 0 if parts are added.
    pub write_lse: i32,
}

/// O and LSE of one part of the keys.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaPartial {
    /// O of this part.
    pub o: *const c_void,
    /// LSE of this part, f32 [batch, num_heads_q, seqlen_q]; not read, and may be null, where parts are added.
    pub lse: *const f32,
}

/// Arguments of a run of a merge. Addresses are those of a first element, in the memory of the plan's device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaCombineArgs {
    /// Size of this struct in bytes: sizeof(FmhaCombineArgs).
    pub struct_bytes: u64,
    /// Stream of the run, as in FmhaArgs.
    pub stream: *mut c_void,
    /// The parts, num_parts structs in host memory; null if there are none.
    pub parts: *const FmhaPartial,
    /// The combined O: written; with FMHA_ADD_TO read first.
    pub o: *mut c_void,
    /// Written: the combined LSE, f32 [batch, num_heads_q, seqlen_q].
    pub lse: *mut f32,
}

/// Describes a choice of keys or blocks for `fmha_plan_choose`: scores are those of an indexer, sum_h relu(q_h . k)
/// w_h, or given. Of each row the topk greatest are chosen (ties: the lower position; NaN last) and written in
/// ascending position, followed by -1. Tensors are contiguous, except k and its scales. Set everything to 0 first, then
/// what is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaChooseProblem {
    /// Size of this struct in bytes: sizeof(FmhaChooseProblem).
    pub struct_bytes: u64,
    /// Number of sequences.
    pub batch: i64,
    /// Number of queries of a sequence.
    pub seqlen_q: i64,
    /// Number of keys of a sequence; for sums of given probabilities, number of compressed blocks.
    pub seqlen_k: i64,
    /// Number of entries of each list of chosen keys; 0: only scores are written.
    pub topk: i64,
    /// Number of heads of q; 0: the caller gives the scores.
    pub num_heads: i64,
    /// Number of elements of a row of q and k; 0 if the caller gives the scores.
    pub head_dim: i64,
    /// Number of keys of a page; 0: k is not paged.
    pub page_size: i64,
    /// Number of pages of k, used or not; 0: k is not paged.
    pub num_pages: i64,
    /// Number of entries of a row of block_table; 0: k is not paged.
    pub max_pages: i64,
    /// Stride of k from a sequence or page to the next, elements; with k_key_stride 0: k is dense.
    pub k_outer_stride: i64,
    /// Stride of k from a key to the next.
    pub k_key_stride: i64,
    /// Stride of k_scale from a sequence or page to the next, elements; with scale_key_stride 0: it is dense.
    pub scale_outer_stride: i64,
    /// Stride of k_scale from a key to the next.
    pub scale_key_stride: i64,
    /// Number of keys of a block, whose score is the greatest of its candidates; 0: keys are chosen, or blocks by sums.
    pub block: i64,
    /// Tokens of a compressed block, whose probabilities are given and are summed for each block (NSA's l); 0: none.
    pub compressed: i64,
    /// Tokens from a compressed block to the next (NSA's d).
    pub stride: i64,
    /// Tokens of each block that may be chosen, if a block's score is a sum (NSA's l').
    pub selected: i64,
    /// Number of blocks that may be chosen, if a block's score is a sum.
    pub num_blocks: i64,
    /// Number of first blocks that are always chosen, whatever their scores.
    pub first_blocks: i64,
    /// Number of last blocks that are always chosen, whatever their scores.
    pub last_blocks: i64,
    /// Type of q: FMHA_F32, ...; 0 where the caller gives the scores.
    pub dtype_q: i32,
    /// Type of k: FMHA_F32, ...; 0 where the caller gives the scores.
    pub dtype_k: i32,
    /// Kind of the candidates: FMHA_CAUSAL_KEYS, FMHA_ALL_KEYS or FMHA_RANGES_OF_KEYS.
    pub candidates: i32,
    /// 1: each key has a scale; else 0.
    pub k_scale: i32,
    /// 1: seqused_k says how many keys of each sequence are in use; 0: all.
    pub seqused_k: i32,
    /// 1: the scores among which the greatest are chosen are written; else 0.
    pub write_scores: i32,
}

/// Arguments of a run of a choice. Set everything to 0 first, then what the problem has. Addresses are those of a first
/// element, in the memory of the plan's device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaChooseArgs {
    /// Size of this struct in bytes: sizeof(FmhaChooseArgs).
    pub struct_bytes: u64,
    /// Stream of the run, as in FmhaArgs.
    pub stream: *mut c_void,
    /// Read: q of the indexer, [batch, seqlen_q, num_heads, head_dim].
    pub q: *const c_void,
    /// Read: k of the indexer, [batch, seqlen_k, head_dim], paged [num_pages, page_size, head_dim].
    pub k: *const c_void,
    /// Read: weights of heads, f32 [batch, seqlen_q, num_heads].
    pub weights: *const f32,
    /// Read: scales of keys, f32 [batch, seqlen_k], paged [num_pages, page_size].
    pub k_scale: *const f32,
    /// Read: paged: i32 [batch, max_pages], the pages of each sequence.
    pub block_table: *const i32,
    /// Read: scores that the caller gives, f32 [batch, seqlen_q, seqlen_k].
    pub given: *const f32,
    /// Read: i32 [batch], keys in use of each sequence.
    pub seqused_k: *const i32,
    /// Read: first candidate of each query, i32 [batch, seqlen_q], with FMHA_RANGES_OF_KEYS.
    pub first: *const i32,
    /// Read: one past the last candidate of each query, i32 [batch, seqlen_q], with FMHA_RANGES_OF_KEYS.
    pub end: *const i32,
    /// Written: list of each query's chosen keys or blocks, i32 [batch, seqlen_q, topk].
    pub indices: *mut i32,
    /// Written: the scores that are chosen among, f32 [batch, seqlen_q, keys or blocks], -inf where there is no
    /// candidate.
    pub scores: *mut f32,
    /// Scratch of the run, as in FmhaArgs.
    pub workspace: *mut c_void,
    /// Bytes at workspace, as in FmhaArgs.
    pub workspace_bytes: u64,
}

/// The loss that trains an indexer, and its gradients: for each query the KL divergence of the softmax of its list's
/// scores, sum_h relu(q_h . k) w_h, from a target, which is divided by its sum and has no gradient. All tensors are
/// contiguous, in memory of the device. Set everything to 0 first, then what is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaIndexLoss {
    /// Size of this struct in bytes: sizeof(FmhaIndexLoss).
    pub struct_bytes: u64,
    /// Number of sequences.
    pub batch: i64,
    /// Number of queries of a sequence.
    pub seqlen_q: i64,
    /// Number of keys of a sequence.
    pub seqlen_k: i64,
    /// Number of entries of each list.
    pub topk: i64,
    /// Number of heads of q.
    pub num_heads: i64,
    /// Number of elements of a row of q and k.
    pub head_dim: i64,
    /// Read: [batch, seqlen_q, num_heads, head_dim].
    pub q: *const c_void,
    /// Read: k, [batch, seqlen_k, head_dim].
    pub k: *const c_void,
    /// Read: weights of heads, f32 [batch, seqlen_q, num_heads].
    pub weights: *const f32,
    /// Read: lists of keys, i32 [batch, seqlen_q, topk], as positions. An entry below 0, or at or past seqlen_k, names
    /// no key.
    pub indices: *const i32,
    /// Read: target, f32 [batch, seqlen_q, topk]: attention's probabilities of the listed keys, summed over heads.
    pub target: *const f32,
    /// Read: factors of each query's gradients, f32 [batch, seqlen_q]; null: 1.
    pub dloss: *const f32,
    /// Written: loss of each query, f32 [batch, seqlen_q]; 0 for a query without keys, or whose target sums to 0; null:
    /// not wanted.
    pub loss: *mut f32,
    /// Written: gradient of q, f32 in its shape; null: not wanted.
    pub dq: *mut f32,
    /// Written: gradient of k, f32 in its shape; null: not wanted.
    pub dk: *mut f32,
    /// Written: gradient of the weights, f32 in their shape; null: not wanted.
    pub dweights: *mut f32,
    /// Type of q: FMHA_F32, FMHA_F16 or FMHA_BF16.
    pub dtype_q: i32,
    /// Type of k: FMHA_F32, FMHA_F16 or FMHA_BF16.
    pub dtype_k: i32,
    /// 1: sums have one order, and a second run gives equal bits. 0: on NVIDIA's GPUs dk is added to in no order.
    pub deterministic: i32,
    /// 1: a slow kernel may serve where no other takes the call.
    pub allow_fallback: i32,
    /// Stream of the run, as in FmhaArgs.
    pub stream: *mut c_void,
    /// Scratch, aligned to 256 bytes; null where fmha_index_loss_workspace says 0.
    pub workspace: *mut c_void,
    /// Bytes of the scratch: at least what fmha_index_loss_workspace says.
    pub workspace_bytes: u64,
}

/// Describes a conversion for `fmha_plan_quantize`: of a tensor [batch, seqlen, num_heads, dim] to elements and scales
/// by blocks (CONTRACT.md, "Scales by blocks"). Pages count as sequences; packed rows are one sequence. Set everything
/// to 0 first, then what is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaQuantizeProblem {
    /// Size of this struct in bytes: sizeof(FmhaQuantizeProblem).
    pub struct_bytes: u64,
    /// Number of sequences.
    pub batch: i64,
    /// Number of rows of a sequence.
    pub seqlen: i64,
    /// Number of heads.
    pub num_heads: i64,
    /// Number of elements of a row.
    pub dim: i64,
    /// Strides of the tensor, in elements.
    pub x: FmhaStrides,
    /// Strides of the stored elements, in bytes; for FMHA_NVFP4 their shape is [batch, seqlen, num_heads, ceil(dim /
    /// 2)], with pairs_of_rows [batch, ceil(seqlen / 2), num_heads, dim].
    pub elements: FmhaStrides,
    /// Strides of the scales, in bytes; their shape is [batch, seqlen, num_heads, ceil(dim / block)], with
    /// blocks_of_rows [batch, ceil(seqlen / block), num_heads, dim].
    pub scales: FmhaStrides,
    /// Type of the tensor: FMHA_F32, FMHA_F16 or FMHA_BF16.
    pub dtype: i32,
    /// FMHA_MXFP8_E4M3, FMHA_MXFP8_E5M2 or FMHA_NVFP4.
    pub format: i32,
    /// 1: a block is some rows, as for V; 0: a block is some elements of a row, as for Q and K.
    pub blocks_of_rows: i32,
    /// 1: rows lie one after another, and two of FMHA_NVFP4 share a byte, as in FMHA_V_COL_MAJOR; else 0.
    pub pairs_of_rows: i32,
    /// Source of the tensor's scale: FMHA_SCALE_ONE, or with FMHA_NVFP4 alone FMHA_SCALE_GIVEN or FMHA_SCALE_WRITTEN.
    pub scale_of_tensor: i32,
    /// Reserved: must be 0.
    pub reserved: i32,
}

/// Arguments of a run of a conversion. Set everything to 0 first, then what the problem has. Addresses are those of a
/// first element, in the memory of the plan's device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaQuantizeArgs {
    /// Size of this struct in bytes: sizeof(FmhaQuantizeArgs).
    pub struct_bytes: u64,
    /// Stream of the run, as in FmhaArgs.
    pub stream: *mut c_void,
    /// Read: the tensor to convert.
    pub x: *const c_void,
    /// Written: the stored elements of the tensor.
    pub elements: *mut u8,
    /// Written: the scales of the tensor's blocks.
    pub scales: *mut u8,
    /// Read: the tensor's scale, f32 [1], with FMHA_SCALE_GIVEN. A scale that is not positive and finite makes every
    /// block's scale NaN.
    pub tensor_scale: *const f32,
    /// Written: the tensor's scale, f32 [1], with FMHA_SCALE_WRITTEN.
    pub written_scale: *mut f32,
    /// Scratch of the run, as in FmhaArgs.
    pub workspace: *mut c_void,
    /// Bytes at workspace, as in FmhaArgs.
    pub workspace_bytes: u64,
}

/// Options for the choice of a kernel. A null pointer to it means the same as 0 in every field: the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaOptions {
    /// Size of this struct in bytes: sizeof(FmhaOptions).
    pub struct_bytes: u64,
    /// Name of the kernel to use, or to be refused; null: the backend's choice.
    pub kernel: *const c_char,
    /// Fields of the kernel's tile, honoured or refused: "block_m=128,stages=3"; null: the kernel's own choice.
    pub tile: *const c_char,
    /// 1: a kernel that is correct but slow may be used if no fast kernel supports the problem; 0: the plan is refused
    /// instead.
    pub allow_fallback: i32,
    /// How the running maximum is kept: FMHA_FAST or FMHA_EXACT.
    pub accuracy: i32,
    /// 1: every run gives the same bits, or the plan is refused. Forward and combine always do.
    pub deterministic: i32,
    /// 1: the bits of a sequence's results depend on its own lengths and contents alone, or the plan is refused.
    pub batch_invariant: i32,
    /// 1: each run reads the lengths back, waits for them, and refuses offsets that decrease or leave their tensor. 0:
    /// such offsets give wrong outputs, but access nothing outside the tensors.
    pub check_lengths: i32,
    /// 1: the plan allocates no scratch memory, and each run passes its own in FmhaArgs.workspace; runs of one plan may
    /// then overlap in time. 0: the plan has scratch of its own, and runs on one stream at a time.
    pub caller_workspace: i32,
    /// 1: the bits of a query row's results depend on that row and the keys that it sees alone, in training,
    /// prefill and decoding, or the plan is refused.
    pub row_invariant: i32,
    /// Reserved: must be 0.
    pub reserved: i32,
}
