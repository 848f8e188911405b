//! Options of a plan over ranks.

use fmha::PlanOptions;

use crate::model::Links;
use crate::scheme::Scheme;

/// Options of a plan over ranks, equal on all ranks.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Scheme to use or refuse; `None`: the planner chooses.
    pub scheme: Option<Scheme>,
    /// Options of each kernel.
    pub kernels: PlanOptions,
    /// Speeds by which the planner compares schemes.
    pub links: Links,
    /// Whether `gather`'s keys and values come while its kernels run, which wait for each piece's flag: ranks
    /// of one host, a process each, whose devices share memory, rows that are not packed, a kernel that
    /// waits. `None`: where that can be and the model has it faster; `Some(true)`: a refusal where it cannot;
    /// `Some(false)`: all of them come first.
    pub flags: Option<bool>,
}

impl Options {
    /// Sets the scheme to use or refuse.
    #[must_use]
    pub fn scheme(mut self, scheme: impl Into<Option<Scheme>>) -> Self {
        self.scheme = scheme.into();
        self
    }

    /// Sets the options of each kernel.
    #[must_use]
    pub fn kernels(mut self, kernels: PlanOptions) -> Self {
        self.kernels = kernels;
        self
    }

    /// Whether `gather`'s keys and values come while its kernels run.
    #[must_use]
    pub fn flags(mut self, flags: impl Into<Option<bool>>) -> Self {
        self.flags = flags.into();
        self
    }

    /// Sets the speeds by which the planner compares schemes.
    #[must_use]
    pub fn links(mut self, links: Links) -> Self {
        self.links = links;
        self
    }
}
