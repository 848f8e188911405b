//! The battery on the AMD backend as it is, over the emulator's driver library. Verified in emulation,
//! never on hardware.
//!
//! Nearly all of the time goes into compiling kernels (two to six seconds each; the disk cache keeps them), so
//! they are dealt out: each architecture has one kernel in [`PARTS`], with all cases that it serves.
//! All of them: `cargo xtask test --all`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod amd;

use std::collections::HashSet;

use fmha_conformance::case::{Body, Case, all};
use fmha_conformance::deal::Deal;
use fmha_conformance::report::run_cases;
use fmha_conformance::run::{Options, Outcome};
use fmha_conformance::tensor::Operand;
use fmha_conformance::tensors::HostFwd;
use fmha_core::{AnyProblem, Device, PlanOptions};

const ARCHS: [&str; 3] = ["gfx90a", "gfx942", "gfx950"];

/// Number of parts into which the tile kernels of an architecture are divided. Each architecture runs other parts.
const PARTS: u64 = 90;
/// Cases that may fail on one architecture only, because of its matrix instructions or its waits.
const EVERYWHERE: [&str; 2] = ["edges/off_tile/bf16", "combine/bf16"];

/// Laws of bits with more tiles than a real device has units. Emulated devices use `bits/few`.
const FOR_A_WHOLE_DEVICE: &str = "bits/many/";

/// Cases that an architecture's hardware computes wrongly, with the reason. They are reported absent, and must fail.
const BEYOND_THE_HARDWARE: [(&str, &str, &str); 4] = [
    ("gfx90a", "definition/random_269/f16/group/d64x64/h8kv2/s1x1/b:-1,3", SUBNORMAL),
    ("gfx90a", "definition/pairs2_024/f16/gaps/d128x128/h9kv3/s64x64/b:0,0", SUBNORMAL),
    ("gfx90a", "edges/nan_beside_sink_columns/f16/g:0,-3,12", SUBNORMAL),
    ("gfx90a", "guards/ends_at_unmapped/f16/d33/s1x1/0", SUBNORMAL),
];
const SUBNORMAL: &str = "Q or K has a subnormal f16, which this architecture's matrix instructions read as 0";

/// Whether a value is subnormal in f16.
fn is_subnormal(bytes: &[u8]) -> bool {
    let bits = u16::from_le_bytes([bytes[0], bytes[1]]);
    bits & 0x7C00 == 0 && bits & 0x03FF != 0
}

#[test]
fn what_is_beyond_the_hardware_has_subnormals() {
    let cases = all();
    for (_, name, _) in BEYOND_THE_HARDWARE {
        let Some(Body::Forward(forward)) = cases.iter().find(|case| case.name == name).map(|case| &case.body)
        else {
            panic!("{name} is no forward case")
        };
        let host = HostFwd::new(forward.problem.clone(), &forward.lengths, forward.data).unwrap();
        let has = |operand| host.operands.get(operand).unwrap().elems().chunks(2).any(is_subnormal);
        assert!(has(Operand::Q) || has(Operand::K), "{name}");
    }
}

/// Text of the kernel that a case needs; `None` where the case is refused or only merges.
fn kernel(backend: &Device, case: &Case) -> Option<String> {
    let problem = case.problem()?.clone().validate().ok()?;
    let jobs = backend.precompiler()?.jobs(AnyProblem::Forward(&problem), &PlanOptions::default()).ok()?;
    // Launches that update or convert a cache have a text for each combination of the cache's facts.
    let is_tiled = |job: &&fmha_core::cache::KernelJob| !["cdna_update", "widen_cache"].contains(&job.kernel);
    Some(jobs.iter().find(is_tiled)?.source.entry.clone())
}

fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Cases for the tile kernel alone. What the fallback takes instead of it (operands apart from their alignment, pages),
/// [`the_fallback_takes_every_spec`] and the rows of `xtask/src/kernels.txt` take to it.
fn for_the_tile_kernel() -> impl Iterator<Item = Case> {
    let left_out = [
        "addresses/",
        "backward/",
        "bits/few_keys/",
        "code/backward/",
        "decode/",
        "lists/",
        "masks/backward/",
        "scales/",
        FOR_A_WHOLE_DEVICE,
    ];
    let mut cases = all();
    cases.retain(|case| !left_out.iter().any(|family| case.name.starts_with(family)));
    cases.into_iter().map(|mut case| {
        match &mut case.body {
            Body::Forward(forward) => forward.data.room.shift = 0,
            Body::Law(law) => law.forward.data.room.shift = 0,
            Body::Backward(_) | Body::Combine(_) => (),
        }
        case
    })
}

fn is_dealt_to(arch: usize, backend: &Device, case: &Case) -> bool {
    if EVERYWHERE.iter().any(|family| case.name.starts_with(family)) {
        return true;
    }
    // Refused cases are divided by their seeds.
    let card = kernel(backend, case).map_or(case.data().seed, |kernel| hash(&kernel));
    (card >> 20) % PARTS == arch as u64
}

/// The number was 1259 when each fact of a call was compiled in. FP8 over several blocks asks for 310 and 9,
/// and short queries' caches, which differ in layout and type, for 86 (FP8's four types on gfx90a and gfx942,
/// by their bits), with scales by rows for 11, over lists of keys for 42, and over two caches for 12. Masks as data ask
/// for kernels of their own.
#[test]
fn the_battery_asks_for_few_kernels() {
    for arch in ARCHS {
        let Ok(backend) = fmha_rocm::pretend(arch) else { panic!("{arch}") };
        let cases = all();
        // Cases of functions are left out, since each function has a text of its own.
        let left_out = ["backward/", "code/"];
        let forward =
            cases.iter().filter(|case| !left_out.iter().any(|family| case.name.starts_with(family)));
        let kernels: HashSet<String> = forward.filter_map(|case| kernel(&backend, case)).collect();
        let lists = kernels.iter().filter(|entry| entry.contains("ListDecodeParams")).count();
        let two = kernels.iter().filter(|entry| entry.contains("TwoDecodeParams")).count();
        let scaled = kernels.iter().filter(|entry| entry.contains("ScaledDecodeParams")).count();
        let of_decode = kernels.iter().filter(|entry| entry.contains("cdna/decode/")).count();
        let decode = of_decode - lists - two - scaled;
        let others = kernels.len() - of_decode;
        println!(
            "{arch}: {others} kernels, {decode} of decode, {scaled} with scales, {lists} over lists of keys, {two} over two \
             caches"
        );
        let (most, most_decode, most_lists, most_two, most_scaled) = (370, 90, 60, 16, 14);
        assert!(others > 0 && others <= most, "{arch}: {others}");
        assert!(decode <= most_decode && lists <= most_lists, "{arch}: {decode} and {lists}");
        assert!(two <= most_two && scaled <= most_scaled, "{arch}: {two} and {scaled}");
    }
}

/// Texts of the products of a backward case; empty where the case is refused.
fn products(backend: &Device, kernel: &str, case: &Case) -> Vec<String> {
    let Body::Backward(backward) = &case.body else { return Vec::new() };
    let Ok(problem) = backward.problem.clone().validate() else { return Vec::new() };
    let Some(compiler) = backend.precompiler() else { return Vec::new() };
    let options = PlanOptions::default().kernel(kernel.to_owned());
    let jobs = compiler.jobs(AnyProblem::Backward(&problem), &options).unwrap_or_default();
    jobs.into_iter().map(|job| job.source.entry).filter(|entry| entry.contains("kTile")).collect()
}

/// Products of the backward ask for few kernels: two or three for each of two types, of head dims in whole 64
/// (of RDNA 32), of five kinds of scores and every two modifiers of them, of two ways to load and to store,
/// of the gradients' types; under masks as data again.
#[test]
fn the_batterys_backward_asks_for_few_products() {
    let of_cdna = ARCHS.map(|arch| (arch, "cdna_bwd", 240));
    for (arch, kernel, most) in of_cdna.into_iter().chain([("gfx1100", "rdna_bwd", 390)]) {
        let Ok(backend) = fmha_rocm::pretend(arch) else { panic!("{arch}") };
        let mut cases = all();
        // Cases of functions are left out, since each function has a text of its own.
        cases.retain(|case| !case.name.starts_with("code/"));
        let taken: Vec<Vec<String>> = cases.iter().map(|case| products(&backend, kernel, case)).collect();
        let (cases, kernels) = (
            taken.iter().filter(|kernels| !kernels.is_empty()).count(),
            taken.iter().flatten().collect::<HashSet<_>>().len(),
        );
        println!("{arch}: {cases} cases, {kernels} products");
        assert!(cases >= 400 && kernels <= most, "{arch}: {cases} cases, {kernels} products");
    }
}

/// Backward cases on MFMA and on WMMA: those that may fail on one architecture only, and each kind of problem on one
/// architecture.
const BACKWARD: [(&str, &str, &[&str]); 5] = [
    (
        "gfx90a",
        "cdna_bwd",
        &["backward/head_dim/f16/d64", "backward/modifiers/f16/d128/alibi_softcap_dropout/group/"],
    ),
    (
        "gfx942",
        "cdna_bwd",
        &[
            "backward/head_dim/bf16/d128",
            "backward/hidden/bf16/d64/b:60,3,2",
            "backward/group_with_empty_sequences/bf16",
            "backward/over_blocks/bf16/d128/b:20,3,2",
            "backward/far_rows/bf16/dbias_batch_head/1e10/d64/0",
        ],
    ),
    ("gfx950", "cdna_bwd", &["backward/head_dim/bf16/d64", "backward/wide/bf16/d192x128/b:70,3"]),
    (
        "gfx1100",
        "rdna_bwd",
        &[
            "backward/hidden/bf16/d64/b:60,3,2",
            "backward/group_with_empty_sequences/bf16",
            "backward/modifiers/f16/d64/alibi_softcap_dropout/group/0",
            "backward/head_dim/f16/d3",
        ],
    ),
    ("gfx1201", "rdna_bwd", &["backward/head_dim/bf16/d64", "backward/wide/bf16/d192x128/b:70,3"]),
];

#[test]
fn the_backward_keeps_the_contract_on_every_emulated_architecture() {
    for (arch, kernel, names) in BACKWARD {
        let Some(backend) = amd::open(arch, "the battery's backward") else { return };
        let mut cases = all();
        cases.retain(|case| names.iter().any(|name| case.name.starts_with(name)));
        let options = Options {
            plan: PlanOptions::default().kernel(kernel.to_owned()),
            repro_words: format!("--emulate {arch} --kernel {kernel}"),
            ..Options::default()
        };
        let report = run_cases(&backend, &cases, &options, &|_, _, _| ());
        for case in report.failures() {
            println!("FAILED {}\n  {}\n  {}", case.name, case.text, case.repro);
        }
        println!("battery rocm ({arch}, emulated, kernel {kernel}): {}", report.summary);
        assert_eq!(report.summary.failed, 0, "{arch}");
        assert!(report.summary.passed >= names.len() as u64, "{arch}: {}", report.summary);
    }
}

#[test]
fn the_tile_kernel_keeps_the_contract_on_every_emulated_architecture() {
    let mut failed = 0;
    println!("absent: {FOR_A_WHOLE_DEVICE} on emulated devices: it is for those of hundreds of units");
    for (index, arch) in ARCHS.into_iter().enumerate() {
        let Some(backend) = amd::open(arch, "the battery") else { return };
        let mut cases: Vec<Case> =
            for_the_tile_kernel().filter(|case| is_dealt_to(index, &backend, case)).collect();
        // Only the tile kernel runs, and must refuse the rest as declared.
        let options = Options {
            plan: PlanOptions::default(),
            repro_words: format!("--emulate {arch}"),
            ..Options::default()
        };
        for (_, name, why) in BEYOND_THE_HARDWARE.iter().filter(|known| known.0 == arch) {
            let beyond: Vec<Case> = cases.extract_if(.., |case| case.name == *name).collect();
            let report = run_cases(&backend, &beyond, &options, &|_, _, _| ());
            assert_eq!(report.summary.failed, beyond.len() as u64, "{name} on {arch} fails no more");
            println!("absent: {name} on emulated {arch}: {why}");
        }
        let report = run_cases(&backend, &cases, &options, &|_, _, _| ());
        for case in report.failures() {
            println!("FAILED {}\n  {}\n  {}", case.name, case.text, case.repro);
        }
        println!("of the battery on rocm, {arch} emulated, the part dealt to it by its kernels:");
        for (family, summary) in report.families() {
            println!("{family:<12} {summary}");
        }
        println!("{:<12} {}", "all", report.summary);
        println!("battery rocm ({arch}, emulated): {}", report.summary);
        failed += report.summary.failed;
        assert!(report.summary.passed > 60, "{}", report.summary);
    }
    assert_eq!(failed, 0);
}

/// One in this many of a kernel's cases runs with so few workgroups that each walks several tiles, fewer than
/// the eight dies of AMD's devices and more. A kernel's cases differ in what a tile computes rather than in
/// how tiles are walked.
const OF_WALKS: u64 = 4;

#[test]
fn workgroups_that_walk_over_tiles_keep_the_contract_on_every_emulated_architecture() {
    walk_over_tiles(|case| (case.data().seed >> 8).is_multiple_of(OF_WALKS));
}

#[test]
#[ignore = "three times as many cases of the same kernels: cargo xtask test --all"]
fn workgroups_that_walk_over_tiles_keep_the_contract_in_the_other_cases() {
    walk_over_tiles(|case| !(case.data().seed >> 8).is_multiple_of(OF_WALKS));
}

fn walk_over_tiles(is_one: fn(&Case) -> bool) {
    let mut failed = 0;
    for (index, (arch, workgroups)) in ARCHS.into_iter().zip([3, 2, 11]).enumerate() {
        let Some(backend) = amd::open(arch, "the battery") else { return };
        let walks = |case: &Case| {
            let tiles = case.problem().map_or(0, |problem| {
                let dims = problem.dims;
                u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q.div_ceil(64))
            });
            tiles > workgroups
        };
        let cases: Vec<Case> = for_the_tile_kernel().filter(walks).collect();
        let count = workgroups.to_string();
        let tile = [("block_m", "64"), ("order", "static"), ("workgroups", count.as_str())];
        let options = Options {
            plan: PlanOptions::default()
                .tile(tile.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()),
            repro_words: format!("--emulate {arch} --tile block_m=64,order=static,workgroups={workgroups}"),
            ..Options::default()
        };
        // The parts have enough kernels that walk several tiles.
        let dealt: Deal = format!("{}/24", index + 3).parse().unwrap();
        let mut cases = dealt.of(cases, &backend, &options.plan);
        cases.retain(is_one);
        let report = run_cases(&backend, &cases, &options, &|_, _, _| ());
        for case in report.failures() {
            println!("FAILED {}\n  {}\n  {}", case.name, case.text, case.repro);
        }
        println!("battery rocm ({arch}, emulated, {workgroups} workgroups): {}", report.summary);
        failed += report.summary.failed;
        assert!(report.summary.passed > 4, "{}", report.summary);
    }
    assert_eq!(failed, 0);
}

/// The slow kernel computes cases that the tile kernel refuses, and a few others, of every type and family.
#[test]
fn the_fallback_takes_every_spec() {
    let Some(backend) = amd::open("gfx942", "the battery") else { return };
    let cases: Vec<Case> = all().into_iter().filter(|case| case.data().seed % 257 == 0).collect();
    let plan = PlanOptions::default().kernel("simt");
    let options =
        Options { plan, repro_words: "--emulate gfx942 --kernel simt".to_owned(), ..Options::default() };
    // The decode kernel reads FP8 caches and tree masks.
    let updates = |case: &Case| case.problem().is_some_and(|p| p.cache.dtype.is_some() || p.cache.tree_mask);
    let forward = |case: &&Case| {
        !case.name.starts_with(FOR_A_WHOLE_DEVICE)
            && !matches!(case.body, Body::Backward(_))
            && !case.name.starts_with("combine/")
            && !updates(case)
    };
    // Merging uses a kernel of another name.
    let forward: Vec<Case> =
        cases.iter().filter(forward).filter(|case| !case.name.contains("parts_combine")).cloned().collect();
    let report = run_cases(&backend, &forward, &options, &|_, _, _| ());
    for case in report.cases.iter().filter(|case| matches!(case.outcome, Outcome::Failed | Outcome::Refused))
    {
        println!("FAILED {}\n  {}\n  {}", case.name, case.text, case.repro);
    }
    println!("battery rocm (gfx942, emulated, kernel simt): {}", report.summary);
    assert_eq!((report.summary.failed, report.summary.refused), (0, 0));
    assert!(report.summary.passed > 12, "{}", report.summary);
}
