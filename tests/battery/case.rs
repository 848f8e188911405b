//! Cases of the battery. A case is data: a name, what to compute, and its numbers.

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
    /// Unique name, `family/what/dtype/...`.
    pub name: String,
    /// Work of the case.
    pub body: Body,
}

/// Work of a case.
#[derive(Clone, Debug)]
pub enum Body {
    /// Forward call, compared with the reference.
    Forward(Box<Forward>),
    /// Backward call: every gradient, compared with the reference.
    Backward(Box<Backward>),
    /// Merge of partial results, compared with the reference.
    Combine(Box<Combine>),
    /// Two calls whose results must agree.
    Law(Box<Law>),
}

/// A forward call.
#[derive(Clone, Debug)]
pub struct Forward {
    /// Problem to compute.
    pub problem: FwdProblem,
    /// Lengths of the sequences.
    pub lengths: Lengths,
    /// How the elements are drawn, and how tensors lie in memory.
    pub data: Data,
    /// Values planted over the data.
    pub plant: Plant,
}

/// A backward call.
#[derive(Clone, Debug)]
pub struct Backward {
    /// Problem to compute.
    pub problem: BwdProblem,
    /// Lengths of the sequences.
    pub lengths: Lengths,
    /// How the elements are drawn, and how tensors lie in memory.
    pub data: Data,
    /// Whether the plan must be deterministic, whatever the caller requires; a second run checks that bits are
    /// equal.
    pub deterministic: bool,
    /// Numbers written over the inputs before the call, each at `[storage batch, row, head, dim]`.
    pub planted: Vec<(Operand, [u32; 4], f64)>,
}

impl Backward {
    /// Options of the case's plan: the caller's, with those of the case.
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
    /// How the elements are drawn, and how tensors lie in memory.
    pub data: Data,
    /// Number added to the LSE of every part.
    pub lse_offset: f64,
}

/// Numbers written over the inputs before the call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Plant {
    /// No planted value.
    #[default]
    Nothing,
    /// NaN in every row of K and V that no query sees.
    HiddenKeys,
    /// One number at `[storage batch, row, head, dim]`.
    At(Operand, [u32; 4], f64),
    /// Normal numbers. The first operand begins this many elements after an aligned address; the other operands are
    /// aligned.
    Shifted(Operand, u32),
    /// Scores are `score` times the scale at key 0, whose V is 0, and 0 at all others: O consists only of tiny
    /// weights, subnormal in P's type.
    FaintWeights {
        /// Score of key 0 before the scale: K's first element there.
        score: f64,
    },
    /// Every V is between half this number and this number, negative in odd columns.
    LargeValues(f64),
    /// Every eighth row of the bias, from the first on, is `bias`, and every sink is `sink`.
    FarRows {
        /// Value of these rows of the bias, if there is one.
        bias: Option<f64>,
        /// Value of every sink, if there are sinks.
        sink: Option<f64>,
    },
    /// The last key of every sequence outweighs all others: its score is about 9 above theirs for every query, and
    /// its V is 3, unless V lies in K.
    LastKeys,
    /// Scores far below all others for keys `begin..end` of every sequence: these K are `key`, multiplied by a
    /// negative Q.
    FarBelow {
        /// The first key of the range.
        begin: u32,
        /// One past the last key of the range.
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

    /// Family of the case: its name up to the first `/`.
    #[must_use]
    pub fn family(&self) -> &str {
        self.name.split('/').next().unwrap_or(&self.name)
    }

    /// Command that repeats this case alone. `backend` is the backend's name with its other arguments.
    #[must_use]
    pub fn repro(&self, backend: &str) -> String {
        format!("fmha conformance --filter '^{}$' --backend {backend}", regex_lite::escape(&self.name))
    }

    /// The case's forward problem; `None` if the case only combines.
    #[must_use]
    pub fn problem(&self) -> Option<&FwdProblem> {
        match &self.body {
            Body::Forward(forward) => Some(&forward.problem),
            Body::Backward(backward) => Some(&backward.problem.fwd),
            Body::Law(law) => Some(&law.forward.problem),
            Body::Combine(_) => None,
        }
    }

    /// Seed, kind and layout of the case's numbers.
    #[must_use]
    pub fn data(&self) -> Data {
        match &self.body {
            Body::Forward(forward) => forward.data,
            Body::Backward(backward) => backward.data,
            Body::Law(law) => law.forward.data,
            Body::Combine(combine) => combine.data,
        }
    }

    /// Whether the case reserves gigabytes, and so runs alone.
    #[must_use]
    pub fn is_huge(&self) -> bool {
        self.data().room.placement == Placement::Sparse
    }
}

/// All cases, in the order of their families.
#[must_use]
pub fn all() -> Vec<Case> {
    crate::families::all()
}

/// Cases of [`all`] whose name matches `filter`.
#[must_use]
pub fn matching(filter: Option<&Regex>) -> Vec<Case> {
    filtered(all(), filter)
}

/// Cases of `cases` whose name matches `filter`, a regular expression; a part of a name suffices.
#[must_use]
pub fn filtered(cases: Vec<Case>, filter: Option<&Regex>) -> Vec<Case> {
    cases.into_iter().filter(|case| filter.is_none_or(|filter| filter.is_match(&case.name))).collect()
}

/// The seed of a case, from its name: renaming a case changes its numbers, reordering does not.
pub(crate) fn seed_of(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| crate::init::mix(hash ^ u64::from(byte)))
}

/// Types other than f32 and FP8, for rules that need only one type.
pub(crate) const WIDE: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];
