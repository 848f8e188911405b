//! Machine code to [`Inst`]: the encodings of the CDNA ISA documents (sections "Microcode formats").

mod memory;
mod operand;
mod rdna;
pub(crate) mod table;
mod vector;

use crate::elf::{Arch, CodeObject};
use crate::inst::{Class, Inst, Regs, Src, Ty};
use crate::op::Op;
use operand::Source;
pub(crate) use operand::{PRIVATE_APERTURE, SHARED_APERTURE};
use table::{Enc, Row, TABLE};

/// All instructions of a code object's text section, in order of address.
pub(crate) struct Program {
    pub(crate) insts: Vec<Inst>,
    /// Index into `insts` for each 4-byte word of the text; `u32::MAX` inside an instruction.
    index: Vec<u32>,
    start: u64,
}

impl Program {
    /// Decodes the whole text section. What is no instruction becomes one that faults when it is reached.
    pub(crate) fn decode(object: &CodeObject) -> Self {
        let text = &object.image[object.text.start as usize..object.text.end as usize];
        let words: Vec<u32> =
            text.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let mut insts = Vec::new();
        let mut index = vec![u32::MAX; words.len()];
        let mut at = 0;
        while at < words.len() {
            let pc = object.text.start + 4 * at as u64;
            let inst = decode_one(object.arch, pc, &words[at..]);
            index[at] = insts.len() as u32;
            at += usize::from(inst.size) / 4;
            insts.push(inst);
        }
        let mut program = Self { insts, index, start: object.text.start };
        for i in 0..program.insts.len() {
            let inst = &program.insts[i];
            if inst.op.branches() {
                let to = inst.pc.wrapping_add(4).wrapping_add_signed(i64::from(inst.imm) * 4);
                program.insts[i].target = program.index_of(to).unwrap_or(u32::MAX);
            }
        }
        program
    }

    /// Index of the instruction at that address.
    pub(crate) fn index_of(&self, pc: u64) -> Option<u32> {
        let word = pc.checked_sub(self.start)? / 4;
        self.index.get(word as usize).copied().filter(|i| *i != u32::MAX && pc.is_multiple_of(4))
    }
}

/// Decodes the instruction at the start of `words`; never fails, an unknown one has [`Op::Unknown`].
pub(crate) fn decode_one(arch: Arch, pc: u64, words: &[u32]) -> Inst {
    try_decode(arch, pc, words).unwrap_or_else(|| unknown(pc, words))
}

fn unknown(pc: u64, words: &[u32]) -> Inst {
    let mut inst = blank(pc, words, "unknown");
    inst.op = Op::Unknown;
    inst
}

fn blank(pc: u64, words: &[u32], name: &'static str) -> Inst {
    let mut copy = [0; 4];
    for (to, from) in copy.iter_mut().zip(words) {
        *to = *from;
    }
    Inst {
        pc,
        size: 4,
        name,
        class: Class::Salu,
        op: Op::from_name(name),
        vdst: 0,
        sdst: 0,
        dst_ty: Ty::B32,
        src: [Src::None; 3],
        src_ty: [Ty::B32; 3],
        neg: 0,
        neg_hi: 0,
        abs: 0,
        op_sel: 0,
        op_sel_hi: 0,
        omod: 0,
        clamp: false,
        imm: 0,
        target: u32::MAX,
        dpp: None,
        sdwa: None,
        mem: None,
        mfma: None,
        reads: Vec::new(),
        writes: Vec::new(),
        plain: true,
        copies: false,
        halves: false,
        words: copy,
        dual: None,
    }
}

/// Bits `lo..lo + len` of a word.
fn bits(word: u32, lo: u32, len: u32) -> u32 {
    (word >> lo) & ((1 << len) - 1)
}

fn try_decode(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    if arch.is_rdna() {
        return rdna::decode(arch, pc, words);
    }
    let word = *words.first()?;
    match word >> 26 {
        0b11_0000 => return memory::smem(arch, pc, words),
        0b11_0100 => {
            return if bits(word, 23, 3) == 0b111 {
                vector::vop3p(arch, pc, words)
            } else {
                vector::vop3(arch, pc, words)
            };
        }
        0b11_0110 => return memory::ds(arch, pc, words),
        0b11_0111 => return memory::flat(arch, pc, words),
        0b11_1000 => return memory::mubuf(arch, pc, words),
        _ => {}
    }
    if word >> 31 == 0 {
        return vector::vop12c(arch, pc, words);
    }
    if word >> 30 == 0b10 {
        return scalar(arch, pc, words);
    }
    None
}

/// Encoding and opcode of a scalar instruction, on CDNA and RDNA.
fn scalar_opcode(word: u32) -> (Enc, u32) {
    match word >> 23 {
        0b1_0111_1101 => (Enc::Sop1, bits(word, 8, 8)),
        0b1_0111_1110 => (Enc::Sopc, bits(word, 16, 7)),
        0b1_0111_1111 => (Enc::Sopp, bits(word, 16, 7)),
        _ if word >> 28 == 0b1011 => (Enc::Sopk, bits(word, 23, 5)),
        _ => (Enc::Sop2, bits(word, 23, 7)),
    }
}

/// Reads an instruction's sources and immediate. `read` decodes operands as the architecture numbers them;
/// `inst` already has its destination.
fn scalar_operands(
    inst: &mut Inst,
    (enc, word): (Enc, u32),
    row: &Row,
    mut read: impl FnMut(u32, Ty) -> Option<Src>,
) -> Option<()> {
    let width = |i: usize| row.operands.get(i).map_or(1, |ty| ty.dwords());
    let ty = |i: usize| if width(i) == 2 { Ty::B64 } else { Ty::B32 };
    inst.dst_ty = ty(0);
    let simm = i32::from(word as u16 as i16);
    match enc {
        Enc::Sop2 => {
            inst.src_ty = [ty(1), ty(2), Ty::B32];
            inst.src[0] = read(bits(word, 0, 8), ty(1))?;
            inst.src[1] = read(bits(word, 8, 8), ty(2))?;
        }
        Enc::Sop1 => {
            // s_setpc_b64 has no destination: its only operand is the source.
            let last = row.operands.len().saturating_sub(1);
            inst.src_ty[0] = ty(last);
            inst.src[0] = read(bits(word, 0, 8), ty(last))?;
        }
        Enc::Sopc => {
            inst.src_ty = [ty(0), ty(1), Ty::B32];
            inst.src[0] = read(bits(word, 0, 8), ty(0))?;
            inst.src[1] = read(bits(word, 8, 8), ty(1))?;
        }
        Enc::Sopk => {
            inst.imm = simm;
            if inst.op == Op::SSetregImm32B32 {
                inst.src[0] = read(255, Ty::B32)?;
            } else if inst.op == Op::SSetregB32 {
                inst.src[0] = Src::S(inst.sdst);
            }
        }
        _ => inst.imm = simm,
    }
    Some(())
}

fn scalar(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let word = words[0];
    let (enc, opcode) = scalar_opcode(word);
    let row = TABLE.get(arch, enc, opcode)?;
    let mut inst = blank(pc, words, row.name);
    let mut source = Source::new(words, 1);
    inst.sdst = bits(word, 16, 7) as u8;
    scalar_operands(&mut inst, (enc, word), row, |code, ty| source.read(code, ty))?;
    inst.size = source.size();
    if matches!(enc, Enc::Sopp) || inst.op.branches() {
        inst.class = Class::Control;
    }
    scalar_effects(&mut inst, enc);
    Some(inst)
}

fn scalar_effects(inst: &mut Inst, enc: Enc) {
    for (src, ty) in inst.src.iter().zip(inst.src_ty) {
        if let Src::S(first) = *src {
            inst.reads.push(Regs::S(first, ty.dwords()));
        }
    }
    let dst = Regs::S(inst.sdst, inst.dst_ty.dwords());
    let writes = match enc {
        Enc::Sop2 => true,
        Enc::Sop1 => !matches!(inst.op, Op::SSetpcB64),
        Enc::Sopk => {
            let name = inst.name;
            if name.starts_with("s_cmpk") || name == "s_addk_i32" || name == "s_mulk_i32" {
                inst.reads.push(dst);
            }
            !(name.starts_with("s_cmpk") || name.starts_with("s_setreg"))
        }
        _ => false,
    };
    if inst.name.starts_with("s_cmov") || inst.name.starts_with("s_bitset") {
        inst.reads.push(dst);
    }
    if inst.name.contains("wrexec") || inst.name.contains("saveexec") {
        inst.writes.push(Regs::S(crate::inst::EXEC, 2));
    }
    if writes {
        inst.writes.push(dst);
    }
    inst.copies = inst.name.starts_with("s_mov_b") || inst.name.starts_with("s_cselect");
    // A field of the lower half is taken without a look at the upper, which compilers leave undefined.
    if matches!(inst.op, Op::SBfeI64 | Op::SBfeU64)
        && let (Src::S(first), Src::K(field, _)) = (inst.src[0], inst.src[1])
        && (field & 63) + (field >> 16 & 127) <= 32
    {
        for regs in inst.reads.iter_mut().filter(|regs| **regs == Regs::S(first, 2)) {
            *regs = Regs::S(first, 1);
        }
    }
}
