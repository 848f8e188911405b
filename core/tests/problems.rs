//! Tests that valid problems never leave their extents, and that refusals name the field and the number.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_core::args::SeqArgs;
use fmha_core::problem::MAX_SEQLEN;
use fmha_core::seq::spans;
use fmha_core::{
    Append, Bias, BiasBroadcast, BiasGrad, BwdProblem, CombineProblem, DType, Descale, DevSlice, Dims,
    ElementwiseBias, Extents, FwdProblem, KvLayout, MaskSpec, Merge, ProblemError, QLayout, Rotary,
    RotaryPairs, Shape, Strides, Totals, VLayout, ValidFwd,
};
use proptest::prelude::*;

fn strides() -> impl Strategy<Value = Strides> {
    let stride = prop_oneof![
        4 => -3i64..200,
        1 => Just(i64::MAX),
        1 => Just(i64::MIN),
        1 => (1i64 << 31) - 2..(1 << 31) + 2,
        1 => (1i64 << 60) - 2..(1 << 62) + 2,
    ];
    let dim = prop_oneof![8 => Just(1i64), 1 => -2i64..30];
    (stride.clone(), stride.clone(), stride, dim).prop_map(|(batch, seq, head, dim)| Strides {
        batch,
        seq,
        head,
        dim,
    })
}

prop_compose! {
    fn dims()(
        batch in 0u32..4,
        seqlen_q in 0u32..6,
        seqlen_k in 0u32..6,
        num_heads_q in 0u32..7,
        num_heads_kv in 0u32..4,
        head_dim_qk in 0u32..6,
        head_dim_v in 0u32..6,
    ) -> Dims {
        Dims { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v }
    }
}

prop_compose! {
    /// Random problems; with `sound`, valid in everything but the strides, so that the strides alone decide.
    fn problem(sound: bool)(
        mut dims in dims(),
        packed in any::<(bool, bool)>(),
        dtypes in (0usize..7, 0usize..7, 0usize..7),
        layouts in (strides(), strides(), strides(), strides()),
        contiguous in any::<[bool; 4]>(),
        col_major in any::<bool>(),
        scale in proptest::option::of(any::<f32>()),
        softcap in proptest::option::of(any::<f32>()),
        p_drop in prop_oneof![Just(0.0f32), -0.5f32..1.5],
        descale in any::<bool>(),
    ) -> FwdProblem {
        if sound {
            dims.batch += 1;
            dims.num_heads_kv += 1;
            dims.num_heads_q = dims.num_heads_kv * (1 + dims.num_heads_q % 3);
            (dims.head_dim_qk, dims.head_dim_v) = (dims.head_dim_qk + 1, dims.head_dim_v + 1);
        }
        let mut problem = FwdProblem::batch(DType::ALL[dtypes.0], dims);
        problem.layout.q = if packed.0 { QLayout::Packed } else { QLayout::Batch };
        problem.layout.kv = if packed.1 { KvLayout::Packed } else { KvLayout::Strided };
        if dtypes.1 > 3 && !sound {
            problem.dtypes.v = DType::ALL[dtypes.1];
        }
        if dtypes.2 > 3 && !sound {
            problem.dtypes.o = DType::ALL[dtypes.2];
        }
        if col_major {
            problem.layout.v = VLayout::ColMajor;
        }
        let pick = |contiguous, shape, other| if contiguous { Strides::bshd(shape) } else { other };
        problem.strides.q = pick(contiguous[0], problem.shape_q(), layouts.0);
        problem.strides.k = pick(contiguous[1], problem.shape_k(), layouts.1);
        problem.strides.v = match (contiguous[2], col_major) {
            (true, true) => Strides::bhds(problem.shape_v()),
            (contiguous, _) => pick(contiguous, problem.shape_v(), layouts.2),
        };
        problem.strides.o = pick(contiguous[3], problem.shape_o(), layouts.3);
        if !sound {
            (problem.score.softmax_scale, problem.score.softcap, problem.dropout.p_drop) = (scale, softcap, p_drop);
            problem.scales.descale_q = if descale { Descale::PerTensor } else { Descale::None };
        }
        problem
    }
}

/// Offsets of all elements, computed from the definition of strides in 128 bits.
fn offsets(strides: Strides, shape: Shape) -> Vec<i128> {
    let mut all = Vec::new();
    for b in 0..shape.batch {
        for s in 0..shape.seq {
            for h in 0..shape.head {
                for d in 0..shape.dim {
                    all.push(
                        [(b, strides.batch), (s, strides.seq), (h, strides.head), (d, strides.dim)]
                            .iter()
                            .map(|&(index, stride)| i128::from(index) * i128::from(stride))
                            .sum(),
                    );
                }
            }
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 4000,
        max_global_rejects: 400_000,
        failure_persistence: None,
        ..ProptestConfig::default() })]

    #[test]
    fn what_validates_never_indexes_out_of_its_extents(problem in problem(true)) {
        prop_assume!(problem.clone().validate().is_ok());
        let Ok(valid) = problem.validate() else { return Ok(()) };
        let dtypes = [valid.dtypes.qk, valid.dtypes.qk, valid.dtypes.v, valid.dtypes.o];
        // At planning the number of packed rows is unknown; each call's number is checked with its arguments.
        let Extents { q, k, v, o, .. } = valid.extents(Totals::packed(2, 2));
        let tensors = [(valid.strides.q, q), (valid.strides.k, k), (valid.strides.v, v), (valid.strides.o, o)];
        for ((strides, shape), dtype) in tensors.into_iter().zip(dtypes) {
            let extent = i128::from(ValidFwd::extent_bytes(strides, shape, dtype));
            let size = i128::from(dtype.size_bytes());
            for offset in offsets(strides, shape) {
                prop_assert!(offset >= 0 && (offset + 1) * size <= extent, "{strides:?} {shape:?}");
            }
        }
        let mut written = offsets(valid.strides.o, o);
        written.sort_unstable();
        prop_assert!(written.windows(2).all(|pair| pair[0] != pair[1]), "an element of O is written twice");
    }

    #[test]
    fn a_refusal_names_its_field_and_a_number(problem in problem(false)) {
        if let Err(error) = problem.validate() {
            named(&error)?;
        }
    }

    #[test]
    fn spans_lie_inside_the_packed_tensors_or_are_refused(
        cu_q in prop::collection::vec(-2i32..14, 4),
        cu_k in prop::collection::vec(-2i32..14, 4),
        used in prop::collection::vec(-1i32..6, 3),
    ) {
        let dims = Dims {
            batch: 3, seqlen_q: 6, seqlen_k: 6, num_heads_q: 1, num_heads_kv: 1, head_dim_qk: 2, head_dim_v: 2,
        };
        let mut problem = FwdProblem::group(DType::F32, dims);
        problem.layout.seqused_k = true;
        let args = SeqArgs::default().totals(Totals::packed(10, 11)).cu_seqlens_q(DevSlice::host(&cu_q)).cu_seqlens_k(DevSlice::host(&cu_k)).seqused_k(DevSlice::host(&used));
        match spans(&problem, &args) {
            Ok(spans) => for span in spans {
                prop_assert!(span.q_row + span.seqlen_q <= 10 && span.seqlen_q <= 6);
                prop_assert!(span.k_row + span.seqlen_k <= 11 && span.seqlen_k <= 6);
            },
            Err(error) => named(&error)?,
        }
    }
}

/// Checks that the sentence starts with the field's name and contains a number.
fn named(error: &ProblemError) -> Result<(), TestCaseError> {
    prop_assert!(error.text.starts_with(error.field), "`{}` does not name `{}`", error.text, error.field);
    let number = error.text.chars().any(|c| c.is_ascii_digit());
    let number = number || ["NaN", "inf"].iter().any(|word| error.text.contains(word));
    // Missing values, and a value given in two ways, have sentences of their own without a number.
    let number =
        number || ["missing", "true", "false", "elementwise"].iter().any(|word| error.text.contains(word));
    let dtype = error.field.contains("dtype");
    prop_assert!(number || dtype, "`{}` has no number", error.text);
    Ok(())
}

const DIMS: Dims = Dims::batch(2).seqlens(3, 5).heads(4, 2).head_dim(8);

/// Name of a field, text that the refusal must contain, and function that makes the field wrong.
type Wrong<P> = (&'static str, &'static str, fn(&mut P));

#[test]
fn every_wrong_forward_problem_is_refused_by_field_and_number() {
    let table: &[Wrong<FwdProblem>] = &[
        ("batch", "2147483648", |p| p.dims.batch = 1 << 31),
        ("num_heads_q", "0", |p| p.dims.num_heads_q = 0),
        ("num_heads_kv", "0", |p| p.dims.num_heads_kv = 0),
        ("num_heads_q", "5", |p| p.dims.num_heads_q = 5),
        ("head_dim_qk", "0", |p| p.dims.head_dim_qk = 0),
        ("head_dim_qk", "1025", |p| p.dims.head_dim_qk = 1025),
        ("head_dim_v", "0", |p| p.dims.head_dim_v = 0),
        ("head_dim_v", "4096", |p| p.dims.head_dim_v = 4096),
        ("num_heads_q", "4294967296", |p| (p.dims.batch, p.dims.num_heads_q) = (1 << 16, 1 << 16)),
        ("seqlen_q", "2147483648", |p| p.dims.seqlen_q = 1 << 31),
        ("seqlen_k", "4294967295", |p| p.dims.seqlen_k = u32::MAX),
        ("page_size", "0", |p| p.layout.kv = KvLayout::Paged { page_size: 0 }),
        ("page_size", "2147483648", |p| p.layout.kv = KvLayout::Paged { page_size: 1 << 31 }),
        ("dtype_v", "f16", |p| p.dtypes.v = DType::F16),
        ("dtype_o", "e4m3fn", |p| p.dtypes.o = DType::E4m3Fn),
        ("descale_q", "f32", |p| p.scales.descale_q = Descale::PerTensor),
        ("descale_k", "f32", |p| p.scales.descale_k = Descale::PerKvHead),
        ("descale_v", "f32", |p| p.scales.descale_v = Descale::PerTensor),
        ("scale_o", "f32", |p| p.scales.scale_o = true),
        ("q", "q.seq stride -32 is negative", |p| p.strides.q.seq = -32),
        ("q", "3", |p| p.strides.q.dim = 3),
        ("k", "2", |p| p.strides.k.dim = 2),
        ("k", "9223372036854775807", |p| p.strides.k.batch = i64::MAX),
        ("v", "0", |p| p.strides.v.dim = 0),
        ("v", "16", |p| p.layout.v = VLayout::ColMajor),
        ("o", "0", |p| p.strides.o.head = 0),
        ("o", "7", |p| p.strides.o.head = 7),
        ("o", "-1", |p| p.strides.o.batch = -1),
        ("softmax_scale", "NaN", |p| p.score.softmax_scale = Some(f32::NAN)),
        ("softmax_scale", "inf", |p| p.score.softmax_scale = Some(f32::INFINITY)),
        ("softcap", "0", |p| p.score.softcap = Some(0.0)),
        ("softcap", "-3", |p| p.score.softcap = Some(-3.0)),
        ("softcap", "NaN", |p| p.score.softcap = Some(f32::NAN)),
        ("p_drop", "1", |p| p.dropout.p_drop = 1.0),
        ("p_drop", "-0.25", |p| p.dropout.p_drop = -0.25),
        ("p_drop", "NaN", |p| p.dropout.p_drop = f32::NAN),
        ("bias.dtype", "bf16", |p| p.score.bias = elementwise(DType::Bf16, 1)),
        ("bias.dtype", "e4m3fn", |p| {
            (p.dtypes.qk, p.dtypes.v, p.dtypes.o) = (DType::E4m3Fn, DType::E4m3Fn, BF16);
            p.score.bias = elementwise(DType::E4m3Fn, 1);
        }),
        ("bias.dtype", "e4m3fn", |p| {
            (p.dtypes.qk, p.dtypes.v, p.dtypes.o) = (DType::E4m3Fn, BF16, BF16);
            p.score.bias = elementwise(DType::E4m3Fn, 1);
        }),
        ("bias", "2", |p| p.score.bias = elementwise(DType::F32, 2)),
        ("dtype_cache", "f32", |p| p.cache.dtype = Some(DType::E4m3Fn)),
        ("dtype_cache", "f16", |p| (p.cache.dtype, p.dtypes.qk, p.dtypes.v) = (Some(DType::F16), BF16, BF16)),
        ("dtype_cache", "0", |p| {
            appended(p, |_| ());
            (p.cache.dtype, p.dtypes.qk, p.dtypes.v) = (Some(DType::E4m3Fn), BF16, BF16);
        }),
        ("v_in_k", "head_dim_qk 4", |p| (p.cache.v_in_k, p.dims.head_dim_qk) = (true, 4)),
        ("v_in_k", "32", |p| (p.cache.v_in_k, p.strides.v.seq) = (true, 32)),
        ("v_in_k", "16", |p| {
            (p.cache.v_in_k, p.layout.v, p.strides.v) = (true, VLayout::ColMajor, Strides::bhds(p.shape_v()));
        }),
        ("append", "2", |p| {
            appended(p, |_| ());
            p.layout.seqused_k = false;
        }),
        ("seqlen_new", "2147483648", |p| appended(p, |append| append.seqlen_new = 1 << 31)),
        ("k_new", "-16", |p| appended(p, |append| append.k_new.seq = -16)),
        ("k_new", "3", |p| appended(p, |append| append.k_new.dim = 3)),
        ("v_new", "-5", |p| appended(p, |append| append.v_new.head = -5)),
        ("v_new", "2", |p| appended(p, |append| append.v_new.dim = 2)),
        ("k_new", "-7", |p| {
            appended(p, |append| (append.layout, append.k_new.seq) = (QLayout::Packed, -7));
        }),
        ("k", "one address", |p| {
            appended(p, |_| ());
            p.strides.k.head = 0;
        }),
        ("v", "one address", |p| {
            appended(p, |_| ());
            p.strides.v.head = 0;
        }),
        ("rotary_dim", "0", |p| rotated(p, |rotary| rotary.dim = 0)),
        ("rotary_dim", "5", |p| rotated(p, |rotary| rotary.dim = 5)),
        ("rotary_dim", "10", |p| rotated(p, |rotary| rotary.dim = 10)),
        ("max_pos", "0", |p| rotated(p, |rotary| rotary.max_pos = 0)),
        ("max_pos", "2147483648", |p| rotated(p, |rotary| rotary.max_pos = 1 << 31)),
        ("rotary.dtype", "bf16", |p| rotated(p, |rotary| rotary.dtype = BF16)),
        ("rotary.dtype", "e5m2", |p| {
            rotated(p, |rotary| rotary.dtype = DType::E5m2);
            (p.dtypes.qk, p.dtypes.v, p.dtypes.o) = (DType::E4m3Fn, DType::E4m3Fn, BF16);
        }),
        ("rotary", "4", |p| {
            rotated(p, |_| ());
            p.layout.seqused_k = false;
        }),
        ("tree_mask", "0", |p| p.cache.tree_mask = true),
        ("tree_mask", "mask 2 (causal, bottom-right), not for t", |p| {
            (p.cache.tree_mask, p.mask) = (true, mask("1"));
        }),
        ("tree_mask", "b:-1,0,2", |p| (p.cache.tree_mask, p.mask) = (true, mask("b:-1,0,2"))),
    ];
    for (field, number, change) in table {
        let mut problem = FwdProblem::batch(DType::F32, DIMS);
        change(&mut problem);
        match problem.validate() {
            Ok(_) => panic!("{field} {number} validates"),
            Err(error) => {
                assert_eq!(error.field, *field, "{error}");
                assert!(error.text.contains(number), "`{error}` does not say {number}");
            }
        }
    }
}

const BF16: DType = DType::Bf16;

fn mask(text: &str) -> MaskSpec {
    text.parse().unwrap()
}

/// Adds an append of two new rows per sequence, with a change that makes it invalid.
fn appended(problem: &mut FwdProblem, change: fn(&mut Append)) {
    let mut append = Append::batch(problem, 2);
    change(&mut append);
    (problem.cache.append, problem.layout.seqused_k) = (Some(append), true);
}

/// Adds a rotary embedding of four elements, with a change that makes it invalid.
fn rotated(problem: &mut FwdProblem, change: fn(&mut Rotary)) {
    let mut rotary = Rotary { dim: 4, pairs: RotaryPairs::Half, max_pos: 16, dtype: DType::F32 };
    change(&mut rotary);
    (problem.cache.rotary, problem.layout.seqused_k) = (Some(rotary), true);
}

#[test]
fn a_cache_update_without_a_mistake_validates() {
    let mut problem = FwdProblem::batch(DType::F32, DIMS);
    appended(&mut problem, |_| ());
    rotated(&mut problem, |_| ());
    (problem.cache.tree_mask, problem.mask) = (true, mask("2"));
    (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
    problem.validate().unwrap();
}

#[test]
fn what_the_numbers_leave_open_follows_from_them() {
    let dims = Dims { head_dim_qk: 16, ..DIMS };
    let problem = FwdProblem::batch(DType::F32, dims);
    assert_eq!(problem.resolved_softmax_scale(), 0.25);
    assert_eq!(problem.clone().softmax_scale(-3.0).resolved_softmax_scale(), -3.0);
    // In f64, 1 - p_drop equals 1 if p_drop is very small.
    let drops = |p_drop| problem.clone().p_drop(p_drop).drops();
    assert_eq!([0.0, 1e-20, 0.25].map(drops), [false, false, true]);

    let k = Shape { batch: 2, seq: 5, head: 2, dim: 16 };
    let q = Shape { batch: 2, seq: 3, head: 4, dim: 16 };
    let extents = problem.extents(Totals::NONE);
    assert_eq!((extents.q, extents.o), (q, Shape { dim: 8, ..q }));
    assert_eq!((extents.k, extents.v), (k, Shape { dim: 8, ..k }));
    assert_eq!(extents.lse_elems, 24);
    let packed = FwdProblem::group(DType::F32, dims).extents(Totals::packed(4, 6));
    assert_eq!(
        (packed.q, packed.v),
        (Shape { batch: 1, seq: 4, ..q }, Shape { batch: 1, seq: 6, dim: 8, ..k })
    );
    assert_eq!(packed.lse_elems, 16);
    let append = Append::packed(&problem, 2);
    let new = Shape { batch: 1, seq: 3, ..k };
    let totals = Totals { total_new: Some(3), ..Totals::NONE };
    assert_eq!(problem.shapes_new(&append, totals), (new, Shape { dim: 8, ..new }));
}

#[test]
fn a_bias_has_an_index_of_zero_along_the_axes_that_it_lacks() {
    assert_eq!(BiasBroadcast::OneOne.index(2, 3), (0, 0));
    assert_eq!(BiasBroadcast::OneHead.index(2, 3), (0, 3));
    assert_eq!(BiasBroadcast::BatchOne.index(2, 3), (2, 0));
    assert_eq!(BiasBroadcast::BatchHead.index(2, 3), (2, 3));
}

#[test]
fn layouts_that_differ_are_refused_in_a_kernels_name() {
    let paged = KvLayout::Paged { page_size: 16 };
    for (q, kv, taken) in [
        (QLayout::Batch, KvLayout::Strided, true),
        (QLayout::Packed, KvLayout::Packed, true),
        (QLayout::Batch, KvLayout::Packed, false),
        (QLayout::Packed, KvLayout::Strided, false),
        (QLayout::Batch, paged, false),
        (QLayout::Packed, paged, false),
    ] {
        let checked = FwdProblem::new(q, kv, DType::F32, DIMS).refuse_mixed_layouts("fast");
        assert_eq!(checked.is_ok(), taken, "{checked:?}");
        if let Err(refusal) = checked {
            let both = format!("q_layout {q:?} with kv_layout {kv:?}");
            assert!(refusal.kernel == "fast" && refusal.reason.starts_with(&both), "{refusal}");
        }
    }
}

#[test]
fn each_update_of_a_cache_is_refused_in_a_kernels_name() {
    type Change = fn(&mut FwdProblem);
    let table: [(&str, Change); 4] = [
        ("append of seqlen_new 2 is not taken", |p| appended(p, |_| ())),
        ("rotary embedding of dim 4 is not taken", |p| rotated(p, |_| ())),
        ("dtype_cache e4m3fn beside f32 is not taken", |p| p.cache.dtype = Some(DType::E4m3Fn)),
        ("tree_mask of 3 queries is not taken", |p| p.cache.tree_mask = true),
    ];
    for (text, change) in table {
        let mut problem = FwdProblem::batch(DType::F32, DIMS);
        assert_eq!(problem.refuse_cache_updates("fast"), Ok(()));
        change(&mut problem);
        let refusal = problem.refuse_cache_updates("fast").unwrap_err();
        assert_eq!((refusal.kernel.as_str(), refusal.reason.as_str()), ("fast", text));
    }
}

/// Rotary position of query i: i rows after the first under a causal or window mask; the first query's position
/// under a mask that shows every query the same keys.
#[test]
fn positions_advance_under_masks_that_look_back_and_under_a_tree() {
    let advances = |text, tree_mask| {
        let problem = FwdProblem::batch(DType::F32, DIMS).mask(mask(text)).tree_mask(tree_mask);
        problem.positions_advance()
    };
    for text in ["t", "b", "b:2,1"] {
        assert!(advances(text, false) && advances(text, true), "{text}");
    }
    assert!(!advances("0", false) && advances("0", true));
}

#[test]
fn every_total_is_there_where_its_layout_wants_it_and_nowhere_else() {
    const ALL: Totals = Totals { total_q: Some(6), total_k: Some(7), num_pages: Some(8), total_new: Some(9) };
    let everything = |p: &mut FwdProblem| {
        appended(p, |append| append.layout = QLayout::Packed);
        p.layout.q = QLayout::Packed;
    };
    for (kv_layout, right) in [
        (KvLayout::Packed, Totals { num_pages: None, ..ALL }),
        (KvLayout::Paged { page_size: 4 }, Totals { total_k: None, ..ALL }),
    ] {
        let mut problem = FwdProblem::new(QLayout::Packed, kv_layout, DType::F32, DIMS);
        everything(&mut problem);
        problem.check_totals(right).unwrap();
        let spare = if right.num_pages.is_none() { ("num_pages", "8") } else { ("total_k", "7") };
        let table: &[(&str, &str, Totals)] = &[
            ("total_q", "missing", Totals { total_q: None, ..right }),
            ("total_q", "2147483648", Totals { total_q: Some(1 << 31), ..right }),
            ("total_new", "missing", Totals { total_new: None, ..right }),
            ("total_new", "4294967295", Totals { total_new: Some(u32::MAX), ..right }),
            (spare.0, spare.1, ALL),
        ];
        for (field, number, totals) in table {
            let error = problem.check_totals(*totals).unwrap_err();
            assert_eq!(error.field, *field, "{error}");
            assert!(error.text.contains(number), "`{error}` does not say {number}");
        }
    }
    let plain = FwdProblem::batch(DType::F32, DIMS);
    plain.check_totals(Totals::NONE).unwrap();
    for (field, totals) in [
        ("total_q", Totals { total_q: Some(5), ..Totals::NONE }),
        ("total_k", Totals { total_k: Some(5), ..Totals::NONE }),
        ("num_pages", Totals { num_pages: Some(5), ..Totals::NONE }),
        ("total_new", Totals { total_new: Some(5), ..Totals::NONE }),
    ] {
        let error = plain.check_totals(totals).unwrap_err();
        assert_eq!((error.field, error.text.contains('5')), (field, true), "{error}");
    }
}

fn elementwise(dtype: DType, dim: i64) -> Bias {
    let strides = Strides { batch: 60, seq: 5, head: 15, dim };
    Bias::Elementwise(ElementwiseBias { dtype, broadcast: BiasBroadcast::BatchHead, strides })
}

#[test]
fn every_wrong_backward_problem_is_refused_by_field_and_number() {
    let table: &[Wrong<BwdProblem>] = &[
        ("dtype_grad", "e5m2", |p| p.dtype_grad = DType::E5m2),
        ("dq", "0", |p| p.dq.head = 0),
        ("dk", "5", |p| p.dk.dim = 5),
        ("dv", "-2", |p| p.dv.seq = -2),
        ("dout", "2", |p| p.dout.dim = 2),
        ("dsink", "sink is false", |p| p.write_dsink = true),
        ("dbias", "bias is none", |p| {
            p.dbias = Some(BiasGrad { dtype: DType::F32, strides: p.dq });
        }),
        ("num_heads_q", "5", |p| p.fwd.dims.num_heads_q = 5),
    ];
    for (field, number, change) in table {
        let mut problem = BwdProblem::new(FwdProblem::batch(DType::F32, DIMS));
        change(&mut problem);
        let error = problem.validate().unwrap_err();
        assert_eq!(error.field, *field, "{error}");
        assert!(error.text.contains(number), "`{error}` does not say {number}");
    }
}

#[test]
fn every_wrong_combine_problem_is_refused_by_field_and_number() {
    let rows = Shape { batch: 2, seq: 3, head: 4, dim: 8 };
    let table: &[Wrong<CombineProblem>] = &[
        ("num_parts", "0", |p| p.num_parts = 0),
        ("batch", "4000000000 is not in 0..=", |p| p.batch = 4_000_000_000),
        ("num_heads_q", "0", |p| p.num_heads_q = 0),
        ("head_dim_v", "2000", |p| p.head_dim_v = 2000),
        ("dtype_part", "e4m3fn", |p| p.dtype_part = DType::E4m3Fn),
        ("dtype_o", "e5m2fnuz", |p| p.dtype_o = DType::E5m2Fnuz),
        ("part", "-8", |p| p.part.head = -8),
        ("o", "0", |p| p.o.seq = 0),
        ("write_lse", "true", |p| (p.merge, p.write_lse) = (Merge::Sum, true)),
        ("num_parts", "4000000000 is not in 0..=", |p| {
            (p.merge, p.num_parts) = (Merge::AddTo, 4_000_000_000);
        }),
    ];
    for (field, number, change) in table {
        let mut problem = CombineProblem::new(2, DType::F32, DType::F32, rows);
        change(&mut problem);
        let error = problem.validate().unwrap_err();
        assert_eq!(error.field, *field, "{error}");
        assert!(error.text.contains(number), "`{error}` does not say {number}");
    }
}

/// Sizes whose product is 0 modulo 2^64 are refused by their field.
#[test]
fn a_count_that_would_wrap_is_refused_by_its_field() {
    let dims = Dims::batch(1 << 14).seqlens(1 << 10, 1 << 28).heads(1 << 12, 1 << 12).head_dims(1 << 10, 1);
    let none = Strides { batch: 0, seq: 0, head: 0, dim: 1 };
    let contiguous = FwdProblem::batch(DType::F16, dims).validate().unwrap_err();
    assert_eq!(contiguous.field, "k");
    // One row has 2^64 elements.
    let one_row = FwdProblem::batch(DType::F16, dims).strides_k(none);
    let error = one_row.validate().unwrap_err();
    assert!(error.field == "k" && error.text.contains("more than 2305843009213693952 elements"), "{error}");

    // The size is 2^16 x 2^14 x 2^17 x 2^17 bytes.
    let side = 1 << 17;
    let dims = Dims { batch: 1 << 16, seqlen_q: side, seqlen_k: side, num_heads_q: 1 << 14, ..dims };
    let dims = Dims { num_heads_kv: 1, head_dim_qk: 1, ..dims };
    let mut masked = FwdProblem::batch(DType::F16, dims).write_keep_mask(true);
    (masked.strides.q, masked.strides.k, masked.strides.v) = (none, none, none);
    assert_eq!(masked.validate().unwrap_err().field, "write_keep_mask");
}

#[test]
fn constructors_take_any_numbers_and_validation_refuses_them() {
    let most = u32::MAX;
    let dims = Dims::batch(most).seqlens(most, most).heads(most, most).head_dim(most);
    for dims in [dims, Dims { num_heads_kv: 0, ..dims }] {
        for problem in [FwdProblem::batch(DType::F16, dims), FwdProblem::group(DType::F16, dims)] {
            assert!(problem.gqa_ratio() <= 1);
            assert_eq!(problem.keep_mask_bytes(), u64::MAX);
            assert!(BwdProblem::new(problem.clone()).validate().is_err());
            assert!(problem.validate().is_err());
        }
    }
    let rows = Shape { batch: most, seq: most, head: most, dim: most };
    let combine = CombineProblem::new(most, DType::F16, DType::F16, rows);
    assert_eq!(combine.lse_elems(), u64::MAX);
    assert_eq!(combine.validate().unwrap_err().field, "num_parts");
    let combine = CombineProblem::new(2, DType::F16, DType::F16, Shape { batch: 1, head: 1, dim: 8, ..rows });
    assert_eq!(combine.validate().unwrap_err().field, "seqlen_q");
}

#[test]
fn a_tile_beyond_the_longest_sequence_has_indices_of_31_bits() {
    let dims = Dims::batch(1).seqlens(1, MAX_SEQLEN + 1).heads(1, 1).head_dim(8);
    let error = FwdProblem::batch(DType::F16, dims).validate().unwrap_err();
    assert_eq!(error.text, "seqlen_k 2147418113 is larger than 2147418112");
    FwdProblem::batch(DType::F16, Dims { seqlen_k: MAX_SEQLEN, ..dims }).validate().unwrap();
    assert!(MAX_SEQLEN + u32::from(u16::MAX) <= i32::MAX.unsigned_abs());
}
