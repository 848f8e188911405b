//! The battery on the AMD backend as it is, over the emulator's driver library. Verified in emulation,
//! never on hardware.
//!
//! Nearly all of the time goes into compiling kernels (about a second each; the disk cache keeps them), so
//! cases are dealt out by their seeds: one in twelve runs on each architecture, and of the families in which
//! nearly each case has a kernel of its own one in 64. All of them:
//! `fmha conformance --backend rocm --emulate gfx942`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;

use fmha_conformance::case::{Case, all};
use fmha_conformance::report::run_cases;
use fmha_conformance::run::{Options, Outcome};
use fmha_core::{Error, PlanOptions};
use fmha_rocm::RocmBackend;

const ARCHS: [&str; 3] = ["gfx90a", "gfx942", "gfx950"];

/// Families, by the beginnings of names, of which nearly each case has a kernel of its own.
const SAMPLED: [&str; 4] = ["definition/", "laws/", "fp8/", "edges/head_dim/"];
/// What may be wrong on one architecture alone: its matrix instructions, its waits.
const EVERYWHERE: [&str; 2] = ["edges/off_tile/", "combine/"];

fn is_dealt_to(arch: usize, case: &Case) -> bool {
    let any = |families: &[&str]| families.iter().any(|family| case.name.starts_with(family));
    let card = case.data().seed >> 20;
    let runs = !any(&SAMPLED) || card.is_multiple_of(64);
    // Each FP8 type is the business of one architecture.
    let fp8 = case.problem().is_some_and(|problem| problem.dtype_qk.is_fp8());
    runs && (fp8 || any(&EVERYWHERE) || card % 12 == arch as u64)
}

fn open(arch: &str) -> Option<RocmBackend> {
    let clang = std::env::var("FMHA_HIP_CLANG").unwrap_or_else(|_| "clang-22".to_owned());
    if Command::new(Path::new(&clang)).arg("--version").output().is_err() {
        println!("absent: the battery on emulated {arch}: no {clang}");
        return None;
    }
    match RocmBackend::open(0, Some(arch)) {
        Ok(backend) => Some(backend),
        Err(Error::NoDevice(reason)) => {
            println!("absent: the battery on emulated {arch}: {reason}");
            None
        }
        Err(error) => panic!("{arch}: {error}"),
    }
}

#[test]
fn the_tile_kernel_keeps_the_contract_on_every_emulated_architecture() {
    let mut failed = 0;
    for (index, arch) in ARCHS.into_iter().enumerate() {
        let Some(backend) = open(arch) else { return };
        let cases: Vec<Case> = all().into_iter().filter(|case| is_dealt_to(index, case)).collect();
        // The tile kernel alone: what it does not take is to be refused as declared.
        let options = Options {
            plan: PlanOptions::default(),
            repro_words: format!("--emulate {arch}"),
            ..Options::default()
        };
        let report = run_cases(&backend, &cases, &options, &|_, _, _| ());
        for case in report.failures() {
            println!("FAILED {}\n  {}\n  {}", case.name, case.text, case.repro);
        }
        println!("of the battery on rocm, {arch} emulated, the part dealt to it:");
        for (family, summary) in report.families() {
            println!("{family:<12} {summary}");
        }
        println!("{:<12} {}", "all", report.summary);
        println!("battery rocm ({arch}, emulated): {}", report.summary);
        failed += report.summary.failed;
        assert!(report.summary.passed > 100, "{}", report.summary);
    }
    assert_eq!(failed, 0);
}

/// So few workgroups that each walks over several tiles. On AMD's devices of eight dies fewer than eight, and more.
#[test]
fn workgroups_that_walk_over_tiles_keep_the_contract_on_every_emulated_architecture() {
    let mut failed = 0;
    for (index, (arch, workgroups)) in ARCHS.into_iter().zip([3, 2, 11]).enumerate() {
        let Some(backend) = open(arch) else { return };
        let walks = |case: &&Case| {
            let tiles = case.problem().map_or(0, |problem| {
                let dims = problem.dims;
                u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q.div_ceil(64))
            });
            tiles > workgroups && !case.name.starts_with("backward/")
        };
        let dealt = |case: &&Case| (case.data().seed >> 20) % 96 == index as u64;
        let cases: Vec<Case> = all().iter().filter(walks).filter(dealt).cloned().collect();
        let count = workgroups.to_string();
        let tile = [("block_m", "64"), ("order", "static"), ("workgroups", count.as_str())];
        let options = Options {
            plan: PlanOptions {
                tile: tile.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
                ..PlanOptions::default()
            },
            repro_words: format!("--emulate {arch} --tile block_m=64,order=static,workgroups={workgroups}"),
            ..Options::default()
        };
        let report = run_cases(&backend, &cases, &options, &|_, _, _| ());
        for case in report.failures() {
            println!("FAILED {}\n  {}\n  {}", case.name, case.text, case.repro);
        }
        println!("battery rocm ({arch}, emulated, {workgroups} workgroups): {}", report.summary);
        failed += report.summary.failed;
        assert!(report.summary.passed > 8, "{}", report.summary);
    }
    assert_eq!(failed, 0);
}

/// What the tile kernel does not take and a few that it does: every type, every family.
#[test]
fn the_fallback_takes_every_spec() {
    let Some(backend) = open("gfx942") else { return };
    let cases: Vec<Case> = all().into_iter().filter(|case| case.data().seed % 29 == 0).collect();
    let plan = PlanOptions { kernel: Some("simt".to_owned()), ..PlanOptions::default() };
    let options =
        Options { plan, repro_words: "--emulate gfx942 --kernel simt".to_owned(), ..Options::default() };
    let forward = |case: &&Case| !case.name.starts_with("backward/") && !case.name.starts_with("combine/");
    // Merging has a kernel of another name.
    let forward: Vec<Case> =
        cases.iter().filter(forward).filter(|case| !case.name.contains("parts_combine")).cloned().collect();
    let report = run_cases(&backend, &forward, &options, &|_, _, _| ());
    for case in report.cases.iter().filter(|case| matches!(case.outcome, Outcome::Failed | Outcome::Refused))
    {
        println!("FAILED {}\n  {}\n  {}", case.name, case.text, case.repro);
    }
    println!("battery rocm (gfx942, emulated, kernel simt): {}", report.summary);
    assert_eq!((report.summary.failed, report.summary.refused), (0, 0));
    assert!(report.summary.passed > 60, "{}", report.summary);
}
