//! Services of a backend for ranks of one host: each other's memory, and words in it that their streams wait
//! for.

use crate::backend::DevBuffer;
use crate::error::Result;

/// A step of a stream that needs no kernel. Addresses are those of 32-bit words in a device's memory, this one's or an
/// [imported](Peers::import) one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Writes a value to a word, after everything that the stream has queued before is visible to every
    /// device.
    Write {
        /// The word.
        at: u64,
        /// Value that the word gets.
        value: u32,
    },
    /// Holds the stream until the word has this value.
    Await {
        /// The word, in this device's memory.
        at: u64,
        /// Value that the stream waits for.
        value: u32,
    },
}

/// Memory that several processes' devices share, copies by engines that take no multiprocessor, and words.
pub trait Peers: Send + Sync {
    /// Names a buffer of this device to other processes of the host, for as long as it lives.
    ///
    /// # Errors
    /// What the driver said.
    fn export(&self, buffer: &DevBuffer) -> Result<[u8; 64]>;

    /// The address at which this device has the buffer that another process has exported.
    ///
    /// # Errors
    /// What the driver said: another host, a device without a link to this one, a buffer of this process.
    fn import(&self, name: &[u8; 64]) -> Result<u64>;

    /// Ends an import.
    ///
    /// # Safety
    /// [`import`](Self::import) gave the address, and nothing queued uses it any more.
    unsafe fn release(&self, address: u64);

    /// Queues a copy, of this device's memory or an imported one's, by a copy engine.
    ///
    /// # Safety
    /// A live stream; `bytes` are there on both sides, and are the stream's to read and to write by then.
    ///
    /// # Errors
    /// What the driver said.
    unsafe fn copy(&self, from: u64, to: u64, bytes: u64, stream: u64) -> Result<()>;

    /// Queues steps, in their order.
    ///
    /// # Safety
    /// A live stream; the words are there, each at a multiple of 4.
    ///
    /// # Errors
    /// What the driver said.
    unsafe fn words(&self, words: &[Word], stream: u64) -> Result<()>;

    /// Reads a word of this device's memory, and waits for that; `stream` has no other work.
    ///
    /// # Safety
    /// A live stream; the word is there.
    ///
    /// # Errors
    /// What the driver said.
    unsafe fn read_word(&self, at: u64, stream: u64) -> Result<u32>;
}
