//! The kernel `combine`, which merges partial results that the caller gives.

use fmha_core::abi::MAX_PARTS;
use fmha_core::spec::CombineSpec;
use fmha_core::tune::TileOptions;
use fmha_core::{Call, PlanOptions, Promises, Refusal, Result, ValidCombine, Workspace, bind};

use super::RowKernel;
use crate::launches::{Launches, Stage};
use crate::recipe::{About, Choice, Facts as _, Kernel, Vendor, deterministic_rows};
use crate::steps::Steps;

const NAME: &str = "combine";

/// The kernel that merges partial results.
#[derive(Clone, Copy, Debug)]
pub struct Combine;

impl<V: Vendor> Kernel<ValidCombine, V> for Combine {
    type Tile = ();

    fn about() -> About<ValidCombine> {
        About::new(NAME)
    }

    fn fit(
        problem: &ValidCombine,
        _: &V::Facts,
        options: &PlanOptions,
        _: &TileOptions,
    ) -> Result<(), Refusal> {
        options.refuse_tile(NAME)?;
        if problem.num_parts as usize > MAX_PARTS {
            let text = format!("num_parts {} is larger than {MAX_PARTS}", problem.num_parts);
            return Err(Refusal::new(NAME, text));
        }
        Ok(())
    }

    fn plan(
        (): (),
        problem: &ValidCombine,
        facts: &V::Facts,
        _: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let rows = [problem.lse_elems(), problem.shape().dim.into()];
        let spec = CombineSpec::of(problem);
        let main = facts
            .row_launch((Stage::Main, NAME), RowKernel::Combine, &spec, rows)
            .map_err(|text| Refusal::new(NAME, text))?;
        Ok(Choice {
            kernel: Self,
            launches: Launches::from(main),
            workspace: Workspace::NONE,
            // Row invariance holds: a row's parts are merged in order.
            promises: Promises { row_invariant: true, ..deterministic_rows() },
            details: Vec::new(),
        })
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidCombine>) -> Result<()> {
        let mut params = bind::combine_params(call.problem, call.args);
        // SAFETY: the kernel takes one CombineParams; core saw that its memory covers the problem.
        unsafe { steps.main().launch(&mut [(&raw mut params).cast()], call.stream) }
    }
}
