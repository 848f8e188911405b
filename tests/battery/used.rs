//! Kernels that a case ran on: a battery that passes on a slow fallback has not tested the fast kernel.

use std::cell::RefCell;
use std::collections::BTreeSet;

thread_local! {
    /// Kernels that the case on this thread has used.
    static USED: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
}

/// Notes that a call of the present case is about to run on this kernel.
pub(crate) fn note(kernel: &str) {
    USED.with_borrow_mut(|used| used.insert(kernel.to_owned()));
}

/// Names of the kernels of all calls since the last request: `combine+sm90`.
pub(crate) fn take() -> String {
    let used = USED.with_borrow_mut(std::mem::take);
    used.into_iter().collect::<Vec<_>>().join("+")
}
