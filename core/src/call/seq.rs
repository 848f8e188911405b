//! Sequences, of equal lengths, packed or paged, and where the rows of each lie in memory.

use crate::args::SeqArgs;
use crate::error::{ProblemError, ensure};
use crate::layout::{KvLayout, QLayout, Totals};
use crate::problem::FwdProblem;

/// One sequence of a call: where its rows start in each tensor, and how many queries and keys it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqSpan {
    /// The sequence's index: the batch coordinate of masks, biases, descales and dropout.
    pub i_batch: u32,
    /// The batch index to address Q and O with: `i_batch`, or 0 when packed.
    pub q_batch: u32,
    /// First row in Q and O.
    pub q_row: u32,
    /// Number of the sequence's queries; its memory may have room for more rows.
    pub seqlen_q: u32,
    /// The batch index to address K and V with: `i_batch`, or 0 when packed. Paged keys lie where
    /// [`KvRows`] says.
    pub k_batch: u32,
    /// First row in K and V; 0 when paged.
    pub k_row: u32,
    /// Number of keys of the sequence, new ones included; its memory may have room for more rows.
    pub seqlen_k: u32,
    /// Number of the sequence's keys that are in the cache before the call.
    pub seqlen_cached: u32,
    /// The batch index to address k_new and v_new with: `i_batch`, or 0 when packed.
    pub new_batch: u32,
    /// First row in k_new and v_new.
    pub new_row: u32,
    /// Number of LSE rows of a head: `seqlen_q` of the problem, or the packed rows.
    pub lse_rows: u32,
}

impl SeqSpan {
    /// Index into LSE of query `i`, head `i_head`.
    #[must_use]
    pub fn lse_index(&self, problem: &FwdProblem, i_head: u32, i: u32) -> usize {
        let head = self.q_batch as usize * problem.dims.num_heads_q as usize + i_head as usize;
        head * self.lse_rows as usize + self.q_row as usize + i as usize
    }
}

/// How to treat a length that exceeds the rows that a sequence has in memory, or appended rows that do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lying {
    /// The length is clamped to the rows in memory, as kernels do (`fmha/seq.h`, `fmha/update_cache.h`).
    Clamped,
    Refused,
}

/// Reads the lengths from host memory: every sequence inside its tensor and its maximum. Like on a GPU, where the
/// host does not check lengths, a `seqused_q` or `seqused_k` above its sequence's rows counts as all rows, a
/// negative one as 0, and new rows for which the cache has no room are left out. [`checked_spans`] refuses such
/// lengths.
///
/// # Errors
/// The first offset that is missing, negative, decreasing or too large, or the first page that does not exist, with
/// its index.
pub fn spans(problem: &FwdProblem, seq: &SeqArgs<'_>) -> Result<Vec<SeqSpan>, ProblemError> {
    resolve(problem, seq, Lying::Clamped)
}

/// Spans like those of [`spans`], but every length must be valid.
///
/// # Errors
/// As [`spans`], and the first length that is negative or too large, with its index.
pub fn checked_spans(problem: &FwdProblem, seq: &SeqArgs<'_>) -> Result<Vec<SeqSpan>, ProblemError> {
    resolve(problem, seq, Lying::Refused)
}

fn resolve(problem: &FwdProblem, seq: &SeqArgs<'_>, lying: Lying) -> Result<Vec<SeqSpan>, ProblemError> {
    let dims = problem.dims;
    problem.check_totals(seq.totals)?;
    let (packed_q, packed_k) = (problem.layout.q == QLayout::Packed, problem.layout.kv == KvLayout::Packed);
    let total_q = seq.totals.total_q.unwrap_or(dims.seqlen_q);
    let total_k = seq.totals.total_k.unwrap_or(dims.seqlen_k);
    let q = Side { cu_name: "cu_seqlens_q", used_name: "seqused_q", total: total_q, longest: dims.seqlen_q };
    let k = Side { cu_name: "cu_seqlens_k", used_name: "seqused_k", total: total_k, longest: dims.seqlen_k };
    let cu_q = host_i32(q.cu_name, seq.cu_seqlens_q.as_ref(), packed_q, dims.batch as usize + 1)?;
    let cu_k = host_i32(k.cu_name, seq.cu_seqlens_k.as_ref(), packed_k, dims.batch as usize + 1)?;
    let used_q =
        host_i32(q.used_name, seq.seqused_q.as_ref(), problem.layout.seqused_q, dims.batch as usize)?;
    let used_k =
        host_i32(k.used_name, seq.seqused_k.as_ref(), problem.layout.seqused_k, dims.batch as usize)?;
    let new = NewRows::of(problem, seq)?;
    let pool = pool_keys(problem, seq.totals)?;
    let spans: Vec<SeqSpan> = (0..dims.batch)
        .map(|i_batch| {
            let (q_row, seqlen_q) = q.rows(i_batch as usize, cu_q.as_deref(), used_q.as_deref(), lying)?;
            let (k_row, mut seqlen_cached) =
                k.rows(i_batch as usize, cu_k.as_deref(), used_k.as_deref(), lying)?;
            let (new_batch, new_row, mut added) = new.rows(i_batch)?;
            let mut room = k.room(i_batch as usize, cu_k.as_deref());
            if let Some(keys) = pool {
                (seqlen_cached, room) = (keys, keys);
            }
            if lying == Lying::Clamped {
                // A pool of 0 pages holds no keys, so every length is 0.
                if problem.layout.kv.page_size().is_some() && seq.totals.num_pages == Some(0) {
                    (seqlen_cached, room) = (0, 0);
                }
                added = added.min(room.saturating_sub(seqlen_cached));
            }
            let seqlen_k = seqlen_cached + added;
            ensure!(
                seqlen_k <= room,
                "seqused_k",
                "seqused_k[{i_batch}] {seqlen_cached} and {added} new rows are more than the {room} there is room for"
            );
            let q_batch = if packed_q { 0 } else { i_batch };
            let k_batch = if packed_k { 0 } else { i_batch };
            Ok(SeqSpan {
                i_batch,
                q_batch,
                q_row,
                seqlen_q,
                k_batch,
                k_row,
                seqlen_k,
                seqlen_cached,
                new_batch,
                new_row,
                lse_rows: total_q,
            })
        })
        .collect::<Result<_, ProblemError>>()?;
    let rows = KvRows::of(problem, seq)?;
    rows.check(&spans, seq.totals)?;
    rows.check_written_once(&spans)?;
    if let Some(rotary) = problem.cache.rotary {
        check_positions(problem, &spans, rotary.max_pos)?;
    }
    Ok(spans)
}

/// Places of keys (batch index or page, and row), for code that runs on the host.
#[derive(Clone, Copy, Debug)]
pub struct KvRows<'a> {
    /// `page_size`, the block table's bytes, and its `max_pages`.
    pages: Option<(u32, &'a [u8], usize)>,
    /// `page_size`, if a sequence's keys are the rows of all pages, in the order of their addresses.
    pool: Option<u32>,
}

impl<'a> KvRows<'a> {
    /// Places for a problem whose K and V are not paged: [`SeqSpan`] has all that is needed.
    pub const UNPAGED: Self = Self { pages: None, pool: None };

    /// Places of a call's keys. The block table's entries are checked by [`spans`] and [`checked_spans`].
    ///
    /// # Errors
    /// A block table that is missing, too small, or not in host memory.
    pub fn of(problem: &FwdProblem, seq: &SeqArgs<'a>) -> Result<Self, ProblemError> {
        let Some(page_size) = problem.layout.kv.page_size() else { return Ok(Self::UNPAGED) };
        if problem.lists_addresses() {
            return Ok(Self { pages: None, pool: Some(page_size) });
        }
        let missing = || ProblemError::new("block_table", "block_table is missing: K and V are paged");
        let table = seq.block_table.ok_or_else(missing)?;
        let bytes = table.pages.as_host().ok_or_else(|| {
            ProblemError::new("block_table", "block_table is in device memory, which is not read here")
        })?;
        let wanted = u64::from(problem.dims.batch) * u64::from(table.max_pages) * 4;
        ensure!(
            bytes.len() as u64 >= wanted,
            "block_table",
            "block_table has {} bytes, but {wanted} are read",
            bytes.len()
        );
        Ok(Self { pages: Some((page_size, bytes, table.max_pages as usize)), pool: None })
    }

    /// The batch index (a page, where K and V are paged) and the row of key `j`.
    #[must_use]
    #[inline]
    pub fn at(&self, span: &SeqSpan, j: u32) -> (u32, u32) {
        match (self.pages, self.pool) {
            (None, None) => (span.k_batch, span.k_row + j),
            (None, Some(page_size)) => (j / page_size, j % page_size),
            (Some((page_size, ..)), _) => (self.entry(span, j / page_size).unsigned_abs(), j % page_size),
        }
    }

    /// Number of keys from `j` on that lie in consecutive rows.
    #[must_use]
    #[inline]
    pub fn run(&self, span: &SeqSpan, j: u32) -> u32 {
        let rest = span.seqlen_k - j;
        let page_size = self.pages.map(|(page_size, ..)| page_size).or(self.pool);
        page_size.map_or(rest, |page_size| rest.min(page_size - j % page_size))
    }

    /// An entry of the block table; −1 beyond it.
    fn entry(&self, span: &SeqSpan, i_page: u32) -> i32 {
        let Some((_, bytes, max_pages)) = self.pages else { return 0 };
        let at = (span.i_batch as usize * max_pages + i_page as usize) * 4;
        bytes.get(at..at + 4).map_or(-1, bytemuck::pod_read_unaligned)
    }

    /// Checks that no two new rows are written to one row of the cache: sequences may share pages that they read,
    /// but not pages that they write.
    fn check_written_once(&self, spans: &[SeqSpan]) -> Result<(), ProblemError> {
        if self.pages.is_none() {
            return Ok(());
        }
        let new = |span: &SeqSpan| {
            (span.seqlen_cached..span.seqlen_k).map(|j| self.at(span, j)).collect::<Vec<_>>()
        };
        let mut written: Vec<_> = spans.iter().flat_map(new).collect();
        written.sort_unstable();
        let twice = written.windows(2).find(|pair| pair[0] == pair[1]);
        match twice {
            Some(pair) => {
                let (page, row) = pair[0];
                let text = format!("block_table: 2 new keys go to row {row} of page {page}");
                Err(ProblemError::new("block_table", text))
            }
            None => Ok(()),
        }
    }

    /// Checks that every block table entry that a key needs is a page.
    fn check(&self, spans: &[SeqSpan], totals: Totals) -> Result<(), ProblemError> {
        let Some((page_size, _, max_pages)) = self.pages else { return Ok(()) };
        let num_pages = totals.num_pages.unwrap_or(0);
        for span in spans {
            let used = span.seqlen_k.div_ceil(page_size);
            ensure!(
                used as usize <= max_pages,
                "block_table",
                "block_table has max_pages {max_pages}, but sequence {} takes {used} pages of {page_size}",
                span.i_batch
            );
            for i_page in 0..used {
                let page = self.entry(span, i_page);
                ensure!(
                    u32::try_from(page).is_ok_and(|page| page < num_pages),
                    "block_table",
                    "block_table[{}][{i_page}] {page} is not in 0..{num_pages} (num_pages)",
                    span.i_batch
                );
            }
        }
        Ok(())
    }
}

/// Number of keys in all pages, if lists name keys by addresses: each sequence may then read every page. Otherwise
/// `None`.
fn pool_keys(problem: &FwdProblem, totals: Totals) -> Result<Option<u32>, ProblemError> {
    let Some(page_size) = problem.layout.kv.page_size().filter(|_| problem.lists_addresses()) else {
        return Ok(None);
    };
    let num_pages = totals.num_pages.unwrap_or(0);
    let keys = u64::from(num_pages) * u64::from(page_size);
    let most = i32::MAX.unsigned_abs();
    match u32::try_from(keys).ok().filter(|&keys| keys <= most) {
        Some(keys) => Ok(Some(keys)),
        None => {
            let text = format!("num_pages {num_pages} of page_size {page_size}: addresses end at {most}");
            Err(ProblemError::new("num_pages", text))
        }
    }
}

/// Checks that the last position of a query or of a new key is inside the rotary tables.
fn check_positions(problem: &FwdProblem, spans: &[SeqSpan], max_pos: u32) -> Result<(), ProblemError> {
    for span in spans {
        let queries = if problem.positions_advance() { span.seqlen_q } else { span.seqlen_q.min(1) };
        let end = span.seqlen_k.max(span.seqlen_cached + queries);
        let turns = queries > 0 || span.seqlen_k > span.seqlen_cached;
        ensure!(
            !turns || end <= max_pos,
            "max_pos",
            "max_pos {max_pos} is less than the {end} positions of sequence {}",
            span.i_batch
        );
    }
    Ok(())
}

/// Number of appended rows of each sequence, and their places.
struct NewRows {
    /// Offsets `cu_seqlens_new`, if new rows are packed.
    cu: Option<Vec<i32>>,
    seqlen_new: u32,
    total: u32,
}

impl NewRows {
    fn of(problem: &FwdProblem, seq: &SeqArgs<'_>) -> Result<Self, ProblemError> {
        let Some(append) = &problem.cache.append else {
            return Ok(Self { cu: None, seqlen_new: 0, total: 0 });
        };
        let packed = append.layout == QLayout::Packed;
        let count = problem.dims.batch as usize + 1;
        let cu = host_i32("cu_seqlens_new", seq.cu_seqlens_new.as_ref(), packed, count)?;
        Ok(Self {
            cu,
            seqlen_new: append.seqlen_new,
            total: seq.totals.total_new.unwrap_or(append.seqlen_new),
        })
    }

    /// The batch index, the first row and the number of new rows of a sequence.
    fn rows(&self, i_batch: u32) -> Result<(u32, u32, u32), ProblemError> {
        let side = Side {
            cu_name: "cu_seqlens_new",
            used_name: "seqlen_new",
            total: self.total,
            longest: self.seqlen_new,
        };
        let (row, count) = side.rows(i_batch as usize, self.cu.as_deref(), None, Lying::Refused)?;
        Ok((if self.cu.is_some() { 0 } else { i_batch }, row, count))
    }
}

/// One side's names and bounds.
struct Side {
    cu_name: &'static str,
    used_name: &'static str,
    total: u32,
    longest: u32,
}

impl Side {
    /// Number of rows in memory that one sequence may use. The offsets have been checked.
    fn room(&self, i: usize, cu: Option<&[i32]>) -> u32 {
        let physical = cu.map_or(self.longest, |cu| (cu[i + 1] - cu[i]).unsigned_abs());
        physical.min(self.longest)
    }

    /// First row of one sequence, and number of its rows that are in use.
    fn rows(
        &self,
        i: usize,
        cu: Option<&[i32]>,
        used: Option<&[i32]>,
        lying: Lying,
    ) -> Result<(u32, u32), ProblemError> {
        let &Side { cu_name, used_name, total, longest } = self;
        let (row, physical) = match cu {
            None => (0, longest),
            Some(cu) => {
                let (start, end) = (cu[i], cu[i + 1]);
                ensure!(start >= 0, cu_name, "{cu_name}[{i}] {start} is negative");
                ensure!(
                    end >= start,
                    cu_name,
                    "{cu_name}[{}] {end} is less than {cu_name}[{i}] {start}",
                    i + 1
                );
                let (start, end) = (start.unsigned_abs(), end.unsigned_abs());
                ensure!(
                    end <= total,
                    cu_name,
                    "{cu_name}[{}] {end} is larger than the {total} rows of the packed tensor",
                    i + 1
                );
                (start, end - start)
            }
        };
        let logical = match used {
            None => physical,
            Some(used) if lying == Lying::Clamped => used[i].max(0).unsigned_abs().min(physical).min(longest),
            Some(used) => {
                let length = used[i];
                ensure!(
                    u32::try_from(length).is_ok_and(|length| length <= physical),
                    used_name,
                    "{used_name}[{i}] {length} is not in 0..={physical}"
                );
                length.unsigned_abs()
            }
        };
        ensure!(
            logical <= longest,
            cu_name,
            "{cu_name}: sequence {i} has {logical} rows, more than the maximal length {longest}"
        );
        Ok((row, logical))
    }
}

/// `count` i32 from host memory, or `None` if the problem has no such array.
fn host_i32(
    name: &'static str,
    slice: Option<&crate::args::DevSlice<'_>>,
    wanted: bool,
    count: usize,
) -> Result<Option<Vec<i32>>, ProblemError> {
    if !wanted {
        return Ok(None);
    }
    let bytes = slice.and_then(crate::args::DevSlice::as_host);
    let Some(bytes) = bytes else {
        return Err(ProblemError::new(name, format!("{name} is missing or not in host memory")));
    };
    ensure!(
        bytes.len() >= count * 4,
        name,
        "{name} has {} bytes, but {count} i32 take {}",
        bytes.len(),
        count * 4
    );
    Ok(Some(bytes[..count * 4].chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()))
}
