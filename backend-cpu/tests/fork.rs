//! A forked child has one thread, however many its parent has. A backend that the parent has used still works in
//! the child.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fmha_core::{
    BwdArgs, BwdPlan, BwdProblem, DType, DevSlice, DevSliceMut, Device, Dims, FwdArgs, FwdPlan, FwdProblem,
    MaskSpec, PlanOptions,
};
use fmha_cpu::{Config, CpuBackend};

const DIMS: Dims = Dims::batch(2).seqlens(40, 40).heads(4, 2).head_dim(16);
const ELEMS_Q: usize = 2 * 40 * 4 * 16;
const ELEMS_K: usize = ELEMS_Q / 2;

/// Lock, so that only one test at a time forks: the child keeps forever whatever another test holds at that moment.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Backend with its plans.
struct Calls {
    device: Device,
    fwd: FwdPlan,
    bwd: BwdPlan,
}

impl Calls {
    fn on(threads: usize) -> Self {
        let device = Device::new(CpuBackend::with(Config { threads: Some(threads), isa: None }).unwrap());
        let problem = FwdProblem::batch(DType::F32, DIMS).write_lse(true).mask(MaskSpec::CAUSAL);
        let options = PlanOptions::default().deterministic(true);
        let fwd = device.plan_fwd(&problem.clone().validate().unwrap(), &options).unwrap();
        let bwd = device.plan_bwd(&BwdProblem::new(problem).validate().unwrap(), &options).unwrap();
        Self { device, fwd, bwd }
    }

    /// Computes O, dQ, dK and dV of fixed numbers.
    fn run(&self) -> [Vec<f32>; 4] {
        let numbers = |len: usize, step: usize| -> Vec<f32> {
            (0..len).map(|i| (i * step % 31) as f32 / 16.0 - 1.0).collect()
        };
        let (q, k, v) = (numbers(ELEMS_Q, 7), numbers(ELEMS_K, 5), numbers(ELEMS_K, 3));
        let (mut o, mut lse, mut dq) = (vec![0f32; ELEMS_Q], vec![0f32; 2 * 4 * 40], vec![0f32; ELEMS_Q]);
        let (mut dk, mut dv) = (vec![0f32; ELEMS_K], vec![0f32; ELEMS_K]);
        let inputs = [&q, &k, &v].map(|numbers| DevSlice::host(numbers));
        let mut args = FwdArgs::new(inputs[0], inputs[1], inputs[2], DevSliceMut::host(&mut o));
        args.lse = Some(DevSliceMut::host(&mut lse));
        self.fwd.run(&mut args, &self.device.default_stream()).unwrap();
        let mut args = BwdArgs::new(
            [inputs[0], inputs[1], inputs[2]],
            [DevSlice::host(&o), DevSlice::host(&lse), inputs[0]],
            [DevSliceMut::host(&mut dq), DevSliceMut::host(&mut dk), DevSliceMut::host(&mut dv)],
        );
        self.bwd.run(&mut args, &self.device.default_stream()).unwrap();
        [o, dq, dk, dv]
    }
}

/// Whether a child process reports within a minute that `work` returned true; a child that hangs is killed.
fn in_a_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `work` and ends without returning to the test's harness.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(false);
        // SAFETY: ends this process, and nothing that its parent registered for an exit runs.
        unsafe { libc::_exit(i32::from(!held)) };
    }
    let (start, mut status) = (Instant::now(), 0);
    // SAFETY: a child of this process, waited for until it is gone.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        if start.elapsed() > Duration::from_secs(60) {
            // SAFETY: a child of this process, waited for until it is gone.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, &raw mut status, 0);
            }
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

#[test]
fn a_child_computes_what_its_parent_does_with_the_backend_that_the_parent_used() {
    let _alone = alone();
    for threads in [1, 2, 3] {
        let calls = Calls::on(threads);
        let expected = calls.run();
        assert!(in_a_child(|| calls.run() == expected && calls.run() == expected), "{threads} threads");
        assert!(
            in_a_child(|| calls.run() == expected && in_a_child(|| calls.run() == expected)),
            "{threads} threads, a child's child"
        );
        // The parent's threads still exist after the fork.
        assert_eq!(calls.run(), expected);
    }
}

#[test]
fn a_child_may_open_drop_and_ask_a_backend_of_its_parent() {
    let _alone = alone();
    let calls = Calls::on(2);
    let expected = calls.run();
    let mut once = Some(calls);
    assert!(in_a_child(|| {
        let calls = once.take();
        let rate = calls.as_ref().and_then(|calls| calls.device.roofline(DType::F32).flops_per_second);
        drop(calls);
        rate.is_some_and(|rate| rate > 0.0) && Calls::on(2).run() == expected
    }));
}

/// A child that is forked during its parent's calls computes too: the parent's threads may hold any of their locks
/// at the fork.
#[test]
fn a_child_that_is_forked_amid_its_parents_calls_computes_too() {
    let _alone = alone();
    let calls = Calls::on(2);
    let expected = calls.run();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    calls.run();
                }
            });
        }
        let all = (0..40).all(|_| in_a_child(|| calls.run() == expected));
        done.store(true, Ordering::Relaxed);
        assert!(all);
    });
}
