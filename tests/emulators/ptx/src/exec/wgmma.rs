//! `wgmma`: asynchronous matrix products of a warpgroup. PTX ISA 9.7.15.
//!
//! Each warp computes its own sixteen rows when it reaches the instruction; that all four warps issue the same
//! sequence is checked beside it. So a warp that runs ahead reads operands as early as the ISA lets it.

use std::collections::VecDeque;
use std::sync::Arc;

use super::cluster::{Cluster, Step};
use super::operand::{Cached, Descriptor, Layout, Operand, element, element_bytes};
use super::warp::{Row, Wait, Warp};
use super::{Exec, fault, fragment};
use crate::fault::FaultKind;
use crate::fp;
use crate::hb::{Clocks, Touch, Tracker};
use crate::op::{Code, Elem, File, Inst, Program, Reg, Wgmma};

/// Products that the four warps of a warpgroup have issued; all four must agree on them.
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

    /// Fault when the warps end with different numbers of products.
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

/// The sixteen rows of A that a warp holds in four registers, as [`fragment::lane`] says.
fn a_fragment(warp: &Warp, regs: &[Reg], kind: Elem, a: &mut [f32]) {
    match kind {
        Elem::F16 => a_lanes::<2>(warp, regs, a, |bits| fp::f16_to_f32(bits as u16)),
        Elem::Bf16 => a_lanes::<2>(warp, regs, a, |bits| fp::bf16_to_f32(bits as u16)),
        _ if element_bytes(kind) == 4 => a_lanes::<4>(warp, regs, a, |bits| element(kind, bits)),
        _ => a_lanes::<1>(warp, regs, a, |bits| element(kind, bits)),
    }
}

/// Sixteen rows of A, with elements of `SIZE` bytes, from a warp's registers.
#[inline(always)]
fn a_lanes<const SIZE: usize>(warp: &Warp, regs: &[Reg], a: &mut [f32], value: impl Fn(u32) -> f32) {
    for (to, reg) in a.chunks_exact_mut(32 * (4 / SIZE)).zip(regs) {
        let row: &Row = &warp.w[reg.row()];
        for (e, to) in to.chunks_exact_mut(32).enumerate() {
            for (o, &bits) in to.iter_mut().zip(row) {
                *o = value(bits >> (8 * SIZE * e));
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
        let cached = block.operands.read(&block.shared, &operand_b, q.b, check, Layout::Fragments)?;
        let b = Arc::clone(&cached.values);
        track_operand(self.tracker.as_deref_mut(), warp, q, cached)?;
        let mut scratch = [0f32; 16 * 32];
        let shared_a;
        let mut a: &[f32] = if w.a_regs {
            let a = &mut scratch[..16 * k];
            a_fragment(warp, &src[dst.len()..], w.a, a);
            a
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
            let cached = block.operands.read(&block.shared, &operand_a, q.a, check, Layout::Lanes)?;
            shared_a = Arc::clone(&cached.values);
            track_operand(self.tracker.as_deref_mut(), warp, q, cached)?;
            &shared_a
        };
        let negated: Vec<f32>;
        if w.neg_a != w.neg_b {
            negated = a.iter().map(|x| -*x).collect();
            a = &negated;
        }
        if w.d == Elem::F32 {
            let space = &mut self.repeated;
            fragment::multiply(&mut warp.w, dst, a, &b, q.accumulate, space, self.launch.simd);
        } else {
            // Elements are converted to single precision first, in rows of its own.
            let mut rows = vec![[0; 32]; n / 2];
            let regs: Vec<Reg> = (0..n as u32 / 2).map(|row| Reg::new(File::Word, row)).collect();
            if q.accumulate && w.d == Elem::F16 {
                load_halves(warp, dst, &mut rows);
            }
            let space = &mut self.repeated;
            fragment::multiply(&mut rows, &regs, a, &b, true, space, self.launch.simd);
            store_accumulators(warp, dst, w, &rows, q.accumulate);
        }
        // The warpgroup reads B once, each warp its own rows of A.
        let a_rows = if w.a_regs { 0 } else { 16 };
        self.counters.shared_matrix_bytes += ((n / 4 + a_rows) * k) as u64 * u64::from(element_bytes(w.b));
        Ok(())
    }
}

/// Tells happens-before of a product's read of one operand.
fn track_operand(tracker: Option<&mut Tracker>, warp: &Warp, q: &Queued, cached: &mut Cached) -> Exec<()> {
    let Some(t) = tracker else { return Ok(()) };
    let me = (t.warpgroup_track(warp), q.group);
    if t.read_before(&q.clocks, me, warp.cta, &cached.seen) {
        return Ok(());
    }
    for &at in &cached.chunks {
        t.touch(Touch::Read, &q.clocks, (me.0, me.1, q.pc, 0), [warp.cta, at, 16])?;
    }
    t.note_reads(me, warp.cta, &cached.chunks, &mut cached.seen);
    Ok(())
}

/// The row of single-precision accumulators that holds element `e` of the pairs of halves in register `i`.
fn half_row(i: usize, e: usize) -> usize {
    i / 2 * 4 + i % 2 * 2 + e
}

fn load_halves(warp: &Warp, dst: &[Reg], rows: &mut [Row]) {
    for (i, reg) in dst.iter().enumerate() {
        for (lane, &bits) in warp.w[reg.row()].iter().enumerate() {
            rows[half_row(i, 0)][lane] = fp::f16_to_f32(bits as u16).to_bits();
            rows[half_row(i, 1)][lane] = fp::f16_to_f32((bits >> 16) as u16).to_bits();
        }
    }
}

/// Half precision, or integer, accumulators.
fn store_accumulators(warp: &mut Warp, dst: &[Reg], w: Wgmma, rows: &[Row], accumulate: bool) {
    for (i, reg) in dst.iter().enumerate() {
        for (lane, bits) in warp.w[reg.row()].iter_mut().enumerate() {
            if w.d == Elem::F16 {
                let half = |e| u32::from(fp::f32_to_f16(f32::from_bits(rows[half_row(i, e)][lane])));
                *bits = half(0) | half(1) << 16;
                continue;
            }
            let v = f32::from_bits(rows[i][lane]);
            // One step of 32 eight-bit products is exact in f32; the running sum is not.
            *bits = (v as i32 as u32).wrapping_add(if accumulate { *bits } else { 0 });
        }
    }
}
