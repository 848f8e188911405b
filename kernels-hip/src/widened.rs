//! The kernels `cdna_widened` and `rdna_widened`: a forward on a quantised cache. A first launch converts the cache
//! once into the workspace, in Q's type, and the forward kernel reads it there, so the bits are those of the call
//! on the dequantised cache.

pub(crate) mod recipe;

use fmha_core::abi::{AbiLiteral as _, AbiStruct as _, DevPtr, FwdParams, HeadScalars, View, c_constant};
use fmha_core::problem::MAX_SEQLEN;
use fmha_core::source::{Entry, Header, KernelSource};
use fmha_core::{
    DType, DevSlice, FwdArgs, FwdProblem, KvLayout, Refusal, Shape, Strides, VLayout, abi_spec, abi_struct,
};

use crate::device::refuse;

/// The name of the launch that converts the KV cache to Q's type.
pub(crate) const WIDEN: &str = "widen_cache";
/// Threads of a workgroup of the launch that converts the KV cache.
pub(crate) const NUM_THREADS: u32 = 256;
/// Keys of a sequence that one workgroup converts.
const KEYS: u32 = 64;
/// Most keys that a forward kernel reads at a time.
const MOST_OF_BLOCK: u32 = 128;

abi_spec! {
    /// Compile-time spec of the converting launch.
    pub struct WidenSpec {
        /// Type of K and V in memory.
        pub stored: DType,
        /// Type to which elements are converted: Q's type.
        pub dtype: DType,
        /// Whether rows have scales of their own.
        pub scaled: bool,
    }
}

abi_struct! {
    /// Kernel argument for the KV cache after its conversion to Q's type.
    pub struct WidenedCache {
        /// Converted K, `[batch, seqlen_k, num_heads_kv, head_dim_qk]`, or packed.
        pub k: View,
        /// Converted V.
        pub v: View,
        /// `[batch]`, an output: number of keys of each sequence.
        pub seqused_k: DevPtr<i32>,
        /// `[batch + 1]`, an output: the first row of each sequence.
        pub cu_seqlens_k: DevPtr<i32>,
        /// Scales of K, one for each row; not read if rows have none.
        pub k_scale: View,
        /// Scales of V, one for each row; not read if rows have none.
        pub v_scale: View,
        /// Number of rows from one sequence to the next if there is no batch axis, otherwise 0.
        pub rows_of_batch: i64,
        /// Number of blocks of keys of the longest sequence.
        pub num_blocks: i32,
        /// Elements of a key's row.
        pub head_dim_qk: i32,
        /// Elements of a value's row.
        pub head_dim_v: i32,
        /// Number of adjacent rows that share a scale.
        pub scale_block: i32,
    }
}

/// Offsets in the workspace of the parts of the KV cache that is converted to Q's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Places {
    cu_seqlens_k: u64,
    k: u64,
    v: u64,
    /// Bytes of the whole workspace.
    pub(crate) bytes: u64,
}

impl Places {
    /// Offsets of the converted K and V for a problem, after the lengths, i32 `[batch]`.
    ///
    /// # Errors
    /// A workspace of 2^62 bytes or more, as a refusal of `kernel`.
    pub(crate) fn of(kernel: &'static str, problem: &FwdProblem) -> Result<Self, Refusal> {
        let lengths = 4 * u64::from(problem.dims.batch);
        let bytes = |shape: Shape| {
            let rows =
                u64::from(shape.batch).saturating_mul(shape.seq.into()).saturating_mul(shape.head.into());
            rows.saturating_mul(2 * u64::from(shape.dim)).min(1 << 61).next_multiple_of(256)
        };
        let [of_k, of_v] = shapes(problem).map(bytes);
        let cu_seqlens_k = lengths.next_multiple_of(256);
        let k = (cu_seqlens_k + lengths + 4).next_multiple_of(256);
        let (v, all) = (k + of_k, k + of_k + of_v);
        if all >= 1 << 61 {
            refuse!(kernel, "the workspace would be 2^61 bytes or more");
        }
        Ok(Self { cu_seqlens_k, k, v, bytes: all })
    }

    /// Parameters of the converted cache, in a workspace that begins at this address.
    pub(crate) fn cache(&self, problem: &FwdProblem, workspace: u64) -> WidenedCache {
        let [k, v] = strides(problem);
        let packed = problem.layout.kv == KvLayout::Packed;
        WidenedCache {
            k: View::new(workspace + self.k, k, packed),
            v: View::new(workspace + self.v, v, packed),
            seqused_k: DevPtr::new(workspace),
            cu_seqlens_k: DevPtr::new(workspace + self.cu_seqlens_k),
            k_scale: View::NULL,
            v_scale: View::NULL,
            rows_of_batch: if packed { problem.dims.seqlen_k.into() } else { 0 },
            num_blocks: num_blocks(problem).cast_signed(),
            head_dim_qk: problem.dims.head_dim_qk.cast_signed(),
            head_dim_v: problem.dims.head_dim_v.cast_signed(),
            scale_block: 1,
        }
    }
}

impl WidenedCache {
    /// This argument with the scales of the call's rows, where they have some.
    pub(crate) fn scaled(self, problem: &FwdProblem, args: &FwdArgs<'_>) -> Self {
        let Some(scales) = &problem.cache.scales else { return self };
        let packed = problem.layout.kv == KvLayout::Packed;
        let [k_scale, v_scale] = args.scale_slices();
        let view = |slice: Option<DevSlice<'_>>, strides| {
            View::new(slice.map_or(0, |slice| slice.as_ptr() as u64), strides, packed)
        };
        Self {
            k_scale: view(k_scale, scales.k),
            v_scale: view(v_scale, scales.v),
            scale_block: scales.block.cast_signed(),
            ..self
        }
    }

    /// Arguments of the forward kernel: those of the call, with K and V replaced.
    pub(crate) fn forward(&self, problem: &FwdProblem, whole: &FwdParams) -> FwdParams {
        let mut fwd = FwdParams { k: self.k, v: self.v, ..*whole };
        (fwd.descale_k, fwd.descale_v) = (HeadScalars::NULL, HeadScalars::NULL);
        if problem.layout.kv == KvLayout::Packed {
            (fwd.seqused_k, fwd.cu_seqlens_k) = (self.seqused_k, self.cu_seqlens_k);
            fwd.total_k = (problem.dims.batch * problem.dims.seqlen_k).cast_signed();
        }
        fwd
    }
}

fn num_blocks(problem: &FwdProblem) -> u32 {
    problem.dims.seqlen_k.div_ceil(KEYS).max(1)
}

/// Number of workgroups of the converting launch.
pub(crate) fn num_workgroups(problem: &FwdProblem) -> u64 {
    u64::from(problem.dims.batch) * u64::from(num_blocks(problem))
}

/// Shapes of K and V in the workspace: for packed keys, each sequence has as many rows as the longest may have.
fn shapes(problem: &FwdProblem) -> [Shape; 2] {
    let dims = problem.dims;
    let (batch, seq) = match problem.layout.kv {
        KvLayout::Packed => (1, dims.batch.saturating_mul(dims.seqlen_k)),
        _ => (dims.batch, dims.seqlen_k),
    };
    let k = Shape { batch, seq, head: dims.num_heads_kv, dim: dims.head_dim_qk };
    [k, Shape { dim: dims.head_dim_v, ..k }]
}

fn strides(problem: &FwdProblem) -> [Strides; 2] {
    let [k, v] = shapes(problem);
    let of_v = match problem.layout.v {
        VLayout::RowMajor => Strides::bshd(v),
        VLayout::ColMajor => Strides::bhds(v),
    };
    [Strides::bshd(k), of_v]
}

/// The problem for the forward kernel, made from the problem with the cache in Q's type.
///
/// # Errors
/// The first fact that the launch does not support, as a refusal of `kernel`.
pub(crate) fn wide_problem(kernel: &'static str, mut wide: FwdProblem) -> Result<FwdProblem, Refusal> {
    wide.refuse_mixed_layouts(kernel)?;
    let (batch, seqlen_k) = (wide.dims.batch, wide.dims.seqlen_k);
    if u64::from(batch) * u64::from(seqlen_k) > u64::from(MAX_SEQLEN) {
        refuse!(kernel, "batch {batch} times seqlen_k {seqlen_k} is larger than {MAX_SEQLEN}");
    }
    [wide.strides.k, wide.strides.v] = strides(&wide);
    wide.cache.v_in_k = false;
    Ok(wide)
}

/// The launch that converts the cache into the workspace: its arguments are the call's `FwdParams` and
/// [`WidenedCache`].
pub(crate) fn widen(problem: &FwdProblem) -> KernelSource {
    let scaled = problem.cache.scales.is_some();
    let spec = WidenSpec { stored: problem.stored_k(), dtype: problem.dtypes.qk, scaled };
    let entry = Entry {
        include: "fmha/widen_cache.h",
        constants: &[("kSpec", &spec)],
        bounds: &crate::group_of(NUM_THREADS),
        params: "FwdParams p, WidenedCache to",
        call: "cache::Widen<kSpec>{p, to}.run();",
    };
    KernelSource::new(entry.render(), crate::headers)
}

/// `fmha/widened_cache.h`: the types that this file shares with the device.
pub(crate) fn header() -> Header {
    let definitions = [
        c_constant("kWidenThreads", NUM_THREADS),
        c_constant("kWidenKeys", KEYS),
        c_constant("kMostOfBlock", MOST_OF_BLOCK),
        WidenSpec::c_definition(),
        WidenedCache::c_definition(),
    ];
    Header::shared("fmha/widened_cache.h", "fmha", &["fmha/params.h", "fmha/spec.h"], &definitions)
}
