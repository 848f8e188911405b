//! The owned tensors of a forward, backward or combine problem, filled from a seed.

use fmha_core::block_scales::E2m1Pair;
use fmha_core::masks::{HostMasks, Shown};
use fmha_core::reference::{Inputs, Precision, forward_head};
use fmha_core::seq::{KvRows, spans};
use fmha_core::{
    Bias, BlockFormat, BlockList, BlockLists, BlockScales, BlockTable, BwdProblem, CacheArgs, CacheRows,
    CombineProblem, DType, Descale, DropoutSeed, ElemType, Extents, FwdPlan, FwdProblem, KvLayout,
    ListLength, MaskArgs, Merge, QLayout, Result, ScoreArgs, ScoreSums, SecondArgs, SecondCache, SeqArgs,
    SeqSpan, Shape, Strides, Totals, VLayout, ValidBwd, ValidCombine, ValidFwd,
};
use rayon::prelude::*;

use crate::init::{Init, mix};
use crate::tensor::{Operand, Operands, Room, Tensor};

/// Lengths and offsets in the form that the device reads; empty if the problem has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lengths {
    /// Number of rows of packed tensors, and of pages of paged ones.
    pub totals: Totals,
    /// Pages of each sequence if K is paged: `[batch, max_pages]`.
    pub block_table: Vec<i32>,
    /// Offsets of packed new keys: `[batch + 1]`.
    pub cu_seqlens_new: Vec<i32>,
    /// Elements of the tensors of the masks.
    pub masks: MaskNumbers,
    /// Tree mask: u32 words in the contract's layout.
    pub tree_mask: Vec<i32>,
    /// Lists of keys, in the layout of their strides.
    pub indices: Vec<i32>,
    /// Entries in use of each list, if the problem has lengths of lists.
    pub topk_length: Vec<i32>,
    /// Lengths of a second cache's keys.
    pub second: Option<Box<Lengths>>,
    /// Offsets of packed Q: `[batch + 1]`.
    pub cu_seqlens_q: Vec<i32>,
    /// Offsets of packed K: `[batch + 1]`.
    pub cu_seqlens_k: Vec<i32>,
    /// Queries in use, `[batch]`, if the problem has `seqused_q`.
    pub seqused_q: Vec<i32>,
    /// Keys in use, `[batch]`, if the problem has `seqused_k`.
    pub seqused_k: Vec<i32>,
}

/// Elements of the tensors of the masks, from each tensor's first element to its last; empty if the problem has
/// none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MaskNumbers {
    /// Endpoints of the intervals of keys.
    pub intervals: Vec<i32>,
    /// Words of the mask as bits.
    pub bits: Vec<i32>,
    /// Partial list of blocks: number of blocks in each row, and their indices.
    pub partial: [Vec<i32>; 2],
    /// Full list of blocks: number of blocks in each row, and their indices.
    pub full: [Vec<i32>; 2],
}

impl Lengths {
    /// Lengths of packed sequences with the given (queries, keys) and no gap between them.
    #[must_use]
    pub fn packed(sequences: &[(u32, u32)]) -> Self {
        let total = |length: fn(&(u32, u32)) -> u32| sequences.iter().map(length).sum();
        let sums = |length: fn(&(u32, u32)) -> u32| {
            let mut sum = 0;
            std::iter::once(0)
                .chain(sequences.iter().map(|sequence| {
                    sum += length(sequence).cast_signed();
                    sum
                }))
                .collect()
        };
        Self {
            totals: Totals::packed(total(|s| s.0), total(|s| s.1)),
            cu_seqlens_q: sums(|s| s.0),
            cu_seqlens_k: sums(|s| s.1),
            ..Self::default()
        }
    }
}

/// Values and layout of a case's tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Data {
    /// Kind of numbers of Q, K, V and the incoming gradients.
    pub init: Init,
    /// Seed of every number and of the dropout mask.
    pub seed: u64,
    /// Where the tensors lie in memory.
    pub room: Room,
}

/// A forward call's tensors. Inputs are filled at every element that mask and lengths do not exclude, and NaN
/// elsewhere; outputs are NaN.
pub struct HostFwd {
    /// The problem of the case.
    pub problem: ValidFwd,
    /// Rows of packed tensors.
    pub totals: Totals,
    /// Rows or pages of a second cache.
    pub second_totals: Totals,
    /// Every operand.
    pub operands: Operands,
    /// Position of the random generator of dropout.
    pub dropout: DropoutSeed,
    /// Sequences of the call.
    pub spans: Vec<SeqSpan>,
    /// How the last plan summed scores, by its promise.
    pub score_sums: ScoreSums,
    /// Whether the last plan multiplied V's stored elements, so that it rounds P to their type (CONTRACT.md,
    /// "Scales by blocks").
    pub rounds_p: bool,
}

impl HostFwd {
    /// Notes how a plan sums scores and rounds P.
    pub(crate) fn takes_numerics_of(&mut self, plan: &FwdPlan) {
        self.score_sums = plan.promises().score_sums;
        self.rounds_p = plan.kernel() == "sm100";
    }

    /// Fills every input.
    ///
    /// # Errors
    /// A problem that contradicts itself, lengths that do not fit it, or too little memory.
    pub fn new(problem: FwdProblem, lengths: &Lengths, data: Data) -> Result<Self> {
        Self::with_fill(problem, lengths, data, &|tensor, operand, rows| fill(tensor, operand, rows, data))
    }

    /// Makes tensors like [`new`](Self::new), but Q, K and V are NaN until the caller writes them.
    pub(crate) fn unfilled(problem: FwdProblem, lengths: &Lengths, data: Data) -> Result<Self> {
        Self::with_fill(problem, lengths, data, &|_, _, _| ())
    }

    fn with_fill(problem: FwdProblem, lengths: &Lengths, data: Data, fill: Fill<'_>) -> Result<Self> {
        let problem = problem.validate()?;
        let mut operands = Operands::default();
        let spans = inputs(&problem, lengths, data, fill, &mut operands)?;
        let tensor = |dtype, shape, strides| Tensor::new(dtype, shape, strides, data.room);
        let extents = problem.extents(lengths.totals);
        operands.put(Operand::O, tensor(problem.dtypes.o, extents.o, problem.strides.o)?);
        if problem.write_lse {
            operands.put(Operand::Lse, Tensor::row(DType::F32, extents.lse_elems, data.room)?);
        }
        if problem.scales.scale_o {
            // The scale is no power of two, and far from the largest number of every type.
            operands.put(Operand::ScaleO, Tensor::f32s(&[11.0], data.room)?);
        }
        if problem.dropout.write_keep_mask {
            operands.put(Operand::KeepMask, Tensor::u8s(problem.keep_mask_bytes(), data.room)?);
        }
        for (operand, wanted, elems) in [
            (Operand::RowMax, problem.outputs.row_max, extents.lse_elems),
            (Operand::HeadMax, problem.outputs.head_max, problem.dims.num_heads_q.into()),
            (Operand::KeySum, problem.outputs.key_sum, problem.key_sum_elems()),
        ] {
            if wanted {
                operands.put(operand, Tensor::row(DType::F32, elems, data.room)?);
            }
        }
        let (totals, dropout) = (lengths.totals, dropout_seed(data.seed));
        let second_totals = lengths.second.as_ref().map_or(Totals::NONE, |second| second.totals);
        let score_sums = ScoreSums::F32;
        let rounds_p = false;
        Ok(Self { problem, totals, second_totals, operands, dropout, spans, score_sums, rounds_p })
    }

    /// Operands as the reference reads them.
    #[must_use]
    pub fn inputs(&self) -> Inputs<'_> {
        let inputs = inputs_of((self.totals, self.problem.dims.batch), &self.operands, self.dropout);
        let facts = (self.second_totals, self.problem.dims.batch);
        Inputs { second: second_of(facts, |operand| self.operands.input(operand)), ..inputs }
    }
}

/// A backward call's tensors. O and LSE are NaN until [`fill_forward`](Self::fill_forward) or the caller writes
/// them.
pub struct HostBwd {
    /// The problem of the case.
    pub problem: ValidBwd,
    /// Rows of packed tensors.
    pub totals: Totals,
    /// Every operand.
    pub operands: Operands,
    /// Position of the random generator of dropout.
    pub dropout: DropoutSeed,
    /// The sequences.
    pub spans: Vec<SeqSpan>,
    /// How the last backward plan summed scores, by its promise.
    pub score_sums: ScoreSums,
}

impl HostBwd {
    /// Fills every input but O and LSE.
    ///
    /// # Errors
    /// As [`HostFwd::new`].
    pub fn new(problem: BwdProblem, lengths: &Lengths, data: Data) -> Result<Self> {
        let problem = problem.validate()?;
        let fwd = problem.fwd().clone();
        let mut operands = Operands::default();
        let filled: Fill<'_> = &|tensor, operand, rows| fill(tensor, operand, rows, data);
        let spans = inputs(&fwd, lengths, data, filled, &mut operands)?;
        let tensor = |dtype, shape, strides| Tensor::new(dtype, shape, strides, data.room);
        let extents = fwd.extents(lengths.totals);
        operands.put(Operand::O, tensor(fwd.dtypes.o, extents.o, fwd.strides.o)?);
        operands.put(Operand::Lse, Tensor::row(DType::F32, extents.lse_elems, data.room)?);
        let mut dout = tensor(fwd.dtypes.o, extents.o, problem.dout)?;
        fill(&mut dout, Operand::Dout, &q_rows(&spans), data);
        operands.put(Operand::Dout, dout);
        if problem.has_dlse {
            let mut dlse = Tensor::row(DType::F32, extents.lse_elems, data.room)?;
            for span in &spans {
                for (i_head, i) in heads_and_rows(&fwd, span) {
                    let mut value = [0.0];
                    data.init.fill(Operand::Dlse, data.seed, [span.i_batch, i_head, i], &mut value);
                    dlse.set_nth(span.lse_index(&fwd, i_head, i), f64::from(value[0]));
                }
            }
            operands.put(Operand::Dlse, dlse);
        }
        let grad = problem.dtype_grad;
        operands.put(Operand::Dq, tensor(grad, extents.q, problem.dq)?);
        operands.put(Operand::Dk, tensor(grad, extents.k, problem.dk)?);
        operands.put(Operand::Dv, tensor(grad, extents.v, problem.dv)?);
        if let (Some(dbias), Bias::Elementwise(bias)) = (problem.dbias, fwd.score.bias) {
            let shape = fwd.shape_bias(bias.broadcast);
            operands.put(Operand::Dbias, tensor(dbias.dtype, shape, dbias.strides)?);
        }
        if problem.write_dsink {
            let heads = u64::from(fwd.dims.num_heads_q);
            operands.put(Operand::Dsink, Tensor::row(DType::F32, heads, data.room)?);
        }
        let (totals, dropout) = (lengths.totals, dropout_seed(data.seed));
        Ok(Self { problem, totals, operands, dropout, spans, score_sums: ScoreSums::F32 })
    }

    /// Writes O and LSE as an exact forward call would, rounded to their types.
    ///
    /// # Errors
    /// Operands that are missing.
    pub fn fill_forward(&mut self) -> Result<()> {
        let fwd = self.problem.fwd().clone();
        for span in self.spans.clone() {
            for i_head in 0..fwd.dims.num_heads_q {
                let head = forward_head(&fwd, &self.inputs(), span, i_head, Precision::Exact)?;
                let dim = fwd.dims.head_dim_v;
                for i in 0..span.seqlen_q {
                    let o = self.operands.expect_mut(Operand::O);
                    for d in 0..dim {
                        let value = head.o[(i * dim + d) as usize];
                        o.set([span.q_batch, span.q_row + i, i_head, d], value);
                    }
                    let index = span.lse_index(&fwd, i_head, i);
                    self.operands.expect_mut(Operand::Lse).set_nth(index, head.lse[i as usize]);
                }
            }
        }
        Ok(())
    }

    /// Operands as the reference reads them.
    #[must_use]
    pub fn inputs(&self) -> Inputs<'_> {
        inputs_of((self.totals, self.problem.fwd().dims.batch), &self.operands, self.dropout)
    }
}

/// A combine call's tensors.
pub struct HostCombine {
    /// The problem of the case.
    pub problem: ValidCombine,
    /// Every operand.
    pub operands: Operands,
}

impl HostCombine {
    /// Fills the parts: O by `data`, LSE with normal numbers plus `lse_offset`. One row in four has one empty part
    /// (LSE −inf, O NaN), one row in sixteen only empty parts. For sums of parts there is no LSE, and every row is
    /// filled.
    ///
    /// # Errors
    /// A problem that contradicts itself, or too little memory.
    pub fn new(problem: CombineProblem, data: Data, lse_offset: f64) -> Result<Self> {
        let problem = problem.validate()?;
        let shape = problem.shape();
        let mut operands = Operands::default();
        for part in 0..problem.num_parts {
            let mut o = Tensor::new(problem.dtype_part, shape, problem.part, data.room)?;
            let mut lse = Tensor::row(DType::F32, problem.lse_elems(), data.room)?;
            let mut row = vec![0.0; shape.dim as usize];
            for index in 0..problem.lse_elems() as usize {
                let i = index as u32 % shape.seq;
                let head = index as u32 / shape.seq % shape.head;
                let batch = index as u32 / shape.seq / shape.head;
                let choice = mix(data.seed ^ (index as u64) << 8);
                let empty = !problem.adds()
                    && (choice.is_multiple_of(16)
                        || choice % 4 == 1 && (choice >> 8) as u32 % problem.num_parts == part);
                if empty {
                    lse.set_nth(index, f64::NEG_INFINITY);
                    continue;
                }
                data.init.fill(Operand::PartLse(part), data.seed, [batch, head, i], &mut row[..1]);
                lse.set_nth(index, f64::from(row[0]) + lse_offset);
                data.init.fill(Operand::PartO(part), data.seed, [batch, head, i], &mut row);
                for (d, &value) in row.iter().enumerate() {
                    o.set([batch, i, head, d as u32], f64::from(value));
                }
            }
            operands.put(Operand::PartO(part), o);
            if !problem.adds() {
                operands.put(Operand::PartLse(part), lse);
            }
        }
        let mut o = Tensor::new(problem.dtype_o, shape, problem.o, data.room)?;
        if problem.merge == Merge::AddTo {
            // O's old content is stored after the parts, since O is overwritten before the check.
            let mut held = Tensor::new(DType::F32, shape, Strides::bshd(shape), data.room)?;
            for (batch, row, head) in rows_of(shape) {
                let mut values = vec![0.0; shape.dim as usize];
                data.init.fill(Operand::O, data.seed, [batch, head, row], &mut values);
                for (d, &value) in values.iter().enumerate() {
                    let value = problem.dtype_o.round(value.into());
                    o.set([batch, row, head, d as u32], value);
                    held.set([batch, row, head, d as u32], value);
                }
            }
            operands.put(Operand::PartO(problem.num_parts), held);
        }
        operands.put(Operand::O, o);
        if problem.write_lse {
            operands.put(Operand::Lse, Tensor::row(DType::F32, problem.lse_elems(), data.room)?);
        }
        Ok(Self { problem, operands })
    }
}

/// Every (sequence, row, head).
fn rows_of(shape: Shape) -> impl Iterator<Item = (u32, u32, u32)> {
    let rows = (0..shape.batch).flat_map(move |batch| (0..shape.seq).map(move |row| (batch, row)));
    rows.flat_map(move |(batch, row)| (0..shape.head).map(move |head| (batch, row, head)))
}

/// Every (query head, query) of a sequence.
pub(crate) fn heads_and_rows(
    problem: &FwdProblem,
    span: &SeqSpan,
) -> impl Iterator<Item = (u32, u32)> + use<> {
    let rows = span.seqlen_q;
    (0..problem.dims.num_heads_q).flat_map(move |head| (0..rows).map(move |i| (head, i)))
}

fn dropout_seed(seed: u64) -> DropoutSeed {
    DropoutSeed { seed: mix(seed ^ 0xd0), offset: seed % 5 }
}

fn inputs_of(facts: (Totals, u32), operands: &Operands, dropout: DropoutSeed) -> Inputs<'_> {
    let k = operands.expect(Operand::K).slice();
    Inputs {
        q: operands.expect(Operand::Q).slice(),
        k,
        v: operands.input(Operand::V).unwrap_or(k),
        seq: seq_of(facts, |operand| operands.input(operand)),
        cache: cache_of(|operand| operands.input(operand)),
        cache_scales: [Operand::KScale, Operand::VScale].map(|operand| operands.input(operand)),
        score: score_of(dropout, |operand| operands.input(operand)),
        masks: masks_of(|operand| operands.input(operand)),
        second: None,
    }
}

/// The score's operands, wherever they lie.
pub(crate) fn score_of<'a>(
    dropout: DropoutSeed,
    mut input: impl FnMut(Operand) -> Option<fmha_core::DevSlice<'a>>,
) -> ScoreArgs<'a> {
    ScoreArgs::default()
        .bias(input(Operand::Bias))
        .alibi_slopes(input(Operand::AlibiSlopes))
        .sink(input(Operand::Sink))
        .descale_q(input(Operand::DescaleQ))
        .descale_k(input(Operand::DescaleK))
        .descale_v(input(Operand::DescaleV))
        .block_scale_q(input(Operand::BlockScaleQ))
        .block_scale_k(input(Operand::BlockScaleK))
        .block_scale_v(input(Operand::BlockScaleV))
        .dropout(dropout)
}

/// The cache's operands, wherever they lie.
pub(crate) fn cache_of<'a>(
    mut input: impl FnMut(Operand) -> Option<fmha_core::DevSlice<'a>>,
) -> CacheArgs<'a> {
    CacheArgs::default()
        .k_new(input(Operand::KNew))
        .v_new(input(Operand::VNew))
        .cos(input(Operand::Cos))
        .sin(input(Operand::Sin))
        .tree_mask(input(Operand::TreeMask))
}

/// A second cache, wherever it lies.
pub(crate) fn second_of<'a>(
    (totals, batch): (Totals, u32),
    mut input: impl FnMut(Operand) -> Option<fmha_core::DevSlice<'a>>,
) -> Option<SecondArgs<'a>> {
    let (k, v) = (input(Operand::SecondK)?, input(Operand::SecondV));
    let seq = SeqArgs::default()
        .totals(totals)
        .block_table(input(Operand::SecondBlockTable).map(|pages| table(pages, batch)))
        .cu_seqlens_k(input(Operand::SecondCuSeqlensK))
        .seqused_k(input(Operand::SecondSequsedK))
        .indices(input(Operand::SecondIndices))
        .topk_length(input(Operand::SecondTopkLength));
    Some(SecondArgs::new(k, v).seq(seq).intervals(input(Operand::SecondIntervals)))
}

fn table(pages: fmha_core::DevSlice<'_>, batch: u32) -> BlockTable<'_> {
    BlockTable { pages, max_pages: (pages.bytes() / 4 / u64::from(batch.max(1))) as u32 }
}

/// Slices of the tensors of the masks, wherever they lie.
pub(crate) fn masks_of<'a>(
    mut input: impl FnMut(Operand) -> Option<fmha_core::DevSlice<'a>>,
) -> MaskArgs<'a> {
    MaskArgs::default()
        .intervals(input(Operand::Intervals))
        .bits(input(Operand::MaskBits))
        .kv_num_blocks(input(Operand::KvNumBlocks))
        .kv_indices(input(Operand::KvIndices))
        .full_kv_num_blocks(input(Operand::FullKvNumBlocks))
        .full_kv_indices(input(Operand::FullKvIndices))
}

/// The lengths, wherever they lie.
pub(crate) fn seq_of<'a>(
    (totals, batch): (Totals, u32),
    mut input: impl FnMut(Operand) -> Option<fmha_core::DevSlice<'a>>,
) -> SeqArgs<'a> {
    SeqArgs::default()
        .totals(totals)
        .block_table(input(Operand::BlockTable).map(|pages| table(pages, batch)))
        .cu_seqlens_new(input(Operand::CuSeqlensNew))
        .cu_seqlens_q(input(Operand::CuSeqlensQ))
        .cu_seqlens_k(input(Operand::CuSeqlensK))
        .seqused_q(input(Operand::SequsedQ))
        .seqused_k(input(Operand::SequsedK))
        .indices(input(Operand::Indices))
        .topk_length(input(Operand::TopkLength))
}

/// Lengths, Q, K, V and the score's operands.
fn inputs(
    problem: &ValidFwd,
    lengths: &Lengths,
    data: Data,
    fill: Fill<'_>,
    operands: &mut Operands,
) -> Result<Vec<SeqSpan>> {
    let facts = (lengths.totals, problem.dims.batch);
    let packs_new = problem.cache.append.is_some_and(|append| append.layout == QLayout::Packed);
    let has_table = problem.layout.kv.is_paged() && !problem.lists_addresses();
    let has_length = problem.lists.is_some_and(|lists| lists.length != ListLength::Whole);
    let masks = &problem.masks;
    let has_list =
        |of: fn(&BlockLists) -> Option<BlockList>| masks.block_lists.as_ref().and_then(of).is_some();
    let (partial, full) = (has_list(|lists| lists.partial), has_list(|lists| lists.full));
    for (operand, wanted, values) in [
        (Operand::Intervals, masks.intervals.is_some(), &lengths.masks.intervals),
        (Operand::MaskBits, masks.bits.is_some(), &lengths.masks.bits),
        (Operand::KvNumBlocks, partial, &lengths.masks.partial[0]),
        (Operand::KvIndices, partial, &lengths.masks.partial[1]),
        (Operand::FullKvNumBlocks, full, &lengths.masks.full[0]),
        (Operand::FullKvIndices, full, &lengths.masks.full[1]),
        (Operand::BlockTable, has_table, &lengths.block_table),
        (Operand::Indices, problem.lists.is_some(), &lengths.indices),
        (Operand::TopkLength, has_length, &lengths.topk_length),
        (Operand::CuSeqlensNew, packs_new, &lengths.cu_seqlens_new),
        (Operand::TreeMask, problem.cache.tree_mask, &lengths.tree_mask),
        (Operand::CuSeqlensQ, problem.layout.q == QLayout::Packed, &lengths.cu_seqlens_q),
        (Operand::CuSeqlensK, problem.layout.kv == KvLayout::Packed, &lengths.cu_seqlens_k),
        (Operand::SequsedQ, problem.layout.seqused_q, &lengths.seqused_q),
        (Operand::SequsedK, problem.layout.seqused_k, &lengths.seqused_k),
    ] {
        if wanted {
            let is_bits = matches!(operand, Operand::TreeMask | Operand::MaskBits);
            let elem = if is_bits { ElemType::U32 } else { ElemType::I32 };
            operands.put(operand, Tensor::words(values, elem, data.room)?);
        }
    }
    let seq = seq_of(facts, |operand| operands.input(operand));
    let spans = spans(problem, &seq)?;
    let kv_rows = KvRows::of(problem, &seq)?;

    let extents = problem.extents(lengths.totals);
    let (rows_q, rows_k) = (q_rows(&spans), k_rows(&spans, kv_rows));
    let mut filled = vec![];
    let (k, of_k) = problem.k_in_memory(extents.k);
    for (operand, dtype, shape, strides, rows) in [
        (Operand::Q, problem.dtypes.qk, extents.q, problem.strides.q, &rows_q),
        (Operand::K, of_k, k, problem.strides.k, &rows_k),
        (Operand::V, problem.stored_v(), extents.v, problem.strides.v, &rows_k),
    ] {
        if operand == Operand::V && problem.cache.v_in_k || problem.block_scales.is_some() {
            continue;
        }
        let mut tensor = Tensor::new(dtype, shape, strides, data.room)?;
        match problem.cache.rows.filter(|_| operand == Operand::K) {
            None => fill(&mut tensor, operand, rows),
            Some(format) => quantised_rows(&mut tensor, format, operand, rows, data),
        }
        if operand != Operand::Q && !masks.is_empty() {
            spoil_hidden(&mut tensor, problem, lengths.totals, &spans, kv_rows, operands)?;
        }
        filled.push((operand, tensor));
    }
    filled.into_iter().for_each(|(operand, tensor)| operands.put(operand, tensor));
    if let Some(scales) = &problem.block_scales {
        scaled_operands(problem, scales, &extents, [&rows_q, &rows_k], data, operands)?;
    }
    cache_operands(problem, lengths, &spans, data, operands)?;
    if let Some(scales) = &problem.cache.scales {
        let of_k = (Operand::KScale, extents.k, scales.k, 0.02);
        for (operand, of, strides, least) in [of_k, (Operand::VScale, extents.v, scales.v, 0.03)] {
            let mut tensor = Tensor::new(DType::F32, scales.shape(of), strides, data.room)?;
            // Scales are no powers of two, and neighbours differ. Scales of blocks without a row in use stay NaN.
            for (row, head) in rows_k.iter().flat_map(|row| (0..of.head).map(move |head| (row, head))) {
                let at = row.row / scales.block;
                let value = least * f64::from(1 + (at * 7 + head * 3 + row.storage_batch) % 11);
                tensor.set([row.storage_batch, at, head, 0], value);
            }
            operands.put(operand, tensor);
        }
    }
    if let (Some(second), Some(of_second)) = (&problem.second, &lengths.second) {
        second_cache(problem, second, (lengths, of_second), data, fill, operands)?;
    }

    let dims = problem.dims;
    let heads = dims.num_heads_q;
    match problem.score.bias {
        Bias::None => {}
        Bias::Elementwise(bias) => {
            let shape = problem.shape_bias(bias.broadcast);
            let mut tensor = Tensor::new(bias.dtype, shape, bias.strides, data.room)?;
            let args = masks_of(|operand| operands.input(operand));
            let masks = HostMasks::of(problem, &args, lengths.totals.total_q)?;
            fill_bias(&mut tensor, problem, &spans, masks.as_ref(), data);
            operands.put(Operand::Bias, tensor);
        }
        Bias::Alibi { per_batch } => {
            let rows = if per_batch { dims.batch } else { 1 };
            // The slopes of Press et al., "Train Short, Test Long": 2^(-8 (h + 1) / heads).
            let slope = |b: u32, h: u32| 2f32.powf(-8.0 * (h + 1) as f32 / heads as f32) * (1.0 + b as f32);
            let slopes: Vec<f32> = (0..rows).flat_map(|b| (0..heads).map(move |h| slope(b, h))).collect();
            operands.put(Operand::AlibiSlopes, Tensor::f32s(&slopes, data.room)?);
        }
    }
    if problem.score.sink {
        let mut sinks = vec![0.0; heads as usize];
        data.init.fill(Operand::Sink, data.seed, [0, 0, 0], &mut sinks);
        operands.put(Operand::Sink, Tensor::f32s(&sinks, data.room)?);
    }
    for (operand, kind, least) in [
        (Operand::DescaleQ, problem.scales.descale_q, 0.6),
        (Operand::DescaleK, problem.scales.descale_k, 0.7),
        (Operand::DescaleV, problem.scales.descale_v, 0.8),
    ] {
        let count = kind.num_elems(dims.batch, dims.num_heads_kv);
        if kind != Descale::None {
            let values: Vec<f32> = (0..count).map(|i| least + (i % 7) as f32 * 0.11).collect();
            operands.put(operand, Tensor::f32s(&values, data.room)?);
        }
    }
    Ok(spans)
}

/// Lengths, K and V of a second cache of a call.
fn second_cache(
    problem: &ValidFwd,
    second: &SecondCache,
    (first, lengths): (&Lengths, &Lengths),
    data: Data,
    fill: Fill<'_>,
    operands: &mut Operands,
) -> Result<()> {
    let mut alone = second.alone(problem);
    let has_table = alone.layout.kv.is_paged() && !alone.lists_addresses();
    let has_length = second.lists.is_some_and(|lists| lists.length != ListLength::Whole);
    for (operand, wanted, values) in [
        (Operand::SecondCuSeqlensK, alone.layout.kv == KvLayout::Packed, &lengths.cu_seqlens_k),
        (Operand::SecondSequsedK, second.seqused_k, &lengths.seqused_k),
        (Operand::SecondBlockTable, has_table, &lengths.block_table),
        (Operand::SecondIndices, second.lists.is_some(), &lengths.indices),
        (Operand::SecondTopkLength, has_length, &lengths.topk_length),
        (Operand::SecondIntervals, second.intervals.is_some(), &lengths.masks.intervals),
    ] {
        if wanted {
            operands.put(operand, Tensor::words(values, ElemType::I32, data.room)?);
        }
    }
    // Positions of keys do not depend on queries, so the queries' layout is simplified.
    (alone.layout.q, alone.layout.seqused_q) = (QLayout::Batch, false);
    let facts = (lengths.totals, problem.dims.batch);
    let none = operands.input(Operand::Q);
    let seq =
        second_of(facts, |operand| if operand == Operand::SecondK { none } else { operands.input(operand) });
    let seq = seq.map_or_else(SeqArgs::default, |args| args.seq);
    let spans = spans(&alone, &seq)?;
    let rows = k_rows(&spans, KvRows::of(&alone, &seq)?);
    let extents = alone.extents(Totals { total_q: first.totals.total_q, ..lengths.totals });
    let mut tensors = vec![(Operand::SecondK, extents.k, second.k)];
    tensors.extend((!problem.cache.v_in_k).then_some((Operand::SecondV, extents.v, second.v)));
    for (operand, shape, strides) in tensors {
        let (shape, dtype) =
            if operand == Operand::SecondK { alone.k_in_memory(shape) } else { (shape, problem.dtypes.v) };
        let mut tensor = Tensor::new(dtype, shape, strides, data.room)?;
        match problem.cache.rows {
            None => fill(&mut tensor, operand, &rows),
            Some(format) => quantised_rows(&mut tensor, format, operand, &rows, data),
        }
        operands.put(operand, tensor);
    }
    Ok(())
}

/// Writes a byte of a page of rows of bytes.
pub(crate) fn set_page_byte(tensor: &mut Tensor, page: u32, at: usize, byte: u8) {
    let (row, d) = (at as u32 / tensor.shape.dim, at as u32 % tensor.shape.dim);
    *tensor.byte_mut([page, row, 0, d]) = byte;
}

/// Fills rows of bytes: each group's scale is the smallest power of two with which its greatest value fits E4M3.
fn quantised_rows(tensor: &mut Tensor, format: CacheRows, operand: Operand, rows: &[Row], data: Data) {
    let page_size = tensor.shape.seq;
    let (values, group) = (format.values() as usize, format.group() as usize);
    let mut numbers = vec![0f32; format.head_dim_qk() as usize];
    for row in rows {
        let [of_values, of_scales, of_rotary] = format.places(page_size, row.row);
        data.init.fill(operand, data.seed, [row.i_batch, 0, row.i], &mut numbers);
        for (n, numbers) in numbers[..values].chunks(group).enumerate() {
            let greatest = numbers.iter().fold(0f32, |max, x| max.max(x.abs()));
            let exponent = (greatest / 448.0).log2().ceil().clamp(-100.0, 100.0) as i32;
            let mut put = |at, byte| set_page_byte(tensor, row.storage_batch, at, byte);
            match format {
                CacheRows::Bytes656 => {
                    let scale = 2f32.powi(exponent).to_le_bytes();
                    scale.into_iter().enumerate().for_each(|(at, byte)| put(of_scales + 4 * n + at, byte));
                }
                _ => put(of_scales + n, (exponent + 127) as u8),
            }
            for (d, &x) in numbers.iter().enumerate() {
                let mut code = [0];
                DType::E4m3Fn.write(f64::from(x) / 2f64.powi(exponent), &mut code);
                put(of_values + n * group + d, code[0]);
            }
        }
        for (d, &x) in numbers[values..].iter().enumerate() {
            let bits = half::bf16::from_f32(x).to_bits().to_le_bytes();
            for (at, byte) in bits.into_iter().enumerate() {
                set_page_byte(tensor, row.storage_batch, of_rotary + 2 * d + at, byte);
            }
        }
    }
}

/// Writes NaN to the rows of K or V that no query of their kv head sees.
fn spoil_hidden(
    tensor: &mut Tensor,
    problem: &FwdProblem,
    totals: Totals,
    spans: &[SeqSpan],
    places: KvRows<'_>,
    operands: &Operands,
) -> Result<()> {
    let args = masks_of(|operand| operands.input(operand));
    let Some(masks) = HostMasks::of(problem, &args, totals.total_q)? else { return Ok(()) };
    let nan = vec![f32::NAN; tensor.shape.dim as usize];
    let ratio = problem.gqa_ratio();
    for span in spans {
        let band = problem.band(span.seqlen_q, span.seqlen_k);
        for i_head_kv in 0..problem.dims.num_heads_kv {
            let heads = i_head_kv * ratio..(i_head_kv + 1) * ratio;
            for j in 0..span.seqlen_cached {
                let sees = |i_head: u32, i: u32| {
                    band.visible(i, j) && masks.head(span, i_head).shown(i, j) != Shown::No
                };
                if !heads.clone().any(|i_head| (0..span.seqlen_q).any(|i| sees(i_head, i))) {
                    let (batch, row) = places.at(span, j);
                    tensor.set_row([batch, row, i_head_kv], &nan);
                }
            }
        }
    }
    Ok(())
}

/// Function that fills given rows of Q, K or V.
type Fill<'a> = &'a dyn Fn(&mut Tensor, Operand, &[Row]);

/// A row to fill: its place, and the sequence and position that it belongs to.
struct Row {
    storage_batch: u32,
    row: u32,
    i_batch: u32,
    i: u32,
}

fn q_rows(spans: &[SeqSpan]) -> Vec<Row> {
    rows(spans, |span| (0..span.seqlen_q).map(move |i| ((span.q_batch, span.q_row + i), i)))
}

/// Keys that the cache holds before the call.
fn k_rows(spans: &[SeqSpan], places: KvRows<'_>) -> Vec<Row> {
    rows(spans, |span| (0..span.seqlen_cached).map(move |j| (places.at(span, j), j)))
}

/// Rows of new keys, with their positions after the append.
fn new_rows(spans: &[SeqSpan]) -> Vec<Row> {
    rows(spans, |span| {
        let new = (span.seqlen_cached..span.seqlen_k).enumerate();
        new.map(|(n, j)| ((span.new_batch, span.new_row + n as u32), j))
    })
}

fn rows<'a, I: Iterator<Item = ((u32, u32), u32)>>(
    spans: &'a [SeqSpan],
    side: impl Fn(&'a SeqSpan) -> I,
) -> Vec<Row> {
    let mut all = Vec::new();
    for span in spans {
        let row = |((storage_batch, row), i)| Row { storage_batch, row, i_batch: span.i_batch, i };
        all.extend(side(span).map(row));
    }
    all
}

/// Operands of an append and of rotary embedding.
fn cache_operands(
    problem: &ValidFwd,
    lengths: &Lengths,
    spans: &[SeqSpan],
    data: Data,
    operands: &mut Operands,
) -> Result<()> {
    if let Some(append) = &problem.cache.append {
        let (k, v) = problem.shapes_new(append, lengths.totals);
        let rows = new_rows(spans);
        for (operand, dtype, shape, strides, wanted) in [
            (Operand::KNew, problem.dtypes.qk, k, append.k_new, true),
            (Operand::VNew, problem.dtypes.v, v, append.v_new, !problem.cache.v_in_k),
        ] {
            if wanted {
                let mut tensor = Tensor::new(dtype, shape, strides, data.room)?;
                fill(&mut tensor, operand, &rows, data);
                operands.put(operand, tensor);
            }
        }
    }
    if let Some(rotary) = &problem.cache.rotary {
        // Angles as in Su et al., "RoFormer": position / 10000^(2 i / dim).
        let half = rotary.dim / 2;
        let angle = |at: u64| {
            let (position, i) = (at / u64::from(half), at % u64::from(half));
            position as f64 * 10000f64.powf(-(i as f64) / f64::from(half))
        };
        for (operand, of) in [(Operand::Cos, f64::cos as fn(f64) -> f64), (Operand::Sin, f64::sin)] {
            let mut table = Tensor::row(rotary.dtype, rotary.table_elems(), data.room)?;
            (0..rotary.table_elems()).for_each(|at| table.set_nth(at as usize, of(angle(at))));
            operands.put(operand, table);
        }
    }
    Ok(())
}

/// Q, K and V in a format with scales by blocks, and the scales: powers of two from 1/4 to 1, or E4M3 numbers from 1/4
/// to 1. Scales of blocks that no row is in stay NaN.
fn scaled_operands(
    problem: &ValidFwd,
    scales: &BlockScales,
    extents: &Extents,
    [rows_q, rows_k]: [&[Row]; 2],
    data: Data,
    operands: &mut Operands,
) -> Result<()> {
    let (format, block) = (scales.format, scales.format.block_size());
    let strides = [problem.strides.q, problem.strides.k, problem.strides.v];
    let (stored, of_scales) = (scales.stored(extents, problem.layout.v), scales.shapes(extents));
    let logical = [extents.q, extents.k, extents.v];
    for (index, (operand, of_operand)) in [
        (Operand::Q, Operand::BlockScaleQ),
        (Operand::K, Operand::BlockScaleK),
        (Operand::V, Operand::BlockScaleV),
    ]
    .into_iter()
    .enumerate()
    {
        let mut tensor = Tensor::coded(format.elem(), stored[index], strides[index], data.room)?;
        let elem = format.scale_elem();
        let mut scale = Tensor::coded(elem, of_scales[index], scales.strides()[index], data.room)?;
        let rows = if index == 0 { rows_q } else { rows_k };
        let pairs_of_keys = index == 2 && problem.layout.v == VLayout::ColMajor;
        let mut numbers = vec![0f32; logical[index].dim as usize];
        for row in rows {
            let (batch, at) = (row.storage_batch, row.row);
            for head in 0..logical[index].head {
                data.init.fill(operand, data.seed, [row.i_batch, head, row.i], &mut numbers);
                set_coded_row(&mut tensor, format, pairs_of_keys, [batch, at, head], &numbers);
                let scale_row = if index == 2 { at / block } else { at };
                for column in 0..of_scales[index].dim {
                    let place = [batch, scale_row, head, column];
                    let salt =
                        place.into_iter().fold(data.seed ^ index as u64, |salt, x| mix(salt ^ u64::from(x)));
                    *scale.byte_mut(place) = scale_code(format, salt);
                }
            }
        }
        operands.put(operand, tensor);
        operands.put(of_operand, scale);
    }
    Ok(())
}

/// Writes a row of numbers as elements of a format; E2M1 numbers lie in pairs along the row, or along its keys.
pub(crate) fn set_coded_row(
    tensor: &mut Tensor,
    format: BlockFormat,
    pairs_of_keys: bool,
    [batch, at, head]: [u32; 3],
    numbers: &[f32],
) {
    if format != BlockFormat::Nvfp4 {
        return tensor.set_row([batch, at, head], numbers);
    }
    for (d, &number) in (0..).zip(numbers) {
        let code = E2m1Pair::from_f64_saturating([number.into(), 0.0]).to_bits();
        let (place, half) = if pairs_of_keys {
            ([batch, at / 2, head, d], at % 2)
        } else {
            ([batch, at, head, d / 2], d % 2)
        };
        let byte = tensor.byte_mut(place);
        *byte = if half == 0 { *byte & 0xf0 | code } else { *byte & 0x0f | code << 4 };
    }
}

/// The byte of a scale that a salt decides.
pub(crate) fn scale_code(format: BlockFormat, salt: u64) -> u8 {
    match format {
        BlockFormat::Nvfp4 => 0x28 + (salt % 17) as u8,
        _ => 125 + (salt % 3) as u8,
    }
}

/// Fills `rows` of every head. Numbers are made on all cores, a block of rows at a time.
fn fill(tensor: &mut Tensor, operand: Operand, rows: &[Row], data: Data) {
    let Shape { head: heads, dim, .. } = tensor.shape;
    let width = heads as usize * dim as usize;
    let block = (1 << 20) / width.max(1) + 1;
    let mut numbers = vec![0f32; block.min(rows.len()) * width];
    for rows in rows.chunks(block) {
        numbers.par_chunks_mut(width).zip(rows).for_each(|(numbers, row)| {
            for (head, numbers) in numbers.chunks_mut(dim as usize).enumerate() {
                data.init.fill(operand, data.seed, [row.i_batch, head as u32, row.i], numbers);
            }
        });
        for (numbers, row) in numbers.chunks(width).zip(rows) {
            for (head, numbers) in numbers.chunks(dim as usize).enumerate() {
                tensor.set_row([row.storage_batch, row.row, head as u32], numbers);
            }
        }
    }
}

/// Fills the elements of a bias that some score uses; elements of hidden pairs stay NaN.
fn fill_bias(
    tensor: &mut Tensor,
    problem: &FwdProblem,
    spans: &[SeqSpan],
    masks: Option<&HostMasks<'_>>,
    data: Data,
) {
    let Shape { batch, seq, head: heads, dim } = tensor.shape;
    let mut numbers = vec![0f32; dim as usize];
    let mut used = vec![false; dim as usize];
    for b in 0..batch {
        for i in 0..seq {
            used.fill(false);
            let sharers = spans.iter().filter(|span| batch == 1 || span.i_batch == b);
            for span in sharers.filter(|span| i < span.seqlen_q) {
                let band = problem.band(span.seqlen_q, span.seqlen_k);
                let keys = band.k_range(i..i + 1, span.seqlen_k);
                let by_some = |j: u32| {
                    let sees = |masks: &HostMasks<'_>, h| masks.head(span, h).shown(i, j) != Shown::No;
                    masks.is_none_or(|masks| (0..problem.dims.num_heads_q).any(|h| sees(masks, h)))
                };
                for j in band.sink_range(i..i + 1, span.seqlen_k).chain(keys).filter(|&j| by_some(j)) {
                    used[j as usize] = true;
                }
            }
            for h in 0..heads {
                data.init.fill(Operand::Bias, data.seed, [b, h, i], &mut numbers);
                for j in (0..dim).filter(|&j| used[j as usize]) {
                    tensor.set([b, i, h, j], f64::from(numbers[j as usize]));
                }
            }
        }
    }
}

/// Strides with gaps: every row padded to `row` elements, every head and sequence by a row more.
#[must_use]
pub fn padded(shape: Shape, gap: u32) -> Strides {
    let head = i64::from(shape.dim) + i64::from(gap);
    let seq = head * i64::from(shape.head) + i64::from(gap);
    Strides { batch: seq * (i64::from(shape.seq) + 1), seq, head, dim: 1 }
}
