//! A row has the same bits in training, in a prompt's chunks and in decoding. The test compares drawn pairs of calls
//! that share rows, on the CPU and on emulated devices.
//!
//! `ROWS_SEED` and `ROWS_PAIRS` set what the long searches draw; `ROWS_ONLY` a seed of one pair.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;

use fmha_conformance::apart::run_test;
use fmha_conformance::rows::{
    BLOCKS, Bounds, Keys, Outcome, Planning, Rare, SHORT, Story, View, compare, compare_gradients, draw,
    draw_training, is_far_apart,
};
use fmha_core::{BlockFormat, BwdProblem, DType, Device, FwdProblem, Intervals, MaskAxes, PlanOptions};
use fmha_cpu::{Config, CpuBackend};

/// Bounds of pairs for the CPU, whose parts have this many keys.
const CPU: Bounds = Bounds {
    dtypes: &[DType::Bf16, DType::F16, DType::F32],
    part: 512,
    most_rows: 400,
    dims: &[8, 16, 33, 64],
    fp8_caches: true,
    rare: &[
        Rare::Fp8(DType::E4m3Fn),
        Rare::Fp8(DType::E5m2),
        Rare::Scales(BlockFormat::Mxfp8E4m3),
        Rare::Scales(BlockFormat::Nvfp4),
        Rare::Latent,
        Rare::Score,
    ],
    forced: true,
};

/// Bounds of pairs for an emulated device, as SHORT but with latent attention, and half of the pairs far apart.
const EMULATED: Bounds = Bounds { rare: &[Rare::Latent], forced: true, ..SHORT };

/// Tile fields of an architecture that make parts of as many keys as [`SHORT`] has. Hopper's kernels have no field
/// `tma`.
fn in_parts(arch: &str) -> Vec<(&'static str, &'static str)> {
    let tma = (arch != "sm_90a").then_some(("tma", "0"));
    tma.into_iter().chain([("split_keys", "128"), ("fixed_parts", "1")]).collect()
}

/// Bounds with lengths around one part and around two.
const OWN_PARTS: Bounds = Bounds { part: 1100, most_rows: 20, dims: &[64, 128], ..SHORT };

/// Bounds of an architecture. On Hopper a call has one of two kernels, whose blocks divide parts of 128 keys; `sm80`
/// computes a score function.
fn bounds(arch: &str) -> Bounds {
    let bounds = Bounds { rare: &[Rare::Latent, Rare::Score], ..EMULATED };
    if arch == "sm_90a" { Bounds { dims: &[16, 64, 128, 200], ..bounds } } else { bounds }
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

/// A drawn pair, and how it is compared.
type Draw = fn(u64, &Bounds) -> (Story, [View; 2]);
type Compare = fn(&Device, &Story, &[View; 2], &Planning) -> fmha_core::Result<Outcome>;
const FORWARD: (Draw, Compare) = (draw, compare);
const BACKWARD: (Draw, Compare) = (draw_training, compare_gradients);

/// Compares this many pairs, and prints how many were compared.
fn search(
    device: &Device,
    (draw, compare): (Draw, Compare),
    (first, pairs): (u64, u64),
    bounds: &Bounds,
    planning: &Planning,
) -> BTreeMap<&'static str, u64> {
    let mut counts = BTreeMap::new();
    let seeds: Vec<u64> = match std::env::var("ROWS_ONLY") {
        Ok(text) => vec![text.parse().unwrap()],
        Err(_) => (0..pairs).map(|at| first + at).collect(),
    };
    for seed in seeds {
        let (story, views) = draw(seed, bounds);
        let compared = compare(device, &story, &views, planning);
        let compared =
            compared.unwrap_or_else(|error| panic!("pair {seed}: {error}\n{story:#?}\n{views:#?}"));
        let said = match compared {
            Outcome::Equal([a, b]) if a != b => "equal by two kernels",
            Outcome::Equal([a, _]) if a == "sm90" => "equal by wgmma",
            Outcome::Equal(_) => "equal",
            Outcome::Refused(reason) => {
                assert!(planning.refuses, "{seed}: {reason}\n{story:#?}\n{views:#?}");
                "refused"
            }
            Outcome::Differ(what) => {
                assert!(planning.unasked, "pair {seed}: {what}\n{story:#?}\n{views:#?}");
                "differ"
            }
        };
        *counts.entry(said).or_insert(0) += 1;
    }
    counts
}

/// The CPU as a device with this number of threads.
fn cpu(threads: usize) -> Device {
    let config = Config { threads: Some(threads), ..Config::default() };
    Device::new(CpuBackend::with(config).unwrap())
}

#[test]
fn a_row_has_the_same_bits_in_every_call_of_the_cpu() {
    let counts = search(&cpu(1), FORWARD, (1, 60), &CPU, &Planning::default());
    assert_eq!(counts.get("equal"), Some(&60));
}

#[test]
fn a_row_has_the_same_gradients_in_every_call_of_the_cpu() {
    let counts = search(&cpu(1), BACKWARD, (1, 30), &CPU, &Planning::default());
    assert_eq!(counts.get("equal"), Some(&30));
    let counts = search(&cpu(3), BACKWARD, (31, 30), &CPU, &Planning::default());
    assert_eq!(counts.get("equal"), Some(&30));
}

/// The search finds differing pairs where the promise is not requested.
#[test]
fn pairs_differ_where_nobody_asks_for_equal_rows() {
    let counts = search(&cpu(1), FORWARD, (1, 60), &CPU, &Planning { unasked: true, ..Planning::default() });
    assert!(counts.get("differ").is_some_and(|&count| count >= 5), "{counts:?}");
}

/// Half of the pairs that long searches draw, and more, have a row that sees three parts, at two places of a tile; some
/// of these are a training call's. All that few stories have is among them.
#[test]
fn half_of_the_drawn_pairs_span_three_parts_at_two_places_of_a_tile() {
    for (name, bounds, first, pairs) in [
        ("the CPU", CPU, 1 << 20, 2000),
        ("sm_80", bounds("sm_80"), 100, 60),
        ("sm_90a", bounds("sm_90a"), 100, 60),
        ("AMD", EMULATED, 100, 200),
    ] {
        let drawn: Vec<_> = (first..first + pairs).map(|seed| draw(seed, &bounds)).collect();
        let far: Vec<_> =
            drawn.iter().filter(|(story, views)| is_far_apart(story, views, bounds.part)).collect();
        let trained =
            far.iter().filter(|(_, views)| views.iter().any(|view| view.rows.start == 0)).count() as u64;
        assert!(far.len() as u64 >= pairs / 2, "{name}: {} of {pairs} pairs are far apart", far.len());
        assert!(trained >= pairs / 16, "{name}: {trained} of {pairs} pairs have a long training call");
        for rare in bounds.rare {
            let count = drawn.iter().filter(|(story, _)| story.rare == Some(*rare)).count();
            assert!(count > 0, "{name}: no story of {pairs} has {rare:?}");
        }
    }
}

#[test]
#[ignore = "a minute: two thousand pairs"]
fn a_row_has_the_same_bits_in_every_call_of_the_cpu_in_two_thousand_pairs() {
    let (first, pairs) = (number("ROWS_SEED", 1 << 20), number("ROWS_PAIRS", 2000));
    for threads in [1, 3] {
        let counts = search(&cpu(threads), FORWARD, (first, pairs), &CPU, &Planning::default());
        println!("{threads} threads: {counts:?}");
    }
}

fn emulated(arch: &str, pairs: (u64, u64)) {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        return println!("absent: {reason}");
    }
    let device = fmha_cuda::open(0, Some(arch)).unwrap();
    let planning = Planning { plan: PlanOptions::default().tile(in_parts(arch)), ..Planning::default() };
    let counts = search(&device, FORWARD, pairs, &bounds(arch), &planning);
    println!("{arch}: {counts:?}");
    if arch == "sm_90a" {
        let of_both =
            ["equal by two kernels", "equal by wgmma"].map(|said| counts.get(said).copied().unwrap_or(0));
        assert!(!of_both.contains(&0), "{arch}: each kernel has rows, and both have the same: {counts:?}");
    }
    if arch == "sm_90a" {
        let planning = Planning { of_second: Some(folding(128)), refuses: true, ..planning };
        let counts = search(&device, FORWARD, pairs, &bounds(arch), &planning);
        println!("{arch}, the second folds as it goes: {counts:?}");
    }
    // Plans without tile fields compute whole rows or parts of 2048 keys; both are compared.
    let (first, count) = pairs;
    let own = search(&device, FORWARD, (first, count.div_ceil(10)), &OWN_PARTS, &Planning::default());
    println!("{arch}, parts of its own: {own:?}");
    let gradients =
        search(&device, BACKWARD, (first, count.div_ceil(4)), &bounds(arch), &Planning::default());
    println!("{arch}, gradients: {gradients:?}");
}

/// Gradients of pairs of training calls on Hopper, whose key blocks add to dQ one after another.
fn gradients_on_hopper(pairs: (u64, u64)) {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        return println!("absent: {reason}");
    }
    let device = fmha_cuda::open(0, Some("sm_90a")).unwrap();
    let counts = search(&device, BACKWARD, pairs, &BLOCKS, &Planning::default());
    println!("sm_90a, gradients: {counts:?}");
    assert!(counts.contains_key("equal by wgmma"), "{counts:?}");
}

/// Compares the pairs of [`gradients_on_hopper`] in a process of its own; elsewhere it does nothing.
#[test]
fn the_gradients_of_this_process() {
    if std::env::var("ROWS_GRADIENTS").is_ok() {
        gradients_on_hopper((number("ROWS_SEED", 1), number("ROWS_PAIRS", 2)));
    }
}

#[test]
fn a_row_has_the_same_gradients_in_every_call_of_hopper() {
    println!("{}", run_test("the_gradients_of_this_process", &[("ROWS_GRADIENTS", "1")]).unwrap());
}

/// Options for Hopper's tile whose CTAs fold their rows' parts of this many keys in the workspace.
fn folding(keys: u32) -> PlanOptions {
    PlanOptions::default().kernel("sm90").tile([("fold_keys", keys.to_string())])
}

/// Options for folds in shared memory, in place of a second Q, for which there is no room at head dimension 128.
fn folding_in_shared(keys: u32) -> PlanOptions {
    let fields = [
        ("fold_keys", keys.to_string()),
        ("lookahead", "off".to_owned()),
        ("fold_in_shared", "1".to_owned()),
    ];
    PlanOptions::default().kernel("sm90").tile(fields)
}

/// Checks that a call on Hopper whose CTAs fold their rows' parts has the bits of parts folded by a launch, and of a
/// chunk's call.
fn folded(
    device: &Device,
    (heads, dim, len): ([u32; 2], u32, u32),
    (dtype, left): (DType, Option<u32>),
    (keys, folding): (u32, fn(u32) -> PlanOptions),
) {
    let dtype_o = if left.is_some() { dtype } else { DType::F32 };
    let story = Story {
        seed: u64::from(dim + len),
        dtype,
        dtype_o,
        dtype_cache: None,
        heads,
        dims: [dim; 2],
        len,
        left,
        softcap: false,
        sink: false,
        alibi: false,
        rare: None,
    };
    let training = View {
        rows: 0..len,
        keys: Keys::Packed,
        packed: true,
        others: vec![[len / 3, len / 2 + 1]],
        place: 1,
        spare: 0,
        unmasked: false,
        lse: true,
    };
    let chunk = View {
        rows: len - 37..len,
        keys: Keys::Strided,
        packed: false,
        others: Vec::new(),
        place: 0,
        spare: 11,
        ..training.clone()
    };
    let keys_of_part = keys.to_string();
    let apart = [("split_keys", keys_of_part.as_str()), ("fixed_parts", "1")];
    let planning = Planning {
        plan: PlanOptions::default().kernel("sm90").tile(apart),
        of_second: Some(folding(keys)),
        ..Planning::default()
    };
    // The kernel `sm80` computes a step of decoding over pages.
    let pages = Planning { plan: PlanOptions::default().tile(apart), ..planning.clone() };
    let step = View { rows: len - 1..len, keys: Keys::Paged(16), ..chunk.clone() };
    for (views, planning) in [
        ([training.clone(), training.clone()], &planning),
        ([chunk, training.clone()], &planning),
        ([step, training], &pages),
    ] {
        let said = compare(device, &story, &views, planning).unwrap();
        assert!(matches!(said, Outcome::Equal(_)), "D {dim}, {len} keys in parts of {keys}: {said:?}");
    }
}

/// Runs cases of [`folded`] in a process of its own; elsewhere it does nothing.
#[test]
fn the_folds_of_this_process() {
    let Ok(text) = std::env::var("ROWS_FOLDS") else { return };
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        return println!("absent: {reason}");
    }
    let device = fmha_cuda::open(0, Some("sm_90a")).unwrap();
    // Parts of two blocks of 128 keys, and a tile of three warpgroups.
    folded(&device, ([2, 1], 64, 600), (DType::Bf16, None), (256, folding_in_shared));
    if text == "all" {
        // Parts of one block; two warpgroups, which take maxima of three scores at a time.
        folded(&device, ([1, 1], 128, 500), (DType::Bf16, None), (128, folding_in_shared));
        folded(&device, ([1, 1], 128, 900), (DType::F16, None), (384, folding));
        // A window, whose rows see none of the first parts.
        folded(&device, ([2, 1], 128, 700), (DType::F16, Some(190)), (256, folding_in_shared));
        // Wide heads, whose O is rescaled before a warpgroup's turn.
        folded(&device, ([1, 1], 200, 420), (DType::Bf16, None), (192, folding));
        folded(&device, ([1, 1], 192, 420), (DType::Bf16, Some(301)), (96, folding));
    }
}

/// Starts a process for [`the_folds_of_this_process`], since a process emulates one architecture.
fn fold_in_a_process(which: &str) {
    run_test("the_folds_of_this_process", &[("ROWS_FOLDS", which)]).unwrap();
}

#[test]
fn parts_that_a_cta_folds_have_the_bits_of_parts_that_a_launch_folds() {
    fold_in_a_process("one");
}

#[test]
#[ignore = "a minute or two: each case compiles three kernels"]
fn parts_of_any_head_dimension_that_a_cta_folds_have_the_bits_of_parts_that_a_launch_folds() {
    fold_in_a_process("all");
}

#[test]
fn a_row_has_the_same_bits_in_every_call_of_sm80() {
    emulated("sm_80", (1, 4));
}

/// Compares the pairs of one architecture in a process that [`each_architecture`] has started; elsewhere it does
/// nothing.
#[test]
fn the_pairs_of_this_process() {
    let Ok(arch) = std::env::var("ROWS_ARCH") else { return };
    emulated(&arch, (number("ROWS_SEED", 100), number("ROWS_PAIRS", 60)));
}

/// A process emulates one architecture.
#[test]
#[ignore = "minutes: each pair compiles kernels"]
fn each_architecture() {
    for arch in ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"] {
        println!("{}", run_test("the_pairs_of_this_process", &[("ROWS_ARCH", arch)]).unwrap());
    }
}

/// Compares pairs of calls on an AMD device, with parts of as many keys as [`SHORT`] has, and of the kernel's own.
fn emulated_amd(arch: &str, (first, pairs): (u64, u64)) {
    if let Err(reason) = fmha_rocm::open(0, Some(arch)).and_then(|device| can_compile(&device)) {
        return println!("absent: {reason}");
    }
    let device = fmha_rocm::open(0, Some(arch)).unwrap();
    let planning =
        Planning { plan: PlanOptions::default().tile([("split_keys", "128")]), ..Planning::default() };
    let counts = search(&device, FORWARD, (first, pairs), &EMULATED, &planning);
    println!("{arch}: {counts:?}");
    let own = search(&device, FORWARD, (first, pairs.div_ceil(10)), &OWN_PARTS, &Planning::default());
    println!("{arch}, parts of its own: {own:?}");
    if pairs > 3 {
        gradients_on_amd(arch, (first, pairs.div_ceil(4)));
    }
}

/// Compares gradients of pairs of training calls on an AMD device.
fn gradients_on_amd(arch: &str, pairs: (u64, u64)) {
    let device = match fmha_rocm::open(0, Some(arch)).and_then(|device| can_compile(&device).map(|()| device))
    {
        Ok(device) => device,
        Err(reason) => return println!("absent: {reason}"),
    };
    let counts = search(&device, BACKWARD, pairs, &SHORT, &Planning::default());
    println!("{arch}, gradients: {counts:?}");
}

/// Whether there is a compiler for the device.
fn can_compile(device: &Device) -> fmha_core::Result<()> {
    let (story, views) = draw(1, &SHORT);
    device.plan_fwd(&views[0].problem(&story).0.validate()?, &PlanOptions::default()).map(|_| ())
}

#[test]
fn a_row_has_the_same_bits_in_every_call_of_cdna_decode() {
    emulated_amd("gfx942", (4, 3));
}

/// The default pair would differ if blocks were walked in an order that depends on the batch. `ROWS_SEED` and
/// `ROWS_PAIRS` draw others.
#[test]
fn a_row_has_the_same_gradients_in_every_call_of_cdna_bwd() {
    gradients_on_amd("gfx942", (number("ROWS_SEED", 13), number("ROWS_PAIRS", 1)));
}

/// Parts of a fixed number of keys are not enough: without the promise, P's scale depends on the sequence's number of
/// keys.
#[test]
fn rows_of_cdna_decode_differ_where_p_s_scale_is_by_the_length() {
    let Ok(device) = fmha_rocm::open(0, Some("gfx942")) else { return println!("absent: no emulator") };
    if let Err(reason) = can_compile(&device) {
        return println!("absent: {reason}");
    }
    let plan = PlanOptions::default().kernel("cdna_decode").batch_invariant(true);
    let planning =
        Planning { plan: plan.tile([("split_keys", "128")]), unasked: true, ..Planning::default() };
    let counts = search(&device, FORWARD, (4, 1), &SHORT, &planning);
    assert_eq!(counts.get("differ"), Some(&1), "{counts:?}");
}

/// Compares the pairs of one AMD architecture in a process that [`each_architecture`] has started.
#[test]
fn the_pairs_of_this_process_on_amd() {
    let Ok(arch) = std::env::var("ROWS_AMD_ARCH") else { return };
    emulated_amd(&arch, (number("ROWS_SEED", 100), number("ROWS_PAIRS", 200)));
}

#[test]
#[ignore = "an hour: 200 pairs of each architecture"]
fn each_architecture_of_amd() {
    for arch in ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"] {
        println!("{}", run_test("the_pairs_of_this_process_on_amd", &[("ROWS_AMD_ARCH", arch)]).unwrap());
    }
}

/// Kernels of AMD that break the promise refuse it with a reason: the forward, a type without a decode kernel, dropout,
/// backward under masks as data.
#[test]
fn what_keeps_no_rows_of_equal_bits_on_amd_is_refused_by_name() {
    for (arch, forward) in [("gfx942", "cdna_fwd"), ("gfx1100", "rdna_fwd")] {
        let device = fmha_rocm::pretend(arch).unwrap();
        let options = PlanOptions::default().row_invariant(true).allow_fallback(true);
        let (story, views) = draw_training(3, &SHORT);
        let problem = views[0].problem(&story).0;
        let plan = device.plan_fwd(&problem.clone().validate().unwrap(), &options).unwrap();
        assert!(plan.promises().row_invariant && plan.kernel().ends_with("_decode"), "{arch}");
        let said = |problem: FwdProblem, options: &PlanOptions| {
            let error = device.plan_fwd(&problem.validate().unwrap(), options).err();
            error.map(|error| error.to_string()).unwrap_or_default()
        };
        let named = said(problem.clone(), &options.clone().kernel(forward));
        assert!(named.contains("row_invariant true: it reads no pages"), "{arch}: {named}");
        let dropped = said(problem.clone().p_drop(0.5), &options);
        assert!(dropped.contains("p_drop 0.5 is not taken"), "{arch}: {dropped}");
        assert!(dropped.contains("simt: row_invariant true"), "{arch}: {dropped}");
        let problem = problem.write_lse(true);
        let backward = BwdProblem::new(problem.clone()).validate().unwrap();
        let plan = device.plan_bwd(&backward, &options).unwrap();
        assert!(plan.promises().row_invariant && plan.kernel().ends_with("_bwd"), "{arch}");
        let plain = FwdProblem::batch(problem.dtypes.qk, problem.dims).write_lse(true);
        let intervals = Intervals::batch(&plain, MaskAxes::SHARED, 2);
        let backward = BwdProblem::new(plain.intervals(intervals)).validate().unwrap();
        let error = device.plan_bwd(&backward, &options).err().unwrap().to_string();
        assert!(error.contains("row_invariant true"), "{arch}: {error}");
    }
}
