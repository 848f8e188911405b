//! Forward for few queries: memory's speed is what counts, so K and V are read once, as they lie.
//!
//! ```text
//! for each chunk of CHUNK_KEYS keys                   a state of its own
//!     for each block of BLOCK_KEYS that some row sees
//!         S = K q, row by row of K, for all queries of the kv head's group
//!         adjust S, online softmax, O = alpha O + P V
//!     fold the chunk into the row's total             chunks ascending
//! ```
//!
//! Chunks begin at multiples of `CHUNK_KEYS` and are folded in order, whether one task walks them all or each is a
//! task of its own. So a row's bits depend on its own keys, and on nothing around it: not on the threads, the batch,
//! or the other queries of the call.

use fmha_core::tree::TreeMask;
use fmha_core::{BlockClass, SeqSpan};

use super::{Bytes, Shared, settle};
use crate::blocks::{AddValues, BLOCK_KEYS, Dots, RowSums, SoftmaxRow, exp_one};
use crate::memory::{Floats, reserve};
use crate::score::HeadScore;
use crate::simd::{Op, Simd, tanh};
use crate::tasks::Threads;

/// Keys between two folds: a partial result of 500 bytes for 256 KiB of K and V.
const CHUNK_KEYS: u32 = 512;

/// Rows of a task, of all heads of a group.
const MAX_ROWS: usize = 32;

/// Sequences of at most so many queries are taken in rows where both ways would do.
pub(crate) const FEW_QUERIES: u32 = 8;

/// Some rows of one kv head. Row `r` is query `r / ratio` of the group's head `r % ratio`.
#[derive(Clone, Copy)]
struct Task {
    span: u32,
    i_head_kv: u32,
    first_row: u32,
    rows: u32,
    chunks: (u32, u32),
    /// Where its partial results lie; `None`: it folds and writes them itself.
    slot: Option<usize>,
}

/// Tasks whose chunks are to be folded: as [`Task`], with the slot of the first chunk.
type Fold = Task;

struct Scratch {
    queries: Floats,
    scores: Floats,
    alpha: Floats,
    out: Floats,
    total: Floats,
    keys: Floats,
    values: Floats,
}

/// The rows of a task, resolved.
struct Rows<'a> {
    heads: Vec<HeadScore>,
    /// Query and index into `heads` of each row.
    of: Vec<(u32, usize)>,
    tree: Option<TreeMask<'a>>,
}

/// A row's state over a chunk, and over all chunks so far.
#[derive(Clone, Copy)]
struct State {
    chunk: RowSums,
    seen: bool,
    total: RowSums,
    total_seen: bool,
}

/// A chunk's maximum and sum, and whether it saw a key, stand before its O.
const HEADER: usize = 16;

impl Shared<'_> {
    /// Whether a sequence is taken in rows.
    pub(super) fn in_rows(&self, span: &SeqSpan) -> bool {
        self.blocks.rows_only || self.problem.tree_mask || span.seqlen_q <= FEW_QUERIES
    }

    fn stride_qk<S: Simd>(&self) -> usize {
        (self.problem.dims.head_dim_qk as usize).next_multiple_of(S::LANES)
    }

    fn stride_v<S: Simd>(&self) -> usize {
        (self.problem.dims.head_dim_v as usize).next_multiple_of(S::LANES)
    }

    /// Every sequence that is taken in rows.
    pub(super) fn attend_rows<S: Simd>(&self, s: S, threads: &Threads) -> fmha_core::Result<()> {
        let (mut tasks, mut folds) = (Vec::new(), Vec::new());
        let slots = self.row_tasks(threads.count(), &mut tasks, &mut folds)?;
        if tasks.is_empty() {
            return Ok(());
        }
        let slot_len = HEADER + self.stride_v::<S>();
        let mut partial = Floats::scratch(slots * MAX_ROWS * slot_len)?;
        let partial = Bytes::of(&mut partial);
        let used = threads.used(tasks.len());
        let mut scratch = reserve(used)?;
        for _ in 0..used {
            scratch.push(self.row_scratch::<S>()?);
        }
        threads.for_each(&mut scratch, tasks.len(), |scratch, at| {
            let task = tasks[at];
            let slot = |chunk: u32, row: usize| {
                let slot = task.slot.unwrap_or(0) + (chunk - task.chunks.0) as usize;
                partial.f32_from((slot * MAX_ROWS + row) * slot_len)
            };
            self.attend_task(s, scratch, task, slot);
        });
        threads.for_each(&mut scratch, folds.len(), |scratch, at| {
            let fold = folds[at];
            let slot = |chunk: u32, row: usize| {
                partial.f32_from(((fold.slot.unwrap_or(0) + chunk as usize) * MAX_ROWS + row) * slot_len)
            };
            self.fold_task(s, scratch, fold, slot);
        });
        Ok(())
    }

    /// Tasks, folds, and how many slots they take.
    fn row_tasks(
        &self,
        threads: usize,
        tasks: &mut Vec<Task>,
        folds: &mut Vec<Fold>,
    ) -> fmha_core::Result<usize> {
        let dims = self.problem.dims;
        let ratio = self.problem.gqa_ratio();
        let groups = |span: &SeqSpan| (span.seqlen_q as usize * ratio as usize).div_ceil(MAX_ROWS);
        let mine = || self.spans.iter().enumerate().filter(|(_, span)| self.in_rows(span));
        let whole: usize = mine().map(|(_, span)| groups(span) * dims.num_heads_kv as usize).sum();
        // Where there are enough tasks without it, nothing is split.
        let split = threads > 1 && whole < 4 * threads;
        let mut slots = 0;
        for (number, span) in mine() {
            let chunks = span.seqlen_k.div_ceil(CHUNK_KEYS);
            let rows = span.seqlen_q * ratio;
            for first_row in (0..rows).step_by(MAX_ROWS) {
                for i_head_kv in 0..dims.num_heads_kv {
                    let task = Task {
                        span: number as u32,
                        i_head_kv,
                        first_row,
                        rows: (rows - first_row).min(MAX_ROWS as u32),
                        chunks: (0, chunks),
                        slot: None,
                    };
                    let bytes = |len: usize| (len * size_of::<Task>()) as u64;
                    let refused = |len| move |_| crate::memory::no_memory(bytes(len));
                    if split && chunks > 1 {
                        let count = chunks as usize;
                        tasks.try_reserve(count).map_err(refused(count))?;
                        let chunk = |chunk: u32| (chunk, chunk + 1);
                        tasks.extend((0..chunks).map(|at| Task {
                            chunks: chunk(at),
                            slot: Some(slots + at as usize),
                            ..task
                        }));
                        folds.push(Fold { slot: Some(slots), ..task });
                        slots += count;
                    } else {
                        tasks.try_reserve(1).map_err(refused(1))?;
                        tasks.push(task);
                    }
                }
            }
        }
        Ok(slots)
    }

    fn row_scratch<S: Simd>(&self) -> fmha_core::Result<Scratch> {
        Ok(Scratch {
            queries: Floats::scratch(MAX_ROWS * self.stride_qk::<S>())?,
            scores: Floats::scratch(MAX_ROWS * BLOCK_KEYS)?,
            alpha: Floats::scratch(MAX_ROWS)?,
            out: Floats::scratch(MAX_ROWS * self.stride_v::<S>())?,
            total: Floats::scratch(MAX_ROWS * self.stride_v::<S>())?,
            keys: Floats::scratch(self.k.scratch_bytes(BLOCK_KEYS).div_ceil(4))?,
            values: Floats::scratch(self.v.scratch_bytes(BLOCK_KEYS).div_ceil(4))?,
        })
    }

    fn rows(&self, task: Task) -> Rows<'_> {
        let span = self.spans[task.span as usize];
        let ratio = self.problem.gqa_ratio();
        let heads = (0..ratio).map(|g| self.score.head(span, task.i_head_kv * ratio + g)).collect();
        let of = (task.first_row..task.first_row + task.rows).map(|r| (r / ratio, (r % ratio) as usize));
        Rows { heads, of: of.collect(), tree: self.tree }
    }

    /// The chunks of a task: its partial results to their slots, or the result itself.
    fn attend_task<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        task: Task,
        slot: impl Fn(u32, usize) -> *mut f32,
    ) {
        let rows = self.rows(task);
        let (stride_qk, stride_v) = (self.stride_qk::<S>(), self.stride_v::<S>());
        let span = self.spans[task.span as usize];
        let ratio = self.problem.gqa_ratio();
        for (r, &(i, g)) in rows.of.iter().enumerate() {
            let from = self.q.q_rows(span, task.i_head_kv * ratio + g as u32).skip(i as usize);
            for d in 0..self.problem.dims.head_dim_qk as usize {
                // SAFETY: a row of Q, and one of the scratch.
                unsafe {
                    *scratch.queries.as_mut_ptr().add(r * stride_qk + d) =
                        from.get(0, d) * rows.heads[g].descale_q;
                }
            }
        }
        let empty = State { chunk: RowSums::EMPTY, seen: false, total: RowSums::EMPTY, total_seen: false };
        let mut states = [empty; MAX_ROWS];
        scratch.total.fill(0.0);
        for chunk in task.chunks.0..task.chunks.1 {
            for state in &mut states {
                (state.chunk, state.seen) = (RowSums::EMPTY, false);
            }
            scratch.out.fill(0.0);
            self.attend_chunk(s, scratch, &rows, chunk, &mut states);
            for (r, state) in states.iter_mut().enumerate().take(rows.of.len()) {
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
                    s.run(Folding { out, total, stride: stride_v, state });
                }
            }
        }
        if task.slot.is_none() {
            self.finish(scratch, &rows, task, &states, stride_v);
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
        let rows = self.rows(fold);
        let stride = self.stride_v::<S>();
        let empty = State { chunk: RowSums::EMPTY, seen: false, total: RowSums::EMPTY, total_seen: false };
        let mut states = [empty; MAX_ROWS];
        scratch.total.fill(0.0);
        for chunk in fold.chunks.0..fold.chunks.1 {
            for (r, state) in states.iter_mut().enumerate().take(rows.of.len()) {
                let from = slot(chunk, r);
                // SAFETY: the slot was written by the chunk's task.
                let seen = unsafe {
                    state.chunk = RowSums { row_max: *from, row_sum: *from.add(1) };
                    *from.add(2) != 0.0
                };
                if seen {
                    let total = scratch.total.as_mut_ptr().wrapping_add(r * stride);
                    s.run(Folding { out: from.wrapping_add(HEADER), total, stride, state });
                }
            }
        }
        self.finish(scratch, &rows, fold, &states, stride);
    }

    /// One chunk of keys.
    fn attend_chunk<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        rows: &Rows<'_>,
        chunk: u32,
        states: &mut [State; MAX_ROWS],
    ) {
        let dims = self.problem.dims;
        let head = &rows.heads[0];
        let end = head.span.seqlen_k.min((chunk + 1) * CHUNK_KEYS);
        for j in (chunk * CHUNK_KEYS..end).step_by(BLOCK_KEYS) {
            let count = BLOCK_KEYS.min((end - j) as usize);
            let (mut whole, mut partial) = ([0usize; MAX_ROWS], [(0usize, 0u64); MAX_ROWS]);
            let (mut num_whole, mut num_partial) = (0, 0);
            let mut live = [0usize; MAX_ROWS];
            let mut num_live = 0;
            for (r, &(i, g)) in rows.of.iter().enumerate() {
                let seen = rows.seen(&rows.heads[g], i, j, count);
                if seen == 0 {
                    continue;
                }
                live[num_live] = r;
                num_live += 1;
                states[r].seen = true;
                if seen.count_ones() as usize == count {
                    whole[num_whole] = r;
                    num_whole += 1;
                } else {
                    partial[num_partial] = (r, seen);
                    num_partial += 1;
                }
            }
            if num_live == 0 {
                continue;
            }
            let (live, whole) = (&live[..num_live], &whole[..num_whole]);
            let partial = &partial[..num_partial];
            let keys = self.k.block(head, (j, count), head.descale_k, true, &mut scratch.keys);
            let values = self.v.block(head, (j, count), head.descale_v, true, &mut scratch.values);
            // What a widened cache was multiplied by is in it.
            let factor = head.softmax_scale * if self.k.widened.is_some() { 1.0 } else { head.descale_k };
            let scores = scratch.scores.as_mut_ptr();
            s.run(Dots {
                keys,
                count,
                dim: dims.head_dim_qk as usize,
                queries: scratch.queries.as_ptr(),
                stride: self.stride_qk::<S>(),
                live,
                factor,
                scores,
            });
            let mut next_partial = 0;
            for &r in live {
                let (i, g) = rows.of[r];
                let scores = scores.wrapping_add(r * BLOCK_KEYS);
                let head = &rows.heads[g];
                if head.changes() {
                    s.run(Modify { head, i, j, count, scores });
                }
                let mut seen = u64::MAX >> (BLOCK_KEYS - count);
                if let Some(&(row, bits)) = partial.get(next_partial)
                    && row == r
                {
                    (seen, next_partial) = (bits, next_partial + 1);
                }
                for key in (0..BLOCK_KEYS).filter(|key| seen >> key & 1 == 0) {
                    // SAFETY: a row's block of scores.
                    unsafe { *scores.add(key) = f32::NEG_INFINITY };
                }
                // SAFETY: one for each row.
                let alpha = unsafe { &mut *scratch.alpha.as_mut_ptr().add(r) };
                let round = self.problem.dtype_v;
                s.run(SoftmaxRow { scores, state: &mut states[r].chunk, alpha, round });
                if head.drops {
                    drop_weights(head, i, j, count, scores);
                }
            }
            s.run(AddValues {
                values,
                count,
                dim: dims.head_dim_v as usize,
                weights: scores,
                alpha: scratch.alpha.as_ptr(),
                whole,
                partial,
                out: scratch.out.as_mut_ptr(),
                stride: self.stride_v::<S>(),
            });
        }
    }

    /// O and LSE of a task's rows.
    fn finish(
        &self,
        scratch: &mut Scratch,
        rows: &Rows<'_>,
        task: Task,
        states: &[State; MAX_ROWS],
        stride: usize,
    ) {
        let span = self.spans[task.span as usize];
        let ratio = self.problem.gqa_ratio();
        let widened = self.v.widened.is_some();
        for (r, &(i, g)) in rows.of.iter().enumerate() {
            let (head, i_head) = (&rows.heads[g], task.i_head_kv * ratio + g as u32);
            let sums = states[r].total;
            let (factor, lse) = settle(f64::from(sums.row_max), f64::from(sums.row_sum), head.sink);
            let factor = (factor * f64::from(head.keep_scale)) as f32
                * self.scale_o
                * if widened { 1.0 } else { head.descale_v };
            let dim = self.problem.dims.head_dim_v as usize;
            // SAFETY: a row of the scratch; the rows of O and LSE are this task's.
            unsafe {
                let out = std::slice::from_raw_parts_mut(scratch.total.as_mut_ptr().add(r * stride), dim);
                for x in &mut *out {
                    *x = if states[r].total_seen { *x * factor } else { 0.0 };
                }
                self.o.write_row(span.q_batch, span.q_row + i, i_head, 0, out);
                if let Some(to) = self.lse {
                    to.write_f32(span.lse_index(self.problem, i_head, i), lse as f32);
                }
            }
            if let Some(to) = self.keep_mask {
                self.write_keep(to, head.keep, i_head, i..i + 1, span);
            }
        }
    }
}

impl Rows<'_> {
    /// Which of the keys `j .. j + count` query `i` sees: a bit for each.
    fn seen(&self, head: &HeadScore, i: u32, j: u32, count: usize) -> u64 {
        let all = u64::MAX >> (BLOCK_KEYS - count);
        let keys = j..j + count as u32;
        if let Some(tree) = &self.tree {
            if keys.end + head.span.seqlen_q <= head.span.seqlen_k {
                return all;
            }
            let bit = |key: u32| u64::from(tree.visible(&head.span, i, key)) << (key - j);
            return keys.map(bit).fold(0, |seen, bit| seen | bit);
        }
        match head.band.block_class(i..i + 1, keys.clone()) {
            BlockClass::Skipped => 0,
            BlockClass::Inside => all,
            BlockClass::Edge => {
                let bit = |key: u32| u64::from(head.band.visible(i, key)) << (key - j);
                keys.map(bit).fold(0, |seen, bit| seen | bit)
            }
        }
    }
}

/// Soft-cap, bias and ALiBi of a row's block of scores.
struct Modify<'a> {
    head: &'a HeadScore,
    i: u32,
    j: u32,
    count: usize,
    scores: *mut f32,
}

impl<S: Simd> Op<S> for Modify<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { head, i, j, count, scores } = self;
        // SAFETY: a row's block of scores; the bias has an element for each query and key.
        unsafe {
            if let Some(softcap) = head.softcap {
                let cap = s.splat(softcap);
                for at in (0..BLOCK_KEYS).step_by(S::LANES) {
                    let x = s.div(s.load(scores.add(at)), cap);
                    s.store(scores.add(at), s.mul(cap, tanh(s, x)));
                }
            }
            for key in 0..count {
                if let Some(bias) = head.bias {
                    *scores.add(key) += bias.get(i as usize, j as usize + key);
                }
                if let Some(distance) = head.alibi_term(i, j + key as u32) {
                    *scores.add(key) += distance;
                }
            }
        }
    }
}

/// Sets the weights of dropped keys to 0; `1 / (1 - p_drop)` is a factor of the whole row.
fn drop_weights(head: &HeadScore, i: u32, j: u32, count: usize, weights: *mut f32) {
    for key in 0..count {
        if !head.keep.keep(i, j + key as u32) {
            // SAFETY: a row's block of weights.
            unsafe { *weights.add(key) = 0.0 };
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
        // A chunk whose scores are all −inf or NaN has weights of its own: its sum says which.
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
