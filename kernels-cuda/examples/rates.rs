//! Fits the constants of the price of few queries (`split/rates.tsv`) to what was measured (`split/measured.tsv`).
//!
//! `cargo run --release -p fmha-kernels-cuda --example rates` writes the file anew. Constants are changed one at a time
//! by ever smaller factors while the sum falls: of squared logarithms of price by time, and of what is lost by choices,
//! the logarithm of the chosen way's time by the fastest's.

use std::collections::BTreeMap;
use std::path::Path;

use fmha_kernels_cuda::split::measured::{ROOM, Row, rows};
use fmha_kernels_cuda::split::price::{CONSTANTS, Common, Constants, Rates, Walk, micros_by};

/// Weight of the time that choices lose, relative to that of the price's error.
const OF_CHOICES: f64 = 3.0;

struct Measured {
    row: Row,
    walk: Walk,
}

impl Measured {
    fn price(&self, constants: &Constants, common: &Common) -> f64 {
        let rates: Rates = if self.row.kernel == "sm80" { constants.sm80 } else { constants.sm90 };
        micros_by(common, &self.row.call.problem, &Walk { rates, ..self.walk }, ROOM.num_sms)
    }
}

/// Errors of constants: the mean squared logarithm of price by time; the mean logarithm of the chosen way's time by the
/// fastest way's; the worst of these.
fn errors(calls: &BTreeMap<String, Vec<Measured>>, constants: &Constants) -> (f64, f64, f64) {
    let (mut squares, mut count, mut lost, mut worst) = (0.0, 0.0, 0.0, 0.0f64);
    for ways in calls.values() {
        let mut chosen = (f64::INFINITY, 0.0);
        for way in ways {
            // The price is computed for the actual lengths, but the choice is made without knowing them.
            let known = Common { mean: way.row.mean, ..constants.common };
            let error = (way.price(constants, &known) / way.row.micros).ln();
            squares += error * error;
            count += 1.0;
            let price = way.price(constants, &constants.common);
            if price < chosen.0 {
                chosen = (price, way.row.micros);
            }
        }
        let best = ways.iter().map(|way| way.row.micros).fold(f64::INFINITY, f64::min);
        let loss = (chosen.1 / best).ln();
        lost += loss;
        worst = worst.max(loss);
    }
    (squares / count, lost / calls.len() as f64, worst)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut calls: BTreeMap<String, Vec<Measured>> = BTreeMap::new();
    for row in rows()? {
        // A way that tiles no longer support is left out.
        let Some(walk) = row.walk(&CONSTANTS) else { continue };
        calls.entry(format!("{} {}", row.run, row.call.name)).or_default().push(Measured { row, walk });
    }
    let mut constants = CONSTANTS.clone();
    let count = constants.named().len();
    // Prices are fitted first, and then the loss by choices too: alone, that loss has too many places where no small
    // change helps.
    for of_choices in [0.0, OF_CHOICES] {
        let sum = |constants: &Constants| {
            let (squares, lost, _) = errors(&calls, constants);
            squares + of_choices * lost
        };
        let mut best = sum(&constants);
        for factor in [2.0, 1.5, 1.2, 1.1, 1.05, 1.02] {
            let mut falls = true;
            while falls {
                falls = false;
                for at in 0..count {
                    for by in [factor, 1.0 / factor] {
                        let mut tried = constants.clone();
                        *tried.named()[at].1 *= by;
                        let next = sum(&tried);
                        if next < best - 1e-6 {
                            (best, constants, falls) = (next, tried, true);
                        }
                    }
                }
            }
        }
        let (squares, lost, worst) = errors(&calls, &constants);
        println!(
            "{} calls: price by time {:.3} in the root mean square of logarithms; choices {:.3} times the fastest, worst \
             {:.3}",
            calls.len(),
            squares.sqrt(),
            lost.exp(),
            worst.exp()
        );
    }
    let lines = constants.named().into_iter().map(|(name, number)| format!("{name}\t{number:.4e}\n"));
    let text: String = lines.collect();
    std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/split/rates.tsv"), text)?;
    Ok(())
}
