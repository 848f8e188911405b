//! Instructions that move values between lanes, or between lanes and scalar registers.

use super::lanes::{dpp_select, source};
use crate::error::{Exec, FaultKind, Stop};
use crate::inst::{Inst, Src};
use crate::op::Op;
use crate::wave::{LANES, Lanes, Wave};

/// Executes a cross-lane instruction; `false` when it is none of these.
pub(crate) fn cross(wave: &mut Wave, inst: &Inst, check: bool) -> Exec<bool> {
    match inst.op {
        Op::VReadfirstlaneB32 => {
            // The hardware reads lane 0 where EXEC is zero.
            let exec = wave.exec();
            let lane = if exec == 0 { 0 } else { exec.trailing_zeros() as usize };
            read_lane(wave, inst, lane, check)?;
        }
        Op::VReadlaneB32 => {
            let lane = wave.scalar(inst.src[1]) as usize & 63;
            read_lane(wave, inst, lane, false)?;
            if check {
                wave.checks.after_lane_copy(inst, lane);
            }
        }
        Op::VWritelaneB32 => {
            let value = wave.scalar(inst.src[0]);
            let lane = wave.scalar(inst.src[1]) as usize & 63;
            wave.vreg_mut(inst.vdst).0[lane] = value;
            if check {
                wave.checks.after_lane_copy(inst, lane);
            }
        }
        Op::VSwapB32 => {
            let Src::V(other) = inst.src[0] else { return Ok(false) };
            let (a, b) = (*wave.vreg(inst.vdst), *wave.vreg(other));
            let exec = wave.exec();
            super::lanes::masked(wave.vreg_mut(inst.vdst), &b, exec);
            super::lanes::masked(wave.vreg_mut(other), &a, exec);
        }
        Op::VPermlane16SwapB32 => swap_rows(wave, inst, 16)?,
        Op::VPermlane32SwapB32 => swap_rows(wave, inst, 32)?,
        _ => return Ok(false),
    }
    Ok(true)
}

fn read_lane(wave: &mut Wave, inst: &Inst, lane: usize, check: bool) -> Exec {
    if check && let Src::V(reg) = inst.src[0] {
        wave.checks.read_vreg(reg, 1 << lane)?;
    }
    let mut room = Lanes::ZERO;
    let value = source(wave, inst, 0, &mut room).0[lane];
    wave.s[usize::from(inst.sdst) & 127] = value;
    Ok(())
}

/// Odd rows of the destination change places with even rows of the source; EXEC says which lanes are written.
fn swap_rows(wave: &mut Wave, inst: &Inst, width: usize) -> Exec {
    let Src::V(other) = inst.src[0] else {
        return Err(Stop::new(FaultKind::UnknownInstruction, inst.name));
    };
    let (a, b) = (*wave.vreg(inst.vdst), *wave.vreg(other));
    let exec = wave.exec();
    let (mut new_a, mut new_b) = (a, b);
    for l in 0..LANES {
        if l & width == 0 {
            new_b.0[l] = a.0[l | width];
        } else {
            new_a.0[l] = b.0[l & !width];
        }
    }
    super::lanes::masked(wave.vreg_mut(inst.vdst), &new_a, exec);
    super::lanes::masked(wave.vreg_mut(other), &new_b, exec);
    Ok(())
}

/// `ds_bpermute_b32`: each lane pulls from the lane its address names; inactive lanes read as zero.
pub(crate) fn bpermute(addresses: &Lanes, offset: i32, data: &Lanes, exec: u64, lanes: u64) -> Lanes {
    let last = lanes.count_ones() as usize - 1;
    Lanes(std::array::from_fn(|l| {
        let from = (addresses.0[l].wrapping_add_signed(offset) / 4) as usize & last;
        if exec >> from & 1 == 1 { data.0[from] } else { 0 }
    }))
}

/// `ds_permute_b32`: each active lane pushes to the lane its address names; the highest lane wins.
pub(crate) fn permute(addresses: &Lanes, offset: i32, data: &Lanes, exec: u64) -> Lanes {
    let mut out = Lanes::ZERO;
    for l in (0..LANES).filter(|l| exec >> l & 1 == 1) {
        let to = (addresses.0[l].wrapping_add_signed(offset) / 4) as usize & 63;
        out.0[to] = data.0[l];
    }
    out
}

/// `ds_swizzle_b32`: quads by table, or groups of 32 by and, or, xor masks.
pub(crate) fn swizzle(offset: i32, data: &Lanes, exec: u64) -> Lanes {
    let offset = offset as u32;
    Lanes(std::array::from_fn(|l| {
        let from = if offset & 0x8000 != 0 {
            (l & !3) | (offset >> (2 * (l & 3)) & 3) as usize
        } else {
            let (and, or, xor) = (offset & 31, offset >> 5 & 31, offset >> 10 & 31);
            (l & 32) | (((l as u32 & 31 & and) | or) ^ xor) as usize
        };
        if exec >> from & 1 == 1 { data.0[from] } else { 0 }
    }))
}

/// The lanes a DPP instruction reads, for the uninitialised-register check.
pub(crate) fn dpp_read_mask(inst: &Inst, exec: u64) -> Option<u64> {
    let dpp = inst.dpp?;
    let lanes = Lanes(std::array::from_fn(|l| l as u32));
    let (from, written) = dpp_select(&lanes, &dpp, exec);
    let mut mask = 0;
    for l in 0..LANES {
        if written >> l & 1 == 1 && exec >> l & 1 == 1 {
            mask |= 1u64 << from.0[l];
        }
    }
    Some(mask & exec)
}
