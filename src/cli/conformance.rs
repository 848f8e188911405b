//! `fmha conformance`.

use super::Verdict;
use super::failure::Failure;
use clap::Args;
use std::io::Write;

/// Options of `fmha conformance`.
#[derive(Debug, Args)]
pub(super) struct ConformanceArgs {}

impl ConformanceArgs {
    pub(super) fn carry_out(&self, _out: &mut dyn Write) -> Result<Verdict, Failure> {
        Err(Failure::wrong("0 cases"))
    }
}
