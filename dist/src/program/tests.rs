//! Dependencies of steps, and messages between ranks.

use fmha::{Backend, DType, Dims, FwdProblem, MaskSpec, PlanOptions};

use super::streams::{MOVING, SECOND, begins_with_the_run, is_one_behind_another, is_rewritten, turns};
use super::{Program, Step};
use crate::builder::MAX_PARTS;
use crate::partition::Partition;
use crate::problem::{Gradients, Problem, Whole};
use crate::scheme::Scheme;

/// Whether each step comes behind all before it with which it shares a buffer that one of them writes, by the streams'
/// order and by what it waits for.
fn is_ordered(program: &Program) {
    let turns = turns(program);
    let mut behind: Vec<Vec<bool>> = Vec::new();
    for (number, turn) in turns.iter().enumerate() {
        let mut own = vec![false; number];
        let same = (0..number).rev().find(|&before| turns[before].stream == turn.stream);
        for before in turn.after.iter().copied().chain(same) {
            own[before] = true;
            for (at, is) in behind[before].iter().enumerate() {
                own[at] |= is;
            }
        }
        behind.push(own);
    }
    assert!(behind.pop().unwrap().into_iter().all(|is| is), "the run's end is not behind all steps");
    for (number, step) in program.steps.iter().enumerate() {
        let (reads, writes) = step.touches();
        for (before, earlier) in program.steps[..number].iter().enumerate() {
            let (read, wrote) = earlier.touches();
            let shared = reads.iter().any(|buf| wrote.contains(buf))
                || writes.iter().any(|buf| read.contains(buf))
                || writes.iter().filter(is_rewritten).any(|buf| wrote.contains(buf));
            assert!(!shared || behind[number][before], "step {number} may run before {before}");
        }
    }
}

#[test]
fn steps_that_share_a_buffer_are_in_order_on_streams_of_their_own() {
    let dims = Dims::batch(1).seqlens(64, 64).heads(16, 8).head_dim(16);
    let whole = FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
    let problem = Problem::new(whole, Partition::zig_zag(64, 4));
    let (device, options) = (Backend::Cpu.open().unwrap(), PlanOptions::default());
    for scheme in [Scheme::Gather, Scheme::Ring, Scheme::Mixed, Scheme::Ulysses] {
        for rank in 0..4 {
            let whole = Whole::new(&problem, rank, 4).unwrap().on_hosts(Some(2));
            // Heads of Ulysses come in groups, or at once.
            for head_groups in [1, 2] {
                let whole = Whole { head_groups, ..whole.clone() };
                let mut forward = scheme.forward(&whole, &device, &options).unwrap();
                let in_groups = scheme == Scheme::Ulysses && head_groups > 1;
                assert_eq!(forward.takes_turns, scheme == Scheme::Gather || in_groups);
                is_ordered(&forward);
                // Rows that go first are in memory before the run, on the caller's stream.
                assert!(begins_with_the_run(&turns(&forward), MOVING), "{scheme}");
                forward.takes_turns = true;
                let second = turns(&forward).iter().filter(|turn| turn.stream == SECOND).count();
                assert!(
                    second > 0 || scheme == Scheme::Ulysses && !in_groups,
                    "{scheme}: {second} launches there"
                );
                is_ordered(&forward);
            }
            let wanted = Gradients { dtype: DType::Bf16, dsink: false };
            is_ordered(&scheme.backward(&whole, wanted, &device, &options).unwrap());
        }
    }
}

/// Each part of a decoding step waits for the part before it, so the step uses the caller's stream alone, and
/// no event. The kernels of a rank with two runs of keys do not wait for each other.
#[test]
fn a_step_of_decoding_is_one_kernel_one_exchange_and_one_merge_on_one_stream() {
    let dims = Dims::batch(2).seqlens(3, 64).heads(8, 2).head_dims(16, 24);
    let whole = FwdProblem::batch(DType::Bf16, dims).write_lse(true);
    let keys = Partition::new(64, vec![vec![0..9], vec![], vec![9..20, 40..64], vec![20..40]]).unwrap();
    let problem = Problem::new(whole, Partition::replicated(3, 4)).keys(keys);
    let (device, options) = (Backend::Cpu.open().unwrap(), PlanOptions::default());
    let part = 2 * 3 * 8 * 25 * 4;
    for rank in 0..4 {
        let whole = Whole::new(&problem, rank, 4).unwrap();
        let program = Scheme::Decode.forward(&whole, &device, &options).unwrap();
        is_ordered(&program);
        assert_eq!(program.most_rows(), 0, "{rank}");
        // O and LSE of all queries, each to a multiple of 256 bytes.
        let sent = 3 * (part as u64).next_multiple_of(256);
        assert_eq!(program.bytes_sent(rank), sent, "{rank}");
        let kinds: Vec<&str> = program
            .steps
            .iter()
            .map(|step| match step {
                Step::Forward { .. } => "forward",
                Step::AllGather { .. } => "all-gather",
                Step::Combine { .. } => "combine",
                _ => "another",
            })
            .collect();
        if rank == 2 {
            assert_eq!(kinds, ["forward", "forward", "combine", "all-gather", "combine"]);
        } else {
            assert_eq!(kinds, ["forward", "all-gather", "combine"], "{rank}");
        }
        assert_eq!(is_one_behind_another(&program), rank != 2);
        // The exchange waits for a step on the caller's stream, if there are streams, and not for the
        // beginning of the run.
        assert!(!begins_with_the_run(&turns(&program), MOVING));
    }
}

/// Messages that ranks send and expect, one for each row, as in the GPUs' group.
#[test]
fn ranks_send_the_messages_that_the_others_expect_and_not_one_for_each_token() {
    let device = Backend::Cpu.open().unwrap();
    let options = PlanOptions::default();
    let dims = |batch, tokens| Dims::batch(batch).seqlens(tokens, tokens).heads(8, 4).head_dim(16);
    let offsets = vec![0, 70, 70, 101, 256];
    let packed = FwdProblem::group(DType::Bf16, dims(4, 155)).mask(MaskSpec::CAUSAL).write_lse(true);
    let problem = |dtype, batch, tokens: u32| {
        let whole = FwdProblem::batch(dtype, dims(batch, tokens)).dtype_o(DType::Bf16);
        let whole = whole.mask(MaskSpec::CAUSAL).write_lse(true);
        Problem::new(whole, Partition::zig_zag(tokens, 4))
    };
    let cases = [
        (problem(DType::Bf16, 1, 1024), 1),
        (problem(DType::Bf16, 2, 512), 1),
        (problem(DType::Bf16, 40, 32), 32),
        (problem(DType::E4m3Fn, 2, 256), 256),
        (Problem::new(packed, Partition::zig_zag(256, 4)).packed(offsets.clone(), offsets), 8),
    ];
    for (number, (problem, rows_each)) in cases.iter().enumerate() {
        for scheme in [Scheme::Gather, Scheme::Ring, Scheme::Mixed, Scheme::Ulysses] {
            for backward in [false, true] {
                if backward && problem.whole.dtypes.qk.is_fp8() {
                    continue;
                }
                let programs: Vec<_> = (0..4)
                    .map(|rank| {
                        let whole = Whole::new(problem, rank, 4).unwrap().on_hosts(Some(2));
                        let wanted = Gradients { dtype: DType::Bf16, dsink: false };
                        match backward {
                            false => scheme.forward(&whole, &device, &options),
                            true => scheme.backward(&whole, wanted, &device, &options),
                        }
                        .unwrap()
                    })
                    .collect();
                let what = format!("case {number}, {scheme}, backward: {backward}");
                // Messages by rank and peer, of all exchanges.
                let messages = |rank: u32, peer: u32, sent: bool| -> Vec<u64> {
                    let steps = programs[rank as usize].steps.iter();
                    let exchanges = steps.filter_map(|step| match step {
                        Step::Exchange { exchange, .. } => Some(exchange),
                        _ => None,
                    });
                    let parcels = exchanges.flat_map(|all| if sent { &all.sends } else { &all.receives });
                    let to = parcels.filter(|parcel| parcel.peer == peer);
                    to.flat_map(|parcel| (0..parcel.block.rows).map(|_| parcel.block.row_bytes)).collect()
                };
                for (rank, peer) in (0..4).flat_map(|rank| (0..4).map(move |peer| (rank, peer))) {
                    let sent = messages(rank, peer, true);
                    assert_eq!(sent, messages(peer, rank, false), "{what}: {rank} to {peer}");
                }
                let most = programs.iter().map(Program::most_rows).max().unwrap();
                assert!(most < 512 * rows_each, "{what}: {most} rows");
            }
        }
    }
}

/// Most parts of a merge: as many as a GPU's kernel takes. dK and dV have one for each rank, the gradient of
/// the sinks one for each sequence.
#[test]
fn no_merge_has_more_parts_than_every_device_takes() {
    assert_eq!(MAX_PARTS as usize, fmha_core::abi::MAX_PARTS);
    let (device, options) = (Backend::Cpu.open().unwrap(), PlanOptions::default());
    let dims = |batch, tokens| Dims::batch(batch).seqlens(tokens, tokens).heads(2, 2).head_dim(8);
    let many_ranks =
        Problem::new(FwdProblem::batch(DType::Bf16, dims(1, 200)), Partition::contiguous(200, 200));
    let offsets: Vec<u32> = (0..=150).map(|at| 2 * at).collect();
    let packed = FwdProblem::group(DType::Bf16, dims(150, 2)).sink(true);
    let packed = Problem::new(packed, Partition::contiguous(300, 2)).packed(offsets.clone(), offsets);
    for (problem, ranks, scheme) in [
        (&many_ranks, 200, Scheme::Gather),
        (&packed, 2, Scheme::Gather),
        (&packed, 2, Scheme::Ring),
        (&packed, 2, Scheme::Ulysses),
    ] {
        let whole = Whole::new(problem, 1, ranks).unwrap();
        let wanted = Gradients { dtype: DType::Bf16, dsink: whole.fwd.score.sink };
        let program = scheme.backward(&whole, wanted, &device, &options).unwrap();
        let parts = |step: &Step| match step {
            Step::Combine { parts, .. } => parts.len(),
            Step::Sum { terms, .. } => terms.len(),
            _ => 0,
        };
        let most = program.steps.iter().map(parts).max().unwrap();
        assert!(most <= MAX_PARTS as usize, "{scheme}: {most} parts");
        is_ordered(&program);
    }
}
