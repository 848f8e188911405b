//! Options of a plan, and promises of a plan.

use std::fmt;
use std::str::FromStr;

use super::sums::ScoreSums;
use crate::error::{ProblemError, Refusal};
use crate::setters::setters;

/// How the running maximum of a row is kept. Both kinds meet the error bound that `tests/battery/tolerance.rs`
/// derives; a plan says which kind it uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Accuracy {
    /// The subtracted maximum may be too low by a bounded factor, so P may exceed 1 by that factor before it is
    /// rounded.
    #[default]
    Fast,
    /// The true running maximum is subtracted.
    Exact,
}

impl Accuracy {
    /// The name in plans and options: `fast`, `exact`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fast => "fast",
            Self::Exact => "exact",
        }
    }
}

impl fmt::Display for Accuracy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Accuracy {
    type Err = ProblemError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = [Self::Fast, Self::Exact].into_iter().find(|accuracy| accuracy.name() == text);
        let unknown = || format!("accuracy `{text}` is no accuracy (known: fast, exact)");
        found.ok_or_else(|| ProblemError::new("accuracy", unknown()))
    }
}

/// The caller's wishes for the choice of a kernel. A kernel honours every wish, or refuses.
///
/// ```
/// use fmha_core::PlanOptions;
///
/// let options = PlanOptions::default().kernel("sm90").tile([("block_m", "128")]).deterministic(true);
/// assert_eq!(options.tile, [("block_m".to_owned(), "128".to_owned())]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanOptions {
    /// Name of the one kernel to use, or else the plan fails; `None`: the backend chooses.
    pub kernel: Option<String>,
    /// Fields of that kernel's tile as `name=value` pairs, such as `block_m=128`. Each is honoured or refused.
    pub tile: Vec<(String, String)>,
    /// Whether a kernel that is correct but slow may be used when the fast kernels refuse. The plan then says so
    /// ([`PlanParts::is_fallback`](crate::PlanParts::is_fallback)).
    pub allow_fallback: bool,
    /// How the running maximum is kept. [`Accuracy::Fast`] permits both kinds.
    pub accuracy: Accuracy,
    /// Whether every run must give equal bits, whatever else runs on the device. Forward and combine always do; a
    /// backward plan then uses a kernel with a fixed order of summation.
    pub deterministic: bool,
    /// Whether the result bits of a sequence must depend on its own lengths and contents alone: not on the batch
    /// around it, nor on how many of its queries come in one call. If off, the last of several tokens and the same
    /// token alone may differ in their last bits.
    pub batch_invariant: bool,
    /// Whether the result bits of a query row, O and LSE, must depend on that row, the keys that it sees, their
    /// values and the options alone: not on the batch, the row's place in the call, the number of rows in it,
    /// chunks, packing, pages and their size. So training without dropout, prefill in chunks and decoding agree bit
    /// for bit. The option implies `batch_invariant`. In the backward the rule holds for dQ; dK and dV have equal
    /// bits for equal rows.
    pub row_invariant: bool,
    /// Whether each run checks the lengths before it launches: a length beyond its sequence's rows, new rows that
    /// the cache has no room for and offsets that decrease or leave their tensor are then an error. On a device the
    /// lengths are read back, so each run waits for its stream, and the plan cannot be captured into a graph.
    /// Without the check, too large lengths are clamped to the rows that exist; wrong offsets give wrong outputs on
    /// a device, but access nothing outside the tensors, and the CPU refuses them.
    #[doc(alias = "checking mode")]
    pub check_lengths: bool,
}

impl PlanOptions {
    /// Sets the one kernel to use; the plan fails if that kernel refuses.
    #[must_use]
    pub fn kernel(mut self, kernel: impl Into<String>) -> Self {
        self.kernel = Some(kernel.into());
        self
    }

    /// Sets `name=value` pairs for that kernel's tile, and drops pairs set before.
    #[must_use]
    pub fn tile<N: Into<String>, V: Into<String>>(mut self, tile: impl IntoIterator<Item = (N, V)>) -> Self {
        self.tile = tile.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        self
    }

    setters! {
        /// Whether a correct but slow kernel may be used when the fast kernels refuse.
        allow_fallback: bool => allow_fallback;
        /// How the running maximum of a row is kept.
        accuracy: Accuracy => accuracy;
        /// Whether every run must give equal bits.
        deterministic: bool => deterministic;
        /// Whether the result bits of a sequence must depend on its own lengths and contents alone.
        batch_invariant: bool => batch_invariant;
        /// Whether each run reads the lengths back and checks them first.
        check_lengths: bool => check_lengths;
    }

    /// Whether the result bits of a row must depend on that row and its visible keys alone; implies
    /// `batch_invariant`.
    #[must_use]
    pub const fn row_invariant(mut self, row_invariant: bool) -> Self {
        (self.row_invariant, self.batch_invariant) = (row_invariant, self.batch_invariant || row_invariant);
        self
    }

    /// Returns these wishes with implied ones added: `row_invariant` implies `batch_invariant`.
    #[must_use]
    pub(crate) fn with_contained(&self) -> Self {
        Self { batch_invariant: self.batch_invariant || self.row_invariant, ..self.clone() }
    }

    /// Refuses tile fields for a `kernel` that has no tile.
    ///
    /// # Errors
    /// The first field that is set, with its value.
    pub fn refuse_tile(&self, kernel: &str) -> Result<(), Refusal> {
        match self.tile.first() {
            None => Ok(()),
            Some((name, value)) => {
                Err(Refusal::new(kernel, format!("tile {name}={value}: it has no tile to set")))
            }
        }
    }

    /// Checks that a kernel's promises fulfil these wishes.
    ///
    /// # Errors
    /// The first wish that it does not keep.
    pub fn check_promises(&self, kernel: &str, promises: &Promises) -> Result<(), Refusal> {
        let refuse = |wish: String| Err(Refusal::new(kernel, format!("{wish} is not kept: {promises}")));
        if self.accuracy == Accuracy::Exact && promises.accuracy != Accuracy::Exact {
            return refuse(format!("accuracy {}", self.accuracy));
        }
        for (wish, wanted, kept) in [
            ("deterministic", self.deterministic, promises.deterministic),
            // Checked before `batch_invariant`, which `row_invariant` implies, so that the refusal names the wish
            // that the caller set.
            ("row_invariant", self.row_invariant, promises.row_invariant),
            ("batch_invariant", self.batch_invariant, promises.batch_invariant),
        ] {
            if wanted && !kept {
                return refuse(format!("{wish} {wanted}"));
            }
        }
        Ok(())
    }
}

/// Guarantees that a plan's kernel gives for all inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promises {
    /// Whether every run gives equal bits.
    pub deterministic: bool,
    /// Whether a sequence's result has the same bits whatever else is in the batch.
    pub batch_invariant: bool,
    /// Whether a row's result has the same bits whatever other rows its call has, and wherever its keys lie.
    pub row_invariant: bool,
    /// Whether a run can be captured into a graph and replayed with new lengths.
    pub graph_capturable: bool,
    /// How the running maximum of a row is kept.
    pub accuracy: Accuracy,
    /// Arithmetic in which the products of q and k are summed to a score. LSE is as exact as the scores.
    pub score_sums: ScoreSums,
}

impl fmt::Display for Promises {
    /// Prints the promises that hold, such as `exact, deterministic, batch-invariant, row-invariant, graph-capturable`,
    /// and the number of bits of a score's sum if it is less than f32's.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.accuracy.fmt(f)?;
        for (name, holds) in [
            ("deterministic", self.deterministic),
            ("batch-invariant", self.batch_invariant),
            ("row-invariant", self.row_invariant),
            ("graph-capturable", self.graph_capturable),
        ] {
            if holds {
                write!(f, ", {name}")?;
            }
        }
        let bits = self.score_sums.bits();
        if bits < ScoreSums::F32.bits() {
            write!(f, ", scores summed to {bits} bits")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Promises = Promises {
        deterministic: false,
        batch_invariant: false,
        row_invariant: false,
        graph_capturable: false,
        accuracy: Accuracy::Fast,
        score_sums: ScoreSums::F32,
    };

    #[test]
    fn an_accuracy_is_read_by_its_own_name() {
        for accuracy in [Accuracy::Fast, Accuracy::Exact] {
            assert_eq!(accuracy.name().parse(), Ok(accuracy));
        }
        let error = "best".parse::<Accuracy>().unwrap_err();
        assert!(error.field == "accuracy" && error.text.starts_with("accuracy `best` is"), "{error}");
    }

    #[test]
    fn a_wish_that_a_kernel_does_not_keep_is_refused_by_its_name() {
        let wishes = [
            ("accuracy", PlanOptions::default().accuracy(Accuracy::Exact)),
            ("deterministic", PlanOptions::default().deterministic(true)),
            ("batch_invariant", PlanOptions::default().batch_invariant(true)),
            ("row_invariant", PlanOptions::default().row_invariant(true)),
        ];
        let all = Promises {
            deterministic: true,
            batch_invariant: true,
            row_invariant: true,
            graph_capturable: true,
            accuracy: Accuracy::Exact,
            score_sums: ScoreSums::F32,
        };
        for (name, options) in wishes {
            let refusal = options.check_promises("k", &NOTHING).unwrap_err();
            assert!(refusal.reason.starts_with(name), "{refusal}");
            assert_eq!(options.check_promises("k", &all), Ok(()));
        }
        assert_eq!(PlanOptions::default().check_promises("k", &NOTHING), Ok(()));
    }
}
