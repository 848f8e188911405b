//! Run of many cases, and its report.

use std::fmt;
use std::io::Write;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use fmha_core::Device;
use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};
use regex_lite::Regex;
use serde::Serialize;

use crate::case::{Case, matching};
use crate::run::{Options, Outcome};
use crate::used;

/// Result of one case.
#[derive(Clone, Debug, Serialize)]
pub struct CaseReport {
    /// Name of the case.
    pub name: String,
    /// Seed of the case.
    pub seed: u64,
    /// Outcome: passed, failed, refused or absent.
    pub outcome: Outcome,
    /// The kernels that ran, as plans name them; empty if nothing ran.
    pub kernel: String,
    /// Verdict, refusal or reason, as text.
    pub text: String,
    /// Command that repeats the case.
    pub repro: String,
    /// Seconds that the case took, the reference included.
    pub seconds: f64,
}

/// Counts of outcomes: the columns of the report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Number of cases that ran and are correct.
    pub passed: u64,
    /// Number of cases whose result is wrong, or that were refused without a declaration.
    pub failed: u64,
    /// Number of cases that were refused as declared.
    pub refused: u64,
    /// Number of cases that could not run here.
    pub absent: u64,
}

/// Results of a backend on the battery. The JSON form ends with `summary`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Kind of the backend.
    pub backend: String,
    /// Name of the backend's device.
    pub device: String,
    /// Reports of all cases, in order.
    pub cases: Vec<CaseReport>,
    /// Counts of all cases.
    pub summary: Summary,
}

/// Called after each case, from any thread: the number of finished cases, the number of all cases, and this case's
/// report.
pub type OnCase<'a> = &'a (dyn Fn(u64, u64, &CaseReport) + Sync);

/// Runs the cases whose names match `filter`, on all cores: a device runs one call at a time while other cases are
/// compiled and checked.
#[must_use]
pub fn run(backend: &Device, filter: Option<&Regex>, options: &Options, on_case: OnCase<'_>) -> Report {
    run_cases(backend, &matching(filter), options, on_case)
}

/// Runs these cases; see [`run`].
#[must_use]
pub fn run_cases(backend: &Device, cases: &[Case], options: &Options, on_case: OnCase<'_>) -> Report {
    run_cases_until(backend, cases, options, &|done, total, case| {
        on_case(done, total, case);
        ControlFlow::Continue(())
    })
}

/// Runs these cases until `on_case` breaks: no further case begins then, and the report has the finished ones.
#[must_use]
pub fn run_cases_until(
    backend: &Device,
    cases: &[Case],
    options: &Options,
    on_case: &(dyn Fn(u64, u64, &CaseReport) -> ControlFlow<()> + Sync),
) -> Report {
    let done = Mutex::new(0);
    let stopped = AtomicBool::new(false);
    let total = cases.len() as u64;
    let one = |(index, case): (usize, &Case)| {
        let start = Instant::now();
        used::take();
        let (outcome, text) = case.run(backend, options);
        let report = CaseReport {
            name: case.name.clone(),
            seed: case.data().seed,
            outcome,
            kernel: used::take(),
            text,
            repro: case.repro(format!("{} {}", backend.kind(), options.repro_words).trim_end()),
            seconds: start.elapsed().as_secs_f64(),
        };
        let mut done = done.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *done += 1;
        if on_case(*done, total, &report).is_break() {
            stopped.store(true, Ordering::Relaxed);
        }
        (index, report)
    };
    let (huge, small): (Vec<_>, Vec<_>) = cases.iter().enumerate().partition(|(_, case)| case.is_huge());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    // Separate threads are used, not a pool: a pool's worker that waits for a backend's pool would begin another
    // case meanwhile, and another inside that one.
    let next = AtomicUsize::new(0);
    let goes_on = |_: &_| !stopped.load(Ordering::Relaxed);
    let worker = || {
        let cases = std::iter::from_fn(|| small.get(next.fetch_add(1, Ordering::Relaxed)).copied());
        cases.take_while(goes_on).map(one).collect::<Vec<_>>()
    };
    let mut reports: Vec<(usize, CaseReport)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let done = workers.into_iter().map(std::thread::ScopedJoinHandle::join);
        // A thread's panic is passed on: without its cases the report would be shorter, but look correct.
        done.flat_map(|cases| cases.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    reports.extend(huge.into_iter().take_while(goes_on).map(one));
    reports.sort_by_key(|(index, _)| *index);
    let cases: Vec<CaseReport> = reports.into_iter().map(|(_, report)| report).collect();
    let summary = Summary::of(&cases);
    Report { backend: backend.kind().to_owned(), device: backend.name().to_owned(), cases, summary }
}

impl Summary {
    fn of(cases: &[CaseReport]) -> Self {
        let count = |outcome| cases.iter().filter(|case| case.outcome == outcome).count() as u64;
        Self {
            passed: count(Outcome::Passed),
            failed: count(Outcome::Failed),
            refused: count(Outcome::Refused),
            absent: count(Outcome::Absent),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, refused, absent } = self;
        write!(f, "{passed} passed, {failed} failed, {refused} refused, {absent} absent")
    }
}

impl Report {
    /// The cases that failed.
    pub fn failures(&self) -> impl Iterator<Item = &CaseReport> {
        self.cases.iter().filter(|case| case.outcome == Outcome::Failed)
    }

    /// Counts by family, in the order in which they first appear.
    #[must_use]
    pub fn families(&self) -> Vec<(String, Summary)> {
        self.counts_by(|case| case.name.split('/').next().unwrap_or_default())
    }

    /// Counts by the kernels that cases ran on, in the order of first appearance; cases that were refused or absent
    /// ran on none and are not counted.
    #[must_use]
    pub fn kernels(&self) -> Vec<(String, Summary)> {
        let mut kernels = self.counts_by(|case| &case.kernel);
        kernels.retain(|(kernel, _)| !kernel.is_empty());
        kernels
    }

    fn counts_by(&self, key: impl Fn(&CaseReport) -> &str) -> Vec<(String, Summary)> {
        let mut groups: Vec<(String, Vec<CaseReport>)> = Vec::new();
        for case in &self.cases {
            match groups.iter_mut().find(|(name, _)| name == key(case)) {
                Some((_, cases)) => cases.push(case.clone()),
                None => groups.push((key(case).to_owned(), vec![case.clone()])),
            }
        }
        groups.into_iter().map(|(name, cases)| (name, Summary::of(&cases))).collect()
    }

    /// Writes JSON: an object that ends with `summary`.
    ///
    /// # Errors
    /// What the writer said.
    pub fn write_json(&self, to: &mut dyn Write) -> std::io::Result<()> {
        serde_json::to_writer_pretty(&mut *to, self)?;
        writeln!(to)
    }

    /// Writes JUnit XML, with a suite for each family; refused and absent cases are skipped, with their reasons.
    ///
    /// # Errors
    /// What the writer said.
    pub fn write_junit(&self, to: &mut dyn Write) -> std::io::Result<()> {
        let mut report = quick_junit::Report::new(format!("fmha conformance on {}", self.device));
        for (family, _) in self.families() {
            let mut suite = TestSuite::new(family.clone());
            for case in self.cases.iter().filter(|case| case.name.split('/').next() == Some(&family)) {
                let mut status = match case.outcome {
                    Outcome::Passed => TestCaseStatus::success(),
                    Outcome::Failed => TestCaseStatus::non_success(NonSuccessKind::Failure),
                    Outcome::Refused | Outcome::Absent => TestCaseStatus::skipped(),
                };
                if case.outcome != Outcome::Passed {
                    status.set_message(case.text.clone());
                }
                if case.outcome == Outcome::Failed {
                    status.set_description(case.repro.clone());
                }
                let mut test = TestCase::new(case.name.clone(), status);
                test.set_time(std::time::Duration::from_secs_f64(case.seconds));
                suite.add_test_case(test);
            }
            report.add_test_suite(suite);
        }
        report.serialize(to).map_err(std::io::Error::other)
    }
}
