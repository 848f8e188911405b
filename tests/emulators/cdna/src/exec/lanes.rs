//! Sources and destinations of vector instructions, with everything that may happen to them on the way: lane selection
//! (DPP), byte selection (SDWA), halves (`op_sel`), signs, flushing, output modifiers, EXEC.

use crate::inst::{Dpp, Inst, Src, Ty};
use crate::num::{f16, func};
use crate::op::Op;
use crate::wave::{LANES, Lanes, RESULT, SLOT, VREGS, Wave};

/// Source `k`, its low register.
#[inline(always)]
pub(crate) fn source<'w>(wave: &'w Wave, inst: &Inst, k: usize, room: &'w mut Lanes) -> &'w Lanes {
    if inst.plain && wave.plain_mode {
        if let Src::V(reg) = inst.src[k] {
            return wave.vreg(reg);
        }
        *room = Lanes::splat(wave.scalar(inst.src[k]));
        return room;
    }
    *room = modified(wave, inst, k);
    room
}

/// Place of source `k`: its register, or a slot that it was put into.
#[inline(always)]
pub(crate) fn operand(wave: &mut Wave, inst: &Inst, k: usize) -> usize {
    if inst.plain && wave.plain_mode {
        if let Src::V(reg) = inst.src[k] {
            return usize::from(reg) % VREGS;
        }
        let value = wave.scalar(inst.src[k]);
        wave.v[SLOT + k].0.fill(value);
        return SLOT + k;
    }
    modified_into_slot(wave, inst, k);
    SLOT + k
}

#[inline(never)]
fn modified_into_slot(wave: &mut Wave, inst: &Inst, k: usize) {
    wave.v[SLOT + k] = modified(wave, inst, k);
}

/// Place where a result may be written at once, if there is one.
#[inline(always)]
pub(crate) fn destination(wave: &Wave, inst: &Inst) -> usize {
    let direct = inst.plain && wave.plain_mode && wave.is_whole();
    if direct { usize::from(inst.vdst) % VREGS } else { RESULT }
}

/// Takes a result from its slot to its register.
#[inline(always)]
pub(crate) fn deliver(wave: &mut Wave, inst: &Inst, at: usize) {
    if at == RESULT {
        deliver_modified(wave, inst);
    }
}

#[inline(never)]
fn deliver_modified(wave: &mut Wave, inst: &Inst) {
    let out = wave.v[RESULT];
    put(wave, inst, out);
}

/// Source `k`, its high register; for a 64-bit operand.
#[inline(always)]
pub(crate) fn source_hi<'w>(wave: &'w Wave, inst: &Inst, k: usize, room: &'w mut Lanes) -> &'w Lanes {
    match inst.src[k] {
        Src::V(reg) => {
            if inst.plain {
                return wave.vreg(reg + 1);
            }
            *room = *wave.vreg(reg + 1);
        }
        other => *room = Lanes::splat((wave.scalar64(other) >> 32) as u32),
    }
    if inst.src_ty[k] == Ty::F64 {
        // VOP3P has its own meaning of these bits, but no f64.
        signs(room, inst, k, 0x8000_0000);
    }
    room
}

#[inline(never)]
fn modified(wave: &Wave, inst: &Inst, k: usize) -> Lanes {
    let mut lanes = match inst.src[k] {
        Src::V(reg) => *wave.vreg(reg),
        other => Lanes::splat(wave.scalar(other)),
    };
    if let (0, Some(dpp)) = (k, &inst.dpp) {
        lanes = dpp_select(&lanes, dpp, wave.exec()).0;
    }
    if let (Some(sdwa), true) = (&inst.sdwa, k < 2) {
        for lane in &mut lanes.0 {
            *lane = sdwa_select(*lane, sdwa.src_sel[k], sdwa.src_sext[k]);
        }
    }
    let ty = inst.src_ty[k];
    if matches!(ty, Ty::F16 | Ty::B16) && inst.op_sel >> k & 1 == 1 {
        for lane in &mut lanes.0 {
            *lane >>= 16;
        }
    }
    match ty {
        // v_cndmask and v_mov take signs on what is no float to them.
        Ty::F32 | Ty::B32 => signs(&mut lanes, inst, k, 0x8000_0000),
        Ty::F16 => signs(&mut lanes, inst, k, 0x8000),
        // A choice of bits, but its operands take a float's signs (LLVM: `v_cndmask_b32_e64 v0, -v1, 1.0, vcc`).
        _ if inst.op == Op::VCndmaskB32 && k < 2 => signs(&mut lanes, inst, k, 0x8000_0000),
        // f64: the sign is in the high register.
        _ => {}
    }
    if ty == Ty::F32 && wave.flushes_f32() {
        for lane in &mut lanes.0 {
            *lane = func::flush(f32::from_bits(*lane)).to_bits();
        }
    }
    if ty == Ty::F16 && wave.flushes_f16() {
        for lane in &mut lanes.0 {
            *lane = u32::from(f16::flush(*lane as u16));
        }
    }
    lanes
}

#[inline(always)]
fn signs(lanes: &mut Lanes, inst: &Inst, k: usize, sign: u32) {
    if inst.abs >> k & 1 == 1 {
        for lane in &mut lanes.0 {
            *lane &= !sign;
        }
    }
    if inst.neg >> k & 1 == 1 {
        for lane in &mut lanes.0 {
            *lane ^= sign;
        }
    }
}

fn sdwa_select(value: u32, select: u8, sext: bool) -> u32 {
    match (select, sext) {
        (0..=3, false) => value >> (8 * select) & 0xff,
        (0..=3, true) => i32::from((value >> (8 * select)) as u8 as i8) as u32,
        (4 | 5, false) => value >> (16 * (select - 4)) & 0xffff,
        (4 | 5, true) => i32::from((value >> (16 * (select - 4))) as u16 as i16) as u32,
        _ => value,
    }
}

/// The lane that `lane` reads under a DPP control, if it is inside its row or wave (CDNA3 ISA, "`DPP_CTRL`").
pub(crate) fn dpp_source(ctrl: u16, lane: usize) -> Option<usize> {
    let (row, in_row) = (lane & !15, lane & 15);
    let shift = usize::from(ctrl & 15);
    match ctrl {
        0x000..=0x0ff => Some((lane & !3) | usize::from(ctrl >> (2 * (lane & 3)) & 3)),
        0x101..=0x10f => (in_row + shift < 16).then(|| lane + shift),
        0x111..=0x11f => (in_row >= shift).then(|| lane - shift),
        0x121..=0x12f => Some(row | (in_row + 16 - shift) & 15),
        0x130 => (lane < 63).then(|| lane + 1),
        0x134 => Some((lane + 1) & 63),
        0x138 => (lane > 0).then(|| lane - 1),
        0x13c => Some((lane + 63) & 63),
        0x140 => Some(row | (15 - in_row)),
        0x141 => Some((lane & !7) | (7 - (lane & 7))),
        // Lane 15 of each row to the whole next row; lane 31 to the upper half.
        0x142 => (lane >= 16).then(|| row - 1),
        0x143 => (lane >= 32).then_some(31),
        // gfx90a: lane `shift` of each row to the whole row.
        0x150..=0x15f => Some(row | shift),
        // RDNA: row_xmask.
        0x160..=0x16f => Some(row | (in_row ^ shift)),
        _ => None,
    }
}

/// Values that each lane reads, and the lanes whose result is written.
pub(crate) fn dpp_select(lanes: &Lanes, dpp: &Dpp, exec: u64) -> (Lanes, u64) {
    let mut out = Lanes::ZERO;
    let mut written = 0u64;
    for lane in 0..LANES {
        let enabled = dpp.row_mask >> (lane / 16) & 1 == 1 && dpp.bank_mask >> (lane / 4 % 4) & 1 == 1;
        if !enabled {
            continue;
        }
        match dpp_source(dpp.ctrl, lane).filter(|from| exec >> from & 1 == 1) {
            Some(from) => out.0[lane] = lanes.0[from],
            None if dpp.bound_ctrl => {}
            None => continue,
        }
        written |= 1 << lane;
    }
    (out, written)
}

/// Writes a result to the destination's low register.
#[inline(always)]
pub(crate) fn put(wave: &mut Wave, inst: &Inst, out: Lanes) {
    let exec = wave.exec();
    if inst.plain && wave.plain_mode {
        masked(wave.vreg_mut(inst.vdst), &out, exec);
        return;
    }
    put_modified(wave, inst, out, exec);
}

/// Writes a 64-bit result.
#[inline(always)]
pub(crate) fn put64(wave: &mut Wave, inst: &Inst, lo: &Lanes, hi: &Lanes) {
    let exec = wave.exec();
    masked(wave.vreg_mut(inst.vdst), lo, exec);
    masked(wave.vreg_mut(inst.vdst + 1), hi, exec);
}

/// Copies the lanes that `exec` names.
#[inline(always)]
pub(crate) fn masked(to: &mut Lanes, from: &Lanes, exec: u64) {
    if exec == !0 {
        *to = *from;
        return;
    }
    for l in 0..LANES {
        to.0[l] = if exec >> l & 1 == 1 { from.0[l] } else { to.0[l] };
    }
}

#[inline(never)]
fn put_modified(wave: &mut Wave, inst: &Inst, mut out: Lanes, mut exec: u64) {
    if let Some(dpp) = &inst.dpp {
        exec &= dpp_select(&out, dpp, wave.exec()).1;
    }
    match inst.dst_ty {
        Ty::F32 | Ty::Mix => {
            for lane in &mut out.0 {
                let scaled = f32::from_bits(*lane) * [1.0, 2.0, 4.0, 0.5][usize::from(inst.omod & 3)];
                let scaled = if inst.clamp { func::saturate(scaled) } else { scaled };
                let modified = inst.omod != 0 || inst.clamp;
                let value = if modified { scaled } else { f32::from_bits(*lane) };
                *lane = if wave.flushes_f32() { func::flush(value) } else { value }.to_bits();
            }
        }
        Ty::F16 if inst.omod != 0 || inst.clamp => {
            for lane in &mut out.0 {
                let value = f16::to_f32(*lane as u16) * [1.0, 2.0, 4.0, 0.5][usize::from(inst.omod & 3)];
                let value = if inst.clamp { func::saturate(value) } else { value };
                *lane = u32::from(f16::from_f32(value));
            }
        }
        _ => {}
    }
    if let Some(sdwa) = &inst.sdwa {
        let old = *wave.vreg(inst.vdst);
        for l in 0..LANES {
            out.0[l] = sdwa_place(old.0[l], out.0[l], sdwa.dst_sel, sdwa.dst_unused);
        }
    }
    if matches!(inst.dst_ty, Ty::F16 | Ty::B16) && inst.op_sel & 8 != 0 {
        let old = *wave.vreg(inst.vdst);
        for l in 0..LANES {
            out.0[l] = old.0[l] & 0xffff | out.0[l] << 16;
        }
    }
    masked(wave.vreg_mut(inst.vdst), &out, exec);
}

fn sdwa_place(old: u32, value: u32, select: u8, unused: u8) -> u32 {
    let (shift, bits) = match select {
        0..=3 => (8 * u32::from(select), 8),
        4 | 5 => (16 * u32::from(select - 4), 16),
        _ => return value,
    };
    let mask = ((1u32 << bits) - 1) << shift;
    let placed = value << shift & mask;
    match unused {
        1 => {
            // Sign-extended above, zero below.
            let sign = placed >> (shift + bits - 1) & 1;
            placed | if sign == 1 { (!0u32).checked_shl(shift + bits).unwrap_or(0) } else { 0 }
        }
        2 => placed | old & !mask,
        _ => placed,
    }
}
