//! A program with both candle's cudarc and this crate: Cargo unites the features that the two request.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;

/// Checks that this crate's dependencies do not enable cudarc's `dynamic-loading`, with which cudarc's build script
/// would panic in a program that uses candle.
#[test]
fn a_program_with_candles_features_of_cudarc_builds() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let cargo = |verb: &str| {
        let mut command = Command::new(env!("CARGO"));
        command.args([verb, "--manifest-path"]);
        command.arg(root.join("tests/beside_candle/Cargo.toml"));
        command.env("CARGO_TARGET_DIR", root.join("target/beside_candle"));
        // Version for cudarc's build script, which would otherwise run an installed nvcc.
        command.env("CUDARC_CUDA_VERSION", "12080");
        command.output().unwrap()
    };
    let fetched = cargo("fetch");
    if !fetched.status.success() {
        return println!("absent: beside candle: {}", String::from_utf8_lossy(&fetched.stderr));
    }
    let checked = cargo("check");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}
