//! A plan's launches, compiled: what a plan of a GPU backend keeps, and how it runs.

use std::ffi::c_void;
use std::ops::Deref;
use std::sync::Arc;

use fmha_core::cache::{Module, only_plans};
use fmha_core::{Call, Error, Problem, ProblemError, Result};

use crate::driver::Driver;
use crate::ranges::Range;
use crate::recipe::{Grid, Kernel, Vendor};

/// One launch.
pub struct Step<D: Driver> {
    /// Absent, for the reason that is said, where there was no compiler.
    pub(crate) module: Result<Arc<Module<D::Kernel>>, String>,
    pub(crate) grid: Grid,
    pub(crate) range: Range,
    /// What the recipe keeps of it from call to call.
    pub kept: D::Kept,
}

impl<D: Driver> Step<D> {
    /// Queues it.
    ///
    /// # Safety
    /// As [`Driver::launch`].
    ///
    /// # Errors
    /// What the driver said, or why there is no kernel.
    pub unsafe fn launch(&self, arguments: &mut [*mut c_void], stream: u64) -> Result<()> {
        let module = self.module.as_ref().map_err(|why| Error::NoDevice(why.clone()))?;
        if self.grid.groups == 0 {
            return Ok(());
        }
        let _range = self.range.open();
        // SAFETY: the caller's promise.
        unsafe { D::launch(module.loaded()?, self.grid, arguments, stream) }
    }
}

/// The steps of a plan, in the stages of its recipe's [`Launches`](crate::Launches).
pub struct Steps<D: Driver> {
    all: Arc<[Step<D>]>,
    /// Those before it are another recipe's.
    first: usize,
    main: usize,
}

impl<D: Driver> Steps<D> {
    /// `all`, of which the kernel itself is the one at `main`.
    pub(crate) fn new(all: Vec<Step<D>>, main: usize) -> Self {
        Self { all: all.into(), first: 0, main }
    }

    /// The first step, which prepares the operands of a recipe that another one is made of, and the steps of that one.
    ///
    /// # Errors
    /// Both counts: a plan that begins with the kernel itself.
    pub fn split_first(&self) -> Result<(&Step<D>, Self)> {
        let [first, ..] = self.before() else {
            let text = format!("plan has {} steps, and its kernel is the first", self.len());
            return Err(ProblemError::new("plan", text).into());
        };
        Ok((first, Self { all: Arc::clone(&self.all), first: self.first + 1, main: self.main }))
    }

    /// What prepares the operands.
    #[must_use]
    pub fn before(&self) -> &[Step<D>] {
        &self.all[self.first..self.main]
    }

    /// The kernel itself.
    #[must_use]
    pub fn main(&self) -> &Step<D> {
        &self.all[self.main]
    }

    /// What completes the results.
    #[must_use]
    pub fn after(&self) -> &[Step<D>] {
        &self.all[self.main + 1..]
    }
}

impl<D: Driver> Deref for Steps<D> {
    type Target = [Step<D>];

    fn deref(&self) -> &[Step<D>] {
        &self.all[self.first..]
    }
}

/// A recipe's steps, by the names that it gives them: `let [prepare, main] = exactly(steps)?;`.
///
/// # Errors
/// Both counts: a plan whose steps are another recipe's.
pub fn exactly<D: Driver, const N: usize>(steps: &[Step<D>]) -> Result<&[Step<D>; N]> {
    steps.try_into().map_err(|_| {
        ProblemError::new("plan", format!("plan has {} steps, but its kernel has {N}", steps.len())).into()
    })
}

/// What a recipe has chosen for its kernel when it planned.
///
/// # Errors
/// The kernel, whose recipe is launched without a plan.
pub fn chosen<T>(choice: Option<T>, kernel: &str) -> Result<T> {
    let without = || ProblemError::new("plan", format!("plan: kernel {kernel} is launched without one"));
    choice.ok_or_else(|| without().into())
}

/// A kernel that can be launched.
pub(crate) struct Ready<P: Problem, V: Vendor> {
    pub(crate) kernel: Kernel<P, V>,
    pub(crate) steps: Steps<V::Driver>,
    /// The range around a whole run.
    pub(crate) range: Range,
}

/// What a plan launches.
pub(crate) struct Handle<P: Problem, V: Vendor> {
    pub(crate) driver: Option<Arc<V::Driver>>,
    pub(crate) chosen: Ready<P, V>,
    /// What serves operands whose addresses the chosen kernel does not take, if the caller allows it.
    pub(crate) fallback: Option<Ready<P, V>>,
}

impl<P: Problem, V: Vendor> fmha_core::Launch<P> for Handle<P, V> {
    fn takes_addresses(&self, call: &Call<'_, P>) -> Result<(), ProblemError> {
        // The fallback takes them all, and `launch` asks which of the two it is.
        if self.fallback.is_some() { Ok(()) } else { self.chosen.kernel.takes_addresses(call) }
    }

    unsafe fn launch(&self, call: &Call<'_, P>) -> Result<()> {
        // For all of the run: what a recipe asks of the driver needs the device too.
        let _entered = self.driver.as_ref().ok_or_else(only_plans)?.enter()?;
        let Ready { kernel, steps, range } = match &self.fallback {
            Some(fallback) if self.chosen.kernel.takes_addresses(call).is_err() => fallback,
            _ => &self.chosen,
        };
        let _range = range.open();
        // SAFETY: the caller's promise; the kernel takes these addresses, as `takes_addresses` saw before or just now, and the
        // device is entered.
        unsafe { kernel.launch(steps, call) }
    }
}
