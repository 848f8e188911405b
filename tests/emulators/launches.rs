//! Reports of a double on its launches, each vendor's in its own function: a text of JSON.

use std::collections::VecDeque;
use std::ffi::{CString, c_char};
use std::fmt::Debug;

/// Launches that are kept until the next request.
const KEPT: usize = 64;

/// Reports of the last launches, a JSON object each, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Launches(pub(crate) VecDeque<String>);

impl Launches {
    /// Keeps a launch, for the oldest where there are too many: of a device of so many multiprocessors or compute
    /// units, with what each of its workgroups (clusters) has read, by their numbers.
    pub(crate) fn push<'a>(
        &mut self,
        kernel: &str,
        (grid, block): (impl Debug, impl Debug),
        counters: impl IntoIterator<Item = (&'a str, u64)>,
        instructions: impl IntoIterator<Item = (&'a str, u64)>,
        (units, bytes): (u64, impl IntoIterator<Item = (u64, u64)>),
    ) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        let (counters, instructions) = (object(counters), object(instructions));
        let mut bytes: Vec<(u64, u64)> = bytes.into_iter().collect();
        bytes.sort_unstable();
        let bytes: Vec<u64> = bytes.into_iter().map(|(_, read)| read).collect();
        let name = kernel.replace(['"', '\\'], "_");
        self.0.push_back(format!(
            "{{\"kernel\":\"{name}\",\"grid\":{grid:?},\"block\":{block:?},\"counters\":{counters},\"instructions\":{instructions},\"units\":{units},\"bytes_of_groups\":{bytes:?}}}"
        ));
    }

    /// Returns the reports and forgets them.
    pub(crate) fn take(&mut self) -> VecDeque<String> {
        std::mem::take(&mut self.0)
    }
}

fn object<'a>(pairs: impl IntoIterator<Item = (&'a str, u64)>) -> String {
    let fields: Vec<String> = pairs.into_iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
    format!("{{{}}}", fields.join(","))
}

/// A text of all of them, which is the caller's until [`forget`].
pub(crate) fn give(launches: impl IntoIterator<Item = String>) -> *mut c_char {
    let launches: Vec<String> = launches.into_iter().collect();
    // The objects hold no zero byte: names and numbers.
    CString::new(format!("[{}]", launches.join(","))).unwrap_or_default().into_raw()
}

/// Frees a text that [`give`] gave.
///
/// # Safety
/// `text` is null, or came from there and is not used again.
pub(crate) unsafe fn forget(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller promises that `into_raw` made it, and that this is its last use.
        drop(unsafe { CString::from_raw(text) });
    }
}
