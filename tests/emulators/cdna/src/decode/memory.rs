//! The memory encodings: SMEM, DS, FLAT (flat, global, scratch) and MUBUF.

use super::operand::Source;
use super::table::{Enc, TABLE};
use super::{bits, blank};
use crate::elf::Arch;
use crate::inst::{AGPR, AtomicOp, Class, Half, Inst, M0, Mem, MemKind, Regs, Space, Src};
use crate::op::Op;

pub(super) fn smem(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second) = (words[0], *words.get(1)?);
    let row = TABLE.get(arch, Enc::Smem, bits(word, 18, 8))?;
    let kind = match row.name.split_once("load_dword").or_else(|| row.name.split_once("store_dword")) {
        Some((_, count)) => {
            let dwords = count.trim_start_matches('x').parse().unwrap_or(1);
            if row.name.contains("load") {
                MemKind::ScalarLoad { dwords }
            } else {
                MemKind::ScalarStore { dwords }
            }
        }
        None if row.name.starts_with("s_dcache") => MemKind::Cache,
        None if row.name.contains("time") => MemKind::Time,
        None => return unknown_mem(pc, words, row.name, 8),
    };
    let mut inst = blank(pc, words, row.name);
    inst.size = 8;
    inst.class = Class::Smem;
    inst.op = Op::Memory;
    inst.sdst = bits(word, 6, 7) as u8;
    let buffer = row.name.contains("buffer");
    let sbase = (bits(word, 0, 6) * 2) as u8;
    let (has_imm, has_soffset) = (bits(word, 17, 1) == 1, bits(word, 14, 1) == 1);
    let soffset = if has_soffset {
        Src::S(bits(second, 25, 7) as u8)
    } else if has_imm {
        Src::K(0, 0)
    } else {
        Src::S(bits(second, 0, 7) as u8)
    };
    let offset = if has_imm { (bits(second, 0, 21) << 11) as i32 >> 11 } else { 0 };
    match kind {
        MemKind::ScalarLoad { dwords } => {
            inst.reads.push(Regs::S(sbase, if buffer { 4 } else { 2 }));
            inst.writes.push(Regs::S(inst.sdst, dwords));
        }
        MemKind::ScalarStore { dwords } => {
            inst.reads.push(Regs::S(sbase, if buffer { 4 } else { 2 }));
            inst.reads.push(Regs::S(inst.sdst, dwords));
        }
        MemKind::Time => inst.writes.push(Regs::S(inst.sdst, 2)),
        _ => {}
    }
    if let Src::S(first) = soffset {
        inst.reads.push(Regs::S(first, 1));
    }
    inst.mem = Some(Mem {
        space: if buffer { Space::ScalarBuffer } else { Space::Scalar },
        kind,
        vaddr: None,
        data: 0,
        data2: 0,
        sbase: Some(sbase),
        soffset,
        offset,
        offset2: 0,
        idxen: false,
        offen: false,
    });
    Some(inst)
}

/// A row whose operation has no executor: it decodes, and faults when it is reached.
pub(super) fn unknown_mem(pc: u64, words: &[u32], name: &'static str, size: u8) -> Option<Inst> {
    let mut inst = blank(pc, words, name);
    inst.size = size;
    inst.class = Class::Vmem;
    inst.op = Op::Unknown;
    Some(inst)
}

pub(super) fn ds(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second) = (words[0], *words.get(1)?);
    let row = TABLE.get(arch, Enc::Ds, bits(word, 17, 8))?;
    let Some(kind) = ds_kind(row.name) else { return unknown_mem(pc, words, row.name, 8) };
    let mut inst = blank(pc, words, row.name);
    inst.size = 8;
    inst.class = Class::Lds;
    inst.op = Op::Memory;
    let acc = if bits(word, 25, 1) == 1 { AGPR } else { 0 };
    inst.vdst = bits(second, 24, 8) as u16 + acc;
    let (offset0, offset1) = (bits(word, 0, 8) as i32, bits(word, 8, 8) as i32);
    let (offset, offset2) = match kind {
        MemKind::Load2 { bytes, stride } | MemKind::Store2 { bytes, stride } => {
            let scale = i32::from(bytes) * i32::from(stride);
            (offset0 * scale, offset1 * scale)
        }
        _ => (offset0 | offset1 << 8, 0),
    };
    inst.mem = Some(Mem {
        space: Space::Lds,
        kind,
        vaddr: Some(bits(second, 0, 8) as u16),
        data: bits(second, 8, 8) as u16 + acc,
        data2: bits(second, 16, 8) as u16 + acc,
        sbase: None,
        soffset: Src::None,
        offset,
        offset2,
        idxen: false,
        offen: false,
    });
    effects(&mut inst);
    Some(inst)
}

pub(super) fn ds_kind(name: &str) -> Option<MemKind> {
    let rest = name.strip_prefix("ds_")?;
    Some(match rest {
        "permute_b32" => MemKind::Permute,
        "bpermute_b32" => MemKind::Bpermute,
        "swizzle_b32" => MemKind::Swizzle,
        "read_b64_tr_b4" => MemKind::ReadTranspose { bits: 4 },
        "read_b96_tr_b6" => MemKind::ReadTranspose { bits: 6 },
        "read_b64_tr_b8" => MemKind::ReadTranspose { bits: 8 },
        "read_b64_tr_b16" => MemKind::ReadTranspose { bits: 16 },
        "read2_b32" => MemKind::Load2 { bytes: 4, stride: 1 },
        "read2_b64" => MemKind::Load2 { bytes: 8, stride: 1 },
        "read2st64_b32" => MemKind::Load2 { bytes: 4, stride: 64 },
        "read2st64_b64" => MemKind::Load2 { bytes: 8, stride: 64 },
        "write2_b32" => MemKind::Store2 { bytes: 4, stride: 1 },
        "write2_b64" => MemKind::Store2 { bytes: 8, stride: 1 },
        "write2st64_b32" => MemKind::Store2 { bytes: 4, stride: 64 },
        "write2st64_b64" => MemKind::Store2 { bytes: 8, stride: 64 },
        _ => {
            if let Some(what) = rest.strip_prefix("read_") {
                return load_of(what);
            }
            if let Some(what) = rest.strip_prefix("write_") {
                return store_of(what);
            }
            return ds_atomic(rest);
        }
    })
}

fn ds_atomic(rest: &str) -> Option<MemKind> {
    let returns = rest.contains("_rtn_");
    let name = rest.replace("_rtn", "");
    let (op, ty) = name.rsplit_once('_')?;
    let bytes = if ty.ends_with("64") { 8 } else { 4 };
    let signed = ty.starts_with('i');
    let float = ty.starts_with('f');
    let op = match op {
        "add" if float => AtomicOp::AddF,
        "min" if float => AtomicOp::MinF,
        "max" if float => AtomicOp::MaxF,
        "add" => AtomicOp::Add,
        "sub" => AtomicOp::Sub,
        "rsub" => AtomicOp::Rsub,
        "inc" => AtomicOp::Inc,
        "dec" => AtomicOp::Dec,
        "min" => {
            if signed {
                AtomicOp::Smin
            } else {
                AtomicOp::Umin
            }
        }
        "max" => {
            if signed {
                AtomicOp::Smax
            } else {
                AtomicOp::Umax
            }
        }
        "and" => AtomicOp::And,
        "or" => AtomicOp::Or,
        "xor" => AtomicOp::Xor,
        "wrxchg" => AtomicOp::Swap,
        "cmpst" if !float => AtomicOp::CmpSwap,
        "pk_add" if ty == "f16" => AtomicOp::PkAddF16,
        "pk_add" => AtomicOp::PkAddBf16,
        _ => return None,
    };
    Some(MemKind::Atomic { op, bytes, returns })
}

/// `ubyte_d16_hi`, `dwordx4`, `b128`, `u16`, …
fn load_of(what: &str) -> Option<MemKind> {
    let (base, half) = halves(what);
    let (bytes, sext) = match base {
        "ubyte" | "u8" => (1, false),
        "sbyte" | "i8" => (1, true),
        "ushort" | "u16" | "short" => (2, false),
        "sshort" | "i16" => (2, true),
        other => (wide(other)?, false),
    };
    Some(MemKind::Load { bytes, sext, half })
}

fn store_of(what: &str) -> Option<MemKind> {
    let (base, half) = halves(what);
    let bytes = match base {
        "byte" | "b8" => 1,
        "short" | "b16" => 2,
        other => wide(other)?,
    };
    Some(MemKind::Store { bytes, half })
}

fn halves(what: &str) -> (&str, Half) {
    if let Some(base) = what.strip_suffix("_d16_hi") {
        (base, Half::Hi)
    } else if let Some(base) = what.strip_suffix("_d16") {
        (base, Half::Lo)
    } else {
        (what, Half::Whole)
    }
}

fn wide(base: &str) -> Option<u8> {
    Some(match base {
        "dword" | "b32" => 4,
        "dwordx2" | "b64" => 8,
        "dwordx3" | "b96" => 12,
        "dwordx4" | "b128" => 16,
        _ => return None,
    })
}

/// The operation of a flat, global, scratch or buffer instruction, its name without the prefix.
pub(super) fn vmem_kind(name: &str, returns: bool, to_lds: bool) -> Option<MemKind> {
    if let Some(what) = name.strip_prefix("load_lds_") {
        let MemKind::Load { bytes, sext, .. } = load_of(what)? else { return None };
        return Some(MemKind::ToLds { bytes, sext });
    }
    if let Some(what) = name.strip_prefix("load_") {
        let kind = load_of(what)?;
        return match kind {
            MemKind::Load { bytes, sext, .. } if to_lds => Some(MemKind::ToLds { bytes, sext }),
            kind => Some(kind),
        };
    }
    if let Some(what) = name.strip_prefix("store_") {
        return store_of(what);
    }
    if name.starts_with("wb") || name.starts_with("inv") {
        return Some(MemKind::Cache);
    }
    let what = name.strip_prefix("atomic_")?;
    let (what, wide) = match what.strip_suffix("_x2") {
        Some(what) => (what, true),
        None => (what, what.ends_with("f64")),
    };
    let op = match what {
        "swap" => AtomicOp::Swap,
        "cmpswap" => AtomicOp::CmpSwap,
        "add" => AtomicOp::Add,
        "sub" => AtomicOp::Sub,
        "smin" => AtomicOp::Smin,
        "umin" => AtomicOp::Umin,
        "smax" => AtomicOp::Smax,
        "umax" => AtomicOp::Umax,
        "and" => AtomicOp::And,
        "or" => AtomicOp::Or,
        "xor" => AtomicOp::Xor,
        "inc" => AtomicOp::Inc,
        "dec" => AtomicOp::Dec,
        "add_f32" | "add_f64" => AtomicOp::AddF,
        "min_f64" => AtomicOp::MinF,
        "max_f64" => AtomicOp::MaxF,
        "pk_add_f16" => AtomicOp::PkAddF16,
        "pk_add_bf16" => AtomicOp::PkAddBf16,
        _ => return None,
    };
    Some(MemKind::Atomic { op, bytes: if wide { 8 } else { 4 }, returns })
}

pub(super) fn flat(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second) = (words[0], *words.get(1)?);
    let row = TABLE.get(arch, Enc::Flat, bits(word, 18, 7))?;
    let space = match bits(word, 14, 2) {
        0 => Space::Flat,
        1 => Space::Scratch,
        2 => Space::Global,
        _ => return None,
    };
    let lds_bit = bits(word, 13, 1) == 1;
    let to_lds = arch == Arch::Gfx90a && lds_bit;
    let Some(kind) = vmem_kind(row.name, bits(word, 16, 1) == 1, to_lds) else {
        return unknown_mem(pc, words, row.name, 8);
    };
    let mut inst = blank(pc, words, row.name);
    inst.size = 8;
    inst.class = Class::Vmem;
    inst.op = Op::Memory;
    let acc = if bits(second, 23, 1) == 1 { AGPR } else { 0 };
    inst.vdst = bits(second, 24, 8) as u16 + acc;
    let saddr = bits(second, 16, 7) as u8;
    let sbase = (saddr != 0x7f && space != Space::Flat).then_some(saddr);
    // gfx942 says with a bit whether a scratch access takes a vector address, gfx90a takes one unless a scalar does.
    let vaddr = match space {
        Space::Scratch if arch == Arch::Gfx90a => sbase.is_none(),
        Space::Scratch => lds_bit,
        _ => true,
    };
    inst.mem = Some(Mem {
        space,
        kind,
        vaddr: vaddr.then_some(bits(second, 0, 8) as u16),
        data: bits(second, 8, 8) as u16 + acc,
        data2: 0,
        sbase,
        soffset: Src::None,
        offset: (bits(word, 0, 13) << 19) as i32 >> 19,
        offset2: 0,
        idxen: false,
        offen: false,
    });
    effects(&mut inst);
    Some(inst)
}

pub(super) fn mubuf(arch: Arch, pc: u64, words: &[u32]) -> Option<Inst> {
    let (word, second) = (words[0], *words.get(1)?);
    let row = TABLE.get(arch, Enc::Mubuf, bits(word, 18, 7))?;
    let name = row.name.strip_prefix("buffer_")?;
    let kind = vmem_kind(name, bits(word, 14, 1) == 1, bits(word, 16, 1) == 1);
    let Some(kind) = kind else { return unknown_mem(pc, words, row.name, 8) };
    let mut inst = blank(pc, words, row.name);
    inst.size = 8;
    inst.class = Class::Vmem;
    inst.op = Op::Memory;
    let acc = if bits(second, 23, 1) == 1 { AGPR } else { 0 };
    let (idxen, offen) = (bits(word, 13, 1) == 1, bits(word, 12, 1) == 1);
    inst.vdst = bits(second, 8, 8) as u16 + acc;
    inst.mem = Some(Mem {
        space: Space::Buffer,
        kind,
        vaddr: (idxen || offen).then_some(bits(second, 0, 8) as u16),
        data: inst.vdst,
        data2: 0,
        sbase: Some((bits(second, 16, 5) * 4) as u8),
        soffset: Source::new(words, 2).read(bits(second, 24, 8), crate::inst::Ty::B32)?,
        offset: bits(word, 0, 12) as i32,
        offset2: 0,
        idxen,
        offen,
    });
    effects(&mut inst);
    Some(inst)
}

/// Registers that a vector memory or LDS instruction reads and writes.
pub(super) fn effects(inst: &mut Inst) {
    let Some(mem) = inst.mem else { return };
    let dwords = |bytes: u8| bytes.div_ceil(4);
    if mem.kind == MemKind::Cache {
        return;
    }
    if let Some(vaddr) = mem.vaddr {
        let count = match mem.space {
            Space::Flat => 2,
            Space::Global => {
                if mem.sbase.is_some() {
                    1
                } else {
                    2
                }
            }
            Space::Buffer => u8::from(mem.idxen) + u8::from(mem.offen),
            _ => 1,
        };
        inst.reads.push(Regs::V(vaddr, count));
    }
    if let Some(sbase) = mem.sbase {
        let count = match mem.space {
            Space::Buffer => 4,
            Space::Global => 2,
            _ => 1,
        };
        inst.reads.push(Regs::S(sbase, count));
    }
    if let Src::S(first) = mem.soffset {
        inst.reads.push(Regs::S(first, 1));
    }
    match mem.kind {
        MemKind::Load { bytes, half, .. } => {
            if half != Half::Whole {
                // The other half stays; whether it was ever defined is its reader's affair.
            }
            inst.writes.push(Regs::V(inst.vdst, dwords(bytes)));
        }
        MemKind::Store { bytes, .. } => inst.reads.push(Regs::V(mem.data, dwords(bytes))),
        MemKind::Load2 { bytes, .. } => inst.writes.push(Regs::V(inst.vdst, 2 * dwords(bytes))),
        MemKind::Store2 { bytes, .. } => {
            inst.reads.push(Regs::V(mem.data, dwords(bytes)));
            inst.reads.push(Regs::V(mem.data2, dwords(bytes)));
        }
        MemKind::Atomic { op, bytes, returns } => {
            let compare = op == AtomicOp::CmpSwap;
            let in_data = if compare && mem.space != Space::Lds { 2 } else { 1 };
            inst.reads.push(Regs::V(mem.data, in_data * dwords(bytes)));
            if compare && mem.space == Space::Lds {
                inst.reads.push(Regs::V(mem.data2, dwords(bytes)));
            }
            if returns {
                inst.writes.push(Regs::V(inst.vdst, dwords(bytes)));
            }
        }
        MemKind::ToLds { .. } => inst.reads.push(Regs::S(M0, 1)),
        MemKind::ReadTranspose { bits } => {
            inst.writes.push(Regs::V(inst.vdst, if bits == 6 { 3 } else { 2 }));
        }
        MemKind::Permute | MemKind::Bpermute => {
            inst.reads.push(Regs::V(mem.data, 1));
            inst.writes.push(Regs::V(inst.vdst, 1));
        }
        MemKind::Swizzle => inst.writes.push(Regs::V(inst.vdst, 1)),
        _ => {}
    }
}
