//! A connection that lasts: a thread that reads frames, one that writes them, and a way out that no other
//! rank can block.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::after;
use super::timed::{POLL, Polled};
use crate::error::Error;
use crate::group::host::{Frame, Link, Mailbox};

/// Time after which a rank may leave although another rank takes nothing of what is sent to it.
const STANDSTILL: Duration = Duration::from_secs(5);

/// Bytes of one write: a rank that has taken that many more makes progress.
const CHUNK: usize = 1 << 16;

/// Connections to all other ranks, by rank; none to this one.
pub(super) struct Mesh {
    connections: Vec<Option<Connection>>,
    timeout: Duration,
}

impl Mesh {
    pub(super) fn new(connections: Vec<Option<Connection>>, timeout: Duration) -> Self {
        Self { connections, timeout }
    }
}

impl Link for Mesh {
    fn post(&self, to: u32, frame: Frame) {
        if let Some(Some(connection)) = self.connections.get(to as usize) {
            // Sending fails where the writer has ended, and the reader reports the reason.
            let _ = connection.frames.as_ref().map(|frames| frames.send(frame));
        }
    }
}

impl Drop for Mesh {
    /// Leaves once all is sent, or given up: to a rank that stands still, and at the group's timeout to every one.
    fn drop(&mut self) {
        let (start, end) = (Instant::now(), after(self.timeout));
        let mut open: Vec<_> = self.connections.iter_mut().flatten().map(|open| (open, 0, start)).collect();
        for (connection, ..) in &mut open {
            // The queue ends, so the writer does once all is sent.
            connection.frames = None;
            let _ = connection.wire.left.set(start);
        }
        let mut pause = Duration::from_micros(100);
        loop {
            let now = Instant::now();
            open.retain_mut(|(connection, moved, since)| {
                let wire = &connection.wire;
                let all = wire.moved.load(Ordering::Relaxed);
                if all != *moved {
                    (*moved, *since) = (all, now);
                }
                let stands_still = now - *since >= STANDSTILL.min(self.timeout);
                if wire.is_sent.load(Ordering::Acquire) {
                    return false;
                }
                if stands_still || now >= end {
                    // The shutdown ends what the connection's threads are in; they are not joined.
                    let _ = wire.stream.shutdown(Shutdown::Both);
                    return false;
                }
                true
            });
            if open.is_empty() {
                break;
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(10));
        }
    }
}

/// State shared by both threads of a connection and by the caller that closes it.
struct Wire {
    stream: TcpStream,
    /// Bytes that the system has taken.
    moved: AtomicU64,
    /// The writer has ended.
    is_sent: AtomicBool,
    /// Time at which this rank left the group.
    left: OnceLock<Instant>,
    timeout: Duration,
}

pub(super) struct Connection {
    frames: Option<Sender<Frame>>,
    wire: Arc<Wire>,
}

impl Connection {
    pub(super) fn new(
        peer: u32,
        stream: TcpStream,
        mailbox: &Arc<Mailbox>,
        timeout: Duration,
    ) -> io::Result<Self> {
        stream.set_read_timeout(Some(POLL))?;
        stream.set_write_timeout(None)?;
        stream.set_nodelay(true)?;
        let wire = Arc::new(Wire {
            stream,
            moved: AtomicU64::new(0),
            is_sent: AtomicBool::new(false),
            left: OnceLock::new(),
            timeout,
        });
        let named = |what: &str| std::thread::Builder::new().name(format!("fmha-{what}-{peer}"));
        let (mailbox, reads) = (mailbox.clone(), wire.clone());
        named("from").spawn(move || reads.read(peer, &mailbox))?;
        let (frames, queue) = channel();
        let writes = wire.clone();
        named("to").spawn(move || writes.write(&queue))?;
        Ok(Self { frames: Some(frames), wire })
    }
}

impl Wire {
    /// Delivers what the other rank sends, until it leaves. What comes after this rank has left is read for a
    /// while, lest the system drop what has just been sent.
    fn read(&self, peer: u32, mailbox: &Mailbox) {
        let goes_on = || self.left.get().is_none_or(|left| left.elapsed() < self.timeout);
        let mut from = Polled { stream: &self.stream, goes_on };
        loop {
            let frame = match read_frame(&mut from) {
                Ok(frame) => frame,
                Err(error) if error.kind() == io::ErrorKind::InvalidData => Frame::Garbled,
                Err(_) => Frame::Died,
            };
            let last = matches!(frame, Frame::Left | Frame::Died | Frame::Garbled);
            mailbox.deliver(peer, frame);
            if last {
                break;
            }
        }
    }

    fn write(&self, queue: &Receiver<Frame>) {
        for frame in queue {
            if self.write_frame(&frame).is_err() {
                break;
            }
        }
        // The other direction stays open, and is read.
        let _ = self.stream.shutdown(Shutdown::Write);
        self.is_sent.store(true, Ordering::Release);
    }

    /// A frame is its kind, one byte; how many bytes follow, eight; these bytes.
    fn write_frame(&self, frame: &Frame) -> io::Result<()> {
        let (error, rank);
        let (kind, bytes): (u8, &[u8]) = match frame {
            Frame::Bytes(bytes) => (0, bytes),
            Frame::Waits(waits) => {
                rank = waits.to_le_bytes();
                (1, &rank)
            }
            Frame::Failed(failed) => {
                error = failed.to_bytes();
                (2, &error)
            }
            Frame::Left => (3, &[]),
            Frame::Begun(bytes) => (4, bytes),
            Frame::Died | Frame::Garbled => return Ok(()),
        };
        let mut head = [kind; 9];
        head[1..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        for chunk in std::iter::once(&head[..]).chain(bytes.chunks(CHUNK)) {
            (&self.stream).write_all(chunk)?;
            self.moved.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// # Errors
/// [`io::ErrorKind::InvalidData`] of bytes that are no frame.
fn read_frame(from: &mut impl Read) -> io::Result<Frame> {
    let garbled = || io::Error::from(io::ErrorKind::InvalidData);
    let mut head = [0; 9];
    from.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let length = u64::from_le_bytes(length);
    // Rows of a tensor at most; a rank's number; words; nothing.
    let most = match kind {
        0 => 1 << 40,
        1 => 4,
        2 | 4 => 1 << 30,
        3 => 0,
        _ => return Err(garbled()),
    };
    if length > most {
        return Err(garbled());
    }
    let mut bytes = Vec::new();
    let read = from.take(length).read_to_end(&mut bytes)?;
    if read as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match kind {
        0 => Ok(Frame::Bytes(bytes)),
        1 => bytes[..].try_into().map(|rank| Frame::Waits(u32::from_le_bytes(rank))).map_err(|_| garbled()),
        2 => Error::of_bytes(&bytes).map(Frame::Failed).ok_or_else(garbled),
        3 => Ok(Frame::Left),
        _ => Ok(Frame::Begun(bytes)),
    }
}
