//! Few cases of the CPU's battery that evaluate every site that all of its cases do, several times over.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::trial::{self, Trial};

/// Of all cases every so many-th is measured, and one process runs all: no single family has so many in step.
const EVERY: usize = 11;
/// Each site is to be evaluated by so many of the chosen cases, where as many do.
const TIMES: usize = 3;

/// Prints the lines of a list of cases.
pub(crate) fn print(
    filter: &str,
    release: &Path,
    num_mutants: usize,
    scratch: &Path,
    jobs: usize,
) -> Result<(), String> {
    let mut list = Command::new(release.join("fmha"));
    list.args(["conformance", "--list", "--filter", filter]);
    let output = list.output().map_err(|error| format!("fmha: {error}"))?;
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    let whole = format!("--backend cpu --filter {filter}\n");
    let whole = trial::measured(trial::cases(&whole, release), num_mutants, scratch, 1);
    let some = names.lines().step_by(EVERY);
    let lines: String = some.map(|name| format!("--backend cpu --filter ^{name}$\n")).collect();
    let mut open = trial::measured(trial::cases(&lines, release), num_mutants, scratch, jobs);
    let mut times: BTreeMap<u32, usize> = BTreeMap::new();
    loop {
        let gain = |trial: &Trial| {
            let new =
                trial.reach.iter().filter(|site| times.get(site).is_none_or(|times| *times < TIMES)).count();
            new as f64 / trial.seconds
        };
        let best =
            open.iter().enumerate().map(|(at, trial)| (gain(trial), at)).max_by(|a, b| a.0.total_cmp(&b.0));
        let Some((gain, at)) = best.filter(|(gain, _)| *gain > 0.0) else { break };
        let trial = open.swap_remove(at);
        for site in &trial.reach {
            *times.entry(*site).or_default() += 1;
        }
        println!("--backend cpu --filter {}", trial.filter);
        eprintln!("{gain:.0} sites a second, {:.2} s: {}", trial.seconds, trial.filter);
    }
    let missing: Vec<u32> = whole
        .iter()
        .flat_map(|whole| &whole.reach)
        .filter(|site| !times.contains_key(site))
        .copied()
        .collect();
    eprintln!(
        "{} sites are reached, {} by cases that were not measured: {missing:?}",
        times.len(),
        missing.len()
    );
    Ok(())
}
