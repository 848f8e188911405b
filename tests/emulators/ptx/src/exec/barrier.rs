//! Named barriers, the cluster barrier, and the register budget. PTX ISA 9.7.13.1 to 9.7.13.4, 9.7.19.5.

use super::cluster::{Cluster, Step};
use super::warp::{Wait, Warp};
use super::{Exec, fault};
use crate::fault::FaultKind;
use crate::hb::Clocks;
use crate::op::{Code, Inst, Vote};

/// One of the sixteen barriers of a block.
#[derive(Debug, Default)]
pub(crate) struct NamedBarrier {
    arrived: u32,
    /// The warps among them that went on without waiting, as bits.
    passed: u32,
    /// Threads that the arrivals so far have named; 0 before the first and for "all of the block".
    expected: u32,
    generation: u64,
    /// Reduction of the generation in progress, and of the last one: any, all, count.
    votes: [u32; 2],
    result: [u32; 2],
    gathered: Clocks,
    published: Clocks,
}

/// The barrier of all warps of a cluster.
#[derive(Debug, Default)]
pub(crate) struct ClusterBarrier {
    arrived: u32,
    generation: u64,
    gathered: Clocks,
    published: Clocks,
}

impl Cluster {
    fn live_threads(&self, running: &Warp) -> u32 {
        let others = self.warps.iter().filter(|w| !w.is_done() && w.cta == running.cta).count() as u32;
        // Threads of the other live warps and of the running one, which is taken out of its slot.
        32 * (others + 1)
    }

    pub(super) fn named_barrier(
        &mut self,
        warp: &mut Warp,
        g: usize,
        inst: &Inst,
        active: u32,
    ) -> Exec<Step> {
        let Code::Bar { arrive, red, popc } = inst.code else { return Ok(Step::Next) };
        // Aligned or not, a barrier waits for all non-exited lanes of the warp and counts the whole warp.
        if let Err(step) = self.converged(warp, g) {
            return Ok(step);
        }
        let first = active.trailing_zeros() as usize;
        let id = warp.w[inst.src[0].row()][first];
        if id > 15 {
            return Err(fault(FaultKind::Barrier, format!("barrier {id} of 16")));
        }
        let count = if inst.src[1].is_some() { warp.w[inst.src[1].row()][first] } else { 0 };
        if count % 32 != 0 {
            return Err(fault(
                FaultKind::Barrier,
                format!("barrier {id} with {count} threads, no multiple of 32"),
            ));
        }
        let all = self.live_threads(warp);
        let block = warp.cta as usize;
        if let Some(generation) = warp.groups[g].token {
            // Warps that exited since do not count for a barrier of all threads.
            if self.blocks[block].barriers[id as usize].expected == 0 {
                self.complete_barrier(block, id, all);
            }
            let bar = &self.blocks[block].barriers[id as usize];
            if bar.generation == generation {
                return Ok(Step::Block(Wait::Barrier(id)));
            }
            warp.groups[g].token = None;
            let result = bar.result;
            if let Some(t) = &mut self.tracker {
                t.acquire(warp, &bar.published);
            }
            self.counters.barrier_waits += 1;
            if let Some(vote) = red {
                let threads = if count == 0 { all } else { count };
                if popc {
                    warp.set(inst.dst[0], &[result[0]; 32], active);
                } else {
                    let holds = if vote == Vote::All { result[0] == threads } else { result[0] > 0 };
                    warp.set_pred(inst.dst[0], if holds { u32::MAX } else { 0 }, active);
                }
            }
            return Ok(Step::Next);
        }
        let threads = 32;
        let votes = (warp.pred(inst.src[2], inst.src_not) & active).count_ones();
        let mut gathered = std::mem::take(&mut self.blocks[block].barriers[id as usize].gathered);
        if let Some(t) = &mut self.tracker {
            t.release(warp, &mut gathered);
        }
        let bar = &mut self.blocks[block].barriers[id as usize];
        bar.gathered = gathered;
        if bar.arrived > 0 && bar.expected != count {
            let text = format!(
                "barrier {id}: {count} threads here, {} at earlier arrivals (0 is all)",
                bar.expected
            );
            return Err(fault(FaultKind::Barrier, text));
        }
        // A warp that announces itself and then waits too counts twice: published programs rely on it.
        if arrive && bar.passed >> (warp.index % 32) & 1 != 0 {
            let text = format!(
                "barrier {id}: warp {} arrives twice in one phase: an arrival that nobody waits for",
                warp.index
            );
            return Err(fault(FaultKind::Barrier, text));
        }
        bar.passed |= u32::from(arrive) << (warp.index % 32);
        bar.expected = count;
        bar.arrived += threads;
        bar.votes[0] += votes;
        let generation = bar.generation;
        let expected = if count == 0 { all } else { count };
        if bar.arrived > expected {
            let text = format!("barrier {id}: {} threads arrived, {expected} expected", bar.arrived);
            return Err(fault(FaultKind::Barrier, text));
        }
        self.events += 1;
        self.complete_barrier(block, id, expected);
        if arrive {
            return Ok(Step::Next);
        }
        warp.groups[g].token = Some(generation);
        if self.blocks[block].barriers[id as usize].generation != generation {
            return self.named_barrier(warp, g, inst, active);
        }
        Ok(Step::Block(Wait::Barrier(id)))
    }

    fn complete_barrier(&mut self, block: usize, id: u32, expected: u32) {
        let bar = &mut self.blocks[block].barriers[id as usize];
        if bar.arrived >= expected {
            bar.generation += 1;
            bar.arrived = 0;
            bar.passed = 0;
            bar.expected = 0;
            bar.result = std::mem::take(&mut bar.votes);
            bar.published = std::mem::take(&mut bar.gathered);
            self.events += 1;
        }
    }

    pub(super) fn cluster_barrier(
        &mut self,
        warp: &mut Warp,
        g: usize,
        inst: &Inst,
        active: u32,
    ) -> Exec<Step> {
        if let Code::ClusterArrive { relaxed } = inst.code {
            if let Some(t) = &mut self.tracker
                && !relaxed
            {
                t.release(warp, &mut self.barrier.gathered);
            }
            self.barrier.arrived += active.count_ones();
            warp.asynchrony.cluster_generation = Some(self.barrier.generation);
            self.events += 1;
            self.complete_cluster_barrier(warp);
            return Ok(Step::Next);
        }
        let Some(generation) = warp.asynchrony.cluster_generation else {
            return Err(fault(FaultKind::Barrier, "barrier.cluster.wait without an arrive"));
        };
        if self.barrier.generation == generation {
            self.complete_cluster_barrier(warp);
        }
        if self.barrier.generation == generation {
            return Ok(Step::Block(Wait::Cluster));
        }
        if let Some(t) = &mut self.tracker {
            t.acquire(warp, &self.barrier.published);
        }
        let _ = g;
        Ok(Step::Next)
    }

    /// Exited threads count as arrived.
    fn complete_cluster_barrier(&mut self, running: &Warp) {
        let alive: u32 =
            self.warps.iter().map(|w| w.live.count_ones()).sum::<u32>() + running.live.count_ones();
        if self.barrier.arrived >= alive {
            self.barrier.arrived = 0;
            self.barrier.generation += 1;
            self.barrier.published = std::mem::take(&mut self.barrier.gathered);
            self.events += 1;
        }
    }

    pub(super) fn set_max_registers(
        &mut self,
        warp: &mut Warp,
        g: usize,
        inst: &Inst,
        increase: bool,
    ) -> Exec<Step> {
        if let Err(step) = self.converged(warp, g) {
            return Ok(step);
        }
        let want = warp.w[inst.src[0].row()][0];
        if !(24..=256).contains(&want) || !want.is_multiple_of(8) {
            let text = format!("setmaxnreg {want}: not a multiple of 8 from 24 to 256");
            return Err(fault(FaultKind::RegisterBudget, text));
        }
        let have = warp.max_registers;
        if increase != (want > have) && want != have {
            let text = format!("setmaxnreg.{} {want} with {have} held", if increase { "inc" } else { "dec" });
            return Err(fault(FaultKind::RegisterBudget, text));
        }
        let need = (i64::from(want) - i64::from(have)) * 32;
        let block = &mut self.blocks[warp.cta as usize];
        if need > block.free_registers {
            // Blocks until other warps release theirs, as on the hardware.
            return Ok(Step::Block(Wait::Registers(want)));
        }
        block.free_registers -= need;
        warp.max_registers = want;
        self.events += 1;
        Ok(Step::Next)
    }
}
