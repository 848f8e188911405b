//! Rows in tiles and beside them, in software: most processors have no tiles.

use fmha_core::dropout::philox4x32_10;
use fmha_core::{
    DType, DevSlice, DevSliceMut, Dims, FwdArgs, FwdProblem, KvLayout, QLayout, SeqArgs, ValidFwd,
};
use half::bf16;

use super::super::{Blocks, Forward};
use crate::isa::FORWARD_BLOCKS;
use crate::simd::{Portable, Simd, SoftTiles};
use crate::tasks::Threads;
use crate::tensor::fp8_table;

const SEQLEN_Q: u32 = 2;
const SEQLEN_K: u32 = 150;

/// Two queries of one sequence; the last key is hidden from the first.
fn problem(heads: (u32, u32), dims: (u32, u32), cache: Option<DType>) -> ValidFwd {
    let dims = Dims {
        batch: 1,
        seqlen_q: SEQLEN_Q,
        seqlen_k: SEQLEN_K,
        num_heads_q: heads.0,
        num_heads_kv: heads.1,
        head_dim_qk: dims.0,
        head_dim_v: dims.1,
    };
    let mut problem = FwdProblem::new(QLayout::Batch, KvLayout::Strided, DType::Bf16, dims);
    problem.mask = "b".parse().unwrap();
    problem.dtype_cache = cache;
    problem.validate().unwrap()
}

fn attend<S: Simd>(s: S, valid: &ValidFwd, q: &[bf16], k: DevSlice<'_>, v: DevSlice<'_>) -> Vec<bf16> {
    let mut o = vec![bf16::ZERO; valid.shape_o().num_elems() as usize];
    let spans = fmha_core::seq::spans(valid, &SeqArgs::default()).unwrap();
    let args = FwdArgs::new(DevSlice::host(q), k, v, DevSliceMut::host(&mut o));
    let blocks = Blocks { rows_only: true, ..FORWARD_BLOCKS };
    Forward { problem: valid, args: &args, spans: &spans, blocks }.run(s, &Threads::new(1).unwrap()).unwrap();
    o
}

#[test]
fn codes_have_the_bits_of_their_bf16_and_a_hidden_nan_stays_hidden_in_tiles_too() {
    let code = |i: u64, salt: u32| {
        let code = philox4x32_10([i as u32, salt, 0, 0], [1, 2])[0] as u8;
        // Up to 28, no NaN; subnormals and both zeros too.
        code & 0xdf
    };
    let values = fp8_table(DType::E4m3Fn);
    let wide = |codes: &[u8]| -> Vec<bf16> {
        codes.iter().map(|&code| bf16::from_f32(values[usize::from(code)])).collect()
    };
    for (heads, dims) in [
        ((8, 1), (96, 32)),
        ((16, 2), (64, 160)),
        ((8, 1), (64, 40)),
        ((8, 1), (40, 64)),
        ((4, 2), (96, 80)),
        ((2, 2), (40, 64)),
    ] {
        let (plain, coded) = (problem(heads, dims, None), problem(heads, dims, Some(DType::E4m3Fn)));
        let q: Vec<u8> = (0..plain.shape_q().num_elems()).map(|i| code(i, 1) & 0xaf).collect();
        let k: Vec<u8> = (0..plain.shape_k().num_elems()).map(|i| code(i, 2) & 0xaf).collect();
        let mut v: Vec<u8> = (0..plain.shape_v().num_elems()).map(|i| code(i, 3)).collect();
        let at_last_key = v.len() - (heads.1 * dims.1) as usize;
        for last in [None, Some(0x7f)] {
            if let Some(nan) = last {
                v[at_last_key..].fill(nan);
            }
            let (q, k_wide, v_wide) = (wide(&q), wide(&k), wide(&v));
            let tiles = attend(SoftTiles, &plain, &q, DevSlice::host(&k_wide), DevSlice::host(&v_wide));
            let codes = attend(SoftTiles, &coded, &q, DevSlice::host(&k), DevSlice::host(&v));
            let f32s = attend(Portable, &plain, &q, DevSlice::host(&k_wide), DevSlice::host(&v_wide));
            for (at, ((tiles, codes), f32s)) in tiles.iter().zip(&codes).zip(&f32s).enumerate() {
                let what = format!("{heads:?} {dims:?} {last:?} element {at}: {tiles}, {codes}, {f32s}");
                let hides_last = (at as u64) < plain.o.offset(0, 1, 0, 0) as u64;
                if last.is_some() && !hides_last {
                    assert!(tiles.is_nan() && codes.is_nan(), "{what}");
                    continue;
                }
                assert_eq!(tiles.to_bits(), codes.to_bits(), "{what}");
                assert!(
                    (tiles.to_f32() - f32s.to_f32()).abs() <= 0.02 * (1.0 + f32s.to_f32().abs()),
                    "{what}"
                );
            }
        }
    }
}
