//! LDS of a workgroup, and its accesses since the last barrier.

use super::Checks;
use crate::error::{Exec, FaultKind, Stop};
use crate::wave::LANES;

/// The LDS that one instruction's lanes touch.
#[derive(Clone)]
pub(crate) struct Touch {
    pub(crate) write: bool,
    pub(crate) exec: u64,
    pub(crate) bytes: u32,
    pub(crate) addresses: [u32; LANES],
}

/// Data on its way from memory to LDS.
pub(crate) struct DmaWrite {
    pub(crate) exec: u64,
    pub(crate) bytes: u32,
    pub(crate) addresses: [u32; LANES],
    pub(crate) data: [[u32; 4]; LANES],
}

/// Epoch of a direct load that has not arrived.
const IN_FLIGHT: u32 = 0xff_ffff;
/// Value of the reader field for more than one wave.
const MANY: u32 = 0xff;
/// Writer field: atomics, of any waves.
const ATOMIC: u32 = 0xfe;

/// One workgroup's LDS.
pub(crate) struct Lds {
    pub(crate) words: Vec<u32>,
    pub(crate) bytes: u32,
    which: Checks,
    /// log2 of the bytes that share a shadow entry: at first the kernel's smallest store, finer after one that covers
    /// an entry in part. Every write covers whole entries, so a conflict on an entry is a conflict on its bytes.
    grain: u32,
    /// Barriers passed, from 1.
    epoch: u32,
    /// `epoch << 8 | wave + 1` of the last write; 0: never written.
    writers: Vec<u32>,
    /// `epoch << 8 | wave + 1` of the last read, wave field [`MANY`] for several.
    readers: Vec<u32>,
}

impl Lds {
    pub(crate) fn new() -> Self {
        Self {
            words: Vec::new(),
            bytes: 0,
            which: Checks::NONE,
            grain: 2,
            epoch: 1,
            writers: Vec::new(),
            readers: Vec::new(),
        }
    }

    /// Prepares for a workgroup: everything unwritten, NaN in every format or garbage of a seed.
    pub(crate) fn reset(&mut self, bytes: u32, which: Checks, grain: u32, garbage: Option<u64>) {
        self.bytes = bytes;
        self.which = which;
        self.grain = grain;
        self.epoch = 1;
        self.words.clear();
        self.words.resize(bytes.div_ceil(4) as usize, u32::MAX);
        if let Some(seed) = garbage {
            for (at, word) in self.words.iter_mut().enumerate() {
                *word = crate::garbage::word(seed, at as u64);
            }
        }
        self.writers.clear();
        self.readers.clear();
        if which.any() {
            let entries = (bytes.next_multiple_of(16) >> grain) as usize;
            self.writers.resize(entries, 0);
            self.readers.resize(entries, 0);
        }
    }

    pub(crate) fn checked(&self) -> bool {
        self.which.any()
    }

    /// Notes that all waves met at a barrier.
    pub(crate) fn barrier(&mut self) {
        self.epoch += 1;
    }

    /// An access that was still under way at the barrier: it happens after it, as far as anyone may rely on.
    pub(crate) fn postpone(&mut self, touch: &Touch, wave: u32) {
        for l in (0..LANES).filter(|l| touch.exec >> l & 1 == 1) {
            let (first, last) = self.entries(touch.addresses[l], touch.bytes);
            for entry in first..=last {
                if touch.write {
                    self.writers[entry] = self.epoch << 8 | (wave + 1);
                } else {
                    self.mark_reader(entry, wave);
                }
            }
        }
    }

    #[inline(always)]
    fn entries(&self, address: u32, bytes: u32) -> (usize, usize) {
        ((address >> self.grain) as usize, ((address + bytes - 1) >> self.grain) as usize)
    }

    #[inline(always)]
    fn mark_reader(&mut self, entry: usize, wave: u32) {
        let mine = self.epoch << 8 | (wave + 1);
        let old = self.readers[entry];
        let other = old >> 8 == self.epoch && old != mine;
        self.readers[entry] = if other { self.epoch << 8 | MANY } else { mine };
    }

    /// The range must lie inside.
    #[inline(always)]
    pub(crate) fn bounds(&self, address: u32, bytes: u32, lane: usize) -> Exec {
        if u64::from(address) + u64::from(bytes) > u64::from(self.bytes) {
            return Err(Stop::lane(
                FaultKind::OutOfBounds,
                lane,
                format!("{bytes} bytes at LDS address {address}, of {} allocated", self.bytes),
            ));
        }
        Ok(())
    }

    /// Whether all active lanes' ranges are inside and at whole dwords.
    #[inline(always)]
    pub(crate) fn all_inside(&self, addresses: &[u32; LANES], bytes: u32, exec: u64) -> bool {
        if bytes > self.bytes {
            return false;
        }
        let last = self.bytes - bytes;
        let mut outside = 0u32;
        for l in 0..LANES {
            let bad = u32::from(addresses[l] > last) | addresses[l] & 3;
            outside |= if exec >> l & 1 == 1 { bad } else { 0 };
        }
        outside == 0
    }

    /// Checks the reads of all active lanes.
    #[inline(always)]
    pub(crate) fn check_reads(&mut self, addresses: &[u32; LANES], bytes: u32, wave: u32, exec: u64) -> Exec {
        let now = self.epoch << 8;
        let (mine, grain) = (now | (wave + 1), self.grain);
        for l in 0..LANES {
            if exec >> l & 1 == 0 {
                continue;
            }
            let first = (addresses[l] >> grain) as usize;
            let last = ((addresses[l] + bytes - 1) >> grain) as usize;
            for entry in first..=last {
                let writer = self.writers[entry];
                // Written at all, and before the last barrier.
                let settled = writer.wrapping_sub(1) < now - 1;
                if !settled && writer != mine {
                    self.check_read(addresses[l], bytes, wave, l)?;
                }
                let reader = self.readers[entry];
                let other = reader >= now && reader != mine;
                self.readers[entry] = if other { now | MANY } else { mine };
            }
        }
        Ok(())
    }

    /// Checks the writes of all active lanes.
    #[inline(always)]
    pub(crate) fn check_writes(
        &mut self,
        addresses: &[u32; LANES],
        bytes: u32,
        wave: u32,
        exec: u64,
    ) -> Exec {
        for l in 0..LANES {
            if exec >> l & 1 == 1 {
                self.check_write(addresses[l], bytes, wave, l)?;
            }
        }
        Ok(())
    }

    /// A write that covers an entry in part: entries become smaller, so that each is written whole.
    #[cold]
    fn refine(&mut self, address: u32, bytes: u32) {
        let grain = (address | bytes).trailing_zeros().min(self.grain);
        let times = 1usize << (self.grain - grain);
        for table in [&mut self.writers, &mut self.readers] {
            *table = table.iter().flat_map(|entry| std::iter::repeat_n(*entry, times)).collect();
        }
        self.grain = grain;
    }

    #[inline(always)]
    pub(crate) fn check_read(&mut self, address: u32, bytes: u32, wave: u32, lane: usize) -> Exec {
        let (first, last) = self.entries(address, bytes);
        let mine = wave + 1;
        for entry in first..=last {
            let writer = self.writers[entry];
            if writer >> 8 == self.epoch && writer & 0xff != mine && self.which.lds_races {
                return Err(self.race(entry, "reads", "written by", writer, lane));
            }
            if writer == 0 && self.which.uninit_lds {
                return Err(Stop::lane(
                    FaultKind::UninitLds,
                    lane,
                    format!("LDS address {address} was never written"),
                ));
            }
            if writer >> 8 == IN_FLIGHT && self.which.waits {
                return Err(Stop::lane(
                    FaultKind::MissingLdsDmaWait,
                    lane,
                    format!(
                        "LDS address {address} is read while a direct load of wave {} fills it",
                        (writer & 0xff).saturating_sub(1)
                    ),
                ));
            }
            self.mark_reader(entry, wave);
        }
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn check_write(&mut self, address: u32, bytes: u32, wave: u32, lane: usize) -> Exec {
        let tag = self.epoch << 8 | (wave + 1);
        self.claim(address, bytes, wave, lane, tag)
    }

    /// Atomics of several waves may meet; an atomic and a plain access may not.
    pub(crate) fn check_atomic(&mut self, address: u32, bytes: u32, wave: u32, lane: usize) -> Exec {
        if (address | bytes) & ((1 << self.grain) - 1) != 0 {
            self.refine(address, bytes);
        }
        let (first, last) = self.entries(address, bytes);
        for entry in first..=last {
            let (writer, reader) = (self.writers[entry], self.readers[entry]);
            if writer == 0 && self.which.uninit_lds {
                return Err(Stop::lane(
                    FaultKind::UninitLds,
                    lane,
                    format!("atomic on LDS address {address}, never written"),
                ));
            }
            let by_atomic = writer & 0xff == ATOMIC;
            if self.which.lds_races && !by_atomic {
                let mine = wave + 1;
                if writer >> 8 == self.epoch && writer & 0xff != mine {
                    return Err(self.race(entry, "updates", "written by", writer, lane));
                }
                if reader >> 8 == self.epoch && reader & 0xff != mine {
                    return Err(self.race(entry, "updates", "read by", reader, lane));
                }
            }
            self.writers[entry] = self.epoch << 8 | ATOMIC;
        }
        Ok(())
    }

    /// Notes a direct load that was issued: no wave may read the bytes until it arrives.
    pub(crate) fn check_dma(&mut self, address: u32, bytes: u32, wave: u32, lane: usize) -> Exec {
        self.claim(address, bytes, wave, lane, IN_FLIGHT << 8 | (wave + 1))
    }

    #[inline(always)]
    fn claim(&mut self, address: u32, bytes: u32, wave: u32, lane: usize, tag: u32) -> Exec {
        if (address | bytes) & ((1 << self.grain) - 1) != 0 {
            self.refine(address, bytes);
        }
        let (first, last) = self.entries(address, bytes);
        let mine = wave + 1;
        for entry in first..=last {
            let (writer, reader) = (self.writers[entry], self.readers[entry]);
            if self.which.lds_races {
                if writer >> 8 == self.epoch && writer & 0xff != mine {
                    return Err(self.race(entry, "writes", "written by", writer, lane));
                }
                if reader >> 8 == self.epoch && reader & 0xff != mine {
                    return Err(self.race(entry, "writes", "read by", reader, lane));
                }
            }
            if writer >> 8 == IN_FLIGHT && self.which.waits {
                return Err(Stop::lane(
                    FaultKind::MissingLdsDmaWait,
                    lane,
                    format!("LDS address {address} is written while a direct load fills it"),
                ));
            }
            self.writers[entry] = tag;
        }
        Ok(())
    }

    #[cold]
    fn race(&self, entry: usize, does: &str, done: &str, other: u32, lane: usize) -> Box<Stop> {
        let who = match other & 0xff {
            MANY => "several waves".to_owned(),
            ATOMIC => "an atomic".to_owned(),
            wave => format!("wave {}", wave - 1),
        };
        let address = entry << self.grain;
        Stop::lane(
            FaultKind::LdsRace,
            lane,
            format!("{does} LDS address {address}, {done} {who} since the last barrier"),
        )
    }

    /// A direct load has arrived.
    pub(crate) fn arrive(&mut self, write: &DmaWrite, wave: u32) {
        for l in (0..LANES).filter(|l| write.exec >> l & 1 == 1) {
            self.store(write.addresses[l], write.bytes, &write.data[l]);
            if self.checked() {
                let (first, last) = self.entries(write.addresses[l], write.bytes);
                for entry in first..=last {
                    self.writers[entry] = self.epoch << 8 | (wave + 1);
                }
            }
        }
    }

    #[inline(always)]
    pub(crate) fn load(&self, address: u32, bytes: u32, out: &mut [u32; 4]) {
        let at = (address / 4) as usize;
        if address.is_multiple_of(4) && bytes.is_multiple_of(4) {
            let words = (bytes / 4) as usize;
            out[..words].copy_from_slice(&self.words[at..at + words]);
            return;
        }
        *out = [0; 4];
        for i in 0..bytes {
            let byte = address + i;
            let value = self.words[(byte / 4) as usize] >> (8 * (byte % 4)) & 0xff;
            out[(i / 4) as usize] |= value << (8 * (i % 4));
        }
    }

    #[inline(always)]
    pub(crate) fn store(&mut self, address: u32, bytes: u32, from: &[u32; 4]) {
        let at = (address / 4) as usize;
        if address.is_multiple_of(4) && bytes.is_multiple_of(4) {
            let words = (bytes / 4) as usize;
            self.words[at..at + words].copy_from_slice(&from[..words]);
            return;
        }
        for i in 0..bytes {
            let byte = address + i;
            let value = from[(i / 4) as usize] >> (8 * (i % 4)) & 0xff;
            let shift = 8 * (byte % 4);
            let word = &mut self.words[(byte / 4) as usize];
            *word = *word & !(0xff << shift) | value << shift;
        }
    }
}
