//! The instruction table: `isa.txt`, parsed once.

use std::collections::HashMap;
use std::sync::LazyLock;

use crate::elf::Arch;
use crate::inst::Ty;

/// The encodings of CDNA, as its ISA documents name them; MAI is the matrix half of VOP3P.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Enc {
    Sop2,
    Sopk,
    Sop1,
    Sopc,
    Sopp,
    Smem,
    Vop2,
    Vop1,
    Vopc,
    Vop3,
    Vop3p,
    Mai,
    Ds,
    Flat,
    Mubuf,
}

/// One instruction of one encoding.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// CDNA's name of the instruction, by which it is executed, where that differs.
    pub(crate) canonical: &'static str,
    /// Destination first. For scalar, LDS and matrix rows `Ty::Regs`.
    pub(crate) operands: Vec<Ty>,
}

/// Rows by architecture, encoding and opcode.
pub(crate) struct Table {
    rows: HashMap<(Arch, Enc, u16), Row>,
    comparisons: HashMap<&'static str, u16>,
}

impl Table {
    pub(crate) fn get(&self, arch: Arch, enc: Enc, opcode: u32) -> Option<&Row> {
        self.rows.get(&(arch, enc, opcode as u16))
    }

    /// A VOP3 row of its own, or the short form's that the VOP3 opcode stands for.
    pub(crate) fn vop3(&self, arch: Arch, opcode: u32) -> Option<(Enc, &Row)> {
        if let Some(row) = self.get(arch, Enc::Vop3, opcode) {
            return Some((Enc::Vop3, row));
        }
        let (enc, opcode) = match opcode {
            0..0x100 => (Enc::Vopc, opcode),
            0x100..0x140 => (Enc::Vop2, opcode - 0x100),
            0x140..0x1c0 => (Enc::Vop1, opcode - 0x140),
            _ => return None,
        };
        Some((enc, self.get(arch, enc, opcode)?))
    }

    /// VOP3 row of RDNA, where the VOP3 forms of VOP1 have other opcodes than on CDNA.
    pub(crate) fn vop3_of_rdna(&self, arch: Arch, opcode: u32) -> Option<(Enc, &Row)> {
        if let Some(row) = self.get(arch, Enc::Vop3, opcode) {
            return Some((Enc::Vop3, row));
        }
        let (enc, opcode) = match opcode {
            0..0x100 => (Enc::Vopc, opcode),
            0x100..0x140 => (Enc::Vop2, opcode - 0x100),
            0x180..0x200 => (Enc::Vop1, opcode - 0x180),
            _ => return None,
        };
        Some((enc, self.get(arch, enc, opcode)?))
    }

    /// CDNA's opcode of a comparison, by which it is executed.
    pub(crate) fn comparison(&self, name: &str) -> Option<u16> {
        self.comparisons.get(name).copied()
    }
}

/// The table of all architectures.
pub(crate) static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let (mut rows, mut comparisons) = (HashMap::new(), HashMap::new());
    for line in include_str!("isa.txt").lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split(' ');
        let mut word = || words.next().unwrap_or_default();
        let (enc, opcode, archs, name, operands) = (word(), word(), word(), word(), word());
        let (Some(enc), Ok(opcode)) = (enc_of(enc), u16::from_str_radix(opcode, 16)) else { continue };
        for (letter, arch) in [('a', Arch::Gfx90a), ('b', Arch::Gfx942), ('c', Arch::Gfx950)] {
            if archs.contains(letter) {
                let operands = operands.split(',').filter(|o| !o.is_empty()).map(ty_of).collect();
                rows.insert((arch, enc, opcode), Row { name, canonical: name, operands });
            }
        }
        if enc == Enc::Vopc {
            comparisons.insert(name, opcode);
        }
    }
    for line in include_str!("isa_rdna.txt").lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split(' ');
        let mut word = || words.next().unwrap_or_default();
        let (enc, opcode, archs, name, canonical) = (word(), word(), word(), word(), word());
        let operands = word();
        let (Some(enc), Ok(opcode)) = (enc_of(enc), u16::from_str_radix(opcode, 16)) else { continue };
        for (letter, arch) in [('d', Arch::Gfx1100), ('e', Arch::Gfx1201)] {
            if archs.contains(letter) {
                let types = operands.split(',').filter(|o| !o.is_empty());
                // A lane mask of 32 is one register.
                let operands = types.map(|o| if o == "mask" { Ty::Mask32 } else { ty_of(o) }).collect();
                rows.insert((arch, enc, opcode), Row { name, canonical, operands });
            }
        }
    }
    Table { rows, comparisons }
});

fn enc_of(word: &str) -> Option<Enc> {
    Some(match word {
        "SOP2" => Enc::Sop2,
        "SOPK" => Enc::Sopk,
        "SOP1" => Enc::Sop1,
        "SOPC" => Enc::Sopc,
        "SOPP" => Enc::Sopp,
        "SMEM" => Enc::Smem,
        "VOP2" => Enc::Vop2,
        "VOP1" => Enc::Vop1,
        "VOPC" => Enc::Vopc,
        "VOP3" => Enc::Vop3,
        "VOP3P" => Enc::Vop3p,
        "MAI" => Enc::Mai,
        "DS" => Enc::Ds,
        "FLAT" => Enc::Flat,
        "MUBUF" => Enc::Mubuf,
        _ => return None,
    })
}

fn ty_of(word: &str) -> Ty {
    match word {
        "f16" => Ty::F16,
        "f32" => Ty::F32,
        "f64" => Ty::F64,
        "b16" => Ty::B16,
        "b32" => Ty::B32,
        "b64" => Ty::B64,
        "2f16" => Ty::F16x2,
        "2bf16" => Ty::Bf16x2,
        "2b16" => Ty::B16x2,
        "2f32" => Ty::F32x2,
        "2b32" => Ty::B32x2,
        "mix" => Ty::Mix,
        "mask" => Ty::Mask,
        other => Ty::Regs(other.trim_start_matches("b32x").parse().unwrap_or(1)),
    }
}
