//! Lanes that speak to each other, and memory that lanes share. PTX ISA, Data Movement; Parallel Synchronization.

use crate::fill::Fill::{Bits, F32};
use crate::program::Program;

const LANES: &[&str] = &[
    "shfl.sync.up.b32 %o0|%p0, %i0, 3, 0, -1; @!%p0 add.s32 %o0, %o0, 1;",
    "shfl.sync.down.b32 %o0|%p0, %i0, 5, 31, -1; @!%p0 add.s32 %o0, %o0, 1;",
    "shfl.sync.bfly.b32 %o0|%p0, %i0, 21, 31, -1; @!%p0 add.s32 %o0, %o0, 1;",
    "shfl.sync.idx.b32 %o0|%p0, %i0, 7, 31, -1; @!%p0 add.s32 %o0, %o0, 1;",
    "shfl.sync.up.b32 %o0|%p0, %i0, 3, 0x1800, -1; @!%p0 add.s32 %o0, %o0, 1;",
    "shfl.sync.down.b32 %o0|%p0, %i0, 3, 0x181f, -1; @!%p0 add.s32 %o0, %o0, 1;",
    "shfl.sync.bfly.b32 %o0|%p0, %i0, 9, 0x181f, -1; @!%p0 add.s32 %o0, %o0, 1;",
    "shfl.sync.idx.b32 %o0|%p0, %i0, 29, 0x1c1f, -1; @!%p0 add.s32 %o0, %o0, 1;",
    "shfl.sync.down.b32 %o0|%p0, %i0, 2, 0x1c1b, -1; @!%p0 add.s32 %o0, %o0, 1;",
    // Each lane with an offset and a clamp of its own.
    "shfl.sync.idx.b32 %o0|%p0, %i0, %i1, 31, -1; @!%p0 add.s32 %o0, %o0, 1;",
    "and.b32 %w0, %i1, 0x1f1f; shfl.sync.bfly.b32 %o0|%p0, %i0, %i2, %w0, -1; @!%p0 add.s32 %o0, %o0, 1;",
    "setp.lt.s32 %p0, %i0, %i1; vote.sync.ballot.b32 %o0, %p0, -1;",
    "setp.lt.u32 %p0, %i0, 0xf0000000; vote.sync.all.pred %p1, %p0, -1; selp.b32 %o0, 1, 0, %p1;",
    "setp.lt.u32 %p0, %i0, 2; vote.sync.any.pred %p1, %p0, -1; selp.b32 %o0, 1, 0, %p1;",
    "setp.lt.u32 %p0, %i0, 2; vote.sync.uni.pred %p1, %p0, -1; selp.b32 %o0, 1, 0, %p1;",
    "and.b32 %w0, %i0, 3; match.any.sync.b32 %o0, %w0, -1;",
    "and.b32 %w0, %i0, 0; match.all.sync.b32 %o0|%p0, %w0, -1; @%p0 add.s32 %o0, %o0, 1;",
    "redux.sync.add.s32 %o0, %i0, -1;",
    "redux.sync.min.s32 %o0, %i0, -1;",
    "redux.sync.max.s32 %o0, %i0, -1;",
    "redux.sync.min.u32 %o0, %i0, -1;",
    "redux.sync.max.u32 %o0, %i0, -1;",
    "redux.sync.and.b32 %o0, %i0, -1;",
    "redux.sync.or.b32 %o0, %i0, -1;",
    "redux.sync.xor.b32 %o0, %i0, -1;",
    "and.b32 %w0, %t, 31; setp.gt.u32 %p1, %w0, 4; @%p1 elect.sync %o0|%p0, 0xffffffe0; @%p1 selp.b32 %w1, 64, 0, %p0; @%p1 add.s32 %o0, %o0, %w1;",
    "setp.lt.s32 %p0, %i0, %i1; @%p0 bra YES; add.s32 %o0, %i0, 5; bra END; YES: mul.lo.s32 %o0, %i1, 3; END: shfl.sync.bfly.b32 %o0, %o0, 1, 31, -1;",
    "activemask.b32 %o0;",
    "mov.u32 %w0, %lanemask_lt; mov.u32 %w1, %lanemask_ge; mov.u32 %w2, %laneid; xor.b32 %w0, %w0, %w1; add.s32 %o0, %w0, %w2;",
];

/// Contents of a block's shared words before an atomic: four words, one for every 32 threads.
const CELLS: &str = ".shared .align 16 .b8 cells[64];";

/// One result a cell: integers, so that the order does not matter.
const ATOMICS: &[&str] = &[
    "red.shared.add.u32 [%w0], %i0;",
    "red.shared.min.s32 [%w0], %i0;",
    "red.shared.max.u32 [%w0], %i0;",
    "red.shared.and.b32 [%w0], %i0;",
    "red.shared.or.b32 [%w0], %i0;",
    "red.shared.xor.b32 [%w0], %i0;",
    "red.shared.inc.u32 [%w0], 13;",
    "red.shared.dec.u32 [%w0], 13;",
];

/// Loads of every width from shared memory, sign and zero extended.
const LOADS: &[&str] = &[
    "ld.shared.s8 %o0, [%w1+1];",
    "ld.shared.u8 %o0, [%w1+3];",
    "ld.shared.s16 %o0, [%w1+2];",
    "ld.shared.u16 %o0, [%w1];",
    "and.b32 %w1, %w1, -8; ld.shared.v2.b32 {%o0, %o1}, [%w1];",
    "and.b32 %w1, %w1, -16; ld.shared.v4.b32 {%o0, %o1, %w4, %w5}, [%w1]; xor.b32 %o0, %o0, %w4; sub.s32 %o1, %o1, %w5;",
    "and.b32 %w1, %w1, -8; ld.shared.b64 %x0, [%w1]; mov.b64 {%o0, %o1}, %x0;",
    "xor.b32 %w1, %w1, 64; st.shared.u8 [%w1+2], %i1; bar.sync 0; ld.shared.b32 %o0, [%w1];",
    "xor.b32 %w1, %w1, 64; cvt.u16.u32 %h0, %i1; st.shared.u16 [%w1+2], %h0; bar.sync 0; ld.shared.b32 %o0, [%w1];",
];

pub(super) fn programs() -> Vec<Program> {
    let mut all: Vec<Program> = LANES
        .iter()
        .map(|text| Program::new(format!("warp/{text}"), &[Bits; 3], *text).shape(16, 128))
        .collect();
    all.extend(ATOMICS.iter().map(|text| {
        let body = format!(
            "mov.u32 %w0, cells; shr.u32 %w1, %t, 5; shl.b32 %w1, %w1, 2; add.s32 %w0, %w0, %w1;\n\
             and.b32 %w2, %t, 31; setp.eq.u32 %p0, %w2, 0; @%p0 st.shared.b32 [%w0], 77; bar.sync 0;\n\
             {text}\nbar.sync 0; ld.shared.b32 %o0, [%w0];"
        );
        Program {
            declare: CELLS.into(),
            ..Program::new(format!("atomic/{text}"), &[Bits], body).shape(16, 128)
        }
    }));
    all.extend(LOADS.iter().map(|text| {
        let body = format!(
            "mov.u32 %w1, words; shl.b32 %w2, %t, 2; add.s32 %w1, %w1, %w2;\n\
             st.shared.b32 [%w1], %i0; bar.sync 0;\n{text}"
        );
        let outputs = if text.contains("%o1") { 2 } else { 1 };
        let program =
            Program::new(format!("shared/{text}"), &[Bits, Bits], body).shape(4, 128).outputs(outputs);
        Program { declare: ".shared .align 16 .b8 words[512];".into(), ..program }
    }));
    // Two sums in either order are one number.
    for (kind, zero) in [("f32", "0"), ("f16x2", "0"), ("bf16x2", "0")] {
        let noftz = if kind == "f32" { "" } else { ".noftz" };
        let body = format!(
            "setp.gt.u32 %p1, %t, 1; mov.u32 %w0, cells; setp.eq.u32 %p0, %t, 0; @%p0 st.shared.b32 [%w0], {zero};\n\
             bar.sync 0; @!%p1 red.shared.add{noftz}.{kind} [%w0], %i0; bar.sync 0; ld.shared.b32 %o0, [%w0];"
        );
        let program = Program::new(format!("atomic/red.shared.add.{kind}"), &[F32], body).shape(64, 32);
        all.push(Program { declare: CELLS.into(), ..program });
    }
    all
}
