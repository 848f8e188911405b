//! Ulysses: heads travel. Every rank has some rows of all heads, and computes some heads of all rows.
//!
//! ```text
//!            rows →                        rows →
//!  heads   r0 │ r1 │ r2 │ r3      heads   ─── rank 0 ───
//!    ↓     r0 │ r1 │ r2 │ r3  ⇄     ↓     ─── rank 1 ───     one launch for each sequence
//!          r0 │ r1 │ r2 │ r3              ─── rank 2 ───
//! ```
//!
//! Forward, a rank's heads come in groups, one behind another, and go home likewise:
//!
//! ```text
//!  moves     in 0   in 1   out 0    out 1
//!  kernels          heads 0   heads 1
//! ```

use fmha::{Bias, DType, Descale};

use crate::builder::{Builder, Given, Grads, Held, HeldLse, Moves, Operands, Wanted, messages};
use crate::error::{Error, Result};
use crate::partition::Axis;
use crate::problem::{Heads, Kind, Rows, Whole};
use crate::program::{At, Buf, Part};

/// The heads that a rank computes. Ranks share a kv head where there are more ranks than kv heads.
fn heads_of(whole: &Whole, rank: u32) -> Heads {
    let dims = whole.fwd.dims;
    let each = dims.num_heads_q / whole.ranks;
    let ratio = whole.fwd.gqa_ratio();
    let q = rank * each..(rank + 1) * each;
    Heads { kv: q.start / ratio..q.end.div_ceil(ratio), q }
}

/// Groups of whole kv heads that a rank's heads can come in, at most.
const MOST_GROUPS: u32 = 4;

/// The most groups that a rank's heads can come in: of one launch's worth of sequences, since a group has a launch for each.
pub(crate) fn most_groups(whole: &Whole) -> u32 {
    let kv = heads_of(whole, 0).num_kv();
    if whole.ranks == 1 || whole.q.whole().len() != 1 || takes(whole).is_err() {
        return 1;
    }
    (1..=MOST_GROUPS).rev().find(|&groups| kv.is_multiple_of(groups)).unwrap_or(1)
}

/// One of the groups of a rank's heads.
fn group_of(whole: &Whole, rank: u32, group: u32) -> Heads {
    let Heads { q, kv } = heads_of(whole, rank);
    let part = |heads: std::ops::Range<u32>| {
        let each = (heads.end - heads.start) / whole.head_groups;
        heads.start + group * each..heads.start + (group + 1) * each
    };
    Heads { q: part(q), kv: part(kv) }
}

pub(super) fn takes(whole: &Whole) -> Result<()> {
    let refuse = |field: &str, text: String| Err(Error::new(whole.rank, field, format!("ulysses: {text}")));
    let (dims, ranks) = (whole.fwd.dims, whole.ranks);
    if !dims.num_heads_q.is_multiple_of(ranks) {
        return refuse(
            "num_heads_q",
            format!("num_heads_q {} is not a multiple of {ranks} ranks", dims.num_heads_q),
        );
    }
    let (each, ratio) = (dims.num_heads_q / ranks, whole.fwd.gqa_ratio());
    if !each.is_multiple_of(ratio) && !ratio.is_multiple_of(each) {
        return refuse(
            "num_heads_kv",
            format!("{each} query heads of a rank cut a kv head's {ratio} query heads"),
        );
    }
    if let (Bias::Elementwise(_), 2..) = (whole.fwd.score.bias, ranks) {
        return refuse("bias", format!("a bias of some rows and all heads does not serve {ranks} ranks"));
    }
    if let (Bias::Alibi { per_batch: true }, None, 2..) = (whole.fwd.score.bias, &whole.q.cu_seqlens, ranks) {
        return refuse("bias", format!("slopes for each sequence have the heads of all {ranks} ranks"));
    }
    let scales = whole.fwd.scales;
    if ranks > 1 && [scales.descale_q, scales.descale_k, scales.descale_v].contains(&Descale::PerKvHead) {
        return refuse("descale", format!("a descale for each kv head has the heads of all {ranks} ranks"));
    }
    let rows = (0..ranks).map(|rank| rows_moved(whole, rank)).max().unwrap_or(0);
    if ranks > 1 && rows > whole.most_rows {
        let (most, dtype) = (whole.most_rows, whole.fwd.dtypes.qk);
        return refuse(
            "batch",
            format!("{rows} rows of {dtype} that are not packed are more than {most} of an exchange"),
        );
    }
    Ok(())
}

/// Which heads of a rank move: those that a function of the rank gives.
type HeadsOf<'a> = &'a dyn Fn(&Whole, u32) -> Heads;

/// Rows of the largest exchange, backward's first, that a rank has with others: those of few rows, or of 8 bits, which kernels do
/// not pack, since they compute in numbers.
fn rows_moved(whole: &Whole, rank: u32) -> u64 {
    let of = |axis: &Axis, dtype: DType| -> u64 {
        let rows = |rank: u32| -> u64 {
            let pieces = axis.pieces(rank).into_iter();
            pieces.map(|piece| messages(piece.rows().into(), !dtype.is_fp8())).sum()
        };
        let all: u64 = (0..whole.ranks).map(rows).sum();
        u64::from(axis.tensor_batch()) * (all + u64::from(whole.ranks) * rows(rank))
    };
    let dtypes = whole.fwd.dtypes;
    // Q, K and V; O and dO; LSE, whose rows are heads.
    let tensors = of(&whole.q, dtypes.qk) + of(&whole.k, dtypes.qk) + of(&whole.k, dtypes.v);
    let heads = messages(heads_of(whole, rank).num_q().into(), true);
    let pieces: usize = (0..whole.ranks).map(|rank| whole.q.pieces(rank).len()).sum();
    let lse = 2 * u64::from(whole.q.tensor_batch()) * heads * pieces as u64;
    tensors + 2 * of(&whole.q, dtypes.o) + lse
}

/// Rows of all ranks, of this one's heads; the same tensor of the call.
fn swap_in(b: &mut Builder<'_>, moves: &mut Moves, kind: Kind, own: Held, heads: HeadsOf<'_>) -> Held {
    let dtype = b.dtype(kind);
    let tensor = b.tensor_of_all(kind, of_kind(kind, &heads(b.whole, b.rank())).len() as u32, dtype);
    let all = b.hold(tensor);
    for peer in 0..b.ranks() {
        let theirs = of_kind(kind, &heads(b.whole, peer));
        for piece in pieces(b, kind, b.rank()) {
            for block in own.tensor.rows_of_heads(piece.row, piece.rows(), &theirs) {
                moves.send(peer, (own.buf, block));
            }
        }
        for piece in pieces(b, kind, peer) {
            for block in all.tensor.rows_of_heads(piece.whole_row, piece.rows(), &(0..all.tensor.heads)) {
                moves.receive(peer, (all.buf, block));
            }
        }
    }
    all
}

/// This rank's rows of all heads, from the ranks that have the heads.
fn swap_out(b: &Builder<'_>, moves: &mut Moves, kind: Kind, (all, own): (Held, Held), heads: HeadsOf<'_>) {
    for peer in 0..b.ranks() {
        for piece in pieces(b, kind, peer) {
            for block in all.tensor.rows_of_heads(piece.whole_row, piece.rows(), &(0..all.tensor.heads)) {
                moves.send(peer, (all.buf, block));
            }
        }
        let theirs = of_kind(kind, &heads(b.whole, peer));
        for piece in pieces(b, kind, b.rank()) {
            for block in own.tensor.rows_of_heads(piece.row, piece.rows(), &theirs) {
                moves.receive(peer, (own.buf, block));
            }
        }
    }
}

fn of_kind(kind: Kind, heads: &Heads) -> std::ops::Range<u32> {
    if matches!(kind, Kind::Q | Kind::O) { heads.q.clone() } else { heads.kv.clone() }
}

fn pieces(b: &Builder<'_>, kind: Kind, rank: u32) -> Vec<crate::partition::Piece> {
    if matches!(kind, Kind::Q | Kind::O) { b.whole.q.pieces(rank) } else { b.whole.k.pieces(rank) }
}

/// An LSE's rows of the whole, of this rank's heads.
fn lse_of_all(b: &mut Builder<'_>, heads: u32) -> HeldLse {
    let axis = &b.whole.q;
    let rows = Rows { batch: axis.tensor_batch(), heads, rows: axis.partition.rows() };
    b.hold_lse(rows)
}

/// The parts of an LSE of the whole that `peer`'s rows are, and those of this rank's own that `peer`'s heads are.
fn lse_parts(b: &Builder<'_>, all: HeldLse, peer: u32, heads: HeadsOf<'_>) -> (Vec<Part>, Vec<Part>) {
    let own = b.own_lse();
    let theirs = heads(b.whole, peer).q;
    let of = |lse: HeldLse, row, count, heads: &std::ops::Range<u32>| -> Vec<Part> {
        lse.rows.blocks_of_heads(row, count, heads).into_iter().map(|block| (lse.buf, block)).collect()
    };
    let rows_of_peer = b.whole.q.pieces(peer);
    let (mut of_all, mut of_own) = (Vec::new(), Vec::new());
    for q in &rows_of_peer {
        of_all.extend(of(all, q.whole_row, q.rows(), &(0..all.rows.heads)));
    }
    for q in &b.queries() {
        of_own.extend(of(own, q.row, q.rows(), &theirs));
    }
    (of_all, of_own)
}

fn swap_in_all(b: &mut Builder<'_>, moves: &mut Moves, heads: HeadsOf<'_>) -> Operands {
    let [q, k, v] = [Kind::Q, Kind::K, Kind::V].map(|kind| {
        let own = b.own(kind);
        swap_in(b, moves, kind, own, heads)
    });
    Operands { q, k, v, arrivals: 0 }
}

/// Every sequence whole, with its keys.
fn sequences(b: &Builder<'_>) -> Vec<(crate::partition::Piece, crate::partition::Piece)> {
    let pairs = b.whole.q.whole().into_iter().zip(b.whole.k.whole());
    pairs.filter(|(q, k)| q.rows() > 0 || k.rows() > 0).collect()
}

pub(super) fn forward(b: &mut Builder<'_>) -> Result<()> {
    let groups = b.whole.head_groups;
    let mut came = Vec::new();
    for group in 0..groups {
        let heads = |whole: &Whole, rank| group_of(whole, rank, group);
        let mut moves = Moves::default();
        let operands = swap_in_all(b, &mut moves, &heads);
        came.push((operands, b.begin_exchange(&moves)?));
    }
    if groups > 1 {
        // One group's last tiles run beside the next one's first.
        b.take_turns();
    }
    let mut gone = Vec::new();
    for (group, (operands, came)) in (0..).zip(came) {
        b.unpack(came)?;
        let of = |whole: &Whole, rank| group_of(whole, rank, group);
        let heads = of(b.whole, b.rank());
        let o = {
            let tensor = b.tensor_of_all(Kind::O, heads.num_q(), b.dtype(Kind::O));
            b.hold(tensor)
        };
        let lse = lse_of_all(b, heads.num_q());
        for (q, keys) in sequences(b).iter().filter(|(q, _)| q.rows() > 0) {
            b.forward_into((q, keys), &heads, &operands, (q.whole_row, keys.whole_row), (o, lse))?;
        }
        let mut moves = Moves::default();
        swap_out(b, &mut moves, Kind::O, (o, b.own(Kind::O)), &of);
        if b.whole.fwd.write_lse {
            for peer in 0..b.ranks() {
                let (of_all, of_own) = lse_parts(b, lse, peer, &of);
                of_all.into_iter().for_each(|part| moves.send(peer, part));
                of_own.into_iter().for_each(|part| moves.receive(peer, part));
            }
        }
        gone.push(b.begin_exchange(&moves)?);
    }
    // Behind all launches: a stream that waited for what has come would keep the next one.
    gone.into_iter().try_for_each(|came| b.unpack(came))
}

pub(super) fn backward(b: &mut Builder<'_>, wanted: Wanted) -> Result<()> {
    let heads = heads_of(b.whole, b.rank());
    let mut moves = Moves::default();
    let operands = swap_in_all(b, &mut moves, &heads_of);
    let own_dout = b.own_as(Buf::Dout, Kind::O, b.dtype(Kind::O));
    let o = swap_in(b, &mut moves, Kind::O, b.own(Kind::O), &heads_of);
    let dout = swap_in(b, &mut moves, Kind::O, own_dout, &heads_of);
    let lse = lse_of_all(b, heads.num_q());
    for peer in 0..b.ranks() {
        let (of_all, of_own) = lse_parts(b, lse, peer, &heads_of);
        of_own.into_iter().for_each(|part| moves.send(peer, part));
        of_all.into_iter().for_each(|part| moves.receive(peer, part));
    }
    b.exchange(&moves)?;
    let given = Given { o, dout, lse };
    let [dq, dk, dv] = [Kind::Q, Kind::K, Kind::V].map(|kind| {
        let count = of_kind(kind, &heads).len() as u32;
        let tensor = b.tensor_of_all(kind, count, DType::F32);
        b.hold(tensor)
    });
    let mut dsinks = Vec::new();
    for (q, keys) in sequences(b) {
        // The call's sinks begin at this rank's heads; the others' gradient stays 0.
        let dsink = wanted.dsink.then(|| At(b.scratch(4 * u64::from(heads.num_q())), 0));
        dsinks.extend(dsink);
        let parts = [(dq, q.whole_row), (dk, keys.whole_row), (dv, keys.whole_row)];
        let rows = (q.whole_row, keys.whole_row);
        b.backward((&q, &keys), &heads, &operands, rows, &given, Grads { parts, dsink })?;
    }
    let mut moves = Moves::default();
    let own_dq = {
        let tensor = b.tensor_of(Kind::Q, b.rank(), DType::F32);
        b.hold(tensor)
    };
    swap_out(b, &mut moves, Kind::Q, (dq, own_dq), &heads_of);
    let shared = [(Kind::K, dk, Buf::Dk), (Kind::V, dv, Buf::Dv)].map(|(kind, all, buf)| {
        let slots: Vec<Held> = (0..b.ranks())
            .map(|peer| {
                // Each rank's part has the kv heads that it computes.
                let count = heads_of(b.whole, peer).num_kv();
                let tensor = b.whole.tensor(kind, b.whole.k.partition.rows_of(b.rank()), count, DType::F32);
                b.hold(tensor)
            })
            .collect();
        for peer in 0..b.ranks() {
            for keys in b.keys_of(peer) {
                moves.send(peer, all.rows(keys.whole_row, keys.rows()));
            }
            for keys in b.keys_of(b.rank()) {
                moves.receive(peer, slots[peer as usize].rows(keys.row, keys.rows()));
            }
        }
        (kind, slots, buf)
    });
    b.exchange(&moves)?;
    let out = b.own_as(Buf::Dq, Kind::Q, wanted.dtype);
    b.sum(out.rows(0, out.tensor.rows), vec![own_dq.rows(0, own_dq.tensor.rows)], wanted.dtype)?;
    for (kind, slots, buf) in shared {
        let out = b.own_as(buf, kind, wanted.dtype);
        let rows = out.tensor.rows;
        for head in 0..b.whole.fwd.dims.num_heads_kv {
            let parts: Vec<Vec<Part>> = (0..b.ranks())
                .filter_map(|peer| {
                    let kv = heads_of(b.whole, peer).kv;
                    let slot = slots[peer as usize];
                    let own = head.checked_sub(kv.start).filter(|_| kv.contains(&head))?;
                    let blocks = slot.tensor.heads(0, rows, &(own..own + 1));
                    Some(blocks.into_iter().flat_map(|block| by_sequence(block, slot, rows)).collect())
                })
                .collect();
            let to = out.tensor.heads(0, rows, &(head..head + 1));
            let to = to.into_iter().flat_map(|block| by_sequence(block, out, rows));
            for (at, (_, block)) in to.enumerate() {
                let terms = parts.iter().map(|part| part[at]).collect();
                b.sum((out.buf, block), terms, wanted.dtype)?;
            }
        }
    }
    if wanted.dsink {
        // In this rank's heads' place among all; the sum over ranks then has each once.
        let all = b.scratch(4 * u64::from(b.whole.fwd.dims.num_heads_q));
        let bytes = |heads: u32| 4 * u64::from(heads);
        let block = |first: u32, count: u32| crate::group::Block {
            offset: bytes(first),
            rows: 1,
            row_bytes: bytes(count),
            stride: bytes(count),
        };
        let num_heads = b.whole.fwd.dims.num_heads_q;
        b.sum((all, block(0, num_heads)), Vec::new(), DType::F32)?;
        let terms = dsinks.iter().map(|at| (at.0, block(0, heads.num_q()))).collect();
        b.sum((all, block(heads.q.start, heads.num_q())), terms, DType::F32)?;
        b.sum_dsink(&[At(all, 0)])?;
    }
    Ok(())
}

/// A block of all rows of a tensor that has one head only is one for all sequences: cut, so that it goes with those of others.
fn by_sequence(block: crate::group::Block, held: Held, rows: u32) -> Vec<Part> {
    let row_bytes = u64::from(held.tensor.dim) * held.tensor.size;
    if held.tensor.heads > 1 {
        return vec![(held.buf, block)];
    }
    (0..held.tensor.batch)
        .map(|sequence| {
            let offset = block.offset + u64::from(sequence) * block.stride;
            (held.buf, crate::group::Block { offset, rows: rows.into(), row_bytes, stride: row_bytes })
        })
        .collect()
}
