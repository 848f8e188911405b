//! Backward over lists of keys.
//!
//! ```text
//! for each kv head, for each chunk of tokens, ascending
//!     each token, on any thread       P = exp(S - LSE), dS = P (keep dO V^T - delta + dLSE)
//!                                     dQ = dS K; its rows of dK and dV, one for each entry of its list
//!     each range of keys, likewise    adds the rows that name its keys: tokens ascending, each in its list's order
//! ```
//!
//! The sum of each key's dK and dV has a fixed order, that of the inverted list, for any number of threads and any
//! chunk size; a key that is listed twice is added twice.

use fmha_core::{BwdArgs, SeqSpan, ValidBwd};

use super::{Scratch, Shared, Side, TILE_KEYS, Token};
use crate::backward::Backward;
use crate::blocks::{
    Columns, Factors, Gather, Gradient, Multiply, RowDots, Rows, TransposePanels, WriteRows,
};
use crate::memory::{Bytes, Floats, reserve};
use crate::score::{HeadScore, Panel};
use crate::simd::{Op, Simd};
use crate::tasks::Threads;
use crate::tensor::{Source, Target, f32_at};
use crate::tile::Store;

/// f32 of a chunk's rows of dK and dV: 64 MiB.
const CHUNK_ELEMS: usize = 1 << 24;

/// Tokens of a chunk, at most.
const CHUNK_TOKENS: usize = 64;

/// Ranges of keys per thread whose sums the threads add to, if there are several threads.
const RANGES_A_THREAD: usize = 4;

/// Operands of a backward call that every token reads, besides those of the forward.
struct Gradients<'a> {
    shared: Shared<'a>,
    problem: &'a ValidBwd,
    args: &'a BwdArgs<'a>,
    o: Source,
    dout: Source,
    dq: Target,
    /// Each row's share of dSink, laid out like LSE; null if dSink is not wanted.
    sink_terms: Option<Bytes>,
}

/// One thread's buffers for the gradients of a token.
struct State {
    scratch: Scratch,
    /// dO of a token's heads, `[panels][head_dim_v][PANEL heads]`; then dO as rows, and Q as rows.
    douts: Floats,
    dout_rows: Floats,
    query_rows: Floats,
    /// dP, later overwritten by dS, laid out like P.
    gradients: Floats,
    /// The soft-cap's slope, laid out as P.
    slope: Floats,
    dq: Floats,
    lse: Floats,
    origin: Floats,
    delta: Floats,
    dlse: Floats,
    dots: Floats,
    row: Floats,
    panels: Vec<Option<Panel>>,
}

/// A token's rows of dK and dV: one for each entry of its list, in panels `[dim / PANEL][capacity][PANEL]`.
struct Slot {
    listed: Vec<u32>,
    dk: Floats,
    dv: Floats,
}

/// Computes a backward call with lists.
///
/// # Errors
/// Memory for scratch that the system refuses, before anything is written.
pub(crate) fn backward<S: Simd>(call: &Backward<'_>, s: S, threads: &Threads) -> fmha_core::Result<()> {
    let (problem, args) = (call.problem, call.args);
    let fwd = problem.fwd();
    let q = Source::new(args.q, fwd.dtypes.qk, fwd.strides.q);
    let operands = (&args.seq, &args.score, &args.masks);
    let Some(shared) = Shared::new(fwd, operands, (q, args.k, args.v), None)? else {
        return Ok(());
    };
    let wants_sinks = problem.write_dsink && args.dsink.is_some();
    let rows = if wants_sinks { fwd.extents(args.seq.totals).lse_elems as usize } else { 0 };
    let mut sink_terms = Floats::scratch(rows)?;
    let all = Gradients {
        shared,
        problem,
        args,
        o: Source::new(args.o, fwd.dtypes.o, fwd.strides.o),
        dout: Source::new(args.dout, fwd.dtypes.o, problem.dout),
        dq: Target::new(&args.dq, problem.dtype_grad, problem.dq),
        sink_terms: wants_sinks.then(|| Bytes::of(&mut sink_terms)),
    };
    all.run(s, call.spans, threads)
}

impl Gradients<'_> {
    fn run<S: Simd>(&self, s: S, spans: &[SeqSpan], threads: &Threads) -> fmha_core::Result<()> {
        let dims = self.problem.fwd.dims;
        let (cols_qk, cols_v) = self.cols::<S>();
        let longest = spans.iter().map(|span| span.seqlen_k as usize).max().unwrap_or(0);
        let tokens = spans.iter().map(|span| span.seqlen_q as usize).max().unwrap_or(0);
        let chunk = (CHUNK_ELEMS / (self.shared.capacity * (cols_qk + cols_v)).max(1))
            .clamp(threads.count(), CHUNK_TOKENS.max(threads.count()))
            .min(tokens.max(1));
        let used = threads.used(chunk);
        let mut states = reserve(used)?;
        for _ in 0..used {
            states.push(self.state::<S>()?);
        }
        let mut slots = reserve(chunk)?;
        for _ in 0..chunk {
            slots.push(self.slot::<S>()?);
        }
        let mut dk = Floats::scratch(longest * cols_qk)?;
        let mut dv = Floats::scratch(longest * cols_v)?;
        for &span in spans {
            for i_head_kv in 0..dims.num_heads_kv {
                dk.fill(0.0);
                dv.fill(0.0);
                let sums = [Bytes::of(&mut dk), Bytes::of(&mut dv)];
                for first in (0..span.seqlen_q).step_by(chunk) {
                    let count = chunk.min((span.seqlen_q - first) as usize);
                    let filled = Filled::new(&mut slots[..count]);
                    threads.for_each(&mut states, count, |state, at| {
                        let token = Token { span, i: first + at as u32, i_head_kv };
                        // SAFETY: each task has a slot of its own.
                        self.token(s, state, token, unsafe { filled.slot(at) });
                    });
                    self.add_rows(s, threads, &mut states, span, sums, &slots[..count]);
                }
                self.write_rows(threads, &mut states, (span, i_head_kv), sums, (cols_qk, cols_v));
            }
        }
        self.write_dsink(spans);
        Ok(())
    }

    /// `head_dim_qk` and `head_dim_v`, each rounded up to a multiple of PANEL.
    fn cols<S: Simd>(&self) -> (usize, usize) {
        let dims = self.problem.fwd.dims;
        let whole = |dim: u32| (dim as usize).next_multiple_of(S::PANEL);
        (whole(dims.head_dim_qk), whole(dims.head_dim_v))
    }

    fn state<S: Simd>(&self) -> fmha_core::Result<State> {
        let (cols_qk, cols_v) = self.cols::<S>();
        let fwd = self.problem.fwd();
        let dim_v = fwd.dims.head_dim_v as usize;
        let lanes = self.shared.lanes::<S>();
        let scores = lanes * self.shared.capacity;
        let mut panels = reserve(lanes / S::PANEL)?;
        panels.resize(lanes / S::PANEL, None);
        Ok(State {
            scratch: self.shared.scratch::<S>()?,
            douts: Floats::scratch(lanes * dim_v)?,
            dout_rows: Floats::scratch(lanes * cols_v)?,
            query_rows: Floats::scratch(lanes * cols_qk)?,
            gradients: Floats::scratch(scores)?,
            slope: Floats::scratch(if fwd.score.softcap.is_some() { scores } else { 0 })?,
            dq: Floats::scratch(lanes * cols_qk)?,
            lse: Floats::scratch(lanes)?,
            origin: Floats::scratch(lanes)?,
            delta: Floats::scratch(lanes)?,
            dlse: Floats::scratch(lanes)?,
            dots: Floats::scratch(RowDots::scratch::<S>(dim_v))?,
            row: Floats::scratch(cols_qk.max(cols_v))?,
            panels,
        })
    }

    fn slot<S: Simd>(&self) -> fmha_core::Result<Slot> {
        let (cols_qk, cols_v) = self.cols::<S>();
        Ok(Slot {
            listed: Vec::new(),
            dk: Floats::scratch(self.shared.capacity * cols_qk)?,
            dv: Floats::scratch(self.shared.capacity * cols_v)?,
        })
    }

    /// Computes dQ of a token, and its rows of dK and dV.
    fn token<S: Simd>(&self, s: S, state: &mut State, token: Token, slot: &mut Slot) {
        let shared = &self.shared;
        let Token { span, i, i_head_kv } = token;
        let dims = self.problem.fwd.dims;
        let (dim_qk, dim_v) = (dims.head_dim_qk as usize, dims.head_dim_v as usize);
        let (group, lanes, capacity) = (shared.group(), shared.lanes::<S>(), shared.capacity);
        let first_head = i_head_kv * self.problem.fwd.gqa_ratio();
        shared.begin(s, &mut state.scratch, token);
        self.load_rows(s, state, token);
        let capped = shared.problem.score.softcap.is_some();
        let slope = capped.then(|| state.slope.as_mut_ptr());
        shared.scores(s, &mut state.scratch, token, slope);
        self.load_row_sums::<S>(state, token);
        let gradients = state.gradients.as_mut_ptr();
        shared.products(s, &mut state.scratch, Side::V, state.douts.as_ptr(), 1.0, gradients);
        let keys = state.scratch.listed.len();
        for lane in (0..group).step_by(S::PANEL) {
            let panel = shared.panel::<S>(lane, keys);
            let drops = state.scratch.heads[0].drops;
            if drops {
                let factor = state.scratch.heads[0].keep_scale;
                shared.keep::<S>(&mut state.scratch, token, lane, factor);
            }
            let offset = lane * capacity;
            s.run(Gradient {
                panel,
                // The rows beyond are not read.
                capacity: keys,
                weights: state.scratch.weights.as_mut_ptr().wrapping_add(offset),
                gradients: gradients.wrapping_add(offset),
                keep: drops.then(|| state.scratch.extra.as_ptr()),
                origin: Some(state.origin.as_ptr().wrapping_add(lane)),
                lse: state.lse.as_ptr().wrapping_add(lane),
                delta: state.delta.as_ptr().wrapping_add(lane),
                dlse: state.dlse.as_ptr().wrapping_add(lane),
            });
            if capped {
                let y = state.slope.as_ptr().wrapping_add(offset);
                s.run(Multiply { panel, x: gradients.wrapping_add(offset), y });
            }
            state.panels[lane / S::PANEL] = Some(panel);
        }
        for first in (0..keys).step_by(TILE_KEYS) {
            let tile = first..keys.min(first + TILE_KEYS);
            let rows = tile.len();
            shared.load_columns(s, &mut state.scratch, Side::K, tile);
            for lane in (0..group).step_by(S::PANEL) {
                s.run(Columns {
                    panel: shared.panel::<S>(lane, rows),
                    weights: gradients.cast_const().wrapping_add(lane * capacity + first * S::PANEL),
                    right: state.scratch.columns.as_ptr(),
                    capacity: TILE_KEYS,
                    dim: dim_qk,
                    out: state.dq.as_mut_ptr().wrapping_add(lane * S::PANEL),
                    out_capacity: lanes,
                    store: if first == 0 { Store::Scaled(1.0) } else { Store::Add },
                    pairs: false,
                });
            }
        }
        s.run(WriteRows {
            to: &self.dq.heads(span.q_batch, span.q_row + i, first_head),
            at: (0, 0, 0),
            rows: group,
            cols: dim_qk,
            from: state.dq.as_ptr(),
            capacity: lanes,
            factors: Factors::All(self.problem.fwd.resolved_softmax_scale()),
            untouched: if keys == 0 { u128::MAX } else { 0 },
            row: state.row.as_mut_ptr(),
        });
        slot.listed.clone_from(&state.scratch.listed);
        for (weights, right, dim, out) in [
            (gradients.cast_const(), &state.query_rows, dim_qk, &mut slot.dk),
            (state.scratch.weights.as_ptr(), &state.dout_rows, dim_v, &mut slot.dv),
        ] {
            for panel in 0..dim.div_ceil(S::PANEL) {
                let rows = keys.next_multiple_of(S::TILE_ROWS);
                s.run(Clear { to: out.as_mut_ptr().wrapping_add(panel * capacity * S::PANEL), rows });
            }
            s.run(Rows {
                panels: &state.panels,
                weights,
                capacity,
                rows: keys,
                queries: group,
                right: right.as_ptr(),
                right_capacity: lanes,
                dim,
                out: out.as_mut_ptr(),
            });
        }
    }

    /// Loads Q and dO of a token's heads as rows, and dO transposed.
    fn load_rows<S: Simd>(&self, s: S, state: &mut State, token: Token) {
        let Token { span, i, i_head_kv } = token;
        let dims = self.problem.fwd.dims;
        let first_head = i_head_kv * self.problem.fwd.gqa_ratio();
        let (rows, capacity) = (self.shared.group(), self.shared.lanes::<S>());
        let head = state.scratch.heads[0];
        for (from, cols, factor, to) in [
            (&self.shared.q, dims.head_dim_qk, head.descale_q, &mut state.query_rows),
            (&self.dout, dims.head_dim_v, 1.0, &mut state.dout_rows),
        ] {
            s.run(Gather {
                from: from.heads(span.q_batch, span.q_row + i, first_head),
                rows,
                cols: cols as usize,
                factor,
                to: to.as_mut_ptr(),
                capacity,
                pairs: false,
                is_moderate: &mut true,
            });
        }
        let (from, to) = (state.dout_rows.as_ptr(), state.douts.as_mut_ptr());
        let cols = dims.head_dim_v as usize;
        s.run(TransposePanels { from, capacity, rows, cols, to });
        s.run(RowDots {
            left: self.dout.heads(span.q_batch, span.q_row + i, first_head),
            right: self.o.heads(span.q_batch, span.q_row + i, first_head),
            rows,
            cols,
            scratch: state.dots.as_mut_ptr(),
            to: state.delta.as_mut_ptr(),
        });
    }

    /// Loads LSE and dLSE of a token's heads, and computes their shares of dSink. `scratch` has the scores.
    fn load_row_sums<S: Simd>(&self, state: &mut State, token: Token) {
        let fwd = self.problem.fwd();
        let State { scratch, lse: lses, origin: origins, delta, dlse: dlses, .. } = state;
        for (lane, head) in scratch.heads.iter().enumerate() {
            let index = token.span.lse_index(fwd, head.i_head, token.i);
            let dlse = self.args.dlse.as_ref().map_or(0.0, |dlse| f32_at(dlse, index));
            let lse = self.lse_with_sink(head, f64::from(f32_at(&self.args.lse, index)));
            let (origin, lse) = self.origin_and_lse::<S>(scratch, lane, head, lse);
            let share = match head.sink {
                Some(f32::INFINITY) => 1.0,
                Some(sink) if lse != f64::NEG_INFINITY => (f64::from(sink) - origin - lse).min(0.0).exp(),
                _ => 0.0,
            };
            // SAFETY: a number for each lane; the row's term is this task's.
            unsafe {
                // A row that saw nothing has P = 0 = exp(S - inf).
                let lse = if lse == f64::NEG_INFINITY { f64::INFINITY } else { lse };
                *lses.as_mut_ptr().add(lane) = lse as f32;
                *origins.as_mut_ptr().add(lane) = origin as f32;
                *dlses.as_mut_ptr().add(lane) = dlse;
                if let Some(terms) = self.sink_terms {
                    let delta = f64::from(*delta.as_ptr().add(lane));
                    terms.write_f32(index, (share * (f64::from(dlse) - delta)) as f32);
                }
            }
        }
    }

    /// The LSE from which P is computed: with the sink, even if the forward wrote LSE without it.
    fn lse_with_sink(&self, head: &HeadScore, lse: f64) -> f64 {
        let without = self.problem.fwd.lists.is_some_and(|lists| lists.lse_without_sink);
        match head.sink.filter(|_| without) {
            None => lse,
            Some(sink) => {
                let max = lse.max(f64::from(sink));
                let sum = (lse - max).exp() + (f64::from(sink) - max).exp();
                if max.is_infinite() { max } else { max + sum.ln() }
            }
        }
    }

    /// Returns the origin from which a row's scores are measured, and its LSE relative to it. f32 rounds a large
    /// LSE by up to half an ulp, which would scale all P of the row by one factor; such a row uses the logarithm of
    /// its own sum of exponentials instead of LSE.
    fn origin_and_lse<S: Simd>(
        &self,
        scratch: &Scratch,
        lane: usize,
        head: &HeadScore,
        lse: f64,
    ) -> (f64, f64) {
        if !lse.is_finite() || lse.abs() < 16384.0 {
            return (0.0, lse);
        }
        let panel = S::PANEL;
        let from = lane / panel * panel * self.shared.capacity + lane % panel;
        // SAFETY: the rows of this lane.
        let score = |row: usize| unsafe { *scratch.weights.as_ptr().add(from + row * panel) };
        let sink = head.sink.map_or(f64::NEG_INFINITY, f64::from);
        let scores = || (0..scratch.listed.len()).map(score);
        let largest = scores().fold(f32::NEG_INFINITY, f32::max);
        let origin = if largest.is_finite() { f64::from(largest) } else { sink };
        if !origin.is_finite() {
            return (0.0, lse);
        }
        let sum: f64 = scores().map(|score| (f64::from(score) - origin).exp()).sum();
        let lse = (sum + (sink - origin).exp()).ln();
        (origin, lse)
    }

    /// Adds a chunk's rows to the sums of the listed keys.
    fn add_rows<S: Simd>(
        &self,
        s: S,
        threads: &Threads,
        states: &mut [State],
        span: SeqSpan,
        sums: [Bytes; 2],
        slots: &[Slot],
    ) {
        let dims = self.problem.fwd.dims;
        let cols = self.cols::<S>();
        let keys = span.seqlen_k as usize;
        let ranges = if states.len() == 1 { 1 } else { RANGES_A_THREAD * states.len() };
        let each = keys.div_ceil(ranges).max(1);
        threads.for_each(states, keys.div_ceil(each), |_, range| {
            let mine = range * each..keys.min((range + 1) * each);
            for slot in slots {
                for (row, &j) in
                    slot.listed.iter().enumerate().filter(|(_, j)| mine.contains(&(**j as usize)))
                {
                    for (from, to, dim, cols) in [
                        (&slot.dk, sums[0], dims.head_dim_qk, cols.0),
                        (&slot.dv, sums[1], dims.head_dim_v, cols.1),
                    ] {
                        s.run(AddRow {
                            from: from.as_ptr().wrapping_add(row * S::PANEL),
                            step: self.shared.capacity * S::PANEL,
                            panels: (dim as usize).div_ceil(S::PANEL),
                            to: to.f32_from(j as usize * cols),
                        });
                    }
                }
            }
        });
    }

    /// dK and dV of a kv head of a sequence.
    fn write_rows(
        &self,
        threads: &Threads,
        states: &mut [State],
        (span, i_head_kv): (SeqSpan, u32),
        sums: [Bytes; 2],
        cols: (usize, usize),
    ) {
        let (problem, dims) = (self.problem, self.problem.fwd.dims);
        let dk = Target::new(&self.args.dk, problem.dtype_grad, problem.dk);
        let dv = Target::new(&self.args.dv, problem.dtype_grad, problem.dv);
        let scale = problem.fwd.resolved_softmax_scale();
        const ROWS: u32 = 64;
        threads.for_each(states, span.seqlen_k.div_ceil(ROWS) as usize, |state, task| {
            let first = task as u32 * ROWS;
            for j in first..span.seqlen_k.min(first + ROWS) {
                for (to, from, factor, dim, cols) in [
                    (&dk, sums[0], scale, dims.head_dim_qk, cols.0),
                    (&dv, sums[1], 1.0, dims.head_dim_v, cols.1),
                ] {
                    // SAFETY: a row of sums, scratch of as many numbers, and a row of the gradient that is this task's.
                    unsafe {
                        let from = std::slice::from_raw_parts(from.f32_from(j as usize * cols), dim as usize);
                        let row = std::slice::from_raw_parts_mut(state.row.as_mut_ptr(), dim as usize);
                        row.iter_mut().zip(from).for_each(|(to, from)| *to = from * factor);
                        to.write_row(span.k_batch, span.k_row + j, i_head_kv, 0, row);
                    }
                }
            }
        });
    }

    /// Writes dSink: adds each row's contribution in f64, sequences and tokens in ascending order.
    fn write_dsink(&self, spans: &[SeqSpan]) {
        let (Some(to), Some(terms)) = (&self.args.dsink, self.sink_terms) else { return };
        let (fwd, to) = (self.problem.fwd(), Bytes::new(to));
        for i_head in 0..fwd.dims.num_heads_q {
            let rows = spans.iter().flat_map(|span| (0..span.seqlen_q).map(move |i| (span, i)));
            // SAFETY: each row's task has written its term; the argument check measured dSink.
            unsafe {
                let sum: f64 =
                    rows.map(|(span, i)| f64::from(*terms.f32_from(span.lse_index(fwd, i_head, i)))).sum();
                to.write_f32(i_head as usize, sum as f32);
            }
        }
    }
}

/// The slots of a chunk, each filled by one task.
struct Filled(*mut Slot, usize);

// SAFETY: tasks take different slots.
unsafe impl Sync for Filled {}

impl Filled {
    fn new(slots: &mut [Slot]) -> Self {
        Self(slots.as_mut_ptr(), slots.len())
    }

    /// # Safety
    /// Only one task at a time uses the slot, and no other borrow of the slots exists.
    #[allow(clippy::mut_from_ref, reason = "as the safety section says")]
    unsafe fn slot(&self, at: usize) -> &mut Slot {
        assert!(at < self.1);
        // SAFETY: the caller keeps the contract of `slot`.
        unsafe { &mut *self.0.add(at) }
    }
}

/// Sets rows of PANEL numbers to zero.
struct Clear {
    to: *mut f32,
    rows: usize,
}

impl<S: Simd> Op<S> for Clear {
    #[inline(always)]
    fn call(self, s: S) {
        for at in (0..self.rows * S::PANEL).step_by(S::LANES) {
            // SAFETY: `to` has PANEL numbers for each of these rows.
            unsafe { s.store(self.to.add(at), s.splat(0.0)) };
        }
    }
}

/// `to += from`: adds a row that is stored in blocks of PANEL columns to a dense row.
struct AddRow {
    from: *const f32,
    /// Distance from one block of PANEL columns to the next, in elements.
    step: usize,
    panels: usize,
    to: *mut f32,
}

impl<S: Simd> Op<S> for AddRow {
    #[inline(always)]
    fn call(self, s: S) {
        for panel in 0..self.panels {
            for lane in (0..S::PANEL).step_by(S::LANES) {
                // SAFETY: both rows have room for whole blocks of PANEL columns.
                unsafe {
                    let to = self.to.add(panel * S::PANEL + lane);
                    s.store(to, s.add(s.load(to), s.load(self.from.add(panel * self.step + lane))));
                }
            }
        }
    }
}
