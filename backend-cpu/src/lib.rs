//! The CPU backend of `fmha`.
