//! A problem that was checked, and its parts.

use std::ops::Range;

use fmha::{Bias, DType, Descale, FwdProblem};

use super::{Kind, LseRows, Tensor};
use crate::partition::{Axis, Piece};

/// A problem that was checked, as one rank sees it.
#[derive(Clone, Debug)]
pub(crate) struct Whole {
    pub(crate) fwd: FwdProblem,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    /// Number of neighbouring ranks with links faster than those to other ranks; `ranks` if all links are
    /// equal.
    pub(crate) ranks_per_host: u32,
    /// Gathered keys come while the kernels run, which wait for each piece's flag.
    pub(crate) flags: bool,
    /// Number of groups in which the heads of a rank travel, in Ulysses.
    pub(crate) head_groups: u32,
    /// Rows that an exchange of the group may have at most.
    pub(crate) most_rows: u64,
    pub(crate) q: Axis,
    pub(crate) k: Axis,
}

/// Some heads: of queries, and those of keys that they read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Heads {
    pub(crate) q: Range<u32>,
    pub(crate) kv: Range<u32>,
}

impl Heads {
    pub(crate) fn num_q(&self) -> u32 {
        self.q.end - self.q.start
    }

    pub(crate) fn num_kv(&self) -> u32 {
        self.kv.end - self.kv.start
    }

    /// Heads of a tensor.
    pub(crate) fn of(&self, kind: Kind) -> Range<u32> {
        if kind.is_of_queries() { self.q.clone() } else { self.kv.clone() }
    }
}

impl Whole {
    /// Sets the number of ranks on a host; `None`: all ranks.
    pub(crate) fn on_hosts(mut self, ranks_per_host: Option<u32>) -> Self {
        self.ranks_per_host = ranks_per_host.unwrap_or(self.ranks).max(1);
        self
    }

    pub(crate) fn all_heads(&self) -> Heads {
        Heads { q: 0..self.fwd.dims.num_heads_q, kv: 0..self.fwd.dims.num_heads_kv }
    }

    /// Numbers of keys that each query of a piece sees in a piece of the same sequences.
    fn seen(&self, q: &Piece, k: &Piece) -> impl Iterator<Item = usize> {
        let (rows, keys) = (q.rows(), k.rows());
        let band = self.part(q, k, &self.all_heads()).band(rows, keys);
        (0..rows).map(move |i| band.k_range(i..i + 1, keys).len() + band.sink_range(i..i + 1, keys).len())
    }

    /// Pieces of queries and of keys see each other: `None`, or whether every query sees every key.
    pub(crate) fn sees(&self, q: &Piece, k: &Piece) -> Option<bool> {
        // Row by row: the class of the whole rectangle may be an edge's though no query sees a key.
        let sees = q.sequences == k.sequences && self.seen(q, k).any(|keys| keys > 0);
        sees.then(|| self.seen(q, k).all(|keys| keys == k.rows() as usize))
    }

    /// Pairs that see each other, of one head.
    pub(crate) fn pairs(&self, q: &Piece, k: &Piece) -> u64 {
        if q.sequences != k.sequences {
            return 0;
        }
        self.seen(q, k).sum::<usize>() as u64 * u64::from(q.num_sequences())
    }

    /// The problem of queries `q` against keys `k` with some heads: a part of the whole, contiguous.
    pub(crate) fn part(&self, q: &Piece, k: &Piece, heads: &Heads) -> FwdProblem {
        let whole = &self.fwd;
        let dims = fmha::Dims {
            batch: q.num_sequences(),
            seqlen_q: q.rows(),
            seqlen_k: k.rows(),
            num_heads_q: heads.num_q(),
            num_heads_kv: heads.num_kv(),
            ..whole.dims
        };
        let part = fmha::Part {
            position_q: q.positions.start,
            position_k: k.positions.start,
            seqlens: Some([q.seqlen, k.seqlen]),
            batch: q.sequences.start,
            head: heads.q.start,
            num_heads_q: Some(whole.dims.num_heads_q),
        };
        let is_whole = [&q.positions, &k.positions].iter().all(|positions| positions.start == 0)
            && (q.rows(), k.rows()) == (q.seqlen, k.seqlen)
            && q.sequences.start == 0
            && *heads == self.all_heads();
        let mut problem = FwdProblem::batch(whole.dtypes.qk, dims)
            .dtype_v(whole.dtypes.v)
            .dtype_o(whole.dtypes.o)
            .mask(whole.mask)
            .softmax_scale(whole.resolved_softmax_scale())
            .softcap(whole.score.softcap)
            .bias(whole.score.bias)
            .sink(whole.score.sink)
            .p_drop(whole.dropout.p_drop);
        problem.scales = whole.scales;
        if is_whole { problem } else { problem.part(part) }
    }

    /// The type of elements of a tensor of the call.
    pub(crate) fn dtype(&self, kind: Kind) -> DType {
        let dtypes = self.fwd.dtypes;
        match kind {
            Kind::Q | Kind::K => dtypes.qk,
            Kind::V => dtypes.v,
            Kind::O => dtypes.o,
        }
    }

    /// Axis whose rows a tensor has: queries or keys.
    pub(crate) fn axis(&self, kind: Kind) -> &Axis {
        if kind.is_of_queries() { &self.q } else { &self.k }
    }

    /// Tensor of `rows` rows, a rank's or the whole's.
    pub(crate) fn tensor(&self, kind: Kind, rows: u32, heads: u32, dtype: DType) -> Tensor {
        let dims = self.fwd.dims;
        let dim = if matches!(kind, Kind::Q | Kind::K) { dims.head_dim_qk } else { dims.head_dim_v };
        Tensor { batch: self.axis(kind).tensor_batch(), rows, heads, dim, dtype }
    }

    /// Part of a tensor of the call that `rank` has.
    pub(crate) fn tensor_of(&self, kind: Kind, rank: u32, dtype: DType) -> Tensor {
        let heads = self.all_heads().of(kind);
        self.tensor(kind, self.axis(kind).partition.rows_of(rank), heads.end - heads.start, dtype)
    }

    /// Tensor of the call on one device that had all rows, with `heads` heads.
    pub(crate) fn tensor_of_all(&self, kind: Kind, heads: u32, dtype: DType) -> Tensor {
        self.tensor(kind, self.axis(kind).partition.rows(), heads, dtype)
    }

    /// A contiguous tensor of a piece's rows alone.
    pub(crate) fn tensor_of_piece(&self, kind: Kind, piece: &Piece, heads: u32, dtype: DType) -> Tensor {
        Tensor { batch: piece.num_sequences(), ..self.tensor(kind, piece.rows(), heads, dtype) }
    }

    /// LSE of this rank.
    pub(crate) fn own_lse(&self) -> LseRows {
        let (batch, rows) = (self.q.tensor_batch(), self.q.partition.rows_of(self.rank));
        LseRows { batch, heads: self.fwd.dims.num_heads_q, rows }
    }

    /// LSE of one device with all rows, with `heads` heads.
    pub(crate) fn lse_of_all(&self, heads: u32) -> LseRows {
        LseRows { batch: self.q.tensor_batch(), heads, rows: self.q.partition.rows() }
    }

    /// Offsets in bytes of the score's operands without rows, for these sequences and heads.
    pub(crate) fn score_offsets(&self, q: &Piece, k: &Piece, heads: &Heads) -> ScoreOffsets {
        let dims = self.fwd.dims;
        let sequence = u64::from(q.sequences.start);
        let (head, head_kv) = (u64::from(heads.q.start), u64::from(heads.kv.start));
        let alibi = match self.fwd.score.bias {
            Bias::Alibi { per_batch: true } => sequence * u64::from(dims.num_heads_q) + head,
            _ => head,
        };
        let descale = |descale| match descale {
            Descale::PerKvHead => 4 * (sequence * u64::from(dims.num_heads_kv) + head_kv),
            Descale::None | Descale::PerTensor => 0,
        };
        let scales = self.fwd.scales;
        let bias = match self.fwd.score.bias {
            Bias::Elementwise(bias) => {
                let at =
                    i64::from(q.row) * bias.strides.seq + i64::from(k.positions.start) * bias.strides.dim;
                at.unsigned_abs() * bias.dtype.size_bytes()
            }
            _ => 0,
        };
        let descales = [scales.descale_q, scales.descale_k, scales.descale_v].map(descale);
        ScoreOffsets { bias, alibi: 4 * alibi, sink: 4 * head, descales }
    }
}

/// Byte offsets into the score's operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScoreOffsets {
    pub(crate) bias: u64,
    pub(crate) alibi: u64,
    pub(crate) sink: u64,
    pub(crate) descales: [u64; 3],
}
