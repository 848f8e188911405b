//! `tcgen05.mma`: products whose accumulator lies in tensor memory. PTX ISA 9.7.16.10.
//!
//! Factors of a block-scaled product multiply the elements in single precision, before the product.
//!
//! With `.ashift` the product takes A as it lies; then A's rows are moved, in each warp's part for itself.
//! The ISA leaves that open; the CUTLASS example `1cta_mma_a_from_tmem.py` has it as observed on a B200.

use super::cluster::Cluster;
use super::operand::{Descriptor, Layout, Operand, element, element_bytes};
use super::scaled::{self, Factors};
use super::tmem::{COLUMNS, ELEMENT, PART, group_blocks};
use super::warp::Warp;
use super::wgmma::multiply;
use super::{Exec, fault};
use crate::fault::FaultKind;
use crate::hb::Touch;
use crate::op::{Elem, Inst, MmaKind, Program, ScaledKind};

/// An instruction descriptor, decoded (tables 42 to 44 of the ISA).
#[derive(Clone, Copy, Debug)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    scaled: Option<Scaled>,
    a: Elem,
    b: Elem,
    negate: bool,
    trans_a: bool,
    trans_b: bool,
}

/// Factors of a block-scaled product: their type, and the byte of each operand's in its words.
#[derive(Clone, Copy, Debug)]
struct Scaled {
    kind: ScaledKind,
    is_e8m0: bool,
    first_bytes: [u32; 2],
}

impl Shape {
    fn decode(bits: u32, kind: MmaKind, pair: bool) -> Exec<Self> {
        let bad =
            |what: &str| fault(FaultKind::Descriptor, format!("instruction descriptor {bits:#x}: {what}"));
        if let MmaKind::Scaled(kind) = kind {
            return Self::decode_scaled(bits, kind, pair);
        }
        let elem = |code: u32| match (kind, code) {
            (MmaKind::F16, 0) => Ok(Elem::F16),
            (MmaKind::F16, 1) => Ok(Elem::Bf16),
            (MmaKind::Tf32, 2) => Ok(Elem::Tf32),
            (MmaKind::F8f6f4, 0) => Ok(Elem::E4m3),
            (MmaKind::F8f6f4, 1) => Ok(Elem::E5m2),
            _ => Err(bad(&format!("element type {code} of {kind:?} is not supported"))),
        };
        if bits >> 4 & 3 != 1 {
            return Err(bad("only single precision accumulators are supported"));
        }
        if bits & 0b100 != 0 {
            return Err(bad("sparse products are not supported"));
        }
        let shape = Self {
            m: ((bits >> 24 & 31) * 16) as usize,
            n: ((bits >> 17 & 63) * 8) as usize,
            k: 0,
            scaled: None,
            a: elem(bits >> 7 & 7)?,
            b: elem(bits >> 10 & 7)?,
            negate: (bits >> 13 & 1) != (bits >> 14 & 1),
            trans_a: bits >> 15 & 1 != 0,
            trans_b: bits >> 16 & 1 != 0,
        };
        let (m, n) = (shape.m, shape.n);
        let fits = match (pair, m) {
            (false, 64) => n % 8 == 0,
            (false, 128) => n % 16 == 0,
            (true, 128 | 256) => n % 32 == 0,
            _ => false,
        };
        if !fits || n == 0 || n > 256 {
            return Err(bad(&format!("M {m}, N {n} is no shape of cta_group::{}", 1 + u32::from(pair))));
        }
        Ok(Self { k: 32 / element_bytes(shape.a) as usize, ..shape })
    }

    fn decode_scaled(bits: u32, kind: ScaledKind, pair: bool) -> Exec<Self> {
        let bad = |what: String| {
            fault(FaultKind::Descriptor, format!("instruction descriptor {bits:#x} of {kind:?}: {what}"))
        };
        let four_bits = kind != ScaledKind::Mxf8f6f4;
        let reserved = if four_bits { 0x0700_104b } else { 0x8700_004b };
        if bits & reserved != 0 {
            return Err(bad(format!("reserved bits {:#x} are set", bits & reserved)));
        }
        if bits & 0b100 != 0 || four_bits && bits >> 31 != 0 {
            return Err(bad("sparse products and K 96 are not supported".to_owned()));
        }
        let elem = |code: u32| match (four_bits, code) {
            // A byte has two elements, which are taken apart once it is read.
            (true, 1) => Ok(Elem::U8),
            (false, 0) => Ok(Elem::E4m3),
            (false, 1) => Ok(Elem::E5m2),
            _ => Err(bad(format!("element type {code} is not supported"))),
        };
        let (trans_a, trans_b) = (bits >> 15 & 1 != 0, bits >> 16 & 1 != 0);
        if four_bits && (trans_a || trans_b) {
            return Err(bad("elements of four bits lie along K alone".to_owned()));
        }
        let is_e8m0 = bits >> 23 & 1 != 0;
        if !is_e8m0 && kind != (ScaledKind::Mxf4nvf4 { per_row: 4 }) {
            return Err(bad("scale type UE4M3, which scale_vec::4X alone has".to_owned()));
        }
        let per_row = kind.per_row() as u32;
        let first_bytes = [bits >> 29 & 3, bits >> 4 & 3];
        if first_bytes.iter().any(|id| id % per_row != 0) {
            return Err(bad(format!("scale factor IDs {first_bytes:?} with {per_row} factors a row")));
        }
        let (m, n) = ((bits >> 27 & 3) as usize * 128, ((bits >> 17 & 63) * 8) as usize);
        let step = (if trans_b { 16 } else { 8 }) * if pair { 2 } else { 1 };
        if m != if pair { 256 } else { 128 } || n == 0 || n > 256 || n % step != 0 {
            return Err(bad(format!("M {m}, N {n} is no shape of cta_group::{}", 1 + u32::from(pair))));
        }
        Ok(Self {
            m,
            n,
            k: kind.depth(),
            scaled: Some(Scaled { kind, is_e8m0, first_bytes }),
            a: elem(bits >> 7 & 7)?,
            b: elem(bits >> 10 & if four_bits { 3 } else { 7 })?,
            negate: (bits >> 13 & 1) != (bits >> 14 & 1),
            trans_a,
            trans_b,
        })
    }

    /// Bytes of shared memory that a row of an operand has in one product, as elements of its type there.
    fn stored_depth(&self, elem: Elem) -> u32 {
        32 / element_bytes(elem)
    }

    fn has_pairs(&self) -> bool {
        self.scaled.is_some_and(|scaled| scaled.kind != ScaledKind::Mxf8f6f4)
    }

    /// Lane and column of element (m, n) of one block's part of D.
    fn place(&self, pair: bool, m: usize, n: usize) -> (usize, usize) {
        match (pair, self.m) {
            (false, 64) => (m % 16 + 32 * (m / 16), n),
            (true, 128) => (m + 64 * (n / (self.n / 2)), n % (self.n / 2)),
            _ => (m, n),
        }
    }
}

impl Descriptor {
    /// The shared-memory descriptor of `sm_100`.
    pub(super) fn sm100(bits: u64) -> Exec<Self> {
        let bad =
            |what: &str| fault(FaultKind::Descriptor, format!("shared memory descriptor {bits:#x}: {what}"));
        if bits >> 46 & 7 != 1 {
            return Err(bad("bits 46 to 48 must be 0b001"));
        }
        if bits >> 49 & 7 != 0 || bits >> 52 & 1 != 0 {
            return Err(bad("base offset and absolute strides are not supported"));
        }
        // The fields are those of sm_90, but the swizzle has other codes.
        let swizzle = match bits >> 61 {
            0 => 0,
            2 => 1,
            4 => 2,
            6 => 3,
            _ => return Err(bad("this swizzle is not supported")),
        };
        Self::sm90(bits & ((1 << 46) - 1) | swizzle << 62)
    }
}

impl Cluster {
    #[allow(clippy::too_many_arguments)] // One per part of the instruction.
    pub(super) fn tensor_product(
        &mut self,
        warp: &mut Warp,
        program: &Program,
        inst: &Inst,
        lane: usize,
        [a_tmem, shift]: [bool; 2],
        kind: MmaKind,
        pair: bool,
    ) -> Exec<()> {
        let list = program.list(inst).1;
        let (b_bits, i_bits) = (warp.get(list[0], lane), warp.get(list[1], lane) as u32);
        let shape = Shape::decode(i_bits, kind, pair)?;
        if shift && shape.m == 64 {
            let text = "tcgen05.mma.ashift of M 64, which only M 128 and 256 have";
            return Err(fault(FaultKind::Descriptor, text));
        }
        let rest: Vec<u32> = list[3..].iter().map(|r| warp.get(*r, lane) as u32).collect();
        let mut disabled = rest.as_slice();
        let mut factors = None;
        if let (Some(scaled), [a, a_offset, b, b_offset]) = (shape.scaled, disabled) {
            let of =
                |address: u32, i: usize, what| Factors { address, first_byte: scaled.first_bytes[i], what };
            let a = of(a.wrapping_add(*a_offset), 0, "scale factors of A");
            let b = of(b.wrapping_add(*b_offset), 1, "scale factors of B");
            factors = Some((scaled, a, b));
            disabled = &[];
        }
        let accumulate = warp.pred(inst.src[2], inst.src_not) >> lane & 1 != 0;
        let (_, column0) = self.tmem_address(warp, inst, lane);
        let a_bits = warp.get(inst.src[1], lane).wrapping_add(warp.get(list[2], lane));
        let k = shape.k;
        let ctas = group_blocks(warp, pair);
        let clocks = self.tracker.as_mut().map(|t| t.tcgen_issue(warp)).unwrap_or_default();
        let check = self.launch.options.check_uninitialised;
        // Each block of a pair holds half of B's columns.
        let part = shape.n / ctas.len();
        let stored = shape.stored_depth(shape.b) as usize;
        let mut b = vec![0f32; stored * shape.n];
        for (i, &cta) in ctas.iter().enumerate() {
            let operand = Operand {
                desc: Descriptor::sm100(b_bits)?,
                kind: shape.b,
                transposed: shape.trans_b,
                first: 0,
                rows: part as u32,
                depth: stored as u32,
                what: "tcgen05.mma operand B",
            };
            let block = &mut self.blocks[cta as usize];
            let half = &block.operands.read(&block.shared, &operand, b_bits, check, Layout::Columns)?.values;
            for row in 0..stored {
                b[row * shape.n + i * part..][..part].copy_from_slice(&half[row * part..(row + 1) * part]);
            }
            if let Some(t) = &mut self.tracker {
                operand.chunks(|at, _, _| t.tcgen_read_shared(warp, &clocks, cta, at))?;
            }
        }
        if shape.has_pairs() {
            b = scaled::pairs_down_columns(&b, shape.n);
        }
        let rows = shape.m / ctas.len();
        let unscaled_b = b;
        for &cta in &ctas {
            let mut a = if a_tmem {
                self.a_from_tmem(cta, a_bits as u32, shape, rows, pair)?
            } else {
                let operand = Operand {
                    desc: Descriptor::sm100(a_bits)?,
                    kind: shape.a,
                    transposed: shape.trans_a,
                    first: 0,
                    rows: rows as u32,
                    depth: shape.stored_depth(shape.a),
                    what: "tcgen05.mma operand A",
                };
                let block = &mut self.blocks[cta as usize];
                let a = &block.operands.read(&block.shared, &operand, a_bits, check, Layout::Rows)?.values;
                if let Some(t) = &mut self.tracker {
                    operand.chunks(|at, _, _| t.tcgen_read_shared(warp, &clocks, cta, at))?;
                }
                a.to_vec()
            };
            if shape.has_pairs() {
                a = scaled::pairs_along_rows(&a);
            }
            let mut scaled_b = Vec::new();
            if let Some((scaled, of_a, of_b)) = factors {
                let (per_row, tmem) = (scaled.kind.per_row(), &self.blocks[cta as usize].tmem);
                scaled::scale_rows(&mut a, k, &of_a.read(tmem, rows, per_row, scaled.is_e8m0)?, per_row);
                scaled_b.clone_from(&unscaled_b);
                let values = of_b.read(tmem, shape.n, per_row, scaled.is_e8m0)?;
                scaled::scale_columns(&mut scaled_b, shape.n, &values, per_row);
                if let Some(t) = &mut self.tracker {
                    for ([column, columns], quadrant) in [of_a.columns(rows), of_b.columns(shape.n)]
                        .into_iter()
                        .flat_map(|c| (0..4).map(move |q| (c, q)))
                    {
                        t.tcgen_tmem(Touch::Read, warp, &clocks, cta, [quadrant, column, columns])?;
                    }
                }
            }
            let b = if factors.is_some() { &scaled_b } else { &unscaled_b };
            if a_tmem && let Some(t) = &mut self.tracker {
                for quadrant in 0..4 {
                    let part = [quadrant, a_bits as u32 & 0xffff, ELEMENT as u32];
                    t.tcgen_tmem(Touch::Read, warp, &clocks, cta, part)?;
                }
            }
            if shape.negate {
                a.iter_mut().for_each(|x| *x = -*x);
            }
            self.accumulate(cta, shape, pair, rows, column0, accumulate, [&a, b], disabled)?;
            if shift {
                // One step of K is one element of 32 bytes a row.
                for part in 0..rows.div_ceil(PART) as u32 {
                    self.shift_part(warp, &clocks, cta, [part, a_bits as u32 & 0xffff, ELEMENT as u32])?;
                }
            }
            if let Some(t) = &mut self.tracker {
                let columns = if pair && shape.m == 128 { shape.n / 2 } else { shape.n } as u32;
                for quadrant in 0..4 {
                    let part = [quadrant, column0 as u32, columns];
                    t.tcgen_tmem(Touch::Write, warp, &clocks, cta, part)?;
                }
            }
        }
        self.counters.tensor_macs += (shape.m * shape.n * k) as u64;
        // Each block reads its own rows of A and its own part of B.
        let a_bytes = if a_tmem { 0 } else { shape.m * 32 };
        self.counters.shared_matrix_bytes += (a_bytes + shape.n * 32) as u64;
        Ok(())
    }

    /// A in tensor memory: row m in lane m (as D lies), packed along the columns.
    fn a_from_tmem(&self, cta: u32, address: u32, shape: Shape, rows: usize, pair: bool) -> Exec<Vec<f32>> {
        let size = element_bytes(shape.a) as usize;
        let k = shape.stored_depth(shape.a) as usize;
        let column0 = (address & 0xffff) as usize;
        let tmem = &self.blocks[cta as usize].tmem;
        let mut a = vec![0f32; rows * k];
        for m in 0..rows {
            let (lane, _) = shape.place(pair, m, 0);
            for column in 0..k * size / 4 {
                let bits = tmem.get(lane, column0 + column)?;
                for e in 0..4 / size {
                    a[m * k + column * 4 / size + e] = element(shape.a, bits >> (8 * size * e));
                }
            }
        }
        Ok(a)
    }

    #[allow(clippy::too_many_arguments)] // Where, what shape, which operands.
    fn accumulate(
        &mut self,
        cta: u32,
        shape: Shape,
        pair: bool,
        rows: usize,
        column0: usize,
        accumulate: bool,
        [a, b]: [&[f32]; 2],
        disabled: &[u32],
    ) -> Exec<()> {
        let n = shape.n;
        let k = a.len() / rows;
        let last = shape.place(pair, rows - 1, n - 1).1;
        if column0 + last >= COLUMNS {
            let text = format!("D covers columns {column0} to {}, beyond {}", column0 + last, COLUMNS - 1);
            return Err(fault(FaultKind::TensorMemory, text));
        }
        let mut d = vec![0f32; rows * n];
        let tmem = &mut self.blocks[cta as usize].tmem;
        if accumulate {
            for m in 0..rows {
                for j in 0..n {
                    let (lane, column) = shape.place(pair, m, j);
                    d[m * n + j] = f32::from_bits(tmem.get(lane, column0 + column)?);
                }
            }
        }
        multiply(a, b, &mut d, n, k, self.launch.simd);
        let tmem = &mut self.blocks[cta as usize].tmem;
        for m in 0..rows {
            for j in 0..n {
                let (lane, column) = shape.place(pair, m, j);
                if disabled.get(lane / 32).is_some_and(|mask| mask >> (lane % 32) & 1 != 0) {
                    continue;
                }
                tmem.set(lane, column0 + column, d[m * n + j].to_bits())?;
            }
        }
        Ok(())
    }
}
