//! Forward: blocked online softmax (Dao, "FlashAttention-2", arXiv 2307.08691), a task is a tile of queries.
//!
//! ```text
//! for each tile of keys that the band touches
//!     copy K and V into panels, as f32
//!     for each panel of queries
//!         S = K Q^T        keys down, queries across
//!         adjust S         soft-cap, bias, ALiBi; the mask only on edges
//!         P, alpha         online softmax, a query a lane
//!         O = alpha O + P V
//! O /= row_sum, LSE = row_max + ln row_sum
//! ```
//!
//! A row's arithmetic depends only on where tiles of keys begin (at multiples of `block_n`), not on `block_m`, the
//! number of threads or the rest of the batch.

mod again;
pub(crate) mod cache;
mod rows;
pub(crate) mod scaled;
mod small;
#[cfg(test)]
mod tests;
mod tiles;

pub(crate) use rows::FEW_QUERIES;

use std::ops::Range;

use fmha_core::expr::Seen;
use fmha_core::seq::KvRows;
use fmha_core::tree::TreeMask;
use fmha_core::{CacheScales, DType, DevSlice, FwdArgs, FwdProblem, SeqSpan, Strides};

use cache::{Cached, TurnedQueries};

use crate::blocks::{
    AllFinite, Columns, Factors, Gather, GatherRows, GatherTransposed, Multiply, RowState, Scores, Softmax,
    TILE, WriteRows, row_stride,
};
use crate::code::{Code, CodeArgs, CodeLanes};
use crate::lists;
use crate::memory::{Bytes, Floats, reserve};
use crate::score::{Adjust, HeadScore, Keep, ScoreInputs};
use crate::simd::{Op, Simd};
use crate::tasks::Threads;
use crate::tensor::{Source, Target, f32_at};
use crate::tile::Store;

/// Tile sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Queries of a task, a multiple of PANEL.
    pub(crate) block_m: usize,
    /// Whether `block_m` may shrink if there would be too few tasks for the threads.
    pub(crate) may_shrink: bool,
    /// Keys of a tile.
    pub(crate) block_n: usize,
    /// Whether every sequence uses the row path, however many queries it has.
    pub(crate) rows_only: bool,
    /// Whether products in tiles must subtract the exact running maximum, as all other code does.
    pub(crate) exact_max: bool,
}

/// A call with its arguments checked.
pub(crate) struct Call<'a, Problem, Args> {
    pub(crate) problem: &'a Problem,
    pub(crate) args: &'a Args,
    pub(crate) spans: &'a [SeqSpan],
    pub(crate) blocks: Blocks,
}

/// A forward call.
pub(crate) type Forward<'a> = Call<'a, FwdProblem, FwdArgs<'a>>;

/// A tile of queries of one head.
#[derive(Clone, Copy)]
struct Task {
    span: u32,
    i_head: u32,
    i: u32,
    queries: u32,
    /// Number of keys that the task visits.
    keys: u32,
}

/// Buffers of one thread, reused from task to task.
struct Scratch {
    queries: Floats,
    /// PANEL queries, before they are transposed.
    staging: Floats,
    keys: Floats,
    values: Floats,
    /// Copies of keys, then values, whose rows are not contiguous.
    gathered: Floats,
    /// V's columns, for products in tiles.
    columns: Floats,
    /// Scores of one block of PANEL queries, or of two such blocks for products in AMX tiles.
    scores: Floats,
    /// Bias, or dropout's factors, for the scores of PANEL queries.
    extra: Floats,
    code: CodeLanes,
    /// 1 for each score of PANEL queries that the mask function hides, else 0.
    hide: Floats,
    out: Floats,
    /// `out` as rows, after products in tiles computed it transposed.
    out_rows: Floats,
    row_max: Floats,
    row_sum: Floats,
    alpha: Floats,
    row: Floats,
}

/// Operands and derived numbers that every task of a forward call reads.
struct Shared<'a> {
    problem: &'a FwdProblem,
    spans: &'a [SeqSpan],
    blocks: Blocks,
    score: ScoreInputs<'a>,
    q: Source,
    k: Cached<'a>,
    v: Cached<'a>,
    tree: Option<TreeMask<'a>>,
    o: Target,
    scale_o: f32,
    lse: Option<Bytes>,
    keep_mask: Option<Bytes>,
}

/// Tiles of `block_n` keys that some query of `rows` sees, ascending: those of the sink columns, then those of the
/// band.
pub(crate) fn key_tiles(
    head: &HeadScore,
    rows: Range<u32>,
    block_n: usize,
) -> impl Iterator<Item = (u32, usize)> + use<> {
    let seqlen_k = head.span.seqlen_k;
    let band = head.band.k_range(rows.clone(), seqlen_k);
    let sinks = (head.band.sink_range(rows, seqlen_k).end as usize).div_ceil(block_n);
    let first = (band.start as usize / block_n).max(sinks);
    let last = if band.is_empty() { 0 } else { (band.end as usize).div_ceil(block_n) };
    (0..sinks).chain(first..last).map(move |tile| {
        let j = tile * block_n;
        (j as u32, block_n.min(seqlen_k as usize - j))
    })
}

impl Forward<'_> {
    /// Computes it.
    ///
    /// # Errors
    /// Memory for scratch that the system refuses, before anything is written.
    pub(crate) fn run<S: Simd>(&self, s: S, threads: &Threads) -> fmha_core::Result<()> {
        let (problem, args) = (self.problem, self.args);
        if problem.block_scales.is_some() {
            return scaled::forward(self, threads, &|call| call.run(s, threads));
        }
        if problem.walks_lists() {
            return lists::forward(self, s.plain(), threads);
        }
        let rows = KvRows::of(problem, &args.seq)?;
        let turned = TurnedQueries::of(problem, args, self.spans, threads)?;
        cache::append(problem, args, self.spans, rows, threads)?;
        let total_q = args.seq.totals.total_q;
        let code = Code::of(problem, &CodeArgs { score: args.score, masks: args.masks, total_q })?;
        let shared = self.shared(rows, turned.as_ref(), self.blocks_for::<S>(threads.count()), code);
        let tasks = shared.tasks()?;
        let used = if tasks.is_empty() { 0 } else { threads.used(tasks.len()) };
        let mut scratch = reserve(used)?;
        for _ in 0..used {
            scratch.push(shared.scratch::<S>()?);
        }
        shared.attend_rows(s, threads)?;
        threads.for_each(&mut scratch, tasks.len(), |scratch, task| {
            // The constant comes first in the condition: for a set without tiles the kernels behind it are not
            // compiled.
            if S::TILES && in_tiles::<S>(problem) {
                shared.attend_in_tiles(s, scratch, tasks[task]);
            } else {
                shared.attend(s, scratch, tasks[task]);
            }
        });
        self.small_outputs(s, &shared, threads)
    }
}

impl<'a> Forward<'a> {
    /// The state that this call's tasks share.
    fn shared(
        &self,
        rows: KvRows<'a>,
        turned: Option<&TurnedQueries>,
        blocks: Blocks,
        code: Option<Code<'a>>,
    ) -> Shared<'a> {
        let (problem, args) = (self.problem, self.args);
        let [k_scale, v_scale] = args.scale_slices();
        let scales = |slice: Option<DevSlice<'_>>, of: fn(&CacheScales) -> Strides| {
            let scales = problem.cache.scales.as_ref();
            slice
                .zip(scales)
                .map(|(slice, scales)| (Source::new(slice, DType::F32, of(scales)), scales.block))
        };
        let cached = |slice, dtype, strides, dim: u32, scales| Cached {
            source: Source::new(slice, dtype, strides),
            rows,
            dim: dim as usize,
            widened: problem.cache.dtype.map(|_| problem.dtypes.qk),
            in_codes: false,
            packed: None,
            scales,
        };
        let q = Source::new(args.q, problem.dtypes.qk, problem.strides.q);
        Shared {
            problem,
            spans: self.spans,
            blocks,
            score: ScoreInputs::new(problem, &args.score, code),
            q: turned.map_or(q, TurnedQueries::source),
            k: cached(
                args.k_slice(),
                problem.stored_k(),
                problem.strides.k,
                problem.dims.head_dim_qk,
                scales(k_scale, |scales| scales.k),
            ),
            v: cached(
                args.v_slice(),
                problem.stored_v(),
                problem.strides.v,
                problem.dims.head_dim_v,
                scales(v_scale, |scales| scales.v),
            ),
            tree: TreeMask::of(problem, &args.cache, &args.seq),
            o: Target::new(&args.o, problem.dtypes.o, problem.strides.o),
            scale_o: args.scale_o.as_ref().map_or(1.0, |scale| f32_at(scale, 0)),
            lse: args.lse.as_ref().map(Bytes::new),
            keep_mask: args.keep_mask.as_ref().map(Bytes::new),
        }
    }
}

impl Forward<'_> {
    /// Sizes of tiles: large tiles copy K and V less often; small ones keep every thread busy. Results do not
    /// depend on the choice.
    fn blocks_for<S: Simd>(&self, threads: usize) -> Blocks {
        let mut blocks = self.blocks;
        let tasks = |block_m: usize| {
            let tiles = |span: &SeqSpan| (span.seqlen_q as usize).div_ceil(block_m);
            self.spans.iter().map(tiles).sum::<usize>() * self.problem.dims.num_heads_q as usize
        };
        while blocks.may_shrink
            && threads > 1
            && tasks(blocks.block_m) < 3 * threads
            && blocks.block_m.is_multiple_of(2 * S::PANEL)
        {
            blocks.block_m /= 2;
        }
        blocks
    }
}

impl Shared<'_> {
    /// Every tile of queries, the longest first.
    fn tasks(&self) -> fmha_core::Result<Vec<Task>> {
        let block_m = self.blocks.block_m;
        let heads = self.problem.dims.num_heads_q;
        let mine = || self.spans.iter().enumerate().filter(|(_, span)| !self.in_rows(span));
        let tiles: usize = mine().map(|(_, span)| (span.seqlen_q as usize).div_ceil(block_m)).sum();
        let mut tasks = reserve(tiles.saturating_mul(heads as usize))?;
        for (number, span) in mine() {
            let band = self.problem.band(span.seqlen_q, span.seqlen_k);
            for i in (0..span.seqlen_q).step_by(block_m) {
                let queries = (span.seqlen_q - i).min(block_m as u32);
                let rows = i..i + queries;
                let keys = band.k_range(rows.clone(), span.seqlen_k).len() as u32
                    + band.sink_range(rows, span.seqlen_k).len() as u32;
                for i_head in 0..heads {
                    tasks.push(Task { span: number as u32, i_head, i, queries, keys });
                }
            }
        }
        let work = |task: &Task| u64::from(task.keys) * u64::from(task.queries);
        tasks.sort_unstable_by_key(|task| (std::cmp::Reverse(work(task)), task.span, task.i_head, task.i));
        Ok(tasks)
    }

    fn scratch<S: Simd>(&self) -> fmha_core::Result<Scratch> {
        let Blocks { block_m, block_n, .. } = self.blocks;
        let dims = self.problem.dims;
        let dim_v = (dims.head_dim_v as usize).next_multiple_of(S::PANEL);
        let keys = block_n.next_multiple_of(if in_tiles::<S>(self.problem) { TILE } else { S::TILE_ROWS });
        // Small outputs (such as row maxima) are computed from panels of scores, whichever path computed O.
        let panels = if self.problem.outputs.is_empty() { 0 } else { block_n.next_multiple_of(S::TILE_ROWS) };
        let keys = keys.max(panels);
        let tiled = |len: usize| Floats::scratch(if in_tiles::<S>(self.problem) { len } else { 0 });
        let extra = if self.problem.drops() || self.score.has_bias() { keys * S::PANEL } else { 0 };
        Ok(Scratch {
            queries: Floats::scratch(block_m * dims.head_dim_qk as usize)?,
            staging: Floats::scratch(S::PANEL * (dims.head_dim_qk as usize).next_multiple_of(S::PANEL))?,
            keys: Floats::scratch(keys * row_stride(dims.head_dim_qk as usize))?,
            values: Floats::scratch(keys * dim_v)?,
            gathered: Floats::scratch(
                (self.k.scratch_bytes(block_n).max(self.v.scratch_bytes(block_n))).div_ceil(4),
            )?,
            columns: tiled(dim_v * row_stride(keys / 2))?,
            scores: Floats::scratch(keys * S::PANEL * if in_tiles::<S>(self.problem) { 2 } else { 1 })?,
            extra: Floats::scratch(extra)?,
            code: self.score.code.as_ref().map(Code::lanes).unwrap_or_default(),
            hide: Floats::scratch(if self.score.code.is_some() { keys * S::PANEL } else { 0 })?,
            out: Floats::scratch(block_m * dim_v)?,
            out_rows: tiled(block_m * dim_v)?,
            row_max: Floats::scratch(block_m)?,
            row_sum: Floats::scratch(block_m)?,
            alpha: Floats::scratch(if in_tiles::<S>(self.problem) { block_m } else { S::PANEL })?,
            row: Floats::scratch(dim_v)?,
        })
    }

    /// Q of a task, transposed; nothing seen yet.
    fn load_queries<S: Simd>(&self, s: S, scratch: &mut Scratch, task: Task, head: &HeadScore, pairs: bool) {
        s.run(GatherTransposed {
            from: self.q.q_rows(head.span, task.i_head).skip(task.i as usize),
            rows: task.queries as usize,
            cols: self.problem.dims.head_dim_qk as usize,
            factor: head.descale_q,
            to: scratch.queries.as_mut_ptr(),
            staging: scratch.staging.as_mut_ptr(),
            pairs,
        });
        scratch.row_max.fill(f32::NEG_INFINITY);
        scratch.row_sum.fill(0.0);
    }

    /// Copies K to rows, and V to blocks of PANEL columns with `capacity` rows, for `keys` keys from `j` on;
    /// returns the report of [`Gather`] on V.
    fn load_keys<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        head: &HeadScore,
        (j, keys): (u32, usize),
        capacity: usize,
        pairs: bool,
    ) -> bool {
        let mut is_moderate = true;
        let factor = |descale: f32| if self.problem.cache.dtype.is_some() { 1.0 } else { descale };
        s.run(GatherRows {
            from: self.k.block(s, head, (j, keys), head.descale_k, false, &mut scratch.gathered),
            rows: keys,
            cols: self.problem.dims.head_dim_qk as usize,
            factor: factor(head.descale_k),
            to: scratch.keys.as_mut_ptr(),
            pairs,
        });
        s.run(Gather {
            from: self.v.block(s, head, (j, keys), head.descale_v, false, &mut scratch.gathered),
            rows: keys,
            cols: self.problem.dims.head_dim_v as usize,
            factor: factor(head.descale_v),
            to: scratch.values.as_mut_ptr(),
            capacity,
            pairs,
            is_moderate: &mut is_moderate,
        });
        is_moderate
    }

    fn attend<S: Simd>(&self, s: S, scratch: &mut Scratch, task: Task) {
        let Blocks { block_m, block_n, .. } = self.blocks;
        let span = self.spans[task.span as usize];
        let head = self.score.head(span, task.i_head);
        let dim_qk = self.problem.dims.head_dim_qk as usize;
        let dim_v = self.problem.dims.head_dim_v as usize;
        let queries = task.queries as usize;
        let capacity = block_n.next_multiple_of(S::TILE_ROWS);
        // Elements of Q, K, P and V hold two bf16 each, which halves the steps of every product.
        let pairs = S::BF16_DOT && !S::TILES && dots_pairs(self.problem);
        let (dim_units, capacity_v) =
            if pairs { (dim_qk.div_ceil(2), capacity / 2) } else { (dim_qk, capacity) };
        self.load_queries(s, scratch, task, &head, pairs);
        let mut fresh = u128::MAX;
        debug_assert!(block_m / S::PANEL <= 128);

        let rows = task.i..task.i + task.queries;
        let hull = self.score.code.as_ref().map(|code| code.hull(&head, rows.clone()));
        for (j, keys) in key_tiles(&head, rows.clone(), block_n) {
            if hull.as_ref().is_some_and(|hull| j >= hull.end || j + keys as u32 <= hull.start) {
                continue;
            }
            if let Some(code) = &self.score.code
                && code.seen(&head, rows.clone(), j..j + keys as u32) == Seen::Nothing
            {
                continue;
            }
            let values_moderate = self.load_keys(s, scratch, &head, (j, keys), capacity_v, pairs);
            for first in (0..queries).step_by(S::PANEL) {
                let live = S::PANEL.min(queries - first);
                let Some(panel) = head.panel(task.i + first as u32, live, j, keys) else {
                    continue;
                };
                let scores = scratch.scores.as_mut_ptr();
                let keys = scratch.keys.as_ptr();
                let queries = scratch.queries.as_ptr().wrapping_add(first * dim_units);
                let factor = head.softmax_scale;
                multiply(s, Scores { panel, keys, queries, dim: dim_units, factor, scores, pairs });
                if let Some(code) = &self.score.code {
                    let hide = scratch.hide.as_mut_ptr();
                    // SAFETY: `scores` and `hide` have PANEL numbers for each key of the panel.
                    unsafe { code.score(s, &mut scratch.code, &head, &panel, (scores, hide)) };
                }
                if head.adjusts(&panel) {
                    let bias = scratch.extra.as_mut_ptr();
                    s.plain().run(Adjust { head: &head, panel, scores, bias, slope: None });
                }
                if head.coded {
                    // SAFETY: `scores` and `hide` have PANEL numbers for each key of the panel.
                    unsafe { Code::hide::<S>(&panel, scores, scratch.hide.as_ptr(), f32::NEG_INFINITY) };
                }
                let state = RowState {
                    row_max: scratch.row_max.as_mut_ptr().wrapping_add(first),
                    row_sum: scratch.row_sum.as_mut_ptr().wrapping_add(first),
                    alpha: scratch.alpha.as_mut_ptr(),
                };
                let bit = 1u128 << (first / S::PANEL);
                let is_fresh = fresh & bit != 0;
                fresh &= !bit;
                let alpha = scratch.alpha.as_ptr();
                let round = self.problem.dtypes.v;
                multiply(s, Softmax { panel, scores, state, round, pairs });
                if head.drops {
                    let keep = scratch.extra.as_mut_ptr();
                    // 1 / (1 - p_drop) is a factor of the whole row and is applied at the end.
                    s.plain().run(Keep { mask: head.keep, panel, factor: 1.0, to: keep });
                    s.plain().run(Multiply { panel, x: scores, y: keep });
                }
                let columns = Columns {
                    panel,
                    weights: scores,
                    right: scratch.values.as_ptr(),
                    capacity: capacity_v,
                    dim: dim_v,
                    out: scratch.out.as_mut_ptr().wrapping_add(first * S::PANEL),
                    out_capacity: block_m,
                    store: if is_fresh { Store::Scaled(1.0) } else { Store::Rescale(alpha) },
                    pairs,
                };
                if panel.edge && !values_moderate {
                    columns.visible_only::<S>(head.visible());
                } else {
                    multiply(s, columns);
                }
            }
        }
        let found = scratch.out.as_ptr();
        self.settle_rows(scratch, task, &head, 1.0);
        self.write_rows(s, scratch, task, fresh, found);
        let all_finite = (0..dim_v.div_ceil(S::PANEL)).all(|panel| {
            let mut is_finite = true;
            let from = found.wrapping_add(panel * block_m * S::PANEL);
            s.plain().run(AllFinite { from, len: queries * S::PANEL, is_finite: &mut is_finite });
            is_finite
        });
        let place = |row: usize, d: usize| (d / S::PANEL * block_m + row) * S::PANEL + d % S::PANEL;
        self.mend_rows(scratch, task, &head, all_finite, place);
    }

    /// Writes LSE and the keep flags; the factors for rows of O replace the rows' sums. Row maxima are multiples of
    /// `unit`.
    fn settle_rows(&self, scratch: &mut Scratch, task: Task, head: &HeadScore, unit: f64) {
        let span = head.span;
        for row in 0..task.queries as usize {
            let i = task.i + row as u32;
            // SAFETY: a live row of the scratch; LSE of this row belongs to this task.
            unsafe {
                let row_max = f64::from(*scratch.row_max.as_ptr().add(row)) * unit;
                let row_sum = f64::from(*scratch.row_sum.as_ptr().add(row));
                let (factor, lse) = settle(row_max, row_sum, head.sink);
                *scratch.row_sum.as_mut_ptr().add(row) =
                    (factor * f64::from(head.keep_scale)) as f32 * self.scale_o;
                if let Some(to) = self.lse {
                    to.write_f32(span.lse_index(self.problem, task.i_head, i), lse as f32);
                }
            }
        }
        if let Some(to) = self.keep_mask {
            self.write_keep(to, head.keep, task.i_head, task.i..task.i + task.queries, span);
        }
    }

    /// Batch, row and head of a task's first row of O.
    fn first_row(&self, task: Task) -> (u32, u32, u32) {
        let span = self.spans[task.span as usize];
        (span.q_batch, span.q_row + task.i, task.i_head)
    }

    /// Writes O from blocks of PANEL columns; a bit in `fresh` marks PANEL queries without visible keys, whose O
    /// was not written.
    fn write_rows<S: Simd>(&self, s: S, scratch: &mut Scratch, task: Task, fresh: u128, found: *const f32) {
        s.plain().run(WriteRows {
            to: &self.o,
            at: self.first_row(task),
            rows: task.queries as usize,
            cols: self.problem.dims.head_dim_v as usize,
            from: found,
            capacity: self.blocks.block_m,
            factors: Factors::Each(scratch.row_sum.as_ptr()),
            untouched: fresh,
            row: scratch.row.as_mut_ptr(),
        });
    }

    /// The keep flags of some queries and every key of the sequence.
    fn write_keep(
        &self,
        to: Bytes,
        mask: fmha_core::dropout::KeepMask,
        i_head: u32,
        queries: Range<u32>,
        span: SeqSpan,
    ) {
        let dims = self.problem.dims;
        let head = span.i_batch as usize * dims.num_heads_q as usize + i_head as usize;
        for i in queries {
            let row = (head * dims.seqlen_q as usize + i as usize) * dims.seqlen_k as usize;
            for quad in 0..span.seqlen_k.div_ceil(4) {
                for (word, kept) in mask.quad(i, quad).into_iter().enumerate() {
                    let j = quad as usize * 4 + word;
                    if j < span.seqlen_k as usize {
                        // SAFETY: the argument check measured the mask over the maximal lengths.
                        unsafe { to.write_u8(row + j, u8::from(kept)) };
                    }
                }
            }
        }
    }
}

/// Runs a kernel on panels, which may hold pairs of bf16 if the instruction set multiplies pairs outside of tiles.
/// All other sets use their plain set's code.
fn multiply<S: Simd>(s: S, op: impl Op<S> + Op<S::Plain>) {
    if S::BF16_DOT && !S::TILES {
        s.run(op);
    } else {
        s.plain().run(op);
    }
}

/// Returns the factor of a row of O, and the row's LSE, from the row's maximum and sum.
pub(crate) fn settle(row_max: f64, row_sum: f64, sink: Option<f32>) -> (f64, f64) {
    let sink = sink.map_or(f64::NEG_INFINITY, f64::from);
    let top = row_max.max(sink);
    if top == f64::NEG_INFINITY && row_sum == 0.0 && !sink.is_nan() {
        return (0.0, f64::NEG_INFINITY);
    }
    let share = exp(row_max - top);
    let total = row_sum * share + exp(sink - top);
    (share / total, top + total.ln())
}

/// `e^x`, with a shortcut if there is no sink: calling the function took as long as the rest of the row.
fn exp(x: f64) -> f64 {
    match x {
        0.0 => 1.0,
        f64::NEG_INFINITY => 0.0,
        x => x.exp(),
    }
}

/// Whether an instruction set with dot products of bf16 pairs computes this problem with them.
pub(crate) fn dots_pairs(problem: &FwdProblem) -> bool {
    problem.dtypes.qk == DType::Bf16 && problem.dtypes.v == DType::Bf16 && !problem.drops()
}

/// Whether an instruction set with tiles of bf16 computes this problem in them.
pub(crate) fn fits_tiles(problem: &FwdProblem) -> bool {
    let whole = |dim: u32| (dim as usize).is_multiple_of(TILE);
    dots_pairs(problem)
        && !problem.asks_pairs()
        && whole(problem.dims.head_dim_qk)
        && whole(problem.dims.head_dim_v)
}

fn in_tiles<S: Simd>(problem: &FwdProblem) -> bool {
    S::TILES && fits_tiles(problem)
}
