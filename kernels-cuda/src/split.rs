//! Split-KV: a short query's keys in parts, each a tile of its own, whose O and LSE a second kernel merges.
//!
//! Where the parts end is decided by the lengths of the problem alone, never by its batch, its heads or the device: so a
//! sequence has the same bits beside any others.

use fmha_core::abi::{AbiStruct as _, DevPtr, FwdParams, View};
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::FwdSpec;
use fmha_core::{DType, FwdProblem, abi_struct};

/// The merging kernel's name in plans.
pub const MERGE_NAME: &str = "sm100_merge";

/// Threads of a CTA of the merging kernel; a warp merges one row at a time.
pub const MERGE_THREADS: u32 = 128;

/// Keys of a part, at least: at head dimension 128 in 16 bits its K and V are 128 KB, of which the partial results of
/// eight rows, written and read, are 6 %.
const LEAST_KEYS: i32 = 256;

/// Parts of a sequence, at most: beyond, parts are longer.
const MOST_PARTS: u32 = 128;

/// Where the parts begin in the workspace; the tile counter is before them.
const FIRST_BYTE: u64 = 256;

abi_struct! {
    /// The partial results, a kernel argument: part after part, each `[batch, num_heads_q, seqlen_q]`, of packed
    /// sequences too, since how many rows they have is not known when a plan is made.
    pub struct KvParts {
        /// O, `row` elements a row.
        pub o: DevPtr<f32>,
        /// Natural log-sum-exp.
        pub lse: DevPtr<f32>,
        /// Elements from row to row of `o`: a multiple of 4.
        pub row: i32,
        /// Keys of a part.
        pub keys: i32,
    }
}

impl KvParts {
    /// Those of a problem, of so many `keys` each, in a workspace.
    #[must_use]
    pub fn new(problem: &FwdProblem, keys: i32, workspace: u64) -> Self {
        let lse = workspace + FIRST_BYTE;
        let o = (lse + part_rows(problem, keys) * 4).next_multiple_of(16);
        Self { o: DevPtr::new(o), lse: DevPtr::new(lse), row: row_elems(problem), keys }
    }

    /// The arguments of the forward kernel, whose O and LSE are the parts, a batch of sequences each, instead of those of
    /// the `whole` call.
    #[must_use]
    pub fn params(&self, whole: &FwdParams) -> FwdParams {
        let (rows, row) = (i64::from(whole.seqlen_q), i64::from(self.row));
        let heads = i64::from(whole.num_heads_q);
        let o =
            View { data: DevPtr::new(self.o.0), batch: heads * rows * row, row, head: rows * row, dim: 1 };
        FwdParams { o, lse: self.lse, lse_batch: heads * rows, lse_head: rows, ..*whole }
    }
}

/// Elements of a partial row of O: what 16-byte stores fill.
fn row_elems(problem: &FwdProblem) -> i32 {
    problem.dims.head_dim_v.next_multiple_of(4) as i32
}

/// Rows of all parts.
fn part_rows(problem: &FwdProblem, keys: i32) -> u64 {
    let dims = problem.dims;
    let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
    rows.saturating_mul(u64::from(num_parts(problem, keys)))
}

/// Parts of so many keys of the longest sequence; 1 where a tile sees all keys, which 0 says.
#[must_use]
pub(crate) fn num_parts(problem: &FwdProblem, keys: i32) -> u32 {
    let keys = keys.unsigned_abs();
    if keys == 0 { 1 } else { problem.dims.seqlen_k.div_ceil(keys).max(1) }
}

/// Workspace of the parts, the tile counter's bytes before them included; 0 where there are none.
pub(crate) fn workspace_bytes(problem: &FwdProblem, keys: i32) -> u64 {
    if keys == 0 {
        return 0;
    }
    let row_bytes = 4 + 4 * u64::from(row_elems(problem).unsigned_abs());
    part_rows(problem, keys).saturating_mul(row_bytes).saturating_add(FIRST_BYTE + 16)
}

/// Why a problem's keys cannot be split.
///
/// # Errors
/// The field that forbids it.
pub fn splits(problem: &FwdProblem) -> Result<(), String> {
    if problem.mask.sink_columns > 0 {
        return Err(format!(
            "sink_columns {}: they are not in the part of the keys beside them",
            problem.mask.sink_columns
        ));
    }
    Ok(())
}

/// Keys of a part of a short query's, where the tile has `block_n` of them a block; 0: too few to split.
#[must_use]
pub fn split_keys(problem: &FwdProblem, block_n: i32) -> i32 {
    if splits(problem).is_err() {
        return 0;
    }
    let seqlen_k = problem.dims.seqlen_k;
    let mut keys = LEAST_KEYS.unsigned_abs().next_multiple_of(block_n.unsigned_abs());
    if seqlen_k < 2 * keys {
        return 0;
    }
    while seqlen_k.div_ceil(keys) > MOST_PARTS {
        keys *= 2;
    }
    keys as i32
}

/// What the forward kernel of a part is compiled for: f32 partial results; a learnable sink joins in the merge.
#[must_use]
pub fn part_spec(spec: &FwdSpec) -> FwdSpec {
    FwdSpec { dtype_o: DType::F32, write_lse: true, sink: false, ..*spec }
}

/// CTAs of the merging kernel.
#[must_use]
pub fn merge_grid(problem: &FwdProblem, num_sms: u32) -> u32 {
    let dims = problem.dims;
    let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
    crate::row_grid(rows, MERGE_THREADS, num_sms)
}

/// The merging kernel: [`FwdParams`] of the whole call, and [`KvParts`]. K and V lie in memory as
/// `stored`.
#[must_use]
pub fn merge(spec: &FwdSpec, stored: DType) -> KernelSource {
    // The whole spec: a row of very large scores is computed again from Q, K and V.
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kStored", &stored)];
    let entry = Entry {
        include: "fmha/common/merge_parts.cuh",
        constants: &constants,
        bounds: &format!("__launch_bounds__({MERGE_THREADS})"),
        params: "const __grid_constant__ FwdParams p, const __grid_constant__ KvParts parts",
        call: "split::merge<kSpec, kStored>(p, parts);",
    };
    crate::source(entry.render(), || {
        let text = format!(
            "#pragma once\n#include <fmha/spec.h>\n\nnamespace fmha {{\n\n{}\n}}  // namespace fmha\n",
            KvParts::c_definition()
        );
        [Header::rendered("fmha/kv_parts.h", text)]
    })
}

#[cfg(test)]
mod tests {
    use fmha_core::{Dims, MaskSpec};

    use super::*;

    fn decode(batch: u32, heads: u32, seqlen_k: u32) -> FwdProblem {
        let dims = Dims {
            batch,
            seqlen_q: 1,
            seqlen_k,
            num_heads_q: heads,
            num_heads_kv: 1,
            head_dim_qk: 128,
            head_dim_v: 128,
        };
        FwdProblem::batch(DType::Bf16, dims)
    }

    #[test]
    fn parts_depend_on_the_length_alone_and_are_at_most_128() {
        for (seqlen_k, expected) in [
            (0, 0),
            (511, 0),
            (512, 256),
            (32768, 256),
            (32769, 512),
            (1 << 20, 8192),
            (i32::MAX as u32, 1 << 24),
        ] {
            for (batch, heads) in [(1, 1), (64, 1), (1, 8)] {
                let keys = split_keys(&decode(batch, heads, seqlen_k), 128);
                assert_eq!(keys, expected, "{batch} sequences of {seqlen_k} keys, {heads} heads");
                assert!(keys == 0 || seqlen_k.div_ceil(keys as u32) <= MOST_PARTS);
            }
        }
        for block_n in [32, 64, 96, 128] {
            assert_eq!(split_keys(&decode(1, 1, 5000), block_n) % block_n, 0);
        }
    }

    #[test]
    fn the_workspace_holds_every_part_and_they_lie_apart() {
        let problem = decode(3, 5, 700).mask(MaskSpec::CAUSAL);
        let tile = crate::sm100::choose_tile(&problem, "sm_100a");
        assert_eq!(tile.split_keys, 256);
        let parts = KvParts::new(&problem, tile.split_keys, 0x1000);
        let rows = 3 * 5 * 3;
        assert!(parts.o.0 >= parts.lse.0 + rows * 4 && parts.lse.0 >= 0x1000 + 4);
        assert!(parts.o.0 + rows * 128 * 4 <= 0x1000 + workspace_bytes(&problem, tile.split_keys));
    }
}
