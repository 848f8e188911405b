//! Loads, stores, atomics, copies, barriers, and what lanes tell each other.

use crate::ast::{Space, Ty};

/// A load or store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access {
    pub(crate) space: Space,
    /// Bytes of one element: 1, 2, 4, 8 or 16.
    pub(crate) unit: u8,
    /// Elements.
    pub(crate) count: u8,
    pub(crate) signed: bool,
    pub(crate) offset: i64,
    /// `.acquire`, `.release`, `.volatile` and so on: synchronises, never races.
    pub(crate) strong: bool,
}

impl Access {
    /// Bytes of a lane's access, and of the part of it in one register.
    pub(crate) fn sizes(self) -> (usize, usize) {
        let unit = usize::from(self.unit);
        (if self.unit == 16 { 16 } else { unit * usize::from(self.count) }, unit.min(8))
    }
}

/// Atomic operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AtomOp {
    And,
    Or,
    Xor,
    Exch,
    Add,
    Inc,
    Dec,
    Min,
    Max,
    Cas,
}

/// `atom` and `red`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Atom {
    pub(crate) op: AtomOp,
    pub(crate) ty: Ty,
    pub(crate) space: Space,
    pub(crate) offset: i64,
    pub(crate) count: u8,
    pub(crate) acquire: bool,
    pub(crate) release: bool,
}

/// `shfl.sync` modes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shfl {
    Up,
    Down,
    Bfly,
    Idx,
}

/// `vote.sync` modes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Vote {
    All,
    Any,
    Uni,
    Ballot,
}

/// Receiver of an asynchronous copy's completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Completion {
    Mbarrier,
    BulkGroup,
}

/// Directions of `cp.async.bulk` and its tensor and reducing forms, and of `st.async`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Route {
    GlobalToShared,
    SharedToGlobal,
    SharedToCluster,
    /// `st.async`: up to four words, which stand in the place of coordinates.
    RegistersToCluster,
    /// L2 prefetch: checked, moves nothing.
    Prefetch,
}

/// `cp.async.bulk…`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bulk {
    pub(crate) route: Route,
    /// Tensor dimensions; 0 for the plain form.
    pub(crate) dims: u8,
    /// `.tile::gather4`: four rows of a matrix, each named by a coordinate.
    pub(crate) four_rows: bool,
    pub(crate) multicast: bool,
    pub(crate) reduce: Option<(AtomOp, Ty)>,
    pub(crate) completion: Completion,
    /// `.cta_group::2`: the barrier may live in the peer.
    pub(crate) pair: bool,
    /// Into `shared::cta`: the own block's, barrier included.
    pub(crate) own: bool,
    pub(crate) dst_offset: i64,
    pub(crate) src_offset: i64,
    pub(crate) bar_offset: i64,
}

/// mbarrier operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MbarOp {
    Init,
    Inval,
    /// `arrive`, with or without `.expect_tx`; `.drop`; `.noComplete`.
    Arrive {
        expect: bool,
        drop: bool,
        no_complete: bool,
    },
    ExpectTx,
    CompleteTx,
    Test {
        parity: bool,
        may_block: bool,
    },
    PendingCount,
    /// `cp.async.mbarrier.arrive`.
    CpAsyncArrive {
        no_inc: bool,
    },
}

/// One mbarrier instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mbar {
    pub(crate) op: MbarOp,
    pub(crate) space: Space,
    pub(crate) offset: i64,
    pub(crate) relaxed: bool,
    /// `.cluster`: what it orders, it orders between blocks too; else among the threads of one.
    pub(crate) of_cluster: bool,
}
