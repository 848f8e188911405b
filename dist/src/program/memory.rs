//! The memory of one run: what [`Buf`]s are.

use fmha::{DevBuffer, DevSlice, DevSliceMut};

use super::{At, Buf, CALLS};

/// Memory of a run.
pub(crate) enum Memory<'a> {
    Read(DevSlice<'a>),
    Write(DevSliceMut<'a>),
    Own(DevBuffer),
    /// A tensor that this call does not have.
    Absent,
}

impl Memory<'_> {
    fn slice(&self) -> DevSlice<'_> {
        match self {
            Self::Read(slice) => *slice,
            Self::Write(slice) => slice.as_input(),
            Self::Own(buffer) => buffer.slice(),
            Self::Absent => DevSlice::host::<u8>(&[]),
        }
    }

    pub(super) fn slice_mut(&mut self) -> DevSliceMut<'_> {
        match self {
            Self::Write(slice) => slice.skip(0),
            Self::Own(buffer) => buffer.slice_mut(),
            Self::Read(_) | Self::Absent => DevSliceMut::host::<u8>(&mut []),
        }
    }
}

/// The buffers of one run.
pub(crate) struct Buffers<'a> {
    all: Vec<Memory<'a>>,
}

impl<'a> Buffers<'a> {
    /// Collects the buffers of the call, by [`Buf`], and scratch.
    pub(crate) fn new(call: impl IntoIterator<Item = (Buf, Memory<'a>)>, scratch: Vec<DevBuffer>) -> Self {
        let mut all: Vec<Memory<'a>> = (0..CALLS).map(|_| Memory::Absent).collect();
        for (buf, memory) in call {
            all[buf.index()] = memory;
        }
        all.extend(scratch.into_iter().map(Memory::Own));
        Self { all }
    }

    /// The scratch again, for the next run.
    pub(crate) fn into_scratch(self) -> Vec<DevBuffer> {
        let own = |memory| if let Memory::Own(buffer) = memory { Some(buffer) } else { None };
        self.all.into_iter().filter_map(own).collect()
    }

    pub(super) fn read(&self, At(buf, offset): At) -> DevSlice<'_> {
        self.all[buf.index()].slice().skip(offset)
    }

    /// Lends the buffers that `outputs` names, to be written, and all others, to be read.
    pub(super) fn with<T>(&mut self, outputs: &[Buf], step: impl FnOnce(&Self, &mut [Memory<'a>]) -> T) -> T {
        let take = |buf: &Buf| std::mem::replace(&mut self.all[buf.index()], Memory::Absent);
        let mut taken: Vec<_> = outputs.iter().map(take).collect();
        let result = step(self, &mut taken);
        for (buf, memory) in outputs.iter().zip(taken) {
            self.all[buf.index()] = memory;
        }
        result
    }
}
