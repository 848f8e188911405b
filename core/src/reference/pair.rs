//! Contributions of a (query, key) pair to the gradients, and their sums.

use num_traits::Float;

use super::backward::{BackwardSpread, HeadBackward, is_far};
use super::code::zeros;
use super::head::{Head, dot, dots, row};
use crate::bwd::BwdProblem;
use crate::dtype::DType;
use crate::seq::SeqSpan;

/// Numbers of a query that all its keys share.
pub(super) struct Query<'a, T> {
    pub(super) i: u32,
    q: &'a [T],
    dout: &'a [T],
    pub(super) lse: T,
    dlse: T,
    /// Delta: the row sum of `dO * O`.
    d: T,
    /// The square of delta `d`, plus the squares of its terms.
    d_square: T,
    is_far: bool,
}

/// Contributions of one (query, key) pair to the gradients.
pub(super) struct Pair<T> {
    /// Weight `Z P` of dO in dV.
    weight: T,
    ds: T,
    /// The size of dS: the root of the sum of squares of the two terms whose difference it is.
    ds_size: T,
    /// Factor `softmax_scale * dS0` of K in dQ and of Q in dK, and its size.
    scaled: T,
    scaled_size: T,
    /// The score before the score function.
    score: T,
    /// The gradient of the score function's value, and its size.
    coded: (T, T),
}

impl<'a, T: Float> Query<'a, T> {
    pub(super) fn new(head: &'a Head<'_, T>, i: u32, dout: &'a [T], o: &[T], lse: T, dlse: T) -> Self {
        let d = dot(dout, o);
        let d_square = dout.iter().zip(o).fold(d * d, |sum, (&x, &y)| sum + (x * y) * (x * y));
        let is_far = is_far(plain(lse));
        Self { i, q: row(&head.q, i, head.head_dim_qk), dout, lse, dlse, d, d_square, is_far }
    }

    /// Contributions of key `j`, whose P is `p`, to the gradients.
    pub(super) fn pair(&self, head: &Head<'_, T>, j: u32, p: T, dtype_grad: DType) -> Pair<T> {
        self.pair_of(head, j, p, dot(self.dout, row(&head.v, j, head.head_dim_v)), dtype_grad)
    }

    /// Contributions of each of `keys`, whose P are `p`.
    pub(super) fn pairs<'h>(
        &'h self,
        head: &'h Head<'_, T>,
        keys: &'h [u32],
        p: &'h [T],
        dtype_grad: DType,
    ) -> impl Iterator<Item = (u32, Pair<T>)> + 'h {
        let products = dots(self.dout, keys, |j| row(&head.v, j, head.head_dim_v));
        let with_p = keys.iter().zip(p).zip(products);
        with_p.map(move |((&j, &p), product)| (j, self.pair_of(head, j, p, product, dtype_grad)))
    }

    /// Contributions of key `j`. `product` is `dO[i] . V[j]`.
    fn pair_of(&self, head: &Head<'_, T>, j: u32, p: T, product: T, dtype_grad: DType) -> Pair<T> {
        let &Self { i, dlse, d, d_square, .. } = self;
        let keep = head.keep_factor(i, j);
        let dp = keep * product;
        let ds = p * (dp - d + dlse);
        let ds_size = p * (dp * dp + d_square + dlse * dlse).sqrt();
        let (capped, (score, coded)) = (head.slope(i, j), head.code_slope(i, j));
        // Zero times an infinite or NaN derivative counts as zero.
        let times = |a: T, slope: T| if a == T::zero() { a } else { a * slope };
        let slope = capped * coded;
        Pair {
            weight: head.probability(p) * keep,
            ds,
            ds_size,
            scaled: head.score_gradient(times(ds, slope), dtype_grad) * head.softmax_scale,
            scaled_size: times(ds_size, slope) * head.softmax_scale,
            score,
            coded: (times(ds, capped), times(ds_size, capped)),
        }
    }
}

/// Rows of sums, and in exact arithmetic also of the squares of their terms.
struct Sums<T> {
    sums: Vec<T>,
    squares: Vec<T>,
    /// Sums of squares from far queries; empty if a row belongs to one query.
    far_squares: Vec<T>,
    dim: usize,
}

impl<T: Float> Sums<T> {
    fn zeros(head: &Head<'_, T>, rows: usize, dim: usize) -> Self {
        let zeros = |len: usize| vec![T::zero(); len];
        let squares = zeros(if head.is_exact() { rows * dim } else { 0 });
        Self { sums: zeros(rows * dim), squares, far_squares: Vec::new(), dim }
    }

    fn over_queries(head: &Head<'_, T>, rows: usize, dim: usize) -> Self {
        let sums = Self::zeros(head, rows, dim);
        Self { far_squares: vec![T::zero(); sums.squares.len()], ..sums }
    }

    /// Adds `weight * x` to `sums[row]`; `size` is the weight's size for the sums of squares.
    fn add(&mut self, row: usize, weight: T, size: T, x: &[T], is_far: bool) {
        axpy(&mut self.sums[row * self.dim..][..self.dim], weight, x);
        let far_squares = if is_far { self.far_squares.as_mut_slice() } else { &mut [] };
        for squares in [&mut self.squares, far_squares] {
            if !squares.is_empty() {
                let squares = &mut squares[row * self.dim..][..self.dim];
                squares.iter_mut().zip(x).for_each(|(y, &x)| *y = *y + (size * x) * (size * x));
            }
        }
    }

    /// The sums, and the roots of the sums of squares: over all queries, and over far queries.
    fn finish(self) -> [Vec<f64>; 3] {
        let plain = |values: Vec<T>| values.into_iter().map(plain);
        let roots = |values: Vec<T>| plain(values).map(f64::sqrt).collect();
        [plain(self.sums).collect(), roots(self.squares), roots(self.far_squares)]
    }
}

fn plain<T: Float>(value: T) -> f64 {
    value.to_f64().unwrap_or(f64::NAN)
}

/// Gradients of one (sequence, query head), summed pair by pair.
pub(super) struct HeadSums<T> {
    dq: Sums<T>,
    dk: Sums<T>,
    dv: Sums<T>,
    ds: Sums<T>,
    dsink: T,
    dsink_square: T,
    far_dsink_square: T,
    captured: Vec<Vec<f64>>,
    captured_squares: Vec<Vec<f64>>,
}

impl<T: Float> HeadSums<T> {
    pub(super) fn zeros(head: &Head<'_, T>, problem: &BwdProblem, rows: usize, keys: usize) -> Self {
        Self {
            captured: zeros(problem),
            captured_squares: zeros(problem),
            dq: Sums::zeros(head, rows, head.head_dim_qk),
            dk: Sums::over_queries(head, keys, head.head_dim_qk),
            dv: Sums::over_queries(head, keys, head.head_dim_v),
            ds: Sums::zeros(head, rows, head.span.seqlen_k as usize),
            dsink: T::zero(),
            dsink_square: T::zero(),
            far_dsink_square: T::zero(),
        }
    }

    pub(super) fn add_to_row(&mut self, head: &Head<'_, T>, row_at: usize, j: u32, pair: &Pair<T>) {
        self.dq.add(row_at, pair.scaled, pair.scaled_size, row(&head.k, j, head.head_dim_qk), false);
        let at = row_at * self.ds.dim + j as usize;
        // A list may name a key twice.
        self.ds.sums[at] = self.ds.sums[at] + pair.ds;
        if let Some(square) = self.ds.squares.get_mut(at) {
            *square = *square + pair.ds_size * pair.ds_size;
        }
    }

    /// Adds the pair's contribution to the gradients of captured tensors.
    pub(super) fn add_to_captured(
        &mut self,
        head: &Head<'_, T>,
        problem: &BwdProblem,
        (i, j): (u32, u32),
        pair: &Pair<T>,
    ) {
        if let Some(code) = head.code.as_ref().filter(|_| !problem.dcaptured.is_empty()) {
            let (ds, ds_size) = pair.coded;
            let to = (self.captured.as_mut_slice(), self.captured_squares.as_mut_slice());
            code.add_to_captured(problem, (pair.score, ds, ds_size), (i, j), to);
        }
    }

    pub(super) fn add_to_key(&mut self, key_at: usize, query: &Query<'_, T>, pair: &Pair<T>) {
        self.dv.add(key_at, pair.weight, pair.weight, query.dout, query.is_far);
        self.dk.add(key_at, pair.scaled, pair.scaled_size, query.q, query.is_far);
    }

    /// Adds the sink's gradient of a row; `share` is the sink's probability, `exp(sink - LSE)`.
    pub(super) fn add_sink(&mut self, head: &Head<'_, T>, query: &Query<'_, T>, share: T) {
        // A sink of -inf has no gradient, not even in a row without keys, whose LSE is -inf too.
        if head.sink.is_some_and(|sink| sink != T::neg_infinity()) {
            self.dsink = self.dsink + share * (query.dlse - query.d);
            let square = share * share * (query.dlse * query.dlse + query.d_square);
            self.dsink_square = self.dsink_square + square;
            if query.is_far {
                self.far_dsink_square = self.far_dsink_square + square;
            }
        }
    }

    pub(super) fn finish(self, span: SeqSpan, i_head: u32) -> HeadBackward {
        let roots = |squares: Vec<Vec<f64>>| -> Vec<Vec<f64>> {
            squares.into_iter().map(|squares| squares.into_iter().map(f64::sqrt).collect()).collect()
        };
        let ([dq, spread_dq, _], [dk, spread_dk, far_dk]) = (self.dq.finish(), self.dk.finish());
        let ([dv, spread_dv, far_dv], [ds, spread_ds, _]) = (self.dv.finish(), self.ds.finish());
        HeadBackward {
            span,
            i_head,
            dq,
            dk,
            dv,
            ds,
            dsink: plain(self.dsink),
            dcaptured: self.captured,
            spread: BackwardSpread {
                dq: spread_dq,
                dk: spread_dk,
                dv: spread_dv,
                ds: spread_ds,
                dsink: plain(self.dsink_square.sqrt()),
                far_dk,
                far_dv,
                dcaptured: roots(self.captured_squares),
                far_dsink: plain(self.far_dsink_square.sqrt()),
            },
        }
    }
}

pub(super) fn axpy<T: Float>(y: &mut [T], a: T, x: &[T]) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y = *y + a * x);
}
