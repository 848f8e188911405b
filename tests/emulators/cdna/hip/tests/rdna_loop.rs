//! LDS bank conflicts of the RDNA kernel's main loop, counted in the emulator: there are none. Modelled, not measured.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../../../amd/mod.rs"]
mod amd;

use std::path::Path;

use fmha_conformance::case::Case;
use fmha_conformance::run::{Options, Outcome};
use fmha_conformance::tensors::{Data, Lengths};
use fmha_core::{DType, Device, Dims, FwdProblem};
use fmha_emu_cdna::{Checks, Class, Counters, Recording};

/// Counts of a plain call's launch, recorded into `folder` and run again there.
fn counted(backend: &Device, dtype: DType, head_dim: u32, seqlen_k: u32, folder: &Path) -> Counters {
    let dims = Dims {
        batch: 1,
        seqlen_q: 128,
        seqlen_k,
        num_heads_q: 1,
        num_heads_kv: 1,
        head_dim_qk: head_dim,
        head_dim_v: head_dim,
    };
    let data = Data { seed: 3, ..Data::default() };
    let case = Case::forward("main loop", FwdProblem::batch(dtype, dims), Lengths::default(), data);
    let (outcome, text) = case.run(backend, &Options::default());
    assert_eq!(outcome, Outcome::Passed, "{text}");
    let file = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    let recording = Recording::from_bytes(&std::fs::read(&file).unwrap()).unwrap();
    std::fs::remove_file(file).unwrap();
    let options = fmha_emu_cdna::Options { checks: Checks::NONE, profile: true, ..Default::default() };
    recording.run_as(&recording.code, options).unwrap().counters
}

/// What lies between a launch with so many keys and one with twice as many are steps of the loop.
#[test]
fn lanes_meet_in_no_bank_of_lds() {
    const KEYS: u32 = 128;
    let folder = std::env::temp_dir().join(format!("fmha-rdna-loop-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    // SAFETY: the only test of this program, and no other thread of it runs yet.
    unsafe { std::env::set_var(Recording::FOLDER_VARIABLE, &folder) };
    for (arch, dtype, head_dims) in [
        ("gfx1100", DType::Bf16, &[32, 128, 256][..]),
        ("gfx1201", DType::F16, &[64, 192]),
        ("gfx1201", DType::E4m3Fn, &[32, 128]),
    ] {
        let Some(backend) = amd::open(arch, "the main loop") else { return };
        for &head_dim in head_dims {
            let [few, many] = [KEYS, 2 * KEYS].map(|keys| counted(&backend, dtype, head_dim, keys, &folder));
            let cycles = many.lds_cycles_min - few.lds_cycles_min;
            let conflicts = many.lds_conflict_cycles - few.lds_conflict_cycles;
            // Of all waves and steps between.
            let of = |class| many.of(class) - few.of(class);
            let [valu, packed, exp, wmma, lds] =
                [Class::Valu, Class::ValuPacked, Class::Transcendental, Class::Mfma, Class::Lds].map(of);
            println!(
                "{arch} {dtype} d{head_dim}: {wmma} WMMA beside {} vector instructions, {exp} transcendental ones, \
                 {lds} of LDS in {cycles} cycles",
                valu + packed
            );
            assert!(cycles > 0);
            assert_eq!(conflicts, 0, "{arch} {dtype} d{head_dim}: conflicts beside {cycles} cycles");
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
}
