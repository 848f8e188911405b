//! Test of every instruction set against the f64 definition, with the contract's factors 2 and 3.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use fmha_core::{
    Bias, BiasBroadcast, BiasGrad, BwdProblem, DType, Descale, Device, Dims, ElementwiseBias, FwdProblem,
    MaskSpec, Strides, VLayout,
};
use fmha_cpu::{Config, CpuBackend, Isa};
use support::{Definition, Inputs, Lengths, check_fwd, run_bwd};

fn backends() -> Vec<(Isa, Device)> {
    Isa::ALL
        .into_iter()
        .filter(|isa| isa.is_available())
        .map(|isa| {
            let backend = CpuBackend::with(Config { threads: Some(2), isa: Some(isa) }).unwrap();
            (isa, Device::new(backend))
        })
        .collect()
}

fn dims(batch: u32, seqlen_q: u32, seqlen_k: u32, heads: (u32, u32), head_dims: (u32, u32)) -> Dims {
    Dims::batch(batch).seqlens(seqlen_q, seqlen_k).heads(heads.0, heads.1).head_dims(head_dims.0, head_dims.1)
}

fn bias(problem: &FwdProblem, dtype: DType, broadcast: BiasBroadcast) -> Bias {
    // The axes of a bias in memory are b, h, i, j.
    let shape = problem.shape_bias(broadcast);
    Bias::Elementwise(ElementwiseBias { dtype, broadcast, strides: Strides::bhsd(shape) })
}

/// Problems with their names and lengths.
fn problems() -> Vec<(String, FwdProblem, Vec<Lengths>)> {
    let mut all = Vec::new();
    let mut add = |name: &str, problem: FwdProblem, lengths: &[Lengths]| {
        let problem = problem.clone().write_lse(true);
        all.push((name.to_owned(), problem, lengths.to_vec()));
    };
    let plain = || FwdProblem::batch(DType::F32, dims(2, 77, 150, (2, 2), (64, 64)));
    for dtype in DType::ALL {
        add(&format!("{dtype}"), FwdProblem::batch(dtype, dims(1, 65, 140, (2, 1), (32, 48))), &[]);
    }
    for (qk, v) in
        [(1, 1), (3, 5), (40, 72), (80, 96), (128, 128), (192, 128), (256, 256), (300, 33), (1024, 9)]
    {
        add(&format!("d{qk}/{v}"), FwdProblem::batch(DType::F32, dims(1, 30, 133, (1, 1), (qk, v))), &[]);
    }
    for (seqlen_q, seqlen_k) in [(1, 1), (1, 300), (3, 129), (8, 7), (200, 24), (97, 0), (0, 9), (193, 257)] {
        let sizes = dims(1, seqlen_q, seqlen_k, (2, 1), (16, 16));
        add(&format!("{seqlen_q}x{seqlen_k}"), FwdProblem::batch(DType::F32, sizes), &[]);
        for mask in ["t", "b", "t:5,3", "b:40,0", "b:-1,7", "t:9,-1,4", "b:3,2,130", "g:4,-2", "g:-3,60,2"] {
            let mask: MaskSpec = mask.parse().unwrap();
            let problem = FwdProblem::batch(DType::F32, sizes).mask(mask);
            add(&format!("{seqlen_q}x{seqlen_k} {mask}"), problem, &[]);
        }
    }
    for broadcast in BiasBroadcast::ALL {
        let mut problem = plain().mask(MaskSpec::CAUSAL);
        problem.score.bias = bias(&problem, DType::F32, broadcast);
        add(&format!("bias {broadcast:?}"), problem, &[]);
    }
    let mut bf16 = FwdProblem::batch(DType::Bf16, dims(1, 50, 140, (2, 1), (64, 64)));
    bf16.score.bias = bias(&bf16, DType::Bf16, BiasBroadcast::OneHead);
    add("bf16 bias", bf16, &[]);
    for per_batch in [false, true] {
        add("alibi", plain().bias(Bias::Alibi { per_batch }), &[]);
    }
    add("softcap", plain().softcap(1.5).mask(MaskSpec::CAUSAL), &[]);
    add("softcap 50", plain().softcap(50.0), &[]);
    add("sink", plain().sink(true).mask("t:3,-2".parse().unwrap_or(MaskSpec::CAUSAL)), &[]);
    add("sink, nothing seen", plain().sink(true).mask("g:0,-400".parse().unwrap()), &[]);
    add("dropout", plain().p_drop(0.3).mask(MaskSpec::CAUSAL), &[]);
    add("scale", plain().softmax_scale(-0.3), &[]);
    add("scale 0", plain().softmax_scale(0.0), &[]);
    for (dtype_qk, dtype_v, dtype_o, descale) in [
        (DType::E4m3Fn, DType::E4m3Fn, DType::E4m3Fn, Descale::PerTensor),
        (DType::E5m2, DType::E5m2, DType::F32, Descale::PerKvHead),
        (DType::E4m3Fnuz, DType::Bf16, DType::F16, Descale::PerKvHead),
        (DType::E5m2Fnuz, DType::E5m2Fnuz, DType::E5m2Fnuz, Descale::None),
    ] {
        let problem = FwdProblem::batch(dtype_qk, dims(2, 40, 150, (4, 2), (64, 64)))
            .dtype_v(dtype_v)
            .dtype_o(dtype_o)
            .descale_q(descale)
            .descale_k(descale)
            .descale_v(if dtype_v.is_fp8() { descale } else { Descale::None })
            .scale_o(dtype_o.is_fp8());
        add(&format!("{dtype_qk} {dtype_v} {dtype_o}"), problem, &[]);
    }
    let lengths = [[(50, 40), (60, 60)], [(0, 0), (7, 3)], [(13, 13), (0, 0)], [(1, 1), (200, 137)]];
    for mask in ["0", "t", "b", "b:30,5,2"] {
        let mut problem = FwdProblem::group(DType::F32, dims(4, 50, 200, (4, 2), (32, 32)));
        problem.mask = mask.parse().unwrap();
        (problem.layout.seqused_q, problem.layout.seqused_k) = (true, true);
        add(&format!("group {mask}"), problem, &lengths);
    }
    let mut column = FwdProblem::batch(DType::F16, dims(2, 60, 131, (2, 2), (64, 40)));
    column.layout.v = VLayout::ColMajor;
    column.strides.v = Strides::bhds(column.shape_v());
    add("V col-major", column, &[]);
    let mut packed = FwdProblem::batch(DType::F32, dims(2, 60, 60, (2, 2), (20, 20)));
    packed.strides.q = Strides { batch: 60 * 120, seq: 120, head: 20, dim: 1 };
    packed.strides.k = packed.strides.q;
    packed.strides.v = Strides { head: 0, ..packed.strides.q };
    packed.strides.o = Strides::bhsd(packed.shape_o());
    add("packed, shared head", packed, &[]);
    all
}

#[test]
fn forward_keeps_the_accuracy_promise() {
    let backends = backends();
    for (name, problem, lengths) in problems() {
        let inputs = Inputs::random(problem, &lengths, 1);
        let definition = Definition::of(&inputs);
        for (isa, backend) in &backends {
            check_fwd(backend, &inputs, &definition, &format!("{isa} {name}"));
        }
    }
}

#[test]
fn backward_keeps_the_accuracy_promise() {
    for (isa, backend) in backends() {
        for (name, problem, lengths) in problems() {
            if problem.dtypes.o.is_fp8() {
                continue;
            }
            let inputs = Inputs::random(problem.clone(), &lengths, 2);
            let mut backward = BwdProblem::new(problem.clone());
            backward.has_dlse = true;
            backward.write_dsink = problem.score.sink;
            if let Bias::Elementwise(bias) = problem.score.bias {
                backward.dbias = Some(BiasGrad { dtype: DType::F32, strides: bias.strides });
            }
            run_bwd(&backend, &inputs, backward, Some(&format!("{isa} {name}")));
        }
    }
}

/// Small versions of the long problems above: an error in a step is found at once.
#[test]
fn small_problems_keep_the_accuracy_promise() {
    let small = |dtype, seqlens: (u32, u32), mask: &str| {
        FwdProblem::batch(dtype, dims(1, seqlens.0, seqlens.1, (4, 2), (24, 40)))
            .write_lse(true)
            .mask(mask.parse().unwrap())
    };
    for (isa, backend) in backends() {
        for (name, problem) in [
            ("dropout", small(DType::F32, (20, 20), "b:5,0").p_drop(0.3)),
            ("dropout of two tiles", small(DType::F32, (20, 150), "b").p_drop(0.3)),
            ("dropout of a window", small(DType::Bf16, (20, 150), "b:9,9").p_drop(0.3)),
            ("softcap", small(DType::F32, (20, 150), "b").softcap(1.5)),
            ("f16", small(DType::F16, (20, 150), "b")),
            ("bf16", small(DType::Bf16, (20, 150), "0")),
            ("alibi", small(DType::F32, (20, 150), "b").bias(Bias::Alibi { per_batch: false })),
            ("nothing seen", small(DType::F32, (40, 20), "b")),
            ("few queries", small(DType::Bf16, (3, 700), "b")),
            ("few queries dropped", small(DType::F32, (3, 700), "b").p_drop(0.3)),
        ] {
            let inputs = Inputs::random(problem.clone(), &[], 3);
            let what = format!("{isa} {name}");
            check_fwd(&backend, &inputs, &Definition::of(&inputs), &what);
            if problem.dims.seqlen_k < 700 {
                run_bwd(&backend, &inputs, BwdProblem::new(problem), Some(&what));
            }
        }
    }
}

/// dBias keeps the accuracy promise for several tiles and sequences that end inside a tile and share a bias.
#[test]
fn dbias_of_several_tiles_keeps_the_accuracy_promise() {
    for (isa, backend) in backends() {
        for mask in ["b", "0"] {
            let mut problem = FwdProblem::group(DType::F32, dims(2, 150, 250, (2, 1), (8, 8)));
            problem.mask = mask.parse().unwrap();
            problem.score.bias = bias(&problem, DType::F32, BiasBroadcast::OneHead);
            let mut backward = BwdProblem::new(problem.clone());
            let strides = Strides::bhsd(problem.shape_bias(BiasBroadcast::OneHead));
            backward.dbias = Some(BiasGrad { dtype: DType::F32, strides });
            let lengths = [[(150, 150), (250, 250)], [(120, 120), (220, 220)]];
            let inputs = Inputs::random(problem, &lengths, 4);
            run_bwd(&backend, &inputs, backward, Some(&format!("{isa} {mask}")));
        }
    }
}
