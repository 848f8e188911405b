//! Host slices as a backend's arguments: as they are where it reads host memory, else copied.

use bytemuck::{AnyBitPattern, NoUninit};
use fmha_core::{DevBuffer, DevSlice, DevSliceMut, DeviceMemory, Error, MemorySpace, Result};

/// What a call reads.
pub(crate) enum Input<'a> {
    Host(&'a [u8]),
    Device(DevBuffer),
}

impl<'a> Input<'a> {
    pub(crate) fn new<T: NoUninit>(memory: &dyn DeviceMemory, elems: &'a [T]) -> Result<Self> {
        let bytes = bytemuck::cast_slice(elems);
        if memory.space() == MemorySpace::Host {
            return Ok(Self::Host(bytes));
        }
        let mut buffer = memory.alloc(bytes.len() as u64)?;
        memory.upload(bytes, &mut buffer)?;
        Ok(Self::Device(buffer))
    }

    pub(crate) fn slice(&self) -> DevSlice<'_> {
        match self {
            Self::Host(bytes) => DevSlice::host(bytes),
            Self::Device(buffer) => buffer.slice(),
        }
    }
}

/// What a call writes.
pub(crate) struct Output<'a> {
    host: &'a mut [u8],
    device: Option<DevBuffer>,
}

impl<'a> Output<'a> {
    pub(crate) fn new<T: NoUninit + AnyBitPattern>(
        memory: &dyn DeviceMemory,
        elems: &'a mut [T],
    ) -> Result<Self> {
        let host: &mut [u8] = bytemuck::cast_slice_mut(elems);
        let device = match memory.space() {
            MemorySpace::Host => None,
            MemorySpace::Device => {
                // Uploaded first: rows that the lengths exclude are never written.
                let mut buffer = memory.alloc(host.len() as u64)?;
                memory.upload(host, &mut buffer)?;
                Some(buffer)
            }
        };
        Ok(Self { host, device })
    }

    pub(crate) fn slice_mut(&mut self) -> DevSliceMut<'_> {
        match &mut self.device {
            None => DevSliceMut::host(self.host),
            Some(buffer) => buffer.slice_mut(),
        }
    }

    /// Brings the result to the host. The work that writes it is done.
    pub(crate) fn finish(self, memory: &dyn DeviceMemory) -> Result<()> {
        self.device.map_or(Ok(()), |buffer| memory.download(&buffer, self.host))
    }
}

/// `count` zeros, or an error that says how many bytes there were to be of `what`.
pub(crate) fn zeros<T: Clone + Default>(what: &str, count: u64) -> Result<Vec<T>> {
    let bytes = u128::from(count) * size_of::<T>() as u128;
    let no_memory = |text: String| Error::System { what: format!("{what} of {bytes} bytes"), text };
    let count = usize::try_from(count).map_err(|error| no_memory(error.to_string()))?;
    let mut elems = Vec::new();
    elems.try_reserve_exact(count).map_err(|error| no_memory(error.to_string()))?;
    elems.resize(count, T::default());
    Ok(elems)
}
