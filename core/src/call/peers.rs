//! Services of a backend for ranks on one host: access to each other's memory, and flag words there that streams
//! write and wait for.

use crate::backend::DevBuffer;
use crate::error::Result;

/// A step of a stream that needs no kernel. Addresses are those of 32-bit words in device memory, of this device or
/// [imported](Peers::import).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Writes a value to a word, after everything that the stream has queued before is visible to every
    /// device.
    Write {
        /// Address of the 32-bit word.
        at: u64,
        /// Value to write to the word.
        value: u32,
    },
    /// Holds the stream until the word has this value.
    Await {
        /// Address of the word, in this device's memory.
        at: u64,
        /// Value for which the stream waits.
        value: u32,
    },
}

/// Device memory that several processes share, copies by copy engines that use no multiprocessor, and flag words.
pub trait Peers: Send + Sync {
    /// Returns a name by which other processes of the host can import a buffer of this device while it lives.
    ///
    /// # Errors
    /// An error of the driver.
    fn export(&self, buffer: &DevBuffer) -> Result<[u8; 64]>;

    /// Maps a buffer that another process has exported, and returns its address on this device.
    ///
    /// # Errors
    /// An error of the driver: another host, a device without a link to this one, a buffer of this process.
    fn import(&self, name: &[u8; 64]) -> Result<u64>;

    /// Ends an import.
    ///
    /// # Safety
    /// [`import`](Self::import) gave the address, and nothing queued uses it any more.
    unsafe fn release(&self, address: u64);

    /// Queues a copy, of this device's memory or an imported one's, by a copy engine.
    ///
    /// # Safety
    /// A live stream; `bytes` exist on both sides, and the stream may then read the source and write the target.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn copy(&self, from: u64, to: u64, bytes: u64, stream: u64) -> Result<()>;

    /// Queues these steps in their order.
    ///
    /// # Safety
    /// The stream is live; the words exist, each at a multiple of 4.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn words(&self, words: &[Word], stream: u64) -> Result<()>;

    /// Reads a word of this device's memory, and waits for the result; `stream` has no other work.
    ///
    /// # Safety
    /// A live stream; the word is there.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn read_word(&self, at: u64, stream: u64) -> Result<u32>;
}
