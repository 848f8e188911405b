//! Decides by a simulation whether a workgroup has one tile or several. A model, never measured. With one tile
//! each, a die's dispatcher gives the next workgroup to the place that becomes free first. With several, tiles have
//! a fixed stride, in every second round in reverse order. The order that ends first is taken; the stride must be
//! faster by [`WORTH_PERCENT`].

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::ops::Range;

use fmha_core::{FwdProblem, KvLayout, QLayout};

use crate::cdna::TileOrder;

/// Time of a step of the main loop in the model's unit, about half a microsecond on an MI300X at D 128.
const STEP: u64 = 4;
/// Time of a tile in addition to its steps: first loads, half a step of products before the loop and half after it, and
/// storing O. Assumed.
const AROUND: u64 = 8;
/// Time from a workgroup's last instruction to the first instruction of its successor. Assumed.
const LAUNCH: u64 = 1;
/// Gain in per cent that the stride needs, since a dispatcher adapts to what the model leaves out: clocks, other
/// programs on the device, memory delays.
const WORTH_PERCENT: u64 = 2;
/// Most rounds that are simulated; more rounds give the same result.
const MOST_ROUNDS: u64 = 64;

/// Reason for the chosen order of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    Asked,
    /// All tiles fit the device at once.
    OneRound,
    /// Only the device knows the lengths.
    UnknownLengths,
    /// Only the device reads the masks.
    MasksAsData,
    /// The model was used; the numbers are quarter steps until the last tile ends.
    Modelled {
        single: u64,
        strided: u64,
    },
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asked => write!(f, "asked for"),
            Self::OneRound => write!(f, "all fit the device at once"),
            Self::UnknownLengths => {
                write!(f, "lengths are read on the device: its dispatcher evens out what a stride would not")
            }
            Self::MasksAsData => {
                write!(
                    f,
                    "masks as data are read on the device: its dispatcher evens out what a stride would not"
                )
            }
            Self::Modelled { single, strided } => {
                let steps = |quarters: u64| quarters as f64 / STEP as f64;
                write!(
                    f,
                    "modelled, in steps: {} with a tile a workgroup, {} with a stride",
                    steps(*single),
                    steps(*strided)
                )
            }
        }
    }
}

/// The tiles of a launch: `block_m` queries of a head each, beginning with a head's last queries.
pub(crate) struct Tiles<'a> {
    pub(crate) problem: &'a FwdProblem,
    pub(crate) block_m: i32,
    pub(crate) block_n: i32,
    pub(crate) num: u64,
}

impl Tiles<'_> {
    /// Number of main loop steps of a tile, counted like `TileWalk` in `cdna/main_loop.h`.
    fn steps(&self, at: u64) -> u64 {
        let dims = self.problem.dims;
        let (block_m, block_n) = (self.block_m.unsigned_abs(), self.block_n.unsigned_abs());
        let m_blocks = dims.seqlen_q.div_ceil(block_m);
        let m_block = m_blocks - 1 - (at % u64::from(m_blocks)) as u32;
        let rows = m_block * block_m..dims.seqlen_q.min((m_block + 1).saturating_mul(block_m));
        let band = self.problem.mask.band(dims.seqlen_q, dims.seqlen_k);
        let keys = band.k_range(rows.clone(), dims.seqlen_k);
        let sink_tiles = band.sink_range(rows, dims.seqlen_k).end.div_ceil(block_n);
        let first = (keys.start / block_n).max(sink_tiles);
        let end = if keys.is_empty() { 0 } else { keys.end.div_ceil(block_n) };
        u64::from(sink_tiles + end.saturating_sub(first))
    }

    fn cost(&self, at: u64) -> u64 {
        STEP * self.steps(at) + AROUND
    }

    /// The order for a device of `num_dies` dies with room for `places` workgroups, and why.
    pub(crate) fn order(&self, num_dies: u64, places: u64) -> (TileOrder, Why) {
        if self.num <= places {
            return (TileOrder::Single, Why::OneRound);
        }
        let lengths_on_device = self.problem.layout.q == QLayout::Packed
            || self.problem.layout.kv != KvLayout::Strided
            || self.problem.layout.seqused_q
            || self.problem.layout.seqused_k;
        if lengths_on_device {
            return (TileOrder::Single, Why::UnknownLengths);
        }
        let num = self.num.min(MOST_ROUNDS * places);
        let places = (places / num_dies).max(1);
        let (mut single, mut strided) = (0, 0);
        for die in 0..num_dies {
            let run = num * die / num_dies..num * (die + 1) / num_dies;
            single = single.max(self.dispatched(run.clone(), places, LAUNCH));
            strided = strided.max(self.strided(run, places));
        }
        let wins = strided * 100 <= single * (100 - WORTH_PERCENT);
        (if wins { TileOrder::Static } else { TileOrder::Single }, Why::Modelled { single, strided })
    }

    /// Time at which the last tile of a die's run ends if each tile goes to the place that is free first; `between` is
    /// the time between two tiles.
    fn dispatched(&self, run: Range<u64>, places: u64, between: u64) -> u64 {
        let mut free: BinaryHeap<Reverse<u64>> = (0..places).map(|_| Reverse(0)).collect();
        let mut last = 0;
        for at in run {
            let Reverse(begin) = free.pop().unwrap_or(Reverse(0));
            let end = begin + self.cost(at) + between;
            last = last.max(end);
            free.push(Reverse(end));
        }
        last
    }

    /// Time at which the last tile of a die's run ends if tiles are assigned in rounds, with every second round in
    /// reverse.
    fn strided(&self, run: Range<u64>, places: u64) -> u64 {
        let end_of = |place: u64| {
            let mut rounds = (0..).map(|round| {
                let turn = if round % 2 == 0 { place } else { places - 1 - place };
                run.start + round * places + turn
            });
            let mut end = LAUNCH;
            while let Some(at) = rounds.next().filter(|at| *at < run.end) {
                end += self.cost(at);
            }
            end
        };
        (0..places).map(end_of).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use fmha_core::{DType, Dims};

    use super::*;

    fn problem(seqlen: u32, mask: &str) -> FwdProblem {
        let dims = Dims::batch(4).seqlens(seqlen, seqlen).heads(32, 8).head_dim(128);
        let mut problem = FwdProblem::batch(DType::Bf16, dims);
        problem.mask = mask.parse().unwrap();
        problem
    }

    fn tiles(problem: &FwdProblem) -> Tiles<'_> {
        let heads = u64::from(problem.dims.batch * problem.dims.num_heads_q);
        let num = u64::from(problem.dims.seqlen_q.div_ceil(256)) * heads;
        Tiles { problem, block_m: 256, block_n: 64, num }
    }

    #[test]
    fn steps_are_those_of_the_tiles_that_the_mask_lets_a_block_see() {
        let steps = |mask: &str| {
            let problem = problem(1024, mask);
            (0..4).map(|at| tiles(&problem).steps(at)).collect::<Vec<_>>()
        };
        assert_eq!(steps("0"), [16, 16, 16, 16]);
        assert_eq!(steps("b"), [16, 12, 8, 4]);
        // A window of 128 keys before the diagonal adds two tiles to the four on the diagonal.
        assert_eq!(steps("t:128,0"), [6, 6, 6, 4]);
        assert_eq!(steps("t:128,0,64"), [7, 7, 7, 4]);
    }

    #[test]
    fn a_strided_place_with_a_long_tile_gets_a_short_one_next() {
        // With two rounds of one head's tiles, each place has one long and one short tile of equal sum.
        let problem = problem(1024, "b");
        let ends = tiles(&problem).strided(0..4, 2);
        assert_eq!(ends, LAUNCH + 2 * AROUND + STEP * (16 + 4));
    }

    #[test]
    fn every_tile_is_dealt_out_once() {
        let problem = problem(1024, "0");
        let cost = STEP * 16 + AROUND;
        for num in 1..40 {
            let last = tiles(&problem).strided(0..num, 7);
            assert_eq!(last, LAUNCH + num.div_ceil(7) * cost);
            assert_eq!(tiles(&problem).dispatched(0..num, 7, LAUNCH), num.div_ceil(7) * (cost + LAUNCH));
        }
    }

    #[test]
    fn short_causal_rounds_are_paired_and_long_ones_left_to_the_dispatcher() {
        let order = |seqlen, mask| {
            let problem = problem(seqlen, mask).dims(Dims { num_heads_q: 64, ..problem(seqlen, mask).dims });
            tiles(&problem).order(8, 304)
        };
        assert_eq!(order(512, "b"), (TileOrder::Static, Why::Modelled { single: 82, strided: 65 }));
        assert_eq!(order(1024, "b"), (TileOrder::Static, Why::Modelled { single: 205, strided: 193 }));
        assert_eq!(order(512, "0"), (TileOrder::Single, Why::Modelled { single: 82, strided: 81 }));
        assert_eq!(order(8192, "b"), (TileOrder::Single, Why::Modelled { single: 7523, strided: 7849 }));
    }

    /// Where the stride is chosen, taking tiles from an atomic counter would not end sooner; therefore there is no
    /// counter.
    #[test]
    fn a_counter_would_end_no_sooner_wherever_the_stride_is_taken() {
        let mut taken = 0;
        for (seqlen, mask) in [512, 768, 1024, 1536, 2048, 4096, 8192]
            .into_iter()
            .flat_map(|seqlen| ["0", "b", "t:256,0", "t:1024,0", "b:300,300"].map(|mask| (seqlen, mask)))
        {
            for (num_heads_q, places) in
                [16, 40, 64, 128].into_iter().flat_map(|heads| [(heads, 256), (heads, 304)])
            {
                let problem = problem(seqlen, mask).dims(Dims { num_heads_q, ..problem(seqlen, mask).dims });
                let tiles = tiles(&problem);
                let (TileOrder::Static, Why::Modelled { strided, .. }) = tiles.order(8, places) else {
                    continue;
                };
                taken += 1;
                let run = |die: u64| tiles.num * die / 8..tiles.num * (die + 1) / 8;
                let drawn = (0..8).map(|die| LAUNCH + tiles.dispatched(run(die), places / 8, 0)).max();
                assert!(
                    Some(strided) <= drawn,
                    "{seqlen} {mask} {num_heads_q} heads: {strided}, drawn {drawn:?}"
                );
            }
        }
        assert!(taken > 5, "{taken}");
    }

    #[test]
    fn a_launch_that_fits_the_device_has_nothing_to_walk_over() {
        let problem = problem(256, "0");
        assert_eq!(tiles(&problem).order(8, 128), (TileOrder::Single, Why::OneRound));
    }

    #[test]
    fn lengths_that_are_known_on_the_device_alone_are_left_to_its_dispatcher() {
        let mut problem = problem(512, "0");
        problem.layout.seqused_k = true;
        assert_eq!(tiles(&problem).order(8, 64), (TileOrder::Single, Why::UnknownLengths));
    }
}
