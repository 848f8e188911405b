//! `cdna_fwd`: forward on MFMA.

use fmha_core::fields::{FieldValue as _, Fields as _, Takes};
use fmha_core::source::{Entry, KernelSource};
use fmha_core::{
    DType, FwdProblem, KvLayout, MaskKind, PlanOptions, Refusal, Strides, VLayout, abi_enum, abi_spec,
};

use crate::CDNA;
use fmha_gpu::Operand;

use crate::arch::Arch;
use crate::device::{Device, needs_mfma, refuse};
use crate::forward::recipe::Whole;
use crate::forward::{CdnaSpec, MAX_HEAD_DIM, OutputKind, alignment, takes};
use crate::order::{Tiles, Why};
use crate::paths::{LoadPath, StorePath};

/// The kernel's name in plans and refusals.
pub(crate) const NAME: &str = "cdna_fwd";
/// Header that the kernel's entry includes.
pub(crate) const HEADER: &str = "fmha/cdna/fwd.h";

/// Rows of a matrix instruction, hence queries of a wave.
const WAVE_ROWS: i32 = 32;
const WAVE_THREADS: i32 = 64;
/// Queries of the smallest workgroup that the plan chooses: one wave for each SIMD.
const MIN_BLOCK_M: i32 = 128;
const DWORD: i64 = 4;
/// Bytes of the widest load of a lane.
const CHUNK: u64 = 16;
/// Number of tiles of K, and of V, in LDS.
const STAGES: i64 = 2;

/// How tiles are assigned to workgroups. A tile is `block_m` queries of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum TileOrder {
    /// Each workgroup has one tile; the hardware starts workgroups in the order of the tiles.
    Single,
    /// A workgroup processes several tiles at a fixed stride, in every second round in reverse order.
    Static,
}

abi_enum!(TileOrder { Single, Static });

abi_spec! {
    /// How the CDNA forward kernel computes.
    pub struct CdnaTile {
        /// Queries of a workgroup: 32 a wave.
        pub block_m: i32 = Takes::multiples(32, 32, 512).tuned_over(&[64, 128, 256]),
        /// Keys of a step of the main loop.
        pub block_n: i32 = Takes::among(&[32, 64, 128]).tuned(),
        /// How Q, K and V are read.
        pub load: LoadPath = Takes::nothing(),
        /// How O is written.
        pub store: StorePath = Takes::nothing(),
        /// Number of dies to which the hardware assigns workgroups round-robin; tiles of one head are kept on one
        /// die.
        pub num_xcds: i32 = Takes::nothing(),
        /// Whether workgroups have one tile each or several.
        pub order: TileOrder = Takes::all().tuned(),
    }
}

impl CdnaTile {
    /// A tile with impossible values, into which named fields are parsed.
    const UNSET: Self = Self {
        block_m: 0,
        block_n: 0,
        load: LoadPath::Element,
        store: StorePath::Element,
        num_xcds: 1,
        order: TileOrder::Single,
    };
}

/// The kernel, with all that was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cdna {
    spec: CdnaSpec,
    /// Tile of the kernel.
    pub(crate) tile: CdnaTile,
    /// Why this order of tiles was chosen.
    why: Why,
    /// Number of workgroups that process several tiles each; `None`: as many as the device holds.
    workgroups: Option<u32>,
}

/// Checks that this kernel computes `problem` on `arch`, and chooses its tile.
///
/// # Errors
/// The field that it does not support, and its value.
pub(crate) fn accept(problem: &FwdProblem, device: Device, options: &PlanOptions) -> Result<Cdna, Refusal> {
    let arch = device.arch;
    needs_mfma(arch, NAME)?;
    takes(problem, arch, NAME)?;
    let asked = Asked::of(options)?;
    let mut tile = tile(problem, arch, &asked)?;
    let spec = spec(problem, tile.load);
    let tiles = num_tiles(problem, &tile);
    let most = i64::from(u32::MAX) / i64::from(num_threads(&tile));
    if tiles > most {
        refuse!(
            NAME,
            "seqlen_q, num_heads_q and batch make {tiles} tiles of {} queries, more than {most}",
            tile.block_m
        );
    }
    let why;
    (tile.order, why) = match asked.order {
        Some(order) => (order, Why::Asked),
        None if spec.masks => (TileOrder::Single, Why::MasksAsData),
        None => {
            let (block_m, block_n, num) = (tile.block_m, tile.block_n, tiles.unsigned_abs());
            let places = device.num_compute_units * expected_per_compute_unit(&spec, &tile, arch);
            Tiles { problem, block_m, block_n, num }.order(tile.num_xcds.unsigned_abs().into(), places.into())
        }
    };
    if let (Some(workgroups), TileOrder::Single) = (asked.workgroups, tile.order) {
        refuse!(NAME, "tile workgroups={workgroups} is a stride's, and order is single");
    }
    Ok(Cdna { spec, tile, why, workgroups: asked.workgroups })
}

/// `PlanOptions::tile` after parsing: the tile's fields, and those of the launch, that the user has set.
#[derive(Default)]
struct Asked {
    block_m: Option<i32>,
    block_n: Option<i32>,
    order: Option<TileOrder>,
    workgroups: Option<u32>,
}

impl Asked {
    fn of(options: &PlanOptions) -> Result<Self, Refusal> {
        let mut all = Self::default();
        let refusal = |text: String| Refusal::new(NAME, format!("tile {text}"));
        for (name, value) in &options.tile {
            if name == "workgroups" {
                let asked = value.parse().ok().filter(|&asked| asked > 0);
                let wrong = || refusal(format!("workgroups={value} is not a number from 1"));
                all.workgroups = Some(asked.ok_or_else(wrong)?);
                continue;
            }
            let mut tile = CdnaTile::UNSET;
            tile.set_field(name, value).map_err(refusal)?;
            match name.as_str() {
                "block_m" => all.block_m = Some(tile.block_m),
                "block_n" => all.block_n = Some(tile.block_n),
                _ => all.order = Some(tile.order),
            }
        }
        Ok(all)
    }
}

/// Compile-time spec of the kernel. Facts that its main loop does not need are run-time parameters: exact head
/// dims, O's type, batch or group mode, LSE, sinks, the bounds of a band. One kernel serves all modifiers, masks
/// and sink columns of each padded row length (64, 128, 192 for Q and K alone, 256); so does one for rows that no
/// wide load can read.
pub(crate) fn spec(problem: &FwdProblem, load: LoadPath) -> CdnaSpec {
    let by_element = load == LoadPath::Element;
    let dropout = by_element || problem.drops() || problem.dropout.write_keep_mask;
    let modifies = dropout || crate::forward::modifies_score(problem);
    let masks = !problem.masks.is_empty();
    let banded = modifies || masks || problem.mask.kind() != MaskKind::Full;
    let padded = |dim: u32, wide: &[i32]| {
        let whole = dim.max(1).next_multiple_of(WAVE_ROWS.unsigned_abs()).cast_signed();
        wide.iter().copied().find(|&wide| modifies && whole <= wide).unwrap_or(whole)
    };
    CdnaSpec {
        dtype_qk: problem.dtypes.qk,
        dtype_v: problem.dtypes.v,
        output: match problem.dtypes.o.is_fp8() {
            _ if by_element => OutputKind::Any,
            true => OutputKind::Fp8,
            false => OutputKind::Wide,
        },
        head_dim_qk: padded(problem.dims.head_dim_qk, &[64, 128, 192, 256]),
        head_dim_v: padded(problem.dims.head_dim_v, &[64, 128, 256]),
        v_layout: if by_element { VLayout::RowMajor } else { problem.layout.v },
        mask: if banded { MaskKind::Band } else { MaskKind::Full },
        // Without a lower bound no key is hidden that a sink column could show.
        sink_columns: modifies
            || masks
            || problem.mask.kind() == MaskKind::Band && problem.mask.sink_columns > 0,
        modifies,
        dropout,
        masks,
    }
}

fn tile(problem: &FwdProblem, arch: Arch, asked: &Asked) -> Result<CdnaTile, Refusal> {
    let block_m = asked.block_m.unwrap_or(MIN_BLOCK_M);
    // The widest row of any kernel for the problem; the final row length depends on the tile.
    let widest = spec(problem, LoadPath::Element);
    let block_n = asked.block_n.unwrap_or_else(|| default_block_n(&widest, arch));
    let mut tile = CdnaTile {
        block_m,
        block_n,
        load: LoadPath::Dwords,
        store: if stores_runs(problem) { StorePath::Vector } else { StorePath::Element },
        num_xcds: arch.num_xcds(),
        order: TileOrder::Single,
    };
    tile.load = match (loads_dwords(problem, &tile), loads_chunks(problem)) {
        (false, _) => LoadPath::Element,
        (true, false) => LoadPath::Dwords,
        (true, true) => LoadPath::Chunks,
    };
    tile.store = if tile.load == LoadPath::Element { StorePath::Element } else { tile.store };
    let spec = spec(problem, tile.load);
    let lds = lds_bytes(&spec, &tile);
    if lds > i64::from(arch.lds_bytes()) {
        refuse!(NAME, "tile block_n={block_n} takes {lds} bytes of LDS, more than {}", arch.lds_bytes());
    }
    tile.block_m = asked.block_m.unwrap_or_else(|| default_block_m(&spec, problem));
    Ok(tile)
}

/// Eight waves share the tiles of K and V: two waves per SIMD, and each wave has half of the loads and of their
/// registers. Four waves are used for short rows of which two workgroups fit, for few queries, and where a wave
/// needs more than half of a SIMD's registers.
fn default_block_m(spec: &CdnaSpec, problem: &FwdProblem) -> i32 {
    let short = spec.head_dim_qk.max(spec.head_dim_v) <= 64;
    let few_queries = problem.dims.seqlen_q <= MIN_BLOCK_M as u32;
    let wide = spec.head_dim_qk.max(spec.head_dim_v) > 128;
    // Modified scores, masks as data and a column-major V need registers that eight waves do not leave.
    let busy = spec.modifies || spec.masks || spec.v_layout == VLayout::ColMajor;
    if short || few_queries || wide || busy { MIN_BLOCK_M } else { 2 * MIN_BLOCK_M }
}

/// The largest number of keys per step whose tiles fit the LDS and whose accumulators fit the registers.
fn default_block_n(spec: &CdnaSpec, arch: Arch) -> i32 {
    let wide = spec.head_dim_qk.max(spec.head_dim_v) > 128;
    if !wide && STAGES * stage_bytes(spec, 64) <= i64::from(arch.lds_bytes()) { 64 } else { 32 }
}

/// Bytes of a tile of K and one of V in LDS, without gaps.
fn stage_bytes(spec: &CdnaSpec, block_n: i32) -> i64 {
    let row = |dim: i32, dtype: DType| i64::from(dim) * dtype.size_bytes().cast_signed();
    i64::from(block_n) * (row(spec.head_dim_qk, spec.dtype_qk) + row(spec.head_dim_v, spec.dtype_v))
}

/// Bytes of LDS of a workgroup.
fn lds_bytes(spec: &CdnaSpec, tile: &CdnaTile) -> i64 {
    let stages = if spec.dropout { 1 } else { STAGES };
    let block_of_o = WAVE_ROWS * WAVE_ROWS * 4;
    (stages * stage_bytes(spec, tile.block_n)).max((tile.block_m / WAVE_ROWS * block_of_o).into())
}

/// Whether every row of Q, K and V is whole chunks long.
fn loads_chunks(problem: &FwdProblem) -> bool {
    let qk_bytes = u64::from(problem.dims.head_dim_qk) * problem.dtypes.qk.size_bytes();
    let v_bytes = u64::from(problem.dims.head_dim_v) * problem.dtypes.v.size_bytes();
    qk_bytes.is_multiple_of(CHUNK) && (problem.layout.v == VLayout::ColMajor || v_bytes.is_multiple_of(CHUNK))
}

/// Whether every row of Q, K and V starts and ends on a dword, and a tile's rows lie within 2^28 bytes: a descriptor
/// reaches several tiles.
fn loads_dwords(problem: &FwdProblem, tile: &CdnaTile) -> bool {
    let (q, k, v) = (problem.shape_q(), problem.shape_k(), problem.shape_v());
    let (qk_size, v_size) = (problem.dtypes.qk.size_bytes() as i64, problem.dtypes.v.size_bytes() as i64);
    let fits = |strides: Strides, rows: i64, row_stride: i64, row_bytes: i64, size: i64| {
        [strides.batch * size, strides.head * size, row_stride * size, row_bytes]
            .iter()
            .all(|n| n % DWORD == 0)
            && (rows + 1).saturating_mul(row_stride * size) < 1 << 28
    };
    let qk_bytes = i64::from(q.dim) * qk_size;
    let v_fits = match problem.layout.v {
        VLayout::RowMajor => fits(
            problem.strides.v,
            tile.block_n.into(),
            problem.strides.v.seq,
            i64::from(v.dim) * v_size,
            v_size,
        ),
        // A packed sequence may start at any key, and so at any byte of a column-major row.
        VLayout::ColMajor => {
            problem.layout.kv == KvLayout::Strided
                && fits(problem.strides.v, MAX_HEAD_DIM.into(), problem.strides.v.dim, DWORD, v_size)
        }
    };
    let live = |strides: Strides, shape: fmha_core::Shape| Strides {
        batch: if shape.batch > 1 { strides.batch } else { 0 },
        head: if shape.head > 1 { strides.head } else { 0 },
        ..strides
    };
    fits(live(problem.strides.q, q), tile.block_m.into(), problem.strides.q.seq, qk_bytes, qk_size)
        && fits(live(problem.strides.k, k), tile.block_n.into(), problem.strides.k.seq, qk_bytes, qk_size)
        && v_fits
}

/// Whether every run of four elements of O is aligned to its size.
pub(crate) fn stores_runs(problem: &FwdProblem) -> bool {
    let (o, shape) = (problem.strides.o, problem.shape_o());
    problem.dims.head_dim_v.is_multiple_of(4)
        && (shape.batch <= 1 || o.batch % 4 == 0)
        && (shape.head <= 1 || o.head % 4 == 0)
        && (shape.seq <= 1 || o.seq % 4 == 0)
}

/// Threads of a workgroup.
#[must_use]
pub(crate) fn num_threads(tile: &CdnaTile) -> i32 {
    tile.block_m / WAVE_ROWS * WAVE_THREADS
}

/// Number of tiles, each with `block_m` queries of a head.
fn num_tiles(problem: &FwdProblem, tile: &CdnaTile) -> i64 {
    let m_blocks = i64::from(problem.dims.seqlen_q).div_euclid(i64::from(tile.block_m))
        + i64::from(!problem.dims.seqlen_q.is_multiple_of(tile.block_m as u32));
    m_blocks.saturating_mul(i64::from(problem.dims.num_heads_q) * i64::from(problem.dims.batch))
}

/// Number of workgroups that a compute unit is expected to hold, before the compiler has reported a workgroup's
/// resources.
fn expected_per_compute_unit(spec: &CdnaSpec, tile: &CdnaTile, arch: Arch) -> u32 {
    let short = spec.head_dim_qk.max(spec.head_dim_v) <= 64;
    let two_fit = 2 * lds_bytes(spec, tile) <= i64::from(arch.lds_bytes());
    if short && two_fit && tile.block_m <= MIN_BLOCK_M { 2 } else { 1 }
}

/// Number of waves per SIMD for which the compiler must leave registers: those of a single workgroup.
fn waves_per_simd(tile: &CdnaTile) -> i32 {
    const SIMDS: i32 = 4;
    (tile.block_m / WAVE_ROWS + SIMDS - 1) / SIMDS
}

fn source(spec: &CdnaSpec, tile: &CdnaTile) -> KernelSource {
    let threads = num_threads(tile);
    let waves = waves_per_simd(tile);
    let entry = Entry {
        include: HEADER,
        constants: &[("kSpec", spec), ("kTile", tile)],
        bounds: &format!(
            "__attribute__((amdgpu_flat_work_group_size({threads}, {threads}), amdgpu_waves_per_eu({waves}, {waves})))"
        ),
        params: crate::forward::entry_params(spec),
        call: &format!("cdna::fwd<kSpec, kTile>({});", crate::forward::entry_argument(spec)),
    };
    crate::source(&entry, CDNA)
}

impl Whole for Cdna {
    const NAME: &'static str = NAME;
    const WIDENED: &'static str = "cdna_widened";
    const HEADER: &'static str = HEADER;
    const IS_RDNA: bool = false;

    type Tile = CdnaTile;

    fn accept(problem: &FwdProblem, device: Device, options: &PlanOptions) -> Result<Self, Refusal> {
        accept(problem, device, options)
    }

    fn tile(&self) -> CdnaTile {
        self.tile
    }

    fn block(&self) -> [i32; 2] {
        [self.tile.block_m, self.tile.block_n]
    }

    fn load(&self) -> LoadPath {
        self.tile.load
    }

    fn source(&self) -> KernelSource {
        source(&self.spec, &self.tile)
    }

    fn num_threads(&self) -> u32 {
        num_threads(&self.tile).unsigned_abs()
    }

    fn num_tiles(&self, problem: &FwdProblem) -> u64 {
        num_tiles(problem, &self.tile).unsigned_abs()
    }

    fn workgroups(&self, tiles: u64, places: u64) -> u64 {
        match self.tile.order {
            TileOrder::Single => tiles,
            TileOrder::Static => tiles.min(self.workgroups.map_or(places, u64::from)),
        }
    }

    fn alignment(&self, problem: &FwdProblem, operand: Operand) -> u64 {
        let load = if self.tile.load == LoadPath::Element { 1 } else { DWORD.unsigned_abs() };
        alignment(problem, operand, (load, self.tile.store))
    }

    fn for_any_address(&self, problem: &FwdProblem) -> Option<Self> {
        let tile = CdnaTile { load: LoadPath::Element, store: StorePath::Element, ..self.tile };
        (tile != self.tile).then(|| Self { tile, spec: spec(problem, tile.load), ..*self })
    }

    fn details(&self) -> Vec<(&'static str, String)> {
        let Self { spec, tile, why, .. } = self;
        vec![
            ("tile", format!("block_m {} block_n {}", tile.block_m, tile.block_n)),
            ("order", format!("{} ({why})", tile.order.name())),
            ("loads", format!("{:?}", tile.load)),
            ("stores", format!("{:?}", tile.store)),
            ("lds", format!("{} bytes", lds_bytes(spec, tile))),
            ("matrix type", format!("{} x {}, then {}", spec.dtype_qk, spec.dtype_qk, spec.dtype_v)),
        ]
    }
}
