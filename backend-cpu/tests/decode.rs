//! A few queries over a long cache: what is read together, in whatever order, gives each head its own bits.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use fmha_core::{
    BlockTable, DType, Descale, DevSlice, DevSliceMut, Dims, FmhaBackend, FwdArgs, FwdProblem, KvLayout,
    MaskSpec, PlanOptions, Shape, Stream, Strides,
};
use fmha_cpu::{Config, CpuBackend, Isa};
use support::{Inputs, Tensor, check_fwd, run_fwd};

fn backends() -> impl Iterator<Item = (Isa, CpuBackend)> {
    let with = |isa, threads| CpuBackend::with(Config { threads: Some(threads), isa: Some(isa) }).unwrap();
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    available.flat_map(move |isa| [1, 5].map(|threads| (isa, with(isa, threads))))
}

/// More than a chunk of keys, and no whole block at its end.
const SEQLEN_K: u32 = 700;

fn problem(dtype: DType, seqlen_q: u32, heads: (u32, u32), head_dims: (u32, u32)) -> FwdProblem {
    let (num_heads_q, num_heads_kv) = heads;
    let (head_dim_qk, head_dim_v) = head_dims;
    let dims =
        Dims { batch: 2, seqlen_q, seqlen_k: SEQLEN_K, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v };
    FwdProblem { write_lse: true, mask: MaskSpec::CAUSAL, ..FwdProblem::batch(dtype, dims) }
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
    for (isa, backend) in backends() {
        for dtype in DType::ALL {
            for (seqlen_q, heads, head_dims) in [
                (1, (8, 8), (64, 64)),
                (3, (6, 2), (40, 24)),
                (1, (5, 1), (128, 96)),
                (2, (20, 1), (96, 160)),
            ] {
                let problem = problem(dtype, seqlen_q, heads, head_dims);
                let inputs = Inputs::random(problem, &[], 5);
                check_fwd(&backend, &inputs, &format!("{isa} {dtype} {seqlen_q} {heads:?} {head_dims:?}"));
            }
        }
    }
}

#[test]
fn a_head_has_the_same_bits_alone_and_read_together_with_others() {
    for (isa, backend) in backends() {
        for dtype in [DType::F32, DType::F16, DType::Bf16, DType::E4m3Fn] {
            for (seqlen_q, heads, dim_qk) in [(1, (8, 8), 48), (2, (12, 4), 48), (2, (32, 4), 96)] {
                let together = Inputs::random(problem(dtype, seqlen_q, heads, (dim_qk, 64)), &[], 6);
                let mut apart = together.clone();
                let (k, v) = (apart.problem.shape_k(), apart.problem.shape_v());
                (apart.problem.k, apart.problem.v) = (Strides::bhsd(k), Strides::bhsd(v));
                apart.k = Tensor::poisoned(dtype, apart.problem.k, k);
                apart.v = Tensor::poisoned(dtype, apart.problem.v, v);
                copy(&together.k, &mut apart.k, k, |b, s| (b, s));
                copy(&together.v, &mut apart.v, v, |b, s| (b, s));
                let options = PlanOptions::default();
                let (one, other) =
                    (run_fwd(&backend, &together, &options), run_fwd(&backend, &apart, &options));
                assert!(one.o.bytes == other.o.bytes && one.lse == other.lse, "{isa} {dtype} {heads:?}");
            }
        }
    }
}

/// O and LSE of a call on a paged cache, or on one of FP8.
fn run_on(backend: &CpuBackend, inputs: &Inputs, table: Option<(&[i32], u32)>) -> (Vec<u64>, Vec<f32>) {
    let problem = &inputs.problem;
    let mut o = Tensor::poisoned(problem.dtype_o, problem.o, problem.shape_o());
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
    backend.run_fwd(&plan, &mut args, Stream::DEFAULT).unwrap();
    (o.bytes, lse)
}

#[test]
fn pages_in_any_order_are_the_strided_cache() {
    for (isa, backend) in backends() {
        for (dtype, heads_q, dim_v) in [(DType::F32, 8, 40), (DType::Bf16, 8, 40), (DType::Bf16, 32, 96)] {
            let strided = Inputs::random(problem(dtype, 2, (heads_q, 4), (64, dim_v)), &[], 7);
            let wanted = run_on(&backend, &strided, None);
            for page_size in [1, 7, 16, 64, 1000] {
                let max_pages = SEQLEN_K.div_ceil(page_size);
                let num_pages = 2 * max_pages;
                let table: Vec<i32> = (0..num_pages as i32).rev().collect();
                let mut paged = strided.clone();
                let kv_layout = KvLayout::Paged { page_size };
                let base = FwdProblem::new(paged.problem.q_layout, kv_layout, dtype, paged.problem.dims);
                (paged.problem.kv_layout, paged.problem.k, paged.problem.v) = (kv_layout, base.k, base.v);
                let shape = |dim| Shape { batch: num_pages, seq: page_size, head: 4, dim };
                paged.k = Tensor::poisoned(dtype, Strides::bshd(shape(64)), shape(64));
                paged.v = Tensor::poisoned(dtype, Strides::bshd(shape(dim_v)), shape(dim_v));
                (paged.problem.k, paged.problem.v) = (paged.k.strides, paged.v.strides);
                let place = |b: u32, s: u32| (num_pages - 1 - (b * max_pages + s / page_size), s % page_size);
                copy(&strided.k, &mut paged.k, strided.problem.shape_k(), place);
                copy(&strided.v, &mut paged.v, strided.problem.shape_v(), place);
                let found = run_on(&backend, &paged, Some((&table, max_pages)));
                assert!(found == wanted, "{isa} {dtype} {heads_q} heads, pages of {page_size}");
            }
        }
    }
}

#[test]
fn an_fp8_cache_is_its_values_in_the_type_of_q() {
    for (isa, backend) in backends() {
        for (dtype, dtype_cache, seqlen_q, heads, head_dims, descales) in [
            (DType::F16, DType::E4m3Fn, 1, (4, 2), (64, 64), [0.7f32, 1.3]),
            (DType::Bf16, DType::E4m3Fn, 1, (4, 2), (64, 64), [0.7, 1.3]),
            // Rows that are no whole vectors of codes; queries that see different keys.
            (DType::Bf16, DType::E5m2, 3, (8, 2), (96, 40), [-0.7, 1e-3]),
            (DType::Bf16, DType::E4m3Fn, 1, (12, 1), (136, 200), [448.0, -1.3]),
            // Tiles where there are some, the last of them half a vector of codes; more queries than a tile has.
            (DType::Bf16, DType::E4m3Fn, 1, (16, 2), (96, 160), [0.7, 1.3]),
            (DType::Bf16, DType::E5m2, 2, (20, 1), (128, 64), [-0.7, 1e-3]),
            (DType::Bf16, DType::E4m3Fnuz, 1, (16, 2), (64, 128), [0.7, 1.3]),
            (DType::Bf16, DType::E4m3Fnuz, 2, (4, 4), (128, 128), [0.7, 1.3]),
        ] {
            let mut narrow = Inputs::random(problem(dtype, seqlen_q, heads, head_dims), &[], 8);
            narrow.problem.dtype_cache = Some(dtype_cache);
            (narrow.problem.descale_k, narrow.problem.descale_v) = (Descale::PerTensor, Descale::PerTensor);
            (narrow.descales[1], narrow.descales[2]) = (vec![descales[0]], vec![descales[1]]);
            let mut wide = narrow.clone();
            (wide.problem.dtype_cache, wide.descales) = (None, Default::default());
            (wide.problem.descale_k, wide.problem.descale_v) = (Descale::None, Descale::None);
            let shapes = [narrow.problem.shape_k(), narrow.problem.shape_v()];
            for (n, (narrow, wide)) in
                [(&mut narrow.k, &mut wide.k), (&mut narrow.v, &mut wide.v)].into_iter().enumerate()
            {
                let (shape, descale) = (shapes[n], descales[n]);
                let mut codes = Tensor::poisoned(dtype_cache, narrow.strides, shape);
                copy(narrow, &mut codes, shape, |b, s| (b, s));
                *narrow = codes;
                for b in 0..shape.batch {
                    for s in 0..shape.seq {
                        for h in 0..shape.head {
                            for d in 0..shape.dim {
                                let value = narrow.get(b, s, h, d) as f32 * descale;
                                wide.set(b, s, h, d, f64::from(value));
                            }
                        }
                    }
                }
            }
            assert!(
                run_on(&backend, &narrow, None) == run_on(&backend, &wide, None),
                "{isa} {dtype} {dtype_cache} {heads:?} {head_dims:?}"
            );
        }
    }
}
