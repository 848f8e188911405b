//! Checks of a problem, and refusals of what this crate does not take.

use fmha::{Bias, BwdProblem, CacheUse, KvLayout, QLayout, VLayout};

use super::{Problem, Whole};
use crate::error::{Error, Result};
use crate::partition::{Axis, Partition};
use crate::program::MOST_CAPTURED;

impl Whole {
    /// Checks what `rank` says, and that this crate takes it.
    ///
    /// # Errors
    /// The field, as a fault of `rank`.
    pub(crate) fn new(problem: &Problem, rank: u32, ranks: u32) -> Result<Self> {
        let wrong = |field: &str, text: String| Err(Error::new(rank, field, text));
        let whole = &problem.whole;
        if ranks == 0 {
            return wrong("ranks", "0 ranks have no rows".to_owned());
        }
        whole.clone().validate().map_err(|error| Error::of(rank, &error.into()))?;
        for (field, there, what) in [
            ("batch", whole.dims.batch == 0, "a batch of 0 is"),
            ("kv_layout", whole.layout.kv.is_paged(), "pages are"),
            ("v_layout", whole.layout.v != VLayout::RowMajor, "a column-major V is"),
            ("seqused_q", whole.layout.seqused_q, "lengths that lie in memory are"),
            ("seqused_k", whole.layout.seqused_k, "lengths that lie in memory are"),
            ("cache", whole.cache != CacheUse::default(), "append, rotary, quantised caches and trees are"),
            ("arrivals", whole.arrivals > 0, "keys that come while a kernel runs are"),
            ("lists", whole.lists.is_some(), "lists of keys are"),
            ("second", whole.second.is_some(), "a second cache is"),
            ("block_scales", whole.block_scales.is_some(), "scales by blocks are"),
            ("outputs", !whole.outputs.is_empty(), "a small output (row_max, head_max, key_sum) is"),
            ("write_keep_mask", whole.dropout.write_keep_mask, "a keep mask is"),
            ("part", !whole.part.is_whole(), "a part of a longer sequence is"),
            ("dtype_o", whole.dtypes.o.is_fp8(), "an FP8 O is"),
        ] {
            if there {
                return wrong(field, format!("{what} for one device alone, not for ranks (here {ranks})"));
            }
        }
        let is_packed = whole.layout.q == QLayout::Packed;
        if is_packed != (whole.layout.kv == KvLayout::Packed) {
            return wrong("kv_layout", "either both queries and keys are packed, or neither".to_owned());
        }
        let wanted = problem.dcaptured.len();
        if wanted > MOST_CAPTURED {
            return wrong(
                "dcaptured",
                format!("{wanted} gradients of captured tensors are more than {MOST_CAPTURED}"),
            );
        }
        let gradients = BwdProblem::new(whole.clone()).dcaptured(problem.dcaptured.clone());
        if wanted > 0 {
            gradients.validate().map_err(|error| Error::of(rank, &error.into()))?;
        }
        if is_packed && matches!(whole.score.bias, Bias::Elementwise(_)) {
            return wrong("bias", "packed rows of several ranks take ALiBi or no bias".to_owned());
        }
        let axis = |side: &str, partition: &Partition, cu_seqlens: &Option<Vec<u32>>, seqlen| {
            let wrong = |(field, text)| Error::new(rank, field, text);
            if partition.ranks() != ranks {
                let text = format!("partition has {} ranks, the group {ranks}", partition.ranks());
                return Err(wrong(("partition".to_owned(), text)));
            }
            let field = format!("cu_seqlens_{side}");
            let rows = match (is_packed, cu_seqlens) {
                (false, None) => seqlen,
                (true, Some(cu_seqlens)) => packed_rows(&field, cu_seqlens, whole.dims.batch, side, seqlen)
                    .map_err(|text| wrong((field, text)))?,
                _ => {
                    let text = format!("{field} is given iff the problem is packed: {cu_seqlens:?}");
                    return Err(wrong((field, text)));
                }
            };
            if partition.rows() != rows {
                let text =
                    format!("partition has {} rows of side {side}, the problem {rows}", partition.rows());
                return Err(wrong(("partition".to_owned(), text)));
            }
            let (batch, cu_seqlens) = (whole.dims.batch, cu_seqlens.clone());
            Ok(Axis { batch, cu_seqlens, partition: partition.clone() })
        };
        let q = axis("q", &problem.q, &problem.cu_seqlens_q, whole.dims.seqlen_q)?;
        let k = axis("k", &problem.k, &problem.cu_seqlens_k, whole.dims.seqlen_k)?;
        if k.partition.is_replicated() && ranks > 1 {
            return wrong("partition", format!("keys that every rank has are for 1 rank, not for {ranks}"));
        }
        // A band that kernels have built in shows which keys a piece sees.
        let (fwd, slopes) = match whole.built_in(wanted > 0) {
            Some(folded) if folded.problem.clone().validate().is_ok() => (folded.problem, folded.slopes),
            _ => (whole.clone(), None),
        };
        let (code_of_part, part_numbers) =
            fwd.code.of_part().map_err(|error| Error::of(rank, &error.into()))?;
        Ok(Self {
            fwd,
            code_of_part,
            part_numbers,
            slopes,
            dcaptured: problem.dcaptured.clone(),
            rank,
            ranks,
            ranks_per_host: ranks,
            flags: false,
            head_groups: 1,
            most_rows: u64::MAX,
            q,
            k,
        })
    }
}

/// Places of a packed tensor's rows, from the offsets of its sequences.
fn packed_rows(field: &str, cu_seqlens: &[u32], batch: u32, side: &str, seqlen: u32) -> Result<u32, String> {
    let ascends = cu_seqlens.first() == Some(&0) && cu_seqlens.is_sorted();
    if !ascends || cu_seqlens.len() != batch as usize + 1 {
        return Err(format!("{field} {cu_seqlens:?} does not ascend from 0 over {batch} sequences"));
    }
    if let Some(long) = cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]).find(|&rows| rows > seqlen) {
        return Err(format!("{field} has a sequence of {long}, longer than seqlen_{side} {seqlen}"));
    }
    Ok(cu_seqlens.last().copied().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use fmha::{CapturedGrad, DType, Dims, FwdProblem};

    use super::*;

    #[test]
    fn what_one_device_alone_takes_is_refused_by_its_field() {
        let dims = Dims::batch(1).seqlens(8, 8).heads(1, 1).head_dim(8);
        let whole = FwdProblem::batch(DType::Bf16, dims);
        let field = |whole: FwdProblem| {
            let refused = Whole::new(&Problem::new(whole, Partition::contiguous(8, 2)), 1, 2).map(|_| ());
            refused.map_err(|error| (error.rank, error.field))
        };
        assert_eq!(field(whole.clone()), Ok(()));
        let keeps = {
            let mut whole = whole.clone().p_drop(0.5);
            whole.dropout.write_keep_mask = true;
            whole
        };
        for (wanted, whole) in [
            ("seqused_q", whole.clone().seqused_q(true)),
            ("seqused_k", whole.clone().seqused_k(true)),
            ("arrivals", whole.clone().arrivals(4)),
            ("lists", whole.clone().lists(fmha::KeyLists::new(&whole, 4))),
            ("second", whole.clone().second(fmha::SecondCache::new(&whole, fmha::KvLayout::Strided, 4))),
            ("outputs", whole.clone().key_sum(true)),
            ("block_scales", whole.clone().with_block_scales(fmha::BlockFormat::Nvfp4)),
            ("write_keep_mask", keeps),
        ] {
            assert_eq!(field(whole), Err((1, wanted.to_owned())));
        }
        for wanted in [1, MOST_CAPTURED + 1] {
            let gradient = CapturedGrad { name: "t".to_owned(), dtype: DType::F32 };
            let problem =
                Problem::new(whole.clone(), Partition::contiguous(8, 2)).dcaptured(vec![gradient; wanted]);
            let refused = Whole::new(&problem, 1, 2).map(|_| ()).unwrap_err();
            assert_eq!((refused.rank, &*refused.field), (1, "dcaptured"), "{refused}");
        }
    }
}
