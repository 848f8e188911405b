//! RDNA's matrix instruction, 16x16x16 with f32 sums (RDNA 3 and RDNA 4 ISA, "WMMA"). Sums are one fused multiply-add
//! after the other in order of k, which the hardware does not promise to the last bit.
//!
//! gfx11: lane l holds row l % 16 of A (column l % 16 of B), all 16 of k, and lanes 16 to 31 repeat lanes 0
//! to 15; element i of D in lane l is row 2 i + l / 16, column l % 16. gfx12: lane l holds k = 8 (l / 16) +
//! 0..8 of that row; element i of D is row 8 (l / 16) + i.

use crate::elf::Arch;
use crate::error::{Exec, FaultKind, Stop};
use crate::inst::{Inst, Src};
use crate::num::{bf16, f16, fp8::Format};
use crate::wave::{Lanes, Wave};

const EDGE: usize = 16;

type Matrix = [[f32; EDGE]; EDGE];

pub(super) fn wmma(wave: &mut Wave, inst: &Inst, arch: Arch) -> Exec {
    if !wave.is_whole() {
        return Err(Stop::new(
            FaultKind::UnknownInstruction,
            format!("{} with lanes switched off", inst.name),
        ));
    }
    let types = inst.name.trim_start_matches("v_wmma_f32_16x16x16_");
    let (a_type, b_type) = types.split_once('_').unwrap_or((types, types));
    let a = operand(wave, inst, 0, a_type, arch)?;
    let b = operand(wave, inst, 1, b_type, arch)?;
    let mut out = [Lanes::ZERO; 8];
    for (i, register) in out.iter_mut().enumerate() {
        for l in 0..32 {
            let row = if arch == Arch::Gfx1100 { 2 * i + l / EDGE } else { 8 * (l / EDGE) + i };
            let column = l % EDGE;
            let old = match inst.src[2] {
                Src::V(first) => wave.vreg(first + i as u16).0[l],
                other => wave.scalar(other),
            };
            let sum = (0..EDGE).fold(f32::from_bits(old), |sum, k| a[row][k].mul_add(b[column][k], sum));
            register.0[l] = sum.to_bits();
        }
    }
    for (i, register) in out.into_iter().enumerate() {
        *wave.vreg_mut(inst.vdst + i as u16) = register;
    }
    Ok(())
}

/// A by rows, B by columns.
fn operand(wave: &Wave, inst: &Inst, which: usize, of: &str, arch: Arch) -> Exec<Matrix> {
    let Src::V(first) = inst.src[which] else {
        return Err(Stop::new(FaultKind::UnknownInstruction, format!("{} of a constant", inst.name)));
    };
    let element = |lane: usize, j: usize| {
        let bits = if of.ends_with('8') { 8 } else { 16 };
        let word = wave.vreg(first + (j * bits / 32) as u16).0[lane];
        let raw = word >> (j * bits % 32);
        match of {
            "f16" => f16::to_f32(raw as u16),
            "bf16" => bf16::to_f32(raw as u16),
            "fp8" => Format::fp8(arch).decode(raw as u8),
            _ => Format::bf8(arch).decode(raw as u8),
        }
    };
    if arch == Arch::Gfx1100 {
        for register in first..first + 8 {
            let lanes = &wave.vreg(register).0;
            if let Some(lane) = (0..EDGE).find(|&lane| lanes[lane] != lanes[lane + EDGE]) {
                let text = format!("v{register}: lane {} does not repeat lane {lane}", lane + EDGE);
                return Err(Stop::lane(FaultKind::UnknownInstruction, lane + EDGE, text));
            }
        }
        return Ok(std::array::from_fn(|row| std::array::from_fn(|k| element(row, k))));
    }
    Ok(std::array::from_fn(|row| std::array::from_fn(|k| element(row + EDGE * (k / 8), k % 8))))
}
