//! What the tables choose, held to what the kernels take.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_core::fields::Fields as _;
use fmha_core::source::includes;
use fmha_core::spec::{BwdSpec, FwdSpec};
use fmha_core::{
    BwdProblem, DType, Dims, FwdProblem, KvLayout, MaskKind, MaskSpec, QLayout, Shape, Strides, VLayout,
};
use fmha_kernels_cuda::schedule::{MAX_TILES, TileOrder};
use fmha_kernels_cuda::sm90::{PrepareV, PreparedValues};
use fmha_kernels_cuda::sm90_bwd::{BwdWalk, DqFinish, DqPath};
use fmha_kernels_cuda::{sm80, sm80_bwd, sm90, sm90_bwd, sm100, sm100_bwd};

const RATIOS: [u32; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 64, 128];
const LENGTHS: [(u32, u32); 9] = [
    (1, 70),
    (3, 5000),
    (20, 600),
    (65, 65),
    (150, 424),
    (512, 512),
    (1024, 1024),
    (4096, 4096),
    (9000, 20000),
];
const HEAD_DIMS: [(u32, u32); 8] =
    [(64, 64), (40, 24), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256)];

fn dims(ratio: u32, (seqlen_q, seqlen_k): (u32, u32), (head_dim_qk, head_dim_v): (u32, u32)) -> Dims {
    Dims { batch: 2, seqlen_q, seqlen_k, num_heads_q: 2 * ratio, num_heads_kv: 2, head_dim_qk, head_dim_v }
}

/// Every size with every ratio, mask and kind of sequences; rows that TMA takes and rows that it does not;
/// each modifier.
fn problems() -> impl Iterator<Item = FwdProblem> {
    let sizes = RATIOS
        .into_iter()
        .flat_map(|ratio| LENGTHS.map(|lengths| HEAD_DIMS.map(|head_dims| dims(ratio, lengths, head_dims))))
        .flatten();
    sizes.flat_map(|dims| {
        ["0", "b", "b:300,2"].into_iter().flat_map(move |mask| {
            (0..16).map(move |bits| {
                let make = if bits & 1 == 0 { FwdProblem::batch } else { FwdProblem::group };
                let mut problem = make(DType::F16, dims).mask(mask.parse().unwrap());
                if bits & 2 != 0 {
                    let seq = problem.strides.k.seq + 1;
                    problem.strides.k =
                        Strides { seq, batch: seq * i64::from(dims.seqlen_k), ..problem.strides.k };
                }
                problem.score.softcap = (bits & 4 != 0).then_some(30.0);
                problem.dropout.p_drop = if bits & 8 != 0 { 0.5 } else { 0.0 };
                problem
            })
        })
    })
}

#[test]
fn the_tile_that_the_hopper_table_chooses_is_one_that_its_kernel_takes() {
    let mut packed = 0;
    for problem in problems() {
        assert_eq!(sm90::accepts(&problem), Ok(()));
        let mut tile = sm90::choose_tile(&problem);
        let spec = sm90::spec_of(&problem);
        for made_invariant in [false, true] {
            if made_invariant {
                tile.make_batch_invariant(&spec);
                tile.take_fixed_parts(&problem);
                assert!(tile.is_batch_invariant(&spec), "{tile:?}");
            }
            let refusal = tile.check(&spec, problem.gqa_ratio());
            assert_eq!(refusal, Ok(()), "{:?} {:?} {tile:?}", problem.dims, problem.layout.kv);
        }
        packed += usize::from(tile.pack_gqa);
    }
    assert!(packed > 1000, "{packed} tiles with packed heads");
}

#[test]
fn the_tile_that_the_blackwell_table_chooses_is_one_that_its_kernel_takes() {
    for problem in problems().filter(|problem| sm100::accepts(problem).is_ok()) {
        for arch in sm100::ARCHS {
            let tile = sm100::choose_tile(&problem, arch);
            let refusal = tile.check(&FwdSpec::of(&problem), problem.gqa_ratio());
            assert_eq!(refusal, Ok(()), "{arch} {:?} {:?} {tile:?}", problem.dims, problem.layout.kv);
        }
    }
}

/// An A100, an RTX 3090, an H200.
const ROOMS: [sm80::Room; 3] = [
    sm80::Room { smem_bytes: 166_912, num_sms: 108 },
    sm80::Room { smem_bytes: 101_376, num_sms: 82 },
    sm80::Room { smem_bytes: 232_448, num_sms: 132 },
];

#[test]
fn the_tile_that_the_table_of_mma_sync_chooses_is_one_that_its_kernel_takes() {
    let (mut packed, mut split) = (0, 0);
    for problem in problems() {
        assert_eq!(sm80::accepts(&problem, true), Ok(()));
        for room in ROOMS {
            let tile = sm80::choose_tile(&problem, room);
            let mut invariant = tile;
            invariant.make_batch_invariant(&problem, room);
            for tile in [tile, invariant] {
                let checked = tile.check().and_then(|()| tile.check_loads(&problem));
                assert_eq!(checked, Ok(()), "{:?} {:?} {tile:?}", problem.dims, problem.layout.kv);
                let bytes = tile.smem_bytes(&FwdSpec::of(&problem));
                assert!(bytes <= room.smem_bytes, "{bytes} of {room:?}: {tile:?}");
            }
            packed += usize::from(tile.pack_gqa);
            split += usize::from(tile.split_keys > 0);
        }
    }
    assert!(packed > 1000 && split > 1000, "{packed} tiles with packed heads, {split} with parts of keys");
}

#[test]
fn the_tiles_of_the_backward_of_mma_sync_fit_every_device() {
    for fwd in problems() {
        let problem = BwdProblem::new(fwd);
        let spec = BwdSpec::of(&problem);
        for room in ROOMS {
            let all = sm80_bwd::takes_one_pass(&spec).is_ok();
            let one_pass = all.then(|| sm80_bwd::choose_tiles(&problem, &spec, room, true));
            let tiles = sm80_bwd::choose_tiles(&problem, &spec, room, false);
            for tile in tiles.into_iter().chain(one_pass.into_iter().flatten()) {
                assert_eq!(tile.check_loads(&problem), Ok(()));
                assert_eq!(tile.check_one_pass(&spec), Ok(()), "{tile:?}");
                let bytes = tile.smem_bytes(&spec);
                assert!(bytes <= room.smem_bytes, "{bytes} of {room:?}: {tile:?}");
            }
        }
    }
}

#[test]
fn the_tiles_of_the_backward_of_blackwell_fit_its_shared_memory() {
    let mut taken = 0;
    for problem in problems().map(BwdProblem::new).filter(|problem| sm100_bwd::accepts(problem).is_ok()) {
        let spec = BwdSpec::of(&problem);
        let tile = sm100_bwd::choose_tile(&problem, &spec);
        let bytes = tile.smem_bytes(&spec);
        assert!(bytes <= sm100_bwd::MAX_SMEM_BYTES, "{bytes}: {tile:?}");
        assert!(tile.stages_q == 2 && tile.stages_dout >= 1, "{tile:?}");
        taken += 1;
    }
    assert!(taken > 1000, "{taken} problems taken");
}

/// The same of FP8, all of it or beside a V of f16, V both ways.
fn problems_of_fp8() -> impl Iterator<Item = FwdProblem> {
    let sizes = RATIOS
        .into_iter()
        .flat_map(|ratio| LENGTHS.map(|lengths| HEAD_DIMS.map(|head_dims| dims(ratio, lengths, head_dims))))
        .flatten()
        // Rows of K and V are whole 16 bytes, those of a column-major V too.
        .map(|dims| Dims { head_dim_v: dims.head_dim_v.next_multiple_of(16), ..dims });
    sizes.flat_map(|dims| {
        ["0", "b", "b:300,2"].into_iter().flat_map(move |mask| {
            (0..16).map(move |bits| {
                let make = if bits & 1 == 0 { FwdProblem::batch } else { FwdProblem::group };
                let mut problem = make(DType::E4m3Fn, dims).mask(mask.parse().unwrap()).dtype_o(DType::Bf16);
                for strides in [&mut problem.strides.q, &mut problem.strides.k] {
                    (strides.head, strides.seq, strides.batch) = (256, 1 << 16, 0);
                }
                if bits & 2 != 0 {
                    problem.dtypes.v = DType::F16;
                }
                if bits & 4 != 0 {
                    problem.layout.v = VLayout::ColMajor;
                    let shape = problem.shape_v();
                    problem.strides.v = Strides::bhds(Shape { seq: shape.seq.next_multiple_of(16), ..shape });
                }
                problem.score.softcap = (bits & 8 != 0).then_some(30.0);
                problem
            })
        })
    })
}

#[test]
fn the_tile_that_the_hopper_table_chooses_for_fp8_is_one_that_its_kernel_takes() {
    let mut once = 0;
    for problem in problems_of_fp8() {
        assert_eq!(sm90::accepts(&problem), Ok(()), "{problem:?}");
        let mut tile = sm90::choose_tile(&problem);
        let spec = sm90::spec_of(&problem);
        for made_invariant in [false, true] {
            if made_invariant {
                tile.make_batch_invariant(&spec);
                assert!(tile.is_batch_invariant(&spec), "{tile:?}");
            }
            let refusal = tile.check(&spec, problem.gqa_ratio());
            assert_eq!(refusal, Ok(()), "{:?} {:?} {tile:?}", problem.dims, problem.layout.kv);
        }
        once += usize::from(tile.prepare_v != PrepareV::InTile);
    }
    assert!(once > 500, "V prepared once in {once} tiles");
}

fn of_fp8(seqlens: (u32, u32), ratio: u32, batch: u32) -> FwdProblem {
    let dims = Dims { batch, ..dims(ratio, seqlens, (128, 128)) };
    FwdProblem::batch(DType::E4m3Fn, dims).dtype_o(DType::Bf16)
}

/// Query rows of a kv head, of all its query heads, decide; and how much workspace V would take.
#[test]
fn a_v_of_fp8_is_prepared_once_where_many_tiles_read_it() {
    let beside = u32::try_from(sm90::PREPARE_BESIDE_ROWS).unwrap();
    let before = u32::try_from(sm90::PREPARE_BEFORE_ROWS).unwrap();
    let masked = |mask: &str, problem: FwdProblem| problem.clone().mask(mask.parse().unwrap());
    let many = || of_fp8((before, 300), 1, 2);
    for (what, problem, expected) in [
        ("as many rows as it takes", of_fp8((beside, 300), 1, 2), PrepareV::Beside),
        ("one row fewer", of_fp8((beside - 1, 300), 1, 2), PrepareV::InTile),
        ("the rows of four heads", of_fp8((beside / 4, 300), 4, 2), PrepareV::Beside),
        ("causal", masked("b", many()), PrepareV::Before),
        ("causal, one row fewer", masked("b", of_fp8((before - 1, 300), 1, 2)), PrepareV::InTile),
        ("a window", masked("b:200,2", many()), PrepareV::InTile),
        ("V in 16 bits", many().dtype_v(DType::F16), PrepareV::InTile),
        ("modified scores", many().softcap(3.0), PrepareV::InTile),
    ] {
        let tile = sm90::choose_tile(&problem);
        assert_eq!(tile.prepare_v, expected, "{what}: {tile:?}");
    }
    // Two kv heads of 4096 keys of 128 dimensions in 2 bytes are 2 MiB a sequence.
    let most = u32::try_from(sm90::PREPARED_BYTES >> 21).unwrap();
    for (batch, once) in [(most, true), (most + 1, false)] {
        let tile = sm90::choose_tile(&of_fp8((4096, 4096), 1, batch));
        assert_eq!(tile.prepare_v != PrepareV::InTile, once, "{batch} sequences");
    }
}

#[test]
fn causal_calls_whose_queries_see_few_keys_take_exact_maxima() {
    let with = |lengths, head_dim, mask: &str, softcap| {
        let mut problem = FwdProblem::batch(DType::Bf16, dims(1, lengths, (head_dim, head_dim)));
        problem.score.softcap = softcap;
        !sm90::choose_tile(&problem.mask(mask.parse().unwrap())).skip_row_max
    };
    for (lengths, head_dim, mask, softcap, exact) in [
        ((1024, 1024), 128, "b", None, true),
        ((1026, 1026), 128, "b", None, false),
        ((1024, 1024), 128, "0", None, false),
        ((300, 300), 128, "b", Some(30.0), false),
        ((64, 544), 128, "b", None, true),
        ((64, 546), 128, "b", None, false),
        ((512, 512), 80, "b", None, true),
        ((514, 514), 80, "b", None, false),
        ((512, 512), 64, "b", None, true),
        ((514, 514), 64, "b", None, false),
        ((512, 512), 192, "b", None, false),
    ] {
        let found = with(lengths, head_dim, mask, softcap);
        assert_eq!(found, exact, "{lengths:?} d{head_dim} {mask} softcap {softcap:?}");
    }
}

/// What a plan keeps of it, for two sequences of two kv heads.
#[test]
fn the_workspace_of_v_has_every_block_of_the_longest_sequence() {
    let problem = of_fp8((4096, 1000), 4, 2);
    let spec = FwdSpec::of(&problem);
    for (prepare_v, heads_per_group, counts) in
        [(PrepareV::Before, 2, 0), (PrepareV::Beside, 2, 4 * (1 + 4 * 8))]
    {
        let tile = sm90::Sm90Tile { prepare_v, block_m: 128, block_n: 128, ..sm90::choose_tile(&problem) };
        let schedule = tile.schedule(&problem).unwrap();
        let values = PreparedValues::new(&problem, &tile, &schedule, 132).unwrap();
        // 1000 keys are 8 blocks of 128, each of 8 units of sixteen keys.
        let expected = (8, 4, heads_per_group, 4 * 8 * 8);
        let found = (values.num_blocks, values.num_heads, values.heads_per_group, values.num_units);
        assert_eq!(found, expected, "{prepare_v:?}");
        assert_eq!(values.grid(), 4 * 8 * 8 / 8);
        assert_eq!(values.counts_bytes(&tile), counts);
        assert_eq!(values.blocks_bytes(&spec, &tile), 4 * 8 * 128 * 128 * 2);
    }
    // Without keys there are no units, but an address for the tensor map.
    let empty = of_fp8((4096, 0), 1, 1);
    let tile = sm90::Sm90Tile { prepare_v: PrepareV::Before, ..sm90::choose_tile(&empty) };
    let values = PreparedValues::new(&empty, &tile, &tile.schedule(&empty).unwrap(), 132).unwrap();
    assert_eq!((values.num_units, values.grid()), (0, 1));
    assert!(values.blocks_bytes(&FwdSpec::of(&empty), &tile) > 0);
}

#[test]
fn more_units_of_v_than_an_index_holds_are_refused_with_the_fields_that_make_them() {
    // 2^13 sequences of two kv heads of 2^13 blocks, eight units each.
    let of = |seqlen_k: u32| {
        let problem = of_fp8((1024, seqlen_k), 1, 1 << 13);
        let tile = sm90::choose_tile(&of_fp8((4096, 1024), 1, 1));
        assert_eq!((tile.prepare_v, tile.block_n), (PrepareV::Beside, 128));
        PreparedValues::new(&problem, &tile, &tile.schedule(&problem).unwrap(), 132)
    };
    assert!(of((1 << 20) - 128).is_ok());
    let refusal = of(1 << 20).unwrap_err();
    for words in ["block_n=128", "16384 kv heads", "1048576 keys", "1073741824 units"] {
        assert!(refusal.contains(words), "{refusal}");
    }
}

/// A counter costs a run the clearing of it, an eighth of its issue.
#[test]
fn a_counter_is_there_where_a_cta_may_claim_a_second_tile_and_nowhere_else() {
    let mut seen = [0, 0];
    for problem in problems() {
        let tile = sm90::choose_tile(&problem);
        let schedule = tile.schedule(&problem).unwrap();
        for num_sms in [1, 2, 132] {
            let ctas = tile.grid(&schedule, num_sms);
            let tiles = schedule.num_tiles.unsigned_abs() * tile.cluster.unsigned_abs();
            let claims = tile.order == TileOrder::Dynamic && tiles > ctas;
            assert_eq!(tile.counter_bytes(&schedule, num_sms), if claims { 4 } else { 0 }, "{tile:?}");
            seen[usize::from(claims)] += 1;
        }
    }
    assert!(seen.iter().all(|&n| n > 1000), "{seen:?}");
}

/// One row block a head: as many tiles as heads times sequences.
#[test]
fn more_tiles_than_a_schedule_counts_are_refused_with_the_fields_that_make_them() {
    let of = |batch: u32| {
        let dims = Dims { batch, num_heads_q: 1 << 10, num_heads_kv: 1 << 10, ..dims(1, (1, 70), (64, 64)) };
        let problem = FwdProblem::batch(DType::F16, dims);
        sm90::choose_tile(&problem).schedule(&problem)
    };
    let most = u32::try_from(MAX_TILES >> 10).unwrap();
    assert_eq!(i64::from(of(most).unwrap().num_tiles), MAX_TILES);
    let refusal = of(most + 1).unwrap_err();
    for words in ["num_heads_q 1024".to_owned(), format!("batch {}", most + 1), MAX_TILES.to_string()] {
        assert!(refusal.contains(&words), "{refusal}");
    }
    // Without the limit the number would have wrapped to 1024.
    assert!(of(1 << 22 | 1).unwrap_err().contains("tiles"));
}

/// A tile that was measured is forgotten when any of their text changes.
#[test]
fn the_headers_of_the_backward_are_those_that_its_entries_include() {
    let spec = BwdSpec::plain(DType::Bf16, 64, MaskKind::Upper);
    let tile = sm90_bwd::default_tile(&spec);
    let entries = [
        sm90_bwd::preprocess,
        sm90_bwd::main,
        sm90_bwd::postprocess,
        sm90_bwd::head_sums,
        sm90_bwd::repair,
        sm90_bwd::dbias,
    ]
    .map(|source| source(&spec, &tile).entry);
    for (header, entry) in sm90_bwd::HEADERS.into_iter().zip(&entries) {
        assert!(includes(entry).any(|name| name == header), "{header}: {entry}");
        assert!(fmha_kernels_cuda::headers().iter().any(|known| known.name == header), "{header}");
    }
}

/// The host counts their bytes.
#[test]
fn the_barriers_of_the_backward_are_those_of_its_shared_memory() {
    let headers = fmha_kernels_cuda::headers();
    let config = headers.iter().find(|header| header.name == "fmha/sm90/bwd/config.cuh").unwrap();
    let there: Vec<_> = config
        .text
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("Barrier ")?.split([';', '[']).next())
        .collect();
    let tile = sm90_bwd::default_tile(&BwdSpec::plain(DType::Bf16, 64, MaskKind::Upper));
    assert_eq!(there, tile.barriers().map(|(name, _)| name));
}

/// Without a mask each key block of a group waits for another of it, so all of them must be running.
#[test]
fn staggered_key_blocks_in_an_order_have_no_tile_index_ahead() {
    for (mask, taken) in [(MaskSpec::NONE, false), (MaskSpec::CAUSAL, true)] {
        let dims = dims(1, (512, 512), (128, 128));
        let fwd = FwdProblem::batch(DType::Bf16, dims).mask(mask);
        let spec = BwdSpec { deterministic: true, ..BwdSpec::of(&BwdProblem::new(fwd)) };
        let mut tile = sm90_bwd::default_tile(&spec);
        assert_eq!(tile.check(&spec), Ok(()));
        tile.persistent = true;
        assert_eq!(tile.check(&spec).is_ok(), taken, "{mask:?}");
        assert_eq!(tile.check(&BwdSpec { deterministic: false, ..spec }), Ok(()));
    }
}

/// A block of 80 queries did not compile beside dropout, which decides 32 at a time.
#[test]
fn blocks_that_dropout_does_not_decide_whole_are_refused_with_both_numbers() {
    let fwd = FwdProblem::batch(DType::Bf16, dims(1, (512, 512), (128, 128)));
    use sm90_bwd::BwdWalk::{EarlyScores, InOrder};
    for (block_m, walk, p_drop, refused) in [
        (80, InOrder, 0.0, false),
        (80, InOrder, 0.1, true),
        (64, InOrder, 0.1, false),
        (96, InOrder, 0.0, false),
        (96, InOrder, 0.1, false),
        (96, EarlyScores, 0.1, true),
        (64, EarlyScores, 0.1, false),
    ] {
        let problem = BwdProblem::new(fwd.clone().p_drop(p_drop));
        let spec = BwdSpec::of(&problem);
        let tile = sm90_bwd::Sm90BwdTile { block_m, walk, ..sm90_bwd::default_tile(&spec) };
        let refusal = tile.check(&spec).err().unwrap_or_default();
        let at_a_time = if walk == EarlyScores { 64 } else { 32 };
        let words = format!("of a consumer's {block_m} queries dropout decides {at_a_time} at a time");
        assert_eq!(refusal.contains(&words), refused, "block_m {block_m}: {refusal}");
    }
}

/// Long sequences without a mask are walked in larger blocks, where nothing is modified and additions to dQ
/// have no order.
#[test]
fn long_backwards_without_a_mask_are_walked_in_blocks_of_80_queries() {
    for (length, mask, p_drop, deterministic, block_m) in [
        (8192, "0", 0.0, false, 80),
        (8191, "0", 0.0, false, 64),
        (8192, "b", 0.0, false, 64),
        (8192, "0", 0.1, false, 64),
        (8192, "0", 0.0, true, 64),
    ] {
        let dims = dims(1, (length, length), (128, 128));
        let fwd = FwdProblem::batch(DType::Bf16, dims).mask(mask.parse().unwrap()).p_drop(p_drop);
        let problem = BwdProblem::new(fwd);
        let spec = BwdSpec { deterministic, ..BwdSpec::of(&problem) };
        let tile = sm90_bwd::choose_tile(&problem, &spec);
        assert_eq!(tile.block_m, block_m, "{length} {mask} {p_drop} {deterministic}");
        assert_eq!(tile.check(&spec), Ok(()));
    }
}

/// A row of `measured.tsv`.
struct Measured {
    run: String,
    problem: BwdProblem,
    tile: Vec<(String, String)>,
    tflops: f64,
}

fn measured() -> Vec<(String, Measured)> {
    let text = include_str!("../src/sm90_bwd/measured.tsv");
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
        let dims = Dims {
            batch,
            seqlen_q: seqlen,
            seqlen_k: seqlen,
            num_heads_q,
            num_heads_kv,
            head_dim_qk,
            head_dim_v,
        };
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

/// What a plan has of a field; of `parts`, how many tiles share a kv head's query heads.
fn chosen(problem: &BwdProblem, field: &str) -> String {
    let spec = BwdSpec::of(problem);
    let mut tile = sm90_bwd::choose_tile(problem, &spec);
    tile.head_parts = tile.wants_head_parts(problem, &spec, 132);
    if field == "parts" {
        return tile.schedule(problem, &spec, 132).unwrap().num_head_parts.to_string();
    }
    tile.named_values().into_iter().find(|(name, _)| *name == field).unwrap().1
}

/// Within a hundredth: runs differ by as much.
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
    // The others were measured beside fields that the table has changed since.
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

/// 432 tiles of one length on 132 multiprocessors are four rounds, of which the last is a quarter full. In one, two, four and eight
/// parts 6827, 6053, 6091 and 5849 us, an H200.
#[test]
fn tiles_that_leave_a_round_empty_share_a_heads_query_heads() {
    let of = |batch, num_heads_kv, mask| {
        let dims = Dims { batch, num_heads_q: 24, num_heads_kv, ..dims(1, (6144, 6144), (128, 128)) };
        let fwd = FwdProblem::batch(DType::Bf16, dims).mask(mask);
        chosen(&BwdProblem::new(fwd), "parts")
    };
    assert_eq!(of(3, 3, MaskSpec::NONE), "8");
    // Behind a mask a tile of eight heads is half of a multiprocessor's work: 3670, 3147, 3115 and 3210 us.
    assert_eq!(of(3, 3, MaskSpec::CAUSAL), "4");
    assert_eq!(of(3, 24, MaskSpec::NONE), "1");
}

/// Packed sequences may end with the longest one's longest tile, of all query heads of a kv head; where there are many
/// tiles beside it the sums of parts cost more.
#[test]
fn packed_sequences_share_a_heads_query_heads_where_one_tile_may_be_the_launch() {
    let of = |batch, num_heads_q, num_heads_kv, seqlen| {
        let dims = Dims { batch, num_heads_q, num_heads_kv, ..dims(1, (seqlen, seqlen), (128, 128)) };
        chosen(&BwdProblem::new(FwdProblem::group(DType::Bf16, dims).mask(MaskSpec::CAUSAL)), "parts")
            .parse::<u32>()
            .unwrap()
    };
    assert!(of(8, 16, 1, 16384) >= 4);
    assert_eq!(of(16, 32, 8, 3979), 1);
}

/// 39 tiles, of which the longest is the launch: a head's query blocks are shared out too, and preprocess and dQ still have each
/// of them once.
#[test]
fn a_heads_queries_are_shared_out_where_few_tiles_leave_multiprocessors_idle() {
    let of = |batch, seqlen, deterministic| {
        let dims = Dims { batch, num_heads_q: 3, num_heads_kv: 3, ..dims(1, (seqlen, seqlen), (128, 128)) };
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL));
        let spec = BwdSpec { deterministic, ..BwdSpec::of(&problem) };
        let mut tile = sm90_bwd::choose_tile(&problem, &spec);
        tile.head_parts = tile.wants_head_parts(&problem, &spec, 132);
        (tile, tile.schedule(&problem, &spec, 132).unwrap())
    };
    let (tile, schedule) = of(1, 1602, false);
    let queries = schedule.num_query_parts;
    assert!(tile.head_parts && queries > 1 && schedule.num_head_parts == 1, "{queries} parts");
    assert_eq!((schedule.num_heads, schedule.num_tiles), (3 * queries, 3 * queries * 13));
    assert_eq!((schedule.num_first_query_heads, schedule.num_first_q_blocks), (3, 3 * 26));
    assert!(!tile.finishes_dq(), "its warps count whole heads");
    assert!(!of(48, 1602, false).0.head_parts && !of(1, 1602, true).0.head_parts);
}

/// Its parts have bits of their own: no batch may change them.
#[test]
fn a_deterministic_calls_parts_are_those_of_any_batch() {
    let of = |batch, heads: (u32, u32), seqlen| {
        let dims = Dims {
            batch,
            num_heads_q: heads.0,
            num_heads_kv: heads.1,
            ..dims(1, (seqlen, seqlen), (128, 128))
        };
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL));
        let spec = BwdSpec { deterministic: true, ..BwdSpec::of(&problem) };
        let mut tile = sm90_bwd::choose_tile(&problem, &spec);
        tile.head_parts = tile.wants_head_parts(&problem, &spec, 132);
        let schedule = tile.schedule(&problem, &spec, 132).unwrap();
        (schedule.num_head_parts, schedule.side_by_side_period)
    };
    for (heads, seqlen, expected) in
        [((24, 3), 6144, (4, 8)), ((32, 8), 8192, (1, 8)), ((32, 4), 448, (4, 2)), ((40, 8), 4224, (1, 2))]
    {
        for batch in [1, 3, 64] {
            assert_eq!(of(batch, heads, seqlen), expected, "{heads:?} S {seqlen} B {batch}");
        }
    }
}

/// Sums of dK and dV cost a tile of few steps more than idle multiprocessors do: of a batch that fills them 0.35 to 0.5 of the
/// rate without order. Short packed sequences of eight kv heads have none.
#[test]
fn a_deterministic_calls_parts_have_the_steps_that_repay_their_sums() {
    let of = |layout: (QLayout, KvLayout), heads: (u32, u32), (q, k): (u32, u32), dim, mask: &str| {
        let dims =
            Dims { batch: 4, num_heads_q: heads.0, num_heads_kv: heads.1, ..dims(1, (q, k), (dim, dim)) };
        let fwd = FwdProblem::new(layout.0, layout.1, DType::Bf16, dims).mask(mask.parse().unwrap());
        let problem = BwdProblem::new(fwd);
        let spec = BwdSpec { deterministic: true, ..BwdSpec::of(&problem) };
        let mut tile = sm90_bwd::choose_tile(&problem, &spec);
        tile.head_parts = tile.wants_head_parts(&problem, &spec, 132);
        tile.schedule(&problem, &spec, 132).unwrap().num_head_parts
    };
    let (batch, packed) = ((QLayout::Batch, KvLayout::Strided), (QLayout::Packed, KvLayout::Packed));
    assert_eq!(of(batch, (40, 8), (64, 64), 128, "b"), 1);
    assert_eq!(of(batch, (40, 8), (64, 355), 160, "b"), 1);
    assert_eq!(of(batch, (16, 1), (448, 448), 256, "b:305,0"), 8);
    assert_eq!(of(batch, (9, 3), (2239, 2239), 64, "0"), 3);
    assert_eq!(of(batch, (24, 8), (960, 960), 128, "b"), 1);
    assert_eq!(of(packed, (64, 8), (896, 896), 128, "b"), 1);
    assert_eq!(of(packed, (48, 3), (376, 376), 128, "b"), 8);
    assert_eq!(of(packed, (48, 3), (100, 100), 128, "b"), 2);
}

/// Where many key blocks begin at one of few query blocks, ordered additions make a chain of them; no batch matters to the bits,
/// which are the same either way, but as far as memory goes.
#[test]
fn sums_of_dq_are_kept_apart_where_a_chain_of_additions_is_longer_than_the_work() {
    let of = |batch, (q, k), heads, deterministic| {
        let dims = Dims { batch, num_heads_q: heads, num_heads_kv: heads, ..dims(1, (q, k), (128, 128)) };
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL));
        let spec = BwdSpec { deterministic, ..BwdSpec::of(&problem) };
        let tile = sm90_bwd::choose_tile(&problem, &spec);
        assert_eq!(tile.check(&spec), Ok(()), "{q} over {k}");
        (tile.dq_path == DqPath::Apart, tile.dq_parts(&problem), tile.dq_finish)
    };
    assert_eq!(of(8, (191, 10560), 1, true), (true, 83, DqFinish::Launch));
    assert!(!of(64, (191, 10560), 1, true).0, "512 MiB of them");
    assert_eq!(of(8, (10560, 10560), 1, true).1, 1);
    assert!(!of(8, (191, 10560), 1, false).0, "nothing has an order");
    assert!(!of(2, (60, 1200), 8, true).0, "a chain of ten");
    let spec =
        BwdSpec::of(&BwdProblem::new(FwdProblem::batch(DType::Bf16, dims(1, (191, 10560), (128, 128)))));
    let tile = sm90_bwd::Sm90BwdTile { dq_path: DqPath::Apart, ..sm90_bwd::default_tile(&spec) };
    assert!(tile.check(&spec).unwrap_err().contains("deterministic"));
    // 3.5 GB of 72 columns, which are 128 in memory.
    let of = |seqlen_q| {
        let dims =
            Dims { batch: 1, num_heads_q: 1, num_heads_kv: 1, ..dims(1, (seqlen_q, 38_400), (72, 72)) };
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims));
        let spec = BwdSpec { deterministic: true, ..BwdSpec::of(&problem) };
        let tile =
            sm90_bwd::Sm90BwdTile { dq_path: DqPath::Apart, block_n: 128, ..sm90_bwd::default_tile(&spec) };
        tile.check_room_for_dq(&problem, &spec)
    };
    let said = of(40_000).unwrap_err();
    assert!(said.contains("6144000000 bytes"), "{said}");
    assert_eq!(of(20_000), Ok(()));
}

/// A wave of ordered key blocks, groups of some heads side by side, runs as a whole: else it would wait for what has
/// yet to run.
#[test]
fn groups_of_ordered_key_blocks_run_at_a_time_and_fill_the_multiprocessors() {
    let of = |(batch, heads, kv): (u32, u32, u32), seqlen, dim| {
        let dims = Dims { batch, num_heads_q: heads, num_heads_kv: kv, ..dims(1, seqlen, (dim, dim)) };
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims));
        let spec = BwdSpec { deterministic: true, ..BwdSpec::of(&problem) };
        let mut tile = sm90_bwd::choose_tile(&problem, &spec);
        tile.head_parts = tile.wants_head_parts(&problem, &spec, 132);
        let schedule = tile.schedule(&problem, &spec, 132).unwrap();
        let wave = schedule.heads_per_l2_group * schedule.key_blocks_in_group * tile.walk.cluster();
        assert!(schedule.side_by_side_period == 1 || wave <= 132, "{wave} CTAs");
        (schedule.num_head_parts, schedule.key_blocks_in_group, schedule.heads_per_l2_group)
    };
    assert_eq!(of((3, 5, 1), (8320, 10491), 128), (5, 41, 3));
    assert_eq!(of((2, 16, 4), (5523, 5523), 256), (1, 22, 3));
    // Heads whose Q, dO and sums fill the L2 run one by one, and their kv heads want no parts.
    assert_eq!(of((1, 8, 2), (13473, 13473), 128), (1, 106, 1));
    for seqlen in [64, 577, 1024, 4096, 20000] {
        for dim in [64, 128, 192, 256] {
            of((2, 24, 3), (seqlen, seqlen), dim);
        }
    }
}

/// Two dimensions of at most 320 together have registers for dK and dV of 64 keys.
#[test]
fn head_dimensions_to_160_have_the_tile_of_192_with_a_v_of_128() {
    for (qk, v, halves) in
        [(136, 136, true), (160, 160, true), (192, 128, true), (168, 168, false), (96, 160, false)]
    {
        let spec =
            BwdSpec::of(&BwdProblem::new(FwdProblem::batch(DType::Bf16, dims(1, (512, 512), (qk, v)))));
        let tile = sm90_bwd::default_tile(&spec);
        assert_eq!(tile.walk == BwdWalk::HalfBlocks, halves, "{qk} and {v}");
        assert_eq!(tile.check(&spec), Ok(()), "{qk} and {v}");
        assert!(tile.smem_bytes(&spec) <= 227 * 1024, "{qk} and {v}");
    }
}

/// Beyond, at 192, two CTAs of a cluster whose consumers have dK or dV each: what that walk cannot do is refused by its field.
#[test]
fn a_gradient_each_is_for_192_and_holds_two_blocks_of_everything() {
    let spec_of = |dim, deterministic| {
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims(1, (512, 512), (dim, dim))));
        BwdSpec { deterministic, ..BwdSpec::of(&problem) }
    };
    for (dim, is_chosen) in [(128, false), (160, false), (168, true), (192, true), (200, false)] {
        let tile = sm90_bwd::default_tile(&spec_of(dim, false));
        assert_eq!(tile.walk == BwdWalk::GradientEach, is_chosen, "{dim}");
    }
    let spec = spec_of(192, false);
    let tile = sm90_bwd::default_tile(&spec);
    for (changed, said) in [
        (sm90_bwd::Sm90BwdTile { stages_ds: 1, ..tile }, "stages_ds 1: walk gradient_each"),
        (sm90_bwd::Sm90BwdTile { stages_dout: 1, ..tile }, "stages_dout 1: walk gradient_each"),
        (sm90_bwd::Sm90BwdTile { edges_apart: true, ..tile }, "edges_apart true: walk gradient_each"),
        (sm90_bwd::Sm90BwdTile { block_m: 96, load_registers: 32, ..tile }, "block_m 96 is not 64"),
    ] {
        let refusal = changed.check(&spec).unwrap_err();
        assert!(refusal.contains(said), "{refusal}");
    }
    let wide = spec_of(256, false);
    assert!(
        tile.check(&wide).unwrap_err().contains("walk gradient_each: not for a padded head dimension of 256")
    );
    let ordered = spec_of(192, true);
    let apart = sm90_bwd::Sm90BwdTile { dq_path: DqPath::Apart, ..sm90_bwd::default_tile(&ordered) };
    assert_eq!(apart.check(&ordered), Ok(()));
    for walk in [BwdWalk::SplitDims, BwdWalk::SplitEarly] {
        let turned = sm90_bwd::Sm90BwdTile { walk, block_m: 96, stages_ds: 1, load_registers: 32, ..apart };
        let ordered_tile = sm90_bwd::Sm90BwdTile { dq_path: DqPath::Registers, ..turned };
        assert_eq!(ordered_tile.check(&ordered), Ok(()), "{walk:?}");
        assert!(turned.check(&ordered).unwrap_err().contains("dq_path apart: not with walk split_"));
    }
    // In an order the store warp adds, for which P of all blocks have one place.
    let default = sm90_bwd::default_tile(&ordered);
    assert!(!default.persistent && default.dq_path == DqPath::StoreWarp);
    assert!(default.smem_bytes(&ordered) <= 227 * 1024);
    assert!(tile.check(&ordered).unwrap_err().contains("persistent true: without a mask"));
}

/// A row of the forward's `measured.tsv`.
struct MeasuredFwd {
    run: String,
    shape: String,
    problem: FwdProblem,
    /// What was set, as `field=value`.
    set: String,
    micros: f64,
}

fn measured_fwd(run: &str) -> Vec<MeasuredFwd> {
    let text = include_str!("../src/sm90/measured.tsv");
    let row = |line: &str| {
        let columns: Vec<&str> = line.split('\t').collect();
        let &[run, device, made, batch, heads, seqlens, head_dims, mask, set, micros] = columns.as_slice()
        else {
            panic!("ten columns: {line}")
        };
        let pair = |text: &str| {
            let (a, b) = text.split_once('/').unwrap();
            (a.parse::<u32>().unwrap(), b.parse::<u32>().unwrap())
        };
        let ((num_heads_q, num_heads_kv), (head_dim_qk, head_dim_v)) = (pair(heads), pair(head_dims));
        let (seqlen_q, seqlen_k) = pair(seqlens);
        let batch = batch.parse().unwrap();
        let dims = Dims { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v };
        assert!((device, made.len()) == ("H200", 10), "{line}");
        let mask = match mask {
            "causal" => MaskSpec::CAUSAL,
            "full" => MaskSpec::NONE,
            other => panic!("mask {other}: {line}"),
        };
        MeasuredFwd {
            run: run.to_owned(),
            shape: columns[3..8].join(" "),
            problem: if run.ends_with("_fp8") {
                FwdProblem::batch(DType::E4m3Fn, dims).dtype_o(DType::Bf16).mask(mask)
            } else {
                FwdProblem::batch(DType::Bf16, dims).mask(mask)
            },
            set: set.to_owned(),
            micros: micros.parse().unwrap(),
        }
    };
    let rows = text.lines().filter(|line| !line.starts_with('#')).map(row);
    rows.filter(|row| row.run == run).collect()
}

/// What the rows of one shape took with `set`.
fn micros_with(rows: &[MeasuredFwd], shape: &str, set: &str) -> f64 {
    rows.iter().find(|row| row.shape == shape && row.set == set).map(|row| row.micros).unwrap()
}

/// Never worse than tiles as they come, and the better of the two wherever the model is right: it misses that 256 tiles of at
/// most four blocks lose to what they claim from the counter.
#[test]
fn the_order_of_hopper_s_tiles_is_the_better_one_of_those_measured() {
    let rows = measured_fwd("order");
    let (mut fixed, mut missed) = (0, Vec::new());
    for row in rows.iter().filter(|row| row.set == "order=dynamic") {
        let tile = sm90::choose_tile(&row.problem);
        let orders = tile.orders(&row.problem, 132);
        let chosen = orders.cheapest(sm90::LEAST_GAIN_OF_ORDER).map_or(tile.order, |best| best.choice);
        let with = |order: &str| micros_with(&rows, &row.shape, order);
        let (dynamic, of_static) = (with("order=dynamic"), with("order=static"));
        let micros = if chosen == TileOrder::Static { of_static } else { dynamic };
        fixed += i32::from(chosen == TileOrder::Static);
        assert!(micros <= 1.01 * dynamic, "{}: {chosen:?} {micros}, tiles as they come {dynamic}", row.shape);
        if micros > 1.01 * of_static {
            missed.push(&*row.shape);
        }
        // Of what the model is asked: how the two compare.
        if let [as_they_come, in_turn] = orders.iter().collect::<Vec<_>>()[..] {
            let (modelled, measured) = (in_turn.micros / as_they_come.micros, of_static / dynamic);
            assert!(
                (modelled / measured - 1.0).abs() < 0.16,
                "{}: {modelled}, measured {measured}",
                row.shape
            );
            assert!((as_they_come.micros / dynamic - 1.0).abs() < 0.16, "{}: {orders:?}", row.shape);
        }
    }
    assert_eq!((fixed, missed), (7, vec!["4 16/16 512/512 128/128 causal"]));
}

/// Never slower than the table's, and the fastest of those measured but where the gain is less than the model asks for.
#[test]
fn the_shape_of_hopper_s_tiles_is_the_better_one_of_those_measured() {
    the_shapes_of_a_run_are_the_better_ones("shape", 7, &["3 3/3 1137/1137 128/128 causal"]);
    // A walk whose V is prepared in the workspace has the table's; 128 rows take 27.0 us and 64 28.4.
    let missed = ["1 8/4 2048/2048 64/64 causal", "1 2/1 3000/3000 96/96 full"];
    the_shapes_of_a_run_are_the_better_ones("shape_fp8", 18, &missed);
}

fn the_shapes_of_a_run_are_the_better_ones(run: &str, num_others: i32, missed_of_run: &[&str]) {
    let rows = measured_fwd(run);
    let (mut others, mut missed) = (0, Vec::new());
    for (at, row) in rows.iter().enumerate() {
        if at > 0 && rows[at - 1].shape == row.shape {
            continue;
        }
        let tile = sm90::choose_tile(&row.problem);
        let own = (tile.block_m, tile.block_n);
        let shapes = tile.shapes(&row.problem, 132);
        let chosen = shapes.cheapest(sm90::LEAST_GAIN_OF_SHAPE).map_or(own, |best| best.choice);
        let with =
            |(rows_of, keys)| micros_with(&rows, &row.shape, &format!("block_m={rows_of},block_n={keys}"));
        assert!(with(chosen) <= 1.01 * with(own), "{}: {chosen:?}, the table's {own:?}", row.shape);
        let least = rows.iter().filter(|other| other.shape == row.shape).map(|other| other.micros);
        if with(chosen) > 1.01 * least.fold(f64::INFINITY, f64::min) {
            missed.push(&*row.shape);
        }
        others += i32::from(chosen != own);
    }
    assert_eq!((others, &*missed), (num_others, missed_of_run), "{run}");
}

/// Of FP8 too, whose calls were timed with their launch.
#[test]
fn the_order_of_fp8_s_tiles_is_the_better_one_of_those_measured() {
    let rows = measured_fwd("order_fp8");
    let mut fixed = 0;
    for row in rows.iter().filter(|row| row.set == "order=dynamic") {
        let tile = sm90::choose_tile(&row.problem);
        let orders = tile.orders(&row.problem, 132);
        let chosen = orders.cheapest(sm90::LEAST_GAIN_OF_ORDER).map_or(tile.order, |best| best.choice);
        fixed += i32::from(chosen == TileOrder::Static);
        let of_static = micros_with(&rows, &row.shape, "order=static");
        let micros = if chosen == TileOrder::Static { of_static } else { row.micros };
        let least = of_static.min(row.micros);
        assert!(micros <= 1.01 * least, "{}: {chosen:?} {micros}, the better {least}", row.shape);
    }
    assert_eq!(fixed, 3);
}

/// Packed, paged and windowed calls have the table's shape, and many tiles.
#[test]
fn the_model_leaves_the_shape_to_the_table_where_it_knows_no_lengths() {
    let of = |seqlen, layout: (QLayout, KvLayout), mask: &str| {
        let dims =
            Dims { batch: 1, num_heads_q: 2, num_heads_kv: 2, ..dims(1, (seqlen, seqlen), (128, 128)) };
        let problem = FwdProblem::new(layout.0, layout.1, DType::Bf16, dims).mask(mask.parse().unwrap());
        sm90::choose_tile(&problem).shapes(&problem, 132).iter().count()
    };
    let batch = (QLayout::Batch, KvLayout::Strided);
    assert_eq!(of(1500, batch, "b"), 2);
    assert_eq!(of(1500, batch, "0"), 5);
    assert_eq!(of(1500, (QLayout::Packed, KvLayout::Packed), "b"), 0);
    assert_eq!(of(1500, batch, "b:128,0"), 0);
    assert_eq!(of(65536, batch, "0"), 0, "clusters");
    let own_lengths = FwdProblem::batch(DType::Bf16, dims(1, (1500, 1500), (128, 128)));
    for problem in [own_lengths.clone().seqused_q(true), own_lengths.seqused_k(true)] {
        assert_eq!(sm90::choose_tile(&problem).shapes(&problem, 132).iter().count(), 0);
    }
}

/// A window that is longer than every sequence is a causal mask.
#[test]
fn a_window_that_hides_nothing_has_no_lower_bound() {
    for (mask, seqlens, kind) in [
        ("b:465,0", (466, 466), MaskKind::Upper),
        ("b:464,0", (466, 466), MaskKind::Band),
        ("b:465,0", (100, 466), MaskKind::Upper),
        ("t:99,0", (100, 466), MaskKind::Upper),
        ("t:98,0", (100, 466), MaskKind::Band),
        ("b:465,-1", (466, 466), MaskKind::Band),
    ] {
        let problem = FwdProblem::batch(DType::F16, dims(1, seqlens, (128, 128))).mask(mask.parse().unwrap());
        assert_eq!(sm90::spec_of(&problem).mask, kind, "{mask} {seqlens:?}");
    }
}

/// Packed, paged and windowed calls, unmasked ones and those of many tiles have the table's order.
#[test]
fn the_model_leaves_the_order_to_the_table_where_it_knows_no_lengths() {
    let of = |seqlen, layout: (QLayout, KvLayout), mask: &str| {
        let dims =
            Dims { batch: 1, num_heads_q: 32, num_heads_kv: 8, ..dims(1, (seqlen, seqlen), (128, 128)) };
        let problem = FwdProblem::new(layout.0, layout.1, DType::Bf16, dims).mask(mask.parse().unwrap());
        sm90::choose_tile(&problem).orders(&problem, 132).iter().count()
    };
    let batch = (QLayout::Batch, KvLayout::Strided);
    assert_eq!(of(1500, batch, "b"), 2);
    assert_eq!(of(1500, (QLayout::Packed, KvLayout::Packed), "b"), 0);
    assert_eq!(of(1500, batch, "0"), 0);
    assert_eq!(of(1500, batch, "b:128,0"), 0);
    assert_eq!(of(512, batch, "b"), 0, "each worker has one tile");
    assert_eq!(of(8192, batch, "b"), 0, "fifteen rounds");
}

/// The tables' backward rows, 16k tokens: what was chosen by thresholds of the length before there were prices.
#[test]
fn the_ways_of_dq_of_the_tables_shapes_are_those_that_were_measured() {
    let (first, zeros) = (DqPath::FirstStores, DqPath::StoreWarp);
    let (launch, beside, with_delta) = (DqFinish::Launch, DqFinish::Beside, DqFinish::BesideWithDelta);
    // From which length on; to the next row's.
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
    // Of little work the end of a finish beside the products is the most, and preprocess has all heads anyway; and the first
    // store at a block is waited for longer than zeros take: B4 H32 S320 D64 59.9 us and 55.7, B1 H5/1 S951 55.7 and 48.9.
    for seqlen in [40, 200, 1000] {
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims(1, (seqlen, seqlen), (64, 64))));
        let tile = sm90_bwd::choose_tile(&problem, &BwdSpec::of(&problem));
        assert_eq!((tile.dq_path, tile.dq_finish), (zeros, launch), "2 heads, S {seqlen}");
    }
    // Many queries over few keys, whose first stores come in a row: 4423 over 192 D 128 357 us and 319, 24025 over 192 D 64 977
    // and 906, 1024 over 256 D 128 177 and 166.
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

/// Rows of docs/kernels/sm80.md, causal, 16384 tokens of 2048 elements on an H200.
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
