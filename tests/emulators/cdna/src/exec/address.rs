//! Addresses of vector memory instructions: where each lane's access goes.

use super::Group;
use crate::decode::{PRIVATE_APERTURE, SHARED_APERTURE};
use crate::error::{Exec, FaultKind, Stop};
use crate::inst::{Inst, Mem, Space, Src};
use crate::wave::{LANES, Wave};

/// Base address that the launcher writes into gfx90a's private segment descriptor: accesses through it are private.
pub(crate) const PRIVATE_BUFFER: u64 = 0x7fff_0000_0000;

/// Place of one lane's access.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// The lane takes no part.
    Off,
    /// Device memory.
    Memory(u64),
    /// Device memory through a buffer descriptor: dwords from this many bytes on are out of range, read as zero and
    /// are not written.
    Buffer {
        address: u64,
        in_range: u32,
    },
    Lds(u32),
    /// Byte of the lane's private memory.
    Private(u32),
}

/// The places of all lanes.
pub(super) type Places = [Place; LANES];

impl Group<'_> {
    pub(super) fn places(&self, wave: &Wave, inst: &Inst, mem: &Mem, bytes: u32) -> Exec<Places> {
        match mem.space {
            Space::Buffer => buffer(wave, inst, mem, bytes),
            _ => Ok(plain(wave, mem)),
        }
    }
}

fn plain(wave: &Wave, mem: &Mem) -> Places {
    let exec = wave.exec();
    let mut places = [Place::Off; LANES];
    let offset = i64::from(mem.offset);
    match mem.space {
        Space::Scratch => {
            let base = mem.sbase.map_or(0, |reg| wave.s[usize::from(reg) & 127]);
            for l in (0..LANES).filter(|l| exec >> l & 1 == 1) {
                let lane = mem.vaddr.map_or(0, |reg| wave.vreg(reg).0[l]);
                places[l] = Place::Private(base.wrapping_add(lane).wrapping_add_signed(mem.offset));
            }
        }
        _ => {
            let Some(vaddr) = mem.vaddr else { return places };
            let lo = wave.vreg(vaddr);
            let hi = wave.vreg(vaddr + 1);
            for l in (0..LANES).filter(|l| exec >> l & 1 == 1) {
                let address = match mem.sbase {
                    Some(base) => wave.s64(base).wrapping_add(u64::from(lo.0[l])),
                    None => u64::from(lo.0[l]) | u64::from(hi.0[l]) << 32,
                };
                let address = address.wrapping_add_signed(offset);
                places[l] = match (mem.space, (address >> 32) as u32) {
                    (Space::Flat, SHARED_APERTURE) => Place::Lds(address as u32),
                    (Space::Flat, PRIVATE_APERTURE) => Place::Private(address as u32),
                    _ => Place::Memory(address),
                };
            }
        }
    }
    places
}

/// Buffer descriptors (CDNA3 ISA, "Buffer resource descriptor" and "Range checking"): raw and structured, not swizzled.
fn buffer(wave: &Wave, inst: &Inst, mem: &Mem, bytes: u32) -> Exec<Places> {
    let first = usize::from(mem.sbase.unwrap_or(0));
    let words: [u32; 4] = std::array::from_fn(|i| wave.s[(first + i) & 127]);
    let base = u64::from(words[0]) | u64::from(words[1] & 0xffff) << 32;
    let stride = words[1] >> 16 & 0x3fff;
    let records = words[2];
    let private = base == PRIVATE_BUFFER;
    let swizzled = words[1] >> 31 == 1;
    let add_tid = words[3] >> 23 & 1 == 1;
    if !private && (swizzled || add_tid) {
        return Err(Stop::new(
            FaultKind::UnknownInstruction,
            format!("{} with a swizzled or thread-indexed buffer descriptor", inst.name),
        ));
    }
    let soffset = match mem.soffset {
        Src::None => 0,
        other => wave.scalar(other),
    };
    let exec = wave.exec();
    let mut places = [Place::Off; LANES];
    let next = u16::from(mem.idxen);
    for l in (0..LANES).filter(|l| exec >> l & 1 == 1) {
        let lane = |extra: u16| mem.vaddr.map_or(0, |reg| wave.vreg(reg + extra).0[l]);
        let index = if mem.idxen { lane(0) } else { 0 };
        let offset = if mem.offen { lane(next) } else { 0 }.wrapping_add(mem.offset as u32);
        if private {
            // The scalar offset is the wave's place in memory that it alone uses.
            places[l] = Place::Private(offset.wrapping_add(soffset));
            continue;
        }
        let at = u64::from(offset) + u64::from(index) * u64::from(stride) + u64::from(soffset);
        let in_range = if stride == 0 {
            (u64::from(records).saturating_sub(at)).min(u64::from(bytes)) as u32
        } else if index < records && u64::from(offset) + u64::from(bytes) <= u64::from(stride) {
            bytes
        } else {
            0
        };
        // Dwords are in range or out of it as a whole.
        let in_range = if bytes >= 4 {
            in_range & !3
        } else if in_range < bytes {
            0
        } else {
            in_range
        };
        places[l] = Place::Buffer { address: base.wrapping_add(at), in_range };
    }
    Ok(places)
}
