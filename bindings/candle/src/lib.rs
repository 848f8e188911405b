//! Fused multi-head attention for [candle](candle_core): the functions of `candle-flash-attn` by name,
//! argument order and meaning, and what they lack: the CPU, f32, gradients, LSE, dropout, head dimensions
//! that are no multiple of 8. Nothing here is built by nvcc; the kernels of a CUDA device are compiled at the
//! first call that needs them, and kept.
//!
//! A model changes over by one line, `use fmha_candle as candle_flash_attn;`:
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//!
//! let q = Var::randn(0f32, 1.0, (1, 16, 4, 32), &Device::Cpu)?; // batch, seqlen_q, num_heads_q, head_dim
//! let k = Tensor::randn(0f32, 1.0, (1, 24, 2, 32), &Device::Cpu)?; // batch, seqlen_k, num_heads_kv, head_dim
//! let v = Tensor::randn(0f32, 1.0, (1, 24, 2, 32), &Device::Cpu)?;
//! let o = fmha_candle::flash_attn(&q, &k, &v, 1.0 / 32f32.sqrt(), true)?;
//! assert_eq!(o.dims(), [1, 16, 4, 32]);
//!
//! let gradients = o.sum_all()?.backward()?;
//! assert_eq!(gradients.get(&q).map(Tensor::dims), Some(&[1, 16, 4, 32][..]));
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! [`attention`] and [`attention_varlen`] have everything, by the names of fmha's contract.
//!
//! [`attention_with_small`] gives maxima of the scores and sums of each key's probabilities beside them.
//!
//! A score and a mask may be code ([`Options::score_code`], [`Options::mask_code`]): Rust's operators on
//! [`expr`]'s values, or text.
//!
//! Q, K and V are f32, f16 or bf16, of one type, on one device, with any strides whose last is 1. A causal
//! mask or a window stands at the last key: the last query sees the last key. A query that sees no key has O
//! = 0. Where no fast kernel takes a call, candle-flash-attn's functions run on the fallback kernel, which is right
//! and slow; [`attention`] and [`attention_varlen`] refuse the call unless [`Options::allow_fallback`] is set.
//!
//! With the feature `cuda` tensors of a CUDA device are taken where they lie, on candle's stream; the
//! tests have passed there (README).
//!
//! # Errors
//! Every function refuses what it cannot do before anything is launched, with the field's name and the number.

mod call;
mod masks;
mod memory;

use candle_core::{Result, Tensor, bail};

use call::{Attend, Packed};
pub use fmha::expr;
use fmha::expr::{Function, Number};

/// How scores are made and which of them count. [`Options::default`]: every key is seen, `1 / sqrt(head_dim)`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Multiplies `Q K^T`; `None` = `1 / sqrt(head_dim)`.
    pub softmax_scale: Option<f32>,
    /// Keys before the diagonal that a query sees; `None`, and more than `seqlen_k`, = all, as in candle-flash-attn.
    pub window_size_left: Option<usize>,
    /// Keys beyond the diagonal that a query sees; `None`, and more than `seqlen_k`, = all, as in
    /// candle-flash-attn; 0 with no bound to the left is the causal mask.
    pub window_size_right: Option<usize>,
    /// `softcap * tanh(S / softcap)`, before the bias; `None` or 0 = none.
    pub softcap: Option<f32>,
    /// Slopes of ALiBi, f32 `[num_heads_q]` or `[batch, num_heads_q]`; they get no gradient.
    pub alibi_slopes: Option<Tensor>,
    /// Probability that a P is dropped.
    pub p_drop: f32,
    /// Seed of the dropout mask. The same seed drops the same P on every device. Required where `p_drop` is above
    /// 0.
    pub seed: Option<u64>,
    /// Function that modifies a scaled score, before soft-cap and slopes; gradients of Q, K and V go through
    /// it.
    pub score_code: Option<Function>,
    /// Condition for which (query, key) pairs are visible, besides what the window hides. Rows and keys count from
    /// 0; no diagonal offset is added.
    pub mask_code: Option<Function>,
    /// The tensors that `score_code` and `mask_code` read by name: f32, f16, bf16, i32, i64, or u8 for a bool. They
    /// get no gradient, and a tensor that candle tracks is refused: `detach` it.
    pub captured: Vec<(String, Tensor)>,
    /// The numbers that `score_code` and `mask_code` read by name.
    pub numbers: Vec<(String, Number)>,
    /// Masks as data (intervals, bits, lists of blocks), besides window and function.
    pub masks: Masks,
    /// Whether gradients have the same bits on every run.
    pub deterministic: bool,
    /// Whether the bits of a sequence's results must not depend on the other sequences of the batch.
    pub batch_invariant: bool,
    /// Whether the bits of a query row's results must depend on that row and the keys that it sees alone.
    pub row_invariant: bool,
    /// Whether the fallback kernel, which is correct but slow, may serve calls that no fast kernel takes; by
    /// default not. On a GPU f32 needs it.
    pub allow_fallback: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            softmax_scale: None,
            window_size_left: None,
            window_size_right: None,
            softcap: None,
            alibi_slopes: None,
            p_drop: 0.0,
            seed: None,
            score_code: None,
            mask_code: None,
            captured: vec![],
            numbers: vec![],
            masks: Masks::default(),
            deterministic: false,
            batch_invariant: false,
            row_invariant: false,
            allow_fallback: false,
        }
    }
}

/// Masks as data, on the device of Q. A key is visible if every given mask lets it be seen. A mask with other
/// contents needs no new kernel.
#[derive(Clone, Debug, Default)]
pub struct Masks {
    /// Endpoints, i32 `[batch or 1, heads, 2 n, seqlen_q]`, packed `[heads, 2 n, total_q]`: query i sees the
    /// keys from endpoint 2 p up to endpoint 2 p + 1, without that one. Heads are 1, those of K or those of
    /// Q.
    pub intervals: Option<Tensor>,
    /// Words, u32 or i32 `[batch or 1, heads, seqlen_q, ceil(seqlen_k / 32)]`, packed `[heads, total_q, words]`: bit
    /// `j % 32` of word `j / 32` is 1 where key j is seen.
    pub bits: Option<Tensor>,
    /// Blocks of keys for each block of queries.
    pub block_lists: Option<BlockLists>,
}

/// Counts, i32 or u32 `[batch or 1, heads, ceil(seqlen_q / block_q)]`, and as many indices of blocks of keys,
/// `[.., room]`. Heads are 1 or those of Q.
#[derive(Clone, Debug)]
pub struct BlockLists {
    /// Queries of a block.
    pub block_q: usize,
    /// Keys of a block.
    pub block_k: usize,
    /// Counts and indices of the blocks of which some keys may be hidden by the other masks.
    pub partial: Option<[Tensor; 2]>,
    /// Counts and indices of the blocks that are seen as a whole.
    pub full: Option<[Tensor; 2]>,
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)*) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = $name.into();
            self
        }
    )*};
}

impl Options {
    /// A query sees no key beyond its own position, counted from the last key.
    #[must_use]
    pub fn causal(self) -> Self {
        self.window(None, Some(0))
    }

    /// A query sees `left` keys before its own position and `right` beyond it; `None` = all on that side.
    #[must_use]
    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        (self.window_size_left, self.window_size_right) = (left, right);
        self
    }

    /// Drops each P with probability `p_drop`; `seed` says which.
    #[must_use]
    pub fn dropout(mut self, p_drop: f32, seed: u64) -> Self {
        (self.p_drop, self.seed) = (p_drop, Some(seed));
        self
    }

    /// A tensor that functions read by this name.
    #[must_use]
    pub fn captured(mut self, name: impl Into<String>, tensor: &Tensor) -> Self {
        self.captured.push((name.into(), tensor.clone()));
        self
    }

    /// A number that functions read by this name.
    #[must_use]
    pub fn number(mut self, name: impl Into<String>, number: Number) -> Self {
        self.numbers.push((name.into(), number));
        self
    }

    /// Ranges of keys for each query.
    #[must_use]
    pub fn intervals(mut self, endpoints: &Tensor) -> Self {
        self.masks.intervals = Some(endpoints.clone());
        self
    }

    /// Blocks of keys for each block of queries.
    #[must_use]
    pub fn block_lists(mut self, lists: BlockLists) -> Self {
        self.masks.block_lists = Some(lists);
        self
    }

    /// A bit for each query and key.
    #[must_use]
    pub fn mask_bits(mut self, words: &Tensor) -> Self {
        self.masks.bits = Some(words.clone());
        self
    }

    setters! {
        /// Function that modifies a scaled score.
        score_code: impl Into<Option<Function>>;
        /// Which pairs are seen.
        mask_code: impl Into<Option<Function>>;
        /// Multiplies `Q K^T`.
        softmax_scale: impl Into<Option<f32>>;
        /// `softcap * tanh(S / softcap)`, before the bias.
        softcap: impl Into<Option<f32>>;
        /// Slopes of ALiBi, f32 `[num_heads_q]` or `[batch, num_heads_q]`.
        alibi_slopes: impl Into<Option<Tensor>>;
        /// Gradients with the same bits on every run.
        deterministic: bool;
        /// The bits of a sequence do not depend on the batch around it.
        batch_invariant: bool;
        /// The bits of a query row depend on that row and the keys that it sees alone.
        row_invariant: bool;
        /// Whether the fallback kernel may serve.
        allow_fallback: bool;
    }
}

/// Attention of equal lengths: q `[batch, seqlen_q, num_heads_q, head_dim]`, k and v `[batch, seqlen_k, num_heads_kv,
/// head_dim]`, the head dimension of v as it likes. Gives O, shaped like q with v's head dimension, and LSE, f32
/// `[batch, num_heads_q, seqlen_q]`, the natural logarithm of each row's sum (-inf for a row that sees no key), which
/// carries no gradient.
///
/// # Errors
/// As [the crate](crate) says.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &Options) -> Result<(Tensor, Tensor)> {
    let Outputs { o, lse, .. } = Attend::new(options, None)?.apply(q, k, v)?;
    Ok((o, lse))
}

/// Small outputs of the scores that are wanted beside O and LSE. They have no gradient, and change no bit of O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Small {
    /// Each row's greatest score, of LSE's shape; -inf for a row that sees no key.
    pub row_max: bool,
    /// The greatest of a head's, `[num_heads_q]`.
    pub head_max: bool,
    /// Each key's probabilities before dropout, summed over the queries, `[batch, num_heads_q, seqlen_k]`; of packed
    /// and paged sequences `seqlen_k` is `max_seqlen_k`, and keys that a sequence does not have are 0.
    pub key_sum: bool,
}

impl Small {
    /// All small outputs.
    pub const ALL: Self = Self { row_max: true, head_max: true, key_sum: true };
}

/// Results of a call with small outputs, those f32.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outputs {
    /// O, of the shape that [`attention`] or [`attention_varlen`] gives.
    pub o: Tensor,
    /// LSE, of the shape that [`attention`] or [`attention_varlen`] gives.
    pub lse: Tensor,
    /// Row maxima, if asked for.
    pub row_max: Option<Tensor>,
    /// Maxima of heads, if asked for.
    pub head_max: Option<Tensor>,
    /// Sums of keys, if asked for.
    pub key_sum: Option<Tensor>,
}

/// [`attention`], or with `sequences` [`attention_varlen`], with small outputs.
///
/// # Errors
/// As [the crate](crate) says.
pub fn attention_with_small(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: Option<&Sequences>,
    small: Small,
    options: &Options,
) -> Result<Outputs> {
    Attend::new(options, sequences.map(Packed::new).transpose()?)?.with_small(small).apply(q, k, v)
}

/// Packed sequences: which rows of Q, K and V belong to which sequence.
#[derive(Clone, Debug)]
pub struct Sequences {
    /// First query of each sequence and the end of the last one, u32 or i32 `[batch + 1]`.
    pub seqlens_q: Tensor,
    /// First key of each sequence and the end of the last one, u32 or i32 `[batch + 1]`; of a paged cache,
    /// whose keys lie in pages, the differences alone count, as numbers of keys.
    pub seqlens_k: Tensor,
    /// No sequence has more queries.
    pub max_seqlen_q: usize,
    /// No sequence has more keys.
    pub max_seqlen_k: usize,
    /// Which pages hold a sequence's keys, u32 or i32 `[batch, max_pages]`, where k and v are paged.
    pub block_table: Option<Tensor>,
}

/// Attention of packed sequences: q `[total_q, num_heads_q, head_dim]`, k and v `[total_k, num_heads_kv,
/// head_dim]`, or of a paged cache `[num_pages, page_size, num_heads_kv, head_dim]`. Gives O, shaped like q,
/// and LSE, f32 `[num_heads_q, total_q]`. Rows that belong to no sequence are 0, in gradients too. A paged
/// cache has no gradient.
///
/// # Errors
/// As [the crate](crate) says.
pub fn attention_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: &Sequences,
    options: &Options,
) -> Result<(Tensor, Tensor)> {
    let Outputs { o, lse, .. } = Attend::new(options, Some(Packed::new(sequences)?))?.apply(q, k, v)?;
    Ok((o, lse))
}

fn causal_window(causal: bool) -> Option<usize> {
    causal.then_some(0)
}

/// Declares a function of candle-flash-attn: its arguments in their order, and the options and sequences to which
/// they translate.
macro_rules! flash_attn {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) => $options:expr $(, $sequences:expr)?;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// As [the crate](crate) says.
        #[allow(clippy::too_many_arguments, reason = "the signature is candle-flash-attn's")]
        pub fn $name(q: &Tensor, k: &Tensor, v: &Tensor, $($argument: $type),*) -> Result<Tensor> {
            flash_attn!(@run q, k, v, $options $(, $sequences)?)
        }
    )*};
    (@run $q:ident, $k:ident, $v:ident, $options:expr) => { Ok(attention($q, $k, $v, &$options)?.0) };
    (@run $q:ident, $k:ident, $v:ident, $options:expr, $sequences:expr) => {
        Ok(attention_varlen($q, $k, $v, &$sequences, &$options)?.0)
    };
}

fn scaled(softmax_scale: f32, left: Option<usize>, right: Option<usize>) -> Options {
    Options::default().softmax_scale(softmax_scale).window(left, right).allow_fallback(true)
}

fn sequences(seqlens_q: &Tensor, seqlens_k: &Tensor, max_seqlen_q: usize, max_seqlen_k: usize) -> Sequences {
    let (seqlens_q, seqlens_k) = (seqlens_q.clone(), seqlens_k.clone());
    Sequences { seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k, block_table: None }
}

flash_attn! {
    /// Attention of equal lengths, `[batch, seqlen, num_heads, head_dim]` each; K and V may have fewer heads.
    flash_attn(softmax_scale: f32, causal: bool) => scaled(softmax_scale, None, causal_window(causal));

    /// [`flash_attn`] with a window of the keys for each query.
    flash_attn_windowed(
        softmax_scale: f32, window_size_left: Option<usize>, window_size_right: Option<usize>
    ) => scaled(softmax_scale, window_size_left, window_size_right);

    /// [`flash_attn`] with ALiBi's slopes, f32 `[num_heads_q]`.
    flash_attn_alibi(alibi_slopes: &Tensor, softmax_scale: f32, causal: bool) =>
        scaled(softmax_scale, None, causal_window(causal)).alibi_slopes(alibi_slopes.clone());

    /// [`flash_attn_alibi`] with a window of the keys for each query.
    flash_attn_alibi_windowed(
        alibi_slopes: &Tensor, softmax_scale: f32, window_size_left: Option<usize>, window_size_right: Option<usize>
    ) => scaled(softmax_scale, window_size_left, window_size_right).alibi_slopes(alibi_slopes.clone());

    /// [`flash_attn_windowed`] with ALiBi's slopes, if there are any, and a soft-cap of the scores.
    flash_attn_alibi_windowed_softcap(
        alibi_slopes: Option<&Tensor>, softmax_scale: f32, window_size_left: Option<usize>,
        window_size_right: Option<usize>, softcap: f32
    ) => scaled(softmax_scale, window_size_left, window_size_right).alibi_slopes(alibi_slopes.cloned()).softcap(softcap);

    /// Attention of packed sequences, `[total, num_heads, head_dim]` each. `seqlens_q` and `seqlens_k`, u32
    /// `[batch + 1]`, say where each begins.
    flash_attn_varlen(
        seqlens_q: &Tensor, seqlens_k: &Tensor, max_seqlen_q: usize, max_seqlen_k: usize, softmax_scale: f32,
        causal: bool
    ) => scaled(softmax_scale, None, causal_window(causal)),
        sequences(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);

    /// [`flash_attn_varlen`] with a window of its sequence's keys for each query.
    flash_attn_varlen_windowed(
        seqlens_q: &Tensor, seqlens_k: &Tensor, max_seqlen_q: usize, max_seqlen_k: usize, softmax_scale: f32,
        window_size_left: Option<usize>, window_size_right: Option<usize>
    ) => scaled(softmax_scale, window_size_left, window_size_right),
        sequences(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);

    /// [`flash_attn_varlen`] with ALiBi's slopes, f32 `[num_heads_q]`.
    flash_attn_varlen_alibi(
        alibi_slopes: &Tensor, seqlens_q: &Tensor, seqlens_k: &Tensor, max_seqlen_q: usize, max_seqlen_k: usize,
        softmax_scale: f32, causal: bool
    ) => scaled(softmax_scale, None, causal_window(causal)).alibi_slopes(alibi_slopes.clone()),
        sequences(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);

    /// [`flash_attn_varlen_alibi`] with a window of its sequence's keys for each query.
    flash_attn_varlen_alibi_windowed(
        alibi_slopes: &Tensor, seqlens_q: &Tensor, seqlens_k: &Tensor, max_seqlen_q: usize, max_seqlen_k: usize,
        softmax_scale: f32, window_size_left: Option<usize>, window_size_right: Option<usize>
    ) => scaled(softmax_scale, window_size_left, window_size_right).alibi_slopes(alibi_slopes.clone()),
        sequences(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);

    /// [`flash_attn_varlen_windowed`] with ALiBi's slopes, if there are any, and a soft-cap of the scores.
    flash_attn_varlen_alibi_windowed_softcap(
        alibi_slopes: Option<&Tensor>, seqlens_q: &Tensor, seqlens_k: &Tensor, max_seqlen_q: usize,
        max_seqlen_k: usize, softmax_scale: f32, window_size_left: Option<usize>, window_size_right: Option<usize>,
        softcap: f32
    ) => scaled(softmax_scale, window_size_left, window_size_right).alibi_slopes(alibi_slopes.cloned()).softcap(softcap),
        sequences(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);
}

/// [`flash_attn_varlen_windowed`] with K and V in pages, `[num_pages, page_block_size, num_heads_kv,
/// head_dim]`; `block_table`, u32 `[batch, max_pages]`, names the pages of a sequence's keys, and the
/// differences of `seqlens_k` their number.
///
/// # Errors
/// As [the crate](crate) says; `mm_prefix_ranges` where there are any, since the contract has no such mask;
/// `page_block_size` where K's pages have another size.
#[allow(clippy::too_many_arguments, reason = "the signature is candle-flash-attn's")]
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    if let Some(ranges) = mm_prefix_ranges {
        bail!(
            "mm_prefix_ranges {:?}: keys that a range of queries sees beyond the mask are not in fmha's contract",
            ranges.dims()
        );
    }
    let (_, page_size, _, _) = k.dims4()?;
    if page_size != page_block_size {
        bail!("page_block_size {page_block_size}: the pages of k have {page_size} rows");
    }
    let mut sequences = sequences(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);
    sequences.block_table = Some(block_table.clone());
    let options = scaled(softmax_scale, window_size_left, window_size_right).softcap(softcap);
    Ok(attention_varlen(q, k, v, &sequences, &options)?.0)
}
