//! `ptx-emu record` and `ptx-emu cover`: a command run with the double of the driver told to note what it does.

use std::path::Path;
use std::process::Command;

/// `FOLDER [--sms N] -- COMMAND...`
pub(crate) fn record(mut words: impl Iterator<Item = String>) -> Result<(), String> {
    let folder = words.next().ok_or("record needs a folder")?;
    let mut words = words.peekable();
    let sms = match words.next_if_eq("--sms") {
        Some(_) => Some(words.next().ok_or("--sms needs a number")?),
        None => None,
    };
    let mut command = command(words)?;
    let folder = absolute(&folder)?;
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    command.env("FMHA_EMULATE_RECORD", folder);
    if let Some(sms) = sms {
        let number: u32 = sms.parse().map_err(|_| format!("--sms `{sms}` is no number"))?;
        command.env("FMHA_EMULATE_SMS", number.to_string());
    }
    finished(command)
}

/// `FILE -- COMMAND...`
pub(crate) fn cover(mut words: impl Iterator<Item = String>) -> Result<(), String> {
    let file = words.next().ok_or("cover needs a file")?;
    let mut command = command(words)?;
    command.env("FMHA_EMULATE_COVERAGE", absolute(&file)?);
    finished(command)
}

fn command(mut words: impl Iterator<Item = String>) -> Result<Command, String> {
    match (words.next().as_deref(), words.next()) {
        (Some("--"), Some(program)) => {
            let mut command = Command::new(program);
            command.args(words);
            Ok(command)
        }
        _ => Err("a command is wanted after `--`".to_owned()),
    }
}

/// The command may go to another folder.
fn absolute(path: &str) -> Result<std::path::PathBuf, String> {
    std::path::absolute(Path::new(path)).map_err(|error| format!("{path}: {error}"))
}

fn finished(mut command: Command) -> Result<(), String> {
    let status = command.status().map_err(|error| format!("{command:?}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{command:?}: {status}")) }
}
