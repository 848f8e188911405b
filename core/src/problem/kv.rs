//! Use of a KV cache by a call, apart from reading it: the call appends new keys and values, rotates by
//! position, and widens a cache that is narrower than its arithmetic.

use crate::dtype::DType;
use crate::layout::{QLayout, Strides};

/// New keys and values: written to the cache at rows `seqused_k[b] ..`, then attended to like the rest.
///
/// k_new `[batch, seqlen_new, num_heads_kv, head_dim_qk]` and v_new `[.., head_dim_v]`, in the types of K and V,
/// or packed by `cu_seqlens_new`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Append {
    /// A batch axis, or sequences one after another.
    pub layout: QLayout,
    /// New rows of a sequence; packed, an upper bound over the sequences.
    pub seqlen_new: u32,
    /// Strides of k_new.
    pub k_new: Strides,
    /// Strides of v_new; unused where V lies in K.
    pub v_new: Strides,
}

/// Pairs of a row's elements that the rotation combines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RotaryPairs {
    /// 2i and 2i + 1 (GPT-J).
    Interleaved,
    /// i and i + dim / 2 (GPT-NeoX).
    Half,
}

/// Rotary embedding: Q's rows, and k_new's before they are written, are turned by their positions' angles,
/// computed in f32 and rounded to their type once.
///
/// cos and sin are `[max_pos, dim / 2]`, contiguous. A new key stands at the row it is written to; query i
/// at `seqused_k[b] + i` under a causal mask or a window, and at `seqused_k[b]` otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotary {
    /// Number of leading elements of a row that are rotated: even, at most `head_dim_qk`.
    pub dim: u32,
    /// Way in which elements are paired for a rotation.
    pub pairs: RotaryPairs,
    /// Rows of cos and sin.
    pub max_pos: u32,
    /// Their type: f32, or that of Q.
    pub dtype: DType,
}

impl Rotary {
    /// Elements of cos, and of sin.
    #[must_use]
    pub fn table_elems(&self) -> u64 {
        u64::from(self.max_pos) * u64::from(self.dim / 2)
    }

    /// The two elements of the i-th pair.
    #[must_use]
    #[inline]
    pub fn pair(&self, i: u32) -> (usize, usize) {
        match self.pairs {
            RotaryPairs::Interleaved => (2 * i as usize, 2 * i as usize + 1),
            RotaryPairs::Half => (i as usize, (i + self.dim / 2) as usize),
        }
    }

    /// Turns a row in place; `angle` gives (cos, sin) of the i-th pair. Two products and a sum, each
    /// rounded to f32: no fused operation, so that every backend has the same bits.
    pub fn turn(&self, row: &mut [f32], angle: impl Fn(u32) -> (f32, f32)) {
        for i in 0..self.dim / 2 {
            let ((a, b), (cos, sin)) = (self.pair(i), angle(i));
            let (x, y) = (row[a], row[b]);
            row[a] = x * cos - y * sin;
            row[b] = y * cos + x * sin;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_turns_by_its_own_angle_and_what_lies_behind_stays() {
        let angle = |i: u32| [(0.5, 2.0), (-3.0, 0.25)][i as usize];
        for (pairs, turned) in [
            // (1, 2) by the first, (3, 5) by the second.
            (
                RotaryPairs::Interleaved,
                [1.0 * 0.5 - 2.0 * 2.0, 2.0 * 0.5 + 1.0 * 2.0, -9.0 - 1.25, -15.0 + 0.75],
            ),
            // (1, 3) and (2, 5).
            (RotaryPairs::Half, [0.5 - 6.0, -6.0 - 1.25, 1.5 + 2.0, -15.0 + 0.5]),
        ] {
            let rotary = Rotary { dim: 4, pairs, max_pos: 3, dtype: DType::F32 };
            let mut row = [1.0, 2.0, 3.0, 5.0, 7.0];
            rotary.turn(&mut row, angle);
            assert_eq!(row[..4], turned, "{pairs:?}");
            assert_eq!(row[4].to_bits(), 7f32.to_bits());
            assert_eq!(rotary.table_elems(), 6);
        }
    }
}
