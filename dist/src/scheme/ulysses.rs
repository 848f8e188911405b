//! Ulysses: heads travel. Every rank has some rows of all heads, and computes some heads of all rows.
//!
//! ```text
//!            rows →                        rows →
//!  heads   r0 │ r1 │ r2 │ r3      heads   ─── rank 0 ───
//!    ↓     r0 │ r1 │ r2 │ r3  ⇄     ↓     ─── rank 1 ───     one launch for each sequence
//!          r0 │ r1 │ r2 │ r3              ─── rank 2 ───
//! ```
//!
//! Forward, the heads of a rank come in groups, one after another, and go home in the same groups:
//!
//! ```text
//!  moves     in 0   in 1   out 0    out 1
//!  kernels          heads 0   heads 1
//! ```

use std::ops::Range;

use fmha::{Bias, DType, Descale};

use crate::builder::{Builder, Given, Grads, Held, HeldLse, Moves, Operands, messages};
use crate::error::{Error, Result};
use crate::group::Block;
use crate::partition::{Axis, Piece};
use crate::problem::{Gradients, Heads, Kind, Whole};
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

/// The most groups that a rank's heads can come in: of one launch's worth of sequences, since a group has a
/// launch for each.
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
    let part = |heads: Range<u32>| {
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
    let rows = most_rows_moved(whole);
    if ranks > 1 && rows > whole.most_rows {
        let (most, dtype) = (whole.most_rows, whole.fwd.dtypes.qk);
        return refuse(
            "batch",
            format!("{rows} rows of {dtype} that are not packed are more than {most} of an exchange"),
        );
    }
    Ok(())
}

/// Heads of a rank that move, as a function of the rank.
type HeadsOf<'a> = &'a dyn Fn(&Whole, u32) -> Heads;

/// Rows of the largest exchange, backward's first, that the rank that has most has with others: those of few
/// rows, or of 8 bits, which kernels do not pack, since they compute in numbers.
fn most_rows_moved(whole: &Whole) -> u64 {
    let of = |axis: &Axis, dtype: DType| {
        let messages = |piece: &Piece| messages(piece.rows().into(), !dtype.is_fp8());
        let own = |rank| axis.pieces(rank).iter().map(messages).sum();
        let own: Vec<u64> = (0..whole.ranks).map(own).collect();
        let (batch, all): (_, u64) = (u64::from(axis.tensor_batch()), own.iter().sum());
        move |rank: usize| batch * (all + own.len() as u64 * own[rank])
    };
    let dtypes = whole.fwd.dtypes;
    let [q, o] = [dtypes.qk, dtypes.o].map(|dtype| of(&whole.q, dtype));
    let [k, v] = [dtypes.qk, dtypes.v].map(|dtype| of(&whole.k, dtype));
    // LSE has a row for each head.
    let pieces: usize = (0..whole.ranks).map(|rank| whole.q.pieces(rank).len()).sum();
    let heads = messages(heads_of(whole, 0).num_q().into(), true);
    let lse = 2 * u64::from(whole.q.tensor_batch()) * heads * pieces as u64;
    // Q, K and V; O and dO.
    let tensors = |rank| q(rank) + k(rank) + v(rank) + 2 * o(rank);
    (0..whole.ranks as usize).map(tensors).max().unwrap_or(0) + lse
}

/// Room for all rows of a tensor, of some heads.
fn hold_all(b: &mut Builder<'_>, kind: Kind, heads: &Heads, dtype: DType) -> Held {
    b.hold(b.whole.tensor_of_all(kind, heads.of(kind).len() as u32, dtype))
}

/// Parts that hold `peer`'s heads of this rank's rows, and `peer`'s rows of this rank's heads. Each side has
/// a function from the first row, the number of rows and the heads to the place.
fn parts(
    b: &Builder<'_>,
    (kind, peer): (Kind, u32),
    own: impl Fn(u32, u32, &Range<u32>) -> Vec<Part>,
    all: impl Fn(u32, u32, &Range<u32>) -> Vec<Part>,
    heads: HeadsOf<'_>,
) -> [Vec<Part>; 2] {
    let (axis, theirs) = (b.whole.axis(kind), heads(b.whole, peer).of(kind));
    let here = 0..heads(b.whole, b.rank()).of(kind).len() as u32;
    [
        axis.pieces(b.rank())
            .iter()
            .flat_map(|own_rows| own(own_rows.row, own_rows.rows(), &theirs))
            .collect(),
        axis.pieces(peer).iter().flat_map(|rows| all(rows.whole_row, rows.rows(), &here)).collect(),
    ]
}

fn tensor_parts(
    b: &Builder<'_>,
    of: (Kind, u32),
    own: Held,
    all: Held,
    heads: HeadsOf<'_>,
) -> [Vec<Part>; 2] {
    let rows = |held: Held| move |row, count, heads: &Range<u32>| held.rows_of_heads(row, count, heads);
    parts(b, of, rows(own), rows(all), heads)
}

fn lse_parts(b: &Builder<'_>, peer: u32, all: HeldLse, heads: HeadsOf<'_>) -> [Vec<Part>; 2] {
    let rows = |held: HeldLse| move |row, count, heads: &Range<u32>| held.rows_of_heads(row, count, heads);
    parts(b, (Kind::Q, peer), rows(b.own_lse()), rows(all), heads)
}

/// Rows of all ranks, of this one's heads; the same tensor of the call.
fn swap_in(b: &mut Builder<'_>, moves: &mut Moves, kind: Kind, own: Held, heads: HeadsOf<'_>) -> Held {
    let all = hold_all(b, kind, &heads(b.whole, b.rank()), b.whole.dtype(kind));
    for peer in 0..b.ranks() {
        let [of_own, of_all] = tensor_parts(b, (kind, peer), own, all, heads);
        moves.send_all(peer, of_own);
        moves.receive_all(peer, of_all);
    }
    all
}

/// Moves this rank's rows of all heads back from the ranks that have the heads.
fn swap_out(b: &Builder<'_>, moves: &mut Moves, kind: Kind, (all, own): (Held, Held), heads: HeadsOf<'_>) {
    for peer in 0..b.ranks() {
        let [of_own, of_all] = tensor_parts(b, (kind, peer), own, all, heads);
        moves.send_all(peer, of_all);
        moves.receive_all(peer, of_own);
    }
}

fn swap_in_all(b: &mut Builder<'_>, moves: &mut Moves, heads: HeadsOf<'_>) -> Operands {
    let [q, k, v] = [Kind::Q, Kind::K, Kind::V].map(|kind| {
        let own = b.own(kind);
        swap_in(b, moves, kind, own, heads)
    });
    Operands { q, k, v, arrivals: 0 }
}

/// Every sequence whole, with its keys.
fn sequences(b: &Builder<'_>) -> Vec<(Piece, Piece)> {
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
        // The last tiles of one group run together with the first tiles of the next.
        b.take_turns();
    }
    let mut gone = Vec::new();
    for (group, (operands, came)) in (0..).zip(came) {
        b.unpack(came)?;
        let of = |whole: &Whole, rank| group_of(whole, rank, group);
        let heads = of(b.whole, b.rank());
        let o = hold_all(b, Kind::O, &heads, b.whole.dtype(Kind::O));
        let lse = b.hold_lse(b.whole.lse_of_all(heads.num_q()));
        for (q, keys) in sequences(b).iter().filter(|(q, _)| q.rows() > 0) {
            b.forward_into((q, keys), &heads, &operands, (q.whole_row, keys.whole_row), (o, lse))?;
        }
        let mut moves = Moves::default();
        swap_out(b, &mut moves, Kind::O, (o, b.own(Kind::O)), &of);
        if b.whole.fwd.write_lse {
            for peer in 0..b.ranks() {
                let [of_own, of_all] = lse_parts(b, peer, lse, &of);
                moves.send_all(peer, of_all);
                moves.receive_all(peer, of_own);
            }
        }
        gone.push(b.begin_exchange(&moves)?);
    }
    // The unpacking stands behind all launches: a stream that waited for the data earlier would delay the
    // next launch.
    gone.into_iter().try_for_each(|came| b.unpack(came))
}

pub(super) fn backward(b: &mut Builder<'_>, wanted: Gradients) -> Result<()> {
    let heads = heads_of(b.whole, b.rank());
    let mut moves = Moves::default();
    let operands = swap_in_all(b, &mut moves, &heads_of);
    let own = b.own_given();
    let [o, dout] = [own.o, own.dout].map(|own| swap_in(b, &mut moves, Kind::O, own, &heads_of));
    let lse = b.hold_lse(b.whole.lse_of_all(heads.num_q()));
    for peer in 0..b.ranks() {
        let [of_own, of_all] = lse_parts(b, peer, lse, &heads_of);
        moves.send_all(peer, of_own);
        moves.receive_all(peer, of_all);
    }
    b.exchange(&moves)?;
    let given = Given { o, dout, lse };
    let [dq, dk, dv] = [Kind::Q, Kind::K, Kind::V].map(|kind| hold_all(b, kind, &heads, DType::F32));
    let mut dsinks = Vec::new();
    for (q, keys) in sequences(b) {
        // The call's sinks begin at this rank's heads; the others' gradient stays 0.
        let dsink = wanted.dsink.then(|| b.hold_dsink(heads.num_q()));
        dsinks.extend(dsink);
        let parts = [(dq, q.whole_row), (dk, keys.whole_row), (dv, keys.whole_row)];
        let rows = (q.whole_row, keys.whole_row);
        b.backward((&q, &keys), &heads, &operands, rows, &given, Grads { parts, dsink })?;
    }
    let mut moves = Moves::default();
    let own_dq = b.hold(b.whole.tensor_of(Kind::Q, b.rank(), DType::F32));
    swap_out(b, &mut moves, Kind::Q, (dq, own_dq), &heads_of);
    let [dk, dv] = [(Kind::K, dk), (Kind::V, dv)].map(|(kind, all)| bring_home(b, &mut moves, kind, all));
    b.exchange(&moves)?;
    let out = b.own_as(Buf::Dq, Kind::Q, wanted.dtype);
    b.sum(out.all_rows(), vec![own_dq.all_rows()], wanted.dtype)?;
    for (kind, buf, slots) in [(Kind::K, Buf::Dk, dk), (Kind::V, Buf::Dv, dv)] {
        let out = b.own_as(buf, kind, wanted.dtype);
        add_up(b, out, &slots, wanted.dtype)?;
    }
    if wanted.dsink {
        sum_dsink(b, &heads.q, &dsinks)?;
    }
    Ok(())
}

/// dK or dV of this rank's rows by every rank, which has it of the kv heads that it computes.
fn bring_home(b: &mut Builder<'_>, moves: &mut Moves, kind: Kind, all: Held) -> Vec<Held> {
    let own = b.keys_of(b.rank());
    let rows = b.whole.k.partition.rows_of(b.rank());
    let mut slots = Vec::new();
    for peer in 0..b.ranks() {
        for keys in b.keys_of(peer) {
            moves.send(peer, all.rows(keys.whole_row, keys.rows()));
        }
        let slot = b.hold(b.whole.tensor(kind, rows, heads_of(b.whole, peer).num_kv(), DType::F32));
        for keys in &own {
            moves.receive(peer, slot.rows(keys.row, keys.rows()));
        }
        slots.push(slot);
    }
    slots
}

/// Adds, for each kv head and sequence, the parts of the ranks that compute it, in rank order.
fn add_up(b: &mut Builder<'_>, out: Held, slots: &[Held], dtype: DType) -> Result<()> {
    let rows = out.tensor.rows;
    for head in 0..out.tensor.heads {
        let part = |(peer, slot): (u32, &Held)| {
            let kv = heads_of(b.whole, peer).kv;
            let at = head.checked_sub(kv.start).filter(|_| kv.contains(&head))?;
            Some(slot.rows_of_heads(0, rows, &(at..at + 1)))
        };
        let parts: Vec<Vec<Part>> = (0..).zip(slots).filter_map(part).collect();
        for (sequence, to) in out.rows_of_heads(0, rows, &(head..head + 1)).into_iter().enumerate() {
            b.sum(to, parts.iter().map(|part| part[sequence]).collect(), dtype)?;
        }
    }
    Ok(())
}

/// The sinks' gradient of this rank's heads goes to their place among all; the sum over ranks then has each once.
fn sum_dsink(b: &mut Builder<'_>, heads: &Range<u32>, dsinks: &[At]) -> Result<()> {
    let num_heads = b.whole.fwd.dims.num_heads_q;
    let At(all, _) = b.hold_dsink(num_heads);
    let block = |heads: Range<u32>| {
        let row_bytes = 4 * heads.len() as u64;
        Block { offset: 4 * u64::from(heads.start), rows: 1, row_bytes, stride: row_bytes }
    };
    b.sum((all, block(0..num_heads)), Vec::new(), DType::F32)?;
    let terms = dsinks.iter().map(|at| (at.0, block(0..heads.len() as u32))).collect();
    b.sum((all, block(heads.clone())), terms, DType::F32)?;
    b.sum_dsink(&[At(all, 0)])
}
