//! The `fmha` command from its users' view: input, messages, files, and exit status.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[cfg(unix)]
mod amd;
#[cfg(unix)]
mod amd_check;
mod api;
#[cfg(unix)]
mod balance;
mod bench;
mod blackwell;
mod bundle;
mod conformance;
mod data;
mod explain;
#[cfg(unix)]
mod nvidia_check;
mod problems;
mod ranks;
mod readme;
mod run;
mod suggest;
mod tune;
mod wrong_input;

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Result of a run of the command.
struct Ran {
    status: i32,
    out: String,
    err: String,
}

impl Ran {
    fn of(output: Output) -> Self {
        Self {
            status: output.status.code().unwrap_or_else(|| panic!("ended by a signal: {output:?}")),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

fn command(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fmha"));
    command.args(line.split_whitespace()).current_dir(folder).stdin(Stdio::null());
    command
}

/// Runs the command in `folder`.
fn fmha_in(folder: &Path, line: &str) -> Ran {
    Ran::of(command(folder, line).output().unwrap())
}

/// Runs the command with no file to write.
fn fmha(line: &str) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    let ran = fmha_in(folder.path(), line);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "`fmha {line}` left a file");
    ran
}
