//! Plans: which kernel, how, and what it promises.

use fmha_core::backend::unsupported;
use fmha_core::{
    Accuracy, BwdPlan, CombinePlan, FwdPlan, Plan, PlanOptions, PlanParts, Promises, Refusal, Result,
    ScoreSums, ValidBwd, ValidCombine, ValidFwd, Workspace,
};

use crate::CpuBackend;
use crate::forward::{Blocks, FEW_QUERIES, dots_pairs, fits_tiles};
use crate::isa::{BACKWARD_BLOCKS, FORWARD_BLOCKS, Isa, Kernels};

/// Every kernel.
pub(crate) const KERNELS: [&str; 3] = ["cpu-fwd", "cpu-bwd", "cpu-combine"];

/// A row's sums have one order, and the maximum is the row's own. Forward is batch-invariant on request:
/// otherwise sequences of few queries and of many are taken in two ways. In tiles of bf16 its maximum may lag, unless the
/// true one is asked for.
const PROMISES: Promises = Promises {
    deterministic: true,
    batch_invariant: true,
    graph_capturable: false,
    accuracy: Accuracy::Exact,
    score_sums: ScoreSums::F32,
};

/// The largest tile side: scratch stays within a few megabytes a thread.
const MAX_BLOCK: usize = 1024;

/// A forward plan.
pub(crate) fn forward(backend: &CpuBackend, problem: &ValidFwd, options: &PlanOptions) -> Result<FwdPlan> {
    // A tree mask is taken in rows.
    let max_may_lag = backend.isa == Isa::Amx && fits_tiles(problem) && !problem.cache.tree_mask;
    plan(backend, "cpu-fwd", problem.clone(), max_may_lag, options, |blocks| {
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
        ]
    })
}

/// A backward plan.
pub(crate) fn backward(backend: &CpuBackend, problem: &ValidBwd, options: &PlanOptions) -> Result<BwdPlan> {
    plan(backend, "cpu-bwd", problem.clone(), false, options, |blocks| {
        vec![
            ("block_m", blocks.block_m.to_string()),
            ("block_n", blocks.block_n.to_string()),
            ("task", "a kv head, or a part of one where there are fewer heads than threads".into()),
            ("arithmetic", "f32, f32 sums".into()),
        ]
    })
}

/// A combine plan.
pub(crate) fn combine(
    backend: &CpuBackend,
    problem: &ValidCombine,
    options: &PlanOptions,
) -> Result<CombinePlan> {
    plan(backend, "cpu-combine", problem.clone(), false, options, |_| vec![("task", "64 rows".into())])
}

/// A plan; `max_may_lag`: the running maximum does where the true one is not asked for.
fn plan<P>(
    backend: &CpuBackend,
    kernel: &'static str,
    problem: P,
    max_may_lag: bool,
    options: &PlanOptions,
    details: impl FnOnce(Blocks) -> Vec<(&'static str, String)>,
) -> Result<Plan<P>> {
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
    for (name, value) in &options.tile {
        let (side, unit) = match name.as_str() {
            "block_m" if kernel != "cpu-combine" => (&mut blocks.block_m, panel),
            "block_n" if kernel != "cpu-combine" => (&mut blocks.block_n, 4),
            _ if kernel == "cpu-combine" => {
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
    let mut facts = vec![("isa", backend.isa.to_string()), ("threads", backend.threads.count().to_string())];
    facts.extend(details(blocks));
    let mut promises = PROMISES;
    if kernel == "cpu-fwd" {
        blocks.rows_only = options.batch_invariant;
        promises.batch_invariant = options.batch_invariant;
        blocks.exact_max = options.accuracy == Accuracy::Exact;
        if max_may_lag && !blocks.rows_only && !blocks.exact_max {
            promises.accuracy = Accuracy::Fast;
        }
        let rows = match blocks.rows_only {
            true => "every sequence, by batch_invariant".to_owned(),
            false => format!("sequences of at most {FEW_QUERIES} queries, and any with a tree mask"),
        };
        facts.push(("rows", rows));
    }
    if let Err(refusal) = options.check_promises(kernel, &promises) {
        return Err(unsupported("cpu", vec![refusal]));
    }
    let parts = PlanParts {
        problem,
        backend: backend.name.clone(),
        kernel: kernel.to_owned(),
        details: facts,
        steps: vec![],
        refusals: vec![],
        is_fallback: false,
        workspace: Workspace::NONE,
        promises,
    };
    Ok(parts.seal(&backend.id, blocks))
}

impl CpuBackend {
    /// The tile of a plan that this backend made: another's may not fit its instruction set.
    pub(crate) fn blocks_of<P>(&self, plan: &Plan<P>) -> Result<Blocks> {
        Ok(*plan.handle(&self.id, &self.name)?)
    }
}
