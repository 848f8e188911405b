//! Ranks that are GPUs, over a communicator of NCCL or RCCL: the caller's, or one of its own.
//!
//! Both libraries have the same symbols, so one loader serves both; it loads a library at first use. Rows go
//! by sends and receives, one NCCL group per step, on the caller's stream. Rows that every rank sends to all
//! go by one all-gather. Messages between the hosts of the ranks go over a [`Host`] group, which also reports
//! a failed rank: a thread then aborts the communicator, so that no kernel and no call waits for a rank that
//! is gone. That thread also finds a rank that plans, or runs another call, while this rank runs a planned
//! call: no host waits there and could find it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fmha::{DevSlice, DevSliceMut, MemorySpace, Stream};
use libloading::Library;

use super::tcp::after;
use super::{Exchange, Group, Host, Parcel, check_stretches};
use crate::error::{Error, Result};

type Status = c_int;
type Comm = *mut c_void;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// `ncclUint8`: rows are moved as bytes, whatever they hold.
const BYTES: c_int = 1;

/// Functions of either library.
struct Api {
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    comm_init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> Status,
    comm_destroy: unsafe extern "C" fn(Comm) -> Status,
    comm_abort: unsafe extern "C" fn(Comm) -> Status,
    group_start: unsafe extern "C" fn() -> Status,
    group_end: unsafe extern "C" fn() -> Status,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Comm, *mut c_void) -> Status,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Status,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, *mut c_void) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    /// Library of these functions; `None` in a test.
    _library: Option<Library>,
}

impl Api {
    fn load(path: Option<&Path>) -> Result<Self, String> {
        let names = ["libnccl.so.2", "libnccl.so", "librccl.so.1", "librccl.so"];
        let wanted: Vec<&Path> =
            path.map_or_else(|| names.iter().map(Path::new).collect(), |path| vec![path]);
        let mut said = Vec::new();
        for name in wanted {
            // SAFETY: the initialisers of NCCL and RCCL have no requirements.
            match unsafe { Library::new(name) } {
                // SAFETY: the types are those of nccl.h, which RCCL's functions of these names share.
                Ok(library) => return unsafe { Self::of(library) }.map_err(|error| error.to_string()),
                Err(error) => said.push(error.to_string()),
            }
        }
        Err(said.join("; "))
    }

    /// # Safety
    /// `library` is NCCL or RCCL.
    unsafe fn of(library: Library) -> Result<Self, libloading::Error> {
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the caller keeps the contract of `of`; each field has its function's type.
                *unsafe { library.get($name) }?
            };
        }
        Ok(Self {
            get_unique_id: symbol!(b"ncclGetUniqueId\0"),
            comm_init_rank: symbol!(b"ncclCommInitRank\0"),
            comm_destroy: symbol!(b"ncclCommDestroy\0"),
            comm_abort: symbol!(b"ncclCommAbort\0"),
            group_start: symbol!(b"ncclGroupStart\0"),
            group_end: symbol!(b"ncclGroupEnd\0"),
            send: symbol!(b"ncclSend\0"),
            recv: symbol!(b"ncclRecv\0"),
            all_gather: symbol!(b"ncclAllGather\0"),
            error_string: symbol!(b"ncclGetErrorString\0"),
            _library: Some(library),
        })
    }

    fn check(&self, rank: u32, call: &str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: it gives a string that is never freed.
        let words = unsafe { CStr::from_ptr((self.error_string)(status)) }.to_string_lossy().into_owned();
        Err(Error::new(rank, call, format!("{call} failed with {status}: {words}")))
    }
}

/// A communicator, and whether it still exists.
struct Held {
    comm: Mutex<Option<Comm>>,
    /// Held while something is queued: the communicator is then in use, and its own mutex is free.
    queueing: Mutex<()>,
    owned: bool,
    ended: AtomicBool,
}

// SAFETY: a communicator is used by one thread at a time, which the mutexes see to, but for the abort of one
// that is stuck.
unsafe impl Send for Held {}
// SAFETY: a communicator is used by one thread at a time, which the mutexes see to, but for the abort of one
// that is stuck.
unsafe impl Sync for Held {}

impl Held {
    fn take(&self) -> Option<Comm> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Aborts the communicator, so that no kernel and no call waits for a rank that is gone.
    fn abort(&self, api: &Arc<Api>) {
        let Some(comm) = self.take() else { return };
        // A call that is in the library ends soon, unless it waits for that rank: the abort is then what ends it.
        let end = Instant::now() + GRACE;
        let mut idle = self.queueing.try_lock();
        while matches!(idle, Err(TryLockError::WouldBlock)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
            idle = self.queueing.try_lock();
        }
        // SAFETY: taken, so no call begins with it; its kernels end, and streams that wait for them go on.
        by(GRACE, api, move |api, comm| unsafe { (api.comm_abort)(comm) }, comm);
    }
}

/// Time limit for calls that end by themselves: a call that queues, or the library's own end of a
/// communicator.
const GRACE: Duration = Duration::from_secs(2);

/// Calls the library with the last reference to a communicator, and waits at most this long. A call that
/// waits for a rank that is gone blocks its own thread alone.
fn by(
    patience: Duration,
    api: &Arc<Api>,
    call: impl FnOnce(&Api, Comm) -> Status + Send + 'static,
    comm: Comm,
) {
    struct Last(Comm);
    // SAFETY: this is the only reference.
    unsafe impl Send for Last {}
    let (api, comm) = (api.clone(), Last(comm));
    let (tell, told) = std::sync::mpsc::channel();
    let ending = std::thread::Builder::new().name("fmha-nccl-end".to_owned()).spawn(move || {
        let Last(comm) = { comm };
        call(&api, comm);
        let _ = tell.send(());
    });
    if ending.is_ok() {
        let _ = told.recv_timeout(patience);
    }
}

/// A rank on a GPU. Dropped, it leaves the group, and ends a communicator of its own together with the other
/// ranks: no later than the group's timeout, after which, or where one has failed, the communicator is
/// aborted.
pub struct Nccl {
    control: Arc<Host>,
    api: Arc<Api>,
    held: Arc<Held>,
    watch: Option<JoinHandle<()>>,
}

impl Nccl {
    /// Rows that one exchange moves at most: each is a send of its own.
    const MAX_ROWS: u64 = 1 << 16;

    /// A communicator of its own for the ranks of `control`, on the device that is current on this thread:
    /// with one process a GPU, the one that `CUDA_VISIBLE_DEVICES` or `HIP_VISIBLE_DEVICES` leaves. The
    /// library at `path`, or NCCL or RCCL where the system finds it.
    ///
    /// # Errors
    /// On every rank: the rank that has no library, or what it said.
    pub fn new(control: Host, path: Option<&Path>) -> Result<Self> {
        let api = Api::load(path);
        let api = api.map_err(|text| control.fail(Error::new(control.rank(), "nccl", text)))?;
        Self::joined(control, api)
    }

    fn joined(control: Host, api: Api) -> Result<Self> {
        let rank = control.rank();
        let mut id = UniqueId([0; 128]);
        if rank == 0 {
            // SAFETY: `id` is there to be filled.
            let status = unsafe { (api.get_unique_id)(&raw mut id) };
            api.check(rank, "ncclGetUniqueId", status).map_err(|error| control.fail(error))?;
        }
        let ids = control.share(&id.0)?;
        let told = ids.first().and_then(|told| told.first_chunk());
        let text =
            || format!("rank 0 told {} bytes of a communicator, not 128", ids.first().map_or(0, Vec::len));
        id.0 = *told.ok_or_else(|| control.fail(Error::new(0, "nccl", text())))?;
        let mut comm: Comm = std::ptr::null_mut();
        // SAFETY: the id is that of rank 0; sizes and ranks are those of `control`, which all ranks share.
        let status =
            unsafe { (api.comm_init_rank)(&raw mut comm, control.size() as c_int, id, rank as c_int) };
        api.check(rank, "ncclCommInitRank", status).map_err(|error| control.fail(error))?;
        Ok(Self::with(control, api, comm, true))
    }

    /// Uses the caller's communicator, whose ranks are those of `control`. It is not destroyed here, and
    /// aborted only when a rank has failed.
    ///
    /// # Safety
    /// `comm` is a live `ncclComm_t` of the library at `path`, with the ranks of `control`. It lives as long
    /// as the group, and nothing else uses it meanwhile.
    ///
    /// # Errors
    /// Errors of [`new`](Self::new).
    pub unsafe fn from_raw(control: Host, path: Option<&Path>, comm: *mut c_void) -> Result<Self> {
        let rank = control.rank();
        let api = Api::load(path).map_err(|text| control.fail(Error::new(rank, "nccl", text)))?;
        Ok(Self::with(control, api, comm, false))
    }

    fn with(control: Host, api: Api, comm: Comm, owned: bool) -> Self {
        let (control, api) = (Arc::new(control), Arc::new(api));
        let held = Arc::new(Held {
            comm: Mutex::new(Some(comm)),
            queueing: Mutex::new(()),
            owned,
            ended: AtomicBool::new(false),
        });
        let watch = {
            let (control, api, held) = (control.clone(), api.clone(), held.clone());
            std::thread::Builder::new().name("fmha-nccl-watch".to_owned()).spawn(move || {
                while !held.ended.load(Ordering::Acquire) {
                    // A rank that runs does not wait on the host for others, so a difference between calls is
                    // found here.
                    if control.failure().is_none() {
                        control.tell();
                        control.judged().map(|error| control.fail(error));
                    }
                    if control.failure().is_some() {
                        held.abort(&api);
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
            })
        };
        Self { control, api, held, watch: watch.ok() }
    }

    /// Queues work, unless a rank has failed. All ranks get the error if it fails.
    fn with_comm(&self, queue: impl FnOnce(Comm) -> Result<()>) -> Result<()> {
        if let Some(error) = self.control.failure() {
            return Err(self.fail(error));
        }
        let queueing = self.held.queueing.lock().unwrap_or_else(PoisonError::into_inner);
        let comm = *self.held.comm.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = || Error::new(self.rank(), "nccl", "the communicator was aborted");
        let queued = comm.ok_or_else(gone).and_then(queue);
        drop(queueing);
        queued.map_err(|error| self.fail(error))
    }

    fn queue(
        &self,
        comm: Comm,
        exchange: &Exchange,
        sources: &[DevSlice<'_>],
        sinks: &mut [DevSliceMut<'_>],
        stream: &Stream,
    ) -> Result<()> {
        let rank = self.rank();
        let stream = stream.as_raw() as *mut c_void;
        // A row is a send of its own, since whether rows touch may differ between the two ranks.
        let rows = |parcels: &[Parcel]| -> Vec<(u32, usize, u64, u64)> {
            let of = |parcel: &Parcel| {
                let Parcel { peer, buffer, block } = *parcel;
                (0..block.rows)
                    .map(move |row| (peer, buffer, block.offset + row * block.stride, block.row_bytes))
            };
            parcels.iter().flat_map(of).collect()
        };
        // SAFETY: opens a group on this thread, which is closed below whatever happens between.
        self.api.check(rank, "ncclGroupStart", unsafe { (self.api.group_start)() })?;
        let mut first = Ok(());
        for (peer, buffer, offset, bytes) in rows(&exchange.sends) {
            let from = sources[buffer].skip(offset).as_ptr().cast();
            // SAFETY: the exchange was checked: the row is in its buffer, device memory that lives until the
            // stream is done.
            let status = unsafe { (self.api.send)(from, bytes as usize, BYTES, peer as c_int, comm, stream) };
            first = first.and(self.api.check(rank, "ncclSend", status));
        }
        for (peer, buffer, offset, bytes) in rows(&exchange.receives) {
            let to = sinks[buffer].skip(offset).as_mut_ptr().cast();
            // SAFETY: the exchange was checked: the row is in its buffer, device memory that lives until the
            // stream is done, and nothing else touches the memory.
            let status = unsafe { (self.api.recv)(to, bytes as usize, BYTES, peer as c_int, comm, stream) };
            first = first.and(self.api.check(rank, "ncclRecv", status));
        }
        // SAFETY: closes the group of above.
        let status = unsafe { (self.api.group_end)() };
        first.and(self.api.check(rank, "ncclGroupEnd", status))
    }
}

impl Group for Nccl {
    fn rank(&self) -> u32 {
        self.control.rank()
    }

    fn size(&self) -> u32 {
        self.control.size()
    }

    fn space(&self) -> MemorySpace {
        MemorySpace::Device
    }

    /// Records the call alone: the watch thread sends and compares it.
    fn begins(&self, planned: &Arc<[(String, String)]>) -> Result<()> {
        self.control.note(planned);
        Ok(())
    }

    fn calls(&self) -> u64 {
        self.control.calls()
    }

    fn share(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.control.share(mine)
    }

    fn exchange(
        &self,
        exchange: &Exchange,
        sources: &[DevSlice<'_>],
        sinks: &mut [DevSliceMut<'_>],
        stream: &Stream,
    ) -> Result<()> {
        let rank = self.rank();
        exchange.check((rank, self.size()), sources, sinks).map_err(|error| self.fail(error))?;
        let rows = exchange.rows();
        if rows > Self::MAX_ROWS {
            let text = format!(
                "an exchange of {rows} rows is more than the {} that are sent one by one",
                Self::MAX_ROWS
            );
            return Err(self.fail(Error::new(rank, "exchange", text)));
        }
        self.with_comm(|comm| self.queue(comm, exchange, sources, sinks, stream))
    }

    fn all_gather(&self, bytes: u64, all: &mut DevSliceMut<'_>, stream: &Stream) -> Result<()> {
        let rank = self.rank();
        check_stretches(rank, self.size(), bytes, all).map_err(|error| self.fail(error))?;
        self.with_comm(|comm| {
            let to = all.as_mut_ptr();
            let own = to.wrapping_add((u64::from(rank) * bytes) as usize);
            // SAFETY: `all` was checked: device memory of as many stretches as there are ranks. It lives
            // until the stream is done, and nothing else touches it.
            let status = unsafe {
                (self.api.all_gather)(
                    own.cast(),
                    to.cast(),
                    bytes as usize,
                    BYTES,
                    comm,
                    stream.as_raw() as *mut c_void,
                )
            };
            self.api.check(rank, "ncclAllGather", status)
        })
    }

    fn most_rows(&self) -> u64 {
        Self::MAX_ROWS
    }

    fn timeout(&self) -> Duration {
        self.control.timeout()
    }

    fn failure(&self) -> Option<Error> {
        self.control.failure()
    }

    fn fail(&self, error: Error) -> Error {
        self.control.fail(error)
    }
}

impl Drop for Nccl {
    /// Ends an own communicator together with the other ranks: the library's call waits for all of them. If a
    /// rank has failed, or has not left within the timeout, the communicator is aborted, which waits for no
    /// rank.
    fn drop(&mut self) {
        if self.held.owned {
            let end = after(self.control.timeout());
            if self.control.leave_together(end) {
                if let Some(comm) = self.held.take() {
                    let patience = end.saturating_duration_since(Instant::now()).max(GRACE);
                    // SAFETY: made by `joined`, and taken, so that it is destroyed once.
                    by(patience, &self.api, |api, comm| unsafe { (api.comm_destroy)(comm) }, comm);
                }
            } else {
                self.held.abort(&self.api);
            }
        }
        self.held.ended.store(true, Ordering::Release);
        if let Some(watch) = self.watch.take() {
            let _ = watch.join();
        }
    }
}

#[cfg(test)]
mod tests;
