//! The state of one warp: its register rows and the groups its lanes have diverged into.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Exec, fault};
use crate::fault::FaultKind;
use crate::op::{Program, Reg};

/// One register of 32 lanes.
pub(crate) type Row = [u32; 32];
/// One 64-bit register of 32 lanes.
pub(crate) type WideRow = [u64; 32];

/// Content of registers before their first write: a NaN in every float format, and no plausible address.
const POISON: u32 = 0x7fff_dead;

/// Lanes of a warp that stand at one instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) pc: u32,
    pub(crate) mask: u32,
    /// The barrier generation or phase this group waits for, once it has arrived.
    pub(crate) token: Option<u64>,
    /// Why the group could not go on when it last tried.
    pub(crate) waits: Option<Wait>,
}

/// Event that a group of lanes waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Other lanes of the warp, named by the mask, at the same instruction.
    Lanes(u32),
    Barrier(u32),
    Mbarrier {
        cta: u32,
        address: u32,
        parity: u32,
    },
    Cluster,
    Async(&'static str),
    Registers(u32),
    Grid,
    TensorColumns(u32),
}

/// One warp.
#[derive(Debug, Default)]
pub(crate) struct Warp {
    pub(crate) cta: u32,
    /// Warp of its block, from 0.
    pub(crate) index: u32,
    pub(crate) w: Vec<Row>,
    pub(crate) d: Vec<WideRow>,
    pub(crate) p: Vec<u32>,
    pub(crate) carry: u32,
    /// Lanes that exist and have not exited.
    pub(crate) live: u32,
    /// Lanes that have waited for the grids before this one, or need not.
    pub(crate) after_grids: u32,
    pub(crate) groups: Vec<Group>,
    /// `.local` memory, lane after lane.
    pub(crate) local: Vec<u8>,
    pub(crate) local_init: Vec<bool>,
    /// Registers per thread now, from `setmaxnreg`.
    pub(crate) max_registers: u32,
    /// Instructions executed.
    pub(crate) executed: u64,
    /// The instruction being executed.
    pub(crate) current_pc: u32,
    pub(crate) asynchrony: Asynchrony,
    /// Products of `wgmma` put off (late mode).
    pub(crate) queue: VecDeque<super::wgmma::Queued>,
}

/// Sixteen bytes or fewer on their way to shared memory.
#[derive(Debug)]
pub(crate) struct PendingCopy {
    /// Value of the warp's `copy_epoch` that its group ends with.
    pub(crate) epoch: u32,
    pub(crate) cta: u32,
    pub(crate) at: u32,
    pub(crate) bytes: u32,
    pub(crate) data: [u8; 16],
}

/// Groups of asynchronous operations that a warp has open.
#[derive(Debug, Default)]
pub(crate) struct Asynchrony {
    /// `wgmma` operations issued since the last commit.
    pub(crate) wgmma_open: u32,
    /// `wgmma` groups committed, and how many of them are known complete.
    pub(crate) wgmma_committed: u32,
    pub(crate) wgmma_done: u32,
    /// Number of the next `wgmma` of this warp.
    pub(crate) wgmma_issued: u64,
    pub(crate) bulk_open: u32,
    pub(crate) bulk_committed: u32,
    pub(crate) bulk_done: u32,
    /// Bulk groups whose sources are known to be read (`wait_group.read`).
    pub(crate) bulk_read: u32,
    /// `tcgen05` products and copies issued.
    pub(crate) tcgen_issued: u32,
    /// Epochs of `cp.async`: the number of events so far that close the copies before them (a group's commit,
    /// an mbarrier's arrival), that number at the end of each group that is not known to be complete, and the
    /// number up to which all copies are complete.
    pub(crate) copy_epoch: u32,
    pub(crate) copy_groups: VecDeque<u32>,
    pub(crate) copy_done: u32,
    /// Copies that have not been waited for; garbage stands in their place meanwhile.
    pub(crate) copies: VecDeque<PendingCopy>,
    /// Generation of the cluster barrier at the last arrival.
    pub(crate) cluster_generation: Option<u64>,
}

impl Warp {
    /// Whether a lane may touch global memory, which the grids before may still write and read.
    ///
    /// PTX ISA, `griddepcontrol`.
    pub(crate) fn is_after_grids(&self, lane: usize, what: &str) -> Exec<()> {
        if self.after_grids >> lane & 1 != 0 {
            return Ok(());
        }
        let text = format!(
            "{what} before griddepcontrol.wait, in a grid launched to start before those before it end"
        );
        Err(fault(FaultKind::MissingGridWait, text))
    }

    /// A warp at its first instruction, constants in place, everything else poisoned.
    pub(crate) fn new(
        program: &Arc<Program>,
        cta: u32,
        index: u32,
        lanes: u32,
        garbage: Option<u64>,
    ) -> Self {
        let poison = |row: usize| {
            garbage.map_or(POISON, |seed| crate::garbage::word(seed, u64::from(index) << 32 | row as u64))
        };
        let wide = |row: usize| u64::from(poison(row)) << 32 | u64::from(poison(row));
        let mut warp = Self {
            cta,
            index,
            w: (0..program.words as usize).map(|row| [poison(row); 32]).collect(),
            d: (0..program.doubles as usize).map(|row| [wide(row); 32]).collect(),
            p: vec![0; program.preds as usize],
            live: lanes,
            groups: vec![Group { pc: 0, mask: lanes, token: None, waits: None }],
            local: vec![0; program.local_bytes as usize * 32],
            local_init: vec![false; program.local_bytes as usize * 32],
            ..Self::default()
        };
        for &(reg, value) in &program.const_words {
            warp.w[reg.row()] = [value; 32];
        }
        for &(reg, value) in &program.const_preds {
            warp.p[reg.row()] = if value { u32::MAX } else { 0 };
        }
        for &(reg, value) in &program.const_doubles {
            warp.d[reg.row()] = [value; 32];
        }
        warp
    }

    /// A row of whatever width, as 64-bit values.
    pub(crate) fn wide(&self, reg: Reg) -> WideRow {
        if reg.is_double() {
            self.d[reg.row()]
        } else {
            std::array::from_fn(|i| u64::from(self.w[reg.row()][i]))
        }
    }

    /// The lanes of a predicate source, [`Reg::NONE`] reading as false.
    pub(crate) fn pred(&self, reg: Reg, negated: bool) -> u32 {
        let bits = if reg.is_some() { self.p[reg.row()] } else { 0 };
        if negated { !bits } else { bits }
    }

    /// Writes `value` where `mask` says.
    #[inline(always)]
    pub(crate) fn set(&mut self, reg: Reg, value: &Row, mask: u32) {
        let row = &mut self.w[reg.row()];
        if mask == u32::MAX {
            *row = *value;
        } else {
            for i in 0..32 {
                row[i] = if mask >> i & 1 != 0 { value[i] } else { row[i] };
            }
        }
    }

    /// Writes `value` where `mask` says.
    #[inline(always)]
    pub(crate) fn set_wide(&mut self, reg: Reg, value: &WideRow, mask: u32) {
        let row = &mut self.d[reg.row()];
        if mask == u32::MAX {
            *row = *value;
        } else {
            for i in 0..32 {
                row[i] = if mask >> i & 1 != 0 { value[i] } else { row[i] };
            }
        }
    }

    /// Writes a predicate where `mask` says.
    #[inline(always)]
    pub(crate) fn set_pred(&mut self, reg: Reg, value: u32, mask: u32) {
        let row = &mut self.p[reg.row()];
        *row = *row & !mask | value & mask;
    }

    /// One lane of a word or double row.
    pub(crate) fn put(&mut self, reg: Reg, lane: usize, value: u64) {
        if reg.is_double() {
            self.d[reg.row()][lane] = value;
        } else if reg.is_some() {
            self.w[reg.row()][lane] = value as u32;
        }
    }

    pub(crate) fn get(&self, reg: Reg, lane: usize) -> u64 {
        if reg.is_double() { self.d[reg.row()][lane] } else { u64::from(self.w[reg.row()][lane]) }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.groups.is_empty()
    }
}

/// The lanes of a mask, lowest first.
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        if rest == 0 {
            return None;
        }
        let lane = rest.trailing_zeros() as usize;
        rest &= rest - 1;
        Some(lane)
    })
}
