//! Tests of the backward's choices against measured times.

use fmha_core::spec::BwdSpec;
use fmha_core::{BwdProblem, DType, Dims, FwdProblem, MaskSpec};
use fmha_kernels_cuda::sm90_bwd::{DqFinish, DqPath};
use fmha_kernels_cuda::{sm80_bwd, sm90_bwd};

use super::{chosen, dims};

/// Row of `measured.tsv`.
struct Measured {
    run: String,
    problem: BwdProblem,
    tile: Vec<(String, String)>,
    tflops: f64,
}

fn measured() -> Vec<(String, Measured)> {
    let text = include_str!("../../src/sm90_bwd/measured.tsv");
    let row = |line: &str| {
        let columns: Vec<&str> = line.split('\t').collect();
        let &[run, device, made, batch, heads, seqlen, head_dims, mask, tile, tflops] = columns.as_slice()
        else {
            panic!("ten columns: {line}")
        };
        let number = |text: &str| text.parse::<u32>().unwrap();
        let pair = |text: &str| text.split_once('/').map(|(a, b)| (number(a), number(b))).unwrap();
        let ((num_heads_q, num_heads_kv), (head_dim_qk, head_dim_v)) = (pair(heads), pair(head_dims));
        let (batch, seqlen) = (number(batch), number(seqlen));
        let dims = Dims::batch(batch)
            .seqlens(seqlen, seqlen)
            .heads(num_heads_q, num_heads_kv)
            .head_dims(head_dim_qk, head_dim_v);
        assert!(made.len() == 10 && matches!(device, "H100" | "H200"), "{line}");
        let mask = if mask == "causal" { MaskSpec::CAUSAL } else { MaskSpec::NONE };
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims).mask(mask));
        let fields = tile.split(',').map(|field| field.split_once('=').unwrap());
        let tile = fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let group = columns[..8].join(" ");
        (group, Measured { run: run.to_owned(), problem, tile, tflops: tflops.parse().unwrap() })
    };
    text.lines().filter(|line| !line.starts_with('#')).map(row).collect()
}

/// The choice is within a hundredth of the best time, as much as runs differ.
#[test]
fn every_choice_of_the_backward_is_the_best_that_was_measured() {
    let rows = measured();
    let mut checked = 0;
    for (group, row) in &rows {
        let is_chosen = row.tile.iter().all(|(field, value)| chosen(&row.problem, field) == *value);
        let of_group = rows.iter().filter(|(other, _)| other == group);
        let best = of_group.map(|(_, row)| row.tflops).fold(0.0, f64::max);
        if is_chosen {
            checked += 1;
            assert!(row.tflops >= 0.99 * best, "{group}: {:?} has {}, another {best}", row.tile, row.tflops);
        }
    }
    // The other rows were measured with fields that the table has changed since.
    assert!(checked >= 35, "{checked} rows are of the tile that is chosen");
}

#[test]
fn the_model_of_head_parts_has_the_measured_rates() {
    let mut checked = 0;
    for (group, row) in
        measured().into_iter().filter(|(_, row)| row.run.ends_with("part") || row.run == "parts")
    {
        let dims = row.problem.fwd.dims;
        let pairs = f64::from(dims.seqlen_q) * f64::from(dims.seqlen_k);
        let half = if row.problem.fwd.mask == MaskSpec::NONE { 1.0 } else { 0.5 };
        let heads = f64::from(dims.batch) * f64::from(dims.num_heads_q);
        let flops = 10.0 * half * heads * pairs * f64::from(dims.head_dim_qk);
        let parts: u32 = row.tile[0].1.parse().unwrap();
        let spec = BwdSpec::of(&row.problem);
        let tile = sm90_bwd::choose_tile(&row.problem, &spec);
        let modelled = tile.model_of_head_parts(&row.problem, &spec, 132, parts);
        let measured = flops / row.tflops * 1e-6;
        checked += 1;
        assert!(
            (modelled / measured - 1.0).abs() < 0.05,
            "{group} {parts}: {modelled} us, measured {measured}"
        );
    }
    assert_eq!(checked, 6);
}

/// Shapes of the tables' backward rows, 16k tokens: choices by prices equal the former choices by thresholds of the
/// length.
#[test]
fn the_ways_of_dq_of_the_tables_shapes_are_those_that_were_measured() {
    let (first, zeros) = (DqPath::FirstStores, DqPath::StoreWarp);
    let (launch, beside, with_delta) = (DqFinish::Launch, DqFinish::Beside, DqFinish::BesideWithDelta);
    // Rows of a length and the way of dQ that holds from it to the next row's length.
    let rows = [
        (64, "0", vec![(128, first, beside), (1024, first, with_delta), (8192, first, launch)]),
        (64, "b", vec![(128, first, beside), (2048, first, with_delta)]),
        (128, "0", vec![(128, first, beside), (1024, first, with_delta), (8192, zeros, launch)]),
        (128, "b", vec![(128, first, beside), (2048, first, with_delta), (16384, zeros, beside)]),
        (256, "0", vec![(128, DqPath::Registers, launch)]),
        (256, "b", vec![(128, DqPath::Registers, launch)]),
    ];
    for (head_dim, mask, ways) in rows {
        for seqlen in [128, 256, 512, 1024, 2048, 4096, 8192, 16384] {
            let (batch, heads) = (16384 / seqlen, 2048 / head_dim);
            let dims = Dims {
                batch,
                num_heads_q: heads,
                num_heads_kv: heads,
                ..dims(1, (seqlen, seqlen), (head_dim, head_dim))
            };
            let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims).mask(mask.parse().unwrap()));
            let tile = sm90_bwd::choose_tile(&problem, &BwdSpec::of(&problem));
            let expected = ways.iter().rev().find(|(from, ..)| *from <= seqlen).unwrap();
            let found = (expected.0, tile.dq_path, tile.dq_finish);
            assert_eq!(found, *expected, "D {head_dim} {mask} S {seqlen}");
        }
    }
    // Two heads are little work: finishing dQ beside the products costs most, and preprocess handles all heads anyway.
    // The wait for the first store at a block is longer than writing zeros: 59.9 and 55.7 us at B4 H32 S320 D64, 55.7
    // and 48.9 us at B1 H5/1 S951.
    for seqlen in [40, 200, 1000] {
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims(1, (seqlen, seqlen), (64, 64))));
        let tile = sm90_bwd::choose_tile(&problem, &BwdSpec::of(&problem));
        assert_eq!((tile.dq_path, tile.dq_finish), (zeros, launch), "2 heads, S {seqlen}");
    }
    // Many queries read few keys, whose first stores follow one another: 357 and 319 us at 4423 over 192 D 128, 977 and
    // 906 at 24025 over 192 D 64, 177 and 166 at 1024 over 256 D 128.
    for (head_dim, seqlens, batch, heads, path) in [
        (128, (4423, 192), 2, 32, zeros),
        (64, (24025, 192), 2, 32, zeros),
        (128, (1024, 256), 8, 16, zeros),
        (128, (1024, 1024), 8, 16, first),
    ] {
        let dims =
            Dims { num_heads_q: heads, num_heads_kv: heads, ..dims(batch, seqlens, (head_dim, head_dim)) };
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims));
        let tile = sm90_bwd::choose_tile(&problem, &BwdSpec::of(&problem));
        assert_eq!(tile.dq_path, path, "D {head_dim} {seqlens:?}");
    }
}

/// Rows of docs/measured/sm80-h200.md: causal, 16384 tokens of 2048 elements, on an H200.
#[test]
fn dq_is_summed_in_one_pass_where_that_was_measured_to_be_faster() {
    let causal = |head_dim: u32, seqlen: u32| {
        let heads = 2048 / head_dim;
        let sizes = Dims { batch: 16384 / seqlen, ..dims(1, (seqlen, seqlen), (head_dim, head_dim)) };
        let sizes = Dims { num_heads_q: heads, num_heads_kv: heads, ..sizes };
        BwdProblem::new(FwdProblem::batch(DType::Bf16, sizes).mask(MaskSpec::CAUSAL))
    };
    for head_dim in [64, 128] {
        for (seqlen, one_pass) in [(512, false), (4096, true), (16384, true)] {
            let problem = causal(head_dim, seqlen);
            let ways = sm80_bwd::ways_of_dq(&problem, &BwdSpec::of(&problem), 132);
            let best = ways.cheapest(sm80_bwd::LEAST_GAIN_OF_ONE_PASS).map(|best| best.choice);
            assert_eq!(best, Some(one_pass), "{head_dim}, {seqlen}: {}", ways.words(bool::to_string));
        }
    }
    let wide = causal(256, 4096);
    let ways = sm80_bwd::ways_of_dq(&wide, &BwdSpec::of(&wide), 132);
    assert_eq!(ways.iter().map(|way| way.choice).collect::<Vec<_>>(), [false]);
}
