//! Every scheme, over 1 to 8 ranks in threads, against one device and against f64.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use fmha::{
    Bias, BiasBroadcast, BwdProblem, DType, Descale, Dims, ElementwiseBias, FwdProblem, PlanOptions, Strides,
    Totals,
};
use fmha_conformance::check::{Selection, check_bwd, check_fwd};
use fmha_conformance::init::Init;
use fmha_conformance::tensor::{Operand, Room};
use fmha_conformance::tensors::{Data, HostBwd, HostFwd, Lengths};
use fmha_dist::{Links, Options, Partition, Problem, Scheme};

const PLACEMENT: fmha_conformance::memory::Placement = fmha_conformance::memory::Placement::Margins;
const DATA: Data = Data { init: Init::Normal, seed: 7, room: Room { placement: PLACEMENT, shift: 0 } };

fn dims(seqlens: (u32, u32), heads: (u32, u32)) -> Dims {
    Dims::batch(2).seqlens(seqlens.0, seqlens.1).heads(heads.0, heads.1).head_dims(24, 16)
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
    // Exchanges move bytes, those of FP8 too.
    all.push(case("fp8", {
        FwdProblem::batch(DType::E4m3Fn, dims((61, 90), (4, 2))).dtype_o(DType::Bf16).write_lse(true)
    }));
    // Parts whose LSE lie so far apart that e to their difference is beyond f32.
    all.push(case("far parts", causal((4, 2)).softmax_scale(60.0)));
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
    for broadcast in BiasBroadcast::ALL {
        all.push(case(format!("bias {broadcast:?}"), bias(broadcast)));
    }
    all.push(case("alibi of each sequence", causal((4, 2)).bias(Bias::Alibi { per_batch: true })));
    all.push(case("fp8, a descale for each head", {
        let each = Descale::PerKvHead;
        let whole = FwdProblem::batch(DType::E4m3Fn, dims((61, 90), (4, 2))).dtype_o(DType::F16);
        whole.descale_q(each).descale_k(each).descale_v(each).write_lse(true)
    }));
    all.push(case("O in f32", causal((4, 2)).dtype_o(DType::F32)));
    // Fewer rows than ranks; no keys, or no queries.
    for (seqlens, mask) in [((3, 3), "b"), ((1, 5), "b:2,0"), ((5, 1), "t"), ((6, 0), "0"), ((0, 6), "b")] {
        let few = plain(seqlens, (8, 8)).mask(mask.parse().unwrap()).sink(true);
        all.push(case(format!("{seqlens:?} rows, mask {mask}"), few));
    }
    let sequences = [(23, 23), (0, 5), (40, 40), (1, 1), (7, 0)];
    for mask in ["b", "b:6,0,1"] {
        all.push(packed(format!("packed {mask}"), &sequences, |whole| {
            whole.mask(mask.parse().unwrap()).p_drop(0.2)
        }));
    }
    // Sequences that end where ranks' rows do: of 2 ranks, of 4 and of 8.
    let borders = [(12, 12), (12, 12), (0, 0), (24, 24)];
    all.push(packed("packed to the borders", &borders, |whole| {
        whole.mask("b".parse().unwrap()).sink(true).bias(Bias::Alibi { per_batch: true })
    }));
    all.push(packed("packed, no rows", &[(0, 0), (0, 0)], |whole| whole));
    all
}

fn packed(
    name: impl Into<String>,
    sequences: &[(u32, u32)],
    with: impl Fn(FwdProblem) -> FwdProblem,
) -> Case {
    let longest = |side: fn(&(u32, u32)) -> u32| sequences.iter().map(side).max().unwrap();
    let sizes = dims((longest(|rows| rows.0), longest(|rows| rows.1)), (4, 2));
    let sizes = Dims { batch: sequences.len() as u32, ..sizes };
    let cu = |side: fn(&(u32, u32)) -> u32| {
        std::iter::once(0)
            .chain(sequences.iter().scan(0, |at, rows| {
                *at += side(rows);
                Some(*at)
            }))
            .collect::<Vec<u32>>()
    };
    Case {
        name: name.into(),
        whole: with(FwdProblem::group(DType::Bf16, sizes)).write_lse(true),
        lengths: Lengths::packed(sequences),
        packed: Some([cu(|rows| rows.0), cu(|rows| rows.1)]),
    }
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
        // The second host has nothing.
        let all_on_one =
            |rows: u32| Partition::new(rows, vec![vec![], vec![0..rows], vec![], vec![]]).unwrap();
        vec![
            ("1 rank".to_owned(), self.over(|rows| Partition::contiguous(rows, 1))),
            ("2 ranks".to_owned(), self.over(|rows| Partition::contiguous(rows, 2))),
            ("4 zig-zag".to_owned(), self.over(|rows| Partition::zig_zag(rows, 4))),
            ("uneven".to_owned(), self.over(uneven)),
            ("8 zig-zag".to_owned(), self.over(|rows| Partition::zig_zag(rows, 8))),
            ("all on one of 4".to_owned(), self.over(all_on_one)),
        ]
    }

    fn has_gradients(&self) -> bool {
        !self.whole.dtypes.qk.is_fp8()
    }

    /// Whether a scheme takes the case.
    fn takes(&self, scheme: Scheme, ranks: u32) -> bool {
        if scheme == Scheme::Mixed {
            return ranks > 2 && ranks.is_multiple_of(2);
        }
        // Operands that Ulysses cannot split: a rank would need the heads or the query rows of other ranks.
        let of_all = match self.whole.score.bias {
            Bias::Elementwise(_) => true,
            Bias::Alibi { per_batch } => per_batch && self.packed.is_none(),
            Bias::None => self.whole.scales.descale_k == Descale::PerKvHead,
        };
        match scheme {
            Scheme::Ulysses => {
                let dims = self.whole.dims;
                let each = dims.num_heads_q / ranks;
                let ratio = dims.num_heads_q / dims.num_heads_kv;
                dims.num_heads_q.is_multiple_of(ranks)
                    && (each.is_multiple_of(ratio) || ratio.is_multiple_of(each))
                    && !(of_all && ranks > 1)
            }
            _ => true,
        }
    }
}

/// Hosts of two ranks, for `mixed`.
fn hosts_of_two() -> Links {
    let mut links = Links::default();
    links.ranks_per_host = Some(2);
    links
}

const SCHEMES: [Scheme; 4] = [Scheme::Gather, Scheme::Ring, Scheme::Mixed, Scheme::Ulysses];

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
            for scheme in SCHEMES {
                let what = format!("{}, {name}, {scheme}", case.name);
                // A row's bits may depend on how many come in one call, unless kernels promise that they do not.
                let same = PlanOptions::default()
                    .batch_invariant(scheme.has_bits_of_one_device())
                    .row_invariant(scheme.has_rows_of_one_device());
                // Links so slow that heads come in groups where they can.
                let mut links = hosts_of_two();
                links.bytes_per_second = 1.0;
                let options = Options::default().scheme(scheme).kernels(same).links(links);
                let mut host = new();
                let done = support::forward(&mut host, &problem, &options, 2);
                if !case.takes(scheme, problem.q.ranks()) {
                    assert!(done.unwrap_err().text.starts_with(&format!("{scheme}: ")), "{what}");
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
fn a_scheme_that_does_not_keep_rows_of_one_device_refuses_them_by_name() {
    let case = &cases()[0];
    let (_, problem) = &case.problems()[0];
    for scheme in SCHEMES.into_iter().filter(|scheme| !scheme.has_rows_of_one_device()) {
        if !case.takes(scheme, problem.q.ranks()) {
            continue;
        }
        let kernels = PlanOptions::default().row_invariant(true);
        let options = Options::default().scheme(scheme).kernels(kernels).links(hosts_of_two());
        let mut host = HostFwd::new(case.whole.clone(), &case.lengths, DATA).unwrap();
        let error = support::forward(&mut host, problem, &options, 1).unwrap_err().text;
        assert!(error.contains("row_invariant true"), "{scheme}: {error}");
    }
}

#[test]
fn backward_over_ranks_is_that_of_one_device() {
    for case in cases().into_iter().filter(Case::has_gradients) {
        let wanted = BwdProblem::new(case.whole.clone()).write_dsink(case.whole.score.sink);
        let new = || {
            let mut host = HostBwd::new(wanted.clone(), &case.lengths, DATA).unwrap();
            host.fill_forward().unwrap();
            host
        };
        let mut alone = new();
        support::backward_alone(&mut alone);
        for (name, problem) in case.problems() {
            for scheme in SCHEMES {
                let what = format!("{}, {name}, {scheme}", case.name);
                if !case.takes(scheme, problem.q.ranks()) {
                    continue;
                }
                let options = Options::default().scheme(scheme).links(hosts_of_two());
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
    let cases = [
        ("0", false, 1, DType::Bf16),
        ("b", true, 3, DType::Bf16),
        ("b:30,0", false, 2, DType::Bf16),
        ("b", false, 2, DType::F16),
        ("0", true, 5, DType::F32),
        ("b", false, 3, DType::E4m3Fn),
    ];
    for (mask, sink, seqlen_q, dtype) in cases {
        let whole = FwdProblem::batch(dtype, dims((seqlen_q, 200), (8, 2))).write_lse(true);
        let whole = whole.mask(mask.parse().unwrap()).sink(sink);
        // One rank has no keys, and one has two runs of them, whose results it merges before they go out.
        let uneven = Partition::new(200, vec![vec![0..9], vec![], vec![9..20, 150..200], vec![20..150]]);
        let evenly = [1, 2, 5, 8].map(|ranks| Partition::contiguous(200, ranks));
        for keys in evenly.into_iter().chain([uneven.unwrap()]) {
            let ranks = keys.ranks();
            let problem = Problem::new(whole.clone(), Partition::replicated(seqlen_q, ranks)).keys(keys);
            let mut host = HostFwd::new(whole.clone(), &Lengths::default(), DATA).unwrap();
            // The planner's own choice: no other scheme takes replicated queries.
            let what = format!("{mask}, {dtype:?} over {ranks}");
            support::forward(&mut host, &problem, &Options::default(), 2)
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            passes(&check_fwd(&host, &Selection::default(), &|_, _| ()).unwrap(), &what);
        }
    }
}

/// dK, dV and the sinks' gradient of more ranks than a merge takes parts are added by several.
#[test]
fn more_ranks_than_one_merge_takes_give_the_gradients_of_one_device() {
    const RANKS: u32 = 130;
    let sizes = Dims { batch: 1, ..dims((RANKS, RANKS), (2, 1)) };
    let whole = FwdProblem::batch(DType::Bf16, sizes).write_lse(true).sink(true);
    let problem = Problem::new(whole.clone(), Partition::contiguous(RANKS, RANKS));
    let mut host = HostBwd::new(BwdProblem::new(whole).write_dsink(true), &Lengths::default(), DATA).unwrap();
    host.fill_forward().unwrap();
    support::backward(&mut host, &problem, &Options::default().scheme(Scheme::Gather)).unwrap();
    passes(&check_bwd(&host, &Selection::default(), &|_, _| ()).unwrap(), "130 ranks");
}

/// Two calls that differ only in whether they write LSE.
#[test]
fn without_an_lse_to_write_o_has_the_same_bits() {
    for case in
        cases().iter().filter(|case| case.lengths.totals != Totals::default() || case.whole.score.sink)
    {
        for (name, problem) in case.problems() {
            for scheme in SCHEMES.into_iter().filter(|&scheme| case.takes(scheme, problem.q.ranks())) {
                let options = Options::default().scheme(scheme).links(hosts_of_two());
                let host = HostFwd::new(case.whole.clone(), &case.lengths, DATA).unwrap();
                let run = |write_lse| {
                    let mut problem = problem.clone();
                    problem.whole.write_lse = write_lse;
                    let results = support::on_ranks(problem.q.ranks(), support::TIMEOUT, |group| {
                        let results = support::forward_rank(&host, &problem, group, &options, 1);
                        results.map(|mut results| results.swap_remove(0))
                    });
                    results.into_iter().collect::<Result<Vec<_>, _>>()
                };
                assert!(run(true).unwrap() == run(false).unwrap(), "{}, {name}, {scheme}", case.name);
            }
        }
    }
}

#[test]
fn totals_of_lengths_are_those_of_the_partition() {
    // The battery's lengths and the plan's offsets are made apart: this holds them together.
    for case in cases().iter().filter(|case| case.packed.is_some()) {
        let [q, k] = case.rows();
        assert_eq!(case.lengths.totals, Totals::packed(q, k), "{}", case.name);
    }
}

/// Results of one rank in every case and scheme for this number of ranks, forward and backward, a line each.
fn told(group: &std::sync::Arc<dyn fmha_dist::Group>) -> String {
    let (rank, ranks) = (group.rank(), group.size());
    let hash = |results: &[Vec<u8>]| {
        let bytes = results.iter().flatten();
        bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        })
    };
    let mut lines = String::new();
    for case in cases() {
        let problem = case.over(|rows| Partition::zig_zag(rows, ranks));
        let host = HostFwd::new(case.whole.clone(), &case.lengths, DATA).unwrap();
        let gradients = case.has_gradients().then(|| {
            let wanted = BwdProblem::new(case.whole.clone()).write_dsink(case.whole.score.sink);
            let mut host = HostBwd::new(wanted, &case.lengths, DATA).unwrap();
            host.fill_forward().unwrap();
            host
        });
        for scheme in [Scheme::Gather, Scheme::Ring, Scheme::Mixed, Scheme::Ulysses] {
            if !case.takes(scheme, ranks) {
                continue;
            }
            let options = Options::default().scheme(scheme).links(hosts_of_two());
            let what = |error| format!("{}, {scheme}: {error}", case.name);
            let forward = support::forward_rank(&host, &problem, group.clone(), &options, 1);
            let forward = hash(&forward.unwrap_or_else(|error| panic!("{}", what(error))));
            let backward = gradients.as_ref().map(|host| {
                let results = support::backward_rank(host, &problem, group.clone(), &options);
                hash(&results.unwrap_or_else(|error| panic!("{}", what(error))))
            });
            lines += &format!("{rank} of {ranks}, {}, {scheme}: {forward:x} {backward:x?}\n", case.name);
        }
    }
    lines
}

/// The child's half of the test below; it does nothing unless it is started as a child.
#[test]
fn a_rank_that_is_a_process() {
    let Some((folder, rank, size)) = support::as_process() else { return };
    let rendezvous = fmha_dist::Rendezvous::file(folder.join("rendezvous"), rank, size);
    let group = fmha_dist::connect(&rendezvous, std::time::Duration::from_secs(60)).unwrap();
    let group: std::sync::Arc<dyn fmha_dist::Group> = std::sync::Arc::new(group);
    std::fs::write(folder.join(format!("{rank}.txt")), told(&group)).unwrap();
}

/// Threads' results are held against one device and f64 above.
#[test]
fn processes_give_the_bits_of_threads_in_every_case_and_scheme() {
    for size in [1, 3, 8] {
        let folder = tempfile::tempdir().unwrap();
        let children: Vec<_> = (0..size)
            .map(|rank| {
                let mut child = support::process("a_rank_that_is_a_process", folder.path(), rank, size);
                child.spawn().unwrap()
            })
            .collect();
        let expected = support::on_ranks(size, support::TIMEOUT, |group| told(&group));
        for (rank, mut child) in children.into_iter().enumerate() {
            assert!(child.wait().unwrap().success(), "rank {rank} of {size}");
            let said = std::fs::read_to_string(folder.path().join(format!("{rank}.txt"))).unwrap();
            assert!(said.lines().count() > 20, "rank {rank} of {size}: {said}");
            assert_eq!(said, expected[rank], "rank {rank} of {size}");
        }
    }
}

/// The mixed scheme sends an eighth of a ring's bytes over slow links between hosts, and hides the time
/// sooner.
#[test]
fn the_model_prefers_the_mix_where_links_between_hosts_are_slow() {
    let sizes = Dims { batch: 1, ..dims((1 << 17, 1 << 17), (32, 32)) };
    let sizes = Dims { head_dim_qk: 128, head_dim_v: 128, ..sizes };
    let whole = FwdProblem::batch(DType::Bf16, sizes).mask("b".parse().unwrap());
    let problem = Problem::new(whole, Partition::zig_zag(1 << 17, 64));
    let links: Links =
        "ranks_per_host = 8\nhost_bytes_per_second = 2e10 # slow\nmemory = 1.5e9".parse().unwrap();
    let choice = fmha_dist::choose(&problem, 64, false, &Options::default().links(links)).unwrap();
    assert_eq!(choice.scheme, Scheme::Mixed, "{choice}");
    // One host has no other to mix with.
    let choice = fmha_dist::choose(&problem, 64, false, &Options::default()).unwrap();
    let mixed = choice.considered.iter().find(|(scheme, _)| *scheme == Scheme::Mixed).unwrap();
    let refusal = mixed.1.as_ref().unwrap_err();
    assert!(refusal.contains("ranks_per_host 64 does not cut 64 ranks"), "{refusal}");
    assert!("ranks_per_host = 2.5".parse::<Links>().is_err());
}
