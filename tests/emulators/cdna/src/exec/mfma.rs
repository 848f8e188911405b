//! Matrix instructions. Layouts follow the CDNA ISA documents' matrix chapters; sums are f32 (or i32), one fused
//! multiply-add after the other in order of k, which the hardware does not promise to the last bit.
//!
//! With `m` rows, `blocks` independent products and `groups = 64 / (m * blocks)` lane groups, lane
//! `i + m * (g + groups * b)` holds row `i` of A (column `i` of B) for `k = g * per_lane ..`, `per_lane = K / groups`.
//! Each row of D is contiguous in half (32x32), a quarter (16x16) or four lanes (4x4) of one register, so the sums run
//! over the registers in place.

use crate::elf::Arch;
use crate::error::{Exec, FaultKind, Stop};
use crate::inst::{Inst, Src};
use crate::num::{bf16, f16, fp8::Format};
use crate::wave::{LANES, Lanes, Wave};

/// Element type of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Elem {
    F32,
    F16,
    Bf16,
    I8,
    Fp8,
    Bf8,
    /// FP6 (E2M3), BF6 (E3M2), FP4 (E2M1): only in f8f6f4.
    Fp6,
    Bf6,
    Fp4,
}

impl Elem {
    fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::I8 | Self::Fp8 | Self::Bf8 => 8,
            Self::Fp6 | Self::Bf6 => 6,
            Self::Fp4 => 4,
        }
    }
}

/// Scale registers of gfx950's scaled product: an E8M0 byte for each row and 32 values of k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scales {
    pub(crate) a: Src,
    pub(crate) b: Src,
    pub(crate) a_byte: u8,
    pub(crate) b_byte: u8,
}

/// Sizes and types of a matrix instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) m: usize,
    pub(crate) k: usize,
    pub(crate) blocks: usize,
    pub(crate) a: Elem,
    pub(crate) b: Elem,
    pub(crate) integer: bool,
    pub(crate) mixed: bool,
    pub(crate) scales: Option<Scales>,
}

impl Shape {
    /// Shape of a mnemonic such as `v_mfma_f32_32x32x8_f16` or `v_mfma_f32_32x32x8bf16_1k`, whose D takes
    /// `d_regs`.
    pub(crate) fn from_name(name: &str, d_regs: u8) -> Option<Self> {
        let rest = name.strip_prefix("v_mfma_")?;
        let (acc, rest) = rest.split_once('_')?;
        let integer = acc == "i32";
        if !integer && acc != "f32" {
            return None;
        }
        let mut sizes = rest.splitn(3, 'x');
        let m: usize = sizes.next()?.parse().ok()?;
        sizes.next()?;
        let tail = sizes.next()?;
        let digits = tail.find(|c: char| !c.is_ascii_digit())?;
        let k = tail[..digits].parse().ok()?;
        let types = tail[digits..].trim_start_matches('_').trim_end_matches("_1k");
        let types = ["2b_", "4b_", "16b_"].iter().find_map(|p| types.strip_prefix(p)).unwrap_or(types);
        let (a, b) = match types {
            "f32" => (Elem::F32, Elem::F32),
            "f16" => (Elem::F16, Elem::F16),
            "bf16" => (Elem::Bf16, Elem::Bf16),
            "i8" => (Elem::I8, Elem::I8),
            "fp8_fp8" | "f8f6f4" => (Elem::Fp8, Elem::Fp8),
            "fp8_bf8" => (Elem::Fp8, Elem::Bf8),
            "bf8_fp8" => (Elem::Bf8, Elem::Fp8),
            "bf8_bf8" => (Elem::Bf8, Elem::Bf8),
            _ => return None,
        };
        let blocks = usize::from(d_regs) * LANES / (m * m);
        Some(Self { m, k, blocks, a, b, integer, mixed: types == "f8f6f4", scales: None })
    }

    /// f8f6f4 says its types in cbsz (A) and blgp (B).
    pub(crate) fn narrow(&mut self, imm: i32) -> Option<()> {
        let elem = |code: i32| {
            Some(match code & 7 {
                0 => Elem::Fp8,
                1 => Elem::Bf8,
                2 => Elem::Fp6,
                3 => Elem::Bf6,
                4 => Elem::Fp4,
                _ => return None,
            })
        };
        self.a = elem(imm)?;
        self.b = elem(imm >> 7)?;
        Some(())
    }

    fn per_lane(&self) -> usize {
        self.k * self.m * self.blocks / LANES
    }

    pub(crate) fn a_regs(&self) -> u8 {
        (self.per_lane() * self.a.bits() / 32) as u8
    }

    pub(crate) fn b_regs(&self) -> u8 {
        (self.per_lane() * self.b.bits() / 32) as u8
    }

    /// Passes of four cycles each: 8 for gfx942's 32x32x8 f16, 16 for gfx950's 32x32x64 of FP8.
    pub(crate) fn passes(&self, arch: Arch) -> u64 {
        let flops = 2 * self.m * self.m * self.k * self.blocks;
        // Multiply-adds a pass, from the published peak rates.
        let per_pass = match (arch, self.a.bits().max(self.b.bits())) {
            (_, 32) => 128,
            (Arch::Gfx90a | Arch::Gfx1100 | Arch::Gfx1201, _) => 512,
            (Arch::Gfx942, 16) => 1024,
            (Arch::Gfx950, 8) if self.mixed => 4096,
            (Arch::Gfx942, _) | (Arch::Gfx950, 8 | 16) => 2048,
            (Arch::Gfx950, _) => 8192,
        };
        ((flops / 2).div_ceil(per_pass)).max(1) as u64
    }

    /// Register and first lane of a row of D.
    fn row(&self, block: usize, row: usize) -> (usize, usize) {
        match self.m {
            32 => (16 * block + 4 * (row / 8) + row % 4, 32 * (row / 4 % 2)),
            16 => (4 * block + row % 4, 16 * (row / 4)),
            _ => (row, 4 * block),
        }
    }

    /// Position in k of element `j` of lane group `g`.
    fn k_of(&self, elem: Elem, g: usize, j: usize) -> usize {
        let groups = LANES / (self.m * self.blocks);
        if self.mixed && elem.bits() == 8 {
            // 8-bit operands come in two runs of 16.
            16 * groups * (j / 16) + 16 * g + j % 16
        } else {
            g * self.per_lane() + j
        }
    }
}

/// One input matrix, `values[block][k][row]`, rows contiguous.
#[derive(Clone)]
pub(crate) struct Operand {
    values: [f32; 2048],
}

/// Room for both inputs, kept by the wave so that it is not cleared for every instruction.
pub(crate) struct Workspace {
    a: Operand,
    b: Operand,
}

impl Workspace {
    pub(crate) fn new() -> Box<Self> {
        let empty = Operand { values: [0.0; 2048] };
        Box::new(Self { a: empty.clone(), b: empty })
    }
}

#[inline(always)]
fn gather(wave: &Wave, arch: Arch, shape: &Shape, elem: Elem, first: u16, out: &mut Operand) {
    let (m, per_lane) = (shape.m, shape.per_lane());
    let groups = LANES / (m * shape.blocks);
    let mut lanes = [0f32; LANES];
    for j in 0..per_lane {
        element(wave, arch, elem, first, j, &mut lanes);
        for b in 0..shape.blocks {
            for g in 0..groups {
                let k = shape.k_of(elem, g, j);
                let from = m * (g + groups * b);
                let to = (b * shape.k + k) * m;
                out.values[to..to + m].copy_from_slice(&lanes[from..from + m]);
            }
        }
    }
}

/// Element `j` of every lane, as f32.
#[inline(always)]
fn element(wave: &Wave, arch: Arch, elem: Elem, first: u16, j: usize, lanes: &mut [f32; LANES]) {
    let bit = j * elem.bits();
    let reg = &wave.vreg(first + (bit / 32) as u16).0;
    let shift = bit % 32;
    match elem {
        Elem::F32 => {
            for l in 0..LANES {
                lanes[l] = f32::from_bits(reg[l]);
            }
        }
        Elem::F16 if arch == Arch::Gfx90a => {
            for l in 0..LANES {
                lanes[l] = f16::to_f32(f16::flush((reg[l] >> shift) as u16));
            }
        }
        Elem::F16 => {
            f16::widen(reg, shift as u32, lanes);
        }
        Elem::Bf16 => {
            for l in 0..LANES {
                let value = bf16::to_f32((reg[l] >> shift) as u16);
                lanes[l] = if arch == Arch::Gfx90a { crate::num::func::flush(value) } else { value };
            }
        }
        Elem::I8 => {
            for l in 0..LANES {
                lanes[l] = f32::from((reg[l] >> shift) as u8 as i8);
            }
        }
        Elem::Fp8 | Elem::Bf8 => {
            let format = if elem == Elem::Fp8 { Format::fp8(arch) } else { Format::bf8(arch) };
            let table = format.table();
            for l in 0..LANES {
                lanes[l] = table[(reg[l] >> shift & 0xff) as usize];
            }
        }
        Elem::Fp6 | Elem::Bf6 | Elem::Fp4 => {
            let format = match elem {
                Elem::Fp6 => Format::E2M3,
                Elem::Bf6 => Format::E3M2,
                _ => Format::E2M1,
            };
            let next = &wave.vreg(first + (bit / 32) as u16 + 1).0;
            for l in 0..LANES {
                let both = u64::from(reg[l]) | u64::from(next[l]) << 32;
                lanes[l] = format.decode((both >> shift) as u8 & ((1 << format.bits()) - 1));
            }
        }
    }
}

/// Multiplies each value by its scale: 2^(e - 127), an exponent byte a lane for the 32 values of k that it holds.
fn apply_scales(shape: &Shape, wave: &Wave, src: Src, byte: u8, out: &mut Operand) {
    let groups = LANES / shape.m;
    for lane in 0..LANES {
        let word = match src {
            Src::V(reg) => wave.vreg(reg).0[lane],
            other => wave.scalar(other),
        };
        let exponent = (word >> (8 * byte) & 0xff) as i32;
        let scale = if exponent == 255 { f32::NAN } else { ((exponent - 127) as f32).exp2() };
        let (row, g) = (lane % shape.m, lane / shape.m);
        let run = shape.k / groups;
        for k in g * run..(g + 1) * run {
            out.values[k * shape.m + row] *= scale;
        }
    }
}

dispatch! {
    /// Executes a matrix instruction on all lanes; EXEC does not matter.
    pub(crate) fn mfma / mfma_avx2 / mfma_body(wave: &mut Wave, inst: &Inst, arch: Arch) -> Exec
}

#[inline(always)]
fn mfma_body(wave: &mut Wave, inst: &Inst, arch: Arch) -> Exec {
    let Some(shape) = inst.mfma else {
        return Err(Stop::new(FaultKind::UnknownInstruction, inst.name));
    };
    let (Src::V(a_first), Src::V(b_first)) = (inst.src[0], inst.src[1]) else {
        return Err(Stop::new(FaultKind::UnknownInstruction, "matrix operand that is no vector register"));
    };
    if !shape.mixed && inst.imm != 0 {
        return Err(Stop::new(FaultKind::UnknownInstruction, "cbsz, abid and blgp are not executed"));
    }
    let mut workspace = wave.workspace.take().unwrap_or_else(Workspace::new);
    let Workspace { a, b } = &mut *workspace;
    gather(wave, arch, &shape, shape.a, a_first, a);
    gather(wave, arch, &shape, shape.b, b_first, b);
    if let Some(scales) = &shape.scales {
        apply_scales(&shape, wave, scales.a, scales.a_byte, a);
        apply_scales(&shape, wave, scales.b, scales.b_byte, b);
    }
    let d_regs = shape.m * shape.m * shape.blocks / LANES;
    let mut sums = [Lanes::ZERO; 32];
    for (i, sum) in sums.iter_mut().enumerate().take(d_regs) {
        *sum = match inst.src[2] {
            Src::V(first) => *wave.vreg(first + i as u16),
            other => Lanes::splat(wave.scalar(other)),
        };
    }
    match (shape.integer, shape.m) {
        (true, _) => integer(&shape, a, b, &mut sums),
        (false, 32) => product::<32>(&shape, a, b, &mut sums),
        (false, 16) => product::<16>(&shape, a, b, &mut sums),
        _ => product::<4>(&shape, a, b, &mut sums),
    }
    for (i, sum) in sums.iter().enumerate().take(d_regs) {
        *wave.vreg_mut(inst.vdst + i as u16) = *sum;
    }
    wave.workspace = Some(workspace);
    Ok(())
}

/// Two rows of D at a time: each row of B that is fetched serves both.
#[inline(always)]
fn product<const M: usize>(shape: &Shape, a: &Operand, b: &Operand, sums: &mut [Lanes; 32]) {
    #[cfg(target_arch = "x86_64")]
    if super::has_avx2() && M >= 16 {
        // SAFETY: the host has the features that the function is compiled for.
        unsafe {
            if M == 32 {
                product_avx2::<32, 4>(shape, a, b, sums);
            } else {
                product_avx2::<16, 2>(shape, a, b, sums);
            }
        }
        return;
    }
    for block in 0..shape.blocks {
        let base = block * shape.k * M;
        let a = &a.values[base..base + shape.k * M];
        let b = &b.values[base..base + shape.k * M];
        for row in (0..M).step_by(2) {
            let places = [shape.row(block, row), shape.row(block, row + 1)];
            let (mut first, mut second) = ([0f32; M], [0f32; M]);
            for (acc, (reg, lane)) in [&mut first, &mut second].into_iter().zip(places) {
                for n in 0..M {
                    acc[n] = f32::from_bits(sums[reg].0[lane + n]);
                }
            }
            for (a_row, b_row) in a.chunks_exact(M).zip(b.chunks_exact(M)) {
                for n in 0..M {
                    first[n] = a_row[row].mul_add(b_row[n], first[n]);
                    second[n] = a_row[row + 1].mul_add(b_row[n], second[n]);
                }
            }
            for ((reg, lane), acc) in places.into_iter().zip([first, second]) {
                for n in 0..M {
                    sums[reg].0[lane + n] = acc[n].to_bits();
                }
            }
        }
    }
}

/// Product with the sums kept in the host's vector registers, `V` of eight to a row: the compiler's own loop
/// spills them, and takes five times as long.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn product_avx2<const M: usize, const V: usize>(
    shape: &Shape,
    a: &Operand,
    b: &Operand,
    sums: &mut [Lanes; 32],
) {
    use std::arch::x86_64::{
        _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps,
    };
    for block in 0..shape.blocks {
        let base = block * shape.k * M;
        let a = &a.values[base..base + shape.k * M];
        let b = &b.values[base..base + shape.k * M];
        for row in (0..M).step_by(2) {
            let mut acc = [[_mm256_setzero_ps(); V]; 2];
            for r in 0..2 {
                let (reg, lane) = shape.row(block, row + r);
                let from = &sums[reg].0[lane..lane + M];
                for v in 0..V {
                    // SAFETY: `from` has M = 8 V values, of the same size and alignment as f32.
                    acc[r][v] = unsafe { _mm256_loadu_ps(from.as_ptr().cast::<f32>().add(8 * v)) };
                }
            }
            for (a_row, b_row) in a.chunks_exact(M).zip(b.chunks_exact(M)) {
                let (first, second) = (_mm256_set1_ps(a_row[row]), _mm256_set1_ps(a_row[row + 1]));
                for v in 0..V {
                    // SAFETY: `b_row` has M = 8 V values.
                    let column = unsafe { _mm256_loadu_ps(b_row.as_ptr().add(8 * v)) };
                    acc[0][v] = _mm256_fmadd_ps(first, column, acc[0][v]);
                    acc[1][v] = _mm256_fmadd_ps(second, column, acc[1][v]);
                }
            }
            for r in 0..2 {
                let (reg, lane) = shape.row(block, row + r);
                let to = &mut sums[reg].0[lane..lane + M];
                for v in 0..V {
                    // SAFETY: `to` has M = 8 V values, of the same size and alignment as f32.
                    unsafe { _mm256_storeu_ps(to.as_mut_ptr().cast::<f32>().add(8 * v), acc[r][v]) };
                }
            }
        }
    }
}

#[inline(always)]
fn integer(shape: &Shape, a: &Operand, b: &Operand, sums: &mut [Lanes; 32]) {
    let m = shape.m;
    for block in 0..shape.blocks {
        for row in 0..m {
            let (reg, lane) = shape.row(block, row);
            for n in 0..m {
                let sum = &mut sums[reg].0[lane + n];
                for k in 0..shape.k {
                    let at = (block * shape.k + k) * m;
                    let term = a.values[at + row] as i32 * b.values[at + n] as i32;
                    *sum = sum.wrapping_add(term as u32);
                }
            }
        }
    }
}
