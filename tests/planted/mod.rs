//! A fault put into the kernels' text, and a process of its own in which a case is to find it.
//!
//! The broken text goes into a bundle under the sound text's key, so that the backend takes it for the sound one. One
//! driver's double emulates one architecture, and bundles serve a whole process: so each fault has its own.

mod intermediate;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fmha_conformance::Regex;
use fmha_conformance::case::{Case, all};
use fmha_conformance::deal::jobs;
use fmha_conformance::run::{Options, Outcome, tile_fields};
use fmha_core::cache::{Bundle, CompiledKernel, KernelJob, Precompile, embed};
use fmha_core::emulators::Double;
use fmha_core::source::KernelSource;
use fmha_core::{Device, Error, PlanOptions};
use intermediate::intermediate;
use serde::{Deserialize, Serialize};

/// An edit of a header, and the case that should find it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fault {
    pub(crate) what: String,
    #[serde(default)]
    pub(crate) arch: String,
    pub(crate) kernel: Option<String>,
    pub(crate) tile: Option<String>,
    #[serde(default)]
    pub(crate) header: String,
    /// Text that stands once in the header (or in line `line`, from 1), and the text that is put there.
    pub(crate) text: String,
    pub(crate) put: String,
    pub(crate) line: Option<usize>,
    pub(crate) case: String,
    /// Further cases with their tiles. Each is tried if no case before it has a kernel that the fault changes.
    #[serde(default)]
    pub(crate) others: Vec<(String, Option<String>)>,
    /// Further cases that must each find the fault too, so that it is not found by luck.
    #[serde(default)]
    pub(crate) also: Vec<String>,
    /// Part of the report's text, where the emulator has a name for the fault.
    pub(crate) found_as: Option<String>,
    #[serde(default)]
    pub(crate) environment: BTreeMap<String, String>,
    /// Whether the case is known to pass on the sound kernel.
    #[serde(default)]
    pub(crate) sound_is_known: bool,
}

/// Result of trying a fault.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub(crate) enum Fate {
    /// The fault was found, with the report.
    Found(String),
    /// The case passed, or failed in another way than was expected, or fails without the fault.
    Missed(String),
    /// The compiler refuses the text.
    DoesNotCompile(String),
    /// The fault changes no kernel of the case.
    ChangesNothing,
    /// A compiler or an emulator is missing.
    Absent(String),
}

/// Environment variable that gives a process its fault.
const OWN: &str = "PLANTED_FAULT";
/// Time limit of a process: a broken kernel may loop for ever, while a correct one takes seconds.
const LIMIT: Duration = Duration::from_secs(300);
/// Limit of a mutant's process; there are many mutants.
const LIMIT_OF_MUTANTS: Duration = Duration::from_secs(100);
/// Mark that stands before the fate in the output of a fault's process.
const MARK: &str = "fate of the fault: ";

/// Runs a fault if this process was started for one, prints its fate, and returns `true`.
pub(crate) fn is_own_process() -> bool {
    let Ok(text) = std::env::var(OWN) else { return false };
    let fault: Fault = serde_json::from_str(&text).unwrap();
    let say = |at: usize, fate: &Fate| println!("{MARK}{}", serde_json::to_string(&(at, fate)).unwrap());
    let limit = if fault.line.is_some() { LIMIT_OF_MUTANTS } else { LIMIT };
    let goes_on = format!("no end within {limit:?}");
    let late = if fault.found_as.is_none() { Fate::Found(goes_on) } else { Fate::Missed(goes_on) };
    // Number of the case that is running, and the time of its start.
    let at_work = Arc::new(Mutex::new((0, Instant::now())));
    let watched = Arc::clone(&at_work);
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let (at, since) = *watched.lock().unwrap();
            if since.elapsed() > limit {
                say(at, &late);
                std::process::exit(0);
            }
        }
    });
    let own = (fault.case.clone(), fault.tile.clone());
    for (at, (case, tile)) in std::iter::once(&own).chain(&fault.others).enumerate() {
        *at_work.lock().unwrap() = (at, Instant::now());
        let fate = Fault { case: case.clone(), tile: tile.clone(), ..fault.clone() }.fate();
        if fate != Fate::ChangesNothing || at == fault.others.len() {
            say(at, &fate);
            break;
        }
    }
    true
}

impl Fault {
    /// Runs the fault in a process of its own: of this program, whose test `own` calls [`is_own_process`].
    /// Returns the number of the case that decides its fate too: the first whose kernels it changes, else the
    /// last.
    pub(crate) fn run(&self, own: &str) -> (usize, Fate) {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([own, "--exact", "--nocapture", "--test-threads=1"])
            .env(OWN, serde_json::to_string(self).unwrap())
            .envs(&self.environment)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&child.stdout);
        let fate = text.lines().find_map(|line| serde_json::from_str(line.split_once(MARK)?.1).ok());
        // The process may end without a fate, since a broken kernel may crash it.
        let ended = || Fate::Missed(format!("{text}\n{}", String::from_utf8_lossy(&child.stderr)));
        fate.unwrap_or_else(|| (0, ended()))
    }

    fn case(&self) -> Case {
        all()
            .into_iter()
            .find(|case| case.name == self.case)
            .unwrap_or_else(|| panic!("no case {}", self.case))
    }

    fn options(&self) -> Options {
        let tile = tile_fields(self.tile.as_deref().unwrap_or_default());
        let mut plan = PlanOptions::default().allow_fallback(true).tile(tile);
        plan.kernel.clone_from(&self.kernel);
        Options { plan, ..Options::default() }
    }

    fn open(&self) -> Result<Device, Error> {
        let arch = self.arch.as_str();
        if arch.starts_with("gfx") { fmha_rocm::open(0, Some(arch)) } else { fmha_cuda::open(0, Some(arch)) }
    }

    /// Text of the header with the fault.
    fn edited(&self, header: &str) -> String {
        let Some(line) = self.line else {
            assert_eq!(header.matches(&self.text).count(), 1, "{}: `{}`", self.what, self.text);
            return header.replace(&self.text, &self.put);
        };
        let edit = |(at, text): (usize, &str)| {
            if at + 1 == line { text.replacen(&self.text, &self.put, 1) } else { text.to_owned() }
        };
        header.lines().enumerate().map(edit).collect::<Vec<_>>().join("\n") + "\n"
    }

    /// Kernels of the case with the fault, under the keys of the correct ones. Unchanged kernels are left out.
    fn broken(&self, case: &Case, backend: &Device) -> Result<Vec<Arc<CompiledKernel>>, Error> {
        let compiler = backend.precompiler().unwrap();
        let mut kernels = Vec::new();
        let mut includes = false;
        for sound in jobs(case, backend, &self.options().plan) {
            let (mut plain, mut broken) = (sound.clone(), sound.clone());
            let mut headers = sound.source.headers().to_vec();
            let Some(header) = headers.iter_mut().find(|header| header.name == self.header) else { continue };
            header.text = Cow::Owned(self.edited(&header.text));
            broken.source = KernelSource::with(sound.source.entry.clone(), headers);
            includes = true;
            if self.line.is_some() {
                if !may_differ(compiler, &sound, &broken) {
                    continue;
                }
                // Line tables are left out: they name each compilation's folder, by which equal code would differ.
                if sound.arch.starts_with("gfx") {
                    plain.flags.push("-g0".to_owned());
                    broken.flags.push("-g0".to_owned());
                }
            }
            let image = |kernel: &CompiledKernel| kernel.image(sound.image).map(without_lines);
            let (was, now) = (compiler.precompile(&plain)?, compiler.precompile(&broken)?);
            if image(&was) != image(&now) {
                kernels.push(Arc::new(CompiledKernel { key: sound.key(), ..Arc::unwrap_or_clone(now) }));
            }
        }
        // A mutant, which edits a line, is tried on cases of kernels that need not include the line.
        let may_be_elsewhere = self.line.is_some();
        assert!(
            includes || may_be_elsewhere,
            "{}: no kernel of {} includes {}",
            self.what,
            self.case,
            self.header
        );
        Ok(kernels)
    }

    fn fate(&self) -> Fate {
        let case = self.case();
        let open = || self.open().map_err(|error| Fate::Absent(error.to_string()));
        let run = || -> Result<Fate, Fate> {
            let backend = open()?;
            if !self.sound_is_known {
                let (outcome, text) = case.run(&backend, &self.options());
                let no_compiler = text.contains("no NVRTC") || text.contains("no clang");
                if outcome == Outcome::Failed && no_compiler {
                    return Err(Fate::Absent(text));
                }
                if outcome != Outcome::Passed {
                    return Err(Fate::Missed(format!("without it {outcome:?}: {text}")));
                }
            }
            let broken = self.broken(&case, &backend).map_err(|error| match error {
                Error::Compile { .. } => Fate::DoesNotCompile(error.to_string()),
                other => Fate::Absent(other.to_string()),
            })?;
            if broken.is_empty() {
                return Err(Fate::ChangesNothing);
            }
            // Backends opened from here on use the broken kernels.
            embed(Bundle::new("planted", broken));
            let backend = open()?;
            let (outcome, text) = case.run(&backend, &self.options());
            let text = format!("{text} {}", last_fault().unwrap_or_default());
            let named = self.found_as.as_ref().is_none_or(|name| text.contains(name));
            let found = outcome == Outcome::Failed && named;
            Ok(if found { Fate::Found(text) } else { Fate::Missed(format!("{outcome:?}: {text}")) })
        };
        run().unwrap_or_else(|fate| fate)
    }
}

/// Whether two texts of a kernel may give different code: not where they already give the same before it is
/// optimised, which takes a sixth of a compilation (0.07 s of 0.47 s; clang 0.3 s of 1.9 s).
fn may_differ(compiler: &dyn Precompile, sound: &KernelJob, broken: &KernelJob) -> bool {
    match (intermediate(compiler, sound), intermediate(compiler, broken)) {
        (Some(was), Some(now)) => was != now,
        _ => true,
    }
}

/// Assembly text without line information, whose file names contain the compiler's folder, and without the source's
/// hash in names of constants. Machine code is returned unchanged.
fn without_lines(image: &[u8]) -> Vec<u8> {
    let Ok(text) = std::str::from_utf8(image) else { return image.to_owned() };
    let tells = |line: &str| [".loc", ".file", "//"].iter().any(|start| line.trim_start().starts_with(start));
    let kept = text.lines().filter(|line| !tells(line));
    let kept = kept.collect::<Vec<_>>().join("\n");
    Regex::new("_entry_cu_[0-9a-f]{8}").unwrap().replace_all(&kept, "_entry_cu").into_owned().into_bytes()
}

/// Message of the AMD emulator about the last launch that it stopped.
fn last_fault() -> Option<String> {
    type LastFault = unsafe extern "C" fn(*mut u8, usize) -> usize;
    let path = Double { file: "libfmha_emu_amdhip64.so", package: "fmha-emu-hip" }.find().ok()?;
    let mut text = [0; 2000];
    // SAFETY: the library is ours; the function has this type, and as much room as it is told.
    let bytes = unsafe {
        let library = libloading::Library::new(path).ok()?;
        let last = library.get::<LastFault>(b"fmhaEmulatorLastFault").ok()?;
        last(text.as_mut_ptr(), text.len())
    };
    Some(String::from_utf8_lossy(&text[..bytes.min(text.len() - 1)]).into_owned())
}

/// Calls `one` with each of `all`, as many at a time as there are processors.
pub(crate) fn each<T: Sync>(all: &[T], one: impl Fn(&T) + Sync) {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        while let Some(item) = all.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
            one(item);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
}
