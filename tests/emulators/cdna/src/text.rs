//! Instructions as text, the way LLVM writes their operands: for reports, and to hold the decoder against LLVM's.

use crate::inst::{Inst, Mem, MemKind, Space, Src, Ty};
use crate::num::f16;
use crate::op::Op;

impl Inst {
    /// The mnemonic with the name of its address space, without LLVM's encoding suffix.
    pub(crate) fn mnemonic(&self) -> String {
        let prefix = match self.mem.map(|m| m.space) {
            Some(Space::Flat) => "flat_",
            Some(Space::Global) => "global_",
            Some(Space::Scratch) => "scratch_",
            _ => "",
        };
        format!("{prefix}{}", self.name)
    }

    /// The registers and constants it names, destination first.
    pub(crate) fn operands(&self) -> Vec<String> {
        if let Some(mem) = &self.mem {
            return self.memory_operands(mem);
        }
        let mut out = Vec::new();
        let scalar = self.name.starts_with("s_");
        if scalar {
            let has_dst = !self.writes.is_empty()
                && !matches!(self.writes.last(), Some(crate::inst::Regs::S(126, _)) if self.sdst != 126);
            if has_dst || self.name.starts_with("s_cmpk") {
                out.push(scalar_name(self.sdst, self.dst_ty.dwords()));
            }
        } else if self.name.starts_with("v_read") && self.name.contains("lane")
            || self.name.starts_with("v_s_")
        {
            out.push(scalar_name(self.sdst, 1));
        } else if self.dst_ty.is_mask() {
            // RDNA's v_cmpx names no destination: it writes EXEC alone.
            if !(self.dst_ty == Ty::Mask32 && self.name.starts_with("v_cmpx")) {
                out.push(scalar_name(self.sdst, self.dst_ty.dwords()));
            }
        } else if !matches!(self.name, "v_nop") {
            out.push(vector_name(self.vdst, self.dst_ty.dwords()));
            let carries = self.name.contains("_co_u32")
                || self.name.contains("_co_ci_u32")
                || self.name.starts_with("v_mad_co_")
                || self.name.starts_with("v_mad_u64")
                || self.name.starts_with("v_mad_i64")
                || self.name.starts_with("v_div_scale");
            if carries {
                let wave32 = self.writes.contains(&crate::inst::Regs::S(self.sdst, 1));
                out.push(scalar_name(self.sdst, if wave32 { 1 } else { 2 }));
            }
        }
        for i in 0..3 {
            // Read without being named: what s_fmac adds to, and VCC in VOPD.
            let is_silent = i == 2 && (self.op == Op::SFmacF32 || self.name.starts_with("v_dual_cndmask"));
            if self.src[i] == Src::None || is_silent {
                continue;
            }
            let text = source_name(self.src[i], self.src_ty[i]);
            let packed = matches!(self.src_ty[i], Ty::F16x2 | Ty::F32x2 | Ty::B16x2 | Ty::B32x2);
            let text = if self.abs >> i & 1 == 1 { format!("|{text}|") } else { text };
            out.push(if self.neg >> i & 1 == 1 && !packed { format!("-{text}") } else { text });
        }
        out
    }

    fn memory_operands(&self, mem: &Mem) -> Vec<String> {
        let bytes_regs = |bytes: u8| bytes.div_ceil(4);
        let mut out = Vec::new();
        if matches!(mem.space, Space::Scalar | Space::ScalarBuffer) {
            let dwords = match mem.kind {
                MemKind::ScalarLoad { dwords } => Some(dwords),
                MemKind::ScalarLoadPart { .. } => Some(1),
                _ => None,
            };
            if let (Some(dwords), Some(base)) = (dwords, mem.sbase) {
                out.push(scalar_name(self.sdst, dwords));
                out.push(scalar_name(base, if mem.space == Space::Scalar { 2 } else { 4 }));
            }
            return out;
        }
        let loads = match mem.kind {
            MemKind::Load { bytes, .. } | MemKind::Atomic { bytes, returns: true, .. } => bytes_regs(bytes),
            MemKind::Load2 { bytes, .. } => 2 * bytes_regs(bytes),
            MemKind::ReadTranspose { bits: 6 } => 3,
            MemKind::ReadTranspose { .. } => 2,
            MemKind::Permute | MemKind::Bpermute | MemKind::Swizzle => 1,
            _ => 0,
        };
        let stores = match mem.kind {
            MemKind::Store { bytes, .. } | MemKind::Store2 { bytes, .. } | MemKind::Atomic { bytes, .. } => {
                bytes_regs(bytes)
            }
            MemKind::Permute | MemKind::Bpermute => 1,
            _ => 0,
        };
        let buffer = mem.space == Space::Buffer;
        if loads > 0 {
            out.push(vector_name(self.vdst, loads));
        } else if buffer && stores > 0 {
            out.push(vector_name(mem.data, stores));
        }
        out.push(match (mem.vaddr, mem.space) {
            (None, _) => "off".to_owned(),
            (Some(reg), Space::Flat) => vector_name(reg, 2),
            (Some(reg), Space::Global) => vector_name(reg, if mem.sbase.is_some() { 1 } else { 2 }),
            (Some(reg), Space::Buffer) => vector_name(reg, u8::from(mem.idxen) + u8::from(mem.offen)),
            (Some(reg), _) => vector_name(reg, 1),
        });
        if stores > 0 && !buffer {
            out.push(vector_name(mem.data, stores));
            if matches!(mem.kind, MemKind::Store2 { .. }) {
                out.push(vector_name(mem.data2, stores));
            }
        }
        match (mem.space, mem.sbase) {
            (Space::Buffer, Some(base)) => {
                out.push(scalar_name(base, 4));
                out.push(source_name(mem.soffset, Ty::B32));
            }
            (Space::Global, Some(base)) => out.push(scalar_name(base, 2)),
            (Space::Scratch, Some(base)) => out.push(scalar_name(base, 1)),
            (Space::Global | Space::Scratch, None) => out.push("off".to_owned()),
            _ => {}
        }
        out
    }

    /// Mnemonic and operands.
    pub(crate) fn text(&self) -> String {
        format!("{} {}", self.mnemonic(), self.operands().join(", ")).trim_end().to_owned()
    }
}

fn run(letter: char, first: u16, count: u8) -> String {
    if count <= 1 {
        format!("{letter}{first}")
    } else {
        format!("{letter}[{first}:{}]", first + u16::from(count) - 1)
    }
}

fn vector_name(reg: u16, count: u8) -> String {
    if reg >= 256 { run('a', reg - 256, count) } else { run('v', reg, count) }
}

fn scalar_name(reg: u8, count: u8) -> String {
    match (reg, count) {
        (106, 2) => "vcc".to_owned(),
        (106, _) => "vcc_lo".to_owned(),
        (107, _) => "vcc_hi".to_owned(),
        (124, _) => "m0".to_owned(),
        // Register 125 is RDNA's NULL, and takes what is written there.
        (125, _) => "null".to_owned(),
        (126, 2) => "exec".to_owned(),
        (126, _) => "exec_lo".to_owned(),
        (127, _) => "exec_hi".to_owned(),
        (102, 2) => "flat_scratch".to_owned(),
        _ => run('s', u16::from(reg), count),
    }
}

fn source_name(src: Src, ty: Ty) -> String {
    match src {
        Src::None => String::new(),
        Src::V(reg) => vector_name(reg, ty.dwords()),
        Src::S(reg) => scalar_name(reg, ty.dwords()),
        Src::K(lo, hi) => constant(lo, hi, ty),
        Src::Scc => "src_scc".to_owned(),
        Src::Vccz => "src_vccz".to_owned(),
        Src::Execz => "src_execz".to_owned(),
    }
}

/// An inline constant by its value, anything else in hexadecimal.
fn constant(lo: u32, hi: u32, ty: Ty) -> String {
    let floats = [
        (0.5f64, "0.5"),
        (-0.5, "-0.5"),
        (1.0, "1.0"),
        (-1.0, "-1.0"),
        (2.0, "2.0"),
        (-2.0, "-2.0"),
        (4.0, "4.0"),
        (-4.0, "-4.0"),
        (0.159_154_943_091_895_32, "0.15915494"),
    ];
    for (value, text) in floats {
        let same = match ty {
            Ty::F64 | Ty::B64 | Ty::Mask => u64::from(lo) | u64::from(hi) << 32 == value.to_bits(),
            Ty::F16 | Ty::B16 | Ty::F16x2 | Ty::B16x2 => lo == u32::from(f16::from_f32(value as f32)),
            _ => lo == (value as f32).to_bits(),
        };
        if same {
            return text.to_owned();
        }
    }
    let signed = lo as i32;
    if (-16..=64).contains(&signed) {
        signed.to_string()
    } else {
        format!("0x{:x}", if ty == Ty::F64 { hi } else { lo })
    }
}
