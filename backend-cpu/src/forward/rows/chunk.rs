//! A chunk of keys against the rows of a task.

use fmha_core::tree::TreeMask;
use fmha_core::{BlockClass, DType, KvLayout, SeqSpan};

use super::super::cache::Cached;
use super::modify::{Modify, drop_weights};
use super::{CHUNK_KEYS, MAX_ROWS, Scratch, Shared, State, Task};
use crate::blocks::{
    AddValues, Ahead, BLOCK_KEYS, Block, Dots, Order, Pieces, SoftmaxRow, TileDots, TileValues,
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
    heads: Vec<HeadScore>,
    k: Cached<'a>,
    v: Cached<'a>,
    /// Of each kv head: what widens K and V, and what the product of Q and K is multiplied by after that.
    widen_k: Vec<BytePlanes>,
    widen_v: Vec<BytePlanes>,
    factors: Vec<f32>,
    /// Query, and query head of the group, of each row of a kv head.
    pub(super) of: Vec<(u32, usize)>,
    tree: Option<TreeMask<'a>>,
}

/// Which rows of a kv head see a block.
struct Seen {
    live: [usize; MAX_ROWS],
    num_live: usize,
    whole: [usize; MAX_ROWS],
    num_whole: usize,
    /// With a bit for each key.
    partial: [(usize, u64); MAX_ROWS],
    num_partial: usize,
}

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
        // What a widened cache was multiplied by is in it.
        let descale = |head: &HeadScore| if self.k.widened.is_some() { 1.0 } else { head.descale_k };
        let (k, widen_k) = self.k.widened_by::<S>(&of_each(&|head| head.descale_k), task.rows);
        let (v, widen_v) = self.v.widened_by::<S>(&of_each(&|head| head.descale_v), task.rows);
        let factors = of_each(&|head| head.softmax_scale * descale(head));
        let of = (task.first_row..task.first_row + task.rows).map(|r| (r / ratio, (r % ratio) as usize));
        let (heads_kv, of) = (task.heads, of.collect());
        Rows { span, heads_kv, ratio, heads, k, v, widen_k, widen_v, factors, of, tree: self.tree }
    }

    /// One chunk of keys.
    pub(super) fn attend_chunk<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        rows: &Rows<'_>,
        chunk: u32,
        states: &mut [State],
    ) {
        let end = rows.span.seqlen_k.min((chunk + 1).saturating_mul(CHUNK_KEYS));
        let mut next = rows.locate(chunk * CHUNK_KEYS);
        let mut pieces = Pieces::new();
        for j in (chunk * CHUNK_KEYS..end).step_by(BLOCK_KEYS) {
            let mut here = next;
            next = rows.locate(j + here.count as u32);
            let seen = rows.who_sees(j, here.count);
            if seen.num_live > 0 {
                here.bring(s, scratch, rows, j);
                let [keys, values] = self.blocks_of(rows, &here);
                let [next_keys, next_values] = self.blocks_of(rows, &next);
                let order = self.asked_order::<S>(scratch.beside_many, &next_keys, &next_values);
                let mut ahead = order.of([&next_keys, &next_values], &mut pieces);
                if order != AskedOrder::Pieces {
                    self.ask_for_pages(s, next_keys.whole());
                }
                self.multiply_keys(
                    s,
                    scratch,
                    rows,
                    Block { next: values.ahead(), ..keys },
                    &seen,
                    (order, &mut ahead),
                );
                if order != AskedOrder::Pieces {
                    self.ask_for_pages(s, next_values.whole());
                }
                self.weigh(s, scratch, rows, (j, here.count), &seen, (&mut *states, order, &mut ahead));
                self.multiply_values(
                    s,
                    scratch,
                    Block { next: next_keys.ahead(), ..values },
                    &seen,
                    &mut ahead,
                );
            }
        }
    }

    /// In what order tiles ask for the next block. Sixteen threads, whose memory answers later, have 84 GB/s of K and then V, and 66 of
    /// K alone (64/8 76 and 69, 16/1 69 and 60, in pages of 16 83 and 66); on another such machine 75 of K and then V, and 86 in pieces
    /// (64/8 64 and 72, 16/1 64 and 62, in pages of 16 81 and 79).
    fn asked_order<S: Simd>(&self, beside_many: bool, keys: &Block<'_>, values: &Block<'_>) -> AskedOrder {
        if !self.in_tiles::<S>() {
            AskedOrder::Nothing
        } else if !values.codes.is_empty() {
            AskedOrder::KeysThenValues
        } else if keys.whole().1 == values.whole().1 {
            AskedOrder::Pieces
        } else if beside_many {
            AskedOrder::KeysThenValues
        } else {
            AskedOrder::KeysAlone
        }
    }

    /// The first line of each page of a block, early, so that its address is translated by when the others are asked for: where
    /// pages are of 16 tokens of a head, 0.53 and 0.63 of what plain reads have. Not where rows follow one another, where the
    /// processor goes ahead by itself: FP8 for eight queries 0.64 and 0.57.
    fn ask_for_pages<S: Simd>(&self, s: S, (rows, _): (&[*const u8], usize)) {
        if let (KvLayout::Paged { page_size }, true) = (self.problem.kv_layout, self.in_tiles::<S>()) {
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

    /// S of a block, for every head of the task.
    fn multiply_keys<'p, S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        rows: &'p Rows<'_>,
        keys: Block<'p>,
        seen: &'p Seen,
        (order, ahead): (AskedOrder, &mut Ahead<'p>),
    ) {
        let (queries, scores) = (scratch.queries.as_ptr(), scratch.scores.as_mut_ptr());
        let (live, factors) = (seen.live(), &rows.factors[..]);
        if self.keys_in_tiles::<S>() {
            let staged = scratch.staged.as_mut_ptr();
            let quarters = order.quarters_beside_keys();
            s.run(TileDots { keys, queries, factors, scores, staged, quarters, ahead });
        } else {
            let (order, stride) = (self.order_q::<S>(), self.stride_qk::<S>());
            s.run(Dots { keys, queries, order, stride, live, factors, scores });
        }
    }

    /// P of a block in the place of S, and what of it is to be dropped.
    fn weigh<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        rows: &Rows<'_>,
        (j, count): (u32, usize),
        seen: &Seen,
        (states, order, ahead): (&mut [State], AskedOrder, &mut Ahead<'_>),
    ) {
        // What is packed to bf16 afterwards is rounded by that.
        let packs = S::BF16_DOT && self.order_of_sums::<S>() == Order::Fours;
        let asked_beside_a_row = ahead.bytes() / order.part_beside_softmax() / states.len();
        for head_kv in 0..rows.heads_kv.1 as usize {
            let mut partial = seen.partial().iter().peekable();
            for &r in seen.live() {
                let (i, g) = rows.of[r];
                let head = &rows.heads[head_kv * rows.ratio as usize + g];
                let at = head_kv * rows.of.len() + r;
                let scores = scratch.scores.as_mut_ptr().wrapping_add(at * BLOCK_KEYS);
                if head.changes() {
                    s.run(Modify { head, i, j, count, scores });
                }
                let seen = partial.next_if(|(row, _)| *row == r).map(|&(_, bits)| bits);
                let in_tiles = self.values_in_tiles::<S>() && seen.is_none();
                let round = if packs || in_tiles { DType::F32 } else { self.problem.dtype_v };
                let mut hidden = !seen.unwrap_or(u64::MAX >> (BLOCK_KEYS - count));
                while hidden != 0 {
                    // SAFETY: a row's block of scores.
                    unsafe { *scores.add(hidden.trailing_zeros() as usize) = f32::NEG_INFINITY };
                    hidden &= hidden - 1;
                }
                // SAFETY: one for each row.
                let alpha = unsafe { &mut *scratch.alpha.as_mut_ptr().add(at) };
                let state = &mut states[at];
                state.seen = true;
                ahead.ask_for(s, asked_beside_a_row);
                s.run(SoftmaxRow { scores, state: &mut state.chunk, alpha, round });
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
        values: Block<'p>,
        seen: &'p Seen,
        ahead: &mut Ahead<'p>,
    ) {
        let (weights, alpha) = (scratch.scores.as_mut_ptr(), scratch.alpha.as_ptr());
        let (out, stride, order) =
            (scratch.out.as_mut_ptr(), self.stride_v::<S>(), self.order_of_sums::<S>());
        let (mut whole, partial) = (seen.whole(), seen.partial());
        if self.values_in_tiles::<S>() && !whole.is_empty() {
            let (staged, packed) = (scratch.staged.as_mut_ptr(), scratch.packed.as_mut_ptr());
            s.run(TileValues { values, weights, alpha, whole, out, stride, staged, packed, ahead });
            whole = &[];
        }
        if whole.len() + partial.len() > 0 {
            s.run(AddValues { values, weights, alpha, whole, partial, out, order, stride });
        }
    }
}

/// In what order the next block is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AskedOrder {
    /// Where there are no tiles: rows of this block go ahead of themselves.
    Nothing,
    KeysThenValues,
    /// K and V in turn.
    Pieces,
    /// Where their rows are of different lengths. V is loaded by tiles of sixteen lines, many at once, which overlap with one another and
    /// with the processor's own prefetches: asked for after K as well, one thread had 0.74 of plain reads, and 0.83 without.
    KeysAlone,
}

impl AskedOrder {
    fn of<'p>(self, [keys, values]: [&Block<'p>; 2], pieces: &'p mut Pieces) -> Ahead<'p> {
        let nothing: (&[*const u8], usize) = (&[], 0);
        let blocks = match self {
            AskedOrder::Nothing => [nothing; 2],
            AskedOrder::KeysThenValues => [keys.whole(), values.whole()],
            AskedOrder::Pieces => {
                let ((keys, bytes), (values, _)) = (keys.whole(), values.whole());
                [pieces.of([keys, values], bytes), nothing]
            }
            AskedOrder::KeysAlone => [keys.whole(), nothing],
        };
        Ahead::new(blocks, 1)
    }

    /// How much is asked for beside K's products, in quarters of what is multiplied.
    fn quarters_beside_keys(self) -> usize {
        if self == AskedOrder::Pieces { 4 } else { 1 }
    }

    /// Which part of what is left then is asked for beside the softmax; V's products ask for the rest.
    fn part_beside_softmax(self) -> usize {
        match self {
            AskedOrder::Nothing | AskedOrder::KeysThenValues => 2,
            AskedOrder::Pieces => 3,
            AskedOrder::KeysAlone => 4,
        }
    }
}

/// Where the rows of a block lie.
#[derive(Clone, Copy)]
struct Located {
    keys: [*const u8; BLOCK_KEYS],
    values: [*const u8; BLOCK_KEYS],
    count: usize,
}

impl Located {
    /// Brings those together that are not read where they lie.
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

impl Seen {
    fn live(&self) -> &[usize] {
        &self.live[..self.num_live]
    }

    fn whole(&self) -> &[usize] {
        &self.whole[..self.num_whole]
    }

    fn partial(&self) -> &[(usize, u64)] {
        &self.partial[..self.num_partial]
    }
}

impl Rows<'_> {
    /// Query, score and query head of each row, kv head after kv head.
    pub(super) fn each(&self) -> impl Iterator<Item = (u32, &HeadScore, u32)> {
        (0..self.heads_kv.1).flat_map(move |head_kv| {
            self.of.iter().map(move |&(i, g)| {
                let at = head_kv * self.ratio + g as u32;
                (i, &self.heads[at as usize], self.heads_kv.0 * self.ratio + at)
            })
        })
    }

    /// The block of keys from `j` on, of which there may be none; its rows where they are read where they lie.
    fn locate(&self, j: u32) -> Located {
        let count = BLOCK_KEYS.min(self.span.seqlen_k.saturating_sub(j) as usize);
        let [mut keys, mut values] = [[std::ptr::null(); BLOCK_KEYS]; 2];
        for (cached, at) in [(&self.k, &mut keys), (&self.v, &mut values)] {
            if cached.reads_in_place() {
                cached.rows_in_place(&self.span, self.heads_kv.0, j, &mut at[..count]);
            }
        }
        Located { keys, values, count }
    }

    /// Which rows see the keys `j .. j + count`.
    fn who_sees(&self, j: u32, count: usize) -> Seen {
        let mut seen = Seen {
            live: [0; MAX_ROWS],
            num_live: 0,
            whole: [0; MAX_ROWS],
            num_whole: 0,
            partial: [(0, 0); MAX_ROWS],
            num_partial: 0,
        };
        // Rows of a query follow one another, and see the same.
        let mut of_query = None;
        for (r, &(i, _)) in self.of.iter().enumerate() {
            let bits = match of_query {
                Some((query, bits)) if query == i => bits,
                _ => self.seen(i, j, count),
            };
            of_query = Some((i, bits));
            if bits == 0 {
                continue;
            }
            seen.live[seen.num_live] = r;
            seen.num_live += 1;
            if bits.count_ones() as usize == count {
                seen.whole[seen.num_whole] = r;
                seen.num_whole += 1;
            } else {
                seen.partial[seen.num_partial] = (r, bits);
                seen.num_partial += 1;
            }
        }
        seen
    }

    /// Which of the keys `j .. j + count` query `i` sees: a bit for each.
    fn seen(&self, i: u32, j: u32, count: usize) -> u64 {
        // The mask is the sequence's: every head has the same.
        let head = &self.heads[0];
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
