//! Decides whether two strided tensors with overlapping address ranges share a byte: slices of one fused buffer do
//! not.

use smallvec::SmallVec;

use crate::dtype::DType;
use crate::layout::{Shape, Strides};

/// Most nodes of the search tree that deciding about two tensors may visit; this many take some tens of microseconds.
/// Tensors with nested strides, such as slices of one buffer, need a handful.
const MAX_NODES: u32 = 4096;

/// Limit of a tensor's extent in bytes: with more, the sum of two extents would not fit 64 bits.
const MAX_REACH: u64 = 1 << 62;

/// Relation of two tensors whose address ranges overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meeting {
    /// No byte belongs to both tensors.
    Apart,
    /// Some byte belongs to both tensors.
    Shared,
    /// The search gave up, since the strides of the two tensors have too little in common.
    Undecided,
}

/// The bytes of a tensor: `address + sum x[axis] * step` over every `0 <= x[axis] <= last`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lattice {
    address: usize,
    /// An element's bytes, then dim, head, seq and batch.
    axes: [Axis; 5],
}

/// Multiples `0 ..= last` of a step in bytes.
#[derive(Clone, Copy, Debug)]
struct Axis {
    step: u64,
    last: u64,
}

impl Axis {
    const NONE: Self = Self { step: 0, last: 0 };

    fn reach(self) -> u64 {
        self.step.saturating_mul(self.last)
    }
}

impl Lattice {
    /// A tensor of at least one element, whose strides validation has checked.
    pub(super) fn strided(address: usize, strides: Strides, shape: Shape, dtype: DType) -> Self {
        let size = dtype.size_bytes();
        // The stride of an axis with one element is never used, so it may be anything.
        let axis = |stride: i64, extent: u32| match extent {
            0 | 1 => Axis::NONE,
            _ => Axis { step: stride.unsigned_abs().saturating_mul(size), last: u64::from(extent) - 1 },
        };
        let axes = [
            Axis { step: 1, last: size - 1 },
            axis(strides.dim, shape.dim),
            axis(strides.head, shape.head),
            axis(strides.seq, shape.seq),
            axis(strides.batch, shape.batch),
        ];
        Self { address, axes }
    }

    /// Bytes without a gap; at least one.
    pub(super) fn dense(address: usize, bytes: u64) -> Self {
        let bytes = Axis { step: 1, last: bytes.saturating_sub(1) };
        Self { address, axes: [bytes, Axis::NONE, Axis::NONE, Axis::NONE, Axis::NONE] }
    }

    fn reach(&self) -> u64 {
        self.axes.iter().fold(0, |reach, axis| reach.saturating_add(axis.reach()))
    }

    /// Relation of two tensors. Exact, except for [`Meeting::Undecided`].
    pub(super) fn meets(&self, other: &Self) -> Meeting {
        let (reach, other_reach) = (self.reach(), other.reach());
        if reach > MAX_REACH || other_reach > MAX_REACH {
            return Meeting::Undecided;
        }
        // A shared byte is a solution of
        //     address + sum x step = other.address + sum y other_step,    0 <= x, y <= last.
        // Replacing y by last - y brings all terms on one side; the question is then whether a number up to 2^63 is a
        // sum of multiples of the steps.
        let (ahead, behind) = (self.address as u64, other.address as u64);
        let target = match behind.checked_sub(ahead) {
            Some(apart) if apart > reach => return Meeting::Apart,
            Some(apart) => apart + other_reach,
            None if ahead - behind > other_reach => return Meeting::Apart,
            None => other_reach - (ahead - behind),
        };
        let terms = joined(self.axes.iter().chain(&other.axes).copied());
        let mut search = Search { terms: &terms, nodes: 0 };
        match search.has_sum(terms.len(), target) {
            Some(true) => Meeting::Shared,
            Some(false) => Meeting::Apart,
            None => Meeting::Undecided,
        }
    }
}

/// A term of the equation: a step, how many multiples it may have, and the common divisor of all smaller steps.
#[derive(Clone, Copy, Debug)]
struct Term {
    axis: Axis,
    /// Sum of the smaller terms' reaches.
    below: u64,
    /// Greatest common divisor of this step and of all smaller steps, except the run of single bytes.
    divisor: u64,
}

/// Terms by ascending step, the run of single bytes first. Two terms are joined if their sums have no gap: rows
/// without a gap are one row.
fn joined(axes: impl Iterator<Item = Axis>) -> SmallVec<[Term; 10]> {
    let mut axes: SmallVec<[Axis; 10]> = axes.filter(|axis| axis.step > 0 && axis.last > 0).collect();
    axes.sort_unstable_by_key(|axis| axis.step);
    let run = Axis { step: 1, last: 0 };
    let mut terms: SmallVec<[Term; 10]> = smallvec::smallvec![Term { axis: run, below: 0, divisor: 0 }];
    for axis in axes {
        let top = terms.len() - 1;
        let Term { axis: under, below, divisor } = terms[top];
        if axis.step.is_multiple_of(under.step) && axis.step / under.step <= under.last + 1 {
            terms[top].axis.last += axis.step / under.step * axis.last;
        } else {
            terms.push(Term { axis, below: below + under.reach(), divisor: gcd(axis.step, divisor) });
        }
    }
    terms
}

struct Search<'a> {
    terms: &'a [Term],
    nodes: u32,
}

impl Search<'_> {
    /// Whether the first `count` terms can sum to `target`; `None` if the search gave up.
    fn has_sum(&mut self, count: usize, target: u64) -> Option<bool> {
        let Some((&Term { axis, below, divisor }, smaller)) =
            self.terms[..count].split_last().filter(|(_, smaller)| !smaller.is_empty())
        else {
            return Some(target <= self.terms[0].axis.last);
        };
        // Sums of these terms are only multiples of the divisor, each followed by the run of bytes.
        if target % divisor > self.terms[0].axis.last {
            return Some(false);
        }
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return None;
        }
        let fewest = target.saturating_sub(below).div_ceil(axis.step);
        for multiple in fewest..=axis.last.min(target / axis.step) {
            if self.has_sum(smaller.len(), target - multiple * axis.step)? {
                return Some(true);
            }
        }
        Some(false)
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// A tensor as a caller describes it: address, strides, shape and type.
    #[derive(Clone, Copy, Debug)]
    struct Tensor(usize, Strides, Shape, DType);

    impl Tensor {
        fn lattice(&self) -> Lattice {
            Lattice::strided(self.0, self.1, self.2, self.3)
        }

        /// Offsets of every byte of the tensor, element by element.
        fn bytes(&self) -> BTreeSet<usize> {
            let Self(address, strides, Shape { batch, seq, head, dim }, dtype) = *self;
            let size = dtype.size_bytes() as usize;
            let mut bytes = BTreeSet::new();
            for (b, s) in (0..batch).flat_map(|b| (0..seq).map(move |s| (b, s))) {
                for (h, d) in (0..head).flat_map(|h| (0..dim).map(move |d| (h, d))) {
                    let first = address + strides.offset(b, s, h, d) as usize * size;
                    bytes.extend(first..first + size);
                }
            }
            bytes
        }
    }

    fn by_counting(one: &BTreeSet<usize>, other: &BTreeSet<usize>) -> Meeting {
        if one.intersection(other).next().is_some() { Meeting::Shared } else { Meeting::Apart }
    }

    fn dtype() -> impl Strategy<Value = DType> {
        prop_oneof![Just(DType::E4m3Fn), Just(DType::Bf16), Just(DType::F32)]
    }

    /// Tensors of few elements with any strides, also strides of 0.
    fn any_tensor() -> impl Strategy<Value = Tensor> {
        let axis = || (0i64..40, 1u32..5);
        (0usize..160, dtype(), axis(), axis(), axis(), axis()).prop_map(|(address, dtype, d, h, s, b)| {
            let strides = Strides { batch: b.0, seq: s.0, head: h.0, dim: d.0 };
            let shape = Shape { batch: b.1, seq: s.1, head: h.1, dim: d.1 };
            Tensor(address, strides, shape, dtype)
        })
    }

    /// Two slices of one buffer whose axes nest in some order, cut along heads, rows or a row's elements.
    fn slices() -> impl Strategy<Value = (Tensor, Tensor)> {
        let order = Just([0usize, 1, 2, 3]).prop_shuffle();
        let extents = (1u32..4, 1u32..4, 1u32..4, 1u32..6);
        let cut = (1usize..4, 0u32..6, 1u32..5, 1u32..5);
        (order, extents, cut, dtype(), 0i64..3).prop_map(|(order, (b, s, h, d), cut, dtype, padding)| {
            let (cut, start, first, second) = cut;
            let mut whole = [b, s, h, d];
            whole[cut] = first.max(start + second);
            let mut strides = [0i64; 4];
            let mut step = 1;
            for axis in order {
                strides[axis] = step;
                step = step * i64::from(whole[axis]) + padding;
            }
            let slice = |start: u32, length: u32| {
                let mut extents = whole;
                extents[cut] = length;
                let address = 64 + strides[cut] as usize * start as usize * dtype.size_bytes() as usize;
                let ([batch, seq, head, dim], [b, s, h, d]) = (strides, extents);
                let (strides, shape) =
                    (Strides { batch, seq, head, dim }, Shape { batch: b, seq: s, head: h, dim: d });
                Tensor(address, strides, shape, dtype)
            };
            (slice(0, first), slice(start, second))
        })
    }

    #[test]
    fn a_search_that_would_take_too_long_gives_up_and_calls_nothing_apart() {
        // Steps without a common divisor: 10^13 sums of them over 10^18 bytes, and none equals the target.
        let lattice = |address, batch, seq| {
            let strides = Strides { batch, seq, head: 0, dim: 1 };
            Lattice::strided(
                address,
                strides,
                Shape { batch: 3000, seq: 3000, head: 1, dim: 1 },
                DType::E4m3Fn,
            )
        };
        let one = lattice(0, 400_000_000_000_007, 120_000_000_013);
        let other = lattice(1, 400_000_007_000_043, 120_000_037_001);
        assert_eq!(one.meets(&other), Meeting::Undecided);
        let far = Lattice { axes: [Axis { step: 1, last: MAX_REACH + 1 }; 5], address: 0 };
        assert_eq!(far.meets(&one), Meeting::Undecided);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_two_tensors_share_a_byte_iff_counting_finds_one(one in any_tensor(), other in any_tensor()) {
            let meeting = one.lattice().meets(&other.lattice());
            prop_assert_eq!(meeting, by_counting(&one.bytes(), &other.bytes()));
            prop_assert_eq!(other.lattice().meets(&one.lattice()), meeting);
        }

        #[test]
        fn slices_of_one_buffer_share_a_byte_iff_counting_finds_one((one, other) in slices()) {
            prop_assert_eq!(one.lattice().meets(&other.lattice()), by_counting(&one.bytes(), &other.bytes()));
        }

        #[test]
        fn dense_bytes_beside_a_tensor_are_told_to_the_byte(
            tensor in any_tensor(),
            address in 0usize..200,
            bytes in 1u64..60,
        ) {
            let dense = (address..address + bytes as usize).collect();
            let meeting = tensor.lattice().meets(&Lattice::dense(address, bytes));
            prop_assert_eq!(meeting, by_counting(&tensor.bytes(), &dense));
        }
    }
}
