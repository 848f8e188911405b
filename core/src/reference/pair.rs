//! What a (query, key) pair adds to the gradients, and their sums.

use num_traits::Float;

use super::backward::{BackwardSpread, HeadBackward};
use super::head::{Head, dot, row};
use crate::dtype::DType;
use crate::seq::SeqSpan;

/// One query: what all its keys share.
pub(super) struct Query<'a, T> {
    pub(super) i: u32,
    q: &'a [T],
    dout: &'a [T],
    pub(super) lse: T,
    dlse: T,
    /// D.
    d: T,
    /// Its square, and those of its terms.
    d_square: T,
}

/// What one (query, key) adds to the gradients.
pub(super) struct Pair<T> {
    /// `Z P`, the weight of dV.
    weight: T,
    ds: T,
    /// The root of the squares of what dS is a difference of.
    ds_size: T,
    /// `softmax_scale * dS0`, the weight of dQ and dK, and its size.
    scaled: T,
    scaled_size: T,
}

impl<'a, T: Float> Query<'a, T> {
    pub(super) fn new(head: &'a Head<'_, T>, i: u32, dout: &'a [T], o: &[T], lse: T, dlse: T) -> Self {
        let d = dot(dout, o);
        let d_square = dout.iter().zip(o).fold(d * d, |sum, (&x, &y)| sum + (x * y) * (x * y));
        Self { i, q: row(&head.q, i, head.head_dim_qk), dout, lse, dlse, d, d_square }
    }

    /// With key `j`, whose P is `p`.
    pub(super) fn pair(&self, head: &Head<'_, T>, j: u32, p: T, dtype_grad: DType) -> Pair<T> {
        let &Self { i, dlse, d, d_square, .. } = self;
        let keep = head.keep_factor(i, j);
        let dp = keep * dot(self.dout, row(&head.v, j, head.head_dim_v));
        let ds = p * (dp - d + dlse);
        let ds_size = p * (dp * dp + d_square + dlse * dlse).sqrt();
        let (_, slope) = head.capped(i, j);
        Pair {
            weight: head.probability(p) * keep,
            ds,
            ds_size,
            scaled: head.score_gradient(ds * slope, dtype_grad) * head.softmax_scale,
            scaled_size: ds_size * slope * head.softmax_scale,
        }
    }
}

/// Rows of sums, and of the squares of their terms in exact arithmetic.
struct Sums<T> {
    sums: Vec<T>,
    squares: Vec<T>,
    dim: usize,
}

impl<T: Float> Sums<T> {
    fn zeros(head: &Head<'_, T>, rows: usize, dim: usize) -> Self {
        let zeros = |len: usize| vec![T::zero(); len];
        Self { sums: zeros(rows * dim), squares: zeros(if head.is_exact() { rows * dim } else { 0 }), dim }
    }

    /// `sums[row] += weight * x`, a weight of this size.
    fn add(&mut self, row: usize, weight: T, size: T, x: &[T]) {
        axpy(&mut self.sums[row * self.dim..][..self.dim], weight, x);
        if !self.squares.is_empty() {
            let squares = &mut self.squares[row * self.dim..][..self.dim];
            squares.iter_mut().zip(x).for_each(|(y, &x)| *y = *y + (size * x) * (size * x));
        }
    }

    /// The sums, and the roots of the squares.
    fn finish(self) -> (Vec<f64>, Vec<f64>) {
        let plain = |values: Vec<T>| values.into_iter().map(plain).collect::<Vec<_>>();
        (plain(self.sums), plain(self.squares).into_iter().map(f64::sqrt).collect())
    }
}

fn plain<T: Float>(value: T) -> f64 {
    value.to_f64().unwrap_or(f64::NAN)
}

/// The gradients of one (sequence, query head) as they grow.
pub(super) struct HeadSums<T> {
    dq: Sums<T>,
    dk: Sums<T>,
    dv: Sums<T>,
    ds: Sums<T>,
    dsink: T,
    dsink_square: T,
}

impl<T: Float> HeadSums<T> {
    pub(super) fn zeros(head: &Head<'_, T>, rows: usize, keys: usize) -> Self {
        Self {
            dq: Sums::zeros(head, rows, head.head_dim_qk),
            dk: Sums::zeros(head, keys, head.head_dim_qk),
            dv: Sums::zeros(head, keys, head.head_dim_v),
            ds: Sums::zeros(head, rows, head.span.seqlen_k as usize),
            dsink: T::zero(),
            dsink_square: T::zero(),
        }
    }

    pub(super) fn add_to_row(&mut self, head: &Head<'_, T>, row_at: usize, j: u32, pair: &Pair<T>) {
        self.dq.add(row_at, pair.scaled, pair.scaled_size, row(&head.k, j, head.head_dim_qk));
        let at = row_at * self.ds.dim + j as usize;
        self.ds.sums[at] = pair.ds;
        if let Some(square) = self.ds.squares.get_mut(at) {
            *square = pair.ds_size * pair.ds_size;
        }
    }

    pub(super) fn add_to_key(&mut self, key_at: usize, query: &Query<'_, T>, pair: &Pair<T>) {
        self.dv.add(key_at, pair.weight, pair.weight, query.dout);
        self.dk.add(key_at, pair.scaled, pair.scaled_size, query.q);
    }

    pub(super) fn add_sink(&mut self, head: &Head<'_, T>, query: &Query<'_, T>) {
        // A sink of no weight has no share of a row without keys either, whose LSE is as far down.
        if let Some(sink) = head.sink.filter(|&sink| sink != T::neg_infinity()) {
            let share = (sink - query.lse).exp();
            self.dsink = self.dsink + share * (query.dlse - query.d);
            let square = query.dlse * query.dlse + query.d_square;
            self.dsink_square = self.dsink_square + share * share * square;
        }
    }

    pub(super) fn finish(self, span: SeqSpan, i_head: u32) -> HeadBackward {
        let ((dq, spread_dq), (dk, spread_dk)) = (self.dq.finish(), self.dk.finish());
        let ((dv, spread_dv), (ds, spread_ds)) = (self.dv.finish(), self.ds.finish());
        HeadBackward {
            span,
            i_head,
            dq,
            dk,
            dv,
            ds,
            dsink: plain(self.dsink),
            spread: BackwardSpread {
                dq: spread_dq,
                dk: spread_dk,
                dv: spread_dv,
                ds: spread_ds,
                dsink: plain(self.dsink_square.sqrt()),
            },
        }
    }
}

pub(super) fn axpy<T: Float>(y: &mut [T], a: T, x: &[T]) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y = *y + a * x);
}
