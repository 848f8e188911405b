//! A group in host memory, over any link that carries frames between ranks.

mod calls;
mod mailbox;

pub(super) use mailbox::Mailbox;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fmha::{DevSlice, DevSliceMut, MemorySpace, Stream};

use mailbox::{Gone, Peer};

use super::{Exchange, Group, Parcel};
use crate::agree::Fields;
use crate::error::{Error, Result};

/// Frame that one rank sends to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// Bytes of a share or an exchange.
    Bytes(Vec<u8>),
    /// A call has begun that was planned otherwise than the call before.
    Begun(Vec<u8>),
    /// Rank that the sender has been waiting for, for part of its timeout. That rank is to blame if the
    /// sender is late itself.
    Waits(u32),
    /// Failure of the group: nothing succeeds any more.
    Failed(Error),
    /// Farewell: the sender has finished and sends nothing more.
    Left,
    /// Connection of the sender broke without a farewell.
    Died,
    /// Bytes that are no frame; nothing more is read from the sender.
    Garbled,
}

/// Carries frames to other ranks.
pub(super) trait Link: Send + Sync {
    /// Sends without waiting. Frames to a rank that is gone are dropped.
    fn post(&self, to: u32, frame: Frame);
}

/// A rank of a group in host memory: of [`threads`](super::threads), or of processes that
/// [`connect`](super::connect)ed. Dropped, it leaves the group.
pub struct Host {
    rank: u32,
    size: u32,
    timeout: Duration,
    mailbox: Arc<Mailbox>,
    link: Box<dyn Link>,
    /// Time that the running call has waited for other ranks; `None` between calls.
    waited: Mutex<Option<Duration>>,
    /// Whether the peer has said farewell.
    left: AtomicBool,
}

impl Host {
    pub(super) fn new(
        rank: u32,
        size: u32,
        timeout: Duration,
        mailbox: Arc<Mailbox>,
        link: Box<dyn Link>,
    ) -> Self {
        Self { rank, size, timeout, mailbox, link, waited: Mutex::new(None), left: AtomicBool::new(false) }
    }

    fn others(&self) -> impl Iterator<Item = u32> {
        let rank = self.rank;
        (0..self.size).filter(move |&other| other != rank)
    }

    /// Says farewell: this rank sends nothing more.
    fn leave(&self) {
        if self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        if std::thread::panicking() {
            self.fail(Error::new(self.rank, "group", format!("rank {} has panicked", self.rank)));
        }
        // The failure goes before the farewell: the rank that found it may not have sent it to all ranks yet.
        let failure = self.mailbox.lock().failure.clone();
        for to in self.others() {
            if let Some(error) = &failure {
                self.link.post(to, Frame::Failed(error.clone()));
            }
            self.link.post(to, Frame::Left);
        }
    }

    /// Leaves, and waits until every other rank has left too. False: one has failed or died, or has not left by `end`.
    pub(super) fn leave_together(&self, end: Instant) -> bool {
        self.leave();
        let mut state = self.mailbox.lock();
        loop {
            let gone = |rank: u32| state.peers[rank as usize].gone;
            let has_failed = self.others().any(|rank| gone(rank).is_some_and(|how| how != Gone::Left));
            let left = end.saturating_duration_since(Instant::now());
            if state.failure.is_some() || has_failed || left.is_zero() {
                return false;
            }
            if self.others().all(|rank| gone(rank).is_some()) {
                return true;
            }
            let woken = self.mailbox.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Bytes, unless all is lost already.
    fn send(&self, to: u32, bytes: Vec<u8>) -> Result<()> {
        if let Some(error) = &self.mailbox.lock().failure {
            return Err(error.clone());
        }
        self.link.post(to, Frame::Bytes(bytes));
        Ok(())
    }

    /// Receives from each of these ranks, in their order, and waits no longer than the timeout in all; of a
    /// call that has begun, no longer than the timeout in the whole call.
    fn receive_all(
        &self,
        ranks: impl Iterator<Item = u32>,
        mut take: impl FnMut(u32, Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        let call = *self.waited();
        let mut waited = call.unwrap_or_default();
        for from in ranks {
            let start = Instant::now();
            let bytes = self.receive(from, self.timeout.saturating_sub(waited))?;
            waited += start.elapsed();
            take(from, bytes)?;
        }
        if let Some(before) = &mut *self.waited() {
            *before = waited;
        }
        Ok(())
    }

    fn waited(&self) -> MutexGuard<'_, Option<Duration>> {
        self.waited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next bytes of `from`, which are to come within `patience`.
    fn receive(&self, from: u32, patience: Duration) -> Result<Vec<u8>> {
        let start = Instant::now();
        // Early enough for a rank that has less patience left.
        let (mut told, tells) = (false, patience.min(self.timeout / 8));
        let mut state = self.mailbox.lock();
        loop {
            if let Some(error) = &state.failure {
                return Err(error.clone());
            }
            if let Some(bytes) = state.peers[from as usize].frames.pop_front() {
                return Ok(bytes);
            }
            if let Some(how) = state.peers[from as usize].gone {
                drop(state);
                return Err(self.fail(how.error(from)));
            }
            let waited = start.elapsed();
            if waited >= patience {
                let late = state.culprit(self.rank, from);
                drop(state);
                let text =
                    format!("rank {late} is late: waited {} ms in this call", self.timeout.as_millis());
                return Err(self.fail(Error::new(late, "exchange", text)));
            }
            if !told && waited >= tells {
                told = true;
                drop(state);
                self.others().for_each(|to| self.link.post(to, Frame::Waits(from)));
                state = self.mailbox.lock();
                continue;
            }
            let until = if told { patience } else { tells };
            let (woken, _) = self
                .mailbox
                .changed
                .wait_timeout(state, until.saturating_sub(waited))
                .unwrap_or_else(PoisonError::into_inner);
            state = woken;
        }
    }
}

impl Group for Host {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn space(&self) -> MemorySpace {
        MemorySpace::Host
    }

    fn begins(&self, planned: &Arc<Fields>) -> Result<()> {
        *self.waited() = Some(Duration::ZERO);
        self.begin(planned)
    }

    fn ends(&self) {
        *self.waited() = None;
    }

    fn calls(&self) -> u64 {
        self.mailbox.lock().calls
    }

    fn share(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        for to in self.others() {
            self.send(to, mine.to_vec())?;
        }
        let mut all = vec![mine.to_vec(); self.size as usize];
        self.receive_all(self.others(), |from, bytes| {
            all[from as usize] = bytes;
            Ok(())
        })?;
        Ok(all)
    }

    fn exchange(
        &self,
        exchange: &Exchange,
        sources: &[DevSlice<'_>],
        sinks: &mut [DevSliceMut<'_>],
        _stream: &Stream,
    ) -> Result<()> {
        exchange.check((self.rank, self.size), sources, sinks).map_err(|error| self.fail(error))?;
        let on_a_device =
            || self.fail(Error::new(self.rank, "exchange", "a buffer is in device memory, not the host's"));
        // Rows from this rank to itself need no frame.
        let mut own = Vec::new();
        for to in 0..self.size {
            match packed(of(&exchange.sends, to), sources).ok_or_else(on_a_device)? {
                bytes if to == self.rank => own = bytes,
                bytes if bytes.is_empty() => {}
                bytes => self.send(to, bytes)?,
            }
        }
        let wanted = |from| of(&exchange.receives, from).map(|parcel| parcel.block.bytes()).sum::<u64>();
        let mut place = |from, bytes: Vec<u8>| {
            let wanted = wanted(from);
            if bytes.len() as u64 != wanted {
                let text = format!("rank {from} sent {} bytes, but {wanted} were to come", bytes.len());
                return Err(self.fail(Error::new(from, "exchange", text)));
            }
            unpack(&bytes, of(&exchange.receives, from), sinks).ok_or_else(on_a_device)
        };
        place(self.rank, own)?;
        self.receive_all(self.others().filter(|&from| wanted(from) > 0), place)
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn failure(&self) -> Option<Error> {
        let state = self.mailbox.lock();
        let lost = |(rank, peer): (u32, &Peer)| Some(peer.gone.filter(|how| *how != Gone::Left)?.error(rank));
        state.failure.clone().or_else(|| (0..).zip(&state.peers).find_map(lost))
    }

    fn fail(&self, error: Error) -> Error {
        let first = {
            let mut state = self.mailbox.lock();
            if let Some(first) = &state.failure {
                return first.clone();
            }
            state.failure.insert(error).clone()
        };
        self.mailbox.changed.notify_all();
        self.others().for_each(|to| self.link.post(to, Frame::Failed(first.clone())));
        first
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.leave();
    }
}

/// The parcels to a rank, or from it.
fn of(parcels: &[Parcel], peer: u32) -> impl Iterator<Item = &Parcel> + Clone {
    parcels.iter().filter(move |parcel| parcel.peer == peer)
}

/// The bytes of parcels, one behind another; none where a buffer is not the host's.
fn packed<'a>(
    parcels: impl Iterator<Item = &'a Parcel> + Clone,
    sources: &[DevSlice<'_>],
) -> Option<Vec<u8>> {
    let bytes: u64 = parcels.clone().map(|parcel| parcel.block.bytes()).sum();
    let mut packed = Vec::with_capacity(bytes as usize);
    for Parcel { buffer, block, .. } in parcels {
        let source = sources[*buffer].as_host()?;
        for (offset, count) in block.stretches() {
            packed.extend_from_slice(&source[offset as usize..(offset + count) as usize]);
        }
    }
    Some(packed)
}

/// Unpacks the bytes of a message to their places; as many as are wanted.
fn unpack<'a>(
    mut bytes: &[u8],
    parcels: impl Iterator<Item = &'a Parcel>,
    sinks: &mut [DevSliceMut<'_>],
) -> Option<()> {
    for Parcel { buffer, block, .. } in parcels {
        let sink = sinks[*buffer].as_host_mut()?;
        for (offset, count) in block.stretches() {
            let (now, later) = bytes.split_at(count as usize);
            sink[offset as usize..(offset + count) as usize].copy_from_slice(now);
            bytes = later;
        }
    }
    Some(())
}
