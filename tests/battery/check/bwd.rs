//! Comparison of gradients with the reference.

use fmha_core::reference::{
    BackwardSpread, HeadBackward, Part as Rows, Precision, backward_head, backward_part, forward_rows, is_far,
};
use fmha_core::{Bias, BwdArgs, DevSliceMut, Result};
use rayon::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

use super::fwd::Forward;
use super::{Progress, Selection, inner_roundoff, logits_bound, spread};
use crate::tensor::{Operand, Tensor};
use crate::tensors::{HostBwd, masks_of, score_of, seq_of};
use crate::tolerance::{Yardstick, bound, smallest_subnormal};
use crate::verdict::{Groups, Place, Verdict};

/// Error sums of every gradient, in the order of [`NAMES`].
type Stats = [Groups; 5];

/// Names in the report of each gradient's two groups: elements without terms of far rows, and elements with them.
const NAMES: [([&str; 2], Operand); 5] = [
    (["dq", "dq of far rows"], Operand::Dq),
    (["dk", "dk with far rows"], Operand::Dk),
    (["dv", "dv with far rows"], Operand::Dv),
    (["dbias", "dbias of far rows"], Operand::Dbias),
    (["dsink", "dsink with far rows"], Operand::Dsink),
];

/// Sums of dBias or dSink over the heads that share it: exact, in the input's precision, and squares of the spread,
/// each over all terms and over those of far rows.
#[derive(Clone)]
struct Shared {
    exact: Vec<f64>,
    same: Vec<f64>,
    square: Vec<f64>,
    far_square: Vec<f64>,
}

impl Shared {
    fn zeros(len: usize) -> Self {
        let zeros = || vec![0.0; len];
        Self { exact: zeros(), same: zeros(), square: zeros(), far_square: zeros() }
    }

    fn add(&mut self, at: usize, exact: f64, same: f64, spread: f64, far: f64) {
        self.exact[at] += exact;
        self.same[at] += same;
        self.square[at] += spread * spread;
        self.far_square[at] += far * far;
    }

    /// Compares the expected element `at` with the output at `place`. `stored` rounds the expected element.
    fn compare(&self, at: usize, place: Place, stored: impl Fn(f64) -> f64, groups: &mut Groups) {
        groups.add(place, stored(self.same[at]), self.square[at].sqrt(), self.far_square[at].sqrt());
    }

    fn merge(mut self, other: &Self) -> Self {
        for (sums, terms) in [
            (&mut self.exact, &other.exact),
            (&mut self.same, &other.same),
            (&mut self.square, &other.square),
            (&mut self.far_square, &other.far_square),
        ] {
            sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
        }
        self
    }
}

/// Terms of one (sequence, kv head) in the gradients.
struct Part {
    stats: Stats,
    forward: Forward,
    /// Largest logits: of rows that are not far, and of far rows.
    logits: [f64; 2],
    dbias: Shared,
    dsink: Shared,
}

/// Compares the gradients that `host` holds with the reference, on all cores.
///
/// A full selection compares with gradients computed from the inputs alone, with f64 scores, one (sequence, head)
/// at a time. A partial `selection`, whose heads are kv heads, compares some queries' dQ and keys' dK and dV with
/// gradients computed from the O and LSE in `host`, these queries' O and LSE with the forward reference, some rows
/// of dBias, and all of dSink.
///
/// # Errors
/// Operands that are missing.
pub fn check_bwd(host: &HostBwd, selection: &Selection, progress: Progress<'_>) -> Result<Verdict> {
    let fwd = host.problem.fwd();
    let pairs = selection.pairs(fwd.dims.num_heads_kv, &host.spans);
    let done = AtomicU64::new(0);
    let parts = pairs
        .par_iter()
        .map(|&(span, i_head_kv)| {
            let part = check_kv_head(host, selection, span, i_head_kv);
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, pairs.len() as u64);
            part
        })
        .collect::<Result<Vec<Part>>>()?;

    let mut stats = Stats::default();
    let mut forward = Forward::default();
    let mut logits = [0.0_f64; 2];
    let mut dbias = Shared::zeros(bias_len(host));
    let mut dsink = Shared::zeros(fwd.dims.num_heads_q as usize);
    for part in parts {
        stats.iter_mut().zip(&part.stats).for_each(|(sum, stat)| sum.merge(stat));
        logits = [logits[0].max(part.logits[0]), logits[1].max(part.logits[1])];
        forward.merge(part.forward);
        dbias = dbias.merge(&part.dbias);
        dsink = dsink.merge(&part.dsink);
    }
    if selection.is_partial() {
        dsink = whole_dsink(host)?;
        compare_dbias_rows(host, selection, &mut stats[3])?;
    } else if let Some(tensor) = host.operands.get(Operand::Dbias) {
        compare_dbias(tensor, &dbias, &mut stats[3]);
    }
    if let Some(tensor) = host.operands.get(Operand::Dsink) {
        for (head, &want) in dsink.exact.iter().enumerate() {
            let place = Place { head: head as u32, got: tensor.nth(head), want, ..Place::default() };
            dsink.compare(head, place, |same| same, &mut stats[4]);
        }
    }

    let all_far = stats[..3].iter().all(|groups| groups.near.count == 0);
    let mut verdict = Verdict { logits: logits[usize::from(all_far)], ..Verdict::default() };
    for ((names, operand), groups) in NAMES.into_iter().zip(&stats) {
        let Some(tensor) = host.operands.get(operand) else { continue };
        verdict.tensors.extend(groups.verdicts(names, |stat, name| {
            let yardstick = Yardstick {
                factor: 3.0,
                max_same: stat.max_same,
                rmse_same: stat.rmse_same(),
                u_out: tensor.dtype.unit_roundoff(),
                tiny_out: smallest_subnormal(tensor.dtype),
                // O is rounded before Delta is computed from it, whatever P's type.
                u_inner: inner_roundoff(fwd).max(fwd.dtypes.o.unit_roundoff()),
                reference: stat.reference(),
                spread: stat.spread(),
                logits: logits[0],
                far: stat.far(),
                far_logits: logits[1],
                count: stat.count,
            };
            stat.verdict(name, bound(&yardstick), None)
        }));
    }
    if selection.is_partial() {
        verdict.tensors.extend(forward.verdicts(fwd, false, true));
    }
    Ok(verdict)
}

fn bias_len(host: &HostBwd) -> usize {
    match (host.problem.dbias, host.problem.fwd().score.bias) {
        (Some(_), Bias::Elementwise(bias)) => {
            host.problem.fwd().shape_bias(bias.broadcast).num_elems() as usize
        }
        _ => 0,
    }
}

fn check_kv_head(host: &HostBwd, selection: &Selection, i_span: usize, i_head_kv: u32) -> Result<Part> {
    let fwd = host.problem.fwd();
    let (dims, span) = (fwd.dims, host.spans[i_span]);
    let mut part = Part {
        stats: Stats::default(),
        forward: Forward::default(),
        logits: [0.0; 2],
        dbias: Shared::zeros(if selection.is_partial() { 0 } else { bias_len(host) }),
        dsink: Shared::zeros(dims.num_heads_q as usize),
    };
    let (rows, keys) = (selection.rows(span.seqlen_q), selection.rows(span.seqlen_k));
    let chosen = selection.is_partial().then_some(Rows { rows: &rows, keys: &keys });
    let grad = host.problem.dtype_grad;
    let rounded = |value: f64| grad.round(value);
    let mut dk = Shared::zeros(keys.len() * dims.head_dim_qk as usize);
    let mut dv = Shared::zeros(keys.len() * dims.head_dim_v as usize);
    for i_head in i_head_kv * fwd.gqa_ratio()..(i_head_kv + 1) * fwd.gqa_ratio() {
        let far = |i: u32| is_far(host.operands.expect(Operand::Lse).nth(span.lse_index(fwd, i_head, i)));
        for (logits, kind) in part.logits.iter_mut().zip([false, true]) {
            let of_kind = (0..span.seqlen_q).filter(|&i| far(i) == kind);
            *logits = logits.max(logits_bound(fwd, &host.operands, span, i_head, of_kind));
        }
        let exact = head(host, i_span, i_head, chosen, Precision::Exact)?;
        let same = head(host, i_span, i_head, chosen, Precision::AsInput(host.score_sums))?;
        let spread: &BackwardSpread = &exact.spread;
        for (at, &want) in exact.dq.iter().enumerate() {
            let (row, dim) = (rows[at / dims.head_dim_qk as usize], at as u32 % dims.head_dim_qk);
            let got = host.operands.expect(Operand::Dq).get(span.q_batch, span.q_row + row, i_head, dim);
            let place = Place { batch: span.i_batch, head: i_head, row, dim, got, want };
            let of_far = if far(row) { spread.dq[at] } else { 0.0 };
            part.stats[0].add(place, rounded(same.dq[at]), spread.dq[at], of_far);
        }
        for at in 0..exact.dk.len() {
            dk.add(at, exact.dk[at], same.dk[at], spread.dk[at], spread.far_dk[at]);
        }
        for at in 0..exact.dv.len() {
            dv.add(at, exact.dv[at], same.dv[at], spread.dv[at], spread.far_dv[at]);
        }
        if chosen.is_some() {
            check_forward(host, i_span, i_head, &rows, &mut part.forward)?;
        }
        part.dsink.add(i_head as usize, exact.dsink, same.dsink, spread.dsink, spread.far_dsink);
        if let (true, Bias::Elementwise(bias)) = (!part.dbias.exact.is_empty(), fwd.score.bias) {
            let shape = fwd.shape_bias(bias.broadcast);
            let (b, h) = bias.broadcast.index(span.i_batch, i_head);
            for at in 0..exact.ds.len() {
                let (i, j) = (at / span.seqlen_k as usize, at % span.seqlen_k as usize);
                let row = (b * shape.head + h) as usize * shape.seq as usize + i;
                let to = row * shape.dim as usize + j;
                let of_far = if far(i as u32) { spread.ds[at] } else { 0.0 };
                part.dbias.add(to, exact.ds[at], same.ds[at], spread.ds[at], of_far);
            }
        }
    }
    for (which, sums, width) in [(1, &dk, dims.head_dim_qk), (2, &dv, dims.head_dim_v)] {
        let tensor = host.operands.expect(NAMES[which].1);
        for (at, &want) in sums.exact.iter().enumerate() {
            let (row, dim) = (keys[at / width as usize], at as u32 % width);
            let got = tensor.get(span.k_batch, span.k_row + row, i_head_kv, dim);
            let place = Place { batch: span.i_batch, head: i_head_kv, row, dim, got, want };
            sums.compare(at, place, rounded, &mut part.stats[which]);
        }
    }
    Ok(part)
}

/// Compares dBias, all of which must be written: 0 where no score used an element.
fn compare_dbias(tensor: &Tensor, sums: &Shared, groups: &mut Groups) {
    let shape = tensor.shape;
    for (at, &want) in sums.exact.iter().enumerate() {
        let at32 = at as u32;
        let (row, dim) = (at32 / shape.dim % shape.seq, at32 % shape.dim);
        let (head, batch) =
            (at32 / shape.dim / shape.seq % shape.head, at32 / shape.dim / shape.seq / shape.head);
        let got = tensor.get(batch, row, head, dim);
        let place = Place { batch, head, row, dim, got, want };
        sums.compare(at, place, |same| tensor.dtype.round(same), groups);
    }
}

/// Compares O and LSE of some queries, from which partial gradients are computed.
fn check_forward(
    host: &HostBwd,
    i_span: usize,
    i_head: u32,
    rows: &[u32],
    forward: &mut Forward,
) -> Result<()> {
    let (fwd, span) = (host.problem.fwd(), host.spans[i_span]);
    let exact = forward_rows(fwd, &host.inputs(), span, i_head, rows, Precision::Exact)?;
    let same = forward_rows(fwd, &host.inputs(), span, i_head, rows, Precision::AsInput(host.score_sums))?;
    forward.add(fwd, &host.operands, rows, [&exact, &same], |o| o);
    Ok(())
}

/// Computes dSink of every head from O and LSE.
fn whole_dsink(host: &HostBwd) -> Result<Shared> {
    let heads = host.problem.fwd().dims.num_heads_q;
    let mut dsink = Shared::zeros(heads as usize);
    if host.operands.get(Operand::Dsink).is_some() {
        for i_span in 0..host.spans.len() {
            for i_head in 0..heads {
                let none = Some(Rows::default());
                let exact = head(host, i_span, i_head, none, Precision::Exact)?;
                let same = head(host, i_span, i_head, none, Precision::AsInput(host.score_sums))?;
                let spread = &exact.spread;
                dsink.add(i_head as usize, exact.dsink, same.dsink, spread.dsink, spread.far_dsink);
            }
        }
    }
    Ok(dsink)
}

/// Compares some rows of dBias, in at most as many of its matrices as heads were selected: each is the sum over
/// every sequence and head that shares it.
fn compare_dbias_rows(host: &HostBwd, selection: &Selection, groups: &mut Groups) -> Result<()> {
    let fwd = host.problem.fwd();
    let (Some(tensor), Bias::Elementwise(bias)) = (host.operands.get(Operand::Dbias), fwd.score.bias) else {
        return Ok(());
    };
    let (shape, ratio) = (tensor.shape, fwd.gqa_ratio());
    let matrices = shape.batch * shape.head;
    let sharing = |b: u32, h: u32| {
        (0..host.spans.len())
            .flat_map(move |i_span| (0..fwd.dims.num_heads_q).map(move |i_head| (i_span, i_head)))
            .filter(move |&(i_span, i_head)| {
                bias.broadcast.index(host.spans[i_span].i_batch, i_head) == (b, h)
            })
    };
    let chosen = selection.heads.as_ref().map_or(matrices, |heads| heads.len() as u32 * ratio).min(matrices);
    for matrix in spread(matrices, chosen) {
        let (b, h) = (matrix / shape.head, matrix % shape.head);
        let shares = sharing(b, h).count().max(1) as u32;
        // The number of rows equals that of dQ, summed over all heads that share the matrix.
        let rows = selection.rows(shape.seq);
        let rows: Vec<u32> = spread(shape.seq, (rows.len() as u32 / shares).clamp(1, shape.seq)).collect();
        let dim = shape.dim as usize;
        let mut sums = Shared::zeros(rows.len() * dim);
        for (i_span, i_head) in sharing(b, h) {
            let span = host.spans[i_span];
            let live: Vec<u32> = rows.iter().copied().filter(|&i| i < span.seqlen_q).collect();
            let part = Some(Rows { rows: &live, keys: &[] });
            let exact = head(host, i_span, i_head, part, Precision::Exact)?;
            let same = head(host, i_span, i_head, part, Precision::AsInput(host.score_sums))?;
            for at in 0..exact.ds.len() {
                let (row, j) = (at / span.seqlen_k as usize, at % span.seqlen_k as usize);
                let index = span.lse_index(fwd, i_head, live[row]);
                let far = is_far(host.operands.expect(Operand::Lse).nth(index));
                let spread = exact.spread.ds[at];
                sums.add(row * dim + j, exact.ds[at], same.ds[at], spread, if far { spread } else { 0.0 });
            }
        }
        for (at, &want) in sums.exact.iter().enumerate() {
            let (row, dim) = (rows[at / dim], (at % dim) as u32);
            let place = Place { batch: b, head: h, row, dim, got: tensor.get(b, row, h, dim), want };
            sums.compare(at, place, |same| tensor.dtype.round(same), groups);
        }
    }
    Ok(())
}

fn head(
    host: &HostBwd,
    i_span: usize,
    i_head: u32,
    part: Option<Rows<'_>>,
    precision: Precision,
) -> Result<HeadBackward> {
    let operands = &host.operands;
    let args = BwdArgs::new(
        [Operand::Q, Operand::K, Operand::V].map(|operand| operands.expect(operand).slice()),
        [Operand::O, Operand::Lse, Operand::Dout].map(|operand| operands.expect(operand).slice()),
        [(); 3].map(|()| DevSliceMut::host::<f32>(&mut [])),
    )
    .dlse(operands.input(Operand::Dlse))
    .seq(seq_of((host.totals, host.problem.fwd().dims.batch), |operand| operands.input(operand)))
    .score(score_of(host.dropout, |operand| operands.input(operand)))
    .masks(masks_of(|operand| operands.input(operand)));
    let span = host.spans[i_span];
    Ok(match part {
        None => backward_head(&host.problem, &args, span, i_head, precision)?,
        Some(part) => backward_part(&host.problem, &args, span, i_head, part, precision)?,
    })
}

#[cfg(test)]
mod tests {
    use fmha_core::bwd::BiasGrad;
    use fmha_core::{BiasBroadcast, BwdProblem, DType, Dims, ElementwiseBias, FwdProblem, Strides};

    use super::*;
    use crate::tensors::{Data, Lengths};

    /// Makes a call with correct results: two query heads per kv head, with every gradient.
    fn solved() -> HostBwd {
        solved_with(|_| ())
    }

    /// Solves a problem whose inputs `change` has modified.
    fn solved_with(change: impl FnOnce(&mut HostBwd)) -> HostBwd {
        let dims = Dims::batch(1).seqlens(40, 30).heads(2, 1).head_dim(4);
        let mut fwd = FwdProblem::batch(DType::F32, dims);
        (fwd.mask, fwd.score.sink) = ("b".parse().unwrap(), true);
        let broadcast = BiasBroadcast::OneHead;
        let strides = Strides::bhsd(fwd.shape_bias(broadcast));
        fwd.score.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides });
        let mut problem = BwdProblem::new(fwd);
        (problem.write_dsink, problem.dbias) = (true, Some(BiasGrad { dtype: DType::F32, strides }));
        let mut host = HostBwd::new(problem, &Lengths::default(), Data::default()).unwrap();
        change(&mut host);
        host.fill_forward().unwrap();
        let heads = [0, 1].map(|i_head| super::head(&host, 0, i_head, None, Precision::Exact).unwrap());
        let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
        let (dk, dv) = (sum(&heads[0].dk, &heads[1].dk), sum(&heads[0].dv, &heads[1].dv));
        let mut put = |operand, head: u32, values: &[f64], dim: usize| {
            for (at, &value) in values.iter().enumerate() {
                let place = [0, (at / dim) as u32, head, (at % dim) as u32];
                host.operands.expect_mut(operand).set(place, value);
            }
        };
        put(Operand::Dk, 0, &dk, 4);
        put(Operand::Dv, 0, &dv, 4);
        for (i_head, head) in heads.iter().enumerate() {
            put(Operand::Dq, i_head as u32, &head.dq, 4);
            put(Operand::Dbias, i_head as u32, &head.ds, 30);
        }
        for (i_head, head) in heads.iter().enumerate() {
            host.operands.expect_mut(Operand::Dsink).set_nth(i_head, head.dsink);
        }
        host
    }

    fn failing(host: &HostBwd, selection: &Selection) -> Vec<&'static str> {
        let verdict = check_bwd(host, selection, &|_, _| ()).unwrap();
        verdict.tensors.iter().filter(|tensor| !tensor.pass).map(|tensor| tensor.tensor).collect()
    }

    #[test]
    fn a_far_row_loosens_no_other_row_and_is_judged_itself() {
        let masked = |host: &mut HostBwd| {
            for (head, key) in (0..2).flat_map(|head| (0..30).map(move |key| (head, key))) {
                host.operands.expect_mut(Operand::Bias).set([0, 35, head, key], -1e10);
            }
        };
        let far = || {
            solved_with(|host| {
                masked(host);
                (0..2).for_each(|head| {
                    host.operands.expect_mut(Operand::Sink).set_nth(head, f64::NEG_INFINITY);
                });
            })
        };
        let sample = Selection { heads: Some(vec![(0, 0)]), rows: Some(40) };
        for selection in [&Selection::default(), &sample] {
            assert_eq!(failing(&far(), selection), [""; 0]);
        }
        for (operand, place, error, name) in [
            (Operand::Dq, [0, 34, 1, 2], 1e-3, "dq"),
            (Operand::Dbias, [0, 34, 1, 7], 1e-3, "dbias"),
            (Operand::Dq, [0, 35, 1, 2], 9.0, "dq of far rows"),
            (Operand::Dbias, [0, 35, 1, 7], 9.0, "dbias of far rows"),
            (Operand::Dk, [0, 20, 0, 2], 9.0, "dk with far rows"),
            (Operand::Dk, [0, 29, 0, 2], 1e-3, "dk"), // that row does not see this key
            // The row's P is 1 in place of 1 / 30.
            (Operand::Dv, [0, 20, 0, 2], 4.0, "dv with far rows"),
        ] {
            for selection in [&Selection::default(), &sample] {
                let mut host = far();
                let tensor = host.operands.expect_mut(operand);
                let value = tensor.get(place[0], place[1], place[2], place[3]);
                tensor.set(place, value + error);
                assert_eq!(failing(&host, selection), [name]);
            }
        }
        // A sink that takes all weight from the keys leaves a normal row.
        let mut host = solved_with(masked);
        assert_eq!(failing(&host, &sample), [""; 0]);
        let value = host.operands.expect(Operand::Dq).get(0, 35, 1, 2);
        host.operands.expect_mut(Operand::Dq).set([0, 35, 1, 2], value + 1e-3);
        assert_eq!(failing(&host, &sample), ["dq"]);
    }

    #[test]
    fn a_sample_passes_what_is_right_and_finds_a_wrong_element_of_every_tensor() {
        let sample = Selection { heads: Some(vec![(0, 0)]), rows: Some(5) };
        for selection in [&Selection::default(), &sample] {
            assert_eq!(failing(&solved(), selection), [""; 0]);
        }
        // A sample of two or more rows always contains the last row.
        for (operand, place, name) in [
            (Operand::Dq, [0, 39, 1, 2], "dq"),
            (Operand::Dk, [0, 29, 0, 2], "dk"),
            (Operand::Dv, [0, 29, 0, 2], "dv"),
            (Operand::Dbias, [0, 39, 1, 7], "dbias"),
            (Operand::O, [0, 39, 1, 2], "o"),
        ] {
            let mut host = solved();
            let tensor = host.operands.expect_mut(operand);
            let value = tensor.get(place[0], place[1], place[2], place[3]);
            tensor.set(place, value + 0.01);
            assert!(failing(&host, &sample).contains(&name), "{name}");
        }
        let mut host = solved();
        host.operands.expect_mut(Operand::Dsink).set_nth(1, 0.5);
        assert_eq!(failing(&host, &sample), ["dsink"]);
        let mut host = solved();
        host.operands.expect_mut(Operand::Lse).set_nth(79, 0.5);
        assert!(failing(&host, &sample).contains(&"lse"));
    }
}
