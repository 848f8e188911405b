//! Workspace of Hopper's backward kernels.

use fmha_core::bwd_workspace::{BwdWorkspace, DqSums};
use fmha_core::spec::BwdSpec;
use fmha_core::{BwdProblem, QLayout};

use super::schedule::Sm90BwdSchedule;
use super::spec::{leaves_far_queries, padded_dim, repairs};
use super::tile::Sm90BwdTile;
use super::walk::DqPath;

/// Whether each part of a kv head's queries has separate sums of dK and dV, as in the device text (`work.cuh`): in
/// all calls but deterministic packed ones, whose parts add to shared sums one after another. So dK and dV have a
/// fixed order of additions in every call.
#[must_use]
pub(super) fn keeps_head_sums_apart(spec: &BwdSpec) -> bool {
    !(spec.deterministic && spec.fwd.q_layout == QLayout::Packed)
}

impl Sm90BwdTile {
    /// Workspace of `q_blocks` query blocks: their statistics, the sums of dQ, and flags for non-finite numbers and
    /// for far queries. If the main kernel finishes dQ, also the number of each head's finished key blocks; if it
    /// computes delta, also that of each query head's computed blocks. `None` if 2^62 bytes or more.
    pub(super) fn workspace(
        &self,
        problem: &BwdProblem,
        spec: &BwdSpec,
        schedule: &Sm90BwdSchedule,
        q_blocks: u32,
    ) -> Option<BwdWorkspace> {
        let has_semaphores = match self.dq_path {
            DqPath::FirstStores => true,
            DqPath::Apart => false,
            DqPath::Registers | DqPath::StoreWarp => spec.deterministic,
        };
        let dim = padded_dim(spec).unsigned_abs();
        let sums = DqSums { dim, parts: self.dq_parts(problem), has_semaphores };
        let heads = u64::from(problem.fwd.dims.num_heads_q) * u64::from(problem.fwd.dims.batch);
        let far = if leaves_far_queries(spec) { u64::from(q_blocks) } else { 0 };
        let done = if self.finishes_dq() { u64::from(schedule.num_heads.unsigned_abs()) } else { 0 };
        let made = if self.makes_delta() { heads } else { 0 };
        let flags = self.num_non_finite_flags(spec, schedule, q_blocks) + far + done + made;
        BwdWorkspace::new(problem, self.block_m.unsigned_abs(), Some(sums), flags)
    }

    /// Number of sums of dQ for a query row: one for each key block (of a cluster), or one.
    #[must_use]
    pub fn dq_parts(&self, problem: &BwdProblem) -> u32 {
        let keys = (self.block_n * self.walk.cluster()).unsigned_abs();
        if self.keeps_dq_apart() { problem.fwd.dims.seqlen_k.div_ceil(keys).max(1) } else { 1 }
    }

    /// Bytes of the sums of dQ of all rows; 2^64 - 1 if there are more.
    pub(super) fn dq_bytes(&self, problem: &BwdProblem, spec: &BwdSpec) -> u64 {
        let dims = problem.fwd.dims;
        let rows =
            u64::from(dims.batch).saturating_mul(u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q));
        let row_bytes = 4 * u64::from(padded_dim(spec).unsigned_abs()) * u64::from(self.dq_parts(problem));
        rows.saturating_mul(row_bytes)
    }

    /// Checks that the separate sums of dQ of key blocks take at most 4 GiB.
    ///
    /// # Errors
    /// More than 4 GiB of them.
    pub fn check_room_for_dq(&self, problem: &BwdProblem, spec: &BwdSpec) -> Result<(), String> {
        let bytes = self.dq_bytes(problem, spec);
        if self.keeps_dq_apart() && bytes > 4 << 30 {
            let parts = self.dq_parts(problem);
            return Err(format!(
                "dq_path apart: sums of dQ of {parts} key blocks are {bytes} bytes, more than 4 GiB"
            ));
        }
        Ok(())
    }

    /// Bytes of the f32 sums of dK and dV: of each tile or, where parts wait for each other, of each key block,
    /// together with the counters of additions. 0 if one tile processes all query heads of a kv head.
    #[must_use]
    pub fn head_sums_bytes(&self, spec: &BwdSpec, schedule: &Sm90BwdSchedule) -> u64 {
        let parts = (schedule.num_head_parts * schedule.num_query_parts).unsigned_abs().max(1);
        let shared_by = if keeps_head_sums_apart(spec) { 1 } else { parts };
        let tiles = u64::from(schedule.num_tiles.unsigned_abs() / shared_by);
        let counts = 16 * u64::from(self.num_consumers().unsigned_abs());
        if self.head_parts { tiles * (self.sums_of_tile(spec) + counts) } else { 0 }
    }

    /// Bytes of a tile's sums of dK and dV.
    pub(super) fn sums_of_tile(&self, spec: &BwdSpec) -> u64 {
        u64::from(self.block_n.unsigned_abs()) * 8 * u64::from(padded_dim(spec).unsigned_abs())
    }

    /// Number of flags that mark non-finite numbers: one for each consumer warp of each tile (dK or dV), and one
    /// for each CTA that finishes dQ, or for each query block. 0 without [`repairs`].
    fn num_non_finite_flags(&self, spec: &BwdSpec, schedule: &Sm90BwdSchedule, q_blocks: u32) -> u64 {
        if repairs(spec) {
            let of_queries = u64::from(q_blocks) * u64::from(self.finish_ctas(spec).unsigned_abs());
            4 * u64::from((self.num_consumers() * schedule.num_tiles).unsigned_abs()) + of_queries
        } else {
            0
        }
    }
}
