//! Matrix instructions of one warp: `ldmatrix`, `stmatrix`, `movmatrix`, `mma.sync`. PTX ISA 9.7.14.

use super::cluster::{Cluster, Step};
use super::ldst::bank_passes;
use super::operand::{element, element_bytes};
use super::warp::{Row, Wait, Warp};
use super::{Exec, fault};
use crate::fault::FaultKind;
use crate::fp;
use crate::hb::Touch;
use crate::op::{Code, Elem, Inst, Mma, Program, Reg};

impl Cluster {
    pub(super) fn warp_matrix(
        &mut self,
        warp: &mut Warp,
        g: usize,
        program: &Program,
        inst: &Inst,
        active: u32,
    ) -> Exec<Step> {
        if active != u32::MAX {
            if warp.live == u32::MAX && warp.groups[g].mask != u32::MAX {
                return Ok(Step::Block(Wait::Lanes(u32::MAX)));
            }
            let text = format!("{:?} executed by lanes {active:#x} only", inst.code);
            return Err(fault(FaultKind::DivergentCollective, text));
        }
        match inst.code {
            Code::LdMatrix { num, trans, offset } => {
                for m in 0..usize::from(num) {
                    let mut matrix = [[0u16; 8]; 8];
                    for (r, row) in matrix.iter_mut().enumerate() {
                        let (cta, at) = self.row_address(warp, inst, m * 8 + r, offset)?;
                        let shared = &self.blocks[cta as usize].shared;
                        if self.launch.options.check_uninitialised {
                            shared.check_written(at, 16, "ldmatrix")?;
                        }
                        for (cell, b) in row.iter_mut().zip(shared.get(at, 16).chunks_exact(2)) {
                            *cell = u16::from_le_bytes([b[0], b[1]]);
                        }
                        if let Some(t) = &mut self.tracker {
                            t.generic(Touch::Read, warp, [cta, at, 16], m * 8 + r, false)?;
                        }
                    }
                    let reg = program.list(inst).0[m];
                    warp.w[reg.row()] = std::array::from_fn(|lane| {
                        let (r, c) = (lane / 4, 2 * (lane % 4));
                        let pair = if trans {
                            [matrix[c][r], matrix[c + 1][r]]
                        } else {
                            [matrix[r][c], matrix[r][c + 1]]
                        };
                        u32::from(pair[0]) | u32::from(pair[1]) << 16
                    });
                    self.count_rows(warp, inst, m, offset);
                }
            }
            Code::StMatrix { num, trans, offset } => {
                self.events += 1;
                for m in 0..usize::from(num) {
                    let regs: Row = warp.w[program.list(inst).1[m].row()];
                    let mut matrix = [[0u16; 8]; 8];
                    for (lane, bits) in regs.iter().enumerate() {
                        let (r, c) = (lane / 4, 2 * (lane % 4));
                        for (i, half) in [*bits as u16, (*bits >> 16) as u16].into_iter().enumerate() {
                            if trans {
                                matrix[c + i][r] = half;
                            } else {
                                matrix[r][c + i] = half;
                            }
                        }
                    }
                    for (r, row) in matrix.iter().enumerate() {
                        let (cta, at) = self.row_address(warp, inst, m * 8 + r, offset)?;
                        if let Some(t) = &mut self.tracker {
                            t.generic(Touch::Write, warp, [cta, at, 16], m * 8 + r, false)?;
                        }
                        let out = self.blocks[cta as usize].shared.get_mut(at, 16);
                        for (cell, v) in out.chunks_exact_mut(2).zip(row) {
                            cell.copy_from_slice(&v.to_le_bytes());
                        }
                    }
                    self.count_rows(warp, inst, m, offset);
                }
            }
            Code::MovMatrix => {
                let a = warp.w[inst.src[0].row()];
                let cell = |r: usize, c: usize| a[r * 4 + c / 2] >> (16 * (c % 2)) & 0xffff;
                warp.w[inst.dst[0].row()] = std::array::from_fn(|lane| {
                    let (r, c) = (lane / 4, 2 * (lane % 4));
                    cell(c, r) | cell(c + 1, r) << 16
                });
            }
            Code::Mma(mma) => {
                self.counters.tensor_macs += 16 * u64::from(mma.n) * u64::from(mma.k);
                multiply(warp, program, inst, mma);
            }
            _ => {}
        }
        Ok(Step::Next)
    }

    /// Address of the 16 bytes of one matrix row, which lane `lane` names.
    fn row_address(&self, warp: &Warp, inst: &Inst, lane: usize, offset: i64) -> Exec<(u32, u32)> {
        let address = warp.get(inst.src[0], lane).wrapping_add(offset as u64);
        let (cta, at) = self.own_target(warp, address)?;
        self.blocks[cta as usize].shared.check(at, 16, 16, "matrix row")?;
        Ok((cta, at))
    }

    fn count_rows(&mut self, warp: &Warp, inst: &Inst, m: usize, offset: i64) {
        let rows = (m * 8..m * 8 + 8).map(|lane| warp.get(inst.src[0], lane).wrapping_add(offset as u64));
        let passes = bank_passes(rows.flat_map(|at| (0..4).map(move |w| (at >> 2) + w)));
        self.counters.shared_bytes += 128;
        self.counters.shared_passes += passes;
        self.counters.bank_conflicts += passes.saturating_sub(1);
    }
}

#[allow(clippy::needless_range_loop, reason = "lanes index several rows")]
/// `d = a * b + c` for one warp: m16n8 with K of 16 or 32 bytes.
fn multiply(warp: &mut Warp, program: &Program, inst: &Inst, mma: Mma) {
    let (dst, src) = program.list(inst);
    let k = usize::from(mma.k);
    let size = element_bytes(mma.a) as usize;
    let a_regs = k * size / 8;
    let (regs_a, rest) = src.split_at(a_regs);
    let (regs_b, regs_c) = rest.split_at(a_regs / 2);
    let mut a = vec![0f32; 16 * k];
    let mut b = vec![0f32; k * 8];
    let fragment = |warp: &Warp, reg: Reg, kind: Elem, lane: usize, e: usize| {
        element(kind, warp.w[reg.row()][lane] >> (8 * size * e))
    };
    for lane in 0..32 {
        for e in 0..4 / size {
            let at = 4 / size * (lane % 4) + e;
            for (i, reg) in regs_a.iter().enumerate() {
                // Registers alternate between rows r and r + 8, then step 16 bytes along K.
                a[(lane / 4 + 8 * (i % 2)) * k + at + 16 / size * (i / 2)] =
                    fragment(warp, *reg, mma.a, lane, e);
            }
            for (i, reg) in regs_b.iter().enumerate() {
                b[(at + 16 / size * i) * 8 + lane / 4] = fragment(warp, *reg, mma.b, lane, e);
            }
        }
    }
    let mut out: Vec<Row> = vec![[0; 32]; dst.len()];
    for lane in 0..32 {
        for i in 0..4 {
            let (row, col) = (lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2);
            let products = (0..k).map(|kk| (a[row * k + kk], b[kk * 8 + col]));
            if mma.d == Elem::S32 {
                let sum: i32 = products.map(|(x, y)| (x * y) as i32).sum();
                out[i][lane] = (sum as u32).wrapping_add(warp.w[regs_c[i].row()][lane]);
                continue;
            }
            let c = if mma.c == Elem::F16 {
                fp::f16_to_f32((warp.w[regs_c[i / 2].row()][lane] >> (16 * (i % 2))) as u16)
            } else {
                f32::from_bits(warp.w[regs_c[i].row()][lane])
            };
            let r = products.fold(c, |s, (x, y)| x.mul_add(y, s));
            if mma.d == Elem::F16 {
                out[i / 2][lane] |= u32::from(fp::f32_to_f16(r)) << (16 * (i % 2));
            } else {
                out[i][lane] = r.to_bits();
            }
        }
    }
    for (reg, row) in dst.iter().zip(out) {
        warp.w[reg.row()] = row;
    }
}
