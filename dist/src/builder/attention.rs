//! Attention of a piece of queries and a piece of keys.

use fmha::{Bias, BwdProblem, CapturedGrad, DType, MaskShape, MaskSpec, VLayout};

use super::merge::one_row;
use super::operands::Forward;
use super::{Builder, Given, Grads, Held, HeldLse, Operands, Partial};
use crate::error::Result;
use crate::partition::Piece;
use crate::problem::{Heads, LseRows};
use crate::program::{At, Backward, Buf, Step};

impl Builder<'_> {
    /// O and LSE of queries `q` over keys `k`, whose first rows lie at `rows` of their tensors.
    fn forward(
        &mut self,
        (q, k): (&Piece, &Piece),
        heads: &Heads,
        operands: &Operands,
        rows: (u32, u32),
        (o, lse): (Held, HeldLse),
        how: Forward,
    ) -> Result<()> {
        let mut problem = self.whole.part(q, k, heads).write_lse(true);
        problem.score.sink &= how.sink;
        // ALiBi measures from the mask's diagonal, so it keeps the mask.
        if how.all_seen && !matches!(problem.score.bias, Bias::Alibi { .. }) {
            problem.mask = MaskSpec { shape: MaskShape::None, ..problem.mask };
        }
        let problem = problem
            .dtype_o(how.dtype)
            .v_layout(VLayout::RowMajor)
            .strides_q(operands.q.tensor.strides())
            .strides_k(operands.k.tensor.strides())
            .strides_v(operands.v.tensor.strides())
            .strides_o(o.tensor.strides())
            .arrivals(operands.arrivals);
        let valid = problem.validate().map_err(|error| self.wrong(&error.into()))?;
        let plan = self.device.plan_fwd(&valid, self.options).map_err(|error| self.wrong(&error))?;
        self.program.workspace = self.program.workspace.max(plan.workspace().bytes);
        let inputs = [operands.q.at(rows.0), operands.k.at(rows.1), operands.v.at(rows.1)];
        let score = self.whole.score_offsets(q, k, heads);
        self.push(Step::Forward { plan, inputs, o: o.at(how.row), lse: At(lse.buf, 0), score });
        Ok(())
    }

    /// A partial result of this rank's queries and of keys at their own rows, of all heads.
    pub(crate) fn forward_partial(
        &mut self,
        (q, k): (&Piece, &Piece),
        operands: &Operands,
        part: Partial,
        all_seen: bool,
    ) -> Result<()> {
        let (heads, how) = (self.whole.all_heads(), Forward::partial(all_seen));
        self.forward((q, k), &heads, operands, (q.row, k.row), (part.o, part.lse), how)
    }

    /// Forward as in [`forward`](Self::forward), with O and LSE in rows of larger tensors.
    pub(crate) fn forward_into(
        &mut self,
        (q, k): (&Piece, &Piece),
        heads: &Heads,
        operands: &Operands,
        rows: (u32, u32),
        (o, lse): (Held, HeldLse),
    ) -> Result<()> {
        let how = Forward { dtype: self.whole.fwd.dtypes.o, row: rows.0, sink: true, all_seen: false };
        let alone = LseRows::of_piece(q, heads.num_q());
        let unwanted = !self.whole.fwd.write_lse && lse.buf == Buf::Lse;
        if alone == lse.rows || unwanted {
            let lse = if unwanted { self.hold_lse(alone) } else { lse };
            return self.forward((q, k), heads, operands, rows, (o, lse), how);
        }
        let part = self.hold_lse(alone);
        self.forward((q, k), heads, operands, rows, (o, part), how)?;
        // The part is not used again: a piece that wrote it too would wait until this one is copied.
        self.copy_lse(&part.parts(q, 0, heads.num_q()), &lse.parts(q, rows.0, heads.num_q()))
    }

    /// Fills a part without keys: O of 0, and an LSE of -inf, or of the sinks if `sink` is set and there are
    /// any.
    pub(crate) fn nothing(&mut self, q: &Piece, part: Partial, sink: bool) -> Result<()> {
        let (heads, none, operands) = (self.whole.all_heads(), q.without_rows(), self.own_operands());
        let how = Forward { sink, ..Forward::partial(true) };
        self.forward((q, &none), &heads, &operands, (q.row, 0), (part.o, part.lse), how)
    }

    /// The LSE of a piece alone, out of one of more rows.
    fn lse_alone(&mut self, lse: HeldLse, q: &Piece, row: u32, heads: u32) -> Result<HeldLse> {
        let alone = LseRows::of_piece(q, heads);
        if alone == lse.rows {
            return Ok(lse);
        }
        let part = self.hold_lse(alone);
        self.copy_lse(&lse.parts(q, row, heads), &part.parts(q, 0, heads))?;
        Ok(part)
    }

    /// dQ, dK and dV of queries `q` and keys `k`, in f32, each into a tensor at a row.
    pub(crate) fn backward(
        &mut self,
        (q, k): (&Piece, &Piece),
        heads: &Heads,
        operands: &Operands,
        rows: (u32, u32),
        given: &Given,
        Grads { parts: grads, dsink }: Grads,
    ) -> Result<()> {
        let lse = self.lse_alone(given.lse, q, rows.0, heads.num_q())?;
        let fwd = self
            .whole
            .part(q, k, heads)
            .write_lse(true)
            .strides_q(operands.q.tensor.strides())
            .strides_k(operands.k.tensor.strides())
            .strides_v(operands.v.tensor.strides())
            .strides_o(given.o.tensor.strides())
            .arrivals(operands.arrivals);
        let [dq, dk, dv] = grads;
        // LSE has the sink in it, so only its gradient needs to know of it.
        let sink = fwd.score.sink && dsink.is_some();
        let has_captured = fwd.code.score.is_some() && !self.whole.dcaptured.is_empty();
        let gradients = if has_captured { &self.whole.dcaptured[..] } else { &[] };
        let gradients: Vec<_> =
            gradients.iter().map(|wanted| CapturedGrad { dtype: DType::F32, ..wanted.clone() }).collect();
        let problem = BwdProblem::new(fwd.sink(sink))
            .dtype_grad(DType::F32)
            .dcaptured(gradients)
            .write_dsink(dsink.is_some())
            .strides_dout(given.dout.tensor.strides())
            .strides_dq(dq.0.tensor.strides())
            .strides_dk(dk.0.tensor.strides())
            .strides_dv(dv.0.tensor.strides());
        let valid = problem.validate().map_err(|error| self.wrong(&error.into()))?;
        let plan = self.device.plan_bwd(&valid, self.options).map_err(|error| self.wrong(&error))?;
        self.program.workspace = self.program.workspace.max(plan.workspace().bytes);
        let inputs = [
            operands.q.at(rows.0),
            operands.k.at(rows.1),
            operands.v.at(rows.1),
            given.o.at(rows.0),
            At(lse.buf, 0),
            given.dout.at(rows.0),
        ];
        let grads = grads.map(|(held, row)| held.at(row));
        let score = self.whole.score_offsets(q, k, heads);
        // The first step writes the sums of captured tensors' gradients, later ones add to them.
        let bytes: Vec<u64> = if has_captured { self.captured_bytes() } else { Vec::new() };
        let terms: Vec<Buf> = bytes.iter().map(|&bytes| self.scratch(DType::F32, bytes)).collect();
        let dcaptured = terms.iter().map(|&buf| At(buf, 0)).collect();
        self.push(Step::Backward(Box::new(Backward { plan, inputs, grads, dsink, dcaptured, score })));
        if self.captured.is_empty() {
            self.captured = terms;
            return Ok(());
        }
        for (at, (&term, &bytes)) in terms.iter().zip(&bytes).enumerate() {
            let sum = self.captured[at];
            self.add((sum, one_row(bytes)), (term, one_row(bytes)))?;
            self.free_scratch(term, bytes);
        }
        Ok(())
    }
}
