//! Recipes of the kernels that every vendor has in its own text: a warp or a wave takes rows one after another.

mod combine;
mod simt;
pub(crate) mod small;
pub mod update;

pub use combine::Combine;
pub use simt::{Simt, SimtBwd};

/// A kernel that every vendor has. Each is compiled for one constant, `kSpec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKernel {
    /// The forward, of a [`FwdSpec`](fmha_core::spec::FwdSpec).
    Simt,
    /// The forward over lists of keys, of a [`FwdSpec`](fmha_core::spec::FwdSpec).
    SimtLists,
    /// LSE and delta of the backward's queries over lists of keys, of a [`BwdSpec`](fmha_core::spec::BwdSpec).
    SimtListsStats,
    /// Every gradient over lists of keys, of a [`BwdSpec`](fmha_core::spec::BwdSpec).
    SimtListsBwd,
    /// LSE and delta of the backward's queries, of a [`BwdSpec`](fmha_core::spec::BwdSpec).
    SimtStats,
    /// Every gradient, of a [`BwdSpec`](fmha_core::spec::BwdSpec).
    SimtBwd,
    /// [`Simt`](Self::Simt) under masks as data: their parameters follow the forward's.
    MaskedSimt,
    /// [`SimtStats`](Self::SimtStats) under masks as data.
    MaskedSimtStats,
    /// [`SimtBwd`](Self::SimtBwd) under masks as data.
    MaskedSimtBwd,
    /// The gradients of captured tensors from their sums, of a [`BwdSpec`](fmha_core::spec::BwdSpec): a group of lanes
    /// takes as many elements.
    SimtCaptured,
    /// Numbers that small outputs need of each query row, of a [`FwdSpec`](fmha_core::spec::FwdSpec); with `masked` the
    /// masks' parameters follow.
    SmallRows {
        /// Whether there are masks as data.
        masked: bool,
    },
    /// The greatest score of each head, of a [`FwdSpec`](fmha_core::spec::FwdSpec); with `masked` the masks'
    /// parameters follow, unread.
    SmallHeads {
        /// Whether there are masks as data.
        masked: bool,
    },
    /// Each key's sum of probabilities, of a [`FwdSpec`](fmha_core::spec::FwdSpec); with `masked` the masks'
    /// parameters follow.
    SmallKeys {
        /// Whether there are masks as data.
        masked: bool,
    },
    /// The merge of partial results, of a [`CombineSpec`](fmha_core::spec::CombineSpec).
    Combine,
    /// The update of a KV cache, of a [`CacheSpec`](fmha_core::cache_update::CacheSpec).
    UpdateCache,
}
