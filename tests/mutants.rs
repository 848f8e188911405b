//! Small mistakes made one at a time in the kernels' text: bounds, indices, signs, strides, constants, saturations. Each
//! mutant is compiled and run in emulation on a few cases that reach most of its kernel; one that none of them finds is
//! a gap in the battery, unless `evidence/mutants.reasons` says why nothing can tell.
//!
//! Thousands of them take hours: `cargo xtask test --all` runs one in [`EVERY`]; with `MUTANTS=I/N` in the environment it
//! is part I of N, with `MUTANTS_OF=sm90/bwd` that of the targets alone whose files have those words.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "planted/mod.rs"]
mod planting;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

use fmha_conformance::Regex;
use planting::{Fate, Fault, each, is_own_process};

/// Of all mutants, how many come to one run.
const EVERY: usize = 40;

/// The text of one kernel, and the cases that are to find what is wrong with it.
struct Target {
    folder: &'static str,
    /// Of the header's name, from `fmha/` on.
    files: &'static str,
    arch: &'static str,
    kernel: &'static str,
    tile: Option<&'static str>,
    environment: &'static [(&'static str, &'static str)],
    /// Tried in this order.
    cases: &'static [&'static str],
}

const HOPPER_CASES: &[&str] = &[
    "edges/off_tile/bf16/s193x176/b",
    "heads/group/bf16/ratio3kv2/s70x45",
    "rare/towering/bf16/negative_scale_group",
    "rare/nan_in_v/bf16/column_major_v_group",
    "edges/mask_sq_gt_sk/bf16/b:1,2,9",
    // Sink columns in a block that the window shows too, and another block beside it.
    "definition/random_137/f16/group/d64x64/h4kv2/s5x129/b:9,4,3",
    // Scores computed again of a kv head that is not its query head's number; of sink columns; loads by copies.
    "rare/towering/bf16/ratio3_group",
    "rare/towering/bf16/sink_columns",
    "guards/ends_at_unmapped/bf16/d33/s66x70/b:11,3,2",
    // A band that begins in the block of the sink columns and ends in the next.
    "edges/mask_sq_lt_sk/bf16/b:1,2,9",
];
const HOPPER_BACKWARD_CASES: &[&str] = &[
    "backward/edges/bf16/s65x130/b",
    "backward/field/short_sequences/bf16/d128/b",
    "backward/modifiers/bf16/d64/bias_softcap_dropout/group/0",
    // Rows computed again behind a mask.
    "backward/hidden/bf16/d64/b:60,3,2",
    // Sums in turns: behind a mask and in circles, by the storing thread and by the consumers of clusters.
    "backward/in_turns/bf16/d64/b:170,3,2",
    "backward/in_turns/bf16/d128/0",
    "backward/in_turns/bf16/d200/0",
    "backward/in_turns/bf16/d64/b:0,0",
    "backward/in_turns/bf16/d64/g:-30,1,2",
    // Clusters whose second CTA has no keys; query heads in parts, where multiprocessors have few tiles.
    "backward/wide/bf16/d256x256/used/b",
    "backward/wide/bf16/d192x128/b:70,3",
    "backward/head_dim/bf16/d64",
    "backward/field/gradients_of_odd_strides/bf16",
    "backward/modifiers/bf16/d64/dbias_one_one/batch/b:60,3,2",
    "backward/modifiers/bf16/d64/dbias_batch_head/batch/0",
    // Sequences that end amid a block of the bias, in front of others or of NaN.
    "backward/modifiers/bf16/d64/dbias_one_head/group/b",
    "backward/field/dbias_of_used_rows/bf16",
    "backward/modifiers/bf16/d64/sink/batch/b",
    "backward/field/sink_of_whole_blocks/bf16",
    "backward/modifiers/bf16/d64/alibi/group/b",
    "backward/modifiers/bf16/d64/large_softcap/batch/b:60,3,2",
    "backward/modifiers/bf16/d128/dropout/group/b",
];
const CDNA_CASES: &[&str] = &[
    "edges/off_tile/bf16/s193x176/b",
    "heads/group/bf16/ratio3kv2/s70x45",
    "rare/nan_in_v/bf16/gaps",
    "addresses/ragged_columns/bf16/k200/d64/odd_gap",
    "fp8/all/e4m3fnuz/o_e4m3fnuz/descale_head/r/b",
    "edges/mask_sq_gt_sk/bf16/b:1,2,9",
    // Rows that end inside a dword.
    "definition/pairs0_046/f16/group/d7x5/h1kv1/s33x70/0",
    // Columns of V in several chunks a thread, the last one element by element.
    "addresses/ragged_columns/bf16/k333/d128/odd_gap",
];
const ROW_CASES: &[&str] = &[
    "definition/pairs0_003",
    "heads/group/bf16/ratio3kv2/s70x45",
    "rare/nan_in_v/bf16/window",
    "definition/pairs0_010/e5m2fnuz/batch/d1x1/h9kv3/s70x33/b:9,4,3",
    "definition/pairs0_140/f32/group/d128x128/h9kv3/s1x65/b:9,4,3",
];

const TARGETS: [Target; 5] = [
    Target {
        folder: "kernels-cuda",
        files: "fmha/(sm90/fwd|common)/",
        arch: "sm_90a",
        kernel: "sm90",
        tile: None,
        // A worker has several tiles.
        environment: &[("FMHA_EMULATE_SMS", "2")],
        cases: HOPPER_CASES,
    },
    Target {
        folder: "kernels-cuda",
        files: "fmha/sm90/bwd/",
        arch: "sm_90a",
        kernel: "sm90",
        tile: None,
        environment: &[("FMHA_EMULATE_SMS", "4"), ("FMHA_EMULATE_MODE", "hb")],
        cases: HOPPER_BACKWARD_CASES,
    },
    Target {
        folder: "kernels-hip",
        files: "fmha/cdna/",
        arch: "gfx942",
        kernel: "cdna_fwd",
        tile: None,
        environment: &[],
        cases: CDNA_CASES,
    },
    Target {
        folder: "core/device",
        files: "fmha/(mask|seq|score|online_softmax|philox)",
        arch: "gfx942",
        kernel: "cdna_fwd",
        tile: None,
        environment: &[],
        cases: CDNA_CASES,
    },
    Target {
        folder: "core/device",
        files: "fmha/(row_fwd|num)",
        arch: "gfx942",
        kernel: "simt",
        tile: None,
        environment: &[],
        cases: ROW_CASES,
    },
];

/// What is replaced by what, in a line of code.
const EDITS: [(&str, &str); 24] = [
    (" < ", " <= "),
    (" <= ", " < "),
    (" > ", " >= "),
    (" >= ", " > "),
    (" == ", " != "),
    (" && ", " || "),
    (" + 1", ""),
    (" - 1", ""),
    (" + ", " - "),
    (" - ", " + "),
    (" * ", " + "),
    (" / ", " * "),
    ("min(", "max("),
    ("max(", "min("),
    ("seqlen_q", "seqlen_k"),
    ("seqlen_k", "seqlen_q"),
    ("q_row", "k_row"),
    ("k_row", "q_row"),
    ("i_head_kv", "i_head"),
    (".row", ".head"),
    (".head", ".row"),
    (".lo", ".hi"),
    (".hi", ".lo"),
    ("0.f", "1.f"),
];

/// Lines that are no code, or whose change the compiler would refuse or nobody could see.
fn is_code(line: &str) -> bool {
    let text = line.trim_start();
    let starts = ["//", "#", "template", "using", "static_assert", "namespace", "struct", "class", "enum"];
    !text.is_empty() && !starts.iter().any(|start| text.starts_with(start))
}

fn owned(environment: &[(&str, &str)]) -> BTreeMap<String, String> {
    environment.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Every mutant of one target.
fn mutants(target: &Target) -> Vec<Fault> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(target.folder);
    let wanted = Regex::new(&format!("^{}", target.files)).unwrap();
    let mut faults = Vec::new();
    for path in files(&root.join("fmha")) {
        let header = path.strip_prefix(&root).unwrap().display().to_string();
        if !wanted.is_match(&header) {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        for (at, line) in text.lines().enumerate().filter(|(_, line)| is_code(line)) {
            let code = line.split("//").next().unwrap_or(line);
            for (from, to) in EDITS.into_iter().filter(|(from, _)| code.contains(from)) {
                faults.push(Fault {
                    what: format!("{header}:{}: `{}`: `{from}` as `{to}`", at + 1, line.trim()),
                    arch: target.arch.to_owned(),
                    kernel: Some(target.kernel.to_owned()),
                    tile: target.tile.map(str::to_owned),
                    header: header.clone(),
                    text: from.to_owned(),
                    put: to.to_owned(),
                    line: Some(at + 1),
                    case: String::new(),
                    found_as: None,
                    environment: owned(target.environment),
                    sound_is_known: true,
                });
            }
        }
    }
    faults
}

fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        for path in std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path()) {
            if path.is_dir() { open.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    found
}

/// What the first case says that finds it, or of none that does.
fn judged(mutant: &Fault, cases: &[String]) -> Fate {
    let mut last = Fate::ChangesNothing;
    for case in cases {
        let fate = Fault { case: case.clone(), ..mutant.clone() }.run("the_fault_of_this_process");
        match fate {
            Fate::Found(_) | Fate::DoesNotCompile(_) | Fate::Absent(_) => return fate,
            Fate::Missed(_) => last = fate,
            Fate::ChangesNothing => {}
        }
    }
    last
}

/// Why nothing can tell: `header | part of the line | from | to | why`.
fn reason<'a>(reasons: &'a str, mutant: &Fault) -> Option<&'a str> {
    reasons.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
        let [header, part, from, to, why] = line.split(" | ").collect::<Vec<_>>()[..] else { return None };
        let same = header == mutant.header && mutant.what.contains(part);
        (same && from == mutant.text.trim() && to == mutant.put.trim()).then_some(why)
    })
}

/// The process of one mutant; elsewhere there is nothing to do.
#[test]
fn the_fault_of_this_process() {
    is_own_process();
}

#[test]
fn every_target_has_mutants_of_every_sort() {
    for target in &TARGETS {
        let mutants = mutants(target);
        let sorts = EDITS.iter().filter(|edit| mutants.iter().any(|mutant| mutant.text == edit.0)).count();
        println!(
            "{} {} {}: {} mutants of {sorts} sorts",
            target.folder,
            target.files,
            target.arch,
            mutants.len()
        );
        assert!(mutants.len() > 100 && sorts > 10, "{}: {} of {sorts}", target.files, mutants.len());
    }
}

#[test]
#[ignore = "a sample of thousands of mutants, each compiled: cargo xtask test --all"]
fn each_mutant_of_the_device_text_is_found_or_has_a_reason() {
    let part = std::env::var("MUTANTS").unwrap_or_else(|_| format!("1/{EVERY}"));
    let (index, count) = part.split_once('/').expect("MUTANTS=I/N");
    let (index, count): (usize, usize) = (index.parse().unwrap(), count.parse().unwrap());
    let reasons = include_str!("evidence/mutants.reasons");
    let names: Vec<String> = fmha_conformance::case::all().into_iter().map(|case| case.name).collect();
    let (table, survivors) = (Mutex::new(BTreeMap::<&str, usize>::new()), Mutex::new(Vec::new()));
    let of = std::env::var("MUTANTS_OF").unwrap_or_default();
    let wanted: Vec<&Target> = TARGETS.iter().filter(|target| target.files.contains(&of)).collect();
    assert!(!wanted.is_empty(), "MUTANTS_OF={of}: no target has such files");
    for target in wanted {
        let cases: Vec<String> = target
            .cases
            .iter()
            .map(|start| names.iter().find(|name| name.starts_with(start)).expect(start).clone())
            .collect();
        let all = mutants(target);
        let mine: Vec<&Fault> = all.iter().skip(index - 1).step_by(count).collect();
        each(&mine, |mutant| {
            let fate = judged(mutant, &cases);
            let sort = match &fate {
                Fate::Found(_) => "found",
                Fate::DoesNotCompile(_) => "does not compile",
                Fate::ChangesNothing => "changes no code",
                Fate::Absent(_) => "absent",
                Fate::Missed(_) if reason(reasons, mutant).is_some() => "has a reason",
                Fate::Missed(_) => "survives",
            };
            println!("{sort}: {} {}", target.arch, mutant.what);
            *table.lock().unwrap().entry(sort).or_default() += 1;
            if sort == "survives" {
                survivors.lock().unwrap().push(format!("{} {}", target.arch, mutant.what));
            }
        });
    }
    println!("mutants, part {index} of {count}: {:?}", table.lock().unwrap());
    let survivors = survivors.into_inner().unwrap();
    assert!(survivors.is_empty(), "{} mutants without a reason:\n{}", survivors.len(), survivors.join("\n"));
}
