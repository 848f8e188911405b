//! The order in which workgroups run, where one thread runs them.

/// Numbers below `count`: as they are counted, or in an order that a seed draws (Fisher and Yates' shuffle; numbers as
/// SplitMix64 draws them).
pub(crate) fn of(count: u64, seed: Option<u64>) -> Vec<u64> {
    let mut items: Vec<u64> = (0..count).collect();
    let Some(mut state) = seed else { return items };
    for last in (1..items.len()).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut drawn = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        drawn = (drawn ^ drawn >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        items.swap(last, ((drawn ^ drawn >> 31) % (last as u64 + 1)) as usize);
    }
    items
}

#[cfg(test)]
mod tests {
    use super::of;

    #[test]
    fn a_seed_draws_an_order_of_its_own_of_every_item() {
        let in_turn: Vec<u64> = (0..20).collect();
        assert_eq!(of(20, None), in_turn);
        let mut seen = vec![in_turn.clone()];
        for seed in 0..10 {
            let drawn = of(20, Some(seed));
            assert_eq!(drawn, of(20, Some(seed)), "seed {seed}");
            assert!(!seen.contains(&drawn), "seed {seed}: {drawn:?}");
            let mut sorted = drawn.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, in_turn, "seed {seed}");
            seen.push(drawn);
        }
        assert_eq!((of(0, Some(1)), of(1, Some(1))), (vec![], vec![0]));
    }
}
