//! Accesses to another block's shared memory, which that block must outlive.

use super::cells::Access;
use super::{Exec, Tracker, join};
use crate::exec::Warp;
use crate::fault::{Fault, FaultKind};

impl Tracker {
    /// A warp accesses the memory that the cells of `cta` stand for: another block must outlive that. A warp reaches
    /// tensor memory, whose cells lie behind those of all blocks' shared memory, of its own block only.
    pub(super) fn visit(&mut self, warp: &Warp, cta: u32, lane: usize) {
        if cta == warp.cta || cta >= self.blocks {
            return;
        }
        let id = self.id(warp);
        let epoch = self.clocks[id as usize].v[id as usize];
        let visits = &mut self.visits[cta as usize];
        visits.retain(|visit| visit.track() != id);
        visits.push(Access::new(id, epoch, warp.current_pc, lane, 15));
    }

    /// Checks, when all warps of block `cta` have exited, that all accesses of others to its shared memory
    /// came before.
    ///
    /// PTX ISA, `mapa` and `barrier.cluster`: distributed shared memory is there while its block runs.
    pub(crate) fn block_ends(&self, cta: u32) -> Exec<()> {
        let warps = cta * self.per_block..(cta + 1) * self.per_block;
        let mut end = Vec::new();
        warps.for_each(|id| join(&mut end, &self.clocks[id as usize].v));
        let Some(&visit) = self.visits[cta as usize].iter().find(|&&visit| !self.ordered(visit, &end)) else {
            return Ok(());
        };
        let text = format!(
            "the end of block rank {cta} races with an access to its shared memory by {}",
            self.describe(visit)
        );
        Err(Box::new(Fault::new(FaultKind::Race, text)))
    }
}
