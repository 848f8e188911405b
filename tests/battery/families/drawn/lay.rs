//! Random layouts like those of users: partly used lengths, packed sequences with padding between and after, slices
//! of a larger tensor, heads and sequences that share rows.

use fmha_core::{
    Bias, BiasBroadcast, BwdProblem, DType, Dims, ElementwiseBias, Extents, FwdProblem, KvLayout, QLayout,
    Shape, Strides, Totals, VLayout,
};

use super::Draw;
use crate::tensors::{Lengths, padded};

/// Sequences of one side of a problem: its queries or its keys.
struct Side {
    /// Total rows of all sequences, if they are packed.
    total: Option<u32>,
    /// Offsets at which sequences begin, then the end of the last; empty if they are not packed.
    offsets: Vec<i32>,
    /// Rows in use of each sequence; empty if all rows are in use.
    used: Vec<i32>,
}

impl Draw {
    /// Draws a sequence's length, at times 0 and at times the longest.
    fn short(&mut self, most: u32) -> u32 {
        match self.below(6) {
            0 => 0,
            1 | 2 => most,
            _ if most == 0 => 0,
            _ => self.length(most),
        }
    }

    fn side(&mut self, batch: u32, longest: u32, packed: bool) -> Side {
        let lengths: Vec<u32> = (0..batch).map(|_| self.short(longest)).collect();
        let signed = |lengths: &[u32]| lengths.iter().map(|length| length.cast_signed()).collect::<Vec<_>>();
        if !packed {
            let used = if self.one_in(3) { signed(&lengths) } else { Vec::new() };
            return Side { total: None, offsets: Vec::new(), used };
        }
        let has_padding = self.one_in(3);
        let mut offsets = vec![0];
        let mut end = 0;
        for length in &lengths {
            end += length + if has_padding { self.below(6) } else { 0 };
            offsets.push(end.cast_signed());
        }
        // Rows after the last sequence, as in a buffer that is larger than its batch.
        let behind = if self.one_in(2) { self.length(100) } else { 0 };
        let used = if has_padding || self.one_in(4) { signed(&lengths) } else { Vec::new() };
        Side { total: Some(end + behind), offsets, used }
    }

    /// Draws a batch, fully or partly used, or packed sequences, some empty; rarely only one side is packed.
    pub(super) fn sequences(&mut self, problem: &mut FwdProblem) -> Lengths {
        let Dims { batch, seqlen_q, seqlen_k, .. } = problem.dims;
        let packed = match self.below(10) {
            0..=2 => return Lengths::default(),
            3..=5 => [false, false],
            6..=8 => [true, true],
            _ => self.of([[true, false], [false, true]]),
        };
        let (q, k) = (self.side(batch, seqlen_q, packed[0]), self.side(batch, seqlen_k, packed[1]));
        problem.layout.q = if packed[0] { QLayout::Packed } else { QLayout::Batch };
        problem.layout.kv = if packed[1] { KvLayout::Packed } else { KvLayout::Strided };
        (problem.layout.seqused_q, problem.layout.seqused_k) = (!q.used.is_empty(), !k.used.is_empty());
        Lengths {
            totals: Totals { total_q: q.total, total_k: k.total, ..Totals::NONE },
            cu_seqlens_q: q.offsets,
            cu_seqlens_k: k.offsets,
            seqused_q: q.used,
            seqused_k: k.used,
            ..Lengths::default()
        }
    }

    /// Draws the queries of a call over a cache: at times packed, or partly used.
    pub(super) fn queries_of_a_cache(&mut self, problem: &mut FwdProblem, lengths: &mut Lengths) {
        let packed = match self.below(6) {
            0..=3 => return,
            4 => false,
            _ => true,
        };
        let side = self.side(problem.dims.batch, problem.dims.seqlen_q, packed);
        problem.layout.q = if packed { QLayout::Packed } else { QLayout::Batch };
        problem.layout.seqused_q = !side.used.is_empty();
        (lengths.totals.total_q, lengths.cu_seqlens_q, lengths.seqused_q) =
            (side.total, side.offsets, side.used);
    }

    /// Draws the strides of packed queries and of their O.
    pub(super) fn rows_of_queries(&mut self, totals: Totals, problem: &mut FwdProblem) {
        let Extents { q, o, .. } = problem.extents(totals);
        (problem.strides.q, problem.strides.o) =
            (self.strides(q, problem.dims), self.strides(o, problem.dims));
    }

    /// Draws strides with contiguous elements in a row, and no two elements at one address.
    fn strides(&mut self, shape: Shape, dims: Dims) -> Strides {
        // A packed tensor of one row does not determine the stride to a second row.
        let shape = Shape { seq: shape.seq.max(2), ..shape };
        let one = Strides::bshd(shape);
        match self.below(8) {
            0..=2 => one,
            3 | 4 => Strides::bhsd(shape),
            5 => padded(shape, 1 + self.below(16)),
            // Slices of packed b·s·3·h·d, and of b·s·(hq + 2 hkv)·d.
            6 => Strides { batch: one.batch * 3, seq: one.seq * 3, ..one },
            _ => {
                let heads = i64::from(dims.num_heads_q) + 2 * i64::from(dims.num_heads_kv);
                let seq = heads * i64::from(shape.dim.max(1));
                Strides { batch: seq * i64::from(shape.seq), seq, head: i64::from(shape.dim), dim: 1 }
            }
        }
    }

    /// Draws strides of an input, whose sequences or heads may share rows.
    fn strides_of_input(&mut self, shape: Shape, dims: Dims) -> Strides {
        let strides = self.strides(shape, dims);
        match self.below(24) {
            0 => Strides { head: 0, ..strides },
            1 => Strides { batch: 0, ..strides },
            2 => Strides { batch: 0, head: 0, ..strides },
            _ => strides,
        }
    }

    /// Draws strides of Q, K, V and O: mostly of one kind, sometimes each of its own.
    pub(super) fn layouts(&mut self, totals: Totals, problem: &mut FwdProblem) {
        let Extents { q, k, v, o, .. } = problem.extents(totals);
        let dims = problem.dims;
        let alike = self.one_in(2);
        if alike {
            // The generator is copied, so that all four tensors make the same choices.
            let stream = self.word();
            let of = |shape| Draw(stream).strides(shape, dims);
            (problem.strides.q, problem.strides.k, problem.strides.v, problem.strides.o) =
                (of(q), of(k), of(v), of(o));
        } else {
            problem.strides.q = self.strides_of_input(q, dims);
            problem.strides.k = self.strides_of_input(k, dims);
            problem.strides.v = self.strides_of_input(v, dims);
            problem.strides.o = self.strides(o, dims);
        }
        if self.one_in(6) {
            problem.layout.v = VLayout::ColMajor;
            let (gap, one) = (i64::from(self.of([0, 0, 3, 8])), i64::from(self.below(2)));
            let dim = i64::from(v.seq.max(2)) + gap;
            let head = dim * i64::from(v.dim) + one;
            problem.strides.v = Strides { batch: head * i64::from(v.head), seq: 1, head, dim };
        }
    }

    /// Draws strides of dO, which may be one row for all heads, and of dQ, dK and dV, whose rows are separate.
    pub(super) fn layouts_of_gradients(&mut self, totals: Totals, problem: &mut BwdProblem) {
        let Extents { q, k, v, o, .. } = problem.fwd.extents(totals);
        let dims = problem.fwd.dims;
        problem.dout = self.strides_of_input(o, dims);
        (problem.dq, problem.dk, problem.dv) =
            (self.strides(q, dims), self.strides(k, dims), self.strides(v, dims));
    }

    /// Draws no bias, an elementwise one of either type and any broadcast, or ALiBi.
    pub(super) fn bias(&mut self, problem: &mut FwdProblem) {
        let qk = problem.dtypes.qk;
        let sixteen_bit = match (qk.is_fp8(), problem.dtypes.v.is_fp8()) {
            (true, true) => DType::F16,
            (true, false) => problem.dtypes.v,
            _ => qk,
        };
        problem.score.bias = match self.below(12) {
            0..=6 => Bias::None,
            7 => Bias::Alibi { per_batch: false },
            8 => Bias::Alibi { per_batch: true },
            _ => {
                let dtype = self.of([DType::F32, sixteen_bit]);
                let broadcast = self.of(BiasBroadcast::ALL);
                let shape = problem.shape_bias(broadcast);
                let gap = i64::from(self.of([0, 0, 1, 3, 8]));
                let seq = i64::from(shape.dim) + gap;
                let head = seq * i64::from(shape.seq) + gap;
                let strides = Strides { batch: head * i64::from(shape.head), seq, head, dim: 1 };
                // One row for all queries, as in a padding mask; one matrix for all heads of a sequence.
                let strides = match self.below(8) {
                    0 => Strides { seq: 0, ..strides },
                    1 => Strides { head: 0, ..strides },
                    2 => Strides { head: 0, seq: 0, ..strides },
                    _ => strides,
                };
                Bias::Elementwise(ElementwiseBias { dtype, broadcast, strides })
            }
        };
    }
}
