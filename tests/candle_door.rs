//! Tests of the crate for candle, bindings/candle, which is a workspace of its own: its tests are run from here.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;

#[test]
fn the_crate_for_candle_passes_its_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let cargo = |verb: &str| {
        let mut command = Command::new(env!("CARGO"));
        command.arg(verb).arg("--locked").arg("--manifest-path").arg(root.join("bindings/candle/Cargo.toml"));
        command.env("CARGO_TARGET_DIR", root.join("target/candle"));
        // Only one of the CPU backend's six instruction sets is built. Each set's results are tested in another job,
        // where they are optimised.
        let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
        command.env("RUSTFLAGS", format!("{flags} --cfg baseline_alone"));
        command.output().unwrap()
    };
    let fetched = cargo("fetch");
    if !fetched.status.success() {
        return println!("absent: candle: {}", String::from_utf8_lossy(&fetched.stderr));
    }
    let tested = cargo("test");
    let (output, errors) = (String::from_utf8_lossy(&tested.stdout), String::from_utf8_lossy(&tested.stderr));
    assert!(tested.status.success(), "{output}\n{errors}");
    let counted =
        |line: &str| line.strip_prefix("test result: ok. ")?.split(" ").next()?.parse::<usize>().ok();
    let passed: usize = output.lines().filter_map(counted).sum();
    assert!(passed > 10, "{passed} tests passed:\n{output}");
    println!("{output}");
}
