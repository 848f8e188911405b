//! The closed family of forward kernels: which takes a problem, and how it is launched.

pub(crate) mod simt;
pub(crate) mod sm90;

use enum_dispatch::enum_dispatch;
use fmha_core::abi::FwdParams;
use fmha_core::error::{Error, ProblemError, Refusal, Result};
use fmha_core::source::KernelSource;
use fmha_core::{FwdArgs, PlanOptions, ValidFwd};

use crate::driver::{Grid, Kernel as Loaded};
use simt::Simt;
use sm90::Sm90;

/// What a choice depends on besides the problem.
#[derive(Clone, Debug)]
pub(crate) struct DeviceFacts {
    /// `sm_90a`.
    pub(crate) arch: String,
    pub(crate) num_sms: u32,
    pub(crate) smem_bytes: u32,
}

/// A kernel that takes a problem: what to compile and how much of it to launch.
pub(crate) struct Choice {
    pub(crate) source: KernelSource,
    pub(crate) grid: Grid,
    pub(crate) smem_bytes: u32,
    pub(crate) workspace_bytes: u64,
    pub(crate) details: Vec<(&'static str, String)>,
    /// The kernel again, with what its launch needs.
    pub(crate) kernel: Kernel,
}

/// A forward kernel.
#[enum_dispatch]
pub(crate) trait Recipe {
    fn name(&self) -> &'static str;

    /// Correct for all, fast for none.
    fn is_fallback(&self) -> bool {
        false
    }

    /// Takes the problem, or says why not.
    fn choose(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice, Refusal>;

    /// Takes the operands where they lie, or names the first that it does not: addresses are not known
    /// when a plan is made.
    fn takes_addresses(&self, _: &FwdParams) -> Result<(), ProblemError> {
        Ok(())
    }

    /// Queues a launch.
    fn launch(&self, loaded: &Loaded, call: &Call<'_>) -> Result<()>;
}

/// One launch's operands.
pub(crate) struct Call<'a> {
    pub(crate) problem: &'a ValidFwd,
    pub(crate) args: &'a FwdArgs<'a>,
    pub(crate) params: FwdParams,
    pub(crate) grid: Grid,
    pub(crate) stream: u64,
}

/// The family, best first.
#[enum_dispatch(Recipe)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kernel {
    Sm90,
    Simt,
}

impl Kernel {
    pub(crate) fn all() -> [Kernel; 2] {
        [Sm90::default().into(), Simt.into()]
    }
}

/// The first kernel that takes the problem, and why the ones before it did not.
pub(crate) fn select(
    backend: &str,
    problem: &ValidFwd,
    facts: &DeviceFacts,
    options: &PlanOptions,
) -> Result<(Choice, Vec<Refusal>)> {
    let mut refusals = Vec::new();
    for kernel in Kernel::all() {
        let wanted = match &options.kernel {
            Some(name) if name == kernel.name() => true,
            Some(_) => continue,
            None => !kernel.is_fallback() || options.allow_fallback,
        };
        if !wanted {
            refusals
                .push(Refusal::new(kernel.name(), "it is the slow fallback, and allow_fallback is false"));
            continue;
        }
        match kernel.choose(problem, facts, options) {
            Ok(choice) => return Ok((choice, refusals)),
            Err(refusal) => refusals.push(refusal),
        }
    }
    if let (Some(name), true) = (&options.kernel, refusals.is_empty()) {
        let known = Kernel::all().map(|kernel| kernel.name()).join(", ");
        refusals.push(Refusal::new(name.clone(), format!("there is no such kernel (known: {known})")));
    }
    Err(Error::Unsupported { backend: backend.to_owned(), refusals })
}
