//! Ranks that write to each other's memory.

use std::sync::Arc;
use std::time::Duration;

use fmha::{Arrivals, DevBuffer, DevSlice, Device};

use super::Coming;
use super::names::{Name, Remote};
use super::watch::Watch;
use super::words::Words;
use crate::error::{Error, Result};
use crate::group::Group;

/// Bytes of a page. Other processes map whole pages, which no other buffer may share.
pub(crate) fn page(device: &Device) -> u64 {
    if device.has_clock() { 2 << 20 } else { 1 }
}

/// Memory and words that ranks share, made once for each program and kept as long as it lives.
pub(crate) struct Meeting {
    /// Dropped first, before the memory that it watches.
    _watch: Option<Watch>,
    pub(super) device: Device,
    pub(super) coming: Coming,
    pub(super) rank: u32,
    timeout: Duration,
    /// End of each piece of keys.
    ends: DevBuffer,
    pub(super) words: Words,
    /// Memory of other ranks, by rank.
    pub(super) remotes: Vec<Remote>,
}

/// Parts of a meeting that a rank has made before it knows whether there will be one.
struct Prepared {
    name: Name,
    coming: Coming,
    ends: DevBuffer,
    words: DevBuffer,
}

impl Prepared {
    fn new(
        (coming, buffers): (Coming, Vec<&DevBuffer>),
        device: &Device,
        ranks: u32,
    ) -> Result<Self, String> {
        let ends: Vec<u32> = coming.pieces.iter().map(|piece| piece.rows.end).collect();
        let [ends, words] = [ends, Words::at_first(coming.pieces.len(), ranks)].map(|words| {
            let mut buffer =
                device.memory().alloc((4 * words.len() as u64).next_multiple_of(page(device)))?;
            device.memory().upload(&words, &mut buffer)?;
            Ok(buffer)
        });
        let said = |error: fmha::Error| error.to_string();
        let (ends, words) = (ends.map_err(said)?, words.map_err(said)?);
        let name = Name::new(device, buffers.into_iter().chain([&words]))?;
        Ok(Self { name, coming, ends, words })
    }
}

impl Meeting {
    /// Makes a meeting; all ranks call it together. `mine` is the need of this rank's program and its buffers
    /// that others write, or the reason why it has none. All ranks get a meeting, or all get the reason.
    ///
    /// # Errors
    /// The rank that is gone, late or has failed.
    pub(crate) fn new(
        mine: Result<(Coming, Vec<&DevBuffer>), String>,
        group: &Arc<dyn Group>,
        device: &Device,
    ) -> Result<Result<Self, String>> {
        let (rank, ranks) = (group.rank(), group.size());
        let prepared = mine.and_then(|mine| Prepared::new(mine, device, ranks));
        let told = match all_say(&**group, prepared.as_ref().map(|prepared| prepared.name.to_bytes()))? {
            Ok(told) => told,
            Err(reason) => return Ok(Err(reason)),
        };
        let Prepared { name, coming, ends, words } = match prepared {
            Ok(prepared) => prepared,
            Err(reason) => return Ok(Err(reason)),
        };
        let remotes = Remote::all(device, &name, rank, &told);
        let agreed = all_say(&**group, remotes.as_ref().map(|_| vec![1]))?;
        let remotes = match agreed.and(remotes) {
            Ok(remotes) => remotes,
            Err(reason) => return Ok(Err(reason)),
        };
        let (address, pieces) = (words.as_ptr() as u64, coming.pieces.len() as u64);
        // Never freed: other ranks' last steps may still write here when this one has finished.
        std::mem::forget(words);
        let words = Words { address, pieces, ranks: ranks.into() };
        let watch = Watch::new(device, group.clone(), words, &coming.pieces);
        let watch = watch.map_err(|error| group.fail(Error::of(rank, &error)))?;
        let (device, timeout) = (device.clone(), group.timeout());
        Ok(Ok(Self { _watch: watch, device, coming, rank, timeout, ends, words, remotes }))
    }

    /// Arguments of a kernel that waits.
    pub(crate) fn arrivals(&self) -> Arrivals<'_> {
        let mut here = u64::MAX;
        self.coming.expected.iter().for_each(|piece| here &= !(1 << piece));
        let (space, address) = (self.device.memory().space(), self.words.address as *const u8);
        // SAFETY: the words are never freed, and written by copy engines and kernels alone.
        let flags =
            unsafe { DevSlice::from_raw(space, address, self.words.kernels_bytes(), fmha::ElemType::U32) };
        let timeout_ns = u64::try_from(self.timeout.as_nanos()).unwrap_or(u64::MAX);
        Arrivals { ends: self.ends.slice(), flags, here, timeout_ns }
    }
}

/// Messages of all ranks, or the reason of the first one that is against it.
fn all_say(group: &dyn Group, mine: Result<Vec<u8>, &String>) -> Result<Result<Vec<Vec<u8>>, String>> {
    let said = mine.unwrap_or_else(|reason| [&[0], reason.as_bytes()].concat());
    let all = group.share(&said)?;
    let against = (0u32..).zip(&all).find(|(_, bytes)| bytes.first() != Some(&1));
    let reason = against.map(|(rank, bytes)| {
        format!("rank {rank}: {}", String::from_utf8_lossy(bytes.get(1..).unwrap_or_default()))
    });
    Ok(reason.map_or(Ok(all), Err))
}
