//! Rows of K and V as a matrix, from which TMA gathers those that lists name (`tile::gather4`).

use fmha_core::{FwdProblem, Shape, Strides, abi_struct};

use crate::nvidia::FwdCall;
use crate::sm90_mla::recipe::Maps;
use crate::tma::{EncodeTensorMap, TensorMapFacts};

abi_struct! {
    /// Index of a row of K or V in the matrix of all rows: `batch * b + row * j + head * h`.
    pub struct MatrixRows {
        /// Rows from a sequence or page to the next.
        pub batch: i32,
        /// Rows from a key to the next.
        pub row: i32,
        /// Rows from a head to the next.
        pub head: i32,
    }
}

abi_struct! {
    /// Last argument of the kernel over lists of keys: the matrices of K and V.
    pub struct GatheredRows {
        /// Matrix of K.
        pub k: MatrixRows,
        /// Matrix of V.
        pub v: MatrixRows,
    }
}

impl GatheredRows {
    /// Argument that no kernel reads.
    pub(crate) const UNREAD: Self =
        Self { k: MatrixRows { batch: 0, row: 0, head: 0 }, v: MatrixRows { batch: 0, row: 0, head: 0 } };
}

/// Elements from the beginning of a row of the matrix to that of the next, and the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Matrix {
    pitch: i64,
    rows: i64,
    index: [i32; 3],
}

impl Matrix {
    /// The matrix of a tensor's rows: their distance is what all its strides are multiples of.
    ///
    /// # Errors
    /// Rows that would overlap, or more than an index counts.
    fn of(name: &str, shape: Shape, strides: Strides) -> Result<Self, String> {
        let axes = [(shape.batch, strides.batch), (shape.seq, strides.seq), (shape.head, strides.head)];
        let used = axes.map(|(extent, stride)| if extent > 1 { stride } else { 0 });
        let pitch = match used.into_iter().fold(0, common_divisor) {
            0 => i64::from(shape.dim.next_multiple_of(8)),
            pitch => pitch,
        };
        if pitch < shape.dim.into() {
            let [batch, row, head] = used;
            return Err(format!(
                "{name}'s strides {batch} of pages or sequences, {row} of rows and {head} of heads make rows of a \
                 matrix every {pitch} elements, fewer than the {} that TMA gathers of each",
                shape.dim
            ));
        }
        let factors = used.map(|stride| stride / pitch);
        let extents = axes.map(|(extent, _)| i64::from(extent.max(1)) - 1);
        let rows = factors.iter().zip(extents).map(|(factor, last)| factor.saturating_mul(last));
        let rows = rows.fold(1i64, i64::saturating_add);
        let index = factors.map(|factor| i32::try_from(factor).ok());
        match index {
            [Some(batch), Some(row), Some(head)] if (1..1 << 31).contains(&rows) => {
                Ok(Self { pitch, rows, index: [batch, row, head] })
            }
            _ => Err(format!("{name} has {rows} rows of {pitch} elements, more than 2^31")),
        }
    }

    const fn params(&self) -> MatrixRows {
        let [batch, row, head] = self.index;
        MatrixRows { batch, row, head }
    }
}

const fn common_divisor(a: i64, b: i64) -> i64 {
    let (mut a, mut b) = (a.abs(), b.abs());
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Whether TMA can gather rows of a problem's K and V.
///
/// # Errors
/// The tensor whose rows make no matrix, and its strides.
pub(crate) fn of_problem(problem: &FwdProblem) -> Result<(), String> {
    Matrix::of("k", problem.shape_k(), problem.strides.k)?;
    Matrix::of("v", problem.shape_v(), problem.strides.v)?;
    Ok(())
}

/// Maps of the matrices of a call's K and V, whose boxes are 64 columns of a row, and what indices are made of.
///
/// # Errors
/// Rows that make no matrix, or what the driver refuses.
pub(crate) fn maps<D: EncodeTensorMap>(call: &FwdCall<'_>) -> fmha_core::Result<(Maps, GatheredRows)> {
    let extents = call.problem.extents(call.args.seq.totals);
    let of = |name: &'static str, address: *const u8, shape: Shape, strides: Strides| {
        let matrix = Matrix::of(name, shape, strides)
            .map_err(|why| fmha_core::ProblemError::new(name, format!("{name}: {why}")))?;
        let has_rows = shape.seq > 0 && shape.batch > 0;
        let facts = TensorMapFacts::<2, 1> {
            name,
            dtype: call.problem.dtypes.qk,
            address: if has_rows { address } else { call.args.q.as_ptr() } as u64,
            dims: [shape.dim.into(), matrix.rows.unsigned_abs()],
            strides_bytes: [2 * matrix.pitch.unsigned_abs()],
            box_dims: [64, 1],
        };
        Ok::<_, fmha_core::Error>((facts.encode::<D>()?, matrix.params()))
    };
    let (of_k, k) = of("k", call.args.k_slice().as_ptr(), extents.k, call.problem.strides.k)?;
    let (of_v, v) = of("v", call.args.v_slice().as_ptr(), extents.v, call.problem.strides.v)?;
    Ok((Maps { k: of_k, v: of_v }, GatheredRows { k, v }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::*;

    #[test]
    fn rows_of_pages_and_heads_are_those_of_one_matrix_or_of_none() {
        let shape = |batch, seq, head, dim| Shape { batch, seq, head, dim };
        let strides = |batch, seq, head| Strides { batch, seq, head, dim: 1 };
        for (shape, strides, pitch, rows, index) in [
            (shape(3, 100, 1, 576), strides(57600, 576, 576), 576, 300, [100, 1, 0]),
            // Rows of 640 elements, a page and one row more from page to page.
            (shape(7, 64, 1, 576), strides(65 * 640, 640, 640), 640, 6 * 65 + 64, [65, 1, 0]),
            (shape(1, 50, 4, 512), strides(0, 2048, 512), 512, 200, [0, 4, 1]),
            // One row alone, and a cache that all sequences share.
            (shape(1, 1, 1, 300), strides(9, 9, 9), 304, 1, [0, 0, 0]),
            (shape(5, 10, 1, 576), strides(0, 576, 576), 576, 10, [0, 1, 0]),
        ] {
            let matrix = Matrix::of("k", shape, strides).unwrap();
            assert_eq!(matrix, Matrix { pitch, rows, index }, "{shape:?}");
        }
        let odd = Matrix::of("k", shape(7, 64, 1, 576), strides(64 * 576 + 8, 576, 576)).unwrap_err();
        assert!(odd.contains("every 8 elements"), "{odd}");
        let many =
            Matrix::of("k", shape(1 << 20, 1 << 20, 1, 512), strides(512 << 20, 512, 512)).unwrap_err();
        assert!(many.contains("more than 2^31"), "{many}");
    }
}
