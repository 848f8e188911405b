//! Ranks that compute together, and what they move.
//!
//! ```text
//!  Group     rank, size; share (a few bytes of each to all); exchange (rows of buffers); all_gather; fail
//!    Host    over a Link: threads of one process, or TCP between processes
//!    Nccl    over a communicator of NCCL or RCCL, on a stream
//! ```
//!
//! All that attention moves is one [`Exchange`]: rows of some buffers to some ranks and from some ranks, at
//! once. A step of a ring, an all-gather and an all-to-all are exchanges, and so is a copy, which is a rank's
//! parcel to itself. An exchange is planned once, so that each rank knows how many bytes every other one
//! sends. What all ranks send to all, and is as long on each, is an `all_gather`, which a group may do as one
//! call in place of a message to and from every rank.

mod host;
mod nccl;
mod tcp;
mod threads;

use std::sync::Arc;
use std::time::Duration;

use fmha::{DevSlice, DevSliceMut, MemorySpace, Stream};

pub use host::Host;
pub use nccl::Nccl;
pub use tcp::{MAX_RANKS, Rendezvous, connect};
pub use threads::threads;

use crate::error::{Error, Result};

/// Rows of one buffer, in bytes: `rows` of them, `row_bytes` long and `stride` apart, the first at `offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Offset of the first row.
    pub offset: u64,
    /// Number of rows.
    pub rows: u64,
    /// Bytes of each row.
    pub row_bytes: u64,
    /// Bytes from one row to the next.
    pub stride: u64,
}

impl Block {
    /// Number of bytes of all rows.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.rows.saturating_mul(self.row_bytes)
    }

    /// One past the last byte.
    #[must_use]
    pub fn end(&self) -> u64 {
        if self.bytes() == 0 {
            return 0;
        }
        let last = (self.rows - 1).saturating_mul(self.stride);
        self.offset.saturating_add(last).saturating_add(self.row_bytes)
    }

    /// Block of the same bytes as one row, for rows without gaps between them.
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
    /// Index of the buffer among those of the call.
    pub buffer: usize,
    /// The rows.
    pub block: Block,
}

/// Moves of one exchange. The parcels to a rank are, one by one, as long as those that it expects from this
/// rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exchange {
    /// Parcels from `sources` to other ranks.
    pub sends: Vec<Parcel>,
    /// Parcels from other ranks into `sinks`. No two overlap.
    pub receives: Vec<Parcel>,
}

impl Exchange {
    /// Number of rows that move, in or out: each is a message on GPUs.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.sends.iter().chain(&self.receives).map(|parcel| parcel.block.rows).sum()
    }

    /// Bytes that leave this rank for others.
    #[must_use]
    pub fn bytes_sent(&self, rank: u32) -> u64 {
        self.sends.iter().filter(|parcel| parcel.peer != rank).map(|parcel| parcel.block.bytes()).sum()
    }

    /// Checks that every parcel's rank is below the number of ranks, and that its block lies in its buffer.
    ///
    /// # Errors
    /// The first of which that is not so, as a fault of `rank`.
    pub(crate) fn check(
        &self,
        (rank, size): (u32, u32),
        sources: &[DevSlice<'_>],
        sinks: &[DevSliceMut<'_>],
    ) -> Result<()> {
        let wrong = |text: String| Err(Error::new(rank, "exchange", text));
        let sources: Vec<u64> = sources.iter().map(DevSlice::bytes).collect();
        let sinks: Vec<u64> = sinks.iter().map(DevSliceMut::bytes).collect();
        for (parcels, room) in [(&self.sends, &sources), (&self.receives, &sinks)] {
            for Parcel { peer, buffer, block } in parcels {
                if *peer >= size {
                    return wrong(format!("rank {peer} is none of {size}"));
                }
                let Some(&bytes) = room.get(*buffer) else {
                    return wrong(format!("buffer {buffer} is none of {}", room.len()));
                };
                // A block whose rows overlap moves more bytes than lie up to its end.
                let moved = block.end().max(block.bytes());
                if moved > bytes {
                    return wrong(format!("buffer {buffer} has {bytes} bytes, but {moved} are moved"));
                }
            }
        }
        Ok(())
    }
}

/// Checks that a stretch for each rank lies in a buffer.
///
/// # Errors
/// Both sizes, as a fault of `rank`.
fn check_stretches(rank: u32, size: u32, bytes: u64, all: &DevSliceMut<'_>) -> Result<()> {
    let (wanted, given) = (u64::from(size).saturating_mul(bytes), all.bytes());
    if given < wanted {
        return Err(Error::new(
            rank,
            "exchange",
            format!("buffer 0 has {given} bytes, but {wanted} are moved"),
        ));
    }
    Ok(())
}

/// Ranks that compute together. Every rank makes the same calls in the same order.
///
/// A call that fails on one rank fails on all: an error names the rank whose fault it is, and after one no call
/// succeeds. Nothing waits longer than the group's timeout.
pub trait Group: Send + Sync {
    /// Index of this rank.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn size(&self) -> u32;

    /// Memory space of the buffers of an exchange.
    fn space(&self) -> MemorySpace;

    /// A call begins, of a plan whose ranks have agreed on these fields. A group that keeps them can name the
    /// rank and the field where some ranks plan anew and others run what was planned before, or run another
    /// call: at once where ranks wait for each other on the host, later, by [`failure`](Self::failure), where
    /// they do not.
    ///
    /// # Errors
    /// The rank that is at another call, and the field that differs; as [`share`](Self::share).
    fn begins(&self, planned: &Arc<[(String, String)]>) -> Result<()> {
        let _ = planned;
        Ok(())
    }

    /// The call that has begun is over, whatever became of it. Ranks of a group in host memory wait for each
    /// other no longer than the timeout in a whole call.
    fn ends(&self) {}

    /// Number of calls that have begun; 0 on every rank if the group keeps no count.
    fn calls(&self) -> u64 {
        0
    }

    /// A few bytes of each rank to all, by rank. Waits on the host.
    ///
    /// # Errors
    /// The rank that is gone, late or has failed.
    fn share(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Moves rows, in the order of `stream`; on the host they have moved when it returns.
    ///
    /// # Errors
    /// As [`share`](Self::share); a rank or a buffer that is not there, a block outside its buffer; a rank
    /// that sends another number of bytes.
    fn exchange(
        &self,
        exchange: &Exchange,
        sources: &[DevSlice<'_>],
        sinks: &mut [DevSliceMut<'_>],
        stream: &Stream,
    ) -> Result<()>;

    /// Brings what each rank has to all, in place and in the order of `stream`: `all` has a stretch of so
    /// many bytes for each rank, by rank, of which this rank's own is filled.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    fn all_gather(&self, bytes: u64, all: &mut DevSliceMut<'_>, stream: &Stream) -> Result<()> {
        let (rank, size) = (self.rank(), self.size());
        check_stretches(rank, size, bytes, all).map_err(|error| self.fail(error))?;
        let at = |rank: u32| u64::from(rank) * bytes;
        let block = |offset| Block { offset, rows: 1, row_bytes: bytes, stride: bytes };
        let (space, first) = (all.space(), all.as_mut_ptr());
        let place = |rank: u32| first.wrapping_add(at(rank) as usize);
        // SAFETY: this rank's stretch lies inside `all`, as was checked. It is borrowed as long as this is,
        // and nothing writes it.
        let own = unsafe { DevSlice::from_raw(space, place(rank), bytes, all.elem()) };
        // Stretches of the ranks below, and of the ranks above.
        let mut sinks = Vec::new();
        let mut exchange = Exchange::default();
        for ranks in [0..rank, rank + 1..size] {
            if ranks.is_empty() || bytes == 0 {
                continue;
            }
            for peer in ranks.clone() {
                exchange.sends.push(Parcel { peer, buffer: 0, block: block(0) });
                exchange.receives.push(Parcel {
                    peer,
                    buffer: sinks.len(),
                    block: block(at(peer - ranks.start)),
                });
            }
            // SAFETY: this rank's stretch lies inside `all`, as was checked. It is borrowed as long as this
            // is, and nothing writes it, and neither the other sink nor `own` has a byte of it.
            sinks.push(unsafe {
                DevSliceMut::from_raw(space, place(ranks.start), at(ranks.len() as u32), all.elem())
            });
        }
        self.exchange(&exchange, &[own], &mut sinks, stream)
    }

    /// Rows that an exchange may have at most, those that go and those that come; a plan with more is refused.
    fn most_rows(&self) -> u64 {
        u64::MAX
    }

    /// Time that a rank waits for another one.
    fn timeout(&self) -> Duration {
        Duration::from_secs(60)
    }

    /// First failure of any rank, if this rank knows of one.
    fn failure(&self) -> Option<Error> {
        None
    }

    /// Tells every rank that this one cannot go on, and why; gives the error that all have from now on: the first.
    fn fail(&self, error: Error) -> Error;
}
