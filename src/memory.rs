//! Tensors of a caller as arguments of a backend: used in place if the backend reads that memory, otherwise copied.

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
            // The run itself refuses device memory that is given to a backend on the host.
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
    /// Host memory is uploaded first, since bytes between a tensor's elements and rows outside its lengths are never
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

    /// Copies the result to the caller's memory. The work that writes the result is done.
    pub(crate) fn finish(self, memory: &dyn DeviceMemory) -> Result<()> {
        let Some(buffer) = self.copied else { return Ok(()) };
        // SAFETY: host memory, for only that is copied, which `given` borrows exclusively; it is initialised, as slices
        // are and as `TensorViewMut::from_raw` was promised.
        let host =
            unsafe { std::slice::from_raw_parts_mut(self.given.as_mut_ptr(), self.given.bytes() as usize) };
        memory.download(&buffer, host)
    }
}

/// Allocates `count` zeros. The error gives the bytes that `what` needed.
pub(crate) fn zeros<T: Clone + Default>(what: &str, count: u64) -> Result<Vec<T>> {
    let bytes = u128::from(count) * size_of::<T>() as u128;
    let no_memory = |text: String| Error::System { what: format!("{what} of {bytes} bytes"), text };
    let count = usize::try_from(count).map_err(|error| no_memory(error.to_string()))?;
    let mut elems = Vec::new();
    elems.try_reserve_exact(count).map_err(|error| no_memory(error.to_string()))?;
    elems.resize(count, T::default());
    Ok(elems)
}
