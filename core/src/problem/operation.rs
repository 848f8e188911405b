//! Operations of a plan.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::bwd::ValidBwd;
use crate::combine::ValidCombine;
use crate::error::ProblemError;
use crate::problem::ValidFwd;
use crate::quantize::ValidQuantize;
use crate::sparse::{ValidChoose, ValidIndexLoss};

/// One of the six things that a backend computes: part of the key of tuned tiles, bundles and
/// precompiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Operation {
    /// Computes O and LSE from Q, K and V.
    Forward,
    /// The gradients of attention.
    Backward,
    /// Partial results are merged.
    Combine,
    /// Keys or blocks are chosen by their scores.
    Choose,
    /// A tensor is converted to a format with scales by blocks.
    Quantize,
    /// The loss that trains an indexer, and its gradients.
    IndexLoss,
}

impl Operation {
    /// Every operation.
    pub const ALL: [Self; 6] =
        [Self::Forward, Self::Backward, Self::Combine, Self::Choose, Self::Quantize, Self::IndexLoss];

    /// The name in keys, files and texts: `forward`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Combine => "combine",
            Self::Choose => "choose",
            Self::Quantize => "quantize",
            Self::IndexLoss => "index-loss",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Operation {
    type Err = ProblemError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = || Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|operation| operation.name() == text);
        let unknown = || format!("operation `{text}` is no operation (known: {})", known());
        found.ok_or_else(|| ProblemError::new("operation", unknown()))
    }
}

/// A validated problem of any operation.
#[derive(Clone, Copy, Debug)]
pub enum AnyProblem<'a> {
    /// Problem of [`plan_fwd`](crate::FmhaBackend::plan_fwd).
    Forward(&'a ValidFwd),
    /// Problem of [`plan_bwd`](crate::FmhaBackend::plan_bwd).
    Backward(&'a ValidBwd),
    /// Problem of [`plan_combine`](crate::FmhaBackend::plan_combine).
    Combine(&'a ValidCombine),
    /// Problem of [`plan_choose`](crate::FmhaBackend::plan_choose).
    Choose(&'a ValidChoose),
    /// Problem of [`plan_quantize`](crate::FmhaBackend::plan_quantize).
    Quantize(&'a ValidQuantize),
    /// Problem of [`plan_index_loss`](crate::FmhaBackend::plan_index_loss).
    IndexLoss(&'a ValidIndexLoss),
}

impl AnyProblem<'_> {
    /// Operation of the problem.
    #[must_use]
    pub const fn operation(&self) -> Operation {
        match self {
            Self::Forward(_) => Operation::Forward,
            Self::Backward(_) => Operation::Backward,
            Self::Combine(_) => Operation::Combine,
            Self::Choose(_) => Operation::Choose,
            Self::Quantize(_) => Operation::Quantize,
            Self::IndexLoss(_) => Operation::IndexLoss,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_read_as_it_is_written() {
        for operation in Operation::ALL {
            assert_eq!(operation.to_string().parse(), Ok(operation));
        }
        let error = "decode".parse::<Operation>().unwrap_err();
        assert!(
            error.field == "operation"
                && error.text.contains("forward, backward, combine, choose, quantize, index-loss"),
            "{error}"
        );
    }
}
