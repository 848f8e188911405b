//! Keys that come while kernels wait for them: every rank's copy engine puts its K and V, piece by piece, where the others'
//! kernels read them, and sets each piece's flag there.
//!
//! ```text
//!  rank 0   await free[1]   K0 V0 ─► rank 1, flag    K3 V3 ─► rank 1, flag
//!           one launch      keys 3   keys 2 (flag 2)   keys 1 (flag 1)   keys 0        end: flags back to 0, free[0] of rank 1
//! ```
//!
//! No kernel moves anything, so a launch that fills the device may wait. Nothing waits on the host, and what streams wait for is
//! 1 or 0, not a run's number: a captured run can be replayed. Words are in each rank's own memory, written by the others:
//!
//! - `flags`, one a piece: the piece has come. Set by its owner; reset at the run's end, when all have come.
//! - `late`: the kernels' own. Not 0: a piece did not come within the timeout, and no result of the run is one.
//! - `free`, one a rank: that rank's buffers may be written again. Set by it at a run's end, reset by who writes there.
//! - `home` and `home_free`, one a rank: the same of dK and dV, which go the other way, each to the owner of its keys as soon as no
//!   later kernel of the rank changes it.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use fmha::{Arrivals, DevBuffer, Device, MAX_ARRIVALS, Peers, Stream, Word};

use crate::error::{Error, Result};
use crate::group::{Block, Group};
use crate::problem::Whole;
use crate::program::Buf;

/// Rows of keys that come at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Who has them.
    pub(crate) owner: u32,
    /// Rows of the whole.
    pub(crate) rows: Range<u32>,
    /// The first one's row in the owner's own tensor.
    pub(crate) own_row: u32,
}

/// Bytes of a piece's K and V, at least: a copy takes some microseconds to begin, and NVLink carries 8 MiB in 25.
const LEAST_BYTES: u64 = 8 << 20;

/// Rows that a piece's end is a multiple of, where it may be: most blocks of keys then lie in one piece.
const ROWS: u32 = 128;

/// All keys of the whole in pieces, in the order of their rows: every rank cuts them alike.
///
/// # Errors
/// More runs than a kernel takes pieces.
pub(crate) fn pieces(whole: &Whole, row_bytes: u64) -> Result<Vec<Piece>, String> {
    let mut runs: Vec<(u32, Range<u32>, u32)> = Vec::new();
    for rank in 0..whole.ranks {
        let of = |piece: crate::partition::Piece| {
            (rank, piece.whole_row..piece.whole_row + piece.rows(), piece.row)
        };
        runs.extend(whole.k.pieces(rank).into_iter().map(of));
    }
    runs.sort_unstable_by_key(|(_, rows, _)| rows.start);
    let most = MAX_ARRIVALS as usize;
    if runs.is_empty() || runs.len() > most {
        return Err(format!("{} runs of keys are none or more than {most}", runs.len()));
    }
    let each = (most / runs.len()) as u64;
    let mut all = Vec::new();
    for (owner, rows, own_row) in runs {
        let count = u64::from(rows.end - rows.start);
        // A run that begins between two such rows has a piece more.
        let parts = (count * row_bytes / LEAST_BYTES).clamp(1, each.saturating_sub(1).max(1));
        let step = u32::try_from(count.div_ceil(parts)).unwrap_or(u32::MAX).next_multiple_of(ROWS);
        let mut begin = rows.start;
        while begin < rows.end {
            let end = (begin + step) / ROWS * ROWS;
            let end = if parts > 1 && end > begin { end.min(rows.end) } else { rows.end };
            all.push(Piece { owner, rows: begin..end, own_row: own_row + (begin - rows.start) });
            begin = end;
        }
    }
    if all.len() > most {
        return Err(format!("{} pieces of keys are more than {most}", all.len()));
    }
    Ok(all)
}

/// Rows of a rank's own tensor, and where they go in the whole's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) from: (Buf, Block),
    pub(crate) to: (Buf, Block),
}

impl Rows {
    /// From which byte to which, and how many, a stretch at a time.
    fn stretches(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        let ((_, from), (_, to)) = (self.from, self.to);
        (0..from.rows)
            .map(move |row| (from.offset + row * from.stride, to.offset + row * to.stride, from.row_bytes))
    }
}

/// dK and dV on their way to the owners of their keys.
#[derive(Clone, Debug)]
pub(crate) struct Home {
    /// Where those of this rank's keys come to: a slot for each rank, in the order of the ranks.
    pub(crate) slots: [Buf; 2],
    /// Behind each kernel: to which rank, dK and dV that no later one changes.
    pub(crate) steps: Vec<Vec<(u32, [Rows; 2])>>,
    /// Ranks that send some here.
    pub(crate) from: Vec<u32>,
}

impl Home {
    /// Bytes that go behind a kernel.
    pub(crate) fn bytes_sent(&self, step: usize) -> u64 {
        self.steps[step].iter().flat_map(|(_, rows)| rows).map(|rows| rows.from.1.bytes()).sum()
    }
}

/// What a program says of its arriving keys.
#[derive(Clone, Debug)]
pub(crate) struct Coming {
    pub(crate) pieces: Vec<Piece>,
    /// Where K and V of the whole lie.
    pub(crate) buffers: [Buf; 2],
    /// K and V of this rank's own rows.
    pub(crate) own: Vec<Rows>,
    /// In their order: to which rank, which piece, its K and V.
    pub(crate) sends: Vec<(u32, usize, [Rows; 2])>,
    /// Pieces that others send here.
    pub(crate) expected: Vec<usize>,
    /// Backward: what goes back.
    pub(crate) home: Option<Home>,
}

impl Coming {
    /// Bytes that this rank sends to others.
    pub(crate) fn bytes_sent(&self) -> u64 {
        self.sends.iter().flat_map(|(.., rows)| rows).map(|rows| rows.from.1.bytes()).sum()
    }

    /// The buffers that other ranks write.
    pub(crate) fn all_buffers(&self) -> Vec<Buf> {
        self.buffers.into_iter().chain(self.home.iter().flat_map(|home| home.slots)).collect()
    }

    fn receivers(&self) -> Vec<u32> {
        let mut ranks: Vec<u32> = self.sends.iter().map(|&(peer, ..)| peer).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    fn senders(&self) -> Vec<u32> {
        let mut ranks: Vec<u32> = self.expected.iter().map(|&piece| self.pieces[piece].owner).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

/// Another rank's memory, as this device has it.
#[derive(Clone, Debug)]
struct Remote {
    /// As [`Coming::all_buffers`] has them.
    buffers: Vec<u64>,
    words: u64,
    imported: bool,
}

/// Ranks that write to each other's memory: one for each program, for as long as it lives.
pub(crate) struct Meeting {
    device: Device,
    coming: Coming,
    rank: u32,
    timeout: Duration,
    ends: DevBuffer,
    words: Words,
    /// By rank; this one's own is not used.
    remotes: Vec<Remote>,
    watch: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

/// This rank's words.
#[derive(Clone, Copy)]
struct Words {
    address: u64,
    pieces: u64,
    ranks: u64,
}

impl Words {
    fn flag(self, piece: usize) -> u64 {
        self.address + 4 * piece as u64
    }

    fn late(self) -> u64 {
        self.address + 4 * self.pieces
    }

    fn free(self, rank: u32) -> u64 {
        self.late() + 4 + 4 * u64::from(rank)
    }

    fn home(self, rank: u32) -> u64 {
        self.free(rank) + 4 * self.ranks
    }

    fn home_free(self, rank: u32) -> u64 {
        self.home(rank) + 4 * self.ranks
    }
}

/// What a rank tells the others: its host's boot, its process, where its buffers and then its words are, and their names.
struct Name {
    boot: Vec<u8>,
    process: u64,
    places: Vec<(u64, [u8; 64])>,
}

impl Name {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![1, self.places.len() as u8];
        bytes.extend(self.process.to_le_bytes());
        for (address, name) in &self.places {
            bytes.extend(address.to_le_bytes());
            bytes.extend(name);
        }
        bytes.extend(&self.boot);
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (&count, rest) = bytes.get(1..)?.split_first()?;
        let (process, rest) = rest.split_at_checked(8)?;
        let (places, boot) = rest.split_at_checked(usize::from(count) * 72)?;
        let place = |bytes: &[u8]| {
            let (address, name) = bytes.split_at_checked(8)?;
            Some((u64::from_le_bytes(address.try_into().ok()?), name.try_into().ok()?))
        };
        Some(Self {
            boot: boot.to_vec(),
            process: u64::from_le_bytes(process.try_into().ok()?),
            places: places.chunks(72).map(place).collect::<Option<_>>()?,
        })
    }
}

/// A number that no other process has drawn.
fn process() -> u64 {
    static DRAWN: OnceLock<u64> = OnceLock::new();
    *DRAWN.get_or_init(|| RandomState::new().build_hasher().finish())
}

/// What every rank says, or the first one's reason against it.
fn all_say(group: &dyn Group, mine: &Result<Vec<u8>, String>) -> Result<Result<Vec<Vec<u8>>, String>> {
    let said = match mine {
        Ok(bytes) => bytes.clone(),
        Err(reason) => [&[0], reason.as_bytes()].concat(),
    };
    let all = group.share(&said)?;
    let against = (0..).zip(&all).find(|(_, bytes)| bytes.first() != Some(&1));
    let reason = against.map(|(rank, bytes): (u32, &Vec<u8>)| {
        format!("rank {rank}: {}", String::from_utf8_lossy(bytes.get(1..).unwrap_or_default()))
    });
    Ok(reason.map_or(Ok(all), Err))
}

impl Meeting {
    /// All ranks call it together: `mine` is what this one's program needs and its buffers that others write, or why it has none. On
    /// all ranks the same: a meeting, or why there is none.
    ///
    /// # Errors
    /// The rank that is gone, late or has failed.
    pub(crate) fn new(
        mine: Result<(Coming, Vec<&DevBuffer>), String>,
        group: &Arc<dyn Group>,
        device: &Device,
    ) -> Result<Result<Self, String>> {
        let (rank, ranks) = (group.rank(), group.size());
        let prepared = mine.and_then(|(coming, buffers)| {
            let said = |error: fmha::Error| error.to_string();
            let peers = device.peers().ok_or("its device shares no memory with other processes")?;
            let pieces = coming.pieces.len();
            let ends: Vec<u32> = coming.pieces.iter().map(|piece| piece.rows.end).collect();
            // Nothing has come, nothing is late, all is free; nothing has come home, and all is free for that.
            let mut first = vec![0u32; pieces + 1];
            for value in [1, 0, 1] {
                first.resize(first.len() + ranks as usize, value);
            }
            let page = if device.has_clock() { 2 << 20 } else { 1 };
            let [ends, words] = [ends, first].map(|words| -> Result<DevBuffer, fmha::Error> {
                let bytes = (4 * words.len() as u64).next_multiple_of(page);
                let mut buffer = device.memory().alloc(bytes)?;
                device.memory().upload(bytemuck::cast_slice(&words), &mut buffer)?;
                Ok(buffer)
            });
            let (ends, words) = (ends.map_err(said)?, words.map_err(said)?);
            // Ranks that are threads have each other's addresses; of several devices that is not arranged.
            let place = |buffer: &DevBuffer| {
                let name = if device.has_clock() { peers.export(buffer)? } else { [0; 64] };
                Ok((buffer.as_ptr() as u64, name))
            };
            let all = buffers.into_iter().chain([&words]);
            let places = all.map(place).collect::<Result<_, fmha::Error>>().map_err(said)?;
            let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
            let name = Name { boot, process: process(), places };
            Ok((name, coming, ends, words))
        });
        let says = prepared.as_ref().map(|(name, ..)| name.to_bytes()).map_err(Clone::clone);
        let all = match all_say(&**group, &says)? {
            Ok(all) => all,
            Err(reason) => return Ok(Err(reason)),
        };
        let Ok((own, coming, ends, words)) = prepared else {
            return Ok(Err("a rank says nothing".to_owned()));
        };
        let imported = Self::import(device, &own, rank, &all);
        let says = imported.as_ref().map(|_| vec![1]).map_err(Clone::clone);
        let agreed = all_say(&**group, &says)?.map(|_| ());
        let remotes = match (agreed, imported) {
            (Ok(()), Ok(remotes)) => remotes,
            (Err(reason), imported) => {
                if let (Ok(remotes), Some(peers)) = (imported, device.peers()) {
                    release(peers, &remotes);
                }
                return Ok(Err(reason));
            }
            (_, Err(reason)) => return Ok(Err(reason)),
        };
        let address = words.as_ptr() as u64;
        // Never freed: other ranks' last steps may still write here when this one has finished.
        std::mem::forget(words);
        let mut meeting = Self {
            device: device.clone(),
            words: Words { address, pieces: coming.pieces.len() as u64, ranks: ranks.into() },
            coming,
            rank,
            timeout: group.timeout(),
            ends,
            remotes,
            watch: None,
        };
        meeting.watch = meeting.watch(group.clone()).map_err(|error| group.fail(Error::of(rank, &error)))?;
        Ok(Ok(meeting))
    }

    fn import(device: &Device, own: &Name, rank: u32, all: &[Vec<u8>]) -> Result<Vec<Remote>, String> {
        let peers = device.peers().ok_or("its device shares no memory with other processes")?;
        let mut remotes: Vec<Remote> = Vec::new();
        let mut one = |(other, bytes): (u32, &Vec<u8>)| -> Result<(), String> {
            let name =
                Name::from_bytes(bytes).ok_or_else(|| format!("rank {other} says {} bytes", bytes.len()))?;
            if name.boot != own.boot {
                return Err(format!("rank {other} is on another host than rank {rank}"));
            }
            if name.places.len() != own.places.len() {
                let (here, there) = (own.places.len(), name.places.len());
                return Err(format!("rank {other} has {there} buffers for others, rank {rank} {here}"));
            }
            let imported = other != rank && device.has_clock();
            if imported && name.process == own.process {
                return Err(format!("ranks {rank} and {other} are threads of 1 process"));
            }
            let mut addresses = Vec::new();
            for (address, name) in &name.places {
                match imported.then(|| peers.import(name)) {
                    None => addresses.push(*address),
                    Some(Ok(address)) => addresses.push(address),
                    Some(Err(error)) => {
                        // SAFETY: imported above, and not used yet.
                        addresses.iter().for_each(|&address| unsafe { peers.release(address) });
                        return Err(error.to_string());
                    }
                }
            }
            let words = addresses.pop().unwrap_or_default();
            remotes.push(Remote { buffers: addresses, words, imported });
            Ok(())
        };
        let outcome = (0..).zip(all).try_for_each(&mut one);
        if outcome.is_err() {
            release(peers, &remotes);
        }
        outcome.map(|()| remotes)
    }

    fn words_of(&self, rank: u32) -> Words {
        Words { address: self.remotes[rank as usize].words, ..self.words }
    }

    fn peers(&self) -> Result<&dyn Peers> {
        let none = || Error::new(self.rank, "peers", "its device shares no memory with 0 other processes");
        self.device.peers().ok_or_else(none)
    }

    fn said(&self, error: &fmha::Error) -> Error {
        Error::of(self.rank, error)
    }

    /// This rank's pieces go to all who need them, each as soon as it may write there.
    pub(crate) fn send(&self, address: impl Fn(Buf) -> u64, stream: &Stream) -> Result<()> {
        let (peers, raw) = (self.peers()?, stream.as_raw());
        let mut waits = Vec::new();
        for rank in self.coming.receivers() {
            let at = self.words.free(rank);
            waits.extend([Word::Await { at, value: 1 }, Word::Write { at, value: 0 }]);
        }
        // SAFETY: the words are this meeting's own.
        unsafe { peers.words(&waits, raw) }.map_err(|error| self.said(&error))?;
        for &(rank, piece, rows) in &self.coming.sends {
            for (rows, base) in rows.iter().zip(&self.remotes[rank as usize].buffers) {
                for (from, to, bytes) in rows.stretches() {
                    // SAFETY: the rows lie in the call's tensor, which was checked, and in the other rank's buffer, which is free.
                    unsafe { peers.copy(address(rows.from.0) + from, base + to, bytes, raw) }
                        .map_err(|error| self.said(&error))?;
                }
            }
            let flag = Word::Write { at: self.words_of(rank).flag(piece), value: 1 };
            // SAFETY: a word of the other rank, which lives as long as its process.
            unsafe { peers.words(&[flag], raw) }.map_err(|error| self.said(&error))?;
        }
        Ok(())
    }

    /// This rank's own rows into their places.
    pub(crate) fn fill(&self, address: impl Fn(Buf) -> u64, stream: &Stream) -> Result<()> {
        let peers = self.peers()?;
        for rows in &self.coming.own {
            for (from, to, bytes) in rows.stretches() {
                let (from, to) = (address(rows.from.0) + from, address(rows.to.0) + to);
                // SAFETY: the rows lie in the call's tensor, which was checked, and in the program's buffer.
                unsafe { peers.copy(from, to, bytes, stream.as_raw()) }.map_err(|error| self.said(&error))?;
            }
        }
        Ok(())
    }

    /// dK and dV that are whole behind a kernel go to their owners.
    pub(crate) fn send_home(&self, step: usize, address: impl Fn(Buf) -> u64, stream: &Stream) -> Result<()> {
        let (Some(home), peers, raw) = (&self.coming.home, self.peers()?, stream.as_raw()) else {
            return Ok(());
        };
        // SAFETY: words of this meeting and of the other ranks'.
        let say = |words: &[Word]| unsafe { peers.words(words, raw) }.map_err(|error| self.said(&error));
        let all = &home.steps[step];
        let goes_in = |mut steps: Range<usize>, rank| {
            steps.any(|step| home.steps[step].iter().any(|&(to, _)| to == rank))
        };
        for (at, &(rank, rows)) in all.iter().enumerate() {
            let before = goes_in(0..step, rank) || all[..at].iter().any(|&(to, _)| to == rank);
            if !before {
                let at = self.words.home_free(rank);
                say(&[Word::Await { at, value: 1 }, Word::Write { at, value: 0 }])?;
            }
            let slots = self.remotes[rank as usize].buffers.iter().skip(self.coming.buffers.len());
            for (rows, base) in rows.iter().zip(slots) {
                for (from, to, bytes) in rows.stretches() {
                    // SAFETY: the rows lie in the program's buffer, and in this rank's slot of the other's, which is free.
                    unsafe { peers.copy(address(rows.from.0) + from, base + to, bytes, raw) }
                        .map_err(|error| self.said(&error))?;
                }
            }
            let behind =
                goes_in(step + 1..home.steps.len(), rank) || all[at + 1..].iter().any(|&(to, _)| to == rank);
            if !behind {
                say(&[Word::Write { at: self.words_of(rank).home(self.rank), value: 1 }])?;
            }
        }
        Ok(())
    }

    /// Waits until dK and dV of all who send some are here.
    pub(crate) fn await_home(&self, stream: &Stream) -> Result<()> {
        let from = self.coming.home.iter().flat_map(|home| &home.from);
        let words: Vec<Word> =
            from.map(|&rank| Word::Await { at: self.words.home(rank), value: 1 }).collect();
        // SAFETY: the words are this meeting's own.
        unsafe { self.peers()?.words(&words, stream.as_raw()) }.map_err(|error| self.said(&error))
    }

    /// The run's last step: when all has come and been read, flags are 0 again and the others may write.
    pub(crate) fn release(&self, stream: &Stream) -> Result<()> {
        let flags = |value| self.coming.expected.iter().map(move |&piece| (self.words.flag(piece), value));
        let mut words: Vec<Word> = flags(1).map(|(at, value)| Word::Await { at, value }).collect();
        words.extend(flags(0).map(|(at, value)| Word::Write { at, value }));
        let free = |rank| Word::Write { at: self.words_of(rank).free(self.rank), value: 1 };
        words.extend(self.coming.senders().into_iter().map(free));
        for &rank in self.coming.home.iter().flat_map(|home| &home.from) {
            words.push(Word::Write { at: self.words.home(rank), value: 0 });
            words.push(Word::Write { at: self.words_of(rank).home_free(self.rank), value: 1 });
        }
        // SAFETY: words of this meeting and of the other ranks'.
        unsafe { self.peers()?.words(&words, stream.as_raw()) }.map_err(|error| self.said(&error))
    }

    /// What a kernel is told.
    pub(crate) fn arrivals(&self) -> Arrivals<'_> {
        let mut here = u64::MAX;
        self.coming.expected.iter().for_each(|piece| here &= !(1 << piece));
        let bytes = 4 * (self.words.pieces + 1);
        // SAFETY: the words are never freed, and written by copy engines and kernels alone.
        let flags = unsafe {
            fmha::DevSlice::from_raw(self.device.memory().space(), self.words.address as *const u8, bytes)
        };
        let timeout_ns = u64::try_from(self.timeout.as_nanos()).unwrap_or(u64::MAX);
        Arrivals { ends: self.ends.slice(), flags, here, timeout_ns }
    }

    /// A thread that tells the group of a piece that a kernel found late, and, when a rank has failed, lets all streams of this one
    /// go on.
    #[allow(clippy::type_complexity)]
    fn watch(
        &self,
        group: Arc<dyn Group>,
    ) -> Result<Option<(mpsc::Sender<()>, JoinHandle<()>)>, fmha::Error> {
        let (words, device, stream) = (self.words, self.device.clone(), self.device.stream()?);
        let owners: Vec<u32> = self.coming.pieces.iter().map(|piece| piece.owner).collect();
        let rows: Vec<Range<u32>> = self.coming.pieces.iter().map(|piece| piece.rows.clone()).collect();
        let (timeout, ranks) = (self.timeout, group.size());
        let (end, ended) = mpsc::channel::<()>();
        let told = AtomicBool::new(false);
        let look = move || -> Result<(), fmha::Error> {
            let Some(peers) = device.peers() else { return Ok(()) };
            if group.failure().is_none() {
                // SAFETY: the word is never freed; the stream has no other work.
                let late = unsafe { peers.read_word(words.late(), stream.as_raw())? };
                if let Some(piece) = (late as usize).checked_sub(1).filter(|&piece| piece < owners.len())
                    && !told.swap(true, Ordering::Relaxed)
                {
                    let (rank, rows) = (owners[piece], &rows[piece]);
                    let text = format!(
                        "rank {rank} is late: its keys {}..{} did not come within {} ms",
                        rows.start,
                        rows.end,
                        timeout.as_millis()
                    );
                    group.fail(Error::new(rank, "exchange", text));
                }
                return Ok(());
            }
            // Kernels first, which then end; nothing is a result any more.
            let mut all = vec![Word::Write { at: words.late(), value: u32::MAX }];
            all.extend((0..owners.len()).map(|piece| Word::Write { at: words.flag(piece), value: 1 }));
            let of = |rank| [words.free(rank), words.home(rank), words.home_free(rank)];
            all.extend((0..ranks).flat_map(of).map(|at| Word::Write { at, value: 1 }));
            // SAFETY: as above.
            unsafe { peers.words(&all, stream.as_raw()) }
        };
        let looks = std::thread::Builder::new().name("fmha-arrivals-watch".to_owned()).spawn(move || {
            while let Err(mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(Duration::from_millis(20)) {
                // A driver that answers no more has told whoever runs.
                let _ = look();
            }
        });
        Ok(looks.ok().map(|thread| (end, thread)))
    }
}

fn release(peers: &dyn Peers, remotes: &[Remote]) {
    for remote in remotes.iter().filter(|remote| remote.imported) {
        for &address in remote.buffers.iter().chain([&remote.words]) {
            // SAFETY: imported once, and not used again.
            unsafe { peers.release(address) };
        }
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.watch.take() {
            drop(end);
            let _ = thread.join();
        }
        if let Some(peers) = self.device.peers() {
            release(peers, &self.remotes);
        }
    }
}

#[cfg(test)]
mod tests {
    use fmha::{DType, Dims, FwdProblem};

    use super::*;
    use crate::partition::Partition;
    use crate::problem::Problem;

    fn whole(tokens: u32, partition: Partition) -> Whole {
        let dims = Dims {
            batch: 1,
            seqlen_q: tokens,
            seqlen_k: tokens,
            num_heads_q: 1,
            num_heads_kv: 1,
            head_dim_qk: 8,
            head_dim_v: 8,
        };
        let ranks = partition.ranks();
        Whole::new(&Problem::new(FwdProblem::batch(DType::Bf16, dims), partition), 0, ranks).unwrap()
    }

    #[test]
    fn pieces_follow_each_other_over_all_rows_and_are_those_of_their_owners() {
        for (tokens, ranks) in [(300, 2), (131072, 2), (100_003, 3), (524_288, 8), (7, 8)] {
            let partition = Partition::zig_zag(tokens, ranks);
            let all = pieces(&whole(tokens, partition.clone()), 4096).unwrap();
            assert!(all.len() <= MAX_ARRIVALS as usize, "{tokens}, {ranks}: {} pieces", all.len());
            let mut next = 0;
            for piece in &all {
                assert!(piece.rows.start == next && piece.rows.end > next, "{tokens}, {ranks}: {piece:?}");
                next = piece.rows.end;
                let run =
                    partition.runs(piece.owner).iter().find(|run| run.contains(&piece.rows.start)).unwrap();
                assert!(piece.rows.end <= run.end);
                assert!(
                    piece.rows.end == run.end || piece.rows.end % ROWS == 0,
                    "{tokens}, {ranks}: {piece:?}"
                );
                let before: u32 = partition
                    .runs(piece.owner)
                    .iter()
                    .filter(|other| other.start < run.start)
                    .map(|other| other.end - other.start)
                    .sum();
                assert_eq!(piece.own_row, before + piece.rows.start - run.start);
            }
            assert_eq!(next, tokens);
        }
        // 128k tokens of 4 KiB, 512 MiB, in as many pieces as there are bits, or one fewer a run.
        assert!(pieces(&whole(131072, Partition::zig_zag(131072, 2)), 4096).unwrap().len() >= 56);
        let refused = pieces(&whole(1000, Partition::zig_zag(1000, 40)), 4096).unwrap_err();
        assert_eq!(refused, "80 runs of keys are none or more than 64");
    }
}
