//! Last accesses to each four bytes of shared memory, and whether a new access is ordered behind that.
//!
//! Asynchronous copies and matrix products access sixteen bytes at a time, so the cells of four bytes are kept by lines
//! of four, as one while they are equal.

use super::{Clocks, Exec, Tracker};
use crate::fault::{Fault, FaultKind};

/// Kind of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Touch {
    Read,
    Write,
}

/// Identity of an access: track, epoch, instruction, lane.
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

    /// Returns this access with the bytes of another one added.
    fn and_bytes_of(self, other: Self) -> Self {
        Self(self.0 | u64::from(other.bytes()))
    }
}

/// Accesses to four bytes of shared memory.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Cell {
    pub(super) write: Access,
    reads: [Access; 3],
    more: Vec<Access>,
}

/// Accesses to sixteen bytes of shared memory.
#[derive(Clone, Debug)]
pub(super) enum Line {
    /// One cell that stands for all four of the line.
    Alike(Cell),
    Parts(Box<[Cell; 4]>),
}

impl Default for Line {
    fn default() -> Self {
        Self::Alike(Cell::default())
    }
}

impl Line {
    /// Cells of the line: one that stands for all, or four.
    fn cells(&mut self) -> &mut [Cell] {
        match self {
            Self::Alike(cell) => std::slice::from_mut(cell),
            Self::Parts(cells) => cells.as_mut_slice(),
        }
    }

    /// One of its four cells apart from the others.
    fn part(&mut self, n: usize) -> &mut Cell {
        if let Self::Alike(cell) = self {
            *self = Self::Parts(Box::new(std::array::from_fn(|_| cell.clone())));
        }
        match self {
            Self::Alike(cell) => cell,
            Self::Parts(cells) => &mut cells[n],
        }
    }

    /// The last write of each of its cells.
    pub(super) fn writes(&self) -> impl Iterator<Item = Access> {
        let cells = match self {
            Self::Alike(cell) => std::slice::from_ref(cell),
            Self::Parts(cells) => cells.as_slice(),
        };
        cells.iter().map(|cell| cell.write)
    }

    /// Makes four equal cells one again.
    fn join(&mut self) {
        if let Self::Parts(cells) = self
            && cells[1..].iter().all(|cell| *cell == cells[0])
        {
            *self = Self::Alike(std::mem::take(&mut cells[0]));
        }
    }
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

    /// Whether an access may follow another one, that of `track` at the time of `clocks`.
    fn may_follow(&self, access: Access, clocks: &Clocks, track: u32) -> bool {
        let is_of_other_block = access.track() < self.warps
            && track < self.warps
            && access.track() / self.per_block != track / self.per_block;
        self.ordered(access, if is_of_other_block { &clocks.g } else { &clocks.v })
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

    /// The line of the sixteen bytes at `16 * index`.
    pub(super) fn line(&mut self, cta: u32, index: usize) -> &mut Line {
        let lines = &mut self.cells[cta as usize];
        if lines.len() <= index {
            lines.resize(index + 1, Line::default());
        }
        &mut lines[index]
    }

    /// The last write of the four bytes at `at`.
    pub(super) fn last_write(&mut self, cta: u32, at: u32) -> Access {
        let n = at as usize / 4 % 4;
        match self.line(cta, at as usize / 16) {
            Line::Alike(cell) => cell.write,
            Line::Parts(cells) => cells[n].write,
        }
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
        (cta, at): (u32, u32),
    ) -> Exec<()> {
        if !write.is_some() || write.bytes() & bytes == 0 {
            return Ok(());
        }
        if !self.may_follow(write, clocks, track) {
            return Err(self.race(what, "write", write, cta, at));
        }
        self.check_proxy(write, clocks, track, done, cta, at)
    }

    /// An access to bytes of a block (rank, address, number), issued when the clocks were `clocks`.
    pub(crate) fn touch(&mut self, touch: Touch, clocks: &Clocks, me: Doer, range: [u32; 3]) -> Exec<()> {
        let cta = range[0];
        // Out of the table, so that the rest of the tracker can be read meanwhile.
        let mut lines = std::mem::take(&mut self.cells[cta as usize]);
        let result = self.touch_lines(touch, clocks, me, &mut lines, range);
        self.cells[cta as usize] = lines;
        result
    }

    fn touch_lines(
        &self,
        touch: Touch,
        clocks: &Clocks,
        me: Doer,
        lines: &mut Vec<Line>,
        [cta, at, n]: [u32; 3],
    ) -> Exec<()> {
        let end = (at + n).div_ceil(16) as usize;
        if lines.len() < end {
            lines.resize(end, Line::default());
        }
        // Neighbours mostly saw the same: what was found to come before needs no second look.
        let mut known = Cell::default();
        for (index, line) in lines.iter_mut().enumerate().take(end).skip(at as usize / 16) {
            let first = 16 * index as u32;
            if at <= first && first + 16 <= at + n {
                let access = Access::new(me.0, me.1, me.2, me.3, 15);
                for (n, cell) in line.cells().iter_mut().enumerate() {
                    let place = (cta, first + 4 * n as u32);
                    self.touch_cell(touch, clocks, access, cell, &mut known, place)?;
                }
            } else {
                for part in at.max(first) / 4..(at + n).min(first + 16).div_ceil(4) {
                    let access = Access::new(me.0, me.1, me.2, me.3, Self::covered(part as usize, at, n));
                    let cell = line.part(part as usize % 4);
                    self.touch_cell(touch, clocks, access, cell, &mut known, (cta, 4 * part))?;
                }
            }
            line.join();
        }
        Ok(())
    }

    /// Records an access to the bytes of one cell that `access` names. `known` was found to come before it.
    #[inline]
    fn touch_cell(
        &self,
        touch: Touch,
        clocks: &Clocks,
        access: Access,
        cell: &mut Cell,
        known: &mut Cell,
        place: (u32, u32),
    ) -> Exec<()> {
        match touch {
            Touch::Read => self.read_cell(clocks, access, cell, known, place),
            Touch::Write => self.write_cell(clocks, access, cell, known, place),
        }
    }

    fn read_cell(
        &self,
        clocks: &Clocks,
        access: Access,
        cell: &mut Cell,
        known: &mut Cell,
        place: (u32, u32),
    ) -> Exec<()> {
        let (track, bytes) = (access.track(), access.bytes());
        if cell.write != known.write {
            self.check_last_write(cell.write, bytes, clocks, track, ["read", "read"], place)?;
            // A check of some bytes may have let pass a conflicting write to the cell's other bytes.
            known.write = if bytes == 15 { cell.write } else { Access::default() };
        }
        // An access that is ordered behind the new read is behind the old one too, but for the bytes that the
        // new one left out.
        let replaces = |old: &Access| {
            !old.is_some()
                || old.is_beside(access)
                || old.bytes() & !bytes == 0 && (old.track() == track || self.may_follow(*old, clocks, track))
        };
        let seat = match cell.reads.iter().position(replaces) {
            Some(i) => &mut cell.reads[i],
            None => match cell.more.iter().position(replaces) {
                Some(i) => &mut cell.more[i],
                None => {
                    cell.more.push(access);
                    return Ok(());
                }
            },
        };
        *seat = if seat.is_beside(access) { access.and_bytes_of(*seat) } else { access };
        Ok(())
    }

    fn write_cell(
        &self,
        clocks: &Clocks,
        write: Access,
        cell: &mut Cell,
        known: &mut Cell,
        place: (u32, u32),
    ) -> Exec<()> {
        let bytes = write.bytes();
        if cell != known {
            self.check_last_write(cell.write, bytes, clocks, write.track(), ["write", "overwrite"], place)?;
            for &read in cell.reads.iter().chain(&cell.more) {
                if read.is_some()
                    && read.bytes() & bytes != 0
                    && !self.may_follow(read, clocks, write.track())
                {
                    return Err(self.race("write", "read", read, place.0, place.1));
                }
            }
            if bytes == 15 {
                known.clone_from(cell);
            }
        }
        cell.write = if write.is_beside(cell.write) { write.and_bytes_of(cell.write) } else { write };
        if bytes == 15 {
            cell.reads = [Access::default(); 3];
            cell.more.clear();
            return Ok(());
        }
        // Reads of other bytes may still race with a write to those.
        let is_left = |read: &Access| read.bytes() & !bytes != 0;
        cell.reads.iter_mut().filter(|read| !is_left(read)).for_each(|read| *read = Access::default());
        cell.more.retain(is_left);
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
        at: u32,
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
            "the asynchronous proxy would {verb} shared memory {at:#x} of block rank {cta}, written by {}",
            self.describe(write)
        );
        Err(Box::new(Fault::new(FaultKind::MissingProxyFence, text)))
    }
}
