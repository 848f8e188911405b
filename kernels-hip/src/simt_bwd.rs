//! `simt` backward: every problem, a wave to a row, in two launches. Correct for all, fast for none.

pub(crate) mod recipe;

use fmha_core::bwd_workspace::{BwdRows, BwdWorkspace};
use fmha_core::source::{Entry, KernelSource};
use fmha_core::spec::BwdSpec;
use fmha_core::{BwdProblem, PlanOptions, Refusal};

use crate::arch::Arch;
use crate::device::refuse;
use crate::simt::{NAME, NUM_THREADS, rows_of_a_workgroup};

/// The first launch's name in a plan; the second bears the kernel's.
pub(crate) const STATS: &str = "simt_bwd_stats";

/// Chosen for a problem.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SimtBwd {
    spec: BwdSpec,
    /// Where its numbers lie in the workspace.
    pub(crate) workspace: BwdWorkspace,
    rows: BwdRows,
    /// Of a workgroup.
    group_rows: u64,
}

/// Whether the kernels compute this problem.
///
/// # Errors
/// The number that is too large, or a tile that it has not.
pub(crate) fn accept(problem: &BwdProblem, arch: Arch, options: &PlanOptions) -> Result<SimtBwd, Refusal> {
    options.refuse_tile(NAME)?;
    let rows = BwdRows::of(problem);
    let group_rows = rows_of_a_workgroup(arch);
    let most = u64::from(u32::MAX / NUM_THREADS) * group_rows;
    if rows.all() > most {
        refuse!(NAME, "lengths, heads and batch make {} rows of gradients, more than {most}", rows.all());
    }
    // Nothing is padded: a block is a row.
    let Some(workspace) = BwdWorkspace::new(problem, 1, None, 0) else {
        refuse!(NAME, "the workspace would be 2^62 bytes or more");
    };
    Ok(SimtBwd { spec: BwdSpec::of(problem), workspace, rows, group_rows })
}

impl SimtBwd {
    /// The first launch.
    #[must_use]
    pub(crate) fn stats_source(&self) -> KernelSource {
        self.source("simt::bwd_stats<kSpec>(p);")
    }

    /// The second.
    #[must_use]
    pub(crate) fn source_of_rows(&self) -> KernelSource {
        self.source("simt::bwd<kSpec>(p);")
    }

    /// Workgroups of the first launch.
    #[must_use]
    pub(crate) fn stats_workgroups(&self) -> u64 {
        self.rows.queries.div_ceil(self.group_rows)
    }

    /// Of the second.
    #[must_use]
    pub(crate) fn workgroups(&self) -> u64 {
        self.rows.all().div_ceil(self.group_rows)
    }

    fn source(&self, call: &str) -> KernelSource {
        let entry = Entry {
            include: "fmha/simt/bwd.h",
            constants: &[("kSpec", &self.spec)],
            bounds: &crate::group_of(NUM_THREADS),
            params: "BwdParams p",
            call,
        };
        KernelSource::new(entry.render(), crate::headers)
    }
}
