//! Decoding of matrix instructions: `ldmatrix`, `stmatrix`, `mma`, `wgmma`, `tcgen05`. PTX ISA 9.7.14 to 9.7.16.

use super::{Decoder, unknown};
use crate::ast::{Operand, RawInst, Ty};
use crate::fault::Fault;
use crate::op::{Code, CpShape, Elem, Inst, Mma, MmaKind, Reg, ScaledKind, Tcgen, TmemShape, Wgmma};

fn elem(word: &str) -> Option<Elem> {
    Some(match word {
        "f16" => Elem::F16,
        "bf16" => Elem::Bf16,
        "tf32" => Elem::Tf32,
        "e4m3" => Elem::E4m3,
        "e5m2" => Elem::E5m2,
        "s8" => Elem::S8,
        "u8" => Elem::U8,
        "f32" => Elem::F32,
        "s32" => Elem::S32,
        "e2m3" => Elem::E2m3,
        "e3m2" => Elem::E3m2,
        "e2m1" => Elem::E2m1,
        _ => return None,
    })
}

/// `m64n128k16` as its three numbers.
fn shape(raw: &RawInst) -> Option<[u16; 3]> {
    raw.words.iter().find_map(|w| {
        let (m, rest) = w.strip_prefix('m')?.split_once('n')?;
        let (n, k) = rest.split_once('k')?;
        Some([m.parse().ok()?, n.parse().ok()?, k.parse().ok()?])
    })
}

impl Decoder<'_> {
    pub(super) fn matrix(&mut self, raw: &RawInst) -> Result<Option<Inst>, Fault> {
        Ok(Some(match raw.words[0].as_str() {
            "ldmatrix" | "stmatrix" => self.move_matrix(raw)?,
            "movmatrix" => {
                let mut inst = Inst::new(Code::MovMatrix);
                inst.dst[0] = self.dst(raw.operand(0)?, Ty::B32)?;
                inst.src[0] = self.src(raw.operand(1)?, Ty::B32)?;
                inst
            }
            "mma" => self.mma(raw)?,
            "wgmma" => match raw.words.get(1).map(String::as_str) {
                Some("fence") => Inst::new(Code::WgmmaFence),
                Some("commit_group") => Inst::new(Code::WgmmaCommit),
                Some("wait_group") => {
                    let mut inst = Inst::new(Code::WgmmaWait);
                    inst.src[0] = self.src(raw.operand(0)?, Ty::U32)?;
                    inst
                }
                Some("mma_async") => self.wgmma(raw)?,
                _ => return Err(unknown(raw)),
            },
            "tcgen05" => self.tcgen05(raw)?,
            _ => return Ok(None),
        }))
    }

    fn words(&mut self, operand: &Operand, dst: bool) -> Result<Vec<Reg>, Fault> {
        let items = match operand {
            Operand::Vector(items) => items.as_slice(),
            single => std::slice::from_ref(single),
        };
        items.iter().map(|o| if dst { self.dst(o, Ty::B32) } else { self.src(o, Ty::B32) }).collect()
    }

    fn move_matrix(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let load = raw.words[0] == "ldmatrix";
        let num = match (raw.has("x1"), raw.has("x2"), raw.has("x4")) {
            (true, ..) => 1,
            (_, true, _) => 2,
            (.., true) => 4,
            _ => return Err(unknown(raw)),
        };
        if !raw.has("m8n8") || !raw.has("b16") {
            return Err(unknown(raw));
        }
        let (regs, address) = if load { (0, 1) } else { (1, 0) };
        let (base, offset) = self.address(raw.operand(address)?)?;
        let trans = raw.has("trans");
        let list = self.words(raw.operand(regs)?, load)?;
        if list.len() != num {
            return Err(unknown(raw));
        }
        let num = num as u8;
        let mut inst = Inst::new(if load {
            Code::LdMatrix { num, trans, offset }
        } else {
            Code::StMatrix { num, trans, offset }
        });
        inst.src[0] = base;
        inst.list = if load { self.list(&list, &[]) } else { self.list(&[], &list) };
        Ok(inst)
    }

    fn mma(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let [16, n @ 8, k] = shape(raw).ok_or_else(|| unknown(raw))? else { return Err(unknown(raw)) };
        let types: Vec<Elem> = raw.words.iter().filter_map(|w| elem(w)).collect();
        let &[d, a, b, c] = types.as_slice() else { return Err(unknown(raw)) };
        let bits = match a {
            Elem::F16 | Elem::Bf16 => 16,
            Elem::Tf32 => 32,
            Elem::E4m3 | Elem::E5m2 | Elem::S8 | Elem::U8 => 8,
            _ => return Err(unknown(raw)),
        };
        // A row of A is at least 128 and at most 256 bits.
        let allowed = matches!(u32::from(k) * bits, 128 | 256);
        if !allowed || raw.has("block_scale") || raw.has("satfinite") || raw.has("sp") || !raw.has("row") {
            return Err(unknown(raw));
        }
        let mma = Mma { n: n as u8, k: k as u8, a, b, d, c };
        let mut src = Vec::new();
        let dst = self.words(raw.operand(0)?, true)?;
        for operand in raw.operands.get(1..4).ok_or_else(|| unknown(raw))? {
            src.extend(self.words(operand, false)?);
        }
        let a_regs = usize::from(k) * bits as usize / 64;
        let acc = |e: Elem| if e == Elem::F16 { 2 } else { 4 };
        if dst.len() != acc(d) || src.len() != a_regs + a_regs / 2 + acc(c) {
            return Err(unknown(raw));
        }
        let mut inst = Inst::new(Code::Mma(mma));
        inst.list = self.list(&dst, &src);
        Ok(inst)
    }

    fn wgmma(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let [64, n, k] = shape(raw).ok_or_else(|| unknown(raw))? else { return Err(unknown(raw)) };
        let types: Vec<Elem> = raw.words.iter().filter_map(|w| elem(w)).collect();
        let &[d, a, b] = types.as_slice() else { return Err(unknown(raw)) };
        if raw.has("sp") || n % 8 != 0 || n > 256 || n == 0 {
            return Err(unknown(raw));
        }
        let bytes = match a {
            Elem::F16 | Elem::Bf16 => 2,
            Elem::Tf32 => 4,
            Elem::E4m3 | Elem::E5m2 | Elem::S8 | Elem::U8 => 1,
            _ => return Err(unknown(raw)),
        };
        if k * bytes != 32 {
            return Err(unknown(raw));
        }
        let ops = &raw.operands;
        let dst = self.words(raw.operand(0)?, true)?;
        let per_reg = if d == Elem::F16 { 2 } else { 1 };
        if dst.len() != usize::from(n) / 2 / per_reg {
            return Err(Fault::unsupported(format!("`{}` with {} accumulators", raw.opcode(), dst.len())));
        }
        let a_regs = matches!(raw.operand(1)?, Operand::Vector(_));
        let mut src = dst.clone();
        if a_regs {
            let regs = self.words(raw.operand(1)?, false)?;
            if regs.len() != 4 {
                return Err(unknown(raw));
            }
            src.extend(regs);
        }
        let mut inst = Inst::new(Code::Nop);
        if !a_regs {
            inst.src[0] = self.src(raw.operand(1)?, Ty::B64)?;
        }
        inst.src[1] = self.src(raw.operand(2)?, Ty::B64)?;
        let mut scale_d = None;
        match raw.operand(3)? {
            Operand::Int(v) => scale_d = Some(*v != 0),
            other => (inst.src[2], inst.src_not) = self.pred(other)?,
        }
        let immediate = |i: usize| match ops.get(i) {
            None => Ok(None),
            Some(Operand::Int(v)) => Ok(Some(*v as i64)),
            Some(_) => Err(unknown(raw)),
        };
        let (neg_a, neg_b) = (immediate(4)?.unwrap_or(1) == -1, immediate(5)?.unwrap_or(1) == -1);
        let (trans_a, trans_b) = if a_regs { (None, immediate(6)?) } else { (immediate(6)?, immediate(7)?) };
        let (trans_a, trans_b) = (trans_a == Some(1), trans_b == Some(1));
        if (trans_a || trans_b) && bytes != 2 {
            return Err(unknown(raw));
        }
        inst.code =
            Code::Wgmma(Wgmma { n, k: k as u8, a, b, d, a_regs, neg_a, neg_b, trans_a, trans_b, scale_d });
        inst.list = self.list(&dst, &src);
        Ok(inst)
    }

    /// A tensor-memory address: base row and, as a constant row, its offset.
    fn tmem(&mut self, inst: &mut Inst, operand: &Operand) -> Result<(), Fault> {
        let (base, offset) = match operand {
            Operand::Address { .. } => self.address(operand)?,
            plain => (self.src(plain, Ty::B32)?, 0),
        };
        inst.src[0] = base;
        inst.src[3] = self.word_const(offset as u32);
        Ok(())
    }

    fn tcgen05(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let ops = &raw.operands;
        let pair = raw.has("cta_group::2");
        let new = |op| Inst::new(Code::Tcgen { op, pair });
        let repeat = raw
            .words
            .iter()
            .find_map(|w| w.strip_prefix('x').and_then(|n| n.parse::<u16>().ok()))
            .unwrap_or(1);
        let shape = raw.words.iter().find_map(|w| {
            Some(match w.as_str() {
                "32x32b" => TmemShape::L32x32b,
                "16x64b" => TmemShape::L16x64b,
                "16x128b" => TmemShape::L16x128b,
                "16x256b" => TmemShape::L16x256b,
                "16x32bx2" => TmemShape::L16x32bx2,
                _ => return None,
            })
        });
        Ok(match raw.word(1) {
            "alloc" => {
                let mut inst = new(Tcgen::Alloc);
                let (base, offset) = self.address(raw.operand(0)?)?;
                inst.src[0] = base;
                inst.src[1] = self.src(raw.operand(1)?, Ty::U32)?;
                inst.src[3] = self.word_const(offset as u32);
                inst
            }
            "dealloc" => {
                let mut inst = new(Tcgen::Dealloc);
                self.tmem(&mut inst, raw.operand(0)?)?;
                inst.src[1] = self.src(raw.operand(1)?, Ty::U32)?;
                inst
            }
            "relinquish_alloc_permit" => new(Tcgen::Relinquish),
            "ld" => {
                let shape = shape.ok_or_else(|| unknown(raw))?;
                let mut inst = new(Tcgen::Ld { shape, repeat, pack16: raw.has("pack::16b") });
                // A reduction over the columns, whose result is an operand of its own.
                let address = if raw.has("red") {
                    let maximum = raw.has("max") && raw.has("f32") && shape == TmemShape::L32x32b;
                    if !maximum || raw.has("abs") || raw.has("NaN") {
                        return Err(unknown(raw));
                    }
                    inst.dst[0] = self.dst(raw.operand(1)?, Ty::F32)?;
                    2
                } else {
                    1
                };
                self.tmem(&mut inst, raw.operand(address)?)?;
                let dst = self.words(raw.operand(0)?, true)?;
                inst.list = self.list(&dst, &[]);
                if let Some(split) = ops.get(address + 1) {
                    inst.src[1] = self.src(split, Ty::B32)?;
                }
                inst
            }
            "st" => {
                let shape = shape.ok_or_else(|| unknown(raw))?;
                let mut inst = new(Tcgen::St { shape, repeat, pack16: raw.has("unpack::16b") });
                self.tmem(&mut inst, raw.operand(0)?)?;
                let last = ops.len() - 1;
                if last == 2 {
                    inst.src[1] = self.src(raw.operand(1)?, Ty::B32)?;
                }
                let src = self.words(raw.operand(last)?, false)?;
                inst.list = self.list(&[], &src);
                inst
            }
            "wait::ld" => new(Tcgen::WaitLd),
            "wait::st" => new(Tcgen::WaitSt),
            "fence::before_thread_sync" => new(Tcgen::FenceBefore),
            "fence::after_thread_sync" => new(Tcgen::FenceAfter),
            "commit" => {
                let multicast = raw.has("multicast::cluster");
                let mut inst = new(Tcgen::Commit { multicast });
                let (base, offset) = self.address(raw.operand(0)?)?;
                inst.src[0] = base;
                inst.src[3] = self.word_const(offset as u32);
                if multicast {
                    inst.src[1] = self.src(raw.operand(1)?, Ty::B16)?;
                }
                inst
            }
            "cp" => {
                let shape = match () {
                    () if raw.has("128x256b") => CpShape::L128x256b,
                    () if raw.has("4x256b") => CpShape::L4x256b,
                    () if raw.has("128x128b") => CpShape::L128x128b,
                    () if raw.has("64x128b") && raw.has("warpx2::02_13") => CpShape::L64x128bWarpx2First,
                    () if raw.has("64x128b") && raw.has("warpx2::01_23") => CpShape::L64x128bWarpx2Second,
                    () if raw.has("32x128b") => CpShape::L32x128bWarpx4,
                    () => return Err(unknown(raw)),
                };
                if raw.words.iter().any(|w| w.starts_with("b8x16")) {
                    return Err(unknown(raw));
                }
                let mut inst = new(Tcgen::Cp { shape });
                self.tmem(&mut inst, raw.operand(0)?)?;
                inst.src[1] = self.src(raw.operand(1)?, Ty::B64)?;
                inst
            }
            "shift" => {
                let [at @ Operand::Address { .. }] = ops.as_slice() else { return Err(unknown(raw)) };
                if !raw.has("down") || !(pair || raw.has("cta_group::1")) {
                    return Err(unknown(raw));
                }
                let mut inst = new(Tcgen::Shift);
                self.tmem(&mut inst, at)?;
                inst
            }
            "mma" => self.tcgen05_mma(raw, pair)?,
            _ => return Err(unknown(raw)),
        })
    }

    /// Sources in the list: B descriptor, instruction descriptor, what is added to A's address in tensor memory; then
    /// lane masks (four or eight, or none), or of a block-scaled product the addresses of both operands' factors, each
    /// with what is added to it.
    fn tcgen05_mma(&mut self, raw: &RawInst, pair: bool) -> Result<Inst, Fault> {
        let ops = &raw.operands;
        let kind = match () {
            () if raw.has("kind::f16") => MmaKind::F16,
            () if raw.has("kind::tf32") => MmaKind::Tf32,
            () if raw.has("kind::f8f6f4") => MmaKind::F8f6f4,
            () => MmaKind::Scaled(scaled_kind(raw).ok_or_else(|| unknown(raw))?),
        };
        let scaled = matches!(kind, MmaKind::Scaled(_));
        let (a_tmem, shift) = (matches!(raw.operand(1)?, Operand::Address { .. }), raw.has("ashift"));
        let keeps_a = raw.has("collector::a::fill") || raw.has("collector::a::use");
        if raw.has("sp") || raw.has("ws") || raw.has("block_scale") != scaled || shift && (!a_tmem || keeps_a)
        {
            return Err(unknown(raw));
        }
        if scaled && shift {
            return Err(unknown(raw));
        }
        let mut inst = Inst::new(Code::Tcgen { op: Tcgen::Mma { a_tmem, kind, shift }, pair });
        self.tmem(&mut inst, raw.operand(0)?)?;
        let a_offset;
        (inst.src[1], a_offset) =
            if a_tmem { self.address(raw.operand(1)?)? } else { (self.src(raw.operand(1)?, Ty::B64)?, 0) };
        let mut list = vec![self.src(raw.operand(2)?, Ty::B64)?, self.src(raw.operand(3)?, Ty::B32)?];
        list.push(self.word_const(a_offset as u32));
        let mut at = 4;
        if scaled {
            for _ in 0..2 {
                let (base, offset) = self.address(raw.operand(at)?)?;
                list.extend([base, self.word_const(offset as u32)]);
                at += 1;
            }
        } else if let Some(Operand::Vector(masks)) = ops.get(4) {
            for m in masks {
                list.push(self.src(m, Ty::B32)?);
            }
            at = 5;
        }
        match ops.get(at) {
            Some(Operand::Int(v)) => inst.src_not = *v != 0,
            Some(p) => (inst.src[2], inst.src_not) = self.pred(p)?,
            None => return Err(unknown(raw)),
        }
        if ops.len() > at + 1 {
            return Err(unknown(raw));
        }
        inst.list = self.list(&[], &list);
        Ok(inst)
    }
}

/// The kind of a block-scaled product, with the factors of a row that its qualifiers name.
fn scaled_kind(raw: &RawInst) -> Option<ScaledKind> {
    let one = raw.has("scale_vec::1X");
    let two = raw.has("scale_vec::2X") || raw.has("block32");
    let four = raw.has("scale_vec::4X") || raw.has("block16");
    match () {
        () if raw.has("kind::mxf8f6f4") => {
            (!four && !raw.has("scale_vec::2X")).then_some(ScaledKind::Mxf8f6f4)
        }
        () if raw.has("kind::mxf4") => (!one && !four).then_some(ScaledKind::Mxf4),
        () if raw.has("kind::mxf4nvf4") && !one && two != four => {
            Some(ScaledKind::Mxf4nvf4 { per_row: if four { 4 } else { 2 } })
        }
        () => None,
    }
}
