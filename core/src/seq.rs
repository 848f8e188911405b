//! Sequences: equal or packed, physical or logical, and where each one's rows lie.

use crate::args::SeqArgs;
use crate::error::{ProblemError, ensure};
use crate::problem::FwdProblem;

/// How sequences lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SeqMode {
    /// Equal extents, a batch axis.
    Batch,
    /// Packed one after another; `cu_seqlens_q/k`, i32 `[batch + 1]`, say where each starts.
    #[doc(alias = "varlen")]
    #[doc(alias = "ragged")]
    Group {
        /// Rows of packed Q and O.
        total_q: u32,
        /// Rows of packed K and V.
        total_k: u32,
    },
}

/// One sequence, resolved: where its rows start and how many are logical.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqSpan {
    /// The sequence's index: the batch coordinate of masks, biases, descales and dropout.
    pub i_batch: u32,
    /// The batch index to address Q, O, K, V with: `i_batch`, or 0 when packed.
    pub storage_batch: u32,
    /// First row in Q and O.
    pub q_row: u32,
    /// Logical queries.
    pub seqlen_q: u32,
    /// First row in K and V.
    pub k_row: u32,
    /// Logical keys.
    pub seqlen_k: u32,
}

impl SeqSpan {
    /// Index into LSE of query `i`, head `i_head`.
    #[must_use]
    pub fn lse_index(&self, problem: &FwdProblem, i_head: u32, i: u32) -> usize {
        let row = self.q_row as usize + i as usize;
        match problem.mode {
            SeqMode::Batch => {
                let heads = problem.dims.num_heads_q as usize;
                let head = self.storage_batch as usize * heads + i_head as usize;
                head * problem.dims.seqlen_q as usize + row
            }
            SeqMode::Group { total_q, .. } => i_head as usize * total_q as usize + row,
        }
    }
}

/// Reads and checks the lengths from host memory: every sequence inside its tensor and its maximum.
///
/// # Errors
/// The first offset or length that is missing, negative, decreasing or too large, with its index.
pub fn spans(problem: &FwdProblem, seq: &SeqArgs<'_>) -> Result<Vec<SeqSpan>, ProblemError> {
    let dims = problem.dims;
    let group = matches!(problem.mode, SeqMode::Group { .. });
    let (total_q, total_k) = match problem.mode {
        SeqMode::Batch => (dims.seqlen_q, dims.seqlen_k),
        SeqMode::Group { total_q, total_k } => (total_q, total_k),
    };
    let q = Side { cu_name: "cu_seqlens_q", used_name: "seqused_q", total: total_q, longest: dims.seqlen_q };
    let k = Side { cu_name: "cu_seqlens_k", used_name: "seqused_k", total: total_k, longest: dims.seqlen_k };
    let cu_q = host_i32(q.cu_name, seq.cu_seqlens_q.as_ref(), group, dims.batch as usize + 1)?;
    let cu_k = host_i32(k.cu_name, seq.cu_seqlens_k.as_ref(), group, dims.batch as usize + 1)?;
    let used_q = host_i32(q.used_name, seq.seqused_q.as_ref(), problem.seqused_q, dims.batch as usize)?;
    let used_k = host_i32(k.used_name, seq.seqused_k.as_ref(), problem.seqused_k, dims.batch as usize)?;
    (0..dims.batch)
        .map(|i_batch| {
            let (q_row, seqlen_q) = q.rows(i_batch as usize, cu_q.as_deref(), used_q.as_deref())?;
            let (k_row, seqlen_k) = k.rows(i_batch as usize, cu_k.as_deref(), used_k.as_deref())?;
            let storage_batch = if group { 0 } else { i_batch };
            Ok(SeqSpan { i_batch, storage_batch, q_row, seqlen_q, k_row, seqlen_k })
        })
        .collect()
}

/// One side's names and bounds.
struct Side {
    cu_name: &'static str,
    used_name: &'static str,
    total: u32,
    longest: u32,
}

impl Side {
    /// First row and logical length of one sequence.
    fn rows(&self, i: usize, cu: Option<&[i32]>, used: Option<&[i32]>) -> Result<(u32, u32), ProblemError> {
        let &Side { cu_name, used_name, total, longest } = self;
        let (row, physical) = match cu {
            None => (0, longest),
            Some(cu) => {
                let (start, end) = (cu[i], cu[i + 1]);
                ensure!(start >= 0, cu_name, "{cu_name}[{i}] {start} is negative");
                ensure!(
                    end >= start,
                    cu_name,
                    "{cu_name}[{}] {end} is less than {cu_name}[{i}] {start}",
                    i + 1
                );
                let (start, end) = (start.unsigned_abs(), end.unsigned_abs());
                ensure!(
                    end <= total,
                    cu_name,
                    "{cu_name}[{}] {end} is larger than the {total} rows of the packed tensor",
                    i + 1
                );
                (start, end - start)
            }
        };
        let logical = match used {
            None => physical,
            Some(used) => {
                let length = used[i];
                ensure!(
                    u32::try_from(length).is_ok_and(|length| length <= physical),
                    used_name,
                    "{used_name}[{i}] {length} is not in 0..={physical}"
                );
                length.unsigned_abs()
            }
        };
        ensure!(
            logical <= longest,
            cu_name,
            "{cu_name}: sequence {i} has {logical} rows, more than the maximal length {longest}"
        );
        Ok((row, logical))
    }
}

/// `count` i32 from host memory, or `None` where the problem has none.
fn host_i32(
    name: &'static str,
    slice: Option<&crate::args::DevSlice<'_>>,
    wanted: bool,
    count: usize,
) -> Result<Option<Vec<i32>>, ProblemError> {
    if !wanted {
        return Ok(None);
    }
    let bytes = slice.and_then(crate::args::DevSlice::as_host);
    let Some(bytes) = bytes else {
        return Err(ProblemError::new(name, format!("{name} is missing or not in host memory")));
    };
    ensure!(
        bytes.len() >= count * 4,
        name,
        "{name} has {} bytes, but {count} i32 take {}",
        bytes.len(),
        count * 4
    );
    Ok(Some(bytes[..count * 4].chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()))
}
