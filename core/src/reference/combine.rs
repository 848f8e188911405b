//! Merging partial results, by definition.

use crate::args::CombineArgs;
use crate::combine::CombineProblem;
use crate::dtype::DType;
use crate::error::ProblemError;

/// Combined O, dense `[batch, seqlen_q, num_heads_q, head_dim_v]`, and LSE `[batch, num_heads_q, seqlen_q]`, in
/// f64; no LSE if parts are added. O's old content is not added here. `args` are in host memory; only the parts are
/// read.
///
/// # Errors
/// Parts that are not in host memory.
pub fn combine(
    problem: &CombineProblem,
    args: &CombineArgs<'_>,
) -> Result<(Vec<f64>, Vec<f64>), ProblemError> {
    let shape = problem.shape();
    let host = |slice: &crate::args::DevSlice<'_>| {
        slice
            .as_host()
            .map(<[u8]>::to_vec)
            .ok_or_else(|| ProblemError::new("parts", "parts: 1 is not in host memory"))
    };
    let parts = args
        .parts
        .iter()
        .map(|part| Ok((host(&part.o)?, host(&part.lse)?)))
        .collect::<Result<Vec<_>, ProblemError>>()?;
    let size = problem.dtype_part.size_bytes() as usize;
    if problem.adds() {
        let at = |(b, i, h, d)| problem.part.offset(b, i, h, d) as usize * size;
        let sum = |place| parts.iter().map(|(o, _)| problem.dtype_part.read(&o[at(place)..])).sum();
        let rows = (0..shape.batch).flat_map(|b| (0..shape.seq).map(move |i| (b, i)));
        let places = rows
            .flat_map(|(b, i)| (0..shape.head).flat_map(move |h| (0..shape.dim).map(move |d| (b, i, h, d))));
        return Ok((places.map(sum).collect(), Vec::new()));
    }
    let mut o = vec![0.0; shape.num_elems() as usize];
    let mut lse = vec![f64::NEG_INFINITY; problem.lse_elems() as usize];
    for (b, h, i) in (0..shape.batch)
        .flat_map(|b| (0..shape.head).flat_map(move |h| (0..shape.seq).map(move |i| (b, h, i))))
    {
        let at_lse = ((b * shape.head + h) as usize) * shape.seq as usize + i as usize;
        let lses: Vec<f64> = parts.iter().map(|(_, lse)| DType::F32.read(&lse[at_lse * 4..])).collect();
        let row_max =
            lses.iter().fold(f64::NEG_INFINITY, |max, &l| if l > max || l.is_nan() { l } else { max });
        if row_max == f64::NEG_INFINITY {
            continue;
        }
        // Weights are computed from `row_max`, not from `lse`: in f64 the sum 1e30 + ln 13 loses ln 13.
        let sum: f64 = lses.iter().map(|l| (l - row_max).exp()).sum();
        lse[at_lse] = row_max + sum.ln();
        let row = ((b as usize * shape.seq as usize + i as usize) * shape.head as usize + h as usize)
            * shape.dim as usize;
        for ((part_o, _), &part_lse) in parts.iter().zip(&lses) {
            if part_lse == f64::NEG_INFINITY {
                continue;
            }
            let weight = (part_lse - row_max).exp() / sum;
            for d in 0..shape.dim {
                let at = problem.part.offset(b, i, h, d) as usize * size;
                o[row + d as usize] += weight * problem.dtype_part.read(&part_o[at..]);
            }
        }
    }
    Ok((o, lse))
}
