//! Memory that belongs to no tensor: beside unmapped pages, beyond 2^31 elements.
//!
//! Every case of every family has margins and gaps full of NaN, and fails if an output's margin is written; in
//! these cases an access one byte too far ends the process.

use fmha_core::{
    Bias, BiasBroadcast, BwdProblem, DType, Dims, ElementwiseBias, FwdProblem, KvLayout, Strides, Totals,
    VLayout,
};

use super::edges::{data, group, masked};
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
    backward_far_apart(&mut cases);
    pages_far_apart(&mut cases);
    cases
}

fn dims(seqlen_q: u32, seqlen_k: u32, head_dim: u32) -> Dims {
    Dims::batch(2).seqlens(seqlen_q, seqlen_k).heads(2, 1).head_dim(head_dim)
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

const SPARSE: Room = Room { placement: Placement::Sparse, shift: 0 };
const FAR: i64 = (1 << 31) + 4096;
/// Number of rows: 65 of them end before 2^28 bytes, so kernels that address tiles with 32 bits support them.
const FAR_KEYS: u64 = (1 << 22) - (1 << 17);

/// Offsets that do not fit 31 bits, along each axis; only the touched pages exist.
fn far_apart(cases: &mut Vec<Case>) {
    let mut push = |name: String, problem: FwdProblem, lengths: Lengths| {
        let data = Data { room: SPARSE, ..data(&name) };
        cases.push(Case::forward(name, problem, lengths, data));
    };
    for dtype in [DType::Bf16, DType::F32] {
        for axis in ["batch", "head", "seq"] {
            let mut problem = masked(dtype, Dims { num_heads_kv: 2, ..dims(3, 3, 32) }, "b");
            if axis == "seq" {
                // The third row lies beyond 2^31 elements.
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
        // Keys so far apart that 32 bits address only a few blocks: a kernel must advance its base address.
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

/// Offsets beyond 2^31 in every tensor of a backward call; and rows so far apart that 32 bits address only a
/// few blocks of them.
fn backward_far_apart(cases: &mut Vec<Case>) {
    let mut push = |name: String, fwd: FwdProblem, lengths: Lengths, set: &dyn Fn(&mut Strides)| {
        let mut problem = BwdProblem::new(fwd);
        let fwd = &mut problem.fwd.strides;
        for strides in [&mut fwd.q, &mut fwd.k, &mut fwd.v, &mut fwd.o] {
            set(strides);
        }
        for strides in [&mut problem.dout, &mut problem.dq, &mut problem.dk, &mut problem.dv] {
            set(strides);
        }
        let data = Data { room: SPARSE, ..data(&name) };
        cases.push(Case::backward(name, problem, lengths, data));
    };
    let two = |seqlen_q, seqlen_k| Dims { num_heads_q: 4, num_heads_kv: 2, ..dims(seqlen_q, seqlen_k, 32) };
    for dtype in [DType::Bf16, DType::F32] {
        let name = |axis| format!("guards/backward_beyond_2_31/{dtype}/{axis}");
        push(name("batch"), masked(dtype, two(3, 40), "b"), Lengths::default(), &|strides| {
            strides.batch = FAR;
        });
        if dtype == DType::Bf16 {
            // The second query head of a group, and the second kv head, lie beyond 2^31 bytes.
            let problem = masked(dtype, two(3, 40), "b");
            push(name("head"), problem, Lengths::default(), &|strides| strides.head = FAR / 2 + 128);
        }
        // The third row lies beyond 2^31 elements.
        push(name("seq"), masked(dtype, two(3, 3), "b"), Lengths::default(), &|strides| {
            strides.seq = FAR / 2 + 128;
        });
        let sequences = [(4, 4), (4, 4)];
        let packed = group(dtype, two(4, 4), &sequences, "b");
        push(name("packed"), packed, Lengths::packed(&sequences), &|strides| strides.seq = FAR / 4);
    }
    // The first 128 rows end before 2^28 bytes, and the last row ends beyond 2^32.
    for (side, seqlen_q, seqlen_k) in [("keys", 3, 2200), ("queries", 2200, 3)] {
        let name = format!("guards/backward_rows_far_apart/bf16/{side}");
        let one = Dims { batch: 1, num_heads_q: 1, num_heads_kv: 1, ..dims(seqlen_q, seqlen_k, 32) };
        let far = (FAR_KEYS / 4).cast_signed();
        push(name, masked(DType::Bf16, one, "0"), Lengths::default(), &|strides| {
            (strides.seq, strides.head) = (far, 32);
        });
    }
}

/// Caches of 16 bits and of FP8 whose pages lie 2^31 elements apart, and a strided one whose heads do.
fn pages_far_apart(cases: &mut Vec<Case>) {
    let one = Dims { batch: 1, seqlen_q: 3, seqlen_k: 40, num_heads_kv: 2, ..dims(3, 40, 64) };
    for dtype_cache in [None, Some(DType::E4m3Fn), Some(DType::E4m3Fnuz)] {
        let stored = dtype_cache.unwrap_or(DType::Bf16);
        let name = format!("guards/pages_beyond_2_31/bf16/{stored}");
        let mut problem = masked(DType::Bf16, one, "b");
        problem.cache.dtype = dtype_cache;
        problem.layout.kv = KvLayout::Paged { page_size: 16 };
        (problem.strides.k, problem.strides.v) =
            (Strides::bshd(problem.shape_k()), Strides::bshd(problem.shape_v()));
        (problem.strides.k.batch, problem.strides.v.batch) = (FAR, FAR);
        let totals = Totals { num_pages: Some(4), ..Totals::default() };
        let lengths = Lengths { block_table: vec![3, 0, 2], totals, ..Lengths::default() };
        let data = Data { room: SPARSE, ..data(&name) };
        cases.push(Case::forward(name, problem, lengths, data));
    }
    let name = "guards/long_cache_beyond_2_31/bf16".to_owned();
    let mut problem = masked(DType::Bf16, Dims { seqlen_q: 1, seqlen_k: 600, ..one }, "b");
    (problem.strides.k.head, problem.strides.v.head) = (FAR, FAR);
    let data = Data { room: SPARSE, ..data(&name) };
    cases.push(Case::forward(name, problem, Lengths::default(), data));
}
