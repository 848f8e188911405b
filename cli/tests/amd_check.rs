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
    for part in [
        "## Machine",
        "gfx942",
        "emulated",
        "K is read once",
        "8 passed, 0 failed",
        "nothing was timed",
        "| cdna_fwd | - |",
        "| cdna_bwd | - |",
        "| cdna_decode | - |",
        "3 of 3 rows: emulated: checked against f64, not timed",
        // Counters of the backward's launches, without a speed.
        "| row | launches | wave instructions | of the matrix unit | its passes of 4 cycles | LDS instructions |",
        "| bytes of lines touched | work items | bytes that they read | busiest unit by the mean | modelled at",
        "Nothing here was timed.",
    ] {
        assert!(text.contains(part), "`{part}` is not in the report:\n{text}");
    }
}

/// Figures of some owners beside ours: the report names those that are missing.
#[test]
fn the_peers_of_amd_are_named_whether_they_are_there_or_not() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/amd-peers.py");
    let run = |words: &[&str]| Command::new("python3").arg("-B").arg(&script).args(words).output();
    let Ok(listed) = run(&["--list"]) else {
        return println!("absent: python3");
    };
    let said = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.status.success() && said.lines().count() == 3, "{said}");
    for (line, name) in said.lines().zip(["PyTorch", "AITER", "CK (flash-attn)"]) {
        let told = ["installed", "absent"].map(|word| line.starts_with(&format!("{word}: {name} (package ")));
        assert!(told[0] != told[1], "{line}");
    }
    for words in [&[][..], &["--lists"], &["fmha", "more"]] {
        let refused = run(words).unwrap();
        let why = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            !refused.status.success() && why.contains("takes the program fmha or --list"),
            "{words:?}: {why}"
        );
    }
}

/// The peers' script calls the command as it is, over latent rows too.
#[test]
fn the_peers_script_of_amd_calls_the_command_as_it_is() {
    let python = "import importlib.util as u, json, sys\n\
                  spec = u.spec_from_file_location('amd_peers', sys.argv[1])\n\
                  peers = u.module_from_spec(spec)\n\
                  spec.loader.exec_module(peers)\n\
                  row = ('backward', 1, 64, 64, 2, 1, 32, False)\n\
                  print(json.dumps([peers.command('fmha', row)[1:], peers.common.amount(*row)]))\n\
                  print(json.dumps([peers.latent_command('fmha', 2, 96, 4)[1:], peers.latent_bytes(2, 96, 4)]))\n";
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/amd-peers.py");
    let Ok(output) = Command::new("python3").args(["-Bc", python]).arg(script).output() else {
        return println!("absent: python3");
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(said.lines().count(), 2, "{said}");
    for (line, of) in said.lines().zip(["bwd", "pages of 64, V in K"]) {
        let (words, amount): (Vec<String>, f64) = serde_json::from_str(line).unwrap();
        let words: Vec<&str> = words.iter().map(|word| if word == "rocm" { "cpu" } else { word }).collect();
        let output = Command::new(env!("CARGO_BIN_EXE_fmha")).args(&words).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        let run: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(run["problem"].as_str().unwrap().contains(of) && amount > 0.0, "{words:?}: {text}");
    }
}
