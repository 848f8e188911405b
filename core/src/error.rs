//! Errors, by who can fix them: the caller, the machine, or this library.

use std::path::PathBuf;

/// A mistake of the caller: the field, and a sentence that starts with the field's name and contains the wrong value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ProblemError {
    /// The field of the problem or the argument that is wrong, as the API spells it.
    pub field: &'static str,
    /// The whole sentence: `num_heads_q 10 is not a multiple of num_heads_kv 4`.
    pub text: String,
}

impl ProblemError {
    /// A mistake in `field`; `text` is the sentence with its name and value.
    #[must_use]
    pub fn new(field: &'static str, text: impl Into<String>) -> Self {
        Self { field, text: text.into() }
    }
}

/// The reason why one kernel does not support a valid problem.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kernel}: {reason}")]
pub struct Refusal {
    /// The kernel that refused.
    pub kernel: String,
    /// The field and its number: `head_dim_qk 300 is larger than 256`.
    pub reason: String,
}

impl Refusal {
    /// Makes the refusal of `kernel` with its `reason`.
    #[must_use]
    pub fn new(kernel: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { kernel: kernel.into(), reason: reason.into() }
    }
}

/// Every error, grouped by who can fix it.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The problem or its arguments contradict themselves. Fix the call.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// A valid problem that no kernel of the device computes, and why each kernel refused.
    #[error("{backend} has no kernel for this problem: {}", list(.refusals))]
    Unsupported {
        /// Name of the backend.
        backend: String,
        /// One refusal for each kernel that was considered.
        refusals: Vec<Refusal>,
    },
    /// The kernel compiler failed: a bug of this library.
    #[error("{kernel} does not compile (source and log in {}): {log}", .dumped.display())]
    Compile {
        /// The name of the kernel.
        kernel: String,
        /// Text that the compiler printed.
        log: String,
        /// File that holds the source.
        dumped: PathBuf,
    },
    /// A call of the driver failed.
    #[error("{call} failed with {code}: {text}")]
    Driver {
        /// Function of the driver.
        call: &'static str,
        /// Return code of the function.
        code: i32,
        /// Error text of the driver for the code.
        text: String,
    },
    /// A call of the operating system failed, for memory or a file.
    #[error("{what}: {text}")]
    System {
        /// Name of the failed request, with its size or path.
        what: String,
        /// Text of the operating system's error.
        text: String,
    },
    /// A device or library that this machine does not have.
    #[error("{0}")]
    NoDevice(String),
}

fn list(refusals: &[Refusal]) -> String {
    refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns a [`ProblemError`] for `field` unless `condition` holds; the remaining arguments format its sentence.
macro_rules! ensure {
    ($condition:expr, $field:expr, $($sentence:tt)+) => {
        if !$condition {
            return Err($crate::error::ProblemError::new($field, format!($($sentence)+)).into());
        }
    };
}
pub(crate) use ensure;
