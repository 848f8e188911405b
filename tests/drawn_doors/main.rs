//! Calls drawn from a seed, made through each interface of the library on the CPU and compared with the float64
//! reference, gradients included; rows that lengths leave out are not written. `FMHA_DRAWN=SEED:COUNT` draws others, or
//! more. Candle's interface is tested in `bindings/candle/tests/drawn.rs`, Python's in its package.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod c;
mod plans;
mod refusals;
mod views;

use fmha::{Backend, Device};
use fmha_conformance::case::{Body, Drawn};
use fmha_conformance::verdict::Verdict;

/// Drawn cases: `count` of a fixed seed, a few seconds' worth, or those that the environment variable names.
fn cases(count: u32) -> Vec<(String, Body)> {
    let text = std::env::var("FMHA_DRAWN").unwrap_or_else(|_| format!("58:{count}"));
    let drawn: Drawn = text.parse().unwrap();
    drawn.cases().into_iter().map(|case| (case.name, case.body)).collect()
}

fn cpu() -> Device {
    Backend::Cpu.open().unwrap()
}

fn held(results: &[(String, Result<Verdict, String>)], least: usize, door: &str) {
    let wrong: Vec<String> = results
        .iter()
        .filter_map(|(name, result)| match result {
            Ok(verdict) if verdict.pass() => None,
            Ok(verdict) => Some(format!("{name}: {verdict}")),
            Err(error) => Some(format!("{name}: refused: {error}")),
        })
        .collect();
    println!("drawn calls of {door}: {}, of which {} are wrong", results.len(), wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(std::env::var_os("FMHA_DRAWN").is_some() || results.len() >= least, "{door}: {}", results.len());
}
