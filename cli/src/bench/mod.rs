//! `fmha bench`: tables of shapes, timed as libraries are compared.

mod counted;
pub(super) mod measure;
pub(super) mod peers;
mod plot;
mod render;
mod scaling;
pub(super) mod table;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

use crate::Verdict;
use crate::check::{Verify, verify};
use crate::failure::{self, Failure};
use crate::options::{BackendArgs, at_least_0, at_least_1};
use crate::progress::Progress;
use crate::ranks::RankArgs;
use crate::report::label;
use crate::target::{self, write_text};
use measure::{Measured, Protocol, measure};
use peers::Peers;
use render::{Results, Row};
use table::Table;

/// Options of `fmha bench`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fmha bench bench/cpu.toml          every table of the file, as Markdown
  fmha bench bench/grid.toml --list  what is in it
  fmha bench bench/grid.toml --tables b128c --rows S8192 --backend cuda
  fmha bench bench/shapes.toml --tables a --peers compare.jsonl --plot a.svg
  fmha bench bench/shapes.toml --tables a --ranks 4 --backend cuda
      each row over 2 and 4 GPUs beside one

A file has tables; a table has rows; a row is options of `fmha run`, over the table's common ones:
  [[table]]
  name = \"a\"
  title = \"causal fp16, B4 H32 D128\"
  common = { b = 4, h = 32, d = 128, prec = \"fp16\", mask = \"b\" }
  rows = [{ s = 1024 }, { s = 2048 }]
Peers' figures: a .jsonl or .csv with row (the label that is printed), peer and speed.
Each row is checked against f64 before it is timed; a wrong one makes exit status 1.
On an emulated device each row is run once, checked and counted: instructions, bytes, conflicts,
and the least time by the device's stated rates, called modelled; nothing is timed.")]
pub(super) struct BenchArgs {
    /// The file of tables (bench/*.toml)
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Only these tables
    #[arg(long, value_name = "NAME[,NAME..]", value_delimiter = ',')]
    tables: Vec<String>,

    /// Only rows whose label contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    rows: String,

    /// Print the tables and their rows, and stop
    #[arg(long)]
    list: bool,

    #[command(flatten)]
    backend: BackendArgs,

    /// burst: idle, one call, 25 ms of calls each with cold caches, median of rounds (to compare);
    /// hot: 0.7 s back to back (what training sees)
    #[arg(long, value_enum, default_value = "burst")]
    protocol: ProtocolName,

    /// Rounds of the burst protocol
    #[arg(long, value_name = "N", default_value = "3", value_parser = at_least_1("rounds"), allow_negative_numbers = true)]
    rounds: u32,

    /// Start no row after this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = at_least_0("budget"), allow_negative_numbers = true)]
    budget: Option<u32>,

    /// Check each row first: full, sample, none
    #[arg(short = 'v', long, value_name = "HOW", default_value = "sample", value_parser = verify)]
    verify: Verify,

    /// Figures of other libraries, for a comparison with ours
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,

    /// How to print
    #[arg(long, value_enum, default_value = "markdown")]
    format: Format,

    #[command(flatten)]
    ranks: RankArgs,

    /// Write there instead of printing
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// An SVG picture of each table; of several, NAME is put before the extension
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProtocolName {
    Burst,
    Hot,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Markdown,
    Csv,
    Json,
}

impl BenchArgs {
    pub(super) fn carry_out(self, out: &mut dyn Write) -> Result<Verdict, Failure> {
        let tables = self.chosen()?;
        if self.list {
            for table in &tables {
                writeln!(out, "{:<16} {} ({})", table.name, table.title, table.unit.name())?;
                for row in &table.rows {
                    writeln!(out, "{:<16} {}", "", label(&row.setup(None)?))?;
                }
            }
            return Ok(Verdict::Right);
        }
        self.targets(&tables)?;
        if let Some(ranks) = self.ranks.ranks {
            return self.over_ranks(&tables, ranks, out);
        }
        let peers = self
            .peers
            .as_deref()
            .map(Peers::read)
            .transpose()
            .map_err(|failure| failure.of("peers"))?
            .unwrap_or_default();
        let backend = self.backend.open()?;
        let protocol = match self.protocol {
            ProtocolName::Burst => Protocol::burst(self.rounds),
            ProtocolName::Hot => Protocol::Hot,
        };

        let deadline = self.budget.map(|seconds| Duration::from_secs(seconds.into()));
        let started = Instant::now();
        let total: usize = tables.iter().map(|table| table.rows.len()).sum();
        let progress = Progress::new("timing");
        let (mut all, mut done) = (Vec::new(), 0);
        for table in &tables {
            let mut rows = Vec::new();
            for problem in &table.rows {
                self.is_wanted()?;
                let setup = problem.setup(None)?;
                let outcome = if deadline.is_some_and(|deadline| started.elapsed() >= deadline) {
                    Measured::Absent("out of budget".to_owned())
                } else {
                    measure(&backend, &setup, &self.backend.plan_options(), protocol, self.verify)?
                };
                rows.push(Row { label: label(&setup), outcome });
                done += 1;
                progress.at(done as u64, total as u64);
            }
            all.push(Results::new(table, rows, &peers));
        }
        progress.finish();

        let text = match self.format {
            Format::Markdown => render::markdown(&all, backend.name()),
            Format::Csv => render::csv(&all).map_err(Failure::wrong)?,
            Format::Json => render::json(&all, backend.name()),
        };
        match &self.out {
            Some(path) => write_text(path, &text)?,
            None => write!(out, "{text}")?,
        }
        for (results, path) in all.iter().zip(self.plots(&tables)) {
            write_text(&path, &results.plot().map_err(Failure::wrong)?)?;
        }
        let wrong =
            all.iter().flat_map(|results| &results.rows).any(|row| matches!(row.outcome, Measured::Wrong(_)));
        Ok(if wrong { Verdict::Wrong } else { Verdict::Right })
    }

    /// Stops if the table would be printed but its reader has closed the pipe.
    fn is_wanted(&self) -> Result<(), Failure> {
        if self.out.is_some() || failure::is_read() { Ok(()) } else { Err(Failure::Pipe) }
    }

    /// Path of each table's picture; empty if there is none.
    fn plots(&self, tables: &[Table]) -> Vec<PathBuf> {
        let Some(path) = &self.plot else { return Vec::new() };
        match tables {
            [_] => vec![path.clone()],
            _ => tables.iter().map(|table| named(path, &table.name)).collect(),
        }
    }

    /// Refuses output files that could not be written, before anything is timed.
    fn targets(&self, tables: &[Table]) -> Result<(), Failure> {
        let plots = self.plots(tables);
        for path in &plots {
            target::check("plot", path, &["svg"])?;
        }
        if let Some(path) = &self.out {
            target::check("out", path, &[])?;
        }
        let mut outputs: Vec<(&str, &Path)> = plots.iter().map(|path| ("plot", path.as_path())).collect();
        outputs.extend(self.out.as_deref().map(|path| ("out", path)));
        let mut inputs = vec![("the table", self.file.as_path())];
        inputs.extend(self.peers.as_deref().map(|path| ("peers", path)));
        target::distinct(&outputs, &inputs)
    }

    /// Tables that the user has chosen, with the chosen rows.
    fn chosen(&self) -> Result<Vec<Table>, Failure> {
        let mut tables = table::read(&self.file)?;
        for name in &self.tables {
            if !tables.iter().any(|table| table.name == *name) {
                let known: Vec<_> = tables.iter().map(|table| table.name.as_str()).collect();
                return Err(Failure::wrong(format!(
                    "tables {name}: not among the {} of {} ({})",
                    known.len(),
                    self.file.display(),
                    known.join(", ")
                )));
            }
        }
        tables.retain(|table| self.tables.is_empty() || self.tables.contains(&table.name));
        for table in &mut tables {
            let rows = std::mem::take(&mut table.rows);
            for row in rows {
                if label(&row.setup(None)?).contains(&self.rows) {
                    table.rows.push(row);
                }
            }
        }
        tables.retain(|table| !table.rows.is_empty());
        if tables.is_empty() {
            return Err(Failure::wrong(format!("rows {}: 0 labels contain it", self.rows)));
        }
        Ok(tables)
    }
}

/// `a.svg` for the table `b128c`: `a-b128c.svg`.
fn named(path: &Path, name: &str) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{stem}-{name}.{extension}"))
}
