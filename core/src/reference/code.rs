//! A score and a mask as code, evaluated at the pairs of one (sequence, query head).

use num_traits::Float;

use super::head::{Inputs, Precision, real};
use crate::bwd::BwdProblem;
use crate::error::ProblemError;
use crate::expr::{Captured, Function, HostTensor, Pair, Rounding, Slopes};
use crate::problem::FwdProblem;
use crate::seq::SeqSpan;

/// The functions of a head, with the values that they capture.
pub(super) struct HeadCode<'a> {
    score: Option<(&'a Function, Vec<Captured<'a>>)>,
    mask: Option<(&'a Function, Vec<Captured<'a>>)>,
    slopes: Option<Slopes>,
    pair: Pair,
    rounding: Rounding,
}

impl<'a> HeadCode<'a> {
    /// Functions of a problem; `None` if it has none.
    pub(super) fn of(
        problem: &'a FwdProblem,
        inputs: &Inputs<'a>,
        span: SeqSpan,
        i_head: u32,
        precision: Precision,
    ) -> Result<Option<Self>, ProblemError> {
        let code = &problem.code;
        if code.is_empty() {
            return Ok(None);
        }
        let bound = |function: &'a Option<Function>| {
            let bind = |function| Ok::<_, ProblemError>((function, code.bind(function, &inputs.score)?));
            function.as_ref().map(bind).transpose()
        };
        let SeqSpan { seqlen_q, seqlen_k, i_batch, .. } = span;
        Ok(Some(Self {
            score: bound(&code.score)?,
            mask: bound(&code.mask)?,
            slopes: code.score.as_ref().map(Function::slopes),
            pair: Pair { score: 0.0, b: i_batch, h: i_head, q: 0, k: 0, seqlen_q, seqlen_k },
            rounding: if precision == Precision::Exact { Rounding::Exact } else { Rounding::F32 },
        }))
    }

    fn at<T: Float>(&self, scaled: T, i: u32, j: u32) -> Pair {
        Pair { score: scaled.to_f64().unwrap_or(f64::NAN), q: i, k: j, ..self.pair }
    }

    /// Whether the mask shows key `j` to query `i`.
    pub(super) fn sees(&self, i: u32, j: u32) -> bool {
        let pair = Pair { q: i, k: j, ..self.pair };
        self.mask.as_ref().is_none_or(|(mask, captured)| mask.eval(&pair, captured, self.rounding).bool())
    }

    /// Score function of a scaled product.
    pub(super) fn score<T: Float>(&self, scaled: T, i: u32, j: u32) -> T {
        match &self.score {
            None => scaled,
            Some((score, captured)) => {
                real(score.eval(&self.at(scaled, i, j), captured, self.rounding).float())
            }
        }
    }

    /// The derivative of the score function with respect to the scaled product.
    pub(super) fn slope<T: Float>(&self, scaled: T, i: u32, j: u32) -> T {
        match (&self.score, &self.slopes) {
            (Some((_, captured)), Some(slopes)) => {
                let values = slopes.eval(&self.at(scaled, i, j), captured, self.rounding);
                real(values[slopes.score.index()].float())
            }
            _ => T::one(),
        }
    }

    /// Adds to each captured tensor's gradient, and to the sums of squares, the contribution of a pair whose score
    /// has the gradient `ds`.
    pub(super) fn add_to_captured<T: Float>(
        &self,
        problem: &BwdProblem,
        (scaled, ds, ds_size): (T, T, T),
        (i, j): (u32, u32),
        (sums, squares): (&mut [Vec<f64>], &mut [Vec<f64>]),
    ) {
        let (Some((_, captured)), Some(slopes)) = (&self.score, &self.slopes) else { return };
        let [ds, ds_size] = [ds, ds_size].map(|x| x.to_f64().unwrap_or(f64::NAN));
        if ds == 0.0 && ds_size == 0.0 {
            return;
        }
        let values = slopes.eval(&self.at(scaled, i, j), captured, self.rounding);
        for read in &slopes.captures {
            let name = &slopes.graph.captures()[read.capture].name;
            let wanted = problem.dcaptured.iter().position(|gradient| gradient.name == *name);
            let (Some(wanted), Captured::Tensor(tensor)) = (wanted, &captured[read.capture]) else {
                continue;
            };
            let place = read.at.iter().zip(tensor.shape).fold(0u64, |place, (id, &extent)| {
                place * u64::from(extent) + HostTensor::resolved(values[id.index()].int(), extent)
            });
            let slope = values[read.slope.index()].float();
            sums[wanted][place as usize] += ds * slope;
            squares[wanted][place as usize] += (ds_size * slope) * (ds_size * slope);
        }
    }
}

/// Zeros in the shape of each wanted gradient of a captured tensor.
pub(super) fn zeros(problem: &BwdProblem) -> Vec<Vec<f64>> {
    problem.captured_elems().map(|elems| vec![0.0; elems as usize]).collect()
}
