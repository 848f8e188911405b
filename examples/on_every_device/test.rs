//! Runs of the examples, and so of the README's code, without a device and on an emulated device of each kind.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::path::PathBuf;
use std::process::Command;

const EXAMPLES: [&str; 6] = ["attend", "explain", "own_tensors", "rollout", "serve", "sparse"];

/// Runs an example of this build, which Cargo puts next to the tests' folder; `auto` is the emulated device
/// if one is named.
fn run(example: &str, emulate: Option<&str>) -> Result<String, String> {
    run_with(example, emulate, &[])
}

fn run_with(example: &str, emulate: Option<&str>, words: &[&str]) -> Result<String, String> {
    let folder: PathBuf = std::env::current_exe().unwrap().parent().unwrap().with_file_name("examples");
    let program = folder.join(example);
    if !program.is_file() {
        println!("absent: {} (`cargo build --examples` makes it)", program.display());
        return Ok(String::new());
    }
    let mut command = Command::new(program);
    match emulate {
        Some(arch) => command.env("FMHA_EMULATE", arch),
        None => command.env_remove("FMHA_EMULATE"),
    };
    let output = command.args(words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(said) } else { Err(format!("{example} on {emulate:?}: {said}{error}")) }
}

fn all_run_on(arch: &str, kind: &str) {
    for example in EXAMPLES {
        match run(example, Some(arch)) {
            // The example `explain` prints the device for which it plans, here the emulated one.
            Ok(said) if example == "explain" && !said.is_empty() => {
                assert!(said.contains(kind) && said.contains(arch), "{said}");
            }
            Ok(_) => {}
            // The emulator's library or the compiler of kernels is missing.
            Err(text) if text.contains("NoDevice") => println!("absent: {text}"),
            Err(text) => panic!("{text}"),
        }
    }
}

#[test]
fn every_example_runs_without_a_word_about_devices() {
    for example in EXAMPLES {
        run(example, None).unwrap_or_else(|text| panic!("{text}"));
    }
}

/// The engine compares every step's logits with those of its request alone and with the definition. Its output says
/// that pages ran out and that prefixes were found.
#[test]
fn random_traces_are_served_with_the_bits_of_each_request_alone() {
    for seed in ["1", "2", "3", "4", "5", "6"] {
        let said = run_with("serve", None, &["--device", "cpu", "--seed", seed]);
        let said = said.unwrap_or_else(|text| panic!("seed {seed}: {text}"));
        let nothing = [" 0 found in the cache", " 0 pages given to others", " 0 requests computed again"];
        assert!(nothing.iter().all(|words| !said.contains(words)), "seed {seed} tries nothing: {said}");
    }
}

/// The example prints tokens per second of a mix of lengths, and of the mix padded. The report shows fewer keys for the
/// mix, however busy the machine is.
#[test]
fn a_mix_of_lengths_is_served_beside_the_same_padded_to_the_longest() {
    let said = run_with("serve", None, &["--device", "cpu", "--requests", "1"])
        .unwrap_or_else(|text| panic!("{text}"));
    if said.is_empty() {
        return;
    }
    let tokens =
        said.lines().find(|line| line.contains("padded to the longest")).unwrap_or_else(|| panic!("{said}"));
    let words = tokens.replace(['(', ','], "");
    let numbers: Vec<f64> = words.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert!(numbers.len() == 4 && numbers[0] > 0.0 && numbers[1] > 0.0 && numbers[2] > 3.0, "{tokens}");
    let lengths = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("lengths.txt");
    for (text, part) in [("5\n-1\n", "line 2 of the lengths: -1"), ("# none\n", "has none")] {
        std::fs::write(&lengths, text).unwrap();
        let error = run_with("serve", None, &["--lengths", lengths.to_str().unwrap()]).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn serving_refuses_words_that_it_does_not_know() {
    let error = run_with("serve", None, &["--seed", "x"]).unwrap_or_else(|text| text);
    assert!(error.is_empty() || error.contains("--seed x"), "{error}");
}

#[test]
fn every_example_runs_on_an_emulated_hopper() {
    all_run_on("sm_90a", "cuda");
}

#[test]
fn every_example_runs_on_an_emulated_blackwell() {
    all_run_on("sm_100a", "cuda");
}

#[test]
fn every_example_runs_on_an_emulated_mi300() {
    all_run_on("gfx942", "rocm");
}

#[test]
fn every_rung_of_the_ladder_is_right_on_an_emulated_hopper() {
    let said = match run("ladder", Some("sm_90a")) {
        Ok(said) if said.is_empty() => return,
        Ok(said) => said,
        Err(text) if text.contains("NoDevice") => return println!("absent: {text}"),
        Err(text) => panic!("{text}"),
    };
    let rows: Vec<&str> = said.lines().filter(|line| line.contains("warp instructions")).collect();
    // Two problems have eleven steps each, every one with its error and its bound.
    assert!(rows.len() == 22 && rows.iter().all(|row| row.contains(" of ")), "{said}");
    // From the rung with the swizzle on, no access to shared memory has a bank conflict.
    for row in rows {
        let plain =
            ["tiled", "tensor cores", "cp.async", "P in registers"].iter().any(|name| row.starts_with(name));
        assert_eq!(!row.contains(" 0 bank conflicts"), plain, "{row}");
    }
}
