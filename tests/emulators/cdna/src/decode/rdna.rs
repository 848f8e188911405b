//! RDNA's machine code to [`Inst`]: gfx1100 (RDNA 3 ISA, "Microcode formats") and gfx1201 (RDNA 4 ISA). An instruction
//! is executed by the name of CDNA's that does the same; its own name is what reports and tests see.

use super::memory::{ds_kind, effects, unknown_mem, vmem_kind};
use super::operand;
use super::table::{Enc, Row, TABLE};
use super::vector::{finish, set_types};
use super::{bits, blank, scalar_effects, scalar_opcode, scalar_operands};
use crate::elf::Arch;
use crate::inst::{Class, Dpp, EXEC, Inst, M0, Mem, MemKind, Regs, Space, Src, Ty, VCC};
use crate::op::Op;

const DPP16: u32 = 250;
/// Operand number of the register that reads as zero and keeps nothing.
const NULL: u32 = 124;
const LITERAL: u32 = 255;
/// Place of M0; CDNA has it where RDNA has NULL, and the wave keeps it there.
const M0_OF_RDNA: u32 = 125;

/// Source operands as [`operand::Source`] reads them, with RDNA's places of NULL and M0.
struct Source<'w>(operand::Source<'w>);

impl<'w> Source<'w> {
    fn new(words: &'w [u32], base: usize) -> Self {
        Self(operand::Source::new(words, base))
    }

    fn read(&mut self, code: u32, ty: Ty) -> Option<Src> {
        match code {
            NULL => Some(Src::K(0, 0)),
            M0_OF_RDNA => Some(Src::S(M0)),
            // A literal of 64 bits is the word and zeros: s_mul_u64 of Philox's constants is one of 32 bits each.
            LITERAL if ty == Ty::B64 => Some(Src::K(self.0.literal()?, 0)),
            _ => self.0.read(code, ty),
        }
    }
}

/// A scalar destination; what goes to NULL lands in a register that nothing reads.
fn destination(code: u32) -> u8 {
    match code {
        NULL => M0_OF_RDNA as u8,
        M0_OF_RDNA => M0,
        _ => code as u8,
    }
}

pub(super) fn decode(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let word = *words.first()?;
    let decoded = match word >> 26 {
        0b11_1101 => smem(arch, pc, words),
        0b11_0101 => vop3(arch, pc, words),
        0b11_0011 => vop3p(arch, pc, words),
        0b11_0010 => vopd(arch, pc, words),
        0b11_0110 => ds(arch, pc, words),
        0b11_0111 if arch == Arch::Gfx1100 => flat(pc, words),
        0b11_1000 if arch == Arch::Gfx1100 => mubuf(pc, words),
        0b11_1011 if arch == Arch::Gfx1201 => flat_of_gfx12(pc, words),
        0b11_0001 if arch == Arch::Gfx1201 => mubuf_of_gfx12(pc, words),
        _ if word >> 31 == 0 => vop12c(arch, pc, words),
        _ if word >> 30 == 0b10 => scalar(arch, pc, words),
        _ => None,
    };
    // An unknown instruction must have the right width, or all behind it would be decoded wrongly.
    decoded.or_else(|| {
        let mut inst = super::unknown(pc, words);
        inst.size = match word >> 26 {
            0b11_1011 | 0b11_0001 => 12,
            _ if word >> 30 == 0b11 => 8,
            _ => 4,
        };
        Some(inst)
    })
}

/// An instruction of that row: executed by the canonical name, reported by its own.
fn of_row(pc: u64, words: &[u32], row: &Row) -> Inst {
    let mut inst = blank(pc, words, row.canonical);
    inst.name = row.name;
    inst
}

fn scalar(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let word = words[0];
    let (enc, opcode) = scalar_opcode(word);
    let row = TABLE.get(arch, enc, opcode)?;
    let mut inst = of_row(pc, words, row);
    // Registers of the scalar unit have CDNA's names here.
    inst.name = row.canonical;
    let mut source = Source::new(words, 1);
    inst.sdst = destination(bits(word, 16, 7));
    scalar_operands(&mut inst, (enc, word), row, |code, ty| source.read(code, ty))?;
    match inst.op {
        Op::SFmaakF32 => inst.src[2] = Src::K(source.0.literal()?, 0),
        Op::SFmamkF32 => {
            inst.src[2] = inst.src[1];
            inst.src[1] = Src::K(source.0.literal()?, 0);
        }
        Op::SFmacF32 => inst.src[2] = Src::S(inst.sdst),
        _ => {}
    }
    inst.size = source.0.size();
    let control = matches!(inst.op, Op::SBarrierSignal | Op::SWaitcntVscnt);
    if matches!(enc, Enc::Sopp) || inst.op.branches() || control {
        inst.class = Class::Control;
    }
    if !control {
        scalar_effects(&mut inst, enc);
    }
    inst.name = row.name;
    Some(inst)
}

fn smem(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second) = (words[0], *words.get(1)?);
    let newer = arch == Arch::Gfx1201;
    let opcode = if newer { bits(word, 13, 6) } else { bits(word, 18, 8) };
    let row = TABLE.get(arch, Enc::Smem, opcode)?;
    let part = |bytes, sext| (MemKind::ScalarLoadPart { bytes, sext }, 1);
    let (kind, dwords) = match row.canonical {
        "s_load_i8" => part(1, true),
        "s_load_u8" => part(1, false),
        "s_load_i16" => part(2, true),
        "s_load_u16" => part(2, false),
        whole => {
            let (_, count) = whole.split_once("load_dword")?;
            let dwords = count.trim_start_matches('x').parse().unwrap_or(1);
            (MemKind::ScalarLoad { dwords }, dwords)
        }
    };
    let mut inst = of_row(pc, words, row);
    inst.size = 8;
    inst.class = Class::Smem;
    inst.op = Op::Memory;
    inst.sdst = destination(bits(word, 6, 7));
    let buffer = row.canonical.contains("buffer");
    let sbase = (bits(word, 0, 6) * 2) as u8;
    let soffset = match bits(second, 25, 7) {
        NULL => Src::K(0, 0),
        M0_OF_RDNA => Src::S(M0),
        reg => Src::S(reg as u8),
    };
    let width = if newer { 24 } else { 21 };
    let offset = (bits(second, 0, width) << (32 - width)) as i32 >> (32 - width);
    inst.reads.push(Regs::S(sbase, if buffer { 4 } else { 2 }));
    if let Src::S(first) = soffset {
        inst.reads.push(Regs::S(first, 1));
    }
    inst.writes.push(Regs::S(inst.sdst, dwords));
    let space = if buffer { Space::ScalarBuffer } else { Space::Scalar };
    inst.mem = Some(Mem { sbase: Some(sbase), soffset, offset, ..mem(space, kind) });
    Some(inst)
}

/// Operands of a memory instruction, none of them named yet.
fn mem(space: Space, kind: MemKind) -> Mem {
    Mem {
        space,
        kind,
        vaddr: None,
        data: 0,
        data2: 0,
        sbase: None,
        soffset: Src::None,
        offset: 0,
        offset2: 0,
        idxen: false,
        offen: false,
    }
}

/// DPP16's word: the register and what its lanes read.
fn dpp16(inst: &mut Inst, extra: u32) {
    inst.src[0] = Src::V(bits(extra, 0, 8) as u16);
    inst.dpp = Some(Dpp {
        ctrl: bits(extra, 8, 9) as u16,
        bound_ctrl: bits(extra, 19, 1) == 1,
        bank_mask: bits(extra, 24, 4) as u8,
        row_mask: bits(extra, 28, 4) as u8,
    });
}

fn vop12c(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let word = words[0];
    let (enc, opcode) = match bits(word, 25, 6) {
        0b11_1111 => (Enc::Vop1, bits(word, 9, 8)),
        0b11_1110 => (Enc::Vopc, bits(word, 17, 8)),
        opcode => (Enc::Vop2, opcode),
    };
    let row = TABLE.get(arch, enc, opcode)?;
    let mut inst = of_row(pc, words, row);
    set_types(&mut inst, row);
    inst.vdst = bits(word, 17, 8) as u16;
    inst.sdst = VCC;
    compares(&mut inst, row)?;
    let code = bits(word, 0, 9);
    let mut source = Source::new(words, 1);
    if code == DPP16 {
        source = Source::new(words, 2);
        let extra = *words.get(1)?;
        dpp16(&mut inst, extra);
        inst.neg = (bits(extra, 20, 1) | bits(extra, 22, 1) << 1) as u8;
        inst.abs = (bits(extra, 21, 1) | bits(extra, 23, 1) << 1) as u8;
    } else {
        inst.src[0] = source.read(code, inst.src_ty[0])?;
    }
    if enc != Enc::Vop1 {
        inst.src[1] = Src::V(bits(word, 9, 8) as u16);
    }
    match inst.op {
        Op::VFmamkF32 => {
            inst.src[2] = inst.src[1];
            inst.src[1] = Src::K(source.0.literal()?, 0);
        }
        Op::VFmaakF32 => inst.src[2] = Src::K(source.0.literal()?, 0),
        _ => {}
    }
    if inst.src_ty[2].is_mask() {
        inst.src[2] = Src::S(VCC);
    }
    inst.size = source.0.size();
    finished(&mut inst, row);
    Some(inst)
}

fn vop3(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second) = (words[0], *words.get(1)?);
    let (enc, row) = TABLE.vop3_of_rdna(arch, bits(word, 16, 10))?;
    let mut inst = of_row(pc, words, row);
    set_types(&mut inst, row);
    inst.vdst = bits(word, 0, 8) as u16;
    let has_mask_dst = row.operands.get(1).is_some_and(|ty| ty.is_mask());
    if enc == Enc::Vopc {
        inst.sdst = destination(bits(word, 0, 8));
    } else if has_mask_dst {
        inst.sdst = destination(bits(word, 8, 7));
    }
    compares(&mut inst, row)?;
    if !has_mask_dst {
        inst.abs = bits(word, 8, 3) as u8;
        inst.op_sel = bits(word, 11, 4) as u8;
    }
    inst.clamp = bits(word, 15, 1) == 1;
    inst.omod = bits(second, 27, 2) as u8;
    inst.neg = bits(second, 29, 3) as u8;
    let code = bits(second, 0, 9);
    let mut source = Source::new(words, if code == DPP16 { 3 } else { 2 });
    let count = row.operands.len() - 1 - usize::from(has_mask_dst);
    for i in 0..count.min(3) {
        if i == 0 && code == DPP16 {
            dpp16(&mut inst, *words.get(2)?);
        } else {
            inst.src[i] = source.read(bits(second, 9 * i as u32, 9), inst.src_ty[i])?;
        }
    }
    inst.size = source.0.size();
    if matches!(inst.op, Op::VPermlane16B32 | Op::VPermlanex16B32) {
        // The two bits select whether inactive lanes are read, and what lanes outside the row read.
        inst.imm = i32::from(inst.op_sel & 3);
        inst.op_sel = 0;
    }
    finished(&mut inst, row);
    if inst.name.starts_with("v_s_") {
        inst.sdst = destination(bits(word, 0, 8));
        inst.writes = vec![Regs::S(inst.sdst, 1)];
    }
    Some(inst)
}

fn vop3p(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second) = (words[0], *words.get(1)?);
    let row = TABLE.get(arch, Enc::Vop3p, bits(word, 16, 7))?;
    let mut inst = of_row(pc, words, row);
    let mut source = Source::new(words, 2);
    inst.vdst = bits(word, 0, 8) as u16;
    if inst.op == Op::Wmma {
        // Modifiers of operands: no kernel uses them.
        if bits(word, 8, 6) != 0 || bits(word, 15, 1) != 0 || bits(second, 29, 3) != 0 {
            return None;
        }
        inst.class = Class::Mfma;
        let operand = match (arch, row.name.ends_with('8')) {
            (Arch::Gfx1100, _) => 8,
            (_, false) => 4,
            (_, true) => 2,
        };
        inst.dst_ty = Ty::Regs(8);
        inst.src_ty = [Ty::Regs(operand), Ty::Regs(operand), Ty::Regs(8)];
        for i in 0..3 {
            let constant = if i == 2 { Ty::F32 } else { inst.src_ty[i] };
            inst.src[i] = source.read(bits(second, 9 * i as u32, 9), constant)?;
            if let Src::V(first) = inst.src[i] {
                inst.reads.push(Regs::V(first, inst.src_ty[i].dwords()));
            }
        }
        inst.size = source.0.size();
        inst.writes.push(Regs::V(inst.vdst, 8));
        return Some(inst);
    }
    set_types(&mut inst, row);
    inst.class = Class::ValuPacked;
    inst.neg_hi = bits(word, 8, 3) as u8;
    inst.op_sel = bits(word, 11, 3) as u8;
    inst.op_sel_hi = (bits(second, 27, 2) | bits(word, 14, 1) << 2) as u8;
    inst.clamp = bits(word, 15, 1) == 1;
    inst.neg = bits(second, 29, 3) as u8;
    for i in 0..row.operands.len() - 1 {
        inst.src[i] = source.read(bits(second, 9 * i as u32, 9), inst.src_ty[i])?;
    }
    inst.size = source.0.size();
    finished(&mut inst, row);
    Some(inst)
}

/// Comparisons are executed by CDNA's opcode; those that write EXEC write nothing else.
fn compares(inst: &mut Inst, row: &Row) -> Option<()> {
    if inst.op == Op::Cmp {
        inst.imm = i32::from(TABLE.comparison(row.canonical)?);
        if row.canonical.starts_with("v_cmpx") {
            inst.sdst = EXEC;
        }
    }
    Some(())
}

/// [`finish`], with VCC as one register.
fn finished(inst: &mut Inst, row: &Row) {
    finish(inst, row);
    for regs in inst.reads.iter_mut().filter(|regs| **regs == Regs::S(VCC, 2)) {
        *regs = Regs::S(VCC, 1);
    }
    if matches!(inst.op, Op::VReadfirstlaneB32 | Op::VReadlaneB32) {
        inst.sdst = destination(inst.vdst.into());
        inst.writes = vec![Regs::S(inst.sdst, 1)];
    }
}

/// The mnemonics of VOPD's operations, by opcode, and CDNA's names of them.
const DUAL: [(&str, &str); 19] = [
    ("v_dual_fmac_f32", "v_fmac_f32"),
    ("v_dual_fmaak_f32", "v_fmaak_f32"),
    ("v_dual_fmamk_f32", "v_fmamk_f32"),
    ("v_dual_mul_f32", "v_mul_f32"),
    ("v_dual_add_f32", "v_add_f32"),
    ("v_dual_sub_f32", "v_sub_f32"),
    ("v_dual_subrev_f32", "v_subrev_f32"),
    ("v_dual_mul_dx9_zero_f32", "v_mul_legacy_f32"),
    ("v_dual_mov_b32", "v_mov_b32"),
    ("v_dual_cndmask_b32", "v_cndmask_b32"),
    ("v_dual_max_f32", "v_max_f32"),
    ("v_dual_min_f32", "v_min_f32"),
    ("v_dual_dot2acc_f32_f16", ""),
    ("v_dual_dot2acc_f32_bf16", ""),
    ("", ""),
    ("", ""),
    ("v_dual_add_nc_u32", "v_add_u32"),
    ("v_dual_lshlrev_b32", "v_lshlrev_b32"),
    ("v_dual_and_b32", "v_and_b32"),
];

/// Two operations at once, X and Y; a literal is both's.
fn vopd(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second) = (words[0], *words.get(1)?);
    let x_dst = bits(second, 24, 8);
    // Y's destination is even where X's is odd, and odd where it is even: its low bit is not stored.
    let y_dst = bits(second, 17, 7) << 1 | u32::from(x_dst & 1 == 0);
    let mut source = Source::new(words, 2);
    let mut half = |opcode: u32, src0: u32, src1: u32, dst: u32| -> Option<Inst> {
        let (name, canonical) = *DUAL.get(opcode as usize)?;
        let name = match (arch, name) {
            (Arch::Gfx1201, "v_dual_max_f32") => "v_dual_max_num_f32",
            (Arch::Gfx1201, "v_dual_min_f32") => "v_dual_min_num_f32",
            _ => name,
        };
        let mut inst = blank(pc, words, canonical);
        let ty = if canonical.ends_with("f32") { Ty::F32 } else { Ty::B32 };
        inst.class = Class::Valu;
        (inst.name, inst.vdst, inst.dst_ty, inst.src_ty) = (name, dst as u16, ty, [ty; 3]);
        inst.src[0] = source.read(src0, ty)?;
        let second = Src::V(src1 as u16);
        match inst.op {
            Op::VMovB32 => {}
            Op::VFmaakF32 => (inst.src[1], inst.src[2]) = (second, Src::K(source.0.literal()?, 0)),
            Op::VFmamkF32 => (inst.src[1], inst.src[2]) = (Src::K(source.0.literal()?, 0), second),
            Op::VCndmaskB32 => {
                (inst.src[1], inst.src[2]) = (second, Src::S(VCC));
                inst.src_ty[2] = Ty::Mask32;
            }
            Op::Unknown => return None,
            _ => inst.src[1] = second,
        }
        let row = Row { name, canonical, operands: vec![ty] };
        finish(&mut inst, &row);
        Some(inst)
    };
    let mut x = half(bits(word, 22, 4), bits(word, 0, 9), bits(word, 9, 8), x_dst)?;
    let mut y = half(bits(word, 17, 5), bits(second, 0, 9), bits(second, 9, 8), y_dst)?;
    (x.size, y.size) = (source.0.size(), source.0.size());
    x.dual = Some(Box::new(y));
    Some(x)
}

fn ds(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second) = (words[0], *words.get(1)?);
    let row = TABLE.get(arch, Enc::Ds, bits(word, 18, 8))?;
    let Some(kind) = ds_kind(row.canonical) else { return unknown_mem(pc, words, row.name, 8) };
    let mut inst = of_row(pc, words, row);
    (inst.size, inst.class, inst.op) = (8, Class::Lds, Op::Memory);
    inst.vdst = bits(second, 24, 8) as u16;
    let (offset0, offset1) = (bits(word, 0, 8) as i32, bits(word, 8, 8) as i32);
    let (offset, offset2) = match kind {
        MemKind::Load2 { bytes, stride } | MemKind::Store2 { bytes, stride } => {
            let scale = i32::from(bytes) * i32::from(stride);
            (offset0 * scale, offset1 * scale)
        }
        _ => (offset0 | offset1 << 8, 0),
    };
    inst.mem = Some(Mem {
        vaddr: Some(bits(second, 0, 8) as u16),
        data: bits(second, 8, 8) as u16,
        data2: bits(second, 16, 8) as u16,
        offset,
        offset2,
        ..mem(Space::Lds, kind)
    });
    effects(&mut inst);
    Some(inst)
}

/// A vector memory instruction, whose operands its encoding names.
fn vmem(
    pc: u64,
    words: &[u32],
    (row, size): (&Row, u8),
    vdst: u32,
    returns: bool,
    operands: Mem,
) -> Option<Inst> {
    let name = row.canonical.trim_start_matches("buffer_");
    let Some(kind) = vmem_kind(name, returns, false) else { return unknown_mem(pc, words, row.name, size) };
    let mut inst = of_row(pc, words, row);
    (inst.size, inst.class, inst.op) = (size, Class::Vmem, Op::Memory);
    inst.vdst = vdst as u16;
    inst.mem = Some(Mem { kind, ..operands });
    effects(&mut inst);
    Some(inst)
}

fn space(segment: u32) -> Option<Space> {
    Some(match segment {
        0 => Space::Flat,
        1 => Space::Scratch,
        2 => Space::Global,
        _ => return None,
    })
}

/// The scalar base of a flat instruction, if it has one.
fn base_of(code: u32, space: Space) -> Option<u8> {
    (code != NULL && space != Space::Flat).then(|| destination(code))
}

fn flat(pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second) = (words[0], *words.get(1)?);
    let row = TABLE.get(Arch::Gfx1100, Enc::Flat, bits(word, 18, 7))?;
    let space = space(bits(word, 16, 2))?;
    // Scratch says with a bit whether it takes a vector address.
    let has_vaddr = space != Space::Scratch || bits(second, 23, 1) == 1;
    let operands = Mem {
        vaddr: has_vaddr.then_some(bits(second, 0, 8) as u16),
        data: bits(second, 8, 8) as u16,
        sbase: base_of(bits(second, 16, 7), space),
        offset: (bits(word, 0, 13) << 19) as i32 >> 19,
        ..mem(space, MemKind::Cache)
    };
    vmem(pc, words, (row, 8), bits(second, 24, 8), bits(word, 14, 1) == 1, operands)
}

fn flat_of_gfx12(pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second, third) = (words[0], *words.get(1)?, *words.get(2)?);
    let row = TABLE.get(Arch::Gfx1201, Enc::Flat, bits(word, 14, 8))?;
    let space = space(bits(word, 24, 2))?;
    let has_vaddr = space != Space::Scratch || bits(second, 17, 1) == 1;
    let operands = Mem {
        vaddr: has_vaddr.then_some(bits(third, 0, 8) as u16),
        data: bits(second, 23, 8) as u16,
        sbase: base_of(bits(word, 0, 7), space),
        offset: third as i32 >> 8,
        ..mem(space, MemKind::Cache)
    };
    // TH's lowest bit makes an atomic return the old value.
    vmem(pc, words, (row, 12), bits(second, 0, 8), bits(second, 20, 1) == 1, operands)
}

fn mubuf(pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second) = (words[0], *words.get(1)?);
    let row = TABLE.get(Arch::Gfx1100, Enc::Mubuf, bits(word, 18, 8))?;
    let (offen, idxen) = (bits(second, 22, 1) == 1, bits(second, 23, 1) == 1);
    let vdata = bits(second, 8, 8);
    let operands = Mem {
        vaddr: (idxen || offen).then_some(bits(second, 0, 8) as u16),
        data: vdata as u16,
        sbase: Some((bits(second, 16, 5) * 4) as u8),
        soffset: Source::new(words, 2).read(bits(second, 24, 8), Ty::B32)?,
        offset: bits(word, 0, 12) as i32,
        idxen,
        offen,
        ..mem(Space::Buffer, MemKind::Cache)
    };
    vmem(pc, words, (row, 8), vdata, bits(word, 14, 1) == 1, operands)
}

fn mubuf_of_gfx12(pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second, third) = (words[0], *words.get(1)?, *words.get(2)?);
    let row = TABLE.get(Arch::Gfx1201, Enc::Mubuf, bits(word, 14, 8))?;
    let (offen, idxen) = (bits(second, 30, 1) == 1, bits(second, 31, 1) == 1);
    let vdata = bits(second, 0, 8);
    let operands = Mem {
        vaddr: (idxen || offen).then_some(bits(third, 0, 8) as u16),
        data: vdata as u16,
        sbase: Some(bits(second, 9, 9) as u8),
        soffset: Source::new(words, 3).read(bits(word, 0, 7), Ty::B32)?,
        offset: third as i32 >> 8,
        idxen,
        offen,
        ..mem(Space::Buffer, MemKind::Cache)
    };
    vmem(pc, words, (row, 12), vdata, bits(second, 20, 1) == 1, operands)
}
