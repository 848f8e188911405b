//! Lists of keys at run time: on the host, and the parameters that a kernel reads.

use crate::abi::{AbiStruct as _, DevPtr};
use crate::abi_struct;
use crate::args::{DevSlice, SeqArgs};
use crate::error::{ProblemError, ensure};
use crate::problem::{FwdProblem, KeyLists, ListEntries, ListLength};
use crate::seq::SeqSpan;
use crate::source::Header;

/// The lists of a call in host memory: which keys each token of each sequence names.
#[derive(Clone, Copy, Debug)]
pub struct HostLists<'a> {
    lists: KeyLists,
    indices: &'a [u8],
    lengths: &'a [u8],
    /// Number of `topk_length` entries for each sequence; with packed rows the batch index is 0.
    rows: u32,
}

impl<'a> HostLists<'a> {
    /// The lists of a call; `None` if it has no lists.
    ///
    /// # Errors
    /// `indices` or `topk_length` that are missing, too small, or not in host memory.
    pub fn of(problem: &FwdProblem, seq: &SeqArgs<'a>) -> Result<Option<Self>, ProblemError> {
        let Some(lists) = problem.lists else { return Ok(None) };
        let elems = lists.strides.extent(lists.shape(problem, seq.totals)).unwrap_or(u64::MAX);
        let indices = bytes("indices", seq.indices.as_ref(), elems)?;
        let elems = lists.length_elems(problem, seq.totals);
        let lengths = bytes("topk_length", seq.topk_length.as_ref(), elems)?;
        let rows = seq.totals.total_q.unwrap_or(problem.dims.seqlen_q);
        Ok(Some(Self { lists, indices, lengths, rows }))
    }

    /// The keys that query `i` lists for a kv head, in the order of its list: positions, or addresses in the page
    /// pool if `span` stands for the pool. Absent entries are left out; duplicates stay.
    pub fn row(&self, span: &SeqSpan, i_head_kv: u32, i: u32, to: &mut Vec<u32>) {
        to.clear();
        let lists = &self.lists;
        let token = span.q_batch as usize * self.rows as usize + span.q_row as usize + i as usize;
        let used = match lists.length {
            ListLength::Whole => lists.topk,
            ListLength::Sequence => number(self.lengths, span.i_batch as usize).max(0).unsigned_abs(),
            ListLength::Token => number(self.lengths, token).max(0).unsigned_abs(),
        };
        let first = lists.strides.offset(span.q_batch, span.q_row + i, i_head_kv, 0) as usize;
        for at in 0..used.min(lists.topk) as usize {
            let Ok(entry) = u32::try_from(number(self.indices, first + at)) else { continue };
            let keys = match lists.entries {
                ListEntries::Positions | ListEntries::Addresses => u64::from(entry)..u64::from(entry) + 1,
                ListEntries::Blocks { size } => {
                    let first = u64::from(entry) * u64::from(size);
                    first..first + u64::from(size)
                }
            };
            to.extend((keys.start..keys.end.min(span.seqlen_k.into())).map(|j| j as u32));
        }
    }
}

abi_struct! {
    /// Kernel parameters of lists of keys, which follow [`FwdParams`](crate::abi::FwdParams).
    pub struct ListParams {
        /// Pointer to the lists: entry e of row i and kv head h of sequence b is at `b * batch + i * row + h * head
        /// + e`.
        pub indices: DevPtr<i32>,
        /// Number of entries in use of each sequence or row; null if all are in use.
        pub topk_length: DevPtr<i32>,
        /// Stride in elements from one sequence to the next; 0 if rows are packed.
        pub batch: i64,
        /// Stride in elements from one row to the next.
        pub row: i64,
        /// Stride in elements from one kv head to the next.
        pub head: i64,
        /// Bytes of a key's row if the cache has rows of bytes, otherwise 0.
        pub row_bytes: i64,
        /// Entries of each token's list of keys.
        pub topk: i32,
        /// Number of keys for which one list entry stands.
        pub block: i32,
        /// 1 if entries are addresses in the page pool.
        pub addresses: i32,
        /// 1 if `topk_length` has one number for each row.
        pub length_per_token: i32,
        /// 1 if LSE leaves out the sink.
        pub lse_without_sink: i32,
        /// 1 if there is no list: the keys are those of the mask's band and of intervals.
        pub whole: i32,
    }
}

/// The parameters for the lists of a call whose arguments passed their check. A call without lists gets lists of no
/// entries.
#[must_use]
pub fn list_params(problem: &FwdProblem, seq: &SeqArgs<'_>) -> ListParams {
    let address = |slice: Option<&DevSlice<'_>>| DevPtr::new(slice.map_or(0, |slice| slice.as_ptr() as u64));
    let lists = problem.lists.unwrap_or_else(|| KeyLists::new(problem, 0));
    let is_packed = problem.layout.q == crate::layout::QLayout::Packed;
    let block = match lists.entries {
        ListEntries::Positions | ListEntries::Addresses => 1,
        ListEntries::Blocks { size } => size,
    };
    ListParams {
        indices: address(seq.indices.as_ref()),
        topk_length: address(seq.topk_length.as_ref()),
        batch: if is_packed { 0 } else { lists.strides.batch },
        row: lists.strides.seq,
        head: lists.strides.head,
        row_bytes: problem.cache.rows.map_or(0, |rows| rows.row_bytes().into()),
        topk: lists.topk.cast_signed(),
        block: block.cast_signed(),
        addresses: (lists.entries == ListEntries::Addresses).into(),
        length_per_token: (lists.length == ListLength::Token).into(),
        lse_without_sink: problem.lse_without_sink().into(),
        whole: problem.lists.is_none().into(),
    }
}

/// `fmha/lists.h`: the types that this file shares with the device.
#[must_use]
pub fn header() -> Header {
    let definitions = [ListParams::c_definition()];
    Header::shared("fmha/lists.h", "fmha", &["fmha/params.h"], &definitions)
}

/// The `at`-th i32 of `bytes`; -1 or 0 entries beyond the end.
fn number(bytes: &[u8], at: usize) -> i32 {
    bytes.get(at * 4..at * 4 + 4).map_or(-1, bytemuck::pod_read_unaligned)
}

fn bytes<'a>(name: &'static str, slice: Option<&DevSlice<'a>>, elems: u64) -> Result<&'a [u8], ProblemError> {
    if elems == 0 {
        return Ok(&[]);
    }
    let missing = || ProblemError::new(name, format!("{name} is missing or not in host memory"));
    let bytes = slice.and_then(DevSlice::as_host).ok_or_else(missing)?;
    let wanted = elems.saturating_mul(4);
    ensure!(bytes.len() as u64 >= wanted, name, "{name} has {} bytes, but {wanted} are read", bytes.len());
    Ok(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::*;
    use crate::args::{DevSliceMut, FwdArgs};
    use crate::layout::{KvLayout, Strides, Totals};
    use crate::plan::Workspace;
    use crate::{Append, Bias, BwdProblem, DType, Dims, MemorySpace, Part};

    fn problem() -> FwdProblem {
        let dims = Dims::batch(2).seqlens(2, 10).heads(2, 1).head_dim(4);
        let problem = FwdProblem::batch(DType::F32, dims);
        let lists = KeyLists::new(&problem, 4);
        problem.lists(lists)
    }

    /// The keys of a token.
    fn row(problem: &FwdProblem, seq: &SeqArgs<'_>, sequence: usize, i: u32) -> Vec<u32> {
        let span = crate::seq::spans(problem, seq).unwrap()[sequence];
        let mut keys = vec![77];
        HostLists::of(problem, seq).unwrap().unwrap().row(&span, 0, i, &mut keys);
        keys
    }

    #[test]
    fn a_list_is_read_in_its_order_without_what_is_absent() {
        let indices = [9, 0, 9, 10, -1, i32::MIN, i32::MAX, 3, 5, 4, 3, 2, 1, 1, 1, 1];
        let seq = SeqArgs::default().indices(DevSlice::host(&indices));
        let rows = |problem: &FwdProblem, seq: &SeqArgs<'_>| {
            [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(b, i)| row(problem, seq, b, i))
        };
        let [a, b, c, d] = rows(&problem(), &seq);
        assert_eq!((a, b, c, d), (vec![9, 0, 9], vec![3], vec![5, 4, 3, 2], vec![1, 1, 1, 1]));

        let with = |length: ListLength| {
            let problem = problem();
            let lists = problem.lists.map(|lists| lists.length(length));
            problem.lists(lists)
        };
        let lengths = [2, -5];
        let seq = seq.topk_length(DevSlice::host(&lengths));
        let [a, b, c, d] = rows(&with(ListLength::Sequence), &seq);
        assert_eq!((a, b, c, d), (vec![9, 0], vec![], vec![], vec![]));
        let lengths = [1, 4, i32::MAX, 0];
        let seq = seq.topk_length(DevSlice::host(&lengths));
        let [a, b, c, d] = rows(&with(ListLength::Token), &seq);
        assert_eq!((a, b, c, d), (vec![9], vec![3], vec![5, 4, 3, 2], vec![]));
    }

    #[test]
    fn a_block_stands_for_its_keys_up_to_the_length() {
        let problem = problem();
        let lists = problem.lists.map(|lists| lists.entries(ListEntries::Blocks { size: 4 }));
        let problem = problem.lists(lists);
        let indices = [2, 0, 3, -1, i32::MAX, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let seq = SeqArgs::default().indices(DevSlice::host(&indices));
        assert_eq!(row(&problem, &seq, 0, 0), [8, 9, 0, 1, 2, 3]);
        assert_eq!(row(&problem, &seq, 0, 1), [4, 5, 6, 7, 4, 5, 6, 7, 0, 1, 2, 3]);
    }

    fn addressed(page_size: u32) -> FwdProblem {
        let mut problem = problem();
        problem.layout.kv = KvLayout::Paged { page_size };
        problem.strides.k = Strides::bshd(problem.shape_k());
        problem.strides.v = Strides::bshd(problem.shape_v());
        problem.lists = problem.lists.map(|lists| lists.entries(ListEntries::Addresses));
        problem
    }

    #[test]
    fn an_address_is_a_place_in_the_pages_and_needs_no_table() {
        let problem = addressed(8);
        let indices = [23, 24, 8, -1, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0];
        let totals = Totals { num_pages: Some(3), ..Totals::NONE };
        let seq = SeqArgs::default().totals(totals).indices(DevSlice::host(&indices));
        assert_eq!(row(&problem, &seq, 0, 0), [23, 8]);
        let span = crate::seq::spans(&problem, &seq).unwrap()[1];
        let rows = crate::seq::KvRows::of(&problem, &seq).unwrap();
        assert_eq!((span.seqlen_k, rows.at(&span, 23), rows.run(&span, 20)), (24, (2, 7), 4));
        let many = SeqArgs::default().totals(Totals { num_pages: Some(1 << 28), ..Totals::NONE });
        let error = crate::seq::spans(&problem, &many).unwrap_err().to_string();
        assert_eq!(error, "num_pages 268435456 of page_size 8: addresses end at 2147483647");
    }

    #[test]
    fn what_does_not_go_with_lists_is_refused_by_its_name() {
        let lists = problem().lists.unwrap();
        let gapped = Strides { batch: 8, seq: 4, head: 4, dim: 2 };
        let turned = Strides { batch: 8, seq: -4, head: 4, dim: 1 };
        let mut turning = addressed(8);
        turning.layout.seqused_k = true;
        let append = Append::batch(&problem(), 1);
        for (problem, field, text) in [
            (
                problem().lists(KeyLists { topk: i32::MAX.unsigned_abs(), ..lists }),
                "topk",
                "topk 2147483647 is larger",
            ),
            (problem().lists(lists.strides(gapped)), "indices", "indices.dim stride 2 is not 1"),
            (problem().lists(lists.strides(turned)), "indices", "indices.seq stride -4 is negative"),
            (
                problem().lists(lists.entries(ListEntries::Blocks { size: 0 })),
                "indices",
                "indices: topk 4 blocks of size 0 are not",
            ),
            (problem().lists(lists.lse_without_sink(true)), "lse_without_sink", "but sink is false"),
            (problem().part(Part { position_q: 3, ..Part::default() }), "part", "position_q 3"),
            (problem().write_keep_mask(true), "write_keep_mask", "over 10 keys beside indices of topk 4"),
            (problem().arrivals(2), "arrivals", "arrivals 2 beside indices of topk 4"),
            (
                problem().lists(lists.entries(ListEntries::Addresses)),
                "indices",
                "indices: topk 4 addresses need pages, not kv_layout Strided",
            ),
            (addressed(8).mask(crate::MaskSpec::CAUSAL), "mask", "needs positions, but indices of topk 4"),
            (addressed(8).bias(Bias::Alibi { per_batch: false }), "bias", "needs positions"),
            (addressed(8).p_drop(0.25), "p_drop", "p_drop 0.25 needs positions"),
            (
                addressed(8).mask_code("k <= q".parse::<crate::expr::Function>().unwrap()),
                "code",
                "mask as code",
            ),
            (turning.clone(), "seqused_k", "seqused_k true needs positions"),
            (turning.append(append), "seqused_k", "seqused_k true needs positions"),
        ] {
            let error = problem.validate().unwrap_err();
            assert_eq!(error.field, field, "{error}");
            assert!(error.text.starts_with(field) && error.text.contains(text), "{error}");
        }
        addressed(8).sink(true).softcap(2.0).validate().unwrap();
        let apart = problem().sink(true).lists(lists.lse_without_sink(true));
        let error = BwdProblem::new(apart.clone()).has_dlse(true).validate().unwrap_err();
        assert_eq!(error.field, "has_dlse");
        BwdProblem::new(apart).validate().unwrap();
    }

    #[test]
    fn lists_of_a_call_are_there_iff_its_problem_has_some() {
        let (q, k, mut o) = ([0f32; 32], [0f32; 80], [0f32; 32]);
        let (indices, lengths) = ([0i32; 16], [1i32; 2]);
        let mut check = |problem: FwdProblem, seq: SeqArgs<'_>| {
            let slices = (DevSlice::host(&q), DevSlice::host(&k), DevSlice::host(&k));
            let args = FwdArgs::new(slices.0, slices.1, slices.2, DevSliceMut::host(&mut o)).seq(seq);
            let checked = crate::args::check_fwd(
                &problem.validate().unwrap(),
                &args,
                Workspace::NONE,
                MemorySpace::Host,
            );
            checked.err().map_or(String::new(), |error| error.text)
        };
        let all = SeqArgs::default().indices(DevSlice::host(&indices));
        assert_eq!(check(problem(), all), "");
        assert_eq!(check(problem(), SeqArgs::default()), "indices is missing: 64 bytes are wanted");
        let few = SeqArgs::default().indices(DevSlice::host(&indices[1..]));
        assert!(
            check(problem(), few).starts_with("indices has 60 bytes, but its extents and strides reach 64")
        );
        assert!(check(problem().lists(None), all).starts_with("indices is given, but the problem has none"));
        let lengthy = all.topk_length(DevSlice::host(&lengths));
        assert!(check(problem(), lengthy).starts_with("topk_length is given, but the problem has none"));
        let lists = problem().lists.map(|lists| lists.length(ListLength::Token));
        let error = check(problem().lists(lists), lengthy);
        assert!(
            error.starts_with("topk_length has 8 bytes, but its extents and strides reach 16"),
            "{error}"
        );
        let floats = SeqArgs::default().indices(DevSlice::host(&q[..16]));
        assert!(check(problem(), floats).starts_with("indices has elements of f32"));
    }
}
