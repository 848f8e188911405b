//! What a profiler is told: ranges that nest and close, however a plan or a run ends.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int};

use fmha_core::{DType, PlanOptions};
use fmha_gpu::Ranges;

use super::{REFUSED, o_of, open, problem};

thread_local! {
    /// What this thread has opened and closed, and how many ranges are open.
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

/// The ranges that `work` opens; each is closed.
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
