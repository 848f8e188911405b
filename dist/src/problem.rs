//! The whole problem, and who has what of it.

use std::ops::Range;

use fmha::{Bias, BwdProblem, DType, Descale, FwdProblem, KvLayout, QLayout, Strides, VLayout};

use crate::error::{Error, Result};
use crate::group::Block;
use crate::partition::{Axis, Partition, Piece};

/// Attention over a whole that no rank has: the problem of one device, and which rows each rank has.
///
/// A rank's tensors are contiguous: Q and O `[batch, own rows, num_heads_q, head_dim]`, K and V `[batch, own rows,
/// num_heads_kv, head_dim]`, LSE `[batch, num_heads_q, own rows]`; packed, the batch is no axis, and rows are those of the
/// packed tensor. The strides of `whole` play no part, its bias' apart: an elementwise bias is `[.., own queries, all keys]`.
/// Operands that have no rows (ALiBi's slopes, sinks, descales) are the same on every rank.
///
/// ```
/// use fmha::{DType, Dims, FwdProblem, MaskSpec};
/// use fmha_dist::{Partition, Problem};
///
/// let dims = Dims {
///     batch: 1, seqlen_q: 4096, seqlen_k: 4096, num_heads_q: 8, num_heads_kv: 2, head_dim_qk: 64, head_dim_v: 64,
/// };
/// let whole = FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
/// let problem = Problem::new(whole, Partition::zig_zag(4096, 4));
/// assert_eq!(problem.q.rows_of(2), 1024);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Problem {
    /// What one device would compute.
    pub whole: FwdProblem,
    /// Who has which queries.
    pub q: Partition,
    /// Who has which keys.
    pub k: Partition,
    /// Packed: the first row of each sequence of queries, and the end.
    pub cu_seqlens_q: Option<Vec<u32>>,
    /// Packed: the first row of each sequence of keys, and the end.
    pub cu_seqlens_k: Option<Vec<u32>>,
}

impl Problem {
    /// Queries and keys at the same rows of the same ranks.
    #[must_use]
    pub fn new(whole: FwdProblem, rows: Partition) -> Self {
        Self { whole, q: rows.clone(), k: rows, cu_seqlens_q: None, cu_seqlens_k: None }
    }

    /// Keys at rows of their own: cross attention, or a cache that is split where the queries are not.
    #[must_use]
    pub fn keys(mut self, k: Partition) -> Self {
        self.k = k;
        self
    }

    /// Packed sequences, whose lengths every rank knows.
    #[must_use]
    pub fn packed(mut self, cu_seqlens_q: Vec<u32>, cu_seqlens_k: Vec<u32>) -> Self {
        (self.cu_seqlens_q, self.cu_seqlens_k) = (Some(cu_seqlens_q), Some(cu_seqlens_k));
        self
    }

    /// What every rank must say alike, field by field.
    pub(crate) fn description(&self) -> Vec<(String, String)> {
        let whole = &self.whole;
        let dims = whole.dims;
        // A partition of other rows is of another length first.
        let fields = vec![
            ("batch", dims.batch.to_string()),
            ("seqlen_q", dims.seqlen_q.to_string()),
            ("seqlen_k", dims.seqlen_k.to_string()),
            ("num_heads_q", dims.num_heads_q.to_string()),
            ("num_heads_kv", dims.num_heads_kv.to_string()),
            ("head_dim_qk", dims.head_dim_qk.to_string()),
            ("head_dim_v", dims.head_dim_v.to_string()),
            ("mask", whole.mask.to_string()),
            ("softmax_scale", whole.resolved_softmax_scale().to_string()),
            ("softcap", whole.score.softcap.map_or("none".to_owned(), |softcap| softcap.to_string())),
            (
                "bias",
                match whole.score.bias {
                    // Its strides are the rank's own.
                    Bias::Elementwise(bias) => format!("{} {:?}", bias.dtype, bias.broadcast),
                    bias => format!("{bias:?}"),
                },
            ),
            ("sink", whole.score.sink.to_string()),
            ("p_drop", whole.dropout.p_drop.to_string()),
            ("dtype_qk", whole.dtypes.qk.to_string()),
            ("dtype_v", whole.dtypes.v.to_string()),
            ("dtype_o", whole.dtypes.o.to_string()),
            ("layout", format!("{:?}", whole.layout)),
            ("scales", format!("{:?}", whole.scales)),
            ("cache", format!("{:?}", whole.cache)),
            ("write_lse", whole.write_lse.to_string()),
            ("cu_seqlens_q", format!("{:?}", self.cu_seqlens_q)),
            ("cu_seqlens_k", format!("{:?}", self.cu_seqlens_k)),
            ("partition of queries", format!("{:?}", self.q)),
            ("partition of keys", format!("{:?}", self.k)),
        ];
        fields.into_iter().map(|(field, text)| (field.to_owned(), text)).collect()
    }
}

/// The gradients that are wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Gradients {
    pub(crate) dtype: DType,
    pub(crate) dsink: bool,
}

/// A problem that was checked, as one rank sees it.
#[derive(Clone, Debug)]
pub(crate) struct Whole {
    pub(crate) fwd: FwdProblem,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    /// Neighbours whose links are faster than those to the others; `ranks`, where all are alike.
    pub(crate) ranks_per_host: u32,
    /// Gathered keys come while the kernels run, which wait for each piece's flag.
    pub(crate) flags: bool,
    /// In how many groups the heads of a rank travel, by Ulysses.
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
}

impl Whole {
    /// Checks what `rank` says, and that this crate takes it.
    ///
    /// # Errors
    /// The field, as a fault of `rank`.
    pub(crate) fn new(problem: &Problem, rank: u32, ranks: u32) -> Result<Self> {
        let wrong = |field: &str, text: String| Err(Error::new(rank, field, text));
        let whole = problem.whole.clone();
        let dims = whole.dims;
        whole.clone().validate().map_err(|error| Error::of(rank, &error.into()))?;
        let unset = fmha::CacheUse::default();
        let fp8_o = whole.dtypes.o.is_fp8();
        for (field, there, what) in [
            ("kv_layout", whole.layout.kv.is_paged(), "pages are"),
            ("v_layout", whole.layout.v != VLayout::RowMajor, "a column-major V is"),
            ("seqused_q", whole.layout.seqused_q, "lengths that lie in memory are"),
            ("seqused_k", whole.layout.seqused_k, "lengths that lie in memory are"),
            ("cache", whole.cache != unset, "append, rotary, quantised caches and trees are"),
            ("write_keep_mask", whole.dropout.write_keep_mask, "a keep mask is"),
            ("part", !whole.part.is_whole(), "a part of a longer sequence is"),
            ("dtype_o", fp8_o, "an FP8 O is"),
        ] {
            if there {
                return wrong(field, format!("{what} for 1 device alone, not for ranks (here {ranks})"));
            }
        }
        let packed = (whole.layout.q == QLayout::Packed, whole.layout.kv == KvLayout::Packed);
        if packed.0 != packed.1 {
            return wrong("kv_layout", "queries and keys are packed both, or 0 of them".to_owned());
        }
        if packed.0 && matches!(whole.score.bias, Bias::Elementwise(_)) {
            return wrong("bias", "packed rows of several ranks take ALiBi or 0 bias".to_owned());
        }
        let axis = |side: &str, partition: &Partition, cu: &Option<Vec<u32>>, seqlen: u32| -> Result<Axis> {
            let field = format!("cu_seqlens_{side}");
            if partition.ranks() != ranks {
                let text = format!("partition has {} ranks, the group {ranks}", partition.ranks());
                return Err(Error::new(rank, "partition", text));
            }
            let rows = match (packed.0, cu) {
                (false, None) => seqlen,
                (true, Some(cu)) => {
                    let ascends = cu.first() == Some(&0) && cu.windows(2).all(|ends| ends[0] <= ends[1]);
                    if !ascends || cu.len() != dims.batch as usize + 1 {
                        let text =
                            format!("{field} {cu:?} does not ascend from 0 over {} sequences", dims.batch);
                        return Err(Error::new(rank, field, text));
                    }
                    if let Some(long) =
                        cu.windows(2).map(|ends| ends[1] - ends[0]).find(|&rows| rows > seqlen)
                    {
                        let text =
                            format!("{field} has a sequence of {long}, longer than seqlen_{side} {seqlen}");
                        return Err(Error::new(rank, field, text));
                    }
                    cu.last().copied().unwrap_or(0)
                }
                _ => {
                    let text = format!("{field} is given iff the problem is packed: {cu:?}");
                    return Err(Error::new(rank, field, text));
                }
            };
            if partition.rows() != rows {
                let text =
                    format!("partition has {} rows of side {side}, the problem {rows}", partition.rows());
                return Err(Error::new(rank, "partition", text));
            }
            Ok(Axis { batch: dims.batch, cu_seqlens: cu.clone(), partition: partition.clone() })
        };
        let q = axis("q", &problem.q, &problem.cu_seqlens_q, dims.seqlen_q)?;
        let k = axis("k", &problem.k, &problem.cu_seqlens_k, dims.seqlen_k)?;
        if k.partition.is_replicated() && ranks > 1 {
            return wrong("partition", format!("keys that every rank has are for 1 rank, not for {ranks}"));
        }
        Ok(Self {
            fwd: whole,
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

    /// With so many ranks to a host; `None`: all.
    pub(crate) fn on_hosts(mut self, ranks_per_host: Option<u32>) -> Self {
        self.ranks_per_host = ranks_per_host.unwrap_or(self.ranks);
        self
    }

    pub(crate) fn all_heads(&self) -> Heads {
        Heads { q: 0..self.fwd.dims.num_heads_q, kv: 0..self.fwd.dims.num_heads_kv }
    }

    /// Pieces of queries and of keys see each other: `None`, or whether every query sees every key.
    pub(crate) fn sees(&self, q: &Piece, k: &Piece) -> Option<bool> {
        if q.sequences != k.sequences {
            return None;
        }
        let part = self.part(q, k, &self.all_heads());
        let (rows, keys) = (q.rows(), k.rows());
        // The class of the whole rectangle may be an edge's though no query sees a key; then the last row or column says.
        let band = part.band(rows, keys);
        let seen = (0..rows)
            .any(|i| !band.k_range(i..i + 1, keys).is_empty() || !band.sink_range(i..i + 1, keys).is_empty());
        if !seen {
            return None;
        }
        let all = (0..rows).all(|i| {
            band.k_range(i..i + 1, keys).len() + band.sink_range(i..i + 1, keys).len() == keys as usize
        });
        Some(all)
    }

    /// Pairs that see each other, of one head.
    pub(crate) fn pairs(&self, q: &Piece, k: &Piece) -> u64 {
        if q.sequences != k.sequences {
            return 0;
        }
        let band = self.part(q, k, &self.all_heads()).band(q.rows(), k.rows());
        let row = |i| band.k_range(i..i + 1, k.rows()).len() + band.sink_range(i..i + 1, k.rows()).len();
        (0..q.rows()).map(row).sum::<usize>() as u64 * u64::from(q.sequences.end - q.sequences.start)
    }

    /// The problem of queries `q` against keys `k` with some heads: a part of the whole, contiguous.
    pub(crate) fn part(&self, q: &Piece, k: &Piece, heads: &Heads) -> FwdProblem {
        let whole = &self.fwd;
        let dims = fmha::Dims {
            batch: q.sequences.end - q.sequences.start,
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

    /// A rank's or the whole's tensor of one of these kinds.
    pub(crate) fn tensor(&self, kind: Kind, rows: u32, heads: u32, dtype: DType) -> Tensor {
        let dims = self.fwd.dims;
        let axis = if kind.is_of_queries() { &self.q } else { &self.k };
        let dim = if matches!(kind, Kind::Q | Kind::K) { dims.head_dim_qk } else { dims.head_dim_v };
        Tensor { batch: axis.tensor_batch(), rows, heads, dim, size: dtype.size_bytes() }
    }

    /// Where the operands of the score that have no rows of their own begin for these sequences and heads, in bytes.
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

    /// The backward call of a part, gradients in f32 and contiguous.
    pub(crate) fn part_bwd(&self, fwd: FwdProblem, dsink: bool) -> BwdProblem {
        let sink = fwd.score.sink;
        // LSE has the sink in it, so only its gradient needs to know of it.
        let fwd = fwd.sink(sink && dsink);
        BwdProblem::new(fwd).dtype_grad(DType::F32).write_dsink(dsink)
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

/// Which of the tensors: its rows are queries' or keys', and as long as those products need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Q,
    K,
    V,
    O,
}

impl Kind {
    fn is_of_queries(self) -> bool {
        matches!(self, Kind::Q | Kind::O)
    }
}

/// A contiguous `[batch, rows, heads, dim]` of elements of `size` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    pub(crate) batch: u32,
    pub(crate) rows: u32,
    pub(crate) heads: u32,
    pub(crate) dim: u32,
    pub(crate) size: u64,
}

impl Tensor {
    fn head_bytes(&self) -> u64 {
        u64::from(self.dim) * self.size
    }

    pub(crate) fn row_bytes(&self) -> u64 {
        u64::from(self.heads) * self.head_bytes()
    }

    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.batch) * u64::from(self.rows) * self.row_bytes()
    }

    /// Where a row of the first sequence begins.
    pub(crate) fn at(&self, row: u32) -> u64 {
        u64::from(row) * self.row_bytes()
    }

    pub(crate) fn strides(&self) -> Strides {
        let (head, rows) = (i64::from(self.dim), i64::from(self.rows));
        let seq = head * i64::from(self.heads);
        Strides { batch: seq * rows, seq, head, dim: 1 }
    }

    /// All of it.
    pub(crate) fn block(&self) -> Block {
        Block { offset: 0, rows: 1, row_bytes: self.bytes(), stride: self.bytes() }
    }

    /// `count` rows from `row` on, of every sequence.
    pub(crate) fn rows(&self, row: u32, count: u32) -> Block {
        Block {
            offset: self.at(row),
            rows: self.batch.into(),
            row_bytes: u64::from(count) * self.row_bytes(),
            stride: u64::from(self.rows) * self.row_bytes(),
        }
    }

    /// The same of some heads: a block for each sequence, or one of all heads.
    pub(crate) fn heads(&self, row: u32, count: u32, heads: &Range<u32>) -> Vec<Block> {
        if *heads == (0..self.heads) {
            vec![self.rows(row, count)]
        } else {
            self.rows_of_heads(row, count, heads)
        }
    }

    /// The same, a block for each sequence whatever the heads: rows that another rank has of more heads.
    pub(crate) fn rows_of_heads(&self, row: u32, count: u32, heads: &Range<u32>) -> Vec<Block> {
        let stride = self.row_bytes();
        let block = |sequence: u32| Block {
            offset: self.at(sequence * self.rows + row) + u64::from(heads.start) * self.head_bytes(),
            rows: count.into(),
            row_bytes: u64::from(heads.end - heads.start) * self.head_bytes(),
            stride,
        };
        (0..self.batch).map(block).collect()
    }
}

/// A contiguous f32 `[batch, heads, rows]`: an LSE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) batch: u32,
    pub(crate) heads: u32,
    pub(crate) rows: u32,
}

impl Rows {
    pub(crate) fn bytes(&self) -> u64 {
        4 * u64::from(self.batch) * u64::from(self.heads) * u64::from(self.rows)
    }

    /// `count` rows from `row` on, of some heads of every sequence: a block for each sequence, or one of all.
    pub(crate) fn blocks(&self, row: u32, count: u32, heads: &Range<u32>) -> Vec<Block> {
        let stride = 4 * u64::from(self.rows);
        if *heads == (0..self.heads) {
            return vec![Block {
                offset: 4 * u64::from(row),
                rows: (self.batch * self.heads).into(),
                row_bytes: 4 * u64::from(count),
                stride,
            }];
        }
        self.blocks_of_heads(row, count, heads)
    }

    /// The same, a block for each sequence whatever the heads: rows that another rank has of more heads.
    pub(crate) fn blocks_of_heads(&self, row: u32, count: u32, heads: &Range<u32>) -> Vec<Block> {
        let stride = 4 * u64::from(self.rows);
        let block = |sequence: u32| Block {
            offset: (u64::from(sequence) * u64::from(self.heads) + u64::from(heads.start)) * stride
                + 4 * u64::from(row),
            rows: (heads.end - heads.start).into(),
            row_bytes: 4 * u64::from(count),
            stride,
        };
        (0..self.batch).map(block).collect()
    }
}
