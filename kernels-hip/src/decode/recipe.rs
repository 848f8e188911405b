//! The recipe of the decode kernels: a launch that updates the cache, the kernel, and the launch that merges the
//! parts.

use fmha_core::abi::FwdParams;
use fmha_core::fields::{Fields, knob_values};
use fmha_core::lists::list_params;
use fmha_core::second::two_caches_params;
use fmha_core::source::KernelSource;
use fmha_core::tune::TileOptions;
use fmha_core::{Call, FwdArgs, FwdProblem, PlanOptions, Promises, Refusal, Result, ValidFwd, Workspace};
use fmha_gpu::{
    About, AnyAddress, Choice, Kernel, Launches, Operand, Stage, Steps, Tiles, deterministic_rows, update,
};

use crate::cdna_decode::{CdnaDecodeParams, ListDecodeParams, ScaledDecodeParams, TwoDecodeParams};
use crate::decode::{Parts, merge_threads};
use crate::device::{Amd, Device, DeviceFacts, launch, needs_unit};
use crate::paths::LoadPath;
use crate::rows::UPDATE;

/// A kernel whose work items are some rows and a part of the keys.
pub(crate) trait Split: Copy + std::fmt::Debug + Send + Sync + 'static {
    /// Name of the kernel in plans and refusals.
    const NAME: &'static str;
    /// Name of the launch that merges the parts.
    const MERGE: &'static str;
    /// Header that the kernel's entry includes.
    const HEADER: &'static str;
    /// Whether the kernel runs on RDNA, and not on CDNA.
    const IS_RDNA: bool;
    /// Tile of the kernel.
    type Tile: Fields;

    /// Checks that the kernel computes `problem` on `device`, and chooses its parts.
    ///
    /// # Errors
    /// The field that it does not support, and its value.
    fn accept(problem: &FwdProblem, device: Device, options: &PlanOptions) -> Result<Self, Refusal>;

    /// Tile of the kernel.
    fn tile(&self) -> Self::Tile;

    /// Work items, each with some rows and a part of the keys.
    fn parts(&self) -> &Parts;

    /// Source of the first launch.
    fn source(&self) -> KernelSource;

    /// Threads of a workgroup of the first launch.
    fn num_threads(&self) -> u32;

    /// Workgroups of the first launch.
    fn workgroups(&self) -> u64;

    /// Way of loading Q, K and V.
    fn load(&self) -> LoadPath;

    /// The kernel variant that accepts any address; `None` if this one does.
    fn for_any_address(&self) -> Option<Self>;

    /// Arguments of both launches.
    fn params(&self, problem: &FwdProblem, args: &FwdArgs<'_>, fwd: &FwdParams) -> CdnaDecodeParams;

    /// The details that a plan prints.
    fn details(&self, problem: &FwdProblem) -> Vec<(&'static str, String)>;
}

/// Alignment in bytes of the addresses that wide loads of Q, K and V need.
const DWORD: u64 = 4;

/// The recipe for short queries over long caches, whose keys are split.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decode<K>(K);

/// Workspace that a kernel needs for its parts.
fn workspace_of_parts(kernel: &impl Split) -> Workspace {
    Workspace { bytes: kernel.parts().workspace_bytes(), zeroed_bytes: 0 }
}

impl<V: Amd, K: Split> Kernel<ValidFwd, V> for Decode<K> {
    type Tile = K;

    fn about() -> About<ValidFwd> {
        let tiles = Tiles::of_forward::<K::Tile>(K::NAME, const { &[K::HEADER] });
        About {
            tiles: Some(tiles),
            takes_lists: true,
            takes_second: true,
            reads_masks: true,
            reads_cache_rows: true,
            reads_cache_scales: true,
            ..About::new(K::NAME)
        }
    }

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        needs_unit(facts.device.arch, K::IS_RDNA)
    }

    fn own_tiles(
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Vec<TileOptions>, Refusal> {
        let own = PlanOptions::default();
        let options = options.kernel.iter().fold(own, |own, name| own.kernel(name.clone()));
        K::accept(problem, facts.device, &options).map(|kernel| vec![knob_values(&kernel.tile())])
    }

    fn fit(
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        fields: &TileOptions,
    ) -> Result<K, Refusal> {
        K::accept(problem, facts.device, &options.clone().tile(fields.clone()))
    }

    fn plan(
        kernel: K,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |text: String| Refusal::new(K::NAME, text);
        let (parts, arch) = (kernel.parts(), facts.device.arch);
        let update = update::launch_before(UPDATE, problem, facts).map_err(refuse)?;
        let main = launch(Stage::Main, K::NAME, kernel.source(), kernel.workgroups(), kernel.num_threads());
        let merge = launch(Stage::Merge, K::MERGE, parts.merge_source(arch), parts.rows, merge_threads(arch));
        Ok(Choice {
            launches: Launches::new(update, main, [merge]),
            workspace: update::workspace(problem, workspace_of_parts(&kernel)).map_err(refuse)?,
            // Row invariance: a row's keys have a fixed order in each part, and so have its parts; tiles and parts
            // begin at its first key. In such a plan a part has a fixed number of keys and P's scale is one
            // constant for all lengths. Tiles of which a row sees nothing leave its numbers unchanged.
            promises: Promises {
                batch_invariant: options.batch_invariant,
                // The promise is not made for lists, since no pair of calls over lists is tested.
                row_invariant: parts.row_invariant && !problem.walks_lists(),
                ..deterministic_rows()
            },
            details: kernel.details(problem),
            kernel: Self(kernel),
        })
    }

    fn alignment(&self, problem: &ValidFwd, operand: Operand) -> u64 {
        // A tensor without rows is never read, so its address may be anything.
        let has_keys = problem.shape_k().seq > 0;
        // RDNA reads pieces of codes from any byte.
        let reads_bytes = K::IS_RDNA && problem.cache.dtype.is_some();
        let matters = match operand {
            // With a rotary embedding, kernels read rotated queries from the workspace.
            Operand::Q => problem.cache.rotary.is_none(),
            Operand::K | Operand::V => has_keys && !reads_bytes,
            Operand::SecondK | Operand::SecondV => {
                let has_keys = problem.second.is_some_and(|second| second.alone(problem).shape_k().seq > 0);
                has_keys && !reads_bytes
            }
            _ => false,
        };
        if matters && self.0.load() != LoadPath::Element { DWORD } else { 1 }
    }

    fn for_any_address(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> AnyAddress<ValidFwd, V> {
        // Only the slow fallback kernel reads rows of bytes one by one.
        if problem.cache.rows.is_some() {
            return AnyAddress::Fallback;
        }
        AnyAddress::by_element::<Self>(self.0.for_any_address(), problem, facts, options)
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidFwd>) -> Result<()> {
        // SAFETY: the caller keeps the contract of `launch`; the workspace is as large as the plan said.
        let fwd = unsafe { update::run(steps, call, workspace_of_parts(&self.0))? };
        let decode = self.0.params(call.problem, call.args, &fwd);
        let mut two =
            two_caches_params(call.problem, call.args).map(|caches| TwoDecodeParams { decode, caches });
        let mut scaled = ScaledDecodeParams::of(call.problem, call.args, &decode);
        let mut params = ListDecodeParams { decode, lists: list_params(call.problem, &call.args.seq) };
        let argument = match (two.as_mut(), scaled.as_mut()) {
            (Some(two), _) => (&raw mut *two).cast(),
            (None, Some(scaled)) => (&raw mut *scaled).cast(),
            (None, None) => (&raw mut params).cast(),
        };
        for step in [steps.at(Stage::Main), steps.at(Stage::Merge)].into_iter().flatten() {
            // SAFETY: both kernels take one TwoDecodeParams, or one ListDecodeParams, or one ScaledDecodeParams, or the
            // CdnaDecodeParams at its start; core saw that its memory covers the problem, and the workspace is as large
            // as the plan says.
            unsafe { step.launch(&mut [argument], call.stream)? };
        }
        Ok(())
    }
}
