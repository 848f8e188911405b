//! The contract of `fmha`.
