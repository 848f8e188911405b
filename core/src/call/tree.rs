//! The tree mask, for code that runs on the host.

use crate::args::{CacheArgs, SeqArgs};
use crate::problem::FwdProblem;
use crate::seq::SeqSpan;

/// Mask of a sequence's last keys for each of its queries, in host memory.
#[derive(Clone, Copy, Debug)]
pub struct TreeMask<'a> {
    words: &'a [u8],
    /// Number of u32 words in a query's row of the tree mask.
    row_words: u32,
    /// Number of queries of a sequence; with packed rows the batch index is 0.
    rows: u32,
}

impl<'a> TreeMask<'a> {
    /// Tree mask of a call whose arguments have passed the check; `None` if the call has none.
    #[must_use]
    pub fn of(problem: &FwdProblem, cache: &CacheArgs<'a>, seq: &SeqArgs<'_>) -> Option<Self> {
        let words = cache.tree_mask.as_ref().filter(|_| problem.cache.tree_mask)?.as_host()?;
        let rows = seq.totals.total_q.unwrap_or(problem.dims.seqlen_q);
        Some(Self { words, row_words: problem.tree_mask_words(), rows })
    }

    /// Whether query `i` of a sequence sees key `j`.
    #[must_use]
    pub fn visible(&self, span: &SeqSpan, i: u32, j: u32) -> bool {
        let Some(bit) = (j + span.seqlen_q).checked_sub(span.seqlen_k) else { return true };
        let row = span.q_batch as usize * self.rows as usize + span.q_row as usize + i as usize;
        let at = (row * self.row_words as usize + (bit / 32) as usize) * 4;
        let word = self.words.get(at..at + 4).map_or(0, bytemuck::pod_read_unaligned::<u32>);
        word >> (bit % 32) & 1 != 0
    }
}
