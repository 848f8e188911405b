//! Loads, stores and address conversion. PTX ISA 9.7.9.

use std::sync::atomic::Ordering::Relaxed;

use super::cluster::Cluster;
use super::warp::{Warp, WideRow, lanes};
use super::{Exec, fault};
use crate::ast::Space;
use crate::fault::FaultKind;
use crate::hb::Touch;
use crate::memory::{
    LOCAL_WINDOW, PARAM_WINDOW, SHARED_BITS, SHARED_WINDOW, WINDOW_BYTES, misaligned, out_of_bounds,
    uninitialised,
};
use crate::op::{Access, Code, Inst, Program};

/// An address with its space known.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    Global(u64),
    Shared { cta: u32, at: u32 },
    Local(u64),
    Param(u64),
}

/// Address at which a lane's access begins.
fn aligned(base: &WideRow, a: Access, lane: usize, what: &str) -> Exec<u64> {
    let (address, bytes) = (base[lane].wrapping_add(a.offset as u64), a.sizes().0 as u64);
    if address & (bytes - 1) != 0 { Err(misaligned(what, address, bytes)) } else { Ok(address) }
}

/// Whether the active lanes have one address.
fn is_uniform(base: &WideRow, active: u32) -> bool {
    let first = base[active.trailing_zeros() as usize & 31];
    if active == u32::MAX { *base == [first; 32] } else { lanes(active).all(|lane| base[lane] == first) }
}

impl Cluster {
    /// Block rank and offset of an address of the cluster's shared memory, generic or not.
    pub(super) fn cluster_target(&self, address: u64) -> Exec<(u32, u32)> {
        let in_window = address.wrapping_sub(SHARED_WINDOW) < WINDOW_BYTES;
        let address = if in_window { address - SHARED_WINDOW } else { address } as u32;
        let (cta, at) = (address >> SHARED_BITS, address & ((1 << SHARED_BITS) - 1));
        if cta as usize >= self.blocks.len() {
            let of = format!("block rank {cta} of a cluster of {}", self.blocks.len());
            return Err(out_of_bounds("shared::cluster access", address.into(), 1, &of));
        }
        Ok((cta, at))
    }

    /// Block rank and offset of a `shared::cta` access, which reaches the warp's own block whether or not the
    /// address has the block's rank.
    pub(super) fn own_target(&self, warp: &Warp, address: u64) -> Exec<(u32, u32)> {
        let (cta, at) = self.cluster_target(address)?;
        if cta != 0 && cta != warp.cta {
            let of = format!("the address names block rank {cta}, the access says shared::cta");
            return Err(out_of_bounds("shared::cta access", address, 1, &of));
        }
        Ok((warp.cta, at))
    }

    pub(super) fn resolve(&self, warp: &Warp, space: Space, address: u64) -> Exec<Target> {
        Ok(match space {
            Space::Shared => {
                let (cta, at) = self.own_target(warp, address)?;
                Target::Shared { cta, at }
            }
            Space::SharedCluster => {
                let (cta, at) = self.cluster_target(address)?;
                Target::Shared { cta, at }
            }
            Space::Local => Target::Local(address),
            Space::Param => Target::Param(address),
            Space::Generic if address.wrapping_sub(SHARED_WINDOW) < WINDOW_BYTES => {
                let (cta, at) = self.cluster_target(address)?;
                Target::Shared { cta, at }
            }
            Space::Generic if address.wrapping_sub(LOCAL_WINDOW) < WINDOW_BYTES => {
                Target::Local(address - LOCAL_WINDOW)
            }
            Space::Generic if address.wrapping_sub(PARAM_WINDOW) < WINDOW_BYTES => {
                Target::Param(address - PARAM_WINDOW)
            }
            Space::Generic | Space::Global | Space::Const => Target::Global(address),
        })
    }

    pub(super) fn load(
        &mut self,
        warp: &mut Warp,
        program: &Program,
        inst: &Inst,
        a: Access,
        active: u32,
    ) -> Exec<()> {
        let base = warp.wide(inst.src[0]);
        let dst = program.list(inst).0;
        let (bytes, step) = a.sizes();
        let mut buffer = [0u8; 64];
        self.count_access(warp, &base, a, active, false);
        let first = active.trailing_zeros() as usize;
        let same = is_uniform(&base, active);
        let mut source = None;
        for lane in lanes(active) {
            // One address for all: the first lane reads for them, unless each has its own memory there.
            let target = match source {
                Some(target) if same => target,
                _ => self.resolve(warp, a.space, aligned(&base, a, lane, "load")?)?,
            };
            source = Some(target);
            if lane == first || !same || matches!(target, Target::Local(_) | Target::Global(_)) {
                self.read(warp, target, &mut buffer[..bytes], lane, a.strong)?;
            }
            for (n, &reg) in dst.iter().enumerate() {
                if !reg.is_some() {
                    continue;
                }
                let mut word = [0u8; 8];
                word[..step].copy_from_slice(&buffer[n * step..(n + 1) * step]);
                let v = u64::from_le_bytes(word);
                let v = match (a.unit, a.signed) {
                    (1, true) => i64::from(v as i8) as u64,
                    (2, true) => i64::from(v as i16) as u64,
                    (4, true) => i64::from(v as i32) as u64,
                    _ => v,
                };
                // 8- and 16-bit values in 16-bit registers keep the row's upper half zero.
                let v = if a.unit <= 2 && !reg.is_double() && a.signed { v & 0xffff_ffff } else { v };
                warp.put(reg, lane, v);
            }
        }
        Ok(())
    }

    pub(super) fn store(
        &mut self,
        warp: &mut Warp,
        program: &Program,
        inst: &Inst,
        a: Access,
        active: u32,
    ) -> Exec<()> {
        let base = warp.wide(inst.src[0]);
        let src = program.list(inst).1;
        let (bytes, step) = a.sizes();
        let mut buffer = [0u8; 64];
        self.events += 1;
        self.count_access(warp, &base, a, active, true);
        for lane in lanes(active) {
            let address = aligned(&base, a, lane, "store")?;
            for (n, &reg) in src.iter().enumerate() {
                let word = warp.get(reg, lane).to_le_bytes();
                buffer[n * step..(n + 1) * step].copy_from_slice(&word[..step]);
            }
            let target = self.resolve(warp, a.space, address)?;
            self.write(warp, target, &buffer[..bytes], lane, a.strong)?;
        }
        Ok(())
    }

    /// Reads bytes for one lane; the caller has checked the alignment.
    pub(super) fn read(
        &mut self,
        warp: &mut Warp,
        target: Target,
        out: &mut [u8],
        lane: usize,
        strong: bool,
    ) -> Exec<()> {
        let n = out.len() as u32;
        match target {
            Target::Shared { cta, at } => {
                let shared = &self.blocks[cta as usize].shared;
                shared.check(at, n, 1, "load from shared memory")?;
                if self.launch.options.check_uninitialised {
                    shared.check_written(at, n, "load from shared memory")?;
                }
                out.copy_from_slice(shared.get(at, n));
                if let Some(t) = &mut self.tracker {
                    t.generic(Touch::Read, warp, [cta, at, n], lane, strong)?;
                }
            }
            Target::Global(address) => {
                warp.is_after_grids(lane, "load from global memory")?;
                let a = self.launch.view.find(
                    address,
                    u64::from(n),
                    &mut self.hint,
                    "load from global memory",
                )?;
                let at = address - a.base;
                if self.launch.options.check_uninitialised
                    && let Some(first) = a.first_unwritten(at, u64::from(n))
                {
                    return Err(uninitialised("load from global memory", a.base + first));
                }
                if n & 3 == 0 {
                    for (i, word) in out.chunks_exact_mut(4).enumerate() {
                        word.copy_from_slice(&a.word(at + 4 * i as u64).load(Relaxed).to_le_bytes());
                    }
                } else {
                    a.read(at, out);
                }
                self.counters.global_read += u64::from(n);
            }
            Target::Local(at) => {
                let size = self.launch.program.local_bytes as usize;
                let (from, n) = (at as usize, n as usize);
                if from + n > size {
                    return Err(out_of_bounds(
                        "load from local memory",
                        at,
                        n as u64,
                        &format!("{size} bytes"),
                    ));
                }
                let range = lane * size + from..lane * size + from + n;
                if self.launch.options.check_uninitialised && warp.local_init[range.clone()].contains(&false)
                {
                    return Err(uninitialised("load from local memory", at));
                }
                out.copy_from_slice(&warp.local[range]);
            }
            Target::Param(at) => {
                let params = &self.launch.params;
                let (from, n) = (at as usize, n as usize);
                let Some(bytes) = params.get(from..from + n) else {
                    let of = format!("the kernel has {} bytes of parameters", params.len());
                    return Err(out_of_bounds("load of a parameter", at, n as u64, &of));
                };
                out.copy_from_slice(bytes);
            }
        }
        Ok(())
    }

    /// Writes bytes for one lane; the caller has checked the alignment.
    pub(super) fn write(
        &mut self,
        warp: &mut Warp,
        target: Target,
        data: &[u8],
        lane: usize,
        strong: bool,
    ) -> Exec<()> {
        let n = data.len() as u32;
        match target {
            Target::Shared { cta, at } => {
                let shared = &mut self.blocks[cta as usize].shared;
                shared.check(at, n, 1, "store to shared memory")?;
                if let Some(t) = &mut self.tracker {
                    t.generic(Touch::Write, warp, [cta, at, n], lane, strong)?;
                }
                shared.get_mut(at, n).copy_from_slice(data);
            }
            Target::Global(address) => {
                warp.is_after_grids(lane, "store to global memory")?;
                let a =
                    self.launch.view.find(address, u64::from(n), &mut self.hint, "store to global memory")?;
                a.write(address - a.base, data);
                self.counters.global_written += u64::from(n);
                self.launch.global_events.fetch_add(1, Relaxed);
            }
            Target::Local(at) => {
                let size = self.launch.program.local_bytes as usize;
                let (from, n) = (at as usize, n as usize);
                if from + n > size {
                    return Err(out_of_bounds(
                        "store to local memory",
                        at,
                        n as u64,
                        &format!("{size} bytes"),
                    ));
                }
                let range = lane * size + from..lane * size + from + n;
                warp.local_init[range.clone()].fill(true);
                warp.local[range].copy_from_slice(data);
            }
            Target::Param(at) => {
                return Err(out_of_bounds(
                    "store to a parameter",
                    at,
                    u64::from(n),
                    "parameters are read-only",
                ));
            }
        }
        Ok(())
    }

    pub(super) fn address_conversion(&mut self, warp: &mut Warp, inst: &Inst, active: u32) -> Exec<()> {
        let a = warp.wide(inst.src[0]);
        let window = |space| match space {
            Space::Shared | Space::SharedCluster => SHARED_WINDOW,
            Space::Local => LOCAL_WINDOW,
            Space::Param => PARAM_WINDOW,
            Space::Global | Space::Const | Space::Generic => 0,
        };
        for lane in lanes(active) {
            let v = match inst.code {
                Code::CvtaTo { space } => a[lane].wrapping_sub(window(space)),
                Code::CvtaFrom { space } => a[lane].wrapping_add(window(space)),
                Code::Mapa { generic, .. } => {
                    let rank = warp.get(inst.src[1], lane);
                    if rank as usize >= self.blocks.len() {
                        let text = format!("mapa to rank {rank} of a cluster of {}", self.blocks.len());
                        return Err(fault(FaultKind::OutOfBounds, text));
                    }
                    let base = if generic { SHARED_WINDOW } else { 0 };
                    let at = (a[lane] - base) & ((1 << SHARED_BITS) - 1);
                    base + (rank << SHARED_BITS) + at
                }
                Code::GetCtaRank => u64::from(self.cluster_target(a[lane])?.0),
                _ => continue,
            };
            warp.put(inst.dst[0], lane, v);
        }
        if let Code::IsSpace { space } = inst.code {
            let base = window(space);
            let in_space = |v: u64| {
                if base != 0 { v.wrapping_sub(base) < WINDOW_BYTES } else { v < SHARED_WINDOW }
            };
            let bits = lanes(active).filter(|&i| in_space(a[i])).fold(0, |m, i| m | 1 << i);
            warp.set_pred(inst.dst[0], bits, active);
        }
        Ok(())
    }

    /// Bank conflicts of a shared access: extra passes over the 32 four-byte banks, a 128-byte wavefront at a time.
    fn count_access(&mut self, warp: &Warp, base: &[u64; 32], a: Access, active: u32, store: bool) {
        let unit = u64::from(a.unit) * u64::from(a.count);
        let shared = match a.space {
            Space::Shared | Space::SharedCluster => true,
            Space::Generic => {
                base[active.trailing_zeros() as usize].wrapping_sub(SHARED_WINDOW) < WINDOW_BYTES
            }
            _ => false,
        };
        if !shared {
            return;
        }
        let _ = (warp, store);
        let (mut all, mut count) = ([0u64; 32], 0);
        for lane in lanes(active) {
            all[count] = base[lane].wrapping_add(a.offset as u64);
            count += 1;
        }
        let (passes, ideal) = bank_waves(&all[..count], unit);
        self.counters.shared_bytes += unit * count as u64;
        self.counters.shared_passes += passes;
        self.counters.bank_conflicts += passes.saturating_sub(ideal);
    }
}

/// Passes over the banks that the accesses of some lanes need, `unit` bytes each from these addresses, and
/// the least possible.
pub(super) fn bank_waves(addresses: &[u64], unit: u64) -> (u64, u64) {
    let lanes_per_wave = (128 / unit.max(4)).clamp(1, 32) as usize;
    let words = unit.div_ceil(4);
    let (mut passes, mut ideal) = (0, 0);
    let mut all = [0u64; 32];
    for (word, at) in all.iter_mut().zip(addresses) {
        *word = at >> 2;
    }
    for wave in all[..addresses.len()].chunks(lanes_per_wave) {
        // One word for all, or neighbours: a single pass.
        let same = words == 1 && wave.iter().all(|at| *at == wave[0]);
        let next = wave.windows(2).all(|w| w[1] == w[0] + words) && wave.len() as u64 * words <= 32;
        passes += if same || next {
            1
        } else {
            bank_passes(wave.iter().flat_map(|&at| (0..words).map(move |w| at + w)))
        };
        ideal += 1;
    }
    (passes, ideal)
}

/// Passes that the banks need for these words: the most distinct words any one bank must give.
pub(super) fn bank_passes(words: impl Iterator<Item = u64>) -> u64 {
    // The words of an access, at most 128, each bank's in a chain from its front.
    let (mut seen, mut chain) = ([0u64; 128], [u8::MAX; 128]);
    let (mut head, mut depth) = ([u8::MAX; 32], [0u8; 32]);
    let mut count = 0;
    for word in words.take(128) {
        let bank = (word & 31) as usize;
        let mut at = head[bank];
        while at != u8::MAX && seen[usize::from(at)] != word {
            at = chain[usize::from(at)];
        }
        if at == u8::MAX {
            (seen[count], chain[count]) = (word, head[bank]);
            head[bank] = count as u8;
            depth[bank] += 1;
            count += 1;
        }
    }
    u64::from(depth.into_iter().max().unwrap_or(0))
}
