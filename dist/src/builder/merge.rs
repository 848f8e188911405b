//! Merges of partial results, and sums of gradients.

use fmha::{CombinePlan, CombineProblem, DType, Merge, PlanOptions, Shape, Strides};

use super::{Builder, Held, HeldLse, Moves, Partial};
use crate::error::Result;
use crate::group::Block;
use crate::partition::Piece;
use crate::problem::{Kind, LseRows, Tensor};
use crate::program::{At, Buf, Part, Step};

/// Alignment of tensors that lie side by side in a buffer: that of a buffer of its own.
const PLACE: u64 = 256;

/// Parts or terms that one merge takes on every device.
pub(crate) const MAX_PARTS: u32 = 128;

/// A row of a buffer, from its first byte on.
pub(super) fn one_row(bytes: u64) -> Block {
    Block { offset: 0, rows: 1, row_bytes: bytes, stride: bytes }
}

impl Builder<'_> {
    /// A partial result of a piece.
    pub(crate) fn partial(&mut self, q: &Piece, heads: u32) -> Partial {
        let (tensor, rows) = self.shapes_of_partial(q, heads);
        Partial { o: self.hold(tensor), lse: self.hold_lse(rows) }
    }

    fn shapes_of_partial(&self, q: &Piece, heads: u32) -> (Tensor, LseRows) {
        (self.whole.tensor_of_piece(Kind::O, q, heads, DType::F32), LseRows::of_piece(q, heads))
    }

    /// Partial results of all ranks, side by side in one buffer: by piece and rank; and the step that brings
    /// each rank's to all.
    pub(crate) fn partials_of_all(&mut self, queries: &[Piece]) -> (Vec<Vec<Partial>>, Step) {
        let heads = self.whole.fwd.dims.num_heads_q;
        let (mut bytes, mut places) = (0u64, Vec::new());
        let mut place = |of: u64| {
            let at = bytes;
            bytes = (bytes + of).next_multiple_of(PLACE);
            at
        };
        for q in queries {
            let (tensor, rows) = self.shapes_of_partial(q, heads);
            places.push(((tensor, place(tensor.bytes())), (rows, place(rows.bytes()))));
        }
        let (rank, ranks) = (self.rank(), self.ranks());
        let number = self.program.scratch.len();
        let all = self.keep(DType::F32, bytes.saturating_mul(u64::from(ranks)));
        let (mut own, mut others) = (Vec::new(), Vec::new());
        let mut of = |((tensor, o), (rows, lse)): ((Tensor, u64), (LseRows, u64)), of_rank: u32| {
            let first = u64::from(of_rank) * bytes;
            let o = self.new_scratch(DType::F32, tensor.bytes(), Some((number, first + o)));
            let lse = self.new_scratch(DType::F32, rows.bytes(), Some((number, first + lse)));
            if of_rank == rank { &mut own } else { &mut others }.extend([o, lse]);
            Partial { o: Held { buf: o, tensor }, lse: HeldLse { buf: lse, rows } }
        };
        let parts =
            places.into_iter().map(|place| (0..ranks).map(|rank| of(place, rank)).collect()).collect();
        (parts, Step::AllGather { all, bytes, own, others })
    }

    /// Merges parts of a piece, in this order.
    pub(crate) fn combine(
        &mut self,
        parts: &[Partial],
        (o, row, dtype): (Held, u32, DType),
        lse: Option<HeldLse>,
    ) -> Result<()> {
        let Some(first) = parts.first() else { return Ok(()) };
        let tensor = first.o.tensor;
        let shape = Shape { batch: tensor.batch, seq: tensor.rows, head: tensor.heads, dim: tensor.dim };
        let problem = CombineProblem::new(parts.len() as u32, DType::F32, dtype, shape)
            .strides_o(o.tensor.strides())
            .write_lse(lse.is_some());
        let plan = self.plan_combine(problem)?;
        let lse = At(lse.map_or(Buf::Lse, |lse| lse.buf), 0);
        let parts = parts.iter().map(|part| [At(part.o.buf, 0), At(part.lse.buf, 0)]).collect();
        self.push(Step::Combine { plan, parts, o: o.at(row), lse });
        Ok(())
    }

    /// Merges the last parts of a piece of this rank's queries, with the sinks, into the call's O and LSE.
    pub(crate) fn conclude(&mut self, q: &Piece, mut parts: Vec<Partial>) -> Result<()> {
        let heads = self.whole.fwd.dims.num_heads_q;
        if self.whole.fwd.score.sink || parts.is_empty() {
            let part = self.partial(q, heads);
            self.nothing(q, part, true)?;
            parts.push(part);
        }
        let (o, dtype) = (self.own(Kind::O), self.whole.fwd.dtypes.o);
        if !self.whole.fwd.write_lse {
            return self.combine(&parts, (o, q.row, dtype), None);
        }
        let (alone, own) = (LseRows::of_piece(q, heads), self.own_lse());
        if alone == own.rows {
            return self.combine(&parts, (o, q.row, dtype), Some(own));
        }
        let lse = self.hold_lse(alone);
        self.combine(&parts, (o, q.row, dtype), Some(lse))?;
        self.copy_lse(&lse.parts(q, 0, heads), &own.parts(q, q.row, heads))
    }

    /// `to`, of type `dtype`, = the sum of f32 `terms`, in their order, rounded once; 0 without terms.
    pub(crate) fn sum(&mut self, to: Part, terms: Vec<Part>, dtype: DType) -> Result<()> {
        self.merge(to, terms, (DType::F32, dtype), Merge::Sum)
    }

    /// `to`, of f32, has `term` added.
    pub(crate) fn add(&mut self, to: Part, term: Part) -> Result<()> {
        self.merge(to, vec![term], (DType::F32, DType::F32), Merge::AddTo)
    }

    /// Terms of the first type into `to` of the second.
    pub(super) fn merge(
        &mut self,
        to: Part,
        mut terms: Vec<Part>,
        (dtype_term, dtype): (DType, DType),
        merge: Merge,
    ) -> Result<()> {
        let (target, size) = (to.1, dtype.size_bytes());
        if target.bytes() == 0 {
            return Ok(());
        }
        // More than one merge takes are added in their order by several, whose sums are f32.
        while terms.len() > MAX_PARTS as usize {
            let rest = terms.split_off(MAX_PARTS as usize);
            let block = Block { offset: 0, ..terms[0].1 };
            let sum = (self.scratch(DType::F32, block.end()), block);
            self.merge(sum, terms, (DType::F32, DType::F32), Merge::Sum)?;
            terms = std::iter::once(sum).chain(rest).collect();
        }
        // All parts of a call must have equal strides: terms with other strides than the first are copied.
        let stride = |block: Block| if target.rows == 1 { block.row_bytes } else { block.stride };
        if terms.iter().any(|term| stride(term.1) != stride(terms[0].1)) {
            for term in &mut terms {
                let block = Block { offset: 0, stride: term.1.row_bytes, ..term.1 };
                let packed = (self.scratch(dtype_term, block.bytes()), block);
                self.copy(&[*term], &[packed])?;
                *term = packed;
            }
        }
        let elems = target.row_bytes / size;
        // A warp adds a row at a time: as long a row as divides the elements and is not too long for one.
        let dim = (1..=256.min(elems)).rev().find(|dim| elems.is_multiple_of(*dim)).unwrap_or(1);
        let rows = Shape {
            batch: target.rows as u32,
            seq: u32::try_from(elems / dim).unwrap_or(u32::MAX),
            head: 1,
            dim: dim as u32,
        };
        let strides = |batch: u64| Strides { batch: batch as i64, ..Strides::bshd(rows) };
        let mut problem = CombineProblem::new(terms.len() as u32, dtype_term, dtype, rows)
            .strides_o(strides(stride(target) / size))
            .merge(merge);
        if let Some(first) = terms.first() {
            problem = problem.strides_part(strides(stride(first.1) / dtype_term.size_bytes()));
        }
        let plan = self.plan_combine(problem)?;
        let terms = terms.iter().map(|&(buf, block)| At(buf, block.offset)).collect();
        self.push(Step::Sum { plan, terms, to: At(to.0, target.offset) });
        Ok(())
    }

    fn plan_combine(&self, problem: CombineProblem) -> Result<CombinePlan> {
        let valid = problem.validate().map_err(|error| self.wrong(&error.into()))?;
        // Options that name attention's kernel or tile are not for this kernel.
        let options = PlanOptions::default()
            .allow_fallback(self.options.allow_fallback)
            .deterministic(self.options.deterministic);
        self.device.plan_combine(&valid, &options).map_err(|error| self.wrong(&error))
    }

    /// The sinks' gradient: every rank's own part, to all, added in the order of the ranks.
    pub(crate) fn sum_dsink(&mut self, parts: &[At]) -> Result<()> {
        let row_bytes = 4 * u64::from(self.whole.fwd.dims.num_heads_q);
        let block = |offset| Block { offset, rows: 1, row_bytes, stride: row_bytes };
        let own = self.scratch(DType::F32, row_bytes);
        self.sum((own, block(0)), parts.iter().map(|at| (at.0, block(at.1))).collect(), DType::F32)?;
        self.sum_over_ranks(own, row_bytes, (Buf::Dsink, DType::F32))
    }

    /// Bytes of the gradients of captured tensors, in f32.
    pub(super) fn captured_bytes(&self) -> Vec<u64> {
        let code = &self.whole.fwd.code;
        let elems = |name: &str| code.tensor(name).map_or(0, fmha::CapturedTensor::num_elems);
        self.whole.dcaptured.iter().map(|wanted| 4 * elems(&wanted.name)).collect()
    }

    /// The gradients of captured tensors: every rank's own sums, to all, added in the order of the ranks.
    pub(crate) fn sum_captured(&mut self) -> Result<()> {
        let bytes = self.captured_bytes();
        let dtypes: Vec<DType> = self.whole.dcaptured.iter().map(|wanted| wanted.dtype).collect();
        for (at, (bytes, dtype)) in bytes.into_iter().zip(dtypes).enumerate() {
            let own = match self.captured.get(at) {
                Some(&own) => own,
                None => {
                    let own = self.scratch(DType::F32, bytes);
                    self.sum((own, one_row(bytes)), Vec::new(), DType::F32)?;
                    own
                }
            };
            self.sum_over_ranks(own, bytes, (Buf::Dcaptured(at), dtype))?;
        }
        Ok(())
    }

    /// Sends `row_bytes` bytes of f32 of every rank to all, which add them in the order of the ranks into `to`.
    fn sum_over_ranks(&mut self, own: Buf, row_bytes: u64, (to, dtype): (Buf, DType)) -> Result<()> {
        let block = |offset| Block { offset, ..one_row(row_bytes) };
        let all = self.scratch(DType::F32, row_bytes * u64::from(self.ranks()));
        let mut moves = Moves::default();
        for rank in 0..self.ranks() {
            moves.send(rank, (own, block(0)));
            moves.receive(rank, (all, block(u64::from(rank) * row_bytes)));
        }
        self.exchange(&moves)?;
        let terms = (0..self.ranks()).map(|rank| (all, block(u64::from(rank) * row_bytes))).collect();
        self.sum((to, one_row(row_bytes / 4 * dtype.size_bytes())), terms, dtype)
    }
}
