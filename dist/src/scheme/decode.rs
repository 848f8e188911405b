//! Decode: every rank has all queries and a part of the cache. Each attends to its part; O and LSE go to all in one exchange,
//! and each merges them in the order of the ranks, so that all have the same bits.
//!
//! ```text
//!  rank 0   Q x K0 V0 ─► O, LSE ─┐          ┌─► merge in rank order ─► O
//!  rank 1   Q x K1 V1 ─► O, LSE ─┼── once ──┼─► the same O
//! ```

use fmha::DType;

use super::ring::Merging;
use crate::builder::{Builder, Forward, Moves, Operands};
use crate::error::{Error, Result};
use crate::problem::{Kind, Whole};

/// Parts that one merge takes, the sinks' among them.
const MAX_RANKS: u32 = 127;

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
    let heads = b.whole.all_heads();
    let operands = Operands { q: b.own(Kind::Q), k: b.own(Kind::K), v: b.own(Kind::V), arrivals: 0 };
    let keys = b.keys_of(b.rank());
    let mut moves = Moves::default();
    let mut gathered = Vec::new();
    for q in b.queries() {
        let mut merging = Merging::default();
        for k in &keys {
            let Some(all_seen) = b.whole.sees(&q, k) else { continue };
            let part = merging.next(b, &q);
            let how = Forward { dtype: DType::F32, row: 0, sink: false, all_seen };
            b.forward((&q, k), &heads, &operands, (q.row, k.row), (part.o, part.lse), how)?;
            merging.merge(b, &q, part)?;
        }
        let own = match merging.sum {
            Some(own) => own,
            None => {
                let part = b.partial(&q, heads.num_q());
                b.nothing(&q, part, false)?;
                part
            }
        };
        let mut parts = Vec::new();
        for peer in 0..b.ranks() {
            if peer == b.rank() {
                parts.push(own);
                continue;
            }
            let part = b.partial(&q, heads.num_q());
            for (own, part) in [
                ((own.o.buf, own.o.tensor.block()), (part.o.buf, part.o.tensor.block())),
                (lse_block(own.lse), lse_block(part.lse)),
            ] {
                moves.send(peer, own);
                moves.receive(peer, part);
            }
            parts.push(part);
        }
        gathered.push((q, parts));
    }
    b.exchange(&moves)?;
    for (q, parts) in gathered {
        b.conclude(&q, parts)?;
    }
    Ok(())
}

fn lse_block(lse: crate::builder::HeldLse) -> crate::program::Part {
    let bytes = lse.rows.bytes();
    (lse.buf, crate::group::Block { offset: 0, rows: 1, row_bytes: bytes, stride: bytes })
}
