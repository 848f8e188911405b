//! Which function an arithmetic instruction names.

use super::unknown;
use crate::ast::{RawInst, Ty};
use crate::fault::Fault;
use crate::fp::Round;
use crate::op::{Cmp, Df, Prmt, Rare, Sf, Wf};

pub(super) fn rounding(raw: &RawInst) -> Round {
    for w in &raw.words {
        match w.as_str() {
            "rn" | "rni" => return Round::Rn,
            "rz" | "rzi" => return Round::Rz,
            "rm" | "rmi" => return Round::Rm,
            "rp" | "rpi" => return Round::Rp,
            "rna" => return Round::Rna,
            _ => {}
        }
    }
    Round::Rn
}

pub(super) fn prmt_mode(word: &str) -> Option<Prmt> {
    Some(match word {
        "f4e" => Prmt::Forward,
        "b4e" => Prmt::Backward,
        "rc8" => Prmt::Replicate8,
        "ecl" => Prmt::ClampLeft,
        "ecr" => Prmt::ClampRight,
        "rc16" => Prmt::Replicate16,
        _ => return None,
    })
}

/// The forms of common instructions that [`Rare`] has.
pub(super) fn rare(raw: &RawInst, ty: Ty) -> Option<Rare> {
    let signed = ty.is_signed();
    Some(match (raw.words[0].as_str(), ty) {
        ("add", Ty::S32) if raw.has("sat") => Rare::AddSat,
        ("sub", Ty::S32) if raw.has("sat") => Rare::SubSat,
        ("min", Ty::S32) if raw.has("relu") => Rare::MinRelu,
        ("max", Ty::S32) if raw.has("relu") => Rare::MaxRelu,
        ("mul24", Ty::S32) if raw.has("hi") => Rare::Mul24HiS,
        ("mul24", Ty::U32) if raw.has("hi") => Rare::Mul24HiU,
        ("add", Ty::S16x2 | Ty::U16x2) => Rare::PairAdd,
        ("min", Ty::S16x2 | Ty::U16x2) if !raw.has("relu") => Rare::PairMin { signed: ty == Ty::S16x2 },
        ("max", Ty::S16x2 | Ty::U16x2) if !raw.has("relu") => Rare::PairMax { signed: ty == Ty::S16x2 },
        ("min", Ty::F32) if raw.words[1..] == ["xorsign", "abs", "f32"] => Rare::SignMin,
        ("max", Ty::F32) if raw.words[1..] == ["xorsign", "abs", "f32"] => Rare::SignMax,
        ("dp4a", _) => Rare::Dot { halves: false, high: false, signed: [raw.word(1) == "s32", signed] },
        ("dp2a", _) => {
            let high = raw.word(1) == "hi";
            Rare::Dot { halves: true, high, signed: [raw.word(2) == "s32", signed] }
        }
        _ => return None,
    })
}

pub(super) fn comparison(word: &str) -> Option<Cmp> {
    Some(match word {
        "eq" => Cmp::Eq,
        "ne" => Cmp::Ne,
        "lt" | "lo" => Cmp::Lt,
        "le" | "ls" => Cmp::Le,
        "gt" | "hi" => Cmp::Gt,
        "ge" | "hs" => Cmp::Ge,
        "equ" => Cmp::Equ,
        "neu" => Cmp::Neu,
        "ltu" => Cmp::Ltu,
        "leu" => Cmp::Leu,
        "gtu" => Cmp::Gtu,
        "geu" => Cmp::Geu,
        "num" => Cmp::Num,
        "nan" => Cmp::Nan,
        _ => return None,
    })
}

pub(super) fn word_function(raw: &RawInst, ty: Ty) -> Result<Wf, Fault> {
    let (float, signed, nan) = (ty == Ty::F32, ty.is_signed(), raw.has("NaN"));
    let (hi, three) = (raw.has("hi"), raw.operands.len() == 4);
    Ok(match (raw.words[0].as_str(), float) {
        ("add", true) => Wf::FAdd,
        ("sub", true) => Wf::FSub,
        ("mul", true) => Wf::FMul,
        ("fma" | "mad", true) => Wf::FFma,
        ("div", true) => Wf::FDiv,
        ("min" | "max", true) if raw.has("xorsign") => return Err(unknown(raw)),
        ("min", true) if three && !nan => Wf::FMin3,
        ("max", true) if three => {
            if nan {
                Wf::FMax3Nan
            } else {
                Wf::FMax3
            }
        }
        ("min" | "max", true) if three => return Err(unknown(raw)),
        ("min", true) if nan => Wf::FMinNan,
        ("max", true) if nan => Wf::FMaxNan,
        ("min", true) => Wf::FMin,
        ("max", true) => Wf::FMax,
        ("abs", true) => Wf::FAbs,
        ("neg", true) => Wf::FNeg,
        ("rcp", true) => Wf::FRcp,
        ("sqrt", true) => Wf::FSqrt,
        ("rsqrt", true) => Wf::FRsqrt,
        ("ex2", true) => Wf::FEx2,
        ("lg2", true) => Wf::FLg2,
        ("tanh", true) => Wf::FTanh,
        ("sin", true) => Wf::FSin,
        ("cos", true) => Wf::FCos,
        ("copysign", true) => Wf::FCopysign,
        ("add", false) => Wf::Add,
        ("sub", false) => Wf::Sub,
        ("mul", false) if hi && signed => Wf::MulHiS,
        ("mul", false) if hi => Wf::MulHiU,
        ("mul", false) if raw.has("lo") => Wf::Mul,
        ("mul24", false) if raw.has("lo") => {
            if signed {
                Wf::Mul24S
            } else {
                Wf::Mul24U
            }
        }
        ("mad", false) if hi && signed => Wf::MadHiS,
        ("mad", false) if hi => Wf::MadHiU,
        ("mad", false) if raw.has("lo") => Wf::Mad,
        ("sad", false) => {
            if signed {
                Wf::SadS
            } else {
                Wf::SadU
            }
        }
        ("div", false) => {
            if signed {
                Wf::DivS
            } else {
                Wf::DivU
            }
        }
        ("rem", false) => {
            if signed {
                Wf::RemS
            } else {
                Wf::RemU
            }
        }
        ("min", false) if !raw.has("relu") => {
            if signed {
                Wf::MinS
            } else {
                Wf::MinU
            }
        }
        ("max", false) if !raw.has("relu") => {
            if signed {
                Wf::MaxS
            } else {
                Wf::MaxU
            }
        }
        ("abs", false) => Wf::AbsS,
        ("neg", false) => Wf::Neg,
        ("and", false) => Wf::And,
        ("or", false) => Wf::Or,
        ("xor", false) => Wf::Xor,
        ("not", false) => Wf::Not,
        ("cnot", false) => Wf::Cnot,
        ("shl", false) => Wf::Shl,
        ("shr", false) => {
            if signed {
                Wf::ShrS
            } else {
                Wf::ShrU
            }
        }
        _ => return Err(unknown(raw)),
    })
}

pub(super) fn double_function(raw: &RawInst, ty: Ty) -> Result<Df, Fault> {
    let signed = ty.is_signed();
    let name = raw.words[0].as_str();
    if ty == Ty::F64 {
        if rounding(raw) != Round::Rn {
            return Err(unknown(raw));
        }
        return Ok(match name {
            "add" => Df::FAdd,
            "sub" => Df::FSub,
            "mul" => Df::FMul,
            "fma" | "mad" => Df::FFma,
            "div" => Df::FDiv,
            "rcp" => Df::FRcp,
            "sqrt" => Df::FSqrt,
            "min" => Df::FMin,
            "max" => Df::FMax,
            "abs" => Df::FAbs,
            "neg" => Df::FNeg,
            _ => return Err(unknown(raw)),
        });
    }
    Ok(match (name, signed) {
        ("add", _) => Df::Add,
        ("sub", _) => Df::Sub,
        ("mul", true) if raw.has("hi") => Df::MulHiS,
        ("mul", false) if raw.has("hi") => Df::MulHiU,
        ("mul", _) => Df::Mul,
        ("mad", _) if raw.has("lo") => Df::Mad,
        ("div", true) => Df::DivS,
        ("div", false) => Df::DivU,
        ("rem", true) => Df::RemS,
        ("rem", false) => Df::RemU,
        ("abs", _) => Df::AbsS,
        ("neg", _) => Df::Neg,
        ("min", true) => Df::MinS,
        ("min", false) => Df::MinU,
        ("max", true) => Df::MaxS,
        ("max", false) => Df::MaxU,
        ("and", _) => Df::And,
        ("or", _) => Df::Or,
        ("xor", _) => Df::Xor,
        ("not", _) => Df::Not,
        _ => return Err(unknown(raw)),
    })
}

pub(super) fn short_function(raw: &RawInst, wide: bool) -> Result<Sf, Fault> {
    Ok(match raw.words[0].as_str() {
        "add" => Sf::Add,
        "sub" => Sf::Sub,
        "mul" if wide => Sf::MulWide,
        "mul" if raw.has("hi") => Sf::MulHi,
        "mul" => Sf::Mul,
        "mad" if wide => Sf::MadWide,
        "mad" if raw.has("lo") => Sf::Mad,
        "div" => Sf::Div,
        "rem" => Sf::Rem,
        "min" => Sf::Min,
        "max" => Sf::Max,
        "neg" => Sf::Neg,
        "abs" => Sf::Abs,
        "shl" => Sf::Shl,
        "shr" => Sf::Shr,
        "not" => Sf::Not,
        _ => return Err(unknown(raw)),
    })
}
