//! Code objects: the ELF file a compiler makes for one GPU architecture, its kernels and what they ask for.

use std::collections::HashMap;
use std::fmt;

use object::{Object, ObjectSection, ObjectSegment, ObjectSymbol, read::elf::ElfFile64};
use rmpv::Value;

use crate::error::LoadError;

/// The architectures this crate executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    /// CDNA 2: MI210, MI250, MI250X.
    Gfx90a,
    /// CDNA 3: MI300A, MI300X, MI325X.
    Gfx942,
    /// CDNA 4: MI350X, MI355X.
    Gfx950,
    /// RDNA 3: RX 7900 XTX. Waves of 32.
    Gfx1100,
    /// RDNA 4: RX 9070 XT. Waves of 32.
    Gfx1201,
}

impl Arch {
    /// All architectures, oldest first.
    pub const ALL: [Self; 5] = [Self::Gfx90a, Self::Gfx942, Self::Gfx950, Self::Gfx1100, Self::Gfx1201];
    /// Architectures with MFMA and waves of 64.
    pub const CDNA: [Self; 3] = [Self::Gfx90a, Self::Gfx942, Self::Gfx950];
    /// Architectures with WMMA and waves of 32.
    pub const RDNA: [Self; 2] = [Self::Gfx1100, Self::Gfx1201];

    /// LLVM's name, such as `gfx942`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Gfx90a => "gfx90a",
            Self::Gfx942 => "gfx942",
            Self::Gfx950 => "gfx950",
            Self::Gfx1100 => "gfx1100",
            Self::Gfx1201 => "gfx1201",
        }
    }

    /// The architecture of that LLVM name, feature suffixes (`:sramecc+:xnack-`) ignored.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let base = name.split(':').next().unwrap_or(name);
        Self::ALL.into_iter().find(|arch| arch.name() == base)
    }

    /// Whether its waves are of 32 lanes and its encodings those of RDNA.
    #[must_use]
    pub fn is_rdna(self) -> bool {
        matches!(self, Self::Gfx1100 | Self::Gfx1201)
    }

    /// Lanes of a wave.
    #[must_use]
    pub fn wave_lanes(self) -> u32 {
        if self.is_rdna() { 32 } else { 64 }
    }

    /// LDS a workgroup may have, in bytes.
    #[must_use]
    pub fn lds_bytes(self) -> u32 {
        match self {
            Self::Gfx90a | Self::Gfx942 | Self::Gfx1100 | Self::Gfx1201 => 64 << 10,
            Self::Gfx950 => 160 << 10,
        }
    }

    fn from_elf_flags(flags: u32) -> Option<Self> {
        match flags & 0xff {
            0x3f => Some(Self::Gfx90a),
            0x4c => Some(Self::Gfx942),
            0x4f => Some(Self::Gfx950),
            0x41 => Some(Self::Gfx1100),
            0x4e => Some(Self::Gfx1201),
            _ => None,
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Requirements of one kernel, from its descriptor and from the code object's metadata note.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// The symbol without `.kd`.
    pub name: String,
    /// Address of the first instruction inside the code object.
    pub entry: u64,
    /// Bytes of kernel arguments, hidden ones included.
    pub kernarg_bytes: u32,
    /// Offset and length of each argument in bytes, hidden ones last, with their kind (`by_value`, …).
    pub args: Vec<KernelArg>,
    /// Static LDS in bytes.
    pub lds_bytes: u32,
    /// Private (scratch) memory per lane in bytes.
    pub scratch_bytes: u32,
    /// Registers per lane as the compiler counts them, vector and accumulator together.
    pub vgpr_count: u32,
    /// Accumulator registers, which `vgpr_count` includes.
    pub agpr_count: u32,
    /// Scalar registers.
    pub sgpr_count: u32,
    /// Vector registers spilled to scratch.
    pub vgpr_spill_count: u32,
    /// Scalar registers spilled.
    pub sgpr_spill_count: u32,
    /// Most work-items a workgroup may have.
    pub max_workgroup_size: u32,
    /// The descriptor's words that decide the initial state.
    pub(crate) descriptor: Descriptor,
}

/// One kernel argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelArg {
    /// Bytes from the start of the argument segment.
    pub offset: u32,
    /// Length in bytes.
    pub size: u32,
    /// `by_value`, `global_buffer`, `hidden_block_count_x`, …
    pub kind: String,
}

/// The 64-byte kernel descriptor (LLVM, "User Guide for AMDGPU Backend", Kernel Descriptor), as far as
/// execution needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) rsrc1: u32,
    pub(crate) rsrc2: u32,
    pub(crate) rsrc3: u32,
    pub(crate) properties: u16,
    pub(crate) kernarg_preload: u16,
}

/// One instruction of a code object, for tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Address inside the code object.
    pub pc: u64,
    /// Offset of the instruction's bytes in the ELF file.
    pub file_offset: usize,
    /// Length in bytes.
    pub size: usize,
    /// Mnemonic, without operands, encoding suffix or modifiers.
    pub mnemonic: String,
    /// Registers and constants, destination first.
    pub operands: Vec<String>,
    /// `file:line`, where the code object has line information.
    pub source: Option<String>,
}

/// A loaded code object: its image, kernels and line table.
pub struct CodeObject {
    /// Architecture that the code object was compiled for.
    pub arch: Arch,
    /// The kernels, in the metadata's order.
    pub kernels: Vec<KernelInfo>,
    /// Loadable image: bytes at `image[address]`, zero-filled.
    pub(crate) image: Vec<u8>,
    /// Executable range, addresses inside the image.
    pub(crate) text: std::ops::Range<u64>,
    /// Offset of the text section in the file.
    text_offset: usize,
    pub(crate) lines: crate::line::LineTable,
    /// Symbols of data objects: name, address, size.
    pub(crate) globals: HashMap<String, (u64, u64)>,
}

impl CodeObject {
    /// Reads an ELF code object.
    ///
    /// # Errors
    /// [`LoadError`] when the bytes are no AMDGPU code object, or one for another architecture.
    pub fn parse(bytes: &[u8]) -> Result<Self, LoadError> {
        let file: ElfFile64<'_> = ElfFile64::parse(bytes).map_err(|e| LoadError::NotElf(e.to_string()))?;
        let machine = file.elf_header().e_machine.get(object::Endianness::Little);
        if machine != object::elf::EM_AMDGPU {
            return Err(LoadError::WrongMachine(machine));
        }
        let flags = file.elf_header().e_flags.get(object::Endianness::Little);
        let arch = Arch::from_elf_flags(flags).ok_or(LoadError::UnknownArch(flags & 0xff))?;
        let image = load_image(&file)?;
        let text_section = file.section_by_name(".text").ok_or(LoadError::Missing("section .text"))?;
        let text = text_section.address()..text_section.address() + text_section.size();
        let text_offset = text_section.file_range().map_or(0, |range| range.0 as usize);
        let symbols: HashMap<&str, (u64, u64)> = file
            .dynamic_symbols()
            .chain(file.symbols())
            .filter_map(|s| Some((s.name().ok()?, (s.address(), s.size()))))
            .filter(|(name, (address, _))| !name.is_empty() && *address != 0)
            .collect();
        let note = metadata_note(&file)?;
        let kernels = map_get(&note, "amdhsa.kernels")
            .and_then(Value::as_array)
            .ok_or(LoadError::Missing("amdhsa.kernels in the metadata note"))?
            .iter()
            .map(|kernel| kernel_info(kernel, &symbols, &image))
            .collect::<Result<Vec<_>, _>>()?;
        let globals = symbols.iter().map(|(name, range)| ((*name).to_owned(), *range)).collect();
        Ok(Self {
            arch,
            kernels,
            image,
            text,
            text_offset,
            lines: crate::line::LineTable::read(&file),
            globals,
        })
    }

    /// The instructions of the text section.
    #[must_use]
    pub fn disassemble(&self) -> Vec<Instruction> {
        crate::decode::Program::decode(self)
            .insts
            .iter()
            .map(|inst| Instruction {
                pc: inst.pc,
                file_offset: self.text_offset + (inst.pc - self.text.start) as usize,
                size: usize::from(inst.size),
                mnemonic: inst.mnemonic(),
                operands: inst.operands(),
                source: self.lines.find(inst.pc),
            })
            .collect()
    }

    /// The kernel of that name.
    #[must_use]
    pub fn kernel(&self, name: &str) -> Option<&KernelInfo> {
        self.kernels.iter().find(|k| k.name == name)
    }
}

fn load_image(file: &ElfFile64<'_>) -> Result<Vec<u8>, LoadError> {
    let end = file.segments().map(|s| s.address() + s.size()).max().unwrap_or(0);
    if end > 1 << 30 {
        return Err(LoadError::Missing("segments below 1 GiB"));
    }
    let mut image = vec![0; end as usize];
    for segment in file.segments() {
        let data = segment.data().map_err(|e| LoadError::NotElf(e.to_string()))?;
        let at = segment.address() as usize;
        image[at..at + data.len()].copy_from_slice(data);
    }
    Ok(image)
}

/// The `NT_AMDGPU_METADATA` note, a msgpack map.
fn metadata_note(file: &ElfFile64<'_>) -> Result<Value, LoadError> {
    const NT_AMDGPU_METADATA: u32 = 32;
    for section in file.sections() {
        if section.kind() != object::SectionKind::Note {
            continue;
        }
        let data = section.data().map_err(|e| LoadError::NotElf(e.to_string()))?;
        let word = |at: usize| data.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let mut at = 0;
        while let (Some(name_len), Some(desc_len), Some(kind)) = (word(at), word(at + 4), word(at + 8)) {
            let desc_at = at + 12 + (name_len as usize).next_multiple_of(4);
            let desc = data
                .get(desc_at..desc_at + desc_len as usize)
                .ok_or(LoadError::Missing("whole metadata note"))?;
            if kind == NT_AMDGPU_METADATA {
                return rmpv::decode::read_value(&mut &*desc).map_err(|e| LoadError::Metadata(e.to_string()));
            }
            at = desc_at + (desc_len as usize).next_multiple_of(4);
        }
    }
    Err(LoadError::Missing("metadata note"))
}

fn map_get<'v>(value: &'v Value, key: &str) -> Option<&'v Value> {
    value.as_map()?.iter().find(|(k, _)| k.as_str() == Some(key)).map(|(_, v)| v)
}

fn kernel_info(
    kernel: &Value,
    symbols: &HashMap<&str, (u64, u64)>,
    image: &[u8],
) -> Result<KernelInfo, LoadError> {
    let number = |key: &str| map_get(kernel, key).and_then(Value::as_u64).unwrap_or(0) as u32;
    let text =
        |value: &Value, key: &str| map_get(value, key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let name = text(kernel, ".name");
    let symbol = text(kernel, ".symbol");
    let (at, _) = *symbols
        .get(symbol.as_str())
        .ok_or_else(|| LoadError::Metadata(format!("no symbol {symbol} for kernel {name}")))?;
    let kd = image
        .get(at as usize..at as usize + 64)
        .ok_or_else(|| LoadError::Metadata(format!("{symbol} lies outside the image")))?;
    let word = |o: usize| u32::from_le_bytes([kd[o], kd[o + 1], kd[o + 2], kd[o + 3]]);
    let entry_offset = i64::from(word(16)) | (i64::from(word(20)) << 32);
    let args = map_get(kernel, ".args").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    Ok(KernelInfo {
        name,
        entry: at.wrapping_add_signed(entry_offset),
        kernarg_bytes: number(".kernarg_segment_size"),
        args: args
            .iter()
            .map(|arg| {
                let number = |key: &str| map_get(arg, key).and_then(Value::as_u64).unwrap_or(0) as u32;
                KernelArg { offset: number(".offset"), size: number(".size"), kind: text(arg, ".value_kind") }
            })
            .collect(),
        lds_bytes: number(".group_segment_fixed_size"),
        scratch_bytes: number(".private_segment_fixed_size"),
        vgpr_count: number(".vgpr_count"),
        agpr_count: number(".agpr_count"),
        sgpr_count: number(".sgpr_count"),
        vgpr_spill_count: number(".vgpr_spill_count"),
        sgpr_spill_count: number(".sgpr_spill_count"),
        max_workgroup_size: number(".max_flat_workgroup_size"),
        descriptor: Descriptor {
            rsrc3: word(44),
            rsrc1: word(48),
            rsrc2: word(52),
            properties: word(56) as u16,
            kernarg_preload: (word(56) >> 16) as u16,
        },
    })
}
