//! The scores of an indexer.

use std::ops::Range;

use crate::args::DevSlice;
use crate::dtype::DType;
use crate::error::{ProblemError, ensure};
use crate::problem::{MAX_HEAD_DIM, MAX_SEQLEN};

/// The sizes and types of an indexer's call. All tensors are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexProblem {
    /// Number of sequences.
    pub batch: u32,
    /// Number of queries of a sequence.
    pub seqlen_q: u32,
    /// Number of keys of a sequence.
    pub seqlen_k: u32,
    /// Number of heads of q; k has one head, which all heads of q share.
    pub num_heads: u32,
    /// Number of elements of a row.
    pub head_dim: u32,
    /// The type of q.
    pub dtype_q: DType,
    /// The type of k.
    pub dtype_k: DType,
}

/// The keys of its sequence among which a query may choose.
#[derive(Clone, Copy, Debug)]
pub enum Candidates<'a> {
    /// All keys of a sequence are candidates.
    All,
    /// Keys up to the query's own position; the last query has the position of the last key.
    Causal,
    /// Keys `first .. end` of each query, i32 `[batch, seqlen_q]` each; positions outside `0 .. seqlen_k` are
    /// ignored.
    Ranges {
        /// First key of each query's range.
        first: &'a [i32],
        /// One past the last key of each query's range.
        end: &'a [i32],
    },
}

/// The operands, in host memory.
#[derive(Clone, Copy, Debug)]
pub struct IndexArgs<'a> {
    /// The indexer's q, `[batch, seqlen_q, num_heads, head_dim]`.
    pub q: DevSlice<'a>,
    /// The indexer's k, `[batch, seqlen_k, head_dim]`.
    pub k: DevSlice<'a>,
    /// The weight of each head, `[batch, seqlen_q, num_heads]`.
    pub weights: &'a [f32],
    /// Factor of each row of k, `[batch, seqlen_k]`; optional.
    pub k_scale: Option<&'a [f32]>,
    /// Keys among which queries may choose.
    pub candidates: Candidates<'a>,
}

/// A call of an indexer whose operands fit its problem.
#[derive(Clone, Copy, Debug)]
pub struct IndexCall<'a> {
    problem: IndexProblem,
    args: IndexArgs<'a>,
    q: &'a [u8],
    k: &'a [u8],
}

impl<'a> IndexCall<'a> {
    /// Checks the operands against their problem.
    ///
    /// # Errors
    /// The first size or operand that does not fit, with its number.
    pub fn new(problem: IndexProblem, args: IndexArgs<'a>) -> Result<Self, ProblemError> {
        let IndexProblem { batch, seqlen_q, seqlen_k, num_heads, head_dim, dtype_q, dtype_k } = problem;
        ensure!(num_heads >= 1, "num_heads", "num_heads {num_heads} is not at least 1");
        ensure!(
            (1..=MAX_HEAD_DIM).contains(&head_dim),
            "head_dim",
            "head_dim {head_dim} is not in 1..={MAX_HEAD_DIM}"
        );
        for (field, value) in [("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)] {
            ensure!(value <= MAX_SEQLEN, field, "{field} {value} is larger than {MAX_SEQLEN}");
        }
        let [b, m, n, h, d] = [batch, seqlen_q, seqlen_k, num_heads, head_dim].map(u64::from);
        let count = |factors: &[u64]| factors.iter().fold(1u64, |count, &by| count.saturating_mul(by));
        let q = bytes("q", args.q, dtype_q, count(&[b, m, h, d]))?;
        let k = bytes("k", args.k, dtype_k, count(&[b, n, d]))?;
        let rows = count(&[b, m]);
        has("weights", args.weights.len(), count(&[rows, h]))?;
        if let Some(scale) = args.k_scale {
            has("k_scale", scale.len(), count(&[b, n]))?;
        }
        if let Candidates::Ranges { first, end } = args.candidates {
            has("first", first.len(), rows)?;
            has("end", end.len(), rows)?;
        }
        Ok(Self { problem, args, q, k })
    }

    /// The problem.
    #[must_use]
    pub fn problem(&self) -> &IndexProblem {
        &self.problem
    }

    /// The operands.
    #[must_use]
    pub fn args(&self) -> &IndexArgs<'a> {
        &self.args
    }

    /// Number of tokens over all sequences; q has `num_heads` rows for each.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.problem.batch as usize * self.problem.seqlen_q as usize
    }

    /// The keys that the token at `row` may choose among.
    #[must_use]
    pub fn candidates(&self, row: usize) -> Range<u32> {
        let IndexProblem { seqlen_q, seqlen_k, .. } = self.problem;
        match self.args.candidates {
            Candidates::All => 0..seqlen_k,
            Candidates::Causal => {
                let i = row as i64 % i64::from(seqlen_q.max(1));
                let end = i + 1 + i64::from(seqlen_k) - i64::from(seqlen_q);
                0..end.clamp(0, seqlen_k.into()) as u32
            }
            Candidates::Ranges { first, end } => {
                let inside = |key: i32| (key.max(0).unsigned_abs()).min(seqlen_k);
                let (first, end) = (inside(first[row]), inside(end[row]));
                first..end.max(first)
            }
        }
    }

    /// Element `d` of head `h` of the token at `row`.
    #[must_use]
    pub fn q_at(&self, row: usize, h: usize, d: usize) -> f64 {
        let IndexProblem { num_heads, head_dim, dtype_q, .. } = self.problem;
        let at = (row * num_heads as usize + h) * head_dim as usize + d;
        dtype_q.read(&self.q[at * dtype_q.size_bytes() as usize..])
    }

    /// Element `d` of key `j` of the sequence of the token at `row`, times its scale.
    #[must_use]
    pub fn k_at(&self, row: usize, j: u32, d: usize) -> f64 {
        let IndexProblem { head_dim, dtype_k, .. } = self.problem;
        let key = self.key(row, j);
        let value = dtype_k.read(&self.k[(key * head_dim as usize + d) * dtype_k.size_bytes() as usize..]);
        value * self.args.k_scale.map_or(1.0, |scale| f64::from(scale[key]))
    }

    /// Index of key `j` of the token's sequence among the keys of all sequences.
    #[must_use]
    pub fn key(&self, row: usize, j: u32) -> usize {
        let IndexProblem { seqlen_q, seqlen_k, .. } = self.problem;
        row / seqlen_q.max(1) as usize * seqlen_k as usize + j as usize
    }

    /// The product `q[row, h] . k[j]`.
    #[must_use]
    pub fn product(&self, row: usize, h: usize, j: u32) -> f64 {
        let dims = 0..self.problem.head_dim as usize;
        dims.map(|d| self.q_at(row, h, d) * self.k_at(row, j, d)).sum()
    }

    /// The weight of head `h` of the token at `row`.
    #[must_use]
    pub fn weight(&self, row: usize, h: usize) -> f64 {
        f64::from(self.args.weights[row * self.problem.num_heads as usize + h])
    }
}

/// Scores `I[i, j] = sum_h relu(q[i, h] . k[j]) w[i, h]`, `[batch, seqlen_q, seqlen_k]`; -inf if j is no candidate of
/// i.
#[must_use]
pub fn index_scores(call: &IndexCall<'_>) -> Vec<f64> {
    let problem = call.problem;
    let mut scores = vec![f64::NEG_INFINITY; call.rows() * problem.seqlen_k as usize];
    for row in 0..call.rows() {
        for j in call.candidates(row) {
            let heads = 0..problem.num_heads as usize;
            let score = heads.map(|h| relu(call.product(row, h, j)) * call.weight(row, h)).sum();
            scores[row * problem.seqlen_k as usize + j as usize] = score;
        }
    }
    scores
}

/// The rectifier: 0 for negative numbers; NaN stays NaN.
pub(super) fn relu(x: f64) -> f64 {
    if x <= 0.0 { 0.0 } else { x }
}

fn has(field: &'static str, given: usize, wanted: u64) -> Result<(), ProblemError> {
    ensure!(given as u64 == wanted, field, "{field} has {given} elements, but {wanted} are wanted");
    Ok(())
}

fn bytes<'a>(
    field: &'static str,
    slice: DevSlice<'a>,
    dtype: DType,
    elems: u64,
) -> Result<&'a [u8], ProblemError> {
    let bytes =
        slice.as_host().ok_or_else(|| ProblemError::new(field, format!("{field} is not in host memory")))?;
    let wanted = elems.saturating_mul(dtype.size_bytes());
    ensure!(
        bytes.len() as u64 >= wanted,
        field,
        "{field} has {} bytes, but {elems} elements of {dtype} are {wanted}",
        bytes.len()
    );
    ensure!(
        slice.elem().serves(dtype.into()),
        field,
        "{field} has elements of {}, but the problem has {dtype}",
        slice.elem()
    );
    Ok(bytes)
}
