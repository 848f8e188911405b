//! The checking mode: a call's lengths, read back from the device and checked before anything is launched.

use crate::args::{BlockTable, DevSlice, SeqArgs};
use crate::error::{Error, Result};
use crate::problem::FwdProblem;
use crate::seq::spans;

/// Reads the lengths of `seq` with `read`, which fills a buffer from the front of a slice, and checks
/// them by the rules of [`spans`]: offsets that do not decrease and stay inside their tensors, lengths
/// inside their sequences, pages that exist.
///
/// `seq` has passed the argument check. Work that writes the lengths is done, or `read` waits for it.
///
/// # Errors
/// The first that is wrong, with its index; memory for the copies that the system refuses; what `read`
/// said.
pub fn check_lengths(
    problem: &FwdProblem,
    seq: &SeqArgs<'_>,
    mut read: impl FnMut(DevSlice<'_>, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let mut copy = |slice: Option<DevSlice<'_>>, elems: u64| -> Result<Option<Vec<u8>>> {
        let Some(slice) = slice else { return Ok(None) };
        let mut bytes = zeros(slice.bytes().min(elems.saturating_mul(4)))?;
        read(slice, &mut bytes)?;
        Ok(Some(bytes))
    };
    let batch = u64::from(problem.dims.batch);
    let cu_seqlens_q = copy(seq.cu_seqlens_q, batch + 1)?;
    let cu_seqlens_k = copy(seq.cu_seqlens_k, batch + 1)?;
    let seqused_q = copy(seq.seqused_q, batch)?;
    let seqused_k = copy(seq.seqused_k, batch)?;
    let max_pages = seq.block_table.map_or(0, |table| table.max_pages);
    let pages = copy(seq.block_table.map(|table| table.pages), batch * u64::from(max_pages))?;
    let copied = SeqArgs {
        cu_seqlens_q: cu_seqlens_q.as_deref().map(DevSlice::host),
        cu_seqlens_k: cu_seqlens_k.as_deref().map(DevSlice::host),
        seqused_q: seqused_q.as_deref().map(DevSlice::host),
        seqused_k: seqused_k.as_deref().map(DevSlice::host),
        block_table: pages.as_deref().map(|pages| BlockTable { pages: DevSlice::host(pages), max_pages }),
        ..*seq
    };
    spans(problem, &copied)?;
    Ok(())
}

fn zeros(bytes: u64) -> Result<Vec<u8>> {
    let refused = || Error::System {
        what: format!("{bytes} bytes for a copy of the lengths"),
        text: "the system has no such memory".to_owned(),
    };
    let size = usize::try_from(bytes).map_err(|_| refused())?;
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(size).map_err(|_| refused())?;
    buffer.resize(size, 0);
    Ok(buffer)
}
