//! A plan's launches, compiled: what a plan of this backend keeps, and how it runs.

use std::ffi::c_void;
use std::sync::Arc;

use fmha_core::cache::only_plans;
use fmha_core::error::{Error, ProblemError, Result};
use fmha_core::lengths::check_lengths;
use fmha_core::{
    Explain, FwdProblem, LaunchShape, PlanOptions, PlanParts, Refusal, SeqArgs, Step as Explained, Workspace,
};

use crate::CudaBackend;
use crate::driver::Grid;
use crate::kernels::{Choice, LastMaps, Launch, Named};
use crate::modules::Module;

/// One launch.
pub(crate) struct Step {
    /// Absent where a backend only plans and could not compile.
    module: Option<Arc<Module>>,
    grid: Grid,
    /// Where it takes a forward call's.
    pub(crate) maps: LastMaps,
}

impl Step {
    /// Queues it.
    ///
    /// # Safety
    /// `arguments` point to the kernel's parameters, in order and of their types, and the device
    /// memory they name is what the kernel's contract asks for.
    pub(crate) unsafe fn launch(&self, arguments: &mut [*mut c_void], stream: u64) -> Result<()> {
        let module = self.module.as_ref().ok_or_else(only_plans)?;
        // SAFETY: the caller's promise.
        unsafe { module.loaded()?.launch(self.grid, arguments, stream) }
    }
}

/// A recipe's steps, by the names that it gives them: `let [prepare, main] = exactly(steps)?;`.
///
/// # Errors
/// Both counts: a plan whose steps are another recipe's.
pub(crate) fn exactly<const N: usize>(steps: &[Step]) -> Result<&[Step; N]> {
    steps.try_into().map_err(|_| {
        ProblemError::new("plan", format!("plan has {} steps, but its kernel has {N}", steps.len())).into()
    })
}

/// A kernel that can be launched.
pub(crate) struct Ready<K> {
    pub(crate) kernel: K,
    pub(crate) steps: Vec<Step>,
}

/// What a plan keeps.
pub(crate) struct Handle<K> {
    chosen: Ready<K>,
    /// What serves operands whose addresses the chosen kernel does not take, if the caller allows it.
    stand_in: Option<Ready<K>>,
    /// Whether each run reads the lengths back and checks them.
    pub(crate) checks_lengths: bool,
}

impl<K> Handle<K> {
    pub(crate) fn new(chosen: Ready<K>, stand_in: Option<Ready<K>>, options: &PlanOptions) -> Self {
        Self { chosen, stand_in, checks_lengths: options.check_lengths }
    }

    /// The kernel that serves operands which `takes` looks at.
    ///
    /// # Errors
    /// The operand that the chosen kernel does not take where it lies, where nothing stands in.
    pub(crate) fn for_operands(&self, takes: impl Fn(&K) -> Result<(), ProblemError>) -> Result<&Ready<K>> {
        match (takes(&self.chosen.kernel), &self.stand_in) {
            (Ok(()), _) => Ok(&self.chosen),
            (Err(_), Some(stand_in)) => Ok(stand_in),
            (Err(unaligned), None) => Err(unaligned.into()),
        }
    }
}

impl CudaBackend {
    /// Compiles and loads what was chosen.
    ///
    /// # Errors
    /// What the compiler or the driver said.
    pub(crate) fn ready<K: Copy>(&self, choice: &mut Choice<K>) -> Result<(Ready<K>, Vec<Explained>)> {
        let mut steps = Vec::with_capacity(choice.launches.len());
        let mut explained = Vec::with_capacity(choice.launches.len());
        for launch in std::mem::take(&mut choice.launches) {
            let (step, explain) = self.step(launch)?;
            steps.push(step);
            explained.push(explain);
        }
        Ok((Ready { kernel: choice.kernel, steps }, explained))
    }

    fn step(&self, launch: Launch) -> Result<(Step, Explained)> {
        let Launch { kernel, source, grid, smem_bytes, tiles, tiles_at_once } = launch;
        let (module, code) = match self.modules.load(kernel, source, smem_bytes) {
            Ok(module) => (Some(Arc::clone(&module)), module.origin.to_string()),
            // A plan for no device is a plan without a compiler too.
            Err(Error::NoDevice(text)) if !self.has_device() => (None, format!("none: {text}")),
            Err(error) => return Err(error),
        };
        let explain = Explain {
            resources: module.as_ref().map(|module| module.compiled.resources),
            launch: Some(LaunchShape {
                groups: grid.ctas.into(),
                threads: grid.threads,
                shared_bytes: smem_bytes,
                tiles,
                tiles_at_once,
            }),
            code,
        };
        Ok((
            Step { module, grid, maps: LastMaps::default() },
            Explained { kernel: kernel.to_owned(), explain },
        ))
    }

    /// What a plan says of a choice.
    pub(crate) fn parts<P, K: Named>(
        &self,
        problem: P,
        choice: Choice<K>,
        steps: Vec<Explained>,
        refusals: Vec<Refusal>,
        options: &PlanOptions,
    ) -> PlanParts<P> {
        let mut details = vec![("arch", self.facts.arch.clone())];
        details.extend(choice.details);
        let mut promises = choice.promises;
        if options.check_lengths {
            details.push((
                "lengths",
                "read back and checked by each run, which waits for its stream".to_owned(),
            ));
            promises.graph_capturable = false;
        }
        PlanParts {
            problem,
            backend: self.name.clone(),
            kernel: choice.kernel.name().to_owned(),
            details,
            steps,
            refusals,
            is_fallback: choice.kernel.is_fallback(),
            workspace: choice.workspace,
            promises,
        }
    }

    /// Waits for the stream, reads a call's lengths back and checks them.
    ///
    /// # Errors
    /// The first offset or length that is wrong, with its index; what the driver said.
    pub(crate) fn check_lengths(&self, problem: &FwdProblem, seq: &SeqArgs<'_>, stream: u64) -> Result<()> {
        let device = self.memory.device()?;
        device.synchronize(stream)?;
        check_lengths(problem, seq, |slice, bytes| device.download(slice.as_ptr() as u64, bytes))
    }

    /// Queues zeros for the part of the workspace that a run wants so.
    ///
    /// # Errors
    /// What the driver said.
    pub(crate) fn clear(
        &self,
        given: Option<&fmha_core::DevSliceMut<'_>>,
        wanted: Workspace,
        stream: u64,
    ) -> Result<()> {
        match given {
            Some(given) if wanted.zeroed_bytes > 0 => {
                let address = given.as_mut_ptr() as u64;
                // SAFETY: the argument check saw that `given` has as many bytes; its maker promised them.
                unsafe { self.memory.device()?.zero(address, wanted.zeroed_bytes, stream) }
            }
            _ => Ok(()),
        }
    }
}
