//! End of a cluster: what must be in order then, and where its warps stand when nothing goes on.

use super::cluster::Cluster;
use super::warp::Wait;
use super::{Exec, fault};
use crate::fault::{Fault, FaultKind, Place};

impl Cluster {
    pub(super) fn finish(&mut self) -> Exec<()> {
        for rank in 0..self.blocks.len() {
            self.check_block_exit(rank)?;
            if let Some(tracker) = &self.tracker {
                tracker.block_ends(rank as u32)?;
            }
        }
        Ok(())
    }

    pub(super) fn check_block_exit(&mut self, rank: usize) -> Exec<()> {
        let block = &self.blocks[rank];
        let place = Some(Place { block: block.index, warp: 0, lanes: 0 });
        let at_exit = |kind, text: String| {
            let mut f = fault(kind, text);
            f.place = place;
            Err(f)
        };
        if let Some(columns) = block.tmem.leaked() {
            return at_exit(
                FaultKind::TensorMemory,
                format!("{columns} tensor memory columns allocated at exit"),
            );
        }
        for (id, group) in block.warpgroups.iter().enumerate() {
            if let Some(text) = group.unfinished() {
                return at_exit(FaultKind::DivergentCollective, format!("warpgroup {id} at exit: {text}"));
            }
        }
        if self.launch.options.check_barriers_at_exit {
            let mut bars: Vec<_> = block.mbarriers.iter().collect();
            bars.sort_by_key(|(at, _)| **at);
            for (at, bar) in bars {
                if bar.tx != 0 {
                    let text = format!("mbarrier at {at:#x} ends with a transaction count of {}", bar.tx);
                    return at_exit(FaultKind::Barrier, text);
                }
                if bar.is_unseen_copy {
                    let text = format!(
                        "mbarrier at {at:#x} announces bytes that no thread has waited for: they may still be under way \
                         when this CTA's shared memory is another's"
                    );
                    return at_exit(FaultKind::Barrier, text);
                }
            }
        }
        Ok(())
    }

    pub(super) fn places(&self) -> String {
        let mut out = String::new();
        for warp in self.warps.iter().filter(|w| !w.is_done()) {
            let block = self.blocks[warp.cta as usize].index;
            for g in &warp.groups {
                let (line, source) = self.launch.program.lines[g.pc as usize];
                let wait = g.waits.map_or_else(|| "running".to_string(), |w| format!("waits for {w:?}"));
                out.push_str(&format!(
                    "\n  block {block:?} warp {} lanes {:#010x} at PTX line {line} (source line {source}): {wait}",
                    warp.index, g.mask
                ));
            }
        }
        out
    }

    pub(super) fn deadlock(&self) -> Box<Fault> {
        let lanes_missing =
            self.warps.iter().flat_map(|w| w.groups.iter().map(move |g| (w, g))).find(|(w, g)| {
                matches!(g.waits, Some(Wait::Lanes(_))) && w.groups.iter().all(|g| g.waits.is_some())
            });
        let kind = if lanes_missing.is_some() { FaultKind::DivergentCollective } else { FaultKind::Deadlock };
        let first = lanes_missing.or_else(|| {
            let mut waiting = self.warps.iter().flat_map(|w| w.groups.iter().map(move |g| (w, g)));
            waiting.find(|(_, g)| g.waits.is_some())
        });
        let mut f = fault(kind, format!("no warp can go on:{}", self.places()));
        if let Some((w, g)) = first {
            f = self.placed(f, w, g.pc, g.mask);
        }
        f
    }
}
