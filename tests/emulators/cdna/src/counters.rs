//! Counters of a launch.

use std::collections::{BTreeSet, HashSet};

use crate::elf::Arch;
use crate::inst::Class;
use crate::wave::LANES;

/// Counts of one launch, over all its waves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Instructions executed, by [`Class`].
    pub executed: [u64; Class::ALL.len()],
    /// Passes (four cycles each) that the matrix instructions take, by the published peak rates.
    pub mfma_passes: u64,
    /// Addresses of the `s_waitcnt` that had something to wait for at least once. Filled only while checking.
    pub useful_waits: BTreeSet<u64>,
    /// Addresses of the `s_waitcnt` and `s_barrier` that were executed. Filled only while checking.
    pub synchronised: BTreeSet<u64>,
    /// LDS instructions measured. This counter and those behind it count only with
    /// [`crate::Options::profile`].
    pub lds_accesses: u64,
    /// Cycles those need when no two lanes of a cycle fall into one bank.
    pub lds_cycles_min: u64,
    /// Cycles that conflicts add.
    pub lds_conflict_cycles: u64,
    /// Vector memory instructions measured.
    pub vmem_accesses: u64,
    /// 128-byte cache lines they touch.
    pub vmem_lines: u64,
    /// Lines that their bytes would fill if packed.
    pub vmem_lines_min: u64,
    /// Each workgroup's number in the grid, and how many lines it has read: one that it reads again counts once.
    pub lines_of_groups: Vec<(u64, u64)>,
    /// Lines that the present workgroup has read.
    lines_read: HashSet<u64>,
}

impl Counters {
    /// Number of all instructions.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.executed.iter().sum()
    }

    /// Instructions of a class.
    #[must_use]
    pub fn of(&self, class: Class) -> u64 {
        self.executed[class as usize]
    }

    /// Adds the counts of another launch or workgroup.
    pub fn add(&mut self, other: &Self) {
        for (sum, count) in self.executed.iter_mut().zip(other.executed) {
            *sum += count;
        }
        self.useful_waits.extend(&other.useful_waits);
        self.synchronised.extend(&other.synchronised);
        self.mfma_passes += other.mfma_passes;
        self.lds_accesses += other.lds_accesses;
        self.lds_cycles_min += other.lds_cycles_min;
        self.lds_conflict_cycles += other.lds_conflict_cycles;
        self.vmem_accesses += other.vmem_accesses;
        self.vmem_lines += other.vmem_lines;
        self.vmem_lines_min += other.vmem_lines_min;
        self.lines_of_groups.extend(&other.lines_of_groups);
    }

    /// Workgroup number `number` has ended.
    pub(crate) fn end_group(&mut self, number: u64) {
        self.lines_of_groups.push((number, self.lines_read.len() as u64));
        self.lines_read.clear();
    }

    /// Bank conflicts of one LDS access, modelled: lanes go in order, as many a cycle as the banks' width serves, and
    /// each bank gives one dword a cycle (lanes that read the same dword share it). 32 banks; 64 on gfx950.
    pub(crate) fn bank_conflicts(&mut self, arch: Arch, exec: u64, bytes: u32, addresses: &[u32; LANES]) {
        let banks: u32 = if arch == Arch::Gfx950 { 64 } else { 32 };
        let dwords = bytes.div_ceil(4);
        let lanes_a_cycle = (banks / dwords).clamp(1, 64) as usize;
        self.lds_accesses += 1;
        for start in (0..LANES).step_by(lanes_a_cycle) {
            let mut seen: [Vec<u32>; 64] = std::array::from_fn(|_| Vec::new());
            let mut active = false;
            for l in (start..(start + lanes_a_cycle).min(LANES)).filter(|l| exec >> l & 1 == 1) {
                active = true;
                for d in 0..dwords {
                    let dword = addresses[l] / 4 + d;
                    let bank = &mut seen[(dword % banks) as usize];
                    if !bank.contains(&dword) {
                        bank.push(dword);
                    }
                }
            }
            if active {
                let worst = seen.iter().map(Vec::len).max().unwrap_or(1) as u64;
                self.lds_cycles_min += 1;
                self.lds_conflict_cycles += worst - 1;
            }
        }
    }

    pub(crate) fn lines(&mut self, addresses: impl Iterator<Item = u64>, bytes: u64, is_read: bool) {
        let mut lines: Vec<u64> = Vec::with_capacity(LANES);
        let mut total = 0;
        for address in addresses {
            total += bytes;
            lines.extend([address / 128, (address + bytes - 1) / 128]);
        }
        lines.sort_unstable();
        lines.dedup();
        if is_read {
            self.lines_read.extend(&lines);
        }
        self.vmem_accesses += 1;
        self.vmem_lines += lines.len() as u64;
        self.vmem_lines_min += total.div_ceil(128);
    }
}
