//! A group in host memory, over whatever carries frames from rank to rank.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fmha::{DevSlice, DevSliceMut, MemorySpace, Stream};

use super::{Exchange, Group, Parcel};
use crate::agree::{Fields, MOMENT, Said, disagreement, out_of_turn};
use crate::error::{Error, Result};

/// What one rank tells another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// Bytes of a share or an exchange.
    Bytes(Vec<u8>),
    /// A call has begun that was planned otherwise than the one before.
    Begun(Vec<u8>),
    /// Which rank it has been waiting for, for half of its timeout: whom to blame if it comes late itself.
    Waits(u32),
    /// Nothing succeeds any more.
    Failed(Error),
    /// It has finished, and sends nothing more.
    Left,
    /// Its connection broke without a farewell.
    Died,
}

/// How many calls that were planned otherwise than those before are kept, to be compared with what other ranks tell of theirs.
const MOST_BEGUN: usize = 1 << 12;

/// Whether two calls were planned alike: mostly by one plan.
fn is_same(a: &Arc<Fields>, b: &Arc<Fields>) -> bool {
    Arc::ptr_eq(a, b) || a == b
}

/// Carries frames to other ranks.
pub(super) trait Link: Send + Sync {
    /// Sends, without waiting. A rank that is gone has nobody to tell.
    fn post(&self, to: u32, frame: Frame);
}

/// Where frames of the other ranks arrive.
pub(super) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    peers: Vec<Peer>,
    failure: Option<Error>,
    /// How many calls have begun here, and of each that was planned otherwise than the one before its number and its fields.
    calls: u64,
    begun: VecDeque<(u64, Arc<Fields>)>,
    /// Up to which call the other ranks have been told.
    told: u64,
}

#[derive(Clone, Default)]
struct Peer {
    frames: VecDeque<Vec<u8>>,
    /// Its calls that were planned otherwise than those before, as far as they are not known to be those of this rank.
    begun: VecDeque<Said>,
    waits_for: Option<u32>,
    gone: Option<&'static str>,
}

impl Mailbox {
    pub(super) fn new(size: u32) -> Arc<Self> {
        let peers = vec![Peer::default(); size as usize];
        let state = State { peers, failure: None, calls: 0, begun: VecDeque::new(), told: 0 };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what `from` has sent.
    pub(super) fn deliver(&self, from: u32, frame: Frame) {
        let mut state = self.lock();
        let peer = &mut state.peers[from as usize];
        match frame {
            Frame::Bytes(bytes) => {
                peer.frames.push_back(bytes);
                peer.waits_for = None;
            }
            Frame::Begun(bytes) => {
                peer.begun.extend(Said::read(&bytes));
                state.otherwise(from);
            }
            Frame::Waits(rank) => peer.waits_for = Some(rank),
            Frame::Failed(error) => {
                state.failure.get_or_insert(error);
            }
            Frame::Left => peer.gone = peer.gone.or(Some("has left the group")),
            Frame::Died => peer.gone = peer.gone.or(Some("has died: its connection broke")),
        }
        self.changed.notify_all();
    }
}

impl State {
    /// What was planned of a call of this rank; none of one that has not begun, or too long ago.
    fn planned(&self, call: u64) -> Option<&Arc<Fields>> {
        let (_, planned) = self.begun.iter().rev().find(|(first, _)| *first <= call)?;
        (call <= self.calls).then_some(planned)
    }

    /// The first call of a rank, as far as it has told, that was planned otherwise here. Those before it are forgotten.
    fn otherwise(&mut self, rank: u32) -> Option<u64> {
        let rank = rank as usize;
        while let Some(said) = self.peers[rank].begun.front() {
            match self.planned(said.calls) {
                Some(planned) if said.is_of(planned) => {}
                Some(_) => return Some(said.calls),
                // To come, or forgotten.
                None if said.calls > self.calls => return None,
                None => {}
            }
            self.peers[rank].begun.pop_front();
        }
        None
    }

    /// The rank that `from` waits for, or the one that that one waits for, and so on.
    fn culprit(&self, own: u32, from: u32) -> u32 {
        let mut rank = from;
        for _ in 0..self.peers.len() {
            match self.peers[rank as usize].waits_for {
                Some(next) if next != own && (next as usize) < self.peers.len() => rank = next,
                _ => break,
            }
        }
        rank
    }
}

/// A rank of a group in host memory: of [`threads`](super::threads), or of processes that [`connect`](super::connect)ed.
/// Dropped, it leaves the group.
pub struct Host {
    rank: u32,
    size: u32,
    timeout: Duration,
    mailbox: Arc<Mailbox>,
    link: Box<dyn Link>,
}

impl Host {
    pub(super) fn new(
        rank: u32,
        size: u32,
        timeout: Duration,
        mailbox: Arc<Mailbox>,
        link: Box<dyn Link>,
    ) -> Self {
        Self { rank, size, timeout, mailbox, link }
    }

    fn others(&self) -> impl Iterator<Item = u32> {
        let rank = self.rank;
        (0..self.size).filter(move |&other| other != rank)
    }

    /// Whose fault it is that some ranks have planned, as far as they have told, where this one has begun a call. None where none
    /// has, or only ranks that are ahead.
    fn out_of_turn(&self) -> Option<Error> {
        let state = self.mailbox.lock();
        let plans = |(rank, peer): (u32, &Peer)| {
            let said = Said::read(peer.frames.front()?)?;
            (said.calls < state.calls).then_some((rank, said))
        };
        let said: Vec<_> = (0..).zip(&state.peers).filter_map(plans).collect();
        out_of_turn(self.rank, self.size, state.planned(state.calls)?, &said)
    }

    /// Whose fault it is that ranks have begun a call each that were planned otherwise, as far as they have told.
    fn begun_otherwise(&self) -> Option<Error> {
        let mut state = self.mailbox.lock();
        let call = (0..self.size).filter_map(|rank| state.otherwise(rank)).min()?;
        let own = Said::of_call(call, state.planned(call)?);
        let of = |peer: &Peer| peer.begun.iter().find(|said| said.calls == call).unwrap_or(&own).clone();
        disagreement(&state.peers.iter().map(of).collect::<Vec<_>>())
    }

    /// Whose fault it is that ranks are at unlike calls, once all have had a moment to tell.
    pub(super) fn judged(&self) -> Option<Error> {
        let fault = || self.out_of_turn().or_else(|| self.begun_otherwise());
        fault()?;
        std::thread::sleep(MOMENT.min(self.timeout / 4));
        fault()
    }

    /// The same, by any rank that knows it: of two at unlike calls it may be the other one that can tell.
    fn heard(&self) -> Option<Error> {
        let end = Instant::now() + (5 * MOMENT).min(self.timeout / 2);
        loop {
            let failure = self.mailbox.lock().failure.clone();
            let heard = failure.or_else(|| self.judged());
            if heard.is_some() || Instant::now() > end {
                return heard;
            }
            std::thread::sleep(MOMENT / 10);
        }
    }

    /// A call begins; [`tell`](Self::tell) tells the other ranks. Its number, and how the one before was planned.
    pub(super) fn note(&self, planned: &Arc<Fields>) -> (u64, Option<Arc<Fields>>) {
        let mut state = self.mailbox.lock();
        state.calls += 1;
        let (call, before) = (state.calls, state.begun.back().map(|(_, before)| before.clone()));
        if !before.as_ref().is_some_and(|before| is_same(before, planned)) {
            state.begun.push_back((call, planned.clone()));
            if state.begun.len() > MOST_BEGUN {
                state.begun.pop_front();
            }
        }
        (call, before)
    }

    /// Tells the other ranks of calls that have begun since it last did, and were planned otherwise than those before.
    pub(super) fn tell(&self) {
        let mut state = self.mailbox.lock();
        let (told, calls) = (state.told, state.calls);
        state.told = calls;
        let new: Vec<_> = state.begun.iter().filter(|(call, _)| *call > told).cloned().collect();
        drop(state);
        for (call, planned) in new {
            let bytes = Said::of_call(call, &planned).to_bytes();
            self.others().for_each(|to| self.link.post(to, Frame::Begun(bytes.clone())));
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

    /// The next bytes of `from`.
    fn receive(&self, from: u32) -> Result<Vec<u8>> {
        let start = Instant::now();
        let mut told = false;
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
                return Err(self.fail(Error::new(from, "group", format!("rank {from} {how}"))));
            }
            let waited = start.elapsed();
            if waited >= self.timeout {
                let late = state.culprit(self.rank, from);
                drop(state);
                let text = format!("rank {late} is late: waited {} ms for it", self.timeout.as_millis());
                return Err(self.fail(Error::new(late, "exchange", text)));
            }
            if !told && waited >= self.timeout / 2 {
                told = true;
                drop(state);
                self.others().for_each(|to| self.link.post(to, Frame::Waits(from)));
                state = self.mailbox.lock();
                continue;
            }
            let until = if told { self.timeout } else { self.timeout / 2 };
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

    /// All ranks wait for each other, and go on if they begin the same call.
    fn begins(&self, planned: &Arc<Fields>) -> Result<()> {
        let (call, before) = self.note(planned);
        let is_again = before.as_ref().is_some_and(|before| is_same(before, planned));
        let own = Said::of_call(call, planned);
        let mine = own.to_runners(is_again);
        for to in self.others() {
            self.send(to, mine.clone())?;
        }
        let (mut said, mut stranger) = (vec![own; self.size as usize], None);
        for from in self.others() {
            let bytes = self.receive(from)?;
            if bytes == mine {
                continue;
            }
            match Said::of_runner(&bytes, before.as_deref().unwrap_or(&[])) {
                Some(other) => said[from as usize] = other,
                None => {
                    // It stays for who asks whose fault that is.
                    self.mailbox.lock().peers[from as usize].frames.push_front(bytes);
                    stranger = stranger.or(Some(from));
                }
            }
        }
        if let Some(rank) = stranger {
            let text =
                || format!("rank {rank} does something else, where rank {} begins call {call}", self.rank);
            return Err(self.fail(self.heard().unwrap_or_else(|| Error::new(rank, "calls", text()))));
        }
        match disagreement(&said) {
            Some(error) => Err(self.fail(error)),
            None => {
                // None of the calls before this one is asked for again.
                let mut state = self.mailbox.lock();
                let all = state.begun.len();
                state.begun.drain(..all.saturating_sub(1));
                Ok(())
            }
        }
    }

    fn calls(&self) -> u64 {
        self.mailbox.lock().calls
    }

    fn share(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        for to in self.others() {
            self.send(to, mine.to_vec())?;
        }
        (0..self.size)
            .map(|from| if from == self.rank { Ok(mine.to_vec()) } else { self.receive(from) })
            .collect()
    }

    fn exchange(
        &self,
        exchange: &Exchange,
        sources: &[DevSlice<'_>],
        sinks: &mut [DevSliceMut<'_>],
        _stream: &Stream,
    ) -> Result<()> {
        exchange.check(self.rank, sources, sinks).map_err(|error| self.fail(error))?;
        let of = |parcels: &[Parcel], peer: u32| -> Vec<Parcel> {
            parcels.iter().copied().filter(|parcel| parcel.peer == peer).collect()
        };
        let on_a_device =
            |_| self.fail(Error::new(self.rank, "exchange", "a buffer is in device memory, not the host's"));
        // What goes to this rank itself is there without a frame.
        let mut own = Vec::new();
        for to in 0..self.size {
            let parcels = of(&exchange.sends, to);
            let mut bytes =
                Vec::with_capacity(parcels.iter().map(|parcel| parcel.block.bytes() as usize).sum());
            for Parcel { buffer, block, .. } in parcels {
                let source = sources[buffer].as_host().ok_or(()).map_err(on_a_device)?;
                for (offset, count) in block.stretches() {
                    bytes.extend_from_slice(&source[offset as usize..(offset + count) as usize]);
                }
            }
            match bytes {
                bytes if to == self.rank => own = bytes,
                bytes if bytes.is_empty() => {}
                bytes => self.send(to, bytes)?,
            }
        }
        for from in 0..self.size {
            let parcels = of(&exchange.receives, from);
            let wanted: u64 = parcels.iter().map(|parcel| parcel.block.bytes()).sum();
            let bytes = match from {
                from if from == self.rank => std::mem::take(&mut own),
                _ if wanted == 0 => continue,
                from => self.receive(from)?,
            };
            if bytes.len() as u64 != wanted {
                let text = format!("rank {from} sent {} bytes, but {wanted} were to come", bytes.len());
                return Err(self.fail(Error::new(from, "exchange", text)));
            }
            let mut rest = &bytes[..];
            for Parcel { buffer, block, .. } in parcels {
                let sink = sinks[buffer].as_host_mut().ok_or(()).map_err(on_a_device)?;
                for (offset, count) in block.stretches() {
                    let (now, later) = rest.split_at(count as usize);
                    sink[offset as usize..(offset + count) as usize].copy_from_slice(now);
                    rest = later;
                }
            }
        }
        Ok(())
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn failure(&self) -> Option<Error> {
        let state = self.mailbox.lock();
        let died = |(rank, peer): (u32, &Peer)| {
            let how = peer.gone.filter(|how| how.contains("died"))?;
            Some(Error::new(rank, "group", format!("rank {rank} {how}")))
        };
        state.failure.clone().or_else(|| (0..).zip(&state.peers).find_map(died))
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
        if std::thread::panicking() {
            self.fail(Error::new(self.rank, "group", format!("rank {} has panicked", self.rank)));
        }
        // What it failed of goes before its farewell: the rank that found it out may not have told everybody yet.
        let failure = self.mailbox.lock().failure.clone();
        for to in self.others() {
            if let Some(error) = &failure {
                self.link.post(to, Frame::Failed(error.clone()));
            }
            self.link.post(to, Frame::Left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plans() -> [Arc<Fields>; 3] {
        ["0", "b", "t"].map(|mask| [("mask".to_owned(), mask.to_owned())].into())
    }

    /// Each rank knows by itself, whether it is it or the other one that begins what it began before.
    #[test]
    fn a_rank_goes_on_with_the_call_that_the_other_one_begins_and_with_no_other() {
        let plans = plans();
        let begin = |own: usize, theirs: (u64, usize)| {
            let hosts = crate::group::threads(2, Duration::from_secs(9));
            let mut last = None;
            let mut both = |own: usize, (call, theirs): (u64, usize)| {
                let said = Said::of_call(call, &plans[theirs]);
                hosts[1].send(0, said.to_runners(last == Some(theirs)))?;
                last = Some(theirs);
                hosts[0].begins(&plans[own])
            };
            both(0, (1, 0))?;
            both(1, (2, 1))?;
            both(own, theirs)?;
            assert_eq!(hosts[0].mailbox.lock().begun.len(), 1);
            Ok(())
        };
        let fault =
            |own, theirs| begin(own, theirs).map_err(|error: Error| (error.rank, error.field, error.text));
        assert_eq!((fault(0, (3, 0)), fault(1, (3, 1))), (Ok(()), Ok(())));
        let named = |field: &str, text: &str| Err((1, field.to_owned(), text.to_owned()));
        assert_eq!(fault(0, (3, 1)), named("mask", "rank 1 says mask b, but most say 0"));
        assert_eq!(fault(1, (3, 0)), named("mask", "rank 1 says mask 0, but most say b"));
        assert_eq!(fault(1, (4, 1)), named("calls", "rank 1 says calls 4, but most say 3"));
    }

    /// Who runs two plans in turn tells of each call, and is not remembered by those who have begun as many.
    #[test]
    fn calls_that_all_have_begun_alike_are_forgotten() {
        let hosts = crate::group::threads(3, Duration::from_secs(9));
        let begins = |host: &Host, plan| {
            host.note(plan);
            host.tell();
        };
        let plans = plans();
        for call in 0..50 {
            hosts.iter().for_each(|host| begins(host, &plans[call % 2]));
        }
        for host in &hosts {
            let state = host.mailbox.lock();
            assert_eq!(state.calls, 50);
            assert!(state.peers.iter().all(|peer| peer.begun.len() <= 1));
            drop(state);
            assert_eq!(host.begun_otherwise(), None);
        }
        for (host, plan) in hosts.iter().zip([0, 2, 0]) {
            begins(host, &plans[plan]);
        }
        for host in &hosts {
            let error = host.begun_otherwise().map(|error| (error.rank, error.field));
            assert_eq!(error, Some((1, "mask".to_owned())));
        }
    }
}
