//! Named ranges of the calling thread, which a profiler shows next to the device's work: one for each plan,
//! each run, and each launch of a run. The replay of a graph launches nothing on the host and has no range.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt::Arguments;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::path::Path;

use libloading::Library;

/// Opens a named range; the return value is defined by the profiler.
pub type PushRange = unsafe extern "C" fn(*const c_char) -> c_int;
/// Closes the range that the calling thread opened last.
pub type PopRange = unsafe extern "C" fn() -> c_int;

/// The functions of a vendor's range library. Without them a range costs one comparison.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ranges(Option<Functions>);

#[derive(Clone, Copy, Debug)]
struct Functions {
    push: PushRange,
    pop: PopRange,
}

impl Ranges {
    /// The functions `push` and `pop` of the first library in `places` that opens and has both. A missing library
    /// is no error, only a lack of ranges: it comes with packages of a profiler or toolkit.
    ///
    /// # Safety
    /// In a library with one of these names, the functions with these names have the types [`PushRange`] and
    /// [`PopRange`].
    #[must_use]
    pub unsafe fn open<P: AsRef<Path>>(places: impl IntoIterator<Item = P>, push: &CStr, pop: &CStr) -> Self {
        let functions = |place: P| {
            // SAFETY: libraries of ranges run no code at load but their own set-up.
            let library = ManuallyDrop::new(unsafe { Library::new(place.as_ref()) }.ok()?);
            // `ManuallyDrop`: a profiler keeps addresses in the library, so it is never closed. SAFETY: the caller
            // promises the types.
            unsafe {
                let push = *library.get::<PushRange>(push.to_bytes_with_nul()).ok()?;
                let pop = *library.get::<PopRange>(pop.to_bytes_with_nul()).ok()?;
                Some(Functions { push, pop })
            }
        };
        Self(places.into_iter().find_map(functions))
    }

    /// The functions of a linked library.
    ///
    /// # Safety
    /// `push` reads a text up to its NUL and keeps no address of it. Both may be called by any thread, `pop` once for
    /// each `push`.
    #[must_use]
    pub const unsafe fn linked(push: PushRange, pop: PopRange) -> Self {
        Self(Some(Functions { push, pop }))
    }

    /// Whether the library of profiler ranges was found.
    #[must_use]
    pub const fn are_there(&self) -> bool {
        self.0.is_some()
    }

    /// A range of this name, to be opened any number of times.
    pub(crate) fn named(self, name: Arguments<'_>) -> Range {
        // Names contain no NUL; a name with one would simply open no range.
        Range(self.0.and_then(|functions| Some((functions, CString::new(name.to_string()).ok()?))))
    }
}

/// A range that can be opened.
#[derive(Debug)]
pub(crate) struct Range(Option<(Functions, CString)>);

impl Range {
    /// Opens the range until the result is dropped.
    pub(crate) fn open(&self) -> Open {
        let functions = self.0.as_ref().map(|(functions, name)| {
            // SAFETY: the text ends with a NUL, and the creator of `functions` promised that `push` may be called with
            // such a text.
            unsafe { (functions.push)(name.as_ptr()) };
            *functions
        });
        Open(functions, PhantomData)
    }
}

/// An open range of this thread, closed when dropped. The type is not `Send`, since a range belongs to its thread.
#[derive(Debug)]
pub(crate) struct Open(Option<Functions>, PhantomData<*const ()>);

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(functions) = self.0 {
            // SAFETY: this thread opened the range and has closed all ranges opened since, which are of inner scopes.
            unsafe { (functions.pop)() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether both functions are found. No function is called.
    fn opens(places: &[&str], push: &CStr, pop: &CStr) -> bool {
        // SAFETY: libraries of the system.
        unsafe { Ranges::open(places, push, pop) }.are_there()
    }

    #[test]
    fn without_a_library_or_with_one_that_lacks_a_function_there_are_no_ranges() {
        assert!(!opens(&[], c"push", c"pop"));
        assert!(!opens(&["/nowhere/libranges.so.1"], c"push", c"pop"));
        assert!(!Ranges::default().are_there() && Ranges::default().named(format_args!("x")).0.is_none());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_first_library_that_has_both_functions_serves() {
        let places = ["/nowhere/libranges.so.1", "libc.so.6"];
        // These functions have the types of `push` and `pop`: one takes a text and returns a number, the other takes
        // nothing.
        assert!(opens(&places, c"atoi", c"getpid"));
        assert!(!opens(&places, c"atoi", c"no_such_function") && !opens(&places, c"no_such", c"getpid"));
    }
}
