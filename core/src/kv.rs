//! What a call does with a KV cache besides reading it: new keys and values appended, positions rotated
//! in, a cache that is narrower than its arithmetic.

use crate::args::{CacheArgs, SeqArgs};
use crate::dtype::DType;
use crate::error::{ProblemError, ensure};
use crate::layout::{KvLayout, QLayout, Shape, Strides};
use crate::mask::{MaskAlign, MaskShape, MaskSpec};
use crate::problem::{FwdProblem, check_input, check_output, check_unit_stride};
use crate::seq::{SeqSpan, Totals};

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

impl Append {
    /// `seqlen_new` rows a sequence, contiguous b·s·h·d.
    #[must_use]
    pub fn batch(problem: &FwdProblem, seqlen_new: u32) -> Self {
        Self::new(problem, QLayout::Batch, seqlen_new)
    }

    /// At most `seqlen_new` rows a sequence, packed, contiguous s·h·d.
    #[must_use]
    pub fn packed(problem: &FwdProblem, seqlen_new: u32) -> Self {
        Self::new(problem, QLayout::Packed, seqlen_new)
    }

    fn new(problem: &FwdProblem, layout: QLayout, seqlen_new: u32) -> Self {
        let dims = problem.dims;
        let k = Shape { batch: dims.batch, seq: seqlen_new, head: dims.num_heads_kv, dim: dims.head_dim_qk };
        let v = Shape { dim: dims.head_dim_v, ..k };
        Self { layout, seqlen_new, k_new: Strides::bshd(k), v_new: Strides::bshd(v) }
    }
}

/// Which elements of a row turn about each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// Leading elements of a row that turn: even, at most `head_dim_qk`.
    pub dim: u32,
    /// Which of them together.
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

/// Which of a sequence's last keys each of its queries sees, in host memory.
#[derive(Clone, Copy, Debug)]
pub struct TreeMask<'a> {
    words: &'a [u8],
    /// Words of a query's row.
    row_words: u32,
    /// Queries of a sequence; the batch index is 0 where they are packed.
    rows: u32,
}

impl<'a> TreeMask<'a> {
    /// That of a call whose arguments have passed the check; `None` where it has none.
    #[must_use]
    pub fn of(problem: &FwdProblem, cache: &CacheArgs<'a>, seq: &SeqArgs<'_>) -> Option<Self> {
        let words = cache.tree_mask.as_ref().filter(|_| problem.tree_mask)?.as_host()?;
        let rows = seq.totals.total_q.unwrap_or(problem.dims.seqlen_q);
        Some(Self { words, row_words: problem.tree_mask_words(), rows })
    }

    /// Whether query `i` of a sequence sees key `j`.
    #[must_use]
    pub fn visible(&self, span: &SeqSpan, i: u32, j: u32) -> bool {
        let Some(bit) = (j + span.seqlen_q).checked_sub(span.seqlen_k) else { return true };
        let row = span.q_batch as usize * self.rows as usize + span.q_row as usize + i as usize;
        let at = (row * self.row_words as usize + (bit / 32) as usize) * 4;
        let word = self.words.get(at..at + 4).map_or(0, bytemuck::pod_read_unaligned::<u32>);
        word >> (bit % 32) & 1 != 0
    }
}

impl FwdProblem {
    /// The type that K is stored in.
    #[must_use]
    pub fn stored_k(&self) -> DType {
        self.dtype_cache.unwrap_or(self.dtype_qk)
    }

    /// The type that V is stored in.
    #[must_use]
    pub fn stored_v(&self) -> DType {
        self.dtype_cache.unwrap_or(self.dtype_v)
    }

    /// Whether query i of a sequence stands i rows after its first one, and not all on one position.
    #[must_use]
    pub fn positions_advance(&self) -> bool {
        matches!(self.mask.shape, MaskShape::Causal(_) | MaskShape::Window { .. }) || self.tree_mask
    }

    /// Words of a query's row of the tree mask.
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

    pub(crate) fn check_cache(&self) -> Result<(), ProblemError> {
        if let Some(cache) = self.dtype_cache {
            let (qk, v) = (self.dtype_qk, self.dtype_v);
            ensure!(
                cache.is_fp8() && matches!(qk, DType::F16 | DType::Bf16) && v == qk,
                "dtype_cache",
                "dtype_cache {cache} does not go with dtype_qk {qk} and dtype_v {v} (FP8 beside 16 bits)"
            );
            ensure!(
                self.append.is_none(),
                "dtype_cache",
                "dtype_cache {cache} takes no append: 0 ways to round new keys to it are defined"
            );
        }
        if self.v_in_k {
            self.check_v_in_k()?;
        }
        if let Some(append) = &self.append {
            self.check_append(append)?;
        }
        if let Some(rotary) = &self.rotary {
            self.check_rotary(rotary)?;
        }
        let plain = MaskSpec { shape: MaskShape::Causal(MaskAlign::BottomRight), sink_columns: 0 };
        ensure!(
            !self.tree_mask || self.mask == plain,
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
        let alike = self.v == self.k && self.dtype_v == self.dtype_qk;
        ensure!(
            alike && self.v_layout == crate::layout::VLayout::RowMajor && self.descale_v == self.descale_k,
            "v_in_k",
            "v_in_k: V's strides {:?}, type, layout or descale are not K's {:?}",
            self.v,
            self.k
        );
        Ok(())
    }

    fn check_append(&self, append: &Append) -> Result<(), ProblemError> {
        let most = i32::MAX.unsigned_abs();
        let new = append.seqlen_new;
        ensure!(new <= most, "seqlen_new", "seqlen_new {new} is larger than {most}");
        ensure!(
            self.seqused_k,
            "append",
            "append of seqlen_new {new} needs seqused_k, the rows that are there before"
        );
        let (k, v) = self.shapes_new(append, Totals { total_new: Some(new.max(2)), ..Totals::NONE });
        check_input("k_new", append.k_new, k, self.dtype_qk)?;
        check_unit_stride("k_new", "dim", append.k_new.dim, k.dim)?;
        if !self.v_in_k {
            check_input("v_new", append.v_new, v, self.dtype_v)?;
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
        let qk = self.dtype_qk;
        ensure!(
            (rotary.dtype == DType::F32 || rotary.dtype == qk) && !qk.is_fp8(),
            "rotary.dtype",
            "rotary.dtype {} does not go with dtype_qk {qk} (f32, or Q's type, which is not FP8)",
            rotary.dtype
        );
        ensure!(
            self.seqused_k,
            "rotary",
            "rotary of dim {dim} needs seqused_k, the position that it begins at"
        );
        Ok(())
    }

    /// The strides of what an append writes, for these extents.
    pub(crate) fn check_written_cache(&self, k: Shape, v: Shape) -> Result<(), ProblemError> {
        if self.append.is_none() {
            return Ok(());
        }
        check_output("k", self.k, k, self.dtype_qk)?;
        // A column-major V is written by elements: no two of them may share an address either.
        ensure!(
            self.v_in_k || self.v.is_injective(v),
            "v",
            "v strides {:?} give two elements of {v:?} one address",
            self.v
        );
        Ok(())
    }

    /// Refuses, in a kernel's name, what it does to a cache besides reading it.
    ///
    /// # Errors
    /// The first of append, rotary embedding, quantised cache and tree mask that the problem has.
    pub fn refuse_cache_updates(&self, kernel: &'static str) -> Result<(), crate::Refusal> {
        let text = match self {
            Self { append: Some(append), .. } => format!("append of seqlen_new {}", append.seqlen_new),
            Self { rotary: Some(rotary), .. } => format!("rotary embedding of dim {}", rotary.dim),
            Self { dtype_cache: Some(cache), .. } => format!("dtype_cache {cache} beside {}", self.dtype_qk),
            Self { tree_mask: true, .. } => format!("tree_mask of {} queries", self.dims.seqlen_q),
            _ => return Ok(()),
        };
        Err(crate::Refusal::new(kernel, format!("{text} is not taken")))
    }
}

impl KvLayout {
    /// Whether K and V are paged.
    #[must_use]
    pub fn is_paged(self) -> bool {
        matches!(self, KvLayout::Paged { .. })
    }
}
