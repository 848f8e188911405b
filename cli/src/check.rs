//! Comparison of a result with f64, or with values from the user.

use std::fmt;

use fmha_conformance::check::{Selection, check_bwd, check_fwd};
use fmha_conformance::verdict::{TensorVerdict, Verdict};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::files::Tensor;
use crate::job::Call;
use crate::progress::Progress;

/// Extent of the comparison with the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verify {
    None,
    /// Everything if that takes a moment, otherwise a sample.
    Auto,
    Full,
    Sample,
}

impl Verify {
    /// The word that names the extent of the check.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Auto => "auto",
            Self::Full => "full",
            Self::Sample => "sample",
        }
    }
}

/// Reads `full`, `sample`, `none` = `0`, and `1`: all or a sample by size.
pub(super) fn verify(text: &str) -> Result<Verify, String> {
    match text {
        "0" | "none" => Ok(Verify::None),
        "1" | "auto" => Ok(Verify::Auto),
        "full" => Ok(Verify::Full),
        "sample" => Ok(Verify::Sample),
        _ => Err(format!("verify `{text}` is none of 0 or none, 1 or auto, sample, full")),
    }
}

/// Number of the reference's multiplications that take a few seconds on two cores.
const AUTO_BUDGET: f64 = 5e9;
const SAMPLE_BUDGET: f64 = 4e8;

/// Comparison and its result.
#[derive(Debug, Default)]
pub(super) struct Checked {
    verdict: Verdict,
    expected: Option<Expected>,
    /// Extent as text; empty if nothing was compared with the reference.
    extent: String,
}

/// O against the user's own tensor.
#[derive(Debug)]
struct Expected {
    error: f64,
    allowed: f64,
}

impl Checked {
    pub(super) fn passed(&self) -> bool {
        self.verdict.pass() && self.expected.as_ref().is_none_or(|e| e.error <= e.allowed)
    }

    /// Whether nothing was compared with anything.
    pub(super) fn is_empty(&self) -> bool {
        self.verdict.tensors.is_empty() && self.expected.is_none()
    }

    pub(super) fn as_json(&self) -> Value {
        json!({
            "tensors": self.verdict.tensors,
            "faults": self.verdict.faults,
            "extent": self.extent,
            "expected": self.expected.as_ref().map(|e| json!({ "error": e.error, "allowed": e.allowed })),
        })
    }

    /// Lines of the report.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.verdict.tensors.iter().map(ToString::to_string).collect();
        lines.extend(self.verdict.faults.iter().cloned());
        lines.extend((!self.extent.is_empty()).then(|| self.extent.clone()));
        lines.extend(self.expected.as_ref().map(ToString::to_string));
        lines
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "o against the expected one: max error {:.3e} (bound {:.3e})", self.error, self.allowed)
    }
}

/// Makes all requested comparisons. Results are on the host.
pub(super) fn check(
    call: &Call,
    verify: Verify,
    expected: Option<&Tensor>,
    progress: &Progress,
) -> Result<Checked, Failure> {
    // The bound for the expected tensor comes from the same comparison.
    let verify = if expected.is_some() && verify == Verify::None { Verify::Sample } else { verify };
    let step = |done, total| progress.at(done, total);
    match call {
        _ if verify == Verify::None => Ok(Checked::default()),
        Call::Forward(host, _) => {
            let selection = match verify {
                Verify::Auto => Selection::within(&host.problem, &host.spans, AUTO_BUDGET),
                Verify::Sample => Selection::within(&host.problem, &host.spans, SAMPLE_BUDGET),
                Verify::None | Verify::Full => Selection::default(),
            };
            let verdict = meaningful(check_fwd(host, &selection, &step)?)?;
            let pairs = host.spans.len() * host.problem.dims.num_heads_q as usize;
            let extent = extent(&selection, pairs, "(sequence, head) pairs", "rows");
            let found = host.operands.get(fmha_conformance::tensor::Operand::O);
            let bound = verdict.tensors.iter().find(|tensor| tensor.tensor == "o");
            let expected = match (expected, found, bound) {
                (Some(expected), Some(found), Some(bound)) => {
                    Some(against(expected, found.dtype, found.elems(), bound))
                }
                _ => None,
            };
            Ok(Checked { verdict, expected, extent })
        }
        Call::Backward(host, _) => {
            let (problem, spans) = (&*host.problem, &host.spans);
            let selection = match verify {
                Verify::Auto => Selection::within_bwd(problem, spans, AUTO_BUDGET),
                Verify::Sample => Selection::within_bwd(problem, spans, SAMPLE_BUDGET),
                Verify::None | Verify::Full => Selection::default(),
            };
            let verdict = meaningful(check_bwd(host, &selection, &step)?)?;
            let pairs = spans.len() * problem.fwd.dims.num_heads_kv as usize;
            let extent = extent(&selection, pairs, "(sequence, kv head) pairs", "queries and keys");
            Ok(Checked { verdict, expected: None, extent })
        }
    }
}

/// Refuses to call a result right if the bounds are so wide that any result would pass.
fn meaningful(verdict: Verdict) -> Result<Verdict, Failure> {
    if verdict.pass() && verdict.says_nothing() {
        let bounds =
            verdict.tensors.iter().map(|tensor| format!("{} {:.1e}", tensor.tensor, tensor.max_bound));
        return Err(Failure::wrong(format!(
            "verify: scores of up to {:.1e} are beyond what f32 tells apart; within the bounds ({}) anything \
             passes, so 0 elements count as checked (--verify 0 runs without a check)",
            verdict.logits,
            bounds.collect::<Vec<_>>().join(", ")
        )));
    }
    Ok(verdict)
}

/// Text for the compared part of a result.
fn extent(selection: &Selection, pairs: usize, of_pairs: &str, of_rows: &str) -> String {
    if !selection.is_partial() {
        return "every element compared".to_owned();
    }
    let heads = selection.heads.as_ref().map_or(pairs, Vec::len);
    let rows = selection.rows.map_or("all".to_owned(), |rows| format!("at most {rows}"));
    format!("a sample: {heads} of {pairs} {of_pairs}, {rows} {of_rows} each; --verify full compares all")
}

/// The largest difference, which may be as large as that from the reference.
fn against(expected: &Tensor, dtype: fmha::DType, found: &[u8], bound: &TensorVerdict) -> Expected {
    let size = dtype.size_bytes() as usize;
    let pairs = found.chunks_exact(size).map(|elem| dtype.read(elem)).zip(expected.values());
    let differs = |(found, expected): (f64, f64)| {
        let same = found == expected || found.is_nan() && expected.is_nan();
        if same { 0.0 } else { (found - expected).abs() }
    };
    // A NaN on only one side counts as an infinite difference, since `max` would ignore it.
    let error = pairs.map(differs).map(|d| if d.is_nan() { f64::INFINITY } else { d }).fold(0.0, f64::max);
    Expected { error, allowed: bound.max_bound }
}
