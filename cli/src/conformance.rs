//! `fmha conformance`: the battery against one backend.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::mpsc;

use clap::Args;
use fmha_conformance::Regex;
use fmha_conformance::case::{self, Case, Drawn};
use fmha_conformance::deal::Deal;
use fmha_conformance::report::{Report, run_cases_until};
use fmha_conformance::run::{Options, Outcome};

use crate::Verdict;
use crate::failure::{self, Failure};
use crate::options::BackendArgs;
use crate::progress::Progress;
use crate::target::{self, write_text};

/// Options of `fmha conformance`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fmha conformance                               every case on the best device
  fmha conformance --backend cpu --filter edges  cases with `edges` in the name
  fmha conformance --filter '^laws/.*bf16'       a regular expression
  fmha conformance --list --filter fp8           their names only
  fmha conformance --drawn 7:5000                5000 cases that nobody has seen
  fmha conformance --json > report.json          every case, and a summary
  fmha conformance --junit report.xml            for CI

A case is passed; or failed, with the command that repeats it; or refused, where the backend has
declared that it does not take it; or absent, where something it needs is not here.
Exit status 1 on any failure.")]
pub(super) struct ConformanceArgs {
    #[command(flatten)]
    backend: BackendArgs,

    /// Only cases whose name this regular expression finds
    #[arg(long, value_name = "REGEX", value_parser = regex)]
    filter: Option<Regex>,

    /// Run COUNT cases (1000 by default) that SEED decides, in place of the battery's
    #[arg(long, value_name = "SEED[:COUNT]", allow_hyphen_values = true)]
    drawn: Option<Drawn>,

    /// Only part I of N of the cases' kernels, each with all cases that it serves
    #[arg(long, value_name = "I/N", allow_hyphen_values = true)]
    deal: Option<Deal>,

    /// Print the names of the cases, and stop
    #[arg(long, conflicts_with_all = ["json", "junit"])]
    list: bool,

    /// Cases that reserve gigabytes run on a device too
    #[arg(long)]
    huge_on_device: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Write JUnit XML there too
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
}

fn regex(text: &str) -> Result<Regex, String> {
    Regex::new(text).map_err(|error| format!("filter `{text}`: {error}"))
}

impl ConformanceArgs {
    pub(super) fn carry_out(self, out: &mut dyn Write) -> Result<Verdict, Failure> {
        let all = self.drawn.map_or_else(case::all, Drawn::cases);
        let count = all.len();
        let cases = case::filtered(all, self.filter.as_ref());
        if cases.is_empty() {
            let filter = self.filter.map(|filter| filter.to_string()).unwrap_or_default();
            return Err(Failure::wrong(format!("filter `{filter}` finds 0 of {count} cases")));
        }
        // Only a division by kernels needs the backend; a list of names does not.
        if self.list && self.deal.is_none() {
            return list(out, &cases);
        }
        if let Some(path) = &self.junit {
            target::check("junit", path, &[])?;
        }
        let backend = self.backend.open()?;
        let mut plan = self.backend.plan_options();
        let known = backend.kernels();
        if let Some(kernel) = plan.kernel.as_ref().filter(|&kernel| !known.contains(&kernel.as_str())) {
            let known = known.join(", ");
            return Err(Failure::wrong(format!("kernel `{kernel}` is none of {}: {known}", backend.name())));
        }
        // Any correct kernel will do, unless the user has named one.
        plan.allow_fallback |= plan.kernel.is_none();
        let cases = match self.deal {
            Some(deal) => deal.of(cases, &backend, &plan),
            None => cases,
        };
        if self.list {
            return list(out, &cases);
        }
        let mut repro_words = self.backend.words();
        repro_words.extend(self.drawn.map(|drawn| format!("--drawn {drawn}")));
        repro_words.extend(self.huge_on_device.then(|| "--huge-on-device".to_owned()));
        let repro_words = repro_words.join(" ");
        let options = Options { plan, huge_on_device: self.huge_on_device, repro_words };
        if !self.json {
            writeln!(out, "{} cases on {}", cases.len(), backend.name())?;
            out.flush()?;
        }

        // A panic of a kernel counts as a failed case, and the report has its message.
        std::panic::set_hook(Box::new(|_| ()));
        let progress = Progress::new("cases");
        let ran = std::thread::scope(|scope| -> Result<Report, Failure> {
            let (tell, told) = mpsc::channel();
            let (progress, backend, cases, options) = (&progress, &backend, &cases, &options);
            let running = scope.spawn(move || {
                run_cases_until(backend, cases, options, &|done, total, case| {
                    progress.at(done, total);
                    let text = (case.outcome == Outcome::Failed)
                        .then(|| format!("FAILED {}\n  {}\n  {}", case.name, case.text, case.repro));
                    // A failed write means that there is no reader left.
                    if tell.send(text).is_err() || !failure::is_read() {
                        return ControlFlow::Break(());
                    }
                    ControlFlow::Continue(())
                })
            });
            // Cases are printed as they end, since a run may take hours.
            for text in told.into_iter().flatten() {
                if !self.json {
                    progress.beside(|| writeln!(out, "{text}").and_then(|()| out.flush()))?;
                }
            }
            running
                .join()
                .map_err(|_| Failure::wrong("the battery itself has panicked, not one of its cases"))
        });
        progress.finish();
        let report = ran?;
        if report.cases.len() < cases.len() {
            return Err(Failure::Pipe);
        }

        if let Some(path) = &self.junit {
            let mut xml = Vec::new();
            report.write_junit(&mut xml).map_err(|error| Failure::file(path, &error))?;
            write_text(path, &String::from_utf8_lossy(&xml))?;
        }
        if self.json {
            report.write_json(out)?;
        } else {
            print(out, &report)?;
        }
        Ok(if report.summary.failed > 0 { Verdict::Wrong } else { Verdict::Right })
    }
}

fn list(out: &mut dyn Write, cases: &[Case]) -> Result<Verdict, Failure> {
    for case in cases {
        writeln!(out, "{}", case.name)?;
    }
    Ok(Verdict::Right)
}

fn print(out: &mut dyn Write, report: &Report) -> std::io::Result<()> {
    for (kernel, summary) in report.kernels() {
        writeln!(out, "kernel {kernel:<12} {summary}")?;
    }
    for (family, summary) in report.families() {
        writeln!(out, "{family:<12} {summary}")?;
    }
    writeln!(out, "{:<12} {}", "all", report.summary)
}
