//! Layout of a tensor's elements: logical axes, and strides for each tensor.

/// The extents of a tensor over its logical axes `[batch, seq, head, dim]`.
///
/// A packed tensor has `batch` 1 and `seq` = the total number of rows; a paged one has pages as `batch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Number of sequences; 1 if packed, the number of pages if paged.
    pub batch: u32,
    /// Number of rows of one sequence, of the packed tensor, or of a page.
    pub seq: u32,
    /// Number of heads.
    pub head: u32,
    /// Number of elements of one head's row.
    pub dim: u32,
}

impl Shape {
    /// Number of elements; `u64::MAX` if there are more, which no valid problem has.
    #[must_use]
    pub fn num_elems(self) -> u64 {
        let extents = self.axes().map(|(_, extent)| u64::from(extent));
        // An axis of 0 makes the tensor empty, however long the other axes are.
        if self.is_empty() { 0 } else { extents.into_iter().fold(1, u64::saturating_mul) }
    }

    /// Whether a tensor of this shape has no elements.
    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self.batch == 0 || self.seq == 0 || self.head == 0 || self.dim == 0
    }

    fn axes(self) -> [(&'static str, u32); 4] {
        [("batch", self.batch), ("seq", self.seq), ("head", self.head), ("dim", self.dim)]
    }
}

/// Element strides over the logical axes `[batch, seq, head, dim]`: the memory order is the
/// caller's, and b·s·h·d, b·h·s·d and packed b·s·3·h·d are the same call.
///
/// A stride is at least 0, and in an output at least 1: validation refuses others and names tensor, axis and
/// number. The stride of an axis of extent 1 is never used and may be anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strides {
    /// Stride between sequences, or between pages; unused when packed.
    pub batch: i64,
    /// Stride between rows.
    pub seq: i64,
    /// Stride between heads.
    pub head: i64,
    /// Stride between elements of a row: 1, except for a column-major V.
    pub dim: i64,
}

/// Contiguous strides that do not fit i64 saturate. No valid tensor is so large, and validation refuses them.
impl Strides {
    /// Strides of a contiguous tensor `[batch, seq, head, dim]`.
    #[must_use]
    pub fn bshd(shape: Shape) -> Self {
        let head = i64::from(shape.dim);
        let seq = head.saturating_mul(i64::from(shape.head));
        Self { batch: seq.saturating_mul(i64::from(shape.seq)), seq, head, dim: 1 }
    }

    /// Strides of a contiguous tensor `[batch, head, seq, dim]`.
    #[must_use]
    pub fn bhsd(shape: Shape) -> Self {
        let seq = i64::from(shape.dim);
        let head = seq.saturating_mul(i64::from(shape.seq));
        Self { batch: head.saturating_mul(i64::from(shape.head)), seq, head, dim: 1 }
    }

    /// Strides of a contiguous tensor `[batch, head, dim, seq]`: a column-major V.
    #[must_use]
    pub fn bhds(shape: Shape) -> Self {
        let dim = i64::from(shape.seq);
        let head = dim.saturating_mul(i64::from(shape.dim));
        Self { batch: head.saturating_mul(i64::from(shape.head)), seq: 1, head, dim }
    }

    /// The element offset of a logical index. In i64, so it never wraps for a validated layout.
    #[must_use]
    #[inline]
    pub fn offset(self, batch: u32, seq: u32, head: u32, dim: u32) -> i64 {
        i64::from(batch) * self.batch
            + i64::from(seq) * self.seq
            + i64::from(head) * self.head
            + i64::from(dim) * self.dim
    }

    /// Number of elements of memory from offset 0 to the last element of `shape`; 0 if it is empty. `None` if a
    /// stride is negative or the offset does not fit i64.
    #[must_use]
    #[inline]
    pub fn extent(self, shape: Shape) -> Option<u64> {
        if shape.is_empty() {
            return Some(0);
        }
        // Unrolled axis by axis, since each call measures each tensor and a loop over the axes takes three times as
        // long.
        let beyond = |last: i64, stride: i64, extent: u32| match extent {
            1 => Some(last),
            _ if stride < 0 => None,
            _ => last.checked_add(stride.checked_mul(i64::from(extent) - 1)?),
        };
        let last = beyond(0, self.batch, shape.batch)?;
        let last = beyond(last, self.seq, shape.seq)?;
        let last = beyond(last, self.head, shape.head)?;
        let last = beyond(last, self.dim, shape.dim)?;
        last.checked_add(1).map(i64::unsigned_abs)
    }

    /// The first axis of more than one element whose stride is negative.
    pub(crate) fn negative_axis(self, shape: Shape) -> Option<(&'static str, i64)> {
        let strides = [self.batch, self.seq, self.head, self.dim];
        shape
            .axes()
            .into_iter()
            .zip(strides)
            .find_map(|((name, extent), stride)| (extent > 1 && stride < 0).then_some((name, stride)))
    }

    /// Whether no two elements of `shape` can share an address.
    ///
    /// The test is sufficient, not necessary: sorted by stride, each axis must step beyond all offsets of the axes
    /// with smaller strides. Every order of nested axes, with any padding between them, passes.
    #[must_use]
    pub fn is_injective(self, shape: Shape) -> bool {
        if shape.is_empty() {
            return true;
        }
        let mut axes: Vec<_> = self.live(shape).collect();
        axes.sort_unstable();
        let mut reach: i128 = 0;
        for (stride, extent) in axes {
            if i128::from(stride) <= reach {
                return false;
            }
            reach += i128::from(stride) * (i128::from(extent) - 1);
        }
        true
    }

    /// Pairs `(stride, extent)` of the axes with more than one element.
    fn live(self, shape: Shape) -> impl Iterator<Item = (i64, u32)> {
        [(self.batch, shape.batch), (self.seq, shape.seq), (self.head, shape.head), (self.dim, shape.dim)]
            .into_iter()
            .filter(|&(_, extent)| extent > 1)
    }
}

/// Layout of Q and O in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QLayout {
    /// A batch axis, with equal extents for all sequences.
    Batch,
    /// Sequences one after another; `cu_seqlens_q`, i32 `[batch + 1]`, says where each starts.
    #[doc(alias = "varlen")]
    #[doc(alias = "ragged")]
    Packed,
}

/// Layout of K and V in memory, independent of Q's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// A batch axis, with equal extents for all sequences.
    Strided,
    /// Sequences one after another; `cu_seqlens_k`, i32 `[batch + 1]`, says where each starts.
    #[doc(alias = "varlen")]
    #[doc(alias = "ragged")]
    Packed,
    /// `[num_pages, page_size, num_heads_kv, head_dim]`, the strides' batch axis counting pages; a block
    /// table, i32 `[batch, max_pages]`, says which pages hold a sequence's keys.
    #[doc(alias = "block_table")]
    Paged {
        /// Number of rows of a page, at least 1.
        page_size: u32,
    },
}

impl KvLayout {
    /// Whether K and V are paged.
    #[must_use]
    pub fn is_paged(self) -> bool {
        matches!(self, KvLayout::Paged { .. })
    }

    /// Number of rows of a page; `None` without pages.
    #[must_use]
    pub fn page_size(self) -> Option<u32> {
        match self {
            KvLayout::Paged { page_size } => Some(page_size),
            KvLayout::Strided | KvLayout::Packed => None,
        }
    }
}

/// Rows of packed tensors and pages of paged ones: given with a call's tensors, not at planning, so that a server
/// whose steps differ in them plans once. Each is given iff the problem's layout has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Totals {
    /// Number of rows of packed Q and O.
    pub total_q: Option<u32>,
    /// Number of rows of packed K and V.
    pub total_k: Option<u32>,
    /// Number of pages of paged K and V.
    pub num_pages: Option<u32>,
    /// Number of rows of packed new keys and values.
    pub total_new: Option<u32>,
}

impl Totals {
    /// Totals of a problem whose Q and K have a batch axis: none is given.
    pub const NONE: Self = Self { total_q: None, total_k: None, num_pages: None, total_new: None };

    /// Totals of a problem with packed Q and packed K.
    #[must_use]
    pub const fn packed(total_q: u32, total_k: u32) -> Self {
        Self { total_q: Some(total_q), total_k: Some(total_k), ..Self::NONE }
    }
}

/// Storage order of V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VLayout {
    /// `[.., seqlen_k, head_dim_v]`: the head_dim stride is 1.
    RowMajor,
    /// `[.., head_dim_v, seqlen_k]`: the sequence stride is 1.
    ColMajor,
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { batch: 2, seq: 5, head: 3, dim: 4 };

    #[test]
    fn contiguous_orders_cover_the_shape_exactly() {
        for strides in [Strides::bshd(SHAPE), Strides::bhsd(SHAPE), Strides::bhds(SHAPE)] {
            assert_eq!(strides.extent(SHAPE), Some(SHAPE.num_elems()));
            assert!(strides.is_injective(SHAPE));
        }
    }

    #[test]
    fn injective_layouts_never_repeat_an_offset() {
        let mut seen_refused = false;
        for batch in [0, 1, 11, 60] {
            for seq in [1, 4, 12] {
                for head in [0, 4, 20] {
                    let strides = Strides { batch, seq, head, dim: 1 };
                    let mut offsets: Vec<i64> = Vec::new();
                    for b in 0..2 {
                        for s in 0..5 {
                            for h in 0..3 {
                                offsets.extend((0..4).map(|d| strides.offset(b, s, h, d)));
                            }
                        }
                    }
                    offsets.sort_unstable();
                    let distinct = offsets.windows(2).all(|w| w[0] != w[1]);
                    assert!(!strides.is_injective(SHAPE) || distinct);
                    seen_refused |= !distinct;
                }
            }
        }
        assert!(seen_refused);
    }

    #[test]
    fn a_stride_of_an_axis_of_one_is_ignored() {
        let shape = Shape { batch: 1, seq: 1, head: 1, dim: 8 };
        let bogus = Strides { batch: -7, seq: i64::MIN, head: i64::MAX, dim: 1 };
        assert_eq!(bogus.extent(shape), Some(8));
        assert!(bogus.is_injective(shape));
    }

    #[test]
    fn a_tensor_of_nothing_repeats_nothing() {
        let shape = Shape { batch: 2, seq: 0, head: 3, dim: 8 };
        assert!(Strides::bshd(shape).is_injective(shape) && Strides::bhsd(shape).is_injective(shape));
    }

    #[test]
    fn a_tensor_without_elements_along_any_axis_reaches_nothing() {
        for shape in [
            Shape { batch: 0, ..SHAPE },
            Shape { seq: 0, ..SHAPE },
            Shape { head: 0, ..SHAPE },
            Shape { dim: 0, ..SHAPE },
        ] {
            assert!(shape.is_empty());
            assert_eq!((shape.num_elems(), Strides::bshd(SHAPE).extent(shape)), (0, Some(0)));
        }
        assert!(!SHAPE.is_empty());
    }

    #[test]
    fn the_first_negative_stride_that_is_used_is_found_and_no_other() {
        let shape = Shape { batch: 1, ..SHAPE };
        let found = |seq, head| Strides { batch: -7, seq, head, dim: 1 }.negative_axis(shape);
        assert_eq!(found(0, 4), None);
        assert_eq!(found(0, -3), Some(("head", -3)));
        assert_eq!(found(-5, -3), Some(("seq", -5)));
        // A negative stride has no extent; a stride of 0, where all rows are one row of memory, has an extent.
        let reach = |seq| Strides { batch: -7, seq, head: 4, dim: 1 }.extent(shape);
        assert_eq!((reach(-1), reach(0)), (None, Some(12)));
    }

    #[test]
    fn a_count_or_a_stride_that_does_not_fit_saturates_and_never_wraps() {
        let most = u32::MAX;
        let huge = Shape { batch: 1 << 16, seq: 1 << 16, head: 1 << 16, dim: 1 << 16 };
        assert_eq!(huge.num_elems(), u64::MAX);
        assert_eq!(Shape { seq: 0, ..huge }.num_elems(), 0);
        let huge = Shape { batch: most, seq: most, head: most, dim: most };
        assert_eq!(Shape { batch: 0, ..huge }.num_elems(), 0);
        for strides in [Strides::bshd(huge), Strides::bhsd(huge), Strides::bhds(huge)] {
            assert_eq!((strides.batch, strides.extent(huge)), (i64::MAX, None));
        }
    }

    #[test]
    fn offsets_that_leave_i64_are_refused() {
        let shape = Shape { batch: 3, seq: 1, head: 1, dim: 1 };
        assert_eq!(Strides { batch: i64::MAX / 2 + 1, seq: 0, head: 0, dim: 1 }.extent(shape), None);
    }
}
