//! Other compilers and other systems: the oldest Rust that the manifest states, and the targets that docs/platforms.md
//! names. A toolchain or program that can not be installed is reported absent, by name.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::setup::{apt, loudly, runs, target};
use crate::step::Step;
use crate::tally::Tally;

/// A target beside the host's.
struct Target {
    triple: &'static str,
    /// C compiler for the target: a dependency of benchmarks has a C file. `cargo check` links nothing.
    c_compiler: &'static [(&'static str, &'static str)],
    run: Option<Run>,
}

/// Linker and runner of a target's programs.
struct Run {
    /// Debian packages of the linker and of the emulator.
    packages: &'static [&'static str],
    linker: &'static str,
    /// Command of the emulator.
    runner: &'static str,
    /// Tests that the emulator can not run or is too slow for: parts of their names, with the reason.
    left_out: &'static [(&'static str, &'static str)],
}

const TARGETS: [Target; 3] = [
    Target {
        triple: "aarch64-unknown-linux-gnu",
        c_compiler: &[("CC", "clang-22"), ("CFLAGS", "-ffreestanding"), ("AR", "llvm-ar-22")],
        run: Some(Run {
            packages: &["qemu-user", "gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"],
            linker: "aarch64-linux-gnu-gcc",
            runner: "qemu-aarch64 -L /usr/aarch64-linux-gnu",
            left_out: &[
                ("a_child", "qemu-user 7.2 aborts where a forked child starts a thread"),
                ("soft::", "instruction sets in software take minutes under qemu-user"),
            ],
        }),
    },
    Target {
        triple: "x86_64-pc-windows-gnu",
        c_compiler: &[("CC", "clang-22"), ("CFLAGS", "-ffreestanding"), ("AR", "llvm-ar-22")],
        run: Some(Run {
            packages: &["wine64", "wine", "gcc-mingw-w64-x86-64"],
            linker: "x86_64-w64-mingw32-gcc",
            runner: "wine",
            left_out: &[],
        }),
    },
    Target {
        triple: "aarch64-apple-darwin",
        c_compiler: &[
            ("CC", "clang-22"),
            ("CFLAGS", "-ffreestanding"),
            ("AR", "llvm-ar-22"),
            ("SDKROOT", "/"),
        ],
        run: None,
    },
];

/// Oldest Rust version, as stated in the workspace's manifest.
const OLDEST: &str = env!("CARGO_PKG_RUST_VERSION");

/// Checks with the oldest Rust and for each target: of the library, or with `all` of all crates and their tests. Only
/// `all` runs the CPU backend's tests.
pub(crate) fn steps(all: bool, tally: &mut Tally) -> Vec<Step> {
    let mut steps = Vec::new();
    let name = format!("Rust {OLDEST}");
    match oldest() {
        Ok((cargo, rustc)) => {
            let what: &[&str] = if all { &["--workspace", "--all-targets"] } else { &["-p", "fmha"] };
            let folder = folder("oldest");
            let own = [cargo.as_str(), "check", "--quiet", "--release", "--target-dir", &folder];
            let words = [&own[..], what].concat();
            steps.push(Step::check(&name, &words, vec![("RUSTC".to_owned(), rustc)]));
        }
        Err(reason) => tally.say(&format!("absent: {name}: {reason}")),
    }
    for one in &TARGETS {
        if let Err(reason) = standard_library(one.triple) {
            tally.say(&format!("absent: {}: {reason}", one.triple));
            continue;
        }
        steps.push(one.check(all));
        match &one.run {
            Some(_) if !all => {
                tally.say(&format!(
                    "absent: the CPU backend's tests on {}: cargo xtask test --all",
                    one.triple
                ));
            }
            Some(run) => match run.set_up() {
                Ok(environment) => {
                    for (test, reason) in run.left_out {
                        tally.say(&format!("absent: {test} on {}: {reason}", one.triple));
                    }
                    steps.push(one.tests(run, environment));
                }
                Err(reason) => {
                    tally.say(&format!("absent: the CPU backend's tests on {}: {reason}", one.triple));
                }
            },
            None => tally.say(&format!("absent: {}: compiled, and run nowhere", one.triple)),
        }
    }
    steps
}

/// Way in which programs for another system are built and run here.
pub(crate) struct Emulated {
    pub(crate) c_compiler: &'static str,
    /// Words of a command line before the program's name.
    pub(crate) runner: &'static str,
    pub(crate) environment: Vec<(String, String)>,
}

/// Prepares one target, and installs what is missing.
///
/// # Errors
/// The reason why programs of the target do not run here.
pub(crate) fn emulated(triple: &str) -> Result<Emulated, String> {
    let found = TARGETS.iter().find(|target| target.triple == triple).and_then(|target| target.run.as_ref());
    let run = found.ok_or_else(|| format!("there is no emulator of {triple}"))?;
    Ok(Emulated { c_compiler: run.linker, runner: run.runner, environment: run.set_up()? })
}

impl Target {
    /// Name of a variable that Cargo or cc reads for this target.
    fn variable(&self, before: &str, after: &str) -> String {
        let triple = self.triple.replace('-', "_");
        let triple = if before.starts_with("CARGO") { triple.to_uppercase() } else { triple };
        format!("{before}_{triple}{after}")
    }

    fn check(&self, all: bool) -> Step {
        let what: &[&str] = if all { &["--workspace", "--tests"] } else { &["-p", "fmha"] };
        let folder = folder("targets");
        let own = [env!("CARGO"), "check", "--quiet", "--release", "--target", self.triple];
        let words = [&own[..], &["--target-dir", &folder], what].concat();
        let compiler = self.c_compiler.iter().map(|(name, value)| {
            let variable = if *name == "SDKROOT" { (*name).to_owned() } else { self.variable(name, "") };
            (variable, (*value).to_owned())
        });
        Step::check(&format!("check {}", self.triple), &words, compiler.collect())
    }

    fn tests(&self, run: &Run, mut environment: Vec<(String, String)>) -> Step {
        let folder = folder("targets");
        let own = ["test", "--release", "-p", "fmha-cpu", "--lib", "--tests", "--target", self.triple];
        let mut words = [&own[..], &["--target-dir", &folder, "--"]].concat();
        words.extend(run.left_out.iter().flat_map(|(test, _)| ["--skip", *test]));
        environment.extend([
            (self.variable("CARGO_TARGET", "_LINKER"), run.linker.to_owned()),
            (self.variable("CARGO_TARGET", "_RUNNER"), run.runner.to_owned()),
        ]);
        Step::cargo(&format!("fmha-cpu on {}", self.triple), &words).with(environment).at_least(90)
    }
}

impl Run {
    /// Installs what is missing, and returns the variables that the emulator needs.
    fn set_up(&self) -> Result<Vec<(String, String)>, String> {
        let emulator = self.runner.split(' ').next().unwrap_or_default();
        let there = || {
            runs(Command::new(self.linker).arg("--version")) && runs(Command::new(emulator).arg("--version"))
        };
        if !there() {
            apt(self.packages)?;
        }
        if !there() {
            return Err(format!("{} or {emulator} does not start", self.linker));
        }
        if emulator == "wine" { self.of_wine() } else { Ok(Vec::new()) }
    }

    /// Makes a wine prefix, and adds the library that wine 8.0 lacks and Rust's standard library needs.
    fn of_wine(&self) -> Result<Vec<(String, String)>, String> {
        let (prefix, libraries) = (folder("wine-prefix"), folder("wine-libraries"));
        std::fs::create_dir_all(&libraries).map_err(|error| format!("{libraries}: {error}"))?;
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("wine/bcryptprimitives.c");
        let mut compiler = Command::new(self.linker);
        compiler.args(["-shared", "-O1", "-o"]).arg(Path::new(&libraries).join("bcryptprimitives.dll"));
        loudly(compiler.arg(source).arg("-ladvapi32"))?;
        let windows = format!("Z:{}", libraries.replace('/', "\\"));
        let all = [("WINEPREFIX", prefix), ("WINEPATH", windows), ("WINEDEBUG", "-all".to_owned())];
        Ok(all.map(|(name, value)| (name.to_owned(), value)).into())
    }
}

/// Build folder of a target: compilers and features differ, so targets do not share one.
fn folder(name: &str) -> String {
    target().join("platforms").join(name).display().to_string()
}

/// Paths of cargo and rustc of the oldest Rust, from rustup.
fn oldest() -> Result<(String, String), String> {
    let mut rustup = Command::new("rustup");
    if !runs(rustup.args(["toolchain", "install", OLDEST, "--profile", "minimal", "--no-self-update"])) {
        return Err("rustup is not there, or cannot fetch it".to_owned());
    }
    let which =
        |program: &str| printed(Command::new("rustup").args(["which", "--toolchain", OLDEST, program]));
    Ok((which("cargo")?, which("rustc")?))
}

/// Lets rustup install a target's standard library if Cargo's compiler lacks it.
fn standard_library(triple: &str) -> Result<(), String> {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let place = |what: &[&str]| printed(Command::new(&rustc).args(["--print"]).args(what));
    let there = || {
        let library = place(&["target-libdir", "--target", triple]).map(PathBuf::from);
        library.is_ok_and(|library| std::fs::read_dir(library).is_ok_and(|mut files| files.next().is_some()))
    };
    if there() {
        return Ok(());
    }
    let toolchain = place(&["sysroot"])?;
    let toolchain = Path::new(&toolchain).file_name().unwrap_or_default();
    let mut rustup = Command::new("rustup");
    let asked = runs(rustup.args(["target", "add", triple, "--toolchain"]).arg(toolchain));
    if asked && there() { Ok(()) } else { Err("rustup cannot fetch its standard library".to_owned()) }
}

fn printed(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{:?}: {error}", command.get_program()))?;
    if !output.status.success() {
        return Err(format!("{:?} ended with {}", command.get_program(), output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_named_as_cargo_and_cc_name_them() {
        let [arm, ..] = &TARGETS;
        let linker = "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER";
        assert_eq!(arm.variable("CARGO_TARGET", "_LINKER"), linker);
        assert_eq!(arm.variable("CC", ""), "CC_aarch64_unknown_linux_gnu");
    }

    #[test]
    fn the_table_of_platforms_names_each_target_and_the_oldest_rust() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/platforms.md");
        let page = std::fs::read_to_string(page).unwrap();
        for one in &TARGETS {
            let row = page.lines().find(|line| line.contains(one.triple)).unwrap();
            assert_eq!(row.contains("no: compiled only"), one.run.is_none(), "{row}");
        }
        assert!(page.contains(&format!("Rust {OLDEST}")));
    }
}
