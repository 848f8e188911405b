//! Attention over ranks, behind the C ABI: a group, a plan that all of its ranks make together, its runs.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fmha::{BwdArgs, DType, DevSlice, DevSliceMut, Device, Error, FwdArgs, FwdProblem, ProblemError, Stream};
use fmha_dist::{BwdPlan, FwdPlan, Group, Nccl, Options, Partition, Problem, Rendezvous};

use crate::agree;
use crate::host::{self, Choice, Pointed, size, struct_bytes, text};
use crate::plan::Memory;
use crate::structs::{FmhaCall, FmhaGradients, FmhaOptions, FmhaTensor};
use crate::{guard_text, open};

/// Ranks of processes that compute on host memory.
pub const FMHA_HOST: i32 = 0;
/// Ranks that are GPUs, over NCCL or RCCL.
pub const FMHA_NCCL: i32 = 1;

/// One run of rows for each rank, in the order of the ranks, lengths that differ by 1 at most.
pub const FMHA_CONTIGUOUS: i32 = 0;
/// Twice as many runs as ranks; rank r has the r-th and the r-th from the end: equal work under a causal mask.
pub const FMHA_ZIG_ZAG: i32 = 1;
/// Every rank has all rows: the queries of a step of decoding.
pub const FMHA_REPLICATED: i32 = 2;
/// The runs that are given.
pub const FMHA_RUNS: i32 = 3;

/// How a rank finds the others. Set everything to 0 first, then what is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaJoin {
    /// sizeof(FmhaJoin).
    pub struct_bytes: u64,
    /// Which rank this one is, from 0; 0 without an address.
    pub rank: i64,
    /// How many there are; 0 without an address.
    pub size: i64,
    /// Host memory: "host:port", where rank 0 listens; or "file:PATH", a file that does not exist yet and that every rank of
    /// this host sees; null: RANK, WORLD_SIZE, MASTER_ADDR and the port above MASTER_PORT, as torchrun sets them.
    pub address: *const c_char,
    /// Seconds that a rank may be late, when it joins and at every later step; 0: 60.
    pub timeout_seconds: f64,
    /// FMHA_NCCL: a live ncclComm_t of the same ranks, which outlives the group and which nobody uses at the same time; it
    /// stays the caller's, and is aborted when a rank has failed. Null: one of the group's own, on the device that is
    /// current on this thread.
    pub nccl_comm: *mut c_void,
    /// Host memory: the path of NCCL or RCCL; null: where the system finds it.
    pub nccl_library: *const c_char,
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

/// Which rows of the whole each rank has, the same on every rank but for own_rows_q and own_rows_k. Rows are positions of
/// every sequence, or rows of a packed tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FmhaRanks {
    /// sizeof(FmhaRanks).
    pub struct_bytes: u64,
    /// Rows of this rank's Q and O, as partition_q gives them.
    pub own_rows_q: i64,
    /// Rows of this rank's K and V, as partition_k gives them.
    pub own_rows_k: i64,
    /// Host memory: FMHA_RUNS: who has which queries, a rank's runs ascending; else null.
    pub runs_q: *const FmhaRun,
    /// How many; else 0.
    pub num_runs_q: i64,
    /// Likewise for keys.
    pub runs_k: *const FmhaRun,
    /// How many; else 0.
    pub num_runs_k: i64,
    /// Host memory: "gather", "ring", "ulysses" or "decode"; null: what the model of kernels and links finds fastest.
    pub scheme: *const c_char,
    /// Host memory: what kernels and links do, lines as `fmha explain --links` reads them; null: the model's own figures.
    pub links: *const c_char,
    /// FMHA_CONTIGUOUS, ...
    pub partition_q: i32,
    /// Likewise for keys.
    pub partition_k: i32,
}

/// Ranks that compute together.
pub struct FmhaGroup {
    group: Arc<dyn Group>,
}

/// A plan over ranks, on one of them.
pub struct FmhaDistPlan {
    ready: Mutex<Ready>,
    group: Arc<dyn Group>,
    device: Device,
    call: FmhaCall,
    pointed: Pointed,
    /// The problem of a device that had this rank's queries alone: what the score's operands are as large as.
    own: FwdProblem,
    /// Bytes of Q, K, V and O here, of LSE, and of dQ, dK and dV.
    bytes: Sizes,
    text: CString,
}

// SAFETY: its structs' pointers are compared with null, and never followed after the plan is made.
unsafe impl Send for FmhaDistPlan {}
// SAFETY: as above; what runs is behind a mutex.
unsafe impl Sync for FmhaDistPlan {}

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

/// The ranks' own errors, and the library's, as they are told.
type Text<T> = Result<T, String>;

fn refused(field: &'static str, text: String) -> Error {
    ProblemError::new(field, text).into()
}

/// Joins a group, and waits for all of its ranks. Every rank then makes the same calls in the same order: what goes wrong on
/// one is an error on all, which names the rank and the field, and after one no call of the group succeeds.
/// Returns 0 and sets `*group`, or not 0 (see `fmha_last_error`) with `*group` untouched.
///
/// # Safety
/// `join` is null or as the struct says; `group` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_dist_join(join: *const FmhaJoin, group: *mut *mut FmhaGroup) -> c_int {
    guard_text(|| {
        let null = |field: &str| format!("{field} is null (0)");
        // SAFETY: the caller promised it.
        let join = unsafe { join.as_ref() }.ok_or_else(|| null("join"))?;
        if group.is_null() {
            return Err(null("group"));
        }
        // SAFETY: passed on.
        let joined = unsafe { joined(join)? };
        // SAFETY: not null, and the caller promised the rest.
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
    let (address, library) = unsafe {
        (
            text("address", join.address).map_err(said)?,
            text("nccl_library", join.nccl_library).map_err(said)?.map(Path::new),
        )
    };
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
        let text = "nccl_comm or nccl_library is given (1), but space is 0 (FMHA_HOST)";
        return Err(said(ProblemError::new("nccl_comm", text)));
    }
    let timeout = Duration::from_secs_f64(if seconds == 0.0 { 60.0 } else { seconds });
    let meeting = match address {
        None if (rank, ranks) != (0, 0) => {
            let text = format!("address is null (0), but rank {rank} of size {ranks} are given");
            return Err(said(ProblemError::new("address", text)));
        }
        None => Rendezvous::from_env().map_err(|error| error.to_string())?,
        Some(address) => match address.strip_prefix("file:") {
            Some(path) => Rendezvous::file(path, rank, ranks),
            None => Rendezvous::at(address, rank, ranks),
        },
    };
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

/// Leaves a group. The other ranks' calls that are still to come fail; plans of this rank keep it until they are dropped. Null
/// is taken.
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

/// Tells the other ranks that this one cannot go on: their calls fail by this rank, `field` and `text` at once, and need not
/// wait for it until it is late. No call of the group succeeds any more. Null is taken.
///
/// # Safety
/// `group` is null or from `fmha_dist_join`; `field` and `text` are null or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_dist_fail(group: *const FmhaGroup, field: *const c_char, text: *const c_char) {
    guard_text(|| {
        // SAFETY: the caller promised it.
        if let Some(FmhaGroup { group }) = unsafe { group.as_ref() } {
            // SAFETY: as above.
            let words = unsafe { [host::text("field", field), host::text("text", text)] };
            let [field, text] = words.map(|word| word.ok().flatten().unwrap_or_default().to_owned());
            group.fail(fmha_dist::Error::new(group.rank(), field, text));
        }
        Ok(())
    });
}

/// The rows of `rank` where `rows` are cut for `size` ranks by FMHA_CONTIGUOUS, FMHA_ZIG_ZAG or FMHA_REPLICATED: at most two
/// runs, their number in `*num_runs`.
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
            return Err("runs or num_runs is null (0)".to_owned());
        }
        let cut = || -> crate::Result<(Partition, u32)> {
            let (rows, ranks) = (host::size("rows", rows)?, host::size("size", size)?);
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
        // SAFETY: not null, and the caller promised the rest.
        unsafe { *num_runs = count as i64 };
        Ok(())
    })
}

/// A partition that a name says.
fn built(field: &'static str, kind: i32, rows: u32, ranks: u32) -> crate::Result<Partition> {
    match kind {
        FMHA_CONTIGUOUS => Ok(Partition::contiguous(rows, ranks)),
        FMHA_ZIG_ZAG => Ok(Partition::zig_zag(rows, ranks)),
        FMHA_REPLICATED => Ok(Partition::replicated(rows, ranks)),
        _ => {
            let text =
                format!("{field} {kind} is not in 0..=2 (FMHA_CONTIGUOUS, FMHA_ZIG_ZAG, FMHA_REPLICATED)");
            Err(refused(field, text))
        }
    }
}

/// Plans a call over the ranks of `group`, which all plan it together. `call` has the sizes of the whole: those of one device
/// that had all rows; its tensors are this rank's rows, contiguous: Q and O [batch, own rows, num_heads_q, head_dim], K and V
/// likewise, LSE [batch, num_heads_q, own rows]; packed, the batch is no axis, and cu_seqlens_q and cu_seqlens_k are host
/// memory, read here. A bias is [.., own queries, all keys]. Paged, appended and used lengths, gradients of LSE and of a bias
/// are refused. The plan has scratch of its own.
/// Returns 0 and sets `*plan`, or not 0 (see `fmha_last_error`), on every rank.
///
/// # Safety
/// As `fmha_plan`; `ranks` is null or as the struct says; `group` is null or from `fmha_dist_join`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_dist_plan(
    call: *const FmhaCall,
    ranks: *const FmhaRanks,
    options: *const FmhaOptions,
    group: *const FmhaGroup,
    plan: *mut *mut FmhaDistPlan,
) -> c_int {
    guard_text(|| {
        let null = |field: &str| format!("{field} is null (0)");
        // SAFETY: the caller promised it.
        let group = unsafe { group.as_ref() }.ok_or_else(|| null("group"))?;
        // SAFETY: passed on.
        let made = unsafe {
            let local = Local::read(call.as_ref(), ranks.as_ref(), options, &*group.group);
            if plan.is_null() { Err(refused("plan", null("plan"))) } else { local }
        };
        // The others wait for this rank: they are told.
        let told = |error: Error| {
            let error = fmha_dist::Error::of(group.group.rank(), &error);
            fmha_dist::refuse(&*group.group, error).to_string()
        };
        let made = made.map_err(told)?.plan(&group.group)?;
        // SAFETY: not null, and the caller promised the rest.
        unsafe { *plan = Box::into_raw(Box::new(made)) };
        Ok(())
    })
}

/// Runs a plan, on every rank; `call` is what was planned but for addresses, stream, dropout_seed and dropout_offset, which the
/// ranks have alike. On a device it is queued on the stream; on the host it is done when this returns.
/// Returns 0, or not 0 (see `fmha_last_error`) on every rank: no output is then a result.
///
/// # Safety
/// `plan` is null or from `fmha_dist_plan`; `call` is null or as for `fmha_run`, its tensors as large as the plan's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_dist_run(plan: *const FmhaDistPlan, call: *const FmhaCall) -> c_int {
    guard_text(|| {
        // SAFETY: the caller promised it.
        let plan = unsafe { plan.as_ref() }.ok_or("plan is null (0)")?;
        // SAFETY: passed on.
        unsafe { plan.run(call.as_ref()) }
    })
}

/// The plan for a reader: what each scheme would cost, the one that serves and why, every step of this rank. Lives as long as
/// the plan.
///
/// # Safety
/// `plan` is null (then so is the text) or from `fmha_dist_plan`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_dist_plan_text(plan: *const FmhaDistPlan) -> *const c_char {
    // SAFETY: the caller promised it.
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

/// What this rank says of a call, before the others are asked.
struct Local {
    call: FmhaCall,
    pointed: Pointed,
    problem: Problem,
    gradients: Option<(FmhaGradients, DType)>,
    device: Device,
    options: Options,
    own: FwdProblem,
    bytes: Sizes,
}

impl Local {
    /// # Safety
    /// As [`fmha_dist_plan`].
    unsafe fn read(
        call: Option<&FmhaCall>,
        ranks: Option<&FmhaRanks>,
        options: *const FmhaOptions,
        group: &dyn Group,
    ) -> crate::Result<Self> {
        let call = *call.ok_or_else(|| refused("call", "call is null (0)".to_owned()))?;
        let ranks = ranks.ok_or_else(|| refused("ranks", "ranks is null (0)".to_owned()))?;
        struct_bytes::<FmhaRanks>(ranks.struct_bytes)?;
        // SAFETY: passed on.
        let (pointed, choice) = unsafe { (Pointed::read(&call)?, Choice::read(options)?) };
        if choice.caller_workspace {
            let text = "caller_workspace 1: a plan over ranks has scratch of its own";
            return Err(refused("caller_workspace", text.to_owned()));
        }
        // SAFETY: the caller promised C strings, and so many runs and offsets.
        let (scheme, links, cu_q, cu_k) = unsafe {
            (
                text("scheme", ranks.scheme)?,
                text("links", ranks.links)?,
                offsets("total_q", call.cu_seqlens_q, &call, call.total_q)?,
                offsets("total_k", call.cu_seqlens_k, &call, call.total_k)?,
            )
        };
        let whole = pointed.forward(&contiguous(&call))?;
        let dims = whole.dims;
        let rows =
            |cu: &Option<Vec<u32>>, seqlen| cu.as_ref().and_then(|cu| cu.last().copied()).unwrap_or(seqlen);
        // SAFETY: passed on.
        let (q, k) = unsafe {
            (
                partition(
                    ("partition_q", ranks.partition_q),
                    (ranks.runs_q, ranks.num_runs_q),
                    rows(&cu_q, dims.seqlen_q),
                    group.size(),
                )?,
                partition(
                    ("partition_k", ranks.partition_k),
                    (ranks.runs_k, ranks.num_runs_k),
                    rows(&cu_k, dims.seqlen_k),
                    group.size(),
                )?,
            )
        };
        let at = group.rank();
        let own = |field, partition: &Partition, said: i64| -> crate::Result<u32> {
            let has = partition.rows_of(at);
            if said == i64::from(has) {
                return Ok(has);
            }
            Err(refused(
                field,
                format!("{field} {said} is not the {has} rows that the partition gives rank {at}"),
            ))
        };
        let own_rows = [own("own_rows_q", &q, ranks.own_rows_q)?, own("own_rows_k", &k, ranks.own_rows_k)?];
        let packed = cu_q.is_some();
        rows_are_contiguous(&call, pointed.gradients.as_ref(), own_rows, packed)?;
        let bytes = sizes(&whole, pointed.gradients.as_ref(), own_rows, packed)?;
        let mut own = whole.clone();
        own.dims.seqlen_q = own_rows[0];
        let mut problem = Problem::new(whole, q).keys(k);
        if let (Some(q), Some(k)) = (cu_q, cu_k) {
            problem = problem.packed(q, k);
        }
        let mut options = Options::default().kernels(choice.plan);
        if let Some(scheme) = scheme {
            options =
                options.scheme(scheme.parse::<fmha_dist::Scheme>().map_err(|text| refused("scheme", text))?);
        }
        if let Some(links) = links {
            options = options.links(links.parse().map_err(|text: String| refused("links", text))?);
        }
        let typed = |gradients: FmhaGradients| {
            Ok::<_, Error>((gradients, host::dtype("dtype_grad", gradients.dtype_grad)?))
        };
        let gradients = pointed.gradients.map(typed).transpose()?;
        if let Some((gradients, _)) = &gradients {
            for (field, given) in
                [("dlse", !gradients.dlse.is_null()), ("dbias", !gradients.dbias.data.is_null())]
            {
                if given {
                    return Err(refused(
                        field,
                        format!("{field} is given (1), and is taken over 1 rank alone"),
                    ));
                }
            }
        }
        let device = open(choice.backend.as_ref())?;
        Ok(Self { call, pointed, problem, gradients, device, options, own, bytes })
    }

    fn plan(self, group: &Arc<dyn Group>) -> Text<FmhaDistPlan> {
        let Self { call, pointed, problem, gradients, device, options, own, bytes } = self;
        let (ready, text) = match gradients {
            None => FwdPlan::new(&problem, group.clone(), &device, &options).map(|plan| {
                let text = plan.explain();
                (Ready::Forward(plan), text)
            }),
            Some((gradients, dtype)) => {
                let wanted = (dtype, !gradients.dsink.is_null());
                BwdPlan::new(&problem, wanted, group.clone(), &device, &options).map(|plan| {
                    let text = plan.explain();
                    (Ready::Backward(plan), text)
                })
            }
        }
        .map_err(|error| error.to_string())?;
        let text = CString::new(text).unwrap_or_default();
        Ok(FmhaDistPlan {
            ready: Mutex::new(ready),
            group: group.clone(),
            device,
            call,
            pointed,
            own,
            bytes,
            text,
        })
    }
}

impl FmhaDistPlan {
    /// # Safety
    /// As [`fmha_dist_run`].
    unsafe fn run(&self, call: Option<&FmhaCall>) -> Text<()> {
        let told =
            |error: Error| self.group.fail(fmha_dist::Error::of(self.group.rank(), &error)).to_string();
        // SAFETY: passed on.
        let checked =
            call.ok_or_else(|| refused("call", "call is null (0)".to_owned())).and_then(|call| unsafe {
                agree::call(&self.call, &self.pointed, call)?;
                Ok(call)
            });
        let call = checked.map_err(told)?;
        let memory = Memory::of(&self.device);
        // SAFETY: the caller promised a stream of the device that lives until the work is done.
        let stream = unsafe { Stream::from_raw(&self.device, call.stream as u64) };
        // SAFETY: passed on, here and below.
        let inputs = unsafe {
            let [q, k, v] = self.bytes.qkv;
            (|| {
                Ok::<_, Error>((
                    [
                        slice(memory, "q", &call.q, q)?,
                        slice(memory, "k", &call.k, k)?,
                        slice(memory, "v", &call.v, v)?,
                    ],
                    memory.score(&self.own, call)?,
                ))
            })()
        };
        let ([q, k, v], score) = inputs.map_err(told)?;
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        let Sizes { o, lse, grads, .. } = self.bytes;
        match &mut *ready {
            Ready::Forward(plan) => {
                // SAFETY: as above.
                let out = unsafe { slice_mut(memory, "o", &call.o, o) }.map_err(told)?;
                let mut args = FwdArgs::new(q, k, v, out);
                // SAFETY: as above.
                args.lse = unsafe { memory.write_if(!call.lse.is_null(), call.lse.cast(), lse) };
                args.score = score;
                plan.run(&mut args, &stream)
            }
            Ready::Backward(plan) => {
                // SAFETY: as above; a call that agrees has gradients.
                let args = unsafe {
                    (|| {
                        let gradients = call.gradients.as_ref();
                        let gradients = gradients
                            .ok_or_else(|| refused("gradients", "gradients is null (0)".to_owned()))?;
                        let sinks = 4 * u64::from(self.own.dims.num_heads_q);
                        Ok(BwdArgs::new(
                            [q, k, v],
                            [
                                slice(memory, "o", &call.o, o)?,
                                memory.read(call.lse.cast(), lse),
                                slice(memory, "dout", &gradients.dout, o)?,
                            ],
                            [
                                slice_mut(memory, "dq", &gradients.dq, grads[0])?,
                                slice_mut(memory, "dk", &gradients.dk, grads[1])?,
                                slice_mut(memory, "dv", &gradients.dv, grads[2])?,
                            ],
                        )
                        .dsink(memory.write_if(!gradients.dsink.is_null(), gradients.dsink.cast(), sinks))
                        .score(score))
                    })()
                };
                plan.run(&mut args.map_err(told)?, &stream)
            }
        }
        .map_err(|error| error.to_string())
    }
}

/// # Safety
/// As [`fmha_dist_run`].
unsafe fn slice<'a>(
    memory: Memory,
    name: &'static str,
    tensor: &FmhaTensor,
    bytes: u64,
) -> crate::Result<DevSlice<'a>> {
    there(name, tensor, bytes)?;
    // SAFETY: passed on.
    Ok(unsafe { memory.read(tensor.data.cast_const().cast(), bytes) })
}

/// # Safety
/// As [`fmha_dist_run`].
unsafe fn slice_mut<'a>(
    memory: Memory,
    name: &'static str,
    tensor: &FmhaTensor,
    bytes: u64,
) -> crate::Result<DevSliceMut<'a>> {
    there(name, tensor, bytes)?;
    // SAFETY: passed on.
    Ok(unsafe { memory.write(tensor.data.cast(), bytes) })
}

fn there(name: &'static str, tensor: &FmhaTensor, bytes: u64) -> crate::Result<()> {
    if !tensor.data.is_null() || bytes == 0 {
        return Ok(());
    }
    Err(refused(name, format!("{name}.data is null, but {bytes} bytes are needed")))
}

/// The offsets of packed sequences.
///
/// # Safety
/// `pointer` is null or `batch + 1` numbers of host memory.
unsafe fn offsets(
    field: &'static str,
    pointer: *const i32,
    call: &FmhaCall,
    total: i64,
) -> crate::Result<Option<Vec<u32>>> {
    if pointer.is_null() {
        return Ok(None);
    }
    let count = size("batch", call.batch)? as usize + 1;
    // SAFETY: the caller promised so many.
    let given = unsafe { std::slice::from_raw_parts(pointer, count) };
    let unsigned = |&at: &i32| {
        u32::try_from(at).map_err(|_| refused(field, format!("{field}: an offset of {at} is below 0")))
    };
    let offsets = given.iter().map(unsigned).collect::<crate::Result<Vec<u32>>>()?;
    let last = given.last().copied().unwrap_or(0);
    if i64::from(last) != total {
        return Err(refused(field, format!("{field} {total} is not where the last sequence ends, {last}")));
    }
    Ok(Some(offsets))
}

/// # Safety
/// `runs` is null or so many of host memory.
unsafe fn partition(
    (field, kind): (&'static str, i32),
    (runs, count): (*const FmhaRun, i64),
    rows: u32,
    ranks: u32,
) -> crate::Result<Partition> {
    let count = size(field, count)? as usize;
    if kind != FMHA_RUNS {
        if count != 0 || !runs.is_null() {
            return Err(refused(
                field,
                format!("{field} {kind} goes with 0 runs: they go with 3 (FMHA_RUNS)"),
            ));
        }
        return built(field, kind, rows, ranks);
    }
    let mut by_rank = vec![Vec::new(); ranks as usize];
    let given = if count == 0 || runs.is_null() {
        &[]
    } else {
        // SAFETY: the caller promised so many.
        unsafe { std::slice::from_raw_parts(runs, count) }
    };
    if given.len() != count {
        return Err(refused(field, format!("{field}: runs is null (0), but {count} are said")));
    }
    for run in given {
        let (rank, begin, end) = (size("rank", run.rank)?, size("begin", run.begin)?, size("end", run.end)?);
        let Some(runs) = by_rank.get_mut(rank as usize) else {
            return Err(refused(field, format!("{field}: a run of rank {rank}, of {ranks} ranks")));
        };
        if end < begin {
            return Err(refused(field, format!("{field}: a run ends at {end}, before it begins at {begin}")));
        }
        runs.push(begin..end);
    }
    Partition::new(rows, by_rank).map_err(|error| refused(field, error.to_string()))
}

/// The call of one device that has the whole, contiguous: the strides of a rank's rows would make its rows overlap.
fn contiguous(call: &FmhaCall) -> FmhaCall {
    let mut whole = *call;
    let tensor = |tensor: FmhaTensor, rows: i64, heads: i64, dim: i64| dense(tensor, rows, heads, dim);
    whole.q = tensor(call.q, call.seqlen_q, call.num_heads_q, call.head_dim_qk);
    whole.k = tensor(call.k, call.seqlen_k, call.num_heads_kv, call.head_dim_qk);
    whole.v = tensor(call.v, call.seqlen_k, call.num_heads_kv, call.head_dim_v);
    whole.o = tensor(call.o, call.seqlen_q, call.num_heads_q, call.head_dim_v);
    whole
}

fn dense(tensor: FmhaTensor, rows: i64, heads: i64, dim: i64) -> FmhaTensor {
    let seqlen_stride = heads.wrapping_mul(dim);
    FmhaTensor {
        batch_stride: seqlen_stride.wrapping_mul(rows),
        seqlen_stride,
        head_stride: dim,
        dim_stride: 1,
        ..tensor
    }
}

/// Refuses a rank's tensor whose rows do not lie one after another.
fn rows_are_contiguous(
    call: &FmhaCall,
    gradients: Option<&FmhaGradients>,
    [own_q, own_k]: [u32; 2],
    packed: bool,
) -> crate::Result<()> {
    let (heads_q, heads_kv) = (call.num_heads_q, call.num_heads_kv);
    let (qk, v) = (call.head_dim_qk, call.head_dim_v);
    let mut tensors = vec![
        ("q", &call.q, own_q, heads_q, qk),
        ("k", &call.k, own_k, heads_kv, qk),
        ("v", &call.v, own_k, heads_kv, v),
        ("o", &call.o, own_q, heads_q, v),
    ];
    if let Some(gradients) = gradients {
        tensors.extend([
            ("dout", &gradients.dout, own_q, heads_q, v),
            ("dq", &gradients.dq, own_q, heads_q, qk),
            ("dk", &gradients.dk, own_k, heads_kv, qk),
            ("dv", &gradients.dv, own_k, heads_kv, v),
        ]);
    }
    for (name, tensor, rows, heads, dim) in tensors {
        let wanted = dense(*tensor, rows.into(), heads, dim);
        // An axis of one element has no stride that matters.
        for (axis, given, wanted, elems) in [
            ("batch_stride", tensor.batch_stride, wanted.batch_stride, if packed { 1 } else { call.batch }),
            ("seqlen_stride", tensor.seqlen_stride, wanted.seqlen_stride, rows.into()),
            ("head_stride", tensor.head_stride, wanted.head_stride, heads),
            ("dim_stride", tensor.dim_stride, 1, dim),
        ] {
            if given != wanted && elems > 1 && rows > 0 {
                let text = format!("{name}.{axis} {given} is not {wanted}: a rank's rows are contiguous");
                return Err(refused(name, text));
            }
        }
    }
    Ok(())
}

/// Bytes of a rank's tensors.
fn sizes(
    whole: &FwdProblem,
    gradients: Option<&FmhaGradients>,
    [own_q, own_k]: [u32; 2],
    packed: bool,
) -> crate::Result<Sizes> {
    let (dims, dtypes) = (whole.dims, whole.dtypes);
    let sequences = if packed { 1 } else { u64::from(dims.batch) };
    let of = |rows: u32, heads: u32, dim: u32, bytes: u64| {
        let elems = [rows, heads, dim].into_iter().fold(sequences, |elems, n| elems.saturating_mul(n.into()));
        elems.saturating_mul(bytes)
    };
    let dtype_grad =
        gradients.map(|gradients| host::dtype("dtype_grad", gradients.dtype_grad)).transpose()?;
    let (qk, v, grad) =
        (dtypes.qk.size_bytes(), dtypes.v.size_bytes(), dtype_grad.map_or(0, DType::size_bytes));
    let (heads_q, heads_kv) = (dims.num_heads_q, dims.num_heads_kv);
    Ok(Sizes {
        qkv: [
            of(own_q, heads_q, dims.head_dim_qk, qk),
            of(own_k, heads_kv, dims.head_dim_qk, qk),
            of(own_k, heads_kv, dims.head_dim_v, v),
        ],
        o: of(own_q, heads_q, dims.head_dim_v, dtypes.o.size_bytes()),
        lse: of(own_q, heads_q, 1, 4),
        grads: [
            of(own_q, heads_q, dims.head_dim_qk, grad),
            of(own_k, heads_kv, dims.head_dim_qk, grad),
            of(own_k, heads_kv, dims.head_dim_v, grad),
        ],
    })
}
