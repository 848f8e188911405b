//! How a problem uses a KV cache: checks, and values derived from it.

use super::{CacheUse, Dims, FwdProblem, MAX_SEQLEN, check_input, check_output, check_unit_stride};
use crate::dtype::DType;
use crate::error::{ProblemError, Refusal, ensure};
use crate::kv::{Append, Rotary};
use crate::layout::{KvLayout, QLayout, Shape, Strides, Totals, VLayout};
use crate::mask::{MaskShape, MaskSpec};
use crate::score::Descale;

impl Append {
    /// Appended rows with a batch axis, `seqlen_new` for each sequence of the problem, contiguous b·s·h·d.
    #[must_use]
    pub fn batch(problem: &FwdProblem, seqlen_new: u32) -> Self {
        Self::new(QLayout::Batch, problem.dims, seqlen_new)
    }

    /// Packed appended rows, at most `seqlen_new` for each sequence, contiguous s·h·d.
    #[must_use]
    pub fn packed(problem: &FwdProblem, seqlen_new: u32) -> Self {
        Self::new(QLayout::Packed, problem.dims, seqlen_new)
    }

    fn new(layout: QLayout, dims: Dims, seqlen_new: u32) -> Self {
        let k = Shape { batch: dims.batch, seq: seqlen_new, head: dims.num_heads_kv, dim: dims.head_dim_qk };
        let v = Shape { dim: dims.head_dim_v, ..k };
        Self { layout, seqlen_new, k_new: Strides::bshd(k), v_new: Strides::bshd(v) }
    }
}

impl FwdProblem {
    /// The type that K is stored in.
    #[must_use]
    pub fn stored_k(&self) -> DType {
        self.cache.dtype.unwrap_or(self.dtypes.qk)
    }

    /// The type that V is stored in.
    #[must_use]
    pub fn stored_v(&self) -> DType {
        self.cache.dtype.unwrap_or(self.dtypes.v)
    }

    /// Whether query i of a sequence has rotary position i after the first query's; otherwise all queries have one
    /// position.
    #[must_use]
    pub fn positions_advance(&self) -> bool {
        matches!(self.mask.shape, MaskShape::Causal(_) | MaskShape::Window { .. }) || self.cache.tree_mask
    }

    /// Number of u32 words in a query's row of the tree mask.
    #[must_use]
    pub fn tree_mask_words(&self) -> u32 {
        self.dims.seqlen_q.div_ceil(32)
    }

    /// Shapes of k_new and v_new.
    #[must_use]
    pub fn shapes_new(&self, append: &Append, totals: Totals) -> (Shape, Shape) {
        let dims = self.dims;
        let (batch, seq) = match append.layout {
            QLayout::Batch => (dims.batch, append.seqlen_new),
            QLayout::Packed => (1, totals.total_new.unwrap_or(0)),
        };
        let k = Shape { batch, seq, head: dims.num_heads_kv, dim: dims.head_dim_qk };
        (k, Shape { dim: dims.head_dim_v, ..k })
    }

    /// Returns this problem with the cache in Q's type and scale factors applied: results of a plan on a quantised
    /// cache are bit-equal to it. `None` if the cache has Q's type.
    #[must_use]
    pub fn over_wide_cache(&self) -> Option<Self> {
        self.cache.dtype?;
        let mut wide = self.clone();
        (wide.cache.dtype, wide.cache.scales) = (None, None);
        (wide.scales.descale_k, wide.scales.descale_v) = (Descale::None, Descale::None);
        Some(wide)
    }

    pub(crate) fn check_cache(&self) -> Result<(), ProblemError> {
        if let Some(cache) = self.cache.dtype {
            let (qk, v) = (self.dtypes.qk, self.dtypes.v);
            ensure!(
                cache.is_fp8() && matches!(qk, DType::F16 | DType::Bf16) && v == qk,
                "dtype_cache",
                "dtype_cache {cache} does not go with dtype_qk {qk} and dtype_v {v} (FP8 beside 16 bits)"
            );
            ensure!(
                self.cache.append.is_none() || self.cache.scales.is_some(),
                "dtype_cache",
                "dtype_cache {cache} takes no append: 0 ways to round new keys to it are defined without cache_scales"
            );
        }
        if self.cache.v_in_k {
            self.check_v_in_k()?;
        }
        if let Some(append) = &self.cache.append {
            self.check_append(append)?;
        }
        if let Some(rotary) = &self.cache.rotary {
            self.check_rotary(rotary)?;
        }
        // The bounds of the band decide whether it is causal, not the mask's text: `b:-1,0` is causal too.
        let is_causal = self.mask.bounds() == MaskSpec::CAUSAL.bounds() && self.mask.sink_columns == 0;
        ensure!(
            !self.cache.tree_mask || is_causal,
            "tree_mask",
            "tree_mask stands in for the mask 2 (causal, bottom-right), not for {}",
            self.mask
        );
        Ok(())
    }

    fn check_v_in_k(&self) -> Result<(), ProblemError> {
        let dims = self.dims;
        ensure!(
            dims.head_dim_v <= dims.head_dim_qk,
            "v_in_k",
            "v_in_k: head_dim_v {} is larger than head_dim_qk {}",
            dims.head_dim_v,
            dims.head_dim_qk
        );
        let alike = self.strides.v == self.strides.k && self.dtypes.v == self.dtypes.qk;
        ensure!(
            alike && self.layout.v == VLayout::RowMajor && self.scales.descale_v == self.scales.descale_k,
            "v_in_k",
            "v_in_k: V's strides {:?}, type, layout or descale are not K's {:?}",
            self.strides.v,
            self.strides.k
        );
        Ok(())
    }

    fn check_append(&self, append: &Append) -> Result<(), ProblemError> {
        let most = i32::MAX.unsigned_abs();
        let new = append.seqlen_new;
        ensure!(new <= most, "seqlen_new", "seqlen_new {new} is larger than {most}");
        ensure!(
            self.layout.seqused_k,
            "append",
            "append of seqlen_new {new} needs seqused_k, the rows that are there before"
        );
        let (k, v) = self.shapes_new(append, Totals { total_new: Some(new.max(2)), ..Totals::NONE });
        check_input("k_new", append.k_new, k, self.dtypes.qk)?;
        check_unit_stride("k_new", "dim", append.k_new.dim, k.dim)?;
        if !self.cache.v_in_k {
            check_input("v_new", append.v_new, v, self.dtypes.v)?;
            check_unit_stride("v_new", "dim", append.v_new.dim, v.dim)?;
        }
        Ok(())
    }

    fn check_rotary(&self, rotary: &Rotary) -> Result<(), ProblemError> {
        let (dim, most) = (rotary.dim, self.dims.head_dim_qk);
        ensure!(
            dim >= 2 && dim.is_multiple_of(2) && dim <= most,
            "rotary_dim",
            "rotary_dim {dim} is not even in 2..={most} (head_dim_qk)"
        );
        let positions = i32::MAX.unsigned_abs();
        let max_pos = rotary.max_pos;
        ensure!((1..=positions).contains(&max_pos), "max_pos", "max_pos {max_pos} is not in 1..={positions}");
        let qk = self.dtypes.qk;
        ensure!(
            rotary.dtype == DType::F32 || rotary.dtype == qk,
            "rotary.dtype",
            "rotary.dtype {} does not go with dtype_qk {qk} (f32, or Q's type)",
            rotary.dtype
        );
        ensure!(
            self.layout.seqused_k,
            "rotary",
            "rotary of dim {dim} needs seqused_k, the position that it begins at"
        );
        let seqlen_q = self.dims.seqlen_q;
        ensure!(
            self.code.mask.is_none() && self.masks.is_empty() || self.positions_advance() || seqlen_q <= 1,
            "rotary",
            "rotary of dim {dim} under a mask as code or data: whether the positions of seqlen_q {seqlen_q} queries advance is said by a \
             causal mask or a window"
        );
        Ok(())
    }

    /// Checks the strides of the cache tensors that an append writes, for these extents.
    pub(crate) fn check_written_cache(&self, k: Shape, v: Shape) -> Result<(), ProblemError> {
        if self.cache.append.is_none() {
            return Ok(());
        }
        let (k, dtype_k) = self.k_in_memory(k);
        check_output("k", self.strides.k, k, dtype_k)?;
        // Elements of a column-major V are written one by one, so no two of them may share an address either.
        ensure!(
            self.cache.v_in_k || self.strides.v.is_injective(v),
            "v",
            "v strides {:?} give two elements of {v:?} one address",
            self.strides.v
        );
        Ok(())
    }

    /// Refuses, for a kernel, layouts other than a batch axis on both sides or packed rows on both.
    ///
    /// # Errors
    /// Names both layouts.
    pub fn refuse_mixed_layouts(&self, kernel: &'static str) -> Result<(), Refusal> {
        match (self.layout.q, self.layout.kv) {
            (QLayout::Batch, KvLayout::Strided) | (QLayout::Packed, KvLayout::Packed) => Ok(()),
            (q, kv) => Err(Refusal::new(
                kernel,
                format!("q_layout {q:?} with kv_layout {kv:?} is not 1 batch axis or packed rows for both"),
            )),
        }
    }

    /// Refuses a problem, for kernels that only read a plain cache.
    ///
    /// # Errors
    /// The first of append, rotary embedding, quantised cache and tree mask that the problem has.
    pub fn refuse_cache_updates(&self, kernel: &'static str) -> Result<(), Refusal> {
        let text = match self.cache {
            CacheUse { append: Some(append), .. } => format!("append of seqlen_new {}", append.seqlen_new),
            CacheUse { rotary: Some(rotary), .. } => format!("rotary embedding of dim {}", rotary.dim),
            CacheUse { dtype: Some(cache), .. } => format!("dtype_cache {cache} beside {}", self.dtypes.qk),
            CacheUse { rows: Some(rows), .. } => format!("cache_rows of {} bytes", rows.row_bytes()),
            CacheUse { tree_mask: true, .. } => format!("tree_mask of {} queries", self.dims.seqlen_q),
            _ => return Ok(()),
        };
        Err(Refusal::new(kernel, format!("{text} is not taken")))
    }

    /// Checks that each total is given iff the problem needs it, and that none is too large.
    ///
    /// # Errors
    /// The first total that is missing, given without need, or larger than [`MAX_SEQLEN`].
    #[inline]
    pub fn check_totals(&self, totals: Totals) -> Result<(), ProblemError> {
        let packs_new = self.cache.append.is_some_and(|append| append.layout == QLayout::Packed);
        check_total("total_q", totals.total_q, self.layout.q == QLayout::Packed, "Q is packed")?;
        let packs_k = self.layout.kv == KvLayout::Packed;
        check_total("total_k", totals.total_k, packs_k, "K and V are packed")?;
        check_total("num_pages", totals.num_pages, self.layout.kv.is_paged(), "K and V are paged")?;
        check_total("total_new", totals.total_new, packs_new, "k_new and v_new are packed")
    }
}

/// Checks one total, which must be given iff the condition that `what` describes holds.
#[inline]
fn check_total(
    field: &'static str,
    total: Option<u32>,
    wanted: bool,
    what: &str,
) -> Result<(), ProblemError> {
    match total {
        Some(total) => {
            ensure!(wanted, field, "{field} {total} is given, but it is not so that {what}");
            ensure!(total <= MAX_SEQLEN, field, "{field} {total} is larger than {MAX_SEQLEN}");
        }
        None => ensure!(!wanted, field, "{field} is missing: {what}"),
    }
    Ok(())
}
