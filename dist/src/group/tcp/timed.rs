//! Reads and writes that end by an instant, however slowly the other side sends or takes bytes.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Time that is left until `end`.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] if there is none.
fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "the time for it is over"));
    }
    // A timeout of less than a microsecond may be rounded to 0, which stands for none.
    Ok(left.max(Duration::from_micros(10)))
}

/// Whether a call must be made again: it was interrupted, or its timeout is over and the instant may not be.
fn is_again(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

/// Fills `bytes` by `end`.
pub(super) fn read_exact(mut from: &TcpStream, bytes: &mut [u8], end: Instant) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        from.set_read_timeout(Some(left(end)?))?;
        match from.read(&mut bytes[at..]) {
            Ok(0) => {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed"));
            }
            Ok(count) => at += count,
            Err(error) if is_again(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all of `bytes` by `end`.
pub(super) fn write_all(mut to: &TcpStream, bytes: &[u8], end: Instant) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        to.set_write_timeout(Some(left(end)?))?;
        match to.write(&bytes[at..]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => at += count,
            Err(error) if is_again(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads as [`Read`] does, without a deadline, but checks `goes_on` every [`POLL`].
pub(super) struct Polled<'a, F> {
    pub(super) stream: &'a TcpStream,
    pub(super) goes_on: F,
}

/// Time between two questions of a [`Polled`] stream.
pub(super) const POLL: Duration = Duration::from_secs(1);

impl<F: Fn() -> bool> Read for Polled<'_, F> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match (&mut &*self.stream).read(bytes) {
                Err(error) if is_again(&error) && (self.goes_on)() => {}
                read => return read,
            }
        }
    }
}
