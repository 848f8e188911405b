//! `cargo xtask test`: everything the tests need is set up, then everything is tested.
//!
//! The set-up installs what is available (a compiler from the system's packages, one from PyPI into `target/`) and
//! reports what is not: tests that need it print `absent`, and do not count as passed. Tests for which CI has no
//! time do so too; `--all` runs them.

#[path = "../../bindings/c/install.rs"]
mod c_install;
mod coverage;
mod doc_tests;
mod evidence;
mod kernels;
mod mutation;
mod mutation_amd;
mod planted;
mod platforms;
mod python;
mod setup;
mod step;
mod suite;
mod tally;

use std::path::Path;
use std::process::{Command, ExitCode};

use suite::Extent;

const USAGE: &str = "\
usage: cargo xtask test      set up, build in release, test what CI has time for; counts, and seconds a step
       cargo xtask test --quick
                             before a commit: the crates' own tests, the laws of the house, a slice of the battery on the
                             CPU, one emulated case of each kernel; two minutes, once it is built
       cargo xtask test --all [--part I/N]
                             everything, or a part of it: the N parts together are everything
       cargo xtask nightly   all of it, and what follows but for the mutants of host code; tables into target/nightly
       cargo xtask setup     only the set-up; prints what `fmha` finds the compilers by
       cargo xtask python    the Python package's tests alone
       cargo xtask wheel [--bundle ARCHS [FILTER]...]
                             the Python package with its library, into target/wheels; with compiled kernels for these
                             architectures: bf16 of head dimensions 64 and 128, or what `fmha bundle --filter` takes
       cargo xtask wheels    wheels for Linux on x86-64 and AArch64 and for Windows; this system's is installed and tried
       cargo xtask c-install PREFIX
                             the C library under PREFIX: fmha.h, libfmha.so, libfmha.a, fmha.pc
       cargo xtask evidence ON FILE [CASES]
                             what `fmha conformance` printed into FILE (ON: `cuda, NVIDIA H200`, `rocm, gfx942 emulated`),
                             kept in tests/evidence with the hash of the text that it was counted on
       cargo xtask support   the table of docs/measured/battery.md from tests/evidence
       cargo xtask planted   faults in host code, each built in a copy and found by a case
       cargo xtask mutants [--shard I/N] [--of WORDS] [--again FATE] [--jobs N]
                             cargo-mutants' mutants of core, the backends' host code and the CPU backend, all in one
                             build: `tools/schemata`
       cargo xtask mutation [PAGE]
                             the sm90, sm90-bwd, sm100 and sm100-bwd kernels (or one of them) broken instruction by
                             instruction in the emulator, into target/nightly/PAGE-mutation.md; sound, under 100 schedules
       cargo xtask mutation-amd
                             the CDNA kernel's waits and barriers left out one by one in the emulator, into
                             target/nightly/cdna-mutation.md
       cargo xtask coverage [FILE]...
                             lines of the CUDA device text that emulated runs execute, into
                             target/nightly/cuda-coverage.md; FILE: what earlier runs of `ptx-emu cover` wrote";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["test", ref words @ ..] => match Extent::parse(words) {
            Ok(extent) => ended(suite::run(extent)),
            Err(error) => ended(Err(error)),
        },
        ["nightly"] => ended(nightly()),
        ["setup"] => {
            for (name, value) in setup::run() {
                println!("export {name}='{value}'");
            }
            ExitCode::SUCCESS
        }
        ["python"] => ended(suite::python_alone()),
        ["wheel"] => ended(python::wheel(None, &[])),
        ["wheels"] => ended(python::wheels()),
        ["wheel", "--bundle", archs, ref filters @ ..] => ended(python::wheel(Some(archs), filters)),
        ["c-install", prefix] => ended(install_c_library(Path::new(prefix))),
        ["support"] => ended(evidence::write_table()),
        ["evidence", on, file] => ended(evidence::keep(on, file, "all")),
        ["evidence", on, file, cases] => ended(evidence::keep(on, file, cases)),
        ["coverage", ref paths @ ..] => ended(coverage::run(paths)),
        ["planted"] => ended(planted::run()),
        ["mutants", ref words @ ..] => ended(planted::mutants(words)),
        ["mutation-amd"] => ended(mutation_amd::run()),
        ["mutation"] => ended(mutation::run(None)),
        ["mutation", page] => ended(mutation::run(Some(page))),
        [doc_tests::WORD, program, ref words @ ..] => doc_tests::run(program, words),
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// Builds the C library, and installs it under `prefix`.
fn install_c_library(prefix: &Path) -> Result<(), String> {
    setup::loudly(Command::new(env!("CARGO")).args(["build", "--release", "-p", "fmha-c"]))?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bindings/c");
    c_install::install(prefix, &setup::target().join("release"), &source)
        .map_err(|error| error.to_string())?;
    println!("installed; export PKG_CONFIG_PATH={}", prefix.join("lib/pkgconfig").display());
    Ok(())
}

/// Runs the tests that take hours, one after another. A failure does not stop the others.
fn nightly() -> Result<(), String> {
    let runs: [fn() -> Result<(), String>; 5] = [
        || suite::run(Extent::All { index: 1, count: 1 }),
        planted::run,
        || mutation::run(None),
        mutation_amd::run,
        || coverage::run(&[]),
    ];
    let failed: Vec<String> = runs.iter().filter_map(|run| run().err()).collect();
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n")) }
}

fn ended(result: Result<(), String>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
