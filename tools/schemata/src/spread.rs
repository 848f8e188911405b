//! Selection of a few cases of the CPU's battery that together evaluate, several times over, every site that the whole
//! battery evaluates. `cases.txt` was made by it.

use std::path::Path;
use std::process::Command;

use crate::trial::{self, Trial};

/// Number of chosen cases that should evaluate each site, as far as so many exist.
const TIMES: u8 = 3;

/// Prints lines for a list of cases chosen from those that match `filter`: first the case with the most sites for its
/// seconds.
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
    let lines: String = names.lines().map(|name| format!("--backend cpu --filter ^{name}$\n")).collect();
    let mut known = trial::Measured::new();
    trial::measure(trial::cases(&lines, release), &mut known, num_mutants, scratch, jobs);
    let mut open: Vec<Trial> = known.into_values().flatten().collect();
    let mut times = vec![0; num_mutants + 1];
    let new = |trial: &Trial, times: &[u8]| {
        trial.reach.iter().filter(|site| times[**site as usize] < TIMES).count() as f64 / trial.seconds
    };
    loop {
        let gains = open.iter().map(|trial| new(trial, &times)).enumerate();
        let best = gains.max_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, gain)| *gain > 0.0);
        let Some((at, gain)) = best else { break };
        let trial = open.swap_remove(at);
        for site in &trial.reach {
            times[*site as usize] = times[*site as usize].saturating_add(1);
        }
        println!("--backend cpu --filter {}", trial.filter);
        eprintln!("{gain:.0} sites a second, {:.2} s: {}", trial.seconds, trial.filter);
    }
    eprintln!("{} sites are reached", times.iter().filter(|times| **times > 0).count());
    Ok(())
}
