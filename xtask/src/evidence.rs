//! Counts of test results, and hashes of the text that was tested: `tests/evidence/*.txt`, and the table of
//! docs/measured/battery.md made of them.
//!
//! A battery, a mutation run or a run on a device is valid only for its device text and emulator. So each figure is
//! stored with their hash, and shown as stale when the hash changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

/// Page that contains the table.
const PAGE: &str = "docs/measured/battery.md";

const BEGIN: &str = "<!-- support: written by `cargo xtask support` from tests/evidence -->\n";
const END: &str = "<!-- end of support -->";
const FOLDER: &str = "tests/evidence";

/// Headers outside a kernel's own folder that its launches begin with, by kernel.
const ENTRIES: [(&str, &str); 5] = [
    ("combine", "fmha/combine.cuh"),
    ("combine", "fmha/combine.h"),
    ("sm100", "fmha/common/merge_parts.cuh"),
    ("rdna_decode", "fmha/cdna/decode/merge.h"),
    ("rdna_decode", "fmha/cdna/decode/update.h"),
];
/// Folders inside one kernel's folder that belong to another kernel, by kernel.
const WITHIN: [(&str, &str); 1] = [("sm90", "sm90/mla")];
const FALLBACK: &str = "simt";

/// Figures of one run of the battery.
#[derive(Debug, Default, PartialEq, Eq)]
struct Evidence {
    /// Device of the run: `cuda, NVIDIA H200` or `rocm, gfx942 emulated`.
    on: String,
    /// Date of the run: `2026-11-22`.
    made: String,
    /// Filter of the cases, or `all`.
    cases: String,
    /// Hash of the emulator, for an emulated run.
    emulator: Option<String>,
    figures: Vec<Figure>,
}

/// Result of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Figure {
    /// Name of the kernel in plans; several, joined by `+`, where a case ran on several.
    kernel: String,
    /// Counts as printed: `3120 passed, 0 failed`.
    found: String,
    /// Hash of the kernel's text at the time of the run.
    text: String,
}

/// Folder of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Stores the figures that a run printed, with the present hashes: `cargo xtask evidence ON FILE [CASES]`.
pub(crate) fn keep(on: &str, file: &str, cases: &str) -> Result<(), String> {
    let printed = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
    let figures = counts(&printed)
        .into_iter()
        .map(|(kernel, found)| Ok(Figure { text: text_hash(on, &kernel)?, kernel, found }))
        .collect::<Result<Vec<_>, String>>()?;
    if figures.is_empty() {
        return Err(format!("{file}: no line of a kernel's counts in it"));
    }
    let emulator = emulator_folder(on).map(|folder| hash_of(&[folder])).transpose()?;
    let evidence = Evidence { on: on.to_owned(), made: today(), cases: cases.to_owned(), emulator, figures };
    let name: String = on.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let path = root().join(FOLDER).join(format!("{name}.txt"));
    std::fs::write(&path, evidence.to_text()).map_err(|error| format!("{}: {error}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

/// Counts by kernel, from lines such as `kernel sm90         12 passed, 0 failed, 0 refused, 3 absent`; lines of
/// several parts are added.
fn counts(printed: &str) -> Vec<(String, String)> {
    let mut sums: BTreeMap<String, [u64; 2]> = BTreeMap::new();
    for line in printed.lines() {
        let mut words = line.strip_prefix("kernel ").unwrap_or_default().split_whitespace();
        let Some(kernel) = words.next() else { continue };
        let numbers: Vec<u64> = words.filter_map(|word| word.parse().ok()).collect();
        if let [passed, failed, _, _] = numbers[..] {
            let sum = sums.entry(kernel.to_owned()).or_default();
            *sum = [sum[0] + passed, sum[1] + failed];
        }
    }
    sums.into_iter()
        .map(|(kernel, [passed, failed])| (kernel, format!("{passed} passed, {failed} failed")))
        .collect()
}

impl Evidence {
    /// Parses a file of one fact a line: a word, a tab, the rest.
    fn parse(text: &str) -> Result<Self, String> {
        let mut evidence = Self::default();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let fields: Vec<&str> = line.split('\t').collect();
            match fields[..] {
                ["on", on] => on.clone_into(&mut evidence.on),
                ["made", made] => made.clone_into(&mut evidence.made),
                ["cases", cases] => cases.clone_into(&mut evidence.cases),
                ["emulator", hash] => evidence.emulator = Some(hash.to_owned()),
                ["kernel", kernel, found, text] => {
                    let [kernel, found, text] = [kernel, found, text].map(str::to_owned);
                    evidence.figures.push(Figure { kernel, found, text });
                }
                _ => return Err(format!("`{line}` is no line of evidence")),
            }
        }
        if evidence.on.is_empty() || evidence.made.is_empty() || evidence.figures.is_empty() {
            return Err("evidence without `on`, `made` or figures".to_owned());
        }
        Ok(evidence)
    }

    fn to_text(&self) -> String {
        let mut text = format!(
            "# Written by cargo xtask evidence: what was counted, and the hash of the text that it was counted on.\n\
             on\t{}\nmade\t{}\ncases\t{}\n",
            self.on, self.made, self.cases
        );
        // Writing to a string can not fail.
        if let Some(emulator) = &self.emulator {
            let _ = writeln!(text, "emulator\t{emulator}");
        }
        for Figure { kernel, found, text: hash } in &self.figures {
            let _ = writeln!(text, "kernel\t{kernel}\t{found}\t{hash}");
        }
        text
    }

    /// Whether the device text and emulator of a figure are unchanged.
    fn is_fresh(&self, figure: &Figure) -> bool {
        let same = text_hash(&self.on, &figure.kernel).is_ok_and(|now| now == figure.text);
        let emulator = emulator_folder(&self.on).and_then(|folder| hash_of(&[folder]).ok());
        same && emulator == self.emulator
    }

    fn row(&self, figure: &Figure, is_fresh: bool) -> String {
        let fallback = figure.kernel.split('+').any(|kernel| kernel == FALLBACK);
        let kernel = format!("{}{}", figure.kernel, if fallback { " (fallback)" } else { "" });
        let made = if is_fresh { self.made.clone() } else { format!("**stale**, {}", self.made) };
        format!("| {} | {kernel} | {} | {} | {made} |", self.on, self.cases, figure.found)
    }
}

/// Folder of the emulator that a run's title names.
fn emulator_folder(on: &str) -> Option<&'static str> {
    let vendor = on.split([',', ' ']).next()?;
    match vendor {
        "cuda" if on.contains("emulated") => Some("tests/emulators/ptx/src"),
        "rocm" if on.contains("emulated") => Some("tests/emulators/cdna/src"),
        _ => None,
    }
}

/// Folders of headers whose functions are one instruction each; a kernel uses a few of them.
const INSTRUCTIONS: [&str; 2] = ["ptx", "isa"];

/// Hash of a kernel's text: the headers of the folder with which its name begins, and those that they include; of
/// single-instruction functions, only those that it names. A case that ran on several kernels counts for all of
/// them.
fn text_hash(on: &str, kernel: &str) -> Result<String, String> {
    let folders: &[&str] = match on.split([',', ' ']).next().unwrap_or_default() {
        "cpu" => return hash_of(&["backend-cpu/src"]),
        "cuda" => &["kernels-cuda", "core/device"],
        "rocm" => &["kernels-hip", "core/device"],
        other => return Err(format!("`{other}` is no backend")),
    };
    let mut reached: BTreeMap<PathBuf, String> = BTreeMap::new();
    let mut open: Vec<PathBuf> = Vec::new();
    for kernel in kernel.split('+') {
        let entries: Vec<&str> =
            ENTRIES.iter().filter(|(of, _)| *of == kernel).map(|(_, header)| *header).collect();
        for folder in folders {
            let base = Path::new(folder);
            let others = WITHIN.iter().filter(|(of, _)| *of == kernel);
            let begins = |header: &PathBuf| {
                let Ok(name) = header.strip_prefix(base.join("fmha")) else { return false };
                // The headers are a file or a folder of the architecture: for `cdna_bwd` the file or folder `bwd` of
                // cdna.
                let own = kernel.replacen('_', "/", 1);
                name.to_string_lossy().starts_with(&own)
                    && !others.clone().any(|(_, folder)| name.starts_with(folder))
                    || entries.iter().any(|entry| *header == base.join(entry))
            };
            open.extend(files_below(&[&format!("{folder}/fmha")])?.into_iter().filter(begins));
        }
    }
    if open.is_empty() {
        return Err(format!("no header begins kernel `{kernel}`"));
    }
    while let Some(path) = open.pop() {
        let text = std::fs::read_to_string(root().join(&path))
            .map_err(|error| format!("{}: {error}", path.display()))?;
        let text = without_comments(&text);
        let included = text.lines().filter_map(|line| line.strip_prefix("#include <")?.split_once('>'));
        for (name, _) in included {
            // A header that is in neither folder is made by Rust code.
            let paths = folders.iter().map(|folder| Path::new(folder).join(name));
            open.extend(paths.filter(|path| root().join(path).exists() && !reached.contains_key(path)));
        }
        reached.insert(path, text);
    }
    let named = words(reached.values());
    for (path, text) in &mut reached {
        if path.iter().any(|folder| INSTRUCTIONS.iter().any(|instructions| folder == *instructions)) {
            *text = without_unnamed_functions(text, &named);
        }
    }
    Ok(hash_of_texts(reached.into_iter().map(|(path, text)| (path, text.into_bytes()))))
}

/// A text without the lines that are comments: a comment changes no result, so it makes no figure stale.
fn without_comments(text: &str) -> String {
    text.split_inclusive('\n').filter(|line| !line.trim_start().starts_with("//")).collect()
}

/// Number of occurrences of each word in some texts.
fn words<'a>(texts: impl Iterator<Item = &'a String>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for word in texts.flat_map(|text| text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')) {
        *counts.entry(word.to_owned()).or_default() += 1;
    }
    counts
}

/// A header without the paragraphs of functions that are named nowhere else.
fn without_unnamed_functions(text: &str, named: &BTreeMap<String, usize>) -> String {
    let is_kept = |paragraph: &&str| {
        let own = words([(*paragraph).to_owned()].iter());
        let defined: Vec<&str> = paragraph
            .split("FMHA_DEVICE ")
            .skip(1)
            .filter_map(|rest| rest.split_once('(')?.0.split([' ', '&', '*']).next_back())
            .collect();
        defined.is_empty() || defined.iter().any(|name| named.get(*name) != own.get(*name))
    };
    text.split("\n\n").filter(is_kept).collect::<Vec<_>>().join("\n\n")
}

/// Hash of the names and texts of all files below some folders of the repository.
fn hash_of(folders: &[&str]) -> Result<String, String> {
    hash_of_files(files_below(folders)?)
}

fn files_below(folders: &[&str]) -> Result<BTreeSet<PathBuf>, String> {
    let mut files = BTreeSet::new();
    for folder in folders {
        let mut open = vec![PathBuf::from(folder)];
        while let Some(folder) = open.pop() {
            let entries = std::fs::read_dir(root().join(&folder))
                .map_err(|error| format!("{}: {error}", folder.display()))?;
            for name in entries.flatten().map(|entry| folder.join(entry.file_name())) {
                if root().join(&name).is_dir() {
                    open.push(name);
                } else {
                    files.insert(name);
                }
            }
        }
    }
    Ok(files)
}

fn hash_of_files(files: BTreeSet<PathBuf>) -> Result<String, String> {
    let read = |path: PathBuf| {
        let text =
            std::fs::read(root().join(&path)).map_err(|error| format!("{}: {error}", path.display()))?;
        let is_rust = path.extension().is_some_and(|ending| ending == "rs");
        let text = if is_rust { without_comments(&String::from_utf8_lossy(&text)).into() } else { text };
        Ok((path, text))
    };
    Ok(hash_of_texts(files.into_iter().map(read).collect::<Result<Vec<_>, String>>()?.into_iter()))
}

/// Hash of files' names and texts.
fn hash_of_texts(texts: impl Iterator<Item = (PathBuf, Vec<u8>)>) -> String {
    let mut hash = Sha256::new();
    for (path, text) in texts {
        let name = path.display().to_string();
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// All files of evidence, in order of their names.
fn all() -> Result<Vec<Evidence>, String> {
    let folder = root().join(FOLDER);
    let entries = std::fs::read_dir(&folder).map_err(|error| format!("{FOLDER}: {error}"))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "txt"));
    paths.sort();
    let read = |path: &PathBuf| {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string());
        text.and_then(|text| Evidence::parse(&text)).map_err(|error| format!("{}: {error}", path.display()))
    };
    paths.iter().map(read).collect()
}

/// Writes the table anew.
pub(crate) fn write_table() -> Result<(), String> {
    let path = root().join(PAGE);
    let page = std::fs::read_to_string(&path).map_err(|error| format!("{PAGE}: {error}"))?;
    let (before, rest) =
        page.split_once(BEGIN).ok_or("docs/measured/battery.md has no place for the table")?;
    let (_, after) = rest.split_once(END).ok_or("docs/measured/battery.md has no end of the table")?;
    let text = format!("{before}{BEGIN}{}{END}{after}", table(&all()?));
    std::fs::write(&path, text).map_err(|error| format!("{PAGE}: {error}"))
}

/// Table of all runs, one row for each kernel of a run.
fn table(all: &[Evidence]) -> String {
    let mut text = String::from("| on | kernel | cases | found | made |\n|---|---|---|---|---|\n");
    for evidence in all {
        for figure in &evidence.figures {
            text += &evidence.row(figure, evidence.is_fresh(figure));
            text.push('\n');
        }
    }
    text
}

/// Date of today in UTC, `2026-11-22` (Hinnant, "chrono-Compatible Low-Level Date Algorithms").
fn today() -> String {
    let days =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs() / 86_400);
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of the table.
    fn shown() -> Vec<String> {
        let page = std::fs::read_to_string(root().join(PAGE)).unwrap_or_default();
        let table = page
            .split_once(BEGIN)
            .and_then(|(_, rest)| rest.split_once(END))
            .map(|(table, _)| table.to_owned());
        table.unwrap_or_default().lines().skip(2).map(str::to_owned).collect()
    }

    #[test]
    fn no_stale_figure_is_shown_as_fresh() {
        let evidence = all().unwrap_or_else(|error| panic!("{error}"));
        let figures: Vec<(&Evidence, &Figure)> =
            evidence.iter().flat_map(|one| one.figures.iter().map(move |figure| (one, figure))).collect();
        let shown = shown();
        assert!(!shown.is_empty(), "{PAGE} has no table: cargo xtask support");
        for row in &shown {
            let honest = figures.iter().any(|(one, figure)| {
                *row == one.row(figure, false) || *row == one.row(figure, true) && one.is_fresh(figure)
            });
            assert!(honest, "no evidence for `{row}` as it is shown: cargo xtask support");
        }
    }

    #[test]
    fn a_figure_of_another_text_is_stale_and_one_of_this_text_is_not() {
        let on = "cuda, sm_90a emulated";
        let emulator = hash_of(&["tests/emulators/ptx/src"]).ok();
        let text = text_hash(on, "sm90").unwrap_or_default();
        let figure = Figure { kernel: "sm90".to_owned(), found: "3 passed, 0 failed".to_owned(), text };
        let one = Evidence {
            on: on.to_owned(),
            made: "2026-11-22".to_owned(),
            cases: "all".to_owned(),
            emulator,
            figures: vec![figure.clone()],
        };
        assert!(one.is_fresh(&figure));
        assert!(table(&[Evidence::parse(&one.to_text()).unwrap_or_default()]).contains("| 2026-11-22 |"));
        let other = Figure { text: "0".repeat(32), ..figure.clone() };
        assert!(!one.is_fresh(&other) && one.row(&other, false).contains("**stale**, 2026-11-22"));
        // Figures become stale when the emulator changes.
        assert!(!Evidence { emulator: Some("0".repeat(32)), ..one }.is_fresh(&figure));
    }

    #[test]
    fn another_architectures_text_is_no_part_of_a_kernel() {
        let hash = |kernel| text_hash("cuda", kernel).unwrap_or_default();
        assert_ne!(hash("sm90"), hash("simt"));
        assert_ne!(hash("sm100"), hash("sm90"));
        assert_ne!(hash("sm90_mla"), hash("sm90"));
        assert_ne!(hash("sm90+sm90_mla"), hash("sm90"));
        assert_ne!(hash("combine"), hash("combine+sm90"));
        let of_cdna = |kernel| text_hash("rocm", kernel).unwrap_or_default();
        assert_ne!(of_cdna("cdna_bwd"), of_cdna("cdna_decode"));
        assert!(text_hash("tpu", "sm90").is_err());
    }

    #[test]
    fn an_instruction_that_a_kernel_does_not_name_is_no_part_of_it() {
        let header = "#pragma once\n\n// Adds.\nFMHA_DEVICE float add(float a) { return add_asm(a); }\n\n\
                      FMHA_DEVICE float other(float a) { return a; }\n\n}  // namespace";
        let kept = |user: &str| {
            let texts = [header.to_owned(), user.to_owned()];
            without_unnamed_functions(header, &words(texts.iter()))
        };
        assert!(!kept("y = ptx::add(x);").contains("other") && kept("y = ptx::add(x);").contains("Adds."));
        assert_eq!(kept("add other"), header);
        assert_eq!(kept(""), "#pragma once\n\n}  // namespace");
    }

    #[test]
    fn a_comment_is_no_part_of_a_text_and_a_blank_line_is() {
        let text = "// Adds.\nfloat add(float a);  // once\n\n  // Twice,\n  /// or more.\nint b;";
        assert_eq!(without_comments(text), "float add(float a);  // once\n\nint b;");
        assert_eq!(without_comments("int a = 1;\n"), "int a = 1;\n");
    }

    #[test]
    fn counts_of_parts_are_summed_by_kernel_and_other_lines_are_not_counted() {
        let printed = "39 cases on cuda:0\nkernel sm90    2 passed, 1 failed, 0 refused, 0 absent\n\
                       edges   5 passed, 0 failed, 3 refused, 0 absent\nkernel sm90  5 passed, 0 failed, 0 refused, 0 absent\n\
                       kernel combine+simt 4 passed, 0 failed, 0 refused, 0 absent";
        let found = [("combine+simt", "4 passed, 0 failed"), ("sm90", "7 passed, 1 failed")];
        assert_eq!(counts(printed), found.map(|(kernel, found)| (kernel.to_owned(), found.to_owned())));
    }

    #[test]
    fn today_is_a_date() {
        let today = today();
        let numbers: Vec<u32> = today.split('-').filter_map(|part| part.parse().ok()).collect();
        let [year, month, day] = numbers[..] else { panic!("{today}") };
        assert!(year >= 2025 && (1..=12).contains(&month) && (1..=31).contains(&day), "{today}");
    }
}
