//! Result of a comparison with the reference.

use std::fmt;

use serde::Serialize;

use crate::tolerance::{Bound, MaxRms, f32_error};

/// An element: its position inside its sequence, and its value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Place {
    /// Index of the sequence.
    pub batch: u32,
    /// Head of the tensor.
    pub head: u32,
    /// Row inside the sequence.
    pub row: u32,
    /// Index of the element in its row.
    pub dim: u32,
    /// Value that the call gave.
    pub got: f64,
    /// Value of the reference.
    pub want: f64,
}

/// Comparison of one tensor with the reference.
#[derive(Clone, Debug, Serialize)]
pub struct TensorVerdict {
    /// Name of the tensor: `o`, `lse`, `dq`, ...; or `o of far rows`, ... for elements that are judged separately.
    pub tensor: &'static str,
    /// Number of compared elements.
    pub checked: u64,
    /// Largest error; infinite if only one of result and reference is NaN or infinite.
    pub max_error: f64,
    /// Largest `max_error` that passes.
    pub max_bound: f64,
    /// Root mean square error.
    pub rmse: f64,
    /// Largest `rmse` that passes.
    pub rmse_bound: f64,
    /// Cosine between result and reference; 1 where both are 0.
    pub cosine: f64,
    /// Least cosine that passes, if there is one.
    pub least_cosine: Option<f64>,
    /// Element with the largest error.
    pub worst: Place,
    /// Whether all bounds hold.
    pub pass: bool,
}

/// Comparison of a call's results with the reference.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Verdict {
    /// Verdicts of all outputs.
    pub tensors: Vec<TensorVerdict>,
    /// Other faults: a written byte outside all tensors, a wrong keep mask.
    pub faults: Vec<String>,
    /// Note on how the verdict was found: whether a law held bit for bit.
    pub note: Option<&'static str>,
    /// A bound of the scores' magnitude, with which the bounds of outputs grow; taken over rows that are not far,
    /// if there are any.
    pub logits: f64,
}

impl Verdict {
    /// Whether everything holds.
    #[must_use]
    pub fn pass(&self) -> bool {
        self.faults.is_empty() && self.tensors.iter().all(|tensor| tensor.pass)
    }

    /// Whether the bounds are so wide that any result would pass: f32 cannot resolve scores of this size.
    #[must_use]
    pub fn says_nothing(&self) -> bool {
        // The limit is a tenth of an output's own size: 1000 times what scores of 100 allow, and still a meaningful
        // bound.
        f32_error(self.logits) > 0.1
    }

    /// The largest error of `o` or of the first tensor there is.
    #[must_use]
    pub fn max_error(&self) -> f64 {
        self.tensors.first().map_or(0.0, |tensor| tensor.max_error)
    }
}

impl fmt::Display for TensorVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tensor, max_error, max_bound, rmse, rmse_bound, cosine, checked, .. } = self;
        write!(
            f,
            "{tensor}: max error {max_error:.3e} (bound {max_bound:.3e}), RMSE {rmse:.3e} (bound \
             {rmse_bound:.3e}), cosine {cosine:.9} over {checked} elements"
        )?;
        if !self.pass {
            let Place { batch, head, row, dim, got, want } = self.worst;
            write!(
                f,
                "; worst at batch {batch} head {head} row {row} dim {dim}: {got:e}, reference {want:e}"
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for Verdict {
    /// Prints `PASS` or `FAIL`, and each tensor's figures, those that fail first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", if self.pass() { "PASS" } else { "FAIL" })?;
        for passing in [false, true] {
            for tensor in self.tensors.iter().filter(|tensor| tensor.pass == passing) {
                write!(f, " | {tensor}")?;
            }
        }
        for fault in &self.faults {
            write!(f, " | {fault}")?;
        }
        if let Some(note) = self.note {
            write!(f, " | {note}")?;
        }
        Ok(())
    }
}

/// Sums over compared elements; sums of two sets can be added.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stat {
    pub(crate) count: u64,
    pub(crate) max_error: f64,
    pub(crate) max_same: f64,
    square_error: f64,
    square_same: f64,
    max_ref: f64,
    square_ref: f64,
    max_spread: f64,
    square_spread: f64,
    max_far: f64,
    square_far: f64,
    square_got: f64,
    product: f64,
    /// Number of results that are NaN or infinite where the reference is neither.
    strays: u64,
    worst: Place,
}

impl Stat {
    /// Adds one element: the result, the exact value, the value in the input's precision, and its spread.
    pub(crate) fn add(&mut self, place: Place, same: f64, spread: f64) {
        let Place { got, want, .. } = place;
        self.count += 1;
        let error = if want.is_finite() {
            if got.is_finite() { (got - want).abs() } else { f64::INFINITY }
        } else if got == want || got.is_nan() && want.is_nan() {
            0.0
        } else {
            f64::INFINITY
        };
        if error > self.max_error || self.count == 1 {
            self.worst = place;
            self.max_error = error;
        }
        self.square_error += error * error;
        if !want.is_finite() {
            return;
        }
        let same = (same - want).abs();
        if same.is_finite() {
            self.max_same = self.max_same.max(same);
            self.square_same += same * same;
        }
        self.max_ref = self.max_ref.max(want.abs());
        self.square_ref += want * want;
        self.max_spread = self.max_spread.max(spread);
        self.square_spread += spread * spread;
        if got.is_finite() {
            self.square_got += got * got;
            self.product += got * want;
        } else {
            self.strays += 1;
        }
    }

    /// Adds as `add` does, with the size of the element's terms in far rows.
    fn add_far(&mut self, place: Place, same: f64, spread: f64, far: f64) {
        self.add(place, same, spread);
        self.max_far = self.max_far.max(far);
        self.square_far += far * far;
    }

    pub(crate) fn merge(&mut self, other: &Stat) {
        if other.count == 0 {
            return;
        }
        if other.max_error > self.max_error || self.count == 0 {
            self.worst = other.worst;
        }
        self.count += other.count;
        self.max_error = self.max_error.max(other.max_error);
        self.max_same = self.max_same.max(other.max_same);
        self.square_error += other.square_error;
        self.square_same += other.square_same;
        self.max_ref = self.max_ref.max(other.max_ref);
        self.square_ref += other.square_ref;
        self.max_spread = self.max_spread.max(other.max_spread);
        self.square_spread += other.square_spread;
        self.max_far = self.max_far.max(other.max_far);
        self.square_far += other.square_far;
        self.square_got += other.square_got;
        self.product += other.product;
        self.strays += other.strays;
    }

    fn rms(&self, square: f64) -> f64 {
        (square / self.count.max(1) as f64).sqrt()
    }

    pub(crate) fn rmse_same(&self) -> f64 {
        self.rms(self.square_same)
    }

    pub(crate) fn reference(&self) -> MaxRms {
        MaxRms { max: self.max_ref, rms: self.rms(self.square_ref) }
    }

    pub(crate) fn spread(&self) -> MaxRms {
        MaxRms { max: self.max_spread, rms: self.rms(self.square_spread) }
    }

    pub(crate) fn far(&self) -> MaxRms {
        MaxRms { max: self.max_far, rms: self.rms(self.square_far) }
    }

    pub(crate) fn verdict(
        &self,
        tensor: &'static str,
        bound: Bound,
        least_cosine: Option<f64>,
    ) -> TensorVerdict {
        let lengths = (self.square_got * self.square_ref).sqrt();
        // A vector with a NaN or infinity has no direction.
        let cosine = match (self.strays, lengths > 0.0) {
            (1.., _) => f64::NAN,
            (0, true) => self.product / lengths,
            (0, false) => 1.0,
        };
        let rmse = self.rms(self.square_error);
        // The comparison fails if a number is NaN.
        let pass = self.max_error <= bound.max
            && rmse <= bound.rmse
            && least_cosine.is_none_or(|least| cosine >= least);
        TensorVerdict {
            tensor,
            checked: self.count,
            max_error: self.max_error,
            max_bound: bound.max,
            rmse,
            rmse_bound: bound.rmse,
            cosine,
            least_cosine,
            worst: self.worst,
            pass,
        }
    }
}

/// A tensor's elements without terms from far rows, and those with such terms.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Groups {
    pub(crate) near: Stat,
    pub(crate) far: Stat,
}

impl Groups {
    /// Adds as [`Stat::add`] does; `far` is the size of the element's terms in far rows, 0 without any.
    pub(crate) fn add(&mut self, place: Place, same: f64, spread: f64, far: f64) {
        if far > 0.0 {
            self.far.add_far(place, same, spread, far);
        } else {
            self.near.add(place, same, spread);
        }
    }

    pub(crate) fn merge(&mut self, other: &Groups) {
        self.near.merge(&other.near);
        self.far.merge(&other.far);
    }

    /// The verdict of each group that has elements, under these names. The first group has one in any case if both are
    /// empty.
    pub(crate) fn verdicts(
        &self,
        [near, far]: [&'static str; 2],
        verdict: impl Fn(&Stat, &'static str) -> TensorVerdict,
    ) -> Vec<TensorVerdict> {
        let groups = [(&self.near, near), (&self.far, far)];
        let all =
            groups.into_iter().filter(|(stat, name)| stat.count > 0 || *name == near && self.far.count == 0);
        all.map(|(stat, name)| verdict(stat, name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_that_is_no_number_has_no_cosine() {
        let verdict = |got: [f64; 2]| {
            let mut stat = Stat::default();
            for (got, want) in got.into_iter().zip([1.0, 2.0]) {
                stat.add(Place { got, want, ..Place::default() }, want, 0.0);
            }
            stat.verdict("o", Bound { max: 1.0, rmse: 1.0 }, Some(0.9))
        };
        assert!(verdict([1.0, 2.0]).pass && (verdict([1.0, 2.0]).cosine - 1.0).abs() < 1e-12);
        for got in [[f64::NAN; 2], [1.0, f64::NAN], [f64::INFINITY, 2.0]] {
            assert!(!verdict(got).pass && verdict(got).cosine.is_nan(), "{got:?}");
        }
    }

    #[test]
    fn bounds_beyond_what_f32_tells_apart_say_nothing() {
        let of = |logits| Verdict { logits, ..Verdict::default() };
        assert!(!of(1e4).says_nothing() && of(1e20).says_nothing());
    }
}
