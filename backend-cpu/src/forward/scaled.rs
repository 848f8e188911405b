//! Calls with scales by blocks: Q, K and V are first multiplied by their scales, each product rounded once to the
//! type of the values, and the forward or the backward runs on the results.

use fmha_core::scaled_rows::ScaledRows;
use fmha_core::seq::KvRows;
use fmha_core::{
    DType, DevSlice, DevSliceMut, FwdArgs, FwdProblem, MemorySpace, ProblemError, ScoreArgs, SeqArgs,
    SeqSpan, Strides, Totals,
};

use super::Forward;
use crate::backward::Backward;
use crate::memory::{Floats, reserve};
use crate::tasks::Threads;
use crate::tensor::{Target, f32_at};

/// Rows of a task.
const ROWS: u32 = 64;

/// Rows of one sequence in one tensor.
#[derive(Clone, Copy)]
struct Task {
    tensor: usize,
    span: usize,
    first: u32,
    rows: u32,
}

/// Values of a call's Q, K and V, in scratch memory.
pub(crate) struct Values {
    memory: Vec<Floats>,
    bytes: [u64; 3],
    dtype: DType,
}

impl Values {
    /// Computes the values, laid out as the problem over them, `values`, has them: rows of at most `longest` keys of a
    /// sequence.
    ///
    /// # Errors
    /// Memory that the system refuses, before anything is written.
    pub(crate) fn compute(
        problem: &FwdProblem,
        values: &FwdProblem,
        tensors: [DevSlice<'_>; 3],
        (seq, score): (&SeqArgs<'_>, &ScoreArgs<'_>),
        (spans, longest): (&[SeqSpan], u32),
        threads: &Threads,
    ) -> fmha_core::Result<Self> {
        let Some(tensors) = ScaledRows::of(problem, tensors, score)? else { return Err(no_scales()) };
        let dims = problem.dims;
        let (dtype, rows) = (values.dtypes.qk, KvRows::of(problem, seq)?);
        let q = values.extents(seq.totals).q;
        let per_row = [q.dim, dims.head_dim_qk, dims.head_dim_v];
        let rows_kv = u64::from(dims.batch) * u64::from(longest) * u64::from(dims.num_heads_kv);
        let elems = [q.num_elems(), rows_kv * u64::from(per_row[1]), rows_kv * u64::from(per_row[2])];
        let bytes = elems.map(|elems| elems * dtype.size_bytes());
        let mut memory = reserve(3)?;
        for bytes in bytes {
            memory.push(Floats::scratch(bytes.div_ceil(4) as usize)?);
        }
        let strides: [Strides; 3] = [values.strides.q, values.strides.k, values.strides.v];
        let addresses: [*mut u8; 3] = std::array::from_fn(|i| memory[i].as_mut_ptr().cast());
        let targets: [Target; 3] =
            std::array::from_fn(|i| Target::of_scratch(addresses[i], dtype, strides[i]));

        let mut tasks = vec![];
        for (span, lengths) in spans.iter().enumerate() {
            for (tensor, length) in
                [lengths.seqlen_q, lengths.seqlen_k, lengths.seqlen_k].into_iter().enumerate()
            {
                let firsts = (0..length).step_by(ROWS as usize);
                tasks.extend(firsts.map(|first| Task {
                    tensor,
                    span,
                    first,
                    rows: ROWS.min(length - first),
                }));
            }
        }
        let used = threads.used(tasks.len());
        let mut scratch = reserve(used)?;
        scratch.extend((0..used).map(|_| vec![0f32; per_row.into_iter().max().unwrap_or(0) as usize]));
        threads.for_each(&mut scratch, tasks.len(), |row, task| {
            let Task { tensor, span, first, rows: count } = tasks[task];
            let (from, to, span) = (&tensors[tensor], &targets[tensor], &spans[span]);
            let row = &mut row[..per_row[tensor] as usize];
            for i in first..first + count {
                let (from_at, to_at) = if tensor == 0 {
                    ((span.q_batch, span.q_row + i), (span.q_batch, span.q_row + i))
                } else {
                    (rows.at(span, i), (span.i_batch, i))
                };
                for head in 0..if tensor == 0 { dims.num_heads_q } else { dims.num_heads_kv } {
                    from.read((from_at.0, from_at.1, head), row);
                    let factor = tensor_scale(problem, score, tensor, span, head);
                    if factor != 1.0 {
                        row.iter_mut().for_each(|x| *x *= factor);
                    }
                    // SAFETY: the row lies in the memory that was reserved for this tensor's rows, and only this task
                    // writes it: sequences have separate rows in Q, and in K and V by the batch axis.
                    unsafe { to.write_strided(to_at.0, to_at.1, head, row) };
                }
            }
        });
        Ok(Self { memory, bytes, dtype })
    }

    /// Memory of the values of Q, K and V.
    pub(crate) fn slices(&self) -> [DevSlice<'_>; 3] {
        std::array::from_fn(|i| {
            let at = self.memory[i].as_ptr().cast();
            // SAFETY: `memory` lives as long as the slice, and nothing writes it now.
            unsafe { DevSlice::from_raw(MemorySpace::Host, at, self.bytes[i], self.dtype) }
        })
    }
}

/// The error of a call whose problem has no scales by blocks.
fn no_scales() -> fmha_core::Error {
    ProblemError::new("block_scales", "block_scales None has no scales to multiply by").into()
}

/// Computes the gradients of values: `run` gets the call on them.
///
/// # Errors
/// Memory that the system refuses, before anything is written.
pub(crate) fn backward(
    call: &Backward<'_>,
    threads: &Threads,
    run: &dyn Fn(&Backward<'_>) -> fmha_core::Result<()>,
) -> fmha_core::Result<()> {
    let &Backward { problem, args, spans, blocks } = call;
    let over = problem.over_values(args.seq.totals).ok_or_else(no_scales)?.validate()?;
    let longest = problem.fwd().dims.seqlen_k;
    let tensors = [args.q, args.k, args.v];
    let of_call = (&args.seq, &args.score);
    let values = Values::compute(problem.fwd(), over.fwd(), tensors, of_call, (spans, longest), threads)?;
    run(&Backward { problem: &over, args: &args.over_values(values.slices()), spans, blocks })
}

/// Computes the values and passes a call on them to `run`.
///
/// # Errors
/// Memory that the system refuses, before anything is written.
pub(super) fn forward(
    call: &Forward<'_>,
    threads: &Threads,
    run: &dyn Fn(&Forward<'_>) -> fmha_core::Result<()>,
) -> fmha_core::Result<()> {
    let &Forward { problem, args, spans, blocks } = call;
    let longest = spans.iter().map(|span| span.seqlen_k).max().unwrap_or(0);
    let over_values = problem.over_values(args.seq.totals, longest).ok_or_else(no_scales)?;
    let tensors = [args.q, args.k_slice(), args.v_slice()];
    let of_call = (&args.seq, &args.score);
    let values = Values::compute(problem, &over_values, tensors, of_call, (spans, longest), threads)?;
    let [q, k, v] = values.slices();
    let mut over = FwdArgs::new(q, k, v, written(&args.o));
    let totals = Totals { num_pages: None, ..args.seq.totals };
    (over.seq, over.score) = (args.seq, args.score);
    (over.seq.totals, over.seq.block_table) = (totals, None);
    (over.score.descale_q, over.score.descale_k, over.score.descale_v) = (None, None, None);
    let no_scales = (None, None, None);
    (over.score.block_scale_q, over.score.block_scale_k, over.score.block_scale_v) = no_scales;
    (over.masks, over.cache, over.scale_o) = (args.masks, args.cache, args.scale_o);
    over.lse = args.lse.as_ref().map(written);
    over.keep_mask = args.keep_mask.as_ref().map(written);
    over.row_max = args.row_max.as_ref().map(written);
    over.head_max = args.head_max.as_ref().map(written);
    over.key_sum = args.key_sum.as_ref().map(written);
    run(&Forward { problem: &over_values, args: &over, spans, blocks })
}

/// The scale of a whole tensor, or of its (sequence, kv head); 1 if there is none.
fn tensor_scale(
    problem: &FwdProblem,
    score: &ScoreArgs<'_>,
    tensor: usize,
    span: &SeqSpan,
    head: u32,
) -> f32 {
    let scales = &problem.scales;
    let (kind, slice) = [
        (scales.descale_q, &score.descale_q),
        (scales.descale_k, &score.descale_k),
        (scales.descale_v, &score.descale_v),
    ][tensor];
    let i_head_kv = if tensor == 0 { head / problem.gqa_ratio() } else { head };
    let index = kind.index(span.i_batch, i_head_kv, problem.dims.num_heads_kv);
    slice.as_ref().map_or(1.0, |slice| f32_at(slice, index))
}

/// The memory of an output, borrowed for the inner call, which ends before this one.
fn written<'a>(slice: &'a DevSliceMut<'_>) -> DevSliceMut<'a> {
    // SAFETY: the memory that the caller's slice promises, which nothing else touches meanwhile.
    unsafe { DevSliceMut::from_raw(slice.space(), slice.as_mut_ptr(), slice.bytes(), slice.elem()) }
}
