//! The `fmha` command: its options, its output, and its exit status. 0 = done and right, 1 = a result is wrong, 2 =
//! not done (one line says why).

mod abort;
mod argv;
mod bench;
mod bundle;
mod cache;
mod check;
mod conformance;
mod data;
mod devices;
mod explain;
mod failure;
mod files;
#[cfg(test)]
mod fuzz;
mod job;
mod lists_file;
mod mask_file;
mod mask_plot;
mod memory;
mod modelled;
mod npy;
mod options;
mod progress;
mod ranks;
mod report;
mod run;
mod setup;
mod suggest;
mod target;
mod timing;
mod tune;

use std::ffi::OsString;
use std::io::Write;
use std::panic::AssertUnwindSafe;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory, Parser, Subcommand};

use failure::Failure;

/// Fused multi-head attention on NVIDIA, AMD and the CPU: run it, check it, time it
#[derive(Debug, Parser)]
#[command(name = "fmha", version, disable_help_flag = true, after_help = AFTER_HELP, max_term_width = 100)]
struct Command {
    /// Print help
    #[arg(short = '?', long, action = ArgAction::Help, global = true)]
    help: Option<bool>,

    #[command(subcommand)]
    action: Action,
}

const AFTER_HELP: &str = "\
Start here:
  fmha devices                                what there is to run on
  fmha run -b 2 -h 8 -s 1024 -d 128 --mask b  one problem, timed and checked
  fmha run --q q.npy --k k.npy --v v.npy --out o.npy
  fmha explain -d 256 --prec bf16             which kernel would run it, and why
  fmha conformance --filter edges             the battery of tests

`-h` is the number of heads, as in Composable Kernel; help is --help or -?.
Exit status: 0 = right, 1 = a result is wrong, 2 = not done.";

#[derive(Debug, Subcommand)]
enum Action {
    /// Run one problem, on made-up data or your own: time it, check it
    Run(Box<run::RunArgs>),
    /// Run the battery of tests against a backend
    Conformance(conformance::ConformanceArgs),
    /// List the devices there are, and why the others are absent
    Devices(devices::DevicesArgs),
    /// Say which kernel would run a problem, or why none does
    Explain(Box<explain::ExplainArgs>),
    /// Time tables of shapes, with other libraries' figures beside
    Bench(bench::BenchArgs),
    /// Measure the tiles of one problem here, and keep the best
    Tune(Box<tune::TuneArgs>),
    /// Compile kernels into a file, for machines without a compiler
    Bundle(bundle::BundleArgs),
    /// Print what a shell completes this command's words by
    Completions(CompletionsArgs),
}

#[derive(Debug, clap::Args)]
struct CompletionsArgs {
    /// The shell that is to complete them: `source <(fmha completions bash)`
    shell: clap_complete::Shell,
}

impl CompletionsArgs {
    fn carry_out(&self, out: &mut impl Write) -> Result<Verdict, Failure> {
        // Into memory first: the generator panics where a pipe is closed.
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Command::command(), "fmha", &mut script);
        out.write_all(&script)?;
        Ok(Verdict::Right)
    }
}

/// How a command that was carried out ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Exit status 0.
    Right,
    /// Exit status 1.
    Wrong,
}

fn main() -> ExitCode {
    // A panic is a bug of ours; the user gets a line, not a trace, and no success.
    std::panic::set_hook(Box::new(|info| say(&format!("internal error, please report it: {info}"))));
    abort::exits_with_an_error();
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| carry_out(&strings(std::env::args_os())?)));
    match outcome {
        Ok(Ok(Verdict::Right)) => ExitCode::SUCCESS,
        Ok(Ok(Verdict::Wrong)) => ExitCode::from(1),
        // 141 is the status that a shell reports for a program that SIGPIPE ended.
        Ok(Err(Failure::Pipe)) => ExitCode::from(141),
        Ok(Err(Failure::Wrong(line))) => {
            say(&line);
            ExitCode::from(2)
        }
        Err(_) => ExitCode::from(2),
    }
}

/// Prints one line on standard error; a closed pipe is no error.
fn say(line: &str) {
    let line = line.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    drop(writeln!(std::io::stderr(), "error: {line}"));
}

fn strings(args: impl Iterator<Item = OsString>) -> Result<Vec<String>, Failure> {
    args.enumerate()
        .map(|(index, arg)| {
            arg.into_string().map_err(|arg| Failure::wrong(format!("argument {index} {arg:?} is not UTF-8")))
        })
        .collect()
}

fn carry_out(args: &[String]) -> Result<Verdict, Failure> {
    let mut args = argv::normalise(args.iter().cloned())?;
    // Without a command there are no heads to count.
    if args.len() == 2 && args[1] == "-h" {
        args[1] = "--help".to_owned();
    }
    let command = match Command::try_parse_from(args) {
        Ok(command) => command,
        Err(error) => return refuse(&error),
    };
    let threads = !matches!(command.action, Action::Devices(_) | Action::Explain(_) | Action::Completions(_));
    if threads {
        let threads = check_threads()?;
        // The memory of all threads is requested together, so that a lack of it is one error instead of one line
        // per thread.
        let room = threads as u128 * THREAD_BYTES;
        memory::reservable(&format_args!("{threads} threads for the check"), room)?;
        // Threads are started here, where a refusal of the system is an error; at first use it would be a panic.
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global()
            .map_err(|error| Failure::wrong(format!("threads for the check, {threads} wanted: {error}")))?;
    }
    let out = &mut std::io::stdout().lock();
    match command.action {
        Action::Run(args) => args.carry_out(out),
        Action::Conformance(args) => args.carry_out(out),
        Action::Devices(args) => args.carry_out(out),
        Action::Explain(args) => args.carry_out(out),
        Action::Bench(args) => args.carry_out(out),
        Action::Bundle(args) => args.carry_out(out),
        Action::Tune(args) => args.carry_out(out),
        Action::Completions(args) => args.carry_out(out),
    }
}

/// Address space of a thread of the check: std's stack of 2 MiB, and an eighth for its allocations.
const THREAD_BYTES: u128 = (2 << 20) + (256 << 10);

/// Threads of the check: `RAYON_NUM_THREADS`, or one a core.
fn check_threads() -> Result<usize, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // Some thousands of threads take minutes to start, and would reach the system's limit.
    let most = 256.max(4 * cores);
    let name = "RAYON_NUM_THREADS";
    match std::env::var(name) {
        Err(std::env::VarError::NotPresent) => Ok(cores),
        Ok(text) if text.is_empty() || text == "0" => Ok(cores),
        Ok(text) => match text.parse() {
            Ok(threads) if threads <= most => Ok(threads),
            _ => Err(Failure::wrong(format!("{name} `{text}` is not in 0..={most}"))),
        },
        Err(std::env::VarError::NotUnicode(text)) => {
            Err(Failure::wrong(format!("{name} {text:?} is not in 0..={most}")))
        }
    }
}

/// Prints help if it was requested, otherwise the error in the arguments.
fn refuse(error: &clap::Error) -> Result<Verdict, Failure> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            write!(std::io::stdout(), "{}", error.render())?;
            Ok(Verdict::Right)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            let names: Vec<_> =
                Command::command().get_subcommands().map(|c| c.get_name().to_owned()).collect();
            Err(Failure::wrong(format!("0 commands given, 1 wanted: {} (see fmha --help)", names.join(", "))))
        }
        // `run -h` asks for help elsewhere; here it is the number of heads.
        _ if error.to_string().contains("'--heads <N>' but none was supplied") => {
            Err(Failure::wrong("heads: -h is the number of heads, and has none; help is --help or -?"))
        }
        _ => Err(Failure::wrong(format!("{} (see --help)", one_line(error)))),
    }
}

/// `clap`'s error without its usage, with the option that was probably meant.
fn one_line(error: &clap::Error) -> String {
    use std::error::Error;
    // A value's own parser names the field and the number, so its sentence is used.
    if let Some(source) = error.source().filter(|_| error.kind() == ErrorKind::ValueValidation) {
        let said = source.to_string();
        let meant = suggest::value(error, &said);
        return said + &meant;
    }
    let text = error.render().to_string();
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty() && !line.starts_with("tip:"))
        .collect();
    lines.join(" ").trim_start_matches("error: ").to_owned() + &suggest::option(error)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::{Command, one_line};

    #[test]
    fn each_option_that_refuses_a_value_names_itself_and_the_value() {
        let (mut refused, mut unnamed) = (0, Vec::new());
        for command in Command::command().get_subcommands() {
            for option in command.get_arguments().filter(|option| option.get_action().takes_values()) {
                let Some(long) = option.get_long() else { continue };
                for value in ["banana", "-7", "1e99", "99999999999999999999"] {
                    let given = format!("--{long}={value}");
                    let Err(error) = Command::try_parse_from(["fmha", command.get_name(), &given]) else {
                        continue;
                    };
                    let line = one_line(&error);
                    // Another argument is missing, so the value itself was valid.
                    if line.contains("required arguments") {
                        continue;
                    }
                    refused += 1;
                    let names = [long.to_owned(), long.replace('-', "_"), option.get_id().to_string()];
                    if !names.iter().any(|name| line.contains(name)) || !line.contains(value) {
                        unnamed.push(format!("{} {given}: {line}", command.get_name()));
                    }
                }
            }
        }
        assert!(unnamed.is_empty(), "\n{}", unnamed.join("\n"));
        assert!(refused > 300, "{refused} values refused");
    }
}
