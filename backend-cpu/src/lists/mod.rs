//! Attention over lists of keys: a task is one token of one kv head, whose query heads all see the same keys.
//!
//! ```text
//! for each tile of the list
//!     copy the listed rows of K into rows, as f32
//!     S = K Q^T                 keys down, heads across
//! adjust S                      soft-cap, bias, ALiBi
//! P = softmax of whole rows     LSE
//! for each tile of the list
//!     copy the listed rows of V into panels, as f32
//!     O += P V
//! ```
//!
//! The scores of a whole list stay in the processor's cache, so the softmax needs no running state and O no
//! rescaling. A token's arithmetic depends on its own list alone.

mod backward;
mod forward;
#[cfg(test)]
mod tests;

pub(crate) use backward::backward;
pub(crate) use forward::forward;

use fmha_core::lists::HostLists;
use fmha_core::masks::{HostMasks, Shown};
use fmha_core::second::SecondCall;
use fmha_core::seq::KvRows;
use fmha_core::{
    CacheRows, DType, DevSlice, FwdProblem, MaskArgs, ProblemError, ScoreArgs, SeqArgs, SeqSpan,
};

use crate::blocks::{Gather, GatherRows, GatherTransposed, Scores, row_stride};
use crate::forward::cache::Cached;
use crate::memory::{Floats, reserve};
use crate::score::{HeadScore, Panel, ScoreInputs};
use crate::simd::{BytePlanes, Op, Simd, tanh};
use crate::tensor::Source;

/// Listed keys of a tile: whole micro-tiles of 6 and of 12 rows.
const TILE_KEYS: usize = 96;

/// Operands and derived numbers that every token of a call reads.
struct Shared<'a> {
    problem: &'a FwdProblem,
    /// Lists of the first cache's keys; `None` if its band and intervals select the keys.
    lists: Option<HostLists<'a>>,
    masks: Option<HostMasks<'a>>,
    second: Option<Second<'a>>,
    score: ScoreInputs<'a>,
    q: Source,
    k: Cached<'a>,
    v: Cached<'a>,
    /// Keys that a panel of scores, `[capacity][PANEL heads]`, has room for.
    capacity: usize,
}

/// A second cache.
struct Second<'a> {
    spans: Vec<SeqSpan>,
    lists: Option<HostLists<'a>>,
    masks: Option<HostMasks<'a>>,
    k: Cached<'a>,
    v: Cached<'a>,
}

/// Bit that marks a listed key as one of the second cache. Key indices are below 2^31.
const OF_SECOND: u32 = 1 << 31;

/// One token of one kv head.
#[derive(Clone, Copy)]
struct Token {
    span: SeqSpan,
    i: u32,
    i_head_kv: u32,
}

/// Buffers of one thread, reused from token to token.
struct Scratch {
    /// The visible listed keys, in the list's order, followed by those of a second cache, marked with
    /// [`OF_SECOND`].
    listed: Vec<u32>,
    /// Keys of the second cache.
    of_second: Vec<u32>,
    heads: Vec<HeadScore>,
    /// Conversion tables for rows of K and of V, if the cache's type is narrower than that of the arithmetic.
    planes: [Vec<BytePlanes>; 2],
    /// Q of a token's heads, transposed: `[panels][head_dim_qk][PANEL heads]`.
    queries: Floats,
    staging: Floats,
    /// A tile's rows of K or V.
    rows: Floats,
    /// V or K of the keys of a tile, in blocks of PANEL columns of the head dimension.
    columns: Floats,
    gathered: Floats,
    /// S, later P: an array `[capacity][PANEL]` for each PANEL heads, with a row for each key.
    weights: Floats,
    /// Terms that are added to the scores of PANEL heads; later dropout's factors of P.
    extra: Floats,
}

/// Which of K and V.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    K,
    V,
}

impl<'a> Shared<'a> {
    /// The state of a call; `None` if the call has neither lists nor a second cache.
    ///
    /// # Errors
    /// Lists, or operands of the second cache, that are missing.
    fn new(
        problem: &'a FwdProblem,
        (seq, score, masks): (&SeqArgs<'a>, &ScoreArgs<'a>, &MaskArgs<'a>),
        (q, k, v): (Source, DevSlice<'_>, DevSlice<'_>),
        second: Option<&'a SecondCall<'a>>,
    ) -> Result<Option<Self>, ProblemError> {
        if !problem.walks_lists() {
            return Ok(None);
        }
        let lists = HostLists::of(problem, seq)?;
        let masks = HostMasks::of(problem, masks, seq.totals.total_q)?;
        let second = second.map(Second::of).transpose()?;
        let rows = KvRows::of(problem, seq)?;
        let dims = problem.dims;
        let cached = |slice, dtype, strides, dim: u32| Cached {
            source: Source::new(slice, dtype, strides),
            rows,
            dim: dim as usize,
            widened: problem.cache.dtype.map(|_| problem.dtypes.qk),
            in_codes: false,
            packed: packed(problem),
            scales: None,
        };
        let most = problem.most_walked_keys() as usize;
        Ok(Some(Self {
            problem,
            lists,
            masks,
            second,
            score: ScoreInputs::new(problem, score, None),
            q,
            k: cached(k, in_memory(problem, problem.stored_k()), problem.strides.k, dims.head_dim_qk),
            v: cached(v, in_memory(problem, problem.stored_v()), problem.strides.v, dims.head_dim_v),
            capacity: most.next_multiple_of(TILE_KEYS).max(TILE_KEYS),
        }))
    }

    /// Query heads of a kv head.
    fn group(&self) -> usize {
        self.problem.gqa_ratio() as usize
    }

    /// Query heads of a kv head, rounded up to a multiple of PANEL.
    fn lanes<S: Simd>(&self) -> usize {
        self.group().next_multiple_of(S::PANEL)
    }

    fn scratch<S: Simd>(&self) -> fmha_core::Result<Scratch> {
        let dims = self.problem.dims;
        let (dim_qk, dim_v) = (dims.head_dim_qk as usize, dims.head_dim_v as usize);
        let widest = dim_qk.max(dim_v);
        let adds = self.score.has_bias() || self.has_alibi() || self.problem.drops();
        let mut heads = reserve(self.group())?;
        heads.clear();
        Ok(Scratch {
            listed: reserve(self.capacity)?,
            of_second: reserve(if self.second.is_some() { self.capacity } else { 0 })?,
            heads,
            planes: [Vec::new(), Vec::new()],
            queries: Floats::scratch(self.lanes::<S>() * dim_qk)?,
            staging: Floats::scratch(S::PANEL * widest.next_multiple_of(S::PANEL))?,
            rows: Floats::scratch(TILE_KEYS * row_stride(widest))?,
            columns: Floats::scratch(TILE_KEYS * widest.next_multiple_of(S::PANEL))?,
            gathered: Floats::scratch(
                self.k.scratch_bytes(TILE_KEYS).max(self.v.scratch_bytes(TILE_KEYS)).div_ceil(4),
            )?,
            weights: Floats::scratch(self.lanes::<S>() * self.capacity)?,
            extra: Floats::scratch(if adds { self.capacity * S::PANEL } else { 0 })?,
        })
    }

    fn has_alibi(&self) -> bool {
        matches!(self.problem.score.bias, fmha_core::Bias::Alibi { .. })
    }

    /// The tokens of a call, sequence by sequence.
    fn tokens(&self, spans: &[SeqSpan]) -> fmha_core::Result<Vec<Token>> {
        let heads = self.problem.dims.num_heads_kv;
        let count = spans.iter().map(|span| span.seqlen_q as usize * heads as usize).sum();
        let mut tokens = reserve(count)?;
        for &span in spans {
            for i in 0..span.seqlen_q {
                tokens.extend((0..heads).map(|i_head_kv| Token { span, i, i_head_kv }));
            }
        }
        Ok(tokens)
    }

    /// Sets the heads of a token, the keys that they see, and Q transposed.
    fn begin<S: Simd>(&self, s: S, scratch: &mut Scratch, token: Token) {
        let Token { span, i, i_head_kv } = token;
        let first = i_head_kv * self.problem.gqa_ratio();
        scratch.heads.clear();
        scratch.heads.extend((0..self.problem.gqa_ratio()).map(|head| self.score.head(span, first + head)));
        let head = scratch.heads[0];
        self.list_keys(scratch, token);
        if self.problem.cache.dtype.is_some() {
            scratch.planes = [
                self.k.widened_by::<S>(&[head.descale_k], u32::MAX).1,
                self.v.widened_by::<S>(&[head.descale_v], u32::MAX).1,
            ];
        }
        s.run(GatherTransposed {
            from: self.q.heads(span.q_batch, span.q_row + i, first),
            rows: self.group(),
            cols: self.problem.dims.head_dim_qk as usize,
            factor: head.descale_q,
            to: scratch.queries.as_mut_ptr(),
            staging: scratch.staging.as_mut_ptr(),
            pairs: false,
        });
    }

    /// Lists the keys that a token sees in both caches.
    fn list_keys(&self, scratch: &mut Scratch, token: Token) {
        let Token { span, i, i_head_kv } = token;
        let Scratch { listed, of_second, heads, .. } = scratch;
        let (band, i_head) = (heads[0].band, heads[0].i_head);
        match &self.lists {
            Some(lists) => {
                lists.row(&span, i_head_kv, i, listed);
                listed.retain(|&j| band.visible(i, j));
            }
            None => {
                listed.clear();
                let keys = band.row_range(i, span.seqlen_k);
                listed.extend(band.sink_range(i..i + 1, span.seqlen_k).chain(keys));
            }
        }
        if let Some(masks) = &self.masks {
            listed.retain(|&j| masks.head(&span, i_head).shown(i, j) != Shown::No);
        }
        let Some(second) = &self.second else { return };
        let span = second.spans[span.i_batch as usize];
        match &second.lists {
            Some(lists) => lists.row(&span, i_head_kv, i, of_second),
            None => {
                of_second.clear();
                of_second.extend(0..span.seqlen_k);
            }
        }
        if let Some(masks) = &second.masks {
            of_second.retain(|&j| masks.head(&span, i_head).shown(i, j) != Shown::No);
        }
        listed.extend(of_second.iter().map(|j| j | OF_SECOND));
    }

    /// Calls `each` for the runs of consecutive rows in one tile of the list: address, place in the tile, number of
    /// rows. Lists often contain neighbouring keys.
    fn for_runs<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        side: Side,
        tile: std::ops::Range<usize>,
        mut each: impl FnMut(crate::tensor::Matrix, usize, usize),
    ) {
        let Scratch { listed, heads, planes, gathered, .. } = scratch;
        let planes = if side == Side::K { &planes[0] } else { &planes[1] };
        let keys = &listed[tile];
        let mut at = 0;
        while at < keys.len() {
            let run =
                keys[at..].windows(2).take_while(|pair| pair[0].checked_add(1) == Some(pair[1])).count() + 1;
            let mut head = heads[0];
            let (k, v) = match &self.second {
                Some(second) if keys[at] & OF_SECOND != 0 => {
                    head.span = second.spans[head.span.i_batch as usize];
                    (&second.k, &second.v)
                }
                _ => (&self.k, &self.v),
            };
            let tensor = if side == Side::K { k } else { v };
            let from = tensor.block_by(s, &head, (keys[at] & !OF_SECOND, run), planes, false, gathered);
            each(from, at, run);
            at += run;
        }
    }

    fn dim_and_factor(&self, head: &HeadScore, side: Side) -> (usize, f32) {
        let dims = self.problem.dims;
        let (dim, descale) = match side {
            Side::K => (dims.head_dim_qk, head.descale_k),
            Side::V => (dims.head_dim_v, head.descale_v),
        };
        (dim as usize, if self.problem.cache.dtype.is_some() { 1.0 } else { descale })
    }

    /// Copies K or V of the listed keys of a tile to dense rows.
    fn load_rows<S: Simd>(&self, s: S, scratch: &mut Scratch, side: Side, tile: std::ops::Range<usize>) {
        let (cols, factor) = self.dim_and_factor(&scratch.heads[0], side);
        let to = scratch.rows.as_mut_ptr();
        self.for_runs(s, scratch, side, tile, |from, at, rows| {
            let to = to.wrapping_add(at * row_stride(cols));
            s.run(GatherRows { from, rows, cols, factor, to, pairs: false });
        });
    }

    /// Copies K or V of the listed keys of a tile to blocks of PANEL columns, `TILE_KEYS` rows each.
    fn load_columns<S: Simd>(&self, s: S, scratch: &mut Scratch, side: Side, tile: std::ops::Range<usize>) {
        let (cols, factor) = self.dim_and_factor(&scratch.heads[0], side);
        let to = scratch.columns.as_mut_ptr();
        self.for_runs(s, scratch, side, tile, |from, at, rows| {
            let (to, capacity) = (to.wrapping_add(at * S::PANEL), TILE_KEYS);
            let is_moderate = &mut true;
            s.run(Gather { from, rows, cols, factor, to, capacity, pairs: false, is_moderate });
        });
    }

    /// Writes products of a tile's rows with each head's row of `right`, `[panels][dim][PANEL]`, to `out`.
    fn products<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        side: Side,
        right: *const f32,
        factor: f32,
        out: *mut f32,
    ) {
        let keys = scratch.listed.len();
        let (dim, _) = self.dim_and_factor(&scratch.heads[0], side);
        for first in (0..keys).step_by(TILE_KEYS) {
            let tile = first..keys.min(first + TILE_KEYS);
            let rows = tile.len();
            self.load_rows(s, scratch, side, tile);
            for lane in (0..self.group()).step_by(S::PANEL) {
                s.run(Scores {
                    panel: self.panel::<S>(lane, rows),
                    keys: scratch.rows.as_ptr(),
                    queries: right.wrapping_add(lane * dim),
                    dim,
                    factor,
                    scores: out.wrapping_add(lane * self.capacity + first * S::PANEL),
                    pairs: false,
                });
            }
        }
    }

    /// The panel of scores of PANEL heads from `lane` on and the first `rows` keys of a tile, all of them visible.
    fn panel<S: Simd>(&self, lane: usize, rows: usize) -> Panel {
        Panel { i: 0, queries: S::PANEL.min(self.group() - lane), j: 0, rows: (0, rows), edge: false }
    }

    /// Computes S of every head and listed key, and writes the soft-cap's derivative to `slope` if that is given.
    fn scores<S: Simd>(&self, s: S, scratch: &mut Scratch, token: Token, slope: Option<*mut f32>) {
        let (queries, weights) = (scratch.queries.as_ptr(), scratch.weights.as_mut_ptr());
        self.products(s, scratch, Side::K, queries, self.problem.resolved_softmax_scale(), weights);
        if !scratch.heads[0].changes() {
            return;
        }
        for lane in (0..self.group()).step_by(S::PANEL) {
            let panel = self.panel::<S>(lane, scratch.listed.len());
            let heads = &scratch.heads[lane..lane + panel.queries];
            let adds = self.score.has_bias() || self.has_alibi();
            if adds {
                for (row, &j) in scratch.listed.iter().enumerate() {
                    for (at, head) in heads.iter().enumerate() {
                        // SAFETY: `row` and `lane` are inside the panel of scores; the bias has an element for each
                        // query and key.
                        unsafe {
                            let bias = head.bias.map_or(0.0, |bias| bias.get(token.i as usize, j as usize));
                            let term = head.alibi_term(token.i, j).unwrap_or(bias);
                            *scratch.extra.as_mut_ptr().add(row * S::PANEL + at) = term;
                        }
                    }
                }
            }
            let offset = lane * self.capacity;
            s.run(Modify {
                panel,
                softcap: heads[0].softcap,
                scores: weights.wrapping_add(offset),
                extra: adds.then(|| scratch.extra.as_ptr()),
                slope: slope.map(|slope| slope.wrapping_add(offset)),
            });
        }
    }

    /// Writes dropout's factor of each P to `extra`, for PANEL heads from head `lane` on.
    fn keep<S: Simd>(&self, scratch: &mut Scratch, token: Token, lane: usize, factor: f32) {
        let live = S::PANEL.min(self.group() - lane);
        for (row, &j) in scratch.listed.iter().enumerate() {
            for (at, head) in scratch.heads[lane..lane + live].iter().enumerate() {
                let keep = if head.keep.keep(token.i, j) { factor } else { 0.0 };
                // SAFETY: `row` and `at` are a row and a lane of the array `[capacity][PANEL]`.
                unsafe { *scratch.extra.as_mut_ptr().add(row * S::PANEL + at) = keep };
            }
        }
    }
}

/// Format of a problem's rows of bytes, and the rows of a page.
fn packed(problem: &FwdProblem) -> Option<(CacheRows, u32)> {
    problem.cache.rows.zip(problem.layout.kv.page_size())
}

/// Type of an element of K or V in memory: a byte if the cache has rows of bytes.
fn in_memory(problem: &FwdProblem, stored: DType) -> DType {
    if problem.cache.rows.is_some() { DType::E4m3Fn } else { stored }
}

impl<'a> Second<'a> {
    /// # Errors
    /// Operands that are missing, and lengths that are wrong.
    fn of(call: &'a SecondCall<'a>) -> Result<Self, ProblemError> {
        let SecondCall { problem, args, seq } = call;
        let (rows, dims) = (KvRows::of(problem, seq)?, problem.dims);
        let cached = |slice, dtype, strides, dim: u32| Cached {
            source: Source::new(slice, dtype, strides),
            rows,
            dim: dim as usize,
            widened: None,
            in_codes: false,
            packed: packed(problem),
            scales: None,
        };
        let v = args.v.unwrap_or(args.k);
        Ok(Self {
            spans: call.spans()?,
            lists: HostLists::of(problem, seq)?,
            masks: HostMasks::of(problem, &call.masks(), seq.totals.total_q)?,
            k: cached(args.k, in_memory(problem, problem.stored_k()), problem.strides.k, dims.head_dim_qk),
            v: cached(v, in_memory(problem, problem.stored_v()), problem.strides.v, dims.head_dim_v),
        })
    }
}

/// Applies the soft-cap to the scores of PANEL heads and adds the other terms, in place.
struct Modify {
    panel: Panel,
    softcap: Option<f32>,
    scores: *mut f32,
    /// Bias of PANEL heads, added to the scores; `None` without a bias.
    extra: Option<*const f32>,
    /// Output for the soft-cap's derivative `1 - tanh^2`, if it is needed.
    slope: Option<*mut f32>,
}

impl<S: Simd> Op<S> for Modify {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { panel, softcap, scores, extra, slope } = self;
        for at in (panel.rows.0 * S::PANEL..panel.rows.1 * S::PANEL).step_by(S::LANES) {
            // SAFETY: the arrays have PANEL numbers for each of these rows.
            unsafe {
                let mut x = s.load(scores.add(at));
                if let Some(softcap) = softcap {
                    let cap = s.splat(softcap);
                    let t = tanh(s, s.div(x, cap));
                    x = s.mul(cap, t);
                    if let Some(slope) = slope {
                        let one = s.splat(1.0);
                        // (1 - t)(1 + t) keeps small derivatives accurate, which 1 - t^2 would cancel.
                        s.store(slope.add(at), s.mul(s.sub(one, t), s.add(one, t)));
                    }
                }
                if let Some(extra) = extra {
                    x = s.add(x, s.load(extra.add(at)));
                }
                s.store(scores.add(at), x);
            }
        }
    }
}

/// `x[row][lane] *= factors[lane]`, over rows of PANEL numbers.
struct ScaleLanes {
    panel: Panel,
    x: *mut f32,
    factors: *const f32,
}

impl<S: Simd> Op<S> for ScaleLanes {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { panel, x, factors } = self;
        for v in 0..2 {
            // SAFETY: `factors` and each row of `x` have PANEL numbers.
            unsafe {
                let factor = s.load(factors.add(v * S::LANES));
                for row in panel.rows.0..panel.rows.1 {
                    let at = x.add(row * S::PANEL + v * S::LANES);
                    s.store(at, s.mul(s.load(at), factor));
                }
            }
        }
    }
}
