//! Ring: keys and values go round, and each rank attends to those it has. Mixed: they go round hosts, and are
//! gathered inside each.
//!
//! ```text
//!  ring                                         mixed: two hosts of two ranks
//!  step  rank 0     rank 1     rank 2           step  ranks 0 and 1 attend to   ranks 2 and 3
//!  0     K0 V0      K1 V1      K2 V2            0     K0 V0 K1 V1               K2 V2 K3 V3
//!  1     K2 V2      K0 V0      K1 V1            1     K2 V2 K3 V3               K0 V0 K1 V1
//!  2     K1 V1      K2 V2      K0 V0
//! ```
//!
//! While a rank attends, its K and V go to the next rank, of the next host: each link between hosts carries
//! one rank's share. Backward, dK and dV follow a step behind, and go home after the last.
//!
//! Partial O and LSE are merged in f32 in the order in which keys come; a sink enters last, as a part of no
//! keys. dK and dV travel in f32 behind their keys, each rank adds its part (mixed: each host, in the order
//! of its ranks), and the owner rounds once.

use fmha::DType;

use crate::builder::{Builder, Given, Grads, Held, Moves, Operands, Partial};
use crate::error::{Error, Result};
use crate::partition::Piece;
use crate::problem::{Gradients, Kind, Tensor, Whole};
use crate::program::{At, Buf};

/// Hosts in a ring, and the ranks of each, which are neighbours; a plain ring's hosts have one.
#[derive(Clone, Copy)]
struct Hosts {
    rank: u32,
    count: u32,
    /// Number of ranks of each host.
    size: u32,
}

impl Hosts {
    fn new(b: &Builder<'_>, size: u32) -> Self {
        Self { rank: b.rank(), count: b.ranks() / size, size }
    }

    fn own(self) -> u32 {
        self.rank / self.size
    }

    /// Host whose keys this host attends to at a step.
    fn owner(self, step: u32) -> u32 {
        (self.own() + self.count - step) % self.count
    }

    fn ranks(self, host: u32) -> std::ops::Range<u32> {
        host * self.size..(host + 1) * self.size
    }

    /// The rank of another host whose place in its host is this one's.
    fn counterpart(self, host: u32) -> u32 {
        host % self.count * self.size + self.rank % self.size
    }
}

/// Two buffers that are used alternately.
struct Turns {
    kind: Kind,
    dtype: DType,
    bufs: [Buf; 2],
}

impl Turns {
    /// Large enough for any rank's rows.
    fn new(b: &mut Builder<'_>, kind: Kind, dtype: DType) -> Self {
        let most = (0..b.ranks()).map(|rank| b.whole.tensor_of(kind, rank, dtype).bytes()).max().unwrap_or(0);
        Self { kind, dtype, bufs: [(); 2].map(|()| b.scratch(dtype, most)) }
    }

    /// Tensor of `rank` at a step.
    fn of(&self, b: &Builder<'_>, rank: u32, step: u32) -> Held {
        let tensor = b.whole.tensor_of(self.kind, rank, self.dtype);
        Held { buf: self.bufs[(step % 2) as usize], tensor }
    }
}

/// Sends this rank's part to its counterpart on the next host, and receives that of the host before.
fn pass_on(b: &mut Builder<'_>, hosts: Hosts, tensors: &[(Held, Held)]) -> Result<()> {
    let (next, before) =
        (hosts.counterpart(hosts.own() + 1), hosts.counterpart(hosts.own() + hosts.count - 1));
    let mut moves = Moves::default();
    for (now, then) in tensors {
        moves.send(next, now.block());
        moves.receive(before, then.block());
    }
    b.exchange(&moves)
}

/// The keys of a host as one tensor, in the order of their positions: pieces of ranks that touch are one.
struct HostRows {
    /// Pieces of each host.
    pieces: Vec<Vec<Piece>>,
    rows: Vec<u32>,
}

impl HostRows {
    fn new(b: &Builder<'_>, hosts: Hosts) -> Result<Self> {
        let axis = b.whole.k.by_hosts(hosts.size)?;
        let all = 0..hosts.count;
        Ok(Self {
            pieces: all.clone().map(|host| axis.pieces(host)).collect(),
            rows: all.map(|host| axis.partition.rows_of(host)).collect(),
        })
    }

    fn tensor(&self, b: &Builder<'_>, kind: Kind, host: u32, dtype: DType) -> Tensor {
        let heads = b.whole.fwd.dims.num_heads_kv;
        b.whole.tensor(kind, self.rows[host as usize], heads, dtype)
    }

    /// Rows of the pieces of a rank of `host`: the first row in the rank's own tensor, the first in the
    /// host's tensor, and their count.
    fn places(&self, b: &Builder<'_>, host: u32, rank: u32) -> Vec<(u32, u32, u32)> {
        let place = |own: &Piece| {
            let holds = |all: &&Piece| {
                all.sequences == own.sequences
                    && all.positions.start <= own.positions.start
                    && own.positions.end <= all.positions.end
            };
            let all = self.pieces[host as usize].iter().find(holds)?;
            Some((own.row, all.row + own.positions.start - all.positions.start, own.rows()))
        };
        b.keys_of(rank).iter().filter_map(place).collect()
    }
}

/// K and V of each step, in alternating buffers. The transfer of the next step's starts before this step's
/// attention.
struct Keys {
    hosts: Hosts,
    k: Turns,
    v: Turns,
    /// Gathered K and V of hosts with several ranks.
    gathered: Option<[[Buf; 2]; 2]>,
    rows: HostRows,
}

impl Keys {
    fn new(b: &mut Builder<'_>, hosts: Hosts) -> Result<Self> {
        let rows = HostRows::new(b, hosts)?;
        let dtypes = [b.whole.dtype(Kind::K), b.whole.dtype(Kind::V)];
        let gathered = (hosts.size > 1).then(|| {
            [(Kind::K, dtypes[0]), (Kind::V, dtypes[1])].map(|(kind, dtype)| {
                let bytes = |host| rows.tensor(b, kind, host, dtype).bytes();
                let most = (0..hosts.count).map(bytes).max().unwrap_or(0);
                [(); 2].map(|()| b.scratch(dtype, most))
            })
        });
        let [k, v] = dtypes;
        Ok(Self { hosts, k: Turns::new(b, Kind::K, k), v: Turns::new(b, Kind::V, v), gathered, rows })
    }

    /// The share of them that this rank passes on.
    fn share(&self, b: &Builder<'_>, step: u32) -> [Held; 2] {
        if step == 0 {
            return [b.own(Kind::K), b.own(Kind::V)];
        }
        let owner = self.hosts.counterpart(self.hosts.owner(step));
        [self.k.of(b, owner, step), self.v.of(b, owner, step)]
    }

    fn step(&self, b: &mut Builder<'_>, step: u32) -> Result<Operands> {
        let share = self.share(b, step);
        let [k, v] = match self.gathered {
            None => share,
            Some(bufs) => self.gather(b, step, share, bufs)?,
        };
        if step + 1 < self.hosts.count {
            let then = self.share(b, step + 1);
            pass_on(b, self.hosts, &[(share[0], then[0]), (share[1], then[1])])?;
        }
        Ok(Operands { q: b.own(Kind::Q), k, v, arrivals: 0 })
    }

    /// The shares of all ranks of this host.
    fn gather(
        &self,
        b: &mut Builder<'_>,
        step: u32,
        share: [Held; 2],
        bufs: [[Buf; 2]; 2],
    ) -> Result<[Held; 2]> {
        let (hosts, host) = (self.hosts, self.hosts.owner(step));
        let mut moves = Moves::default();
        let mut all = share;
        for ((all, share), (bufs, kind)) in
            all.iter_mut().zip(share).zip(bufs.into_iter().zip([Kind::K, Kind::V]))
        {
            let tensor = self.rows.tensor(b, kind, host, b.whole.dtype(kind));
            *all = Held { buf: bufs[(step % 2) as usize], tensor };
            for (peer, owner) in hosts.ranks(hosts.own()).zip(hosts.ranks(host)) {
                for (own, _, count) in self.rows.places(b, host, hosts.counterpart(host)) {
                    moves.send(peer, share.rows(own, count));
                }
                for (_, at, count) in self.rows.places(b, host, owner) {
                    moves.receive(peer, all.rows(at, count));
                }
            }
        }
        b.exchange(&moves)?;
        Ok(all)
    }

    fn pieces(&self, step: u32) -> &[Piece] {
        &self.rows.pieces[self.hosts.owner(step) as usize]
    }
}

/// Whether hosts of this many ranks make a ring.
pub(super) fn takes_hosts(whole: &Whole) -> Result<()> {
    let (size, ranks) = (whole.ranks_per_host, whole.ranks);
    if size > 1 && size < ranks && ranks.is_multiple_of(size) {
        return Ok(());
    }
    let text = format!("mixed: ranks_per_host {size} does not cut {ranks} ranks into hosts of several each");
    Err(Error::new(whole.rank, "ranks_per_host", text))
}

pub(super) fn forward(b: &mut Builder<'_>, ranks_per_host: u32) -> Result<()> {
    let hosts = Hosts::new(b, ranks_per_host);
    let keys = Keys::new(b, hosts)?;
    let queries = b.queries();
    let mut merging: Vec<Merging> = queries.iter().map(|_| Merging::default()).collect();
    for step in 0..hosts.count {
        let operands = keys.step(b, step)?;
        for k in keys.pieces(step) {
            for (q, merging) in queries.iter().zip(&mut merging) {
                let Some(all_seen) = b.whole.sees(q, k) else { continue };
                let part = merging.next(b, q);
                b.forward_partial((q, k), &operands, part, all_seen)?;
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
    /// Buffers for the next part, and for the merge.
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

pub(super) fn backward(b: &mut Builder<'_>, wanted: Gradients, ranks_per_host: u32) -> Result<()> {
    let hosts = Hosts::new(b, ranks_per_host);
    let keys = Keys::new(b, hosts)?;
    let heads = b.whole.all_heads();
    let queries = b.queries();
    let given = b.own_given();
    let travelling = [Turns::new(b, Kind::K, DType::F32), Turns::new(b, Kind::V, DType::F32)];
    let gathered = HostGrads::new(b, &keys);
    let dq = b.hold(b.whole.tensor_of(Kind::Q, b.rank(), DType::F32));
    b.sum(dq.block(), Vec::new(), DType::F32)?;
    let mut dsinks: Vec<At> = Vec::new();
    for step in 0..hosts.count {
        let operands = keys.step(b, step)?;
        let owner = hosts.counterpart(hosts.owner(step));
        let shares = [travelling[0].of(b, owner, step), travelling[1].of(b, owner, step)];
        let sums = gathered.as_ref().map_or(shares, |gathered| gathered.of(b, &keys, step));
        let zeroed = if gathered.is_some() { vec![sums, shares] } else { vec![sums] };
        for (at, pair) in zeroed.into_iter().enumerate() {
            // The sums of a rank's own share are zeroed at step 0, those of a host's part at every step.
            if step == 0 || gathered.is_some() && at == 0 {
                for sum in pair {
                    b.sum(sum.block(), Vec::new(), DType::F32)?;
                }
            }
        }
        for k in keys.pieces(step) {
            for q in &queries {
                if b.whole.sees(q, k).is_none() {
                    continue;
                }
                let parts = parts(b, q, k);
                let grads = Grads { parts: parts.map(|held| (held, 0)), dsink: None };
                b.backward((q, k), &heads, &operands, (q.row, k.row), &given, grads)?;
                b.add(dq.rows(q.row, q.rows()), parts[0].rows(0, q.rows()))?;
                for (sum, part) in sums.iter().zip(&parts[1..]) {
                    b.add(sum.rows(k.row, k.rows()), part.rows(0, k.rows()))?;
                }
                b.release(parts);
            }
        }
        if let Some(gathered) = &gathered {
            gathered.reduce(b, &keys, step, sums, shares)?;
        }
        if wanted.dsink && step == 0 {
            dsinks = sinks(b, &queries, &given)?;
        }
        // The last step leaves this rank with the next host's keys, so that their gradients are home after
        // one more.
        let then_owner = hosts.counterpart(hosts.owner(step) + hosts.count - 1);
        let then = [travelling[0].of(b, then_owner, step + 1), travelling[1].of(b, then_owner, step + 1)];
        pass_on(b, hosts, &[(shares[0], then[0]), (shares[1], then[1])])?;
    }
    let rank = b.rank();
    for (at, (kind, buf)) in [(Kind::K, Buf::Dk), (Kind::V, Buf::Dv)].into_iter().enumerate() {
        let home = travelling[at].of(b, rank, hosts.count);
        let out = b.own_as(buf, kind, wanted.dtype);
        b.sum(out.all_rows(), vec![home.all_rows()], wanted.dtype)?;
    }
    let out = b.own_as(Buf::Dq, Kind::Q, wanted.dtype);
    b.sum(out.all_rows(), vec![dq.all_rows()], wanted.dtype)?;
    if wanted.dsink {
        b.sum_dsink(&dsinks)?;
    }
    Ok(())
}

/// Gradients if hosts have several ranks: this rank's part of dK and dV for a host's keys, and the parts for
/// its own share from each rank of its host.
struct HostGrads {
    parts: [Buf; 2],
    slots: Vec<[Buf; 2]>,
}

impl HostGrads {
    fn new(b: &mut Builder<'_>, keys: &Keys) -> Option<Self> {
        let hosts = keys.hosts;
        if hosts.size == 1 {
            return None;
        }
        let parts = [Kind::K, Kind::V].map(|kind| {
            let bytes = |host| keys.rows.tensor(b, kind, host, DType::F32).bytes();
            let most = (0..hosts.count).map(bytes).max().unwrap_or(0);
            b.scratch(DType::F32, most)
        });
        let slot = |b: &mut Builder<'_>| {
            [Kind::K, Kind::V].map(|kind| {
                let most = (0..b.ranks()).map(|rank| b.whole.tensor_of(kind, rank, DType::F32).bytes()).max();
                b.scratch(DType::F32, most.unwrap_or(0))
            })
        };
        Some(Self { parts, slots: (0..hosts.size).map(|_| slot(b)).collect() })
    }

    fn of(&self, b: &Builder<'_>, keys: &Keys, step: u32) -> [Held; 2] {
        let host = keys.hosts.owner(step);
        let held = |(kind, buf)| Held { buf, tensor: keys.rows.tensor(b, kind, host, DType::F32) };
        [(Kind::K, self.parts[0]), (Kind::V, self.parts[1])].map(held)
    }

    /// Each rank of the host adds its part to `shares`, in the order of the ranks.
    fn reduce(
        &self,
        b: &mut Builder<'_>,
        keys: &Keys,
        step: u32,
        parts: [Held; 2],
        shares: [Held; 2],
    ) -> Result<()> {
        let (hosts, host) = (keys.hosts, keys.hosts.owner(step));
        let own = keys.rows.places(b, host, hosts.counterpart(host));
        let mut moves = Moves::default();
        for ((peer, owner), slots) in hosts.ranks(hosts.own()).zip(hosts.ranks(host)).zip(&self.slots) {
            for at in 0..2 {
                for (_, row, count) in keys.rows.places(b, host, owner) {
                    moves.send(peer, parts[at].rows(row, count));
                }
                let slot = Held { buf: slots[at], ..shares[at] };
                for &(row, _, count) in &own {
                    moves.receive(peer, slot.rows(row, count));
                }
            }
        }
        b.exchange(&moves)?;
        for slots in &self.slots {
            for at in 0..2 {
                let slot = Held { buf: slots[at], ..shares[at] };
                b.add(shares[at].all_rows(), slot.all_rows())?;
            }
        }
        Ok(())
    }
}

/// f32 gradients of a piece of queries and one of keys.
fn parts(b: &mut Builder<'_>, q: &Piece, k: &Piece) -> [Held; 3] {
    let dims = b.whole.fwd.dims;
    let tensors = [
        b.whole.tensor_of_piece(Kind::Q, q, dims.num_heads_q, DType::F32),
        b.whole.tensor_of_piece(Kind::K, k, dims.num_heads_kv, DType::F32),
        b.whole.tensor_of_piece(Kind::V, k, dims.num_heads_kv, DType::F32),
    ];
    tensors.map(|tensor| b.hold(tensor))
}

/// The sinks' gradient, of O, LSE and dO alone: of each piece of queries, against no keys.
fn sinks(b: &mut Builder<'_>, queries: &[Piece], given: &Given) -> Result<Vec<At>> {
    let heads = b.whole.all_heads();
    let mut all = Vec::new();
    for q in queries {
        let none = q.without_rows();
        let (at, operands) = (b.hold_dsink(heads.num_q()), b.own_operands());
        let grads = Grads { parts: parts(b, q, &none).map(|held| (held, 0)), dsink: Some(at) };
        b.backward((q, &none), &heads, &operands, (q.row, 0), given, grads)?;
        all.push(at);
    }
    Ok(all)
}
