//! Fits the constants of Blackwell's modelled times (`sm100/constants.tsv`) to half of the published rates
//! (`sm100/published.tsv`), and prints how far off the model is for all of them.
//!
//! `cargo run --release -p fmha-kernels-cuda --example blackwell` writes the constants anew.

use std::path::Path;

use fmha_kernels_cuda::sm100::modelled::{Published, fit, fitted, lines, published, published_later};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rows = published()?;
    let is_fitted = fitted(rows.len());
    let half =
        |fits: bool| rows.iter().zip(&is_fitted).filter(move |(_, one)| **one == fits).map(|(row, _)| row);
    let constants = fit(half(true));
    let later = published_later()?;
    let line = |row: &Published, role: &str| {
        let percent = 100.0 * row.error(&constants).exp_m1();
        println!("{:<46} {:>6} {percent:>+6.1} % {role}", row.name, row.tflops);
    };
    for (row, is_fitted) in rows.iter().zip(&is_fitted) {
        line(row, if *is_fitted { "fitted" } else { "tested" });
    }
    later.iter().for_each(|row| line(row, "later"));
    let told = |name: &str, rows: Vec<&Published>| {
        let errors: Vec<f64> = rows.iter().map(|row| 100.0 * row.error(&constants).exp_m1().abs()).collect();
        let beyond = errors.iter().filter(|&&error| error > 10.0).count();
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        let worst = errors.iter().copied().fold(0.0, f64::max);
        println!("{name}: {} rows, mean {mean:.1} %, worst {worst:.1} %, {beyond} beyond 10 %", errors.len());
    };
    told("fitted", half(true).collect());
    told("tested", half(false).collect());
    told("later", later.iter().collect());
    print!("{}", lines(constants));
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/sm100/constants.tsv");
    std::fs::write(file, lines(constants))?;
    Ok(())
}
