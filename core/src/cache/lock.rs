//! Locks on files between processes. A long wait prints a message, and ends after a time limit.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time limits of the wait for a lock that another process holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Time after which the user sees a message.
    pub(crate) says_after: Duration,
    /// Time after which the process goes on without the lock.
    pub(crate) ends_after: Duration,
}

impl Patience {
    /// Usual limits: a kernel compiles in 1 to 20 s, so a lock that is held for a minute may belong to a stopped
    /// process.
    pub(crate) const USUAL: Self =
        Self { says_after: Duration::from_secs(5), ends_after: Duration::from_secs(60) };
}

/// Outcome of the wait for a lock.
#[derive(Debug)]
pub(crate) enum Locked {
    /// This process has the lock until the value is dropped.
    Alone(FileLock),
    /// Another process still held the lock at the time limit.
    Held,
}

/// A locked file. Dropping it closes the file, and with that the system unlocks it.
#[derive(Debug)]
pub(crate) struct FileLock {
    _file: File,
}

/// Locks the file at `path`, which is created if it does not exist. `say` is given a line for the user if the wait
/// is long.
///
/// # Errors
/// What the system said, also where its file system has no locks.
pub(crate) fn lock(path: &Path, patience: Patience, mut say: impl FnMut(&str)) -> io::Result<Locked> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
    let (start, mut said, mut pause) = (Instant::now(), false, Duration::from_millis(1));
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Locked::Alone(FileLock { _file: file })),
            Err(TryLockError::WouldBlock) => (),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let waited = start.elapsed();
        if waited >= patience.ends_after {
            return Ok(Locked::Held);
        }
        if waited >= patience.says_after && !said {
            say(&format!(
                "fmha: another process has held {} for {} s; it is waited for until {} s have passed",
                path.display(),
                waited.as_secs(),
                patience.ends_after.as_secs()
            ));
            said = true;
        }
        std::thread::sleep(pause.min(patience.ends_after.saturating_sub(waited)));
        pause = (2 * pause).min(Duration::from_millis(100));
    }
}

/// Prints a line to standard error.
pub(crate) fn say(line: &str) {
    eprintln!("{line}");
}
