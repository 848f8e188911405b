//! The loss that trains an indexer, and its gradients: launches for the scores of lists, for losses and gradients of
//! scores, and for the gradients of q, k and weights. The second is every vendor's; the others a kernel has of its own.

use std::marker::PhantomData;

use fmha_core::index_loss_params::{IndexLossSpec, index_loss_params};
use fmha_core::sparse::{IndexLossProblem, ValidIndexLoss};
use fmha_core::tune::TileOptions;
use fmha_core::{Call, PlanOptions, Promises, Refusal, Result, ScoreSums, Workspace};

use super::RowKernel;
use crate::launches::{Launch, Launches, Stage};
use crate::recipe::{About, Choice, Facts as _, Kernel, Operand, Vendor, deterministic_rows};
use crate::steps::Steps;

/// Keys of a group of lanes that alone adds to their gradients: `kKeys` of `fmha/index_loss.h`.
const KEYS: u32 = 32;

/// Launches of a kernel before and behind the one that computes losses.
#[derive(Debug)]
pub struct IndexProducts {
    /// Writes the scores of the lists' entries.
    pub scores: Launch,
    /// Gradients of q, k and weights, as far as the problem has them written, from those of the scores.
    pub gradients: Vec<Launch>,
    /// The launches add to gradients of keys in no order, so that zeros are there before.
    pub adds_to_keys: bool,
}

/// A kernel that multiplies an indexer's queries with the keys of lists. Its launches take an
/// [`IndexLossParams`](fmha_core::index_loss_params::IndexLossParams).
pub trait MultipliesLists<V: Vendor>: Copy + std::fmt::Debug + Send + Sync + 'static {
    /// Name in plans.
    const NAME: &'static str;
    /// Whether it is slow, so that it serves only a caller who allows that.
    const IS_FALLBACK: bool;

    /// Checks that the device has the kernel's instructions.
    ///
    /// # Errors
    /// What it lacks.
    fn runs_on(_: &V::Facts) -> Result<(), String> {
        Ok(())
    }

    /// Checks that the kernel computes a problem.
    ///
    /// # Errors
    /// The first field that it does not support.
    fn takes(_: &IndexLossProblem, _: &V::Facts) -> Result<(), String> {
        Ok(())
    }

    /// Alignment of an operand's address.
    fn alignment(_: Operand) -> u64 {
        1
    }

    /// The launches of a problem; with `ordered` all sums have a fixed order.
    ///
    /// # Errors
    /// A grid that no device has.
    fn launches(problem: &IndexLossProblem, facts: &V::Facts, ordered: bool)
    -> Result<IndexProducts, String>;

    /// A description of how the kernel computes, for plan reports.
    fn words() -> &'static str;

    /// How scores are summed.
    fn sums(_: &IndexLossProblem, _: &V::Facts) -> ScoreSums {
        ScoreSums::F32
    }
}

/// Every problem, a warp or wave to a row.
#[derive(Clone, Copy, Debug)]
pub struct SimtLists;

impl<V: Vendor> MultipliesLists<V> for SimtLists {
    const NAME: &'static str = "simt";
    const IS_FALLBACK: bool = true;

    fn launches(problem: &IndexLossProblem, facts: &V::Facts, _: bool) -> Result<IndexProducts, String> {
        let spec = IndexLossSpec::of(problem);
        let launch = |at, kernel, rows| facts.row_launch(at, kernel, &spec, [rows, 0]);
        let pieces = problem.rows() * u64::from(problem.topk.div_ceil(facts.row_group().1));
        let scores =
            launch((Stage::Main, <Self as MultipliesLists<V>>::NAME), RowKernel::IndexLossScores, pieces)?;
        let mut gradients = Vec::new();
        if problem.write_dq || problem.write_dweights {
            let heads = problem.rows() * u64::from(problem.num_heads);
            let at = (Stage::Gradients, "index_loss_queries");
            gradients.push(launch(at, RowKernel::IndexLossQueries, heads)?);
        }
        if problem.write_dk {
            let groups = u64::from(problem.batch) * u64::from(problem.seqlen_k.div_ceil(KEYS));
            let at = (Stage::Gradients, "index_loss_keys");
            gradients.push(launch(at, RowKernel::IndexLossKeys, groups)?);
        }
        Ok(IndexProducts { scores, gradients, adds_to_keys: false })
    }

    fn words() -> &'static str {
        "a key to a lane, heads and elements in their order, f32 sums"
    }
}

/// The recipe (checks and launches) of an indexer's loss whose products kernel `S` computes.
#[derive(Clone, Copy, Debug)]
pub struct IndexLoss<S>(PhantomData<S>);

impl<S: MultipliesLists<V>, V: Vendor> Kernel<ValidIndexLoss, V> for IndexLoss<S> {
    /// Whether all sums have a fixed order.
    type Tile = bool;

    fn about() -> About<ValidIndexLoss> {
        About { is_fallback: S::IS_FALLBACK, ..About::new(S::NAME) }
    }

    fn runs_on(facts: &V::Facts) -> Result<(), String> {
        S::runs_on(facts)
    }

    fn fit(
        problem: &ValidIndexLoss,
        facts: &V::Facts,
        options: &PlanOptions,
        _: &TileOptions,
    ) -> Result<bool, Refusal> {
        options.refuse_tile(S::NAME)?;
        S::takes(problem, facts).map_err(|text| Refusal::new(S::NAME, text))?;
        Ok(options.deterministic || options.batch_invariant)
    }

    fn plan(
        ordered: bool,
        problem: &ValidIndexLoss,
        facts: &V::Facts,
        _: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |text: String| Refusal::new(S::NAME, text);
        let IndexProducts { scores, gradients, adds_to_keys } =
            S::launches(problem, facts, ordered).map_err(refuse)?;
        let cleared = if adds_to_keys { problem.keys() } else { 0 };
        let kernel = RowKernel::IndexLoss { clears: adds_to_keys };
        let rows = [problem.rows() + cleared, 0];
        let loss = facts
            .row_launch((Stage::Loss, "index_loss"), kernel, &IndexLossSpec::of(problem), rows)
            .map_err(refuse)?;
        let dk = if adds_to_keys { "added in memory, in no order" } else { "in one order" };
        let mut details = vec![("products", S::words().to_owned())];
        if problem.write_dk {
            details.push(("sums of dK", dk.to_owned()));
        }
        Ok(Choice {
            kernel: Self(PhantomData),
            launches: Launches::new([], scores, std::iter::once(loss).chain(gradients)),
            workspace: Workspace { bytes: 4 * problem.rows() * u64::from(problem.topk), zeroed_bytes: 0 },
            promises: Promises {
                deterministic: !adds_to_keys,
                batch_invariant: !adds_to_keys,
                score_sums: S::sums(problem, facts),
                ..deterministic_rows()
            },
            details,
        })
    }

    fn alignment(&self, _: &ValidIndexLoss, operand: Operand) -> u64 {
        S::alignment(operand)
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidIndexLoss>) -> Result<()> {
        let workspace = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let mut params = index_loss_params(call.problem, call.args, workspace);
        // SAFETY: the kernels take one IndexLossParams; core saw that its memory covers the problem, and the workspace
        // is as large as the plan said.
        unsafe { steps.launch_all(&mut [(&raw mut params).cast()], call.stream) }
    }
}
