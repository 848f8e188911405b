//! A backend without a device: its description, its tiles and its kernels. Nothing is compiled.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::collections::BTreeSet;

use fmha_core::cache::forward_table;
use fmha_core::{
    AnyProblem, Append, BwdProblem, CombineProblem, DType, Device, Dims, FwdProblem, KeyLists, KvLayout,
    ListEntries, MaskSpec, PlanOptions, Shape, ValidFwd,
};

const DIMS: Dims = Dims::batch(1).seqlens(512, 512).heads(4, 4).head_dim(128);

fn merged() -> CombineProblem {
    CombineProblem::new(2, DType::F32, DType::Bf16, Shape { batch: 1, seq: 8, head: 2, dim: 64 })
}

fn pretend(arch: &str) -> Device {
    fmha_cuda::pretend(arch).unwrap()
}

#[test]
fn it_says_what_it_is_and_what_it_has() {
    let backend = pretend("sm_90a");
    assert_eq!((backend.kind(), backend.name()), ("cuda", "cuda (sm_90a, no device)"));
    // The kernel names `sm90`, `sm80` and `simt` each belong to two operations.
    let kernels = [
        "sm100",
        "sm90",
        "sm90_widened",
        "sm90_mla",
        "sm100_mla",
        "sm100_widened",
        "sm100_mla_widened",
        "sm80",
        "sm80_widened",
        "simt",
        "sm90_lists",
        "sm80_lists",
        "combine",
        "sm90_index",
        "sm80_index",
        "choose",
        "quantize",
        "sm80_index_loss",
    ];
    assert_eq!(backend.kernels(), kernels);
    assert!(backend.precompiler().is_some());
    assert!(backend.tuner().is_none() && !backend.has_streams(), "it runs nothing");
    let [bf16, fp8] =
        [DType::Bf16, DType::E4m3Fn].map(|dtype| backend.roofline(dtype).flops_per_second.unwrap());
    assert_eq!(fp8, 2.0 * bf16);
    let memory = backend.memory();
    assert!(!memory.checks_bounds());
    assert!(memory.alloc(1).is_err() && memory.alloc_at_edge(1, true).is_err());
    assert!(backend.synchronize().is_err() && backend.stream().is_err() && backend.event().is_err());
    assert_eq!(fmha_cuda::emulated_launches(), None);
}

/// Without a double in this process, opening a device uses the machine's driver, or reports that there is none.
#[test]
fn a_process_without_a_double_has_the_machines_driver_or_none() {
    if let Err(error) = fmha_cuda::open(0, None) {
        assert!(!error.to_string().contains("emulated"), "{error}");
    }
}

#[test]
fn a_fallback_that_refuses_what_the_kernel_takes_refuses_no_plan() {
    let mut problem = FwdProblem::batch(DType::Bf16, DIMS).seqused_k(true).mask(MaskSpec::CAUSAL);
    problem.cache.tree_mask = true;
    let plan = pretend("sm_80")
        .plan_fwd(&problem.validate().unwrap(), &PlanOptions::default().allow_fallback(true))
        .unwrap();
    assert_eq!(plan.kernel(), "sm80");
    let words = plan.details().iter().find(|(name, _)| *name == "unaligned operands").unwrap();
    assert!(words.1.contains("simt: tree_mask of 512 queries is not taken"), "{plan}");
}

/// A warp that had more rows than lanes would mask rows by other rows' lists.
#[test]
fn a_union_of_lists_has_a_lane_for_each_row_of_a_warp() {
    let dims = Dims::batch(1).seqlens(64, 512).heads(8, 2).head_dim(64);
    let problem = FwdProblem::batch(DType::Bf16, dims);
    let lists = KeyLists::new(&problem, 4).entries(ListEntries::Blocks { size: 64 });
    let problem = problem.lists(lists).validate().unwrap();
    let of = |tile: &[(&str, &str)]| {
        let options = PlanOptions::default().kernel("sm80").tile(tile.iter().copied());
        pretend("sm_90a").plan_fwd(&problem, &options)
    };
    for (fields, rows) in
        [(&[("unites", "1"), ("warps", "1")][..], 64), (&[("unites", "1"), ("warps", "2")], 32)]
    {
        match of(fields) {
            Ok(_) => assert_eq!(rows, 32, "{fields:?}"),
            Err(error) => {
                let text = error.to_string();
                assert!(rows == 64 && text.contains("warps=1: 64 rows a warp"), "{fields:?}: {text}");
            }
        }
    }
}

#[test]
fn the_jobs_of_a_plan_are_its_launches() {
    let fwd = FwdProblem::batch(DType::Bf16, DIMS).validate().unwrap();
    let mut appends = FwdProblem::batch(DType::Bf16, DIMS).seqused_k(true);
    appends.cache.append = Some(Append::batch(&appends, 1));
    let appends = appends.validate().unwrap();
    let bwd = BwdProblem::new(FwdProblem::clone(&fwd)).validate().unwrap();
    let combine = merged().validate().unwrap();
    for (arch, problem, names) in [
        ("sm_90a", AnyProblem::Forward(&fwd), &["sm90"][..]),
        ("sm_100a", AnyProblem::Forward(&fwd), &["sm100"]),
        ("sm_90a", AnyProblem::Forward(&appends), &["sm80_update", "sm80"]),
        ("sm_90a", AnyProblem::Backward(&bwd), &["preprocess", "sm90", "postprocess", "head_sums", "repair"]),
        ("sm_100a", AnyProblem::Backward(&bwd), &["sm100_stats", "sm100", "sm100_finish_dq"]),
        ("sm_90a", AnyProblem::Combine(&combine), &["combine"]),
    ] {
        let jobs = pretend(arch).precompiler().unwrap().jobs(problem, &PlanOptions::default()).unwrap();
        assert!(jobs.iter().all(|job| job.arch == arch));
        // Tiles for other sizes use launches of the same kernels.
        let mut kernels = Vec::new();
        for job in jobs {
            if !kernels.contains(&job.kernel) {
                kernels.push(job.kernel);
            }
        }
        assert_eq!(kernels, names);
    }
}

#[test]
fn the_jobs_of_no_sequence_are_those_of_one_and_those_of_code_have_its_text() {
    let compiled = |problem: FwdProblem| {
        let problem = problem.validate().unwrap();
        let hopper = pretend("sm_90a");
        hopper.precompiler().unwrap().jobs(AnyProblem::Forward(&problem), &PlanOptions::default())
    };
    let of = |batch| FwdProblem::batch(DType::Bf16, Dims { batch, ..DIMS });
    let entries = |batch| {
        let jobs = compiled(of(batch)).unwrap();
        jobs.into_iter().map(|job| job.source.entry).collect::<Vec<_>>()
    };
    assert_eq!(entries(0), entries(1));
    let of_mask = |text: &str| {
        let jobs = compiled(of(1).mask_code(Some(text.parse().unwrap()))).unwrap();
        assert!(jobs[0].source.headers().iter().any(|header| header.text.contains("bool visible(")));
        jobs[0].source.entry.clone()
    };
    // A captured scalar's name is not part of a kernel's key, but its type is.
    assert_eq!(of_mask("shift: int; q >= k + shift"), of_mask("other: int; q >= k + other"));
    assert_ne!(of_mask("q >= k"), of_mask("q > k"));
}

/// A machine without a compiler can run calls of any length: kernels that the cost model chooses by lengths and
/// heads are compiled ahead with those for the tables' few lengths.
#[test]
fn a_bundle_has_the_tiles_of_lengths_that_its_table_lacks() {
    let hopper = pretend("sm_90a");
    let precompiler = hopper.precompiler().unwrap();
    let options = PlanOptions::default();
    let entries = |problem: &ValidFwd| {
        let jobs = precompiler.jobs(AnyProblem::Forward(problem), &options).unwrap();
        jobs.into_iter().map(|job| (job.kernel, job.source.entry)).collect::<Vec<_>>()
    };
    let is_asked_for = |name: &str| name.contains("bf16/") && name.contains("/batch/lse/");
    let table: Vec<_> =
        forward_table().unwrap().into_iter().filter(|entry| is_asked_for(&entry.name)).collect();
    let bundled: BTreeSet<_> = table.iter().flat_map(|entry| entries(&entry.problem)).collect();
    let mut missing = BTreeSet::new();
    let narrow: MaskSpec = "b:64,0".parse().unwrap();
    let asked = table.iter().filter(|entry| entry.name.contains("q512k512/gqa1"));
    for (entry, mask) in asked.flat_map(|entry| [(entry, entry.problem.mask), (entry, narrow)]) {
        for num_heads in [1, 3, 8, 24, 32, 64] {
            for seqlen in [
                1, 17, 33, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 200, 224, 240, 256, 272, 288, 320,
                352, 384, 416, 519, 700, 960, 1172, 1670, 2304, 3968, 9000,
            ] {
                let dims = Dims {
                    batch: 1,
                    seqlen_q: seqlen,
                    seqlen_k: seqlen,
                    num_heads_q: num_heads,
                    num_heads_kv: num_heads,
                    ..entry.problem.dims
                };
                let problem = FwdProblem::batch(DType::Bf16, dims).mask(mask).write_lse(true);
                let problem = problem.validate().unwrap();
                let own = precompiler.jobs(AnyProblem::Forward(&problem), &options).unwrap().swap_remove(0);
                if !bundled.contains(&(own.kernel, own.source.entry.clone())) {
                    missing.insert(format!(
                        "{} {mask} S {seqlen} H {num_heads}: {}",
                        entry.name,
                        own.source.entry.split("kTile").last().unwrap()
                    ));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// How Hopper reads pages and caches of narrow types. `sm90` reads pages that are whole TMA boxes in place, and for
/// many queries copies other pages once into its layout. An FP8 cache is converted inside the kernel if one tile of
/// rows reads it, and by a launch before if several do. Few rows use `sm80`.
#[test]
fn hopper_reads_pages_and_narrow_caches_as_they_lie_but_for_odd_pages_and_many_tiles() {
    let hopper = pretend("sm_90a");
    let (direct, gathered) = (&["sm90", "sm90_merge"][..], &["widen_cache", "sm90", "sm90_merge"][..]);
    let few = &["sm80", "sm80_merge"][..];
    let narrow = Some(DType::E4m3Fn);
    for (seqlen_q, page_size, cache, names) in [
        (512, 16, None, direct),
        (512, 24, None, direct),
        (512, 7, None, gathered),
        (16, 16, None, direct),
        (16, 16, narrow, direct),
        (16, 7, narrow, few),
        (512, 16, narrow, gathered),
        (1, 16, None, few),
        (1, 16, narrow, few),
    ] {
        let dims = Dims { batch: 1, seqlen_q, seqlen_k: 65536, num_heads_q: 8, num_heads_kv: 1, ..DIMS };
        let mut problem = FwdProblem::batch(DType::Bf16, dims);
        problem.layout.kv = KvLayout::Paged { page_size };
        problem.cache.dtype = cache;
        let problem = problem.validate().unwrap();
        let jobs = hopper
            .precompiler()
            .unwrap()
            .jobs(AnyProblem::Forward(&problem), &PlanOptions::default())
            .unwrap();
        let kernels: Vec<_> = jobs.iter().map(|job| job.kernel).collect();
        assert!(
            kernels.starts_with(names),
            "{seqlen_q} queries, pages of {page_size}, {cache:?}: {kernels:?}"
        );
    }
}

/// One query over a long cache of few sequences uses `sm80`, in which one warp handles the few rows, unless a
/// kernel is named.
#[test]
fn hopper_leaves_few_short_queries_over_long_caches_to_parts_of_the_keys() {
    let hopper = pretend("sm_90a");
    let kernel = |batch, seqlen_q, seqlen_k, options: &PlanOptions| {
        let dims = Dims { batch, seqlen_q, seqlen_k, num_heads_q: 32, num_heads_kv: 8, ..DIMS };
        let problem = FwdProblem::batch(DType::Bf16, dims).validate().unwrap();
        let jobs = hopper.precompiler().unwrap().jobs(AnyProblem::Forward(&problem), options).unwrap();
        jobs[0].kernel
    };
    let any = PlanOptions::default();
    assert_eq!(kernel(1, 1, 32768, &any), "sm80");
    assert_eq!(kernel(1, 4, 32768, &any), "sm80");
    assert_eq!(kernel(1, 12, 32768, &any), "sm90", "more rows than a warp's");
    assert_eq!(kernel(1, 512, 32768, &any), "sm90");
    assert_eq!(kernel(16, 1, 32768, &any), "sm80");
    assert_eq!(kernel(1, 1, 256, &any), "sm90", "a tile walks so few keys before parts would be merged");
    assert_eq!(kernel(1, 1, 4096, &any), "sm80");
    assert_eq!(kernel(1, 1, 32768, &any.clone().kernel("sm90")), "sm90");
    assert_eq!(kernel(1, 1, 32768, &any.batch_invariant(true)), "sm90");
}

/// A promise that leaves only one tile shape makes prices of other shapes unnecessary.
#[test]
fn shapes_that_a_promise_leaves_no_choice_of_are_not_priced() {
    let dims = Dims { seqlen_q: 300, seqlen_k: 300, num_heads_q: 8, num_heads_kv: 8, ..DIMS };
    let problem = FwdProblem::batch(DType::Bf16, dims).validate().unwrap();
    let priced = |options: PlanOptions| {
        let plan = pretend("sm_90a").plan_fwd(&problem, &options).unwrap();
        assert_eq!(plan.kernel(), "sm90");
        plan.details().iter().filter(|(name, _)| ["shapes", "orders"].contains(name)).count()
    };
    assert!(priced(PlanOptions::default()) > 0);
    assert_eq!(priced(PlanOptions::default().batch_invariant(true)), 0);
}
