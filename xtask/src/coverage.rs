//! `cargo xtask coverage`: which lines of the CUDA device text emulated runs execute: the battery's cases, the launches
//! that `cargo xtask mutation` breaks, and those that its pages have beside.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::kernels::HOPPER_ARCH;
use crate::mutation::pages::{PAGES, Page};
use crate::setup::{self, loudly};

/// File of reasons, `file | part of the line | why it is not executed`.
const REASONS: &str = "tests/evidence/cuda-coverage.reasons";
/// Folders of the fast kernels and of all text that they include.
const FAST: [&str; 5] = ["fmha/common/", "fmha/sm90/", "fmha/mma/", "fmha/ptx/", "fmha/combine.cuh"];

/// Cases of the battery that are run: all edges of one type, without head dimensions, whose kernels add nothing new;
/// its backward; FP8.
const BATTERY: &str = "^(edges/[^h].*bf16|laws/column.*bf16|combine/|rare/.*bf16|backward/.*bf16\
     |fp8/blocks/|(edges|fp8/(all|head_dim)|heads|rare)/.*(e4m3fn|e5m2)/)";

/// Lines of one file for which some kernel has code, each with whether it was executed.
type Lines = BTreeMap<u32, bool>;

/// Runs everything on the emulated device and writes `target/nightly/cuda-coverage.md`. With `lines`, reads the files
/// of earlier runs instead.
pub(crate) fn run(lines: &[&str]) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let paths = if lines.is_empty() { observe(&root)? } else { lines.iter().map(PathBuf::from).collect() };
    let mut files = BTreeMap::new();
    for path in &paths {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        read(&text, &mut files)?;
    }
    let reasons =
        std::fs::read_to_string(root.join(REASONS)).map_err(|error| format!("{REASONS}: {error}"))?;
    let (page, faults) = page(&files, &root, &reasons);
    print!("{page}");
    let path = setup::page("cuda-coverage.md", "cargo xtask coverage")?;
    std::fs::write(&path, page).map_err(|error| format!("{}: {error}", path.display()))?;
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n")) }
}

/// Runs everything with line recording; returns the recorded files.
fn observe(root: &Path) -> Result<Vec<PathBuf>, String> {
    let environment = setup::run();
    setup::build_with_emulators()?;
    let release = setup::target().join("release");
    let folder = setup::target().join("coverage");
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let cover = |name: &str| {
        let path = folder.join(name);
        let mut command = Command::new(setup::emulators().join("ptx-emu"));
        command.arg("cover").arg(&path).arg("--").arg(release.join("fmha")).current_dir(root);
        command.envs(environment.iter().cloned());
        (path, command)
    };
    let (path, mut battery) = cover("battery.txt");
    battery.args(["conformance", "--allow-fallback", "--backend", "cuda", "--emulate", HOPPER_ARCH]);
    loudly(battery.args(["--filter", BATTERY]))?;
    let mut paths = vec![path];
    let mut launches: Vec<(&Page, u32, &str)> = Vec::new();
    for page in PAGES.iter().filter(|page| page.arch == HOPPER_ARCH) {
        for broken in page.broken {
            launches.extend(broken.problems.iter().map(|problem| (page, broken.multiprocessors, *problem)));
        }
        launches.extend(page.also_covered.iter().map(|problem| (page, 1, *problem)));
    }
    for (i, (page, multiprocessors, problem)) in launches.into_iter().enumerate() {
        let (path, mut one) = cover(&format!("{i}.txt"));
        // Results are not checked here: the battery and the mutants check them.
        one.args(page.run(problem)).args(["--verify", "none"]);
        loudly(one.env("FMHA_EMULATE_SMS", multiprocessors.to_string()))?;
        paths.push(path);
    }
    Ok(paths)
}

/// Adds the lines that one file reports.
fn read(text: &str, files: &mut BTreeMap<String, Lines>) -> Result<(), String> {
    for line in text.lines() {
        let mut words = line.rsplitn(3, ' ');
        let executed = words.next().map(|word| word == "1");
        let number = words.next().and_then(|word| word.parse().ok());
        let (Some(executed), Some(number), Some(file)) = (executed, number, words.next()) else {
            return Err(format!("`{line}` is no line of a coverage file"));
        };
        *files.entry(file.to_owned()).or_default().entry(number).or_default() |= executed;
    }
    Ok(())
}

/// Text of the page, with lines of the fast kernels that lack a reason, and reasons that lack a line.
fn page(files: &BTreeMap<String, Lines>, root: &Path, reasons: &str) -> (String, Vec<String>) {
    let mut table = String::from("| file | lines with code | executed |\n|---|---|---|\n");
    let (mut list, mut faults) = (String::new(), Vec::new());
    let mut unused: BTreeSet<&str> =
        reasons.lines().filter(|l| !l.is_empty() && !l.starts_with('#')).collect();
    let sources = sources(root);
    for (file, text) in &sources {
        let lines = files.get(file).cloned().unwrap_or_default();
        let executed = lines.values().filter(|executed| **executed).count();
        // Writing to a string cannot fail.
        let _ = writeln!(table, "| {file} | {} | {executed} |", lines.len());
        if !FAST.iter().any(|prefix| file.starts_with(prefix)) {
            continue;
        }
        for (number, line) in text.lines().enumerate().map(|(i, line)| (i as u32 + 1, line.trim())) {
            let what = match lines.get(&number) {
                Some(false) => "not executed",
                // A function that wraps an instruction has code wherever it is compiled.
                None if line.contains("ptx::") && line.ends_with(';') && !is_declaration(line) => {
                    "in no kernel"
                }
                _ => continue,
            };
            let why = reason(reasons, file, line, &mut unused);
            if why.is_none() {
                faults.push(format!("{file}:{number} `{line}`: {what}, and no reason"));
            }
            let _ = writeln!(
                list,
                "| {file}:{number} | `{}` | {what} | {} |",
                line.replace('|', "\\|"),
                why.unwrap_or("**none**")
            );
        }
    }
    faults.extend(unused.iter().map(|reason| format!("{REASONS}: no line needs `{reason}`")));
    if list.is_empty() {
        list.push_str("Every line of the fast kernels was executed.\n");
    } else {
        list.insert_str(0, "| line of a fast kernel | text | | reason |\n|---|---|---|---|\n");
    }
    (format!("{table}\n{list}"), faults)
}

fn is_declaration(line: &str) -> bool {
    line.starts_with("using ") || line.starts_with("static_assert") || line.starts_with("//")
}

fn reason<'a>(reasons: &'a str, file: &str, line: &str, unused: &mut BTreeSet<&'a str>) -> Option<&'a str> {
    reasons.lines().filter(|l| !l.starts_with('#')).find_map(|reason| {
        let mut words = reason.splitn(3, " | ");
        let (of, part, why) = (words.next()?, words.next()?, words.next()?);
        if of.trim() != file || !line.contains(part.trim()) {
            return None;
        }
        unused.remove(reason);
        Some(why.trim())
    })
}

/// All files of the device text, by the name with which they are included.
fn sources(root: &Path) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    for base in ["kernels-cuda", "core/device"] {
        let base = root.join(base);
        let mut folders = vec![base.join("fmha")];
        while let Some(folder) = folders.pop() {
            for path in std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
                if path.is_dir() {
                    folders.push(path);
                } else if let (Ok(name), Ok(text)) =
                    (path.strip_prefix(&base), std::fs::read_to_string(&path))
                {
                    out.insert(name.display().to_string(), text);
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_not_executed_needs_a_reason_and_a_reason_a_line() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let text =
            std::fs::read_to_string(root.join("kernels-cuda/fmha/sm90/fwd/fwd.cuh")).unwrap_or_default();
        let at = text.lines().position(|line| line.contains("__syncthreads();")).map_or(0, |i| i + 1);
        let mut files = BTreeMap::new();
        assert_eq!(read(&format!("fmha/sm90/fwd/fwd.cuh {at} 0\n"), &mut files), Ok(()));
        let faults = |files: &BTreeMap<String, Lines>, reasons: &str| page(files, &root, reasons).1.len();
        let alone = faults(&files, "");
        assert!(alone > 0 && page(&files, &root, "").0.contains("not executed"));
        assert_eq!(faults(&files, "fmha/sm90/fwd/fwd.cuh | __syncthreads(); | for the test"), alone - 1);
        assert_eq!(faults(&files, "fmha/sm90/fwd/fwd.cuh | no such text | for the test"), alone + 1);
        // A line that one run has executed stays executed after a run that has not.
        for executed in [1, 0] {
            assert_eq!(read(&format!("fmha/sm90/fwd/fwd.cuh {at} {executed}\n"), &mut files), Ok(()));
            assert_eq!(faults(&files, ""), alone - 1);
        }
        assert!(read("fmha/sm90/fwd/fwd.cuh one 0", &mut files).is_err());
    }
}
