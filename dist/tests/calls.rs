//! Ranks that begin two calls of equal sizes get an error that names the rank at fault, before anything is
//! computed, moved or written: in threads and in processes over TCP, in each scheme.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use fmha::{
    Bias, BwdArgs, DType, DevSlice, DevSliceMut, Device, Dims, DropoutSeed, FwdArgs, FwdProblem, ScoreArgs,
};
use fmha_dist::{
    BwdPlan, Error, FwdPlan, Group, Links, Options, Partition, Problem, Rendezvous, Scheme, connect,
};

const RANKS: u32 = 4;
const ROWS: u32 = 48;
const HEADS: usize = 4;
const DIM: usize = 16;
const UNTOUCHED: u8 = 0xa5;

/// Ranks that begin the second call where the others begin the first one.
const OTHERWISE: [&[u32]; 2] = [&[2], &[0, 1, 3]];

#[derive(Clone)]
struct Call {
    problem: Problem,
    backward: bool,
    seed: u64,
    /// Value of every sink and slope, where the call has some.
    each: f32,
}

/// Two calls whose tensors have equal sizes in bytes, and the field in which they differ.
struct Pair {
    name: String,
    scheme: Scheme,
    calls: [Call; 2],
    field: &'static str,
}

fn pairs() -> Vec<Pair> {
    let of = |queries: u32, mask: &str| {
        let dims =
            Dims::batch(1).seqlens(queries, ROWS).heads(HEADS as u32, HEADS as u32).head_dim(DIM as u32);
        FwdProblem::batch(DType::Bf16, dims).mask(mask.parse().unwrap()).write_lse(true)
    };
    let call = |whole: FwdProblem, backward, seed| {
        let problem = Problem::new(whole, Partition::zig_zag(ROWS, RANKS));
        Call { problem, backward, seed, each: 0.0 }
    };
    let mut all = Vec::new();
    for scheme in [Scheme::Gather, Scheme::Ring, Scheme::Mixed, Scheme::Ulysses] {
        let [causal, full] = ["b", "0"].map(|mask| of(ROWS, mask));
        for backward in [false, true] {
            let calls = [&causal, &full].map(|whole| call(whole.clone(), backward, 0));
            let name = format!("{scheme}, backward: {backward}");
            all.push(Pair { name, scheme, calls, field: "mask" });
        }
        let calls = [false, true].map(|backward| call(causal.clone(), backward, 0));
        all.push(Pair { name: format!("{scheme}, forward or backward"), scheme, calls, field: "gradients" });
        let calls = [5, 6].map(|seed| call(causal.clone().p_drop(0.25), false, seed));
        all.push(Pair { name: format!("{scheme}, dropout"), scheme, calls, field: "dropout" });
    }
    let calls = [None, Some(0.5)].map(|scale| {
        let mut whole = of(2, "b");
        whole.score.softmax_scale = scale;
        let problem = Problem::new(whole, Partition::replicated(2, RANKS));
        Call {
            problem: problem.keys(Partition::contiguous(ROWS, RANKS)),
            backward: false,
            seed: 0,
            each: 0.0,
        }
    });
    let scheme = Scheme::Decode;
    all.push(Pair { name: scheme.to_string(), scheme, calls, field: "softmax_scale" });
    let slopes = of(ROWS, "b").bias(Bias::Alibi { per_batch: false });
    for (whole, scheme, field) in
        [(of(ROWS, "b").sink(true), Scheme::Ring, "sink"), (slopes, Scheme::Gather, "alibi_slopes")]
    {
        let calls = [0.5, 0.75].map(|each| Call { each, ..call(whole.clone(), false, 0) });
        all.push(Pair { name: scheme.to_string(), scheme, calls, field });
    }
    all
}

enum Plan {
    Forward(FwdPlan),
    Backward(BwdPlan),
}

impl Plan {
    fn new(call: &Call, scheme: Scheme, group: Arc<dyn Group>, device: &Device) -> Result<Self, Error> {
        let links: Links = "ranks_per_host = 2".parse().unwrap();
        let options = Options::default().scheme(scheme).links(links);
        let problem = &call.problem;
        Ok(match call.backward {
            false => Self::Forward(FwdPlan::new(problem, group, device, &options)?),
            true => Self::Backward(BwdPlan::new(problem, (DType::Bf16, false), group, device, &options)?),
        })
    }

    /// Runs a call and returns its error, and whether it wrote anything.
    fn run(&mut self, call: &Call, rank: u32, device: &Device) -> (Result<(), Error>, bool) {
        let rows = |partition: &Partition| partition.rows_of(rank) as usize * HEADS;
        let (queries, keys) = (rows(&call.problem.q), rows(&call.problem.k));
        let [q, o, dout] = [(); 3].map(|()| vec![0u8; queries * DIM * 2]);
        let [k, v] = [(); 2].map(|()| vec![0u8; keys * DIM * 2]);
        let lse = vec![0u8; queries * 4];
        let read = |bytes| DevSlice::host::<u8>(bytes);
        let fresh = |like: &[u8]| vec![UNTOUCHED; like.len()];
        let (of_each, modifiers) = ([call.each; HEADS], call.problem.whole.score);
        let each = |wanted: bool| wanted.then(|| DevSlice::host(&of_each));
        let score = ScoreArgs::default()
            .dropout(DropoutSeed { seed: call.seed, offset: 0 })
            .sink(each(modifiers.sink))
            .alibi_slopes(each(matches!(modifiers.bias, Bias::Alibi { .. })));
        let stream = device.default_stream();
        let (ran, written) = match self {
            Self::Forward(plan) => {
                let mut written = [fresh(&o), fresh(&lse)];
                let [to_o, to_lse] = written.each_mut().map(|bytes| DevSliceMut::host(&mut bytes[..]));
                let args = FwdArgs::new(read(&q), read(&k), read(&v), to_o).lse(to_lse).score(score);
                (plan.run(&mut { args }, &stream), written.to_vec())
            }
            Self::Backward(plan) => {
                let mut written = [fresh(&q), fresh(&k), fresh(&v)];
                let grads = written.each_mut().map(|bytes| DevSliceMut::host(&mut bytes[..]));
                let inputs = ([read(&q), read(&k), read(&v)], [read(&o), read(&lse), read(&dout)]);
                let args = BwdArgs::new(inputs.0, inputs.1, grads).score(score);
                (plan.run(&mut { args }, &stream), written.to_vec())
            }
        };
        (ran, written.iter().flatten().any(|&byte| byte != UNTOUCHED))
    }
}

/// Errors of a rank for each pair of calls, planned before or as they are called, each pair in a group of its
/// own.
fn told(rank: u32, group: impl Fn(usize) -> Arc<dyn Group>) -> Vec<String> {
    let (device, mut told) = (support::device(), Vec::new());
    for Pair { name, scheme, calls, field } in pairs() {
        for otherwise in OTHERWISE {
            let own = usize::from(otherwise.contains(&rank));
            // The ranks that are at fault begin what they began before, or the others do.
            for order in [[0, 1], [1, 0]] {
                let group = group(told.len());
                let plan = |call| Plan::new(call, scheme, group.clone(), &device).unwrap();
                let mut plans = calls.each_ref().map(plan);
                for of in order {
                    let (ran, has_written) = plans[of].run(&calls[of], rank, &device);
                    assert_eq!((ran, has_written), (Ok(()), true), "{name}");
                }
                let (ran, has_written) = plans[own].run(&calls[own], rank, &device);
                let heard = ran.expect_err(&name);
                told.push(format!(
                    "{name}, {otherwise:?}, {order:?}, {field}: {heard}; wrote: {has_written}"
                ));
            }
            let group = group(told.len());
            // Seeds are no plan's.
            let (heard, has_written) = match Plan::new(&calls[own], scheme, group.clone(), &device) {
                Ok(mut plan) => plan.run(&calls[own], rank, &device),
                Err(error) => (Err(error), false),
            };
            let heard = heard.expect_err(&name);
            told.push(format!("{name}, {otherwise:?}, eager, {field}: {heard}; wrote: {has_written}"));
        }
    }
    told
}

fn of_threads() -> Vec<Vec<String>> {
    let groups: Vec<Vec<Arc<dyn Group>>> = {
        let scenes = pairs().len() * OTHERWISE.len() * 3;
        let all = (0..scenes).map(|_| fmha_dist::threads(RANKS, support::TIMEOUT));
        all.map(|ranks| ranks.into_iter().map(|host| Arc::new(host) as Arc<dyn Group>).collect()).collect()
    };
    let groups = &groups;
    std::thread::scope(|scope| {
        let of = |rank: u32| scope.spawn(move || told(rank, |scene| groups[scene][rank as usize].clone()));
        let all: Vec<_> = (0..RANKS).map(of).collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_call_of_equal_sizes_that_is_another_one_is_named_on_every_rank_and_nothing_is_written() {
    let all = of_threads();
    let expected = pairs().len() * OTHERWISE.len() * 3;
    for (rank, told) in all.iter().enumerate() {
        assert_eq!(told.len(), expected);
        for line in told {
            let (scene, heard) = line.split_once(": rank ").unwrap_or_else(|| panic!("rank {rank}: {line}"));
            let field = scene.rsplit(", ").next().unwrap();
            let names = format!("2, {field}: rank 2 says {field} ");
            assert!(heard.starts_with(&names) && heard.ends_with("; wrote: false"), "rank {rank}: {line}");
        }
        assert_eq!(*told, all[0], "rank {rank} hears something else");
    }
}

/// The child's half of the test below; it does nothing unless it is started as a child.
#[test]
fn a_rank_that_is_a_process() {
    let Some((folder, rank, size)) = support::as_process() else { return };
    let group = |scene: usize| {
        let rendezvous = Rendezvous::file(folder.join(format!("rendezvous.{scene}")), rank, size);
        Arc::new(connect(&rendezvous, Duration::from_secs(60)).unwrap()) as Arc<dyn Group>
    };
    std::fs::write(folder.join(format!("{rank}.txt")), told(rank, group).join("\n")).unwrap();
}

#[test]
fn processes_hear_what_threads_do() {
    let folder = tempfile::tempdir().unwrap();
    let all: Vec<_> = (0..RANKS)
        .map(|rank| support::process("a_rank_that_is_a_process", folder.path(), rank, RANKS).spawn().unwrap())
        .collect();
    let expected = of_threads();
    for (rank, mut child) in all.into_iter().enumerate() {
        assert!(child.wait().unwrap().success(), "rank {rank}");
        let said = std::fs::read_to_string(folder.path().join(format!("{rank}.txt"))).unwrap();
        assert_eq!(said, expected[rank].join("\n"), "rank {rank}");
    }
}
