//! A caller's tensors as a backend's arguments: as they are where the backend reads that memory, else copied.

use fmha_core::{DevBuffer, DevSlice, DevSliceMut, DeviceMemory, ElemType, Error, MemorySpace, Result};

/// Input of a call.
pub(crate) enum Input<'a> {
    Given(DevSlice<'a>),
    Copied(DevBuffer, ElemType),
}

impl<'a> Input<'a> {
    pub(crate) fn new(memory: &dyn DeviceMemory, given: DevSlice<'a>) -> Result<Self> {
        match (memory.space(), given.as_host()) {
            (MemorySpace::Device, Some(bytes)) => {
                let mut buffer = memory.alloc(bytes.len() as u64)?;
                memory.upload(bytes, &mut buffer)?;
                Ok(Self::Copied(buffer, given.elem()))
            }
            // A device's memory that a host's backend is given is for the run to refuse.
            _ => Ok(Self::Given(given)),
        }
    }

    pub(crate) fn slice(&self) -> DevSlice<'_> {
        match self {
            Self::Given(slice) => *slice,
            Self::Copied(buffer, elem) => buffer.slice().typed(*elem),
        }
    }
}

/// Output of a call.
pub(crate) struct Output<'a> {
    given: DevSliceMut<'a>,
    copied: Option<DevBuffer>,
}

impl<'a> Output<'a> {
    /// Host memory is uploaded first: what lies between the tensor's elements, and rows that lengths exclude, are never
    /// written.
    pub(crate) fn new(memory: &dyn DeviceMemory, given: DevSliceMut<'a>) -> Result<Self> {
        let copied = match (memory.space(), given.as_input().as_host()) {
            (MemorySpace::Device, Some(bytes)) => {
                let mut buffer = memory.alloc(bytes.len() as u64)?;
                memory.upload(bytes, &mut buffer)?;
                Some(buffer)
            }
            _ => None,
        };
        Ok(Self { given, copied })
    }

    pub(crate) fn slice_mut(&mut self) -> DevSliceMut<'_> {
        match &mut self.copied {
            Some(buffer) => buffer.slice_mut().typed(self.given.elem()),
            None => self.given.skip(0),
        }
    }

    /// Brings the result to where the caller wants it. The work that writes it is done.
    pub(crate) fn finish(self, memory: &dyn DeviceMemory) -> Result<()> {
        let Some(buffer) = self.copied else { return Ok(()) };
        // SAFETY: host memory, for only that is copied, which `given` borrows exclusively; it is initialised, as slices
        // are and as `TensorViewMut::from_raw` was promised.
        let host =
            unsafe { std::slice::from_raw_parts_mut(self.given.as_mut_ptr(), self.given.bytes() as usize) };
        memory.download(&buffer, host)
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
