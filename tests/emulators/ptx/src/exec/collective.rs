//! Warp collectives: shuffles, votes, matches, reductions. PTX ISA 9.7.9.6 and 9.7.13.

use super::atomic::combine;
use super::cluster::{Cluster, Step};
use super::warp::{Row, Wait, Warp, lanes};
use super::{Exec, fault};
use crate::ast::Ty;
use crate::fault::FaultKind;
use crate::op::{AtomOp, Code, Inst, Shfl, Vote};

impl Cluster {
    pub(super) fn collective(&mut self, warp: &mut Warp, g: usize, inst: &Inst, active: u32) -> Exec<Step> {
        let first = active.trailing_zeros() as usize;
        let member = match inst.code {
            Code::Shfl(_) => Some(inst.src[3]),
            Code::Vote(_) | Code::MatchAny | Code::MatchAll | Code::Redux { .. } => Some(inst.src[1]),
            Code::Elect | Code::WarpSync => Some(inst.src[0]),
            _ => None,
        };
        let mut members = active;
        if let Some(reg) = member {
            let masks = &warp.w[reg.row()];
            members = masks[first];
            if let Some(lane) = lanes(active).find(|&i| masks[i] != members) {
                let text = format!(
                    "lane {first} gives the member mask {members:#x}, lane {lane} {:#x}",
                    masks[lane]
                );
                return Err(fault(FaultKind::DivergentCollective, text));
            }
            if active & !members != 0 {
                let text = format!("lanes {active:#x} execute with the member mask {members:#x}");
                return Err(fault(FaultKind::DivergentCollective, text));
            }
            members &= warp.live;
            // Members that are elsewhere must arrive first.
            if members & !warp.groups[g].mask != 0 {
                return Ok(Step::Block(Wait::Lanes(members)));
            }
            if members & !active != 0 {
                let text = format!("lanes {:#x} are members but predicated off", members & !active);
                return Err(fault(FaultKind::DivergentCollective, text));
            }
        }
        match inst.code {
            Code::Shfl(mode) => shuffle(warp, inst, mode, active),
            Code::Vote(vote) => {
                let p = warp.pred(inst.src[0], inst.src_not) & members;
                match vote {
                    Vote::Ballot => warp.set(inst.dst[0], &[p; 32], active),
                    Vote::All => warp.set_pred(inst.dst[0], all_bits(p == members), active),
                    Vote::Any => warp.set_pred(inst.dst[0], all_bits(p != 0), active),
                    Vote::Uni => warp.set_pred(inst.dst[0], all_bits(p == members || p == 0), active),
                }
            }
            Code::MatchAny => {
                let a = warp.wide(inst.src[0]);
                let r: Row = std::array::from_fn(|i| {
                    lanes(members).filter(|&j| a[j] == a[i]).fold(0, |m, j| m | 1 << j)
                });
                warp.set(inst.dst[0], &r, active);
            }
            Code::MatchAll => {
                let a = warp.wide(inst.src[0]);
                let same = lanes(members).all(|i| a[i] == a[first]);
                warp.set(inst.dst[0], &[if same { members } else { 0 }; 32], active);
                if inst.dst[1].is_some() {
                    warp.set_pred(inst.dst[1], all_bits(same), active);
                }
            }
            Code::Elect => {
                // The elected lane is the implementation's choice; the lowest, as on the hardware.
                let leader = members.trailing_zeros();
                warp.set(inst.dst[0], &[leader; 32], active);
                if inst.dst[1].is_some() {
                    warp.set_pred(inst.dst[1], 1 << leader, active);
                }
            }
            Code::Redux { op, ty, abs, nan } => {
                let a = warp.w[inst.src[0].row()];
                let value = |i: usize| if abs { a[i] & 0x7fff_ffff } else { a[i] };
                let mut r = u64::from(value(first));
                for i in lanes(members).skip(1) {
                    r = redux(op, ty, nan, r, u64::from(value(i)));
                }
                warp.set(inst.dst[0], &[r as u32; 32], active);
            }
            Code::ActiveMask => warp.set(inst.dst[0], &[warp.groups[g].mask; 32], active),
            _ => {}
        }
        Ok(Step::Next)
    }
}

fn all_bits(b: bool) -> u32 {
    if b { u32::MAX } else { 0 }
}

fn redux(op: AtomOp, ty: Ty, nan: bool, a: u64, b: u64) -> u64 {
    if ty == Ty::F32 {
        let (x, y) = (f32::from_bits(a as u32), f32::from_bits(b as u32));
        if nan && (x.is_nan() || y.is_nan()) {
            return 0x7fff_ffff;
        }
    }
    combine(op, ty, a, b, 0) & 0xffff_ffff
}

fn shuffle(warp: &mut Warp, inst: &Inst, mode: Shfl, active: u32) {
    let (a, b, c) = (warp.w[inst.src[0].row()], warp.w[inst.src[1].row()], warp.w[inst.src[2].row()]);
    if mode == Shfl::Bfly && b == [b[0]; 32] && b[0] < 32 && c == [31; 32] {
        // The common case: exchanges in the whole warp, each with a lane that exists.
        let r: Row = std::array::from_fn(|i| a[(i ^ b[0] as usize) & 31]);
        warp.set(inst.dst[0], &r, active);
        if inst.dst[1].is_some() {
            warp.set_pred(inst.dst[1], u32::MAX, active);
        }
        return;
    }
    let mut inside = 0u32;
    let r: Row = std::array::from_fn(|i| {
        let lane = i as i64;
        let (bval, cval) = (i64::from(b[i] & 31), i64::from(c[i] & 31));
        let segment = i64::from(c[i] >> 8 & 31);
        let max = (lane & segment) | (cval & !segment);
        let min = lane & segment;
        let (j, ok) = match mode {
            Shfl::Up => (lane - bval, lane - bval >= max),
            Shfl::Down => (lane + bval, lane + bval <= max),
            Shfl::Bfly => (lane ^ bval, (lane ^ bval) <= max),
            Shfl::Idx => {
                let j = min | (bval & !segment);
                (j, j <= max)
            }
        };
        inside |= u32::from(ok) << i;
        a[if ok { (j & 31) as usize } else { i }]
    });
    warp.set(inst.dst[0], &r, active);
    if inst.dst[1].is_some() {
        warp.set_pred(inst.dst[1], inside, active);
    }
}
