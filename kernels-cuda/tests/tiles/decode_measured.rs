//! Which kernel few queries over sequences of unlike lengths have, and whether in shares, held to what was measured.

use fmha_core::{DType, Dims, FwdProblem, KvLayout, MaskSpec, ValidFwd};
use fmha_kernels_cuda::sm80::{self, Room};
use fmha_kernels_cuda::sm90;

/// An H200.
const NUM_SMS: u32 = 132;
const ROOM: Room = Room { smem_bytes: 232_448, num_sms: NUM_SMS };

/// A row of `measured.tsv`.
struct Row {
    /// Run and shape.
    shape: String,
    problem: ValidFwd,
    kernel: String,
    keys: String,
    micros: f64,
}

fn rows() -> Vec<Row> {
    let text = include_str!("../../src/split/measured.tsv");
    let row = |line: &str| {
        let columns: Vec<&str> = line.split('\t').collect();
        let &[_, "H200", _, batch, heads, queries, lengths, head_dim, page, kernel, keys, micros] =
            columns.as_slice()
        else {
            panic!("twelve columns: {line}")
        };
        let (num_heads_q, num_heads_kv) = heads.split_once('/').unwrap();
        let head_dim = head_dim.parse().unwrap();
        let dims = Dims {
            batch: batch.parse().unwrap(),
            seqlen_q: queries.parse().unwrap(),
            seqlen_k: lengths.split_once("..").unwrap().1.parse().unwrap(),
            num_heads_q: num_heads_q.parse().unwrap(),
            num_heads_kv: num_heads_kv.parse().unwrap(),
            head_dim_qk: head_dim,
            head_dim_v: head_dim,
        };
        let mut problem = FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL);
        problem.layout.seqused_k = true;
        if page != "-" {
            problem.layout.kv = KvLayout::Paged { page_size: page.parse().unwrap() };
        }
        Row {
            shape: columns[..1].iter().chain(&columns[3..9]).copied().collect::<Vec<_>>().join(" "),
            problem: problem.validate().unwrap(),
            kernel: kernel.to_owned(),
            keys: keys.to_owned(),
            micros: micros.parse().unwrap(),
        }
    };
    text.lines().filter(|line| !line.starts_with('#')).map(row).collect()
}

/// The kernel, and whether it takes the keys whole, in parts or in shares.
fn chosen(problem: &ValidFwd) -> (&'static str, &'static str) {
    let words = |shares: i32, parts: i32| match (shares, parts) {
        (1.., _) => "shares",
        (_, 1..) => "parts",
        _ => "whole",
    };
    let of_sm80 = sm80::choose_tile(problem, ROOM);
    let theirs = (sm80::NAME, words(of_sm80.shares, of_sm80.split_keys));
    let is_paged = matches!(problem.layout.kv, KvLayout::Paged { .. });
    if is_paged || sm90::recipe::leaves_to_sm80(problem, ROOM).is_some() {
        return theirs;
    }
    let ours = sm90::choose_tile_in_parts(problem, NUM_SMS);
    (sm90::NAME, words(ours.shares, ours.split_keys))
}

/// Holds the choice for every shape that was measured.
#[test]
fn keys_of_unlike_sequences_are_taken_as_was_fastest() {
    let rows = rows();
    let mut compared = 0;
    for row in &rows {
        if (&*row.kernel, &*row.keys) != chosen(&row.problem) {
            continue;
        }
        let best = rows.iter().filter(|other| other.shape == row.shape).map(|other| other.micros);
        let best = best.fold(f64::INFINITY, f64::min);
        compared += 1;
        assert!(
            row.micros <= 1.06 * best,
            "{}: {} {} {} us, the best {best}",
            row.shape,
            row.kernel,
            row.keys,
            row.micros
        );
    }
    assert!(compared >= 25, "{compared} shapes were measured with what is chosen");
}
