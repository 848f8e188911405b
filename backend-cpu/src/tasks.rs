//! Threads: a pool of this backend's own, and a queue of tasks, the longest first.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use fmha_core::fork::PerProcess;
use fmha_core::{Error, Result};

/// A fixed number of threads, including the caller's.
pub(crate) struct Threads {
    /// The threads besides the caller's; `None` if the caller's is the only one.
    pool: Option<rayon_core::ThreadPool>,
    count: usize,
}

/// A backend's threads, separate for each process: a forked child has no threads of its parent, and creates its own
/// when it computes.
pub(crate) struct Pool {
    count: usize,
    threads: PerProcess<Threads>,
}

impl Pool {
    pub(crate) fn of(threads: Threads) -> Self {
        Self { count: threads.count(), threads: PerProcess::new(threads) }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Threads of this process.
    ///
    /// # Errors
    /// [`Error::System`] if the system refuses to create a child's threads.
    #[inline]
    pub(crate) fn get(&self) -> Result<&Threads> {
        self.threads.get_or_try(|| Threads::new(self.count))
    }
}

impl Threads {
    pub(crate) fn new(count: usize) -> Result<Self> {
        let pool = match count {
            0 | 1 => None,
            _ => Some(
                rayon_core::ThreadPoolBuilder::new()
                    .num_threads(count - 1)
                    .thread_name(|i| format!("fmha-cpu-{}", i + 1))
                    .build()
                    .map_err(|error| Error::System {
                        what: format!("a pool of {count} threads"),
                        text: error.to_string(),
                    })?,
            ),
        };
        Ok(Self { pool, count: count.max(1) })
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Number of threads that a call of `tasks` tasks uses.
    pub(crate) fn used(&self, tasks: usize) -> usize {
        self.count.min(tasks).max(1)
    }

    /// Runs `work(state, task)` for every task number below `tasks`, in order of the numbers, each
    /// thread with one of `states`.
    pub(crate) fn for_each<T: Send>(
        &self,
        states: &mut [T],
        tasks: usize,
        work: impl Fn(&mut T, usize) + Sync,
    ) {
        let next = AtomicUsize::new(0);
        let drain = |state: &mut T| loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                break;
            }
            work(state, task);
        };
        match (&self.pool, states) {
            (_, []) => {}
            (Some(pool), states) if states.len() > 1 => {
                let states: Vec<Mutex<&mut T>> = states.iter_mut().map(Mutex::new).collect();
                on_every_thread(pool, &|thread| {
                    if let Some(Ok(mut state)) = states.get(thread).map(Mutex::lock) {
                        drain(&mut state);
                    }
                });
            }
            (_, [state, ..]) => drain(state),
        }
    }
}

/// Runs `work` with each thread's number; the caller's is 0. The function is compiled once for every kind of work.
fn on_every_thread(pool: &rayon_core::ThreadPool, work: &(dyn Fn(usize) + Sync)) {
    // The caller begins at once; only the other threads must be woken.
    pool.in_place_scope(|scope| {
        scope.spawn_broadcast(|_, thread| work(thread.index() + 1));
        work(0);
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn a_call_uses_no_more_threads_than_it_has_tasks_and_one_at_least() {
        for (count, tasks, used) in [(3, 5, 3), (3, 3, 3), (3, 2, 2), (3, 0, 1), (1, 7, 1), (0, 7, 1)] {
            assert_eq!(Threads::new(count).unwrap().used(tasks), used, "{tasks} tasks on {count} threads");
        }
        assert_eq!([0, 1, 2, 3].map(|count| Threads::new(count).unwrap().count()), [1, 1, 2, 3]);
    }

    /// As many tasks run at once as there are states: each task waits for the others, so with one thread the test
    /// would hang.
    #[test]
    fn as_many_tasks_run_at_once_as_there_are_states() {
        for states in [2, 3] {
            let threads = Threads::new(3).unwrap();
            let (barrier, mut done) = (Barrier::new(states), vec![Vec::new(); states]);
            threads.for_each(&mut done, 2 * states, |done, task| {
                barrier.wait();
                done.push(task);
            });
            assert!(done.iter().all(|tasks| tasks.len() == 2), "{done:?}");
            let mut all = done.concat();
            all.sort_unstable();
            assert_eq!(all, (0..2 * states).collect::<Vec<_>>());
        }
    }

    #[test]
    fn one_state_and_none_need_no_other_thread() {
        let threads = Threads::new(2).unwrap();
        let mut done = [Vec::new()];
        threads.for_each(&mut done, 5, Vec::push);
        assert_eq!(done, [[0, 1, 2, 3, 4]]);
        threads.for_each(&mut [] as &mut [()], 0, |(), task| panic!("there is no task {task}"));
    }
}
