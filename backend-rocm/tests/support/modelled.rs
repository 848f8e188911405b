//! Reports of the compiler and of llvm-mca on a kernel: registers, LDS, and the passes of its main loop.
//! Modelled, not measured.

#![allow(clippy::unwrap_used, reason = "a test and the tool that writes its table: both fail by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use fmha_core::{BwdProblem, DType, Dims, FwdProblem, KeyLists, KvLayout, ListEntries, PlanOptions, QLayout};
use fmha_rocm::{Arch, Resources};

const OBJDUMP: &str = "llvm-objdump-22";
const MCA: &str = "llvm-mca-22";
/// Passes that llvm-mca 22 leaves out for V_MFMA_F32_32X32X64_F8F6F4 on FP8, which takes 16 passes, not 8.
const F8F6F4_UNCOUNTED: f64 = 8.0;

const COLUMNS: &str = "arch\tcall\tvgprs\tagprs\tspills\tlds_bytes\twaves_per_simd\tloop_passes\tmfma_passes\tmfma_percent\tvalu_passes\tsimd_percent\n";
/// Long sequences of many heads.
const DIMS: Dims = Dims::batch(4).seqlens(8192, 8192).heads(64, 8).head_dim(128);

/// Whether the two tools are there.
pub(crate) fn tools_are_there() -> bool {
    let there = [OBJDUMP, MCA].iter().all(|tool| Command::new(tool).arg("--version").output().is_ok());
    if !there {
        println!("absent: no {OBJDUMP} or no {MCA}, nothing was modelled");
    }
    there
}

/// The table for the types that `dtypes` accepts, tab-separated, with a header line.
pub(crate) fn table(dtypes: fn(DType) -> bool) -> String {
    let mut text = COLUMNS.to_owned();
    let mut kinds = Vec::new();
    for arch in Arch::CDNA {
        let fp8 = if arch == Arch::Gfx950 { DType::E4m3Fn } else { DType::E4m3Fnuz };
        kinds.extend([DType::F16, DType::Bf16, fp8].map(|dtype| (arch, dtype)));
    }
    kinds.retain(|(arch, dtype)| arch.multiplies(*dtype) && dtypes(*dtype));
    let rows_of = |&(arch, dtype): &(Arch, DType)| {
        [
            (64, "0", "single"),
            (128, "0", "single"),
            (128, "b", "single"),
            (128, "b", "static"),
            (256, "0", "single"),
        ]
        .map(|(head_dim, mask, order)| row(arch, dtype, head_dim, mask, order))
        .concat()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = kinds.iter().map(|kind| scope.spawn(move || rows_of(kind))).collect();
        for thread in threads {
            text += &thread.join().unwrap();
        }
    });
    text
}

pub(crate) fn row(arch: Arch, dtype: DType, head_dim: u32, mask: &str, order: &str) -> String {
    let dims = Dims { head_dim_qk: head_dim, head_dim_v: head_dim, ..DIMS };
    let mut problem = FwdProblem::batch(dtype, dims);
    problem.mask = mask.parse().unwrap();
    problem.write_lse = true;
    let backend = fmha_rocm::pretend(arch.name()).unwrap();
    let options = PlanOptions::default().tile([("order", order)]);
    let problem = problem.validate().unwrap();
    let plan = backend.plan_fwd(&problem, &options).unwrap();
    let code = super::support::code_object(&backend, &problem, &options);
    let waves = u64::from(plan.explain().launch.unwrap().threads / 64);
    let walks = if order == "static" { "/static" } else { "" };
    figures(arch, &format!("{dtype}/d{head_dim}/mask {mask}{walks}"), &code, waves)
}

/// Table of the backward's products, in the format of the forward's.
pub(crate) fn bwd_table() -> String {
    let mut text = COLUMNS.to_owned();
    let of_arch = |arch: Arch| [64, 128].map(|head_dim| bwd_rows(arch, head_dim)).concat();
    std::thread::scope(|scope| {
        let threads = Arch::CDNA.map(|arch| scope.spawn(move || of_arch(arch)));
        for thread in threads {
            text += &thread.join().unwrap();
        }
    });
    text
}

fn bwd_rows(arch: Arch, head_dim: u32) -> String {
    let dims = Dims { head_dim_qk: head_dim, head_dim_v: head_dim, ..DIMS };
    let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims)).validate().unwrap();
    let backend = fmha_rocm::pretend(arch.name()).unwrap();
    let options = PlanOptions::default();
    let plan = backend.plan_bwd(&problem, &options).unwrap();
    let row = |(kernel, code): &(String, Vec<u8>)| {
        let step = plan.steps().iter().find(|step| *step.kernel == **kernel).unwrap();
        let waves = u64::from(step.explain.launch.unwrap().threads / 64);
        figures(arch, &format!("{kernel}/bf16/d{head_dim}/mask 0"), code, waves)
    };
    super::support::products(&backend, &problem, &options).iter().map(row).collect()
}

const RDNA_COLUMNS: &str = "arch\tcall\tvgprs\tspills\tlds_bytes\twaves_per_simd\twmma\tvector\ttranscendental\tlds_reads\tmatrix_percent\n";

/// The table of the backward's products on WMMA: the instructions of one unmasked step of 32 rows, without copies
/// and without reloading a workgroup's own rows, and the matrix unit's share of its time. llvm-mca 22 gives WMMA
/// the rate of an addition, so here a matrix instruction takes the time that follows from the stated peak, a vector
/// instruction one cycle, and a transcendental one four.
pub(crate) fn rdna_bwd_table(rows: fn(Arch, u32) -> bool) -> String {
    let mut text = RDNA_COLUMNS.to_owned();
    let of_arch = |arch: Arch| {
        let head_dims = [64, 128, 192, 256].into_iter().filter(|&head_dim| rows(arch, head_dim));
        head_dims.map(|head_dim| rdna_bwd_rows(arch, head_dim)).collect::<String>()
    };
    std::thread::scope(|scope| {
        let threads = Arch::RDNA.map(|arch| scope.spawn(move || of_arch(arch)));
        for thread in threads {
            text += &thread.join().unwrap();
        }
    });
    text
}

fn rdna_bwd_rows(arch: Arch, head_dim: u32) -> String {
    let dims = Dims { head_dim_qk: head_dim, head_dim_v: head_dim, ..DIMS };
    let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims)).validate().unwrap();
    let backend = fmha_rocm::pretend(arch.name()).unwrap();
    let options = PlanOptions::default().kernel("rdna_bwd");
    let plan = backend.plan_bwd(&problem, &options).unwrap();
    let row = |(kernel, code): &(String, Vec<u8>)| {
        let step = plan.steps().iter().find(|step| *step.kernel == **kernel).unwrap();
        let threads = step.explain.launch.unwrap().threads;
        let found = Resources::of(code).unwrap();
        let usage = fmha_core::ResourceUsage {
            registers: u32::try_from(found.vgprs).ok(),
            shared_bytes: u32::try_from(found.lds_bytes).ok(),
            ..fmha_core::ResourceUsage::default()
        };
        let waves = arch.workgroups_per_compute_unit(&usage, threads) * (threads / 32) / 4;
        let file = scratch(arch, "co");
        std::fs::write(&file, code).unwrap();
        let step = main_loop(&file);
        std::fs::remove_file(&file).unwrap();
        let count = |is: &dyn Fn(&str) -> bool| step.iter().filter(|text| is(text)).count() as u32;
        let is_transcendental =
            |text: &str| ["v_exp_f32", "v_rcp_f32", "v_log_f32"].iter().any(|name| text.starts_with(name));
        let wmma = count(&|text| text.starts_with("v_wmma"));
        let transcendental = count(&is_transcendental);
        let vector = count(&|text| text.starts_with("v_")) - wmma - transcendental;
        let matrix = wmma * if arch == Arch::Gfx1100 { 32 } else { 16 };
        format!(
            "{}\t{kernel}/bf16/d{head_dim}/mask 0\t{}\t{}\t{}\t{waves}\t{wmma}\t{vector}\t{transcendental}\t{}\t{:.1}\n",
            arch.name(),
            found.vgprs,
            found.vgpr_spills + found.sgpr_spills,
            found.lds_bytes,
            count(&|text| text.starts_with("ds_load")),
            100.0 * f64::from(matrix) / f64::from(matrix + vector + 4 * transcendental),
        )
    };
    super::support::products(&backend, &problem, &options).iter().map(row).collect()
}

const DECODE_COLUMNS: &str = "arch\tcall\tvgprs\tspills\tlds_bytes\twaves_per_simd\tloop_passes\tmfma_passes\tloads_beside\tunit_bytes\tpercent_at_400ns\tpercent_at_800ns\tpercent_at_1600ns\n";
/// Keys of a step of decode's loop.
const DECODE_KEYS: u64 = 32;

/// A compute unit's share of memory bandwidth in bytes per cycle, from AMD's stated rates and clocks, for one die
/// of MI250X, for MI300X and for MI355X; and the clock in GHz.
fn memory_share(arch: Arch) -> (f64, f64) {
    let (bytes_per_second, ghz) = match arch {
        Arch::Gfx90a => (1.6e12, 1.7),
        Arch::Gfx942 => (5.3e12, 2.1),
        _ => (8.0e12, 2.4),
    };
    (bytes_per_second / f64::from(arch.num_compute_units()) / (ghz * 1e9), ghz)
}

/// Table of decode: memory traffic of the waves of a compute unit, in per cent of its share, for a given
/// latency of a load.
pub(crate) fn decode_table() -> String {
    let mut text = DECODE_COLUMNS.to_owned();
    let of_arch = |arch: Arch| {
        let all_keys = [(128, 128), (512, 512), (576, 512)].map(|dims| decode_row(arch, dims, false));
        let lists = [(128, 128), (576, 512)].map(|dims| decode_row(arch, dims, true));
        all_keys.concat() + &lists.concat()
    };
    std::thread::scope(|scope| {
        let threads = Arch::CDNA.map(|arch| scope.spawn(move || of_arch(arch)));
        for thread in threads {
            text += &thread.join().unwrap();
        }
    });
    text
}

/// Row of the table for paged rows with these head dimensions, as in `compiles.rs`; for 576/512 V lies in K.
/// `listed`: keys come from lists of addresses.
fn decode_row(arch: Arch, (head_dim_qk, head_dim_v): (u32, u32), listed: bool) -> String {
    let dims = Dims { seqlen_q: 2, head_dim_qk, head_dim_v, ..super::support::DIMS };
    let mut problem = FwdProblem::new(QLayout::Batch, KvLayout::Paged { page_size: 16 }, DType::Bf16, dims);
    let latent = head_dim_qk != head_dim_v;
    if latent {
        (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
    }
    if listed {
        let lists = KeyLists::new(&problem, 2048).entries(ListEntries::Addresses);
        problem = problem.lists(lists);
    }
    let lists = if listed { "/lists" } else { "" };
    let backend = fmha_rocm::pretend(arch.name()).unwrap();
    let options = PlanOptions::default().kernel("cdna_decode");
    let problem = problem.validate().unwrap();
    let code = super::support::code_object(&backend, &problem, &options);
    let found = Resources::of(&code).unwrap();
    let shared_by = if head_dim_qk > 256 { 4 } else { 1 };
    let file = scratch(arch, "co");
    std::fs::write(&file, &code).unwrap();
    // Loads are left out, since their latency is the table's parameter.
    let step: Vec<String> =
        main_loop(&file).into_iter().filter(|text| !text.starts_with("global_load")).collect();
    std::fs::remove_file(&file).unwrap();
    let passes = passes(arch, &step);
    // Number of loads that the strictest wait of a step leaves in flight: one tile of K or V, or none for latent
    // rows.
    let left =
        step.iter().filter_map(|text| text.split_once("vmcnt(")?.1.split(')').next()?.parse::<u32>().ok());
    let loads_beside = left.min().unwrap_or(0);
    let row_elems = if latent { head_dim_qk } else { head_dim_qk + head_dim_v };
    let waves = waves_per_simd(arch, &found, shared_by).min(2);
    let unit_bytes = 4 * waves * DECODE_KEYS * u64::from(row_elems) * 2 / shared_by;
    let (share, ghz) = memory_share(arch);
    // The model counts a wave's work other than loads as zero, and runs the waves of a SIMD one after another.
    let percent = |nanoseconds: f64| {
        let work = 4.0 * passes.total;
        let cycles = (work + nanoseconds * ghz).max(waves as f64 * work);
        100.0 * unit_bytes as f64 / cycles / share
    };
    format!(
        "{}\tbf16/{head_dim_qk}x{head_dim_v}{lists}\t{}\t{}\t{}\t{waves}\t{:.0}\t{:.0}\t{loads_beside}\t{unit_bytes}\t{:.0}\t{:.0}\t{:.0}\n",
        arch.name(),
        found.vgprs,
        found.vgpr_spills + found.sgpr_spills,
        found.lds_bytes,
        passes.total,
        passes.mfma,
        percent(400.0),
        percent(800.0),
        percent(1600.0),
    )
}

/// Line of a table for a kernel whose workgroups have `waves` waves.
fn figures(arch: Arch, call: &str, code: &[u8], waves: u64) -> String {
    let found = Resources::of(code).unwrap();
    let file = scratch(arch, "co");
    std::fs::write(&file, code).unwrap();
    let main_loop = main_loop(&file);
    let passes = passes(arch, &main_loop);
    std::fs::remove_file(&file).unwrap();
    format!(
        "{}\t{call}\t{}\t{}\t{}\t{}\t{}\t{:.0}\t{:.0}\t{:.1}\t{:.0}\t{:.1}\n",
        arch.name(),
        found.vgprs,
        found.agprs,
        found.vgpr_spills + found.sgpr_spills,
        found.lds_bytes,
        waves_per_simd(arch, &found, waves),
        passes.total,
        passes.mfma,
        100.0 * passes.mfma / passes.total,
        passes.valu,
        100.0 * passes.simd_share(waves_per_simd(arch, &found, waves) as f64),
    )
}

/// Path of a temporary file for this thread.
fn scratch(arch: Arch, extension: &str) -> PathBuf {
    let thread = format!("{:?}", std::thread::current().id()).replace(['(', ')'], "");
    let name = format!("fmha-modelled-{}-{thread}-{}.{extension}", std::process::id(), arch.name());
    std::env::temp_dir().join(name)
}

/// Waves that fit on a SIMD: it has 512 registers, allocated in groups of eight, and four SIMDs share the LDS
/// of a compute unit.
fn waves_per_simd(arch: Arch, found: &Resources, waves: u64) -> u64 {
    let by_registers = 512 / found.vgprs.div_ceil(8).max(1) / 8;
    let by_lds = u64::from(arch.lds_bytes()) / found.lds_bytes.max(1) * waves / 4;
    by_registers.min(by_lds).min(8)
}

struct Passes {
    total: f64,
    mfma: f64,
    valu: f64,
    /// Passes of the vector unit: `valu`, a pass for the issue of each matrix instruction, and the passes of
    /// exponentials that llvm-mca leaves out: four each, two on gfx950.
    vector: f64,
}

impl Passes {
    /// Modelled share of the matrix unit's time that `waves` waves on a SIMD fill together, if only the units limit
    /// them. The time is the longest of: all matrix passes, all vector passes, and one wave alone. No simulation.
    fn simd_share(&self, waves: f64) -> f64 {
        let matrix = waves * self.mfma;
        matrix / matrix.max(waves * self.vector).max(self.total)
    }
}

/// One step of the loop with the most matrix instructions. Among paths through the loop that execute all of them,
/// the one with the fewest other instructions is taken: the step without masking and rescaling.
pub(crate) fn main_loop(code: &Path) -> Vec<String> {
    let listing = output(Command::new(OBJDUMP).args(["-d", "--no-show-raw-insn"]).arg(code));
    let mut instructions: Vec<(u64, String)> = Vec::new();
    let mut targets: BTreeMap<u64, u64> = BTreeMap::new();
    for line in listing.lines().filter(|line| line.starts_with('\t')) {
        let Some((text, comment)) = line.trim().split_once("//") else { continue };
        let (address, rest) = comment.trim().split_once(':').unwrap_or((comment.trim(), ""));
        let Ok(address) = u64::from_str_radix(address, 16) else { continue };
        if text.contains("branch") {
            let offset = rest
                .split("+0x")
                .nth(1)
                .and_then(|hex| u64::from_str_radix(hex.trim_end_matches('>'), 16).ok());
            targets.insert(address, offset.unwrap_or(0));
        }
        instructions.push((address, text.trim().to_owned()));
    }
    let base = instructions[0].0;
    let starts: BTreeSet<u64> = targets.values().map(|offset| base + offset).collect();
    let mut blocks: Vec<Vec<(u64, String)>> = vec![Vec::new()];
    for (address, text) in instructions {
        let ends = text.contains("branch") || text.starts_with("s_endpgm");
        if starts.contains(&address) && !blocks[blocks.len() - 1].is_empty() {
            blocks.push(Vec::new());
        }
        blocks.last_mut().unwrap().push((address, text));
        if ends {
            blocks.push(Vec::new());
        }
    }
    blocks.retain(|block| !block.is_empty());
    let at: BTreeMap<u64, usize> = blocks.iter().enumerate().map(|(i, block)| (block[0].0, i)).collect();
    let after = |i: usize| {
        let (address, text) = blocks[i].last().unwrap();
        let falls = !text.starts_with("s_branch") && !text.starts_with("s_endpgm") && i + 1 < blocks.len();
        let jumps = targets.get(address).and_then(|offset| at.get(&(base + offset)).copied());
        falls.then_some(i + 1).into_iter().chain(jumps).collect::<Vec<_>>()
    };
    let worth = |i: usize| {
        let matrix = blocks[i].iter().filter(|(_, text)| is_matrix(text)).count() as i64;
        (matrix, -(blocks[i].len() as i64))
    };
    let mut best: Option<((i64, i64), Vec<usize>)> = None;
    for back in 0..blocks.len() {
        for head in after(back).into_iter().filter(|&head| head <= back) {
            // Basic blocks are in order of control flow, so one pass finds the best path to each.
            let mut ways: BTreeMap<usize, ((i64, i64), Vec<usize>)> =
                BTreeMap::from([(head, (worth(head), vec![head]))]);
            for i in head..back {
                let Some((value, way)) = ways.get(&i).cloned() else { continue };
                for next in after(i).into_iter().filter(|&next| next > i && next <= back) {
                    let (matrix, length) = worth(next);
                    let value = (value.0 + matrix, value.1 + length);
                    if ways.get(&next).is_none_or(|(old, _)| value > *old) {
                        ways.insert(next, (value, way.iter().copied().chain([next]).collect()));
                    }
                }
            }
            if let Some(found) =
                ways.remove(&back).filter(|found| best.as_ref().is_none_or(|best| found.0 > best.0))
            {
                best = Some(found);
            }
        }
    }
    let way = best.expect("a kernel with a main loop").1;
    way.iter()
        .flat_map(|&i| blocks[i].iter())
        .filter(|(_, text)| !text.contains("branch"))
        .flat_map(|(_, text)| without_swap(text))
        .collect()
}

fn is_matrix(text: &str) -> bool {
    text.contains("mfma") || text.contains("wmma")
}

/// Replaces V_PERMLANE32_SWAP_B32, the only vector instruction of two passes, because llvm-mca 22 never ends on
/// some loops with it. Two moves have the same operands and cost.
fn without_swap(text: &str) -> Vec<String> {
    let operands = text.strip_prefix("v_permlane32_swap_b32_e32 ").and_then(|rest| rest.split_once(", "));
    match operands {
        Some((a, b)) => vec![format!("v_mov_b32 {a}, {b}"), format!("v_mov_b32 {b}, {a}")],
        None => vec![text.to_owned()],
    }
}

fn passes(arch: Arch, main_loop: &[String]) -> Passes {
    const STEPS: f64 = 20.0;
    let file = scratch(arch, "s");
    std::fs::write(&file, main_loop.join("\n") + "\n").unwrap();
    let report = output(
        Command::new(MCA)
            .args(["-mtriple=amdgcn-amd-amdhsa", "--iterations=20", "--instruction-info=false"])
            .arg(format!("-mcpu={}", arch.name()))
            .arg(&file),
    );
    std::fs::remove_file(&file).unwrap();
    let total = report.lines().find_map(|line| line.strip_prefix("Total Cycles:")).unwrap();
    let pressure = report.split("Resource pressure per iteration:").nth(1).unwrap().lines().nth(2).unwrap();
    let pressure: Vec<f64> =
        pressure.split_whitespace().map(|number| number.parse().unwrap_or(0.0)).collect();
    let uncounted = F8F6F4_UNCOUNTED * main_loop.iter().filter(|text| text.contains("f8f6f4")).count() as f64;
    // The columns are llvm-mca's units HWBranch, HWExport, HWLGKM, HWSALU, HWVALU, HWVMEM and HWXDL.
    let of = |name: &str| main_loop.iter().filter(|text| text.contains(name)).count() as f64;
    let uncounted_exp = if arch == Arch::Gfx950 { 1.0 } else { 3.0 };
    Passes {
        vector: pressure[4] + of("mfma") + uncounted_exp * of("v_exp_f32"),
        total: total.trim().parse::<f64>().unwrap() / STEPS + uncounted,
        mfma: pressure[6] + uncounted,
        valu: pressure[4],
    }
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
