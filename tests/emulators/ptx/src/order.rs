//! Which cluster runs next, and for how long: an order that a device could have.

use std::collections::VecDeque;

use crate::exec::Cluster;

/// Warp instructions after which a spinning cluster makes room for another.
const BUDGET: u64 = 200_000;

/// Most warp instructions of one cluster in a drawn order: some tens of a persistent kernel's tiles' steps.
const LARGEST_PIECE: u64 = 20_000;

/// Cluster to run next.
pub(crate) enum Next {
    /// A cluster, by its index, from its start.
    Fresh(u32),
    /// Cluster that made room before.
    Resumed(Box<Cluster>),
}

/// Clusters that have not begun, those that made room, and the numbers that choose the next one.
#[derive(Default)]
pub(crate) struct Order {
    waiting: VecDeque<Box<Cluster>>,
    begun: u32,
    count: u32,
    /// State of the numbers that decide; `None`: first come, first served.
    drawn: Option<u64>,
}

impl Order {
    /// Order of `count` clusters; with a seed, clusters run piece by piece in an order that it decides.
    pub(crate) fn new(count: u32, seed: Option<u64>) -> Self {
        Self { count, drawn: seed, ..Self::default() }
    }

    /// A number below `end`; 0 where no order is drawn. SplitMix64 (Steele, Lea and Flood, 2014).
    fn below(&mut self, end: u64) -> u64 {
        let Some(state) = &mut self.drawn else { return 0 };
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end.max(1)
    }

    /// The next cluster and the warp instructions it may execute; `None`: no other is waiting.
    pub(crate) fn next(&mut self) -> Option<(Next, u64)> {
        let fresh = u64::from(self.begun < self.count);
        let candidates = fresh + self.waiting.len() as u64;
        if candidates == 0 {
            return None;
        }
        let budget = if self.drawn.is_some() { 1 + self.below(LARGEST_PIECE) } else { BUDGET };
        let at = self.below(candidates);
        if at < fresh {
            self.begun += 1;
            return Some((Next::Fresh(self.begun - 1), budget));
        }
        let cluster = self.waiting.remove((at - fresh) as usize)?;
        Some((Next::Resumed(cluster), budget))
    }

    /// Takes back a cluster that made room.
    pub(crate) fn put(&mut self, cluster: Box<Cluster>) {
        self.waiting.push_back(cluster);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starts(seed: Option<u64>) -> Vec<u64> {
        let mut order = Order::new(20, seed);
        std::iter::from_fn(|| order.next()).map(|(_, budget)| budget).collect()
    }

    #[test]
    fn equal_seeds_give_equal_orders_and_others_do_not() {
        assert_eq!(starts(Some(7)), starts(Some(7)));
        assert_ne!(starts(Some(7)), starts(Some(8)));
        assert_eq!(starts(Some(7)).len(), 20);
        assert_eq!(starts(None), vec![BUDGET; 20]);
    }
}
