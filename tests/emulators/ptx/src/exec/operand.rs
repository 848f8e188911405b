//! Matrix operands in shared memory: descriptors, layouts, elements. PTX ISA 9.7.15.5.

use std::sync::Arc;

use super::tensor::Swizzle;
use super::{Exec, fault, fragment};
use crate::fault::{Fault, FaultKind};
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

/// Layout in f32 of an operand that was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Layout {
    /// `[row][k]`.
    Rows,
    /// `[k][row]`.
    Columns,
    /// `[k][row]`, the rows exchanged as [`fragment::column`] says.
    Fragments,
    /// Sixteen rows as the lanes of a warp hold them in registers, see [`fragment::lane`].
    Lanes,
}

impl Layout {
    /// Place of element (`r`, `k`) of `rows` by `depth`.
    #[inline(always)]
    fn place(self, r: usize, k: usize, rows: usize, depth: usize) -> usize {
        match self {
            Self::Rows => r * depth + k,
            Self::Columns => k * rows + r,
            Self::Fragments => k * rows + fragment::column(r),
            Self::Lanes => fragment::lane(r, k, depth),
        }
    }
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

/// Place of a matrix operand, and how it is read.
pub(super) struct Operand {
    pub(super) desc: Descriptor,
    pub(super) kind: Elem,
    pub(super) transposed: bool,
    /// First row and number of rows (M or N).
    pub(super) first: u32,
    pub(super) rows: u32,
    /// Elements along K.
    pub(super) depth: u32,
    /// Name of the operand in reports.
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

    /// The addresses of all chunks, in the order of [`chunks`](Self::chunks), and the range that they span.
    fn addresses(&self, out: &mut Vec<u32>) -> (u32, u32) {
        out.clear();
        let mut range = (u32::MAX, 0);
        let found = self.chunks(|at, _, _| {
            range = (range.0.min(at), range.1.max(at + 16));
            out.push(at);
            Ok(())
        });
        debug_assert!(found.is_ok(), "taking an address down cannot fail");
        range
    }

    /// Fails when a chunk may not be read: the range at once where it is whole, else chunk by chunk.
    fn check(&self, shared: &Shared, written: bool, at: &[u32], range: (u32, u32)) -> Exec<()> {
        if shared.is_whole(range.0, range.1, self.desc.swizzle, written) {
            return Ok(());
        }
        for &at in at {
            shared.check(at, 16, 16, self.what)?;
            shared.check_swizzle(at, self.desc.swizzle, self.what)?;
            if written {
                shared.check_written(at, 16, self.what)?;
            }
        }
        Ok(())
    }

    /// The elements of the chunks at `at`, which [`check`](Self::check) has accepted, as f32.
    fn convert(&self, shared: &Shared, at: &[u32], layout: Layout, out: &mut [f32]) {
        match self.kind {
            Elem::F16 => self.convert_halves(shared, at, layout, out, fp::f16_to_f32),
            Elem::Bf16 => self.convert_halves(shared, at, layout, out, fp::bf16_to_f32),
            _ => self.convert_any(shared, at, layout, out),
        }
    }

    /// Elements of two bytes, as f32; where they are to be exchanged, eight rows and eight k at a time.
    #[inline(always)]
    fn convert_halves(
        &self,
        shared: &Shared,
        at: &[u32],
        layout: Layout,
        out: &mut [f32],
        value: impl Fn(u16) -> f32,
    ) {
        let (rows, across) = (self.rows as usize, self.depth as usize / 8);
        let order = match layout {
            Layout::Fragments => [0, 2, 4, 6, 1, 3, 5, 7],
            Layout::Columns => [0, 1, 2, 3, 4, 5, 6, 7],
            Layout::Lanes if !self.transposed => [0; 8],
            Layout::Rows | Layout::Lanes => return self.convert_any(shared, at, layout, out),
        };
        let halves = |at: u32| -> [u16; 8] {
            let mut bytes = [0; 16];
            bytes.copy_from_slice(shared.get(at, 16));
            bytemuck::cast::<[u8; 16], [u16; 8]>(bytes)
        };
        if self.transposed {
            for (k, line) in at.chunks_exact(rows / 8).enumerate() {
                for (&at, eight) in line.iter().zip(out[k * rows..].chunks_exact_mut(8)) {
                    let (from, mut values) = (halves(at), [0.0; 8]);
                    for i in 0..8 {
                        values[i] = value(from[i]);
                    }
                    for i in 0..8 {
                        eight[i] = values[order[i]];
                    }
                }
            }
            return;
        }
        if layout == Layout::Lanes {
            for (r, line) in at.chunks_exact(across).enumerate() {
                for (k, &at) in line.iter().enumerate() {
                    let from = halves(at);
                    let even = &mut out[fragment::lane(r, 8 * k, 8 * across)..][..36];
                    for i in 0..4 {
                        (even[i], even[32 + i]) = (value(from[2 * i]), value(from[2 * i + 1]));
                    }
                }
            }
            return;
        }
        for (first, eight) in at.chunks_exact(8 * across).enumerate() {
            for k in 0..across {
                let mut block = [[0; 8]; 8];
                for (row, r) in block.iter_mut().zip(order) {
                    *row = halves(eight[r * across + k]);
                }
                for (i, column) in transposed(block).iter().enumerate() {
                    let to = &mut out[(8 * k + i) * rows + 8 * first..][..8];
                    for (to, &bits) in to.iter_mut().zip(column) {
                        *to = value(bits);
                    }
                }
            }
        }
    }

    /// Elements of any size and any layout, as f32.
    fn convert_any(&self, shared: &Shared, at: &[u32], layout: Layout, out: &mut [f32]) {
        let per = (16 / element_bytes(self.kind)) as usize;
        let (rows, depth) = (self.rows as usize, self.depth as usize);
        let (lines, across) = if self.transposed { (depth, rows / per) } else { (rows, depth / per) };
        let mut values = [0f32; 16];
        for line in 0..lines {
            for n in 0..across {
                elements(self.kind, shared.get(at[line * across + n], 16), &mut values);
                for (i, &value) in values[..per].iter().enumerate() {
                    let along = n * per + i;
                    let (r, k) = if self.transposed { (along, line) } else { (line, along) };
                    out[layout.place(r, k, rows, depth)] = value;
                }
            }
        }
    }
}

/// Rows and columns of eight by eight exchanged: three rounds of interleaving the upper with the lower half.
#[inline(always)]
fn transposed(m: [[u16; 8]; 8]) -> [[u16; 8]; 8] {
    interleaved(interleaved(interleaved(m)))
}

/// Row `2 i` and `2 i + 1`: rows `i` and `i + 4`, element by element in turn.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn interleaved(m: [[u16; 8]; 8]) -> [[u16; 8]; 8] {
    use std::arch::x86_64::{__m128i, _mm_unpackhi_epi16, _mm_unpacklo_epi16};
    let m: [__m128i; 8] = bytemuck::cast(m);
    let mut next = m;
    for i in 0..4 {
        // SAFETY: SSE2 is part of x86-64.
        (next[2 * i], next[2 * i + 1]) =
            unsafe { (_mm_unpacklo_epi16(m[i], m[i + 4]), _mm_unpackhi_epi16(m[i], m[i + 4])) };
    }
    bytemuck::cast(next)
}

#[cfg(not(target_arch = "x86_64"))]
fn interleaved(m: [[u16; 8]; 8]) -> [[u16; 8]; 8] {
    std::array::from_fn(|row| std::array::from_fn(|at| m[row / 2 + at % 2 * 4][row % 2 * 4 + at / 2]))
}

/// Operands read lately, as f32: the four warps of a warpgroup read the same ones. Two slots a hash of the key.
#[derive(Debug)]
pub(crate) struct OperandCache {
    slots: Vec<Option<Cached>>,
    turn: usize,
}

impl Default for OperandCache {
    fn default() -> Self {
        Self { slots: (0..SLOTS).map(|_| None).collect(), turn: 0 }
    }
}

/// More than a kernel holds in shared memory at a time: a hundred steps of K of each of two operands.
pub(super) const SLOTS: usize = 512;
const WAYS: usize = 2;

pub(super) type Key = (u64, Elem, bool, u32, u32, u32, Layout);

#[derive(Debug)]
pub(super) struct Cached {
    key: Key,
    /// The bytes it came from and the number of the last write before.
    range: (u32, u32),
    clock: u64,
    /// Addresses of the operand's chunks.
    pub(super) chunks: Vec<u32>,
    pub(super) values: Arc<Vec<f32>>,
    /// Knowledge of happens-before about these bytes since they were written.
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
        let set = (mixed >> 48) as usize % (SLOTS / WAYS) * WAYS;
        let ways = &self.slots[set..set + WAYS];
        let fresh = |slot: &Option<Cached>| {
            slot.as_ref().is_some_and(|e| shared.unchanged(e.range.0, e.range.1, e.clock))
        };
        let way = ways.iter().position(|slot| slot.as_ref().is_some_and(|e| e.key == key));
        if let Some(way) = way
            && fresh(&ways[way])
        {
            let cached = self.slots[set + way].as_mut().ok_or_else(unread)?;
            // The values are as good as read now; the next check has fewer changes to look through.
            cached.clock = shared.clock();
            return Ok(cached);
        }
        // The slot to fill is the operand's own old one, one whose values are stale, or the next one
        // round-robin.
        self.turn = self.turn.wrapping_add(1);
        let way = way.or_else(|| ways.iter().position(|slot| !fresh(slot))).unwrap_or(self.turn % WAYS);
        let slot = &mut self.slots[set + way];
        let (mut chunks, old) = slot.take().map(|e| (e.chunks, Some(e.values))).unwrap_or_default();
        let range = operand.addresses(&mut chunks);
        operand.check(shared, check, &chunks, range)?;
        let mut values = old.and_then(|old| Arc::try_unwrap(old).ok()).unwrap_or_default();
        // Every element is written, so the old content does not matter.
        values.resize((rows * depth) as usize, 0.0);
        operand.convert(shared, &chunks, layout, &mut values);
        let (values, seen) = (Arc::new(values), SeenReads::default());
        Ok(slot.insert(Cached { key, range, clock: shared.clock(), chunks, values, seen }))
    }
}

#[cold]
fn unread() -> Box<Fault> {
    fault(FaultKind::Unsupported, "an operand that was not read")
}
