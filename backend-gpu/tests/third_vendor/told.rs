//! Reports to a profiler and a logger: ranges nest and close, however a plan or a run ends; log records name each
//! planned, compiled and tuned kernel.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int};
use std::sync::Once;

use fmha_core::cache::{Cache, ImageKind, KernelJob};
use fmha_core::source::KernelSource;
use fmha_core::tune::{TileOptions, Timer, search};
use fmha_core::{DType, PlanOptions};
use fmha_gpu::Ranges;
use log::{Level, LevelFilter, Log, Metadata, Record};

use super::{Copies, REFUSED, o_of, open, problem};

thread_local! {
    /// Ranges that this thread has opened and closed, and the number of open ones.
    static TOLD: RefCell<(Vec<String>, usize)> = const { RefCell::new((Vec::new(), 0)) };
}

unsafe extern "C" fn push(name: *const c_char) -> c_int {
    // SAFETY: a range's name ends in a NUL.
    let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap();
    TOLD.with_borrow_mut(|(told, depth)| {
        told.push(format!("{}{name}", "  ".repeat(*depth)));
        *depth += 1;
    });
    0
}

unsafe extern "C" fn pop() -> c_int {
    TOLD.with_borrow_mut(|(_, depth)| *depth = depth.checked_sub(1).expect("a range that is open"));
    0
}

/// The double of a profiler's library.
pub(super) fn ranges() -> Ranges {
    // SAFETY: `push` copies the name, and `pop` closes what this thread has opened.
    unsafe { Ranges::linked(push, pop) }
}

/// The ranges that `work` opens; checks that each is closed.
fn ranges_of<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    TOLD.take();
    let result = work();
    let (told, depth) = TOLD.take();
    assert_eq!(depth, 0, "ranges are open after {told:?}");
    (result, told)
}

const PLAN: &str = "fmha plan forward";

#[test]
fn a_plan_a_run_and_each_launch_are_ranges_that_nest() {
    let (device, _) = open(true);
    let (result, told) = ranges_of(|| o_of(&device, &PlanOptions::default(), 0));
    assert!(result.is_ok());
    assert_eq!(told, [PLAN, "fmha forward staged", "  before", "  staged", "  after"]);
    // The fallback runs under its own name.
    let (result, told) = ranges_of(|| o_of(&device, &PlanOptions::default().allow_fallback(true), 4));
    assert!(result.is_ok());
    assert_eq!(told, [PLAN, "fmha forward slow", "  slow"]);
}

#[test]
fn ranges_close_where_a_launch_or_a_plan_errs() {
    let (device, log) = open(true);
    let options = PlanOptions::default().tile([("adds", REFUSED.to_string())]);
    let (result, told) = ranges_of(|| o_of(&device, &options, 0));
    assert!(result.unwrap_err().to_string().contains("TOY_REFUSED"));
    assert_eq!(told, [PLAN, "fmha forward staged", "  before", "  staged"]);
    assert!(log.lock().unwrap().last().unwrap().starts_with("+1 "), "nothing follows the launch that erred");
    let (result, told) = ranges_of(|| device.plan_fwd(&problem(DType::F16), &PlanOptions::default()));
    assert!(result.is_err());
    assert_eq!(told, [PLAN]);
}

#[test]
fn a_call_that_is_refused_before_anything_is_queued_opens_no_range() {
    let (device, _) = open(true);
    let (result, told) = ranges_of(|| o_of(&device, &PlanOptions::default(), 4));
    assert!(result.is_err());
    assert_eq!(told, [PLAN]);
}

thread_local! {
    /// Records of this thread to the logger: level, target, text.
    static RECORDS: RefCell<Vec<(Level, String, String)>> = const { RefCell::new(Vec::new()) };
}

struct Kept;

impl Log for Kept {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let line = (record.level(), record.target().to_owned(), record.args().to_string());
        RECORDS.with_borrow_mut(|records| records.push(line));
    }

    fn flush(&self) {}
}

/// The log records that `work` makes for one target: their levels and words.
fn records_of(target: &str, work: impl FnOnce()) -> Vec<(Level, String)> {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        log::set_logger(&Kept).unwrap();
        log::set_max_level(LevelFilter::Trace);
    });
    RECORDS.take();
    work();
    let of_target = RECORDS.take().into_iter().filter(|(_, of, _)| of == target);
    of_target.map(|(level, _, words)| (level, words)).collect()
}

#[test]
fn a_plan_tells_its_kernel_its_steps_and_why_it_is_a_fallback() {
    let (device, _) = open(true);
    let plan = |dtype, options: PlanOptions| {
        records_of("fmha::plan", || drop(device.plan_fwd(&problem(dtype), &options)))
    };
    let told = plan(DType::F32, PlanOptions::default());
    let words = "forward on third:0: kernel staged; steps: before, staged, after; arch toy_1; tile from the table; \
                 refused: none";
    assert_eq!(told, [(Level::Debug, words.to_owned())]);
    let told = plan(DType::F16, PlanOptions::default().allow_fallback(true));
    let words = "forward on third:0: fallback slow, correct and not fast: staged: dtype_o f16 is not f32";
    assert_eq!(told[0], (Level::Info, words.to_owned()));
    assert_eq!((told.len(), told[1].0), (2, Level::Debug));
    let told = plan(DType::F16, PlanOptions::default());
    assert_eq!((told.len(), told[0].0), (1, Level::Debug));
    assert!(told[0].1.contains("no plan: ") && told[0].1.contains("dtype_o f16 is not f32"), "{told:?}");
}

#[test]
fn a_kernel_tells_that_it_is_compiled_once_and_found_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    let job = KernelJob {
        kernel: "staged",
        arch: "toy_1".to_owned(),
        flags: Vec::new(),
        source: KernelSource::new("20".to_owned(), Vec::new),
        image: ImageKind::Machine,
    };
    let cache = Cache::new(Vec::new(), Some(folder.path()));
    let get = || records_of("fmha::compile", || drop(cache.get(&job, || Ok(Copies)).unwrap()));
    let (compiled, found) = (get(), get());
    assert_eq!((compiled.len(), compiled[0].0), (1, Level::Info));
    let (words, seconds) = compiled[0].1.rsplit_once(", ").unwrap();
    assert_eq!(words, "kernel staged for toy_1: compiled by copies 1");
    assert!(seconds.strip_suffix(" s").unwrap().parse::<f64>().unwrap() < 60.0, "{seconds}");
    let words =
        format!("kernel staged for toy_1: found, disk cache {}", folder.path().join("kernels").display());
    assert_eq!(found, [(Level::Debug, words)]);
}

/// A timer that reads the seconds from a field of the tile.
struct Named;

impl Timer for Named {
    type Ready = f64;

    fn ready(&mut self, tile: &TileOptions) -> Result<f64, String> {
        tile[0].1.parse().map_err(|_| format!("{} is no number", tile[0].1))
    }

    fn burst(&mut self, seconds: &f64) -> Result<f64, String> {
        Ok(*seconds)
    }
}

#[test]
fn a_search_of_tiles_tells_each_try_and_what_it_found() {
    let own = vec![("seconds".to_owned(), "1.0".to_owned())];
    let changes = ["2.0", "none", "0.5"].map(|value| ("seconds", value.to_owned()));
    let told = records_of("fmha::tune", || drop(search(&mut Named, &own, &changes, 3, |_| {}).unwrap()));
    let expected = [
        (Level::Debug, "seconds=2.0: gain -50.0 %, spread 0.0 %"),
        (Level::Debug, "seconds=none: not timed: none is no number"),
        (Level::Debug, "seconds=0.5: gain 100.0 %, spread 0.0 %"),
        (Level::Info, "tile seconds=0.5: faster than the kernel's own, 100.0 %, 0 changes not begun"),
    ];
    assert_eq!(told, expected.map(|(level, words)| (level, words.to_owned())));
}
