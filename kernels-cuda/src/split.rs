//! Split-KV: a short query's keys in parts, each a tile of its own, whose O and LSE a second kernel merges.
//!
//! Where the parts of a sequence end is decided on the device, by its own length and by how many parts the longest has
//! (`common/part_keys.cuh`): no length is needed on the host, and a graph of a call replays with any.

pub(crate) mod launch;

use fmha_core::abi::{AbiStruct as _, DevPtr, FwdParams, View};
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::FwdSpec;
use fmha_core::{DType, FwdProblem, abi_struct};

use crate::tree_mask;

/// The merging kernel's name in plans.
pub const MERGE_NAME: &str = "sm100_merge";

/// Threads of a CTA of the merging kernel.
pub const MERGE_THREADS: u32 = 256;

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
        /// Parts of the longest sequence, and at most of any.
        pub count: i32,
        /// Of whole blocks of so many keys a part consists.
        pub block_n: i32,
        /// Nothing.
        pub reserved: i32,
    }
}

impl KvParts {
    /// Those of a problem, of so many `keys` each where a sequence is the longest, in blocks of `block_n`, in a workspace.
    #[must_use]
    pub fn new(problem: &FwdProblem, keys: i32, block_n: i32, workspace: u64) -> Self {
        let lse = workspace + FIRST_BYTE;
        let o = (lse + part_rows(problem, keys) * 4).next_multiple_of(16);
        let (row, count) = (row_elems(problem), num_parts(problem, keys) as i32);
        Self { o: DevPtr::new(o), lse: DevPtr::new(lse), row, count, block_n, reserved: 0 }
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

/// How the parts of a row are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merging {
    /// K and V as they lie in memory, from which a row of very large scores is computed again.
    pub stored: DType,
    /// Warps that share a row: 1, 2, 4 or 8.
    pub warps: u32,
    /// The grid is launched to start while that of the parts ends (programmatic dependent launch, from sm_90 on).
    pub dependent: bool,
}

impl Merging {
    /// Of a problem's parts of so many `keys` each: a warp has some eight parts of a row, which it loads at once.
    #[must_use]
    pub fn new(problem: &FwdProblem, keys: i32, stored: DType, dependent: bool) -> Self {
        let warps = num_parts(problem, keys).div_ceil(8).next_power_of_two().min(MERGE_THREADS / 32);
        Self { stored, warps, dependent }
    }

    /// CTAs of the merging kernel.
    #[must_use]
    pub fn grid(&self, problem: &FwdProblem, num_sms: u32) -> u32 {
        let dims = problem.dims;
        let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
        crate::row_grid(rows, MERGE_THREADS / self.warps, num_sms)
    }
}

/// The merging kernel: [`FwdParams`] of the whole call, and [`KvParts`].
#[must_use]
pub fn merge(spec: &FwdSpec, merging: Merging) -> KernelSource {
    merging_kernel(spec, merging, false)
}

/// The same under a tree mask, of which the kernel takes [`TreeMask`](crate::tree_mask::TreeMask) too.
#[must_use]
pub fn merge_tree(spec: &FwdSpec, merging: Merging) -> KernelSource {
    merging_kernel(spec, merging, true)
}

fn merging_kernel(spec: &FwdSpec, merging: Merging, tree: bool) -> KernelSource {
    let Merging { stored, warps, dependent } = merging;
    let (include, tree_param, function, arguments) = if tree {
        ("fmha/common/merge_tree.cuh", tree_mask::PARAM, "merge_tree", "p, parts, tree")
    } else {
        ("fmha/common/merge_parts.cuh", "", "merge", "p, parts")
    };
    // The whole spec: a row of very large scores is computed again from Q, K and V.
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kStored", &stored)];
    let entry = Entry {
        include,
        constants: &constants,
        bounds: &format!("__launch_bounds__({MERGE_THREADS})"),
        params: &format!(
            "const __grid_constant__ FwdParams p, const __grid_constant__ KvParts parts{tree_param}"
        ),
        call: &format!(
            "split::{function}<kSpec, kStored, {MERGE_THREADS}, {warps}, {dependent}>({arguments});"
        ),
    };
    crate::source(entry.render(), || [header(), tree_mask::header()])
}

/// `fmha/kv_parts.h`: what merging kernels share with the host.
pub(crate) fn header() -> Header {
    let text = format!(
        "#pragma once\n#include <fmha/spec.h>\n\nnamespace fmha {{\n\n{}\n}}  // namespace fmha\n",
        KvParts::c_definition()
    );
    Header::rendered("fmha/kv_parts.h", text)
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
        let parts = KvParts::new(&problem, tile.split_keys, tile.block_n, 0x1000);
        let rows = 3 * 5 * 3;
        assert!(parts.o.0 >= parts.lse.0 + rows * 4 && parts.lse.0 >= 0x1000 + 4);
        assert!(parts.o.0 + rows * 128 * 4 <= 0x1000 + workspace_bytes(&problem, tile.split_keys));
    }
}
