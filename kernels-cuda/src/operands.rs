//! Requirements of every kernel's loads and stores on its operands: strides and lengths of a forward call, addresses.

use fmha_core::{Bias, DType, FwdProblem, KvLayout, PlanOptions, Refusal, Strides, VLayout};
use fmha_gpu::Operand;

/// Alignment in bytes of addresses for TMA, and for copies and stores of 16 bytes.
pub(crate) const ALIGN: u64 = 16;

/// The strides in use, except strides of 1 within a row: tensor name, axis, elements.
pub(crate) fn strides(problem: &FwdProblem) -> impl Iterator<Item = (&'static str, &'static str, i64)> {
    // Rows of bytes have the strides of their format, whatever the strides in elements say.
    let apart = |strides: Strides| match problem.cache.rows {
        Some(rows) => Strides { seq: rows.stride().into(), ..strides },
        None => strides,
    };
    let operands = [
        ("q", problem.strides.q, problem.shape_q(), true),
        ("k", apart(problem.strides.k), problem.shape_k(), true),
        ("v", apart(problem.strides.v), problem.shape_v(), problem.layout.v == VLayout::RowMajor),
    ];
    // A second cache has the types of the first one.
    let second = problem.second.map(|second| {
        let alone = second.alone(problem);
        [("k", apart(second.k), alone.shape_k(), true), ("v", apart(second.v), alone.shape_v(), true)]
    });
    operands.into_iter().chain(second.into_iter().flatten()).flat_map(|(name, strides, shape, rows)| {
        let inner = if rows { ("seq", strides.seq, shape.seq) } else { ("dim", strides.dim, shape.dim) };
        [("batch", strides.batch, shape.batch), inner, ("head", strides.head, shape.head)]
            .into_iter()
            .filter(|&(_, _, extent)| extent > 1)
            .map(move |(axis, stride, _)| (name, axis, stride))
    })
}

/// The first stride that TMA does not support, with the multiple that it must be: TMA needs strides that are
/// multiples of 16 bytes.
pub(crate) fn odd_stride(problem: &FwdProblem) -> Option<(&'static str, &'static str, i64, i64)> {
    strides(problem).find_map(|(name, axis, stride)| {
        let dtype = match name {
            "q" => problem.dtypes.qk,
            "k" => problem.stored_k(),
            _ => problem.stored_v(),
        };
        let size = dtype.size_bytes() as i64;
        let odd = stride % (16 / size) != 0 || stride >= (1 << 40) / size;
        odd.then_some((name, axis, stride, 16 / size))
    })
}

/// Number of keys of a page that one TMA instruction loads into a block of `block_n` keys. Returns 0 if K and V are not
/// paged, or if TMA cannot load a page's part: a box must be a multiple of 8 rows, the period of the swizzle.
pub(crate) fn page_keys(problem: &FwdProblem, block_n: i32) -> i32 {
    let Some(page_size) = problem.layout.kv.page_size().filter(|_| problem.layout.v == VLayout::RowMajor)
    else {
        return 0;
    };
    let (mut keys, mut rest) = (block_n.unsigned_abs(), page_size);
    while rest > 0 {
        (keys, rest) = (rest, keys % rest);
    }
    if keys % 8 == 0 { keys.cast_signed() } else { 0 }
}

/// Whether K and V lie in pages that TMA cannot load into blocks of `block_n` keys.
pub(crate) fn has_odd_pages(problem: &FwdProblem, block_n: i32) -> bool {
    problem.layout.kv.is_paged() && page_keys(problem, block_n) == 0
}

/// Whether sequences begin at arbitrary elements of V's innermost axis. The start address of a TMA box would then
/// not be a multiple of 16 bytes, which is an illegal instruction (on an H200; Triton's issue 7385 reports this
/// too).
pub(crate) fn keys_of_v_begin_anywhere(problem: &FwdProblem) -> bool {
    problem.layout.v == VLayout::ColMajor && problem.layout.kv == KvLayout::Packed
}

/// Whether O's rows are multiples of 16 bytes and begin at such addresses if O does.
pub(crate) fn stores_vectors(problem: &FwdProblem) -> bool {
    let (Strides { batch, seq, head, .. }, shape) = (problem.strides.o, problem.shape_o());
    let elems = 16 / problem.dtypes.o.size_bytes() as i64;
    let whole = |stride: i64, extent: u32| extent <= 1 || stride % elems == 0;
    i64::from(shape.dim) % elems == 0
        && whole(batch, shape.batch)
        && whole(seq, shape.seq)
        && whole(head, shape.head)
}

/// Number of elements in the widest swizzle span (128, 64 or 32 bytes) that divides rows of `elems` elements.
pub(crate) const fn swizzle_span(elems: i32, dtype: DType) -> i32 {
    let size = dtype.size_bytes() as i32;
    let bytes = match elems * size {
        row if row % 128 == 0 => 128,
        row if row % 64 == 0 => 64,
        _ => 32,
    };
    bytes / size
}

/// Refuses sequences so long that positions plus the kernels' offsets overflow 32 bits.
///
/// # Errors
/// The length, as a refusal of `kernel`.
pub(crate) fn refuse_long_sequences(problem: &FwdProblem, kernel: &'static str) -> Result<(), Refusal> {
    for (field, length) in [("seqlen_q", problem.dims.seqlen_q), ("seqlen_k", problem.dims.seqlen_k)] {
        if length >= 1 << 29 {
            return Err(Refusal::new(kernel, format!("{field} {length} is not below 2^29")));
        }
    }
    Ok(())
}

/// Refuses rows, (query, head) pairs of a kv head, that 32 bits do not count together with a tile of `tile` rows.
///
/// # Errors
/// The length and the heads, as a refusal of `kernel`.
pub(crate) fn refuse_many_rows(problem: &FwdProblem, tile: u64, kernel: &'static str) -> Result<(), Refusal> {
    let (seqlen_q, heads) =
        (problem.dims.seqlen_q, problem.dims.num_heads_q / problem.dims.num_heads_kv.max(1));
    let rows = u64::from(seqlen_q) * u64::from(heads);
    if rows > (1 << 31) - tile {
        let text =
            format!("seqlen_q {seqlen_q} of {heads} heads a kv head makes {rows} rows, not below 2^31");
        return Err(Refusal::new(kernel, text));
    }
    Ok(())
}

/// Refuses a `softmax_scale` so small that `ALiBi`'s slopes cannot be divided by it, which is needed because slopes
/// are subtracted from unscaled scores. With types other than bf16 all scores are 0 at such a scale.
///
/// # Errors
/// The scale, as a refusal of `kernel`.
pub(crate) fn refuse_faint_alibi(problem: &FwdProblem, kernel: &'static str) -> Result<(), Refusal> {
    let scale = problem.resolved_softmax_scale();
    let alibi_alone = matches!(problem.score.bias, Bias::Alibi { .. }) && problem.score.softcap.is_none();
    if problem.dtypes.qk == DType::Bf16 && alibi_alone && scale != 0.0 && scale.abs() < 1e-30 {
        return Err(Refusal::new(kernel, format!("softmax_scale {scale:e} is below 1e-30, beside ALiBi")));
    }
    Ok(())
}

/// Required alignment of an operand's address, for a kernel that loads by TMA (`copy_bytes` 0) or by copies of
/// `copy_bytes` bytes, and that stores rows of O 16 bytes at a time or by elements.
pub(crate) fn alignment(
    problem: &FwdProblem,
    operand: Operand,
    copy_bytes: i32,
    stores_vectors: bool,
) -> u64 {
    let loads = if copy_bytes > 0 { u64::from(copy_bytes.unsigned_abs()) } else { ALIGN };
    match operand {
        Operand::Q => loads,
        // A tensor without rows is never read, so its address may be anything.
        Operand::K | Operand::V if problem.shape_k().seq > 0 => loads,
        Operand::O if stores_vectors => ALIGN,
        _ => 1,
    }
}

/// Refuses a row-invariant plan: one kernel must then compute all of a device's calls, and only `sm80` supports
/// every layout of rows and keys.
///
/// # Errors
/// The option, as a refusal of `kernel`.
pub(crate) fn refuse_row_invariant(options: &PlanOptions, kernel: &'static str) -> Result<(), Refusal> {
    if options.row_invariant {
        let reason = "row_invariant true: it does not take keys in every layout, and sums them in another order than \
                      sm80, which does";
        return Err(Refusal::new(kernel, reason.to_owned()));
    }
    Ok(())
}

/// Refuses problems whose rows would not have equal bits in other calls, or for which no pair of calls was tested: Q in
/// FP8 (and so O in FP8, which needs it); a mask as code, which hides keys that other calls leave out, so that a row's
/// keys begin at other places in its parts.
///
/// # Errors
/// In `kernel`'s name, the field and its value.
pub(crate) fn refuse_unlike_rows(problem: &FwdProblem, kernel: &'static str) -> Result<(), Refusal> {
    let dtype = problem.dtypes.qk;
    if dtype.is_fp8() {
        return Err(Refusal::new(
            kernel,
            format!("row_invariant true: dtype_qk {dtype} is not a type of 16 bits"),
        ));
    }
    match &problem.code.mask {
        Some(mask) => Err(Refusal::new(
            kernel,
            format!(
                "row_invariant true: mask_code \"{mask}\": parts of keys that it hides differ from a band's"
            ),
        )),
        None => Ok(()),
    }
}
