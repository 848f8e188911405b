//! The combine problem: partial results over the same rows, merged by their LSE.
//!
//! Split-KV, shared prefixes, multi-segment caches and ring attention all end with this step: `LSE = ln sum_n exp
//! LSE_n`, `O = sum_n exp(LSE_n - LSE) O_n`. A part whose LSE is −inf is neutral, whatever its O holds.
//!
//! Gradients of parts are merged by adding them, [`Merge::Sum`]: there is no LSE, `O = sum_n O_n`.

use crate::dtype::DType;
use crate::error::{ProblemError, ensure};
use crate::layout::{Shape, Strides};
use crate::problem::{MAX_HEAD_DIM, MAX_SEQLEN, check_input, check_output, check_unit_stride};
use crate::setters::setters;

/// How partial results over the same rows are merged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Merge {
    /// Parts are weighted by their LSE.
    #[default]
    ByLse,
    /// Parts are added in f32, in their order, and the sum is rounded once. LSE is not read. The sum of no
    /// parts is 0.
    Sum,
    /// Parts are added as in [`Sum`](Self::Sum), and O's old content is the first term.
    AddTo,
}

/// A combine call without its pointers. Packed rows are a batch of one.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CombineProblem {
    /// Number of parts to merge.
    #[doc(alias = "num_splits")]
    pub num_parts: u32,
    /// Number of sequences.
    pub batch: u32,
    /// Number of rows of each sequence.
    pub seqlen_q: u32,
    /// Number of heads.
    pub num_heads_q: u32,
    /// Elements in a row of O.
    pub head_dim_v: u32,
    /// The type of the parts' O: f32, f16 or bf16.
    pub dtype_part: DType,
    /// The type of the combined O: f32, f16 or bf16.
    pub dtype_o: DType,
    /// Strides of every part's O.
    pub part: Strides,
    /// Strides of the combined O.
    pub o: Strides,
    /// Whether the combined LSE is written, f32 `[batch, num_heads_q, seqlen_q]`.
    pub write_lse: bool,
    /// How the partial results are merged.
    pub merge: Merge,
}

impl CombineProblem {
    /// Makes a problem with contiguous b·s·h·d parts and O.
    #[must_use]
    pub fn new(num_parts: u32, dtype_part: DType, dtype_o: DType, rows: Shape) -> Self {
        Self {
            num_parts,
            batch: rows.batch,
            seqlen_q: rows.seq,
            num_heads_q: rows.head,
            head_dim_v: rows.dim,
            dtype_part,
            dtype_o,
            part: Strides::bshd(rows),
            o: Strides::bshd(rows),
            write_lse: false,
            merge: Merge::ByLse,
        }
    }

    setters! {
        /// Strides of every part's O.
        strides_part: Strides => part;
        /// Strides of the combined O.
        strides_o: Strides => o;
        /// Whether the combined LSE is written.
        write_lse: bool => write_lse;
        /// How the partial results are merged.
        merge: Merge => merge;
    }

    /// Whether parts are added, without an LSE.
    #[must_use]
    pub fn adds(&self) -> bool {
        self.merge != Merge::ByLse
    }

    /// Shape of each O.
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape { batch: self.batch, seq: self.seqlen_q, head: self.num_heads_q, dim: self.head_dim_v }
    }

    /// Number of elements of each LSE.
    #[must_use]
    pub fn lse_elems(&self) -> u64 {
        Shape { dim: 1, ..self.shape() }.num_elems()
    }

    /// Checks everything that can be checked without the device.
    ///
    /// # Errors
    /// The first contradiction found, with the field's name and its number.
    pub fn validate(self) -> Result<ValidCombine, ProblemError> {
        for (field, value, least) in [
            ("num_parts", self.num_parts, u32::from(!self.adds())),
            ("batch", self.batch, 0),
            ("num_heads_q", self.num_heads_q, 1),
        ] {
            let most = i32::MAX.unsigned_abs();
            ensure!((least..=most).contains(&value), field, "{field} {value} is not in {least}..={most}");
        }
        ensure!(!(self.adds() && self.write_lse), "write_lse", "write_lse true: a sum of parts has no LSE");
        let rows = self.seqlen_q;
        ensure!(rows <= MAX_SEQLEN, "seqlen_q", "seqlen_q {rows} is larger than {MAX_SEQLEN}");
        let dim = self.head_dim_v;
        ensure!(
            (1..=MAX_HEAD_DIM).contains(&dim),
            "head_dim_v",
            "head_dim_v {dim} is not in 1..={MAX_HEAD_DIM}"
        );
        for (field, dtype) in [("dtype_part", self.dtype_part), ("dtype_o", self.dtype_o)] {
            ensure!(!dtype.is_fp8(), field, "{field} {dtype} is not f32, f16 or bf16");
        }
        check_input("part", self.part, self.shape(), self.dtype_part)?;
        check_unit_stride("part", "dim", self.part.dim, dim)?;
        check_output("o", self.o, self.shape(), self.dtype_o)?;
        Ok(ValidCombine(self))
    }
}

/// A combine problem without contradictions, made by [`CombineProblem::validate`].
#[derive(Clone, Debug, PartialEq)]
pub struct ValidCombine(CombineProblem);

impl std::ops::Deref for ValidCombine {
    type Target = CombineProblem;

    fn deref(&self) -> &CombineProblem {
        &self.0
    }
}
