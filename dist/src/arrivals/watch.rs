//! A thread that watches a meeting. Kernels and streams that wait cannot report an error themselves.

use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use fmha::{Device, Stream, Word};

use super::Piece;
use super::words::Words;
use crate::error::Error;
use crate::group::Group;

/// Time between two looks at the word.
const PERIOD: Duration = Duration::from_millis(20);

/// Reports a piece that a kernel found late to the group. When a rank has failed, lets all streams of this
/// rank go on. The thread ends when this is dropped.
pub(super) struct Watch {
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// `None` where no thread can be started.
    pub(super) fn new(
        device: &Device,
        group: Arc<dyn Group>,
        words: Words,
        pieces: &[Piece],
    ) -> Result<Option<Self>, fmha::Error> {
        let pieces = pieces.iter().map(|piece| (piece.owner, piece.rows.clone())).collect();
        let (device, stream) = (device.clone(), device.stream()?);
        let mut looker = Looker { group, device, stream, words, pieces, has_told: false };
        let (end, ended) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("fmha-arrivals-watch".to_owned()).spawn(move || {
            while let Err(mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(PERIOD) {
                // If the driver fails, the call that runs gets the error.
                let _ = looker.look();
            }
        });
        Ok(thread.ok().map(|thread| Self { end: Some(end), thread: Some(thread) }))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// State of the thread.
struct Looker {
    group: Arc<dyn Group>,
    device: Device,
    /// Stream of this thread alone.
    stream: Stream,
    words: Words,
    /// Owner and rows of each piece.
    pieces: Vec<(u32, Range<u32>)>,
    has_told: bool,
}

impl Looker {
    fn look(&mut self) -> Result<(), fmha::Error> {
        let (words, stream) = (self.words, self.stream.as_raw());
        let Some(peers) = self.device.peers() else { return Ok(()) };
        if self.group.failure().is_none() {
            // SAFETY: the word is never freed; the stream has no other work.
            let late = unsafe { peers.read_word(words.late(), stream)? };
            let piece = (late as usize).checked_sub(1).and_then(|piece| self.pieces.get(piece));
            if let Some((rank, rows)) = piece.filter(|_| !self.has_told) {
                let (first, end, ms) = (rows.start, rows.end, self.group.timeout().as_millis());
                let text =
                    format!("rank {rank} is late: its keys {first}..{end} did not come within {ms} ms");
                self.group.fail(Error::new(*rank, "exchange", text));
                self.has_told = true;
            }
            return Ok(());
        }
        // Kernels first, which then end; nothing is a result any more.
        let mut all = vec![Word::Write { at: words.late(), value: u32::MAX }];
        all.extend((0..self.pieces.len()).map(|piece| Word::Write { at: words.flag(piece), value: 1 }));
        let of = |rank| [words.free(rank), words.home(rank), words.home_free(rank)];
        all.extend((0..self.group.size()).flat_map(of).map(|at| Word::Write { at, value: 1 }));
        // SAFETY: the word is never freed; the stream has no other work.
        unsafe { peers.words(&all, stream) }
    }
}
