//! The recipe of the forward kernels `cdna_fwd` and `rdna_fwd`: one launch whose work items are tiles of queries,
//! and under masks as data first a launch that makes lists of tiles.

use fmha_core::fields::{Fields, knob_values};
use fmha_core::masks::mask_data_params;
use fmha_core::source::KernelSource;
use fmha_core::spec::FwdSpec;
use fmha_core::tune::TileOptions;
use fmha_core::{
    Call, FwdProblem, PlanOptions, Promises, Refusal, ResourceUsage, Result, ValidFwd, Workspace, bind,
};
use fmha_gpu::tile_list::{TileListPlan, TileOf};
use fmha_gpu::{
    About, AnyAddress, Choice, Facts as _, Kernel, Launch, Launches, Operand, Stage, Steps, Tiles,
    deterministic_rows,
};

use crate::device::{Amd, Device, DeviceFacts, launch, needs_unit};
use crate::forward::{MaskedCdnaParams, params};
use crate::paths::LoadPath;

/// A kernel whose work items are tiles of queries, each with all of its keys.
pub(crate) trait Whole: Copy + std::fmt::Debug + Send + Sync + 'static {
    /// The kernel's name in plans and refusals.
    const NAME: &'static str;
    /// The kernel's name in plans where a launch before converts the cache.
    const WIDENED: &'static str;
    /// Header that the kernel's entry includes.
    const HEADER: &'static str;
    /// Whether the kernel runs on RDNA, and not on CDNA.
    const IS_RDNA: bool;
    /// Type of the kernel's tile.
    type Tile: Fields;

    /// Checks that the kernel computes `problem` on `device`, and chooses its tile.
    ///
    /// # Errors
    /// The field that it does not support, and its value.
    fn accept(problem: &FwdProblem, device: Device, options: &PlanOptions) -> Result<Self, Refusal>;

    /// Key and fields of the kernel's measured tiles.
    fn tiles() -> Tiles<ValidFwd> {
        Tiles::of_forward::<Self::Tile>(Self::NAME, const { &[Self::HEADER] })
    }

    /// The kernel's tile.
    fn tile(&self) -> Self::Tile;

    /// Number of queries and of keys of a tile.
    fn block(&self) -> [i32; 2];

    /// How Q, K and V are read.
    fn load(&self) -> LoadPath;

    /// Source text of the kernel.
    fn source(&self) -> KernelSource;

    /// Threads of a workgroup.
    fn num_threads(&self) -> u32;

    /// Number of tiles, each with `block_m` queries of a head.
    fn num_tiles(&self, problem: &FwdProblem) -> u64;

    /// Number of workgroups for this many tiles if the device holds `places` workgroups.
    fn workgroups(&self, tiles: u64, places: u64) -> u64;

    /// Bytes of which an operand's address has to be a multiple.
    fn alignment(&self, problem: &FwdProblem, operand: Operand) -> u64;

    /// The kernel variant that accepts any address; `None` if this one does.
    fn for_any_address(&self, problem: &FwdProblem) -> Option<Self>;

    /// The details that a plan prints.
    fn details(&self) -> Vec<(&'static str, String)>;
}

/// The recipe of a forward kernel on matrix instructions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forward<K> {
    /// The kernel that computes a tile.
    pub(crate) kernel: K,
    /// Lists of the tiles of keys that each tile of queries sees under masks as data.
    pub(crate) list: Option<TileListPlan>,
}

impl<K: Whole> Forward<K> {
    /// Adjusts the launch to the number of workgroups that the device holds.
    pub(crate) fn lay_out(&self, device: Device, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        launch.tiles_at_once = device.workgroups_at_once(usage, launch.grid.threads);
        let workgroups = self.kernel.workgroups(launch.tiles, launch.tiles_at_once);
        launch.grid.groups = u32::try_from(workgroups).unwrap_or(u32::MAX);
    }
}

impl<V: Amd, K: Whole> Kernel<ValidFwd, V> for Forward<K> {
    type Tile = K;

    fn about() -> About<ValidFwd> {
        About {
            computes_code: true,
            reads_masks: true,
            computes_code_beside_masks: true,
            tiles: Some(K::tiles()),
            ..About::new(K::NAME)
        }
    }

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        needs_unit(facts.device.arch, K::IS_RDNA)
    }

    fn own_tiles(
        problem: &ValidFwd,
        facts: &DeviceFacts,
        _: &PlanOptions,
    ) -> Result<Vec<TileOptions>, Refusal> {
        let kernel = K::accept(problem, facts.device, &PlanOptions::default())?;
        Ok(vec![knob_values(&kernel.tile())])
    }

    fn fit(
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        fields: &TileOptions,
    ) -> Result<K, Refusal> {
        if options.row_invariant {
            let reason = "row_invariant true: it reads no pages, and the kernel that does has all calls";
            return Err(Refusal::new(K::NAME, reason));
        }
        K::accept(problem, facts.device, &options.clone().tile(fields.clone()))
    }

    fn plan(
        kernel: K,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        _: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let (tiles, threads) = (kernel.num_tiles(problem), kernel.num_threads());
        let list = (!problem.masks.is_empty())
            .then(|| TileListPlan::new(problem, TileOf::Queries, kernel.block(), Workspace::NONE))
            .transpose()
            .map_err(|text| Refusal::new(K::NAME, text))?;
        let (list, workspace) = list.map_or((None, Workspace::NONE), |(list, bytes)| (Some(list), bytes));
        let lists = list.map(|list| list.launch(&FwdSpec::of(problem), facts));
        let mut details = kernel.details();
        details.extend(list.map(|list| ("tile lists", list.words())));
        Ok(Choice {
            launches: Launches::new(lists, launch(Stage::Main, K::NAME, kernel.source(), tiles, threads), []),
            workspace,
            // Batch invariance: one wave computes a row, over its keys in a fixed order, and updates the row's
            // maximum at every tile of keys. Lists of tiles break it: they begin with the blocks that the mask
            // hides in part for any row of a tile, so the order of a row's keys depends on the other rows.
            promises: Promises { batch_invariant: list.is_none(), ..deterministic_rows() },
            details,
            kernel: Self { kernel, list },
        })
    }

    fn lay_out(&self, facts: &DeviceFacts, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        match launch.stage {
            Stage::Main => Self::lay_out(self, facts.device, launch, usage),
            _ => facts.lay_out(launch, usage),
        }
    }

    fn alignment(&self, problem: &ValidFwd, operand: Operand) -> u64 {
        self.kernel.alignment(problem, operand)
    }

    fn for_any_address(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> AnyAddress<ValidFwd, V> {
        AnyAddress::by_element::<Self>(self.kernel.for_any_address(problem), problem, facts, options)
    }

    fn lists(&self) -> &[TileListPlan] {
        self.list.as_slice()
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidFwd>) -> Result<()> {
        let mut whole = bind::fwd_params(call.problem, call.args);
        let mut params = params(call.problem, &whole);
        let Some(plan) = self.list else {
            // SAFETY: the kernel takes one CdnaParams, whose size it asserts; core saw that its memory covers the
            // problem.
            return unsafe { steps.main().launch(&mut [(&raw mut params).cast()], call.stream) };
        };
        let masks = mask_data_params(call.problem, &call.args.masks);
        // SAFETY: core saw that the memory covers the problem, and that the workspace is as large as the plan says.
        let (list, masks) = unsafe { plan.made(steps, &mut whole, masks, &call.args.masks, call.stream)? };
        let mut masked = MaskedCdnaParams { cdna: params, masks, list };
        // SAFETY: under masks as data the kernel takes one MaskedCdnaParams; core saw that its memory covers the
        // problem.
        unsafe { steps.main().launch(&mut [(&raw mut masked).cast()], call.stream) }
    }
}
