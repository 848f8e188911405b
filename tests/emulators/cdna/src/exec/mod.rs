//! Execution of one wave, instruction by instruction.

/// Defines a function that runs its body compiled for AVX2 and FMA where the host has them: most of the time goes into
/// loops over 64 lanes.
macro_rules! dispatch {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident / $fast:ident / $body:ident($($arg:ident: $ty:ty),*) -> $ret:ty
    ) => {
        $(#[$meta])*
        #[inline]
        $vis fn $name($($arg: $ty),*) -> $ret {
            #[cfg(target_arch = "x86_64")]
            if $crate::exec::has_avx2() {
                // SAFETY: the host has the features that the function is compiled for.
                return unsafe { $fast($($arg),*) };
            }
            $body($($arg),*)
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c,bmi2")]
        fn $fast($($arg: $ty),*) -> $ret {
            $body($($arg),*)
        }
    };
}
mod address;
mod atomics;
mod compare;
mod convert;
pub(crate) mod cross;
mod ds;
mod lanes;
pub(crate) mod mfma;
mod packed;
mod rdna;
pub(crate) mod salu;
mod smem;
mod valu;
mod vmem;
mod wide;
mod wmma;

use crate::checks::Checks;
use crate::checks::lds::Lds;
use crate::checks::regs::Outstanding;
use crate::counters::Counters;
use crate::decode::Program;
use crate::elf::Arch;
use crate::error::{Exec, FaultKind, Stop};
use crate::inst::{Class, Inst};
use crate::memory::View;
use crate::op::Op;
use crate::wave::{State, Wave};

pub(crate) use address::PRIVATE_BUFFER;

/// Whether the host has what the vector loops are compiled for.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn has_avx2() -> bool {
    use std::sync::LazyLock;
    static HAS: LazyLock<bool> = LazyLock::new(|| {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi2")
    });
    *HAS
}

/// Mark of a wait or barrier that was executed.
pub(crate) const EXECUTED: u8 = 1;
/// Mark of a wait that had something to wait for.
pub(crate) const USEFUL: u8 = 2;

/// State that the waves of a workgroup share.
pub(crate) struct Group<'l> {
    pub(crate) program: &'l Program,
    pub(crate) arch: Arch,
    pub(crate) checks: Checks,
    /// Added to an address in the code object to give a device address.
    pub(crate) load_bias: u64,
    pub(crate) memory: &'l View,
    pub(crate) lds: &'l mut Lds,
    pub(crate) counters: &'l mut Counters,
    pub(crate) profile: bool,
    /// Marks by instruction: [`EXECUTED`], [`USEFUL`]. While checking, waits and barriers alone have marks.
    pub(crate) marks: &'l mut [u8],
    /// Instructions a wave may execute.
    pub(crate) limit: u64,
}

impl Group<'_> {
    /// Runs a wave to its next barrier or its end. On a fault `wave.pc` is the faulting instruction.
    pub(crate) fn run(&mut self, wave: &mut Wave) -> Exec {
        let program = self.program;
        let check = self.checks.any();
        wave.state = State::Running;
        loop {
            let Some(inst) = program.insts.get(wave.pc as usize) else {
                return Err(Stop::new(FaultKind::OutOfBounds, "execution left the code"));
            };
            if let Some(second) = &inst.dual {
                self.dual(wave, inst, second, check)?;
            } else if check {
                let exec = wave.exec();
                wave.checks.before(inst, exec)?;
                // The destination's lanes are those active before: v_cmpx and saveexec write EXEC itself.
                self.step(wave, inst, true)?;
                wave.checks.after(inst, exec);
            } else {
                self.step(wave, inst, false)?;
            }
            self.counters.executed[inst.class as usize] += 1;
            wave.executed += 1;
            if wave.executed > self.limit {
                return Err(Stop::new(
                    FaultKind::Timeout,
                    format!("more than {} instructions in one wave", self.limit),
                ));
            }
            if wave.state != State::Running {
                return Ok(());
            }
        }
    }

    #[inline(always)]
    fn step(&mut self, wave: &mut Wave, inst: &Inst, check: bool) -> Exec {
        match inst.class {
            Class::Valu | Class::Transcendental => self.vector(wave, inst, check)?,
            Class::ValuPacked => {
                if !packed::packed(wave, inst)? {
                    self.vector(wave, inst, check)?;
                }
            }
            Class::Mfma if inst.op == Op::Wmma => wmma::wmma(wave, inst, self.arch)?,
            Class::Mfma => {
                mfma::mfma(wave, inst, self.arch)?;
                if let Some(shape) = &inst.mfma {
                    self.counters.mfma_passes += shape.passes(self.arch);
                }
            }
            Class::Lds => self.lds(wave, inst, check)?,
            Class::Vmem => self.vmem(wave, inst, check)?,
            Class::Smem => self.smem(wave, inst, check)?,
            Class::Control => return self.control(wave, inst, check),
            Class::Salu => {
                let next = inst.pc + u64::from(inst.size) + self.load_bias;
                match inst.op {
                    Op::SSetpcB64 | Op::SSwappcB64 => {
                        let to = wave.scalar64(inst.src[0]).wrapping_sub(self.load_bias);
                        if inst.op == Op::SSwappcB64 {
                            wave.set_s64(inst.sdst, next);
                        }
                        return self.jump(wave, to);
                    }
                    _ => salu::salu(wave, inst, next)?,
                }
            }
        }
        wave.pc += 1;
        Ok(())
    }

    #[inline(always)]
    fn vector(&mut self, wave: &mut Wave, inst: &Inst, check: bool) -> Exec {
        if inst.op == Op::Cmp {
            return compare::compare(wave, inst);
        }
        if valu::valu(wave, inst)?
            || convert::convert(wave, inst, self.arch)?
            || wide::wide_ops(wave, inst)?
            || cross::cross(wave, inst, check)?
            || rdna::vector(wave, inst)?
        {
            return Ok(());
        }
        Err(unknown(inst))
    }

    fn jump(&self, wave: &mut Wave, to: u64) -> Exec {
        wave.pc = self.program.index_of(to).ok_or_else(|| {
            Stop::new(FaultKind::OutOfBounds, format!("jump to 0x{to:x}, where no instruction begins"))
        })?;
        Ok(())
    }

    fn control(&mut self, wave: &mut Wave, inst: &Inst, check: bool) -> Exec {
        let taken = match inst.op {
            Op::SBranch => true,
            Op::SCbranchScc0 => !wave.scc,
            Op::SCbranchScc1 => wave.scc,
            Op::SCbranchVccz => wave.vcc() == 0,
            Op::SCbranchVccnz => wave.vcc() != 0,
            Op::SCbranchExecz => wave.exec() == 0,
            Op::SCbranchExecnz => wave.exec() != 0,
            Op::SCallB64 => {
                wave.set_s64(inst.sdst, inst.pc + u64::from(inst.size) + self.load_bias);
                true
            }
            Op::SNop | Op::SSetprio | Op::SSleep | Op::SIcacheInv => false,
            Op::SEndpgm => {
                self.wait(wave, 0, 0);
                wave.state = State::Ended;
                return Ok(());
            }
            Op::SBarrier => {
                self.all_lanes_at_barrier(wave)?;
                wave.state = State::AtBarrier;
                self.mark(wave, EXECUTED);
                false
            }
            Op::SWaitcnt if self.arch.is_rdna() => self.wait_of_rdna(wave, inst),
            _ if self.rdna_control(wave, inst)? => false,
            Op::SWaitcnt => {
                let imm = inst.imm as u32;
                let vm = imm & 15 | (imm >> 14 & 3) << 4;
                // The counters' highest value means that nothing is waited for.
                let vm = if vm == 63 { usize::MAX } else { vm as usize };
                let lgkm = imm >> 8 & 15;
                let lgkm = if lgkm == 15 { usize::MAX } else { lgkm as usize };
                let useful = self.wait(wave, vm, lgkm);
                self.mark(wave, if useful { EXECUTED | USEFUL } else { EXECUTED });
                false
            }
            Op::STrap => return Err(Stop::new(FaultKind::Trap, format!("s_trap {}", inst.imm))),
            _ => return Err(unknown(inst)),
        };
        let _ = check;
        if taken {
            if inst.target == u32::MAX {
                return Err(Stop::new(FaultKind::OutOfBounds, "branch to where no instruction begins"));
            }
            wave.pc = inst.target;
        } else {
            wave.pc += 1;
        }
        Ok(())
    }

    fn all_lanes_at_barrier(&self, wave: &Wave) -> Exec {
        if self.checks.barriers && wave.exec() != wave.launched {
            let missing = wave.launched & !wave.exec();
            return Err(Stop::lane(
                FaultKind::DivergentBarrier,
                missing.trailing_zeros() as usize % 64,
                "a barrier is reached with lanes switched off",
            ));
        }
        Ok(())
    }

    /// Marks the instruction that the wave executes.
    #[inline(always)]
    fn mark(&mut self, wave: &Wave, mark: u8) {
        if let Some(slot) = self.marks.get_mut(wave.pc as usize) {
            *slot |= mark;
        }
    }

    fn wait(&mut self, wave: &mut Wave, vm: usize, lgkm: usize) -> bool {
        self.wait_for(wave, vm, lgkm, 0)
    }

    /// Waits as [`Group::wait`] does, with RDNA 4's count of scalar loads.
    fn wait_for(&mut self, wave: &mut Wave, vm: usize, lgkm: usize, km: usize) -> bool {
        let (arrived, useful) = wave.checks.wait(vm, lgkm, km);
        for write in arrived {
            self.lds.arrive(&write, wave.id);
        }
        useful
    }

    /// Queues an access where somebody may ask about it.
    #[inline(always)]
    pub(crate) fn issue(&mut self, wave: &mut Wave, check: bool, access: impl FnOnce() -> Outstanding) {
        if check {
            wave.checks.issue(access());
        }
    }
}

#[cold]
pub(crate) fn unknown(inst: &Inst) -> Box<Stop> {
    let words: Vec<String> =
        inst.words.iter().take(usize::from(inst.size) / 4).map(|w| format!("{w:08x}")).collect();
    Stop::new(FaultKind::UnknownInstruction, format!("no executor for {} [{}]", inst.name, words.join(" ")))
}
