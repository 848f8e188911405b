//! `cargo xtask coverage`: which lines of the CUDA device text the battery's emulated cases execute.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::setup::{self, loudly};

const BEGIN: &str = "<!-- written by cargo xtask coverage -->";
const END: &str = "<!-- end of what cargo xtask coverage wrote -->";
const PAGE: &str = "docs/kernels/cuda-coverage.md";
/// `file | part of the line | why it is not executed`.
const REASONS: &str = "docs/kernels/cuda-coverage.reasons";
/// Kernels that are to be fast, and all that they are made of.
const FAST: [&str; 4] = ["fmha/sm90/", "fmha/mma/", "fmha/ptx/", "fmha/combine.cuh"];

/// Lines of one file: those that some kernel has code for, and whether it was executed.
type Lines = BTreeMap<u32, bool>;

/// Runs the battery on the emulated device and rewrites the page. With `lines`, the file of an earlier run is taken.
pub(crate) fn run(lines: Option<&str>) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let path = match lines {
        Some(path) => PathBuf::from(path),
        None => observe(&root)?,
    };
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let files = read(&text)?;
    let reasons =
        std::fs::read_to_string(root.join(REASONS)).map_err(|error| format!("{REASONS}: {error}"))?;
    let (page, unexplained) = page(&files, &root, &reasons)?;
    print!("{page}");
    let old = std::fs::read_to_string(root.join(PAGE)).map_err(|error| format!("{PAGE}: {error}"))?;
    let (before, rest) = old.split_once(BEGIN).ok_or_else(|| format!("{PAGE} has no `{BEGIN}`"))?;
    let (_, after) = rest.split_once(END).ok_or_else(|| format!("{PAGE} has no `{END}`"))?;
    std::fs::write(root.join(PAGE), format!("{before}{BEGIN}\n\n{page}\n{END}{after}"))
        .map_err(|error| format!("{PAGE}: {error}"))?;
    if unexplained == 0 { Ok(()) } else { Err(format!("{unexplained} lines not executed, and no reason")) }
}

fn observe(root: &Path) -> Result<PathBuf, String> {
    let environment = setup::run();
    let cargo = |packages: &[&str]| {
        loudly(Command::new(env!("CARGO")).args(["build", "--release"]).args(packages).current_dir(root))
    };
    cargo(&[])?;
    cargo(&["-p", "fmha-emu-ptx"])?;
    let release = setup::target().join("release");
    let path = setup::target().join("cuda-lines.txt");
    let mut cover = Command::new(release.join("ptx-emu"));
    cover.arg("cover").arg(&path).arg("--").arg(release.join("fmha"));
    cover.args(["conformance", "--allow-fallback", "--backend", "cuda", "--emulate", "sm_90a"]);
    loudly(cover.envs(environment).current_dir(root))?;
    Ok(path)
}

fn read(text: &str) -> Result<BTreeMap<String, Lines>, String> {
    let mut files = BTreeMap::<String, Lines>::new();
    for line in text.lines() {
        let mut words = line.rsplitn(3, ' ');
        let executed = words.next().map(|word| word == "1");
        let number = words.next().and_then(|word| word.parse().ok());
        let (Some(executed), Some(number), Some(file)) = (executed, number, words.next()) else {
            return Err(format!("`{line}` is no line of a coverage file"));
        };
        files.entry(file.to_owned()).or_default().insert(number, executed);
    }
    Ok(files)
}

/// The page's text, and how many lines of the fast kernels lack a reason.
fn page(files: &BTreeMap<String, Lines>, root: &Path, reasons: &str) -> Result<(String, usize), String> {
    let mut table = String::from("| file | lines with code | executed |\n|---|---|---|\n");
    let (mut list, mut unexplained) = (String::new(), 0);
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
                Some(true) => continue,
                Some(false) => "not executed",
                // What calls an instruction has code wherever it is compiled at all.
                None if line.contains("ptx::") && line.ends_with(';') && !is_declaration(line) => {
                    "in no kernel"
                }
                None => continue,
            };
            let why = reason(reasons, file, line, &mut unused);
            unexplained += usize::from(why.is_none());
            let _ = writeln!(
                list,
                "| {file}:{number} | `{}` | {what} | {} |",
                line.replace('|', "\\|"),
                why.unwrap_or("**none**")
            );
        }
    }
    if let Some(reason) = unused.first() {
        return Err(format!("{REASONS}: no line needs `{reason}`"));
    }
    if list.is_empty() {
        list.push_str("Every line of the fast kernels was executed.\n");
    } else {
        list.insert_str(0, "| line of a fast kernel | text | | reason |\n|---|---|---|---|\n");
    }
    Ok((format!("{table}\n{list}"), unexplained))
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

/// Every file of the device text by the name that kernels include it by.
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
        let text = std::fs::read_to_string(root.join("kernels-cuda/fmha/sm90/fwd.cuh")).unwrap_or_default();
        let at = text.lines().position(|line| line.contains("__syncthreads();")).map_or(0, |i| i + 1);
        let files = read(&format!("fmha/sm90/fwd.cuh {at} 0\n")).unwrap_or_default();
        let count =
            |reasons: &str| page(&files, &root, reasons).map(|(page, n)| (page.contains("not executed"), n));
        let (listed, alone) = count("").unwrap_or_default();
        assert!(listed && alone > 0);
        let with = count("fmha/sm90/fwd.cuh | __syncthreads(); | for the test");
        assert_eq!(with, Ok((true, alone - 1)));
        assert!(count("fmha/sm90/fwd.cuh | no such text | for the test").is_err());
        assert!(read("fmha/sm90/fwd.cuh one 0").is_err());
    }
}
