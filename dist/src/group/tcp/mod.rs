//! Ranks that are processes, of one host or several, over TCP.
//!
//! - `meeting`: rank 0 listens at the rendezvous. Every other rank sends rank 0 its own address, gets the
//!   list of all, and connects to the ranks below it. One deadline ends all of it.
//! - `proof`: both sides of every connection prove that they know the job's secret.
//! - `connection`: each lasting connection has a thread that reads and one that writes, so sending never
//!   waits.
//!
//! Ranks without the secret cannot join a group. What ranks send each other afterwards is neither encrypted
//! nor authenticated.

mod connection;
mod meeting;
mod proof;
mod timed;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::Host;
use super::host::Mailbox;
use crate::error::{Error, Result};
use connection::{Connection, Mesh};
use meeting::Meeting;
use proof::{SHORTEST_SECRET, Secret};

/// Place where the ranks of a group meet, and the facts that they share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    /// Index of this rank.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    place: Place,
    secret: Option<Secret>,
    listen: Option<IpAddr>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// Rank 0 listens at this host and port.
    Address(String),
    /// Rank 0 writes into this file where it listens, and a secret.
    File(PathBuf),
}

/// The environment's words for [`Rendezvous::secret`] and [`Rendezvous::listen`].
const SECRET: &str = "FMHA_DIST_SECRET";
const LISTEN: &str = "FMHA_DIST_LISTEN";

impl Rendezvous {
    /// Rank 0 listens at `address`, `host:port`: one of the loopback, unless there is a [`secret`](Self::secret).
    #[must_use]
    pub fn at(address: impl Into<String>, rank: u32, size: u32) -> Self {
        Self { rank, size, place: Place::Address(address.into()), secret: None, listen: None }
    }

    /// Rank 0 listens at a free port of this host, and writes the port and a random secret for this meeting
    /// into a file. The file must not exist yet, and every rank must see it. On Unix its owner alone can read
    /// it.
    #[must_use]
    pub fn file(path: impl AsRef<Path>, rank: u32, size: u32) -> Self {
        Self { rank, size, place: Place::File(path.as_ref().to_owned()), secret: None, listen: None }
    }

    /// Secret of the job, known to its ranks alone: at least 16 bytes that cannot be guessed, such as the
    /// output of `openssl rand -hex 16`. Both sides of every connection of the group prove that they know it.
    #[must_use]
    pub fn secret(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.secret = Some(Secret(secret.as_ref().to_owned()));
        self
    }

    /// The address of this host at which this rank listens. By default rank 0 listens where the others look
    /// for it, and every other rank at the address by which it reaches rank 0.
    #[must_use]
    pub fn listen(mut self, address: IpAddr) -> Self {
        self.listen = Some(address);
        self
    }

    /// Reads torchrun's variables `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, and those of
    /// [`with_env`](Self::with_env). Uses the next higher port, since torch's own store listens at the given
    /// one.
    ///
    /// # Errors
    /// The variable that is missing or no number, with its text.
    pub fn from_env() -> Result<Self> {
        Self::from_words(|name| std::env::var(name).map_err(|error| error.to_string()))?.with_env()
    }

    /// The [`secret`](Self::secret) of `FMHA_DIST_SECRET` and the address to [`listen`](Self::listen) at of
    /// `FMHA_DIST_LISTEN`, each where it is set and none was given.
    ///
    /// # Errors
    /// The variable that is no address, with its text.
    pub fn with_env(self) -> Result<Self> {
        let text = |name| std::env::var_os(name).filter(|text| !text.is_empty());
        self.with_words(
            text(SECRET).map(|secret| secret.as_encoded_bytes().to_owned()),
            text(LISTEN).map(|address| address.to_string_lossy().into_owned()),
        )
    }

    fn with_words(mut self, secret: Option<Vec<u8>>, listen: Option<String>) -> Result<Self> {
        self.secret = self.secret.or(secret.map(Secret));
        if let (None, Some(text)) = (self.listen, listen) {
            let address = text
                .parse()
                .map_err(|error| Error::new(self.rank, LISTEN, format!("{LISTEN} is `{text}`: {error}")))?;
            self.listen = Some(address);
        }
        Ok(self)
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

/// Joins the group, and waits for all of its ranks, at most `timeout` long. The same timeout then says when a
/// rank is late.
///
/// # Errors
/// The rank that has not come, has left, or does not know the secret, or what the system said. `secret`: rank
/// 0 is looked for beyond the loopback, and this rank has no secret, or too short a one.
pub fn connect(rendezvous: &Rendezvous, timeout: Duration) -> Result<Host> {
    let Rendezvous { rank, size, ref place, ref secret, listen } = *rendezvous;
    if rank >= size {
        return Err(Error::new(rank, "rank", format!("rank {rank} is not below the group's size {size}")));
    }
    if size > MAX_RANKS {
        return Err(Error::new(rank, "size", format!("{size} ranks are more than {MAX_RANKS}")));
    }
    if let Some(Secret(secret)) = secret.as_ref().filter(|secret| secret.0.len() < SHORTEST_SECRET) {
        let text = format!(
            "the secret has {} bytes, and less than {SHORTEST_SECRET} can be guessed ({SECRET})",
            secret.len()
        );
        return Err(Error::new(rank, "secret", text));
    }
    let end = after(timeout);
    let streams = Meeting::new((rank, size), end, secret.as_ref(), listen).meet(place)?;
    let mailbox = Mailbox::new(size);
    let mut connections = Vec::new();
    for (peer, stream) in (0..size).zip(streams) {
        let connection = stream.map(|stream| Connection::new(peer, stream, &mailbox, timeout)).transpose();
        connections.push(connection.map_err(|error| Error::new(rank, "group", error.to_string()))?);
    }
    Ok(Host::new(rank, size, timeout, mailbox, Box::new(Mesh::new(connections, timeout))))
}

/// Ranks of a group at most: each has a connection and two threads for each other one.
pub const MAX_RANKS: u32 = 1 << 14;

/// The instant that is `timeout` from now.
pub(super) fn after(timeout: Duration) -> Instant {
    // A century, where the timeout is beyond the clock.
    const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or(now + LONGEST)
}

#[cfg(test)]
mod tests;
