//! Scalar memory.

use super::{Group, unknown};
use crate::checks::regs::Outstanding;
use crate::elf::Arch;
use crate::error::{Exec, FaultKind, Stop};
use crate::inst::{Inst, MemKind, Space};
use crate::op::Op;
use crate::wave::Wave;

impl Group<'_> {
    pub(super) fn smem(&mut self, wave: &mut Wave, inst: &Inst, check: bool) -> Exec {
        let (Some(mem), Op::Memory) = (inst.mem, inst.op) else { return Err(unknown(inst)) };
        match mem.kind {
            MemKind::Cache => return Ok(()),
            MemKind::Time => {
                // The wave's own instruction count: a clock that runs the same every time.
                let now = wave.executed;
                wave.set_s64(inst.sdst, now);
            }
            MemKind::ScalarLoad { dwords } => self.scalar_load(wave, inst, dwords)?,
            MemKind::ScalarLoadPart { bytes, sext } => {
                let base = wave.s64(mem.sbase.unwrap_or(0));
                let offset = i64::from(wave.scalar(mem.soffset)) + i64::from(mem.offset);
                let value = self.scalar_bytes(wave, base.wrapping_add_signed(offset), usize::from(bytes))?;
                let unused = 32 - 8 * u32::from(bytes);
                let extended = if sext { ((value << unused) as i32 >> unused) as u32 } else { value };
                wave.s[usize::from(inst.sdst) & 127] = extended;
            }
            _ => return Err(unknown(inst)),
        }
        let fills = inst.writes.first().copied();
        let apart = self.arch == Arch::Gfx1201;
        self.issue(wave, check, || Outstanding {
            vm: false,
            lgkm: !apart,
            km: apart,
            unordered: true,
            fills,
            touches: [None, None],
            dma: None,
        });
        Ok(())
    }

    fn scalar_load(&mut self, wave: &mut Wave, inst: &Inst, dwords: u8) -> Exec {
        let Some(mem) = inst.mem else { return Err(unknown(inst)) };
        let base = mem.sbase.unwrap_or(0);
        let offset = i64::from(wave.scalar(mem.soffset)) + i64::from(mem.offset);
        let (address, limit) = if mem.space == Space::ScalarBuffer {
            let first = usize::from(base);
            let words: [u32; 4] = std::array::from_fn(|i| wave.s[(first + i) & 127]);
            let start = u64::from(words[0]) | u64::from(words[1] & 0xffff) << 32;
            let stride = u64::from(words[1] >> 16 & 0x3fff).max(1);
            (start, Some(u64::from(words[2]) * stride))
        } else {
            (wave.s64(base), None)
        };
        // Scalar accesses drop the low two bits.
        let address = address.wrapping_add_signed(offset) & !3;
        for d in 0..usize::from(dwords) {
            let at = address + 4 * d as u64;
            let value = match limit {
                Some(limit) if (offset as u64 & !3) + 4 * d as u64 + 4 > limit => 0,
                _ => self.scalar_bytes(wave, at, 4)?,
            };
            wave.s[(usize::from(inst.sdst) + d) & 127] = value;
        }
        Ok(())
    }

    /// Up to four bytes, in the low ones of a word.
    fn scalar_bytes(&self, wave: &mut Wave, address: u64, bytes: usize) -> Exec<u32> {
        let view = self.memory;
        if let Some(index) = view.find(address, wave.last_allocation) {
            let allocation = &view.allocations[index];
            let at = (address - allocation.base) as usize;
            if at + bytes <= allocation.bytes {
                if self.checks.uninit_memory && !allocation.is_written(at, bytes) {
                    let text = format!(
                        "{bytes} bytes at 0x{address:x} (offset {at} of an allocation) were never written"
                    );
                    return Err(Stop::new(FaultKind::UninitMemory, text));
                }
                let mut value = [0; 4];
                allocation.read(at, bytes, &mut value);
                return Ok(value[0]);
            }
        }
        Err(Stop::new(FaultKind::OutOfBounds, view.describe(address, bytes)))
    }
}
