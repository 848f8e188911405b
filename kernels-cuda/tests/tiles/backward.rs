//! Tests of fields that Hopper's backward tile supports, and of fields that it refuses.

use fmha_core::source::includes;
use fmha_core::spec::BwdSpec;
use fmha_core::{BwdProblem, DType, FwdProblem, KvLayout, MaskKind, MaskSpec, QLayout};
use fmha_kernels_cuda::sm90_bwd;
use fmha_kernels_cuda::sm90_bwd::{BwdWalk, DqPath};

use super::dims;

/// A measured tile is forgotten when the text of one of these headers changes.
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

/// The host counts the bytes of the barriers in shared memory.
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

/// Without a mask every key block of a group waits for another block of the group, so all of them must run at once.
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

/// A block of 80 queries did not compile with dropout, which decides on 32 queries at a time.
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

/// Long sequences without a mask use larger blocks, if there is no modifier and additions to dQ have no order.
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

/// If both head dimensions are at most 320 together, registers hold dK and dV of 64 keys.
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

/// At head dimension 192 and beyond, two CTAs of a cluster have consumers for dK or for dV. Fields that this loop does
/// not support are refused.
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
        (sm90_bwd::Sm90BwdTile { block_m: 96, ..tile }, "block_m 96 is not 64"),
        (sm90_bwd::Sm90BwdTile { load_registers: 32, ..tile }, "load_registers 32 is not 24 or 40"),
        (sm90_bwd::Sm90BwdTile { walk: BwdWalk::SplitDims, ..tile }, "walk split_dims: not for a padded"),
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
    // The store warp adds in order, which requires that P of all blocks share one buffer.
    let default = sm90_bwd::default_tile(&ordered);
    assert!(!default.persistent && default.dq_path == DqPath::StoreWarp);
    assert!(default.smem_bytes(&ordered) <= 227 * 1024);
    assert!(tile.check(&ordered).unwrap_err().contains("persistent true: without a mask"));
}

/// Clusters at head dimension 256 have 128 keys. Short sequences whose second CTA would have no keys take one
/// CTA for every 64 keys.
#[test]
fn clusters_of_which_half_would_be_idle_are_none() {
    let walk = |problem: FwdProblem, deterministic| {
        let problem = BwdProblem::new(problem);
        let spec = BwdSpec { deterministic, ..BwdSpec::of(&problem) };
        sm90_bwd::choose_tile(&problem, &spec).walk
    };
    let of = |keys, is_packed: bool, deterministic| {
        let mut problem = FwdProblem::batch(DType::Bf16, dims(1, (300, keys), (256, 256)));
        if is_packed {
            (problem.layout.q, problem.layout.kv) = (QLayout::Packed, KvLayout::Packed);
        }
        walk(problem, deterministic)
    };
    for (keys, splits) in [
        (1, true),
        (64, true),
        (65, false),
        (128, false),
        (129, true),
        (320, true),
        (321, false),
        (449, false),
    ] {
        assert_eq!(of(keys, false, false) == BwdWalk::SplitDims, splits, "{keys} keys");
        assert_eq!(of(keys, false, true), BwdWalk::InClusters, "{keys} keys, deterministic");
    }
    for (keys, splits) in [(65, true), (128, true), (256, true), (257, false), (320, false)] {
        assert_eq!(
            of(keys, true, false) == BwdWalk::SplitDims,
            splits,
            "{keys} keys of the longest sequence"
        );
    }
}
