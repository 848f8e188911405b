//! One cluster: scheduling of its warps, divergence of their lanes, and what ends or stalls them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::barrier::{ClusterBarrier, NamedBarrier};
use super::bulk::Job;
use super::fragment::Repeated;
use super::mbarrier::Mbarrier;
use super::operand::OperandCache;
use super::specials::fill_specials;
use super::tmem::TensorMemory;
use super::warp::{Group, Wait, Warp};
use super::wgmma::Warpgroup;
use super::{Exec, alu, fault};
use crate::counters::Counters;
use crate::fault::{Fault, FaultKind, Place};
use crate::hb::Tracker;
use crate::launch::{Asynchrony, LaunchConfig, Options};
use crate::memory::{Shared, View};
use crate::op::Program;

/// State that all clusters of a launch share.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) program: Arc<Program>,
    pub(crate) config: LaunchConfig,
    pub(crate) options: Options,
    pub(crate) params: Vec<u8>,
    pub(crate) view: View,
    /// Registers per thread at launch, when known.
    pub(crate) registers: u32,
    pub(crate) simd: bool,
    /// Set by the first cluster that fails.
    pub(crate) stop: AtomicBool,
    /// Writes to global memory so far: what a spinning block may be waiting for.
    pub(crate) global_events: AtomicU64,
    /// Makes read-modify-write of two words indivisible.
    pub(crate) wide_atomics: std::sync::Mutex<()>,
}

/// One block of the cluster.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) index: [u32; 3],
    pub(crate) shared: Shared,
    pub(crate) barriers: [NamedBarrier; 16],
    pub(crate) mbarriers: HashMap<u32, Mbarrier>,
    /// Registers of the launch that no warp holds, in units of one thread's register: `setmaxnreg` deals out
    /// no others, though the file may have them (an H200 waits for ever).
    pub(crate) free_registers: i64,
    pub(crate) warpgroups: Vec<Warpgroup>,
    pub(crate) tmem: TensorMemory,
    pub(crate) operands: OperandCache,
}

/// Outcome of a call of [`Cluster::run`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Done,
    /// The budget of this call is spent; the cluster can go on.
    Yield,
}

/// Effect of an instruction on the warp's flow.
pub(super) enum Step {
    Next,
    /// Go to; for all lanes of the group.
    Jump(u32),
    /// A part of the lanes goes to the target, the others go on.
    Split {
        target: u32,
        taken: u32,
    },
    Exit(u32),
    Block(Wait),
}

/// A cluster in flight.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(super) launch: Arc<Launch>,
    pub(super) blocks: Vec<Block>,
    pub(super) warps: Vec<Warp>,
    pub(super) barrier: ClusterBarrier,
    /// Times each instruction was executed.
    pub(crate) hits: Vec<u64>,
    pub(crate) counters: Counters,
    /// Asynchronous operations not yet carried out (late mode).
    pub(super) pending: Vec<Job>,
    pub(super) tracker: Option<Box<Tracker>>,
    /// Changes of state that another warp could be waiting for.
    pub(super) events: u64,
    /// Blocking test-waits give up in this round.
    pub(super) expired: bool,
    pub(super) hint: usize,
    /// Space for the data of an asynchronous copy, and for the products of `wgmma`.
    pub(super) moved: Vec<u8>,
    pub(super) repeated: Box<Repeated>,
    rng: u64,
    idle_rounds: u32,
    quiet: u64,
    quiet_since: u64,
    /// Warp instructions that were executed so far.
    spent: u64,
}

/// Rounds of expired waits, nothing changing, that count as a deadlock.
const IDLE_LIMIT: u32 = 6;
/// Warp instructions without any change of state after which warps count as waiting, for a number in memory.
const PATIENCE: u64 = 4096;

impl Cluster {
    /// The place of the cluster's first block in the grid.
    pub(crate) fn first_block(&self) -> [u32; 3] {
        self.blocks.first().map_or([0; 3], |block| block.index)
    }

    /// Cluster number `index` of the grid.
    pub(crate) fn new(launch: &Arc<Launch>, index: u32) -> Self {
        let config = &launch.config;
        let [cx, cy, cz] = config.cluster;
        let (gx, gy) = (config.grid[0] / cx, config.grid[1] / cy);
        let at = [index % gx * cx, index / gx % gy * cy, index / gx / gy * cz];
        let threads: u32 = config.block.iter().product();
        let num_warps = threads.div_ceil(32);
        let program = &launch.program;
        let mut blocks = Vec::new();
        let mut warps = Vec::new();
        for rank in 0..cx * cy * cz {
            let offset = [rank % cx, rank / cx % cy, rank / cx / cy];
            let block = [at[0] + offset[0], at[1] + offset[1], at[2] + offset[2]];
            blocks.push(Block {
                index: block,
                shared: Shared::new(program.dynamic_base + config.dynamic_shared),
                barriers: Default::default(),
                mbarriers: HashMap::new(),
                free_registers: 0,
                warpgroups: (0..num_warps.div_ceil(4)).map(|_| Warpgroup::default()).collect(),
                tmem: TensorMemory::default(),
                operands: OperandCache::default(),
            });
            for w in 0..num_warps {
                let count = (threads - w * 32).min(32);
                let mask = if count == 32 { u32::MAX } else { (1 << count) - 1 };
                let mut warp = Warp::new(program, rank, w, mask, launch.options.garbage);
                warp.max_registers = launch.registers;
                warp.after_grids = if config.dependent { 0 } else { u32::MAX };
                fill_specials(&mut warp, launch, index, block, offset, rank);
                warps.push(warp);
            }
        }
        let tracker = launch
            .options
            .happens_before
            .then(|| Box::new(Tracker::new(blocks.len(), num_warps, launch.options.strict_tensor_memory)));
        let seed = match launch.options.asynchrony {
            Asynchrony::Eager => 0,
            Asynchrony::Late { seed } => {
                (seed ^ u64::from(index) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
            }
        };
        Self {
            blocks,
            warps,
            barrier: ClusterBarrier::default(),
            hits: vec![0; program.code.len()],
            counters: Counters::default(),
            pending: Vec::new(),
            tracker,
            events: 0,
            expired: false,
            hint: 0,
            moved: Vec::new(),
            repeated: Box::new([[[0.0; 8]; 4]; 32]),
            rng: seed,
            idle_rounds: 0,
            quiet: 0,
            quiet_since: 0,
            spent: 0,
            launch: Arc::clone(launch),
        }
    }

    /// A random number below `n` in late mode; 0 in eager mode.
    pub(super) fn random(&mut self, n: u64) -> u64 {
        if self.rng == 0 {
            return 0;
        }
        self.rng ^= self.rng << 13;
        self.rng ^= self.rng >> 7;
        self.rng ^= self.rng << 17;
        self.rng % n
    }

    pub(super) fn is_late(&self) -> bool {
        self.rng != 0
    }

    /// Runs until the cluster ends, fails, or has executed about `budget` warp instructions.
    pub(crate) fn run(&mut self, budget: u64) -> Exec<Status> {
        let mut spent = 0;
        loop {
            let (events, mut executed, mut alive) = (self.events, 0, false);
            let start = self.random(self.warps.len() as u64) as usize;
            for i in 0..self.warps.len() {
                let w = (i + start) % self.warps.len();
                if !self.warps[w].is_done() {
                    alive = true;
                    executed += self.run_warp(w)?;
                }
            }
            if !alive {
                while self.complete_one()? {}
                self.finish()?;
                return Ok(Status::Done);
            }
            self.expired = false;
            spent += executed;
            if self.events == events {
                self.quiet += executed;
            } else {
                self.idle_rounds = 0;
                self.quiet = 0;
            }
            // Late mode completes nothing asynchronous while a warp can still go on and does not merely poll
            // memory.
            let asks_again = self.quiet > PATIENCE;
            if (executed == 0 || self.idle_rounds > 0 || asks_again) && self.complete_one()? {
                (self.idle_rounds, self.quiet) = (0, 0);
                continue;
            }
            if executed == 0 || self.idle_rounds > 0 {
                self.idle_rounds += 1;
                self.expired = true;
                if self.idle_rounds > IDLE_LIMIT && !self.waits_for_grid() {
                    return Err(self.deadlock());
                }
            }
            if self.quiet > self.launch.options.spin_limit {
                let global = self.launch.global_events.load(Relaxed);
                if global == self.quiet_since {
                    let text = format!(
                        "{} warp instructions without any change of state: {}",
                        self.quiet,
                        self.places()
                    );
                    return Err(fault(FaultKind::Livelock, text));
                }
                (self.quiet, self.quiet_since) = (0, global);
            }
            self.spent += executed;
            if self.spent > self.launch.options.instruction_limit {
                let text = format!("{} warp instructions and no end: {}", self.spent, self.places());
                return Err(fault(FaultKind::Livelock, text));
            }
            if self.launch.stop.load(Relaxed) || spent >= budget {
                return Ok(Status::Yield);
            }
        }
    }

    /// Carries out one pending asynchronous operation; false when there is none.
    fn complete_one(&mut self) -> Exec<bool> {
        if self.pending.is_empty() {
            return Ok(false);
        }
        let at = self.random(self.pending.len() as u64) as usize;
        let job = self.pending.swap_remove(at);
        self.complete(&job)?;
        Ok(true)
    }

    fn waits_for_grid(&self) -> bool {
        self.warps.iter().flat_map(|w| &w.groups).any(|g| g.waits == Some(Wait::Grid))
    }

    fn run_warp(&mut self, w: usize) -> Exec<u64> {
        let mut warp = std::mem::take(&mut self.warps[w]);
        let before = warp.executed;
        let quantum = if self.is_late() { 1 + self.random(200) as u32 } else { 1024 };
        let result = self.run_groups(&mut warp, quantum);
        let executed = warp.executed - before;
        self.warps[w] = warp;
        result.map(|()| executed)
    }

    /// Gives every group of the warp that can go on up to `quantum` instructions, lowest address first.
    fn run_groups(&mut self, warp: &mut Warp, quantum: u32) -> Exec<()> {
        let program = Arc::clone(&self.launch.program);
        let mut tried: Vec<(u32, u32)> = Vec::new();
        // Instructions that the lanes of a mask have had in this call: lanes that spin must not keep the others out.
        let mut had: Vec<(u32, u32)> = Vec::new();
        loop {
            if warp.groups.len() > 1 {
                merge(warp);
            }
            let next = warp.groups.iter().position(|g| !tried.contains(&(g.pc, g.mask)));
            let Some(i) = next else { return Ok(()) };
            let (mut pc, mask) = (warp.groups[i].pc, warp.groups[i].mask);
            let alone = warp.groups.len() == 1;
            let stop = warp.groups.iter().map(|g| g.pc).filter(|&p| p > pc).min().unwrap_or(u32::MAX);
            let before = had.iter().find(|(lanes, _)| *lanes == mask).map_or(0, |(_, count)| *count);
            let mut left = quantum.saturating_sub(before).max(1);
            let given = left;
            let split = loop {
                if left == 0 || pc >= stop {
                    break None;
                }
                let inst = &program.code[pc as usize];
                let active =
                    if inst.guard.is_some() { mask & warp.pred(inst.guard, inst.guard_not) } else { mask };
                left -= 1;
                warp.executed += 1;
                self.hits[pc as usize] += 1;
                if let Some(t) = &mut self.tracker {
                    t.step(warp, &program, pc, active).map_err(|f| self.placed(f, warp, pc, active))?;
                }
                if active == 0 {
                    pc += 1;
                    continue;
                }
                if alu::execute(warp, inst, active, self.launch.simd) {
                    pc += 1;
                    continue;
                }
                warp.groups[i].pc = pc;
                warp.current_pc = pc;
                match self.execute(warp, i, &program, inst, active) {
                    Err(f) => return Err(self.placed(f, warp, pc, active)),
                    Ok(Step::Next) => pc += 1,
                    Ok(Step::Jump(target)) if active == mask => {
                        let back = target <= pc;
                        pc = target;
                        if back && !alone {
                            had.retain(|(lanes, _)| *lanes != mask);
                            had.push((mask, before + given - left));
                            break None;
                        }
                    }
                    Ok(Step::Jump(target)) => break Some(Step::Split { target, taken: active }),
                    Ok(Step::Block(wait)) => {
                        warp.executed -= 1;
                        self.hits[pc as usize] -= 1;
                        warp.groups[i].waits = Some(wait);
                        tried.push((pc, mask));
                        break None;
                    }
                    Ok(step) => break Some(step),
                }
            };
            if left == 0 {
                tried.push((pc, mask));
            }
            warp.groups[i].pc = pc;
            if tried.last() != Some(&(pc, mask)) || left == 0 {
                warp.groups[i].waits = None;
            }
            match split {
                Some(Step::Split { target, taken }) => {
                    warp.groups[i].pc = pc + 1;
                    warp.groups[i].mask = mask & !taken;
                    warp.groups.push(Group { pc: target, mask: taken, token: None, waits: None });
                    warp.groups.retain(|g| g.mask != 0);
                    self.counters.divergences += 1;
                }
                Some(Step::Exit(gone)) => {
                    warp.live &= !gone;
                    warp.groups[i].mask &= !gone;
                    warp.groups[i].pc = pc + 1;
                    warp.groups.retain(|g| g.mask != 0);
                    self.events += 1;
                    if warp.live == 0 {
                        self.warp_exits(warp).map_err(|f| self.placed(f, warp, pc, gone))?;
                        return Ok(());
                    }
                    // Other warps may wait for exactly these lanes, so all are tried again.
                    tried.clear();
                }
                _ => {}
            }
        }
    }

    pub(super) fn placed(&self, mut f: Box<Fault>, warp: &Warp, pc: u32, lanes: u32) -> Box<Fault> {
        let (line, source) = self.launch.program.lines[pc as usize];
        *f = f.at(line, source);
        if f.place.is_none() {
            let block = self.blocks[warp.cta as usize].index;
            f.place = Some(Place { block, warp: warp.index, lanes });
        }
        f
    }

    /// Sends the lanes `same` to `target` and leaves the others where they are.
    pub(super) fn peel(&mut self, warp: &mut Warp, g: usize, target: u32, same: u32) -> Step {
        warp.groups[g].mask &= !same;
        warp.groups.push(Group { pc: target, mask: same, token: None, waits: None });
        self.counters.divergences += 1;
        Step::Block(Wait::Lanes(0))
    }

    /// Checks that all live lanes are here, as `.aligned` demands.
    pub(super) fn converged(&self, warp: &Warp, g: usize) -> Result<(), Step> {
        if warp.groups[g].mask == warp.live { Ok(()) } else { Err(Step::Block(Wait::Lanes(warp.live))) }
    }

    fn warp_exits(&mut self, warp: &mut Warp) -> Exec<()> {
        self.blocks[warp.cta as usize].free_registers += i64::from(warp.max_registers) * 32;
        if self.launch.options.happens_before && warp.asynchrony.wgmma_committed > warp.asynchrony.wgmma_done
        {
            return Err(fault(FaultKind::RegisterInFlight, "the warp exits with wgmma groups in flight"));
        }
        Ok(())
    }
}

/// Joins groups that stand at the same instruction, and sorts them by address.
fn merge(warp: &mut Warp) {
    warp.groups.sort_by_key(|g| g.pc);
    warp.groups.dedup_by(|b, a| {
        let same = a.pc == b.pc && a.token == b.token;
        if same {
            a.mask |= b.mask;
            a.waits = None;
        }
        same
    });
}
