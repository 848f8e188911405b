//! Ring: keys and values go round, and each rank attends to those it has.
//!
//! ```text
//!  step      rank 0     rank 1     rank 2        what moves meanwhile
//!  0         K0 V0      K1 V1      K2 V2         each rank's K, V to the next one
//!  1         K2 V2      K0 V0      K1 V1         again; backward, dK and dV of the step before follow
//!  2         K1 V1      K2 V2      K0 V0         backward: dK and dV go home
//! ```
//!
//! Partial O and LSE are merged in f32 in the order in which keys come; a sink enters last, as a part of no keys. dK and dV
//! travel in f32 behind their keys, each rank adds its part, and the owner rounds once.

use fmha::DType;

use crate::builder::{Builder, Forward, Given, Grads, Held, Moves, Operands, Partial, Wanted};
use crate::error::Result;
use crate::partition::Piece;
use crate::problem::{Kind, Tensor};
use crate::program::{At, Buf};

/// Two buffers that hold a rank's rows in turns, large enough for any rank's.
struct Turns {
    kind: Kind,
    dtype: DType,
    bufs: [Buf; 2],
}

impl Turns {
    fn new(b: &mut Builder<'_>, kind: Kind, dtype: DType) -> Self {
        let most = (0..b.ranks()).map(|rank| b.tensor_of(kind, rank, dtype).bytes()).max().unwrap_or(0);
        Self { kind, dtype, bufs: [b.scratch(most), b.scratch(most)] }
    }

    fn of(&self, b: &Builder<'_>, owner: u32, step: u32) -> Held {
        Held { buf: self.bufs[(step % 2) as usize], tensor: b.tensor_of(self.kind, owner, self.dtype) }
    }
}

/// Whose keys a rank has at a step.
fn owner(b: &Builder<'_>, step: u32) -> u32 {
    (b.rank() + b.ranks() - step) % b.ranks()
}

/// What this rank has goes to the next one, and what the one before has comes.
fn pass_on(b: &mut Builder<'_>, tensors: &[(Held, Held)]) -> Result<()> {
    let (next, before) = ((b.rank() + 1) % b.ranks(), (b.rank() + b.ranks() - 1) % b.ranks());
    let mut moves = Moves::default();
    for (now, then) in tensors {
        moves.send(next, (now.buf, now.tensor.block()));
        moves.receive(before, (then.buf, then.tensor.block()));
    }
    b.exchange(&moves)
}

/// K and V of each step, by turns; those of the next step are sent for before this step's attention.
struct Keys {
    k: Turns,
    v: Turns,
}

impl Keys {
    fn new(b: &mut Builder<'_>) -> Self {
        let (k, v) = (b.dtype(Kind::K), b.dtype(Kind::V));
        Self { k: Turns::new(b, Kind::K, k), v: Turns::new(b, Kind::V, v) }
    }

    fn of(&self, b: &Builder<'_>, step: u32) -> [Held; 2] {
        if step == 0 {
            return [b.own(Kind::K), b.own(Kind::V)];
        }
        let owner = owner(b, step);
        [self.k.of(b, owner, step), self.v.of(b, owner, step)]
    }

    fn step(&self, b: &mut Builder<'_>, step: u32) -> Result<Operands> {
        let [k, v] = self.of(b, step);
        if step + 1 < b.ranks() {
            let then = self.of(b, step + 1);
            pass_on(b, &[(k, then[0]), (v, then[1])])?;
        }
        Ok(Operands { q: b.own(Kind::Q), k, v })
    }
}

pub(super) fn forward(b: &mut Builder<'_>) -> Result<()> {
    let keys = Keys::new(b);
    let heads = b.whole.all_heads();
    let queries = b.queries();
    let mut merging: Vec<Merging> = queries.iter().map(|_| Merging::default()).collect();
    for step in 0..b.ranks() {
        let operands = keys.step(b, step)?;
        for k in b.keys_of(owner(b, step)) {
            for (q, merging) in queries.iter().zip(&mut merging) {
                let Some(all_seen) = b.whole.sees(q, &k) else { continue };
                let part = merging.next(b, q);
                let how = Forward { dtype: DType::F32, row: 0, sink: false, all_seen };
                b.forward((q, &k), &heads, &operands, (q.row, k.row), (part.o, part.lse), how)?;
                merging.merge(b, q, part)?;
            }
        }
    }
    for (q, merging) in queries.iter().zip(merging) {
        b.conclude(q, merging.sum.into_iter().collect())?;
    }
    Ok(())
}

/// The parts of one piece of queries, merged as they come.
#[derive(Default)]
pub(super) struct Merging {
    pub(super) sum: Option<Partial>,
    /// Where the next part is written, and where it is merged to.
    spare: Vec<Partial>,
}

impl Merging {
    pub(super) fn next(&mut self, b: &mut Builder<'_>, q: &Piece) -> Partial {
        let heads = b.whole.fwd.dims.num_heads_q;
        self.spare.pop().unwrap_or_else(|| b.partial(q, heads))
    }

    pub(super) fn merge(&mut self, b: &mut Builder<'_>, q: &Piece, part: Partial) -> Result<()> {
        self.sum = Some(match self.sum {
            None => part,
            Some(sum) => {
                let merged = self.next(b, q);
                b.combine(&[sum, part], (merged.o, 0, DType::F32), Some(merged.lse))?;
                self.spare.extend([sum, part]);
                merged
            }
        });
        Ok(())
    }
}

pub(super) fn backward(b: &mut Builder<'_>, wanted: Wanted) -> Result<()> {
    let keys = Keys::new(b);
    let heads = b.whole.all_heads();
    let queries = b.queries();
    let given =
        Given { o: b.own(Kind::O), dout: b.own_as(Buf::Dout, Kind::O, b.dtype(Kind::O)), lse: b.own_lse() };
    let travelling = [Turns::new(b, Kind::K, DType::F32), Turns::new(b, Kind::V, DType::F32)];
    let dq = {
        let tensor = b.tensor_of(Kind::Q, b.rank(), DType::F32);
        b.hold(tensor)
    };
    b.sum((dq.buf, dq.tensor.block()), Vec::new(), DType::F32)?;
    let mut dsinks: Vec<At> = Vec::new();
    for step in 0..b.ranks() {
        let operands = keys.step(b, step)?;
        let owner_now = owner(b, step);
        let sums = [travelling[0].of(b, owner_now, step), travelling[1].of(b, owner_now, step)];
        if step == 0 {
            for sum in sums {
                b.sum((sum.buf, sum.tensor.block()), Vec::new(), DType::F32)?;
            }
        }
        for k in b.keys_of(owner_now) {
            for q in &queries {
                if b.whole.sees(q, &k).is_none() {
                    continue;
                }
                let parts = parts(b, q, &k);
                let grads = Grads { parts: parts.map(|held| (held, 0)), dsink: None };
                b.backward((q, &k), &heads, &operands, (q.row, k.row), &given, grads)?;
                b.add(dq.rows(q.row, q.rows()), parts[0].rows(0, q.rows()))?;
                for (sum, part) in sums.iter().zip(&parts[1..]) {
                    b.add(sum.rows(k.row, k.rows()), part.rows(0, k.rows()))?;
                }
                b.release(parts);
            }
        }
        if wanted.dsink && step == 0 {
            dsinks = sinks(b, &queries, &given)?;
        }
        // After the last step this rank has the next one's keys, so that they are home with one more.
        let then_owner = owner(b, step + 1);
        let then = [travelling[0].of(b, then_owner, step + 1), travelling[1].of(b, then_owner, step + 1)];
        pass_on(b, &[(sums[0], then[0]), (sums[1], then[1])])?;
    }
    let rank = b.rank();
    for (at, (kind, buf)) in [(Kind::K, Buf::Dk), (Kind::V, Buf::Dv)].into_iter().enumerate() {
        let home = travelling[at].of(b, rank, b.ranks());
        let out = b.own_as(buf, kind, wanted.dtype);
        let all = |tensor: Tensor| tensor.rows(0, tensor.rows);
        b.sum((out.buf, all(out.tensor)), vec![(home.buf, all(home.tensor))], wanted.dtype)?;
    }
    let out = b.own_as(Buf::Dq, Kind::Q, wanted.dtype);
    b.sum(out.rows(0, out.tensor.rows), vec![dq.rows(0, dq.tensor.rows)], wanted.dtype)?;
    if wanted.dsink {
        b.sum_dsink(&dsinks)?;
    }
    Ok(())
}

/// f32 gradients of a piece of queries and one of keys.
fn parts(b: &mut Builder<'_>, q: &Piece, k: &Piece) -> [Held; 3] {
    let dims = b.whole.fwd.dims;
    let tensors = [
        b.piece_tensor(Kind::Q, q, dims.num_heads_q, DType::F32),
        b.piece_tensor(Kind::K, k, dims.num_heads_kv, DType::F32),
        b.piece_tensor(Kind::V, k, dims.num_heads_kv, DType::F32),
    ];
    tensors.map(|tensor| b.hold(tensor))
}

/// The sinks' gradient, of O, LSE and dO alone: of each piece of queries, against no keys.
fn sinks(b: &mut Builder<'_>, queries: &[Piece], given: &Given) -> Result<Vec<At>> {
    let heads = b.whole.all_heads();
    let mut all = Vec::new();
    for q in queries {
        let none = q.without_rows();
        let at = At(b.scratch(4 * u64::from(heads.num_q())), 0);
        let operands = Operands { q: b.own(Kind::Q), k: b.own(Kind::K), v: b.own(Kind::V) };
        let grads = Grads { parts: parts(b, q, &none).map(|held| (held, 0)), dsink: Some(at) };
        b.backward((q, &none), &heads, &operands, (q.row, 0), given, grads)?;
        all.push(at);
    }
    Ok(all)
}
