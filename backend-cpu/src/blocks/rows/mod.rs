//! A block of keys against a few queries, key after key: what a short query over a long cache takes.
//!
//! Nothing is copied: rows of K and V are converted in registers as they come from memory, for up to four
//! queries at once, a *unit* of two vectors at a time. Each query's arithmetic is its own, whatever others are
//! beside it, and however a block is cut into runs of rows.

mod dots;
mod softmax;
mod tiled;
mod values;

use fmha_core::DType;

use crate::simd::{BytePlanes, Simd};
use crate::tensor::{Elem, of_type};
pub(crate) use dots::Dots;
pub(crate) use softmax::{RowSums, SoftmaxRow, exp_one};
use tiled::ROWS as TILE_KEYS;
pub(crate) use tiled::{TILED_QUERIES, TileDots, TileValues, packed_len, place_of_query, staged_len};
pub(crate) use values::AddValues;

/// Keys of a block.
pub(crate) const BLOCK_KEYS: usize = 64;

/// Bytes of the widest unit.
const UNIT_BYTES: usize = 2 * 16 * 4;

/// Elements of a unit.
pub(crate) const fn unit<S: Simd>() -> usize {
    2 * S::LANES
}

/// How a row lies for a unit's arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// f32, as they come.
    Plain,
    /// f32, in each unit the elements at even places before those at odd ones: as bf16 are widened.
    EvenOdd,
    /// f32, in each unit the even fours of elements before the odd ones: as rows of bf16 are paired.
    Fours,
    /// bf16, as they come.
    Bf16,
}

impl Order {
    /// That of results, and of operands that are f32, beside elements of `dtype`.
    pub(crate) fn beside(dtype: DType) -> Self {
        fn of<E: Elem>(_: E) -> Order {
            if E::EVEN_ODD { Order::EvenOdd } else { Order::Plain }
        }
        of_type!(dtype, elem => of(elem))
    }

    /// Where element `d` of a row of f32 is.
    pub(crate) fn place<S: Simd>(self, d: usize) -> usize {
        match self {
            Order::EvenOdd => d - d % unit::<S>() + d % 2 * S::LANES + d % unit::<S>() / 2,
            Order::Fours => d - d % unit::<S>() + d / 4 % 2 * S::LANES + d % unit::<S>() / 8 * 4 + d % 4,
            Order::Plain | Order::Bf16 => d,
        }
    }
}

/// A block of K or V: some keys of some heads, where they lie.
#[derive(Clone, Copy)]
pub(crate) struct Block<'a> {
    /// Each key's row of the first head.
    pub(crate) keys: &'a [*const u8],
    /// Bytes from head to head.
    pub(crate) head_step: isize,
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    pub(crate) dtype: DType,
    /// Of FP8 that is met as bf16: what widens each head's.
    pub(crate) codes: &'a [BytePlanes],
    /// Queries of each head: their rows follow those of the head before.
    pub(crate) queries: usize,
    /// Whether they lie in the caller's memory; else in scratch, which is in the cache.
    pub(crate) in_place: bool,
    /// The rows that are read after this block, and the bytes of each.
    pub(crate) next: (&'a [*const u8], usize),
}

/// What of a block of K the heads take in turn: it is to stay in the first-level cache.
const KEYS_WINDOW: usize = 8 << 10;

/// So of V: larger, since every head's sums of O are read and written once a window.
const VALUES_WINDOW: usize = 32 << 10;

/// Bytes of a key that are taken together, of all heads.
const KEY_BYTES: usize = 4 << 10;

/// How far ahead rows are asked for.
const AHEAD_BYTES: usize = 32 << 10;

/// Bytes of a line of the cache.
const LINE_BYTES: usize = 64;

/// Keys whose sums are taken together.
const FOUR: usize = 4;

/// How many heads of `row_bytes` a block takes.
pub(crate) fn heads_of_block(row_bytes: usize) -> usize {
    (KEY_BYTES / row_bytes).max(1)
}

/// How a product meets the elements of a block.
mod met {
    /// Converted to f32.
    pub(super) const AS_F32: u8 = 0;
    /// As pairs of bf16.
    pub(super) const IN_PAIRS: u8 = 1;
    /// As codes of FP8 that are widened to pairs of bf16 in registers.
    pub(super) const CODES_IN_PAIRS: u8 = 2;
    /// As codes of FP8 that are widened to bf16, and those to f32.
    pub(super) const CODES_AS_F32: u8 = 3;

    /// Whether elements are codes.
    pub(super) const fn are_codes(met: u8) -> bool {
        matches!(met, CODES_IN_PAIRS | CODES_AS_F32)
    }

    /// Whether they are multiplied as f32.
    pub(super) const fn are_f32(met: u8) -> bool {
        matches!(met, AS_F32 | CODES_AS_F32)
    }
}

impl<'a> Block<'a> {
    /// `work(head, first key, one past the last, rows ahead)` over windows of keys. It is to ask for as much of what is
    /// ahead as it has used up, a little at a time.
    ///
    /// Heads want rows that lie apart: sixteen tokens of eight heads are 4 KiB apart for one head, and four such
    /// streams in a page are none to a hardware prefetcher. So rows are asked for in the order of their addresses.
    /// Measured for 8 heads of 128 bf16 on an EPYC with these loops alone, beside other programs, by processor time, as
    /// parts of plain reads' speed: no prefetch 0.4 to 0.5; 16 KiB ahead and windows of 8 KiB read once before they are
    /// used 0.68, not read 0.74; windows of 32 KiB, 32 KiB ahead, asked for by 2 KiB at once 0.73, by four keys of a
    /// head 0.80; 8 KiB ahead 0.71; into the first-level cache 0.54. Of four query heads a kv head, windows of 8 KiB and
    /// 32 KiB: K 0.97 and 0.90; V 0.99 and 0.86 from memory, but 34 and 45 GB/s from the second-level cache.
    #[inline(always)]
    fn windows<S: Simd, E: Elem>(
        &self,
        _: S,
        _: E,
        (window, passes): (usize, usize),
        mut work: impl FnMut(usize, usize, usize, &mut Ahead<'a>),
    ) {
        let row_bytes = self.dim * E::BYTES;
        let mut ahead = self.rows_ahead(passes);
        let keys = (window / (self.heads * row_bytes)).max(FOUR) & !(FOUR - 1);
        let mut first = 0;
        while first < self.keys.len() {
            let last = self.keys.len().min(first + keys);
            for head in 0..self.heads {
                work(head, first, last, &mut ahead);
            }
            first = last;
        }
    }

    /// From a key's first byte to its last, of all heads.
    fn bytes_of_key(&self) -> usize {
        let row_bytes = self.dim * self.dtype.size_bytes() as usize;
        row_bytes + (self.heads - 1) * self.head_step.max(0) as usize
    }

    /// Keys that the block before asks for.
    fn keys_ahead(&self) -> usize {
        self.keys.len().min((AHEAD_BYTES / self.bytes_of_key()).max(FOUR))
    }

    /// Its first bytes, for the block before it to ask for.
    pub(crate) fn ahead(&self) -> (&'a [*const u8], usize) {
        let count = if self.in_place { self.keys_ahead() } else { 0 };
        (&self.keys[..count], self.bytes_of_key())
    }

    /// What it asks for itself.
    fn rows_ahead(&self, passes: usize) -> Ahead<'a> {
        let rows = if self.in_place { &self.keys[self.keys_ahead()..] } else { &[] };
        Ahead::new([(rows, self.bytes_of_key()), self.next], passes)
    }

    /// All its bytes, for who asks for them before.
    pub(crate) fn whole(&self) -> (&'a [*const u8], usize) {
        (if self.in_place { self.keys } else { &[] }, self.bytes_of_key())
    }

    /// The row of a key of a head.
    #[inline(always)]
    fn at(&self, key: usize, head: usize) -> *const u8 {
        self.keys[key].wrapping_offset(head as isize * self.head_step)
    }
}

/// Lines that are asked for together: a row of 128 bf16.
const RUN_LINES: usize = 4;

/// What is asked for of a tile's keys before it is another tile's turn.
const PIECE_BYTES: usize = 512;

/// Pieces of K and V of a block of keys of [`KEY_BYTES`].
const MOST_PIECES: usize = 2 * BLOCK_KEYS * KEY_BYTES / PIECE_BYTES;

/// A block of K and of V in the order that tiles want them asked for: half a kilobyte of each tile of either in turn. A prefetch holds
/// one of a core's sixteen fill buffers until memory answers, and those alone are slower than plain reads; the processor's own
/// prefetches, which go ahead within 4 KiB from where they have seen a few lines, take others. So eight pages of 4 KiB are begun
/// soon and gone on with by turns: one thread had 0.50 of plain reads in pages of 16 tokens of a head, and so 0.73, of 64/8 0.82 and 0.89.
pub(crate) struct Pieces {
    at: [*const u8; MOST_PIECES],
    count: usize,
    bytes: usize,
}

impl Pieces {
    pub(crate) const fn new() -> Self {
        Self { at: [std::ptr::null(); MOST_PIECES], count: 0, bytes: 0 }
    }

    /// Those of K's rows and V's, which are `row_bytes` long.
    pub(crate) fn of(
        &mut self,
        [keys, values]: [&[*const u8]; 2],
        row_bytes: usize,
    ) -> (&[*const u8], usize) {
        let together = (PIECE_BYTES / row_bytes).max(1);
        (self.count, self.bytes) = (0, row_bytes.min(PIECE_BYTES));
        for first in (0..TILE_KEYS).step_by(together) {
            for start in (0..row_bytes).step_by(PIECE_BYTES) {
                match (<&[_; BLOCK_KEYS]>::try_from(keys), <&[_; BLOCK_KEYS]>::try_from(values), together) {
                    (Ok(keys), Ok(values), 1) => self.turn::<1>([keys, values], first, start),
                    (Ok(keys), Ok(values), 2) => self.turn::<2>([keys, values], first, start),
                    (Ok(keys), Ok(values), 4) => self.turn::<4>([keys, values], first, start),
                    _ => {
                        for tile in keys.chunks(TILE_KEYS).chain(values.chunks(TILE_KEYS)) {
                            for &row in tile.iter().skip(first).take(together) {
                                self.add([row.wrapping_add(start)]);
                            }
                        }
                    }
                }
            }
        }
        (&self.at[..self.count], self.bytes)
    }

    /// A piece of each tile of a whole block, without a question for each row: with those 8/1 had 21.2 GB/s from the second-level
    /// cache, so 22.9.
    #[inline(always)]
    fn turn<const TOGETHER: usize>(&mut self, of: [&[*const u8; BLOCK_KEYS]; 2], first: usize, start: usize) {
        for rows in of {
            for tile in rows.as_chunks::<TILE_KEYS>().0 {
                let first = (first % TILE_KEYS) & !(TOGETHER - 1);
                let mut piece = [std::ptr::null(); TOGETHER];
                for (n, at) in piece.iter_mut().enumerate() {
                    *at = tile[first + n].wrapping_add(start);
                }
                self.add(piece);
            }
        }
    }

    /// Of keys of more bytes than a block has, for which there is no room, the rest comes unasked.
    #[inline(always)]
    fn add<const COUNT: usize>(&mut self, rows: [*const u8; COUNT]) {
        if let Some((at, _)) = self.at[self.count..].split_first_chunk_mut::<COUNT>() {
            *at = rows;
            self.count += COUNT;
        }
    }
}

/// Rows that the second-level cache is asked for, one after another, evenly over the passes that queries take over
/// each row: asked for in the first of two, eight queries a key had 7.1 GB/s of 13, as if nothing overlapped;
/// evenly 8.8.
#[derive(Clone, Copy)]
pub(crate) struct Ahead<'a> {
    /// With the bytes of each, those that come first and those after them.
    rows: [(&'a [*const u8], usize); 2],
    /// What comes next of the row that is being asked for, and how many bytes of it are left.
    at: *const u8,
    left: usize,
    /// Lines that are asked for together, and each time so many bytes have been passed over.
    run: usize,
    every: usize,
    passes: usize,
    /// Bytes passed over that nothing is asked for yet.
    owed: usize,
}

impl<'a> Ahead<'a> {
    /// `passes`: how often each row is passed over.
    pub(crate) fn new(rows: [(&'a [*const u8], usize); 2], passes: usize) -> Self {
        let at = std::ptr::null();
        let mut ahead = Self { rows, at, left: 0, run: 1, every: LINE_BYTES, passes, owed: 0 };
        ahead.measure();
        ahead
    }

    /// Bytes that are not asked for yet.
    pub(crate) fn bytes(&self) -> usize {
        self.left + self.rows.iter().map(|(rows, bytes)| rows.len() * bytes).sum::<usize>()
    }

    fn measure(&mut self) {
        self.run = self.rows[0].1.div_ceil(LINE_BYTES).clamp(1, RUN_LINES);
        self.every = self.run * LINE_BYTES * self.passes;
    }

    /// As much as `bytes` that one pass has come by.
    #[inline(always)]
    pub(crate) fn ask_for<S: Simd>(&mut self, s: S, bytes: usize) {
        self.owed += bytes;
        while self.owed >= self.every {
            self.owed -= self.every;
            if self.left == 0 && !self.begin_row() {
                return;
            }
            // What lies beyond a row's end is another's, or nobody's: to ask for it is as good as not to.
            if self.run == RUN_LINES {
                for line in 0..RUN_LINES {
                    s.prefetch(self.at.wrapping_add(line * LINE_BYTES));
                }
            } else {
                for line in 0..self.run {
                    s.prefetch(self.at.wrapping_add(line * LINE_BYTES));
                }
            }
            let asked = self.run * LINE_BYTES;
            (self.at, self.left) = (self.at.wrapping_add(asked), self.left.saturating_sub(asked));
        }
    }

    /// One line. One beside arithmetic that takes 5.9 ns costs 0.4 ns, eight beside eight times that 21: they wait for fill
    /// buffers, and so does what is loaded meanwhile (a loop in C, docs/kernels/cpu.md).
    #[inline(always)]
    pub(crate) fn ask_for_line<S: Simd>(&mut self, s: S) {
        if self.left == 0 {
            if self.rows[0].0.is_empty() {
                self.rows = [self.rows[1], (&[], 0)];
            }
            let (rows, bytes) = self.rows[0];
            let Some((&row, rest)) = rows.split_first() else { return };
            (self.rows[0].0, self.at, self.left) = (rest, row, bytes);
        }
        s.prefetch(self.at);
        (self.at, self.left) = (self.at.wrapping_add(LINE_BYTES), self.left.saturating_sub(LINE_BYTES));
    }

    /// Whether there is one.
    #[inline(always)]
    fn begin_row(&mut self) -> bool {
        if self.rows[0].0.is_empty() {
            self.rows = [self.rows[1], (&[], 0)];
            self.measure();
        }
        let (rows, bytes) = self.rows[0];
        let Some((&row, rest)) = rows.split_first() else {
            (self.every, self.owed) = (usize::MAX, 0);
            return false;
        };
        (self.rows[0].0, self.at, self.left) = (rest, row, bytes);
        true
    }
}

/// How many of `live`'s first rows a kernel takes together: four where `most` allows and they lie one after another, or two,
/// or one.
#[inline(always)]
fn taken_together(live: &[usize], most: usize) -> usize {
    let run = |count: usize| live.len() >= count && live[count - 1] == live[0] + count - 1;
    match most {
        4.. if run(4) => 4,
        2.. if run(2) => 2,
        _ => 1,
    }
}

/// In how many steps [`taken_together`] takes all of `live`.
fn steps_of(mut live: &[usize], most: usize) -> usize {
    let mut steps = 0;
    while !live.is_empty() {
        live = &live[taken_together(live, most)..];
        steps += 1;
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_follow_one_another_are_taken_by_fours_or_twos() {
        for (live, most, taken) in [
            (&[3, 4, 5, 6][..], 4, 4),
            (&[3, 4, 5, 6], 9, 4),
            (&[3, 4, 5, 6], 3, 2),
            (&[3, 4, 5, 6], 1, 1),
            (&[3, 4, 5, 7], 4, 2),
            (&[3, 4, 5, 8], 4, 2),
            (&[3, 5, 6, 8], 4, 1),
            (&[3, 4, 5], 4, 2),
            (&[3], 4, 1),
        ] {
            assert_eq!(taken_together(live, most), taken, "{live:?}, at most {most}");
        }
        for (live, most, steps) in
            [(&[][..], 4, 0), (&[0, 1, 2, 3, 4], 4, 2), (&[0, 1, 2, 3, 4], 1, 5), (&[0, 2, 3, 9], 4, 3)]
        {
            assert_eq!(steps_of(live, most), steps, "{live:?}, at most {most}");
        }
    }

    #[test]
    fn as_much_is_asked_for_as_has_been_passed_over_row_after_row_and_then_no_more() {
        let byte = 0u8;
        let (rows, next) = ([&raw const byte; 3], [&raw const byte; 2]);
        let left_after = |passes: usize, asked: &[usize]| -> Vec<usize> {
            let mut ahead = Ahead::new([(&rows, 512), (&next, 100)], passes);
            let left = asked.iter().map(|&bytes| {
                ahead.ask_for(crate::simd::Portable, bytes);
                ahead.bytes()
            });
            left.collect()
        };
        // Rows of 512 bytes by four lines, of 100 by two.
        assert_eq!(left_after(1, &[255, 1, 512, 768, 127, 129, 500]), [1736, 1480, 968, 200, 200, 100, 0]);
        assert_eq!(left_after(2, &[511, 1, 512, 2048, 256, 9999]), [1736, 1480, 1224, 200, 200, 0]);
        let mut nothing = Ahead::new([(&[], 0); 2], 1);
        nothing.ask_for(crate::simd::Portable, usize::MAX);
        assert_eq!(nothing.bytes(), 0);
    }

    #[test]
    fn a_line_at_a_time_is_asked_for_in_the_same_order_and_then_no_more() {
        let byte = 0u8;
        let (rows, next) = ([&raw const byte; 2], [&raw const byte; 1]);
        // Rows of two lines, and one of a line and a part.
        let mut ahead = Ahead::new([(&rows, 128), (&next, 100)], 1);
        let left = [(); 8].map(|()| {
            ahead.ask_for_line(crate::simd::Portable);
            ahead.bytes()
        });
        assert_eq!(left, [292, 228, 164, 100, 36, 0, 0, 0]);
    }

    #[test]
    fn pieces_are_those_of_every_tile_in_turn() {
        let at = |n: usize| n as *const u8;
        let rows =
            |from: usize, step: usize| -> Vec<*const u8> { (0..40).map(|n| at(from + n * step)).collect() };
        let mut pieces = Pieces::new();
        // Two rows of 256 bytes are a piece; 40 keys are two tiles and a half.
        let (keys, values) = (rows(0, 256), rows(1 << 20, 256));
        let (order, bytes) = pieces.of([&keys, &values], 256);
        assert_eq!((order.len(), bytes), (80, 256));
        let firsts: Vec<usize> = order[..14].iter().map(|&at| at as usize).collect();
        let v = 1 << 20;
        let turn = |from: usize| [0, 256, 4096, 4352, 8192, 8448].map(|at| from + at);
        assert_eq!(firsts, [&turn(0)[..], &turn(v), &[512, 768]].concat());
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        assert_eq!(sorted, [keys, values].concat());
        // A row of 1280 bytes is three pieces.
        let (keys, values) = (rows(0, 1280), rows(1 << 20, 1280));
        let (order, bytes) = pieces.of([&keys[..1], &values[..1]], 1280);
        let order: Vec<usize> = order.iter().map(|&at| at as usize).collect();
        assert_eq!((order, bytes), (vec![0, v, 512, v + 512, 1024, v + 1024], 512));
        // Rows of more bytes than a block takes: not more than there is room for.
        assert_eq!(pieces.of([&[at(0); 64], &[at(0); 64]], KEY_BYTES + 1).0.len(), MOST_PIECES);
    }

    #[test]
    fn a_block_takes_the_heads_of_four_kilobytes_and_one_at_least() {
        assert_eq!([256, 1000, 4096, 4097, 100_000].map(heads_of_block), [16, 4, 1, 1, 1]);
    }
}
