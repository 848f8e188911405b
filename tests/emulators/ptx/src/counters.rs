//! Counters of a launch, for performance work without a device.

use crate::op::{Code, Inst, Wf};

/// Counts over all blocks of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Instructions, each counted once a warp.
    pub warp_instructions: u64,
    /// Times that lanes of a warp parted.
    pub divergences: u64,
    /// Bytes of shared memory that loads, stores and `ldmatrix` moved.
    pub shared_bytes: u64,
    /// Passes over the banks of shared memory that these accesses took.
    pub shared_passes: u64,
    /// Passes beyond the least possible, those of `cp.async` too.
    pub bank_conflicts: u64,
    /// Bytes that `wgmma` and `tcgen05.mma` read as operands from shared memory.
    pub shared_matrix_bytes: u64,
    /// Bytes read from global memory.
    pub global_read: u64,
    /// Bytes written to global memory.
    pub global_written: u64,
    /// Bytes that asynchronous copies moved, and their number.
    pub bulk_bytes: u64,
    /// Bulk copies issued.
    pub bulk_copies: u64,
    /// Waits at barriers that ended.
    pub barrier_waits: u64,
    /// Multiply-adds of the tensor cores.
    pub tensor_macs: u64,
    /// Operations of the special function unit, each lane counted.
    pub special_functions: u64,
}

impl Counters {
    pub(crate) fn add(&mut self, other: &Self) {
        self.warp_instructions += other.warp_instructions;
        self.divergences += other.divergences;
        self.shared_bytes += other.shared_bytes;
        self.shared_passes += other.shared_passes;
        self.bank_conflicts += other.bank_conflicts;
        self.shared_matrix_bytes += other.shared_matrix_bytes;
        self.global_read += other.global_read;
        self.global_written += other.global_written;
        self.bulk_bytes += other.bulk_bytes;
        self.bulk_copies += other.bulk_copies;
        self.barrier_waits += other.barrier_waits;
        self.tensor_macs += other.tensor_macs;
        self.special_functions += other.special_functions;
    }
}

impl Counters {
    /// Every count by its field's name.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 13] {
        [
            ("warp_instructions", self.warp_instructions),
            ("divergences", self.divergences),
            ("shared_bytes", self.shared_bytes),
            ("shared_passes", self.shared_passes),
            ("bank_conflicts", self.bank_conflicts),
            ("shared_matrix_bytes", self.shared_matrix_bytes),
            ("global_read", self.global_read),
            ("global_written", self.global_written),
            ("bulk_bytes", self.bulk_bytes),
            ("bulk_copies", self.bulk_copies),
            ("barrier_waits", self.barrier_waits),
            ("tensor_macs", self.tensor_macs),
            ("special_functions", self.special_functions),
        ]
    }

    /// Adds `hits` executions of an instruction.
    pub(crate) fn count_instruction(&mut self, inst: &Inst, hits: u64) {
        self.warp_instructions += hits;
        let special = matches!(
            inst.code,
            Code::W { f: Wf::FEx2 | Wf::FLg2 | Wf::FRcp | Wf::FRsqrt | Wf::FTanh | Wf::FSin | Wf::FCos, .. }
        );
        if special {
            self.special_functions += hits * 32;
        }
    }
}
