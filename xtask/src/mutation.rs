//! `cargo xtask mutation`: the sm90 and sm100 kernels broken instruction by instruction in the emulator.

pub(crate) mod pages;

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::setup::{self, loudly};
use pages::{Broken, PAGES, Page};

/// Number of schedules of the unbroken kernel, each with other delays and another order of its CTAs.
const SCHEDULES: u32 = 100;

/// Records launches, breaks them, and writes `target/nightly/PAGE-mutation.md` for each page, or only for the page
/// `only`.
pub(crate) fn run(only: Option<&str>) -> Result<(), String> {
    let known: Vec<&str> = PAGES.iter().map(|page| page.name).collect();
    if let Some(name) = only.filter(|name| !known.contains(name)) {
        return Err(format!("`{name}` is no page of mutants: {}", known.join(", ")));
    }
    PAGES.iter().filter(|page| only.is_none_or(|only| only == page.name)).try_for_each(run_page)
}

fn run_page(page: &Page) -> Result<(), String> {
    let environment = setup::run();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    setup::build_with_emulators()?;
    let release = setup::target().join("release");
    let launches = setup::target().join("mutation").join(page.name);
    let mut mutate = Command::new(setup::emulators().join("ptx-emu"));
    mutate.arg("mutate").current_dir(&root);
    for (i, broken) in page.broken.iter().enumerate() {
        for (j, problem) in broken.problems.iter().enumerate() {
            let folder = launches.join(format!("{i}-{j}"));
            // Files of an earlier run would count as launches of this run.
            if folder.exists() {
                std::fs::remove_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
            }
            let mut record = Command::new(setup::emulators().join("ptx-emu"));
            record.arg("record").arg(&folder).args(["--sms", &broken.multiprocessors.to_string(), "--"]);
            record.arg(release.join("fmha")).args(page.run(problem));
            loudly(record.envs(environment.iter().cloned()).current_dir(&root))?;
            for launch in recorded(&folder, broken)? {
                mutate.arg(format!("{}={}", broken.title, launch.display()));
            }
        }
    }
    mutate
        .args(["--schedules", &SCHEDULES.to_string(), "--wrappers", "fmha/ptx/"])
        .args(["--sources", "kernels-cuda", "--sources", "core/device"])
        .args(["--reasons", &format!("tests/evidence/{}-mutation.reasons", page.name)])
        .arg("--out")
        .arg(setup::page(&format!("{}-mutation.md", page.name), "ptx-emu mutate")?);
    loudly(&mut mutate)
}

/// Launches of a call that run the kernel to be broken: those with code of its entry's file.
fn recorded(folder: &Path, broken: &Broken) -> Result<Vec<PathBuf>, String> {
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut all: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    all.sort_unstable();
    let named = format!("/{}\"", broken.entry);
    let mut launches = Vec::new();
    for path in all {
        let bytes = std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        if bytes.windows(named.len()).any(|part| part == named.as_bytes()) {
            launches.push(path);
        }
    }
    if launches.is_empty() {
        return Err(format!("{}: no launch of {} was recorded", folder.display(), broken.entry));
    }
    Ok(launches)
}
