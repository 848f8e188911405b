//! An FP8 or paged KV cache under many queries on Hopper: a launch first converts it to 16 bits, in contiguous rows
//! in the workspace, and the kernel for such caches reads it there.

pub mod recipe;

use fmha_core::abi::{AbiLiteral as _, AbiStruct as _, DevPtr, View, c_constant};
use fmha_core::problem::MAX_SEQLEN;
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::KvKind;
use fmha_core::work::visible_pairs;
use fmha_core::{
    DType, Descale, DevSlice, Dims, FwdArgs, FwdProblem, KvLayout, QLayout, Refusal, Shape, Strides, VLayout,
    Workspace, abi_spec, abi_struct,
};

/// The kernel's name in plans and refusals.
pub const NAME: &str = "sm90_widened";

/// The kernel's name if Blackwell's kernel `sm100` reads the cache.
pub const NAME_OF_SM100: &str = "sm100_widened";
/// The kernel's name if Blackwell's kernel of wide heads, `sm100_mla`, reads the cache.
pub const NAME_OF_SM100_MLA: &str = "sm100_mla_widened";

/// The kernel's name where the kernel of every NVIDIA GPU reads the cache.
pub const NAME_OF_SM80: &str = "sm80_widened";

/// The name of the launch that converts the KV cache to Q's type.
pub const WIDEN_NAME: &str = "widen_cache";

/// Threads of a CTA of the launch that converts the KV cache to Q's type.
pub const NUM_THREADS: u32 = 256;

/// Number of a sequence's keys that one CTA converts.
const KEYS: u32 = 64;

/// Most elements of a key's and of a value's row that `sm90` and `sm100` read.
pub(crate) const NARROW: [u32; 2] = [256, 256];

/// The largest workspace that is used by default.
const MOST_BYTES: u64 = 4 << 30;

abi_spec! {
    /// Compile-time spec of the launch that converts the KV cache to Q's type.
    pub struct WidenSpec {
        /// Type of K and V in memory.
        pub stored: DType,
        /// Type to which elements are converted: Q's type.
        pub dtype: DType,
        /// Elements of a key's row.
        pub head_dim_qk: i32,
        /// Elements of a value's row.
        pub head_dim_v: i32,
        /// Layout of K and V.
        pub kv_layout: KvKind,
        /// Whether V lies in K's rows.
        pub v_in_k: bool,
        /// Whether the cache is converted element by element: its rows are not multiples of 16 FP8 elements, or do not
        /// begin at such.
        pub by_element: bool,
        /// Whether rows have scales of their own.
        pub scaled: bool,
        /// Whether the device has instructions that convert e4m3.
        pub converts_fp8: bool,
    }
}

abi_struct! {
    /// Kernel argument for the KV cache after its conversion to Q's type.
    pub struct WidenedCache {
        /// Converted K, `[batch, seqlen_k, num_heads_kv, head_dim_qk]`.
        pub k: View,
        /// Converted V; not read if V lies in K.
        pub v: View,
        /// `[batch]`, written: keys of each sequence.
        pub seqused_k: DevPtr<i32>,
        /// `[batch + 1]`, written: the first row of each sequence.
        pub cu_seqlens_k: DevPtr<i32>,
        /// Scales of K, one for each row; not read if rows have none.
        pub k_scale: View,
        /// Scales of V, one for each row; not read if rows have none.
        pub v_scale: View,
        /// Number of blocks of keys of the longest sequence.
        pub num_blocks: i32,
        /// Number of adjacent rows that share a scale.
        pub scale_block: i32,
    }
}

/// Offsets of the converted cache's parts in the workspace, after the reading kernel's own part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// Offset of the lengths, i32 `[batch]`.
    pub seqused_k: u64,
    /// Offset of the sequences' first rows, i32 `[batch + 1]`.
    pub cu_seqlens_k: u64,
    /// Offset of converted K in the workspace.
    pub k: u64,
    /// Offset of V in the workspace; if V lies in K, the end of the converted cache.
    pub v: u64,
    /// Bytes of the whole workspace.
    pub bytes: u64,
    /// Which keys are converted.
    converted: Converted,
}

/// Keys of a cache that a launch converts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Converted {
    /// Keys that some query sees, and the rest of the blocks that they lie in.
    Seen,
    /// All keys, for a reading kernel with fixed parts: a part before a window reads one block, although it is hidden
    /// from each row.
    All,
}

impl Places {
    /// Offsets of a problem's converted cache, after the workspace `own` of the kernel that reads it.
    ///
    /// # Errors
    /// A workspace of 2^62 bytes or more.
    pub fn new(problem: &FwdProblem, own: Workspace, converted: Converted) -> Result<Self, String> {
        let lengths = 4 * u64::from(problem.dims.batch);
        let seqused_k = own.bytes.next_multiple_of(256);
        let cu_seqlens_k = seqused_k + lengths;
        let k = (cu_seqlens_k + lengths + 4).next_multiple_of(256);
        let [of_k, of_v] = bytes(problem);
        let fits = |at: Option<u64>| {
            at.filter(|&at| at < 1 << 62).ok_or("the workspace would be 2^62 bytes or more".to_owned())
        };
        let v = fits(k.checked_add(of_k))?.next_multiple_of(256);
        Ok(Self { seqused_k, cu_seqlens_k, k, v, bytes: fits(v.checked_add(of_v))?, converted })
    }

    /// The whole workspace, which begins with `own`, the part of the kernel that reads the converted cache.
    #[must_use]
    pub fn workspace(&self, own: Workspace) -> Workspace {
        Workspace { bytes: self.bytes, ..own }
    }

    /// The kernel argument for the converted cache, where the workspace begins at address `workspace`.
    #[must_use]
    pub fn cache(&self, problem: &FwdProblem, workspace: u64) -> WidenedCache {
        let [k, v] = strides(problem);
        WidenedCache {
            k: View::new(workspace + self.k, k, false),
            v: View::new(workspace + self.v, v, false),
            seqused_k: DevPtr::new(workspace + self.seqused_k),
            cu_seqlens_k: DevPtr::new(workspace + self.cu_seqlens_k),
            k_scale: View::NULL,
            v_scale: View::NULL,
            num_blocks: num_blocks(problem, self.converted).cast_signed(),
            scale_block: 1,
        }
    }
}

impl WidenedCache {
    /// This argument with the scales of the call's rows, where they have some.
    #[must_use]
    pub fn scaled(self, problem: &FwdProblem, args: &FwdArgs<'_>) -> Self {
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
}

/// Whether a problem's converted cache is small enough for a workspace that is used without being asked for.
pub(crate) fn has_room(problem: &FwdProblem) -> bool {
    let places = Places::new(problem, Workspace::NONE, Converted::All);
    wide_problem(NAME, NARROW, problem).is_ok() && places.is_ok_and(|places| places.bytes <= MOST_BYTES)
}

/// Shapes of K and V in the workspace, with a batch axis. Rows are rounded up to 16 bytes, as TMA needs.
fn shapes(problem: &FwdProblem) -> [Shape; 2] {
    let Dims { batch, seqlen_k, num_heads_kv, head_dim_qk, head_dim_v, .. } = problem.dims;
    let k = Shape { batch, seq: seqlen_k, head: num_heads_kv, dim: head_dim_qk.next_multiple_of(8) };
    [k, Shape { dim: head_dim_v.next_multiple_of(8), ..k }]
}

/// The first property of a cache because of which its rows are not whole words of 16 elements.
fn no_whole_words(problem: &FwdProblem) -> Option<String> {
    let Dims { head_dim_qk, head_dim_v, .. } = problem.dims;
    if head_dim_qk % 16 != 0 || head_dim_v % 16 != 0 {
        return Some(format!(
            "head_dim_qk {head_dim_qk} and head_dim_v {head_dim_v}: both are not whole words of 16"
        ));
    }
    let whole = 16 / problem.stored_k().size_bytes() as i64;
    let odd = |(name, strides): (&str, Strides)| {
        [("batch", strides.batch), ("seq", strides.seq), ("head", strides.head)]
            .into_iter()
            .find(|&(_, stride)| stride % whole != 0)
            .map(|(axis, stride)| format!("{name}.{axis} stride {stride} is not a multiple of {whole}"))
    };
    [("k", problem.strides.k), ("v", problem.strides.v)].into_iter().find_map(odd)
}

/// Whether a cache is converted element by element: an FP8 cache whose rows are not whole words of 16 elements.
#[must_use]
pub fn is_by_element(problem: &FwdProblem) -> bool {
    problem.cache.dtype.is_some() && no_whole_words(problem).is_some()
}

fn strides(problem: &FwdProblem) -> [Strides; 2] {
    shapes(problem).map(Strides::bshd)
}

/// Bytes of K and of V in the workspace.
fn bytes(problem: &FwdProblem) -> [u64; 2] {
    let [k, v] = shapes(problem).map(|shape| {
        let rows = u64::from(shape.batch) * u64::from(shape.seq);
        rows.saturating_mul(u64::from(shape.head) * u64::from(shape.dim)).saturating_mul(2)
    });
    [k, if leaves_v_in_k(problem) { 0 } else { v }]
}

/// Whether V lies in the converted K's rows too: not if both have descales, since V's may differ from K's.
fn leaves_v_in_k(problem: &FwdProblem) -> bool {
    problem.cache.v_in_k && problem.scales.descale_v == Descale::None
}

/// The problem that the kernel of 16-bit caches computes on the converted cache. With packed queries keys are packed
/// too, with room for the longest length in each sequence. `most`: largest row of K, and of V, that the kernel reads.
///
/// # Errors
/// In `kernel`'s name, the first fact that the launch which widens does not take.
pub fn wide_problem(
    kernel: &'static str,
    most: [u32; 2],
    problem: &FwdProblem,
) -> Result<FwdProblem, Refusal> {
    let refuse = |reason: String| Err(Refusal::new(kernel, reason));
    let own = match problem.layout.q {
        QLayout::Batch => KvLayout::Strided,
        QLayout::Packed => KvLayout::Packed,
    };
    let stored = problem.stored_k();
    match problem.cache.dtype {
        Some(DType::E4m3Fn | DType::E5m2) => {}
        Some(cache) => return refuse(format!("dtype_cache {cache} is not one of the 2 OCP types")),
        None if !matches!(stored, DType::F16 | DType::Bf16) || problem.dtypes.v != stored => {
            return refuse(format!(
                "dtype_qk {stored} with dtype_v {} is not one 16-bit type",
                problem.dtypes.v
            ));
        }
        None if problem.layout.kv == own => {
            return refuse(format!("dtype_qk {stored}: its rows lie as they are read"));
        }
        None => {}
    }
    let field = if problem.cache.dtype.is_some() { "dtype_cache" } else { "dtype_qk" };
    if problem.layout.v == VLayout::ColMajor {
        return refuse(format!("{field} {stored} with v_layout col-major: a cache is read along its rows"));
    }
    let Dims { batch, seqlen_k, head_dim_qk, head_dim_v, .. } = problem.dims;
    let [most_qk, most_v] = most;
    if head_dim_qk > most_qk || head_dim_v > most_v {
        return refuse(format!(
            "head_dim_qk {head_dim_qk} with head_dim_v {head_dim_v}: larger than {most_qk} with {most_v}"
        ));
    }
    if let (Some(why), None) = (no_whole_words(problem), problem.cache.dtype) {
        return refuse(format!("{field} {stored} with {why}"));
    }
    if u64::from(batch) * u64::from(seqlen_k) > u64::from(MAX_SEQLEN) {
        return refuse(format!("batch {batch} times seqlen_k {seqlen_k} is larger than {MAX_SEQLEN}"));
    }
    let mut wide = problem.over_wide_cache().unwrap_or_else(|| problem.clone());
    wide.layout.seqused_k = problem.layout.seqused_k || problem.layout.kv == KvLayout::Packed;
    wide.layout.kv = own;
    [wide.strides.k, wide.strides.v] = strides(problem);
    // An earlier launch appends new keys to the unconverted cache.
    wide.cache.append = None;
    wide.cache.v_in_k = leaves_v_in_k(problem);
    if wide.cache.v_in_k {
        wide.strides.v = wide.strides.k;
    }
    Ok(wide)
}

/// Most keys that a block of the reading kernel may have before or after those that its sequence sees.
const MOST_OF_BLOCK: u32 = 256;

/// Number of CTAs per sequence for the conversion: they convert the keys that the longest sequence's queries see,
/// and the rest of the reader's first and last block; or all of them.
fn num_blocks(problem: &FwdProblem, converted: Converted) -> u32 {
    let Dims { seqlen_q, seqlen_k, .. } = problem.dims;
    let whole = seqlen_k.div_ceil(KEYS).max(1);
    if problem.mask.sink_columns > 0 || converted == Converted::All {
        return whole;
    }
    let first = problem.mask.band(seqlen_q, seqlen_k).k_range(0..seqlen_q, seqlen_k).start;
    whole.min((seqlen_k - first.min(seqlen_k)).div_ceil(KEYS) + 2 * MOST_OF_BLOCK.div_ceil(KEYS) + 1)
}

/// Bytes that an H200 reads or writes in a microsecond, at best.
const BYTES_A_MICRO: f64 = 3.9e6;
/// Operations per microsecond of the kernel of 16-bit caches, within a long loop over keys.
const FLOPS_A_MICRO: f64 = 6.5e8;
/// Microseconds of a launch.
const LAUNCH_MICROS: f64 = 4.0;
/// Additional microseconds of a second kernel with much code, which must be loaded from memory: one token over 193
/// keys of D 256 in pages of 64 took 30 us with conversion first and 20 us directly.
const COLD_MICROS: f64 = 8.0;
/// Nanoseconds in which a multiprocessor reads a key's 256 elements and multiplies 64 rows with them in `sm80`; the
/// next constant is for FP8, which is converted too. Measured in chunked prefill: 12.7 to 17.5, and 17.7 to 30.
const DIRECT_NANOS: f64 = 12.0;
const DIRECT_NANOS_FP8: f64 = 20.0;

/// Modelled microseconds of a call in two ways: converting the cache once in the workspace, or reading it in place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Cost of converting the cache to the workspace and reading it there in 16 bits.
    pub staged: f64,
    /// Cost of reading the cache in place, and converting it in each tile of rows.
    pub direct: f64,
}

impl Costs {
    /// Costs of a problem at its largest lengths, on a device of `num_sms` multiprocessors. The kernel that reads
    /// the cache in place has tiles of `direct_rows` rows, and splits the keys if `splits` is true.
    #[must_use]
    pub fn new(problem: &FwdProblem, num_sms: u32, direct_rows: u32, splits: bool) -> Self {
        let Dims { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v } =
            problem.dims;
        let elems = f64::from(head_dim_qk + head_dim_v);
        let cache =
            f64::from(batch) * f64::from(num_heads_kv) * f64::from(crate::split::seen_keys(problem)) * elems;
        let heads = f64::from(batch) * f64::from(num_heads_q);
        let pairs = heads * visible_pairs(problem.mask, seqlen_q, seqlen_k) as f64;
        let products = 2.0 * elems * pairs / FLOPS_A_MICRO;
        let stored = problem.stored_k();
        let (bytes, wide_bytes) = (stored.size_bytes() as f64 * cache, 2.0 * cache);
        let staged = (bytes + wide_bytes) / BYTES_A_MICRO
            + products.max(wide_bytes / BYTES_A_MICRO)
            + 2.0 * LAUNCH_MICROS
            + COLD_MICROS;
        // Rows in multiples of 64 of the group's heads, times the keys that a row in the middle sees.
        let rows = u64::from(seqlen_q) * u64::from(problem.gqa_ratio());
        let tiles =
            |of: u32| rows.div_ceil(of.max(1).into()) as f64 * f64::from(batch) * f64::from(num_heads_kv);
        let keys = pairs / (heads * f64::from(seqlen_q)).max(1.0);
        let nanos = if stored.is_fp8() { DIRECT_NANOS_FP8 } else { DIRECT_NANOS };
        let block = nanos * 1e-3 * elems / 256.0 * keys;
        let at_once = if splits { f64::from(num_sms) } else { tiles(direct_rows).min(num_sms.into()) };
        let direct = (tiles(64) * block / at_once.max(1.0)).max(bytes / BYTES_A_MICRO) + LAUNCH_MICROS;
        Self { staged, direct }
    }
}

/// The launch that converts the cache to the workspace. Its arguments are the call's `FwdParams` and [`WidenedCache`].
#[must_use]
pub fn widen(spec: &WidenSpec) -> KernelSource {
    let constants: [(&str, &dyn Literal); 1] = [("kSpec", spec)];
    let entry = Entry {
        include: "fmha/common/widen_cache.cuh",
        constants: &constants,
        bounds: &format!("__launch_bounds__({NUM_THREADS})"),
        params: "const __grid_constant__ FwdParams p, const __grid_constant__ WidenedCache to",
        call: &format!("cache::Widen<kSpec, {KEYS}, {NUM_THREADS}>{{p, to}}.run();"),
    };
    crate::source(entry.render(), || [header()])
}

/// `fmha/widened_cache.h`: the types that this file shares with the device.
fn header() -> Header {
    let definitions =
        [c_constant("kMostOfBlock", MOST_OF_BLOCK), WidenSpec::c_definition(), WidenedCache::c_definition()];
    Header::shared("fmha/widened_cache.h", "fmha", &["fmha/params.h", "fmha/spec.h"], &definitions)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use fmha_core::MaskSpec;

    use super::*;

    fn cached(batch: u32, seqlen_q: u32, seqlen_k: u32, heads: (u32, u32)) -> FwdProblem {
        let dims = Dims::batch(batch).seqlens(seqlen_q, seqlen_k).heads(heads.0, heads.1).head_dim(128);
        let mut problem = FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL);
        problem.cache.dtype = Some(DType::E4m3Fn);
        problem
    }

    fn paged(mut problem: FwdProblem) -> FwdProblem {
        problem.cache.dtype = None;
        problem.layout.kv = KvLayout::Paged { page_size: 16 };
        problem
    }

    #[test]
    fn many_queries_have_their_cache_brought_once_and_few_read_it_as_it_lies() {
        for (problem, rows, splits, staged) in [
            (cached(1, 512, 65536, (8, 1)), 128, false, true),
            (cached(1, 2048, 2048, (32, 8)), 128, false, true),
            (cached(16, 64, 4096, (32, 8)), 128, false, true),
            (cached(16, 1, 32768, (32, 8)), 16, true, false),
            (cached(16, 16, 32768, (32, 8)), 64, true, false),
            (paged(cached(1, 512, 65536, (8, 1))), 128, false, true),
            (paged(cached(1, 512, 65536, (64, 8))), 128, false, true),
            (paged(cached(1, 2048, 2048, (32, 8))), 128, false, true),
            (paged(cached(16, 1, 32768, (32, 8))), 16, true, false),
            (paged(cached(1, 16, 65536, (8, 1))), 64, true, false),
        ] {
            let costs = Costs::new(&problem, 132, rows, splits);
            assert_eq!(costs.staged < costs.direct, staged, "{:?}: {costs:?}", problem.dims);
        }
    }

    #[test]
    fn the_widened_cache_lies_behind_the_reader_s_workspace_and_is_valid() {
        for (q, kv) in [
            (QLayout::Batch, KvLayout::Strided),
            (QLayout::Packed, KvLayout::Paged { page_size: 16 }),
            (QLayout::Packed, KvLayout::Packed),
        ] {
            let of = cached(3, 40, 100, (4, 2));
            let mut problem = FwdProblem::new(q, kv, DType::Bf16, of.dims);
            problem.cache.dtype = of.cache.dtype;
            let wide = wide_problem(NAME, NARROW, &problem).unwrap();
            if matches!(kv, KvLayout::Paged { .. }) {
                assert_eq!(wide_problem(NAME, NARROW, &paged(problem.clone())).unwrap(), wide);
            }
            assert_eq!(wide.layout.kv == KvLayout::Packed, q == QLayout::Packed);
            assert_eq!(wide.layout.seqused_k, kv == KvLayout::Packed);
            assert!(wide.cache.dtype.is_none() && wide.validate().is_ok());
            let own = Workspace { bytes: 1000, zeroed_bytes: 4 };
            let places = Places::new(&problem, own, Converted::Seen).unwrap();
            assert!(places.seqused_k >= own.bytes && places.cu_seqlens_k >= places.seqused_k + 3 * 4);
            assert!(places.k >= places.cu_seqlens_k + 4 * 4);
            let bytes = 3 * 100 * 2 * 128 * 2;
            assert!(places.v >= places.k + bytes && places.bytes >= places.v + bytes);
        }
    }

    #[test]
    fn what_is_not_taken_is_named_with_its_number() {
        let refused = |change: fn(&mut FwdProblem)| {
            let mut problem = cached(1, 512, 4096, (4, 1));
            change(&mut problem);
            wide_problem(NAME, NARROW, &problem).unwrap_err().to_string()
        };
        assert!(
            refused(|problem| problem.cache.dtype = None).contains("dtype_qk bf16: its rows lie as they are")
        );
        let pages_of_f32 = refused(|problem| {
            *problem = paged(problem.clone());
            (problem.dtypes.qk, problem.dtypes.v) = (DType::F32, DType::F32);
        });
        assert!(pages_of_f32.contains("dtype_qk f32 with dtype_v f32"), "{pages_of_f32}");
        assert!(refused(|problem| problem.cache.dtype = Some(DType::E4m3Fnuz)).contains("e4m3fnuz"));
        assert!(refused(|problem| problem.dims.head_dim_v = 320).contains("head_dim_v 320: larger than 256"));
        let of_pages = |change: fn(&mut FwdProblem)| {
            let mut problem = paged(cached(1, 512, 4096, (4, 1)));
            change(&mut problem);
            wide_problem(NAME, NARROW, &problem).unwrap_err().to_string()
        };
        assert!(of_pages(|problem| problem.dims.head_dim_qk = 72).contains("head_dim_qk 72"));
        assert!(of_pages(|problem| problem.strides.k.seq = 516).contains("k.seq stride 516"));
        let by_element = |change: fn(&mut FwdProblem)| {
            let mut problem = cached(1, 512, 4096, (4, 1));
            change(&mut problem);
            is_by_element(&problem) && wide_problem(NAME, NARROW, &problem).is_ok()
        };
        assert!(by_element(|problem| problem.dims.head_dim_qk = 72));
        assert!(by_element(|problem| problem.strides.k.seq = 520));
        assert!(!by_element(|_| ()));
        assert!(
            refused(|problem| problem.dims.batch = 1 << 20).contains("batch 1048576 times seqlen_k 4096")
        );
    }
}
