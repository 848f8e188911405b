//! `wgmma`: asynchronous matrix products of a warpgroup. PTX ISA 9.7.15.
//!
//! Each warp computes its own sixteen rows when it reaches the instruction; that all four warps issue the same
//! sequence is checked beside it. So a warp that runs ahead reads operands as early as the ISA lets it.

use std::collections::VecDeque;

use super::cluster::{Cluster, Step};
use super::tensor::Swizzle;
use super::warp::{Row, Wait, Warp};
use super::{Exec, fault, fragment};
use crate::fault::FaultKind;
use crate::fp;
use crate::hb::Clocks;
use crate::memory::Shared;
use crate::op::{Code, Elem, Inst, Program, Reg, Wgmma};

/// What the four warps of a warpgroup must agree on.
#[derive(Debug, Default)]
pub(crate) struct Warpgroup {
    log: VecDeque<(u32, u64, u64)>,
    /// Sequence number of the log's front.
    base: u64,
    count: [u64; 4],
}

impl Warpgroup {
    /// Notes that a warp issues its next product: instruction and descriptors.
    fn record(&mut self, rank: usize, key: (u32, u64, u64)) -> Result<(), String> {
        let at = (self.count[rank] - self.base) as usize;
        self.count[rank] += 1;
        match self.log.get(at) {
            None => self.log.push_back(key),
            Some(seen) if *seen == key => {}
            Some(seen) => {
                return Err(format!(
                    "warp {rank} of the warpgroup issues (instruction {}, descriptors {:#x}, {:#x}), \
                     another warp issued ({}, {:#x}, {:#x}) as its number {}",
                    key.0, key.1, key.2, seen.0, seen.1, seen.2, self.count[rank]
                ));
            }
        }
        while !self.log.is_empty() && self.count.iter().all(|&c| c > self.base) {
            self.log.pop_front();
            self.base += 1;
        }
        Ok(())
    }

    /// What is wrong when the warps end with different numbers of products.
    pub(crate) fn unfinished(&self) -> Option<String> {
        let same = self.count.iter().all(|c| *c == self.count[0]);
        (!same).then(|| format!("its warps issued {:?} wgmma each", self.count))
    }
}

/// A product whose execution is put off (late mode).
#[derive(Clone, Debug)]
pub(crate) struct Queued {
    group: u32,
    pc: u32,
    a: u64,
    b: u64,
    accumulate: bool,
    clocks: Clocks,
}

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
fn elements(kind: Elem, bytes: &[u8], out: &mut [f32; 16]) {
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
        let place = |r: usize, k: usize| match layout {
            Layout::Rows => r * depth + k,
            Layout::Columns => k * rows + r,
            Layout::Fragments => k * rows + fragment::column(r),
        };
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
            for (i, value) in values[..count].iter().enumerate() {
                out[if self.transposed { place(r + i, k) } else { place(r, k + i) }] = *value;
            }
            Ok(())
        })?;
        Ok(range)
    }
}

/// Operands read lately, as f32: the four warps of a warpgroup read the same ones.
#[derive(Debug, Default)]
pub(crate) struct OperandCache {
    entries: VecDeque<Cached>,
}

#[derive(Debug)]
struct Cached {
    key: (u64, Elem, bool, u32, u32, u32, Layout),
    /// The bytes it came from and the number of the last write before.
    range: (u32, u32),
    clock: u64,
    values: std::sync::Arc<Vec<f32>>,
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
    ) -> Exec<std::sync::Arc<Vec<f32>>> {
        let Operand { kind, transposed, first, rows, depth, .. } = *operand;
        let key = (bits, kind, transposed, first, rows, depth, layout);
        if let Some(at) = self.entries.iter().position(|e| e.key == key) {
            let e = &self.entries[at];
            if shared.unchanged(e.range.0, e.range.1, e.clock) {
                return Ok(std::sync::Arc::clone(&e.values));
            }
            self.entries.remove(at);
        }
        let mut values = vec![0f32; (operand.rows * operand.depth) as usize];
        let range = operand.read(shared, check, &mut values, layout)?;
        let values = std::sync::Arc::new(values);
        self.entries.push_back(Cached {
            key,
            range,
            clock: shared.clock(),
            values: std::sync::Arc::clone(&values),
        });
        if self.entries.len() > 64 {
            self.entries.pop_front();
        }
        Ok(values)
    }
}

/// Row-major `d[rows][n] += a[rows][k] * b[k][n]`, in order of k. `rows` is a multiple of 4, `n` of 8.
pub(super) fn multiply(a: &[f32], b: &[f32], d: &mut [f32], n: usize, k: usize, simd: bool) {
    #[cfg(target_arch = "x86_64")]
    if simd {
        // SAFETY: `simd` is only true when AVX2 and FMA were found on this processor.
        unsafe { multiply_avx2(a, b, d, n, k) };
        return;
    }
    let _ = simd;
    multiply_body(a, b, d, n, k);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn multiply_avx2(a: &[f32], b: &[f32], d: &mut [f32], n: usize, k: usize) {
    multiply_body(a, b, d, n, k);
}

#[inline(always)]
fn multiply_body(a: &[f32], b: &[f32], d: &mut [f32], n: usize, k: usize) {
    for (a4, d4) in a.chunks_exact(4 * k).zip(d.chunks_exact_mut(4 * n)) {
        for at in (0..n).step_by(8) {
            let mut acc = [[0f32; 8]; 4];
            for r in 0..4 {
                acc[r].copy_from_slice(&d4[r * n + at..r * n + at + 8]);
            }
            for kk in 0..k {
                let row: &[f32; 8] = b[kk * n + at..kk * n + at + 8].try_into().unwrap_or(&[0.0; 8]);
                for r in 0..4 {
                    let x = a4[r * k + kk];
                    for i in 0..8 {
                        acc[r][i] = fp::fma32(x, row[i], acc[r][i]);
                    }
                }
            }
            for r in 0..4 {
                d4[r * n + at..r * n + at + 8].copy_from_slice(&acc[r]);
            }
        }
    }
}

/// The sixteen rows of A that a warp holds in four registers, row-major.
fn a_fragment(warp: &Warp, regs: &[Reg], kind: Elem, k: usize, a: &mut [f32]) {
    let size = element_bytes(kind);
    for (n, reg) in regs.iter().enumerate() {
        let row: &Row = &warp.w[reg.row()];
        for (lane, &bits) in row.iter().enumerate() {
            let m = lane / 4 + 8 * (n % 2);
            for e in 0..4 / size {
                let byte = 4 * (lane % 4) + 16 * (n / 2);
                let at = byte / size as usize + e as usize;
                a[m * k + at] = element(kind, bits >> (8 * size * e));
            }
        }
    }
}

impl Cluster {
    pub(super) fn wgmma(
        &mut self,
        warp: &mut Warp,
        g: usize,
        program: &Program,
        inst: &Inst,
        active: u32,
    ) -> Exec<Step> {
        if warp.live != u32::MAX || active != u32::MAX {
            if warp.live == u32::MAX && warp.groups[g].mask != u32::MAX {
                return Ok(Step::Block(Wait::Lanes(u32::MAX)));
            }
            let text = format!("{:?} executed by lanes {active:#x} of a whole warpgroup", inst.code);
            return Err(fault(FaultKind::DivergentCollective, text));
        }
        match inst.code {
            Code::WgmmaFence => {
                if let Some(t) = &mut self.tracker {
                    t.wgmma_fence(warp);
                }
            }
            Code::WgmmaCommit => {
                warp.asynchrony.wgmma_open = 0;
                warp.asynchrony.wgmma_committed += 1;
            }
            Code::WgmmaWait => {
                let n = warp.w[inst.src[0].row()][0];
                let upto = warp.asynchrony.wgmma_committed.saturating_sub(n);
                while warp.queue.front().is_some_and(|q| q.group <= upto) {
                    if let Some(q) = warp.queue.pop_front() {
                        self.product(warp, program, &q)?;
                    }
                }
                warp.asynchrony.wgmma_done = warp.asynchrony.wgmma_done.max(upto);
                if let Some(t) = &mut self.tracker {
                    t.wgmma_done(warp);
                }
            }
            Code::Wgmma(w) => {
                let (a, b) = (self.uniform(warp, inst.src[0])?, self.uniform(warp, inst.src[1])?);
                let rank = warp.index as usize % 4;
                let pc = warp.current_pc;
                let warps = self.warps.len() / self.blocks.len();
                let group = &mut self.blocks[warp.cta as usize].warpgroups[warp.index as usize / 4];
                if warp.index as usize / 4 * 4 + 4 > warps {
                    let text = format!("wgmma in a block of {warps} warps: the last warpgroup is not whole");
                    return Err(fault(FaultKind::DivergentCollective, text));
                }
                group.record(rank, (pc, a, b)).map_err(|t| fault(FaultKind::DivergentCollective, t))?;
                let accumulate = match w.scale_d {
                    Some(fixed) => fixed,
                    None => match warp.pred(inst.src[2], inst.src_not) {
                        0 => false,
                        u32::MAX => true,
                        mixed => {
                            let text = format!("scale-d differs between lanes ({mixed:#x})");
                            return Err(fault(FaultKind::DivergentCollective, text));
                        }
                    },
                };
                warp.asynchrony.wgmma_open += 1;
                warp.asynchrony.wgmma_issued += 1;
                let clocks = self.tracker.as_ref().map(|t| t.snapshot(warp)).unwrap_or_default();
                let q = Queued { group: warp.asynchrony.wgmma_committed + 1, pc, a, b, accumulate, clocks };
                if let Some(t) = &mut self.tracker {
                    let (dst, src) = program.list(inst);
                    t.wgmma_issue(warp, q.group, dst, &src[dst.len()..])?;
                }
                self.counters.tensor_macs += 16 * u64::from(w.n) * u64::from(w.k);
                if self.is_late() {
                    warp.queue.push_back(q);
                } else {
                    self.product(warp, program, &q)?;
                }
            }
            _ => {}
        }
        Ok(Step::Next)
    }

    /// A value that all lanes must share; 0 for an absent operand.
    pub(super) fn uniform(&self, warp: &Warp, reg: Reg) -> Exec<u64> {
        if !reg.is_some() {
            return Ok(0);
        }
        let row = warp.wide(reg);
        match row.iter().position(|v| *v != row[0]) {
            None => Ok(row[0]),
            Some(lane) => {
                let text = format!(
                    "lane 0 gives {:#x}, lane {lane} {:#x} for one matrix operand",
                    row[0], row[lane]
                );
                Err(fault(FaultKind::DivergentCollective, text))
            }
        }
    }

    fn product(&mut self, warp: &mut Warp, program: &Program, q: &Queued) -> Exec<()> {
        let inst = &program.code[q.pc as usize];
        let Code::Wgmma(w) = inst.code else { return Ok(()) };
        let (dst, src) = program.list(inst);
        let (n, k) = (usize::from(w.n), usize::from(w.k));
        let cta = warp.cta as usize;
        let check = self.launch.options.check_uninitialised;
        let operand_b = Operand {
            desc: Descriptor::sm90(q.b)?,
            kind: w.b,
            transposed: w.trans_b,
            first: 0,
            rows: w.n.into(),
            depth: w.k.into(),
            what: "wgmma operand B",
        };
        let block = &mut self.blocks[cta];
        let b = block.operands.read(&block.shared, &operand_b, q.b, check, Layout::Fragments)?;
        self.track_operand(warp, q, &operand_b)?;
        let mut scratch = [0f32; 16 * 32];
        let shared_a;
        let mut a: &[f32] = if w.a_regs {
            a_fragment(warp, &src[dst.len()..], w.a, k, &mut scratch);
            &scratch[..16 * k]
        } else {
            let operand_a = Operand {
                desc: Descriptor::sm90(q.a)?,
                kind: w.a,
                transposed: w.trans_a,
                first: warp.index % 4 * 16,
                rows: 16,
                depth: w.k.into(),
                what: "wgmma operand A",
            };
            let block = &mut self.blocks[cta];
            shared_a = block.operands.read(&block.shared, &operand_a, q.a, check, Layout::Rows)?;
            self.track_operand(warp, q, &operand_a)?;
            &shared_a
        };
        let negated: Vec<f32>;
        if w.neg_a != w.neg_b {
            negated = a.iter().map(|x| -*x).collect();
            a = &negated;
        }
        if w.d == Elem::F32 {
            fragment::multiply(&mut warp.w, dst, a, &b, q.accumulate, self.launch.simd);
        } else {
            let mut d = vec![0f32; 16 * n];
            if q.accumulate && w.d == Elem::F16 {
                load_halves(warp, dst, n, &mut d);
            }
            multiply(a, &b, &mut d, n, k, self.launch.simd);
            store_accumulators(warp, dst, w, &d, q.accumulate);
        }
        self.counters.shared_matrix_bytes += (n * k) as u64 * u64::from(element_bytes(w.b));
        Ok(())
    }

    fn track_operand(&mut self, warp: &Warp, q: &Queued, operand: &Operand) -> Exec<()> {
        let Some(t) = &mut self.tracker else { return Ok(()) };
        let track = t.warpgroup_track(warp);
        operand.chunks(|at, _, _| t.async_read(&q.clocks, (track, q.group), q.pc, 0, warp.cta, at, 16))
    }
}

/// Where a lane's pair of halves `i` lies in `[16][n]` with the columns exchanged; the odd one four later.
fn half_place(i: usize, lane: usize, n: usize) -> usize {
    (lane / 4 + 8 * (i % 2)) * n + i / 2 * 8 + lane % 4
}

fn load_halves(warp: &Warp, dst: &[Reg], n: usize, d: &mut [f32]) {
    for (i, reg) in dst.iter().enumerate() {
        for (lane, &bits) in warp.w[reg.row()].iter().enumerate() {
            let at = half_place(i, lane, n);
            d[at] = fp::f16_to_f32(bits as u16);
            d[at + 4] = fp::f16_to_f32((bits >> 16) as u16);
        }
    }
}

/// Half precision, or integer, accumulators.
fn store_accumulators(warp: &mut Warp, dst: &[Reg], w: Wgmma, d: &[f32], accumulate: bool) {
    let n = usize::from(w.n);
    for (i, reg) in dst.iter().enumerate() {
        for (lane, bits) in warp.w[reg.row()].iter_mut().enumerate() {
            if w.d == Elem::F16 {
                let at = half_place(i, lane, n);
                *bits = u32::from(fp::f32_to_f16(d[at])) | u32::from(fp::f32_to_f16(d[at + 4])) << 16;
                continue;
            }
            let v = d[(lane / 4 + 8 * (i / 2 % 2)) * n + i / 4 * 8 + lane % 4 + 4 * (i % 2)];
            // One step of 32 eight-bit products is exact in f32; the running sum is not.
            *bits = (v as i32 as u32).wrapping_add(if accumulate { *bits } else { 0 });
        }
    }
}
