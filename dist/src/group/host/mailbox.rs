//! Arrival of frames from other ranks, and what is known of those ranks.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::Frame;
use crate::agree::{Fields, Said};
use crate::error::Error;

/// Frames that have arrived from the other ranks.
pub(crate) struct Mailbox {
    state: Mutex<State>,
    pub(super) changed: Condvar,
}

pub(super) struct State {
    pub(super) peers: Vec<Peer>,
    pub(super) failure: Option<Error>,
    /// Number of calls that have begun on this rank. `begun` has the number and the fields of each call that
    /// was planned otherwise than the call before.
    pub(super) calls: u64,
    pub(super) begun: VecDeque<(u64, Arc<Fields>)>,
    /// Number of the last call that the other ranks have been sent.
    pub(super) told: u64,
}

#[derive(Clone, Default)]
pub(super) struct Peer {
    /// Frames of shares and exchanges, in order.
    pub(super) frames: VecDeque<Vec<u8>>,
    /// Calls of the rank that were planned otherwise than the call before, as far as they are not known to
    /// equal this rank's calls.
    pub(super) begun: VecDeque<Said>,
    waits_for: Option<u32>,
    pub(super) gone: Option<Gone>,
}

/// Reason why a rank sends nothing more.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Gone {
    Left,
    Died,
    Garbled,
}

impl Gone {
    /// Error that blames the rank for being gone.
    pub(super) fn error(self, rank: u32) -> Error {
        let how = match self {
            Self::Left => "has left the group",
            Self::Died => "has died: its connection broke",
            Self::Garbled => "sent what is no message of a group",
        };
        Error::new(rank, "group", format!("rank {rank} {how}"))
    }
}

impl Mailbox {
    pub(crate) fn new(size: u32) -> Arc<Self> {
        let peers = vec![Peer::default(); size as usize];
        let state = State { peers, failure: None, calls: 0, begun: VecDeque::new(), told: 0 };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what `from` has sent.
    pub(crate) fn deliver(&self, from: u32, frame: Frame) {
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
            Frame::Left => peer.gone = peer.gone.or(Some(Gone::Left)),
            Frame::Died => peer.gone = peer.gone.or(Some(Gone::Died)),
            Frame::Garbled => peer.gone = peer.gone.or(Some(Gone::Garbled)),
        }
        self.changed.notify_all();
    }
}

impl State {
    /// Fields of a call of this rank; `None` if it has not begun or is too old.
    pub(super) fn planned(&self, call: u64) -> Option<&Arc<Fields>> {
        let (_, planned) = self.begun.iter().rev().find(|(first, _)| *first <= call)?;
        (call <= self.calls).then_some(planned)
    }

    /// First call of a rank, by its messages so far, with another plan than here. Calls before it are
    /// forgotten.
    pub(super) fn otherwise(&mut self, rank: u32) -> Option<u64> {
        let rank = rank as usize;
        while let Some(said) = self.peers[rank].begun.front() {
            match self.planned(said.calls) {
                Some(planned) if said.is_of(planned) => {}
                Some(_) => return Some(said.calls),
                // A message that is still to come, or that was forgotten.
                None if said.calls > self.calls => return None,
                None => {}
            }
            self.peers[rank].begun.pop_front();
        }
        None
    }

    /// The rank that `from` waits for, or the one that that one waits for, and so on.
    pub(super) fn culprit(&self, own: u32, from: u32) -> u32 {
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
