//! State that a forked child cannot take over from its parent: threads, which fork does not copy, and locks
//! that another thread held at that moment, which are never released.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use once_cell::race::OnceBox;

/// Number of forks between the process that loaded this library and this process, as far as [`watch`] has counted
/// them.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Starts to count forks, with a fork handler. Comparing process ids would not do: the system reuses ids, and
/// reading an id is a system call.
fn watch() {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if WATCHED.load(Ordering::Acquire) {
        return;
    }
    #[cfg(unix)]
    {
        unsafe extern "C" fn count() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the handler touches one atomic and no lock. Two threads may both register it: that a child counts
        // two forks at once makes no difference.
        let refused = unsafe { libc::pthread_atfork(None, None, Some(count)) } != 0;
        if refused {
            // Out of memory; the next caller tries again.
            return;
        }
    }
    WATCHED.store(true, Ordering::Release);
}

/// A value that each process has for itself: a child makes its own at its first use, and never touches or drops its
/// parent's. Holds no lock that a fork could leave locked.
pub struct PerProcess<T> {
    value: ManuallyDrop<T>,
    /// The count [`FORKS`] in the process that made the value.
    forks: u64,
    of_child: OnceBox<PerProcess<T>>,
}

impl<T> PerProcess<T> {
    /// Holds `value` for this process.
    pub fn new(value: T) -> Self {
        watch();
        Self::made_after(FORKS.load(Ordering::Relaxed), value)
    }

    /// Holds `value` for the process that loads this library; for statics.
    pub const fn of_first(value: T) -> Self {
        Self::made_after(0, value)
    }

    const fn made_after(forks: u64, value: T) -> Self {
        Self { value: ManuallyDrop::new(value), forks, of_child: OnceBox::new() }
    }

    /// Value of the calling process. `make` makes the value of a child. Several threads may each make one at
    /// first; one is kept.
    pub fn get(&self, make: impl Fn() -> T) -> &T {
        match self.get_or_try(|| Ok::<_, std::convert::Infallible>(make())) {
            Ok(value) => value,
            Err(never) => match never {},
        }
    }

    /// Returns the value of the calling process like [`get`](Self::get); `make` may fail.
    ///
    /// # Errors
    /// What `make` said.
    #[inline]
    pub fn get_or_try<E>(&self, make: impl Fn() -> Result<T, E>) -> Result<&T, E> {
        watch();
        let now = FORKS.load(Ordering::Relaxed);
        let mut own = self;
        while own.forks != now {
            own = own.of_child.get_or_try_init(|| Ok(Box::new(Self::made_after(now, make()?))))?;
        }
        Ok(&own.value)
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        // A child must not drop its parent's thread pool: it would wait for threads that do not exist in it. So a
        // value is only dropped in its own process.
        if self.forks == FORKS.load(Ordering::Relaxed) {
            // SAFETY: dropped here, once.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
