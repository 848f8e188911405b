//! LDS instructions.

use super::atomics;
use super::cross::{bpermute, permute, swizzle};
use super::lanes::masked;
use super::{Group, unknown};
use crate::checks::lds::Touch;
use crate::checks::regs::Outstanding;
use crate::error::Exec;
use crate::inst::{AtomicOp, Half, Inst, Mem, MemKind, VReg};
use crate::op::Op;
use crate::wave::{LANES, Lanes, VREGS, Wave};

impl Group<'_> {
    pub(super) fn lds(&mut self, wave: &mut Wave, inst: &Inst, check: bool) -> Exec {
        let (Some(mem), Op::Memory) = (inst.mem, inst.op) else { return Err(unknown(inst)) };
        let exec = wave.exec();
        let mut touches = [None, None];
        match mem.kind {
            MemKind::Load { bytes, sext, half } => {
                let addresses = lane_addresses(wave, &mem, mem.offset);
                self.lds_load(wave, inst.vdst, &addresses, bytes, sext, half)?;
                self.touch(&mut touches, check, false, exec, bytes, &addresses);
            }
            MemKind::Load2 { bytes, .. } => {
                let step = u16::from(bytes / 4);
                // Both addresses are read before the destination is written, which may be the address
                // register.
                let both = [mem.offset, mem.offset2].map(|offset| lane_addresses(wave, &mem, offset));
                for (i, addresses) in both.iter().enumerate() {
                    self.lds_load(wave, inst.vdst + step * i as u16, addresses, bytes, false, Half::Whole)?;
                    self.touch(&mut touches, check, false, exec, bytes, addresses);
                }
            }
            MemKind::Store { bytes, half } => {
                let addresses = lane_addresses(wave, &mem, mem.offset);
                self.lds_store(wave, mem.data, &addresses, bytes, half)?;
                self.touch(&mut touches, check, true, exec, bytes, &addresses);
            }
            MemKind::Store2 { bytes, .. } => {
                for (offset, data) in [(mem.offset, mem.data), (mem.offset2, mem.data2)] {
                    let addresses = lane_addresses(wave, &mem, offset);
                    self.lds_store(wave, data, &addresses, bytes, Half::Whole)?;
                    self.touch(&mut touches, check, true, exec, bytes, &addresses);
                }
            }
            MemKind::Atomic { op, bytes, returns } => {
                let addresses = lane_addresses(wave, &mem, mem.offset);
                self.lds_atomic(wave, inst, &mem, &addresses, op, bytes, returns)?;
                self.touch(&mut touches, check, true, exec, bytes, &addresses);
            }
            MemKind::ReadTranspose { bits } => {
                let addresses = lane_addresses(wave, &mem, mem.offset);
                let bytes = if bits == 6 { 12 } else { 8 };
                self.read_transpose(wave, inst, &addresses, bits)?;
                self.touch(&mut touches, check, false, exec, bytes, &addresses);
            }
            MemKind::Permute | MemKind::Bpermute | MemKind::Swizzle => {
                let address = mem.vaddr.map_or(Lanes::ZERO, |reg| *wave.vreg(reg));
                let out = match mem.kind {
                    MemKind::Permute => permute(&address, mem.offset, wave.vreg(mem.data), exec),
                    MemKind::Bpermute => {
                        bpermute(&address, mem.offset, wave.vreg(mem.data), exec, !wave.absent)
                    }
                    _ => swizzle(mem.offset, &address, exec),
                };
                masked(wave.vreg_mut(inst.vdst), &out, exec);
            }
            _ => return Err(unknown(inst)),
        }
        let fills = inst.writes.first().copied();
        self.issue(wave, check, || Outstanding {
            vm: false,
            lgkm: true,
            km: false,
            unordered: false,
            fills,
            touches,
            dma: None,
        });
        Ok(())
    }

    fn touch(
        &mut self,
        touches: &mut [Option<Box<Touch>>; 2],
        check: bool,
        write: bool,
        exec: u64,
        bytes: u8,
        addresses: &[u32; LANES],
    ) {
        if check {
            let touch = Box::new(Touch { write, exec, bytes: u32::from(bytes), addresses: *addresses });
            let free = usize::from(touches[0].is_some());
            touches[free] = Some(touch);
        }
        if self.profile {
            self.counters.bank_conflicts(self.arch, exec, u32::from(bytes), addresses);
        }
    }

    #[inline(always)]
    fn lds_load(
        &mut self,
        wave: &mut Wave,
        vdst: VReg,
        addresses: &[u32; LANES],
        bytes: u8,
        sext: bool,
        half: Half,
    ) -> Exec {
        if bytes >= 4 && self.lds.all_inside(addresses, u32::from(bytes), wave.exec()) {
            if self.lds.checked() {
                self.lds.check_reads(addresses, u32::from(bytes), wave.id, wave.exec())?;
            }
            match bytes {
                4 => self.gather::<1>(wave, vdst, addresses),
                8 => self.gather::<2>(wave, vdst, addresses),
                12 => self.gather::<3>(wave, vdst, addresses),
                _ => self.gather::<4>(wave, vdst, addresses),
            }
            return Ok(());
        }
        let (exec, checked) = (wave.exec(), self.lds.checked());
        let size = u32::from(bytes);
        let dwords = u16::from(bytes.div_ceil(4));
        for l in 0..LANES {
            if exec >> l & 1 == 0 {
                continue;
            }
            let address = addresses[l];
            self.lds.bounds(address, size, l)?;
            if checked {
                self.lds.check_read(address, size, wave.id, l)?;
            }
            let mut value = [0; 4];
            self.lds.load(address, size, &mut value);
            if bytes >= 4 {
                for d in 0..dwords {
                    wave.vreg_mut(vdst + d).0[l] = value[usize::from(d)];
                }
            } else {
                place(wave, vdst, l, value[0], bytes, sext, half);
            }
        }
        Ok(())
    }

    /// Loads of whole dwords, already checked.
    #[inline(always)]
    fn gather<const N: usize>(&self, wave: &mut Wave, vdst: VReg, addresses: &[u32; LANES]) {
        let exec = wave.exec();
        let words = &self.lds.words[..];
        let first = usize::from(vdst) % VREGS;
        let registers = &mut wave.v[first..first + N];
        for l in 0..LANES {
            if exec >> l & 1 == 1 {
                let at = (addresses[l] / 4) as usize;
                let from = &words[at..at + N];
                for d in 0..N {
                    registers[d].0[l] = from[d];
                }
            }
        }
    }

    /// Stores of whole dwords, already checked.
    #[inline(always)]
    fn scatter<const N: usize>(&mut self, wave: &Wave, data: VReg, addresses: &[u32; LANES]) {
        let exec = wave.exec();
        let first = usize::from(data) % VREGS;
        let registers = &wave.v[first..first + N];
        for l in 0..LANES {
            if exec >> l & 1 == 1 {
                let at = (addresses[l] / 4) as usize;
                let to = &mut self.lds.words[at..at + N];
                for d in 0..N {
                    to[d] = registers[d].0[l];
                }
            }
        }
    }

    #[inline(always)]
    fn lds_store(
        &mut self,
        wave: &mut Wave,
        data: VReg,
        addresses: &[u32; LANES],
        bytes: u8,
        half: Half,
    ) -> Exec {
        if bytes >= 4 && self.lds.all_inside(addresses, u32::from(bytes), wave.exec()) {
            if self.lds.checked() {
                self.lds.check_writes(addresses, u32::from(bytes), wave.id, wave.exec())?;
            }
            match bytes {
                4 => self.scatter::<1>(wave, data, addresses),
                8 => self.scatter::<2>(wave, data, addresses),
                12 => self.scatter::<3>(wave, data, addresses),
                _ => self.scatter::<4>(wave, data, addresses),
            }
            return Ok(());
        }
        let (exec, checked) = (wave.exec(), self.lds.checked());
        let size = u32::from(bytes);
        let dwords = u16::from(bytes.div_ceil(4));
        for l in 0..LANES {
            if exec >> l & 1 == 0 {
                continue;
            }
            let address = addresses[l];
            self.lds.bounds(address, size, l)?;
            if checked {
                self.lds.check_write(address, size, wave.id, l)?;
            }
            let mut value = [0; 4];
            for d in 0..dwords {
                value[usize::from(d)] = wave.vreg(data + d).0[l];
            }
            if half == Half::Hi {
                value[0] >>= 16;
            }
            self.lds.store(address, size, &value);
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments, reason = "the operands of one instruction")]
    fn lds_atomic(
        &mut self,
        wave: &mut Wave,
        inst: &Inst,
        mem: &Mem,
        addresses: &[u32; LANES],
        op: AtomicOp,
        bytes: u8,
        returns: bool,
    ) -> Exec {
        let exec = wave.exec();
        let size = u32::from(bytes);
        let wide = bytes == 8;
        let pair = |wave: &Wave, reg: VReg, l: usize| {
            let lo = u64::from(wave.vreg(reg).0[l]);
            lo | if wide { u64::from(wave.vreg(reg + 1).0[l]) << 32 } else { 0 }
        };
        for l in (0..LANES).filter(|l| exec >> l & 1 == 1) {
            self.lds.bounds(addresses[l], size, l)?;
            if self.lds.checked() {
                self.lds.check_atomic(addresses[l], size, wave.id, l)?;
            }
            let mut old = [0; 4];
            self.lds.load(addresses[l], size, &mut old);
            let old = u64::from(old[0]) | u64::from(old[1]) << 32;
            // LDS compares with the first operand and stores the second; memory has them the other way round.
            let (data, compare) = if op == AtomicOp::CmpSwap {
                (pair(wave, mem.data2, l), pair(wave, mem.data, l))
            } else {
                (pair(wave, mem.data, l), 0)
            };
            let new = atomics::apply(op, wide, old, data, compare);
            self.lds.store(addresses[l], size, &[new as u32, (new >> 32) as u32, 0, 0]);
            if returns {
                wave.vreg_mut(inst.vdst).0[l] = old as u32;
                if wide {
                    wave.vreg_mut(inst.vdst + 1).0[l] = (old >> 32) as u32;
                }
            }
        }
        Ok(())
    }

    /// gfx950's transposing reads: each lane fetches its 8 (or 12) bytes, then the lanes of a group exchange elements.
    /// For 16-bit elements lane `l`, element `n` comes from lane `(l & !15) | (l >> 2 & 3) + 4 n`, element `l & 3`;
    /// narrower elements follow the same rule with as many elements as 8 bytes hold, over 16 lanes.
    fn read_transpose(&mut self, wave: &mut Wave, inst: &Inst, addresses: &[u32; LANES], bits: u8) -> Exec {
        let exec = wave.exec();
        let (count, lanes_per_block) = match bits {
            16 => (4, 16),
            8 => (8, 16),
            _ => return Err(unknown(inst)),
        };
        let mut rows = [0u64; LANES];
        for l in (0..LANES).filter(|l| exec >> l & 1 == 1) {
            self.lds.bounds(addresses[l], 8, l)?;
            if self.lds.checked() {
                self.lds.check_read(addresses[l], 8, wave.id, l)?;
            }
            let mut value = [0; 4];
            self.lds.load(addresses[l], 8, &mut value);
            rows[l] = u64::from(value[0]) | u64::from(value[1]) << 32;
        }
        // `count` lanes hold one row of `lanes_per_block` elements… each lane `count` of them.
        let lanes_per_row = lanes_per_block / count;
        let mask = (1u64 << bits) - 1;
        let (mut lo, mut hi) = (Lanes::ZERO, Lanes::ZERO);
        for l in 0..LANES {
            let column = l % lanes_per_block;
            let base = l - column;
            let mut out = 0u64;
            for n in 0..count {
                let from = base + column / count + lanes_per_row * n;
                out |=
                    (rows[from] >> (usize::from(bits) * (column % count)) & mask) << (usize::from(bits) * n);
            }
            lo.0[l] = out as u32;
            hi.0[l] = (out >> 32) as u32;
        }
        masked(wave.vreg_mut(inst.vdst), &lo, exec);
        masked(wave.vreg_mut(inst.vdst + 1), &hi, exec);
        Ok(())
    }
}

fn lane_addresses(wave: &Wave, mem: &Mem, offset: i32) -> [u32; LANES] {
    let mut out = mem.vaddr.map_or([0; LANES], |reg| wave.vreg(reg).0);
    for address in &mut out {
        *address = address.wrapping_add_signed(offset);
    }
    out
}

/// Puts an 8- or 16-bit value into a register.
#[inline(always)]
pub(super) fn place(wave: &mut Wave, vdst: VReg, l: usize, raw: u32, bytes: u8, sext: bool, half: Half) {
    let value = match (bytes, sext) {
        (1, false) => raw & 0xff,
        (1, true) => i32::from(raw as u8 as i8) as u32,
        (_, false) => raw & 0xffff,
        (_, true) => i32::from(raw as u16 as i16) as u32,
    };
    let slot = &mut wave.vreg_mut(vdst).0[l];
    *slot = match half {
        Half::Whole => value,
        Half::Lo => *slot & 0xffff_0000 | value & 0xffff,
        Half::Hi => *slot & 0xffff | value << 16,
    };
}
