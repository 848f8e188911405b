//! `cargo xtask mutation`: the sm90 and sm100 kernels broken instruction by instruction in the emulator.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::setup::{self, loudly};

/// A page: which kernel's, on what, and what is broken.
type Page = (&'static str, &'static str, &'static [(&'static str, &'static [&'static str])]);

/// One page a kernel.
const PAGES: [Page; 2] = [("sm90", "sm_90a", KERNELS), ("sm100", "sm_100a", BLACKWELL)];

/// The Blackwell kernel: as [`KERNELS`].
const BLACKWELL: &[(&str, &[&str])] = &[
    (
        "two query tiles, full, D 128",
        &[
            "-b 1 --heads 3 -s 300 --seqlen-k 700 -d 128 --prec bf16",
            "-b 1 --heads 5 -s 150 --seqlen-k 100 -d 128 --prec bf16",
        ],
    ),
    (
        "two query tiles, causal, packed sequences, D 64",
        &[
            "--mode 1 -b 3 --heads 2 -s 150,300,40 --seqlen-k 200,430,100 -d 64 --prec f16 --mask b --tile stages=3",
            "--mode 1 -b 4 --heads 3 -s 150,30,140,100 --seqlen-k 20,30,200,70 -d 64 --prec f16 --mask b --tile stages=3",
        ],
    ),
    (
        "a lone query tile, window, D 256",
        &[
            "-b 1 --heads 3 -s 300 -d 256 --prec bf16 --mask b:100,0 --tile cluster=1,block_n=64",
            "-b 1 --heads 5 -s 70 --seqlen-k 50 -d 256 --prec bf16 --mask b:100,0 --tile cluster=1,block_n=64",
        ],
    ),
    (
        "pairs of CTAs, causal, packed sequences, D 256",
        &[
            "--mode 1 -b 2 --heads 2 -s 300,270 --seqlen-k 430,330 -d 256 --prec bf16 --mask b --tile cluster=2,block_n=128",
            "--mode 1 -b 4 --heads 3 -s 150,30,140,100 --seqlen-k 20,30,200,70 -d 256 --prec bf16 --mask b --tile cluster=2,block_n=128",
        ],
    ),
    (
        "loads by copies, causal, D 64",
        &[
            "-b 1 --heads 3 -s 300 --seqlen-k 437 -d 64 --prec bf16 --mask b --tile copy_bytes=8,stages=2",
            // A warp's lanes arrive together: an arrival less tells after as many phases as it has lanes.
            "-b 1 --heads 72 -s 70 -d 64 --prec bf16 --mask b --tile copy_bytes=8,block_m=256,stages=2",
        ],
    ),
    (
        "keys in parts, packed heads, D 128",
        &["-b 2 --heads 8 --heads-kv 2 -s 3 --seqlen-k 700 -d 128 --prec bf16 --mask b --tile stages=2"],
    ),
];

/// Kernels, and the problems that make each of their instructions matter: long tiles, tiles of one block, both in turn.
pub(crate) const KERNELS: &[(&str, &[&str])] = &[
    (
        "full, D 128",
        &[
            "-b 1 --heads 4 -s 200 --seqlen-k 700 -d 128 --prec f16",
            "-b 1 --heads 8 -s 300 --seqlen-k 100 -d 128 --prec f16",
        ],
    ),
    (
        "causal, D 128",
        &[
            "-b 1 --heads 2 -s 700 -d 128 --prec bf16 --mask t",
            "-b 1 --heads 4 -s 200 -d 128 --prec bf16 --mask t",
            "-b 1 --heads 3 -s 200 -d 128 --prec bf16 --mask t",
            "-b 1 --heads 3 -s 138 --seqlen-k 202 -d 128 --prec bf16 --mask b",
        ],
    ),
    (
        "window with sinks, D 64, three consumers",
        &[
            "-b 1 --heads 2 -s 700 -d 64 --prec f16 --mask b:100,0,20",
            "-b 1 --heads 3 -s 250 --seqlen-k 180 -d 64 --prec f16 --mask b:100,0,20",
            "-b 1 --heads 4 -s 250 --seqlen-k 180 -d 64 --prec f16 --mask b:100,0,20",
        ],
    ),
    (
        "causal, D 128, no lookahead",
        &[
            "-b 1 --heads 2 -s 700 -d 128 --prec bf16 --mask b --tile lookahead=0",
            "-b 1 --heads 1 -s 300 --seqlen-k 437 -d 128 --prec bf16 --mask b --tile lookahead=0",
            "-b 1 --heads 4 -s 70 -d 128 --prec bf16 --mask b --tile lookahead=0",
        ],
    ),
    (
        "causal, D 256, Q in pieces",
        &[
            "-b 1 --heads 2 -s 400 -d 256 --prec bf16 --mask b",
            "-b 1 --heads 1 -s 300 --seqlen-k 437 -d 256 --prec bf16 --mask b",
            "-b 1 --heads 4 -s 70 -d 256 --prec bf16 --mask b",
            "-b 1 --heads 5 -s 70 --seqlen-k 60 -d 256 --prec bf16 --mask b",
            "-b 1 --heads 5 -s 100 --seqlen-k 50 -d 256 --prec bf16 --mask b",
        ],
    ),
    (
        "packed query heads, one consumer",
        &[
            "-b 3 --heads 8 --heads-kv 2 -s 5 --seqlen-k 600 -d 128 --prec bf16 --mask b",
            "-b 5 --heads 8 --heads-kv 2 -s 5 --seqlen-k 60 -d 128 --prec bf16 --mask b",
        ],
    ),
    (
        "packed sequences, causal, D 128",
        &[
            "--mode 1 -b 3 --heads 2 -s 150,300,40 --seqlen-k 200,330,100 -d 128 --prec bf16 --mask b",
            "--mode 1 -b 4 --heads 3 -s 50,30,40,100 --seqlen-k 20,30,200,70 -d 128 --prec bf16 --mask b",
        ],
    ),
    (
        "column-major V, packed sequences, causal, D 128",
        &[
            "--mode 1 -b 3 --heads 2 -s 150,300,40 --seqlen-k 202,334,104 -d 128 --prec bf16 --mask b --vlayout c",
            "--mode 1 -b 4 --heads 3 -s 50,30,40,100 --seqlen-k 20,30,200,70 -d 128 --prec bf16 --mask b --vlayout c",
        ],
    ),
    (
        "causal with dropout, D 96, three consumers",
        &[
            "-b 1 --heads 2 -s 500 -d 96 --prec f16 --mask t --p-drop 0.2",
            "-b 1 --heads 4 -s 200 -d 96 --prec f16 --mask t --p-drop 0.2",
            "-b 1 --heads 3 -s 200 --seqlen-k 290 -d 96 --prec f16 --mask b --p-drop 0.2",
        ],
    ),
    (
        "Q in registers, two buffers, causal, D 64",
        &[
            "-b 1 --heads 2 -s 500 -d 64 --prec bf16 --mask t --tile q_in_registers=1",
            "-b 1 --heads 4 -s 200 -d 64 --prec bf16 --mask t --tile q_in_registers=1",
            "-b 1 --heads 3 -s 138 --seqlen-k 250 -d 64 --prec bf16 --mask b --tile q_in_registers=1",
        ],
    ),
    (
        "Q in registers, one buffer, causal, D 64",
        &[
            "-b 1 --heads 2 -s 500 -d 64 --prec bf16 --mask t --tile q_in_registers=1,lookahead=0",
            "-b 1 --heads 3 -s 138 --seqlen-k 250 -d 64 --prec bf16 --mask b --tile q_in_registers=1,lookahead=0",
        ],
    ),
    (
        "clusters of two, D 128",
        &[
            "-b 1 --heads 4 -s 200 --seqlen-k 700 -d 128 --prec f16 --tile cluster=2",
            "-b 1 --heads 8 -s 300 --seqlen-k 100 -d 128 --prec f16 --tile cluster=2",
        ],
    ),
    (
        "clusters of two that draw, causal, D 64",
        &[
            "-b 1 --heads 4 -s 700 --seqlen-k 300 -d 64 --prec bf16 --mask b --tile cluster=2,order=dynamic,block_m=128",
            "-b 1 --heads 3 -s 600 -d 64 --prec bf16 --mask b --tile cluster=2,order=dynamic,block_m=128",
        ],
    ),
    (
        "clusters of two heads that draw, causal, D 64",
        &[
            "-b 1 --heads 4 --heads-kv 2 -s 500 -d 64 --prec bf16 --mask t \
             --tile cluster=2,cluster_heads=1,order=dynamic,pack_gqa=0,block_m=128",
            "-b 1 --heads 6 --heads-kv 3 -s 138 --seqlen-k 250 -d 64 --prec bf16 --mask b \
             --tile cluster=2,cluster_heads=1,order=dynamic,pack_gqa=0,block_m=128",
        ],
    ),
    (
        "loads by copies, causal, D 64",
        &[
            "-b 1 --heads 2 -s 500 -d 64 --prec bf16 --mask t --tile copy_bytes=8",
            "-b 1 --heads 3 -s 138 --seqlen-k 250 -d 64 --prec bf16 --mask b --tile copy_bytes=8",
            // A warp's lanes arrive together: an arrival less tells after as many phases as it has lanes.
            "-b 1 --heads 72 -s 100 -d 64 --prec bf16 --mask t --tile copy_bytes=8",
        ],
    ),
    (
        "no load role, packed sequences, causal, D 128",
        &[
            "--mode 1 -b 3 --heads 2 -s 150,300,40 --seqlen-k 200,330,100 -d 128 --prec bf16 --mask b \
             --tile warp_specialised=0",
            "--mode 1 -b 4 --heads 3 -s 50,30,40,100 --seqlen-k 20,30,200,70 -d 128 --prec bf16 --mask b \
             --tile warp_specialised=0",
        ],
    ),
];

/// Multiprocessors: the fewest, so that a CTA walks several tiles.
pub(crate) fn sms(title: &str) -> &'static str {
    if title.starts_with("clusters of two") || title.starts_with("pairs of CTAs") { "2" } else { "1" }
}

/// The sound kernel's, each with other delays.
const SCHEDULES: u32 = 100;

/// Records the launches, breaks them, rewrites `tests/evidence/KERNEL-mutation.md` of each kernel, or of `only` one.
pub(crate) fn run(only: Option<&str>) -> Result<(), String> {
    let known: Vec<&str> = PAGES.iter().map(|(kernel, ..)| *kernel).collect();
    if let Some(kernel) = only.filter(|kernel| !known.contains(kernel)) {
        return Err(format!("kernel `{kernel}` has no page of mutants: {}", known.join(", ")));
    }
    PAGES.iter().filter(|(kernel, ..)| only.is_none_or(|only| only == *kernel)).try_for_each(run_page)
}

fn run_page((kernel, arch, kernels): &Page) -> Result<(), String> {
    let environment = setup::run();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let build = |packages: &[&str]| {
        loudly(Command::new(env!("CARGO")).args(["build", "--release"]).args(packages).current_dir(&root))
    };
    build(&[])?;
    build(&["-p", "fmha-emu-ptx"])?;
    let release = setup::target().join("release");
    let launches = setup::target().join("mutation").join(kernel);
    let mut mutate = Command::new(release.join("ptx-emu"));
    mutate.arg("mutate").current_dir(&root);
    for (i, (title, problems)) in kernels.iter().enumerate() {
        for (j, problem) in problems.iter().enumerate() {
            let folder = launches.join(format!("{i}-{j}"));
            // What an earlier run left there would count as launches of this one.
            if folder.exists() {
                std::fs::remove_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
            }
            let mut record = Command::new(release.join("ptx-emu"));
            record.arg("record").arg(&folder).args(["--sms", sms(title), "--"]).arg(release.join("fmha"));
            record
                .args([
                    "run",
                    "--backend",
                    "cuda",
                    "--kernel",
                    kernel,
                    "--emulate",
                    arch,
                    "--warmup",
                    "0",
                    "--repeat",
                    "1",
                ])
                .args(problem.split_whitespace())
                .envs(environment.iter().cloned())
                .current_dir(&root);
            loudly(&mut record)?;
            for launch in recorded(&folder)? {
                mutate.arg(format!("{title}={}", launch.display()));
            }
        }
    }
    mutate
        .args(["--schedules", &SCHEDULES.to_string(), "--wrappers", "fmha/ptx/"])
        .args(["--sources", "kernels-cuda", "--sources", "core/device"])
        .args(["--reasons", &format!("tests/evidence/{kernel}-mutation.reasons")])
        .args(["--out", &format!("tests/evidence/{kernel}-mutation.md")]);
    loudly(&mut mutate)
}

fn recorded(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort_unstable();
    // A kernel that merges what the first one left synchronises nothing.
    paths.truncate(1);
    if paths.is_empty() { Err(format!("{}: nothing was recorded", folder.display())) } else { Ok(paths) }
}
