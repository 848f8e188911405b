//! Instructions that RDNA has and CDNA has not: scalar floats, masks of 32 lanes, exchanges of rows, its
//! waits and barriers.

use super::lanes::{masked, put, source};
use super::valu::ternary;
use super::{EXECUTED, Group, USEFUL};
use crate::error::{Exec, FaultKind, Stop};
use crate::inst::{EXEC, Inst};
use crate::num::func;
use crate::op::Op;
use crate::wave::{Lanes, State, Wave};

fn f(bits: u32) -> f32 {
    f32::from_bits(bits)
}

/// Number of operations that a count in an instruction leaves under way; its highest value waits for nothing.
fn left(count: u32, highest: u32) -> usize {
    if count == highest { usize::MAX } else { count as usize }
}

impl Group<'_> {
    /// gfx11's `s_waitcnt`: bits 4 to 9 count LDS and scalar memory, 10 to 15 vector memory.
    pub(super) fn wait_of_rdna(&mut self, wave: &mut Wave, inst: &Inst) -> bool {
        let imm = inst.imm as u32;
        let useful = self.wait(wave, left(imm >> 10 & 63, 63), left(imm >> 4 & 63, 63));
        self.mark(wave, if useful { EXECUTED | USEFUL } else { EXECUTED });
        false
    }

    /// RDNA's hints, gfx12's counts apart and its barrier in two halves; `false` when it is none of these.
    pub(super) fn rdna_control(&mut self, wave: &mut Wave, inst: &Inst) -> Exec<bool> {
        const NONE: usize = usize::MAX;
        let imm = inst.imm as u32;
        let (vm, lgkm, km) = match inst.op {
            Op::SDelayAlu
            | Op::SClause
            | Op::SWaitAlu
            | Op::SWaitcntDepctr
            | Op::SSetInstPrefetchDistance
            | Op::SSendmsg
            // Stores are not queued.
            | Op::SWaitcntVscnt
            | Op::SWaitStorecnt
            | Op::SWaitExpcnt
            | Op::SWaitSamplecnt
            | Op::SWaitBvhcnt => return Ok(true),
            Op::SWaitLoadcnt => (left(imm, 63), NONE, NONE),
            Op::SWaitDscnt | Op::SWaitStorecntDscnt => (NONE, left(imm & 63, 63), NONE),
            Op::SWaitKmcnt => (NONE, NONE, left(imm, 31)),
            Op::SWaitLoadcntDscnt => (left(imm >> 8 & 63, 63), left(imm & 63, 63), NONE),
            Op::SWaitIdle => (0, 0, 0),
            Op::SBarrierSignal => {
                if wave.signalled {
                    let text = "a barrier is signalled twice before it is waited for";
                    return Err(Stop::new(FaultKind::DivergentBarrier, text));
                }
                wave.signalled = true;
                self.mark(wave, EXECUTED);
                return Ok(true);
            }
            Op::SBarrierWait => {
                if !wave.signalled {
                    let text = "a barrier is waited for that the wave did not signal";
                    return Err(Stop::new(FaultKind::DivergentBarrier, text));
                }
                wave.signalled = false;
                self.all_lanes_at_barrier(wave)?;
                wave.state = State::AtBarrier;
                self.mark(wave, EXECUTED);
                return Ok(true);
            }
            _ => return Ok(false),
        };
        let useful = self.wait_for(wave, vm, lgkm, km);
        self.mark(wave, if useful { EXECUTED | USEFUL } else { EXECUTED });
        Ok(true)
    }

    /// Executes VOPD: both operations read their sources before either writes.
    pub(super) fn dual(&mut self, wave: &mut Wave, first: &Inst, second: &Inst, check: bool) -> Exec {
        let exec = wave.exec();
        if check {
            wave.checks.before(first, exec)?;
            wave.checks.before(second, exec)?;
        }
        let old = *wave.vreg(first.vdst);
        self.vector(wave, first, check)?;
        let result = *wave.vreg(first.vdst);
        *wave.vreg_mut(first.vdst) = old;
        self.vector(wave, second, check)?;
        *wave.vreg_mut(first.vdst) = result;
        if check {
            wave.checks.after(first, exec);
            wave.checks.after(second, exec);
        }
        wave.pc += 1;
        Ok(())
    }
}

/// Executes a vector instruction of RDNA's own; `false` when it is none of these.
pub(super) fn vector(wave: &mut Wave, inst: &Inst) -> Exec<bool> {
    match inst.op {
        Op::VXor3B32 => ternary(wave, inst, |a, b, c| a ^ b ^ c),
        Op::VMaxminF32 => ternary(wave, inst, |a, b, c| f(a).max(f(b)).min(f(c)).to_bits()),
        Op::VMaxminU32 => ternary(wave, inst, |a, b, c| a.max(b).min(c)),
        Op::VMinmaxU32 => ternary(wave, inst, |a, b, c| a.min(b).max(c)),
        Op::VMaxminI32 => ternary(wave, inst, |a, b, c| (a as i32).max(b as i32).min(c as i32) as u32),
        Op::VMinmaxI32 => ternary(wave, inst, |a, b, c| (a as i32).min(b as i32).max(c as i32) as u32),
        Op::VMinmaxF32 => ternary(wave, inst, |a, b, c| f(a).min(f(b)).max(f(c)).to_bits()),
        Op::VCndmaskB16 => {
            let mask = wave.scalar64(inst.src[2]);
            let (mut room_a, mut room_b) = (Lanes::ZERO, Lanes::ZERO);
            let a = *source(wave, inst, 0, &mut room_a);
            let b = *source(wave, inst, 1, &mut room_b);
            let out = std::array::from_fn(|l| (if mask >> l & 1 == 1 { b.0[l] } else { a.0[l] }) & 0xffff);
            put(wave, inst, Lanes(out));
        }
        Op::VPermlane16B32 | Op::VPermlanex16B32 => permlane(wave, inst),
        Op::VSExpF32 => scalar_result(wave, inst, func::exp2),
        Op::VSLogF32 => scalar_result(wave, inst, func::log2),
        Op::VSRcpF32 => scalar_result(wave, inst, func::rcp),
        Op::VSRsqF32 => scalar_result(wave, inst, func::rsq),
        Op::VSSqrtF32 => scalar_result(wave, inst, f32::sqrt),
        _ => return Ok(false),
    }
    Ok(true)
}

/// A transcendental of a scalar, by the vector unit.
fn scalar_result(wave: &mut Wave, inst: &Inst, of: impl Fn(f32) -> f32) {
    let mut room = Lanes::ZERO;
    let value = f(source(wave, inst, 0, &mut room).0[0]);
    wave.s[usize::from(inst.sdst) & 127] = of(value).to_bits();
}

/// Lane i of a row reads the lane of its row, or with `x` of its pair's other row, that nibble i of the 64
/// bits in two scalars names. Inactive lanes are read where bit 0 of `imm` says so, else as 0 with bit 1,
/// else the lane keeps its value.
fn permlane(wave: &mut Wave, inst: &Inst) {
    let across = if inst.op == Op::VPermlanex16B32 { 16 } else { 0 };
    let selects = u64::from(wave.scalar(inst.src[1])) | u64::from(wave.scalar(inst.src[2])) << 32;
    let (mut room, exec) = (Lanes::ZERO, wave.exec());
    let from = *source(wave, inst, 0, &mut room);
    let old = *wave.vreg(inst.vdst);
    let out = std::array::from_fn(|l| {
        let lane = ((l & !15) ^ across) | (selects >> (4 * (l & 15)) & 15) as usize;
        let active = exec >> lane & 1 == 1;
        match inst.imm {
            _ if active => from.0[lane],
            imm if imm & 1 == 1 => from.0[lane],
            imm if imm & 2 == 2 => 0,
            _ => old.0[l],
        }
    });
    masked(wave.vreg_mut(inst.vdst), &Lanes(out), exec);
}

/// Executes a scalar instruction of RDNA's own; `false` when it is none of these.
pub(super) fn scalar(wave: &mut Wave, inst: &Inst) -> bool {
    let [a, b, c] = inst.src.map(|src| wave.scalar(src));
    let (a64, b64) = (wave.scalar64(inst.src[0]), wave.scalar64(inst.src[1]));
    let exec = wave.exec() as u32;
    if let Some(scc) = compares(inst.op, f(a), f(b)) {
        wave.scc = scc;
        return true;
    }
    let wide = match inst.op {
        Op::SAddNcU64 => Some(a64.wrapping_add(b64)),
        Op::SSubNcU64 => Some(a64.wrapping_sub(b64)),
        Op::SMulU64 => Some(a64.wrapping_mul(b64)),
        _ => None,
    };
    if let Some(value) = wide {
        wave.set_s64(inst.sdst, value);
        return true;
    }
    let new_exec = match inst.op {
        Op::SAndSaveexecB32 => Some(a & exec),
        Op::SOrSaveexecB32 => Some(a | exec),
        Op::SXorSaveexecB32 => Some(a ^ exec),
        Op::SNandSaveexecB32 => Some(!(a & exec)),
        Op::SNorSaveexecB32 => Some(!(a | exec)),
        Op::SXnorSaveexecB32 => Some(!(a ^ exec)),
        Op::SAndNot0SaveexecB32 | Op::SAndNot0WrexecB32 => Some(!a & exec),
        Op::SOrNot0SaveexecB32 => Some(!a | exec),
        Op::SAndNot1SaveexecB32 | Op::SAndNot1WrexecB32 => Some(a & !exec),
        Op::SOrNot1SaveexecB32 => Some(a | !exec),
        _ => None,
    };
    if let Some(new) = new_exec {
        let writes_new = matches!(inst.op, Op::SAndNot0WrexecB32 | Op::SAndNot1WrexecB32);
        wave.s[usize::from(inst.sdst) & 127] = if writes_new { new } else { exec };
        wave.s[usize::from(EXEC)] = new;
        wave.scc = new != 0;
        return true;
    }
    let value = match inst.op {
        Op::SPackHlB32B16 => a >> 16 | b << 16,
        Op::SAddF32 => (f(a) + f(b)).to_bits(),
        Op::SSubF32 => (f(a) - f(b)).to_bits(),
        Op::SMulF32 => (f(a) * f(b)).to_bits(),
        Op::SMinNumF32 => f(a).min(f(b)).to_bits(),
        Op::SMaxNumF32 => f(a).max(f(b)).to_bits(),
        Op::SFmacF32 | Op::SFmaakF32 | Op::SFmamkF32 => f(a).mul_add(f(b), f(c)).to_bits(),
        Op::SCeilF32 => f(a).ceil().to_bits(),
        Op::SFloorF32 => f(a).floor().to_bits(),
        Op::STruncF32 => f(a).trunc().to_bits(),
        Op::SRndneF32 => f(a).round_ties_even().to_bits(),
        Op::SCvtF32I32 => (a as i32 as f32).to_bits(),
        Op::SCvtF32U32 => (a as f32).to_bits(),
        Op::SCvtI32F32 => f(a) as i32 as u32,
        Op::SCvtU32F32 => f(a) as u32,
        _ => return false,
    };
    wave.s[usize::from(inst.sdst) & 127] = value;
    true
}

fn compares(op: Op, a: f32, b: f32) -> Option<bool> {
    let ordered = !a.is_nan() && !b.is_nan();
    Some(match op {
        Op::SCmpLtF32 => a < b,
        Op::SCmpEqF32 => a == b,
        Op::SCmpLeF32 => a <= b,
        Op::SCmpGtF32 => a > b,
        // False of a NaN, which `!=` is not.
        Op::SCmpLgF32 => ordered && a != b,
        Op::SCmpGeF32 => a >= b,
        Op::SCmpOF32 => ordered,
        Op::SCmpUF32 => !ordered,
        Op::SCmpNgeF32 => !(ordered && a >= b),
        Op::SCmpNlgF32 => !(ordered && a != b),
        Op::SCmpNgtF32 => !(ordered && a > b),
        Op::SCmpNleF32 => !(ordered && a <= b),
        Op::SCmpNeqF32 => a != b,
        Op::SCmpNltF32 => !(ordered && a < b),
        _ => return None,
    })
}
