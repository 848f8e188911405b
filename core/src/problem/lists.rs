//! Lists of keys: the keys that a query sees are listed one by one.

use super::{FwdProblem, MAX_SEQLEN, check_input, check_unit_stride};
use crate::dtype::DType;
use crate::error::{ProblemError, Refusal, ensure};
use crate::layout::{KvLayout, QLayout, Shape, Strides, Totals};
use crate::score::Bias;

/// Meaning of a list's entries. An entry outside the range that the meaning allows is absent: it names no
/// key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ListEntries {
    /// A key's position in its sequence. An entry that is negative, or not below the length, is absent.
    Positions,
    /// A key's place in the pages of the call, `page * page_size + offset`; there is no block table. An entry that
    /// is negative, or not below `num_pages * page_size`, is absent. An address has no position, so options that
    /// need positions are refused.
    Addresses,
    /// A run of keys: entry `e` stands for positions from `e * size` up to `(e + 1) * size` or the length. An entry
    /// that is negative, or whose first position is not below the length, is absent.
    Blocks {
        /// Number of keys of a block, at least 1.
        size: u32,
    },
}

/// Unit of `topk_length`, i32; entries past that count are never read. A number below 0 counts as 0, one above
/// `topk` as `topk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ListLength {
    /// Every list has `topk` entries; there is no `topk_length`.
    Whole,
    /// Each sequence has one number, `[batch]`, for all its lists.
    Sequence,
    /// Each token has one number, `[batch, seqlen_q]`, packed `[total_q]`, for all its lists.
    Token,
}

/// A list of keys for each query token and kv head, in place of all keys: `indices`, i32 `[batch, seqlen_q,
/// num_heads_kv, topk]`, packed `[total_q, num_heads_kv, topk]`, read where the kernel runs.
///
/// A list is a multiset: a key that is listed twice counts twice. Band, bias, `ALiBi`, functions and dropout use a
/// key's position; a query that lists no visible key is an empty row.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct KeyLists {
    /// Number of entries of each list; 0 makes every row empty.
    pub topk: u32,
    /// Meaning of the entries.
    pub entries: ListEntries,
    /// Tensor that says how many entries of a list are in use.
    pub length: ListLength,
    /// Strides of `indices`: from sequence to sequence, token to token, kv head to kv head, and 1 from entry to entry.
    pub strides: Strides,
    /// Whether LSE leaves out the sink, if there is one.
    pub lse_without_sink: bool,
}

impl KeyLists {
    /// Lists of `topk` positions for this problem, contiguous, all of their entries in use.
    #[must_use]
    pub fn new(problem: &FwdProblem, topk: u32) -> Self {
        let unset = Strides { batch: 0, seq: 0, head: 0, dim: 1 };
        let (entries, length) = (ListEntries::Positions, ListLength::Whole);
        let mut lists = Self { topk, entries, length, strides: unset, lse_without_sink: false };
        let total_q = Some(problem.dims.seqlen_q);
        lists.strides = Strides::bshd(lists.shape(problem, Totals { total_q, ..Totals::NONE }));
        lists
    }

    crate::setters::setters! {
        /// Meaning of the entries.
        entries: ListEntries => entries;
        /// Tensor that says how many entries of a list are in use.
        length: ListLength => length;
        /// Strides of `indices`.
        strides: Strides => strides;
        /// Whether LSE leaves out the sink.
        lse_without_sink: bool => lse_without_sink;
    }

    /// Shape of `indices`; for packed queries `batch` is 1 and `seq` is `total_q`.
    #[must_use]
    pub fn shape(&self, problem: &FwdProblem, totals: Totals) -> Shape {
        let dims = problem.dims;
        let (batch, seq) = match problem.layout.q {
            QLayout::Batch => (dims.batch, dims.seqlen_q),
            QLayout::Packed => (1, totals.total_q.unwrap_or(0)),
        };
        Shape { batch, seq, head: dims.num_heads_kv, dim: self.topk }
    }

    /// Number of elements of `topk_length`.
    #[must_use]
    pub fn length_elems(&self, problem: &FwdProblem, totals: Totals) -> u64 {
        let shape = self.shape(problem, totals);
        match self.length {
            ListLength::Whole => 0,
            ListLength::Sequence => problem.dims.batch.into(),
            ListLength::Token => u64::from(shape.batch) * u64::from(shape.seq),
        }
    }

    /// Number of keys that the longest list may name, duplicates included.
    #[must_use]
    pub fn most_keys(&self) -> u64 {
        match self.entries {
            ListEntries::Positions | ListEntries::Addresses => self.topk.into(),
            ListEntries::Blocks { size } => u64::from(self.topk) * u64::from(size),
        }
    }
}

impl FwdProblem {
    /// Whether entries of lists are addresses, so that a call has no block table.
    #[must_use]
    pub fn lists_addresses(&self) -> bool {
        self.lists.is_some_and(|lists| lists.entries == ListEntries::Addresses)
    }

    /// Checks lists of keys.
    ///
    /// # Errors
    /// The name of a field that cannot be combined with lists.
    pub(crate) fn check_lists(&self) -> Result<(), ProblemError> {
        let Some(lists) = &self.lists else { return Ok(()) };
        let topk = lists.topk;
        // Kernels count entries in i32, those of a warp or wave at a time.
        let most = MAX_SEQLEN;
        ensure!(topk <= most, "topk", "topk {topk} is larger than {most}");
        if let ListEntries::Blocks { size } = lists.entries {
            ensure!(
                size >= 1 && lists.most_keys() <= most.into(),
                "indices",
                "indices: topk {topk} blocks of size {size} are not in 1..={most} keys"
            );
        }
        self.check_list_strides(Totals { total_q: Some(2), ..Totals::NONE })?;
        ensure!(
            !lists.lse_without_sink || self.score.sink,
            "lse_without_sink",
            "lse_without_sink true, but sink is false"
        );
        let refused = if !self.part.is_whole() {
            let part = &self.part;
            Some(("part", format!("position_q {} and position_k {}", part.position_q, part.position_k)))
        } else if self.cache.tree_mask {
            Some(("tree_mask", format!("tree_mask of {} queries", self.dims.seqlen_q)))
        } else if self.arrivals > 0 {
            Some(("arrivals", format!("arrivals {}", self.arrivals)))
        } else if self.dropout.write_keep_mask {
            Some(("write_keep_mask", format!("write_keep_mask over {} keys", self.dims.seqlen_k)))
        } else {
            None
        };
        if let Some((field, what)) = refused {
            let text = format!("{field}: {what} beside indices of topk {topk} is not defined");
            return Err(ProblemError::new(field, text));
        }
        if lists.entries == ListEntries::Addresses { self.check_addresses(topk) } else { Ok(()) }
    }

    /// Refuses options that need a key's position, if lists contain addresses.
    fn check_addresses(&self, topk: u32) -> Result<(), ProblemError> {
        let KvLayout::Paged { .. } = self.layout.kv else {
            let text =
                format!("indices: topk {topk} addresses need pages, not kv_layout {:?}", self.layout.kv);
            return Err(ProblemError::new("indices", text));
        };
        let bounds = self.mask.bounds();
        let needs = if bounds.lo.is_some() || bounds.hi.is_some() {
            Some(("mask", format!("mask {}", self.mask)))
        } else if self.score.bias != Bias::None {
            Some(("bias", format!("bias {:?}", self.score.bias)))
        } else if let Err(refusal) = self.code.refuse("") {
            Some(("code", refusal.reason))
        } else if self.drops() {
            Some(("p_drop", format!("p_drop {}", self.dropout.p_drop)))
        } else if self.layout.seqused_k {
            Some(("seqused_k", "seqused_k true".to_owned()))
        } else if self.cache.append.is_some() {
            Some(("append", "append".to_owned()))
        } else {
            self.cache.rotary.map(|rotary| ("rotary", format!("rotary of dim {}", rotary.dim)))
        };
        match needs {
            Some((field, what)) => {
                let text =
                    format!("{field}: {what} needs positions, but indices of topk {topk} are addresses");
                Err(ProblemError::new(field, text))
            }
            None => Ok(()),
        }
    }

    /// Checks the strides of `indices`.
    ///
    /// # Errors
    /// Strides that do not fit these extents.
    pub(crate) fn check_list_strides(&self, totals: Totals) -> Result<(), ProblemError> {
        let Some(lists) = &self.lists else { return Ok(()) };
        let shape = lists.shape(self, totals);
        // Entries are i32, which are as large as f32.
        check_input("indices", lists.strides, shape, DType::F32)?;
        check_unit_stride("indices", "dim", lists.strides.dim, shape.dim)
    }

    /// Refuses a problem for kernels that read all keys.
    ///
    /// # Errors
    /// Lists of keys.
    pub fn refuse_lists(&self, kernel: &str) -> Result<(), Refusal> {
        match &self.lists {
            None => Ok(()),
            Some(lists) => {
                Err(Refusal::new(kernel, format!("indices of topk {} are not in this kernel", lists.topk)))
            }
        }
    }
}
