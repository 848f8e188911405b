//! The checking mode: a call's lengths, read back from the device and checked before anything is launched.

use crate::args::{BlockTable, DevSlice, MaskArgs, SeqArgs};
use crate::backend::zeros;
use crate::error::{ProblemError, Result};
use crate::masks::check_masks;
use crate::problem::FwdProblem;
use crate::seq::checked_spans;

/// Reads the lengths of `seq` with `read`, which fills a buffer from the front of a slice, and checks
/// them by the rules of [`checked_spans`]: offsets that do not decrease and stay inside their tensors, lengths
/// inside their sequences, pages that exist. Lengths of lists of keys are at most `topk`. Masks as data are checked by
/// the rules of [`check_masks`].
///
/// `seq` has passed the argument check. Work that writes the lengths is done, or `read` waits for it.
///
/// # Errors
/// The first that is wrong, with its index; memory for the copies that the system refuses; what `read`
/// said.
pub fn check_lengths(
    problem: &FwdProblem,
    seq: &SeqArgs<'_>,
    masks: Option<&MaskArgs<'_>>,
    mut read: impl FnMut(DevSlice<'_>, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let mut copy = |slice: Option<DevSlice<'_>>, elems: u64| -> Result<Option<Vec<u8>>> {
        let Some(slice) = slice else { return Ok(None) };
        let mut bytes = zeros("a copy of the lengths", slice.bytes().min(elems.saturating_mul(4)))?;
        read(slice, &mut bytes)?;
        Ok(Some(bytes))
    };
    let batch = u64::from(problem.dims.batch);
    let cu_seqlens_q = copy(seq.cu_seqlens_q, batch + 1)?;
    let cu_seqlens_k = copy(seq.cu_seqlens_k, batch + 1)?;
    let cu_seqlens_new = copy(seq.cu_seqlens_new, batch + 1)?;
    let seqused_q = copy(seq.seqused_q, batch)?;
    let seqused_k = copy(seq.seqused_k, batch)?;
    let max_pages = seq.block_table.map_or(0, |table| table.max_pages);
    let listed = problem.lists.map_or(0, |lists| lists.length_elems(problem, seq.totals));
    let topk_length = copy(seq.topk_length, listed)?;
    let pages = copy(seq.block_table.map(|table| table.pages), batch * u64::from(max_pages))?;
    let copied = SeqArgs {
        cu_seqlens_q: cu_seqlens_q.as_deref().map(DevSlice::host),
        cu_seqlens_k: cu_seqlens_k.as_deref().map(DevSlice::host),
        cu_seqlens_new: cu_seqlens_new.as_deref().map(DevSlice::host),
        seqused_q: seqused_q.as_deref().map(DevSlice::host),
        seqused_k: seqused_k.as_deref().map(DevSlice::host),
        block_table: pages.as_deref().map(|pages| BlockTable { pages: DevSlice::host(pages), max_pages }),
        totals: seq.totals,
        // An index beyond the keys is absent by contract, so no entry can be wrong.
        indices: None,
        topk_length: None,
        arrivals: None,
    };
    checked_spans(problem, &copied)?;
    if let (Some(lists), Some(lengths)) = (problem.lists, &topk_length) {
        check_list_lengths(lengths, lists.topk)?;
    }
    masks.map_or(Ok(()), |masks| check_masks(problem, &copied, masks, read))
}

/// Checks that no `topk_length` exceeds the list's capacity. A run clamps such a number to `topk`, but it is a sign
/// of a fault.
fn check_list_lengths(lengths: &[u8], topk: u32) -> Result<(), ProblemError> {
    let numbers = lengths.chunks_exact(4).filter_map(|bytes| bytes.try_into().ok().map(i32::from_ne_bytes));
    match numbers.enumerate().find(|&(_, length)| i64::from(length) > i64::from(topk)) {
        None => Ok(()),
        Some((at, length)) => {
            Err(ProblemError::new("topk_length", format!("topk_length[{at}] {length} is above topk {topk}")))
        }
    }
}

/// Copies the front of a slice of host memory.
///
/// # Errors
/// Memory of a device.
pub(crate) fn read_host(slice: DevSlice<'_>, bytes: &mut [u8]) -> Result<()> {
    let from = slice.as_host().and_then(|host| host.get(..bytes.len()));
    let from = from.ok_or_else(|| ProblemError::new("masks", "masks: a tensor is not in host memory"))?;
    bytes.copy_from_slice(from);
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::{DType, Dims, KvLayout, QLayout, Totals};

    const DIMS: Dims = Dims::batch(2).seqlens(4, 6).heads(1, 1).head_dim(8);

    /// Checks the lengths, with copies that work like a device's download, and counts the copied bytes.
    fn check(problem: &FwdProblem, seq: &SeqArgs<'_>) -> (Result<()>, usize) {
        let mut read = 0;
        let checked = check_lengths(problem, seq, None, |slice, bytes| {
            bytes.copy_from_slice(&slice.as_host().unwrap()[..bytes.len()]);
            read += bytes.len();
            Ok(())
        });
        (checked, read)
    }

    /// Lengths of a call with seven queries, and four pages of two keys.
    fn lengths<'a>(cu: &'a [i32], used: &'a [i32], pages: &'a [i32]) -> SeqArgs<'a> {
        SeqArgs {
            totals: Totals { total_q: Some(7), total_k: None, num_pages: Some(4), ..Totals::NONE },
            cu_seqlens_q: Some(DevSlice::host(cu)),
            seqused_k: Some(DevSlice::host(used)),
            block_table: Some(BlockTable { pages: DevSlice::host(pages), max_pages: 3 }),
            ..SeqArgs::default()
        }
    }

    #[test]
    fn what_is_read_back_is_checked_as_on_the_host_and_no_more_is_read_than_is_used() {
        let problem = FwdProblem::new(QLayout::Packed, KvLayout::Paged { page_size: 2 }, DType::F16, DIMS);
        let problem = problem.clone().seqused_k(true);
        // Entries beyond the used ones are invalid here, and must not be read.
        let (cu, used, pages) = (&[0, 3, 7, -1, -1], &[5, 6, -1], &[0, 1, 2, 3, 3, 0, -1]);
        let (checked, read) = check(&problem, &lengths(cu, used, pages));
        checked.unwrap();
        assert_eq!(read, 4 * (3 + 2 + 6));
        for (seq, text) in [
            (lengths(&[0, 4, 3], used, pages), "cu_seqlens_q[2] 3 is less than"),
            (lengths(cu, &[5, 7], pages), "seqused_k[1] 7"),
            (lengths(cu, used, &[0, 1, 2, 3, 3, 4]), "block_table[1][2] 4 is not in 0..4"),
        ] {
            let error = check(&problem, &seq).0.unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn packed_keys_and_packed_new_rows_are_read_back_too() {
        let (cu, new, used) = ([0, 2, 4], [0, 1, 3], [1, 2]);
        let packed = SeqArgs {
            totals: Totals::packed(4, 4),
            cu_seqlens_q: Some(DevSlice::host(&cu)),
            cu_seqlens_k: Some(DevSlice::host(&cu)),
            ..SeqArgs::default()
        };
        let (checked, read) = check(&FwdProblem::group(DType::F16, DIMS), &packed);
        checked.unwrap();
        assert_eq!(read, 4 * (3 + 3));

        let problem = FwdProblem::batch(DType::F16, DIMS);
        let append = Some(crate::Append::packed(&problem, 2));
        let appended = SeqArgs {
            totals: Totals { total_new: Some(3), ..Totals::NONE },
            cu_seqlens_new: Some(DevSlice::host(&new)),
            seqused_k: Some(DevSlice::host(&used)),
            ..SeqArgs::default()
        };
        let (checked, read) = check(&problem.clone().seqused_k(true).append(append), &appended);
        checked.unwrap();
        assert_eq!(read, 4 * (3 + 2));
    }

    #[test]
    fn a_list_that_is_said_to_be_longer_than_topk_is_named() {
        let mut lists = crate::KeyLists::new(&FwdProblem::batch(DType::F16, DIMS), 3);
        lists.length = crate::ListLength::Token;
        let problem = FwdProblem::batch(DType::F16, DIMS).lists(lists);
        for (lengths, wrong) in [
            // The last entry is beyond the tokens, and must not be read.
            ([3, 0, -1, 2, 3, 3, 1, 3, 9], None),
            ([3, 0, -1, 2, 3, 4, 1, 3, 0], Some("topk_length[5] 4 is above topk 3")),
        ] {
            let seq = SeqArgs { topk_length: Some(DevSlice::host(&lengths)), ..SeqArgs::default() };
            let (checked, read) = check(&problem, &seq);
            assert_eq!(read, 4 * 8);
            assert_eq!(checked.err().map(|error| error.to_string()).as_deref(), wrong);
        }
    }

    #[test]
    fn what_reading_back_says_is_passed_on() {
        let problem = FwdProblem::group(DType::F16, DIMS);
        let cu = [0, 2, 4];
        let seq = SeqArgs {
            totals: Totals::packed(4, 4),
            cu_seqlens_q: Some(DevSlice::host(&cu)),
            cu_seqlens_k: Some(DevSlice::host(&cu)),
            ..SeqArgs::default()
        };
        let failed = check_lengths(&problem, &seq, None, |_, _| Err(Error::NoDevice("gone".to_owned())));
        assert_eq!(failed.unwrap_err().to_string(), "gone");
    }
}
