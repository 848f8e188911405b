//! Ranks that compute together, and what they move.
//!
//! ```text
//!  Group     rank, size; share (a few bytes of each to all); exchange (rows of buffers); fail
//!    Host    over a Link: threads of one process, or TCP between processes
//!    Nccl    over a communicator of NCCL or RCCL, on a stream
//! ```
//!
//! All that attention moves is one [`Exchange`]: rows of some buffers to some ranks and from some ranks, at once. A step of a
//! ring, an all-gather and an all-to-all are exchanges, and so is a copy, which is a rank's parcel to itself. An exchange is
//! planned once, so that each rank knows how many bytes every other one sends.

mod host;
mod nccl;
mod tcp;
mod threads;

use std::time::Duration;

use fmha::{DevSlice, DevSliceMut, MemorySpace, Stream};

pub use host::Host;
pub use nccl::Nccl;
pub use tcp::{Rendezvous, connect};
pub use threads::threads;

use crate::error::{Error, Result};

/// Rows of one buffer, in bytes: `rows` of them, `row_bytes` long and `stride` apart, the first at `offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Where the first begins.
    pub offset: u64,
    /// How many there are.
    pub rows: u64,
    /// Bytes of each.
    pub row_bytes: u64,
    /// From one to the next.
    pub stride: u64,
}

impl Block {
    /// All bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.rows * self.row_bytes
    }

    /// One past the last byte.
    #[must_use]
    pub fn end(&self) -> u64 {
        if self.bytes() == 0 { 0 } else { self.offset + (self.rows - 1) * self.stride + self.row_bytes }
    }

    /// The same bytes as one row, where rows lie one behind the other.
    pub(crate) fn as_one_row(&self) -> Self {
        Self { rows: 1, row_bytes: self.bytes(), stride: self.bytes(), ..*self }
    }

    /// The contiguous stretches that it consists of, `(offset, bytes)`: one where rows lie one behind the other.
    pub(crate) fn stretches(self) -> impl Iterator<Item = (u64, u64)> {
        let (count, bytes) =
            if self.stride == self.row_bytes { (1, self.bytes()) } else { (self.rows, self.row_bytes) };
        (0..count).map(move |row| (self.offset + row * self.stride, bytes)).filter(|&(_, bytes)| bytes > 0)
    }
}

/// A block that goes to a rank or comes from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parcel {
    /// The other rank, or this one.
    pub peer: u32,
    /// Which of the call's buffers.
    pub buffer: usize,
    /// The rows.
    pub block: Block,
}

/// What moves at once. The parcels to a rank are, one by one, as long as those that it expects of this one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exchange {
    /// From `sources` to other ranks.
    pub sends: Vec<Parcel>,
    /// From other ranks into `sinks`. No two overlap.
    pub receives: Vec<Parcel>,
}

impl Exchange {
    /// How many rows move, in or out: each is a message on GPUs.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.sends.iter().chain(&self.receives).map(|parcel| parcel.block.rows).sum()
    }

    /// Bytes that leave this rank for others.
    #[must_use]
    pub fn bytes_sent(&self, rank: u32) -> u64 {
        self.sends.iter().filter(|parcel| parcel.peer != rank).map(|parcel| parcel.block.bytes()).sum()
    }

    /// Whether every block lies in its buffer.
    ///
    /// # Errors
    /// The first that does not, as a fault of `rank`.
    pub(crate) fn check(&self, rank: u32, sources: &[DevSlice<'_>], sinks: &[DevSliceMut<'_>]) -> Result<()> {
        let sources: Vec<u64> = sources.iter().map(DevSlice::bytes).collect();
        let sinks: Vec<u64> = sinks.iter().map(DevSliceMut::bytes).collect();
        for (parcels, room) in [(&self.sends, &sources), (&self.receives, &sinks)] {
            for Parcel { buffer, block, .. } in parcels {
                let bytes = room.get(*buffer).copied().unwrap_or(0);
                if block.end() > bytes {
                    let text = format!("buffer {buffer} has {bytes} bytes, but {} are moved", block.end());
                    return Err(Error::new(rank, "exchange", text));
                }
            }
        }
        Ok(())
    }
}

/// Ranks that compute together. Every rank makes the same calls in the same order.
///
/// What fails on one rank fails on all: an error names the rank whose fault it is, and after one no call succeeds. Nothing
/// waits longer than the group's timeout.
pub trait Group: Send + Sync {
    /// Which of them this one is.
    fn rank(&self) -> u32;

    /// How many there are.
    fn size(&self) -> u32;

    /// Where the buffers of an exchange lie.
    fn space(&self) -> MemorySpace;

    /// A few bytes of each rank to all, by rank. Waits on the host.
    ///
    /// # Errors
    /// The rank that is gone, late or has failed.
    fn share(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Moves rows, in the order of `stream`; on the host they have moved when it returns.
    ///
    /// # Errors
    /// As [`share`](Self::share); a block outside its buffer; a rank that sends another number of bytes.
    fn exchange(
        &self,
        exchange: &Exchange,
        sources: &[DevSlice<'_>],
        sinks: &mut [DevSliceMut<'_>],
        stream: &Stream,
    ) -> Result<()>;

    /// Rows that an exchange may have at most, those that go and those that come; a plan with more is refused.
    fn most_rows(&self) -> u64 {
        u64::MAX
    }

    /// How long a rank waits for another one.
    fn timeout(&self) -> Duration {
        Duration::from_secs(60)
    }

    /// What has gone wrong on any rank so far, as far as it is known here.
    fn failure(&self) -> Option<Error> {
        None
    }

    /// Tells every rank that this one cannot go on, and why; gives the error that all have from now on: the first.
    fn fail(&self, error: Error) -> Error;
}
