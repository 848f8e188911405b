//! Steps of a test run: programs that run one by one or in parallel, and the time that each takes.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use crate::tally::Tally;

/// One program to run.
pub(crate) struct Step {
    pub(crate) name: String,
    words: Vec<String>,
    folder: Option<PathBuf>,
    environment: Vec<(String, String)>,
    kind: Kind,
    at_least: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Output of Cargo's test harness: `test result: ...`.
    Tests,
    /// Output of `fmha conformance`: the last line that begins with `all` has the counts.
    Battery,
    /// The step counts as one test, which passes if the program succeeds.
    Check,
}

/// Times of a step: its start from the run's beginning, its duration, and the time of all processors.
pub(crate) struct Took {
    name: String,
    from: f64,
    seconds: f64,
    processor_seconds: f64,
    passed: u64,
    failed: u64,
}

impl Step {
    /// Step that runs a program with Cargo's test harness.
    pub(crate) fn tests(name: String, words: Vec<String>, folder: PathBuf) -> Self {
        let manifest = ("CARGO_MANIFEST_DIR".to_owned(), folder.display().to_string());
        Self {
            name,
            words,
            folder: Some(folder),
            environment: vec![manifest],
            kind: Kind::Tests,
            at_least: 0,
        }
    }

    /// Step that runs `cargo`, or another program with such output.
    pub(crate) fn cargo(name: &str, words: &[&str]) -> Self {
        let words = std::iter::once(env!("CARGO")).chain(words.iter().copied()).map(str::to_owned).collect();
        let (folder, environment) = (None, Vec::new());
        Self { name: name.to_owned(), words, folder, environment, kind: Kind::Tests, at_least: 0 }
    }

    /// Step of a program of which only the exit status counts, with these environment variables.
    pub(crate) fn check(name: &str, words: &[&str], environment: Vec<(String, String)>) -> Self {
        let words = words.iter().map(|&word| word.to_owned()).collect();
        Self { name: name.to_owned(), words, folder: None, environment, kind: Kind::Check, at_least: 0 }
    }

    /// Returns this step, failed where fewer than `tests` of its tests pass: a filter of names that finds no
    /// test proves nothing.
    pub(crate) fn at_least(mut self, tests: u64) -> Self {
        self.at_least = tests;
        self
    }

    /// Adds environment variables to this step.
    pub(crate) fn with(mut self, environment: Vec<(String, String)>) -> Self {
        self.environment.extend(environment);
        self
    }

    /// Step that runs `fmha conformance`.
    pub(crate) fn battery(name: String, words: Vec<String>, environment: Vec<(String, String)>) -> Self {
        Self { name, words, folder: None, environment, kind: Kind::Battery, at_least: 0 }
    }

    /// Runs the step to its end, and then prints its output.
    fn run(&self, of: Instant, environment: &[(String, String)], tally: &Mutex<Tally>) -> Took {
        let start = Instant::now();
        let mut own = Tally::default();
        let mut text = String::new();
        let ended = self.follow(environment, &mut own, &mut text);
        let processor_seconds = *ended.as_ref().unwrap_or(&0.0);
        own.passed += u64::from(self.kind == Kind::Check && ended.is_ok());
        let failed = ended.and_then(|_| self.enough(own.passed)).err();
        if let Some(reason) = failed.filter(|_| own.failed == 0) {
            // A program that aborts or is missing counts as one failure.
            own.read(&format!("battery {}: 0 passed, 1 failed, 0 refused, 0 absent: {reason}", self.name));
        }
        let took = Took {
            name: self.name.clone(),
            from: (start - of).as_secs_f64(),
            seconds: start.elapsed().as_secs_f64(),
            processor_seconds,
            passed: own.passed,
            failed: own.failed,
        };
        let mut tally = tally.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut out = std::io::stdout().lock();
        // A closed pipe is no error: its reader has finished.
        let _ = writeln!(out, "\n== {} ({:.0} s)\n{text}", self.name, took.seconds);
        tally.merge(own);
        took
    }

    fn enough(&self, passed: u64) -> Result<(), String> {
        match passed < self.at_least {
            true => Err(format!("{passed} tests passed, and {} are there at least", self.at_least)),
            false => Ok(()),
        }
    }

    /// Follows a program to its end. Returns the processor seconds, including those of processes that it started and
    /// waited for.
    fn follow(
        &self,
        environment: &[(String, String)],
        tally: &mut Tally,
        text: &mut String,
    ) -> Result<f64, String> {
        let (program, words) = self.words.split_first().ok_or("no program")?;
        let mut command = Command::new(program);
        command.args(words).envs(environment.iter().chain(&self.environment).cloned()).stdout(Stdio::piped());
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        let mut child = command.spawn().map_err(|error| format!("{program}: {error}"))?;
        for line in child.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
            let line = line.map_err(|error| error.to_string())?;
            match line.trim().strip_prefix("all ").filter(|_| self.kind == Kind::Battery) {
                Some(counts) => tally.read(&format!("battery {}: {}", self.name, counts.trim())),
                None => tally.read(&line),
            }
            text.push_str(&line);
            text.push('\n');
        }
        let (status, seconds) = wait(&mut child).map_err(|error| error.to_string())?;
        if status.success() { Ok(seconds) } else { Err(format!("ended with {status}")) }
    }
}

#[cfg(unix)]
use usage::{of_children, wait};
#[cfg(not(unix))]
use without_usage::{of_children, wait};

/// Processor time of processes, as Unix counts it.
#[cfg(unix)]
mod usage {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, ExitStatus};

    /// Waits for a process that nothing else waits for. Returns its exit status and its processor seconds.
    pub(super) fn wait(child: &mut Child) -> std::io::Result<(ExitStatus, f64)> {
        let (mut status, mut usage) = (0, std::mem::MaybeUninit::<libc::rusage>::zeroed());
        // SAFETY: both are places that the call may write.
        while unsafe { libc::wait4(child.id().cast_signed(), &raw mut status, 0, usage.as_mut_ptr()) } < 0 {
            let error = std::io::Error::last_os_error();
            if error.kind() != std::io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        // SAFETY: numbers, of which all bits may be 0.
        let usage = unsafe { usage.assume_init() };
        Ok((ExitStatus::from_raw(status), processor_seconds(&usage)))
    }

    /// Processor seconds, on all processors, of every process that this one has waited for.
    pub(super) fn of_children() -> f64 {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: a place that the call may write; numbers, of which all bits may be 0, where it fails.
        let usage = unsafe {
            libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
            usage.assume_init()
        };
        processor_seconds(&usage)
    }

    fn processor_seconds(usage: &libc::rusage) -> f64 {
        let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
        seconds(usage.ru_utime) + seconds(usage.ru_stime)
    }
}

/// Fallback for systems that do not measure processor time, which is reported as 0.
#[cfg(not(unix))]
mod without_usage {
    use std::process::{Child, ExitStatus};

    pub(super) fn wait(child: &mut Child) -> std::io::Result<(ExitStatus, f64)> {
        Ok((child.wait()?, 0.0))
    }

    pub(super) fn of_children() -> f64 {
        0.0
    }
}

/// Runs all steps of a run that began at `of`, as many at once as there are processors. The caller puts the longest
/// first.
pub(crate) fn run_all(
    steps: &[Step],
    of: Instant,
    environment: &[(String, String)],
    tally: &mut Tally,
) -> Vec<Took> {
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let next = Mutex::new(steps.iter());
    let shared = Mutex::new(std::mem::take(tally));
    let work = || {
        let mut took = Vec::new();
        loop {
            let step = next.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next();
            match step {
                Some(step) => took.push(step.run(of, environment, &shared)),
                None => return took,
            }
        }
    };
    let took = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).flatten().collect()
    });
    *tally = shared.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    took
}

impl Took {
    /// Runs work that is no step, in a run that began at `run`. Its processor seconds are those of the processes
    /// that end meanwhile.
    pub(crate) fn of<T>(what: &str, run: Instant, work: impl FnOnce() -> T) -> (T, Self) {
        let (start, before) = (Instant::now(), of_children());
        let result = work();
        let took = Self {
            name: what.to_owned(),
            from: (start - run).as_secs_f64(),
            seconds: start.elapsed().as_secs_f64(),
            processor_seconds: of_children() - before,
            passed: 0,
            failed: 0,
        };
        (result, took)
    }
}

/// Table of the steps' times, longest first. Steps run in parallel, so their seconds sum to more than the clock's.
/// Processor seconds show a step's cost on a shared machine.
pub(crate) fn table(took: &mut [Took], total: f64) -> String {
    took.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let mut text = String::from(
        "\n| step | from | seconds | of processors | passed | failed |\n|---|---|---|---|---|---|\n",
    );
    for Took { name, from, seconds, processor_seconds, passed, failed } in &*took {
        text += &format!(
            "| {name} | {from:.0} | {seconds:.0} | {processor_seconds:.0} | {passed} | {failed} |\n"
        );
    }
    let of_processors: f64 = took.iter().map(|took| took.processor_seconds).sum();
    text + &format!("| all, by the clock | 0 | {total:.0} | {of_processors:.0} | | |\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(name: &str, script: &str) -> Step {
        let words = ["sh", "-c", script].map(str::to_owned).to_vec();
        Step::battery(name.to_owned(), words, Vec::new())
    }

    #[test]
    fn a_program_that_ends_badly_without_counts_is_a_failure() {
        let mut tally = Tally::default();
        let steps = [
            shell("good", "echo 'all   3 passed, 0 failed, 1 refused, 0 absent'"),
            shell("aborts", "exit 134"),
            shell("failing", "echo 'all   1 passed, 2 failed, 0 refused, 0 absent'; exit 1"),
        ];
        let mut took = run_all(&steps, Instant::now(), &[], &mut tally);
        assert_eq!((tally.passed, tally.failed), (4, 3));
        let table = table(&mut took, 1.0);
        assert!(table.contains("| aborts | 0 | 0 | 0 | 0 | 1 |"), "{table}");
    }

    #[test]
    fn a_check_counts_as_one_by_its_end_alone() {
        let mut tally = Tally::default();
        let check = |name, script| Step::check(name, &["sh", "-c", script], Vec::new());
        run_all(&[check("good", "true"), check("bad", "exit 101")], Instant::now(), &[], &mut tally);
        assert_eq!((tally.passed, tally.failed), (1, 1));
    }

    #[test]
    fn seconds_of_processors_are_those_of_what_a_step_has_started_too() {
        let mut tally = Tally::default();
        let counts = "echo 'all   1 passed, 0 failed, 0 refused, 0 absent'";
        let busy = format!("sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done'; {counts}");
        let took = run_all(
            &[shell("busy", &busy), shell("asleep", &format!("sleep 0.2; {counts}"))],
            Instant::now(),
            &[],
            &mut tally,
        );
        let of = |name| took.iter().find(|took| took.name == name).map_or(0.0, |took| took.processor_seconds);
        assert!(of("busy") > 0.02 && of("asleep") < of("busy"), "{} {}", of("busy"), of("asleep"));
    }

    #[test]
    fn a_filter_that_finds_no_test_is_a_failure() {
        let found = |counts: &str| {
            let mut tally = Tally::default();
            run_all(
                &[shell("filtered", &format!("echo 'all {counts}'")).at_least(1)],
                Instant::now(),
                &[],
                &mut tally,
            );
            (tally.passed, tally.failed)
        };
        assert_eq!(found("1 passed, 0 failed, 0 refused, 0 absent"), (1, 0));
        assert_eq!(found("0 passed, 0 failed, 0 refused, 0 absent"), (0, 1));
    }
}
