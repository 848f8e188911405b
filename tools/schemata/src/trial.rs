//! Trials of a mutant: tests of the crates and cases of the battery, each with its seconds and the sites that it
//! reaches.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::tree::Program;

/// Limit of a trial's virtual memory in KiB, which ends a mutant that allocates for ever.
const MEMORY_KIB: u64 = 24 << 20;
/// Trials that take longer than this without a mutant are left out.
const LONGEST_SECONDS: u64 = 180;

/// One test, or one filter of `fmha conformance`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Trial {
    program: PathBuf,
    folder: PathBuf,
    environment: Vec<(String, String)>,
    /// Words of the command line before the filter.
    words: Vec<String>,
    /// Name of a test, or a regular expression of cases.
    pub(crate) filter: String,
    pub(crate) seconds: f64,
    /// Numbers of the mutants whose sites the trial evaluates.
    pub(crate) reach: BTreeSet<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Well,
    Badly,
    Late,
}

/// Folder of one thread: trials on the thread keep their kernel cache and temporary files in it.
pub(crate) struct Place {
    folder: PathBuf,
    /// Cache of kernels that were compiled without a mutant.
    warm: PathBuf,
}

impl Place {
    pub(crate) fn new(scratch: &Path, index: usize) -> Self {
        Self { folder: scratch.join(format!("work/{index}")), warm: scratch.join("cache") }
    }

    fn cache(&self) -> PathBuf {
        self.folder.join("cache")
    }

    /// Empties the folder of temporary files, and restores the compiled kernels.
    fn refresh(&self) -> std::io::Result<()> {
        let temporary = self.folder.join("tmp");
        let _ = std::fs::remove_dir_all(&temporary);
        std::fs::create_dir_all(&temporary)?;
        remove_new(&self.warm, &self.cache())?;
        copy(&self.warm, &self.cache()).map(drop)
    }
}

/// Removes files from `to` that `from` does not have.
fn remove_new(from: &Path, to: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(to).into_iter().flatten().flatten() {
        let (path, from) = (entry.path(), from.join(entry.file_name()));
        match (path.is_dir(), from.is_dir()) {
            (true, true) => remove_new(&from, &path)?,
            (true, false) => std::fs::remove_dir_all(path)?,
            (false, _) if !from.is_file() => std::fs::remove_file(path)?,
            (false, _) => {}
        }
    }
    Ok(())
}

/// Copies files that are absent or differ in size or time; returns whether it copied any.
fn copy(from: &Path, to: &Path) -> std::io::Result<bool> {
    std::fs::create_dir_all(to)?;
    let mut is_new = false;
    for entry in std::fs::read_dir(from).into_iter().flatten().flatten() {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        let state = |path: &Path| std::fs::metadata(path).and_then(|data| Ok((data.len(), data.modified()?)));
        if path.is_dir() {
            is_new |= copy(&path, &to)?;
        } else if state(&to).ok() != Some(state(&path)?) {
            std::fs::copy(&path, &to)?;
            std::fs::File::options().write(true).open(&to)?.set_modified(state(&path)?.1)?;
            is_new = true;
        }
    }
    Ok(is_new)
}

impl Trial {
    fn is_case(&self) -> bool {
        self.words.first().is_some_and(|word| word == "conformance")
    }

    /// Whether this trial and `other` can run in one process.
    pub(crate) fn goes_with(&self, other: &Self) -> bool {
        self.program == other.program && self.environment == other.environment && self.words == other.words
    }

    /// Runs `trials`, which can share a process, with `switch` in the environment.
    pub(crate) fn run(
        trials: &[&Self],
        switch: (&str, String),
        limit: u64,
        place: &Place,
    ) -> std::io::Result<Ended> {
        let Some(first) = trials.first() else { return Ok(Ended::Well) };
        place.refresh()?;
        // `timeout` ends the whole group of processes.
        let script = format!("ulimit -v {MEMORY_KIB}; exec timeout -s KILL {limit} \"$0\" \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &script]).arg(&first.program).args(&first.words);
        let filters = trials.iter().map(|trial| trial.filter.as_str());
        if first.is_case() {
            command.arg("--filter").arg(filters.collect::<Vec<_>>().join("|"));
        } else {
            command.args(filters);
        }
        command.env("FMHA_NUM_THREADS", "2").env("RAYON_NUM_THREADS", "2").env("FMHA_FUZZ_SECONDS", "0");
        command.env("FMHA_CACHE_DIR", place.cache()).env("TMPDIR", place.folder.join("tmp"));
        command.envs(first.environment.iter().cloned()).env(switch.0, switch.1);
        command.current_dir(&first.folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let status = command.status()?;
        // `timeout` belongs to the group that it kills, so its death by signal 9 also means a timeout.
        Ok(match (status.code(), status.signal()) {
            (Some(0), _) => Ended::Well,
            (Some(124 | 137), _) | (_, Some(9)) => Ended::Late,
            _ => Ended::Badly,
        })
    }

    /// Runs the trial without a mutant to measure its seconds and sites. Returns whether it passes.
    fn measure(&mut self, num_mutants: usize, place: &Place) -> std::io::Result<Ended> {
        let seen = place.folder.with_extension("reach");
        std::fs::create_dir_all(&place.folder)?;
        std::fs::write(&seen, vec![0; num_mutants + 1])?;
        let switch = ("SCHEMATA_REACH", seen.display().to_string());
        let mut start = Instant::now();
        let mut ended = Self::run(&[&*self], switch.clone(), LONGEST_SECONDS, place)?;
        // Time for compilation is not counted for a mutant.
        if copy(&place.cache(), &place.warm)? && ended == Ended::Well {
            start = Instant::now();
            ended = Self::run(&[&*self], switch, LONGEST_SECONDS, place)?;
        }
        self.seconds = start.elapsed().as_secs_f64();
        let bytes = std::fs::read(&seen)?;
        self.reach = (0..).zip(bytes).filter(|(_, byte)| *byte != 0).map(|(number, _)| number).collect();
        Ok(ended)
    }
}

/// Trials of all tests of `programs`.
pub(crate) fn tests(programs: &[Program]) -> Vec<Trial> {
    let mut all = Vec::new();
    for program in programs {
        let mut list = Command::new(&program.path);
        let output = list.args(["--list", "--format", "terse"]).current_dir(&program.folder).output();
        let text =
            output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
        for name in names {
            all.push(Trial {
                program: program.path.clone(),
                folder: program.folder.clone(),
                environment: Vec::new(),
                words: vec!["--test-threads=1".to_owned(), "--exact".to_owned()],
                filter: name.to_owned(),
                seconds: 0.0,
                reach: BTreeSet::new(),
            });
        }
    }
    all
}

/// Trials of a list of cases, whose lines are `NAME=VALUE... WORDS --filter REGEX`.
pub(crate) fn cases(list: &str, release: &Path) -> Vec<Trial> {
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    let parse = |line: &str| {
        let (words, filter) = line.split_once(" --filter ")?;
        let words: Vec<&str> = words.split_whitespace().collect();
        let is_setting = |word: &&&str| !word.starts_with('-') && word.contains('=');
        let (environment, words) = words.split_at(words.iter().take_while(is_setting).count());
        let environment = environment.iter().filter_map(|word| word.split_once('='));
        let words = std::iter::once("conformance").chain(words.iter().copied()).map(str::to_owned).collect();
        Some(Trial {
            program: release.join("fmha"),
            folder: release.to_owned(),
            environment: environment.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            words,
            filter: filter.to_owned(),
            seconds: 0.0,
            reach: BTreeSet::new(),
        })
    };
    lines.filter_map(parse).collect()
}

/// Stamp of a trial: a hash of its words and of the time when its program was built.
pub(crate) fn stamp(trial: &Trial) -> u64 {
    let mut hasher = DefaultHasher::new();
    let built = std::fs::metadata(&trial.program).and_then(|data| data.modified()).ok();
    (&trial.program, built, &trial.environment, &trial.words, &trial.filter).hash(&mut hasher);
    hasher.finish()
}

/// Measurements of trials by their stamps; `None` for a trial that fails without a mutant.
pub(crate) type Measured = BTreeMap<u64, Option<Trial>>;

/// Measures the trials that `known` lacks.
pub(crate) fn measure(
    trials: Vec<Trial>,
    known: &mut Measured,
    num_mutants: usize,
    scratch: &Path,
    jobs: usize,
) {
    let new: Vec<Trial> = trials.into_iter().filter(|trial| !known.contains_key(&stamp(trial))).collect();
    eprintln!("{} trials are measured first", new.len());
    let queue = Mutex::new(new.into_iter());
    let done = Mutex::new(known);
    std::thread::scope(|scope| {
        for index in 0..jobs {
            let place = Place::new(scratch, index);
            let (queue, done) = (&queue, &done);
            scope.spawn(move || {
                loop {
                    let Some(mut trial) = queue.lock().expect("no thread panics").next() else { break };
                    let ended = trial.measure(num_mutants, &place);
                    if !matches!(ended, Ok(Ended::Well)) {
                        println!("left out, it ends {ended:?} with no mutant on: {}", trial.filter);
                    }
                    let stamp = stamp(&trial);
                    let kept = matches!(ended, Ok(Ended::Well)).then_some(trial);
                    done.lock().expect("no thread panics").insert(stamp, kept);
                }
            });
        }
    });
}
