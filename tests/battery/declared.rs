//! Which refusals are part of a backend's promise. Any other is a failure.

use fmha_core::{Bias, DType, FwdProblem};

use crate::case::{Body, Case};
use crate::law::LawKind;

/// A refusal that a backend declares.
pub struct Declared {
    /// [`fmha_core::Device::kind`].
    pub backend: &'static str,
    /// What it does not take, for the report.
    pub what: &'static str,
    /// The cases it may refuse for it.
    pub applies: fn(&Case, Option<&FwdProblem>) -> bool,
}

fn uses(problem: Option<&FwdProblem>, dtype: impl Fn(DType) -> bool) -> bool {
    problem.is_some_and(|p| dtype(p.dtypes.qk) || dtype(p.dtypes.v))
}

/// The problem does, or the other call that a law makes beside it.
fn updates_the_cache(case: &Case, problem: Option<&FwdProblem>) -> bool {
    problem.is_some_and(|p| p.refuse_cache_updates("").is_err())
        || matches!(&case.body, Body::Law(law) if matches!(law.kind, LawKind::AppendIsWritten(_)))
}

fn dropout_between_quads(_: &Case, problem: Option<&FwdProblem>) -> bool {
    problem.is_some_and(|p| p.refuse_dropout_between_quads("").is_err())
}

fn alibi_beside_a_tiny_scale(problem: &FwdProblem) -> bool {
    let is_tiny = problem.score.softmax_scale.is_some_and(|scale| scale != 0.0 && scale.abs() < 1e-30);
    is_tiny && matches!(problem.score.bias, Bias::Alibi { .. })
}

/// All of them. The CPU backend takes the whole contract and has none.
pub const DECLARED: &[Declared] = &[
    Declared {
        backend: "cuda",
        what: "f32 inputs are the CPU backend's",
        applies: |_, problem| uses(problem, |dtype| dtype == DType::F32),
    },
    Declared {
        backend: "cuda",
        what: "NVIDIA computes in the OCP FP8 types, not in FNUZ",
        applies: |_, problem| uses(problem, |dtype| matches!(dtype, DType::E4m3Fnuz | DType::E5m2Fnuz)),
    },
    Declared {
        backend: "cuda",
        what: "Hopper's kernel takes ALiBi's slope from scores that are not scaled: a scale below 1e-30 is simt's",
        applies: |_, problem| problem.is_some_and(alibi_beside_a_tiny_scale),
    },
    Declared {
        backend: "cuda",
        what: "dropout of a part whose keys begin amid four of the whole's: kernels of tiles decide for four keys at once",
        applies: dropout_between_quads,
    },
    Declared {
        backend: "rocm",
        what: "dropout of a part whose keys begin amid four of the whole's: kernels of tiles decide for four keys at once",
        applies: dropout_between_quads,
    },
    Declared {
        backend: "rocm",
        what: "f32 inputs are the CPU backend's",
        applies: |_, problem| uses(problem, |dtype| dtype == DType::F32),
    },
    Declared {
        backend: "rocm",
        what: "gfx942 computes in the FNUZ FP8 types, gfx950 and gfx1201 in OCP, gfx90a and gfx1100 in none",
        applies: |_, problem| uses(problem, DType::is_fp8),
    },
    Declared {
        backend: "cuda",
        what: "appends, rotary embedding, FP8 caches beside 16 bits and tree masks: kernels other than sm80's take none",
        applies: updates_the_cache,
    },
    Declared {
        backend: "rocm",
        what: "FP8 caches: gfx90a and RDNA take none of the four types, gfx942 FNUZ, gfx950 OCP",
        applies: |_, problem| problem.is_some_and(|p| p.cache.dtype.is_some()),
    },
];

/// Why `backend` may refuse `case`, if it may.
#[must_use]
pub fn why(backend: &str, case: &Case) -> Option<&'static str> {
    let problem = case.problem();
    DECLARED
        .iter()
        .find(|declared| declared.backend == backend && (declared.applies)(case, problem))
        .map(|declared| declared.what)
}
