//! Work that the steps of a program queue on streams of this rank.

use std::ops::Range;

use fmha::{Peers, Stream, Word};

use super::words::Words;
use super::{Meeting, Rows};
use crate::error::{Error, Result};
use crate::program::Buf;

impl Meeting {
    /// Sends this rank's pieces to all ranks that need them, each as soon as its destination is free.
    pub(crate) fn send(&self, address: impl Fn(Buf) -> u64, stream: &Stream) -> Result<()> {
        let free = self.coming.receivers().into_iter().map(|rank| self.words.free(rank));
        self.queue(&free.flat_map(claim).collect::<Vec<_>>(), stream)?;
        for &(rank, piece, rows) in &self.coming.sends {
            for (rows, base) in rows.iter().zip(self.remotes[rank as usize].buffers()) {
                self.copy(rows, [address(rows.from.0), *base], stream)?;
            }
            self.queue(&[Word::Write { at: self.words_of(rank).flag(piece), value: 1 }], stream)?;
        }
        Ok(())
    }

    /// Copies this rank's own rows into their places.
    pub(crate) fn fill(&self, address: impl Fn(Buf) -> u64, stream: &Stream) -> Result<()> {
        let fill = |rows: &Rows| self.copy(rows, [address(rows.from.0), address(rows.to.0)], stream);
        self.coming.own.iter().try_for_each(fill)
    }

    /// dK and dV that are whole behind a kernel go to their owners.
    pub(crate) fn send_home(&self, step: usize, address: impl Fn(Buf) -> u64, stream: &Stream) -> Result<()> {
        let Some(home) = &self.coming.home else { return Ok(()) };
        let all = &home.steps[step];
        let goes_in = |mut steps: Range<usize>, rank| {
            steps.any(|step| home.steps[step].iter().any(|&(to, _)| to == rank))
        };
        for (at, &(rank, rows)) in all.iter().enumerate() {
            let is_first = !goes_in(0..step, rank) && all[..at].iter().all(|&(to, _)| to != rank);
            if is_first {
                self.queue(&claim(self.words.home_free(rank)), stream)?;
            }
            let slots = self.remotes[rank as usize].buffers().iter().skip(self.coming.buffers.len());
            for (rows, base) in rows.iter().zip(slots) {
                self.copy(rows, [address(rows.from.0), *base], stream)?;
            }
            let is_last =
                !goes_in(step + 1..home.steps.len(), rank) && all[at + 1..].iter().all(|&(to, _)| to != rank);
            if is_last {
                self.queue(&[Word::Write { at: self.words_of(rank).home(self.rank), value: 1 }], stream)?;
            }
        }
        Ok(())
    }

    /// Waits until dK and dV have arrived from all ranks that send some.
    pub(crate) fn await_home(&self, stream: &Stream) -> Result<()> {
        let from = self.coming.home.iter().flat_map(|home| &home.from);
        let words: Vec<Word> =
            from.map(|&rank| Word::Await { at: self.words.home(rank), value: 1 }).collect();
        self.queue(&words, stream)
    }

    /// The run's last step: when all has come and been read, flags are 0 again and the others may write.
    pub(crate) fn release(&self, stream: &Stream) -> Result<()> {
        let flags = || self.coming.expected.iter().map(|&piece| self.words.flag(piece));
        let mut words: Vec<Word> = flags().map(|at| Word::Await { at, value: 1 }).collect();
        words.extend(flags().map(|at| Word::Write { at, value: 0 }));
        let free = |rank| Word::Write { at: self.words_of(rank).free(self.rank), value: 1 };
        words.extend(self.coming.senders().into_iter().map(free));
        for &rank in self.coming.home.iter().flat_map(|home| &home.from) {
            words.push(Word::Write { at: self.words.home(rank), value: 0 });
            words.push(Word::Write { at: self.words_of(rank).home_free(self.rank), value: 1 });
        }
        self.queue(&words, stream)
    }

    fn words_of(&self, rank: u32) -> Words {
        Words { address: self.remotes[rank as usize].words(), ..self.words }
    }

    fn peers(&self) -> Result<&dyn Peers> {
        let none = || Error::new(self.rank, "peers", "its device shares no memory with 0 other processes");
        self.device.peers().ok_or_else(none)
    }

    /// Words of this meeting and of the other ranks', in the order of the stream.
    fn queue(&self, words: &[Word], stream: &Stream) -> Result<()> {
        // SAFETY: callers name words of this rank and of others, which are never freed as long as their process lives.
        unsafe { self.peers()?.words(words, stream.as_raw()) }.map_err(|error| Error::of(self.rank, &error))
    }

    /// Copies rows from one buffer to another by a copy engine; the addresses are those of the buffers' first
    /// bytes.
    fn copy(&self, rows: &Rows, [from, to]: [u64; 2], stream: &Stream) -> Result<()> {
        let peers = self.peers()?;
        for (at, to_at, bytes) in rows.stretches() {
            // SAFETY: the rows lie in the call's tensor, which was checked, or in the program's buffer, and
            // go to one of the program's or of another rank's, which is free.
            unsafe { peers.copy(from + at, to + to_at, bytes, stream.as_raw()) }
                .map_err(|error| Error::of(self.rank, &error))?;
        }
        Ok(())
    }
}

/// Waits until a word says that there may be written, and takes that back.
fn claim(at: u64) -> [Word; 2] {
    [Word::Await { at, value: 1 }, Word::Write { at, value: 0 }]
}
