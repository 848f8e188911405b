//! Products of a block of keys and a few queries, key after key, for a short query over a long cache.
//!
//! Nothing is copied. Rows of K and V are converted in registers as they arrive from memory, for up to four
//! queries at once, one *unit* of two vectors at a time. The arithmetic of a query does not depend on the
//! other queries, nor on how a block is cut into runs of rows.

mod ahead;
mod dots;
mod softmax;
mod tiled;
mod values;

use fmha_core::DType;

use crate::simd::{BytePlanes, Simd};
use crate::tensor::{Elem, of_type};
pub(crate) use ahead::{Ahead, Pieces};
pub(crate) use dots::Dots;
pub(crate) use softmax::{RowSums, SoftmaxRow, SoftmaxRows, exp_one};
use tiled::ROWS as TILE_KEYS;
pub(crate) use tiled::{TILED_QUERIES, TileDots, TileValues, packed_len, place_of_query, staged_len};
pub(crate) use values::AddValues;

/// Keys of a block.
pub(crate) const BLOCK_KEYS: usize = 64;

/// Bytes of the widest unit.
const UNIT_BYTES: usize = 2 * 16 * 4;

/// Number of f32 elements of a unit, the piece of a row that is multiplied at once.
pub(crate) const fn unit<S: Simd>() -> usize {
    2 * S::LANES
}

/// Order of a row's elements within a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// f32 in their own order.
    Plain,
    /// f32; in each unit the elements at even places come before those at odd places, as in bf16 that is converted
    /// to f32.
    EvenOdd,
    /// f32; in each unit the even groups of four elements come before the odd groups, as paired rows of bf16
    /// do.
    Fours,
    /// bf16 in their own order.
    Bf16,
}

impl Order {
    /// Order of f32 results and of f32 operands of a product with rows of `dtype`.
    pub(crate) fn beside(dtype: DType) -> Self {
        fn of<E: Elem>(_: E) -> Order {
            if E::EVEN_ODD { Order::EvenOdd } else { Order::Plain }
        }
        of_type!(dtype, elem => of(elem))
    }

    /// Index of element `d` in a row of f32.
    pub(crate) fn place<S: Simd>(self, d: usize) -> usize {
        match self {
            Order::EvenOdd => d - d % unit::<S>() + d % 2 * S::LANES + d % unit::<S>() / 2,
            Order::Fours => d - d % unit::<S>() + d / 4 % 2 * S::LANES + d % unit::<S>() / 8 * 4 + d % 4,
            Order::Plain | Order::Bf16 => d,
        }
    }
}

/// A block of K or V: some keys of some heads, with the addresses of their rows.
#[derive(Clone, Copy)]
pub(crate) struct Block<'a> {
    /// Each key's row of the first head.
    pub(crate) keys: &'a [*const u8],
    /// Bytes from head to head.
    pub(crate) head_step: isize,
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    pub(crate) dtype: DType,
    /// Tables that convert FP8 codes to bf16, one for each head; empty for other types.
    pub(crate) codes: &'a [BytePlanes],
    /// Queries of each head. The rows of one head follow those of the head before.
    pub(crate) queries: usize,
    /// Whether the rows lie in the caller's memory. Otherwise they lie in scratch, which is in the cache.
    pub(crate) in_place: bool,
    /// Rows that are read after this block, and the bytes of each.
    pub(crate) next: (&'a [*const u8], usize),
}

/// Bytes of a block of K that all heads go through before the next bytes: they stay in the L1 cache.
const KEYS_WINDOW: usize = 8 << 10;

/// Bytes of a block of V that all heads go through before the next bytes. It is larger than [`KEYS_WINDOW`],
/// because every head's sums of O are read and written once per window.
const VALUES_WINDOW: usize = 32 << 10;

/// Bytes of a key, over all heads, that are processed together.
const KEY_BYTES: usize = 4 << 10;

/// Distance of the prefetch, in bytes.
const AHEAD_BYTES: usize = 32 << 10;

/// Number of keys whose dot products are reduced together.
const FOUR: usize = 4;

/// Number of heads of `row_bytes` in a block.
pub(crate) fn heads_of_block(row_bytes: usize) -> usize {
    (KEY_BYTES / row_bytes).max(1)
}

/// Ways in which a product reads the elements of a block.
mod met {
    /// Converted to f32.
    pub(super) const AS_F32: u8 = 0;
    /// Pairs of bf16.
    pub(super) const IN_PAIRS: u8 = 1;
    /// FP8 codes, converted to pairs of bf16 in registers.
    pub(super) const CODES_IN_PAIRS: u8 = 2;
    /// FP8 codes, converted to bf16 and then to f32.
    pub(super) const CODES_AS_F32: u8 = 3;

    /// Whether elements are codes.
    pub(super) const fn are_codes(met: u8) -> bool {
        matches!(met, CODES_IN_PAIRS | CODES_AS_F32)
    }

    /// Whether elements read in this way are multiplied as f32.
    pub(super) const fn are_f32(met: u8) -> bool {
        matches!(met, AS_F32 | CODES_AS_F32)
    }
}

impl<'a> Block<'a> {
    /// Calls `work(head, first key, one past the last, rows ahead)` for windows of keys. `work` must prefetch as
    /// many bytes of the rows ahead as it has read, a little at a time.
    ///
    /// A head's rows do not lie next to each other: sixteen tokens of eight heads are 4 KiB apart for one head, and
    /// a hardware prefetcher does not follow four such streams in a page. So rows are prefetched in the order of
    /// their addresses. Measured for 8 heads of 128 bf16 on an EPYC with these loops alone, by processor time, as a
    /// share of the speed of plain reads: no prefetch 0.4 to 0.5; 16 KiB ahead with windows of 8 KiB, read once
    /// before use 0.68, not read 0.74; windows of 32 KiB and 32 KiB ahead, prefetched by 2 KiB at once 0.73, by
    /// four keys of a head 0.80; 8 KiB ahead 0.71; into the L1 cache 0.54. With four query heads per kv head,
    /// windows of 8 KiB and 32 KiB give 0.97 and 0.90 for K, and 0.99 and 0.86 for V from memory, but 34 and 45
    /// GB/s for V from the L2 cache.
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

    /// Bytes from a key's first byte to its last, over all heads.
    fn bytes_of_key(&self) -> usize {
        let row_bytes = self.dim * self.dtype.size_bytes() as usize;
        row_bytes + (self.heads - 1) * self.head_step.max(0) as usize
    }

    /// Number of keys that are prefetched during the block before.
    fn keys_ahead(&self) -> usize {
        self.keys.len().min((AHEAD_BYTES / self.bytes_of_key()).max(FOUR))
    }

    /// First bytes of the block, which are prefetched during the block before.
    pub(crate) fn ahead(&self) -> (&'a [*const u8], usize) {
        let count = if self.in_place { self.keys_ahead() } else { 0 };
        (&self.keys[..count], self.bytes_of_key())
    }

    /// Rows that are prefetched during this block, over `passes` passes.
    fn rows_ahead(&self, passes: usize) -> Ahead<'a> {
        let rows = if self.in_place { &self.keys[self.keys_ahead()..] } else { &[] };
        Ahead::new([(rows, self.bytes_of_key()), self.next], passes)
    }

    /// All bytes of the block, for a caller that prefetches all of it.
    pub(crate) fn whole(&self) -> (&'a [*const u8], usize) {
        (if self.in_place { self.keys } else { &[] }, self.bytes_of_key())
    }

    /// The row of a key of a head.
    #[inline(always)]
    fn at(&self, key: usize, head: usize) -> *const u8 {
        self.keys[key].wrapping_offset(head as isize * self.head_step)
    }
}

/// How many of `live`'s first rows a kernel processes together: four if `most` allows and they are consecutive,
/// otherwise two or one.
#[inline(always)]
fn taken_together(live: &[usize], most: usize) -> usize {
    let run = |count: usize| live.len() >= count && live[count - 1] == live[0] + count - 1;
    match most {
        4.. if run(4) => 4,
        2.. if run(2) => 2,
        _ => 1,
    }
}

/// Number of steps in which [`taken_together`] goes through `live`.
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
    fn a_block_takes_the_heads_of_four_kilobytes_and_one_at_least() {
        assert_eq!([256, 1000, 4096, 4097, 100_000].map(heads_of_block), [16, 4, 1, 1, 1]);
    }
}
