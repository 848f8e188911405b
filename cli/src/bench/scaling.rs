//! `fmha bench --ranks N`: each row over 2, 4, ... N ranks compared with one device, by `fmha run --ranks`,
//! which checks its result.

use std::fmt::Write as _;
use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::table::{Problem, Table};
use super::{BenchArgs, Format};
use crate::Verdict;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::report::label;
use crate::target::write_text;

/// A row over a number of ranks.
struct Scaled {
    table: String,
    row: String,
    ranks: u32,
    outcome: Outcome,
}

enum Outcome {
    Timed { device: String, scheme: String, alone: f64, seconds: f64, equal_bits: bool },
    Absent(String),
    Wrong,
}

impl BenchArgs {
    /// A scaling table of every row.
    pub(super) fn over_ranks(
        &self,
        tables: &[Table],
        most: u32,
        out: &mut dyn Write,
    ) -> Result<Verdict, Failure> {
        for (given, option) in [(self.peers.is_some(), "peers"), (self.plot.is_some(), "plot")] {
            if given {
                return Err(Failure::wrong(format!("ranks {most}: a table of scaling has no {option}")));
            }
        }
        // Said once, and not by every row.
        let on_cpu = self.backend.open_for_ranks(most)?.memory().space() == fmha::MemorySpace::Host;
        let deadline = self.budget.map(|seconds| Duration::from_secs(seconds.into()));
        let (started, progress) = (Instant::now(), Progress::new("timing"));
        let counts = counts(most);
        let rows: usize = tables.iter().map(|table| table.rows.len()).sum();
        let total = (rows * counts.len()) as u64;
        let mut all = Vec::new();
        for table in tables {
            for problem in &table.rows {
                let row = label(&problem.setup(None)?);
                for &ranks in &counts {
                    self.is_wanted()?;
                    let late = deadline.is_some_and(|deadline| started.elapsed() >= deadline);
                    let outcome = if late {
                        Outcome::Absent("out of budget".to_owned())
                    } else {
                        self.over(problem, ranks)?
                    };
                    all.push(Scaled { table: table.name.clone(), row: row.clone(), ranks, outcome });
                    progress.at(all.len() as u64, total);
                }
            }
        }
        progress.finish();
        let text = match self.format {
            Format::Markdown => markdown(&all, tables, on_cpu),
            Format::Csv => csv(&all).map_err(Failure::wrong)?,
            Format::Json => format!("{:#}\n", Value::from_iter(all.iter().map(json))),
        };
        match &self.out {
            Some(path) => write_text(path, &text)?,
            None => write!(out, "{text}")?,
        }
        let wrong = all.iter().any(|scaled| matches!(scaled.outcome, Outcome::Wrong));
        Ok(if wrong { Verdict::Wrong } else { Verdict::Right })
    }

    /// Runs one row over `ranks` ranks, in a separate command, so that nothing of another row remains.
    fn over(&self, problem: &Problem, ranks: u32) -> Result<Outcome, Failure> {
        let this = |error: std::io::Error| Failure::wrong(format!("this command: {error}"));
        let mut run = Command::new(std::env::current_exe().map_err(this)?);
        run.arg("run").args(&problem.words).args(self.ranks.words(ranks));
        run.args(["--json", "-v", self.verify.word()]).args(self.backend.all_words());
        let ran = run.output().map_err(this)?;
        let said = String::from_utf8_lossy(&ran.stderr);
        let report: Value = match serde_json::from_slice(&ran.stdout) {
            Ok(report) => report,
            Err(_) => {
                let reason = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it has died");
                return Ok(Outcome::Absent(reason.trim().to_owned()));
            }
        };
        if report["passed"] != true {
            return Ok(Outcome::Wrong);
        }
        let over = &report["ranks"];
        let plan = over["plan"].as_str().unwrap_or_default();
        let scheme = plan.lines().find_map(|line| line.strip_prefix("scheme ")).unwrap_or_default();
        let seconds = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
        Ok(Outcome::Timed {
            device: report["device"].as_str().unwrap_or_default().to_owned(),
            scheme: scheme.trim().split(':').next().unwrap_or_default().to_owned(),
            alone: seconds(&report["fastest_seconds"]),
            seconds: seconds(&over["seconds"]),
            equal_bits: over["equal_bits"] == true,
        })
    }
}

/// The rank counts 2, 4, ... up to the most, and the most itself.
fn counts(most: u32) -> Vec<u32> {
    let powers = (1..u32::BITS).map(|bit| 1 << bit).take_while(|&ranks| ranks < most);
    powers.chain([most]).collect()
}

fn markdown(all: &[Scaled], tables: &[Table], on_cpu: bool) -> String {
    let mut text = String::new();
    let device = all.iter().find_map(|scaled| match &scaled.outcome {
        Outcome::Timed { device, .. } => Some(device.as_str()),
        _ => None,
    });
    let _ = writeln!(text, "Device: {}", device.unwrap_or("none has run"));
    for table in tables {
        let _ = writeln!(text, "\n## {}: {}, over ranks\n", table.name, table.title);
        text += "| row | ranks | scheme | one device | ranks' time | speed-up | of N devices | bits |\n";
        text += "|---|---|---|---|---|---|---|---|\n";
        for Scaled { row, ranks, outcome, .. } in all.iter().filter(|scaled| scaled.table == table.name) {
            let row = row.replace('|', "\\|");
            match outcome {
                Outcome::Timed { scheme, alone, seconds, equal_bits, .. } => {
                    let speed_up = alone / seconds;
                    // On the CPU one device has all cores, and its ranks together have them too.
                    let share =
                        if on_cpu { "-".to_owned() } else { format!("{:.3}", speed_up / f64::from(*ranks)) };
                    let bits = if *equal_bits { "one device's" } else { "other" };
                    let (alone, seconds) = (alone * 1e3, seconds * 1e3);
                    let times = format!("{alone:.3} ms | {seconds:.3} ms | {speed_up:.3} | {share}");
                    let _ = writeln!(text, "| {row} | {ranks} | {scheme} | {times} | {bits} |");
                }
                Outcome::Absent(reason) => {
                    let reason = reason.replace('|', "\\|");
                    let _ = writeln!(text, "| {row} | {ranks} | {reason} | - | - | - | - | - |");
                }
                Outcome::Wrong => {
                    let _ = writeln!(text, "| {row} | {ranks} | wrong | - | - | - | - | - |");
                }
            }
        }
    }
    if on_cpu {
        text +=
            "\nRanks of a CPU share its cores, all of which one device has: a speed-up of 1 is the most.\n";
    }
    text
}

fn csv(all: &[Scaled]) -> Result<String, String> {
    let failed = |error: csv::Error| format!("csv: {error}");
    let mut table = csv::Writer::from_writer(Vec::new());
    let head = "table,row,ranks,scheme,alone_seconds,seconds,speed_up,equal_bits";
    table.write_record(head.split(',')).map_err(failed)?;
    for Scaled { table: name, row, ranks, outcome } in all {
        let [mut scheme, mut alone, mut seconds, mut speed_up, mut equal_bits] = [const { String::new() }; 5];
        if let Outcome::Timed { scheme: chosen, alone: one, seconds: all, equal_bits: equal, .. } = outcome {
            scheme.clone_from(chosen);
            (alone, seconds, speed_up) = (one.to_string(), all.to_string(), (one / all).to_string());
            equal_bits = equal.to_string();
        }
        let ranks = ranks.to_string();
        let record = [name, row, &ranks, &scheme, &alone, &seconds, &speed_up, &equal_bits];
        table.write_record(record).map_err(failed)?;
    }
    let bytes = table.into_inner().map_err(|error| format!("csv: {error}"))?;
    String::from_utf8(bytes).map_err(|error| format!("csv: {error}"))
}

fn json(scaled: &Scaled) -> Value {
    let mut object = json!({ "table": scaled.table, "row": scaled.row, "ranks": scaled.ranks });
    match &scaled.outcome {
        Outcome::Timed { device, scheme, alone, seconds, equal_bits } => {
            object["device"] = device.as_str().into();
            object["scheme"] = scheme.as_str().into();
            object["alone_seconds"] = (*alone).into();
            object["seconds"] = (*seconds).into();
            object["speed_up"] = (alone / seconds).into();
            object["equal_bits"] = (*equal_bits).into();
        }
        Outcome::Absent(reason) => object["absent"] = reason.as_str().into(),
        Outcome::Wrong => object["wrong"] = true.into(),
    }
    object
}
