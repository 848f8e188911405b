//! Keys that come while kernels wait for them: every rank's copy engine puts its K and V, piece by piece,
//! where the others' kernels read them, and sets each piece's flag there.
//!
//! ```text
//!  rank 0   await free[1]   K0 V0 ─► rank 1, flag    K3 V3 ─► rank 1, flag
//!           one launch      keys 3   keys 2 (flag 2)   keys 1 (flag 1)   keys 0        end: flags back to 0, free[0] of rank 1
//! ```
//!
//! No kernel moves anything, so a launch that fills the device may wait. Nothing waits on the host, and what
//! streams wait for is 1 or 0, not a run's number: a captured run can be replayed.
//!
//! [`Coming`] is what a program says of it: which [`Piece`]s go where. When ranks plan they map each other's
//! buffers and [`words`], by [`names`]; what they then have is a [`Meeting`], whose [`steps`] a run queues,
//! while a thread [`watch`]es for what comes late.

mod meeting;
mod names;
mod pieces;
mod steps;
mod watch;
mod words;

pub(crate) use meeting::{Meeting, page};
pub(crate) use pieces::{Piece, pieces};

use std::collections::BTreeSet;

use crate::group::Block;
use crate::program::Buf;

/// Rows of a rank's own tensor, and where they go in the whole's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) from: (Buf, Block),
    pub(crate) to: (Buf, Block),
}

impl Rows {
    /// Source, destination and length of each stretch, in bytes.
    fn stretches(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        let ((_, from), (_, to)) = (self.from, self.to);
        (0..from.rows)
            .map(move |row| (from.offset + row * from.stride, to.offset + row * to.stride, from.row_bytes))
    }
}

/// dK and dV on their way to the owners of their keys.
#[derive(Clone, Debug)]
pub(crate) struct Home {
    /// Destination of the gradients of this rank's keys: a slot for each rank, in rank order.
    pub(crate) slots: [Buf; 2],
    /// Rows of dK and dV that no later kernel changes, and the rank that they go to, for each kernel.
    pub(crate) steps: Vec<Vec<(u32, [Rows; 2])>>,
    /// Ranks from which dK and dV come home to this one.
    pub(crate) from: Vec<u32>,
}

impl Home {
    /// Bytes that go behind a kernel.
    pub(crate) fn bytes_sent(&self, step: usize) -> u64 {
        self.steps[step].iter().flat_map(|(_, rows)| rows).map(|rows| rows.from.1.bytes()).sum()
    }
}

/// Program's part for keys that arrive.
#[derive(Clone, Debug)]
pub(crate) struct Coming {
    pub(crate) pieces: Vec<Piece>,
    /// Buffers of K and V of the whole.
    pub(crate) buffers: [Buf; 2],
    /// K and V of this rank's own rows.
    pub(crate) own: Vec<Rows>,
    /// Sends in order: the destination rank, the piece, and its K and V.
    pub(crate) sends: Vec<(u32, usize, [Rows; 2])>,
    /// Pieces that other ranks send to this one.
    pub(crate) expected: Vec<usize>,
    /// Gradients that go back to the owners of their keys, in a backward.
    pub(crate) home: Option<Home>,
}

impl Coming {
    /// Bytes that this rank sends to others.
    pub(crate) fn bytes_sent(&self) -> u64 {
        self.sends.iter().flat_map(|(.., rows)| rows).map(|rows| rows.from.1.bytes()).sum()
    }

    /// The buffers that other ranks write.
    pub(crate) fn all_buffers(&self) -> Vec<Buf> {
        self.buffers.into_iter().chain(self.home.iter().flat_map(|home| home.slots)).collect()
    }

    fn receivers(&self) -> BTreeSet<u32> {
        self.sends.iter().map(|&(peer, ..)| peer).collect()
    }

    fn senders(&self) -> BTreeSet<u32> {
        self.expected.iter().map(|&piece| self.pieces[piece].owner).collect()
    }
}
