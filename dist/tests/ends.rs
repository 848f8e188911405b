//! A rank that ends at any of its calls of the group is named on every other rank, and at once, whatever they
//! do: while they plan, begin a call, exchange, or confirm that they are done.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use fmha::{BwdProblem, DType, Dims, FwdProblem, MaskSpec};
use fmha_conformance::init::Init;
use fmha_conformance::memory::Placement;
use fmha_conformance::tensor::Room;
use fmha_conformance::tensors::{Data, HostBwd, HostFwd, Lengths};
use fmha_dist::{Error, Group, Links, Options, Partition, Problem, Rendezvous, Scheme, connect};
use support::{End, Ends};

const RANKS: u32 = 4;
/// Rank that ends.
const RANK: u32 = 1;
/// More calls of the group than any test here makes.
const MOST_CALLS: u32 = 40;
const DATA: Data =
    Data { init: Init::Normal, seed: 5, room: Room { placement: Placement::Margins, shift: 0 } };

fn problem(scheme: Scheme, ranks: u32) -> Problem {
    let decodes = scheme == Scheme::Decode;
    let dims = Dims::batch(1).seqlens(if decodes { 2 } else { 24 }, 24).heads(4, 2).head_dim(8);
    let whole = FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
    let keys = Partition::zig_zag(24, ranks);
    let queries = if decodes { Partition::replicated(2, ranks) } else { keys.clone() };
    Problem::new(whole, queries).keys(keys)
}

fn options(scheme: Scheme) -> Options {
    let mut links = Links::default();
    links.ranks_per_host = Some(2);
    Options::default().scheme(scheme).links(links)
}

/// Runs with rank [`RANK`]'s group ending at its first call, its second one, and so on, until it makes fewer.
fn end_everywhere(what: &str, end: End, run: impl Fn(Arc<dyn Group>) -> Result<Vec<Vec<u8>>, Error> + Sync) {
    let says = if matches!(end, End::Panics) { "rank 1 has panicked" } else { "rank 1 has left the group" };
    for at in 0..MOST_CALLS {
        let results = support::on_ranks(RANKS, support::TIMEOUT, |group| {
            if group.rank() != RANK {
                return Some(run(group));
            }
            catch_unwind(AssertUnwindSafe(|| run(Ends::at(at, end, group)))).ok()
        });
        if matches!(results[RANK as usize], Some(Ok(_))) {
            assert!(results.iter().all(|result| matches!(result, Some(Ok(_)))) && at > 2, "{what}, {at}");
            return;
        }
        for (rank, result) in (0..RANKS).zip(results).filter(|(rank, _)| *rank != RANK) {
            let error = result.unwrap().expect_err(&format!("{what}, call {at}: rank {rank} has a result"));
            let heard = (error.rank, &*error.field, &*error.text);
            assert_eq!(heard, (RANK, "group", says), "{what}, call {at}, rank {rank}");
        }
    }
    panic!("{what}: more than {MOST_CALLS} calls of the group");
}

#[test]
fn a_rank_that_ends_in_any_phase_of_forward_is_named_on_every_other() {
    for scheme in fmha_dist::SCHEMES {
        let (problem, options) = (problem(scheme, RANKS), options(scheme));
        let host = HostFwd::new(problem.whole.clone(), &Lengths::default(), DATA).unwrap();
        for end in [End::Panics, End::Leaves] {
            end_everywhere(&format!("{scheme}, {end:?}"), end, |group| {
                support::forward_rank(&host, &problem, group, &options, 2)
            });
        }
    }
}

#[test]
fn a_rank_that_ends_in_any_phase_of_backward_is_named_on_every_other() {
    for scheme in [Scheme::Gather, Scheme::Ring, Scheme::Mixed, Scheme::Ulysses] {
        let (problem, options) = (problem(scheme, RANKS), options(scheme));
        let mut host =
            HostBwd::new(BwdProblem::new(problem.whole.clone()), &Lengths::default(), DATA).unwrap();
        host.fill_forward().unwrap();
        for end in [End::Panics, End::Leaves] {
            end_everywhere(&format!("{scheme}, {end:?}"), end, |group| {
                support::backward_rank(&host, &problem, group, &options)
            });
        }
    }
}

const AT: &str = "DIST_TEST_AT";

/// The child's half of the test below; it does nothing unless it is started as a child.
#[test]
fn a_rank_that_is_a_process() {
    let Some((folder, rank, size)) = support::as_process() else { return };
    let group = connect(&Rendezvous::file(folder.join("rendezvous"), rank, size), support::TIMEOUT).unwrap();
    let group: Arc<dyn Group> = Arc::new(group);
    let at = std::env::var(AT).ok().map(|at| at.parse().unwrap());
    let group = at.map_or(group.clone(), |at| Ends::at(at, End::Aborts, group));
    let problem = problem(Scheme::Ring, size);
    let host = HostFwd::new(problem.whole.clone(), &Lengths::default(), DATA).unwrap();
    let said = match support::forward_rank(&host, &problem, group, &options(Scheme::Ring), 1) {
        Ok(_) => "done".to_owned(),
        Err(error) => error.to_string(),
    };
    std::fs::write(folder.join(format!("{rank}.txt")), said).unwrap();
}

#[test]
fn a_process_that_dies_in_any_phase_is_named_by_every_other() {
    for at in 0..MOST_CALLS {
        let folder = tempfile::tempdir().unwrap();
        let child = |rank: u32| {
            let mut child = support::process("a_rank_that_is_a_process", folder.path(), rank, 3);
            if rank == RANK {
                child.env(AT, at.to_string());
            }
            child.stderr(std::process::Stdio::null()).spawn().unwrap()
        };
        let all: Vec<_> = (0..3).map(child).collect();
        let ended: Vec<bool> = all.into_iter().map(|mut child| child.wait().unwrap().success()).collect();
        let said = |rank: u32| std::fs::read_to_string(folder.path().join(format!("{rank}.txt"))).unwrap();
        if ended[RANK as usize] {
            assert!(at > 2 && (0..3).all(|rank| said(rank) == "done"), "call {at}");
            return;
        }
        for rank in [0, 2] {
            assert_eq!(said(rank), "rank 1, group: rank 1 has died: its connection broke", "call {at}");
        }
    }
    panic!("more than {MOST_CALLS} calls of the group");
}
