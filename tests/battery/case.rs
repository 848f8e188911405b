//! A case is data: what to compute, on which numbers, and a name.

use fmha_core::{BwdProblem, CombineProblem, DType, FwdProblem, PlanOptions};
use regex_lite::Regex;

pub use crate::families::drawn::Drawn;
use crate::law::Law;
use crate::memory::Placement;
use crate::tensor::Operand;
use crate::tensors::{Data, Lengths};

/// One test of a backend.
#[derive(Clone, Debug)]
pub struct Case {
    /// `family/what/dtype/...`, unique.
    pub name: String,
    /// Work of the case.
    pub body: Body,
}

/// Work of a case.
#[derive(Clone, Debug)]
pub enum Body {
    /// Forward, against the reference.
    Forward(Box<Forward>),
    /// Every gradient, against the reference.
    Backward(Box<Backward>),
    /// Merging, against the reference.
    Combine(Box<Combine>),
    /// Two calls that must agree.
    Law(Box<Law>),
}

/// A forward call.
#[derive(Clone, Debug)]
pub struct Forward {
    /// Problem to compute.
    pub problem: FwdProblem,
    /// The lengths.
    pub lengths: Lengths,
    /// The numbers.
    pub data: Data,
    /// Values planted over the data.
    pub plant: Plant,
}

/// A backward call.
#[derive(Clone, Debug)]
pub struct Backward {
    /// Problem to compute.
    pub problem: BwdProblem,
    /// The lengths.
    pub lengths: Lengths,
    /// The numbers.
    pub data: Data,
    /// Whether the plan must have the same bits in every run, whatever the caller of the case requires; a
    /// second run shows whether it keeps that.
    pub deterministic: bool,
    /// Numbers written over the inputs before the call, each at `[storage batch, row, head, dim]`.
    pub planted: Vec<(Operand, [u32; 4], f64)>,
}

impl Backward {
    /// Options of the case's plan, from the caller and from the case itself.
    #[must_use]
    pub fn options(&self, asked: &PlanOptions) -> PlanOptions {
        asked.clone().deterministic(asked.deterministic || self.deterministic)
    }
}

/// A combine call.
#[derive(Clone, Debug)]
pub struct Combine {
    /// Problem to compute.
    pub problem: CombineProblem,
    /// The numbers.
    pub data: Data,
    /// Added to the LSE of every part.
    pub lse_offset: f64,
}

/// A number written over the inputs before the call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Plant {
    /// No planted value.
    #[default]
    Nothing,
    /// NaN in every row of K and V that no query sees.
    HiddenKeys,
    /// A number at `[storage batch, row, head, dim]`.
    At(Operand, [u32; 4], f64),
    /// No value is written: this operand alone lies so many elements beyond an aligned address.
    Shifted(Operand, u32),
    /// Scores of `score` times the scale at key 0, whose V is 0, and of 0 at all others: faint weights,
    /// subnormal in P's type, are all that O is made of.
    FaintWeights {
        /// K's first element at key 0, which the scale multiplies.
        score: f64,
    },
    /// Every V lies between half this number and all of it, negative in odd columns.
    LargeValues(f64),
    /// Every eighth row of the bias, from the first on, is this number; and every sink, where there is one, the other.
    FarRows {
        /// Value of these rows of the bias, if there is one.
        bias: Option<f64>,
        /// Value of every sink, if there are sinks.
        sink: Option<f64>,
    },
    /// The last key of every sequence outweighs all others: its score lies some 9 above theirs for every
    /// query, and its V is 3 where it lies apart.
    LastKeys,
    /// Scores far below all others in keys `begin..end` of every sequence: `key` in K, taken by a negative Q.
    FarBelow {
        /// The first key of the range.
        begin: u32,
        /// The key behind the last of the range.
        end: u32,
        /// Infinity, or a large number.
        key: f64,
    },
}

impl Case {
    /// A forward case with nothing planted.
    #[must_use]
    pub fn forward(name: impl Into<String>, problem: FwdProblem, lengths: Lengths, data: Data) -> Self {
        let body = Forward { problem, lengths, data, plant: Plant::Nothing };
        Self { name: name.into(), body: Body::Forward(Box::new(body)) }
    }

    /// A backward case.
    #[must_use]
    pub fn backward(name: impl Into<String>, problem: BwdProblem, lengths: Lengths, data: Data) -> Self {
        let body = Backward { problem, lengths, data, deterministic: false, planted: Vec::new() };
        Self { name: name.into(), body: Body::Backward(Box::new(body)) }
    }

    /// The family: the name up to the first `/`.
    #[must_use]
    pub fn family(&self) -> &str {
        self.name.split('/').next().unwrap_or(&self.name)
    }

    /// The command that repeats this case alone; `backend` is the name and what else the command needs.
    #[must_use]
    pub fn repro(&self, backend: &str) -> String {
        format!("fmha conformance --filter '^{}$' --backend {backend}", regex_lite::escape(&self.name))
    }

    /// The forward problem in it, if it is not about combining alone.
    #[must_use]
    pub fn problem(&self) -> Option<&FwdProblem> {
        match &self.body {
            Body::Forward(forward) => Some(&forward.problem),
            Body::Backward(backward) => Some(&backward.problem.fwd),
            Body::Law(law) => Some(&law.forward.problem),
            Body::Combine(_) => None,
        }
    }

    /// The seed that decides its numbers.
    #[must_use]
    pub fn data(&self) -> Data {
        match &self.body {
            Body::Forward(forward) => forward.data,
            Body::Backward(backward) => backward.data,
            Body::Law(law) => law.forward.data,
            Body::Combine(combine) => combine.data,
        }
    }

    /// Whether it reserves gigabytes and so runs alone.
    #[must_use]
    pub fn is_huge(&self) -> bool {
        self.data().room.placement == Placement::Sparse
    }
}

/// Every case there is, in the order of their families.
#[must_use]
pub fn all() -> Vec<Case> {
    crate::families::all()
}

/// Cases of [`all`] whose name `filter` finds.
#[must_use]
pub fn matching(filter: Option<&Regex>) -> Vec<Case> {
    filtered(all(), filter)
}

/// Cases of `cases` whose name `filter` finds; a regular expression, so that a part of a name will do.
#[must_use]
pub fn filtered(cases: Vec<Case>, filter: Option<&Regex>) -> Vec<Case> {
    cases.into_iter().filter(|case| filter.is_none_or(|filter| filter.is_match(&case.name))).collect()
}

/// The seed of a case, from its name: renaming a case changes its numbers, reordering does not.
pub(crate) fn seed_of(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| crate::init::mix(hash ^ u64::from(byte)))
}

/// Types that are neither f32 nor the narrowest: what a rule is tried on when one type will do.
pub(crate) const WIDE: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];
