//! The recipe of the forward kernels, `cdna_fwd` and `rdna_fwd`: one launch, a tile of queries to a piece of work.

use fmha_core::fields::Fields;
use fmha_core::source::KernelSource;
use fmha_core::tune::TileOptions;
use fmha_core::{
    Call, FwdArgs, FwdProblem, PlanOptions, ProblemError, Refusal, ResourceUsage, Result, ValidFwd,
    Workspace, bind,
};
use fmha_gpu::{
    AnyAddress, Choice, Kernel, Launch, Launches, Recipe, Steps, Tiled, Tunable, deterministic_rows,
    settle_fwd,
};

use crate::device::{Amd, Device, DeviceFacts, launch};
use crate::forward::params;
use crate::paths::LoadPath;

/// A kernel whose pieces of work are tiles of queries, with all of their keys.
pub(crate) trait Whole: Copy + std::fmt::Debug + Send + Sync + 'static {
    /// Its name in plans and refusals.
    const NAME: &'static str;
    /// The kernel's name where a launch before widens the cache.
    const WIDENED: &'static str;
    /// What its entry includes.
    const HEADER: &'static str;
    /// Whether it runs on RDNA, not on CDNA.
    const IS_RDNA: bool;
    /// How it computes.
    type Tile: Fields;

    /// Whether it computes `problem` on `device`, and with which tile.
    ///
    /// # Errors
    /// The field that it does not take, and its number.
    fn accept(problem: &FwdProblem, device: Device, options: &PlanOptions) -> Result<Self, Refusal>;

    /// How it computes.
    fn tile(&self) -> Self::Tile;

    /// How Q, K and V are read.
    fn load(&self) -> LoadPath;

    /// What is compiled.
    fn source(&self) -> KernelSource;

    /// Threads of a workgroup.
    fn num_threads(&self) -> u32;

    /// Tiles: `block_m` queries of a head.
    fn num_tiles(&self, problem: &FwdProblem) -> u64;

    /// Workgroups for so many tiles where the device holds `places` of them.
    fn workgroups(&self, tiles: u64, places: u64) -> u64;

    /// Takes the operands where they lie, or names the first that it does not: addresses are not known when a plan is
    /// made.
    ///
    /// # Errors
    /// The operand, its address and the alignment that it lacks.
    fn takes_addresses(&self, problem: &FwdProblem, args: &FwdArgs<'_>) -> Result<(), ProblemError>;

    /// The kernel that takes any address, where it is another one.
    fn for_any_address(&self, problem: &FwdProblem) -> Option<Self>;

    /// The rows that a plan prints.
    fn details(&self) -> Vec<(&'static str, String)>;
}

/// The forward on matrix instructions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forward<K> {
    chosen: Option<(K, Device)>,
}

impl<K> Default for Forward<K> {
    fn default() -> Self {
        Self { chosen: None }
    }
}

impl<K: Whole> Forward<K> {
    /// The kernel on a device.
    pub(crate) fn of(chosen: K, device: Device) -> Self {
        Self { chosen: Some((chosen, device)) }
    }

    /// What is launched, and what it promises.
    pub(crate) fn choice<V: Amd>(
        chosen: K,
        problem: &ValidFwd,
        device: Device,
    ) -> Choice<Kernel<ValidFwd, V>> {
        let main = launch(K::NAME, chosen.source(), chosen.num_tiles(problem), chosen.num_threads());
        Choice {
            kernel: Kernel::new(Self::of(chosen, device)),
            launches: Launches::from(main),
            workspace: Workspace::NONE,
            // A row is one wave's, its keys in one order, and every tile's maxima are taken.
            promises: deterministic_rows(),
            details: chosen.details(),
        }
    }
}

impl<V: Amd, K: Whole> Recipe<ValidFwd, V> for Forward<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }

    fn choose(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Kernel<ValidFwd, V>>, Refusal> {
        let set = |tile: &TileOptions| K::accept(problem, facts.device, &options.clone().tile(tile.clone()));
        let (chosen, tile_from) = settle_fwd(K::NAME, problem, facts, options, set)?;
        let mut choice = Self::choice(chosen, problem, facts.device);
        choice.details.insert(1, tile_from.detail());
        Ok(choice)
    }

    fn lay_out(&self, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        let Some((chosen, device)) = self.chosen else { return };
        launch.tiles_at_once = device.workgroups_at_once(usage, launch.grid.threads);
        let workgroups = chosen.workgroups(launch.tiles, launch.tiles_at_once);
        launch.grid.groups = u32::try_from(workgroups).unwrap_or(u32::MAX);
    }

    fn takes_addresses(&self, call: &Call<'_, ValidFwd>) -> Result<(), ProblemError> {
        self.chosen.map_or(Ok(()), |(chosen, _)| chosen.takes_addresses(call.problem, call.args))
    }

    fn for_any_address(&self, problem: &ValidFwd) -> AnyAddress<ValidFwd, V> {
        let other = self.chosen.and_then(|(chosen, device)| Some((chosen.for_any_address(problem)?, device)));
        match other {
            None => AnyAddress::Itself,
            Some((other, device)) => {
                let choice = Self::choice(other, problem, device);
                AnyAddress::Other(Box::new(choice), "the same kernel by elements")
            }
        }
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidFwd>) -> Result<()> {
        let mut params = params(call.problem, &bind::fwd_params(call.problem, call.args));
        // SAFETY: the kernel takes one CdnaParams, whose size it asserts; core saw that its memory covers the problem.
        unsafe { steps.main().launch(&mut [(&raw mut params).cast()], call.stream) }
    }

    fn tunable(&self) -> Option<&dyn Tunable<ValidFwd, V>> {
        Some(self)
    }
}

impl<V: Amd, K: Whole> Tiled<ValidFwd, V> for Forward<K> {
    type Tile = K::Tile;

    const HEADERS: &'static [&'static str] = &[K::HEADER];

    fn runs_on(&self, facts: &DeviceFacts) -> bool {
        facts.device.arch.is_rdna() == K::IS_RDNA
    }

    fn table_tiles(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        _: &PlanOptions,
    ) -> Result<Vec<K::Tile>, Refusal> {
        K::accept(problem, facts.device, &PlanOptions::default()).map(|chosen| vec![chosen.tile()])
    }
}
