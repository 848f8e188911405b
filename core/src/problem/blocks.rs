//! Scales by blocks: Q, K and V in a format with one scale for each block of elements.

use super::{FwdProblem, check_input, check_unit_stride, check_v};
use crate::block_scales::BlockFormat;
use crate::dtype::DType;
use crate::error::{ProblemError, Refusal, ensure};
use crate::layout::{KvLayout, Shape, Strides, Totals, VLayout};
use crate::problem::Extents;
use crate::score::Descale;

/// Storage of Q, K and V in a format with scales by blocks. `dtype_qk` and `dtype_v` are then the type of the
/// values after multiplication by their scales, bf16 or f32.
///
/// Scales of Q and K are `[.., head, ceil(head_dim_qk / block)]` beside the tensor's own axes; those of V have blocks
/// of keys, `[batch, ceil(seqlen_k / block), num_heads_kv, head_dim_v]`, paged `[num_pages, page_size / block, ..]`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BlockScales {
    /// Format of the elements and scales.
    pub format: BlockFormat,
    /// Strides of Q's scales, in scales.
    pub q: Strides,
    /// Strides of K's scales, in scales.
    pub k: Strides,
    /// Strides of V's scales, in scales.
    pub v: Strides,
}

impl BlockScales {
    /// Scales of a problem's tensors in this format, contiguous.
    #[must_use]
    pub fn new(problem: &FwdProblem, format: BlockFormat) -> Self {
        let unset = Strides { batch: 0, seq: 0, head: 0, dim: 1 };
        let unset = Self { format, q: unset, k: unset, v: unset };
        let [q, k, v] = unset.shapes(&problem.longest()).map(Strides::bshd);
        Self { q, k, v, ..unset }
    }

    /// Scales of Q, K and V in this format, with these strides.
    #[must_use]
    pub fn strided(format: BlockFormat, [q, k, v]: [Strides; 3]) -> Self {
        Self { format, q, k, v }
    }

    crate::setters::setters! {
        /// Strides of Q's scales.
        strides_q: Strides => q;
        /// Strides of K's scales.
        strides_k: Strides => k;
        /// Strides of V's scales.
        strides_v: Strides => v;
    }

    /// Shapes of the scales of Q, K and V, for tensors with these extents.
    #[must_use]
    pub fn shapes(&self, extents: &Extents) -> [Shape; 3] {
        let block = self.format.block_size();
        let along_dim = |shape: Shape| Shape { dim: shape.dim.div_ceil(block), ..shape };
        let v = Shape { seq: extents.v.seq.div_ceil(block), ..extents.v };
        [along_dim(extents.q), along_dim(extents.k), v]
    }

    /// Shapes of the stored Q, K and V of these extents, in bytes: for NVFP4 the axis with stride 1 counts pairs.
    #[must_use]
    pub fn stored(&self, extents: &Extents, v_layout: VLayout) -> [Shape; 3] {
        let each = self.format.elems_per_byte();
        let along_dim = |shape: Shape| Shape { dim: shape.dim.div_ceil(each), ..shape };
        let v = match v_layout {
            VLayout::RowMajor => along_dim(extents.v),
            VLayout::ColMajor => Shape { seq: extents.v.seq.div_ceil(each), ..extents.v },
        };
        [along_dim(extents.q), along_dim(extents.k), v]
    }

    /// Strides of the scales of Q, K and V.
    #[must_use]
    pub fn strides(&self) -> [Strides; 3] {
        [self.q, self.k, self.v]
    }
}

/// Names of the scales of Q, K and V.
pub(crate) const SCALE_NAMES: [&str; 3] = ["block_scale_q", "block_scale_k", "block_scale_v"];

/// A data type of one byte, the size of elements in block formats and of their scales.
pub(crate) const BYTE: DType = DType::E4m3Fn;

impl FwdProblem {
    /// Stores Q, K and V in a format with scales by blocks, contiguous, in place of `dtype_qk` and `dtype_v`.
    #[must_use]
    pub fn with_block_scales(mut self, format: BlockFormat) -> Self {
        let scales = BlockScales::new(&self, format);
        let [q, k, v] = scales.stored(&self.longest(), self.layout.v);
        (self.strides.q, self.strides.k) = (Strides::bshd(q), Strides::bshd(k));
        self.strides.v = match self.layout.v {
            VLayout::RowMajor => Strides::bshd(v),
            VLayout::ColMajor => Strides::bhds(v),
        };
        self.block_scales(scales)
    }

    /// The equivalent problem on Q, K and V after multiplication by their scales: Q in its layout, contiguous; K
    /// and V with a batch axis, rows in sequence, `longest` rows per sequence. `None` without scales by blocks.
    #[must_use]
    pub fn over_values(&self, totals: Totals, longest: u32) -> Option<Self> {
        self.block_scales?;
        let extents = self.extents(totals);
        let mut values = self.clone();
        values.block_scales = None;
        let k = Shape { batch: self.dims.batch, seq: longest, ..extents.k };
        let shapes = [extents.q, k, Shape { dim: extents.v.dim, ..k }];
        [values.strides.q, values.strides.k, values.strides.v] = shapes.map(Strides::bshd);
        (values.layout.kv, values.layout.v) = (KvLayout::Strided, VLayout::RowMajor);
        let none = Descale::None;
        (values.scales.descale_q, values.scales.descale_k, values.scales.descale_v) = (none, none, none);
        Some(values)
    }

    /// Checks scales by blocks.
    ///
    /// # Errors
    /// The name of a field that cannot be combined with scales by blocks.
    pub(super) fn check_block_scales(&self) -> Result<(), ProblemError> {
        let Some(scales) = &self.block_scales else { return Ok(()) };
        let (format, block) = (scales.format, scales.format.block_size());
        for (field, dtype) in [("dtype_qk", self.dtypes.qk), ("dtype_v", self.dtypes.v)] {
            ensure!(
                matches!(dtype, DType::Bf16 | DType::F32),
                field,
                "{field} {dtype} beside block_scales {format} is not bf16 or f32, the types of its values"
            );
        }
        ensure!(
            self.layout.kv != KvLayout::Packed,
            "kv_layout",
            "kv_layout packed: sequences of K begin anywhere in blocks of {block} keys, which V's block_scales \
             {format} need not"
        );
        if let KvLayout::Paged { page_size } = self.layout.kv {
            ensure!(
                page_size.is_multiple_of(block),
                "page_size",
                "page_size {page_size} is not a multiple of the {block} keys of a block in block_scales {format}"
            );
        }
        let cache = &self.cache;
        let refused = if let Some(dtype) = cache.dtype {
            Some(("dtype_cache", format!("dtype_cache {dtype}")))
        } else if cache.v_in_k {
            Some(("v_in_k", format!("v_in_k of head_dim_v {}", self.dims.head_dim_v)))
        } else if let Some(append) = cache.append {
            Some(("append", format!("append of seqlen_new {}", append.seqlen_new)))
        } else if let Some(rotary) = cache.rotary {
            Some(("rotary", format!("rotary of dim {}", rotary.dim)))
        } else if let Some(lists) = self.lists {
            Some(("indices", format!("indices of topk {}", lists.topk)))
        } else if self.arrivals > 0 {
            Some(("arrivals", format!("arrivals {}", self.arrivals)))
        } else if !self.part.is_whole() {
            let part = &self.part;
            let text = format!("position_q {} and position_k {}", part.position_q, part.position_k);
            Some(("part", text))
        } else {
            None
        };
        if let Some((field, what)) = refused {
            let text = format!("{field}: {what} beside block_scales {format} is not served");
            return Err(ProblemError::new(field, text));
        }
        Ok(())
    }

    /// Checks the strides of Q, K, V and their scales.
    ///
    /// # Errors
    /// Strides that do not fit these extents.
    pub(super) fn check_scaled_tensors(
        &self,
        scales: &BlockScales,
        extents: &Extents,
    ) -> Result<(), ProblemError> {
        let [q, k, v] = scales.stored(extents, self.layout.v);
        check_input("q", self.strides.q, q, BYTE)?;
        check_input("k", self.strides.k, k, BYTE)?;
        check_unit_stride("q", "dim", self.strides.q.dim, q.dim)?;
        check_unit_stride("k", "dim", self.strides.k.dim, k.dim)?;
        check_v("v", self.strides.v, self.layout.v, v, BYTE)?;
        let shapes = scales.shapes(extents);
        for ((name, strides), shape) in SCALE_NAMES.into_iter().zip(scales.strides()).zip(shapes) {
            check_input(name, strides, shape, BYTE)?;
        }
        Ok(())
    }

    /// Refuses a problem for kernels that read no scales by blocks.
    ///
    /// # Errors
    /// Scales by blocks.
    pub fn refuse_block_scales(&self, kernel: &str) -> Result<(), Refusal> {
        match &self.block_scales {
            None => Ok(()),
            Some(scales) => {
                Err(Refusal::new(kernel, format!("block_scales {} is not in this kernel", scales.format)))
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::*;
    use crate::args::{DevSlice, DevSliceMut, FwdArgs, MemorySpace, ScoreArgs, check_fwd};
    use crate::block_scales::{E2m1Pair, E8m0};
    use crate::fp8::E4m3Fn;
    use crate::kv::{Append, Rotary, RotaryPairs};
    use crate::{BwdProblem, Dims, KeyLists, Part, Workspace};

    fn dims() -> Dims {
        Dims::batch(2).seqlens(3, 40).heads(4, 2).head_dims(48, 24)
    }

    fn problem(format: BlockFormat) -> FwdProblem {
        FwdProblem::batch(DType::Bf16, dims()).with_block_scales(format)
    }

    #[test]
    fn shapes_have_a_scale_for_each_block_and_a_byte_for_each_pair() {
        let extents = problem(BlockFormat::Nvfp4).extents(Totals::NONE);
        let of = |format| problem(format).block_scales.unwrap();
        let dims = |shapes: [Shape; 3]| shapes.map(|shape| (shape.seq, shape.dim));
        assert_eq!(dims(of(BlockFormat::Mxfp8E4m3).shapes(&extents)), [(3, 2), (40, 2), (2, 24)]);
        assert_eq!(dims(of(BlockFormat::Nvfp4).shapes(&extents)), [(3, 3), (40, 3), (3, 24)]);
        let stored = |format, layout| dims(of(format).stored(&extents, layout));
        assert_eq!(stored(BlockFormat::Mxfp8E5m2, VLayout::RowMajor), [(3, 48), (40, 48), (40, 24)]);
        assert_eq!(stored(BlockFormat::Nvfp4, VLayout::RowMajor), [(3, 24), (40, 24), (40, 12)]);
        assert_eq!(stored(BlockFormat::Nvfp4, VLayout::ColMajor), [(3, 24), (40, 24), (20, 24)]);
    }

    #[test]
    fn what_does_not_go_with_scales_by_blocks_is_refused_by_its_name() {
        for format in BlockFormat::ALL {
            let (sound, block) = (problem(format), format.block_size());
            sound.clone().validate().unwrap();
            let rotary = Rotary { dim: 8, pairs: RotaryPairs::Half, max_pos: 64, dtype: DType::F32 };
            let paged = |page_size| {
                let layout = KvLayout::Paged { page_size };
                FwdProblem::new(crate::QLayout::Batch, layout, DType::Bf16, dims()).with_block_scales(format)
            };
            paged(2 * block).validate().unwrap();
            let scales = sound.block_scales.unwrap();
            let backwards = Strides { batch: 8, seq: -4, head: 4, dim: 1 };
            for (problem, field, number) in [
                (sound.clone().dtype_qk(DType::F16).dtype_v(DType::F16), "dtype_qk", "f16"),
                (FwdProblem::group(DType::Bf16, dims()).with_block_scales(format), "kv_layout", "packed"),
                (paged(24), "page_size", "page_size 24"),
                (sound.clone().v_in_k(true), "v_in_k", "head_dim_v 24"),
                (sound.clone().append(Append::batch(&sound, 1)), "append", "seqlen_new 1"),
                (sound.clone().rotary(rotary), "rotary", "dim 8"),
                (sound.clone().lists(KeyLists::new(&sound, 4)), "indices", "topk 4"),
                (sound.clone().arrivals(2), "arrivals", "arrivals 2"),
                (sound.clone().part(Part { position_q: 3, ..Part::default() }), "part", "position_q 3"),
                (
                    sound.clone().block_scales(scales.strides_k(backwards)),
                    "block_scale_k",
                    "block_scale_k.seq stride -4",
                ),
            ] {
                let error = problem.validate().unwrap_err();
                assert_eq!(error.field, field, "{error}");
                assert!(error.text.contains(number), "{error}");
            }
            let error = BwdProblem::new(paged(2 * block)).validate().unwrap_err();
            assert_eq!(error.field, "kv_layout");
            assert!(error.text.contains("page_size"), "{error}");
        }
    }

    #[test]
    fn gradients_are_those_of_the_values_and_lie_on_their_own() {
        for format in BlockFormat::ALL {
            let sound = BwdProblem::new(problem(format)).validate().unwrap();
            assert_eq!(sound.dtype_grad, DType::Bf16);
            assert_eq!(sound.dq, Strides::bshd(sound.fwd.shape_q()));
            assert_eq!(sound.dv, Strides::bshd(sound.fwd.shape_v()));
            let values = sound.over_values(Totals::NONE).unwrap().validate().unwrap();
            assert_eq!(values.fwd.block_scales, None);
            assert_eq!(values.fwd.strides.k, Strides::bshd(values.fwd.shape_k()));
            assert_eq!((values.dq, values.dk, values.dv), (sound.dq, sound.dk, sound.dv));
            assert!(values.over_values(Totals::NONE).is_none());
        }
    }

    #[test]
    fn elements_and_scales_are_of_the_formats_types_and_as_many() {
        let of_format = problem(BlockFormat::Nvfp4);
        let (q, k, v) =
            ([E2m1Pair::default(); 576], [E2m1Pair::default(); 3840], [E2m1Pair::default(); 1920]);
        let ([of_q, of_k, of_v], mut o) = ([[E4m3Fn::default(); 512]; 3], [half::bf16::ZERO; 576]);
        let powers = [E8m0::default(); 512];
        let scales = ScoreArgs::default()
            .block_scale_q(DevSlice::host(&of_q))
            .block_scale_k(DevSlice::host(&of_k))
            .block_scale_v(DevSlice::host(&of_v));
        let mut check = |problem: FwdProblem, q, score: ScoreArgs<'_>| {
            let args = FwdArgs::new(q, DevSlice::host(&k), DevSlice::host(&v), DevSliceMut::host(&mut o));
            let problem = problem.validate().unwrap();
            let checked = check_fwd(&problem, &args.score(score), Workspace::NONE, MemorySpace::Host);
            checked.err().map_or(String::new(), |error| error.text)
        };
        let pairs = DevSlice::host(&q);
        assert_eq!(check(of_format.clone(), pairs, scales), "");
        let error = check(of_format.clone(), pairs, scales.block_scale_v(None));
        assert_eq!(error, "block_scale_v is missing: 288 bytes are wanted");
        let error = check(of_format.clone(), pairs, scales.block_scale_k(DevSlice::host(&powers)));
        assert!(error.starts_with("block_scale_k has elements of e8m0, but the problem has it in e4m3fn"));
        let error = check(of_format.clone(), pairs, scales.block_scale_q(DevSlice::host(&of_q[..3])));
        assert!(error.starts_with("block_scale_q has 3 bytes"), "{error}");
        let error = check(of_format.clone(), DevSlice::host(&of_q), scales);
        assert!(error.starts_with("q has elements of e4m3fn, but the problem has it in pairs of e2m1"));
        let error = check(of_format, DevSlice::host(&q[..8]), scales);
        assert!(error.starts_with("q has 8 bytes"), "{error}");
        let plain = FwdProblem::batch(DType::Bf16, dims());
        let halves = [half::bf16::ZERO; 8192];
        let halves = DevSlice::host(&halves);
        let args = FwdArgs::new(halves, halves, halves, DevSliceMut::host(&mut o)).score(scales);
        let error = check_fwd(&plain.validate().unwrap(), &args, Workspace::NONE, MemorySpace::Host);
        assert!(error.unwrap_err().text.starts_with("block_scale_q is given, but the problem has none"));
    }
}
