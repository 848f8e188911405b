//! `tools/nvidia-check`, the script for an owner of an NVIDIA GPU, against the emulated A100, and what it
//! times peers by.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::fmha;

/// Whether an emulated A100 and a compiler for it exist here.
pub(super) fn is_emulated_here() -> bool {
    let ran = fmha("explain --backend cuda --emulate sm_80 -s 64 -d 64");
    if ran.status != 0 {
        println!("absent: emulated NVIDIA devices: {}", ran.err.lines().next().unwrap_or_default());
    }
    ran.status == 0
}

fn tool(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools").join(name)
}

#[test]
fn one_command_writes_a_report_of_any_gpu_since_ampere_and_exits_as_it_went() {
    if !is_emulated_here() {
        return;
    }
    for (arch, kernel) in [("sm_80", "sm80"), ("sm_100a", "sm100")] {
        let folder = tempfile::tempdir().unwrap();
        let report = folder.path().join("report.md");
        let output = Command::new(tool("nvidia-check"))
            .args(["--emulate", arch, "--filter", "^edges/lengths/bf16/s(1x2|2x1)/", "--program"])
            .args([env!("CARGO_BIN_EXE_fmha"), "--out"])
            .arg(&report)
            .output()
            .unwrap();
        let text = std::fs::read_to_string(&report).unwrap();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        for part in ["## Machine", arch, "emulated", "bwd", "nothing was timed"] {
            assert!(text.contains(part), "`{part}` is not in the report:\n{text}");
        }
        // Forward, decode and backward are planned; seven calls are watched, and cases of lists and their choice.
        let absent = text.matches("absent: a mask of a file").count();
        assert!(text.matches(kernel).count() >= 3, "{text}");
        assert_eq!(text.matches("PASS\n").count() + absent, 7, "{text}");
        let whole = |line: &&str| line.starts_with("all ") && line.contains(" 0 failed");
        assert_eq!(text.lines().filter(whole).count(), 2, "{text}");
    }
}

/// The peers' script counts a row's work like `fmha run`, whose JSON and options it uses.
#[test]
fn the_peers_script_calls_the_command_as_it_is() {
    let python = "import importlib.util as u, json, sys\n\
                  spec = u.spec_from_file_location('peers', sys.argv[1])\n\
                  peers = u.module_from_spec(spec)\n\
                  spec.loader.exec_module(peers)\n\
                  for row in [('forward', 1, 64, 64, 2, 1, 32, False), ('backward', 1, 64, 64, 2, 1, 32, False), \
                  ('decode', 2, 1, 96, 4, 2, 32, False)]:\n\
                  \x20   print(json.dumps([peers.command('fmha', *row)[1:], peers.amount(*row)]))\n";
    let run = Command::new("python3").args(["-c", python]).arg(tool("nvidia-peers.py")).output();
    let Ok(output) = run else { return println!("absent: python3") };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(said.lines().count(), 3, "{said}");
    for line in said.lines() {
        let (words, amount): (Vec<String>, f64) = serde_json::from_str(line).unwrap();
        let words: Vec<&str> = words.iter().map(|word| if word == "cuda" { "cpu" } else { word }).collect();
        let output = Command::new(env!("CARGO_BIN_EXE_fmha")).args(&words).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        let run: serde_json::Value = serde_json::from_str(&text).unwrap();
        let counted = if words.contains(&"1") && words.contains(&"96") { "bytes" } else { "flops" };
        assert_eq!(run[counted].as_f64().unwrap(), amount, "{words:?}: {text}");
        assert!(run["median_seconds"].as_f64().unwrap() > 0.0, "{text}");
    }
}
