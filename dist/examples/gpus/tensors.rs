//! Tensors of all ranks and of one, on the devices.

use fmha::{DevBuffer, Device, bf16};
use fmha_dist::Partition;

use crate::AnyError;
use crate::bench::Bench;

/// Count of random numbers before they repeat: to draw more would take longer than everything else. Odd, so
/// that rows differ.
const DRAWN: usize = (1 << 23) + 1237;

/// Bits of a tensor that are compared, at most: of more, the host would take longer than the devices.
const MOST_COMPARED: u64 = 1 << 30;

/// Random numbers, equal on every rank.
fn noise(seed: u64, count: usize) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..count.min(DRAWN)).map(next).collect()
}

pub(crate) fn upload(device: &Device, bytes: &[u8]) -> Result<DevBuffer, fmha::Error> {
    let mut buffer = device.memory().alloc(bytes.len() as u64)?;
    device.memory().upload(bytes, &mut buffer)?;
    Ok(buffer)
}

/// First rows of documents of different lengths, and the end.
pub(crate) fn documents(tokens: u32) -> Vec<u32> {
    let mut ends = vec![0];
    let mut state = 12345u32;
    while let Some(&last) = ends.last()
        && last < tokens
    {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ends.push(tokens.min(last + 1000 + (state >> 8) % (tokens / 6)));
    }
    ends
}

impl Bench {
    pub(crate) fn copy(&self, from: u64, to: u64, bytes: u64) -> Result<(), AnyError> {
        let peers = self.device.peers().ok_or("a device of NVIDIA's")?;
        // SAFETY: callers name places of live buffers of this device.
        Ok(unsafe { peers.copy(from, to, bytes, self.stream.as_raw()) }?)
    }

    /// Random tensor, equal on every rank.
    pub(crate) fn noise(&self, seed: u64, rows: u32, heads: u64) -> Result<DevBuffer, AnyError> {
        let bytes = u64::from(rows) * heads * 256;
        let buffer = self.device.memory().alloc(bytes.max(1))?;
        let drawn = upload(&self.device, bytemuck::cast_slice(&noise(seed, (bytes / 2) as usize)))?;
        let mut at = 0;
        while at < bytes {
            let count = drawn.bytes().min(bytes - at);
            self.copy(drawn.as_ptr() as u64, buffer.as_ptr() as u64 + at, count)?;
            at += count;
        }
        self.stream.synchronize()?;
        Ok(buffer)
    }

    pub(crate) fn download(&self, buffer: &DevBuffer, count: u64) -> Result<Vec<u8>, AnyError> {
        let mut host = vec![0u8; count as usize];
        self.device.memory().download(buffer, &mut host)?;
        Ok(host)
    }

    /// Rows of this rank of a tensor `[planes, rows]` of all ranks, on its device.
    pub(crate) fn own(
        &self,
        partition: &Partition,
        whole: &DevBuffer,
        planes: u64,
        row: u64,
    ) -> Result<DevBuffer, AnyError> {
        let runs = partition.runs(self.group.rank());
        let rows = u64::from(partition.rows_of(self.group.rank()));
        let own = self.device.memory().alloc((planes * rows * row).max(1))?;
        let mut at = own.as_ptr() as u64;
        for plane in 0..planes {
            for run in runs {
                let bytes = u64::from(run.end - run.start) * row;
                let first = (plane * u64::from(partition.rows()) + u64::from(run.start)) * row;
                self.copy(whole.as_ptr() as u64 + first, at, bytes)?;
                at += bytes;
            }
        }
        self.stream.synchronize()?;
        Ok(own)
    }

    /// Compares this rank's results with its rows of the results of one device.
    pub(crate) fn compare(
        &self,
        what: &str,
        own: &DevBuffer,
        partition: &Partition,
        whole: &DevBuffer,
        heads: u64,
    ) -> Result<(), AnyError> {
        let wanted = self.own(partition, whole, 1, heads * 256)?;
        let count = wanted.bytes().min(MOST_COMPARED);
        let (own, wanted) = (self.download(own, count)?, self.download(&wanted, count)?);
        let (mut differ, mut off) = (0, 0f32);
        if own != wanted {
            let (own, wanted): (&[bf16], &[bf16]) =
                (bytemuck::cast_slice(&own), bytemuck::cast_slice(&wanted));
            for (a, b) in own.iter().zip(wanted).filter(|(a, b)| a.to_bits() != b.to_bits()) {
                differ += 1;
                off = off.max((a.to_f32() - b.to_f32()).abs());
            }
        }
        let (rank, count) = (self.group.rank(), count / 2);
        self.say(&format!("rank {rank} {what}: {differ} of {count} elements differ, by {off:e} at most"));
        Ok(())
    }
}
