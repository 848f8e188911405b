//! Forward pass of problems in which every query lists the keys that it attends to.

use fmha_core::second::SecondCall;
use fmha_core::seq::KvRows;

use super::{ScaleLanes, Scratch, Shared, Side, TILE_KEYS, Token};
use crate::blocks::{Columns, Factors, Multiply, RowState, Softmax, WriteRows};
use crate::forward::cache::{TurnedQueries, append};
use crate::forward::{Forward, settle};
use crate::memory::{Bytes, Floats, reserve};
use crate::simd::Simd;
use crate::tasks::Threads;
use crate::tensor::{Source, Target, f32_at};
use crate::tile::Store;

/// One thread's buffers for O of a token.
struct Outputs {
    scratch: Scratch,
    /// O of a token's heads in blocks of PANEL columns, with a row for each head.
    out: Floats,
    /// Running maximum and sum of each of PANEL heads, and the factor of P.
    row_max: Floats,
    row_sum: Floats,
    factors: Floats,
    row: Floats,
}

/// Outputs of a call.
struct Results {
    o: Target,
    scale_o: f32,
    lse: Option<Bytes>,
    /// Whether LSE leaves out the sink.
    lse_without_sink: bool,
}

/// Computes a call with lists.
///
/// # Errors
/// Memory for scratch that the system refuses, before anything is written.
pub(crate) fn forward<S: Simd>(call: &Forward<'_>, s: S, threads: &Threads) -> fmha_core::Result<()> {
    let (problem, args) = (call.problem, call.args);
    let turned = TurnedQueries::of(problem, args, call.spans, threads)?;
    append(problem, args, call.spans, KvRows::of(problem, &args.seq)?, threads)?;
    let q = Source::new(args.q, problem.dtypes.qk, problem.strides.q);
    let q = turned.as_ref().map_or(q, TurnedQueries::source);
    let tensors = (q, args.k_slice(), args.v_slice());
    let second = SecondCall::of(problem, args.second, &args.seq)?;
    let operands = (&args.seq, &args.score, &args.masks);
    let Some(shared) = Shared::new(problem, operands, tensors, second.as_ref())? else { return Ok(()) };
    let results = Results {
        o: Target::new(&args.o, problem.dtypes.o, problem.strides.o),
        scale_o: args.scale_o.as_ref().map_or(1.0, |scale| f32_at(scale, 0)),
        lse: args.lse.as_ref().map(Bytes::new),
        lse_without_sink: problem.lse_without_sink(),
    };
    let tokens = shared.tokens(call.spans)?;
    let used = threads.used(tokens.len());
    let mut states = reserve(used)?;
    for _ in 0..used {
        states.push(shared.outputs::<S>()?);
    }
    threads.for_each(&mut states, tokens.len(), |state, task| {
        shared.attend(s, state, tokens[task], &results);
    });
    Ok(())
}

impl Shared<'_> {
    fn outputs<S: Simd>(&self) -> fmha_core::Result<Outputs> {
        let dim_v = (self.problem.dims.head_dim_v as usize).next_multiple_of(S::PANEL);
        Ok(Outputs {
            scratch: self.scratch::<S>()?,
            out: Floats::scratch(self.lanes::<S>() * dim_v)?,
            row_max: Floats::scratch(S::PANEL)?,
            row_sum: Floats::scratch(S::PANEL)?,
            factors: Floats::scratch(S::PANEL)?,
            row: Floats::scratch(dim_v)?,
        })
    }

    fn attend<S: Simd>(&self, s: S, state: &mut Outputs, token: Token, results: &Results) {
        self.begin(s, &mut state.scratch, token);
        self.scores(s, &mut state.scratch, token, None);
        for lane in (0..self.group()).step_by(S::PANEL) {
            self.softmax(s, state, token, lane, results);
        }
        let (keys, dim_v) = (state.scratch.listed.len(), self.problem.dims.head_dim_v as usize);
        for first in (0..keys).step_by(TILE_KEYS) {
            let tile = first..keys.min(first + TILE_KEYS);
            let rows = tile.len();
            self.load_columns(s, &mut state.scratch, Side::V, tile);
            for lane in (0..self.group()).step_by(S::PANEL) {
                s.run(Columns {
                    panel: self.panel::<S>(lane, rows),
                    weights: state
                        .scratch
                        .weights
                        .as_ptr()
                        .wrapping_add(lane * self.capacity + first * S::PANEL),
                    right: state.scratch.columns.as_ptr(),
                    capacity: TILE_KEYS,
                    dim: dim_v,
                    out: state.out.as_mut_ptr().wrapping_add(lane * S::PANEL),
                    out_capacity: self.lanes::<S>(),
                    store: if first == 0 { Store::Scaled(1.0) } else { Store::Add },
                    pairs: false,
                });
            }
        }
        let Token { span, i, i_head_kv } = token;
        let first_head = i_head_kv * self.problem.gqa_ratio();
        s.run(WriteRows {
            to: &results.o.heads(span.q_batch, span.q_row + i, first_head),
            at: (0, 0, 0),
            rows: self.group(),
            cols: dim_v,
            from: state.out.as_ptr(),
            capacity: self.lanes::<S>(),
            factors: Factors::All(results.scale_o),
            untouched: if keys == 0 { u128::MAX } else { 0 },
            row: state.row.as_mut_ptr(),
        });
    }

    /// Computes P of PANEL heads from head `lane` on, normalised and with dropout, and LSE.
    fn softmax<S: Simd>(&self, s: S, state: &mut Outputs, token: Token, lane: usize, results: &Results) {
        let Outputs { scratch, row_max, row_sum, factors, .. } = state;
        let panel = self.panel::<S>(lane, scratch.listed.len());
        row_max.fill(f32::NEG_INFINITY);
        row_sum.fill(0.0);
        let scores = scratch.weights.as_mut_ptr().wrapping_add(lane * self.capacity);
        let state = RowState {
            row_max: row_max.as_mut_ptr(),
            row_sum: row_sum.as_mut_ptr(),
            alpha: factors.as_mut_ptr(),
        };
        s.run(Softmax { panel, scores, state, round: fmha_core::DType::F32, pairs: false });
        factors.fill(0.0);
        for (at, head) in scratch.heads[lane..lane + panel.queries].iter().enumerate() {
            // SAFETY: the arrays have PANEL numbers each; no other task writes LSE of this row.
            unsafe {
                let max = f64::from(*row_max.as_ptr().add(at));
                let sum = f64::from(*row_sum.as_ptr().add(at));
                let (factor, lse) = settle_with_infinite_sink(max, sum, head.sink);
                let lse = if results.lse_without_sink { settle(max, sum, None).1 } else { lse };
                *factors.as_mut_ptr().add(at) = (factor * f64::from(head.keep_scale)) as f32;
                if let Some(to) = results.lse {
                    to.write_f32(token.span.lse_index(self.problem, head.i_head, token.i), lse as f32);
                }
            }
        }
        s.run(ScaleLanes { panel, x: scores, factors: factors.as_ptr() });
        if scratch.heads[0].drops {
            self.keep::<S>(scratch, token, lane, 1.0);
            s.run(Multiply { panel, x: scores, y: scratch.extra.as_ptr() });
        }
    }
}

/// Computes like [`settle`]; in addition, an infinite sink takes all the weight of a row whose scores are finite.
fn settle_with_infinite_sink(row_max: f64, row_sum: f64, sink: Option<f32>) -> (f64, f64) {
    if sink == Some(f32::INFINITY) && row_max < f64::INFINITY && !row_sum.is_nan() {
        return (0.0, f64::INFINITY);
    }
    settle(row_max, row_sum, sink)
}
