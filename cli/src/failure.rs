//! Failures of a command.

use std::io;
use std::path::Path;

/// Reason why the command stopped.
#[derive(Debug)]
pub(super) enum Failure {
    /// The reader of our output is gone: there is nothing to print.
    Pipe,
    /// One line for the user.
    Wrong(String),
}

impl Failure {
    pub(super) fn wrong(line: impl Into<String>) -> Self {
        Self::Wrong(line.into())
    }

    /// Adds the option or operand from which the failure comes.
    pub(super) fn of(self, field: &str) -> Self {
        match self {
            Self::Pipe => Self::Pipe,
            Self::Wrong(line) => Self::Wrong(format!("{field} {line}")),
        }
    }

    /// Failure for a system error on a file.
    pub(super) fn file(path: &Path, error: &io::Error) -> Self {
        Self::Wrong(format!("{}: {error}", path.display()))
    }
}

/// Whether standard output still has a reader, checked between pieces of long work: without a write there is
/// no other sign.
#[cfg(unix)]
pub(super) fn is_read() -> bool {
    let mut output = libc::pollfd { fd: libc::STDOUT_FILENO, events: 0, revents: 0 };
    // SAFETY: one descriptor, which `poll` writes to.
    let told = unsafe { libc::poll(&raw mut output, 1, 0) };
    told != 1 || output.revents & (libc::POLLERR | libc::POLLHUP) == 0
}

/// Whether standard output still has a reader, found by writing to it.
#[cfg(not(unix))]
pub(super) fn is_read() -> bool {
    true
}

impl From<fmha::Error> for Failure {
    fn from(error: fmha::Error) -> Self {
        Self::Wrong(error.to_string())
    }
}

/// Failure of a rank of a group.
impl From<fmha_dist::Error> for Failure {
    fn from(error: fmha_dist::Error) -> Self {
        Self::Wrong(error.to_string())
    }
}

impl From<fmha::ProblemError> for Failure {
    fn from(error: fmha::ProblemError) -> Self {
        Self::Wrong(error.to_string())
    }
}

/// Failure to write to standard output; files go through [`Failure::file`].
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Pipe,
            _ => Self::Wrong(format!("standard output: {error}")),
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pipe => f.write_str("nobody reads the output"),
            Self::Wrong(line) => f.write_str(line),
        }
    }
}
