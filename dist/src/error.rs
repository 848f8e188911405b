//! Errors, and the rank at fault.

/// Error of a group, equal on every rank: the rank at fault, and the field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}, {field}: {text}")]
pub struct Error {
    /// The rank that is wrong, late or gone.
    pub rank: u32,
    /// Cause on that rank: a field of the problem, an argument, `exchange` or `group`.
    pub field: String,
    /// The sentence, with the numbers.
    pub text: String,
}

impl Error {
    /// `field` of `rank` is wrong.
    #[must_use]
    pub fn new(rank: u32, field: impl Into<String>, text: impl Into<String>) -> Self {
        Self { rank, field: field.into(), text: text.into() }
    }

    /// Error of the library on `rank`.
    #[must_use]
    pub fn of(rank: u32, error: &fmha::Error) -> Self {
        let field = match error {
            fmha::Error::Problem(problem) => problem.field,
            fmha::Error::Unsupported { .. } => "kernel",
            fmha::Error::Compile { .. } => "compiler",
            fmha::Error::Driver { call, .. } => call,
            fmha::Error::System { .. } => "system",
            fmha::Error::NoDevice(_) => "device",
            // A kind of error that a later version of the library adds; its text says what is wrong.
            _ => "library",
        };
        Self::new(rank, field, error.to_string())
    }

    /// Message for other ranks.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        format!("{}\0{}\0{}", self.rank, self.field, self.text).into_bytes()
    }

    /// Error in a message of [`to_bytes`](Self::to_bytes); `None` for other bytes.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let mut parts =
            bytes.splitn(3, |&byte| byte == 0).map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        let rank = parts.next()?.parse().ok()?;
        Some(Self::new(rank, parts.next()?, parts.next()?))
    }
}

/// The result of everything here that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;
