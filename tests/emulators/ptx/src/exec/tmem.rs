//! Tensor memory and `tcgen05`. PTX ISA 9.7.16.

use super::cluster::{Cluster, Step};
use super::warp::Warp;
use super::{Exec, fault};
use crate::fault::FaultKind;
use crate::op::{Inst, Program, Tcgen};

/// The 128 lanes by 512 columns of one block.
#[derive(Debug, Default)]
pub(crate) struct TensorMemory {
    allocated: u32,
}

impl TensorMemory {
    /// Columns still allocated.
    pub(crate) fn leaked(&self) -> Option<u32> {
        (self.allocated != 0).then_some(self.allocated)
    }
}

impl Cluster {
    #[allow(clippy::too_many_arguments)] // One per part of the instruction.
    pub(super) fn tcgen05(
        &mut self,
        _warp: &mut Warp,
        _g: usize,
        _program: &Program,
        _inst: &Inst,
        op: Tcgen,
        _pair: bool,
        _active: u32,
    ) -> Exec<Step> {
        Err(fault(FaultKind::Unsupported, format!("tcgen05 {op:?}")))
    }
}
