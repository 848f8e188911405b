//! Which registers hold something, and which are still being filled.

use super::Checks;
use super::lds::{DmaWrite, Touch};
use crate::error::{Exec, FaultKind, Stop};
use crate::inst::{Class, Inst, MemKind, Regs, Src, Ty, VReg};
use crate::op::Op;
use crate::wave::VREGS;

/// A memory access that may still be under way.
pub(crate) struct Outstanding {
    /// Counted by vmcnt, not yet waited for.
    pub(crate) vm: bool,
    /// Counted by lgkmcnt, not yet waited for.
    pub(crate) lgkm: bool,
    /// Counted by RDNA 4's count of scalar loads (KMCNT), not yet waited for.
    pub(crate) km: bool,
    /// Completes in any order: scalar loads, flat accesses.
    pub(crate) unordered: bool,
    /// Registers it fills.
    pub(crate) fills: Option<Regs>,
    /// LDS it touches: at a barrier it may not have happened yet.
    pub(crate) touches: [Option<Box<Touch>>; 2],
    /// LDS that a direct load will fill.
    pub(crate) dma: Option<Box<DmaWrite>>,
}

/// Direct loads that have arrived. Boxed as they are in the queue: each is a kilobyte, and most waits have none.
#[allow(clippy::vec_box, reason = "they move from queue to queue")]
pub(crate) type Arrivals = Vec<Box<DmaWrite>>;

/// Shadow state of a wave's registers.
pub(crate) struct RegChecks {
    pub(crate) which: Checks,
    /// Lanes that have been written, per register.
    valid: Box<[u64; VREGS]>,
    valid_s: u128,
    /// Registers being filled by an outstanding access.
    pending: [u64; VREGS / 64],
    pending_s: u128,
    pub(crate) queue: Vec<Outstanding>,
    /// Lanes of the present load's registers that got bytes of private memory which hold nothing.
    pub(crate) loaded_undefined: [u64; 4],
}

impl Default for RegChecks {
    fn default() -> Self {
        Self {
            which: Checks::NONE,
            valid: Box::new([0; VREGS]),
            valid_s: 0,
            pending: [0; VREGS / 64],
            pending_s: 0,
            queue: Vec::new(),
            loaded_undefined: [0; 4],
        }
    }
}

fn is_lane_copy(inst: &Inst) -> bool {
    matches!(inst.op, Op::VWritelaneB32 | Op::VReadlaneB32)
}

/// Which of its reads is the data of a store to memory: the last. Each lane's address says whether that may
/// be undefined.
fn stored_by_lane(inst: &Inst) -> Option<usize> {
    let is_store =
        inst.class == Class::Vmem && inst.mem.is_some_and(|mem| matches!(mem.kind, MemKind::Store { .. }));
    is_store.then(|| inst.reads.len() - 1)
}

fn name(reg: VReg) -> String {
    if reg < 256 { format!("v{reg}") } else { format!("a{}", reg - 256) }
}

fn scalar_name(reg: u32) -> String {
    match reg {
        106 | 107 => "vcc".to_owned(),
        124 => "m0".to_owned(),
        126 | 127 => "exec".to_owned(),
        other => format!("s{other}"),
    }
}

/// Bits of a run of scalar registers.
fn scalar_bits(first: u8, count: u8) -> u128 {
    (((1u128 << count.min(127)) - 1) << (first & 127)) & !(0b11 << 126)
}

impl RegChecks {
    pub(crate) fn reset(&mut self, which: Checks) {
        self.which = which;
        self.valid.fill(0);
        self.valid_s = 0;
        self.pending = [0; VREGS / 64];
        self.pending_s = 0;
        self.queue.clear();
        self.loaded_undefined = [0; 4];
    }

    /// Marks lanes of a vector register as written.
    #[inline(always)]
    pub(crate) fn define(&mut self, reg: VReg, lanes: u64) {
        self.valid[usize::from(reg) % VREGS] |= lanes;
    }

    pub(crate) fn define_s(&mut self, first: u8, count: u8) {
        self.valid_s |= scalar_bits(first, count);
    }

    pub(crate) fn is_defined(&self, reg: VReg, lane: usize) -> bool {
        self.valid[usize::from(reg) % VREGS] >> lane & 1 == 1
    }

    /// Checks a read of one vector register.
    #[inline(always)]
    pub(crate) fn read_vreg(&self, reg: VReg, lanes: u64) -> Exec {
        let at = usize::from(reg) % VREGS;
        if self.which.waits && self.pending[at / 64] >> (at % 64) & 1 == 1 {
            return Err(Stop::new(
                FaultKind::MissingWait,
                format!("{} is used while a load fills it", name(reg)),
            ));
        }
        if self.which.uninit_registers {
            let missing = lanes & !self.valid[at];
            if missing != 0 {
                let lane = missing.trailing_zeros() as usize;
                return Err(Stop::lane(
                    FaultKind::UninitRegister,
                    lane,
                    format!("{} was never written", name(reg)),
                ));
            }
        }
        Ok(())
    }

    /// Checks what an instruction is about to read and overwrite.
    #[inline(always)]
    pub(crate) fn before(&mut self, inst: &Inst, exec: u64) -> Exec {
        if inst.copies {
            return self.before_copy(inst, exec);
        }
        if inst.halves {
            return self.before_halves(inst, exec);
        }
        if is_lane_copy(inst) {
            return self.before_lane_copy(inst);
        }
        let lanes_read = if inst.dpp.is_some() {
            crate::exec::cross::dpp_read_mask(inst, exec).unwrap_or(exec)
        } else {
            exec
        };
        let judged_by_lane = stored_by_lane(inst);
        for (i, regs) in inst.reads.iter().enumerate() {
            match *regs {
                Regs::V(first, count) if judged_by_lane == Some(i) => {
                    for reg in first..first + u16::from(count) {
                        self.waited(reg)?;
                    }
                }
                Regs::V(first, count) => {
                    let lanes = if i == 0 { lanes_read } else { exec };
                    for reg in first..first + u16::from(count) {
                        self.read_vreg(reg, lanes)?;
                    }
                }
                Regs::VAll(first, count) => {
                    for reg in first..first + u16::from(count) {
                        self.read_vreg(reg, !0)?;
                    }
                }
                Regs::S(first, count) => self.read_s(first, count, true)?,
            }
        }
        self.overwrites(inst)
    }

    #[cold]
    fn scalar_fault(&self, bits: u128, kind: FaultKind) -> Box<Stop> {
        let reg = scalar_name(bits.trailing_zeros());
        let detail = match kind {
            FaultKind::MissingWait => format!("{reg} is used while a load fills it"),
            _ => format!("{reg} was never written"),
        };
        Stop::new(kind, detail)
    }

    #[inline(always)]
    fn read_s(&self, first: u8, count: u8, defined: bool) -> Exec {
        let bits = scalar_bits(first, count);
        if self.which.waits && self.pending_s & bits != 0 {
            return Err(self.scalar_fault(self.pending_s & bits, FaultKind::MissingWait));
        }
        if defined && self.which.uninit_registers && bits & !self.valid_s != 0 {
            return Err(self.scalar_fault(bits & !self.valid_s, FaultKind::UninitRegister));
        }
        Ok(())
    }

    /// A destination that an outstanding load will still overwrite.
    #[inline(always)]
    fn overwrites(&self, inst: &Inst) -> Exec {
        if !self.which.waits {
            return Ok(());
        }
        for regs in &inst.writes {
            match *regs {
                Regs::V(first, count) | Regs::VAll(first, count) => {
                    for reg in first..first + u16::from(count) {
                        let at = usize::from(reg) % VREGS;
                        // Two loads into one register complete in order: that is a waste, not a fault.
                        if self.pending[at / 64] >> (at % 64) & 1 == 1 && inst.mem.is_none() {
                            return Err(Stop::new(
                                FaultKind::MissingWait,
                                format!("{} is overwritten while a load fills it", name(reg)),
                            ));
                        }
                    }
                }
                Regs::S(first, count) => {
                    let bits = scalar_bits(first, count) & self.pending_s;
                    if bits != 0 {
                        return Err(self.scalar_fault(bits, FaultKind::MissingWait));
                    }
                }
            }
        }
        Ok(())
    }

    /// Scalar registers are spilled to lanes, undefined ones too: see [`RegChecks::after_lane_copy`].
    fn before_lane_copy(&self, inst: &Inst) -> Exec {
        if let Src::S(first) = inst.src[1] {
            self.read_s(first, 1, true)?;
        }
        match inst.src[0] {
            Src::S(first) => self.read_s(first, 1, false)?,
            Src::V(reg) => self.waited(reg)?,
            _ => {}
        }
        self.overwrites(inst)
    }

    /// Copies definedness to one lane or scalar register from its source.
    pub(crate) fn after_lane_copy(&mut self, inst: &Inst, lane: usize) {
        let defined = match inst.src[0] {
            Src::S(first) => scalar_bits(first, 1) & !self.valid_s == 0,
            Src::V(reg) => self.valid[usize::from(reg) % VREGS] >> lane & 1 == 1,
            _ => true,
        };
        if inst.op == Op::VWritelaneB32 {
            let lanes = &mut self.valid[usize::from(inst.vdst) % VREGS];
            *lanes = *lanes & !(1 << lane) | u64::from(defined) << lane;
        } else {
            let bits = scalar_bits(inst.sdst, 1);
            self.valid_s = self.valid_s & !bits | if defined { bits } else { 0 };
        }
    }

    /// A copy may carry undefined values: its destination is then undefined too.
    fn before_copy(&mut self, inst: &Inst, exec: u64) -> Exec {
        let mut valid = !0u64;
        for regs in &inst.reads {
            match *regs {
                Regs::V(first, count) | Regs::VAll(first, count) => {
                    for reg in first..first + u16::from(count) {
                        let at = usize::from(reg) % VREGS;
                        if self.which.waits && self.pending[at / 64] >> (at % 64) & 1 == 1 {
                            return self.read_vreg(reg, 0);
                        }
                        // Lane-crossing copies are judged whole.
                        valid &= if inst.dpp.is_some() { !0 } else { self.valid[at] };
                    }
                }
                Regs::S(first, count) => {
                    self.read_s(first, count, false)?;
                    if scalar_bits(first, count) & !self.valid_s != 0 {
                        valid = 0;
                    }
                }
            }
        }
        self.overwrites(inst)?;
        for regs in &inst.writes {
            match *regs {
                Regs::V(first, count) | Regs::VAll(first, count) => {
                    for reg in first..first + u16::from(count) {
                        let at = usize::from(reg) % VREGS;
                        self.valid[at] = self.valid[at] & !exec | exec & valid;
                    }
                }
                Regs::S(first, count) => {
                    let bits = scalar_bits(first, count);
                    if valid == !0 {
                        self.valid_s |= bits;
                    } else {
                        self.valid_s &= !bits;
                    }
                }
            }
        }
        Ok(())
    }

    /// Each half of the result is as defined as the source halves that it is made of.
    fn before_halves(&mut self, inst: &Inst, exec: u64) -> Exec {
        let packed = matches!(inst.src_ty[0], Ty::F32x2);
        let mut valid = [!0u64; 2];
        for (k, src) in inst.src.iter().enumerate() {
            let wide = inst.src_ty[k].dwords() == 2;
            match *src {
                Src::V(reg) if wide => {
                    for half in 0..2u16 {
                        self.waited(reg + half)?;
                        let lanes = self.valid[usize::from(reg + half) % VREGS];
                        let chosen = |result: usize| {
                            let select = if result == 0 { inst.op_sel } else { inst.op_sel_hi };
                            u16::from(select >> k & 1) == half
                        };
                        let feeds = if packed { [chosen(0), chosen(1)] } else { [half == 0, true] };
                        for (result, feeds) in valid.iter_mut().zip(feeds) {
                            *result &= if feeds { lanes } else { !0 };
                        }
                    }
                }
                Src::V(reg) => self.read_vreg(reg, exec)?,
                Src::S(reg) => self.read_s(reg, inst.src_ty[k].dwords(), !wide)?,
                _ => {}
            }
        }
        self.overwrites(inst)?;
        if self.which.uninit_registers && exec & !valid[0] & !valid[1] != 0 {
            let lane = (exec & !valid[0] & !valid[1]).trailing_zeros() as usize;
            return Err(Stop::lane(
                FaultKind::UninitRegister,
                lane,
                "both halves come from registers never written",
            ));
        }
        for (half, lanes) in valid.into_iter().enumerate() {
            let slot = &mut self.valid[(usize::from(inst.vdst) + half) % VREGS];
            *slot = *slot & !exec | exec & lanes;
        }
        for regs in &inst.writes {
            if let Regs::S(first, count) = *regs {
                self.valid_s |= scalar_bits(first, count);
            }
        }
        Ok(())
    }

    /// No outstanding load fills the register.
    #[inline(always)]
    fn waited(&self, reg: VReg) -> Exec {
        self.read_vreg(reg, 0)
    }

    /// Records what an instruction wrote.
    #[inline(always)]
    pub(crate) fn after(&mut self, inst: &Inst, exec: u64) {
        if inst.copies || inst.halves || is_lane_copy(inst) {
            return;
        }
        for regs in &inst.writes {
            match *regs {
                Regs::V(first, count) => {
                    for reg in first..first + u16::from(count) {
                        self.define(reg, exec);
                    }
                }
                Regs::VAll(first, count) => {
                    for reg in first..first + u16::from(count) {
                        self.define(reg, !0);
                    }
                }
                Regs::S(first, count) => self.valid_s |= scalar_bits(first, count),
            }
        }
        if inst.class == Class::Vmem {
            for (reg, lanes) in (inst.vdst..).zip(std::mem::take(&mut self.loaded_undefined)) {
                self.valid[usize::from(reg) % VREGS] &= !lanes;
            }
        }
    }

    /// Queues an access.
    pub(crate) fn issue(&mut self, access: Outstanding) {
        if let Some(regs) = access.fills {
            self.set_pending(regs, true);
        }
        self.queue.push(access);
    }

    fn set_pending(&mut self, regs: Regs, on: bool) {
        match regs {
            Regs::V(first, count) | Regs::VAll(first, count) => {
                for reg in first..first + u16::from(count) {
                    let at = usize::from(reg) % VREGS;
                    let bit = 1u64 << (at % 64);
                    if on { self.pending[at / 64] |= bit } else { self.pending[at / 64] &= !bit }
                }
            }
            Regs::S(first, count) => {
                let bits = scalar_bits(first, count);
                if on { self.pending_s |= bits } else { self.pending_s &= !bits }
            }
        }
    }

    /// `s_waitcnt`: what is now certainly complete leaves the queue; the direct-to-LDS writes among it are returned.
    /// Also says whether the wait changed anything.
    pub(crate) fn wait(&mut self, vm: usize, lgkm: usize, km: usize) -> (Arrivals, bool) {
        if self.queue.is_empty() {
            return (Vec::new(), false);
        }
        let by_vm = settle(&mut self.queue, vm, |a| &mut a.vm);
        let by_lgkm = settle(&mut self.queue, lgkm, |a| &mut a.lgkm);
        let by_km = settle(&mut self.queue, km, |a| &mut a.km);
        let mut done = Vec::new();
        let mut freed = Vec::new();
        self.queue.retain_mut(|access| {
            let finished = !access.vm && !access.lgkm && !access.km;
            if finished {
                done.extend(access.dma.take());
                freed.extend(access.fills);
            }
            !finished
        });
        for regs in freed {
            self.set_pending(regs, false);
        }
        // A register that two loads fill stays pending while the second is under way.
        for i in 0..self.queue.len() {
            if let Some(regs) = self.queue[i].fills {
                self.set_pending(regs, true);
            }
        }
        (done, by_vm || by_lgkm || by_km)
    }
}

/// Clears one counter's flag on the accesses that `remaining` outstanding ones leave complete: the oldest, unless one
/// among them completes in any order.
fn settle(
    queue: &mut [Outstanding],
    remaining: usize,
    counter: impl Fn(&mut Outstanding) -> &mut bool,
) -> bool {
    let mut counted = 0;
    let mut unordered = false;
    for access in queue.iter_mut() {
        if *counter(access) {
            counted += 1;
            unordered |= access.unordered;
        }
    }
    if remaining > 0 && unordered {
        return false;
    }
    let mut complete = usize::saturating_sub(counted, remaining);
    let any = complete > 0;
    for access in queue.iter_mut() {
        if complete == 0 {
            break;
        }
        let flag = counter(access);
        if *flag {
            *flag = false;
            complete -= 1;
        }
    }
    any
}
