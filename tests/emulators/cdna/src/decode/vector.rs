//! The vector encodings: VOP1, VOP2, VOPC, VOP3, VOP3P and its matrix half.

use super::operand::Source;
use super::table::{Enc, Row, TABLE};
use super::{bits, blank};
use crate::elf::Arch;
use crate::exec::mfma;
use crate::inst::{AGPR, Class, Dpp, Inst, Regs, Sdwa, Src, Ty, VCC};
use crate::op::Op;

const SDWA: u32 = 0xf9;
const DPP: u32 = 0xfa;

pub(super) fn vop12c(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let word = words[0];
    let (enc, opcode) = match bits(word, 25, 6) {
        0b11_1111 => (Enc::Vop1, bits(word, 9, 8)),
        0b11_1110 => (Enc::Vopc, bits(word, 17, 8)),
        opcode => (Enc::Vop2, opcode),
    };
    let row = TABLE.get(arch, enc, opcode)?;
    let mut inst = blank(pc, words, row.name);
    set_types(&mut inst, row);
    inst.vdst = bits(word, 17, 8) as u16;
    inst.sdst = VCC;
    inst.imm = opcode as i32;
    let code = bits(word, 0, 9);
    let mut source = Source::new(words, 1);
    if code == SDWA || code == DPP {
        source = Source::new(words, 2);
        let extra = *words.get(1)?;
        let src0 = bits(extra, 0, 8);
        if code == DPP {
            inst.src[0] = Src::V(src0 as u16);
            inst.dpp = Some(Dpp {
                ctrl: bits(extra, 8, 9) as u16,
                bound_ctrl: bits(extra, 19, 1) == 1,
                bank_mask: bits(extra, 24, 4) as u8,
                row_mask: bits(extra, 28, 4) as u8,
            });
            inst.neg = (bits(extra, 20, 1) | bits(extra, 22, 1) << 1) as u8;
            inst.abs = (bits(extra, 21, 1) | bits(extra, 23, 1) << 1) as u8;
        } else {
            let scalar0 = bits(extra, 23, 1) == 1;
            inst.src[0] = source.read(src0 + if scalar0 { 0 } else { 256 }, inst.src_ty[0])?;
            inst.neg = (bits(extra, 20, 1) | bits(extra, 28, 1) << 1) as u8;
            inst.abs = (bits(extra, 21, 1) | bits(extra, 29, 1) << 1) as u8;
            let compare = enc == Enc::Vopc;
            if compare {
                if bits(extra, 15, 1) == 1 {
                    inst.sdst = bits(extra, 8, 7) as u8;
                }
            } else {
                inst.clamp = bits(extra, 13, 1) == 1;
                inst.omod = bits(extra, 14, 2) as u8;
            }
            inst.sdwa = Some(Sdwa {
                src_sel: [bits(extra, 16, 3) as u8, bits(extra, 24, 3) as u8],
                src_sext: [bits(extra, 19, 1) == 1, bits(extra, 27, 1) == 1],
                dst_sel: if compare { 6 } else { bits(extra, 8, 3) as u8 },
                dst_unused: if compare { 0 } else { bits(extra, 11, 2) as u8 },
            });
        }
    } else {
        inst.src[0] = source.read(code, inst.src_ty[0])?;
    }
    if enc != Enc::Vop1 {
        let scalar1 = inst.sdwa.is_some() && bits(words[1], 31, 1) == 1;
        let code = bits(word, 9, 8) + if scalar1 { 0 } else { 256 };
        inst.src[1] = source.read(code, inst.src_ty[1])?;
    }
    match row.name {
        "v_madmk_f32" | "v_fmamk_f32" | "v_madmk_f16" => {
            inst.src[2] = inst.src[1];
            inst.src[1] = Src::K(source.literal()?, 0);
        }
        "v_madak_f32" | "v_fmaak_f32" | "v_madak_f16" => inst.src[2] = Src::K(source.literal()?, 0),
        _ => {}
    }
    if inst.src_ty[2].is_mask() {
        inst.src[2] = Src::S(VCC);
    }
    if row.name == "v_accvgpr_mov_b32" {
        inst.vdst += AGPR;
        shift_to_agpr(&mut inst.src[0]);
    }
    inst.size = source.size();
    finish(&mut inst, row);
    Some(inst)
}

pub(super) fn vop3(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second) = (words[0], *words.get(1)?);
    let (enc, row) = TABLE.vop3(arch, bits(word, 16, 10))?;
    let mut inst = blank(pc, words, row.name);
    set_types(&mut inst, row);
    inst.vdst = bits(word, 0, 8) as u16;
    let has_mask_dst = row.operands.get(1) == Some(&Ty::Mask);
    inst.imm = bits(word, 16, 10) as i32;
    if enc == Enc::Vopc {
        inst.sdst = inst.vdst as u8;
    } else if has_mask_dst {
        inst.sdst = bits(word, 8, 7) as u8;
    }
    if !has_mask_dst {
        inst.abs = bits(word, 8, 3) as u8;
        inst.op_sel = bits(word, 11, 4) as u8;
    }
    inst.clamp = bits(word, 15, 1) == 1;
    inst.omod = bits(second, 27, 2) as u8;
    inst.neg = bits(second, 29, 3) as u8;
    if row.name.starts_with("v_bitop3") {
        // The truth table lies where other instructions have their modifiers.
        inst.imm = i32::from(inst.omod) << 6 | i32::from(inst.abs & 7) << 3 | i32::from(inst.neg & 7);
        (inst.neg, inst.abs, inst.omod) = (0, 0, 0);
    }
    let mut source = Source::new(words, 2);
    let count = row.operands.len() - 1 - usize::from(has_mask_dst);
    for i in 0..count.min(3) {
        inst.src[i] = source.read(bits(second, 9 * i as u32, 9), inst.src_ty[i])?;
    }
    inst.size = source.size();
    finish(&mut inst, row);
    Some(inst)
}

pub(super) fn vop3p(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second) = (words[0], *words.get(1)?);
    let opcode = bits(word, 16, 7);
    let Some(row) = TABLE.get(arch, Enc::Vop3p, opcode) else {
        return mai(arch, pc, words);
    };
    let mut inst = blank(pc, words, row.name);
    set_types(&mut inst, row);
    inst.class = Class::ValuPacked;
    inst.vdst = bits(word, 0, 8) as u16;
    inst.neg_hi = bits(word, 8, 3) as u8;
    inst.op_sel = bits(word, 11, 3) as u8;
    inst.op_sel_hi = (bits(second, 27, 2) | bits(word, 14, 1) << 2) as u8;
    inst.clamp = bits(word, 15, 1) == 1;
    inst.neg = bits(second, 29, 3) as u8;
    let mut source = Source::new(words, 2);
    for i in 0..row.operands.len() - 1 {
        inst.src[i] = source.read(bits(second, 9 * i as u32, 9), inst.src_ty[i])?;
    }
    match row.name {
        "v_accvgpr_read_b32" => shift_to_agpr(&mut inst.src[0]),
        "v_accvgpr_write_b32" => inst.vdst += AGPR,
        _ => {}
    }
    inst.size = source.size();
    finish(&mut inst, row);
    Some(inst)
}

/// Matrix instructions. gfx950's scaled ones are two 8-byte halves, the scales first.
fn mai(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    const LOAD_SCALE: u32 = 0x2c;
    let scaled = bits(words[0], 16, 7) == LOAD_SCALE && arch == Arch::Gfx950;
    let body = if scaled { words.get(2..)? } else { words };
    let (word, second) = (*body.first()?, *body.get(1)?);
    let row = TABLE.get(arch, Enc::Mai, bits(word, 16, 7))?;
    let mut inst = blank(pc, words, row.name);
    inst.class = Class::Mfma;
    inst.op = Op::Mfma;
    inst.size = if scaled { 16 } else { 8 };
    let acc_cd = bits(word, 15, 1) == 1;
    inst.vdst = bits(word, 0, 8) as u16 + if acc_cd { AGPR } else { 0 };
    inst.imm = bits(word, 8, 3) as i32 | (bits(word, 11, 4) as i32) << 3 | (bits(second, 29, 3) as i32) << 7;
    inst.dst_ty = row.operands[0];
    let mut source = Source::new(body, 2);
    for i in 0..3 {
        inst.src_ty[i] = row.operands[i + 1];
        let constant_ty = if row.name.contains("f64") { Ty::F64 } else { Ty::B32 };
        inst.src[i] = source.read(bits(second, 9 * i as u32, 9), constant_ty)?;
    }
    for i in 0..2 {
        if bits(second, 27 + i, 1) == 1 {
            shift_to_agpr(&mut inst.src[i as usize]);
        }
    }
    if acc_cd {
        shift_to_agpr(&mut inst.src[2]);
    }
    let mut shape = mfma::Shape::from_name(row.name, row.operands[0].dwords())?;
    if row.name.ends_with("f8f6f4") {
        shape.narrow(inst.imm)?;
        inst.src_ty[0] = Ty::Regs(shape.a_regs());
        inst.src_ty[1] = Ty::Regs(shape.b_regs());
    }
    if scaled {
        let (first, scales) = (words[0], words[1]);
        let mut source = Source::new(words, 4);
        shape.scales = Some(mfma::Scales {
            a: source.read(bits(scales, 0, 9), Ty::B32)?,
            b: source.read(bits(scales, 9, 9), Ty::B32)?,
            // The byte of the scale register: op_sel the low bit, op_sel_hi the high one.
            a_byte: (bits(first, 11, 1) | bits(scales, 27, 1) << 1) as u8,
            b_byte: (bits(first, 12, 1) | bits(scales, 28, 1) << 1) as u8,
        });
    }
    inst.mfma = Some(shape);
    for i in 0..3 {
        if let Src::V(first) = inst.src[i] {
            inst.reads.push(Regs::VAll(first, inst.src_ty[i].dwords()));
        }
    }
    if let Some(scales) = &shape.scales {
        for src in [scales.a, scales.b] {
            match src {
                Src::V(first) => inst.reads.push(Regs::VAll(first, 1)),
                Src::S(first) => inst.reads.push(Regs::S(first, 1)),
                _ => {}
            }
        }
    }
    inst.writes.push(Regs::VAll(inst.vdst, inst.dst_ty.dwords()));
    Some(inst)
}

fn shift_to_agpr(src: &mut Src) {
    if let Src::V(first) = src {
        *first |= AGPR;
    }
}

pub(super) fn set_types(inst: &mut Inst, row: &Row) {
    inst.class = Class::Valu;
    let skip = if row.operands.get(1).is_some_and(|ty| ty.is_mask()) { 2 } else { 1 };
    inst.dst_ty = row.operands.first().copied().unwrap_or(Ty::B32);
    for (i, ty) in row.operands.iter().skip(skip).take(3).enumerate() {
        inst.src_ty[i] = *ty;
    }
}

/// Which registers are read and written, and the class.
pub(super) fn finish(inst: &mut Inst, row: &Row) {
    inst.plain = inst.neg == 0
        && inst.abs == 0
        && inst.op_sel == 0
        && inst.omod == 0
        && !inst.clamp
        && inst.dpp.is_none()
        && inst.sdwa.is_none();
    if inst.op.transcendental() {
        inst.class = Class::Transcendental;
    }
    let dst = Regs::V(inst.vdst, inst.dst_ty.dwords());
    for i in 0..3 {
        match inst.src[i] {
            Src::V(first) => inst.reads.push(Regs::V(first, inst.src_ty[i].dwords())),
            Src::S(first) => inst.reads.push(Regs::S(first, inst.src_ty[i].dwords())),
            _ => {}
        }
    }
    let partial = inst.sdwa.is_some_and(|s| s.dst_sel != 6 && s.dst_unused == 2);
    if inst.op.reads_dst() || partial {
        inst.reads.push(dst);
    }
    if inst.op.reads_vcc() {
        inst.reads.push(Regs::S(VCC, 2));
    }
    match inst.op {
        Op::VReadfirstlaneB32 | Op::VReadlaneB32 => {
            // Only one lane is read: the executor checks that one.
            inst.reads.retain(|r| matches!(r, Regs::S(..)));
            inst.sdst = inst.vdst as u8;
            inst.writes.push(Regs::S(inst.sdst, 1));
        }
        Op::VWritelaneB32 => {}
        Op::VSwapB32 | Op::VPermlane16SwapB32 | Op::VPermlane32SwapB32 => {
            if let Src::V(other) = inst.src[0] {
                inst.writes.push(Regs::V(other, 1));
            }
            inst.reads.push(dst);
            inst.writes.push(dst);
        }
        _ if inst.dst_ty.is_mask() => {
            inst.writes.push(Regs::S(inst.sdst, inst.dst_ty.dwords()));
            if row.name.starts_with("v_cmpx") {
                inst.writes.push(Regs::S(crate::inst::EXEC, 2));
            }
        }
        _ => {
            if let Some(mask) = row.operands.get(1).filter(|ty| ty.is_mask()) {
                inst.writes.push(Regs::S(inst.sdst, mask.dwords()));
            }
            if !row.operands.is_empty() {
                inst.writes.push(dst);
            }
        }
    }
    inst.halves = matches!(
        inst.op,
        Op::VMadU64U32
            | Op::VMadI64I32
            | Op::VLshlAddU64
            | Op::VLshlrevB64
            | Op::VPkFmaF32
            | Op::VPkMulF32
            | Op::VPkAddF32
    );
    inst.copies = matches!(
        inst.op,
        Op::VMovB32
            | Op::VMovB64
            | Op::VAccvgprReadB32
            | Op::VAccvgprWriteB32
            | Op::VAccvgprMovB32
            | Op::VPkMovB32
    );
}
