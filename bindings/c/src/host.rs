//! Conversion of the C structs to problems: everything that lies in host memory is read here, at the plan.

use std::ffi::{CStr, CString, c_char};

use fmha::{
    Accuracy, Append, Backend, Bias, BiasBroadcast, BiasGrad, BlockFormat, BlockScales, BwdProblem,
    CombineProblem, DType, Descale, Dims, DropoutSeed, ElementwiseBias, FwdProblem, KeyLists, KvLayout,
    ListEntries, ListLength, MaskSpec, Merge, Part, PlanOptions, ProblemError, QLayout, Rotary, RotaryPairs,
    Shape, Strides, Totals, VLayout,
};

use crate::Result;
use crate::code::PointedCode;
use crate::masks;
use crate::structs::{
    FMHA_ADD_TO, FMHA_BF16, FMHA_BY_LSE, FMHA_E4M3FN, FMHA_E4M3FNUZ, FMHA_E5M2, FMHA_E5M2FNUZ, FMHA_EXACT,
    FMHA_F16, FMHA_F32, FMHA_FAST, FMHA_MXFP8_E4M3, FMHA_MXFP8_E5M2, FMHA_NVFP4, FMHA_SUM, FMHA_V_COL_MAJOR,
    FMHA_V_ROW_MAJOR, FmhaBlockScales, FmhaCache, FmhaCall, FmhaCombine, FmhaGradients, FmhaLists, FmhaMasks,
    FmhaOptions, FmhaPart, FmhaPartial, FmhaTensor,
};

/// Host memory that a call points to.
#[derive(Clone, Debug)]
pub(crate) struct Pointed {
    pub(crate) mask: MaskSpec,
    mask_text: Option<CString>,
    pub(crate) softmax_scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) gradients: Option<FmhaGradients>,
    pub(crate) cache: Option<FmhaCache>,
    pub(crate) part: Option<FmhaPart>,
    pub(crate) code: Option<PointedCode>,
    pub(crate) lists: Option<FmhaLists>,
    pub(crate) masks: Option<FmhaMasks>,
    pub(crate) block_scales: Option<FmhaBlockScales>,
}

impl Pointed {
    /// # Safety
    /// `mask` is null or a C string, the other host pointers are null or point to what they say.
    pub(crate) unsafe fn read(call: &FmhaCall) -> Result<Self> {
        struct_bytes::<FmhaCall>(call.struct_bytes)?;
        // SAFETY: the caller promised each of them.
        let gradients = unsafe { call.gradients.as_ref() }.copied();
        if let Some(gradients) = &gradients {
            struct_bytes::<FmhaGradients>(gradients.struct_bytes)?;
        }
        // SAFETY: the caller promised each of them.
        let cache = unsafe { call.cache.as_ref() }.copied();
        if let Some(cache) = &cache {
            struct_bytes::<FmhaCache>(cache.struct_bytes)?;
        }
        // SAFETY: the caller promised each of them.
        let part = unsafe { call.part.as_ref() }.copied();
        if let Some(part) = &part {
            struct_bytes::<FmhaPart>(part.struct_bytes)?;
        }
        // SAFETY: the caller promised each of them.
        let lists = unsafe { call.lists.as_ref() }.copied();
        if let Some(lists) = &lists {
            struct_bytes::<FmhaLists>(lists.struct_bytes)?;
        }
        // SAFETY: the caller promised each of them.
        let code = unsafe { call.code.as_ref().map(|code| PointedCode::read(code)).transpose()? };
        // SAFETY: the caller promised each of them.
        let masks = unsafe { call.masks.as_ref() }.copied();
        if let Some(masks) = &masks {
            struct_bytes::<FmhaMasks>(masks.struct_bytes)?;
        }
        // SAFETY: the caller promised each of them.
        let block_scales = unsafe { call.block_scales.as_ref() }.copied();
        if let Some(scales) = &block_scales {
            struct_bytes::<FmhaBlockScales>(scales.struct_bytes)?;
        }
        // SAFETY: the caller promised each of them.
        let (mask, mask_text) = unsafe { (mask(call)?, c_str(call.mask).map(CStr::to_owned)) };
        // SAFETY: the caller promised each of them.
        let (softmax_scale, softcap) = unsafe { (call.softmax_scale.as_ref(), call.softcap.as_ref()) };
        let (softmax_scale, softcap) = (softmax_scale.copied(), softcap.copied());
        Ok(Self {
            mask,
            mask_text,
            softmax_scale,
            softcap,
            gradients,
            cache,
            part,
            code,
            lists,
            masks,
            block_scales,
        })
    }

    /// Whether a later call's mask is spelled as this one's was: it need not be read again then.
    ///
    /// # Safety
    /// `mask` is null or a C string.
    #[inline]
    pub(crate) unsafe fn spells_mask_of(&self, call: &FmhaCall) -> bool {
        // SAFETY: the caller keeps the contract of `spells_mask_of`.
        unsafe { c_str(call.mask) == self.mask_text.as_deref() }
    }

    /// The forward problem of a call.
    pub(crate) fn forward(&self, call: &FmhaCall) -> Result<FwdProblem> {
        let dims = Dims {
            batch: size("batch", call.batch)?,
            seqlen_q: size("seqlen_q", call.seqlen_q)?,
            seqlen_k: size("seqlen_k", call.seqlen_k)?,
            num_heads_q: size("num_heads_q", call.num_heads_q)?,
            num_heads_kv: size("num_heads_kv", call.num_heads_kv)?,
            head_dim_qk: size("head_dim_qk", call.head_dim_qk)?,
            head_dim_v: size("head_dim_v", call.head_dim_v)?,
        };
        seed(call)?;
        none("reserved", call.reserved)?;
        let dtype_qk = dtype("dtype_qk", call.dtype_qk)?;
        let lists = self.lists.as_ref();
        let (q_layout, kv_layout) = layouts(call, lists)?;
        // Their numbers come with each run; that they go with the layouts is asked at once.
        totals(call, self.cache.as_ref(), lists)?;
        let base = FwdProblem::new(q_layout, kv_layout, dtype_qk, dims);
        let per_tensor = flag("descale_per_tensor", call.descale_per_tensor)?;
        let descale = |pointer: *const f32| match (pointer.is_null(), per_tensor) {
            (true, _) => Descale::None,
            (false, true) => Descale::PerTensor,
            (false, false) => Descale::PerKvHead,
        };
        let problem = base
            .clone()
            .seqused_q(!call.seqused_q.is_null())
            .seqused_k(!call.seqused_k.is_null() || has_no_sequences_but_begins(call, self.cache.as_ref()))
            .dtype_v(dtype("dtype_v", call.dtype_v)?)
            .dtype_o(dtype("dtype_o", call.dtype_o)?)
            .strides_q(strides(&call.q))
            .strides_k(strides(&call.k))
            .strides_v(strides(&call.v))
            .strides_o(strides(&call.o))
            .v_layout(v_layout(call.v_layout)?)
            .mask(self.mask)
            .softmax_scale(self.softmax_scale)
            .softcap(self.softcap)
            .bias(bias(call)?)
            .sink(!call.sink.is_null())
            .p_drop(call.p_drop)
            .descale_q(descale(call.descale_q))
            .descale_k(descale(call.descale_k))
            .descale_v(descale(call.descale_v))
            .scale_o(!call.scale_o.is_null())
            .write_lse(!call.lse.is_null())
            .write_keep_mask(!call.keep_mask.is_null())
            .row_max(!call.row_max.is_null())
            .head_max(!call.head_max.is_null())
            .key_sum(!call.key_sum.is_null())
            .part(self.part.as_ref().map_or(Ok(Part::default()), part)?);
        let problem = match &self.code {
            None => problem,
            Some(code) => code.forward(problem, self.gradients.is_some())?,
        };
        let problem = match &self.masks {
            None => problem,
            Some(masks) => masks::read(masks, problem, has_no_blocks(call))?,
        };
        let problem = problem.block_scales(self.block_scales.as_ref().map(block_scales).transpose()?);
        let problem = match &self.cache {
            None => problem,
            Some(cache) => cached(&problem, cache)?,
        };
        match &self.lists {
            None => Ok(problem),
            Some(lists) => {
                let lists = key_lists(&problem, lists)?;
                Ok(problem.lists(lists))
            }
        }
    }

    /// The backward problem of a call with `gradients`.
    pub(crate) fn backward(&self, call: &FmhaCall, gradients: &FmhaGradients) -> Result<BwdProblem> {
        for (field, given) in
            [("row_max", call.row_max), ("head_max", call.head_max), ("key_sum", call.key_sum)]
        {
            if !given.is_null() {
                let text = format!("{field} is given beside gradients, but forward alone writes it");
                return Err(ProblemError::new(field, text).into());
            }
        }
        let fwd = self.forward(call)?;
        if call.lse.is_null() && !has_no_rows(call) {
            return Err(ProblemError::new("lse", "lse is null, but gradients are wanted of it").into());
        }
        let no_bias = call.bias.data.is_null() && has_no_scores(call);
        let dbias = if gradients.dbias.data.is_null() || no_bias {
            if !has_no_scores(call) {
                none_of("dtype_dbias", gradients.dtype_dbias, "dbias.data")?;
            }
            None
        } else {
            let dtype = dtype("dtype_dbias", gradients.dtype_dbias)?;
            let (bias, dbias) = (&call.bias, &gradients.dbias);
            // A gradient of its own for each sequence or head would be written for the first alone.
            for (axis, extent, of_bias, of_dbias) in [
                ("batch_stride", call.batch, bias.batch_stride, dbias.batch_stride),
                ("head_stride", call.num_heads_q, bias.head_stride, dbias.head_stride),
            ] {
                if extent > 1 && of_bias == 0 && of_dbias != 0 {
                    let text = format!("dbias has {axis} {of_dbias}, but bias has 0, one for all {extent}");
                    return Err(ProblemError::new("dbias", text).into());
                }
            }
            Some(BiasGrad { dtype, strides: strides(&gradients.dbias) })
        };
        Ok(BwdProblem::new(fwd)
            .dtype_grad(dtype("dtype_grad", gradients.dtype_grad)?)
            .strides_dout(strides(&gradients.dout))
            .strides_dq(strides(&gradients.dq))
            .strides_dk(strides(&gradients.dk))
            .strides_dv(strides(&gradients.dv))
            .dbias(dbias)
            .write_dsink(!gradients.dsink.is_null())
            .has_dlse(!gradients.dlse.is_null())
            .dcaptured(self.code.as_ref().map_or(Ok(vec![]), PointedCode::gradients)?))
    }
}

/// The mask of a call.
///
/// # Safety
/// `mask` is null or a C string.
pub(crate) unsafe fn mask(call: &FmhaCall) -> Result<MaskSpec, ProblemError> {
    // SAFETY: the caller keeps the contract of `mask`.
    match unsafe { text("mask", call.mask)? } {
        None => Ok(MaskSpec::NONE),
        Some(mask) => mask.parse(),
    }
}

/// The problem with the cache's use by `FmhaCache`.
fn cached(problem: &FwdProblem, cache: &FmhaCache) -> Result<FwdProblem, ProblemError> {
    let seqlen_new = size("seqlen_new", cache.seqlen_new)?;
    let packed = !cache.cu_seqlens_new.is_null();
    let append = Append {
        layout: if packed { QLayout::Packed } else { QLayout::Batch },
        seqlen_new,
        k_new: strides(&cache.k_new),
        v_new: strides(&cache.v_new),
    };
    for (field, given) in [
        ("k_new.data", !cache.k_new.data.is_null()),
        ("v_new.data", !cache.v_new.data.is_null()),
        ("cu_seqlens_new", packed),
    ] {
        if given && seqlen_new == 0 {
            return Err(ProblemError::new(field, format!("{field} is given, but seqlen_new is 0")));
        }
    }
    let v_in_k = flag("v_in_k", cache.v_in_k)?;
    if v_in_k && !cache.v_new.data.is_null() {
        return Err(ProblemError::new("v_new.data", "v_new.data is given, but v_in_k is 1"));
    }
    none("reserved", cache.reserved)?;
    let dtype_cache = match cache.dtype_cache {
        0 => None,
        code => Some(dtype("dtype_cache", code)?),
    };
    Ok(problem
        .clone()
        .append((seqlen_new > 0).then_some(append))
        .rotary(rotary(cache)?)
        .tree_mask(!cache.tree_mask.is_null())
        .dtype_cache(dtype_cache)
        .v_in_k(v_in_k))
}

/// The scales by blocks of a call.
fn block_scales(given: &FmhaBlockScales) -> Result<BlockScales, ProblemError> {
    none("reserved", given.reserved)?;
    let format = match given.format {
        FMHA_MXFP8_E4M3 => BlockFormat::Mxfp8E4m3,
        FMHA_MXFP8_E5M2 => BlockFormat::Mxfp8E5m2,
        FMHA_NVFP4 => BlockFormat::Nvfp4,
        other => {
            let text =
                format!("format {other} is none of FMHA_MXFP8_E4M3 1, FMHA_MXFP8_E5M2 2 and FMHA_NVFP4 3");
            return Err(ProblemError::new("format", text));
        }
    };
    Ok(BlockScales::strided(format, [strides(&given.q), strides(&given.k), strides(&given.v)]))
}

/// The lists of a call.
fn key_lists(problem: &FwdProblem, lists: &FmhaLists) -> Result<KeyLists, ProblemError> {
    let block = size("block", lists.block.into())?;
    let addresses = flag("addresses", lists.addresses)?;
    if addresses && block > 1 {
        return Err(ProblemError::new(
            "block",
            format!("block {block} beside addresses 1, which name single keys"),
        ));
    }
    let per_token = flag("length_per_token", lists.length_per_token)?;
    let length = match (lists.topk_length.is_null(), per_token) {
        (true, true) if !has_no_tokens(problem) => {
            let text = "length_per_token 1 goes with topk_length, which is null";
            return Err(ProblemError::new("length_per_token", text));
        }
        (_, true) => ListLength::Token,
        (true, false) => ListLength::Whole,
        (false, false) => ListLength::Sequence,
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

/// Whether a problem's tensors of tokens may be null.
fn has_no_tokens(problem: &FwdProblem) -> bool {
    problem.dims.batch == 0 || problem.dims.seqlen_q == 0
}

/// Where a call stands in its whole.
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

/// The rotary embedding: all of it, or nothing of it.
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
        for (field, table) in [("rotary_cos", cache.rotary_cos), ("rotary_sin", cache.rotary_sin)] {
            if !table.is_null() {
                return Err(ProblemError::new(field, format!("{field} is given, but rotary_dim is 0")));
            }
        }
        return Ok(None);
    }
    for (field, pointer) in [("rotary_cos", cache.rotary_cos), ("rotary_sin", cache.rotary_sin)] {
        if pointer.is_null() && max_pos > 0 {
            return Err(ProblemError::new(field, format!("{field} is null, but rotary_dim is {dim}")));
        }
    }
    let pairs = if interleaved { RotaryPairs::Interleaved } else { RotaryPairs::Half };
    Ok(Some(Rotary { dim, pairs, max_pos, dtype: dtype("dtype_rotary", cache.dtype_rotary)? }))
}

/// The parts of a combine call, which all have the strides of the first.
///
/// # Safety
/// `parts` is null or `num_parts` of them in host memory.
pub(crate) unsafe fn parts(call: &FmhaCombine) -> Result<&[FmhaPartial]> {
    struct_bytes::<FmhaCombine>(call.struct_bytes)?;
    let num_parts = size("num_parts", call.num_parts)?;
    let by_lse = merge(call.merge)? == Merge::ByLse;
    if num_parts == 0 && !by_lse {
        return Ok(&[]);
    }
    if call.parts.is_null() || num_parts == 0 {
        let text = format!("parts is null or num_parts {num_parts} is 0");
        return Err(ProblemError::new("num_parts", text).into());
    }
    // SAFETY: the caller promised so many.
    let parts = unsafe { std::slice::from_raw_parts(call.parts, num_parts as usize) };
    for (i, part) in parts.iter().enumerate() {
        crate::agree::strides(format_args!("parts[{i}].o"), &part.o, &parts[0].o, "that of parts[0].o")?;
        if by_lse && part.lse.is_null() && !combines_no_rows(call) {
            return Err(ProblemError::new("parts", format!("parts[{i}].lse is null")).into());
        }
    }
    Ok(parts)
}

/// Whether the parts have no rows: their LSE and that of their whole may then be null.
pub(crate) fn combines_no_rows(call: &FmhaCombine) -> bool {
    call.batch == 0 || call.seqlen_q == 0
}

/// The part that the others are held to. Of none, rows lie as those of O do.
pub(crate) fn first_part(call: &FmhaCombine, parts: &[FmhaPartial]) -> FmhaPartial {
    parts.first().copied().unwrap_or(FmhaPartial { o: call.o, lse: std::ptr::null() })
}

/// The problem of a combine call.
pub(crate) fn combine(call: &FmhaCombine, first: &FmhaPartial) -> Result<CombineProblem> {
    none("reserved", call.reserved)?;
    let num_parts = size("num_parts", call.num_parts)?;
    let rows = Shape {
        batch: size("batch", call.batch)?,
        seq: size("seqlen_q", call.seqlen_q)?,
        head: size("num_heads_q", call.num_heads_q)?,
        dim: size("head_dim_v", call.head_dim_v)?,
    };
    let (dtype_part, dtype_o) = (dtype("dtype_part", call.dtype_part)?, dtype("dtype_o", call.dtype_o)?);
    Ok(CombineProblem::new(num_parts, dtype_part, dtype_o, rows)
        .strides_part(strides(&first.o))
        .strides_o(strides(&call.o))
        .write_lse(!call.lse.is_null())
        .merge(merge(call.merge)?))
}

/// Device, kernel, tile and promises that `FmhaOptions` asks for.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    pub(crate) backend: Option<Backend>,
    pub(crate) plan: PlanOptions,
    /// Whether each run brings its scratch.
    pub(crate) caller_workspace: bool,
}

impl Choice {
    /// # Safety
    /// `options` is null or options whose strings are null or C strings.
    pub(crate) unsafe fn read(options: *const FmhaOptions) -> Result<Self> {
        // SAFETY: promised by the caller: `options` is null or options whose strings are null or C strings.
        let Some(options) = (unsafe { options.as_ref() }) else { return Ok(Self::default()) };
        struct_bytes::<FmhaOptions>(options.struct_bytes)?;
        none("reserved", options.reserved)?;
        // SAFETY: the caller promised C strings.
        let (backend, kernel, tile) = unsafe {
            (text("backend", options.backend)?, text("kernel", options.kernel)?, text("tile", options.tile)?)
        };
        let backend = backend.map(str::parse).transpose()?;
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
        Ok(Self { backend, plan, caller_workspace })
    }
}

fn tile_options(text: &str) -> Result<Vec<(String, String)>, ProblemError> {
    text.split(',')
        .map(|pair| match pair.split_once('=') {
            Some((name, value)) if !name.is_empty() && !value.is_empty() => {
                Ok((name.to_owned(), value.to_owned()))
            }
            _ => Err(ProblemError::new("tile", format!("tile `{pair}` is not of the form name=value"))),
        })
        .collect()
}

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

/// Which layouts the pointers of a call mean.
fn layouts(call: &FmhaCall, lists: Option<&FmhaLists>) -> Result<(QLayout, KvLayout), ProblemError> {
    let q = if call.cu_seqlens_q.is_null() { QLayout::Batch } else { QLayout::Packed };
    let page_size = size("page_size", call.page_size)?;
    let kv = match (page_size, call.cu_seqlens_k.is_null()) {
        (0, true) => KvLayout::Strided,
        (0, false) => KvLayout::Packed,
        (_, true) => KvLayout::Paged { page_size },
        (_, false) => {
            let text = format!("cu_seqlens_k is given, but page_size is {page_size}");
            return Err(ProblemError::new("cu_seqlens_k", text));
        }
    };
    // A table of no entries may be null, where no sequence has a key.
    let addresses = lists.is_some_and(|lists| lists.addresses != 0);
    let may_be_null =
        page_size == 0 || addresses || call.batch == 0 || call.max_pages == 0 && call.seqlen_k == 0;
    if addresses && !call.block_table.is_null() {
        let text = "block_table is given, but indices are addresses: lists.addresses 1";
        return Err(ProblemError::new("block_table", text));
    }
    let (is_null, paged) = (call.block_table.is_null(), page_size != 0);
    if is_null && !may_be_null || !is_null && !paged {
        let is = if call.block_table.is_null() { "null" } else { "given" };
        let text = format!("block_table is {is}, but page_size is {page_size}");
        return Err(ProblemError::new("block_table", text));
    }
    Ok((q, kv))
}

/// Totals of a call: rows where the layout is packed, pages where it is paged.
#[inline]
pub(crate) fn totals(
    call: &FmhaCall,
    cache: Option<&FmhaCache>,
    lists: Option<&FmhaLists>,
) -> Result<Totals, ProblemError> {
    let numbers = call.total_q | call.total_k | call.num_pages | call.max_pages | call.page_size;
    let pointers = [call.cu_seqlens_q, call.cu_seqlens_k, call.block_table];
    if numbers == 0 && pointers.iter().all(|pointer| pointer.is_null()) && cache.is_none() {
        return Ok(Totals::NONE);
    }
    given_totals(call, cache, lists)
}

fn given_totals(
    call: &FmhaCall,
    cache: Option<&FmhaCache>,
    lists: Option<&FmhaLists>,
) -> Result<Totals, ProblemError> {
    let (q, kv) = layouts(call, lists)?;
    let (total_new, packs_new) =
        cache.map_or((0, false), |cache| (cache.total_new, !cache.cu_seqlens_new.is_null()));
    let paged = matches!(kv, KvLayout::Paged { .. });
    let of = |field, value, wanted, with: &str| match (size(field, value)?, wanted) {
        (value, true) => Ok(Some(value)),
        (0, false) => Ok(None),
        (value, false) => Err(ProblemError::new(field, format!("{field} {value} goes with {with}"))),
    };
    let (cu_q, cu_k) = ("cu_seqlens_q, which is null", "cu_seqlens_k, which is null");
    of("max_pages", call.max_pages, paged, "page_size, which is 0")?;
    Ok(Totals {
        total_q: of("total_q", call.total_q, q == QLayout::Packed, cu_q)?,
        total_k: of("total_k", call.total_k, kv == KvLayout::Packed, cu_k)?,
        num_pages: of("num_pages", call.num_pages, paged, "page_size, which is 0")?,
        total_new: of("total_new", total_new, packs_new, "cu_seqlens_new, which is null")?,
    })
}

/// Whether new rows or angles begin at the length of each of no sequences: null is the address of no lengths.
fn has_no_sequences_but_begins(call: &FmhaCall, cache: Option<&FmhaCache>) -> bool {
    call.batch == 0 && cache.is_some_and(|cache| cache.seqlen_new > 0 || cache.rotary_dim > 0)
}

/// Whether no sequence has a query: LSE and its gradient then have no elements, and null is their address.
pub(crate) fn has_no_rows(call: &FmhaCall) -> bool {
    if call.cu_seqlens_q.is_null() { call.batch == 0 || call.seqlen_q == 0 } else { call.total_q == 0 }
}

/// Whether lists of blocks have no rows: null is their address then.
pub(crate) fn has_no_blocks(call: &FmhaCall) -> bool {
    call.batch == 0 || call.seqlen_q == 0
}

/// Whether no query has a key: the bias, its gradient and the keep mask then have no elements.
pub(crate) fn has_no_scores(call: &FmhaCall) -> bool {
    call.batch == 0 || call.seqlen_q == 0 || call.seqlen_k == 0
}

/// Strides of 0 over batch or head are a bias that is shared.
fn bias(call: &FmhaCall) -> Result<Bias, ProblemError> {
    let per_batch = flag("alibi_per_batch", call.alibi_per_batch)?;
    let (elementwise, alibi) = (!call.bias.data.is_null(), !call.alibi_slopes.is_null());
    // A batch of 0 has no slopes.
    if per_batch && !alibi && call.batch > 0 {
        let text = "alibi_per_batch 1 goes with alibi_slopes, which is null";
        return Err(ProblemError::new("alibi_per_batch", text));
    }
    // A bias without elements may be null whatever its type: it adds to no score.
    if !elementwise && !has_no_scores(call) {
        none_of("dtype_bias", call.dtype_bias, "bias.data")?;
    }
    match (elementwise, alibi) {
        (false, false) => Ok(Bias::None),
        (false, true) => Ok(Bias::Alibi { per_batch }),
        (true, false) => Ok(Bias::Elementwise(ElementwiseBias {
            dtype: dtype("dtype_bias", call.dtype_bias)?,
            broadcast: BiasBroadcast::of_axes(call.bias.batch_stride != 0, call.bias.head_stride != 0),
            strides: strides(&call.bias),
        })),
        (true, true) => {
            Err(ProblemError::new("alibi_slopes", "alibi_slopes and bias: 2 given, at most 1 is taken"))
        }
    }
}

fn none_of(field: &'static str, value: i32, tensor: &str) -> Result<(), ProblemError> {
    if value == 0 {
        return Ok(());
    }
    Err(ProblemError::new(field, format!("{field} {value} goes with {tensor}, which is null")))
}

pub(crate) fn strides(tensor: &FmhaTensor) -> Strides {
    Strides {
        batch: tensor.batch_stride,
        seq: tensor.seqlen_stride,
        head: tensor.head_stride,
        dim: tensor.dim_stride,
    }
}

pub(crate) fn size(field: &'static str, value: i64) -> Result<u32, ProblemError> {
    u32::try_from(value).map_err(|_| ProblemError::new(field, format!("{field} {value} is not in 0..2^32")))
}

/// The dropout generator's position for a run, if the run has one.
pub(crate) fn seed(call: &FmhaCall) -> Result<Option<DropoutSeed>, ProblemError> {
    let at = DropoutSeed { seed: call.dropout_seed, offset: call.dropout_offset };
    Ok(flag("dropout_seeded", call.dropout_seeded)?.then_some(at))
}

/// Room for later versions.
pub(crate) fn none(field: &'static str, value: i32) -> Result<(), ProblemError> {
    if value == 0 { Ok(()) } else { Err(ProblemError::new(field, format!("{field} {value} is not 0"))) }
}

fn flag(field: &'static str, value: i32) -> Result<bool, ProblemError> {
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
        _ => {
            let text = format!("merge {value} is not in 0..=2 (FMHA_BY_LSE, FMHA_SUM, FMHA_ADD_TO)");
            Err(ProblemError::new("merge", text))
        }
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
            let text = format!("{field} {code} is not in 0..=6 (FMHA_F16 ... FMHA_F32)");
            return Err(ProblemError::new(field, text));
        }
    })
}
