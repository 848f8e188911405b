//! Texts of plans and refusals. Most tests run in a process that finds no compiler, since a plan needs no code.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_core::{
    Accuracy, Append, BwdPlan, BwdProblem, CombineProblem, DType, Dims, Error, FwdPlan, FwdProblem, KeyLists,
    KvLayout, LaunchShape, PlanOptions, Promises, QLayout, Refusal, Result, ScoreSums, Shape, Strides,
    ValidBwd, ValidCombine, ValidFwd, Workspace,
};
use fmha_rocm::{Arch, Resources};

use support::DIMS;

mod support;

const NO_COMPILER: &str = "FMHA_HIP_CLANG is /nowhere/clang, which does not run or lists no target amdgcn";

fn forward(dtype: DType) -> ValidFwd {
    FwdProblem::batch(dtype, DIMS).validate().unwrap()
}

fn backward() -> ValidBwd {
    BwdProblem::new(FwdProblem::batch(DType::Bf16, DIMS)).validate().unwrap()
}

/// A merge of partial results of 1200 elements.
fn combine() -> ValidCombine {
    let rows = Shape { batch: 2, seq: 5, head: 3, dim: 40 };
    CombineProblem::new(3, DType::F16, DType::F16, rows).validate().unwrap()
}

fn asking(kernel: &str) -> PlanOptions {
    PlanOptions::default().kernel(kernel.to_owned())
}

fn slow_too() -> PlanOptions {
    PlanOptions::default().allow_fallback(true)
}

fn launch(groups: u64, threads: u32) -> LaunchShape {
    // Launch shape of a kernel that is not compiled: each of 304 compute units counts as holding one workgroup.
    LaunchShape { groups, threads, shared_bytes: 0, tiles: groups, tiles_at_once: 304 }
}

fn refusals<T>(planned: Result<T>) -> Vec<Refusal> {
    match planned {
        Err(Error::Unsupported { refusals, .. }) => refusals,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("planned"),
    }
}

/// Runs an ignored test below in a process that finds no compiler and no bundle.
fn without_a_compiler(test: &str) {
    support::in_a_process(test, &[("FMHA_HIP_CLANG", "/nowhere/clang")]);
}

#[test]
fn forward_plans_say_kernel_tile_refusals_and_launch() {
    without_a_compiler("a_process_that_plans_forward");
}

#[test]
#[ignore = "a process of the test above, which starts it"]
fn a_process_that_plans_forward() {
    let backend = fmha_rocm::pretend("gfx942").unwrap();
    let plan = |dtype, options: &PlanOptions| backend.plan_fwd(&forward(dtype), options);
    let details = |plan: &FwdPlan| -> Vec<String> {
        plan.details().iter().map(|(name, value)| format!("{name}: {value}")).collect()
    };
    let tiled = [
        "arch: gfx942",
        "tile: block_m 256 block_n 64",
        "tile from: the table",
        // There are two tiles of 256 for 300 queries, in each of four heads and two sequences.
        "order: single (all fit the device at once)",
        "loads: Chunks",
        "stores: Vector",
        // LDS has two stages of 64 rows of K and of V, each row of 128 elements of two bytes.
        "lds: 65536 bytes",
        "matrix type: bf16 x bf16, then bf16",
    ];
    let fast = plan(DType::Bf16, &PlanOptions::default()).unwrap();
    assert_eq!((fast.kernel(), fast.is_fallback()), ("cdna_fwd", false));
    assert_eq!(details(&fast), tiled);
    let too_long = Refusal::new("cdna_decode", "seqlen_q 300 is more than 64, and cdna_fwd takes it");
    assert_eq!(fast.refusals(), [too_long]);
    assert_eq!(fast.workspace(), Workspace::NONE);
    assert_eq!(fast.steps().len(), 1);
    assert_eq!(fast.explain().launch, Some(launch(16, 512)));
    assert_eq!(fast.explain().code, format!("none: {NO_COMPILER}"));
    assert_eq!(fast.explain().resources, None);
    let promises = Promises {
        deterministic: true,
        batch_invariant: true,
        row_invariant: false,
        graph_capturable: true,
        accuracy: Accuracy::Exact,
        score_sums: ScoreSums::F32,
    };
    assert_eq!(fast.promises(), promises);
    let checked = plan(DType::Bf16, &PlanOptions::default().check_lengths(true)).unwrap();
    assert_eq!(checked.promises(), Promises { graph_capturable: false, ..promises });

    // The fallback kernel for other addresses is not compiled either.
    let mut more = tiled.map(str::to_owned).to_vec();
    more.push(format!("unaligned operands: refused: {NO_COMPILER}"));
    assert_eq!(details(&plan(DType::Bf16, &slow_too()).unwrap()), more);

    let f32_is_none = [
        Refusal::new("cdna_decode", "dtype_qk f32 with dtype_v f32 is not one 16-bit type"),
        Refusal::new("cdna_fwd", "dtype_qk f32 is no operand of gfx942's matrix instructions"),
        Refusal::new("rdna_decode", "gfx942 has no WMMA"),
        Refusal::new("rdna_fwd", "gfx942 has no WMMA"),
        Refusal::new("cdna_widened", "dtype_cache: K and V are f32 already"),
        Refusal::new("rdna_widened", "gfx942 has no WMMA"),
    ];
    let slow = plan(DType::F32, &slow_too()).unwrap();
    assert_eq!((slow.kernel(), slow.is_fallback()), ("simt", true));
    assert_eq!(details(&slow), ["arch: gfx942", "tile: a wave to a row, 64 keys at a time"]);
    assert_eq!(slow.refusals(), f32_is_none);
    // There are 2 x 4 x 300 rows, four in each workgroup.
    assert_eq!(slow.explain().launch, Some(launch(600, 256)));
    let named = plan(DType::Bf16, &asking("simt")).unwrap();
    assert_eq!((named.kernel(), named.is_fallback(), named.refusals()), ("simt", true, &[][..]));

    let not_allowed = Refusal::new("simt", "it is the slow fallback, and allow_fallback is false");
    assert_eq!(
        refusals(plan(DType::F32, &PlanOptions::default())),
        [&f32_is_none[..], &[not_allowed]].concat()
    );
    let unknown = Refusal::new(
        "fast",
        "there is no such forward kernel (known: cdna_decode, cdna_fwd, rdna_decode, rdna_fwd, cdna_widened, rdna_widened, simt)",
    );
    assert_eq!(refusals(plan(DType::Bf16, &asking("fast"))), [unknown]);
}

#[test]
fn backward_and_combine_plans_say_kernel_scratch_refusals_and_launches() {
    without_a_compiler("a_process_that_plans_backward_and_combine");
}

#[test]
#[ignore = "a process of the test above, which starts it"]
fn a_process_that_plans_backward_and_combine() {
    let backend = fmha_rocm::pretend("gfx942").unwrap();
    let arch = ("arch", "gfx942".to_owned());
    let steps = |plan: &BwdPlan| -> Vec<_> {
        plan.steps().iter().map(|step| (step.kernel.clone(), step.explain.launch)).collect()
    };
    let of = |kernel: &str, groups, threads| (kernel.to_owned(), Some(launch(groups, threads)));
    let fast = backend.plan_bwd(&backward(), &PlanOptions::default()).unwrap();
    assert_eq!((fast.kernel(), fast.is_fallback(), fast.refusals()), ("cdna_bwd", false, &[][..]));
    assert!(fast.promises().deterministic && fast.promises().batch_invariant);
    let tiles = "cdna_bwd_dq 256 x 32, 2 stages, 49152 bytes of lds; \
                 cdna_bwd_dk 256 x 32, 2 stages, 49664 bytes of lds; \
                 cdna_bwd_dv 256 x 32, 2 stages, 33280 bytes of lds";
    let said = [
        arch.clone(),
        ("tile", tiles.to_owned()),
        ("tile from", "the table".to_owned()),
        ("loads", "Chunks".to_owned()),
        ("stores", "Vector".to_owned()),
        ("sums", "in registers, each row's in one order; scores computed twice".to_owned()),
    ];
    assert_eq!(fast.details(), said);
    // Launches: LSE and delta for 8 x 320 queries, four rows per workgroup; two blocks of 256 queries in 8 heads;
    // two blocks of keys in 4 heads; then one word for each 32 rows of 8 x 300 queries and 4 x 500 keys.
    let launches = [
        of("cdna_bwd_stats", 640, 256),
        of("cdna_bwd_dq", 16, 512),
        of("cdna_bwd_dk", 8, 512),
        of("cdna_bwd_dv", 8, 512),
        of("cdna_bwd_rest", 36, 256),
    ];
    assert_eq!(steps(&fast), launches);
    // Workspace: a flag for each KV head, cleared; three f32 for each query row; a word for each 32 rows of dQ, of
    // dK and of dV.
    let bytes = 256 + 256 + 3 * 2560 * 4 + (80 + 2 * 64) * 4;
    assert_eq!(fast.workspace(), Workspace { bytes, zeroed_bytes: 256 });

    let slow_too = slow_too().kernel("simt".to_owned());
    let plan = backend.plan_bwd(&backward(), &slow_too).unwrap();
    assert_eq!((plan.kernel(), plan.is_fallback()), ("simt", true));
    assert_eq!(plan.details(), [arch.clone(), ("tile", "a wave to a row, 64 pairs at a time".to_owned())]);
    // The launches have 2400 rows of queries, then 2000 rows of keys.
    assert_eq!(steps(&plan), [of("simt_bwd_stats", 600, 256), of("simt", 1100, 256)]);
    // Workspace: 256 bytes, then three f32 for each query row (LSE, delta, its scores' origin), each array rounded
    // up to 256 bytes.
    let bytes = 256 + 3 * (2400 * 4_u64).next_multiple_of(256);
    assert_eq!(plan.workspace(), Workspace { bytes, zeroed_bytes: 0 });

    let f32s = BwdProblem::new(FwdProblem::batch(DType::F32, DIMS)).validate().unwrap();
    let f32_is_none = Refusal::new(
        "cdna_bwd",
        "dtype_qk f32, dtype_v f32, dtype_o f32 are not three times f16 or three times bf16",
    );
    let not_allowed = Refusal::new("simt", "it is the slow fallback, and allow_fallback is false");
    let no_wmma = Refusal::new("rdna_bwd", "gfx942 has no WMMA");
    let no_lists = Refusal::new("cdna_lists", "indices are not given: this kernel walks lists of keys");
    let not_on_rdna = Refusal::new("rdna_lists", "gfx942 has no WMMA");
    assert_eq!(
        refusals(backend.plan_bwd(&f32s, &PlanOptions::default())),
        [f32_is_none, no_wmma, no_lists, not_on_rdna, not_allowed]
    );
    for (dims, tile, part) in [
        (Dims { head_dim_v: 320, ..DIMS }, &[][..], "head_dim_v 320 is larger than 256"),
        (DIMS, &[("rows", "96")], "rows=96 is not 64, 128 or 256"),
        (DIMS, &[("columns", "64"), ("rows", "64")], "columns=64 is more than half of rows=64"),
        (DIMS, &[("columns", "64")], "tile columns=64,stages=2 takes 98304 bytes of LDS, more than 65536"),
        (DIMS, &[("sums", "dq")], "sums=dq is not for the user to set"),
    ] {
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims)).validate().unwrap();
        let options = asking("cdna_bwd").tile(tile.iter().copied());
        let refused = refusals(backend.plan_bwd(&problem, &options));
        assert!(refused[0].reason.contains(part), "{refused:?}");
    }

    for options in [PlanOptions::default(), asking("combine")] {
        let plan = backend.plan_combine(&combine(), &options).unwrap();
        assert_eq!((plan.kernel(), plan.is_fallback()), ("combine", false));
        assert_eq!((plan.details(), plan.workspace()), (&[arch.clone()][..], Workspace::NONE));
        assert_eq!(plan.explain().launch, Some(launch(5, 256)));
    }
    let unknown = Refusal::new("simt", "there is no such combine kernel (known: combine)");
    assert_eq!(refusals(backend.plan_combine(&combine(), &asking("simt"))), [unknown]);
}

/// A problem with latent rows of 128 heads over lists.
fn lists() -> FwdProblem {
    let dims = Dims { num_heads_q: 128, num_heads_kv: 1, head_dim_qk: 576, head_dim_v: 512, ..DIMS };
    let mut problem = FwdProblem::batch(DType::Bf16, dims);
    (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
    let lists = KeyLists::new(&problem, 2048);
    problem.lists(lists)
}

#[test]
fn lists_of_keys_are_planned_on_the_matrix_units_and_no_fallback() {
    without_a_compiler("a_process_that_plans_lists");
}

#[test]
#[ignore = "a process of the test above, which starts it"]
fn a_process_that_plans_lists() {
    for arch in Arch::ALL {
        let backend = fmha_rocm::pretend(arch.name()).unwrap();
        let kernel = if arch.is_rdna() { "rdna_decode" } else { "cdna_decode" };
        let plan = backend.plan_fwd(&lists().validate().unwrap(), &PlanOptions::default()).unwrap();
        assert_eq!((plan.kernel(), plan.is_fallback()), (kernel, false));
        let has = |name: &str, part: &str| plan.details().iter().any(|(n, v)| *n == name && v.contains(part));
        assert!(
            has("lists", "2048 entries a token") && has("parts", "of the longest list"),
            "{:?}",
            plan.details()
        );
        assert!(!plan.promises().row_invariant && plan.promises().deterministic);

        let mut apart = lists();
        (apart.cache.v_in_k, apart.strides.v) = (false, Strides::bshd(apart.shape_v()));
        let backward = BwdProblem::new(apart).validate().unwrap();
        let planned = backend.plan_bwd(&backward, &slow_too()).unwrap();
        let expected = if arch.is_rdna() { "rdna_lists" } else { "cdna_lists" };
        assert_eq!((planned.kernel(), planned.is_fallback()), (expected, false), "{:?}", planned.refusals());
        assert!(planned.promises().deterministic && planned.promises().batch_invariant);
    }
}

/// A plan without compiled code is refused when it would be launched.
#[test]
fn a_device_without_a_compiler_has_no_plan() {
    without_a_compiler("a_process_that_plans_for_a_device");
}

#[test]
#[ignore = "a process of the test above, which starts it"]
fn a_process_that_plans_for_a_device() {
    match fmha_rocm::open(0, Some("gfx942")) {
        Ok(backend) => {
            let Err(Error::NoDevice(text)) = backend.plan_fwd(&forward(DType::F16), &PlanOptions::default())
            else {
                panic!("planned")
            };
            assert_eq!(text, NO_COMPILER);
        }
        Err(error) => println!("absent: no emulated gfx942: {error}"),
    }
}

#[test]
fn the_backend_names_its_kind_its_kernels_and_the_peaks_of_its_architecture() {
    for arch in Arch::ALL {
        let backend = fmha_rocm::pretend(arch.name()).unwrap();
        assert_eq!(backend.kind(), "rocm");
        assert_eq!(backend.name(), format!("rocm ({}, no device)", arch.name()));
        let forward = ["cdna_decode", "cdna_fwd", "rdna_decode", "rdna_fwd", "cdna_widened", "rdna_widened"];
        let backward = ["simt", "cdna_bwd", "rdna_bwd", "cdna_lists", "rdna_lists"];
        let others = [
            "combine",
            "cdna_index",
            "rdna_index",
            "choose",
            "quantize",
            "cdna_index_loss",
            "rdna_index_loss",
        ];
        let kernels = [&forward[..], &backward, &others].concat();
        assert_eq!(backend.kernels(), kernels);
        for dtype in [DType::Bf16, DType::E4m3Fn] {
            assert_eq!(backend.roofline(dtype), arch.roofline(dtype));
        }
    }
}

#[test]
fn rdna_computes_on_wmma_and_refuses_the_kernels_on_mfma_by_name() {
    for arch in Arch::RDNA {
        let backend = fmha_rocm::pretend(arch.name()).unwrap();
        let reason = format!("{} has no MFMA: not on RDNA", arch.name());
        let plan = backend.plan_fwd(&forward(DType::Bf16), &PlanOptions::default()).unwrap();
        let mut refused =
            ["cdna_decode", "cdna_fwd"].map(|kernel| Refusal::new(kernel, reason.clone())).to_vec();
        refused.push(Refusal::new(
            "rdna_decode",
            "seqlen_q 300 is more than 64, and rdna_fwd takes it".to_owned(),
        ));
        assert_eq!((plan.kernel(), plan.is_fallback(), plan.refusals()), ("rdna_fwd", false, &refused[..]));
        let f32s = BwdProblem::new(FwdProblem::batch(DType::F32, DIMS)).validate().unwrap();
        let refused = refusals(backend.plan_bwd(&f32s, &PlanOptions::default()));
        let no_f32 = "dtype_qk f32, dtype_v f32, dtype_o f32 are not three times f16 or three times bf16";
        assert_eq!(refused[..2], [Refusal::new("cdna_bwd", reason), Refusal::new("rdna_bwd", no_f32)]);
        assert_eq!(backend.plan_bwd(&f32s, &slow_too()).unwrap().kernel(), "simt");
    }
    rdna_sums_gradients_on_wmma();
    let backend = fmha_rocm::pretend("gfx1100").unwrap();
    let fp8 = refusals(backend.plan_fwd(&forward(DType::E4m3Fn), &asking("rdna_fwd")));
    let reason = "dtype_qk e4m3fn is no operand of gfx1100's matrix instructions";
    assert_eq!(fp8, [Refusal::new("rdna_fwd", reason)]);
}

fn rdna_sums_gradients_on_wmma() {
    let backend = fmha_rocm::pretend("gfx1100").unwrap();
    let plan = backend.plan_bwd(&backward(), &PlanOptions::default()).unwrap();
    let refused = [Refusal::new("cdna_bwd", "gfx1100 has no MFMA: not on RDNA")];
    assert_eq!((plan.kernel(), plan.is_fallback(), plan.refusals()), ("rdna_bwd", false, &refused[..]));
    assert!(plan.promises().deterministic && plan.promises().batch_invariant);
    let tiles = "rdna_bwd_dq 128 x 32, 1 stages, 27648 bytes of lds; \
                 rdna_bwd_dkdv 128 x 32, 1 stages, 38144 bytes of lds";
    assert_eq!(plan.details()[1], ("tile", tiles.to_owned()));
    // There are three blocks of 128 queries in 8 heads and four blocks of keys in 4 heads; a workgroup has eight waves
    // of 16 rows.
    let launches: Vec<_> = plan
        .steps()
        .iter()
        .map(|step| (&*step.kernel, step.explain.launch.map(|launch| (launch.groups, launch.threads))))
        .collect();
    let of = |kernel, groups| (kernel, Some((groups, 256)));
    let expected =
        [of("rdna_bwd_stats", 640), of("rdna_bwd_dq", 24), of("rdna_bwd_dkdv", 16), of("rdna_bwd_rest", 36)];
    assert_eq!(launches, expected);
    for (dims, tile, part) in [
        (Dims { head_dim_qk: 320, ..DIMS }, &[][..], "head_dim_qk 320 is larger than 256"),
        (DIMS, &[("stages", "2")], "tile stages=2 is not 1"),
        (DIMS, &[("columns", "64")], "tile columns=64,stages=1 takes 72192 bytes of LDS, more than 65536"),
    ] {
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims)).validate().unwrap();
        let options = asking("rdna_bwd").tile(tile.iter().copied());
        let refused = refusals(backend.plan_bwd(&problem, &options));
        assert!(refused[0].reason.contains(part), "{refused:?}");
    }
}

/// Decode on RDNA supports the problems that the forward on WMMA refuses by name, without a fallback.
#[test]
fn rdna_decodes_pages_appends_and_parts_of_the_keys() {
    let short = Dims { seqlen_q: 1, ..DIMS };
    let paged = FwdProblem::new(QLayout::Batch, KvLayout::Paged { page_size: 16 }, DType::Bf16, short);
    let mut appended = FwdProblem::batch(DType::Bf16, short);
    appended.layout.seqused_k = true;
    appended.cache.append = Some(Append::batch(&appended, 1));
    let plain = FwdProblem::batch(DType::Bf16, short);
    let wide = FwdProblem::batch(DType::Bf16, Dims { head_dim_qk: 576, head_dim_v: 512, ..DIMS });
    let mut quantised = paged.clone();
    quantised.cache.dtype = Some(DType::E5m2);
    let parts = [("split_keys", "128")];
    for arch in Arch::RDNA {
        let backend = fmha_rocm::pretend(arch.name()).unwrap();
        for (problem, tile, steps, reason) in [
            (&paged, &[][..], 2, "q_layout Batch with kv_layout Paged { page_size: 16 } is not 1 batch axis"),
            (&appended, &[][..], 3, "append of seqlen_new 1 is not taken"),
            (&plain, &parts[..], 2, "tile split_keys=128: there is no such field"),
            (&wide, &[][..], 2, "head_dim_qk 576 is larger than 256"),
            (
                &quantised,
                &[][..],
                2,
                "q_layout Batch with kv_layout Paged { page_size: 16 } is not 1 batch axis",
            ),
        ] {
            let problem = problem.clone().validate().unwrap();
            let options = asking("rdna_fwd").tile(tile.iter().copied());
            let refused = refusals(backend.plan_fwd(&problem, &options));
            assert!(
                matches!(&refused[..], [one] if one.kernel == "rdna_fwd" && one.reason.starts_with(reason)),
                "{refused:?}"
            );
            let options = if tile.is_empty() { PlanOptions::default() } else { asking("rdna_decode") };
            let plan = backend.plan_fwd(&problem, &options.tile(tile.iter().copied())).unwrap();
            assert_eq!(
                (plan.kernel(), plan.is_fallback(), plan.steps().len()),
                ("rdna_decode", false, steps)
            );
        }
        for (problem, options, reason) in [
            (paged.clone().p_drop(0.25), asking("rdna_decode"), "p_drop 0.25 is not taken"),
            (
                plain.clone(),
                PlanOptions::default().batch_invariant(true),
                "batch_invariant: rdna_fwd takes a query of 1",
            ),
            (
                wide.clone(),
                asking("rdna_decode").tile([("block_m", "64")]),
                "tile block_m=64 is more than 32",
            ),
        ] {
            let plan = backend.plan_fwd(&problem.validate().unwrap(), &options);
            let refused = match plan {
                Ok(plan) => plan.refusals().to_vec(),
                refused @ Err(_) => refusals(refused),
            };
            let is_said = |one: &Refusal| one.kernel == "rdna_decode" && one.reason.starts_with(reason);
            assert!(refused.iter().any(is_said), "{refused:?}");
        }
    }
}

#[test]
fn a_plan_with_code_says_what_it_takes_and_hands_it_out() {
    if !support::clang_is_there() {
        return;
    }
    let backend = fmha_rocm::pretend("gfx942").unwrap();
    let plan = backend.plan_fwd(&forward(DType::F32), &slow_too()).unwrap();
    let code = support::code_object(&backend, &forward(DType::F32), &slow_too());
    assert!(code.starts_with(b"\x7fELF"));
    let (takes, usage) = (Resources::of(&code).unwrap(), plan.explain().resources.unwrap());
    assert!(takes.vgprs > 0);
    assert_eq!(usage.registers.map(u64::from), Some(takes.vgprs));
    assert_eq!(usage.shared_bytes.map(u64::from), Some(takes.lds_bytes));
    let held = u64::from(Arch::Gfx942.workgroups_per_compute_unit(&usage, 256));
    assert_eq!(plan.explain().launch, Some(LaunchShape { tiles_at_once: 304 * held, ..launch(600, 256) }));
    assert!(!plan.explain().code.is_empty() && !plan.explain().code.starts_with("none"));
}
