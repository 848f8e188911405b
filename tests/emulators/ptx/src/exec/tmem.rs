//! Tensor memory: allocation, loads and stores by warps, copies from shared memory. PTX ISA 9.7.16.1 to 9.7.16.8.
//!
//! Supported: alloc, dealloc, relinquish, ld, st, cp, shift (as [`RowShift`] reads it), the waits and fences,
//! commit, and the products of [`tmma`](super::tmma).
//!
//! `cp.4x256b` writes one lane of each warp's part, row after row: the ISA does not say so. CUTLASS has it in
//! `Copy_Traits<SM100_UTCCP_4dp256bit_1cta>` and calls it a refresh; Apache TVM says of the lanes 0, 32, 64
//! and 96 from the address on that its tests found them on a B200.

use super::cluster::{Cluster, Step};
use super::operand::Descriptor;
use super::warp::{Wait, Warp, lanes};
use super::{Exec, fault};
use crate::fault::{Fault, FaultKind};
use crate::hb::{Clocks, Touch};
use crate::launch::RowShift;
use crate::op::{CpShape, Inst, Program, Tcgen, TmemShape};

/// Lanes and columns of one block's tensor memory.
const LANES: usize = 128;
pub(super) const COLUMNS: usize = 512;
/// Lanes of one warp's part, and the columns of a 32-byte element.
pub(super) const PART: usize = 32;
pub(super) const ELEMENT: usize = 8;

/// The 128 lanes by 512 columns of one block.
#[derive(Debug, Default)]
pub(crate) struct TensorMemory {
    /// Row-major cells, empty before the first allocation; `None` where nothing was written.
    cells: Vec<Option<u32>>,
    /// First column and number of columns of each allocation.
    allocations: Vec<(u32, u32)>,
    relinquished: bool,
}

fn misuse(text: impl Into<String>) -> Box<Fault> {
    fault(FaultKind::TensorMemory, text)
}

impl TensorMemory {
    /// Columns still allocated.
    pub(crate) fn leaked(&self) -> Option<u32> {
        (!self.allocations.is_empty()).then(|| self.allocations.iter().map(|a| a.1).sum())
    }

    fn allocate(&mut self, columns: u32) -> Option<u32> {
        self.cells.resize(LANES * COLUMNS, None);
        let free = |at: u32| self.allocations.iter().all(|&(from, n)| at + columns <= from || at >= from + n);
        let at = (0..COLUMNS as u32).step_by(columns as usize).find(|&at| at + columns <= 512 && free(at))?;
        self.allocations.push((at, columns));
        Some(at)
    }

    fn check(&self, column: usize) -> Exec<()> {
        let at = column as u32;
        if self.allocations.iter().any(|&(from, n)| at >= from && at < from + n) {
            return Ok(());
        }
        Err(misuse(format!("column {column} is not allocated (allocations: {:?})", self.allocations)))
    }

    pub(super) fn get(&self, lane: usize, column: usize) -> Exec<u32> {
        self.check(column)?;
        self.cells[lane * COLUMNS + column]
            .ok_or_else(|| misuse(format!("read of lane {lane} column {column}, which nothing has written")))
    }

    pub(super) fn set(&mut self, lane: usize, column: usize, value: u32) -> Exec<()> {
        self.check(column)?;
        self.cells[lane * COLUMNS + column] = Some(value);
        Ok(())
    }

    /// Moves an element of each row but one to the next row, or from it; one that nothing has written stays unwritten.
    fn shift(&mut self, lane: usize, column: usize, way: RowShift) -> Exec<()> {
        for c in column..column + ELEMENT {
            self.check(c)?;
        }
        for i in 1..PART {
            // Rows in the order that reads each row before it is overwritten.
            let (from, to) = match way {
                RowShift::ToNext => (PART - 1 - i, PART - i),
                RowShift::FromNext => (i, i - 1),
            };
            let at = |row: usize| (lane + row) * COLUMNS + column;
            self.cells.copy_within(at(from)..at(from) + ELEMENT, at(to));
        }
        Ok(())
    }
}

/// Registers that one repetition of a shape takes.
fn registers(shape: TmemShape) -> usize {
    match shape {
        TmemShape::L32x32b | TmemShape::L16x64b | TmemShape::L16x32bx2 => 1,
        TmemShape::L16x128b => 2,
        TmemShape::L16x256b => 4,
    }
}

/// Row and column, relative to the address, of register `r` of lane `l`.
fn place(shape: TmemShape, l: usize, r: usize, split: usize) -> (usize, usize) {
    match shape {
        TmemShape::L32x32b => (l, r),
        TmemShape::L16x64b => (l / 4 + 8 * (l % 2), l / 2 % 2 + 2 * r),
        TmemShape::L16x128b => (l / 4 + 8 * (r % 2), l % 4 + 4 * (r / 2)),
        TmemShape::L16x256b => (l / 4 + 8 * (r / 2 % 2), r % 2 + 2 * (l % 4) + 8 * (r / 4)),
        TmemShape::L16x32bx2 => (l % 16, r + l / 16 * split),
    }
}

/// The blocks whose tensor memory an instruction of `cta_group::1`, or of a pair, touches.
pub(super) fn group_blocks(warp: &Warp, pair: bool) -> Vec<u32> {
    if pair { vec![warp.cta & !1, warp.cta | 1] } else { vec![warp.cta] }
}

impl Cluster {
    #[allow(clippy::too_many_arguments)] // One per part of the instruction.
    pub(super) fn tcgen05(
        &mut self,
        warp: &mut Warp,
        g: usize,
        program: &Program,
        inst: &Inst,
        op: Tcgen,
        pair: bool,
        active: u32,
    ) -> Exec<Step> {
        let collective = matches!(
            op,
            Tcgen::Alloc
                | Tcgen::Dealloc
                | Tcgen::Relinquish
                | Tcgen::Ld { .. }
                | Tcgen::St { .. }
                | Tcgen::WaitLd
                | Tcgen::WaitSt
        );
        if collective && active != u32::MAX {
            if warp.live == u32::MAX && warp.groups[g].mask != u32::MAX {
                return Ok(Step::Block(Wait::Lanes(u32::MAX)));
            }
            return Err(fault(
                FaultKind::DivergentCollective,
                format!("tcgen05 {op:?} by lanes {active:#x}"),
            ));
        }
        if pair && (warp.cta | 1) as usize >= self.blocks.len() {
            return Err(misuse("cta_group::2 without a peer block in the cluster"));
        }
        match op {
            Tcgen::Alloc => return self.tmem_alloc(warp, inst),
            Tcgen::Dealloc => self.tmem_dealloc(warp, inst)?,
            Tcgen::Relinquish => self.blocks[warp.cta as usize].tmem.relinquished = true,
            Tcgen::Ld { shape, repeat, pack16 } => {
                self.tmem_access(warp, program, inst, shape, repeat, pack16, true)?;
            }
            Tcgen::St { shape, repeat, pack16 } => {
                self.tmem_access(warp, program, inst, shape, repeat, pack16, false)?;
            }
            Tcgen::WaitLd | Tcgen::WaitSt | Tcgen::FenceBefore | Tcgen::FenceAfter => {
                if let Some(t) = &mut self.tracker {
                    match op {
                        Tcgen::WaitLd => t.tensor_wait_loads(warp),
                        Tcgen::WaitSt => t.tensor_wait_stores(warp),
                        Tcgen::FenceBefore => t.tensor_fence_before(warp),
                        _ => t.tensor_fence_after(warp),
                    }
                }
            }
            Tcgen::Commit { multicast } => {
                for lane in lanes(active) {
                    self.tmem_commit(warp, inst, lane, multicast)?;
                }
            }
            Tcgen::Cp { shape } => {
                for lane in lanes(active) {
                    for cta in group_blocks(warp, pair) {
                        self.tmem_copy(warp, inst, lane, shape, cta)?;
                    }
                }
            }
            Tcgen::Mma { a_tmem, kind, shift } => {
                for lane in lanes(active) {
                    self.tensor_product(warp, program, inst, lane, [a_tmem, shift], kind, pair)?;
                }
            }
            Tcgen::Shift => {
                for lane in lanes(active) {
                    self.tmem_shift(warp, inst, lane, pair)?;
                }
            }
        }
        Ok(Step::Next)
    }

    /// A tensor-memory address of one lane: TMEM lane and column.
    pub(super) fn tmem_address(&self, warp: &Warp, inst: &Inst, lane: usize) -> (usize, usize) {
        let address = warp.get(inst.src[0], lane).wrapping_add(warp.get(inst.src[3], lane)) as u32;
        ((address >> 16) as usize, (address & 0xffff) as usize)
    }

    fn tmem_alloc(&mut self, warp: &mut Warp, inst: &Inst) -> Exec<Step> {
        let columns = self.uniform(warp, inst.src[1])? as u32;
        if !columns.is_power_of_two() || !(32..=512).contains(&columns) {
            return Err(misuse(format!("alloc of {columns} columns: not a power of two from 32 to 512")));
        }
        let address = warp.get(inst.src[0], 0).wrapping_add(warp.get(inst.src[3], 0));
        let tmem = &mut self.blocks[warp.cta as usize].tmem;
        if tmem.relinquished {
            return Err(misuse("alloc after relinquish_alloc_permit"));
        }
        let Some(at) = tmem.allocate(columns) else { return Ok(Step::Block(Wait::TensorColumns(columns))) };
        let (cta, to) = self.own_target(warp, address)?;
        let shared = &mut self.blocks[cta as usize].shared;
        shared.check(to, 4, 4, "tcgen05.alloc result")?;
        shared.get_mut(to, 4).copy_from_slice(&at.to_le_bytes());
        self.events += 1;
        if let Some(t) = &mut self.tracker {
            t.generic(Touch::Write, warp, [cta, to, 4], 0, false)?;
        }
        Ok(Step::Next)
    }

    fn tmem_dealloc(&mut self, warp: &mut Warp, inst: &Inst) -> Exec<()> {
        let columns = self.uniform(warp, inst.src[1])? as u32;
        let (_, at) = self.tmem_address(warp, inst, 0);
        self.events += 1;
        let tmem = &mut self.blocks[warp.cta as usize].tmem;
        let Some(i) = tmem.allocations.iter().position(|&a| a == (at as u32, columns)) else {
            let text = format!("dealloc of {columns} columns at {at}: allocated are {:?}", tmem.allocations);
            return Err(misuse(text));
        };
        tmem.allocations.remove(i);
        for row in tmem.cells.chunks_exact_mut(COLUMNS) {
            row[at..at + columns as usize].fill(None);
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)] // One per qualifier of the instruction.
    fn tmem_access(
        &mut self,
        warp: &mut Warp,
        program: &Program,
        inst: &Inst,
        shape: TmemShape,
        repeat: u16,
        pack16: bool,
        load: bool,
    ) -> Exec<()> {
        let (dst, src) = program.list(inst);
        let regs = if load { dst } else { src };
        if regs.len() != registers(shape) * usize::from(repeat) {
            return Err(misuse(format!("{shape:?}.x{repeat} with {} registers", regs.len())));
        }
        let base = self.tmem_address(warp, inst, 0);
        if (1..32).any(|l| self.tmem_address(warp, inst, l) != base) {
            return Err(fault(
                FaultKind::DivergentCollective,
                "lanes give different tensor memory addresses",
            ));
        }
        let split = if inst.src[1].is_some() { warp.get(inst.src[1], 0) as usize } else { 0 };
        let quadrant = warp.index as usize % 4;
        let (lane0, column0) = base;
        let rows = if shape == TmemShape::L32x32b { 32 } else { 16 };
        if lane0 / 32 != quadrant || lane0 % 32 + rows > 32 {
            let text = format!(
                "warp {} reaches lanes {} to {} only, the access covers {lane0} to {}",
                warp.index,
                quadrant * 32,
                quadrant * 32 + 31,
                lane0 + rows - 1
            );
            return Err(misuse(text));
        }
        let mut width = 0;
        for (r, &reg) in regs.iter().enumerate() {
            for l in 0..32 {
                let (row, column) = place(shape, l, r, split);
                let step = if pack16 { 2 } else { 1 };
                width = width.max((column + 1) * step);
                let (row, column) = (lane0 + row, column0 + column * step);
                let tmem = &mut self.blocks[warp.cta as usize].tmem;
                if load {
                    let mut v = tmem.get(row, column)?;
                    if pack16 {
                        v = v & 0xffff | tmem.get(row, column + 1)? << 16;
                    }
                    warp.put(reg, l, v.into());
                } else {
                    let v = warp.get(reg, l) as u32;
                    tmem.set(row, column, if pack16 { v & 0xffff } else { v })?;
                    if pack16 {
                        tmem.set(row, column + 1, v >> 16)?;
                    }
                }
            }
        }
        let mut written = dst.to_vec();
        if load && inst.dst[0].is_some() {
            // `.red.max.f32` returns NaN only where all elements are NaN.
            for l in 0..32 {
                let of = regs.iter().map(|&reg| f32::from_bits(warp.get(reg, l) as u32));
                let maximum = of.reduce(f32::max).unwrap_or(f32::NEG_INFINITY);
                warp.put(inst.dst[0], l, u64::from(maximum.to_bits()));
            }
            written.push(inst.dst[0]);
        }
        if let Some(t) = &mut self.tracker {
            let touch = if load { Touch::Read } else { Touch::Write };
            t.tensor_access(touch, warp, [quadrant, column0, width].map(|n| n as u32), &written)?;
        }
        Ok(())
    }

    /// Tracks all products and copies of this warp so far, announced to an mbarrier when they end.
    fn tmem_commit(&mut self, warp: &mut Warp, inst: &Inst, lane: usize, multicast: bool) -> Exec<()> {
        let address = warp.get(inst.src[0], lane).wrapping_add(warp.get(inst.src[3], lane));
        let (cta, at) = self.cluster_target(address)?;
        let mask = if multicast { warp.get(inst.src[1], lane) as u32 } else { 1 << cta };
        for target in (0..self.blocks.len() as u32).filter(|r| mask >> r & 1 != 0) {
            let mut gathered = self.take_gathered(target, at)?;
            if let Some(t) = &mut self.tracker {
                t.async_barrier(target, at)?;
                t.tcgen_release(warp, &mut gathered);
            }
            self.arrive_plain(target, at, 1, false, false, gathered)?;
        }
        Ok(())
    }

    fn tmem_copy(&mut self, warp: &mut Warp, inst: &Inst, lane: usize, shape: CpShape, cta: u32) -> Exec<()> {
        let desc = Descriptor::sm100(warp.get(inst.src[1], lane))?;
        let (lane0, column0) = self.tmem_address(warp, inst, lane);
        let most = if shape == CpShape::L4x256b { PART } else { 1 };
        if lane0 >= most {
            let text =
                format!("tcgen05.cp {shape:?} to tensor memory from lane {lane0}, the last is {}", most - 1);
            return Err(misuse(text));
        }
        // Rows of the matrix, its bytes a row, and the lanes that each row goes to.
        let (rows, bytes): (usize, u32) = match shape {
            CpShape::L128x256b => (128, 32),
            CpShape::L128x128b => (128, 16),
            CpShape::L64x128bWarpx2First | CpShape::L64x128bWarpx2Second => (64, 16),
            CpShape::L32x128bWarpx4 => (32, 16),
            CpShape::L4x256b => (4, 32),
        };
        let targets = |row: usize| -> Vec<usize> {
            match shape {
                CpShape::L32x128bWarpx4 => (0..4).map(|q| q * 32 + row).collect(),
                CpShape::L64x128bWarpx2First => [0, 2].map(|q| (q + row / 32) * 32 + row % 32).to_vec(),
                CpShape::L64x128bWarpx2Second => [0, 1].map(|q| (q + row / 32 * 2) * 32 + row % 32).to_vec(),
                // Row `row` goes to lane `lane0` of warp `row`'s part.
                CpShape::L4x256b => vec![lane0 + row * PART],
                CpShape::L128x256b | CpShape::L128x128b => vec![row],
            }
        };
        let clocks = self.tracker.as_mut().map(|t| t.tcgen_issue(warp)).unwrap_or_default();
        for row in 0..rows {
            for byte in (0..bytes).step_by(16) {
                let at = desc.chunk(false, row as u32, byte);
                let block = &mut self.blocks[cta as usize];
                block.shared.check(at, 16, 16, "tcgen05.cp source")?;
                block.shared.check_written(at, 16, "tcgen05.cp source")?;
                for (i, word) in block.shared.get(at, 16).chunks_exact(4).enumerate() {
                    let value = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                    for to in targets(row) {
                        block.tmem.set(to, column0 + byte as usize / 4 + i, value)?;
                    }
                }
                if let Some(t) = &mut self.tracker {
                    t.tcgen_read_shared(warp, &clocks, cta, at)?;
                }
            }
        }
        if let Some(t) = &mut self.tracker {
            for quadrant in 0..4 {
                t.tcgen_tmem(Touch::Write, warp, &clocks, cta, [quadrant, column0 as u32, bytes / 4])?;
            }
        }
        Ok(())
    }

    /// Rows of one warp's part moved by a row: `.31x256b`, PTX ISA 9.7.16.9.
    fn tmem_shift(&mut self, warp: &mut Warp, inst: &Inst, lane: usize, pair: bool) -> Exec<()> {
        let (row, column) = self.tmem_address(warp, inst, lane);
        if row % PART != 0 {
            let text = format!("tcgen05.shift at tensor memory lane {row}: no multiple of {PART}");
            return Err(fault(FaultKind::Misaligned, text));
        }
        if row >= LANES {
            return Err(misuse(format!("tcgen05.shift at lane {row} of {LANES}")));
        }
        let clocks = self.tracker.as_mut().map(|t| t.tcgen_issue(warp)).unwrap_or_default();
        let part = [row / PART, column, ELEMENT].map(|n| n as u32);
        for cta in group_blocks(warp, pair) {
            self.shift_part(warp, &clocks, cta, part)?;
        }
        Ok(())
    }

    /// Moves the rows of one warp's part: number of the part, first column, columns of one element.
    pub(super) fn shift_part(&mut self, warp: &Warp, clocks: &Clocks, cta: u32, part: [u32; 3]) -> Exec<()> {
        let way = self.launch.options.row_shift;
        self.blocks[cta as usize].tmem.shift(part[0] as usize * PART, part[1] as usize, way)?;
        if let Some(t) = &mut self.tracker {
            t.tcgen_tmem(Touch::Read, warp, clocks, cta, part)?;
            t.tcgen_tmem(Touch::Write, warp, clocks, cta, part)?;
        }
        Ok(())
    }
}
