//! `fmha bundle`, and the use of its file. Needs NVRTC to make one; without it a test prints `absent`.

use std::path::Path;

use super::{Ran, command, fmha_in};

/// Runs the command like on a machine without toolkit, compiler and cache, with the bundle in its folder.
fn elsewhere(folder: &Path, line: &str) -> Ran {
    let mut command = command(folder, line);
    command.env("FMHA_BUNDLE", "k.fmha").env("FMHA_CACHE_DIR", "none").env("FMHA_NVRTC", "/nowhere");
    Ran::of(command.output().unwrap())
}

/// Bundles one problem's kernel into `k.fmha`, in both orders of its tiles and in 128 and 64 rows: which is
/// faster depends on how many there are.
fn bundled(folder: &Path) -> bool {
    let ran = fmha_in(folder, "explain --arch sm_90a --json");
    let plan: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    if let Some(reason) = plan["code"].as_str().unwrap().strip_prefix("none: ") {
        println!("absent: {reason}");
        return false;
    }
    let line = "bundle --arch sm_90a --keep-assembly --out k.fmha --filter f16/d64x64/causal/batch/lse/q512k512/gqa1";
    let ran = fmha_in(folder, line);
    assert_eq!(ran.status, 0, "{}", ran.err);
    assert!(ran.out.contains("1 problems, 4 kernels, 0 problems refused"), "{}", ran.out);
    true
}

/// Longer than the short sequences that have a kernel of their own.
const PROBLEM: &str = "-b 1 -h 1 -s 300 -d 64 --prec f16 --mask b --lse";

#[test]
fn a_bundle_serves_a_machine_without_a_compiler() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    if !bundled(folder) {
        return;
    }
    let ran = elsewhere(folder, &format!("explain --arch sm_90a {PROBLEM}"));
    assert!(ran.out.contains("bundle k.fmha"), "{}", ran.out);
    let emulated = "--backend cuda --emulate sm_90a --warmup 0 --repeat 1";
    let ran = elsewhere(folder, &format!("run {emulated} {PROBLEM}"));
    if ran.err.contains("no emulated CUDA device") {
        println!("absent: {}", ran.err);
        return;
    }
    assert!(ran.status == 0 && ran.out.contains("PASS"), "{}{}", ran.out, ran.err);

    let ran = elsewhere(folder, &format!("run {emulated} {PROBLEM} --softcap 5"));
    assert_eq!(ran.status, 2, "{}", ran.out);
    assert!(ran.err.contains("NVRTC") && ran.err.contains("not in k.fmha (4 kernels)"), "{}", ran.err);
}

#[test]
fn a_bundle_that_is_not_whole_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    if !bundled(folder) {
        return;
    }
    let whole = std::fs::read(folder.join("k.fmha")).unwrap();
    let mut changed = whole.clone();
    changed[whole.len() / 2] ^= 1;
    for (bytes, said) in [(&whole[..whole.len() - 1], "bytes of"), (&changed[..], "hash")] {
        std::fs::write(folder.join("k.fmha"), bytes).unwrap();
        let ran = elsewhere(folder, &format!("explain --arch sm_90a {PROBLEM}"));
        assert_eq!(ran.status, 2, "{}", ran.out);
        assert!(ran.err.contains("k.fmha") && ran.err.contains(said), "{}", ran.err);
    }
}

#[test]
fn what_cannot_be_bundled_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for (line, said) in [
        ("bundle --arch sm_12 --out k.fmha", "sm_12"),
        ("bundle --arch avx2 --out k.fmha", "avx2"),
        ("bundle --arch sm_90a --filter nothing-like-it --out k.fmha", "0 problems"),
    ] {
        let ran = fmha_in(folder.path(), line);
        assert!(ran.status == 2 && ran.err.contains(said), "{line}: {}", ran.err);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
