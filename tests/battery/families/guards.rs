//! Memory that is nobody's: beside unmapped pages, beyond 2^31 elements.
//!
//! Every case of every family has margins and gaps full of NaN, and fails when one of its outputs'
//! is written; these are the cases in which one byte too far ends the process.

use fmha_core::{Bias, BiasBroadcast, DType, Dims, ElementwiseBias, FwdProblem, Strides, VLayout};

use super::edges::{data, masked};
use crate::case::Case;
use crate::memory::Placement;
use crate::tensor::Room;
use crate::tensors::{Data, Lengths};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for placement in [Placement::EndsAtUnmapped, Placement::BeginsAtUnmapped] {
        beside_unmapped(placement, &mut cases);
    }
    far_apart(&mut cases);
    cases
}

fn dims(seqlen_q: u32, seqlen_k: u32, head_dim: u32) -> Dims {
    Dims {
        batch: 2,
        seqlen_q,
        seqlen_k,
        num_heads_q: 2,
        num_heads_kv: 1,
        head_dim_qk: head_dim,
        head_dim_v: head_dim,
    }
}

fn beside_unmapped(placement: Placement, cases: &mut Vec<Case>) {
    let side = if placement == Placement::EndsAtUnmapped { "ends_at" } else { "begins_at" };
    let mut push = |name: String, problem: FwdProblem, lengths: Lengths| {
        let data = Data { room: Room { placement, shift: 0 }, ..data(&name) };
        cases.push(Case::forward(name, problem, lengths, data));
    };
    for dtype in [DType::F32, DType::F16, DType::Bf16, DType::E4m3Fn, DType::E5m2Fnuz] {
        for head_dim in [1, 3, 8, 24, 33, 64, 128, 200] {
            for (q, k, mask) in [(1, 1, "0"), (13, 29, "b"), (66, 70, "b:11,3,2")] {
                let name = format!("guards/{side}_unmapped/{dtype}/d{head_dim}/s{q}x{k}/{mask}");
                push(name, masked(dtype, dims(q, k, head_dim), mask), Lengths::default());
            }
        }
        let mut problem = masked(dtype, dims(21, 37, 40), "b");
        problem.layout.v = VLayout::ColMajor;
        problem.strides.v = Strides::bhds(problem.shape_v());
        problem.strides.q = Strides::bhsd(problem.shape_q());
        problem.strides.k = Strides::bhsd(problem.shape_k());
        problem.strides.o = Strides::bhsd(problem.shape_o());
        push(format!("guards/{side}_unmapped_column_major/{dtype}"), problem, Lengths::default());

        let mut problem = masked(dtype, dims(21, 37, 40), "t:7,2");
        let broadcast = BiasBroadcast::OneHead;
        let strides = Strides::bhsd(problem.shape_bias(broadcast));
        problem.score.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides });
        problem.dropout.p_drop = 0.3;
        problem.dropout.write_keep_mask = true;
        problem.score.sink = true;
        push(format!("guards/{side}_unmapped_every_operand/{dtype}"), problem, Lengths::default());

        let sequences = [(5, 9), (0, 3), (30, 17)];
        let mut problem = FwdProblem::group(dtype, Dims { batch: 3, ..dims(30, 17, 24) });
        problem.write_lse = true;
        push(format!("guards/{side}_unmapped_packed/{dtype}"), problem, Lengths::packed(&sequences));
    }
}

/// Offsets that do not fit 31 bits, along each axis; only the touched pages exist.
fn far_apart(cases: &mut Vec<Case>) {
    const FAR: i64 = (1 << 31) + 4096;
    // 65 rows end before 2^28 bytes: kernels that address tiles by 32 bits take them.
    const FAR_KEYS: u64 = (1 << 22) - (1 << 17);
    let mut push = |name: String, problem: FwdProblem, lengths: Lengths| {
        let data = Data { room: Room { placement: Placement::Sparse, shift: 0 }, ..data(&name) };
        cases.push(Case::forward(name, problem, lengths, data));
    };
    for dtype in [DType::Bf16, DType::F32] {
        for axis in ["batch", "head", "seq"] {
            let mut problem = masked(dtype, Dims { num_heads_kv: 2, ..dims(3, 3, 32) }, "b");
            if axis == "seq" {
                // Three rows: the last lies beyond 2^31.
                (problem.dims.seqlen_q, problem.dims.seqlen_k) = (3, 3);
            }
            for strides in [
                &mut problem.strides.q,
                &mut problem.strides.k,
                &mut problem.strides.v,
                &mut problem.strides.o,
            ] {
                match axis {
                    "batch" => strides.batch = FAR,
                    "head" => strides.head = FAR,
                    _ => strides.seq = FAR / 2 + 128,
                }
            }
            push(format!("guards/offsets_beyond_2_31/{dtype}/{axis}"), problem, Lengths::default());
        }
        // Keys so far apart that 32 bits address a few blocks of them: a kernel moves its base on and on.
        for mask in ["0", "b"] {
            let one = Dims { batch: 1, ..dims(3, 700, 32) };
            let mut problem = masked(dtype, one, mask);
            let seq = (FAR_KEYS / dtype.size_bytes()).cast_signed();
            (problem.strides.k.seq, problem.strides.v.seq) = (seq, seq);
            push(format!("guards/keys_far_apart/{dtype}/{mask}"), problem, Lengths::default());
        }
        let mut problem = FwdProblem::group(dtype, Dims { batch: 2, ..dims(4, 4, 16) });
        for strides in
            [&mut problem.strides.q, &mut problem.strides.k, &mut problem.strides.v, &mut problem.strides.o]
        {
            strides.seq = FAR / 4;
        }
        let lengths = Lengths::packed(&[(4, 4), (4, 4)]);
        push(format!("guards/offsets_beyond_2_31/{dtype}/packed"), problem, lengths);
    }
}
