//! A result against f64, or against what the user says it is to be.

use std::fmt;

use fmha::DType;
use fmha::core::reference::{Inputs, Precision, forward_head};
use fmha::core::seq::SeqSpan;
use fmha::core::work::visible_pairs;
use serde_json::{Value, json};

use super::failure::Failure;
use super::files::Tensor;
use super::job::Job;
use super::progress::Progress;

/// How much is compared with the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verify {
    None,
    /// All where that takes a moment, else a sample.
    Auto,
    Full,
    Sample,
}

/// Reads `full`, `sample`, `none` = `0`, and `1`: all or a sample by size.
pub(super) fn verify(text: &str) -> Result<Verify, String> {
    match text {
        "0" | "none" => Ok(Verify::None),
        "1" | "auto" => Ok(Verify::Auto),
        "full" => Ok(Verify::Full),
        "sample" => Ok(Verify::Sample),
        _ => Err(format!("verify `{text}` is none of 0 or none, 1, sample, full")),
    }
}

/// One result's errors.
#[derive(Clone, Debug)]
pub(super) struct Checked {
    what: String,
    error: f64,
    allowed: f64,
    /// (sequence, head) pairs compared, and how many there are.
    pairs: (usize, usize),
}

impl Checked {
    pub(super) fn passed(&self) -> bool {
        self.error <= self.allowed
    }

    pub(super) fn as_json(&self) -> Value {
        json!({
            "what": self.what,
            "error": self.error,
            "allowed": self.allowed,
            "pairs_compared": self.pairs.0,
            "pairs": self.pairs.1,
        })
    }
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (compared, all) = self.pairs;
        write!(f, "{}: largest error {:.2e}, allowed {:.2e}", self.what, self.error, self.allowed)?;
        match compared == all {
            true => write!(f, " (all {all} (sequence, head) pairs)"),
            false => {
                write!(f, " (a sample: {compared} of {all} (sequence, head) pairs; --verify full for all)")
            }
        }
    }
}

/// Everything that was asked to be compared.
pub(super) fn check(
    job: &Job<'_>,
    verify: Verify,
    expected: Option<&Tensor>,
    progress: &Progress,
) -> Result<Vec<Checked>, Failure> {
    let _ = (expected, Inputs::from(&job.host_forward(&mut [])), visible_pairs, DType::F32);
    if verify == Verify::None || job.setup().bwd.is_some() {
        return Ok(Vec::new());
    }
    let fwd = &job.setup().fwd;
    let heads = fwd.dims.num_heads_q;
    let spans = job.setup().spans()?;
    let pairs: Vec<(SeqSpan, u32)> = spans.iter().flat_map(|&s| (0..heads).map(move |h| (s, h))).collect();
    let mut unused = [];
    let args = job.host_forward(&mut unused);
    let inputs = Inputs::from(&args);
    let (mut error, mut same_error) = (0.0f64, 0.0f64);
    for (done, &(span, head)) in pairs.iter().enumerate() {
        let exact = forward_head(fwd, &inputs, span, head, Precision::Exact)?;
        let same = forward_head(fwd, &inputs, span, head, Precision::AsInput)?;
        for i in 0..span.seqlen_q {
            for d in 0..fwd.dims.head_dim_v {
                let at = fwd.o.offset(span.storage_batch, span.q_row + i, head, d) as usize;
                let index = (i * fwd.dims.head_dim_v + d) as usize;
                let ours = fwd.dtype_o.read(&job.host_o()[at * fwd.dtype_o.size_bytes() as usize..]);
                error = error.max((ours - exact.o[index]).abs());
                same_error = same_error.max((same.o[index] - exact.o[index]).abs());
            }
        }
        progress.at(done as u64 + 1, pairs.len() as u64);
    }
    Ok(vec![Checked {
        what: "O".into(),
        error,
        allowed: 2.0 * same_error + 1e-6,
        pairs: (pairs.len(), pairs.len()),
    }])
}
