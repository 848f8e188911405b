//! Gather: the keys and values that a rank's queries see come to it, and it attends once.
//!
//! ```text
//!  rank 0   K0 V0 ──┐      ┌─► K0 K1 K2 K3   queries of rank 0: one launch each run
//!  rank 1   K1 V1 ──┼──────┼─► K0 K1 K2 K3   queries of rank 1
//!  ...              │ once │
//!
//!  on a GPU   moves    kv head 0  the other heads
//!             kernels             head 0           the other heads
//! ```
//!
//! Keys lie where one device has them, so tiles begin at the same keys and every row's sums have the same order.

use fmha::DType;

use crate::builder::{Builder, Given, Grads, Held, HeldLse, Moves, Operands, Wanted};
use crate::error::Result;
use crate::partition::Piece;
use crate::problem::{Heads, Kind, Whole};
use crate::program::{At, Buf};

/// Whether `rank`'s queries see some of these keys.
fn needs(b: &Builder<'_>, rank: u32, keys: &Piece) -> bool {
    b.whole.q.pieces(rank).iter().any(|q| b.whole.sees(q, keys).is_some())
}

/// These heads of K and V of the whole, as far as this rank's queries see them.
fn gather(b: &mut Builder<'_>, heads: &Heads) -> Result<Operands> {
    let whole = |b: &mut Builder<'_>, kind| {
        let tensor = b.tensor_of_all(kind, heads.num_kv(), b.dtype(kind));
        b.hold(tensor)
    };
    let (k, v) = (whole(b, Kind::K), whole(b, Kind::V));
    let some = *heads != b.whole.all_heads();
    let mut moves = Moves::default();
    for (kind, all) in [(Kind::K, k), (Kind::V, v)] {
        let own = b.own(kind);
        for keys in b.keys_of(b.rank()) {
            let peers: Vec<u32> = (0..b.ranks()).filter(|&peer| needs(b, peer, &keys)).collect();
            let rows = (keys.row, keys.rows());
            let part = match some && !peers.is_empty() {
                true => b.heads_alone(own, rows, &heads.kv)?,
                false => own.rows(rows.0, rows.1),
            };
            peers.into_iter().for_each(|peer| moves.send(peer, part));
        }
        for peer in 0..b.ranks() {
            for keys in b.keys_of(peer).iter().filter(|keys| needs(b, b.rank(), keys)) {
                moves.receive(peer, all.rows(keys.whole_row, keys.rows()));
            }
        }
    }
    b.exchange(&moves)?;
    Ok(Operands { q: b.own(Kind::Q).of_head(heads.q.start), k, v })
}

/// Each piece of queries with the whole sequence of keys that it sees.
fn pairs(b: &Builder<'_>) -> Vec<(Piece, Piece)> {
    let sequences = b.whole.k.whole();
    let whole = |q: &Piece| {
        // A sequence without keys has no rows: any piece of it will do.
        let none = Piece { positions: 0..0, row: 0, whole_row: 0, seqlen: 0, ..q.clone() };
        sequences.iter().find(|keys| keys.sequences == q.sequences).cloned().unwrap_or(none)
    };
    b.queries().into_iter().map(|q| (q.clone(), whole(&q))).collect()
}

/// One kv head and the others: attention takes so much longer than its keys' way that the first one hides the rest.
fn groups(whole: &Whole) -> Vec<Heads> {
    let heads = whole.fwd.dims.num_heads_kv;
    if !whole.by_heads {
        return vec![whole.all_heads()];
    }
    let ratio = whole.fwd.gqa_ratio();
    [0..1, 1..heads].map(|kv| Heads { q: kv.start * ratio..kv.end * ratio, kv }).to_vec()
}

/// Each group of heads comes while the one before is attended to: what is not hidden is the first, a small one. A group's heads
/// are sums of their own, so the bits are those of all heads at once.
pub(super) fn forward(b: &mut Builder<'_>) -> Result<()> {
    let groups = groups(b.whole);
    let gathered = groups.iter().map(|heads| gather(b, heads)).collect::<Result<Vec<_>>>()?;
    for (heads, operands) in groups.iter().zip(&gathered) {
        let lse = HeldLse { head: heads.q.start, ..b.own_lse() };
        let out = (b.own(Kind::O).of_head(heads.q.start), lse);
        for (q, keys) in pairs(b) {
            b.forward_into((&q, &keys), heads, operands, (q.row, keys.whole_row), out)?;
        }
    }
    Ok(())
}

pub(super) fn backward(b: &mut Builder<'_>, wanted: Wanted) -> Result<()> {
    let heads = b.whole.all_heads();
    let operands = gather(b, &heads)?;
    let given =
        Given { o: b.own(Kind::O), dout: b.own_as(Buf::Dout, Kind::O, b.dtype(Kind::O)), lse: b.own_lse() };
    let f32_of_all = |b: &mut Builder<'_>, kind| {
        let tensor = b.tensor_of_all(kind, heads.num_kv(), DType::F32);
        b.hold(tensor)
    };
    let (dk, dv) = (f32_of_all(b, Kind::K), f32_of_all(b, Kind::V));
    let dq_out = b.own_as(Buf::Dq, Kind::Q, wanted.dtype);
    let dq = {
        let tensor = b.tensor_of(Kind::Q, b.rank(), DType::F32);
        b.hold(tensor)
    };
    let mut dsinks = Vec::new();
    let mut written: Vec<u32> = Vec::new();
    for (q, keys) in pairs(b) {
        let dsink = wanted.dsink.then(|| At(b.scratch(4 * u64::from(heads.num_q())), 0));
        dsinks.extend(dsink);
        let rows = (q.row, keys.whole_row);
        if written.contains(&q.sequences.start) {
            let [more_k, more_v] = [Kind::K, Kind::V].map(|kind| {
                let tensor = b.piece_tensor(kind, &keys, heads.num_kv(), DType::F32);
                b.hold(tensor)
            });
            let parts = [(dq, q.row), (more_k, 0), (more_v, 0)];
            b.backward((&q, &keys), &heads, &operands, rows, &given, Grads { parts, dsink })?;
            for (sum, term) in [(dk, more_k), (dv, more_v)] {
                b.add(sum.rows(keys.whole_row, keys.rows()), term.rows(0, keys.rows()))?;
            }
            b.release([more_k, more_v]);
        } else {
            written.push(q.sequences.start);
            let parts = [(dq, q.row), (dk, keys.whole_row), (dv, keys.whole_row)];
            b.backward((&q, &keys), &heads, &operands, rows, &given, Grads { parts, dsink })?;
        }
        b.sum(dq_out.rows(q.row, q.rows()), vec![dq.rows(q.row, q.rows())], wanted.dtype)?;
    }
    bring_home(b, [(Kind::K, dk, Buf::Dk), (Kind::V, dv, Buf::Dv)], wanted.dtype)?;
    if wanted.dsink {
        b.sum_dsink(&dsinks)?;
    }
    Ok(())
}

/// Every rank's part of dK and dV goes to the owner of the keys, who adds the parts in the order of the ranks.
fn bring_home(b: &mut Builder<'_>, grads: [(Kind, Held, Buf); 2], dtype: DType) -> Result<()> {
    let own = b.keys_of(b.rank());
    let mut moves = Moves::default();
    let mut slots = Vec::new();
    for peer in 0..b.ranks() {
        for (kind, sum, _) in grads {
            for keys in b.keys_of(peer).iter().filter(|keys| needs(b, b.rank(), keys)) {
                moves.send(peer, sum.rows(keys.whole_row, keys.rows()));
            }
            let slot = {
                let tensor = b.tensor_of(kind, b.rank(), DType::F32);
                b.hold(tensor)
            };
            for keys in own.iter().filter(|keys| needs(b, peer, keys)) {
                moves.receive(peer, slot.rows(keys.row, keys.rows()));
            }
            slots.push((peer, kind, slot));
        }
    }
    b.exchange(&moves)?;
    for (kind, _, buf) in grads {
        let out = b.own_as(buf, kind, dtype);
        for keys in &own {
            let parts = slots.iter().filter(|(peer, of, _)| *of == kind && needs(b, *peer, keys));
            let terms = parts.map(|(_, _, slot)| slot.rows(keys.row, keys.rows())).collect();
            b.sum(out.rows(keys.row, keys.rows()), terms, dtype)?;
        }
    }
    Ok(())
}
