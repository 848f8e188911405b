//! A progress bar on standard error during long work, if it is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Counts steps of one piece of work.
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// Nothing is drawn unless standard error is a terminal.
    pub(super) fn new(what: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(8));
        if let Ok(style) = ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} {elapsed} (left: {eta})")
        {
            bar.set_style(style);
        }
        bar.set_message(what);
        Self(bar)
    }

    /// `done` of `total` steps are behind us.
    pub(super) fn at(&self, done: u64, total: u64) {
        // Short work prints nothing: it would only flicker.
        if self.0.elapsed() > Duration::from_millis(500) {
            self.0.set_length(total);
            self.0.set_position(done);
        }
    }

    /// Runs `write`, which prints to the terminal that shows the bar.
    pub(super) fn beside<T>(&self, write: impl FnOnce() -> T) -> T {
        self.0.suspend(write)
    }

    pub(super) fn finish(&self) {
        self.0.finish_and_clear();
    }
}
