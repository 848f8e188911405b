//! Tests that the tables' choices are supported by the kernels and agree with measured times.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod backward;
mod backward_measured;
mod backward_parts;
mod decode_measured;
mod forward_measured;
mod fp8;
mod schedule;
mod taken;

use fmha_core::fields::{Fields, Takes};
use fmha_core::spec::BwdSpec;
use fmha_core::{BwdProblem, DType, Dims, FwdProblem, Strides};
use fmha_kernels_cuda::{sm90, sm90_bwd};

/// Each field that a user may set, and each named value of it, has a row on the page.
#[test]
fn the_page_of_hoppers_fields_has_every_field_and_every_named_value() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/kernels/sm90-fields.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (forward, backward) = page.split_once("## The backward's fields").unwrap();
    let backward = backward.split_once("\n## ").unwrap().0;
    for (part, fields) in [(forward, sm90::Sm90Tile::fields()), (backward, sm90_bwd::Sm90BwdTile::fields())] {
        for field in fields.iter().filter(|field| field.takes != Takes::nothing()) {
            let named = |row: &&str| row.split(" | ").next().unwrap().contains(&format!("`{}`", field.name));
            let row = part.lines().find(named).unwrap_or_else(|| panic!("{} is in no row", field.name));
            let words: Vec<_> = row.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
            for value in (field.value_names)() {
                assert!(words.contains(&&*value), "{} lacks {value}: {row}", field.name);
            }
        }
    }
}

const RATIOS: [u32; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 64, 128];

const LENGTHS: [(u32, u32); 9] = [
    (1, 70),
    (3, 5000),
    (20, 600),
    (65, 65),
    (150, 424),
    (512, 512),
    (1024, 1024),
    (4096, 4096),
    (9000, 20000),
];

const HEAD_DIMS: [(u32, u32); 8] =
    [(64, 64), (40, 24), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256)];

fn dims(ratio: u32, (seqlen_q, seqlen_k): (u32, u32), (head_dim_qk, head_dim_v): (u32, u32)) -> Dims {
    Dims { batch: 2, seqlen_q, seqlen_k, num_heads_q: 2 * ratio, num_heads_kv: 2, head_dim_qk, head_dim_v }
}

/// Problems of every size with every ratio of heads, mask and kind of sequences; with rows that TMA can read and rows
/// that it can not; with each modifier.
fn problems() -> impl Iterator<Item = FwdProblem> {
    let sizes = RATIOS
        .into_iter()
        .flat_map(|ratio| LENGTHS.map(|lengths| HEAD_DIMS.map(|head_dims| dims(ratio, lengths, head_dims))))
        .flatten();
    sizes.flat_map(|dims| {
        ["0", "b", "b:300,2"].into_iter().flat_map(move |mask| {
            (0..16).map(move |bits| {
                let make = if bits & 1 == 0 { FwdProblem::batch } else { FwdProblem::group };
                let mut problem = make(DType::F16, dims).mask(mask.parse().unwrap());
                if bits & 2 != 0 {
                    let seq = problem.strides.k.seq + 1;
                    problem.strides.k =
                        Strides { seq, batch: seq * i64::from(dims.seqlen_k), ..problem.strides.k };
                }
                problem.score.softcap = (bits & 4 != 0).then_some(30.0);
                problem.dropout.p_drop = if bits & 8 != 0 { 0.5 } else { 0.0 };
                problem
            })
        })
    })
}

/// Value of a plan's field. For `parts` it is the number of tiles that share a kv head's query heads.
fn chosen(problem: &BwdProblem, field: &str) -> String {
    let spec = BwdSpec::of(problem);
    let mut tile = sm90_bwd::choose_tile(problem, &spec);
    tile.head_parts = tile.wants_head_parts(problem, &spec, 132);
    if field == "parts" {
        return tile.schedule(problem, &spec, 132).unwrap().num_head_parts.to_string();
    }
    tile.named_values().into_iter().find(|(name, _)| *name == field).unwrap().1
}
