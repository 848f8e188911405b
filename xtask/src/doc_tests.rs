//! Runs of the documentation's examples: those of all packages, and the library's on emulated devices too.
//!
//! Cargo documents each package anew for each run of its examples, and compiles them again. So there is one run,
//! which passes each compiled program to this one: `cargo xtask run-examples PROGRAM` runs it once, and those of
//! the library once more on each device of [`ARCHS`].

use std::path::Path;
use std::process::{Command, ExitCode};

use crate::setup;
use crate::step::Step;
use crate::tally::Tally;

/// Architectures on which the library's examples run as on a machine with such a GPU, which `auto` opens.
const ARCHS: [&str; 3] = ["sm_90a", "sm_100a", "gfx942"];

/// Variable that lists those of [`ARCHS`] whose compilers exist, separated by commas.
const ON: &str = "FMHA_EXAMPLES_ON";

/// Word on the command line with which rustdoc starts this program.
pub(crate) const WORD: &str = "run-examples";

/// Step that runs all examples, on devices for whose kernels there is a compiler.
pub(crate) fn step(environment: &[(String, String)], tally: &mut Tally) -> Step {
    let has_nvrtc = environment.iter().any(|(name, _)| name == "FMHA_NVRTC");
    let (there, absent): (Vec<&str>, Vec<&str>) = ARCHS
        .into_iter()
        .partition(|arch| if arch.starts_with("sm_") { has_nvrtc } else { setup::clang_is_there() });
    for arch in absent {
        tally.say(&format!("absent: doc tests on {arch}: no compiler for its kernels"));
    }
    // All packages are built together: for a single package, dependencies would have other features and be rebuilt.
    let step =
        Step::cargo("doc tests", &["test", "--release", "--workspace", "--doc", "--quiet"]).at_least(1);
    let Ok(own) = std::env::current_exe() else {
        tally.say("absent: doc tests on devices: this program does not find itself");
        return step;
    };
    let tool = ["--test-runtool", &own.display().to_string(), "--test-runtool-arg", WORD].join("\x1f");
    step.with(vec![("CARGO_ENCODED_RUSTDOCFLAGS".to_owned(), tool), (ON.to_owned(), there.join(","))])
}

/// Runs a program of examples in its package's folder, as rustdoc requires.
pub(crate) fn run(program: &str, words: &[&str]) -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let same = |a: &Path, b: &Path| matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b);
    let of_library = std::env::current_dir().is_ok_and(|folder| same(&folder, &root));
    let on = std::env::var(ON).unwrap_or_default();
    let devices = on.split(',').filter(|arch| of_library && !arch.is_empty()).map(Some);
    for device in std::iter::once(None).chain(devices) {
        let mut command = Command::new(program);
        // A program of many examples starts itself for each example, as under rustdoc.
        command.args(words).env("RUSTDOC_DOCTEST_BIN_PATH", program);
        if let Some(arch) = device {
            command.env("FMHA_EMULATE", arch);
        }
        let said = match command.status() {
            Ok(status) if status.success() => continue,
            Ok(status) => format!("ended with {status}"),
            Err(error) => error.to_string(),
        };
        eprintln!("{program} on {}: {said}", device.unwrap_or("this machine"));
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
