//! One price for all ways to divide the keys of few queries: one tile per CTA, parts, or equal shares.
//!
//! A price is a time in microseconds on an H200: a launch; then the time of the multiprocessor with the most keys,
//! or that in which memory delivers all keys, whichever is longer; and the merge of parts. `rates.tsv` has the
//! constants, which `cargo run --release -p fmha-kernels-cuda --example rates` fits to `measured.tsv`.
//!
//! Latent attention, whose CTAs have a multiprocessor each, is priced in units of a block of keys (`in_waves`,
//! `PriceOfUnlike`).

use std::sync::LazyLock;

use fmha_core::{FwdProblem, KvLayout};

use super::{has_like_lengths, seen_keys};

/// How the keys of a tile of rows are divided among CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// A CTA processes all keys of a tile.
    Whole,
    /// A CTA processes this many keys of a tile.
    Parts(u32),
    /// This many CTAs process equal numbers of blocks, of one tile or several.
    Shares(u32),
}

impl Keys {
    /// The division of keys that a tile's fields `split_keys` and `shares` give.
    #[must_use]
    pub const fn of(split_keys: i32, shares: i32) -> Self {
        match (split_keys, shares) {
            (_, 1..) => Self::Shares(shares.unsigned_abs()),
            (1.., _) => Self::Parts(split_keys.unsigned_abs()),
            _ => Self::Whole,
        }
    }

    /// Finds the value by the text that [`Display`](std::fmt::Display) prints.
    #[must_use]
    pub fn parsed(words: &str) -> Option<Self> {
        let number = |name: &str| words.strip_prefix(name)?.parse().ok();
        match words {
            "whole" => Some(Self::Whole),
            _ => number("parts:").map(Self::Parts).or_else(|| number("shares:").map(Self::Shares)),
        }
    }
}

impl std::fmt::Display for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Whole => f.write_str("whole"),
            Self::Parts(keys) => write!(f, "parts:{keys}"),
            Self::Shares(count) => write!(f, "shares:{count}"),
        }
    }
}

/// Rates of one kernel, from which the time of a call is modelled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Microseconds of a launch and its first bytes.
    pub launch: f64,
    /// Bytes of K and V per microsecond for a CTA that has a multiprocessor to itself.
    pub alone: f64,
    /// Bytes of K and V per microsecond for all CTAs of a multiprocessor together.
    pub together: f64,
    /// Operations of Q K and P V per microsecond of a multiprocessor. All rows of a tile count, used or not.
    pub products: f64,
    /// Microseconds that a CTA needs to begin and end a tile.
    pub begin: f64,
    /// Microseconds in which the kernel computes where the CTAs' shares begin.
    pub scan: f64,
    /// Microseconds of a block, besides its bytes, for a CTA that has a multiprocessor to itself: a memory latency.
    pub block: f64,
    /// Microseconds in which a multiprocessor looks up a key whose block lies in several pages.
    pub gather: f64,
    /// Bytes of Q and O per microsecond of a CTA, for the rows of a tile.
    pub rows: f64,
}

impl Rates {
    /// Names of all constants, with references to them.
    fn named(&mut self, kernel: &'static str) -> impl Iterator<Item = (String, &mut f64)> {
        let Self { launch, alone, together, products, begin, scan, block, gather, rows } = self;
        [
            ("launch", launch),
            ("alone", alone),
            ("together", together),
            ("products", products),
            ("begin", begin),
            ("scan", scan),
            ("block", block),
            ("gather", gather),
            ("rows", rows),
        ]
        .into_iter()
        .map(move |(name, number)| (format!("{kernel}.{name}"), number))
    }
}

/// Constants of the time model that all kernels share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Common {
    /// Memory bandwidth, in bytes per microsecond.
    pub memory: f64,
    /// Microseconds of the second launch.
    pub merge: f64,
    /// Bytes per microsecond at which parts are written and read.
    pub parts: f64,
    /// Microseconds of each part of a row in the merge, where a warp adds parts one after another.
    pub part: f64,
    /// Microseconds of a CTA that finds no keys.
    pub empty: f64,
    /// Fraction of the longest sequence's time that remains when all other sequences are done.
    pub tail: f64,
    /// Mean number of keys of a sequence, relative to the longest, if only the device has the lengths.
    pub mean: f64,
}

/// A kernel and its tile, with the properties that a price needs.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    /// Rates of the kernel, from which the time of a call is modelled.
    pub rates: Rates,
    /// Number of tiles of rows of a sequence, over all heads.
    pub tiles: u32,
    /// Rows of a tile.
    pub rows: u32,
    /// Keys of a block.
    pub block_n: u32,
    /// Number of CTAs that a multiprocessor holds.
    pub ctas: u32,
    /// How the keys of a tile are divided among CTAs.
    pub keys: Keys,
}

/// All constants of the time model of calls with few queries.
#[derive(Clone, Debug, PartialEq)]
pub struct Constants {
    /// Constants that do not depend on the kernel.
    pub common: Common,
    /// Rates of kernel `sm80`.
    pub sm80: Rates,
    /// Rates of kernel `sm90`.
    pub sm90: Rates,
}

/// The constants that are in use.
pub static CONSTANTS: LazyLock<Constants> = LazyLock::new(|| Constants::parsed(include_str!("rates.tsv")));

impl Constants {
    /// Names of all constants, with references to them.
    pub fn named(&mut self) -> Vec<(String, &mut f64)> {
        let Self { common, sm80, sm90 } = self;
        let Common { memory, merge, parts, part, empty, tail, mean } = common;
        let of_call = [
            ("memory", memory),
            ("merge", merge),
            ("parts", parts),
            ("part", part),
            ("empty", empty),
            ("tail", tail),
            ("mean", mean),
        ];
        let named = of_call.into_iter().map(|(name, number)| (format!("call.{name}"), number));
        named.chain(sm80.named("sm80")).chain(sm90.named("sm90")).collect()
    }

    /// Parses the constants from a file of names and numbers separated by tabs; a missing number is 1.
    #[must_use]
    pub fn parsed(text: &str) -> Self {
        let one = 1.0;
        let rates = Rates {
            launch: one,
            alone: one,
            together: one,
            products: one,
            begin: one,
            scan: one,
            block: one,
            gather: one,
            rows: one,
        };
        let common =
            Common { memory: one, merge: one, parts: one, part: one, empty: one, tail: one, mean: one };
        let mut constants = Self { common, sm80: rates, sm90: rates };
        for (name, number) in constants.named() {
            let of_line = |line: &str| line.split_once('\t').filter(|(key, _)| *key == name)?.1.parse().ok();
            *number = text.lines().find_map(of_line).unwrap_or(1.0);
        }
        constants
    }
}

/// Keys of a part, in whole blocks, for each number of parts up to `most` that leaves a part fewer than all keys.
pub(crate) fn keys_of_parts(seqlen_k: u32, block_n: u32, most: u32) -> impl Iterator<Item = u32> {
    let keys_of = move |parts: u32| seqlen_k.div_ceil(parts).next_multiple_of(block_n);
    let mut keys: Vec<u32> = (2..=most).map(keys_of).filter(|&keys| keys < seqlen_k).collect();
    keys.dedup();
    keys.into_iter()
}

/// Returns the choice with the lowest price; the first of equal ones.
pub(crate) fn cheapest<T>(priced: impl Iterator<Item = (f64, T)>) -> Option<T> {
    priced.min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, way)| way)
}

/// Microseconds of a problem of few queries whose keys are divided in this way, on a device of `num_sms`
/// multiprocessors.
#[must_use]
pub fn micros(problem: &FwdProblem, walk: &Walk, num_sms: u32) -> f64 {
    micros_by(&CONSTANTS.common, problem, walk, num_sms)
}

/// Like [`micros`], but with `common` as the constants that all kernels share; `walk` has those of one kernel.
#[must_use]
pub fn micros_by(common: &Common, problem: &FwdProblem, walk: &Walk, num_sms: u32) -> f64 {
    let dims = problem.dims;
    let work = Work::new(common, problem, walk, num_sms);
    let (parts, walked) = match walk.keys {
        Keys::Whole => (1.0, if work.is_like { work.like(1.0) } else { work.unlike(common, 1.0) }),
        Keys::Parts(keys) => {
            let launched = (f64::from(dims.seqlen_k) / f64::from(keys.max(1))).ceil();
            let with_keys = work.parts_with_keys(launched, keys);
            let walked = if work.is_like { work.like(with_keys) } else { work.unlike(common, with_keys) };
            (with_keys, walked + work.tiles * (launched - with_keys).max(0.0) / work.slots() * common.empty)
        }
        Keys::Shares(count) => work.shares(f64::from(count.max(1))),
    };
    let keys = f64::from(dims.batch) * f64::from(dims.num_heads_kv) * work.mean;
    let read = keys * work.key_bytes / common.memory;
    let merged = if walk.keys == Keys::Whole {
        0.0
    } else {
        let rows = f64::from(dims.batch) * f64::from(dims.num_heads_q) * f64::from(dims.seqlen_q);
        let bytes = 2.0 * parts * rows * 4.0 * f64::from(dims.head_dim_v);
        common.merge + bytes / common.parts + parts * common.part
    };
    // Computing and reading overlap imperfectly when they take about equally long, so the two times are combined by
    // a fourth-power norm.
    let both = (walked.powi(4) + read.powi(4)).powf(0.25);
    walk.rates.launch + both + merged
}

/// Keys that the tiles of a call must process, and the rate.
struct Work {
    /// Whether all sequences have the problem's lengths.
    is_like: bool,
    /// Number of keys that the longest sequence's queries see; the next field is that of a mean sequence.
    longest: f64,
    mean: f64,
    /// Bytes of a key and its value in 16 bits: a quantised cache uses the order of the 16-bit cache.
    key_bytes: f64,
    num_sms: f64,
    ctas: f64,
    /// Number of tiles of rows of the call.
    tiles: f64,
    /// Microseconds that a CTA takes for a key if it has a multiprocessor to itself; the next field is for a full
    /// multiprocessor.
    alone: f64,
    together: f64,
    /// Microseconds that a tile needs to begin and end.
    begin: f64,
    block_n: f64,
    scan: f64,
}

impl Work {
    fn new(common: &Common, problem: &FwdProblem, walk: &Walk, num_sms: u32) -> Self {
        let (dims, rates) = (problem.dims, walk.rates);
        let is_like = has_like_lengths(problem);
        let longest = f64::from(seen_keys(problem).max(1));
        let columns = f64::from(dims.head_dim_qk + dims.head_dim_v);
        let key_bytes = 2.0 * columns;
        let is_gathered =
            matches!(problem.layout.kv, KvLayout::Paged { page_size } if page_size < walk.block_n);
        let gather = if is_gathered { rates.gather } else { 0.0 };
        let block_n = f64::from(walk.block_n);
        let rows = f64::from(walk.rows);
        let products = rows * 2.0 * columns / rates.products;
        Self {
            is_like,
            longest,
            mean: if is_like { longest } else { longest * common.mean },
            key_bytes,
            num_sms: f64::from(num_sms),
            ctas: f64::from(walk.ctas.max(1)),
            tiles: f64::from(dims.batch) * f64::from(walk.tiles),
            alone: key_bytes / rates.alone + rates.block / block_n + gather,
            together: (key_bytes / rates.together + gather).max(products),
            begin: rates.begin + rows * 2.0 * columns / rates.rows,
            block_n,
            scan: rates.scan,
        }
    }

    fn slots(&self) -> f64 {
        self.num_sms * self.ctas
    }

    /// Microseconds in which this many CTAs on a multiprocessor process one key each.
    fn key_of(&self, at_once: f64) -> f64 {
        self.alone.max(at_once * self.together)
    }

    /// Number of parts of a tile that have keys, if `launched` parts have this many keys each.
    fn parts_with_keys(&self, launched: f64, keys: u32) -> f64 {
        let of = |seen: f64| seen / f64::from(keys.max(1));
        if self.is_like { of(self.longest).ceil() } else { (of(self.mean) + 0.5).min(launched) }
    }

    /// Time of tiles in this many parts, for sequences of equal lengths: that of the multiprocessor with the most
    /// parts.
    fn like(&self, parts: f64) -> f64 {
        let busiest = (self.tiles * parts / self.num_sms).ceil();
        let (rounds, last) = ((busiest / self.ctas).floor(), busiest % self.ctas);
        let end = if last > 0.0 { self.key_of(last) } else { 0.0 };
        let begins = rounds + f64::from(last > 0.0);
        self.longest / parts * (rounds * self.key_of(self.ctas) + end) + begins * self.begin
    }

    /// Time of tiles in about this many parts, for sequences of different lengths: the longest part together with
    /// others' parts, or what remains of it after them.
    fn unlike(&self, common: &Common, parts: f64) -> f64 {
        let (longest, keys) = if parts > 1.0 {
            (self.mean / (parts - 0.5).max(0.5), self.mean / parts)
        } else {
            (self.longest, self.mean)
        };
        let longest = longest.min(self.longest);
        let items = self.tiles * parts;
        let at_once = (items / self.num_sms).ceil().min(self.ctas);
        let beside = longest * self.alone.max((1.0 + (at_once - 1.0) * keys / longest) * self.together);
        let all = items * keys / self.num_sms * (self.key_of(at_once) / at_once);
        let left = common.tail * longest * self.alone * (items / self.slots()).min(1.0);
        beside.max(all + left) + (items / self.slots()).max(1.0) * self.begin
    }

    /// Number of parts of a mean sequence's row, and the time of this many equal shares.
    fn shares(&self, count: f64) -> (f64, f64) {
        let blocks = self.tiles * (self.mean / self.block_n + 0.5);
        let keys = (blocks / count).max(1.0).ceil() * self.block_n;
        let at_once = (count / self.num_sms).min(self.ctas).max(1.0);
        let rounds = (count / self.num_sms / at_once).max(1.0);
        let begins = (1.0 + self.tiles / count) * self.begin;
        let parts = (count.min(blocks) / self.tiles).max(1.0) + 1.0;
        (parts, rounds * keys * self.key_of(at_once) + begins + self.scan)
    }
}

/// Cost of a tile besides its blocks, in units of a block: its start, the first block's latency, its results.
const TILE_COST: u64 = 4;

/// Cost of merging parts, in units of a block: it needs another launch.
const MERGE_COST: u64 = 3;

/// Cost of a part's O, written and read in f32, and of finding where a share begins, in units of a block.
const COST_OF_O: u64 = 2;
const COST_OF_SCAN: u64 = 3;

/// Price in units of a block: tiles, `units` of them before keys are split, in parts of `blocks_of_part` of their
/// `blocks` and in waves of `at_once`.
pub(crate) fn in_waves(units: u64, blocks: u64, blocks_of_part: u64, at_once: u64) -> u64 {
    let parts = blocks.div_ceil(blocks_of_part);
    let waves = units.saturating_mul(parts).div_ceil(at_once);
    let merge = if parts > 1 { MERGE_COST } else { 0 };
    waves.saturating_mul(blocks_of_part + TILE_COST) + merge
}

/// Price of a call whose sequences may be unlike, in units of a block, by the most that their lengths may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PriceOfUnlike {
    /// Tiles before keys are split.
    pub(crate) units: f64,
    /// Blocks of the longest sequence.
    pub(crate) longest: f64,
    /// CTAs that run at once.
    pub(crate) at_once: f64,
}

impl PriceOfUnlike {
    /// Blocks of a mean sequence.
    fn mean(self) -> f64 {
        self.longest * CONSTANTS.common.mean
    }

    /// Tiles in so many parts: the longest part from the beginning, or behind all others.
    fn walked(self, parts: f64) -> f64 {
        let (items, longest) = (self.units * parts, self.longest / parts);
        let all = (self.units * self.mean() + items * TILE_COST as f64) / self.at_once;
        (longest + TILE_COST as f64).max(all + longest * (items / self.at_once).min(1.0))
    }

    pub(crate) fn whole(self) -> f64 {
        self.walked(1.0)
    }

    pub(crate) fn parts(self, parts: f64) -> f64 {
        self.walked(parts) + MERGE_COST as f64
    }

    /// Equal shares: a part ends where a share or a tile does, and its O in f32 is written and read again.
    pub(crate) fn shares(self) -> f64 {
        let parts = 1.0 + self.units / self.at_once;
        let walked = (self.units * self.mean() / self.at_once).max(1.0).ceil();
        walked + parts * (TILE_COST + COST_OF_O) as f64 + (MERGE_COST + COST_OF_SCAN) as f64
    }
}
