//! Faults planted into the AMD kernels, each to be caught by name: by the emulator's checks, or by a case
//! of the battery. The kernels are the real ones; a script stands in for the compiler and spoils their text.

use std::fmt::Write as _;
use std::path::Path;

use super::{Ran, command, fmha};

/// A fault, where it is planted, and what must report it.
struct Planted {
    fault: &'static str,
    change: Change,
    /// Arguments of `fmha conformance`.
    line: &'static str,
    /// Messages of the emulator or the battery, one of which must appear.
    caught_by: &'static [&'static str],
}

/// Place and kind of the error that is planted in a kernel.
enum Change {
    /// Replaces the first text in a header by the second.
    Header(&'static str, &'static str, &'static str),
    /// The first instruction of this name is left out of the assembly.
    WithoutFirst(&'static str),
    /// Instruction of which all uses are removed.
    WithoutAny(&'static str),
}

const PLANTED: [Planted; 11] = [
    Planted {
        fault: "wrong lane map",
        change: Change::Header("mma/cdna.h", "8 * (i / kRun) + 4 * half", "8 * (i / kRun) + 4 * (1 - half)"),
        line: "--emulate gfx942 --filter ^edges/numbers/.*/bf16/s50x50/0$",
        caught_by: &["FAILED edges/numbers/"],
    },
    Planted {
        fault: "missing wait for memory",
        // Only the first wait is removed, which nothing depends on.
        change: Change::WithoutAny("s_waitcnt vmcnt"),
        line: "--emulate gfx942 --filter ^edges/off_tile/bf16/s65x63/b$",
        caught_by: &["MissingWait"],
    },
    Planted {
        fault: "missing barrier",
        change: Change::WithoutFirst("s_barrier"),
        line: "--emulate gfx942 --filter ^edges/off_tile/bf16/s129x127/0$",
        caught_by: &["LdsRace", "UninitLds"],
    },
    Planted {
        fault: "LDS overlap",
        change: Change::Header("cdna/config.h", "struct Stage {", "union Stage {"),
        line: "--emulate gfx942 --filter ^edges/off_tile/bf16/s129x127/0$",
        caught_by: &["LdsRace", "FAILED edges/off_tile/"],
    },
    Planted {
        fault: "last tile one key too long",
        change: Change::Header("cdna/tile_step.h", "key < job.span.seqlen_k", "key <= job.span.seqlen_k"),
        line: "--emulate gfx942 --filter ^edges/off_tile/bf16/s65x63/0$",
        caught_by: &["FAILED edges/off_tile/bf16/s65x63/0"],
    },
    Planted {
        fault: "diagonal one key too far",
        change: Change::Header("mask.h", "distance <= band.hi &&", "distance <= band.hi + 1 &&"),
        line: "--emulate gfx942 --filter ^edges/off_tile/bf16/s127x129/b$",
        caught_by: &["FAILED edges/off_tile/bf16/s127x129/b"],
    },
    Planted {
        fault: "read past a buffer",
        change: Change::Header(
            "cdna/load.h",
            "(rows.num_rows - 1) * rows.stride_bytes + rows.row_bytes",
            "rows.num_rows * rows.stride_bytes + 65536",
        ),
        line: "--emulate gfx942 --filter ^edges/off_tile/bf16/s65x63/0$",
        caught_by: &["OutOfBounds"],
    },
    Planted {
        fault: "FNUZ read as OCP",
        change: Change::Header(
            "num.h",
            "case DType::E4m3Fnuz: return {4, 3, 8,",
            "case DType::E4m3Fnuz: return {4, 3, 7,",
        ),
        line: "--emulate gfx942 --kernel simt --filter ^fp8/all/e4m3fnuz/o_f32/descale_plain/r/b$",
        caught_by: &["FAILED fp8/all/e4m3fnuz/"],
    },
    Planted {
        fault: "hidden V times zero",
        change: Change::Header(
            "cdna/nonfinite.h",
            "if (v_cmp_ballot(found != 0) == 0) return false;",
            "return false;",
        ),
        line: "--emulate gfx942 --filter ^edges/nan_in_v/f16/t$",
        caught_by: &["FAILED edges/nan_in_v/f16/t"],
    },
    Planted {
        fault: "dropout's words shifted by a key too few",
        change: Change::Header("dropout.h", "first & 2 ? both[r + 2]", "first & 2 ? both[r + 1]"),
        line: "--emulate gfx942 --filter ^parts/bf16/dropout/b/three_on/inside$",
        caught_by: &["FAILED parts/bf16/dropout/b/three_on/inside"],
    },
    Planted {
        fault: "dropout of the own keys as if their part began with four",
        change: Change::Header(
            "cdna/bwd/pairs.h",
            "key = at.own + p.dropout_key_of_quad",
            "key = at.own + 0 * p.dropout_key_of_quad",
        ),
        line: "--emulate gfx942 --filter ^backward/parts/bf16/dropout/b/two_on/inside$",
        caught_by: &["FAILED backward/parts/bf16/dropout/b/two_on/inside"],
    },
];

/// Whether the emulated devices and the compiler exist; prints what is absent.
pub(super) fn is_emulated_here() -> bool {
    let ran = fmha("explain --backend rocm --emulate gfx942 -s 64 -d 64");
    if ran.status != 0 {
        println!("absent: emulated AMD devices: {}", ran.err.lines().next().unwrap_or_default());
    }
    ran.status == 0
}

/// A compiler that spoils its input, and fails if there is nothing to spoil.
fn spoiling_compiler(planted: &Planted, clang: &str) -> String {
    let mut script = format!("#!/bin/sh\ncase \"$1\" in --*) exec {clang} \"$1\";; esac\n");
    let spoil = |awk: &str, from: &str, to: &str, whole: &str, spoilt: &str| {
        format!(
            "awk -v from='{from}' -v to='{to}' '{awk} END {{ exit !found }}' {whole} > {spoilt} \
             || {{ echo nothing to spoil >&2; exit 1; }}\n"
        )
    };
    match planted.change {
        Change::Header(file, from, to) => {
            // Works by index and length: no character of the text has a meaning for awk.
            const REPLACE: &str = "{ at = index($0, from) } at { found = 1; \
                 $0 = substr($0, 1, at - 1) to substr($0, at + length(from)) } { print }";
            // Some launches do not use the header.
            let _ = writeln!(script, "[ -f fmha/{file} ] || exec {clang} \"$@\"");
            script += &spoil(REPLACE, from, to, &format!("fmha/{file}"), "spoilt");
            let _ = write!(script, "mv spoilt fmha/{file}\nexec {clang} \"$@\"\n");
        }
        Change::WithoutFirst(instruction) | Change::WithoutAny(instruction) => {
            let first = matches!(planted.change, Change::WithoutFirst(_));
            let awk = if first {
                "index($0, from) && !found { found = 1; next } { print }"
            } else {
                "index($0, from) { found = 1; next } { print }"
            };
            let _ = write!(script, "{clang} \"$@\" -S || exit 1\nmv kernel.co whole.s\n");
            script += &spoil(awk, instruction, "", "whole.s", "spoilt.s");
            let _ = write!(
                script,
                "arch=$(sed -n 's/.*amdgcn-amd-amdhsa--\\(gfx[0-9a-f]*\\).*/\\1/p' whole.s | head -1)\n\
                 exec {clang} -target amdgcn-amd-amdhsa -mcpu=$arch -nogpulib spoilt.s -o kernel.co\n"
            );
        }
    }
    script
}

fn run_spoilt(planted: &Planted, folder: &Path) -> Ran {
    let clang = std::env::var("FMHA_HIP_CLANG").unwrap_or_else(|_| "clang-22".to_owned());
    let script = folder.join("spoil");
    std::fs::write(&script, spoiling_compiler(planted, &clang)).unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, executable).unwrap();
    let mut command = command(folder, &format!("conformance --backend rocm {}", planted.line));
    Ran::of(command.env("FMHA_HIP_CLANG", &script).env("FMHA_CACHE_DIR", "none").output().unwrap())
}

/// Instructions of the assembly, which no fault of `tests/planted/device.toml` leaves out, and one header.
fn is_of_the_sample(planted: &Planted) -> bool {
    !matches!(planted.change, Change::Header(file, ..) if file != "cdna/load.h")
}

#[test]
fn each_planted_fault_of_a_sample_is_caught_by_name() {
    are_caught(is_of_the_sample);
}

#[test]
#[ignore = "a minute of kernels, of each of which tests/planted has a fault: cargo xtask test --all"]
fn each_other_planted_fault_is_caught_by_name() {
    are_caught(|planted| !is_of_the_sample(planted));
}

fn are_caught(is_one: fn(&Planted) -> bool) {
    if !is_emulated_here() {
        return;
    }
    let mut missed = Vec::new();
    let chosen: Vec<&Planted> = PLANTED.iter().filter(|planted| is_one(planted)).collect();
    assert!(chosen.len() > 2, "{} faults", chosen.len());
    for planted in &chosen {
        let folder = tempfile::tempdir().unwrap();
        let ran = run_spoilt(planted, folder.path());
        let said = format!("{}{}", ran.err, ran.out);
        assert!(!said.contains("nothing to spoil"), "{}: its text is no longer there", planted.fault);
        let by = planted.caught_by.iter().find(|&&name| said.contains(name));
        match by.filter(|_| ran.status == 1) {
            Some(name) => {
                let line = said.lines().find(|line| line.contains(name)).unwrap_or_default();
                println!("{:<28} {}", planted.fault, line.chars().take(150).collect::<String>());
            }
            None => missed.push(format!("{} (status {}):\n{said}", planted.fault, ran.status)),
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
    println!("{} of {} planted faults, all caught", chosen.len(), PLANTED.len());
}
