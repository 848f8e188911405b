//! Backward: P is recomputed from LSE, tile by tile (Dao et al., "FlashAttention", arXiv 2205.14135, appendix B.4).
//!
//! ```text
//! delta[i] = dO[i] . O[i]
//! for each tile of keys
//!     for each query head of the kv head, for each tile of queries that the band touches
//!         P  = exp(S - LSE)                    keys down, queries across
//!         dS = P (keep dO V^T - delta + dLSE)  times the soft-cap's slope
//!         dV += (keep P)^T dO,  dK += dS^T Q,  dQ += dS K
//! ```
//!
//! Every sum has a fixed order, ascending over tiles: dK and dV over heads and queries, dQ over keys. With at least
//! as many kv heads as threads, a task is a kv head and computes all three gradients in one pass. With fewer kv
//! heads, tiles of keys (dK, dV) and tiles of queries (dQ) are separate tasks: seven products instead of five, but
//! all threads are busy, and the bits are equal.
//!
//! Rounding LSE to f32 multiplies all P of a row by one wrong factor: 0.1 % at an LSE of 16384, exp(32) at 1e9,
//! which occurs in rows that a bias masks as a whole. In such rows about LSE is subtracted from the scores first,
//! and their own sum of exponentials replaces LSE (`far.rs`).

mod far;
#[cfg(test)]
mod tests;
mod tile;

use std::sync::{Mutex, PoisonError};

use fmha_core::expr::Seen;
use fmha_core::{Bias, BwdArgs, SeqSpan, ValidBwd};

use crate::blocks::{AddTo, Factors, RowDots, Rows, WriteRows};
use crate::code::{Code, CodeArgs, captured_zeros};
use crate::forward::{Blocks, Call, key_tiles, scaled};
use crate::lists;
use crate::memory::{Bytes, Floats, add, reserve};
use crate::score::{HeadScore, Panel, ScoreInputs};
use crate::simd::Simd;
use crate::tasks::Threads;
use crate::tensor::{Source, Target, f32_at};
use far::FarRows;
use tile::{Through, Tile};

/// A backward call.
pub(crate) type Backward<'a> = Call<'a, ValidBwd, BwdArgs<'a>>;

/// One unit of work of a backward call, which one thread computes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Task {
    /// dQ, dK and dV of a kv head.
    KvHead { span: usize, i_head_kv: u32 },
    /// dK and dV of the tile of keys from `j` on.
    Keys { span: usize, i_head_kv: u32, j: u32 },
    /// dQ of the tile of queries from `i` on.
    Queries { span: usize, i_head: u32, i: u32 },
    /// dBias of the rows from `i` on of one matrix.
    Bias { i_batch: u32, i_head: u32, i: u32 },
    /// Gradients of the tensors that the score function reads (captures), from one group of (sequence, head) pairs.
    Captured { part: usize },
}

/// Buffers of one thread, reused from task to task.
struct Scratch {
    tile: Tile,
    dk: Floats,
    dv: Floats,
    dq: Floats,
    dbias: Floats,
    row: Floats,
}

/// Operands and derived numbers that every task of a backward call reads.
struct Shared<'a> {
    problem: &'a ValidBwd,
    args: &'a BwdArgs<'a>,
    spans: &'a [SeqSpan],
    blocks: Blocks,
    score: ScoreInputs<'a>,
    q: Source,
    k: Source,
    v: Source,
    dout: Source,
    dq: Target,
    dk: Target,
    dv: Target,
    dbias: Option<Target>,
    /// Gradients of the tensors that the score function reads (captures): one set of sums for each group of heads.
    captured: Vec<Mutex<Vec<Vec<f64>>>>,
    delta: Floats,
    far: FarRows,
}

// SAFETY: `delta` and `far` are only read while tasks run; the rest is read or written as `Source` and `Target` say.
unsafe impl Sync for Shared<'_> {}

impl Backward<'_> {
    /// Computes the backward.
    ///
    /// # Errors
    /// Memory for scratch that the system refuses, before anything is written.
    pub(crate) fn run<S: Simd>(&self, s: S, threads: &Threads) -> fmha_core::Result<()> {
        if self.problem.fwd.lists.is_some() {
            return lists::backward(self, s, threads);
        }
        if self.problem.fwd.block_scales.is_some() {
            return scaled::backward(self, threads, &|over| over.run(s, threads));
        }
        let mut shared = self.shared()?;
        let tasks = shared.tasks(threads.count())?;
        let used = threads.used(tasks.len());
        let mut scratch = reserve(used)?;
        shared.far = FarRows::reserve(shared.problem.fwd(), self.args)?;
        for _ in 0..used {
            scratch.push(shared.scratch::<S>(&tasks)?);
        }
        shared.row_sums(s, threads)?;
        shared.measure_far_rows(threads)?;
        shared.write_dsink();
        threads.for_each(&mut scratch, tasks.len(), |scratch, task| match tasks[task] {
            Task::KvHead { span, i_head_kv } => shared.kv_head(s, scratch, span, i_head_kv),
            Task::Keys { span, i_head_kv, j } => {
                shared.key_tile(s, scratch, span, i_head_kv, j, false);
            }
            Task::Queries { span, i_head, i } => shared.query_tile(s, scratch, span, i_head, i),
            Task::Bias { i_batch, i_head, i } => shared.bias_rows(s, scratch, i_batch, i_head, i),
            Task::Captured { part } => shared.captured_part(s, scratch, part),
        });
        shared.write_captured();
        Ok(())
    }
}

impl<'a> Backward<'a> {
    /// The state that this call's tasks share, before delta is computed.
    fn shared(&self) -> fmha_core::Result<Shared<'a>> {
        let (problem, args) = (self.problem, self.args);
        let fwd = problem.fwd();
        let grad = problem.dtype_grad;
        let dbias = match (problem.dbias, &args.dbias) {
            (Some(wanted), Some(slice)) => Some(Target::new(slice, wanted.dtype, wanted.strides)),
            _ => None,
        };
        let total_q = args.seq.totals.total_q;
        let code = CodeArgs { score: args.score, masks: args.masks, total_q };
        Ok(Shared {
            problem,
            args,
            spans: self.spans,
            blocks: self.blocks,
            score: ScoreInputs::new(fwd, &args.score, Code::of_backward(problem, &code)?),
            q: Source::new(args.q, fwd.dtypes.qk, fwd.strides.q),
            k: Source::new(args.k, fwd.dtypes.qk, fwd.strides.k),
            v: Source::new(args.v, fwd.dtypes.v, fwd.strides.v),
            dout: Source::new(args.dout, fwd.dtypes.o, problem.dout),
            dq: Target::new(&args.dq, grad, problem.dq),
            dk: Target::new(&args.dk, grad, problem.dk),
            dv: Target::new(&args.dv, grad, problem.dv),
            dbias,
            captured: captured_parts(problem)?,
            delta: Floats::scratch(fwd.extents(args.seq.totals).lse_elems as usize)?,
            far: FarRows::default(),
        })
    }
}

/// Number of separate sums of the gradients of captured tensors. It does not depend on the number of threads, so
/// the order of additions is fixed.
const CAPTURED_PARTS: u64 = 8;

/// Most elements of all groups' sums of captured tensors' gradients together, if there is more than one group.
const MOST_CAPTURED: u64 = 1 << 22;

fn captured_parts(problem: &ValidBwd) -> fmha_core::Result<Vec<Mutex<Vec<Vec<f64>>>>> {
    if problem.dcaptured.is_empty() {
        return Ok(vec![]);
    }
    let elems: u64 = problem.captured_elems().fold(0, u64::saturating_add);
    let parts = (MOST_CAPTURED / elems.max(1)).clamp(1, CAPTURED_PARTS);
    (0..parts).map(|_| Ok(Mutex::new(captured_zeros(problem)?))).collect()
}

impl Shared<'_> {
    fn dims(&self) -> (usize, usize) {
        let dims = self.problem.fwd.dims;
        (dims.head_dim_qk as usize, dims.head_dim_v as usize)
    }

    fn tasks(&self, threads: usize) -> fmha_core::Result<Vec<Task>> {
        let dims = self.problem.fwd.dims;
        let Blocks { block_m, block_n, .. } = self.blocks;
        let spans = || self.spans.iter().enumerate();
        let kv_heads = self.spans.len() * dims.num_heads_kv as usize;
        let mut tasks = vec![];
        if kv_heads >= threads {
            for (span, _) in spans() {
                let heads = 0..dims.num_heads_kv;
                add(&mut tasks, heads.map(|i_head_kv| Task::KvHead { span, i_head_kv }))?;
            }
            tasks.sort_by_key(|task| {
                let Task::KvHead { span, .. } = *task else { return std::cmp::Reverse(0) };
                let SeqSpan { seqlen_q, seqlen_k, .. } = self.spans[span];
                std::cmp::Reverse(u64::from(seqlen_q) * u64::from(seqlen_k))
            });
        } else {
            for (span, lengths) in spans() {
                for j in (0..lengths.seqlen_k).step_by(block_n) {
                    let heads = 0..dims.num_heads_kv;
                    add(&mut tasks, heads.map(|i_head_kv| Task::Keys { span, i_head_kv, j }))?;
                }
                // The last queries see the most keys under a causal mask, so they start first.
                for i in (0..lengths.seqlen_q).step_by(block_m).rev() {
                    add(&mut tasks, (0..dims.num_heads_q).map(|i_head| Task::Queries { span, i_head, i }))?;
                }
            }
        }
        add(&mut tasks, (0..self.captured.len()).map(|part| Task::Captured { part }))?;
        if let (Some(_), Bias::Elementwise(bias)) = (&self.dbias, self.problem.fwd.score.bias) {
            let shape = self.problem.fwd.shape_bias(bias.broadcast);
            for i_batch in 0..shape.batch {
                for i_head in 0..shape.head {
                    let rows = (0..shape.seq).step_by(block_m);
                    add(&mut tasks, rows.map(|i| Task::Bias { i_batch, i_head, i }))?;
                }
            }
        }
        Ok(tasks)
    }

    fn scratch<S: Simd>(&self, tasks: &[Task]) -> fmha_core::Result<Scratch> {
        let block_m = self.blocks.block_m;
        let (dim_qk, dim_v) = self.dims();
        let (cols_qk, cols_v) = (dim_qk.next_multiple_of(S::PANEL), dim_v.next_multiple_of(S::PANEL));
        let keys = self.key_capacity();
        let fwd = self.problem.fwd();
        let optional = |wanted: bool, len: usize| Floats::scratch(if wanted { len } else { 0 });
        let dq_rows = tasks
            .iter()
            .map(|task| match *task {
                Task::KvHead { span, .. } => self.query_capacity(self.spans[span]) * fwd.gqa_ratio() as usize,
                Task::Queries { .. } => block_m,
                Task::Keys { .. } | Task::Bias { .. } | Task::Captured { .. } => 0,
            })
            .max()
            .unwrap_or(0);
        Ok(Scratch {
            tile: self.tile::<S>()?,
            dk: Floats::scratch(keys * cols_qk)?,
            dv: Floats::scratch(keys * cols_v)?,
            dq: Floats::scratch(dq_rows * cols_qk)?,
            dbias: optional(self.dbias.is_some(), block_m * keys)?,
            row: Floats::scratch(cols_qk.max(cols_v).max(keys))?,
        })
    }

    /// Rows (keys) that a panel of scores has room for: a multiple of the height of every micro-tile.
    fn key_capacity(&self) -> usize {
        self.blocks.block_n.next_multiple_of(12)
    }

    /// Number of dQ rows of one head, rounded up to whole tiles.
    fn query_capacity(&self, span: SeqSpan) -> usize {
        (span.seqlen_q as usize).next_multiple_of(self.blocks.block_m)
    }

    /// `delta = dO . O` of every row.
    fn row_sums<S: Simd>(&mut self, s: S, threads: &Threads) -> fmha_core::Result<()> {
        let fwd = self.problem.fwd();
        let o = Source::new(self.args.o, fwd.dtypes.o, fwd.strides.o);
        let heads = fwd.dims.num_heads_q;
        let cols = fwd.dims.head_dim_v as usize;
        let to = Bytes::of(&mut self.delta);
        let (spans, dout) = (self.spans, self.dout);
        let tasks = spans.len() * heads as usize;
        let used = threads.used(tasks);
        let mut states = reserve(used)?;
        for _ in 0..used {
            states.push(Floats::scratch(RowDots::scratch::<S>(cols))?);
        }
        threads.for_each(&mut states, tasks, |scratch, task| {
            let (span, i_head) = (spans[task / heads as usize], (task % heads as usize) as u32);
            let (left, right) = (dout.q_rows(span, i_head), o.q_rows(span, i_head));
            let first = span.lse_index(fwd, i_head, 0);
            let (scratch, to) = (scratch.as_mut_ptr(), to.f32_from(first));
            s.run(RowDots { left, right, rows: span.seqlen_q as usize, cols, scratch, to });
        });
        Ok(())
    }

    /// `dSink = sum_i exp(sink - LSE[i]) (dLSE[i] - delta[i])`, in f64, sequences and rows ascending.
    fn write_dsink(&self) {
        let fwd = self.problem.fwd();
        let (Some(to), Some(sink)) = (&self.args.dsink, &self.args.score.sink) else {
            return;
        };
        let to = Bytes::new(to);
        for i_head in 0..fwd.dims.num_heads_q {
            let sink = f64::from(f32_at(sink, i_head as usize));
            let mut sum = 0.0;
            for span in self.spans {
                for i in 0..span.seqlen_q {
                    let index = span.lse_index(fwd, i_head, i);
                    let (origin, lse) = self.far.row(index).unwrap_or((0.0, f32_at(&self.args.lse, index)));
                    if lse != f32::NEG_INFINITY {
                        // SAFETY: one number for each row.
                        let delta = unsafe { *self.delta.as_ptr().add(index) };
                        let p = (sink - f64::from(origin) - f64::from(lse)).min(0.0).exp();
                        sum += p * (self.dlse_at(index) - f64::from(delta));
                    }
                }
            }
            // SAFETY: the argument check measured it.
            unsafe { to.write_f32(i_head as usize, sum as f32) };
        }
    }

    fn dlse_at(&self, index: usize) -> f64 {
        self.args.dlse.as_ref().map_or(0.0, |dlse| f64::from(f32_at(dlse, index)))
    }

    /// All gradients of a kv head.
    fn kv_head<S: Simd>(&self, s: S, scratch: &mut Scratch, span_index: usize, i_head_kv: u32) {
        let span = self.spans[span_index];
        scratch.dq.fill(0.0);
        for j in (0..span.seqlen_k).step_by(self.blocks.block_n) {
            self.key_tile(s, scratch, span_index, i_head_kv, j, true);
        }
        let ratio = self.problem.fwd.gqa_ratio();
        let (dim_qk, _) = self.dims();
        let capacity = self.query_capacity(span);
        for g in 0..ratio {
            let from = scratch.dq.as_ptr().wrapping_add(self.dq_offset::<S>(span, g));
            let at = (span.q_batch, span.q_row, i_head_kv * ratio + g);
            let scale = self.problem.fwd.resolved_softmax_scale();
            let rows = span.seqlen_q as usize;
            self.write(s, &self.dq, at, (rows, dim_qk), (from, capacity), scale, &mut scratch.row);
        }
    }

    /// Writes rows of dQ, dK or dV to the caller's tensor from panels, which are blocks of PANEL columns.
    #[expect(clippy::too_many_arguments, reason = "two matrices and a factor")]
    fn write<S: Simd>(
        &self,
        s: S,
        to: &Target,
        at: (u32, u32, u32),
        (rows, cols): (usize, usize),
        (from, capacity): (*const f32, usize),
        factor: f32,
        row: &mut Floats,
    ) {
        let (factors, row) = (Factors::All(factor), row.as_mut_ptr());
        s.run(WriteRows { to, at, rows, cols, from, capacity, factors, untouched: 0, row });
    }

    /// Offset in the scratch of dQ of the kv head's query head `g`.
    fn dq_offset<S: Simd>(&self, span: SeqSpan, g: u32) -> usize {
        let cols = self.dims().0.next_multiple_of(S::PANEL);
        g as usize * self.query_capacity(span) * cols
    }

    /// dK and dV of a tile of keys, and their share of dQ if `with_dq`.
    fn key_tile<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        span: usize,
        i_head_kv: u32,
        j: u32,
        with_dq: bool,
    ) {
        let span = self.spans[span];
        let Blocks { block_m, block_n, .. } = self.blocks;
        let (dim_qk, dim_v) = self.dims();
        let ratio = self.problem.fwd.gqa_ratio();
        let keys = block_n.min((span.seqlen_k - j) as usize);
        let capacity = self.key_capacity();
        scratch.dk.fill(0.0);
        scratch.dv.fill(0.0);
        self.load_keys(s, &mut scratch.tile, &self.score.head(span, i_head_kv * ratio), j, keys);
        for g in 0..ratio {
            let i_head = i_head_kv * ratio + g;
            let head = self.score.head(span, i_head);
            for i in (0..span.seqlen_q).step_by(block_m) {
                let queries = block_m.min((span.seqlen_q - i) as usize);
                if self.hides_all(&head, i, queries, j, keys) {
                    continue;
                }
                let tile = &mut scratch.tile;
                self.load_queries(s, tile, &head, i_head, i, queries);
                self.gradients(s, tile, &head, i, queries, j, keys, Through::All);
                for (left, right, finite, dim, out) in [
                    (&tile.weights, &tile.douts, tile.douts_finite, dim_v, &mut scratch.dv),
                    (&tile.gradients, &tile.queries, tile.queries_finite, dim_qk, &mut scratch.dk),
                ] {
                    let rows = Rows {
                        panels: &tile.panels,
                        weights: left.as_ptr(),
                        capacity,
                        rows: keys,
                        queries,
                        right: right.as_ptr(),
                        right_capacity: block_m,
                        dim,
                        out: out.as_mut_ptr(),
                    };
                    if finite || !tile.has_edge() {
                        s.run(rows);
                    } else {
                        rows.visible_only::<S>(head.visible());
                    }
                }
                if with_dq {
                    let out = scratch
                        .dq
                        .as_mut_ptr()
                        .wrapping_add(self.dq_offset::<S>(span, g) + i as usize * S::PANEL);
                    self.add_dq(s, &scratch.tile, &head, out, self.query_capacity(span));
                }
            }
        }
        let at = (span.k_batch, span.k_row + j, i_head_kv);
        let scale = self.problem.fwd.resolved_softmax_scale();
        let Scratch { dk, dv, row, .. } = scratch;
        self.write(s, &self.dk, at, (keys, dim_qk), (dk.as_ptr(), capacity), scale, row);
        self.write(s, &self.dv, at, (keys, dim_v), (dv.as_ptr(), capacity), 1.0, row);
    }

    /// Whether band or code hide a whole tile.
    fn hides_all(&self, head: &HeadScore, i: u32, queries: usize, j: u32, keys: usize) -> bool {
        let by_code =
            |code: &Code<'_>| code.seen(head, i..i + queries as u32, j..j + keys as u32) == Seen::Nothing;
        Panel::new(head.band, i, queries, j, keys).is_none() || self.score.code.as_ref().is_some_and(by_code)
    }

    /// Computes one group's sums of the gradients of captured tensors: heads, queries and keys in ascending order.
    fn captured_part<S: Simd>(&self, s: S, scratch: &mut Scratch, part: usize) {
        let Some(code) = &self.score.code else { return };
        let Blocks { block_m, block_n, .. } = self.blocks;
        let heads = self.problem.fwd.dims.num_heads_q as usize;
        let (all, parts) = (self.spans.len() * heads, self.captured.len());
        let mut sums = self.captured[part].lock().unwrap_or_else(PoisonError::into_inner);
        for number in all * part / parts..all * (part + 1) / parts {
            let head = self.score.head(self.spans[number / heads], (number % heads) as u32);
            let (span, tile) = (head.span, &mut scratch.tile);
            for i in (0..span.seqlen_q).step_by(block_m) {
                let queries = block_m.min((span.seqlen_q - i) as usize);
                self.load_queries(s, tile, &head, head.i_head, i, queries);
                for (j, keys) in key_tiles(&head, i..i + queries as u32, block_n) {
                    if self.hides_all(&head, i, queries, j, keys) {
                        continue;
                    }
                    self.load_keys(s, tile, &head, j, keys);
                    self.gradients(s, tile, &head, i, queries, j, keys, Through::SoftCap);
                    for (number, panel) in tile.panels.iter().enumerate() {
                        let Some(panel) = panel else { continue };
                        let offset = number * self.key_capacity() * S::PANEL;
                        let scaled = tile.scaled.as_mut_ptr().wrapping_add(offset);
                        let gradients = tile.gradients.as_ptr().wrapping_add(offset);
                        // SAFETY: `scaled` and `gradients` have PANEL numbers for each key of the panel.
                        unsafe {
                            let of = (scaled, gradients);
                            code.add_to_captured(s, &mut tile.code, &head, panel, of, &mut sums);
                        }
                    }
                }
            }
        }
    }

    /// Writes the gradients of captured tensors: sums of the groups, added in ascending order.
    fn write_captured(&self) {
        for (number, (wanted, slice)) in self.problem.dcaptured.iter().zip(&self.args.dcaptured).enumerate() {
            let parts: Vec<Vec<f64>> = self
                .captured
                .iter()
                .map(|part| std::mem::take(&mut part.lock().unwrap_or_else(PoisonError::into_inner)[number]))
                .collect();
            let size = wanted.dtype.size_bytes() as usize;
            for at in 0..parts.first().map_or(0, Vec::len) {
                let sum: f64 = parts.iter().map(|part| part[at]).sum();
                let mut bytes = [0; 8];
                wanted.dtype.write(sum, &mut bytes);
                // SAFETY: the argument check measured it.
                unsafe { slice.as_mut_ptr().add(at * size).copy_from_nonoverlapping(bytes.as_ptr(), size) };
            }
        }
    }

    /// dQ of a tile of queries.
    fn query_tile<S: Simd>(&self, s: S, scratch: &mut Scratch, span: usize, i_head: u32, i: u32) {
        let span = self.spans[span];
        let Blocks { block_m, block_n, .. } = self.blocks;
        let head = self.score.head(span, i_head);
        let queries = block_m.min((span.seqlen_q - i) as usize);
        let tile = &mut scratch.tile;
        scratch.dq.fill(0.0);
        self.load_queries(s, tile, &head, i_head, i, queries);
        for (j, keys) in key_tiles(&head, i..i + queries as u32, block_n) {
            if self.hides_all(&head, i, queries, j, keys) {
                continue;
            }
            self.load_keys(s, tile, &head, j, keys);
            self.gradients(s, tile, &head, i, queries, j, keys, Through::All);
            self.add_dq(s, tile, &head, scratch.dq.as_mut_ptr(), block_m);
        }
        let at = (span.q_batch, span.q_row + i, i_head);
        let from = (scratch.dq.as_ptr(), block_m);
        let scale = head.softmax_scale;
        self.write(s, &self.dq, at, (queries, self.dims().0), from, scale, &mut scratch.row);
    }

    /// dBias of some rows of one matrix: the sum over every sequence and head that reads it.
    fn bias_rows<S: Simd>(&self, s: S, scratch: &mut Scratch, b: u32, h: u32, i: u32) {
        let fwd = self.problem.fwd();
        let (Some(to), Bias::Elementwise(bias)) = (&self.dbias, fwd.score.bias) else {
            return;
        };
        let Blocks { block_m, block_n, .. } = self.blocks;
        let dims = fwd.dims;
        let rows = block_m.min((dims.seqlen_q - i) as usize);
        let capacity = self.key_capacity();
        for j in (0..dims.seqlen_k).step_by(block_n) {
            let cols = block_n.min((dims.seqlen_k - j) as usize);
            scratch.dbias.fill(0.0);
            for span in self.spans {
                for i_head in 0..dims.num_heads_q {
                    if bias.broadcast.index(span.i_batch, i_head) != (b, h)
                        || i >= span.seqlen_q
                        || j >= span.seqlen_k
                    {
                        continue;
                    }
                    let head = self.score.head(*span, i_head);
                    let queries = rows.min((span.seqlen_q - i) as usize);
                    let keys = cols.min((span.seqlen_k - j) as usize);
                    if self.hides_all(&head, i, queries, j, keys) {
                        continue;
                    }
                    let tile = &mut scratch.tile;
                    self.load_keys(s, tile, &head, j, keys);
                    self.load_queries(s, tile, &head, i_head, i, queries);
                    self.gradients(s, tile, &head, i, queries, j, keys, Through::Nothing);
                    for (number, panel) in tile.panels.iter().enumerate() {
                        if let Some(panel) = *panel {
                            let offset = number * capacity * S::PANEL;
                            s.run(AddTo {
                                panel,
                                from: tile.gradients.as_ptr().wrapping_add(offset),
                                to: scratch.dbias.as_mut_ptr().wrapping_add(offset),
                            });
                        }
                    }
                }
            }
            for row in 0..rows {
                let (panel, lane) = (row / S::PANEL, row % S::PANEL);
                // SAFETY: columns of the tile; this row of dBias is this task's.
                unsafe {
                    let out = std::slice::from_raw_parts_mut(scratch.row.as_mut_ptr(), cols);
                    for (col, out) in out.iter_mut().enumerate() {
                        let at = (panel * capacity + col) * S::PANEL + lane;
                        *out = *scratch.dbias.as_ptr().add(at);
                    }
                    to.write_row(b, i + row as u32, h, j, out);
                }
            }
        }
    }
}
