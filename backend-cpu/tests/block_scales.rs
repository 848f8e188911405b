//! Tests of scales by blocks: a call must be bit-equal to the call on the dequantised tensors.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use fmha_core::block_scales::{BlockAxis, Quantized};
use fmha_core::{
    BlockFormat, BlockScales, DType, Descale, DevSlice, DevSliceMut, Device, Dims, FwdArgs, FwdProblem,
    MaskSpec, PlanOptions, ScoreArgs, Strides,
};
use fmha_cpu::{Config, CpuBackend};
use half::bf16;

const DIMS: Dims = Dims::batch(1).seqlens(37, 75).heads(1, 1).head_dims(40, 24);

fn numbers(count: u32, seed: u32) -> Vec<f32> {
    (0..count)
        .map(|i| ((i.wrapping_mul(7919).wrapping_add(seed * 131)) % 1009) as f32 / 252.0 - 2.0)
        .collect()
}

fn device() -> Device {
    Device::new(CpuBackend::with(Config { threads: Some(2), isa: None }).unwrap())
}

/// Runs a call whose outputs are O and LSE; returns their bits.
fn run(
    problem: &FwdProblem,
    args: impl FnOnce(DevSliceMut<'_>, DevSliceMut<'_>, &mut dyn FnMut(&mut FwdArgs<'_>)),
) -> Vec<u32> {
    let device = device();
    let plan = device.plan_fwd(&problem.clone().validate().unwrap(), &PlanOptions::default()).unwrap();
    let mut o = vec![f32::NAN; (DIMS.seqlen_q * DIMS.head_dim_v) as usize];
    let mut lse = vec![f32::NAN; DIMS.seqlen_q as usize];
    args(DevSliceMut::host(&mut o), DevSliceMut::host(&mut lse), &mut |args| {
        plan.run(args, &device.default_stream()).unwrap();
    });
    assert!(o.iter().chain(&lse).all(|x| x.is_finite()));
    o.iter().chain(&lse).map(|x| x.to_bits()).collect()
}

/// Runs a call in a block format, and the call on its dequantised values.
fn both(format: BlockFormat, dtype: DType, tensor_scales: [f32; 3]) -> [Vec<u32>; 2] {
    let Dims { seqlen_q, seqlen_k, head_dim_qk, head_dim_v, .. } = DIMS;
    let shapes = [
        (seqlen_q, head_dim_qk, BlockAxis::Dim),
        (seqlen_k, head_dim_qk, BlockAxis::Dim),
        (seqlen_k, head_dim_v, BlockAxis::Rows),
    ];
    let stored: Vec<Quantized> = (0..)
        .zip(shapes)
        .map(|(i, (rows, dim, axis))| {
            format.quantize(&numbers(rows * dim, i), dim as usize, axis, tensor_scales[i as usize]).unwrap()
        })
        .collect();
    let values: Vec<Vec<f32>> = stored
        .iter()
        .zip(shapes)
        .zip(tensor_scales)
        .map(|((stored, (_, dim, axis)), scale)| {
            format.dequantize(&stored.elements, &stored.scales, dim as usize, axis, scale).unwrap()
        })
        .collect();
    let base = FwdProblem::batch(dtype, DIMS).mask(MaskSpec::CAUSAL).dtype_o(DType::F32).write_lse(true);
    let per_tensor = Descale::PerTensor;
    let scaled = base.clone().with_block_scales(format).descale_q(per_tensor).descale_k(per_tensor);
    let scaled = run(&scaled.descale_v(per_tensor), |o, lse, run| {
        let bytes = |at: usize| DevSlice::host(&stored[at].elements);
        let [by_q, by_k, by_v] = tensor_scales.map(|scale| [scale]);
        let score = ScoreArgs::default()
            .block_scale_q(DevSlice::host(&stored[0].scales))
            .block_scale_k(DevSlice::host(&stored[1].scales))
            .block_scale_v(DevSlice::host(&stored[2].scales))
            .descale_q(DevSlice::host(&by_q))
            .descale_k(DevSlice::host(&by_k))
            .descale_v(DevSlice::host(&by_v));
        run(&mut FwdArgs::new(bytes(0), bytes(1), bytes(2), o).lse(lse).score(score));
    });
    let narrow: Vec<Vec<bf16>> =
        values.iter().map(|values| values.iter().map(|&x| bf16::from_f32(x)).collect()).collect();
    let plain = run(&base, |o, lse, run| {
        let slice = |at: usize| match dtype {
            DType::F32 => DevSlice::host(&values[at]),
            _ => DevSlice::host(&narrow[at]),
        };
        run(&mut FwdArgs::new(slice(0), slice(1), slice(2), o).lse(lse));
    });
    [scaled, plain]
}

#[test]
fn a_call_has_the_bits_of_the_same_call_on_its_values() {
    for format in BlockFormat::ALL {
        for dtype in [DType::Bf16, DType::F32] {
            for tensor_scales in [[1.0; 3], [0.37, 1.7, 0.013]] {
                let [scaled, plain] = both(format, dtype, tensor_scales);
                assert_eq!(scaled, plain, "{format} in {dtype} with {tensor_scales:?}");
            }
        }
    }
}

#[test]
fn a_plan_says_the_format_and_backward_is_refused_by_its_name() {
    let device = device();
    let problem = FwdProblem::batch(DType::Bf16, DIMS).with_block_scales(BlockFormat::Nvfp4);
    let plan = device.plan_fwd(&problem.clone().validate().unwrap(), &PlanOptions::default()).unwrap();
    assert!(plan.to_string().contains("nvfp4"), "{plan}");
    // Strides of the scales differ from the default.
    let scales = BlockScales::new(&problem, BlockFormat::Nvfp4);
    let wide = Strides { seq: 2 * scales.v.seq, ..scales.v };
    let apart = problem.block_scales(scales.strides_v(wide));
    assert!(apart.validate().is_ok());
}
