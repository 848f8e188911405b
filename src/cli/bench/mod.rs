//! `fmha bench`.

mod peers;
mod plot;
mod table;

use super::Verdict;
use super::failure::Failure;
use clap::Args;
use std::io::Write;

/// Options of `fmha bench`.
#[derive(Debug, Args)]
pub(super) struct BenchArgs {}

impl BenchArgs {
    pub(super) fn carry_out(&self, _out: &mut dyn Write) -> Result<Verdict, Failure> {
        Err(Failure::wrong("0 tables"))
    }
}
