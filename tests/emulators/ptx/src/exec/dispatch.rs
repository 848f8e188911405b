//! Which part of the machine an instruction goes to.

use super::cluster::{Cluster, Step};
use super::warp::{Warp, lanes};
use super::{Exec, fault};
use crate::fault::FaultKind;
use crate::op::{Code, Inst, Program};

impl Cluster {
    /// Carries out one instruction that [`alu`](super::alu) does not know, for the active lanes of group `g`.
    pub(super) fn execute(
        &mut self,
        warp: &mut Warp,
        g: usize,
        program: &Program,
        inst: &Inst,
        active: u32,
    ) -> Exec<Step> {
        match inst.code {
            Code::Bra { target } => return Ok(Step::Jump(target)),
            Code::Brx { table } => {
                let index = warp.w[inst.src[0].row()];
                let targets = &program.tables[table as usize];
                let first = index[active.trailing_zeros() as usize];
                let same = lanes(active).filter(|&i| index[i] == first).fold(0, |m, i| m | 1 << i);
                let Some(&target) = targets.get(first as usize) else {
                    let text = format!("brx.idx {first} of {} targets", targets.len());
                    return Err(fault(FaultKind::OutOfBounds, text));
                };
                // Lanes with another index come back to this instruction on their own.
                if same != warp.groups[g].mask {
                    return Ok(self.peel(warp, g, target, same));
                }
                return Ok(Step::Jump(target));
            }
            Code::Exit => return Ok(Step::Exit(active)),
            Code::Trap => return Err(fault(FaultKind::Trap, "trap")),
            Code::Clock => {
                for i in lanes(active) {
                    warp.put(inst.dst[0], i, warp.executed);
                }
            }
            Code::Unpack { unit } => {
                let source = warp.wide(inst.src[0]);
                let bits = u32::from(unit) * 8;
                for (n, &reg) in program.list(inst).0.iter().enumerate() {
                    for i in lanes(active) {
                        let part = source[i] >> (bits * n as u32) & (u64::MAX >> (64 - bits));
                        warp.put(reg, i, part);
                    }
                }
            }
            Code::Pack { unit } => {
                let bits = u32::from(unit) * 8;
                for i in lanes(active) {
                    let parts = program.list(inst).1.iter().enumerate();
                    let v = parts.fold(0, |v, (n, &reg)| {
                        v | (warp.get(reg, i) & (u64::MAX >> (64 - bits))) << (bits * n as u32)
                    });
                    warp.put(inst.dst[0], i, v);
                }
            }
            Code::Ld(access) => self.load(warp, program, inst, access, active)?,
            Code::St(access) => self.store(warp, program, inst, access, active)?,
            Code::Atom(atom) => self.atomic(warp, program, inst, atom, active)?,
            Code::CvtaTo { .. }
            | Code::CvtaFrom { .. }
            | Code::IsSpace { .. }
            | Code::Mapa { .. }
            | Code::GetCtaRank => self.address_conversion(warp, inst, active)?,
            Code::Shfl(_)
            | Code::Vote(_)
            | Code::MatchAny
            | Code::MatchAll
            | Code::Elect
            | Code::Redux { .. }
            | Code::ActiveMask
            | Code::WarpSync => return self.collective(warp, g, inst, active),
            Code::Bar { .. } => return self.named_barrier(warp, g, inst, active),
            Code::ClusterArrive { .. } | Code::ClusterWait => {
                return self.cluster_barrier(warp, g, inst, active);
            }
            Code::SetMaxNReg { increase } => return self.set_max_registers(warp, g, inst, increase),
            Code::Mbar(mbar) => return self.mbarrier(warp, inst, mbar, active),
            Code::CpAsync { .. } | Code::CpAsyncCommit | Code::CpAsyncWait { .. } => {
                self.copy_async(warp, inst, active)?;
            }
            Code::Bulk(bulk) => self.bulk(warp, program, inst, bulk, active)?,
            Code::BulkCommit | Code::BulkWait { .. } => return self.bulk_group(warp, inst),
            Code::Nop | Code::FenceMemory | Code::FenceTensorMap | Code::GridDepLaunch => {}
            Code::GridDepWait => warp.after_grids |= active,
            Code::FenceProxyAsync => {
                if let Some(t) = &mut self.tracker {
                    t.proxy_fence(warp);
                }
            }
            Code::FenceMbarrierInit => {
                if let Some(t) = &mut self.tracker {
                    t.init_fence(warp);
                }
            }
            Code::TensorMapReplace { .. } => self.tensormap_replace(warp, inst, active)?,
            Code::LdMatrix { .. } | Code::StMatrix { .. } | Code::MovMatrix | Code::Mma(_) => {
                return self.warp_matrix(warp, g, program, inst, active);
            }
            Code::WgmmaFence | Code::WgmmaCommit | Code::WgmmaWait | Code::Wgmma(_) => {
                return self.wgmma(warp, g, program, inst, active);
            }
            Code::Tcgen { op, pair } => return self.tcgen05(warp, g, program, inst, op, pair, active),
            _ => return Err(fault(FaultKind::Unsupported, format!("{:?} reached the machine", inst.code))),
        }
        Ok(Step::Next)
    }
}
