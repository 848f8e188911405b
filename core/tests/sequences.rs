//! Tests of the rows of packed, paged and appended sequences. Wrong lengths and block tables are refused with their
//! value.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use fmha_core::seq::{KvRows, checked_spans, spans};
use fmha_core::tree::TreeMask;
use fmha_core::{
    Append, BlockTable, CacheArgs, DType, DevSlice, Dims, FwdProblem, KvLayout, QLayout, Rotary, RotaryPairs,
    SeqArgs, Totals,
};

const DIMS: Dims = Dims::batch(2).seqlens(4, 6).heads(3, 1).head_dim(8);

#[test]
fn packed_sequences_lie_one_after_another_and_so_do_their_rows_of_lse() {
    let problem = FwdProblem::group(DType::F16, DIMS);
    let (cu_q, cu_k) = ([0, 3, 7], [1, 6, 8]);
    let seq = SeqArgs::default()
        .totals(Totals::packed(9, 8))
        .cu_seqlens_q(DevSlice::host(&cu_q))
        .cu_seqlens_k(DevSlice::host(&cu_k));
    let spans = spans(&problem, &seq).unwrap();
    let places: Vec<_> = spans.iter().map(|s| (s.q_row, s.seqlen_q, s.k_row, s.seqlen_k)).collect();
    assert_eq!(places, [(0, 3, 1, 5), (3, 4, 6, 2)]);
    // LSE is laid out `[head, total_q]`.
    assert_eq!(spans[0].lse_index(&problem, 2, 1), 2 * 9 + 1);
    assert_eq!(spans[1].lse_index(&problem, 2, 1), 2 * 9 + 3 + 1);
    // Offsets have one entry too few on one side.
    for (cu_q, cu_k, name) in [(&cu_q[..2], &cu_k[..], "cu_seqlens_q"), (&cu_q, &cu_k[..2], "cu_seqlens_k")] {
        let seq = seq.cu_seqlens_q(DevSlice::host(cu_q)).cu_seqlens_k(DevSlice::host(cu_k));
        let error = fmha_core::seq::spans(&problem, &seq).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains('8'), "{error}");
    }
}

#[test]
fn rows_of_lse_have_a_batch_axis_where_queries_have_one() {
    let problem = FwdProblem::batch(DType::F16, DIMS);
    let spans = spans(&problem, &SeqArgs::default()).unwrap();
    assert_eq!(spans[1].lse_index(&problem, 2, 1), (3 + 2) * 4 + 1);
}

/// Problem of two caches in five pages of two rows, with three keys appended to each.
fn appended() -> FwdProblem {
    let problem = FwdProblem::new(QLayout::Batch, KvLayout::Paged { page_size: 2 }, DType::F16, DIMS);
    problem.clone().seqused_k(true).append(Append::batch(&problem, 3))
}

fn pages<'a>(used: &'a [i32], table: &'a [i32]) -> SeqArgs<'a> {
    SeqArgs::default()
        .totals(Totals { num_pages: Some(5), ..Totals::NONE })
        .seqused_k(DevSlice::host(used))
        .block_table(BlockTable { pages: DevSlice::host(table), max_pages: 3 })
}

#[test]
fn keys_lie_where_the_block_table_says_and_new_ones_behind_the_cached() {
    let (used, table) = ([3, 1], [4, 0, 2, 3, 1, -1]);
    let seq = pages(&used, &table);
    let spans = spans(&appended(), &seq).unwrap();
    assert_eq!(spans.iter().map(|s| (s.seqlen_cached, s.seqlen_k)).collect::<Vec<_>>(), [(3, 6), (1, 4)]);
    let rows = KvRows::of(&appended(), &seq).unwrap();
    let places: Vec<_> = (0..4).map(|j| rows.at(&spans[1], j)).collect();
    assert_eq!(places, [(3, 0), (3, 1), (1, 0), (1, 1)]);
    // A run of rows ends with a page or with the sequence's keys.
    assert_eq!((0..6).map(|j| rows.run(&spans[0], j)).collect::<Vec<_>>(), [2, 1, 2, 1, 2, 1]);
    let whole = fmha_core::SeqSpan { seqlen_k: 3, ..spans[1] };
    assert_eq!((rows.run(&whole, 2), KvRows::UNPAGED.run(&whole, 1)), (1, 2));
}

#[test]
fn packed_new_keys_lie_one_after_another() {
    let problem = appended();
    let problem = problem.clone().append(Append::packed(&problem, 3));
    let (used, table, new) = ([3, 1], [4, 0, 2, 3, 1, -1], [0, 3, 5]);
    let mut seq = pages(&used, &table);
    (seq.totals.total_new, seq.cu_seqlens_new) = (Some(5), Some(DevSlice::host(&new)));
    let spans = spans(&problem, &seq).unwrap();
    let places: Vec<_> = spans.iter().map(|s| (s.new_batch, s.new_row, s.seqlen_k)).collect();
    assert_eq!(places, [(0, 0, 6), (0, 3, 3)]);
}

#[test]
fn new_keys_that_a_packed_cache_has_no_row_for_are_left_out_or_refused() {
    let problem = FwdProblem::new(QLayout::Batch, KvLayout::Packed, DType::F16, DIMS);
    let problem = problem.clone().seqused_k(true).append(Append::batch(&problem, 3));
    let seq = |cu: &'static [i32; 3]| {
        SeqArgs::default()
            .totals(Totals { total_k: Some(10), ..Totals::NONE })
            .cu_seqlens_k(DevSlice::host(cu))
            .seqused_k(DevSlice::host(&[3, 1]))
    };
    spans(&problem, &seq(&[0, 6, 10])).unwrap();
    let error = checked_spans(&problem, &seq(&[0, 6, 9])).unwrap_err().to_string();
    assert!(error.contains("1 and 3 new rows are more than the 3 there is room for"), "{error}");
    let clamped = spans(&problem, &seq(&[0, 6, 9])).unwrap();
    assert_eq!((clamped[1].seqlen_cached, clamped[1].seqlen_k), (1, 3));
}

/// Too large lengths are clamped to the rows that exist: kernels read the lengths on a GPU, where the host does not
/// check them.
#[test]
fn lengths_beyond_their_rows_count_as_all_of_them_and_negative_ones_as_none() {
    let lengths = |problem: &FwdProblem, seq: &SeqArgs<'_>| -> Vec<(u32, u32, u32)> {
        let spans = spans(problem, seq).unwrap();
        spans.iter().map(|span| (span.seqlen_q, span.seqlen_cached, span.seqlen_k)).collect()
    };
    let refused = |problem: &FwdProblem, seq: &SeqArgs<'_>, wanted: &str| {
        let error = checked_spans(problem, seq).unwrap_err().to_string();
        assert_eq!(error, wanted);
    };
    let both = FwdProblem::batch(DType::F16, DIMS).seqused_q(true).seqused_k(true);
    let (q, k) = ([-1, 9], [7, i32::MIN]);
    let seq = SeqArgs::default().seqused_q(DevSlice::host(&q)).seqused_k(DevSlice::host(&k));
    assert_eq!(lengths(&both, &seq), [(0, 6, 6), (4, 0, 0)]);
    refused(&both, &seq, "seqused_q[0] -1 is not in 0..=4");
    // A packed sequence may be longer than the problem's `seqlen_k`.
    let packed = FwdProblem::group(DType::F16, DIMS).seqused_k(true);
    let (cu_q, cu_k, used) = ([0, 1, 2], [0, 2, 12], [3, 8]);
    let seq = SeqArgs::default()
        .totals(Totals::packed(2, 12))
        .cu_seqlens_q(DevSlice::host(&cu_q))
        .cu_seqlens_k(DevSlice::host(&cu_k))
        .seqused_k(DevSlice::host(&used));
    assert_eq!(lengths(&packed, &seq), [(1, 2, 2), (1, 6, 6)]);
    refused(&packed, &seq, "seqused_k[0] 3 is not in 0..=2");
    // Three new rows are appended, but the cache has room for one or for none.
    let table = [4, 0, 2, 3, 1, 0];
    assert_eq!(lengths(&appended(), &pages(&[5, 7], &table[..])), [(4, 5, 6), (4, 6, 6)]);
    refused(
        &appended(),
        &pages(&[5, 1], &table),
        "seqused_k[0] 5 and 3 new rows are more than the 6 there is room for",
    );
    // A pool of no pages holds no keys.
    let mut none = pages(&[5, 7], &table);
    none.totals.num_pages = Some(0);
    assert_eq!(lengths(&appended(), &none), [(4, 0, 0), (4, 0, 0)]);
}

#[test]
fn a_tree_mask_has_a_bit_for_each_query_and_each_of_the_last_keys() {
    let dims = Dims { seqlen_q: 40, seqlen_k: 43, ..DIMS };
    let problem = FwdProblem::batch(DType::F16, dims).tree_mask(true);
    let is_set = move |batch: u32, i: u32, bit: u32| (batch * 1009 + i * 31 + bit * 17) % 7 < 3;
    let word = move |batch, i, first: u32| {
        (first..40.min(first + 32)).map(|bit| u32::from(is_set(batch, i, bit)) << (bit - first)).sum()
    };
    let words: Vec<u32> =
        (0..2).flat_map(|batch| (0..40).flat_map(move |i| [word(batch, i, 0), word(batch, i, 32)])).collect();
    let cache = CacheArgs::default().tree_mask(DevSlice::host(&words));
    // Rows of the tree mask are consecutive, whether queries are packed or not.
    let packed = problem.clone().q_layout(QLayout::Packed);
    let offsets = [0, 40, 80];
    let in_a_pack = SeqArgs::default()
        .totals(Totals { total_q: Some(80), ..Totals::NONE })
        .cu_seqlens_q(DevSlice::host(&offsets));
    for (problem, seq) in [(problem, SeqArgs::default()), (packed, in_a_pack)] {
        let tree = TreeMask::of(&problem, &cache, &seq).unwrap();
        for span in spans(&problem, &seq).unwrap() {
            for (i, j) in (0..40).flat_map(|i| (0..43).map(move |j| (i, j))) {
                // Three keys lie before the last 40, which the tree mask decides on.
                let expected = j < 3 || is_set(span.i_batch, i, j - 3);
                assert_eq!(tree.visible(&span, i, j), expected, "{} {i} {j}", span.i_batch);
            }
        }
    }
}

#[test]
fn tables_and_positions_that_do_not_fit_are_refused_by_number() {
    let problem = appended();
    let refused = |problem: &FwdProblem, seq: &SeqArgs<'_>, wanted: &str| {
        let error = checked_spans(problem, seq).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    };
    let table = [4, 0, 2, 3, 1, -1];
    refused(&problem, &pages(&[3, 1], &table[..5]), "block_table has 20 bytes, but 24 are read");
    refused(&problem, &pages(&[3, 1], &[4, 0, 2, 0, 1, -1]), "2 new keys go to row 1 of page 0");
    // Pages that are only read may be shared.
    spans(&problem, &pages(&[3, 2], &[4, 0, 2, 4, 1, 3])).unwrap();
    refused(&problem, &pages(&[4, 1], &table), "seqused_k");

    let rotary = |max_pos| Rotary { dim: 8, max_pos, pairs: RotaryPairs::Half, dtype: DType::F32 };
    let turned = |max_pos| problem.clone().rotary(rotary(max_pos));
    assert_eq!(rotary(6).table_elems(), 24);
    spans(&turned(6), &pages(&[3, 1], &table)).unwrap();
    refused(&turned(5), &pages(&[3, 1], &table), "max_pos 5 is less than the 6 positions of sequence 0");
    // Positions of queries follow the cached keys, with new keys or without. Without a cache or new keys there is
    // no position.
    let none_new = turned(5).append(Append::batch(&problem, 0));
    refused(&none_new, &pages(&[5, 1], &table), "max_pos 5 is less than the 6 positions of sequence 0");
    let no_query = none_new.clone().dims(Dims { seqlen_q: 0, ..DIMS }).rotary(rotary(1));
    spans(&no_query, &pages(&[5, 1], &table)).unwrap();
    // New keys are rotated even if no query is.
    let keys_alone = |max_pos| turned(max_pos).dims(Dims { seqlen_q: 0, ..DIMS });
    spans(&keys_alone(6), &pages(&[3, 1], &table)).unwrap();
    refused(&keys_alone(5), &pages(&[3, 1], &table), "max_pos 5 is less than the 6 positions of sequence 0");
}
