//! `fmha explain`: the plan, or every refusal.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use fmha::{Backend, Error, Explain, Problem, Roofline};
use fmha_core::plan::Plan;
use serde_json::{Value, json};

use crate::Verdict;
use crate::failure::Failure;
use crate::mask_plot;
use crate::modelled;
use crate::options::{BackendArgs, ProblemArgs, at_least_1};
use crate::ranks::RankArgs;
use crate::setup::Setup;
use crate::target;
use crate::timing::duration;

/// Options of `fmha explain`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fmha explain -d 256 --prec bf16 --mask b   kernel, tile, promises
  fmha explain --arch sm_90a                 for a device that is not here
  fmha explain --emulate sm_90a              and what it asks of each unit of a
                                             multiprocessor, counted in the emulator
  fmha explain --kernel no-such-kernel       every kernel's refusal
  fmha explain -s 131072 --ranks 64          each way to go over 64 ranks
  fmha explain -s 4096 --mask b:512,0 --plot mask.svg
                                             the mask as tiles, in a picture

Exit status 2 when no kernel takes the problem.")]
pub(super) struct ExplainArgs {
    #[command(flatten)]
    problem: ProblemArgs,

    #[command(flatten)]
    backend: BackendArgs,

    /// Plan for this architecture (sm_80, sm_90a, sm_100a, gfx942, gfx1100) with no device: nothing is
    /// opened, nothing runs
    #[arg(long, value_name = "ARCH", conflicts_with_all = ["backend", "emulate"])]
    arch: Option<String>,

    #[command(flatten)]
    ranks: RankArgs,

    /// Plan a call that writes each row's greatest score too
    #[arg(long, help_heading = "Small outputs", conflicts_with_all = ["ranks", "emulate"])]
    row_max: bool,

    /// Plan a call that writes each head's greatest score too
    #[arg(long, help_heading = "Small outputs", conflicts_with_all = ["ranks", "emulate"])]
    head_max: bool,

    /// Plan a call that writes each key's sum of probabilities too
    #[arg(long, help_heading = "Small outputs", conflicts_with_all = ["ranks", "emulate"])]
    key_sum: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// An SVG picture of the mask as the kernel's tiles, those of the first sequence and head: whole, cut, skipped
    #[arg(long, value_name = "FILE.svg", conflicts_with_all = ["json", "ranks"])]
    plot: Option<PathBuf>,

    /// The picture's tile: queries and keys (default: the kernel's)
    #[arg(long, value_name = "Q,K", requires = "plot", value_delimiter = ',', num_args = 1..=2, value_parser = at_least_1("plot_tile"), allow_negative_numbers = true)]
    plot_tile: Vec<u32>,
}

impl ExplainArgs {
    #[cfg(test)]
    pub(super) fn problem(self) -> ProblemArgs {
        self.problem
    }

    pub(super) fn carry_out(&self, out: &mut dyn Write) -> Result<Verdict, Failure> {
        if let Some(path) = &self.plot {
            target::check("plot", path, &["svg"])?;
        }
        let mut setup = self.problem.setup(None)?;
        self.take_outputs(&mut setup)?;
        if let Some(ranks) = self.ranks.ranks {
            let options = setup.options(&self.backend.plan_options());
            write!(out, "{}", self.ranks.explain(&setup, ranks, options)?)?;
            return Ok(Verdict::Right);
        }
        let (opened, passed_over) = match &self.arch {
            None => (self.backend.open()?, self.backend.passed_over()?),
            Some(arch) => (Backend::pretend(arch)?, Arc::new([]) as Arc<[_]>),
        };
        let backend = &opened;
        let options = setup.options(&self.backend.plan_options());
        let plan = match &setup.bwd {
            None => {
                let plan = backend.plan_fwd(&setup.fwd.clone().validate()?, &options);
                plan.map(|plan| (plan.to_string(), as_json(&plan), model_of(&plan), tile_of(&plan)))
            }
            Some(bwd) => {
                let plan = backend.plan_bwd(&bwd.clone().validate()?, &options);
                plan.map(|plan| (plan.to_string(), as_json(&plan), model_of(&plan), tile_of(&plan)))
            }
        };
        let work = setup.work()?;
        let flops = if setup.bwd.is_some() { work.bwd_flops } else { work.fwd_flops };
        match plan {
            Ok((text, mut object, explain, tile)) => {
                let roofline = backend.roofline(setup.product_dtype());
                let seconds = explain.and_then(|e| e.modelled_seconds(&roofline, flops, work.fwd_bytes));
                if self.json {
                    object["device"] = backend.name().into();
                    object["flops"] = flops.into();
                    object["bytes"] = work.fwd_bytes.into();
                    object["roofline"] = roofline_json(&roofline);
                    object["modelled_seconds"] = seconds.into();
                    writeln!(out, "{object:#}")?;
                    return Ok(Verdict::Right);
                }
                writeln!(out, "{:<18} {}", "device", backend.name())?;
                for passed in &*passed_over {
                    writeln!(out, "{:<18} {}: {}", "passed over", passed.backend, passed.reason)?;
                }
                write!(out, "{text}")?;
                writeln!(
                    out,
                    "{:<18} {:.3} GFLOP over {} visible pairs",
                    "work",
                    flops as f64 / 1e9,
                    work.pairs
                )?;
                writeln!(out, "{:<18} {roofline}", "roofline")?;
                if let Some(seconds) = seconds {
                    writeln!(
                        out,
                        "{:<18} {} at the roofline, its last wave counted whole: modelled, not measured",
                        "expected time",
                        duration(seconds)
                    )?;
                }
                if let Some(path) = &self.plot {
                    let tile = match *self.plot_tile.as_slice() {
                        [] => tile,
                        [size] => [size; 2],
                        [queries, keys, ..] => [queries, keys],
                    };
                    let words = mask_plot::write(&setup, tile, path)?;
                    writeln!(out, "{:<18} {words}: {}", "mask", path.display())?;
                }
                if self.backend.emulates() {
                    modelled::write(out, &self.problem, &setup, backend, &options)?;
                }
                Ok(Verdict::Right)
            }
            Err(Error::Unsupported { backend, refusals }) => {
                if self.json {
                    let list: Vec<_> =
                        refusals.iter().map(|r| json!({ "kernel": r.kernel, "reason": r.reason })).collect();
                    writeln!(out, "{:#}", json!({ "backend": backend, "refusals": list }))?;
                } else {
                    for refusal in &refusals {
                        writeln!(out, "{:<18} {refusal}", "refused")?;
                    }
                }
                Err(Failure::wrong(format!(
                    "{backend}: {} kernels asked, none takes this problem",
                    refusals.len()
                )))
            }
            Err(other) => Err(other.into()),
        }
    }
}

impl ExplainArgs {
    /// Sets the requested small outputs, which only the forward has.
    fn take_outputs(&self, setup: &mut Setup) -> Result<(), Failure> {
        let outputs = &mut setup.fwd.outputs;
        (outputs.row_max, outputs.head_max, outputs.key_sum) = (self.row_max, self.head_max, self.key_sum);
        match (outputs.first(), &setup.bwd) {
            (Some(name), Some(_)) => {
                Err(Failure::wrong(format!("{name} goes without --backward, which is given")))
            }
            _ => Ok(()),
        }
    }
}

/// Queries and keys of the kernel's tile; 64 each for a kernel that does not report them.
fn tile_of<P: Problem>(plan: &Plan<P>) -> [u32; 2] {
    let detail = |name: &str| plan.details().iter().find(|(known, _)| *known == name).map(|(_, value)| value);
    let numbers = |text: &str| -> Vec<u32> {
        text.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
    };
    // GPUs report `128 x 64, ..`, the CPU each side by its name.
    let tile = detail("tile").map(|text| numbers(text)).unwrap_or_default();
    let sides =
        ["block_m", "block_n"].map(|name| detail(name).and_then(|text| numbers(text).first().copied()));
    [0, 1].map(|side: usize| {
        let said = sides[side].or_else(|| tile.get(side).copied());
        said.filter(|&size| size > 0).unwrap_or(64)
    })
}

/// Facts for a model of the time; `None` for a slow kernel, whose time does not follow the device's peaks.
pub(super) fn model_of<P: Problem>(plan: &Plan<P>) -> Option<Explain> {
    (!plan.is_fallback()).then(|| plan.explain().clone())
}

fn roofline_json(roofline: &Roofline) -> Value {
    json!({
        "flops_per_second": roofline.flops_per_second,
        "bytes_per_second": roofline.bytes_per_second,
        "source": roofline.source,
    })
}

fn as_json<P: Problem>(plan: &Plan<P>) -> Value {
    let details: serde_json::Map<String, Value> =
        plan.details().iter().map(|(name, value)| ((*name).to_owned(), value.as_str().into())).collect();
    let refusals: Vec<_> =
        plan.refusals().iter().map(|r| json!({ "kernel": r.kernel, "reason": r.reason })).collect();
    json!({
        "backend": plan.backend(),
        "kernel": plan.kernel(),
        "details": details,
        "refusals": refusals,
        "is_fallback": plan.is_fallback(),
        "code": plan.explain().code,
        "resources": plan.explain().resources,
        "launch": plan.explain().launch.map(|launch| json!({
            "groups": launch.groups,
            "threads": launch.threads,
            "shared_bytes": launch.shared_bytes,
            "tiles": launch.tiles,
            "tiles_at_once": launch.tiles_at_once,
            "waves": launch.waves(),
        })),
        "workspace_bytes": plan.workspace().bytes,
        "accuracy": plan.promises().accuracy.name(),
        "deterministic": plan.promises().deterministic,
        "batch_invariant": plan.promises().batch_invariant,
        "row_invariant": plan.promises().row_invariant,
        "graph_capturable": plan.promises().graph_capturable,
        "score_bits": plan.promises().score_sums.bits(),
    })
}
