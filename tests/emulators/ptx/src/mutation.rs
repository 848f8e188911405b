//! `ptx-emu mutate`: every synchronising instruction of a recorded launch broken in turn, and what reports it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use rayon::prelude::*;

use crate::launch::{Asynchrony, Options};
use crate::mutate::{Mutant, mutants};
use crate::recording::{Ended, Recording};
use crate::source::{SourceLine, SourceMap};

/// Options of the command.
struct Arguments {
    /// Title and file of each recording.
    recordings: Vec<(String, String)>,
    schedules: u64,
    /// Folders that hold the source files.
    sources: Vec<String>,
    /// Why mutants that nothing reports are no faults.
    reasons: Vec<Reason>,
    /// Files whose name starts so hold one instruction a function: the line that calls is what a reader wants.
    wrappers: Option<String>,
    out: Option<String>,
}

/// Fate of one mutant.
enum Outcome {
    NotExecuted,
    /// The report's name.
    Caught(String),
    /// The mutant was not reported; whether memory came out equal.
    Survived(bool),
}

/// The mutants of one place, done in one way: one for each copy of the instruction in each kernel.
#[derive(Default)]
struct Row {
    copies: usize,
    executed: usize,
    caught: BTreeMap<String, usize>,
    survived: Vec<Survivor>,
}

/// A broken copy that nothing reports.
struct Survivor {
    kernel: String,
    /// Place of the mutant, and its fate.
    text: String,
    reason: Option<String>,
}

/// Key of a mutant: place (innermost line first), opcode, and the change.
type Key = (Vec<SourceLine>, String, &'static str);

fn arguments(words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut out = Arguments {
        recordings: Vec::new(),
        schedules: 0,
        sources: Vec::new(),
        reasons: Vec::new(),
        wrappers: None,
        out: None,
    };
    let mut words = words.peekable();
    while let Some(word) = words.next() {
        if !word.starts_with("--") {
            let (title, file) = word.split_once('=').unwrap_or((&word, &word));
            out.recordings.push((title.to_owned(), file.to_owned()));
            continue;
        }
        let value = words.next().ok_or_else(|| format!("`{word}` needs a value"))?;
        match word.as_str() {
            "--schedules" => {
                out.schedules = value.parse().map_err(|_| format!("--schedules `{value}` is no number"))?;
            }
            "--reasons" => out.reasons = reasons(&value)?,
            "--sources" => out.sources.push(value),
            "--wrappers" => out.wrappers = Some(value),
            "--out" => out.out = Some(value),
            _ => return Err(format!("unknown option `{word}`")),
        }
    }
    if out.recordings.is_empty() { Err("mutate needs a recorded launch".to_owned()) } else { Ok(out) }
}

/// One schedule, the same on every machine. Mutants run beside each other instead.
fn options() -> Options {
    Options { happens_before: true, parallel: false, spin_limit: 1_000_000, ..Options::default() }
}

/// Runs the command. `words` are what stands behind `ptx-emu mutate`.
///
/// # Errors
/// Words that are no options, a recording that does not run, a report on the sound kernel, or mutants that nothing
/// reports and that have no reason: each of these by its place.
pub fn run(words: impl Iterator<Item = String>) -> Result<(), String> {
    let arguments = arguments(words)?;
    let mut kernels: Vec<(&str, Vec<Recording>)> = Vec::new();
    for (title, file) in &arguments.recordings {
        let bytes = std::fs::read(file).map_err(|error| format!("{file}: {error}"))?;
        let recording = Recording::from_bytes(&bytes).map_err(|fault| format!("{file}: {fault}"))?;
        match kernels.iter_mut().find(|(known, _)| known == title) {
            Some((_, launches)) if launches[0].ptx == recording.ptx => launches.push(recording),
            Some(_) => {
                return Err(format!("{file} is a launch of another text than the first one of `{title}`"));
            }
            None => kernels.push((title, vec![recording])),
        }
    }
    let (mut rows, mut summary) = (BTreeMap::<Key, Row>::new(), String::new());
    for (title, launches) in &kernels {
        let line = one(&arguments, title, launches, &mut rows)?;
        println!("{line}");
        let _ = writeln!(summary, "* {line}");
    }
    let unexplained = explain(&arguments, &mut rows);
    let table = table(&rows, &arguments.sources);
    let survivors: usize = rows.values().map(|row| row.survived.len()).sum();
    let end = format!(
        "{} rows; {survivors} executed mutants without a report, {} of them, or of the reasons, in want of the other",
        rows.len(),
        unexplained.len()
    );
    if let Some(path) = &arguments.out {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
        let (before, rest) = text.split_once(BEGIN).ok_or_else(|| format!("{path} has no `{BEGIN}`"))?;
        let (_, after) = rest.split_once(END).ok_or_else(|| format!("{path} has no `{END}`"))?;
        let text = format!("{before}{BEGIN}\n\n{summary}\n{table}\n{end}.\n\n{END}{after}");
        std::fs::write(path, text).map_err(|error| format!("{path}: {error}"))?;
    } else {
        println!("{table}");
    }
    println!("{end}");
    if unexplained.is_empty() { Ok(()) } else { Err(unexplained.join("\n")) }
}

const BEGIN: &str = "<!-- written by ptx-emu mutate -->";
const END: &str = "<!-- end of what ptx-emu mutate wrote -->";

/// Why a mutant that nothing reports is no fault: `opcode | text of the line | text of its caller | ... | reason`,
/// each text a part of that line's. `KERNEL: opcode`: only in kernels with these words in their title.
struct Reason {
    kernel: String,
    opcode: String,
    texts: Vec<String>,
    why: String,
}

fn reasons(path: &str) -> Result<Vec<Reason>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let reason = |line: &str| {
        let mut words: Vec<String> = line.split(" | ").map(|word| word.trim().to_owned()).collect();
        match (words.pop(), words.is_empty()) {
            (Some(why), false) => {
                let first = words.remove(0);
                let (kernel, opcode) = first.split_once(": ").unwrap_or(("", &first));
                Ok(Reason { kernel: kernel.to_owned(), opcode: opcode.to_owned(), texts: words, why })
            }
            _ => Err(format!("{path}: `{line}` is no `opcode | line | reason`")),
        }
    };
    lines.map(reason).collect()
}

/// Puts reasons to survivors; returns those that have none, and the reasons that nothing needs where the table is
/// written: a part of the kernels need not need them all.
fn explain(arguments: &Arguments, rows: &mut BTreeMap<Key, Row>) -> Vec<String> {
    let mut needed = vec![false; arguments.reasons.len()];
    let mut unexplained = Vec::new();
    for ((place, opcode, what), row) in rows.iter_mut().filter(|(_, row)| !row.survived.is_empty()) {
        let lines: Vec<String> = place.iter().map(|at| line_text(at, &arguments.sources)).collect();
        let fits = |reason: &Reason| {
            let mut texts = reason.texts.iter().enumerate();
            opcode.starts_with(&reason.opcode)
                && texts.all(|(i, text)| lines.get(i).is_some_and(|line| line.contains(text.as_str())))
        };
        let fitting: Vec<usize> = (0..needed.len()).filter(|&i| fits(&arguments.reasons[i])).collect();
        for one in &mut row.survived {
            match fitting.iter().find(|&&i| one.kernel.contains(&arguments.reasons[i].kernel)) {
                Some(&i) => {
                    needed[i] = true;
                    one.reason = Some(arguments.reasons[i].why.clone());
                }
                None => {
                    let at = words(place, &arguments.sources);
                    unexplained.push(format!("{at}, {opcode} {what}: {}", one.text));
                }
            }
        }
    }
    if arguments.out.is_some() {
        let unneeded = arguments.reasons.iter().zip(&needed).filter(|(_, needed)| !**needed);
        unexplained.extend(unneeded.map(|(reason, _)| {
            format!("no survivor needs the reason `{}` of {} {:?}", reason.why, reason.opcode, reason.texts)
        }));
    }
    unexplained
}

/// Runs all mutants of one kernel. Returns the line that sums it up.
fn one(
    arguments: &Arguments,
    title: &str,
    launches: &[Recording],
    rows: &mut BTreeMap<Key, Row>,
) -> Result<String, String> {
    let ptx = &launches[0].ptx;
    let mut sound = Vec::new();
    for launch in launches {
        let ended =
            launch.run_as(ptx, &options()).map_err(|fault| format!("{title}, the sound kernel: {fault}"))?;
        sound.push((launch, ended));
    }
    no_false_alarm(arguments.schedules, title, &sound)?;
    let map = SourceMap::of(ptx);
    let all = mutants(ptx);
    let outcomes: Vec<Outcome> =
        all.par_iter().map(|mutant| outcome(mutant, &sound, arguments.schedules)).collect();
    let (mut executed, mut caught) = (0, 0);
    for (mutant, outcome) in all.iter().zip(outcomes) {
        let opcode = mutant.instruction.split_whitespace().next().unwrap_or("").to_owned();
        let key = (place(&map, mutant.line, arguments.wrappers.as_deref()), opcode, mutant.what);
        let row = rows.entry(key).or_default();
        row.copies += 1;
        match outcome {
            Outcome::NotExecuted => continue,
            Outcome::Caught(name) => {
                caught += 1;
                *row.caught.entry(name).or_default() += 1;
            }
            Outcome::Survived(same) => {
                let results = if same { "the same results" } else { "other results" };
                row.survived.push(Survivor {
                    kernel: title.to_owned(),
                    text: format!("{title}, PTX line {}: {results}", mutant.line),
                    reason: None,
                });
            }
        }
        row.executed += 1;
        executed += 1;
    }
    Ok(format!(
        "{title}: {} mutants, {executed} executed, {caught} caught; {} launches of the sound kernel under {} \
         schedules each without a report",
        all.len(),
        launches.len(),
        arguments.schedules
    ))
}

/// Asynchronous work late, clusters piece by piece: when and in which order, `seed` decides.
fn scheduled(seed: u64) -> Options {
    Options { asynchrony: Asynchrony::Late { seed }, cluster_order: Some(seed), ..options() }
}

/// The sound kernel gives no report and the same results under every schedule.
fn no_false_alarm(schedules: u64, title: &str, sound: &[(&Recording, Ended)]) -> Result<(), String> {
    let alarm = |seed: u64| {
        let options = scheduled(seed);
        sound.iter().find_map(|(launch, ended)| match launch.run_as(&launch.ptx, &options) {
            Err(fault) => Some(format!("{title}, the sound kernel, schedule {seed}: {fault}")),
            Ok(late) if late.memory != ended.memory => {
                Some(format!("{title}, the sound kernel, schedule {seed}: other results"))
            }
            Ok(_) => None,
        })
    };
    let alarms: Vec<String> = (1..=schedules).into_par_iter().filter_map(alarm).collect();
    match alarms.first() {
        Some(first) => Err(format!("{} of {schedules} schedules: {first}", alarms.len())),
        None => Ok(()),
    }
}

/// One run of the broken kernel for each launch that executes the instruction, until something is reported.
/// Where clusters wait for each other by numbers in global memory, which happens-before does not see, what
/// may order them is also run under the schedules under which the sound kernel has given the same results.
fn outcome(mutant: &Mutant, sound: &[(&Recording, Ended)], schedules: u64) -> Outcome {
    let mut outcome = Outcome::NotExecuted;
    for (launch, ended) in sound {
        if ended.report.lines.get(&mutant.line).is_none_or(|&hits| hits == 0) {
            continue;
        }
        // A broken kernel may go round for ever and change something each time.
        let instruction_limit = 1_000_000 + 10 * ended.report.counters.warp_instructions;
        let run = |options: Options| {
            launch.run_as(&mutant.apply(&launch.ptx), &Options { instruction_limit, ..options })
        };
        let among_clusters = launch.ptx.contains("ld.acquire") && mutant.may_order_clusters();
        let schedules = 1..=if among_clusters { schedules } else { 0 };
        for options in std::iter::once(options()).chain(schedules.map(scheduled)) {
            let same = match run(options) {
                Err(fault) => return Outcome::Caught(fault.kind.name().to_owned()),
                Ok(broken) => broken.memory == ended.memory,
            };
            if !same && among_clusters {
                return Outcome::Caught("other results".to_owned());
            }
            outcome = Outcome::Survived(same && !matches!(outcome, Outcome::Survived(false)));
        }
    }
    outcome
}

/// The lines that a reader knows the instruction by: where it is used, and from where that is called.
fn place(map: &SourceMap, line: u32, wrappers: Option<&str>) -> Vec<SourceLine> {
    let chain = map.chain(line);
    let wraps = |s: &SourceLine| wrappers.is_some_and(|prefix| s.file.starts_with(prefix));
    let outside: Vec<SourceLine> = chain.iter().skip_while(|s| wraps(s)).take(6).cloned().collect();
    if outside.is_empty() { vec![SourceLine { file: "PTX".to_owned(), line }] } else { outside }
}

fn table(rows: &BTreeMap<Key, Row>, sources: &[String]) -> String {
    let mut text =
        String::from("| place | instruction | broken how | copies executed | caught by | survived |\n");
    text.push_str("|---|---|---|---|---|---|\n");
    for ((place, opcode, what), row) in rows {
        let caught = match (row.executed, row.caught.is_empty()) {
            (0, _) => "not executed".to_owned(),
            (_, true) => String::new(),
            _ => row.caught.iter().map(|(name, n)| format!("{name} {n}")).collect::<Vec<_>>().join(", "),
        };
        let mut survived = BTreeMap::<&str, usize>::new();
        for one in &row.survived {
            *survived.entry(one.reason.as_ref().unwrap_or(&one.text)).or_default() += 1;
        }
        let survived: Vec<String> = survived.iter().map(|(why, n)| format!("{n}: {why}")).collect();
        let survived = survived.join("; ");
        let _ = writeln!(
            text,
            "| {} | `{opcode}` | {what} | {} of {} | {caught} | {survived} |",
            words(place, sources),
            row.executed,
            row.copies
        );
    }
    text
}

/// `consume.cuh:96 ← :213`, and the line's text where the sources are there.
fn words(place: &[SourceLine], sources: &[String]) -> String {
    let mut out = String::new();
    for (i, at) in place.iter().enumerate() {
        let arrow = if i == 0 { "" } else { " ← " };
        let same = i > 0 && place[i - 1].file == at.file;
        let file = if same { "" } else { at.file.rsplit('/').next().unwrap_or(&at.file) };
        let _ = write!(out, "{arrow}{file}:{}", at.line);
    }
    let line = line_text(&place[0], sources);
    if !line.is_empty() {
        let _ = write!(out, " `{}`", line.replace('|', "\\|"));
    }
    out
}

/// The line's text; empty where its file is not in the folders given.
fn line_text(at: &SourceLine, sources: &[String]) -> String {
    let read = |root: &String| std::fs::read_to_string(Path::new(root).join(&at.file)).ok();
    let text = sources.iter().find_map(read).unwrap_or_default();
    text.lines().nth(at.line as usize - 1).unwrap_or_default().trim().to_owned()
}
