//! The Blackwell backward kernel: its tile, its entry.
//!
//! A CTA sums dK and dV of 128 keys in tensor memory and adds to dQ in global memory (`fmha/sm100/bwd/main.cuh`).
//! If the head dimensions leave no room for both sums, a CTA computes one of them. The launches before and after
//! are those of [`sm80_bwd`] and [`simt`](crate::rows), which run on every architecture.

pub mod recipe;
pub mod units;

use fmha_core::abi::AbiLiteral as _;
use fmha_core::fields::{Fields as _, Takes};
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::BwdSpec;
use fmha_core::{BwdProblem, FwdProblem, KvLayout, Refusal, VLayout, abi_spec};

use crate::sm80_bwd::{self, FINISH_THREADS};
pub use crate::sm100::{MAX_SMEM_BYTES, NAME};
use crate::{round_up, sm90_bwd, tile_list};

/// The header that the entries include.
pub const HEADER: &str = "fmha/sm100/bwd/main.cuh";

/// Device header of the kernel under masks as data (tensors).
const MASKED_HEADER: &str = "fmha/sm100/bwd/masked.cuh";

/// Number of keys of a CTA.
pub const BLOCK: u32 = 128;

/// Number of columns of tensor memory.
const COLUMNS: i32 = 512;

/// Number of threads of a CTA.
pub const THREADS: u32 = 512;

abi_spec! {
    /// Tile of the kernel: how it computes.
    pub struct Sm100BwdTile {
        /// Number of blocks of Q in shared memory: the next block's scores start before this block's dK has read Q.
        pub stages_q: i32 = Takes::within(2, 3),
        /// Number of blocks of dO in shared memory.
        pub stages_dout: i32 = Takes::within(1, 3),
        /// Whether scores are soft-capped with one exponential and one reciprocal, for caps of 1e-3 to 64;
        /// otherwise to f32's accuracy.
        pub fast_softcap: bool,
        /// Whether dK and dV are stored 16 bytes at a time: their rows are then multiples of 16 bytes and begin at
        /// such addresses.
        pub vector_store: bool,
    }
}

/// A head dimension padded to the tiles in shared memory.
const fn tile_dim(dim: i32) -> i32 {
    round_up(dim, 64)
}

/// A head dimension padded to the products' step.
const fn product_dim(dim: i32) -> i32 {
    round_up(dim, 32)
}

/// Queries of a block: fewer for a head dimension of Q above 128, since its sums leave less room for S and dP.
#[must_use]
pub const fn queries(head_dim_qk: i32) -> i32 {
    if is_wide(head_dim_qk) { 64 } else { BLOCK as i32 }
}

/// Whether dQ is computed transposed, in two products.
const fn is_wide(head_dim_qk: i32) -> bool {
    head_dim_qk > BLOCK as i32
}

/// Whether a block of keys is processed by two CTAs: one for dK and dQ, one for dV.
#[must_use]
pub const fn in_two(head_dim_qk: i32, head_dim_v: i32) -> bool {
    let sums = product_dim(head_dim_qk) + product_dim(head_dim_v);
    is_wide(head_dim_qk) && 2 * queries(head_dim_qk) + sums > COLUMNS
}

/// Whether V is an operand in tensor memory instead of shared memory: two elements per column, besides S, dP and
/// the sums.
const fn v_in_tmem(head_dim_qk: i32, head_dim_v: i32) -> bool {
    let (qk, v) = (product_dim(head_dim_qk), product_dim(head_dim_v));
    let of_dv = if in_two(head_dim_qk, head_dim_v) { 0 } else { v };
    is_wide(head_dim_qk) && 2 * queries(head_dim_qk) + qk + of_dv + v / 2 <= COLUMNS
}

impl Sm100BwdTile {
    /// Dynamic shared memory of a CTA; the entry asserts that the device agrees.
    #[must_use]
    pub const fn smem_bytes(&self, spec: &BwdSpec) -> i32 {
        let (keys, dims) = (BLOCK as i32, [spec.fwd.head_dim_qk, spec.fwd.head_dim_v]);
        let (queries, [qk, v]) = (queries(dims[0]), [2 * tile_dim(dims[0]), 2 * tile_dim(dims[1])]);
        let of_keys = keys * if v_in_tmem(dims[0], dims[1]) { qk } else { qk + v };
        let tiles = of_keys + queries * (self.stages_q * qk + self.stages_dout * v + 2 * keys);
        let stats = self.stages_q * 3 * 4 * queries;
        let barriers = 8 * (12 + 2 * (self.stages_q + self.stages_dout));
        // These words are the address of tensor memory, and flags of rows with a NaN or an infinity.
        let words = 4 * (1 + 8);
        tiles + round_up(stats + barriers + words, 1024)
    }

    /// Sets one field from its name and value.
    ///
    /// # Errors
    /// A text that names the field, the value and what the field takes.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        self.set_field(name, value).map_err(|text| format!("tile {text}"))
    }
}

/// Number of columns of the sums of dQ.
#[must_use]
pub fn dq_dim(spec: &BwdSpec) -> u32 {
    product_dim(spec.fwd.head_dim_qk).unsigned_abs()
}

/// Checks that the kernel computes this problem. A problem has no addresses; these must be multiples of 16.
///
/// # Errors
/// The first fact that the kernel does not support.
pub fn accepts(problem: &BwdProblem) -> Result<(), Refusal> {
    sm90_bwd::takes(problem, NAME)?;
    if tile_list::serve(&problem.fwd) || !problem.fwd.code.is_empty() {
        sm90_bwd::takes_masks_and_code(problem, NAME)?;
    }
    let refuse = |reason: String| Err(Refusal::new(NAME, reason));
    let FwdProblem { layout, dims, .. } = &problem.fwd;
    if (layout.v, layout.kv) == (VLayout::ColMajor, KvLayout::Packed) {
        return refuse(
            "backward: v_layout col-major of packed keys, which begin between the multiples of 8 that TMA takes"
                .to_owned(),
        );
    }
    let (qk, v) = (dims.head_dim_qk, dims.head_dim_v);
    let columns = qk.next_multiple_of(32) + v.next_multiple_of(32);
    if !is_wide(qk.cast_signed()) && columns > 256 {
        return refuse(format!(
            "backward: head_dim_qk {qk} with head_dim_v {v}: dK and dV take {columns} columns of tensor memory, of 256"
        ));
    }
    Ok(())
}

/// The tile for a problem that the kernel [`accepts`].
#[must_use]
pub fn choose_tile(problem: &BwdProblem, spec: &BwdSpec) -> Sm100BwdTile {
    let (fwd, dims) = (&problem.fwd, problem.fwd.dims);
    let elems = 16 / problem.dtype_grad.size_bytes();
    let whole = |strides, shape| sm90_bwd::odd_stride(strides, shape).is_none();
    let mut tile = default_tile(spec);
    tile.fast_softcap = fwd.score.softcap.is_some_and(|cap| (1e-3..=64.0).contains(&cap));
    // Strides must be multiples of eight elements, which is stricter than f32 needs.
    tile.vector_store = u64::from(dims.head_dim_qk).is_multiple_of(elems)
        && u64::from(dims.head_dim_v).is_multiple_of(elems)
        && whole(problem.dk, fwd.shape_k())
        && whole(problem.dv, fwd.shape_v());
    tile
}

/// The tile for long sequences of a spec: two blocks of Q, since the next one's scores are started before
/// this one's dK; a second of dO where shared memory has room.
#[must_use]
pub fn default_tile(spec: &BwdSpec) -> Sm100BwdTile {
    let one = Sm100BwdTile { stages_q: 2, stages_dout: 1, fast_softcap: true, vector_store: true };
    let two = Sm100BwdTile { stages_dout: 2, ..one };
    if two.smem_bytes(spec) <= MAX_SMEM_BYTES { two } else { one }
}

/// Number of CTAs of the main launch: one or two for each block of keys; `None` if 2^31 or more.
#[must_use]
pub fn grid(problem: &BwdProblem) -> Option<u32> {
    let dims = problem.fwd.dims;
    let parts = 1 + u32::from(in_two(dims.head_dim_qk.cast_signed(), dims.head_dim_v.cast_signed()));
    let ctas = sm80_bwd::ctas_of([dims.batch, dims.num_heads_kv], dims.seqlen_k.div_ceil(BLOCK).into())?;
    ctas.checked_mul(parts).filter(|&ctas| i32::try_from(ctas).is_ok())
}

/// Number of CTAs of the launch that finishes dQ: one for each block of queries; `None` if 2^31 or more.
#[must_use]
pub fn finish_grid(problem: &BwdProblem) -> Option<u32> {
    let dims = problem.fwd.dims;
    let queries = queries(dims.head_dim_qk.cast_signed()).unsigned_abs();
    sm80_bwd::ctas_of([dims.batch, dims.num_heads_q], dims.seqlen_q.div_ceil(queries).into())
}

/// The main launch: [`BwdParams`](fmha_core::abi::BwdParams), and the maps of Q, K, V and dO.
#[must_use]
pub fn main(spec: &BwdSpec, tile: &Sm100BwdTile) -> KernelSource {
    let call = format!("{}sm100::bwd::main<kSpec, kTile>(p, maps);", assert_smem(spec, tile));
    let params = "const __grid_constant__ BwdParams p, const __grid_constant__ sm100::bwd::Maps maps";
    entry(&[("kSpec", spec), ("kTile", tile)], &format!("__launch_bounds__({THREADS}, 1)"), params, &call)
}

/// The main launch under masks as data, with `has_function` also under a mask as code. It has the arguments
/// [`MaskDataParams`](fmha_core::masks::MaskDataParams) and [`TileList`](tile_list::TileList) after the others.
#[must_use]
pub fn masked_main(spec: &BwdSpec, tile: &Sm100BwdTile, has_function: bool) -> KernelSource {
    let entry = Entry {
        include: MASKED_HEADER,
        constants: &[("kSpec", spec), ("kTile", tile)],
        bounds: &format!("__launch_bounds__({THREADS}, 1)"),
        params: &format!(
            "const __grid_constant__ BwdParams p, const __grid_constant__ sm100::bwd::Maps maps{}",
            tile_list::PARAMS
        ),
        call: &format!(
            "{}sm100::bwd::masked_main<kSpec, kTile, {has_function}>(p, maps, masks, list);",
            assert_smem(spec, tile)
        ),
    };
    crate::source(entry.render(), masked_headers)
}

/// The launch that computes the statistics of query rows under masks as data, one row a warp. Its arguments are
/// [`BwdParams`](fmha_core::abi::BwdParams) and [`MaskDataParams`](fmha_core::masks::MaskDataParams).
#[must_use]
pub fn masked_stats(spec: &BwdSpec, has_function: bool) -> KernelSource {
    masked_rows("masked_stats", STATS_THREADS, spec, has_function)
}

/// The launch that finishes dQ under masks as data, with the arguments of [`masked_stats`] and the grid of
/// [`finish_dq`].
#[must_use]
pub fn masked_finish_dq(spec: &BwdSpec, has_function: bool) -> KernelSource {
    masked_rows("masked_finish_dq", FINISH_THREADS, spec, has_function)
}

/// Threads of a CTA of [`masked_stats`].
pub const STATS_THREADS: u32 = 128;

fn masked_rows(name: &str, threads: u32, spec: &BwdSpec, has_function: bool) -> KernelSource {
    let entry = Entry {
        include: MASKED_HEADER,
        constants: &[("kSpec", spec)],
        bounds: &format!("__launch_bounds__({threads})"),
        params: "const __grid_constant__ BwdParams p, const __grid_constant__ MaskDataParams masks",
        call: &format!("sm100::bwd::{name}<kSpec, {has_function}>(p, masks);"),
    };
    crate::source(entry.render(), masked_headers)
}

fn masked_headers() -> [Header; 3] {
    [host_header(), fmha_core::masks::header(), tile_list::header()]
}

/// An entry's assertion that the device agrees on shared memory.
fn assert_smem(spec: &BwdSpec, tile: &Sm100BwdTile) -> String {
    let bytes = tile.smem_bytes(spec);
    let parts = match in_two(spec.fwd.head_dim_qk, spec.fwd.head_dim_v) {
        true => "DkDq",
        false => "All",
    };
    format!(
        "using sm100::bwd::Part; static_assert(sizeof(sm100::bwd::Smem<kSpec, kTile, Part::{parts}>) == {bytes} && \
         sizeof(sm100::bwd::Smem<kSpec, kTile, Part::Dv>) <= {bytes}, \"Smem: host and device disagree\"); "
    )
}

/// The launch that finishes dQ, with one CTA for each block of queries of a head. Its argument is
/// [`BwdParams`](fmha_core::abi::BwdParams).
#[must_use]
pub fn finish_dq(spec: &BwdSpec) -> KernelSource {
    let call = "sm100::bwd::finish_dq<kSpec>(p);";
    let bounds = format!("__launch_bounds__({FINISH_THREADS})");
    entry(&[("kSpec", spec)], &bounds, "const __grid_constant__ BwdParams p", call)
}

fn entry(constants: &[(&str, &dyn Literal)], bounds: &str, params: &str, call: &str) -> KernelSource {
    let entry = Entry { include: HEADER, constants, bounds, params, call };
    crate::source(entry.render(), || [host_header()])
}

/// `fmha/sm100_bwd_host.h`: the types that this file shares with the device.
fn host_header() -> Header {
    let definitions = [Sm100BwdTile::c_definition()];
    Header::shared("fmha/sm100_bwd_host.h", "fmha", &["fmha/params.h", "fmha/spec.h"], &definitions)
}
