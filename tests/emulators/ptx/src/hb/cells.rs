//! What each four bytes of shared memory saw last, and whether a new access is ordered behind that.

use super::{Clocks, Exec, Tracker};
use crate::fault::{Fault, FaultKind};

/// What an access does to its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Touch {
    Read,
    Write,
}

/// Who accesses: track, epoch, instruction, lane.
pub(super) type Doer = (u32, u32, u32, usize);

/// One access, packed: track 12 bits, epoch 22, instruction 21, lane 5, bytes of the cell 4.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Access(u64);

impl Access {
    pub(super) fn new(track: u32, epoch: u32, pc: u32, lane: usize, bytes: u32) -> Self {
        let epoch = epoch.min((1 << 22) - 1);
        let pc = pc.min((1 << 21) - 1);
        Self(
            u64::from(track) << 52
                | u64::from(epoch) << 30
                | u64::from(pc) << 9
                | (lane as u64) << 4
                | u64::from(bytes),
        )
    }

    pub(super) fn track(self) -> u32 {
        (self.0 >> 52) as u32
    }

    pub(super) fn epoch(self) -> u32 {
        (self.0 >> 30) as u32 & 0x3f_ffff
    }

    pub(super) fn pc(self) -> u32 {
        (self.0 >> 9) as u32 & 0x1f_ffff
    }

    pub(super) fn lane(self) -> u32 {
        (self.0 >> 4) as u32 & 31
    }

    pub(super) fn bytes(self) -> u32 {
        self.0 as u32 & 15
    }

    pub(super) fn is_some(self) -> bool {
        self.0 != 0
    }

    /// Whether it was made by the same track in the same epoch.
    fn is_beside(self, other: Self) -> bool {
        (self.track(), self.epoch()) == (other.track(), other.epoch())
    }

    /// With the bytes of another one.
    fn and_bytes_of(self, other: Self) -> Self {
        Self(self.0 | u64::from(other.bytes()))
    }
}

/// What four bytes of shared memory saw.
#[derive(Clone, Debug, Default)]
pub(super) struct Cell {
    pub(super) write: Access,
    reads: [Access; 3],
    more: Vec<Access>,
}

/// Reads of one operand since its bytes were last written: by whom, and the last writes of those bytes. Kept with the
/// operand, so that three warps of a warpgroup need not repeat what the first has recorded of the same product.
#[derive(Debug, Default)]
pub(crate) struct SeenReads {
    pub(super) readers: Vec<(u32, u32)>,
    pub(super) writes: Vec<Access>,
}

impl Tracker {
    pub(super) fn ordered(&self, access: Access, v: &[u32]) -> bool {
        let (track, epoch) = (access.track(), access.epoch());
        if (4 * self.warps..5 * self.warps).contains(&track) {
            let first = track - 4 * self.warps;
            return (first..first + 4).all(|w| Clocks::at(v, self.wgmma_track(w)) >= epoch);
        }
        Clocks::at(v, track) >= epoch
    }

    pub(super) fn describe(&self, access: Access) -> String {
        let (track, w) = (access.track(), self.warps);
        let of = |id: u32| format!("block rank {} warp {}", id / self.per_block, id % self.per_block);
        let who = match track / w {
            0 => format!("{} lane {}", of(track), access.lane()),
            1 | 4 => format!("wgmma of the warpgroup of {}", of(track % w)),
            2 => format!("bulk copy of {} lane {}", of(track % w), access.lane()),
            3 => format!("cp.async of {} lane {}", of(track % w), access.lane()),
            5 => format!("tcgen05 of {}", of(track % w)),
            _ => format!(
                "asynchronous copy completing on mbarrier number {} lane {}",
                track - 6 * w,
                access.lane()
            ),
        };
        let (line, source) = self.lines.get(access.pc() as usize).copied().unwrap_or((0, 0));
        format!("{who} at PTX line {line} (source line {source})")
    }

    pub(super) fn race(&self, what: &str, earlier: &str, access: Access, cta: u32, at: u32) -> Box<Fault> {
        let place = if cta < self.blocks {
            format!("shared memory {at:#x} of block rank {cta}")
        } else {
            let (lane, column) = (at / 4 / 512 * 32, at / 4 % 512);
            format!(
                "tensor memory lanes {lane} to {} column {column} of block rank {}",
                lane + 31,
                cta - self.blocks
            )
        };
        let text = format!("{what} of {place}, unordered with the {earlier} by {}", self.describe(access));
        Box::new(Fault::new(FaultKind::Race, text))
    }

    pub(super) fn cell(&mut self, cta: u32, index: usize) -> &mut Cell {
        let cells = &mut self.cells[cta as usize];
        if cells.len() <= index {
            cells.resize(index + 1, Cell::default());
        }
        &mut cells[index]
    }

    /// Bytes of cell `index` inside `[at, at + n)`, as four bits.
    fn covered(index: usize, at: u32, n: u32) -> u32 {
        let base = index as u32 * 4;
        let (from, to) = (at.max(base) - base, (at + n).min(base + 4) - base);
        (15 >> (4 - (to - from))) << from
    }

    /// The last write of a cell, if it is of any of these bytes, must have come before.
    fn check_last_write(
        &self,
        write: Access,
        bytes: u32,
        clocks: &Clocks,
        track: u32,
        [what, done]: [&str; 2],
        (cta, index): (u32, usize),
    ) -> Exec<()> {
        if !write.is_some() || write.bytes() & bytes == 0 {
            return Ok(());
        }
        if !self.ordered(write, &clocks.v) {
            return Err(self.race(what, "write", write, cta, index as u32 * 4));
        }
        self.check_proxy(write, clocks, track, done, cta, index)
    }

    /// An access to bytes of a block (rank, address, number), issued when the clocks were `clocks`.
    pub(crate) fn touch(&mut self, touch: Touch, clocks: &Clocks, me: Doer, range: [u32; 3]) -> Exec<()> {
        match touch {
            Touch::Read => self.read_cells(clocks, me, range),
            Touch::Write => self.write_cells(clocks, me, range),
        }
    }

    fn read_cells(&mut self, clocks: &Clocks, me: Doer, [cta, at, n]: [u32; 3]) -> Exec<()> {
        let (track, epoch, pc, lane) = me;
        for index in at as usize / 4..(at + n).div_ceil(4) as usize {
            let bytes = Self::covered(index, at, n);
            let write = self.cell(cta, index).write;
            self.check_last_write(write, bytes, clocks, track, ["read", "read"], (cta, index))?;
            let access = Access::new(track, epoch, pc, lane, bytes);
            let cell = &self.cells[cta as usize][index];
            // Whoever is ordered behind the new read is behind the old one too, but for the bytes that the new one left out.
            let replaces = |old: &Access| {
                !old.is_some()
                    || old.is_beside(access)
                    || old.bytes() & !bytes == 0 && (old.track() == track || self.ordered(*old, &clocks.v))
            };
            let slot = cell.reads.iter().position(replaces);
            let extra = if slot.is_none() { cell.more.iter().position(replaces) } else { None };
            let cell = &mut self.cells[cta as usize][index];
            let seat = match (slot, extra) {
                (Some(i), _) => &mut cell.reads[i],
                (None, Some(i)) => &mut cell.more[i],
                (None, None) => {
                    cell.more.push(access);
                    continue;
                }
            };
            *seat = if seat.is_beside(access) { access.and_bytes_of(*seat) } else { access };
        }
        Ok(())
    }

    fn write_cells(&mut self, clocks: &Clocks, me: Doer, [cta, at, n]: [u32; 3]) -> Exec<()> {
        let (track, epoch, pc, lane) = me;
        for index in at as usize / 4..(at + n).div_ceil(4) as usize {
            let bytes = Self::covered(index, at, n);
            self.cell(cta, index);
            let cell = &self.cells[cta as usize][index];
            self.check_last_write(cell.write, bytes, clocks, track, ["write", "overwrite"], (cta, index))?;
            for &read in cell.reads.iter().chain(&cell.more) {
                if read.is_some() && read.bytes() & bytes != 0 && !self.ordered(read, &clocks.v) {
                    return Err(self.race("write", "read", read, cta, index as u32 * 4));
                }
            }
            let cell = &mut self.cells[cta as usize][index];
            let write = Access::new(track, epoch, pc, lane, bytes);
            cell.write = if write.is_beside(cell.write) { write.and_bytes_of(cell.write) } else { write };
            if bytes == 15 {
                cell.reads = [Access::default(); 3];
                cell.more.clear();
                continue;
            }
            // What was read of other bytes may still race with a write to those.
            let is_left = |read: &Access| read.bytes() & !bytes != 0;
            cell.reads.iter_mut().filter(|read| !is_left(read)).for_each(|read| *read = Access::default());
            cell.more.retain(is_left);
        }
        Ok(())
    }

    /// Generic writes reach the asynchronous proxy only through its fence.
    pub(super) fn check_proxy(
        &self,
        write: Access,
        clocks: &Clocks,
        track: u32,
        verb: &str,
        cta: u32,
        index: usize,
    ) -> Exec<()> {
        let generic = |t: u32| t < self.warps || (3 * self.warps..4 * self.warps).contains(&t);
        if cta >= self.blocks
            || generic(track)
            || !generic(write.track())
            || Clocks::at(&clocks.a, write.track()) >= write.epoch()
        {
            return Ok(());
        }
        let text = format!(
            "the asynchronous proxy would {verb} shared memory {:#x} of block rank {cta}, written by {}",
            index * 4,
            self.describe(write)
        );
        Err(Box::new(Fault::new(FaultKind::MissingProxyFence, text)))
    }
}
