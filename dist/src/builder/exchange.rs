//! Rows that move between ranks, and copies of this rank's own.

use fmha::{DType, Merge};

use super::Builder;
use crate::error::Result;
use crate::group::{Block, Exchange, Parcel};
use crate::program::{Buf, Part, Step};

/// A side of an exchange that is being put together.
#[derive(Default)]
pub(crate) struct Moves {
    exchange: Exchange,
    sources: Vec<Buf>,
    sinks: Vec<Buf>,
}

fn number(bufs: &mut Vec<Buf>, buf: Buf) -> usize {
    bufs.iter().position(|&known| known == buf).unwrap_or_else(|| {
        bufs.push(buf);
        bufs.len() - 1
    })
}

impl Moves {
    pub(crate) fn send(&mut self, peer: u32, (buf, block): Part) {
        if block.bytes() > 0 {
            let buffer = number(&mut self.sources, buf);
            self.exchange.sends.push(Parcel { peer, buffer, block });
        }
    }

    pub(crate) fn receive(&mut self, peer: u32, (buf, block): Part) {
        if block.bytes() > 0 {
            let buffer = number(&mut self.sinks, buf);
            self.exchange.receives.push(Parcel { peer, buffer, block });
        }
    }

    pub(crate) fn send_all(&mut self, peer: u32, parts: Vec<Part>) {
        parts.into_iter().for_each(|part| self.send(peer, part));
    }

    pub(crate) fn receive_all(&mut self, peer: u32, parts: Vec<Part>) {
        parts.into_iter().for_each(|part| self.receive(peer, part));
    }

    /// Copies that a rank makes to itself, as pairs of source and destination with equal rows; `None` if
    /// their rows differ.
    fn of(&self, rank: u32) -> Option<Vec<(Part, Part)>> {
        let of = |parcels: &[Parcel], bufs: &[Buf]| -> Vec<Part> {
            let own = parcels.iter().filter(|parcel| parcel.peer == rank);
            own.map(|parcel| (bufs[parcel.buffer], parcel.block)).rev().collect()
        };
        let (mut from, mut to) =
            (of(&self.exchange.sends, &self.sources), of(&self.exchange.receives, &self.sinks));
        let mut pairs = Vec::new();
        while let (Some(source), Some(sink)) = (from.pop(), to.pop()) {
            if source.1.row_bytes != sink.1.row_bytes {
                return None;
            }
            let rows = source.1.rows.min(sink.1.rows);
            for (left, (buf, block)) in [(&mut from, source), (&mut to, sink)] {
                if block.rows > rows {
                    let offset = block.offset + rows * block.stride;
                    left.push((buf, Block { offset, rows: block.rows - rows, ..block }));
                }
            }
            pairs.push(((source.0, Block { rows, ..source.1 }), (sink.0, Block { rows, ..sink.1 })));
        }
        (from.is_empty() && to.is_empty()).then_some(pairs)
    }
}

/// A block of more rows than this is one message, packed before it moves and unpacked where it arrives if its
/// rows do not lie one behind the other: of fewer each is a message, of some microseconds.
const MOST_ROWS: u64 = 32;

fn is_long(block: Block) -> bool {
    block.rows > MOST_ROWS
}

/// Number of messages for a block of `rows` rows, packed by kernels or not.
pub(crate) fn messages(rows: u64, packs: bool) -> u64 {
    if packs && rows > MOST_ROWS { 1 } else { rows }
}

/// Rows that arrive packed in an exchange, and the scratch that becomes free when they are in place.
#[derive(Default)]
pub(crate) struct Came {
    unpack: Vec<(Part, Part, DType)>,
    scratch: Vec<(Buf, u64)>,
}

impl Builder<'_> {
    pub(crate) fn exchange(&mut self, moves: &Moves) -> Result<()> {
        let came = self.begin_exchange(moves)?;
        self.unpack(came)
    }

    /// An exchange of which what comes packed is not in its place before [`unpack`](Self::unpack).
    pub(crate) fn begin_exchange(&mut self, moves: &Moves) -> Result<Came> {
        let (mut packed, mut came, mut scratch) = (Moves::default(), Came::default(), Vec::new());
        let (rank, copies) = (self.rank(), self.copies(moves));
        let goes = |parcel: &&Parcel| copies.is_none() || parcel.peer != rank;
        for &Parcel { peer, buffer, block } in moves.exchange.sends.iter().filter(goes) {
            let part = (moves.sources[buffer], block);
            let as_one = self.as_one(part);
            if let Some((to, dtype)) = as_one.filter(|(to, _)| to.0 != part.0) {
                self.copy_by_kernel(part, to, dtype)?;
                scratch.push((to.0, block.bytes()));
            }
            packed.send(peer, as_one.map_or(part, |(to, _)| (to.0, to.1.as_one_row())));
        }
        for &Parcel { peer, buffer, block } in moves.exchange.receives.iter().filter(goes) {
            let part = (moves.sinks[buffer], block);
            let as_one = self.as_one(part);
            if let Some((from, dtype)) = as_one.filter(|(from, _)| from.0 != part.0) {
                came.unpack.push((from, part, dtype));
                came.scratch.push((from.0, block.bytes()));
            }
            packed.receive(peer, as_one.map_or(part, |(from, _)| (from.0, from.1.as_one_row())));
        }
        for (from, to, dtype) in copies.into_iter().flatten() {
            self.copy_by_kernel(from, to, dtype)?;
        }
        if packed.exchange != Exchange::default() {
            let Moves { exchange, sources, sinks } = packed;
            self.push(Step::Exchange { exchange, sources, sinks });
        }
        self.free.extend(scratch);
        Ok(came)
    }

    /// Copies inside this rank, each with source, destination and type. `None` unless one of them has many rows.
    fn copies(&self, moves: &Moves) -> Option<Vec<(Part, Part, DType)>> {
        let own = moves.of(self.rank())?;
        let is_long = own.iter().any(|(from, to)| is_long(from.1) || is_long(to.1));
        let copy = |(from, to): (Part, Part)| Some((from, to, self.dtype_of(from.0)?));
        if is_long { own.into_iter().map(copy).collect() } else { None }
    }

    /// Unpacks received rows to their places.
    pub(crate) fn unpack(&mut self, came: Came) -> Result<()> {
        for (from, to, dtype) in came.unpack {
            self.copy_by_kernel(from, to, dtype)?;
        }
        self.free.extend(came.scratch);
        Ok(())
    }

    /// Contiguous form of a block of many rows, and the type of its elements: the block itself if it is
    /// contiguous, or scratch. The choice is equal on the other rank, whose rows have the same count and
    /// type.
    fn as_one(&mut self, (buf, block): Part) -> Option<(Part, DType)> {
        let dtype = self.dtype_of(buf).filter(|_| is_long(block))?;
        if block.stride == block.row_bytes {
            return Some(((buf, block), dtype));
        }
        let whole = Block { offset: 0, stride: block.row_bytes, ..block };
        Some(((self.scratch(dtype, block.bytes()), whole), dtype))
    }

    /// Brings rows to where others lie, by a kernel of this device.
    fn copy_by_kernel(&mut self, from: Part, to: Part, dtype: DType) -> Result<()> {
        self.merge(to, vec![from], (dtype, dtype), Merge::Sum)
    }

    /// Brings an LSE of a piece alone into one of more rows, or back, by a kernel of this device.
    pub(super) fn copy_lse(&mut self, from: &[Part], to: &[Part]) -> Result<()> {
        let shape = |part: &Part| (part.1.rows, part.1.row_bytes);
        if !from.iter().map(shape).eq(to.iter().map(shape)) {
            return self.copy(from, to);
        }
        from.iter().zip(to).try_for_each(|(&from, &to)| self.copy_by_kernel(from, to, DType::F32))
    }

    /// Copies rows of this rank.
    pub(super) fn copy(&mut self, from: &[Part], to: &[Part]) -> Result<()> {
        let mut moves = Moves::default();
        let rank = self.rank();
        from.iter().for_each(|&part| moves.send(rank, part));
        to.iter().for_each(|&part| moves.receive(rank, part));
        self.exchange(&moves)
    }
}
