//! mbarrier objects. PTX ISA 9.7.13.15.
//!
//! The opaque 64 bits live beside shared memory, not in it; a state token is the number of its phase.

use super::cluster::{Cluster, Step};
use super::warp::{Wait, Warp, lanes};
use super::{Exec, fault};
use crate::ast::Space;
use crate::fault::{Fault, FaultKind};
use crate::hb::Clocks;
use crate::memory::misaligned;
use crate::op::{Inst, Mbar, MbarOp};

/// One mbarrier.
#[derive(Debug, Default)]
pub(crate) struct Mbarrier {
    /// Arrivals that the next phase expects.
    pub(crate) expected: u32,
    /// Arrivals that this phase still lacks.
    pub(crate) pending: u32,
    /// Bytes that this phase still lacks.
    pub(crate) tx: i64,
    /// Phases completed.
    pub(crate) phase: u64,
    /// Whether copies have announced bytes in this phase.
    copied: bool,
    /// Whether copies had announced bytes in the last completed phase, which no thread has seen yet.
    pub(crate) is_unseen_copy: bool,
    /// Track of happens-before for the operations that complete on this barrier.
    pub(crate) track: u32,
    gathered: Clocks,
    /// Clocks that the last completed phase published.
    published: Clocks,
}

/// The largest arrival count and the largest transaction count.
const MAX_COUNT: u32 = (1 << 20) - 1;

impl Mbarrier {
    /// Completes the phase if nothing is missing.
    fn settle(&mut self) -> bool {
        if self.pending == 0 && self.tx == 0 && self.expected > 0 {
            self.phase += 1;
            self.pending = self.expected;
            self.published = std::mem::take(&mut self.gathered);
            self.is_unseen_copy = std::mem::take(&mut self.copied);
            return true;
        }
        false
    }
}

fn misuse(at: u32, text: &str) -> Box<Fault> {
    fault(FaultKind::Barrier, format!("mbarrier at {at:#x}: {text}"))
}

impl Cluster {
    /// Block and offset of the barrier that a lane names.
    fn mbarrier_target(&self, warp: &Warp, mbar: Mbar, inst: &Inst, lane: usize) -> Exec<(u32, u32)> {
        let address = warp.get(inst.src[0], lane).wrapping_add(mbar.offset as u64);
        let (cta, at) = match mbar.space {
            Space::Shared => self.own_target(warp, address)?,
            _ => self.cluster_target(address)?,
        };
        if at & 7 != 0 {
            return Err(misaligned("mbarrier", u64::from(at), 8));
        }
        self.blocks[cta as usize].shared.check(at, 8, 8, "mbarrier")?;
        Ok((cta, at))
    }

    pub(super) fn barrier_at(&mut self, cta: u32, at: u32) -> Exec<&mut Mbarrier> {
        match self.blocks.get_mut(cta as usize).and_then(|b| b.mbarriers.get_mut(&at)) {
            Some(bar) => Ok(bar),
            None => Err(misuse(at, "not initialised (mbarrier.init has not run, or the address is wrong)")),
        }
    }

    pub(super) fn mbarrier(&mut self, warp: &mut Warp, inst: &Inst, mbar: Mbar, active: u32) -> Exec<Step> {
        if mbar.op == MbarOp::PendingCount {
            for lane in lanes(active) {
                let state = warp.get(inst.src[1], lane);
                warp.put(inst.dst[0], lane, state >> 40);
            }
            return Ok(Step::Next);
        }
        if let MbarOp::Test { parity, may_block } = mbar.op {
            return self.test_wait(warp, inst, mbar, active, parity, may_block);
        }
        self.events += 1;
        if matches!(mbar.op, MbarOp::CpAsyncArrive { .. }) {
            warp.asynchrony.copy_epoch += 1;
            // The barrier's arrival is at once, so the copies that it announces are there.
            self.land_copies(warp, warp.asynchrony.copy_epoch);
        }
        for lane in lanes(active) {
            let (cta, at) = self.mbarrier_target(warp, mbar, inst, lane)?;
            let value = if inst.src[1].is_some() { warp.get(inst.src[1], lane) as u32 } else { 1 };
            if mbar.op != MbarOp::Init
                && let Some(t) = &mut self.tracker
            {
                t.mbarrier_use(warp, cta, at)?;
            }
            match mbar.op {
                MbarOp::Init => {
                    if value == 0 || value > MAX_COUNT {
                        return Err(misuse(at, &format!("init with count {value}, not in 1..={MAX_COUNT}")));
                    }
                    let track = match &mut self.tracker {
                        Some(t) => t.mbarrier_init(warp, cta, at, lane)?,
                        None => 0,
                    };
                    let block = &mut self.blocks[cta as usize];
                    let bar = Mbarrier { expected: value, pending: value, track, ..Mbarrier::default() };
                    if block.mbarriers.insert(at, bar).is_some() && self.launch.options.check_barriers_at_exit
                    {
                        return Err(misuse(at, "initialised twice without mbarrier.inval"));
                    }
                    block.shared.get_mut(at, 8).fill(0);
                }
                MbarOp::Inval => {
                    self.barrier_at(cta, at)?;
                    self.blocks[cta as usize].mbarriers.remove(&at);
                }
                MbarOp::ExpectTx => self.expect(cta, at, value)?,
                MbarOp::CompleteTx => self.complete_bytes(cta, at, value)?,
                MbarOp::Arrive { expect, drop, no_complete } => {
                    if expect {
                        self.expect(cta, at, value)?;
                    }
                    let count = if expect { 1 } else { value };
                    let state = self.arrive(warp, cta, at, count, drop, no_complete, mbar)?;
                    warp.put(inst.dst[0], lane, state);
                }
                MbarOp::CpAsyncArrive { no_inc } => {
                    // Copies are carried out at issue; the arrival follows at once.
                    let bar = self.barrier_at(cta, at)?;
                    if !no_inc {
                        bar.pending += 1;
                    }
                    let mut gathered = std::mem::take(&mut bar.gathered);
                    if let Some(t) = &self.tracker {
                        t.copies_release(warp, &mut gathered);
                    }
                    self.barrier_at(cta, at)?.gathered = gathered;
                    self.arrive(warp, cta, at, 1, false, false, mbar)?;
                }
                MbarOp::Test { .. } | MbarOp::PendingCount => {}
            }
        }
        Ok(Step::Next)
    }

    pub(super) fn expect(&mut self, cta: u32, at: u32, bytes: u32) -> Exec<()> {
        let bar = self.barrier_at(cta, at)?;
        bar.tx += i64::from(bytes);
        if bar.tx > i64::from(MAX_COUNT) {
            let text = format!("transaction count {} beyond {MAX_COUNT}", bar.tx);
            return Err(misuse(at, &text));
        }
        Ok(())
    }

    /// `complete_tx`: an asynchronous operation has moved `bytes`.
    pub(super) fn complete_bytes(&mut self, cta: u32, at: u32, bytes: u32) -> Exec<()> {
        self.events += 1;
        let bar = self.barrier_at(cta, at)?;
        bar.tx -= i64::from(bytes);
        bar.copied = true;
        if bar.tx < -i64::from(MAX_COUNT) {
            let text = format!("transaction count {} below -{MAX_COUNT}", bar.tx);
            return Err(misuse(at, &text));
        }
        bar.settle();
        Ok(())
    }

    #[allow(clippy::too_many_arguments)] // One per qualifier of the instruction.
    fn arrive(
        &mut self,
        warp: &mut Warp,
        cta: u32,
        at: u32,
        count: u32,
        drop: bool,
        no_complete: bool,
        mbar: Mbar,
    ) -> Exec<u64> {
        let mut gathered = std::mem::take(&mut self.barrier_at(cta, at)?.gathered);
        if let Some(t) = &mut self.tracker
            && !mbar.relaxed
        {
            t.release_to(warp, cta, mbar.of_cluster, &mut gathered);
        }
        self.arrive_plain(cta, at, count, drop, no_complete, gathered)
    }

    /// An arrival with its clocks already gathered.
    pub(super) fn arrive_plain(
        &mut self,
        cta: u32,
        at: u32,
        count: u32,
        drop: bool,
        no_complete: bool,
        gathered: Clocks,
    ) -> Exec<u64> {
        self.events += 1;
        let bar = self.barrier_at(cta, at)?;
        bar.gathered = gathered;
        let state = bar.phase | u64::from(bar.pending) << 40;
        if count > bar.pending {
            let text = format!("{count} arrivals, but this phase expects only {} more", bar.pending);
            return Err(misuse(at, &text));
        }
        if drop {
            bar.expected -= count.min(bar.expected);
        }
        bar.pending -= count;
        if no_complete && bar.pending == 0 {
            return Err(misuse(at, "arrive.noComplete completes the phase"));
        }
        bar.settle();
        Ok(state)
    }

    /// The clocks gathered so far, to be handed back through [`arrive_plain`](Self::arrive_plain).
    pub(super) fn take_gathered(&mut self, cta: u32, at: u32) -> Exec<Clocks> {
        Ok(std::mem::take(&mut self.barrier_at(cta, at)?.gathered))
    }

    fn test_wait(
        &mut self,
        warp: &mut Warp,
        inst: &Inst,
        mbar: Mbar,
        active: u32,
        parity: bool,
        may_block: bool,
    ) -> Exec<Step> {
        let mut done = 0u32;
        let mut waits = Wait::Lanes(0);
        let mut last = None;
        for lane in lanes(active) {
            let (address, value) = (warp.get(inst.src[0], lane), warp.get(inst.src[1], lane));
            if let Some((question, complete)) = last
                && question == (address, value)
            {
                // Lanes with equal address and value get the same answer.
                done |= u32::from(complete) << lane;
                continue;
            }
            let (cta, at) = self.mbarrier_target(warp, mbar, inst, lane)?;
            if let Some(t) = &mut self.tracker {
                t.mbarrier_use(warp, cta, at)?;
            }
            let bar = self.barrier_at(cta, at)?;
            let complete = if parity {
                if value > 1 {
                    return Err(misuse(at, &format!("waits for parity {value}")));
                }
                bar.phase & 1 != value
            } else {
                bar.phase > value & ((1 << 40) - 1)
            };
            if complete {
                done |= 1 << lane;
                bar.is_unseen_copy = false;
                let (phase, track) = (bar.phase, bar.track);
                let published = std::mem::take(&mut bar.published);
                if let Some(t) = &mut self.tracker {
                    t.observe_phase(warp, track, phase, &published, mbar);
                }
                self.barrier_at(cta, at)?.published = published;
            } else {
                waits = Wait::Mbarrier { cta, address: at, parity: value as u32 };
            }
            last = Some(((address, value), complete));
        }
        if done != active && may_block && !self.expired {
            return Ok(Step::Block(waits));
        }
        if done == active {
            self.counters.barrier_waits += 1;
        }
        warp.set_pred(inst.dst[0], done, active);
        Ok(Step::Next)
    }
}
