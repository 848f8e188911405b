//! Singles, doubles and halves that round as IEEE 754 says. PTX ISA, Floating Point Instructions; Half Precision
//! Floating Point Instructions.

use crate::fill::Fill::{F32, Halves};
use crate::program::Program;

const SINGLE: &[&str] = &[
    "add.f32 %o0, %i0, %i1;",
    "add.ftz.f32 %o0, %i0, %i1;",
    "add.rz.f32 %o0, %i0, %i1;",
    "add.rm.f32 %o0, %i0, %i1;",
    "add.rp.f32 %o0, %i0, %i1;",
    "add.rm.ftz.f32 %o0, %i0, %i1;",
    "add.sat.f32 %o0, %i0, %i1;",
    "sub.rn.f32 %o0, %i0, %i1;",
    "sub.rz.f32 %o0, %i0, %i1;",
    "mul.f32 %o0, %i0, %i1;",
    "mul.ftz.f32 %o0, %i0, %i1;",
    "mul.rz.f32 %o0, %i0, %i1;",
    "mul.rm.f32 %o0, %i0, %i1;",
    "mul.rp.f32 %o0, %i0, %i1;",
    "mul.sat.f32 %o0, %i0, %i1;",
    "fma.rn.f32 %o0, %i0, %i1, %i2;",
    "fma.rn.ftz.f32 %o0, %i0, %i1, %i2;",
    "fma.rz.f32 %o0, %i0, %i1, %i2;",
    "fma.rm.f32 %o0, %i0, %i1, %i2;",
    "fma.rp.f32 %o0, %i0, %i1, %i2;",
    "fma.rn.sat.f32 %o0, %i0, %i1, %i2;",
    "div.rn.f32 %o0, %i0, %i1;",
    "div.rn.ftz.f32 %o0, %i0, %i1;",
    "rcp.rn.f32 %o0, %i0;",
    "sqrt.rn.f32 %o0, %i0;",
    "min.f32 %o0, %i0, %i1;",
    "max.f32 %o0, %i0, %i1;",
    "min.ftz.f32 %o0, %i0, %i1;",
    "max.ftz.f32 %o0, %i0, %i1;",
    "min.NaN.f32 %o0, %i0, %i1;",
    "max.NaN.f32 %o0, %i0, %i1;",
    "max.xorsign.abs.f32 %o0, %i0, %i1;",
    "min.xorsign.abs.f32 %o0, %i0, %i1;",
    "abs.f32 %o0, %i0;",
    "abs.ftz.f32 %o0, %i0;",
    "neg.f32 %o0, %i0;",
    "neg.ftz.f32 %o0, %i0;",
    "copysign.f32 %o0, %i0, %i1;",
    "testp.finite.f32 %p0, %i0; selp.b32 %o0, 1, 0, %p0;",
    "testp.subnormal.f32 %p0, %i0; selp.b32 %o0, 1, 0, %p0;",
    "setp.lt.f32 %p0, %i0, %i1; selp.b32 %o0, %i0, %i2, %p0;",
    "setp.ltu.f32 %p0, %i0, %i1; selp.b32 %o0, %i0, %i2, %p0;",
    "setp.neu.f32 %p0, %i0, %i1; selp.b32 %o0, %i0, %i2, %p0;",
    "setp.eq.ftz.f32 %p0, %i0, %i1; selp.b32 %o0, %i0, %i2, %p0;",
    "setp.num.f32 %p0, %i0, %i1; selp.b32 %o0, %i0, %i2, %p0;",
    "setp.nan.f32 %p0, %i0, %i1; selp.b32 %o0, %i0, %i2, %p0;",
    "set.gt.f32.f32 %o0, %i0, %i1;",
    "set.ge.u32.f32 %o0, %i0, %i1;",
    "slct.b32.f32 %o0, %i0, %i1, %i2;",
];

const DOUBLE: &[&str] = &[
    "add.f64 %x3, %x0, %x1;",
    "mul.f64 %x3, %x0, %x1;",
    "fma.rn.f64 %x3, %x0, %x1, %x2;",
    "div.rn.f64 %x3, %x0, %x1;",
    "rcp.rn.f64 %x3, %x0;",
    "sqrt.rn.f64 %x3, %x0;",
    "min.f64 %x3, %x0, %x1;",
    "max.f64 %x3, %x0, %x1;",
    "neg.f64 %x3, %x0;",
    "abs.f64 %x3, %x0;",
];

/// `{0}` becomes `f16` and `bf16`.
const HALF: &[&str] = &[
    "add{rn}.{0}x2 %o0, %i0, %i1;",
    "sub{rn}.{0}x2 %o0, %i0, %i1;",
    "mul{rn}.{0}x2 %o0, %i0, %i1;",
    "fma.rn.{0}x2 %o0, %i0, %i1, %i2;",
    "fma.rn.relu.{0}x2 %o0, %i0, %i1, %i2;",
    "min.{0}x2 %o0, %i0, %i1;",
    "max.{0}x2 %o0, %i0, %i1;",
    "min.NaN.{0}x2 %o0, %i0, %i1;",
    "max.NaN.{0}x2 %o0, %i0, %i1;",
    "abs.{0}x2 %o0, %i0;",
    "neg.{0}x2 %o0, %i0;",
    "setp.gt.{0}x2 %p0|%p1, %i0, %i1; selp.b32 %o0, 1, 0, %p0; @%p1 add.s32 %o0, %o0, 2;",
    "mov.b32 {%h0, %h1}, %i0; mov.b32 {%h2, %h3}, %i1; add{rn}.{0} %h4, %h0, %h2; fma.rn.{0} %h5, %h1, %h3, %h0; mov.b32 %o0, {%h4, %h5};",
];

const F16_ONLY: &[&str] = &[
    "add.ftz.f16x2 %o0, %i0, %i1;",
    "mul.ftz.f16x2 %o0, %i0, %i1;",
    "add.sat.f16x2 %o0, %i0, %i1;",
    "fma.rn.ftz.f16x2 %o0, %i0, %i1, %i2;",
    "fma.rn.sat.f16x2 %o0, %i0, %i1, %i2;",
    "max.ftz.f16x2 %o0, %i0, %i1;",
];

pub(super) fn programs() -> Vec<Program> {
    let mut all: Vec<Program> =
        SINGLE.iter().map(|text| Program::new(format!("f32/{text}"), &[F32; 3], *text)).collect();
    all.extend(DOUBLE.iter().map(|text| {
        let body = format!(
            "mov.b64 %x0, {{%i0, %i1}}; mov.b64 %x1, {{%i2, %i3}}; mov.b64 %x2, {{%i4, %i5}};\n{text}\n\
             mov.b64 {{%o0, %o1}}, %x3;"
        );
        Program::new(format!("f64/{text}"), &[F32; 6], body).outputs(2)
    }));
    for kind in ["f16", "bf16"] {
        all.extend(HALF.iter().map(|text| {
            let text = text.replace("{0}", kind).replace("{rn}", ".rn");
            Program::new(format!("{kind}/{text}"), &[Halves; 3], text)
        }));
    }
    all.extend(F16_ONLY.iter().map(|text| Program::new(format!("f16/{text}"), &[Halves; 3], *text)));
    all
}
