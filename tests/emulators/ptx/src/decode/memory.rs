//! Decoding of loads, stores, atomics, address conversion and asynchronous copies. PTX ISA 9.7.9.

use super::arith::last_type;
use super::{Decoder, unknown};
use crate::ast::{Operand, RawInst, Space, Ty};
use crate::fault::Fault;
use crate::op::{Access, Atom, AtomOp, Bulk, Code, Completion, Inst, Mbar, MbarOp, Reg, Route};

pub(super) fn space(raw: &RawInst) -> Space {
    for w in &raw.words {
        match w.as_str() {
            "global" => return Space::Global,
            "shared" | "shared::cta" => return Space::Shared,
            "shared::cluster" => return Space::SharedCluster,
            "local" => return Space::Local,
            "param" | "param::entry" => return Space::Param,
            "const" => return Space::Const,
            _ => {}
        }
    }
    Space::Generic
}

pub(super) fn atom_op(raw: &RawInst) -> Option<AtomOp> {
    raw.words.iter().find_map(|w| {
        Some(match w.as_str() {
            "and" => AtomOp::And,
            "or" => AtomOp::Or,
            "xor" => AtomOp::Xor,
            "exch" => AtomOp::Exch,
            "add" => AtomOp::Add,
            "inc" => AtomOp::Inc,
            "dec" => AtomOp::Dec,
            "min" => AtomOp::Min,
            "max" => AtomOp::Max,
            "cas" => AtomOp::Cas,
            _ => return None,
        })
    })
}

impl Decoder<'_> {
    pub(super) fn memory(&mut self, raw: &RawInst) -> Result<Option<Inst>, Fault> {
        Ok(Some(match raw.words[0].as_str() {
            "ld" | "ldu" => {
                let access = self.access(raw, raw.operand(1)?)?;
                let mut inst = Inst::new(Code::Ld(access));
                inst.src[0] = self.address(raw.operand(1)?)?.0;
                let dst = self.elements(raw.operand(0)?, last_type(raw)?)?;
                inst.list = self.list(&dst, &[]);
                inst
            }
            "st" if raw.word(1) == "async" => self.store_async(raw)?,
            "st" => {
                let access = self.access(raw, raw.operand(0)?)?;
                let mut inst = Inst::new(Code::St(access));
                inst.src[0] = self.address(raw.operand(0)?)?.0;
                let src = self.elements(raw.operand(1)?, last_type(raw)?)?;
                inst.list = self.list(&[], &src);
                inst
            }
            "atom" | "red" => self.atomic(raw)?,
            "cvta" => {
                let wide = last_type(raw)?;
                let to = raw.word(1) == "to";
                let space = space(raw);
                let mut inst = Inst::new(if to { Code::CvtaTo { space } } else { Code::CvtaFrom { space } });
                inst.dst[0] = self.dst(raw.operand(0)?, wide)?;
                inst.src[0] = self.src(raw.operand(1)?, wide)?;
                inst
            }
            "isspacep" => {
                let mut inst = Inst::new(Code::IsSpace { space: space(raw) });
                inst.dst[0] = self.dst(raw.operand(0)?, Ty::Pred)?;
                inst.src[0] = self.any(raw.operand(1)?, Ty::B64)?;
                inst
            }
            "prefetch" | "prefetchu" | "discard" | "applypriority" => Inst::new(Code::Nop),
            // Cache policies steer nothing here; the register must still hold a value.
            "createpolicy" => {
                let mut inst = Inst::new(Code::D(crate::op::Df::Mov));
                inst.dst[0] = self.dst(raw.operand(0)?, Ty::B64)?;
                inst.src[0] = self.double_const(0);
                inst
            }
            "mapa" => {
                let wide = last_type(raw)?;
                let generic = space(raw) == Space::Generic;
                let mut inst = Inst::new(Code::Mapa { generic, space: space(raw) });
                inst.dst[0] = self.dst(raw.operand(0)?, wide)?;
                inst.src[0] = self.src(raw.operand(1)?, wide)?;
                inst.src[1] = self.src(raw.operand(2)?, Ty::U32)?;
                inst
            }
            "getctarank" => {
                let mut inst = Inst::new(Code::GetCtaRank);
                inst.dst[0] = self.dst(raw.operand(0)?, Ty::U32)?;
                inst.src[0] = self.any(raw.operand(1)?, Ty::B64)?;
                inst
            }
            "cp" => self.copy(raw)?,
            "tensormap" => self.tensormap_replace(raw)?,
            _ => return Ok(None),
        }))
    }

    fn access(&mut self, raw: &RawInst, address: &Operand) -> Result<Access, Fault> {
        let ty = last_type(raw)?;
        let count = raw.words.iter().find_map(|w| match w.as_str() {
            "v2" => Some(2),
            "v4" => Some(4),
            "v8" => Some(8),
            _ => None,
        });
        let strong = raw
            .words
            .iter()
            .any(|w| matches!(w.as_str(), "volatile" | "relaxed" | "acquire" | "release" | "mmio"));
        let mut space = space(raw);
        if space == Space::Generic
            && let Some(named) = self.named_space(address)
        {
            space = named;
        }
        Ok(Access {
            space,
            unit: ty.bytes() as u8,
            count: count.unwrap_or(1),
            signed: ty.is_signed(),
            offset: self.address(address)?.1,
            strong,
        })
    }

    /// One register or a vector of them, at their declared widths.
    fn elements(&mut self, operand: &Operand, ty: Ty) -> Result<Vec<Reg>, Fault> {
        let items = match operand {
            Operand::Vector(items) => items.as_slice(),
            single => std::slice::from_ref(single),
        };
        if ty == Ty::B128 {
            let reg = self.any(&items[0], ty)?;
            return Ok(vec![reg, Reg::new(crate::op::File::Double, reg.row() as u32 + 1)]);
        }
        items.iter().map(|o| self.any(o, ty)).collect()
    }

    fn atomic(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let op = atom_op(raw).ok_or_else(|| unknown(raw))?;
        let ty = last_type(raw)?;
        let returns = raw.words[0] == "atom";
        let first = usize::from(returns);
        let (base, offset) = self.address(raw.operand(first)?)?;
        let value = self.elements(raw.operand(first + 1)?, ty)?;
        let (acquire, release) =
            (raw.has("acquire") || raw.has("acq_rel"), raw.has("release") || raw.has("acq_rel"));
        let count = value.len() as u8;
        let mut inst =
            Inst::new(Code::Atom(Atom { op, ty, space: space(raw), offset, count, acquire, release }));
        inst.src[0] = base;
        let mut src = value;
        if op == AtomOp::Cas {
            src.push(self.src(raw.operand(first + 2)?, ty)?);
        }
        let dst = if returns { self.elements(raw.operand(0)?, ty)? } else { Vec::new() };
        if dst.iter().chain(&src).any(|r| !r.is_some() && !returns) {
            return Err(unknown(raw));
        }
        inst.list = self.list(&dst, &src);
        Ok(inst)
    }

    fn copy(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        if raw.words.get(1).is_some_and(|w| w == "reduce") {
            return self.bulk(raw);
        }
        let ops = &raw.operands;
        match raw.words.get(2).map(String::as_str) {
            Some("bulk") => match raw.words.get(3).map(String::as_str) {
                Some("commit_group") => Ok(Inst::new(Code::BulkCommit)),
                Some("wait_group") => {
                    let mut inst = Inst::new(Code::BulkWait { read: raw.has("read") });
                    inst.src[0] = self.src(raw.operand(0)?, Ty::U32)?;
                    Ok(inst)
                }
                _ => self.bulk(raw),
            },
            Some("mbarrier") => {
                let (base, offset) = self.address(raw.operand(0)?)?;
                let op = MbarOp::CpAsyncArrive { no_inc: raw.has("noinc") };
                let mut inst = Inst::new(Code::Mbar(Mbar {
                    op,
                    space: space(raw),
                    offset,
                    relaxed: false,
                    of_cluster: false,
                }));
                inst.src[0] = base;
                Ok(inst)
            }
            Some("commit_group") => Ok(Inst::new(Code::CpAsyncCommit)),
            Some("wait_all") => {
                let mut inst = Inst::new(Code::CpAsyncWait { all: true });
                inst.src[0] = self.word_const(0);
                Ok(inst)
            }
            Some("wait_group") => {
                let mut inst = Inst::new(Code::CpAsyncWait { all: false });
                inst.src[0] = self.src(raw.operand(0)?, Ty::U32)?;
                Ok(inst)
            }
            Some("ca" | "cg") => {
                let (dst, dst_offset) = self.address(raw.operand(0)?)?;
                let (src, src_offset) = self.address(raw.operand(1)?)?;
                let &Operand::Int(bytes) = raw.operand(2)? else { return Err(unknown(raw)) };
                if !matches!(bytes, 4 | 8 | 16) {
                    return Err(Fault::unsupported(format!("cp.async of {bytes} bytes")));
                }
                let mut inst = Inst::new(Code::CpAsync { bytes: bytes as u8, dst_offset, src_offset });
                let hint = usize::from(raw.has("L2::cache_hint"));
                inst.src = [dst, src, Reg::NONE, Reg::NONE];
                if ops.len() - hint > 3 {
                    inst.src[2] = self.any(raw.operand(3)?, Ty::U32)?;
                }
                Ok(inst)
            }
            _ => Err(unknown(raw)),
        }
    }

    /// Sources in the list: destination, source or map, barrier, size, mask, coordinates; absent ones are `NONE`.
    fn bulk(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        if ["im2col", "im2col_no_offs", "im2col::w", "tile::scatter4", "cp_mask", "ignore_oob"]
            .iter()
            .any(|w| raw.has(w))
        {
            return Err(unknown(raw));
        }
        let dims = raw.words.iter().find_map(|w| match w.as_str() {
            "1d" => Some(1),
            "2d" => Some(2),
            "3d" => Some(3),
            "4d" => Some(4),
            "5d" => Some(5),
            _ => None,
        });
        let tensor = raw.has("tensor");
        if tensor != dims.is_some() {
            return Err(unknown(raw));
        }
        let spaces: Vec<&str> = raw
            .words
            .iter()
            .map(String::as_str)
            .filter(|w| matches!(*w, "global" | "shared::cta" | "shared::cluster"))
            .collect();
        let route = match spaces.as_slice() {
            ["global"] if raw.has("prefetch") => Route::Prefetch,
            ["shared::cta" | "shared::cluster", "global"] => Route::GlobalToShared,
            ["global", "shared::cta"] => Route::SharedToGlobal,
            ["shared::cluster", "shared::cta"] => Route::SharedToCluster,
            _ => return Err(unknown(raw)),
        };
        let bar_group = raw.has("bulk_group");
        let reduce = if raw.word(1) == "reduce" {
            let ty = if tensor { Ty::B32 } else { last_type(raw)? };
            Some((atom_op(raw).ok_or_else(|| unknown(raw))?, ty))
        } else {
            None
        };
        let mut ops = raw.operands.iter();
        let mut next = || ops.next().ok_or_else(|| unknown(raw));
        let none = (Reg::NONE, 0);
        let (mut dst, src, mut bar);
        (dst, bar) = (none, none);
        let (mut size, mut mask) = (Reg::NONE, Reg::NONE);
        let mut coords = Vec::new();
        if tensor {
            if route == Route::GlobalToShared {
                dst = self.address(next()?)?;
            }
            let Operand::Tensor { base, rest } = next()? else { return Err(unknown(raw)) };
            let map = self.any(base, Ty::B64)?;
            let Some(Operand::Vector(items)) = rest.first() else { return Err(unknown(raw)) };
            let four_rows = raw.has("tile::gather4");
            let loads = matches!(route, Route::GlobalToShared | Route::Prefetch);
            if four_rows && !(dims == Some(2) && loads) {
                return Err(unknown(raw));
            }
            if Some(items.len()) != if four_rows { Some(5) } else { dims } {
                return Err(Fault::unsupported(format!(
                    "`{}` with {} coordinates",
                    raw.opcode(),
                    items.len()
                )));
            }
            for item in items {
                coords.push(self.src(item, Ty::S32)?);
            }
            if route == Route::SharedToGlobal {
                dst = (map, 0);
                src = self.address(next()?)?;
            } else {
                src = (map, 0);
            }
        } else {
            if route != Route::Prefetch {
                dst = self.address(next()?)?;
            }
            src = self.address(next()?)?;
            size = self.src(next()?, Ty::U32)?;
        }
        if !bar_group && route != Route::Prefetch {
            bar = self.address(next()?)?;
        }
        if raw.has("multicast::cluster") {
            mask = self.src(next()?, Ty::B16)?;
        }
        let bulk = Bulk {
            route,
            dims: dims.unwrap_or(0) as u8,
            four_rows: raw.has("tile::gather4"),
            multicast: raw.has("multicast::cluster"),
            reduce,
            completion: if bar_group { Completion::BulkGroup } else { Completion::Mbarrier },
            pair: raw.has("cta_group::2"),
            own: spaces[0] == "shared::cta" && !raw.has("cta_group::2"),
            dst_offset: dst.1,
            src_offset: src.1,
            bar_offset: bar.1,
        };
        let mut inst = Inst::new(Code::Bulk(bulk));
        let mut list = vec![dst.0, src.0, bar.0, size, mask];
        list.extend(coords);
        inst.list = self.list(&[], &list);
        Ok(inst)
    }

    /// `st.async`: a list as a bulk copy's, with the words that are stored in the place of coordinates.
    fn store_async(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let ty = last_type(raw)?;
        let counts = raw.has("mbarrier::complete_tx::bytes") && raw.has("shared::cluster");
        if !counts || !matches!(ty, Ty::B32 | Ty::U32 | Ty::S32 | Ty::F32) {
            return Err(unknown(raw));
        }
        let (dst, bar) = (self.address(raw.operand(0)?)?, self.address(raw.operand(2)?)?);
        let words = self.elements(raw.operand(1)?, ty)?;
        let bulk = Bulk {
            route: Route::RegistersToCluster,
            dims: 0,
            four_rows: false,
            multicast: false,
            reduce: None,
            completion: Completion::Mbarrier,
            pair: false,
            own: false,
            dst_offset: dst.1,
            src_offset: 0,
            bar_offset: bar.1,
        };
        let mut inst = Inst::new(Code::Bulk(bulk));
        let mut list = vec![dst.0, Reg::NONE, bar.0, Reg::NONE, Reg::NONE];
        list.extend(words);
        inst.list = self.list(&[], &list);
        Ok(inst)
    }

    fn tensormap_replace(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let fields = [
            "global_address",
            "rank",
            "box_dim",
            "global_dim",
            "global_stride",
            "element_stride",
            "elemtype",
            "interleave_layout",
            "swizzle_mode",
            "fill_mode",
        ];
        let field = fields.iter().position(|f| raw.has(f)).ok_or_else(|| unknown(raw))?;
        let (base, offset) = self.address(raw.operand(0)?)?;
        let dimensioned = raw.operands.len() == 3;
        let dim = match raw.operands.get(1) {
            Some(Operand::Int(v)) if dimensioned => *v as u8,
            _ => 0,
        };
        let value = raw.operands.last().ok_or_else(|| unknown(raw))?;
        let wide = raw.words.last().is_some_and(|w| w == "b64");
        let mut inst = Inst::new(Code::TensorMapReplace { field: field as u8, dim, wide, offset });
        inst.src[0] = base;
        inst.src[1] = self.src(value, if wide { Ty::B64 } else { Ty::B32 })?;
        Ok(inst)
    }
}
