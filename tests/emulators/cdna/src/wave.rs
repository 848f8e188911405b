//! The architectural state of one wave.

use crate::checks::regs::RegChecks;
use crate::inst::{EXEC, Src, VCC, VReg};

/// Lanes of a wave.
pub(crate) const LANES: usize = 64;
/// Vector and accumulator registers of a lane.
pub(crate) const VREGS: usize = 512;

/// Slots behind the registers: three for sources that are no plain register, one for a result on its way.
const SLOTS: usize = 4;
/// Index of the first slot.
pub(crate) const SLOT: usize = VREGS;
/// Slot in which a result waits for its modifiers.
pub(crate) const RESULT: usize = VREGS + 3;

/// One vector register: a value a lane.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct Lanes(pub(crate) [u32; LANES]);

impl Lanes {
    pub(crate) const ZERO: Self = Self([0; LANES]);

    #[inline(always)]
    pub(crate) fn splat(value: u32) -> Self {
        Self([value; LANES])
    }
}

/// Event that a wave waits for, or its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    AtBarrier,
    Ended,
}

/// Registers and flags of one wave.
pub(crate) struct Wave {
    pub(crate) v: Box<[Lanes; VREGS + SLOTS]>,
    /// Indexed by operand number: s0.., VCC at 106, M0 at 124, EXEC at 126.
    pub(crate) s: [u32; 128],
    pub(crate) scc: bool,
    /// Index of the next instruction.
    pub(crate) pc: u32,
    /// The MODE register: rounding and denormal control.
    pub(crate) mode: u32,
    pub(crate) state: State,
    /// gfx12: it has signalled a barrier that it has not waited for.
    pub(crate) signalled: bool,
    /// Wave in the workgroup.
    pub(crate) id: u32,
    /// Lanes 32 to 63 of a wave of 32, which are never active: their values have no meaning.
    pub(crate) absent: u64,
    /// EXEC when the wave began.
    pub(crate) launched: u64,
    /// Private memory, `scratch_bytes` a lane.
    pub(crate) scratch: Vec<u8>,
    pub(crate) scratch_bytes: u32,
    /// Bytes of scratch that hold something.
    pub(crate) scratch_defined: Vec<bool>,
    pub(crate) checks: RegChecks,
    /// Instructions executed.
    pub(crate) executed: u64,
    /// Allocation that the last access fell in.
    pub(crate) last_allocation: usize,
    /// MODE sets nothing but the default: round to nearest, keep subnormals.
    pub(crate) plain_mode: bool,
    pub(crate) workspace: Option<Box<crate::exec::mfma::Workspace>>,
}

impl Wave {
    pub(crate) fn new() -> Self {
        let v: Box<[Lanes]> = vec![Lanes::ZERO; VREGS + SLOTS].into_boxed_slice();
        let v: Box<[Lanes; VREGS + SLOTS]> = v.try_into().unwrap_or_else(|_| unreachable!());
        Self {
            v,
            s: [0; 128],
            scc: false,
            pc: 0,
            mode: 0,
            state: State::Ended,
            signalled: false,
            id: 0,
            absent: 0,
            launched: 0,
            scratch: Vec::new(),
            scratch_bytes: 0,
            scratch_defined: Vec::new(),
            checks: RegChecks::default(),
            executed: 0,
            last_allocation: 0,
            plain_mode: true,
            workspace: None,
        }
    }

    /// The register; the number wraps, as an instruction near the end of the file would.
    #[inline(always)]
    pub(crate) fn vreg(&self, reg: VReg) -> &Lanes {
        &self.v[usize::from(reg) % VREGS]
    }

    #[inline(always)]
    pub(crate) fn vreg_mut(&mut self, reg: VReg) -> &mut Lanes {
        &mut self.v[usize::from(reg) % VREGS]
    }

    /// Whether every lane of the wave is active.
    #[inline(always)]
    pub(crate) fn is_whole(&self) -> bool {
        self.exec() | self.absent == !0
    }

    /// Writes a lane mask: two registers, of a wave of 32 one.
    #[inline(always)]
    pub(crate) fn set_mask(&mut self, reg: u8, mask: u64) {
        if self.absent == 0 {
            self.set_s64(reg, mask);
        } else {
            self.s[usize::from(reg & 127)] = mask as u32;
        }
    }

    /// VCC; for a wave of 32 its low half.
    #[inline(always)]
    pub(crate) fn vcc(&self) -> u64 {
        self.s64(VCC) & !self.absent
    }

    #[inline(always)]
    pub(crate) fn exec(&self) -> u64 {
        self.s64(EXEC)
    }

    #[inline(always)]
    pub(crate) fn s64(&self, reg: u8) -> u64 {
        let reg = usize::from(reg & 127);
        u64::from(self.s[reg]) | u64::from(self.s[(reg + 1) & 127]) << 32
    }

    #[inline(always)]
    pub(crate) fn set_s64(&mut self, reg: u8, value: u64) {
        let reg = usize::from(reg & 127);
        self.s[reg] = value as u32;
        self.s[(reg + 1) & 127] = (value >> 32) as u32;
    }

    /// A scalar operand of 32 bits.
    #[inline(always)]
    pub(crate) fn scalar(&self, src: Src) -> u32 {
        match src {
            Src::S(reg) => self.s[usize::from(reg & 127)],
            Src::K(lo, _) => lo,
            Src::Scc => u32::from(self.scc),
            Src::Vccz => u32::from(self.vcc() == 0),
            Src::Execz => u32::from(self.exec() == 0),
            Src::V(_) | Src::None => 0,
        }
    }

    /// A scalar operand of 64 bits.
    #[inline(always)]
    pub(crate) fn scalar64(&self, src: Src) -> u64 {
        match src {
            Src::S(reg) => self.s64(reg),
            Src::K(lo, hi) => u64::from(lo) | u64::from(hi) << 32,
            other => u64::from(self.scalar(other)),
        }
    }

    /// Bits of the MODE register say that f32 subnormals are flushed.
    #[inline(always)]
    pub(crate) fn flushes_f32(&self) -> bool {
        self.mode >> 4 & 3 != 3
    }

    #[inline(always)]
    pub(crate) fn flushes_f16(&self) -> bool {
        self.mode >> 6 & 3 != 3
    }
}
