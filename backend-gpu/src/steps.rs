//! The compiled launches of a GPU plan, and how they run.

use std::ffi::c_void;
use std::ops::Deref;
use std::sync::Arc;

use fmha_core::cache::{Module, only_plans};
use fmha_core::masks::mask_data_params;
use fmha_core::{Call, Error, ListsCall, ProblemError, Result, TileLists, TileOf, bind};

use crate::driver::Driver;
use crate::launches::{Grid, Stage};
use crate::portable::tile_list::TileListPlan;
use crate::ranges::Range;
use crate::recipe::{GpuProblem, Planned, Vendor};

/// One compiled launch of a plan.
pub struct Step<D: Driver> {
    /// Purpose of the step in the plan.
    pub stage: Stage,
    /// The loaded kernel, or the reason why there is none: no compiler was found.
    pub(crate) module: Result<Arc<Module<D::Kernel>>, String>,
    pub(crate) grid: Grid,
    pub(crate) range: Range,
    /// State that the recipe keeps for the step between calls.
    pub kept: D::Kept,
}

impl<D: Driver> Step<D> {
    /// Queues the step's kernel.
    ///
    /// # Safety
    /// As [`Driver::launch`].
    ///
    /// # Errors
    /// An error of the driver, or the reason why there is no kernel.
    pub unsafe fn launch(&self, arguments: &mut [*mut c_void], stream: u64) -> Result<()> {
        let module = self.module.as_ref().map_err(|why| Error::NoDevice(why.clone()))?;
        if self.grid.groups == 0 {
            return Ok(());
        }
        let _range = self.range.open();
        // SAFETY: the caller keeps the contract of `launch`.
        unsafe { D::launch(module.loaded()?, self.grid, arguments, stream) }
    }
}

/// The steps of a plan: the compiled form of its recipe's [`Launches`](crate::Launches). As a slice they are those of
/// the kernel itself: a first step that brings its operands ([`Stage::Widen`]) is reached by [`at`](Self::at) alone.
pub struct Steps<D: Driver> {
    all: Vec<Step<D>>,
    main: usize,
    own: usize,
}

impl<D: Driver> Steps<D> {
    /// Makes the steps of a plan; the one at index `main` is the main kernel.
    pub(crate) fn new(all: Vec<Step<D>>, main: usize) -> Self {
        let own = usize::from(all.first().is_some_and(|step| step.stage == Stage::Widen));
        Self { all, main, own }
    }

    /// The step of the main kernel.
    #[must_use]
    pub fn main(&self) -> &Step<D> {
        &self.all[self.main]
    }

    /// Queues the kernel's own steps with the same arguments.
    ///
    /// # Safety
    /// As [`Driver::launch`], for each of them.
    ///
    /// # Errors
    /// An error of the driver.
    pub unsafe fn launch_all(&self, arguments: &mut [*mut c_void], stream: u64) -> Result<()> {
        // SAFETY: the caller keeps the contract of `launch_all`.
        self.iter().try_for_each(|step| unsafe { step.launch(arguments, stream) })
    }

    /// The first step of a stage, if the plan has one.
    #[must_use]
    pub fn at(&self, stage: Stage) -> Option<&Step<D>> {
        self.all.iter().find(|step| step.stage == stage)
    }
}

impl<D: Driver> Deref for Steps<D> {
    type Target = [Step<D>];

    fn deref(&self) -> &[Step<D>] {
        &self.all[self.own..]
    }
}

/// A kernel that can be launched.
pub(crate) struct Ready<P: GpuProblem, V: Vendor> {
    pub(crate) planned: Planned<P, V>,
    pub(crate) steps: Steps<V::Driver>,
    /// The range around a whole run.
    pub(crate) range: Range,
}

/// Compiled launches that write small outputs after the kernel; empty if none is written.
pub(crate) struct Small<D: Driver> {
    pub(crate) steps: Vec<Step<D>>,
    /// Offset of their part of the workspace.
    pub(crate) place: u64,
}

/// Launches of a plan.
pub(crate) struct Handle<P: GpuProblem, V: Vendor> {
    pub(crate) driver: Option<Arc<V::Driver>>,
    pub(crate) chosen: Ready<P, V>,
    /// Plan for operands whose addresses the chosen kernel does not accept, if the caller allows a fallback.
    pub(crate) fallback: Option<Ready<P, V>>,
    pub(crate) small: Small<V::Driver>,
}

impl<P: GpuProblem, V: Vendor> fmha_core::Launch<P> for Handle<P, V> {
    fn takes_addresses(&self, call: &Call<'_, P>) -> Result<(), ProblemError> {
        // The fallback accepts all addresses, and `launch` chooses between the two plans.
        if self.fallback.is_some() { Ok(()) } else { self.chosen.planned.takes_addresses(call) }
    }

    fn tile_lists(&self) -> Vec<TileLists> {
        let ready = [Some(&self.chosen), self.fallback.as_ref()].into_iter().flatten();
        ready.flat_map(|ready| ready.planned.kernel.lists()).map(TileListPlan::shape).collect()
    }

    unsafe fn build_list(&self, call: &ListsCall<'_, P>) -> Result<()> {
        let ListsCall { problem, seq, masks, numbers, list, address, stream } = *call;
        let Some(problem) = problem.forward() else { return Ok(()) };
        // Without queries or keys a tile of keys sees nothing, and no kernel reads its list.
        if list.of == TileOf::Keys && (problem.dims.seqlen_q == 0 || problem.dims.seqlen_k == 0) {
            return Ok(());
        }
        let _entered = self.driver.as_ref().ok_or_else(only_plans)?.enter()?;
        for Ready { planned, steps, .. } in [Some(&self.chosen), self.fallback.as_ref()].into_iter().flatten()
        {
            let of_lists = steps.iter().filter(|step| step.stage == Stage::ListTiles);
            for (plan, step) in planned.kernel.lists().iter().zip(of_lists) {
                if plan.is_of(list.of, list.block) && plan.shape().is_ordered == list.is_ordered {
                    let arguments =
                        (bind::list_params(problem, seq, numbers), mask_data_params(problem, masks));
                    let ranks = steps.at(Stage::RankTiles).filter(|_| list.is_ordered);
                    let bits = steps.at(Stage::MaskBits);
                    // SAFETY: the caller keeps the contract of `build_list`; the steps are of this list.
                    return unsafe { plan.make_at([bits, Some(step), ranks], arguments, address, stream) };
                }
            }
        }
        Ok(())
    }

    unsafe fn launch(&self, call: &Call<'_, P>) -> Result<()> {
        // The device stays entered for the whole run, since a recipe's driver calls need it too.
        let _entered = self.driver.as_ref().ok_or_else(only_plans)?.enter()?;
        let Ready { planned, steps, range } = match &self.fallback {
            Some(fallback) if self.chosen.planned.takes_addresses(call).is_err() => fallback,
            _ => &self.chosen,
        };
        let _range = range.open();
        if !call.problem.has_small_outputs_alone() {
            // SAFETY: the caller keeps the contract of `launch`; the kernel takes these addresses, as
            // `takes_addresses` saw before or just now, and the device is entered.
            unsafe { planned.kernel.launch(steps, call)? };
        }
        // SAFETY: the caller keeps the contract of `launch`, and the steps are those of the problem's launches.
        unsafe { P::launch_small(&self.small.steps, call, self.small.place) }
    }
}
