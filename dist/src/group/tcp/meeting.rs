//! Meeting of ranks: one deadline for all of it, and no connection that delays another one.

use std::io;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::proof::{
    ADDRESS_BYTES, Answer, Hello, Key, Letter, Secret, Talk, address_of_bytes, address_to_bytes, random,
};
use super::{Place, SECRET};
use crate::error::{Error, Result};

/// Time in which a connection must say and prove its rank. Otherwise it is closed.
const GREETING: Duration = Duration::from_secs(5);

/// Time for a last word to each rank of a meeting that has failed.
const LAST_WORD: Duration = Duration::from_millis(500);

/// Largest number of connections that are checked at once.
const MOST_HEARD: usize = 256;

/// A connection to each other rank; `None` for this one.
pub(super) type Streams = Vec<Option<TcpStream>>;

/// A rank that has proved its identity, and its address.
struct Seat {
    talk: Talk,
    listens: SocketAddr,
}

/// Outcome of a connection.
enum Heard {
    Rank(Hello, Talk, SocketAddr),
    /// Rank that the connection names, without knowledge of the secret.
    Stranger(u32, SocketAddr),
    /// Bytes of another program, too few of them, or too late.
    Nothing,
}

pub(super) struct Meeting<'a> {
    rank: u32,
    size: u32,
    end: Instant,
    secret: Option<&'a Secret>,
    listen: Option<IpAddr>,
    /// One half of the meeting has failed, so the other one need not go on.
    gave_up: AtomicBool,
}

impl<'a> Meeting<'a> {
    pub(super) fn new(
        (rank, size): (u32, u32),
        end: Instant,
        secret: Option<&'a Secret>,
        listen: Option<IpAddr>,
    ) -> Self {
        Self { rank, size, end, secret, listen, gave_up: AtomicBool::new(false) }
    }

    /// Connections to all other ranks.
    pub(super) fn meet(&self, place: &Place) -> Result<Streams> {
        if self.rank == 0 { self.as_root(place) } else { self.as_member(place) }
    }

    fn system(&self, error: &io::Error) -> Error {
        Error::new(self.rank, "group", error.to_string())
    }

    fn is_over(&self) -> bool {
        self.gave_up.load(Ordering::Relaxed) || Instant::now() >= self.end
    }

    fn pause(&self) {
        std::thread::sleep(Duration::from_millis(2));
    }

    /// Time left for the meeting.
    fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    /// Addresses of a name, possibly from a name server.
    fn resolve(&self, name: &str) -> io::Result<Vec<SocketAddr>> {
        if let Ok(address) = name.parse() {
            return Ok(vec![address]);
        }
        let (tells, told) = channel();
        let asked = name.to_owned();
        // The system's resolver takes no deadline: the thread that waits for it is not waited for.
        std::thread::Builder::new().name("fmha-resolve".to_owned()).spawn(move || {
            let _ = tells.send(asked.to_socket_addrs().map(Iterator::collect::<Vec<_>>));
        })?;
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("`{name}` has no address in time"));
        let addresses = told.recv_timeout(self.left()).map_err(late)??;
        if addresses.is_empty() {
            return Err(io::Error::other(format!("`{name}` is no address")));
        }
        Ok(addresses)
    }

    /// Without a secret ranks meet on the loopback alone.
    fn may_meet_at(&self, addresses: &[SocketAddr]) -> Result<()> {
        let is_beyond = |at: &&SocketAddr| !at.ip().to_canonical().is_loopback();
        match (self.secret, addresses.iter().find(is_beyond)) {
            (None, Some(address)) => {
                let text = format!(
                    "{address} is not on the loopback, and there is no secret that tells ranks from others: \
                     set {SECRET}, the same on every rank"
                );
                Err(Error::new(self.rank, "secret", text))
            }
            _ => Ok(()),
        }
    }

    fn listener(&self, at: &[SocketAddr]) -> Result<TcpListener> {
        let cannot = |error| self.system(&io::Error::other(format!("cannot listen at {at:?}: {error}")));
        let listener = TcpListener::bind(at).map_err(cannot)?;
        listener.set_nonblocking(true).map_err(|error| self.system(&error))?;
        Ok(listener)
    }

    fn address(&self, listener: &TcpListener) -> Result<SocketAddr> {
        listener.local_addr().map_err(|error| self.system(&error))
    }

    /// Accepts the `expected` ranks. If the meeting fails, all other ranks get the reason.
    fn accept(
        &self,
        listener: &TcpListener,
        key: &Arc<Key>,
        expected: Range<u32>,
    ) -> Result<Vec<Option<Seat>>> {
        let mut seats: Vec<Option<Seat>> = (0..self.size).map(|_| None).collect();
        match self.fill(&mut seats, listener, key, expected) {
            Ok(()) => Ok(seats),
            Err(error) => {
                dismiss(&seats, key, &error);
                Err(error)
            }
        }
    }

    fn fill(
        &self,
        seats: &mut [Option<Seat>],
        listener: &TcpListener,
        key: &Arc<Key>,
        expected: Range<u32>,
    ) -> Result<()> {
        let (tells, told): (Sender<Heard>, Receiver<Heard>) = channel();
        let mut in_hearing = 0;
        let mut stranger = None;
        loop {
            while let Ok(heard) = told.try_recv() {
                in_hearing -= 1;
                match heard {
                    Heard::Rank(hello, talk, listens) => {
                        self.seat(seats, key, &expected, &hello, talk, listens)?;
                    }
                    Heard::Stranger(rank, from) => stranger = Some((rank, from)),
                    Heard::Nothing => {}
                }
            }
            let Some(missing) = expected.clone().find(|&rank| seats[rank as usize].is_none()) else { break };
            let mut heard_one = false;
            if in_hearing < MOST_HEARD {
                match listener.accept() {
                    Ok((stream, from)) => {
                        self.hear(stream, from, key, tells.clone())?;
                        in_hearing += 1;
                        heard_one = true;
                    }
                    Err(error) if is_of_the_other_side(&error) => {}
                    Err(error) => return Err(self.system(&error)),
                }
            }
            if self.is_over() {
                let why = match stranger {
                    Some((rank, from)) => format!(
                        "; {from} came as rank {rank} and does not know the secret ({SECRET} must be the same on every rank)"
                    ),
                    None => String::new(),
                };
                let text = format!("rank {missing} has not come in time{why}");
                return Err(Error::new(missing, "group", text));
            }
            if !heard_one {
                self.pause();
            }
        }
        for (rank, seat) in (0..).zip(&*seats) {
            if seat.as_ref().is_some_and(|seat| seat.talk.is_closed()) {
                return Err(has_left(rank, "it closed its connection"));
            }
        }
        Ok(())
    }

    /// Checks a new connection on a thread of its own, which ends by itself.
    fn hear(&self, stream: TcpStream, from: SocketAddr, key: &Arc<Key>, tells: Sender<Heard>) -> Result<()> {
        let (whom, key) = ((self.rank, self.size), key.clone());
        let end = self.end.min(Instant::now() + GREETING);
        let hears = move || {
            let heard = stream.set_nonblocking(false).and_then(|()| Talk::accept(stream, whom, &key, end));
            let _ = tells.send(match heard {
                Err(_) => Heard::Nothing,
                Ok((hello, talk, true)) => {
                    let mut listens = hello.listens;
                    if listens.ip().is_unspecified() {
                        listens.set_ip(from.ip());
                    }
                    Heard::Rank(hello, talk, listens)
                }
                Ok((hello, talk, false)) => {
                    // The MAC of the refusal shows the other side that the secrets differ.
                    let error = Error::new(hello.rank, "secret", "the secrets differ");
                    let _ = talk.send(&key, &Letter::Refusal(error), end);
                    Heard::Stranger(hello.rank, from)
                }
            });
        };
        let thread = std::thread::Builder::new().name("fmha-hear".to_owned()).spawn(hears);
        thread.map(drop).map_err(|error| self.system(&error))
    }

    /// Seats a rank that knows the secret, or finds what is wrong with it.
    fn seat(
        &self,
        seats: &mut [Option<Seat>],
        key: &Key,
        expected: &Range<u32>,
        hello: &Hello,
        talk: Talk,
        listens: SocketAddr,
    ) -> Result<()> {
        let &Hello { rank, size, wants, .. } = hello;
        let wrong = |field: &str, text: String| {
            let error = Error::new(rank, field, text);
            let _ = talk.send(key, &Letter::Refusal(error.clone()), Instant::now() + LAST_WORD);
            Err(error)
        };
        if size != self.size {
            return wrong("size", format!("rank {rank} is one of {size}, not of {}", self.size));
        }
        if wants != self.rank || !expected.contains(&rank) {
            let text = format!("rank {rank} looks for rank {wants}, and has come to rank {}", self.rank);
            return wrong("rank", text);
        }
        let seat = &mut seats[rank as usize];
        // A member whose connection has closed may come again.
        if seat.as_ref().is_some_and(|seat| !seat.talk.is_closed()) {
            return wrong("rank", format!("rank {rank} has come twice"));
        }
        *seat = match talk.send(key, &Letter::Welcome, Instant::now() + LAST_WORD) {
            Ok(()) => Some(Seat { talk, listens }),
            // The rank may connect again.
            Err(_) => None,
        };
        Ok(())
    }

    /// Connects to `peer`, which may not listen yet, and proves this rank's identity. `found` gives the
    /// addresses and the key of `peer`; `listens` gives this rank's address as seen over this stream.
    fn reach(
        &self,
        peer: u32,
        found: impl Fn() -> Result<(Vec<SocketAddr>, Arc<Key>), Tried>,
        mut listens: impl FnMut(&TcpStream) -> Result<SocketAddr>,
    ) -> Result<(Talk, Arc<Key>)> {
        let mut attempt = || {
            let (addresses, key) = found()?;
            let mut last = Tried::Again(io::Error::other("it has no address"));
            for address in addresses {
                let reached = TcpStream::connect_timeout(&address, self.left()).map_err(Tried::Again);
                let talked = reached.and_then(|stream| {
                    let listens = listens(&stream).map_err(Tried::Failed)?;
                    let hello = Hello { rank: self.rank, size: self.size, wants: peer, listens };
                    Talk::connect(stream, &hello, &key, self.end).map_err(Tried::Again)
                });
                match talked {
                    Ok(Answer::Welcome(talk)) => return Ok((talk, key)),
                    Ok(Answer::Refused(error)) => return Err(Tried::Failed(error)),
                    Ok(Answer::OtherSecret) => {
                        let text = format!(
                            "rank {peer} at {address} does not know the secret of rank {}: {SECRET} must be the \
                             same on every rank",
                            self.rank
                        );
                        return Err(Tried::Failed(Error::new(peer, "secret", text)));
                    }
                    Err(failed @ Tried::Failed(_)) => return Err(failed),
                    Err(again) => last = again,
                }
            }
            Err(last)
        };
        loop {
            match attempt() {
                Ok(reached) => return Ok(reached),
                Err(Tried::Failed(error)) => return Err(error),
                Err(Tried::Again(_)) if !self.is_over() => self.pause(),
                Err(Tried::Again(error)) => {
                    return Err(Error::new(peer, "group", format!("rank {peer} is not there: {error}")));
                }
            }
        }
    }

    fn as_root(&self, place: &Place) -> Result<Streams> {
        let (listener, key) = match place {
            Place::Address(name) => {
                let mut addresses = self.resolve(name).map_err(|error| self.system(&error))?;
                if let (Some(own), Some(first)) = (self.listen, addresses.first()) {
                    addresses = vec![SocketAddr::new(own, first.port())];
                }
                self.may_meet_at(&addresses)?;
                (self.listener(&addresses)?, Key::new(self.secret, &[]))
            }
            Place::File(path) => {
                let own = self.listen.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
                let listener = self.listener(&[SocketAddr::new(own, 0)])?;
                let drawn = random().map_err(|error| self.system(&error))?;
                announce(path, self.address(&listener)?, &drawn).map_err(|error| {
                    Error::new(self.rank, "group", format!("{}: {error}", path.display()))
                })?;
                (listener, Key::new(self.secret, &drawn))
            }
        };
        let key = Arc::new(key);
        let seats = self.accept(&listener, &key, 1..self.size)?;
        let nowhere = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let listens = |seat: &Option<Seat>| seat.as_ref().map_or(nowhere, |seat| seat.listens);
        let list = Letter::List(seats.iter().flat_map(|seat| address_to_bytes(listens(seat))).collect());
        for (rank, seat) in (0..).zip(&seats) {
            let sent = seat.as_ref().map_or(Ok(()), |seat| seat.talk.send(&key, &list, self.end));
            if let Err(error) = sent {
                let error = has_left(rank, &error.to_string());
                dismiss(&seats, &key, &error);
                return Err(error);
            }
        }
        Ok(seats.into_iter().map(|seat| seat.map(|seat| seat.talk.stream)).collect())
    }

    fn as_member(&self, place: &Place) -> Result<Streams> {
        let find = || match place {
            Place::Address(name) => {
                let addresses = self.resolve(name).map_err(Tried::Again)?;
                self.may_meet_at(&addresses).map_err(Tried::Failed)?;
                Ok((addresses, Arc::new(Key::new(self.secret, &[]))))
            }
            Place::File(path) => {
                let (address, drawn) = announced(path).map_err(Tried::Again)?;
                Ok((vec![address], Arc::new(Key::new(self.secret, &drawn))))
            }
        };
        // Address of the listener: the one by which this rank reaches the root, or the caller's.
        let mut listener: Option<TcpListener> = None;
        let listens = |stream: &TcpStream| {
            let mut own = stream.local_addr().map_err(|error| self.system(&error))?;
            own.set_port(0);
            if let Some(address) = self.listen {
                own = SocketAddr::new(address, 0);
            }
            match &listener {
                Some(listener) if self.address(listener)?.ip() == own.ip() => self.address(listener),
                _ => self.address(listener.insert(self.listener(&[own])?)),
            }
        };
        let (root, key) = self.reach(0, find, listens)?;
        let gone =
            |error: &io::Error| Error::new(0, "group", format!("rank 0 sent no list of the ranks: {error}"));
        let list = match root.receive(&key, self.size as usize * ADDRESS_BYTES, self.end) {
            Ok(Some(Letter::List(list))) if list.len() == self.size as usize * ADDRESS_BYTES => list,
            Ok(Some(Letter::Refusal(error))) => return Err(error),
            Ok(Some(Letter::List(list))) => {
                let text = format!("rank 0 lists {} ranks of {}", list.len() / ADDRESS_BYTES, self.size);
                return Err(Error::new(0, "group", text));
            }
            Ok(_) => return Err(gone(&io::Error::other("what came is not of one who knows the secret"))),
            Err(error) => return Err(gone(&error)),
        };
        let (addresses, _) = list.as_chunks();
        let addresses: Vec<SocketAddr> = addresses.iter().map(address_of_bytes).collect();
        let Some(listener) = listener else { return Err(gone(&io::Error::other("nobody was asked"))) };
        let far_root = root.stream.peer_addr().is_ok_and(|root| !root.ip().to_canonical().is_loopback());
        let own = self.address(&listener)?;
        let (seats, below) = std::thread::scope(|scope| {
            let above = scope.spawn(|| {
                let above = self.accept(&listener, &key, self.rank + 1..self.size);
                self.gave_up.fetch_or(above.is_err(), Ordering::Relaxed);
                above
            });
            let below: Result<Vec<_>> = (1..self.rank)
                .map(|peer| {
                    let address = addresses[peer as usize];
                    if far_root && address.ip().is_loopback() {
                        let text = format!(
                            "rank {peer} listens at {address}, which other hosts do not reach: it needs an \
                             address to listen at ({})",
                            super::LISTEN
                        );
                        return Err(Error::new(peer, "listen", text));
                    }
                    self.reach(peer, || Ok((vec![address], key.clone())), |_| Ok(own))
                })
                .collect();
            self.gave_up.fetch_or(below.is_err(), Ordering::Relaxed);
            let above = above.join().map_err(|_| {
                Error::new(self.rank, "group", "the thread that waits for higher ranks has panicked")
            })?;
            // The thread that fails first has the cause; the other one is told to give up.
            match (above, below) {
                (Ok(above), Ok(below)) => Ok((above, below)),
                (_, Err(error)) | (Err(error), _) => Err(error),
            }
        })?;
        let mut streams: Streams = seats.into_iter().map(|seat| seat.map(|seat| seat.talk.stream)).collect();
        for (peer, (talk, _)) in (1..).zip(below) {
            streams[peer] = Some(talk.stream);
        }
        streams[0] = Some(root.stream);
        Ok(streams)
    }
}

/// Reason why another rank was not reached.
enum Tried {
    /// The rank may be there later.
    Again(io::Error),
    Failed(Error),
}

/// Whether `accept` may go on: no connection waits, or the one that waited is gone.
fn is_of_the_other_side(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | WouldBlock)
}

fn has_left(rank: u32, how: &str) -> Error {
    Error::new(rank, "group", format!("rank {rank} has left the meeting: {how}"))
}

/// Sends every rank that has connected the reason why there is no group.
fn dismiss(seats: &[Option<Seat>], key: &Key, error: &Error) {
    let end = Instant::now() + LAST_WORD;
    for seat in seats.iter().flatten() {
        // A rank that is gone gets nothing.
        let _ = seat.talk.send(key, &Letter::Refusal(error.clone()), end);
    }
}

/// Writes where rank 0 listens and the secret of this meeting into a file that its owner alone reads.
fn announce(path: &Path, address: SocketAddr, drawn: &[u8]) -> io::Result<()> {
    let mut beside = path.to_owned().into_os_string();
    beside.push(".new");
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    // One that an earlier meeting left there may be readable to others.
    let _ = std::fs::remove_file(&beside);
    let mut text = format!("{address}\n");
    text.extend(drawn.iter().map(|byte| format!("{byte:02x}")));
    options.open(&beside)?.write_all(text.as_bytes())?;
    // Renaming publishes the file whole, so that no rank reads half of it.
    std::fs::rename(&beside, path)
}

/// Address and secret that [`announce`] has written.
fn announced(path: &Path) -> io::Result<(SocketAddr, Vec<u8>)> {
    let text = std::fs::read_to_string(path)?;
    let of = |text: &str| {
        let (address, drawn) = text.split_once('\n')?;
        let byte = |at| u8::from_str_radix(drawn.get(at..at + 2)?, 16).ok();
        let drawn: Option<Vec<u8>> = (0..drawn.len()).step_by(2).map(byte).collect();
        Some((address.parse().ok()?, drawn.filter(|drawn| drawn.len() == 32)?))
    };
    of(&text).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{} has no address and no secret", path.display()))
    })
}
