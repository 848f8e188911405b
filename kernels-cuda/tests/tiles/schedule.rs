//! Tests of the number of tiles in a schedule.

use fmha_core::{DType, Dims, FwdProblem};
use fmha_kernels_cuda::schedule::{MAX_TILES, TileOrder};
use fmha_kernels_cuda::sm90;

use super::{dims, problems};

/// A tile counter must be cleared in each run, which takes an eighth of the time for queuing the call.
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

/// A head has one row block, so there are as many tiles as heads times sequences.
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
