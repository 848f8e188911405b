//! `every_field.c` against the shared library: the header as a C compiler reads it, the ABI as C calls it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Cargo puts the library beside the tests' programs.
fn library() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let library = folder.join("libfmha_c.so");
    assert!(library.is_file(), "{} is not there", library.display());
    library
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "links as ELF does")]
fn a_c_program_that_changes_any_field_is_refused_by_its_name() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/every_field.c");
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("every_field");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let compiled = Command::new(&compiler)
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .args([&program, &source, &library()])
        .output();
    // What links Rust programs is a C compiler: its absence is a broken machine, not a reason to pass.
    let compiled = compiled.unwrap_or_else(|error| panic!("{compiler}: {error}"));
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&program).env("LD_LIBRARY_PATH", library().parent().unwrap()).output().unwrap();
    let text = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{text}");
    let tried: u32 = text.split_whitespace().next().unwrap().parse().unwrap();
    assert!(tried > 100, "{text}");
}

/// The adapter of the comparison kit (`bench/ours.py`) spells the structs out again for Python.
#[test]
fn the_kits_adapter_has_the_headers_fields_in_their_order() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = std::fs::read_to_string(root.join("fmha.h")).unwrap();
    let adapter = std::fs::read_to_string(root.join("../../bench/ours.py")).unwrap();
    for name in ["FmhaTensor", "FmhaGradients", "FmhaCache", "FmhaCall", "FmhaOptions"] {
        let body =
            header.split(&format!("typedef struct {name} {{")).nth(1).unwrap().split('}').next().unwrap();
        let fields: Vec<&str> = body
            .lines()
            .filter_map(|line| line.trim().strip_suffix(';')?.rsplit([' ', '*']).next())
            .collect();
        let class = adapter.split(&format!("class {name}(Structure):")).nth(1).unwrap();
        let class = class.split("\n\n").next().unwrap();
        let quoted: Vec<&str> = class.split('"').skip(1).step_by(2).collect();
        assert_eq!(quoted, fields, "{name}");
    }
}
