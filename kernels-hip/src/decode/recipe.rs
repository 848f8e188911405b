//! The recipe of the decode kernels: a launch before that updates the cache, the kernel, the launch behind.

use fmha_core::abi::FwdParams;
use fmha_core::fields::Fields;
use fmha_core::source::KernelSource;
use fmha_core::tune::TileOptions;
use fmha_core::{
    Call, FwdArgs, FwdProblem, PlanOptions, ProblemError, Promises, Refusal, ResourceUsage, Result, ValidFwd,
    bind, check_addresses,
};
use fmha_gpu::{
    AnyAddress, Choice, Kernel, Launch, Launches, Recipe, Steps, Tiled, Tunable, deterministic_rows, exactly,
    settle_fwd,
};

use crate::cache_update::launch as update;
use crate::cdna_decode::CdnaDecodeParams;
use crate::decode::{Parts, merge_threads};
use crate::device::{Amd, Device, DeviceFacts, launch, lay_out};
use crate::paths::LoadPath;

/// A kernel whose pieces of work are some rows and a part of the keys.
pub(crate) trait Split: Copy + std::fmt::Debug + Send + Sync + 'static {
    /// Its name in plans and refusals.
    const NAME: &'static str;
    /// The launch behind.
    const MERGE: &'static str;
    /// What its entry includes.
    const HEADER: &'static str;
    /// Whether it runs on RDNA, not on CDNA.
    const IS_RDNA: bool;
    /// How it computes.
    type Tile: Fields;

    /// Whether it computes `problem` on `device`, and in which parts.
    ///
    /// # Errors
    /// The field that it does not take, and its number.
    fn accept(problem: &FwdProblem, device: Device, options: &PlanOptions) -> Result<Self, Refusal>;

    /// How it computes.
    fn tile(&self) -> Self::Tile;

    /// Its pieces of work.
    fn parts(&self) -> &Parts;

    /// The first launch.
    fn source(&self) -> KernelSource;

    /// Threads of a workgroup of the first launch.
    fn num_threads(&self) -> u32;

    /// Workgroups of the first launch.
    fn workgroups(&self) -> u64;

    /// How Q, K and V are read.
    fn load(&self) -> LoadPath;

    /// The kernel that takes any address, where it is another one.
    fn for_any_address(&self) -> Option<Self>;

    /// What both launches read.
    fn params(&self, problem: &FwdProblem, args: &FwdArgs<'_>, fwd: &FwdParams) -> CdnaDecodeParams;

    /// The rows that a plan prints.
    fn details(&self, problem: &FwdProblem) -> Vec<(&'static str, String)>;
}

/// Wide loads of Q, K and V begin on dwords.
const DWORD: u64 = 4;

/// The forward of short queries over long caches, split over the keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decode<K> {
    chosen: Option<Chosen<K>>,
}

impl<K> Default for Decode<K> {
    fn default() -> Self {
        Self { chosen: None }
    }
}

#[derive(Clone, Copy, Debug)]
struct Chosen<K> {
    kernel: K,
    device: Device,
    /// Whether a part has so many keys whatever else is in the call.
    is_batch_invariant: bool,
}

impl<K: Split> Decode<K> {
    /// What is launched, and what it promises.
    fn choice<V: Amd>(chosen: Chosen<K>, problem: &ValidFwd) -> Choice<Kernel<ValidFwd, V>> {
        let kernel = chosen.kernel;
        let main = launch(K::NAME, kernel.source(), kernel.workgroups(), kernel.num_threads());
        let update = update::launch_before(problem);
        let (parts, arch) = (kernel.parts(), chosen.device.arch);
        let merge = launch(K::MERGE, parts.merge_source(arch), parts.rows, merge_threads(arch));
        Choice {
            kernel: Kernel::new(Self { chosen: Some(chosen) }),
            launches: Launches::new(update, main, [merge]),
            workspace: update::workspace(problem, parts.workspace_bytes()),
            // A row's keys have one order in each part, and its parts too; tiles and parts begin at its first key.
            promises: Promises { batch_invariant: chosen.is_batch_invariant, ..deterministic_rows() },
            details: kernel.details(problem),
        }
    }
}

impl<V: Amd, K: Split> Recipe<ValidFwd, V> for Decode<K> {
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
        let (kernel, tile_from) = settle_fwd(K::NAME, problem, facts, options, set)?;
        let chosen = Chosen { kernel, device: facts.device, is_batch_invariant: options.batch_invariant };
        let mut choice = Self::choice(chosen, problem);
        choice.details.insert(1, tile_from.detail());
        Ok(choice)
    }

    fn lay_out(&self, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        lay_out(self.chosen.map(|chosen| chosen.device), launch, usage);
    }

    fn takes_addresses(&self, call: &Call<'_, ValidFwd>) -> Result<(), ProblemError> {
        let Some(chosen) = self.chosen else { return Ok(()) };
        let (problem, args) = (call.problem, call.args);
        let loads = if chosen.kernel.load() == LoadPath::Element { 1 } else { DWORD };
        // Turned queries lie in the workspace.
        let turned = problem.cache.rotary.is_some();
        // A tensor without rows may lie anywhere.
        let has_keys = problem.shape_k().seq > 0;
        // RDNA reads pieces of codes from any byte.
        let of_cache = if K::IS_RDNA && problem.cache.dtype.is_some() { 1 } else { loads };
        let operands = [
            ("q", args.q.as_ptr() as u64, loads, !turned),
            ("k", args.k_slice().as_ptr() as u64, of_cache, has_keys),
            ("v", args.v_slice().as_ptr() as u64, of_cache, has_keys),
        ];
        check_addresses(K::NAME, operands)
    }

    fn for_any_address(&self, problem: &ValidFwd) -> AnyAddress<ValidFwd, V> {
        let other = self
            .chosen
            .and_then(|chosen| Some(Chosen { kernel: chosen.kernel.for_any_address()?, ..chosen }));
        match other {
            None => AnyAddress::Itself,
            Some(other) => {
                AnyAddress::Other(Box::new(Self::choice(other, problem)), "the same kernel by elements")
            }
        }
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidFwd>) -> Result<()> {
        let Chosen { kernel, .. } = fmha_gpu::chosen(self.chosen, K::NAME)?;
        let [merge] = exactly(steps.after())?;
        let whole = bind::fwd_params(call.problem, call.args);
        // SAFETY: the caller's promise; the workspace is as large as the plan said.
        let fwd = unsafe { update::run(steps, call, &whole, kernel.parts().workspace_bytes())? };
        let mut params = kernel.params(call.problem, call.args, &fwd);
        // SAFETY: both kernels take one CdnaDecodeParams, whose size they assert; core saw that its memory covers the
        // problem, and the workspace is as large as the plan said.
        unsafe {
            steps.main().launch(&mut [(&raw mut params).cast()], call.stream)?;
            merge.launch(&mut [(&raw mut params).cast()], call.stream)
        }
    }

    fn tunable(&self) -> Option<&dyn Tunable<ValidFwd, V>> {
        Some(self)
    }
}

impl<V: Amd, K: Split> Tiled<ValidFwd, V> for Decode<K> {
    type Tile = K::Tile;

    const HEADERS: &'static [&'static str] = &[K::HEADER];

    fn runs_on(&self, facts: &DeviceFacts) -> bool {
        facts.device.arch.is_rdna() == K::IS_RDNA
    }

    fn table_tiles(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Vec<K::Tile>, Refusal> {
        let own = PlanOptions::default();
        let options = options.kernel.iter().fold(own, |own, name| own.kernel(name.clone()));
        K::accept(problem, facts.device, &options).map(|chosen| vec![chosen.tile()])
    }
}
