//! The backward over lists of keys by `wgmma` on Hopper, for latent rows: supported problems, and its entry.
//!
//! A cluster of two CTAs has up to 128 query heads of one token (`fmha/sm90/lists/bwd.cuh`). dK and dV are added to
//! sums in global memory in arbitrary order, as in [`sm80_lists_bwd`].

pub mod recipe;

use fmha_core::source::{Entry, KernelSource, Literal};
use fmha_core::spec::BwdSpec;
use fmha_core::{BwdProblem, Dims, Refusal};

use crate::sm80_bwd::{ctas_of, odd_stride};
use crate::sm80_lists_bwd;
use crate::sm90_mla::{DIM_QK, DIM_V};
use crate::wgmma::{self, OperandA, Sums, WgmmaShape};

/// The kernel's name in plans and refusals.
pub const NAME: &str = "sm90_lists";

/// The header that the entry includes.
pub const HEADER: &str = "fmha/sm90/lists/bwd.cuh";

/// Query heads of a cluster, all of one token.
pub const HEADS: u32 = 128;

/// CTAs of a cluster; each has half of the columns.
pub const CTAS: u32 = 2;

/// Threads of a CTA.
pub const NUM_THREADS: u32 = 256;

/// Number of bytes that one copy moves.
pub(crate) const COPY_BYTES: u32 = 16;

/// Dynamic shared memory of a CTA; the entry asserts that the device agrees.
#[must_use]
pub const fn smem_bytes(spec: &BwdSpec) -> i32 {
    let (heads, keys, columns, tail) = (HEADS as i32, 64, 256, 32);
    let tails = if spec.fwd.head_dim_qk > DIM_V as i32 { 2 * (heads + keys) * tail } else { 0 };
    // Tiles of Q and dO, of K, of V or P and dS, and of a part of S; then numbers of heads and keys, and barriers.
    let tiles = 2 * (2 * heads + 2 * keys) * columns + 4 * heads * keys / 2;
    tails + tiles + (12 * heads + 24 * keys + 24) / 1024 * 1024 + 1024
}

/// Checks that the kernel computes this problem.
///
/// # Errors
/// The first fact that it does not support.
pub fn accepts(problem: &BwdProblem) -> Result<(), Refusal> {
    sm80_lists_bwd::takes_gathered(problem, NAME)?;
    let refuse = |reason: String| Err(Refusal::new(NAME, reason));
    let Dims { head_dim_qk, head_dim_v, .. } = problem.fwd.dims;
    if head_dim_v != DIM_V || ![DIM_V, DIM_QK].contains(&head_dim_qk) {
        return refuse(format!(
            "head_dim_qk {head_dim_qk} with head_dim_v {head_dim_v} is neither {DIM_QK} nor {DIM_V} with {DIM_V}"
        ));
    }
    if let Some(cap) = problem.fwd.score.softcap {
        return refuse(format!("softcap {cap}: its slopes have no registers beside dQ"));
    }
    if let Some((name, axis, stride)) = odd_stride(problem, COPY_BYTES.cast_signed()) {
        return refuse(format!("{name}.{axis} stride {stride} is not whole copies of {COPY_BYTES} bytes"));
    }
    Ok(())
}

/// Number of CTAs of the launch; `None` if 2^31 or more.
#[must_use]
pub fn ctas(problem: &BwdProblem) -> Option<u32> {
    let dims = problem.fwd.dims;
    let parts = problem.fwd.gqa_ratio().div_ceil(HEADS) * CTAS;
    ctas_of([dims.batch, dims.num_heads_kv], u64::from(dims.seqlen_q).saturating_mul(parts.into()))
}

/// The launch. Its arguments are `BwdParams` and [`ListParams`](fmha_core::lists::ListParams).
#[must_use]
pub fn main(spec: &BwdSpec) -> KernelSource {
    let constants: [(&str, &dyn Literal); 1] = [("kSpec", spec)];
    let entry = Entry {
        include: HEADER,
        constants: &constants,
        bounds: "__cluster_dims__(sm90::lists::kCtas, 1, 1) __launch_bounds__(sm90::lists::kThreads, 1)",
        params: &format!("const __grid_constant__ BwdParams p{}", crate::lists::PARAM),
        call: &format!(
            "static_assert(sizeof(sm90::lists::Smem<kSpec>) == {} && sm90::lists::kThreads == {NUM_THREADS} && \
             sm90::lists::kHeads == {HEADS} && sm90::lists::kCtas == {CTAS}, \"host and device disagree\"); \
             sm90::lists::bwd<kSpec>(p, lists);",
            smem_bytes(spec)
        ),
    };
    let dtype = spec.fwd.dtype_qk;
    crate::source(entry.render(), move || {
        let shape = |n| WgmmaShape { dtype, n, a: OperandA::Shared, sums: Sums::F32 };
        [wgmma::header(&[64, 256, 32].map(shape)), fmha_core::lists::header()]
    })
}

#[cfg(test)]
mod tests {
    use fmha_core::{Bias, DType, FwdProblem, KeyLists};

    use super::*;

    fn latent(dim_qk: u32, heads: u32) -> BwdProblem {
        let dims = Dims::batch(1).seqlens(4096, 65536).heads(heads, 1).head_dims(dim_qk, DIM_V);
        let problem = FwdProblem::batch(DType::Bf16, dims);
        let lists = KeyLists::new(&problem, 2048);
        BwdProblem::new(problem.lists(lists))
    }

    #[test]
    fn latent_rows_are_taken_and_others_refused_by_their_number() {
        type Change = fn(&mut BwdProblem);
        for dim in [512, 576] {
            assert!(accepts(&latent(dim, 128)).is_ok());
        }
        let refused: [(&str, Change); 6] = [
            ("softcap 30", |p| p.fwd.score.softcap = Some(30.0)),
            ("head_dim_qk 320 with head_dim_v 512", |p| p.fwd.dims.head_dim_qk = 320),
            ("head_dim_qk 576 with head_dim_v 256", |p| p.fwd.dims.head_dim_v = 256),
            ("k.seq stride 580", |p| p.fwd.strides.k.seq = 580),
            ("bias Alibi", |p| p.fwd.score.bias = Bias::Alibi { per_batch: false }),
            ("indices are not given", |p| p.fwd.lists = None),
        ];
        for (words, change) in refused {
            let mut problem = latent(576, 128);
            change(&mut problem);
            let refusal = accepts(&problem).unwrap_err().to_string();
            assert!(refusal.contains(words) && refusal.contains(NAME), "{words}: {refusal}");
        }
    }

    #[test]
    fn a_token_has_a_cluster_for_128_heads() {
        for (heads, ctas_of_token) in [(1, 2), (128, 2), (129, 4)] {
            assert_eq!(ctas(&latent(576, heads)), Some(4096 * ctas_of_token));
        }
    }

    #[test]
    fn a_cta_has_room_on_hopper() {
        for dim in [512, 576] {
            let spec = BwdSpec::of(&latent(dim, 128));
            assert!(smem_bytes(&spec) <= 227 << 10, "{dim}: {}", smem_bytes(&spec));
        }
    }
}
