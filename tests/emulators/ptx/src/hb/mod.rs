//! Happens-before: vector clocks over warps and asynchronous operations, and what each byte of shared memory saw.
//!
//! A warp is one thread of the relation (its lanes run in program order). An asynchronous operation has the
//! clock component of whatever announces its end: a phase of an mbarrier, a bulk group, a wgmma group of four
//! warps. Clocks travel together: `v`, what has happened, `a`, what of it the asynchronous proxy also sees,
//! and in a cluster `g`, what of it a load or store may follow that another block's warp made. `FastTrack`
//! (Flanagan and Freund, PLDI 2009) gave the idea of one last write and few reads a cell.

mod asynchronous;
mod cells;
mod flights;
mod tensor_memory;
mod visits;

pub(crate) use cells::{SeenReads, Touch};

use cells::{Access, Line};
use flights::Flight;
use tensor_memory::TensorState;

use crate::exec::Warp;
use crate::fault::{Fault, FaultKind};
use crate::op::Mbar;

type Exec<T> = Result<T, Box<Fault>>;

/// Vector clocks. The last two of clusters alone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clocks {
    v: Vec<u32>,
    a: Vec<u32>,
    /// As `v`, but for arrivals at another block's barrier, and waits for such, that do not name the cluster
    /// as their scope: they order loads and stores of one block's threads alone. What asynchronous operations
    /// do, which were waited for before, they order all the same, as every pipeline of loads by TMA for a
    /// cluster has it.
    g: Vec<u32>,
    /// Arrivals of other blocks at a barrier at cluster scope, which a wait at that scope adds to `g`.
    g_of_others: Vec<u32>,
}

fn join(to: &mut Vec<u32>, from: &[u32]) {
    if to.len() < from.len() {
        to.resize(from.len(), 0);
    }
    for (t, f) in to.iter_mut().zip(from) {
        *t = (*t).max(*f);
    }
}

impl Clocks {
    fn join(&mut self, other: &Self) {
        join(&mut self.v, &other.v);
        join(&mut self.a, &other.a);
        join(&mut self.g, &other.g);
    }

    fn at(clock: &[u32], track: u32) -> u32 {
        clock.get(track as usize).copied().unwrap_or(0)
    }
}

/// The tracker of one cluster.
#[derive(Debug)]
pub(crate) struct Tracker {
    warps: u32,
    per_block: u32,
    blocks: u32,
    clocks: Vec<Clocks>,
    tracks: u32,
    /// Accesses by lines of sixteen bytes.
    cells: Vec<Vec<Line>>,
    flights: Vec<Flight>,
    tensor: Vec<TensorState>,
    strict_tensor_memory: bool,
    /// Initialised barriers that the asynchronous proxy cannot see yet: block, address, the warp's number.
    unfenced: Vec<(u32, u32, u32)>,
    lines: Vec<(u32, u32)>,
    /// Last accesses of the other blocks' warps to each block's shared memory.
    visits: Vec<Vec<Access>>,
}

impl Tracker {
    pub(crate) fn new(blocks: usize, per_block: u32, strict_tensor_memory: bool) -> Self {
        let warps = blocks as u32 * per_block;
        let mut clocks = vec![Clocks::default(); warps as usize];
        for (i, c) in clocks.iter_mut().enumerate() {
            c.v = vec![0; warps as usize];
            c.v[i] = 1;
            if blocks > 1 {
                c.g.clone_from(&c.v);
            }
        }
        Self {
            warps,
            per_block,
            clocks,
            tracks: 7 * warps,
            cells: vec![Vec::new(); 2 * blocks],
            blocks: blocks as u32,
            flights: vec![Flight::default(); warps as usize],
            tensor: vec![TensorState::default(); warps as usize],
            strict_tensor_memory,
            unfenced: Vec::new(),
            lines: Vec::new(),
            visits: vec![Vec::new(); blocks],
        }
    }

    fn id(&self, warp: &Warp) -> u32 {
        warp.cta * self.per_block + warp.index
    }

    fn wgmma_track(&self, id: u32) -> u32 {
        self.warps + id
    }

    /// The track of a warp's bulk groups.
    pub(crate) fn bulk_track(&self, cta: u32, warp: u32) -> u32 {
        2 * self.warps + cta * self.per_block + warp
    }

    fn copy_track(&self, id: u32) -> u32 {
        3 * self.warps + id
    }

    /// The track of a warpgroup's products: complete for a reader when all four warps have waited.
    pub(crate) fn warpgroup_track(&self, warp: &Warp) -> u32 {
        4 * self.warps + warp.cta * self.per_block + warp.index / 4 * 4
    }

    /// The clocks of a warp now.
    pub(crate) fn snapshot(&self, warp: &Warp) -> Clocks {
        self.clocks[self.id(warp) as usize].clone()
    }

    /// A release: what the warp has done so far goes into `into`.
    pub(crate) fn release(&mut self, warp: &Warp, into: &mut Clocks) {
        let id = self.id(warp) as usize;
        into.join(&self.clocks[id]);
        self.begin_epoch(id);
    }

    /// An arrival at a barrier of block `cta`.
    pub(crate) fn release_to(&mut self, warp: &Warp, cta: u32, of_cluster: bool, into: &mut Clocks) {
        if cta == warp.cta {
            return self.release(warp, into);
        }
        let id = self.id(warp) as usize;
        join(&mut into.v, &self.clocks[id].v);
        join(&mut into.a, &self.clocks[id].a);
        if of_cluster {
            join(&mut into.g_of_others, &self.clocks[id].g);
        }
        self.begin_epoch(id);
    }

    /// The warp's later operations are behind what it has released.
    fn begin_epoch(&mut self, id: usize) {
        let c = &mut self.clocks[id];
        c.v[id] += 1;
        if let Some(g) = c.g.get_mut(id) {
            *g = c.v[id];
        }
    }

    /// Records an acquire of the released clocks.
    pub(crate) fn acquire(&mut self, warp: &Warp, from: &Clocks) {
        let id = self.id(warp) as usize;
        self.clocks[id].join(from);
    }

    /// `fence.proxy.async`: the asynchronous proxy sees all that the warp sees.
    pub(crate) fn proxy_fence(&mut self, warp: &Warp) {
        let id = self.id(warp) as usize;
        let c = &mut self.clocks[id];
        join(&mut c.a, &c.v);
        self.begin_epoch(id);
        self.init_fence(warp);
    }

    /// `fence.mbarrier_init`: the asynchronous proxy sees the barriers that the warp has initialised.
    pub(crate) fn init_fence(&mut self, warp: &Warp) {
        let id = self.id(warp);
        self.unfenced.retain(|&(_, _, by)| by != id);
    }

    /// An asynchronous operation is to complete on a barrier.
    pub(crate) fn async_barrier(&self, cta: u32, at: u32) -> Exec<()> {
        let Some(&(_, _, by)) = self.unfenced.iter().find(|&&(c, a, _)| (c, a) == (cta, at)) else {
            return Ok(());
        };
        let text = format!(
            "an asynchronous operation completes on the mbarrier at {at:#x} of block rank {cta}, which warp {} of \
             block rank {} initialised without fence.mbarrier_init",
            by % self.per_block,
            by / self.per_block
        );
        Err(Box::new(Fault::new(FaultKind::MissingProxyFence, text)))
    }

    fn advance(&mut self, id: u32, track: u32, to: u32) {
        let v = &mut self.clocks[id as usize].v;
        if v.len() <= track as usize {
            v.resize(track as usize + 1, 0);
        }
        v[track as usize] = v[track as usize].max(to);
    }

    /// The warp has seen `phase` phases of a barrier complete.
    pub(crate) fn observe_phase(
        &mut self,
        warp: &Warp,
        track: u32,
        phase: u64,
        published: &Clocks,
        wait: Mbar,
    ) {
        if !wait.relaxed {
            self.acquire(warp, published);
            self.advance(self.id(warp), track, phase as u32);
            if wait.of_cluster {
                let id = self.id(warp) as usize;
                join(&mut self.clocks[id].g, &published.g_of_others);
            }
        }
    }

    /// A new barrier: its track. Writing the barrier must not race with earlier uses of the bytes.
    pub(crate) fn mbarrier_init(&mut self, warp: &Warp, cta: u32, at: u32, lane: usize) -> Exec<u32> {
        self.generic(Touch::Write, warp, [cta, at, 8], lane, false)?;
        self.unfenced.push((cta, at, self.id(warp)));
        self.tracks += 1;
        Ok((self.tracks - 1).min(4095))
    }

    /// Any use of a barrier must come after its initialisation.
    pub(crate) fn mbarrier_use(&mut self, warp: &Warp, cta: u32, at: u32) -> Exec<()> {
        self.visit(warp, cta, 0);
        let write = self.last_write(cta, at);
        let clocks = &self.clocks[self.id(warp) as usize];
        if write.is_some() && !self.ordered(write, &clocks.v) {
            return Err(self.race("use as an mbarrier", "initialisation", write, cta, at));
        }
        Ok(())
    }

    pub(crate) fn bulk_done(&mut self, warp: &Warp) {
        let track = self.bulk_track(warp.cta, warp.index);
        self.advance(self.id(warp), track, warp.asynchrony.bulk_read);
    }

    pub(crate) fn copies_done(&mut self, warp: &Warp) {
        let id = self.id(warp);
        self.advance(id, self.copy_track(id), warp.asynchrony.copy_done);
    }

    /// A load or store of a warp: block, address and bytes. A strong one races with nothing.
    pub(crate) fn generic(
        &mut self,
        touch: Touch,
        warp: &Warp,
        [cta, at, n]: [u32; 3],
        lane: usize,
        strong: bool,
    ) -> Exec<()> {
        self.visit(warp, cta, lane);
        if strong {
            return Ok(());
        }
        let id = self.id(warp);
        self.at_the_time_of(id, |t, clocks| {
            let me = (id, clocks.v[id as usize], warp.current_pc, lane);
            t.touch(touch, clocks, me, [cta, at, n])
        })
    }

    /// Does something with the clocks that a warp has now.
    fn at_the_time_of<R>(&mut self, id: u32, access: impl FnOnce(&mut Self, &Clocks) -> R) -> R {
        let clocks = std::mem::take(&mut self.clocks[id as usize]);
        let result = access(self, &clocks);
        self.clocks[id as usize] = clocks;
        result
    }
}
