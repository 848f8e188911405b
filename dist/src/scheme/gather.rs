//! Gather: the keys and values that a rank's queries see come to it, and it attends once.
//!
//! ```text
//!  rank 0   K0 V0 ──┐      ┌─► K0 K1 K2 K3   queries of rank 0: one launch each run
//!  rank 1   K1 V1 ──┼──────┼─► K0 K1 K2 K3   queries of rank 1
//!  ...              │ once │
//!
//!  GPUs of    moves    K3 V3   K1 V1   ...
//!  one host   kernel   one launch, which waits for each piece's flag
//! ```
//!
//! Keys lie where one device has them, so tiles begin at the same keys and every row's sums have the same order.

use std::ops::Range;

use fmha::DType;

use crate::arrivals::{self, Coming, Home, Rows};
use crate::builder::{Builder, Grads, Held, Moves, Operands};
use crate::error::{Error, Result};
use crate::group::Block;
use crate::partition::Piece;
use crate::problem::{Gradients, Kind, Whole};
use crate::program::{Buf, Part, Step};

/// Whether `rank`'s queries see some of these keys.
fn needs(b: &Builder<'_>, rank: u32, keys: &Piece) -> bool {
    b.whole.q.pieces(rank).iter().any(|q| b.whole.sees(q, keys).is_some())
}

/// Room for K or V of the whole, or for their gradient.
fn hold_all(b: &mut Builder<'_>, kind: Kind, dtype: DType) -> Held {
    b.hold(b.whole.tensor_of_all(kind, b.whole.fwd.dims.num_heads_kv, dtype))
}

/// K and V of the whole, as far as this rank's queries see them.
fn gather(b: &mut Builder<'_>, order: Order) -> Result<Operands> {
    let [k, v] = [Kind::K, Kind::V].map(|kind| hold_all(b, kind, b.whole.dtype(kind)));
    if b.whole.flags {
        let coming = coming(b, [k, v], order)?;
        let arrivals = coming.pieces.len() as u32;
        b.come(coming);
        return Ok(Operands { q: b.own(Kind::Q), k, v, arrivals });
    }
    let mut moves = Moves::default();
    for (kind, all) in [(Kind::K, k), (Kind::V, v)] {
        let own = b.own(kind);
        for keys in b.keys_of(b.rank()) {
            let part = own.rows(keys.row, keys.rows());
            (0..b.ranks()).filter(|&peer| needs(b, peer, &keys)).for_each(|peer| moves.send(peer, part));
        }
        for peer in 0..b.ranks() {
            for keys in b.keys_of(peer).iter().filter(|keys| needs(b, b.rank(), keys)) {
                moves.receive(peer, all.rows(keys.whole_row, keys.rows()));
            }
        }
    }
    b.exchange(&moves)?;
    Ok(Operands { q: b.own(Kind::Q), k, v, arrivals: 0 })
}

/// Keys that kernels read first: forward, the last keys of a tile; backward, the first keys of the sequence.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    LastFirst,
    FirstFirst,
}

/// Pieces of K and V that arrive while the kernels run, which wait for them.
fn coming(b: &Builder<'_>, all: [Held; 2], order: Order) -> Result<Coming> {
    let own = [b.own(Kind::K), b.own(Kind::V)];
    let row_bytes = own.iter().map(|held| held.rows(0, 1).1.bytes()).sum();
    let pieces = arrivals::pieces(b.whole, row_bytes).map_err(|text| Error::new(b.rank(), "flags", text))?;
    let rows = |own_row: u32, whole_row: u32, count: u32| {
        [0, 1].map(|of| Rows { from: own[of].rows(own_row, count), to: all[of].rows(whole_row, count) })
    };
    // A rank needs a piece if it needs the run of the piece.
    let mut runs: Vec<(Range<u32>, Vec<bool>)> = Vec::new();
    for owner in 0..b.ranks() {
        for run in b.keys_of(owner) {
            let by = (0..b.ranks()).map(|rank| needs(b, rank, &run)).collect();
            runs.push((run.whole_row..run.whole_row + run.rows(), by));
        }
    }
    let needed = |piece: &arrivals::Piece, rank: u32| {
        let run = runs.iter().find(|(rows, _)| rows.contains(&piece.rows.start));
        run.is_some_and(|(_, by)| by[rank as usize])
    };
    let mut sends = Vec::new();
    let mut expected = Vec::new();
    for (at, piece) in pieces.iter().enumerate() {
        let count = piece.rows.end - piece.rows.start;
        if piece.owner != b.rank() {
            expected.extend(needed(piece, b.rank()).then_some(at));
            continue;
        }
        let peers = (0..b.ranks()).filter(|&peer| peer != b.rank() && needed(piece, peer));
        sends.extend(peers.map(|peer| (peer, at, rows(piece.own_row, piece.rows.start, count))));
    }
    if order == Order::LastFirst {
        sends.reverse();
    }
    let own = b.keys_of(b.rank()).iter().flat_map(|run| rows(run.row, run.whole_row, run.rows())).collect();
    Ok(Coming { pieces, buffers: all.map(|held| held.buf), own, sends, expected, home: None })
}

/// Each piece of a rank's queries with the whole sequence of keys that it sees; the one with most to compute first.
fn pairs_of(whole: &Whole, rank: u32) -> Vec<(Piece, Piece)> {
    let sequences = whole.k.whole();
    let keys = |q: &Piece| {
        // A sequence without keys has no rows: any piece of it will do.
        let none = Piece { positions: 0..0, row: 0, whole_row: 0, seqlen: 0, ..q.clone() };
        sequences.iter().find(|keys| keys.sequences == q.sequences).cloned().unwrap_or(none)
    };
    let mut pairs: Vec<_> = whole.q.pieces(rank).into_iter().map(|q| (q.clone(), keys(&q))).collect();
    pairs.sort_by_key(|(q, keys)| std::cmp::Reverse(whole.pairs(q, keys)));
    pairs
}

fn pairs(b: &Builder<'_>) -> Vec<(Piece, Piece)> {
    pairs_of(b.whole, b.rank())
}

pub(super) fn forward(b: &mut Builder<'_>) -> Result<()> {
    let operands = gather(b, Order::LastFirst)?;
    let (heads, out) = (b.whole.all_heads(), (b.own(Kind::O), b.own_lse()));
    // The longest launch first, and two side by side: the last tiles of one leave processors to the next. Its
    // tiles begin with keys that are here under a causal mask, and each run's way takes as long as a tile has
    // to do with the one before.
    b.take_turns();
    for (q, keys) in pairs(b) {
        b.forward_into((&q, &keys), &heads, &operands, (q.row, keys.whole_row), out)?;
    }
    b.read_all_that_came();
    Ok(())
}

pub(super) fn backward(b: &mut Builder<'_>, wanted: Gradients) -> Result<()> {
    let heads = b.whole.all_heads();
    let operands = gather(b, Order::FirstFirst)?;
    let given = b.own_given();
    let [dk, dv] = [Kind::K, Kind::V].map(|kind| hold_all(b, kind, DType::F32));
    // The longest kernel comes first: most of its gradients go home while the shorter ones run.
    let pairs = pairs(b);
    let home = b.whole.flags.then(|| home(b, [dk, dv], &pairs));
    if let Some((home, _)) = &home {
        b.go_home(home.clone());
    }
    let dq_out = b.own_as(Buf::Dq, Kind::Q, wanted.dtype);
    let dq = b.hold(b.whole.tensor_of(Kind::Q, b.rank(), DType::F32));
    let mut dsinks = Vec::new();
    let mut written: Vec<u32> = Vec::new();
    for (step, (q, keys)) in pairs.into_iter().enumerate() {
        let dsink = wanted.dsink.then(|| b.hold_dsink(heads.num_q()));
        dsinks.extend(dsink);
        let rows = (q.row, keys.whole_row);
        if written.contains(&q.sequences.start) {
            let [more_k, more_v] = [Kind::K, Kind::V]
                .map(|kind| b.hold(b.whole.tensor_of_piece(kind, &keys, heads.num_kv(), DType::F32)));
            let parts = [(dq, q.row), (more_k, 0), (more_v, 0)];
            b.backward((&q, &keys), &heads, &operands, rows, &given, Grads { parts, dsink })?;
            for rows in seen(b.whole, &q) {
                for (sum, term) in [(dk, more_k), (dv, more_v)] {
                    let count = rows.end - rows.start;
                    b.add(sum.rows(rows.start, count), term.rows(rows.start - keys.whole_row, count))?;
                }
            }
            b.release([more_k, more_v]);
        } else {
            written.push(q.sequences.start);
            let parts = [(dq, q.row), (dk, keys.whole_row), (dv, keys.whole_row)];
            b.backward((&q, &keys), &heads, &operands, rows, &given, Grads { parts, dsink })?;
        }
        if home.as_ref().is_some_and(|(home, _)| !home.steps[step].is_empty()) {
            b.push(Step::SendHome { step, sources: [dk.buf, dv.buf] });
        }
        b.sum(dq_out.rows(q.row, q.rows()), vec![dq.rows(q.row, q.rows())], wanted.dtype)?;
    }
    let grads = [(Kind::K, dk, Buf::Dk), (Kind::V, dv, Buf::Dv)];
    match home {
        Some((home, slots)) => {
            b.push(Step::AwaitHome { sinks: home.slots });
            add_up(b, grads, &slots, wanted.dtype)?;
        }
        None => bring_home(b, grads, wanted.dtype)?,
    }
    b.read_all_that_came();
    if wanted.dsink {
        b.sum_dsink(&dsinks)?;
    }
    Ok(())
}

/// Sends every rank's part of dK and dV to the owner of the keys, which adds the parts in rank order.
fn bring_home(b: &mut Builder<'_>, grads: [(Kind, Held, Buf); 2], dtype: DType) -> Result<()> {
    let own = b.keys_of(b.rank());
    let mut moves = Moves::default();
    let mut slots = Vec::new();
    for peer in 0..b.ranks() {
        for (kind, sum, _) in grads {
            for keys in b.keys_of(peer).iter().filter(|keys| needs(b, b.rank(), keys)) {
                moves.send(peer, sum.rows(keys.whole_row, keys.rows()));
            }
            let slot = b.hold(b.whole.tensor_of(kind, b.rank(), DType::F32));
            for keys in own.iter().filter(|keys| needs(b, peer, keys)) {
                moves.receive(peer, slot.rows(keys.row, keys.rows()));
            }
            slots.push(Slot { of: peer, kind, held: slot, offset: 0 });
        }
    }
    b.exchange(&moves)?;
    add_up(b, grads, &slots, dtype)
}

/// A rank's part of dK or dV, as it lies at the owner of the keys.
struct Slot {
    of: u32,
    kind: Kind,
    held: Held,
    /// Offset of the slot's first byte in the buffer.
    offset: u64,
}

impl Slot {
    fn rows(&self, row: u32, count: u32) -> Part {
        let (buf, block) = self.held.rows(row, count);
        (buf, Block { offset: self.offset + block.offset, ..block })
    }
}

/// The owner adds the parts of its keys' dK and dV in the order of the ranks; its own, if it has no slot,
/// from where it is.
fn add_up(b: &mut Builder<'_>, grads: [(Kind, Held, Buf); 2], slots: &[Slot], dtype: DType) -> Result<()> {
    for (kind, sum, buf) in grads {
        let out = b.own_as(buf, kind, dtype);
        for keys in b.keys_of(b.rank()) {
            let part = |peer: u32| match slots.iter().find(|slot| slot.of == peer && slot.kind == kind) {
                Some(slot) => slot.rows(keys.row, keys.rows()),
                None => sum.rows(keys.whole_row, keys.rows()),
            };
            let terms = (0..b.ranks()).filter(|&peer| needs(b, peer, &keys)).map(part).collect();
            b.sum(out.rows(keys.row, keys.rows()), terms, dtype)?;
        }
    }
    Ok(())
}

/// Rows of keys of the whole that these queries see: runs that touch are one.
fn seen(whole: &Whole, q: &Piece) -> Vec<Range<u32>> {
    let mut runs: Vec<Range<u32>> = (0..whole.ranks)
        .flat_map(|rank| whole.k.pieces(rank))
        .filter(|keys| whole.sees(q, keys).is_some())
        .map(|keys| keys.whole_row..keys.whole_row + keys.rows())
        .collect();
    runs.sort_unstable_by_key(|run| run.start);
    let mut merged: Vec<Range<u32>> = Vec::new();
    for run in runs {
        match merged.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => merged.push(run),
        }
    }
    merged
}

/// Plan by which this rank's parts of dK and dV go to the owners of the keys while its kernels run, and the
/// slots for the parts of other ranks.
fn home(b: &mut Builder<'_>, grads: [Held; 2], pairs: &[(Piece, Piece)]) -> (Home, Vec<Slot>) {
    let kinds = [Kind::K, Kind::V];
    // A slot for each rank, in their order.
    let slot = |b: &Builder<'_>, buf, kind, owner, of: u32| {
        let tensor = b.whole.tensor_of(kind, owner, DType::F32);
        Slot { of, kind, held: Held { buf, tensor }, offset: u64::from(of) * tensor.bytes() }
    };
    let mut slots = Vec::new();
    let bufs = kinds.map(|kind| {
        let one = b.whole.tensor_of(kind, b.rank(), DType::F32);
        // Other ranks write to this buffer at any time of a run, so no other step may use its memory.
        let buf = b.keep(DType::F32, u64::from(b.ranks()) * one.bytes());
        let peers = (0..b.ranks()).filter(|&peer| peer != b.rank());
        slots.extend(peers.map(|peer| slot(b, buf, kind, b.rank(), peer)));
        buf
    });
    let mut steps: Vec<Vec<_>> = pairs.iter().map(|_| Vec::new()).collect();
    for owner in (0..b.ranks()).filter(|&owner| owner != b.rank()) {
        for keys in b.keys_of(owner) {
            // dK and dV leave after the last kernel whose queries see their keys.
            let seen = |(q, _): &(Piece, Piece)| b.whole.sees(q, &keys).is_some();
            let Some(step) = pairs.iter().rposition(seen) else { continue };
            let rows = [0, 1].map(|of| {
                let there = slot(b, bufs[of], kinds[of], owner, b.rank());
                Rows {
                    from: grads[of].rows(keys.whole_row, keys.rows()),
                    to: there.rows(keys.row, keys.rows()),
                }
            });
            steps[step].push((owner, rows));
        }
    }
    let own = b.keys_of(b.rank());
    let sends = |&peer: &u32| peer != b.rank() && own.iter().any(|keys| needs(b, peer, keys));
    let from = (0..b.ranks()).filter(sends).collect();
    (Home { slots: bufs, steps, from }, slots)
}

/// The most of dK and dV of others' keys, as a part of all, that a rank has to send when its last kernel is done.
pub(crate) fn last_home(whole: &Whole) -> f64 {
    let rows = |rank: u32| -> u32 {
        let pairs = pairs_of(whole, rank);
        let Some((last, _)) = pairs.last() else { return 0 };
        let others = (0..whole.ranks).filter(|&owner| owner != rank).flat_map(|owner| whole.k.pieces(owner));
        others.filter(|keys| whole.sees(last, keys).is_some()).map(|keys| keys.rows()).sum()
    };
    let most = (0..whole.ranks).map(rows).max().unwrap_or(0);
    f64::from(most) / f64::from(whole.k.partition.rows().max(1))
}
