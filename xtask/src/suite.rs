//! `cargo xtask test`: the steps of a run, and the parts that a whole run can be cut into.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::doc_tests;
use crate::kernels::ROWS;
use crate::platforms;
use crate::python;
use crate::setup;
use crate::step::{Step, Took, run_all, table};
use crate::tally::Tally;

/// How much to test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Part of the tests that takes two minutes after the build, for use before a commit.
    Quick,
    /// Part of the tests that CI runs.
    Test,
    /// All tests, or part `index` (from 1) of `count` parts.
    All { index: usize, count: usize },
}

impl Extent {
    /// Parses the words behind `test`.
    pub(crate) fn parse(words: &[&str]) -> Result<Self, String> {
        match words {
            [] => Ok(Self::Test),
            ["--quick"] => Ok(Self::Quick),
            ["--all"] => Ok(Self::All { index: 1, count: 1 }),
            ["--all", "--part", part] => {
                let numbers = part.split_once('/').map(|(i, n)| (i.parse(), n.parse()));
                match numbers {
                    Some((Ok(index), Ok(count))) if (1..=count).contains(&index) => {
                        Ok(Self::All { index, count })
                    }
                    _ => Err(format!("part `{part}` is not I/N with I from 1 to N")),
                }
            }
            _ => {
                Err(format!("test {}: there is --quick, and --all, and --part I/N with it", words.join(" ")))
            }
        }
    }
}

/// Programs that take longest, by package or target: they start first, so that none runs alone at the end.
const LONGEST: [&str; 11] = [
    "conformance",
    "candle_door",
    "fmha_cpu",
    "emulated_amd",
    "cuda sm_90a",
    "silicon",
    "planted",
    "compiles",
    "modelled",
    "resources",
    "command",
];

/// Builds, runs the steps, and prints counts and seconds.
///
/// # Errors
/// The number of failures.
pub(crate) fn run(extent: Extent) -> Result<(), String> {
    let start = Instant::now();
    // Compilers and Python packages are fetched while Cargo builds, which needs neither.
    let compilers = std::thread::spawn(setup::run);
    let python = (extent != Extent::Quick).then(|| std::thread::spawn(python::environment));

    let (built, building) =
        Took::of("building", start, || if extent == Extent::Quick { build_quick() } else { build() });
    let ((compilers, python), waiting) = Took::of("waiting for downloads", start, || {
        let python =
            python.map(|set_up| set_up.join().unwrap_or_else(|_| Err("its set-up panicked".to_owned())));
        (compilers.join(), python)
    });
    let mut took = vec![building, waiting];
    let mut environment = compilers.map_err(|_| "the compilers' set-up panicked")?;
    // Tests share compiled kernels with each other and with the next run.
    let cache = setup::target().join("test-cache");
    environment.push(("FMHA_CACHE_DIR".to_owned(), cache.display().to_string()));
    if matches!(extent, Extent::All { .. }) {
        // Fuzz tests run for minutes, and otherwise for a second.
        environment.push(("FMHA_FUZZ_SECONDS".to_owned(), "60".to_owned()));
        // Every model of transformers is compiled; CI compiles one.
        environment.push(("FMHA_TRANSFORMERS".to_owned(), "all".to_owned()));
        // A thousand calls of other libraries' suites are made, and otherwise 24.
        environment.push(("FMHA_PEERS".to_owned(), "64:1000".to_owned()));
    } else {
        // Property tests have a fixed seed, so that equal text has equal results. Only `--all` draws new cases.
        environment.push(("PROPTEST_RNG_SEED".to_owned(), "65".to_owned()));
    }
    let mut tally = Tally::default();
    let steps = match built {
        Ok(programs) => {
            let mut all = steps(&programs, extent, &environment, &mut tally);
            match python {
                Some(Ok(python)) => {
                    python.absent().for_each(|line| tally.say(&line));
                    all.insert(0, python.tests());
                }
                Some(Err(reason)) => tally.say(&format!("absent: bindings/python: {reason}")),
                None => {}
            }
            dealt(all, extent)
        }
        Err(reason) => {
            eprintln!("error: {reason}");
            tally.failed += 1;
            Vec::new()
        }
    };
    took.extend(run_all(&steps, start, &environment, &mut tally));
    println!("{}", table(&mut took, start.elapsed().as_secs_f64()));
    println!("{tally}");
    if tally.failed == 0 { Ok(()) } else { Err(format!("{} failed", tally.failed)) }
}

/// Runs only the Python package's tests, on a library built for them.
///
/// # Errors
/// The number of failures, or why no test can run.
pub(crate) fn python_alone() -> Result<(), String> {
    let start = Instant::now();
    let (python, building) = Took::of("set-up and building", start, || {
        let python = python::environment()?;
        setup::loudly(Command::new(env!("CARGO")).args(["build", "--release", "-p", "fmha-py"]))?;
        Ok::<_, String>(python)
    });
    let python = python?;
    let mut tally = Tally::default();
    python.absent().for_each(|line| tally.say(&line));
    let mut took = vec![building];
    took.extend(run_all(&[python.tests()], start, &[], &mut tally));
    println!("{}", table(&mut took, start.elapsed().as_secs_f64()));
    println!("{tally}");
    if tally.failed == 0 { Ok(()) } else { Err(format!("{} failed", tally.failed)) }
}

/// Test program: the target's name, its file, and its package's folder.
struct Program {
    name: String,
    path: String,
    folder: PathBuf,
}

/// Command that builds every target of a workspace but its benchmarks, which lints check. It is one
/// invocation: another selection of packages would have other features, and build crates twice.
const BUILD: [&str; 8] = [
    "build",
    "--release",
    "--workspace",
    "--lib",
    "--bins",
    "--tests",
    "--examples",
    "--message-format=json-render-diagnostics",
];

/// Builds both workspaces in parallel, because each ends with a chain of crates that one processor builds.
fn build() -> Result<Vec<Program>, String> {
    let (own, emulators) = std::thread::scope(|scope| {
        let emulators = scope.spawn(|| built(&mut setup::cargo_of_emulators(&BUILD)));
        let own = built(Command::new(env!("CARGO")).args(BUILD));
        (own, emulators.join().unwrap_or_else(|_| Err("the emulators' build panicked".to_owned())))
    });
    let mut programs = own?;
    programs.extend(emulators?);
    Ok(programs)
}

/// Builds the crates' own tests, the repository's rules, the command, and the emulators that `--emulate` opens.
fn build_quick() -> Result<Vec<Program>, String> {
    let mut own = Command::new(env!("CARGO"));
    own.args(["test", "--no-run", "--release", "--workspace", "--lib", "--bins"]);
    // Building the command's own tests makes Cargo build the command too.
    own.args(["--test", "laws", "--test", "command", "--message-format=json-render-diagnostics"]);
    let mut programs = built(&mut own)?;
    programs.retain(|program| program.name != "cli command");
    setup::build_emulators()?;
    Ok(programs)
}

fn built(cargo: &mut Command) -> Result<Vec<Program>, String> {
    let output = cargo.stderr(Stdio::inherit()).output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err("cargo build does not end well".to_owned());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let programs: Vec<Program> = text.lines().filter_map(program).collect();
    if programs.is_empty() { Err("cargo build names no test program".to_owned()) } else { Ok(programs) }
}

/// Test program that a line of Cargo's messages describes.
fn program(line: &str) -> Option<Program> {
    let field = |name: &str| {
        let (_, rest) = line.split_once(&format!("\"{name}\":\""))?;
        rest.split('"').next().map(str::to_owned)
    };
    let profile = line.split_once("\"profile\":{").and_then(|(_, rest)| rest.split('}').next())?;
    let is_test = profile.contains("\"test\":true") && !line.contains("\"kind\":[\"bench\"]");
    let path = field("executable").filter(|_| is_test)?;
    let folder = Path::new(&field("manifest_path")?).parent()?.to_owned();
    let target = line.split_once("\"target\":{").and_then(|(_, rest)| rest.split_once("\"name\":\""));
    let name = target.and_then(|(_, rest)| rest.split('"').next()).unwrap_or("?");
    let package = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Some(Program { name: format!("{package} {name}"), path, folder })
}

/// The part of the CPU's battery in a quick run: ten seconds of four minutes.
const SLICE: &str = "1/50";

/// Step for a program of tests with other NVRTCs: with the newest, and in a whole run with the oldest too.
fn by_other_compilers(
    all: bool,
    program: &str,
    words: &[String],
    folder: &Path,
    tally: &mut Tally,
) -> Vec<Step> {
    let mut steps = Vec::new();
    let oldest = all.then_some(setup::OLDEST_NVRTC);
    for other in std::iter::once(setup::NEWEST_NVRTC).chain(oldest) {
        match other.library() {
            Ok(library) => {
                let environment = vec![("FMHA_NVRTC".to_owned(), library.display().to_string())];
                let name = format!("{program} by {}", other.folder);
                let step = Step::tests(name, words.to_vec(), folder.to_owned()).at_least(1);
                steps.push(step.with(environment));
            }
            Err(reason) => tally.say(&format!("absent: kernels by {}: {reason}", other.folder)),
        }
    }
    steps
}

fn steps(
    programs: &[Program],
    extent: Extent,
    environment: &[(String, String)],
    tally: &mut Tally,
) -> Vec<Step> {
    let all = matches!(extent, Extent::All { .. });
    let mut steps = Vec::new();
    for Program { name, path, folder } in programs {
        // The batteries' counts are in the output of passing tests, which `--show-output` prints.
        let mut words = vec![path.clone(), "--show-output".to_owned()];
        words.extend(all.then(|| "--include-ignored".to_owned()));
        if name.ends_with(" folded") && extent != Extent::Quick {
            steps.extend(by_other_compilers(all, name, &words, folder, tally));
        }
        if name.ends_with(" resources") && extent != Extent::Quick {
            let words: Vec<_> = words.iter().cloned().chain(["blackwell".to_owned()]).collect();
            steps.extend(by_other_compilers(all, name, &words, folder, tally));
        }
        steps.push(Step::tests(name.clone(), words, folder.clone()));
    }
    let fmha = setup::target().join("release/fmha").display().to_string();
    let is_quick = extent == Extent::Quick;
    if is_quick {
        let words = ["conformance", "--backend", "cpu", "--deal", SLICE].map(str::to_owned);
        let words = std::iter::once(fmha.clone()).chain(words).collect();
        steps.push(Step::battery(format!("cpu, part {SLICE}"), words, Vec::new()));
        tally.say("absent: all but a slice of the tests: cargo xtask test");
    } else {
        steps.push(doc_tests::step(environment, tally));
        steps.extend(platforms::steps(all, tally));
    }
    for row in ROWS.iter() {
        let cases = match extent {
            Extent::Quick => row.in_quick,
            Extent::Test => row.in_test,
            Extent::All { .. } => row.in_all,
        };
        if cases.deal == 0 && (extent != Extent::Test || row.left_out().is_none()) {
            continue;
        }
        if row.backend == "cuda" && !environment.iter().any(|(name, _)| name == "FMHA_NVRTC") {
            tally.say(&format!("absent: {}: it needs NVRTC", row.name()));
            continue;
        }
        if row.backend == "rocm" && !setup::clang_is_there() {
            tally.say(&format!("absent: {}: it needs {}", row.name(), setup::CLANG));
            continue;
        }
        steps.extend(row.step(cases, &fmha));
        if let Some(line) = row.left_out().filter(|_| extent == Extent::Test) {
            tally.say(&line);
        }
    }
    let place =
        |step: &Step| LONGEST.iter().position(|name| step.name.contains(name)).unwrap_or(LONGEST.len());
    steps.sort_by_key(place);
    steps
}

/// Steps of a run of this extent.
fn dealt(steps: Vec<Step>, extent: Extent) -> Vec<Step> {
    match extent {
        Extent::Quick | Extent::Test => steps,
        Extent::All { index, count } => part(steps, index, count),
    }
}

/// Every `count`-th element from number `index` (from 1) on: the parts are disjoint and together complete.
fn part<T>(all: Vec<T>, index: usize, count: usize) -> Vec<T> {
    all.into_iter().enumerate().filter(|(at, _)| at % count == index - 1).map(|(_, one)| one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_and_together_all() {
        let all: Vec<u32> = (0..23).collect();
        let mut found: Vec<u32> = (1..=4).flat_map(|index| part(all.clone(), index, 4)).collect();
        found.sort_unstable();
        assert_eq!(found, all);
    }

    #[test]
    fn a_part_outside_the_whole_is_refused() {
        assert_eq!(Extent::parse(&["--all", "--part", "2/3"]), Ok(Extent::All { index: 2, count: 3 }));
        for part in ["0/3", "4/3", "1", "a/b", "1/0"] {
            assert!(Extent::parse(&["--all", "--part", part]).is_err_and(|text| text.contains(part)));
        }
        assert!(Extent::parse(&["--part", "1/2"]).is_err());
        assert_eq!(Extent::parse(&["--quick"]), Ok(Extent::Quick));
        assert!(Extent::parse(&["--quick", "--all"]).is_err());
    }

    #[test]
    fn a_line_of_cargos_messages_names_a_test_program_and_its_folder() {
        let line = |test: &str, executable: &str| {
            format!(
                "{{\"reason\":\"compiler-artifact\",\"manifest_path\":\"/a/core/Cargo.toml\",\"target\":{{\"kind\":\
                 [\"test\"],\"name\":\"laws\"}},\"profile\":{{\"opt_level\":\"3\",\"test\":{test}}},\"executable\":{executable}}}"
            )
        };
        let found = program(&line("true", "\"/a/target/laws-1\"")).unwrap();
        assert_eq!((found.name.as_str(), found.path.as_str()), ("core laws", "/a/target/laws-1"));
        assert_eq!(found.folder, Path::new("/a/core"));
        assert!(program(&line("false", "\"/a/target/laws-1\"")).is_none());
        assert!(program(&line("true", "null")).is_none());
    }
}
