//! Prefetch of rows from memory, ahead of the products that read them.

use super::{BLOCK_KEYS, KEY_BYTES, TILE_KEYS};
use crate::simd::Simd;

/// Bytes of a line of the cache.
const LINE_BYTES: usize = 64;

/// Lines that are prefetched together: a row of 128 bf16.
const RUN_LINES: usize = 4;

/// Bytes of a tile's keys that are prefetched before those of another tile.
const PIECE_BYTES: usize = 512;

/// Size of the aligned range within which the processor's own prefetcher works.
const PAGE_BYTES: usize = 4 << 10;

/// Bytes of a tile that [`Ahead::lines`] prefetches before those of another tile: two lines.
const TURN_BYTES: usize = 2 * LINE_BYTES;

/// Pieces of K and V of a block of keys of [`KEY_BYTES`].
const MOST_PIECES: usize = 2 * BLOCK_KEYS * KEY_BYTES / PIECE_BYTES;

/// The rows of a block of K and of V in the order of their prefetch: half a kilobyte of each tile of K and of V in
/// rotation. A prefetch holds one of a core's sixteen fill buffers until memory answers, and prefetches alone are
/// slower than plain reads. The processor's own prefetches, which run ahead within 4 KiB after a few lines, use
/// other buffers. So eight pages of 4 KiB are started early and continued in rotation. In pages of 16 tokens of a
/// head, one thread reaches 0.73 of the speed of plain reads instead of 0.50, and on 64/8 heads 0.89 instead of
/// 0.82.
pub(crate) struct Pieces {
    at: [*const u8; MOST_PIECES],
    count: usize,
    bytes: usize,
}

impl Pieces {
    pub(crate) const fn new() -> Self {
        Self { at: [std::ptr::null(); MOST_PIECES], count: 0, bytes: 0 }
    }

    /// Makes pieces of the rows of K and V, which have `row_bytes` bytes.
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

    /// Adds a piece of each tile of a whole block, without a branch per row, which raises the speed from the L2
    /// cache from 21.2 to 22.9 GB/s (8/1 heads).
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

    /// Adds rows to prefetch. Rows beyond the capacity of the list are dropped: keys with more bytes than a
    /// block are not prefetched to their end.
    #[inline(always)]
    fn add<const COUNT: usize>(&mut self, rows: [*const u8; COUNT]) {
        if let Some((at, _)) = self.at[self.count..].split_first_chunk_mut::<COUNT>() {
            *at = rows;
            self.count += COUNT;
        }
    }
}

/// Rows to prefetch into the L2 cache, spread evenly over the passes that the queries make over each row. With all
/// prefetches in the first of two passes (eight queries per key) loads do not overlap: 7.1 GB/s instead of 8.8,
/// where memory gives 13.
#[derive(Clone, Copy)]
pub(crate) struct Ahead<'a> {
    /// Rows that come first and rows after them, each with the bytes of a row.
    rows: [(&'a [*const u8], usize); 2],
    /// Next address to prefetch in the present row, and the bytes left in that row.
    at: *const u8,
    left: usize,
    /// Lines that are prefetched together, and the bytes processed between two prefetches.
    run: usize,
    every: usize,
    passes: usize,
    /// Bytes that were processed and for which no prefetch was issued yet.
    owed: usize,
    /// K and V of a whole block, if [`lines`](Self::lines) issues all prefetches, and the number of its calls so
    /// far.
    turns: Option<[&'a [*const u8; BLOCK_KEYS]; 2]>,
    calls: usize,
}

impl<'a> Ahead<'a> {
    /// `passes`: number of passes over each row.
    pub(crate) fn new(rows: [(&'a [*const u8], usize); 2], passes: usize) -> Self {
        let at = std::ptr::null();
        let mut ahead =
            Self { rows, at, left: 0, run: 1, every: LINE_BYTES, passes, owed: 0, turns: None, calls: 0 };
        ahead.measure();
        ahead
    }

    /// Prefetches K and V of a whole block by [`lines`](Self::lines), two lines of each tile in rotation.
    /// Contiguous tiles of less than 4 KiB count as one tile. `None` if a row's bytes are no power of two, or too
    /// few for one rotation.
    pub(crate) fn by_turns([keys, values]: [&'a [*const u8]; 2], row_bytes: usize) -> Option<Self> {
        if !(row_bytes.is_power_of_two() && row_bytes >= LINE_BYTES) {
            return None;
        }
        let turns: [&[_; BLOCK_KEYS]; 2] = [keys.try_into().ok()?, values.try_into().ok()?];
        let follow = |tiles: usize| {
            let last = TILE_KEYS * tiles - 1;
            let mut all = turns.iter().flat_map(|rows| rows.chunks(TILE_KEYS * tiles));
            all.all(|rows| rows[last] == rows[0].wrapping_add(last * row_bytes))
        };
        let run = match PAGE_BYTES / (TILE_KEYS * row_bytes) {
            4.. if follow(4) => 4,
            2.. if follow(2) => 2,
            _ if row_bytes >= TURN_BYTES => 1,
            _ => return None,
        };
        Some(Self { turns: Some(turns), every: row_bytes, run, ..Self::new([(&[], 0); 2], 1) })
    }

    /// Number of bytes for which no prefetch has been issued yet.
    pub(crate) fn bytes(&self) -> usize {
        self.left + self.rows.iter().map(|(rows, bytes)| rows.len() * bytes).sum::<usize>()
    }

    fn measure(&mut self) {
        self.run = self.rows[0].1.div_ceil(LINE_BYTES).clamp(1, RUN_LINES);
        self.every = self.run * LINE_BYTES * self.passes;
    }

    /// Prefetches `bytes`, the number of bytes that one pass has read.
    #[inline(always)]
    pub(crate) fn ask_for<S: Simd>(&mut self, s: S, bytes: usize) {
        self.owed += bytes;
        while self.owed >= self.every {
            self.owed -= self.every;
            if self.left == 0 && !self.begin_row() {
                return;
            }
            // A prefetch beyond the end of a row does no harm, but has no use.
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

    /// Prefetches one line. Besides arithmetic of 5.9 ns it costs 0.4 ns; eight prefetches at once, besides eight
    /// times that arithmetic, cost 21 ns, because they and the loads wait for fill buffers (a loop in C,
    /// docs/kernels/cpu.md).
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

    /// The next lines to prefetch, as many as a tile has rows, for a caller that prefetches one for each row. After
    /// the end the last line is returned again, which costs nothing.
    #[inline(always)]
    pub(super) fn lines(&mut self) -> [*const u8; TILE_KEYS] {
        let Some(tensors) = self.turns else { return self.lines_one_by_one() };
        let mut lines = [self.at; TILE_KEYS];
        // Bytes of each tile that were already prefetched.
        let done = self.calls * TURN_BYTES;
        if done >= TILE_KEYS * self.every {
            return lines;
        }
        macro_rules! of_streams {
            ($lines:literal) => {{
                let rows = tensors.iter().flat_map(|rows| rows.iter().step_by(TILE_KEYS * $lines / 2));
                for (lines, row) in lines.as_chunks_mut::<$lines>().0.iter_mut().zip(rows) {
                    for (n, line) in lines.iter_mut().enumerate() {
                        *line = row.wrapping_add(done * $lines / 2 + n * LINE_BYTES);
                    }
                }
            }};
        }
        match self.run {
            1 => {
                let tiles = tensors.iter().flat_map(|rows| rows.as_chunks::<TILE_KEYS>().0);
                let row = done >> self.every.trailing_zeros();
                let start = done & (self.every - 1);
                for (lines, tile) in lines.as_chunks_mut::<2>().0.iter_mut().zip(tiles) {
                    *lines = [start, start + LINE_BYTES].map(|start| tile[row].wrapping_add(start));
                }
            }
            2 => of_streams!(4),
            _ => of_streams!(8),
        }
        (self.calls, self.at) = (self.calls + 1, lines[TILE_KEYS - 1]);
        lines
    }

    #[inline(never)]
    fn lines_one_by_one(&mut self) -> [*const u8; TILE_KEYS] {
        let mut lines = [self.at; TILE_KEYS];
        for line in &mut lines {
            if self.left == 0 && !self.begin_row() {
                break;
            }
            *line = self.at;
            (self.at, self.left) = (self.at.wrapping_add(LINE_BYTES), self.left.saturating_sub(LINE_BYTES));
        }
        lines
    }

    /// Moves to the next row to prefetch; false if there is none.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable;

    #[test]
    fn as_much_is_asked_for_as_has_been_passed_over_row_after_row_and_then_no_more() {
        let byte = 0u8;
        let (rows, next) = ([&raw const byte; 3], [&raw const byte; 2]);
        let left_after = |passes: usize, asked: &[usize]| -> Vec<usize> {
            let mut ahead = Ahead::new([(&rows, 512), (&next, 100)], passes);
            let left = asked.iter().map(|&bytes| {
                ahead.ask_for(Portable, bytes);
                ahead.bytes()
            });
            left.collect()
        };
        // Rows of 512 bytes are prefetched by four lines, rows of 100 by two.
        assert_eq!(left_after(1, &[255, 1, 512, 768, 127, 129, 500]), [1736, 1480, 968, 200, 200, 100, 0]);
        assert_eq!(left_after(2, &[511, 1, 512, 2048, 256, 9999]), [1736, 1480, 1224, 200, 200, 0]);
        let mut nothing = Ahead::new([(&[], 0); 2], 1);
        nothing.ask_for(Portable, usize::MAX);
        assert_eq!(nothing.bytes(), 0);
    }

    #[test]
    fn a_line_at_a_time_is_asked_for_in_the_same_order_and_then_no_more() {
        let byte = 0u8;
        let (rows, next) = ([&raw const byte; 2], [&raw const byte; 1]);
        // Rows of two lines, and one row of a line and a fraction.
        let mut ahead = Ahead::new([(&rows, 128), (&next, 100)], 1);
        let left = [(); 8].map(|()| {
            ahead.ask_for_line(Portable);
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
        // Rows with more bytes than a block: the list stops at its capacity.
        assert_eq!(pieces.of([&[at(0); 64], &[at(0); 64]], KEY_BYTES + 1).0.len(), MOST_PIECES);
    }
    /// Lines for prefetch are every line of a block exactly once, for tiles that lie apart, follow one another in
    /// pairs, or are all contiguous.
    #[test]
    fn lines_beside_rows_are_those_of_every_tile_in_turn() {
        let at = |n: usize| n as *const u8;
        let in_tiles = |row_bytes: usize, step: usize| -> Vec<*const u8> {
            (0..BLOCK_KEYS).map(|n| at(1 + n / TILE_KEYS * step + n % TILE_KEYS * row_bytes)).collect()
        };
        for (row_bytes, step, first) in [
            (128, 1 << 16, vec![(0, 2), (1 << 16, 2), (2 << 16, 2)]),
            (128, 2048, vec![(0, 4), (4096, 4)]),
            (64, 1024, vec![(0, 8)]),
            (1024, 16384, vec![(0, 2), (16384, 2), (32768, 2), (49152, 2)]),
        ] {
            let keys = in_tiles(row_bytes, step);
            let values: Vec<*const u8> = keys.iter().map(|key| key.wrapping_add(1 << 20)).collect();
            let mut ahead = Ahead::by_turns([&keys, &values], row_bytes).unwrap();
            let calls = 2 * BLOCK_KEYS * row_bytes / LINE_BYTES / TILE_KEYS;
            let asked: Vec<*const u8> = (0..calls).flat_map(|_| ahead.lines()).collect();
            let wanted =
                first.iter().flat_map(|&(from, count)| (0..count).map(move |n| 1 + from + n * LINE_BYTES));
            assert!(asked.iter().map(|&line| line as usize).zip(wanted).all(|(line, wanted)| line == wanted));
            let of_row =
                |&row: &*const u8| (0..row_bytes).step_by(LINE_BYTES).map(move |n| row.wrapping_add(n));
            let mut all: Vec<*const u8> = keys.iter().chain(&values).flat_map(of_row).collect();
            let mut sorted = asked.clone();
            all.sort_unstable();
            sorted.sort_unstable();
            assert_eq!(sorted, all, "rows of {row_bytes}, tiles {step} apart");
            assert_eq!(ahead.lines(), [asked[asked.len() - 1]; TILE_KEYS]);
        }
        // Other row lengths, some with half lines or half a rotation in separate tiles, and an incomplete block.
        for (row_bytes, step) in [(96, 2048), (64, 2048), (32, 512)] {
            let keys = in_tiles(row_bytes, step);
            assert!(Ahead::by_turns([&keys, &keys], row_bytes).is_none());
        }
        let keys = in_tiles(128, 2048);
        assert!(Ahead::by_turns([&keys, &keys[..63]], 128).is_none());
        // Row after row, without rotation.
        let mut ahead = Ahead::new([(&keys[..3], 128), (&keys[8..9], 100)], 1);
        let lines = ahead.lines();
        let mut wanted: Vec<*const u8> =
            keys[..3].iter().chain(&keys[8..9]).flat_map(|key| [*key, key.wrapping_add(64)]).collect();
        wanted.resize(TILE_KEYS, wanted[wanted.len() - 1]);
        assert_eq!(lines[..8], wanted[..8]);
    }
}
