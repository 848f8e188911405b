//! Scales by blocks: each format, with every layout of Q, K and V, and with every option that is compatible with
//! it, forward and backward.

use fmha_core::expr::draw::{self, Kind};
use fmha_core::{BlockFormat, BwdProblem, DType, Descale, Dims, FwdProblem, Shape, Strides, VLayout};

use super::decode::in_pages;
use super::edges::{data, masked};
use super::masks;
use crate::case::{Backward, Body, Case, Plant};
use crate::init::{Init, mix};
use crate::tensor::Operand;
use crate::tensors::{Data, Lengths, padded};

/// Number of drawn forward problems for each format.
const DRAWN: u32 = 40;
/// Number of drawn backward problems for each format.
const DRAWN_BACKWARD: u32 = 20;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for format in BlockFormat::ALL {
        of_format(&mut cases, format);
        drawn(&mut cases, format);
        backward(&mut cases, format);
        under_masks(&mut cases, format);
    }
    cases
}

fn of_format(cases: &mut Vec<Case>, format: BlockFormat) {
    let named = |what: &str| format!("scales/{format}/{what}");
    let mut push = |what: &str, problem: FwdProblem, lengths: Lengths| {
        let name = named(what);
        let data = data(&name);
        cases.push(Case::forward(name, problem, lengths, data));
    };
    for dtype in [DType::Bf16, DType::F32] {
        for (letter, layout, mask) in [("r", VLayout::RowMajor, "b"), ("c", VLayout::ColMajor, "0")] {
            for (kind, descale) in
                [("plain", Descale::None), ("tensor", Descale::PerTensor), ("head", Descale::PerKvHead)]
            {
                let problem = small(dtype, mask).v_layout(layout).with_block_scales(format);
                let problem = problem.descale_q(descale).descale_k(descale).descale_v(descale);
                push(&format!("{dtype}/descale_{kind}/{letter}/{mask}"), problem, Lengths::default());
            }
        }
        // The last block of a row has fewer elements than the others.
        for head_dim in [1, 5, 16, 31, 64, 100, 128, 160, 192, 256] {
            let dims = Dims { head_dim_qk: head_dim, head_dim_v: head_dim, ..small(dtype, "b").dims };
            let problem = masked(dtype, dims, "b").with_block_scales(format);
            push(&format!("{dtype}/head_dim/d{head_dim}"), problem, Lengths::default());
        }
        // The last block of V has one key, all keys but one, or all keys.
        for seqlen_k in [1, 15, 16, 17, 31, 32, 33, 63, 65, 300] {
            for (letter, layout) in [("r", VLayout::RowMajor), ("c", VLayout::ColMajor)] {
                let dims = Dims { seqlen_k, ..small(dtype, "0").dims };
                let problem = masked(dtype, dims, "0").v_layout(layout).with_block_scales(format);
                push(&format!("{dtype}/keys/{seqlen_k}/{letter}"), problem, Lengths::default());
            }
        }
        // TMA supports these strides, also those of pairs of keys.
        for (head_dim, mask) in [(64, "0"), (128, "b"), (192, "b:90,0"), (256, "0")] {
            let dims = Dims {
                seqlen_q: 140,
                seqlen_k: 320,
                head_dim_qk: head_dim,
                head_dim_v: head_dim,
                ..small(dtype, mask).dims
            };
            let problem = masked(dtype, Dims { batch: 1, ..dims }, mask).v_layout(VLayout::ColMajor);
            push(
                &format!("{dtype}/columns/d{head_dim}"),
                problem.with_block_scales(format),
                Lengths::default(),
            );
        }
        let plain = |mask| small(dtype, mask).with_block_scales(format);
        for (what, problem) in [
            ("window", plain("b:20,3,2")),
            ("softcap", plain("b").softcap(2.0)),
            ("dropout", plain("b").p_drop(0.3)),
            ("sink", plain("t").sink(true)),
            ("alibi", plain("b").bias(fmha_core::Bias::Alibi { per_batch: false })),
            ("negative_scale", plain("b").softmax_scale(-0.2)),
            ("o_f32", plain("0").dtype_o(DType::F32)),
            ("no_lse", plain("b").write_lse(false)),
            ("bias", super::backward::modified(plain("b"), "bias_16").fwd),
            ("score", plain("b").score_code(draw::score(7, Kind::Bare).ok())),
            ("mask", plain("b").mask_code(draw::mask(7, Kind::Bare).ok())),
        ] {
            push(&format!("{dtype}/beside/{what}"), problem, Lengths::default());
        }
        let few = masked(dtype, Dims { seqlen_q: 1, seqlen_k: 333, ..small(dtype, "b").dims }, "b");
        push(&format!("{dtype}/one_query"), few.with_block_scales(format), Lengths::default());
        let used = plain("b").seqused_q(true).seqused_k(true);
        let lengths = Lengths { seqused_q: vec![30, 7], seqused_k: vec![33, 0], ..Lengths::default() };
        push(&format!("{dtype}/lengths"), used, lengths.clone());
        // Pages hold whole blocks. TMA brings pairs of D 64.
        for (page_size, head_dim) in [(32, 48), (64, 48), (32, 64)] {
            let of_dim = if head_dim == 64 { "/d64" } else { "" };
            let what = format!("{dtype}/paged/p{page_size}{of_dim}");
            let dims = small(dtype, "b").dims;
            let dims = Dims { seqlen_k: 200, head_dim_qk: head_dim, head_dim_v: head_dim, ..dims };
            let paged = masked(dtype, dims, "b").seqused_k(true);
            let lengths = Lengths { seqused_k: vec![200, 71], ..Lengths::default() };
            let (paged, lengths) = in_pages(paged, page_size, lengths, &named(&what));
            push(&what, paged.with_block_scales(format), lengths);
        }
        // Q is packed, and K is a cache.
        let sequences = [(13, 41), (0, 5), (30, 17), (1, 0)];
        let dims = Dims { batch: 4, ..small(dtype, "b").dims };
        let mut packed = masked(dtype, dims, "b").q_layout(fmha_core::QLayout::Packed).seqused_k(true);
        packed.strides.q = Strides::bshd(packed.shape_q());
        packed.strides.o = Strides::bshd(packed.shape_o());
        let mut lengths = Lengths::packed(&sequences);
        (lengths.cu_seqlens_k, lengths.totals.total_k) = (vec![], None);
        lengths.seqused_k = sequences.iter().map(|&(_, keys)| keys.cast_signed()).collect();
        push(&format!("{dtype}/packed_queries"), packed.with_block_scales(format), lengths);
        // Tensors and scales with gaps.
        let mut apart = plain("b");
        if let Some(scales) = apart.block_scales {
            let extents = apart.extents(fmha_core::Totals::NONE);
            let [q, k, v] = scales.stored(&extents, VLayout::RowMajor).map(|shape| padded(shape, 3));
            (apart.strides.q, apart.strides.k, apart.strides.v) = (q, k, v);
            let [q, k, v] = scales.shapes(&extents);
            let heads_first = |shape: Shape| Strides::bhds(shape);
            let scales = scales.strides_q(padded(q, 5)).strides_k(heads_first(k)).strides_v(heads_first(v));
            push(&format!("{dtype}/apart"), apart.block_scales(scales), Lengths::default());
        }
    }
    // A V of one constant number would become different numbers after quantisation by blocks.
    for init in Init::ALL.into_iter().filter(|&init| init != Init::ConstantV) {
        let name = named(&format!("numbers/{init}"));
        let data = Data { init, ..data(&name) };
        let problem = small(DType::Bf16, "b").with_block_scales(format);
        cases.push(Case::forward(name, problem, Lengths::default(), data));
    }
    // A NaN scale reaches exactly the outputs that depend on its block.
    for (what, operand, at) in [
        ("q", Operand::BlockScaleQ, [1, 3, 2, 1]),
        ("k", Operand::BlockScaleK, [0, 7, 1, 0]),
        ("v", Operand::BlockScaleV, [1, 1, 0, 9]),
    ] {
        let name = named(&format!("nan_scale/{what}"));
        let problem = small(DType::Bf16, "t").with_block_scales(format);
        let mut case = Case::forward(name.clone(), problem, Lengths::default(), data(&name));
        if let Body::Forward(forward) = &mut case.body {
            forward.plant = Plant::At(operand, at, f64::NAN);
        }
        cases.push(case);
    }
}

/// Gradients with respect to the values of Q, K and V, in every layout.
fn backward(cases: &mut Vec<Case>, format: BlockFormat) {
    let named = |what: &str| format!("scales/{format}/backward/{what}");
    let mut push =
        |what: &str, problem: BwdProblem, lengths: Lengths, planted: Vec<(Operand, [u32; 4], f64)>| {
            let name = named(what);
            let data = data(&name);
            let body = Backward { problem, lengths, data, deterministic: false, planted };
            cases.push(Case { name, body: Body::Backward(Box::new(body)) });
        };
    for dtype in [DType::Bf16, DType::F32] {
        let small = |mask| small(dtype, mask).with_block_scales(format);
        let of = |problem: FwdProblem| BwdProblem::new(problem);
        for (letter, layout, mask, kind, descale) in [
            ("r", VLayout::RowMajor, "b", "plain", Descale::None),
            ("c", VLayout::ColMajor, "0", "tensor", Descale::PerTensor),
            ("r", VLayout::RowMajor, "t", "head", Descale::PerKvHead),
        ] {
            let problem = masked(dtype, small(mask).dims, mask).v_layout(layout).with_block_scales(format);
            let problem = of(problem.descale_q(descale).descale_k(descale).descale_v(descale));
            push(&format!("{dtype}/descale_{kind}/{letter}/{mask}"), problem, Lengths::default(), vec![]);
        }
        for (qk, v) in [(5, 5), (31, 47), (24, 40), (64, 64), (128, 128), (192, 128), (256, 256)] {
            let dims = Dims { head_dim_qk: qk, head_dim_v: v, seqlen_q: 50, seqlen_k: 70, ..small("b").dims };
            let problem = of(masked(dtype, dims, "b").with_block_scales(format));
            push(&format!("{dtype}/head_dim/d{qk}x{v}"), problem, Lengths::default(), vec![]);
        }
        for seqlen_k in [1, 31, 33, 300] {
            let dims = Dims { seqlen_k, ..small("0").dims };
            let problem = of(masked(dtype, dims, "0").with_block_scales(format));
            push(&format!("{dtype}/keys/{seqlen_k}"), problem, Lengths::default(), vec![]);
        }
        let biased = super::backward::modified(small("b"), "dbias_one_head");
        for (what, problem) in [
            ("window", of(small("b:20,3,2"))),
            ("softcap", of(small("b").softcap(2.0))),
            ("dropout", of(small("b").p_drop(0.3))),
            ("sink", of(small("t").sink(true)).write_dsink(true)),
            ("alibi", of(small("b").bias(fmha_core::Bias::Alibi { per_batch: false }))),
            ("bias", biased),
            ("dlse", of(small("b")).has_dlse(true)),
            ("o_f32", of(small("0").dtype_o(DType::F32))),
            ("grad_f32", of(small("0")).dtype_grad(DType::F32)),
            ("score", of(small("b").score_code(draw::score(7, Kind::Bare).ok()))),
            ("mask", of(small("b").mask_code(draw::mask(7, Kind::Bare).ok()))),
        ] {
            push(&format!("{dtype}/beside/{what}"), problem, Lengths::default(), vec![]);
        }
        let used = small("b").seqused_q(true).seqused_k(true);
        let lengths = Lengths { seqused_q: vec![30, 7], seqused_k: vec![33, 0], ..Lengths::default() };
        push(&format!("{dtype}/lengths"), of(used), lengths, vec![]);
        // Q is packed, and K is not.
        let sequences = [(13, 41), (0, 5), (30, 17), (1, 0)];
        let dims = Dims { batch: 4, ..small("b").dims };
        let mut packed = masked(dtype, dims, "b").q_layout(fmha_core::QLayout::Packed).seqused_k(true);
        packed.strides.q = Strides::bshd(packed.shape_q());
        packed.strides.o = Strides::bshd(packed.shape_o());
        let mut lengths = Lengths::packed(&sequences);
        (lengths.cu_seqlens_k, lengths.totals.total_k) = (vec![], None);
        lengths.seqused_k = sequences.iter().map(|&(_, keys)| keys.cast_signed()).collect();
        push(&format!("{dtype}/packed_queries"), of(packed.with_block_scales(format)), lengths, vec![]);
        // Tensors and scales with gaps.
        let mut apart = small("b");
        if let Some(scales) = apart.block_scales {
            let extents = apart.extents(fmha_core::Totals::NONE);
            let [q, k, v] = scales.stored(&extents, VLayout::RowMajor).map(|shape| padded(shape, 3));
            (apart.strides.q, apart.strides.k, apart.strides.v) = (q, k, v);
            let [q, k, v] = scales.shapes(&extents);
            let heads_first = |shape: Shape| Strides::bhds(shape);
            let scales = scales.strides_q(padded(q, 5)).strides_k(heads_first(k)).strides_v(heads_first(v));
            push(&format!("{dtype}/apart"), of(apart.block_scales(scales)), Lengths::default(), vec![]);
        }
        // Several blocks of queries and of keys.
        let dims = Dims {
            batch: 1,
            seqlen_q: 150,
            seqlen_k: 290,
            head_dim_qk: 64,
            head_dim_v: 64,
            ..small("b").dims
        };
        let problem = of(masked(dtype, dims, "b").with_block_scales(format));
        push(&format!("{dtype}/blocks"), problem, Lengths::default(), vec![]);
    }
    // A scale of NaN makes the gradients NaN that its block reaches.
    for (what, operand, at) in [
        ("q", Operand::BlockScaleQ, [1, 3, 2, 1]),
        ("k", Operand::BlockScaleK, [0, 7, 1, 0]),
        ("v", Operand::BlockScaleV, [1, 1, 0, 9]),
    ] {
        let problem = BwdProblem::new(small(DType::Bf16, "t").with_block_scales(format));
        push(&format!("nan_scale/{what}"), problem, Lengths::default(), vec![(operand, at, f64::NAN)]);
    }
    for number in 0..DRAWN_BACKWARD {
        let name = named(&format!("drawn/{number:02}"));
        let (problem, lengths) = draw_problem(format, &name, false);
        let has_sink = problem.score.sink;
        let problem = BwdProblem::new(problem).write_dsink(has_sink).has_dlse(number % 3 == 0);
        push(&format!("drawn/{number:02}"), problem, lengths, vec![]);
    }
}

/// Masks as data, each kind alone and all together, beside what changes scores and lengths.
fn under_masks(cases: &mut Vec<Case>, format: BlockFormat) {
    let alone = ["intervals", "bits", "partial", "full", "lists", "all"].map(|kind| ("batch", kind));
    let beside = [
        ("used", "lists"),
        ("window", "bits"),
        ("softcap", "intervals"),
        ("alibi", "lists"),
        ("bias", "intervals"),
        ("sink", "bits"),
        ("dropout", "all"),
        ("few_queries", "all"),
        ("strides", "all"),
        ("wide_heads", "all"),
        ("code", "intervals"),
        ("code", "all"),
        ("long", "lists"),
    ];
    for (nth, (variant, kind)) in alone.into_iter().chain(beside).enumerate() {
        let layout = [VLayout::RowMajor, VLayout::ColMajor][nth % 2];
        let seed = 500 + nth as u64;
        let (problem, lengths) = masks::problem(DType::Bf16, variant, kind, seed);
        let problem = problem.v_layout(layout).with_block_scales(format);
        let name = format!("scales/{format}/masks/{variant}/{kind}");
        let drawn = data(&name);
        cases.push(Case::forward(name, problem.clone(), lengths.clone(), drawn));
        for deterministic in [false, true] {
            if deterministic && kind != "all" {
                continue;
            }
            let order = if deterministic { "/ordered" } else { "" };
            let name = format!("scales/{format}/backward/masks/{variant}/{kind}{order}");
            let data = data(&name);
            let problem = BwdProblem::new(problem.clone());
            let body =
                Backward { problem, lengths: lengths.clone(), data, deterministic, planted: Vec::new() };
            cases.push(Case { name, body: Body::Backward(Box::new(body)) });
        }
    }
    // Rows that see none of a block whose scale is NaN stay finite.
    for kind in ["intervals", "lists"] {
        let (problem, lengths) = masks::problem(DType::Bf16, "batch", kind, 530);
        let name = format!("scales/{format}/masks/nan_scale/{kind}");
        let data = data(&name);
        let mut case = Case::forward(name, problem.with_block_scales(format), lengths, data);
        if let Body::Forward(forward) = &mut case.body {
            forward.plant = Plant::At(Operand::BlockScaleV, [1, 1, 0, 9], f64::NAN);
        }
        cases.push(case);
    }
}

/// Problems that a number alone decides: sizes, lengths, mask, layouts and modifiers together.
fn drawn(cases: &mut Vec<Case>, format: BlockFormat) {
    for number in 0..DRAWN {
        let name = format!("scales/{format}/drawn/{number:02}");
        let (problem, lengths) = draw_problem(format, &name, true);
        let data = data(&name);
        cases.push(Case::forward(name, problem, lengths, data));
    }
}

/// Draws a problem from its name, perhaps in pages if `may_be_paged`.
fn draw_problem(format: BlockFormat, name: &str, may_be_paged: bool) -> (FwdProblem, Lengths) {
    let data = data(name);
    let mut count = 0;
    let mut below = |most: u64| {
        count += 1;
        (mix(data.seed ^ count) % most) as u32
    };
    let (kv, group) = (1 + below(3), 1 + below(4));
    let dims = Dims::batch(1 + below(3))
        .seqlens([1, 2, 17, 40, 130][below(5) as usize], 1 + below(200))
        .heads(kv * group, kv)
        .head_dims([8, 33, 64, 96, 128][below(5) as usize], [8, 16, 47, 64, 128][below(5) as usize]);
    let dtype = [DType::Bf16, DType::F32][below(2) as usize];
    let mask = ["0", "b", "t", "b:20,0", "t:5,9,3", "g:7,11"][below(6) as usize];
    let descale = [Descale::None, Descale::PerTensor, Descale::PerKvHead];
    let [of_q, of_k, of_v] = [0; 3].map(|_| descale[below(3) as usize]);
    let mut problem = masked(dtype, dims, mask).sink(below(3) == 0).seqused_k(below(2) == 0);
    problem = problem.softcap((below(4) == 0).then_some(3.0)).p_drop([0.0, 0.0, 0.25][below(3) as usize]);
    if below(4) == 0 {
        problem = problem.bias(fmha_core::Bias::Alibi { per_batch: below(2) == 0 });
    }
    let mut lengths = Lengths::default();
    if problem.layout.seqused_k {
        let used = (0..dims.batch).map(|_| below(u64::from(dims.seqlen_k) + 1).cast_signed());
        lengths.seqused_k = used.collect();
    }
    if may_be_paged && below(3) == 0 {
        let page_size = format.block_size() * (1 + below(3));
        (problem, lengths) = in_pages(problem, page_size, lengths, name);
    }
    if below(3) == 0 {
        problem = problem.v_layout(VLayout::ColMajor);
    }
    let kinds = ["intervals", "bits", "partial", "full", "lists", "all"];
    if let Some(kind) = kinds.get(below(18) as usize) {
        let seed = data.seed ^ 0x6d61_736b;
        masks::draw(&mut problem, &mut lengths, kind, seed);
    }
    (problem.with_block_scales(format).descale_q(of_q).descale_k(of_k).descale_v(of_v), lengths)
}

fn small(dtype: DType, mask: &str) -> FwdProblem {
    let dims = Dims::batch(2).seqlens(30, 41).heads(4, 2).head_dim(48);
    masked(dtype, dims, mask)
}
