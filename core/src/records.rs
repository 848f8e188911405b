//! Log records of planning, compiling and tuning, behind the feature `log`, which sends them to the program's
//! logger by the crate `log`. Without the feature the code compiles, but makes no record.

use std::fmt;

/// Log target for plans: the kernel, its steps and their settings at `debug`; a fallback and its reasons at `info`.
pub(crate) const PLAN: &str = "fmha::plan";
/// Log target for kernels: a compiled kernel, with its seconds, at `info`; a kernel that was found at `debug`.
pub(crate) const COMPILE: &str = "fmha::compile";
/// Log target for measured tiles: each tile that is tried at `debug`; the tile that is found and stored at `info`.
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
