//! Names by which ranks find each other's memory: the driver gives them, and other processes map them.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::sync::OnceLock;

use fmha::{DevBuffer, Device};

/// Reason why ranks cannot share memory.
const NO_PEERS: &str = "its device shares no memory with other processes";

/// Message of a rank to all others: the names of its buffers.
pub(super) struct Name {
    /// Identifier of the boot of the host, unique to it.
    boot: Vec<u8>,
    /// Random number of the process.
    process: u64,
    /// Address and name of each buffer, in the order of [`Coming::all_buffers`](super::Coming::all_buffers),
    /// and of the words after them. Another process maps memory by the name.
    places: Vec<(u64, [u8; 64])>,
}

impl Name {
    /// Names buffers of this device.
    pub(super) fn new<'a>(
        device: &Device,
        buffers: impl IntoIterator<Item = &'a DevBuffer>,
    ) -> Result<Self, String> {
        let peers = device.peers().ok_or(NO_PEERS)?;
        // Ranks that are threads use each other's addresses. Threads on several devices are not supported.
        let place = |buffer: &DevBuffer| {
            let name = if device.has_clock() { peers.export(buffer)? } else { [0; 64] };
            Ok((buffer.as_ptr() as u64, name))
        };
        let places = buffers.into_iter().map(place).collect::<Result<_, fmha::Error>>();
        Ok(Self {
            boot: std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default(),
            process: process(),
            places: places.map_err(|error| error.to_string())?,
        })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
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

/// Memory of another rank, mapped by this device for as long as this lives.
pub(super) struct Remote {
    device: Device,
    /// Addresses, in the order of [`Name`].
    places: Vec<u64>,
    is_mapped: bool,
}

impl Remote {
    /// Memory of every rank, by rank, from the [names](Name) that all ranks have sent. This rank uses its own
    /// addresses.
    ///
    /// # Errors
    /// The rank whose memory cannot be mapped, and why.
    pub(super) fn all(device: &Device, own: &Name, rank: u32, told: &[Vec<u8>]) -> Result<Vec<Self>, String> {
        let peers = device.peers().ok_or(NO_PEERS)?;
        let map = |(other, bytes): (u32, &Vec<u8>)| {
            let name =
                Name::from_bytes(bytes).ok_or_else(|| format!("rank {other} says {} bytes", bytes.len()))?;
            if name.boot != own.boot {
                return Err(format!("rank {other} is on another host than rank {rank}"));
            }
            if name.places.len() != own.places.len() {
                let (here, there) = (own.places.len(), name.places.len());
                return Err(format!("rank {other} has {there} buffers for others, rank {rank} {here}"));
            }
            let is_mapped = other != rank && device.has_clock();
            if is_mapped && name.process == own.process {
                return Err(format!("ranks {rank} and {other} are threads of 1 process"));
            }
            let mut remote = Self { device: device.clone(), places: Vec::new(), is_mapped };
            for (address, name) in &name.places {
                let mapped = if is_mapped { peers.import(name) } else { Ok(*address) };
                remote.places.push(mapped.map_err(|error| error.to_string())?);
            }
            Ok(remote)
        };
        (0..).zip(told).map(map).collect()
    }

    /// Addresses of the buffers, in the order of [`Coming::all_buffers`](super::Coming::all_buffers).
    pub(super) fn buffers(&self) -> &[u64] {
        self.places.split_last().map_or(&[], |(_, buffers)| buffers)
    }

    /// Address of the words.
    pub(super) fn words(&self) -> u64 {
        self.places.last().copied().unwrap_or_default()
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if let Some(peers) = self.device.peers().filter(|_| self.is_mapped) {
            // SAFETY: mapped once, and not used again.
            self.places.iter().for_each(|&place| unsafe { peers.release(place) });
        }
    }
}
