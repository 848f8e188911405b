//! Tests of the tiles of FP8's forward, and of V that is prepared for it.

use fmha_core::spec::FwdSpec;
use fmha_core::{DType, Dims, FwdProblem, KvLayout, Shape, Strides, VLayout};
use fmha_kernels_cuda::sm90;
use fmha_kernels_cuda::sm90::{PrepareV, PreparedValues};

use super::{HEAD_DIMS, LENGTHS, RATIOS, dims};

/// Problems of FP8, with V in FP8 or f16, and in both layouts.
fn problems_of_fp8() -> impl Iterator<Item = FwdProblem> {
    let sizes = RATIOS
        .into_iter()
        .flat_map(|ratio| LENGTHS.map(|lengths| HEAD_DIMS.map(|head_dims| dims(ratio, lengths, head_dims))))
        .flatten()
        // Rows of K and V are a multiple of 16 bytes, also of a column-major V.
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
        let is_packed = problem.layout.kv == KvLayout::Packed;
        if is_packed && problem.layout.v == VLayout::ColMajor {
            let refusal = sm90::accepts(&problem).unwrap_err();
            assert!(refusal.reason.contains("v_layout col-major with packed keys"), "{refusal:?}");
            continue;
        }
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

/// The choice depends on the query rows of a kv head's query heads together, and on the size of V's workspace.
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
    // A sequence's prepared V takes 2 MiB: two kv heads, 4096 keys, 128 dimensions, 2 bytes.
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

/// Size of the prepared V in a plan for two sequences of two kv heads.
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
        // There are 8 blocks of 128 for 1000 keys, each of 8 units of sixteen keys.
        let expected = (8, 4, heads_per_group, 4 * 8 * 8);
        let found = (values.num_blocks, values.num_heads, values.heads_per_group, values.num_units);
        assert_eq!(found, expected, "{prepare_v:?}");
        assert_eq!(values.grid(), 4 * 8 * 8 / 8);
        assert_eq!(values.counts_bytes(&tile), counts);
        assert_eq!(values.blocks_bytes(&spec, &tile), 4 * 8 * 128 * 128 * 2);
    }
    // Without keys there are no units, but the tensor map needs an address.
    let empty = of_fp8((4096, 0), 1, 1);
    let tile = sm90::Sm90Tile { prepare_v: PrepareV::Before, ..sm90::choose_tile(&empty) };
    let values = PreparedValues::new(&empty, &tile, &tile.schedule(&empty).unwrap(), 132).unwrap();
    assert_eq!((values.num_units, values.grid()), (0, 1));
    assert!(values.blocks_bytes(&FwdSpec::of(&empty), &tile) > 0);
}

#[test]
fn more_units_of_v_than_an_index_holds_are_refused_with_the_fields_that_make_them() {
    // The call has 2^13 sequences, each of two kv heads with 2^13 blocks of eight units.
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
