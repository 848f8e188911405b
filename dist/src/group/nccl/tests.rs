//! A fake NCCL whose ranks are threads of this process, and tests of the calls that it gets.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicU64;
use std::sync::{Condvar, LazyLock};

use fmha::{Backend, DType, DevBuffer, Device, Dims, FwdArgs, FwdProblem, PlanOptions, bf16};

use super::*;
use crate::agree::agree;
use crate::group::threads;
use crate::{FwdPlan, Options, Partition, Problem, Scheme};

const TIMEOUT: Duration = Duration::from_secs(120);

/// Messages sent and not received yet, by sender and receiver.
type Letters = HashMap<(u32, u32), VecDeque<Vec<u8>>>;

/// The ranks of a communicator.
#[derive(Default)]
struct World {
    letters: Mutex<Letters>,
    come: Condvar,
    /// Ranks that have ended their communicators, and how.
    ends: Mutex<Vec<(u32, &'static str)>>,
    ended: Condvar,
}

impl World {
    fn end(&self, rank: u32, how: &'static str) {
        self.ends.lock().unwrap().push((rank, how));
        self.ended.notify_all();
        // A rank that looks at the ends while it holds the letters sees this one.
        drop(self.letters.lock().unwrap());
        self.come.notify_all();
    }

    fn has_aborted(&self, rank: u32) -> bool {
        self.ends.lock().unwrap().contains(&(rank, "abort"))
    }
}

/// Rank behind a communicator.
struct Rank {
    rank: u32,
    size: u32,
    world: Arc<World>,
}

static WORLDS: LazyLock<Mutex<HashMap<[u8; 128], Arc<World>>>> = LazyLock::new(Mutex::default);

#[derive(Clone, Copy)]
enum Message {
    Send(*const c_void, usize, u32),
    Receive(*mut c_void, usize, u32),
}

thread_local! {
    /// Names of the calls of this rank, in order.
    static CALLS: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
    /// Messages of the group that is open.
    static OPEN: RefCell<Vec<Message>> = const { RefCell::new(Vec::new()) };
    /// Device whose memory is moved; host memory if `None`.
    static DEVICE: RefCell<Option<Device>> = const { RefCell::new(None) };
}

fn called(name: &'static str) {
    CALLS.with_borrow_mut(|calls| calls.push(name));
}

/// Lends memory of the device to be copied.
fn lent(ptr: *mut u8, bytes: usize) -> DevBuffer {
    // SAFETY: it lives while it is copied, in its stream's order: an emulated device has done all that was queued.
    unsafe { DevBuffer::from_raw(MemorySpace::Device, ptr, bytes as u64, Box::new(|_| ())) }
}

fn read(from: *const c_void, bytes: usize) -> Vec<u8> {
    let mut read = vec![0u8; bytes];
    DEVICE.with_borrow(|device| match device {
        Some(device) => device.memory().download(&lent(from.cast_mut().cast(), bytes), &mut read).unwrap(),
        // SAFETY: host memory of the test's.
        None => unsafe { read.as_mut_ptr().copy_from_nonoverlapping(from.cast(), bytes) },
    });
    read
}

fn write(to: *mut c_void, bytes: &[u8]) {
    DEVICE.with_borrow(|device| match device {
        Some(device) => device.memory().upload(bytes, &mut lent(to.cast(), bytes.len())).unwrap(),
        // SAFETY: host memory of the test's.
        None => unsafe { to.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) },
    });
}

impl Rank {
    /// # Safety
    /// `comm` is one of the fake's.
    unsafe fn of<'a>(comm: Comm) -> &'a Self {
        // SAFETY: the caller keeps the contract of `of`; it is never freed.
        unsafe { &*comm.cast::<Self>() }
    }

    fn carry(&self, message: Message) -> Status {
        let mut letters = self.world.letters.lock().unwrap();
        match message {
            Message::Send(from, bytes, to) => {
                letters.entry((self.rank, to)).or_default().push_back(read(from, bytes));
                self.world.come.notify_all();
            }
            Message::Receive(to, bytes, from) => loop {
                if self.world.has_aborted(self.rank) {
                    return 6;
                }
                if let Some(letter) = letters.get_mut(&(from, self.rank)).and_then(VecDeque::pop_front) {
                    write(to, &letter);
                    return c_int::from(letter.len() != bytes);
                }
                let (woken, late) = self.world.come.wait_timeout(letters, TIMEOUT).unwrap();
                assert!(!late.timed_out(), "rank {} waits for {from}", self.rank);
                letters = woken;
            },
        }
        0
    }
}

unsafe extern "C" fn get_unique_id(id: *mut UniqueId) -> Status {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut bytes = [0u8; 128];
    bytes[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    // SAFETY: the caller passes a place for the communicator.
    unsafe { *id = UniqueId(bytes) };
    0
}

unsafe extern "C" fn comm_init_rank(comm: *mut Comm, size: c_int, id: UniqueId, rank: c_int) -> Status {
    let world = WORLDS.lock().unwrap().entry(id.0).or_default().clone();
    let made = Rank { rank: rank as u32, size: size as u32, world };
    // SAFETY: its caller's, to be filled.
    unsafe { *comm = Box::into_raw(Box::new(made)).cast() };
    0
}

/// Ends a communicator as the library does: a call of all ranks, which waits for each.
unsafe extern "C" fn comm_destroy(comm: Comm) -> Status {
    // SAFETY: one of ours.
    let Rank { rank, size, world } = unsafe { Rank::of(comm) };
    world.end(*rank, "destroy");
    let ends = world.ends.lock().unwrap();
    let all = |ends: &mut Vec<(u32, &str)>| ends.len() < *size as usize;
    drop(world.ended.wait_while(ends, all).unwrap());
    0
}

unsafe extern "C" fn comm_abort(comm: Comm) -> Status {
    // SAFETY: one of ours.
    let Rank { rank, world, .. } = unsafe { Rank::of(comm) };
    world.end(*rank, "abort");
    0
}

unsafe extern "C" fn group_start() -> Status {
    called("ncclGroupStart");
    0
}

unsafe extern "C" fn send(
    from: *const c_void,
    bytes: usize,
    _: c_int,
    peer: c_int,
    comm: Comm,
    _: *mut c_void,
) -> Status {
    called("ncclSend");
    COMM.set(comm);
    OPEN.with_borrow_mut(|open| open.push(Message::Send(from, bytes, peer as u32)));
    0
}

unsafe extern "C" fn recv(
    to: *mut c_void,
    bytes: usize,
    _: c_int,
    peer: c_int,
    comm: Comm,
    _: *mut c_void,
) -> Status {
    called("ncclRecv");
    COMM.set(comm);
    OPEN.with_borrow_mut(|open| open.push(Message::Receive(to, bytes, peer as u32)));
    0
}

thread_local! {
    static COMM: Cell<Comm> = const { Cell::new(std::ptr::null_mut()) };
}

unsafe extern "C" fn group_end() -> Status {
    called("ncclGroupEnd");
    let mut all = OPEN.take();
    // Sends come before receives, so that data is there before a rank waits.
    all.sort_by_key(|message| matches!(message, Message::Receive(..)));
    // SAFETY: the messages' own.
    let rank = (!all.is_empty()).then(|| unsafe { Rank::of(COMM.get()) });
    rank.map_or(0, |rank| all.into_iter().map(|message| rank.carry(message)).max().unwrap_or(0))
}

unsafe extern "C" fn all_gather(
    from: *const c_void,
    to: *mut c_void,
    bytes: usize,
    kind: c_int,
    comm: Comm,
    _: *mut c_void,
) -> Status {
    called("ncclAllGather");
    // SAFETY: one of ours.
    let rank = unsafe { Rank::of(comm) };
    let place = |of: u32| to.wrapping_byte_add(of as usize * bytes);
    if kind != BYTES || from != place(rank.rank).cast_const() {
        return 1;
    }
    let others = || (0..rank.size).filter(|&other| other != rank.rank);
    let sent = others().map(|to| rank.carry(Message::Send(from, bytes, to))).max();
    let came = others().map(|of| rank.carry(Message::Receive(place(of), bytes, of))).max();
    sent.max(came).unwrap_or(0)
}

unsafe extern "C" fn error_string(_: Status) -> *const c_char {
    c"the stand-in's".as_ptr()
}

fn api() -> Api {
    Api {
        get_unique_id,
        comm_init_rank,
        comm_destroy,
        comm_abort,
        group_start,
        group_end,
        send,
        recv,
        all_gather,
        error_string,
        _library: None,
    }
}

/// Results of each rank's closure, by rank.
fn on_ranks<T: Send>(ranks: u32, run: impl Fn(Nccl) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = &run;
        let hosts = threads(ranks, TIMEOUT);
        let all: Vec<_> = hosts
            .into_iter()
            .map(|host| scope.spawn(move || run(Nccl::joined(host, api()).unwrap())))
            .collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A group that has no all-gather of its own: a message to and from each rank.
struct ByMessages(Arc<Nccl>);

impl Group for ByMessages {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn size(&self) -> u32 {
        self.0.size()
    }

    fn space(&self) -> MemorySpace {
        self.0.space()
    }

    fn share(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.0.share(mine)
    }

    fn exchange(
        &self,
        exchange: &Exchange,
        sources: &[DevSlice<'_>],
        sinks: &mut [DevSliceMut<'_>],
        stream: &Stream,
    ) -> Result<()> {
        self.0.exchange(exchange, sources, sinks, stream)
    }

    fn fail(&self, error: Error) -> Error {
        self.0.fail(error)
    }
}

#[test]
fn an_all_gather_is_one_call_and_brings_what_messages_bring() {
    for ranks in [1, 2, 5] {
        for bytes in [0, 24] {
            let stretch = |rank: u32| vec![rank as u8 + 1; bytes];
            let expected: Vec<u8> = (0..ranks).flat_map(stretch).collect();
            on_ranks(ranks, |group| {
                let group = Arc::new(group);
                let rank = group.rank();
                let stream = Backend::Cpu.open().unwrap().default_stream();
                let gathered = |group: &dyn Group, room: usize| {
                    CALLS.take();
                    let mut all = vec![0u8; expected.len()];
                    let at = rank as usize * bytes;
                    all[at..at + bytes].copy_from_slice(&stretch(rank));
                    // SAFETY: the fake moves host memory.
                    let mut to = unsafe {
                        DevSliceMut::from_raw(
                            MemorySpace::Device,
                            all.as_mut_ptr(),
                            room as u64,
                            fmha::ElemType::Bytes,
                        )
                    };
                    group.all_gather(bytes as u64, &mut to, &stream).map(|()| (all, CALLS.take()))
                };
                let all = expected.len();
                assert_eq!(gathered(&*group, all).unwrap(), (expected.clone(), vec!["ncclAllGather"]));
                let (messages, calls) = gathered(&ByMessages(group.clone()), all).unwrap();
                assert_eq!(messages, expected);
                let each = if bytes > 0 { ranks as usize - 1 } else { 0 };
                assert_eq!(calls.len(), 2 + 2 * each, "{calls:?}");
                if bytes > 0 {
                    let short = gathered(&*group, all - 1).unwrap_err();
                    assert_eq!(&*short.field, "exchange");
                }
            });
        }
    }
}

fn noise(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..count).flat_map(|_| next().to_bits().to_le_bytes()).collect()
}

/// Runs on an emulated device, whose kernels need NVRTC: without it, prints `absent` and checks nothing.
#[test]
fn a_step_of_decoding_is_one_call_of_nccl_with_the_bits_of_messages() {
    let device = match (Backend::Cuda { ordinal: 0, emulate: Some("sm_90a".into()) }).open() {
        Ok(device) => device,
        Err(reason) => return println!("absent: {reason}"),
    };
    let (tokens, queries, heads) = (384, 2, [4, 2]);
    let dims = Dims::batch(1).seqlens(queries, tokens).heads(heads[0], heads[1]).head_dim(64);
    let whole = FwdProblem::batch(DType::Bf16, dims).mask("b".parse().unwrap()).write_lse(true);
    // Unlike lengths, and a rank that has none.
    let keys = Partition::new(tokens, vec![vec![0..200], vec![], vec![200..tokens]]).unwrap();
    if let Err(reason) = device.plan_fwd(&whole.clone().validate().unwrap(), &PlanOptions::default()) {
        return println!("absent: {reason}");
    }
    let row = |heads: u32| u64::from(heads) * 128;
    let [q, k, v] = [(1, queries, heads[0]), (2, tokens, heads[1]), (3, tokens, heads[1])]
        .map(|(seed, rows, heads)| noise(seed, (rows * heads * 64) as usize));
    let problem = Problem::new(whole, Partition::replicated(queries, 3)).keys(keys.clone());
    let uploaded = |bytes: &[u8]| {
        let mut buffer = device.memory().alloc(bytes.len().max(1) as u64).unwrap();
        device.memory().upload(bytes, &mut buffer).unwrap();
        buffer
    };
    let results = on_ranks(3, |group| {
        DEVICE.set(Some(device.clone()));
        let group = Arc::new(group);
        let rank = group.rank();
        let own = |bytes: &[u8]| uploaded(&keys.split(bytes, 1, row(heads[1]), rank));
        let (q, k, v) = (uploaded(&q), own(&k), own(&v));
        let stream = device.stream().unwrap();
        let decoded = |group: Arc<dyn Group>| {
            let options = Options::default().scheme(Scheme::Decode);
            let mut plan = FwdPlan::new(&problem, group, &device, &options).unwrap();
            // Twice: the second one writes where the first one was read.
            [(); 2].map(|()| {
                let rows = u64::from(queries) * row(heads[0]);
                let (mut o, mut lse) =
                    (uploaded(&vec![0xffu8; rows as usize]), uploaded(&vec![0xffu8; (rows / 32) as usize]));
                let mut args =
                    FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut()).lse(lse.slice_mut());
                CALLS.take();
                plan.run(&mut args, &stream).unwrap();
                stream.synchronize().unwrap();
                let calls = CALLS.take();
                let bits = [&o, &lse].map(|of| read(of.as_ptr().cast_const().cast(), of.bytes() as usize));
                (bits, calls)
            })
        };
        let at_once = decoded(group.clone());
        let messages = decoded(Arc::new(ByMessages(group)));
        for ((bits, calls), (expected, sent)) in at_once.iter().zip(&messages) {
            assert!(bits == expected, "rank {rank} has other bits");
            assert_eq!((&calls[..], sent.len()), (&["ncclAllGather"][..], 6), "rank {rank}: {sent:?}");
        }
        let [(first, _), (second, _)] = at_once;
        assert!(first == second, "rank {rank} has other bits again");
        first
    });
    assert!(results.iter().all(|bits| *bits == results[0]), "ranks have other bits");
    // Softmax over all keys in f64.
    let number = |bytes: &[u8], at: usize| {
        f64::from(bf16::from_bits(u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]])))
    };
    for (i, head) in (0..queries as usize).flat_map(|i| (0..heads[0] as usize).map(move |head| (i, head))) {
        let of = |j: usize| (j * heads[1] as usize + head / 2) * 64;
        let seen = (tokens - queries) as usize + i + 1;
        let scores: Vec<f64> = (0..seen)
            .map(|j| {
                (0..64)
                    .map(|d| number(&q, (i * heads[0] as usize + head) * 64 + d) * number(&k, of(j) + d))
                    .sum::<f64>()
                    / 8.0
            })
            .collect();
        let sum: f64 = scores.iter().map(|score| score.exp()).sum();
        let at = 4 * (head * queries as usize + i);
        let lse = f32::from_le_bytes(results[0][1][at..at + 4].try_into().unwrap());
        assert!((f64::from(lse) - sum.ln()).abs() < 1e-4, "{lse}, {}", sum.ln());
        for d in 0..64 {
            let o: f64 =
                scores.iter().enumerate().map(|(j, score)| score.exp() / sum * number(&v, of(j) + d)).sum();
            let given = number(&results[0][0], (i * heads[0] as usize + head) * 64 + d);
            assert!((given - o).abs() < 4e-3, "{given}, {o}");
        }
    }
}

/// Errors of three ranks. The ranks in `of_96` plan, or run, a call of 96 keys where the others run one of
/// 48.
fn hear_of(of_96: &[u32], plans: bool) -> Vec<Error> {
    let fields =
        |keys: &str| vec![("sink".to_owned(), "false".to_owned()), ("seqlen_k".to_owned(), keys.to_owned())];
    let start = std::time::Instant::now();
    let heard = on_ranks(3, |group| {
        let [short, long]: [Arc<[_]>; 2] = ["48", "96"].map(|keys| fields(keys).into());
        for planned in [&short, &long] {
            agree(&group, &Ok(planned.to_vec())).unwrap();
        }
        for planned in [&short, &long, &long, &short] {
            group.begins(planned).unwrap();
        }
        let is_of_96 = of_96.contains(&group.rank());
        if is_of_96 && plans {
            return agree(&group, &Ok(fields("96"))).unwrap_err();
        }
        if plans {
            // Once all ranks have begun a call, no rank is at another call.
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(group.failure(), None);
        }
        group.begins(if is_of_96 { &long } else { &short }).unwrap();
        // No rank waits on the host for another one, or reads its messages, as on devices.
        while group.failure().is_none() && start.elapsed() < TIMEOUT / 4 {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Later calls fail too.
        let stream = Backend::Cpu.open().unwrap().default_stream();
        group.exchange(&Exchange::default(), &[], &mut [], &stream).unwrap_err()
    });
    assert!(start.elapsed() < TIMEOUT / 4);
    heard
}

#[test]
fn a_rank_that_plans_where_the_others_run_is_named_with_the_field_long_before_the_timeout() {
    for (of_96, text) in [
        (vec![2], "rank 2 plans a problem of seqlen_k 96, where a call of 48 runs"),
        (vec![0, 1], "rank 2 runs a call of seqlen_k 48, where most plan a problem of 96"),
    ] {
        let named = Error::new(2, "seqlen_k", text);
        assert!(hear_of(&of_96, true).iter().all(|error| *error == named), "{of_96:?}");
    }
}

#[test]
fn a_rank_that_runs_another_call_than_the_others_is_named_with_the_field_long_before_the_timeout() {
    for (of_96, text) in [
        (vec![2], "rank 2 says seqlen_k 96, but most say 48"),
        (vec![0, 1], "rank 2 says seqlen_k 48, but most say 96"),
    ] {
        let named = Error::new(2, "seqlen_k", text);
        let heard = hear_of(&of_96, false);
        assert!(heard.iter().all(|error| *error == named), "{of_96:?}: {heard:?}");
    }
}

#[test]
fn a_rank_that_tells_too_few_bytes_of_a_communicator_is_refused_by_their_number() {
    let mut hosts = threads(2, TIMEOUT).into_iter();
    let (first, second) = (hosts.next().unwrap(), hosts.next().unwrap());
    let error = std::thread::scope(|scope| {
        scope.spawn(move || first.share(&[7; 5]).map(|_| first));
        Nccl::joined(second, api()).err().unwrap()
    });
    assert_eq!(error, Error::new(0, "nccl", "rank 0 told 5 bytes of a communicator, not 128"));
}

/// The ranks of a group of NCCL whose timeout is this, and how their communicators end.
fn ranks_of(ranks: u32, timeout: Duration) -> (Vec<Nccl>, Arc<World>) {
    let all: Vec<Nccl> = std::thread::scope(|scope| {
        let joined = threads(ranks, timeout)
            .into_iter()
            .map(|host| scope.spawn(move || Nccl::joined(host, api()).unwrap()));
        let joined: Vec<_> = joined.collect();
        joined.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let comm = all[0].held.comm.lock().unwrap().unwrap();
    // SAFETY: `comm` is one of the fake's.
    let world = unsafe { Rank::of(comm) }.world.clone();
    (all, world)
}

#[test]
fn ranks_that_leave_destroy_their_communicator_together() {
    let (all, world) = ranks_of(3, TIMEOUT);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (late, rank) in (0..).zip(all) {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(60 * late));
                drop(rank);
            });
        }
    });
    assert!(start.elapsed() < TIMEOUT / 4, "{:?}", start.elapsed());
    let mut ends = world.ends.lock().unwrap().clone();
    ends.sort_unstable();
    assert_eq!(ends, [(0, "destroy"), (1, "destroy"), (2, "destroy")]);
}

#[test]
fn a_rank_leaves_by_the_timeout_where_another_stands_still() {
    let timeout = Duration::from_millis(400);
    let (mut all, world) = ranks_of(2, timeout);
    let stands_still = all.pop().unwrap();
    let start = Instant::now();
    drop(all);
    assert!(start.elapsed() >= timeout && start.elapsed() < GRACE + timeout, "{:?}", start.elapsed());
    assert_eq!(*world.ends.lock().unwrap(), [(0, "abort")]);
    drop(stands_still);
    assert!(world.has_aborted(0));
}

#[test]
fn a_rank_leaves_at_once_where_another_has_failed() {
    let (mut all, world) = ranks_of(2, TIMEOUT);
    let failed = all.pop().unwrap();
    failed.fail(Error::new(1, "group", "it fails on purpose"));
    let start = Instant::now();
    drop(all);
    assert!(start.elapsed() < TIMEOUT / 4, "{:?}", start.elapsed());
    assert!(world.has_aborted(0));
}

#[test]
fn a_call_that_waits_for_a_rank_that_has_failed_is_aborted() {
    let (mut all, world) = ranks_of(2, TIMEOUT);
    let failed = all.pop().unwrap();
    let waits = &all[0];
    let start = Instant::now();
    std::thread::scope(|scope| {
        let queues = scope.spawn(|| {
            let stream = Backend::Cpu.open().unwrap().default_stream();
            let mut room = [0u8; 16];
            // SAFETY: the fake moves host memory.
            let mut all = unsafe {
                DevSliceMut::from_raw(MemorySpace::Device, room.as_mut_ptr(), 16, fmha::ElemType::Bytes)
            };
            waits.all_gather(8, &mut all, &stream)
        });
        while waits.held.queueing.try_lock().is_ok() && !queues.is_finished() {
            std::thread::yield_now();
        }
        failed.fail(Error::new(1, "group", "it fails on purpose"));
        let said = queues.join().unwrap().unwrap_err();
        assert_eq!((said.rank, &*said.text), (1, "it fails on purpose"));
    });
    assert!(start.elapsed() < TIMEOUT / 4, "{:?}", start.elapsed());
    assert!(world.has_aborted(0));
}
