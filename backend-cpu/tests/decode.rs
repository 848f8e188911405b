//! A few queries over a long cache: each head has bits of its own, whatever is read together and in whatever order.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use fmha_core::{
    Append, Bias, BlockTable, CacheArgs, DType, Descale, DevSlice, DevSliceMut, Device, Dims, FwdArgs,
    FwdProblem, KvLayout, MaskSpec, PlanOptions, Rotary, RotaryPairs, SeqArgs, Shape, Strides,
};
use fmha_cpu::{Config, CpuBackend, Isa};
use support::{Definition, Inputs, Tensor, check_fwd, run_fwd};

fn backends() -> Vec<(Isa, Device)> {
    let with = |isa, threads| {
        Device::new(CpuBackend::with(Config { threads: Some(threads), isa: Some(isa) }).unwrap())
    };
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    available.flat_map(move |isa| [1, 5].map(|threads| (isa, with(isa, threads)))).collect()
}

/// Number of keys: more than a chunk, and not a multiple of a block.
const SEQLEN_K: u32 = 700;

fn problem(dtype: DType, seqlen_q: u32, heads: (u32, u32), head_dims: (u32, u32)) -> FwdProblem {
    problem_of(dtype, (seqlen_q, SEQLEN_K), heads, head_dims)
}

fn problem_of(dtype: DType, seqlens: (u32, u32), heads: (u32, u32), head_dims: (u32, u32)) -> FwdProblem {
    let ((seqlen_q, seqlen_k), (num_heads_q, num_heads_kv)) = (seqlens, heads);
    let (head_dim_qk, head_dim_v) = head_dims;
    let dims = Dims { batch: 2, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v };
    FwdProblem::batch(dtype, dims).write_lse(true).mask(MaskSpec::CAUSAL)
}

fn copy(from: &Tensor, to: &mut Tensor, shape: Shape, place: impl Fn(u32, u32) -> (u32, u32)) {
    for b in 0..shape.batch {
        for s in 0..shape.seq {
            let (b2, s2) = place(b, s);
            for h in 0..shape.head {
                for d in 0..shape.dim {
                    to.set(b2, s2, h, d, from.get(b, s, h, d));
                }
            }
        }
    }
}

#[test]
fn few_queries_over_a_long_cache_keep_the_accuracy_promise() {
    let backends = backends();
    for dtype in DType::ALL {
        for (seqlen_q, heads, head_dims) in
            [(1, (8, 8), (64, 64)), (3, (6, 2), (40, 24)), (1, (5, 1), (128, 96)), (2, (20, 1), (96, 160))]
        {
            let inputs = Inputs::random(problem(dtype, seqlen_q, heads, head_dims), &[], 5);
            let definition = Definition::of(&inputs);
            for (isa, backend) in &backends {
                let what = format!("{isa} {dtype} {seqlen_q} {heads:?} {head_dims:?}");
                check_fwd(backend, &inputs, &definition, &what);
            }
        }
    }
}

#[test]
fn a_head_has_the_same_bits_alone_and_read_together_with_others() {
    let (backends, options) = (backends(), PlanOptions::default());
    for dtype in [DType::F32, DType::F16, DType::Bf16, DType::E4m3Fn] {
        for (seqlen_q, heads, dim_qk) in [(1, (8, 8), 48), (2, (12, 4), 48), (2, (32, 4), 96)] {
            let mut problem = problem(dtype, seqlen_q, heads, (dim_qk, 64));
            if dtype == DType::F16 {
                problem.score.bias = Bias::Alibi { per_batch: false };
            }
            let together = Inputs::random(problem, &[], 6);
            let mut apart = together.clone();
            let (k, v) = (apart.problem.shape_k(), apart.problem.shape_v());
            (apart.problem.strides.k, apart.problem.strides.v) = (Strides::bhsd(k), Strides::bhsd(v));
            apart.k = Tensor::poisoned(dtype, apart.problem.strides.k, k);
            apart.v = Tensor::poisoned(dtype, apart.problem.strides.v, v);
            copy(&together.k, &mut apart.k, k, |b, s| (b, s));
            copy(&together.v, &mut apart.v, v, |b, s| (b, s));
            for (isa, backend) in &backends {
                let (one, other) =
                    (run_fwd(backend, &together, &options), run_fwd(backend, &apart, &options));
                assert!(one.o.bytes == other.o.bytes && one.lse == other.lse, "{isa} {dtype} {heads:?}");
            }
        }
    }
}

/// Runs a call on a paged cache or on an FP8 cache; returns O and LSE.
fn run_on(backend: &Device, inputs: &Inputs, table: Option<(&[i32], u32)>) -> (Vec<u64>, Vec<f32>) {
    let problem = &inputs.problem;
    let mut o = Tensor::poisoned(problem.dtypes.o, problem.strides.o, problem.shape_o());
    let mut lse =
        vec![f32::NAN; (problem.dims.batch * problem.dims.num_heads_q * problem.dims.seqlen_q) as usize];
    let plan = backend.plan_fwd(&problem.clone().validate().unwrap(), &PlanOptions::default()).unwrap();
    let mut args = FwdArgs::new(inputs.q.slice(), inputs.k.slice(), inputs.v.slice(), o.slice_mut());
    args.lse = Some(DevSliceMut::host(&mut lse));
    args.score = inputs.score();
    if let Some((pages, max_pages)) = table {
        args.seq.totals.num_pages = Some(pages.len() as u32);
        args.seq.block_table = Some(BlockTable { pages: DevSlice::host(pages), max_pages });
    }
    plan.run(&mut args, &backend.default_stream()).unwrap();
    (o.bytes, lse)
}

/// Runs the call of `strided` on a paged cache with the same keys and values. The pages are in reverse order.
fn run_on_pages(backend: &Device, strided: &Inputs, page_size: u32) -> (Vec<u64>, Vec<f32>) {
    let (dtype, dims) = (strided.problem.stored_k(), strided.problem.dims);
    let max_pages = dims.seqlen_k.div_ceil(page_size);
    let num_pages = 2 * max_pages;
    let table: Vec<i32> = (0..num_pages as i32).rev().collect();
    let mut paged = strided.clone();
    let kv_layout = KvLayout::Paged { page_size };
    let base = FwdProblem::new(paged.problem.layout.q, kv_layout, dtype, dims);
    (paged.problem.layout.kv, paged.problem.strides.k, paged.problem.strides.v) =
        (kv_layout, base.strides.k, base.strides.v);
    let shape = |dim| Shape { batch: num_pages, seq: page_size, head: dims.num_heads_kv, dim };
    let (shape_k, shape_v) = (shape(dims.head_dim_qk), shape(dims.head_dim_v));
    paged.k = Tensor::poisoned(dtype, Strides::bshd(shape_k), shape_k);
    paged.v = Tensor::poisoned(dtype, Strides::bshd(shape_v), shape_v);
    (paged.problem.strides.k, paged.problem.strides.v) = (paged.k.strides, paged.v.strides);
    let place = |b: u32, s: u32| (num_pages - 1 - (b * max_pages + s / page_size), s % page_size);
    copy(&strided.k, &mut paged.k, strided.problem.shape_k(), place);
    copy(&strided.v, &mut paged.v, strided.problem.shape_v(), place);
    run_on(backend, &paged, Some((&table, max_pages)))
}

#[test]
fn pages_in_any_order_are_the_strided_cache() {
    for (isa, backend) in backends() {
        for (dtype, heads_q, dim_v) in [(DType::F32, 8, 40), (DType::Bf16, 8, 40), (DType::Bf16, 32, 96)] {
            let strided = Inputs::random(problem(dtype, 2, (heads_q, 4), (64, dim_v)), &[], 7);
            let wanted = run_on(&backend, &strided, None);
            for page_size in [1, 7, 16, 64, 1000] {
                let found = run_on_pages(&backend, &strided, page_size);
                assert!(found == wanted, "{isa} {dtype} {heads_q} heads, pages of {page_size}");
            }
        }
    }
}

/// Inputs with a cache of FP8, and equal inputs with the cache converted to Q's type.
fn narrow_and_wide(
    problem: FwdProblem,
    dtype_cache: DType,
    kind: Descale,
    descales: [f32; 2],
) -> (Inputs, Inputs) {
    let mut narrow = Inputs::random(problem, &[], 8);
    let dims = narrow.problem.dims;
    narrow.problem.cache.dtype = Some(dtype_cache);
    (narrow.problem.scales.descale_k, narrow.problem.scales.descale_v) = (kind, kind);
    // Descales are equal for all heads, or different.
    let descales = descales.map(|descale| {
        let count = kind.num_elems(dims.batch, dims.num_heads_kv) as usize;
        [1.0, 0.5, 1.0, -1.5].into_iter().cycle().take(count).map(|x| x * descale).collect::<Vec<f32>>()
    });
    (narrow.descales[1], narrow.descales[2]) = (descales[0].clone(), descales[1].clone());
    let mut wide = narrow.clone();
    (wide.problem.cache.dtype, wide.descales) = (None, Default::default());
    (wide.problem.scales.descale_k, wide.problem.scales.descale_v) = (Descale::None, Descale::None);
    let shapes = [narrow.problem.shape_k(), narrow.problem.shape_v()];
    for (n, (narrow, wide)) in
        [(&mut narrow.k, &mut wide.k), (&mut narrow.v, &mut wide.v)].into_iter().enumerate()
    {
        let (shape, descales) = (shapes[n], &descales[n]);
        let mut codes = Tensor::poisoned(dtype_cache, narrow.strides, shape);
        copy(narrow, &mut codes, shape, |b, s| (b, s));
        *narrow = codes;
        for b in 0..shape.batch {
            for s in 0..shape.seq {
                for h in 0..shape.head {
                    let descale = descales[kind.index(b, h, dims.num_heads_kv)];
                    for d in 0..shape.dim {
                        let value = narrow.get(b, s, h, d) as f32 * descale;
                        wide.set(b, s, h, d, f64::from(value));
                    }
                }
            }
        }
    }
    (narrow, wide)
}

#[test]
fn an_fp8_cache_is_its_values_in_the_type_of_q() {
    let backends = backends();
    for (dtype, dtype_cache, seqlen_q, heads, head_dims, descales) in [
        (DType::F16, DType::E4m3Fn, 1, (4, 2), (64, 64), [0.7f32, 1.3]),
        (DType::Bf16, DType::E4m3Fn, 1, (4, 2), (64, 64), [0.7, 1.3]),
        // Rows do not end with a vector of codes, and queries see different keys.
        (DType::Bf16, DType::E5m2, 3, (8, 2), (96, 40), [-0.7, 1e-3]),
        (DType::Bf16, DType::E4m3Fn, 1, (12, 1), (136, 200), [448.0, -1.3]),
        // Rows use tiles if the processor has them; the last tile is half a vector of codes, and there are more queries
        // than a tile has.
        (DType::Bf16, DType::E4m3Fn, 1, (16, 2), (96, 160), [0.7, 1.3]),
        (DType::Bf16, DType::E5m2, 2, (20, 1), (128, 64), [-0.7, 1e-3]),
        (DType::Bf16, DType::E4m3Fnuz, 1, (16, 2), (64, 128), [0.7, 1.3]),
        (DType::Bf16, DType::E4m3Fnuz, 2, (4, 4), (128, 128), [0.7, 1.3]),
    ] {
        let problem = problem(dtype, seqlen_q, heads, head_dims);
        let (narrow, wide) = narrow_and_wide(problem, dtype_cache, Descale::PerTensor, descales);
        for (isa, backend) in &backends {
            assert!(
                run_on(backend, &narrow, None) == run_on(backend, &wide, None),
                "{isa} {dtype} {dtype_cache} {heads:?} {head_dims:?}"
            );
        }
    }
}

/// Caches in pages and of FP8 give bits equal to the strided cache, for few queries and, in tiles, for many.
#[test]
fn small_caches_in_pages_and_of_fp8_are_the_strided_ones_for_few_queries_and_for_many() {
    for (isa, backend) in backends() {
        for (dtype, seqlen_q, heads, head_dims) in [
            (DType::F32, 2, (4, 2), (24, 16)),
            (DType::F32, 12, (4, 2), (24, 16)),
            (DType::Bf16, 12, (2, 2), (17, 40)),
        ] {
            let problem = problem_of(dtype, (seqlen_q, 70), heads, head_dims);
            let strided = Inputs::random(problem, &[], 9);
            let wanted = run_on(&backend, &strided, None);
            for page_size in [1, 7, 64] {
                let found = run_on_pages(&backend, &strided, page_size);
                assert!(found == wanted, "{isa} {dtype} {seqlen_q} queries, pages of {page_size}");
            }
        }
        for (dtype, dtype_cache, seqlen_q, heads, head_dims, descales) in [
            (DType::F16, DType::E4m3Fn, 1, (4, 2), (24, 40), [0.7f32, 1.3]),
            (DType::Bf16, DType::E4m3Fn, 1, (4, 2), (64, 72), [0.7, 1.3]),
            (DType::Bf16, DType::E5m2, 3, (4, 2), (40, 24), [-0.7, 1e-3]),
            (DType::Bf16, DType::E4m3Fn, 12, (4, 2), (40, 24), [0.7, 1.3]),
            (DType::F16, DType::E5m2, 12, (4, 4), (24, 40), [0.7, 1.3]),
        ] {
            let problem = problem_of(dtype, (seqlen_q, 70), heads, head_dims);
            for kind in [Descale::PerTensor, Descale::PerKvHead] {
                let (narrow, wide) = narrow_and_wide(problem.clone(), dtype_cache, kind, descales);
                let what = format!("{isa} {dtype} {dtype_cache} {seqlen_q} queries, {kind:?}");
                let wanted = run_on(&backend, &wide, None);
                assert!(run_on(&backend, &narrow, None) == wanted, "{what}");
                // A block of 64 keys ends within a page.
                assert!(run_on_pages(&backend, &narrow, 48) == wanted, "{what}, in pages");
            }
        }
    }
}

/// New rows are written rotated, and queries are rotated, in two sequences whose caches have different numbers of
/// rows before the call.
#[test]
fn new_rows_are_written_turned_and_queries_are_turned_to_their_positions() {
    const BEFORE: [u32; 2] = [20, 33];
    const NEW: u32 = 3;
    const HALF: u32 = 8;
    let rotary = Rotary { dim: 2 * HALF, pairs: RotaryPairs::Half, max_pos: 64, dtype: DType::F32 };
    let table = |salt: u32| -> Vec<f32> {
        (0..64 * HALF).map(|at| ((at * 37 + salt) % 101) as f32 / 50.0 - 1.0).collect()
    };
    let (cos, sin) = (table(1), table(60));
    let turn = |tensor: &mut Tensor, (b, s): (u32, u32), heads: u32, position: u32| {
        for h in 0..heads {
            let mut row: Vec<f32> = (0..24).map(|d| tensor.get(b, s, h, d) as f32).collect();
            let at = |i: u32| (position * HALF + i) as usize;
            rotary.turn(&mut row, |i| (cos[at(i)], sin[at(i)]));
            for (d, x) in (0..).zip(row) {
                tensor.set(b, s, h, d, x.into());
            }
        }
    };
    for (isa, backend) in backends() {
        for (seqlen_q, mask) in [(2, "b"), (12, "b"), (12, "0")] {
            let what = format!("{isa} {seqlen_q} queries, mask {mask}");
            let mut plain = problem_of(DType::F32, (seqlen_q, 40), (4, 2), (24, 16));
            (plain.mask, plain.layout.seqused_k) = (mask.parse().unwrap(), true);
            let lengths = BEFORE.map(|before| [(seqlen_q, seqlen_q), (40, before + NEW)]);
            let raw = Inputs::random(plain.clone(), &lengths, 10);
            let mut turned = raw.clone();
            for (b, before) in (0..).zip(BEFORE) {
                for i in 0..seqlen_q {
                    let advance = if mask == "b" { i } else { 0 };
                    turn(&mut turned.q, (b, i), 4, before + advance);
                }
                for n in 0..NEW {
                    turn(&mut turned.k, (b, before + n), 2, before + n);
                }
            }
            let wanted = support::run_fwd(&backend, &turned, &PlanOptions::default());

            let mut problem = plain;
            problem.cache.append = Some(Append::batch(&problem, NEW));
            problem.cache.rotary = Some(rotary);
            let append = problem.cache.append.unwrap();
            let rows = |from: &Tensor, strides: Strides, dim: u32| {
                let shape = Shape { batch: 2, seq: NEW, head: 2, dim };
                let mut new = Tensor::poisoned(DType::F32, strides, shape);
                let mut cache = from.clone();
                for (b, n, h, d) in (0..2).flat_map(|b| {
                    (0..NEW).flat_map(move |n| (0..2).flat_map(move |h| (0..dim).map(move |d| (b, n, h, d))))
                }) {
                    let s = BEFORE[b as usize] + n;
                    new.set(b, n, h, d, from.get(b, s, h, d));
                    cache.set(b, s, h, d, 77.0);
                }
                (new, cache)
            };
            let (k_new, mut k) = rows(&raw.k, append.k_new, 24);
            let (v_new, mut v) = rows(&raw.v, append.v_new, 16);
            let valid = problem.validate().unwrap();
            let mut o = Tensor::poisoned(DType::F32, valid.strides.o, valid.shape_o());
            let mut lse = vec![f32::NAN; wanted.lse.len()];
            let before = BEFORE.map(u32::cast_signed);
            let mut args = FwdArgs::new(raw.q.slice(), k.slice_mut(), v.slice_mut(), o.slice_mut());
            args.lse = Some(DevSliceMut::host(&mut lse));
            args.seq = SeqArgs::default().seqused_k(DevSlice::host(&before));
            args.cache = CacheArgs::default()
                .k_new(k_new.slice())
                .v_new(v_new.slice())
                .cos(DevSlice::host(&cos))
                .sin(DevSlice::host(&sin));
            let plan = backend.plan_fwd(&valid, &PlanOptions::default()).unwrap();
            plan.run(&mut args, &backend.default_stream()).unwrap();
            assert!(o.bytes == wanted.o.bytes && lse == wanted.lse, "{what}");
            assert!(k.bytes == turned.k.bytes && v.bytes == turned.v.bytes, "{what}: the cache");
        }
    }
}
