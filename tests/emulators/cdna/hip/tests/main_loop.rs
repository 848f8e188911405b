//! Use of LDS and of memory by a step of the AMD kernels' main loop, counted in the emulator: the table
//! `tests/evidence/cdna-loop-memory.tsv`. Modelled, not measured.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../../../amd/mod.rs"]
mod amd;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fmha_conformance::case::Case;
use fmha_conformance::run::{Options, Outcome};
use fmha_conformance::tensors::{Data, Lengths};
use fmha_core::{BwdProblem, DType, Device, Dims, FwdProblem, PlanOptions, Strides, VLayout};
use fmha_emu_cdna::{Checks, Counters, Recording};

const ARCHS: [(&str, Option<DType>); 3] =
    [("gfx90a", None), ("gfx942", Some(DType::E4m3Fnuz)), ("gfx950", Some(DType::E4m3Fn))];
const RDNA: [(&str, Option<DType>); 2] = [("gfx1100", None), ("gfx1201", Some(DType::E4m3Fn))];
const HEAD_DIMS: [u32; 8] = [32, 64, 96, 128, 160, 192, 224, 256];
/// Head dimensions of all tiles in the table of RDNA's kernel.
const RDNA_HEAD_DIMS: [u32; 5] = [32, 64, 128, 192, 256];
/// Head dimensions of the backward's tiles; others are padded to these.
const BACKWARD_HEAD_DIMS: [u32; 4] = [64, 128, 192, 256];
const COLUMNS: &str = "arch\tcall\tkeys\tlds_cycles\tconflict_cycles\tlines\tlines_if_packed\n";
/// Keys of the shorter of two launches that the figures compare: between a launch with so many keys and one
/// with twice as many lie only steps of the loop.
const KEYS: u32 = 512;

/// Attention of one head.
#[derive(Clone, Copy)]
struct Call {
    dtype_qk: DType,
    dtype_v: DType,
    head_dim: u32,
    v_layout: VLayout,
}

impl Call {
    /// Plain calls of each head dim, then what takes V to LDS on another way.
    fn all(fp8: Option<DType>) -> Vec<Self> {
        let mut calls = Vec::new();
        for dtype in [Some(DType::Bf16), fp8].into_iter().flatten() {
            calls.extend(HEAD_DIMS.map(|head_dim| Self::plain(dtype, head_dim)));
            calls.push(Self { v_layout: VLayout::ColMajor, ..Self::plain(dtype, 128) });
            if dtype.is_fp8() {
                calls.push(Self { dtype_v: DType::Bf16, ..Self::plain(dtype, 128) });
            }
        }
        calls
    }

    /// Plain calls, whose rows are whole chunks.
    fn of_rdna(fp8: Option<DType>) -> Vec<Self> {
        let of = |dtype| RDNA_HEAD_DIMS.map(|head_dim| Self::plain(dtype, head_dim));
        [Some(DType::Bf16), fp8].into_iter().flatten().flat_map(of).collect()
    }

    fn plain(dtype: DType, head_dim: u32) -> Self {
        Self { dtype_qk: dtype, dtype_v: dtype, head_dim, v_layout: VLayout::RowMajor }
    }

    fn name(&self) -> String {
        let Self { dtype_qk, dtype_v, head_dim, v_layout } = self;
        let then = if dtype_v == dtype_qk { String::new() } else { format!(" then {dtype_v}") };
        let layout = if *v_layout == VLayout::ColMajor { "/column-major V" } else { "" };
        format!("{dtype_qk}{then}/d{head_dim}{layout}")
    }

    fn problem(&self, seqlen_k: u32) -> FwdProblem {
        let dims = Dims {
            batch: 1,
            seqlen_q: 256,
            seqlen_k,
            num_heads_q: 1,
            num_heads_kv: 1,
            head_dim_qk: self.head_dim,
            head_dim_v: self.head_dim,
        };
        let mut problem = FwdProblem::batch(self.dtype_qk, dims);
        problem.dtypes.v = self.dtype_v;
        if self.v_layout == VLayout::ColMajor {
            (problem.layout.v, problem.strides.v) = (VLayout::ColMajor, Strides::bhds(problem.shape_v()));
        }
        problem
    }
}

/// One token of a group of 16 heads whose rows are longer than a wave has alone: latent, and K and V apart.
fn shared_rows(head_dim_qk: u32, seqlen_k: u32) -> FwdProblem {
    let dims = Dims {
        batch: 1,
        seqlen_q: 1,
        seqlen_k,
        num_heads_q: 16,
        num_heads_kv: 1,
        head_dim_qk,
        head_dim_v: 512,
    };
    let mut problem = FwdProblem::batch(DType::Bf16, dims);
    if head_dim_qk > 512 {
        (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
    }
    problem
}

/// Problems of RDNA's decode: one token of a group of 16 heads, for each way that tiles go to LDS.
fn decode_of_rdna(seqlen_k: u32) -> Vec<(String, FwdProblem)> {
    let of = |head_dim| {
        let mut problem = shared_rows(head_dim, seqlen_k);
        problem = FwdProblem::batch(DType::Bf16, Dims { head_dim_v: head_dim, ..problem.dims });
        (format!("bf16/decode d{head_dim}"), problem)
    };
    let mut all: Vec<_> = [64, 128, 192, 256, 512].map(of).into();
    let (_, mut quantised) = of(128);
    quantised.cache.dtype = Some(DType::E4m3Fn);
    all.push(("bf16/decode d128, e4m3fn cache".to_owned(), quantised));
    all.push(("bf16/latent 576x512".to_owned(), shared_rows(576, seqlen_k)));
    all
}

fn counted(backend: &Device, problem: FwdProblem, plan: PlanOptions, folder: &Path) -> Counters {
    let case = Case::forward("main loop", problem, Lengths::default(), Data { seed: 3, ..Data::default() });
    recorded(backend, &case, plan, folder)
}

/// Counts of a case's launches, recorded into `folder` and run again there.
fn recorded(backend: &Device, case: &Case, plan: PlanOptions, folder: &Path) -> Counters {
    let (outcome, text) = case.run(backend, &Options { plan, ..Options::default() });
    assert_eq!(outcome, Outcome::Passed, "{text}");
    let mut counters = Counters::default();
    for file in std::fs::read_dir(folder).unwrap() {
        let file = file.unwrap().path();
        let recording = Recording::from_bytes(&std::fs::read(&file).unwrap()).unwrap();
        std::fs::remove_file(file).unwrap();
        let options = fmha_emu_cdna::Options { checks: Checks::NONE, profile: true, ..Default::default() };
        counters.add(&recording.run_as(&recording.code, options).unwrap().counters);
    }
    counters
}

/// Records of launches, owned by one test of this program at a time.
struct Records {
    folder: PathBuf,
    _alone: MutexGuard<'static, ()>,
}

impl Records {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = std::env::temp_dir().join(format!("fmha-main-loop-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        // SAFETY: every test of this program waits here first, and none reads the environment outside.
        unsafe { std::env::set_var(Recording::FOLDER_VARIABLE, &folder) };
        Self { folder, _alone: alone }
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A row of the table: what twice the keys ask for beyond what so many do.
fn add(table: &mut String, arch: &str, name: &str, [few, many]: &[Counters; 2]) {
    let conflicts = many.lds_conflict_cycles - few.lds_conflict_cycles;
    let _ = writeln!(
        table,
        "{arch}\t{name}\t{KEYS}\t{}\t{conflicts}\t{}\t{}",
        many.lds_cycles_min - few.lds_cycles_min,
        many.vmem_lines - few.vmem_lines,
        many.vmem_lines_min - few.vmem_lines_min,
    );
    assert_eq!(conflicts, 0, "bank conflicts:\n{table}");
}

#[test]
#[ignore = "62 kernels and those of 12 backward calls are compiled: cargo xtask test --all"]
fn the_committed_table_of_what_the_main_loop_asks_of_memory_is_current() {
    let records = Records::new();
    let folder = &records.folder;
    let mut table = COLUMNS.to_owned();
    for (arch, fp8) in ARCHS {
        let Some(backend) = amd::open(arch, "the main loop") else { return };
        for call in Call::all(fp8) {
            let of = |keys| counted(&backend, call.problem(keys), PlanOptions::default(), folder);
            add(&mut table, arch, &call.name(), &[KEYS, 2 * KEYS].map(of));
        }
        for (name, head_dim_qk) in [("bf16/latent 576x512", 576), ("bf16/decode d512", 512)] {
            let one_part = PlanOptions::default().kernel("cdna_decode").tile([("split_keys", "1024")]);
            let of = |keys| counted(&backend, shared_rows(head_dim_qk, keys), one_part.clone(), folder);
            add(&mut table, arch, name, &[KEYS, 2 * KEYS].map(of));
        }
        for head_dim in BACKWARD_HEAD_DIMS {
            assert_eq!(
                conflicts_of_backward(&backend, "cdna_bwd", head_dim, folder),
                0,
                "{arch}, head dim {head_dim}"
            );
        }
    }
    for (arch, fp8) in RDNA {
        let Some(backend) = amd::open(arch, "the main loop") else { return };
        for call in Call::of_rdna(fp8) {
            let of = |keys| counted(&backend, call.problem(keys), PlanOptions::default(), folder);
            add(&mut table, arch, &call.name(), &[KEYS, 2 * KEYS].map(of));
        }
        for head_dim in BACKWARD_HEAD_DIMS {
            assert_eq!(
                conflicts_of_backward(&backend, "rdna_bwd", head_dim, folder),
                0,
                "{arch}, head dim {head_dim}"
            );
        }
        for (at, (name, _)) in decode_of_rdna(KEYS).into_iter().enumerate() {
            let one_part = PlanOptions::default().kernel("rdna_decode").tile([("split_keys", "1024")]);
            let of =
                |keys| counted(&backend, decode_of_rdna(keys).swap_remove(at).1, one_part.clone(), folder);
            add(&mut table, arch, &name, &[KEYS, 2 * KEYS].map(of));
        }
    }
    let committed = include_str!("../../../../evidence/cdna-loop-memory.tsv");
    assert_eq!(table, committed, "tests/evidence/cdna-loop-memory.tsv is to be:\n{table}");
}

/// Checks one problem for each layout of rows: what the table of all problems says, in CI's time.
#[test]
fn no_banks_conflict_in_rdnas_main_loop_nor_in_the_backward() {
    let records = Records::new();
    for (arch, _) in RDNA {
        let Some(backend) = amd::open(arch, "the main loop") else { return };
        let call = Call::plain(DType::Bf16, 128);
        let counters = counted(&backend, call.problem(KEYS / 4), PlanOptions::default(), &records.folder);
        assert!(counters.lds_accesses > 0);
        assert_eq!(counters.lds_conflict_cycles, 0, "{arch}: {} cycles", counters.lds_cycles_min);
        assert_eq!(conflicts_of_backward(&backend, "rdna_bwd", 128, &records.folder), 0, "{arch}");
        for (name, problem) in decode_of_rdna(KEYS / 4) {
            if name == "bf16/decode d128" || name == "bf16/latent 576x512" {
                let named = PlanOptions::default().kernel("rdna_decode");
                let counters = counted(&backend, problem, named, &records.folder);
                assert_eq!(
                    counters.lds_conflict_cycles, 0,
                    "{arch} {name}: {} cycles",
                    counters.lds_cycles_min
                );
            }
        }
    }
    // Rows of half a line of banks, of which two are written at once.
    let Some(backend) = amd::open("gfx950", "the main loop") else { return };
    assert_eq!(conflicts_of_backward(&backend, "cdna_bwd", 64, &records.folder), 0);
}

/// Cycles that bank conflicts add to a backward call's launches.
fn conflicts_of_backward(backend: &Device, kernel: &str, head_dim: u32, folder: &Path) -> u64 {
    let dims = Dims {
        batch: 1,
        seqlen_q: 64,
        seqlen_k: 160,
        num_heads_q: 1,
        num_heads_kv: 1,
        head_dim_qk: head_dim,
        head_dim_v: head_dim,
    };
    let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims));
    let case = Case::backward("main loop", problem, Lengths::default(), Data { seed: 3, ..Data::default() });
    let counters = recorded(backend, &case, PlanOptions::default().kernel(kernel), folder);
    assert!(counters.lds_accesses > 0);
    counters.lds_conflict_cycles
}
