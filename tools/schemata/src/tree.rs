//! Copy of the repository that contains all mutants, and its build.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::mutant::Mutant;
use crate::rewrite::{LeftOut, Rewritten, rewrite};

/// Packages that are built: the crates with mutants and their tests, and the command. The emulators are not built from
/// the copy: `FMHA_EMULATOR_DIR` is their folder.
const PACKAGES: [&str; 6] = ["fmha-core", "fmha-cpu", "fmha-gpu", "fmha-cuda", "fmha-rocm", "fmha-cli"];

/// Folders of the packages that have mutants.
const MUTATED: [&str; 5] = ["core", "backend-cpu", "backend-gpu", "backend-cuda", "backend-rocm"];

/// Attribute, and the weaker one of the same length that replaces it. Code that is inlined into one function
/// throughout takes the optimiser's passes half an hour with all mutants in it; here the CPU's kernels are
/// functions of their own, but for the vectors' ([`VECTORS`]), and less is done to them.
const ALWAYS: [&str; 2] = ["#[inline(always)]", "#[inline]        "];
const VECTORS: &str = "backend-cpu/src/simd/";
const PROFILE: &str = "\n[profile.release.package.fmha-cpu]\nopt-level = 1\n";

/// Copy of the repository in a scratch folder.
pub(crate) struct Tree {
    root: PathBuf,
    /// Folder of the copy, its build and the results.
    pub(crate) scratch: PathBuf,
}

/// Test program, and the folder in which its tests run.
pub(crate) struct Program {
    pub(crate) path: PathBuf,
    pub(crate) folder: PathBuf,
}

impl Tree {
    pub(crate) fn new(root: &Path, scratch: PathBuf) -> Self {
        Self { root: root.to_owned(), scratch }
    }

    fn copy(&self) -> PathBuf {
        self.scratch.join("tree")
    }

    /// Path of the command.
    pub(crate) fn release(&self) -> PathBuf {
        self.scratch.join("build/release")
    }

    /// Copies, rewrites and builds. Mutants that do not compile are dropped until the rest compiles. Returns the reason
    /// for each mutant that is not in the build.
    pub(crate) fn build(&self, mutants: &[Mutant]) -> Result<(Vec<Program>, LeftOut), String> {
        self.copy_files(mutants)?;
        let mut left_out = self.kept_left_out(mutants);
        let mut copied = BTreeSet::new();
        loop {
            let rewritten = self.rewrite(mutants, &mut left_out, &copied)?;
            let errors = errors(&self.cargo("check", &[])?)?;
            let before = left_out.len() + copied.len();
            let known = copied.clone();
            for error in &errors {
                error.attribute(&rewritten, &known, &mut left_out, &mut copied);
            }
            self.keep_left_out(mutants, &left_out)?;
            let changed = left_out.len() + copied.len() - before;
            eprintln!("{} errors, {changed} mutants dropped or written otherwise", errors.len());
            match (errors.first(), changed) {
                (None, _) => break,
                (Some(error), 0) => return Err(format!("no mutant's error: {}", error.text)),
                _ => {}
            }
        }
        let programs = programs(&self.cargo("build", &["--lib", "--bins", "--tests"])?);
        if programs.is_empty() {
            Err("the build makes no test program".to_owned())
        } else {
            Ok((programs, left_out))
        }
    }

    /// Copies the files that git tracks or would add. [`Self::rewrite`] writes the rewritten ones.
    fn copy_files(&self, mutants: &[Mutant]) -> Result<(), String> {
        let mut git = Command::new("git");
        git.args(["ls-files", "-z", "-co", "--exclude-standard"]).current_dir(&self.root);
        let output = git.output().map_err(|error| format!("git: {error}"))?;
        let names = String::from_utf8_lossy(&output.stdout).into_owned();
        for name in names.split('\0').filter(|name| !name.is_empty() && !name.starts_with("tools/schemata/"))
        {
            let Ok(bytes) = std::fs::read(self.root.join(name)) else { continue };
            let bytes = match name.strip_suffix("Cargo.toml").map(|folder| folder.trim_end_matches('/')) {
                Some("") => [&bytes, PROFILE.as_bytes()].concat(),
                Some(folder) if MUTATED.contains(&folder) => String::from_utf8_lossy(&bytes)
                    .replacen(
                        "[dependencies]\n",
                        "[dependencies]\nfmha-mutant = { path = \"../mutant\" }\n",
                        1,
                    )
                    .into_bytes(),
                _ => bytes,
            };
            if !mutants.iter().any(|mutant| mutant.file == name) {
                write_changed(&self.copy().join(name), &bytes)?;
            }
        }
        let manifest = "[package]\nname = \"fmha-mutant\"\nversion = \"0.0.0\"\nedition = \"2024\"\n";
        write_changed(&self.copy().join("mutant/Cargo.toml"), manifest.as_bytes())?;
        write_changed(&self.copy().join("mutant/src/lib.rs"), include_bytes!("switch.rs"))
    }

    fn rewrite(
        &self,
        mutants: &[Mutant],
        left_out: &mut LeftOut,
        copied: &BTreeSet<u32>,
    ) -> Result<BTreeMap<String, Rewritten>, String> {
        let mut by_file: BTreeMap<&str, Vec<(u32, &Mutant)>> = BTreeMap::new();
        for (number, mutant) in (1..).zip(mutants) {
            by_file.entry(&mutant.file).or_default().push((number, mutant));
        }
        let mut all = BTreeMap::new();
        for (file, mutants) in by_file {
            let text = std::fs::read_to_string(self.root.join(file)).map_err(|e| format!("{file}: {e}"))?;
            let (rewritten, more) =
                rewrite(&text, &mutants, left_out, copied).map_err(|e| format!("{file}: {e}"))?;
            left_out.extend(more);
            let text = if file.starts_with(VECTORS) {
                rewritten.text.clone()
            } else {
                rewritten.text.replace(ALWAYS[0], ALWAYS[1])
            };
            write_changed(&self.copy().join(file), text.as_bytes())?;
            all.insert(file.to_owned(), rewritten);
        }
        Ok(all)
    }

    /// Messages of Cargo about the copy, one JSON value a line.
    fn cargo(&self, action: &str, targets: &[&str]) -> Result<String, String> {
        let mut command = Command::new("cargo");
        command.args([action, "--release", "--keep-going", "--message-format=json"]).args(targets);
        command.args(PACKAGES.iter().flat_map(|package| ["--package", package]));
        // `const` functions read the switch too, which needs a compiler intrinsic. Only this crate may use it.
        command.env("RUSTC_BOOTSTRAP", "fmha_mutant").env("RUSTFLAGS", "-Awarnings");
        command.env("CARGO_PROFILE_RELEASE_DEBUG", "false").env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
        command.env("CARGO_TARGET_DIR", self.scratch.join("build")).current_dir(self.copy());
        let output = command.stderr(Stdio::inherit()).output().map_err(|error| format!("cargo: {error}"))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn left_out_file(&self) -> PathBuf {
        self.scratch.join("left-out.tsv")
    }

    /// Mutants that an earlier build of the same list dropped.
    fn kept_left_out(&self, mutants: &[Mutant]) -> LeftOut {
        let text = std::fs::read_to_string(self.left_out_file()).unwrap_or_default();
        let kept: BTreeMap<&str, &str> =
            text.lines().filter_map(|line| line.split_once('\t')).map(|(why, name)| (name, why)).collect();
        let known = ["does not compile", "no guard compiles"];
        (1..)
            .zip(mutants)
            .filter_map(|(number, mutant)| {
                let why = kept.get(mutant.name.as_str())?;
                Some((number, *known.iter().find(|known| *known == why)?))
            })
            .collect()
    }

    fn keep_left_out(&self, mutants: &[Mutant], left_out: &LeftOut) -> Result<(), String> {
        let line = |(number, why): (&u32, &&str)| format!("{why}\t{}\n", mutants[*number as usize - 1].name);
        let text: String = left_out.iter().map(line).collect();
        write_changed(&self.left_out_file(), text.as_bytes())
    }
}

/// Writes a file only if its content differs, so that Cargo builds only what changed.
fn write_changed(path: &Path, bytes: &[u8]) -> Result<(), String> {
    if std::fs::read(path).is_ok_and(|found| found == bytes) {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(path, bytes))
        .map_err(|e| format!("{path:?}: {e}"))
}

/// Error of the compiler: its text, and the files and byte ranges that it points at, the main one first.
struct Fault {
    text: String,
    spans: Vec<(String, usize, usize)>,
}

impl Fault {
    /// Drops the mutant whose branch the error points into. If it points elsewhere into a site, the site's mutants get
    /// copies of the expression, or are dropped if they already have them.
    fn attribute(
        &self,
        rewritten: &BTreeMap<String, Rewritten>,
        known: &BTreeSet<u32>,
        left_out: &mut LeftOut,
        copied: &mut BTreeSet<u32>,
    ) {
        for (file, start, end) in &self.spans {
            let Some(file) = rewritten.get(file) else { continue };
            let inside = |range: &std::ops::Range<usize>| range.start <= *start && *end <= range.end;
            if let Some((_, number)) = file.branches.iter().find(|(range, _)| inside(range)) {
                left_out.insert(*number, "does not compile");
                return;
            }
        }
        for (file, start, end) in &self.spans {
            let Some(file) = rewritten.get(file) else { continue };
            let around = file.sites.iter().filter(|(range, _)| range.start <= *start && *end <= range.end);
            if let Some((_, numbers)) = around.min_by_key(|(range, _)| range.len()) {
                for number in numbers {
                    copied.insert(*number);
                    if known.contains(number) {
                        left_out.insert(*number, "no guard compiles");
                    }
                }
                return;
            }
        }
    }
}

fn errors(output: &str) -> Result<Vec<Fault>, String> {
    let mut all = Vec::new();
    for line in output.lines().filter(|line| line.contains("\"compiler-message\"")) {
        let value: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
        let message = &value["message"];
        // The last message only counts the others, so it is skipped.
        let spans = message["spans"].as_array().filter(|spans| !spans.is_empty());
        if let (Some("error"), Some(spans)) = (message["level"].as_str(), spans) {
            let text = message["rendered"].as_str().unwrap_or_default().to_owned();
            let mut spans: Vec<&Value> = spans.iter().collect();
            spans.sort_by_key(|span| span["is_primary"] != true);
            let place = |span: &&Value| {
                let byte = |name: &str| span[name].as_u64().unwrap_or_default() as usize;
                (
                    span["file_name"].as_str().unwrap_or_default().to_owned(),
                    byte("byte_start"),
                    byte("byte_end"),
                )
            };
            all.push(Fault { text, spans: spans.iter().map(place).collect() });
        }
    }
    Ok(all)
}

/// Test programs among the files that Cargo has built.
fn programs(output: &str) -> Vec<Program> {
    let parse = |line: &str| -> Option<Program> {
        let value: Value = serde_json::from_str(line).ok()?;
        let path = value["executable"].as_str().filter(|_| value["profile"]["test"] == true)?;
        let folder = Path::new(value["manifest_path"].as_str()?).parent()?.to_owned();
        let mutated = MUTATED.iter().any(|name| folder.ends_with(name));
        mutated.then(|| Program { path: path.into(), folder })
    };
    output.lines().filter_map(parse).collect()
}
