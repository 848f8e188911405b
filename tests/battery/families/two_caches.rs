//! Two caches in one softmax: which keys of each are visible, and their layouts. Rows that no query sees are NaN in
//! both caches.

use fmha_core::{
    Append, CacheRows, DType, Dims, FwdProblem, Intervals, KeyLists, KvLayout, ListEntries, ListLength,
    MaskAxes, SecondCache, Strides, Totals,
};

use super::edges::{data, group, masked};
use super::lists::{indices, push_planted};
use crate::case::{Case, Plant, WIDE};
use crate::tensor::Operand;
use crate::tensors::Lengths;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in WIDE {
        ways(&mut cases, dtype);
        places(&mut cases, dtype);
        scores(&mut cases, dtype);
        parts(&mut cases, dtype);
        latent(&mut cases, dtype);
    }
    rows_of_bytes(&mut cases);
    cases
}

/// Keys of the second cache that a row may see.
#[derive(Clone, Copy)]
enum Seen {
    Whole,
    /// Compressed keys of this ratio: key j of row i iff j < floor((i + 1) / ratio).
    Compressed(u32),
    /// Lists with this many entries, in one of several styles.
    List(u32, &'static str),
}

fn dims(seqlen_q: u32, seqlen_k: u32, heads: (u32, u32), head_dim: u32) -> Dims {
    Dims::batch(2).seqlens(seqlen_q, seqlen_k).heads(heads.0, heads.1).head_dim(head_dim)
}

/// Gives the first cache lists of keys.
fn listed(
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

/// Gives the second cache's rows intervals of compressed keys.
fn compressed(problem: &FwdProblem, lengths: &Lengths, ratio: u32) -> (Intervals, Vec<i32>) {
    match lengths.totals.total_q {
        None => {
            let rows = problem.dims.seqlen_q;
            let intervals = Intervals::batch(problem, MaskAxes::SHARED, 2);
            (intervals, (0..2 * rows).map(|at| ends(at, rows, ratio)).collect())
        }
        Some(total) => {
            (Intervals::packed(total, 1, 2), (0..2 * total).map(|at| ends(at, total, ratio)).collect())
        }
    }
}

/// Endpoints 0 and floor((i + 1) / ratio) of row i.
fn ends(at: u32, rows: u32, ratio: u32) -> i32 {
    if at < rows { 0 } else { ((at - rows + 1) / ratio).cast_signed() }
}

/// Adds a second cache of `seqlen_k` keys.
fn with_second(
    mut problem: FwdProblem,
    mut lengths: Lengths,
    (layout, seqlen_k): (KvLayout, u32),
    mut of_second: Lengths,
    seen: Seen,
    seed: u64,
) -> (FwdProblem, Lengths) {
    let mut second = SecondCache::new(&problem, layout, seqlen_k);
    second.seqused_k = !of_second.seqused_k.is_empty();
    match seen {
        Seen::Whole => {}
        Seen::Compressed(ratio) => {
            let (intervals, numbers) = compressed(&problem, &lengths, ratio);
            (second.intervals, of_second.masks.intervals) = (Some(intervals), numbers);
        }
        Seen::List(topk, style) => {
            let mut alone = second.alone(&problem);
            alone.lists = Some(KeyLists::new(&alone, topk));
            second.lists = alone.lists;
            let totals = Totals { total_q: lengths.totals.total_q, ..of_second.totals };
            let placed = Lengths { totals, ..of_second.clone() };
            of_second.indices = indices(&alone, &placed, style, seed ^ 0x5ec0);
        }
    }
    problem.second = Some(second);
    lengths.second = Some(Box::new(of_second));
    (problem, lengths)
}

fn push(cases: &mut Vec<Case>, name: String, problem: FwdProblem, lengths: Lengths) {
    push_planted(cases, name, problem, lengths, Plant::HiddenKeys);
}

const STRIDED: KvLayout = KvLayout::Strided;

/// Each way to select keys of the first cache with each for the second; also empty lists, and caches without keys.
fn ways(cases: &mut Vec<Case>, dtype: DType) {
    let name = |what: &str| format!("lists/two/{dtype}/{what}");
    for (word, seen) in [
        ("whole", Seen::Whole),
        ("compressed", Seen::Compressed(4)),
        ("list", Seen::List(20, "scattered")),
        ("repeated", Seen::List(40, "repeated")),
        ("absent", Seen::List(9, "absent")),
        ("no_entries", Seen::List(0, "scattered")),
    ] {
        for mask in ["0", "b:15,0", "b:4,0,3"] {
            let name = name(&format!("band/{mask}/{word}"));
            let problem = masked(dtype, dims(5, 70, (4, 2), 48), mask);
            let at = (STRIDED, 40);
            let (problem, lengths) =
                with_second(problem, Lengths::default(), at, Lengths::default(), seen, data(&name).seed);
            push(cases, name, problem, lengths);
        }
        for style in ["scattered", "absent", "some_empty"] {
            let name = name(&format!("list/{style}/{word}"));
            let problem = masked(dtype, dims(5, 70, (4, 2), 48), "b");
            let seed = data(&name).seed;
            let (problem, lengths) = listed(problem, Lengths::default(), 24, style, seed);
            let (problem, lengths) =
                with_second(problem, lengths, (STRIDED, 40), Lengths::default(), seen, seed);
            push(cases, name, problem, lengths);
        }
    }
    for (keys, of_second) in [(0, 40), (40, 0), (0, 0)] {
        let name = name(&format!("keys/{keys}_and_{of_second}"));
        let problem = masked(dtype, dims(3, keys, (4, 2), 48), "0");
        let at = (STRIDED, of_second);
        let (problem, lengths) =
            with_second(problem, Lengths::default(), at, Lengths::default(), Seen::Whole, data(&name).seed);
        push(cases, name, problem, lengths);
    }
    // Two intervals for each row select the keys of the first cache.
    let intervals = name("intervals/list");
    let mut problem = masked(dtype, dims(5, 70, (4, 2), 48), "0");
    let of_first = Intervals::batch(&problem, MaskAxes { per_batch: false, heads: 2 }, 4);
    problem.masks.intervals = Some(of_first);
    let mut lengths = Lengths::default();
    lengths.masks.intervals = (0..2 * 4 * 5).map(|at| at / 5 % 4 * 17 + at % 5 + at / 20).collect();
    let seen = Seen::List(20, "scattered");
    let (problem, lengths) =
        with_second(problem, lengths, (STRIDED, 40), Lengths::default(), seen, data(&intervals).seed);
    push(cases, intervals, problem, lengths);
}

/// Packed rows, pages by tables of their own and by addresses, lengths of each cache.
fn places(cases: &mut Vec<Case>, dtype: DType) {
    let name = |what: &str| format!("lists/two/{dtype}/{what}");
    let sequences = [(0, 9), (5, 40), (3, 0), (7, 65), (1, 13)];
    let of_second = [(0, 3), (0, 10), (0, 5), (0, 0), (0, 33)];
    for (word, seen) in [("compressed", Seen::Compressed(2)), ("list", Seen::List(30, "scattered"))] {
        let name = name(&format!("packed/{word}"));
        let problem = group(dtype, dims(7, 65, (4, 2), 48), &sequences, "b:9,0");
        let places = Lengths::packed(&of_second);
        let places =
            Lengths { totals: Totals { total_q: None, ..places.totals }, cu_seqlens_q: vec![], ..places };
        let at = (KvLayout::Packed, 33);
        let (problem, lengths) =
            with_second(problem, Lengths::packed(&sequences), at, places, seen, data(&name).seed);
        push(cases, name, problem, lengths);
    }
    for (word, seen) in [("whole", Seen::Whole), ("list", Seen::List(24, "beyond"))] {
        let name = name(&format!("pages/{word}"));
        let problem = masked(dtype, dims(3, 70, (4, 2), 48), "b:20,0").seqused_k(true);
        let used = Lengths { seqused_k: vec![61, 12], ..Lengths::default() };
        let (problem, lengths) = super::decode::in_pages(problem, 7, used, &name);
        let (alone, mut places) = super::decode::in_pages(
            masked(dtype, dims(3, 90, (4, 2), 48), "0"),
            16,
            Lengths { seqused_k: vec![90, 33], ..Lengths::default() },
            &format!("{name}/second"),
        );
        places.totals = Totals { num_pages: places.totals.num_pages, ..Totals::NONE };
        let at = (alone.layout.kv, 90);
        let (problem, lengths) = with_second(problem, lengths, at, places, seen, data(&name).seed);
        push(cases, name, problem, lengths);
    }
    for page_size in [5, 64] {
        let name = name(&format!("addresses_of_{page_size}"));
        let (problem, lengths) = addressed(
            masked(dtype, dims(3, 0, (4, 1), 48), "0"),
            [(5, 24), (page_size, 40)],
            data(&name).seed,
        );
        push(cases, name, problem, lengths);
    }
}

/// Lists of addresses of both caches: the page size and entries of each. The second's have lengths.
fn addressed(mut problem: FwdProblem, [first, second]: [(u32, u32); 2], seed: u64) -> (FwdProblem, Lengths) {
    let totals = |num_pages| Totals { num_pages: Some(num_pages), ..Totals::NONE };
    problem.layout.kv = KvLayout::Paged { page_size: first.0 };
    problem.strides.k = Strides::bshd(problem.k_in_memory(problem.shape_k()).0);
    let v_in_k = problem.cache.v_in_k;
    problem.strides.v = if v_in_k { problem.strides.k } else { Strides::bshd(problem.shape_v()) };
    problem.lists = Some(KeyLists::new(&problem, first.1).entries(ListEntries::Addresses));
    let mut lengths = Lengths { totals: totals(6), ..Lengths::default() };
    lengths.indices = indices(&problem, &lengths, "beyond", seed);
    let mut of_second = SecondCache::new(&problem, KvLayout::Paged { page_size: second.0 }, 0);
    let mut alone = of_second.alone(&problem);
    let lists = KeyLists::new(&alone, second.1).entries(ListEntries::Addresses);
    alone.lists = Some(lists.length(ListLength::Sequence));
    of_second.lists = alone.lists;
    let mut places = Lengths { totals: totals(4), ..Lengths::default() };
    places.indices = indices(&alone, &places, "beyond", seed ^ 0x5ec0);
    places.topk_length =
        (0..problem.dims.batch).map(|b| second.1.cast_signed() - 7 * b.cast_signed()).collect();
    problem.second = Some(of_second);
    lengths.second = Some(Box::new(places));
    (problem, lengths)
}

/// Problem of a modifier's name. If the name ends with "apart", LSE leaves sinks out.
fn modified(mut problem: FwdProblem, modifier: &str) -> FwdProblem {
    problem = problem.sink(modifier.contains("sink"));
    if modifier == "softcap" {
        problem = problem.softcap(2.0);
    }
    if modifier == "negative_scale" {
        problem = problem.softmax_scale(-0.2);
    }
    let apart = modifier.ends_with("apart");
    problem.second = problem.second.map(|second| second.lse_without_sink(apart));
    problem
}

fn plant_of(modifier: &str) -> Plant {
    let infinite = Plant::FarRows { bias: None, sink: Some(f64::INFINITY) };
    if modifier.starts_with("infinite") { infinite } else { Plant::HiddenKeys }
}

fn scores(cases: &mut Vec<Case>, dtype: DType) {
    for modifier in
        ["softcap", "sink", "sink_apart", "infinite_sink", "infinite_sink_apart", "negative_scale"]
    {
        let name = format!("lists/two/{dtype}/score/{modifier}");
        let problem = masked(dtype, dims(4, 70, (4, 2), 48), "b");
        let seed = data(&name).seed;
        let (problem, lengths) = listed(problem, Lengths::default(), 24, "some_empty", seed);
        let seen = Seen::List(20, "some_empty");
        let (problem, lengths) = with_second(problem, lengths, (STRIDED, 40), Lengths::default(), seen, seed);
        push_planted(cases, name, modified(problem, modifier), lengths, plant_of(modifier));
    }
}

/// Long lists of few tokens, which kernels cut into parts: a part may have keys of both caches.
fn parts(cases: &mut Vec<Case>, dtype: DType) {
    for (style, modifier) in [
        ("scattered", ""),
        ("some_empty", "sink_apart"),
        ("beyond", "infinite_sink_apart"),
        ("absent", "sink"),
    ] {
        let name = format!("lists/two/{dtype}/parts/{style}/{modifier}");
        let sizes = Dims { batch: 1, ..dims(3, 900, (4, 1), 64) };
        let problem = masked(dtype, sizes, "b");
        let seed = data(&name).seed;
        let (mut problem, mut lengths) = listed(problem, Lengths::default(), 700, style, seed);
        problem.lists = problem.lists.map(|lists| lists.length(ListLength::Token));
        lengths.topk_length = vec![700, 300, 531];
        let seen = Seen::List(800, if style == "absent" { "scattered" } else { style });
        let (problem, lengths) =
            with_second(problem, lengths, (STRIDED, 500), Lengths::default(), seen, seed);
        push_planted(cases, name, modified(problem, modifier), lengths, plant_of(modifier));
    }
}

/// Latent rows, V in K: a window with chosen compressed keys, with all compressed keys, and pages by addresses.
fn latent(cases: &mut Vec<Case>, dtype: DType) {
    let in_k = |mut problem: FwdProblem| {
        (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
        problem
    };
    let sized = |batch, tokens, keys, heads, qk| Dims {
        head_dim_v: 512,
        batch,
        ..dims(tokens, keys, (heads, 1), qk)
    };
    for (word, qk, heads, seen) in [
        ("list", 512, 5, Seen::List(90, "scattered")),
        ("compressed", 512, 20, Seen::Compressed(2)),
        ("whole", 576, 5, Seen::Whole),
        ("h128", 576, 128, Seen::List(70, "some_empty")),
    ] {
        let name = format!("lists/two/{dtype}/latent/d{qk}/{word}");
        let problem = in_k(masked(dtype, sized(1, 3, 100, heads, qk), "b:40,0").sink(true));
        let at = (STRIDED, 110);
        let (problem, lengths) =
            with_second(problem, Lengths::default(), at, Lengths::default(), seen, data(&name).seed);
        push(cases, name, modified(problem, "sink_apart"), lengths);
    }
    for (qk, pages) in [(576, [(5, 70), (64, 90)]), (512, [(64, 130), (2, 70)])] {
        let name = format!("lists/two/{dtype}/latent/d{qk}/addresses");
        let problem = in_k(masked(dtype, sized(2, 2, 0, 4, qk), "0"));
        let (problem, lengths) = addressed(problem, pages, data(&name).seed);
        push(cases, name, problem, lengths);
    }
    let long = format!("lists/two/{dtype}/latent/parts");
    let problem = in_k(masked(dtype, sized(1, 1, 600, 20, 576), "0").sink(true));
    let seed = data(&long).seed;
    let (problem, lengths) = listed(problem, Lengths::default(), 500, "beyond", seed);
    let seen = Seen::List(400, "scattered");
    let (problem, lengths) = with_second(problem, lengths, (STRIDED, 300), Lengths::default(), seen, seed);
    push(cases, long, modified(problem, "sink_apart"), lengths);
}

/// Rows of 656 and 584 bytes, of one cache and of two: lists of addresses, and of positions in pages by a table.
fn rows_of_bytes(cases: &mut Vec<Case>) {
    for (word, rows) in [("b656", CacheRows::Bytes656), ("b584", CacheRows::Bytes584)] {
        let sized = |heads, keys| Dims {
            batch: 2,
            head_dim_v: CacheRows::HEAD_DIM_V,
            ..dims(2, keys, (heads, 1), rows.head_dim_qk())
        };
        let plain = |heads, keys, mask| {
            let problem = masked(DType::Bf16, sized(heads, keys), mask).v_in_k(true).cache_rows(rows);
            problem.sink(heads == 4)
        };
        // Pages of 2 and 64 rows lie whole 16 bytes apart in either format.
        for (heads, pages) in [(4, [(5, 70), (64, 90)]), (20, [(64, 30), (3, 8)]), (7, [(64, 200), (2, 150)])]
        {
            let name = format!("lists/rows/{word}/two/h{heads}");
            let (problem, lengths) = addressed(plain(heads, 0, "0"), pages, data(&name).seed);
            push(cases, name, modified(problem, if heads == 4 { "sink_apart" } else { "" }), lengths);
            let name = format!("lists/rows/{word}/one/h{heads}");
            let (problem, lengths) = addressed(plain(heads, 0, "0"), pages, data(&name).seed);
            push(cases, name, problem.second(None), Lengths { second: None, ..lengths });
        }
        for (mask, keys) in [("b", 90), ("b:30,0", 150)] {
            let name = format!("lists/rows/{word}/every/{mask}");
            let (mut problem, lengths) =
                super::decode::in_pages(plain(4, keys, mask), 16, Lengths::default(), &name);
            problem.strides.k = Strides::bshd(problem.k_in_memory(problem.shape_k()).0);
            problem.strides.v = problem.strides.k;
            push(cases, name, problem, lengths);
        }
        for (new, listed_keys) in [(2, None), (1, Some(60)), (2, Some(60))] {
            let with = listed_keys.map_or("every", |_| "list");
            let name = format!("lists/rows/{word}/appended/new{new}/{with}");
            let mut problem = plain(4, 70, "b");
            problem.layout.seqused_k = true;
            problem.cache.append = Some(Append::batch(&problem, new));
            let lengths = Lengths { seqused_k: vec![70 - new.cast_signed(), 31], ..Lengths::default() };
            let (mut problem, mut lengths) = super::decode::in_pages(problem, 16, lengths, &name);
            problem.strides.k = Strides::bshd(problem.k_in_memory(problem.shape_k()).0);
            problem.strides.v = problem.strides.k;
            if let Some(keys) = listed_keys {
                (problem, lengths) = listed(problem, lengths, keys, "scattered", data(&name).seed);
            }
            push(cases, name, problem, lengths);
        }
        // No query sees the new rows, so only their bytes are compared.
        for (what, value) in [("infinity", f64::INFINITY), ("nan", f64::NAN), ("most", 3e38)] {
            let name = format!("lists/rows/{word}/appended/unseen/{what}");
            let mut problem = plain(4, 70, "t");
            problem.layout.seqused_k = true;
            problem.cache.append = Some(Append::packed(&problem, 3));
            let lengths = Lengths {
                seqused_k: vec![50, 31],
                cu_seqlens_new: vec![0, 3, 4],
                totals: Totals { total_new: Some(4), ..Totals::NONE },
                ..Lengths::default()
            };
            let (mut problem, lengths) = super::decode::in_pages(problem, 16, lengths, &name);
            problem.strides.k = Strides::bshd(problem.k_in_memory(problem.shape_k()).0);
            problem.strides.v = problem.strides.k;
            push_planted(cases, name, problem, lengths, Plant::At(Operand::KNew, [0, 1, 0, 130], value));
        }
        for mask in ["b", "b:30,0"] {
            let name = format!("lists/rows/{word}/table/{mask}");
            let (mut problem, lengths) =
                super::decode::in_pages(plain(3, 90, mask), 16, Lengths::default(), &name);
            problem.strides.k = Strides::bshd(problem.k_in_memory(problem.shape_k()).0);
            problem.strides.v = problem.strides.k;
            let (problem, lengths) = listed(problem, lengths, 60, "scattered", data(&name).seed);
            push(cases, name, problem, lengths);
        }
    }
}
