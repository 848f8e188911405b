//! The modelled time of a call on Blackwell: clocks of units, waves of tiles, and constants that published rates fit.
//!
//! `published.tsv` has the rates, of FlashAttention-4 and cuDNN, and `constants.tsv` what
//! `cargo run --release -p fmha-kernels-cuda --example blackwell` fits to half of them; docs/kernels/sm100.md says how
//! far the other half lies off, and the rows of `published_later.tsv`, which test alone. A kernel of the same shape is
//! modelled by what the published ones reach of their units.

use std::sync::LazyLock;

use fmha_core::spec::FwdSpec;
use fmha_core::work::visible_pairs;
use fmha_core::{DType, FwdProblem, KvLayout, MaskKind, QLayout};

use super::units::{PAIRS, PRODUCTS, Units, forward};
use super::{Sm100Tile, default_tile, spec_of};
use crate::nvidia::DeviceFacts;
use crate::schedule::TileSchedule;
use crate::tile_list;

/// Microseconds of a launch: assumed.
const LAUNCH_MICROS: f64 = 5.0;
/// Assumed fraction of a wave in which multiprocessors idle after the last tile, where tiles differ in length.
const TAIL: f64 = 0.5;
/// Multiprocessors of a GB200's and a GB300's GPU: this number and clocks of 2062 and 2070 MHz give the stated peaks.
const NUM_SMS: f64 = 152.0;
/// Queries of the tile to which the start costs in [`Constants`] refer.
pub const START_ROWS: f64 = 256.0;

/// How a kernel overlaps its units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlap {
    /// Forward, two query tiles: one's exponentials run under the other's products.
    TwoTiles,
    /// Forward kernel with one query tile to a CTA.
    OneTile,
    /// Backward kernel.
    Backward,
}

/// Constants of the time model that were fitted to published rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// Fraction of the forward's products that nothing else hides.
    pub forward_matrix: f64,
    /// Fraction of the exponentials that two query tiles do not hide.
    pub two_tiles_exp: f64,
    /// Fraction of the exponentials that one query tile does not hide.
    pub one_tile_exp: f64,
    /// Fraction of the backward's products, or of shared memory's time if that is longer, that nothing else hides.
    pub backward_matrix: f64,
    /// Fraction of the exponentials that the backward does not hide.
    pub backward_exp: f64,
    /// Start and end of a forward's tile of 256 queries, in units of the time of a block's products.
    pub forward_start: f64,
    /// Start of a backward, with the launches before and after it, in units of the time of a block's products.
    pub backward_start: f64,
    /// Fraction by which a kernel becomes slower for each millisecond that it runs, since the clock falls.
    pub slower_a_ms: f64,
}

impl Constants {
    /// The constants by name.
    pub fn named(&mut self) -> [(&'static str, &mut f64); 8] {
        [
            ("forward.matrix", &mut self.forward_matrix),
            ("two_tiles.exp", &mut self.two_tiles_exp),
            ("one_tile.exp", &mut self.one_tile_exp),
            ("backward.matrix", &mut self.backward_matrix),
            ("backward.exp", &mut self.backward_exp),
            ("forward.start", &mut self.forward_start),
            ("backward.start", &mut self.backward_start),
            ("slower_a_ms", &mut self.slower_a_ms),
        ]
    }

    /// Constants from which a fit starts: every unit's whole time counts.
    pub const FIRST: Self = Self {
        forward_matrix: 1.0,
        two_tiles_exp: 1.0,
        one_tile_exp: 1.0,
        backward_matrix: 1.0,
        backward_exp: 1.0,
        forward_start: 1.0,
        backward_start: 1.0,
        slower_a_ms: 1e-3,
    };

    /// Reads constants from lines of a name, a tab and a number.
    ///
    /// # Errors
    /// The line that has another form, or the name that is missing.
    pub fn parsed(text: &str) -> Result<Self, String> {
        let mut constants = Self::FIRST;
        for (name, number) in constants.named() {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('\t'));
            *number = line.and_then(|line| line.parse().ok()).ok_or(format!("no number of {name}"))?;
        }
        Ok(constants)
    }
}

/// The constants of `constants.tsv`.
///
/// # Panics
/// The committed file lacks a constant, which a test would have found.
pub static CONSTANTS: LazyLock<Constants> = LazyLock::new(|| {
    #[expect(clippy::expect_used, reason = "a test reads the file")]
    Constants::parsed(include_str!("constants.tsv")).expect("constants.tsv has every constant")
});

/// Work of a launch, as the model sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Walk {
    /// How the kernel overlaps its units.
    pub overlap: Overlap,
    /// Clocks of each unit for a block of 128 queries and 128 keys.
    pub units: Units,
    /// Number of tiles of the launch.
    pub tiles: f64,
    /// Number of tiles that the device processes at a time.
    pub at_once: f64,
    /// Average number of a tile's blocks that one multiprocessor processes.
    pub blocks: f64,
    /// Relative cost of starting a tile: 1 for a tile of usual height.
    pub starts: f64,
    /// Whether all tiles are equally long: multiprocessors without a tile in the last wave then idle for a whole tile.
    pub equal: bool,
    /// Clock of the multiprocessors.
    pub hertz: f64,
}

impl Walk {
    /// Modelled seconds of the launch.
    #[must_use]
    pub fn seconds(&self, constants: &Constants) -> f64 {
        let (matrix, exp, start) = match self.overlap {
            Overlap::TwoTiles => (constants.forward_matrix, constants.two_tiles_exp, constants.forward_start),
            Overlap::OneTile => (constants.forward_matrix, constants.one_tile_exp, constants.forward_start),
            Overlap::Backward => {
                (constants.backward_matrix, constants.backward_exp, constants.backward_start)
            }
        };
        let block = matrix * self.units.matrix() + exp * self.units.exp;
        let tile = self.blocks * block + self.starts * start * self.units.tensor;
        let waves = self.tiles / self.at_once;
        let waves = if self.equal { waves.ceil() } else { (waves + TAIL).max(1.0) };
        let seconds = waves * tile / self.hertz;
        seconds * (1.0 + constants.slower_a_ms * seconds * 1e3) + LAUNCH_MICROS * 1e-6
    }
}

/// Work of a forward's launch; `None` where the model does not apply: parts of keys, lists, copies, lengths that the
/// device alone knows, or a device whose clock is not known.
#[must_use]
pub fn walk(
    problem: &FwdProblem,
    tile: &Sm100Tile,
    schedule: &TileSchedule,
    facts: &DeviceFacts,
) -> Option<Walk> {
    let whole = tile.split_keys == 0 && tile.copy_bytes == 0 && !problem.cache.tree_mask;
    if !whole || !is_modelled(problem) {
        return None;
    }
    let cluster = f64::from(tile.cluster);
    let tiles = f64::from(schedule.num_tiles.max(1));
    Some(Walk {
        overlap: if tile.num_q_tiles() == 2 { Overlap::TwoTiles } else { Overlap::OneTile },
        units: forward(&spec_of(problem), tile, &facts.arch),
        tiles,
        at_once: f64::from(facts.num_sms) / cluster,
        blocks: blocks(problem, 128.0 * cluster) / tiles / cluster,
        starts: f64::from(tile.block_m) / START_ROWS,
        equal: problem.mask.kind() == MaskKind::Full,
        hertz: hertz(facts)?,
    })
}

/// Whether the model applies to a problem: all sequences are as long as the host says, and only a band hides keys.
pub(crate) fn is_modelled(problem: &FwdProblem) -> bool {
    let layout = problem.layout;
    let known = !layout.seqused_q && !layout.seqused_k && layout.q == QLayout::Batch;
    known && layout.kv == KvLayout::Strided && !tile_list::serve(problem)
}

/// Clock of a device's multiprocessors, from its stated peak.
pub(crate) fn hertz(facts: &DeviceFacts) -> Option<f64> {
    Some(facts.roofline.flops_per_second? / f64::from(facts.num_sms) / (2.0 * PRODUCTS))
}

/// Number of blocks of 128 x 128 pairs of a call, where `rows` queries share their blocks. Blocks that a mask's edge
/// cuts count as whole.
pub(crate) fn blocks(problem: &FwdProblem, rows: f64) -> f64 {
    let dims = problem.dims;
    let heads = f64::from(dims.batch) * f64::from(dims.num_heads_q);
    let edges = match problem.mask.kind() {
        MaskKind::Full => 0.0,
        MaskKind::Upper => 1.0,
        MaskKind::Band => 2.0,
    };
    let pairs = visible_pairs(problem.mask, dims.seqlen_q, dims.seqlen_k) as f64;
    heads * (pairs + edges * f64::from(dims.seqlen_q) * rows / 2.0) / PAIRS
}

/// A plan's details: the clocks of a tile's units, and where the model holds, the time.
pub(crate) fn details(units: &Units, walk: Option<Walk>, flops: f64) -> Vec<(&'static str, String)> {
    let mut details = vec![("units", units.words())];
    if let Some(walk) = walk {
        let seconds = walk.seconds(&CONSTANTS);
        let rate = flops / seconds / 1e12;
        let words = format!("{:.1} us, {rate:.0} TFLOP/s: modelled, nobody has measured it", seconds * 1e6);
        details.push((TIME, words));
    }
    details
}

/// Name of the detail that says the modelled time.
pub const TIME: &str = "modelled time";

/// Floating-point operations of a call, with `a_pair` operations for each visible pair.
pub(crate) fn flops(problem: &FwdProblem, a_pair: u32) -> f64 {
    let dims = problem.dims;
    let heads = f64::from(dims.batch) * f64::from(dims.num_heads_q);
    heads * visible_pairs(problem.mask, dims.seqlen_q, dims.seqlen_k) as f64 * f64::from(a_pair)
}

/// A published rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Published {
    /// Text of the row's columns except the last two; it names the row.
    pub name: String,
    /// Published rate in TFLOP/s.
    pub tflops: f64,
    /// Floating-point operations, as the table counts them.
    pub flops: f64,
    /// The kernel's shape, as far as it is known, on its device.
    pub walk: Walk,
}

impl Published {
    /// Logarithm of the modelled rate over the published one.
    #[must_use]
    pub fn error(&self, constants: &Constants) -> f64 {
        (self.flops / self.walk.seconds(constants) / 1e12 / self.tflops).ln()
    }

    fn parsed(line: &str) -> Option<Self> {
        let columns: Vec<&str> = line.split('\t').collect();
        let &[device, _, op, batch, heads, dims, dtype, mask, keys, tflops, _source] = columns.as_slice()
        else {
            return None;
        };
        let arch = if device == "GB300" { "sm_103a" } else { "sm_100a" };
        let number = |text: &str| text.parse::<f64>().ok();
        let (qk, v) = dims.split_once('/').unwrap_or((dims, dims));
        let (keys, batch) = (number(keys)?, number(batch)?);
        let all_heads = batch * number(heads.split_once('/')?.0)?;
        // MXFP8 is priced as FP8.
        let is_fp8 = matches!(dtype, "fp8" | "mxfp8");
        let dtype = if is_fp8 { DType::E4m3Fn } else { DType::Bf16 };
        let spec = FwdSpec {
            head_dim_v: v.parse().ok()?,
            dtype_qk: dtype,
            dtype_v: dtype,
            ..FwdSpec::plain(DType::Bf16, qk.parse().ok()?, MaskKind::Full)
        };
        let is_backward = op == "bwd";
        let tile = default_tile(&spec);
        let mut units = forward(&spec, &tile, arch);
        if is_backward {
            // FlashAttention-4's pairs of CTAs at D 128 (Zadouri et al., 2026).
            (units.tensor, units.shared) = (2560.0, 2688.0);
        }
        // A tile has 256 queries; in the backward, a pair of CTAs has 256 keys.
        let is_pair = is_backward || tile.cluster > 1;
        let per_sm = if is_pair { 0.5 } else { 1.0 };
        let equal = mask == "full";
        let tiles = all_heads * (keys / 256.0);
        let shown = if equal { keys } else { (keys + 256.0) / 2.0 };
        let pairs = all_heads * keys * keys * if equal { 1.0 } else { 0.5 };
        let dims = f64::from(spec.head_dim_qk) + f64::from(spec.head_dim_v);
        let overlap = match (is_backward, tile.num_q_tiles()) {
            (true, _) => Overlap::Backward,
            (false, 2) => Overlap::TwoTiles,
            (false, _) => Overlap::OneTile,
        };
        Some(Self {
            name: columns[..9].join(" "),
            tflops: number(tflops)?,
            flops: 2.0 * pairs * dims * if is_backward { 2.5 } else { 1.0 },
            walk: Walk {
                overlap,
                units,
                tiles,
                at_once: NUM_SMS * per_sm,
                blocks: shown * 256.0 / PAIRS * per_sm,
                // A CTA of one query tile starts half as many products as one of two tiles.
                starts: if overlap == Overlap::OneTile { 0.5 } else { 1.0 },
                equal,
                // Stated peaks of 2568 and 2578 TFLOP/s.
                hertz: if device == "GB300" { 2578e12 } else { 2568e12 } / (NUM_SMS * 2.0 * PRODUCTS),
            },
        })
    }
}

/// Rows of `published.tsv`.
///
/// # Errors
/// A line that is no row.
pub fn published() -> Result<Vec<Published>, String> {
    rows(include_str!("published.tsv"))
}

/// Rows of `published_later.tsv`, to which no constant is fitted.
///
/// # Errors
/// A line that is no row.
pub fn published_later() -> Result<Vec<Published>, String> {
    rows(include_str!("published_later.tsv"))
}

fn rows(text: &str) -> Result<Vec<Published>, String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| Published::parsed(line).ok_or(format!("no row: {line}"))).collect()
}

/// Whether rows are fitted; the rest tests the fit. A generator with a fixed seed draws half of them.
#[must_use]
pub fn fitted(rows: usize) -> Vec<bool> {
    let mut state: u64 = SEED;
    let mut order: Vec<usize> = (0..rows).collect();
    for last in (1..rows).rev() {
        // Multiplier of Knuth's MMIX generator; its upper bits are used, which are the more random ones.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(last, (state >> 33) as usize % (last + 1));
    }
    let mut is_fitted = vec![false; rows];
    order[..rows / 2].iter().for_each(|&row| is_fitted[row] = true);
    is_fitted
}

/// Seed of the draw.
const SEED: u64 = 65;

/// Constants that fit rows: changed one at a time by ever smaller factors while the sum of squared errors falls.
#[must_use]
pub fn fit<'a>(rows: impl Iterator<Item = &'a Published>) -> Constants {
    let rows: Vec<&Published> = rows.collect();
    let sum = |constants: &Constants| rows.iter().map(|row| row.error(constants).powi(2)).sum::<f64>();
    let mut constants = Constants::FIRST;
    let mut best = sum(&constants);
    for factor in [2.0, 1.5, 1.2, 1.1, 1.05, 1.02, 1.01, 1.005] {
        let mut falls = true;
        while falls {
            falls = false;
            for at in 0..constants.named().len() {
                for by in [factor, 1.0 / factor] {
                    let mut tried = constants;
                    *tried.named()[at].1 *= by;
                    let next = sum(&tried);
                    if next < best - 1e-9 {
                        (best, constants, falls) = (next, tried, true);
                    }
                }
            }
        }
    }
    constants
}

/// The lines of `constants.tsv`.
#[must_use]
pub fn lines(mut constants: Constants) -> String {
    constants.named().into_iter().map(|(name, number)| format!("{name}\t{number:.4}\n")).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::*;

    /// Number of tested rows that the documentation page counts as more than 10 % off.
    const BEYOND: usize = 3;

    #[test]
    fn constants_are_those_that_half_of_the_published_rows_fit() {
        let rows = published().unwrap();
        let is_fitted = fitted(rows.len());
        assert_eq!((rows.len(), is_fitted.iter().filter(|&&one| one).count()), (90, 45));
        let constants = fit(rows.iter().zip(&is_fitted).filter_map(|(row, &one)| one.then_some(row)));
        assert_eq!(lines(constants), include_str!("constants.tsv"), "cargo run --example blackwell");
    }

    #[test]
    fn tested_rows_lie_as_far_off_as_the_page_says() {
        let rows = published().unwrap();
        let is_fitted = fitted(rows.len());
        let tested = || rows.iter().zip(&is_fitted).filter(|(_, one)| !**one).map(|(row, _)| row);
        let beyond = tested().filter(|row| row.error(&CONSTANTS).exp_m1().abs() > 0.1);
        let names: Vec<&str> = beyond.map(|row| row.name.as_str()).collect();
        assert_eq!(names.len(), BEYOND, "{names:#?}");
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/kernels/sm100.md");
        let page = std::fs::read_to_string(page).unwrap();
        let others = tested().filter(|row| !names.contains(&row.name.as_str()));
        let worst = others.map(|row| 100.0 * row.error(&CONSTANTS).exp_m1().abs()).fold(0.0, f64::max);
        for words in [format!("{BEYOND} of {} tested rows", tested().count()), format!("within {worst:.1} %")]
        {
            assert!(page.contains(&words), "the page does not say `{words}`");
        }
        assert!(names.iter().all(|name| page.contains(name)), "{names:?} are not all on the page");
    }

    #[test]
    fn later_rows_lie_as_far_off_as_the_page_says() {
        let rows = published_later().unwrap();
        let off: Vec<f64> = rows.iter().map(|row| 100.0 * row.error(&CONSTANTS).exp_m1().abs()).collect();
        let beyond = off.iter().filter(|&&off| off > 10.0).count();
        let mean = off.iter().sum::<f64>() / off.len() as f64;
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/kernels/sm100.md");
        let page = std::fs::read_to_string(page).unwrap();
        let page: Vec<&str> = page.split_whitespace().collect();
        let words = format!(
            "{} later rows have a mean error of {mean:.1} %, and {beyond} lie beyond 10 %",
            rows.len()
        );
        assert!(page.join(" ").contains(&words), "the page does not say `{words}`");
    }

    /// Shapes of a published kernel reach the part of the device's peak that it has.
    #[test]
    fn a_plan_s_modelled_rate_is_near_the_published_one() {
        for (arch, peak, published) in [("sm_100a", 2568.0, 1695.0), ("sm_103a", 2578.0, 2116.0)] {
            let facts = DeviceFacts::stated(arch).unwrap();
            let dims = fmha_core::Dims::batch(2).seqlens(8192, 8192).heads(64, 8).head_dim(128);
            let problem = FwdProblem::batch(DType::Bf16, dims);
            let tile = crate::sm100::choose_tile(&problem, arch, facts.num_sms);
            let schedule = tile.schedule(&problem).unwrap();
            let seconds = walk(&problem, &tile, &schedule, &facts).unwrap().seconds(&CONSTANTS);
            let part = flops(&problem, 512) / seconds / facts.roofline.flops_per_second.unwrap();
            assert!((part / (published / peak) - 1.0).abs() < 0.1, "{arch}: {part}");
        }
    }
}
