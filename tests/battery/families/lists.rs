//! Lists of keys: the keys that a list names, layouts of lists and keys, and modifiers of scores.
//!
//! Rows that no list names are NaN, forward in whole rows of K and V, backward at keys that the lists avoid.

use fmha_core::{
    Append, Bias, BiasBroadcast, BwdProblem, DType, Descale, Dims, ElementwiseBias, FwdProblem, KeyLists,
    KvLayout, ListEntries, ListLength, Rotary, RotaryPairs, Strides, Totals,
};

use super::edges::{data, group, masked};
use super::recipe::fp8_scales;
use crate::case::{Backward, Body, Case, Forward, Plant, WIDE};
use crate::init::mix;
use crate::law::{Law, LawKind};
use crate::tensor::Operand;
use crate::tensors::Lengths;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in WIDE {
        styles(&mut cases, dtype);
        layouts(&mut cases, dtype);
        tokens(&mut cases, dtype);
        head_dims(&mut cases, dtype);
        scores(&mut cases, dtype);
        parts(&mut cases, dtype);
        wide(&mut cases, dtype);
        blocks(&mut cases, dtype);
        unions(&mut cases, dtype);
        gradients(&mut cases, dtype);
        unordered_gradients(&mut cases, dtype);
    }
    caches(&mut cases);
    laws(&mut cases);
    cases
}

/// Kinds of entries of a list.
const STYLES: [&str; 6] = ["scattered", "repeated", "absent", "some_empty", "runs", "beyond"];

/// No list names a key that is 3 modulo this number.
const AVOIDED: u32 = 7;

fn dims(seqlen_q: u32, seqlen_k: u32, heads: (u32, u32), head_dim: u32) -> Dims {
    Dims::batch(2).seqlens(seqlen_q, seqlen_k).heads(heads.0, heads.1).head_dim(head_dim)
}

fn small(dtype: DType) -> FwdProblem {
    masked(dtype, dims(5, 70, (4, 2), 48), "0")
}

/// Gives a problem contiguous lists of `topk` entries, in a given style.
fn with_lists(
    mut problem: FwdProblem,
    mut lengths: Lengths,
    topk: u32,
    style: &str,
    seed: u64,
) -> (FwdProblem, Lengths) {
    problem.lists = Some(KeyLists::new(&problem, topk));
    lengths.indices = indices(&problem, &lengths, style, seed);
    (problem, lengths)
}

/// The entries of every list, in the layout of the problem's strides. Entries between lists or beyond a length name
/// an avoided key.
pub(super) fn indices(problem: &FwdProblem, lengths: &Lengths, style: &str, seed: u64) -> Vec<i32> {
    let Some(lists) = problem.lists else { return vec![] };
    let shape = lists.shape(problem, lengths.totals);
    let elems = lists.strides.extent(shape).unwrap_or(0) as usize;
    let mut all = vec![3; elems];
    let reach = match (lists.entries, problem.layout.kv) {
        (ListEntries::Addresses, KvLayout::Paged { page_size }) => {
            lengths.totals.num_pages.unwrap_or(0) * page_size
        }
        (ListEntries::Blocks { size }, _) => problem.dims.seqlen_k.div_ceil(size),
        _ => problem.dims.seqlen_k,
    };
    for b in 0..shape.batch {
        for (s, h) in (0..shape.seq).flat_map(|s| (0..shape.head).map(move |h| (s, h))) {
            for e in 0..shape.dim {
                let at = lists.strides.offset(b, s, h, e) as usize;
                let token = u64::from(b * shape.seq + s) * 131 + u64::from(h);
                all[at] = entry(style, reach, mix(seed ^ token << 20 ^ u64::from(e)), token, e);
            }
        }
    }
    all
}

fn entry(style: &str, reach: u32, random: u64, token: u64, e: u32) -> i32 {
    let avoid = |key: u32| if key % AVOIDED == 3 { key - 1 } else { key };
    let any = avoid((random % u64::from(reach.max(1))) as u32).cast_signed();
    match style {
        "absent" => [-1, i32::MIN, reach.cast_signed(), i32::MAX][(random % 4) as usize],
        "repeated" => avoid(((token % 5) as u32 + 11 * (random % 3) as u32) % reach.max(1)).cast_signed(),
        "some_empty" if token % 3 == 1 => -1,
        "padded" if u64::from(e) >= 20 + 90 * (token / 131 % 3) => -1,
        "runs" => avoid((token as u32 % 13 + e) % reach.max(1)).cast_signed(),
        "beyond" if random >> 40 & 1 == 1 => (reach + (random >> 48) as u32 % 1000).cast_signed(),
        _ if random >> 50 & 7 == 0 => -1,
        _ => any,
    }
}

fn push(cases: &mut Vec<Case>, name: String, problem: FwdProblem, lengths: Lengths) {
    let hides = problem.cache.append.is_none();
    push_planted(cases, name, problem, lengths, if hides { Plant::HiddenKeys } else { Plant::Nothing });
}

pub(super) fn push_planted(
    cases: &mut Vec<Case>,
    name: String,
    problem: FwdProblem,
    lengths: Lengths,
    plant: Plant,
) {
    let forward = Forward { problem, lengths, data: data(&name), plant };
    cases.push(Case { name, body: Body::Forward(Box::new(forward)) });
}

fn styles(cases: &mut Vec<Case>, dtype: DType) {
    for style in STYLES {
        let name = format!("lists/forward/{dtype}/{style}");
        let (problem, lengths) = with_lists(small(dtype), Lengths::default(), 24, style, data(&name).seed);
        push(cases, name, problem, lengths);
    }
    for (topk, seqlen_k) in [(0, 70), (1, 70), (200, 70), (24, 0), (24, 1), (311, 1000)] {
        let name = format!("lists/topk/{dtype}/{topk}_of_{seqlen_k}");
        let problem = masked(dtype, dims(3, seqlen_k, (4, 2), 48), "0");
        let (problem, lengths) = with_lists(problem, Lengths::default(), topk, "scattered", data(&name).seed);
        push(cases, name, problem, lengths);
    }
}

/// Lengths of lists and of sequences, packed rows, pages by their table and by addresses, strides with gaps, a shared
/// list.
fn layouts(cases: &mut Vec<Case>, dtype: DType) {
    let name = |what: &str| format!("lists/layout/{dtype}/{what}");
    for (word, length, numbers) in [
        ("length_of_sequences", ListLength::Sequence, vec![9, 300]),
        ("length_of_tokens", ListLength::Token, vec![0, 1, 24, 25, -3, 7, 24, i32::MAX, 2, 13]),
    ] {
        let name = name(word);
        let (mut problem, mut lengths) =
            with_lists(small(dtype), Lengths::default(), 24, "scattered", data(&name).seed);
        problem.lists = problem.lists.map(|lists| lists.length(length));
        lengths.topk_length = numbers;
        push(cases, name, problem, lengths);
    }
    let sequences = [(0, 9), (5, 40), (3, 0), (7, 65), (1, 13)];
    for (word, length) in [("packed", ListLength::Whole), ("packed_lengths", ListLength::Token)] {
        let name = name(word);
        let problem = group(dtype, dims(7, 65, (4, 2), 48), &sequences, "0");
        let (mut problem, mut lengths) =
            with_lists(problem, Lengths::packed(&sequences), 20, "scattered", data(&name).seed);
        problem.lists = problem.lists.map(|lists| lists.length(length));
        lengths.topk_length = (0..16).map(|at| at * 3 - 2).collect();
        push(cases, name, problem, lengths);
    }
    for mask in ["0", "b", "t:20,3", "b:9,0,2"] {
        let name = name(&format!("used/{mask}"));
        let problem = masked(dtype, dims(9, 70, (4, 2), 48), mask).seqused_q(true).seqused_k(true);
        let used = Lengths { seqused_q: vec![9, 4], seqused_k: vec![33, 70], ..Lengths::default() };
        let (problem, lengths) = with_lists(problem, used, 24, "scattered", data(&name).seed);
        push(cases, name, problem, lengths);
    }
    for (page_size, mask) in [(1, "0"), (7, "b"), (64, "0")] {
        let name = name(&format!("pages_of_{page_size}"));
        let (problem, lengths) = super::decode::in_pages(
            masked(dtype, dims(3, 70, (4, 2), 48), mask),
            page_size,
            Lengths::default(),
            &name,
        );
        let (problem, lengths) = with_lists(problem, lengths, 24, "scattered", data(&name).seed);
        push(cases, name, problem, lengths);
    }
    for page_size in [5, 64] {
        let name = name(&format!("addresses_of_{page_size}"));
        let mut problem = masked(dtype, dims(3, 0, (4, 1), 48), "0");
        problem.layout.kv = KvLayout::Paged { page_size };
        problem.strides.k = Strides::bshd(problem.shape_k());
        problem.strides.v = Strides::bshd(problem.shape_v());
        problem.lists = Some(KeyLists::new(&problem, 24).entries(ListEntries::Addresses));
        let totals = Totals { num_pages: Some(6), ..Totals::NONE };
        let mut lengths = Lengths { totals, ..Lengths::default() };
        lengths.indices = indices(&problem, &lengths, "beyond", data(&name).seed);
        push(cases, name, problem, lengths);
    }
    for (word, strides) in [
        ("with_gaps", Strides { batch: 1000, seq: 71, head: 31, dim: 1 }),
        ("of_all_heads", Strides { batch: 120, seq: 24, head: 0, dim: 1 }),
        ("of_the_batch", Strides { batch: 0, seq: 48, head: 24, dim: 1 }),
    ] {
        let name = name(word);
        let mut problem = small(dtype);
        problem.lists = Some(KeyLists::new(&problem, 24).strides(strides));
        let mut lengths = Lengths::default();
        lengths.indices = indices(&problem, &lengths, "scattered", data(&name).seed);
        push(cases, name, problem, lengths);
    }
    // Rows of tokens begin at multiples of 8 bytes, and those of sequences at multiples of 16.
    let name = name("tokens_with_gaps");
    let mut problem = masked(dtype, dims(2, 70, (4, 1), 64), "0");
    let with_gaps = Strides { batch: 520, seq: 260, head: 64, dim: 1 };
    (problem.strides.q, problem.strides.o) = (with_gaps, with_gaps);
    let (problem, lengths) = with_lists(problem, Lengths::default(), 24, "scattered", data(&name).seed);
    push(cases, name, problem, lengths);
}

fn tokens(cases: &mut Vec<Case>, dtype: DType) {
    for seqlen_q in [1, 2, 3, 4, 5, 8, 16] {
        let name = format!("lists/tokens/{dtype}/q{seqlen_q}");
        let problem = masked(dtype, dims(seqlen_q, 90, (6, 2), 64), "b");
        let (problem, lengths) = with_lists(problem, Lengths::default(), 40, "scattered", data(&name).seed);
        push(cases, name, problem, lengths);
    }
}

/// Head dimensions up to 256, and latent ones with V in K's rows.
fn head_dims(cases: &mut Vec<Case>, dtype: DType) {
    for (qk, v, heads) in [
        (64, 64, (2, 2)),
        (80, 80, (5, 1)),
        (128, 128, (8, 1)),
        (192, 128, (2, 1)),
        (256, 256, (2, 1)),
        (33, 17, (3, 3)),
    ] {
        let name = format!("lists/heads/{dtype}/d{qk}x{v}/h{}x{}", heads.0, heads.1);
        let sizes = Dims { head_dim_v: v, ..dims(2, 60, heads, qk) };
        let (problem, lengths) =
            with_lists(masked(dtype, sizes, "0"), Lengths::default(), 30, "scattered", data(&name).seed);
        push(cases, name, problem, lengths);
    }
    for (qk, v, heads, page_size) in [
        (24, 16, 4, None),
        (576, 512, 16, None),
        (576, 512, 5, Some(64)),
        (512, 512, 20, None),
        (72, 64, 128, Some(16)),
    ] {
        let layout = page_size.map_or("strided".to_owned(), |size: u32| format!("p{size}"));
        let name = format!("lists/latent/{dtype}/d{qk}x{v}/h{heads}/{layout}");
        let sizes = Dims { head_dim_v: v, batch: 1, ..dims(2, 40, (heads, 1), qk) };
        let (mut problem, mut lengths) = (masked(dtype, sizes, "0").sink(true), Lengths::default());
        (problem, lengths) = super::decode::placed(problem, page_size, lengths, &name);
        (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
        let (problem, lengths) = with_lists(problem, lengths, 24, "scattered", data(&name).seed);
        push(cases, name, problem, lengths);
    }
}

const MODIFIERS: [&str; 10] = [
    "softcap",
    "alibi",
    "bias",
    "sink",
    "sink_apart",
    "infinite_sink",
    "infinite_sink_apart",
    "dropout",
    "negative_scale",
    "all",
];

fn modified(mut problem: FwdProblem, modifier: &str) -> FwdProblem {
    let all = modifier == "all";
    if all || modifier == "softcap" {
        problem = problem.softcap(2.0);
    }
    if all || modifier == "bias" {
        let bias = ElementwiseBias {
            broadcast: BiasBroadcast::BatchHead,
            dtype: problem.dtypes.qk,
            strides: Strides::bhsd(problem.shape_bias(BiasBroadcast::BatchHead)),
        };
        problem = problem.bias(Bias::Elementwise(bias));
    }
    if modifier == "alibi" {
        problem = problem.bias(Bias::Alibi { per_batch: true });
    }
    if all || modifier.contains("sink") {
        problem = problem.sink(true);
    }
    if all || modifier == "dropout" {
        problem = problem.p_drop(0.3);
    }
    if modifier == "negative_scale" {
        problem = problem.softmax_scale(-0.2);
    }
    problem
}

/// Problem of a modifier's name. If the name ends with "apart", LSE leaves sinks out.
fn finished(problem: FwdProblem, modifier: &str) -> FwdProblem {
    let apart = modifier.ends_with("apart");
    let lists = problem.lists.map(|lists| lists.lse_without_sink(apart));
    problem.lists(lists)
}

fn scores(cases: &mut Vec<Case>, dtype: DType) {
    for modifier in MODIFIERS {
        for style in ["scattered", "some_empty"] {
            let name = format!("lists/score/{dtype}/{modifier}/{style}");
            let problem = modified(masked(dtype, dims(4, 70, (4, 2), 48), "b"), modifier);
            let (problem, lengths) = with_lists(problem, Lengths::default(), 24, style, data(&name).seed);
            let infinite = Plant::FarRows { bias: None, sink: Some(f64::INFINITY) };
            let plant = if modifier.starts_with("infinite") { infinite } else { Plant::HiddenKeys };
            push_planted(cases, name, finished(problem, modifier), lengths, plant);
        }
    }
}

/// Long lists of few tokens, which kernels cut into parts: some of a part's entries absent, or all of every
/// part; sinks, which join in the merge; lengths that end in a part.
fn parts(cases: &mut Vec<Case>, dtype: DType) {
    for (style, modifier) in [
        ("scattered", ""),
        ("absent", ""),
        ("some_empty", "sink"),
        ("beyond", "sink_apart"),
        ("some_empty", "infinite_sink"),
        ("scattered", "infinite_sink_apart"),
        ("repeated", "softcap"),
    ] {
        let name = format!("lists/parts/{dtype}/{style}/{modifier}");
        let sizes = Dims { batch: 1, ..dims(3, 2000, (4, 1), 64) };
        let problem = modified(masked(dtype, sizes, "b"), modifier);
        let (mut problem, mut lengths) =
            with_lists(problem, Lengths::default(), 1500, style, data(&name).seed);
        problem.lists = problem.lists.map(|lists| lists.length(ListLength::Token));
        lengths.topk_length = vec![1500, 700, 1031];
        let infinite = Plant::FarRows { bias: None, sink: Some(f64::INFINITY) };
        let plant = if modifier.starts_with("infinite") { infinite } else { Plant::HiddenKeys };
        push_planted(cases, name, finished(problem, modifier), lengths, plant);
    }
    let name = format!("lists/parts/{dtype}/latent");
    let sizes = Dims { head_dim_v: 512, batch: 1, ..dims(1, 900, (20, 1), 576) };
    let mut problem = masked(dtype, sizes, "0").sink(true);
    (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
    let (problem, lengths) = with_lists(problem, Lengths::default(), 1000, "beyond", data(&name).seed);
    push(cases, name, problem, lengths);
}

/// Blocks of keys, among them the token's own, which the band cuts.
fn blocks(cases: &mut Vec<Case>, dtype: DType) {
    for (size, mask) in [(1, "b"), (7, "0"), (16, "b"), (64, "b"), (128, "b:100,0")] {
        let name = format!("lists/blocks/{dtype}/b{size}/{mask}");
        let mut problem = masked(dtype, dims(6, 300, (4, 2), 48), mask);
        problem.lists = Some(KeyLists::new(&problem, 3).entries(ListEntries::Blocks { size }));
        let mut lengths = Lengths::default();
        lengths.indices = indices(&problem, &lengths, "scattered", data(&name).seed);
        push(cases, name, problem, lengths);
    }
}

/// Blocks of many tokens, which a tile may unite: groups that fill a tile's rows and that leave rows over, blocks that
/// begin and end inside a tile's, blocks named several times, bands, sinks, pages, and a NaN that only some rows see.
fn unions(cases: &mut Vec<Case>, dtype: DType) {
    let name = |what: &str| format!("lists/union/{dtype}/{what}");
    let listed = |mut problem: FwdProblem, topk: u32, size: u32| {
        problem.lists = Some(KeyLists::new(&problem, topk).entries(ListEntries::Blocks { size }));
        problem
    };
    let one = |dims: Dims| Dims { batch: 1, ..dims };
    let drawn = |cases: &mut Vec<Case>,
                 name: String,
                 problem: FwdProblem,
                 mut lengths: Lengths,
                 style: &str,
                 plant| {
        lengths.indices = indices(&problem, &lengths, style, data(&name).seed);
        push_planted(cases, name, problem, lengths, plant);
    };
    for (heads, tokens, size, topk, style, mask) in [
        ((16, 1), 6, 64, 3, "scattered", "b"),
        ((8, 2), 20, 16, 9, "repeated", "b"),
        ((5, 1), 14, 32, 4, "some_empty", "b"),
        ((1, 1), 70, 24, 5, "runs", "0"),
        ((4, 1), 33, 128, 2, "beyond", "b:100,0"),
        ((4, 1), 17, 40, 4, "scattered", "b:150,0,9"),
        ((2, 1), 40, 8, 30, "absent", "0"),
        ((32, 1), 3, 64, 2, "scattered", "0"),
    ] {
        let name = name(&format!("h{}x{}/b{size}/{style}", heads.0, heads.1));
        let problem = listed(masked(dtype, one(dims(tokens, 300, heads, 64)), mask), topk, size);
        drawn(cases, name, problem, Lengths::default(), style, Plant::HiddenKeys);
    }
    for tokens in [1, 2, 3, 5, 8, 16] {
        let problem = listed(masked(dtype, dims(tokens, 130, (8, 2), 48), "b"), 4, 16);
        drawn(
            cases,
            name(&format!("q{tokens}")),
            problem,
            Lengths::default(),
            "scattered",
            Plant::HiddenKeys,
        );
    }
    for (qk, v) in [(192, 128), (256, 256), (128, 128), (33, 17)] {
        let sizes = Dims { head_dim_v: v, ..one(dims(5, 200, (16, 1), qk)) };
        let problem = listed(masked(dtype, sizes, "b"), 3, 64);
        drawn(
            cases,
            name(&format!("d{qk}x{v}")),
            problem,
            Lengths::default(),
            "scattered",
            Plant::HiddenKeys,
        );
    }
    for modifier in ["softcap", "sink", "sink_apart", "infinite_sink_apart", "negative_scale"] {
        let problem = modified(masked(dtype, one(dims(9, 150, (8, 1), 48)), "b"), modifier);
        let infinite = Plant::FarRows { bias: None, sink: Some(f64::INFINITY) };
        let plant = if modifier.starts_with("infinite") { infinite } else { Plant::HiddenKeys };
        let problem = finished(listed(problem, 4, 16), modifier);
        drawn(cases, name(modifier), problem, Lengths::default(), "some_empty", plant);
    }
    for page_size in [7, 64] {
        let (problem, lengths) = super::decode::in_pages(
            masked(dtype, dims(9, 150, (8, 2), 48), "b"),
            page_size,
            Lengths::default(),
            &name("pages"),
        );
        let name = name(&format!("pages_of_{page_size}"));
        drawn(cases, name, listed(problem, 4, 16), lengths, "scattered", Plant::HiddenKeys);
    }
    let sequences = [(0, 9), (20, 140), (3, 0), (7, 165), (1, 13)];
    let problem = listed(group(dtype, dims(20, 165, (8, 2), 48), &sequences, "b"), 5, 32);
    let mut problem = problem;
    problem.lists = problem.lists.map(|lists| lists.length(ListLength::Token));
    let mut lengths = Lengths::packed(&sequences);
    lengths.topk_length = (0..31).map(|at| at % 8 - 1).collect();
    drawn(cases, name("packed"), problem, lengths, "scattered", Plant::HiddenKeys);
    // A value that is no number reaches the rows whose lists name it, and no others of a tile.
    let problem = listed(masked(dtype, one(dims(9, 150, (8, 1), 48)), "0"), 4, 16);
    drawn(
        cases,
        name("nan"),
        problem,
        Lengths::default(),
        "runs",
        Plant::At(Operand::V, [0, 70, 0, 3], f64::NAN),
    );
    if dtype != DType::F32 {
        let mut problem = listed(masked(dtype, one(dims(9, 150, (8, 1), 64)), "b"), 4, 32);
        problem.cache.dtype = Some(DType::E4m3Fn);
        (problem.scales.descale_k, problem.scales.descale_v) = (Descale::PerKvHead, Descale::PerTensor);
        drawn(cases, name("fp8_cache"), problem, Lengths::default(), "scattered", Plant::HiddenKeys);
    }
    for seed in 1..=4 {
        drawn_blocks(cases, name(&format!("drawn/{seed}")), dtype, seed);
    }
    // A row alone has the bits that it has beside others.
    for (heads, tokens, size, style) in [
        ((8, 2), 5, 16, "scattered"),
        ((16, 1), 7, 64, "repeated"),
        ((3, 1), 30, 32, "runs"),
        ((4, 1), 18, 24, "some_empty"),
    ] {
        let name = name(&format!("alone/h{}x{}/b{size}", heads.0, heads.1));
        let problem = listed(masked(dtype, one(dims(tokens, 200, heads, 64)), "b"), 4, size);
        let mut lengths = Lengths::default();
        lengths.indices = indices(&problem, &lengths, style, data(&name).seed);
        let forward = Forward { problem, lengths, data: data(&name), plant: Plant::Nothing };
        cases.push(Case { name, body: Body::Law(Box::new(Law { forward, kind: LawKind::LastOfMany })) });
    }
}

/// A call over lists of blocks that a seed draws: heads, tokens, keys, head dimension, blocks, band, sink, style,
/// entries in use, pages.
fn drawn_blocks(cases: &mut Vec<Case>, name: String, dtype: DType, seed: u64) {
    let draw = |what: u64, most: u32| (mix(seed << 8 ^ what ^ 0xb10c) % u64::from(most)) as u32;
    let ratio = 1 + draw(1, 20);
    let head_dim = [32, 64, 80, 128][draw(2, 4) as usize];
    let tokens = 1 + draw(3, 40);
    let sizes = Dims { batch: 1, ..dims(tokens, 20 + draw(4, 400), (ratio, 1), head_dim) };
    let mask = ["0", "b", "b:90,0", "t:60,9", "b:40,0,17"][draw(5, 5) as usize];
    let (mut problem, mut lengths) = (masked(dtype, sizes, mask).sink(draw(6, 2) == 1), Lengths::default());
    if draw(7, 2) == 1 {
        (problem, lengths) = super::decode::in_pages(problem, 1 + draw(8, 40), lengths, &name);
    }
    let (topk, size) = (1 + draw(9, 12), [8, 16, 24, 32, 48, 64, 72, 128][draw(10, 8) as usize]);
    problem.lists =
        Some(KeyLists::new(&problem, topk).entries(ListEntries::Blocks { size }).length(ListLength::Token));
    lengths.topk_length = (0..tokens).map(|i| draw(20 + u64::from(i), topk + 4).cast_signed() - 1).collect();
    let style = STYLES[draw(11, STYLES.len() as u32) as usize];
    lengths.indices = indices(&problem, &lengths, style, seed);
    push(cases, name, problem, lengths);
}

/// Latent rows over lists of several blocks: V in K's rows, with and without further elements, and separate V.
fn wide(cases: &mut Vec<Case>, dtype: DType) {
    let sized = |batch, tokens, keys, heads, qk| Dims {
        head_dim_v: 512,
        batch,
        ..dims(tokens, keys, (heads, 1), qk)
    };
    let in_k = |mut problem: FwdProblem| {
        (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
        problem
    };
    let name = |what: &str| format!("lists/wide/{dtype}/{what}");
    for (style, qk) in
        [("scattered", 576), ("some_empty", 576), ("repeated", 512), ("absent", 512), ("beyond", 512)]
    {
        let name = name(&format!("d{qk}/{style}"));
        let problem = in_k(masked(dtype, sized(1, 3, 190, 5, qk), "b"));
        let (problem, lengths) = with_lists(problem, Lengths::default(), 150, style, data(&name).seed);
        push(cases, name, problem, lengths);
    }
    // A token has two tiles of heads, and a tile's rows end inside a token.
    let apart = name("d576/apart/h70");
    let (mut problem, mut lengths) =
        with_lists(masked(dtype, sized(1, 2, 100, 70, 576), "0"), Lengths::default(), 130, "scattered", 5);
    problem.lists = problem.lists.map(|lists| lists.length(ListLength::Token));
    lengths.topk_length = vec![65, 999];
    push(cases, apart, problem, lengths);
    let many = name("d576/infinite_sink_apart/h128");
    let problem = in_k(masked(dtype, sized(1, 2, 100, 128, 576), "0").sink(true));
    let (problem, lengths) = with_lists(problem, Lengths::default(), 70, "some_empty", data(&many).seed);
    let plant = Plant::FarRows { bias: None, sink: Some(f64::INFINITY) };
    push_planted(cases, many, finished(problem, "infinite_sink_apart"), lengths, plant);
    let sequences = [(0, 9), (5, 140), (3, 0), (2, 165), (1, 13)];
    for qk in [576, 512] {
        let name = name(&format!("d{qk}/packed"));
        let problem = in_k(group(dtype, Dims { batch: 5, ..sized(1, 5, 165, 3, qk) }, &sequences, "b"));
        let (mut problem, mut lengths) =
            with_lists(problem, Lengths::packed(&sequences), 200, "scattered", data(&name).seed);
        problem.lists = problem.lists.map(|lists| lists.length(ListLength::Token));
        lengths.topk_length = vec![200, 0, 64, 65, -1, 300, 128, 129, 1, 199, 70];
        push(cases, name, problem, lengths);
    }
    for (qk, page_size) in [(576, 5), (512, 64)] {
        let name = name(&format!("d{qk}/addresses_of_{page_size}"));
        let mut problem = masked(dtype, sized(2, 2, 0, 4, qk), "0").softcap(2.0);
        problem.layout.kv = KvLayout::Paged { page_size };
        problem.strides.k = Strides::bshd(problem.shape_k());
        problem = in_k(problem);
        problem.lists = Some(KeyLists::new(&problem, 140).entries(ListEntries::Addresses));
        let totals = Totals { num_pages: Some(7), ..Totals::NONE };
        let mut lengths = Lengths { totals, ..Lengths::default() };
        lengths.indices = indices(&problem, &lengths, "beyond", data(&name).seed);
        push(cases, name, problem, lengths);
    }
    for (what, topk, size) in [("pages_of_7", 200, 1), ("blocks_of_16", 9, 16)] {
        let name = name(&format!("d576/{what}"));
        let (mut problem, mut lengths) = (masked(dtype, sized(1, 2, 170, 4, 576), "b"), Lengths::default());
        if size == 1 {
            (problem, lengths) = super::decode::in_pages(problem, 7, lengths, &name);
        }
        problem = in_k(problem);
        let entries = if size == 1 { ListEntries::Positions } else { ListEntries::Blocks { size } };
        problem.lists = Some(KeyLists::new(&problem, topk).entries(entries));
        lengths.indices = indices(&problem, &lengths, "scattered", data(&name).seed);
        push(cases, name, problem, lengths);
    }
    let padded = name("d576/padded");
    let problem = in_k(masked(dtype, sized(1, 3, 190, 3, 576), "0"));
    let (problem, lengths) = with_lists(problem, Lengths::default(), 400, "padded", data(&padded).seed);
    push(cases, padded, problem, lengths);
    for seed in 1..=3 {
        drawn(cases, name(&format!("drawn/{seed}")), dtype, seed);
    }
    let long = name("d512/parts");
    let problem = in_k(masked(dtype, sized(1, 1, 900, 20, 512), "0").sink(true));
    let (problem, lengths) = with_lists(problem, Lengths::default(), 700, "beyond", data(&long).seed);
    push(cases, long, finished(problem, "sink_apart"), lengths);
}

/// Draws a call over latent rows: lengths, heads, band, sink, style, entries in use, pages.
fn drawn(cases: &mut Vec<Case>, name: String, dtype: DType, seed: u64) {
    let draw = |what: u64, most: u32| (mix(seed << 8 ^ what) % u64::from(most)) as u32;
    let qk = [576, 512][draw(0, 2) as usize];
    let (tokens, heads) = (1 + draw(1, 4), 1 + draw(2, 70));
    let sizes = Dims { head_dim_v: 512, batch: 1, ..dims(tokens, 40 + draw(3, 200), (heads, 1), qk) };
    let mask = ["0", "b"][draw(4, 2) as usize];
    let (mut problem, mut lengths) = (masked(dtype, sizes, mask).sink(draw(5, 2) == 1), Lengths::default());
    if draw(6, 2) == 1 {
        (problem, lengths) = super::decode::in_pages(problem, 1 + draw(7, 20), lengths, &name);
    }
    (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
    let topk = 1 + draw(8, 300);
    let style = STYLES[draw(9, STYLES.len() as u32) as usize];
    let (mut problem, mut lengths) = with_lists(problem, lengths, topk, style, seed);
    problem.lists = problem.lists.map(|lists| lists.length(ListLength::Token));
    lengths.topk_length = (0..tokens).map(|i| draw(10 + u64::from(i), topk + 9).cast_signed() - 4).collect();
    push(cases, name, problem, lengths);
}

/// Caches with appended rows, with rotary embedding, in a narrower type than the queries, and with FP8 throughout.
fn caches(cases: &mut Vec<Case>) {
    for dtype in [DType::F16, DType::Bf16] {
        for (new, rotary) in [(2, None), (3, Some(16))] {
            let name = format!("lists/appended/{dtype}/new{new}/r{}", rotary.unwrap_or(0));
            let mut problem = masked(dtype, dims(3, 40, (4, 2), 48), "b").seqused_k(true);
            problem.cache.append = Some(Append::batch(&problem, new));
            problem.cache.rotary =
                rotary.map(|dim| Rotary { dim, pairs: RotaryPairs::Half, max_pos: 64, dtype: DType::F32 });
            let used = Lengths { seqused_k: vec![30, 5], ..Lengths::default() };
            let (problem, lengths) = with_lists(problem, used, 24, "scattered", data(&name).seed);
            push(cases, name, problem, lengths);
        }
        for (cache, descale) in [(DType::E4m3Fn, Descale::PerTensor), (DType::E5m2Fnuz, Descale::PerKvHead)] {
            let name = format!("lists/fp8_cache/{cache}/{dtype}");
            let mut problem = small(dtype);
            problem.cache.dtype = Some(cache);
            (problem.scales.descale_k, problem.scales.descale_v) = (descale, descale);
            let (problem, lengths) = with_lists(problem, Lengths::default(), 24, "runs", data(&name).seed);
            push(cases, name, problem, lengths);
        }
        for (cache, descale, qk, page_size, v_in_k) in [
            (DType::E4m3Fn, Descale::PerTensor, 576, None, true),
            (DType::E5m2, Descale::PerKvHead, 512, Some(7), true),
            (DType::E4m3Fn, Descale::PerKvHead, 576, None, false),
        ] {
            let apart = if v_in_k { "" } else { "/apart" };
            let name = format!("lists/wide_fp8/{cache}/{dtype}/d{qk}{apart}");
            let sizes = Dims { head_dim_v: 512, batch: 1, ..dims(3, 170, (5, 1), qk) };
            let (mut problem, mut lengths) = (masked(dtype, sizes, "b").sink(true), Lengths::default());
            (problem, lengths) = super::decode::placed(problem, page_size, lengths, &name);
            if v_in_k {
                (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
            }
            problem.cache.dtype = Some(cache);
            (problem.scales.descale_k, problem.scales.descale_v) = (descale, descale);
            let (problem, lengths) = with_lists(problem, lengths, 150, "scattered", data(&name).seed);
            push(cases, name, problem, lengths);
        }
    }
    for dtype in [DType::E4m3Fn, DType::E5m2Fnuz] {
        let name = format!("lists/fp8/{dtype}");
        let mut problem = small(dtype);
        fp8_scales(Descale::PerKvHead, &mut problem);
        let (problem, lengths) = with_lists(problem, Lengths::default(), 24, "scattered", data(&name).seed);
        push(cases, name, problem, lengths);
    }
}

/// Calls without tokens, or without keys.
const NOTHING: [(u32, u32); 3] = [(0, 5), (5, 0), (0, 0)];

/// Gradients with ordered sums; each case runs twice and must have equal bits.
fn gradients(cases: &mut Vec<Case>, dtype: DType) {
    let mut push =
        |name: String, problem: FwdProblem, lengths: Lengths, change: &dyn Fn(BwdProblem) -> BwdProblem| {
            let planted = avoided(&problem);
            let (numbers, problem) = (data(&name), change(BwdProblem::new(problem)));
            let body = Backward { problem, lengths, data: numbers, deterministic: true, planted };
            cases.push(Case { name, body: Body::Backward(Box::new(body)) });
        };
    for style in STYLES {
        let name = format!("lists/backward/{dtype}/{style}");
        let (problem, lengths) = with_lists(small(dtype), Lengths::default(), 24, style, data(&name).seed);
        push(name, problem, lengths, &|problem| problem.has_dlse(true));
    }
    for modifier in MODIFIERS.into_iter().filter(|modifier| !modifier.starts_with("infinite")) {
        let name = format!("lists/backward/{dtype}/{modifier}");
        let problem = modified(masked(dtype, dims(6, 70, (4, 2), 48), "b"), modifier);
        let (problem, lengths) = with_lists(problem, Lengths::default(), 24, "some_empty", data(&name).seed);
        let problem = finished(problem, modifier);
        let (sink, apart) = (problem.score.sink, modifier.ends_with("apart"));
        push(name, problem, lengths, &|problem| problem.write_dsink(sink).has_dlse(!apart));
    }
    let sequences = [(0, 9), (5, 40), (3, 0), (7, 65), (1, 13)];
    let name = format!("lists/backward/{dtype}/packed");
    let problem = group(dtype, dims(7, 65, (4, 2), 48), &sequences, "b");
    let (problem, lengths) =
        with_lists(problem, Lengths::packed(&sequences), 20, "scattered", data(&name).seed);
    push(name, problem, lengths, &|problem| problem);
    for (qk, v, heads, seqlen_q, topk) in [
        (64, 64, (3, 3), 40, 70),
        (128, 128, (8, 1), 9, 100),
        (576, 512, (16, 1), 3, 24),
        (40, 24, (33, 1), 5, 30),
    ] {
        let name = format!("lists/backward/{dtype}/d{qk}x{v}/h{}x{}", heads.0, heads.1);
        let sizes = Dims { head_dim_v: v, ..dims(seqlen_q, 60, heads, qk) };
        let (problem, lengths) =
            with_lists(masked(dtype, sizes, "b"), Lengths::default(), topk, "scattered", data(&name).seed);
        push(name, problem, lengths, &|problem| problem);
    }
    for (seqlen_q, seqlen_k) in NOTHING {
        let name = format!("lists/backward/{dtype}/{seqlen_q}_of_{seqlen_k}");
        let problem = masked(dtype, dims(seqlen_q, seqlen_k, (4, 2), 48), "b");
        let (problem, lengths) = with_lists(problem, Lengths::default(), 8, "scattered", data(&name).seed);
        push(name, problem, lengths, &|problem| problem);
    }
    for size in [16, 64] {
        let name = format!("lists/backward/{dtype}/blocks_of_{size}");
        let mut problem = masked(dtype, dims(6, 200, (4, 2), 48), "b");
        problem.lists = Some(KeyLists::new(&problem, 3).entries(ListEntries::Blocks { size }));
        let mut lengths = Lengths::default();
        lengths.indices = indices(&problem, &lengths, "scattered", data(&name).seed);
        push(name, problem, lengths, &|problem| problem);
    }
}

/// Cases of gradients whose sums have no order.
fn unordered_gradients(cases: &mut Vec<Case>, dtype: DType) {
    let mut push = |name: String, problem: FwdProblem, lengths: Lengths| {
        let planted = avoided(&problem);
        let problem = BwdProblem::new(problem);
        let body = Backward { problem, lengths, data: data(&name), deterministic: false, planted };
        cases.push(Case { name, body: Body::Backward(Box::new(body)) });
    };
    for (qk, v, heads, seqlen_q, topk, style) in [
        (64, 64, (4, 2), 20, 70, "scattered"),
        (48, 48, (3, 3), 9, 24, "repeated"),
        (128, 128, (8, 1), 9, 100, "some_empty"),
        (128, 64, (40, 1), 4, 40, "beyond"),
        (256, 256, (16, 1), 5, 60, "scattered"),
        (576, 512, (20, 1), 3, 40, "scattered"),
        (512, 512, (64, 1), 2, 70, "absent"),
    ] {
        let name = format!("lists/unordered/{dtype}/d{qk}x{v}/h{}x{}/{style}", heads.0, heads.1);
        let sizes = Dims { head_dim_v: v, ..dims(seqlen_q, 90, heads, qk) };
        let (problem, lengths) = with_lists(
            masked(dtype, sizes, "b").sink(true),
            Lengths::default(),
            topk,
            style,
            data(&name).seed,
        );
        push(name, problem, lengths);
    }
    // Latent rows: more heads than a tile has, and blocks of keys that are all absent.
    for (qk, heads, seqlen_q, topk, style) in [
        (576, (128, 1), 3, 200, "padded"),
        (576, (130, 1), 1, 70, "repeated"),
        (512, (6, 2), 2, 130, "some_empty"),
    ] {
        let name = format!("lists/unordered/{dtype}/latent/d{qk}/h{}x{}/{style}", heads.0, heads.1);
        let sizes = Dims { head_dim_v: 512, batch: 1, ..dims(seqlen_q, 150, heads, qk) };
        let (problem, lengths) =
            with_lists(masked(dtype, sizes, "0"), Lengths::default(), topk, style, data(&name).seed);
        push(name, problem, lengths);
    }
    let sequences = [(0, 9), (2, 40), (3, 0), (1, 65)];
    let name = format!("lists/unordered/{dtype}/latent/packed");
    let sizes = Dims { head_dim_v: 512, ..dims(3, 65, (4, 1), 576) };
    let (problem, lengths) = with_lists(
        group(dtype, sizes, &sequences, "b"),
        Lengths::packed(&sequences),
        70,
        "scattered",
        data(&name).seed,
    );
    push(name, problem, lengths);
    let sequences = [(0, 9), (5, 40), (3, 0), (7, 65), (1, 13)];
    let name = format!("lists/unordered/{dtype}/packed");
    let problem = group(dtype, dims(7, 65, (4, 2), 48), &sequences, "b");
    let (problem, lengths) =
        with_lists(problem.softcap(2.0), Lengths::packed(&sequences), 20, "scattered", data(&name).seed);
    push(name, problem, lengths);
    for (seqlen_q, seqlen_k) in NOTHING {
        let name = format!("lists/unordered/{dtype}/{seqlen_q}_of_{seqlen_k}");
        let problem = masked(dtype, dims(seqlen_q, seqlen_k, (4, 2), 48), "b");
        let (problem, lengths) = with_lists(problem, Lengths::default(), 8, "scattered", data(&name).seed);
        push(name, problem, lengths);
    }
    let name = format!("lists/unordered/{dtype}/blocks");
    let mut problem = masked(dtype, dims(6, 200, (8, 2), 64), "b");
    problem.lists = Some(KeyLists::new(&problem, 3).entries(ListEntries::Blocks { size: 16 }));
    let mut lengths = Lengths::default();
    lengths.indices = indices(&problem, &lengths, "scattered", data(&name).seed);
    push(name, problem, lengths);
}

/// Plants NaN in K and V at keys that no list names.
fn avoided(problem: &FwdProblem) -> Vec<(Operand, [u32; 4], f64)> {
    let dims = problem.dims;
    let is_plain = problem.layout.kv == KvLayout::Strided;
    if !is_plain || problem.lists.is_none_or(|lists| lists.entries != ListEntries::Positions) {
        return vec![];
    }
    let keys = (0..dims.seqlen_k).filter(|key| key % AVOIDED == 3);
    keys.flat_map(|key| {
        [(Operand::K, 5), (Operand::V, 7)].map(|(operand, dim)| (operand, [0, key, 0, dim], f64::NAN))
    })
    .collect()
}

/// Laws of lists: calls whose bits must be equal.
fn laws(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for (word, kind) in [("twice", LawKind::Twice), ("repeated", LawKind::Repeated(5))] {
            // Kernels that know only the position in a list support no dropout.
            for (kept, p_drop) in [("", 0.1), ("/whole", 0.0)] {
                let name = format!("lists/{word}/{dtype}{kept}");
                let problem = masked(dtype, dims(9, 300, (8, 2), 64), "b").sink(true).p_drop(p_drop);
                let (problem, lengths) =
                    with_lists(problem, Lengths::default(), 130, "scattered", data(&name).seed);
                let forward = Forward { problem, lengths, data: data(&name), plant: Plant::Nothing };
                cases.push(Case { name, body: Body::Law(Box::new(Law { forward, kind })) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_name_what_their_style_says() {
        let (problem, lengths) = with_lists(small(DType::F32), Lengths::default(), 24, "scattered", 5);
        let named: Vec<i32> = lengths.indices.iter().copied().filter(|&key| (0..70).contains(&key)).collect();
        assert!(named.len() * 3 > lengths.indices.len() && named.len() < lengths.indices.len());
        assert!(named.iter().all(|key| key % AVOIDED.cast_signed() != 3));
        let absent = indices(&problem, &Lengths::default(), "absent", 5);
        assert!(absent.iter().all(|key| !(0..70).contains(key)) && absent.len() == lengths.indices.len());
        let mut repeated = indices(&problem, &Lengths::default(), "repeated", 5)[..24].to_vec();
        repeated.sort_unstable();
        repeated.dedup();
        assert!(repeated.len() <= 3);
    }
}
