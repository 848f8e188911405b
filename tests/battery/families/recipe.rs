//! A problem made from one level of each axis, for pairwise and random cases.

use fmha_core::{
    Bias, BiasBroadcast, DType, Descale, Dims, ElementwiseBias, Extents, FwdProblem, KvLayout, MaskSpec,
    QLayout, Strides, Totals, VLayout,
};

use super::pairwise::Levels;
use crate::init::{Init, mix};
use crate::memory::Placement;
use crate::tensor::Room;
use crate::tensors::{Data, Lengths, padded};

pub(crate) const DTYPES: [DType; 7] = DType::ALL;
const HEAD_DIMS: [(u32, u32); 12] = [
    (64, 64),
    (128, 128),
    (32, 32),
    (40, 24),
    (96, 96),
    (1, 1),
    (7, 5),
    (80, 112),
    (72, 72),
    (192, 128),
    (16, 8),
    (256, 256),
];
const HEADS: [(u32, u32); 6] = [(1, 1), (2, 2), (4, 2), (6, 2), (8, 2), (9, 3)];
const LENGTHS: [(u32, u32); 10] =
    [(1, 1), (1, 65), (17, 17), (33, 70), (64, 64), (70, 33), (5, 129), (100, 96), (31, 1), (48, 80)];
const MASKS: [&str; 14] = [
    "0", "t", "b", "t:5,0", "b:7,0", "t:3,2", "b:0,0", "b:9,4,3", "t:0,0,2", "g:4,3", "g:-2,9", "g:1,-5",
    "b:-1,3", "b:16,-1",
];
const SOFTCAPS: [Option<f32>; 3] = [None, Some(20.0), Some(1.5)];
const SCALES: [Option<f32>; 5] = [None, None, Some(0.31), Some(-0.2), Some(0.0)];
const DROPS: [f32; 4] = [0.0, 0.0, 0.17, 0.8];
pub(crate) const INITS: [Init; 7] = Init::ALL;
const DESCALES: [Descale; 3] = [Descale::None, Descale::PerTensor, Descale::PerKvHead];

/// Levels of each axis, in the order in which [`recipe`] reads them.
pub(crate) const AXES: [usize; 18] = [
    DTYPES.len(),
    3, // dtype_v of FP8: the same, f16, bf16
    4, // dtype_o: the default, f32, f16 or FP8, bf16
    4, // sequences: batch, batch with seqused, group, group with gaps
    HEAD_DIMS.len(),
    HEADS.len(),
    LENGTHS.len(),
    MASKS.len(),
    7, // bias
    SOFTCAPS.len(),
    2, // sink
    DROPS.len(),
    4, // layouts
    2, // v_layout
    SCALES.len(),
    INITS.len(),
    DESCALES.len(),
    3, // LSE, keep mask
];

/// Index of each axis in [`AXES`].
pub(crate) mod axis {
    pub(crate) const DTYPE: usize = 0;
    pub(crate) const SEQUENCES: usize = 3;
    pub(crate) const LENGTHS: usize = 6;
    pub(crate) const MASK: usize = 7;
    pub(crate) const DROPS: usize = 11;
    pub(crate) const LAYOUT: usize = 12;
    pub(crate) const V_LAYOUT: usize = 13;
    pub(crate) const WRITES: usize = 17;
}

/// A valid problem with its lengths and data.
pub(crate) struct Recipe {
    pub(crate) label: String,
    pub(crate) problem: FwdProblem,
    pub(crate) lengths: Lengths,
    pub(crate) data: Data,
}

/// Makes the problem of the given levels. Levels that exclude each other are adjusted.
pub(crate) fn recipe(levels: &Levels, seed: u64) -> Recipe {
    let dtype = DTYPES[levels[0]];
    let (head_dim_qk, head_dim_v) = HEAD_DIMS[levels[4]];
    let (num_heads_q, num_heads_kv) = HEADS[levels[5]];
    let (seqlen_q, seqlen_k) = LENGTHS[levels[6]];
    let dims = Dims { batch: 2, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v };
    let mut problem = FwdProblem::batch(dtype, dims);
    let mask = MASKS[levels[7]];
    if let Ok(mask) = mask.parse::<MaskSpec>() {
        problem.mask = mask;
    }
    if dtype.is_fp8() {
        problem.dtypes.v = [dtype, DType::F16, DType::Bf16][levels[1]];
        fp8_scales(DESCALES[levels[16]], &mut problem);
    }
    problem.dtypes.o = match levels[2] {
        0 => problem.dtypes.o,
        1 => DType::F32,
        2 if dtype.is_fp8() => dtype,
        2 => DType::F16,
        _ => DType::Bf16,
    };
    problem.scales.scale_o = problem.dtypes.o.is_fp8();
    problem.score.softcap = SOFTCAPS[levels[9]];
    problem.score.sink = levels[10] == 1;
    problem.dropout.p_drop = DROPS[levels[11]];
    problem.score.softmax_scale = SCALES[levels[14]];
    problem.write_lse = levels[17] > 0;
    problem.dropout.write_keep_mask = levels[17] > 1 && problem.drops();

    let (mode, lengths) = sequences(levels[3], &mut problem);
    layouts(levels[12], levels[13], lengths.totals, &mut problem);
    bias(levels[8], levels[12], &mut problem);
    let label = format!(
        "{dtype}/{mode}/d{head_dim_qk}x{head_dim_v}/h{num_heads_q}kv{num_heads_kv}/s{seqlen_q}x{seqlen_k}/{mask}"
    );
    let room = Room { placement: Placement::Margins, shift: (seed % 3) as u32 };
    Recipe { label, problem, lengths, data: Data { init: INITS[levels[15]], seed, room } }
}

/// Sets the descales of Q and K, and of V if it is FP8.
pub(super) fn fp8_scales(kind: Descale, problem: &mut FwdProblem) {
    (problem.scales.descale_q, problem.scales.descale_k) = (kind, kind);
    problem.scales.descale_v = if problem.dtypes.v.is_fp8() { kind } else { Descale::None };
}

/// Sets the sequences' layout, and whether all rows are in use or some sequences are shorter.
fn sequences(level: usize, problem: &mut FwdProblem) -> (&'static str, Lengths) {
    let dims = &mut problem.dims;
    let (q, k) = (dims.seqlen_q, dims.seqlen_k);
    let signed = |lengths: [u32; 3]| lengths.map(u32::cast_signed);
    match level {
        0 => ("batch", Lengths::default()),
        1 => {
            (problem.layout.seqused_q, problem.layout.seqused_k) = (true, true);
            let [q_used, k_used, _] = signed([q - q / 3, k - k / 4, 0]);
            let lengths = Lengths {
                seqused_q: vec![q.cast_signed(), q_used],
                seqused_k: vec![k_used, k.cast_signed()],
                ..Lengths::default()
            };
            ("used", lengths)
        }
        2 => {
            dims.batch = 3;
            let lengths = Lengths::packed(&[(q, k), (0, k / 2), (q / 2 + 1, k)]);
            (problem.layout.q, problem.layout.kv) = (QLayout::Packed, KvLayout::Packed);
            ("group", lengths)
        }
        _ => {
            dims.batch = 3;
            (problem.layout.seqused_q, problem.layout.seqused_k) = (true, true);
            let mut lengths = Lengths::packed(&[(q + 3, k + 2), (q, 5), (1, k)]);
            // The lengths in use; rows past the last offset belong to no sequence.
            lengths.seqused_q = signed([q, q - q / 2, 1]).to_vec();
            lengths.seqused_k = signed([k, 0, k]).to_vec();
            lengths.totals = Totals::packed(2 * q + 4 + 2, 2 * k + 7 + 3);
            (problem.layout.q, problem.layout.kv) = (QLayout::Packed, KvLayout::Packed);
            dims.seqlen_k = k.max(5);
            ("gaps", lengths)
        }
    }
}

/// Sets the strides of Q, K, V and O.
pub(super) fn layouts(level: usize, v_level: usize, totals: Totals, problem: &mut FwdProblem) {
    let Extents { q, k, v, o, .. } = problem.extents(totals);
    let of = |shape| match level {
        0 => Strides::bshd(shape),
        1 => Strides::bhsd(shape),
        2 => padded(shape, 5),
        _ => {
            // The tensor is a slice of packed b·s·3·h·d.
            let one = Strides::bshd(shape);
            Strides { batch: one.batch * 3, seq: one.seq * 3, ..one }
        }
    };
    (problem.strides.q, problem.strides.k, problem.strides.v, problem.strides.o) =
        (of(q), of(k), of(v), of(o));
    if v_level == 1 {
        problem.layout.v = VLayout::ColMajor;
        problem.strides.v = Strides::bhds(v);
        if level == 2 {
            let dim = i64::from(v.seq) + 3;
            let head = dim * i64::from(v.dim) + 1;
            problem.strides.v = Strides { batch: head * i64::from(v.head), seq: 1, head, dim };
        }
    }
}

/// Sets no bias, an elementwise one, or ALiBi.
pub(super) fn bias(level: usize, layout: usize, problem: &mut FwdProblem) {
    let sixteen_bit = match (problem.dtypes.qk.is_fp8(), problem.dtypes.v.is_fp8()) {
        (true, true) => DType::F16,
        (true, false) => problem.dtypes.v,
        _ => problem.dtypes.qk,
    };
    let elementwise = |dtype, broadcast, problem: &FwdProblem| {
        let shape = problem.shape_bias(broadcast);
        let strides = if layout == 2 {
            let seq = i64::from(shape.dim) + 3;
            let head = seq * i64::from(shape.seq) + 1;
            Strides { batch: head * i64::from(shape.head), seq, head, dim: 1 }
        } else {
            Strides::bhsd(shape)
        };
        Bias::Elementwise(ElementwiseBias { dtype, broadcast, strides })
    };
    problem.score.bias = match level {
        0 | 1 => Bias::None,
        2 => elementwise(DType::F32, BiasBroadcast::OneOne, problem),
        3 => elementwise(sixteen_bit, BiasBroadcast::OneHead, problem),
        4 => elementwise(DType::F32, BiasBroadcast::BatchHead, problem),
        5 => Bias::Alibi { per_batch: false },
        _ => Bias::Alibi { per_batch: true },
    };
}

/// Draws the levels of case `index` of a random series.
pub(crate) fn random_levels(series: u64, index: u64) -> Levels {
    super::pairwise::random(&AXES, mix(series ^ mix(index)))
}
