//! Every branch of the contract compiles for every architecture without spills, and unsupported problems are
//! refused with the field and its value. Needs a clang, no device.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_core::expr::draw::{self, Kind};
use fmha_core::{
    Bias, BiasBroadcast, BwdProblem, CacheRows, CacheScales, CapturedGrad, CapturedTensor, DType, Descale,
    Dims, ElementwiseBias, Error, FwdProblem, Intervals, KeyLists, KvLayout, ListEntries, MaskAxes,
    PlanOptions, QLayout, SecondCache, Strides, VLayout,
};
use fmha_rocm::{Arch, Resources};

use support::DIMS;

mod support;

fn dims(head_dim_qk: u32, head_dim_v: u32) -> Dims {
    Dims { head_dim_qk, head_dim_v, ..DIMS }
}

fn problems(fp8: DType, fp8_wide: DType) -> Vec<(String, FwdProblem)> {
    let mut all = Vec::new();
    let mut add = |name: &str, problem: FwdProblem| all.push((name.to_owned(), problem));
    for dtype in [DType::F16, DType::Bf16] {
        for (qk, v) in
            [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (40, 72), (256, 256), (33, 5), (1, 1)]
        {
            let mut problem = FwdProblem::batch(dtype, dims(qk, v));
            problem.write_lse = true;
            add(&format!("{dtype}/d{qk}x{v}"), problem);
        }
    }
    for dtype in [fp8, fp8_wide] {
        for (qk, v) in [(64, 64), (128, 128), (256, 256), (72, 40)] {
            let mut problem = FwdProblem::batch(dtype, dims(qk, v));
            problem.scales.descale_q = Descale::PerTensor;
            problem.scales.descale_k = Descale::PerKvHead;
            problem.scales.descale_v = Descale::PerKvHead;
            add(&format!("{dtype}/d{qk}x{v}"), problem.clone());
            problem.scales.descale_v = Descale::None;
            problem.dtypes.v = DType::Bf16;
            add(&format!("{dtype}+bf16/d{qk}x{v}"), problem.clone());
        }
        let mut problem = FwdProblem::batch(dtype, DIMS);
        problem.dtypes.o = dtype;
        problem.scales.scale_o = true;
        add(&format!("{dtype}/o-fp8"), problem);
    }
    let base = FwdProblem::batch(DType::Bf16, DIMS);
    for mask in ["t", "b:30,5", "b:30,0,4", "g:3,9"] {
        add(&format!("mask/{mask}"), base.clone().mask(mask.parse().unwrap()));
    }
    let mut group = FwdProblem::group(DType::Bf16, DIMS);
    group.layout.seqused_k = true;
    add("group", group);
    for dtype in [DType::F32, DType::Bf16] {
        let strides = Strides { batch: 4 * 150_000, seq: 500, head: 150_000, dim: 1 };
        let bias = Bias::Elementwise(ElementwiseBias { dtype, broadcast: BiasBroadcast::BatchHead, strides });
        add(&format!("bias/{dtype}"), base.clone().bias(bias));
    }
    add("alibi", base.clone().bias(Bias::Alibi { per_batch: false }));
    add("softcap", base.clone().softcap(20.0));
    add("sink", base.clone().sink(true));
    add("dropout", base.clone().p_drop(0.2).write_keep_mask(true));
    let mut col_major = base.clone();
    col_major.layout.v = VLayout::ColMajor;
    col_major.strides.v = Strides::bhds(col_major.shape_v());
    add("v-col-major", col_major);
    let mut odd = base.clone();
    odd.strides.q.seq += 1;
    odd.strides.o.seq += 1;
    odd.strides.o.batch += 300;
    odd.strides.q.batch += 300;
    add("odd-strides", odd);
    add("f32-output", base.clone().dtype_o(DType::F32));
    all
}

/// Every branch of the contract compiles without spills. Each problem is compiled for one architecture, in
/// rotation, since a kernel takes seconds to compile.
#[test]
fn every_branch_of_the_contract_compiles_somewhere_without_spills() {
    none_spills(|problem, name, arch| problem % Arch::CDNA.len() == arch && !has_a_twin(name));
}

/// Whether another problem differs only in the 16-bit type, or in which of the architecture's two FP8 types: such
/// kernels differ in the products' mnemonic and in conversions, and use equally many registers. One problem of each
/// pair counts as the original.
fn has_a_twin(name: &str) -> bool {
    (name.starts_with("f16/") || name.starts_with("e5m2")) && !name.ends_with("d128x128")
}

#[test]
#[ignore = "some 110 kernels are compiled: cargo xtask test --all"]
fn every_branch_of_the_contract_compiles_everywhere_without_spills() {
    none_spills(|_, _, _| true);
}

/// A few of the problems compile for RDNA without spills, among them those with the widest rows, which have the
/// fewest registers to spare.
#[test]
fn branches_of_the_contract_compile_on_rdna_without_spills() {
    if !support::clang_is_there() {
        return;
    }
    for (at, arch) in Arch::RDNA.into_iter().enumerate() {
        let spilled = spilled_on(arch, &|problem, _| problem % 12 == 6 * at + 3);
        assert!(spilled.is_empty(), "{}", spilled.join("\n"));
    }
}

#[test]
#[ignore = "some 80 kernels are compiled: cargo xtask test --all"]
fn every_branch_of_the_contract_compiles_on_rdna_without_spills() {
    if !support::clang_is_there() {
        return;
    }
    let spilled: Vec<String> = std::thread::scope(|scope| {
        let archs = Arch::RDNA.map(|arch| scope.spawn(move || spilled_on(arch, &|_, _| true)));
        archs.into_iter().flat_map(|arch| arch.join().unwrap()).collect()
    });
    assert!(spilled.is_empty(), "{}", spilled.join("\n"));
}

/// Checks that no kernel spills. `compiles` selects pairs of a problem (number, name) and an architecture (number).
fn none_spills(compiles: fn(usize, &str, usize) -> bool) {
    if !support::clang_is_there() {
        return;
    }
    let spilled: Vec<String> = std::thread::scope(|scope| {
        let spawn =
            |(at, arch)| scope.spawn(move || spilled_on(arch, &|problem, name| compiles(problem, name, at)));
        let archs: Vec<_> = Arch::CDNA.into_iter().enumerate().map(spawn).collect();
        archs.into_iter().flat_map(|arch| arch.join().unwrap()).collect()
    });
    assert!(spilled.is_empty(), "{}", spilled.join("\n"));
}

/// The problems whose kernels spill registers, with the number of spilled registers.
fn spilled_on(arch: Arch, compiles: &dyn Fn(usize, &str) -> bool) -> Vec<String> {
    let mut spilled = Vec::new();
    let backend = fmha_rocm::pretend(arch.name()).unwrap();
    let is_ocp = matches!(arch, Arch::Gfx950 | Arch::Gfx1100 | Arch::Gfx1201);
    let (fp8, wide) = if is_ocp { (DType::E4m3Fn, DType::E5m2) } else { (DType::E4m3Fnuz, DType::E5m2Fnuz) };
    let dealt = problems(fp8, wide).into_iter().enumerate().filter(|(at, (name, _))| compiles(*at, name));
    for (_, (name, problem)) in dealt {
        let is_fp8 = problem.dtypes.qk.is_fp8();
        let problem = problem.validate().unwrap();
        let planned = backend.plan_fwd(&problem, &PlanOptions::default());
        if is_fp8 && matches!(arch, Arch::Gfx90a | Arch::Gfx1100) {
            let error = planned.unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{name}: {error}");
            assert!(error.to_string().contains("dtype_qk"), "{name}: {error}");
            continue;
        }
        planned.unwrap_or_else(|error| panic!("{arch:?} {name}: {error}"));
        let code = support::code_object(&backend, &problem, &PlanOptions::default());
        let resources = Resources::of(&code).unwrap();
        if resources.vgpr_spills > 0 || resources.sgpr_spills > 0 {
            spilled.push(format!("{arch:?} {name}: {resources:?}"));
        }
    }
    spilled
}

/// A problem over an FP8 cache whose blocks of four rows have scales.
fn scaled(problem: FwdProblem) -> FwdProblem {
    let scales = CacheScales::new(&problem, 4);
    problem.cache_scales(scales)
}

/// Problems for every branch of a decode kernel.
fn decode_problems(fp8: DType) -> Vec<(String, FwdProblem)> {
    let paged = |dtype, (head_dim_qk, head_dim_v)| {
        let dims = Dims { seqlen_q: 2, head_dim_qk, head_dim_v, ..DIMS };
        FwdProblem::new(QLayout::Batch, KvLayout::Paged { page_size: 16 }, dtype, dims)
    };
    let rows = [(64, 64), (128, 128), (192, 128), (256, 256), (40, 72), (33, 5), (250, 250)];
    let mut all: Vec<_> =
        rows.into_iter().map(|dims| (format!("d{}x{}", dims.0, dims.1), paged(DType::Bf16, dims))).collect();
    all.push(("f16".to_owned(), paged(DType::F16, (128, 128))));
    for (qk, v) in [(128, 128), (240, 256), (200, 200)] {
        all.push((format!("softcap/d{qk}x{v}"), paged(DType::Bf16, (qk, v)).softcap(20.0)));
    }
    for (qk, v) in [(128, 128), (240, 256), (200, 200)] {
        let mut quantised = paged(DType::Bf16, (qk, v)).softcap(20.0);
        quantised.cache.dtype = Some(fp8);
        all.push((format!("{fp8} cache/d{qk}x{v}"), quantised.clone()));
        all.push((format!("{fp8} cache with scales/d{qk}x{v}"), scaled(quantised)));
    }
    // The rows that follow are shared by several waves: latent rows, and separate K and V.
    let mut latent = paged(DType::Bf16, (576, 512));
    (latent.cache.v_in_k, latent.strides.v) = (true, latent.strides.k);
    all.push(("latent".to_owned(), latent.clone()));
    all.push(("latent softcap".to_owned(), latent.softcap(20.0)));
    for (qk, v) in [(512, 512), (576, 512), (513, 511)] {
        all.push((format!("d{qk}x{v}"), paged(DType::Bf16, (qk, v))));
    }
    all.push(("softcap/d512".to_owned(), paged(DType::F16, (512, 512)).softcap(20.0)));
    for (qk, v) in [(576, 512), (500, 511)] {
        let mut quantised = paged(DType::Bf16, (qk, v)).softcap(20.0);
        quantised.cache.dtype = Some(fp8);
        all.push((format!("{fp8} cache/d{qk}x{v}"), quantised.clone()));
        all.push((format!("{fp8} cache with scales/d{qk}x{v}"), scaled(quantised)));
    }
    // The problems have lists of keys: latent rows and short ones, positions in pages and addresses.
    for (qk, v) in [(576, 512), (512, 512), (128, 128), (256, 256), (33, 5)] {
        let mut problem = paged(DType::Bf16, (qk, v));
        if v == 512 {
            (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
        }
        let lists = KeyLists::new(&problem, 2048);
        let problem = problem.lists(lists);
        all.push((format!("lists/d{qk}x{v}"), problem.clone()));
        let addresses = lists.entries(ListEntries::Addresses);
        all.push((format!("lists of addresses/d{qk}x{v}"), problem.clone().softcap(20.0).lists(addresses)));
        let second = SecondCache::new(&problem, problem.layout.kv, 4096);
        let listed = KeyLists::new(&second.alone(&problem), 512);
        all.push((format!("two caches/d{qk}x{v}"), problem.lists(None).second(second.lists(listed))));
    }
    all
}

/// Problems over lists of rows of bytes.
fn rows_of_bytes() -> Vec<(String, FwdProblem)> {
    let mut all = Vec::new();
    for rows in [CacheRows::Bytes656, CacheRows::Bytes584] {
        let (head_dim_qk, head_dim_v) = (rows.head_dim_qk(), CacheRows::HEAD_DIM_V);
        let dims = Dims { num_heads_kv: 1, head_dim_qk, head_dim_v, ..DIMS };
        let layout = KvLayout::Paged { page_size: 64 };
        let mut problem = FwdProblem::new(QLayout::Batch, layout, DType::Bf16, dims);
        problem = problem.v_in_k(true).cache_rows(rows);
        problem.strides.k = Strides::bshd(problem.k_in_memory(problem.shape_k()).0);
        problem.strides.v = problem.strides.k;
        let lists = KeyLists::new(&problem, 2048);
        let name = format!("rows of {} bytes", rows.row_bytes());
        all.push((name.clone(), problem.clone().lists(lists)));
        let addresses = lists.entries(ListEntries::Addresses);
        all.push((format!("addresses of {name}"), problem.softcap(20.0).lists(addresses)));
    }
    all
}

#[test]
fn decode_kernels_over_rows_of_bytes_do_not_spill() {
    if !support::clang_is_there() {
        return;
    }
    for arch in Arch::CDNA.into_iter().chain(Arch::RDNA) {
        let backend = fmha_rocm::pretend(arch.name()).unwrap();
        let kernel = if Arch::RDNA.contains(&arch) { "rdna_decode" } else { "cdna_decode" };
        for (name, problem) in rows_of_bytes() {
            let options = PlanOptions::default().kernel(kernel);
            let code = support::code_object(&backend, &problem.validate().unwrap(), &options);
            let found = Resources::of(&code).unwrap();
            println!("{arch:?} {name}: {found:?}");
            assert_eq!((found.vgpr_spills, found.sgpr_spills), (0, 0), "{arch:?} {name}: {found:?}");
        }
    }
}

fn no_decode_spills(compiles: fn(usize, usize) -> bool) {
    if !support::clang_is_there() {
        return;
    }
    let of_arch = |at: usize, arch: Arch| {
        let backend = fmha_rocm::pretend(arch.name()).unwrap();
        let fp8 = if arch == Arch::Gfx942 { DType::E4m3Fnuz } else { DType::E4m3Fn };
        for (number, (name, problem)) in decode_problems(fp8).into_iter().enumerate() {
            if !compiles(number, at) {
                continue;
            }
            let kernel = if arch.is_rdna() { "rdna_decode" } else { "cdna_decode" };
            let options = PlanOptions::default().kernel(kernel);
            let problem = problem.validate().unwrap();
            let code = support::code_object(&backend, &problem, &options);
            let found = Resources::of(&code).unwrap();
            assert_eq!((found.vgpr_spills, found.sgpr_spills), (0, 0), "{arch:?} {name}: {found:?}");
            if arch.is_rdna() {
                // LDS leaves room for two workgroups of rows that waves share, and for three of other rows, on a
                // pair of compute units.
                let most = if problem.dims.head_dim_qk > 256 { 64 << 10 } else { (128 << 10) / 3 };
                assert!(found.lds_bytes <= most, "{arch:?} {name}: {found:?}");
            } else if problem.dims.head_dim_qk > 256
                && !(problem.lists.is_some() && problem.score.softcap.is_some())
            {
                // Registers and a compute unit's LDS leave room for two waves per SIMD, as the plan's parts assume.
                assert!(found.vgprs <= 256 && found.lds_bytes <= 32 << 10, "{arch:?} {name}: {found:?}");
            }
        }
    };
    std::thread::scope(|scope| {
        for (at, arch) in Arch::ALL.into_iter().enumerate() {
            scope.spawn(move || of_arch(at, arch));
        }
    });
}

#[test]
fn decode_compiles_somewhere_without_spills() {
    no_decode_spills(|problem, arch| problem % Arch::ALL.len() == arch);
}

#[test]
#[ignore = "some 110 kernels are compiled: cargo xtask test --all"]
fn decode_compiles_everywhere_without_spills() {
    no_decode_spills(|_, _| true);
}

#[test]
fn what_decode_does_not_take_is_refused_with_field_and_number() {
    let refusal = |arch: &str, problem: FwdProblem, options: &PlanOptions| {
        let backend = fmha_rocm::pretend(arch).unwrap();
        backend.plan_fwd(&problem.validate().unwrap(), options).unwrap_err().to_string()
    };
    let paged =
        |dims: Dims| FwdProblem::new(QLayout::Batch, KvLayout::Paged { page_size: 16 }, DType::Bf16, dims);
    let named = PlanOptions::default().kernel("cdna_decode");
    let listed = || {
        let problem = FwdProblem::batch(DType::Bf16, DIMS);
        let lists = KeyLists::new(&problem, 64);
        problem.lists(lists)
    };
    for (arch, problem, options, part) in [
        ("gfx942", paged(dims(577, 512)), named.clone(), "head_dim_qk 577 is larger than 576"),
        ("gfx942", paged(dims(576, 513)), named.clone(), "head_dim_v 513 is larger than 512"),
        ("gfx942", paged(DIMS).p_drop(0.25), named.clone(), "p_drop 0.25 is not taken"),
        ("gfx942", paged(DIMS), named.clone().tile([("split_keys", "48")]), "split_keys=48"),
        ("gfx942", FwdProblem::batch(DType::F32, DIMS), named.clone(), "dtype_qk f32 with dtype_v f32"),
        (
            "gfx942",
            listed().bias(Bias::Alibi { per_batch: false }),
            named.clone(),
            "beside indices of topk 64",
        ),
        ("gfx942", listed(), named.clone().tile([("shares", "4")]), "shares=4: lists of keys have parts"),
        ("gfx942", listed(), PlanOptions::default().row_invariant(true), "row_invariant"),
        ("gfx1100", listed(), named.clone(), "gfx1100 has no MFMA"),
    ] {
        let text = refusal(arch, problem, &options);
        assert!(text.contains(part), "{text}");
    }
}

fn backward_problems() -> Vec<(String, BwdProblem)> {
    let of = |dtype, (qk, v)| FwdProblem::batch(dtype, dims(qk, v));
    let masked = |mask: &str| of(DType::Bf16, (128, 128)).mask(mask.parse().unwrap());
    let mut odd = of(DType::F16, (70, 97));
    odd.strides.q.seq += 1;
    odd.strides.q.batch += 300;
    let plain = [(64, 64), (128, 128), (256, 256), (192, 128), (192, 192), (256, 128)];
    let mut all: Vec<(String, FwdProblem)> =
        plain.into_iter().map(|(qk, v)| (format!("d{qk}x{v}"), of(DType::F16, (qk, v)))).collect();
    all.push(("window with sink columns".to_owned(), masked("b:30,0,4")));
    all.push(("softcap".to_owned(), masked("b").softcap(20.0)));
    all.push(("dropout".to_owned(), masked("b").p_drop(0.2)));
    all.push(("odd strides".to_owned(), odd));
    for (qk, v) in [(128, 128), (576, 512)] {
        let problem = of(DType::Bf16, (qk, v)).softcap(20.0);
        let lists = KeyLists::new(&problem, 2048);
        all.push((format!("lists/d{qk}x{v}"), problem.lists(lists)));
    }
    let mut all: Vec<_> = all.into_iter().map(|(name, fwd)| (name, BwdProblem::new(fwd))).collect();
    all.push(("f32 gradients".to_owned(), BwdProblem::new(masked("b")).dtype_grad(DType::F32)));
    for dim in [64, 128, 256] {
        let table = "table: bf16[_, _]; s + table[h, k - q]".parse().ok();
        let problem = of(DType::Bf16, (dim, dim)).score_code(table);
        let problem = problem.captured(vec![CapturedTensor::dense("table", &[4, 99])]);
        let wanted = CapturedGrad { name: "table".to_owned(), dtype: DType::F32 };
        all.push((format!("captured/d{dim}x{dim}"), BwdProblem::new(problem).dcaptured(vec![wanted])));
    }
    all
}

/// No product kernel spills vector registers, but for those of which the number is named here. Scalar registers may
/// spill to lanes of vector registers, which is no memory access, when modifiers or loads by elements need many.
fn no_product_spills(compiles: fn(usize, usize) -> bool) {
    if !support::clang_is_there() {
        return;
    }
    let of_arch = |at: usize, arch: Arch| {
        let backend = fmha_rocm::pretend(arch.name()).unwrap();
        for (problem, (name, mut bwd)) in backward_problems().into_iter().enumerate() {
            let has_lists = bwd.fwd.lists.is_some();
            if has_lists && arch.is_rdna() && bwd.fwd.dims.head_dim_qk > 256 {
                // The kernel on WMMA refuses a soft-cap with latent rows.
                bwd.fwd.score.softcap = None;
            }
            if !compiles(problem, at) {
                continue;
            }
            let may_lack_scalars = ["softcap", "dropout", "odd strides"].contains(&&*name);
            let named = match (arch.is_rdna(), has_lists) {
                (true, true) => "rdna_lists",
                (true, false) => "rdna_bwd",
                (false, true) => "cdna_lists",
                (false, false) => "cdna_bwd",
            };
            let options = PlanOptions::default().kernel(named.to_owned());
            for (kernel, code) in support::products(&backend, &bwd.validate().unwrap(), &options) {
                let found = Resources::of(&code).unwrap();
                // Sums of dK and dV of latent rows nearly fill a lane of RDNA.
                let spilled = match (&*name, &*kernel, arch) {
                    ("lists/d576x512", "rdna_lists_keys", Arch::Gfx1201) => 35,
                    ("lists/d576x512", "rdna_lists_keys", _) => 41,
                    // A function of the score beside wide rows takes gfx1201's last registers.
                    ("captured/d128x128", "rdna_bwd_dkdv", Arch::Gfx1201) => 1,
                    ("captured/d256x256", "rdna_bwd_dk", Arch::Gfx1201) => 7,
                    ("captured/d256x256", "rdna_bwd_dq", Arch::Gfx1201) => 10,
                    _ => 0,
                };
                assert_eq!(found.vgpr_spills, spilled, "{arch:?} {name} {kernel}: {found:?}");
                let most = match (arch.is_rdna(), has_lists) {
                    (true, false) => 0,
                    (false, false) if name.starts_with("captured") => 32,
                    (_, true) => 72,
                    (false, false) => u64::from(may_lack_scalars) * 24,
                };
                assert!(found.sgpr_spills <= most, "{arch:?} {name} {kernel}: {found:?}");
            }
        }
    };
    std::thread::scope(|scope| {
        for (at, arch) in Arch::ALL.into_iter().enumerate() {
            scope.spawn(move || of_arch(at, arch));
        }
    });
}

#[test]
fn the_backward_compiles_somewhere_without_spills() {
    no_product_spills(|problem, arch| problem % Arch::ALL.len() == arch);
}

#[test]
#[ignore = "some 100 kernels are compiled: cargo xtask test --all"]
fn the_backward_compiles_everywhere_without_spills() {
    no_product_spills(|_, _| true);
}

/// The problem under masks as data; their kind does not matter, since all kinds have one kernel.
fn under_intervals(problem: FwdProblem) -> FwdProblem {
    let intervals = Intervals::batch(&problem, MaskAxes::SHARED, 2);
    problem.intervals(intervals)
}

/// Problems under masks as data, with features that also take registers: modifiers, a mask as code, dropout and
/// loads by elements.
fn masked_problems(arch: Arch) -> Vec<(String, FwdProblem)> {
    let of = |dtype, (qk, v)| FwdProblem::batch(dtype, dims(qk, v));
    let mut all = Vec::new();
    let mut add = |name: &str, problem| all.push((name.to_owned(), under_intervals(problem)));
    for (qk, v) in [(64, 64), (128, 128), (192, 128), (256, 256)] {
        add(&format!("d{qk}x{v}"), of(DType::Bf16, (qk, v)));
        add(&format!("softcap/d{qk}x{v}"), of(DType::Bf16, (qk, v)).softcap(20.0));
    }
    add("code", of(DType::Bf16, (128, 128)).mask_code(draw::mask(3, Kind::Bare).ok()));
    add("dropout", of(DType::Bf16, (128, 128)).p_drop(0.2));
    let mut odd = of(DType::F16, (70, 97));
    odd.strides.q.seq += 1;
    odd.strides.q.batch += 300;
    add("odd strides", odd);
    let fp8 = if arch == Arch::Gfx942 { DType::E4m3Fnuz } else { DType::E4m3Fn };
    if !matches!(arch, Arch::Gfx90a | Arch::Gfx1100) {
        add("fp8", of(fp8, (128, 128)).dtype_o(DType::Bf16));
    }
    all
}

/// Resources of the kernels under masks as data, as `(name, resources)`, forward and then backward.
fn masked_resources(arch: Arch, compiles: impl Fn(usize) -> bool) -> Vec<(String, Resources)> {
    let backend = fmha_rocm::pretend(arch.name()).unwrap();
    let mut found = Vec::new();
    let (forward, backward) =
        if arch.is_rdna() { ("rdna_fwd", "rdna_bwd") } else { ("cdna_fwd", "cdna_bwd") };
    for (_, (name, fwd)) in
        masked_problems(arch).into_iter().enumerate().filter(|(number, _)| compiles(*number))
    {
        let problem = fwd.clone().validate().unwrap();
        let code = support::code_object(&backend, &problem, &PlanOptions::default().kernel(forward));
        found.push((format!("{} {forward} {name}", arch.name()), Resources::of(&code).unwrap()));
        if fwd.dtypes.qk.is_fp8() {
            continue;
        }
        let options = PlanOptions::default().kernel(backward);
        for (kernel, code) in support::products(&backend, &BwdProblem::new(fwd).validate().unwrap(), &options)
        {
            found.push((format!("{} {kernel} {name}", arch.name()), Resources::of(&code).unwrap()));
        }
    }
    found
}

fn no_masked_spills(compiles: fn(usize, usize) -> bool) {
    if !support::clang_is_there() {
        return;
    }
    let spilled: Vec<String> = std::thread::scope(|scope| {
        let of_arch = |(at, arch)| scope.spawn(move || masked_resources(arch, |number| compiles(number, at)));
        let archs: Vec<_> = Arch::ALL.into_iter().enumerate().map(of_arch).collect();
        let all = archs.into_iter().flat_map(|arch| arch.join().unwrap());
        all.inspect(|(name, found)| println!("{name}: {found:?}"))
            .filter(|(_, found)| found.vgpr_spills > 0)
            .map(|(name, found)| format!("{name}: {found:?}"))
            .collect()
    });
    assert!(spilled.is_empty(), "{}", spilled.join("\n"));
}

#[test]
fn kernels_under_masks_as_data_compile_somewhere_without_spills() {
    // Rows of 128 elements, the widest of most calls, are compiled for one architecture of each family.
    no_masked_spills(|problem, arch| problem == 2 && (arch == 1 || arch == 3));
}

#[test]
#[ignore = "some 200 kernels are compiled: cargo xtask test --all"]
fn kernels_under_masks_as_data_compile_everywhere_without_spills() {
    no_masked_spills(|_, _| true);
}

#[test]
fn what_the_kernel_does_not_take_is_refused_with_field_and_number() {
    let backend = fmha_rocm::pretend("gfx942").unwrap();
    let refusal = |problem: FwdProblem, tile: &[(&str, &str)]| {
        let options = PlanOptions::default().tile(tile.iter().copied());
        backend.plan_fwd(&problem.validate().unwrap(), &options).unwrap_err().to_string()
    };
    let bf16 = || FwdProblem::batch(DType::Bf16, DIMS);
    for (problem, tile, part) in [
        (FwdProblem::batch(DType::Bf16, dims(640, 128)), &[][..], "head_dim_qk 640 is larger than 256"),
        (FwdProblem::batch(DType::F32, DIMS), &[], "dtype_qk f32"),
        (FwdProblem::batch(DType::E4m3Fn, DIMS), &[], "dtype_qk e4m3fn"),
        (bf16(), &[("block_m", "100")], "block_m=100"),
        (bf16(), &[("block_n", "128")], "131072 bytes of LDS, more than 65536"),
        (bf16(), &[("block_k", "1")], "block_k=1: there is no such field"),
        (bf16(), &[("order", "dynamic")], "order=dynamic is not single or static"),
        (bf16(), &[("workgroups", "3")], "workgroups=3 is a stride's, and order is single"),
        (bf16(), &[("order", "static"), ("workgroups", "0")], "workgroups=0 is not a number from 1"),
    ] {
        let text = refusal(problem, tile);
        assert!(text.contains(part), "{text}");
    }
    let rdna = fmha_rocm::pretend("gfx1100").unwrap();
    for (tile, part) in [
        (("block_m", "100"), "block_m=100"),
        (("block_n", "128"), "block_n=128"),
        (("order", "static"), "order=static: there is no such field"),
    ] {
        let options = PlanOptions::default().tile([tile]);
        let text = rdna.plan_fwd(&bf16().validate().unwrap(), &options).unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
    }
}
