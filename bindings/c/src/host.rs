//! Conversion of the C structs to problems: everything that lies in host memory is read here, at the plan.

use std::ffi::{CStr, c_char};

use fmha::{
    Accuracy, Append, Backend, Bias, BiasBroadcast, BiasGrad, BlockFormat, BlockScales, BwdProblem,
    CacheRows, CacheScales, CombineProblem, DType, Descale, Device, Dims, DropoutSeed, ElementwiseBias,
    FwdProblem, KeyLists, KvLayout, ListEntries, ListLength, MaskSpec, Merge, Part, PlanOptions,
    ProblemError, QLayout, Rotary, RotaryPairs, Shape, Strides, Totals, VLayout,
};

use crate::Result;
use crate::code::{Captures, PointedCode};
use crate::masks;
use crate::second;
use crate::structs::{
    FMHA_ADD_TO, FMHA_BF16, FMHA_BIAS_ALIBI, FMHA_BIAS_ALIBI_PER_BATCH, FMHA_BIAS_ELEMENTWISE,
    FMHA_BIAS_NONE, FMHA_BY_LSE, FMHA_DESCALE_NONE, FMHA_DESCALE_PER_KV_HEAD, FMHA_DESCALE_PER_TENSOR,
    FMHA_E4M3FN, FMHA_E4M3FNUZ, FMHA_E5M2, FMHA_E5M2FNUZ, FMHA_EXACT, FMHA_F16, FMHA_F32, FMHA_FAST,
    FMHA_LENGTH_PER_SEQUENCE, FMHA_LENGTH_PER_TOKEN, FMHA_LENGTH_WHOLE, FMHA_MXFP8_E4M3, FMHA_MXFP8_E5M2,
    FMHA_NVFP4, FMHA_SUM, FMHA_V_COL_MAJOR, FMHA_V_ROW_MAJOR, FmhaArgs, FmhaBlockScales, FmhaCache,
    FmhaCombineArgs, FmhaCombineProblem, FmhaGradients, FmhaLists, FmhaOptions, FmhaPart, FmhaPartial,
    FmhaProblem, FmhaStrides,
};

/// Problem of a plan, read from C.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    pub(crate) problem: AnyPass,
    pub(crate) captures: Captures,
}

/// A forward or a backward problem.
#[derive(Clone, Debug)]
pub(crate) enum AnyPass {
    Forward(FwdProblem),
    Backward(BwdProblem),
}

/// The struct to which a pointer in another struct points. Its size must be the one with which this library was built.
///
/// # Safety
/// `at` is null or a struct of C, which begins with its size.
pub(crate) unsafe fn pointed<'a, T>(at: *const T) -> Result<Option<&'a T>> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller promised a struct that begins with its size.
    struct_bytes::<T>(unsafe { *at.cast::<u64>() })?;
    // SAFETY: a struct of that size.
    Ok(unsafe { at.as_ref() })
}

impl Given {
    /// Reads a problem. `mask` is used as its mask; the mask text in `given` is not read.
    ///
    /// # Safety
    /// Host pointers of `given` are null or point to what `fmha.h` says.
    pub(crate) unsafe fn read(given: &FmhaProblem, mask: MaskSpec) -> Result<Self> {
        struct_bytes::<FmhaProblem>(given.struct_bytes)?;
        // SAFETY: the caller keeps the contract of `read`.
        let (gradients, code) = unsafe { (pointed(given.gradients)?, pointed(given.code)?) };
        // SAFETY: the caller keeps the contract of `read`.
        let code = code.map(|code| unsafe { PointedCode::read(code) }).transpose()?;
        // SAFETY: the caller keeps the contract of `read`.
        let mut fwd = unsafe { forward(given, mask)? };
        let mut captures = Captures::default();
        if let Some(code) = &code {
            fwd = code.forward(fwd, gradients.is_some())?;
            captures = code.captures(&fwd);
        }
        let problem = match gradients {
            None => AnyPass::Forward(fwd),
            Some(gradients) => {
                let dcaptured = code.as_ref().map_or(Ok(vec![]), PointedCode::gradients)?;
                AnyPass::Backward(backward(given, gradients, fwd)?.dcaptured(dcaptured))
            }
        };
        Ok(Self { problem, captures })
    }
}

/// The forward problem, without its code.
///
/// # Safety
/// As [`Given::read`].
unsafe fn forward(given: &FmhaProblem, mask: MaskSpec) -> Result<FwdProblem> {
    none("reserved", given.reserved)?;
    let dims = Dims::batch(size("batch", given.batch)?)
        .seqlens(size("seqlen_q", given.seqlen_q)?, size("seqlen_k", given.seqlen_k)?)
        .heads(size("num_heads_q", given.num_heads_q)?, size("num_heads_kv", given.num_heads_kv)?)
        .head_dims(size("head_dim_qk", given.head_dim_qk)?, size("head_dim_v", given.head_dim_v)?);
    let (q_layout, kv_layout) = layouts(given)?;
    // SAFETY: the caller keeps the contract of `forward`.
    let (scale, softcap) = unsafe { (given.softmax_scale.as_ref(), given.softcap.as_ref()) };
    // SAFETY: the caller keeps the contract of `forward`.
    let (cache, part) = unsafe { (pointed(given.cache)?, pointed(given.part)?) };
    // SAFETY: the caller keeps the contract of `forward`.
    let (lists, masks, scales) =
        unsafe { (pointed(given.lists)?, pointed(given.masks)?, pointed(given.block_scales)?) };
    let mut problem = FwdProblem::new(q_layout, kv_layout, dtype("dtype_qk", given.dtype_qk)?, dims)
        .seqused_q(flag("seqused_q", given.seqused_q)?)
        .seqused_k(flag("seqused_k", given.seqused_k)?)
        .dtype_v(dtype("dtype_v", given.dtype_v)?)
        .dtype_o(dtype("dtype_o", given.dtype_o)?)
        .strides_q(strides(&given.q))
        .strides_k(strides(&given.k))
        .strides_v(strides(&given.v))
        .strides_o(strides(&given.o))
        .v_layout(v_layout(given.v_layout)?)
        .mask(mask)
        .softmax_scale(scale.copied())
        .softcap(softcap.copied())
        .bias(bias(given)?)
        .sink(flag("sink", given.sink)?)
        .p_drop(given.p_drop)
        .descale_q(descale("descale_q", given.descale_q)?)
        .descale_k(descale("descale_k", given.descale_k)?)
        .descale_v(descale("descale_v", given.descale_v)?)
        .scale_o(flag("scale_o", given.scale_o)?)
        .write_lse(flag("write_lse", given.write_lse)?)
        .write_keep_mask(flag("write_keep_mask", given.write_keep_mask)?)
        .row_max(flag("row_max", given.row_max)?)
        .head_max(flag("head_max", given.head_max)?)
        .key_sum(flag("key_sum", given.key_sum)?)
        .part(part.map_or(Ok(Part::default()), self::part)?)
        .block_scales(scales.map(block_scales).transpose()?);
    if let Some(masks) = masks {
        problem = masks::read(masks, problem)?;
    }
    if let Some(cache) = cache {
        problem = cached(problem, cache)?;
    }
    if let Some(lists) = lists {
        let lists = key_lists(&problem, lists)?;
        problem = problem.lists(lists);
    }
    // SAFETY: the caller keeps the contract of `forward`.
    if let Some(second) = unsafe { pointed(given.second)? } {
        // SAFETY: the caller keeps the contract of `forward`.
        let second = unsafe { second::read(second, given, &problem) }.map_err(second::named)?;
        problem = problem.second(second);
    }
    Ok(problem)
}

/// The backward problem that belongs to a forward one.
fn backward(given: &FmhaProblem, gradients: &FmhaGradients, fwd: FwdProblem) -> Result<BwdProblem> {
    none("reserved", gradients.reserved)?;
    for (field, wanted) in
        [("row_max", given.row_max), ("head_max", given.head_max), ("key_sum", given.key_sum)]
    {
        if wanted != 0 {
            let text = format!("{field} {wanted} is given beside gradients, but forward alone writes it");
            return Err(ProblemError::new(field, text).into());
        }
    }
    let dbias = if flag("write_dbias", gradients.write_dbias)? {
        let dtype = dtype("dtype_dbias", gradients.dtype_dbias)?;
        let (bias, dbias) = (&given.bias, &gradients.dbias);
        // A gradient has one slice for all sequences or heads along an axis where the bias is broadcast: a gradient
        // with a stride there would be written for the first alone.
        for (axis, extent, of_bias, of_dbias) in [
            ("batch_stride", given.batch, bias.batch_stride, dbias.batch_stride),
            ("head_stride", given.num_heads_q, bias.head_stride, dbias.head_stride),
        ] {
            if extent > 1 && of_bias == 0 && of_dbias != 0 {
                let text = format!("dbias has {axis} {of_dbias}, but bias has 0, one for all {extent}");
                return Err(ProblemError::new("dbias", text).into());
            }
        }
        Some(BiasGrad { dtype, strides: strides(dbias) })
    } else {
        goes_with("dtype_dbias", gradients.dtype_dbias, "write_dbias, which is 0")?;
        None
    };
    Ok(BwdProblem::new(fwd)
        .dtype_grad(dtype("dtype_grad", gradients.dtype_grad)?)
        .strides_dout(strides(&gradients.dout))
        .strides_dq(strides(&gradients.dq))
        .strides_dk(strides(&gradients.dk))
        .strides_dv(strides(&gradients.dv))
        .dbias(dbias)
        .write_dsink(flag("write_dsink", gradients.write_dsink)?)
        .has_dlse(flag("has_dlse", gradients.has_dlse)?))
}

/// The mask of a problem's text.
///
/// # Safety
/// `mask` is null or a C string.
pub(crate) unsafe fn mask(given: &FmhaProblem) -> Result<MaskSpec, ProblemError> {
    struct_bytes::<FmhaProblem>(given.struct_bytes)?;
    // SAFETY: the caller keeps the contract of `mask`.
    match unsafe { text("mask", given.mask)? } {
        None => Ok(MaskSpec::NONE),
        Some(mask) => mask.parse(),
    }
}

/// The problem with the settings of `FmhaCache` applied.
fn cached(problem: FwdProblem, cache: &FmhaCache) -> Result<FwdProblem, ProblemError> {
    let seqlen_new = size("seqlen_new", cache.seqlen_new)?;
    let packed = flag("packed_new", cache.packed_new)?;
    if packed && seqlen_new == 0 {
        return Err(ProblemError::new("packed_new", "packed_new 1 goes with seqlen_new, which is 0"));
    }
    let append = Append {
        layout: if packed { QLayout::Packed } else { QLayout::Batch },
        seqlen_new,
        k_new: strides(&cache.k_new),
        v_new: strides(&cache.v_new),
    };
    let rows = match cache.cache_rows {
        0 => None,
        584 => Some(CacheRows::Bytes584),
        656 => Some(CacheRows::Bytes656),
        other => {
            let text = format!("cache_rows {other} is none of 0, 584 and 656 bytes");
            return Err(ProblemError::new("cache_rows", text));
        }
    };
    let dtype_cache = match cache.dtype_cache {
        0 => None,
        code => Some(dtype("dtype_cache", code)?),
    };
    let scales = match size("scale_block", cache.scale_block)? {
        0 => None,
        block => Some(CacheScales::strided(block, [strides(&cache.k_scale), strides(&cache.v_scale)])),
    };
    Ok(problem
        .cache_scales(scales)
        .append((seqlen_new > 0).then_some(append))
        .rotary(rotary(cache)?)
        .tree_mask(flag("tree_mask", cache.tree_mask)?)
        .dtype_cache(dtype_cache)
        .cache_rows(rows)
        .v_in_k(flag("v_in_k", cache.v_in_k)?))
}

/// A format with scales by blocks.
pub(crate) fn block_format(code: i32) -> Result<BlockFormat, ProblemError> {
    match code {
        FMHA_MXFP8_E4M3 => Ok(BlockFormat::Mxfp8E4m3),
        FMHA_MXFP8_E5M2 => Ok(BlockFormat::Mxfp8E5m2),
        FMHA_NVFP4 => Ok(BlockFormat::Nvfp4),
        other => {
            let text =
                format!("format {other} is none of FMHA_MXFP8_E4M3 1, FMHA_MXFP8_E5M2 2 and FMHA_NVFP4 3");
            Err(ProblemError::new("format", text))
        }
    }
}

/// The scales by blocks of a call.
fn block_scales(given: &FmhaBlockScales) -> Result<BlockScales, ProblemError> {
    none("reserved", given.reserved)?;
    let format = block_format(given.format)?;
    Ok(BlockScales::strided(format, [strides(&given.q), strides(&given.k), strides(&given.v)]))
}

/// The lists of a call.
pub(crate) fn key_lists(problem: &FwdProblem, lists: &FmhaLists) -> Result<KeyLists, ProblemError> {
    let block = size("block", lists.block.into())?;
    let addresses = flag("addresses", lists.addresses)?;
    if addresses && block > 1 {
        return Err(ProblemError::new(
            "block",
            format!("block {block} beside addresses 1, which name single keys"),
        ));
    }
    let length = match lists.length {
        FMHA_LENGTH_WHOLE => ListLength::Whole,
        FMHA_LENGTH_PER_SEQUENCE => ListLength::Sequence,
        FMHA_LENGTH_PER_TOKEN => ListLength::Token,
        other => return Err(not_in("length", other, "FMHA_LENGTH_WHOLE ... FMHA_LENGTH_PER_TOKEN", 2)),
    };
    let entries = match (addresses, block) {
        (true, _) => ListEntries::Addresses,
        (false, 0 | 1) => ListEntries::Positions,
        (false, size) => ListEntries::Blocks { size },
    };
    let strides =
        Strides { batch: lists.batch_stride, seq: lists.seqlen_stride, head: lists.head_stride, dim: 1 };
    Ok(KeyLists::new(problem, size("topk", lists.topk)?)
        .entries(entries)
        .length(length)
        .strides(strides)
        .lse_without_sink(flag("lse_without_sink", lists.lse_without_sink)?))
}

/// The position of a call in the whole of which it is a part.
fn part(part: &FmhaPart) -> Result<Part, ProblemError> {
    let (seqlen_q, seqlen_k) = (size("seqlen_q", part.seqlen_q)?, size("seqlen_k", part.seqlen_k)?);
    let num_heads_q = size("num_heads_q", part.num_heads_q)?;
    Ok(Part {
        position_q: size("position_q", part.position_q)?,
        position_k: size("position_k", part.position_k)?,
        seqlens: (seqlen_q != 0 || seqlen_k != 0).then_some([seqlen_q, seqlen_k]),
        batch: size("batch", part.batch)?,
        head: size("head", part.head)?,
        num_heads_q: (num_heads_q != 0).then_some(num_heads_q),
    })
}

/// The rotary embedding: all of its fields are set, or none of them.
fn rotary(cache: &FmhaCache) -> Result<Option<Rotary>, ProblemError> {
    let interleaved = flag("rotary_interleaved", cache.rotary_interleaved)?;
    let max_pos = size("max_pos", cache.max_pos)?;
    let dim = size("rotary_dim", cache.rotary_dim.into())?;
    if dim == 0 {
        for (field, value) in [
            ("max_pos", cache.max_pos),
            ("dtype_rotary", cache.dtype_rotary.into()),
            ("rotary_interleaved", cache.rotary_interleaved.into()),
        ] {
            if value != 0 {
                return Err(ProblemError::new(
                    field,
                    format!("{field} {value} goes with rotary_dim, which is 0"),
                ));
            }
        }
        return Ok(None);
    }
    let pairs = if interleaved { RotaryPairs::Interleaved } else { RotaryPairs::Half };
    Ok(Some(Rotary { dim, pairs, max_pos, dtype: dtype("dtype_rotary", cache.dtype_rotary)? }))
}

/// The problem of a combine call.
pub(crate) fn combine(given: &FmhaCombineProblem) -> Result<CombineProblem> {
    struct_bytes::<FmhaCombineProblem>(given.struct_bytes)?;
    let num_parts = size("num_parts", given.num_parts)?;
    let rows = Shape {
        batch: size("batch", given.batch)?,
        seq: size("seqlen_q", given.seqlen_q)?,
        head: size("num_heads_q", given.num_heads_q)?,
        dim: size("head_dim_v", given.head_dim_v)?,
    };
    let (dtype_part, dtype_o) = (dtype("dtype_part", given.dtype_part)?, dtype("dtype_o", given.dtype_o)?);
    Ok(CombineProblem::new(num_parts, dtype_part, dtype_o, rows)
        .strides_part(strides(&given.part))
        .strides_o(strides(&given.o))
        .write_lse(flag("write_lse", given.write_lse)?)
        .merge(merge(given.merge)?))
}

/// The parts of a run.
///
/// # Safety
/// `parts` is null or `num_parts` of them in host memory.
pub(crate) unsafe fn parts(args: &FmhaCombineArgs, num_parts: u32) -> Result<&[FmhaPartial]> {
    if num_parts == 0 {
        return Ok(&[]);
    }
    if args.parts.is_null() {
        let text = format!("parts is null, but num_parts is {num_parts}");
        return Err(ProblemError::new("parts", text).into());
    }
    // SAFETY: the caller promised `num_parts` structs at this pointer.
    Ok(unsafe { std::slice::from_raw_parts(args.parts, num_parts as usize) })
}

/// The device with this name; null is the first CUDA device.
///
/// # Safety
/// `name` is null or a C string.
pub(crate) unsafe fn device(name: *const c_char) -> Result<Device> {
    // SAFETY: the caller keeps the contract of `device`.
    match unsafe { text("device", name)? } {
        None => Backend::CUDA,
        Some(name) => name.parse()?,
    }
    .open()
}

/// The kernel, tile and guarantees that `FmhaOptions` asks for.
#[derive(Debug, Default)]
pub struct Choice {
    /// Kernel, tile and promises.
    pub plan: PlanOptions,
    /// Whether each run passes its own workspace; otherwise the plan owns one.
    pub caller_workspace: bool,
}

impl Choice {
    /// Reads the options of a plan.
    ///
    /// # Safety
    /// `options` is null or options whose strings are null or C strings.
    pub(crate) unsafe fn read(options: *const FmhaOptions) -> Result<Self> {
        // SAFETY: the caller promises that `options` is null or options whose strings are null or C strings.
        let Some(options) = (unsafe { options.as_ref() }) else { return Ok(Self::default()) };
        struct_bytes::<FmhaOptions>(options.struct_bytes)?;
        none("reserved", options.reserved)?;
        // SAFETY: the caller promised C strings.
        let (kernel, tile) = unsafe { (text("kernel", options.kernel)?, text("tile", options.tile)?) };
        let mut plan = PlanOptions::default()
            .tile(tile.map(tile_options).transpose()?.unwrap_or_default())
            .allow_fallback(flag("allow_fallback", options.allow_fallback)?)
            .accuracy(accuracy(options.accuracy)?)
            .deterministic(flag("deterministic", options.deterministic)?)
            .batch_invariant(flag("batch_invariant", options.batch_invariant)?)
            .row_invariant(flag("row_invariant", options.row_invariant)?)
            .check_lengths(flag("check_lengths", options.check_lengths)?);
        plan.kernel = kernel.map(str::to_owned);
        let caller_workspace = flag("caller_workspace", options.caller_workspace)?;
        Ok(Self { plan, caller_workspace })
    }
}

/// Names and values of a tile's options, parsed from text such as `block_m=128,stages=2`.
///
/// # Errors
/// `tile` with the pair that is not of the form name=value.
#[doc(hidden)]
pub fn tile_options(text: &str) -> Result<Vec<(String, String)>, ProblemError> {
    text.split(',')
        .map(|pair| match pair.split_once('=') {
            Some((name, value)) if !name.is_empty() && !value.is_empty() => {
                Ok((name.to_owned(), value.to_owned()))
            }
            _ => Err(ProblemError::new("tile", format!("tile `{pair}` is not of the form name=value"))),
        })
        .collect()
}

/// Reads a C string.
///
/// # Safety
/// `pointer` is null or a C string that outlives the call.
pub(crate) unsafe fn c_str<'a>(pointer: *const c_char) -> Option<&'a CStr> {
    // SAFETY: the caller promised a C string.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) })
}

/// # Safety
/// As [`c_str`].
pub(crate) unsafe fn text<'a>(
    field: &'static str,
    pointer: *const c_char,
) -> Result<Option<&'a str>, ProblemError> {
    // SAFETY: the caller keeps the contract of `text`.
    let Some(text) = (unsafe { c_str(pointer) }) else { return Ok(None) };
    text.to_str().map(Some).map_err(|_| ProblemError::new(field, format!("{field} {text:?} is not UTF-8")))
}

pub(crate) fn struct_bytes<T>(given: u64) -> Result<(), ProblemError> {
    let wanted = size_of::<T>() as u64;
    if given == wanted {
        return Ok(());
    }
    let name = std::any::type_name::<T>().rsplit("::").next().unwrap_or_default();
    let text = format!("struct_bytes {given} is not sizeof({name}), which is {wanted}");
    Err(ProblemError::new("struct_bytes", text))
}

/// Layouts of a problem's rows.
pub(crate) fn layouts(given: &FmhaProblem) -> Result<(QLayout, KvLayout), ProblemError> {
    let (packed_q, packed_k) = (flag("packed_q", given.packed_q)?, flag("packed_k", given.packed_k)?);
    let kv = match (size("page_size", given.page_size)?, packed_k) {
        (0, false) => KvLayout::Strided,
        (0, true) => KvLayout::Packed,
        (page_size, false) => KvLayout::Paged { page_size },
        (page_size, true) => {
            let text = format!("packed_k 1 is given, but page_size is {page_size}");
            return Err(ProblemError::new("packed_k", text));
        }
    };
    Ok((if packed_q { QLayout::Packed } else { QLayout::Batch }, kv))
}

/// Totals of a run: rows of packed tensors, pages of paged ones.
#[inline]
pub(crate) fn totals(problem: &FwdProblem, args: &FmhaArgs) -> Result<Totals, ProblemError> {
    let packed_new = |append: &Append| append.layout == QLayout::Packed;
    let packs_new = problem.cache.append.as_ref().is_some_and(packed_new);
    let (q, kv, paged) = (problem.layout.q, problem.layout.kv, problem.layout.kv.is_paged());
    if args.total_q | args.total_k | args.total_new | args.num_pages | args.max_pages == 0 {
        let none = |wanted: bool| wanted.then_some(0);
        return Ok(Totals {
            total_q: none(q == QLayout::Packed),
            total_k: none(kv == KvLayout::Packed),
            num_pages: none(paged),
            total_new: none(packs_new),
        });
    }
    let of = |field, value, wanted, with: &str| match (size(field, value)?, wanted) {
        (value, true) => Ok(Some(value)),
        (0, false) => Ok(None),
        (value, false) => {
            Err(ProblemError::new(field, format!("{field} {value} goes with {with}, which is 0")))
        }
    };
    of("max_pages", args.max_pages, paged, "page_size")?;
    Ok(Totals {
        total_q: of("total_q", args.total_q, q == QLayout::Packed, "packed_q")?,
        total_k: of("total_k", args.total_k, kv == KvLayout::Packed, "packed_k")?,
        num_pages: of("num_pages", args.num_pages, paged, "page_size")?,
        total_new: of("total_new", args.total_new, packs_new, "packed_new")?,
    })
}

/// A bias with stride 0 over batch or head is shared by all sequences or heads.
fn bias(given: &FmhaProblem) -> Result<Bias, ProblemError> {
    let bias = match given.bias_kind {
        FMHA_BIAS_NONE => Bias::None,
        FMHA_BIAS_ELEMENTWISE => {
            return Ok(Bias::Elementwise(ElementwiseBias {
                dtype: dtype("dtype_bias", given.dtype_bias)?,
                broadcast: BiasBroadcast::of_axes(given.bias.batch_stride != 0, given.bias.head_stride != 0),
                strides: strides(&given.bias),
            }));
        }
        FMHA_BIAS_ALIBI => Bias::Alibi { per_batch: false },
        FMHA_BIAS_ALIBI_PER_BATCH => Bias::Alibi { per_batch: true },
        other => return Err(not_in("bias_kind", other, "FMHA_BIAS_NONE ... FMHA_BIAS_ALIBI_PER_BATCH", 3)),
    };
    goes_with("dtype_bias", given.dtype_bias, "bias_kind 1 (FMHA_BIAS_ELEMENTWISE)")?;
    Ok(bias)
}

fn descale(field: &'static str, value: i32) -> Result<Descale, ProblemError> {
    match value {
        FMHA_DESCALE_NONE => Ok(Descale::None),
        FMHA_DESCALE_PER_KV_HEAD => Ok(Descale::PerKvHead),
        FMHA_DESCALE_PER_TENSOR => Ok(Descale::PerTensor),
        _ => Err(not_in(field, value, "FMHA_DESCALE_NONE ... FMHA_DESCALE_PER_TENSOR", 2)),
    }
}

pub(crate) fn not_in(field: &'static str, value: i32, names: &str, last: i32) -> ProblemError {
    ProblemError::new(field, format!("{field} {value} is not in 0..={last} ({names})"))
}

pub(crate) fn goes_with(field: &'static str, value: impl Into<i64>, with: &str) -> Result<(), ProblemError> {
    let value = value.into();
    if value == 0 {
        return Ok(());
    }
    Err(ProblemError::new(field, format!("{field} {value} goes with {with}")))
}

pub(crate) fn strides(given: &FmhaStrides) -> Strides {
    Strides {
        batch: given.batch_stride,
        seq: given.seqlen_stride,
        head: given.head_stride,
        dim: given.dim_stride,
    }
}

pub(crate) fn size(field: &'static str, value: i64) -> Result<u32, ProblemError> {
    u32::try_from(value).map_err(|_| ProblemError::new(field, format!("{field} {value} is not in 0..2^32")))
}

/// The dropout generator's position for a run, if the run has one.
pub(crate) fn seed(args: &FmhaArgs) -> Result<Option<DropoutSeed>, ProblemError> {
    let at = DropoutSeed { seed: args.dropout_seed, offset: args.dropout_offset };
    Ok(flag("dropout_seeded", args.dropout_seeded)?.then_some(at))
}

/// Checks a field that is reserved for later versions: it must be 0.
pub(crate) fn none(field: &'static str, value: i32) -> Result<(), ProblemError> {
    if value == 0 { Ok(()) } else { Err(ProblemError::new(field, format!("{field} {value} is not 0"))) }
}

pub(crate) fn flag(field: &'static str, value: i32) -> Result<bool, ProblemError> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(ProblemError::new(field, format!("{field} {value} is neither 0 nor 1"))),
    }
}

fn accuracy(value: i32) -> Result<Accuracy, ProblemError> {
    match value {
        FMHA_FAST => Ok(Accuracy::Fast),
        FMHA_EXACT => Ok(Accuracy::Exact),
        _ => {
            let text = format!("accuracy {value} is neither 0 (FMHA_FAST) nor 1 (FMHA_EXACT)");
            Err(ProblemError::new("accuracy", text))
        }
    }
}

fn merge(value: i32) -> Result<Merge, ProblemError> {
    match value {
        FMHA_BY_LSE => Ok(Merge::ByLse),
        FMHA_SUM => Ok(Merge::Sum),
        FMHA_ADD_TO => Ok(Merge::AddTo),
        _ => Err(not_in("merge", value, "FMHA_BY_LSE, FMHA_SUM, FMHA_ADD_TO", 2)),
    }
}

fn v_layout(value: i32) -> Result<VLayout, ProblemError> {
    match value {
        FMHA_V_ROW_MAJOR => Ok(VLayout::RowMajor),
        FMHA_V_COL_MAJOR => Ok(VLayout::ColMajor),
        _ => {
            let text = format!("v_layout {value} is neither 0 (FMHA_V_ROW_MAJOR) nor 1 (FMHA_V_COL_MAJOR)");
            Err(ProblemError::new("v_layout", text))
        }
    }
}

pub(crate) fn dtype(field: &'static str, code: i32) -> Result<DType, ProblemError> {
    Ok(match code {
        FMHA_F16 => DType::F16,
        FMHA_BF16 => DType::Bf16,
        FMHA_E4M3FN => DType::E4m3Fn,
        FMHA_E5M2 => DType::E5m2,
        FMHA_E4M3FNUZ => DType::E4m3Fnuz,
        FMHA_E5M2FNUZ => DType::E5m2Fnuz,
        FMHA_F32 => DType::F32,
        _ => {
            return Err(not_in(field, code, "FMHA_F16 ... FMHA_F32", 6));
        }
    })
}
