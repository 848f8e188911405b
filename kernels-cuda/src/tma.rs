//! Tensor maps of TMA (CUDA Driver API, "Tensor Map Object Management").

use fmha_core::{DType, Result, Shape, Strides};

/// A driver that encodes tensor maps.
pub trait EncodeTensorMap {
    /// Encodes a map, in the calling thread's context.
    ///
    /// # Errors
    /// What the driver refuses.
    fn encode<const AXES: usize, const STRIDES: usize>(
        facts: &TensorMapFacts<AXES, STRIDES>,
    ) -> Result<TensorMap>;
}

/// Tensor map of TMA; opaque to all but the driver.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub struct TensorMap(pub [u64; 16]);

impl TensorMap {
    /// Map that no kernel reads.
    pub const UNREAD: Self = Self([0; 16]);
}

/// The content of a tiled tensor map with `AXES` axes and `STRIDES` strides, one fewer. Axis 0 has stride 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMapFacts<const AXES: usize, const STRIDES: usize> {
    /// Name of the operand, for errors.
    pub name: &'static str,
    /// f16, bf16 or a type of 8 bits.
    pub dtype: DType,
    /// Address of the first element, on the device.
    pub address: u64,
    /// Extents, from axis 0.
    pub dims: [u64; AXES],
    /// Strides in bytes, from axis 1.
    pub strides_bytes: [u64; STRIDES],
    /// Elements of a box, from axis 0. Axis 0 times the element's bytes is the swizzle: 32, 64 or 128.
    pub box_dims: [u32; AXES],
}

impl<const AXES: usize, const STRIDES: usize> TensorMapFacts<AXES, STRIDES> {
    const ONE_STRIDE_FEWER: () = assert!(STRIDES + 1 == AXES, "a map has a stride an axis, but for axis 0");

    /// Bytes of a row of the box, which are the swizzle's width.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        u64::from(self.box_dims[0]) * self.dtype.size_bytes()
    }

    /// The map, encoded by a driver in the calling thread's context.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn encode<D: EncodeTensorMap>(&self) -> Result<TensorMap> {
        const { Self::ONE_STRIDE_FEWER };
        D::encode(self)
    }
}

/// Stride of an axis in bytes. An axis of one element, whose stride is never used, gets one that the driver
/// accepts.
pub(crate) fn stride_bytes(stride: i64, extent: u32, elem_bytes: u64) -> u64 {
    if extent > 1 { stride.unsigned_abs() * elem_bytes } else { 1 << 20 }
}

impl TensorMapFacts<4, 3> {
    /// Content of a map of a tensor's rows, `(dim, row, head, batch or page)`. The map of a tensor without rows is
    /// never used, but needs a valid address: `elsewhere`.
    pub(crate) fn of_rows(
        (name, dtype): (&'static str, DType),
        [address, elsewhere]: [u64; 2],
        shape: Shape,
        strides: Strides,
        box_dims: [i32; 4],
    ) -> Self {
        let bytes = |stride, extent| stride_bytes(stride, extent, dtype.size_bytes());
        Self {
            name,
            dtype,
            address: if shape.seq > 0 && shape.batch > 0 { address } else { elsewhere },
            dims: [shape.dim, shape.seq.max(1), shape.head, shape.batch.max(1)].map(u64::from),
            strides_bytes: [
                bytes(strides.seq, shape.seq),
                bytes(strides.head, shape.head),
                bytes(strides.batch, shape.batch),
            ],
            box_dims: box_dims.map(i32::unsigned_abs),
        }
    }
}
