//! Scalar arithmetic.

use crate::error::{Exec, FaultKind, Stop};
use crate::inst::{EXEC, Inst};
use crate::op::Op;
use crate::wave::Wave;

/// Executes a scalar instruction that is no branch; `next_pc` is what `s_getpc` reads.
pub(crate) fn salu(wave: &mut Wave, inst: &Inst, next_pc: u64) -> Exec {
    let a = || wave.scalar(inst.src[0]);
    let b = || wave.scalar(inst.src[1]);
    let a64 = || wave.scalar64(inst.src[0]);
    let b64 = || wave.scalar64(inst.src[1]);
    let dst = || wave.s[usize::from(inst.sdst) & 127];
    // Result of the instruction: 32 or 64 bits, and the condition where it sets one.
    let nonzero = |value: u32| (Out::Word(value), Some(value != 0));
    let nonzero64 = |value: u64| (Out::Pair(value), Some(value != 0));
    let plain = |value: u32| (Out::Word(value), None);
    let (out, scc) = match inst.op {
        Op::SMovB32 => plain(a()),
        Op::SMovB64 => (Out::Pair(a64()), None),
        Op::SCmovB32 => plain(if wave.scc { a() } else { dst() }),
        Op::SCmovB64 => (if wave.scc { Out::Pair(a64()) } else { Out::Nothing }, None),
        Op::SNotB32 => nonzero(!a()),
        Op::SNotB64 => nonzero64(!a64()),
        Op::SBrevB32 => plain(a().reverse_bits()),
        Op::SBrevB64 => (Out::Pair(a64().reverse_bits()), None),
        Op::SBcnt0I32B32 => nonzero(a().count_zeros()),
        Op::SBcnt0I32B64 => nonzero(a64().count_zeros()),
        Op::SBcnt1I32B32 => nonzero(a().count_ones()),
        Op::SBcnt1I32B64 => nonzero(a64().count_ones()),
        Op::SFf0I32B32 => plain(first_bit(u64::from(!a()))),
        Op::SFf0I32B64 => plain(first_bit(!a64())),
        Op::SFf1I32B32 => plain(first_bit(u64::from(a()))),
        Op::SFf1I32B64 => plain(first_bit(a64())),
        Op::SFlbitI32B32 => plain(if a() == 0 { !0 } else { a().leading_zeros() }),
        Op::SFlbitI32B64 => plain(if a64() == 0 { !0 } else { a64().leading_zeros() }),
        Op::SFlbitI32 => {
            let folded = a() ^ ((a() as i32) >> 31) as u32;
            plain(if folded == 0 { !0 } else { folded.leading_zeros() })
        }
        Op::SFlbitI32I64 => {
            let folded = a64() ^ ((a64() as i64) >> 63) as u64;
            plain(if folded == 0 { !0 } else { folded.leading_zeros() })
        }
        Op::SSextI32I8 => plain(i32::from(a() as i8) as u32),
        Op::SSextI32I16 => plain(i32::from(a() as i16) as u32),
        Op::SBitset0B32 => plain(dst() & !(1 << (a() & 31))),
        Op::SBitset1B32 => plain(dst() | 1 << (a() & 31)),
        Op::SBitset0B64 => (Out::Pair(wave.s64(inst.sdst) & !(1 << (a() & 63))), None),
        Op::SBitset1B64 => (Out::Pair(wave.s64(inst.sdst) | 1 << (a() & 63)), None),
        Op::SGetpcB64 => (Out::Pair(next_pc), None),
        Op::SAbsI32 => nonzero((a() as i32).unsigned_abs()),
        Op::SBitreplicateB64B32 => {
            let spread = (0..32).fold(0u64, |out, i| out | (u64::from(a() >> i & 1) * 3) << (2 * i));
            (Out::Pair(spread), None)
        }
        Op::SAndSaveexecB64 => return saveexec(wave, inst, |s, e| s & e),
        Op::SOrSaveexecB64 => return saveexec(wave, inst, |s, e| s | e),
        Op::SXorSaveexecB64 => return saveexec(wave, inst, |s, e| s ^ e),
        Op::SAndn2SaveexecB64 => return saveexec(wave, inst, |s, e| s & !e),
        Op::SOrn2SaveexecB64 => return saveexec(wave, inst, |s, e| s | !e),
        Op::SNandSaveexecB64 => return saveexec(wave, inst, |s, e| !(s & e)),
        Op::SNorSaveexecB64 => return saveexec(wave, inst, |s, e| !(s | e)),
        Op::SXnorSaveexecB64 => return saveexec(wave, inst, |s, e| !(s ^ e)),
        Op::SAndn1SaveexecB64 => return saveexec(wave, inst, |s, e| !s & e),
        Op::SOrn1SaveexecB64 => return saveexec(wave, inst, |s, e| !s | e),
        Op::SAndn1WrexecB64 => return wrexec(wave, inst, !a64() & wave.exec()),
        Op::SAndn2WrexecB64 => return wrexec(wave, inst, a64() & !wave.exec()),

        Op::SAddU32 => {
            let (sum, carry) = a().overflowing_add(b());
            (Out::Word(sum), Some(carry))
        }
        Op::SSubU32 => {
            let (difference, borrow) = a().overflowing_sub(b());
            (Out::Word(difference), Some(borrow))
        }
        Op::SAddI32 => {
            let (sum, overflow) = (a() as i32).overflowing_add(b() as i32);
            (Out::Word(sum as u32), Some(overflow))
        }
        Op::SSubI32 => {
            let (difference, overflow) = (a() as i32).overflowing_sub(b() as i32);
            (Out::Word(difference as u32), Some(overflow))
        }
        Op::SAddcU32 => {
            let sum = u64::from(a()) + u64::from(b()) + u64::from(wave.scc);
            (Out::Word(sum as u32), Some(sum >> 32 != 0))
        }
        Op::SSubbU32 => {
            let difference = i64::from(a()) - i64::from(b()) - i64::from(wave.scc);
            (Out::Word(difference as u32), Some(difference < 0))
        }
        Op::SMinI32 => (Out::Word((a() as i32).min(b() as i32) as u32), Some((a() as i32) < b() as i32)),
        Op::SMaxI32 => (Out::Word((a() as i32).max(b() as i32) as u32), Some(a() as i32 > b() as i32)),
        Op::SMinU32 => (Out::Word(a().min(b())), Some(a() < b())),
        Op::SMaxU32 => (Out::Word(a().max(b())), Some(a() > b())),
        Op::SCselectB32 => plain(if wave.scc { a() } else { b() }),
        Op::SCselectB64 => (Out::Pair(if wave.scc { a64() } else { b64() }), None),
        Op::SAndB32 => nonzero(a() & b()),
        Op::SAndB64 => nonzero64(a64() & b64()),
        Op::SOrB32 => nonzero(a() | b()),
        Op::SOrB64 => nonzero64(a64() | b64()),
        Op::SXorB32 => nonzero(a() ^ b()),
        Op::SXorB64 => nonzero64(a64() ^ b64()),
        Op::SAndn2B32 => nonzero(a() & !b()),
        Op::SAndn2B64 => nonzero64(a64() & !b64()),
        Op::SOrn2B32 => nonzero(a() | !b()),
        Op::SOrn2B64 => nonzero64(a64() | !b64()),
        Op::SNandB32 => nonzero(!(a() & b())),
        Op::SNandB64 => nonzero64(!(a64() & b64())),
        Op::SNorB32 => nonzero(!(a() | b())),
        Op::SNorB64 => nonzero64(!(a64() | b64())),
        Op::SXnorB32 => nonzero(!(a() ^ b())),
        Op::SXnorB64 => nonzero64(!(a64() ^ b64())),
        Op::SLshlB32 => nonzero(a() << (b() & 31)),
        Op::SLshlB64 => nonzero64(a64() << (b() & 63)),
        Op::SLshrB32 => nonzero(a() >> (b() & 31)),
        Op::SLshrB64 => nonzero64(a64() >> (b() & 63)),
        Op::SAshrI32 => nonzero(((a() as i32) >> (b() & 31)) as u32),
        Op::SAshrI64 => nonzero64(((a64() as i64) >> (b() & 63)) as u64),
        Op::SBfmB32 => plain(((1u32 << (a() & 31)) - 1) << (b() & 31)),
        Op::SBfmB64 => (Out::Pair(((1u64 << (a() & 63)) - 1) << (b() & 63)), None),
        Op::SMulI32 => plain(a().wrapping_mul(b())),
        Op::SMulHiU32 => plain(((u64::from(a()) * u64::from(b())) >> 32) as u32),
        Op::SMulHiI32 => plain(((i64::from(a() as i32) * i64::from(b() as i32)) >> 32) as u32),
        Op::SBfeU32 => nonzero(field(u64::from(a()), b(), 32) as u32),
        Op::SBfeI32 => nonzero(signed_field(u64::from(a()), b(), 32) as u32),
        Op::SBfeU64 => nonzero64(field(a64(), b(), 64)),
        Op::SBfeI64 => nonzero64(signed_field(a64(), b(), 64)),
        Op::SAbsdiffI32 => nonzero((a() as i32).wrapping_sub(b() as i32).unsigned_abs()),
        Op::SLshl1AddU32 => shift_add(a(), b(), 1),
        Op::SLshl2AddU32 => shift_add(a(), b(), 2),
        Op::SLshl3AddU32 => shift_add(a(), b(), 3),
        Op::SLshl4AddU32 => shift_add(a(), b(), 4),
        Op::SPackLlB32B16 => plain(a() & 0xffff | b() << 16),
        Op::SPackLhB32B16 => plain(a() & 0xffff | b() & 0xffff_0000),
        Op::SPackHhB32B16 => plain(a() >> 16 | b() & 0xffff_0000),

        Op::SMovkI32 => plain(inst.imm as u32),
        Op::SCmovkI32 => plain(if wave.scc { inst.imm as u32 } else { dst() }),
        Op::SAddkI32 => {
            let (sum, overflow) = (dst() as i32).overflowing_add(inst.imm);
            (Out::Word(sum as u32), Some(overflow))
        }
        Op::SMulkI32 => plain((dst() as i32).wrapping_mul(inst.imm) as u32),
        Op::SGetregB32 => plain(getreg(wave, inst)?),
        Op::SSetregB32 | Op::SSetregImm32B32 => return setreg(wave, inst),
        _ => match condition(wave, inst) {
            Some(scc) => (Out::Nothing, Some(scc)),
            None if super::rdna::scalar(wave, inst) => return Ok(()),
            None => {
                return Err(Stop::new(
                    FaultKind::UnknownInstruction,
                    format!("no executor for {}", inst.name),
                ));
            }
        },
    };
    match out {
        Out::Word(value) => wave.s[usize::from(inst.sdst) & 127] = value,
        Out::Pair(value) => wave.set_s64(inst.sdst, value),
        Out::Nothing => {}
    }
    if let Some(scc) = scc {
        wave.scc = scc;
    }
    Ok(())
}

enum Out {
    Word(u32),
    Pair(u64),
    Nothing,
}

fn shift_add(a: u32, b: u32, shift: u32) -> (Out, Option<bool>) {
    let sum = (u64::from(a) << shift) + u64::from(b);
    (Out::Word(sum as u32), Some(sum >> 32 != 0))
}

/// Comparisons, which only set SCC.
fn condition(wave: &Wave, inst: &Inst) -> Option<bool> {
    let a = wave.scalar(inst.src[0]);
    let b = wave.scalar(inst.src[1]);
    let d = wave.s[usize::from(inst.sdst) & 127];
    let k = inst.imm;
    let ku = u32::from(k as u16);
    Some(match inst.op {
        Op::SCmpEqI32 | Op::SCmpEqU32 => a == b,
        Op::SCmpLgI32 | Op::SCmpLgU32 => a != b,
        Op::SCmpGtI32 => a as i32 > b as i32,
        Op::SCmpGeI32 => a as i32 >= b as i32,
        Op::SCmpLtI32 => (a as i32) < b as i32,
        Op::SCmpLeI32 => a as i32 <= b as i32,
        Op::SCmpGtU32 => a > b,
        Op::SCmpGeU32 => a >= b,
        Op::SCmpLtU32 => a < b,
        Op::SCmpLeU32 => a <= b,
        Op::SCmpEqU64 => wave.scalar64(inst.src[0]) == wave.scalar64(inst.src[1]),
        Op::SCmpLgU64 => wave.scalar64(inst.src[0]) != wave.scalar64(inst.src[1]),
        Op::SBitcmp0B32 => a >> (b & 31) & 1 == 0,
        Op::SBitcmp1B32 => a >> (b & 31) & 1 == 1,
        Op::SBitcmp0B64 => wave.scalar64(inst.src[0]) >> (b & 63) & 1 == 0,
        Op::SBitcmp1B64 => wave.scalar64(inst.src[0]) >> (b & 63) & 1 == 1,
        Op::SCmpkEqI32 => d as i32 == k,
        Op::SCmpkLgI32 => d as i32 != k,
        Op::SCmpkGtI32 => d as i32 > k,
        Op::SCmpkGeI32 => d as i32 >= k,
        Op::SCmpkLtI32 => (d as i32) < k,
        Op::SCmpkLeI32 => d as i32 <= k,
        Op::SCmpkEqU32 => d == ku,
        Op::SCmpkLgU32 => d != ku,
        Op::SCmpkGtU32 => d > ku,
        Op::SCmpkGeU32 => d >= ku,
        Op::SCmpkLtU32 => d < ku,
        Op::SCmpkLeU32 => d <= ku,
        _ => return None,
    })
}

fn first_bit(value: u64) -> u32 {
    if value == 0 { !0 } else { value.trailing_zeros() }
}

/// Bits `offset..offset + width`, both in `control`: offset in the low bits, width from bit 16.
fn field(value: u64, control: u32, size: u32) -> u64 {
    let (offset, width) = (control & (size - 1), (control >> 16 & 0x7f).min(size));
    let mask = if width == 64 { !0 } else { (1 << width) - 1 };
    value >> offset & mask
}

fn signed_field(value: u64, control: u32, size: u32) -> u64 {
    let width = (control >> 16 & 0x7f).min(size);
    if width == 0 {
        return 0;
    }
    let shift = 64 - width;
    ((field(value, control, size) << shift) as i64 >> shift) as u64
}

fn saveexec(wave: &mut Wave, inst: &Inst, f: impl Fn(u64, u64) -> u64) -> Exec {
    let old = wave.exec();
    let new = f(wave.scalar64(inst.src[0]), old);
    wave.set_s64(inst.sdst, old);
    wave.set_s64(EXEC, new);
    wave.scc = new != 0;
    Ok(())
}

fn wrexec(wave: &mut Wave, inst: &Inst, new: u64) -> Exec {
    wave.set_s64(EXEC, new);
    wave.set_s64(inst.sdst, new);
    wave.scc = new != 0;
    Ok(())
}

/// Register number, first bit and width of a hwreg operand.
fn hwreg(inst: &Inst) -> (u32, u32, u32) {
    let imm = inst.imm as u32;
    (imm & 63, imm >> 6 & 31, (imm >> 11 & 31) + 1)
}

const HW_REG_MODE: u32 = 1;

fn getreg(wave: &Wave, inst: &Inst) -> Exec<u32> {
    let (register, offset, width) = hwreg(inst);
    // XCC_ID and HW_ID place the wave on the chip: this emulator has one place.
    let value = match register {
        HW_REG_MODE => wave.mode,
        4 | 20 => 0,
        _ => {
            return Err(Stop::new(FaultKind::UnknownInstruction, format!("s_getreg of register {register}")));
        }
    };
    Ok(value >> offset & (((1u64 << width) - 1) as u32))
}

fn setreg(wave: &mut Wave, inst: &Inst) -> Exec {
    let (register, offset, width) = hwreg(inst);
    if register != HW_REG_MODE {
        return Err(Stop::new(FaultKind::UnknownInstruction, format!("s_setreg of register {register}")));
    }
    let mask = (((1u64 << width) - 1) as u32) << offset;
    let value = wave.scalar(inst.src[0]) << offset & mask;
    set_mode(wave, wave.mode & !mask | value)
}

/// Changes rounding and denormal control; only rounding to nearest is executed.
pub(crate) fn set_mode(wave: &mut Wave, mode: u32) -> Exec {
    if mode & 0xf != 0 {
        return Err(Stop::new(FaultKind::UnknownInstruction, format!("rounding mode {}", mode & 0xf)));
    }
    wave.mode = mode;
    wave.plain_mode = !wave.flushes_f32() && !wave.flushes_f16();
    Ok(())
}
