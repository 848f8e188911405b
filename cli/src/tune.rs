//! `fmha tune`: the tile of one problem, measured field by field on the present device.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use fmha::{AnyProblem, BwdProblem, Device, PlanOptions, Stream};
use fmha_conformance::execute::Resident;
use fmha_conformance::init::Init;
use fmha_core::cache::Precompile;
use fmha_core::tune::{
    Burst, Found, InTurns, TileOptions, Timer, Tried, Tune, TunedTile, by_model, clock, search,
};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::Verdict;
use crate::check::{Verify, check};
use crate::failure::{self, Failure};
use crate::job::{Call, Job, Source};
use crate::options::{BackendArgs, ProblemArgs, within};
use crate::progress::Progress;
use crate::timing::duration;

/// Options of `fmha tune`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fmha tune -b 4 -h 32 -s 4096 -d 128 --mask b
      try the tile's fields, keep what is faster
  fmha tune -b 4 -h 32 -s 4096 -d 128 --mask b --seconds 0
      every field, however long it takes
  fmha tune -s 8192 -d 64 --field block_m --field block_n
      only these
  fmha tune -b 4 -h 32 -s 4096 -d 128 --mask b --backward
      the backward's; with --deterministic that of sums in one order, which is another
  fmha explain -b 4 -h 32 -s 4096 -d 128 --mask b
      the plan says that its tile was tuned

What each tile writes is checked before it is timed: bursts of calls by the device's clock, those of two tiles
in turns. A tile replaces another when the median of its rounds' gains is beyond 0.5 % and beyond their
spread (first to third quartile); what is found is measured against the kernel's own tile anew, with three
times as many rounds, and kept when that is a gain too. What the kernel's model has
fastest is tried first, and what it has 1.3 times as slow is not. It is kept in the cache folder, for this device and
this kernel's text; it serves problems of the same GQA ratio and alike strides whose sizes have the same
powers of two. An emulated device has no speed: it is refused.")]
pub(super) struct TuneArgs {
    #[command(flatten)]
    problem: ProblemArgs,

    #[command(flatten)]
    backend: BackendArgs,

    /// Only this tile field (may be given again)
    #[arg(long, value_name = "NAME")]
    field: Vec<String>,

    /// Rounds for each tile: a burst of it, and one of the best before it
    #[arg(long, value_name = "N", default_value = "7", value_parser = within("rounds", 3..=1000), allow_negative_numbers = true)]
    rounds: u32,

    /// Begin no tile after this many seconds; 0: try them all
    #[arg(long, value_name = "N", default_value = "20", value_parser = within("seconds", 0..=86400), allow_negative_numbers = true)]
    seconds: u32,

    /// Compile every tile that differs in one field from the kernel's own, and time none: a later run finds
    /// them
    #[arg(long)]
    compile: bool,

    /// Measure and report, and keep nothing
    #[arg(long)]
    dry_run: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl TuneArgs {
    pub(super) fn carry_out(&self, out: &mut dyn Write) -> Result<Verdict, Failure> {
        let setup = self.problem.setup(None)?;
        let opened = self.backend.open()?;
        let backend = &opened;
        let tuner = backend.tuner().ok_or_else(|| {
            Failure::wrong(format!(
                "{}: 0 of its kernels' tiles are measured here; `fmha explain` prints them, and what \
                 --tile takes",
                backend.name()
            ))
        })?;
        let fwd = setup.fwd.clone().validate()?;
        let bwd = setup.bwd.clone().map(BwdProblem::validate).transpose()?;
        let problem = bwd.as_ref().map_or(AnyProblem::Forward(&fwd), AnyProblem::Backward);
        let options = setup.options(&self.backend.plan_options());
        let fields = self.fields(tuner, problem, &options)?;
        let own = tuner.default_tile(problem, &options)?;
        if self.compile {
            return compile(backend, problem, &options, &own, &fields, out);
        }
        let stream = clock(backend)?;
        let mut job =
            Job::new(backend, &setup, &with_tile(&options, &own), Source::made_up(Init::Normal, 0))?;
        // O and LSE, inputs of a backward call, are on the device after a forward call.
        job.read_back()?;
        let call = job.into_call();
        let (changes, hopeless) = by_model(&fields, |change| {
            let tile = change.map_or_else(|| own.clone(), |(field, value)| changed(&own, field, value));
            tuner.modelled_micros(problem, &options, &tile)
        });
        let limit = (self.seconds > 0).then(|| Duration::from_secs(self.seconds.into()));
        let until = limit.map(|limit| Instant::now() + limit);
        let ahead = Ahead::new(backend.precompiler(), problem, &options);
        let mut tiles = Tiles { backend, stream: &stream, options: &options, call, until, ahead: &ahead };
        let mut tried = Vec::new();
        if !self.json {
            writeln!(out, "{:<18} {}", "device", backend.name())?;
        }
        let found = ahead.beside(|| {
            search(&mut tiles, &own, &changes, self.rounds, |one| {
                if !self.json {
                    // A reader that has closed the pipe is noticed before the next tile begins.
                    let _ = writeln!(out, "{:<18} {}", one.changed, words(one)).and_then(|()| out.flush());
                }
                tried.push(one.clone());
            })
        });
        drop(tiles);
        let found = found.map_err(Failure::wrong)?;
        // The result of a complete search is stored even if nobody reads the output.
        if found.not_begun > 0 && !failure::is_read() {
            return Err(Failure::Pipe);
        }
        let kept = self.keep(tuner, problem, &options, &found);
        if self.json {
            let report = json!({
                "device": backend.name(),
                "operation": problem.operation().name(),
                "tile": found.tile.iter().cloned().map(|(k, v)| (k, v.into())).collect::<serde_json::Map<_, _>>(),
                "confirmed": found.confirmed.as_ref().map(numbers),
                "tried": tried.iter().map(as_json).collect::<Vec<_>>(),
                "not_begun": found.not_begun,
                "hopeless_by_model": hopeless,
                "kept": kept.as_ref().ok(),
                "not_kept": kept.as_ref().err(),
            });
            writeln!(out, "{report:#}")?;
        } else {
            if found.not_begun + hopeless > 0 {
                let not_begun = found.not_begun;
                writeln!(
                    out,
                    "{:<18} {not_begun} when the time was up (--seconds), {hopeless} too slow by the model",
                    "not tried"
                )?;
            }
            conclude(&found, &kept, out)?;
        }
        Ok(Verdict::Right)
    }

    /// Tile fields to try: all, or those that the user has named.
    fn fields(
        &self,
        tuner: &dyn Tune,
        problem: AnyProblem<'_>,
        options: &PlanOptions,
    ) -> Result<Vec<(&'static str, Vec<String>)>, Failure> {
        let fields = tuner.knobs(problem, options)?;
        if let Some(unknown) = self.field.iter().find(|name| fields.iter().all(|(field, _)| field != name)) {
            let known: Vec<_> = fields.iter().map(|(field, _)| *field).collect();
            let (known, operation) = (known.join(", "), problem.operation());
            return Err(Failure::wrong(format!("field {unknown} is none of the {operation}'s: {known}")));
        }
        let wanted = |field: &str| self.field.is_empty() || self.field.iter().any(|name| name == field);
        Ok(fields.into_iter().filter(|(field, _)| wanted(field)).collect())
    }

    /// Stores the fastest tile and reports the file, or the reason against it.
    fn keep(
        &self,
        tuner: &dyn Tune,
        problem: AnyProblem<'_>,
        options: &PlanOptions,
        found: &Found,
    ) -> Result<String, String> {
        let Some(confirmed) = found.confirmed.as_ref() else {
            return Err("the kernel's own tile is the best".to_owned());
        };
        if !confirmed.is_gain() {
            return Err("measured anew against the kernel's own tile, it is no gain".to_owned());
        }
        if self.dry_run {
            return Err("a dry run".to_owned());
        }
        let (default_seconds, seconds) = confirmed.medians();
        let tile = TunedTile { tile: found.tile.clone(), seconds, default_seconds };
        let path = tuner.keep(problem, options, tile).map_err(|error| error.to_string())?;
        Ok(path.display().to_string())
    }
}

fn with_tile(options: &PlanOptions, tile: &TileOptions) -> PlanOptions {
    options.clone().tile(tile.clone())
}

/// The tile with another value of one field, set last, so that incompatible fields are reset.
fn changed(own: &TileOptions, field: &str, value: &str) -> TileOptions {
    let mut tile: TileOptions = own.iter().filter(|(name, _)| name != field).cloned().collect();
    tile.push((field.to_owned(), value.to_owned()));
    tile
}

/// Compiles each tile that differs in one field from `own`, on all cores, and counts them.
fn compile(
    backend: &Device,
    problem: AnyProblem<'_>,
    options: &PlanOptions,
    own: &TileOptions,
    fields: &[(&str, Vec<String>)],
    out: &mut dyn Write,
) -> Result<Verdict, Failure> {
    let changes: Vec<_> =
        fields.iter().flat_map(|(field, values)| values.iter().map(move |v| (field, v))).collect();
    let plan = |tile: &TileOptions| {
        let options = with_tile(options, tile);
        match problem {
            AnyProblem::Forward(problem) => backend.plan_fwd(problem, &options).map(drop),
            AnyProblem::Backward(problem) => backend.plan_bwd(problem, &options).map(drop),
            AnyProblem::Combine(problem) => backend.plan_combine(problem, &options).map(drop),
            AnyProblem::Choose(problem) => backend.plan_choose(problem, &options).map(drop),
            AnyProblem::Quantize(problem) => backend.plan_quantize(problem, &options).map(drop),
            AnyProblem::IndexLoss(problem) => backend.plan_index_loss(problem, &options).map(drop),
        }
    };
    // A problem that the kernel refuses, such as masks with functions, is refused by name and not counted.
    plan(own)?;
    let planned = changes.par_iter().map(|(field, value)| plan(&changed(own, field, value)));
    let (mut compiled, mut refused) = (0, 0);
    for planned in planned.collect::<Vec<_>>() {
        match planned {
            Ok(()) => compiled += 1,
            Err(fmha::Error::Unsupported { .. }) => refused += 1,
            Err(error) => return Err(error.into()),
        }
    }
    writeln!(out, "{compiled} tiles compiled, {refused} refused")?;
    Ok(Verdict::Right)
}

/// Compiles the next tiles on the cores that the search leaves idle; the search then finds them on disk. The driver
/// is not used here, since loading a module during a recording would invalidate it.
struct Ahead<'a> {
    compiler: Option<&'a dyn Precompile>,
    problem: AnyProblem<'a>,
    options: &'a PlanOptions,
    /// `None` when the search is over.
    coming: Mutex<Option<VecDeque<TileOptions>>>,
    changed: Condvar,
}

/// Guard that stops the compiling threads when it is dropped.
struct Over<'a, 'b>(&'b Ahead<'a>);

impl Drop for Over<'_, '_> {
    fn drop(&mut self) {
        self.0.set(None);
    }
}

impl<'a> Ahead<'a> {
    fn new(compiler: Option<&'a dyn Precompile>, problem: AnyProblem<'a>, options: &'a PlanOptions) -> Self {
        Self {
            compiler,
            problem,
            options,
            coming: Mutex::new(Some(VecDeque::new())),
            changed: Condvar::new(),
        }
    }

    /// Runs a search, and compiles as long as it runs.
    fn beside<T>(&self, search: impl FnOnce() -> T) -> T {
        // Compilation uses all but a quarter of the cores, which check each tile; of two or three cores all but
        // one.
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let others = (cores / 4).max(usize::from(cores > 1));
        std::thread::scope(|scope| {
            if let Some(compiler) = self.compiler {
                (0..others).for_each(|_| drop(scope.spawn(|| self.compile(compiler))));
            }
            // The guard stops the threads even if the search panics: the scope waits for them.
            let _over = Over(self);
            search()
        })
    }

    fn compile(&self, compiler: &dyn Precompile) {
        while let Some(tile) = self.next() {
            // A tile that cannot be compiled gives its reason when it is measured.
            let jobs = compiler.jobs(self.problem, &with_tile(self.options, &tile));
            jobs.into_iter().flatten().for_each(|job| drop(compiler.precompile(&job)));
        }
    }

    fn next(&self) -> Option<TileOptions> {
        let mut coming = self.coming.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(tile) = coming.as_mut()?.pop_front() {
                return Some(tile);
            }
            coming = self.changed.wait(coming).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn set(&self, coming: Option<VecDeque<TileOptions>>) {
        *self.coming.lock().unwrap_or_else(PoisonError::into_inner) = coming;
        self.changed.notify_all();
    }

    /// Removes a tile that the search has reached, which compiles it itself.
    fn leave(&self, tile: &TileOptions) {
        let mut coming = self.coming.lock().unwrap_or_else(PoisonError::into_inner);
        coming.iter_mut().for_each(|coming| coming.retain(|other| other != tile));
    }
}

/// Tiles of one call on one device, with equal input numbers.
struct Tiles<'a> {
    backend: &'a Device,
    stream: &'a Stream,
    options: &'a PlanOptions,
    call: Call,
    /// Time after which no further tile is begun.
    until: Option<Instant>,
    ahead: &'a Ahead<'a>,
}

/// Calls with a tile, and their operands.
struct Ready<'a> {
    burst: Burst,
    _resident: Resident<'a>,
}

impl<'a> Tiles<'a> {
    fn record(&mut self, tile: &TileOptions) -> Result<Ready<'a>, Failure> {
        let Self { backend, stream, options, ref mut call, .. } = *self;
        call.replan(backend, &with_tile(options, tile))?;
        // The tile before this one has written equal results, so they are cleared to show missing writes of this
        // one.
        call.forget_results();
        let mut resident = Resident::place(backend, call.operands(), call.workspace())?;
        let burst = Burst::record(stream, &mut || call.queue(&mut resident, stream))?;
        stream.synchronize()?;
        resident.read_back(call.operands_mut())?;
        Ok(Ready { burst, _resident: resident })
    }

    fn ready_and_right(&mut self, tile: &TileOptions) -> Result<Ready<'a>, Failure> {
        let ready = self.record(tile)?;
        let progress = Progress::new("checking against f64");
        let checked = check(&self.call, Verify::Sample, None, &progress)?;
        progress.finish();
        if checked.passed() {
            return Ok(ready);
        }
        Err(Failure::wrong(format!("wrong: {}", checked.lines().join("; "))))
    }
}

impl<'a> Timer for Tiles<'a> {
    type Ready = Ready<'a>;

    fn coming(&mut self, tiles: Vec<TileOptions>) {
        self.ahead.set(Some(tiles.into()));
    }

    fn ready(&mut self, tile: &TileOptions) -> Result<Ready<'a>, String> {
        self.ahead.leave(tile);
        self.ready_and_right(tile).map_err(|failure| failure.to_string())
    }

    fn burst(&mut self, ready: &Ready<'a>) -> Result<f64, String> {
        // SAFETY: `ready` owns the memory that its calls were recorded with, and nothing else runs.
        unsafe { ready.burst.seconds(self.stream) }.map_err(|error| error.to_string())
    }

    fn goes_on(&self) -> bool {
        let goes_on = self.until.is_none_or(|until| Instant::now() < until) && failure::is_read();
        if !goes_on {
            self.ahead.set(Some(VecDeque::new()));
        }
        goes_on
    }
}

/// Prints the result of the search, and what was done with it.
fn conclude(found: &Found, kept: &Result<String, String>, out: &mut dyn Write) -> std::io::Result<()> {
    let tile: Vec<_> = found.tile.iter().map(|(field, value)| format!("{field}={value}")).collect();
    writeln!(out, "{:<18} {}", "best", tile.join(" "))?;
    if let Some(confirmed) = &found.confirmed {
        writeln!(out, "{:<18} {}", "against the own", comparison(confirmed))?;
    }
    match kept {
        Ok(path) => writeln!(out, "{:<18} {path}", "kept"),
        Err(why) => writeln!(out, "{:<18} {why}", "not kept"),
    }
}

/// `38.10 us to 37.70 us, gain 1.1 %, spread 0.4 %`.
fn comparison(measured: &InTurns) -> String {
    let (incumbent, challenger) = measured.medians();
    format!(
        "{} to {}, gain {:.1} %, spread {:.1} %",
        duration(incumbent),
        duration(challenger),
        measured.gain() * 100.0,
        measured.spread() * 100.0
    )
}

fn words(tried: &Tried) -> String {
    match &tried.outcome {
        Ok(measured) if measured.is_gain() => format!("{}: better", comparison(measured)),
        Ok(measured) => comparison(measured),
        Err(why) => format!("not timed: {}", why.lines().next().unwrap_or_default()),
    }
}

fn numbers(measured: &InTurns) -> Value {
    let (incumbent, challenger) = measured.medians();
    json!({
        "incumbent_seconds": incumbent,
        "seconds": challenger,
        "gain": measured.gain(),
        "spread": measured.spread(),
        "is_gain": measured.is_gain(),
        "rounds": measured.incumbent.len(),
    })
}

fn as_json(tried: &Tried) -> Value {
    match &tried.outcome {
        Ok(measured) => json!({ "tile": tried.changed, "measured": numbers(measured) }),
        Err(why) => json!({ "tile": tried.changed, "not_timed": why }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use fmha::{DType, Dims, Error, FwdProblem};
    use fmha_core::cache::{CompiledKernel, KernelJob};

    use super::*;

    /// Sends the value of each tile that it must compile.
    struct Heard(Mutex<Sender<String>>);

    impl Precompile for Heard {
        fn jobs(&self, _: AnyProblem<'_>, options: &PlanOptions) -> Result<Vec<KernelJob>, Error> {
            self.0.lock().unwrap().send(options.tile[0].1.clone()).unwrap();
            Ok(Vec::new())
        }

        fn precompile(&self, job: &KernelJob) -> Result<std::sync::Arc<CompiledKernel>, Error> {
            Err(Error::NoDevice(format!("no compiler for {}", job.kernel)))
        }
    }

    fn tiles(values: &[&str]) -> VecDeque<TileOptions> {
        values.iter().map(|value| vec![("stages".to_owned(), (*value).to_owned())]).collect()
    }

    #[test]
    fn tiles_that_come_next_are_compiled_but_for_what_the_search_has_come_to() {
        let dims = Dims::batch(1).seqlens(64, 64).heads(1, 1).head_dim(64);
        let problem = FwdProblem::batch(DType::F16, dims).validate().unwrap();
        let options = PlanOptions::default();
        let (told, heard) = channel();
        let compiler = Heard(Mutex::new(told));
        let ahead = Ahead::new(Some(&compiler), AnyProblem::Forward(&problem), &options);
        ahead.set(Some(tiles(&["1", "2", "3"])));
        ahead.leave(&tiles(&["2"])[0]);
        assert_eq!((ahead.next(), ahead.next()), (tiles(&["1"]).pop_front(), tiles(&["3"]).pop_front()));
        if std::thread::available_parallelism().map_or(1, std::num::NonZero::get) > 1 {
            let long = Duration::from_secs(60);
            let first = ahead.beside(|| {
                ahead.set(Some(tiles(&["4"])));
                heard.recv_timeout(long).unwrap()
            });
            assert_eq!(first, "4", "compiled while the search waits");
        }
        assert_eq!(ahead.next(), None, "the search is over");
    }
}
