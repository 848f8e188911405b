//! `ptx-emu mutate`: every synchronising instruction of a recorded launch broken in turn, and what reports it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use fmha_emu_ptx::{Asynchrony, Ended, Mutant, Options, Recording, SourceLine, SourceMap, mutants};
use rayon::prelude::*;

/// Options of the command.
struct Arguments {
    /// Title and file of each recording.
    recordings: Vec<(String, String)>,
    schedules: u64,
    /// Folders that hold the source files.
    sources: Vec<String>,
    /// Files whose name starts so hold one instruction a function: the line that calls is what a reader wants.
    wrappers: Option<String>,
    out: Option<String>,
}

/// What became of one mutant.
enum Outcome {
    NotExecuted,
    /// The report's name and its text.
    Caught(String, String),
    /// No report; whether memory came out the same.
    Survived(bool),
}

/// The mutants of one place, done in one way.
#[derive(Default)]
struct Row {
    /// By title: how many copies of the instruction there are, and how many were executed.
    copies: BTreeMap<String, (usize, usize)>,
    caught: BTreeMap<String, usize>,
    survived: Vec<String>,
    example: String,
}

/// Place (innermost line first), opcode, what was done.
type Key = (Vec<SourceLine>, String, &'static str);

fn arguments(words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut out =
        Arguments { recordings: Vec::new(), schedules: 0, sources: Vec::new(), wrappers: None, out: None };
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
            "--sources" => out.sources.push(value),
            "--wrappers" => out.wrappers = Some(value),
            "--out" => out.out = Some(value),
            _ => return Err(format!("unknown option `{word}`")),
        }
    }
    if out.recordings.is_empty() { Err("mutate needs a recorded launch".to_owned()) } else { Ok(out) }
}

fn options() -> Options {
    let mut options = Options::default();
    options.happens_before = true;
    // One schedule, the same on every machine. Mutants run beside each other instead.
    options.parallel = false;
    options.spin_limit = 1_000_000;
    options
}

/// Runs the command.
pub(crate) fn run(words: impl Iterator<Item = String>) -> Result<(), String> {
    let arguments = arguments(words)?;
    let (mut rows, mut summary) = (BTreeMap::<Key, Row>::new(), String::new());
    for (title, file) in &arguments.recordings {
        let bytes = std::fs::read(file).map_err(|error| format!("{file}: {error}"))?;
        let recording = Recording::decode(&bytes).map_err(|fault| format!("{file}: {fault}"))?;
        let line = one(&arguments, title, &recording, &mut rows)?;
        println!("{line}");
        let _ = writeln!(summary, "* {line}");
    }
    let table = table(&rows, &arguments.sources);
    let survivors: usize = rows.values().map(|row| row.survived.len()).sum();
    let end = format!("{} rows, {survivors} executed mutants without a report", rows.len());
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
    if survivors == 0 { Ok(()) } else { Err(format!("{survivors} mutants survived")) }
}

const BEGIN: &str = "<!-- written by ptx-emu mutate -->";
const END: &str = "<!-- end of what ptx-emu mutate wrote -->";

/// All mutants of one recording. Returns the line that sums it up.
fn one(
    arguments: &Arguments,
    title: &str,
    recording: &Recording,
    rows: &mut BTreeMap<Key, Row>,
) -> Result<String, String> {
    let ptx = &recording.ptx;
    let sound = recording.run(ptx, &options()).map_err(|fault| format!("{title}, unbroken: {fault}"))?;
    let alarms: Vec<String> = (1..=arguments.schedules)
        .into_par_iter()
        .filter_map(|seed| {
            let mut options = options();
            options.asynchrony = Asynchrony::Late { seed };
            match recording.run(ptx, &options) {
                Err(fault) => Some(format!("{title}, unbroken, schedule {seed}: {fault}")),
                Ok(ended) if ended.memory != sound.memory => {
                    Some(format!("{title}, unbroken, schedule {seed}: other results"))
                }
                Ok(_) => None,
            }
        })
        .collect();
    if let Some(first) = alarms.first() {
        return Err(format!("{} of {} schedules: {first}", alarms.len(), arguments.schedules));
    }
    let map = SourceMap::of(ptx);
    let all = mutants(ptx);
    let outcomes: Vec<Outcome> = all.par_iter().map(|mutant| outcome(recording, mutant, &sound)).collect();
    let (mut executed, mut caught) = (0, 0);
    for (mutant, outcome) in all.iter().zip(outcomes) {
        let opcode = mutant.instruction.split_whitespace().next().unwrap_or("").to_owned();
        let key = (place(&map, mutant.line, arguments.wrappers.as_deref()), opcode, mutant.what);
        let row = rows.entry(key).or_default();
        let copies = row.copies.entry(title.to_owned()).or_default();
        copies.0 += 1;
        match outcome {
            Outcome::NotExecuted => continue,
            Outcome::Caught(name, text) => {
                caught += 1;
                *row.caught.entry(name).or_default() += 1;
                if row.example.is_empty() {
                    row.example = text;
                }
            }
            Outcome::Survived(same) => {
                let results = if same { "the same results" } else { "other results" };
                row.survived.push(format!("{title}, PTX line {}: {results}", mutant.line));
            }
        }
        copies.1 += 1;
        executed += 1;
    }
    Ok(format!(
        "{title}: {} mutants, {executed} executed, {caught} caught in one run each; unbroken, {} schedules without a report",
        all.len(),
        arguments.schedules
    ))
}

fn outcome(recording: &Recording, mutant: &Mutant, sound: &Ended) -> Outcome {
    if sound.report.lines.get(&mutant.line).is_none_or(|&hits| hits == 0) {
        return Outcome::NotExecuted;
    }
    match recording.run(&mutant.apply(&recording.ptx), &options()) {
        Err(fault) => Outcome::Caught(fault.kind.name().to_owned(), fault.to_string()),
        Ok(ended) => Outcome::Survived(ended.memory == sound.memory),
    }
}

/// The lines that a reader knows the instruction by: where it is used, and from where that is called.
fn place(map: &SourceMap, line: u32, wrappers: Option<&str>) -> Vec<SourceLine> {
    let chain = map.chain(line);
    let wraps = |s: &SourceLine| wrappers.is_some_and(|prefix| s.file.starts_with(prefix));
    let outside: Vec<SourceLine> = chain.iter().skip_while(|s| wraps(s)).take(3).cloned().collect();
    if outside.is_empty() { vec![SourceLine { file: "PTX".to_owned(), line }] } else { outside }
}

fn table(rows: &BTreeMap<Key, Row>, sources: &[String]) -> String {
    let mut text = String::from("| place | instruction | broken how | copies executed | caught by | survived |\n");
    text.push_str("|---|---|---|---|---|---|\n");
    for ((place, opcode, what), row) in rows {
        let (all, executed) =
            row.copies.values().fold((0, 0), |(all, executed), (a, e)| (all + a, executed + e));
        let caught = match (executed, row.caught.is_empty()) {
            (0, _) => "not executed".to_owned(),
            (_, true) => String::new(),
            _ => row.caught.iter().map(|(name, n)| format!("{name} {n}")).collect::<Vec<_>>().join(", "),
        };
        let survived = row.survived.join("; ");
        let _ = writeln!(
            text,
            "| {} | `{opcode}` | {what} | {executed} of {all} | {caught} | {survived} |",
            words(place, sources)
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
    let line = sources.iter().find_map(|root| {
        let text = std::fs::read_to_string(Path::new(root).join(&place[0].file)).ok()?;
        text.lines().nth(place[0].line as usize - 1).map(|line| line.trim().replace('|', "\\|"))
    });
    if let Some(line) = line {
        let _ = write!(out, " `{line}`");
    }
    out
}
