//! Ranks that are processes, of one host or several, over TCP.
//!
//! Rank 0 listens where the rendezvous says; every other rank tells it where it listens itself, gets the list, and connects to
//! the ranks below it. A connection has a thread that reads and one that writes, so sending never waits. Nothing is encrypted
//! and nobody asks who connects: as with NCCL, the network is one that is trusted.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Host;
use super::host::{Frame, Link, Mailbox};
use crate::error::{Error, Result};

/// Where the ranks of a group find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    /// Which rank this is.
    pub rank: u32,
    /// How many there are.
    pub size: u32,
    place: Place,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// Rank 0 listens at this host and port.
    Address(String),
    /// Rank 0 writes into this file where it listens.
    File(PathBuf),
}

impl Rendezvous {
    /// Rank 0 listens at `address`, `host:port`.
    #[must_use]
    pub fn at(address: impl Into<String>, rank: u32, size: u32) -> Self {
        Self { rank, size, place: Place::Address(address.into()) }
    }

    /// Rank 0 listens at a port of this host that is free, and writes it into a file that does not exist yet and that every
    /// rank sees.
    #[must_use]
    pub fn file(path: impl AsRef<Path>, rank: u32, size: u32) -> Self {
        Self { rank, size, place: Place::File(path.as_ref().to_owned()) }
    }

    /// What torchrun sets: `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. The port above is taken, since torch's own
    /// store listens at that one.
    ///
    /// # Errors
    /// The variable that is missing or no number, with its text.
    pub fn from_env() -> Result<Self> {
        Self::from_words(|name| std::env::var(name).map_err(|error| error.to_string()))
    }

    fn from_words(word: impl Fn(&str) -> Result<String, String>) -> Result<Self> {
        let wrong = |name: &str, text: String| Error::new(0, name, format!("{name} {text}"));
        let text = |name: &str| word(name).map_err(|error| wrong(name, format!("is not to be had: {error}")));
        let number = |name: &str| -> Result<u32> {
            let text = text(name)?;
            text.parse().map_err(|error| wrong(name, format!("is `{text}`: {error}")))
        };
        let port = number("MASTER_PORT")?;
        let above = port.checked_add(1).and_then(|port| u16::try_from(port).ok());
        let above =
            above.ok_or_else(|| wrong("MASTER_PORT", format!("is {port}, and the port above is none")))?;
        Ok(Self::at(format!("{}:{above}", text("MASTER_ADDR")?), number("RANK")?, number("WORLD_SIZE")?))
    }
}

/// Joins the group, and waits for all of its ranks, at most `timeout` long. The same timeout then says when a rank is late.
///
/// # Errors
/// The rank that has not come, or what the system said.
pub fn connect(rendezvous: &Rendezvous, timeout: Duration) -> Result<Host> {
    let Rendezvous { rank, size, ref place } = *rendezvous;
    if rank >= size {
        return Err(Error::new(rank, "rank", format!("rank {rank} is not below the group's size {size}")));
    }
    if size > MAX_RANKS {
        return Err(Error::new(rank, "size", format!("{size} ranks are more than {MAX_RANKS}")));
    }
    let now = Instant::now();
    let end = now.checked_add(timeout).unwrap_or(now + LONGEST);
    let meet = Meeting { rank, size, end };
    let streams = if rank == 0 { meet.as_root(place) } else { meet.as_member(place) }?;
    let mailbox = Mailbox::new(size);
    let mut writers = Vec::new();
    for (peer, stream) in (0..size).zip(streams) {
        writers.push(match stream {
            None => None,
            Some(stream) => {
                Some(Connection::new(peer, stream, &mailbox).map_err(|error| meet.system(&error))?)
            }
        });
    }
    Ok(Host::new(rank, size, timeout, mailbox, Box::new(Mesh { writers })))
}

/// Ranks of a group at most: each has a connection and two threads for each other one.
pub const MAX_RANKS: u32 = 1 << 14;

/// As long as a meeting lasts whose timeout is beyond the clock: a century.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// How long who connects may take to say who it is: what never does would keep ranks waiting that come behind it.
const HELLO: Duration = Duration::from_secs(2);

/// One to each other rank, none to itself.
type Streams = Vec<Option<TcpStream>>;

/// What the first bytes of a connection say: who connects, of how many, and at which port it listens.
struct Hello {
    rank: u32,
    size: u32,
    port: u16,
}

const MAGIC: u32 = 0xF3A1_D157;

impl Hello {
    fn write(&self, to: &mut TcpStream) -> io::Result<()> {
        let words = [MAGIC, self.rank, self.size, self.port.into()];
        to.write_all(bytemuck::bytes_of(&words.map(u32::to_le)))
    }

    fn read(from: &mut TcpStream) -> io::Result<Self> {
        let mut words = [0u32; 4];
        from.read_exact(bytemuck::bytes_of_mut(&mut words))?;
        let [magic, rank, size, port] = words.map(u32::from_le);
        match u16::try_from(port) {
            Ok(port) if magic == MAGIC => Ok(Self { rank, size, port }),
            _ => Err(io::Error::other("another program has connected")),
        }
    }
}

struct Meeting {
    rank: u32,
    size: u32,
    end: Instant,
}

impl Meeting {
    fn system(&self, error: &io::Error) -> Error {
        Error::new(self.rank, "group", error.to_string())
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.end
    }

    fn pause(&self) {
        std::thread::sleep(Duration::from_millis(2));
    }

    fn listen(&self, at: impl ToSocketAddrs + std::fmt::Debug) -> Result<TcpListener> {
        let cannot = |error| self.system(&io::Error::other(format!("cannot listen at {at:?}: {error}")));
        let listener = TcpListener::bind(&at).map_err(cannot)?;
        listener.set_nonblocking(true).map_err(|error| self.system(&error))?;
        Ok(listener)
    }

    fn port(&self, listener: &TcpListener) -> Result<u16> {
        Ok(listener.local_addr().map_err(|error| self.system(&error))?.port())
    }

    /// How long the meeting lasts from here on.
    fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    /// The ranks that `expected` says, each by its own hello and port.
    fn accept(
        &self,
        listener: &TcpListener,
        expected: std::ops::Range<u32>,
    ) -> Result<(Streams, Vec<SocketAddr>)> {
        let mut streams: Streams = (0..self.size).map(|_| None).collect();
        let mut addresses = vec![SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0); self.size as usize];
        while let Some(missing) = expected.clone().find(|&rank| streams[rank as usize].is_none()) {
            match listener.accept() {
                Ok((mut stream, mut address)) => {
                    let soon = self.left().min(HELLO);
                    let hello =
                        stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(soon)));
                    let hello = hello.and_then(|()| Hello::read(&mut stream));
                    // Who is none of the group is not answered.
                    let Ok(hello) = hello else { continue };
                    if hello.size != self.size {
                        let text =
                            format!("rank {} is one of {}, not of {}", hello.rank, hello.size, self.size);
                        return Err(Error::new(hello.rank, "size", text));
                    }
                    if !expected.contains(&hello.rank) || streams[hello.rank as usize].is_some() {
                        let text = format!("rank {} has come twice, or to the wrong rank", hello.rank);
                        return Err(Error::new(hello.rank, "rank", text));
                    }
                    address.set_port(hello.port);
                    addresses[hello.rank as usize] = address;
                    streams[hello.rank as usize] = Some(stream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !self.is_over() => self.pause(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(Error::new(missing, "group", format!("rank {missing} has not come in time")));
                }
                Err(error) => return Err(self.system(&error)),
            }
        }
        Ok((streams, addresses))
    }

    /// Connects to `peer`, which may not listen yet.
    fn reach(&self, peer: u32, address: impl Fn() -> io::Result<SocketAddr>, port: u16) -> Result<TcpStream> {
        loop {
            let hello = Hello { rank: self.rank, size: self.size, port };
            let reached = address().and_then(|address| {
                let mut stream = TcpStream::connect_timeout(&address, self.left())?;
                stream.set_read_timeout(Some(self.left()))?;
                hello.write(&mut stream).map(|()| stream)
            });
            match reached {
                Ok(stream) => return Ok(stream),
                Err(_) if !self.is_over() => self.pause(),
                Err(error) => {
                    return Err(Error::new(peer, "group", format!("rank {peer} is not there: {error}")));
                }
            }
        }
    }

    fn as_root(&self, place: &Place) -> Result<Streams> {
        let listener = match place {
            Place::Address(address) => self.listen(address)?,
            Place::File(path) => {
                let listener = self.listen((Ipv4Addr::LOCALHOST, 0))?;
                let mut beside = path.clone().into_os_string();
                beside.push(".new");
                // Renamed, so that no rank reads half of it.
                std::fs::write(&beside, format!("127.0.0.1:{}", self.port(&listener)?))
                    .and_then(|()| std::fs::rename(&beside, path))
                    .map_err(|error| {
                        Error::new(self.rank, "group", format!("{}: {error}", path.display()))
                    })?;
                listener
            }
        };
        let (mut streams, addresses) = self.accept(&listener, 1..self.size)?;
        let list = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        for stream in streams.iter_mut().flatten() {
            let length = (list.len() as u64).to_le_bytes();
            let written = stream.write_all(&length).and_then(|()| stream.write_all(list.as_bytes()));
            written.map_err(|error| self.system(&error))?;
        }
        Ok(streams)
    }

    fn as_member(&self, place: &Place) -> Result<Streams> {
        // All of the root's interfaces are asked for, since this rank does not know yet which one reaches it.
        let listener = match place {
            Place::Address(_) => self.listen((Ipv4Addr::UNSPECIFIED, 0))?,
            Place::File(_) => self.listen((Ipv4Addr::LOCALHOST, 0))?,
        };
        let port = self.port(&listener)?;
        let root = || match place {
            Place::Address(address) => first_of(address),
            Place::File(path) => first_of(&std::fs::read_to_string(path)?),
        };
        let mut root = self.reach(0, root, port)?;
        let mut list = String::new();
        let mut length = [0; 8];
        let host = root.peer_addr().map_err(|error| self.system(&error))?.ip();
        let read = root
            .read_exact(&mut length)
            .and_then(|()| (&mut root).take(u64::from_le_bytes(length)).read_to_string(&mut list));
        read.map_err(|error| Error::new(0, "group", format!("rank 0 sent no list of the ranks: {error}")))?;
        let addresses: Vec<SocketAddr> = list.lines().filter_map(|line| line.parse().ok()).collect();
        if addresses.len() != self.size as usize {
            return Err(Error::new(
                0,
                "group",
                format!("rank 0 knows {} ranks of {}", addresses.len(), self.size),
            ));
        }
        let (mut streams, _) = std::thread::scope(|scope| {
            let above = scope.spawn(|| self.accept(&listener, self.rank + 1..self.size));
            let below: Result<Vec<_>> = (1..self.rank)
                .map(|peer| {
                    let mut address = addresses[peer as usize];
                    // What the root sees of a rank on its own host is the loopback's address.
                    if address.ip().is_loopback() {
                        address.set_ip(host);
                    }
                    self.reach(peer, || Ok(address), port)
                })
                .collect();
            let (mut streams, addresses) = above.join().map_err(|_| {
                Error::new(self.rank, "group", "the thread that waits for higher ranks has panicked")
            })??;
            for (peer, stream) in (1..).zip(below?) {
                streams[peer] = Some(stream);
            }
            Ok::<_, Error>((streams, addresses))
        })?;
        streams[0] = Some(root);
        Ok(streams)
    }
}

fn first_of(address: &str) -> io::Result<SocketAddr> {
    address.to_socket_addrs()?.next().ok_or_else(|| io::Error::other(format!("`{address}` is no address")))
}

/// Connections to all other ranks.
struct Mesh {
    writers: Vec<Option<Connection>>,
}

impl Link for Mesh {
    fn post(&self, to: u32, frame: Frame) {
        if let Some(Some(connection)) = self.writers.get(to as usize) {
            // An error: the writer has ended, and the reader has said why.
            let _ = connection.frames.as_ref().map(|frames| frames.send(frame));
        }
    }
}

struct Connection {
    frames: Option<Sender<Frame>>,
    writer: Option<JoinHandle<()>>,
}

impl Connection {
    fn new(peer: u32, stream: TcpStream, mailbox: &Arc<Mailbox>) -> io::Result<Self> {
        stream.set_read_timeout(None)?;
        stream.set_nodelay(true)?;
        let (mut reads, mut writes) = (stream.try_clone()?, stream);
        let mailbox = mailbox.clone();
        let named = |what: &str| std::thread::Builder::new().name(format!("fmha-{what}-{peer}"));
        named("from").spawn(move || {
            loop {
                match read_frame(&mut reads) {
                    Ok(frame) => {
                        let last = frame == Frame::Left;
                        mailbox.deliver(peer, frame);
                        if last {
                            break;
                        }
                    }
                    Err(_) => break mailbox.deliver(peer, Frame::Died),
                }
            }
        })?;
        let (frames, queue) = channel();
        let writer = named("to").spawn(move || {
            for frame in queue {
                if write_frame(&mut writes, &frame).is_err() {
                    break;
                }
            }
            // The other direction stays open: what comes is read, lest the system drop what has just been sent.
            let _ = writes.shutdown(Shutdown::Write);
        })?;
        Ok(Self { frames: Some(frames), writer: Some(writer) })
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The queue ends, so the writer does once all is sent.
        self.frames = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

/// A frame is its kind, one byte; how many bytes follow, eight; these bytes.
fn write_frame(to: &mut TcpStream, frame: &Frame) -> io::Result<()> {
    let error_text;
    let rank;
    let (kind, bytes): (u8, &[u8]) = match frame {
        Frame::Bytes(bytes) => (0, bytes),
        Frame::Waits(waits) => {
            rank = waits.to_le_bytes();
            (1, &rank)
        }
        Frame::Failed(error) => {
            error_text = format!("{}\0{}\0{}", error.rank, error.field, error.text);
            (2, error_text.as_bytes())
        }
        Frame::Left => (3, &[]),
        Frame::Begun(bytes) => (4, bytes),
        Frame::Died => return Ok(()),
    };
    let mut head = [kind; 9];
    head[1..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    to.write_all(&head)?;
    to.write_all(bytes)
}

fn read_frame(from: &mut TcpStream) -> io::Result<Frame> {
    let mut head = [0; 9];
    from.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let length = u64::from_le_bytes(length);
    let mut bytes = Vec::new();
    let read = from.take(length).read_to_end(&mut bytes)?;
    if read as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match kind {
        0 => Ok(Frame::Bytes(bytes)),
        1 => match bytes[..].try_into() {
            Ok(rank) => Ok(Frame::Waits(u32::from_le_bytes(rank))),
            Err(_) => Err(io::ErrorKind::InvalidData.into()),
        },
        2 => {
            let mut parts = bytes.splitn(3, |&byte| byte == 0).map(text);
            let mut next = || parts.next().unwrap_or_default();
            let rank = next().parse().map_err(|_| io::ErrorKind::InvalidData)?;
            Ok(Frame::Failed(Error::new(rank, next(), next())))
        }
        3 => Ok(Frame::Left),
        4 => Ok(Frame::Begun(bytes)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_environment_are_refused_by_name_and_text() {
        let from = |changed: &str, text: Option<&str>| {
            let usual =
                [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "29500")];
            Rendezvous::from_words(|name| {
                let usual = usual.into_iter().find(|(known, _)| *known == name).map(|(_, text)| text);
                let text = if name == changed { text } else { usual };
                text.map(str::to_owned).ok_or_else(|| "none".to_owned())
            })
        };
        assert_eq!(from("", None), Ok(Rendezvous::at("here:29501", 1, 2)));
        for (name, text, says) in [
            ("RANK", Some("NaN"), "RANK is `NaN`: invalid digit found in string"),
            ("WORLD_SIZE", Some("-2"), "WORLD_SIZE is `-2`: invalid digit found in string"),
            ("WORLD_SIZE", Some(""), "WORLD_SIZE is ``: cannot parse integer from empty string"),
            ("MASTER_ADDR", None, "MASTER_ADDR is not to be had: none"),
            ("MASTER_PORT", Some("65535"), "MASTER_PORT is 65535, and the port above is none"),
            ("MASTER_PORT", Some("4294967295"), "MASTER_PORT is 4294967295, and the port above is none"),
        ] {
            let error = from(name, text).unwrap_err();
            assert_eq!((&*error.field, &*error.text), (name, says));
        }
    }

    #[test]
    fn a_group_of_too_many_ranks_is_refused_at_once() {
        let error = connect(&Rendezvous::at("127.0.0.1:1", 0, u32::MAX), HELLO).err().unwrap();
        assert_eq!((&*error.field, &*error.text), ("size", "4294967295 ranks are more than 16384"));
    }

    #[test]
    fn who_connects_and_says_nothing_keeps_no_rank_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let (path, timeout) = (folder.path().join("here"), 10 * HELLO);
        let start = Instant::now();
        let join = |rank| connect(&Rendezvous::file(&path, rank, 2), timeout).map(drop);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| join(0));
            let address = loop {
                if let Ok(text) = std::fs::read_to_string(&path) {
                    break text;
                }
            };
            let _silent = TcpStream::connect(address).unwrap();
            assert_eq!((join(1), first.join().unwrap()), (Ok(()), Ok(())));
        });
        assert!(start.elapsed() < timeout / 2, "{:?}", start.elapsed());
    }
}
