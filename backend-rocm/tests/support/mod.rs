//! Helpers that several tests of this crate use.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "a program uses a part of it, and a test fails by panicking"
)]

use std::process::Command;

use fmha_core::{AnyProblem, Device, Dims, PlanOptions, ValidBwd, ValidFwd};

/// Sizes that do not fill a tile.
pub(crate) const DIMS: Dims = Dims {
    batch: 2,
    seqlen_q: 300,
    seqlen_k: 500,
    num_heads_q: 4,
    num_heads_kv: 2,
    head_dim_qk: 128,
    head_dim_v: 128,
};

/// The code object of a forward plan's kernel: an ELF for the device's architecture.
pub(crate) fn code_object(device: &Device, problem: &ValidFwd, options: &PlanOptions) -> Vec<u8> {
    let compiler = device.precompiler().unwrap();
    let jobs = compiler.jobs(AnyProblem::Forward(problem), options).unwrap();
    // Launches before the main kernel, which update a cache or make lists of tiles, have no tile.
    let main = jobs.iter().find(|job| job.source.entry.contains("kTile")).unwrap_or(&jobs[0]);
    compiler.precompile(main).unwrap().machine.clone()
}

/// The code objects of a backward plan's products, with their names in the plan.
pub(crate) fn products(device: &Device, problem: &ValidBwd, options: &PlanOptions) -> Vec<(String, Vec<u8>)> {
    let compiler = device.precompiler().unwrap();
    let jobs = compiler.jobs(AnyProblem::Backward(problem), options).unwrap();
    let is_of_products = |entry: &str| ["kTile", "bwd::lists"].iter().any(|word| entry.contains(word));
    let products = jobs.iter().filter(|job| is_of_products(&job.source.entry));
    products.map(|job| (job.kernel.to_string(), compiler.precompile(job).unwrap().machine.clone())).collect()
}

/// Runs an ignored test of the calling program in a separate process with these variables and no bundle.
pub(crate) fn in_a_process(test: &str, variables: &[(&str, &str)]) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--ignored"])
        .envs(variables.iter().copied())
        .env_remove("FMHA_BUNDLE")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
}

/// Whether a clang with the AMDGPU target is installed; prints a message if not.
pub(crate) fn clang_is_there() -> bool {
    let named = std::env::var("FMHA_HIP_CLANG").ok();
    let there = named.iter().map(String::as_str).chain(["clang-22", "clang"]).any(|clang| {
        Command::new(clang)
            .arg("--print-targets")
            .output()
            .is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("amdgcn"))
    });
    if !there {
        println!("absent: no clang with target amdgcn, nothing was compiled");
    }
    there
}
