//! Failures of one rank fail on all ranks, with the rank and the field, within the timeout: in threads and in
//! processes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fmha::{Accuracy, Bias, DType, DevSlice, Dims, FwdProblem, MaskSpec, PlanOptions};
use fmha_conformance::init::Init;
use fmha_conformance::tensor::{Operand, Room};
use fmha_conformance::tensors::{Data, HostFwd, Lengths};
use fmha_dist::{
    Block, BwdPlan, Error, Exchange, FwdPlan, Group, Options, Parcel, Partition, Problem, Rendezvous, Scheme,
    connect,
};

const SHORT: Duration = Duration::from_millis(600);

fn dims() -> Dims {
    Dims::batch(1).seqlens(48, 48).heads(4, 2).head_dim(16)
}

fn problem(ranks: u32) -> Problem {
    let whole = FwdProblem::batch(DType::Bf16, dims()).mask(MaskSpec::CAUSAL).write_lse(true);
    Problem::new(whole, Partition::zig_zag(48, ranks))
}

fn host(problem: &Problem) -> HostFwd {
    let room = Room { placement: fmha_conformance::memory::Placement::Margins, shift: 0 };
    HostFwd::new(problem.whole.clone(), &Lengths::default(), Data { init: Init::Normal, seed: 5, room })
        .unwrap()
}

fn ring() -> Options {
    Options::default().scheme(Scheme::Ring)
}

/// Checks that every rank has this error.
fn all_say(results: Vec<Result<Vec<Vec<u8>>, Error>>, rank: u32, field: &str, text: &str) {
    for (on, result) in results.into_iter().enumerate() {
        let error = result.expect_err(&format!("rank {on} took its output for a result"));
        assert_eq!((error.rank, &*error.field), (rank, field), "on rank {on}: {error}");
        assert!(error.text.contains(text), "on rank {on}: {error}");
    }
}

#[test]
fn a_rank_that_means_another_problem_is_named_on_every_rank() {
    let right = problem(4);
    let host = host(&right);
    let run = |wrong: &Problem| {
        support::on_ranks(4, support::TIMEOUT, |group| {
            let mine = if group.rank() == 2 { wrong } else { &right };
            support::forward_rank(&host, mine, group, &ring(), 1)
        })
    };
    let mut wrong = right.clone();
    wrong.whole.score.softcap = Some(2.0);
    all_say(run(&wrong), 2, "softcap", "rank 2 says softcap 2, but most say none");
    let mut wrong = right.clone();
    wrong.whole.dims.num_heads_kv = 1;
    all_say(run(&wrong), 2, "num_heads_kv", "but most say 2");
    // A call that is wrong by itself too.
    let mut wrong = right.clone();
    wrong.whole.dims.num_heads_kv = 3;
    all_say(run(&wrong), 2, "num_heads_q", "num_heads_q 4 is not a multiple of num_heads_kv 3");
    let mut wrong = right.clone();
    wrong.k = Partition::contiguous(48, 4);
    all_say(run(&wrong), 2, "partition of keys", "");
}

/// Fields that must be equal on all ranks, of the problem and of the options: rank 2 changes one after
/// another.
#[test]
fn a_field_of_the_problem_that_differs_on_one_rank_is_named_on_every_rank() {
    let right = problem(4);
    let packed = |cu_seqlens_q: &[u32], cu_seqlens_k: &[u32]| {
        let dims = Dims { batch: cu_seqlens_q.len() as u32 - 1, ..dims() };
        let whole = FwdProblem::group(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
        Problem::new(whole, Partition::zig_zag(48, 4)).packed(cu_seqlens_q.into(), cu_seqlens_k.into())
    };
    let (one, two, others) = (&[0, 48][..], &[0, 20, 48][..], &[0, 24, 48][..]);
    let of = |problem: &Problem, change: &dyn Fn(&mut Problem)| {
        let mut wrong = problem.clone();
        change(&mut wrong);
        wrong
    };
    let whole = |change: &dyn Fn(FwdProblem) -> FwdProblem| {
        of(&right, &|problem| problem.whole = change(problem.whole.clone()))
    };
    let sizes = |change: &dyn Fn(&mut Dims)| {
        let mut dims = dims();
        change(&mut dims);
        let whole = FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
        Problem::new(whole, Partition::zig_zag(dims.seqlen_q, 4)).keys(Partition::zig_zag(dims.seqlen_k, 4))
    };
    let uneven = Partition::new(48, vec![vec![0..20], vec![20..24], vec![24..36], vec![36..48]]).unwrap();
    for (field, first, other) in [
        ("batch", &right, sizes(&|dims| dims.batch = 2)),
        ("seqlen_q", &right, sizes(&|dims| dims.seqlen_q = 52)),
        ("seqlen_k", &right, sizes(&|dims| dims.seqlen_k = 52)),
        ("num_heads_q", &right, sizes(&|dims| dims.num_heads_q = 8)),
        ("num_heads_kv", &right, sizes(&|dims| dims.num_heads_kv = 4)),
        ("head_dim_qk", &right, sizes(&|dims| dims.head_dim_qk = 24)),
        ("head_dim_v", &right, sizes(&|dims| dims.head_dim_v = 24)),
        ("mask", &right, whole(&|whole| whole.mask("b:4,0".parse().unwrap()))),
        ("softmax_scale", &right, whole(&|whole| whole.softmax_scale(0.25 + f32::EPSILON))),
        ("softcap", &right, whole(&|whole| whole.softcap(1.0))),
        ("bias", &right, whole(&|whole| whole.bias(Bias::Alibi { per_batch: true }))),
        ("sink", &right, whole(&|whole| whole.sink(true))),
        ("p_drop", &right, whole(&|whole| whole.p_drop(0.5))),
        ("dtype_qk", &right, whole(&|whole| whole.dtype_qk(DType::F16).dtype_v(DType::F16))),
        ("dtype_o", &right, whole(&|whole| whole.dtype_o(DType::F32))),
        ("write_lse", &right, whole(&|whole| whole.write_lse(false))),
        ("layout", &right, packed(one, one)),
        ("cu_seqlens_q", &packed(two, two), packed(others, two)),
        ("cu_seqlens_k", &packed(two, two), packed(two, others)),
        ("partition of queries", &right, of(&right, &|problem| problem.q = uneven.clone())),
        ("partition of keys", &right, of(&right, &|problem| problem.k = uneven.clone())),
    ] {
        let results = support::on_ranks(4, support::TIMEOUT, |group| {
            let problem = if group.rank() == 2 { &other } else { first };
            FwdPlan::new(problem, group, &support::device(), &ring()).map(|_| Vec::new())
        });
        all_say(results, 2, field, "");
    }
}

/// Rank 3 has no queries, and says of LSE and of the bias that the others know.
#[test]
fn a_rank_without_queries_takes_lse_and_a_bias_as_the_others_have_them() {
    let queries = Partition::new(48, vec![vec![0..16], vec![16..40], vec![40..48], vec![]]).unwrap();
    let dense = |broadcast| {
        let strides = fmha::Strides { batch: 0, seq: 48, head: 48 * 48, dim: 1 };
        Bias::Elementwise(fmha::ElementwiseBias { dtype: DType::F32, broadcast, strides })
    };
    for (bias, write_lse) in [
        (Bias::None, true),
        (Bias::None, false),
        (dense(fmha::BiasBroadcast::OneHead), true),
        (dense(fmha::BiasBroadcast::OneOne), false),
    ] {
        let whole = FwdProblem::batch(DType::Bf16, dims()).bias(bias).write_lse(write_lse);
        let right = Problem::new(whole, queries.clone()).keys(Partition::zig_zag(48, 4));
        let plan = |open: bool, wrong: bool| {
            support::on_ranks(4, support::TIMEOUT, |group| {
                let mut mine = right.clone();
                match group.rank() {
                    3 if open => {
                        mine.whole.write_lse = !write_lse;
                        mine.whole.score.bias = Bias::None;
                        mine = mine.as_others(true, true);
                    }
                    3 => mine.whole.write_lse = !write_lse,
                    1 if wrong => mine.whole.score.softcap = Some(2.0),
                    _ => {}
                }
                FwdPlan::new(&mine, group, &support::device(), &Options::default())
                    .map(|plan| vec![plan.choice().to_string().into_bytes()])
            })
        };
        let said = plan(true, false).into_iter().map(Result::unwrap).collect::<Vec<_>>();
        assert!(said.iter().all(|choice| *choice == said[0]), "{said:?}");
        all_say(plan(false, false), 3, "write_lse", "");
        all_say(plan(true, true), 1, "softcap", "");
    }
}

#[test]
fn an_option_that_differs_on_one_rank_is_named_on_every_rank() {
    let (gather, problem) = (Options::default().scheme(Scheme::Gather), problem(4));
    let kernels = |kernels: PlanOptions| gather.clone().kernels(kernels);
    let mut rows = PlanOptions::default();
    rows.row_invariant = true;
    let links = |text: &str| gather.clone().links(text.parse().unwrap());
    for (field, other) in [
        ("scheme", ring()),
        ("flags", gather.clone().flags(false)),
        ("ranks_per_host", links("ranks_per_host = 2")),
        ("batch_invariant", kernels(PlanOptions::default().batch_invariant(true))),
        ("row_invariant", kernels(rows)),
        ("deterministic", kernels(PlanOptions::default().deterministic(true))),
        ("accuracy", kernels(PlanOptions::default().accuracy(Accuracy::Exact))),
    ] {
        let results = support::on_ranks(4, support::TIMEOUT, |group| {
            let options = if group.rank() == 2 { &other } else { &gather };
            FwdPlan::new(&problem, group, &support::device(), options).map(|_| Vec::new())
        });
        all_say(results, 2, field, &format!("rank 2 says {field} "));
    }
    // A rank's own kernels and its own speeds of links need not be equal on all ranks.
    for other in [kernels(PlanOptions::default().allow_fallback(true)), links("latency = 1")] {
        let results = support::on_ranks(4, support::TIMEOUT, |group| {
            let options = if group.rank() == 2 { &other } else { &gather };
            FwdPlan::new(&problem, group, &support::device(), options).map(|_| ())
        });
        assert!(results.iter().all(Result::is_ok), "{results:?}");
    }
    for wanted in [(DType::F32, false), (DType::Bf16, true)] {
        let results = support::on_ranks(4, support::TIMEOUT, |group| {
            let wanted = if group.rank() == 2 { wanted } else { (DType::Bf16, false) };
            BwdPlan::new(&problem, wanted, group, &support::device(), &gather).map(|_| Vec::new())
        });
        all_say(results, 2, "gradients", "rank 2 says gradients ");
    }
}

/// Some ranks plan at a new shape while the others run. A rank then gets rows that it does not expect, or no
/// message of a plan.
#[test]
fn a_rank_that_plans_where_the_others_run_again_is_named_on_every_rank() {
    let right = problem(4);
    let host = host(&right);
    let mut wrong = right.clone();
    wrong.whole.dims.seqlen_k = 96;
    wrong.k = Partition::zig_zag(96, 4);
    let of_these_plan = |plan: &[u32]| {
        support::on_ranks(4, support::TIMEOUT, |group| {
            let plans = plan.contains(&group.rank());
            let ran =
                support::forward_rank(&host, &right, group.clone(), &ring(), if plans { 1 } else { 2 })?;
            if plans {
                FwdPlan::new(&wrong, group, &support::device(), &ring())?;
            }
            Ok(ran)
        })
    };
    let text = "rank 2 plans a problem of seqlen_k 96, where a call of 48 runs";
    all_say(of_these_plan(&[2]), 2, "seqlen_k", text);
    let text = "rank 2 runs a call of seqlen_k 48, where most plan a problem of 96";
    all_say(of_these_plan(&[0, 1, 3]), 2, "seqlen_k", text);
}

/// Both calls are planned on all ranks before.
#[test]
fn a_rank_that_runs_another_call_than_the_others_is_named_on_every_rank() {
    let of_keys = |keys: u32| {
        let mut problem = problem(4);
        problem.whole.dims.seqlen_k = keys;
        problem.k = Partition::zig_zag(keys, 4);
        problem
    };
    for (long, text) in [
        (&[2][..], "rank 2 says seqlen_k 96, but most say 48"),
        (&[0, 1, 3][..], "rank 2 says seqlen_k 48, but most say 96"),
    ] {
        let results = support::on_ranks(4, support::TIMEOUT, |group| {
            let device = support::device();
            let rank = group.rank();
            let plan = |keys| FwdPlan::new(&of_keys(keys), group.clone(), &device, &ring());
            let mut plans = [plan(48)?, plan(96)?];
            for of in [0, 1, usize::from(long.contains(&rank))] {
                let rows = 12 * (of + 1);
                let (q, k, v) = (vec![0u8; 12 * 4 * 32], vec![0u8; rows * 2 * 32], vec![0u8; rows * 2 * 32]);
                let (mut o, mut lse) = (vec![0u8; 12 * 4 * 32], vec![0u8; 12 * 4 * 4]);
                let [q, k, v] = [&q, &k, &v].map(|bytes| fmha::DevSlice::host(&bytes[..]));
                let mut args = fmha::FwdArgs::new(q, k, v, fmha::DevSliceMut::host(&mut o));
                args.lse = Some(fmha::DevSliceMut::host(&mut lse));
                plans[of].run(&mut args, &device.default_stream())?;
            }
            Ok(Vec::new())
        });
        all_say(results, 2, "seqlen_k", text);
    }
}

#[test]
fn a_rank_whose_tensor_is_too_short_is_named_on_every_rank() {
    let problem = problem(4);
    let host = host(&problem);
    let results = support::on_ranks(4, support::TIMEOUT, |group| {
        let device = support::device();
        let rank = group.rank();
        let mut plan = FwdPlan::new(&problem, group, &device, &ring())?;
        let rows = if rank == 1 { 11 } else { 12 };
        let (q, k, v) = (vec![0u8; rows * 4 * 32], vec![0u8; 12 * 2 * 32], vec![0u8; 12 * 2 * 32]);
        let (mut o, mut lse) = (vec![0u8; 12 * 4 * 32], vec![0u8; 12 * 4 * 4]);
        let [q, k, v] = [&q, &k, &v].map(|bytes| fmha::DevSlice::host(&bytes[..]));
        let mut args = fmha::FwdArgs::new(q, k, v, fmha::DevSliceMut::host(&mut o));
        args.lse = Some(fmha::DevSliceMut::host(&mut lse));
        plan.run(&mut args, &device.default_stream())?;
        Ok(Vec::new())
    });
    drop(host);
    all_say(results, 1, "q", "q has 1408 bytes, but its rows here are 1536");
}

#[test]
fn a_rank_that_is_late_is_named_on_every_rank_within_the_timeout() {
    let problem = problem(4);
    let host = host(&problem);
    for late in 0..4 {
        let results = support::on_ranks(4, SHORT, |group| {
            let start = Instant::now();
            let rank = group.rank();
            if rank == late {
                // The rank comes after the others have timed out.
                std::thread::sleep(3 * SHORT);
            }
            let result = support::forward_rank(&host, &problem, group, &ring(), 1);
            assert!(start.elapsed() < 5 * SHORT, "rank {rank} waited {:?}", start.elapsed());
            result
        });
        all_say(results, late, "exchange", &format!("rank {late} is late: waited {} ms", SHORT.as_millis()));
    }
}

/// Each of its messages is in time, and the call is not.
#[test]
fn a_rank_that_is_late_by_a_bit_at_each_step_is_named_when_the_call_has_waited_too_long() {
    let problem = problem(4);
    let host = host(&problem);
    let start = Instant::now();
    let results = support::on_ranks(4, SHORT, |group| {
        let slow = group.rank() == 2;
        let group = if slow { support::Slow::by(SHORT * 2 / 5, group) } else { group };
        support::forward_rank(&host, &problem, group, &ring(), 1)
    });
    assert!(start.elapsed() < 5 * SHORT, "{:?}", start.elapsed());
    all_say(results, 2, "exchange", "rank 2 is late");
}

/// Ranks come to a share one after another: none is late by itself, and the last one is.
#[test]
fn all_ranks_of_a_share_are_waited_for_no_longer_than_one() {
    let start = Instant::now();
    let results = support::on_ranks(4, SHORT, |group| {
        std::thread::sleep(SHORT * 3 / 5 * group.rank());
        group.share(&[]).map(|_| Vec::new())
    });
    assert!(start.elapsed() < 4 * SHORT, "{:?}", start.elapsed());
    all_say(results, 2, "exchange", "rank 2 is late");
}

/// Each rank of a ring waits for the one before, which waits for the one before it: the first of them is to
/// blame.
#[test]
fn the_rank_that_all_wait_for_in_the_end_is_the_late_one() {
    let results = support::on_ranks(5, SHORT, |group| {
        let rank = group.rank();
        if rank == 2 {
            std::thread::sleep(3 * SHORT);
        }
        // Each sends on what it got, so that ranks 4, 0 and 1 lack what rank 2 never sent.
        let (before, next) = ((rank + 4) % 5, (rank + 1) % 5);
        let device = support::device();
        let mut held = vec![rank as u8; 8];
        for _ in 0..5 {
            let mut got = vec![0u8; 8];
            let block = fmha_dist::Block { offset: 0, rows: 1, row_bytes: 8, stride: 8 };
            let parcel = |peer| fmha_dist::Parcel { peer, buffer: 0, block };
            let exchange = fmha_dist::Exchange { sends: vec![parcel(next)], receives: vec![parcel(before)] };
            let mut sinks = [fmha::DevSliceMut::host(&mut got)];
            group.exchange(
                &exchange,
                &[fmha::DevSlice::host(&held)],
                &mut sinks,
                &device.default_stream(),
            )?;
            held = got;
        }
        Ok(vec![held])
    });
    all_say(results, 2, "exchange", "rank 2 is late");
}

#[test]
fn a_rank_that_leaves_or_panics_is_named_on_every_other() {
    let problem = problem(3);
    let host = host(&problem);
    for panics in [false, true] {
        let results = support::on_ranks(3, support::TIMEOUT, |group| {
            if group.rank() == 1 {
                let left = std::thread::scope(|scope| {
                    scope
                        .spawn(move || {
                            let _group = group;
                            assert!(!panics, "this rank is to panic");
                        })
                        .join()
                });
                assert_eq!(left.is_err(), panics);
                return Err(Error::new(1, "group", if panics { "has panicked" } else { "has left" }));
            }
            support::forward_rank(&host, &problem, group, &ring(), 1)
        });
        all_say(results, 1, "group", if panics { "has panicked" } else { "has left" });
    }
}

/// The child's half of the tests below; it does nothing unless it is started as a child.
#[test]
fn a_rank_of_a_group_of_processes() {
    let var = |name: &str| std::env::var(name).ok();
    let Some((folder, rank, size)) = support::as_process() else { return };
    let timeout = Duration::from_millis(var("DIST_TEST_TIMEOUT").unwrap().parse().unwrap());
    let group = connect(&Rendezvous::file(folder.join("rendezvous"), rank, size), timeout).unwrap();
    match var("DIST_TEST_FATE").as_deref() {
        Some("dies") => std::process::abort(),
        Some("sleeps") => std::thread::sleep(4 * timeout),
        _ => {}
    }
    let problem = problem(size);
    let result = support::forward_rank(&host(&problem), &problem, Arc::new(group), &ring(), 2);
    let text = match result {
        Ok(own) => {
            std::fs::write(folder.join(format!("{rank}.o")), &own[0]).unwrap();
            "done".to_owned()
        }
        Err(error) => format!("{error}"),
    };
    std::fs::write(folder.join(format!("{rank}.txt")), text).unwrap();
}

fn children(folder: &Path, size: u32, timeout: u32, fate: Option<(u32, &str)>) -> Vec<Child> {
    (0..size)
        .map(|rank| {
            let mut child = support::process("a_rank_of_a_group_of_processes", folder, rank, size);
            child.env("DIST_TEST_TIMEOUT", timeout.to_string());
            if let Some((_, fate)) = fate.filter(|(fated, _)| *fated == rank) {
                child.env("DIST_TEST_FATE", fate);
            }
            child.stderr(Stdio::null()).spawn().unwrap()
        })
        .collect()
}

#[test]
fn processes_give_the_bits_of_threads() {
    let problem = problem(3);
    let host = host(&problem);
    let threads = support::on_ranks(3, support::TIMEOUT, |group| {
        support::forward_rank(&host, &problem, group, &ring(), 1).unwrap()
    });
    let folder = tempfile::tempdir().unwrap();
    for mut child in children(folder.path(), 3, 20_000, None) {
        assert!(child.wait().unwrap().success());
    }
    for (rank, own) in threads.iter().enumerate() {
        let said = std::fs::read_to_string(folder.path().join(format!("{rank}.txt"))).unwrap();
        assert_eq!(said, "done", "rank {rank}");
        assert!(std::fs::read(folder.path().join(format!("{rank}.o"))).unwrap() == own[0], "rank {rank}");
    }
    assert!(host.operands.get(Operand::O).is_some());
}

#[test]
fn a_process_that_dies_or_stands_still_is_named_by_every_other() {
    for (fate, says, timeout) in [("dies", "rank 1 has died", 20_000), ("sleeps", "rank 1 is late", 1500)] {
        let folder = tempfile::tempdir().unwrap();
        let start = Instant::now();
        let mut all = children(folder.path(), 3, timeout, Some((1, fate)));
        for rank in [0, 2] {
            assert!(all[rank].wait().unwrap().success());
            let said = std::fs::read_to_string(folder.path().join(format!("{rank}.txt"))).unwrap();
            assert!(said.starts_with("rank 1, ") && said.contains(says), "rank {rank}: {said}");
        }
        assert!(start.elapsed() < Duration::from_secs(15), "{fate}: {:?}", start.elapsed());
        all[1].wait().unwrap();
    }
}

#[test]
fn a_group_that_is_not_complete_names_who_has_not_come() {
    let folder = tempfile::tempdir().unwrap();
    let error = connect(&Rendezvous::file(folder.path().join("here"), 0, 2), SHORT).err().unwrap();
    assert_eq!((error.rank, &*error.field), (1, "group"));
    let error = connect(&Rendezvous::file(folder.path().join("nowhere"), 1, 2), SHORT).err().unwrap();
    assert_eq!((error.rank, &*error.field), (0, "group"));
    let error = connect(&Rendezvous::at("127.0.0.1:1", 3, 2), SHORT).err().unwrap();
    assert_eq!((error.rank, &*error.field), (3, "rank"));
}

#[test]
fn an_exchange_with_what_is_not_there_is_refused_with_the_number() {
    let (bytes, stream) = ([0u8; 8], support::device().default_stream());
    let row = Block { offset: 0, rows: 1, row_bytes: 8, stride: 8 };
    let parcel = |peer, buffer, block| Parcel { peer, buffer, block };
    let all = u64::MAX;
    for (sent, text) in [
        (parcel(2, 0, row), "rank 2 is none of 2"),
        (parcel(1, 7, Block { rows: 0, ..row }), "buffer 7 is none of 1"),
        (parcel(1, 0, Block { offset: 1, ..row }), "buffer 0 has 8 bytes, but 9 are moved"),
        (parcel(1, 0, Block { offset: all, ..row }), "but 18446744073709551615 are moved"),
        (parcel(1, 0, Block { rows: 3, stride: all, ..row }), "but 18446744073709551615 are moved"),
        (parcel(1, 0, Block { rows: 1 << 61, ..row }), "are moved"),
        (parcel(1, 0, Block { rows: 1 << 61, stride: 0, ..row }), "are moved"),
    ] {
        let exchange = Exchange { sends: vec![sent], receives: Vec::new() };
        let group = &fmha_dist::threads(2, SHORT)[0];
        let error = group.exchange(&exchange, &[DevSlice::host(&bytes)], &mut [], &stream).unwrap_err();
        assert_eq!((error.rank, &*error.field), (0, "exchange"), "{sent:?}: {error}");
        assert!(error.text.contains(text), "{sent:?}: {error}");
    }
}

#[test]
fn a_timeout_may_be_longer_than_the_clock_runs() {
    let folder = tempfile::tempdir().unwrap();
    let join = |rank| connect(&Rendezvous::file(folder.path().join("here"), rank, 2), Duration::MAX);
    let said = std::thread::scope(|scope| {
        let other = scope.spawn(|| join(1).unwrap().share(&[1]));
        [join(0).unwrap().share(&[0]).unwrap(), other.join().unwrap().unwrap()]
    });
    assert_eq!(said, [[[0], [1]], [[0], [1]]]);
}

/// Groups that meet by files of one folder write to no file of another group.
#[test]
fn files_where_groups_meet_may_differ_in_their_ending_alone() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("group.new"), "another one's").unwrap();
    for name in ["group.1", "group.2"] {
        let file = Rendezvous::file(folder.path().join(name), 0, 1);
        assert!(connect(&file, SHORT).is_ok(), "{name}");
    }
    assert_eq!(std::fs::read_to_string(folder.path().join("group.new")).unwrap(), "another one's");
}

#[test]
fn a_rank_whose_device_has_no_kernel_for_its_part_is_named_on_every_rank() {
    let problem = problem(4);
    let results = support::on_ranks(4, support::TIMEOUT, |group| {
        let kernels = PlanOptions::default();
        let kernels = if group.rank() == 2 { kernels.kernel("none-such") } else { kernels };
        FwdPlan::new(&problem, group, &support::device(), &ring().kernels(kernels)).map(|_| Vec::new())
    });
    all_say(results, 2, "kernel", "none-such");
}
