//! Kernels that a case needs, and the division of the cases into parts by kernel.
//!
//! On an emulated device nearly all time is spent compiling, so a part has few kernels, with every case that uses
//! them.

use std::fmt;
use std::str::FromStr;

use fmha_core::cache::{KernelJob, Precompile};
use fmha_core::{AnyProblem, BwdProblem, Device, FwdProblem, PlanOptions, ProblemError};

use crate::case::{Body, Case};
use crate::law::LawKind;
use crate::rows;

/// Part number `index` of `count`, counted from 1 and written `1/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deal {
    index: u64,
    count: u64,
}

impl FromStr for Deal {
    type Err = ProblemError;

    fn from_str(text: &str) -> Result<Self, ProblemError> {
        let numbers = text.split_once('/').map(|(index, count)| (index.parse(), count.parse()));
        match numbers {
            Some((Ok(index), Ok(count))) if (1..=count).contains(&index) => Ok(Self { index, count }),
            _ => {
                let text = format!("deal `{text}` is not I/N with I from 1 to N");
                Err(ProblemError::new("deal", text))
            }
        }
    }
}

impl fmt::Display for Deal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

impl Deal {
    /// The cases whose kernel belongs to this part; cases without kernels are divided by their seeds.
    #[must_use]
    pub fn of(self, cases: Vec<Case>, backend: &Device, options: &PlanOptions) -> Vec<Case> {
        let mine = |case: &Case| {
            let first = jobs(case, backend, options).into_iter().next();
            let card = first.map_or(case.data().seed, |job| hash(&job.source.entry));
            (card >> 20) % self.count == self.index - 1
        };
        cases.into_iter().filter(mine).collect()
    }
}

/// Kernels that planning a case compiles, in the order of its launches; empty if the case is refused or there is no
/// compiler.
#[must_use]
pub fn jobs(case: &Case, backend: &Device, options: &PlanOptions) -> Vec<KernelJob> {
    let Some(compiler) = backend.precompiler() else { return Vec::new() };
    let jobs = match &case.body {
        Body::Forward(forward) => forward_jobs(compiler, &forward.problem, options),
        Body::Law(law) => {
            let of_rows = match law.kind {
                LawKind::RowsOfCalls(first) => jobs_of_rows(compiler, first, options),
                LawKind::GradientsOfCalls(seed) => jobs_of_gradients(compiler, seed, options),
                LawKind::KeysOfGradients(_) => backward_jobs(compiler, &law.gradients(), options),
                _ => None,
            };
            of_rows.or_else(|| forward_jobs(compiler, &law.forward.problem, options))
        }
        Body::Backward(backward) => backward_jobs(compiler, &backward.problem, &backward.options(options)),
        Body::Combine(combine) => {
            let problem = combine.problem.clone().validate().ok();
            problem.and_then(|problem| compiler.jobs(AnyProblem::Combine(&problem), options).ok())
        }
    };
    jobs.unwrap_or_default()
}

/// Kernels of training calls whose gradients must have equal bits, each once.
fn jobs_of_gradients(compiler: &dyn Precompile, seed: u64, options: &PlanOptions) -> Option<Vec<KernelJob>> {
    let options = options.clone().row_invariant(true);
    let mut all: Vec<KernelJob> = Vec::new();
    for problem in rows::training_problems(seed) {
        let backward = backward_jobs(compiler, &rows::backward_of(problem.clone()), &options)?;
        for job in forward_jobs(compiler, &problem, &options)?.into_iter().chain(backward) {
            if all.iter().all(|known| known.key() != job.key()) {
                all.push(job);
            }
        }
    }
    Some(all)
}

/// Kernels of calls whose rows must have equal bits, each once.
fn jobs_of_rows(compiler: &dyn Precompile, first: u64, options: &PlanOptions) -> Option<Vec<KernelJob>> {
    let options = options.clone().row_invariant(true);
    let mut all: Vec<KernelJob> = Vec::new();
    for problem in rows::problems(first) {
        for job in forward_jobs(compiler, &problem, &options)? {
            if all.iter().all(|known| known.key() != job.key()) {
                all.push(job);
            }
        }
    }
    Some(all)
}

fn forward_jobs(
    compiler: &dyn Precompile,
    problem: &FwdProblem,
    options: &PlanOptions,
) -> Option<Vec<KernelJob>> {
    let problem = problem.clone().validate().ok()?;
    compiler.jobs(AnyProblem::Forward(&problem), options).ok()
}

/// Hash FNV-1a of a text.
fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

fn backward_jobs(
    compiler: &dyn Precompile,
    problem: &BwdProblem,
    options: &PlanOptions,
) -> Option<Vec<KernelJob>> {
    let problem = problem.clone().validate().ok()?;
    compiler.jobs(AnyProblem::Backward(&problem), options).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_outside_the_whole_is_refused() {
        assert_eq!("2/3".parse(), Ok(Deal { index: 2, count: 3 }));
        for text in ["0/3", "4/3", "1", "a/2", "1/0"] {
            assert!(text.parse::<Deal>().is_err_and(|error| error.text.contains(text)));
        }
    }
}
