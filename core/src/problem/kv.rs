//! How a call uses a KV cache besides reading it: it appends new keys and values, applies rotary embeddings, and
//! converts a cache in a narrow type to the type of its arithmetic.

use crate::dtype::DType;
use crate::layout::{QLayout, Strides};

/// New keys and values: written to the cache from row `seqused_k[b]` on, then used like the other keys.
///
/// The shapes are k_new `[batch, seqlen_new, num_heads_kv, head_dim_qk]` and v_new `[.., head_dim_v]`, in the types of
/// K and V, or packed by `cu_seqlens_new`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Append {
    /// Layout of the new rows: a batch axis, or sequences one after another.
    pub layout: QLayout,
    /// Number of new rows of each sequence; with packed rows, an upper bound over the sequences.
    pub seqlen_new: u32,
    /// Strides of k_new.
    pub k_new: Strides,
    /// Strides of v_new; unused if V lies in K.
    pub v_new: Strides,
}

/// Which two elements of a row form a pair that the rotation combines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RotaryPairs {
    /// Elements 2i and 2i + 1 form a pair (GPT-J).
    Interleaved,
    /// Elements i and i + dim / 2 form a pair (GPT-NeoX).
    Half,
}

/// Rotary embedding: Q's rows, and k_new's rows before they are written, are rotated by the angles of their
/// positions, in f32, and rounded to their type once.
///
/// cos and sin are `[max_pos, dim / 2]`, contiguous. A new key's position is the row that it is written to; query i
/// has position `seqused_k[b] + i` under a causal mask or a window, and `seqused_k[b]` otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotary {
    /// Number of leading elements of a row that are rotated: even, at most `head_dim_qk`.
    pub dim: u32,
    /// Which elements of a row form a pair that is rotated.
    pub pairs: RotaryPairs,
    /// Number of rows of cos and sin.
    pub max_pos: u32,
    /// Type of cos and sin: f32, or that of Q.
    pub dtype: DType,
}

impl Rotary {
    /// Number of elements of cos, and of sin.
    #[must_use]
    pub fn table_elems(&self) -> u64 {
        u64::from(self.max_pos) * u64::from(self.dim / 2)
    }

    /// Indices of the two elements of the i-th pair.
    #[must_use]
    #[inline]
    pub fn pair(&self, i: u32) -> (usize, usize) {
        match self.pairs {
            RotaryPairs::Interleaved => (2 * i as usize, 2 * i as usize + 1),
            RotaryPairs::Half => (i as usize, (i + self.dim / 2) as usize),
        }
    }

    /// Rotates a row in place; `angle` gives (cos, sin) of the i-th pair. Each element is two products and a sum,
    /// each rounded to f32: without fused operations every backend gets equal bits.
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
            // The first layout pairs elements (1, 2), the second (3, 5).
            (
                RotaryPairs::Interleaved,
                [1.0 * 0.5 - 2.0 * 2.0, 2.0 * 0.5 + 1.0 * 2.0, -9.0 - 1.25, -15.0 + 0.75],
            ),
            // The pairs are (1, 3) and (2, 5).
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
