//! Scales of an FP8 cache by rows: one for each token and head, or for a block of tokens.

use super::{FwdProblem, check_input, check_output};
use crate::dtype::DType;
use crate::error::{ProblemError, Refusal, ensure};
use crate::layout::{KvLayout, Shape, Strides, VLayout};

/// Scales of K and of V in a cache of FP8 beside a 16-bit Q (`dtype_cache`), f32: each kv head of each block of
/// `block` rows has one. An element is multiplied by its scale in f32 and rounded to `dtype_qk` before anything else.
///
/// Scales lie beside the cache's own axes, `[batch, ceil(seqlen_k / block), num_heads_kv]`, packed `[total_k, ..]`,
/// paged `[num_pages, page_size / block, ..]`, with strides of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct CacheScales {
    /// Number of rows that share a scale: with 1 each token and head has a scale.
    pub block: u32,
    /// Strides of K's scales, in scales.
    pub k: Strides,
    /// Strides of V's scales, in scales.
    pub v: Strides,
}

impl CacheScales {
    /// Contiguous scales of a problem's cache.
    #[must_use]
    pub fn new(problem: &FwdProblem, block: u32) -> Self {
        let unset = Strides { batch: 0, seq: 0, head: 0, dim: 1 };
        let scales = Self { block, k: unset, v: unset };
        let strides = Strides::bshd(scales.shape(problem.longest().k));
        Self { k: strides, v: strides, ..scales }
    }

    /// Scales with strides of their own, of K and V.
    #[must_use]
    pub fn strided(block: u32, [k, v]: [Strides; 2]) -> Self {
        Self { block, k, v }
    }

    /// Shape of the scales of K or V of this shape.
    #[must_use]
    pub fn shape(&self, of: Shape) -> Shape {
        Shape { seq: of.seq.div_ceil(self.block.max(1)), dim: 1, ..of }
    }

    /// The scale of a new row, and its elements over it: the row's greatest magnitude over the type's largest number,
    /// 1 where that is 0. A NaN is no greatest magnitude, and an infinity counts as f32's largest number.
    pub fn quantise(dtype: DType, row: &mut [f32]) -> f32 {
        let greatest = row.iter().fold(0f32, |greatest, x| greatest.max(x.abs())).min(f32::MAX);
        let scale = greatest / dtype.max_finite() as f32;
        let scale = if scale > 0.0 { scale } else { 1.0 };
        row.iter_mut().for_each(|x| *x /= scale);
        scale
    }
}

/// Names of the scales of K and V.
pub(crate) const CACHE_SCALE_NAMES: [&str; 2] = ["k_scale", "v_scale"];

impl FwdProblem {
    /// # Errors
    /// Scales by rows beside what does not go with them, by its name.
    pub(crate) fn check_cache_scales(&self) -> Result<(), ProblemError> {
        let Some(scales) = &self.cache.scales else { return Ok(()) };
        let block = scales.block;
        ensure!(block >= 1, "cache_scales", "cache_scales of blocks of {block} rows, not 1 or more");
        ensure!(
            self.cache.dtype.is_some(),
            "cache_scales",
            "cache_scales of blocks of {block} rows go with a dtype_cache in FP8, but there is none"
        );
        if let KvLayout::Paged { page_size } = self.layout.kv {
            ensure!(
                page_size.is_multiple_of(block),
                "page_size",
                "page_size {page_size} is not a multiple of the {block} rows of a block in cache_scales"
            );
        }
        ensure!(
            self.layout.kv != KvLayout::Packed || block == 1,
            "kv_layout",
            "kv_layout packed: sequences begin anywhere in blocks of {block} rows, which cache_scales need not"
        );
        let scale = crate::score::Descale::None;
        let (cache, outputs) = (&self.cache, self.outputs.first());
        let refused = if self.scales.descale_k != scale {
            Some(("descale_k", "descale_k, a scale of a tensor or kv head,".to_owned()))
        } else if self.scales.descale_v != scale {
            Some(("descale_v", "descale_v, a scale of a tensor or kv head,".to_owned()))
        } else if cache.v_in_k {
            Some(("v_in_k", format!("v_in_k of head_dim_v {}", self.dims.head_dim_v)))
        } else if self.layout.v == VLayout::ColMajor {
            Some(("v_layout", "v_layout col-major".to_owned()))
        } else if let Some(lists) = self.lists {
            Some(("indices", format!("indices of topk {}", lists.topk)))
        } else if !self.part.is_whole() {
            let part = &self.part;
            let text = format!("position_q {} and position_k {}", part.position_q, part.position_k);
            Some(("part", text))
        } else if let Some(name) = outputs {
            Some((name, format!("{name} is wanted")))
        } else if let Some(append) = cache.append.filter(|_| block > 1) {
            // Appended rows would share a scale with rows that are in the cache already.
            Some(("append", format!("append of seqlen_new {}", append.seqlen_new)))
        } else if let (Some(append), Some(rotary)) = (cache.append, cache.rotary) {
            let text =
                format!("append of seqlen_new {} with rotary of dim {}", append.seqlen_new, rotary.dim);
            Some(("rotary", text))
        } else {
            None
        };
        if let Some((field, what)) = refused {
            let text = format!("{field}: {what} beside cache_scales of blocks of {block} rows is not served");
            return Err(ProblemError::new(field, text));
        }
        Ok(())
    }

    /// Checks the strides of the scales.
    ///
    /// # Errors
    /// Strides that do not fit these shapes of K and V.
    pub(crate) fn check_scale_strides(&self, k: Shape, v: Shape) -> Result<(), ProblemError> {
        let Some(scales) = &self.cache.scales else { return Ok(()) };
        for (name, strides, of) in [("k_scale", scales.k, k), ("v_scale", scales.v, v)] {
            let shape = scales.shape(of);
            match self.cache.append {
                None => check_input(name, strides, shape, DType::F32)?,
                Some(_) => check_output(name, strides, shape, DType::F32)?,
            }
        }
        Ok(())
    }

    /// Refuses a problem whose FP8 cache has scales by rows, for kernels that read none.
    ///
    /// # Errors
    /// The cache has scales by rows.
    pub fn refuse_cache_scales(&self, kernel: &str) -> Result<(), Refusal> {
        match &self.cache.scales {
            None => Ok(()),
            Some(scales) => {
                let text = format!("cache_scales of blocks of {} rows are not in this kernel", scales.block);
                Err(Refusal::new(kernel, text))
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::*;
    use crate::{Append, Descale, Dims, KeyLists, QLayout, Rotary, RotaryPairs};

    #[test]
    fn a_new_row_has_the_scale_that_brings_its_greatest_number_to_the_types_largest() {
        let mut row = [1.0, -896.0, f32::NAN];
        assert_eq!(CacheScales::quantise(DType::E4m3Fn, &mut row), 2.0);
        assert!(row[0] == 0.5 && row[1] == -448.0 && row[2].is_nan());
        let mut zeros = [0.0, -0.0, f32::NAN];
        assert_eq!(CacheScales::quantise(DType::E5m2, &mut zeros), 1.0);
        let mut row = [f32::NEG_INFINITY, 1.0];
        assert_eq!(CacheScales::quantise(DType::E5m2, &mut row), f32::MAX / 57344.0);
        assert!(row[0] == f32::NEG_INFINITY && row[1] > 0.0);
    }

    #[test]
    fn scales_by_rows_refuse_by_name_what_does_not_go_with_them() {
        let dims = Dims::batch(2).seqlens(1, 40).heads(4, 2).head_dim(64);
        let of = |kv, block| {
            let problem = FwdProblem::new(QLayout::Batch, kv, DType::Bf16, dims).dtype_cache(DType::E4m3Fn);
            let scales = CacheScales::new(&problem, block);
            problem.seqused_k(true).cache_scales(scales)
        };
        let (pages, rows) = (KvLayout::Paged { page_size: 16 }, KvLayout::Strided);
        for (kv, block) in [(pages, 1), (pages, 8), (pages, 16), (rows, 1), (rows, 7), (KvLayout::Packed, 1)]
        {
            of(kv, block).validate().unwrap();
        }
        let append = Append::batch(&of(rows, 1), 1);
        of(rows, 1).append(append).validate().unwrap();
        let rotary = Rotary { dim: 8, pairs: RotaryPairs::Half, max_pos: 64, dtype: DType::F32 };
        let lists = KeyLists::new(&of(rows, 1), 3);
        let shared = Strides { seq: 0, ..of(rows, 1).cache.scales.unwrap().v };
        let mut one_place = of(rows, 1).append(append);
        one_place.cache.scales = Some(CacheScales::strided(1, [of(rows, 1).cache.scales.unwrap().k, shared]));
        for (problem, field, text) in [
            (of(rows, 0), "cache_scales", "blocks of 0 rows"),
            (of(pages, 3), "page_size", "page_size 16 is not a multiple of the 3 rows"),
            (of(KvLayout::Packed, 2), "kv_layout", "blocks of 2 rows"),
            (of(rows, 1).dtype_cache(None), "cache_scales", "but there is none"),
            (of(rows, 1).descale_k(Descale::PerTensor), "descale_k", "beside cache_scales"),
            (of(rows, 1).descale_v(Descale::PerKvHead), "descale_v", "beside cache_scales"),
            (of(rows, 1).v_in_k(true), "v_in_k", "head_dim_v 64"),
            (of(rows, 1).lists(lists), "indices", "topk 3"),
            (of(rows, 1).row_max(true), "row_max", "beside cache_scales"),
            (
                of(rows, 2).append(append),
                "append",
                "append of seqlen_new 1 beside cache_scales of blocks of 2",
            ),
            (of(rows, 1).append(append).rotary(rotary), "rotary", "rotary of dim 8"),
            (one_place, "v_scale", "v_scale"),
        ] {
            let error = problem.validate().unwrap_err();
            assert_eq!(error.field, field, "{error}");
            assert!(error.text.contains(text), "{error}");
        }
    }
}
