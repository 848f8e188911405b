//! Few queries over a KV cache: paged, appended to, rotated, quantised, with V inside K, under tree masks; and laws
//! for such calls.

use fmha_core::{
    Append, Bias, BiasBroadcast, CacheScales, DType, Descale, Dims, ElementwiseBias, FwdProblem, KvLayout,
    QLayout, Rotary, RotaryPairs, Strides, Totals, VLayout,
};

use super::edges::{data, masked};
use super::recipe::fp8_scales;
use crate::case::{Body, Case, Forward, Plant};
use crate::init::mix;
use crate::law::{Law, LawKind};
use crate::tensor::Operand;
use crate::tensors::Lengths;

const WIDE: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    paged(&mut cases);
    appended(&mut cases);
    fp8_updated(&mut cases);
    fp8_rows(&mut cases);
    rotated(&mut cases);
    rotated_packed(&mut cases);
    clamped(&mut cases);
    quantised(&mut cases);
    latent(&mut cases);
    latent_blocks(&mut cases);
    wide_blocks(&mut cases);
    wide_quantised(&mut cases);
    trees(&mut cases);
    trees_apart(&mut cases);
    mixed(&mut cases);
    mixed_quantised(&mut cases);
    modified(&mut cases);
    long(&mut cases);
    split(&mut cases);
    last_keys(&mut cases);
    groups(&mut cases);
    unlike(&mut cases);
    many_parts(&mut cases);
    tables_apart(&mut cases);
    laws(&mut cases);
    cases
}

fn dims(seqlen_q: u32, seqlen_k: u32, heads: (u32, u32), head_dim: u32) -> Dims {
    Dims::batch(3).seqlens(seqlen_q, seqlen_k).heads(heads.0, heads.1).head_dim(head_dim)
}

fn push(cases: &mut Vec<Case>, name: String, problem: FwdProblem, lengths: Lengths) {
    let data = data(&name);
    cases.push(Case::forward(name, problem, lengths, data));
}

fn push_law(cases: &mut Vec<Case>, name: String, problem: FwdProblem, lengths: Lengths, kind: LawKind) {
    let data = data(&name);
    let forward = Forward { problem, lengths, data, plant: Plant::Nothing };
    cases.push(Case { name, body: Body::Law(Box::new(Law { forward, kind })) });
}

/// A block table for a problem's longest sequences, with random pages among more than it needs, and the number of
/// pages. Entries that no key needs are invalid.
pub(crate) fn pages(problem: &FwdProblem, page_size: u32, seed: u64) -> (Vec<i32>, u32) {
    let Dims { batch, seqlen_k, .. } = problem.dims;
    let used = seqlen_k.div_ceil(page_size);
    let num_pages = batch * used + 2;
    let mut free: Vec<i32> = (0..num_pages.cast_signed()).collect();
    for at in (1..free.len()).rev() {
        free.swap(at, (mix(seed ^ at as u64) % (at as u64 + 1)) as usize);
    }
    let mut table = Vec::new();
    for row in free.chunks(used.max(1) as usize).take(batch as usize) {
        table.extend(row.iter().take(used as usize));
        // The table has one column more than the sequences use, with a wrong entry.
        table.push(i32::MIN);
    }
    (table, num_pages)
}

/// Puts K and V of `problem` into pages; returns the problem and its block table.
pub(super) fn in_pages(
    mut problem: FwdProblem,
    page_size: u32,
    mut lengths: Lengths,
    name: &str,
) -> (FwdProblem, Lengths) {
    let (table, num_pages) = pages(&problem, page_size, data(name).seed);
    problem.layout.kv = KvLayout::Paged { page_size };
    problem.strides.k = Strides::bshd(problem.shape_k());
    problem.strides.v = Strides::bshd(problem.shape_v());
    (lengths.block_table, lengths.totals.num_pages) = (table, Some(num_pages));
    (problem, lengths)
}

/// As [`in_pages`], where there is a page size.
pub(super) fn placed(
    problem: FwdProblem,
    page_size: Option<u32>,
    lengths: Lengths,
    name: &str,
) -> (FwdProblem, Lengths) {
    match page_size {
        None => (problem, lengths),
        Some(page_size) => in_pages(problem, page_size, lengths, name),
    }
}

/// The word for a cache's layout in names of cases.
fn layout_of(page_size: Option<u32>) -> String {
    page_size.map_or("strided".to_owned(), |size| format!("p{size}"))
}

/// Lengths of three caches, the longest among them.
fn used(problem: &mut FwdProblem) -> Lengths {
    let most = problem.dims.seqlen_k.cast_signed();
    problem.layout.seqused_k = true;
    Lengths { seqused_k: vec![most, most / 3, 1.min(most)], ..Lengths::default() }
}

/// Caches with pages of every size around a block's, stored rows together (NHD) or heads together (HND), with all or
/// some rows in use.
fn paged(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for page_size in [1, 2, 3, 7, 16, 37, 64, 100, 256] {
            for (seqlen_q, seqlen_k) in [(1, 70), (3, 129), (17, 90)] {
                for mask in ["0", "b", "b:20,0"] {
                    for heads_first in [false, true] {
                        let order = if heads_first { "hnd" } else { "nhd" };
                        let name = format!(
                            "decode/paged/{dtype}/p{page_size}/s{seqlen_q}x{seqlen_k}/{mask}/{order}"
                        );
                        let mut problem = masked(dtype, dims(seqlen_q, seqlen_k, (4, 2), 32), mask);
                        let lengths = used(&mut problem);
                        let (mut problem, lengths) = in_pages(problem, page_size, lengths, &name);
                        if heads_first {
                            problem.strides.k = Strides::bhsd(problem.shape_k());
                            problem.strides.v = Strides::bhsd(problem.shape_v());
                        }
                        push(cases, name, problem, lengths);
                    }
                }
            }
        }
        // Two sequences share their first page, some have no keys, and some tables have no page.
        let name = format!("decode/shared_pages/{dtype}");
        let mut problem = masked(dtype, dims(2, 40, (4, 2), 64), "b");
        problem.layout.seqused_k = true;
        let lengths = Lengths { seqused_k: vec![40, 29, 16], ..Lengths::default() };
        let (problem, mut lengths) = in_pages(problem, 16, lengths, &name);
        let columns = lengths.block_table.len() / 3;
        for sequence in 1..3 {
            lengths.block_table[sequence * columns] = lengths.block_table[0];
        }
        push(cases, name, problem, lengths);
        let name = format!("decode/no_keys/{dtype}");
        let mut problem = masked(dtype, dims(2, 8, (2, 1), 32), "b");
        problem.layout.seqused_k = true;
        let lengths = Lengths { seqused_k: vec![0, 8, 0], ..Lengths::default() };
        let (problem, lengths) = in_pages(problem, 3, lengths, &name);
        push(cases, name, problem, lengths);
    }
}

/// New keys, from none to many, with a batch axis and packed, for every layout of the cache.
fn appended(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for (new, seqlen_q) in [(1, 1), (1, 3), (4, 4), (5, 2), (17, 17), (0, 1)] {
            for page_size in [None, Some(1), Some(5), Some(16)] {
                for mask in ["0", "b", "b:9,0"] {
                    let layout = layout_of(page_size);
                    let name = format!("decode/append/{dtype}/new{new}/q{seqlen_q}/{layout}/{mask}");
                    let mut problem = masked(dtype, dims(seqlen_q, 60, (4, 2), 32), mask);
                    problem.layout.seqused_k = true;
                    problem.cache.append = Some(Append::batch(&problem, new));
                    let mut lengths =
                        Lengths { seqused_k: vec![60 - new.cast_signed(), 0, 31], ..Lengths::default() };
                    (problem, lengths) = placed(problem, page_size, lengths, &name);
                    push(cases, name, problem, lengths);
                }
            }
        }
        for page_size in [None, Some(4)] {
            let layout = layout_of(page_size);
            let name = format!("decode/append_packed/{dtype}/{layout}");
            let mut problem = masked(dtype, dims(9, 50, (4, 2), 32), "b");
            (problem.layout.q, problem.layout.seqused_k) = (QLayout::Packed, true);
            problem.cache.append = Some(Append::packed(&problem, 9));
            let mut lengths = Lengths {
                totals: Totals { total_q: Some(12), total_new: Some(13), ..Totals::NONE },
                cu_seqlens_q: vec![0, 1, 1, 10],
                cu_seqlens_new: vec![0, 1, 2, 11],
                seqused_k: vec![40, 0, 22],
                ..Lengths::default()
            };
            (problem, lengths) = placed(problem, page_size, lengths, &name);
            push(cases, name, problem, lengths);
        }
    }
}

/// FP8 Q and K, with V in FP8 or 16 bits, with new rows, rotated rows and both.
fn fp8_updated(cases: &mut Vec<Case>) {
    use DType::{Bf16, E4m3Fn, E4m3Fnuz, E5m2, E5m2Fnuz, F16};
    let types =
        [(E4m3Fn, E4m3Fn), (E5m2, E5m2), (E4m3Fn, F16), (E5m2, Bf16), (E4m3Fnuz, E4m3Fnuz), (E5m2Fnuz, Bf16)];
    for (dtype, v) in types {
        for (new, seqlen_q, head_dim, page_size) in
            [(1u32, 1, 64, None), (5, 2, 40, Some(16)), (17, 17, 24, Some(5)), (0, 3, 128, None)]
        {
            for (word, rotary) in [
                ("plain", None),
                ("half", Some((RotaryPairs::Half, head_dim, DType::F32))),
                ("interleaved", Some((RotaryPairs::Interleaved, 16, dtype))),
            ] {
                if new == 0 && rotary.is_none() {
                    continue;
                }
                let layout = layout_of(page_size);
                let name = format!("decode/fp8_update/{dtype}/v_{v}/{word}/new{new}/q{seqlen_q}/{layout}");
                let mut problem = masked(dtype, dims(seqlen_q, 90, (4, 2), head_dim), "b");
                (problem.dtypes.v, problem.layout.seqused_k) = (v, true);
                fp8_scales(Descale::PerKvHead, &mut problem);
                problem.cache.rotary =
                    rotary.map(|(pairs, dim, table)| Rotary { dim, pairs, max_pos: 128, dtype: table });
                let mut lengths =
                    Lengths { seqused_k: vec![90 - new.cast_signed(), 0, 31], ..Lengths::default() };
                (problem, lengths) = placed(problem, page_size, lengths, &name);
                problem.cache.append = (new > 0).then(|| Append::batch(&problem, new));
                push(cases, name, problem, lengths);
            }
        }
    }
}

/// Rotary cases: both pairings, part of a row and all of it, tables in f32 and in Q's type, with and without
/// new keys.
fn rotated(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for (pairs, word) in [(RotaryPairs::Interleaved, "interleaved"), (RotaryPairs::Half, "half")] {
            for dim in [2, 16, 40] {
                for table in [DType::F32, dtype] {
                    for (new, mask) in [(0, "b"), (3, "b"), (1, "0"), (2, "b:7,0")] {
                        let name =
                            format!("decode/rotary/{word}/{dtype}/tables_{table}/r{dim}/new{new}/{mask}");
                        if table == dtype && dtype == DType::F32 {
                            continue;
                        }
                        let mut problem = masked(dtype, dims(3, 40, (4, 2), 40), mask);
                        problem.layout.seqused_k = true;
                        problem.cache.rotary = Some(Rotary { dim, pairs, max_pos: 64, dtype: table });
                        problem.cache.append = (new > 0).then(|| Append::batch(&problem, new));
                        let lengths = Lengths { seqused_k: vec![37, 5, 0], ..Lengths::default() };
                        push(cases, name, problem, lengths);
                    }
                }
            }
        }
    }
}

/// Packed queries get a rotary embedding, over a cache with a batch axis.
fn rotated_packed(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for (new, mask) in [(0, "b"), (3, "b"), (2, "0")] {
            let name = format!("decode/rotary/packed_q/{dtype}/new{new}/{mask}");
            let sizes = dims(9, 40, (4, 2), 40);
            let mut problem = FwdProblem::new(QLayout::Packed, KvLayout::Strided, dtype, sizes);
            problem.mask = masked(dtype, sizes, mask).mask;
            problem.layout.seqused_k = true;
            problem.cache.rotary =
                Some(Rotary { dim: 16, pairs: RotaryPairs::Half, max_pos: 64, dtype: DType::F32 });
            problem.cache.append = (new > 0).then(|| Append::batch(&problem, new));
            let mut lengths = Lengths::packed(&[(1, 40), (9, 13), (0, 7)]);
            lengths.totals.total_k = None;
            lengths.seqused_k = vec![37, 5, 0];
            push(cases, name, problem.clone(), lengths.clone());
            // Sequences have one token at most; the workspace has a row for each sequence.
            let name = format!("decode/rotary/packed_tokens/{dtype}/new{new}/{mask}");
            let mut tokens = problem.clone();
            tokens.dims.seqlen_q = 1;
            let mut of_tokens = Lengths::packed(&[(1, 40), (1, 13), (1, 7)]);
            (of_tokens.totals.total_k, of_tokens.seqused_k) = (None, vec![37, 5, 0]);
            push(cases, name, tokens, of_tokens);
            // Packed Q has more rows than three sequences of nine use: before the first sequence, inside one and after
            // the last.
            let name = format!("decode/rotary/packed_q_apart/{dtype}/new{new}/{mask}");
            problem.layout.seqused_q = true;
            (lengths.totals.total_q, lengths.cu_seqlens_q) = (Some(40), vec![3, 5, 14, 30]);
            lengths.seqused_q = vec![1, 9, 6];
            push(cases, name, problem, lengths);
        }
    }
}

/// Lengths above the existing rows or negative, and more new rows than fit: they are clamped to the existing rows.
fn clamped(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for (new, mask) in [(0, "b"), (5, "b"), (0, "0")] {
            let mut problem = masked(dtype, dims(3, 40, (4, 2), 40), mask);
            (problem.layout.seqused_q, problem.layout.seqused_k) = (true, true);
            problem.cache.append = (new > 0).then(|| Append::batch(&problem, new));
            let seqused_k = vec![i32::MAX, 37, -5];
            let lengths = Lengths { seqused_q: vec![9, 2, -1], seqused_k, ..Lengths::default() };
            push(cases, format!("decode/clamped/{dtype}/new{new}/{mask}"), problem.clone(), lengths.clone());
            let name = format!("decode/clamped/{dtype}/new{new}/{mask}/p7");
            let (problem, lengths) = in_pages(problem, 7, lengths, &name);
            push(cases, name, problem, lengths);
        }
    }
}

/// FP8 caches under 16-bit queries, with every kind of descale, strided and paged.
fn quantised(cases: &mut Vec<Case>) {
    for cache in [DType::E4m3Fn, DType::E5m2, DType::E4m3Fnuz, DType::E5m2Fnuz] {
        for dtype in [DType::F16, DType::Bf16] {
            for (word, descale) in
                [("plain", Descale::None), ("tensor", Descale::PerTensor), ("head", Descale::PerKvHead)]
            {
                for (seqlen_q, page_size) in
                    [(1, None), (1, Some(16)), (2, Some(5)), (20, None), (20, Some(7))]
                {
                    let layout = layout_of(page_size);
                    let name =
                        format!("decode/fp8_cache/{cache}/{dtype}/descale_{word}/q{seqlen_q}/{layout}");
                    let (mut problem, lengths) = fp8_cache(dtype, cache, descale, seqlen_q);
                    let mut lengths = lengths;
                    (problem, lengths) = placed(problem, page_size, lengths, &name);
                    push(cases, name, problem, lengths);
                }
            }
        }
    }
}

fn fp8_cache(dtype: DType, cache: DType, descale: Descale, seqlen_q: u32) -> (FwdProblem, Lengths) {
    let mut problem = masked(dtype, dims(seqlen_q, 75, (4, 2), 48), "b");
    problem.cache.dtype = Some(cache);
    (problem.scales.descale_k, problem.scales.descale_v) = (descale, descale);
    let lengths = used(&mut problem);
    (problem, lengths)
}

/// FP8 caches with a scale for each token and head, or for a block of tokens; appended to, and one of a NaN.
fn fp8_rows(cases: &mut Vec<Case>) {
    let scaled = |dtype, cache, block, page_size: Option<u32>, (seqlen_q, new): (u32, u32), name: &str| {
        let (mut problem, mut lengths) = fp8_cache(dtype, cache, Descale::None, seqlen_q);
        if new > 0 {
            problem.cache.append = Some(Append::batch(&problem, new));
            lengths.seqused_k = vec![75 - new.cast_signed(), 25, 0];
        }
        (problem, lengths) = placed(problem, page_size, lengths, name);
        problem.cache.scales = Some(CacheScales::new(&problem, block));
        (problem, lengths)
    };
    for (cache, dtype) in
        [(DType::E4m3Fn, DType::F16), (DType::E5m2, DType::Bf16), (DType::E4m3Fnuz, DType::Bf16)]
    {
        for (block, page_size) in [(1, None), (1, Some(16)), (7, None), (16, Some(16)), (4, Some(8))] {
            for seqlen_q in [1, 3, 20] {
                let layout = layout_of(page_size);
                let name = format!("decode/fp8_rows/{cache}/{dtype}/block{block}/q{seqlen_q}/{layout}");
                let (problem, lengths) = scaled(dtype, cache, block, page_size, (seqlen_q, 0), &name);
                push(cases, name.clone(), problem.clone(), lengths.clone());
                let law = name.replacen("fp8_rows", "fp8_rows_are_a_cache_widened_before", 1);
                push_law(cases, law, problem, lengths, LawKind::WidenedCache);
            }
        }
        for (new, page_size) in [(1, None), (3, Some(16)), (20, Some(8))] {
            let layout = layout_of(page_size);
            let name = format!("decode/fp8_rows/{cache}/{dtype}/appended/new{new}/{layout}");
            let (problem, lengths) = scaled(dtype, cache, 1, page_size, (new.min(4), new), &name);
            push(cases, name, problem, lengths);
        }
        // The mask hides the last new row from every query, so only its bytes are compared.
        for (what, value) in [("infinity", f64::INFINITY), ("nan", f64::NAN), ("most", 6e4)] {
            let name = format!("decode/fp8_rows/{cache}/{dtype}/appended/unseen/{what}");
            let (mut problem, lengths) = scaled(dtype, cache, 1, Some(16), (2, 2), &name);
            problem.mask = masked(dtype, problem.dims, "t").mask;
            push(cases, name.clone(), problem, lengths);
            if let Some(Body::Forward(forward)) = cases.last_mut().map(|case| &mut case.body) {
                forward.plant = Plant::At(Operand::KNew, [1, 1, 0, 20], value);
            }
        }
    }
    for (cache, dtype) in [(DType::E4m3Fn, DType::Bf16), (DType::E5m2, DType::F16)] {
        // Long enough for parts; rows whose columns waves share; rows read by element.
        let sizes = [("long", 1, 700, 64), ("wide", 2, 75, 320), ("odd", 5, 75, 37)];
        for (what, seqlen_q, seqlen_k, head_dim) in sizes {
            for page_size in [None, Some(8)] {
                let layout = page_size.map_or("strided".to_owned(), |size| format!("p{size}"));
                let name = format!("decode/fp8_rows/{cache}/{dtype}/{what}/{layout}");
                let mut problem = masked(dtype, dims(seqlen_q, seqlen_k, (4, 2), head_dim), "b");
                problem.cache.dtype = Some(cache);
                let mut lengths = used(&mut problem);
                if let Some(page_size) = page_size {
                    (problem, lengths) = in_pages(problem, page_size, lengths, &name);
                }
                problem.cache.scales = Some(CacheScales::new(&problem, 4));
                push(cases, name, problem, lengths);
            }
        }
        // Keys behind the last one and before the window, of which some rows see some.
        let name = format!("decode/fp8_rows/{cache}/{dtype}/hidden/p16");
        let (mut problem, lengths) = scaled(dtype, cache, 1, Some(16), (5, 0), &name);
        problem.mask = masked(dtype, problem.dims, "b:9,0").mask;
        push(cases, name, problem, lengths);
        if let Some(Body::Forward(forward)) = cases.last_mut().map(|case| &mut case.body) {
            forward.plant = Plant::HiddenKeys;
        }
        // A value that the first rows see and the last ones do not.
        let name = format!("decode/fp8_rows/{cache}/{dtype}/seen_nan/p16");
        let (mut problem, lengths) = scaled(dtype, cache, 1, Some(16), (5, 0), &name);
        problem.mask = masked(dtype, problem.dims, "b:9,0").mask;
        let place = lengths.block_table.get(4).map_or(0, |page| page.unsigned_abs());
        push(cases, name, problem, lengths);
        if let Some(Body::Forward(forward)) = cases.last_mut().map(|case| &mut case.body) {
            forward.plant = Plant::At(Operand::VScale, [place, 0, 1, 0], f64::NAN);
        }
    }
    // Packed queries beside keys in pages.
    let name = "decode/fp8_rows/e4m3fn/bf16/packed_queries/p16".to_owned();
    let sizes = Dims { batch: 3, ..dims(20, 90, (4, 2), 64) };
    let mixed = FwdProblem::new(QLayout::Packed, KvLayout::Strided, DType::Bf16, sizes);
    let lengths = Lengths {
        cu_seqlens_q: vec![0, 1, 21, 24],
        seqused_k: vec![90, 33, 0],
        totals: Totals { total_q: Some(24), ..Totals::NONE },
        ..Lengths::default()
    };
    let mixed = mixed.dtype_cache(DType::E4m3Fn).seqused_k(true);
    let (mut mixed, lengths) = in_pages(mixed, 16, lengths, &name);
    mixed.cache.scales = Some(CacheScales::new(&mixed, 16));
    push(cases, name, mixed, lengths);
    let packed = FwdProblem::group(DType::Bf16, dims(20, 90, (4, 2), 64)).dtype_cache(DType::E4m3Fn);
    let scales = CacheScales::new(&packed, 1);
    let name = "decode/fp8_rows/e4m3fn/bf16/packed".to_owned();
    push(cases, name, packed.cache_scales(scales), Lengths::packed(&[(1, 90), (20, 33), (3, 0)]));
}

/// V is the front of K's rows: head dimensions 576 and 512.
fn latent(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for (qk, v) in [(24, 16), (40, 40), (192, 128), (576, 512)] {
            for (seqlen_q, page_size) in [(1, None), (2, Some(8)), (12, Some(16))] {
                for new in [0, 2] {
                    let layout = layout_of(page_size);
                    let name = format!("decode/v_in_k/{dtype}/d{qk}x{v}/q{seqlen_q}/{layout}/new{new}");
                    let sizes = Dims { head_dim_v: v, batch: 2, ..dims(seqlen_q, 33, (4, 1), qk) };
                    let mut problem = masked(dtype, sizes, "b");
                    problem.layout.seqused_k = true;
                    let mut lengths = Lengths { seqused_k: vec![31, 14], ..Lengths::default() };
                    (problem, lengths) = placed(problem, page_size, lengths, &name);
                    (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
                    problem.cache.append = (new > 0).then(|| Append::batch(&problem, new));
                    push(cases, name, problem, lengths);
                }
            }
        }
        for head_dim in [257, 320, 512, 576] {
            let name = format!("decode/head_dim/{dtype}/d{head_dim}");
            let sizes = Dims { batch: 1, ..dims(2, 50, (2, 1), head_dim) };
            push(cases, name, masked(dtype, sizes, "b"), Lengths::default());
        }
    }
}

/// 576/512 with V in K over several blocks of keys: odd and even numbers of blocks, rows for several tiles, page
/// boundaries inside and at blocks, windows that begin inside a block, packed sequences, modifiers.
fn latent_blocks(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for (seqlen_q, seqlen_k, heads, mask, page_size) in [
            (1, 130, 16, "0", None),
            (1, 200, 5, "b", Some(64)),
            (2, 330, 40, "b", Some(1)),
            (4, 321, 3, "b:90,0", Some(32)),
            (3, 257, 2, "t:60,70", Some(48)),
            (2, 129, 2, "b", Some(128)),
            (1, 90, 70, "0", Some(7)),
            (70, 150, 1, "b", None),
        ] {
            let layout = layout_of(page_size);
            let name = format!("decode/latent/{dtype}/s{seqlen_q}x{seqlen_k}/h{heads}/{mask}/{layout}");
            let sizes = Dims { head_dim_v: 512, batch: 2, ..dims(seqlen_q, seqlen_k, (heads, 1), 576) };
            let mut problem = masked(dtype, sizes, mask);
            let most = seqlen_k.cast_signed();
            problem.layout.seqused_k = true;
            let mut lengths = Lengths { seqused_k: vec![most - 3, most / 2], ..Lengths::default() };
            (problem, lengths) = placed(problem, page_size, lengths, &name);
            (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
            problem.score.sink = heads == 5;
            if heads == 3 {
                problem.score.softmax_scale = Some(-0.05);
            }
            push(cases, name, problem, lengths);
        }
        let name = format!("decode/latent/{dtype}/packed");
        let sizes = Dims { head_dim_v: 512, ..dims(3, 200, (4, 1), 576) };
        let mut problem = FwdProblem::group(dtype, sizes).mask(masked(dtype, sizes, "b").mask);
        (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
        push(cases, name, problem, Lengths::packed(&[(3, 200), (1, 65), (2, 0)]));
    }
}

/// FP8 caches with more than 256 elements per row under 16-bit queries: V in K, also with a descale of its own, and
/// separate V.
fn wide_quantised(cases: &mut Vec<Case>) {
    for dtype in [DType::F16, DType::Bf16] {
        for (cache, (qk, v), (seqlen_q, seqlen_k), heads, descale, page_size) in [
            (DType::E4m3Fn, (576, 512), (1, 130), 16, Descale::PerTensor, None),
            (DType::E5m2, (576, 512), (2, 200), 5, Descale::PerKvHead, Some(7)),
            (DType::E4m3Fn, (576, 512), (1, 70), 70, Descale::None, Some(64)),
            // Eight blocks of keys, or four, refill each buffer in shared memory more than once.
            (DType::E4m3Fn, (576, 512), (1, 460), 16, Descale::PerKvHead, Some(1)),
            // Two tiles of rows read six blocks of keys.
            (DType::E4m3Fn, (576, 512), (2, 330), 40, Descale::PerKvHead, Some(7)),
            (DType::E4m3Fn, (512, 512), (5, 140), 2, Descale::PerKvHead, Some(16)),
            (DType::E5m2, (336, 272), (2, 90), 3, Descale::PerTensor, None),
            (DType::E4m3Fnuz, (576, 512), (2, 130), 16, Descale::PerKvHead, Some(7)),
            (DType::E5m2Fnuz, (336, 272), (3, 90), 3, Descale::PerTensor, None),
        ] {
            let layout = layout_of(page_size);
            let name = format!("decode/wide_fp8/{cache}/{dtype}/d{qk}x{v}/s{seqlen_q}x{seqlen_k}/{layout}");
            let sizes = Dims { head_dim_v: v, batch: 2, ..dims(seqlen_q, seqlen_k, (heads, 1), qk) };
            let mut problem = masked(dtype, sizes, "b");
            problem.cache.dtype = Some(cache);
            (problem.scales.descale_k, problem.scales.descale_v) = (descale, descale);
            let most = seqlen_k.cast_signed();
            problem.layout.seqused_k = true;
            let mut lengths = Lengths { seqused_k: vec![most - 3, most / 2], ..Lengths::default() };
            (problem, lengths) = placed(problem, page_size, lengths, &name);
            if qk == 576 {
                (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
            }
            push(cases, name, problem, lengths);
        }
        // A NaN in a cache without a descale, which of two queries the last one sees.
        let name = format!("decode/wide_fp8/nan/{dtype}");
        let sizes = Dims { head_dim_v: 512, batch: 2, ..dims(2, 130, (5, 1), 576) };
        let mut problem = masked(dtype, sizes, "b");
        (problem.cache.dtype, problem.cache.v_in_k) = (Some(DType::E4m3Fn), true);
        problem.strides.v = problem.strides.k;
        let mut case = Case::forward(name.clone(), problem, Lengths::default(), data(&name));
        if let Body::Forward(forward) = &mut case.body {
            forward.plant = Plant::At(Operand::K, [1, 129, 0, 20], f64::NAN);
        }
        cases.push(case);
    }
}

/// Rows of K and V beyond 256 elements, apart, over several blocks of keys: more of K or of V, halves of V
/// with and without a last chunk of their own, an odd and an even number of blocks, rows of more than one
/// tile, pages, modifiers.
fn wide_blocks(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for (qk, v, (seqlen_q, seqlen_k), (heads, heads_kv), mask, page_size, modifier) in [
            (512, 512, (70, 200), (2, 1), "b", None, ""),
            (576, 512, (1, 260), (16, 1), "0", None, "sink"),
            (512, 512, (3, 321), (4, 2), "b:100,0", Some(64), "alibi"),
            (320, 320, (130, 130), (2, 2), "t:60,70", None, "softcap"),
            (512, 64, (2, 129), (40, 1), "b", Some(1), ""),
            (64, 384, (5, 190), (2, 1), "b", Some(16), "bias"),
            (264, 272, (2, 90), (2, 2), "0", Some(7), "negative"),
        ] {
            let layout = layout_of(page_size);
            let name = format!("decode/wide/{dtype}/d{qk}x{v}/s{seqlen_q}x{seqlen_k}/{mask}/{layout}");
            let sizes = Dims { head_dim_v: v, batch: 2, ..dims(seqlen_q, seqlen_k, (heads, heads_kv), qk) };
            let mut problem = masked(dtype, sizes, mask);
            let most = seqlen_k.cast_signed();
            problem.layout.seqused_k = true;
            let mut lengths = Lengths { seqused_k: vec![most - 3, most / 2], ..Lengths::default() };
            (problem, lengths) = placed(problem, page_size, lengths, &name);
            match modifier {
                "sink" => problem.score.sink = true,
                "negative" => problem.score.softmax_scale = Some(-0.05),
                "softcap" => problem.score.softcap = Some(5.0),
                "alibi" => problem.score.bias = Bias::Alibi { per_batch: false },
                "bias" => {
                    let broadcast = BiasBroadcast::OneHead;
                    let strides = Strides::bhsd(problem.shape_bias(broadcast));
                    problem.score.bias = Bias::Elementwise(ElementwiseBias { dtype, broadcast, strides });
                }
                _ => {}
            }
            push(cases, name, problem, lengths);
        }
        let name = format!("decode/wide/{dtype}/packed");
        let sizes = dims(130, 200, (4, 2), 512);
        let problem = FwdProblem::group(dtype, sizes).mask(masked(dtype, sizes, "b").mask);
        push(cases, name, problem, Lengths::packed(&[(130, 200), (1, 65), (2, 0)]));
    }
}

/// Tree masks of speculative tokens: chains, wide trees, forests, random bits; also more tokens than keys.
fn trees(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for seqlen_q in [1, 5, 33] {
            for (word, seqlen_k) in [("chain", 70), ("siblings", 70), ("random", 70), ("short", 20)] {
                let name = format!("decode/tree/{word}/{dtype}/q{seqlen_q}");
                let mut problem = masked(dtype, dims(seqlen_q, seqlen_k, (4, 2), 32), "b");
                problem.cache.tree_mask = true;
                let words = problem.tree_mask_words();
                let seed = data(&name).seed;
                let sees = |row: u32, n: u32| match word {
                    "chain" => n <= row % seqlen_q,
                    "siblings" => n == 0 || n == row % seqlen_q,
                    _ => !mix(seed ^ u64::from(row * 1000 + n)).is_multiple_of(3),
                };
                let word_of = |row: u32, at: u32| {
                    let bits = (at * 32..(at * 32 + 32).min(seqlen_q)).filter(|&n| sees(row, n));
                    bits.fold(0u32, |bits, n| bits | 1 << (n % 32)).cast_signed()
                };
                let rows = 0..3 * seqlen_q;
                let mut lengths = used(&mut problem);
                lengths.tree_mask = rows
                    .flat_map(|row| (0..words).map(move |at| (row, at)))
                    .map(|(row, at)| word_of(row, at))
                    .collect();
                push(cases, name, problem, lengths);
            }
        }
    }
}

/// Trees over caches that are long enough for parts, values that the tree hides from some queries and that
/// are infinite, and packed queries.
fn trees_apart(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for (word, seqlen_q, seqlen_k) in [
            ("parts", 5, 600),
            ("parts", 33, 600),
            ("infinite", 5, 70),
            ("infinite", 5, 600),
            ("packed", 9, 40),
        ] {
            let name = format!("decode/tree/{word}/{dtype}/q{seqlen_q}_k{seqlen_k}");
            let mut problem = masked(dtype, dims(seqlen_q, seqlen_k, (4, 2), 32), "b");
            let mut lengths = Lengths::default();
            if word == "packed" {
                let mask = problem.mask;
                problem = FwdProblem::new(QLayout::Packed, KvLayout::Strided, dtype, problem.dims).mask(mask);
                lengths = Lengths::packed(&[(1, 40), (9, 13), (0, 7)]);
                lengths.totals.total_k = None;
            }
            problem.cache.tree_mask = true;
            problem.write_lse = true;
            lengths.seqused_k = used(&mut problem).seqused_k;
            let (words, seed) = (problem.tree_mask_words(), data(&name).seed);
            let rows = lengths.totals.total_q.unwrap_or(3 * seqlen_q);
            // Every query sees the first of the last `seqlen_q` keys, and its own key. In "parts" and "packed" it
            // also sees random others.
            let others = |row: u32, n: u32| {
                word != "infinite" && mix(seed ^ u64::from(row * 1000 + n)).is_multiple_of(2)
            };
            let sees = |row: u32, n: u32| n == 0 || n == row % seqlen_q || others(row, n);
            let word_of = |row: u32, at: u32| {
                let bits = (at * 32..(at * 32 + 32).min(seqlen_q)).filter(|&n| sees(row, n));
                bits.fold(0u32, |bits, n| bits | 1 << (n % 32)).cast_signed()
            };
            lengths.tree_mask = (0..rows)
                .flat_map(|row| (0..words).map(move |at| (row, at)))
                .map(|(row, at)| word_of(row, at))
                .collect();
            let numbers = data(&name);
            let mut case = Case::forward(name, problem, lengths, numbers);
            if let (Body::Forward(forward), true) = (&mut case.body, word == "infinite") {
                let key = seqlen_k - seqlen_q + 2;
                forward.plant = Plant::At(Operand::V, [0, key, 0, 3], f64::INFINITY);
            }
            cases.push(case);
        }
    }
}

const KV_LAYOUTS: [(&str, KvLayout); 3] = [
    ("strided", KvLayout::Strided),
    ("packed", KvLayout::Packed),
    ("paged", KvLayout::Paged { page_size: 6 }),
];

/// Sets the lengths that the problem's layout of K needs, used lengths and pages, instead of offsets of packed
/// keys.
fn lengths_of_keys(problem: &mut FwdProblem, lengths: &mut Lengths, name: &str) {
    if problem.layout.kv != KvLayout::Packed {
        lengths.totals.total_k = None;
        lengths.seqused_k = used(problem).seqused_k;
    }
    if let Some(page_size) = problem.layout.kv.page_size() {
        let (table, num_pages) = pages(problem, page_size, data(name).seed);
        (lengths.block_table, lengths.totals.num_pages) = (table, Some(num_pages));
    }
}

/// Q and K have different layouts: packed queries over strided and paged caches, batched queries over packed keys.
fn mixed(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for mask in ["0", "b", "t", "b:6,0,2"] {
            for (word, kv_layout) in KV_LAYOUTS {
                for (q_word, q_layout) in [("batch", QLayout::Batch), ("packed", QLayout::Packed)] {
                    let name = format!("decode/layouts/{dtype}/{q_word}_over_{word}/{mask}");
                    let mut problem = FwdProblem::new(q_layout, kv_layout, dtype, dims(9, 40, (4, 2), 32));
                    problem.mask = masked(dtype, problem.dims, mask).mask;
                    problem.write_lse = true;
                    let mut lengths = Lengths::packed(&[(1, 40), (9, 13), (0, 7)]);
                    if q_layout == QLayout::Batch {
                        lengths.totals.total_q = None;
                    }
                    lengths_of_keys(&mut problem, &mut lengths, &name);
                    push(cases, name, problem, lengths);
                }
            }
        }
    }
}

/// Packed queries over FP8 caches in every layout, also with V in K's rows.
fn mixed_quantised(cases: &mut Vec<Case>) {
    for (word, kv_layout) in KV_LAYOUTS {
        for v_in_k in [false, true] {
            let of_v = if v_in_k { "v_in_k" } else { "apart" };
            let name = format!("decode/fp8_layouts/e4m3fn/bf16/packed_over_{word}/{of_v}");
            let sizes = Dims { head_dim_v: if v_in_k { 32 } else { 48 }, ..dims(19, 140, (4, 2), 48) };
            let mut problem = FwdProblem::new(QLayout::Packed, kv_layout, DType::Bf16, sizes);
            problem.mask = masked(DType::Bf16, sizes, "b").mask;
            problem.write_lse = true;
            problem.cache.dtype = Some(DType::E4m3Fn);
            let descale = if v_in_k { Descale::None } else { Descale::PerKvHead };
            (problem.scales.descale_k, problem.scales.descale_v) = (descale, descale);
            if v_in_k {
                (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
            }
            let mut lengths = Lengths::packed(&[(1, 140), (19, 43), (0, 7)]);
            lengths_of_keys(&mut problem, &mut lengths, &name);
            push(cases, name, problem, lengths);
        }
    }
}

/// Calls of few queries with every modifier of scores.
fn modified(cases: &mut Vec<Case>) {
    use fmha_core::{Bias, BiasBroadcast, ElementwiseBias};
    for dtype in WIDE {
        for seqlen_q in [1, 4] {
            for mask in ["0", "b", "b:30,0,3"] {
                for word in ["softcap", "alibi", "bias", "sink", "dropout", "negative", "f32_output"] {
                    let name = format!("decode/score/{word}/{dtype}/q{seqlen_q}/{mask}");
                    let mut problem = masked(dtype, dims(seqlen_q, 140, (6, 2), 40), mask);
                    match word {
                        "softcap" => problem.score.softcap = Some(1.5),
                        "alibi" => problem.score.bias = Bias::Alibi { per_batch: true },
                        "bias" => {
                            let broadcast = BiasBroadcast::OneHead;
                            let strides = Strides::bhsd(problem.shape_bias(broadcast));
                            problem.score.bias =
                                Bias::Elementwise(ElementwiseBias { dtype, broadcast, strides });
                        }
                        "sink" => problem.score.sink = true,
                        "dropout" => (problem.dropout.p_drop, problem.dropout.write_keep_mask) = (0.3, true),
                        "negative" => problem.score.softmax_scale = Some(-0.4),
                        _ => problem.dtypes.o = DType::F32,
                    }
                    push(cases, name, problem, Lengths::default());
                }
            }
        }
    }
}

/// Caches of several chunks, whose last block and last chunk are full, partly filled, and of one key.
fn long(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for seqlen_k in [511, 512, 513, 1024, 1601] {
            for (mask, seqlen_q) in [("0", 1), ("b", 3), ("b:600,0", 2), ("b:100,0,5", 1)] {
                let name = format!("decode/long/{dtype}/s{seqlen_q}x{seqlen_k}/{mask}");
                let sizes = Dims { batch: 1, ..dims(seqlen_q, seqlen_k, (4, 2), 24) };
                push(cases, name, masked(dtype, sizes, mask), Lengths::default());
            }
        }
    }
}

/// Caches of 16 bits and in FP8, split into parts, with different lengths: strided, in pages of a block's size, and in
/// pages of one row.
fn split(cases: &mut Vec<Case>) {
    for dtype in [DType::F16, DType::Bf16] {
        for (cache, seqlen_q) in [(None, 1), (None, 9), (Some(DType::E4m3Fn), 1), (Some(DType::E5m2), 9)] {
            for page_size in [None, Some(64), Some(1)] {
                let layout = layout_of(page_size);
                let stored = cache.map_or("wide".to_owned(), |cache| cache.to_string());
                let name = format!("decode/split/{dtype}/{stored}/q{seqlen_q}/{layout}");
                let mut problem = masked(dtype, dims(seqlen_q, 1100, (4, 2), 128), "b");
                problem.cache.dtype = cache;
                if cache.is_some() {
                    let head = Descale::PerKvHead;
                    (problem.scales.descale_k, problem.scales.descale_v) = (head, head);
                }
                let mut lengths = used(&mut problem);
                (problem, lengths) = placed(problem, page_size, lengths, &name);
                push(cases, name, problem, lengths);
            }
        }
    }
}

/// Groups of heads that do not divide a tile, over sequences of different lengths, also 0, whose keys CTAs share.
fn groups(cases: &mut Vec<Case>) {
    for (at, heads) in [(6, 2), (5, 1), (12, 2), (14, 2), (24, 2), (13, 1)].into_iter().enumerate() {
        for (seqlen_q, cache) in
            [(1, None), (3, None), (8, None), (1, Some(DType::E4m3Fn)), (5, Some(DType::E5m2))]
        {
            let page_size = [None, Some(16), Some(64)][(at + seqlen_q as usize) % 3];
            let layout = layout_of(page_size);
            let stored = cache.map_or("wide".to_owned(), |cache| cache.to_string());
            let name = format!("decode/groups/{}of{}/{stored}/q{seqlen_q}/{layout}", heads.0, heads.1);
            let dtype = [DType::Bf16, DType::F16][at % 2];
            let head_dim = [64, 128, 168, 72, 256, 128][at];
            let sizes = Dims { batch: 5, ..dims(seqlen_q, 1300, heads, head_dim) };
            let mut problem = masked(dtype, sizes, ["b", "b:200,0"][usize::from(at == 3)]);
            problem.cache.dtype = cache;
            if cache.is_some() {
                let head = Descale::PerKvHead;
                (problem.scales.descale_k, problem.scales.descale_v) = (head, head);
            }
            problem.layout.seqused_k = true;
            let mut lengths = Lengths { seqused_k: vec![1300, 0, 417, 2, 801], ..Lengths::default() };
            (problem, lengths) = placed(problem, page_size, lengths, &name);
            push(cases, name, problem, lengths);
        }
    }
    // More heads of a group than a warp's rows, with tokens that leave rows of a tile over or fill several.
    for (at, (heads, seqlen_q)) in
        [((17, 1), 7), ((40, 1), 5), ((64, 1), 16), ((34, 2), 1)].into_iter().enumerate()
    {
        for cache in [None, Some(DType::E4m3Fn)] {
            let page_size = [Some(64), None, Some(16), Some(5)][at];
            let layout = layout_of(page_size);
            let stored = cache.map_or("wide".to_owned(), |cache| cache.to_string());
            let name = format!("decode/groups/{}of{}/{stored}/q{seqlen_q}/{layout}", heads.0, heads.1);
            let head_dim = [128, 64, 72, 128][at];
            let sizes = Dims { batch: 4, ..dims(seqlen_q, 500, heads, head_dim) };
            let mut problem = masked([DType::F16, DType::Bf16][at % 2], sizes, "b");
            problem.cache.dtype = cache;
            problem.layout.seqused_k = true;
            let mut lengths = Lengths { seqused_k: vec![500, 0, 3, 331], ..Lengths::default() };
            (problem, lengths) = placed(problem, page_size, lengths, &name);
            push(cases, name, problem, lengths);
        }
    }
}

/// Sequences of different lengths whose tiles are divided into shares: windows with sink columns separate from
/// their keys and in one tile with them, more sequences than a wave has lanes, rows of several tiles, packed keys,
/// latent rows; each with lengths of 0.
fn unlike(cases: &mut Vec<Case>) {
    const FEW: [i32; 5] = [0, 700, 33, 1, 260];
    let of_used = |cases: &mut Vec<Case>, name: String, mut problem: FwdProblem, lengths: &[i32]| {
        problem.layout.seqused_k = true;
        push(cases, name, problem, Lengths { seqused_k: lengths.to_vec(), ..Lengths::default() });
    };
    for dtype in [DType::Bf16, DType::F16] {
        let few = |seqlen_q, heads, head_dim| Dims { batch: 5, ..dims(seqlen_q, 700, heads, head_dim) };
        for mask in ["b", "b:60,0,8", "b:200,0,40", "t:40,3,5"] {
            for (seqlen_q, heads, head_dim) in [(1, (7, 1), 64), (4, (6, 2), 128), (16, (12, 1), 64)] {
                let name = format!("decode/unlike/{dtype}/{}of{}/q{seqlen_q}/{mask}", heads.0, heads.1);
                of_used(cases, name, masked(dtype, few(seqlen_q, heads, head_dim), mask), &FEW);
            }
        }
        // Empty sequences come before the first with keys and after the last, and between those with many keys is
        // one with none.
        let lengths: Vec<i32> = (0..150)
            .map(|at| match at {
                20 => 900,
                3 | 66 | 127 => 300,
                4..140 if at % 3 == 0 => at,
                _ => 0,
            })
            .collect();
        let sizes = Dims { batch: 150, ..dims(1, 900, (3, 1), 32) };
        of_used(cases, format!("decode/unlike/{dtype}/many"), masked(dtype, sizes, "b"), &lengths);
        for (seqlen_q, heads) in [(1, 16), (3, 16)] {
            let sizes = Dims { batch: 5, ..dims(seqlen_q, 700, (heads, 1), 0) };
            let problem = of_decode(dtype, sizes, ROWS_OF_DECODE[1], "b");
            of_used(
                cases,
                format!("decode/unlike/{dtype}/latent/q{seqlen_q}"),
                problem,
                &[40, 0, 700, 0, 260],
            );
        }
        unlike_latent(cases, dtype);
        let sizes = Dims { batch: 4, ..dims(3, 700, (5, 1), 64) };
        let problem = FwdProblem::group(dtype, sizes).mask(masked(dtype, sizes, "b").mask).write_lse(true);
        let lengths = Lengths::packed(&[(1, 700), (3, 0), (0, 90), (2, 260)]);
        push(cases, format!("decode/unlike/{dtype}/packed"), problem, lengths);
    }
}

/// Latent rows of unlike sequences: in pages, over FP8 caches, in two tiles of rows, with one sequence that is far
/// longer than the others; and a recorded call that is replayed with other lengths, 0 among both.
fn unlike_latent(cases: &mut Vec<Case>, dtype: DType) {
    for (cache, (seqlen_q, heads), page_size, seqused_k) in [
        (None, (1, 70), Some(64), [0, 1500, 1, 64, 129]),
        (None, (2, 5), Some(7), [300, 0, 65, 700, 2]),
        (Some(DType::E4m3Fn), (1, 16), Some(64), [40, 700, 0, 1, 260]),
        (Some(DType::E4m3Fn), (2, 40), None, [700, 0, 0, 130, 64]),
    ] {
        let layout = layout_of(page_size);
        let kind = if cache.is_some() { "latent_fp8" } else { "latent" };
        let name = format!("decode/unlike/{dtype}/{kind}/q{seqlen_q}/h{heads}/{layout}");
        let most = seqused_k.into_iter().fold(0, i32::max).unsigned_abs();
        let sizes = Dims { batch: 5, ..dims(seqlen_q, most, (heads, 1), 0) };
        let mut problem = of_decode(dtype, sizes, ROWS_OF_DECODE[1], "b");
        let mut lengths = Lengths { seqused_k: seqused_k.to_vec(), ..Lengths::default() };
        if let Some(page_size) = page_size {
            (problem, lengths) = in_pages(problem, page_size, lengths, &name);
            problem.strides.v = problem.strides.k;
        }
        problem.cache.dtype = cache;
        push(cases, name, problem, lengths);
    }
    for cache in [None, Some(DType::E4m3Fn)] {
        let kind = if cache.is_some() { "latent_fp8" } else { "latent" };
        let name = format!("decode/unlike/{dtype}/{kind}/recorded");
        let sizes = Dims { batch: 5, ..dims(1, 700, (16, 1), 0) };
        let mut problem = of_decode(dtype, sizes, ROWS_OF_DECODE[1], "b");
        problem.cache.dtype = cache;
        let lengths = Lengths { seqused_k: vec![0, 700, 33, 1, 260], ..Lengths::default() };
        push_law(cases, name, problem, lengths, LawKind::Recorded);
    }
}

/// Head dimensions for every decode kernel: narrow rows, and wide ones with V in K.
const ROWS_OF_DECODE: [(&str, u32, u32); 2] = [("d64", 64, 64), ("latent", 576, 512)];

fn of_decode(dtype: DType, sizes: Dims, row: (&str, u32, u32), mask: &str) -> FwdProblem {
    let (_, head_dim_qk, head_dim_v) = row;
    let mut problem = masked(dtype, Dims { head_dim_qk, head_dim_v, ..sizes }, mask);
    if head_dim_qk != head_dim_v {
        (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
    }
    problem.layout.seqused_k = true;
    problem
}

/// A last block, after several full ones, with 1 key, 31 keys, and one key short of full for blocks of 32, 64 and
/// 128: the last key outweighs all others, so that leaving it out shows.
fn last_keys(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for row in ROWS_OF_DECODE {
            for (at, tails) in [[1, 31, 32], [63, 127, 95]].into_iter().enumerate() {
                for (seqlen_q, page_size) in [(1, None), (1, Some(16)), (3, Some(64))] {
                    let layout = layout_of(page_size);
                    let name = format!("decode/last_keys/{dtype}/{}/q{seqlen_q}/{layout}/{at}", row.0);
                    let seqused_k: Vec<i32> = tails.iter().map(|tail| 384 + tail).collect();
                    let sizes = dims(seqlen_q, 384 + 128, (4, 1), 0);
                    let mut problem = of_decode(dtype, sizes, row, "0");
                    let mut lengths = Lengths { seqused_k, ..Lengths::default() };
                    if let Some(page_size) = page_size {
                        let v_in_k = problem.cache.v_in_k;
                        (problem, lengths) = in_pages(problem, page_size, lengths, &name);
                        if v_in_k {
                            problem.strides.v = problem.strides.k;
                        }
                    }
                    let data = data(&name);
                    let plant = Plant::LastKeys;
                    let body = Body::Forward(Box::new(Forward { problem, lengths, data, plant }));
                    cases.push(Case { name, body });
                }
            }
        }
    }
}

/// Caches with more parts than a wave of a merging launch reads at a time: 32 and 64, and twice these.
fn many_parts(cases: &mut Vec<Case>) {
    for dtype in [DType::F16, DType::Bf16] {
        for (seqlen_k, mask) in [(2600, "0"), (4500, "b"), (9100, "0"), (17000, "b")] {
            for seqlen_q in [1, 2] {
                let name = format!("decode/many_parts/{dtype}/k{seqlen_k}/q{seqlen_q}/{mask}");
                let sizes = Dims { batch: 2, ..dims(seqlen_q, seqlen_k, (2, 1), 32) };
                let mut problem = masked(dtype, sizes, mask);
                problem.layout.seqused_k = true;
                let most = seqlen_k.cast_signed();
                let lengths = Lengths { seqused_k: vec![most, most / 2 + 7], ..Lengths::default() };
                let data = data(&name);
                // The last parts have greater weights than the first ones.
                let plant = Plant::LastKeys;
                let body = Body::Forward(Box::new(Forward { problem, lengths, data, plant }));
                cases.push(Case { name, body });
            }
        }
    }
}

/// Block tables without common entries, for sequences of several blocks and different lengths: using a neighbour's
/// or another sequence's entry shows in every row.
fn tables_apart(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for row in ROWS_OF_DECODE {
            for page_size in [1, 7, 16, 48] {
                for seqlen_q in [1, 3] {
                    let name = format!("decode/tables_apart/{dtype}/{}/q{seqlen_q}/p{page_size}", row.0);
                    let problem = of_decode(dtype, dims(seqlen_q, 420, (4, 1), 0), row, "b");
                    let seqused_k = vec![420, 133, 270];
                    let v_in_k = problem.cache.v_in_k;
                    let (mut problem, lengths) =
                        in_pages(problem, page_size, Lengths { seqused_k, ..Lengths::default() }, &name);
                    if v_in_k {
                        problem.strides.v = problem.strides.k;
                    }
                    push(cases, name, problem, lengths);
                }
            }
        }
    }
}

/// Batch-invariant calls long enough for parts: one token and several, and sequences of one part packed with
/// sequences of several.
fn fixed_parts(cases: &mut Vec<Case>) {
    for dtype in [DType::F16, DType::Bf16] {
        for seqlen_q in [3, 40] {
            for page_size in [None, Some(32), Some(20)] {
                let layout = layout_of(page_size);
                let name = format!("decode/fixed_parts/{dtype}/q{seqlen_q}/{layout}");
                let mut problem = masked(dtype, dims(seqlen_q, 4500, (2, 1), 64), "b");
                let mut lengths = used(&mut problem);
                (problem, lengths) = placed(problem, page_size, lengths, &name);
                push_law(cases, name, problem, lengths, LawKind::LastOfMany);
            }
        }
        let name = format!("decode/fixed_parts/{dtype}/packed");
        let sizes = dims(3, 4500, (2, 1), 64);
        let problem = FwdProblem::group(dtype, sizes).mask(masked(dtype, sizes, "b").mask).write_lse(true);
        let lengths = Lengths::packed(&[(3, 4500), (1, 900), (2, 2300)]);
        push_law(cases, name, problem, lengths, LawKind::AloneIsInPack);
    }
}

/// Quantised caches in the layouts of 16-bit caches: pages, packed rows, more rows than a tile, wide and latent
/// rows, column-major V, rows at any byte.
fn widened_caches(cases: &mut Vec<Case>) {
    let law = |cases: &mut Vec<Case>, kind: &str, mut problem: FwdProblem, lengths, cache| {
        let name = format!("decode/an_fp8_cache_is_one_widened_before/{kind}/{cache}/{}", problem.dtypes.qk);
        (problem.cache.dtype, problem.write_lse) = (Some(cache), true);
        // A V inside K has no descale of its own, which would make it a different tensor.
        if !problem.cache.v_in_k {
            (problem.scales.descale_k, problem.scales.descale_v) = (Descale::PerKvHead, Descale::PerTensor);
        }
        push_law(cases, name, problem, lengths, LawKind::WidenedCache);
    };
    for (cache, dtype) in [(DType::E4m3Fn, DType::F16), (DType::E5m2, DType::Bf16)] {
        for (seqlen_q, seqlen_k) in [(1, 70), (2, 600)] {
            let mut problem = masked(dtype, dims(seqlen_q, seqlen_k, (6, 2), 128), "b");
            let lengths = used(&mut problem);
            let (problem, lengths) = in_pages(problem, 16, lengths, &format!("{cache}/pages/k{seqlen_k}"));
            law(cases, &format!("pages/k{seqlen_k}"), problem, lengths, cache);
        }
        let sizes = dims(40, 90, (4, 2), 64);
        let packed = FwdProblem::group(dtype, sizes).mask(masked(dtype, sizes, "b").mask);
        law(cases, "packed", packed, Lengths::packed(&[(1, 90), (40, 33), (3, 0)]), cache);
        for (kind, sizes) in [
            ("many_rows", dims(70, 600, (2, 1), 64)),
            ("d256", dims(2, 520, (2, 1), 256)),
            ("d512", dims(1, 100, (2, 1), 512)),
            ("d320", dims(3, 100, (2, 1), 320)),
        ] {
            let mut problem = masked(dtype, sizes, "b");
            let lengths = used(&mut problem);
            law(cases, kind, problem, lengths, cache);
        }
        for (kind, rows) in [("latent", 1), ("latent_many", 3)] {
            let mut problem = of_decode(dtype, dims(rows, 300, (4, 1), 0), ROWS_OF_DECODE[1], "b");
            let lengths = used(&mut problem);
            law(cases, kind, problem, lengths, cache);
        }
        let mut problem = masked(dtype, dims(2, 150, (2, 2), 64), "b");
        problem.layout.v = VLayout::ColMajor;
        problem.strides.v = Strides::bhds(problem.shape_v());
        let lengths = used(&mut problem);
        law(cases, "v_along_the_keys", problem, lengths, cache);
        // Rows of 16-bit elements begin at multiples of 4 bytes, and rows of FP8 at any byte.
        for head_dim in [64, 208] {
            let mut problem = masked(dtype, dims(2, 600, (2, 1), head_dim), "b");
            for strides in [&mut problem.strides.k, &mut problem.strides.v] {
                strides.seq += 2;
                strides.batch += 2 * 600;
            }
            let lengths = used(&mut problem);
            law(cases, &format!("gaps/d{head_dim}"), problem, lengths, cache);
        }
    }
}

fn laws(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for seqlen_q in [1, 5, 20] {
            for mask in ["0", "b", "b:25,0"] {
                let base = || {
                    let mut problem = masked(dtype, dims(seqlen_q, 90, (4, 2), 64), mask);
                    let lengths = used(&mut problem);
                    (problem, lengths)
                };
                let at = format!("{dtype}/q{seqlen_q}/{mask}");
                for page_size in [1, 16, 50] {
                    let name = format!("decode/pages_hold_the_same_keys/{at}/p{page_size}");
                    let (problem, lengths) = base();
                    push_law(cases, name, problem, lengths, LawKind::PagedIsStrided(page_size));
                }
                let name = format!("decode/pages_may_be_renumbered/{at}");
                let (problem, lengths) = base();
                let (problem, mut lengths) = in_pages(problem, 8, lengths, &name);
                // Entries of the block table: the existing pages in order.
                let most = lengths.totals.num_pages.unwrap_or(0).cast_signed();
                lengths.block_table.iter_mut().for_each(|page| *page = (*page).clamp(0, most - 1));
                push_law(cases, name, problem, lengths, LawKind::PermutedPages);

                let name = format!("decode/an_append_is_a_cache_written_before/{at}");
                let (problem, mut lengths) = base();
                lengths.seqused_k = vec![90, 33, 5];
                push_law(cases, name, problem, lengths, LawKind::AppendIsWritten(5));

                let name = format!("decode/a_token_alone_is_the_last_of_many/{at}");
                let (problem, lengths) = base();
                push_law(cases, name, problem, lengths, LawKind::LastOfMany);
            }
        }
    }
    fixed_parts(cases);
    for (dtype, v) in [(DType::E4m3Fn, DType::E4m3Fn), (DType::E5m2, DType::F16)] {
        let name = format!("decode/an_append_is_a_cache_written_before/{dtype}/v_{v}");
        let mut problem = masked(dtype, dims(5, 90, (4, 2), 64), "b");
        problem.dtypes.v = v;
        fp8_scales(Descale::PerKvHead, &mut problem);
        let lengths = Lengths { seqused_k: vec![90, 33, 5], ..used(&mut problem) };
        push_law(cases, name, problem, lengths, LawKind::AppendIsWritten(5));
    }
    for (cache, dtype) in
        [(DType::E4m3Fn, DType::F16), (DType::E5m2, DType::Bf16), (DType::E4m3Fnuz, DType::Bf16)]
    {
        for descale in [Descale::None, Descale::PerTensor, Descale::PerKvHead] {
            for seqlen_q in [1, 4, 20] {
                let name = format!(
                    "decode/an_fp8_cache_is_one_widened_before/{cache}/{dtype}/{descale:?}/q{seqlen_q}"
                );
                let (problem, lengths) = fp8_cache(dtype, cache, descale, seqlen_q);
                push_law(cases, name, problem, lengths, LawKind::WidenedCache);
            }
        }
    }
    for (cache, dtype, shapes) in
        [(DType::E4m3Fn, DType::F16, [(2, 64), (5, 192)]), (DType::E5m2, DType::Bf16, [(1, 96), (7, 40)])]
    {
        for (seqlen_q, head_dim) in shapes {
            let name = format!(
                "decode/an_fp8_cache_is_one_widened_before/{cache}/{dtype}/d{head_dim}/lengths/q{seqlen_q}"
            );
            let mut problem = masked(dtype, Dims { batch: 4, ..dims(seqlen_q, 70, (6, 2), head_dim) }, "b");
            (problem.cache.dtype, problem.layout.seqused_k, problem.write_lse) = (Some(cache), true, true);
            (problem.scales.descale_k, problem.scales.descale_v) = (Descale::PerKvHead, Descale::PerTensor);
            let lengths = Lengths { seqused_k: vec![70, 0, 1, 40], ..Lengths::default() };
            push_law(cases, name, problem, lengths, LawKind::WidenedCache);
            // The cache is long enough to be split into parts.
            let name = format!(
                "decode/an_fp8_cache_is_one_widened_before/{cache}/{dtype}/d{head_dim}/parts/q{seqlen_q}"
            );
            let mut problem = masked(dtype, dims(seqlen_q, 700, (4, 2), head_dim), "b");
            (problem.cache.dtype, problem.write_lse) = (Some(cache), true);
            (problem.scales.descale_k, problem.scales.descale_v) = (Descale::PerKvHead, Descale::PerTensor);
            let lengths = used(&mut problem);
            push_law(cases, name, problem, lengths, LawKind::WidenedCache);
        }
    }
    widened_caches(cases);
    // Lengths are long and different, so that CTAs share a sequence's keys.
    for (cache, dtype, head_dim, seqlen_q) in [
        (DType::E4m3Fn, DType::Bf16, 128, 1),
        (DType::E4m3Fn, DType::F16, 64, 3),
        (DType::E5m2, DType::Bf16, 192, 2),
        (DType::E5m2, DType::F16, 128, 7),
        (DType::E4m3Fn, DType::Bf16, 80, 1),
    ] {
        let name = format!(
            "decode/an_fp8_cache_is_one_widened_before/{cache}/{dtype}/d{head_dim}/shares/q{seqlen_q}"
        );
        let mut problem = masked(dtype, Dims { batch: 4, ..dims(seqlen_q, 1300, (6, 2), head_dim) }, "b");
        (problem.cache.dtype, problem.layout.seqused_k, problem.write_lse) = (Some(cache), true, true);
        (problem.scales.descale_k, problem.scales.descale_v) = (Descale::PerKvHead, Descale::PerTensor);
        let lengths = Lengths { seqused_k: vec![700, 0, 1300, 40], ..Lengths::default() };
        push_law(cases, name, problem, lengths, LawKind::WidenedCache);
    }
    for (cache, dtype) in [(DType::E4m3Fn, DType::Bf16), (DType::E5m2, DType::F16)] {
        for (seqlen_q, head_dim) in [(1, 128), (3, 128), (1, 64), (15, 192)] {
            let name =
                format!("decode/an_fp8_cache_is_one_widened_before/{cache}/{dtype}/d{head_dim}/q{seqlen_q}");
            let mut problem = masked(dtype, dims(seqlen_q, 150, (4, 2), head_dim), "b");
            problem.cache.dtype = Some(cache);
            (problem.scales.descale_k, problem.scales.descale_v) = (Descale::PerKvHead, Descale::PerTensor);
            let lengths = used(&mut problem);
            push_law(cases, name, problem, lengths, LawKind::WidenedCache);
        }
    }
}
