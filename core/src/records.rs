//! Records of what is planned, compiled and tuned, behind the feature `log`: the crate `log` hands them to
//! the logger that the program has installed. Without the feature a record is compiled and never made.

use std::fmt;

/// Target of records of plans: the kernel, its steps and how it runs at `debug`; a fallback and its reasons at `info`.
pub(crate) const PLAN: &str = "fmha::plan";
/// Target of records of kernels: one that is compiled, with its seconds, at `info`; one that is found at `debug`.
pub(crate) const COMPILE: &str = "fmha::compile";
/// Target of records of measured tiles: each that is tried at `debug`; what is found and kept at `info`.
pub(crate) const TUNE: &str = "fmha::tune";

#[cfg(feature = "log")]
macro_rules! record {
    ($level:ident, $target:expr, $($words:tt)+) => { log::$level!(target: $target, $($words)+) };
}

#[cfg(not(feature = "log"))]
macro_rules! record {
    ($level:ident, $target:expr, $($words:tt)+) => {
        if false {
            let _ = ($target, format_args!($($words)+));
        }
    };
}

pub(crate) use record;

/// A list of items with a separator between them; `none` if it is empty.
pub(crate) struct Listed<I>(pub(crate) I, pub(crate) &'static str);

impl<I: Iterator<Item: fmt::Display> + Clone> fmt::Display for Listed<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut items = self.0.clone();
        match items.next() {
            Some(first) => write!(f, "{first}")?,
            None => f.write_str("none")?,
        }
        items.try_for_each(|item| write!(f, "{}{item}", self.1))
    }
}
