//! Which rows of a task see a block of keys.

use fmha_core::BlockClass;

use super::MAX_ROWS;
use super::chunk::Rows;
use crate::blocks::BLOCK_KEYS;

/// Rows of a kv head that see a block.
pub(super) struct Seen {
    live: [usize; MAX_ROWS],
    num_live: usize,
    whole: [usize; MAX_ROWS],
    num_whole: usize,
    /// Rows that see a part of the block, with a bit for each key.
    partial: [(usize, u64); MAX_ROWS],
    num_partial: usize,
}

impl Seen {
    pub(super) const NOTHING: Self = Self {
        live: [0; MAX_ROWS],
        num_live: 0,
        whole: [0; MAX_ROWS],
        num_whole: 0,
        partial: [(0, 0); MAX_ROWS],
        num_partial: 0,
    };

    pub(super) fn live(&self) -> &[usize] {
        &self.live[..self.num_live]
    }

    pub(super) fn whole(&self) -> &[usize] {
        &self.whole[..self.num_whole]
    }

    pub(super) fn partial(&self) -> &[(usize, u64)] {
        &self.partial[..self.num_partial]
    }

    /// A block every key of which is visible to `rows` rows.
    pub(super) fn by_all(rows: usize) -> Self {
        let mut all = Self { num_live: rows, num_whole: rows, ..Self::NOTHING };
        for (row, (live, whole)) in all.live.iter_mut().zip(&mut all.whole).enumerate().take(rows) {
            (*live, *whole) = (row, row);
        }
        all
    }
}

impl Rows<'_> {
    /// Whether any row sees one of the keys `j .. j + count`.
    pub(super) fn some_see(&self, j: u32, count: usize) -> bool {
        self.of.iter().any(|&(i, _)| self.seen(i, j, count) != 0)
    }

    /// Visibility of the keys `j .. j + count` by row: the known result if all rows see all keys, otherwise
    /// computed into `seen`.
    pub(super) fn who_sees<'s>(&'s self, j: u32, count: usize, seen: &'s mut Seen) -> &'s Seen {
        let queries = self.of.first().map_or(0, |&(i, _)| i)..self.of.last().map_or(0, |&(i, _)| i + 1);
        if self.tree.is_none()
            && self.heads[0].band.block_class(queries, j..j + count as u32) == BlockClass::Inside
        {
            return &self.all;
        }
        (seen.num_live, seen.num_whole, seen.num_partial) = (0, 0, 0);
        // Rows of one query are consecutive, and see the same keys.
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

    /// Keys of `j .. j + count` that query `i` sees: a bit for each.
    fn seen(&self, i: u32, j: u32, count: usize) -> u64 {
        // The mask belongs to the sequence, so any head gives it.
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
