//! Kernels that every vendor has, with their checks and launches: a warp or wave computes one row after another.

mod choose;
mod combine;
mod index_loss;
pub mod lists;
mod quantize;
mod simt;
pub(crate) mod small;
pub mod tile_list;
pub mod update;
mod values;

pub use choose::{Choose, NoIndexer, ScoresIndex, SimtIndexer};
pub use combine::Combine;
pub use index_loss::{IndexLoss, IndexProducts, MultipliesLists, SimtLists};
pub use quantize::Quantize;
pub use simt::{Simt, SimtBwd};
pub use values::{BlockValues, OfValues, ReadsValues};

/// A kernel that every vendor has, compiled for one constant, `kSpec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKernel {
    /// The forward, of a [`FwdSpec`](fmha_core::spec::FwdSpec).
    Simt,
    /// The forward over lists of keys, of a [`FwdSpec`](fmha_core::spec::FwdSpec).
    SimtLists,
    /// The forward over two caches, of a [`FwdSpec`](fmha_core::spec::FwdSpec).
    SimtTwoCaches,
    /// LSE and delta of the backward's queries over lists of keys, of a [`BwdSpec`](fmha_core::spec::BwdSpec).
    SimtListsStats,
    /// Every gradient over lists of keys, of a [`BwdSpec`](fmha_core::spec::BwdSpec).
    SimtListsBwd,
    /// LSE and delta of the backward's queries, of a [`BwdSpec`](fmha_core::spec::BwdSpec).
    SimtStats,
    /// Every gradient, of a [`BwdSpec`](fmha_core::spec::BwdSpec).
    SimtBwd,
    /// [`Simt`](Self::Simt) with masks as data (tensors), whose parameters follow the forward's.
    MaskedSimt,
    /// [`Simt`](Self::Simt) with scales by blocks, whose parameters follow the forward's.
    ScaledSimt,
    /// [`SimtStats`](Self::SimtStats) with masks as data (tensors).
    MaskedSimtStats,
    /// [`SimtBwd`](Self::SimtBwd) with masks as data (tensors).
    MaskedSimtBwd,
    /// Writes the gradients of captured tensors from their sums, for a [`BwdSpec`](fmha_core::spec::BwdSpec): each
    /// lane of a group writes one element.
    SimtCaptured,
    /// Writes the statistics of each query row for small outputs, for a [`FwdSpec`](fmha_core::spec::FwdSpec); with
    /// `masked` the masks' parameters follow.
    SmallRows {
        /// Whether the call has masks as data (intervals, bits, lists of blocks).
        masked: bool,
    },
    /// Writes the greatest score of each head, for a [`FwdSpec`](fmha_core::spec::FwdSpec); with `masked` the
    /// masks' parameters follow, but are not read.
    SmallHeads {
        /// Whether the call has masks as data (intervals, bits, lists of blocks).
        masked: bool,
    },
    /// Writes each key's sum of probabilities, for a [`FwdSpec`](fmha_core::spec::FwdSpec); with `masked` the
    /// masks' parameters follow.
    SmallKeys {
        /// Whether the call has masks as data (intervals, bits, lists of blocks).
        masked: bool,
    },
    /// The merge of partial results, of a [`CombineSpec`](fmha_core::spec::CombineSpec).
    Combine,
    /// Writes scores of an indexer, for an [`IndexSpec`](fmha_core::choose_params::IndexSpec): each lane of a group
    /// scores one key of a row.
    IndexScores,
    /// Writes scores of blocks; the spec is a dummy literal. Each lane of a group scores one block.
    BlockScores,
    /// Writes lists of the greatest scores; the spec is an i32 with the number of the step (`choose_row.h`). A
    /// group of threads handles a row, or a part of a row.
    Choose,
    /// The kernel that finds the largest magnitudes of a tensor, for a
    /// [`QuantizeSpec`](fmha_core::quantize_params::QuantizeSpec): each group of lanes writes one number.
    QuantizeMaxima,
    /// The kernel that computes a tensor's scale from these magnitudes, for a
    /// [`QuantizeSpec`](fmha_core::quantize_params::QuantizeSpec).
    QuantizeScale,
    /// The kernel that converts a tensor to a format with scales by blocks, for a
    /// [`QuantizeSpec`](fmha_core::quantize_params::QuantizeSpec): each lane converts a block.
    Quantize,
    /// The kernel that converts Q, K and V with scales by blocks to plain numbers, for a
    /// [`BlockValuesSpec`](fmha_core::value_params::BlockValuesSpec): each lane converts 16 columns of a row.
    BlockValues,
    /// Scores of lists' entries, of an [`IndexLossSpec`](fmha_core::index_loss_params::IndexLossSpec): a lane takes an
    /// entry.
    IndexLossScores,
    /// An indexer's loss and the gradients of its scores, of an
    /// [`IndexLossSpec`](fmha_core::index_loss_params::IndexLossSpec).
    IndexLoss {
        /// Whether zeros are written to the gradients of keys, to which other launches add.
        clears: bool,
    },
    /// Gradients of an indexer's q and weights, of an
    /// [`IndexLossSpec`](fmha_core::index_loss_params::IndexLossSpec).
    IndexLossQueries,
    /// Gradients of an indexer's keys, of an [`IndexLossSpec`](fmha_core::index_loss_params::IndexLossSpec).
    IndexLossKeys,
    /// The update of a KV cache, of a [`CacheSpec`](fmha_core::cache_update::CacheSpec).
    UpdateCache,
}

/// A row kernel of which each vendor has its own text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnText {
    /// The merge of partial results: [`RowKernel::Combine`].
    Combine,
    /// The update of a KV cache: [`RowKernel::UpdateCache`].
    UpdateCache,
    /// The choice of keys: [`RowKernel::Choose`].
    Choose,
}

impl RowKernel {
    /// Header, parameters and call of a kernel whose text every vendor shares (`fmha/simt`).
    ///
    /// # Errors
    /// The kernel, if each vendor has its own text.
    pub fn shared_text(self) -> Result<[&'static str; 3], OwnText> {
        const CHOOSE: &str = "fmha/simt/choose.h";
        const FWD: &str = "fmha/simt/fwd.h";
        const BWD: &str = "fmha/simt/bwd.h";
        const LISTS: &str = "fmha/simt/lists.h";
        const LISTS_BWD: &str = "fmha/simt/lists_bwd.h";
        const MASKED: &str = "fmha/simt/masked.h";
        const FWD_LISTS: &str = "FwdParams p, ListParams lists";
        const BWD_LISTS: &str = "BwdParams p, ListParams lists";
        const FWD_MASKS: &str = "FwdParams p, MaskDataParams m";
        const BWD_MASKS: &str = "BwdParams p, MaskDataParams m";
        const LOSS: &str = "fmha/simt/index_loss.h";
        const LOSS_PARAMS: &str = "IndexLossParams p";
        const QUANTIZE: &str = "fmha/simt/quantize.h";
        const SMALL: &str = "fmha/simt/small.h";
        const SMALL_PARAMS: &str = "FwdParams p, SmallParams s";
        const SMALL_MASKS: &str = "FwdParams p, SmallParams s, MaskDataParams m";
        Ok(match self {
            Self::Simt => [FWD, "FwdParams p", "simt::fwd<kSpec>(p);"],
            Self::SimtStats => [BWD, "BwdParams p", "simt::bwd_stats<kSpec>(p);"],
            Self::SimtBwd => [BWD, "BwdParams p", "simt::bwd<kSpec>(p);"],
            Self::SimtCaptured => [BWD, "BwdParams p", "simt::bwd_captured<kSpec>(p);"],
            Self::SimtLists => [LISTS, FWD_LISTS, "simt::fwd_lists<kSpec>(p, lists);"],
            Self::SimtTwoCaches => [
                "fmha/simt/two_caches.h",
                "FwdParams p, TwoCachesParams caches",
                "simt::fwd_two_caches<kSpec>(p, caches);",
            ],
            Self::SimtListsStats => [LISTS_BWD, BWD_LISTS, "simt::bwd_lists_stats<kSpec>(p, lists);"],
            Self::SimtListsBwd => [LISTS_BWD, BWD_LISTS, "simt::bwd_lists<kSpec>(p, lists);"],
            Self::MaskedSimt => [MASKED, FWD_MASKS, "simt::masked_fwd<kSpec>(p, m);"],
            Self::MaskedSimtStats => [MASKED, BWD_MASKS, "simt::masked_bwd_stats<kSpec>(p, m);"],
            Self::MaskedSimtBwd => [MASKED, BWD_MASKS, "simt::masked_bwd<kSpec>(p, m);"],
            Self::SmallRows { masked: false } => [SMALL, SMALL_PARAMS, "simt::small_rows<kSpec>(p, s);"],
            Self::SmallRows { masked: true } => {
                [SMALL, SMALL_MASKS, "simt::small_rows<kSpec>(p, s, ShownPairs<true>{DataMasks{m}, p});"]
            }
            Self::SmallHeads { masked: false } => [SMALL, SMALL_PARAMS, "simt::small_heads<kSpec>(p, s);"],
            Self::SmallHeads { masked: true } => [SMALL, SMALL_MASKS, "simt::small_heads<kSpec>(p, s);"],
            Self::SmallKeys { masked: false } => [SMALL, SMALL_PARAMS, "simt::small_keys<kSpec>(p, s);"],
            Self::SmallKeys { masked: true } => {
                [SMALL, SMALL_MASKS, "simt::small_keys<kSpec>(p, s, ShownPairs<true>{DataMasks{m}, p});"]
            }
            Self::ScaledSimt => [
                "fmha/simt/scaled.h",
                "FwdParams p, BlockScaleParams scales",
                "simt::scaled_fwd<kSpec>(p, scales);",
            ],
            Self::Combine => return Err(OwnText::Combine),
            Self::UpdateCache => return Err(OwnText::UpdateCache),
            Self::Choose => return Err(OwnText::Choose),
            Self::QuantizeMaxima => [QUANTIZE, "QuantizeParams p", "simt::quantize_maxima<kSpec>(p);"],
            Self::QuantizeScale => [QUANTIZE, "QuantizeParams p", "simt::quantize_scale<kSpec>(p);"],
            Self::Quantize => [QUANTIZE, "QuantizeParams p", "simt::quantize_blocks<kSpec>(p);"],
            Self::BlockValues => [
                "fmha/simt/block_values.h",
                "FwdParams p, BlockScaleParams scales, BlockValuesParams to",
                "simt::write_values<kSpec>(p, scales, to);",
            ],
            Self::IndexLossScores => [LOSS, LOSS_PARAMS, "simt::index_loss_scores<kSpec>(p);"],
            Self::IndexLoss { clears: false } => [LOSS, LOSS_PARAMS, "simt::index_loss<kSpec, false>(p);"],
            Self::IndexLoss { clears: true } => [LOSS, LOSS_PARAMS, "simt::index_loss<kSpec, true>(p);"],
            Self::IndexLossQueries => [LOSS, LOSS_PARAMS, "simt::index_loss_queries<kSpec>(p);"],
            Self::IndexLossKeys => [LOSS, LOSS_PARAMS, "simt::index_loss_keys<kSpec>(p);"],
            Self::IndexScores => [CHOOSE, "ChooseParams p", "simt::index_scores<kSpec>(p);"],
            Self::BlockScores => [CHOOSE, "ChooseParams p", "simt::block_scores(p);"],
        })
    }
}
