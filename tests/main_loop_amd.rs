//! What a step of the AMD kernels' main loop asks of LDS and of memory, counted in the emulator: the table
//! `docs/kernels/cdna-loop-memory.tsv`. Modelled, not measured.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod amd;

use std::fmt::Write as _;
use std::path::Path;

use fmha_conformance::case::Case;
use fmha_conformance::run::{Options, Outcome};
use fmha_conformance::tensors::{Data, Lengths};
use fmha_core::{DType, Dims, FwdProblem};
use fmha_emu_cdna::{Checks, Counters, Recording};
use fmha_rocm::RocmBackend;

const ARCHS: [(&str, Option<DType>); 3] =
    [("gfx90a", None), ("gfx942", Some(DType::E4m3Fnuz)), ("gfx950", Some(DType::E4m3Fn))];
const COLUMNS: &str = "arch\tcall\tkeys\tlds_cycles\tconflict_cycles\tlines\tlines_if_packed\n";
/// What the figures are of: between a launch with so many keys and one with twice as many lie only steps of the loop.
const KEYS: u32 = 512;

/// Counts of one head's launch, recorded into `folder` and run again there.
fn counted(backend: &RocmBackend, dtype: DType, head_dim: u32, seqlen_k: u32, folder: &Path) -> Counters {
    let dims = Dims {
        batch: 1,
        seqlen_q: 256,
        seqlen_k,
        num_heads_q: 1,
        num_heads_kv: 1,
        head_dim_qk: head_dim,
        head_dim_v: head_dim,
    };
    let problem = FwdProblem::batch(dtype, dims);
    let case = Case::forward("main loop", problem, Lengths::default(), Data { seed: 3, ..Data::default() });
    let (outcome, text) = case.run(backend, &Options::default());
    assert_eq!(outcome, Outcome::Passed, "{text}");
    let file = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    let recording = Recording::from_bytes(&std::fs::read(&file).unwrap()).unwrap();
    std::fs::remove_file(file).unwrap();
    let options = fmha_emu_cdna::Options { checks: Checks::NONE, profile: true, ..Default::default() };
    recording.run_as(&recording.code, options).unwrap().counters
}

fn row(backend: &RocmBackend, arch: &str, dtype: DType, head_dim: u32, folder: &Path) -> String {
    let [few, many] = [KEYS, 2 * KEYS].map(|keys| counted(backend, dtype, head_dim, keys, folder));
    format!(
        "{arch}\t{dtype}/d{head_dim}\t{KEYS}\t{}\t{}\t{}\t{}\n",
        many.lds_cycles_min - few.lds_cycles_min,
        many.lds_conflict_cycles - few.lds_conflict_cycles,
        many.vmem_lines - few.vmem_lines,
        many.vmem_lines_min - few.vmem_lines_min,
    )
}

#[test]
fn the_committed_table_of_what_the_main_loop_asks_of_memory_is_current() {
    let folder = std::env::temp_dir().join(format!("fmha-main-loop-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    // SAFETY: the only test of this program, and no other thread of it runs yet.
    unsafe { std::env::set_var(Recording::FOLDER_VARIABLE, &folder) };
    let mut table = COLUMNS.to_owned();
    for (arch, fp8) in ARCHS {
        let Some(backend) = amd::open(arch, "the main loop") else { return };
        for dtype in [Some(DType::Bf16), fp8].into_iter().flatten() {
            for head_dim in [64, 128, 256] {
                let _ = write!(table, "{}", row(&backend, arch, dtype, head_dim, &folder));
            }
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
    let committed = include_str!("../docs/kernels/cdna-loop-memory.tsv");
    assert_eq!(table, committed, "docs/kernels/cdna-loop-memory.tsv is to be:\n{table}");
}
