//! One (sequence, query head): the keys that a query sees, and its scores.

use fmha_core::dropout::{KeepMask, keep_scale};
use fmha_core::{
    Bias, Descale, DevSlice, FwdProblem, MaskAlign, MaskBand, MaskShape, ProblemError, ScoreArgs, SeqArgs,
    SeqSpan,
};

use super::{Fault, Input, floats, host};

pub(super) struct Head<'a> {
    pub(super) problem: &'a FwdProblem,
    pub(super) fault: Option<Fault>,
    pub(super) span: SeqSpan,
    pub(super) i_head: u32,
    pub(super) i_head_kv: u32,
    pub(super) q: Input<'a>,
    pub(super) k: Input<'a>,
    pub(super) v: Input<'a>,
    pub(super) band: MaskBand,
    pub(super) sink: Option<f32>,
    pub(super) descale_v: f32,
    descale_qk: f32,
    bias: Option<Input<'a>>,
    slope: f32,
    keep: KeepMask,
}

impl<'a> Head<'a> {
    pub(super) fn new(
        problem: &'a FwdProblem,
        [q, k, v]: [DevSlice<'a>; 3],
        score: &ScoreArgs<'a>,
        span: SeqSpan,
        i_head: u32,
        fault: Option<Fault>,
    ) -> Self {
        let dims = problem.dims;
        let is = |which| fault == Some(which);
        let i_head_kv = match fault {
            Some(Fault::KvHeadModulo) => i_head % dims.num_heads_kv,
            Some(Fault::RatioOfPowersOfTwo) => i_head / problem.gqa_ratio().next_power_of_two(),
            _ => i_head / problem.gqa_ratio(),
        };
        let descale = |slice: &Option<DevSlice<'_>>, kind: Descale| {
            let head = if is(Fault::DescaleOfHeadZero) { 0 } else { i_head_kv };
            let values = floats(slice.as_ref());
            values.get(kind.index(span.i_batch, head, dims.num_heads_kv)).copied().unwrap_or(1.0)
        };
        let bias = match (problem.score.bias, score.bias) {
            (Bias::Elementwise(bias), Some(slice)) => {
                Some(Input::new(slice, bias.dtype, bias.strides, fault))
            }
            _ => None,
        };
        let slope = match problem.score.bias {
            Bias::Alibi { per_batch } => {
                let batch = if per_batch && !is(Fault::AlibiBatchForgotten) { span.i_batch } else { 0 };
                floats(score.alibi_slopes.as_ref())[(batch * dims.num_heads_q + i_head) as usize]
            }
            _ => 0.0,
        };
        Self {
            problem,
            fault,
            span,
            i_head,
            i_head_kv,
            q: Input::new(q, problem.dtypes.qk, problem.strides.q, fault),
            k: Input::new(k, problem.dtypes.qk, problem.strides.k, fault),
            v: Input::new(v, problem.dtypes.v, problem.strides.v, fault),
            band: band(problem, span, fault),
            sink: problem
                .score
                .sink
                .then(|| floats(score.sink.as_ref())[i_head as usize])
                .filter(|_| !is(Fault::SinkForgotten)),
            descale_v: descale(&score.descale_v, problem.scales.descale_v),
            descale_qk: descale(&score.descale_q, problem.scales.descale_q)
                * descale(&score.descale_k, problem.scales.descale_k),
            bias,
            slope,
            keep: KeepMask::new(
                problem.dropout.p_drop,
                score.dropout.unwrap_or_default(),
                span.i_batch,
                i_head,
                dims.num_heads_q,
            ),
        }
    }

    fn is(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    pub(super) fn q(&self, i: u32, d: u32) -> f32 {
        self.q.at(self.span.q_batch, self.span.q_row + i, self.i_head, d)
    }

    pub(super) fn k(&self, j: u32, d: u32) -> f32 {
        self.k.at(self.span.k_batch, self.span.k_row + j, self.i_head_kv, d)
    }

    pub(super) fn v(&self, j: u32, d: u32) -> f32 {
        self.v.at(self.span.k_batch, self.span.k_row + j, self.i_head_kv, d) * self.descale_v
    }

    /// Factor of a product of Q and K.
    pub(super) fn scale(&self) -> f32 {
        if self.is(Fault::ScaleDropped) {
            return self.descale_qk;
        }
        self.problem.resolved_softmax_scale() * self.descale_qk
    }

    /// Score of (i, j), and the slope of its soft-cap.
    pub(super) fn score(&self, i: u32, j: u32) -> (f32, f32) {
        let dot: f32 = (0..self.problem.dims.head_dim_qk).map(|d| self.q(i, d) * self.k(j, d)).sum();
        let mut s = dot * self.scale();
        let bias = self.bias(i, j);
        if self.is(Fault::BiasBeforeSoftcap) {
            s += bias;
        }
        let mut slope = 1.0;
        if let (Some(cap), false) = (self.problem.score.softcap, self.is(Fault::SoftcapForgotten)) {
            let tanh = (s / cap).tanh();
            (s, slope) = (cap * tanh, 1.0 - tanh * tanh);
        }
        if !self.is(Fault::BiasBeforeSoftcap) {
            s += bias;
        }
        (s, if self.is(Fault::CapSlopeForgotten) { 1.0 } else { slope })
    }

    fn bias(&self, i: u32, j: u32) -> f32 {
        match (self.problem.score.bias, self.bias) {
            (Bias::Elementwise(kind), Some(bias)) => {
                let (b, h) = kind.broadcast.index(self.span.i_batch, self.i_head);
                bias.at(b, i, if self.is(Fault::BiasHeadForgotten) { 0 } else { h }, j)
            }
            (Bias::Alibi { .. }, _) => {
                let diag = self.problem.mask.alibi_align().diagonal(self.span.seqlen_q, self.span.seqlen_k);
                let distance = i64::from(i) + diag - i64::from(j);
                let distance = if self.is(Fault::AlibiSigned) { distance } else { distance.abs() };
                -self.slope * distance as f32
            }
            _ => 0.0,
        }
    }

    pub(super) fn kept(&self, i: u32, j: u32) -> bool {
        let j = if self.is(Fault::DropoutWordsReversed) { j ^ 3 } else { j };
        !self.problem.drops() || self.keep.keep(i, j)
    }

    pub(super) fn keep_factor(&self, i: u32, j: u32) -> f32 {
        match (self.kept(i, j), self.is(Fault::DropoutNotRescaled)) {
            (false, _) => 0.0,
            (true, true) => 1.0,
            (true, false) => keep_scale(self.problem.dropout.p_drop) as f32,
        }
    }
}

fn band(problem: &FwdProblem, span: SeqSpan, fault: Option<Fault>) -> MaskBand {
    let mut mask = problem.mask;
    if fault == Some(Fault::BottomRightAsTopLeft) {
        match &mut mask.shape {
            MaskShape::Causal(align) | MaskShape::Window { align, .. } => *align = MaskAlign::TopLeft,
            _ => {}
        }
    }
    let mut band = mask.band(span.seqlen_q, span.seqlen_k);
    match fault {
        Some(Fault::UpperBoundOffByOne) => band.hi += 1,
        Some(Fault::LowerBoundOffByOne) => band.lo -= 1,
        Some(Fault::SinkColumnsForgotten) => band.sink_columns = 0,
        _ => {}
    }
    band
}

/// Sequences of a call. If the fault forgets the lengths in use, they have all rows.
pub(super) fn spans(
    problem: &FwdProblem,
    seq: &SeqArgs<'_>,
    fault: Option<Fault>,
) -> Result<Vec<SeqSpan>, ProblemError> {
    let seq = SeqArgs::default()
        .totals(seq.totals)
        .cu_seqlens_q(seq.cu_seqlens_q.map(host))
        .cu_seqlens_k(seq.cu_seqlens_k.map(host))
        .seqused_q(seq.seqused_q.map(host))
        .seqused_k(seq.seqused_k.map(host));
    let mut spans = fmha_core::seq::spans(problem, &seq)?;
    if fault == Some(Fault::SequenceLengthPhysical) && problem.layout.kv == fmha_core::KvLayout::Strided {
        spans.iter_mut().for_each(|span| span.seqlen_k = problem.dims.seqlen_k);
    }
    Ok(spans)
}
