//! A planned choice of keys: the indexer of `sparse.rs` on operands in the form of
//! `fmha_core::sparse::ChooseProblem`. Keys in pages, or with gaps, are copied to contiguous rows first.

use std::borrow::Cow;

use bytemuck::{Pod, pod_read_unaligned};
use fmha_core::host_memory::{filled, reserve};
use fmha_core::sparse::{
    BlockScore, Candidates, ChosenBlocks, IndexArgs, IndexCall, IndexKeys, IndexProblem, IndexStrides,
    Indexer, ValidChoose, block_maxima, block_sums, choose, choose_blocks,
};
use fmha_core::{ChooseArgs, DevSlice, DevSliceMut, Result};

use crate::isa::Kernels;
use crate::sparse::{Index, IndexTo};
use crate::tasks::Threads;

/// A call that chooses keys or blocks.
pub(crate) struct Choice<'a> {
    pub(crate) problem: &'a ValidChoose,
    pub(crate) args: &'a ChooseArgs<'a>,
}

/// Numbers of an operand; empty for an absent one.
fn numbers<T: Pod>(slice: &Option<DevSlice<'_>>) -> Vec<T> {
    slice.and_then(|slice| slice.as_host()).map(numbers_of).unwrap_or_default()
}

fn numbers_of<T: Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(pod_read_unaligned).collect()
}

/// The numbers of an output.
#[allow(
    clippy::mut_from_ref,
    reason = "arguments of a call are borrowed shared; an output is the call's alone"
)]
fn output<'a, T: Pod>(slice: &'a Option<DevSliceMut<'_>>, count: usize) -> &'a mut [T] {
    match slice {
        // SAFETY: core saw that the output has as many aligned numbers, which nothing else of the call touches.
        Some(slice) if count > 0 => unsafe {
            std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), count)
        },
        _ => &mut [],
    }
}

impl Choice<'_> {
    /// Computes the choice.
    ///
    /// # Errors
    /// Memory for scratch that the system refuses.
    pub(crate) fn run(&self, engine: &impl Kernels, threads: &Threads) -> Result<()> {
        let Self { problem, args } = *self;
        let (rows, topk) = (problem.rows() as usize, problem.topk as usize);
        let entries = problem.num_entries() as usize;
        let (first, end) = self.candidates()?;
        let indices: &mut [i32] = output(&args.indices, if topk > 0 { rows * topk } else { 0 });
        let written: &mut [f32] = output(&args.scores, if problem.write_scores { rows * entries } else { 0 });
        let Some(blocks) = problem.blocks else {
            let Some(indexer) = problem.indexer() else {
                let given: Vec<f32> = numbers(&args.given);
                return (0..rows).filter(|_| topk > 0).try_for_each(|row| {
                    let scores = &given[row * entries..][..entries];
                    let list = &mut indices[row * topk..][..topk];
                    choose(scores, first[row].unsigned_abs()..end[row].unsigned_abs(), list)
                });
            };
            if problem.write_scores {
                self.index(engine, threads, indexer, [&first, &end], IndexTo::scores(written))?;
            }
            if topk > 0 {
                self.index(engine, threads, indexer, [&first, &end], IndexTo::lists(topk, indices))?;
            }
            return Ok(());
        };
        let keys = problem.seqlen_k as usize;
        let scores: Vec<f32> = match problem.indexer() {
            None => numbers(&args.given),
            Some(indexer) => {
                let mut scores = filled(rows * keys, f32::NEG_INFINITY)?;
                self.index(engine, threads, indexer, [&first, &end], IndexTo::scores(&mut scores))?;
                scores
            }
        };
        let mut of_row = filled(entries, 0.0f32)?;
        for row in 0..rows {
            let candidates = first[row].unsigned_abs()..end[row].unsigned_abs();
            let of_keys = &scores[row * keys..][..keys];
            let ChosenBlocks { score, first, last, .. } = blocks;
            let chosen = match score {
                BlockScore::Maximum { block } => {
                    block_maxima(of_keys, candidates.clone(), block, &mut of_row)?;
                    candidates.start / block..if candidates.is_empty() {
                        candidates.start / block
                    } else {
                        candidates.end.div_ceil(block)
                    }
                }
                BlockScore::Sum { overlap, .. } => {
                    block_sums(of_keys, overlap, &mut of_row)?;
                    candidates
                }
            };
            if problem.write_scores {
                for (b, to) in written[row * entries..][..entries].iter_mut().enumerate() {
                    *to = if chosen.contains(&(b as u32)) { of_row[b] } else { f32::NEG_INFINITY };
                }
            }
            if topk > 0 {
                let firsts = chosen.clone().take(first as usize);
                let forced: Vec<u32> = firsts.chain(chosen.clone().rev().take(last as usize)).collect();
                choose_blocks(&of_row, chosen, &forced, &mut indices[row * topk..][..topk])?;
            }
        }
        Ok(())
    }

    /// First candidates of all rows, and one past the last.
    fn candidates(&self) -> Result<(Vec<i32>, Vec<i32>)> {
        let Self { problem, args } = *self;
        let used: Vec<i32> = numbers(&args.seqused_k);
        let [first, end] = [&args.first, &args.end].map(numbers::<i32>);
        let rows = problem.rows() as usize;
        let (mut firsts, mut ends) = (reserve(rows)?, reserve(rows)?);
        for row in 0..rows {
            let length = used
                .get(row / problem.seqlen_q as usize)
                .map_or(problem.seqlen_k, |&used| used.max(0).unsigned_abs().min(problem.seqlen_k));
            let range = [&first, &end].map(|of| of.get(row).copied().unwrap_or(0));
            let candidates = problem.candidates_of(row as u64, length, range);
            firsts.push(candidates.start.cast_signed());
            ends.push(candidates.end.cast_signed());
        }
        Ok((firsts, ends))
    }

    fn index(
        &self,
        engine: &impl Kernels,
        threads: &Threads,
        indexer: &Indexer,
        [first, end]: [&[i32]; 2],
        to: IndexTo,
    ) -> Result<()> {
        let Self { problem, args } = *self;
        let Indexer { num_heads, head_dim, dtype_q, dtype_k, .. } = *indexer;
        let index = IndexProblem {
            batch: problem.batch,
            seqlen_q: problem.seqlen_q,
            seqlen_k: problem.seqlen_k,
            num_heads,
            head_dim,
            dtype_q,
            dtype_k,
        };
        let row = head_dim as usize * dtype_k.size_bytes() as usize;
        let k = self.dense(&args.k, indexer, indexer.strides_k, row, dtype_k.size_bytes() as usize)?;
        let scale = match indexer.k_scale {
            true => Some(self.dense(&args.k_scale, indexer, indexer.strides_scale, 4, 4)?),
            false => None,
        };
        let scale: Option<Vec<f32>> = scale.map(|bytes| numbers_of(&bytes));
        let weights: Vec<f32> = numbers(&args.weights);
        let rows = problem.rows() as usize;
        let empty: &[u8] = &[];
        let call = IndexArgs {
            q: args.q.unwrap_or(DevSlice::host(empty)),
            k: DevSlice::host(&k),
            weights: weights.get(..rows * num_heads as usize).unwrap_or_default(),
            k_scale: scale.as_deref(),
            candidates: Candidates::Ranges { first, end },
        };
        let call = IndexCall::new(index, call)?;
        engine.index(&Index { call: &call, to }, threads)
    }

    /// Rows of `bytes` each, of all sequences one after another: in place if contiguous, otherwise copied. Rows
    /// beyond a sequence's keys are no candidates.
    fn dense<'s>(
        &self,
        slice: &Option<DevSlice<'s>>,
        indexer: &Indexer,
        strides: IndexStrides,
        bytes: usize,
        elem: usize,
    ) -> Result<Cow<'s, [u8]>> {
        let Self { problem, args } = *self;
        let from = slice.and_then(|slice| slice.as_host()).unwrap_or_default();
        let (batch, keys) = (problem.batch as usize, problem.seqlen_k as usize);
        let is_dense = indexer.keys == IndexKeys::Batch
            && (strides.key as usize).checked_mul(elem) == Some(bytes)
            && (batch <= 1 || strides.outer as usize == keys * strides.key as usize);
        if is_dense && let Some(rows) = from.get(..batch * keys * bytes) {
            return Ok(Cow::Borrowed(rows));
        }
        let table: Vec<i32> = numbers(&args.block_table);
        let used: Vec<i32> = numbers(&args.seqused_k);
        let mut to = filled(batch * keys * bytes, 0u8)?;
        for b in 0..batch {
            let length = used.get(b).map_or(keys, |&used| (used.max(0) as usize).min(keys));
            for j in 0..length {
                let (outer, inner) = match indexer.keys {
                    IndexKeys::Batch => (b, j),
                    IndexKeys::Paged { page_size, num_pages, max_pages } => {
                        let page_size = page_size as usize;
                        let page = table[b * max_pages as usize + j / page_size];
                        let page = page.clamp(0, (num_pages - 1).cast_signed()) as usize;
                        (page, j % page_size)
                    }
                };
                let at = (outer * strides.outer as usize + inner * strides.key as usize) * elem;
                to[(b * keys + j) * bytes..][..bytes].copy_from_slice(&from[at..][..bytes]);
            }
        }
        Ok(Cow::Owned(to))
    }
}
