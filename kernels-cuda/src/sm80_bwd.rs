//! The backward kernels of every NVIDIA GPU from sm_80 on: their tiles, their entries.
//!
//! One launch sums dQ, one (or, of wide head dimensions, two) dK and dV, and each CTA sums the gradients of its own
//! rows alone (`fmha/sm80/bwd/config.cuh`): no sum is in global memory, and every sum has a fixed order.

pub mod recipe;

use fmha_core::abi::AbiLiteral as _;
use fmha_core::fields::{Fields as _, Takes};
use fmha_core::memory::Size;
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::{BiasKind, BwdSpec, CodeKind};
use fmha_core::tune::Candidates;
use fmha_core::work::visible_pairs;
use fmha_core::{
    Bias, BwdProblem, DType, Refusal, Shape, Strides, VLayout, abi_enum, abi_functions, abi_memory, abi_spec,
};

use crate::sm80::{self, NAME, Room, padded_dim};
use crate::within;

/// The header that the entries include.
pub const HEADER: &str = "fmha/sm80/bwd/main.cuh";

/// Threads of a CTA that sums a head's dSink.
pub const DSINK_THREADS: u32 = 256;

/// Threads of a CTA that finishes a block of dQ.
pub const FINISH_THREADS: u32 = 128;

/// Gradients that a launch sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BwdSums {
    /// dQ of a block of queries.
    Dq,
    /// dK and dV of a block of keys.
    DkDv,
    /// The launch computes only dK.
    Dk,
    /// The launch computes only dV.
    Dv,
    /// dBias of a block of queries by a block of keys.
    DBias,
    /// Gradients of captured tensors, of a block of queries.
    Captured,
    /// dK and dV of a block of keys; the launch also adds to dQ in memory.
    All,
}

abi_enum!(BwdSums { Dq, DkDv, Dk, Dv, DBias, Captured, All });

impl BwdSums {
    /// The launch's name in plans.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dq => "sm80_dq",
            Self::DkDv => "sm80_dkdv",
            Self::Dk => "sm80_dk",
            Self::Dv => "sm80_dv",
            Self::DBias => "sm80_dbias",
            Self::Captured => "sm80_captured",
            Self::All => "sm80_all",
        }
    }
}

abi_spec! {
    /// Tile of a launch: the choices with which it computes a problem.
    pub struct Sm80BwdTile {
        /// Rows of a CTA (queries or keys) whose gradients it sums: 16 per warp.
        pub rows: i32 = Takes::among(&[16, 32, 64, 128]),
        /// Rows of the other side in a block.
        pub columns: i32 = Takes::multiples(16, 16, 128),
        /// Number of warps of a CTA.
        pub warps: i32 = Takes::nothing(),
        /// Number of blocks in shared memory at a time.
        pub stages: i32 = Takes::within(1, 4),
        /// Number of CTAs that a multiprocessor should hold, which limits a thread's registers.
        pub ctas: i32 = Takes::within(1, 8),
        /// Number of fragments that a warp reads from shared memory ahead of the products that use them.
        pub fragments_ahead: i32 = Takes::within(0, 4),
        /// Bytes of a copy, which must divide every stride and address of Q, K, V and dO; 2: by elements.
        pub copy_bytes: i32 = Takes::among(&[2, 4, 8, 16]),
        /// Whether scores are soft-capped with one exponential and one reciprocal, for caps of 1e-3 to 64; otherwise to
        /// f32's accuracy.
        pub fast_softcap: bool,
        /// Whether 16-bit gradients are stored 16 bytes at a time, which needs rows that are multiples of 16 bytes
        /// and begin at such addresses.
        pub vector_store: bool,
        /// Whether dQ is summed in global memory, in arbitrary order, in the launch of dK and dV; otherwise a
        /// separate launch sums it.
        pub one_pass: bool = Takes::all(),
        /// Gradients that the launch sums.
        pub sums: BwdSums = Takes::nothing(),
    }
}

abi_functions! {
    fn tile_text() of tile: Sm80BwdTile {
        /// Threads of a CTA.
        pub const fn num_threads(&self) -> i32 {
            32 * self.warps
        }

        /// Whether a CTA owns queries; otherwise it owns keys.
        const fn owns_queries(&self) -> bool {
            matches!(self.sums, BwdSums::Dq | BwdSums::DBias | BwdSums::Captured)
        }

        /// Whether a CTA of keys adds to dQ in memory.
        const fn adds_dq(&self) -> bool {
            matches!(self.sums, BwdSums::All)
        }

        /// Whether the launch computes dS: not if it sums only dV.
        const fn makes_ds(&self) -> bool {
            !matches!(self.sums, BwdSums::Dv)
        }
    }
}

abi_memory! {
    fn memory_text() as SmemParts;
    /// Dynamic shared memory of a CTA; the entry asserts that the device agrees.
    pub const fn smem_bytes(&self, spec: &BwdSpec) of tile: Sm80BwdTile {
        /// The CTA's own rows of V or dO.
        own_value: "ValueTile<spec, tile.rows>" if self.makes_ds() => tile_size(self.rows, spec.fwd.head_dim_v);
        /// dS of a block, as keys by queries.
        ds: "SmemTile<uint16_t, tile.rows, tile.columns>" if self.adds_dq() => tile_size(self.rows, self.columns);
        /// LSE and delta of the queries of a block that the loop visits.
        stats: "QueryStats<tile.columns>" [self.stages] if !self.owns_queries() => Size::of(12 * self.columns, 16);
        /// The CTA's own rows of Q or K.
        own_score: "ScoreTile<spec, tile.rows>" => tile_size(self.rows, spec.fwd.head_dim_qk);
        /// Walked blocks of K or Q.
        score: "ScoreTile<spec, tile.columns>" [self.stages] => tile_size(self.columns, spec.fwd.head_dim_qk);
        /// Walked blocks of V or dO.
        value: "ValueTile<spec, tile.columns>" [self.stages] => tile_size(self.columns, spec.fwd.head_dim_v);
    }
}

impl Sm80BwdTile {
    /// Sets one field from its name and value.
    ///
    /// # Errors
    /// A text that names the field, the value and what the field takes.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        self.set_field(name, value).map_err(|text| format!("tile {text}"))?;
        self.warps = self.rows / 16;
        Ok(())
    }

    /// Checks that the tile's copies support a problem's strides.
    ///
    /// # Errors
    /// A text that names the tile's field and the stride.
    pub fn check_loads(&self, problem: &BwdProblem) -> Result<(), String> {
        let bytes = self.copy_bytes;
        match odd_stride(problem, bytes) {
            Some((name, axis, stride)) => {
                Err(format!("tile copy_bytes={bytes}: {name}.{axis} stride {stride} is not whole copies"))
            }
            None => Ok(()),
        }
    }
}

impl Sm80BwdTile {
    /// Checks that each warp can have whole products of a block's dQ: sixteen queries, and a power of two or all of the
    /// columns.
    ///
    /// # Errors
    /// A text that names the fields and numbers that do not go together.
    pub fn check_one_pass(&self, spec: &BwdSpec) -> Result<(), String> {
        let (groups, dim) = (self.columns / 16, padded_dim(spec.fwd.head_dim_qk));
        let parts = self.warps / groups.max(1);
        let whole = parts > 0 && self.warps % groups == 0 && dim % (16 * parts) == 0;
        if self.sums != BwdSums::All || (whole && (parts == 1 || dim.unsigned_abs().is_power_of_two())) {
            return Ok(());
        }
        Err(format!(
            "tile one_pass=1 with columns={}, {} warps and head_dim_qk {}: a warp has 16 queries and whole columns of dQ",
            self.columns, self.warps, spec.fwd.head_dim_qk
        ))
    }
}

/// Checks that one launch can sum dQ together with dK and dV: modifiers of scores, and wide rows, leave too few
/// registers.
///
/// # Errors
/// A text with the field and its number.
pub fn takes_one_pass(spec: &BwdSpec) -> Result<(), String> {
    let fwd = &spec.fwd;
    for (field, dim) in [("head_dim_qk", fwd.head_dim_qk), ("head_dim_v", fwd.head_dim_v)] {
        if padded_dim(dim) > 128 {
            return Err(format!("one_pass=1: {field} {dim} is larger than 128"));
        }
    }
    let dim = padded_dim(fwd.head_dim_qk);
    if dim < 32 || !dim.unsigned_abs().is_power_of_two() {
        return Err(format!(
            "one_pass=1: head_dim_qk {} is not 32, 64 or 128 in whole sixteens",
            fwd.head_dim_qk
        ));
    }
    if fwd.softcap || fwd.bias != BiasKind::None || fwd.dropout || fwd.code != CodeKind::None {
        return Err("one_pass=1: 1 of soft-cap, bias, code and dropout modifies the scores".to_owned());
    }
    Ok(())
}

/// Constants of the model: operations per microsecond of one multiprocessor in two passes and in one, and
/// microseconds per megabyte of dQ's sums in one pass (cleared, added to, read again). Fitted to an H200's rows in
/// docs/measured/sm80-h200.md; other devices are assumed to have equal ratios.
struct Rates {
    two_passes: f64,
    one_pass: f64,
    micros_a_mb: f64,
}
const fn rates(widest: i32) -> Rates {
    if widest <= 64 {
        Rates { two_passes: 177e6 / 132.0, one_pass: 228e6 / 132.0, micros_a_mb: 2.0 }
    } else {
        Rates { two_passes: 206e6 / 132.0, one_pass: 250e6 / 132.0, micros_a_mb: 2.0 }
    }
}

/// Smallest modelled gain for which one pass is chosen: the model's own error.
pub const LEAST_GAIN_OF_ONE_PASS: f64 = 0.03;

/// The two ways to sum dQ (in one pass or two) with their modelled microseconds; only two passes if one pass is
/// impossible.
#[must_use]
pub fn ways_of_dq(problem: &BwdProblem, spec: &BwdSpec, num_sms: u32) -> Candidates<bool> {
    let dims = problem.fwd.dims;
    let widest = padded_dim(dims.head_dim_qk as i32).max(padded_dim(dims.head_dim_v as i32));
    let heads = f64::from(dims.batch) * f64::from(dims.num_heads_q);
    let pairs = visible_pairs(problem.fwd.mask, dims.seqlen_q, dims.seqlen_k) as f64 * heads;
    let flops = 2.0 * pairs * f64::from(3 * dims.head_dim_qk + 2 * dims.head_dim_v);
    let sum_bytes = 4.0 * heads * f64::from(dims.seqlen_q) * f64::from(padded_dim(dims.head_dim_qk as i32));
    let rates = rates(widest);
    let micros = |flops_a_sm: f64| flops / (flops_a_sm * f64::from(num_sms));
    let two = (false, micros(rates.two_passes));
    let sums = sum_bytes / 1e6 * rates.micros_a_mb * 132.0 / f64::from(num_sms);
    let one = takes_one_pass(spec).is_ok().then(|| (true, micros(rates.one_pass) + sums));
    Candidates::of([two].into_iter().chain(one))
}

/// Size of a tile of 16-bit elements.
pub(crate) const fn tile_size(rows: i32, dim: i32) -> Size {
    Size::tile(2 * rows * padded_dim(dim))
}

/// The strides in use, except strides of 1 within a row.
fn strides(
    tensors: impl IntoIterator<Item = (&'static str, Strides, Shape)>,
) -> impl Iterator<Item = (&'static str, &'static str, i64)> {
    tensors.into_iter().flat_map(|(name, strides, shape)| {
        [
            ("batch", strides.batch, shape.batch),
            ("seq", strides.seq, shape.seq),
            ("head", strides.head, shape.head),
        ]
        .into_iter()
        .filter(|&(_, _, extent)| extent > 1)
        .map(move |(axis, stride, _)| (name, axis, stride))
    })
}

/// The first stride of a copied operand that is not a multiple of this many bytes. A column-major V is left out: it
/// is read by elements.
pub(crate) fn odd_stride(problem: &BwdProblem, bytes: i32) -> Option<(&'static str, &'static str, i64)> {
    let fwd = &problem.fwd;
    strides([
        ("q", fwd.strides.q, fwd.shape_q()),
        ("k", fwd.strides.k, fwd.shape_k()),
        ("v", fwd.strides.v, fwd.shape_v()),
        ("dout", problem.dout, fwd.shape_o()),
    ])
    .filter(|&(name, _, _)| name != "v" || fwd.layout.v == VLayout::RowMajor)
    .find(|&(_, _, stride)| stride.wrapping_mul(2) % i64::from(bytes) != 0)
}

/// Checks that the kernels compute this problem.
///
/// # Errors
/// The first fact that they do not support.
pub fn accepts(problem: &BwdProblem) -> Result<(), Refusal> {
    let fwd = &problem.fwd;
    fwd.refuse_mixed_layouts(NAME)?;
    fwd.refuse_cache_updates(NAME)?;
    takes_operands(problem).and_then(|()| takes_lengths(problem)).map_err(|reason| Refusal::new(NAME, reason))
}

/// Checks that Q, K, V and O are of one 16-bit type, and that rows are no wider than registers for the sums allow.
pub(crate) fn takes_operands(problem: &BwdProblem) -> Result<(), String> {
    let (types, dims) = (problem.fwd.dtypes, problem.fwd.dims);
    if !matches!(types.qk, DType::F16 | DType::Bf16) || types.v != types.qk || types.o != types.qk {
        return Err(format!(
            "backward: dtype_qk {}, dtype_v {}, dtype_o {} are not three times f16 or three times bf16",
            types.qk, types.v, types.o
        ));
    }
    for (field, dim) in [("head_dim_qk", dims.head_dim_qk), ("head_dim_v", dims.head_dim_v)] {
        if dim > 256 {
            return Err(format!("backward: {field} {dim} is larger than 256"));
        }
    }
    Ok(())
}

/// Checks that rows are few enough for 32-bit indices.
pub(crate) fn takes_lengths(problem: &BwdProblem) -> Result<(), String> {
    let dims = problem.fwd.dims;
    for (field, length) in [("seqlen_q", dims.seqlen_q), ("seqlen_k", dims.seqlen_k)] {
        if length >= 1 << 29 {
            return Err(format!("backward: {field} {length} is not below 2^29"));
        }
    }
    Ok(())
}

/// The launches' tiles on a device with these limits: dQ's first, or with `one_pass` the single tile of all three
/// gradients.
#[must_use]
pub fn choose_tiles(problem: &BwdProblem, spec: &BwdSpec, room: Room, one_pass: bool) -> Vec<Sm80BwdTile> {
    let widest = padded_dim(spec.fwd.head_dim_qk).max(padded_dim(spec.fwd.head_dim_v));
    // dK and dV of a warp's 16 keys need `head_dim / 2` registers each, which together with S and dP is too much
    // from 144 on.
    let sums: &[BwdSums] = if one_pass {
        &[BwdSums::All]
    } else if widest <= 128 {
        &[BwdSums::Dq, BwdSums::DkDv]
    } else {
        &[BwdSums::Dq, BwdSums::Dk, BwdSums::Dv]
    };
    let dbias = problem.dbias.map(|_| &BwdSums::DBias);
    let captured = (!problem.dcaptured.is_empty()).then_some(&BwdSums::Captured);
    sums.iter().chain(dbias).chain(captured).map(|&sums| choose_tile(problem, spec, room, sums)).collect()
}

fn choose_tile(problem: &BwdProblem, spec: &BwdSpec, room: Room, sums: BwdSums) -> Sm80BwdTile {
    let fwd = &problem.fwd;
    let widest = padded_dim(spec.fwd.head_dim_qk).max(padded_dim(spec.fwd.head_dim_v));
    // Modified scores need more registers.
    let modifies = spec.fwd.softcap
        || spec.fwd.bias != BiasKind::None
        || spec.fwd.dropout
        || spec.fwd.code != CodeKind::None;
    // dK and dV at once leave S and dP the registers of 32 queries above head dimension 64.
    let both = matches!(sums, BwdSums::DkDv | BwdSums::All);
    let columns = if widest <= 64 || widest <= 128 && !modifies && !both { 64 } else { 32 };
    let whole = |(_, _, stride): (&str, &str, i64)| stride % 8 == 0;
    let gradients = [
        ("dq", problem.dq, fwd.shape_q()),
        ("dk", problem.dk, fwd.shape_k()),
        ("dv", problem.dv, fwd.shape_v()),
    ];
    let dims = fwd.dims;
    let of = |(rows, stages): (i32, i32)| Sm80BwdTile {
        rows,
        columns,
        warps: rows / 16,
        stages,
        ctas: 1,
        fragments_ahead: 1,
        copy_bytes: [16, 8, 4].into_iter().find(|&bytes| odd_stride(problem, bytes).is_none()).unwrap_or(2),
        fast_softcap: fwd.score.softcap.is_some_and(|cap| (1e-3..=64.0).contains(&cap)),
        vector_store: problem.dtype_grad.size_bytes() == 2
            && dims.head_dim_qk.is_multiple_of(8)
            && dims.head_dim_v.is_multiple_of(8)
            && strides(gradients).all(whole),
        one_pass: sums == BwdSums::All,
        sums,
    };
    // Eight warps share the walked blocks. Two CTAs of four warps do not wait for each other, if the blocks of both
    // fit: on an H200 at D 128 this gives 184 to 207 TFLOP/s full and 173 to 191 causal at 4096; at D 64 151 to 161.
    let owned = if matches!(sums, BwdSums::Dq | BwdSums::DBias | BwdSums::Captured) {
        dims.seqlen_q
    } else {
        dims.seqlen_k
    };
    // A launch that sums dBias has no loop over blocks.
    let candidates: &[_] =
        if sums == BwdSums::DBias { &[(64, 1)] } else { &[(128, 2), (128, 1), (64, 2), (64, 1)] };
    let twice =
        Some(of((64, 2))).filter(|tile| room.ctas(tile.smem_bytes(spec)) >= 2 && sums != BwdSums::DBias);
    let one = || {
        let fitting = |tile: &Sm80BwdTile| tile.smem_bytes(spec) <= room.smem_bytes;
        candidates.iter().copied().filter(|&(rows, _)| rows == 64 || owned > 64).map(of).find(fitting)
    };
    let mut tile = twice.or_else(one).unwrap_or_else(|| of((64, 1)));
    if tile.warps == 4 && room.ctas(tile.smem_bytes(spec)) >= 2 {
        tile.ctas = 2;
    }
    tile
}

/// Number of CTAs of a launch; `None` if 2^31 or more.
#[must_use]
pub fn grid(problem: &BwdProblem, tile: &Sm80BwdTile) -> Option<u32> {
    let dims = problem.fwd.dims;
    let blocks_of = |rows: u32, size: i32| u64::from(rows).div_ceil(u64::from(size.unsigned_abs()));
    let (planes, blocks) = match tile.sums {
        BwdSums::Dq | BwdSums::Captured => {
            ([dims.batch, dims.num_heads_q], blocks_of(dims.seqlen_q, tile.rows))
        }
        BwdSums::DkDv | BwdSums::Dk | BwdSums::Dv | BwdSums::All => {
            ([dims.batch, dims.num_heads_kv], blocks_of(dims.seqlen_k, tile.rows))
        }
        BwdSums::DBias => {
            let planes = match problem.fwd.score.bias {
                Bias::Elementwise(bias) => {
                    let shape = problem.fwd.shape_bias(bias.broadcast);
                    [shape.batch, shape.head]
                }
                _ => [1, 1],
            };
            let keys = blocks_of(dims.seqlen_k, tile.columns);
            (planes, blocks_of(dims.seqlen_q, tile.rows).checked_mul(keys)?)
        }
    };
    ctas_of(planes, blocks)
}

/// Number of CTAs for this many blocks in each of the planes that two numbers count, such as heads; `None` if 2^31
/// or more.
pub(crate) fn ctas_of(planes: [u32; 2], blocks: u64) -> Option<u32> {
    let ctas = u64::from(planes[0]).checked_mul(planes[1].into())?.checked_mul(blocks)?;
    u32::try_from(ctas).ok().filter(|&ctas| ctas < 1 << 31)
}

/// A backward launch. Its only argument is [`BwdParams`](fmha_core::abi::BwdParams).
#[must_use]
pub fn main(spec: &BwdSpec, tile: &Sm80BwdTile) -> KernelSource {
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let call = format!(
        "static_assert(sizeof(sm80::bwd::Smem<kSpec, kTile>) == {}, \"Smem: host and device disagree\"); \
         sm80::bwd::main<kSpec, kTile>(p);",
        tile.smem_bytes(spec)
    );
    entry(&constants, "__launch_bounds__(sm80::bwd::num_threads(kTile), kTile.ctas)", &call)
}

/// The launch of a tile under masks as data, with [`MaskDataParams`](fmha_core::masks::MaskDataParams) as an
/// additional argument.
#[must_use]
pub fn masked_main(spec: &BwdSpec, tile: &Sm80BwdTile) -> KernelSource {
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: "fmha/sm80/bwd/masked.cuh",
        constants: &constants,
        bounds: "__launch_bounds__(sm80::bwd::num_threads(kTile), kTile.ctas)",
        params: "const __grid_constant__ BwdParams p, const __grid_constant__ MaskDataParams masks",
        call: "sm80::bwd::masked_main<kSpec, kTile>(p, masks);",
    };
    crate::source(entry.render(), || {
        let [host, memory] = host_headers();
        [host, memory, fmha_core::masks::header()]
    })
}

/// The launch that finishes a dQ summed in global memory: one CTA for each block of queries of a head.
#[must_use]
pub fn finish_dq(spec: &BwdSpec, tile: &Sm80BwdTile) -> KernelSource {
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let bounds = format!("__launch_bounds__({FINISH_THREADS})");
    entry(&constants, &bounds, "finish_dq<kSpec, sm80::bwd::DqShape<kSpec, kTile>>(p);")
}

/// The launch that sums dSink, with one CTA for each head.
#[must_use]
pub fn dsink(spec: &BwdSpec) -> KernelSource {
    entry(&[("kSpec", spec)], &format!("__launch_bounds__({DSINK_THREADS})"), "sm80::bwd::dsink<kSpec>(p);")
}

fn entry(constants: &[(&str, &dyn Literal)], bounds: &str, call: &str) -> KernelSource {
    let entry =
        Entry { include: HEADER, constants, bounds, params: "const __grid_constant__ BwdParams p", call };
    crate::source(entry.render(), host_headers)
}

/// `fmha/sm80_bwd_host.h`, with the types that this file shares with the device, and `fmha/sm80_bwd_memory.h`.
fn host_headers() -> [Header; 2] {
    let functions = within("sm80::bwd", &[sm80::rows_text(), tile_text()]);
    let definitions = [BwdSums::c_definition(), Sm80BwdTile::c_definition(), functions];
    let includes = ["fmha/num.h", "fmha/params.h"];
    [
        Header::shared("fmha/sm80_bwd_host.h", "fmha", &includes, &definitions),
        Header::shared("fmha/sm80_bwd_memory.h", "fmha::sm80::bwd", &[], &[memory_text()]),
    ]
}
