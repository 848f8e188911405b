//! Tests of the kernel chosen for few queries, and of the way in which it reads their keys, against measured times.

use std::collections::BTreeMap;

use fmha_kernels_cuda::split::measured::{ROOM, Row, rows};
use fmha_kernels_cuda::split::price::{CONSTANTS, micros};

/// Measured ways of each call, with their prices.
fn calls() -> BTreeMap<String, Vec<(f64, Row)>> {
    let mut calls: BTreeMap<String, Vec<(f64, Row)>> = BTreeMap::new();
    for row in rows().unwrap() {
        // A measured way that tiles no longer support is skipped.
        let Some(walk) = row.walk(&CONSTANTS) else { continue };
        let price = micros(&row.call.problem, &walk, ROOM.num_sms);
        calls.entry(format!("{} {}", row.run, row.call.name)).or_default().push((price, row));
    }
    calls
}

/// The cheapest of the timed ways is nearly the fastest, for each call and in the mean of all.
#[test]
fn the_cheapest_way_of_a_measured_call_is_nearly_the_fastest() {
    let calls = calls();
    let (count, of_all) = (calls.len(), calls.values().map(Vec::len).sum::<usize>());
    assert!(count >= 400 && of_all >= 5 * count, "{of_all} ways of {count} calls were measured");
    let lost = calls.iter().map(|(name, ways)| {
        let fastest = ways.iter().map(|(_, row)| row.micros).fold(f64::INFINITY, f64::min);
        let cheapest = ways.iter().min_by(|(a, _), (b, _)| a.total_cmp(b)).unwrap();
        let (price, Row { kernel, keys, micros, .. }) = cheapest;
        assert!(
            *micros <= 1.4 * fastest,
            "{name}: {kernel} {keys} took {micros} us, priced {price:.1}, the fastest {fastest}"
        );
        (micros / fastest).ln()
    });
    let lost = (lost.sum::<f64>() / calls.len() as f64).exp();
    assert!(lost <= 1.035, "choices take {lost:.3} times the fastest");
}
