//! An owned tensor in host memory, and the set of tensors that a call has, by name.

use std::collections::BTreeMap;
use std::ops::Range;

use half::{bf16, f16};

use fmha_core::block_scales::E8m0;
use fmha_core::{
    DType, DevBuffer, DevSlice, DevSliceMut, DeviceMemory, ElemType, Result, Shape, Strides, ValidFwd,
};

use crate::memory::{Bytes, Placement};

/// Arguments of a call that are tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "each is the argument of that name")]
pub enum Operand {
    Q,
    K,
    V,
    O,
    Lse,
    Dout,
    Dlse,
    Dq,
    Dk,
    Dv,
    Dbias,
    Dsink,
    CuSeqlensQ,
    CuSeqlensK,
    SequsedQ,
    SequsedK,
    BlockTable,
    CuSeqlensNew,
    KNew,
    VNew,
    Cos,
    Sin,
    TreeMask,
    Indices,
    TopkLength,
    SecondK,
    SecondV,
    SecondCuSeqlensK,
    SecondSequsedK,
    SecondBlockTable,
    SecondIndices,
    SecondTopkLength,
    SecondIntervals,
    Intervals,
    MaskBits,
    KvNumBlocks,
    KvIndices,
    FullKvNumBlocks,
    FullKvIndices,
    Bias,
    AlibiSlopes,
    Sink,
    DescaleQ,
    DescaleK,
    DescaleV,
    KScale,
    VScale,
    BlockScaleQ,
    BlockScaleK,
    BlockScaleV,
    ScaleO,
    KeepMask,
    RowMax,
    HeadMax,
    KeySum,
    PartO(u32),
    PartLse(u32),
}

impl Operand {
    /// Salt that makes the random numbers of operands differ.
    pub(crate) fn salt(self) -> u64 {
        match self {
            Operand::Q => 1,
            // New keys have the numbers that the cache has in their rows.
            Operand::K | Operand::KNew => 2,
            Operand::V | Operand::VNew => 3,
            Operand::Dout => 4,
            Operand::Dlse => 5,
            Operand::Bias => 6,
            Operand::Sink => 7,
            Operand::SecondK => 9,
            Operand::SecondV => 10,
            Operand::PartO(part) => 0x100 + u64::from(part),
            Operand::PartLse(part) => 0x1_0000_0000 + u64::from(part),
            _ => 8,
        }
    }
}

/// A tensor with elements at its strides, and poison everywhere else.
///
/// The poison is one byte, repeated, that is a NaN in the tensor's type. An element that is not written stays NaN
/// and fails its check; bytes that must not be written are compared with the poison.
pub struct Tensor {
    bytes: Bytes,
    /// Bytes before the first element.
    first: usize,
    /// Bytes from the first element to the last.
    extent: usize,
    poison: u8,
    placement: Placement,
    /// Element type that host slices of the tensor name.
    elem: ElemType,
    /// Type of the elements; unused for lengths and the keep mask.
    pub dtype: DType,
    /// Number of elements along each axis, without gaps or padding.
    pub shape: Shape,
    /// Element strides.
    pub strides: Strides,
}

/// How tensors are laid into memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Room {
    /// The tensor's neighbours in memory.
    pub placement: Placement,
    /// Elements by which the first one lies beyond an aligned address.
    pub shift: u32,
}

impl Tensor {
    /// Makes a tensor of poison (of zeros with [`Placement::Sparse`]).
    ///
    /// # Errors
    /// The size, if the system has too little memory.
    pub fn new(dtype: DType, shape: Shape, strides: Strides, room: Room) -> Result<Self> {
        let extent = ValidFwd::extent_bytes(strides, shape, dtype) as usize;
        let fnuz = matches!(dtype, DType::E4m3Fnuz | DType::E5m2Fnuz);
        let poison = if fnuz { 0x80 } else { 0xff };
        Self::with_extent(dtype, shape, strides, room, extent, poison)
    }

    fn with_extent(
        dtype: DType,
        shape: Shape,
        strides: Strides,
        room: Room,
        extent: usize,
        poison: u8,
    ) -> Result<Self> {
        let (bytes, first) = match room.placement {
            Placement::Margins => {
                let first = 256 + room.shift as usize * dtype.size_bytes() as usize;
                (Bytes::filled(first + extent + 256, poison)?, first)
            }
            Placement::EndsAtUnmapped => (Bytes::beside_unmapped(extent, poison, true)?, 0),
            Placement::BeginsAtUnmapped => (Bytes::beside_unmapped(extent, poison, false)?, 0),
            Placement::Sparse => (Bytes::sparse(extent)?, 0),
        };
        let (elem, placement) = (dtype.into(), room.placement);
        Ok(Self { bytes, first, extent, poison, placement, elem, dtype, shape, strides })
    }

    /// Moves the elements by this many elements in memory, and keeps the margins.
    ///
    /// # Errors
    /// The size, if the system has too little memory.
    pub(crate) fn shift(&mut self, elems: u32) -> Result<()> {
        let first = self.first + elems as usize * self.dtype.size_bytes() as usize;
        let mut bytes = Bytes::filled(first + self.extent + 256, self.poison)?;
        bytes[first..][..self.extent].copy_from_slice(self.elems());
        (self.bytes, self.first) = (bytes, first);
        Ok(())
    }

    /// Makes a row of `count` elements.
    pub(crate) fn row(dtype: DType, count: u64, room: Room) -> Result<Self> {
        let dim = u32::try_from(count).unwrap_or(u32::MAX);
        let shape = Shape { batch: 1, seq: 1, head: 1, dim };
        let room = Room { placement: room.placement.dense(), ..room };
        let extent = (count * dtype.size_bytes()) as usize;
        Self::with_extent(dtype, shape, Strides::bshd(shape), room, extent, 0xff)
    }

    /// Makes a row of f32 with these numbers.
    pub(crate) fn f32s(values: &[f32], room: Room) -> Result<Self> {
        let mut tensor = Self::row(DType::F32, values.len() as u64, room)?;
        tensor.elems_mut().copy_from_slice(bytemuck::cast_slice(values));
        Ok(tensor)
    }

    /// Makes a row of i32 with these lengths or entries of a mask, or a row of u32 with words of bits.
    pub(crate) fn words(values: &[i32], elem: ElemType, room: Room) -> Result<Self> {
        let row = Self::row(DType::F32, values.len() as u64, room)?;
        let mut tensor = Self { elem, ..row };
        tensor.elems_mut().copy_from_slice(bytemuck::cast_slice(values));
        Ok(tensor)
    }

    /// Makes a tensor of poison whose element type is given directly.
    pub(crate) fn coded(elem: ElemType, shape: Shape, strides: Strides, room: Room) -> Result<Self> {
        let dtype = match elem {
            ElemType::Number(dtype) => dtype,
            _ => DType::E4m3Fn,
        };
        Ok(Self { elem, ..Self::new(dtype, shape, strides, room)? })
    }

    /// Mutable access to one byte of a tensor of bytes.
    pub(crate) fn byte_mut(&mut self, [batch, seq, head, dim]: [u32; 4]) -> &mut u8 {
        let at = self.at(batch, seq, head, dim);
        &mut self.elems_mut()[at]
    }

    /// Makes a row of bytes.
    pub(crate) fn u8s(count: u64, room: Room) -> Result<Self> {
        Ok(Self { elem: ElemType::Bytes, ..Self::row(DType::E4m3Fn, count, room)? })
    }

    /// Bytes from the first element to the last, gaps included.
    #[must_use]
    pub fn elems(&self) -> &[u8] {
        &self.bytes[self.first..][..self.extent]
    }

    /// Bytes from the first element to the last, gaps included.
    pub fn elems_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.first..][..self.extent]
    }

    /// Fills the tensor with poison, as for an output before its call.
    pub fn repoison(&mut self) {
        let poison = self.poison;
        self.elems_mut().fill(poison);
    }

    /// All bytes, margins included, and the offset of the first element.
    pub(crate) fn raw(&self) -> (&[u8], usize) {
        (&self.bytes, self.first)
    }

    /// Range of [`raw`](Self::raw) that is copied to a device: all of it; or, if the device's memory checks bounds,
    /// the elements and the bytes before them that give their alignment.
    pub(crate) fn placed(&self, memory: &dyn DeviceMemory) -> Range<usize> {
        if memory.checks_bounds() {
            self.first - self.first % 256..self.first + self.extent
        } else {
            0..self.bytes.len()
        }
    }

    /// Device memory for [`placed`](Self::placed), next to unmapped addresses if the placement says so.
    pub(crate) fn device_memory(&self, memory: &dyn DeviceMemory) -> Result<DevBuffer> {
        let bytes = self.placed(memory).len() as u64;
        let at_edge = match self.placement {
            Placement::EndsAtUnmapped => memory.alloc_at_edge(bytes, true)?,
            Placement::BeginsAtUnmapped => memory.alloc_at_edge(bytes, false)?,
            Placement::Margins | Placement::Sparse => None,
        };
        // SAFETY: what is downloaded goes back to the tensor's own bytes, which a run of the battery alone
        // reads; a kernel that reads what nobody has written is what an emulated device names.
        at_edge.map_or_else(|| unsafe { memory.alloc_uncleared(bytes) }, Ok)
    }

    /// The rows of a sparse tensor as ranges of the placed bytes; `None` if everything is copied at once.
    pub(crate) fn pieces(&self) -> Option<Vec<Range<usize>>> {
        let row = (u64::from(self.shape.dim) * self.dtype.size_bytes()) as usize;
        let Shape { batch, seq, head, .. } = self.shape;
        let rows =
            (0..batch).flat_map(move |b| (0..seq).flat_map(move |s| (0..head).map(move |h| (b, s, h))));
        let is_sparse = self.placement == Placement::Sparse;
        is_sparse.then(|| rows.map(|(b, s, h)| self.at(b, s, h, 0)).map(|at| at..at + row).collect())
    }

    pub(crate) fn raw_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Byte that fills every place without an element.
    pub(crate) fn poison(&self) -> u8 {
        self.poison
    }

    fn at(&self, batch: u32, seq: u32, head: u32, dim: u32) -> usize {
        (self.strides.offset(batch, seq, head, dim).unsigned_abs() * self.dtype.size_bytes()) as usize
    }

    /// Value of one element.
    #[must_use]
    pub fn get(&self, batch: u32, seq: u32, head: u32, dim: u32) -> f64 {
        self.dtype.read(&self.elems()[self.at(batch, seq, head, dim)..])
    }

    /// Writes one element, rounded to its type.
    pub fn set(&mut self, at: [u32; 4], value: f64) {
        let [batch, seq, head, dim] = at;
        let (dtype, at) = (self.dtype, self.at(batch, seq, head, dim));
        if self.elem == ElemType::E8m0 {
            self.elems_mut()[at] = E8m0::at_least(value).to_bits();
            return;
        }
        dtype.write(value, &mut self.elems_mut()[at..]);
    }

    /// Range of a row's elements in memory, if they are contiguous.
    fn dense(&self, [batch, seq, head]: [u32; 3]) -> Option<Range<usize>> {
        let at = self.at(batch, seq, head, 0);
        let bytes = (u64::from(self.shape.dim) * self.dtype.size_bytes()) as usize;
        (self.strides.dim == 1).then_some(at..at + bytes)
    }

    /// Writes a row, each element rounded to the type.
    pub(crate) fn set_row(&mut self, at: [u32; 3], values: &[f32]) {
        let (dtype, [batch, seq, head]) = (self.dtype, at);
        let Some(place) = self.dense(at) else {
            for (d, &value) in values.iter().enumerate() {
                self.set([batch, seq, head, d as u32], f64::from(value));
            }
            return;
        };
        let bytes = &mut self.elems_mut()[place];
        // A separate loop over a row exists for each wide type, since filling tensors takes most of a battery's
        // time.
        match dtype {
            DType::F32 => write_each(bytes, values, f32::to_le_bytes),
            DType::F16 => write_each(bytes, values, |value| f16::from_f32(value).to_le_bytes()),
            DType::Bf16 => write_each(bytes, values, |value| bf16::from_f32(value).to_le_bytes()),
            _ => write_each(bytes, values, |value| {
                let mut byte = [0];
                dtype.write(f64::from(value), &mut byte);
                byte
            }),
        }
    }

    /// Writes the bits of a row of `from`, a tensor of the same type and rows.
    pub(crate) fn copy_row(&mut self, at: [u32; 3], from: &Tensor, from_at: [u32; 3]) {
        if let (Some(place), Some(from_place)) = (self.dense(at), from.dense(from_at)) {
            self.elems_mut()[place].copy_from_slice(&from.elems()[from_place]);
            return;
        }
        let size = self.dtype.size_bytes() as usize;
        let ([b, s, h], [from_b, from_s, from_h]) = (at, from_at);
        for d in 0..self.shape.dim {
            let (place, from_place) = (self.at(b, s, h, d), from.at(from_b, from_s, from_h, d));
            self.elems_mut()[place..place + size]
                .copy_from_slice(&from.elems()[from_place..from_place + size]);
        }
    }

    /// The first element of a row that differs in a bit from that of `other`, a tensor of the same type and rows.
    pub(crate) fn row_differs(&self, at: [u32; 3], other: &Tensor, other_at: [u32; 3]) -> Option<u32> {
        if let (Some(place), Some(other_place)) = (self.dense(at), other.dense(other_at))
            && self.elems()[place] == other.elems()[other_place]
        {
            return None;
        }
        let ([b, s, h], [other_b, other_s, other_h]) = (at, other_at);
        (0..self.shape.dim).find(|&d| self.bits(b, s, h, d) != other.bits(other_b, other_s, other_h, d))
    }

    /// The bits of one element, for comparisons without a tolerance.
    #[must_use]
    pub fn bits(&self, batch: u32, seq: u32, head: u32, dim: u32) -> u32 {
        let at = self.at(batch, seq, head, dim);
        let size = self.dtype.size_bytes() as usize;
        let mut bits = [0; 4];
        bits[..size].copy_from_slice(&self.elems()[at..at + size]);
        u32::from_le_bytes(bits)
    }

    /// Value of element `index` of a row.
    #[must_use]
    pub fn nth(&self, index: usize) -> f64 {
        self.dtype.read(&self.elems()[index * self.dtype.size_bytes() as usize..])
    }

    /// Writes element `index` of a row.
    pub fn set_nth(&mut self, index: usize, value: f64) {
        let dtype = self.dtype;
        dtype.write(value, &mut self.elems_mut()[index * dtype.size_bytes() as usize..]);
    }

    /// Borrows the tensor as an input in host memory.
    #[must_use]
    pub fn slice(&self) -> DevSlice<'_> {
        DevSlice::host(self.elems()).typed(self.elem)
    }

    /// Borrows the tensor as an output in host memory.
    pub fn slice_mut(&mut self) -> DevSliceMut<'_> {
        let elem = self.elem;
        DevSliceMut::host(self.elems_mut()).typed(elem)
    }
}

fn write_each<const SIZE: usize>(bytes: &mut [u8], values: &[f32], element: impl Fn(f32) -> [u8; SIZE]) {
    for (place, &value) in bytes.chunks_exact_mut(SIZE).zip(values) {
        place.copy_from_slice(&element(value));
    }
}

impl Placement {
    /// Small operands of a sparse problem need no reserved gigabytes.
    fn dense(self) -> Self {
        if self == Placement::Sparse { Placement::Margins } else { self }
    }
}

/// The tensors of a call, by argument.
#[derive(Default)]
pub struct Operands(pub(crate) BTreeMap<Operand, Tensor>);

impl Operands {
    /// A tensor, if the call has it.
    #[must_use]
    pub fn get(&self, operand: Operand) -> Option<&Tensor> {
        self.0.get(&operand)
    }

    /// A tensor, if the call has it.
    pub fn get_mut(&mut self, operand: Operand) -> Option<&mut Tensor> {
        self.0.get_mut(&operand)
    }

    /// A tensor that every call of this kind has, so that it must exist.
    ///
    /// # Panics
    /// If the problem has no such operand.
    #[must_use]
    pub fn expect(&self, operand: Operand) -> &Tensor {
        self.get(operand).unwrap_or_else(|| panic!("{operand:?} is no operand of this problem"))
    }

    /// A tensor that every call of this kind has.
    ///
    /// # Panics
    /// Where the problem has no such operand.
    pub fn expect_mut(&mut self, operand: Operand) -> &mut Tensor {
        self.get_mut(operand).unwrap_or_else(|| panic!("{operand:?} is no operand of this problem"))
    }

    /// Every tensor that the call has.
    pub fn all(&self) -> impl Iterator<Item = (Operand, &Tensor)> {
        self.0.iter().map(|(&operand, tensor)| (operand, tensor))
    }

    pub(crate) fn put(&mut self, operand: Operand, tensor: Tensor) {
        self.0.insert(operand, tensor);
    }

    /// An operand as an input in host memory, if the call has it.
    #[must_use]
    pub fn input(&self, operand: Operand) -> Option<DevSlice<'_>> {
        self.get(operand).map(Tensor::slice)
    }
}
