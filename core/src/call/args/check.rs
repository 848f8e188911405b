//! The check that a call's pointers fit their problem.

use smallvec::SmallVec;

use super::overlap::{Lattice, Meeting};
use super::{
    BwdArgs, CacheArgs, CacheSlice, ChooseArgs, CombineArgs, DevSlice, DevSliceMut, ElemType, FwdArgs,
    IndexLossArgs, MaskArgs, MemorySpace, QuantizeArgs, ScoreArgs, SecondArgs, SeqArgs,
};
use crate::bwd::ValidBwd;
use crate::combine::ValidCombine;
use crate::dtype::DType;
use crate::error::{ProblemError, ensure};
use crate::expr::Stored;
use crate::layout::{KvLayout, QLayout, Shape, Strides, Totals};
use crate::mask_object::MaskObject;
use crate::masks::{BlockList, LIST_NAMES};
use crate::plan::Workspace;
use crate::problem::{
    BYTE, CACHE_SCALE_NAMES, CapturedTensor, Extents, FwdProblem, SCALE_NAMES, ValidFwd, check_input,
};
use crate::quantize::{TensorScale, ValidQuantize};
use crate::score::{Bias, Descale};
use crate::second::{SecondCall, named};
use crate::sparse::{CandidateKind, IndexKeys, ValidChoose, ValidIndexLoss};

const F32: ElemType = ElemType::Number(DType::F32);
const I32: ElemType = ElemType::I32;
const U32: ElemType = ElemType::U32;

/// Checks forward arguments against their problem and the plan's workspace: each given iff the problem has it, in
/// `space`, large enough, aligned to its elements, and no output over an input or another output.
///
/// # Errors
/// The first argument that does not fit, with both byte counts.
pub fn check_fwd(
    problem: &ValidFwd,
    args: &FwdArgs<'_>,
    workspace: Workspace,
    space: MemorySpace,
) -> Result<(), ProblemError> {
    let mut operands = Operands::new(space);
    let extents = operands.inputs(problem, args.q, &args.seq, &args.score)?;
    operands.masks(problem, &args.masks, args.seq.totals)?;
    if problem.block_scales.is_none() {
        let ((k, dtype_k), (v, dtype_v)) = (problem.k_in_memory(extents.k), problem.v_in_memory(extents.v));
        operands.cache("k", &args.k, problem, (problem.strides.k, k, dtype_k))?;
        operands.cache("v", &args.v, problem, (problem.strides.v, v, dtype_v))?;
    }
    if problem.block_scales.is_some() {
        let tensors = [args.q, read_only("k", &args.k)?, read_only("v", &args.v)?];
        operands.block_scales(problem, tensors, &args.score, &extents)?;
    }
    operands.cache_scales(problem, args, &extents)?;
    operands.cache_operands(problem, &args.cache, &args.seq, extents)?;
    operands.second(problem, args)?;
    operands.tensor("o", Access::out(&args.o), problem.strides.o, extents.o, problem.dtypes.o)?;
    let lse = args.lse.as_ref().map(Access::out);
    operands.numbers("lse", lse, problem.write_lse, (F32, extents.lse_elems))?;
    operands.read("scale_o", &args.scale_o, problem.scales.scale_o, (F32, 1))?;
    let keep_mask = args.keep_mask.as_ref().map(Access::out);
    operands.optional(
        "keep_mask",
        keep_mask,
        problem.dropout.write_keep_mask,
        ElemType::Bytes,
        problem.keep_mask_bytes(),
        1,
    )?;
    let outputs = problem.outputs;
    for (name, slice, wanted, elems) in [
        ("row_max", &args.row_max, outputs.row_max, extents.lse_elems),
        ("head_max", &args.head_max, outputs.head_max, problem.dims.num_heads_q.into()),
        ("key_sum", &args.key_sum, outputs.key_sum, problem.key_sum_elems()),
    ] {
        operands.numbers(name, slice.as_ref().map(Access::out), wanted, (F32, elems))?;
    }
    operands.workspace(args.workspace.as_ref(), workspace)?;
    operands.disjoint()
}

/// Checks backward arguments against their problem, as [`check_fwd`] does.
///
/// # Errors
/// The first argument that does not fit, with both byte counts.
pub fn check_bwd(
    problem: &ValidBwd,
    args: &BwdArgs<'_>,
    workspace: Workspace,
    space: MemorySpace,
) -> Result<(), ProblemError> {
    let fwd = problem.fwd();
    let extents = problem.checked_extents(args.seq.totals)?;
    let lse_elems = extents.lse_elems;
    let mut operands = Operands::new(space);
    operands.inputs(fwd, args.q, &args.seq, &args.score)?;
    operands.masks(fwd, &args.masks, args.seq.totals)?;
    if fwd.block_scales.is_none() {
        operands.tensor("k", Access::input(&args.k), fwd.strides.k, extents.k, fwd.dtypes.qk)?;
        operands.tensor("v", Access::input(&args.v), fwd.strides.v, extents.v, fwd.dtypes.v)?;
    }
    operands.block_scales(fwd, [args.q, args.k, args.v], &args.score, &extents)?;
    operands.tensor("o", Access::input(&args.o), fwd.strides.o, extents.o, fwd.dtypes.o)?;
    operands.numbers("lse", Some(Access::input(&args.lse)), true, (F32, lse_elems))?;
    operands.tensor("dout", Access::input(&args.dout), problem.dout, extents.o, fwd.dtypes.o)?;
    operands.read("dlse", &args.dlse, problem.has_dlse, (F32, lse_elems))?;
    let grad = problem.dtype_grad;
    operands.tensor("dq", Access::out(&args.dq), problem.dq, extents.q, grad)?;
    operands.tensor("dk", Access::out(&args.dk), problem.dk, extents.k, grad)?;
    operands.tensor("dv", Access::out(&args.dv), problem.dv, extents.v, grad)?;
    let dbias = args.dbias.as_ref().map(Access::out);
    let wanted = match (problem.dbias, fwd.score.bias) {
        (Some(wanted), Bias::Elementwise(bias)) => {
            Some((wanted.strides, fwd.shape_bias(bias.broadcast), wanted.dtype))
        }
        _ => None,
    };
    operands.optional_tensor("dbias", dbias, wanted)?;
    let (given, wanted) = (args.dcaptured.len(), problem.dcaptured.len());
    ensure!(given == wanted, "dcaptured", "dcaptured: {given} gradients given, but {wanted} wanted");
    for (gradient, slice) in problem.dcaptured.iter().zip(&args.dcaptured) {
        let tensor = fwd.code.tensor(&gradient.name);
        let (elems, size) = (tensor.map_or(0, CapturedTensor::num_elems), gradient.dtype.size_bytes());
        let elem = ElemType::Number(gradient.dtype);
        operands.push(
            "dcaptured",
            Access::out(slice),
            elem,
            elems.saturating_mul(size),
            size as usize,
            None,
        )?;
    }
    let dsink = args.dsink.as_ref().map(Access::out);
    operands.numbers("dsink", dsink, problem.write_dsink, (F32, fwd.dims.num_heads_q.into()))?;
    operands.workspace(args.workspace.as_ref(), workspace)?;
    operands.disjoint()
}

/// Checks combine arguments against their problem, as [`check_fwd`] does.
///
/// # Errors
/// The first argument that does not fit, with both numbers.
pub fn check_combine(
    problem: &ValidCombine,
    args: &CombineArgs<'_>,
    space: MemorySpace,
) -> Result<(), ProblemError> {
    ensure!(
        args.parts.len() == problem.num_parts as usize,
        "parts",
        "parts: {} given, but num_parts is {}",
        args.parts.len(),
        problem.num_parts
    );
    let lse_elems = problem.lse_elems();
    let mut operands = Operands::new(space);
    for part in args.parts {
        operands.tensor(
            "parts.o",
            Access::input(&part.o),
            problem.part,
            problem.shape(),
            problem.dtype_part,
        )?;
        if !problem.adds() {
            operands.numbers("parts.lse", Some(Access::input(&part.lse)), true, (F32, lse_elems))?;
        }
    }
    operands.tensor("o", Access::out(&args.o), problem.o, problem.shape(), problem.dtype_o)?;
    operands.numbers("lse", args.lse.as_ref().map(Access::out), problem.write_lse, (F32, lse_elems))?;
    operands.disjoint()
}

/// Checks a choice's arguments against their problem and the plan's workspace, as [`check_fwd`] does.
///
/// # Errors
/// The first argument that does not fit, with both numbers.
pub fn check_choose(
    problem: &ValidChoose,
    args: &ChooseArgs<'_>,
    workspace: Workspace,
    space: MemorySpace,
) -> Result<(), ProblemError> {
    let mut operands = Operands::new(space);
    let (rows, keys, entries) = (problem.rows(), problem.seqlen_k, problem.num_entries());
    let indexer = problem.indexer();
    let [q, k, scale, table] = indexer.map_or([0; 4], |indexer| problem.index_bytes(indexer));
    for (name, slice, dtype, bytes) in [
        ("q", &args.q, indexer.map(|indexer| indexer.dtype_q), q),
        ("k", &args.k, indexer.map(|indexer| indexer.dtype_k), k),
    ] {
        let elem = dtype.map_or(ElemType::Bytes, Into::into);
        let align = dtype.map_or(1, |dtype| dtype.size_bytes() as usize);
        operands.optional(name, slice.as_ref().map(Access::input), dtype.is_some(), elem, bytes, align)?;
    }
    let heads = indexer.map_or(0, |indexer| u64::from(indexer.num_heads));
    operands.read("weights", &args.weights, indexer.is_some(), (F32, rows.saturating_mul(heads)))?;
    let scaled = indexer.is_some_and(|indexer| indexer.k_scale);
    operands.read("k_scale", &args.k_scale, scaled, (F32, scale / 4))?;
    let paged = indexer.is_some_and(|indexer| indexer.keys != IndexKeys::Batch);
    operands.read("block_table", &args.block_table, paged, (I32, table / 4))?;
    let given = rows.saturating_mul(keys.into());
    operands.read("given", &args.given, indexer.is_none(), (F32, given))?;
    operands.read("seqused_k", &args.seqused_k, problem.seqused_k, (I32, problem.batch.into()))?;
    let ranges = problem.candidates == CandidateKind::Ranges;
    operands.read("first", &args.first, ranges, (I32, rows))?;
    operands.read("end", &args.end, ranges, (I32, rows))?;
    let indices = args.indices.as_ref().map(Access::out);
    operands.numbers(
        "indices",
        indices,
        problem.topk > 0,
        (I32, rows.saturating_mul(problem.topk.into())),
    )?;
    let scores = args.scores.as_ref().map(Access::out);
    operands.numbers("scores", scores, problem.write_scores, (F32, rows.saturating_mul(entries.into())))?;
    operands.workspace(args.workspace.as_ref(), workspace)?;
    operands.disjoint()
}

/// Checks the arguments of a conversion against its problem, as [`check_fwd`] does.
///
/// # Errors
/// The first argument that does not fit, with both byte counts.
pub fn check_quantize(
    problem: &ValidQuantize,
    args: &QuantizeArgs<'_>,
    workspace: Workspace,
    space: MemorySpace,
) -> Result<(), ProblemError> {
    let mut operands = Operands::new(space);
    operands.tensor("x", Access::input(&args.x), problem.x, problem.shape, problem.dtype)?;
    let of_bytes = [
        ("elements", &args.elements, problem.elements, problem.stored(), problem.format.elem()),
        ("scales", &args.scales, problem.scales, problem.of_scales(), problem.format.scale_elem()),
    ];
    for (name, slice, strides, shape, elem) in of_bytes {
        let bytes = ValidFwd::extent_bytes(strides, shape, BYTE);
        operands.push(name, Access::out(slice), elem, bytes, 1, Some((strides, shape, BYTE)))?;
    }
    let is = |wanted| problem.tensor_scale == wanted;
    operands.read("tensor_scale", &args.tensor_scale, is(TensorScale::Given), (F32, 1))?;
    let written = args.written_scale.as_ref().map(Access::out);
    operands.numbers("written_scale", written, is(TensorScale::Written), (F32, 1))?;
    operands.workspace(args.workspace.as_ref(), workspace)?;
    operands.disjoint()
}

/// Checks the arguments of an indexer's loss against its problem, as [`check_fwd`] does.
///
/// # Errors
/// The first argument that does not fit, with both byte counts.
pub fn check_index_loss(
    problem: &ValidIndexLoss,
    args: &IndexLossArgs<'_>,
    workspace: Workspace,
    space: MemorySpace,
) -> Result<(), ProblemError> {
    let mut operands = Operands::new(space);
    let (rows, keys, dim) = (problem.rows(), problem.keys(), u64::from(problem.head_dim));
    let heads = rows.saturating_mul(problem.num_heads.into());
    let entries = rows.saturating_mul(problem.topk.into());
    let (q, k) = (heads.saturating_mul(dim), keys.saturating_mul(dim));
    for (name, slice, dtype, elems) in
        [("q", &args.q, problem.dtype_q, q), ("k", &args.k, problem.dtype_k, k)]
    {
        let size = dtype.size_bytes();
        let (bytes, align) = (elems.saturating_mul(size), size as usize);
        operands.push(name, Access::input(slice), dtype.into(), bytes, align, None)?;
    }
    operands.read("weights", &Some(args.weights), true, (F32, heads))?;
    operands.read("k_scale", &args.k_scale, problem.k_scale, (F32, keys))?;
    operands.read("indices", &Some(args.indices), true, (I32, entries))?;
    operands.read("target", &Some(args.target), true, (F32, entries))?;
    operands.read("dloss", &args.dloss, problem.has_dloss, (F32, rows))?;
    for (name, slice, wanted, elems) in [
        ("loss", &args.loss, problem.write_loss, rows),
        ("dq", &args.dq, problem.write_dq, q),
        ("dk", &args.dk, problem.write_dk, k),
        ("dweights", &args.dweights, problem.write_dweights, heads),
    ] {
        operands.numbers(name, slice.as_ref().map(Access::out), wanted, (F32, elems))?;
    }
    operands.workspace(args.workspace.as_ref(), workspace)?;
    operands.disjoint()
}

/// K or V of a call that appends nothing.
fn read_only<'a>(name: &'static str, slice: &CacheSlice<'a>) -> Result<DevSlice<'a>, ProblemError> {
    match slice {
        CacheSlice::Read(slice) => Ok(*slice),
        _ => Err(ProblemError::new(name, format!("{name} is not memory to read, as the problem has it"))),
    }
}

/// How a call accesses an operand: as an input or as an output.
#[derive(Clone, Copy)]
struct Access {
    space: MemorySpace,
    address: usize,
    bytes: u64,
    elem: ElemType,
    writes: bool,
}

impl Access {
    fn input(slice: &DevSlice<'_>) -> Self {
        Self {
            space: slice.space,
            address: slice.ptr as usize,
            bytes: slice.bytes,
            elem: slice.elem,
            writes: false,
        }
    }

    fn out(slice: &DevSliceMut<'_>) -> Self {
        Self {
            space: slice.space,
            address: slice.ptr as usize,
            bytes: slice.bytes,
            elem: slice.elem,
            writes: true,
        }
    }
}

/// An argument that passed the check, and the bytes of it that the call touches.
struct Operand {
    name: &'static str,
    access: Access,
    touched: u64,
    /// Strides, shape and type of a tensor, to decide whether two tensors of one buffer interleave; `None` for
    /// memory that is no tensor.
    lattice: Option<(Strides, Shape, DType)>,
}

struct Operands {
    space: MemorySpace,
    /// Every operand of the call. A call allocates nothing here, unless it merges a dozen parts or more.
    all: SmallVec<[Operand; 24]>,
}

/// Names of a call's tensors of masks as data, in the order of [`MaskArgs::tensors`], with their types and, for
/// each that the problem has, the bytes that the call reads.
pub(crate) fn mask_tensors(
    problem: &FwdProblem,
    totals: Totals,
) -> [(&'static str, ElemType, Option<u64>); 6] {
    let masks = &problem.masks;
    let lists = masks.block_lists;
    let of_list = |list: Option<BlockList>| {
        let (lists, list) = (lists?, list?);
        let counts = (list.counts, problem.shape_block_lists(&lists, 1));
        Some((counts, (list.indices, problem.shape_block_lists(&lists, list.max_blocks))))
    };
    let partial = of_list(lists.and_then(|lists| lists.partial));
    let full = of_list(lists.and_then(|lists| lists.full));
    let intervals = masks.intervals.map(|it| (it.strides, problem.shape_intervals(&it, totals)));
    let bits = masks.bits.map(|it| (it.strides, problem.shape_mask_bits(&it, totals)));
    let [[partial_counts, partial_indices], [full_counts, full_indices]] = LIST_NAMES;
    [
        ("intervals", I32, intervals),
        ("mask_bits", U32, bits),
        (partial_counts, I32, partial.map(|it| it.0)),
        (partial_indices, I32, partial.map(|it| it.1)),
        (full_counts, I32, full.map(|it| it.0)),
        (full_indices, I32, full.map(|it| it.1)),
    ]
    .map(|(name, elem, wanted)| {
        let bytes = wanted.map(|(strides, shape)| ValidFwd::extent_bytes(strides, shape, DType::F32));
        (name, elem, bytes)
    })
}

/// Checks the lengths and masks as data that a mask object is built from.
///
/// # Errors
/// The first tensor that does not fit, with both byte counts.
pub(crate) fn check_build(
    problem: &FwdProblem,
    seq: &SeqArgs<'_>,
    masks: &MaskArgs<'_>,
    space: MemorySpace,
) -> Result<(), ProblemError> {
    problem.checked_extents(seq.totals)?;
    let mut operands = Operands::new(space);
    operands.lengths(problem, seq)?;
    operands.masks(problem, masks, seq.totals)
}

impl Operands {
    fn new(space: MemorySpace) -> Self {
        Self { space, all: SmallVec::new() }
    }

    fn inputs(
        &mut self,
        problem: &FwdProblem,
        q: DevSlice<'_>,
        seq: &SeqArgs<'_>,
        score: &ScoreArgs<'_>,
    ) -> Result<Extents, ProblemError> {
        let extents = problem.checked_extents(seq.totals)?;
        if problem.block_scales.is_none() {
            self.tensor("q", Access::input(&q), problem.strides.q, extents.q, problem.dtypes.qk)?;
            for (name, slice) in SCALE_NAMES.into_iter().zip(score.block_scales()) {
                self.optional(name, slice.as_ref().map(Access::input), false, ElemType::Bytes, 0, 1)?;
            }
        }

        let dims = problem.dims;
        let batch = u64::from(dims.batch);
        self.lengths(problem, seq)?;
        let pieces = u64::from(problem.arrivals);
        self.read("arrivals.ends", &seq.arrivals.map(|keys| keys.ends), pieces > 0, (U32, pieces))?;
        self.read("arrivals.flags", &seq.arrivals.map(|keys| keys.flags), pieces > 0, (U32, pieces + 1))?;

        let (mut indices, mut lengths) = (None, 0);
        if let Some(lists) = &problem.lists {
            indices = Some(lists.strides.extent(lists.shape(problem, seq.totals)).unwrap_or(u64::MAX));
            lengths = lists.length_elems(problem, seq.totals);
        }
        self.read("indices", &seq.indices, indices.is_some(), (I32, indices.unwrap_or(0)))?;
        self.read("topk_length", &seq.topk_length, lengths > 0, (I32, lengths))?;

        // Lists of addresses have no block table.
        let page_size = problem.layout.kv.page_size().filter(|_| !problem.lists_addresses());
        let table_elems = match (page_size, &seq.block_table) {
            (Some(page_size), Some(table)) => {
                let keys = u64::from(table.max_pages) * u64::from(page_size);
                ensure!(
                    keys >= u64::from(dims.seqlen_k),
                    "block_table",
                    "block_table has max_pages {} of page_size {page_size}: {keys} keys, fewer than seqlen_k {}",
                    table.max_pages,
                    dims.seqlen_k
                );
                batch * u64::from(table.max_pages)
            }
            // Pages are at least one for each sequence: the page of its first key.
            (Some(_), None) => batch,
            (None, _) => 0,
        };
        let table = seq.block_table.as_ref().map(|table| Access::input(&table.pages));
        self.numbers("block_table", table, page_size.is_some(), (I32, table_elems))?;

        let bias = score.bias.as_ref().map(Access::input);
        let wanted = match problem.score.bias {
            Bias::Elementwise(bias) => Some((bias.strides, problem.shape_bias(bias.broadcast), bias.dtype)),
            _ => None,
        };
        self.optional_tensor("bias", bias, wanted)?;
        let slopes = match problem.score.bias {
            Bias::Alibi { per_batch } => {
                u64::from(dims.num_heads_q) * if per_batch { u64::from(dims.batch) } else { 1 }
            }
            _ => 0,
        };
        let has_slopes = matches!(problem.score.bias, Bias::Alibi { .. });
        self.read("alibi_slopes", &score.alibi_slopes, has_slopes, (F32, slopes))?;
        self.read("sink", &score.sink, problem.score.sink, (F32, dims.num_heads_q.into()))?;
        let scales = &problem.scales;
        for (name, slice, kind) in [
            ("descale_q", &score.descale_q, scales.descale_q),
            ("descale_k", &score.descale_k, scales.descale_k),
            ("descale_v", &score.descale_v, scales.descale_v),
        ] {
            let elems = kind.num_elems(dims.batch, dims.num_heads_kv);
            self.read(name, slice, kind != Descale::None, (F32, elems))?;
        }
        score.seed(problem)?;
        self.captured(problem, score)?;
        Ok(extents)
    }

    /// Checks the lengths of sequences.
    fn lengths(&mut self, problem: &FwdProblem, seq: &SeqArgs<'_>) -> Result<(), ProblemError> {
        let (packed_q, packed_k) =
            (problem.layout.q == QLayout::Packed, problem.layout.kv == KvLayout::Packed);
        let batch = u64::from(problem.dims.batch);
        self.read("cu_seqlens_q", &seq.cu_seqlens_q, packed_q, (I32, batch + 1))?;
        self.read("cu_seqlens_k", &seq.cu_seqlens_k, packed_k, (I32, batch + 1))?;
        self.read("seqused_q", &seq.seqused_q, problem.layout.seqused_q, (I32, batch))?;
        self.read("seqused_k", &seq.seqused_k, problem.layout.seqused_k, (I32, batch))
    }

    /// Checks the tensors of a call's masks (intervals, bits, lists of blocks).
    fn masks(
        &mut self,
        problem: &FwdProblem,
        args: &MaskArgs<'_>,
        totals: Totals,
    ) -> Result<(), ProblemError> {
        for ((name, elem, bytes), slice) in mask_tensors(problem, totals).into_iter().zip(args.tensors()) {
            let access = slice.as_ref().map(Access::input);
            self.optional(name, access, bytes.is_some(), elem, bytes.unwrap_or(0), 4)?;
        }
        // An output that overlaps the mask object's lists would change them while the kernel reads them.
        let Some(memory) = args.built.map(MaskObject::memory) else { return Ok(()) };
        self.push("mask", Access::input(&memory), memory.elem(), memory.bytes(), 1, None)
    }

    /// Checks the operands of a second cache like those of a call on the second cache alone.
    fn second(&mut self, problem: &FwdProblem, args: &FwdArgs<'_>) -> Result<(), ProblemError> {
        let call = match (&problem.second, args.second) {
            (None, None) => return Ok(()),
            (None, Some(_)) => {
                let text = "second is given, but the problem has none".to_owned();
                return Err(ProblemError::new("second", text));
            }
            (Some(_), second) => SecondCall::of(problem, second, &args.seq)?,
        };
        let Some(call) = call else { return Ok(()) };
        self.second_call(&call, args.q).map_err(named)
    }

    fn second_call(&mut self, call: &SecondCall<'_>, q: DevSlice<'_>) -> Result<(), ProblemError> {
        let SecondCall { problem, args: SecondArgs { k, v, seq: own, .. }, seq } = call;
        for (name, given) in [
            ("total_q", own.totals.total_q.is_some()),
            ("cu_seqlens_q", own.cu_seqlens_q.is_some()),
            ("seqused_q", own.seqused_q.is_some()),
        ] {
            ensure!(!given, name, "{name} is given, but queries are those of the call");
        }
        let mut operands = Self::new(self.space);
        let extents = operands.inputs(problem, q, seq, &ScoreArgs::default())?;
        operands.masks(problem, &call.masks(), seq.totals)?;
        let v = v.map_or(CacheSlice::InK, CacheSlice::Read);
        let ((of_k, dtype_k), (of_v, dtype_v)) =
            (problem.k_in_memory(extents.k), problem.v_in_memory(extents.v));
        operands.cache("k", &CacheSlice::Read(*k), problem, (problem.strides.k, of_k, dtype_k))?;
        operands.cache("v", &v, problem, (problem.strides.v, of_v, dtype_v))?;
        operands.cache_operands(problem, &CacheArgs::default(), seq, extents)?;
        self.all.extend(operands.all);
        Ok(())
    }

    /// Checks Q, K and V that have scales by blocks, and the scales.
    fn block_scales(
        &mut self,
        problem: &FwdProblem,
        tensors: [DevSlice<'_>; 3],
        score: &ScoreArgs<'_>,
        extents: &Extents,
    ) -> Result<(), ProblemError> {
        let Some(scales) = &problem.block_scales else { return Ok(()) };
        let given = score.block_scales();
        let (elem, strides) =
            (scales.format.elem(), [problem.strides.q, problem.strides.k, problem.strides.v]);
        let shapes = scales.stored(extents, problem.layout.v);
        for (((name, slice), strides), shape) in
            ["q", "k", "v"].into_iter().zip(tensors).zip(strides).zip(shapes)
        {
            let bytes = ValidFwd::extent_bytes(strides, shape, BYTE);
            self.push(name, Access::input(&slice), elem, bytes, 1, Some((strides, shape, BYTE)))?;
        }
        let (elem, shapes) = (scales.format.scale_elem(), scales.shapes(extents));
        for (((name, slice), strides), shape) in
            SCALE_NAMES.into_iter().zip(given).zip(scales.strides()).zip(shapes)
        {
            let bytes = ValidFwd::extent_bytes(strides, shape, BYTE);
            self.given(name, slice.as_ref().map(Access::input), true, elem, bytes, 1)?;
        }
        Ok(())
    }

    /// Checks the tensors and scalars that functions capture.
    fn captured(&mut self, problem: &FwdProblem, score: &ScoreArgs<'_>) -> Result<(), ProblemError> {
        let code = &problem.code;
        if code.is_empty() && score.captured.is_empty() && score.numbers.is_empty() {
            return Ok(());
        }
        code.check_numbers(score.numbers)?;
        let (given, wanted) = (score.captured.len(), code.captured.len());
        ensure!(given == wanted, "captured", "captured: {given} tensors given, but {wanted} wanted");
        for (tensor, slice) in code.captured.iter().zip(score.captured) {
            let Some(stored) = code.stored(&tensor.name) else { continue };
            let elem = match stored {
                Stored::I32 => I32,
                Stored::I64 | Stored::Bool => ElemType::Bytes,
                floats => floats.float_dtype().map_or(ElemType::Bytes, ElemType::Number),
            };
            ensure!(
                elem != ElemType::Bytes || slice.elem() == ElemType::Bytes,
                "captured",
                "captured {} has elements of {:?}, but the function reads {stored}",
                tensor.name,
                slice.elem()
            );
            let size = stored.size_bytes();
            self.push(
                "captured",
                Access::input(slice),
                elem,
                tensor.extent_elems().saturating_mul(size),
                size as usize,
                None,
            )?;
        }
        Ok(())
    }

    /// Checks K or V: written iff the problem appends, without memory of its own iff V lies in K.
    fn cache(
        &mut self,
        name: &'static str,
        slice: &CacheSlice<'_>,
        problem: &FwdProblem,
        (strides, shape, dtype): (Strides, Shape, DType),
    ) -> Result<(), ProblemError> {
        let in_k = problem.cache.v_in_k && name == "v";
        let access = match slice {
            CacheSlice::InK if in_k => return Ok(()),
            CacheSlice::Read(slice) if problem.cache.append.is_none() && !in_k => Access::input(slice),
            CacheSlice::Append(slice) if problem.cache.append.is_some() && !in_k => {
                Access { elem: slice.as_input().elem(), ..Access::out(slice) }
            }
            _ => {
                let wanted = match (in_k, problem.cache.append.is_some()) {
                    (true, _) => "in K's rows",
                    (_, true) => "memory to append to",
                    (_, false) => "memory to read",
                };
                return Err(ProblemError::new(
                    name,
                    format!("{name} is not {wanted}, as the problem has it"),
                ));
            }
        };
        self.tensor(name, access, strides, shape, dtype)
    }

    /// Checks the scales of a cache by rows, memory to append to where the cache is.
    fn cache_scales(
        &mut self,
        problem: &FwdProblem,
        args: &FwdArgs<'_>,
        extents: &Extents,
    ) -> Result<(), ProblemError> {
        let given = [&args.k_scale, &args.v_scale];
        let Some(scales) = &problem.cache.scales else {
            for (name, slice) in CACHE_SCALE_NAMES.into_iter().zip(given) {
                ensure!(slice.is_none(), name, "{name} is given, but the problem has no cache_scales");
            }
            return Ok(());
        };
        let tensors = [(scales.k, extents.k), (scales.v, extents.v)];
        for ((name, slice), (strides, of)) in CACHE_SCALE_NAMES.into_iter().zip(given).zip(tensors) {
            let slice = slice.as_ref().ok_or_else(|| {
                let block = scales.block;
                ProblemError::new(name, format!("{name} is missing: cache_scales of blocks of {block} rows"))
            })?;
            self.cache(name, slice, problem, (strides, scales.shape(of), DType::F32))?;
        }
        Ok(())
    }

    /// Checks the operands of an append, a rotary embedding and a tree mask.
    fn cache_operands(
        &mut self,
        problem: &FwdProblem,
        cache: &CacheArgs<'_>,
        seq: &SeqArgs<'_>,
        extents: Extents,
    ) -> Result<(), ProblemError> {
        let packs_new = problem.cache.append.is_some_and(|append| append.layout == QLayout::Packed);
        self.read(
            "cu_seqlens_new",
            &seq.cu_seqlens_new,
            packs_new,
            (I32, u64::from(problem.dims.batch) + 1),
        )?;
        let [mut k_new, mut v_new] = [None; 2];
        if let Some(append) = &problem.cache.append {
            let (k, v) = problem.shapes_new(append, seq.totals);
            k_new = Some((append.k_new, k, problem.dtypes.qk));
            v_new = Some((append.v_new, v, problem.dtypes.v)).filter(|_| !problem.cache.v_in_k);
        }
        for (name, slice, wanted) in [("k_new", &cache.k_new, k_new), ("v_new", &cache.v_new, v_new)] {
            if let Some((strides, shape, dtype)) = wanted {
                // Arguments give the number of packed rows.
                check_input(name, strides, shape, dtype)?;
            }
            self.optional_tensor(name, slice.as_ref().map(Access::input), wanted)?;
        }
        for (name, slice) in [("cos", &cache.cos), ("sin", &cache.sin)] {
            let (elems, size, elem) = problem.cache.rotary.map_or((0, 4, ElemType::Bytes), |rotary| {
                (rotary.table_elems(), rotary.dtype.size_bytes(), rotary.dtype.into())
            });
            let access = slice.as_ref().map(Access::input);
            self.optional(name, access, problem.cache.rotary.is_some(), elem, elems * size, size as usize)?;
        }
        let rows = u64::from(extents.q.batch) * u64::from(extents.q.seq);
        let words = rows.saturating_mul(problem.tree_mask_words().into());
        self.read("tree_mask", &cache.tree_mask, problem.cache.tree_mask, (U32, words))
    }

    #[inline]
    fn tensor(
        &mut self,
        name: &'static str,
        access: Access,
        strides: Strides,
        shape: Shape,
        dtype: DType,
    ) -> Result<(), ProblemError> {
        let bytes = ValidFwd::extent_bytes(strides, shape, dtype);
        self.push(
            name,
            access,
            dtype.into(),
            bytes,
            dtype.size_bytes() as usize,
            Some((strides, shape, dtype)),
        )
    }

    /// Checks an optional tensor: it is there exactly if the problem wants it, and large enough.
    #[inline(always)]
    fn optional_tensor(
        &mut self,
        name: &'static str,
        access: Option<Access>,
        wanted: Option<(Strides, Shape, DType)>,
    ) -> Result<(), ProblemError> {
        match (access, wanted) {
            (Some(access), Some((strides, shape, dtype))) => self.tensor(name, access, strides, shape, dtype),
            (access, wanted) => {
                let bytes =
                    wanted.map_or(0, |(strides, shape, dtype)| ValidFwd::extent_bytes(strides, shape, dtype));
                self.optional(name, access, wanted.is_some(), ElemType::Bytes, bytes, 1)
            }
        }
    }

    /// Checks an i32, u32 or f32 array that the call reads, given iff the problem has it.
    #[inline(always)]
    fn read(
        &mut self,
        name: &'static str,
        slice: &Option<DevSlice<'_>>,
        wanted: bool,
        (elem, elems): (ElemType, u64),
    ) -> Result<(), ProblemError> {
        self.numbers(name, slice.as_ref().map(Access::input), wanted, (elem, elems))
    }

    /// Checks an i32, u32 or f32 array that is given iff it is wanted.
    #[inline(always)]
    fn numbers(
        &mut self,
        name: &'static str,
        access: Option<Access>,
        wanted: bool,
        (elem, elems): (ElemType, u64),
    ) -> Result<(), ProblemError> {
        // A product that saturates is more bytes than any address space has, so the check fails.
        self.optional(name, access, wanted, elem, elems.saturating_mul(4), 4)
    }

    /// Checks the caller's workspace against the size that the plan needs, if any.
    fn workspace(&mut self, given: Option<&DevSliceMut<'_>>, wanted: Workspace) -> Result<(), ProblemError> {
        let needed = wanted.bytes > 0;
        // A caller may pass scratch memory for a plan that needs none.
        let access = given.map(Access::out).filter(|_| needed);
        self.optional("workspace", access, needed, ElemType::Scratch, wanted.bytes, Workspace::ALIGN)
    }

    /// Checks an operand that may be absent. Most operands of a call are neither given nor needed and cost one
    /// comparison.
    #[inline(always)]
    fn optional(
        &mut self,
        name: &'static str,
        access: Option<Access>,
        wanted: bool,
        elem: ElemType,
        bytes: u64,
        align: usize,
    ) -> Result<(), ProblemError> {
        if access.is_none() && !wanted {
            Ok(())
        } else {
            self.given(name, access, wanted, elem, bytes, align)
        }
    }

    fn given(
        &mut self,
        name: &'static str,
        access: Option<Access>,
        wanted: bool,
        elem: ElemType,
        bytes: u64,
        align: usize,
    ) -> Result<(), ProblemError> {
        match access {
            Some(access) if wanted => self.push(name, access, elem, bytes, align, None),
            Some(_) => Err(ProblemError::new(name, format!("{name} is given, but the problem has none"))),
            // An operand without elements need not be given.
            None if bytes == 0 => Ok(()),
            None => Err(ProblemError::new(name, format!("{name} is missing: {bytes} bytes are wanted"))),
        }
    }

    #[inline]
    fn push(
        &mut self,
        name: &'static str,
        access: Access,
        elem: ElemType,
        touched: u64,
        align: usize,
        lattice: Option<(Strides, Shape, DType)>,
    ) -> Result<(), ProblemError> {
        // A mask replaces a division: alignments are powers of two.
        let aligned = touched == 0 || access.address & (align - 1) == 0;
        if access.space != self.space || access.bytes < touched || !aligned || !access.elem.serves(elem) {
            return Err(self.misfit(name, &access, elem, touched, align));
        }
        self.all.push(Operand { name, access, touched, lattice });
        Ok(())
    }

    /// The error for an argument that does not fit the plan.
    #[cold]
    fn misfit(
        &self,
        name: &'static str,
        access: &Access,
        elem: ElemType,
        touched: u64,
        align: usize,
    ) -> ProblemError {
        let Access { space, address, bytes, .. } = *access;
        let text = if space != self.space {
            format!("{name} is in {space:?} memory, not in {:?} memory", self.space)
        } else if !access.elem.serves(elem) {
            format!("{name} has elements of {}, but the problem has it in {elem}", access.elem)
        } else if bytes < touched {
            format!("{name} has {bytes} bytes, but its extents and strides reach {touched}")
        } else {
            format!(
                "{name} starts at {address:#x}, which is no multiple of the {align} bytes that it is aligned to"
            )
        };
        ProblemError::new(name, text)
    }

    /// Checks that no output shares a byte with another operand. Slices of one buffer may interleave row by row.
    fn disjoint(&self) -> Result<(), ProblemError> {
        for (index, output) in self.all.iter().enumerate().filter(|(_, operand)| operand.access.writes) {
            for (other_index, other) in self.all.iter().enumerate() {
                // Each pair of outputs is compared only once.
                let is_pair = other_index > index || other_index < index && !other.access.writes;
                if is_pair && output.spans_meet(other) {
                    output.apart_from(other)?;
                }
            }
        }
        Ok(())
    }
}

impl Operand {
    /// Whether the address ranges of the two operands overlap, from the first to the last byte of each.
    #[inline]
    fn spans_meet(&self, other: &Operand) -> bool {
        let (a, b) = (self.access.address as u128, other.access.address as u128);
        a < b + u128::from(other.touched)
            && b < a + u128::from(self.touched)
            && self.touched > 0
            && other.touched > 0
    }

    fn lattice(&self) -> Lattice {
        match self.lattice {
            Some((strides, shape, dtype)) => Lattice::strided(self.access.address, strides, shape, dtype),
            None => Lattice::dense(self.access.address, self.touched),
        }
    }

    /// Refuses another operand that shares a byte with this output.
    #[cold]
    fn apart_from(&self, other: &Operand) -> Result<(), ProblemError> {
        let (verb, why) = match self.lattice().meets(&other.lattice()) {
            Meeting::Apart => return Ok(()),
            Meeting::Shared => ("overlaps", ""),
            Meeting::Undecided => (
                "lies between the first and the last byte of",
                ": with strides that have so little in common, whether they share a byte is not searched out",
            ),
        };
        let (a, b) = (self.access.address, other.access.address);
        Err(ProblemError::new(
            self.name,
            format!(
                "{} ({} bytes at {a:#x}) {verb} {} ({} bytes at {b:#x}){why}",
                self.name, self.touched, other.name, other.touched
            ),
        ))
    }
}
