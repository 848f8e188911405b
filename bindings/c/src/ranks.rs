//! Attention over ranks, behind the C ABI: a group, a plan that all of its ranks make together, its runs.

mod local;

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fmha::{BwdArgs, CapturedGrad, DType, Device, Error, FwdArgs, FwdProblem, ProblemError, Stream, Totals};
use fmha_dist::{BwdPlan, FwdPlan, Group, MAX_RANKS, Nccl, Partition, Rendezvous};

use crate::code::Captures;
use crate::guard_text;
use crate::host::{self, goes_with, none, size, struct_bytes, text};
use crate::plan::{Memory, absent, present};
use crate::structs::{FmhaArgs, FmhaOptions, FmhaProblem};
use local::{Local, built};

/// Ranks of processes that compute on host memory.
pub const FMHA_HOST: i32 = 0;
/// Ranks that are GPUs, over NCCL or RCCL.
pub const FMHA_NCCL: i32 = 1;

/// One run of rows for each rank, in the order of the ranks, lengths that differ by 1 at most.
pub const FMHA_CONTIGUOUS: i32 = 0;
/// The rows are cut into twice as many runs as there are ranks. Rank r has the r-th run and the r-th from the end:
/// equal work under a causal mask.
pub const FMHA_ZIG_ZAG: i32 = 1;
/// Every rank has all rows: the queries of a step of decoding.
pub const FMHA_REPLICATED: i32 = 2;
/// Each rank has the runs of rows that the call lists.
pub const FMHA_RUNS: i32 = 3;

/// How a rank finds the others. Set everything to 0 first, then what is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaJoin {
    /// sizeof(FmhaJoin).
    pub struct_bytes: u64,
    /// Which rank this one is, from 0; 0 without an address.
    pub rank: i64,
    /// Number of ranks; 0 without an address.
    pub size: i64,
    /// Host memory: "host:port", where rank 0 listens; or "file:PATH", a file that does not exist yet and that
    /// every rank of this host sees and its owner alone reads; null: RANK, WORLD_SIZE, MASTER_ADDR and the port
    /// above MASTER_PORT, as torchrun sets them.
    pub address: *const c_char,
    /// Seconds that a rank may be late, when it joins and at every later step; 0: 60.
    pub timeout_seconds: f64,
    /// FMHA_NCCL: a live ncclComm_t of the same ranks, which outlives the group and which nobody uses at the
    /// same time; it stays the caller's, and is aborted when a rank has failed. Null: one of the group's own,
    /// on the device that is current on this thread.
    pub nccl_comm: *mut c_void,
    /// Host memory: the path of NCCL or RCCL; null: where the system finds it.
    pub nccl_library: *const c_char,
    /// Host memory: what all ranks of the job know and nobody else does, at least 16 bytes; null: that of the
    /// environment, FMHA_DIST_SECRET. Without one rank 0 listens on the loopback alone, or meets by a file.
    pub secret: *const c_char,
    /// Host memory: the address of this host, without a port, at which this rank listens; null: that of the
    /// environment, FMHA_DIST_LISTEN, or else the address by which it reaches rank 0.
    pub listen: *const c_char,
    /// FMHA_HOST or FMHA_NCCL.
    pub space: i32,
    /// 0.
    pub reserved: i32,
}

/// A stretch of rows that a rank has.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaRun {
    /// Which rank.
    pub rank: i64,
    /// The first row.
    pub begin: i64,
    /// One past the last.
    pub end: i64,
}

/// Which rows of the whole each rank has, the same on every rank but for own_rows_q and own_rows_k. Rows are
/// positions of every sequence, or rows of a packed tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaRanks {
    /// sizeof(FmhaRanks).
    pub struct_bytes: u64,
    /// Number of rows of this rank's Q and O, under the partition partition_q.
    pub own_rows_q: i64,
    /// Number of rows of this rank's K and V, under the partition partition_k.
    pub own_rows_k: i64,
    /// Host memory: with FMHA_RUNS the runs of queries of each rank, ascending for a rank; else null.
    pub runs_q: *const FmhaRun,
    /// Number of runs_q; else 0.
    pub num_runs_q: i64,
    /// Host memory: with FMHA_RUNS the runs of keys of each rank, ascending for a rank; else null.
    pub runs_k: *const FmhaRun,
    /// Number of runs_k; else 0.
    pub num_runs_k: i64,
    /// Host memory: with packed_q the first row of each sequence of the whole, i32 [batch + 1]; else null.
    pub cu_seqlens_q: *const i32,
    /// Host memory: with packed_k the first row of K and V of each sequence of the whole, i32 [batch + 1]; else
    /// null.
    pub cu_seqlens_k: *const i32,
    /// Host memory: "gather", "ring", "mixed", "ulysses" or "decode"; null: what the model of kernels and links finds
    /// fastest.
    pub scheme: *const c_char,
    /// Host memory: what kernels and links do, lines as `fmha explain --links` reads them; null: the model's
    /// own figures.
    pub links: *const c_char,
    /// Distribution of queries over ranks: FMHA_CONTIGUOUS, ...
    pub partition_q: i32,
    /// Distribution of keys over ranks: FMHA_CONTIGUOUS, ...
    pub partition_k: i32,
}

/// Ranks that compute together.
pub struct FmhaGroup {
    group: Arc<dyn Group>,
}

/// The plan of a call over ranks, as one rank holds it.
pub struct FmhaDistPlan {
    ready: Mutex<Ready>,
    group: Arc<dyn Group>,
    device: Device,
    /// Type of the gradients, and whether the gradient of the sinks is wanted.
    gradients: Option<(DType, bool)>,
    /// The problem of one device that has only this rank's queries. The sizes of the score's operands are read from
    /// it.
    own: FwdProblem,
    /// The problem of one device, which says how large masks as data and captured tensors are.
    whole: FwdProblem,
    dcaptured: Vec<CapturedGrad>,
    captures: Captures,
    /// Rows of packed queries of the whole.
    totals: Totals,
    /// Bytes of Q, K, V and O here, of LSE, and of dQ, dK and dV.
    bytes: Sizes,
    text: CString,
}

enum Ready {
    Forward(FwdPlan),
    Backward(BwdPlan),
}

#[derive(Clone, Copy)]
struct Sizes {
    qkv: [u64; 3],
    o: u64,
    lse: u64,
    grads: [u64; 3],
}

/// Result with the text of the ranks' own errors, or of the library's.
type Text<T> = Result<T, String>;

fn refused(field: &'static str, text: String) -> Error {
    ProblemError::new(field, text).into()
}

/// Joins a group, and waits for all of its ranks. Every rank then makes the same calls in the same order: what
/// goes wrong on one is an error on all, which names the rank and the field, and after one no call of the group
/// succeeds. Returns 0 and sets `*group`, or not 0 (see `fmha_last_error`) with `*group` untouched.
///
/// # Safety
/// `join` is null or as the struct says; `group` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_dist_join(join: *const FmhaJoin, group: *mut *mut FmhaGroup) -> c_int {
    guard_text(|| {
        let null = |field: &str| format!("{field} is null");
        // SAFETY: the caller keeps the contract of `fmha_dist_join`.
        let join = unsafe { join.as_ref() }.ok_or_else(|| null("join"))?;
        if group.is_null() {
            return Err(null("group"));
        }
        // SAFETY: the caller keeps the contract of `fmha_dist_join`.
        let joined = unsafe { joined(join)? };
        // SAFETY: not null, and the caller keeps the rest of the contract of `fmha_dist_join`.
        unsafe { *group = Box::into_raw(Box::new(FmhaGroup { group: joined })) };
        Ok(())
    })
}

/// # Safety
/// As [`fmha_dist_join`].
unsafe fn joined(join: &FmhaJoin) -> Text<Arc<dyn Group>> {
    let said = |error: ProblemError| Error::from(error).to_string();
    struct_bytes::<FmhaJoin>(join.struct_bytes).map_err(said)?;
    let (rank, ranks) = (size("rank", join.rank).map_err(said)?, size("size", join.size).map_err(said)?);
    // SAFETY: the caller promised C strings.
    let (address, library, secret, listen) = unsafe {
        (
            text("address", join.address).map_err(said)?,
            text("nccl_library", join.nccl_library).map_err(said)?.map(Path::new),
            host::c_str(join.secret),
            text("listen", join.listen).map_err(said)?,
        )
    };
    let listen = listen.map(|listen| {
        listen.parse().map_err(|error| {
            said(ProblemError::new("listen", format!("listen `{listen}` is no address of a host: {error}")))
        })
    });
    let listen = listen.transpose()?;
    let seconds = join.timeout_seconds;
    if !(0.0..=1e6).contains(&seconds) {
        return Err(said(ProblemError::new(
            "timeout_seconds",
            format!("timeout_seconds {seconds} is not in 0..=1e6"),
        )));
    }
    let nccl = match (join.space, join.reserved) {
        (FMHA_HOST, 0) => false,
        (FMHA_NCCL, 0) => true,
        (space, reserved) => {
            let text = format!(
                "space {space} is neither 0 (FMHA_HOST) nor 1 (FMHA_NCCL), or reserved {reserved} not 0"
            );
            return Err(said(ProblemError::new("space", text)));
        }
    };
    if !nccl && (!join.nccl_comm.is_null() || library.is_some()) {
        let text = "nccl_comm or nccl_library is given, but space is 0 (FMHA_HOST)";
        return Err(said(ProblemError::new("nccl_comm", text)));
    }
    let timeout = Duration::from_secs_f64(if seconds == 0.0 { 60.0 } else { seconds });
    let mut meeting = match address {
        None if (rank, ranks) != (0, 0) => {
            let text = format!("address is null, but rank {rank} of size {ranks} are given");
            return Err(said(ProblemError::new("address", text)));
        }
        None => Rendezvous::from_env().map_err(|error| error.to_string())?,
        Some(address) => match address.strip_prefix("file:") {
            Some(path) => Rendezvous::file(path, rank, ranks),
            None => Rendezvous::at(address, rank, ranks),
        },
    };
    if let Some(secret) = secret {
        meeting = meeting.secret(secret.to_bytes());
    }
    if let Some(address) = listen {
        meeting = meeting.listen(address);
    }
    let meeting = meeting.with_env().map_err(|error| error.to_string())?;
    let control = fmha_dist::connect(&meeting, timeout).map_err(|error| error.to_string())?;
    if !nccl {
        return Ok(Arc::new(control));
    }
    let group = if join.nccl_comm.is_null() {
        Nccl::new(control, library)
    } else {
        // SAFETY: the caller promised such a communicator.
        unsafe { Nccl::from_raw(control, library, join.nccl_comm) }
    };
    Ok(Arc::new(group.map_err(|error| error.to_string())?))
}

/// Leaves a group. The other ranks' calls that are still to come fail; plans of this rank keep it until they
/// are dropped. Null is taken.
///
/// # Safety
/// `group` is null or from `fmha_dist_join`, and not left before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_dist_leave(group: *mut FmhaGroup) {
    guard_text(|| {
        if !group.is_null() {
            // SAFETY: the caller promised that it is ours, once.
            drop(unsafe { Box::from_raw(group) });
        }
        Ok(())
    });
}

/// Tells the other ranks that this one cannot go on: their calls fail by this rank, `field` and `text` at once,
/// and need not wait for it until it is late. No call of the group succeeds any more. Null is taken.
///
/// # Safety
/// `group` is null or from `fmha_dist_join`; `field` and `text` are null or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_dist_fail(group: *const FmhaGroup, field: *const c_char, text: *const c_char) {
    guard_text(|| {
        // SAFETY: the caller keeps the contract of `fmha_dist_fail`.
        if let Some(FmhaGroup { group }) = unsafe { group.as_ref() } {
            // SAFETY: the caller keeps the contract of `fmha_dist_fail`.
            let words = unsafe { [host::text("field", field), host::text("text", text)] };
            let [field, text] = words.map(|word| word.ok().flatten().unwrap_or_default().to_owned());
            group.fail(fmha_dist::Error::new(group.rank(), field, text));
        }
        Ok(())
    });
}

/// The rows of `rank` where `rows` are cut for `size` ranks by FMHA_CONTIGUOUS, FMHA_ZIG_ZAG or
/// FMHA_REPLICATED: at most two runs, their number in `*num_runs`.
///
/// # Safety
/// `runs` is null or room for two; `num_runs` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_dist_rows(
    partition: i32,
    rows: i64,
    size: i64,
    rank: i64,
    runs: *mut FmhaRun,
    num_runs: *mut i64,
) -> c_int {
    guard_text(|| {
        if runs.is_null() || num_runs.is_null() {
            return Err("runs or num_runs is null".to_owned());
        }
        let cut = || -> crate::Result<(Partition, u32)> {
            let (rows, ranks) = (host::size("rows", rows)?, host::size("size", size)?);
            if ranks > MAX_RANKS {
                return Err(refused("size", format!("size {ranks} is more than the {MAX_RANKS} of a group")));
            }
            let at = host::size("rank", rank)?;
            if at >= ranks {
                return Err(refused("rank", format!("rank {at} is not below size {ranks}")));
            }
            Ok((built("partition", partition, rows, ranks)?, at))
        };
        let (partition, at) = cut().map_err(|error| error.to_string())?;
        let found = partition.runs(at).iter().filter(|run| !run.is_empty()).take(2);
        let mut count = 0;
        for run in found {
            // SAFETY: room for two.
            unsafe { *runs.add(count) = FmhaRun { rank, begin: run.start.into(), end: run.end.into() } };
            count += 1;
        }
        // SAFETY: not null, and the caller keeps the rest of the contract of `fmha_dist_rows`.
        unsafe { *num_runs = count as i64 };
        Ok(())
    })
}

/// Plans a call over the ranks of `group`, which all plan it together. `problem` has the sizes of the whole: those
/// of one device that had all rows; its strides are those of this rank's rows, contiguous: Q and O [batch, own rows,
/// num_heads_q, head_dim], K and V likewise; packed, the batch is no axis. A bias is [.., own queries, all keys].
/// Masks as data, functions and what they capture are those of the whole, on every rank, and so are the gradients of
/// captured tensors: the same bits on every rank.
/// A rank without queries says write_lse and the bias as the other ranks do, or leaves them out.
/// Paged, appended and used lengths, gradients of LSE and of a bias are refused. The plan has scratch of its own.
/// Returns 0 and sets `*plan`, or not 0 (see `fmha_last_error`), on every rank.
///
/// # Safety
/// As `fmha_plan`; `ranks` is null or as the struct says; `group` is null or from `fmha_dist_join`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_dist_plan(
    device: *const c_char,
    problem: *const FmhaProblem,
    ranks: *const FmhaRanks,
    options: *const FmhaOptions,
    group: *const FmhaGroup,
    plan: *mut *mut FmhaDistPlan,
) -> c_int {
    guard_text(|| {
        let null = |field: &str| format!("{field} is null");
        // SAFETY: the caller keeps the contract of `fmha_dist_plan`.
        let group = unsafe { group.as_ref() }.ok_or_else(|| null("group"))?;
        // SAFETY: the caller keeps the contract of `fmha_dist_plan`.
        let made = unsafe {
            let local = Local::read(device, problem.as_ref(), ranks.as_ref(), options, &*group.group);
            if plan.is_null() { Err(refused("plan", null("plan"))) } else { local }
        };
        // The other ranks wait for this one, so an error here is sent to them.
        let told = |error: Error| {
            let error = fmha_dist::Error::of(group.group.rank(), &error);
            fmha_dist::refuse(&*group.group, error).to_string()
        };
        let made = made.map_err(told)?.plan(&group.group)?;
        // SAFETY: not null, and the caller keeps the rest of the contract of `fmha_dist_plan`.
        unsafe { *plan = Box::into_raw(Box::new(made)) };
        Ok(())
    })
}

/// Runs a plan, on every rank, whose dropout_seed and dropout_offset are alike. The arguments are this rank's rows
/// and take neither lengths nor scratch: LSE [batch, num_heads_q, own rows], packed [num_heads_q, own rows]. On a
/// device it is queued on the stream; on the host it is done when this returns. Returns 0, or not 0 (see
/// `fmha_last_error`) on every rank: no output is then a result.
///
/// # Safety
/// `plan` is null or from `fmha_dist_plan`; `args` is null or as for `fmha_run`, its tensors as large as the plan's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_dist_run(plan: *const FmhaDistPlan, args: *const FmhaArgs) -> c_int {
    guard_text(|| {
        // SAFETY: the caller keeps the contract of `fmha_dist_run`.
        let plan = unsafe { plan.as_ref() }.ok_or("plan is null")?;
        // SAFETY: the caller keeps the contract of `fmha_dist_run`.
        unsafe { plan.run(args.as_ref()) }
    })
}

/// The plan for a reader: what each scheme would cost, the one that serves and why, every step of this rank.
/// Lives as long as the plan.
///
/// # Safety
/// `plan` is null (then so is the text) or from `fmha_dist_plan`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_dist_plan_text(plan: *const FmhaDistPlan) -> *const c_char {
    // SAFETY: promised by the caller: `plan` is null (then so is the text) or from `fmha_dist_plan`.
    unsafe { plan.as_ref() }.map_or(std::ptr::null(), |plan| plan.text.as_ptr())
}

/// Drops a plan whose work is done. Null is taken.
///
/// # Safety
/// `plan` is null or from `fmha_dist_plan`, and not dropped before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_dist_drop(plan: *mut FmhaDistPlan) {
    guard_text(|| {
        if !plan.is_null() {
            // SAFETY: the caller promised that it is ours, once.
            drop(unsafe { Box::from_raw(plan) });
        }
        Ok(())
    });
}

impl FmhaDistPlan {
    /// # Safety
    /// As [`fmha_dist_run`].
    unsafe fn run(&self, given: Option<&FmhaArgs>) -> Text<()> {
        let told =
            |error: Error| self.group.fail(fmha_dist::Error::of(self.group.rank(), &error)).to_string();
        let given = given.ok_or_else(|| refused("args", "args is null".to_owned()));
        let given = given.and_then(|given| self.takes(given).map(|()| given)).map_err(told)?;
        let (memory, dtypes) = (Memory::of(&self.device), self.own.dtypes);
        // SAFETY: the caller promised a stream of the device that lives until the work is done.
        let stream = unsafe { Stream::from_raw(&self.device, given.stream as u64) };
        let Sizes { qkv, o, lse, grads } = self.bytes;
        // SAFETY: the caller keeps the contract of `run`.
        let inputs = || unsafe {
            Ok::<_, Error>((
                memory.needed("q", given.q, qkv[0], dtypes.qk)?,
                memory.needed("k", given.k, qkv[1], dtypes.qk)?,
                memory.needed("v", given.v, qkv[2], dtypes.v)?,
                memory.score(&self.own, given)?,
                memory.masks(&self.whole, given, self.totals)?,
                memory.captured(&self.whole, &self.captures, given)?,
            ))
        };
        // SAFETY: the caller keeps the contract of `run`.
        let written = |name, at: *mut c_void, (bytes, dtype)| unsafe {
            present(name, at, bytes)?;
            Ok::<_, Error>(memory.write(at.cast(), bytes, dtype))
        };
        let (q, k, v, score, masks, captured) = inputs().map_err(told)?;
        let score = score.captured(captured.tensors()).numbers(captured.numbers());
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        match (&mut *ready, self.gradients) {
            (Ready::Forward(plan), _) => {
                // SAFETY: the caller keeps the contract of `run`.
                let made = || unsafe {
                    let mut args = FwdArgs::new(q, k, v, written("o", given.o, (o, dtypes.o))?);
                    args.lse = memory.write_if("lse", self.own.write_lse, given.lse, lse, DType::F32)?;
                    Ok(args)
                };
                let mut args = made().map_err(told)?;
                (args.score, args.masks) = (score, masks);
                plan.run(&mut args, &stream)
            }
            (Ready::Backward(plan), gradients) => {
                let (grad, write_dsink) = gradients.unwrap_or((dtypes.qk, false));
                let sinks = 4 * u64::from(self.own.dims.num_heads_q);
                // SAFETY: the caller keeps the contract of `run`.
                let made = || unsafe {
                    Ok(BwdArgs::new(
                        [q, k, v],
                        [
                            memory.needed("o", given.o, o, dtypes.o)?,
                            memory.needed("lse", given.lse, lse, DType::F32)?,
                            memory.needed("dout", given.dout, o, dtypes.o)?,
                        ],
                        [
                            written("dq", given.dq, (grads[0], grad))?,
                            written("dk", given.dk, (grads[1], grad))?,
                            written("dv", given.dv, (grads[2], grad))?,
                        ],
                    )
                    .dsink(memory.write_if("dsink", write_dsink, given.dsink, sinks, DType::F32)?)
                    .dcaptured(memory.dcaptured(&self.whole.code, &self.dcaptured, &captured))
                    .score(score)
                    .masks(masks))
                };
                plan.run(&mut made().map_err(told)?, &stream)
            }
        }
        .map_err(|error| error.to_string())
    }

    /// Refuses arguments that no plan over ranks has.
    fn takes(&self, given: &FmhaArgs) -> crate::Result<()> {
        struct_bytes::<FmhaArgs>(given.struct_bytes)?;
        none("reserved", given.reserved)?;
        absent!(
            given,
            "it: a plan over ranks has its lengths",
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k
        );
        absent!(given, "it", block_table, keep_mask, row_max, head_max, key_sum, scale_o, dbias, dlse);
        absent!(given, "it", k_new, v_new, cu_seqlens_new, rotary_cos, rotary_sin, tree_mask);
        absent!(given, "it", indices, topk_length, built, second);
        absent!(given, "it", block_scale_q, block_scale_k, block_scale_v, k_scale, v_scale);
        absent!(given, "it: a plan over ranks has scratch of its own", workspace);
        if self.gradients.is_none() {
            absent!(given, "gradients", dout, dq, dk, dv, dsink);
        }
        for (field, value) in [
            ("total_q", given.total_q),
            ("total_k", given.total_k),
            ("total_new", given.total_new),
            ("num_pages", given.num_pages),
            ("max_pages", given.max_pages),
        ] {
            goes_with(field, value, "a plan of one device: a plan over ranks has its lengths")?;
        }
        if given.workspace_bytes > 0 {
            let bytes = given.workspace_bytes;
            let text = format!("workspace_bytes {bytes} goes with workspace, which is null");
            return Err(refused("workspace_bytes", text));
        }
        Ok(())
    }
}
