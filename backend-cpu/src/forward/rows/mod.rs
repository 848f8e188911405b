//! Forward for few queries: the speed of memory limits it, so K and V are read once, in place.
//!
//! ```text
//! for each chunk of CHUNK_KEYS keys                   a state of its own
//!     for each block of BLOCK_KEYS that some row sees
//!         S = K q, row by row of K, for all queries of all heads of the task
//!         adjust S, online softmax
//!         O = alpha O + P V
//!     fold the chunk into the row's total             chunks ascending
//! ```
//!
//! A task handles those kv heads together whose rows are adjacent in memory, so that memory is read in the order of
//! its addresses.
//!
//! Chunks begin at multiples of `CHUNK_KEYS` and are merged in order, whether one task processes all of them or
//! several share them. So a row's bits depend on its own keys alone, not on the threads, the batch, or the call's
//! other queries.

mod chunk;
mod modify;
mod seen;
#[cfg(test)]
mod tests;

use fmha_core::{DType, SeqSpan};

use super::{Shared, settle};
use crate::blocks::{
    BLOCK_KEYS, Order, RowSums, TILE, TILED_QUERIES, exp_one, heads_of_block, packed_len, place_of_query,
    staged_len, unit,
};
use crate::memory::{Bytes, Floats, add, reserve};
use crate::simd::{Op, Simd};
use crate::tasks::Threads;
use chunk::Rows;

/// Keys between two folds: a partial result of 500 bytes for 256 KiB of K and V.
const CHUNK_KEYS: u32 = 512;

/// Most rows of a task for the query heads of one kv head.
const MAX_ROWS: usize = 32;

/// Most rows of a task, over all its kv heads.
const MAX_STATES: usize = 64;

/// Number of tasks per thread that keeps all threads busy to the end.
const TASKS_PER_THREAD: usize = 4;

/// Most threads with which memory still has low latency: one and two threads measured so, sixteen did not; numbers
/// between were not measured.
const FEW_THREADS: usize = 4;

/// Fewest query heads per kv head for which products use tiles, if the processor has tiles. The time of a block
/// then hardly depends on the number of heads. On a Xeon, one thread, from memory, beside dot products: of bf16 two
/// queries 1.15 to 1.3 times as fast, in pages of 16 1.2 times, four 1.2 and 1.3 times; for FP8, which must be
/// bit-equal to bf16 and so uses tiles like it, 1.15 and 1.2 times. Sixteen threads have 84 to 91 GB/s of four
/// queries in tiles and 91 by dot products, of two 68 to 87 and 104 to 108.
const TILED_RATIO: u32 = 4;

/// Sequences of at most this many queries use the row path if both paths could compute them.
pub(crate) const FEW_QUERIES: u32 = 8;

/// Some rows of some kv heads. Row `r` of a head is query `r / ratio` of the group's head `r % ratio`.
#[derive(Clone, Copy)]
struct Task {
    span: u32,
    /// The kv heads: the first, and how many.
    heads: (u32, u32),
    first_row: u32,
    rows: u32,
    chunks: (u32, u32),
    /// Index of the task's first partial result; `None` if the task merges and writes results itself.
    slot: Option<usize>,
}

impl Task {
    /// Number of (head, query) pairs of the task.
    fn states(&self) -> usize {
        (self.heads.1 * self.rows) as usize
    }
}

/// Tasks whose chunks must be merged: like [`Task`], with the slot of the first chunk.
type Fold = Task;

struct Scratch {
    queries: Floats,
    scores: Floats,
    alpha: Floats,
    out: Floats,
    total: Floats,
    keys: Floats,
    values: Floats,
    staged: Floats,
    packed: Floats,
    /// Whether more threads run than [`FEW_THREADS`].
    beside_many: bool,
}

/// A row's state: over one chunk, or over all chunks so far.
#[derive(Clone, Copy)]
struct State {
    chunk: RowSums,
    seen: bool,
    total: RowSums,
    total_seen: bool,
}

impl State {
    const EMPTY: Self = Self { chunk: RowSums::EMPTY, seen: false, total: RowSums::EMPTY, total_seen: false };
}

/// Number of f32 before a chunk's O: its maximum, its sum, and whether it saw a key.
const HEADER: usize = 16;

impl Shared<'_> {
    /// Whether a sequence is computed row by row, without panels of several queries.
    pub(super) fn in_rows(&self, span: &SeqSpan) -> bool {
        let few = self.blocks.rows_only || self.problem.cache.tree_mask || span.seqlen_q <= FEW_QUERIES;
        // Code and masks as data use panels for any number of queries, so that a row's bits do not depend on that
        // number.
        few && !self.problem.asks_pairs()
    }

    fn stride_qk<S: Simd>(&self) -> usize {
        // Head dimensions are rounded up to a vector of FP8 codes, which is two units; those of V as well.
        (self.problem.dims.head_dim_qk as usize).next_multiple_of(2 * unit::<S>())
    }

    fn stride_v<S: Simd>(&self) -> usize {
        (self.problem.dims.head_dim_v as usize).next_multiple_of(2 * unit::<S>())
    }

    /// Whether Q K^T is of bf16.
    fn keys_are_bf16(&self) -> bool {
        self.k.taken_as() == DType::Bf16
    }

    /// Order of Q's elements for the product with K: bf16 unchanged if dot products or tiles of bf16 are used.
    fn order_q<S: Simd>(&self) -> Order {
        let pays = S::DOTS_OUTRUN_FMAS || self.keys_in_tiles::<S>();
        if S::BF16_DOT && pays && self.keys_are_bf16() {
            Order::Bf16
        } else {
            Order::beside(self.k.taken_as())
        }
    }

    /// Order in which O's sums add their terms: by pairs of keys if the processor has dot products of bf16.
    fn order_of_sums<S: Simd>(&self) -> Order {
        if S::BF16_DOT && S::DOTS_OUTRUN_FMAS && self.v.taken_as() == DType::Bf16 {
            Order::Fours
        } else {
            Order::beside(self.v.taken_as())
        }
    }

    /// Whether enough query heads share a key for products in tiles. Only the ratio of heads decides: a row's bits
    /// must not depend on the number of queries in a call.
    fn shares_keys<S: Simd>(&self) -> bool {
        S::TILES && self.problem.gqa_ratio() >= TILED_RATIO
    }

    /// Whether Q K^T is computed in tiles of bf16.
    fn keys_in_tiles<S: Simd>(&self) -> bool {
        let whole = (self.problem.dims.head_dim_qk as usize).is_multiple_of(TILE);
        self.shares_keys::<S>() && whole && self.keys_are_bf16()
    }

    /// Whether tiles compute P V for queries that see every key of a block.
    fn values_in_tiles<S: Simd>(&self) -> bool {
        let whole = (self.problem.dims.head_dim_v as usize).is_multiple_of(TILE);
        self.shares_keys::<S>() && whole && self.v.taken_as() == DType::Bf16
    }

    /// Whether a block's softmax may run during the scores of the next block: for FP8 codes, whose conversion
    /// leaves tiles and FMAs idle. For bf16 this gains nothing from the L2 cache, and from memory it runs at 0.93
    /// of the speed.
    fn goes_ahead<S: Simd>(&self) -> bool {
        self.keys_in_tiles::<S>() && self.values_in_tiles::<S>() && self.k.widened.is_some()
    }

    /// Whether the products with K or those with V use matrix tiles.
    fn in_tiles<S: Simd>(&self) -> bool {
        self.keys_in_tiles::<S>() || self.values_in_tiles::<S>()
    }

    /// Computes every sequence that is processed row by row.
    pub(super) fn attend_rows<S: Simd>(&self, s: S, threads: &Threads) -> fmha_core::Result<()> {
        let (mut tasks, mut folds) = (Vec::new(), Vec::new());
        let slots = self.row_tasks(threads.count(), &mut tasks, &mut folds)?;
        if tasks.is_empty() {
            return Ok(());
        }
        let slot_len = HEADER + self.stride_v::<S>();
        let mut partial = Floats::scratch(slots * slot_len)?;
        let partial = Bytes::of(&mut partial);
        let used = threads.used(tasks.len());
        let mut scratch = reserve(used)?;
        let states = tasks.iter().map(Task::states).max().unwrap_or(0);
        let heads = tasks.iter().map(|task| task.heads.1 as usize).max().unwrap_or(0);
        let queries = tasks.iter().map(|task| self.queries_len::<S>(task)).max().unwrap_or(0);
        for _ in 0..used {
            let own = self.row_scratch::<S>(states, heads, queries)?;
            scratch.push(Scratch { beside_many: used > FEW_THREADS, ..own });
        }
        let slot_of = |task: &Task, first_chunk: u32, chunk: u32, row: usize| {
            let before = (chunk - first_chunk) as usize * task.states() + row;
            partial.f32_from((task.slot.unwrap_or(0) + before) * slot_len)
        };
        threads.for_each(&mut scratch, tasks.len(), |scratch, at| {
            let task = tasks[at];
            self.attend_task(s, scratch, task, |chunk, row| slot_of(&task, task.chunks.0, chunk, row));
        });
        threads.for_each(&mut scratch, folds.len(), |scratch, at| {
            let fold = folds[at];
            self.fold_task(s, scratch, fold, |chunk, row| slot_of(&fold, 0, chunk, row));
        });
        Ok(())
    }

    /// Number of kv heads that a task with `rows` rows per head handles together.
    fn heads_together(&self, rows: usize) -> u32 {
        let heads = self.problem.dims.num_heads_kv;
        if !self.k.heads_lie_together() {
            return 1;
        }
        let most = (MAX_STATES / rows)
            .min(heads_of_block(self.k.row_bytes().max(self.v.row_bytes())))
            .clamp(1, heads as usize) as u32;
        // Heads are spread over the tasks as evenly as possible.
        heads.div_ceil(heads.div_ceil(most))
    }

    /// Tasks of a call, the merges of partial results, and the number of their slots.
    fn row_tasks(
        &self,
        threads: usize,
        tasks: &mut Vec<Task>,
        folds: &mut Vec<Fold>,
    ) -> fmha_core::Result<usize> {
        let heads_kv = self.problem.dims.num_heads_kv;
        let ratio = self.problem.gqa_ratio();
        let enough = if threads > 1 { TASKS_PER_THREAD * threads } else { 1 };
        let mine = || self.spans.iter().enumerate().filter(|(_, span)| self.in_rows(span));
        let groups = |span: &SeqSpan| (span.seqlen_q as usize * ratio as usize).div_ceil(MAX_ROWS);
        let chunks = |span: &SeqSpan| span.seqlen_k.div_ceil(CHUNK_KEYS).max(1) as usize;
        let sum = |of: &dyn Fn(&SeqSpan) -> usize| mine().map(|(_, span)| of(span)).sum::<usize>();
        // No result depends on how chunks and heads are shared out.
        let most_heads = |span: &SeqSpan| {
            self.heads_together((span.seqlen_q as usize * ratio as usize).clamp(1, MAX_ROWS))
        };
        let whole = sum(&|span| groups(span) * heads_kv.div_ceil(most_heads(span)) as usize);
        let most = sum(&|span| groups(span) * chunks(span) * heads_kv.div_ceil(most_heads(span)) as usize);
        let fewer_heads = enough.div_ceil(most.max(1)) as u32;
        let parts = enough.div_ceil((whole * fewer_heads as usize).max(1)) as u32;
        let mut slots = 0;
        for (number, span) in mine() {
            let chunks = span.seqlen_k.div_ceil(CHUNK_KEYS);
            let chunks_of_part = chunks.div_ceil(parts).max(1);
            let rows = span.seqlen_q * ratio;
            let heads_of_task = most_heads(span).div_ceil(fewer_heads);
            for first_row in (0..rows).step_by(MAX_ROWS) {
                for first_head in (0..heads_kv).step_by(heads_of_task as usize) {
                    let task = Task {
                        span: number as u32,
                        heads: (first_head, heads_of_task.min(heads_kv - first_head)),
                        first_row,
                        rows: (rows - first_row).min(MAX_ROWS as u32),
                        chunks: (0, chunks),
                        slot: None,
                    };
                    if chunks_of_part < chunks {
                        let parts = (0..chunks).step_by(chunks_of_part as usize).map(|first| Task {
                            chunks: (first, chunks.min(first + chunks_of_part)),
                            slot: Some(slots + first as usize * task.states()),
                            ..task
                        });
                        add(tasks, parts)?;
                        add(folds, std::iter::once(Fold { slot: Some(slots), ..task }))?;
                        slots += chunks as usize * task.states();
                    } else {
                        add(tasks, std::iter::once(task))?;
                    }
                }
            }
        }
        Ok(slots)
    }

    /// Number of f32 that the queries of a task take.
    fn queries_len<S: Simd>(&self, task: &Task) -> usize {
        match self.keys_in_tiles::<S>() {
            true => {
                (task.heads.1 * task.rows.next_multiple_of(TILED_QUERIES)) as usize * self.stride_qk::<S>()
                    / 2
            }
            false => task.states() * self.stride_qk::<S>(),
        }
    }

    fn row_scratch<S: Simd>(
        &self,
        states: usize,
        heads: usize,
        queries: usize,
    ) -> fmha_core::Result<Scratch> {
        // A tile of scores has this many rows, wherever a task's last rows begin.
        let dim_qk = self.problem.dims.head_dim_qk as usize;
        let scores = states + if self.keys_in_tiles::<S>() { TILED_QUERIES as usize } else { 0 };
        Ok(Scratch {
            queries: Floats::scratch(queries)?,
            scores: Floats::scratch(scores * BLOCK_KEYS * if self.goes_ahead::<S>() { 2 } else { 1 })?,
            alpha: Floats::scratch(states.next_multiple_of(TILED_QUERIES as usize))?,
            out: Floats::scratch(states * self.stride_v::<S>())?,
            total: Floats::scratch(states * self.stride_v::<S>())?,
            keys: Floats::scratch(heads * self.k.scratch_bytes(BLOCK_KEYS).div_ceil(4))?,
            values: Floats::scratch(heads * self.v.scratch_bytes(BLOCK_KEYS).div_ceil(4))?,
            staged: Floats::scratch(if self.in_tiles::<S>() { staged_len(dim_qk) } else { 0 })?,
            packed: Floats::scratch(if self.values_in_tiles::<S>() { packed_len(MAX_ROWS) } else { 0 })?,
            beside_many: false,
        })
    }

    /// Loads Q of a task, in the order of elements that the product with K uses.
    fn load_rows<S: Simd>(&self, _: S, scratch: &mut Scratch, rows: &Rows<'_>) {
        let (stride, order) = (self.stride_qk::<S>(), self.order_q::<S>());
        let dim = self.problem.dims.head_dim_qk as usize;
        let tiled = self.keys_in_tiles::<S>();
        scratch.queries.fill(0.0);
        for (at, (i, head, i_head)) in rows.each().enumerate() {
            let from = self.q.q_rows(rows.span, i_head).skip(i as usize);
            let to = scratch.queries.as_mut_ptr().wrapping_add(if tiled { 0 } else { at * stride });
            for d in 0..dim {
                // SAFETY: a row of Q, and one of the scratch.
                unsafe {
                    let x = from.get(0, d) * head.descale_q;
                    match order {
                        Order::Bf16 if tiled => {
                            let (head, r) = (at / rows.of.len(), at % rows.of.len());
                            let at = place_of_query((head, rows.of.len()), r, d, dim);
                            to.cast::<u16>().add(at).write(half::bf16::from_f32(x).to_bits());
                        }
                        Order::Bf16 => to.cast::<u16>().add(d).write(half::bf16::from_f32(x).to_bits()),
                        _ => to.add(order.place::<S>(d)).write(x),
                    }
                }
            }
        }
    }

    /// Computes the chunks of a task: writes partial results to their slots, or the final result.
    fn attend_task<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        task: Task,
        slot: impl Fn(u32, usize) -> *mut f32,
    ) {
        let rows = self.rows::<S>(task);
        let stride_v = self.stride_v::<S>();
        self.load_rows(s, scratch, &rows);
        if self.in_tiles::<S>() {
            s.enter_tiles();
        }
        let mut states = [State::EMPTY; MAX_STATES];
        let states = &mut states[..task.states()];
        scratch.total.fill(0.0);
        self.attend_chunks(s, scratch, &rows, task.chunks, states, |chunk, scratch, states| {
            for (r, state) in states.iter_mut().enumerate() {
                let out = scratch.out.as_ptr().wrapping_add(r * stride_v);
                if task.slot.is_some() {
                    let to = slot(chunk, r);
                    // SAFETY: a slot of this task's.
                    unsafe {
                        (*to, *to.add(1)) = (state.chunk.row_max, state.chunk.row_sum);
                        *to.add(2) = if state.seen { 1.0 } else { 0.0 };
                        std::ptr::copy_nonoverlapping(out, to.add(HEADER), stride_v);
                    }
                } else if state.seen {
                    let total = scratch.total.as_mut_ptr().wrapping_add(r * stride_v);
                    s.plain().run(Folding { out, total, stride: stride_v, state });
                }
            }
        });
        if self.in_tiles::<S>() {
            s.leave_tiles();
        }
        if task.slot.is_none() {
            self.finish(s, scratch, &rows, states);
        }
    }

    /// Folds the chunks of a split task.
    fn fold_task<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        fold: Fold,
        slot: impl Fn(u32, usize) -> *mut f32,
    ) {
        let rows = self.rows::<S>(fold);
        let stride = self.stride_v::<S>();
        let mut states = [State::EMPTY; MAX_STATES];
        let states = &mut states[..fold.states()];
        scratch.total.fill(0.0);
        for chunk in fold.chunks.0..fold.chunks.1 {
            for (r, state) in states.iter_mut().enumerate() {
                let from = slot(chunk, r);
                // SAFETY: the slot was written by the chunk's task.
                let seen = unsafe {
                    state.chunk = RowSums { row_max: *from, row_sum: *from.add(1) };
                    *from.add(2) != 0.0
                };
                if seen {
                    let total = scratch.total.as_mut_ptr().wrapping_add(r * stride);
                    s.plain().run(Folding { out: from.wrapping_add(HEADER), total, stride, state });
                }
            }
        }
        self.finish(s, scratch, &rows, states);
    }

    /// O and LSE of a task's rows.
    fn finish<S: Simd>(&self, _: S, scratch: &mut Scratch, rows: &Rows<'_>, states: &[State]) {
        let (span, stride) = (rows.span, self.stride_v::<S>());
        let order = self.order_of_sums::<S>();
        let dim = self.problem.dims.head_dim_v as usize;
        // The chunks' O is no longer needed, so its memory takes a row in its final order.
        let row = scratch.out.as_mut_ptr();
        for (at, (i, head, i_head)) in rows.each().enumerate() {
            let sums = states[at].total;
            let (factor, lse) = settle(f64::from(sums.row_max), f64::from(sums.row_sum), head.sink);
            let descale = if self.v.widened.is_some() { 1.0 } else { head.descale_v };
            let factor = (factor * f64::from(head.keep_scale)) as f32 * self.scale_o * descale;
            let mut strays = false;
            // SAFETY: rows of the scratch; the rows of O and LSE are this task's.
            unsafe {
                let total = scratch.total.as_ptr().add(at * stride);
                for d in 0..dim {
                    let x = *total.add(order.place::<S>(d));
                    strays |= !x.is_finite();
                    *row.add(d) = if states[at].total_seen { x * factor } else { 0.0 };
                }
                let out = std::slice::from_raw_parts(row, dim);
                self.o.write_row(span.q_batch, span.q_row + i, i_head, 0, out);
                if let Some(to) = self.lse {
                    to.write_f32(span.lse_index(self.problem, i_head, i), lse as f32);
                }
            }
            if strays || !sums.row_max.is_finite() {
                // SAFETY: an element of the row.
                let out =
                    |d: usize| unsafe { *scratch.total.as_ptr().add(at * stride + order.place::<S>(d)) };
                self.mend_row((head, i_head, i), sums.row_max, sums.row_sum.is_nan(), out);
            }
            if let Some(to) = self.keep_mask {
                self.write_keep(to, head.keep, i_head, i..i + 1, span);
            }
        }
    }
}

/// `total = e^(total max - max) total + e^(chunk max - max) chunk`, O and sums.
struct Folding<'a> {
    out: *const f32,
    total: *mut f32,
    stride: usize,
    state: &'a mut State,
}

impl<S: Simd> Op<S> for Folding<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { out, total, stride, state } = self;
        let (before, chunk) = (state.total, state.chunk);
        let merged = RowSums {
            row_max: if chunk.row_max > before.row_max { chunk.row_max } else { before.row_max },
            row_sum: 0.0,
        };
        let base = merged.base();
        let (a, b) = (exp_one(s, before.row_max - base), exp_one(s, chunk.row_max - base));
        // A chunk whose scores are all −inf or NaN keeps a weight of 1: its sum shows which.
        let b = if chunk.row_max == f32::NEG_INFINITY { 1.0 } else { b };
        state.total = RowSums { row_sum: before.row_sum * a + chunk.row_sum * b, ..merged };
        state.total_seen = true;
        // SAFETY: whole vectors of both.
        unsafe {
            for at in (0..stride).step_by(S::LANES) {
                let old = s.mul(s.load(total.add(at)), s.splat(a));
                s.store(total.add(at), s.fma(s.load(out.add(at)), s.splat(b), old));
            }
        }
    }
}
