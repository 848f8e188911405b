//! A problem that was checked, and its parts.

use std::ops::Range;

use fmha::expr::Variable;
use fmha::{Bias, BlockList, CapturedGrad, Code, DType, Descale, FwdProblem, MaskAxes, Masks, PartNumber};

use super::{Kind, LseRows, Tensor};
use crate::partition::{Axis, Piece};

/// A problem that was checked, as one rank sees it.
#[derive(Clone, Debug)]
pub(crate) struct Whole {
    /// The problem of one device, with functions in the form that kernels have built in, as far as they are.
    pub(crate) fwd: FwdProblem,
    /// The functions of a part, and the source of each of their numbers.
    pub(crate) code_of_part: Code,
    pub(crate) part_numbers: Vec<PartNumber>,
    /// Index of the captured tensor that holds the call's `ALiBi` slopes.
    pub(crate) slopes: Option<usize>,
    /// Captured tensors whose gradients are wanted.
    pub(crate) dcaptured: Vec<CapturedGrad>,
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
        let band = self.banded_part(q, k, &self.all_heads()).band(rows, keys);
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

    /// The problem of queries `q` against keys `k` with some heads: a part of the whole, contiguous. One without keys
    /// asks no function and no mask as data.
    pub(crate) fn part(&self, q: &Piece, k: &Piece, heads: &Heads) -> FwdProblem {
        let mut problem = self.banded_part(q, k, heads);
        if k.rows() > 0 {
            let code = if problem.part.is_whole() { &self.fwd.code } else { &self.code_of_part };
            problem.code = code.clone();
            problem.masks = self.masks_of(heads);
        }
        problem
    }

    /// The masks as data of some heads: the whole's tensors from other first elements on.
    fn masks_of(&self, heads: &Heads) -> Masks {
        let mut masks = self.fwd.masks;
        let axes = |axes: MaskAxes| MaskAxes { heads: self.mask_heads(axes, heads).len() as u32, ..axes };
        if let Some(intervals) = &mut masks.intervals {
            intervals.axes = axes(intervals.axes);
        }
        if let Some(bits) = &mut masks.bits {
            bits.axes = axes(bits.axes);
        }
        if let Some(lists) = &mut masks.block_lists {
            lists.axes = axes(lists.axes);
        }
        masks
    }

    /// Heads of a mask that some heads read.
    fn mask_heads(&self, axes: MaskAxes, heads: &Heads) -> Range<u32> {
        match axes.heads {
            1 => 0..1,
            of if of == self.fwd.dims.num_heads_q => heads.q.clone(),
            _ => heads.kv.clone(),
        }
    }

    /// As [`part`](Self::part), with the band alone to hide pairs.
    fn banded_part(&self, q: &Piece, k: &Piece, heads: &Heads) -> FwdProblem {
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
        let masks = self.mask_offsets(q, heads);
        let places =
            [q.sequences.start, heads.q.start, q.positions.start, k.positions.start, q.seqlen, k.seqlen];
        ScoreOffsets { bias, alibi: 4 * alibi, sink: 4 * head, descales, masks, places }
    }

    /// Offsets in bytes of the tensors of masks as data, in the order of [`ScoreOffsets::masks`].
    fn mask_offsets(&self, q: &Piece, heads: &Heads) -> [u64; 6] {
        let masks = &self.fwd.masks;
        let is_packed = self.q.cu_seqlens.is_some();
        let first = |axes: MaskAxes, strides: fmha::Strides, row: u32, by_sequence: bool| {
            let batch = if axes.per_batch && by_sequence { q.sequences.start } else { 0 };
            let head = self.mask_heads(axes, heads).start;
            let at = i64::from(batch) * strides.batch
                + i64::from(head) * strides.head
                + i64::from(row) * strides.seq;
            4 * at.unsigned_abs()
        };
        let rows = |axes, strides| first(axes, strides, q.whole_row, !is_packed);
        let list = |list: Option<BlockList>| match (masks.block_lists, list) {
            (Some(lists), Some(list)) => {
                let row = q.positions.start / lists.block_q.max(1);
                [list.counts, list.indices].map(|strides| first(lists.axes, strides, row, true))
            }
            _ => [0; 2],
        };
        let [num, index] = list(masks.block_lists.and_then(|lists| lists.partial));
        let [full_num, full_index] = list(masks.block_lists.and_then(|lists| lists.full));
        [
            masks.intervals.map_or(0, |it| rows(it.axes, it.strides)),
            masks.bits.map_or(0, |it| rows(it.axes, it.strides)),
            num,
            index,
            full_num,
            full_index,
        ]
    }

    /// Refuses queries that begin inside a block of lists.
    ///
    /// # Errors
    /// The first such queries, of any rank.
    pub(crate) fn queries_begin_blocks(&self) -> Result<(), String> {
        let Some(lists) = self.fwd.masks.block_lists else { return Ok(()) };
        let pieces = (0..self.ranks).map(|rank| (rank, self.q.pieces(rank)));
        begin_at("block_lists", "block_q", lists.block_q, "queries", pieces)
    }

    /// Refuses keys that begin inside a block of lists or a word of bits. `pieces`: those of each owner.
    ///
    /// # Errors
    /// The first such keys.
    pub(crate) fn keys_begin_blocks(
        &self,
        pieces: impl Iterator<Item = (u32, Vec<Piece>)> + Clone,
    ) -> Result<(), String> {
        let masks = &self.fwd.masks;
        if masks.bits.is_some() {
            begin_at("mask_bits", "a word's keys,", 32, "keys", pieces.clone())?;
        }
        let Some(lists) = masks.block_lists else { return Ok(()) };
        begin_at("block_lists", "block_k", lists.block_k, "keys", pieces)
    }
}

/// Byte offsets into the score's operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScoreOffsets {
    pub(crate) bias: u64,
    pub(crate) alibi: u64,
    pub(crate) sink: u64,
    pub(crate) descales: [u64; 3],
    /// Intervals, bits, counts and indices of the partial list, of the full list.
    pub(crate) masks: [u64; 6],
    /// First sequence, head, query and key in the whole, and its lengths: numbers of the functions of a part.
    pub(crate) places: [u32; 6],
}

impl ScoreOffsets {
    /// Number that a function of a part has in place of a variable.
    pub(crate) fn place(&self, variable: Variable) -> u32 {
        let [b, h, q, k, seqlen_q, seqlen_k] = self.places;
        match variable {
            Variable::Score => 0,
            Variable::Batch => b,
            Variable::Head => h,
            Variable::Query => q,
            Variable::Key => k,
            Variable::SeqlenQ => seqlen_q,
            Variable::SeqlenK => seqlen_k,
        }
    }
}

/// Refuses pieces that begin inside a block.
fn begin_at(
    field: &str,
    name: &str,
    size: u32,
    what: &str,
    pieces: impl Iterator<Item = (u32, Vec<Piece>)>,
) -> Result<(), String> {
    for (owner, pieces) in pieces {
        let begins = pieces.iter().filter(|piece| piece.rows() > 0).map(|piece| piece.positions.start);
        if let Some(at) = begins.into_iter().find(|at| !at.is_multiple_of(size.max(1))) {
            return Err(format!(
                "{field}: {what} of part {owner} begin at position {at}, no multiple of {name} {size}"
            ));
        }
    }
    Ok(())
}
