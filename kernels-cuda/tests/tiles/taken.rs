//! Tests that kernels support their tables' tiles on every device.

use fmha_core::BwdProblem;
use fmha_core::spec::{BwdSpec, FwdSpec};
use fmha_kernels_cuda::{sm80, sm80_bwd, sm90, sm100, sm100_bwd};

use super::problems;

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
                tile.take_fixed_parts(&problem, 132);
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
            let tile = sm100::choose_tile(&problem, arch, 148);
            let refusal = tile.check(&FwdSpec::of(&problem), problem.gqa_ratio());
            assert_eq!(refusal, Ok(()), "{arch} {:?} {:?} {tile:?}", problem.dims, problem.layout.kv);
        }
    }
}

/// Shared memory and multiprocessors of an A100, an RTX 3090 and an H200.
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
            let mut rows = tile;
            let blocks = sm80::default_tile(&FwdSpec::of(&problem), room).block_n;
            invariant.make_batch_invariant(&problem, room, blocks);
            // Larger blocks that another kernel also supports.
            let shared =
                if problem.dims.head_dim_qk.max(problem.dims.head_dim_v) > 192 { blocks } else { 128 };
            let has_room = room.smem_bytes > 200_000 && problem.cache.dtype.is_none();
            rows.make_batch_invariant(&problem, room, if has_room { shared } else { blocks });
            for tile in [tile, invariant, rows] {
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
