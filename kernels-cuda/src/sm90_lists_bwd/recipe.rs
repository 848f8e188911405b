//! The backward over lists of keys by wgmma, for latent rows on Hopper.

use fmha_core::bwd_workspace::BwdWorkspace;
use fmha_core::error::{Refusal, Result};
use fmha_core::spec::BwdSpec;
use fmha_core::tune::TileOptions;
use fmha_core::{Accuracy, PlanOptions, Promises, ValidBwd, Workspace};
use fmha_gpu::{About, Choice, Grid, Kernel, Launch, Launches, Operand, Stage, Steps};

use crate::nvidia::{BwdCall, DeviceFacts, Nvidia};
use crate::sm80_bwd::recipe::too_many_tiles;
use crate::sm80_lists_bwd::recipe::{Around, alignment, launch, workspace_of};
use crate::sm90_lists_bwd::{self as text, NAME};

/// The kernel, with the workspace that its launches need.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sm90ListsBwd {
    workspace: BwdWorkspace,
}

impl<V: Nvidia> Kernel<ValidBwd, V> for Sm90ListsBwd {
    type Tile = ();

    fn about() -> About<ValidBwd> {
        About { takes_lists: true, ..About::new(NAME) }
    }

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        crate::sm90::recipe::needs(facts)
    }

    fn fit(
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        _: &TileOptions,
    ) -> Result<(), Refusal> {
        let refuse = |reason: String| Refusal::new(NAME, reason);
        text::accepts(problem)?;
        for (option, is_wanted) in
            [("deterministic", options.deterministic), ("batch_invariant", options.batch_invariant)]
        {
            if is_wanted {
                return Err(refuse(format!("{option} true: dK and dV of a key are added in no order")));
            }
        }
        let smem_bytes = text::smem_bytes(&BwdSpec::of(problem));
        facts.has_room_for(&NAME, smem_bytes, text::CTAS.cast_signed()).map_err(refuse)?;
        options.refuse_tile(NAME)
    }

    fn plan(
        (): (),
        problem: &ValidBwd,
        facts: &DeviceFacts,
        _: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |reason: String| Refusal::new(NAME, reason);
        let spec = BwdSpec::of(problem);
        let workspace = workspace_of(problem).map_err(refuse)?;
        let ctas = text::ctas(problem).ok_or_else(|| refuse(too_many_tiles(problem.fwd().dims)))?;
        let Around { stats, finish, dsink } = Around::of(problem, &spec, facts).map_err(refuse)?;
        let main = Launch {
            stage: Stage::Main,
            kernel: NAME,
            source: text::main(&spec),
            grid: Grid::new(ctas, text::NUM_THREADS),
            shared_bytes: text::smem_bytes(&spec).unsigned_abs(),
            tiles: ctas.into(),
            tiles_at_once: facts.num_sms.into(),
        };
        Ok(Choice {
            kernel: Self { workspace },
            launches: Launches::new([stats], main, [finish].into_iter().chain(dsink)),
            workspace: Workspace { bytes: workspace.bytes, zeroed_bytes: workspace.bytes },
            promises: Promises {
                // Sums of dK and dV are in global memory, in arbitrary order.
                deterministic: false,
                batch_invariant: false,
                row_invariant: false,
                graph_capturable: true,
                accuracy: Accuracy::Exact,
                score_sums: facts.score_sums.of(problem.fwd().dtypes.qk),
            },
            details: vec![
                (
                    "tile",
                    format!("{} heads of a token x 64 entries, by clusters of {}", text::HEADS, text::CTAS),
                ),
                (
                    "sums",
                    "dQ in registers, dK and dV in memory, in no order; scores computed once".to_owned(),
                ),
            ],
        })
    }

    fn alignment(&self, problem: &ValidBwd, operand: Operand) -> u64 {
        alignment(text::COPY_BYTES.into(), problem, operand)
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &BwdCall<'_>) -> Result<()> {
        // SAFETY: the caller keeps the contract of `launch`.
        unsafe { launch::<V>(self.workspace, steps, call) }
    }
}
