//! Every scheme, over 1 to 8 ranks in threads, against one device and against f64.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use fmha::{
    Bias, BiasBroadcast, BwdProblem, DType, Dims, ElementwiseBias, FwdProblem, PlanOptions, Strides, Totals,
};
use fmha_conformance::check::{Selection, check_bwd, check_fwd};
use fmha_conformance::init::Init;
use fmha_conformance::tensor::{Operand, Room};
use fmha_conformance::tensors::{Data, HostBwd, HostFwd, Lengths};
use fmha_dist::{Options, Partition, Problem, Scheme};

const PLACEMENT: fmha_conformance::memory::Placement = fmha_conformance::memory::Placement::Margins;
const DATA: Data = Data { init: Init::Normal, seed: 7, room: Room { placement: PLACEMENT, shift: 0 } };

fn dims(seqlens: (u32, u32), heads: (u32, u32)) -> Dims {
    Dims {
        batch: 2,
        seqlen_q: seqlens.0,
        seqlen_k: seqlens.1,
        num_heads_q: heads.0,
        num_heads_kv: heads.1,
        head_dim_qk: 24,
        head_dim_v: 16,
    }
}

fn plain(seqlens: (u32, u32), heads: (u32, u32)) -> FwdProblem {
    FwdProblem::batch(DType::Bf16, dims(seqlens, heads)).write_lse(true)
}

/// A problem, its lengths, and how its rows go over ranks.
struct Case {
    name: String,
    whole: FwdProblem,
    lengths: Lengths,
    packed: Option<[Vec<u32>; 2]>,
}

fn case(name: impl Into<String>, whole: FwdProblem) -> Case {
    Case { name: name.into(), whole, lengths: Lengths::default(), packed: None }
}

fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for mask in ["0", "t", "b", "b:9,0", "t:5,3,2", "g:7,4"] {
        all.push(case(format!("mask {mask}"), plain((53, 53), (4, 2)).mask(mask.parse().unwrap())));
    }
    let causal = |heads| plain((61, 90), heads).mask("b".parse().unwrap());
    all.push(case("cross", plain((37, 70), (8, 8)).mask("b".parse().unwrap())));
    all.push(case("mqa, softcap, f16", {
        FwdProblem::batch(DType::F16, dims((61, 90), (8, 1))).softcap(3.0).write_lse(true)
    }));
    all.push(case(
        "f32",
        FwdProblem::batch(DType::F32, dims((40, 40), (8, 4))).mask("t".parse().unwrap()).write_lse(true),
    ));
    all.push(case("dropout", causal((4, 2)).p_drop(0.3)));
    all.push(case("alibi", causal((4, 2)).bias(Bias::Alibi { per_batch: false })));
    all.push(case(
        "alibi, top-left",
        plain((61, 90), (4, 2)).mask("t:20,30".parse().unwrap()).bias(Bias::Alibi { per_batch: false }),
    ));
    all.push(case("sink", causal((4, 2)).sink(true)));
    // The first rows see nothing.
    all.push(case("empty rows, sink", plain((70, 40), (4, 2)).mask("b".parse().unwrap()).sink(true)));
    all.push(case("empty rows", plain((70, 40), (4, 2)).mask("b:3,0".parse().unwrap())));
    let bias = |broadcast| {
        let whole = causal((4, 2));
        let shape = whole.shape_bias(broadcast);
        let seq = i64::from(shape.dim);
        let head = seq * i64::from(shape.seq);
        let strides = Strides { batch: head * i64::from(shape.head), seq, head, dim: 1 };
        whole.bias(Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides }))
    };
    all.push(case("bias", bias(BiasBroadcast::BatchHead)));
    let sequences = [(23u32, 23u32), (0, 5), (40, 40), (1, 1), (7, 0)];
    let cu = |side: fn(&(u32, u32)) -> u32| {
        std::iter::once(0)
            .chain(sequences.iter().scan(0, |at, rows| {
                *at += side(rows);
                Some(*at)
            }))
            .collect::<Vec<u32>>()
    };
    let (cu_q, cu_k) = (cu(|rows| rows.0), cu(|rows| rows.1));
    for mask in ["b", "b:6,0,1"] {
        let sizes = Dims { batch: 5, ..dims((40, 40), (4, 2)) };
        let whole =
            FwdProblem::group(DType::Bf16, sizes).mask(mask.parse().unwrap()).p_drop(0.2).write_lse(true);
        let packed = Some([cu_q.clone(), cu_k.clone()]);
        all.push(Case {
            name: format!("packed {mask}"),
            whole,
            lengths: Lengths::packed(&sequences),
            packed,
        });
    }
    all
}

impl Case {
    fn rows(&self) -> [u32; 2] {
        let dims = self.whole.dims;
        match &self.packed {
            None => [dims.seqlen_q, dims.seqlen_k],
            Some(cu) => cu.each_ref().map(|cu| *cu.last().unwrap()),
        }
    }

    fn over(&self, partition: impl Fn(u32) -> Partition) -> Problem {
        let [q, k] = self.rows().map(partition);
        let problem = Problem::new(self.whole.clone(), q).keys(k);
        match self.packed.clone() {
            None => problem,
            Some([cu_q, cu_k]) => problem.packed(cu_q, cu_k),
        }
    }

    /// Partitions of several kinds: zig-zag over many ranks, contiguous, uneven with a rank that has nothing.
    fn problems(&self) -> Vec<(String, Problem)> {
        let uneven = |rows: u32| {
            let (a, b) = (rows / 5, rows / 2);
            Partition::new(rows, vec![vec![a..b], vec![], vec![0..a, b..rows]]).unwrap()
        };
        vec![
            ("1 rank".to_owned(), self.over(|rows| Partition::contiguous(rows, 1))),
            ("2 ranks".to_owned(), self.over(|rows| Partition::contiguous(rows, 2))),
            ("4 zig-zag".to_owned(), self.over(|rows| Partition::zig_zag(rows, 4))),
            ("uneven".to_owned(), self.over(uneven)),
            ("8 zig-zag".to_owned(), self.over(|rows| Partition::zig_zag(rows, 8))),
        ]
    }

    fn takes(&self, scheme: Scheme, ranks: u32) -> bool {
        let elementwise = matches!(self.whole.score.bias, Bias::Elementwise(_));
        match scheme {
            Scheme::Ulysses => {
                let dims = self.whole.dims;
                let each = dims.num_heads_q / ranks;
                let ratio = dims.num_heads_q / dims.num_heads_kv;
                dims.num_heads_q.is_multiple_of(ranks)
                    && (each.is_multiple_of(ratio) || ratio.is_multiple_of(each))
                    && !(elementwise && ranks > 1)
            }
            _ => true,
        }
    }
}

fn passes(verdict: &fmha_conformance::verdict::Verdict, what: &str) {
    assert!(verdict.pass(), "{what}: {:?} {:?}", verdict.tensors, verdict.faults);
}

#[test]
fn forward_over_ranks_is_that_of_one_device() {
    for case in cases() {
        let new = || HostFwd::new(case.whole.clone(), &case.lengths, DATA).unwrap();
        let mut alone = new();
        support::forward_alone(&mut alone);
        for (name, problem) in case.problems() {
            for scheme in [Scheme::Gather, Scheme::Ring, Scheme::Ulysses] {
                let what = format!("{}, {name}, {scheme}", case.name);
                // A row's bits may depend on how many come in one call, unless kernels promise that they do not.
                let same = PlanOptions::default().batch_invariant(scheme.has_bits_of_one_device());
                let options = Options::default().scheme(scheme).kernels(same);
                let mut host = new();
                let done = support::forward(&mut host, &problem, &options, 2);
                if !case.takes(scheme, problem.q.ranks()) {
                    assert!(done.unwrap_err().text.starts_with("ulysses: "), "{what}");
                    continue;
                }
                done.unwrap_or_else(|error| panic!("{what}: {error}"));
                passes(&check_fwd(&host, &Selection::default(), &|_, _| ()).unwrap(), &what);
                if scheme.has_bits_of_one_device() {
                    for operand in [Operand::O, Operand::Lse] {
                        let equal = support::bytes(&host.operands, operand)
                            == support::bytes(&alone.operands, operand);
                        assert!(equal, "{what}: {operand:?} has other bits than on one device");
                    }
                }
            }
        }
    }
}

#[test]
fn backward_over_ranks_is_that_of_one_device() {
    for case in cases() {
        let wanted = BwdProblem::new(case.whole.clone()).write_dsink(case.whole.score.sink);
        let new = || {
            let mut host = HostBwd::new(wanted.clone(), &case.lengths, DATA).unwrap();
            host.fill_forward().unwrap();
            host
        };
        let mut alone = new();
        support::backward_alone(&mut alone);
        for (name, problem) in case.problems() {
            for scheme in [Scheme::Gather, Scheme::Ring, Scheme::Ulysses] {
                let what = format!("{}, {name}, {scheme}", case.name);
                if !case.takes(scheme, problem.q.ranks()) {
                    continue;
                }
                let options = Options::default().scheme(scheme);
                let mut host = new();
                support::backward(&mut host, &problem, &options)
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
                passes(&check_bwd(&host, &Selection::default(), &|_, _| ()).unwrap(), &what);
                if scheme == Scheme::Gather {
                    let equal = support::bytes(&host.operands, Operand::Dq)
                        == support::bytes(&alone.operands, Operand::Dq);
                    assert!(equal, "{what}: dQ has other bits than on one device");
                }
            }
        }
    }
}

#[test]
fn a_cache_over_ranks_decodes_as_on_one_device() {
    for (mask, sink, seqlen_q) in [("0", false, 1), ("b", true, 3), ("b:30,0", false, 2)] {
        let whole = plain((seqlen_q, 200), (8, 2)).mask(mask.parse().unwrap()).sink(sink);
        for ranks in [1, 2, 5, 8] {
            let keys = Partition::contiguous(200, ranks);
            let problem = Problem::new(whole.clone(), Partition::replicated(seqlen_q, ranks)).keys(keys);
            let mut host = HostFwd::new(whole.clone(), &Lengths::default(), DATA).unwrap();
            // The planner's own choice: no other scheme takes replicated queries.
            let what = format!("{mask} over {ranks}");
            support::forward(&mut host, &problem, &Options::default(), 2)
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            passes(&check_fwd(&host, &Selection::default(), &|_, _| ()).unwrap(), &what);
        }
    }
}

#[test]
fn totals_of_lengths_are_those_of_the_partition() {
    // The battery's lengths and the plan's offsets are made apart: this holds them together.
    let case = cases().pop().unwrap();
    let [q, k] = case.rows();
    assert_eq!(case.lengths.totals, Totals::packed(q, k));
}
