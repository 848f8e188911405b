//! Partial results, merged.

use fmha_core::{CombineProblem, DType, Shape, Strides};

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
        cases.push(Case { name, body: Body::Combine(Box::new(Combine { problem, data })) });
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
    cases
}
