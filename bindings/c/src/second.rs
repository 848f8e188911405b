//! A second KV cache: a plan reads its description, and each run passes its tensors.

use std::ptr::null;

use fmha::{Error, FwdProblem, Masks, ProblemError, SecondArgs, SecondCache};

use crate::Result;
use crate::host::{self, flag, key_lists, layouts, none, pointed, size, strides};
use crate::masks;
use crate::plan::{Memory, absent, unwanted};
use crate::structs::{FmhaArgs, FmhaProblem, FmhaSecond, FmhaSecondArgs};

/// Reads the second KV cache of a problem whose other fields are already read.
///
/// # Safety
/// Host pointers of `second` are null or point to what `fmha.h` says.
pub(crate) unsafe fn read(
    second: &FmhaSecond,
    given: &FmhaProblem,
    problem: &FwdProblem,
) -> Result<SecondCache> {
    none("reserved", second.reserved)?;
    // SAFETY: the caller keeps the contract of `read`.
    let (lists, masks) = unsafe { (pointed(second.lists)?, pointed(second.masks)?) };
    let of_second = FmhaProblem { page_size: second.page_size, packed_k: second.packed_k, ..*given };
    let (_, layout) = layouts(&of_second)?;
    let k = strides(&second.k);
    let v = if problem.cache.v_in_k { k } else { strides(&second.v) };
    let cache = SecondCache::new(problem, layout, size("seqlen_k", second.seqlen_k)?)
        .k(k)
        .v(v)
        .seqused_k(flag("seqused_k", second.seqused_k)?)
        .lse_without_sink(flag("lse_without_sink", second.lse_without_sink)?);
    let alone = cache.alone(problem);
    let lists = lists.map(|lists| key_lists(&alone, lists)).transpose()?;
    let masks = match masks {
        None => Masks::default(),
        Some(masks) => masks::read(masks, alone)?.masks,
    };
    let others = [("mask_bits_heads", masks.bits.is_some()), ("lists_heads", masks.block_lists.is_some())];
    if let Some((field, _)) = others.into_iter().find(|(_, is_there)| *is_there) {
        let text = format!("masks.{field} is given, but a second cache has intervals alone");
        return Err(ProblemError::new(field, text).into());
    }
    Ok(cache.lists(lists).intervals(masks.intervals))
}

/// Marks an error as one of the second cache: the error's field is `second`, and its text starts with "second.".
pub(crate) fn named(error: Error) -> Error {
    match error {
        Error::Problem(error) => ProblemError::new("second", format!("second.{}", error.text)).into(),
        other => other,
    }
}

impl Memory {
    /// The second cache of a run.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`](crate::FmhaPlan::run).
    #[inline]
    pub(crate) unsafe fn second<'a>(
        self,
        problem: &FwdProblem,
        given: &FmhaArgs,
    ) -> Result<Option<SecondArgs<'a>>> {
        let Some(cache) = &problem.second else {
            unwanted("second", given.second, "it")?;
            return Ok(None);
        };
        // SAFETY: the caller keeps the contract of `second`.
        let Some(second) = (unsafe { pointed(given.second).map_err(named)? }) else {
            return Err(ProblemError::new("second", "second is null, but the problem has one").into());
        };
        // SAFETY: the caller keeps the contract of `second`.
        unsafe { self.alone(&cache.alone(problem), second, given) }.map(Some).map_err(named)
    }

    /// Reads the arguments of a call on the second cache alone.
    ///
    /// # Safety
    /// As [`Self::second`].
    unsafe fn alone<'a>(
        self,
        alone: &FwdProblem,
        second: &FmhaSecondArgs,
        given: &FmhaArgs,
    ) -> Result<SecondArgs<'a>> {
        // Arguments with the keys of the second cache, and without the masks of the first cache.
        let given = FmhaArgs {
            cu_seqlens_k: second.cu_seqlens_k,
            seqused_k: second.seqused_k,
            block_table: second.block_table,
            indices: second.indices,
            topk_length: second.topk_length,
            intervals: second.intervals,
            mask_bits: null(),
            kv_num_blocks: null(),
            kv_indices: null(),
            full_kv_num_blocks: null(),
            full_kv_indices: null(),
            total_k: second.total_k,
            num_pages: second.num_pages,
            max_pages: second.max_pages,
            total_new: 0,
            ..*given
        };
        let totals = host::totals(alone, &given)?;
        let extents = alone.extents(totals);
        let (of_k, stored_k) = alone.k_in_memory(extents.k);
        // SAFETY: the caller keeps the contract of `alone`.
        unsafe {
            let k = self.input("k", second.k, (alone.strides.k, of_k), stored_k)?;
            let v = if alone.cache.v_in_k {
                absent!(second, "it: v_in_k 1", v);
                None
            } else {
                Some(self.input("v", second.v, (alone.strides.v, extents.v), alone.stored_v())?)
            };
            let mut seq = self.seq(alone, &given, totals)?;
            // Queries are those of the call itself.
            (seq.cu_seqlens_q, seq.seqused_q, seq.totals.total_q) = (None, None, None);
            let masks = self.masks(alone, &given, totals)?;
            Ok(SecondArgs::new(k, v).seq(seq).intervals(masks.intervals))
        }
    }
}
