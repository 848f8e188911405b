//! `simt`: computes every problem, one row at a time, except gradients of biases and functions over lists of keys. It
//! is correct for all problems and fast for none.

use fmha_core::bwd_workspace::{BwdRows, BwdWorkspace};
use fmha_core::lists::list_params;
use fmha_core::masks::mask_data_params;
use fmha_core::scale_params::block_scale_params;
use fmha_core::second::two_caches_params;
use fmha_core::spec::{BwdSpec, FwdSpec};
use fmha_core::tune::TileOptions;
use fmha_core::{Call, PlanOptions, Refusal, Result, ValidBwd, ValidFwd, Workspace, bind, cache_update};

use super::{BlockValues, RowKernel, update};
use crate::driver::Driver;
use crate::launches::{Launches, Stage};
use crate::recipe::{About, Choice, Facts as _, Kernel, Vendor, deterministic_rows};
use crate::steps::Steps;

const NAME: &str = "simt";
/// Most shares of the query rows; each share has its own sums of the captured tensors' gradients.
const MOST_SHARES: u64 = 4096;

/// The forward, one row at a time.
#[derive(Clone, Copy, Debug)]
pub struct Simt;

impl<V: Vendor> Kernel<ValidFwd, V> for Simt {
    type Tile = ();

    fn about() -> About<ValidFwd> {
        About {
            computes_code: true,
            is_fallback: true,
            takes_lists: true,
            takes_second: true,
            reads_cache_rows: true,
            reads_masks: true,
            reads_block_scales: true,
            ..About::new(NAME)
        }
    }

    fn fit(problem: &ValidFwd, _: &V::Facts, options: &PlanOptions, _: &TileOptions) -> Result<(), Refusal> {
        if let Some(cache) = problem.cache.dtype {
            let text = format!("dtype_cache {cache} beside {} is not taken", problem.dtypes.qk);
            return Err(Refusal::new(NAME, text));
        }
        if problem.cache.tree_mask {
            let text = format!("tree_mask of {} queries is not taken", problem.dims.seqlen_q);
            return Err(Refusal::new(NAME, text));
        }
        if let Some(scales) = problem.block_scales.filter(|_| !problem.masks.is_empty()) {
            let text = format!("masks as data beside block_scales {} are not taken", scales.format);
            return Err(Refusal::new(NAME, text));
        }
        cache_update::takes(problem, NAME)?;
        options.refuse_tile(NAME)
    }

    fn plan((): (), problem: &ValidFwd, facts: &V::Facts, _: &PlanOptions) -> Result<Choice<Self>, Refusal> {
        let refuse = |text: String| Refusal::new(NAME, text);
        let dims = problem.dims;
        let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
        let spec = FwdSpec::of(problem);
        let kernel = match (problem.lists.is_some(), problem.masks.is_empty()) {
            _ if problem.walks_caches() => RowKernel::SimtTwoCaches,
            (true, _) => RowKernel::SimtLists,
            (_, false) => RowKernel::MaskedSimt,
            _ if problem.block_scales.is_some() => RowKernel::ScaledSimt,
            _ => RowKernel::Simt,
        };
        let main = facts.row_launch((Stage::Main, NAME), kernel, &spec, [rows, 0]).map_err(refuse)?;
        let update = update::launch_before("simt_update", problem, facts).map_err(refuse)?;
        let (group, threads) = facts.row_group();
        Ok(Choice {
            kernel: Self,
            launches: Launches::new(update, main, []),
            workspace: update::workspace(problem, Workspace::NONE).map_err(refuse)?,
            // Row invariance holds: a row's keys have a fixed order, whatever the other rows are.
            promises: deterministic_rows(),
            details: vec![("tile", format!("{group} to a row, {threads} keys at a time"))],
        })
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidFwd>) -> Result<()> {
        // SAFETY: the caller keeps the contract of `launch`; the workspace is as large as the plan said.
        let mut params = unsafe { update::run(steps, call, Workspace::NONE)? };
        let mut two = two_caches_params(call.problem, call.args);
        let mut lists = call.problem.lists.map(|_| list_params(call.problem, &call.args.seq));
        let mut masks = mask_data_params(call.problem, &call.args.masks);
        let mut scales = block_scale_params(call.problem, &call.args.score);
        let has_more = two.is_some() || lists.is_some() || scales.is_some() || !call.problem.masks.is_empty();
        let more = match (&mut two, &mut lists, &mut scales) {
            (Some(two), ..) => (&raw mut *two).cast(),
            (None, Some(lists), _) => (&raw mut *lists).cast(),
            (None, None, Some(scales)) => (&raw mut *scales).cast(),
            (None, None, None) => (&raw mut masks).cast(),
        };
        let count = if has_more { 2 } else { 1 };
        // SAFETY: the kernel takes FwdParams, and TwoCachesParams, ListParams, BlockScaleParams or MaskDataParams
        // if the problem has two caches, lists, scales by blocks or masks as data; core saw that the memory covers
        // the problem.
        unsafe { steps.main().launch(&mut [(&raw mut params).cast(), more][..count], call.stream) }
    }
}

/// The backward in two launches, with a third for gradients of tensors that the score function reads (captures), and
/// one before for the values of tensors with scales by blocks.
#[derive(Clone, Debug)]
pub struct SimtBwd(BwdWorkspace, Option<BlockValues>);

impl<V: Vendor> Kernel<ValidBwd, V> for SimtBwd {
    type Tile = ();

    fn about() -> About<ValidBwd> {
        About {
            computes_code: true,
            is_fallback: true,
            takes_lists: true,
            reads_masks: true,
            reads_block_scales: true,
            ..About::new(NAME)
        }
    }

    fn fit(problem: &ValidBwd, _: &V::Facts, options: &PlanOptions, _: &TileOptions) -> Result<(), Refusal> {
        problem.refuse_gradients_beside_lists(NAME)?;
        options.refuse_tile(NAME)
    }

    fn plan((): (), problem: &ValidBwd, facts: &V::Facts, _: &PlanOptions) -> Result<Choice<Self>, Refusal> {
        let refuse = |text: String| Refusal::new(NAME, text);
        let mut values = BlockValues::of(problem).map_err(refuse)?;
        let first = values.as_ref().map(|values| values.launch::<V>(facts)).transpose().map_err(refuse)?;
        let of_values = values.as_ref().map(|values| values.problem().clone());
        let problem = of_values.as_ref().unwrap_or(problem);
        let (rows, spec) = (BwdRows::of(problem), BwdSpec::of(problem));
        let launch = |at, kernel, rows| facts.row_launch(at, kernel, &spec, [rows, 0]).map_err(refuse);
        // Each block has one row, so no rows are padded.
        let workspace = BwdWorkspace::new(problem, 1, None, 0)
            .and_then(|workspace| workspace.with_captured(problem, rows.queries.min(MOST_SHARES)))
            .ok_or_else(|| refuse("the workspace would be 2^62 bytes or more".to_owned()))?;
        let (group, threads) = facts.row_group();
        let (captured_elems, shares) = workspace.captured();
        let (of_rows, of_stats) = match problem.fwd().masks.is_empty() {
            _ if problem.fwd().lists.is_some() => (RowKernel::SimtListsBwd, RowKernel::SimtListsStats),
            true => (RowKernel::SimtBwd, RowKernel::SimtStats),
            false => (RowKernel::MaskedSimtBwd, RowKernel::MaskedSimtStats),
        };
        let main = launch((Stage::Main, NAME), of_rows, rows.all().saturating_add(shares))?;
        let stats = launch((Stage::Prepare, "simt_bwd_stats"), of_stats, rows.queries)?;
        let captured = spec.write_dcaptured.then(|| {
            let at = (Stage::Captured, "simt_bwd_captured");
            launch(at, RowKernel::SimtCaptured, captured_elems.div_ceil(threads.into()))
        });
        let mut all = Workspace { bytes: workspace.bytes, zeroed_bytes: 0 };
        if let Some(values) = &mut values {
            all = values.behind(all).map_err(refuse)?;
        }
        let details = [("tile", format!("{group} to a row, {threads} pairs at a time"))];
        let launches = Launches::new([stats], main, captured.transpose()?);
        Ok(Choice {
            launches: first.into_iter().fold(launches, Launches::behind),
            workspace: all,
            promises: deterministic_rows(),
            details: details.into_iter().chain(values.as_ref().map(BlockValues::words)).collect(),
            kernel: Self(workspace, values),
        })
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidBwd>) -> Result<()> {
        let Some(values) = &self.1 else {
            // SAFETY: the caller keeps the contract of `launch`.
            return unsafe { self.launch_rows(steps, call) };
        };
        // SAFETY: the caller keeps the contract of `launch`.
        unsafe { values.write(steps, call)? };
        // SAFETY: the caller keeps the contract of `launch`; the values lie in the workspace, as large as the problem
        // over them requires.
        values.with(call, |over| unsafe { self.launch_rows(steps, over) })
    }
}

impl SimtBwd {
    /// Queues the launches that compute gradients, of Q, K and V without scales by blocks.
    ///
    /// # Safety
    /// As [`Kernel::launch`].
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn launch_rows<D: Driver>(&self, steps: &Steps<D>, call: &Call<'_, ValidBwd>) -> Result<()> {
        let address = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let mut params = self.0.bind(bind::bwd_params(call.problem, call.args), address);
        let fwd = call.problem.fwd();
        let mut masks = mask_data_params(fwd, &call.args.masks);
        let mut lists = list_params(fwd, &call.args.seq);
        let more = if fwd.lists.is_some() { (&raw mut lists).cast() } else { (&raw mut masks).cast() };
        let mut arguments = [(&raw mut params).cast(), more];
        let count = if fwd.masks.is_empty() && fwd.lists.is_none() { 1 } else { 2 };
        // SAFETY: every kernel takes one BwdParams, and parameters of masks or lists if the problem has them; core
        // saw that the memory covers the problem, and the workspace is as large as the plan says.
        unsafe { steps.launch_all(&mut arguments[..count], call.stream) }
    }
}
