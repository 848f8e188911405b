//! Compares the reference with finite differences, and with identities that need no tolerance.

use approx::assert_relative_eq;

use super::head::Head;
use super::*;
use crate::args::{
    BwdArgs, CacheArgs, CombineArgs, DevSlice, DevSliceMut, FwdArgs, PartialResult, ScoreArgs, SeqArgs,
};
use crate::bwd::{BiasGrad, BwdProblem};
use crate::combine::CombineProblem;
use crate::dropout::{DropoutSeed, KeepMask, keep_scale};
use crate::dtype::DType;
use crate::kv::{Append, Rotary, RotaryPairs};
use crate::layout::{Shape, Strides, Totals};
use crate::plan::ScoreSums;
use crate::problem::{Dims, FwdProblem, KeyLists, ListEntries};
use crate::score::{Bias, BiasBroadcast, ElementwiseBias};

/// Operands of a small problem in f32, which also represents every perturbation of the finite differences.
#[derive(Clone)]
struct Operands {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    bias: Vec<f32>,
    slopes: Vec<f32>,
    sink: Vec<f32>,
    dout: Vec<f32>,
    dlse: Vec<f32>,
    /// Lists of keys, if the problem has any.
    indices: Vec<i32>,
}

/// Numbers in −1..1 that look random and are multiples of 2^-10.
fn noise(count: u64, salt: u32) -> Vec<f32> {
    (0..count as u32)
        .map(|i| {
            let word = crate::dropout::philox4x32_10([i, salt, 0, 0], [1, 2])[0];
            (word >> 21) as f32 / 1024.0 - 1.0
        })
        .collect()
}

impl Operands {
    fn of(problem: &FwdProblem) -> Self {
        let bias = match problem.score.bias {
            Bias::Elementwise(bias) => problem.shape_bias(bias.broadcast).num_elems(),
            _ => 0,
        };
        let heads = u64::from(problem.dims.num_heads_q);
        Self {
            q: noise(problem.shape_q().num_elems(), 1),
            k: noise(problem.shape_k().num_elems(), 2),
            v: noise(problem.shape_v().num_elems(), 3),
            bias: noise(bias, 4),
            slopes: noise(heads, 5),
            sink: noise(heads, 6),
            dout: noise(problem.shape_o().num_elems(), 7),
            dlse: noise(problem.extents(Totals::NONE).lse_elems, 8),
            indices: problem.lists.map_or(vec![], |lists| {
                // Entries from -1 to one past the last key, most of them twice or more.
                let count = lists.shape(problem, Totals::NONE).num_elems();
                let keys = problem.dims.seqlen_k as f32 + 1.0;
                noise(count, 9).iter().map(|x| ((x + 1.0) / 2.0 * keys).floor() as i32 - 1).collect()
            }),
        }
    }

    fn seq(&self, problem: &FwdProblem) -> SeqArgs<'_> {
        SeqArgs::default().indices(problem.lists.map(|_| DevSlice::host(&self.indices)))
    }

    fn score(&self, problem: &FwdProblem) -> ScoreArgs<'_> {
        ScoreArgs {
            bias: matches!(problem.score.bias, Bias::Elementwise(_)).then(|| DevSlice::host(&self.bias)),
            alibi_slopes: matches!(problem.score.bias, Bias::Alibi { .. })
                .then(|| DevSlice::host(&self.slopes)),
            sink: problem.score.sink.then(|| DevSlice::host(&self.sink)),
            dropout: Some(DropoutSeed { seed: 5, offset: 1 }),
            ..ScoreArgs::default()
        }
    }

    fn forward(&self, problem: &FwdProblem) -> Vec<HeadForward> {
        let mut args = FwdArgs::new(
            DevSlice::host(&self.q),
            DevSlice::host(&self.k),
            DevSlice::host(&self.v),
            DevSliceMut::host::<f32>(&mut []),
        );
        args.score = self.score(problem);
        args.seq = self.seq(problem);
        forward(problem, &args, Precision::Exact).unwrap()
    }

    /// The sum `sum dO * O + sum dLSE * LSE`: the scalar function whose gradients the backward computes.
    fn loss(&self, problem: &FwdProblem, has_dlse: bool) -> f64 {
        let mut loss = 0.0;
        for head in self.forward(problem) {
            let dim = problem.dims.head_dim_v as usize;
            for i in 0..head.span.seqlen_q {
                let at = problem.strides.o.offset(head.span.q_batch, i, head.i_head, 0) as usize;
                for d in 0..dim {
                    loss += f64::from(self.dout[at + d]) * head.o[i as usize * dim + d];
                }
                // The LSE of an empty row is the constant −inf and has no derivative.
                if has_dlse && head.lse[i as usize] > f64::NEG_INFINITY {
                    let dlse = self.dlse[head.span.lse_index(problem, head.i_head, i)];
                    loss += f64::from(dlse) * head.lse[i as usize];
                }
            }
        }
        loss
    }

    fn backward(&self, problem: &BwdProblem) -> Backward {
        self.with_args(problem, &[], &[], |args| {
            backward(&problem.clone().validate().unwrap(), args, Precision::Exact).unwrap()
        })
    }

    /// Calls `body` with backward's arguments and this O and LSE.
    fn with_args<R>(
        &self,
        problem: &BwdProblem,
        o: &[f32],
        lse: &[f32],
        call: impl FnOnce(&BwdArgs<'_>) -> R,
    ) -> R {
        let (mut dq, mut dk, mut dv) = ([0f32; 0], [0f32; 0], [0f32; 0]);
        call(&BwdArgs {
            q: DevSlice::host(&self.q),
            k: DevSlice::host(&self.k),
            v: DevSlice::host(&self.v),
            o: DevSlice::host(o),
            lse: DevSlice::host(lse),
            dout: DevSlice::host(&self.dout),
            dlse: problem.has_dlse.then(|| DevSlice::host(&self.dlse)),
            dq: DevSliceMut::host(&mut dq),
            dk: DevSliceMut::host(&mut dk),
            dv: DevSliceMut::host(&mut dv),
            dbias: None,
            dcaptured: vec![],
            dsink: None,
            seq: self.seq(&problem.fwd),
            score: self.score(&problem.fwd),
            masks: crate::args::MaskArgs::default(),
            workspace: None,
        })
    }

    /// The central difference of the loss with respect to one element.
    fn slope(&self, problem: &BwdProblem, pick: impl Fn(&mut Self) -> &mut f32) -> f64 {
        const STEP: f32 = 1.0 / 1024.0;
        let at = |step: f32| {
            let mut moved = self.clone();
            *pick(&mut moved) += step;
            moved.loss(&problem.fwd, problem.has_dlse)
        };
        (at(STEP) - at(-STEP)) / f64::from(2.0 * STEP)
    }
}

fn small(mask: &str) -> FwdProblem {
    let mut problem = FwdProblem::batch(DType::F32, Dims::batch(2).seqlens(4, 5).heads(4, 2).head_dims(3, 2));
    problem.mask = mask.parse().unwrap();
    problem
}

fn elementwise(problem: &mut FwdProblem, broadcast: BiasBroadcast) {
    let strides = Strides::bhsd(problem.shape_bias(broadcast));
    problem.score.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides });
}

/// Checks that every gradient of every operand equals its finite difference.
fn gradients_hold(mut problem: BwdProblem) {
    problem.has_dlse = true;
    let fwd = problem.fwd.clone();
    let operands = Operands::of(&fwd);
    let all = operands.backward(&problem);
    let close = |gradient: f64, slope: f64, what: &str, at: usize| {
        assert!(
            (gradient - slope).abs() <= 1e-5 * (1.0 + slope.abs()),
            "{what}[{at}]: {gradient} against {slope}"
        );
    };
    let places = |span: &crate::SeqSpan, strides: Strides, head: u32, rows: u32, dim: u32| {
        let batch = span.q_batch;
        (0..rows)
            .flat_map(move |i| (0..dim).map(move |d| strides.offset(batch, i, head, d) as usize))
            .collect::<Vec<_>>()
    };
    let dims = fwd.dims;
    for (span, head, dq) in &all.dq {
        for (&gradient, at) in
            dq.iter().zip(places(span, fwd.strides.q, *head, span.seqlen_q, dims.head_dim_qk))
        {
            close(gradient, operands.slope(&problem, |o| &mut o.q[at]), "dq", at);
        }
    }
    for (span, head, dk) in &all.dk {
        for (&gradient, at) in
            dk.iter().zip(places(span, fwd.strides.k, *head, span.seqlen_k, dims.head_dim_qk))
        {
            close(gradient, operands.slope(&problem, |o| &mut o.k[at]), "dk", at);
        }
    }
    for (span, head, dv) in &all.dv {
        for (&gradient, at) in
            dv.iter().zip(places(span, fwd.strides.v, *head, span.seqlen_k, dims.head_dim_v))
        {
            close(gradient, operands.slope(&problem, |o| &mut o.v[at]), "dv", at);
        }
    }
    if fwd.score.sink {
        for (at, &gradient) in all.dsink.iter().enumerate() {
            close(gradient, operands.slope(&problem, |o| &mut o.sink[at]), "dsink", at);
        }
    }
    assert_eq!(all.dbias.len(), operands.bias.len());
    for (at, &gradient) in all.dbias.iter().enumerate() {
        close(gradient, operands.slope(&problem, |o| &mut o.bias[at]), "dbias", at);
    }
}

#[test]
fn gradients_are_finite_differences_for_every_mask() {
    for mask in ["0", "b", "t", "b:2,1", "t:0,0,2", "g:-1,4"] {
        gradients_hold(BwdProblem::new(small(mask)));
    }
}

#[test]
fn gradients_are_finite_differences_through_cap_bias_sink_and_dropout() {
    for broadcast in BiasBroadcast::ALL {
        let mut fwd = small("b:2,1");
        fwd.score.softcap = Some(0.75);
        fwd.score.softmax_scale = Some(1.5);
        fwd.score.sink = true;
        fwd.dropout.p_drop = 0.3;
        elementwise(&mut fwd, broadcast);
        let mut problem = BwdProblem::new(fwd);
        problem.write_dsink = true;
        problem.dbias =
            Some(BiasGrad { dtype: DType::F32, strides: Strides::bhsd(problem.fwd.shape_bias(broadcast)) });
        gradients_hold(problem);
    }
}

#[test]
fn gradients_are_finite_differences_under_alibi() {
    let mut fwd = small("t");
    fwd.score.bias = Bias::Alibi { per_batch: false };
    gradients_hold(BwdProblem::new(fwd));
}

/// The problem `small` with lists that name keys twice and three times, and with absent entries.
fn listed(mask: &str, entries: ListEntries) -> FwdProblem {
    let problem = small(mask);
    let lists = KeyLists::new(&problem, 6).entries(entries);
    problem.lists(lists)
}

#[test]
fn gradients_are_finite_differences_over_lists_of_keys() {
    for (mask, entries) in [
        ("0", ListEntries::Positions),
        ("b", ListEntries::Positions),
        ("t:1,1", ListEntries::Blocks { size: 2 }),
    ] {
        let mut fwd = listed(mask, entries);
        (fwd.score.softcap, fwd.score.sink, fwd.dropout.p_drop) = (Some(0.75), true, 0.3);
        elementwise(&mut fwd, BiasBroadcast::OneHead);
        let mut problem = BwdProblem::new(fwd);
        problem.write_dsink = true;
        problem.dbias = Some(BiasGrad {
            dtype: DType::F32,
            strides: Strides::bhsd(problem.fwd.shape_bias(BiasBroadcast::OneHead)),
        });
        gradients_hold(problem);
    }
}

#[test]
fn a_key_that_a_list_has_twice_counts_twice_and_one_of_all_keys_is_no_list() {
    let problem = listed("b", ListEntries::Positions);
    let mut operands = Operands::of(&problem);
    let plain = operands.forward(&small("b"));
    for rows in [[0, 1, 2, 3, 4, -1], [4, 2, 0, 3, 1, 5]] {
        operands.indices = rows.repeat(2 * 4 * 2);
        for (list, plain) in operands.forward(&problem).iter().zip(&plain) {
            assert_eq!(list.lse.len(), plain.lse.len());
            for (&list, &plain) in list.lse.iter().zip(&plain.lse) {
                assert_relative_eq!(list, plain, max_relative = 1e-12);
            }
            for (&list, &plain) in list.o.iter().zip(&plain.o) {
                assert_relative_eq!(list, plain, epsilon = 1e-12);
            }
        }
    }
    let all = small("0").lists(KeyLists::new(&small("0"), 10));
    operands.indices = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0].repeat(2 * 4 * 2);
    for (list, plain) in operands.forward(&all).iter().zip(&operands.forward(&small("0"))) {
        for (&list, &plain) in list.lse.iter().zip(&plain.lse) {
            assert_relative_eq!(list, plain + 2f64.ln(), max_relative = 1e-12);
        }
        for (&list, &plain) in list.o.iter().zip(&plain.o) {
            assert_relative_eq!(list, plain, epsilon = 1e-12);
        }
    }
}

#[test]
fn an_lse_without_its_sink_is_that_of_the_keys_and_an_infinite_sink_takes_all_weight() {
    let plain = listed("0", ListEntries::Positions);
    let mut problem = plain.clone().sink(true);
    problem.lists = problem.lists.map(|lists| lists.lse_without_sink(true));
    let mut operands = Operands::of(&problem);
    let (with, without) = (operands.forward(&problem), operands.forward(&plain));
    for (with, without) in with.iter().zip(&without) {
        assert_eq!(with.lse, without.lse);
        assert_ne!(with.o, without.o);
    }
    operands.sink.fill(f32::INFINITY);
    for head in operands.forward(&problem) {
        assert!(head.o.iter().all(|&o| o == 0.0) && head.lse.iter().all(|lse| lse.is_finite()));
    }
    for head in operands.forward(&plain.sink(true)) {
        assert!(head.o.iter().all(|&o| o == 0.0) && head.lse.iter().all(|&lse| lse == f64::INFINITY));
    }
}

#[test]
fn a_part_of_the_gradients_from_o_and_lse_is_that_part_of_the_whole() {
    for mask in ["0", "b:2,1", "g:0,-2", "lists", "lists of an lse without sinks"] {
        let mut fwd =
            if mask.starts_with("lists") { listed("0", ListEntries::Positions) } else { small(mask) };
        let apart = mask.ends_with("sinks");
        fwd.lists = fwd.lists.map(|lists| lists.lse_without_sink(apart));
        (fwd.score.softcap, fwd.score.sink, fwd.dropout.p_drop) = (Some(0.75), mask == "b:2,1" || apart, 0.3);
        elementwise(&mut fwd, BiasBroadcast::OneHead);
        let mut problem = BwdProblem::new(fwd.clone());
        problem.has_dlse = !apart;
        let operands = Operands::of(&fwd);
        let mut o = vec![f32::NAN; fwd.shape_o().num_elems() as usize];
        let mut lse = vec![f32::NAN; fwd.extents(Totals::NONE).lse_elems as usize];
        for head in operands.forward(&fwd) {
            for i in 0..head.span.seqlen_q {
                lse[head.span.lse_index(&fwd, head.i_head, i)] = head.lse[i as usize] as f32;
                for d in 0..2 {
                    let at = fwd.strides.o.offset(head.span.q_batch, i, head.i_head, d) as usize;
                    o[at] = head.o[(i * 2 + d) as usize] as f32;
                }
            }
        }
        operands.with_args(&problem, &o, &lse, |args| {
            let (rows, keys) = ([0, 3], [1, 2, 4]);
            for span in crate::seq::spans(&fwd, &args.seq).unwrap() {
                for i_head in 0..fwd.dims.num_heads_q {
                    let whole = backward_head(&problem, args, span, i_head, Precision::Exact).unwrap();
                    let part = Part { rows: &rows, keys: &keys };
                    let part = backward_part(&problem, args, span, i_head, part, Precision::Exact).unwrap();
                    let pick = |all: &[f64], rows: &[u32], dim: usize| -> Vec<f64> {
                        rows.iter().flat_map(|&r| all[r as usize * dim..][..dim].to_vec()).collect()
                    };
                    for (part, whole) in [
                        (&part.dq, pick(&whole.dq, &rows, 3)),
                        (&part.ds, pick(&whole.ds, &rows, 5)),
                        (&part.dk, pick(&whole.dk, &keys, 3)),
                        (&part.dv, pick(&whole.dv, &keys, 2)),
                        (&vec![part.dsink], vec![whole.dsink]),
                        (&part.spread.dq, pick(&whole.spread.dq, &rows, 3)),
                        (&part.spread.dk, pick(&whole.spread.dk, &keys, 3)),
                    ] {
                        assert_eq!(part.len(), whole.len());
                        for (&part, whole) in part.iter().zip(whole) {
                            assert_relative_eq!(part, whole, epsilon = 2e-6, max_relative = 2e-6);
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn a_row_that_sees_no_key_is_zero_and_its_lse_minus_infinity_or_the_sink() {
    let mut problem = small("g:0,-2");
    let operands = Operands::of(&problem);
    let first = &operands.forward(&problem)[0];
    assert!(first.o[..2].iter().all(|&o| o == 0.0));
    assert_eq!(first.lse[0], f64::NEG_INFINITY);
    problem.score.sink = true;
    let first = &operands.forward(&problem)[0];
    assert!(first.o[..2].iter().all(|&o| o == 0.0));
    assert_relative_eq!(first.lse[0], f64::from(operands.sink[0]));
}

/// A sink of -inf has no gradient, not even in rows without visible keys, whose LSE is -inf too.
#[test]
fn a_sink_of_no_weight_has_no_gradient() {
    let mut fwd = small("g:0,-2");
    fwd.score.sink = true;
    let mut operands = Operands::of(&fwd);
    operands.sink.fill(f32::NEG_INFINITY);
    let dsink = operands.backward(&BwdProblem::new(fwd)).dsink;
    assert!(!dsink.is_empty() && dsink.iter().all(|&d| d == 0.0), "{dsink:?}");
}

#[test]
fn the_plain_algorithm_sums_scores_as_the_matrix_unit_does_and_the_reference_exactly() {
    let problem = small("0");
    let operands = Operands::of(&problem);
    let lse = |precision| {
        let (q, k, v) =
            (DevSlice::host(&operands.q), DevSlice::host(&operands.k), DevSlice::host(&operands.v));
        let args = FwdArgs::new(q, k, v, DevSliceMut::host::<f32>(&mut []));
        forward(&problem, &args, precision).unwrap()[0].lse[0]
    };
    let off = |sums| (lse(Precision::AsInput(sums)) - lse(Precision::Exact)).abs();
    assert!(off(ScoreSums::F32) < 1e-6);
    let cut = off(ScoreSums::Cut { products: 32, bits: 6 });
    assert!((1e-4..0.1).contains(&cut), "{cut}");
}

#[test]
fn rows_of_p_sum_to_one_so_constant_v_gives_that_constant() {
    let mut problem = small("b:2,0");
    elementwise(&mut problem, BiasBroadcast::OneHead);
    let mut operands = Operands::of(&problem);
    operands.v.fill(0.625);
    for head in operands.forward(&problem) {
        for (o, lse) in head.o.chunks(2).zip(&head.lse) {
            if *lse > f64::NEG_INFINITY {
                assert_relative_eq!(o[0], 0.625, max_relative = 1e-14);
            }
        }
    }
}

#[test]
fn a_call_that_drops_without_a_seed_has_no_reference() {
    let mut problem = small("0");
    problem.dropout.p_drop = 0.5;
    let operands = Operands::of(&problem);
    let mut args = FwdArgs::new(
        DevSlice::host(&operands.q),
        DevSlice::host(&operands.k),
        DevSlice::host(&operands.v),
        DevSliceMut::host::<f32>(&mut []),
    );
    args.score = operands.score(&problem);
    args.score.dropout = None;
    let said = forward(&problem, &args, Precision::Exact).map(|_| ()).unwrap_err();
    assert_eq!((said.field, said.text.contains("p_drop is 0.5")), ("dropout", true), "{said}");
}

#[test]
fn a_hidden_nan_reaches_nothing_and_a_seen_one_its_rows_alone() {
    let problem = small("t");
    let mut operands = Operands::of(&problem);
    let clean = operands.forward(&problem);
    let at = problem.strides.v.offset(0, 2, 0, 0) as usize;
    operands.v[at] = f32::NAN;
    let poisoned = operands.forward(&problem);
    for (clean, poisoned) in clean.iter().zip(&poisoned) {
        assert_eq!(clean.lse, poisoned.lse);
        let touched = clean.span.i_batch == 0 && clean.i_head < 2;
        for (index, (a, b)) in clean.o.iter().zip(&poisoned.o).enumerate() {
            let (i, d) = (index / 2, index % 2);
            assert_eq!(b.is_nan(), touched && i >= 2 && d == 0);
            assert!(b.is_nan() || a == b);
        }
    }
}

#[test]
fn under_a_soft_cap_what_the_mask_hides_reaches_no_gradient() {
    // Four queries and five keys: b:0,0 hides key 0, and with two keys queries 0 and 1 see none.
    let mut fwd = small("b:0,0");
    fwd.score.softcap = Some(3.0);
    let mut operands = Operands::of(&fwd);
    for head in 0..2 {
        operands.k[fwd.strides.k.offset(0, 0, head, 0) as usize] = f32::NAN;
    }
    let all = operands.backward(&BwdProblem::new(fwd.clone()));
    for (_, _, dk) in &all.dk {
        assert!(dk.iter().all(|x| x.is_finite()) && dk[..3] == [0.0; 3], "{dk:?}");
    }
    assert!(all.dq.iter().all(|(_, _, dq)| dq.iter().all(|x| x.is_finite())));

    let few = FwdProblem::batch(DType::F32, Dims { seqlen_k: 2, ..fwd.dims });
    let fwd = few.clone().mask(fwd.mask).softcap(fwd.score.softcap);
    let mut operands = Operands::of(&fwd);
    for head in 0..4 {
        operands.q[fwd.strides.q.offset(0, 1, head, 0) as usize] = f32::INFINITY;
    }
    let all = operands.backward(&BwdProblem::new(fwd));
    for (_, _, dq) in &all.dq {
        assert!(dq.iter().all(|x| x.is_finite()) && dq[..6] == [0.0; 6], "{dq:?}");
    }
    assert!(all.dk.iter().all(|(_, _, dk)| dk.iter().all(|x| x.is_finite())));
}

#[test]
fn combining_the_halves_of_the_keys_gives_the_whole() {
    let whole = small("0");
    let operands = Operands::of(&whole);
    let expected = operands.forward(&whole);

    let cut = 2;
    let part = |range: std::ops::Range<u32>| {
        let mut problem = whole.clone();
        problem.dims.seqlen_k = range.end - range.start;
        let mut operands = operands.clone();
        // The strides stay, and the first row moves: K and V keep the batch stride of the whole.
        operands.k.drain(..(i64::from(range.start) * problem.strides.k.seq) as usize);
        operands.v.drain(..(i64::from(range.start) * problem.strides.v.seq) as usize);
        let heads = operands.forward(&problem);
        let mut o = vec![0f32; problem.shape_o().num_elems() as usize];
        let mut lse = vec![0f32; problem.extents(Totals::NONE).lse_elems as usize];
        for head in heads {
            for i in 0..head.span.seqlen_q {
                lse[head.span.lse_index(&problem, head.i_head, i)] = head.lse[i as usize] as f32;
                for d in 0..2 {
                    let at = problem.strides.o.offset(head.span.q_batch, i, head.i_head, d) as usize;
                    o[at] = head.o[(i * 2 + d) as usize] as f32;
                }
            }
        }
        (o, lse)
    };
    let parts = [part(0..cut), part(cut..5), {
        let mut empty = part(0..cut);
        empty.0.fill(f32::NAN);
        empty.1.fill(f32::NEG_INFINITY);
        empty
    }];
    let parts: Vec<_> = parts
        .iter()
        .map(|(o, lse)| PartialResult { o: DevSlice::host(o), lse: DevSlice::host(lse) })
        .collect();
    let rows = Shape { batch: 2, seq: 4, head: 4, dim: 2 };
    let problem = CombineProblem::new(3, DType::F32, DType::F32, rows);
    let args = CombineArgs { parts: &parts, o: DevSliceMut::host::<f32>(&mut []), lse: None };
    let (o, lse) = combine(&problem, &args).unwrap();
    for head in expected {
        for i in 0..4 {
            let at = head.span.lse_index(&whole, head.i_head, i);
            assert_relative_eq!(lse[at], head.lse[i as usize], epsilon = 1e-6);
            for d in 0..2 {
                let at = whole.strides.o.offset(head.span.q_batch, i, head.i_head, d) as usize;
                assert_relative_eq!(o[at], head.o[(i * 2 + d) as usize], epsilon = 1e-6);
            }
        }
    }
}

#[test]
fn a_spread_is_the_root_of_the_squares_of_the_definitions_terms() {
    let (scale, cap, p_drop) = (1.5, 0.75, 0.3);
    let mut fwd = small("0");
    (fwd.score.softmax_scale, fwd.score.softcap, fwd.score.sink, fwd.dropout.p_drop) =
        (Some(scale), Some(cap), true, p_drop);
    let mut problem = BwdProblem::new(fwd.clone());
    problem.has_dlse = true;
    let (scale, cap) = (f64::from(scale), f64::from(cap));
    let operands = Operands::of(&fwd);
    let root = |terms: &mut dyn Iterator<Item = f64>| terms.map(|x| x * x).sum::<f64>().sqrt();
    for forward in operands.forward(&fwd) {
        let (span, h) = (forward.span, forward.i_head);
        let (b, h_kv) = (span.i_batch, h / 2);
        let backward = operands.with_args(&problem, &[], &[], |args| {
            backward_head(&problem, args, span, h, Precision::Exact).unwrap()
        });
        let q = |i, d| f64::from(operands.q[fwd.strides.q.offset(b, i, h, d) as usize]);
        let k = |j, d| f64::from(operands.k[fwd.strides.k.offset(b, j, h_kv, d) as usize]);
        let v = |j, d| f64::from(operands.v[fwd.strides.v.offset(b, j, h_kv, d) as usize]);
        let dout = |i, d| f64::from(operands.dout[fwd.strides.o.offset(b, i, h, d) as usize]);
        let dlse = |i| f64::from(operands.dlse[span.lse_index(&fwd, h, i)]);
        let mask = KeepMask::new(p_drop, DropoutSeed { seed: 5, offset: 1 }, b, h, 4);
        let z = |i, j| if mask.keep(i, j) { keep_scale(p_drop) } else { 0.0 };
        let tanh = |i, j| (scale * (0..3).map(|d| q(i, d) * k(j, d)).sum::<f64>() / cap).tanh();
        let p = |i, j| (cap * tanh(i, j) - forward.lse[i as usize]).exp();
        // The terms of D, and D itself.
        let of_d = |i| {
            let terms = [0, 1].map(|d| dout(i, d) * forward.o[(i * 2 + d) as usize]);
            root(&mut [terms[0], terms[1], terms[0] + terms[1]].into_iter())
        };
        let ds = |i, j| {
            let dp = z(i, j) * (dout(i, 0) * v(j, 0) + dout(i, 1) * v(j, 1));
            p(i, j) * root(&mut [dp, of_d(i), dlse(i)].into_iter())
        };
        let ds0 = |i, j| ds(i, j) * (1.0 - tanh(i, j) * tanh(i, j)) * scale;
        let sink = f64::from(operands.sink[h as usize]);
        let close = |name: &str, spread: &[f64], expected: Vec<f64>| {
            assert_eq!(spread.len(), expected.len(), "{name}");
            for (&spread, expected) in spread.iter().zip(expected) {
                assert_relative_eq!(spread, expected, max_relative = 1e-9);
            }
        };
        let all = |rows: u32, dim: u32, term: &dyn Fn(u32, u32) -> f64| -> Vec<f64> {
            (0..rows).flat_map(|row| (0..dim).map(move |d| (row, d))).map(|(row, d)| term(row, d)).collect()
        };
        let over_keys = |term: &dyn Fn(u32) -> f64| root(&mut (0..5).map(term));
        let over_queries = |term: &dyn Fn(u32) -> f64| root(&mut (0..4).map(term));
        close("o", &forward.spread, all(4, 2, &|i, d| over_keys(&|j| z(i, j) * p(i, j) * v(j, d))));
        let spread = backward.spread;
        close("dq", &spread.dq, all(4, 3, &|i, d| over_keys(&|j| ds0(i, j) * k(j, d))));
        close("dk", &spread.dk, all(5, 3, &|j, d| over_queries(&|i| ds0(i, j) * q(i, d))));
        close("dv", &spread.dv, all(5, 2, &|j, d| over_queries(&|i| z(i, j) * p(i, j) * dout(i, d))));
        close("ds", &spread.ds, all(4, 5, &ds));
        let of_sink = |i: u32| (sink - forward.lse[i as usize]).exp() * dlse(i).hypot(of_d(i));
        close("dsink", &[spread.dsink], vec![over_queries(&of_sink)]);
    }
}

#[test]
fn the_plain_algorithm_scales_an_fp8_p_up_before_it_is_rounded_and_down_after() {
    let dims = Dims::batch(1).seqlens(1, 1).heads(1, 1).head_dim(1);
    let problem = FwdProblem::batch(DType::E4m3Fn, dims);
    let one = [0x38u8];
    let slice = DevSlice::host(&one);
    let args = FwdArgs::new(slice, slice, slice, DevSliceMut::host::<u8>(&mut []));
    let inputs = Inputs::from(&args);
    let span = crate::seq::spans(&problem, &args.seq).unwrap()[0];
    let probability = |p: f32, precision| {
        Head::<f32>::gather(&problem, &inputs, span, 0, precision).unwrap().probability(p)
    };
    let plain = Precision::AsInput(ScoreSums::F32);
    // 2^8 is the largest power of two of the type, 2^-9 the smallest.
    let small = 2f32.powi(-12);
    assert_eq!(DType::E4m3Fn.round(f64::from(small)), 0.0);
    assert_eq!(probability(small, plain), small);
    assert_eq!(probability(0.3, plain), 0.3125);
    assert_eq!(probability(0.3, Precision::Exact), 0.3);
}

#[test]
fn a_rotary_embedding_turns_queries_and_new_keys_by_the_angles_of_their_positions() {
    const CACHED: [i32; 2] = [3, 1];
    let dims = Dims::batch(2).seqlens(2, 8).heads(2, 1).head_dims(5, 2);
    // Under a causal mask each query has a position of its own; without a mask all have that of the first.
    for (mask, advances) in [("b", 1), ("0", 0)] {
        let mut problem = FwdProblem::batch(DType::F32, dims);
        problem.mask = mask.parse().unwrap();
        problem.layout.seqused_k = true;
        problem.cache.append = Some(Append::batch(&problem, 2));
        problem.cache.rotary =
            Some(Rotary { dim: 4, pairs: RotaryPairs::Half, max_pos: 8, dtype: DType::F32 });
        let operands = Operands::of(&problem);
        let (k_new, v_new, cos, sin) = (noise(20, 9), noise(8, 10), noise(16, 11), noise(16, 12));
        let mut args = FwdArgs::new(
            DevSlice::host(&operands.q),
            DevSlice::host(&operands.k),
            DevSlice::host(&operands.v),
            DevSliceMut::host::<f32>(&mut []),
        );
        args.seq.seqused_k = Some(DevSlice::host(&CACHED));
        args.cache = CacheArgs {
            k_new: Some(DevSlice::host(&k_new)),
            v_new: Some(DevSlice::host(&v_new)),
            cos: Some(DevSlice::host(&cos)),
            sin: Some(DevSlice::host(&sin)),
            tree_mask: None,
        };
        let heads = forward(&problem, &args, Precision::Exact).unwrap();

        // The expected cache of each sequence: its cached rows, then the new rows, rotated.
        let turned = |rows: &[f32], position: &dyn Fn(usize) -> usize| -> Vec<f32> {
            let turn = |(at, row): (usize, &[f32])| {
                let angle = |pair| (cos[position(at) * 2 + pair], sin[position(at) * 2 + pair]);
                let ((c0, s0), (c1, s1)) = (angle(0), angle(1));
                let (first, second) = (row[0] * c0 - row[2] * s0, row[1] * c1 - row[3] * s1);
                [first, second, row[2] * c0 + row[0] * s0, row[3] * c1 + row[1] * s1, row[4]]
            };
            rows.chunks(5).enumerate().flat_map(turn).collect()
        };
        for (b, cached) in CACHED.map(|cached| cached as usize).into_iter().enumerate() {
            let dims = Dims { batch: 1, seqlen_k: cached as u32 + 2, ..dims };
            let alone = FwdProblem::batch(DType::F32, dims).mask(problem.mask);
            // Row `row` of Q belongs to query `row / 2`, which has one row for each of its two heads.
            let q = turned(&operands.q[b * 20..][..20], &|row| cached + advances * (row / 2));
            let k_new = turned(&k_new[b * 10..][..10], &|row| cached + row);
            let k = [&operands.k[b * 40..][..cached * 5], &k_new].concat();
            let v = [&operands.v[b * 16..][..cached * 2], &v_new[b * 4..][..4]].concat();
            let expected = Operands { q, k, v, ..operands.clone() }.forward(&alone);
            for (head, expected) in heads[b * 2..][..2].iter().zip(&expected) {
                assert_eq!((&head.o, &head.lse), (&expected.o, &expected.lse), "{mask} {b}");
            }
        }
    }
}
