//! Decoding of arithmetic, comparison, selection, conversion and branches. PTX ISA 9.7.1 to 9.7.9 and 9.7.12.

use super::function::{
    comparison, double_function, prmt_mode, rare, rounding, short_function, word_function,
};
use super::{Decoder, unknown};
use crate::ast::{Operand, RawInst, Ty};
use crate::fault::Fault;
use crate::fp::Round;
use crate::op::{BoolOp, Code, Cvt, Df, Hf, Inst, Rare, Reg, Slow, Wf, Xf};

/// The last qualifier that names a type.
pub(super) fn last_type(raw: &RawInst) -> Result<Ty, Fault> {
    raw.words.iter().rev().find_map(|w| Ty::parse(w)).ok_or_else(|| unknown(raw))
}

impl Decoder<'_> {
    pub(super) fn arith(&mut self, raw: &RawInst) -> Result<Option<Inst>, Fault> {
        let ops = &raw.operands;
        Ok(Some(match raw.words[0].as_str() {
            "add" | "sub" | "mul" | "mad" | "div" | "rem" | "min" | "max" | "abs" | "neg" | "fma" | "and"
            | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "sad" | "mul24" | "rcp" | "sqrt" | "rsqrt"
            | "ex2" | "lg2" | "tanh" | "sin" | "cos" | "copysign" | "addc" | "subc" | "madc" | "dp2a"
            | "dp4a" => self.function(raw)?,
            "popc" | "clz" | "bfind" => {
                let ty = last_type(raw)?;
                let shift = raw.has("shiftamt");
                let f = match (raw.words[0].as_str(), ty.bytes() == 8, ty.is_signed()) {
                    ("popc", false, _) => Code::W { f: Wf::Popc, ftz: false },
                    ("clz", false, _) => Code::W { f: Wf::Clz, ftz: false },
                    ("bfind", false, true) if shift => Code::W { f: Wf::BfindShiftS, ftz: false },
                    ("bfind", false, false) if shift => Code::W { f: Wf::BfindShiftU, ftz: false },
                    (_, true, _) if shift => return Err(unknown(raw)),
                    ("bfind", false, true) => Code::W { f: Wf::BfindS, ftz: false },
                    ("bfind", false, false) => Code::W { f: Wf::BfindU, ftz: false },
                    ("popc", true, _) => Code::X(Xf::PopcD),
                    ("clz", true, _) => Code::X(Xf::ClzD),
                    (_, true, true) => Code::X(Xf::BfindDS),
                    (_, true, false) => Code::X(Xf::BfindDU),
                    _ => return Err(unknown(raw)),
                };
                let mut inst = Inst::new(f);
                inst.dst[0] = self.dst(raw.operand(0)?, Ty::B32)?;
                inst.src[0] = self.src(raw.operand(1)?, ty)?;
                inst
            }
            "testp" => {
                let f = match raw.word(1) {
                    "finite" => Rare::TestFinite,
                    "subnormal" => Rare::TestSubnormal,
                    _ => return Err(unknown(raw)),
                };
                if last_type(raw)? != Ty::F32 {
                    return Err(unknown(raw));
                }
                self.regs(Code::Rare(f), raw, Ty::Pred, &[Ty::F32])?
            }
            "brev" | "bfi" | "bfe" | "prmt" | "lop3" | "shf" => self.bits(raw)?,
            "mov" => self.mov(raw)?,
            "setp" => self.setp(raw)?,
            "set" => {
                let (to, from) = self.two_types(raw)?;
                let cmp = comparison(raw.word(1)).ok_or_else(|| unknown(raw))?;
                if ops.len() != 3 || from.bytes() < 4 {
                    return Err(unknown(raw));
                }
                let code = Code::Set { cmp, ty: from, float: to == Ty::F32, ftz: raw.has("ftz") };
                self.regs(code, raw, to, &[from, from])?
            }
            "selp" => {
                let ty = last_type(raw)?;
                let mut inst = Inst::new(Code::Sel);
                inst.dst[0] = self.dst(raw.operand(0)?, ty)?;
                let (p, negated) = self.pred(raw.operand(3)?)?;
                let (a, b) = if negated { (2, 1) } else { (1, 2) };
                inst.src = [self.src(raw.operand(a)?, ty)?, self.src(raw.operand(b)?, ty)?, p, Reg::NONE];
                inst
            }
            "slct" => {
                let (value, by) = self.two_types(raw)?;
                self.regs(Code::Slct { float: by == Ty::F32 }, raw, value, &[value, value, by])?
            }
            "cvt" => self.cvt(raw)?,
            "bra" => {
                let Some(Operand::Name(label)) = ops.first() else { return Err(unknown(raw)) };
                Inst::new(Code::Bra { target: self.label(label)? })
            }
            "brx" => {
                let Some(Operand::Name(table)) = ops.get(1) else { return Err(unknown(raw)) };
                let table = *self.tables.get(table).ok_or_else(|| unknown(raw))?;
                let mut inst = Inst::new(Code::Brx { table });
                inst.src[0] = self.src(raw.operand(0)?, Ty::U32)?;
                inst
            }
            "ret" | "exit" => Inst::new(Code::Exit),
            "trap" => Inst::new(Code::Trap),
            _ => return Ok(None),
        }))
    }

    /// Destination of type `to`, sources of types `from`, all in order.
    fn regs(&mut self, code: Code, raw: &RawInst, to: Ty, from: &[Ty]) -> Result<Inst, Fault> {
        if raw.operands.len() != from.len() + 1 {
            return Err(unknown(raw));
        }
        let mut inst = Inst::new(code);
        inst.dst[0] = self.dst(raw.operand(0)?, to)?;
        for (i, ty) in from.iter().enumerate() {
            inst.src[i] = self.src(raw.operand(i + 1)?, *ty)?;
        }
        Ok(inst)
    }

    fn two_types(&self, raw: &RawInst) -> Result<(Ty, Ty), Fault> {
        let mut types = raw.words.iter().rev().filter_map(|w| Ty::parse(w));
        let from = types.next().ok_or_else(|| unknown(raw))?;
        let to = types.next().ok_or_else(|| unknown(raw))?;
        Ok((to, from))
    }

    fn function(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let name = raw.words[0].as_str();
        let ty = last_type(raw)?;
        let sources = raw.operands.len().saturating_sub(1);
        if sources == 0 || sources > 3 {
            return Err(unknown(raw));
        }
        if ty == Ty::Pred {
            return self.predicate(raw);
        }
        if let Some(f) = rare(raw, ty) {
            return self.regs(Code::Rare(f), raw, ty, &[ty, ty, ty][..sources]);
        }
        if matches!(ty, Ty::U16x2 | Ty::S16x2) {
            return Err(unknown(raw));
        }
        if raw.words.iter().filter(|w| Ty::parse(w).is_some()).count() > 1 {
            return self.mixed(raw);
        }
        if matches!(name, "addc" | "subc" | "madc") || raw.has("cc") {
            let product = match (name, raw.has("hi"), ty.is_signed()) {
                ("add" | "addc" | "sub" | "subc", ..) => None,
                ("mad" | "madc", true, true) if ty.bytes() == 4 => Some(Wf::MulHiS),
                ("mad" | "madc", true, false) if ty.bytes() == 4 => Some(Wf::MulHiU),
                ("mad" | "madc", false, _) if ty.bytes() == 4 && raw.has("lo") => Some(Wf::Mul),
                _ => return Err(unknown(raw)),
            };
            let code = Code::Carry {
                subtract: name.starts_with("sub"),
                carry_in: name.ends_with('c'),
                carry_out: raw.has("cc"),
                wide: ty.bytes() == 8,
                product,
            };
            return self.regs(code, raw, ty, &[ty, ty, ty][..sources]);
        }
        if raw.has("wide") && ty.bytes() == 4 {
            let f = match (name, ty.is_signed()) {
                ("mul", true) => Xf::MulWideS,
                ("mul", false) => Xf::MulWideU,
                ("mad", true) => Xf::MadWideS,
                ("mad", false) => Xf::MadWideU,
                _ => return Err(unknown(raw)),
            };
            return self.regs(Code::X(f), raw, Ty::B64, &[ty, ty, Ty::B64][..sources]);
        }
        if matches!(name, "shl" | "shr") && ty.bytes() == 8 {
            let f = match (name, ty.is_signed()) {
                ("shl", _) => Xf::ShlD,
                (_, true) => Xf::ShrDS,
                (_, false) => Xf::ShrDU,
            };
            return self.regs(Code::X(f), raw, Ty::B64, &[Ty::B64, Ty::B32]);
        }
        let types = vec![ty; sources];
        match ty {
            Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 => {
                let code = self.half(raw, ty)?;
                self.regs(code, raw, ty, &types)
            }
            // Bitwise operations on 16-bit registers keep the upper half zero by themselves.
            Ty::B16 if matches!(name, "and" | "or" | "xor") => {
                let f = word_function(raw, ty)?;
                self.regs(Code::W { f, ftz: false }, raw, ty, &types)
            }
            Ty::B16 | Ty::U16 | Ty::S16 => {
                let wide = raw.has("wide");
                let f = short_function(raw, wide)?;
                let mut types = types;
                if wide && sources == 3 {
                    types[2] = Ty::B32;
                }
                if matches!(name, "shl" | "shr") {
                    types[1] = Ty::B32;
                }
                let to = if wide { Ty::B32 } else { ty };
                self.regs(Code::Short { f, signed: ty.is_signed() }, raw, to, &types)
            }
            Ty::F32x2 => {
                let f = word_function(raw, Ty::F32)?;
                if !matches!(f, Wf::FAdd | Wf::FSub | Wf::FMul | Wf::FFma) {
                    return Err(unknown(raw));
                }
                let slow = Slow { f, round: rounding(raw), ftz: raw.has("ftz"), sat: false };
                self.regs(Code::Pair32(slow), raw, ty, &types)
            }
            _ if ty.bytes() == 8 => {
                let f = double_function(raw, ty)?;
                self.regs(Code::D(f), raw, ty, &types)
            }
            _ if ty.bytes() == 4 => {
                let f = word_function(raw, ty)?;
                let (round, ftz, sat) = (rounding(raw), raw.has("ftz"), raw.has("sat"));
                let exact = matches!(f, Wf::FDiv | Wf::FRcp | Wf::FSqrt) && raw.has("approx");
                if ty == Ty::F32 && (sat || round != Round::Rn && !exact) {
                    let slow = Slow { f, round, ftz, sat };
                    if !matches!(f, Wf::FAdd | Wf::FSub | Wf::FMul | Wf::FFma) {
                        return Err(unknown(raw));
                    }
                    return self.regs(Code::WSlow(slow), raw, ty, &types);
                }
                if ty != Ty::F32 && sat {
                    return Err(unknown(raw));
                }
                self.regs(Code::W { f, ftz }, raw, ty, &types)
            }
            _ => Err(unknown(raw)),
        }
    }

    /// `fma.rn.f32.bf16` and its like: halves are widened, the sum is a single.
    fn mixed(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let (to, half) = self.two_types(raw)?;
        let f = match raw.words[0].as_str() {
            "fma" => Wf::FFma,
            "add" => Wf::FAdd,
            "sub" => Wf::FSub,
            _ => return Err(unknown(raw)),
        };
        if to != Ty::F32 || !matches!(half, Ty::F16 | Ty::Bf16) {
            return Err(unknown(raw));
        }
        let slow = Slow { f, round: rounding(raw), ftz: false, sat: raw.has("sat") };
        let sources: &[Ty] = if f == Wf::FFma { &[half, half, Ty::F32] } else { &[half, Ty::F32] };
        self.regs(Code::Mixed { slow, bf16: half == Ty::Bf16 }, raw, Ty::F32, sources)
    }

    fn half(&mut self, raw: &RawInst, ty: Ty) -> Result<Code, Fault> {
        let nan = raw.has("NaN");
        let f = match raw.words[0].as_str() {
            "add" => Hf::Add,
            "sub" => Hf::Sub,
            "mul" => Hf::Mul,
            "fma" if raw.has("relu") => Hf::FmaRelu,
            "fma" => Hf::Fma,
            "min" if nan => Hf::MinNan,
            "max" if nan => Hf::MaxNan,
            "min" => Hf::Min,
            "max" => Hf::Max,
            "abs" => Hf::Abs,
            "neg" => Hf::Neg,
            "ex2" => Hf::Ex2,
            "tanh" => Hf::Tanh,
            _ => return Err(unknown(raw)),
        };
        let sat = raw.has("sat");
        if sat && !matches!(f, Hf::Add | Hf::Sub | Hf::Mul | Hf::Fma) || raw.has("xorsign") {
            return Err(unknown(raw));
        }
        let bf16 = matches!(ty, Ty::Bf16 | Ty::Bf16x2);
        Ok(Code::Half { f, bf16, lanes: if ty.bytes() == 4 { 2 } else { 1 }, ftz: raw.has("ftz"), sat })
    }

    fn predicate(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let op = match raw.words[0].as_str() {
            "and" => BoolOp::And,
            "or" => BoolOp::Or,
            "xor" => BoolOp::Xor,
            "not" => BoolOp::Not,
            _ => return Err(unknown(raw)),
        };
        let sources = vec![Ty::Pred; raw.operands.len().saturating_sub(1)];
        self.regs(Code::Pred(op), raw, Ty::Pred, &sources)
    }

    fn bits(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let ty = last_type(raw)?;
        let w = |f| Code::W { f, ftz: false };
        match (raw.words[0].as_str(), ty.bytes()) {
            ("brev", 8) => self.regs(Code::D(Df::Brev), raw, ty, &[ty]),
            ("brev", _) => self.regs(w(Wf::Brev), raw, ty, &[ty]),
            ("bfe", 4) => {
                let f = if ty.is_signed() { Wf::BfeS } else { Wf::BfeU };
                self.regs(w(f), raw, ty, &[ty, Ty::U32, Ty::U32])
            }
            ("bfe", 8) => {
                let f = if ty.is_signed() { Xf::BfeDS } else { Xf::BfeDU };
                self.regs(Code::X(f), raw, ty, &[ty, Ty::U32, Ty::U32])
            }
            ("bfi", 4) => self.regs(w(Wf::Bfi), raw, ty, &[ty, ty, Ty::U32, Ty::U32]),
            ("bfi", 8) => self.regs(Code::X(Xf::BfiD), raw, ty, &[ty, ty, Ty::U32, Ty::U32]),
            ("prmt", _) if let Some(mode) = raw.words.get(2).and_then(|word| prmt_mode(word)) => {
                self.regs(Code::Rare(Rare::Prmt(mode)), raw, ty, &[ty, ty, ty])
            }
            ("prmt", _) if raw.words.len() == 2 => self.regs(w(Wf::Prmt), raw, ty, &[ty, ty, ty]),
            ("lop3", _) if raw.operands.len() == 5 => self.regs(w(Wf::Lop3), raw, ty, &[ty, ty, ty, ty]),
            ("shf", _) => {
                let f = match (raw.has("l"), raw.has("wrap")) {
                    (true, true) => Wf::ShfLWrap,
                    (true, false) => Wf::ShfL,
                    (false, true) => Wf::ShfRWrap,
                    (false, false) => Wf::ShfR,
                };
                self.regs(w(f), raw, ty, &[ty, ty, ty])
            }
            _ => Err(unknown(raw)),
        }
    }

    fn mov(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let ty = last_type(raw)?;
        let [to, from] = raw.operands.as_slice() else { return Err(unknown(raw)) };
        match (to, from) {
            (Operand::Vector(parts), from) => {
                let unit = (ty.bytes() as usize / parts.len()) as u8;
                let mut inst = Inst::new(Code::Unpack { unit });
                let part = part_type(unit).ok_or_else(|| unknown(raw))?;
                let dst = parts.iter().map(|p| self.dst(p, part)).collect::<Result<Vec<_>, _>>()?;
                inst.src[0] = self.src(from, ty)?;
                inst.list = self.list(&dst, &[]);
                Ok(inst)
            }
            (to, Operand::Vector(parts)) => {
                let unit = (ty.bytes() as usize / parts.len()) as u8;
                let mut inst = Inst::new(Code::Pack { unit });
                let part = part_type(unit).ok_or_else(|| unknown(raw))?;
                let src = parts.iter().map(|p| self.src(p, part)).collect::<Result<Vec<_>, _>>()?;
                inst.dst[0] = self.dst(to, ty)?;
                inst.list = self.list(&[], &src);
                Ok(inst)
            }
            (to, Operand::Name(name)) if name.starts_with("%clock") || name.starts_with("%globaltimer") => {
                let mut inst = Inst::new(Code::Clock);
                inst.dst[0] = self.dst(to, ty)?;
                Ok(inst)
            }
            (to, Operand::Address { .. }) => Err(Fault::unsupported(format!("mov from {to:?}"))),
            (to, from) if ty == Ty::Pred => {
                let mut inst = Inst::new(Code::Pred(BoolOp::Mov));
                inst.dst[0] = self.dst(to, ty)?;
                inst.src[0] = self.src(from, ty)?;
                Ok(inst)
            }
            _ => {
                let code =
                    if ty.bytes() == 8 { Code::D(Df::Mov) } else { Code::W { f: Wf::Mov, ftz: false } };
                self.regs(code, raw, ty, &[ty])
            }
        }
    }

    /// `cvt.pack.sat`.
    fn pack_whole(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let (bits, signed, sources) = match raw.words[2..].iter().map(String::as_str).collect::<Vec<_>>()[..]
        {
            ["sat", "s16", "s32"] => (16, true, 2),
            ["sat", "u16", "s32"] => (16, false, 2),
            ["sat", "s8", "s32", "b32"] => (8, true, 3),
            ["sat", "u8", "s32", "b32"] => (8, false, 3),
            _ => return Err(unknown(raw)),
        };
        self.regs(Code::Rare(Rare::Pack { bits, signed }), raw, Ty::B32, &[Ty::B32; 3][..sources])
    }

    fn setp(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let ty = last_type(raw)?;
        let cmp = comparison(raw.word(1)).ok_or_else(|| unknown(raw))?;
        let combine = raw.words[2..].iter().find_map(|w| match w.as_str() {
            "and" => Some(BoolOp::And),
            "or" => Some(BoolOp::Or),
            "xor" => Some(BoolOp::Xor),
            _ => None,
        });
        let code = if matches!(ty, Ty::F16x2 | Ty::Bf16x2) {
            if combine.is_some() {
                return Err(unknown(raw));
            }
            Code::PairSetP { cmp, bf16: ty == Ty::Bf16x2 }
        } else {
            Code::SetP { cmp, ty, combine, ftz: raw.has("ftz") }
        };
        let mut inst = Inst::new(code);
        match raw.operand(0)? {
            Operand::Pair(p, q) => {
                inst.dst[0] = self.dst(p, Ty::Pred)?;
                inst.dst[1] = self.dst(q, Ty::Pred)?;
            }
            p => inst.dst[0] = self.dst(p, Ty::Pred)?,
        }
        inst.src[0] = self.src(raw.operand(1)?, ty)?;
        inst.src[1] = self.src(raw.operand(2)?, ty)?;
        if combine.is_some() {
            let (p, negated) = self.pred(raw.operand(3)?)?;
            if negated {
                return Err(Fault::unsupported("a negated predicate as a source of setp"));
            }
            inst.src[2] = p;
        }
        Ok(inst)
    }

    fn cvt(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let (to, from) = self.two_types(raw)?;
        if raw.word(1) == "pack" {
            return self.pack_whole(raw);
        }
        let integral = raw.words.iter().any(|w| matches!(w.as_str(), "rni" | "rzi" | "rmi" | "rpi"));
        let cvt = Cvt {
            to,
            from,
            round: rounding(raw),
            integral,
            ftz: raw.has("ftz"),
            sat: raw.has("sat"),
            satfinite: raw.has("satfinite"),
            relu: raw.has("relu"),
            packed: raw.operands.len() == 3,
            widen: to.is_signed() && self.width(raw.operand(0)?).is_some_and(|bytes| bytes > to.bytes()),
        };
        let fp8 = |t| matches!(t, Ty::E4m3x2 | Ty::E5m2x2);
        let pair = |t| matches!(t, Ty::F16x2 | Ty::Bf16x2);
        let known = if cvt.packed {
            from == Ty::F32 && (fp8(to) || pair(to) || to == Ty::E2m1x2 && cvt.satfinite)
        } else if to == Ty::E2m1x2 || from == Ty::E2m1x2 {
            false
        } else if fp8(to) || fp8(from) || pair(to) || pair(from) {
            fp8(to) && pair(from) || pair(to) && fp8(from)
        } else {
            raw.operands.len() == 2 && !matches!(from, Ty::Tf32)
        };
        if !known {
            return Err(unknown(raw));
        }
        let mut inst = Inst::new(Code::Cvt(cvt));
        // Integer conversions may use registers wider than their types.
        inst.dst[0] = self.any(raw.operand(0)?, to)?;
        inst.src[0] = self.any(raw.operand(1)?, from)?;
        if cvt.packed {
            inst.src[1] = self.src(raw.operand(2)?, from)?;
        }
        Ok(inst)
    }
}

fn part_type(unit: u8) -> Option<Ty> {
    match unit {
        1 | 2 => Some(Ty::B16),
        4 => Some(Ty::B32),
        8 => Some(Ty::B64),
        _ => None,
    }
}
