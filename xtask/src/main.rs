//! `cargo xtask test`: everything the tests need is set up, then everything is tested.
//!
//! The set-up installs what can be had (a compiler from the system's packages, one from PyPI into
//! `target/`) and reports what cannot: tests that need it then say `absent`, and are not counted as
//! passed.

mod coverage;
mod emulated;
mod mutation;
mod mutation_amd;
mod setup;
mod support;
mod tally;

use std::io::{BufRead, BufReader};
use std::process::{Command, ExitCode, Stdio};

use tally::Tally;

const USAGE: &str = "\
usage: cargo xtask test      set up, test everything in release, print the counts
       cargo xtask emulated  the battery on CUDA kernels, interpreted: four families
       cargo xtask setup     only the set-up
       cargo xtask support [BACKEND[@ARCH] | TITLE=FILE]...
                             the README's support table from the battery's results (default: cpu);
                             FILE: what `fmha conformance` printed, elsewhere or in parts
       cargo xtask mutation [SCHEDULES]
                             the sm90 kernel broken instruction by instruction in the emulator, into
                             docs/kernels/sm90-mutation.md; sound, under 100 schedules
       cargo xtask mutation-amd
                             the CDNA kernel's waits and barriers left out one by one in the emulator, into
                             docs/kernels/cdna-mutation.md
       cargo xtask coverage [FILE]...
                             lines of the CUDA device text that emulated runs execute, into
                             docs/kernels/cuda-coverage.md; FILE: what earlier runs of `ptx-emu cover` wrote";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["test"] => test(),
        ["emulated"] => {
            let mut tally = Tally::default();
            emulated::battery(&setup::run(), emulated::Part::Whole, &mut tally);
            finish(&tally)
        }
        ["setup"] => {
            setup::run();
            ExitCode::SUCCESS
        }
        ["support", ref backends @ ..] => {
            let backends = if backends.is_empty() { &["cpu"] } else { backends };
            ended(support::write(backends))
        }
        ["coverage", ref paths @ ..] => ended(coverage::run(paths)),
        ["mutation-amd"] => ended(mutation_amd::run()),
        ["mutation"] => ended(mutation::run(100)),
        ["mutation", number] => match number.parse() {
            Ok(schedules) => ended(mutation::run(schedules)),
            Err(_) => ended(Err(format!("schedules `{number}` is no number"))),
        },
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
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

fn test() -> ExitCode {
    let environment = setup::run();
    let mut tally = Tally::default();
    // The drivers' doubles lie beside the command, where tests of it look for them.
    let built = Command::new(env!("CARGO")).args(["build", "--release"]).status();
    if !built.is_ok_and(|status| status.success()) {
        tally.failed += 1;
    }
    // One invocation, in release: the battery inside it runs thousands of cases.
    let mut command = Command::new(env!("CARGO"));
    // `--show-output`: the batteries' counts stand in the output of tests that pass.
    command
        .args(["test", "--release", "--workspace", "--no-fail-fast", "--", "--show-output"])
        .envs(environment.iter().cloned());
    let finished = match follow(&mut command, &mut tally) {
        Ok(success) => success,
        Err(error) => {
            eprintln!("cargo test: {error}");
            false
        }
    };
    if !finished && tally.failed == 0 {
        // A crate that does not compile, or a test that aborted, counts as one failure.
        tally.failed = 1;
    }
    emulated::battery(&environment, emulated::Part::InTest, &mut tally);
    finish(&tally)
}

fn finish(tally: &Tally) -> ExitCode {
    println!("{tally}");
    if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs `command`, passing its output through and counting from it.
fn follow(command: &mut Command, tally: &mut Tally) -> std::io::Result<bool> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line?;
            println!("{line}");
            tally.read(&line);
        }
    }
    Ok(child.wait()?.success())
}
