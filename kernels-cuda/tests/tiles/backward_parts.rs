//! Tests of the division of heads in Hopper's backward, and of the order of its key blocks.

use fmha_core::spec::BwdSpec;
use fmha_core::{BwdProblem, DType, Dims, FwdProblem, KvLayout, MaskSpec, QLayout};
use fmha_kernels_cuda::sm90_bwd;
use fmha_kernels_cuda::sm90_bwd::{DqFinish, DqPath};

use super::{chosen, dims};

/// On 132 multiprocessors 432 equal tiles take four rounds, the last a quarter full. Divided into one, two, four and
/// eight parts they take 6827, 6053, 6091 and 5849 us on an H200.
#[test]
fn tiles_that_leave_a_round_empty_share_a_heads_query_heads() {
    let of = |batch, num_heads_kv, mask| {
        let dims = Dims { batch, num_heads_q: 24, num_heads_kv, ..dims(1, (6144, 6144), (128, 128)) };
        let fwd = FwdProblem::batch(DType::Bf16, dims).mask(mask);
        chosen(&BwdProblem::new(fwd), "parts")
    };
    assert_eq!(of(3, 3, MaskSpec::NONE), "8");
    // A tile of eight heads under a mask is half of a multiprocessor's work: 3670, 3147, 3115 and 3210 us in one, two,
    // four and eight parts.
    assert_eq!(of(3, 3, MaskSpec::CAUSAL), "4");
    assert_eq!(of(3, 24, MaskSpec::NONE), "1");
}

/// Lengths of queries and keys in FlashAttention's test suites, whose race tests require equal dK and dV of two runs
/// without `deterministic`.
const SUITES: [(u32, u32); 12] = [
    (1, 239),
    (3, 799),
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (512, 256),
    (1024, 1024),
    (1023, 1024),
    (64, 128),
    (2048, 2048),
];

#[test]
fn no_parts_of_a_call_add_to_the_same_keys_without_an_order() {
    let mut in_parts = 0;
    for (lengths, dim, heads, mask, packed) in SUITES.into_iter().flat_map(|lengths| {
        [32, 64, 96, 128, 192, 256].into_iter().flat_map(move |dim| {
            [[6, 6], [6, 2], [6, 1], [9, 1], [32, 1]].into_iter().flat_map(move |heads| {
                ["0", "b", "b:40,20"]
                    .into_iter()
                    .flat_map(move |mask| [false, true].map(|packed| (lengths, dim, heads, mask, packed)))
            })
        })
    }) {
        let [num_heads_q, num_heads_kv] = heads;
        let dims = Dims { batch: 4, num_heads_q, num_heads_kv, ..dims(1, lengths, (dim, dim)) };
        let fwd = if packed { FwdProblem::group } else { FwdProblem::batch }(DType::Bf16, dims);
        let problem = BwdProblem::new(fwd.mask(mask.parse().unwrap()).write_lse(true));
        for deterministic in [false, true] {
            let spec = BwdSpec { deterministic, ..BwdSpec::of(&problem) };
            let mut tile = sm90_bwd::choose_tile(&problem, &spec);
            tile.head_parts = tile.wants_head_parts(&problem, &spec, 132);
            if !tile.head_parts {
                continue;
            }
            in_parts += 1;
            let schedule = tile.schedule(&problem, &spec, 132).unwrap();
            let dim = u64::from(sm90_bwd::padded_dim(&spec).unsigned_abs());
            let of_tile = u64::from(tile.block_n.unsigned_abs()) * 2 * dim * size_of::<f32>() as u64;
            let of_all = u64::from(schedule.num_tiles.unsigned_abs()) * of_tile;
            // Parts that share a sum wait for each other.
            let waits = deterministic && packed;
            let bytes = tile.head_sums_bytes(&spec, &schedule);
            assert!(waits || bytes >= of_all, "{problem:?}: {bytes} bytes of sums, not {of_all}");
        }
    }
    assert!(in_parts > 500, "{in_parts} calls");
}

/// A kv head's parts are so few that the memory for their sums suffices.
#[test]
fn sums_of_parts_are_a_gibibyte_at_most() {
    for (heads, seqlen, batch) in
        [([71, 1], 4096, 8), ([64, 1], 16384, 8), ([128, 2], 8192, 4), ([32, 1], 65536, 1)]
    {
        let [num_heads_q, num_heads_kv] = heads;
        let dims = Dims { batch, num_heads_q, num_heads_kv, ..dims(1, (seqlen, seqlen), (128, 128)) };
        for fwd in [FwdProblem::group(DType::Bf16, dims), FwdProblem::batch(DType::Bf16, dims)] {
            let problem = BwdProblem::new(fwd.mask(MaskSpec::CAUSAL));
            let spec = BwdSpec::of(&problem);
            let mut tile = sm90_bwd::choose_tile(&problem, &spec);
            tile.head_parts = tile.wants_head_parts(&problem, &spec, 132);
            let bytes = tile.head_sums_bytes(&spec, &tile.schedule(&problem, &spec, 132).unwrap());
            assert!(bytes < (1 << 30) + (1 << 24), "{heads:?}, {seqlen}: {bytes}");
        }
    }
}

/// The last work of packed sequences may be the longest sequence's longest tile, with all query heads of a kv head. If
/// there are many other tiles, sums of parts cost more than they save.
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

/// There are 39 tiles, and the longest takes as long as the launch. A head's query blocks are then divided too;
/// preprocess and dQ still handle each block once.
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

/// Other parts give other bits, so the batch must not change the parts of a deterministic call.
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

/// Sums of dK and dV cost a tile of few steps more than idle multiprocessors do: a batch that fills the device runs at
/// 0.35 to 0.5 of the rate without order. So short packed sequences of eight kv heads have no parts.
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

/// Ordered additions form a chain where many key blocks begin at one of few query blocks. The bits are the same with
/// separate sums, so the batch matters only for memory.
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
    // Sums of 72 columns, stored as 128, take 3.5 GB.
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

/// A wave of ordered key blocks, in groups of heads, must run as a whole; otherwise it would wait for blocks that have
/// not started.
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
    // Heads whose Q, dO and sums fill the L2 cache run one by one, and need no parts.
    assert_eq!(of((1, 8, 2), (13473, 13473), 128), (1, 106, 1));
    for seqlen in [64, 577, 1024, 4096, 20000] {
        for dim in [64, 128, 192, 256] {
            of((2, 24, 3), (seqlen, seqlen), dim);
        }
    }
}
