//! `cargo xtask mutation-amd`: the waits and barriers of CDNA's and RDNA's kernels left out one by one in the emulator.

use std::path::Path;
use std::process::Command;

use crate::setup::{self, loudly};

const ARCHS: [&str; 5] = ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"];

/// Kernels, and a problem for each: some whole tiles, an edge, two workgroups. `FP8` is the architecture's
/// own e4m3. Those of the forward with dropout and by elements take the simple loop, whose tiles come by wide
/// loads and by elements. Of decode the first launch is broken, whose waves are alone (D 128) or share their
/// rows' columns. Of the backward all launches are broken, masked and not, of dK with dV and of each alone.
const KERNELS: [(&str, &str); 11] = [
    ("bf16 D128 causal", "-b 1 --heads 1 -s 300 --seqlen-k 400 -d 128 --prec bf16 --mask b"),
    (
        "f16 D64 full, a scale below 0, sinks",
        "-b 1 --heads 1 -s 100 --seqlen-k 300 -d 64 --prec fp16 --softmax-scale -0.1 --sink",
    ),
    ("bf16 D100 causal, padded", "-b 1 --heads 1 -s 300 --seqlen-k 300 -d 100 --prec bf16 --mask b"),
    ("FP8 D128 full", "-b 1 --heads 1 -s 300 --seqlen-k 300 -d 128 --qscale kv --prec FP8"),
    (
        "bf16 D128 causal, walks over tiles",
        "-b 1 --heads 2 -s 300 --seqlen-k 200 -d 128 --prec bf16 --mask b --tile order=static,workgroups=2",
    ),
    (
        "bf16 D128 causal, dropout",
        "-b 1 --heads 1 -s 100 --seqlen-k 200 -d 128 --prec bf16 --mask b --p-drop 0.2",
    ),
    (
        "f16 D33 full, by elements, walks over tiles",
        "-b 1 --heads 4 -s 100 --seqlen-k 100 -d 33 --prec fp16 --tile order=static,workgroups=2",
    ),
    (
        "decode bf16 D128 causal, paged",
        "-b 1 --heads 4 --heads-kv 2 -s 3 --seqlen-k 100 -d 128 --prec bf16 --mask b --page-size 16 --kernel DECODE",
    ),
    (
        "decode bf16 576/512, V in K, causal, paged",
        "-b 1 --heads 16 --heads-kv 1 -s 1 --seqlen-k 100 -d 576 --head-dim-v 512 --v-in-k --prec bf16 --mask b \
         --page-size 16",
    ),
    (
        "backward bf16 D128 causal",
        "--backward -b 1 --heads 1 -s 70 --seqlen-k 100 -d 128 --prec bf16 --mask b",
    ),
    (
        "backward f16 D64 full, dropout, a group of heads",
        "--backward -b 1 --heads 2 --heads-kv 1 -s 130 --seqlen-k 40 -d 64 --prec fp16 --p-drop 0.2",
    ),
];

/// Launches of a recording that are to be broken, and their names.
fn broken(folder: &Path, title: &str) -> Result<Vec<(String, String)>, String> {
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    if title.starts_with("backward") {
        // The first file records the forward call, whose O and LSE the gradients need.
        files = files.split_off(files.len().min(1));
    } else {
        files.truncate(1);
    }
    let named = |(at, file): (usize, &std::path::PathBuf)| {
        let launch = if files.len() > 1 { format!(", launch {at}") } else { String::new() };
        (format!("{title}{launch}"), file.display().to_string())
    };
    Ok(files.iter().enumerate().map(named).collect())
}

/// Records launches, breaks them, and writes `target/nightly/cdna-mutation.md`.
pub(crate) fn run() -> Result<(), String> {
    let environment = setup::run();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    setup::build_with_emulators()?;
    let release = setup::target().join("release");
    let mut mutate = Command::new(setup::emulators().join("cdna-emu"));
    mutate.arg("mutate").current_dir(&root);
    for arch in ARCHS {
        for (i, (title, problem)) in KERNELS.iter().enumerate() {
            let fp8 = match arch {
                "gfx942" => "e4m3fnuz",
                // RDNA's kernels compute one tile in each workgroup.
                _ if arch.starts_with("gfx1") && problem.contains("order=") => continue,
                "gfx950" | "gfx1201" => "fp8",
                _ if problem.contains("FP8") => continue,
                _ => "",
            };
            let decode = if arch.starts_with("gfx1") { "rdna_decode" } else { "cdna_decode" };
            let folder = setup::target().join("mutation-amd").join(format!("{arch}-{i}"));
            // Files of an earlier run belong to other kernels.
            let _ = std::fs::remove_dir_all(&folder);
            std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
            let mut record = Command::new(release.join("fmha"));
            let lse = if title.starts_with("backward") { None } else { Some("--lse") };
            record
                .args(["run", "--backend", "rocm", "--emulate", arch, "--warmup", "0", "--repeat", "1"])
                .args(lse)
                .args(problem.replace("FP8", fp8).replace("DECODE", decode).split_whitespace())
                .env("FMHA_EMULATE_RECORD", &folder)
                .envs(environment.iter().cloned())
                .current_dir(&root);
            loudly(&mut record)?;
            for (name, file) in broken(&folder, title)? {
                mutate.arg(format!("{arch}, {name}={file}"));
            }
        }
    }
    mutate.args(["--sources", "kernels-hip", "--sources", "core/device"]).args([
        "--reasons",
        "tests/evidence/cdna-mutation.reasons",
        "--out",
    ]);
    mutate.arg(setup::page("cdna-mutation.md", "cdna-emu mutate")?);
    loudly(&mut mutate)
}
