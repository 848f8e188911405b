//! The launch before a forward kernel that updates its KV cache ([`fmha_core::cache_update`]): its grid, its entry.

pub use fmha_core::cache_update::{CacheSpec, CacheUpdate, bind, is_wanted, workspace_bytes};
use fmha_core::cache_update::{header, num_rows};

use fmha_core::FwdProblem;
use fmha_core::source::{Entry, KernelSource, Literal};

/// Threads of a CTA; a warp takes a row at a time.
pub const NUM_THREADS: u32 = 128;

/// CTAs of the launch.
#[must_use]
pub fn grid(problem: &FwdProblem, num_sms: u32) -> u32 {
    crate::row_grid(num_rows(problem), NUM_THREADS, num_sms)
}

/// The kernel: arguments `FwdParams` of the call, [`CacheUpdate`].
#[must_use]
pub fn update(problem: &FwdProblem) -> KernelSource {
    let spec = CacheSpec::of(problem);
    let constants: [(&str, &dyn Literal); 1] = [("kSpec", &spec)];
    let entry = Entry {
        include: "fmha/common/update_cache.cuh",
        constants: &constants,
        bounds: &format!("__launch_bounds__({NUM_THREADS})"),
        params: "const __grid_constant__ FwdParams p, const __grid_constant__ CacheUpdate update",
        call: "cache::Update<kSpec, cache::Warp>{p, update}.run();",
    };
    crate::source(entry.render(), || [header()])
}

#[cfg(test)]
mod tests {
    use fmha_core::{DevSlice, DevSliceMut, Dims, FwdArgs, FwdProblem, KvLayout, Rotary};

    use super::*;

    #[test]
    fn packed_queries_beyond_the_longest_lengths_have_no_room_to_be_turned() {
        let dims = Dims {
            batch: 3,
            seqlen_q: 9,
            seqlen_k: 40,
            num_heads_q: 1,
            num_heads_kv: 1,
            head_dim_qk: 16,
            head_dim_v: 16,
        };
        let mut problem = FwdProblem::new(QLayout::Packed, KvLayout::Strided, DType::Bf16, dims);
        let unread = || DevSlice::host::<u8>(&[]);
        let mut written: [u8; 0] = [];
        let mut args = FwdArgs::new(unread(), unread(), unread(), DevSliceMut::host(&mut written));
        args.seq.totals.total_q = Some(28);
        assert!(check_rows(&problem, &args).is_ok(), "no query is turned");
        problem.cache.rotary =
            Some(Rotary { dim: 16, pairs: RotaryPairs::Half, max_pos: 64, dtype: DType::F32 });
        let text = check_rows(&problem, &args).unwrap_err().to_string();
        assert!(text.contains("total_q 28 is beyond batch 3 times seqlen_q 9"), "{text}");
        args.seq.totals.total_q = Some(27);
        assert!(check_rows(&problem, &args).is_ok());
    }
}
