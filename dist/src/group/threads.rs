//! Ranks that are threads of one process.

use std::sync::Arc;
use std::time::Duration;

use super::Host;
use super::host::{Frame, Link, Mailbox};

struct Channel {
    rank: u32,
    mailboxes: Arc<[Arc<Mailbox>]>,
}

impl Link for Channel {
    fn post(&self, to: u32, frame: Frame) {
        self.mailboxes[to as usize].deliver(self.rank, frame);
    }
}

/// A group of `size` ranks in this process, by rank: one for each thread. A rank that another waits for longer than
/// `timeout` is late.
#[must_use]
pub fn threads(size: u32, timeout: Duration) -> Vec<Host> {
    let mailboxes: Arc<[Arc<Mailbox>]> = (0..size).map(|_| Mailbox::new(size)).collect();
    (0..size)
        .map(|rank| {
            let link = Channel { rank, mailboxes: mailboxes.clone() };
            Host::new(rank, size, timeout, mailboxes[rank as usize].clone(), Box::new(link))
        })
        .collect()
}
