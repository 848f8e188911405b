//! `cvt`. PTX ISA, Data Movement and Conversion Instructions: cvt.

use crate::fill::Fill::{self, Bits, F32, Halves};
use crate::program::Program;

const TO_PAIRS: &[&str] = &[
    "cvt.rn.f16x2.f32 %o0, %i0, %i1;",
    "cvt.rz.f16x2.f32 %o0, %i0, %i1;",
    "cvt.rn.relu.f16x2.f32 %o0, %i0, %i1;",
    "cvt.rn.satfinite.f16x2.f32 %o0, %i0, %i1;",
    "cvt.rn.bf16x2.f32 %o0, %i0, %i1;",
    "cvt.rz.bf16x2.f32 %o0, %i0, %i1;",
    "cvt.rn.relu.bf16x2.f32 %o0, %i0, %i1;",
    "cvt.rn.satfinite.bf16x2.f32 %o0, %i0, %i1;",
    "cvt.rn.satfinite.e4m3x2.f32 %h0, %i0, %i1; cvt.u32.u16 %o0, %h0;",
    "cvt.rn.satfinite.e5m2x2.f32 %h0, %i0, %i1; cvt.u32.u16 %o0, %h0;",
    "cvt.rn.satfinite.relu.e4m3x2.f32 %h0, %i0, %i1; cvt.u32.u16 %o0, %h0;",
    "cvt.rn.satfinite.relu.e5m2x2.f32 %h0, %i0, %i1; cvt.u32.u16 %o0, %h0;",
    "cvt.rn.f16.f32 %h0, %i0; cvt.rz.f16.f32 %h1, %i0; mov.b32 %o0, {%h0, %h1};",
    "cvt.rm.f16.f32 %h0, %i0; cvt.rp.f16.f32 %h1, %i0; mov.b32 %o0, {%h0, %h1};",
    "cvt.rn.ftz.f16.f32 %h0, %i0; cvt.rn.sat.f16.f32 %h1, %i0; mov.b32 %o0, {%h0, %h1};",
    "cvt.rn.bf16.f32 %h0, %i0; cvt.rz.bf16.f32 %h1, %i0; mov.b32 %o0, {%h0, %h1};",
    "cvt.rn.relu.bf16.f32 %h0, %i0; cvt.rn.relu.f16.f32 %h1, %i0; mov.b32 %o0, {%h0, %h1};",
    "cvt.rna.tf32.f32 %o0, %i0;",
    "cvt.rn.tf32.f32 %o0, %i0;",
    "cvt.rz.tf32.f32 %o0, %i0;",
    "cvt.rn.relu.tf32.f32 %o0, %i0;",
    "cvt.rni.f32.f32 %o0, %i0;",
    "cvt.rzi.f32.f32 %o0, %i0;",
    "cvt.rmi.f32.f32 %o0, %i0;",
    "cvt.rpi.f32.f32 %o0, %i0;",
    "cvt.rni.ftz.f32.f32 %o0, %i0;",
    "cvt.sat.f32.f32 %o0, %i0;",
    "cvt.ftz.f32.f32 %o0, %i0;",
    "cvt.rni.s32.f32 %o0, %i0;",
    "cvt.rzi.s32.f32 %o0, %i0;",
    "cvt.rmi.s32.f32 %o0, %i0;",
    "cvt.rpi.s32.f32 %o0, %i0;",
    "cvt.rzi.u32.f32 %o0, %i0;",
    "cvt.rni.u32.ftz.f32 %o0, %i0;",
    "cvt.rzi.s8.f32 %w0, %i0; mov.b32 %o0, %w0;",
    "cvt.rzi.u8.f32 %w0, %i0; mov.b32 %o0, %w0;",
    "cvt.rzi.s16.f32 %h0, %i0; cvt.rzi.u16.f32 %h1, %i0; mov.b32 %o0, {%h0, %h1};",
    "cvt.rzi.s64.f32 %x0, %i0; mov.b64 {%o0, %o1}, %x0;",
    "cvt.rzi.u64.f32 %x0, %i0; mov.b64 {%o0, %o1}, %x0;",
    "cvt.f64.f32 %x0, %i0; mov.b64 {%o0, %o1}, %x0;",
    "mov.b64 %x0, {%i0, %i1}; cvt.rn.f32.f64 %o0, %x0;",
    "mov.b64 %x0, {%i0, %i1}; cvt.rz.f32.f64 %o0, %x0;",
    "mov.b64 %x0, {%i0, %i1}; cvt.rzi.s32.f64 %o0, %x0;",
    "mov.b64 %x0, {%i0, %i1}; cvt.rn.f16.f64 %h0, %x0; mov.b32 %o0, {%h0, %h0};",
];

/// Every half, and every byte of FP8 in either place.
const FROM_HALVES: &[&str] = &[
    "mov.b32 {%h0, %h1}, %i0; cvt.f32.f16 %o0, %h0;",
    "mov.b32 {%h0, %h1}, %i0; cvt.ftz.f32.f16 %o0, %h0;",
    "mov.b32 {%h0, %h1}, %i0; cvt.f32.bf16 %o0, %h0;",
    "mov.b32 {%h0, %h1}, %i0; cvt.rn.f16x2.e4m3x2 %o0, %h0;",
    "mov.b32 {%h0, %h1}, %i0; cvt.rn.f16x2.e5m2x2 %o0, %h0;",
    "mov.b32 {%h0, %h1}, %i0; cvt.rn.relu.f16x2.e4m3x2 %o0, %h0;",
    "mov.b32 {%h0, %h1}, %i0; cvt.rn.relu.f16x2.e5m2x2 %o0, %h0;",
    "cvt.rn.satfinite.e4m3x2.f16x2 %h0, %i0; cvt.u32.u16 %o0, %h0;",
    "cvt.rn.satfinite.e5m2x2.f16x2 %h0, %i0; cvt.u32.u16 %o0, %h0;",
    "cvt.rn.satfinite.relu.e4m3x2.f16x2 %h0, %i0; cvt.u32.u16 %o0, %h0;",
    "cvt.rn.satfinite.relu.e5m2x2.f16x2 %h0, %i0; cvt.u32.u16 %o0, %h0;",
    "mov.b32 {%h0, %h1}, %i0; cvt.rni.f16.f16 %h2, %h0; cvt.rzi.f16.f16 %h3, %h0; mov.b32 %o0, {%h2, %h3};",
    "mov.b32 {%h0, %h1}, %i0; cvt.rzi.s32.f16 %o0, %h0;",
    "mov.b32 {%h0, %h1}, %i0; cvt.rni.u32.f16 %o0, %h0;",
    "mov.b32 {%h0, %h1}, %i0; cvt.rn.f16.s16 %h2, %h0; cvt.rn.f16.u16 %h3, %h0; mov.b32 %o0, {%h2, %h3};",
    "mov.b32 {%h0, %h1}, %i0; cvt.rn.bf16.s16 %h2, %h0; cvt.rn.bf16.u16 %h3, %h0; mov.b32 %o0, {%h2, %h3};",
    "mov.b32 {%h0, %h1}, %i0; cvt.rn.bf16.f16 %h2, %h0; cvt.rn.f16.bf16 %h3, %h0; mov.b32 %o0, {%h2, %h3};",
];

const FROM_WHOLE: &[&str] = &[
    "cvt.rn.f32.s32 %o0, %i0;",
    "cvt.rn.f32.u32 %o0, %i0;",
    "cvt.rz.f32.u32 %o0, %i0;",
    "cvt.rm.f32.s32 %o0, %i0;",
    "cvt.rp.f32.u32 %o0, %i0;",
    "cvt.rn.f16.s32 %h0, %i0; cvt.rn.f16.u32 %h1, %i0; mov.b32 %o0, {%h0, %h1};",
    "cvt.rn.bf16.s32 %h0, %i0; cvt.rn.bf16.u32 %h1, %i0; mov.b32 %o0, {%h0, %h1};",
    "mov.b64 %x0, {%i0, %i1}; cvt.rn.f32.s64 %o0, %x0;",
    "mov.b64 %x0, {%i0, %i1}; cvt.rn.f32.u64 %o0, %x0;",
    "mov.b64 %x0, {%i0, %i1}; cvt.rn.f64.s64 %x1, %x0; mov.b64 {%o0, %o1}, %x1;",
    "cvt.sat.s8.s32 %o0, %i0;",
    "cvt.sat.u8.s32 %o0, %i0;",
    "cvt.sat.s16.s32 %h0, %i0; cvt.sat.u16.s32 %h1, %i0; mov.b32 %o0, {%h0, %h1};",
    "cvt.sat.u32.s32 %o0, %i0;",
    "cvt.sat.s32.u32 %o0, %i0;",
    "cvt.s32.s8 %o0, %i0;",
    "cvt.u32.u8 %o0, %i0;",
    "cvt.s64.s32 %x0, %i0; mov.b64 {%o0, %o1}, %x0;",
    "cvt.pack.sat.s8.s32.b32 %o0, %i0, %i1, %i2;",
    "cvt.pack.sat.u8.s32.b32 %o0, %i0, %i1, %i2;",
    "cvt.pack.sat.s16.s32 %o0, %i0, %i1;",
];

pub(super) fn programs() -> Vec<Program> {
    let table = |texts: &'static [&'static str], fill: Fill| {
        texts.iter().map(move |text| {
            let outputs = if text.contains("%o1") { 2 } else { 1 };
            Program::new(format!("cvt/{text}"), &[fill; 3], *text).outputs(outputs)
        })
    };
    table(TO_PAIRS, F32).chain(table(FROM_HALVES, Halves)).chain(table(FROM_WHOLE, Bits)).collect()
}
