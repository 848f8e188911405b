//! A chunk of keys against the rows of a task.

use fmha_core::tree::TreeMask;
use fmha_core::{DType, KvLayout, SeqSpan};

use super::super::cache::Cached;
use super::modify::{Modify, drop_weights};
use super::seen::Seen;
use super::{CHUNK_KEYS, MAX_STATES, Scratch, Shared, State, Task};
use crate::blocks::{
    AddValues, Ahead, BLOCK_KEYS, Block, Dots, Order, Pieces, RowSums, SoftmaxRow, SoftmaxRows,
    TILED_QUERIES, TileDots, TileValues,
};
use crate::score::HeadScore;
use crate::simd::{BytePlanes, Simd};

/// The rows of a task, resolved.
pub(super) struct Rows<'a> {
    pub(super) span: SeqSpan,
    /// The first kv head, and how many.
    heads_kv: (u32, u32),
    /// Query heads of each kv head.
    ratio: u32,
    /// Query heads of all kv heads.
    pub(super) heads: Vec<HeadScore>,
    k: Cached<'a>,
    v: Cached<'a>,
    /// Conversion tables of K, followed by those of V and by the factor of the product of Q and converted K, each
    /// for every kv head.
    widen_k: Vec<BytePlanes>,
    widen_v: Vec<BytePlanes>,
    factors: Vec<f32>,
    /// Query index, and query head within the group, of each row of a kv head.
    pub(super) of: Vec<(u32, usize)>,
    /// Whether a weight is just the exponential of a scaled product.
    is_plain: bool,
    /// Visibility in blocks where every row sees every key.
    pub(super) all: Seen,
    pub(super) tree: Option<TreeMask<'a>>,
}

/// Number of FP8 codes that are converted together.
const CODES: usize = 64;

impl<'a> Shared<'a> {
    pub(super) fn rows<S: Simd>(&self, task: Task) -> Rows<'a> {
        let span = self.spans[task.span as usize];
        let ratio = self.problem.gqa_ratio();
        let (first, count) = task.heads;
        let heads = (first * ratio..(first + count) * ratio).map(|i_head| self.score.head(span, i_head));
        let heads: Vec<HeadScore> = heads.collect();
        let of_each = |of: &dyn Fn(&HeadScore) -> f32| -> Vec<f32> {
            heads.iter().step_by(ratio as usize).map(of).collect()
        };
        // K and V that were converted to Q's type are multiplied by their descale already.
        let descale = |head: &HeadScore| if self.k.widened.is_some() { 1.0 } else { head.descale_k };
        let (k, widen_k) = self.k.widened_by::<S>(&of_each(&|head| head.descale_k), task.rows);
        let (v, widen_v) = self.v.widened_by::<S>(&of_each(&|head| head.descale_v), task.rows);
        let factors = of_each(&|head| head.softmax_scale * descale(head));
        let of = (task.first_row..task.first_row + task.rows).map(|r| (r / ratio, (r % ratio) as usize));
        let heads_kv = task.heads;
        let is_plain = heads.iter().all(|head| !head.changes() && !head.drops);
        let of: Vec<(u32, usize)> = of.collect();
        let all = Seen::by_all(of.len());
        Rows {
            is_plain,
            all,
            span,
            heads_kv,
            ratio,
            heads,
            k,
            v,
            widen_k,
            widen_v,
            factors,
            of,
            tree: self.tree,
        }
    }

    /// Processes some chunks of keys, and calls `done` after each.
    pub(super) fn attend_chunks<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        rows: &Rows<'_>,
        chunks: (u32, u32),
        states: &mut [State],
        mut done: impl FnMut(u32, &mut Scratch, &mut [State]),
    ) {
        let last = rows.span.seqlen_k.min(chunks.1.saturating_mul(CHUNK_KEYS));
        // The block, and the two blocks after it, in rotation.
        let mut located = [Located::NOWHERE; 3];
        for (located, n) in located.iter_mut().zip(0..) {
            rows.locate((chunks.0 * CHUNK_KEYS).saturating_add(n * BLOCK_KEYS as u32), located);
        }
        let mut turn = 0;
        let mut some = Seen::NOTHING;
        let mut pieces = Pieces::new();
        let mut scores = Scores::nowhere(scratch, states.len());
        for chunk in chunks.0..chunks.1 {
            for state in &mut *states {
                (state.chunk, state.seen) = (RowSums::EMPTY, false);
            }
            scores.sums = [RowSums::EMPTY; MAX_STATES];
            scratch.out.fill(0.0);
            let end = rows.span.seqlen_k.min((chunk + 1).saturating_mul(CHUNK_KEYS));
            for j in (chunk * CHUNK_KEYS..end).step_by(BLOCK_KEYS) {
                let [a, b, c] = &mut located;
                let (here, next, after) = match turn {
                    0 => (a, b, c),
                    1 => (b, c, a),
                    _ => (c, a, b),
                };
                let blocks = (here, &*next, &*after);
                self.attend_block(
                    s,
                    scratch,
                    rows,
                    (j, last),
                    blocks,
                    (&mut pieces, &mut some, &mut scores, states),
                );
                rows.locate(j.saturating_add(3 * BLOCK_KEYS as u32), &mut located[turn]);
                turn = (turn + 1) % 3;
            }
            for (state, sums) in states.iter_mut().zip(&scores.sums) {
                state.chunk = *sums;
            }
            done(chunk, scratch, states);
        }
    }

    /// Attends to the block of keys from `j` on, up to key `last`. If nothing but softmax lies between its
    /// two products, the softmax may run beside the scores of the next block.
    fn attend_block<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        rows: &Rows<'_>,
        (j, last): (u32, u32),
        (here, next, after): (&mut Located, &Located, &Located),
        (pieces, some, scores, states): (&mut Pieces, &mut Seen, &mut Scores, &mut [State]),
    ) {
        let has_scores = std::mem::replace(&mut scores.are_there, false);
        let seen = rows.who_sees(j, here.count, some);
        if seen.live().is_empty() {
            return;
        }
        here.bring(s, scratch, rows, j);
        let [keys, values] = self.blocks_of(rows, here);
        let [next_keys, next_values] = self.blocks_of(rows, next);
        let goes_ahead = self.goes_ahead::<S>()
            && rows.is_plain
            && seen.whole().len() == rows.of.len()
            && here.count == BLOCK_KEYS
            && keys.in_place
            && last - j > BLOCK_KEYS as u32
            && rows.some_see(j + BLOCK_KEYS as u32, next.count);
        let asked_keys = if goes_ahead { self.blocks_of(rows, after)[0] } else { next_keys };
        let order = self.asked_order::<S>(scratch.beside_many, &asked_keys, &next_values);
        let mut ahead = order.of([&asked_keys, &next_values], pieces);
        if !has_scores {
            if order != AskedOrder::Pieces {
                self.ask_for_pages(s, next_keys.whole());
            }
            let keys = Block { next: values.ahead(), ..keys };
            let nothing = SoftmaxRows::new(scores.here, &mut [], scratch.alpha.as_mut_ptr(), DType::F32);
            self.multiply_keys(s, scratch, rows, (keys, seen), (order, &mut ahead), (scores.here, nothing));
        }
        if order != AskedOrder::Pieces {
            self.ask_for_pages(s, next_values.whole());
        }
        if goes_ahead {
            states.iter_mut().for_each(|state| state.seen = true);
            let (sums, alpha) = (&mut scores.sums[..states.len()], scratch.alpha.as_mut_ptr());
            let weighed = SoftmaxRows::new(scores.here, sums, alpha, self.round_weights::<S>(true));
            let scores = (scores.next, weighed);
            self.multiply_keys(s, scratch, rows, (next_keys, seen), (order, &mut ahead), scores);
        } else {
            self.weigh(s, scratch, rows, (j, here.count, seen), (scores, states), (order, &mut ahead));
        }
        let values = Block { next: next_keys.ahead(), ..values };
        self.multiply_values(s, scratch, (values, seen), scores.here, &mut ahead);
        if goes_ahead {
            scores.are_there = true;
            std::mem::swap(&mut scores.here, &mut scores.next);
        }
    }

    /// Order in which tiles prefetch the next block. Sixteen threads, for which memory has a longer latency, reach
    /// 84 GB/s with K and then V, and 66 with K alone (64/8 heads 76 and 69, 16/1 69 and 60, pages of 16 83 and
    /// 66). Another machine of this kind reaches 75 with K and then V, and 86 in pieces (64/8 64 and 72, 16/1 64
    /// and 62, pages of 16 81 and 79).
    fn asked_order<S: Simd>(&self, beside_many: bool, keys: &Block<'_>, values: &Block<'_>) -> AskedOrder {
        if !self.in_tiles::<S>() {
            AskedOrder::Nothing
        } else if keys.whole().1 == values.whole().1 {
            AskedOrder::Pieces
        } else if beside_many {
            AskedOrder::KeysThenValues
        } else {
            AskedOrder::KeysAlone
        }
    }

    /// Prefetches the first line of each page of a block early, so that its address is translated before the
    /// other lines are prefetched. In pages of 16 tokens of a head this gives 0.63 of the speed of plain
    /// reads instead of 0.53. Contiguous rows go without it, because the processor prefetches them itself:
    /// FP8 for eight queries falls from 0.64 to 0.57 with it.
    fn ask_for_pages<S: Simd>(&self, s: S, (rows, _): (&[*const u8], usize)) {
        if let (KvLayout::Paged { page_size }, true) = (self.problem.layout.kv, self.in_tiles::<S>()) {
            rows.iter().step_by(page_size.max(1) as usize).for_each(|&row| s.prefetch(row));
        }
    }

    /// K and V of a block.
    fn blocks_of<'p>(&self, rows: &'p Rows<'_>, located: &'p Located) -> [Block<'p>; 2] {
        let block = |cached: &Cached<'_>, widen: &'p [BytePlanes], keys: &'p [*const u8; BLOCK_KEYS]| Block {
            keys: &keys[..located.count],
            head_step: cached.head_step(),
            heads: rows.heads_kv.1 as usize,
            dim: cached.dim,
            dtype: cached.read_as(),
            codes: if cached.in_codes { widen } else { &[] },
            queries: rows.of.len(),
            in_place: cached.reads_in_place(),
            next: (&[], 0),
        };
        [block(&rows.k, &rows.widen_k, &located.keys), block(&rows.v, &rows.widen_v, &located.values)]
    }

    /// Computes S of a block for every head of the task. If tiles compute S, the softmax of the block before runs
    /// at the same time.
    fn multiply_keys<'p, S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        rows: &'p Rows<'_>,
        (keys, seen): (Block<'p>, &'p Seen),
        (order, ahead): (AskedOrder, &mut Ahead<'p>),
        (scores, before): (*mut f32, SoftmaxRows<'p>),
    ) {
        let queries = scratch.queries.as_ptr();
        let (live, factors) = (seen.live(), &rows.factors[..]);
        // A constant first: for a set without tiles, kernels of tiles are not compiled.
        if S::TILES && self.keys_in_tiles::<S>() {
            let staged = scratch.staged.as_mut_ptr();
            let quarters = order.quarters_beside_keys();
            s.run(TileDots { keys, queries, factors, scores, staged, quarters, ahead, before });
        } else {
            let (order, stride) = (self.order_q::<S>(), self.stride_qk::<S>());
            s.run(Dots { keys, queries, order, stride, live, factors, scores });
        }
    }

    /// Type to which weights are rounded when they are stored. Weights that are packed as bf16 are rounded by the
    /// packing instead.
    fn round_weights<S: Simd>(&self, sees_all: bool) -> DType {
        let packs = S::BF16_DOT && self.order_of_sums::<S>() == Order::Fours;
        if packs || self.values_in_tiles::<S>() && sees_all { DType::F32 } else { self.problem.dtypes.v }
    }

    /// Computes P of a block in the place of S, and applies dropout.
    fn weigh<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        rows: &Rows<'_>,
        (j, count, seen): (u32, usize, &Seen),
        (block, states): (&mut Scores, &mut [State]),
        (order, ahead): (AskedOrder, &mut Ahead<'_>),
    ) {
        let asked_beside_a_row = ahead.bytes() / order.part_beside_softmax() / states.len();
        for head_kv in 0..rows.heads_kv.1 as usize {
            let mut partial = seen.partial().iter().peekable();
            for &r in seen.live() {
                let (i, g) = rows.of[r];
                let head = &rows.heads[head_kv * rows.ratio as usize + g];
                let at = head_kv * rows.of.len() + r;
                let scores = block.here.wrapping_add(at * BLOCK_KEYS);
                if head.changes() {
                    s.plain().run(Modify { head, i, j, count, scores });
                }
                let seen = partial.next_if(|(row, _)| *row == r).map(|&(_, bits)| bits);
                let round = self.round_weights::<S>(seen.is_none());
                let mut hidden = !seen.unwrap_or(u64::MAX >> (BLOCK_KEYS - count));
                while hidden != 0 {
                    // SAFETY: a row's block of scores.
                    unsafe { *scores.add(hidden.trailing_zeros() as usize) = f32::NEG_INFINITY };
                    hidden &= hidden - 1;
                }
                // SAFETY: one for each row.
                let alpha = unsafe { &mut *scratch.alpha.as_mut_ptr().add(at) };
                states[at].seen = true;
                if !rows.are_codes() {
                    ahead.ask_for(s, asked_beside_a_row);
                }
                s.plain().run(SoftmaxRow { scores, state: &mut block.sums[at], alpha, round });
                if head.drops {
                    drop_weights(head, i, j, count, scores);
                }
            }
        }
    }

    /// O of a block, for every head of the task.
    fn multiply_values<'p, S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        (values, seen): (Block<'p>, &'p Seen),
        weights: *mut f32,
        ahead: &mut Ahead<'p>,
    ) {
        let alpha = scratch.alpha.as_ptr();
        let (out, stride, order) =
            (scratch.out.as_mut_ptr(), self.stride_v::<S>(), self.order_of_sums::<S>());
        let (mut whole, partial) = (seen.whole(), seen.partial());
        if S::TILES && self.values_in_tiles::<S>() && !whole.is_empty() {
            let (staged, packed) = (scratch.staged.as_mut_ptr(), scratch.packed.as_mut_ptr());
            s.run(TileValues { values, weights, alpha, whole, out, stride, staged, packed, ahead });
            whole = &[];
        }
        if whole.len() + partial.len() > 0 {
            s.run(AddValues { values, weights, alpha, whole, partial, out, order, stride });
        }
    }
}

/// The scores or weights of a block, and of the next block if that is computed ahead; the rows' maxima and sums.
struct Scores {
    here: *mut f32,
    next: *mut f32,
    /// Whether the rows in `here` are at their places already.
    are_there: bool,
    sums: [RowSums; MAX_STATES],
}

impl Scores {
    fn nowhere(scratch: &mut Scratch, rows: usize) -> Self {
        let here = scratch.scores.as_mut_ptr();
        let next = here.wrapping_add((rows + TILED_QUERIES as usize) * BLOCK_KEYS);
        Self { here, next, are_there: false, sums: [RowSums::EMPTY; MAX_STATES] }
    }
}

/// Order in which the next block is prefetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AskedOrder {
    /// No prefetch by tiles: the row products of this block prefetch instead.
    Nothing,
    KeysThenValues,
    /// K and V in rotation.
    Pieces,
    /// K alone, for K and V with rows of different lengths. V is loaded by tiles of sixteen lines, many at
    /// once, which overlap with one another and with the processor's own prefetches. One thread reaches 0.83
    /// of plain reads so, and 0.74 with a prefetch of V after K.
    KeysAlone,
}

impl AskedOrder {
    fn of<'p>(self, [keys, values]: [&Block<'p>; 2], pieces: &'p mut Pieces) -> Ahead<'p> {
        let nothing: (&[*const u8], usize) = (&[], 0);
        let of_whole_codes = |block: &Block<'_>| !block.codes.is_empty() && block.dim.is_multiple_of(CODES);
        let whole_vectors = [keys, values].into_iter().all(of_whole_codes);
        let blocks = match self {
            AskedOrder::Nothing => [nothing; 2],
            AskedOrder::KeysThenValues => [keys.whole(), values.whole()],
            AskedOrder::Pieces => {
                let ((keys, bytes), (values, _)) = (keys.whole(), values.whole());
                let by_lines = whole_vectors.then(|| Ahead::by_turns([keys, values], bytes));
                if let Some(ahead) = by_lines.flatten() {
                    return ahead;
                }
                [pieces.of([keys, values], bytes), nothing]
            }
            AskedOrder::KeysAlone => [keys.whole(), nothing],
        };
        Ahead::new(blocks, 1)
    }

    /// Number of quarters: for each tile of K that is multiplied, this share of its bytes is prefetched.
    fn quarters_beside_keys(self) -> usize {
        if self == AskedOrder::Pieces { 4 } else { 1 }
    }

    /// Divisor of the remaining bytes; the quotient is prefetched during the softmax. V's products prefetch the
    /// rest.
    fn part_beside_softmax(self) -> usize {
        match self {
            AskedOrder::Nothing | AskedOrder::KeysThenValues => 2,
            AskedOrder::Pieces => 3,
            AskedOrder::KeysAlone => 4,
        }
    }
}

/// Addresses of the rows of a block.
struct Located {
    keys: [*const u8; BLOCK_KEYS],
    values: [*const u8; BLOCK_KEYS],
    count: usize,
}

impl Located {
    const NOWHERE: Self =
        Self { keys: [std::ptr::null(); BLOCK_KEYS], values: [std::ptr::null(); BLOCK_KEYS], count: 0 };

    /// Copies those rows of a block that cannot be read in place.
    fn bring<S: Simd>(&mut self, s: S, scratch: &mut Scratch, rows: &Rows<'_>, j: u32) {
        for (cached, at, scratch, widen) in [
            (&rows.k, &mut self.keys, &mut scratch.keys, &rows.widen_k),
            (&rows.v, &mut self.values, &mut scratch.values, &rows.widen_v),
        ] {
            if !cached.reads_in_place() {
                let keys = &mut at[..self.count];
                cached.rows_in_scratch(s, &rows.span, rows.heads_kv, widen, scratch, (j, keys));
            }
        }
    }
}

impl Rows<'_> {
    /// Query index, score and query head of each row, kv head after kv head.
    pub(super) fn each(&self) -> impl Iterator<Item = (u32, &HeadScore, u32)> {
        (0..self.heads_kv.1).flat_map(move |head_kv| {
            self.of.iter().map(move |&(i, g)| {
                let at = head_kv * self.ratio + g as u32;
                (i, &self.heads[at as usize], self.heads_kv.0 * self.ratio + at)
            })
        })
    }

    /// The block of keys from `j` on, if there is one, and the addresses of its rows if they are read in place.
    fn locate(&self, j: u32, located: &mut Located) {
        let count = BLOCK_KEYS.min(self.span.seqlen_k.saturating_sub(j) as usize);
        for (cached, at) in [(&self.k, &mut located.keys), (&self.v, &mut located.values)] {
            if cached.reads_in_place() {
                cached.rows_in_place(&self.span, self.heads_kv.0, j, &mut at[..count]);
            }
        }
        located.count = count;
    }

    /// Whether lines are prefetched one by one during the conversion of codes, and none during the softmax.
    fn are_codes(&self) -> bool {
        !self.widen_v.is_empty()
    }
}
