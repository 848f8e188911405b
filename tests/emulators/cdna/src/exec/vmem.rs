//! Vector memory: buffer, global, flat and scratch instructions.

use std::ops::Range;

use super::address::{Place, Places};
use super::ds::place;
use super::{Group, atomics, unknown};
use crate::checks::lds::DmaWrite;
use crate::checks::regs::Outstanding;
use crate::error::{Exec, FaultKind, Stop};
use crate::inst::{AtomicOp, Half, Inst, M0, Mem, MemKind, Space};
use crate::memory::Allocation;
use crate::op::Op;
use crate::wave::{LANES, Wave};

impl Group<'_> {
    pub(super) fn vmem(&mut self, wave: &mut Wave, inst: &Inst, check: bool) -> Exec {
        let (Some(mem), Op::Memory) = (inst.mem, inst.op) else { return Err(unknown(inst)) };
        let mut dma = None;
        match mem.kind {
            MemKind::Cache => return Ok(()),
            MemKind::Load { bytes, sext, half } => {
                let places = self.places(wave, inst, &mem, u32::from(bytes))?;
                self.profile_lines(&places, bytes, true);
                self.load(wave, inst, &places, bytes, sext, half)?;
            }
            MemKind::Store { bytes, half } => {
                let places = self.places(wave, inst, &mem, u32::from(bytes))?;
                self.profile_lines(&places, bytes, false);
                self.store(wave, &mem, &places, bytes, half)?;
            }
            MemKind::Atomic { op, bytes, returns } => {
                let places = self.places(wave, inst, &mem, u32::from(bytes))?;
                self.profile_lines(&places, bytes, true);
                self.atomic(wave, inst, &mem, &places, op, bytes, returns)?;
            }
            MemKind::ToLds { bytes, sext } => {
                let places = self.places(wave, inst, &mem, u32::from(bytes))?;
                self.profile_lines(&places, bytes, true);
                dma = Some(self.load_to_lds(wave, &mem, &places, bytes, sext)?);
            }
            _ => return Err(unknown(inst)),
        }
        // RDNA counts stores apart (VSCNT, STORECNT), and nothing here is read again before the kernel's end.
        if self.arch.is_rdna() && inst.writes.is_empty() && dma.is_none() {
            return Ok(());
        }
        let flat = mem.space == Space::Flat;
        let fills = inst.writes.first().copied();
        // A direct load must arrive late even where nothing is checked.
        let queue = check || dma.is_some();
        self.issue(wave, queue, || Outstanding {
            vm: true,
            lgkm: flat,
            km: false,
            unordered: flat,
            fills,
            touches: [None, None],
            dma,
        });
        Ok(())
    }

    fn profile_lines(&mut self, places: &Places, bytes: u8, is_read: bool) {
        if self.profile {
            self.counters.lines(
                places.iter().filter_map(|place| match *place {
                    Place::Memory(address) => Some(address),
                    Place::Buffer { address, in_range } if in_range > 0 => Some(address),
                    _ => None,
                }),
                u64::from(bytes),
                is_read,
            );
        }
    }

    /// The allocation that holds a lane's access, and the offset in it.
    #[inline(always)]
    fn locate(&self, wave: &mut Wave, address: u64, bytes: usize, lane: usize) -> Exec<(&Allocation, usize)> {
        let view = self.memory;
        let found = view.find(address, wave.last_allocation);
        if let Some(index) = found {
            let allocation = &view.allocations[index];
            let at = (address - allocation.base) as usize;
            if at + bytes <= allocation.bytes {
                wave.last_allocation = index;
                return Ok((allocation, at));
            }
        }
        Err(Stop::lane(FaultKind::OutOfBounds, lane, view.describe(address, bytes)))
    }

    #[inline(always)]
    fn fetch(&mut self, wave: &mut Wave, spot: Place, bytes: usize, l: usize) -> Exec<[u32; 4]> {
        let mut value = [0; 4];
        let (address, bytes) = match spot {
            Place::Off => return Ok(value),
            Place::Memory(address) => (address, bytes),
            Place::Buffer { address, in_range } => (address, in_range as usize),
            Place::Lds(address) => {
                self.lds.bounds(address, bytes as u32, l)?;
                if self.lds.checked() {
                    self.lds.check_read(address, bytes as u32, wave.id, l)?;
                }
                self.lds.load(address, bytes as u32, &mut value);
                return Ok(value);
            }
            Place::Private(address) => {
                for (i, byte) in wave.scratch[private(wave, address, bytes, l)?].iter().enumerate() {
                    value[i / 4] |= u32::from(*byte) << (8 * (i % 4));
                }
                return Ok(value);
            }
        };
        if bytes == 0 {
            return Ok(value);
        }
        let uninit = self.checks.uninit_memory;
        let (allocation, at) = self.locate(wave, address, bytes, l)?;
        if uninit && !allocation.is_written(at, bytes) {
            return Err(Stop::lane(
                FaultKind::UninitMemory,
                l,
                format!("{bytes} bytes at 0x{address:x} (offset {at} of an allocation) were never written"),
            ));
        }
        allocation.read(at, bytes, &mut value);
        Ok(value)
    }

    fn load(
        &mut self,
        wave: &mut Wave,
        inst: &Inst,
        places: &Places,
        bytes: u8,
        sext: bool,
        half: Half,
    ) -> Exec {
        let dwords = u16::from(bytes.div_ceil(4));
        for (l, spot) in places.iter().enumerate() {
            if matches!(spot, Place::Off) {
                continue;
            }
            let value = self.fetch(wave, *spot, usize::from(bytes), l)?;
            if let Place::Private(address) = *spot {
                let at = private(wave, address, usize::from(bytes), l)?;
                // A register with one byte that holds something may be a struct with gaps.
                for (d, defined) in wave.scratch_defined[at].chunks(4).enumerate() {
                    wave.checks.loaded_undefined[d] |= u64::from(!defined.contains(&true)) << l;
                }
            }
            if bytes >= 4 {
                for d in 0..dwords {
                    wave.vreg_mut(inst.vdst + d).0[l] = value[usize::from(d)];
                }
            } else {
                place(wave, inst.vdst, l, value[0], bytes, sext, half);
            }
        }
        Ok(())
    }

    /// A lane may put undefined values into its private memory, as spills of registers that hold something in part do;
    /// what it loads from there is then undefined.
    fn store(&mut self, wave: &mut Wave, mem: &Mem, places: &Places, bytes: u8, half: Half) -> Exec {
        let dwords = u16::from(bytes.div_ceil(4));
        let is_public = |place: &Place| !matches!(place, Place::Off | Place::Private(_));
        let public =
            places.iter().enumerate().fold(0, |lanes, (l, place)| lanes | u64::from(is_public(place)) << l);
        for d in 0..dwords {
            wave.checks.read_vreg(mem.data + d, public)?;
        }
        for (l, spot) in places.iter().enumerate() {
            let mut value = [0; 4];
            for d in 0..dwords {
                value[usize::from(d)] = wave.vreg(mem.data + d).0[l];
            }
            if half == Half::Hi {
                value[0] >>= 16;
            }
            let (address, bytes) = match *spot {
                Place::Off => continue,
                Place::Memory(address) => (address, usize::from(bytes)),
                Place::Buffer { address, in_range } => (address, in_range as usize),
                Place::Lds(address) => {
                    let size = u32::from(bytes);
                    self.lds.bounds(address, size, l)?;
                    if self.lds.checked() {
                        self.lds.check_write(address, size, wave.id, l)?;
                    }
                    self.lds.store(address, size, &value);
                    continue;
                }
                Place::Private(address) => {
                    for (i, at) in private(wave, address, usize::from(bytes), l)?.enumerate() {
                        wave.scratch[at] = (value[i / 4] >> (8 * (i % 4))) as u8;
                        wave.scratch_defined[at] = wave.checks.is_defined(mem.data + i as u16 / 4, l);
                    }
                    continue;
                }
            };
            if bytes == 0 {
                continue;
            }
            let (allocation, at) = self.locate(wave, address, bytes, l)?;
            writable(allocation, address, l)?;
            allocation.write(at, bytes, &value);
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments, reason = "the operands of one instruction")]
    fn atomic(
        &mut self,
        wave: &mut Wave,
        inst: &Inst,
        mem: &Mem,
        places: &Places,
        op: AtomicOp,
        bytes: u8,
        returns: bool,
    ) -> Exec {
        let wide = bytes == 8;
        let step = u16::from(bytes / 4);
        for (l, spot) in places.iter().enumerate() {
            let operand = |first: u16| {
                let lo = u64::from(wave.vreg(first).0[l]);
                lo | if wide { u64::from(wave.vreg(first + 1).0[l]) << 32 } else { 0 }
            };
            let data = operand(mem.data);
            let compare = if op == AtomicOp::CmpSwap { operand(mem.data + step) } else { 0 };
            let address = match *spot {
                Place::Off => continue,
                Place::Memory(address) => address,
                Place::Buffer { address, in_range } if in_range == u32::from(bytes) => address,
                Place::Buffer { .. } => {
                    if returns {
                        wave.vreg_mut(inst.vdst).0[l] = 0;
                    }
                    continue;
                }
                Place::Lds(address) => {
                    let size = u32::from(bytes);
                    self.lds.bounds(address, size, l)?;
                    if self.lds.checked() {
                        self.lds.check_atomic(address, size, wave.id, l)?;
                    }
                    let mut old = [0; 4];
                    self.lds.load(address, size, &mut old);
                    let old = u64::from(old[0]) | u64::from(old[1]) << 32;
                    let new = atomics::apply(op, wide, old, data, compare);
                    self.lds.store(address, size, &[new as u32, (new >> 32) as u32, 0, 0]);
                    if returns {
                        wave.vreg_mut(inst.vdst).0[l] = old as u32;
                        if wide {
                            wave.vreg_mut(inst.vdst + 1).0[l] = (old >> 32) as u32;
                        }
                    }
                    continue;
                }
                Place::Private(_) => {
                    return Err(Stop::lane(FaultKind::UnknownInstruction, l, "atomic on private memory"));
                }
            };
            let size = usize::from(bytes);
            let uninit = self.checks.uninit_memory;
            let (allocation, at) = self.locate(wave, address, size, l)?;
            writable(allocation, address, l)?;
            if uninit && op != AtomicOp::Swap && !allocation.is_written(at, size) {
                return Err(Stop::lane(
                    FaultKind::UninitMemory,
                    l,
                    format!("atomic on 0x{address:x} (offset {at} of an allocation), never written"),
                ));
            }
            let Some(old) = atomics::update(allocation, at, wide, op, data, compare) else {
                return Err(Stop::lane(FaultKind::Misaligned, l, format!("atomic on 0x{address:x}")));
            };
            allocation.mark_written(at, size);
            if returns {
                wave.vreg_mut(inst.vdst).0[l] = old as u32;
                if wide {
                    wave.vreg_mut(inst.vdst + 1).0[l] = (old >> 32) as u32;
                }
            }
        }
        Ok(())
    }

    /// Reads memory now and gives the LDS write that completes at the wait. LDS address: M0 plus the instruction's
    /// offset, lanes one behind the other (CDNA3 ISA, "Memory reads to LDS").
    fn load_to_lds(
        &mut self,
        wave: &mut Wave,
        mem: &Mem,
        places: &Places,
        bytes: u8,
        sext: bool,
    ) -> Exec<Box<DmaWrite>> {
        let base = (wave.s[usize::from(M0)] & 0x3_ffff).wrapping_add(mem.offset as u32);
        // Narrow loads still take a dword a lane.
        let slot = u32::from(bytes.max(4));
        let mut write = Box::new(DmaWrite {
            exec: wave.exec(),
            bytes: slot,
            addresses: [0; LANES],
            data: [[0; 4]; LANES],
        });
        for (l, spot) in places.iter().enumerate() {
            if matches!(spot, Place::Off) {
                continue;
            }
            let mut value = self.fetch(wave, *spot, usize::from(bytes), l)?;
            if sext {
                let shift = 32 - 8 * u32::from(bytes);
                value[0] = ((value[0] << shift) as i32 >> shift) as u32;
            }
            let address = base.wrapping_add(slot * l as u32);
            self.lds.bounds(address, slot, l)?;
            if self.lds.checked() {
                self.lds.check_dma(address, slot, wave.id, l)?;
            }
            write.addresses[l] = address;
            write.data[l] = value;
        }
        Ok(write)
    }
}

fn writable(allocation: &Allocation, address: u64, lane: usize) -> Exec {
    if allocation.is_read_only() {
        return Err(Stop::lane(
            FaultKind::OutOfBounds,
            lane,
            format!("store to 0x{address:x}, in a code object"),
        ));
    }
    Ok(())
}

/// Places in the wave's private memory of the bytes of one lane's access.
fn private(wave: &Wave, address: u32, bytes: usize, lane: usize) -> Exec<Range<usize>> {
    let size = wave.scratch_bytes as usize;
    let at = address as usize;
    if at + bytes > size {
        return Err(Stop::lane(
            FaultKind::OutOfBounds,
            lane,
            format!("{bytes} bytes at private address {at}, of {size} a lane"),
        ));
    }
    Ok(lane * size + at..lane * size + at + bytes)
}
