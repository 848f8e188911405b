//! Comparison of calls: whether all ranks begin the same call, and which rank is at fault where they do not.
//!
//! A call that is planned as the one before is sent by its number alone. Another one is sent with its fields,
//! which are kept until all ranks have begun it.

use std::sync::Arc;
use std::time::Instant;

use super::mailbox::Peer;
use super::{Frame, Host};
use crate::agree::{Fields, MOMENT, Said, disagreement, out_of_turn};
use crate::error::{Error, Result};
use crate::group::Group as _;

/// Largest number of stored calls that were planned otherwise than the call before, for comparison with those
/// of other ranks.
const MOST_BEGUN: usize = 1 << 12;

/// Whether two calls have equal plans: usually they share one.
fn is_same(a: &Arc<Fields>, b: &Arc<Fields>) -> bool {
    Arc::ptr_eq(a, b) || a == b
}

impl Host {
    /// Error where some ranks plan, by their messages so far, while this rank has begun a call. `None` where
    /// no rank plans, or only ranks that are ahead.
    fn out_of_turn(&self) -> Option<Error> {
        let state = self.mailbox.lock();
        let plans = |(rank, peer): (u32, &Peer)| {
            let said = Said::read(peer.frames.front()?)?;
            (said.calls < state.calls).then_some((rank, said))
        };
        let said: Vec<_> = (0..).zip(&state.peers).filter_map(plans).collect();
        out_of_turn(self.rank, self.size, state.planned(state.calls)?, &said)
    }

    /// Error where ranks have begun the same call with different plans, by their messages so far.
    fn begun_otherwise(&self) -> Option<Error> {
        let mut state = self.mailbox.lock();
        let call = (0..self.size).filter_map(|rank| state.otherwise(rank)).min()?;
        let own = Said::of_call(call, state.planned(call)?);
        let of = |peer: &Peer| peer.begun.iter().find(|said| said.calls == call).unwrap_or(&own).clone();
        disagreement(&state.peers.iter().map(of).collect::<Vec<_>>())
    }

    /// Error where ranks are at different calls, after a moment in which all can send their messages.
    pub(in crate::group) fn judged(&self) -> Option<Error> {
        let fault = || self.out_of_turn().or_else(|| self.begun_otherwise());
        fault()?;
        std::thread::sleep(MOMENT.min(self.timeout / 4));
        fault()
    }

    /// Error where ranks are at different calls, found by any rank. Of two such ranks only one may be able to
    /// find it.
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

    /// Counts a call that begins; [`tell`](Self::tell) sends it to the other ranks. Returns the number of the
    /// call, and the fields of the call before.
    pub(in crate::group) fn note(&self, planned: &Arc<Fields>) -> (u64, Option<Arc<Fields>>) {
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

    /// Sends the other ranks the calls that have begun since the last time and were planned otherwise than
    /// the call before.
    pub(in crate::group) fn tell(&self) {
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

    /// Waits until all ranks begin a call, and goes on if it is the same call.
    pub(super) fn begin(&self, planned: &Arc<Fields>) -> Result<()> {
        let (call, before) = self.note(planned);
        let is_again = before.as_ref().is_some_and(|before| is_same(before, planned));
        let own = Said::of_call(call, planned);
        let mine = own.to_runners(is_again);
        for to in self.others() {
            self.send(to, mine.clone())?;
        }
        let (mut said, mut stranger) = (vec![own; self.size as usize], None);
        self.receive_all(self.others(), |from, bytes| {
            if bytes == mine {
                return Ok(());
            }
            match Said::of_runner(&bytes, before.as_deref().unwrap_or(&[])) {
                Some(other) => said[from as usize] = other,
                None => {
                    // The frame stays in the mailbox for the search for the rank at fault.
                    self.mailbox.lock().peers[from as usize].frames.push_front(bytes);
                    stranger = stranger.or(Some(from));
                }
            }
            Ok(())
        })?;
        if let Some(rank) = stranger {
            let text =
                || format!("rank {rank} does something else, where rank {} begins call {call}", self.rank);
            return Err(self.fail(self.heard().unwrap_or_else(|| Error::new(rank, "calls", text()))));
        }
        match disagreement(&said) {
            Some(error) => Err(self.fail(error)),
            None => {
                // Calls before this one are never looked up again.
                let mut state = self.mailbox.lock();
                let all = state.begun.len();
                state.begun.drain(..all.saturating_sub(1));
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn plans() -> [Arc<Fields>; 3] {
        ["0", "b", "t"].map(|mask| [("mask".to_owned(), mask.to_owned())].into())
    }

    /// Each rank knows by itself which of the two begins a call that the other began before.
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

    /// A rank that alternates two plans reports each call. Ranks that have begun as many calls forget the
    /// report.
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
