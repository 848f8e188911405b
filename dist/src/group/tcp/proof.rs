//! Messages of two ranks when they meet, and the proof by each that it knows the job's secret.
//!
//! ```text
//!  connecting rank                                     listening rank
//!  Hello      rank, size, whom it wants, its address, nonce ──►
//!             ◄── Challenge  rank, size, nonce
//!  proof      MAC of both by the secret ──►
//!             ◄── Letter     welcome or refusal, and its MAC by the secret, over both messages too
//!             ◄── Letter     from rank 0 alone: where all ranks listen
//! ```
//!
//! The rank that connects proves first, so a stranger that connects to a port gets nothing to try secrets on.
//! Both nonces are random, so the messages of one meeting serve for no other.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::Instant;

use hmac_sha256::HMAC;

use super::timed;
use crate::error::Error;

/// Bytes of a secret at least: shorter ones can be guessed by a rank's proof.
pub(super) const SHORTEST_SECRET: usize = 16;

/// Secret that the ranks of a job share.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Secret(pub(super) Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Key that authenticates messages.
pub(super) struct Key([u8; 32]);

type Mac = [u8; 32];

impl Key {
    /// Makes the key from the job's secret and the one in the file where the ranks meet. If both are missing,
    /// the key is public.
    pub(super) fn new(secret: Option<&Secret>, of_file: &[u8]) -> Self {
        let secret = secret.map_or(&[][..], |secret| &secret.0);
        Self(mac(b"fmha-dist key", &[secret, of_file]).finalize())
    }

    fn of(&self, parts: &[&[u8]]) -> HMAC {
        mac(&self.0, parts)
    }
}

/// Each part after its length, so that no two lists of parts are the same bytes.
fn mac(key: &[u8], parts: &[&[u8]]) -> HMAC {
    let mut mac = HMAC::new(key);
    for part in parts {
        mac.update((part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

/// Random bytes from the system.
pub(super) fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// First four bytes of a rank's message.
const MAGIC: u32 = 0xF3A1_D158;

/// Bytes of an address: those of an IPv6 address, which IPv4's are mapped to, and of the port.
pub(super) const ADDRESS_BYTES: usize = 18;

pub(super) fn address_to_bytes(address: SocketAddr) -> [u8; ADDRESS_BYTES] {
    let ip = match address.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let mut bytes = [0; ADDRESS_BYTES];
    bytes[..16].copy_from_slice(&ip.octets());
    bytes[16..].copy_from_slice(&address.port().to_le_bytes());
    bytes
}

pub(super) fn address_of_bytes(bytes: &[u8; ADDRESS_BYTES]) -> SocketAddr {
    let [ip @ .., low, high] = *bytes;
    SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), u16::from_le_bytes([low, high]))
}

/// Introduction of the rank that connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) rank: u32,
    pub(super) size: u32,
    /// The rank that is expected to listen at the address.
    pub(super) wants: u32,
    /// Address of the rank that connects.
    pub(super) listens: SocketAddr,
}

const HELLO_BYTES: usize = 16 + ADDRESS_BYTES + 32;
const CHALLENGE_BYTES: usize = 12 + 32;

/// Messages before the proofs, which the proofs cover.
type Transcript = [u8; HELLO_BYTES + CHALLENGE_BYTES];

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes[4 * at..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word))
}

fn another_program() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "another program, or another version, is there")
}

/// Message of the rank that listens to the rank that has connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Letter {
    /// The rank is accepted.
    Welcome,
    /// The meeting has failed.
    Refusal(Error),
    /// Addresses of all ranks, by rank.
    List(Vec<u8>),
}

/// Bytes of a refusal at most.
const LONGEST_REFUSAL: usize = 1 << 12;

/// A connection between two ranks that have proved their identity.
pub(super) struct Talk {
    pub(super) stream: TcpStream,
    said: Transcript,
}

/// Result of a connection attempt.
pub(super) enum Answer {
    Welcome(Talk),
    /// Refusal by the other rank, which knows the secret.
    Refused(Error),
    /// The other side answers, but does not know this secret.
    OtherSecret,
}

impl Talk {
    /// Sends `hello` and its proof, and reads the answer.
    pub(super) fn connect(stream: TcpStream, hello: &Hello, key: &Key, end: Instant) -> io::Result<Answer> {
        let mut said = [0; HELLO_BYTES + CHALLENGE_BYTES];
        let (own, theirs) = said.split_at_mut(HELLO_BYTES);
        own.copy_from_slice(
            &[
                &words(&[MAGIC, hello.rank, hello.size, hello.wants])[..],
                &address_to_bytes(hello.listens),
                &random()?,
            ]
            .concat(),
        );
        timed::write_all(&stream, own, end)?;
        timed::read_exact(&stream, theirs, end)?;
        if word(theirs, 0) != MAGIC {
            return Err(another_program());
        }
        timed::write_all(&stream, &key.of(&[b"connects", &said]).finalize(), end)?;
        let talk = Self { stream, said };
        Ok(match talk.receive(key, 0, end)? {
            Some(Letter::Welcome) => Answer::Welcome(talk),
            Some(Letter::Refusal(error)) => Answer::Refused(error),
            Some(Letter::List(_)) => return Err(another_program()),
            None => Answer::OtherSecret,
        })
    }

    /// Reads a hello and checks the proof. The caller sends the answer.
    pub(super) fn accept(
        stream: TcpStream,
        (rank, size): (u32, u32),
        key: &Key,
        end: Instant,
    ) -> io::Result<(Hello, Self, bool)> {
        let mut said = [0; HELLO_BYTES + CHALLENGE_BYTES];
        let (theirs, own) = said.split_at_mut(HELLO_BYTES);
        timed::read_exact(&stream, theirs, end)?;
        if word(theirs, 0) != MAGIC {
            return Err(another_program());
        }
        let mut listens = [0; ADDRESS_BYTES];
        listens.copy_from_slice(&theirs[16..16 + ADDRESS_BYTES]);
        let hello = Hello {
            rank: word(theirs, 1),
            size: word(theirs, 2),
            wants: word(theirs, 3),
            listens: address_of_bytes(&listens),
        };
        own.copy_from_slice(&[&words(&[MAGIC, rank, size])[..], &random()?].concat());
        timed::write_all(&stream, own, end)?;
        let mut proof = [0; 32];
        timed::read_exact(&stream, &mut proof, end)?;
        let knows = key.of(&[b"connects", &said]).finalize_verify(&proof);
        Ok((hello, Self { stream, said }, knows))
    }

    /// Sends a letter: its kind, its length, its MAC, its bytes.
    pub(super) fn send(&self, key: &Key, letter: &Letter, end: Instant) -> io::Result<()> {
        let refusal;
        let (kind, bytes): (u8, &[u8]) = match letter {
            Letter::Welcome => (0, &[]),
            Letter::Refusal(error) => {
                refusal = error.to_bytes();
                (1, &refusal[..refusal.len().min(LONGEST_REFUSAL)])
            }
            Letter::List(list) => (2, list),
        };
        let mac = self.mac(key, kind, bytes);
        let length = (bytes.len() as u32).to_le_bytes();
        timed::write_all(&self.stream, &[&[kind][..], &length, &mac, bytes].concat(), end)
    }

    /// Receives a letter of at most `most` bytes, or a refusal; none where its sender does not know the secret.
    pub(super) fn receive(&self, key: &Key, most: usize, end: Instant) -> io::Result<Option<Letter>> {
        let mut head = [0; 37];
        timed::read_exact(&self.stream, &mut head, end)?;
        let [kind, rest @ ..] = head;
        let (length, mut mac) = (word(&rest, 0) as usize, [0; 32]);
        mac.copy_from_slice(&rest[4..]);
        let most = if kind == 1 { LONGEST_REFUSAL } else { most };
        if length > most {
            let text = format!("{length} bytes are announced where at most {most} are to come");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let mut bytes = vec![0; length];
        timed::read_exact(&self.stream, &mut bytes, end)?;
        if !self.mac_of(key, kind, &bytes).finalize_verify(&mac) {
            return Ok(None);
        }
        match kind {
            0 => Ok(Some(Letter::Welcome)),
            1 => Error::of_bytes(&bytes).map(Letter::Refusal).map(Some).ok_or_else(another_program),
            2 => Ok(Some(Letter::List(bytes))),
            _ => Err(another_program()),
        }
    }

    fn mac_of(&self, key: &Key, kind: u8, bytes: &[u8]) -> HMAC {
        key.of(&[b"listens", &self.said, &[kind], bytes])
    }

    fn mac(&self, key: &Key, kind: u8, bytes: &[u8]) -> Mac {
        self.mac_of(key, kind, bytes).finalize()
    }

    /// Whether the other side has closed the connection, on which nothing is to come from it.
    pub(super) fn is_closed(&self) -> bool {
        let peek = || {
            self.stream.set_nonblocking(true)?;
            let peeked = self.stream.peek(&mut [0]);
            self.stream.set_nonblocking(false)?;
            peeked
        };
        match peek() {
            Ok(count) => count == 0,
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        }
    }
}
