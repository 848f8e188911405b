//! Small outputs of the forward: launches after the kernel that writes O, whichever it is. They recompute scores;
//! each group of lanes handles one row or one key.

use fmha_core::masks::mask_data_params;
use fmha_core::small_outputs::{rows_bytes, small_params};
use fmha_core::spec::FwdSpec;
use fmha_core::{Call, Refusal, Result, ValidFwd, bind, cache_update};

use super::{RowKernel, tile_list};
use crate::driver::Driver;
use crate::launches::{Launch, Stage};
use crate::recipe::Facts;
use crate::steps::Step;

/// Refuses problem features that these launches do not support, in the name of the main kernel.
///
/// # Errors
/// The small output, and the feature that excludes it.
pub(crate) fn takes(problem: &ValidFwd, kernel: &str) -> Result<(), Refusal> {
    let Some(name) = problem.outputs.first() else { return Ok(()) };
    let beside = match problem.cache.dtype {
        Some(cache) => format!("dtype_cache {cache}"),
        None if problem.block_scales.is_some() => "block_scales".to_owned(),
        None if problem.cache.tree_mask => "tree_mask".to_owned(),
        None if cache_update::is_wanted(problem) => "k_new or rotary_dim".to_owned(),
        None if problem.arrivals > 0 => format!("arrivals {}", problem.arrivals),
        None if !problem.part.is_whole() => "a part of a larger call (position_q, position_k)".to_owned(),
        None => return Ok(()),
    };
    Err(Refusal::new(kernel, format!("{name} beside {beside} is not written on this device")))
}

/// The launches that write small outputs, and the bytes of workspace that they share.
///
/// # Errors
/// Lengths that make more groups than a grid has, or more bytes than a workspace.
pub(crate) fn plan(problem: &ValidFwd, facts: &impl Facts) -> Result<(Vec<Launch>, u64), String> {
    let outputs = problem.outputs;
    if outputs.is_empty() {
        return Ok((Vec::new(), 0));
    }
    let bytes = rows_bytes(problem).ok_or("the workspace would be 2^62 bytes or more")?;
    // Scores do not depend on the forward's other outputs, so the spec turns these off.
    let mut spec =
        FwdSpec { write_lse: false, write_keep_mask: false, dropout: false, ..FwdSpec::of(problem) };
    let masked = !problem.masks.is_empty();
    if masked {
        // With masks as data the launches evaluate the mask as code for each pair, except in full blocks.
        spec.code = tile_list::code_beside_lists(problem);
    }
    let dims = problem.dims;
    let heads = u64::from(dims.batch) * u64::from(dims.num_heads_q);
    let launch = |name, kernel, rows| facts.row_launch((Stage::Small, name), kernel, &spec, [rows, 0]);
    let of_rows = heads.saturating_mul(dims.seqlen_q.into());
    let mut launches = vec![launch("small_rows", RowKernel::SmallRows { masked }, of_rows)?];
    if outputs.head_max {
        launches.push(launch("small_heads", RowKernel::SmallHeads { masked }, dims.num_heads_q.into())?);
    }
    if outputs.key_sum {
        let of_keys = heads.saturating_mul(dims.seqlen_k.into());
        launches.push(launch("small_keys", RowKernel::SmallKeys { masked }, of_keys)?);
    }
    Ok((launches, bytes))
}

/// Queues the launches; `place` is the offset of their part of the workspace.
///
/// # Safety
/// As [`fmha_core::Launch::launch`]; the steps are those of [`plan`], and the workspace has its bytes from `place` on.
///
/// # Errors
/// An error of the driver.
pub(crate) unsafe fn run<D: Driver>(steps: &[Step<D>], call: &Call<'_, ValidFwd>, place: u64) -> Result<()> {
    if steps.is_empty() {
        return Ok(());
    }
    let mut params = bind::fwd_params(call.problem, call.args);
    let mut small = small_params(call.args, params.workspace.0 + place);
    let mut masks = mask_data_params(call.problem, &call.args.masks);
    let mut arguments = [(&raw mut params).cast(), (&raw mut small).cast(), (&raw mut masks).cast()];
    let count = if call.problem.masks.is_empty() { 2 } else { 3 };
    for step in steps {
        // SAFETY: the kernels take FwdParams and SmallParams, and MaskDataParams if there are masks as data; core
        // saw that the memory covers the problem, and the workspace is as large as the plan says.
        unsafe { step.launch(&mut arguments[..count], call.stream)? };
    }
    Ok(())
}
