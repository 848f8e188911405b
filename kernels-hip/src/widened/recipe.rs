//! The recipe of a forward kernel on a cache that a first launch converts to Q's type.

use fmha_core::tune::TileOptions;
use fmha_core::{Call, FwdProblem, PlanOptions, Refusal, ResourceUsage, Result, ValidFwd, Workspace, bind};
use fmha_gpu::{
    About, AnyAddress, Choice, Facts as _, Kernel, Launch, Operand, Stage, Steps, TileFrom, settle,
};

use crate::device::{Amd, DeviceFacts, launch, needs_unit, refuse};
use crate::forward::params;
use crate::forward::recipe::{Forward, Whole};
use crate::paths::LoadPath;
use crate::widened::{NUM_THREADS, Places, WIDEN, num_workgroups, wide_problem, widen};

/// The converted cache in the workspace, and the kernel that reads it there.
#[derive(Clone, Debug)]
pub(crate) struct Widened<K> {
    reader: Forward<K>,
    wide: ValidFwd,
    places: Places,
    tile_from: TileFrom,
}

impl<V: Amd, K: Whole> Kernel<ValidFwd, V> for Widened<K> {
    type Tile = Self;

    fn about() -> About<ValidFwd> {
        About { rows_of: K::NAME, reads_cache_scales: true, ..About::new(K::WIDENED) }
    }

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        needs_unit(facts.device.arch, K::IS_RDNA)
    }

    /// Uses the tile of the problem with a 16-bit cache, measured or from the table.
    fn fit(
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        _: &TileOptions,
    ) -> Result<Self, Refusal> {
        let refuse = |reason: String| Refusal::new(K::WIDENED, reason);
        let Some(twin) = problem.over_wide_cache() else {
            refuse!(K::WIDENED, "dtype_cache: K and V are {} already", problem.dtypes.qk);
        };
        let valid = |problem: FwdProblem| {
            problem.validate().map_err(|error| refuse(format!("the cache in 16 bits: {error}")))
        };
        let (wide, twin) = (valid(wide_problem(K::WIDENED, twin.clone())?)?, valid(twin)?);
        let set = |problem: &ValidFwd, tile: &TileOptions| {
            K::accept(problem, facts.device, &options.clone().tile(tile.clone()))
        };
        let of_twin = |tile: &TileOptions| Ok((set(&twin, tile)?, set(&wide, tile)?));
        let ((of_twin, mut kernel), tile_from) = settle(&K::tiles(), &twin, facts, options, of_twin)
            .map_err(|refusal: Refusal| refuse(format!("the cache in 16 bits: {}", refusal.reason)))?;
        if of_twin.load() == LoadPath::Element {
            kernel = kernel.for_any_address(&wide).unwrap_or(kernel);
        }
        if kernel.load() != of_twin.load() {
            refuse!(
                K::WIDENED,
                "rows are read by {:?}, and of the cache in 16 bits by {:?}",
                kernel.load(),
                of_twin.load()
            );
        }
        let places = Places::of(K::WIDENED, problem)?;
        Ok(Self { reader: Forward { kernel, list: None }, wide, places, tile_from })
    }

    fn plan(
        kernel: Self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let Self { reader, wide, places, tile_from } = &kernel;
        let mut choice = <Forward<K> as Kernel<ValidFwd, V>>::plan(reader.kernel, wide, facts, options)?;
        let (stored, bytes) = (problem.stored_k(), places.bytes);
        let words = format!("widened from {stored} in {bytes} bytes of the workspace, read by {}", K::NAME);
        choice.details.insert(1, tile_from.detail());
        choice.details.push(("cache", words));
        let groups = num_workgroups(problem);
        choice.launches =
            choice.launches.behind(launch(Stage::Widen, WIDEN, widen(problem), groups, NUM_THREADS));
        choice.workspace = Workspace { bytes, zeroed_bytes: 0 };
        Ok(choice.map(|_| kernel))
    }

    fn lay_out(&self, facts: &DeviceFacts, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        match launch.stage {
            Stage::Main => self.reader.lay_out(facts.device, launch, usage),
            _ => facts.lay_out(launch, usage),
        }
    }

    fn alignment(&self, problem: &ValidFwd, operand: Operand) -> u64 {
        // The converting launch reads K and V by elements, at any address, so only the forward kernel's other
        // operands count.
        self.reader.kernel.alignment(problem, operand)
    }

    fn for_any_address(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> AnyAddress<ValidFwd, V> {
        let other = self.reader.kernel.for_any_address(&self.wide);
        let other = other.map(|other| Self { reader: Forward { kernel: other, list: None }, ..self.clone() });
        AnyAddress::by_element::<Self>(other, problem, facts, options)
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidFwd>) -> Result<()> {
        let mut whole = bind::fwd_params(call.problem, call.args);
        let cache = self.places.cache(call.problem, whole.workspace.0);
        let mut cache = cache.scaled(call.problem, call.args);
        let mut params = params(&self.wide, &cache.forward(call.problem, &whole));
        // SAFETY: the kernels take FwdParams and WidenedCache, and CdnaParams, whose sizes they assert; core saw
        // that their memory covers the problem, and that the workspace with the converted cache is as large as the
        // plan says.
        unsafe {
            if let Some(widen) = steps.at(Stage::Widen) {
                widen.launch(&mut [(&raw mut whole).cast(), (&raw mut cache).cast()], call.stream)?;
            }
            steps.main().launch(&mut [(&raw mut params).cast()], call.stream)
        }
    }
}
