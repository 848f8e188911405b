//! The choice of keys or blocks: from the C structs to the problem and its operands.

use fmha::sparse::{
    BlockOverlap, CandidateKind, ChooseProblem, ChosenBlocks, IndexKeys, IndexStrides, Indexer, ScoreSource,
};
use fmha::{ChooseArgs, DType, ElemType, ProblemError};

use crate::host::{dtype, flag, goes_with, not_in, size, struct_bytes};
use crate::plan::Memory;
use crate::structs::{
    FMHA_ALL_KEYS, FMHA_CAUSAL_KEYS, FMHA_RANGES_OF_KEYS, FmhaChooseArgs, FmhaChooseProblem,
};

/// The problem of a choice.
pub(crate) fn problem(given: &FmhaChooseProblem) -> Result<ChooseProblem, ProblemError> {
    struct_bytes::<FmhaChooseProblem>(given.struct_bytes)?;
    let candidates = match given.candidates {
        FMHA_CAUSAL_KEYS => CandidateKind::Causal,
        FMHA_ALL_KEYS => CandidateKind::All,
        FMHA_RANGES_OF_KEYS => CandidateKind::Ranges,
        other => return Err(not_in("candidates", other, "FMHA_CAUSAL_KEYS ... FMHA_RANGES_OF_KEYS", 2)),
    };
    let (batch, topk) = (size("batch", given.batch)?, size("topk", given.topk)?);
    let (seqlen_q, seqlen_k) = (size("seqlen_q", given.seqlen_q)?, size("seqlen_k", given.seqlen_k)?);
    let source = match size("num_heads", given.num_heads)? {
        0 => given_scores(given)?,
        num_heads => ScoreSource::Index(indexer(given, num_heads, seqlen_k)?),
    };
    Ok(ChooseProblem::new(batch, seqlen_q, seqlen_k, topk, source)
        .candidates(candidates)
        .seqused_k(flag("seqused_k", given.seqused_k)?)
        .blocks(blocks(given)?)
        .write_scores(flag("write_scores", given.write_scores)?))
}

/// Scores that the caller gives, in place of those of an indexer: the problem then has no field of an indexer.
fn given_scores(given: &FmhaChooseProblem) -> Result<ScoreSource, ProblemError> {
    for (field, value) in [
        ("head_dim", given.head_dim),
        ("page_size", given.page_size),
        ("num_pages", given.num_pages),
        ("max_pages", given.max_pages),
        ("k_outer_stride", given.k_outer_stride),
        ("k_key_stride", given.k_key_stride),
        ("scale_outer_stride", given.scale_outer_stride),
        ("scale_key_stride", given.scale_key_stride),
        ("dtype_q", given.dtype_q.into()),
        ("dtype_k", given.dtype_k.into()),
        ("k_scale", given.k_scale.into()),
    ] {
        goes_with(field, value, "num_heads, which is 0")?;
    }
    Ok(ScoreSource::Given)
}

fn indexer(given: &FmhaChooseProblem, num_heads: u32, seqlen_k: u32) -> Result<Indexer, ProblemError> {
    let dim = size("head_dim", given.head_dim)?;
    let (of_q, of_k) = (dtype("dtype_q", given.dtype_q)?, dtype("dtype_k", given.dtype_k)?);
    let has_scale = flag("k_scale", given.k_scale)?;
    let mut indexer = Indexer::new(num_heads, dim, of_q, of_k, seqlen_k).k_scale(has_scale);
    match size("page_size", given.page_size)? {
        0 => {
            goes_with("num_pages", given.num_pages, "page_size, which is 0")?;
            goes_with("max_pages", given.max_pages, "page_size, which is 0")?;
        }
        page_size => {
            let num_pages = size("num_pages", given.num_pages)?;
            indexer = indexer.paged(page_size, num_pages, size("max_pages", given.max_pages)?);
        }
    }
    let k = [("k_outer_stride", given.k_outer_stride), ("k_key_stride", given.k_key_stride)];
    let scale =
        [("scale_outer_stride", given.scale_outer_stride), ("scale_key_stride", given.scale_key_stride)];
    if let Some(strides) = index_strides(k)? {
        indexer = indexer.strides_k(strides);
    }
    if let Some(strides) = index_strides(scale)? {
        if !has_scale {
            let (field, value) = if strides.outer != 0 { scale[0] } else { scale[1] };
            goes_with(field, value, "k_scale, which is 0")?;
        }
        indexer = indexer.strides_scale(strides);
    }
    Ok(indexer)
}

/// Strides, unless both are 0.
fn index_strides([outer, key]: [(&'static str, i64); 2]) -> Result<Option<IndexStrides>, ProblemError> {
    let of = |(field, value): (&'static str, i64)| {
        u64::try_from(value).map_err(|_| ProblemError::new(field, format!("{field} {value} is negative")))
    };
    let strides = IndexStrides { outer: of(outer)?, key: of(key)? };
    Ok((strides.outer != 0 || strides.key != 0).then_some(strides))
}

fn blocks(given: &FmhaChooseProblem) -> Result<Option<ChosenBlocks>, ProblemError> {
    let (block, compressed) = (size("block", given.block)?, size("compressed", given.compressed)?);
    if block > 0 && compressed > 0 {
        let text = format!("block {block} beside compressed {compressed}: a block has one score");
        return Err(ProblemError::new("block", text));
    }
    if compressed == 0 {
        for (field, value) in
            [("stride", given.stride), ("selected", given.selected), ("num_blocks", given.num_blocks)]
        {
            goes_with(field, value, "compressed, which is 0")?;
        }
    }
    if block == 0 && compressed == 0 {
        for (field, value) in [("first_blocks", given.first_blocks), ("last_blocks", given.last_blocks)] {
            goes_with(field, value, "block or compressed, which are 0")?;
        }
        return Ok(None);
    }
    let chosen = if block > 0 {
        ChosenBlocks::maximum(block)
    } else {
        let (stride, selected) = (size("stride", given.stride)?, size("selected", given.selected)?);
        let overlap = BlockOverlap { compressed, stride, selected };
        ChosenBlocks::sum(overlap, size("num_blocks", given.num_blocks)?)
    };
    Ok(Some(
        chosen.first(size("first_blocks", given.first_blocks)?).last(size("last_blocks", given.last_blocks)?),
    ))
}

impl Memory {
    /// The operands of a run of a choice, without its scratch.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`](crate::FmhaPlan::run).
    pub(crate) unsafe fn choose<'a>(
        self,
        problem: &ChooseProblem,
        given: &FmhaChooseArgs,
    ) -> Result<ChooseArgs<'a>, ProblemError> {
        let indexer = problem.indexer();
        let [q, k, scale, table] = indexer.map_or([0; 4], |indexer| problem.index_bytes(indexer));
        let has_index = indexer.is_some();
        let of = |dtype: fn(&Indexer) -> DType| indexer.map_or(DType::F32, dtype);
        let heads = indexer.map_or(0, |indexer| indexer.num_heads);
        let has_scale = indexer.is_some_and(|indexer| indexer.k_scale);
        let is_paged = indexer.is_some_and(|indexer| indexer.keys != IndexKeys::Batch);
        let ranges = problem.candidates == CandidateKind::Ranges;
        let numbers = |count: u32| problem.rows().saturating_mul(u64::from(count) * 4);
        let used = u64::from(problem.batch) * 4;
        // SAFETY: the caller keeps the contract of `choose`.
        unsafe {
            let ints = |name, wanted, at, bytes| self.read_if(name, wanted, at, bytes, ElemType::I32);
            let floats = |name, wanted, at, bytes| self.read_if(name, wanted, at, bytes, DType::F32);
            let has_list = problem.topk > 0;
            let list = (given.indices, numbers(problem.topk));
            let scores = (given.scores, numbers(problem.num_entries()));
            Ok(ChooseArgs::default()
                .q(self.read_if("q", has_index, given.q, q, of(|indexer| indexer.dtype_q))?)
                .k(self.read_if("k", has_index, given.k, k, of(|indexer| indexer.dtype_k))?)
                .weights(floats("weights", has_index, given.weights, numbers(heads))?)
                .k_scale(floats("k_scale", has_scale, given.k_scale, scale)?)
                .block_table(ints("block_table", is_paged, given.block_table, table)?)
                .given(floats("given", !has_index, given.given, numbers(problem.seqlen_k))?)
                .seqused_k(ints("seqused_k", problem.seqused_k, given.seqused_k, used)?)
                .first(ints("first", ranges, given.first, numbers(1))?)
                .end(ints("end", ranges, given.end, numbers(1))?)
                .indices(self.write_if("indices", has_list, list.0, list.1, ElemType::I32)?)
                .scores(self.write_if("scores", problem.write_scores, scores.0, scores.1, DType::F32)?))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::*;
    use crate::host::Choice;
    use crate::plan::FmhaPlan;
    use crate::tests::{new, with};

    #[test]
    fn a_choice_of_c_lists_the_greatest_scores() {
        let (q, k, weights) = ([1f32, 0.0], [0.5f32, 0.0, -1.0, 0.0, 2.0, 0.0, 2.0, 1.0], [1f32]);
        let (mut indices, mut scores) = ([7; 2], [7f32; 4]);
        let problem = with!(
            new!(FmhaChooseProblem),
            batch = 1,
            seqlen_q = 1,
            seqlen_k = 4,
            topk = 2,
            num_heads = 1,
            head_dim = 2,
            dtype_q = crate::FMHA_F32,
            dtype_k = crate::FMHA_F32,
            write_scores = 1
        );
        let args = with!(
            new!(FmhaChooseArgs),
            q = q.as_ptr().cast(),
            k = k.as_ptr().cast(),
            weights = weights.as_ptr(),
            indices = indices.as_mut_ptr(),
            scores = scores.as_mut_ptr()
        );
        let cpu = fmha::Backend::Cpu.open().unwrap();
        let plan = FmhaPlan::choose(&cpu, &problem, &Choice::default()).unwrap();
        // SAFETY: all pointers are to live memory of the sizes that the problem says.
        unsafe { plan.run_choose(&args).unwrap() };
        assert_eq!((indices, scores), ([2, 3], [0.5, 0.0, 2.0, 2.0]));
        for (args, said) in [
            (with!(args, scores = std::ptr::null_mut()), "scores is null, but 16 bytes are needed"),
            (with!(args, first = [0].as_ptr()), "first is given, but the problem is without it"),
            (with!(args, struct_bytes = 8), "struct_bytes 8"),
        ] {
            // SAFETY: refused before anything is read.
            let error = unsafe { plan.run_choose(&args) }.unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn a_field_of_a_choice_that_contradicts_is_named() {
        let given = with!(new!(FmhaChooseProblem), batch = 1, seqlen_q = 1, seqlen_k = 9, topk = 2);
        let indexed = with!(given, num_heads = 1, head_dim = 8);
        for (call, said) in [
            (with!(given, candidates = 3), "candidates 3 is not in 0..=2"),
            (with!(given, head_dim = 8), "head_dim 8 goes with num_heads"),
            (with!(given, first_blocks = 1), "first_blocks 1 goes with block"),
            (with!(given, block = 4, compressed = 4), "block 4 beside compressed 4"),
            (with!(given, block = 4, num_blocks = 3), "num_blocks 3 goes with compressed"),
            (with!(indexed, k_key_stride = -8), "k_key_stride -8 is negative"),
            (with!(indexed, scale_key_stride = 2), "scale_key_stride 2 goes with k_scale"),
            (with!(indexed, num_pages = 7), "num_pages 7 goes with page_size"),
            (with!(given, topk = 0), "topk 0 without write_scores"),
        ] {
            let error = FmhaPlan::check_choose(&call).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
