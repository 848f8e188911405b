//! Loads, stores, atomics and address conversion. PTX ISA 9.7.9.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;

use super::cluster::Cluster;
use super::warp::{Warp, WideRow, lanes};
use super::{Exec, fault, half};
use crate::ast::{Space, Ty};
use crate::fault::FaultKind;
use crate::fp;
use crate::memory::{
    LOCAL_WINDOW, PARAM_WINDOW, SHARED_BITS, SHARED_WINDOW, WINDOW_BYTES, misaligned, out_of_bounds,
    uninitialised,
};
use crate::op::{Access, Atom, AtomOp, Code, Inst, Program};

/// An address with its space known.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    Global(u64),
    Shared { cta: u32, at: u32 },
    Local(u64),
    Param(u64),
}

/// Where a lane's access begins.
fn aligned(base: &WideRow, a: Access, lane: usize, what: &str) -> Exec<u64> {
    let (address, bytes) = (base[lane].wrapping_add(a.offset as u64), a.sizes().0 as u64);
    if address & (bytes - 1) != 0 { Err(misaligned(what, address, bytes)) } else { Ok(address) }
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

    /// The same of a `shared::cta` access, which reaches the own block, be its rank in the address or not.
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
        for lane in lanes(active) {
            let address = aligned(&base, a, lane, "load")?;
            self.read(warp, self.resolve(warp, a.space, address)?, &mut buffer[..bytes], lane, a.strong)?;
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
                    t.generic_read(warp, cta, at, n, lane, strong)?;
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
                    t.generic_write(warp, cta, at, n, lane, strong)?;
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

    pub(super) fn atomic(
        &mut self,
        warp: &mut Warp,
        program: &Program,
        inst: &Inst,
        a: Atom,
        active: u32,
    ) -> Exec<()> {
        let base = warp.wide(inst.src[0]);
        let (dst, src) = program.list(inst);
        let bytes = a.ty.bytes() as usize;
        self.events += 1;
        for lane in lanes(active) {
            for n in 0..usize::from(a.count) {
                let address = base[lane].wrapping_add(a.offset as u64).wrapping_add((n * bytes) as u64);
                if address & (bytes as u64 - 1) != 0 {
                    return Err(misaligned("atomic", address, bytes as u64));
                }
                let value = warp.get(src[n], lane);
                let swap = if a.op == AtomOp::Cas { warp.get(src[n + 1], lane) } else { 0 };
                let target = self.resolve(warp, a.space, address)?;
                let old = self.read_modify_write(warp, target, a, value, swap, lane)?;
                if let Some(&reg) = dst.get(n) {
                    warp.put(reg, lane, old);
                }
            }
        }
        Ok(())
    }

    fn read_modify_write(
        &mut self,
        warp: &mut Warp,
        target: Target,
        a: Atom,
        value: u64,
        swap: u64,
        lane: usize,
    ) -> Exec<u64> {
        let bytes = a.ty.bytes() as usize;
        if let (Target::Global(address), 4) = (target, bytes) {
            warp.is_after_grids(lane, "atomic on global memory")?;
            let found = self.launch.view.find(address, 4, &mut self.hint, "atomic on global memory")?;
            let at = address - found.base;
            if self.launch.options.check_uninitialised && found.first_unwritten(at, 4).is_some() {
                return Err(uninitialised("atomic on global memory", address));
            }
            let word = found.word(at);
            let mut old = word.load(Relaxed);
            loop {
                let new = combine(a.op, a.ty, u64::from(old), value, swap) as u32;
                match word.compare_exchange(old, new, Relaxed, Relaxed) {
                    Ok(_) => break,
                    Err(now) => old = now,
                }
            }
            self.launch.global_events.fetch_add(1, Relaxed);
            return Ok(u64::from(old));
        }
        let launch = std::sync::Arc::clone(&self.launch);
        let _guard = launch.wide_atomics.lock().unwrap_or_else(PoisonError::into_inner);
        let mut word = [0u8; 8];
        self.read(warp, target, &mut word[..bytes], lane, true)?;
        let old = u64::from_le_bytes(word);
        let new = combine(a.op, a.ty, old, value, swap).to_le_bytes();
        self.write(warp, target, &new[..bytes], lane, true)?;
        Ok(old)
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
        let lanes_per_wave = (128 / unit.max(4)).clamp(1, 32) as usize;
        let words = unit.div_ceil(4);
        let (mut all, mut count) = ([0u64; 32], 0);
        for lane in lanes(active) {
            all[count] = base[lane].wrapping_add(a.offset as u64) >> 2;
            count += 1;
        }
        let (mut passes, mut ideal) = (0, 0);
        for wave in all[..count].chunks(lanes_per_wave) {
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
        self.counters.shared_bytes += unit * count as u64;
        self.counters.shared_passes += passes;
        self.counters.bank_conflicts += passes.saturating_sub(ideal);
    }
}

/// Passes that the banks need for these words: the most distinct words any one bank must give.
pub(super) fn bank_passes(words: impl Iterator<Item = u64>) -> u64 {
    // At most 128 words come, those of one bank from the front of its chain.
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

/// One atomic operation on values of type `ty`.
pub(super) fn combine(op: AtomOp, ty: Ty, old: u64, value: u64, swap: u64) -> u64 {
    let halves = |bf16: bool, pair: bool| {
        let one = |shift: u32| {
            let (x, y) = ((old >> shift) as u16, (value >> shift) as u16);
            let (a, b) = (half::half_to_f32(x, bf16), half::half_to_f32(y, bf16));
            let r = match op {
                AtomOp::Add => a + b,
                AtomOp::Min => a.min(b),
                _ => a.max(b),
            };
            u64::from(half::f32_to_half(r, bf16)) << shift
        };
        if pair { one(0) | one(16) } else { one(0) }
    };
    match (op, ty) {
        (AtomOp::Exch, _) => value,
        (AtomOp::Cas, _) => {
            if old == value {
                swap
            } else {
                old
            }
        }
        (AtomOp::And, _) => old & value,
        (AtomOp::Or, _) => old | value,
        (AtomOp::Xor, _) => old ^ value,
        (AtomOp::Inc, _) => {
            if old >= value {
                0
            } else {
                old + 1
            }
        }
        (AtomOp::Dec, _) => {
            if old == 0 || old > value {
                value
            } else {
                old - 1
            }
        }
        (_, Ty::F16) => halves(false, false),
        (_, Ty::Bf16) => halves(true, false),
        (_, Ty::F16x2) => halves(false, true),
        (_, Ty::Bf16x2) => halves(true, true),
        (_, Ty::F32) => {
            let (a, b) = (f32::from_bits(old as u32), f32::from_bits(value as u32));
            let r = match op {
                AtomOp::Add => a + b,
                AtomOp::Min => a.min(b),
                _ => a.max(b),
            };
            u64::from(if r.is_nan() { fp::NAN.to_bits() } else { r.to_bits() })
        }
        (_, Ty::F64) => (f64::from_bits(old) + f64::from_bits(value)).to_bits(),
        (AtomOp::Add, _) => old.wrapping_add(value),
        (AtomOp::Min, Ty::S32) => u64::from((old as i32).min(value as i32) as u32),
        (AtomOp::Max, Ty::S32) => u64::from((old as i32).max(value as i32) as u32),
        (AtomOp::Min, Ty::S64) => (old as i64).min(value as i64) as u64,
        (AtomOp::Max, Ty::S64) => (old as i64).max(value as i64) as u64,
        (AtomOp::Min, _) => old.min(value),
        (AtomOp::Max, _) => old.max(value),
    }
}
