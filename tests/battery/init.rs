//! Contents of tensors: a seed and a position determine each number, in any order and on any thread.

use std::fmt;
use std::str::FromStr;

use fmha_core::ProblemError;

use crate::tensor::Operand;

/// Kinds of numbers for Q, K, V and the incoming gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Init {
    /// Standard normal numbers.
    #[default]
    Normal,
    /// Uniform numbers in −1..1.
    Uniform,
    /// A sine of the row's and the element's position: smooth, and different in neighbouring rows.
    Trig,
    /// Whole numbers in −2..=2: the sums of Q K^T are exact in any order.
    Integers,
    /// Q and K normal, every V 0.625: O is that number wherever a row sees a key.
    ConstantV,
    /// Normal numbers, one element in 64 sixteen times as large.
    Outliers,
    /// Q and K eight times the standard normal: the softmax is nearly one-hot, and an unshifted
    /// `exp` overflows.
    HugeLogits,
    /// Normal, but K's first 64 rows are five times as large and the next 186 twice: maxima grow from key block to
    /// key block when blocks run from the last to the first, and earlier weights still count.
    Rising,
    /// Normal, but K's first 64 rows are 400 times as large and the next 186 are 20 times: exponentials relative to
    /// an earlier block's maximum overflow f32.
    Towering,
    /// Q is four times standard normal: scores have standard deviation 4.
    Spread4,
    /// Scores of standard deviation 64.
    Spread64,
    /// Every third head's scores have standard deviation 30, the others' scores 1.
    MixedHeads,
    /// Three query rows of ten have scores of standard deviation 50, the others 1.
    MixedRows,
    /// Normal, but K's first element 192 in every row: the scores of most query rows are all positive, or all negative.
    Slanted,
}

/// Value that [`Init::ConstantV`] fills V with; exact in every type.
pub const CONSTANT_V: f64 = 0.625;

impl Init {
    /// Kinds that every family uses; [`Init::GROWING`] is for long rows only, [`Init::SPREAD`] for laws of bits.
    pub const ALL: [Init; 7] = [
        Init::Normal,
        Init::Uniform,
        Init::Trig,
        Init::Integers,
        Init::ConstantV,
        Init::Outliers,
        Init::HugeLogits,
    ];

    /// Kinds whose scores are farther apart than usual, everywhere or in part.
    pub const SPREAD: [Init; 4] = [Init::Spread4, Init::Spread64, Init::MixedHeads, Init::MixedRows];

    /// Kinds whose scores grow along a row.
    pub const GROWING: [Init; 2] = [Init::Rising, Init::Towering];

    /// Kinds with growing scores, and with scores of one sign, for kernels that find maxima in other ways.
    pub const OF_MAXIMA: [Init; 3] = [Init::Rising, Init::HugeLogits, Init::Slanted];

    /// Name of the kind in case names and in commands.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Init::Normal => "normal",
            Init::Uniform => "uniform",
            Init::Trig => "trig",
            Init::Integers => "integers",
            Init::ConstantV => "constant_v",
            Init::Outliers => "outliers",
            Init::HugeLogits => "huge_logits",
            Init::Rising => "rising",
            Init::Towering => "towering",
            Init::Spread4 => "spread4",
            Init::Spread64 => "spread64",
            Init::MixedHeads => "mixed_heads",
            Init::MixedRows => "mixed_rows",
            Init::Slanted => "slanted",
        }
    }

    /// Fills one row of `operand`; `at` is its (sequence, head, position inside the sequence).
    pub(crate) fn fill(self, operand: Operand, seed: u64, at: [u32; 3], row: &mut [f32]) {
        let [batch, head, i] = at;
        let key = mix(mix(seed ^ operand.salt()) ^ (u64::from(batch) << 32 | u64::from(head)))
            .wrapping_add(u64::from(i) << 24);
        let key = mix(key);
        let scores = matches!(operand, Operand::Q | Operand::K);
        let tensor = scores || matches!(operand, Operand::V | Operand::Dout);
        match self {
            Init::ConstantV if operand == Operand::V => row.fill(CONSTANT_V as f32),
            Init::Uniform if tensor => each(key, row, |word| unit(word) * 2.0 - 1.0),
            Init::Integers if tensor => each(key, row, |word| (word % 5) as f32 - 2.0),
            Init::Trig if tensor => {
                let phase = (key % 1024) as f32 / 163.0;
                for (d, x) in row.iter_mut().enumerate() {
                    *x = (phase + d as f32 * 0.7 + i as f32 * 0.3).sin();
                }
            }
            Init::Outliers if tensor => {
                normal(key, row);
                for (d, x) in row.iter_mut().enumerate() {
                    if mix(key ^ 0x5eed ^ d as u64).is_multiple_of(64) {
                        *x *= 16.0;
                    }
                }
            }
            Init::HugeLogits if scores => {
                normal(key, row);
                row.iter_mut().for_each(|x| *x *= 8.0);
            }
            Init::Spread4 if operand == Operand::Q => scaled(key, 4.0, row),
            Init::Spread64 if operand == Operand::Q => scaled(key, 64.0, row),
            Init::MixedHeads if operand == Operand::Q => {
                scaled(key, if head.is_multiple_of(3) { 30.0 } else { 1.0 }, row);
            }
            Init::MixedRows if operand == Operand::Q => {
                scaled(key, if mix(key ^ 0x5eed) % 10 < 3 { 50.0 } else { 1.0 }, row);
            }
            Init::Slanted if operand == Operand::K => {
                normal(key, row);
                row[0] = 192.0;
            }
            Init::Rising if operand == Operand::K => growing(key, i, [5.0, 2.0], row),
            Init::Towering if operand == Operand::K => growing(key, i, [400.0, 20.0], row),
            _ => normal(key, row),
        }
    }
}

fn scaled(key: u64, factor: f32, row: &mut [f32]) {
    normal(key, row);
    row.iter_mut().for_each(|x| *x *= factor);
}

/// Fills a row with normal numbers, larger in the first rows.
fn growing(key: u64, i: u32, [first, second]: [f32; 2], row: &mut [f32]) {
    let factor = match i {
        0..64 => first,
        64..250 => second,
        _ => 1.0,
    };
    scaled(key, factor, row);
}

impl fmt::Display for Init {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Init {
    type Err = ProblemError;

    fn from_str(text: &str) -> Result<Self, ProblemError> {
        let all = || Init::ALL.into_iter().chain(Init::GROWING).chain(Init::SPREAD).chain([Init::Slanted]);
        all().find(|init| init.name() == text).ok_or_else(|| {
            let known: Vec<_> = all().map(Init::name).collect();
            let text = format!("init `{text}` is unknown (known: {})", known.join(", "));
            ProblemError::new("init", text)
        })
    }
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", OOPSLA 2014): one call decides a number from its position.
pub(crate) fn mix(counter: u64) -> u64 {
    let z = counter.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Number in 0..1, from the upper 24 bits.
fn unit(word: u64) -> f32 {
    (word >> 40) as f32 / (1u32 << 24) as f32
}

fn each(key: u64, row: &mut [f32], number: impl Fn(u64) -> f32) {
    for (d, x) in row.iter_mut().enumerate() {
        *x = number(mix(key.wrapping_add(d as u64)));
    }
}

/// Standard normal by Box and Muller, two numbers a word.
fn normal(key: u64, row: &mut [f32]) {
    for (pair, two) in row.chunks_mut(2).enumerate() {
        let word = mix(key.wrapping_add(pair as u64));
        let radius = (-2.0 * (1.0 - unit(word)).ln()).sqrt();
        let (sin, cos) = (unit(word << 24) * std::f32::consts::TAU).sin_cos();
        for (x, part) in two.iter_mut().zip([cos, sin]) {
            *x = radius * part;
        }
    }
}

#[cfg(test)]
mod tests {
    use approx::assert_abs_diff_eq;

    use super::*;

    #[test]
    fn normal_numbers_have_mean_nought_and_variance_one() {
        let mut sums = [0.0; 2];
        let mut row = [0f32; 101];
        for i in 0..500 {
            Init::Normal.fill(Operand::Q, 7, [0, 1, i], &mut row);
            sums[0] += row.iter().map(|&x| f64::from(x)).sum::<f64>();
            sums[1] += row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
        }
        let count = 500.0 * 101.0;
        // The tolerance is four standard deviations of each mean.
        assert_abs_diff_eq!(sums[0] / count, 0.0, epsilon = 0.02);
        assert_abs_diff_eq!(sums[1] / count, 1.0, epsilon = 0.03);
    }

    #[test]
    fn every_coordinate_decides() {
        let row = |operand, seed, at| {
            let mut row = [0f32; 8];
            Init::Normal.fill(operand, seed, at, &mut row);
            row
        };
        let base = row(Operand::Q, 1, [0, 0, 0]);
        assert_eq!(base, row(Operand::Q, 1, [0, 0, 0]));
        for other in [
            row(Operand::K, 1, [0, 0, 0]),
            row(Operand::Q, 2, [0, 0, 0]),
            row(Operand::Q, 1, [1, 0, 0]),
            row(Operand::Q, 1, [0, 1, 0]),
            row(Operand::Q, 1, [0, 0, 1]),
        ] {
            assert_ne!(base, other);
        }
    }
}
