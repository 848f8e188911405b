//! Gradients.

use fmha_core::reference::{BackwardSpread, HeadBackward, Precision, backward_head};
use fmha_core::{Bias, BwdArgs, DevSliceMut, Result};
use rayon::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Progress, inner_roundoff, logits_bound};
use crate::tensor::{Operand, Tensor};
use crate::tensors::{HostBwd, score_of, seq_of};
use crate::tolerance::{Yardstick, bound, smallest_subnormal};
use crate::verdict::{Place, Stat, Verdict};

/// Sums of every gradient, in the order of [`NAMES`].
type Stats = [Stat; 5];

const NAMES: [(&str, Operand); 5] = [
    ("dq", Operand::Dq),
    ("dk", Operand::Dk),
    ("dv", Operand::Dv),
    ("dbias", Operand::Dbias),
    ("dsink", Operand::Dsink),
];

/// dBias or dSink, summed over the heads that share it: exact, in the input's precision, and the
/// squares of the spread.
#[derive(Clone)]
struct Shared {
    exact: Vec<f64>,
    same: Vec<f64>,
    square: Vec<f64>,
}

impl Shared {
    fn zeros(len: usize) -> Self {
        Self { exact: vec![0.0; len], same: vec![0.0; len], square: vec![0.0; len] }
    }

    fn add(&mut self, at: usize, exact: f64, same: f64, spread: f64) {
        self.exact[at] += exact;
        self.same[at] += same;
        self.square[at] += spread * spread;
    }

    fn merge(mut self, other: &Self) -> Self {
        for (sums, terms) in [
            (&mut self.exact, &other.exact),
            (&mut self.same, &other.same),
            (&mut self.square, &other.square),
        ] {
            sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
        }
        self
    }
}

/// What one (sequence, kv head) adds.
struct Part {
    stats: Stats,
    logits: f64,
    dbias: Shared,
    dsink: Shared,
}

/// Compares every gradient that `host` holds with the reference, on all cores. Scores are held whole,
/// in f64, a (sequence, head) at a time.
///
/// # Errors
/// Operands that are missing.
pub fn check_bwd(host: &HostBwd, progress: Progress<'_>) -> Result<Verdict> {
    let fwd = host.problem.fwd();
    let heads_kv = fwd.dims.num_heads_kv;
    let pairs: Vec<(usize, u32)> =
        (0..host.spans.len()).flat_map(|span| (0..heads_kv).map(move |head| (span, head))).collect();
    let done = AtomicU64::new(0);
    let parts = pairs
        .par_iter()
        .map(|&(span, i_head_kv)| {
            let part = check_kv_head(host, span, i_head_kv);
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, pairs.len() as u64);
            part
        })
        .collect::<Result<Vec<Part>>>()?;

    let mut stats = Stats::default();
    let mut logits: f64 = 0.0;
    let mut dbias = Shared::zeros(bias_len(host));
    let mut dsink = Shared::zeros(fwd.dims.num_heads_q as usize);
    for part in parts {
        stats.iter_mut().zip(&part.stats).for_each(|(sum, stat)| sum.merge(stat));
        logits = logits.max(part.logits);
        dbias = dbias.merge(&part.dbias);
        dsink = dsink.merge(&part.dsink);
    }
    if let Some(tensor) = host.operands.get(Operand::Dbias) {
        compare_dbias(tensor, &dbias, &mut stats[3]);
    }
    if let Some(tensor) = host.operands.get(Operand::Dsink) {
        for (head, &want) in dsink.exact.iter().enumerate() {
            let place = Place { head: head as u32, got: tensor.nth(head), want, ..Place::default() };
            stats[4].add(place, dsink.same[head], dsink.square[head].sqrt());
        }
    }

    let mut verdict = Verdict::default();
    for ((name, operand), stat) in NAMES.into_iter().zip(&stats) {
        let Some(tensor) = host.operands.get(operand) else { continue };
        let yardstick = Yardstick {
            factor: 3.0,
            max_same: stat.max_same,
            rmse_same: stat.rmse_same(),
            u_out: tensor.dtype.unit_roundoff(),
            tiny_out: smallest_subnormal(tensor.dtype),
            // D is made of a rounded O whatever P is.
            u_inner: inner_roundoff(fwd).max(fwd.dtype_o.unit_roundoff()),
            reference: stat.reference(),
            spread: stat.spread(),
            logits,
            count: stat.count,
        };
        verdict.tensors.push(stat.verdict(name, bound(&yardstick), None));
    }
    Ok(verdict)
}

fn bias_len(host: &HostBwd) -> usize {
    match (host.problem.dbias, host.problem.fwd().bias) {
        (Some(_), Bias::Elementwise(bias)) => {
            host.problem.fwd().shape_bias(bias.broadcast).num_elems() as usize
        }
        _ => 0,
    }
}

fn check_kv_head(host: &HostBwd, i_span: usize, i_head_kv: u32) -> Result<Part> {
    let fwd = host.problem.fwd();
    let (dims, span) = (fwd.dims, host.spans[i_span]);
    let mut part = Part {
        stats: Stats::default(),
        logits: 0.0,
        dbias: Shared::zeros(bias_len(host)),
        dsink: Shared::zeros(dims.num_heads_q as usize),
    };
    let grad = host.problem.dtype_grad;
    let rounded = |value: f64| grad.round(value);
    let mut dk = Shared::zeros(span.seqlen_k as usize * dims.head_dim_qk as usize);
    let mut dv = Shared::zeros(span.seqlen_k as usize * dims.head_dim_v as usize);
    for i_head in i_head_kv * fwd.gqa_ratio()..(i_head_kv + 1) * fwd.gqa_ratio() {
        part.logits = part.logits.max(logits_bound(fwd, &host.operands, span, i_head));
        let exact = head(host, i_span, i_head, Precision::Exact)?;
        let same = head(host, i_span, i_head, Precision::AsInput)?;
        let spread: &BackwardSpread = &exact.spread;
        for (at, &want) in exact.dq.iter().enumerate() {
            let (row, dim) = (at as u32 / dims.head_dim_qk, at as u32 % dims.head_dim_qk);
            let got =
                host.operands.expect(Operand::Dq).get(span.storage_batch, span.q_row + row, i_head, dim);
            let place = Place { batch: span.i_batch, head: i_head, row, dim, got, want };
            part.stats[0].add(place, rounded(same.dq[at]), spread.dq[at]);
        }
        for at in 0..exact.dk.len() {
            dk.add(at, exact.dk[at], same.dk[at], spread.dk[at]);
        }
        for at in 0..exact.dv.len() {
            dv.add(at, exact.dv[at], same.dv[at], spread.dv[at]);
        }
        part.dsink.add(i_head as usize, exact.dsink, same.dsink, spread.dsink);
        if let (true, Bias::Elementwise(bias)) = (!part.dbias.exact.is_empty(), fwd.bias) {
            let shape = fwd.shape_bias(bias.broadcast);
            let (b, h) = bias.broadcast.index(span.i_batch, i_head);
            for at in 0..exact.ds.len() {
                let (i, j) = (at / span.seqlen_k as usize, at % span.seqlen_k as usize);
                let row = (b * shape.head + h) as usize * shape.seq as usize + i;
                let to = row * shape.dim as usize + j;
                part.dbias.add(to, exact.ds[at], same.ds[at], spread.ds[at]);
            }
        }
    }
    for (which, sums, width) in [(1, &dk, dims.head_dim_qk), (2, &dv, dims.head_dim_v)] {
        let tensor = host.operands.expect(NAMES[which].1);
        for (at, &want) in sums.exact.iter().enumerate() {
            let (row, dim) = (at as u32 / width, at as u32 % width);
            let got = tensor.get(span.storage_batch, span.k_row + row, i_head_kv, dim);
            let place = Place { batch: span.i_batch, head: i_head_kv, row, dim, got, want };
            part.stats[which].add(place, rounded(sums.same[at]), sums.square[at].sqrt());
        }
    }
    Ok(part)
}

/// dBias is written whole: 0 where no score used it.
fn compare_dbias(tensor: &Tensor, sums: &Shared, stat: &mut Stat) {
    let shape = tensor.shape;
    for (at, &want) in sums.exact.iter().enumerate() {
        let at32 = at as u32;
        let (row, dim) = (at32 / shape.dim % shape.seq, at32 % shape.dim);
        let (head, batch) =
            (at32 / shape.dim / shape.seq % shape.head, at32 / shape.dim / shape.seq / shape.head);
        let got = tensor.get(batch, row, head, dim);
        let place = Place { batch, head, row, dim, got, want };
        stat.add(place, tensor.dtype.round(sums.same[at]), sums.square[at].sqrt());
    }
}

fn head(host: &HostBwd, i_span: usize, i_head: u32, precision: Precision) -> Result<HeadBackward> {
    let operands = &host.operands;
    let args = BwdArgs {
        q: operands.expect(Operand::Q).slice(),
        k: operands.expect(Operand::K).slice(),
        v: operands.expect(Operand::V).slice(),
        o: operands.expect(Operand::O).slice(),
        lse: operands.expect(Operand::Lse).slice(),
        dout: operands.expect(Operand::Dout).slice(),
        dlse: operands.input(Operand::Dlse),
        dq: DevSliceMut::host::<f32>(&mut []),
        dk: DevSliceMut::host::<f32>(&mut []),
        dv: DevSliceMut::host::<f32>(&mut []),
        dbias: None,
        dsink: None,
        seq: seq_of(|operand| operands.input(operand)),
        score: score_of(host.dropout, |operand| operands.input(operand)),
        workspace: None,
    };
    let span = host.spans[i_span];
    Ok(backward_head(&host.problem, &args, span, i_head, precision)?)
}
