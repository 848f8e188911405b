//! Laws: two calls whose results must agree, bit for bit if both run the same kernel and tile.

use fmha_core::seq::KvRows;
use fmha_core::{
    Append, BwdProblem, CombineProblem, DType, Descale, Device, FwdPlan, FwdProblem, KvLayout, MaskShape,
    PlanOptions, QLayout, Result, SeqSpan, Shape, Strides, VLayout,
};

use crate::case::Forward;
use crate::check::{Selection, check_fwd};
use crate::execute::{replay_fwd, run_combine, run_fwd};
use crate::run::Options;
use crate::tensor::{Operand, Tensor};
use crate::tensors::{Data, HostCombine, HostFwd, Lengths};
use crate::verdict::Verdict;

mod bits;

/// A forward call, and the second call with which it must agree.
#[derive(Clone, Debug)]
pub struct Law {
    /// First call.
    pub forward: Forward,
    /// Kind of the second call.
    pub kind: LawKind,
}

/// Kind of the second call. Results of all but the last two kinds must be bit-equal if both plans have
/// the same kernel and details; otherwise both are compared with the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LawKind {
    /// A call of equal sequences, packed.
    GroupIsBatch,
    /// A call with equal numbers whose V is stored `[dim, seq]`.
    ColMajorIsRowMajor,
    /// A call with equal tensors, stored b·h·s·d.
    AnyLayout,
    /// A call with K and V repeated, so that it has as many kv heads as query heads.
    GqaIsMha,
    /// The sequences in reverse order, where the plan promises batch invariance.
    PermutedBatch,
    /// The call itself, run again, if the plan promises to be deterministic.
    Twice,
    /// The call itself, recorded with other lengths and replayed, if the plan promises to be capturable.
    Recorded,
    /// A call with equal keys in pages of this many rows.
    PagedIsStrided(u32),
    /// A call with equal keys in pages that are renumbered.
    PermutedPages,
    /// The last keys of each sequence, this many, are appended by the call; the cache must agree too.
    AppendIsWritten(u32),
    /// The KV cache is converted to Q's type before the call.
    WidenedCache,
    /// The last query of each sequence alone, in batch-invariant plans.
    LastOfMany,
    /// A window that hides nothing, in place of no mask; compared within the reference's bound.
    WideWindowIsNone,
    /// The keys in this many parts, merged; compared within the reference's bound.
    SplitsCombine(u32),
    /// The call itself, run this many times more, if the plan promises to be deterministic.
    Repeated(u32),
    /// Gradients of the call, computed this many times more: dK and dV for every plan; dQ too if the plan promises
    /// to be deterministic.
    KeysOfGradients(u32),
    /// Each sequence of the call, called alone.
    AloneIsInBatch,
    /// Calls on each packed sequence alone, all planned with `batch_invariant`.
    AloneIsInPack,
    /// A second call drawn from this seed; rows must have equal bits if plans promise it.
    RowsOfCalls(u64),
    /// A second training call drawn from this seed; gradients must have equal bits.
    GradientsOfCalls(u64),
}

/// Note of a law whose two calls were compared bit for bit.
pub const BIT_FOR_BIT: &str = "bit for bit";

impl Law {
    /// The backward problem of the call, with f32 gradients.
    pub(crate) fn gradients(&self) -> BwdProblem {
        BwdProblem::new(self.forward.problem.clone()).dtype_grad(DType::F32)
    }

    pub(crate) fn run(&self, backend: &Device, options: &Options) -> Result<Verdict> {
        if self.kind == LawKind::Recorded {
            return recorded(backend, options, &self.forward);
        }
        if let LawKind::Repeated(_) | LawKind::AloneIsInBatch | LawKind::AloneIsInPack = self.kind {
            return bits::run(backend, options, self);
        }
        if let LawKind::KeysOfGradients(times) = self.kind {
            return bits::keys_of_gradients(backend, options, self, times);
        }
        let Forward { problem, lengths, data, .. } = &self.forward;
        if let LawKind::RowsOfCalls(seed) = self.kind {
            let host = HostFwd::new(problem.clone(), lengths, *data)?;
            return crate::rows::law(backend, options, (seed, host));
        }
        if let LawKind::GradientsOfCalls(seed) = self.kind {
            let host = HostFwd::new(problem.clone(), lengths, *data)?;
            return crate::rows::law_of_gradients(backend, options, (seed, host));
        }
        let mut wishes = options.plan.clone();
        if matches!(self.kind, LawKind::LastOfMany | LawKind::PermutedBatch) {
            // Where no kernel can promise equal bits, both calls are compared with the reference.
            wishes.batch_invariant = true;
            let valid = problem.clone().validate()?;
            wishes.batch_invariant = backend.plan_fwd(&valid, &wishes).is_ok();
        }
        let options = &Options { plan: wishes, ..options.clone() };
        let mut a = HostFwd::new(problem.clone(), lengths, *data)?;
        let plan_a = run(backend, &options.plan, &mut a)?;
        let mut verdict = check_fwd(&a, &Selection::default(), &|_, _| ())?;
        if let LawKind::SplitsCombine(parts) = self.kind {
            let merged = split_and_merge(backend, options, &self.forward, parts, a)?;
            verdict.tensors.extend(merged.tensors);
            verdict.faults.extend(merged.faults);
            return Ok(verdict);
        }
        let mut b = self.other(&a)?;
        let plan_b = run(backend, &options.plan, &mut b)?;
        let promised = match self.kind {
            LawKind::Twice => plan_a.promises().deterministic,
            LawKind::PermutedBatch | LawKind::LastOfMany => plan_a.promises().batch_invariant,
            LawKind::WideWindowIsNone => false,
            _ => true,
        };
        // Batch-invariant bits do not depend on the tile either.
        let of_any_tile = matches!(self.kind, LawKind::PermutedBatch | LawKind::LastOfMany)
            && plan_b.promises().batch_invariant
            && plan_a.kernel() == plan_b.kernel();
        // A quantised cache must be bit-equal to the converted one, in every kernel that supports both.
        let is_twin = self.kind == LawKind::WidenedCache;
        if promised && (of_any_tile || is_twin || same_tile(&plan_a, &plan_b)) {
            let reversed = self.kind == LawKind::PermutedBatch;
            verdict.faults.extend(match self.kind {
                LawKind::LastOfMany => last_row_differs(&a, &b),
                _ => difference(&a, &b, reversed),
            });
            if let LawKind::AppendIsWritten(_) = self.kind {
                verdict.faults.extend(cache_differs(&a, &b));
            }
            verdict.note = Some(BIT_FOR_BIT);
        } else {
            let other = check_fwd(&b, &Selection::default(), &|_, _| ())?;
            verdict.tensors.extend(other.tensors);
            verdict.faults.extend(other.faults);
            verdict.note = Some("both calls within the bound: other kernels or tiles");
        }
        Ok(verdict)
    }

    /// Makes the second call's tensors. Numbers depend on sequence, head and position, so they are equal; where those
    /// change, numbers are copied.
    fn other(&self, a: &HostFwd) -> Result<HostFwd> {
        let Forward { problem, lengths, data, .. } = &self.forward;
        let mut other = problem.clone();
        match self.kind {
            LawKind::GroupIsBatch => {
                let dims = problem.dims;
                let packed = vec![(dims.seqlen_q, dims.seqlen_k); dims.batch as usize];
                (other.layout.q, other.layout.kv) = (QLayout::Packed, KvLayout::Packed);
                contiguous(&mut other);
                HostFwd::new(other, &Lengths::packed(&packed), *data)
            }
            LawKind::ColMajorIsRowMajor => {
                other.layout.v = VLayout::ColMajor;
                other.strides.v = Strides::bhds(other.shape_v());
                HostFwd::new(other, lengths, *data)
            }
            LawKind::AnyLayout => {
                other.strides.q = Strides::bhsd(other.shape_q());
                other.strides.k = Strides::bhsd(other.shape_k());
                other.strides.o = Strides::bhsd(other.shape_o());
                HostFwd::new(other, lengths, *data)
            }
            LawKind::WideWindowIsNone => {
                let wide = MaskShape::Window {
                    left: Some(problem.dims.seqlen_q + problem.dims.seqlen_k),
                    right: Some(problem.dims.seqlen_q + problem.dims.seqlen_k),
                    align: fmha_core::MaskAlign::BottomRight,
                };
                other.mask.shape = wide;
                HostFwd::new(other, lengths, *data)
            }
            LawKind::GqaIsMha => {
                other.dims.num_heads_kv = other.dims.num_heads_q;
                contiguous(&mut other);
                let mut b = HostFwd::new(other, lengths, *data)?;
                let ratio = problem.gqa_ratio();
                copy_keys(a, &mut b, |batch, row, head| (batch, row, head / ratio));
                Ok(b)
            }
            LawKind::PermutedBatch => {
                let mut b = HostFwd::new(other, lengths, *data)?;
                let last = problem.dims.batch - 1;
                copy_keys(a, &mut b, |batch, row, head| (last - batch, row, head));
                copy(a, &mut b, Operand::Q, |batch, row, head| (last - batch, row, head));
                Ok(b)
            }
            LawKind::PagedIsStrided(page_size) => {
                let (table, num_pages) = crate::families::pages(problem, page_size, data.seed);
                other.layout.kv = KvLayout::Paged { page_size };
                contiguous(&mut other);
                let mut paged = lengths.clone();
                (paged.block_table, paged.totals.num_pages) = (table, Some(num_pages));
                HostFwd::new(other, &paged, *data)
            }
            LawKind::PermutedPages => {
                let most = lengths.totals.num_pages.unwrap_or(0).cast_signed();
                let mut permuted = lengths.clone();
                permuted.block_table.iter_mut().for_each(|page| *page = most - 1 - *page);
                HostFwd::new(other, &permuted, *data)
            }
            LawKind::AppendIsWritten(new) => {
                other.cache.append = Some(Append::batch(&other, new));
                let mut before = lengths.clone();
                before.seqused_k.iter_mut().for_each(|length| *length -= new.cast_signed());
                HostFwd::new(other, &before, *data)
            }
            LawKind::WidenedCache => {
                (other.cache.dtype, other.cache.scales) = (None, None);
                (other.scales.descale_k, other.scales.descale_v) = (Descale::None, Descale::None);
                let mut b = HostFwd::new(other, lengths, *data)?;
                widen(a, &mut b, Operand::K, [Operand::DescaleK, Operand::KScale], problem.scales.descale_k)?;
                if !problem.cache.v_in_k {
                    let scales = [Operand::DescaleV, Operand::VScale];
                    widen(a, &mut b, Operand::V, scales, problem.scales.descale_v)?;
                }
                Ok(b)
            }
            LawKind::LastOfMany => {
                let last = problem.dims.seqlen_q - 1;
                other.dims.seqlen_q = 1;
                contiguous(&mut other);
                let lengths = lists_of_last(problem, &mut other, lengths);
                let mut b = HostFwd::new(other, &lengths, *data)?;
                copy_keys(a, &mut b, |batch, row, head| (batch, row, head));
                copy(a, &mut b, Operand::Q, |batch, _, head| (batch, last, head));
                Ok(b)
            }
            _ => HostFwd::new(other, lengths, *data),
        }
    }
}

/// The lengths of `one`, which has the last query of each sequence of `many`, with that query's lists of keys.
fn lists_of_last(many: &FwdProblem, one: &mut FwdProblem, lengths: &Lengths) -> Lengths {
    let mut of_one = lengths.clone();
    let (Some(lists), last) = (many.lists, many.dims.seqlen_q - 1) else { return of_one };
    let shape = Shape { seq: 1, ..lists.shape(many, lengths.totals) };
    one.lists = Some(lists.strides(Strides::bshd(shape)));
    of_one.indices.clear();
    for (b, h) in (0..shape.batch).flat_map(|b| (0..shape.head).map(move |h| (b, h))) {
        let first = lists.strides.offset(b, last, h, 0) as usize;
        of_one.indices.extend(&lengths.indices[first..first + shape.dim as usize]);
    }
    of_one
}

fn run(backend: &Device, options: &PlanOptions, host: &mut HostFwd) -> Result<FwdPlan> {
    let plan = backend.plan_fwd(&host.problem, options)?;
    run_fwd(backend, &plan, host)?;
    Ok(plan)
}

/// Contiguous b·s·h·d throughout, V row-major.
fn contiguous(problem: &mut FwdProblem) {
    problem.layout.v = VLayout::RowMajor;
    problem.strides.q = Strides::bshd(problem.shape_q());
    problem.strides.k = Strides::bshd(problem.shape_k());
    problem.strides.v = Strides::bshd(problem.shape_v());
    problem.strides.o = Strides::bshd(problem.shape_o());
}

/// Whether two plans compute a row in the same way. The order of their tiles, the number of tiles at a time and the
/// modelled time of the call must not change bits.
fn same_tile(a: &FwdPlan, b: &FwdPlan) -> bool {
    let details = |plan: &FwdPlan| {
        let says_how = |name: &str| !["order", "modelled time"].contains(&name);
        plan.details().iter().filter(|(name, _)| says_how(name)).cloned().collect::<Vec<_>>()
    };
    a.kernel() == b.kernel() && details(a) == details(b)
}

type Source = (u32, u32, u32);

/// Fills one tensor of `to` with elements of `from`; `source` gives their (batch, row, head).
fn copy(from: &HostFwd, to: &mut HostFwd, operand: Operand, source: impl Fn(u32, u32, u32) -> Source) {
    let source_tensor = from.operands.expect(operand);
    let tensor = to.operands.expect_mut(operand);
    let Shape { batch, seq, head, .. } = tensor.shape;
    for b in 0..batch {
        for row in 0..seq {
            for h in 0..head {
                let (from_b, from_row, from_h) = source(b, row, h);
                tensor.copy_row([b, row, h], source_tensor, [from_b, from_row, from_h]);
            }
        }
    }
}

fn copy_keys(from: &HostFwd, to: &mut HostFwd, source: impl Fn(u32, u32, u32) -> Source + Copy) {
    copy(from, to, Operand::K, source);
    copy(from, to, Operand::V, source);
}

/// Makes a cache of Q's type: each element of `a`'s cache times its descale or its row's scale, rounded once.
fn widen(
    a: &HostFwd,
    b: &mut HostFwd,
    operand: Operand,
    [descale, scales]: [Operand; 2],
    kind: Descale,
) -> Result<()> {
    let heads = a.problem.dims.num_heads_kv;
    let seq = a.inputs().seq;
    let rows = KvRows::of(&a.problem, &seq)?;
    let (from, to) = (a.operands.expect(operand), b.operands.expect_mut(operand));
    for span in &a.spans {
        for (j, h) in (0..span.seqlen_k).flat_map(|j| (0..heads).map(move |h| (j, h))) {
            let (batch, row) = rows.at(span, j);
            let factor = a
                .operands
                .get(descale)
                .map_or(1.0, |numbers| numbers.nth(kind.index(span.i_batch, h, heads)));
            let block = a.problem.cache.scales.map_or(1, |scales| scales.block);
            let by_rows = a.operands.get(scales).map(|scales| scales.get(batch, row / block, h, 0));
            let factor = by_rows.unwrap_or(factor);
            for d in 0..to.shape.dim {
                let value = from.get(batch, row, h, d) as f32 * factor as f32;
                to.set([batch, row, h, d], f64::from(value));
            }
        }
    }
    Ok(())
}

/// First place where the last rows of `many` differ in a bit from the only rows of `one`.
fn last_row_differs(many: &HostFwd, one: &HostFwd) -> Option<String> {
    let (o_many, o_one) = (many.operands.expect(Operand::O), one.operands.expect(Operand::O));
    for (span, alone) in many.spans.iter().zip(&one.spans) {
        for head in 0..many.problem.dims.num_heads_q {
            for d in 0..many.problem.dims.head_dim_v {
                let last = span.q_row + span.seqlen_q - 1;
                let bits = o_many.bits(span.q_batch, last, head, d);
                let bits_alone = o_one.bits(alone.q_batch, alone.q_row, head, d);
                if bits != bits_alone {
                    let i_batch = span.i_batch;
                    return Some(format!(
                        "o at batch {i_batch} head {head} dim {d}: bits {bits:#x} as the last, {bits_alone:#x} alone"
                    ));
                }
            }
        }
    }
    None
}

/// Whether the caches of two calls differ anywhere, also in unused rows.
fn cache_differs(a: &HostFwd, b: &HostFwd) -> Option<String> {
    [("k", Operand::K), ("v", Operand::V)].into_iter().find_map(|(name, operand)| {
        let (a, b) = (a.operands.get(operand)?, b.operands.get(operand)?);
        let at = a.elems().iter().zip(b.elems()).position(|(a, b)| a != b)?;
        Some(format!("{name}: the caches differ from byte {at} on"))
    })
}

/// First place where O or LSE of two calls differ in a bit.
fn difference(a: &HostFwd, b: &HostFwd, reversed: bool) -> Option<String> {
    a.spans.iter().enumerate().find_map(|(index, span_a)| {
        let span_b = &b.spans[if reversed { b.spans.len() - 1 - index } else { index }];
        difference_in_sequence(a, span_a, b, span_b)
    })
}

/// First place where O or LSE of one sequence of each call differ in a bit.
fn difference_in_sequence(a: &HostFwd, span_a: &SeqSpan, b: &HostFwd, span_b: &SeqSpan) -> Option<String> {
    let problem = &a.problem;
    let (o_a, o_b) = (a.operands.expect(Operand::O), b.operands.expect(Operand::O));
    for head in 0..problem.dims.num_heads_q {
        for i in 0..span_a.seqlen_q {
            let place = || format!("at batch {} head {head} row {i}", span_a.i_batch);
            let at_a = [span_a.q_batch, span_a.q_row + i, head];
            let at_b = [span_b.q_batch, span_b.q_row + i, head];
            if let Some(d) = o_a.row_differs(at_a, o_b, at_b) {
                let bits_a = o_a.bits(at_a[0], at_a[1], head, d);
                let bits_b = o_b.bits(at_b[0], at_b[1], head, d);
                return Some(format!("o {} dim {d}: bits {bits_a:#x} here, {bits_b:#x} there", place()));
            }
            if let (Some(lse_a), Some(lse_b)) = (a.operands.get(Operand::Lse), b.operands.get(Operand::Lse)) {
                let bits = |lse: &Tensor, at: usize| lse.nth(at).to_bits();
                let bits_a = bits(lse_a, span_a.lse_index(problem, head, i));
                let bits_b = bits(lse_b, span_b.lse_index(&b.problem, head, i));
                if bits_a != bits_b {
                    return Some(format!("lse {} differs", place()));
                }
            }
        }
    }
    None
}

/// Runs a call directly, then replays it from a recording made with other lengths in the same buffers.
fn recorded(backend: &Device, options: &Options, forward: &Forward) -> Result<Verdict> {
    let Forward { problem, lengths, data, .. } = forward;
    let mut fresh = HostFwd::new(problem.clone(), lengths, *data)?;
    let plan = run(backend, &options.plan, &mut fresh)?;
    let mut verdict = check_fwd(&fresh, &Selection::default(), &|_, _| ())?;
    if !backend.has_streams() || !plan.promises().graph_capturable {
        verdict.note = Some("one call within the bound: nothing here can be recorded");
        return Ok(verdict);
    }
    let reversed = |lengths: &[i32]| lengths.iter().rev().copied().collect();
    let others = Lengths {
        seqused_q: reversed(&lengths.seqused_q),
        seqused_k: reversed(&lengths.seqused_k),
        ..lengths.clone()
    };
    let mut first = HostFwd::new(problem.clone(), &others, *data)?;
    let mut replayed = HostFwd::new(problem.clone(), lengths, *data)?;
    replay_fwd(backend, &plan, &mut first, &mut replayed)?;
    verdict.faults.extend(difference(&replayed, &fresh, false));
    verdict.note = Some(BIT_FOR_BIT);
    Ok(verdict)
}

/// Attends to the keys in `parts` ranges (one of them empty if there are more than two), merges, and
/// holds what comes out to the reference of the whole.
///
/// A mask is moved along with the keys: `j - i` of key `start + j` is larger by `start`.
fn split_and_merge(
    backend: &Device,
    options: &Options,
    forward: &Forward,
    parts: u32,
    mut whole: HostFwd,
) -> Result<Verdict> {
    let problem = &forward.problem;
    let dims = problem.dims;
    let rows = problem.shape_o();
    let mut merge = CombineProblem::new(parts, DType::F32, problem.dtypes.o, rows);
    merge.write_lse = problem.write_lse;
    let mut merged = HostCombine::new(merge, Data::default(), 0.0)?;
    for part in 0..parts {
        let cut = |part: u32| if parts > 2 && part == 1 { 0 } else { part * dims.seqlen_k / parts };
        let (start, end) = if parts > 2 && part == 0 { (0, 0) } else { (cut(part), cut(part + 1)) };
        let (start, end) = if part + 1 == parts { (start, dims.seqlen_k) } else { (start, end) };
        let mut piece = problem.clone();
        piece.dims.seqlen_k = end - start;
        piece.dtypes.o = DType::F32;
        piece.write_lse = true;
        if let MaskShape::Generic { y, x } = problem.mask.shape {
            let shift = start.cast_signed();
            piece.mask.shape = MaskShape::Generic { y: y + shift, x: x - shift };
        }
        contiguous(&mut piece);
        let mut host = HostFwd::new(piece, &Lengths::default(), forward.data)?;
        copy_keys(&whole, &mut host, |batch, row, head| (batch, start + row, head));
        run(backend, &options.plan, &mut host)?;
        let Some(o) = host.operands.0.remove(&Operand::O) else { continue };
        let Some(lse) = host.operands.0.remove(&Operand::Lse) else { continue };
        merged.operands.put(Operand::PartO(part), o);
        merged.operands.put(Operand::PartLse(part), lse);
    }
    // Tile options are the forward's; the combine has none to set.
    let mut combines = options.plan.clone();
    combines.tile.clear();
    let plan = backend.plan_combine(&merged.problem, &combines)?;
    run_combine(backend, &plan, &mut merged)?;
    for operand in [Operand::O, Operand::Lse] {
        if let Some(tensor) = merged.operands.0.remove(&operand) {
            whole.operands.put(operand, tensor);
        }
    }
    check_fwd(&whole, &Selection::default(), &|_, _| ())
}
