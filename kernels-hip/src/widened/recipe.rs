//! The recipe of a forward kernel over a cache that a launch before widens.

use fmha_core::tune::TileOptions;
use fmha_core::{
    Call, FwdProblem, PlanOptions, ProblemError, Refusal, ResourceUsage, Result, ValidFwd, Workspace, bind,
};
use fmha_gpu::{AnyAddress, Choice, Kernel, Launch, Recipe, Steps, settle_fwd};

use crate::device::{Amd, Device, DeviceFacts, launch, lay_out, needs_mfma, needs_wmma, refuse};
use crate::forward::params;
use crate::forward::recipe::{Forward, Whole};
use crate::paths::LoadPath;
use crate::widened::{NUM_THREADS, Places, WIDEN, num_workgroups, wide_problem, widen};

/// The cache in the workspace, and the kernel that reads it there.
#[derive(Clone, Debug)]
pub(crate) struct Widened<K> {
    chosen: Option<Chosen<K>>,
}

#[derive(Clone, Debug)]
struct Chosen<K> {
    kernel: K,
    device: Device,
    wide: ValidFwd,
    places: Places,
}

impl<K> Default for Widened<K> {
    fn default() -> Self {
        Self { chosen: None }
    }
}

impl<K: Whole> Widened<K> {
    /// What is launched, and what it promises.
    fn choice<V: Amd>(chosen: Chosen<K>, problem: &ValidFwd) -> Choice<Kernel<ValidFwd, V>> {
        let before = launch(WIDEN, widen(problem), num_workgroups(problem), NUM_THREADS);
        let mut choice = Forward::choice::<V>(chosen.kernel, &chosen.wide, chosen.device);
        let words = format!(
            "widened from {} in {} bytes of the workspace, read by {}",
            problem.stored_k(),
            chosen.places.bytes,
            K::NAME
        );
        choice.details.push(("cache", words));
        Choice {
            launches: choice.launches.behind(before),
            workspace: Workspace { bytes: chosen.places.bytes, zeroed_bytes: 0 },
            kernel: Kernel::new(Self { chosen: Some(chosen) }),
            ..choice
        }
    }
}

impl<V: Amd, K: Whole> Recipe<ValidFwd, V> for Widened<K> {
    fn name(&self) -> &'static str {
        K::WIDENED
    }

    fn rows_of(&self) -> &'static str {
        K::NAME
    }

    fn choose(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Kernel<ValidFwd, V>>, Refusal> {
        let refuse = |reason: String| Refusal::new(K::WIDENED, reason);
        match K::IS_RDNA {
            true => needs_wmma(facts.device.arch, K::WIDENED)?,
            false => needs_mfma(facts.device.arch, K::WIDENED)?,
        }
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
        // The tile is the twin's, which was measured or is the table's.
        let of_twin = |tile: &TileOptions| Ok((set(&twin, tile)?, set(&wide, tile)?));
        let ((of_twin, mut kernel), tile_from) = settle_fwd(K::NAME, &twin, facts, options, of_twin)
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
        let mut choice = Self::choice(Chosen { kernel, device: facts.device, wide, places }, problem);
        choice.details.insert(1, tile_from.detail());
        Ok(choice)
    }

    fn lay_out(&self, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        let Some(chosen) = &self.chosen else { return };
        if launch.kernel == WIDEN {
            lay_out(Some(chosen.device), launch, usage);
        } else {
            Recipe::<ValidFwd, V>::lay_out(&Forward::of(chosen.kernel, chosen.device), launch, usage);
        }
    }

    fn takes_addresses(&self, call: &Call<'_, ValidFwd>) -> Result<(), ProblemError> {
        // K and V are read by elements, wherever they lie.
        self.chosen.as_ref().map_or(Ok(()), |chosen| chosen.kernel.takes_addresses(call.problem, call.args))
    }

    fn for_any_address(&self, problem: &ValidFwd) -> AnyAddress<ValidFwd, V> {
        let other = self.chosen.as_ref().and_then(|chosen| {
            Some(Chosen { kernel: chosen.kernel.for_any_address(&chosen.wide)?, ..chosen.clone() })
        });
        match other {
            None => AnyAddress::Itself,
            Some(other) => {
                AnyAddress::Other(Box::new(Self::choice(other, problem)), "the same kernel by elements")
            }
        }
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidFwd>) -> Result<()> {
        let chosen = fmha_gpu::chosen(self.chosen.as_ref(), K::WIDENED)?;
        let (widen, left) = steps.split_first()?;
        let mut whole = bind::fwd_params(call.problem, call.args);
        let mut cache = chosen.places.cache(call.problem, whole.workspace.0);
        let mut params = params(&chosen.wide, &cache.forward(call.problem, &whole));
        // SAFETY: the kernels take FwdParams and WidenedCache, and CdnaParams, whose sizes they assert; core saw that their memory
        // covers the problem, and that the workspace, in which the widened cache lies, is as large as the plan said.
        unsafe {
            widen.launch(&mut [(&raw mut whole).cast(), (&raw mut cache).cast()], call.stream)?;
            left.main().launch(&mut [(&raw mut params).cast()], call.stream)
        }
    }
}
