//! The tensors of a KV cache that a call updates.

use super::{DevSlice, DevSliceMut, FwdArgs, MemorySpace};
use crate::setters::with_setters;

/// K or V of a forward call.
#[derive(Debug)]
#[non_exhaustive]
pub enum CacheSlice<'a> {
    /// K or V in memory that the call only reads.
    Read(DevSlice<'a>),
    /// K or V in memory to which the call appends rows before it reads them.
    Append(DevSliceMut<'a>),
    /// V, in a problem whose V is the first elements of K's rows.
    InK,
}

impl<'a> From<DevSlice<'a>> for CacheSlice<'a> {
    fn from(slice: DevSlice<'a>) -> Self {
        Self::Read(slice)
    }
}

impl<'a> From<DevSliceMut<'a>> for CacheSlice<'a> {
    fn from(slice: DevSliceMut<'a>) -> Self {
        Self::Append(slice)
    }
}

with_setters! {
    /// Operands of a call with a KV cache: the rows to append, the rotary embedding and the tree mask. Each is given
    /// iff the problem has it.
    #[derive(Clone, Copy, Debug, Default)]
    #[non_exhaustive]
    pub struct CacheArgs<'a> {
        set {
            /// New keys.
            pub k_new: Option<DevSlice<'a>>,
            /// New values, unless V lies in K.
            pub v_new: Option<DevSlice<'a>>,
            /// Cosines of the rotary embedding.
            pub cos: Option<DevSlice<'a>>,
            /// Sines of the rotary embedding.
            pub sin: Option<DevSlice<'a>>,
            /// Words of the tree mask, u32 `[batch, seqlen_q, words]`, or packed `[total_q, words]`.
            pub tree_mask: Option<DevSlice<'a>>,
        }
    }
}

impl FwdArgs<'_> {
    /// K's memory, for reading.
    #[must_use]
    #[inline]
    pub fn k_slice(&self) -> DevSlice<'_> {
        Self::readable(&self.k).unwrap_or_else(|| DevSlice::host::<u8>(&[]))
    }

    /// V's memory, for reading; this is K's memory if V lies in K.
    #[must_use]
    #[inline]
    pub fn v_slice(&self) -> DevSlice<'_> {
        Self::readable(&self.v).unwrap_or_else(|| self.k_slice())
    }

    /// Memory of the scales of K's and V's rows, for reading.
    #[must_use]
    pub fn scale_slices(&self) -> [Option<DevSlice<'_>>; 2] {
        [&self.k_scale, &self.v_scale].map(|slice| slice.as_ref().and_then(Self::readable))
    }

    fn readable<'b>(slice: &'b CacheSlice<'_>) -> Option<DevSlice<'b>> {
        match slice {
            CacheSlice::Read(slice) => Some(*slice),
            CacheSlice::Append(slice) => Some(slice.as_input()),
            CacheSlice::InK => None,
        }
    }
}

impl CacheSlice<'_> {
    /// Memory space of the slice; `None` if V lies in K and has no memory of its own.
    #[must_use]
    pub fn space(&self) -> Option<MemorySpace> {
        match self {
            CacheSlice::Read(slice) => Some(slice.space()),
            CacheSlice::Append(slice) => Some(slice.space()),
            CacheSlice::InK => None,
        }
    }
}
