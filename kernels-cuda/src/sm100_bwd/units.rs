//! Clocks that each unit needs for 128 queries and 128 keys of the backward: docs/kernels/sm100-bwd.md and
//! sm100-bwd-wide.md have the tables. Modelled, never measured.

use fmha_core::spec::BwdSpec;

use super::{BLOCK, in_two, is_wide, product_dim, v_in_tmem};
use crate::sm100::units::{
    L2_BYTES, PAIRS, PRODUCTS, SHARED_BYTES, TENSOR_MEMORY_BYTES, Units, exponentials,
};

/// Bytes of a block of P or dS: 128 x 128 numbers of 16 bits.
const SCORES: f64 = 2.0 * PAIRS;

/// Units of the backward, without modifiers. Where two CTAs compute dK and dV, the clocks of both are added.
#[must_use]
pub fn backward(spec: &BwdSpec, arch: &str) -> Units {
    let (qk, v) = (spec.fwd.head_dim_qk, spec.fwd.head_dim_v);
    let twice = if in_two(qk, v) { 2.0 } else { 1.0 };
    let [d, dv] = [qk, v].map(|dim| f64::from(product_dim(dim)));
    // Bytes of one column of 128 rows, of queries or keys, in 16 bits.
    let row = 2.0 * f64::from(BLOCK);
    let brought = row * (d + dv);
    let (columns, read, stored) = if is_wide(qk) {
        // dQ^T takes two products of 128 elements each; a block of 64 queries reads keys twice as often.
        let of_dq = 2.0 * f64::from(BLOCK);
        let reads_v = if v_in_tmem(qk, v) { 0.0 } else { 2.0 * row * dv };
        let of_both = row * dv + row * d + 2.0 * row * of_dq + 3.0 * SCORES + reads_v;
        let s = 3.0 * row * d;
        // The CTA that computes dV reads K from tensor memory.
        let second = if twice > 1.0 { row * d + row * dv } else { row * dv };
        let again = if twice > 1.0 { d } else { 0.0 };
        let extra = if twice > 1.0 { brought + SCORES / 2.0 } else { 0.0 };
        (2.0 * d + 2.0 * dv + of_dq + again, s + of_both + second, brought + 2.0 * SCORES + extra)
    } else {
        (3.0 * d + 2.0 * dv, 4.0 * row * d + 3.0 * row * dv + 2.0 * SCORES, brought + 2.0 * SCORES)
    };
    Units {
        tensor: PAIRS * columns / PRODUCTS,
        exp: twice * PAIRS / exponentials(arch),
        floats: 3.0 * PAIRS / 128.0 * twice,
        shared: (read + stored) / SHARED_BYTES,
        // Tensor memory is used for S and dP, for P, and for dQ.
        tensor_memory: (2.0 * 4.0 * PAIRS + twice * SCORES + 2.0 * row * d) / TENSOR_MEMORY_BYTES,
        loads: (twice * brought + 2.0 * row * d) / L2_BYTES,
    }
}

#[cfg(test)]
mod tests {
    use fmha_core::spec::{BwdSpec, FwdSpec};
    use fmha_core::{BwdProblem, DType, Dims, FwdProblem};

    use super::*;

    fn spec(qk: u32, v: u32) -> BwdSpec {
        let dims = Dims::batch(1).seqlens(512, 512).heads(1, 1).head_dims(qk, v);
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims));
        let _: FwdSpec = FwdSpec::of(&problem.fwd);
        BwdSpec::of(&problem)
    }

    /// Clocks of a block equal those in the pages' tables; the tables of wide heads are for 64 queries.
    #[test]
    fn a_block_costs_the_clocks_of_the_pages() {
        for (qk, v, tensor, shared) in [
            (64, 64, 1280.0, 2176.0),
            (128, 128, 2560.0, 3328.0),
            (192, 128, 2.0 * 1792.0, 2.0 * 2496.0),
            (192, 192, 2.0 * 2048.0, 2.0 * 3072.0),
            (256, 256, 2.0 * 3072.0, 2.0 * 4032.0),
        ] {
            let units = backward(&spec(qk, v), "sm_100a");
            assert_eq!([units.tensor, units.shared], [tensor, shared], "{qk}/{v}");
        }
        assert_eq!(backward(&spec(128, 128), "sm_103a").exp, 512.0);
        assert_eq!(backward(&spec(256, 256), "sm_100a").exp, 2048.0);
    }
}
