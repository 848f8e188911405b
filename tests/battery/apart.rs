//! Tests that run in processes of their own, since one process emulates one NVIDIA architecture.

use std::env::current_exe;
use std::process::Command;

/// Runs one test of the calling program in a separate process, with these environment variables added. Returns its
/// output.
///
/// # Errors
/// The output, if the test failed or does not exist; the reason why the process could not be started.
pub fn run_test(name: &str, variables: &[(&str, &str)]) -> Result<String, String> {
    let program = current_exe().map_err(|error| error.to_string())?;
    let run = Command::new(program)
        .args([name, "--exact", "--nocapture"])
        .envs(variables.iter().copied())
        .output()
        .map_err(|error| error.to_string())?;
    let [said, erred] = [run.stdout, run.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    if run.status.success() && said.contains("1 passed") { Ok(said) } else { Err(format!("{said}\n{erred}")) }
}
