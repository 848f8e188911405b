//! `tools/amd-check`, the script for an owner of an AMD GPU, against the emulated one.

use std::path::Path;
use std::process::Command;

use super::amd::is_emulated_here;

#[test]
fn one_command_writes_a_report_of_the_battery_and_exits_as_it_went() {
    if !is_emulated_here() {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/amd-check");
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report.md");
    let output = Command::new(script)
        .args(["--emulate", "gfx942", "--filter", "^edges/lengths/bf16/s(1x2|2x1)/", "--program"])
        .args([env!("CARGO_BIN_EXE_fmha"), "--out"])
        .arg(&report)
        .output()
        .unwrap();
    let text = std::fs::read_to_string(&report).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for part in ["## Machine", "gfx942", "emulated", "8 passed, 0 failed", "nothing was timed"] {
        assert!(text.contains(part), "`{part}` is not in the report:\n{text}");
    }
}
