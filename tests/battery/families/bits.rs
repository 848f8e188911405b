//! Calls whose bits are equal in every run and next to any other sequence: more tiles than the device has units,
//! with inputs for which a kernel may decide differently in each tile.

use fmha_core::{DType, Dims, FwdProblem};

use super::edges::{data, masked};
use crate::case::{Body, Case, Forward, Plant};
use crate::init::Init;
use crate::law::{Law, LawKind};
use crate::tensors::{Data, Lengths};

/// Two sizes: one with which all units of a real device have several tiles, and one for an emulated device of two or
/// three units.
const SIZES: [(&str, u32, u32); 2] = [("many", 4, 48), ("few", 2, 6)];

const KINDS: [(&str, LawKind); 3] = [
    ("repeated_gives_the_same_bits", LawKind::Repeated(4)),
    ("alone_gives_the_bits_of_the_batch", LawKind::AloneIsInBatch),
    ("alone_gives_the_bits_of_the_pack_where_asked_for", LawKind::AloneIsInPack),
];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (size, batch, num_heads_q) in SIZES {
        for (law, kind) in KINDS {
            for (dtype, head_dim) in [(DType::Bf16, 64), (DType::F16, 128), (DType::Bf16, 256)] {
                for mask in ["0", "b"] {
                    for init in Init::SPREAD.into_iter().chain([Init::Normal, Init::Towering]) {
                        let name = format!("bits/{size}/{law}/{dtype}/d{head_dim}/{mask}/{init}");
                        let dims = Dims {
                            batch,
                            seqlen_q: 200,
                            seqlen_k: 700,
                            num_heads_q,
                            // Query heads do not share a tile here, so heads with wide and with close scores have tiles
                            // of their own.
                            num_heads_kv: num_heads_q,
                            head_dim_qk: head_dim,
                            head_dim_v: head_dim,
                        };
                        let mut problem = masked(dtype, dims, mask);
                        let mut lengths = Lengths::default();
                        if kind == LawKind::AloneIsInPack {
                            let unlike = |i: u32| (dims.seqlen_q - 37 * i, dims.seqlen_k - 101 * i);
                            let sequences: Vec<_> = (0..batch).map(unlike).collect();
                            let packed = FwdProblem::group(dtype, dims);
                            problem = packed.clone().mask(problem.mask).write_lse(true);
                            lengths = Lengths::packed(&sequences);
                        }
                        let data = Data { init, ..data(&name) };
                        let forward = Forward { problem, lengths, data, plant: Plant::Nothing };
                        cases.push(Case { name, body: Body::Law(Box::new(Law { forward, kind })) });
                    }
                }
            }
        }
    }
    keys_of_gradients(&mut cases);
    cases
}

/// dK and dV of few keys whose queries several tiles may share, by a group's heads, by one head's queries, or both;
/// equal lengths and packed.
fn keys_of_gradients(cases: &mut Vec<Case>) {
    for (head_dim, mask) in [(64, "0"), (64, "b"), (128, "b"), (128, "0"), (256, "0")] {
        for heads in [[6, 1], [1, 1], [8, 2]] {
            for packed in [false, true] {
                let dims = Dims::batch(2).seqlens(260, 200).heads(heads[0], heads[1]).head_dim(head_dim);
                let lie = if packed { "packed" } else { "batch" };
                let [q, kv] = heads;
                let name = format!("bits/few_keys/bf16/d{head_dim}/{mask}/h{q}kv{kv}/{lie}");
                let problem = if packed {
                    FwdProblem::group(DType::Bf16, dims)
                } else {
                    FwdProblem::batch(DType::Bf16, dims)
                };
                let problem = problem.mask(masked(DType::Bf16, dims, mask).mask).write_lse(true);
                let lengths =
                    if packed { Lengths::packed(&[(260, 200), (130, 90)]) } else { Lengths::default() };
                let data = Data { init: Init::Normal, ..data(&name) };
                let forward = Forward { problem, lengths, data, plant: Plant::Nothing };
                let kind = LawKind::KeysOfGradients(3);
                cases.push(Case { name, body: Body::Law(Box::new(Law { forward, kind })) });
            }
        }
    }
}
