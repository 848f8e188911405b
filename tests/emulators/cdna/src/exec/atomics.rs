//! Read-modify-write operations, on LDS and on memory.

use std::sync::atomic::Ordering::SeqCst;

use crate::inst::AtomicOp;
use crate::memory::Allocation;
use crate::num::{bf16, f16};

/// The new value of a location that holds `old`.
pub(super) fn apply(op: AtomicOp, wide: bool, old: u64, data: u64, compare: u64) -> u64 {
    if wide {
        apply64(op, old, data, compare)
    } else {
        u64::from(apply32(op, old as u32, data as u32, compare as u32))
    }
}

fn apply32(op: AtomicOp, old: u32, data: u32, compare: u32) -> u32 {
    let float = |f: fn(f32, f32) -> f32| f(f32::from_bits(old), f32::from_bits(data)).to_bits();
    match op {
        AtomicOp::Add => old.wrapping_add(data),
        AtomicOp::Sub => old.wrapping_sub(data),
        AtomicOp::Rsub => data.wrapping_sub(old),
        AtomicOp::Inc => {
            if old >= data {
                0
            } else {
                old + 1
            }
        }
        AtomicOp::Dec => {
            if old == 0 || old > data {
                data
            } else {
                old - 1
            }
        }
        AtomicOp::Smin => (old as i32).min(data as i32) as u32,
        AtomicOp::Smax => (old as i32).max(data as i32) as u32,
        AtomicOp::Umin => old.min(data),
        AtomicOp::Umax => old.max(data),
        AtomicOp::And => old & data,
        AtomicOp::Or => old | data,
        AtomicOp::Xor => old ^ data,
        AtomicOp::Swap => data,
        AtomicOp::CmpSwap => {
            if old == compare {
                data
            } else {
                old
            }
        }
        AtomicOp::AddF => float(|a, b| a + b),
        AtomicOp::MinF => float(f32::min),
        AtomicOp::MaxF => float(f32::max),
        AtomicOp::PkAddF16 => {
            let add =
                |s: u32| f16::from_f32(f16::to_f32((old >> s) as u16) + f16::to_f32((data >> s) as u16));
            u32::from(add(0)) | u32::from(add(16)) << 16
        }
        AtomicOp::PkAddBf16 => {
            let add =
                |s: u32| bf16::from_f32(bf16::to_f32((old >> s) as u16) + bf16::to_f32((data >> s) as u16));
            u32::from(add(0)) | u32::from(add(16)) << 16
        }
    }
}

fn apply64(op: AtomicOp, old: u64, data: u64, compare: u64) -> u64 {
    let float = |f: fn(f64, f64) -> f64| f(f64::from_bits(old), f64::from_bits(data)).to_bits();
    match op {
        AtomicOp::Add => old.wrapping_add(data),
        AtomicOp::Sub => old.wrapping_sub(data),
        AtomicOp::Rsub => data.wrapping_sub(old),
        AtomicOp::Inc => {
            if old >= data {
                0
            } else {
                old + 1
            }
        }
        AtomicOp::Dec => {
            if old == 0 || old > data {
                data
            } else {
                old - 1
            }
        }
        AtomicOp::Smin => (old as i64).min(data as i64) as u64,
        AtomicOp::Smax => (old as i64).max(data as i64) as u64,
        AtomicOp::Umin => old.min(data),
        AtomicOp::Umax => old.max(data),
        AtomicOp::And => old & data,
        AtomicOp::Or => old | data,
        AtomicOp::Xor => old ^ data,
        AtomicOp::CmpSwap => {
            if old == compare {
                data
            } else {
                old
            }
        }
        AtomicOp::AddF => float(|a, b| a + b),
        AtomicOp::MinF => float(f64::min),
        AtomicOp::MaxF => float(f64::max),
        AtomicOp::Swap | AtomicOp::PkAddF16 | AtomicOp::PkAddBf16 => data,
    }
}

/// One atomic update of device memory; gives the old value, or `None` where the address is not aligned.
pub(super) fn update(
    allocation: &Allocation,
    at: usize,
    wide: bool,
    op: AtomicOp,
    data: u64,
    compare: u64,
) -> Option<u64> {
    if wide {
        let cell = allocation.atomic64(at)?;
        cell.fetch_update(SeqCst, SeqCst, |old| Some(apply64(op, old, data, compare))).ok()
    } else {
        let cell = allocation.atomic(at)?;
        let (data, compare) = (data as u32, compare as u32);
        cell.fetch_update(SeqCst, SeqCst, |old| Some(apply32(op, old, data, compare))).ok().map(u64::from)
    }
}
