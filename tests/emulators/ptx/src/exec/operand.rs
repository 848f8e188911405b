//! Matrix operands in shared memory: descriptors, layouts, elements. PTX ISA 9.7.15.5.

use std::sync::Arc;

use super::tensor::Swizzle;
use super::{Exec, fault, fragment};
use crate::fault::FaultKind;
use crate::fp;
use crate::hb::SeenReads;
use crate::memory::Shared;
use crate::op::Elem;

/// A shared-memory matrix descriptor, decoded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descriptor {
    pub(super) start: u32,
    pub(super) leading: u32,
    pub(super) stride: u32,
    pub(super) swizzle: Swizzle,
}

impl Descriptor {
    pub(super) fn sm90(bits: u64) -> Exec<Self> {
        let field = |at: u32| ((bits >> at) as u32 & 0x3fff) << 4;
        let swizzle = match bits >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            2 => Swizzle::B64,
            _ => Swizzle::B32,
        };
        if bits >> 49 & 7 != 0 {
            let text =
                format!("descriptor {bits:#x} with base offset {}: not supported here", bits >> 49 & 7);
            return Err(fault(FaultKind::Descriptor, text));
        }
        Ok(Self { start: field(0), leading: field(16), stride: field(32), swizzle })
    }

    /// Address of the 16-byte chunk: row `r` and byte `kb` along K, or (transposed) byte `mnb` along M/N and row `k`.
    #[inline(always)]
    pub(super) fn chunk(&self, transposed: bool, row: u32, byte: u32) -> u32 {
        let span = self.swizzle.span();
        let group = row / 8 * self.stride + row % 8 * span;
        let at = match (self.swizzle, transposed) {
            (Swizzle::None, false) => {
                self.start + row / 8 * self.stride + row % 8 * 16 + byte / 16 * self.leading
            }
            // Without a swizzle the two strides change roles for MN-major operands.
            (Swizzle::None, true) => {
                self.start + row / 8 * self.leading + row % 8 * 16 + byte / 16 * self.stride
            }
            (_, false) => self.start + group + byte,
            (_, true) => self.start + byte / span * self.leading + group + byte % span,
        };
        self.swizzle.apply(at)
    }
}

/// One element of a matrix operand as f32; `bits` holds it in its low part.
#[inline(always)]
pub(super) fn element(kind: Elem, bits: u32) -> f32 {
    match kind {
        Elem::F16 => fp::f16_to_f32(bits as u16),
        Elem::Bf16 => fp::bf16_to_f32(bits as u16),
        Elem::Tf32 => f32::from_bits(bits & 0xffff_e000),
        Elem::E4m3 => fp::fp8_table(false)[(bits & 255) as usize],
        Elem::E5m2 => fp::fp8_table(true)[(bits & 255) as usize],
        Elem::S8 => f32::from(bits as u8 as i8),
        Elem::U8 => f32::from(bits as u8),
        _ => f32::from_bits(bits),
    }
}

/// Bytes of one element in shared memory.
pub(super) fn element_bytes(kind: Elem) -> u32 {
    match kind {
        Elem::F16 | Elem::Bf16 => 2,
        Elem::Tf32 | Elem::F32 | Elem::S32 => 4,
        _ => 1,
    }
}

/// How an operand that was read lies in f32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Layout {
    /// `[row][k]`.
    Rows,
    /// `[k][row]`.
    Columns,
    /// `[k][row]`, the rows exchanged as [`fragment::column`] says.
    Fragments,
}

/// The elements of one 16-byte chunk as f32.
#[inline(always)]
pub(super) fn elements(kind: Elem, bytes: &[u8], out: &mut [f32; 16]) {
    // One loop a kind, so that `element` is known in each.
    match kind {
        Elem::F16 | Elem::Bf16 => {
            for (o, c) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                let bits = u16::from_le_bytes([c[0], c[1]]);
                *o = if kind == Elem::F16 { fp::f16_to_f32(bits) } else { fp::bf16_to_f32(bits) };
            }
        }
        _ if element_bytes(kind) == 4 => {
            for (o, c) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *o = element(kind, u32::from_le_bytes([c[0], c[1], c[2], c[3]]));
            }
        }
        _ => {
            for (o, c) in out.iter_mut().zip(bytes) {
                *o = element(kind, u32::from(*c));
            }
        }
    }
}

/// Where a matrix operand lies and how it is read.
pub(super) struct Operand {
    pub(super) desc: Descriptor,
    pub(super) kind: Elem,
    pub(super) transposed: bool,
    /// First row and number of rows (M or N).
    pub(super) first: u32,
    pub(super) rows: u32,
    /// Elements along K.
    pub(super) depth: u32,
    /// What descriptors count from: the 16 KiB windows of address bits that they do not have.
    pub(super) what: &'static str,
}

impl Operand {
    /// Calls `f` with the address of each 16-byte chunk, its first row and its first k.
    #[inline(always)]
    pub(super) fn chunks(&self, mut f: impl FnMut(u32, u32, u32) -> Exec<()>) -> Exec<()> {
        let size = element_bytes(self.kind);
        let per = 16 / size;
        if self.transposed {
            for k in 0..self.depth {
                for r in (0..self.rows).step_by(per as usize) {
                    f(self.desc.chunk(true, k, (self.first + r) * size), r, k)?;
                }
            }
        } else {
            for r in 0..self.rows {
                for k in (0..self.depth).step_by(per as usize) {
                    f(self.desc.chunk(false, self.first + r, k * size), r, k)?;
                }
            }
        }
        Ok(())
    }

    /// Reads the operand as f32 into `out`. Returns the range of addresses.
    fn read(&self, shared: &Shared, check: bool, out: &mut [f32], layout: Layout) -> Exec<(u32, u32)> {
        let count = (16 / element_bytes(self.kind)) as usize;
        let (rows, depth) = (self.rows as usize, self.depth as usize);
        let mut range = (u32::MAX, 0);
        let mut values = [0f32; 16];
        self.chunks(|at, r, k| {
            range = (range.0.min(at), range.1.max(at + 16));
            shared.check(at, 16, 16, self.what)?;
            shared.check_swizzle(at, self.desc.swizzle, self.what)?;
            if check {
                shared.check_written(at, 16, self.what)?;
            }
            elements(self.kind, shared.get(at, 16), &mut values);
            let (r, k) = (r as usize, k as usize);
            let (to, stride) = match (layout, self.transposed) {
                (Layout::Rows, transposed) => (r * depth + k, if transposed { depth } else { 1 }),
                (Layout::Columns, transposed) => (k * rows + r, if transposed { 1 } else { rows }),
                (Layout::Fragments, false) => (k * rows + fragment::column(r), rows),
                (Layout::Fragments, true) => {
                    for (i, value) in values[..count].iter().enumerate() {
                        out[k * rows + fragment::column(r + i)] = *value;
                    }
                    return Ok(());
                }
            };
            for (o, value) in out[to..].iter_mut().step_by(stride).zip(&values[..count]) {
                *o = *value;
            }
            Ok(())
        })?;
        Ok(range)
    }
}

/// Operands read lately, as f32: the four warps of a warpgroup read the same ones. One slot a hash of the key.
#[derive(Debug)]
pub(crate) struct OperandCache {
    slots: Vec<Option<Cached>>,
}

impl Default for OperandCache {
    fn default() -> Self {
        Self { slots: (0..SLOTS).map(|_| None).collect() }
    }
}

pub(super) const SLOTS: usize = 256;

pub(super) type Key = (u64, Elem, bool, u32, u32, u32, Layout);

#[derive(Debug)]
pub(super) struct Cached {
    key: Key,
    /// The bytes it came from and the number of the last write before.
    range: (u32, u32),
    clock: u64,
    pub(super) values: Arc<Vec<f32>>,
    /// What happens-before knows of these bytes since they were written.
    pub(super) seen: SeenReads,
}

impl OperandCache {
    /// The operand's values, read now unless nothing has changed since the last time.
    pub(super) fn read(
        &mut self,
        shared: &Shared,
        operand: &Operand,
        bits: u64,
        check: bool,
        layout: Layout,
    ) -> Exec<&mut Cached> {
        let Operand { kind, transposed, first, rows, depth, .. } = *operand;
        let key = (bits, kind, transposed, first, rows, depth, layout);
        let mixed = (bits ^ u64::from(first) << 50).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let slot = &mut self.slots[(mixed >> 56) as usize % SLOTS];
        let valid = |e: &Cached| e.key == key && shared.unchanged(e.range.0, e.range.1, e.clock);
        if !slot.as_ref().is_some_and(valid) {
            let mut values = vec![0f32; (operand.rows * operand.depth) as usize];
            let range = operand.read(shared, check, &mut values, layout)?;
            let values = Arc::new(values);
            *slot = Some(Cached { key, range, clock: shared.clock(), values, seen: SeenReads::default() });
        }
        // Filled above where it was empty.
        slot.as_mut().ok_or_else(|| fault(FaultKind::Unsupported, "an operand that was not read"))
    }
}
