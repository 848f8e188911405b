//! The checking mode of masks as data: reports entries that a kernel would clamp or ignore.

use std::collections::BTreeSet;

use super::{BlockList, BlockLists, FOUR_BYTES, LIST_NAMES};
use crate::args::{DevSlice, MaskArgs, SeqArgs};
use crate::backend::zeros;
use crate::error::{ProblemError, Result, ensure};
use crate::layout::{QLayout, Shape, Strides};
use crate::problem::{FwdProblem, ValidFwd};
use crate::seq::{SeqSpan, checked_spans};

/// Reads the masks of a call with `read`, which fills a buffer from the front of a slice, and checks that each
/// endpoint is in 0..=seqlen_k, each count in 0..=max_blocks, and that each index is a block of keys and occurs
/// once in the two lists of a row.
///
/// `seqlen_k` is the sequence's length if each sequence has its own mask, and the problem's if all share one. Rows
/// past a sequence's queries are not checked. `seq` and `masks` have passed the argument check, and the lengths of
/// `seq` lie in host memory.
///
/// # Errors
/// The first entry that is wrong, with its index; memory for the copies that the system refuses; what `read` said.
pub fn check_masks(
    problem: &FwdProblem,
    seq: &SeqArgs<'_>,
    masks: &MaskArgs<'_>,
    mut read: impl FnMut(DevSlice<'_>, &mut [u8]) -> Result<()>,
) -> Result<()> {
    if problem.masks.is_empty() {
        return Ok(());
    }
    let spans = checked_spans(problem, seq)?;
    let mut copy = |slice: Option<DevSlice<'_>>, strides: Strides, shape: Shape| -> Result<Numbers> {
        let wanted = ValidFwd::extent_bytes(strides, shape, FOUR_BYTES);
        let Some(slice) = slice else { return Ok(Numbers { bytes: vec![], strides }) };
        let mut bytes = zeros("a copy of the masks", slice.bytes().min(wanted))?;
        read(slice, &mut bytes)?;
        Ok(Numbers { bytes, strides })
    };
    if let Some(intervals) = problem.masks.intervals {
        let shape = problem.shape_intervals(&intervals, seq.totals);
        let numbers = copy(masks.intervals, intervals.strides, shape)?;
        let own = intervals.axes.per_batch || problem.layout.q == QLayout::Packed;
        for span in masked_spans(&spans, own) {
            let most = problem.whole_seqlen_k(if own { span.seqlen_k } else { problem.dims.seqlen_k });
            let rows = if own { span.seqlen_q } else { problem.dims.seqlen_q };
            for (head, i) in (0..shape.head).flat_map(|head| (0..rows).map(move |i| (head, i))) {
                for m in 0..intervals.endpoints {
                    let batch = if intervals.axes.per_batch { span.q_batch } else { 0 };
                    let found = numbers.at(batch, span.q_row + i, head, m);
                    ensure!(
                        u32::try_from(found).is_ok_and(|found| found <= most),
                        "intervals",
                        "intervals: endpoint {m} of sequence {}, head {head}, query {i} is {found}, not in 0..={most}",
                        span.i_batch
                    );
                }
            }
        }
    }
    if let Some(lists) = problem.masks.block_lists {
        let mut of = |list: Option<BlockList>, slices: [Option<DevSlice<'_>>; 2]| {
            let Some(list) = list else { return Ok(None) };
            let [counts, indices] = slices;
            Ok::<_, crate::error::Error>(Some((
                copy(counts, list.counts, problem.shape_block_lists(&lists, 1))?,
                copy(indices, list.indices, problem.shape_block_lists(&lists, list.max_blocks))?,
                list.max_blocks,
            )))
        };
        let both = [
            of(lists.partial, [masks.kv_num_blocks, masks.kv_indices])?,
            of(lists.full, [masks.full_kv_num_blocks, masks.full_kv_indices])?,
        ];
        for span in masked_spans(&spans, lists.axes.per_batch) {
            check_lists(problem, &lists, &both, span)?;
        }
    }
    Ok(())
}

/// The spans to check: each sequence, or only the first if all share one mask.
fn masked_spans(spans: &[SeqSpan], own: bool) -> impl Iterator<Item = &SeqSpan> {
    spans.iter().take(if own { usize::MAX } else { 1 })
}

/// A copy of a mask's tensor.
struct Numbers {
    bytes: Vec<u8>,
    strides: Strides,
}

impl Numbers {
    fn at(&self, batch: u32, seq: u32, head: u32, dim: u32) -> i32 {
        let at = self.strides.offset(batch, seq, head, dim) as usize * 4;
        self.bytes.get(at..at + 4).map_or(0, bytemuck::pod_read_unaligned)
    }
}

/// A list: counts, indices, and the most indices that a row can have.
type List = (Numbers, Numbers, u32);

fn check_lists(
    problem: &FwdProblem,
    lists: &BlockLists,
    both: &[Option<List>; 2],
    span: &SeqSpan,
) -> std::result::Result<(), ProblemError> {
    let own = lists.axes.per_batch;
    let [rows, keys] = match own {
        true => [span.seqlen_q, span.seqlen_k],
        false => [problem.dims.seqlen_q, problem.dims.seqlen_k],
    };
    let blocks = problem.whole_seqlen_k(keys).div_ceil(lists.block_k);
    let batch = if own { span.i_batch } else { 0 };
    for (head, row) in
        (0..lists.axes.heads).flat_map(|head| (0..rows.div_ceil(lists.block_q)).map(move |row| (head, row)))
    {
        let mut listed = BTreeSet::new();
        for ([of_counts, of_indices], list) in LIST_NAMES.into_iter().zip(both) {
            let Some((counts, indices, most)) = list else { continue };
            let count = counts.at(batch, row, head, 0);
            ensure!(
                u32::try_from(count).is_ok_and(|count| count <= *most),
                of_counts,
                "{of_counts}[{batch}][{head}][{row}] {count} is not in 0..={most} (the indices of a row)"
            );
            for at in 0..count.unsigned_abs() {
                let block = indices.at(batch, row, head, at);
                ensure!(
                    u32::try_from(block).is_ok_and(|block| block < blocks),
                    of_indices,
                    "{of_indices}[{batch}][{head}][{row}][{at}] {block} is not in 0..{blocks} (blocks of block_k {})",
                    lists.block_k
                );
                ensure!(
                    listed.insert(block),
                    of_indices,
                    "{of_indices}[{batch}][{head}][{row}][{at}] {block} is listed twice"
                );
            }
        }
    }
    Ok(())
}
