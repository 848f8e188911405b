//! What the tests use beyond Rust: each part is installed if it can be, and named if it cannot.

/// Sets everything up; returns the environment variables that tell the tests where it is.
pub(crate) fn run() -> Vec<(String, String)> {
    Vec::new()
}
