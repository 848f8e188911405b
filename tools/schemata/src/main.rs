//! Mutation testing of the host code in one build, by mutant schemata (R. Untch, A. J. Offutt, M. J. Harrold: "Mutation
//! analysis using mutant schemata", ISSTA 1993). The list of mutants is cargo-mutants' own, by `.cargo/mutants.toml`;
//! there each takes a build of its own, here all are in one, and `SCHEMATA_MUTANT=N` switches one on.
//!
//! 1. `tree`, `rewrite`: a copy of the repository in which each site asks which mutant is on; what does not compile is
//!    dropped, by where the compiler's errors point.
//! 2. `trial`: the crates' tests and the cases of `cases.txt`, each run once with no mutant on, for its
//!    seconds and for the sites that it evaluates.
//! 3. `run`: each mutant on the trials that evaluate its site, the cheapest first, until one fails.
//! 4. `report`: what became of each; survivors have a reason in `tests/evidence/mutants-host.reasons`, or are gaps.
//!
//! Results are kept in the scratch folder by a mutant's name and its file's text: a second run goes on where
//! one was ended.

mod mutant;
mod report;
mod rewrite;
mod run;
mod spread;
mod tree;
mod trial;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use mutant::Mutant;
use trial::{Measured, Trial};

const USAGE: &str = "\
usage: schemata [--of WORDS] [--shard I/N] [--again FATE] [--jobs N] [--within SECONDS]
  --of WORDS    only mutants with these words in their names (a file, a function)
  --shard I/N   part I of N
  --again FATE  those that earlier ended so (`survives`, `outlives`, `timeout`, `not reached`) and have no reason run again
  --jobs N      so many beside each other (default: the processors)
  --within SECONDS
                each with what it meets first, so long at most; what is not caught by then `outlives`
  --spread REGEX
                instead: of the battery's cases on the CPU, few that reach what all reach";

struct Options {
    of: String,
    shard: (usize, usize),
    again: Vec<String>,
    jobs: usize,
    within: f64,
    spread: Option<String>,
}

fn options() -> Option<Options> {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut options = Options {
        of: String::new(),
        shard: (1, 1),
        again: Vec::new(),
        jobs,
        within: f64::INFINITY,
        spread: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next()?;
        match word.as_str() {
            "--of" => options.of = value,
            "--again" => options.again.push(value),
            "--within" => options.within = value.parse().ok().filter(|seconds| *seconds > 0.0)?,
            "--jobs" => options.jobs = value.parse().ok().filter(|jobs| *jobs > 0)?,
            "--spread" => options.spread = Some(value),
            "--shard" => {
                let (index, count) = value.split_once('/')?;
                options.shard = (index.parse().ok()?, count.parse().ok()?);
                (1..=options.shard.1).contains(&options.shard.0).then_some(())?;
            }
            _ => return None,
        }
    }
    Some(options)
}

fn main() -> ExitCode {
    let Some(options) = options() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match carry_out(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Whether no mutant survives without a reason.
fn carry_out(options: &Options) -> Result<bool, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let root = root.canonicalize().map_err(|error| error.to_string())?;
    let scratch = root.join("target/schemata");
    let mutants = mutant::list(&root)?;
    let tree = tree::Tree::new(&root, scratch.clone());
    let (programs, left_out) = tree.build(&mutants)?;
    if let Some(filter) = &options.spread {
        return spread::print(filter, &tree.release(), mutants.len(), &scratch, options.jobs).map(|()| true);
    }

    let list = root.join("tools/schemata/cases.txt");
    let list = std::fs::read_to_string(&list).map_err(|error| format!("{}: {error}", list.display()))?;
    let mut trials = trial::tests(&programs);
    trials.extend(trial::cases(&list, &tree.release()));
    let trials = known_trials(trials, &mutants, &scratch, options.jobs)?;

    let (index, count) = options.shard;
    let chosen: Vec<(u32, &Mutant)> = (1..)
        .zip(&mutants)
        .filter(|(number, mutant)| {
            *number as usize % count == index % count && mutant.name.contains(&options.of)
        })
        .collect();
    let file = scratch.join("fates.tsv");
    let mut fates = report::read(&file, &root, &mutants, &options.again)?;
    let built: Vec<_> = chosen.iter().copied().filter(|(number, _)| !left_out.contains_key(number)).collect();
    run::run(&built, &trials, &mut fates, &file, &scratch, (options.jobs, options.within))?;
    report::print(&root, &chosen, &left_out, &fates)
}

/// Trials that pass, the quickest first, with their seconds and sites. Trials of an unchanged program keep their
/// earlier measurement.
fn known_trials(
    trials: Vec<Trial>,
    mutants: &[Mutant],
    scratch: &Path,
    jobs: usize,
) -> Result<Vec<Trial>, String> {
    let file: PathBuf = scratch.join("trials.json");
    let kept = std::fs::read(&file).ok();
    let mut known: Measured = kept.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    let stamps: Vec<u64> = trials.iter().map(trial::stamp).collect();
    trial::measure(trials, &mut known, mutants.len(), scratch, jobs);
    let text = serde_json::to_vec(&known).map_err(|error| error.to_string())?;
    std::fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    let mut well: Vec<Trial> = stamps.iter().filter_map(|stamp| known.remove(stamp)?).collect();
    well.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    Ok(well)
}
