//! Atomics: read, combine, write, with nothing between. PTX ISA 9.7.13.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;

use super::cluster::Cluster;
use super::ldst::Target;
use super::warp::{Warp, lanes};
use super::{Exec, half};
use crate::ast::Ty;
use crate::fp;
use crate::memory::{misaligned, uninitialised};
use crate::op::{Atom, AtomOp, Inst, Program};

impl Cluster {
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
