//! Decode: every rank has all queries and a part of the cache. Each attends to its part; O and LSE go to all
//! in one exchange, and each merges them in the order of the ranks, so that all have the same bits. Both lie
//! side by side in one buffer with those of the others, so that they are one all-gather and no message to and
//! from each rank.
//!
//! ```text
//!  rank 0   Q x K0 V0 ─► O, LSE ─┐          ┌─► merge in rank order ─► O
//!  rank 1   Q x K1 V1 ─► O, LSE ─┼── once ──┼─► the same O
//! ```

use fmha::DType;

use super::ring::Merging;
use crate::builder::{Builder, MAX_PARTS};
use crate::error::{Error, Result};
use crate::problem::Whole;

/// Most ranks: each has a part, and the sinks are one more.
const MAX_RANKS: u32 = MAX_PARTS - 1;

pub(super) fn takes(whole: &Whole, backward: bool) -> Result<()> {
    let refuse = |field: &str, text: String| Err(Error::new(whole.rank, field, format!("decode: {text}")));
    if backward {
        return refuse("scheme", format!("decoding over {} ranks has no gradients", whole.ranks));
    }
    if !whole.q.partition.is_replicated() {
        return refuse("partition", format!("each of {} ranks needs all queries", whole.ranks));
    }
    if whole.ranks > MAX_RANKS {
        return refuse("ranks", format!("{} ranks are more than {MAX_RANKS}", whole.ranks));
    }
    Ok(())
}

pub(super) fn forward(b: &mut Builder<'_>) -> Result<()> {
    let (operands, queries, keys) = (b.own_operands(), b.queries(), b.keys_of(b.rank()));
    let (parts, gather) = b.partials_of_all(&queries);
    for (q, parts) in queries.iter().zip(&parts) {
        let own = parts[b.rank() as usize];
        let seen: Vec<_> = keys.iter().filter_map(|k| Some((k, b.whole.sees(q, k)?))).collect();
        let Some(((last, all_seen), before)) = seen.split_last() else {
            b.nothing(q, own, false)?;
            continue;
        };
        let mut merging = Merging::default();
        for &(k, all_seen) in before {
            let part = merging.next(b, q);
            b.forward_partial((q, k), &operands, part, all_seen)?;
            merging.merge(b, q, part)?;
        }
        // The last one, or what all of them are merged to, goes to the others from where it is written.
        let part = if merging.sum.is_some() { merging.next(b, q) } else { own };
        b.forward_partial((q, last), &operands, part, *all_seen)?;
        if let Some(sum) = merging.sum {
            b.combine(&[sum, part], (own.o, 0, DType::F32), Some(own.lse))?;
        }
    }
    if b.ranks() > 1 {
        b.push(gather);
    }
    for (q, parts) in queries.iter().zip(parts) {
        b.conclude(q, parts)?;
    }
    Ok(())
}
