//! Faults planted in the kernels' text: each is compiled and run on an emulated device, and found by the case that
//! `planted/device.toml` names. Verified in emulation.
//!
//! The broken text goes into a bundle under the sound text's key, so that the backend takes it for the sound one. Each
//! fault has a process of its own: one driver's double emulates one architecture.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use fmha_conformance::case::{Case, all};
use fmha_conformance::deal::jobs;
use fmha_conformance::run::{Options, Outcome};
use fmha_core::cache::{Bundle, CompiledKernel, KernelJob, embed};
use fmha_core::{Error, FmhaBackend, PlanOptions};
use fmha_cuda::CudaBackend;
use fmha_rocm::RocmBackend;
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fault {
    what: String,
    arch: String,
    kernel: Option<String>,
    tile: Option<String>,
    header: String,
    /// What stands in it once, and what is put there.
    text: String,
    put: String,
    case: String,
    found_as: Option<String>,
    #[serde(default)]
    environment: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Faults {
    fault: Vec<Fault>,
}

fn faults() -> Vec<Fault> {
    toml::from_str::<Faults>(include_str!("planted/device.toml")).unwrap().fault
}

/// Tells a process which fault is its own.
const OWN: &str = "PLANTED_FAULT";

impl Fault {
    fn case(&self) -> Case {
        all()
            .into_iter()
            .find(|case| case.name == self.case)
            .unwrap_or_else(|| panic!("no case {}", self.case))
    }

    fn options(&self) -> Options {
        let words = self.tile.iter().flat_map(|tile| tile.split(','));
        let tile = words.filter_map(|word| word.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned()));
        let kernel = self.kernel.clone();
        let plan =
            PlanOptions { kernel, allow_fallback: true, tile: tile.collect(), ..PlanOptions::default() };
        Options { plan, ..Options::default() }
    }

    /// `None`, and a word of it, where there is no compiler or no emulator.
    fn open(&self) -> Option<Box<dyn FmhaBackend>> {
        let arch = self.arch.as_str();
        let opened: Result<Box<dyn FmhaBackend>, Error> = if arch.starts_with("gfx") {
            RocmBackend::open(0, Some(arch)).map(|backend| Box::new(backend) as _)
        } else {
            CudaBackend::open(0, Some(arch)).map(|backend| Box::new(backend) as _)
        };
        match opened {
            Ok(backend) => Some(backend),
            Err(error) => {
                println!("absent: {}: {error}", self.what);
                None
            }
        }
    }

    /// The case's kernels with the fault in them, under the sound ones' keys.
    fn broken(&self, backend: &dyn FmhaBackend) -> Result<Vec<Arc<CompiledKernel>>, Error> {
        let compiler = backend.precompiler().unwrap();
        let of_case: Vec<KernelJob> = jobs(&self.case(), backend, &self.options().plan);
        let mut kernels = Vec::new();
        for sound in of_case {
            let mut broken = sound.clone();
            let Some(header) = broken.source.headers.iter_mut().find(|header| header.name == self.header)
            else {
                continue;
            };
            assert_eq!(header.text.matches(&self.text).count(), 1, "{}: `{}`", self.what, self.text);
            header.text = Cow::Owned(header.text.replace(&self.text, &self.put));
            let kernel = Arc::unwrap_or_clone(compiler.precompile(&broken)?);
            kernels.push(Arc::new(CompiledKernel { key: sound.key(), ..kernel }));
        }
        assert!(!kernels.is_empty(), "{}: no kernel of {} includes {}", self.what, self.case, self.header);
        Ok(kernels)
    }

    /// What is wrong with how it was found, if anything is.
    fn missed(&self) -> Option<String> {
        let backend = self.open()?;
        let case = self.case();
        let (outcome, text) = case.run(&*backend, &self.options());
        if outcome == Outcome::Failed && text.contains("no NVRTC") {
            println!("absent: {}: {text}", self.what);
            return None;
        }
        if outcome != Outcome::Passed {
            return Some(format!("without it {outcome:?}: {text}"));
        }
        let broken = match self.broken(&*backend) {
            Ok(broken) => broken,
            Err(error) => return Some(format!("does not compile: {error}")),
        };
        // Of the backends that are opened from here on.
        embed(Bundle::new("planted", broken));
        let backend = self.open()?;
        let (outcome, text) = case.run(&*backend, &self.options());
        let fault = format!("{text} {}", last_fault().unwrap_or_default());
        println!("{} ({}): {fault}", self.what, self.arch);
        let named = self.found_as.as_ref().is_none_or(|name| fault.contains(name));
        (outcome != Outcome::Failed || !named).then(|| format!("{outcome:?}: {fault}"))
    }
}

/// The AMD emulator's words of the last launch that it stopped.
fn last_fault() -> Option<String> {
    const FILE: &str = "libfmha_emu_amdhip64.so";
    type LastFault = unsafe extern "C" fn(*mut u8, usize) -> usize;
    let program = std::env::current_exe().ok()?;
    let path: PathBuf = program.ancestors().skip(1).map(|up| up.join(FILE)).find(|path| path.exists())?;
    let mut text = [0; 2000];
    // SAFETY: the library is ours; the function has this type, and as much room as it is told.
    let bytes = unsafe {
        let library = libloading::Library::new(path).ok()?;
        let last = library.get::<LastFault>(b"fmhaEmulatorLastFault").ok()?;
        last(text.as_mut_ptr(), text.len())
    };
    Some(String::from_utf8_lossy(&text[..bytes.min(text.len() - 1)]).into_owned())
}

/// The process of one fault; without one there is nothing to do.
#[test]
fn the_fault_of_this_process_is_found() {
    let Some(index) = std::env::var(OWN).ok().and_then(|index| index.parse::<usize>().ok()) else { return };
    let fault = &faults()[index];
    assert_eq!(fault.missed(), None, "{}", fault.what);
}

#[test]
fn each_planted_fault_is_found_by_its_case_and_its_sound_twin_passes() {
    if std::env::var_os(OWN).is_some() {
        return;
    }
    let faults = faults();
    let (next, missed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((index, fault)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, faults.get(at)?)))
        {
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["the_fault_of_this_process_is_found", "--exact", "--nocapture", "--test-threads=1"])
                .env(OWN, index.to_string())
                .envs(&fault.environment)
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&child.stdout);
            for line in text.lines().filter(|line| line.starts_with("absent: ") || line.contains(&fault.what))
            {
                println!("{line}");
            }
            if !child.status.success() {
                println!("{}\n{text}\n{}", fault.what, String::from_utf8_lossy(&child.stderr));
                missed.lock().unwrap().push(fault.what.clone());
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not found, or not as expected: {missed:#?}");
    println!("{} faults planted in device text", faults.len());
}
