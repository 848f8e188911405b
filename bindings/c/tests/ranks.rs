//! Calls over ranks as C makes them, with two ranks in threads of one process: an error on one reaches both.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::ffi::{CStr, CString};
use std::path::Path;
use std::ptr::{null, null_mut};

use fmha_c::{
    FMHA_BIAS_ELEMENTWISE, FMHA_CONTIGUOUS, FMHA_F32, FMHA_NCCL, FMHA_RUNS, FMHA_ZIG_ZAG, FmhaArgs,
    FmhaCaptured, FmhaCapturedArgs, FmhaCode, FmhaDistPlan, FmhaGradients, FmhaGroup, FmhaJoin, FmhaMasks,
    FmhaProblem, FmhaRanks, FmhaRun, FmhaStrides, fmha_dist_drop, fmha_dist_fail, fmha_dist_join,
    fmha_dist_leave, fmha_dist_plan, fmha_dist_plan_text, fmha_dist_rows, fmha_dist_run, fmha_last_error,
};

// SAFETY: numbers and pointers, of which all bits may be 0: `fmha.h` tells its caller to begin with that.
const NO_PROBLEM: FmhaProblem = unsafe { std::mem::zeroed() };
// SAFETY: numbers and pointers, of which all bits may be 0: `fmha.h` tells its caller to begin with that.
const NO_RANKS: FmhaRanks = unsafe { std::mem::zeroed() };
// SAFETY: numbers and pointers, of which all bits may be 0: `fmha.h` tells its caller to begin with that.
const NO_JOIN: FmhaJoin = unsafe { std::mem::zeroed() };
// SAFETY: numbers and pointers, of which all bits may be 0: `fmha.h` tells its caller to begin with that.
const NO_ARGS: FmhaArgs = unsafe { std::mem::zeroed() };
// SAFETY: numbers and pointers, of which all bits may be 0: `fmha.h` tells its caller to begin with that.
const NO_GRADIENTS: FmhaGradients = unsafe { std::mem::zeroed() };

const ROWS: i64 = 5;
const DIM: i64 = 8;

fn last_error() -> String {
    // SAFETY: it gives a C string of this thread.
    unsafe { CStr::from_ptr(fmha_last_error()) }.to_string_lossy().into_owned()
}

fn join(folder: &Path, rank: i64) -> *mut FmhaGroup {
    let address = CString::new(format!("file:{}", folder.join("rendezvous").display())).unwrap();
    let join = FmhaJoin {
        struct_bytes: size_of::<FmhaJoin>() as u64,
        rank,
        size: 2,
        address: address.as_ptr(),
        timeout_seconds: 20.0,
        ..NO_JOIN
    };
    let mut group = null_mut();
    // SAFETY: the struct is as the header says.
    assert_eq!(unsafe { fmha_dist_join(&raw const join, &raw mut group) }, 0, "{}", last_error());
    group
}

/// A change to one rank's call, which gets the rank's number.
type Change = fn(i64, &mut FmhaProblem, &mut FmhaArgs, &mut FmhaRanks);

/// Strides of a rank's rows.
const STRIDES: FmhaStrides =
    FmhaStrides { batch_stride: ROWS * DIM, seqlen_stride: DIM, head_stride: DIM, dim_stride: 1 };

fn problem(seqlen_q: i64) -> FmhaProblem {
    FmhaProblem {
        struct_bytes: size_of::<FmhaProblem>() as u64,
        batch: 1,
        seqlen_q,
        seqlen_k: 2 * ROWS,
        num_heads_q: 1,
        num_heads_kv: 1,
        head_dim_qk: DIM,
        head_dim_v: DIM,
        q: STRIDES,
        k: STRIDES,
        v: STRIDES,
        o: STRIDES,
        dtype_qk: FMHA_F32,
        dtype_v: FMHA_F32,
        dtype_o: FMHA_F32,
        ..NO_PROBLEM
    }
}

/// Runs a plan on two ranks, after a change to one rank's call, and returns each rank's result or error.
fn on_two_ranks(change: Change) -> [Result<Vec<f32>, String>; 2] {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let run = |rank: i64| {
        let group = join(folder, rank);
        let q = [0.5f32; (ROWS * DIM) as usize];
        let (mut k, mut v, mut o) = (q, q.map(|q| q + rank as f32), q);
        let mut problem = problem(2 * ROWS);
        let mut args = FmhaArgs {
            struct_bytes: size_of::<FmhaArgs>() as u64,
            q: q.as_ptr().cast(),
            k: k.as_mut_ptr().cast(),
            v: v.as_mut_ptr().cast(),
            o: o.as_mut_ptr().cast(),
            ..NO_ARGS
        };
        let mut ranks = FmhaRanks {
            struct_bytes: size_of::<FmhaRanks>() as u64,
            own_rows_q: ROWS,
            own_rows_k: ROWS,
            partition_q: FMHA_CONTIGUOUS,
            partition_k: FMHA_CONTIGUOUS,
            ..NO_RANKS
        };
        change(rank, &mut problem, &mut args, &mut ranks);
        let mut plan: *mut FmhaDistPlan = null_mut();
        // SAFETY: the structs are as the header says, or they are refused before a wrong field is used.
        unsafe {
            let (cpu, problem, ranks) = (c"cpu".as_ptr(), &raw const problem, &raw const ranks);
            let planned = fmha_dist_plan(cpu, problem, ranks, null(), group, &raw mut plan);
            let mut failed = planned != 0;
            if planned == 0 {
                assert!(CStr::from_ptr(fmha_dist_plan_text(plan)).to_string_lossy().contains("scheme"));
                failed = fmha_dist_run(plan, &raw const args) != 0;
            }
            let told = if failed { Err(last_error()) } else { Ok(o.to_vec()) };
            fmha_dist_drop(plan);
            fmha_dist_leave(group);
            told
        }
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| run(1));
        [run(0), other.join().unwrap()]
    })
}

#[test]
fn ranks_see_each_others_keys() {
    for told in on_two_ranks(|_, _, _, _| ()) {
        // Scores are equal, so O is the mean of 0.5 and 1.5.
        assert!(told.unwrap().iter().all(|o| (o - 1.0).abs() < 1e-5));
    }
    let whole = on_two_ranks(|_, _, _, ranks| {
        static RUNS: [FmhaRun; 2] =
            [FmhaRun { rank: 0, begin: 0, end: 5 }, FmhaRun { rank: 1, begin: 5, end: 10 }];
        (ranks.partition_q, ranks.runs_q, ranks.num_runs_q) = (FMHA_RUNS, RUNS.as_ptr(), 2);
        ranks.scheme = c"ring".as_ptr();
    });
    assert!(whole.into_iter().all(|told| told.unwrap().iter().all(|o| (o - 1.0).abs() < 1e-5)));
}

/// The whole's intervals, and a function of the whole's places with a captured number, hide keys of either rank.
#[test]
fn ranks_ask_masks_and_functions_of_the_whole() {
    // Each query sees keys 2 up to 6: three keys of rank 0 with values 0.5, and one key of rank 1 with value 1.5.
    static ENDPOINTS: [[i32; 2 * ROWS as usize]; 2] = [[2; 10], [6; 10]];
    for told in on_two_ranks(|_, problem, args, ranks| {
        // SAFETY: numbers, of which all bits may be 0.
        let none: FmhaMasks = unsafe { std::mem::zeroed() };
        let masks = FmhaMasks {
            struct_bytes: size_of::<FmhaMasks>() as u64,
            endpoints: 2,
            intervals_heads: 1,
            intervals: FmhaStrides { batch_stride: 0, seqlen_stride: 1, head_stride: 20, dim_stride: 10 },
            ..none
        };
        problem.masks = Box::leak(Box::new(masks));
        args.intervals = ENDPOINTS.as_ptr().cast();
        ranks.scheme = c"ring".as_ptr();
    }) {
        assert!(told.unwrap().iter().all(|o| (o - 0.75).abs() < 1e-5));
    }
    for told in on_two_ranks(|_, problem, args, ranks| {
        // SAFETY: numbers and pointers, of which all bits may be 0.
        let (captured, given): (FmhaCaptured, FmhaCapturedArgs) = unsafe { std::mem::zeroed() };
        // SAFETY: numbers and pointers, of which all bits may be 0.
        let none: FmhaCode = unsafe { std::mem::zeroed() };
        let captured = FmhaCaptured { name: c"last".as_ptr(), ..captured };
        let code = FmhaCode {
            struct_bytes: size_of::<FmhaCode>() as u64,
            mask: c"last: int; k >= 2 and k < last".as_ptr(),
            captured: Box::leak(Box::new(captured)),
            num_captured: 1,
            ..none
        };
        problem.code = Box::leak(Box::new(code));
        args.captured = Box::leak(Box::new(FmhaCapturedArgs { integer: 6, ..given }));
        ranks.scheme = c"gather".as_ptr();
    }) {
        assert!(told.unwrap().iter().all(|o| (o - 0.75).abs() < 1e-5));
    }
}

/// Rank 1 has keys and no query: tensors without elements are null there, also LSE, the bias and gradients.
#[test]
fn a_rank_without_queries_gives_null_where_it_has_nothing() {
    for scheme in [None, Some(c"gather"), Some(c"ring")] {
        for (bias, backward) in [(false, false), (true, false), (false, true), (true, true)] {
            let folder = tempfile::tempdir().unwrap();
            let run = |rank: i64| without_queries(folder.path(), rank, scheme, bias, backward);
            std::thread::scope(|scope| {
                let other = scope.spawn(|| run(1));
                let (own, other) = (run(0), other.join().unwrap());
                assert_eq!((&own, &other), (&Ok(()), &Ok(())), "bias {bias}, backward {backward}");
            });
        }
    }
}

/// Five queries of rank 0 over ten keys of equal scores, five of value 0.5 and five of value 1.5.
fn without_queries(
    folder: &Path,
    rank: i64,
    scheme: Option<&CStr>,
    has_bias: bool,
    backward: bool,
) -> Result<(), String> {
    let group = join(folder, rank);
    let has_rows = rank == 0;
    let mut rows = [0.5f32; (ROWS * DIM) as usize];
    let (mut k, mut v, mut o) = (rows, rows.map(|v| v + rank as f32), [1.0f32; (ROWS * DIM) as usize]);
    let mut lse = [0f32; ROWS as usize];
    let mut bias = [0f32; (ROWS * 2 * ROWS) as usize];
    let (mut dout, mut dq, mut dk, mut dv) = (rows, [9f32; 40], [9f32; 40], [9f32; 40]);
    let of_queries = |data: *mut f32| if has_rows { data.cast() } else { null_mut() };
    // A rank without queries says what the others say, or leaves it out.
    let says = has_rows || scheme.is_some();
    let mut problem = FmhaProblem { write_lse: says.into(), ..problem(ROWS) };
    let mut args = FmhaArgs {
        struct_bytes: size_of::<FmhaArgs>() as u64,
        q: of_queries(rows.as_mut_ptr()),
        k: k.as_mut_ptr().cast(),
        v: v.as_mut_ptr().cast(),
        o: of_queries(o.as_mut_ptr()),
        lse: of_queries(lse.as_mut_ptr()).cast(),
        ..NO_ARGS
    };
    if has_bias && says {
        problem.bias = FmhaStrides { seqlen_stride: 2 * ROWS, batch_stride: 0, head_stride: 0, ..STRIDES };
        (problem.bias_kind, problem.dtype_bias) = (FMHA_BIAS_ELEMENTWISE, FMHA_F32);
        args.bias = of_queries(bias.as_mut_ptr());
    }
    let runs = [FmhaRun { rank: 0, begin: 0, end: ROWS }];
    let ranks = FmhaRanks {
        struct_bytes: size_of::<FmhaRanks>() as u64,
        own_rows_q: if has_rows { ROWS } else { 0 },
        own_rows_k: ROWS,
        partition_q: FMHA_RUNS,
        runs_q: runs.as_ptr(),
        num_runs_q: 1,
        partition_k: FMHA_CONTIGUOUS,
        scheme: scheme.map_or(null(), CStr::as_ptr),
        ..NO_RANKS
    };
    let gradients = FmhaGradients {
        struct_bytes: size_of::<FmhaGradients>() as u64,
        dout: STRIDES,
        dq: STRIDES,
        dk: STRIDES,
        dv: STRIDES,
        dtype_grad: FMHA_F32,
        ..NO_GRADIENTS
    };
    // This is the LSE of ten equal scores.
    lse.fill(0.25 * DIM as f32 / (DIM as f32).sqrt() + 10f32.ln());
    if backward {
        problem.gradients = &raw const gradients;
        (args.dout, args.dq) = (of_queries(dout.as_mut_ptr()), of_queries(dq.as_mut_ptr()));
        (args.dk, args.dv) = (dk.as_mut_ptr().cast(), dv.as_mut_ptr().cast());
    }
    let mut plan = null_mut();
    // SAFETY: the structs are as the header says.
    unsafe {
        let (cpu, problem, ranks) = (c"cpu".as_ptr(), &raw const problem, &raw const ranks);
        let mut code = fmha_dist_plan(cpu, problem, ranks, null(), group, &raw mut plan);
        if code == 0 {
            code = fmha_dist_run(plan, &raw const args);
        }
        let told = if code == 0 { Ok(()) } else { Err(last_error()) };
        fmha_dist_drop(plan);
        fmha_dist_leave(group);
        told?;
    }
    if backward {
        // The gradient of each value is a tenth of the sum of five queries' dO.
        assert!(dv.iter().all(|dv| (dv - 0.25).abs() < 1e-5), "rank {rank}: {dv:?}");
    } else if has_rows {
        assert!(o.iter().all(|o| (o - 1.0).abs() < 1e-5), "{o:?}");
    }
    Ok(())
}

#[test]
fn what_is_wrong_on_one_rank_both_are_told_with_the_rank_and_the_field() {
    let cases: [(Change, &str, &str); 13] = [
        (|rank, _, _, ranks| ranks.own_rows_k += rank, "rank 1", "own_rows_k 6 is not the 5 rows"),
        (|rank, problem, _, _| problem.q.seqlen_stride += rank, "rank 1", "q.seqlen_stride 9 is not 8"),
        (
            |rank, problem, _, _| problem.mask = if rank == 1 { c"b".as_ptr() } else { null() },
            "rank 1",
            "mask",
        ),
        (|rank, problem, _, _| problem.page_size = 16 * rank, "rank 1", "kv_layout"),
        (
            |rank, problem, _, _| problem.packed_q = rank as i32,
            "rank 1",
            "cu_seqlens_q is null, but packed_q is 1",
        ),
        (|rank, _, args, _| args.struct_bytes -= 8 * rank as u64, "rank 1", "struct_bytes"),
        (|rank, _, args, _| args.v = if rank == 1 { null_mut() } else { args.v }, "rank 1", "v is null"),
        (|rank, _, args, _| args.dq = if rank == 1 { args.o } else { null_mut() }, "rank 1", "dq is given"),
        (|rank, _, args, _| args.total_q = 5 * rank, "rank 1", "total_q 5 goes with a plan of one device"),
        (
            |rank, _, args, _| args.seqused_k = if rank == 1 { args.v.cast() } else { null() },
            "rank 1",
            "seqused_k is given, but the problem is without it",
        ),
        (|_, _, _, ranks| ranks.scheme = c"star".as_ptr(), "rank ", "scheme `star` is none of"),
        (
            |rank, _, _, ranks| {
                if rank == 0 {
                    ranks.partition_q = 9;
                }
            },
            "rank 0",
            "partition_q 9 is not in",
        ),
        (
            |rank, _, _, ranks| {
                if rank == 0 {
                    ranks.partition_k = FMHA_ZIG_ZAG;
                    ranks.num_runs_k = 1;
                }
            },
            "rank 0",
            "0 runs",
        ),
    ];
    for (change, rank, words) in cases {
        let [first, second] = on_two_ranks(change).map(Result::unwrap_err);
        assert_eq!(first, second);
        assert!(first.contains(rank) && first.contains(words), "{rank}, {words}: {first}");
    }
}

#[test]
fn a_rank_that_gives_up_says_why_and_nobody_waits_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let group = join(folder, 1);
            // SAFETY: a group of ours and C strings.
            unsafe {
                fmha_dist_fail(group, c"arguments".as_ptr(), c"q is no tensor".as_ptr());
                fmha_dist_leave(group);
            }
        });
        let group = join(folder, 0);
        // SAFETY: null is refused by its name.
        unsafe {
            let mut plan = null_mut();
            let refused = fmha_dist_plan(null(), null(), null(), null(), group, &raw mut plan);
            // The first of the two errors reaches both ranks.
            assert!(
                refused != 0
                    && (last_error().contains("q is no tensor") || last_error().contains("problem is null"))
            );
            fmha_dist_leave(group);
        }
    });
}

/// Ranks with one secret each, and their errors.
fn meet(address: &CStr, secrets: [&CStr; 2]) -> [Result<(), String>; 2] {
    let meet = |rank: i64, secret: &CStr| {
        let join = FmhaJoin {
            struct_bytes: size_of::<FmhaJoin>() as u64,
            rank,
            size: 2,
            address: address.as_ptr(),
            secret: secret.as_ptr(),
            listen: c"127.0.0.1".as_ptr(),
            timeout_seconds: 1.0,
            ..NO_JOIN
        };
        let mut group = null_mut();
        // SAFETY: the struct is as the header says, and the group is ours.
        unsafe {
            let code = fmha_dist_join(&raw const join, &raw mut group);
            fmha_dist_leave(group);
            if code == 0 { Ok(()) } else { Err(last_error()) }
        }
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| meet(1, secrets[1]));
        [meet(0, secrets[0]), other.join().unwrap()]
    })
}

#[test]
fn ranks_meet_by_one_secret_and_by_no_two() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let address = CString::new(free.to_string()).unwrap();
    let (one, other) = (c"a secret of the job, A", c"a secret of the job, B");
    assert_eq!(meet(&address, [one, one]), [Ok(()), Ok(())]);
    let [root, member] = meet(&address, [one, other]).map(Result::unwrap_err);
    assert!(root.contains("rank 1, group: ") && root.contains("does not know the secret"), "{root}");
    assert!(member.contains("rank 0, secret: ") && member.contains("FMHA_DIST_SECRET"), "{member}");
}

#[test]
fn a_join_that_is_wrong_is_refused_by_its_field() {
    let good = FmhaJoin {
        struct_bytes: size_of::<FmhaJoin>() as u64,
        size: 1,
        address: c"127.0.0.1:0".as_ptr(),
        ..NO_JOIN
    };
    for (join, words) in [
        (FmhaJoin { struct_bytes: 8, ..good }, "struct_bytes 8"),
        (FmhaJoin { rank: -1, ..good }, "rank -1"),
        (FmhaJoin { rank: 3, ..good }, "rank 3 is not below"),
        (FmhaJoin { timeout_seconds: -1.0, ..good }, "timeout_seconds -1"),
        (FmhaJoin { timeout_seconds: f64::NAN, ..good }, "timeout_seconds NaN"),
        (FmhaJoin { space: 7, ..good }, "space 7"),
        (FmhaJoin { reserved: 7, ..good }, "reserved 7"),
        (FmhaJoin { nccl_library: c"x".as_ptr(), ..good }, "nccl_library"),
        (FmhaJoin { space: FMHA_NCCL, nccl_library: c"/no/such.so".as_ptr(), ..good }, "rank 0, nccl: "),
        (FmhaJoin { address: null(), ..good }, "address is null"),
        (FmhaJoin { secret: c"too short".as_ptr(), ..good }, "secret: the secret has 9 bytes"),
        (FmhaJoin { listen: c"eth0".as_ptr(), ..good }, "listen `eth0` is no address"),
        (
            FmhaJoin { address: c"0.0.0.0:0".as_ptr(), ..good },
            "rank 0, secret: 0.0.0.0:0 is not on the loopback",
        ),
    ] {
        let mut group = null_mut();
        // SAFETY: the struct's strings are C strings.
        assert_ne!(unsafe { fmha_dist_join(&raw const join, &raw mut group) }, 0, "{words}");
        assert!(group.is_null() && last_error().contains(words), "{words}: {}", last_error());
    }
    // SAFETY: null is refused, or taken.
    unsafe {
        assert_ne!(fmha_dist_join(null(), null_mut()), 0);
        assert_ne!(fmha_dist_run(null(), null()), 0);
        assert_ne!(fmha_dist_rows(FMHA_ZIG_ZAG, 10, 2, 0, null_mut(), null_mut()), 0);
        assert!(fmha_dist_plan_text(null()).is_null());
        fmha_dist_drop(null_mut());
        fmha_dist_leave(null_mut());
        fmha_dist_fail(null(), null(), null());
        let (mut runs, mut count) = ([FmhaRun { rank: 0, begin: 0, end: 0 }; 2], 0);
        assert_eq!(fmha_dist_rows(FMHA_ZIG_ZAG, 10, 2, 0, runs.as_mut_ptr(), &raw mut count), 0);
        assert_eq!(runs.map(|run| (run.begin, run.end)), [(0, 3), (8, 10)]);
        assert_ne!(fmha_dist_rows(FMHA_RUNS, 10, 2, 0, runs.as_mut_ptr(), &raw mut count), 0);
    }
}
