//! Tests of laws that hold bit for bit, for every instruction set.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use fmha_core::{
    Bias, BiasBroadcast, BiasGrad, BwdProblem, CombineArgs, CombineProblem, DType, DevSlice, DevSliceMut,
    Device, Dims, ElementwiseBias, FwdProblem, MaskSpec, PartialResult, PlanOptions, Shape, Strides, Totals,
    VLayout,
};
use fmha_cpu::{Config, CpuBackend, Isa};
use support::{Inputs, Tensor, run_bwd, run_fwd};

fn backend(isa: Isa, threads: usize) -> Device {
    Device::new(CpuBackend::with(Config { threads: Some(threads), isa: Some(isa) }).unwrap())
}

fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

fn dims(batch: u32, seqlen_q: u32, seqlen_k: u32, heads: (u32, u32)) -> Dims {
    let (num_heads_q, num_heads_kv) = heads;
    Dims { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk: 40, head_dim_v: 24 }
}

fn problem(dtype: DType, dims: Dims) -> FwdProblem {
    FwdProblem::batch(dtype, dims).write_lse(true).mask(MaskSpec::CAUSAL)
}

fn copy(from: &Tensor, to: &mut Tensor, place: impl Fn(u32, u32, u32) -> (u32, u32, u32), shape: Shape) {
    for b in 0..shape.batch {
        for s in 0..shape.seq {
            for h in 0..shape.head {
                for d in 0..shape.dim {
                    let (b2, s2, h2) = place(b, s, h);
                    to.set(b2, s2, h2, d, from.get(b, s, h, d));
                }
            }
        }
    }
}

#[test]
fn threads_and_blocks_of_queries_change_no_bit() {
    for isa in available() {
        let inputs = Inputs::random(problem(DType::F32, dims(2, 300, 310, (2, 1))), &[], 3);
        let one = run_fwd(&backend(isa, 1), &inputs, &PlanOptions::default());
        let tiled = PlanOptions::default().tile([("block_m", "96")]);
        let other = run_fwd(&backend(isa, 3), &inputs, &tiled);
        assert!(one.o.bytes == other.o.bytes && one.lse == other.lse, "{isa} forward");

        let problem = BwdProblem::new(inputs.problem.clone());
        // There are two kv heads, so one thread computes whole heads, and five threads compute tiles of keys and of
        // queries.
        let one = run_bwd(&backend(isa, 1), &inputs, problem.clone(), None);
        let five = run_bwd(&backend(isa, 5), &inputs, problem.clone(), None);
        assert!(one == five, "{isa} backward");
        assert!(five == run_bwd(&backend(isa, 5), &inputs, problem, None), "{isa} backward again");
    }
}

#[test]
fn a_group_of_equal_lengths_is_a_batch() {
    for isa in available() {
        let backend = backend(isa, 2);
        let sizes = dims(3, 70, 130, (2, 2));
        let batch = Inputs::random(problem(DType::Bf16, sizes), &[], 4);
        let mut group = batch.clone();
        group.problem = FwdProblem::group(DType::Bf16, sizes).write_lse(true).mask(MaskSpec::CAUSAL);
        group.totals = Totals::packed(210, 390);
        (group.cu_q, group.cu_k) = (vec![0, 70, 140, 210], vec![0, 130, 260, 390]);
        let (ours, theirs) = (
            run_fwd(&backend, &batch, &PlanOptions::default()),
            run_fwd(&backend, &group, &PlanOptions::default()),
        );
        assert!(ours.o.bytes == theirs.o.bytes, "{isa}");
        for (b, h, i) in (0..3).flat_map(|b| (0..2).flat_map(move |h| (0..70).map(move |i| (b, h, i)))) {
            assert_eq!(ours.lse[(b * 2 + h) * 70 + i].to_bits(), theirs.lse[h * 210 + b * 70 + i].to_bits());
        }
    }
}

#[test]
fn a_sequence_does_not_depend_on_its_neighbours() {
    for isa in available() {
        let inputs = Inputs::random(problem(DType::F32, dims(3, 50, 200, (2, 1))), &[], 5);
        let mut turned = inputs.clone();
        let turn = |b: u32, s: u32, h: u32| ((b + 1) % 3, s, h);
        copy(&inputs.q, &mut turned.q, turn, inputs.problem.shape_q());
        copy(&inputs.k, &mut turned.k, turn, inputs.problem.shape_k());
        copy(&inputs.v, &mut turned.v, turn, inputs.problem.shape_v());
        let backend = backend(isa, 2);
        let outputs = run_fwd(&backend, &inputs, &PlanOptions::default());
        let mut expected = outputs.o.clone();
        copy(&outputs.o, &mut expected, turn, inputs.problem.shape_o());
        assert!(run_fwd(&backend, &turned, &PlanOptions::default()).o.bytes == expected.bytes, "{isa}");
    }
}

#[test]
fn col_major_v_is_row_major_v() {
    // Three queries use the row path, in which one thread computes both heads together.
    for (isa, seqlen_q) in available().flat_map(|isa| [(isa, 50), (isa, 3)]) {
        let inputs = Inputs::random(problem(DType::F16, dims(2, seqlen_q, 140, (2, 2))), &[], 6);
        let mut column = inputs.clone();
        column.problem.layout.v = VLayout::ColMajor;
        column.problem.strides.v = Strides::bhds(inputs.problem.shape_v());
        column.v = Tensor::poisoned(DType::F16, column.problem.strides.v, inputs.problem.shape_v());
        copy(&inputs.v, &mut column.v, |b, s, h| (b, s, h), inputs.problem.shape_v());
        let backend = backend(isa, 1);
        let (row, column) = (
            run_fwd(&backend, &inputs, &PlanOptions::default()),
            run_fwd(&backend, &column, &PlanOptions::default()),
        );
        assert!(row.o.bytes == column.o.bytes && row.lse == column.lse, "{isa} {seqlen_q} queries");
    }
}

#[test]
fn gqa_is_mha_with_repeated_keys() {
    for isa in available() {
        let inputs = Inputs::random(problem(DType::F32, dims(1, 90, 150, (6, 2))), &[], 7);
        let mut repeated = inputs.clone();
        repeated.problem = problem(DType::F32, dims(1, 90, 150, (6, 6)));
        repeated.k = Tensor::poisoned(DType::F32, repeated.problem.strides.k, repeated.problem.shape_k());
        repeated.v = Tensor::poisoned(DType::F32, repeated.problem.strides.v, repeated.problem.shape_v());
        for g in 0..3 {
            let place = |b: u32, s: u32, h: u32| (b, s, h * 3 + g);
            copy(&inputs.k, &mut repeated.k, place, inputs.problem.shape_k());
            copy(&inputs.v, &mut repeated.v, place, inputs.problem.shape_v());
        }
        let backend = backend(isa, 2);
        let (gqa, mha) = (
            run_fwd(&backend, &inputs, &PlanOptions::default()),
            run_fwd(&backend, &repeated, &PlanOptions::default()),
        );
        assert!(gqa.o.bytes == mha.o.bytes && gqa.lse == mha.lse, "{isa}");
    }
}

/// Rows of O that change when a value is placed at (row, column 0) of one operand.
fn rows_reached(backend: &Device, inputs: &Inputs, poison: impl Fn(&mut Inputs)) -> Vec<bool> {
    let mut poisoned = inputs.clone();
    poison(&mut poisoned);
    let outputs = run_fwd(backend, &poisoned, &PlanOptions::default());
    let shape = inputs.problem.shape_o();
    (0..shape.seq).map(|i| (0..shape.dim).any(|d| outputs.o.get(0, i, 0, d).is_nan())).collect()
}

#[test]
fn nan_reaches_only_the_rows_that_see_it() {
    for isa in available() {
        let backend = backend(isa, 2);
        let masks = ["0", "t", "b:20,3,2", "g:5,-2"];
        for (mask, dtype) in masks.into_iter().flat_map(|mask| [(mask, DType::F32), (mask, DType::Bf16)]) {
            let mut problem = problem(dtype, dims(1, 70, 150, (1, 1)));
            problem.mask = mask.parse().unwrap();
            let inputs = Inputs::random(problem, &[], 8);
            let band = inputs.problem.mask.band(70, 150);
            for j in [0, 1, 63, 100, 149] {
                let seen: Vec<bool> = (0..70).map(|i| band.visible(i, j)).collect();
                for (name, reached) in [
                    ("K", rows_reached(&backend, &inputs, |x| x.k.set(0, j, 0, 0, f64::NAN))),
                    ("V", rows_reached(&backend, &inputs, |x| x.v.set(0, j, 0, 0, f64::NAN))),
                ] {
                    assert_eq!(reached, seen, "{isa} {mask} {name} {j}");
                }
            }
        }
    }
}

#[test]
fn nan_reaches_only_the_gradients_that_it_touches() {
    for isa in available() {
        for threads in [1, 5] {
            let mut problem = problem(DType::F32, dims(1, 60, 60, (1, 1)));
            problem.mask = "t".parse().unwrap();
            let mut inputs = Inputs::random(problem, &[], 9);
            // Query 20 sees keys 0..=20: a NaN there changes dK and dV of those keys, and dQ of the query itself.
            inputs.q.set(0, 20, 0, 3, f64::NAN);
            let backward = BwdProblem::new(inputs.problem.clone());
            let gradients = run_bwd(&backend(isa, threads), &inputs, backward.clone(), None);
            let nan_rows = |bytes: &[u64], strides: Strides, dim: u32| -> Vec<u32> {
                let bytes: &[u8] = bytemuck::cast_slice(bytes);
                let at = |i, d| strides.offset(0, i, 0, d) as usize * 4;
                (0..60).filter(|&i| (0..dim).any(|d| DType::F32.read(&bytes[at(i, d)..]).is_nan())).collect()
            };
            let touched: Vec<u32> = (0..=20).collect();
            assert_eq!(nan_rows(&gradients.dq, backward.dq, 40), [20], "{isa} dQ");
            assert_eq!(nan_rows(&gradients.dk, backward.dk, 40), touched, "{isa} dK");
            assert_eq!(nan_rows(&gradients.dv, backward.dv, 24), touched, "{isa} dV");
        }
    }
}

/// Under a soft-cap, too, hidden pairs reach no gradient: the cap's derivative at a hidden NaN score is NaN, and
/// must not be multiplied by P = 0.
#[test]
fn under_a_soft_cap_too_what_the_mask_hides_reaches_no_gradient() {
    for (isa, threads) in available().flat_map(|isa| [(isa, 1), (isa, 5)]) {
        for (seqlen_q, seqlen_k, mask) in
            [(40, 40, "b:1,19"), (20, 40, "b:1,19"), (60, 20, "b:1,19"), (70, 70, "b")]
        {
            let mut problem = problem(DType::F32, dims(1, seqlen_q, seqlen_k, (1, 1)));
            (problem.mask, problem.score.softcap) = (mask.parse().unwrap(), Some(3.0));
            let inputs = Inputs::random(problem, &[], 11);
            let band = inputs.problem.mask.band(seqlen_q, seqlen_k);
            let backward = BwdProblem::new(inputs.problem.clone());
            let rows = |bytes: &[u64], strides: Strides, count: u32, dim: u32| -> Vec<Vec<f64>> {
                let bytes: &[u8] = bytemuck::cast_slice(bytes);
                let at = |i, d| strides.offset(0, i, 0, d) as usize * 4;
                (0..count).map(|i| (0..dim).map(|d| DType::F32.read(&bytes[at(i, d)..])).collect()).collect()
            };
            // Infinite queries are placed too: in rows that see keys, and in rows that see none.
            let places = [0, 1, 5, 18, 19, 30].map(|row| [(true, row), (false, row)]).into_iter().flatten();
            for (in_q, row) in places.filter(|&(in_q, row)| row < if in_q { seqlen_q } else { seqlen_k }) {
                let mut poisoned = inputs.clone();
                for d in 0..40 {
                    let (tensor, value) =
                        if in_q { (&mut poisoned.q, f64::INFINITY) } else { (&mut poisoned.k, f64::NAN) };
                    tensor.set(0, row, 0, d, value);
                }
                let touched = |i: u32| if in_q { i == row } else { band.visible(i, row) };
                let what = format!("{isa} {seqlen_q}x{seqlen_k} {mask} in_q {in_q} row {row}");
                let gradients = run_bwd(&backend(isa, threads), &poisoned, backward.clone(), None);
                let dq = rows(&gradients.dq, backward.dq, seqlen_q, 40);
                for (i, dq) in (0..).zip(&dq) {
                    let sees = (0..seqlen_k).any(|j| band.visible(i, j));
                    let sound = if sees { !touched(i) } else { true };
                    assert!(!sound || dq.iter().all(|x| x.is_finite()), "{what}: dQ of {i}: {dq:?}");
                    assert!(sees || dq.iter().all(|&x| x == 0.0), "{what}: dQ of {i}: {dq:?}");
                }
                for (name, found, dim) in [("dK", &gradients.dk, 40), ("dV", &gradients.dv, 24)] {
                    let strides = if name == "dK" { backward.dk } else { backward.dv };
                    for (j, found) in (0..).zip(rows(found, strides, seqlen_k, dim)) {
                        let seen = |wanted: &dyn Fn(u32) -> bool| {
                            (0..seqlen_q).any(|i| band.visible(i, j) && wanted(i))
                        };
                        let sound = !seen(&touched);
                        assert!(
                            !sound || found.iter().all(|x| x.is_finite()),
                            "{what}: {name} of {j}: {found:?}"
                        );
                        assert!(seen(&|_| true) || found.iter().all(|&x| x == 0.0), "{what}: {name} of {j}");
                    }
                }
            }
        }
    }
}

#[test]
fn combined_halves_are_the_whole() {
    for isa in available() {
        let backend = backend(isa, 2);
        let mut whole = Inputs::random(problem(DType::F32, dims(2, 40, 200, (2, 1))), &[], 10);
        whole.problem.mask = MaskSpec::NONE;
        let expected = run_fwd(&backend, &whole, &PlanOptions::default());
        let half = |first: u32, count: u32| {
            let mut part = whole.clone();
            part.problem = problem(DType::F32, dims(2, 40, count, (2, 1)));
            part.problem.mask = MaskSpec::NONE;
            part.k = Tensor::poisoned(DType::F32, part.problem.strides.k, part.problem.shape_k());
            part.v = Tensor::poisoned(DType::F32, part.problem.strides.v, part.problem.shape_v());
            for (from, to, dim) in [(&whole.k, &mut part.k, 40), (&whole.v, &mut part.v, 24)] {
                for (b, s, d) in
                    (0..2).flat_map(|b| (0..count).flat_map(move |s| (0..dim).map(move |d| (b, s, d))))
                {
                    to.set(b, s, 0, d, from.get(b, first + s, 0, d));
                }
            }
            part.spans = (0..2).map(|b| fmha_core::SeqSpan { seqlen_k: count, ..whole.spans[b] }).collect();
            run_fwd(&backend, &part, &PlanOptions::default())
        };
        let (left, right) = (half(0, 77), half(77, 123));
        // A part without visible keys is neutral, whatever its O holds.
        let empty_o = Tensor::poisoned(DType::F32, whole.problem.strides.o, whole.problem.shape_o());
        let empty_lse = vec![f32::NEG_INFINITY; left.lse.len()];
        let rows = Shape { batch: 2, seq: 40, head: 2, dim: 24 };
        let mut problem = CombineProblem::new(3, DType::F32, DType::F32, rows);
        problem.write_lse = true;
        let problem = problem.validate().unwrap();
        let (mut o, mut lse) = (empty_o.clone(), empty_lse.clone());
        let parts = [(&left.o, &left.lse), (&empty_o, &empty_lse), (&right.o, &right.lse)]
            .map(|(o, lse)| PartialResult { o: o.slice(), lse: DevSlice::host(lse) });
        let mut args = CombineArgs::new(&parts, o.slice_mut()).lse(DevSliceMut::host(&mut lse));
        let plan = backend.plan_combine(&problem, &PlanOptions::default()).unwrap();
        plan.run(&mut args, &backend.default_stream()).unwrap();
        for (ours, expected) in lse.iter().zip(&expected.lse) {
            assert!((ours - expected).abs() < 2e-6, "{isa} LSE {ours} {expected}");
        }
        for (b, s, h, d) in (0..2).flat_map(|b| {
            (0..40).flat_map(move |s| (0..2).flat_map(move |h| (0..24).map(move |d| (b, s, h, d))))
        }) {
            let (ours, expected) = (o.get(b, s, h, d), expected.o.get(b, s, h, d));
            assert!((ours - expected).abs() < 2e-6, "{isa} O {ours} {expected}");
        }
    }
}

/// Copy of the inputs with an f32 bias for each head, which replaces the mask and the bias.
fn biased(inputs: &Inputs, value: impl Fn(u32, u32, u32) -> f64) -> Inputs {
    let mut with = inputs.clone();
    let broadcast = BiasBroadcast::OneHead;
    let shape = with.problem.shape_bias(broadcast);
    let strides = Strides::bhsd(shape);
    with.problem.mask = MaskSpec::NONE;
    with.problem.score.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides });
    with.slopes = vec![];
    let mut bias = Tensor::poisoned(DType::F32, strides, shape);
    for (h, i, j) in
        (0..shape.head).flat_map(|h| (0..shape.seq).flat_map(move |i| (0..shape.dim).map(move |j| (h, i, j))))
    {
        bias.set(0, i, h, j, value(h, i, j));
    }
    with.bias = Some(bias);
    with
}

fn have_the_same_bits(backend: &Device, one: &Inputs, other: &Inputs, what: &str) {
    let options = PlanOptions::default();
    let (a, b) = (run_fwd(backend, one, &options), run_fwd(backend, other, &options));
    assert!(a.o.bytes == b.o.bytes && a.lse == b.lse, "{what}: forward");
    let gradients = |of: &Inputs| run_bwd(backend, of, BwdProblem::new(of.problem.clone()), None);
    let (a, b) = (gradients(one), gradients(other));
    assert!(a.dq == b.dq, "{what}: dQ");
    assert!(a.dk == b.dk, "{what}: dK");
    assert!(a.dv == b.dv, "{what}: dV");
}

/// A mask equals a bias of -inf for its hidden pairs, in more than one tile of queries and of keys: partly masked
/// tiles are computed like unmasked ones, and give no row another sum.
#[test]
fn a_mask_is_a_bias_of_minus_infinity_where_it_hides() {
    for (isa, threads) in available().flat_map(|isa| [(isa, 1), (isa, 3)]) {
        let backend = backend(isa, threads);
        for mask in ["b", "b:60,5", "t:30,9,3"] {
            let mut masked = Inputs::random(problem(DType::F32, dims(1, 150, 250, (2, 1))), &[], 14);
            masked.problem.mask = mask.parse().unwrap();
            let band = masked.problem.mask.band(150, 250);
            let hides = |_, i, j| if band.visible(i, j) { 0.0 } else { f64::NEG_INFINITY };
            let what = format!("{isa} {threads} {mask}");
            have_the_same_bits(&backend, &masked, &biased(&masked, hides), &what);
        }
    }
}

/// ALiBi equals a bias of slopes times distances. Slopes are powers of two, so that the products are exact.
#[test]
fn alibi_is_a_bias_of_slopes_times_distances() {
    for isa in available() {
        let mut sloped = Inputs::random(problem(DType::F32, dims(1, 200, 200, (2, 1))), &[], 15);
        sloped.problem.mask = MaskSpec::NONE;
        sloped.problem.score.bias = Bias::Alibi { per_batch: false };
        sloped.slopes = vec![0.5, 0.0625];
        let slopes = sloped.slopes.clone();
        let term = |h: u32, i: u32, j: u32| f64::from(-slopes[h as usize]) * f64::from(i.abs_diff(j));
        have_the_same_bits(&backend(isa, 2), &sloped, &biased(&sloped, term), &isa.to_string());
    }
}

fn row_of(bytes: &[u64], strides: Strides, i: u32, dim: u32) -> Vec<f64> {
    let bytes: &[u8] = bytemuck::cast_slice(bytes);
    (0..dim).map(|d| DType::F32.read(&bytes[strides.offset(0, i, 0, d) as usize * 4..])).collect()
}

#[test]
fn what_a_nan_does_not_touch_keeps_its_value() {
    for (isa, threads) in available().flat_map(|isa| [(isa, 1), (isa, 5)]) {
        let backend = backend(isa, threads);
        let mut clean = Inputs::random(problem(DType::F32, dims(1, 150, 150, (1, 1))), &[], 16);
        clean.problem.mask = "t".parse().unwrap();
        let backward = BwdProblem::new(clean.problem.clone());
        let mut poisoned = clean.clone();
        // The NaN of a query reaches the gradients of keys up to its own position.
        poisoned.q.set(0, 100, 0, 3, f64::NAN);
        let [wanted, found] = [&clean, &poisoned].map(|of| run_bwd(&backend, of, backward.clone(), None));
        for (name, wanted, found, strides, dim) in
            [("dK", &wanted.dk, &found.dk, backward.dk, 40), ("dV", &wanted.dv, &found.dv, backward.dv, 24)]
        {
            for j in 101..150 {
                let (wanted, found) = (row_of(wanted, strides, j, dim), row_of(found, strides, j, dim));
                let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * (1.0 + a.abs());
                assert!(
                    wanted.iter().zip(&found).all(near),
                    "{isa} {threads} {name} {j}: {found:?}, {wanted:?}"
                );
            }
        }
    }
}

/// An infinite column of queries leaves the other column's results unchanged. The query sees no key: all its scores
/// are minus infinity, whether it is infinite or only very large.
#[test]
fn an_infinite_column_of_queries_leaves_the_other_columns_of_dk_their_bits() {
    for (isa, threads) in available().flat_map(|isa| [(isa, 1), (isa, 5)]) {
        let mut inputs = Inputs::random(problem(DType::F32, dims(1, 150, 150, (1, 1))), &[], 17);
        inputs.problem.mask = MaskSpec::NONE;
        for row in 0..150 {
            inputs.q.set(0, row, 0, 3, 0.0);
            inputs.k.set(0, row, 0, 3, -100.0);
        }
        let backward = BwdProblem::new(inputs.problem.clone());
        let [large, infinite] = [3e38, f64::INFINITY].map(|x| {
            let mut inputs = inputs.clone();
            inputs.q.set(0, 20, 0, 3, x);
            run_bwd(&backend(isa, threads), &inputs, backward.clone(), None)
        });
        for j in 0..150 {
            let [large, infinite] = [&large, &infinite].map(|of| row_of(&of.dk, backward.dk, j, 40));
            for (d, (large, infinite)) in large.iter().zip(&infinite).enumerate() {
                let as_wanted = if d == 3 { infinite.is_nan() } else { infinite == large };
                assert!(as_wanted && large.is_finite(), "{isa} {threads} key {j}, column {d}: {infinite}");
            }
        }
    }
}

/// Nothing is written outside the rows of dBias, whose stride is larger than their length, and which are longer
/// than a tile.
#[test]
fn nothing_is_written_beside_the_rows_of_dbias() {
    for isa in available() {
        let plain = Inputs::random(problem(DType::F32, dims(1, 100, 250, (2, 1))), &[], 18);
        let inputs = biased(&plain, |h, i, j| f64::from(h + i) * 0.01 - f64::from(j) * 0.003);
        let mut backward = BwdProblem::new(inputs.problem.clone());
        let strides = Strides { batch: 2 * 100 * 600, head: 100 * 600, seq: 600, dim: 1 };
        backward.dbias = Some(BiasGrad { dtype: DType::F32, strides });
        let gradients = run_bwd(&backend(isa, 2), &inputs, backward, Some(&isa.to_string()));
        let bytes: &[u8] = bytemuck::cast_slice(&gradients.dbias);
        for (h, i, j) in (0..2).flat_map(|h| (0..100).flat_map(move |i| (0..600).map(move |j| (h, i, j)))) {
            let at = strides.offset(0, i, h, j) as usize * 4;
            let Some(bytes) = bytes.get(at..at + 4) else { break };
            assert_eq!(DType::F32.read(bytes).is_nan(), j >= 250, "{isa} head {h} row {i} column {j}");
        }
    }
}

#[test]
fn o_of_fp8_is_multiplied_by_its_scale() {
    for (isa, seqlen_q) in available().flat_map(|isa| [(isa, 2), (isa, 20)]) {
        let mut problem = problem(DType::E4m3Fn, dims(1, seqlen_q, 30, (1, 1)));
        (problem.dtypes.o, problem.scales.scale_o) = (DType::E4m3Fn, true);
        let mut inputs = Inputs::random(problem, &[], 19);
        for (j, d) in (0..30).flat_map(|j| (0..24).map(move |d| (j, d))) {
            inputs.v.set(0, j, 0, d, 1.0);
        }
        assert_eq!(inputs.scale_o, [1.75]);
        let o = run_fwd(&backend(isa, 1), &inputs, &PlanOptions::default()).o;
        for (i, d) in (0..seqlen_q).flat_map(|i| (0..24).map(move |d| (i, d))) {
            assert_eq!(o.get(0, i, 0, d), 1.75, "{isa} {seqlen_q} queries, row {i}");
        }
    }
}

#[test]
fn the_lse_of_parts_is_none_where_one_of_them_has_none() {
    let shape = Shape { batch: 1, seq: 4, head: 1, dim: 2 };
    let mut problem = CombineProblem::new(2, DType::F32, DType::F32, shape);
    problem.write_lse = true;
    let problem = problem.validate().unwrap();
    let infinity = f32::NEG_INFINITY;
    let (left, right) = ([f32::NAN, infinity, infinity, 1.0], [infinity, f32::NAN, infinity, f32::NAN]);
    let (part, mut o, mut lse) = ([1f32; 8], [9f32; 8], [9f32; 4]);
    let parts = [left, right];
    let parts =
        parts.each_ref().map(|lse| PartialResult { o: DevSlice::host(&part), lse: DevSlice::host(lse) });
    let backend = backend(Isa::Portable, 1);
    let plan = backend.plan_combine(&problem, &PlanOptions::default()).unwrap();
    let (o_slice, lse_slice) = (DevSliceMut::host(&mut o), DevSliceMut::host(&mut lse));
    let mut args = CombineArgs::new(&parts, o_slice).lse(lse_slice);
    plan.run(&mut args, &backend.default_stream()).unwrap();
    assert!([0, 1, 3].iter().all(|&row| lse[row].is_nan()) && lse[2] == infinity, "{lse:?}");
    assert!([0, 1, 3].iter().all(|&row| o[2 * row].is_nan()) && o[4] == 0.0, "{o:?}");
}

#[test]
fn the_keep_mask_is_that_of_the_definition() {
    let mut problem = problem(DType::F32, dims(2, 20, 33, (2, 1)));
    (problem.dropout.p_drop, problem.dropout.write_keep_mask) = (0.4, true);
    let inputs = Inputs::random(problem, &[], 11);
    let outputs = run_fwd(&backend(Isa::Portable, 2), &inputs, &PlanOptions::default());
    for (b, h, i, j) in (0..2)
        .flat_map(|b| (0..2).flat_map(move |h| (0..20).flat_map(move |i| (0..33).map(move |j| (b, h, i, j)))))
    {
        let mask = fmha_core::dropout::KeepMask::new(0.4, inputs.score().dropout.unwrap(), b, h, 2);
        let kept = outputs.keep[(((b * 2 + h) * 20 + i) * 33 + j) as usize];
        assert_eq!(kept, u8::from(mask.keep(i, j)));
    }
}

#[test]
fn wrong_requests_are_refused_by_name_and_number() {
    let backend = backend(Isa::Portable, 1);
    let inputs = Inputs::random(problem(DType::F32, dims(1, 8, 8, (1, 1))), &[], 12);
    let valid = inputs.problem.clone().validate().unwrap();
    let refusal = |kernel: Option<&str>, tile: &[(&str, &str)]| {
        let mut options = PlanOptions::default().tile(tile.iter().copied());
        options.kernel = kernel.map(str::to_owned);
        backend.plan_fwd(&valid, &options).unwrap_err().to_string()
    };
    assert!(refusal(Some("sm90-fwd"), &[]).contains("known: cpu-fwd, cpu-bwd, cpu-combine"));
    assert!(refusal(Some("cpu-bwd"), &[]).contains("cpu-fwd"));
    assert!(refusal(None, &[("block_k", "3")]).contains("block_k=3 is unknown (known: block_m, block_n)"));
    assert!(refusal(None, &[("block_m", "7")]).contains("block_m 7 is not a multiple of 8"));

    let plan = backend.plan_fwd(&valid, &PlanOptions::default()).unwrap();
    let (mut o, mut short) = (inputs.q.clone(), vec![0u64; 3]);
    let mut args = fmha_core::FwdArgs::new(
        inputs.q.slice(),
        inputs.k.slice(),
        inputs.v.slice(),
        DevSliceMut::host(&mut short),
    );
    let mut lse = vec![0f32; 8];
    args.lse = Some(DevSliceMut::host(&mut lse));
    let text = plan.run(&mut args, &backend.default_stream()).unwrap_err().to_string();
    assert!(text.contains("o has 24 bytes"), "{text}");
    args.o = o.slice_mut();
    args.lse = None;
    let text = plan.run(&mut args, &backend.default_stream()).unwrap_err().to_string();
    assert!(text.contains("lse is missing"), "{text}");

    let mut group = FwdProblem::group(DType::F32, dims(2, 8, 8, (1, 1)));
    group.score.bias = Bias::None;
    let mut group = Inputs::random(group, &[[(4, 4), (4, 4)], [(4, 4), (4, 4)]], 13);
    let valid = group.problem.clone().validate().unwrap();
    group.cu_q[1] = 9;
    let plan = backend.plan_fwd(&valid, &PlanOptions::default()).unwrap();
    let mut args = fmha_core::FwdArgs::new(group.q.slice(), group.k.slice(), group.v.slice(), o.slice_mut())
        .seq(group.seq());
    let text = plan.run(&mut args, &backend.default_stream()).unwrap_err().to_string();
    assert!(text.contains("cu_seqlens_q[1] 9"), "{text}");
}

#[test]
fn memory_that_the_system_refuses_is_an_error_with_its_size() {
    let backend = backend(Isa::Portable, 1);
    let text = backend.memory().alloc(1 << 60).unwrap_err().to_string();
    assert!(text.contains(&(1u64 << 60).to_string()), "{text}");
}

#[test]
fn a_plan_runs_on_the_device_that_made_it_alone() {
    let problem =
        FwdProblem::batch(DType::F32, fmha_core::Dims::batch(1).seqlens(8, 8).heads(1, 1).head_dim(8))
            .validate()
            .unwrap();
    let (q, mut o) = ([0.5f32; 64], [7f32; 64]);
    let q = fmha_core::DevSlice::host(&q);
    let tile = vec![("block_m".to_owned(), "8".to_owned())];
    let maker = backend(Isa::Portable, 1);
    let plan = maker.plan_fwd(&problem, &PlanOptions::default().tile(tile)).unwrap();
    let mut args = fmha_core::FwdArgs::new(q, q, q, DevSliceMut::host(&mut o));
    // Streams of other devices: with another instruction set, where this tile would write outside its buffers, and
    // with an equal configuration.
    let others = Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(|isa| backend(isa, 1));
    for other in others {
        let error = plan.run(&mut args, &other.default_stream()).unwrap_err().to_string();
        assert!(error.starts_with("stream is of the device"), "{error}");
    }
    plan.run(&mut args, &maker.default_stream()).unwrap();
    assert!(o.iter().all(|&o| o == 0.5));
}

/// A product is an f32 number before `softmax_scale` multiplies it. Beyond f32 (here 2^128) its row is right
/// where the scale has been multiplied into Q; else it is an infinity, which the scale does not bring back: a
/// key far below is as if hidden, one far above makes NaN of its row. Other rows see nothing of it.
#[test]
fn a_product_beyond_f32_is_right_or_an_infinity_whatever_the_scale() {
    let far_key = 2u32;
    for (isa, dtype) in available().flat_map(|isa| [DType::F32, DType::Bf16].map(|dtype| (isa, dtype))) {
        for (dim, rows, sign) in [1, 8, 40, 64]
            .into_iter()
            .flat_map(|dim| [(dim, 1, 1.0), (dim, 1, -1.0), (dim, 40, 1.0), (dim, 40, -1.0)])
        {
            let sizes = Dims { head_dim_qk: dim, ..dims(1, rows, 6, (1, 1)) };
            let problem = FwdProblem::batch(dtype, sizes).write_lse(true).softmax_scale(2f32.powi(-126));
            let mut inputs = Inputs::random(problem, &[], 5);
            let far_row = rows / 2;
            for i in 0..rows {
                inputs.q.set(0, i, 0, 0, if i == far_row { 2f64.powi(64) } else { 0.0 });
            }
            inputs.k.set(0, far_key, 0, 0, sign * 2f64.powi(64));
            let ran = run_fwd(&backend(isa, 2), &inputs, &PlanOptions::default());
            // The scale is so small that all other products become 0.
            let of = |far_weight: f64, d: u32| {
                let weight = |j: u32| if j == far_key { far_weight } else { 1.0 };
                let sum: f64 = (0..6).map(weight).sum();
                (0..6).map(|j| weight(j) * inputs.v.get(0, j, 0, d)).sum::<f64>() / sum
            };
            for (i, d) in (0..rows).flat_map(|i| (0..24).map(move |d| (i, d))) {
                let given = ran.o.get(0, i, 0, d);
                let is = |weight: f64| (given - of(weight, d)).abs() <= 0.02;
                let holds = match (i == far_row, sign > 0.0) {
                    (false, _) => is(1.0),
                    (true, true) => given.is_nan() || is(4f64.exp()),
                    (true, false) => is(0.0) || is((-4f64).exp()),
                };
                assert!(holds, "{isa} {dtype} D {dim}, {rows} rows, sign {sign}: O[{i}, {d}] is {given}");
            }
        }
    }
}
