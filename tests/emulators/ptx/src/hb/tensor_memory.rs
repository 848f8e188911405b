//! Tensor memory in happens-before: what the waits and fences of `tcgen05` order. PTX ISA 9.7.16.6.
//!
//! A `tcgen05.ld` or `.st` is an operation of its own track. Others see it complete once the warp has waited for it
//! (`wait::ld`, `wait::st`), then fenced (`fence::before_thread_sync`), and they have synchronised with that. What a
//! warp's own accesses and products come after is what it had seen at its last `fence::after_thread_sync`.
//!
//! Published programs leave some of this out; for those it is relaxed (`Options::strict_tensor_memory`), and a warp's
//! accesses to tensor memory are then ordered as its accesses to shared memory are.

use super::{Clocks, Exec, Touch, Tracker};
use crate::exec::Warp;
use crate::fault::{Fault, FaultKind};
use crate::op::{Program, Reg};

/// Accesses of one warp to tensor memory.
#[derive(Clone, Debug, Default)]
pub(super) struct TensorState {
    /// Clocks of what had happened before the last `fence::after_thread_sync`, as this warp saw it.
    visible: Vec<u32>,
    /// Loads and stores issued.
    issued: u32,
    /// First load that is not yet waited for.
    open_load: Option<u32>,
    open_store: Option<u32>,
    /// Registers that loads will write.
    loading: Vec<Reg>,
}

impl TensorState {
    /// The last access before which, itself included, all are waited for.
    fn waited(&self) -> u32 {
        let first_open = self.open_load.into_iter().chain(self.open_store).min();
        first_open.map_or(self.issued, |first| first - 1)
    }
}

fn set(clock: &mut Vec<u32>, track: u32, to: u32) {
    if clock.len() <= track as usize {
        clock.resize(track as usize + 1, 0);
    }
    clock[track as usize] = clock[track as usize].max(to);
}

impl Tracker {
    /// The track of a warp's loads from and stores to tensor memory.
    fn tensor_track(&self, id: u32) -> u32 {
        6 * self.warps + id
    }

    /// `tcgen05.ld` or `.st` by a warp: quadrant of lanes, first column, columns; the registers that a load writes.
    pub(crate) fn tensor_access(
        &mut self,
        touch: Touch,
        warp: &Warp,
        part: [u32; 3],
        registers: &[Reg],
    ) -> Exec<()> {
        if !self.strict_tensor_memory {
            return self.tmem_access(touch, warp, part);
        }
        let (id, track) = (self.id(warp), self.tensor_track(self.id(warp)));
        let state = &mut self.tensor[id as usize];
        state.issued += 1;
        let epoch = state.issued;
        match touch {
            Touch::Read => {
                state.open_load.get_or_insert(epoch);
                state.loading.extend_from_slice(registers);
            }
            Touch::Write => {
                state.open_store.get_or_insert(epoch);
            }
        }
        let mut clocks = Clocks { v: state.visible.clone(), ..Clocks::default() };
        // The warp's own accesses come in program order.
        set(&mut clocks.v, track, epoch);
        let me = (track, epoch, warp.current_pc, 0);
        let cells = self.tmem_cells(warp.cta, part);
        self.touch(touch, &clocks, me, cells)
    }

    /// The clocks that order a product's or copy's accesses to tensor memory, given those of its issue.
    pub(super) fn tensor_clocks(&self, warp: &Warp, issue: &Clocks) -> Clocks {
        let id = self.id(warp);
        let (state, products) = (&self.tensor[id as usize], self.tcgen_track(warp));
        let mut clocks = Clocks { v: state.visible.clone(), ..Clocks::default() };
        set(&mut clocks.v, self.tensor_track(id), state.waited());
        set(&mut clocks.v, products, Clocks::at(&issue.v, products));
        clocks
    }

    pub(crate) fn tensor_wait_loads(&mut self, warp: &Warp) {
        let id = self.id(warp) as usize;
        self.tensor[id].open_load = None;
        self.tensor[id].loading.clear();
    }

    pub(crate) fn tensor_wait_stores(&mut self, warp: &Warp) {
        let id = self.id(warp) as usize;
        self.tensor[id].open_store = None;
    }

    /// `fence::before_thread_sync`: a warp that synchronises with this one from here on sees its accesses
    /// that are waited for.
    pub(crate) fn tensor_fence_before(&mut self, warp: &Warp) {
        let id = self.id(warp);
        let waited = self.tensor[id as usize].waited();
        self.advance(id, self.tensor_track(id), waited);
    }

    pub(crate) fn tensor_fence_after(&mut self, warp: &Warp) {
        let id = self.id(warp) as usize;
        self.tensor[id].visible.clone_from(&self.clocks[id].v);
    }

    /// Reports an instruction that touches a register that a load from tensor memory is still to write,
    /// before it runs.
    pub(super) fn step_tensor(&self, id: usize, program: &Program, pc: u32) -> Exec<()> {
        let loading = &self.tensor[id].loading;
        if loading.is_empty() {
            return Ok(());
        }
        let inst = &program.code[pc as usize];
        let (list_dst, list_src) = program.list(inst);
        let touched = |reg: &&Reg| loading.contains(reg);
        let read = inst.src.iter().chain(list_src).find(touched);
        let found = read.or_else(|| inst.dst.iter().chain(list_dst).find(touched));
        if found.is_none() {
            return Ok(());
        }
        let verb = if read.is_some() { "read" } else { "written" };
        let text = format!("a register of tcgen05.ld is {verb} before tcgen05.wait::ld");
        Err(Box::new(Fault::new(FaultKind::RegisterInFlight, text)))
    }
}
