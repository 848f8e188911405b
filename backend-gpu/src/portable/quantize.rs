//! `quantize`: converts a tensor to a format with scales by blocks, one block a thread. If the tensor's own scale is
//! wanted, an earlier launch finds its largest magnitude: each group of lanes writes one number.

use fmha_core::quantize::{TensorScale, ValidQuantize};
use fmha_core::quantize_params::{MOST_MAXIMA, QuantizeSpec, quantize_params};
use fmha_core::tune::TileOptions;
use fmha_core::{Call, PlanOptions, Promises, Refusal, Result, Workspace};

use super::RowKernel;
use crate::launches::{Launches, Stage};
use crate::recipe::{About, Choice, Facts as _, Kernel, Vendor, deterministic_rows};
use crate::steps::Steps;

const NAME: &str = "quantize";

/// Number of elements that a thread reads at a time when it looks for the largest magnitude.
const PIECE: u64 = 16;

/// The kernel that converts a tensor to a format with scales by blocks.
#[derive(Clone, Copy, Debug)]
pub struct Quantize {
    /// Number of groups of lanes that look for the largest magnitude; 0 if the scale is not computed.
    maxima: u64,
}

/// Number of blocks of a tensor; for NVFP4 down columns, number of pairs of blocks.
fn units(problem: &ValidQuantize) -> u64 {
    let (scales, spec) = (problem.of_scales(), QuantizeSpec::of(problem));
    let columns = if spec.along_dim || spec.pairs_of_rows { 1 } else { problem.format.elems_per_byte() };
    let rows = u64::from(scales.batch) * u64::from(scales.seq) * u64::from(scales.head);
    rows * u64::from(scales.dim.div_ceil(columns))
}

impl<V: Vendor> Kernel<ValidQuantize, V> for Quantize {
    type Tile = ();

    fn about() -> About<ValidQuantize> {
        About::new(NAME)
    }

    fn fit(_: &ValidQuantize, _: &V::Facts, options: &PlanOptions, _: &TileOptions) -> Result<(), Refusal> {
        options.refuse_tile(NAME)
    }

    fn plan(
        (): (),
        problem: &ValidQuantize,
        facts: &V::Facts,
        _: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |text: String| Refusal::new(NAME, text);
        let (group_name, group) = facts.row_group();
        let spec = QuantizeSpec::of(problem);
        let launch = |stage, name, kernel, rows| {
            facts.row_launch((stage, name), kernel, &spec, [rows, 0]).map_err(refuse)
        };
        let groups = units(problem).div_ceil(group.into());
        let main = launch(Stage::Main, NAME, RowKernel::Quantize, groups)?;
        let mut before = Vec::new();
        let mut details = vec![("blocks", format!("{} of a thread each", problem.of_scales().num_elems()))];
        let mut maxima = 0;
        if problem.tensor_scale == TensorScale::Written {
            let shape = problem.shape;
            let rows = u64::from(shape.batch) * u64::from(shape.seq) * u64::from(shape.head);
            let pieces = rows * u64::from(shape.dim).div_ceil(PIECE);
            maxima = pieces.div_ceil(group.into()).clamp(1, MOST_MAXIMA);
            before.push(launch(Stage::Prepare, "quantize_maxima", RowKernel::QuantizeMaxima, maxima)?);
            before.push(launch(Stage::Prepare, "quantize_scale", RowKernel::QuantizeScale, 1)?);
            details.push(("tensor scale", format!("largest magnitude of {maxima} times {group_name}")));
        }
        Ok(Choice {
            kernel: Self { maxima },
            launches: Launches::new(before, main, []),
            workspace: Workspace { bytes: 4 * maxima, zeroed_bytes: 0 },
            promises: Promises { row_invariant: true, ..deterministic_rows() },
            details,
        })
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidQuantize>) -> Result<()> {
        let workspace = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let mut params = quantize_params(call.problem, call.args, (workspace, self.maxima));
        // SAFETY: the kernels take one QuantizeParams; core saw that its memory covers the problem, and the workspace
        // is as large as the plan said.
        unsafe { steps.launch_all(&mut [(&raw mut params).cast()], call.stream) }
    }
}
