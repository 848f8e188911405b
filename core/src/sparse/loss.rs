//! The loss that trains an indexer, and the gradients of this loss.

use super::index::{IndexCall, relu};
use crate::error::{ProblemError, Result, ensure};
use crate::host_memory::filled;

/// KL divergence of a list's scores from a target, and its gradient: with `p` the target divided by its sum,
/// detached, and `q` the softmax of the scores, `loss = sum p (ln p - ln q)` and `d loss / d score = q - p`.
///
/// `scores` and `target` have one element for each entry of the list. An entry with score -inf is absent: it has no
/// probability and no gradient. The target is the sum over heads of attention's probabilities. The loss is 0 for a
/// list without keys, or with a target whose sum is 0.
///
/// # Errors
/// Lengths that differ.
pub fn index_loss(scores: &[f32], target: &[f32], gradients: &mut [f32]) -> Result<f64, ProblemError> {
    let entries = scores.len();
    for (field, length) in [("target", target.len()), ("gradients", gradients.len())] {
        ensure!(length == entries, field, "{field} has {length} elements, but {entries} are wanted");
    }
    gradients.fill(0.0);
    let listed = |at: usize| scores[at] != f32::NEG_INFINITY;
    let weight: f64 = (0..entries).filter(|&at| listed(at)).map(|at| f64::from(target[at])).sum();
    let max = scores.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a || b.is_nan() { b } else { a });
    if max == f32::NEG_INFINITY || weight == 0.0 {
        return Ok(0.0);
    }
    let exponent = |at: usize| f64::from(scores[at]) - f64::from(max);
    let sum: f64 = (0..entries).filter(|&at| listed(at)).map(|at| exponent(at).exp()).sum();
    let mut loss = 0.0;
    for at in (0..entries).filter(|&at| listed(at)) {
        let (p, ln_q) = (f64::from(target[at]) / weight, exponent(at) - sum.ln());
        if p > 0.0 {
            loss += p * (p.ln() - ln_q);
        }
        gradients[at] = (ln_q.exp() - p) as f32;
    }
    Ok(loss)
}

/// Losses of an indexer over lists `[batch, seqlen_q, topk]`, and the gradients of their sum by the lists' scores: for
/// each query [`index_loss`] of the scores that its list has, against its part of `target`, f32 of the lists' shape.
/// [`index_gradients`] makes gradients of q, k and w of these. An entry that is negative, or not below `seqlen_k`, is
/// absent; the call's candidates are not asked. By definition, on one thread.
///
/// ```
/// use fmha_core::sparse::{Candidates, IndexArgs, IndexCall, IndexProblem, index_gradients, index_losses};
/// use fmha_core::{DType, DevSlice};
///
/// let problem = IndexProblem {
///     batch: 1, seqlen_q: 1, seqlen_k: 3, num_heads: 1, head_dim: 1, dtype_q: DType::F32, dtype_k: DType::F32,
/// };
/// let (q, k) = ([1.0f32], [2.0f32, 3.0, 2.0]);
/// let args = IndexArgs {
///     q: DevSlice::host(&q), k: DevSlice::host(&k), weights: &[1.0], k_scale: None, candidates: Candidates::All,
/// };
/// let (call, lists) = (IndexCall::new(problem, args)?, [0, 2, -1]);
/// // Scores 2 and 2 are probabilities 1/2 and 1/2; the target's are 1/4 and 3/4.
/// let (losses, d_scores) = index_losses(&call, (&lists, 3), &[1.0, 3.0, 9.0])?;
/// assert!((losses[0] - (0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln())).abs() < 1e-9);
/// assert_eq!(d_scores, [0.25, -0.25, 0.0]);
/// assert_eq!(index_gradients(&call, (&lists, 3), &d_scores)?.k, [0.25, 0.0, -0.25]);
/// # Ok::<(), fmha_core::Error>(())
/// ```
///
/// # Errors
/// Lists or a target of another length than the call's tokens ask for; memory that the system refuses.
pub fn index_losses(
    call: &IndexCall<'_>,
    (indices, topk): (&[i32], usize),
    target: &[f32],
) -> Result<(Vec<f64>, Vec<f32>)> {
    let (rows, problem) = (call.rows(), call.problem());
    let wanted = rows.saturating_mul(topk);
    for (field, length) in [("indices", indices.len()), ("target", target.len())] {
        if length != wanted {
            let text = format!("{field} has {length} elements, but {wanted} are wanted");
            return Err(ProblemError::new(field, text).into());
        }
    }
    let (mut losses, mut gradients) = (filled(rows, 0.0)?, filled(wanted, 0.0)?);
    let mut scores = filled(topk, 0f32)?;
    for (row, loss) in losses.iter_mut().enumerate() {
        let list = row * topk..(row + 1) * topk;
        for (score, &entry) in scores.iter_mut().zip(&indices[list.clone()]) {
            *score = match u32::try_from(entry).ok().filter(|&j| j < problem.seqlen_k) {
                None => f32::NEG_INFINITY,
                Some(j) => {
                    let heads = 0..problem.num_heads as usize;
                    heads.map(|h| relu(call.product(row, h, j)) * call.weight(row, h)).sum::<f64>() as f32
                }
            };
        }
        *loss = index_loss(&scores, &target[list.clone()], &mut gradients[list])?;
    }
    Ok((losses, gradients))
}

/// Gradients of an indexer's operands, shaped like them. The gradient of k is that of its rows after scaling.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexGradients {
    /// Gradient of q, `[batch, seqlen_q, num_heads, head_dim]`.
    pub q: Vec<f64>,
    /// Gradient of k, `[batch, seqlen_k, head_dim]`.
    pub k: Vec<f64>,
    /// Gradient of the heads' weights, `[batch, seqlen_q, num_heads]`.
    pub weights: Vec<f64>,
}

/// Gradients of q, k and w from those of the scores of lists: `indices` and `gradients` `[batch, seqlen_q, topk]`,
/// absent entries as in [`KeyLists`](crate::KeyLists). The slope of relu at 0 is 0; a key that is listed twice
/// counts twice.
///
/// # Errors
/// Lengths that do not fit the call; memory that the system refuses.
pub fn index_gradients(
    call: &IndexCall<'_>,
    (indices, topk): (&[i32], usize),
    gradients: &[f32],
) -> Result<IndexGradients> {
    let problem = *call.problem();
    let wanted = call.rows().saturating_mul(topk);
    for (field, length) in [("indices", indices.len()), ("gradients", gradients.len())] {
        if length != wanted {
            let text = format!("{field} has {length} elements, but {wanted} are wanted");
            return Err(ProblemError::new(field, text).into());
        }
    }
    let (heads, dim) = (problem.num_heads as usize, problem.head_dim as usize);
    let mut all = IndexGradients {
        q: filled(call.rows() * heads * dim, 0.0)?,
        k: filled(problem.batch as usize * problem.seqlen_k as usize * dim, 0.0)?,
        weights: filled(call.rows() * heads, 0.0)?,
    };
    for row in 0..call.rows() {
        for at in row * topk..(row + 1) * topk {
            let Some(j) = u32::try_from(indices[at]).ok().filter(|&j| j < problem.seqlen_k) else { continue };
            let d_score = f64::from(gradients[at]);
            for h in 0..heads {
                let product = call.product(row, h, j);
                all.weights[row * heads + h] += d_score * relu(product);
                if product > 0.0 {
                    let d_product = d_score * call.weight(row, h);
                    for d in 0..dim {
                        all.q[(row * heads + h) * dim + d] += d_product * call.k_at(row, j, d);
                        all.k[call.key(row, j) * dim + d] += d_product * call.q_at(row, h, d);
                    }
                }
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::super::{Candidates, IndexArgs, IndexProblem, choose, index_scores};
    use super::*;
    use crate::args::DevSlice;
    use crate::dtype::DType;

    const PROBLEM: IndexProblem = IndexProblem {
        batch: 2,
        seqlen_q: 3,
        seqlen_k: 5,
        num_heads: 2,
        head_dim: 4,
        dtype_q: DType::F32,
        dtype_k: DType::F32,
    };

    fn noise(count: usize, salt: u32) -> Vec<f32> {
        let word = |i| crate::dropout::philox4x32_10([i, salt, 0, 0], [1, 2])[0];
        (0..count as u32).map(|i| (word(i) >> 21) as f32 / 1024.0 - 1.0).collect()
    }

    fn call<'a>(q: &'a [f32], k: &'a [f32], weights: &'a [f32]) -> IndexCall<'a> {
        let args = IndexArgs {
            q: DevSlice::host(q),
            k: DevSlice::host(k),
            weights,
            k_scale: None,
            candidates: Candidates::Causal,
        };
        IndexCall::new(PROBLEM, args).unwrap()
    }

    /// The loss as a function of the operands: scores, lists, loss. Lists and target stay fixed.
    fn loss(call: &IndexCall<'_>, indices: &[i32], target: &[f32], gradients: &mut [f32]) -> f64 {
        let scores = index_scores(call);
        let topk = indices.len() / call.rows();
        let listed: Vec<f32> = indices
            .iter()
            .enumerate()
            .map(|(at, &j)| {
                let score = |j| scores[at / topk * 5 + j as usize] as f32;
                u32::try_from(j).map_or(f32::NEG_INFINITY, score)
            })
            .collect();
        let rows = (0..call.rows()).map(|row| row * topk..(row + 1) * topk);
        rows.map(|row| index_loss(&listed[row.clone()], &target[row.clone()], &mut gradients[row]).unwrap())
            .sum()
    }

    #[test]
    fn gradients_of_the_loss_are_finite_differences() {
        let (q, k, w) = (noise(48, 1), noise(40, 2), noise(12, 3));
        let scores = index_scores(&call(&q, &k, &w));
        let mut indices = vec![0; 6 * 4];
        for (row, list) in indices.chunks_mut(4).enumerate() {
            let row_scores: Vec<f32> = scores[row * 5..][..5].iter().map(|&score| score as f32).collect();
            choose(&row_scores, call(&q, &k, &w).candidates(row), list).unwrap();
        }
        assert!(indices.contains(&-1));
        let target: Vec<f32> = noise(24, 4).iter().map(|x| x.abs()).collect();
        let mut d_scores = vec![0.0; 24];
        loss(&call(&q, &k, &w), &indices, &target, &mut d_scores);
        let found = index_gradients(&call(&q, &k, &w), (&indices, 4), &d_scores).unwrap();
        const STEP: f32 = 1.0 / 512.0;
        let unused = &mut [0.0; 24];
        let mut slope = |of: usize, at: usize| {
            let mut at_step = |step: f32| {
                let mut all = [q.clone(), k.clone(), w.clone()];
                all[of][at] += step;
                loss(&call(&all[0], &all[1], &all[2]), &indices, &target, unused)
            };
            (at_step(STEP) - at_step(-STEP)) / f64::from(2.0 * STEP)
        };
        for (of, gradients) in [(0, &found.q), (1, &found.k), (2, &found.weights)] {
            for (at, &gradient) in gradients.iter().enumerate() {
                let slope = slope(of, at);
                assert!((gradient - slope).abs() < 2e-3, "{of}[{at}]: {gradient} against {slope}");
            }
        }
    }

    #[test]
    fn a_list_without_keys_or_weight_has_no_loss_and_no_gradient() {
        let mut gradients = [7.0; 2];
        let nothing = [f32::NEG_INFINITY; 2];
        assert_eq!(index_loss(&nothing, &[0.5, 0.5], &mut gradients), Ok(0.0));
        assert_eq!(gradients, [0.0; 2]);
        assert_eq!(index_loss(&[1.0, 2.0], &[0.0, 0.0], &mut gradients), Ok(0.0));
        let equal = index_loss(&[3.0, 3.0], &[4.0, 4.0], &mut gradients).unwrap();
        assert!(equal.abs() < 1e-12 && gradients == [0.0; 2]);
        assert_eq!(index_loss(&[1.0], &[0.0, 0.0], &mut gradients).unwrap_err().field, "target");
    }

    #[test]
    fn what_does_not_fit_an_indexer_is_refused_by_its_name() {
        let (q, k, w) = (noise(48, 1), noise(40, 2), noise(12, 3));
        let args = *call(&q, &k, &w).args();
        for (problem, args, text) in [
            (IndexProblem { num_heads: 0, ..PROBLEM }, args, "num_heads 0 is not at least 1"),
            (PROBLEM, IndexArgs { weights: &w[1..], ..args }, "weights has 11 elements, but 12 are wanted"),
            (PROBLEM, IndexArgs { k_scale: Some(&w), ..args }, "k_scale has 12 elements, but 10 are wanted"),
            (PROBLEM, IndexArgs { q: DevSlice::host(&q[1..]), ..args }, "q has 188 bytes, but 48 elements"),
            (
                IndexProblem { dtype_k: DType::Bf16, ..PROBLEM },
                args,
                "k has elements of f32, but the problem has bf16",
            ),
        ] {
            let error = IndexCall::new(problem, args).unwrap_err();
            assert!(error.text.starts_with(text), "{error}");
        }
    }
}
