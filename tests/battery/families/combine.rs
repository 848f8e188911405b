//! Merges of partial results.

use fmha_core::{CombineProblem, DType, Merge, Shape, Strides};

use super::edges::data;
use crate::case::{Body, Case, Combine, WIDE};
use crate::init::Init;
use crate::memory::Placement;
use crate::tensor::Room;
use crate::tensors::{Data, padded};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut push = |name: String, problem: CombineProblem, init: Init, room: Room| {
        let data = Data { init, room, ..data(&name) };
        let body = Combine { problem, data, lse_offset: 0.0 };
        cases.push(Case { name, body: Body::Combine(Box::new(body)) });
    };
    for dtype_part in WIDE {
        for dtype_o in WIDE {
            for num_parts in [1, 2, 3, 8, 33] {
                for (seq, dim) in [(1, 64), (17, 128), (40, 5)] {
                    let rows = Shape { batch: 2, seq, head: 3, dim };
                    let mut problem = CombineProblem::new(num_parts, dtype_part, dtype_o, rows);
                    problem.write_lse = num_parts != 2;
                    let name = format!("combine/{dtype_part}_to_{dtype_o}/n{num_parts}/s{seq}/d{dim}");
                    push(name, problem, Init::Normal, Room::default());
                }
            }
        }
        for dtype_o in WIDE {
            for (num_parts, dim, merge) in [
                (0, 40, Merge::Sum),
                (1, 128, Merge::Sum),
                (33, 5, Merge::Sum),
                (0, 8, Merge::AddTo),
                (1, 256, Merge::AddTo),
                (3, 40, Merge::AddTo),
            ] {
                let rows = Shape { batch: 2, seq: 17, head: 3, dim };
                let mut problem = CombineProblem::new(num_parts, dtype_part, dtype_o, rows).merge(merge);
                problem.part = padded(rows, 3);
                let name = format!("combine/{merge:?}/{dtype_part}_to_{dtype_o}/n{num_parts}/d{dim}");
                push(name.to_lowercase(), problem, Init::Normal, Room::default());
            }
        }
        let rows = Shape { batch: 2, seq: 11, head: 3, dim: 40 };
        let mut problem = CombineProblem::new(4, dtype_part, dtype_part, rows);
        problem.part = padded(rows, 3);
        problem.o = Strides::bhsd(rows);
        problem.write_lse = true;
        push(format!("combine/strides/{dtype_part}"), problem.clone(), Init::Uniform, Room::default());
        for (side, placement) in
            [("ends_at", Placement::EndsAtUnmapped), ("begins_at", Placement::BeginsAtUnmapped)]
        {
            let room = Room { placement, shift: 0 };
            let name = format!("combine/{side}_unmapped/{dtype_part}");
            push(name, problem.clone(), Init::Normal, room);
        }
        let empty = CombineProblem::new(2, dtype_part, DType::F32, Shape { seq: 0, ..rows });
        push(format!("combine/no_rows/{dtype_part}"), empty, Init::Normal, Room::default());
    }
    far(&mut cases);
    cases
}

/// LSE so large that f32 hardly resolves differences between parts, or their sum: equal parts must still give the
/// mean of their O, and parts a few ulps apart the weights for that difference. The extreme LSE come from masks of
/// finfo.min and its negative; times log2(e) they are infinite.
fn far(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for lse_offset in [1e4, -1e4, 3e5, -1e9, -4.34e29, 1e30, -3.4028e38, 3.4028e38] {
            for num_parts in [2, 13, 40] {
                let rows = Shape { batch: 1, seq: 17, head: 3, dim: 40 };
                let mut problem = CombineProblem::new(num_parts, dtype, dtype, rows);
                problem.write_lse = true;
                let name = format!("combine/far/{dtype}/n{num_parts}/{lse_offset:e}");
                let data = data(&name);
                let body = Combine { problem, data, lse_offset };
                cases.push(Case { name, body: Body::Combine(Box::new(body)) });
            }
        }
    }
}
