//! Happens-before: vector clocks over warps and asynchronous operations, and what each byte of shared memory saw.
//!
//! A warp is one thread of the relation (its lanes run in program order). An asynchronous operation has the clock
//! component of whatever announces its end: a phase of an mbarrier, a bulk group, a wgmma group of four warps.
//! Two clocks travel together: `v`, what has happened, and `a`, what of it the asynchronous proxy also sees.
//! `FastTrack` (Flanagan and Freund, PLDI 2009) gave the idea of one last write and few reads a cell.

mod asynchronous;

use crate::exec::Warp;
use crate::fault::{Fault, FaultKind};
use crate::op::{Code, File, Program, Reg};

type Exec<T> = Result<T, Box<Fault>>;

/// Who accesses: track, epoch, instruction, lane.
type Doer = (u32, u32, u32, usize);

/// A pair of vector clocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clocks {
    v: Vec<u32>,
    a: Vec<u32>,
}

fn join(to: &mut Vec<u32>, from: &[u32]) {
    if to.len() < from.len() {
        to.resize(from.len(), 0);
    }
    for (t, f) in to.iter_mut().zip(from) {
        *t = (*t).max(*f);
    }
}

impl Clocks {
    fn join(&mut self, other: &Self) {
        join(&mut self.v, &other.v);
        join(&mut self.a, &other.a);
    }

    fn at(clock: &[u32], track: u32) -> u32 {
        clock.get(track as usize).copied().unwrap_or(0)
    }
}

/// One access, packed: track 12 bits, epoch 22, instruction 21, lane 5, bytes of the cell 4.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Access(u64);

impl Access {
    fn new(track: u32, epoch: u32, pc: u32, lane: usize, bytes: u32) -> Self {
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

    fn track(self) -> u32 {
        (self.0 >> 52) as u32
    }

    fn epoch(self) -> u32 {
        (self.0 >> 30) as u32 & 0x3f_ffff
    }

    fn pc(self) -> u32 {
        (self.0 >> 9) as u32 & 0x1f_ffff
    }

    fn lane(self) -> u32 {
        (self.0 >> 4) as u32 & 31
    }

    fn bytes(self) -> u32 {
        self.0 as u32 & 15
    }

    fn is_some(self) -> bool {
        self.0 != 0
    }
}

/// What four bytes of shared memory saw.
#[derive(Clone, Debug, Default)]
struct Cell {
    write: Access,
    reads: [Access; 3],
    more: Vec<Access>,
}

/// Reads of one operand since its bytes were last written: by whom, and the last writes of those bytes. Kept with the
/// operand, so that three warps of a warpgroup need not repeat what the first has recorded of the same product.
#[derive(Debug, Default)]
pub(crate) struct SeenReads {
    readers: Vec<(u32, u32)>,
    writes: Vec<Access>,
}

/// Registers of a warp in flight.
#[derive(Clone, Debug, Default)]
struct Flight {
    /// Group of the last product that writes, or reads, each word row.
    accumulator: Vec<u32>,
    operand: Vec<u32>,
    /// When an ordinary instruction last wrote, or read, each word row, and when `wgmma.fence` last ran.
    written: Vec<u64>,
    read: Vec<u64>,
    fence: u64,
    done: u32,
    newest: u32,
}

/// The tracker of one cluster.
#[derive(Debug)]
pub(crate) struct Tracker {
    warps: u32,
    per_block: u32,
    blocks: u32,
    clocks: Vec<Clocks>,
    tracks: u32,
    cells: Vec<Vec<Cell>>,
    flights: Vec<Flight>,
    /// Initialised barriers that the asynchronous proxy cannot see yet: block, address, the warp's number.
    unfenced: Vec<(u32, u32, u32)>,
    lines: Vec<(u32, u32)>,
    /// Of each block, the last access of each warp of another block to its shared memory.
    visits: Vec<Vec<Access>>,
}

impl Tracker {
    pub(crate) fn new(blocks: usize, per_block: u32) -> Self {
        let warps = blocks as u32 * per_block;
        let mut clocks = vec![Clocks::default(); warps as usize];
        for (i, c) in clocks.iter_mut().enumerate() {
            c.v = vec![0; warps as usize];
            c.v[i] = 1;
        }
        Self {
            warps,
            per_block,
            clocks,
            tracks: 6 * warps,
            cells: vec![Vec::new(); 2 * blocks],
            blocks: blocks as u32,
            flights: vec![Flight::default(); warps as usize],
            unfenced: Vec::new(),
            lines: Vec::new(),
            visits: vec![Vec::new(); blocks],
        }
    }

    /// A warp accesses the memory that the cells of `cta` stand for: another block must outlive that. A warp reaches
    /// tensor memory, whose cells lie behind those of all blocks' shared memory, of its own block only.
    fn visit(&mut self, warp: &Warp, cta: u32, lane: usize) {
        if cta == warp.cta || cta >= self.blocks {
            return;
        }
        let id = self.id(warp);
        let epoch = self.clocks[id as usize].v[id as usize];
        let visits = &mut self.visits[cta as usize];
        visits.retain(|visit| visit.track() != id);
        visits.push(Access::new(id, epoch, warp.current_pc, lane, 15));
    }

    /// All warps of block `cta` have exited: what others did with its shared memory must have come before.
    ///
    /// PTX ISA, `mapa` and `barrier.cluster`: distributed shared memory is there while its block runs.
    pub(crate) fn block_ends(&self, cta: u32) -> Exec<()> {
        let warps = cta * self.per_block..(cta + 1) * self.per_block;
        let mut end = Vec::new();
        warps.for_each(|id| join(&mut end, &self.clocks[id as usize].v));
        let Some(&visit) = self.visits[cta as usize].iter().find(|&&visit| !self.ordered(visit, &end)) else {
            return Ok(());
        };
        let text = format!(
            "the end of block rank {cta} races with an access to its shared memory by {}",
            self.describe(visit)
        );
        Err(Box::new(Fault::new(FaultKind::Race, text)))
    }

    fn id(&self, warp: &Warp) -> u32 {
        warp.cta * self.per_block + warp.index
    }

    fn wgmma_track(&self, id: u32) -> u32 {
        self.warps + id
    }

    /// The track of a warp's bulk groups.
    pub(crate) fn bulk_track(&self, cta: u32, warp: u32) -> u32 {
        2 * self.warps + cta * self.per_block + warp
    }

    fn copy_track(&self, id: u32) -> u32 {
        3 * self.warps + id
    }

    /// The track of a warpgroup's products: complete for a reader when all four warps have waited.
    pub(crate) fn warpgroup_track(&self, warp: &Warp) -> u32 {
        4 * self.warps + warp.cta * self.per_block + warp.index / 4 * 4
    }

    /// The clocks of a warp now.
    pub(crate) fn snapshot(&self, warp: &Warp) -> Clocks {
        self.clocks[self.id(warp) as usize].clone()
    }

    /// A release: what the warp has done so far goes into `into`.
    pub(crate) fn release(&mut self, warp: &Warp, into: &mut Clocks) {
        let id = self.id(warp) as usize;
        into.join(&self.clocks[id]);
        self.clocks[id].v[id] += 1;
    }

    /// An acquire of what was released.
    pub(crate) fn acquire(&mut self, warp: &Warp, from: &Clocks) {
        let id = self.id(warp) as usize;
        self.clocks[id].join(from);
    }

    /// `fence.proxy.async`: the asynchronous proxy sees all that the warp sees.
    pub(crate) fn proxy_fence(&mut self, warp: &Warp) {
        let id = self.id(warp) as usize;
        let c = &mut self.clocks[id];
        join(&mut c.a, &c.v);
        c.v[id] += 1;
        self.init_fence(warp);
    }

    /// `fence.mbarrier_init`: the asynchronous proxy sees the barriers that the warp has initialised.
    pub(crate) fn init_fence(&mut self, warp: &Warp) {
        let id = self.id(warp);
        self.unfenced.retain(|&(_, _, by)| by != id);
    }

    /// An asynchronous operation is to complete on a barrier.
    pub(crate) fn async_barrier(&self, cta: u32, at: u32) -> Exec<()> {
        let Some(&(_, _, by)) = self.unfenced.iter().find(|&&(c, a, _)| (c, a) == (cta, at)) else {
            return Ok(());
        };
        let text = format!(
            "an asynchronous operation completes on the mbarrier at {at:#x} of block rank {cta}, which warp {} of \
             block rank {} initialised without fence.mbarrier_init",
            by % self.per_block,
            by / self.per_block
        );
        Err(Box::new(Fault::new(FaultKind::MissingProxyFence, text)))
    }

    fn advance(&mut self, id: u32, track: u32, to: u32) {
        let v = &mut self.clocks[id as usize].v;
        if v.len() <= track as usize {
            v.resize(track as usize + 1, 0);
        }
        v[track as usize] = v[track as usize].max(to);
    }

    /// The warp has seen `phase` phases of a barrier complete.
    pub(crate) fn observe_phase(
        &mut self,
        warp: &Warp,
        track: u32,
        phase: u64,
        published: &Clocks,
        relaxed: bool,
    ) {
        if !relaxed {
            self.acquire(warp, published);
            self.advance(self.id(warp), track, phase as u32);
        }
    }

    /// A new barrier: its track. Writing the barrier must not race with earlier uses of the bytes.
    pub(crate) fn mbarrier_init(&mut self, warp: &Warp, cta: u32, at: u32, lane: usize) -> Exec<u32> {
        self.generic_write(warp, cta, at, 8, lane, false)?;
        self.unfenced.push((cta, at, self.id(warp)));
        self.tracks += 1;
        Ok((self.tracks - 1).min(4095))
    }

    /// Any use of a barrier must come after its initialisation.
    pub(crate) fn mbarrier_use(&mut self, warp: &Warp, cta: u32, at: u32) -> Exec<()> {
        self.visit(warp, cta, 0);
        let write = self.cell(cta, at as usize / 4).write;
        let clocks = &self.clocks[self.id(warp) as usize];
        if write.is_some() && !self.ordered(write, &clocks.v) {
            return Err(self.race("use as an mbarrier", "initialisation", write, cta, at));
        }
        Ok(())
    }

    pub(crate) fn bulk_done(&mut self, warp: &Warp) {
        let track = self.bulk_track(warp.cta, warp.index);
        self.advance(self.id(warp), track, warp.asynchrony.bulk_read);
    }

    pub(crate) fn copies_done(&mut self, warp: &Warp) {
        let id = self.id(warp);
        self.advance(id, self.copy_track(id), warp.asynchrony.copy_done);
    }

    pub(crate) fn wgmma_done(&mut self, warp: &Warp) {
        let id = self.id(warp);
        self.advance(id, self.wgmma_track(id), warp.asynchrony.wgmma_done);
        self.flights[id as usize].done = warp.asynchrony.wgmma_done;
    }

    pub(crate) fn wgmma_fence(&mut self, warp: &Warp) {
        let id = self.id(warp) as usize;
        self.flights[id].fence = warp.executed;
    }

    /// Before each instruction: does it touch a register in flight?
    pub(crate) fn step(&mut self, warp: &Warp, program: &Program, pc: u32, active: u32) -> Exec<()> {
        if self.lines.is_empty() {
            self.lines.clone_from(&program.lines);
        }
        let id = self.id(warp) as usize;
        let flight = &mut self.flights[id];
        if flight.written.is_empty() {
            let rows = program.words as usize;
            flight.accumulator = vec![0; rows];
            flight.operand = vec![0; rows];
            flight.written = vec![0; rows];
            flight.read = vec![0; rows];
        }
        let inst = &program.code[pc as usize];
        if matches!(inst.code, Code::Wgmma(_)) || active == 0 {
            return Ok(());
        }
        let (list_dst, list_src) = program.list(inst);
        let word = |r: &&Reg| r.file() == Some(File::Word);
        let busy = flight.newest > flight.done;
        for reg in inst.dst.iter().chain(list_dst).filter(word) {
            let row = reg.row();
            if busy && (flight.accumulator[row] > flight.done || flight.operand[row] > flight.done) {
                return Err(in_flight(flight, row, "written"));
            }
            flight.written[row] = warp.executed;
        }
        for reg in inst.src.iter().chain(list_src).filter(word) {
            if busy && flight.accumulator[reg.row()] > flight.done {
                return Err(in_flight(flight, reg.row(), "read"));
            }
            flight.read[reg.row()] = warp.executed;
        }
        Ok(())
    }

    /// A `wgmma` is issued: its registers must be fenced, and are in flight from here.
    pub(crate) fn wgmma_issue(&mut self, warp: &Warp, group: u32, dst: &[Reg], a: &[Reg]) -> Exec<()> {
        let id = self.id(warp) as usize;
        let flight = &mut self.flights[id];
        let missing = |what: &str| Box::new(Fault::new(FaultKind::MissingWgmmaFence, what));
        if flight.fence == 0 {
            return Err(missing("the first wgmma of the warp, and no wgmma.fence before it"));
        }
        if dst.iter().any(|r| flight.written[r.row()].max(flight.read[r.row()]) > flight.fence) {
            return Err(missing("an accumulator was accessed after the last wgmma.fence"));
        }
        if a.iter().any(|r| flight.written[r.row()] > flight.fence) {
            return Err(missing("a register of operand A was written after the last wgmma.fence"));
        }
        for reg in a {
            if flight.accumulator[reg.row()] > flight.done {
                return Err(in_flight(flight, reg.row(), "read as operand A"));
            }
            flight.operand[reg.row()] = group;
        }
        for reg in dst {
            if flight.operand[reg.row()] > flight.done {
                return Err(in_flight(flight, reg.row(), "overwritten by another wgmma"));
            }
            flight.accumulator[reg.row()] = group;
        }
        flight.newest = group;
        Ok(())
    }

    fn ordered(&self, access: Access, v: &[u32]) -> bool {
        let (track, epoch) = (access.track(), access.epoch());
        if (4 * self.warps..5 * self.warps).contains(&track) {
            let first = track - 4 * self.warps;
            return (first..first + 4).all(|w| Clocks::at(v, self.wgmma_track(w)) >= epoch);
        }
        Clocks::at(v, track) >= epoch
    }

    fn describe(&self, access: Access) -> String {
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

    fn race(&self, what: &str, earlier: &str, access: Access, cta: u32, at: u32) -> Box<Fault> {
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

    fn cell(&mut self, cta: u32, index: usize) -> &mut Cell {
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

    /// A read of `n` bytes, issued when the clocks were `clocks`, by `me`: track, epoch, instruction, lane.
    pub(crate) fn read_cells(&mut self, clocks: &Clocks, me: Doer, cta: u32, at: u32, n: u32) -> Exec<()> {
        let (track, epoch, pc, lane) = me;
        for index in at as usize / 4..(at + n).div_ceil(4) as usize {
            let bytes = Self::covered(index, at, n);
            let write = self.cell(cta, index).write;
            self.check_last_write(write, bytes, clocks, track, ["read", "read"], (cta, index))?;
            let access = Access::new(track, epoch, pc, lane, bytes);
            let cell = &self.cells[cta as usize][index];
            let replaces =
                |old: &Access| !old.is_some() || old.track() == track || self.ordered(*old, &clocks.v);
            let slot = cell.reads.iter().position(replaces);
            let extra = if slot.is_none() { cell.more.iter().position(replaces) } else { None };
            let cell = &mut self.cells[cta as usize][index];
            match (slot, extra) {
                (Some(i), _) => {
                    // Reads by one track and epoch of several lanes cover what they cover together.
                    cell.reads[i] = access;
                }
                (None, Some(i)) => cell.more[i] = access,
                (None, None) => cell.more.push(access),
            }
        }
        Ok(())
    }

    /// A write, as [`read_cells`](Self::read_cells).
    pub(crate) fn write_cells(&mut self, clocks: &Clocks, me: Doer, cta: u32, at: u32, n: u32) -> Exec<()> {
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
            cell.write = Access::new(track, epoch, pc, lane, bytes);
            cell.reads = [Access::default(); 3];
            cell.more.clear();
        }
        Ok(())
    }

    /// Generic writes reach the asynchronous proxy only through its fence.
    fn check_proxy(
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

    /// A load by a warp.
    pub(crate) fn generic_read(
        &mut self,
        warp: &Warp,
        cta: u32,
        at: u32,
        n: u32,
        lane: usize,
        strong: bool,
    ) -> Exec<()> {
        self.visit(warp, cta, lane);
        self.generic(warp, lane, strong, |t, clocks, me| t.read_cells(clocks, me, cta, at, n))
    }

    /// A store by a warp.
    pub(crate) fn generic_write(
        &mut self,
        warp: &Warp,
        cta: u32,
        at: u32,
        n: u32,
        lane: usize,
        strong: bool,
    ) -> Exec<()> {
        self.visit(warp, cta, lane);
        self.generic(warp, lane, strong, |t, clocks, me| t.write_cells(clocks, me, cta, at, n))
    }

    /// An access at the warp's own time; a strong one races with nothing.
    fn generic(
        &mut self,
        warp: &Warp,
        lane: usize,
        strong: bool,
        access: impl FnOnce(&mut Self, &Clocks, Doer) -> Exec<()>,
    ) -> Exec<()> {
        if strong {
            return Ok(());
        }
        let id = self.id(warp);
        let clocks = std::mem::take(&mut self.clocks[id as usize]);
        let result = access(self, &clocks, (id, clocks.v[id as usize], warp.current_pc, lane));
        self.clocks[id as usize] = clocks;
        result
    }
}

fn in_flight(flight: &Flight, row: usize, verb: &str) -> Box<Fault> {
    let group = flight.accumulator[row].max(flight.operand[row]);
    let text = format!(
        "a register of wgmma group {group} is {verb}, but wgmma.wait_group has covered only {} groups",
        flight.done
    );
    Box::new(Fault::new(FaultKind::RegisterInFlight, text))
}
