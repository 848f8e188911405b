//! No access of mma.sync kernels to shared memory may have a bank conflict: the emulator counts conflicts of whole
//! launches. Modelled, not measured.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Mutex;

use fmha_conformance::case::Case;
use fmha_conformance::run::{Options, Outcome, tile_fields};
use fmha_conformance::tensors::{Data, Lengths};
use fmha_core::{
    BwdProblem, DType, Device, Dims, FwdProblem, KvLayout, MaskSpec, PlanOptions, QLayout, Strides, VLayout,
};
use fmha_cuda::emulated_launches;

const ARCH: &str = "sm_80";

/// Lock held by the test whose launches are counted.
static ALONE: Mutex<()> = Mutex::new(());

/// Calls for swizzles over 32 bytes (head dimensions 16, 40, 80), 64 bytes (32, 96, 160) and 128 bytes, with either
/// number of rows to a warp.
const CALLS: [(u32, u32, &str); 12] = [
    (16, 128, ""),
    (32, 128, ""),
    (40, 128, ""),
    (64, 128, ""),
    (80, 128, ""),
    (96, 128, ""),
    (128, 128, ""),
    (128, 128, "block_m=64,block_n=48,warps=4"),
    (128, 1, ""),
    (160, 128, ""),
    (192, 128, ""),
    (256, 128, ""),
];

fn problem(head_dim: u32, seqlen_q: u32, v_layout: VLayout) -> FwdProblem {
    let dims = Dims::batch(1).seqlens(seqlen_q, 256).heads(1, 1).head_dim(head_dim);
    let mut problem = FwdProblem::batch(DType::Bf16, dims);
    if v_layout == VLayout::ColMajor {
        (problem.layout.v, problem.strides.v) = (VLayout::ColMajor, Strides::bhds(problem.shape_v()));
    }
    problem
}

/// Sum of a counter over the launches since the last request.
fn sum_of(launches: &str, counter: &str) -> u64 {
    let launches: Vec<serde_json::Value> = serde_json::from_str(launches).unwrap();
    launches.iter().map(|launch| launch["counters"][counter].as_u64().unwrap()).sum()
}

/// Opens the emulated device; `None`, with a message, where the device or its compiler is missing.
fn opened() -> Option<Device> {
    opened_as(ARCH)
}
fn opened_as(arch: &str) -> Option<Device> {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        println!("absent: {reason}");
        return None;
    }
    fmha_cuda::open(0, Some(arch)).map_err(|error| println!("absent: {error}")).ok()
}

/// Backward case with every gradient, under a mask that cuts blocks.
fn backward(head_dim: u32, v_layout: VLayout) -> Case {
    let fwd = problem(head_dim, 128, v_layout).mask(MaskSpec::CAUSAL);
    Case::backward("banks", BwdProblem::new(fwd), Lengths::default(), Data { seed: 3, ..Data::default() })
}

#[test]
fn no_access_of_the_backward_to_shared_memory_waits_for_another() {
    let Some(backend) = opened() else { return };
    // Another test of this process also counts launches.
    let _alone = ALONE.lock().unwrap();
    let columns = [(64, VLayout::ColMajor), (128, VLayout::ColMajor)];
    let rows = [32, 64, 80, 128, 192].map(|head_dim| (head_dim, VLayout::RowMajor));
    let two_passes =
        rows.into_iter().chain(columns).map(|(head_dim, v_layout)| (head_dim, v_layout, "one_pass=0"));
    let one_pass = [32, 64, 128].map(|head_dim| (head_dim, VLayout::RowMajor, "one_pass=1"));
    for (head_dim, v_layout, tile) in two_passes.chain(one_pass) {
        let _ = emulated_launches();
        let plan = PlanOptions::default().kernel("sm80").tile(tile_fields(tile));
        let (outcome, text) =
            backward(head_dim, v_layout).run(&backend, &Options { plan, ..Options::default() });
        assert_eq!(outcome, Outcome::Passed, "{text}");
        let launches = emulated_launches().unwrap();
        assert!(sum_of(&launches, "shared_bytes") > 1000, "head_dim {head_dim}: {launches}");
        assert_eq!(sum_of(&launches, "bank_conflicts"), 0, "head_dim {head_dim}, V {v_layout:?}, {tile}");
    }
}

/// A single query reads a long cache in parts: strided, in pages that blocks divide, and in pages that they do not.
#[test]
fn no_access_of_decode_to_shared_memory_waits_for_another() {
    let Some(backend) = opened() else { return };
    let _alone = ALONE.lock().unwrap();
    for (head_dim, page_size, cache) in [
        (64, None, None),
        (128, None, None),
        (128, Some(64), None),
        (128, Some(16), None),
        (128, None, Some(DType::E4m3Fn)),
    ] {
        let mut problem = problem(head_dim, 1, VLayout::RowMajor);
        (problem.dims.seqlen_k, problem.dims.num_heads_q) = (600, 4);
        problem = FwdProblem::batch(DType::Bf16, problem.dims);
        problem.cache.dtype = cache;
        let mut lengths = Lengths::default();
        if let Some(page_size) = page_size {
            problem =
                FwdProblem::new(QLayout::Batch, KvLayout::Paged { page_size }, DType::Bf16, problem.dims);
            let pages = 600u32.div_ceil(page_size);
            lengths.block_table = (0..pages).rev().map(u32::cast_signed).collect();
            lengths.totals.num_pages = Some(pages);
        }
        let case = Case::forward("banks", problem, lengths, Data { seed: 3, ..Data::default() });
        let plan = PlanOptions::default().kernel("sm80");
        let _ = emulated_launches();
        let (outcome, text) = case.run(&backend, &Options { plan, ..Options::default() });
        assert_eq!(outcome, Outcome::Passed, "{text}");
        let launches = emulated_launches().unwrap();
        let what = format!("head_dim {head_dim}, pages of {page_size:?}, cache {cache:?}");
        assert!(
            launches.contains("bank_conflicts") && sum_of(&launches, "shared_bytes") > 1000,
            "{what}: {launches}"
        );
        assert_eq!(sum_of(&launches, "bank_conflicts"), 0, "{what}");
    }
}

#[test]
fn no_access_to_shared_memory_waits_for_another() {
    let Some(backend) = opened() else { return };
    let _alone = ALONE.lock().unwrap();
    let row_major = CALLS.map(|call| (call, VLayout::RowMajor));
    let columns = [(64, 128, ""), (80, 128, ""), (128, 1, "")].map(|call| (call, VLayout::ColMajor));
    for ((head_dim, seqlen_q, tile), v_layout) in row_major.into_iter().chain(columns) {
        let problem = problem(head_dim, seqlen_q, v_layout);
        let case = Case::forward("banks", problem, Lengths::default(), Data { seed: 3, ..Data::default() });
        let plan = PlanOptions::default().kernel("sm80").tile(tile_fields(tile));
        let _ = emulated_launches();
        let (outcome, text) = case.run(&backend, &Options { plan, ..Options::default() });
        assert_eq!(outcome, Outcome::Passed, "{text}");
        let launches = emulated_launches().unwrap();
        let what = format!("head_dim {head_dim}, {seqlen_q} queries, V {v_layout:?}, tile {tile}");
        assert!(sum_of(&launches, "shared_bytes") > 1000, "{what}: {launches}");
        assert_eq!(sum_of(&launches, "bank_conflicts"), 0, "{what}");
    }
}

/// FP8 products with both layouts of V, and blocks that TMA loads.
#[test]
fn no_access_of_newer_devices_to_shared_memory_waits_for_another() {
    let _alone = ALONE.lock().unwrap();
    for (arch, dtype, head_dim, v_layout) in [
        ("sm_89", DType::E4m3Fn, 64, VLayout::RowMajor),
        ("sm_89", DType::E4m3Fn, 128, VLayout::RowMajor),
        ("sm_89", DType::E4m3Fn, 128, VLayout::ColMajor),
        ("sm_120a", DType::Bf16, 128, VLayout::RowMajor),
    ] {
        let Some(backend) = opened_as(arch) else { return };
        let dims = problem(head_dim, 128, VLayout::RowMajor).dims;
        let mut problem = FwdProblem::batch(dtype, dims).dtype_o(DType::Bf16);
        if v_layout == VLayout::ColMajor {
            (problem.layout.v, problem.strides.v) = (v_layout, Strides::bhds(problem.shape_v()));
        }
        let case = Case::forward("banks", problem, Lengths::default(), Data { seed: 3, ..Data::default() });
        let plan = PlanOptions::default().kernel("sm80");
        let _ = emulated_launches();
        let (outcome, text) = case.run(&backend, &Options { plan, ..Options::default() });
        assert_eq!(outcome, Outcome::Passed, "{text}");
        let launches = emulated_launches().unwrap();
        let what = format!("{arch}, {dtype}, head_dim {head_dim}, V {v_layout:?}");
        assert!(sum_of(&launches, "shared_bytes") > 1000, "{what}: {launches}");
        assert_eq!(sum_of(&launches, "bank_conflicts"), 0, "{what}");
    }
}
