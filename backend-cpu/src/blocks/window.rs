//! Blocks of K and V where they lie, and the order that they are read in.

use fmha_core::DType;

use crate::simd::Simd;
use crate::tensor::Elem;

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
    /// Queries of each head: their rows follow those of the head before.
    pub(crate) queries: usize,
    /// Whether hardware would not see one stream in it: rows of several heads, or of pages, in the caller's memory.
    pub(crate) is_scattered: bool,
    /// The rows that are read after this block, and the bytes of each.
    pub(crate) next: (&'a [*const u8], usize),
}

/// What of a block is read in the order of its addresses before it is computed with.
const WINDOW_BYTES: usize = 8 << 10;

/// How far ahead of that the second-level cache is asked for it.
const AHEAD_BYTES: usize = 16 << 10;

/// Keys whose sums are taken together.
pub(super) const FOUR: usize = 4;

/// How many heads of `row_bytes` a block takes: four keys of them are two windows at most.
pub(crate) fn heads_of_block(row_bytes: usize) -> usize {
    (2 * WINDOW_BYTES / (FOUR * row_bytes)).max(1)
}

impl<'a> Block<'a> {
    /// `work(head, first key, one past the last)` over windows of keys, each of which has been read once in the order
    /// of its addresses.
    ///
    /// Heads want rows that lie apart: sixteen tokens of eight heads are 4 KiB apart for one head, and four such
    /// streams in a page are none to a hardware prefetcher. Measured for 8 heads of 128 bf16 (EPYC, by processor
    /// time, GB/s): head by head 4 to 5; blocks of all heads, 64 keys head by head, with software prefetch 16; windows
    /// of 8 KiB 14; windows with software prefetch 16 KiB ahead 20; plain reads 20.
    #[inline(always)]
    pub(super) fn windows<S: Simd, E: Elem>(&self, s: S, _: E, mut work: impl FnMut(usize, usize, usize)) {
        if !self.is_scattered {
            // Not `for_each`: what it calls is compiled without these instructions.
            for head in 0..self.heads {
                work(head, 0, self.keys.len());
            }
            return;
        }
        let row_bytes = self.dim * E::BYTES;
        let side_by_side = self.head_step == row_bytes as isize;
        let (pieces, piece_bytes) =
            if side_by_side { (1, self.heads * row_bytes) } else { (self.heads, row_bytes) };
        let keys = (WINDOW_BYTES / (self.heads * row_bytes)).max(FOUR) & !(FOUR - 1);
        let bytes = self.bytes_of_key(row_bytes);
        let skipped = self.keys.len().min(keys_ahead(bytes));
        let mut ahead = Ahead { rows: &self.keys[skipped..], bytes, next: self.next, done: 0 };
        let mut first = 0;
        while first < self.keys.len() {
            let last = self.keys.len().min(first + keys);
            for &key in &self.keys[first..last] {
                for piece in 0..pieces {
                    let piece = key.wrapping_offset(piece as isize * self.head_step);
                    for at in (0..piece_bytes).step_by(64) {
                        // SAFETY: a byte of a row of the block. Volatile: the read itself is wanted.
                        unsafe { piece.add(at).read_volatile() };
                    }
                }
            }
            for head in 0..self.heads {
                ahead.ask_for(s, (last - first) * row_bytes);
                work(head, first, last);
            }
            first = last;
        }
    }

    /// From a key's first byte to its last, of all heads.
    fn bytes_of_key(&self, row_bytes: usize) -> usize {
        row_bytes + (self.heads - 1) * self.head_step.max(0) as usize
    }

    /// Its first [`AHEAD_BYTES`], for the block before it to ask for.
    pub(crate) fn ahead(&self) -> (&'a [*const u8], usize) {
        let bytes = self.bytes_of_key(self.dim * self.dtype.size_bytes() as usize);
        let count = if self.is_scattered { self.keys.len().min(keys_ahead(bytes)) } else { 0 };
        (&self.keys[..count], bytes)
    }

    /// The row of a key of a head.
    #[inline(always)]
    pub(super) fn at(&self, key: usize, head: usize) -> *const u8 {
        self.keys[key].wrapping_offset(head as isize * self.head_step)
    }
}

/// Keys of [`AHEAD_BYTES`].
fn keys_ahead(bytes_of_key: usize) -> usize {
    (AHEAD_BYTES / bytes_of_key).max(FOUR)
}

/// Rows that the second-level cache is asked for, one after another.
struct Ahead<'a> {
    rows: &'a [*const u8],
    bytes: usize,
    /// Those after them.
    next: (&'a [*const u8], usize),
    /// Of the first row.
    done: usize,
}

impl Ahead<'_> {
    #[inline(always)]
    fn ask_for<S: Simd>(&mut self, s: S, bytes: usize) {
        let mut left = bytes;
        while left > 0 {
            let Some((&row, rest)) = self.rows.split_first() else {
                if self.next.0.is_empty() {
                    return;
                }
                (self.rows, self.bytes) = std::mem::take(&mut self.next);
                continue;
            };
            let taken = left.min(self.bytes - self.done);
            let mut at = 0;
            while at < taken {
                s.prefetch(row.wrapping_add(self.done + at));
                at += 64;
            }
            (self.done, left) = (self.done + taken, left - taken);
            if self.done == self.bytes {
                (self.rows, self.done) = (rest, 0);
            }
        }
    }
}
