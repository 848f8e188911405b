//! Small mistakes made one at a time in the kernels' text: bounds, indices, signs, strides, constants,
//! saturations. Each mutant is compiled and run in emulation on a few cases that reach most of its kernel;
//! one that none of them finds is a gap in the battery, unless `evidence/mutants.reasons` says why nothing
//! can tell.
//!
//! Thousands of them take hours: `cargo xtask test --all` runs one in [`EVERY`]; with `MUTANTS=I/N` in the
//! environment it is part I of N, with `MUTANTS_OF=sm90/bwd` that of the targets alone whose files have those
//! words, with `MUTANTS_IN=softmax.cuh` that of headers whose names have those, with `MUTANTS_AGAIN=FILE`
//! those that survive in the output of an earlier run.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "planted/mod.rs"]
mod planting;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Mutex;

use fmha_conformance::Regex;
use planting::{Fate, Fault, each, is_own_process};
use serde::Deserialize;

/// A run tries one mutant in this many. As many runs one after another try all mutants.
const EVERY: usize = 40;

/// Text of one kernel, and the cases that should find a mutant of it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Target {
    folder: String,
    /// Pattern of the headers' names, from `fmha/` on.
    files: String,
    arch: String,
    /// Kernel to test; `None`: the one that a case's plan chooses.
    kernel: Option<String>,
    #[serde(default)]
    environment: BTreeMap<String, String>,
    cases: Vec<String>,
    #[serde(default)]
    nearer: BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Targets {
    target: Vec<Target>,
}

fn targets() -> Vec<Target> {
    toml::from_str::<Targets>(&beside("mutants.toml")).unwrap().target
}

/// Reads a file of this folder at run time, since lists change more often than programs.
fn beside(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

/// A case that tries a mutant, with its tile fields.
struct Trial {
    arch: String,
    case: String,
    tile: Option<String>,
}

impl Trial {
    /// Trial of a line of the list: `CASE`, or `CASE @ field=value,...`. A field `arch` chooses another architecture.
    fn of(text: &str, arch: &str, names: &[String]) -> Self {
        let (start, fields) = text.split_once(" @ ").unwrap_or((text, ""));
        let is_it = names.iter().find(|name| *name == start);
        let case = is_it.or_else(|| names.iter().find(|name| name.starts_with(start))).expect(start);
        let (of_arch, tile): (Vec<&str>, Vec<&str>) =
            fields.split(',').filter(|field| !field.is_empty()).partition(|field| field.starts_with("arch="));
        let other_arch = of_arch.first().and_then(|field| field.strip_prefix("arch="));
        Self {
            arch: other_arch.unwrap_or(arch).to_owned(),
            case: case.clone(),
            tile: (!tile.is_empty()).then(|| tile.join(",")),
        }
    }
}

impl Target {
    /// Trials for a mistake in this header.
    fn trials(&self, header: &str, names: &[String]) -> Vec<Trial> {
        let nearer =
            self.nearer.iter().filter(|(part, _)| header.contains(*part)).flat_map(|(_, cases)| cases);
        nearer.chain(&self.cases).map(|text| Trial::of(text, &self.arch, names)).collect()
    }
}

/// Replacements in lines of code outside loop heads.
const EDITS: [(&str, &str); 24] = [
    (" < ", " <= "),
    (" <= ", " < "),
    (" > ", " >= "),
    (" >= ", " > "),
    (" == ", " != "),
    (" && ", " || "),
    (" + 1", ""),
    (" - 1", ""),
    (" + ", " - "),
    (" - ", " + "),
    (" * ", " + "),
    (" / ", " * "),
    ("min(", "max("),
    ("max(", "min("),
    ("seqlen_q", "seqlen_k"),
    ("seqlen_k", "seqlen_q"),
    ("q_row", "k_row"),
    ("k_row", "q_row"),
    ("i_head_kv", "i_head"),
    (".row", ".head"),
    (".head", ".row"),
    (".lo", ".hi"),
    (".hi", ".lo"),
    ("0.f", "1.f"),
];

/// Replacements in a loop's head make one iteration less. One more would exceed an array of registers, and a compiler
/// may drop it.
const LOOP_EDITS: [(&str, &str); 2] = [(" < ", " < -1 + "), (" <= ", " < ")];

fn edits(code: &str) -> Vec<(&'static str, &'static str)> {
    let is_loop = code.trim_start().starts_with("for (");
    let of_loops = LOOP_EDITS.into_iter().filter(|_| is_loop);
    let of_all = EDITS.into_iter().filter(|(from, _)| !is_loop || !from.contains('<'));
    of_loops.chain(of_all).filter(|(from, _)| code.contains(from)).collect()
}

/// Whether a line is code that can be mutated: a changed comment has no effect, and other lines do not compile.
fn is_code(line: &str) -> bool {
    let text = line.trim_start();
    let starts = ["//", "#", "template", "using", "static_assert", "namespace", "struct", "class", "enum"];
    !text.is_empty() && !starts.iter().any(|start| text.starts_with(start))
}

/// Every mutant of one target.
fn mutants(target: &Target) -> Vec<Fault> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(&target.folder);
    let wanted = Regex::new(&format!("^{}", target.files)).unwrap();
    let mut faults = Vec::new();
    for path in files(&root.join("fmha")) {
        let header = path.strip_prefix(&root).unwrap().display().to_string();
        if !wanted.is_match(&header) {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for (at, line) in lines.iter().enumerate().filter(|(_, line)| is_code(line)) {
            let code = line.split("//").next().unwrap_or(line);
            let function = function_of(&lines[..=at]);
            for (from, to) in edits(code) {
                faults.push(Fault {
                    what: format!("{header}, {function}: `{}`: `{from}` as `{to}`", line.trim()),
                    arch: target.arch.clone(),
                    kernel: target.kernel.clone(),
                    tile: None,
                    header: header.clone(),
                    text: from.to_owned(),
                    put: to.to_owned(),
                    line: Some(at + 1),
                    case: String::new(),
                    others: Vec::new(),
                    found_as: None,
                    also: Vec::new(),
                    environment: target.environment.clone(),
                    sound_is_known: true,
                });
            }
        }
    }
    faults
}

/// Function that contains the last of these lines. With its header and text it identifies the line, wherever edits move
/// it.
fn function_of<'a>(lines: &[&'a str]) -> &'a str {
    let name = |line: &&'a str| {
        let (before, _) = line.split_once("FMHA_DEVICE ")?.1.split_once('(')?;
        before.rsplit([' ', '*', '&']).next()
    };
    lines.iter().rev().find_map(name).unwrap_or("outside functions")
}

fn name(mutant: &Fault) -> String {
    format!("{} {}", mutant.arch, mutant.what)
}

fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        for path in std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path()) {
            if path.is_dir() { open.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    found
}

/// Trials that last found a mutant of each header. They are tried first, since neighbouring lines mostly fall
/// to the same case, and each case that finds nothing compiles its kernel again.
#[derive(Default)]
struct LastFinders(Mutex<BTreeMap<String, Vec<usize>>>);

impl LastFinders {
    fn order(&self, header: &str, num_trials: usize) -> Vec<usize> {
        let mut order = self.0.lock().unwrap().get(header).cloned().unwrap_or_default();
        let others = (0..num_trials).filter(|trial| !order.contains(trial)).collect::<Vec<_>>();
        order.extend(others);
        order
    }

    fn found(&self, header: &str, trial: usize) {
        let mut finders = self.0.lock().unwrap();
        let finders = finders.entry(header.to_owned()).or_default();
        finders.retain(|&other| other != trial);
        finders.insert(0, trial);
    }
}

/// Verdict on a mutant: the first case that finds it, otherwise the last case whose result it changes.
fn judged(mutant: &Fault, trials: &[Trial], finders: &LastFinders) -> (Fate, String) {
    let (mut last, mut of) = (Fate::ChangesNothing, String::new());
    let mut order = finders.order(&mutant.header, trials.len());
    while let Some(first) = order.first().map(|&at| &trials[at]) {
        // Cases are divided by architecture, since a process has a device of one architecture.
        let (mut same, elsewhere): (Vec<usize>, Vec<usize>) =
            order.into_iter().partition(|&at| trials[at].arch == first.arch);
        let others = same[1..].iter().map(|&at| (trials[at].case.clone(), trials[at].tile.clone())).collect();
        let Trial { arch, case, tile } = first;
        let fault =
            Fault { arch: arch.clone(), case: case.clone(), tile: tile.clone(), others, ..mutant.clone() };
        let (nth, fate) = fault.run("the_fault_of_this_process");
        let at = same[nth];
        match fate {
            Fate::Found(_) => {
                finders.found(&mutant.header, at);
                return (fate, trials[at].case.clone());
            }
            Fate::DoesNotCompile(_) | Fate::Absent(_) => return (fate, trials[at].case.clone()),
            Fate::Missed(_) => (last, of) = (fate, trials[at].case.clone()),
            Fate::ChangesNothing => {}
        }
        same.drain(..=nth);
        same.extend(elsewhere);
        order = same;
    }
    (last, of)
}

/// Why nothing can tell: `header | part of the line, or "function: `" and its beginning | from | to | why`;
/// `*` is every edit of such a line.
struct Reason<'a> {
    header: &'a str,
    part: &'a str,
    edit: [&'a str; 2],
    why: &'a str,
}

fn reasons(text: &str) -> Vec<Reason<'_>> {
    text.lines().filter(|line| !line.starts_with('#')).map(Reason::of).collect()
}

impl<'a> Reason<'a> {
    fn of(line: &'a str) -> Self {
        match line.split(" | ").collect::<Vec<_>>()[..] {
            [header, part, from, to, why] => Self { header, part, edit: [from, to], why },
            _ => panic!("mutants.reasons: {line}"),
        }
    }

    fn is_of(&self, mutant: &Fault) -> bool {
        let same = self.header == mutant.header && mutant.what.contains(self.part);
        same && (self.edit == ["*", "*"] || self.edit == [mutant.text.trim(), mutant.put.trim()])
    }
}

/// Tries one mutant in a process of its own; elsewhere it does nothing.
#[test]
fn the_fault_of_this_process() {
    is_own_process();
}

#[test]
fn every_target_has_mutants_of_every_sort() {
    for target in &targets() {
        let mutants = mutants(target);
        let sorts = EDITS.iter().filter(|edit| mutants.iter().any(|mutant| mutant.text == edit.0)).count();
        println!(
            "{} {} {}: {} mutants of {sorts} sorts",
            target.folder,
            target.files,
            target.arch,
            mutants.len()
        );
        assert!(mutants.len() > 100 && sorts > 10, "{}: {} of {sorts}", target.files, mutants.len());
    }
}

#[test]
fn every_case_that_is_to_find_a_mutant_is_one_of_the_battery() {
    let names: Vec<String> = fmha_conformance::case::all().into_iter().map(|case| case.name).collect();
    for target in targets() {
        for case in target.nearer.values().flatten().chain(&target.cases) {
            let start = case.split(" @ ").next().unwrap_or(case);
            assert!(names.iter().any(|name| name.starts_with(start)), "{}: no case {start}", target.files);
        }
    }
}

/// A case that fails without a mutant would seem to find every mutant.
#[test]
#[ignore = "each listed case's kernels are compiled: cargo xtask test --all"]
fn every_case_that_is_to_find_a_mutant_passes_without_one() {
    let names: Vec<String> = fmha_conformance::case::all().into_iter().map(|case| case.name).collect();
    let mut unchanged = Vec::new();
    for target in &targets() {
        // Cases are grouped by architecture, since a process has a device of one architecture.
        let mut of_arch: BTreeMap<String, BTreeSet<(String, Option<String>)>> = BTreeMap::new();
        for text in target.nearer.values().flatten().chain(&target.cases) {
            let Trial { arch, case, tile } = Trial::of(text, &target.arch, &names);
            of_arch.entry(arch).or_default().insert((case, tile));
        }
        let any = mutants(target).swap_remove(0);
        for (arch, cases) in of_arch {
            for cases in cases.into_iter().collect::<Vec<_>>().chunks(8) {
                let (case, tile) = cases[0].clone();
                let others = cases[1..].to_vec();
                let what = format!("{}: no edit", target.files);
                let (arch, put, sound_is_known) = (arch.clone(), any.text.clone(), false);
                unchanged.push(Fault { what, arch, tile, put, case, others, sound_is_known, ..any.clone() });
            }
        }
    }
    let failed = Mutex::new(Vec::new());
    each(&unchanged.iter().collect::<Vec<_>>(), |fault| {
        let (at, fate) = fault.run("the_fault_of_this_process");
        let own = (fault.case.clone(), fault.tile.clone());
        let (case, tile) = std::iter::once(&own).chain(&fault.others).nth(at).unwrap();
        match fate {
            Fate::ChangesNothing => println!("{}: {} cases pass", fault.arch, 1 + fault.others.len()),
            Fate::Absent(why) => println!("absent: {}: {why}", fault.arch),
            other => failed.lock().unwrap().push(format!("{}: {case} {tile:?}: {other:?}", fault.arch)),
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn a_mutant_is_named_by_its_function_and_its_text_wherever_that_stands() {
    let text = "template <int n>\nFMHA_DEVICE int first(int a) {\n  return a + 1;\n}\n\n  FMHA_DEVICE void Tile::then() const {\n";
    let lines: Vec<&str> = text.lines().collect();
    let found: Vec<&str> = (0..lines.len()).map(|at| function_of(&lines[..=at])).collect();
    assert_eq!(found, ["outside functions", "first", "first", "first", "first", "Tile::then"],);
    for mutant in targets().iter().flat_map(mutants) {
        assert!(!mutant.what.contains(&format!("{}:", mutant.header)), "{}: a line's number", mutant.what);
    }
}

/// Checks reasons in the nightly run alone: an edit may leave a reason without its mutant for a while, which
/// is no error.
#[test]
#[ignore = "cargo xtask nightly"]
fn every_reason_is_of_a_mutant_that_there_is() {
    let all: Vec<Fault> = targets().iter().flat_map(mutants).collect();
    let dangling =
        |reason: &Reason<'_>| reason.why.is_empty() || !all.iter().any(|mutant| reason.is_of(mutant));
    let left: Vec<String> = reasons(&beside("evidence/mutants.reasons"))
        .iter()
        .filter(|reason| dangling(reason))
        .map(|Reason { header, part, edit, .. }| format!("{header}: {part}: {edit:?}"))
        .collect();
    assert!(left.is_empty(), "{}", left.join("\n"));
}

#[test]
#[ignore = "a sample of thousands of mutants, each compiled: cargo xtask test --all"]
fn each_mutant_of_the_device_text_is_found_or_has_a_reason() {
    let part = std::env::var("MUTANTS").unwrap_or_else(|_| format!("1/{EVERY}"));
    let (index, count) = part.split_once('/').expect("MUTANTS=I/N");
    let (index, count): (usize, usize) = (index.parse().unwrap(), count.parse().unwrap());
    let reasons_file = beside("evidence/mutants.reasons");
    let reasons = reasons(&reasons_file);
    let names: Vec<String> = fmha_conformance::case::all().into_iter().map(|case| case.name).collect();
    let again = std::env::var("MUTANTS_AGAIN").ok().map(|path| std::fs::read_to_string(path).unwrap());
    let (table, survivors) = (Mutex::new(BTreeMap::<&str, usize>::new()), Mutex::new(Vec::new()));
    let of = std::env::var("MUTANTS_OF").unwrap_or_default();
    let header = std::env::var("MUTANTS_IN").unwrap_or_default();
    let targets = targets();
    let wanted: Vec<&Target> = targets.iter().filter(|target| target.files.contains(&of)).collect();
    assert!(!wanted.is_empty(), "MUTANTS_OF={of}: no target has such files");
    for target in wanted {
        let mut all = mutants(target);
        all.retain(|mutant| mutant.header.contains(&header));
        let mine: Vec<&Fault> = match &again {
            Some(text) => {
                let survived: Vec<_> =
                    text.lines().filter_map(|line| line.strip_prefix("survives: ")).collect();
                all.iter().filter(|mutant| survived.contains(&name(mutant).as_str())).collect()
            }
            None => all.iter().skip(index - 1).step_by(count).collect(),
        };
        let finders = LastFinders::default();
        each(&mine, |mutant| {
            let (sort, by) = if reasons.iter().any(|reason| reason.is_of(mutant)) {
                ("has a reason", String::new())
            } else {
                let (fate, by) = judged(mutant, &target.trials(&mutant.header, &names), &finders);
                match fate {
                    Fate::Found(_) => ("found", by),
                    Fate::DoesNotCompile(_) => ("does not compile", by),
                    Fate::ChangesNothing => ("changes no code", by),
                    Fate::Absent(_) => ("absent", by),
                    Fate::Missed(text) => ("survives", format!("{by}: {text}")),
                }
            };
            let by = by.lines().next().unwrap_or_default().chars().take(160).collect::<String>();
            println!("{sort}: {}\n  {by}", name(mutant));
            *table.lock().unwrap().entry(sort).or_default() += 1;
            if sort == "survives" {
                survivors.lock().unwrap().push(name(mutant));
            }
        });
    }
    println!("mutants, part {index} of {count}: {:?}", table.lock().unwrap());
    let survivors = survivors.into_inner().unwrap();
    assert!(survivors.is_empty(), "{} mutants without a reason:\n{}", survivors.len(), survivors.join("\n"));
}
