//! `fmha run`: one problem, timed and checked.

use std::io::Write;
use std::sync::Arc;

use clap::Args;
use fmha::PassedOver;
use fmha_conformance::init::Init;
use serde_json::{Value, json};

use crate::Verdict;
use crate::check::{Checked, Verify, check, verify};
use crate::data::DataArgs;
use crate::failure::Failure;
use crate::job::{Job, Source, init};
use crate::options::{BackendArgs, ProblemArgs, at_least_0, at_least_1, word};
use crate::progress::Progress;
use crate::ranks::RankArgs;
use crate::report::{Speed, describe, time};
use crate::setup::Setup;
use crate::timing::{Timing, duration, in_a_row, is_emulated};

/// Options of `fmha run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fmha run -b 2 -h 8 -s 1024 -d 128 --mask b
      causal attention in f16 on made-up data, on the best device; checked against f64
  fmha run -h 32 --heads-kv 8 -s 1 --seqlen-k 32768 --prec bf16
      decoding: one query against a long cache, four query heads to a kv head
  fmha run -h 8 -s 1 --seqlen-k 4096 --page-size 16 --append 1 --rotary 64
      a paged cache that gets the new token's key and value, rotated to its position
  fmha run --mode 1 -s 1024,300,77 --mask b:128,0 --lse
      three packed sequences, a window of 128 keys before the diagonal, LSE too
  fmha run --backward --bias e:2 --dbias --deterministic
      the gradients, that of the bias too, the same bits every run
  fmha run --q q.npy --k k.npy --v v.npy --out o.npy
      your own data, [batch, seq, heads, dim] or [seq, heads, dim] (--iperm: heads before seq)
  fmha run --input qkv.safetensors --expect o
      tensors q, k, v of one file (--q NAME where they are called otherwise), compared with o
  fmha run --q q.npy --k k.npy --v v.npy --sink --operand sink=sink.npy
      what else the problem reads is yours too: nothing is made up beside your tensors
  fmha run -s 512 --bias e:2 --export in.safetensors --out o.npy
      made-up data, written for another program
  fmha run -h 8 -s 1000 --mask b --ranks 4 --scheme ring
      over four processes of the CPU, each with its part of the rows; against one rank and f64
  fmha run -s 1000 --mask seen.npy --score 's + 0.5*(k-q)' --ranks 2
      a mask of a file and a function of your own, of the whole's queries and keys, over two ranks

Composable Kernel's spelling is taken too: -h_k=4, -mask=b, -lse=1, -iperm=0; where its defaults
are iperm = operm = 1, ours are b*s*h*d. `-h` is the number of heads; help is --help or -?.
bf16 and FP8 in .npy: raw bytes, `a.view('V2')` or `a.view('V1')`, and --prec to say what they are.
Exit status: 0 = PASS, 1 = FAIL, 2 = not done; no result is written unless it is PASS.")]
pub(super) struct RunArgs {
    #[command(flatten)]
    problem: ProblemArgs,

    #[command(flatten)]
    backend: BackendArgs,

    #[command(flatten)]
    data: DataArgs,

    #[command(flatten)]
    ranks: RankArgs,

    /// Made-up data: nf or normal, uf or uniform (-1..1), ui or integers (-2..2), tf or trig; constant_v,
    /// outliers, huge_logits
    #[arg(long, value_name = "KIND", default_value = "nf", value_parser = init, help_heading = "Data")]
    init: Init,

    /// Seed of made-up data; equal seeds give equal data
    #[arg(long, value_name = "N", default_value = "11939", value_parser = word("seed"), allow_negative_numbers = true, help_heading = "Data")]
    seed: u64,

    /// Untimed calls (default: 1)
    #[arg(long, value_name = "N", value_parser = at_least_0("warmup"), allow_negative_numbers = true, help_heading = "Time and check")]
    warmup: Option<u32>,

    /// Timed calls (default: up to 20, about a second of them, at least 3)
    #[arg(long, value_name = "N", value_parser = at_least_1("repeat"), allow_negative_numbers = true, help_heading = "Time and check")]
    repeat: Option<u32>,

    /// Against f64: full; sample (some rows of some (sequence, head) pairs; of gradients, some queries'
    /// dQ and keys' dK, dV); none = 0; 1 = full where that is small, else sample
    #[arg(short = 'v', long, value_name = "HOW", default_value = "1", value_parser = verify, help_heading = "Time and check")]
    verify: Verify,

    /// Print the kernel's plan in full
    #[arg(long, help_heading = "Time and check")]
    kname: bool,

    /// Print JSON
    #[arg(long, help_heading = "Time and check")]
    json: bool,
}

impl RunArgs {
    pub(super) fn carry_out(self, out: &mut dyn Write) -> Result<Verdict, Failure> {
        let own = self.data.load(&self.problem)?;
        let mut setup = self.problem.setup(own.as_ref().map(|own| &own.given))?;
        self.data.want_outputs(&mut setup)?;
        let outputs = self.data.outputs(&setup)?;
        let expected = self.data.expected(&setup, own.as_ref())?;
        if let Some(own) = &own {
            own.fits(&setup)?;
        }
        self.ranks.check(&setup, setup.options(&self.backend.plan_options()))?;
        let (opened, passed_over) = match self.ranks.ranks {
            None => (self.backend.open()?, self.backend.passed_over()?),
            Some(ranks) => (self.backend.open_for_ranks(ranks)?, Arc::new([]) as Arc<[_]>),
        };
        let backend = &opened;

        let source = Source { own, init: self.init, seed: self.seed };
        let mut job = Job::new(backend, &setup, &self.backend.plan_options(), source)?;
        if let Some((rank, folder)) = self.ranks.rank()? {
            let options = setup.options(&self.backend.plan_options());
            self.ranks.be_a_rank((rank, &folder), &setup, (backend, options), job.read_back()?)?;
            return Ok(Verdict::Right);
        }
        let exported = self.data.write_inputs(|| job.inputs())?;
        if !self.json {
            for passed in &*passed_over {
                writeln!(out, "{:<18} {}", "not here", brief(passed))?;
            }
            if let Some(path) = &exported {
                writeln!(out, "{:<18} {} (inputs)", "wrote", path.display())?;
            }
            writeln!(out, "{:<18} {}", "device", backend.name())?;
            writeln!(out, "{:<18} {}", "kernel", job.kernel())?;
            writeln!(out, "{:<18} {}", "problem", describe(&setup))?;
            if self.kname {
                write!(out, "{}", job.plan_text())?;
            }
            out.flush()?;
        }

        let timing = in_a_row(&mut || job.run(), self.warmup, self.repeat)?;
        let speed = Speed::of(&setup, &timing, &backend.roofline(setup.product_dtype()))?;
        if !self.json {
            if is_emulated(backend) {
                writeln!(out, "{:<18} {}: an interpreter's, no GPU's", "time", time(&timing))?;
            } else {
                writeln!(out, "{:<18} {}", "time", time(&timing))?;
                writeln!(out, "{:<18} {speed}", "speed")?;
            }
            out.flush()?;
        }

        let over_ranks = self.over_ranks(&setup, &mut job, out)?;
        let progress = Progress::new("checking against f64");
        let checked = check(job.read_back()?, self.verify, expected.as_ref(), &progress)?;
        progress.finish();
        let passed = checked.passed();
        let written = if passed { outputs.write(|name| Ok(job.result(name)))? } else { Vec::new() };
        if self.json {
            let mut report = report(&setup, &job, &timing, &speed, &checked);
            report["device"] = backend.name().into();
            if is_emulated(backend) {
                for speed in ["tflops", "gb_per_second", "roofline_share", "roofline_source"] {
                    report[speed] = Value::Null;
                }
            }
            report["ranks"] = over_ranks;
            report["passed"] = passed.into();
            report["exported"] = exported.map(|path| path.display().to_string()).into();
            report["wrote"] = written.iter().map(|path| path.display().to_string()).collect();
            writeln!(out, "{report:#}")?;
        } else {
            for line in checked.lines() {
                writeln!(out, "{:<18} {line}", "check")?;
            }
            for path in &written {
                writeln!(out, "{:<18} {}", "wrote", path.display())?;
            }
            let verdict = match (passed, checked.is_empty()) {
                (false, _) => "FAIL (nothing is written)",
                (true, true) => "NOT CHECKED",
                (true, false) => "PASS",
            };
            writeln!(out, "{verdict}")?;
        }
        Ok(if passed { Verdict::Right } else { Verdict::Wrong })
    }

    /// Runs the problem over ranks, whose results replace those of the job. Returns the text for the report.
    fn over_ranks(&self, setup: &Setup, job: &mut Job<'_>, out: &mut dyn Write) -> Result<Value, Failure> {
        let Some(ranks) = self.ranks.ranks else { return Ok(Value::Null) };
        let alone = job.results()?;
        let (seconds, explained) = self.ranks.over_processes(setup, job.call_mut())?;
        let equal = alone == job.results()?;
        let same = if equal { "the bits of one rank" } else { "other bits than one rank" };
        if !self.json {
            writeln!(out, "{:<18} {ranks}, {} a call, {same}", "ranks", duration(seconds))?;
            let lines = if self.kname { usize::MAX } else { 6 };
            for line in explained.lines().take(lines) {
                writeln!(out, "{:<18} {line}", "")?;
            }
        }
        Ok(json!({ "ranks": ranks, "seconds": seconds, "equal_bits": equal, "plan": explained }))
    }
}

/// A backend that `auto` passed over, and the first clause of why; `fmha devices` has the rest.
fn brief(passed: &PassedOver) -> String {
    let reason = passed.reason.to_string();
    let first = reason.split([';', ':']).next().unwrap_or_default();
    format!("{}: {first} (fmha devices says more)", passed.backend)
}

fn report(setup: &Setup, job: &Job<'_>, timing: &Timing, speed: &Speed, checked: &Checked) -> Value {
    json!({
        "kernel": job.kernel(),
        "problem": describe(setup),
        "median_seconds": timing.median(),
        "fastest_seconds": timing.fastest(),
        "slowest_seconds": timing.slowest(),
        "calls": timing.calls(),
        "clock": timing.clock(),
        "flops": speed.flops,
        "bytes": speed.bytes,
        "tflops": speed.tflops,
        "gb_per_second": speed.gb_per_second,
        "roofline_share": speed.share,
        "roofline_source": speed.source,
        "check": checked.as_json(),
    })
}
