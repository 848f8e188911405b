//! `cdna-emu mutate`: every `s_waitcnt` and `s_barrier` of a recorded launch left out in turn, and what reports it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use rayon::prelude::*;

use crate::elf::{CodeObject, Instruction};
use crate::error::LaunchError;
use crate::launch::Options;
use crate::recording::{Ended, Recording};

const BEGIN: &str = "<!-- written by cdna-emu mutate -->";
const END: &str = "<!-- end of what cdna-emu mutate wrote -->";
const IDLE: &str = "whenever it was reached, all that it waits for had been waited for";

/// Options of the command.
#[derive(Default)]
struct Arguments {
    /// Title and file of each recording.
    recordings: Vec<(String, String)>,
    /// Folders that hold the source files.
    sources: Vec<String>,
    /// Why a mutant that nothing reports is no fault: mnemonic, part of the source line, reason.
    reasons: Vec<[String; 3]>,
    out: Option<String>,
}

/// Fate of one mutant.
enum Outcome {
    NotExecuted,
    /// The report's name.
    Caught(String),
    /// No report, and nothing that the instruction would have waited for.
    Idle,
    /// The mutant was not reported; whether memory came out equal.
    Survived(bool),
}

/// The mutants of one source line: one for each copy of the instruction in each kernel.
#[derive(Default)]
struct Row {
    copies: usize,
    executed: usize,
    caught: BTreeMap<String, usize>,
    idle: usize,
    survived: Vec<String>,
    reason: String,
}

/// Source line and mnemonic.
type Rows = BTreeMap<(String, String), Row>;

fn arguments(words: &[&str]) -> Result<Arguments, String> {
    let mut out = Arguments::default();
    let mut words = words.iter().copied();
    while let Some(word) = words.next() {
        if !word.starts_with("--") {
            let (title, file) = word.split_once('=').unwrap_or((word, word));
            out.recordings.push((title.to_owned(), file.to_owned()));
            continue;
        }
        let value = words.next().ok_or_else(|| format!("{word} needs a value"))?;
        match word {
            "--reasons" => out.reasons = reasons(value)?,
            "--sources" => out.sources.push(value.to_owned()),
            "--out" => out.out = Some(value.to_owned()),
            _ => return Err(format!("unknown option {word}")),
        }
    }
    if out.recordings.is_empty() { Err("mutate needs a recorded launch".to_owned()) } else { Ok(out) }
}

fn reasons(path: &str) -> Result<Vec<[String; 3]>, String> {
    let text = read(path)?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let reason = |line: &str| {
        let words: Vec<String> = line.splitn(3, " | ").map(|word| word.trim().to_owned()).collect();
        words.try_into().map_err(|_| format!("{path}: `{line}` is no `mnemonic | line | reason`"))
    };
    lines.map(reason).collect()
}

fn read(path: &str) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))
}

/// Options of a mutant's run: all checks; workgroups one after the other, since mutants run beside each
/// other.
fn options() -> Options {
    Options { sequential: true, limit: 10_000_000, ..Options::default() }
}

/// Runs the command. `words` are what stands behind `cdna-emu mutate`.
///
/// # Errors
/// Words that are no options, a recording that does not run, or mutants that nothing reports and that have no reason:
/// each of these by its place.
pub fn run(words: &[&str]) -> Result<(), String> {
    let arguments = arguments(words)?;
    let (mut rows, mut summary) = (Rows::new(), String::new());
    for (title, file) in &arguments.recordings {
        let bytes = std::fs::read(file).map_err(|error| format!("{file}: {error}"))?;
        let launch = Recording::from_bytes(&bytes).map_err(|error| format!("{file}: {error}"))?;
        let line = one(title, &launch, &mut rows).map_err(|error| format!("{title}: {error}"))?;
        println!("{line}");
        let _ = writeln!(summary, "* {line}");
    }
    let unexplained = explain(&arguments, &mut rows);
    let table = table(&rows, &arguments.sources);
    let survivors: usize = rows.values().map(|row| row.survived.len()).sum();
    let idle: usize = rows.values().map(|row| row.idle).sum();
    let end = format!(
        "{} rows; {idle} mutants of waits that had nothing to wait for; {survivors} others without a report, {} of \
         them without a reason",
        rows.len(),
        unexplained.len()
    );
    if let Some(path) = &arguments.out {
        let text = read(path)?;
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

/// Runs all mutants of one launch. Returns the line that sums it up.
fn one(title: &str, launch: &Recording, rows: &mut Rows) -> Result<String, LaunchError> {
    let sound = launch.run_as(&launch.code, options())?;
    let object = CodeObject::parse(&launch.code)?;
    let synchronises = |inst: &Instruction| waits(inst) || inst.mnemonic.starts_with("s_barrier");
    let all: Vec<Instruction> = object.disassemble().into_iter().filter(synchronises).collect();
    let outcomes: Vec<Outcome> = all.par_iter().map(|inst| outcome(inst, launch, &sound)).collect();
    let (mut executed, mut caught, mut idle) = (0, 0, 0);
    for (inst, outcome) in all.iter().zip(outcomes) {
        let place = inst.source.clone().unwrap_or_else(|| "no source line".to_owned());
        let row = rows.entry((place, inst.mnemonic.clone())).or_default();
        row.copies += 1;
        match outcome {
            Outcome::NotExecuted => continue,
            Outcome::Caught(name) => {
                caught += 1;
                *row.caught.entry(name).or_default() += 1;
            }
            Outcome::Idle => {
                idle += 1;
                row.idle += 1;
            }
            Outcome::Survived(same) => {
                let results = if same { "the same results" } else { "other results" };
                row.survived.push(format!("{title}, 0x{:x}: {results}", inst.pc));
            }
        }
        row.executed += 1;
        executed += 1;
    }
    Ok(format!(
        "{title}: {} mutants, {executed} executed, {caught} caught, {idle} had nothing to wait for, {} others",
        all.len(),
        executed - caught - idle
    ))
}

/// CDNA's and gfx11's `s_waitcnt`, gfx12's waits for loads, LDS and scalar memory apart.
fn waits(inst: &Instruction) -> bool {
    const NAMES: [&str; 5] =
        ["s_waitcnt", "s_wait_loadcnt", "s_wait_dscnt", "s_wait_kmcnt", "s_wait_loadcnt_dscnt"];
    NAMES.contains(&inst.mnemonic.as_str())
}

fn outcome(inst: &Instruction, launch: &Recording, sound: &Ended) -> Outcome {
    const S_NOP: u32 = 0xbf80_0000;
    if !sound.counters.synchronised.contains(&inst.pc) {
        return Outcome::NotExecuted;
    }
    let mut code = launch.code.clone();
    code[inst.file_offset..inst.file_offset + 4].copy_from_slice(&S_NOP.to_le_bytes());
    match launch.run_as(&code, options()) {
        Err(LaunchError::Fault(fault)) => Outcome::Caught(format!("{:?}", fault.kind)),
        Err(LaunchError::Refused(text)) => Outcome::Caught(text),
        Ok(broken) => {
            let same = broken.memory == sound.memory;
            let idle = waits(inst) && !sound.counters.useful_waits.contains(&inst.pc);
            if idle && same { Outcome::Idle } else { Outcome::Survived(same) }
        }
    }
}

/// Adds reasons to survivors; returns those without one.
fn explain(arguments: &Arguments, rows: &mut Rows) -> Vec<String> {
    let mut unexplained = Vec::new();
    for ((place, mnemonic), row) in rows.iter_mut().filter(|(_, row)| !row.survived.is_empty()) {
        let line = line_text(place, &arguments.sources);
        let fits = |reason: &&[String; 3]| *mnemonic == reason[0] && line.contains(reason[1].as_str());
        match arguments.reasons.iter().find(fits) {
            // A survivor whose results differ is a fault, whatever its reason.
            Some(reason) if row.survived.iter().all(|one| one.ends_with("the same results")) => {
                row.reason.clone_from(&reason[2]);
            }
            _ => unexplained.extend(row.survived.iter().map(|one| format!("{place}, {mnemonic}: {one}"))),
        }
    }
    unexplained
}

fn table(rows: &Rows, sources: &[String]) -> String {
    let mut text = String::from(
        "| place | instruction | copies executed | caught by | survived |\n|---|---|---|---|---|\n",
    );
    for ((place, mnemonic), row) in rows {
        let caught = match (row.executed, row.caught.is_empty()) {
            (0, _) => "not executed".to_owned(),
            (_, true) => String::new(),
            _ => row.caught.iter().map(|(name, n)| format!("{name} {n}")).collect::<Vec<_>>().join(", "),
        };
        let mut survived = Vec::new();
        if row.idle > 0 {
            survived.push(format!("{}: {IDLE}", row.idle));
        }
        match (row.survived.len(), row.reason.as_str()) {
            (0, _) => {}
            (n, "") => survived.push(format!("{n}: {}", row.survived.join("; "))),
            (n, why) => survived.push(format!("{n}: {why}")),
        }
        let line = line_text(place, sources);
        let file = place.rsplit('/').next().unwrap_or(place);
        let shown = if line.is_empty() { String::new() } else { format!(" `{}`", line.replace('|', "\\|")) };
        let _ = writeln!(
            text,
            "| {file}{shown} | `{mnemonic}` | {} of {} | {caught} | {} |",
            row.executed,
            row.copies,
            survived.join("; ")
        );
    }
    text
}

/// The text of `file:line`; empty where its file is not in the folders given.
fn line_text(place: &str, sources: &[String]) -> String {
    let Some((file, line)) = place.rsplit_once(':') else { return String::new() };
    let read = |root: &String| std::fs::read_to_string(Path::new(root).join(file)).ok();
    let text = sources.iter().find_map(read).unwrap_or_default();
    let line: usize = line.parse().unwrap_or(0);
    text.lines().nth(line.wrapping_sub(1)).unwrap_or_default().trim().to_owned()
}
