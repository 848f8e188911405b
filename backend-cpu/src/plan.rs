//! Plans: the choice of a kernel and its tile, and what the plan promises.

use std::sync::Arc;

use fmha_core::backend::unsupported;
use fmha_core::quantize::ValidQuantize;
use fmha_core::sparse::{ValidChoose, ValidIndexLoss};
use fmha_core::{
    Accuracy, Call, FwdProblem, Launch, PlanOptions, PlanParts, Planned, Problem, Promises, Refusal, Result,
    ScoreSums, ValidBwd, ValidCombine, ValidFwd, Workspace,
};

use crate::CpuBackend;
use crate::backward::Backward;
use crate::choose::Choice;
use crate::combine::Combine;
use crate::forward::{Blocks, FEW_QUERIES, Forward, dots_pairs, fits_tiles};
use crate::index_loss::Loss;
use crate::isa::{BACKWARD_BLOCKS, FORWARD_BLOCKS, Isa, Kernels};
use crate::quantize::Conversion;
use crate::tasks::Pool;

/// Every kernel.
pub(crate) const KERNELS: [&str; 6] =
    ["cpu-fwd", "cpu-bwd", "cpu-combine", "cpu-choose", "cpu-quantize", "cpu-index-loss"];

/// Promises: a row's sums have a fixed order, and its maximum is its own. The forward is batch-invariant on request
/// only, since otherwise sequences of few and of many queries use two paths. In tiles of bf16 the maximum may lag,
/// unless the exact one is requested.
const PROMISES: Promises = Promises {
    deterministic: true,
    batch_invariant: true,
    row_invariant: true,
    graph_capturable: false,
    accuracy: Accuracy::Exact,
    score_sums: ScoreSums::F32,
};

/// The largest tile side: scratch stays within a few megabytes a thread.
const MAX_BLOCK: usize = 1024;

/// Refuses keys that arrive during the call: in host memory nothing fills them meanwhile.
pub(crate) fn takes(problem: &impl Problem, kernel: &str) -> Result<()> {
    problem.refuse_arrivals(kernel).map_err(|refusal| unsupported("cpu", vec![refusal]))
}

/// Refuses a problem that this backend does not compute together with a score or a mask as code, or with
/// masks as data.
///
/// # Errors
/// A tree mask, lists of keys, and a part of a larger call, whose positions these functions would get wrong.
pub(crate) fn takes_code(problem: &impl Problem, kernel: &str) -> Result<()> {
    problem.refuse_beside_code(kernel).map_err(|refusal| unsupported("cpu", vec![refusal]))
}

/// Refuses problem features that exclude small outputs.
///
/// # Errors
/// A tree mask.
pub(crate) fn takes_outputs(problem: &FwdProblem, kernel: &str) -> Result<()> {
    let Some(name) = problem.outputs.first().filter(|_| problem.cache.tree_mask) else { return Ok(()) };
    let reason = format!("{name} beside tree_mask is not in this kernel");
    Err(unsupported("cpu", vec![Refusal::new(kernel, reason)]))
}

/// Refuses, for row invariance, masks that are not a band: a row that sees equal keys by a band would have other
/// bits.
fn takes_equal_rows(problem: &FwdProblem, kernel: &'static str) -> Result<()> {
    let beside = if problem.lists.is_some() {
        "lists of keys"
    } else if problem.second.is_some() {
        "keys of two caches"
    } else if problem.walks_lists() {
        "keys in rows of bytes"
    } else if !problem.masks.is_empty() {
        "masks as data"
    } else if problem.code.mask.is_some() {
        "a mask as code"
    } else {
        return Ok(());
    };
    let reason =
        format!("row_invariant true: {beside} are summed in another order than the same keys under a band");
    Err(unsupported("cpu", vec![Refusal::new(kernel, reason)]))
}

/// A forward plan.
pub(crate) fn forward<E: Kernels + Send + Sync + 'static>(
    backend: &CpuBackend,
    engine: E,
    problem: &ValidFwd,
    options: &PlanOptions,
) -> Result<Planned<ValidFwd>> {
    if options.row_invariant {
        takes_equal_rows(problem, "cpu-fwd")?;
    }
    if problem.walks_lists() {
        return Ok(ready(backend, engine, of_lists(backend, "cpu-fwd", problem, options)?));
    }
    // A problem with a tree mask is computed row by row, which has no lagging maxima.
    let max_may_lag = backend.isa == Isa::Amx && fits_tiles(problem) && !problem.cache.tree_mask;
    let planned = plan(backend, "cpu-fwd", max_may_lag, options, |blocks| {
        vec![
            (
                "block_m",
                if blocks.may_shrink {
                    format!("{}, halved while there are fewer than 3 tasks a thread", blocks.block_m)
                } else {
                    blocks.block_m.to_string()
                },
            ),
            ("block_n", blocks.block_n.to_string()),
            ("task", "a tile of block_m queries of one head, the longest first".into()),
            (
                "arithmetic",
                match backend.isa {
                    Isa::Amx if fits_tiles(problem) => "products of bf16 tiles, f32 sums".into(),
                    Isa::Avx512Bf16 if dots_pairs(problem) => "bf16 dot products, f32 sums".into(),
                    _ => "f32, f32 sums".into(),
                },
            ),
            (
                "scales",
                match &problem.block_scales {
                    Some(scales) => format!("{}: multiplied before, as {}", scales.format, problem.dtypes.qk),
                    None => "none by blocks".into(),
                },
            ),
            (
                "rows",
                match blocks.rows_only {
                    _ if problem.asks_pairs() => {
                        "none: code and masks as data are computed over panels".into()
                    }
                    true if options.row_invariant => "every sequence, by row_invariant".into(),
                    true => "every sequence, by batch_invariant".into(),
                    false => format!("sequences of at most {FEW_QUERIES} queries, and any with a tree mask"),
                },
            ),
        ]
    })?;
    Ok(ready(backend, engine, planned))
}

/// The plan's description and tile for a problem over lists of keys.
fn of_lists(
    backend: &CpuBackend,
    kernel: &'static str,
    problem: &FwdProblem,
    options: &PlanOptions,
) -> Result<(PlanParts, Blocks)> {
    let topk = problem.lists.map_or(0, |lists| lists.topk);
    if let Some((name, value)) = options.tile.first() {
        let what =
            if problem.second.is_some() { "two caches".to_owned() } else { format!("lists of topk {topk}") };
        let reason = format!("tile {name}={value}: {what} have no tile to set (known: none)");
        return Err(unsupported("cpu", vec![Refusal::new(kernel, reason)]));
    }
    let (mut parts, blocks) = plan(backend, kernel, false, options, |_| {
        vec![
            ("task", "a token of a kv head: its query heads over its list".into()),
            ("arithmetic", "f32, f32 sums".into()),
        ]
    })?;
    // A token's bits depend on its own list alone, so both promises hold.
    (parts.promises.batch_invariant, parts.promises.row_invariant) = (true, true);
    Ok((parts, blocks))
}

/// A backward plan.
pub(crate) fn backward(
    backend: &CpuBackend,
    problem: &ValidBwd,
    options: &PlanOptions,
) -> Result<Planned<ValidBwd>> {
    if let Some(lists) = &problem.fwd.lists {
        if problem.dbias.is_some() {
            let reason = format!("dbias beside indices of topk {} is not in this kernel", lists.topk);
            return Err(unsupported("cpu", vec![Refusal::new("cpu-bwd", reason)]));
        }
        return Ok(ready(backend, backend.engine, of_lists(backend, "cpu-bwd", problem.fwd(), options)?));
    }
    let planned = plan(backend, "cpu-bwd", false, options, |blocks| {
        vec![
            ("block_m", blocks.block_m.to_string()),
            ("block_n", blocks.block_n.to_string()),
            ("task", "a kv head, or a part of one where there are fewer heads than threads".into()),
            ("arithmetic", "f32, f32 sums".into()),
        ]
    })?;
    Ok(ready(backend, backend.engine, planned))
}

/// A combine plan.
pub(crate) fn combine(backend: &CpuBackend, options: &PlanOptions) -> Result<Planned<ValidCombine>> {
    let planned = plan(backend, "cpu-combine", false, options, |_| vec![("task", "64 rows".into())])?;
    Ok(ready(backend, backend.engine, planned))
}

/// A plan that chooses keys.
pub(crate) fn choose(backend: &CpuBackend, options: &PlanOptions) -> Result<Planned<ValidChoose>> {
    let planned = plan(backend, "cpu-choose", false, options, |_| vec![("task", "8 tokens".into())])?;
    Ok(ready(backend, backend.engine, planned))
}

/// A plan that brings a tensor to a format with scales by blocks.
pub(crate) fn quantize(backend: &CpuBackend, options: &PlanOptions) -> Result<Planned<ValidQuantize>> {
    let planned = plan(backend, "cpu-quantize", false, options, |_| vec![("task", "a head".into())])?;
    Ok(ready(backend, backend.engine, planned))
}

/// A plan of an indexer's loss.
pub(crate) fn index_loss(backend: &CpuBackend, options: &PlanOptions) -> Result<Planned<ValidIndexLoss>> {
    let details =
        |_| vec![("task", "all tokens".into()), ("arithmetic", "f64 by definition, one thread".into())];
    let planned = plan(backend, "cpu-index-loss", false, options, details)?;
    Ok(ready(backend, backend.engine, planned))
}

/// The plan's description and tile. `max_may_lag`: the running maximum may lag unless the caller asks for the
/// true one.
fn plan(
    backend: &CpuBackend,
    kernel: &'static str,
    max_may_lag: bool,
    options: &PlanOptions,
    details: impl FnOnce(Blocks) -> Vec<(&'static str, String)>,
) -> Result<(PlanParts, Blocks)> {
    let refuse = |reason: String| Err(unsupported("cpu", vec![Refusal::new(kernel, reason)]));
    if let Some(wanted) = options.kernel.as_deref().filter(|&wanted| wanted != kernel) {
        let reason = if KERNELS.contains(&wanted) {
            format!("it computes something else: this problem is {kernel}'s")
        } else {
            format!("no such kernel (known: {})", KERNELS.join(", "))
        };
        return Err(unsupported("cpu", vec![Refusal::new(wanted, reason)]));
    }
    let panel = backend.engine.query_panel();
    let mut blocks = if kernel == "cpu-bwd" { BACKWARD_BLOCKS } else { FORWARD_BLOCKS };
    let has_tile = !matches!(kernel, "cpu-combine" | "cpu-choose" | "cpu-quantize" | "cpu-index-loss");
    for (name, value) in &options.tile {
        let (side, unit) = match name.as_str() {
            "block_m" if has_tile => (&mut blocks.block_m, panel),
            "block_n" if has_tile => (&mut blocks.block_n, 4),
            _ if !has_tile => {
                return refuse(format!("tile {name}={value}: this kernel has no tile to set (known: none)"));
            }
            _ => return refuse(format!("tile {name}={value} is unknown (known: block_m, block_n)")),
        };
        match value.parse::<usize>() {
            Ok(size) if size.is_multiple_of(unit) && (1..=MAX_BLOCK).contains(&size) => {
                *side = size;
                blocks.may_shrink &= name != "block_m";
            }
            _ => {
                return refuse(format!("{name} {value} is not a multiple of {unit} in {unit}..={MAX_BLOCK}"));
            }
        }
    }
    let mut promises = PROMISES;
    if kernel == "cpu-fwd" {
        blocks.rows_only = options.batch_invariant;
        promises.batch_invariant = options.batch_invariant;
        promises.row_invariant = options.row_invariant;
        blocks.exact_max = options.accuracy == Accuracy::Exact;
        if max_may_lag && !blocks.rows_only && !blocks.exact_max {
            promises.accuracy = Accuracy::Fast;
        }
    }
    let mut facts = vec![("isa", backend.isa.to_string()), ("threads", backend.threads().to_string())];
    facts.extend(details(blocks));
    if let Err(refusal) = options.check_promises(kernel, &promises) {
        return Err(unsupported("cpu", vec![refusal]));
    }
    let parts = PlanParts {
        kernel: kernel.to_owned(),
        details: facts,
        steps: vec![],
        refusals: vec![],
        is_fallback: false,
        workspace: Workspace::NONE,
        promises,
    };
    Ok((parts, blocks))
}

/// A plan that runs `engine`, for which its tiles were chosen.
fn ready<P: Problem, E>(backend: &CpuBackend, engine: E, (parts, blocks): (PlanParts, Blocks)) -> Planned<P>
where
    Ready<E>: Launch<P> + 'static,
{
    let launch = Ready { engine, threads: Arc::clone(&backend.threads), blocks };
    Planned { parts, launch: Box::new(launch) }
}

/// The executable part of a plan: kernels, threads, and a tile that suits the kernels.
struct Ready<E> {
    engine: E,
    threads: Arc<Pool>,
    blocks: Blocks,
}

impl<E: Kernels + Send + Sync> Launch<ValidFwd> for Ready<E> {
    unsafe fn launch(&self, call: &Call<'_, ValidFwd>) -> Result<()> {
        let Call { problem, args, spans, .. } = *call;
        self.engine.forward(&Forward { problem, args, spans, blocks: self.blocks }, self.threads.get()?)
    }
}

impl<E: Kernels + Send + Sync> Launch<ValidBwd> for Ready<E> {
    unsafe fn launch(&self, call: &Call<'_, ValidBwd>) -> Result<()> {
        let Call { problem, args, spans, .. } = *call;
        self.engine.backward(&Backward { problem, args, spans, blocks: self.blocks }, self.threads.get()?)
    }
}

impl<E: Kernels + Send + Sync> Launch<ValidCombine> for Ready<E> {
    unsafe fn launch(&self, call: &Call<'_, ValidCombine>) -> Result<()> {
        let Call { problem, args, .. } = *call;
        self.engine.combine(&Combine { problem, args }, self.threads.get()?)
    }
}

impl<E: Kernels + Send + Sync> Launch<ValidChoose> for Ready<E> {
    unsafe fn launch(&self, call: &Call<'_, ValidChoose>) -> Result<()> {
        let Call { problem, args, .. } = *call;
        Choice { problem, args }.run(&self.engine, self.threads.get()?)
    }
}

impl<E: Kernels + Send + Sync> Launch<ValidQuantize> for Ready<E> {
    unsafe fn launch(&self, call: &Call<'_, ValidQuantize>) -> Result<()> {
        let Call { problem, args, .. } = *call;
        Conversion { problem, args }.run(self.threads.get()?)
    }
}

impl<E: Kernels + Send + Sync> Launch<ValidIndexLoss> for Ready<E> {
    unsafe fn launch(&self, call: &Call<'_, ValidIndexLoss>) -> Result<()> {
        let Call { problem, args, .. } = *call;
        Loss { problem, args }.run()
    }
}
