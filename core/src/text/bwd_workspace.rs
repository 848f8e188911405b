//! Rows of a backward call, by which its launches are partitioned, and the offsets of its arrays in the workspace.

use crate::abi::{BwdParams, DevPtr};
use crate::bwd::BwdProblem;
use crate::score::Bias;

/// Offsets in bytes from the workspace's start, and the strides that locate a query row (`fmha/bwd.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BwdWorkspace {
    lse_log2: u64,
    delta: u64,
    score_origin: u64,
    dq_sums: Option<u64>,
    semaphores: Option<u64>,
    flags: u64,
    captured: Option<CapturedSums>,
    /// Bytes of the whole workspace.
    pub bytes: u64,
    stats_head: i64,
    stats_batch: i64,
}

/// Sums of dQ in global memory, to which the CTAs of key blocks add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DqSums {
    /// Number of columns of a row of dQ's sums.
    pub dim: u32,
    /// Number of sums for each row: one, to which all blocks of keys add, or one for each part of the blocks of
    /// keys.
    pub parts: u32,
    /// Whether each query block has a semaphore: the number of key blocks that have added to it, or whether one has
    /// stored it.
    pub has_semaphores: bool,
}

/// Memory for sums of the gradients of tensors that the score function captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CapturedSums {
    first: u64,
    elems: u64,
    parts: u64,
}

impl BwdWorkspace {
    /// Lays out the workspace of a kernel with query blocks of `block_m` rows, with these sums of dQ, if any, and
    /// `flags` numbers that only the kernel uses. `None` if it would be 2^62 bytes or more.
    #[must_use]
    pub fn new(problem: &BwdProblem, block_m: u32, sums: Option<DqSums>, flags: u64) -> Option<Self> {
        let dq_elems = sums.map_or(0, |sums| u64::from(sums.dim) * u64::from(sums.parts));
        let dims = problem.fwd.dims;
        let block = u64::from(block_m);
        let padded = u64::from(dims.seqlen_q).div_ceil(block) * block;
        let rows = padded.checked_mul(dims.batch.into())?;
        let elems = rows.checked_mul(dims.num_heads_q.into())?;
        let stats = elems.checked_mul(4)?.checked_next_multiple_of(256)?;
        let sum_bytes = elems.checked_mul(4)?.checked_mul(dq_elems)?;
        // Offset of the arrays with rows, after the schedulers' counters.
        let first = 256;
        let all_stats = stats.checked_mul(3)?;
        let semaphores = all_stats.checked_add(sum_bytes)?.checked_add(first)?;
        let has_semaphores = sums.is_some_and(|sums| sums.has_semaphores);
        let first_flag = semaphores.checked_add(if has_semaphores { elems / block * 4 } else { 0 })?;
        let bytes = first_flag.checked_add(flags.checked_mul(4)?)?;
        (bytes < 1 << 62).then_some(Self {
            lse_log2: first,
            delta: first + stats,
            score_origin: first + 2 * stats,
            dq_sums: sums.is_some().then_some(first + all_stats),
            semaphores: has_semaphores.then_some(semaphores),
            flags: first_flag,
            captured: None,
            bytes,
            stats_head: rows as i64,
            stats_batch: padded as i64,
        })
    }

    /// Appends f32 sums of the gradients of captured tensors, one copy for each part of the query rows: at most
    /// `most_parts`, and fewer if they would be too large. `None` if the workspace would be 2^62 bytes or more.
    #[must_use]
    pub fn with_captured(self, problem: &BwdProblem, most_parts: u64) -> Option<Self> {
        const MOST_BYTES: u64 = 256 << 20;
        let elems = problem.captured_elems().fold(0, u64::saturating_add);
        if elems == 0 {
            return Some(self);
        }
        let one = elems.checked_mul(4)?;
        let parts = (MOST_BYTES / one).clamp(1, most_parts.max(1));
        let first = self.bytes.checked_next_multiple_of(256)?;
        let bytes = first.checked_add(one.checked_mul(parts)?)?;
        let captured = Some(CapturedSums { first, elems, parts });
        (bytes < 1 << 62).then_some(Self { captured, bytes, ..self })
    }

    /// Number of elements of all gradients of captured tensors, and number of copies of their sums.
    #[must_use]
    pub fn captured(&self) -> (u64, u64) {
        self.captured.map_or((0, 0), |captured| (captured.elems, captured.parts))
    }

    /// The kernel arguments for this workspace at `address`.
    #[must_use]
    pub fn bind(&self, params: BwdParams, address: u64) -> BwdParams {
        BwdParams {
            schedulers: DevPtr::new(address),
            non_finite: DevPtr::new(address + self.flags),
            lse_log2: DevPtr::new(address + self.lse_log2),
            delta: DevPtr::new(address + self.delta),
            score_origin: DevPtr::new(address + self.score_origin),
            dq_sums: self.dq_sums.map_or(DevPtr::NULL, |offset| DevPtr::new(address + offset)),
            dq_semaphores: self.semaphores.map_or(DevPtr::NULL, |offset| DevPtr::new(address + offset)),
            stats_head: self.stats_head,
            stats_batch: self.stats_batch,
            captured_sums: self.captured.map_or(DevPtr::NULL, |sums| DevPtr::new(address + sums.first)),
            captured_elems: self.captured.map_or(0, |sums| sums.elems as i64),
            captured_parts: self.captured.map_or(0, |sums| sums.parts as i64),
            ..params
        }
    }
}

/// Numbers of rows that `fmha/row_bwd.h` computes one by one, also rows beyond their sequence's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BwdRows {
    /// Number of rows of dQ, of LSE and of delta.
    pub queries: u64,
    /// Number of rows of dK and of dV.
    pub keys: u64,
    /// Number of rows of dBias.
    pub bias: u64,
    /// Number of elements of dSink, one for each head.
    pub sinks: u64,
}

impl BwdRows {
    /// Row counts of a problem.
    #[must_use]
    pub fn of(problem: &BwdProblem) -> Self {
        let dims = problem.fwd.dims;
        let rows = |heads: u32, rows: u32, batch: u32| {
            (u64::from(heads) * u64::from(rows)).saturating_mul(u64::from(batch))
        };
        let bias = match (problem.dbias, problem.fwd.score.bias) {
            (Some(_), Bias::Elementwise(bias)) => {
                let shape = problem.fwd.shape_bias(bias.broadcast);
                rows(shape.head, shape.seq, shape.batch)
            }
            _ => 0,
        };
        Self {
            queries: rows(dims.num_heads_q, dims.seqlen_q, dims.batch),
            keys: rows(dims.num_heads_kv, dims.seqlen_k, dims.batch),
            bias,
            sinks: if problem.write_dsink { dims.num_heads_q.into() } else { 0 },
        }
    }

    /// Number of all rows.
    #[must_use]
    pub fn all(&self) -> u64 {
        [self.keys, self.bias, self.sinks].into_iter().fold(self.queries, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Dims, FwdProblem};

    const DIMS: Dims = Dims::batch(3).seqlens(70, 9).heads(2, 1).head_dim(8);

    #[test]
    fn every_part_lies_behind_the_one_before_and_inside() {
        for (block, parts, has_semaphores) in [(1, 1, false), (64, 1, false), (64, 1, true), (64, 3, false)] {
            let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, DIMS));
            let sums = Some(DqSums { dim: 8, parts, has_semaphores });
            let workspace = BwdWorkspace::new(&problem, block, sums, 5).unwrap();
            let padded = u64::from(DIMS.seqlen_q.div_ceil(block) * block);
            assert_eq!(workspace.stats_batch, padded as i64);
            let rows = padded * 3 * 2;
            let sums = workspace.dq_sums.unwrap();
            assert!(workspace.lse_log2 >= 4 && workspace.delta >= workspace.lse_log2 + rows * 4);
            assert!(workspace.score_origin >= workspace.delta + rows * 4);
            assert!(sums >= workspace.score_origin + rows * 4);
            let end = sums + rows * 8 * 4 * u64::from(parts);
            let semaphores = if has_semaphores { rows / u64::from(block) * 4 } else { 0 };
            assert_eq!(
                (workspace.semaphores, workspace.bytes),
                (has_semaphores.then_some(end), end + semaphores + 20)
            );
            assert_eq!(workspace.flags, end + semaphores);
        }
    }

    #[test]
    fn a_workspace_that_no_memory_holds_is_none() {
        let dims = Dims { batch: 1 << 30, seqlen_q: 1 << 30, ..DIMS };
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims));
        let sums = Some(DqSums { dim: 128, parts: 1, has_semaphores: false });
        assert_eq!(BwdWorkspace::new(&problem, 64, sums, 0), None);
        let problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, Dims { seqlen_q: 0, ..DIMS }));
        let sums = Some(DqSums { dim: 256, parts: 1 << 24, has_semaphores: false });
        assert!(BwdWorkspace::new(&problem, 64, sums, 0).is_some(), "many sums of no rows");
    }
}
