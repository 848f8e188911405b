//! `cargo xtask planted`: faults in host code, each built in a copy of the repository and found by a case.
//!
//! Faults in device text need no build: `tests/planted.rs`.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::setup::{self, loudly};

const FAULTS: &str = "tests/planted/host.tsv";

/// An edit of a file, and the options of `fmha conformance` that must then fail; a leading `NAME=value` sets the
/// environment.
struct Fault<'a> {
    file: &'a str,
    text: &'a str,
    put: &'a str,
    words: &'a str,
}

impl<'a> Fault<'a> {
    fn environment(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.words
            .split_whitespace()
            .map_while(|word| word.split_once('=').filter(|(name, _)| !name.starts_with('-')))
    }
}

/// Plants each fault and reports those that were not found.
pub(crate) fn run() -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let environment = setup::run();
    let list = std::fs::read_to_string(root.join(FAULTS)).map_err(|error| format!("{FAULTS}: {error}"))?;
    // The copies use the emulators of this tree.
    setup::build_emulators()?;
    let copy = setup::target().join("planted/tree");
    let mut missed = Vec::new();
    let faults = list.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    for line in faults {
        let fault = parse(line)?;
        if !is_found(&fault, &root, &copy, &environment)? {
            missed.push(format!(
                "{}: `{}` as `{}`: {} ends well",
                fault.file, fault.text, fault.put, fault.words
            ));
        }
    }
    if missed.is_empty() { Ok(()) } else { Err(missed.join("\n")) }
}

fn parse(line: &str) -> Result<Fault<'_>, String> {
    match line.split('\t').collect::<Vec<_>>()[..] {
        [file, text, put, words] => Ok(Fault { file, text, put, words }),
        _ => Err(format!("{FAULTS}: `{line}` is not four fields")),
    }
}

fn is_found(
    fault: &Fault<'_>,
    root: &Path,
    copy: &PathBuf,
    environment: &[(String, String)],
) -> Result<bool, String> {
    let _ = std::fs::remove_dir_all(copy);
    std::fs::create_dir_all(copy).map_err(|error| format!("{}: {error}", copy.display()))?;
    // The copy has the files that git knows, with their present content.
    let archive = "git ls-files -z | xargs -0 tar -cf - | tar -xf - -C \"$0\"";
    loudly(Command::new("sh").args(["-c", archive]).arg(copy).current_dir(root))?;
    let file = copy.join(fault.file);
    let text = std::fs::read_to_string(&file).map_err(|error| format!("{}: {error}", fault.file))?;
    if text.matches(fault.text).count() != 1 {
        return Err(format!("{}: `{}` does not stand in it once", fault.file, fault.text));
    }
    std::fs::write(&file, text.replace(fault.text, fault.put)).map_err(|error| error.to_string())?;
    let target = setup::target().join("planted/target");
    let mut build = Command::new(env!("CARGO"));
    loudly(build.args(["build", "--release"]).env("CARGO_TARGET_DIR", &target).current_dir(copy))?;
    let mut run = Command::new(target.join("release/fmha"));
    run.envs(environment.iter().cloned()).envs(fault.environment());
    run.arg("conformance").args(fault.words.split_whitespace().skip(fault.environment().count()));
    let status = run.status().map_err(|error| format!("fmha: {error}"))?;
    // Exit status 1 is a wrong result; any other status is not a finding.
    Ok(status.code() == Some(1))
}

/// Tests mutants of the host code: cargo-mutants' list, all in one build (`tools/schemata`).
pub(crate) fn mutants(words: &[&str]) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let environment = setup::run();
    setup::build_emulators()?;
    let mut command = Command::new(env!("CARGO"));
    command
        .args(["run", "--quiet", "--release", "--manifest-path", "tools/schemata/Cargo.toml", "--"])
        .args(words);
    command.envs(environment).env("CARGO_TARGET_DIR", setup::target().join("schemata/tool"));
    loudly(command.current_dir(root))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_fault_has_its_text_once_in_its_file() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let list = std::fs::read_to_string(root.join(FAULTS)).unwrap_or_default();
        let mut count = 0;
        for line in list.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let fault = parse(line).unwrap_or_else(|error| panic!("{error}"));
            let text = std::fs::read_to_string(root.join(fault.file)).unwrap_or_default();
            assert_eq!(text.matches(fault.text).count(), 1, "{}: {}", fault.file, fault.text);
            assert_ne!(fault.text, fault.put);
            count += 1;
        }
        assert!(count > 0);
    }
}
