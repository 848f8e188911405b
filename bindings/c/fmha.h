#ifndef FMHA_H
#define FMHA_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// Element type IEEE binary16.
#define FMHA_F16 0

// Element type bfloat16.
#define FMHA_BF16 1

// Element type OCP FP8 E4M3.
#define FMHA_E4M3FN 2

// Element type OCP FP8 E5M2.
#define FMHA_E5M2 3

// Element type FP8 E4M3 FNUZ.
#define FMHA_E4M3FNUZ 4

// Element type FP8 E5M2 FNUZ.
#define FMHA_E5M2FNUZ 5

// Element type IEEE binary32.
#define FMHA_F32 6

// V as [.., seqlen_k, head_dim_v], dim_stride 1.
#define FMHA_V_ROW_MAJOR 0

// V as [.., head_dim_v, seqlen_k], seqlen_stride 1.
#define FMHA_V_COL_MAJOR 1

// The running maximum of a row may lag by a bounded factor: the default.
#define FMHA_FAST 0

// The true running maximum is subtracted; a kernel that cannot do so refuses.
#define FMHA_EXACT 1

// Partial results are weighted by their LSE: the default.
#define FMHA_BY_LSE 0

// Partial results are added without weights, in f32 and in their order, and the sum is rounded once: for partial
// gradients.
#define FMHA_SUM 1

// As FMHA_SUM, with the values that O already holds as the first term.
#define FMHA_ADD_TO 2

// Keys up to a query's own position are candidates, with the last query at the position of the last key: the
// default.
#define FMHA_CAUSAL_KEYS 0

// All keys are candidates.
#define FMHA_ALL_KEYS 1

// Keys from `first` to `end` of each query are candidates.
#define FMHA_RANGES_OF_KEYS 2

// Format MXFP8 with E4M3 elements: an E8M0 scale for each 32.
#define FMHA_MXFP8_E4M3 1

// Format MXFP8 with E5M2 elements: an E8M0 scale for each 32.
#define FMHA_MXFP8_E5M2 2

// Format NVFP4: E2M1 elements in pairs, an E4M3 scale for each 16.
#define FMHA_NVFP4 3

// The scale of a tensor is 1, which is not in memory: the default.
#define FMHA_SCALE_ONE 0

// The caller gives the scale of the whole tensor.
#define FMHA_SCALE_GIVEN 1

// The scale of a tensor is written: its largest magnitude / 2688.
#define FMHA_SCALE_WRITTEN 2

// A call without a bias.
#define FMHA_BIAS_NONE 0

// An elementwise bias [batch, num_heads_q, seqlen_q, seqlen_k].
#define FMHA_BIAS_ELEMENTWISE 1

// An ALiBi bias with slopes [num_heads_q].
#define FMHA_BIAS_ALIBI 2

// An ALiBi bias with slopes [batch, num_heads_q].
#define FMHA_BIAS_ALIBI_PER_BATCH 3

// An FP8 tensor without a factor, as if the factor were 1.
#define FMHA_DESCALE_NONE 0

// One factor for each sequence and kv head, f32 [batch, num_heads_kv].
#define FMHA_DESCALE_PER_KV_HEAD 1

// One factor for the whole tensor, f32 [1].
#define FMHA_DESCALE_PER_TENSOR 2

// Every list has topk entries.
#define FMHA_LENGTH_WHOLE 0

// A length for each sequence, i32 [batch].
#define FMHA_LENGTH_PER_SEQUENCE 1

// A length for each token, i32 [batch, seqlen_q], packed [total_q].
#define FMHA_LENGTH_PER_TOKEN 2

// Most axes of a tensor that a score or mask function captures.
#define FMHA_MAX_RANK 5

// Ranks of processes that compute on host memory.
#define FMHA_HOST 0

// Ranks that are GPUs, over NCCL or RCCL.
#define FMHA_NCCL 1

// One run of rows for each rank, in the order of the ranks, lengths that differ by 1 at most.
#define FMHA_CONTIGUOUS 0

// The rows are cut into twice as many runs as there are ranks. Rank r has the r-th run and the r-th from the end:
// equal work under a causal mask.
#define FMHA_ZIG_ZAG 1

// Every rank has all rows: the queries of a step of decoding.
#define FMHA_REPLICATED 2

// Each rank has the runs of rows that the call lists.
#define FMHA_RUNS 3

// Memory of a device, for callers who have none of their own.
typedef struct FmhaBuffer FmhaBuffer;

// The plan of a call over ranks, as one rank holds it.
typedef struct FmhaDistPlan FmhaDistPlan;

// Ranks that compute together.
typedef struct FmhaGroup FmhaGroup;

// A mask object behind the C pointer.
typedef struct FmhaMaskObject FmhaMaskObject;

// A chosen and loaded kernel with its scratch memory, on the device for which it was planned.
typedef struct FmhaPlan FmhaPlan;

// Strides of a tensor, in elements. They may differ from any contiguous order; 0 is legal for an input's
// batch and head.
typedef struct FmhaStrides {
  // Stride from sequence to sequence; packed: not used.
  int64_t batch_stride;
  // Stride from row to row.
  int64_t seqlen_stride;
  // Stride from head to head.
  int64_t head_stride;
  // Stride from one element of a row to the next: 1, except for a column-major V.
  int64_t dim_stride;
} FmhaStrides;

// The gradients of a call, for backward. Set everything to 0 first, then what is wanted.
typedef struct FmhaGradients {
  // Size of this struct in bytes: sizeof(FmhaGradients).
  uint64_t struct_bytes;
  // Gradient of O, shape and type of O.
  struct FmhaStrides dout;
  // Gradient of Q, shape of Q.
  struct FmhaStrides dq;
  // Gradient of K, shape of K.
  struct FmhaStrides dk;
  // Gradient of V, in the shape of V; row-major, whatever the layout of V.
  struct FmhaStrides dv;
  // Gradient of the bias, in its shape. It is summed over the axes along which the bias has stride 0; its own
  // stride is 0 there too.
  struct FmhaStrides dbias;
  // Type of dq, dk and dv: FMHA_F32, FMHA_F16 or FMHA_BF16.
  int32_t dtype_grad;
  // Type of dbias: FMHA_F32, FMHA_F16 or FMHA_BF16; 0 where there is none.
  int32_t dtype_dbias;
  // 1: dbias is written; else 0.
  int32_t write_dbias;
  // 1: dsink is written; else 0.
  int32_t write_dsink;
  // 1: LSE has a gradient, which is read; else 0.
  int32_t has_dlse;
  // Reserved: must be 0.
  int32_t reserved;
} FmhaGradients;

// Use of a KV cache beside reading it: append, rotary embedding, quantised types, tree mask. Set everything
// to 0 first, then the fields that you use.
typedef struct FmhaCache {
  // Size of this struct in bytes: sizeof(FmhaCache).
  uint64_t struct_bytes;
  // Number of new rows of a sequence, which are written to K and V from row seqused_k[b] on before attention reads
  // them; packed: of the longest sequence; 0: none.
  int64_t seqlen_new;
  // Number of rows of rotary_cos and rotary_sin; 0: no rotary embedding.
  int64_t max_pos;
  // New keys [batch, seqlen_new, num_heads_kv, head_dim_qk]; packed [total_new, num_heads_kv, head_dim_qk].
  struct FmhaStrides k_new;
  // New values [batch, seqlen_new, num_heads_kv, head_dim_v], or packed; none with v_in_k.
  struct FmhaStrides v_new;
  // Scales of K, f32 [batch, ceil(seqlen_k / scale_block), num_heads_kv]; packed [total_k, num_heads_kv]; paged
  // [num_pages, page_size / scale_block, num_heads_kv]; seqlen_stride is from scale to scale. Not read where
  // scale_block is 0.
  struct FmhaStrides k_scale;
  // Scales of V, as k_scale.
  struct FmhaStrides v_scale;
  // Number of rows that share a scale, with dtype_cache; 1: each token and head has a scale; 0: rows have no scales.
  int64_t scale_block;
  // 1: new rows are packed, and begin where FmhaArgs.cu_seqlens_new says; else 0.
  int32_t packed_new;
  // 1: a tree mask is used in place of the mask "b"; else 0.
  int32_t tree_mask;
  // Number of leading elements of each row of Q and k_new that are rotated: even, at most head_dim_qk; 0: none.
  int32_t rotary_dim;
  // 1: elements 2i and 2i + 1 are rotated as a pair; 0: elements i and i + rotary_dim / 2.
  int32_t rotary_interleaved;
  // Type of rotary_cos and rotary_sin: FMHA_F32, or dtype_qk; 0 where there are none.
  int32_t dtype_rotary;
  // FP8 type in which K and V are stored while Q has a 16-bit type: FMHA_E4M3FN, ...; 0: K and V have the types
  // dtype_qk and dtype_v.
  int32_t dtype_cache;
  // 1: V is the first head_dim_v elements of K's rows, and has no address of its own; else 0.
  int32_t v_in_k;
  // 656 or 584: K's rows are bytes in pages, with v_in_k and dtype_qk bf16, strides in bytes: E4M3 values with their
  // scales, and 64 elements in bf16, as FlashMLA has them; new rows come in bf16 and are quantised; 0: rows of
  // elements.
  int32_t cache_rows;
} FmhaCache;

// Position of a call in a larger whole of which it is a part: its first query, key, sequence and head. Mask, ALiBi and
// dropout use positions of the whole, so a part has the same results as inside the whole. The bias and the keep mask
// cover only the call.
typedef struct FmhaPart {
  // Size of this struct in bytes: sizeof(FmhaPart).
  uint64_t struct_bytes;
  // Position in the whole of the call's first query; one number for all sequences.
  int64_t position_q;
  // Position in the whole of the call's first key; one number for all sequences.
  int64_t position_k;
  // Number of queries of each whole sequence, for the diagonal of a bottom-right mask; with 0 (and seqlen_k 0) the
  // whole ends where the part ends.
  int64_t seqlen_q;
  // Number of keys of each whole sequence, as seqlen_q is that of its queries.
  int64_t seqlen_k;
  // Index of the first sequence, for dropout.
  int64_t batch;
  // Index of the first query head, for dropout.
  int64_t head;
  // Number of query heads of the whole, for dropout; 0: as many as the call has.
  int64_t num_heads_q;
} FmhaPart;

// A tensor or a number that a score or a mask captures. The declaration of its name in the text says which of the two
// it is, and the type of its elements: "slopes: f32[_]; cap: float; s + cap * slopes[h]". For a number, only the name
// is set.
typedef struct FmhaCaptured {
  // Name of the tensor or number in the texts, in host memory.
  const char *name;
  // Extents of a tensor: the first num_dims of them are used, each 1 or more.
  int64_t shape[FMHA_MAX_RANK];
  // Stride of each axis in elements, 0 or more.
  int64_t strides[FMHA_MAX_RANK];
  // Number of a tensor's axes, 0 to FMHA_MAX_RANK; 0 for a number.
  int32_t num_dims;
  // Type of the gradient: FMHA_F32, FMHA_F16 or FMHA_BF16; 0 where there is none.
  int32_t dtype_grad;
  // 1: in a backward call, the gradient of a captured float tensor is written; else 0.
  int32_t write_grad;
  // Reserved: must be 0.
  int32_t reserved;
} FmhaCaptured;

// A score and a mask as code: text of a small language over s (the scaled score), b (sequence), h (query
// head), q and k (the places of row and key in their sequence, from 0), seqlen_q and seqlen_k, and over what
// is captured by name. Operators are Python's; functions: abs sign floor ceil round exp exp2 log log2 sin
// cos tanh erf sigmoid relu sqrt rsqrt min max pow clamp select, and the casts float int bool.
typedef struct FmhaCode {
  // Size of this struct in bytes: sizeof(FmhaCode).
  uint64_t struct_bytes;
  // Host memory: an expression that replaces the scaled score, before soft-cap and bias: "s + 0.5 * (k - q)";
  // null: the score is unchanged.
  const char *score;
  // Host memory: a condition for which (query, key) pairs are visible, besides what FmhaProblem.mask hides: "k
  // <= q or k < 4"; null: all.
  const char *mask;
  // Host memory: num_captured tensors or numbers, each name once; null where there are none. A name that no text
  // reads is refused.
  const struct FmhaCaptured *captured;
  // Number of captured tensors and numbers.
  int64_t num_captured;
} FmhaCode;

// Lists of keys in place of all keys, for models that are trained sparse: a query token sees the keys that its list
// names, for each kv head, and no others. A key that a list names twice counts twice. Set everything to 0 first.
typedef struct FmhaLists {
  // Size of this struct in bytes: sizeof(FmhaLists).
  uint64_t struct_bytes;
  // Number of entries of each token's list of keys.
  int64_t topk;
  // Stride of the indices from one sequence to the next; packed: not used.
  int64_t batch_stride;
  // Stride from one token's list to the next.
  int64_t seqlen_stride;
  // Stride from one kv head's list to the next; 0: one list for all.
  int64_t head_stride;
  // FMHA_LENGTH_WHOLE, FMHA_LENGTH_PER_SEQUENCE or FMHA_LENGTH_PER_TOKEN.
  int32_t length;
  // 1: list entries are addresses page * page_size + offset in the pages of K and V, and there is no
  // block_table; else 0.
  int32_t addresses;
  // Number of keys of an entry: entry e stands for keys e * block up to (e + 1) * block; 0 or 1: one key.
  int32_t block;
  // 1: LSE is over the keys alone and excludes the sink; else 0.
  int32_t lse_without_sink;
} FmhaLists;

// Masks as data: which keys a query sees besides those that FmhaProblem.mask and a mask as code hide. A
// batch_stride of 0 is one mask for all sequences; packed intervals and bits have no batch axis. Set everything
// to 0 first, then what is wanted.
typedef struct FmhaMasks {
  // Size of this struct in bytes: sizeof(FmhaMasks).
  uint64_t struct_bytes;
  // Endpoints F [batch or 1, heads, endpoints, seqlen_q], packed [heads, endpoints, total_q]:
  // seqlen_stride is from query to query, dim_stride from endpoint to endpoint. With E(-1) = 0 and E(m) =
  // min(max(F(m), E(m - 1)), seqlen_k) a query sees key j iff E(2p) <= j < E(2p + 1) for some p.
  struct FmhaStrides intervals;
  // Words [batch or 1, heads, seqlen_q, ceil(seqlen_k / 32)], packed [heads, total_q, ceil(seqlen_k /
  // 32)]: bit j % 32 of word j / 32, from the least, is 1 where key j is seen.
  struct FmhaStrides mask_bits;
  // Counts [batch or 1, heads, ceil(seqlen_q / block_q)] of the list of partly visible blocks, in which the other
  // masks decide; seqlen_stride is from one block to the next.
  struct FmhaStrides kv_num_blocks;
  // Indices [batch or 1, heads, ceil(seqlen_q / block_q), max_blocks] of blocks of keys; dim_stride is from index to
  // index. Indices past the count are not read.
  struct FmhaStrides kv_indices;
  // Counts of the list of fully visible blocks: every key in them is visible, within lengths and FmhaProblem.mask.
  struct FmhaStrides full_kv_num_blocks;
  // Indices of the list of full blocks, [.., full_max_blocks].
  struct FmhaStrides full_kv_indices;
  // Number of endpoints of a query, which is even; 0: no intervals.
  int64_t endpoints;
  // Number of heads that have intervals of their own: 1, num_heads_kv or num_heads_q; 0 without intervals.
  int64_t intervals_heads;
  // Number of heads that have bits of their own: 1, num_heads_kv or num_heads_q; 0: no bits.
  int64_t mask_bits_heads;
  // Number of heads that have lists of blocks of their own: 1 or num_heads_q; 0: no lists.
  int64_t lists_heads;
  // Number of queries of a block of the lists; 0 without lists.
  int64_t block_q;
  // Number of keys of a block of the lists; 0 without lists.
  int64_t block_k;
  // Capacity of a row of kv_indices.
  int64_t max_blocks;
  // Capacity of a row of full_kv_indices.
  int64_t full_max_blocks;
  // 1: kv_num_blocks and kv_indices are given; else 0.
  int32_t partial;
  // 1: full_kv_num_blocks and full_kv_indices are given; else 0.
  int32_t full;
} FmhaMasks;

// Scales by blocks of Q, K and V, which are stored in this format then; dtype_qk and dtype_v are the type of their
// values, FMHA_BF16 or FMHA_F32, and descales the scales of whole tensors. NVFP4 tensors count pairs along their axis
// of stride 1. Set everything to 0 first, then what is wanted.
typedef struct FmhaBlockScales {
  // Size of this struct in bytes: sizeof(FmhaBlockScales).
  uint64_t struct_bytes;
  // Q's scales [batch, seqlen_q, num_heads_q, ceil(head_dim_qk / block)], packed as Q: each scale is one byte.
  struct FmhaStrides q;
  // K's scales [batch, seqlen_k, num_heads_kv, ceil(head_dim_qk / block)], paged as K.
  struct FmhaStrides k;
  // V's scales [batch, ceil(seqlen_k / block), num_heads_kv, head_dim_v], paged [num_pages, page_size / block, ..].
  struct FmhaStrides v;
  // FMHA_MXFP8_E4M3, FMHA_MXFP8_E5M2 or FMHA_NVFP4.
  int32_t format;
  // Reserved: must be 0.
  int32_t reserved;
} FmhaBlockScales;

// A second cache of keys and values in the softmax of a call: a row's probabilities sum to 1 over the keys that it
// sees of both. Types, heads and head dimensions are the problem's; FmhaProblem.mask applies to the keys of the first
// cache alone. A row sees all keys of the second cache, or those that its lists or its intervals show. Set everything
// to 0 first, then what is wanted.
typedef struct FmhaSecond {
  // Size of this struct in bytes: sizeof(FmhaSecond).
  uint64_t struct_bytes;
  // Number of keys of a sequence; packed or paged: of the longest sequence.
  int64_t seqlen_k;
  // Number of rows of a page; 0: K and V of the second cache are not paged.
  int64_t page_size;
  // K of the second cache, shaped as FmhaProblem.k.
  struct FmhaStrides k;
  // V of the second cache, shaped as FmhaProblem.v; not read with v_in_k.
  struct FmhaStrides v;
  // Lists of keys of the second cache, with lse_without_sink 0; null: no lists.
  const struct FmhaLists *lists;
  // Masks of the second cache, of which only intervals may be set; null: none.
  const struct FmhaMasks *masks;
  // 1: K and V of the second cache are packed, and sequences begin where FmhaSecondArgs.cu_seqlens_k says; else
  // 0.
  int32_t packed_k;
  // 1: FmhaSecondArgs.seqused_k says how many keys of the second cache are in use for each sequence; 0: all.
  int32_t seqused_k;
  // 1: LSE is over the keys alone and excludes the sink; else 0.
  int32_t lse_without_sink;
  // Reserved: must be 0.
  int32_t reserved;
} FmhaSecond;

// Describes a call for `fmha_plan`: sizes, types, strides and options. Set everything to 0 first, then what is wanted.
// Every pointer points to host memory, which is not read any more after the plan is made.
typedef struct FmhaProblem {
  // sizeof(FmhaProblem). A library that was built with another size of this struct refuses the problem.
  uint64_t struct_bytes;
  // Number of sequences.
  int64_t batch;
  // Number of queries of a sequence; packed: of the longest sequence.
  int64_t seqlen_q;
  // Number of keys of a sequence; packed: of the longest sequence.
  int64_t seqlen_k;
  // Number of query heads, a multiple of num_heads_kv.
  int64_t num_heads_q;
  // Number of key and value heads.
  int64_t num_heads_kv;
  // Number of elements of a row of Q and K.
  int64_t head_dim_qk;
  // Number of elements of a row of V and O.
  int64_t head_dim_v;
  // Number of rows of a page; 0: K and V are not paged.
  int64_t page_size;
  // Q [batch, seqlen_q, num_heads_q, head_dim_qk]; packed [total_q, num_heads_q, head_dim_qk].
  struct FmhaStrides q;
  // K [batch, seqlen_k, num_heads_kv, head_dim_qk]; packed [total_k, num_heads_kv, head_dim_qk]; paged
  // [num_pages, page_size, num_heads_kv, head_dim_qk], batch_stride from page to page.
  struct FmhaStrides k;
  // V [batch, seqlen_k, num_heads_kv, head_dim_v]; packed and paged as K.
  struct FmhaStrides v;
  // O [batch, seqlen_q, num_heads_q, head_dim_v], or packed.
  struct FmhaStrides o;
  // Bias [batch, num_heads_q, seqlen_q, seqlen_k], added to the scores: seqlen_stride is from query to
  // query, dim_stride (1) from key to key. A batch_stride of 0 is one bias for all sequences,
  // a head_stride of 0 one for all heads. Read with FMHA_BIAS_ELEMENTWISE.
  struct FmhaStrides bias;
  // Text of the mask: "0" (none), "t", "b" (causal, top-left or bottom-right), "b:left,right" (window; -1:
  // unbounded), "g:y,x" (generic coordinates); null: none.
  const char *mask;
  // Factor of Q K^T; null: 1 / sqrt(head_dim_qk). 0 is 0.
  const float *softmax_scale;
  // Cap of the scores, softcap * tanh(score / softcap); null: none.
  const float *softcap;
  // Gradients of a backward call; null: the call is a forward call.
  const struct FmhaGradients *gradients;
  // How the call updates and reads its KV cache; null: it only reads K and V.
  const struct FmhaCache *cache;
  // Position of the call in a whole of which it is a part; null: the call is the whole.
  const struct FmhaPart *part;
  // Score and mask functions; null: there are none.
  const struct FmhaCode *code;
  // Lists of keys; null: every query sees the keys of its sequence that the mask leaves visible.
  const struct FmhaLists *lists;
  // Masks as data (intervals, bits, lists of blocks); null: there are none.
  const struct FmhaMasks *masks;
  // Scales by blocks of Q, K and V; null: they have none.
  const struct FmhaBlockScales *block_scales;
  // A second cache of keys and values; null: there is only one.
  const struct FmhaSecond *second;
  // Probability that an element of P is dropped.
  float p_drop;
  // Type of Q and K: FMHA_F16, ...
  int32_t dtype_qk;
  // Type of V: that of Q and K; with FP8 Q and K also FMHA_F16 or FMHA_BF16.
  int32_t dtype_v;
  // Type of O.
  int32_t dtype_o;
  // Type of the bias: FMHA_F32 or the inputs' 16-bit type; 0 without a bias.
  int32_t dtype_bias;
  // Storage order of V: FMHA_V_ROW_MAJOR or FMHA_V_COL_MAJOR.
  int32_t v_layout;
  // Kind of the bias: FMHA_BIAS_NONE, FMHA_BIAS_ELEMENTWISE, FMHA_BIAS_ALIBI or FMHA_BIAS_ALIBI_PER_BATCH.
  int32_t bias_kind;
  // 1: Q and O are packed, and sequences begin where cu_seqlens_q says; else 0.
  int32_t packed_q;
  // 1: K and V are packed, and sequences begin where cu_seqlens_k says; else 0.
  int32_t packed_k;
  // 1: seqused_q says how many queries of each sequence are in use; 0: all.
  int32_t seqused_q;
  // 1: seqused_k says how many keys of each sequence are in use; 0: all.
  int32_t seqused_k;
  // 1: each query head has a sink; else 0.
  int32_t sink;
  // Factor of FP8 Q: FMHA_DESCALE_NONE, FMHA_DESCALE_PER_KV_HEAD or FMHA_DESCALE_PER_TENSOR.
  int32_t descale_q;
  // Factor of FP8 K, as descale_q.
  int32_t descale_k;
  // Factor of FP8 V, as descale_q.
  int32_t descale_v;
  // 1: FP8 O is multiplied by scale_o before it is rounded; else 0.
  int32_t scale_o;
  // 1: LSE is written; else 0. Backward reads LSE in both cases.
  int32_t write_lse;
  // 1: the keep mask of dropout is written; else 0.
  int32_t write_keep_mask;
  // Forward: 1: row_max is written; else 0.
  int32_t row_max;
  // Forward: 1: head_max is written; else 0.
  int32_t head_max;
  // Forward: 1: key_sum is written; else 0.
  int32_t key_sum;
  // Reserved: must be 0.
  int32_t reserved;
} FmhaProblem;

// Options for the choice of a kernel. A null pointer to it means the same as 0 in every field: the default.
typedef struct FmhaOptions {
  // Size of this struct in bytes: sizeof(FmhaOptions).
  uint64_t struct_bytes;
  // Name of the kernel to use, or to be refused; null: the backend's choice.
  const char *kernel;
  // Fields of the kernel's tile, honoured or refused: "block_m=128,stages=3"; null: the kernel's own choice.
  const char *tile;
  // 1: a kernel that is correct but slow may be used if no fast kernel supports the problem; 0: the plan is refused
  // instead.
  int32_t allow_fallback;
  // How the running maximum is kept: FMHA_FAST or FMHA_EXACT.
  int32_t accuracy;
  // 1: every run gives the same bits, or the plan is refused. Forward and combine always do.
  int32_t deterministic;
  // 1: the bits of a sequence's results depend on its own lengths and contents alone, or the plan is refused.
  int32_t batch_invariant;
  // 1: each run reads the lengths back, waits for them, and refuses offsets that decrease or leave their tensor. 0:
  // such offsets give wrong outputs, but access nothing outside the tensors.
  int32_t check_lengths;
  // 1: the plan allocates no scratch memory, and each run passes its own in FmhaArgs.workspace; runs of one plan may
  // then overlap in time. 0: the plan has scratch of its own, and runs on one stream at a time.
  int32_t caller_workspace;
  // 1: the bits of a query row's results depend on that row and the keys that it sees alone, in training,
  // prefill and decoding, or the plan is refused.
  int32_t row_invariant;
  // Reserved: must be 0.
  int32_t reserved;
} FmhaOptions;

// The second cache of a run. Set everything to 0 first, then what FmhaSecond has.
typedef struct FmhaSecondArgs {
  // Size of this struct in bytes: sizeof(FmhaSecondArgs).
  uint64_t struct_bytes;
  // Read: K of the second cache.
  const void *k;
  // Read: V of the second cache. Null with v_in_k.
  const void *v;
  // Read: i32 [batch + 1], first row of each sequence of packed K and V.
  const int32_t *cu_seqlens_k;
  // Read: i32 [batch], number of keys of the second cache in use for each sequence.
  const int32_t *seqused_k;
  // Read: paged: i32 [batch, max_pages], the pages of each sequence.
  const int32_t *block_table;
  // Read: lists of keys of the second cache, in the form of FmhaArgs.indices.
  const int32_t *indices;
  // Read: number of entries in use of each list.
  const int32_t *topk_length;
  // Read: endpoints of the intervals of keys of the second cache, i32.
  const int32_t *intervals;
  // Packed: number of rows of K and V of the second cache, all sequences together; else 0.
  int64_t total_k;
  // Paged: number of pages of K and V of the second cache, used or not; else 0.
  int64_t num_pages;
  // Paged: entries of a row of the second cache's block_table, times page_size at least seqlen_k; else 0.
  int64_t max_pages;
} FmhaSecondArgs;

// Values of a tensor or number that a score or mask function captures, for one run.
typedef struct FmhaCapturedArgs {
  // Address of a tensor's first element; null for a number.
  const void *data;
  // Written: the dense gradient, in the tensor's shape, 0 at elements that no score read; null without
  // write_grad.
  void *grad;
  // Value of a number that the text declares as an int.
  int64_t integer;
  // Value of a number that the text declares as a float.
  float real;
  // Reserved: must be 0.
  int32_t reserved;
} FmhaCapturedArgs;

// Arguments of a run: addresses, rows of packed and pages of paged tensors, the dropout generator, the stream. Set
// everything to 0 first, then what the problem has. Pointers that the problem does not need are null; a tensor of 0
// elements may be null too. Addresses point to a tensor's first element, in the memory of the plan's device.
typedef struct FmhaArgs {
  // sizeof(FmhaArgs). A library that was built with another size of this struct refuses the run.
  uint64_t struct_bytes;
  // CUDA: a CUstream of the device's primary context; HIP: a hipStream_t; null: the default stream.
  void *stream;
  // Read: Q.
  const void *q;
  // Read: K; new rows are also written to it.
  void *k;
  // Read: V; new rows are also written to it. Null with v_in_k.
  void *v;
  // Written: O; backward reads it.
  void *o;
  // Read: the bias.
  const void *bias;
  // Written: LSE, f32 [batch, num_heads_q, seqlen_q], packed [num_heads_q, total_q]. Backward reads it.
  float *lse;
  // Written: the dropout keep mask, [batch, num_heads_q, seqlen_q, seqlen_k] bytes. Backward neither reads nor
  // writes it.
  uint8_t *keep_mask;
  // Written: each row's greatest score, f32, shape of LSE: after scale, function, soft-cap and bias, of the keys
  // that are seen, without the sink; -inf for a row that sees none.
  float *row_max;
  // Written unless batch is 0: the greatest of each head's row maxima, f32 [num_heads_q].
  float *head_max;
  // Written: each key's sum over the queries of its probability before dropout, f32 [batch, num_heads_q,
  // seqlen_k], 0 for a key beyond its sequence.
  float *key_sum;
  // Read: i32 [batch + 1], first row of each sequence of packed Q and O.
  const int32_t *cu_seqlens_q;
  // Read: i32 [batch + 1], first row of each sequence of packed K and V.
  const int32_t *cu_seqlens_k;
  // Read: i32 [batch], number of queries in use of each sequence.
  const int32_t *seqused_q;
  // Read: i32 [batch], number of keys in use of each sequence.
  const int32_t *seqused_k;
  // Read: paged: i32 [batch, max_pages], the pages of each sequence.
  const int32_t *block_table;
  // Read: ALiBi slopes, f32 [num_heads_q], or [batch, num_heads_q] with FMHA_BIAS_ALIBI_PER_BATCH.
  const float *alibi_slopes;
  // Read: sinks, f32 [num_heads_q], in the softmax's denominator.
  const float *sink;
  // Read: FP8 Q's factor, f32 [batch, num_heads_kv], or [1] with FMHA_DESCALE_PER_TENSOR.
  const float *descale_q;
  // Read: FP8 K's factor, as descale_q.
  const float *descale_k;
  // Read: FP8 V's factor, as descale_q.
  const float *descale_v;
  // Read: scales of the rows of a cache's K, f32; written too if rows are appended (seqlen_new).
  float *k_scale;
  // Read: scales of the rows of a cache's V, f32; written too if rows are appended (seqlen_new).
  float *v_scale;
  // Read: the factor by which FP8 O is multiplied, f32 [1]. Backward does not read it.
  const float *scale_o;
  // Read: gradient of O.
  const void *dout;
  // Written: gradient of Q.
  void *dq;
  // Written: gradient of K.
  void *dk;
  // Written: gradient of V.
  void *dv;
  // Written: gradient of the bias.
  void *dbias;
  // Read: gradient of LSE, f32, shape of LSE.
  const float *dlse;
  // Written: gradient of the sinks, f32 [num_heads_q].
  float *dsink;
  // Read: new keys.
  const void *k_new;
  // Read: new values.
  const void *v_new;
  // Read: i32 [batch + 1], first row of each sequence of packed k_new and v_new.
  const int32_t *cu_seqlens_new;
  // Read: cosines of the rotary embedding, [max_pos, rotary_dim / 2].
  const void *rotary_cos;
  // Read: sines of the rotary embedding, as rotary_cos.
  const void *rotary_sin;
  // Read: tree mask, u32 [batch, seqlen_q, ceil(seqlen_q / 32)], packed [total_q, ceil(seqlen_q / 32)]: bit n % 32
  // of word n / 32 shows a query the n-th of the last seqlen_q keys.
  const uint32_t *tree_mask;
  // Read: i32 [batch, seqlen_q, num_heads_kv, topk], packed [total_q, num_heads_kv, topk]: positions of the keys in
  // the sequence. An entry below 0, or at or past seqlen_k, names no key.
  const int32_t *indices;
  // Read: number of entries in use of each list; entries past them are never read.
  const int32_t *topk_length;
  // Read: endpoints of the intervals, i32.
  const int32_t *intervals;
  // Read: 32-bit words of the mask as bits.
  const uint32_t *mask_bits;
  // Read: number of blocks in each row of the list of blocks that other masks hide in part.
  const int32_t *kv_num_blocks;
  // Read: indices of the blocks that kv_num_blocks counts.
  const int32_t *kv_indices;
  // Read: number of blocks in each row of the list of fully visible blocks.
  const int32_t *full_kv_num_blocks;
  // Read: indices of the blocks that full_kv_num_blocks counts.
  const int32_t *full_kv_indices;
  // A mask object that has been built: the run uses its masks and reads no mask tensors here, which may be null.
  // Null: the run reads the mask tensors, and makes its own lists of tiles.
  const struct FmhaMaskObject *built;
  // Read: Q's scales by blocks.
  const uint8_t *block_scale_q;
  // Read: K's scales by blocks.
  const uint8_t *block_scale_k;
  // Read: V's scales by blocks.
  const uint8_t *block_scale_v;
  // Arguments of the second cache, in host memory; null if there is none.
  const struct FmhaSecondArgs *second;
  // Values of captures, in host memory: FmhaCode.num_captured structs in the order of FmhaCode.captured; null if
  // there are none.
  const struct FmhaCapturedArgs *captured;
  // Packed: number of rows of Q and O, all sequences together; else 0.
  int64_t total_q;
  // Packed: number of rows of K and V, all sequences together; else 0.
  int64_t total_k;
  // Packed: number of new rows, all sequences together; else 0.
  int64_t total_new;
  // Paged: number of pages of K and V, used or not; else 0.
  int64_t num_pages;
  // Paged: number of entries of a row of block_table; times page_size it is at least seqlen_k; else 0.
  int64_t max_pages;
  // Scratch of the run, aligned to 256 bytes, if the plan was made with caller_workspace; else null. Its contents
  // have no meaning before and after the run, and no other run may use it until the work is done.
  void *workspace;
  // Number of bytes at workspace: at least fmha_plan_workspace_bytes of the plan; 0 if workspace is null.
  uint64_t workspace_bytes;
  // Key of the dropout generator, used if dropout_seeded is 1.
  uint64_t dropout_seed;
  // Last 64-bit word of the counter of the dropout generator.
  uint64_t dropout_offset;
  // 1: dropout_seed and dropout_offset give the position of the generator, which every run with p_drop above 0
  // needs; else 0.
  int32_t dropout_seeded;
  // Reserved: must be 0.
  int32_t reserved;
} FmhaArgs;

// Describes a merge for `fmha_plan_combine`: partial results over the same rows are merged by their LSE, or added.
// Packed rows are a batch of 1. Set everything to 0 first, then what is wanted.
typedef struct FmhaCombineProblem {
  // Size of this struct in bytes: sizeof(FmhaCombineProblem).
  uint64_t struct_bytes;
  // Number of parts, at least 1 with FMHA_BY_LSE. With 0 parts FMHA_SUM sets O to 0, and FMHA_ADD_TO keeps O.
  int64_t num_parts;
  // Number of sequences.
  int64_t batch;
  // Number of rows of each sequence.
  int64_t seqlen_q;
  // Number of heads.
  int64_t num_heads_q;
  // Number of elements of a row.
  int64_t head_dim_v;
  // O of every part [batch, seqlen_q, num_heads_q, head_dim_v].
  struct FmhaStrides part;
  // The combined O, in the shape of each part.
  struct FmhaStrides o;
  // Type of the parts: FMHA_F32, FMHA_F16 or FMHA_BF16.
  int32_t dtype_part;
  // Type of the combined O: FMHA_F32, FMHA_F16 or FMHA_BF16.
  int32_t dtype_o;
  // How partial results are merged: FMHA_BY_LSE, FMHA_SUM or FMHA_ADD_TO.
  int32_t merge;
  // 1: the combined LSE is written; else 0. It must be 0 if parts are added.
  int32_t write_lse;
} FmhaCombineProblem;

// O and LSE of one part of the keys.
typedef struct FmhaPartial {
  // O of this part.
  const void *o;
  // LSE of this part, f32 [batch, num_heads_q, seqlen_q]; not read, and may be null, where parts are added.
  const float *lse;
} FmhaPartial;

// Arguments of a run of a merge. Addresses are those of a first element, in the memory of the plan's device.
typedef struct FmhaCombineArgs {
  // Size of this struct in bytes: sizeof(FmhaCombineArgs).
  uint64_t struct_bytes;
  // Stream of the run, as in FmhaArgs.
  void *stream;
  // The parts, num_parts structs in host memory; null if there are none.
  const struct FmhaPartial *parts;
  // The combined O: written; with FMHA_ADD_TO read first.
  void *o;
  // Written: the combined LSE, f32 [batch, num_heads_q, seqlen_q].
  float *lse;
} FmhaCombineArgs;

// Describes a choice of keys or blocks for `fmha_plan_choose`: scores are those of an indexer, sum_h relu(q_h . k)
// w_h, or given. Of each row the topk greatest are chosen (ties: the lower position; NaN last) and written in
// ascending position, followed by -1. Tensors are contiguous, except k and its scales. Set everything to 0 first, then
// what is wanted.
typedef struct FmhaChooseProblem {
  // Size of this struct in bytes: sizeof(FmhaChooseProblem).
  uint64_t struct_bytes;
  // Number of sequences.
  int64_t batch;
  // Number of queries of a sequence.
  int64_t seqlen_q;
  // Number of keys of a sequence; for sums of given probabilities, number of compressed blocks.
  int64_t seqlen_k;
  // Number of entries of each list of chosen keys; 0: only scores are written.
  int64_t topk;
  // Number of heads of q; 0: the caller gives the scores.
  int64_t num_heads;
  // Number of elements of a row of q and k; 0 if the caller gives the scores.
  int64_t head_dim;
  // Number of keys of a page; 0: k is not paged.
  int64_t page_size;
  // Number of pages of k, used or not; 0: k is not paged.
  int64_t num_pages;
  // Number of entries of a row of block_table; 0: k is not paged.
  int64_t max_pages;
  // Stride of k from a sequence or page to the next, elements; with k_key_stride 0: k is dense.
  int64_t k_outer_stride;
  // Stride of k from a key to the next.
  int64_t k_key_stride;
  // Stride of k_scale from a sequence or page to the next, elements; with scale_key_stride 0: it is dense.
  int64_t scale_outer_stride;
  // Stride of k_scale from a key to the next.
  int64_t scale_key_stride;
  // Number of keys of a block, whose score is the greatest of its candidates; 0: keys are chosen, or blocks by sums.
  int64_t block;
  // Tokens of a compressed block, whose probabilities are given and are summed for each block (NSA's l); 0: none.
  int64_t compressed;
  // Tokens from a compressed block to the next (NSA's d).
  int64_t stride;
  // Tokens of each block that may be chosen, if a block's score is a sum (NSA's l').
  int64_t selected;
  // Number of blocks that may be chosen, if a block's score is a sum.
  int64_t num_blocks;
  // Number of first blocks that are always chosen, whatever their scores.
  int64_t first_blocks;
  // Number of last blocks that are always chosen, whatever their scores.
  int64_t last_blocks;
  // Type of q: FMHA_F32, ...; 0 where the caller gives the scores.
  int32_t dtype_q;
  // Type of k: FMHA_F32, ...; 0 where the caller gives the scores.
  int32_t dtype_k;
  // Kind of the candidates: FMHA_CAUSAL_KEYS, FMHA_ALL_KEYS or FMHA_RANGES_OF_KEYS.
  int32_t candidates;
  // 1: each key has a scale; else 0.
  int32_t k_scale;
  // 1: seqused_k says how many keys of each sequence are in use; 0: all.
  int32_t seqused_k;
  // 1: the scores among which the greatest are chosen are written; else 0.
  int32_t write_scores;
} FmhaChooseProblem;

// Arguments of a run of a choice. Set everything to 0 first, then what the problem has. Addresses are those of a first
// element, in the memory of the plan's device.
typedef struct FmhaChooseArgs {
  // Size of this struct in bytes: sizeof(FmhaChooseArgs).
  uint64_t struct_bytes;
  // Stream of the run, as in FmhaArgs.
  void *stream;
  // Read: q of the indexer, [batch, seqlen_q, num_heads, head_dim].
  const void *q;
  // Read: k of the indexer, [batch, seqlen_k, head_dim], paged [num_pages, page_size, head_dim].
  const void *k;
  // Read: weights of heads, f32 [batch, seqlen_q, num_heads].
  const float *weights;
  // Read: scales of keys, f32 [batch, seqlen_k], paged [num_pages, page_size].
  const float *k_scale;
  // Read: paged: i32 [batch, max_pages], the pages of each sequence.
  const int32_t *block_table;
  // Read: scores that the caller gives, f32 [batch, seqlen_q, seqlen_k].
  const float *given;
  // Read: i32 [batch], keys in use of each sequence.
  const int32_t *seqused_k;
  // Read: first candidate of each query, i32 [batch, seqlen_q], with FMHA_RANGES_OF_KEYS.
  const int32_t *first;
  // Read: one past the last candidate of each query, i32 [batch, seqlen_q], with FMHA_RANGES_OF_KEYS.
  const int32_t *end;
  // Written: list of each query's chosen keys or blocks, i32 [batch, seqlen_q, topk].
  int32_t *indices;
  // Written: the scores that are chosen among, f32 [batch, seqlen_q, keys or blocks], -inf where there is no
  // candidate.
  float *scores;
  // Scratch of the run, as in FmhaArgs.
  void *workspace;
  // Bytes at workspace, as in FmhaArgs.
  uint64_t workspace_bytes;
} FmhaChooseArgs;

// The loss that trains an indexer, and its gradients: for each query the KL divergence of the softmax of its list's
// scores, sum_h relu(q_h . k) w_h, from a target, which is divided by its sum and has no gradient. All tensors are
// contiguous, in memory of the device. Set everything to 0 first, then what is wanted.
typedef struct FmhaIndexLoss {
  // Size of this struct in bytes: sizeof(FmhaIndexLoss).
  uint64_t struct_bytes;
  // Number of sequences.
  int64_t batch;
  // Number of queries of a sequence.
  int64_t seqlen_q;
  // Number of keys of a sequence.
  int64_t seqlen_k;
  // Number of entries of each list.
  int64_t topk;
  // Number of heads of q.
  int64_t num_heads;
  // Number of elements of a row of q and k.
  int64_t head_dim;
  // Read: [batch, seqlen_q, num_heads, head_dim].
  const void *q;
  // Read: k, [batch, seqlen_k, head_dim].
  const void *k;
  // Read: weights of heads, f32 [batch, seqlen_q, num_heads].
  const float *weights;
  // Read: lists of keys, i32 [batch, seqlen_q, topk], as positions. An entry below 0, or at or past seqlen_k, names
  // no key.
  const int32_t *indices;
  // Read: target, f32 [batch, seqlen_q, topk]: attention's probabilities of the listed keys, summed over heads.
  const float *target;
  // Read: factors of each query's gradients, f32 [batch, seqlen_q]; null: 1.
  const float *dloss;
  // Written: loss of each query, f32 [batch, seqlen_q]; 0 for a query without keys, or whose target sums to 0; null:
  // not wanted.
  float *loss;
  // Written: gradient of q, f32 in its shape; null: not wanted.
  float *dq;
  // Written: gradient of k, f32 in its shape; null: not wanted.
  float *dk;
  // Written: gradient of the weights, f32 in their shape; null: not wanted.
  float *dweights;
  // Type of q: FMHA_F32, FMHA_F16 or FMHA_BF16.
  int32_t dtype_q;
  // Type of k: FMHA_F32, FMHA_F16 or FMHA_BF16.
  int32_t dtype_k;
  // 1: sums have one order, and a second run gives equal bits. 0: on NVIDIA's GPUs dk is added to in no order.
  int32_t deterministic;
  // 1: a slow kernel may serve where no other takes the call.
  int32_t allow_fallback;
  // Stream of the run, as in FmhaArgs.
  void *stream;
  // Scratch, aligned to 256 bytes; null where fmha_index_loss_workspace says 0.
  void *workspace;
  // Bytes of the scratch: at least what fmha_index_loss_workspace says.
  uint64_t workspace_bytes;
} FmhaIndexLoss;

// Describes a conversion for `fmha_plan_quantize`: of a tensor [batch, seqlen, num_heads, dim] to elements and scales
// by blocks (CONTRACT.md, "Scales by blocks"). Pages count as sequences; packed rows are one sequence. Set everything
// to 0 first, then what is wanted.
typedef struct FmhaQuantizeProblem {
  // Size of this struct in bytes: sizeof(FmhaQuantizeProblem).
  uint64_t struct_bytes;
  // Number of sequences.
  int64_t batch;
  // Number of rows of a sequence.
  int64_t seqlen;
  // Number of heads.
  int64_t num_heads;
  // Number of elements of a row.
  int64_t dim;
  // Strides of the tensor, in elements.
  struct FmhaStrides x;
  // Strides of the stored elements, in bytes; for FMHA_NVFP4 their shape is [batch, seqlen, num_heads, ceil(dim /
  // 2)], with pairs_of_rows [batch, ceil(seqlen / 2), num_heads, dim].
  struct FmhaStrides elements;
  // Strides of the scales, in bytes; their shape is [batch, seqlen, num_heads, ceil(dim / block)], with
  // blocks_of_rows [batch, ceil(seqlen / block), num_heads, dim].
  struct FmhaStrides scales;
  // Type of the tensor: FMHA_F32, FMHA_F16 or FMHA_BF16.
  int32_t dtype;
  // FMHA_MXFP8_E4M3, FMHA_MXFP8_E5M2 or FMHA_NVFP4.
  int32_t format;
  // 1: a block is some rows, as for V; 0: a block is some elements of a row, as for Q and K.
  int32_t blocks_of_rows;
  // 1: rows lie one after another, and two of FMHA_NVFP4 share a byte, as in FMHA_V_COL_MAJOR; else 0.
  int32_t pairs_of_rows;
  // Source of the tensor's scale: FMHA_SCALE_ONE, or with FMHA_NVFP4 alone FMHA_SCALE_GIVEN or FMHA_SCALE_WRITTEN.
  int32_t scale_of_tensor;
  // Reserved: must be 0.
  int32_t reserved;
} FmhaQuantizeProblem;

// Arguments of a run of a conversion. Set everything to 0 first, then what the problem has. Addresses are those of a
// first element, in the memory of the plan's device.
typedef struct FmhaQuantizeArgs {
  // Size of this struct in bytes: sizeof(FmhaQuantizeArgs).
  uint64_t struct_bytes;
  // Stream of the run, as in FmhaArgs.
  void *stream;
  // Read: the tensor to convert.
  const void *x;
  // Written: the stored elements of the tensor.
  uint8_t *elements;
  // Written: the scales of the tensor's blocks.
  uint8_t *scales;
  // Read: the tensor's scale, f32 [1], with FMHA_SCALE_GIVEN. A scale that is not positive and finite makes every
  // block's scale NaN.
  const float *tensor_scale;
  // Written: the tensor's scale, f32 [1], with FMHA_SCALE_WRITTEN.
  float *written_scale;
  // Scratch of the run, as in FmhaArgs.
  void *workspace;
  // Bytes at workspace, as in FmhaArgs.
  uint64_t workspace_bytes;
} FmhaQuantizeArgs;

// How a rank finds the others. Set everything to 0 first, then what is wanted.
typedef struct FmhaJoin {
  // sizeof(FmhaJoin).
  uint64_t struct_bytes;
  // Which rank this one is, from 0; 0 without an address.
  int64_t rank;
  // Number of ranks; 0 without an address.
  int64_t size;
  // Host memory: "host:port", where rank 0 listens; or "file:PATH", a file that does not exist yet and that
  // every rank of this host sees and its owner alone reads; null: RANK, WORLD_SIZE, MASTER_ADDR and the port
  // above MASTER_PORT, as torchrun sets them.
  const char *address;
  // Seconds that a rank may be late, when it joins and at every later step; 0: 60.
  double timeout_seconds;
  // FMHA_NCCL: a live ncclComm_t of the same ranks, which outlives the group and which nobody uses at the
  // same time; it stays the caller's, and is aborted when a rank has failed. Null: one of the group's own,
  // on the device that is current on this thread.
  void *nccl_comm;
  // Host memory: the path of NCCL or RCCL; null: where the system finds it.
  const char *nccl_library;
  // Host memory: what all ranks of the job know and nobody else does, at least 16 bytes; null: that of the
  // environment, FMHA_DIST_SECRET. Without one rank 0 listens on the loopback alone, or meets by a file.
  const char *secret;
  // Host memory: the address of this host, without a port, at which this rank listens; null: that of the
  // environment, FMHA_DIST_LISTEN, or else the address by which it reaches rank 0.
  const char *listen;
  // FMHA_HOST or FMHA_NCCL.
  int32_t space;
  // 0.
  int32_t reserved;
} FmhaJoin;

// A stretch of rows that a rank has.
typedef struct FmhaRun {
  // Which rank.
  int64_t rank;
  // The first row.
  int64_t begin;
  // One past the last.
  int64_t end;
} FmhaRun;

// Which rows of the whole each rank has, the same on every rank but for own_rows_q and own_rows_k. Rows are
// positions of every sequence, or rows of a packed tensor.
typedef struct FmhaRanks {
  // sizeof(FmhaRanks).
  uint64_t struct_bytes;
  // Number of rows of this rank's Q and O, under the partition partition_q.
  int64_t own_rows_q;
  // Number of rows of this rank's K and V, under the partition partition_k.
  int64_t own_rows_k;
  // Host memory: with FMHA_RUNS the runs of queries of each rank, ascending for a rank; else null.
  const struct FmhaRun *runs_q;
  // Number of runs_q; else 0.
  int64_t num_runs_q;
  // Host memory: with FMHA_RUNS the runs of keys of each rank, ascending for a rank; else null.
  const struct FmhaRun *runs_k;
  // Number of runs_k; else 0.
  int64_t num_runs_k;
  // Host memory: with packed_q the first row of each sequence of the whole, i32 [batch + 1]; else null.
  const int32_t *cu_seqlens_q;
  // Host memory: with packed_k the first row of K and V of each sequence of the whole, i32 [batch + 1]; else
  // null.
  const int32_t *cu_seqlens_k;
  // Host memory: "gather", "ring", "mixed", "ulysses" or "decode"; null: what the model of kernels and links finds
  // fastest.
  const char *scheme;
  // Host memory: what kernels and links do, lines as `fmha explain --links` reads them; null: the model's
  // own figures.
  const char *links;
  // Distribution of queries over ranks: FMHA_CONTIGUOUS, ...
  int32_t partition_q;
  // Distribution of keys over ranks: FMHA_CONTIGUOUS, ...
  int32_t partition_k;
} FmhaRanks;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Chooses and compiles a kernel; may take seconds the first time. Nothing on the device is read.
// Returns 0 and sets `*plan`, or not 0 (see `fmha_last_error`) with `*plan` untouched.
//
// `device` is "cuda" (as null), "cuda:1", "rocm", "cpu" (whose addresses are host memory) or "auto". It is opened
// once, and its kernels stay loaded from plan to plan. The plan runs on one stream at a time, unless each run brings
// its own workspace.
//
// # Safety
// `device` is null or a C string; `problem` is null or a problem whose pointers are null or point to what they
// say; `options` is null or options whose strings are null or C strings; `plan` is null or writable.
int fmha_plan(const char *device,
              const struct FmhaProblem *problem,
              const struct FmhaOptions *options,
              struct FmhaPlan **plan);

// Queues a run on its stream and returns: on a device it neither allocates nor waits. Returns 0, or not 0 (see
// `fmha_last_error`) with nothing launched, unless the driver itself failed. An argument that the problem needs and
// that is missing is refused by its name, and so is one that the problem does not have.
//
// # Safety
// `plan` is null or from `fmha_plan`; `args` is null or arguments whose pointers are null or memory of the
// plan's device as large as the problem says, untouched by others until the work is done.
int fmha_run(const struct FmhaPlan *plan,
             const struct FmhaArgs *args);

// Plans a merge of partial results; `fmha_plan` plans attention.
//
// # Safety
// As `fmha_plan`.
int fmha_plan_combine(const char *device,
                      const struct FmhaCombineProblem *problem,
                      const struct FmhaOptions *options,
                      struct FmhaPlan **plan);

// Runs a merge of partial results; `fmha_run` runs attention.
//
// # Safety
// As `fmha_run`; `parts` is null or as many as the problem's `num_parts` in host memory.
int fmha_run_combine(const struct FmhaPlan *plan, const struct FmhaCombineArgs *args);

// Plans a choice of keys or blocks, whose lists FmhaArgs.indices takes; `fmha_plan` plans attention.
//
// # Safety
// As `fmha_plan`.
int fmha_plan_choose(const char *device,
                     const struct FmhaChooseProblem *problem,
                     const struct FmhaOptions *options,
                     struct FmhaPlan **plan);

// Runs a choice of keys or blocks; `fmha_run` runs attention.
//
// # Safety
// As `fmha_run`.
int fmha_run_choose(const struct FmhaPlan *plan, const struct FmhaChooseArgs *args);

// Computes an indexer's loss and its gradients, or queues that on a GPU. `device` is named as in `fmha_plan`; null:
// "cpu". Each call plans anew, which compiles only what was never compiled. Returns 0, or not 0 (see
// `fmha_last_error`) with nothing written.
//
// # Safety
// `device` is null or a C string; `call` is null, or its pointers are null or memory of the device as large as it
// says, of which nobody else uses what is written until the work is done.
int fmha_index_loss(const char *device,
                    const struct FmhaIndexLoss *call);

// Bytes of scratch that `fmha_index_loss` wants in `call.workspace`, which is 0 on the CPU. Of the call's addresses
// only those matter that are null.
//
// # Safety
// `device` is null or a C string; `call` is null or a call; `bytes` is null or writable.
int fmha_index_loss_workspace(const char *device,
                              const struct FmhaIndexLoss *call,
                              uint64_t *bytes);

// Plans a conversion of a tensor to a format with scales by blocks, which FmhaProblem.block_scales takes.
//
// # Safety
// As `fmha_plan`.
int fmha_plan_quantize(const char *device,
                       const struct FmhaQuantizeProblem *problem,
                       const struct FmhaOptions *options,
                       struct FmhaPlan **plan);

// Runs a conversion to a format with scales by blocks; `fmha_run` runs attention.
//
// # Safety
// As `fmha_run`.
int fmha_run_quantize(const struct FmhaPlan *plan, const struct FmhaQuantizeArgs *args);

// Returns the plan's description for people to read, one fact a line: kernel, tile, promises, refusals. The text lives
// as long as the plan.
//
// # Safety
// `plan` is null (then so is the text) or from `fmha_plan`.
const char *fmha_plan_text(const struct FmhaPlan *plan);

// Bytes of the workspace (FmhaArgs.workspace and its like) that each run of the plan needs: 0 where the
// plan was not made with caller_workspace, or needs none, or is null. A plan of combine needs none.
//
// # Safety
// `plan` is null or from `fmha_plan`.
uint64_t fmha_plan_workspace_bytes(const struct FmhaPlan *plan);

// Destroys a plan whose work is done. A null pointer is ignored.
//
// # Safety
// `plan` is null or from `fmha_plan`, and not dropped before.
void fmha_drop(struct FmhaPlan *plan);

// Makes an object for the masks, as data or as code, of calls of the plans `forward`, `backward` or both; either may
// be null. The object has memory for copies of the masks' tensors, and for the lists of tiles that kernels read.
// `args` are the arguments of one of the calls, of which only total_q and total_k are read. Returns 0 and sets
// `*object`, or not 0 (see `fmha_last_error`) with `*object` untouched. A mask as code that captures a tensor is
// refused.
//
// # Safety
// `forward` and `backward` are null or from `fmha_plan`; `args` is null or arguments; `object` is null or writable.
int fmha_mask_object(const struct FmhaPlan *forward,
                     const struct FmhaPlan *backward,
                     const struct FmhaArgs *args,
                     struct FmhaMaskObject **object);

// Queues copies of the arguments' mask tensors and the making of the lists on the arguments' stream, and returns. Runs
// whose FmhaArgs.built is the object then use these masks, until it is built again. The call may be captured into a
// graph: each replay builds. `plan` is one of the object's plans; of the arguments only lengths, masks and captured
// numbers are read. The caller first waits for runs on other streams that use the object.
//
// # Safety
// `object` is null or from `fmha_mask_object`; the rest as `fmha_run`.
int fmha_build_mask(struct FmhaMaskObject *object,
                    const struct FmhaPlan *plan,
                    const struct FmhaArgs *args);

// Destroys a mask object that no work uses any more. A null pointer is ignored.
//
// # Safety
// `object` is null or from `fmha_mask_object`, and not dropped before.
void fmha_drop_mask_object(struct FmhaMaskObject *object);

// Allocates memory of a device, which is named as for `fmha_plan`. It is aligned to 256 bytes and not initialised.
// Returns 0 and sets `*buffer`, or not 0 (see `fmha_last_error`) with `*buffer` untouched.
//
// # Safety
// `device` is null or a C string; `buffer` is null or writable.
int fmha_buffer(const char *device,
                uint64_t bytes,
                struct FmhaBuffer **buffer);

// Returns the address of the buffer's first byte, in the memory of its device. Host code can read and write a CPU
// buffer through it.
//
// # Safety
// `buffer` is null (then so is the address) or from `fmha_buffer`.
void *fmha_buffer_data(const struct FmhaBuffer *buffer);

// Copies `bytes` of host memory to the front of the buffer.
//
// # Safety
// `buffer` is null or from `fmha_buffer`, and no work queued uses it; `from` is null or so many bytes.
int fmha_upload(struct FmhaBuffer *buffer,
                const void *from,
                uint64_t bytes);

// Waits for the work queued on the default stream, then copies the front of the buffer to host memory. A caller that
// uses another stream must wait for that stream first.
//
// # Safety
// `buffer` is null or from `fmha_buffer`; `to` is null or so many bytes.
int fmha_download(const struct FmhaBuffer *buffer,
                  void *to,
                  uint64_t bytes);

// Frees a buffer that no work uses any more. A null pointer is ignored.
//
// # Safety
// `buffer` is null or from `fmha_buffer`, and not dropped before.
void fmha_drop_buffer(struct FmhaBuffer *buffer);

// Text of the last error on this thread; valid until the next call that fails.
const char *fmha_last_error(void);

// Joins a group, and waits for all of its ranks. Every rank then makes the same calls in the same order: what
// goes wrong on one is an error on all, which names the rank and the field, and after one no call of the group
// succeeds. Returns 0 and sets `*group`, or not 0 (see `fmha_last_error`) with `*group` untouched.
//
// # Safety
// `join` is null or as the struct says; `group` is null or writable.
int fmha_dist_join(const struct FmhaJoin *join,
                   struct FmhaGroup **group);

// Leaves a group. The other ranks' calls that are still to come fail; plans of this rank keep it until they
// are dropped. Null is taken.
//
// # Safety
// `group` is null or from `fmha_dist_join`, and not left before.
void fmha_dist_leave(struct FmhaGroup *group);

// Tells the other ranks that this one cannot go on: their calls fail by this rank, `field` and `text` at once,
// and need not wait for it until it is late. No call of the group succeeds any more. Null is taken.
//
// # Safety
// `group` is null or from `fmha_dist_join`; `field` and `text` are null or C strings.
void fmha_dist_fail(const struct FmhaGroup *group,
                    const char *field,
                    const char *text);

// The rows of `rank` where `rows` are cut for `size` ranks by FMHA_CONTIGUOUS, FMHA_ZIG_ZAG or
// FMHA_REPLICATED: at most two runs, their number in `*num_runs`.
//
// # Safety
// `runs` is null or room for two; `num_runs` is null or writable.
int fmha_dist_rows(int32_t partition,
                   int64_t rows,
                   int64_t size,
                   int64_t rank,
                   struct FmhaRun *runs,
                   int64_t *num_runs);

// Plans a call over the ranks of `group`, which all plan it together. `problem` has the sizes of the whole: those
// of one device that had all rows; its strides are those of this rank's rows, contiguous: Q and O [batch, own rows,
// num_heads_q, head_dim], K and V likewise; packed, the batch is no axis. A bias is [.., own queries, all keys].
// Masks as data, functions and what they capture are those of the whole, on every rank, and so are the gradients of
// captured tensors: the same bits on every rank.
// A rank without queries says write_lse and the bias as the other ranks do, or leaves them out.
// Paged, appended and used lengths, gradients of LSE and of a bias are refused. The plan has scratch of its own.
// Returns 0 and sets `*plan`, or not 0 (see `fmha_last_error`), on every rank.
//
// # Safety
// As `fmha_plan`; `ranks` is null or as the struct says; `group` is null or from `fmha_dist_join`.
int fmha_dist_plan(const char *device,
                   const struct FmhaProblem *problem,
                   const struct FmhaRanks *ranks,
                   const struct FmhaOptions *options,
                   const struct FmhaGroup *group,
                   struct FmhaDistPlan **plan);

// Runs a plan, on every rank, whose dropout_seed and dropout_offset are alike. The arguments are this rank's rows
// and take neither lengths nor scratch: LSE [batch, num_heads_q, own rows], packed [num_heads_q, own rows]. On a
// device it is queued on the stream; on the host it is done when this returns. Returns 0, or not 0 (see
// `fmha_last_error`) on every rank: no output is then a result.
//
// # Safety
// `plan` is null or from `fmha_dist_plan`; `args` is null or as for `fmha_run`, its tensors as large as the plan's.
int fmha_dist_run(const struct FmhaDistPlan *plan,
                  const struct FmhaArgs *args);

// The plan for a reader: what each scheme would cost, the one that serves and why, every step of this rank.
// Lives as long as the plan.
//
// # Safety
// `plan` is null (then so is the text) or from `fmha_dist_plan`.
const char *fmha_dist_plan_text(const struct FmhaDistPlan *plan);

// Drops a plan whose work is done. Null is taken.
//
// # Safety
// `plan` is null or from `fmha_dist_plan`, and not dropped before.
void fmha_dist_drop(struct FmhaDistPlan *plan);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FMHA_H */
