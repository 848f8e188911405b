//! Operands as rows: registers, constants, special registers, addresses, lists. PTX ISA 6.

use super::Decoder;
use crate::ast::{Operand, Space, Ty};
use crate::fault::{Fault, FaultKind};
use crate::op::{File, List, Reg, Special};

impl Decoder<'_> {
    fn row(&mut self, file: File) -> Reg {
        let row = self.rows[file as usize];
        self.rows[file as usize] += 1;
        Reg::new(file, row)
    }

    pub(super) fn word_const(&mut self, value: u32) -> Reg {
        if let Some(&reg) = self.word_consts.get(&value) {
            return reg;
        }
        let reg = self.row(File::Word);
        self.word_consts.insert(value, reg);
        reg
    }

    pub(super) fn double_const(&mut self, value: u64) -> Reg {
        if let Some(&reg) = self.double_consts.get(&value) {
            return reg;
        }
        let reg = self.row(File::Double);
        self.double_consts.insert(value, reg);
        reg
    }

    fn special(&mut self, name: &str) -> Option<Reg> {
        let (special, double) = special(name)?;
        Some(self.special_row(special, double))
    }

    fn special_row(&mut self, special: Special, double: bool) -> Reg {
        if let Some(&reg) = self.specials.get(&special) {
            return reg;
        }
        let reg = self.row(if double { File::Double } else { File::Word });
        self.specials.insert(special, reg);
        reg
    }

    /// The address of a shared variable, in which the block's rank in its cluster stands.
    fn shared_address(&mut self, at: u32, wide: bool) -> Reg {
        self.special_row(Special::Shared { at, wide }, wide)
    }

    /// A source operand of type `ty`, as a row of the file that holds such values.
    pub(super) fn src(&mut self, operand: &Operand, ty: Ty) -> Result<Reg, Fault> {
        if let (Ty::Pred, Operand::Int(v)) = (ty, operand) {
            let reg = self.row(File::Pred);
            self.program.const_preds.push((reg, *v != 0));
            return Ok(reg);
        }
        let wide = ty.bytes() == 8;
        let constant = match operand {
            Operand::Name(name) => {
                if let Some((reg, _)) = self.find_register(name) {
                    return self.check_width(reg, ty, name);
                }
                if name == "WARP_SZ" {
                    32
                } else if let Some(reg) = self.special(name) {
                    return self.check_width(reg, ty, name);
                } else if let Some(symbol) = self.symbol(name) {
                    if symbol.space == Space::Shared {
                        return Ok(self.shared_address(symbol.address as u32, wide));
                    }
                    symbol.address
                } else {
                    return Err(Fault::new(FaultKind::Syntax, format!("`{name}` is not declared")));
                }
            }
            Operand::Int(v) => *v,
            Operand::F32(v) if wide => f64::from(f32::from_bits(*v)).to_bits(),
            Operand::F32(v) => u64::from(*v),
            Operand::F64(v) if wide => *v,
            Operand::F64(v) => u64::from((f64::from_bits(*v) as f32).to_bits()),
            Operand::Float(v) if wide => v.to_bits(),
            Operand::Float(v) => u64::from((*v as f32).to_bits()),
            other => return Err(Fault::unsupported(format!("operand {other:?}"))),
        };
        Ok(if wide {
            self.double_const(constant)
        } else {
            let mask = if ty.bytes() == 2 { 0xffff } else { u32::MAX };
            self.word_const(constant as u32 & mask)
        })
    }

    fn check_width(&self, reg: Reg, ty: Ty, name: &str) -> Result<Reg, Fault> {
        let want = match ty.bytes() {
            0 => File::Pred,
            8 | 16 => File::Double,
            _ => File::Word,
        };
        if reg.file() == Some(want) {
            Ok(reg)
        } else {
            Err(Fault::new(FaultKind::Syntax, format!("`{name}` has the wrong width for {ty:?}")))
        }
    }

    /// A destination register of type `ty`; `_` gives a row that is never read.
    pub(super) fn dst(&mut self, operand: &Operand, ty: Ty) -> Result<Reg, Fault> {
        match operand {
            Operand::Name(name) => {
                let found = self.find_register(name);
                let (reg, _) =
                    found.ok_or_else(|| Fault::new(FaultKind::Syntax, format!("`{name}` is no register")))?;
                self.check_width(reg, ty, name)
            }
            Operand::Sink => Ok(self.row(match ty.bytes() {
                0 => File::Pred,
                8 => File::Double,
                _ => File::Word,
            })),
            other => Err(Fault::unsupported(format!("destination {other:?}"))),
        }
    }

    /// Bytes of the type that a register was declared with.
    pub(super) fn width(&self, operand: &Operand) -> Option<u32> {
        match operand {
            Operand::Name(name) => self.find_register(name).map(|(_, ty)| ty.bytes()),
            _ => None,
        }
    }

    /// A register of whatever width it was declared with, or a constant of width `ty`.
    pub(super) fn any(&mut self, operand: &Operand, ty: Ty) -> Result<Reg, Fault> {
        if let Operand::Name(name) = operand {
            if let Some((reg, _)) = self.find_register(name) {
                return Ok(reg);
            }
            if let Some(reg) = self.special(name) {
                return Ok(reg);
            }
        }
        if matches!(operand, Operand::Sink) {
            return Ok(Reg::NONE);
        }
        self.src(operand, ty)
    }

    /// An address operand: base register (either width) and byte offset.
    pub(super) fn address(&mut self, operand: &Operand) -> Result<(Reg, i64), Fault> {
        match operand {
            Operand::Address { base, offset } => match &**base {
                Operand::Name(name) if self.find_register(name).is_none() => {
                    let symbol = self
                        .symbol(name)
                        .ok_or_else(|| Fault::new(FaultKind::Syntax, format!("`{name}` is not declared")))?;
                    let base = match symbol.space {
                        Space::Shared => self.shared_address(symbol.address as u32, true),
                        _ => self.double_const(symbol.address),
                    };
                    Ok((base, *offset))
                }
                Operand::Int(v) => Ok((self.double_const(*v), *offset)),
                other => Ok((self.any(other, Ty::B64)?, *offset)),
            },
            other => Err(Fault::unsupported(format!("address {other:?}"))),
        }
    }

    /// The space of a variable that an address names directly, when it does.
    pub(super) fn named_space(&self, operand: &Operand) -> Option<Space> {
        match operand {
            Operand::Address { base, .. } => match &**base {
                Operand::Name(name) if self.find_register(name).is_none() => {
                    self.symbol(name).map(|s| s.space)
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// Puts a long operand list in the pool.
    pub(super) fn list(&mut self, dst: &[Reg], src: &[Reg]) -> List {
        let start = self.program.pool.len() as u32;
        self.program.pool.extend_from_slice(dst);
        self.program.pool.extend_from_slice(src);
        List { start, dst: dst.len() as u16, src: src.len() as u16 }
    }

    /// Predicate source, perhaps negated: its row and the negation.
    pub(super) fn pred(&mut self, operand: &Operand) -> Result<(Reg, bool), Fault> {
        match operand {
            Operand::Not(inner) => self.pred(inner).map(|(r, n)| (r, !n)),
            other => Ok((self.src(other, Ty::Pred)?, false)),
        }
    }
}

fn special(name: &str) -> Option<(Special, bool)> {
    let axis = |stem: &str| -> Option<u8> {
        let rest = name.strip_prefix(stem)?.strip_prefix('.')?;
        ["x", "y", "z"].iter().position(|a| *a == rest).map(|i| i as u8)
    };
    type Axis = fn(u8) -> Special;
    let axes: [(&str, Axis); 8] = [
        ("%tid", Special::Tid),
        ("%ntid", Special::Ntid),
        ("%ctaid", Special::Ctaid),
        ("%nctaid", Special::Nctaid),
        ("%clusterid", Special::ClusterId),
        ("%nclusterid", Special::NclusterId),
        ("%cluster_ctaid", Special::ClusterCtaid),
        ("%cluster_nctaid", Special::ClusterNctaid),
    ];
    for (stem, make) in axes {
        if let Some(i) = axis(stem) {
            return Some((make(i), false));
        }
    }
    Some(match name {
        "%laneid" => (Special::Laneid, false),
        "%warpid" => (Special::Warpid, false),
        "%nwarpid" => (Special::Nwarpid, false),
        "%smid" => (Special::Smid, false),
        "%nsmid" => (Special::Nsmid, false),
        "%gridid" => (Special::Gridid, true),
        "%lanemask_eq" => (Special::LanemaskEq, false),
        "%lanemask_lt" => (Special::LanemaskLt, false),
        "%lanemask_le" => (Special::LanemaskLe, false),
        "%lanemask_gt" => (Special::LanemaskGt, false),
        "%lanemask_ge" => (Special::LanemaskGe, false),
        "%cluster_ctarank" => (Special::ClusterCtarank, false),
        "%cluster_nctarank" => (Special::ClusterNctarank, false),
        "%dynamic_smem_size" => (Special::DynamicSmemSize, false),
        "%total_smem_size" => (Special::TotalSmemSize, false),
        "%aggr_smem_size" => (Special::AggrSmemSize, false),
        "%reserved_smem_offset_begin" => (Special::Envreg, false),
        "%reserved_smem_offset_end" | "%reserved_smem_offset_cap" => (Special::ReservedSmem, false),
        _ => return None,
    })
}
